"""The text of a batch script, from the template of its layout, ``*.sh.jinja`` beside this module."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateSyntaxError

from torchrl_grpo.cli.endings import STOPPED_CODE
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.plan import counted
from torchrl_grpo.slurm.layout import Layout
from torchrl_grpo.slurm.options import EARLY_S, SlurmOptions

FOLDER_TRANSFER = "inference_model.weight_transfer=folder"


@dataclass(frozen=True)
class Run:
    """What the job runs.

    Attributes:
        script: name of the training command.
        common: arguments that name the configuration. The trainer gets them, and so do the servers.
        trainer_overrides: overrides of the trainer, except those known only inside the job.
        server_overrides: overrides of the servers.
        command: command that has made the script.
    """

    script: str
    common: list[str]
    trainer_overrides: list[str]
    server_overrides: list[str]
    command: str


def batch_script(run: Run, options: SlurmOptions, layout: Layout) -> str:
    """Return the text of the batch script.

    Raises:
        ConfigError: the user's template cannot be read or filled in.
    """
    folder = Path(__file__).parent
    templates = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(quote=shlex.quote, counted=counted)
    name = "job" if layout.nodes == 1 else "servers" if layout.servers else "ray"
    usual = folder / f"{name}.sh.jinja"
    try:
        return templates.from_string((options.template or usual).read_text(encoding="utf-8")).render(
            run=run,
            options=options,
            layout=layout,
            job_folder=uses_job_folder(run.trainer_overrides),
            early_s=EARLY_S,
            stopped_code=STOPPED_CODE,
            key_variable=KEY_VARIABLE,
        )
    except (OSError, ValueError, TypeError, TemplateError) as error:
        where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        wrong = f"{where}{error}".rstrip(".")
        raise ConfigError(
            f"--template={options.template}: {wrong}; write a file that is a changed copy of {usual}"
        ) from error


def uses_job_folder(overrides: Sequence[str]) -> bool:
    """Return whether weights go through the job's own folder, because no ``weight_folder`` is given."""
    named = any(override.startswith("inference_model.weight_folder=") for override in overrides)
    return FOLDER_TRANSFER in overrides and not named
