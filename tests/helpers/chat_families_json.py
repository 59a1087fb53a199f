"""Families of models whose calls are JSON with the name in it."""

from __future__ import annotations

from chat_parts import (
    COHERE,
    EACH,
    HERMES,
    IM,
    LLAMA,
    LLAMA_RESULT,
    LLAMA_TURN,
    MISTRAL,
    Family,
    chat,
    listed,
)

JSON_FAMILIES: dict[str, Family] = {
    # Hermes: JSON between tags.
    "qwen2.5": Family(chat(HERMES), IM, "<|im_end|>"),
    "qwen3": Family(chat(HERMES, thoughts="<think>\n\n</think>\n\n"), IM, "<|im_end|>"),
    "qwen3-thinking": Family(
        chat(HERMES, thoughts="<think>\n\n</think>\n\n", prompt="<think>\n"), IM, "<|im_end|>"
    ),
    "hermes-3": Family(
        chat(
            HERMES, result="<|im_start|>tool\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        ),
        IM,
        "<|im_end|>",
    ),
    "smollm3": Family(
        chat(
            HERMES, result="<|im_start|>user\n{{ m.content }}<|im_end|>\n", thoughts="<think>\n\n</think>\n"
        ),
        IM,
        "<|im_end|>",
    ),
    "granite-4": Family(
        chat(
            HERMES,
            start="<|start_of_role|>ROLE<|end_of_role|>",
            end="<|end_of_text|>",
            result="<|start_of_role|>user<|end_of_role|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
            "<|end_of_text|>\n",
        ),
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|end_of_text|>",
    ),
    "exaone-4": Family(
        chat(
            HERMES,
            start="[|ROLE|]\n",
            end="[|endofturn|]",
            result="[|tool|]\n<tool_result>{{ m.content }}</tool_result>[|endofturn|]\n",
        ),
        ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]"),
        "[|endofturn|]",
    ),
    "ernie-4.5": Family(
        chat(
            HERMES + "\n",
            start="<|im_start|>ROLE\n\n",
            result="<|im_start|>tool\n<tool_output>\n{{ m.content }}\n</tool_output>\n<|im_end|>\n",
        ),
        IM,
        "<|im_end|>",
    ),
    "longcat": Family(
        chat(
            HERMES.replace("tool_call>", "longcat_tool_call>"),
            start="[ROLE]\n",
            end="</longcat_s>",
            after="",
            result="TOOL:{{ m.content }}</longcat_s>",
        ),
        (),
        "</longcat_s>",
    ),
    # Lists of JSON objects, and single ones.
    "granite-3": Family(
        chat(
            listed("<|tool_call|>", ""),
            start="<|start_of_role|>ROLE<|end_of_role|>",
            end="<|end_of_text|>",
            result="<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        ),
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "<|end_of_text|>",
    ),
    "mistral-0.3": Family(
        MISTRAL.replace(
            "CALLS",
            "[TOOL_CALLS] [" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
            '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
        ),
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
    ),
    "jamba": Family(
        chat(
            "<tool_calls>[\n" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
            "{% if not loop.last %},{% endif %}\n{% endfor %}]</tool_calls>",
            start="<|bom|><|ROLE|>",
            end="<|eom|>",
            after="",
            result="<|bom|><|tool|>{{ m.content }}<|eom|>",
        ),
        ("<|bom|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        "<|eom|>",
    ),
    "hunyuan-a13b": Family(
        chat(
            listed("<tool_calls>", "</tool_calls>"),
            start="<|startoftext|>ROLE:",
            end="<|eos|>",
            after="",
            result="<|startoftext|>user:<tool_response>{{ m.content }}</tool_response><|extra_0|>",
        ),
        ("<|startoftext|>", "<|extra_0|>"),
        "<|eos|>",
    ),
    "minimax-m1": Family(
        chat(
            "<tool_calls>\n" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
            "{% endfor %}</tool_calls>",
            start="<beginning_of_sentence>ROLE\n",
            end="<end_of_sentence>",
            result="<beginning_of_sentence>tool name=tools\n{{ m.content }}<end_of_sentence>\n",
        ),
        ("<beginning_of_sentence>",),
        "<end_of_sentence>",
    ),
    "nemotron-nano": Family(
        chat(
            listed("<TOOLCALL>", "</TOOLCALL>"),
            start="<SPECIAL_10>ROLE\n",
            end="<SPECIAL_12>",
            result="<SPECIAL_10>user\n<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE><SPECIAL_12>\n",
        ),
        ("<SPECIAL_10>",),
        "<SPECIAL_12>",
    ),
    "command-a": Family(
        chat(
            "<|START_THINKING|>-<|END_THINKING|>"
            + listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
            start="<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>",
            end="<|END_OF_TURN_TOKEN|>",
            after="",
            system="SYSTEM",
            assistant="CHATBOT",
            result="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}"
            "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
        ),
        COHERE,
        "<|END_OF_TURN_TOKEN|>",
    ),
    "internlm-2.5": Family(
        chat(
            EACH + '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": '
            "{{ f.arguments | tojson }}}<|action_end|>\n{% endfor %}",
            result="<|im_start|>environment name=<|plugin|>\n{{ m.content }}<|im_end|>\n",
        ),
        ("<|im_start|>", "<|action_start|>", "<|action_end|>", "<|plugin|>"),
        "<|im_end|>",
    ),
    "apertus": Family(
        chat(
            "<|tools_prefix|>[" + EACH + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
            "{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_suffix|>",
            start="<|ROLE_start|>",
            end="<|end|>",
            after="",
            result="[{{ m.content }}]",
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|assistant_start|>"),
        "<|end|>",
    ),
    "llama-3.1": Family(
        chat(
            "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
            '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": '
            "{{ f.arguments | tojson }}}",
            start=LLAMA_TURN,
            end="<|eot_id|>",
            after="",
            result=LLAMA_RESULT,
        ),
        LLAMA,
        "<|eot_id|>",
    ),
    "llama-3.1-ipython": Family(
        chat(
            '<|python_tag|>{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": '
            "{{ f.arguments | tojson }}}",
            start=LLAMA_TURN,
            end="<|eot_id|>",
            after="",
            call_end="<|eom_id|>",
            result=LLAMA_RESULT,
        ),
        LLAMA,
        "<|eot_id|>",
    ),
    "xlam": Family(
        chat(
            listed("", ""),
            start=LLAMA_TURN,
            end="<|eot_id|>",
            after="",
            result=LLAMA_RESULT,
        ),
        LLAMA,
        "<|eot_id|>",
    ),
}
