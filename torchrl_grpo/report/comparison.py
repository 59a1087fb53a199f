"""What two runs made of the same held-out problems, and what limits the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.observe.metrics import jsonable
from torchrl_grpo.report import paired
from torchrl_grpo.report.held_out import MOST_PROBLEMS

# Which problems are held out. Other keys may change their prompts, and a problem is then still the same.
DATA = (
    "env.dataset",
    "env.task",
    "env.task_args",
    "env.data_path",
    "env.eval_data_path",
    "env.hub_name",
    "env.hub_subset",
    "env.eval_split",
    "env.fields",
    "env.environment",
    "env.mixture",
)
# How a response is asked for and graded.
MEASURING = (
    "env.allowed_tools",
    "env.answer_format",
    "env.environment_args",
    "env.max_turns",
    "env.max_turn_tokens",
    "env.prompt_template",
    "env.system_prompt",
    "env.tools",
    "eval.samples",
    "eval.temperature",
    "inference_model.max_new_tokens",
    "reward.args",
    "reward.functions",
)
# What the sum of the rewards depends on.
_OF_SUM = ("reward.args", "reward.functions", "reward.weights")
_KINDS = {"eval/primary": "value", "eval/accuracy": "accuracy", "eval/loss": "loss"}
_UNKNOWN = "a reward of unknown name"
Answers = Mapping[str, paired.Answers]


class Comparison:
    """Compares a run with the first one.

    Args:
        run_dirs: folder of the first run and of the other.
        contents: contents of their reports.
        differing: keys whose values differ; None if a run has no record of its configuration.
    """

    def __init__(
        self,
        run_dirs: tuple[Path, Path],
        contents: tuple[Mapping[str, Any], Mapping[str, Any]],
        differing: Sequence[str] | None,
    ) -> None:
        self._run_dirs = run_dirs
        self._differing = differing
        self._names = [str(run["name"]) for run in contents]
        self._steps = [list(run["held_out"]["steps"]) for run in contents]
        kinds, self._graders = zip(*(_grading(run) for run in contents), strict=True)
        # A mean may be an accuracy in one of the runs only.
        self._kind = kinds[0] if kinds[0] == kinds[1] else "value"
        self._is_graded = self._graders[0] == self._graders[1]
        self._without = [] if self._is_graded else [paired.GRADE]
        if any(key.startswith(_OF_SUM) for key in differing or []):
            self._without.append(paired.SUM)

    def entries(self, budget: int) -> dict[str, Any]:
        """Return the results of the two runs on the same problems as JSON, with ``notes`` in sentences.

        Args:
            budget: number of characters of prompts and responses to keep.

        Raises:
            OSError: a file cannot be read.
        """
        notes = list(self._notes())
        moments = []
        steps = self._moments()
        by_moment: dict[str, list[str]] = {}
        for pair in steps:
            answers = [
                paired.read_answers(run_dir, step) for run_dir, step in zip(self._run_dirs, pair, strict=True)
            ]
            ids, limits = self._shared(answers[0], answers[1])
            for note in limits:
                by_moment.setdefault(note, []).append(" and ".join(map(str, dict.fromkeys(pair))))
            if ids:
                moments.append(self._moment(pair, answers[0], answers[1], ids, budget // len(steps)))
        for note, places in by_moment.items():
            notes.append(note if len(places) == len(steps) else f"Step {', '.join(places)}: {note}")
        kind = self._kind if self._is_graded else ""
        entries: dict[str, Any] = jsonable({"kind": kind, "notes": notes, "moments": moments})
        return entries

    def _notes(self) -> Iterator[str]:
        """Return what can be said of the two runs without their responses."""
        without = [name for name, steps in zip(self._names, self._steps, strict=True) if not steps]
        if without:
            yield (
                f"{' and '.join(without)}: evaluations.jsonl has no response to a held-out problem, so "
                "nothing can be paired. Runs write it unless logging.rollouts=false or eval.num_problems=0."
            )
            return
        if not {*self._steps[0]} & {*self._steps[1]}:
            yield "They were evaluated at no step in common."
        if not self._is_graded:
            yield (
                f"{self._names[0]} was graded by {self._graders[0]} and {self._names[1]} by "
                f"{self._graders[1]}, so grades are not compared, and rewards only where both have the name."
            )
        elif self._steps[0] and _UNKNOWN in self._graders[0]:
            yield "Neither run says which reward grades it, so their grades are taken to be of the same one."
        if keys := [key for key in self._differing or [] if key in MEASURING]:
            yield f"They were measured in different ways: {', '.join(keys)}."

    def _moments(self) -> list[tuple[int, int]]:
        """Return pairs of steps to compare: the last that both have, and the last of each."""
        if not all(self._steps):
            return []
        first, second = self._steps
        common = {*first} & {*second}
        pairs = [(max(common), max(common))] if common else []
        return list(dict.fromkeys([*pairs, (first[-1], second[-1])]))

    def _moment(
        self, steps: tuple[int, int], first: Answers, second: Answers, ids: Sequence[str], budget: int
    ) -> dict[str, Any]:
        results = paired.differences(first, second, ids, self._without)
        changed = paired.changed(first, second, ids) if self._is_graded else {}
        texts = [
            paired.read_responses(run_dir, step, changed.keys(), budget // 2)
            for run_dir, step in zip(self._run_dirs, steps, strict=True)
        ]
        problems = [
            {
                "id": id,
                "state": self._state(*grades),
                "grades": grades,
                "samples": [first[id].samples, second[id].samples],
                "texts": [text.get(id) for text in texts],
            }
            for id, grades in changed.items()
        ]
        metrics = [{"name": self._name(name), **vars(result)} for name, result in results.items()]
        return {"steps": steps, "shared": len(ids), "metrics": metrics, "problems": problems}

    def _shared(self, first: Answers, second: Answers) -> tuple[Sequence[str], list[str]]:
        """Return the problems to compare, and what limits them."""
        same, other = paired.shared_problems(first, second)
        data = [key for key in self._differing or [] if key in DATA]
        where = f" Their data differ: {', '.join(data)}." if data else ""
        if not same and not other:
            return [], [f"They share no held-out problem.{where}"]
        if not same and (self._differing is None or data):
            return [], [
                "Their held-out problems have the same names and other prompts, so they are taken for other "
                f"problems and not compared.{where}"
            ]
        notes = []
        if not same:
            notes.append(
                "All prompts differ, though the data do not, as with another chat template or system prompt. "
                "Problems are paired by their names."
            )
        elif other:
            notes.append(f"Problems of the same name with another prompt are left out: {len(other)}.")
        more = [len(answers) - len(same) - len(other) for answers in (first, second)]
        if any(more):
            counts = " and ".join(f"{count} of {name}" for count, name in zip(more, self._names, strict=True))
            notes.append(f"Problems that the other run does not have are left out: {counts}.")
        if MOST_PROBLEMS in (len(first), len(second)):
            notes.append(f"Of each evaluation, the first {MOST_PROBLEMS:,} problems are compared.")
        return same or other, notes

    def _state(self, first: float, second: float) -> str:
        """Return what the different grades of a problem show."""
        if self._kind == "loss":
            return f"better in {self._names[second < first]}"
        if (first >= 1) != (second >= 1):
            return f"only {self._names[second >= 1]} solves"
        return f"better in {self._names[second > first]}"

    def _name(self, name: paired.Name) -> str:
        if name == paired.SUM:
            return "sum of rewards"
        if name == paired.GRADE:
            return self._kind if self._kind in ("accuracy", "loss") else str(self._graders[0])
        return f"reward {name[1]}"


def _grading(run: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of the grades of a run, and in words what they are of."""
    right = run["about"]["right"]
    kind = _KINDS.get(run["held_out"]["metric"], "")
    if kind == "loss":
        return kind, "the loss of the solutions"
    reward = f"the reward {right['reward']}" if "reward" in right else _UNKNOWN
    is_share = kind == "accuracy" and "eval/primary" not in run["metrics"]
    threshold = f" from {right['threshold']} on" if is_share and "threshold" in right else ""
    return kind, reward + threshold
