"""Experiments on a game of a server, on a teacher, and on pictures. They have no controls."""

from __future__ import annotations

from benchmarks.evidence.experiment import Experiment
from benchmarks.learning import EXPERIMENTS as _LEARNING

EXPERIMENTS: dict[str, Experiment] = {
    "openenv": Experiment(
        "GRPO teaches SmolLM2-135M a game of two turns on an OpenEnv server.",
        "The held-out share of games won rises by less than 0.30.",
        _LEARNING["openenv"],
        outcome="The claim holds. `bash scripts/setup_openenv.sh` installs the server.",
    ),
    "distillation": Experiment(
        "A model that GRPO trained teaches its base at least 0.9 of its accuracy on the base's own text.",
        "The student reaches less than 0.9 of the teacher's accuracy.",
        _LEARNING["distill"],
        outcome="The claim holds: each student reaches 1.01 to 1.03 of its teacher's accuracy. SFT, which "
        "needs written solutions, ends above it in fewer seconds.",
        contrasts=(("distillation", "SFT"),),
    ),
    "pictures": Experiment(
        "GRPO improves how a model of a million parameters, trained from scratch by SFT, counts shapes in "
        "small pictures.",
        "The interval of the difference includes 0.",
        _LEARNING["pictures"],
        r"\d+",
        outcome="The claim holds, and the form stays right. Values are shares of sampled answers, four a "
        "problem, and most are still wrong. Learning rate and length were chosen on seed 0, with these "
        "problems; without it the difference is +0.055 [+0.024, +0.086].",
    ),
}
