"""Extract the answer from a completion: inside ``<answer>`` tags, or after ``####``.

All functions take time linear in the text, because a completion can be a megabyte of garbage.
"""

from __future__ import annotations

import re

from torchrl_grpo.data.thoughts import end_of_first

_TAG = re.compile(r"(?ai:<\s{0,4}(/?)\s{0,4}answer\s{0,4}>)")


def tagged(completion: str) -> str | None:
    """Return the content of the last closed ``<answer>`` tag.

    Tags are case-insensitive. Of nested tags the outer pair counts, and the inner tags are removed. Unmatched
    opening and closing tags are ignored.

    Args:
        completion: text that the model wrote.

    Returns:
        The content without outer spaces, which may be empty, or None if no tag is closed.
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
    """Return the text after the last ``####``, up to the end of the line.

    Returns:
        The text without outer spaces, or None if no ``####`` has text after it.
    """
    text = completion.rstrip().rstrip("#")
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines() if mark else []
    return lines[0].strip() if lines else None


def answer(completion: str, answer_format: str) -> str | None:
    """Return the answer in the format ``env.answer_format``.

    Args:
        completion: text that the model wrote.
        answer_format: ``"tags"`` for the last closed ``<answer>``, ``"plain"`` for the whole text without the
            thoughts that it begins with, or ``"equation"`` for the text after the last equals sign.

    Returns:
        The answer without outer spaces, or None if the text has no closed tag (``"tags"``) or no equals sign
        (``"equation"``).
    """
    if answer_format == "tags":
        return tagged(completion)
    if answer_format == "equation":
        _, sign, value = completion.rpartition("=")
        return value.strip() if sign else None
    # Thoughts that do not end are part of the answer, and make it wrong.
    return completion[end_of_first(completion, is_strict=False) or 0 :].strip()
