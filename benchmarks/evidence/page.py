"""Makes the pages of results, and their pictures, of the records."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence import comparisons, other_ways, published, tasks
from benchmarks.evidence.experiment import NO_RISE, Experiment
from benchmarks.evidence.experiments import EXPERIMENTS
from benchmarks.evidence.records import RESPONSES
from torchrl_grpo.sweep import statistics

_ROOT = Path(__file__).resolve().parents[2]
# Arms that each task has beside GRPO.
_BESIDE = ("reward for form", "random reward", "SFT")
PICTURES, README = _ROOT / "docs/pictures", _ROOT / "README.md"
# README has the samples of the first arm of this experiment between these lines.
SAMPLED = "TRL"
_BEGIN, _END = "<!-- Made by python -m benchmarks.evidence. -->\n", "<!-- End of what is made. -->\n"
_HEAD = f"""# Results

What GRPO teaches a small model on generated tasks, beside controls, with intervals. A claim is
refuted if {NO_RISE[0].lower()}{NO_RISE[1:-1]}, unless its section says otherwise.
[Refuted claims](results_refuted.md), [IFEval and GSM8K](results_ifeval_gsm8k.md),
[a server, a teacher and pictures](results_other_ways.md), and [comparisons](comparisons.md) with TRL and
between settings have pages of their own. A section is one command, where NAME is the name of its file of
records:

```
python -m benchmarks.evidence NAME --folder FOLDER             # all arms and seeds, and this page
python -m benchmarks.evidence NAME --folder FOLDER --seed 1    # one seed again
```

A repeated run says how many grades differ from its record. Runs are in FOLDER/NAME/ARM-SEED.
`benchmarks/evidence/records` has commands (older ones without long values), versions, machine, the curve of
each run, and the grade of each held-out problem. `benchmarks/evidence/responses` has all sampled and held-out
responses of newer runs (`xzcat FILE`). Held-out problems are never trained on.

Intervals are 95 %, over seeds and problems together ([sweeps.md](sweeps.md)); where some seeds learn and
others collapse, they hold less often. Questions that ask the same in other words are one problem. A
difference is that to the first arm, on the same seeds and problems. *Form* is the share of answers in the
right form. *Best of 8* is pass@8: whether any of eight answers, sampled at temperature 1, is right. *No
model* marks policies that answer without one. Seconds are those of each command of an arm, with start and
evaluations; other programs often shared the machine.

On all tasks but sums, GRPO's own reward is 1 for a right answer and 0.1 for its form. Controls often fall
below the start, and then leads over them say less than the rise does. Random rewards are the same sequence
for every seed. Sums, products and differences come from one generator. No lead over SFT, on 48 to 128
written solutions, is above 0: GRPO is for tasks whose answers can be checked and whose solutions nobody has
written.
"""
_REFUTED_HEAD = """# Refuted claims

Tasks on which GRPO did not do what was claimed, and why. Commands, intervals and columns are as in
[results](results.md).
"""


_OTHER_WAYS_HEAD = """# Results of other ways of learning

What a game on a server, a teacher, and pictures teach. None has a reward for form or at random beside it.
Commands, intervals and columns are as in [results](results.md).
"""
_PUBLISHED_HEAD = """# Results on IFEval and GSM8K

