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
    IM,
    LLAMA,
    LLAMA_RESULT,
    LLAMA_TURN,
    MISTRAL,
    PHI,
    PYTHON,
    TOOLS,
    Family,
    chat,
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
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "mistral-3.2": Family(
        MISTRAL.replace(
            "CALLS", EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
        ),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
    ),
    "deepseek-v3": Family(
        deepseek("function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```", ""),
        DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek-r1": Family(
        deepseek("function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```", "").replace(
            "<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}"
        ),
        DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
    ),
    "deepseek-v3.1": Family(
        deepseek(
            "{{ f.name }}<｜tool▁sep｜>{{ '' + f.arguments }}", "{% if tools %}" + TOOLS + "{% endif %}"
        ),
        DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
    ),
    "kimi-k2": Family(
        chat(
            "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
            "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
            "<|tool_calls_section_end|>",
            start="<|im_ROLE|>ROLE<|im_middle|>",
            after="",
            result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
            "<|im_end|>",
        ),
        (
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|im_end|>",
    ),
    "hunyuan-dense": Family(
        chat(
            "<tool_calls>\n" + EACH + "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```\n"
            "</tool_call>\n{% endfor %}</tool_calls>",
            result="<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
        ),
        IM,
        "<|im_end|>",
    ),
    "functionary": Family(
        chat(
            EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
            start=LLAMA_TURN,
            end="<|eot_id|>",
            after="",
            call_end="<|eom_id|>",
            result=LLAMA_RESULT,
        ),
        LLAMA,
        "<|eot_id|>",
    ),
    "plamo-3": Family(
        chat(
            "<|begin_tool_requests|>"
            + EACH
            + "<|begin_tool_request|><|begin_tool_name|>{{ f.name }}<|end_tool_name|><|begin_tool_arguments|>"
            "<|constrain|>json<|msg|>{{ f.arguments | tojson }}<|end_tool_arguments|><|end_tool_request|>"
            "{% endfor %}<|end_tool_requests|>",
            start="<|ROLE|><|msg|>",
            end="<|tag|>",
            after="",
            result="<|tool|><|msg|>{{ m.content }}<|tag|>",
        ),
        ("<|msg|>", "<|begin_tool_request|>", "<|end_tool_request|>", "<|end_tool_requests|>"),
        "<|tag|>",
    ),
    "functionary-3.2": Family(
        chat(
            EACH
            + "{% if not loop.first %}>>>{% endif %}{{ f.name }}\n{{ f.arguments | tojson }}{% endfor %}",
            start=LLAMA_TURN,
            end="<|eot_id|>",
            after="",
            thoughts=">>>",
            prompt=">>>",
            result=LLAMA_RESULT,
        ),
        LLAMA,
        "<|eot_id|>",
    ),
    "glm-4": Family(
        "{% if tools %}<|system|>\n" + TOOLS + "{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.tool_calls %}"
        "{% for c in m.tool_calls %}<|assistant|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
    ),
    "gpt-oss": Family(
        HARMONY, ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"), "<|return|>"
    ),
    # Objects without quotes.
    "gemma-4": Family(
        GEMMA_4,
        ("<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
        "<turn|>",
    ),
    "functiongemma": Family(
        chat(
            GEMMA.replace("OPEN", "<start_function_call>")
            .replace("CLOSE", "<end_function_call>")
            .replace("QUOTE", "<escape>"),
            start="<start_of_turn>ROLE\n",
            end="<end_of_turn>",
            system="developer",
            assistant="model",
            call_end="<start_function_response>",
            result="{% if messages[loop.index0 - 1].role == 'tool' %}<start_function_response>{% endif %}"
            "response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}<end_function_response>",
        ),
        (
            "<start_of_turn>",
            "<start_function_call>",
            "<end_function_call>",
            "<escape>",
            "<start_function_response>",
            "<end_function_response>",
        ),
        "<end_of_turn>",
    ),
    # Python.
    "lfm2.5": Family(
        chat(
            "<|tool_call_start|>[" + PYTHON.replace("SEPARATOR", ", ") + "]<|tool_call_end|>",
            result="<|im_start|>tool\n<|tool_response_start|>{{ m.content }}<|tool_response_end|>"
            "<|im_end|>\n",
        ),
        ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        "<|im_end|>",
    ),
    "olmo-3": Family(
        chat(
            "<function_calls>" + PYTHON.replace("SEPARATOR", "\n") + "</function_calls>",
            result="<|im_start|>environment\n{{ m.content }}<|im_end|>\n",
        ),
        IM,
        "<|im_end|>",
    ),
    "llama-4": Family(
        chat(
            "[" + PYTHON.replace("SEPARATOR", ", ") + "]",
            start="<|header_start|>ROLE<|header_end|>\n\n",
            end="<|eot|>",
            after="",
            result="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
        ),
        ("<|header_start|>", "<|header_end|>"),
        "<|eot|>",
    ),
    "minicpm-3": Family(
        chat(
            "<|tool_call_start|>\n```python\n"
            + PYTHON.replace("SEPARATOR", "\n")
            + "\n```\n<|tool_call_end|>",
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        ),
        ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        "<|im_end|>",
    ),
    # Templates without calls: a system message describes the tools.
    "smollm2": Family(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        IM,
        "<|im_end|>",
    ),
    "phi-4-mini": Family(
        "{% for m in messages %}{% if m.role == 'system' and m.tools %}"
        "<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        PHI,
        "<|end|>",
    ),
    # Templates that lose something.
    "phi-3": Family(IGNORES_TOOLS, PHI, "<|end|>", r"leaves out the results of tools"),
    "phi-3.5": Family(
        IGNORES_TOOLS.replace("{% endif %}{% endfor %}", "{% endif %}{% endfor %}", 1).replace(
            "<|assistant|>\n{% endif %}", "<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
        ),
        (*PHI, "<|endoftext|>"),
        "<|end|>",
        r"leaves out the results of tools",
    ),
    "cohere-2": Family(
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|>{{ m.content }}"
        "{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        COHERE,
        "<|END_OF_TURN_TOKEN|>",
        r"leaves out the results of tools",
    ),
    "gemma-2": Family(
        GEMMA_2,
        ("<start_of_turn>",),
        "<end_of_turn>",
        r"refuses the system message.*System role not supported",
    ),
    "gemma-3": Family(
        GEMMA_3, ("<start_of_turn>",), "<end_of_turn>", r"refuses the results of tools.*must alternate"
    ),
}
