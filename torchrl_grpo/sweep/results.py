"""What a sweep has shown: means over seeds, differences to the baseline, and which can be told from 0.

Settings are compared on the seeds that both have, and on the same held-out problems. The baseline is the
first setting that has a mean, unless another is named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.runtime.files.shared_files import replace
from torchrl_grpo.sweep import limits, statistics
from torchrl_grpo.sweep.trials import ENDED, STOPPED_EARLY, UNFINISHED, Trial, metric_of, settings

RESULTS = "sweep.json"
BETTER, WORSE, OPEN = "better", "worse", "not distinguishable"
# A trial whose last value was not finite, or that has no evaluation.
_WITHOUT = "ended without a value"
_TOO_FEW = "needs at least 2 seeds in common"
# Names in the table. A larger value is better, so a loss is negative.
_SHORT = {"eval/primary": "primary", "eval/accuracy": "accuracy", "eval/loss": "-loss"}
# Differences below this are rounding.
_ROUNDING = 1e-9


def results(trials: Sequence[Trial], baseline: str | None = None) -> dict[str, Any]:
    """Compare the settings of a sweep.

    Args:
        trials: its trials.
        baseline: name of the setting that the others are compared with; None for the first that has a
            held-out value, or else the first.

    Returns:
        The content of ``sweep.json``.

    Raises:
        ConfigError: there is no such setting.
    """
    groups = settings(trials)
    if baseline is not None and baseline not in groups:
        raise ConfigError(
            f"--baseline={baseline}: there is no such setting; write one of {', '.join(groups)} instead"
        )
    entries = [_setting(name, group) for name, group in groups.items()]
    names = [entry["name"] for entry in sorted(entries, key=lambda entry: entry["mean"] is None)]
    first = next(iter(names), None) if baseline is None else baseline
    measured = trials if first is None else [*groups[first], *trials]
    metric = metric_of(measured)
    # Means of different metrics are not in one order.
    ranked = [
        entry for entry in entries if entry["mean"] is not None and metric_of(groups[entry["name"]]) == metric
    ]
    is_measured = any(entry["name"] == first for entry in ranked)
    others = [entry for entry in ranked if entry["name"] != first and is_measured]
    # A run that diverges stops with an error and stays unfinished. The mean of the others says too much.
    whole = [entry for entry in ranked if _has_ended(entry)]
    # Of several comparisons, one would otherwise be a false finding more often than once in 20 sweeps.
    strict = 1 - (1 - statistics.LEVEL) / max(1, len(others))
    for entry in entries:
        entry["difference"] = None
        if first is not None and entry in others:
            entry["difference"] = _difference(groups[entry["name"]], groups[first], strict)
    return {
        "metric": metric,
        "level": statistics.LEVEL,
        "baseline": first,
        "comparisons": len(others),
        "best": max(whole, key=_mean)["name"] if whole else None,
        "notes": [
            *limits.of_unfinished([entry for entry in ranked if entry not in whole]),
            *limits.of_groups(groups, metric),
            *limits.of_pairs(entries, groups, first),
        ],
        "settings": entries,
        "trials": [_trial(trial) for trial in trials],
    }


def write(folder: Path, entries: Mapping[str, Any]) -> Path:
    """Write ``sweep.json``.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / RESULTS
    replace(path, json.dumps(jsonable(entries), indent=1, allow_nan=False) + "\n")
    return path


