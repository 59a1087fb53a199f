"""One problem: the chat messages of the prompt and the ground truth for its answer."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Hashable, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any, overload


@dataclass(frozen=True)
class Example:
    """One problem.

    Attributes:
        id: stable name of the row, unique within its data set, e.g. ``"gsm8k/train/17"``.
        messages: chat messages ``[{"role": ..., "content": ...}, ...]`` ending with the user's turn.
        truth: JSON-serializable ground truth for the rewards. Each data set has its own keys.
        columns: the row as the data set has it, for rewards of the user; empty for generated problems.
        tools: JSON schemas of the tools that the chat template describes to the model; empty for none.
        part: name of its part of a mixture; empty without a mixture.
        source_messages: messages of the data set, if an environment or tools have changed ``messages``.
        solution: a solution in the format that the prompt asks for, for supervised fine-tuning; empty for
            none.
        question: what the data set asks, before templates and system prompts: the text of the question, or
            the whole conversation as JSON. Problems with the same question are the same problem. Empty if
            ``messages`` is all there is.
    """

    id: str
    messages: list[dict[str, str]]
    truth: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""
    source_messages: list[dict[str, str]] = field(default_factory=list)
    solution: str = ""
    question: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the fields as values of JSON. Dates and the like in the columns become text."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return fields


class LazyExamples(Sequence[Example]):
    """Examples that are made on access."""

    def without(self, keys: Set[Hashable]) -> LazyExamples:
        """Return the same examples, with others in place of those whose key is among ``keys``.

        Keys are those of :func:`~torchrl_grpo.data.problems.question_key`.
        """
        raise TypeError(f"{type(self).__name__} cannot leave out problems")

    @abstractmethod
    def example_at(self, index: int) -> Example:
        """Return the example with an index of at least 0 and below the length."""

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.example_at(number) for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.example_at(index % len(self))
