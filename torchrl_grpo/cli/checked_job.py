"""A single job: compose its configuration, check it, and resolve what depends on launcher and machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.config import Config, derived, parse
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models import kind
from torchrl_grpo.planning import resolve
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.config_dir import config_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchrl_grpo.cli.compose import Job


def resolve_job(node: DictConfig, check: Callable[[Config], None]) -> Config:
    """Parse and check a composed configuration, and resolve what depends on launcher and machine.

    Args:
        node: composed configuration.
        check: check of the command.

    Raises:
        UserError: a value is invalid; the message names it and a fix.
    """
    cfg = resolve.with_model(resolve.resolved(parse(node)))
    check(cfg)
    for model in derived.models_of(cfg):
        kind.check_kind(model)
    return cfg


def compose_job(
    overrides: Sequence[str],
    config_name: str,
    extra_dir: Path | None,
    check: Callable[[Config], None] = lambda cfg: None,
) -> Config:
    """Compose the configuration of a single job, and do what :func:`resolve_job` does.

    Args:
        overrides: ``key=value`` of a command line.
        config_name: name of the primary configuration.
        extra_dir: folder with more configurations, or None.
        check: check of the command.

    Raises:
        UserError: a value is invalid; the message names it and a fix.
    """
    from torchrl_grpo.cli.compose import composer, open_free_form

    extra = None if extra_dir is None else existing_folder("--config-dir", str(extra_dir))
    with composer(config_dir(), config_name.removesuffix(".yaml"), extra) as tree:
        (words,) = tree.jobs([open_free_form(word) for word in overrides], sweep=None)
        return resolve_job(tree.compose(words).node, check)


def write_notes(job: Job) -> None:
    """Tell the user, on rank 0, which keys of a job gave way to others."""
    if rank_env.rank() == 0:
        sys.stdout.write("".join(f"note: {line}\n" for line in job.settled))


def existing_folder(option: str, value: str) -> Path:
    """Return the absolute path of the folder that an option names.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = Path(value)
    if not folder.is_dir():
        raise ConfigError(f"{option}={value}: there is no such folder; write the path of a folder instead")
    return folder.resolve()
