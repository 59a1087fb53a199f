"""Tags around the thoughts of a model, as families of models write them, and what stands outside of them.

All functions take time linear in the text, because a response can be a megabyte of garbage.
"""

from __future__ import annotations

import functools
import re

_NAME = (
    r"(?:\w{1,32}[:_])?"
    r"(?:thinking|think|thoughts?|reasoning|reason|analysis|reflection|monologue|scratch_?pad)"
)
_S = r"\s{0,8}"
_ATTRIBUTE = r"\s[\w-]{1,32}=[^<>]{0,99}"
# What opens thoughts, and what closes them. The first ones have a name.
_TAGS = [
    (rf"<{_S}{_NAME}(?:{_ATTRIBUTE}|{_S})>", rf"<{_S}/{_S}{_NAME}{_S}>"),
    (rf"\[{_S}think(?:ing)?{_S}\]", rf"\[{_S}/{_S}think(?:ing)?{_S}\]"),
    (rf"◁{_S}think{_S}▷", rf"◁{_S}/{_S}think{_S}▷"),
    (rf"<\|{_S}(?!end_){_NAME}{_S}\|>", rf"<\|{_S}(?:/{_S}|end_(?:of_)?){_NAME}{_S}\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (rf"<\|channel>{_S}thought", r"<channel\|>"),
    (rf"<unused94>{_S}thought", r"<unused95>"),
    # The ends of the last two end other messages too.
    (rf"<\|channel\|>{_S}analysis{_S}<\|message\|>", r"<\|end\|>"),
    (rf"to=self{_S}<\|message\|>", r"<\|eom\|>"),
]
_NAMED, _SHARED_ENDS = 4, 2
_FLAGS = re.IGNORECASE | re.ASCII
# How each of them begins, so that most places of a text are passed without trying them all.
_BEGIN = r"(?=[\[◁t]|<[^<])"
# For patterns of others. Case and white space make no difference.
OPENING = f"(?ai:{'|'.join(start for start, _ in _TAGS)})"
NAMES = f"(?ai:{_S}{_NAME}{_S})"


def _pattern(with_shared_ends: bool) -> re.Pattern[str]:
    ends = _TAGS if with_shared_ends else _TAGS[:-_SHARED_ENDS]
    starts = [f"(?P<open{number}>{start})" for number, (start, _) in enumerate(_TAGS)]
    closes = [f"(?P<close{number}>{end})" for number, (_, end) in enumerate(ends)]
    return re.compile(f"{_BEGIN}(?:{'|'.join([*starts, *closes])})", _FLAGS)


_ANY, _OUTSIDE = _pattern(True), _pattern(False)
_FIRST = re.compile(rf"\s*+(?={OPENING})")
# The template and the model may both write the tag.
_BETWEEN = re.compile(r"(?:\s|<\|\w{1,32}\|>(?:assistant)?)*+")
_WORD = re.compile(r"(?:start_|begin_|end_)?(?:of_)?(" + _NAME + ")", _FLAGS)


def next_tag(text: str, position: int = 0) -> re.Match[str] | None:
    """Return the next tag that opens thoughts, or closes some that nothing in the text has opened."""
    return _OUTSIDE.search(text, position)


def opens(tag: re.Match[str]) -> bool:
    """Whether a tag opens thoughts."""
    return str(tag.lastgroup).startswith("open")


def closing(tag: str) -> str:
    """Return the tag that closes what a tag opens."""
    match = _ANY.match(tag)
    number = int(str(match.lastgroup).removeprefix("open")) if match else 0
    if number >= _NAMED:
        return _TAGS[number][1].replace("\\", "")
    if re.search("start_|begin_", tag, re.IGNORECASE):
        return tag.replace("START_", "END_").replace("start_", "end_").replace("begin_", "end_")
    return f"<|/{tag[2:]}" if tag.startswith("<|") else f"{tag[0]}/{tag[1:]}"


def end_of(text: str, tag: re.Match[str], is_strict: bool = True) -> int | None:
    """Return the position after the thoughts that a tag opens.

    Args:
        text: text with the tag.
        tag: the tag. Thoughts inside the thoughts have to end too. A tag that is written twice counts once.
        is_strict: whether thoughts have no end if others inside them have none. If not, the last tag is it.

    Returns:
        The position; None if the thoughts have no end.
    """
    kind, depth, is_first, last, end = _kind(tag.lastgroup, tag[0]), 1, True, tag.end(), None
    for other in _ANY.finditer(text, tag.end()):
        if _kind(other.lastgroup, other[0]) != kind:
            continue
        is_first = is_first and opens(other) and bool(_BETWEEN.fullmatch(text, last, other.start()))
        last = other.end()
        if not opens(other):
            depth, end = depth - 1, last
        elif not is_first:
            depth += 1
        if depth == 0:
            return end
    return None if is_strict else end


@functools.lru_cache(maxsize=256)
def _kind(group: str | None, tag: str) -> tuple[int, str]:
    """Return what the tags have in common that open and close the same thoughts."""
    number = int(str(group).removeprefix("open").removeprefix("close"))
    word = _WORD.search(tag) if number < _NAMED else None
    return number, word[1].lower() if word else ""


def end_of_first(text: str, is_strict: bool = True) -> int | None:
    """Return the position after all thoughts with which a text begins; None if they have no end.

    Args:
        text: the text.
        is_strict: see :func:`end_of`.
    """
    position: int | None = 0
    while position is not None and (start := _FIRST.match(text, position)):
        tag = _ANY.match(text, start.end())
        assert tag is not None, "the pattern has all tags"
        position = end_of(text, tag, is_strict)
    return position


def without_thoughts(text: str) -> str:
    """Return a text without thoughts. Those that do not end hide the rest."""
    parts: list[str] = []
    position = 0
    while tag := next_tag(text, position):
        if opens(tag):
            parts.append(text[position : tag.start()])
            end = end_of(text, tag)
            position = len(text) if end is None else end
        else:
            # The prompt has opened the thoughts.
            parts.clear()
            position = tag.end()
    return "".join([*parts, text[position:]])


def after_last(text: str) -> str:
    """Return what follows the last tag that closes thoughts; the whole text if there is none."""
    end = 0
    for tag in _OUTSIDE.finditer(text):
        end = end if opens(tag) else tag.end()
    return text[end:]
