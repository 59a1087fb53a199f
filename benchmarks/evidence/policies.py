"""Responses that show how little a score may say: of policies without a model, and to other prompts.

A score that they reach too does not show that a model understands its task.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from torchrl_grpo.config.parsing import parse
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.registry import build_grader
from torchrl_grpo.runtime.files.run_records import read_yaml

# Returns a response to the last turn of a prompt.
Policy = Callable[[str], str]
# Takes a response to each problem, and returns their grades.
Grade = Callable[[Sequence[str]], list[float]]

# To how many other problems each response is dealt.
_OTHERS = 4


def grades(run: Path, ids: Sequence[str], policies: Mapping[str, Policy]) -> dict[str, list[list[float]]]:
    """Grade the responses of each policy as the evaluations of a run grade those of its model.

    Args:
        run: folder of the run.
        ids: ids of held-out problems of the run.
        policies: policies by name.

    Returns:
        By the name of the policy, the grade of each problem, in the order of ``ids``, and what it has with
        responses to others, see :func:`dealt`.
    """
    with _grading(run, ids) as (examples, grader):
        grade = partial(_grade, grader, examples)
        prompts = [example.messages[-1]["content"] for example in examples]
        texts = {name: [policy(prompt) for prompt in prompts] for name, policy in policies.items()}
        return {name: [grade(responses), _dealt(responses, grade)] for name, responses in texts.items()}


def dealt(run: Path, responses: Mapping[str, str]) -> list[float]:
    """Grade responses as if they were to other problems.

    A style that suits any prompt earns so as much as with its own prompts. Words of a prompt do not.

    Args:
        run: folder of the run.
        responses: responses by the id of their problem, five or more.

    Returns:
        The mean grade of each problem with the responses to some others, in the order of the ids.
    """
    ids = sorted(responses)
    with _grading(run, ids) as (examples, grader):
        return _dealt([responses[id] for id in ids], partial(_grade, grader, examples))


def scores(run: Path, responses: Mapping[str, str], names: Sequence[str]) -> dict[str, list[float]]:
    """Return scores of responses to the held-out problems of a run, by the score's name.

    Args:
        run: folder of the run.
        responses: responses by the id of their problem.
        names: names of the scores.
    """
    ids = sorted(responses)
    with _grading(run, ids) as (examples, grader):
        graded = grader.grade([responses[id] for id in ids], examples)
        return {name: [each.metrics[name] for each in graded] for name in names}


def weights(run: Path, ids: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Return how often each held-out problem of a run counts in the mean of a score, by the score's name.

    IFEval's scores of instructions are means over instructions, of which a prompt may have several.

    Args:
        run: folder of the run.
        ids: ids of held-out problems of the run.
        names: names of the scores.
    """
    with _grading(run, ids) as (examples, grader):
        each = [grader.weights(example) for example in examples]
        return {name: [round(weighed[name]) for weighed in each] for name in names}


def question_of(prompt: str) -> str:
    """Return the last turn of a user in a prompt of SmolLM2's template; the whole prompt of another one."""
    return prompt.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]


def _dealt(responses: Sequence[str], grade: Grade) -> list[float]:
    shifts = [number * len(responses) // (_OTHERS + 1) for number in range(1, _OTHERS + 1)]
    each = [grade([*responses[shift:], *responses[:shift]]) for shift in shifts]
    means: list[float] = np.mean(each, axis=0).tolist()
    return means


def is_repetitive(response: str) -> bool:
    """Whether a response says little: fewer than five different words, or mostly repeated lines or words.

    One line is more than half of three or more, or more than half of all sequences of four words occurred
    before.
    """
    lines = Counter(line for line in map(str.strip, response.splitlines()) if line)
    words = re.findall(r"\w+", response.lower())
    fours = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return (
        len(set(words)) < 5
        or (lines.total() >= 3 and max(lines.values()) > lines.total() / 2)
        or len(set(fours)) < len(fours) / 2
    )


@contextmanager
def _grading(run: Path, ids: Sequence[str]) -> Iterator[tuple[list[Example], CountingGrader]]:
    """Return a run's held-out problems of these ids, and the grader of its evaluations."""
    cfg = parse(OmegaConf.create(read_yaml(run / ".hydra/config.yaml")))
    held_out = {example.id: example for example in load(cfg).held_out}
    grader = build_grader(cfg)
    try:
        yield [held_out[id] for id in ids], grader
    finally:
        grader.close()


def _grade(grader: CountingGrader, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """Return the grade of a response to each problem."""
    return [graded.metrics[grader.primary] for graded in grader.grade(responses, examples)]
