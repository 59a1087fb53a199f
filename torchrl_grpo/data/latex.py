r"""Find the last ``\boxed{...}`` in a text. Data sets and rewards both use it."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}")
#: Longest answer in characters. The limit bounds the search for the closing brace.
_MAX_CHARS = 10_000


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}``.

    Args:
        text: any text.

    Returns:
        The content without outer spaces, or None if there is no box or the last one is not closed.
        ``\boxed 5`` gives ``"5"``.
    """
    starts = [text.rfind(name) for name in (r"\boxed", r"\fbox")]
    match = _BOX.match(text, max(starts)) if max(starts) >= 0 else None
    if match is None:
        return None
    start = match.end()
    if not text.startswith("{", start):
        word = text[start : start + 100].split(maxsplit=1)
        return word[0].rstrip("$.,") or None if word else None
    depth = 0
    for position in range(start, min(len(text), start + _MAX_CHARS)):
        char = text[position]
        if text[position - 1] == "\\" and char in "{}":
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[start + 1 : position].strip() or None
    return None
