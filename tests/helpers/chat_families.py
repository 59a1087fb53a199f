"""Chat templates of families of models: short ones, which write tools, calls and results as published."""

from __future__ import annotations

from chat_families_json import JSON_FAMILIES
from chat_families_keyed import KEYED_FAMILIES
from chat_parts import (
    COHERE,
    DEEPSEEK_TOKENS,
    EACH,
    GEMMA,
    GEMMA_2,
    GEMMA_3,
    GEMMA_4,
    HARMONY,
    IGNORES_TOOLS,
    LLAMA,
    LLAMA_RESULT,
    LLAMA_TURN,
    MISTRAL,
    PHI,
    PYTHON,
    TOOLS,
    Family,
    chat_family,
    deepseek,
)

FAMILIES: dict[str, Family] = {
    **JSON_FAMILIES,
    **KEYED_FAMILIES,
    # The name first, then JSON.
    "mistral-3.1": Family(
        MISTRAL.replace(
            "CALLS",
            EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
        ),
        tokens="[INST] [/INST] [TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        end="</s>",
    ),
    "mistral-3.2": Family(
        MISTRAL.replace(
            "CALLS", EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
        ),
        tokens="[INST] [/INST] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        end="</s>",
    ),
    "deepseek-v3": Family(
        deepseek("function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```", ""),
        tokens=DEEPSEEK_TOKENS,
        end="<｜end▁of▁sentence｜>",
    ),
    "deepseek-r1": Family(
        deepseek("function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```", "").replace(
            "<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}"
        ),
        tokens=DEEPSEEK_TOKENS,
        end="<｜end▁of▁sentence｜>",
    ),
    "deepseek-v3.1": Family(
        deepseek(
            "{{ f.name }}<｜tool▁sep｜>{{ '' + f.arguments }}", "{% if tools %}" + TOOLS + "{% endif %}"
        ),
        tokens=DEEPSEEK_TOKENS,
        end="<｜end▁of▁sentence｜>",
    ),
    "kimi-k2": chat_family(
        "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>",
        tokens="<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> "
        "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|>",
        start="<|im_ROLE|>ROLE<|im_middle|>",
        after="",
        result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
    ),
    "hunyuan-dense": chat_family(
        "<tool_calls>\n" + EACH + "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```\n"
        "</tool_call>\n{% endfor %}</tool_calls>",
        result="<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
    ),
    "functionary": chat_family(
        EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
        tokens=LLAMA,
        end="<|eot_id|>",
        start=LLAMA_TURN,
        after="",
        call_end="<|eom_id|>",
        result=LLAMA_RESULT,
    ),
    "plamo-3": chat_family(
        "<|begin_tool_requests|>"
        + EACH
        + "<|begin_tool_request|><|begin_tool_name|>{{ f.name }}<|end_tool_name|><|begin_tool_arguments|>"
        "<|constrain|>json<|msg|>{{ f.arguments | tojson }}<|end_tool_arguments|><|end_tool_request|>"
        "{% endfor %}<|end_tool_requests|>",
        tokens="<|msg|> <|begin_tool_request|> <|end_tool_request|> <|end_tool_requests|>",
        end="<|tag|>",
        start="<|ROLE|><|msg|>",
        after="",
        result="<|tool|><|msg|>{{ m.content }}<|tag|>",
    ),
    "functionary-3.2": chat_family(
        EACH + "{% if not loop.first %}>>>{% endif %}{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}",
        tokens=LLAMA,
        end="<|eot_id|>",
        start=LLAMA_TURN,
        after="",
        thoughts=">>>",
        prompt=">>>",
        result=LLAMA_RESULT,
    ),
    "glm-4": Family(
        "{% if tools %}<|system|>\n" + TOOLS + "{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.tool_calls %}"
        "{% for c in m.tool_calls %}<|assistant|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        tokens="<|system|> <|user|> <|assistant|> <|observation|>",
        end="<|endoftext|>",
    ),
    "gpt-oss": Family(HARMONY, tokens="<|start|> <|message|> <|channel|> <|end|> <|call|>", end="<|return|>"),
    # Objects without quotes.
    "gemma-4": Family(
        GEMMA_4,
        tokens='<|turn> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>',
        end="<turn|>",
    ),
    "functiongemma": chat_family(
        GEMMA.replace("OPEN", "<start_function_call>")
        .replace("CLOSE", "<end_function_call>")
        .replace("QUOTE", "<escape>"),
        tokens="<start_of_turn> <start_function_call> <end_function_call> "
        "<escape> <start_function_response> <end_function_response>",
        end="<end_of_turn>",
        start="<start_of_turn>ROLE\n",
        system="developer",
        assistant="model",
        call_end="<start_function_response>",
        result="{% if messages[loop.index0 - 1].role == 'tool' %}<start_function_response>{% endif %}"
        "response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}<end_function_response>",
    ),
    # Python.
    "lfm2.5": chat_family(
        "<|tool_call_start|>[" + PYTHON.replace("SEPARATOR", ", ") + "]<|tool_call_end|>",
        tokens="<|im_start|> <|tool_call_start|> <|tool_call_end|>",
        result="<|im_start|>tool\n<|tool_response_start|>{{ m.content }}<|tool_response_end|><|im_end|>\n",
    ),
    "olmo-3": chat_family(
        "<function_calls>" + PYTHON.replace("SEPARATOR", "\n") + "</function_calls>",
        result="<|im_start|>environment\n{{ m.content }}<|im_end|>\n",
    ),
    "llama-4": chat_family(
        "[" + PYTHON.replace("SEPARATOR", ", ") + "]",
        tokens="<|header_start|> <|header_end|>",
        end="<|eot|>",
        start="<|header_start|>ROLE<|header_end|>\n\n",
        after="",
        result="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
    ),
    "minicpm-3": chat_family(
        "<|tool_call_start|>\n```python\n" + PYTHON.replace("SEPARATOR", "\n") + "\n```\n<|tool_call_end|>",
        tokens="<|im_start|> <|tool_call_start|> <|tool_call_end|>",
        result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
    ),
    # Templates without calls: a system message describes the tools.
    "smollm2": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "phi-4-mini": Family(
        "{% for m in messages %}{% if m.role == 'system' and m.tools %}"
        "<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        tokens=PHI,
        end="<|end|>",
    ),
    # Templates that lose something.
    "phi-3": Family(IGNORES_TOOLS, tokens=PHI, end="<|end|>", refused=r"leaves out the results of tools"),
    "phi-3.5": Family(
        IGNORES_TOOLS.replace("{% endif %}{% endfor %}", "{% endif %}{% endfor %}", 1).replace(
            "<|assistant|>\n{% endif %}", "<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
        ),
        tokens=PHI + " <|endoftext|>",
        end="<|end|>",
        refused=r"leaves out the results of tools",
    ),
    "cohere-2": Family(
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|>{{ m.content }}"
        "{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        tokens=COHERE,
        end="<|END_OF_TURN_TOKEN|>",
        refused=r"leaves out the results of tools",
    ),
    "gemma-2": Family(
        GEMMA_2,
        tokens="<start_of_turn>",
        end="<end_of_turn>",
        refused=r"refuses the system message.*System role not supported",
    ),
    "gemma-3": Family(
        GEMMA_3,
        tokens="<start_of_turn>",
        end="<end_of_turn>",
        refused=r"refuses the results of tools.*must alternate",
    ),
}
