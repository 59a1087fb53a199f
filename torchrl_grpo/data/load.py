"""Load the data set that ``env.dataset`` names. Of the built-in ones, only its own module is imported."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS
from torchrl_grpo.config.checks.data import check_dataset
from torchrl_grpo.config.mixture import MixturePart, mixture_parts
from torchrl_grpo.data.mixture import mix
from torchrl_grpo.data.problems import Problems, held_out_keys, leave_out
from torchrl_grpo.errors import DataError
from torchrl_grpo.runtime import user_code


def load(cfg: Config) -> Problems:
    """Load the problems of a run.

    Args:
        cfg: configuration. ``env`` names the data, and ``eval.num_problems`` the number of held-out problems.

    Returns:
        Training and held-out problems, none of which are the same.

    Raises:
        ConfigError: ``env.dataset`` is neither a built-in one nor a function of the user.
        DataError: a file, a row or a task is missing, malformed, empty or too small.
    """
    parts = mixture_parts(cfg)
    if parts:
        return mix(parts, _apart(parts, [load(part.cfg) for part in parts]))
    module = dataset_module(cfg.env.dataset)
    problems = module.load(cfg)
    assert isinstance(problems, Problems)
    return problems


def _apart(parts: Sequence[MixturePart], loaded: Sequence[Problems]) -> list[Problems]:
    """Remove the problems that any part holds out from the training problems of all parts.

    Raises:
        DataError: a part has no training problem left.
    """
    held_out = {key for problems in loaded for key in held_out_keys(problems)}
    apart = []
    for part, problems in zip(parts, loaded, strict=True):
        kept = leave_out(problems, held_out, f"env.mixture: {part.name}")
        if not kept.train:
            raise DataError(
                f"env.mixture: every question of {part.name} is held out by a part of the mixture, so "
                "nothing is left to train on; lower eval.num_problems, or remove the part"
            )
        kept.train[0]  # fail now, and not in the middle of a run, if every question of a task is held out
        apart.append(kept)
    return apart


def dataset_module(name: str) -> ModuleType:
    """Return the module of a data set, with ``load`` and ``example``.

    Raises:
        ConfigError: there is no such data set.
    """
    if user_code.parse(name) is not None:
        return importlib.import_module("torchrl_grpo.data.user")
    check_dataset(name)
    return importlib.import_module(DATASETS[name].module)
