"""Parts of chat templates, which write tools, calls and results as families of models publish them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        template: chat template.
        tokens: special tokens beside the one that ends a message, with spaces between them.
        end: token that ends a message.
        refused: pattern of the message that refuses tools with it; None if they work.
    """

    template: str
    tokens: str = "<|im_start|>"
    end: str = "<|im_end|>"
    refused: str | None = None

    @property
    def special(self) -> list[str]:
        return self.tokens.split()


TOOLS = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
HERMES = (
    EACH + '{% if not loop.first %}\n{% endif %}<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}"
)


def listed(open_text: str, close: str, name: str = "name", arguments: str = "arguments") -> str:
    """Calls as a list of JSON objects."""
    item = f'{{"{name}": {{{{ f.name | tojson }}}}, "{arguments}": {{{{ f.arguments | tojson }}}}}}'
    return f"{open_text}[{EACH}{item}{{% if not loop.last %}}, {{% endif %}}{{% endfor %}}]{close}"


def chat(
    calls: str,
    *,
    start: str = "<|im_start|>ROLE\n",
    end: str = "<|im_end|>",
    after: str = "\n",
    tools: str = TOOLS,
    result: str = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
    call_end: str | None = None,
    system: str = "system",
    assistant: str = "assistant",
    thoughts: str = "",
    prompt: str = "",
) -> str:
    """A template whose messages begin and end alike."""

    def turn(role: str) -> str:
        return start.replace("ROLE", role)

    closing = end + after
    described = f"{{% if tools %}}{turn(system)}{tools}{closing}{{% endif %}}" if tools else ""
    content = "{{ m.content or '' }}"
    return (
        f"{described}{{% for m in messages %}}"
        f"{{% if m.role == 'tool' %}}{result}"
        f"{{% elif m.tool_calls %}}{turn(assistant)}{thoughts}{content}{calls}"
        f"{closing if call_end is None else call_end}"
        f"{{% elif m.role == 'assistant' %}}{turn(assistant)}{content}{closing}"
        f"{{% else %}}{turn('{{ m.role }}')}{content}{closing}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{turn(assistant)}{prompt}{{% endif %}}"
    )


def chat_family(calls: str, *, tokens: str = "<|im_start|>", end: str = "<|im_end|>", **parts: str) -> Family:
    """A family with a template of :func:`chat`."""
    return Family(chat(calls, end=end, **parts), tokens, end)


def keyed(call: str, argument: str, close: str, between: str = "\n") -> str:
    """Calls whose arguments are between tags."""
    value = "{{ v if v is string else v | tojson }}"
    return (
        f"{EACH}{{% if not loop.first %}}{between}{{% endif %}}{call.replace('NAME', '{{ f.name }}')}"
        f"{{% for k, v in f.arguments | items %}}"
        f"{argument.replace('KEY', '{{ k }}').replace('VALUE', value)}{{% endfor %}}{close}{{% endfor %}}"
    )


PYTHON = (
    EACH + "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}="
    "{% if v is string %}{{ v | tojson }}{% else %}{{ v }}{% endif %}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if not loop.last %}SEPARATOR{% endif %}{% endfor %}"
)
CODER = keyed(
    "<tool_call>\n<function=NAME>\n",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    "</function>\n</tool_call>",
)
GEMMA = (
    EACH + "OPENcall:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | dictsort %}"
    "{% if not loop.first %},{% endif %}{{ k }}:"
    "{% if v is string %}QUOTE{{ v }}QUOTE{% else %}{{ v | tojson }}{% endif %}{% endfor %}"
    "{{ '}' }}CLOSE{% endfor %}"
)
# Results belong to the message with their calls, and the model goes on in it.
GEMMA_4 = (
    "{% if tools %}<|turn>system\n" + TOOLS + "<turn|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}<|turn>{{ role }}\n"
    "{% if m.tool_calls %}"
    + GEMMA.replace("OPEN", "<|tool_call>").replace("CLOSE", "<tool_call|>").replace("QUOTE", '<|"|>')
    + "{% set state = namespace(open=true) %}{% for r in messages[loop.index:] %}"
    "{% if r.role != 'tool' %}{% set state.open = false %}{% elif state.open %}"
    '<|tool_response>response:{{ r.name }}{value:<|"|>{{ r.content }}<|"|>}<tool_response|>'
    "{% endif %}{% endfor %}"
    "{% if messages[-1].role != 'tool' %}<|tool_response>{% endif %}"
    "{% else %}{{ m.content }}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>-<|end|>"
    "{% if tools %}<|start|>developer<|message|>" + TOOLS + "<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}{% if m.content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% set last.name = f.name %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS] " + TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}CALLS</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('identifiers have nine letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
DEEPSEEK_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
)


def deepseek(call: str, tools: str) -> str:
    return (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        + tools
        + "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.tool_calls %}<｜Assistant｜>{{ m.content or '' }}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}{% set f = c.function %}{% if not loop.first %}\n{% endif %}"
        f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>{{% endfor %}}"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% elif m.role == 'tool' %}" + DEEPSEEK_RESULTS + "{% elif m.role == 'assistant' %}"
        "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"
    )


DEEPSEEK_TOKENS = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
LLAMA = "<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>"
LLAMA_TURN = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
LLAMA_RESULT = "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
PHI = "<|user|> <|assistant|> <|system|> <|tool|> <|/tool|>"
COHERE = (
    "<|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|START_THINKING|> "
    "<|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>"
)
IGNORES_TOOLS = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_3 = (
    GEMMA_2.replace("{{ raise_exception('System role not supported') }}", "{% set s = 1 %}")
    .replace(
        "{% for m in messages %}",
        "{% if messages[0].role == 'system' %}{% set head, messages = messages[0].content, messages[1:] %}"
        "{% endif %}{% for m in messages %}",
    )
    .replace("\n{{ m.content }}", "\n{% if loop.first and head %}{{ head }}\n\n{% endif %}{{ m.content }}")
)
