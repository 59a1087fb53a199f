"""What training changed on the held-out problems, for the message at the end of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from torchrl_grpo.report import paired
from torchrl_grpo.report.paired import Difference
from torchrl_grpo.runtime.printable import printable

# Characters of a text that are shown: its beginning and its end, and those of a line.
_HEAD, _TAIL, _LINE = 180, 60, 88
# Characters of a prompt and a response together that are read.
_BUDGET = 100_000


def of_run(
    run_dir: Path, steps: tuple[int, int], prompts: Mapping[str, str]
) -> tuple[Difference, list[str]] | None:
    """Compare two evaluations of a run on the problems of both.

    Args:
        run_dir: folder of the run.
        steps: steps of the first and the last evaluation.
        prompts: texts of prompts by the id of the problem.

    Returns:
        The difference of the held-out value, last minus first, and lines that show the problem whose grade
        changed most, which are none if no response did. None if ``evaluations.jsonl`` lacks an evaluation.

    Raises:
        OSError: the file cannot be read.
    """
    first, last = (paired.read_answers(run_dir, step) for step in steps)
    ids, _ = paired.shared_problems(first, last)
    difference = paired.differences(first, last, ids).get(paired.GRADE)
    if difference is None:
        return None
    id, grades = next(iter(paired.changed(first, last, ids).items()), ("", (0.0, 0.0)))
    responses = [paired.read_responses(run_dir, step, [id], _BUDGET).get(id) for step in steps]
    before, after = ("" if texts is None else texts["response"] for texts in responses)
    if None in responses or before == after:
        # Solutions, of which the loss is measured, stay the same.
        return difference, []
    return difference, [
        _heading(grades, first[id].samples),
        *_shown("prompt", prompts.get(id, id)),
        *_shown("before", before),
        *_shown("after", after),
    ]


def _heading(grades: tuple[float, float], samples: int) -> str:
    of = "" if samples == 1 else f", mean of {samples} responses, here the first"
    return f"Held-out problem that changed most ({grades[0]:.3f} -> {grades[1]:.3f}{of})"


def _shown(name: str, text: str) -> list[str]:
    """Return a text on a few lines. A model may write anything, also what a terminal would obey."""
    words = " ".join(printable(text).split())
    if len(words) > _HEAD + _TAIL:
        words = f"{words[:_HEAD]} [...] {words[-_TAIL:]}"
    lines = textwrap.wrap(words, _LINE) or ["(nothing)"]
    return [f"  {name if number == 0 else '':<7} {line}" for number, line in enumerate(lines)]
