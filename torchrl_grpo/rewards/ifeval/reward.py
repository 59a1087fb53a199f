"""IFEval as a reward for training and as a grader for evaluation.

Both give the benchmark's four numbers; they differ in what one number means. The reward's parts are
for one response; the grader's are averaged over the benchmark, prompt-level ones over prompts and
instruction-level ones over instructions, which is what its weights are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.ifeval.schema import clean_truth
from torchrl_grpo.rewards.ifeval.scoring import follow_list
from torchrl_grpo.rewards.ifeval.text import require_packages

METRICS = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")


def four_scores(completion: str, example: Example) -> dict[str, float]:
    """The four scores of one response, each in 0 to 1.

    ``prompt_*`` is 1 where every instruction is followed, else 0; ``instruction_*`` is the fraction
    of the row's instructions that are followed.

    Args:
        completion: what the model wrote.
        example: its truth carries ``instruction_id_list`` and ``kwargs``.

    Returns:
        The scores, under the names in ``METRICS``.

    Raises:
        DataError: the example's truth is missing or malformed; the message names the example.
    """
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
    """Reward: the fraction of the instructions that the response follows, strictly.

    The fraction, not all-or-nothing, because a prompt with three instructions would otherwise reward
    a small model almost never. The benchmark's four scores go along as parts to be logged.

    Raises:
        ConfigError: NLTK or langdetect is not installed.
    """

    name = "ifeval"

    def __init__(self) -> None:
        require_packages()

    def __call__(self, completion: str, example: Example) -> dict[str, float]:
        """Score one response.

        Args:
            completion: what the model wrote.
            example: its truth carries ``instruction_id_list`` and ``kwargs``.

        Returns:
            ``score`` (strict fraction) and the four scores of ``METRICS``.

        Raises:
            DataError: the example's truth is missing or malformed.
        """
        scores = four_scores(completion, example)
        return {"score": scores["instruction_strict"], **scores}


class IFEvalGrader:
    """Grader: the benchmark's four accuracies, with weights that make them the benchmark's means.

    Raises:
        ConfigError: NLTK or langdetect is not installed.
    """

    primary = "prompt_strict"
    metrics = METRICS

    def __init__(self) -> None:
        require_packages()

    def grade(self, completion: str, example: Example) -> dict[str, float]:
        """The four scores of one response; see :func:`four_scores`."""
        return four_scores(completion, example)

    def weights(self, example: Example) -> dict[str, float]:
        """What each score of this example counts in the mean: one for prompt-level scores, the number
        of instructions for instruction-level ones.

        Raises:
            DataError: the example's truth is missing or malformed.
        """
        instructions = float(len(_truth(example)["instruction_id_list"]))
        return {metric: instructions if metric.startswith("instruction") else 1.0 for metric in METRICS}

    def close(self) -> None:
        """Nothing to release."""
