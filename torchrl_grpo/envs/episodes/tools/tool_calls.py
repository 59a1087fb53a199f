"""Tool calls in the text of a model, and the description of tools for models whose template has none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.data.thoughts import OPENING, end_of, end_of_first, next_tag, opens
from torchrl_grpo.envs.episodes.tools.call_formats import HERMES, MOST_READ, CallFormat, Schemas, ToolCall

_BEFORE_TOOLS, _AFTER_TOOLS = "You can call these tools:\n<tools>\n", "\n</tools>\nTo call one, write:\n"
_OPENING = re.compile(rf"\A\s*+{OPENING}\s*+")


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

        What stands between tags of thoughts, such as ``<think>`` and ``</think>``, is no call. Tags in the
        arguments of a call are text.

        Args:
            text: the message, with the tags that its prompt has written.
        """
        if self.skips_opening:
            text = _OPENING.sub("", text)
        calls: list[ToolCall] = []
        position = count = 0
        opening = self.form.opening
        match = opening.search(text) if opening else None
        tag = next_tag(text)
        while True:
            # Each is searched once, so that the time is linear.
            if opening and match and match.start() < position:
                match = opening.search(text, position)
            if tag and tag.start() < position:
                tag = next_tag(text, position)
            if match and count < MOST_READ and (tag is None or match.start() < tag.start()):
                more, position = self.form.take(text, match.end(), self.schemas)
                calls += more
                count += 1
            elif tag is None:
                return calls[:MOST_READ] or self._alone(text)
            elif opens(tag):
                end = end_of(text, tag)
                position = len(text) if end is None else end
            else:
                # What stands before it was thoughts, and something else has opened them.
                calls.clear()
                position = tag.end()

    def _alone(self, text: str) -> list[ToolCall]:
        """Read a message that has calls without a tag before them, and nothing else but thoughts."""
        start = end_of_first(text)
        if start is None:
            return []
        tag = next_tag(text, start)
        calls = self.form.alone(text[start:].strip())
        return calls or (self.form.alone(text[tag.end() :].strip()) if tag and not opens(tag) else [])


def describe(schemas: Sequence[Mapping[str, Any]], example: str) -> str:
    """Return the text of a system message about tools, for a chat template that does not describe them.

    Args:
        schemas: JSON schemas of the tools.
        example: a call as it is read.
    """
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return f"{_BEFORE_TOOLS}{lines}{_AFTER_TOOLS}{example.strip()}"


def described(message: str) -> list[dict[str, Any]]:
    """Return the schemas in a message that ends with a text of :func:`describe`; none if it does not."""
    _, start, rest = message.rpartition(_BEFORE_TOOLS)
    return [json.loads(line) for line in rest.partition(_AFTER_TOOLS)[0].split("\n")] if start else []