What a model of 135M parameters learns on two published benchmarks, under limits that make these numbers no
scores of the benchmarks; each section names them. Commands, intervals, columns and what refutes a claim are
as in [results](results.md). `--data DATA` takes a local copy. The second table has IFEval's
[four scores](ifeval.md#scores): how much each arm raises them. *Beyond other prompts* is how much more
responses follow their own prompts than those of other problems (prompt strict). *Without repetition* does not
count responses with fewer than five different words, or in which a line or sequences of four words are mostly
repeats.
"""
_COMPARISONS_HEAD = """# Comparisons

What a setting or another trainer changes, with the same task and problems, and as many responses trained on.
Commands, intervals and columns are as in [results](results.md). *Halfway* is the mean after half of the
steps, with the difference to the first arm. Its interval, and that of *responses to a value*, are over seeds
only. Beside TRL seconds are without start and evaluations.
[Objectives](objectives.md#engine-and-trainer) explains ratios and corrections. The quick start, age 0 and
*this project* are the same runs, repeated.
"""
_REFUTED = ("filter", "multiplication")
_TASKS = {name: each for name, each in tasks.EXPERIMENTS.items() if name not in _REFUTED}
# Pages with their beginnings, their experiments, and those that their first table has.
PAGES: Mapping[Path, tuple[str, Mapping[str, Experiment], Mapping[str, Experiment]]] = {
    _ROOT / "docs/results.md": (_HEAD, _TASKS, tasks.EXPERIMENTS),
    _ROOT / "docs/results_refuted.md": (_REFUTED_HEAD, {n: tasks.EXPERIMENTS[n] for n in _REFUTED}, {}),
    _ROOT / "docs/results_other_ways.md": (_OTHER_WAYS_HEAD, other_ways.EXPERIMENTS, {}),
    _ROOT / "docs/results_ifeval_gsm8k.md": (_PUBLISHED_HEAD, published.EXPERIMENTS, {}),
    _ROOT / "docs/comparisons.md": (_COMPARISONS_HEAD, comparisons.EXPERIMENTS, {}),
}


def page(
    head: str,
    experiments: Mapping[str, Experiment],
    records: Mapping[str, Any],
    summarized: Mapping[str, Experiment] | None = None,
) -> str:
    """Return a page.

    Args:
        head: its beginning.
        experiments: its experiments, of which those with records have a section.
        records: records of each experiment.
        summarized: experiments that a table at the beginning has, a row each.
    """
    sections = [_section(name, each, records[name]) for name, each in experiments.items() if records[name]]
    waiting = {name: each for name, each in experiments.items() if not records[name]}
    rows = [
        _summary(name, each, records[name], name in experiments)
        for name, each in (summarized or {}).items()
        if records[name]
    ]
    columns = ["task", "problems", "before", "rise", *(f"GRPO's lead over {arm}" for arm in _BESIDE)]
    tables = ["\n".join(_markdown(columns, rows))] if rows else []
    return "\n".join([head, *tables, *sections, *([_waiting(waiting)] if waiting else [])])


def _summary(
    name: str, experiment: Experiment, records: Sequence[dict[str, Any]], is_here: bool
) -> list[str]:
    """Return the row of a task in the table of all tasks."""
    problems = records[0]["problems"]
    runs: dict[str, dict[int, Any]] = {arm: {} for arm in experiment.arms}
    for run in records:
        runs[run["arm"]][run["seed"]] = run
    own = runs[next(iter(experiment.arms))]
    before, after = (np.array([run[key] for run in own.values()]) for key in ("before", "after"))
    leads = []
    for arm in _BESIDE:
        pairs = [
            np.subtract(own[seed]["after"], run["after"]) for seed, run in runs[arm].items() if seed in own
        ]
        leads.append(_mean(np.array(pairs), problems, signed=True) if pairs else "")
    title = f"[{_title(name)}]({'' if is_here else 'results_refuted.md'}#{name})"
    rise = _mean(after - before, problems, signed=True)
    return [title, str(len(set(problems))), f"{before.mean():.3f}", rise, *leads]


def _waiting(experiments: Mapping[str, Experiment]) -> str:
    """Return the section of the experiments that nobody has run yet."""
    on_gpu = (
        " A GPU's memory, predicted peak, hours a run on an H100."
        if any(each.needs for each in experiments.values())
        else ""
    )
    lines = ["## Not run yet\n", f"Arms x seeds; `--help` has the claims.{on_gpu}\n"]
    for name, each in experiments.items():
        needs = f", {each.needs}" if each.needs else ""
        lines.append(f"- `{name}`: {len(each.arms)} x {len(each.all_seeds)}{needs}")
    return "\n".join([*lines, ""])


def table(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of an experiment's table, an arm each."""
    problems = records[0]["problems"]
    arms = [arm for arm in experiment.arms if any(record["arm"] == arm for record in records)]
    grades = {arm: {row["seed"]: row for row in records if row["arm"] == arm} for arm in arms}
    rows = []
    for arm in arms:
        own = grades[arm]
        before, after = (np.array([run[key] for run in own.values()]) for key in ("before", "after"))
        cells = [arm, str(len(own)), _mean(after, problems)]
        cells.append(_mean(after - before, problems, signed=True))
        shared = [seed for seed in own if seed in grades[arms[0]]]
        pairs = np.array([np.subtract(own[seed]["after"], grades[arms[0]][seed]["after"]) for seed in shared])
        cells.append("" if arm == arms[0] or not shared else _mean(pairs, problems, signed=True))
        if experiment.shows_halfway:
            cells.append(_halfway(own, grades[arms[0]]))
        if experiment.shape:
            cells.append(f"{np.mean([run['formed'][1] for run in own.values()]):.2f}")
        if _has_ages(records):
            ages = [run["age"] for run in own.values() if "age" in run]
            cells.append(f"{np.mean(ages):.2f}" if ages else "")
        if experiment.reach is not None:
            cells += _reached(experiment.reach, own, grades[arms[0]])
        timed = [run["clock"][-1:] if experiment.times_steps else run["seconds"] for run in own.values()]
        stages = np.mean(timed, axis=0)
        cells.append(" + ".join(f"{seconds:.0f}" for seconds in stages))
        rows.append(cells)
    return rows + _policy_rows(grades[arms[0]], len(rows[0]))


def _halfway(own: Mapping[int, Any], first: Mapping[int, Any]) -> str:
    """Return the mean held-out value after half of the steps, and its difference to the first arm."""
    values, others = (
        {seed: run["values"][run["steps"].index(run["steps"][-1] // 2)] for seed, run in runs.items()}
        for runs in (own, first)
    )
    text = f"{np.mean([*values.values()]):.3f}"
    pairs = np.array([[value - others[seed]] for seed, value in values.items() if seed in others])
    return text if own is first or len(pairs) < 2 else f"{text} ({_mean(pairs, signed=True)})"


def _policy_rows(first: Mapping[int, Any], columns: int) -> list[list[str]]:
    """Return the rows of the policies without a model, beside the runs of the first arm."""
    measured = {name: values for run in first.values() for name, values in run.get("policies", {}).items()}
    after = np.array([run["after"] for run in first.values()])
    rows = []
    for name, (grades, _) in measured.items():
        lead = _mean(grades - after, next(iter(first.values()))["problems"], signed=True)
        cells = [f"no model: {name}", "", f"{np.mean(grades):.3f}", "", lead]
        rows.append(cells + [""] * (columns - len(cells)))
    return rows


def reached(record: dict[str, Any], value: float) -> tuple[float, float]:
    """Return the responses and the seconds of a run up to a held-out value, on lines between evaluations.

    NaN if it does not come to the value.
    """
    points = zip(record["steps"], record["values"], record["clock"], strict=True)
    for (step, low, clock), (next_step, high, next_clock) in itertools.pairwise(points):
        if low < value <= high:
            share = (value - low) / (high - low)
            at = step + share * (next_step - step)
            each = record["responses"][-1] / record["steps"][-1]
            return at * each, clock + share * (next_clock - clock)
    return math.nan, math.nan


def _reached(value: float, own: Mapping[int, Any], first: Mapping[int, Any]) -> list[str]:
    """Return the cells of :func:`reached`: means, and how they compare with the first arm's, by seed."""
    numbers = np.array([reached(run, value) for run in own.values()])
    if np.isnan(numbers).any():
        return [f"not by {np.isnan(numbers[:, 0]).sum()} of {len(numbers)} seeds", ""]
    responses, seconds = (f"{mean:.0f}" for mean in numbers.mean(0))
    shared = [seed for seed in own if seed in first]
    if own is not first and len(shared) > 1:
        pairs = np.array([[reached(runs[seed], value) for runs in (own, first)] for seed in shared])
        mean, half = statistics.interval((pairs[:, 0, 0] - pairs[:, 1, 0])[:, None])
        ratios = pairs[:, 0, 1] / pairs[:, 1, 1]
        responses += f" ({mean:+.0f} [{mean - half:+.0f}, {mean + half:+.0f}])"
        seconds += f" ({ratios.min():.1f} to {ratios.max():.1f} times)"
    return [responses, seconds]


def _mean(values: Any, problems: Sequence[int] | None = None, signed: bool = False) -> str:
    """Return a mean with its interval, if there are several seeds.

    Args:
        values: values ``[S, Q]`` of S seeds on Q questions.
        problems: number of each question's problem; None if each has one of its own.
        signed: whether it is a difference.
    """
    sign = "+" if signed else ""
    if len(values) < 2:
        return f"{values.mean():{sign}.3f}"
    mean, half = statistics.interval(values if problems is None else statistics.of_problems(values, problems))
    low, high = max(mean - half, -1.0 if signed else 0.0), min(mean + half, 1.0)
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def start(experiment: Experiment, records: Sequence[dict[str, Any]]) -> str:
    """Return the sentences about the model before training, with which all arms begin, and about pass@8."""
    first = [record for record in records if record["arm"] == next(iter(experiment.arms))]
    text = f"Before training: {_mean(np.array([run['before'] for run in first]), records[0]['problems'])}"
    if experiment.shape:
        text += f", and {np.mean([run['formed'][0] for run in first]):.2f} in the right form"
    if best := [run["passes"] for run in first if "passes" in run]:
        seeds = "1 seed" if len(best) == 1 else f"{len(best)} seeds"
        text += ". Best of 8 ({}): {:.3f}, and {:.3f} after the first arm".format(
            seeds, *np.mean(best, axis=0)
        )
    return f"{text}."


def _section(name: str, experiment: Experiment, records: Sequence[dict[str, Any]]) -> str:
    columns = ["arm", "seeds", "after", "rise", "difference"]
    columns += ["halfway"] if experiment.shows_halfway else []
    columns += ["form"] if experiment.shape else []
    columns += ["mean age"] if _has_ages(records) else []
    if experiment.reach is not None:
        columns += [f"responses to {experiment.reach}", f"seconds to {experiment.reach}"]
    columns.append("seconds of all steps" if experiment.times_steps else "seconds")
    tables = _markdown(columns, table(experiment, records))
    if contrasts := _contrasts(experiment, records):
        tables += _markdown(["arm", "beside", "difference"], contrasts)
    if left_out := [arm for arm in experiment.arms if not any(run["arm"] == arm for run in records)]:
        tables += [f"Not run: {'; '.join(left_out)}.\n"]
    if warned := _findings(records):
        read = sum("findings" in run for run in records)
        tables += [
            f"[`grpo-doctor`](troubleshooting.md) warns of some of the {read} runs it read: {warned}.\n"
        ]
    if experiment.measures:
        heads = ["rise of", "before", *_measures_of_arms(experiment, records)]
        tables += _markdown(heads, measures_table(experiment, records))
    if experiment.deals:
        tables += [_policies_beyond(records)]
    if experiment.settings:
        tables += _markdown(["arm", "what it sets"], _settings(experiment, records))
    return "\n".join(
        [
            f"## {_title(name)}\n",
            f"Claim: {experiment.claim}{_refuted(experiment)}\n",
            f"{start(experiment, records)}\n",
            *tables,
            f"{experiment.outcome}\n",
            f"{_count(records[0]['problems'])}; {_files(name)}.",
            "",
            f"![learning curves](pictures/evidence-{name}.svg)\n",
        ]
    )


def _title(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}"


def _settings(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return rows of what each arm that has runs sets."""
    arms = {run["arm"] for run in records}
    return [
        [arm, f"`{' '.join(words)}`" if words else "nothing"]
        for arm, words in experiment.settings.items()
        if arm in arms
    ]


def _refuted(experiment: Experiment) -> str:
    """Return the sentence of what refutes a claim, without what the beginning of the page says."""
    usual = NO_RISE.removesuffix(".")
    own = experiment.refuted_by.removeprefix(usual)
    if own == experiment.refuted_by:
        return f" Refuted if {own[0].lower()}{own[1:]}"
    return "" if own == "." else f" Refuted also if {own.removeprefix(', or ')}"


def _count(problems: Sequence[int]) -> str:
    """Return how many held-out problems there are, and in how many questions if these are more."""
    count = len(set(problems))
    return f"{count} held-out problems" + (f" in {len(problems)} questions" if count < len(problems) else "")


def _files(name: str) -> str:
    """Return links to the records of an experiment, and to the responses of its runs if some are kept."""
    text = f"[records](../benchmarks/evidence/records/{name}.json)"
    kept = (RESPONSES / name).is_dir()
    return f"{text}, [responses](../benchmarks/evidence/responses/{name})" if kept else text


def _has_ages(records: Sequence[dict[str, Any]]) -> bool:
    """Whether responses of some runs were older than the policy that trained on them."""
    return any(run.get("age") for run in records)


def _contrasts(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return rows of the differences between pairs of arms that have runs with the same seeds.

    Those of fresh seeds alone are to the first arm.
    """
    after = {(run["arm"], run["seed"]): np.array(run["after"]) for run in records}
    first_arm, *others = experiment.arms
    alone = f", seeds {min(experiment.fresh)} to {max(experiment.fresh)} alone" if experiment.fresh else ""
    pairs = [(*pair, "", set(experiment.all_seeds)) for pair in experiment.contrasts]
    pairs += [(arm, first_arm, alone, set(experiment.fresh)) for arm in others]
    rows = []
    for arm, other, words, seeds in pairs:
        first, second = ({seed for name, seed in after if name == each} for each in (arm, other))
        shared = sorted(first & second & seeds)
        if len(shared) > bool(words):
            values = np.array([after[arm, seed] - after[other, seed] for seed in shared])
            rows.append([f"{arm}{words}", other, _mean(values, records[0]["problems"], signed=True)])
    return rows


def _policies_beyond(records: Sequence[dict[str, Any]]) -> str:
    """Return the sentence of what policies without a model earn beyond other prompts."""
    graded = {name: pair for row in records for name, pair in row.get("policies", {}).items()}
    leads = [f"{name} {np.subtract(*pair).mean():.3f}" for name, pair in graded.items()]
    return f"Beyond other prompts, policies without a model come to: {', '.join(leads)}.\n"


def _findings(records: Sequence[dict[str, Any]]) -> str:
    """Return what the doctor of runs finds in them, with the number of runs of each arm."""
    counts: dict[str, Counter[str]] = {}
    for run in records:
        for name in set(run.get("findings", ())):
            counts.setdefault(name, Counter())[run["arm"]] += 1
    return ", ".join(
        f"`{name}` ({'; '.join(f'{arm}: {count}' for arm, count in sorted(runs.items()))})"
        for name, runs in sorted(counts.items())
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, and an empty one."""
    head, *lines = ["|" + "|".join(row) + "|" for row in (columns, *rows)]
    return [head, "|---" * len(columns) + "|", *lines, ""]


def measures_table(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of further held-out values: how much each arm raises them."""
    arms = [[row for row in records if row["arm"] == arm] for arm in _measures_of_arms(experiment, records)]
    rows = []
    for name in experiment.measures:
        # A prompt with several instructions is a problem with several questions.
        weights = arms[0][0]["weights"][name]
        problems = np.repeat(records[0]["problems"], weights).tolist()
        pairs = [np.repeat([run["measures"][name] for run in arm], weights, -1) for arm in arms]
        rises = [_mean(pair[:, 1] - pair[:, 0], problems, signed=True) for pair in pairs]
        rows.append([name.replace("_", " "), f"{pairs[0][:, 0].mean():.3f}", *rises])
    return rows + (_own_rows(experiment, records) if experiment.deals else [])


def _own_rows(experiment: Experiment, records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of what responses earn beyond other prompts, and without repetition."""
    rows = []
    for name, key in (("beyond other prompts", "dealt"), ("without repetition", "repetitive")):
        values = {
            arm: np.array([_own(row, key) for row in records if row["arm"] == arm])
            for arm in _measures_of_arms(experiment, records)
        }
        problems = records[0]["problems"]
        rises = [_mean(each[:, 1] - each[:, 0], problems, signed=True) for each in values.values()]
        rows.append([name, f"{next(iter(values.values()))[:, 0].mean():.3f}", *rises])
    return rows


def _own(record: dict[str, Any], key: str) -> Any:
    """Return the grades ``[2, P]`` before and after, without what others or repetition earn."""
    grades, other = np.array([record["before"], record["after"]]), np.array(record[key])
    return grades - other if key == "dealt" else grades * (1 - other)


def _measures_of_arms(experiment: Experiment, records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the further held-out values of the runs of each arm that has some."""
    runs = {arm: [row["measures"] for row in records if row["arm"] == arm] for arm in experiment.arms}
    return {arm: measured for arm, measured in runs.items() if measured}


def with_samples(readme: str, records: Sequence[dict[str, Any]]) -> str:
    """Return README's text with what the first arm answered before and after training with seed 0.

    Args:
        readme: text that has the two lines between which the table is.
        records: records of the experiment ``SAMPLED``.
    """
    rows = ["| question | before training | after training |", "| --- | --- | --- |"]
    first = next(iter(EXPERIMENTS[SAMPLED].arms))
    record = next(record for record in records if (record["arm"], record["seed"]) == (first, 0))
    rows += [f"| {' | '.join(map(_shown, sample))} |" for sample in record["samples"]]
    head, rest = readme.split(_BEGIN)
    table = "\n".join(rows)
    return f"{head}{_BEGIN}\n{table}\n\n{_END}{rest.split(_END)[1]}"


def _shown(text: str) -> str:
    """Return a text for a cell of a table. A model may have written anything, so punctuation is escaped."""
    return re.sub(r"[^A-Za-z0-9 ,+=?-]", lambda sign: f"&#{ord(sign[0])};", " ".join(text.split()))
