"""What a prompt has already written of the response, such as ``<think>`` at its end.

Chat templates of reasoning models end a prompt with the tag that opens the thoughts, or with an empty block
of thoughts. The response then goes on inside the tag, or after the block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_grpo.data.thoughts import NAMES, OPENING, closing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template may also end with a tag that names the speaker, so only tags of a response's parts are known.
_TAG = rf"(?:{OPENING}|<(?:answer|solution)>)"
_OPENING = re.compile(
    rf"(?P<block>(?:<(?P<name>{NAMES})>(?:\s*|\n[^<]*\n)</(?P=name)>\s*)?)(?P<opened>(?:{_TAG}\s*)*)\Z"
)
_BLOCK = re.compile(rf"\s*<(?P<name>{NAMES})>.*?</(?P=name)>", re.DOTALL)
# The end of a prompt in which an opening is looked for. A tokenizer may have a token for each character.
_TOKENS, _CHARACTERS = 128, 1000


@dataclass(frozen=True)
class Opening:
    """The start of a response that its prompt has written.

    Attributes:
        block: thoughts that are closed already, usually empty ones, with the white space after them.
        opened: tags that are not closed yet, with the white space after them.
    """

    block: str = ""
    opened: str = ""

    @property
    def tags(self) -> list[str]:
        """The tags that are not closed yet."""
        return re.findall(_TAG, self.opened)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The tags that are not closed yet, with those that close them."""
        return [(tag, closing(tag)) for tag in self.tags]

    def continued(self, text: str) -> str:
        """Return what is left to write of a response that has all its tags.

        Args:
            text: the response. Thoughts of its own are left out if the prompt has closed them.
        """
        whole = text
        if self.block:
            text = _BLOCK.sub("", text, count=1) if _BLOCK.match(text) else text
        for tag in self.tags:
            if text.lstrip().startswith(tag):
                text = text.lstrip().removeprefix(tag)
        has_space = (self.block + self.opened)[-1:].isspace()
        return text.lstrip() if has_space and text != whole else text


def opening(prompt: str) -> Opening:
    """Return what a prompt has written of the response.

    Args:
        prompt: text of the prompt, or of its end, with special tokens.
    """
    match = _OPENING.search(prompt[-_CHARACTERS:])
    assert match is not None, "the pattern matches the empty end"
    return Opening(match["block"], match["opened"])


def opening_of_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Opening:
    """Return what a prompt has written of the response.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: token ids of the prompt.
    """
    return opening(str(tokenizer.decode(list(prompt[-_TOKENS:]), skip_special_tokens=False)))
