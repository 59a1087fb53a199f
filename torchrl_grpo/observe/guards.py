"""Applies the rules of :mod:`torchrl_grpo.observe.rules` to the lines of a run, one after the other.

The state follows from the lines alone, so a resumed run reads it from ``metrics.jsonl``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.observe.rules import RULES, Past, Row, Rule


@dataclass(frozen=True)
class Finding:
    """A rule that holds.

    Attributes:
        rule: the rule.
        since: step of the first line that showed the sign.
        seen: what was seen when the rule began to hold.
        times: how often it has begun to hold.
    """

    rule: Rule
    since: int
    seen: str
    times: int

    def __str__(self) -> str:
        again = f", {self.times} times so far" if self.times > 1 else ""
        return f"warning: {self.seen} (since step {self.since}{again}): {self.rule.advice}"


class Guards:
    """Watches the metrics of a run."""

    def __init__(self) -> None:
        self._past = Past()
        # For each rule: first step, and number, of the lines in a row that show its sign.
        self._streaks: dict[str, tuple[int, int]] = {}
        self._holding: dict[str, Finding] = {}
        self._times: Counter[str] = Counter()
        self._shown: set[str] = set()

    def take(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Add the metrics of a step, and return the findings that begin with it, each only the first time."""
        row = {"step": step, **jsonable(metrics)}
        self._past.take(row)
        for rule in RULES:
            self._apply(rule, row)
        begun = [finding for finding in self.holding() if finding.rule.name not in self._shown]
        self._shown |= {finding.rule.name for finding in begun}
        return begun

    def replay(self, rows: Iterable[Row]) -> list[Finding]:
        """Take lines that were written before, and return what still holds after them."""
        for row in rows:
            self.take(row["step"], row)
        return self.holding()

    def holding(self) -> list[Finding]:
        """Return the findings that hold after the last line, without those that another one explains."""
        return [
            finding
            for name, finding in self._holding.items()
            if not self._holding.keys() & set(finding.rule.explained_by)
        ]

    def _apply(self, rule: Rule, row: Row) -> None:
        bad = rule.is_bad(row, self._past)
        if bad is None:
            return
        if not bad:
            self._streaks.pop(rule.name, None)
            self._holding.pop(rule.name, None)
            return
        since, count = self._streaks.get(rule.name, (row["step"], 0))
        self._streaks[rule.name] = since, count + 1
        if count + 1 >= rule.window and rule.name not in self._holding:
            self._times[rule.name] += 1
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            seen = rule.seen.format(row=numbers, window=rule.window)
            self._holding[rule.name] = Finding(rule, since, seen, self._times[rule.name])
