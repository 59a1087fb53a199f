"""One problem: the chat messages of the prompt and the ground truth for its answer."""

from __future__ import annotations

import dataclasses
import datetime
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from torchrl_grpo.errors import DataError

if TYPE_CHECKING:
    from torchrl_grpo.data.pictures import Picture


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
        identity: what problems have in common that are the same in other words, e.g. the numbers of a puzzle
            in any order. Empty if only the question says so (:mod:`torchrl_grpo.data.identity`).
        pictures: pictures of the problem, in the order of their marks in ``messages``
            (:mod:`torchrl_grpo.data.pictures`).
        trusted: texts of the configuration with which messages begin or end. Only they keep their control
            tokens. None keeps those of all messages, and of the solution.
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
    identity: str = ""
    trusted: list[str] | None = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the fields as values of JSON, without pictures.

        Arrays in the columns become lists, and dates become text.

        Raises:
            DataError: a column has a value that JSON cannot express.
        """
        fields = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        columns = {name: _plain(value, f"{self.id}: column {name!r}") for name, value in self.columns.items()}
        return {**fields, "columns": columns, "pictures": ()}


def _plain(value: Any, place: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part, place) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part, place) for part in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal | UUID | PurePath):
        return str(value)
    for kind in (str, int, float):  # numbers and texts of other libraries
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "tolist"):  # arrays, tensors and their numbers
        return _plain(value.tolist(), place)
    raise DataError(
        f"{place} has a {type(value).__name__}, which cannot be passed to another process; turn it into "
        "text, numbers or lists, or remove the column"
    )


def is_role(value: object) -> bool:
    """Whether a value is the role of a message. A chat template may write it into a control token."""
    return isinstance(value, str) and re.fullmatch(r"[\w-]+", value) is not None


class LazyExamples(Sequence[Example]):
    """Examples that are made on access."""

    def without(self, keys: Set[str]) -> LazyExamples:
        """Return the same examples, with others in place of those that have one of ``keys``.

        Keys are those of :func:`torchrl_grpo.data.identity.keys`.
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
