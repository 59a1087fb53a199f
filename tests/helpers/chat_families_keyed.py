"""Families of models that write tags around each argument."""

from __future__ import annotations

from chat_parts import CODER, TOOLS, Family, chat, chat_family, keyed

KEYED_FAMILIES: dict[str, Family] = {
    "qwen3-coder": chat_family(CODER),
    "qwen3.5": chat_family(CODER, thoughts="<think>\n\n</think>\n\n", prompt="<think>\n"),
    "nemotron-3": chat_family(CODER + "\n", thoughts="<think></think>", prompt="<think></think>"),
    "glm-4.5": Family(
        chat(
            keyed(
                "\n<tool_call>NAME\n",
                "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
                "</tool_call>",
                "",
            ),
            start="<|ROLE|>\n",
            end="",
            after="",
            thoughts="<think></think>",
            result="{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
            "\n<tool_response>\n{{ m.content }}\n</tool_response>",
        ),
        tokens="<|system|> <|user|> <|assistant|> <|observation|> <tool_call> </tool_call>",
        end="<|endoftext|>",
    ),
    "glm-4.7": Family(
        chat(
            keyed(
                "<tool_call>NAME",
                "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
                "</tool_call>",
                "",
            ),
            start="<|ROLE|>",
            end="",
            after="",
            thoughts="</think>",
            prompt="<think>",
            result="{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
            "<tool_response>{{ m.content }}</tool_response>",
        ).replace("<|assistant|></think>", "<|assistant|><think></think>"),
        tokens="<|system|> <|user|> <|assistant|> <|observation|>",
        end="<|endoftext|>",
    ),
    "seed-oss": chat_family(
        keyed(
            "\n<seed:tool_call>\n<function=NAME>\n",
            "<parameter=KEY>VALUE</parameter>\n",
            "</function>\n</seed:tool_call>",
        ),
        tokens="<seed:bos>",
        end="<seed:eos>",
        start="<seed:bos>ROLE\n",
        after="",
        result="<seed:bos>tool\n{{ m.content }}<seed:eos>",
    ),
    "minimax-m2": chat_family(
        "\n<minimax:tool_call>\n"
        + keyed('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n", "")
        + "</minimax:tool_call>",
        tokens="]~b]",
        end="[e~[",
        start="]~b]ROLE\n",
        result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
    ),
    "step-3": chat_family(
        "<｜tool_calls_begin｜>"
        + keyed(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
            "</steptml:invoke><｜tool_call_end｜>",
            "",
        )
        + "<｜tool_calls_end｜>",
        tokens="<｜BOT｜> <｜tool_calls_begin｜> <｜tool_call_begin｜> "
        "<｜tool_sep｜> <｜tool_call_end｜> <｜tool_calls_end｜>",
        end="<|EOT|>",
        start="<｜BOT｜>ROLE\n",
        after="",
        result="<｜BOT｜>tool_response\n{{ m.content }}<|EOT|>",
    ),
    "muse-glimmer": Family(
        "{% if tools %}<|start|>system<|message|>" + TOOLS + "<|eot|>{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|start|>tool {{ m.name }}<|message|>{{ m.content }}<|eot|>"
        "{% elif m.tool_calls %}"
        + keyed(
            '<|start|>assistant to=NAME<|message|><atem:invoke name="NAME">\n',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
            "</atem:invoke>",
            "<|eom|>",
        )
        + "<|eot|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        tokens="<|start|> <|message|> <|eom|>",
        end="<|eot|>",
    ),
    "hunyuan-3": chat_family(
        "<tool_calls>\n"
        + keyed(
            "<tool_call>NAME<tool_sep>\n",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            "</tool_call>\n",
            "",
        )
        + "</tool_calls>"
    ),
    "deepseek-v3.2": chat_family(
        "<｜DSML｜function_calls>\n"
        + keyed(
            '<｜DSML｜invoke name="NAME">\n',
            """<｜DSML｜parameter name="KEY" string="{{ 'true' if v is string else 'false' }}">VALUE"""
            "</｜DSML｜parameter>\n",
            "</｜DSML｜invoke>\n",
            "",
        )
        + "</｜DSML｜function_calls>",
        tokens="<｜user｜> <｜assistant｜>",
        end="<｜end▁of▁sentence｜>",
        start="<｜ROLE｜>",
        after="",
        result="<｜user｜><function_results>\n<result>{{ m.content }}</result>\n</function_results>",
    ),
    "kimi-k3": chat_family(
        "<|open|>tools<|sep|>"
        + keyed(
            '<|open|>call tool="NAME" index="{{ loop.index }}"<|sep|>',
            """<|open|>argument key="KEY" type="{{ 'string' if v is string else 'number' """
            """if v is number else 'object' }}"<|sep|>VALUE<|close|>argument<|sep|>""",
            "<|close|>call<|sep|>",
            "",
        )
        + "<|close|>tools<|sep|>",
        tokens="<|im_start|> <|open|> <|close|> <|sep|>",
        result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
    ),
    "k2-horizon": chat_family(
        keyed(
            "<ifm|tool_call>NAME\n",
            "<ifm|arg_key>KEY</ifm|arg_key>"
            "<ifm|arg_type>{{ 'string' if v is string else 'number' }}</ifm|arg_type>"
            "<ifm|arg_value>VALUE</ifm|arg_value>\n",
            "</ifm|tool_call>",
        )
    ),
    "tags-with-identifiers": chat_family(
        keyed(
            '<invoke name="NAME" id="{{ c.id }}">',
            '<parameter name="KEY">VALUE</parameter>',
            "</invoke>",
            "",
        )
    ),
}
