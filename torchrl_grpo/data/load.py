"""Load the data set that ``env.dataset`` names. Only its own module is imported."""

from __future__ import annotations

import importlib

from torchrl_grpo.config import Config
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.errors import ConfigError

#: Data set name -> module with ``load(cfg) -> Problems`` and ``example(row, env, id) -> Example``.
DATASETS: dict[str, str] = {
    "gsm8k": "torchrl_grpo.data.gsm8k",
    "math": "torchrl_grpo.data.math",
    "ifeval": "torchrl_grpo.data.ifeval.load",
    "reasoning_gym": "torchrl_grpo.data.reasoning_gym",
    "jsonl": "torchrl_grpo.data.jsonl",
}


def load(cfg: Config) -> Problems:
    """Load the problems of a run.

    Args:
        cfg: configuration. ``env`` names the data, and ``eval.num_problems`` the number of held-out problems.

    Returns:
        Training and held-out problems that share no question.

    Raises:
        ConfigError: ``env.dataset`` is not one of :data:`DATASETS`.
        DataError: a file, a row or a task is missing, malformed, empty or too small.
    """
    if cfg.env.dataset not in DATASETS:
        raise ConfigError(
            f"env.dataset={cfg.env.dataset!r} is unknown; write one of: {', '.join(sorted(DATASETS))}"
        )
    module = importlib.import_module(DATASETS[cfg.env.dataset])
    problems = module.load(cfg)
    assert isinstance(problems, Problems)
    return problems
