"""IFEval as a reward for training and as a grader for evaluation.

Both return the benchmark's four scores of one response. The grader's weights average them over the benchmark:
prompt-level scores over prompts, and instruction-level scores over instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.ifeval.schema import clean_truth
from torchrl_grpo.data.thoughts import end_of_first
from torchrl_grpo.rewards.ifeval.scoring import follow_list
from torchrl_grpo.rewards.ifeval.text import require_packages
from torchrl_grpo.rewards.types import ResponseScore

METRICS = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")


def four_scores(completion: str, example: Example) -> dict[str, float]:
    """Compute the four scores of one response, each in [0, 1].

    ``prompt_*`` is 1 if every instruction is followed, else 0. ``instruction_*`` is the fraction of the
    instructions that are followed.

    Args:
        completion: text that the model wrote. Thoughts that it begins with do not count. A text whose
            thoughts do not end follows nothing.
        example: problem whose truth has ``instruction_id_list`` and ``kwargs``.

    Returns:
        The scores, under the names in ``METRICS``.

    Raises:
        DataError: the example's truth is missing or malformed; the message names the example.
    """
    thoughts_end = end_of_first(completion, is_strict=False)
    if thoughts_end is None:
        completion = ""
    elif thoughts_end > 0:
        # The first line is one of the answer.
        completion = completion[thoughts_end:].lstrip()
    strict, loose = follow_list(completion, _truth(example))
    return {
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
    }


def _truth(example: Example) -> Mapping[str, Any]:
    truth = example.truth
    return clean_truth(truth.get("instruction_id_list"), truth.get("kwargs"), f"example {example.id!r}")


class IFEvalReward:
    """Reward: the fraction of the instructions that the response follows, by strict scoring.

    An all-or-nothing reward would almost never reward a small model for a prompt with three instructions.
    The benchmark's four scores are components of the reward and are logged.

    Raises:
        ConfigError: a package is not installed.
    """

    name = "ifeval"

    def __init__(self) -> None:
        require_packages()

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        """Score one response.

        Args:
            completion: text that the model wrote.
            example: problem whose truth has ``instruction_id_list`` and ``kwargs``.

        Returns:
            ``score`` (strict fraction) and the four scores of ``METRICS``.

        Raises:
            DataError: the example's truth is missing or malformed.
        """
        scores = four_scores(completion, example)
        return {"score": scores["instruction_strict"], **scores}


class IFEvalGrader:
    """Grader: the benchmark's four accuracies. Its weights reproduce the benchmark's means.

    Raises:
        ConfigError: a package is not installed.
    """

    primary = "prompt_strict"
    metrics = METRICS

    def __init__(self) -> None:
        require_packages()

    def grade(self, completion: str, example: Example, score: ResponseScore) -> dict[str, float]:
        """Return the four scores of one response; see :func:`four_scores`."""
        return four_scores(completion, example)

    def weights(self, example: Example) -> dict[str, float]:
        """Return the weight of each score in the mean: 1 for prompt-level scores, the number of instructions
        for instruction-level scores.

        Raises:
            DataError: the example's truth is missing or malformed.
        """
        instructions = float(len(_truth(example)["instruction_id_list"]))
        return {metric: instructions if metric.startswith("instruction") else 1.0 for metric in METRICS}

    def close(self) -> None:
        """Nothing to release."""


def build(cfg: Config) -> IFEvalReward:
    """Return the reward. It reads no key."""
    return IFEvalReward()
