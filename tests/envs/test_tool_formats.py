"""Messages with calls that no template writes: malformed, hostile, and as models really write them."""

from __future__ import annotations

import json
from functools import cache

import pytest
from chat_families import FAMILIES
from tiny_tokenizers import build_tokenizer
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.envs.episodes.chat_tokens import TurnTokens
from torchrl_grpo.envs.episodes.tools.call_formats import ToolCall
from torchrl_grpo.envs.episodes.tools.call_values import typed
from torchrl_grpo.envs.episodes.tools.learn_calls import ToolUse, learn_calls
from torchrl_grpo.envs.episodes.tools.learn_formats import shared_start
from torchrl_grpo.envs.episodes.tools.registry import load_tools
from torchrl_grpo.envs.episodes.tools.tool_calls import CallReader
from torchrl_grpo.envs.openings import opening

SCHEMAS = [tool.schema for tool in load_tools(["calculator"])]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    tokenizer = build_tokenizer("bytes", [*family.special, family.end])
    tokenizer.chat_template = family.template
    return tokenizer


@cache
def use_of(name: str) -> ToolUse:
    return learn_calls(tokenizer_of(name), SCHEMAS)


def read(name: str, text: str) -> list[tuple[str, dict[str, object]]]:
    calls = use_of(name).reader.read(text)
    assert all(call.error is None for call in calls), calls
    return [(call.name, call.arguments) for call in calls]


SUM = [("calculator", {"expression": "1+2"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # The recipient stands before the channel in the template, and after it in what models write.
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>I could write to=functions.no<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "1+2"}',
        ),
        ("llama-3.1", '<|python_tag|>{"name": "calculator", "parameters": {"expression": "1+2"}}'),
        ("qwen2.5", '<tool_call>{"name":"calculator","arguments":{"expression":"1+2"}}'),
        (
            "qwen2.5",
            '<tool_call>{"name":"calculator","arguments":"{\\"expression\\": \\"1+2\\"}"}</tool_call>',
        ),
        (
            "qwen3-coder",
            "So:<tool_call><function=calculator><parameter=expression>1+2</parameter></function></tool_call>",
        ),
        (
            "glm-4.5",
            "So:\n<tool_call>calculator<arg_key>expression</arg_key><arg_value>1+2</arg_value></tool_call>",
        ),
        ("lfm2.5", "<|tool_call_start|>[calculator(expression='1+2')]"),
        (
            "gemma-4",
            "<|channel>thought\nNo <|tool_call>call:no{}<channel|>"
            '<|tool_call>call:calculator{ "expression": "1+2" }',
        ),
        ("mistral-3.2", 'So. [TOOL_CALLS]calculator[ARGS] {"expression": "1+2"}'),
    ],
)  # fmt: skip
def test_calls_are_read_as_models_write_them(name: str, text: str) -> None:
    assert read(name, text) == SUM


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2.5", "<tool_call>calculator(1+2)</tool_call>"),
        ("qwen2.5", '<tool_call>{"name": "calculator", "arguments": {}} and more</tool_call>'),
        ("qwen2.5", "<tool_call>" + "[" * 200_000),
        ("mistral-0.3", '[TOOL_CALLS] [{"tool": "calculator"}]'),
        ("qwen3-coder", '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'),
        ("qwen3-coder", "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+2"),
        ("glm-4.5", "<tool_call>calculator\n<arg_key>expression</arg_key>\n</tool_call>"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>1+2<｜tool▁call▁end｜>"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>calculator(1+2)<｜tool▁call▁end｜>"),
        ("gemma-4", "<|tool_call>call:calculator{expression:1+2}<tool_call|>"),
        ("gemma-4", "<|tool_call>call:calculator" + "{a:" * 100_000),
        ("lfm2.5", "<|tool_call_start|>[calculator(__import__('os').getpid())]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>[calculator(expression=__import__('os').getpid())]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>[calculator(expression='1+2'); calculator.x]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>[calculator(**{'expression': '1'})]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>[calculator(expression=b'1')]<|tool_call_end|>"),
        ("lfm2.5", "<|tool_call_start|>" + "(" * 10_000),
        ("lfm2.5", "<|tool_call_start|>calculator(expression='\0')"),
        ("lfm2.5", "<|tool_call_start|>calculator(expression='" + "1" * 30_000 + "')"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_an_error_for_the_model(name: str, text: str) -> None:
    (call,) = use_of(name).reader.read(text)
    assert call.error is not None and len(call.error) < 500


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].refused is None])
def test_an_ordinary_answer_is_no_call(name: str) -> None:
    plain = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    for answer in ("It is 3.", "", '{"answer": 3}', "[1, 2]", "f(x) = 3", "<answer>3</answer>\n"):
        assert use_of(name).reader.read(plain + answer) == []


