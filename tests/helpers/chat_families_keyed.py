"""Families of models that write tags around each argument."""

from __future__ import annotations

from chat_parts import CODER, IM, TOOLS, Family, chat, keyed

KEYED_FAMILIES: dict[str, Family] = {
    "qwen3-coder": Family(chat(CODER), IM, "<|im_end|>"),
    "qwen3.5": Family(chat(CODER, thoughts="<think>\n\n</think>\n\n", prompt="<think>\n"), IM, "<|im_end|>"),
    "nemotron-3": Family(
        chat(CODER + "\n", thoughts="<think></think>", prompt="<think></think>"), IM, "<|im_end|>"
    ),
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
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>"),
        "<|endoftext|>",
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
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
    ),
    "seed-oss": Family(
        chat(
            keyed(
                "\n<seed:tool_call>\n<function=NAME>\n",
                "<parameter=KEY>VALUE</parameter>\n",
                "</function>\n</seed:tool_call>",
            ),
            start="<seed:bos>ROLE\n",
            end="<seed:eos>",
            after="",
            result="<seed:bos>tool\n{{ m.content }}<seed:eos>",
        ),
        ("<seed:bos>",),
        "<seed:eos>",
    ),
    "minimax-m2": Family(
        chat(
            "\n<minimax:tool_call>\n"
            + keyed('<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n", "")
            + "</minimax:tool_call>",
            start="]~b]ROLE\n",
            end="[e~[",
            result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
        ),
        ("]~b]",),
        "[e~[",
    ),
    "step-3": Family(
        chat(
            "<｜tool_calls_begin｜>"
            + keyed(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
                '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
                "</steptml:invoke><｜tool_call_end｜>",
                "",
            )
            + "<｜tool_calls_end｜>",
            start="<｜BOT｜>ROLE\n",
            end="<|EOT|>",
            after="",
            result="<｜BOT｜>tool_response\n{{ m.content }}<|EOT|>",
        ),
        (
            "<｜BOT｜>",
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
        "<|EOT|>",
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
        ("<|start|>", "<|message|>", "<|eom|>"),
        "<|eot|>",
    ),
    "hunyuan-3": Family(
        chat(
            "<tool_calls>\n"
            + keyed(
                "<tool_call>NAME<tool_sep>\n",
                "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
                "</tool_call>\n",
                "",
            )
            + "</tool_calls>",
        ),
        IM,
        "<|im_end|>",
    ),
    "deepseek-v3.2": Family(
        chat(
            "<｜DSML｜function_calls>\n"
            + keyed(
                '<｜DSML｜invoke name="NAME">\n',
                """<｜DSML｜parameter name="KEY" string="{{ 'true' if v is string else 'false' }}">VALUE"""
                "</｜DSML｜parameter>\n",
                "</｜DSML｜invoke>\n",
                "",
            )
            + "</｜DSML｜function_calls>",
            start="<｜ROLE｜>",
            end="<｜end▁of▁sentence｜>",
            after="",
            result="<｜user｜><function_results>\n<result>{{ m.content }}</result>\n</function_results>",
        ),
        ("<｜user｜>", "<｜assistant｜>"),
        "<｜end▁of▁sentence｜>",
    ),
    "kimi-k3": Family(
        chat(
            "<|open|>tools<|sep|>"
            + keyed(
                '<|open|>call tool="NAME" index="{{ loop.index }}"<|sep|>',
                """<|open|>argument key="KEY" type="{{ 'string' if v is string else 'number' """
                """if v is number else 'object' }}"<|sep|>VALUE<|close|>argument<|sep|>""",
                "<|close|>call<|sep|>",
                "",
            )
            + "<|close|>tools<|sep|>",
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        ),
        ("<|im_start|>", "<|open|>", "<|close|>", "<|sep|>"),
        "<|im_end|>",
    ),
    "k2-horizon": Family(
        chat(
            keyed(
                "<ifm|tool_call>NAME\n",
                "<ifm|arg_key>KEY</ifm|arg_key>"
                "<ifm|arg_type>{{ 'string' if v is string else 'number' }}</ifm|arg_type>"
                "<ifm|arg_value>VALUE</ifm|arg_value>\n",
                "</ifm|tool_call>",
            ),
        ),
        IM,
        "<|im_end|>",
    ),
    "tags-with-identifiers": Family(
        chat(
            keyed(
                '<invoke name="NAME" id="{{ c.id }}">',
                '<parameter name="KEY">VALUE</parameter>',
                "</invoke>",
                "",
            ),
        ),
        IM,
        "<|im_end|>",
    ),
}
