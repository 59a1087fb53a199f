"""Tool calls in the text of a model, and the description of tools for models whose template has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.envs.episodes.tools.call_formats import HERMES, CallFormat, Schemas, ToolCall
from torchrl_grpo.envs.openings import THOUGHTS

# Tags around thoughts, as families of models write them.
_TAGS = [
    (rf"<(?:\w+_)?{THOUGHTS}>", rf"</(?:\w+_)?{THOUGHTS}>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    (r"to=self<\|message\|>", r"<\|eom\|>"),
]
_OPENING = re.compile(rf"\A\s*(?:{'|'.join(start for start, _ in _TAGS)})\s*")
# The last two ends end other messages too.
_OPENED_BY_PROMPT = [(re.compile(start), re.compile(end)) for start, end in _TAGS[:-2]]
# Thoughts that do not end hide the rest.
_THOUGHTS = re.compile("|".join(rf"{start}.*?(?:{end}|\Z)" for start, end in _TAGS), re.DOTALL)


@dataclass(frozen=True)
class CallReader:
    """Reads the calls in messages of a model.

    Attributes:
        form: format of the calls.
        schemas: schemas of the tools' arguments, for formats that write no types.
        skips_opening: whether the tag of thoughts with which a prompt ends is left out, because the template
            writes calls without closing it.
    """

    form: CallFormat = HERMES
    schemas: Schemas = field(default_factory=dict)
    skips_opening: bool = False

    def read(self, text: str) -> list[ToolCall]:
        """Find the tool calls in a message, in their order, malformed ones too.

        What stands between tags of thoughts, such as ``<think>`` and ``</think>``, is no call.

        Args:
            text: the message, with the tags that its prompt has written.
        """
        if self.skips_opening:
            text = _OPENING.sub("", text)
        return self.form.read(without_thoughts(text), self.schemas)


def parse_calls(text: str) -> list[ToolCall]:
    """Find the tool calls in a message of a model whose template writes none.

    Each call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as :func:`describe` asks for.

    Args:
        text: message of the model.

    Returns:
        The calls in their order, malformed ones too; empty if the message has none.
    """
    return CallReader().read(text)


def without_thoughts(text: str) -> str:
    """Return a message without what stands between tags of thoughts."""
    for start, end in _OPENED_BY_PROMPT:
        found = end.search(text)
        if found and not start.search(text, 0, found.start()):
            # The prompt has opened the thoughts.
            text = text[found.end() :]
    return _THOUGHTS.sub("", text)


def describe(schemas: Sequence[Mapping[str, Any]], example: str) -> str:
    """Return the text of a system message about tools, for a chat template that does not describe them.

    Args:
        schemas: JSON schemas of the tools.
        example: a call as it is read.
    """
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return f"You can call these tools:\n<tools>\n{lines}\n</tools>\nTo call one, write:\n{example.strip()}"