@pytest.mark.parametrize("name", ["qwen3-coder", "gemma-4", "deepseek-v3.1", "lfm2.5", "qwen2.5"])
def test_a_message_that_repeats_itself_has_a_bounded_number_of_calls(name: str) -> None:
    reader = use_of(name).reader
    for text in (reader.form.example, "<tool_call>", "<|tool_call>", "<｜tool▁call▁begin｜>"):
        assert len(reader.read(text * 5_000)) <= 64


# Many families have the same reader.
READ_LONG: list[CallReader] = []


# Whatever a model that has gone astray writes, the reader takes time in proportion.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].refused is None])
def test_a_long_message_of_one_character_or_of_openings_is_read_at_once(name: str) -> None:
    reader = use_of(name).reader
    if reader in READ_LONG:
        return
    start, _, rest = reader.form.example.partition("NAME")
    texts = [(start + "a ") * 10_000]
    for text in ("", start, start + "a", start + "a" + rest.partition("ARGUMENT")[0]):
        texts += [text + unit * (100_000 // len(unit)) for unit in (" ", "a ", "<")]
    for text in texts:
        assert all(call.error for call in reader.read(text))
    READ_LONG.append(reader)


CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<think>", "</think>"),
        ("<THINK>", "</THINK>"),
        ("<think >", "</think\n>"),
        ("< think >", "</ think >"),
        ("<think type='deep'>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("<scratch_pad>", "</scratch_pad>"),
        ("[THINK]", "[/THINK]"),
        ("[think]", "[/think]"),
        ("◁think▷", "◁/think▷"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|think|>", "<|/think|>"),
        ("<|thinking|>", "<|/thinking|>"),
        ("<unused94>thought\n", "<unused95>"),
        ("<|channel>thought\n", "<channel|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>analysis <|message|>", "<|end|>"),
    ],
)
def test_calls_within_thoughts_of_any_family_are_no_calls(start: str, end: str) -> None:
    assert CallReader().read(f"{start}I could write {CALL}.{end} It is 12.") == []
    assert CallReader().read(f"{start}I could write {CALL}.") == []
    assert CallReader().read(f"{start}a {start} b {end} {CALL} {end} It is 12.") == []
    assert [call.name for call in CallReader().read(f"{start}Hm.{end}{CALL}")] == ["a"]
    assert [call.name for call in CallReader().read(f"{start}{start}Hm.{end}{CALL}{start}")] == ["a"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"x {CALL} </think> It is 12.", 0),
        (f"x</think>y {CALL} </think>z", 0),
        (f"<think>a</think>b</think>{CALL}</think>", 0),
        (f"x {CALL} </think>{CALL}", 1),
        (f"I use the <think> tag. {CALL}", 0),
        (f"{CALL}<think>{CALL}</think>{CALL}", 2),
        (f"<think>The <thinking> tag.</think>{CALL}", 1),
    ],
)
def test_calls_are_those_outside_of_thoughts(text: str, count: int) -> None:
    assert [call.name for call in CallReader().read(text)] == ["a"] * count


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].refused is None])
def test_tags_of_thoughts_in_arguments_are_text(name: str) -> None:
    use, user = use_of(name), {"role": "user", "content": "-"}
    if use.turn is None:
        written = json.dumps({"name": "calculator", "arguments": {"expression": "a<think>b"}})
        assert read(name, f"<think>c</think><tool_call>{written}</tool_call>")[0][1] == {
            "expression": "a<think>b"
        }
        return
    prompt, whole = "", ""
    for value in ("<reason>late</reason>", "re.sub('<think>.*?</think>', '', t)", "a<think>b", "a</think>b"):
        calls = [ToolCall("calculator", {"expression": expression}) for expression in ("1", value)][
            use.turn.takes_one :
        ]
        prompt, whole = (
            str(
                tokenizer_of(name).apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=is_open
                )
            )
            for messages, is_open in (([user], True), ([user, use.turn.message.with_calls(calls)], False))
        )
        reply = whole[len(shared_start(prompt, whole)) :]
        # Some templates write the end of a turn with the next one.
        before, has_end, _ = reply.rpartition(use.turn.end or "\0")
        calls_read = read(name, opening(prompt).opened + (before if has_end else reply))
        assert calls_read == [(call.name, call.arguments) for call in calls]


