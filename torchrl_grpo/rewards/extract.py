"""Where in a completion the answer stands: inside ``<answer>`` tags, or after ``####``.

Everything here takes time in proportion to the text: completions can be a megabyte of garbage.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"(?ai:<\s{0,4}(/?)\s{0,4}answer\s{0,4}>)")


def tagged(completion: str) -> str | None:
    """The content of the last ``<answer>`` tag that is closed.

    Args:
        completion: what the model wrote. Tags may be in any case; of nested tags the outer pair counts, with
            the inner tags taken out; opening tags that are never closed, and closing tags that close
            nothing, do not count.

    Returns:
        The content without outer spaces, perhaps empty; None where no tag is closed.
    """
    open_ends: list[int] = []
    content: tuple[int, int] | None = None
    for tag in _TAG.finditer(completion):
        if not tag.group(1):
            open_ends.append(tag.end())
        elif open_ends:
            content = (open_ends.pop(), tag.start())
    if content is None:
        return None
    return _TAG.sub("", completion[slice(*content)]).strip()


def after_hashes(completion: str) -> str | None:
    """What follows the last ``####``, up to the end of its line.

    Returns:
        The text without outer spaces; None where there is no ``####`` with something after it.
    """
    text = completion.rstrip().rstrip("#")
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines() if mark else []
    return lines[0].strip() if lines else None


def answer(completion: str, answer_format: str) -> str | None:
    """The answer by ``env.answer_format``.

    Args:
        completion: what the model wrote.
        answer_format: ``"tags"``: the last closed ``<answer>``; ``"plain"``: the whole text; ``"equation"``:
            what follows the last equals sign.

    Returns:
        The answer without outer spaces; None where tags are wanted and none is closed, or where an equation
        is wanted and there is no equals sign.
    """
    if answer_format == "tags":
        return tagged(completion)
    if answer_format == "equation":
        _, sign, value = completion.rpartition("=")
        return value.strip() if sign else None
    return completion.strip()