def table(entries: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table of settings, below the names of the columns.

    The best is the first, and settings with unfinished trials come after the others.
    """
    metric = _SHORT.get(entries["metric"], "held-out")
    ranked = sorted(entries["settings"], key=lambda entry: (not _has_ended(entry), -_mean(entry)))
    names = ("setting", "seeds", metric, "95 %", "difference", "")
    return [names, *(_row(entry, entries["baseline"]) for entry in ranked)]


def screen(entries: Mapping[str, Any]) -> str:
    """Return what is shown of a sweep: a table of its settings, and which one won."""
    rows = table(entries)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join([*("  ".join(row).rstrip() for row in padded), "", *verdict(entries)])


def _setting(name: str, group: Sequence[Trial]) -> dict[str, Any]:
    ended = _by_seed(group)
    states = Counter(_state(trial) for trial in group)
    # Seeds that were stopped did badly, and so did those that diverged. The mean of the others says too much.
    is_whole = not states[STOPPED_EARLY] and not states[_WITHOUT]
    mean, bounds = _mean_of(_matrix([list(ended.values())])) if ended and is_whole else (None, None)
    return {
        "name": name,
        "seeds": sorted(ended),
        "values": {str(seed): trial.values[-1] for seed, trial in sorted(ended.items())},
        "states": dict(states),
        "mean": mean,
        "interval": bounds,
    }


def _difference(group: Sequence[Trial], baseline: Sequence[Trial], strict: float) -> dict[str, Any] | None:
    first, second = _by_seed(group), _by_seed(baseline)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    values = _matrix([[first[seed] for seed in seeds], [second[seed] for seed in seeds]])
    mean, bounds = _mean_of(values)
    entry: dict[str, Any] = {"mean": mean, "interval": bounds, "seeds": seeds, "problems": values.shape[1]}
    if bounds is None:
        return {**entry, "verdict": OPEN, "permutation_p": None, "more_seeds": None}
    center, half = statistics.interval(values, strict)
    is_open = abs(float(center)) <= float(half)
    needed = statistics.seeds_needed(values, strict) if is_open else None
    return {
        **entry,
        "verdict": OPEN if is_open else BETTER if mean > 0 else WORSE,
        "permutation_p": statistics.permutation_p(values),
        "more_seeds": None if needed is None else max(1, needed - len(seeds)),
    }


def _by_seed(group: Sequence[Trial]) -> dict[int, Trial]:
    return {trial.seed: trial for trial in group if trial.state == ENDED and trial.final is not None}


def _state(trial: Trial) -> str:
    return _WITHOUT if trial.state == ENDED and trial.final is None else trial.state


def _matrix(columns: Sequence[Sequence[Trial]]) -> statistics.Values:
    """Return values ``[S, P]`` of a setting, or differences of two; P is 1 without grades of problems."""
    trials = [trial for column in columns for trial in column]
    first = trials[0]
    is_graded = first.grades and all(trial.grades.keys() == first.grades.keys() for trial in trials)
    parts = [
        np.array(
            [
                [trial.grades[id] for id in first.grades] if is_graded else [trial.values[-1]]
                for trial in column
            ],
            dtype=np.float64,
        )
        for column in columns
    ]
    values: statistics.Values = parts[0] if len(parts) == 1 else parts[0] - parts[1]
    if not is_graded:
        return values
    # Trials of an older version do not name problems.
    names = {id: name for trial in trials for id, name in trial.problems.items()}
    return statistics.of_problems(values, [names.get(id, id) for id in first.grades])


def _mean_of(values: statistics.Values) -> tuple[float, list[float] | None]:
    # One seed shows nothing of how seeds differ, and without grades neither do a few equal values.
    if len(values) < 2 or (values.shape[1] == 1 and np.ptp(values) < _ROUNDING):
        return float(values.mean()), None
    mean, half = statistics.interval(values)
    return float(mean), [float(mean - half), float(mean + half)]


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "seed": trial.seed,
        "state": trial.state,
        "steps": trial.steps,
        "values": trial.values,
    }


def _mean(entry: Mapping[str, Any]) -> float:
    return float("-inf") if entry["mean"] is None else float(entry["mean"])


def _has_ended(entry: Mapping[str, Any]) -> bool:
    return UNFINISHED not in entry["states"]


def _row(entry: Mapping[str, Any], baseline: str | None) -> tuple[str, ...]:
    states = [f"{count} {state}" for state, count in sorted(entry["states"].items()) if state != ENDED]
    mean = "-" if entry["mean"] is None else f"{entry['mean']:.3f}"
    difference = entry["difference"]
    if entry["name"] == baseline:
        words = "(baseline)"
    elif difference is None:
        words = "-"
    else:
        words = f"{difference['mean']:+.3f} {_between(difference['interval'])} {difference['verdict']}"
    seeds = ", ".join([str(len(entry["seeds"])), *states])
    return (
        entry["name"],
        seeds,
        mean,
        _between(entry["interval"]),
        words.replace("  ", " "),
        _advice(difference),
    )


def _between(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _advice(difference: Mapping[str, Any] | None) -> str:
    if difference is None or difference["verdict"] != OPEN:
        return ""
    if difference["interval"] is None:
        return "needs more seeds, as these are equal" if len(difference["seeds"]) > 1 else _TOO_FEW
    more = difference["more_seeds"]
    if more is None:
        return "no number of seeds would do"
    return "about 1 more seed" if more == 1 else f"about {more} more seeds"


def verdict(entries: Mapping[str, Any]) -> list[str]:
    """Return the sentences that say which setting won, and what limits that."""
    best, baseline, notes = entries["best"], entries["baseline"], entries["notes"]
    if best is None and any(entry["mean"] is not None for entry in entries["settings"]):
        return ["No setting has ended with all of its trials, so none is called the best.", *notes]
    if best is None:
        return ["No trial has ended with a held-out value, so nothing can be compared.", *notes]
    differences = {entry["name"]: entry["difference"] for entry in entries["settings"]}
    if best == baseline:
        verdicts = [each["verdict"] for each in differences.values() if each is not None]
        worse = verdicts.count(WORSE)
        lines = [
            f"Best: {best}, the baseline. {worse} of the others are distinguishably worse, "
            f"{len(verdicts) - worse} are not."
        ]
    elif differences[best] is None:
        lines = [f"Best: {best}. It shares no seed that has ended with the baseline, {baseline}."]
    else:
        is_better = differences[best]["verdict"] == BETTER
        words = "is better than" if is_better else "cannot be told from"
        lines = [f"Best: {best}. It {words} the baseline, {baseline}."]
    if entries["comparisons"] > 1:
        lines.append(
            f"A difference counts as better or worse if its interval at {_strict(entries):.1%} excludes 0, "
            f"because {entries['comparisons']} are looked at."
        )
    return [*lines, *notes]


def _strict(entries: Mapping[str, Any]) -> float:
    return 1 - (1 - float(entries["level"])) / max(1, int(entries["comparisons"]))
