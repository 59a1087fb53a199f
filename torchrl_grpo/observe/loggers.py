"""Further loggers by name, through TorchRL: CSV, TensorBoard, Weights & Biases.

``metrics.jsonl`` is written whatever is chosen here; these are for the tools people already look at.
Left out: videos, histograms, and TorchRL's MLflow and Trackio loggers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import LoggingConfig
from torchrl_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torchrl.record.loggers import Logger

_NEEDS = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""Backend to the package it needs beyond TorchRL."""


class Loggers:
    """The chosen loggers as one.

    Args:
        loggers: TorchRL loggers; none is fine.
        places: where each writes, by name, for the closing summary.
        notes: what a person should be told about them, one line each.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        places: Mapping[str, Path] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.loggers = list(loggers)
        self.places = dict(places or {})
        self.notes = tuple(notes)

    def log_scalars(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs the numbers among the metrics; text, NaN and infinities are left out.

        Args:
            metrics: names to values.
            step: the optimizer step.
        """
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for logger in self.loggers:
            logger.log_metrics(numbers, step=step)

    def close(self) -> None:
        """Flushes and closes every logger; closing twice is harmless."""
        while self.loggers:
            self.loggers.pop().close()


def build(cfg: Config, run_dir: str | os.PathLike[str], resume_step: int | None = None) -> Loggers:
    """The loggers named in ``logging.backends``, writing below ``run_dir``, with the configuration logged.

    Args:
        cfg: the run's configuration.
        run_dir: the run's folder.
        resume_step: the step a resumed run goes on from; what CSV and TensorBoard hold of later steps
            is dropped, because those steps come again.

    Returns:
        The loggers as one; empty when none is named, and then nothing heavy is imported.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """
    names = list(dict.fromkeys(cfg.logging.backends))
    for name in names:
        if name not in _NEEDS:
            raise ConfigError(
                f"logging.backends holds {name!r}, which is no logger; choose from {', '.join(_NEEDS)}."
            )
        package = _NEEDS[name]
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logging.backends holds {name!r}, but the package {package} is not installed: run "
                f"`pip install {package}`, or take {name} out of logging.backends."
            )
    root = Path(run_dir).resolve()
    experiment = cfg.logging.experiment or root.name
    loggers: list[Logger] = []
    places: dict[str, Path] = {}
    notes: list[str] = []
    hparams = _flatten(dataclasses.asdict(cfg))
    for name in names:
        places[name] = root / name
        if name == "csv":
            logger: Logger = _csv(root / name, experiment, resume_step)
        elif name == "tensorboard":
            logger = _tensorboard(root / name, experiment, resume_step)
        else:
            logger = _wandb(root / name, experiment, cfg.logging, notes)
        logger.log_hparams(hparams)
        loggers.append(logger)
    return Loggers(loggers, places, notes)


# The three below import TorchRL themselves: that takes seconds, and most runs choose no logger.


def _csv(folder: Path, experiment: str, resume_step: int | None) -> Logger:
    from torchrl.record.loggers import CSVLogger

    if resume_step is not None:
        for path in (folder / experiment / "scalars").rglob("*.csv"):
            rows = path.read_text().splitlines(keepends=True)
            kept = [row for row in rows if row.endswith("\n") and int(row.split(",")[0]) <= resume_step]
            path.write_text("".join(kept))
    return CSVLogger(exp_name=experiment, log_dir=str(folder))


def _tensorboard(folder: Path, experiment: str, resume_step: int | None) -> Logger:
    from torchrl.record.loggers import TensorboardLogger

    logger = TensorboardLogger(exp_name=experiment, log_dir=str(folder))
    if resume_step is not None:
        # TorchRL's logger has no way to say that later steps are void; TensorBoard's writer has.
        from torch.utils.tensorboard import SummaryWriter

        log_dir = logger.experiment.log_dir
        logger.experiment.close()
        logger.experiment = SummaryWriter(log_dir=log_dir, purge_step=resume_step + 1)
    return logger


def _wandb(folder: Path, experiment: str, logging: LoggingConfig, notes: list[str]) -> Logger:
    from torchrl.record.loggers import WandbLogger

    folder.mkdir(parents=True, exist_ok=True)
    # One run folder is one W&B run, however often it is resumed.
    id_file = folder / "run_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    # What is not given stays out, for W&B's own variables in the environment to say.
    given = {"entity": logging.entity, "group": logging.group, "tags": logging.tags}
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    if "WANDB_MODE" not in os.environ and not _wandb_key():
        options["mode"] = "offline"
        notes.append(
            f"W&B has no key and records offline; upload with `wandb sync {folder}/wandb/offline-run-*`."
        )
    return WandbLogger(
        exp_name=experiment, save_dir=folder, id=id_file.read_text(), project=logging.project, **options
    )


def _wandb_key() -> bool:
    """Whether W&B would find a login without asking: in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if not path.exists():
        return False
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}), so it is unknown whether W&B has a key: fix the "
            "file, or set WANDB_MODE=offline."
        ) from error


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Nested dictionaries as dotted keys, with every other value as text: all that TensorBoard takes."""
    flat: dict[str, int | float | str | bool] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
