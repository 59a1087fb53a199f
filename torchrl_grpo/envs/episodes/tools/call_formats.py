"""Formats in which models write calls of tools, and how each is read.

There are four kinds. What differs between families of models, the tags and the names of keys, is a value
here, which ``learn_calls`` takes from what a chat template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torchrl_grpo.envs.episodes.tools.call_values import loose_object, python_calls, typed

# JSON schemas of the arguments of each tool, by the name of the tool.
Schemas = Mapping[str, Mapping[str, Mapping[str, Any]]]
# A model that repeats itself writes hundreds.
MOST_READ = 64
# Names and white space are read without going back, because a message can be a megabyte of either.
NAME = r"[\w.-]{1,128}"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_BETWEEN_VALUES = re.compile(r"[\s,;]*")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written.

    Attributes:
        name: name of the tool; empty if the call is malformed.
        arguments: arguments by name.
        error: why the call is malformed, for the model; None if it is well formed.
        id: identifier that the model gave the call; None if the format has none.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    id: str | None = None


class CallFormat(Protocol):
    """A format of calls."""

    @property
    def example(self) -> str:
        """A call in this format, for the model."""
        ...

    @property
    def opening(self) -> re.Pattern[str] | None:
        """What stands before calls; None if a message with calls has nothing else."""
        ...

    def take(self, text: str, position: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        """Read what follows an opening: one call or several, malformed ones too.

        Args:
            text: message of the model.
            position: where the opening ends.
            schemas: schemas of the tools, for formats that write no types.

        Returns:
            The calls, and the position after them.
        """
        ...

    def alone(self, text: str) -> list[ToolCall]:
        """Read a text that has nothing but calls without an opening; return none if it is another text."""
        ...


# Stands for a word that is another one in each call, such as an identifier or the name of a type.
ANY_WORD = "\ufdd1"


def loose(literal: str) -> str:
    """Return a pattern of a text with any white space where it has some, and any word for ``ANY_WORD``."""
    return r"\s*+".join(map(re.escape, literal.split())).replace(ANY_WORD, r"[\w.:-]{0,128}")


def _opening(literal: str) -> re.Pattern[str] | None:
    return re.compile(loose(literal)) if literal else None


@dataclass(frozen=True)
class JsonCalls:
    """Calls that are JSON objects, one after the other or in a list.

    Attributes:
        example: see :class:`CallFormat`.
        open: what stands before the JSON; empty if nothing does.
        close: what stands after it.
        name: keys that lead to the name; empty if the name is the key of the arguments.
        arguments: keys that lead to the arguments, which may be an object or JSON in a text.
        id: keys that lead to the identifier; empty if there is none.
    """

    example: str
    open: str
    close: str
    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments",)
    id: tuple[str, ...] = ()

    @cached_property
    def opening(self) -> re.Pattern[str] | None:
        return _opening(self.open)

    @cached_property
    def _close(self) -> re.Pattern[str]:
        return re.compile(r"\s*+" + loose(self.close))

    def take(self, text: str, position: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        try:
            values, end = _json_values(text, position)
            if self.close and text[end:].strip() and not self._close.match(text, end):
                raise ValueError(f"there is text between the JSON and {self.close.strip()}")
        except (ValueError, RecursionError) as error:
            return [ToolCall("", {}, f"the call is not valid JSON: {error}")], position
        return [self._call(value) for value in values], end

    def alone(self, text: str) -> list[ToolCall]:
        """See :meth:`CallFormat.alone`. Models of all families also write the object alone, as Llama 3."""
        text = text.removeprefix("<|python_tag|>").strip()
        try:
            values, end = _json_values(text, 0)
        except (ValueError, RecursionError):
            return []
        calls = [self._call(value) for value in values] if self.name or not self.open else []
        return [] if text[end:] or any(call.error for call in calls) else calls

    def _call(self, value: Any) -> ToolCall:
        name: Any = _at(value, self.name)
        if not self.name:
            name = next(iter(value), None) if isinstance(value, dict) and len(value) == 1 else None
        if not isinstance(name, str):
            return ToolCall("", {}, f"a call is written as {self.example}")
        arguments = _at(value, self.arguments if self.name else (name,))
        if arguments is None:
            # Models take one for the other.
            arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return ToolCall(name, {}, f"the arguments are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            return ToolCall(name, {}, "the arguments of a call are an object with their names")
        identifier = _at(value, self.id) if self.id else None
        return ToolCall(name, arguments, id=identifier if isinstance(identifier, str) else None)


def _json_values(text: str, position: int) -> tuple[list[Any], int]:
    """Read JSON values that follow each other; return those of lists one by one, and the position after."""
    values: list[Any] = []
    while True:
        skipped = _BETWEEN_VALUES.match(text, position) if values else _SPACE.match(text, position)
        position = skipped.end() if skipped else position
        if values and text[position : position + 1] not in ("{", "["):
            return values, position
        value, position = _DECODER.raw_decode(text, position)
        values += value if isinstance(value, list) else [value]
        if not values or len(values) > MOST_READ:
            return values[:MOST_READ], position


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class NamedCalls:
    """Calls that have the name first, and then an object with the arguments.

    Attributes:
        example: see :class:`CallFormat`.
        open: what stands before the name, or the tag with which that begins; empty if a message with calls
            has nothing else.
        head: pattern of what stands from there to the object, with a group ``name``, and a group ``id`` if
            the model gives calls identifiers.
        id: identifier with ``{name}`` and ``{id}`` for the groups.
        quote: what stands around texts, in objects whose keys have no quotes; None for JSON.
    """

    example: str
    open: str
    head: str
    id: str = "{id}"
    quote: str | None = None

    @cached_property
    def opening(self) -> re.Pattern[str] | None:
        return _opening(self.open)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(r"\s*+" + self.head)

    def take(self, text: str, position: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        head = self._head.match(text, position)
        if head is None:
            return [ToolCall("", {}, f"a call is written as {self.example}")], position
        call, position = self._call(head, text)
        return [call], position

    def alone(self, text: str) -> list[ToolCall]:
        calls, end = ([], 0) if self.open else self.take(text, 0, {})
        return [] if text[end:].strip() or any(call.error for call in calls) else calls

    def _call(self, head: re.Match[str], text: str) -> tuple[ToolCall, int]:
        name, groups = head["name"], head.groupdict()
        try:
            if self.quote is None:
                arguments, position = _DECODER.raw_decode(text, head.end())
            else:
                arguments, position = loose_object(text, head.end(), self.quote)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"the arguments are not valid: {error}"), head.end()
        if not isinstance(arguments, dict):
            return ToolCall(name, {}, "the arguments of a call are an object with their names"), position
        written = self.id.format(**groups) if "id" in groups else None
        return ToolCall(name, arguments, id=written), position


@dataclass(frozen=True)
class PythonCalls:
    """Calls in Python, one after the other or in a list.

    Attributes:
        example: see :class:`CallFormat`.
        open: what stands before the calls; empty if a message with calls has nothing else.
        close: what stands after them.
    """

    example: str
    open: str
    close: str

    @cached_property
    def opening(self) -> re.Pattern[str] | None:
        return _opening(self.open)

    def take(self, text: str, position: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        close = re.compile(loose(self.close)).search(text, position) if self.close else None
        end = close.start() if close else len(text)
        return _python(text[position:end]), close.end() if close else end

    def alone(self, text: str) -> list[ToolCall]:
        calls = [] if self.open else _python(text)
        return [] if any(call.error for call in calls) else calls


def _python(text: str) -> list[ToolCall]:
    try:
        return [ToolCall(name, arguments) for name, arguments in python_calls(text)]
    except ValueError as error:
        return [ToolCall("", {}, f"the call is not valid Python: {error}")]


@dataclass(frozen=True)
class KeyedCalls:
    """Calls whose arguments are between tags, one by one and without quotes, as in XML.

    Attributes:
        example: see :class:`CallFormat`.
        open: what stands before the name, or the tag with which that begins.
        before: what stands between that tag and the name.
        first: what stands between the name and the key of the first argument.
        value: what stands between a key and its value.
        next: what stands between a value and the next key.
        close: what stands between the last value and the end of the call.
        empty: what stands after the name of a call without arguments; None if that is not known.
    """

    example: str
    open: str
    before: str
    first: str
    value: str
    next: str
    close: str
    empty: str | None

    @cached_property
    def _name(self) -> re.Pattern[str]:
        empty = r"(?!)" if self.empty is None else loose(self.empty)
        return re.compile(
            rf"\s*+{loose(self.before)}\s*+(?P<name>{NAME})\s*+(?:(?P<first>{loose(self.first)})|{empty})"
        )

    @cached_property
    def _key(self) -> re.Pattern[str]:
        # The line break is the template's, and other white space the value's.
        return re.compile(
            rf"\s*+({NAME})\s*+{loose(self.value)}" + (r"\n?" if self.value[-1:] == "\n" else "")
        )

    @cached_property
    def _end(self) -> re.Pattern[str]:
        start = r"\n?" if self.close[:1] == "\n" else ""
        return re.compile(f"{start}(?:(?P<next>{loose(self.next)})|{loose(self.close)})")

    @cached_property
    def opening(self) -> re.Pattern[str] | None:
        return _opening(self.open)

    def take(self, text: str, position: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        call, position = self._call(text, position, schemas)
        return [call], position

    def alone(self, text: str) -> list[ToolCall]:
        return []

    def _call(self, text: str, position: int, schemas: Schemas) -> tuple[ToolCall, int]:
        malformed = f"a call is written as {self.example}"
        head = self._name.match(text, position)
        if head is None:
            return ToolCall("", {}, malformed), position
        arguments: dict[str, Any] = {}
        known = schemas.get(head["name"], {})
        position, more = head.end(), head["first"] is not None
        while more:
            key = self._key.match(text, position)
            end = self._end.search(text, key.end()) if key else None
            if key is None or end is None:
                return ToolCall(head["name"], {}, malformed), position
            arguments[key[1]] = typed(text[key.end() : end.start()], known.get(key[1], {}))
            position, more = end.end(), end["next"] is not None
        return ToolCall(head["name"], arguments), position


_HERMES_EXAMPLE = '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
# For templates that write no calls: what most models have seen.
HERMES = JsonCalls(_HERMES_EXAMPLE, "<tool_call>", "</tool_call>")
