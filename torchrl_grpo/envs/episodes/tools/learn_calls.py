"""Learn from a chat template how it writes tools, calls and results, before a run starts.

A conversation with a call and its result is rendered, and the call is read back. So the format is the one
that the model has been trained on, whatever its family, and a template that loses something is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from torchrl_grpo.data.thoughts import without_thoughts
from torchrl_grpo.envs.control_tokens import control_tokens
from torchrl_grpo.envs.episodes.tools.call_formats import CallFormat, Schemas, ToolCall
from torchrl_grpo.envs.episodes.tools.call_turns import CallMessage, CallTurn
from torchrl_grpo.envs.episodes.tools.learn_formats import FIRST, SECOND, Written, formats, shared_start
from torchrl_grpo.envs.episodes.tools.tool_calls import CallReader, describe
from torchrl_grpo.envs.openings import opening
from torchrl_grpo.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_USER = {"role": "user", "content": "-"}
_DESCRIPTION = "zqxdescriptionxqz"
_REFUSES_RESULTS = "it refuses the results of tools (messages of the role tool)"
_NO_RESULTS = (
    "it leaves out the results of tools (messages of the role tool), so the model would not read them"
)
_RESULTS = ("zqxresultonexqz", "zqxresulttwoxqz")
# Mistral takes identifiers of nine letters, and Kimi writes the identifier in place of the name. DeepSeek
# takes arguments as text.
_FORMS = [
    CallMessage(identifier, as_text, content)
    for identifier in ("call{number:05}", "functions.{name}:{number}")
    for as_text in (False, True)
    for content in ("", None)
]
# What a template raises on messages of a form that it does not take.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)


@dataclass(frozen=True)
class ToolUse:
    """How tools are used with a chat template.

    Attributes:
        is_native: whether the template describes the tools. If not, a system message does.
        reader: reads the calls.
        turn: how messages with calls are rendered; None if the template writes no calls. The calls are then
            ordinary text of the message.
    """

    is_native: bool
    reader: CallReader
    turn: CallTurn | None


class _Refused(Exception):
    """What the template loses or refuses."""


def learn_calls(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]) -> ToolUse:
    """Learn how a chat template writes tools, calls and results.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        schemas: JSON schemas of the tools.

    Raises:
        ModelError: a call or its result does not survive, or tools cannot be described.
    """
    if not tokenizer.chat_template:
        # Rendering the prompts says so.
        return ToolUse(False, CallReader(), None)
    template = _Template(tokenizer, schemas)
    try:
        return template.learn()
    except _Refused as error:
        names = ", ".join(schema["function"]["name"] for schema in schemas)
        raise ModelError(
            f"env.tools (with {names}) cannot be used with the chat template of "
            f"{tokenizer.name_or_path or type(tokenizer).__name__}: {first_line(error)}; give a template "
            "that supports tools as model.chat_template, or choose another model as model.name"
        ) from error


class _Template:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._schemas = list(schemas)
        self._tools: list[Mapping[str, Any]] | None = None
        self._control = control_tokens(tokenizer).texts
        longest_first = sorted(self._control, key=len, reverse=True)
        self._atoms = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def learn(self) -> ToolUse:
        probe = {"name": FIRST.name, "description": _DESCRIPTION, "parameters": _parameters(FIRST)}
        self._tools = [*self._schemas, {"type": "function", "function": probe}]
        seen = self._try_render([_USER], True) or ""
        is_native = all(word in seen for word in (FIRST.name, _DESCRIPTION, *FIRST.arguments))
        self._tools = self._tools if is_native else None
        reader_and_turn, problem = self._written_calls()
        if reader_and_turn is not None:
            reader, turn = reader_and_turn
            self._check_description(is_native, reader.form.example)
            return ToolUse(is_native, reader, turn)
        if problem is not None:
            raise problem
        self._tools = None
        self._check_description(False, "")
        self._check_plain_results()
        return ToolUse(False, CallReader(), None)

    # --- rendering -------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], is_open: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=is_open,
            )
        )

    def _try_render(self, messages: Sequence[Message], is_open: bool) -> str | None:
        try:
            return self._render(messages, is_open)
        except _RENDER_ERRORS:
            return None

    # --- what the template writes ----------------------------------------------------------------------

    def _written_calls(self) -> tuple[tuple[CallReader, CallTurn] | None, _Refused | None]:
        """Return how calls are written; None if they are not, with the reason if they cannot be used."""
        problem = None
        for form in _FORMS:
            written = self._try_render([_USER, form.with_calls([FIRST])], False)
            if written is None:
                continue
            start = shared_start(self._render([_USER], True), written)
            message = written[len(start) :]
            if not all(word in message for word in (FIRST.name, "zqxvaluea", "zqxvalueb")):
                continue
            try:
                return self._learn_form(form, start, message), None
            except _Refused as error:
                # What is lost is worth more words than what is not read.
                problem = problem or error
        return None, problem

    def _learn_form(self, form: CallMessage, start: str, message: str) -> tuple[CallReader, CallTurn]:
        result = _result(form, FIRST, 0)
        try:
            answered = self._render([_USER, form.with_calls([FIRST]), result], True)
        except _RENDER_ERRORS as error:
            raise _Refused(f"{_REFUSES_RESULTS}: {error}") from error
        if _RESULTS[0] not in answered:
            raise _Refused(_NO_RESULTS)
        both = self._try_render([_USER, form.with_calls([FIRST, SECOND])], False) or ""
        second = both.rfind(SECOND.name)
        between = both[both.find("zqxvalueb") + len("zqxvalueb") : second] if second >= 0 else ""
        close, end = self._end_of(message, answered, between)
        before_end = message[: message.rindex("zqxvalueb") + len("zqxvalueb")] + close
        none = self._try_render([_USER, form.with_calls([ToolCall(FIRST.name, {})])], False) or start
        no_arguments = none.removeprefix(start).partition(end or message[len(before_end) :] or "\0")[0]
        thoughtless = without_thoughts(before_end)
        plain = (self._try_render([_USER, {"role": "assistant", "content": "-"}], False) or "").removeprefix(
            start
        )
        written = Written(
            thoughtless,
            between,
            without_thoughts(no_arguments),
            form.id_of(FIRST, 0),
            without_thoughts(plain),
        )
        for call_format in formats(written):
            reader = self._reader(call_format, form, start, end)
            if reader is None:
                continue
            takes_one = not self._reads([FIRST, SECOND], reader, form, start, end) or not self._two(form)
            turn = CallTurn(form, close, end, takes_one)
            if turn.after(self._render([_USER, turn.before([result]), result], True)) is None:
                continue
            return reader, turn
        raise _Refused(f"it writes a call as {thoughtless.strip()[:200]!r}, which cannot be read back")

    def _end_of(self, message: str, answered: str, between: str) -> tuple[str, str | None]:
        """Return what follows the last value in a message, and the control token that ends the message."""
        tail = message[message.rindex("zqxvalueb") + len("zqxvalueb") :]
        goes_on = answered[answered.rindex("zqxvalueb") + len("zqxvalueb") :]
        position, end, close = 0, None, ""
        for token, other in zip(self._atoms.findall(tail), self._atoms.findall(goes_on), strict=False):
            if token != other:
                break
            if token in self._control and token not in between:
                close, end = tail[:position], token
            position += len(token)
        if end is None:
            # The template goes on in the same message, and the token with which it does so ends the call.
            close = tail[:position]
            following = self._atoms.match(goes_on, position)
            end = following[0] if following and following[0] in self._control else None
        return close, end

    def _two(self, form: CallMessage) -> bool:
        """Whether two results follow two calls."""
        calls = [FIRST, SECOND]
        results = [_result(form, call, number) for number, call in enumerate(calls)]
        text = self._try_render([_USER, form.with_calls(calls), *results], True) or ""
        return all(result in text for result in _RESULTS)

    # --- reading back ----------------------------------------------------------------------------------

    def _reader(
        self, form: CallFormat, message: CallMessage, start: str, end: str | None
    ) -> CallReader | None:
        """Return a reader that reads back calls of every tool; None if the format is another one."""
        schemas = {schema["function"]["name"]: _properties(schema) for schema in self._schemas}
        numbers = {"zqx_n": {"type": "integer"}, "zqx_t": {"type": "string"}}
        known = {**schemas, FIRST.name: _parameters(FIRST)["properties"], SECOND.name: numbers}
        for skips_opening in (False, True):
            reader = CallReader(form, known, skips_opening)
            if all(self._reads([call], reader, message, start, end) for call in _probes(known)):
                return replace(reader, schemas=schemas)
        return None

    def _reads(
        self, calls: list[ToolCall], reader: CallReader, message: CallMessage, start: str, end: str | None
    ) -> bool:
        """Whether the template writes calls, and they are read back."""
        text = self._try_render([_USER, message.with_calls(calls)], False)
        if text is None:
            return False
        call_text = text.removeprefix(start)
        if end is not None and end in call_text:
            call_text = call_text[: call_text.rindex(end)]
        calls_read = reader.read(opening(self._render([_USER], True)).opened + call_text)
        return [(call.name, call.arguments, call.error) for call in calls_read] == [
            (call.name, call.arguments, None) for call in calls
        ]

    # --- templates without tools -----------------------------------------------------------------------

    def _check_description(self, is_native: bool, example: str) -> None:
        """Check that a system message can describe the tools, if the template does not."""
        if is_native:
            return
        text = describe(self._schemas, example)
        try:
            seen = self._render([{"role": "system", "content": text}, _USER], True)
        except _RENDER_ERRORS as error:
            raise _Refused(
                f"it describes no tools, and refuses the system message that would describe them: {error}"
            ) from error
        if self._schemas[0]["function"]["name"] not in seen:
            raise _Refused(
                "it describes no tools, and leaves out the system message that would describe them"
            )

    def _check_plain_results(self) -> None:
        message = {"role": "assistant", "content": "zqxvaluea"}
        result = {"role": "tool", "name": FIRST.name, "content": _RESULTS[0]}
        try:
            seen = self._render([_USER, message, result], True)
        except _RENDER_ERRORS as error:
            raise _Refused(f"{_REFUSES_RESULTS}: {error}") from error
        if "zqxvaluea" not in seen:
            raise _Refused("it leaves out the model's own messages, so an episode cannot go on")
        if _RESULTS[0] not in seen.partition("zqxvaluea")[2]:
            raise _Refused(_NO_RESULTS)


def _parameters(call: ToolCall) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": _DESCRIPTION} for name in call.arguments}
    return {"type": "object", "properties": properties, "required": []}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    parameters: Mapping[str, Any] = schema["function"].get("parameters", {})
    properties: Mapping[str, Mapping[str, Any]] = parameters.get("properties", {})
    return properties


def _result(form: CallMessage, call: ToolCall, number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": form.id_of(call, number),
        "name": call.name,
        "content": _RESULTS[number],
    }


_SAMPLES: dict[str, Any] = {
    "string": "some text, of <think>2</think> parts",
    "integer": 48,
    "number": 2.5,
    "boolean": True,
    "array": ["a", 1],
    "object": {"a": 1, "b": "c"},
}


def _probes(schemas: Schemas) -> Iterator[ToolCall]:
    """Yield a call of every tool, with a value of each argument's type."""
    for name, properties in schemas.items():
        yield ToolCall(name, {key: _sample(schema) for key, schema in properties.items()})


def _sample(schema: Mapping[str, Any]) -> Any:
    declared = schema.get("type")
    return _SAMPLES.get(declared if isinstance(declared, str) else "string", "some text")