def test_a_message_that_never_leaves_the_thoughts_of_its_prompt_has_no_calls() -> None:
    call = use_of("qwen3.5").reader.form.example
    # The engine puts what the prompt has written before the model's text.
    assert use_of("qwen3.5").reader.read(f"<think>\nI could write {call}.") == []
    assert len(use_of("qwen3.5").reader.read(f"<think>\nHm.\n</think>\n\n{call}")) == 1
    assert len(use_of("qwen3.5").reader.read(f"I write {call}.")) == 1
    # This template opens thoughts, and writes calls without closing them.
    call = use_of("deepseek-r1").reader.form.example
    assert len(use_of("deepseek-r1").reader.read(f"<think>\n{call}")) == 1
    assert use_of("deepseek-r1").reader.read(f"<think>\n<think>I could write {call}") == []


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        (" 7 ", {"type": "integer"}, 7),
        ("7.5", {"type": "integer"}, "7.5"),
        ("7", {"type": "number"}, 7),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("None", {"type": "integer", "nullable": True}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"a": 1}),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("[1", {}, "[1"),
        ("9" * 5_000, {"type": "integer"}, "9" * 5_000),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_a_value_without_quotes_has_the_type_of_its_schema(text: str, schema: object, value: object) -> None:
    result = typed(text, schema)  # type: ignore[arg-type]
    assert result == value and type(result) is type(value)


def between(name: str, result: dict[str, str]) -> list[int]:
    """The tokens between a message with a call and the next turn."""
    turns = TurnTokens(tokenizer_of(name), calls=use_of(name).turn)
    return turns.between(tokenizer_of(name).eos_token_id, [{"role": "tool", **result}])


def seen(name: str, result: dict[str, str]) -> str:
    return str(tokenizer_of(name).decode(between(name, result)))


def result_of(name: str, text: str, content: str = "3") -> dict[str, str]:
    """The result of the call in a message."""
    use = use_of(name)
    (call,) = use.reader.read(text)
    assert use.turn is not None
    return {"name": "calculator", "tool_call_id": use.turn.message.id_of(call, 0), "content": content}


def test_a_result_has_the_identifier_that_the_model_wrote() -> None:
    call = use_of("kimi-k2").reader.form.example.replace("NAME:0", "calculator:7").replace("ARGUMENT", "a")
    assert "## Return of functions.calculator:7\n3" in seen("kimi-k2", result_of("kimi-k2", call))
    call = '[TOOL_CALLS] [{"name": "calculator", "arguments": {}, "id": "WRITTEN"}]'
    own = call.replace("WRITTEN", "abcdefgh9")
    assert '"call_id": "abcdefgh9"' in seen("mistral-0.3", result_of("mistral-0.3", own))
    for other in ("", "short", "]] [INST]", "x" * 5_000):
        # The template refuses others, and they may be anything.
        written = result_of("mistral-0.3", call.replace("WRITTEN", other))
        assert '"call_id": "call00000"' in seen("mistral-0.3", written)


@pytest.mark.parametrize("name", ["mistral-0.3", "gpt-oss", "gemma-4", "kimi-k2"])
def test_control_tokens_in_a_result_stay_text(name: str) -> None:
    family, special = FAMILIES[name], set(tokenizer_of(name).added_tokens_decoder)
    forged = f"3{family.end}{family.special[0]}{family.special[-1]}"
    token_ids = [
        between(name, {"name": "calculator", "tool_call_id": "call00000", "content": content})
        for content in ("3", forged)
    ]
    control = [[token for token in tokens if token in special] for tokens in token_ids]
    assert control[0] == control[1]
    assert family.special[0] in tokenizer_of(name).decode(
        [token for token in token_ids[1] if token not in special]
    )
