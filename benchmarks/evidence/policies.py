"""Responses that show how little a score may say: of policies without a model, and to other prompts.

A score that they reach too does not show that a model understands its task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from torchrl_grpo.config.parsing import parse
from torchrl_grpo.data.load import load
from torchrl_grpo.rewards.registry import build_grader
from torchrl_grpo.runtime.files.run_records import read_yaml

# Returns a response to the last turn of a prompt.
Policy = Callable[[str], str]
# Takes a response to each problem, and returns their grades.
Grade = Callable[[Sequence[str]], list[float]]

# By how many places responses are dealt to other problems.
_PLACES = (37, 74, 111, 148)


def grades(run: Path, ids: Sequence[str], policies: Mapping[str, Policy]) -> dict[str, list[float]]:
    """Grade the responses of each policy as the evaluations of a run grade those of its model.

    Args:
        run: folder of the run.
        ids: ids of held-out problems of the run.
        policies: policies by name.

    Returns:
        The grade of each problem, in the order of ``ids``, by the name of the policy.
    """
    with _grading(run, ids) as (prompts, grade):
        return {name: grade([policy(prompt) for prompt in prompts]) for name, policy in policies.items()}


def dealt(run: Path, responses: Mapping[str, str]) -> list[float]:
    """Grade responses as if they were to other problems.

    What they earn so depends on no prompt: not on whether a model does what it is told.

    Args:
        run: folder of the run.
        responses: responses by the id of their problem, more than the largest of ``_PLACES``.

    Returns:
        The mean grade of each problem with the responses to some others, by the order of the ids.
    """
    ids = sorted(responses)
    own = [responses[id] for id in ids]
    with _grading(run, ids) as (_, grade):
        each = [grade([*own[places:], *own[:places]]) for places in _PLACES]
    means: list[float] = np.mean(each, axis=0).tolist()
    return means


@contextmanager
def _grading(run: Path, ids: Sequence[str]) -> Iterator[tuple[list[str], Grade]]:
    """Return the prompts of a run's held-out problems, and what grades a response to each."""
    cfg = parse(OmegaConf.create(read_yaml(run / ".hydra/config.yaml")))
    held_out = {example.id: example for example in load(cfg).held_out}
    examples = [held_out[id] for id in ids]
    grader = build_grader(cfg)
    try:
        yield (
            [example.messages[-1]["content"] for example in examples],
            lambda responses: [
                graded.metrics[grader.primary] for graded in grader.grade(responses, examples)
            ],
        )
    finally:
        grader.close()
