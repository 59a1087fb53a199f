"""The think/answer format: ``<think>...</think><answer>...</answer>`` and nothing else.

score = 0.5 * tags + 0.5 * exact, with the components
    tags: share of the four tags that appear exactly once (0, 0.25, 0.5, 0.75 or 1);
    exact: 1 if all four tags appear once and in order, both pairs have content, and only spaces are outside.
A text without any tag scores 0, and repeating a tag never raises the score. Tags that the prompt has written
count as written: a response to a prompt that ends with ``<think>`` goes on inside it. Thoughts that the
prompt has closed may be empty.
"""

from __future__ import annotations

from torchrl_grpo.config import Config
from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class FormatReward:
    """Score how closely a completion follows the think/answer format. The answer itself is ignored."""

    name = "format"

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        """Return ``score`` in [0, 1] and its components ``tags`` and ``exact``."""
        block = completion.block if isinstance(completion, ResponseText) else ""
        text = block + completion
        once = sum(text.count(tag) == 1 for tag in _TAGS)
        exact = once == len(_TAGS) and _in_order(text.strip(), has_thoughts=bool(block))
        return {
            "score": 0.5 * once / len(_TAGS) + 0.5 * exact,
            "tags": once / len(_TAGS),
            "exact": float(exact),
        }


def _in_order(text: str, has_thoughts: bool) -> bool:
    """Whether a text that has each tag once is exactly the two pairs, both with content.

    With ``has_thoughts``, the thoughts may be empty.
    """
    think, think_end, answer, answer_end = (text.index(tag) for tag in _TAGS)
    if not (think == 0 < think_end < answer < answer_end == len(text) - len(_TAGS[3])):
        return False
    between = text[think_end + len(_TAGS[1]) : answer]
    thoughts, inside = text[len(_TAGS[0]) : think_end], text[answer + len(_TAGS[2]) : answer_end]
    return not between.strip() and bool(inside.strip()) and (has_thoughts or bool(thoughts.strip()))


def build(cfg: Config) -> FormatReward:
    """Return the reward. It reads no key."""
    return FormatReward()
