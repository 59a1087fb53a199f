"""Find the format of a call in what a chat template writes for a call that is known.

The names and values of that call are words that no template writes, so the text around them is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.envs.episodes.tools.call_formats import (
    ANY_WORD,
    NAME,
    CallFormat,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonCalls,
    ToolCall,
    loose,
)

# Two calls. Their names end with other letters, so that a name is never part of what two calls share.
FIRST = ToolCall("zqx_first", {"zqx_a": "zqxvaluea", "zqx_b": "zqxvalueb"})
SECOND = ToolCall("zqx_other", {"zqx_a": "zqxvaluec", "zqx_b": "zqxvalued"})
_ATOMS = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]|.", re.DOTALL)


@dataclass(frozen=True)
class Written:
    """What a template writes for calls, without thoughts and without the end of the message.

    Attributes:
        message: the message with the first call.
        between: what stands between the last value of the first call and the name of the second; empty if
            the template takes one call only.
        empty: the message with the first call without its arguments; empty if the template cannot write that.
        id: identifier of the first call.
        plain: a message without calls.
    """

    message: str
    between: str
    empty: str
    id: str
    plain: str


def shared_start(a: str, b: str) -> str:
    """Return what two texts begin with, in whole tags."""
    shared = []
    for atom, other in zip(_ATOMS.findall(a), _ATOMS.findall(b), strict=False):
        if atom != other:
            break
        shared.append(atom)
    return "".join(shared)


def _shared_end(a: str, b: str) -> str:
    atoms = zip(reversed(_ATOMS.findall(a)), reversed(_ATOMS.findall(b)), strict=False)
    shared: list[str] = []
    for atom, other in atoms:
        if atom != other:
            break
        shared.append(atom)
    return "".join(reversed(shared))


def formats(written: Written) -> Iterator[CallFormat]:
    """Yield the formats that the text may have. The caller tries each on what the template writes."""
    for find in (_json, _named, _python, _keyed):
        call_format = find(written)
        if call_format is not None:
            yield call_format


def _example(written: Written) -> str:
    """Return the call with words for the model in place of the known ones."""
    text = written.message
    words = {
        written.id: written.id.replace(FIRST.name, "NAME") if FIRST.name in written.id else "ID",
        FIRST.name: "NAME",
        "zqx_a": "ARGUMENT",
        "zqx_b": "ARGUMENT",
        "zqxvaluea": "VALUE",
        "zqxvalueb": "VALUE",
    }
    for word, shown in words.items():
        text = text.replace(word, shown)
    return text.strip()


def _opening(before: str, between: str) -> str:
    """Return what stands before every call, from what is before the first and between two."""
    return _shared_end(before, between).strip() or before.replace(FIRST.name, "").strip()


def _marked(written: Written, opening: str) -> tuple[str, str]:
    """Split what stands before a call into the tag that no other message has, and the rest."""
    mark = _ATOMS.match(opening)
    is_tag = mark is not None and len(mark[0]) > 1 and written.message.count(mark[0]) == 1
    is_mark = mark is not None and is_tag and mark[0] not in written.plain
    return (mark[0], opening[mark.end() :]) if mark and is_mark else (opening, "")


def _json(written: Written) -> CallFormat | None:
    json_value = _json_with(written.message, (FIRST.name, "zqx_a", "zqxvalueb"))
    if json_value is None:
        return None
    start, end, value = json_value
    call = value[0] if isinstance(value, list) else value
    name = _path(call, lambda value: value == FIRST.name)
    arguments = _path(call, lambda value: _as_object(value) == FIRST.arguments)
    if arguments is None:
        return None
    identifier = _path(call, lambda value: value == written.id)
    before, close = written.message[:start], written.message[end:]
    opening = before.strip()
    # Several calls are one list, or several values, with tags of their own or without.
    inner = written.message[start : written.message.index(FIRST.name, start)]
    if written.between.endswith(inner):
        shared = _shared_end(before, written.between.removesuffix(inner)).strip()
        if shared:
            # Brackets and quotes end the first value.
            opening, close = shared, shared_start(close.strip(), written.between.lstrip('"}] \n'))
    return JsonCalls(_example(written), opening, close.strip(), name or (), arguments, identifier or ())


def _json_with(text: str, words: tuple[str, ...]) -> tuple[int, int, Any] | None:
    """Find the first JSON value that has all of some words; return its start and end too."""
    for bracket in re.finditer(r"[\[{]", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, bracket.start())
        except ValueError:
            continue
        if all(word in text[bracket.start() : end] for word in words):
            return bracket.start(), end, value
    return None


def _path(value: Any, is_match: Callable[[Any], bool]) -> tuple[str, ...] | None:
    """Return the keys that lead to a value in objects; None if it is not there."""
    if is_match(value):
        return ()
    for key, inner in value.items() if isinstance(value, dict) else ():
        path = _path(inner, is_match)
        if path is not None:
            return (key, *path)
    return None


def _as_object(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _named(written: Written) -> CallFormat | None:
    text = written.message
    at = text.rfind(FIRST.name, 0, text.find("zqx_a"))
    if at < 0:
        return None
    rest = text[at + len(FIRST.name) :]
    head, quote = rest[: rest.find("{")], None
    loosened = re.match(r"\{\s*zqx_a\s*:\s*(\S+?)zqxvaluea\1", rest[len(head) :])
    if loosened:
        quote = loosened[1]
    elif _json_with(rest[len(head) :], ("zqx_a", "zqxvalueb")) is None:
        return None
    opening = _opening(text[:at], written.between)
    pattern, identifier = f"(?P<name>{NAME}?)" + _with_groups(head, written.id), "{id}"
    if "<|message|>" in head:
        # Models of this format also write the recipient after the channel, and the kind of content elsewhere.
        pattern, opening = rf"(?P<name>{NAME}+)[^{{]{{0,256}}?<\|message\|>", _last_word(opening)
    before_name, is_id, after_name = written.id.partition(FIRST.name)
    if is_id and before_name and text[:at].endswith(before_name) and head.startswith(after_name):
        # The name is a part of the identifier, and a number follows it.
        pattern = f"(?P<name>{NAME}?)" + re.sub("0", r"(?P<id>\\d{1,18})", re.escape(after_name), count=1)
        pattern += loose(head[len(after_name) :])
        identifier = before_name + "{name}" + after_name.replace("0", "{id}")
    opening, rest_of_opening = _marked(written, opening)
    pattern = loose(rest_of_opening) + r"\s*+" + pattern + r"\s*+(?=\{)"
    return NamedCalls(_example(written), opening, pattern, identifier, quote)


def _last_word(text: str) -> str:
    return text.split()[-1] if text.split() else ""


def _with_groups(head: str, identifier: str) -> str:
    start, is_there, rest = head.partition(identifier)
    parts = [start, rest] if is_there else [head]
    return (r"\s*+(?P<id>[\w.:-]{1,128})\s*+" if is_there else "").join(
        r"\s*+" + loose(part) for part in parts
    )


def _python(written: Written) -> CallFormat | None:
    text = written.message
    match = re.search(rf"{FIRST.name}\(\s*zqx_a\s*=", text)
    if match is None:
        return None
    before = text[: match.start()].rstrip()
    close = text[text.rfind("zqxvalueb") + len("zqxvalueb") :].lstrip("\"' ,\n").removeprefix(")").strip()
    if before.endswith("["):
        before, close = before[:-1].rstrip(), close.removeprefix("]").strip()
    return PythonCalls(_example(written), before.strip(), close)


def _keyed(written: Written) -> CallFormat | None:
    text, empty = written.message, None
    at = text.rfind(FIRST.name, 0, text.find("zqx_a"))
    parts = re.split("|".join(("zqx_a", "zqx_b", "zqxvaluea", "zqxvalueb")), text[at + len(FIRST.name) :])
    if at < 0 or len(parts) != 5:
        return None
    # Some formats write identifiers, numbers or types of values too.
    varying = rf"(?<=[\">])(?:{re.escape(written.id)}|\d+|string|true)(?=[\"<])"
    first, value, following, same, close = (re.sub(varying, ANY_WORD, part) for part in parts)
    if value != same or not value.strip() or not close.strip():
        return None
    if FIRST.name in written.empty:
        empty = written.empty.rpartition(FIRST.name)[2]
    if written.between:
        shared = shared_start(close, written.between)
        if empty is not None:
            empty = empty.removesuffix(close[len(shared) :])
        close = shared
    opening, before_name = _marked(written, _opening(text[:at], written.between))
    if not opening:
        return None
    return KeyedCalls(_example(written), opening, before_name, first, value, following, close.rstrip(), empty)
