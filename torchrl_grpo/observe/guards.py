"""Applies the rules of :mod:`torchrl_grpo.observe.rules` to the lines of a run, one after the other.

The state follows from the lines alone, so a resumed run reads it from ``metrics.jsonl``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.observe.past import Past, Row, Setting
from torchrl_grpo.observe.rules import RULES, Rule


@dataclass(frozen=True)
class Finding:
    """A rule that holds.

    Attributes:
        rule: the rule.
        since: step of the first line that showed the sign.
        step: step of the line with which the rule began to hold.
        seen: what was seen when the rule began to hold.
        times: how often it has begun to hold.
        is_over: whether it no longer holds.
    """

    rule: Rule
    since: int
    step: int
    seen: str
    times: int
    is_over: bool = False

    def __str__(self) -> str:
        again = f", {self.times} times so far" if self.times > 1 else ""
        return f"warning: {self.seen} (since step {self.since}{again}): {self.rule.advice}"


class Guards:
    """Watches the metrics of a run.

    Args:
        setting: what thresholds depend on.
    """

    def __init__(self, setting: Setting | None = None) -> None:
        self._past = Past(Setting() if setting is None else setting)
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

    def holding(self, explained: bool = False) -> list[Finding]:
        """Return the findings that hold after the last line.

        Args:
            explained: whether to return those too that another one explains. They are not over.
        """
        return [
            finding
            for finding in self._holding.values()
            if explained or not self._holding.keys() & set(finding.rule.explained_by)
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
            numbers = defaultdict[str, Any](lambda: math.nan)
            numbers |= {name: value for name, value in row.items() if value is not None}
            number = rule.number(row, self._past)
            seen = rule.seen.format(row=numbers, number=number, past=self._past, window=rule.window)
            self._holding[rule.name] = Finding(rule, since, row["step"], seen, self._times[rule.name])
