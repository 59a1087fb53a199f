"""Families of models whose calls are JSON with the name in it."""

from __future__ import annotations

from chat_parts import (
    COHERE,
    EACH,
    HERMES,
    LLAMA,
    LLAMA_RESULT,
    LLAMA_TURN,
    MISTRAL,
    Family,
    chat_family,
    listed,
)

JSON_FAMILIES: dict[str, Family] = {
    # Hermes: JSON between tags.
    "qwen2.5": chat_family(HERMES),
    "qwen3": chat_family(HERMES, thoughts="<think>\n\n</think>\n\n"),
    "qwen3-thinking": chat_family(HERMES, thoughts="<think>\n\n</think>\n\n", prompt="<think>\n"),
    "hermes-3": chat_family(
        HERMES, result="<|im_start|>tool\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    ),
    "smollm3": chat_family(
        HERMES, result="<|im_start|>user\n{{ m.content }}<|im_end|>\n", thoughts="<think>\n\n</think>\n"
    ),
    "granite-4": chat_family(
        HERMES,
        tokens="<|start_of_role|> <|end_of_role|>",
        end="<|end_of_text|>",
        start="<|start_of_role|>ROLE<|end_of_role|>",
        result="<|start_of_role|>user<|end_of_role|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "<|end_of_text|>\n",
    ),
    "exaone-4": chat_family(
        HERMES,
        tokens="[|system|] [|user|] [|assistant|] [|tool|]",
        end="[|endofturn|]",
        start="[|ROLE|]\n",
        result="[|tool|]\n<tool_result>{{ m.content }}</tool_result>[|endofturn|]\n",
    ),
    "ernie-4.5": chat_family(
        HERMES + "\n",
        start="<|im_start|>ROLE\n\n",
        result="<|im_start|>tool\n<tool_output>\n{{ m.content }}\n</tool_output>\n<|im_end|>\n",
    ),
    "longcat": chat_family(
        HERMES.replace("tool_call>", "longcat_tool_call>"),
        tokens="",
        end="</longcat_s>",
        start="[ROLE]\n",
        after="",
        result="TOOL:{{ m.content }}</longcat_s>",
    ),
    # Lists of JSON objects, and single ones.
    "granite-3": chat_family(
        listed("<|tool_call|>", ""),
        tokens="<|start_of_role|> <|end_of_role|> <|tool_call|>",
        end="<|end_of_text|>",
        start="<|start_of_role|>ROLE<|end_of_role|>",
        result="<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
    ),
    "mistral-0.3": Family(
        MISTRAL.replace(
            "CALLS",
            "[TOOL_CALLS] [" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
            '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
        ),
        tokens="[INST] [/INST] [TOOL_CALLS] "
        "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        end="</s>",
    ),
    "jamba": chat_family(
        "<tool_calls>[\n" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
        "{% if not loop.last %},{% endif %}\n{% endfor %}]</tool_calls>",
        tokens="<|bom|> <|system|> <|user|> <|assistant|> <|tool|>",
        end="<|eom|>",
        start="<|bom|><|ROLE|>",
        after="",
        result="<|bom|><|tool|>{{ m.content }}<|eom|>",
    ),
    "hunyuan-a13b": chat_family(
        listed("<tool_calls>", "</tool_calls>"),
        tokens="<|startoftext|> <|extra_0|>",
        end="<|eos|>",
        start="<|startoftext|>ROLE:",
        after="",
        result="<|startoftext|>user:<tool_response>{{ m.content }}</tool_response><|extra_0|>",
    ),
    "minimax-m1": chat_family(
        "<tool_calls>\n" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
        "{% endfor %}</tool_calls>",
        tokens="<beginning_of_sentence>",
        end="<end_of_sentence>",
        start="<beginning_of_sentence>ROLE\n",
        result="<beginning_of_sentence>tool name=tools\n{{ m.content }}<end_of_sentence>\n",
    ),
    "nemotron-nano": chat_family(
        listed("<TOOLCALL>", "</TOOLCALL>"),
        tokens="<SPECIAL_10>",
        end="<SPECIAL_12>",
        start="<SPECIAL_10>ROLE\n",
        result="<SPECIAL_10>user\n<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE><SPECIAL_12>\n",
    ),
    "command-a": chat_family(
        "<|START_THINKING|>-<|END_THINKING|>"
        + listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
        tokens=COHERE,
        end="<|END_OF_TURN_TOKEN|>",
        start="<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>",
        after="",
        system="SYSTEM",
        assistant="CHATBOT",
        result="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content }}"
        "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
    ),
    "internlm-2.5": chat_family(
        EACH + '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}<|action_end|>\n{% endfor %}",
        tokens="<|im_start|> <|action_start|> <|action_end|> <|plugin|>",
        result="<|im_start|>environment name=<|plugin|>\n{{ m.content }}<|im_end|>\n",
    ),
    "apertus": chat_family(
        "<|tools_prefix|>[" + EACH + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_suffix|>",
        tokens="<|tools_prefix|> <|tools_suffix|> <|assistant_start|>",
        end="<|end|>",
        start="<|ROLE_start|>",
        after="",
        result="[{{ m.content }}]",
    ),
    "llama-3.1": chat_family(
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}",
        tokens=LLAMA,
        end="<|eot_id|>",
        start=LLAMA_TURN,
        after="",
        result=LLAMA_RESULT,
    ),
    "llama-3.1-ipython": chat_family(
        '<|python_tag|>{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}",
        tokens=LLAMA,
        end="<|eot_id|>",
        start=LLAMA_TURN,
        after="",
        call_end="<|eom_id|>",
        result=LLAMA_RESULT,
    ),
    "xlam": chat_family(
        listed("", ""), tokens=LLAMA, end="<|eot_id|>", start=LLAMA_TURN, after="", result=LLAMA_RESULT
    ),
}
