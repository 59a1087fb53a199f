"""Load the data set that ``env.dataset`` names. Of the built-in ones, only its own module is imported."""

from __future__ import annotations

import importlib
from types import ModuleType

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.data.mixture import mix
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import user_code


def load(cfg: Config) -> Problems:
    """Load the problems of a run.

    Args:
        cfg: configuration. ``env`` names the data, and ``eval.num_problems`` the number of held-out problems.

    Returns:
        Training and held-out problems that share no question.

    Raises:
        ConfigError: ``env.dataset`` is neither a built-in one nor a function of the user.
        DataError: a file, a row or a task is missing, malformed, empty or too small.
    """
    parts = mixture_parts(cfg)
    if parts:
        return mix(parts, [load(part.cfg) for part in parts])
    module = dataset_module(cfg.env.dataset)
    problems = module.load(cfg)
    assert isinstance(problems, Problems)
    return problems


def dataset_module(name: str) -> ModuleType:
    """Return the module of a data set, with ``load`` and ``example``.

    Raises:
        ConfigError: there is no such data set.
    """
    if user_code.parse(name) is not None:
        return importlib.import_module("torchrl_grpo.data.user")
    if name not in DATASETS:
        raise ConfigError(
            f"env.dataset={name!r} is unknown; write one of: {', '.join(sorted(DATASETS))}, or a function of "
            "your own, FILE.py:FUNCTION"
        )
    return importlib.import_module(DATASETS[name].module)
