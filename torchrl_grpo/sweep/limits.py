"""What limits the comparison of a sweep, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrl_grpo.report.comparison import MEASURING
from torchrl_grpo.sweep.trials import Trial, metric_of

# Keys that say how a response is asked for and graded.
_MEASURING = {*MEASURING, "eval.reward", "eval.threshold"}
Groups = Mapping[str, Sequence[Trial]]


def of_unfinished(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which settings cannot be the best, because some of their trials are unfinished.

    Args:
        entries: settings with a mean and with unfinished trials.
    """
    if entries:
        counts = [
            f"{entry['name']} ({len(entry['seeds'])} of {sum(entry['states'].values())})" for entry in entries
        ]
        yield (
            f"Not all trials have ended, so these settings cannot be the best: {', '.join(counts)}. A run "
            "that failed stays unfinished."
        )


def of_groups(groups: Groups, metric: str) -> Iterator[str]:
    """Yield what the settings themselves say against a comparison.

    Args:
        groups: trials by setting.
        metric: metric by which they are compared.
    """
    for name, group in groups.items():
        if (other := metric_of(group)) not in ("", metric):
            yield f"{name} was measured by {other} and not by {metric}, so it is not compared."
        for seed, count in Counter(trial.seed for trial in group).items():
            if count > 1:
                yield f"{count} trials of {name} have seed {seed}; only the last that has ended counts."
    trials = [trial for group in groups.values() for trial in group]
    ways = [key for key in sorted(_MEASURING) if len({trial.overrides.get(key) for trial in trials}) > 1]
    if ways:
        keys = ", ".join(ways)
        yield f"Settings are measured in different ways, so their values need not mean the same: {keys}."


def of_pairs(entries: Sequence[Mapping[str, Any]], groups: Groups, baseline: str | None) -> Iterator[str]:
    """Yield which settings have grades of other held-out problems than the baseline.

    Args:
        entries: settings with their differences to the baseline.
        groups: trials by setting.
        baseline: name of the baseline.
    """
    problems = {name: {frozenset(t.grades) for t in group if t.grades} for name, group in groups.items()}
    known = set() if baseline is None else problems[baseline]
    compared = [entry["name"] for entry in entries if entry["difference"] is not None]
    others = [name for name in compared if known and problems[name] - known]
    if others:
        names = ", ".join(others)
        yield f"Held-out problems differ from those of the baseline, so nothing is paired by them: {names}."
