"""A sample of texts within a bound: all of them in a short run, and an even part of the rounds in a long one.

Groups stay whole. The first round and the newest are kept longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Characters of a single text that are kept: its beginning, and its end.
_HEAD, _TAIL = 12_000, 4_000
# Characters of an id that are kept.
_LONGEST_ID = 300


def shorten(text: str) -> str:
    """Return a text, without its middle if it is long."""
    if len(text) <= _HEAD + _TAIL:
        return text
    missing = len(text) - _HEAD - _TAIL
    return f"{text[:_HEAD]}\n[... {missing:,} characters are not in this report ...]\n{text[-_TAIL:]}"


def problem_id(row: Mapping[str, Any]) -> str:
    """Return the id of the question of a line of ``evaluations.jsonl``. A long one ends in a checksum."""
    return _short(str(row.get("id")))


def problem_name(row: Mapping[str, Any]) -> str | None:
    """Return which problem a question words, if a line of ``evaluations.jsonl`` says so."""
    name = row.get("problem")
    return _short(name) if isinstance(name, str) and name else None


def _short(id: str) -> str:
    if len(id) <= _LONGEST_ID:
        return id
    checksum = hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{id[:_LONGEST_ID]} ... ({checksum[:16]})"


@dataclass
class _Round:
    groups: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def keep(self, count: int) -> None:
        """Keep the first ``count`` groups."""
        for group in list(self.groups)[count:]:
            del self.groups[group], self.sizes[group]


class TextSample:
    """Texts of rows, by round and group.

    Args:
        budget: number of characters to keep.

    Attributes:
        lost: whether any text was dropped.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.lost = False
        self._rounds: dict[int, _Round] = {}
        # Rounds that were seen, by their order, as every stride-th of them is kept.
        self._order: dict[int, int] = {}
        self._groups: int | None = None
        self._stride = 1
        self._size = 0

    def add(self, step: int, group: int, row: int, entry: Any, size: int) -> None:
        """Add the text of a row.

        Args:
            step: step of the round. It must not fall.
            group: number of the group.
            row: number of the row.
            entry: what to keep.
            size: number of characters of ``entry``.
        """
        if step not in self._rounds:
            self._rounds[step] = _Round()
            self._order[step] = len(self._order)
            self._thin()
        newest = self._rounds[step]
        # A single round must not fill the budget, whatever is in it.
        if group not in newest.groups and newest.size + size > self._budget // 4:
            self.lost = True
            return
        newest.groups.setdefault(group, []).append((row, entry))
        newest.sizes[group] = newest.sizes.get(group, 0) + size
        self._size += size

    def entries(self) -> Iterator[tuple[int, Any]]:
        """Return row and entry of each text, in the order of the rows."""
        for round_ in self._rounds.values():
            for group in round_.groups.values():
                yield from group

    def _thin(self) -> None:
        """Drop texts of the rounds between the first and the newest until the rest fits."""
        for step in list(self._rounds)[1:-1][-1:]:
            self._restrict(step)
        while self._size > self._budget and len(self._rounds) > 2:
            middle = list(self._rounds)[1:-1]
            largest = max(len(self._rounds[step].groups) for step in middle)
            if largest > 1:
                self._groups = (largest + 1) // 2
            else:
                self._stride *= 2
            for step in middle:
                self._restrict(step)

    def _restrict(self, step: int) -> None:
        """Apply what all rounds but the first and the newest must keep to."""
        round_ = self._rounds[step]
        groups, size = len(round_.groups), round_.size
        if self._groups is not None:
            round_.keep(self._groups)
        if self._order[step] % self._stride:
            round_.keep(0)
        self.lost |= len(round_.groups) < groups
        self._size += round_.size - size
        if not round_.groups:
            del self._rounds[step]
