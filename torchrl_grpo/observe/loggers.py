"""Builds additional loggers by name, with TorchRL: CSV, TensorBoard, Weights & Biases, trackio.

A run always writes ``metrics.jsonl``. These loggers serve the tools that users already have. This module does
not support videos, histograms, or TorchRL's MLflow logger.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.public import public_config
from torchrl_grpo.config.schema import LoggingConfig
from torchrl_grpo.config.values import LOGGERS
from torchrl_grpo.errors import CheckpointError, ConfigError, first_line
from torchrl_grpo.observe import wandb_login
from torchrl_grpo.observe.held_out import held_out_metric
from torchrl_grpo.observe.pictures import read_reduced
from torchrl_grpo.runtime.files.shared_files import read_regular, replace

if TYPE_CHECKING:
    from torchrl.record.loggers import Logger

# Name of the responses in a logger.
ROLLOUTS_NAME = "rollouts"
# Responses of a round that TensorBoard shows as texts. All are in rollouts.jsonl.
_TEXTS = 4
# Longest text of a response that a logger shows, in characters.
_CHARACTERS = 2_000
# Prefix of the held-out value in the plots of a logger; the name of what grades follows.
_HELD_OUT = "held_out"
# Seconds that W&B's server has to start a run.
_WANDB_START_S = 30


class Loggers:
    """Combines the selected loggers.

    Args:
        loggers: TorchRL loggers; may be empty.
        places: folder of each logger by name, for the closing summary.
        notes: messages for the user about the loggers, one line each.
        table_rows: responses of a round that tables show.
        grader: what grades held-out responses, for the name of their plot; empty for no such plot.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        places: Mapping[str, Path] | None = None,
        notes: Sequence[str] = (),
        table_rows: int = 0,
        grader: str = "",
    ) -> None:
        self.loggers = list(loggers)
        self.places = dict(places or {})
        self.notes = tuple(notes)
        self._table_rows = table_rows
        # TensorBoard takes no other characters, and "/" would begin a group.
        name = re.sub(r"[^\w.-]+", "_", grader).strip("_")
        self._held_out = f"{_HELD_OUT}/{name}" if name else None

    def log_scalars(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the numbers among the metrics, without text, NaN and infinities.

        The held-out value is logged a second time, as ``held_out/<what grades it>``, the title of its plot.

        Args:
            metrics: values by name.
            step: number of the optimizer step.
        """
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        if (metric := held_out_metric(numbers)) and self._held_out is not None:
            numbers[self._held_out] = numbers[metric]
        for logger in self.loggers:
            logger.log_metrics(numbers, step=step)

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int, run_dir: Path) -> None:
        """Show responses where a logger can: as a table in W&B and trackio, as texts in TensorBoard.

        Args:
            rows: lines of ``rollouts.jsonl`` of one round. Only the first are shown, and of a long text the
                beginning and the end.
            step: number of the optimizer step.
            run_dir: folder of the run, which has the pictures of prompts for tables.
        """
        shown = [_shortened(row) for row in rows[: max(self._table_rows, _TEXTS)]]
        for name, logger in zip(self.places, self.loggers, strict=False):
            if name == "wandb" and self._table_rows:
                import wandb

                table = _table(wandb, shown[: self._table_rows], run_dir)
                logger.log_metrics({ROLLOUTS_NAME: table}, step=step)
            elif name == "trackio" and self._table_rows:
                import trackio

                table = _table(trackio, shown[: self._table_rows], run_dir)
                logger.experiment.log({ROLLOUTS_NAME: table}, step=step)
            elif name == "tensorboard":
                texts = "\n\n".join(map(_as_markdown, shown[:_TEXTS]))
                logger.experiment.add_text(ROLLOUTS_NAME, texts, step)

    def log_report(self, path: Path) -> None:
        """Log the report of the run as an artifact of W&B and trackio, if they are to get responses.

        Args:
            path: path of ``report.html``, which need not exist.
        """
        if not path.exists() or not self._table_rows:
            return
        for name, logger in zip(self.places, self.loggers, strict=False):
            if name == "wandb":
                logger.experiment.log_artifact(
                    str(path), name=f"report-{logger.experiment.id}", type="report"
                )
            elif name == "trackio":
                import trackio

                trackio.log_artifact(str(path), name=f"report-{logger.exp_name}", type="report")

    def close(self) -> None:
        """Flush and close every logger. A second call does nothing."""
        while self.loggers:
            self.loggers.pop().close()


def build(
    cfg: Config, run_dir: str | os.PathLike[str], resume_step: int | None = None, grader: str = ""
) -> Loggers:
    """Build the loggers that ``logging.backends`` names, and log the configuration.

    Args:
        cfg: configuration of the run.
        run_dir: folder of the run; the loggers write below it.
        resume_step: step that a resumed run continues from. CSV and TensorBoard drop later steps, because the
            run repeats them. None for a new run.
        grader: what grades held-out responses; empty if nothing does.

    Returns:
        The combined loggers; empty if ``logging.backends`` is empty. TorchRL is then not imported.

    Raises:
        ConfigError: a name is unknown, or a package is not installed.
    """
    names = list(dict.fromkeys(cfg.logging.backends))
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(
                f"logging.backends holds {name!r}, which is no logger; choose from {', '.join(LOGGERS)}."
            )
        package = LOGGERS[name]
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
    hparams = _flatten(public_config(cfg))
    for name in names:
        places[name] = root / name
        if name == "csv":
            logger: Logger = _csv(root / name, experiment, resume_step)
        elif name == "tensorboard":
            logger = _tensorboard(root / name, experiment, resume_step)
        elif name == "trackio":
            logger = _trackio(root / name, experiment, cfg.logging)
        else:
            logger = _wandb(root / name, experiment, cfg.logging, notes)
        logger.log_hparams(hparams)
        loggers.append(logger)
    return Loggers(loggers, places, notes, cfg.logging.table_rows, grader)


# The next four functions import TorchRL locally: the import takes seconds, and most runs select no logger.


def _csv(folder: Path, experiment: str, resume_step: int | None) -> Logger:
    from torchrl.record.loggers import CSVLogger

    if resume_step is not None:
        for path in (folder / experiment / "scalars").rglob("*.csv"):
            rows = read_regular(path).decode(errors="replace").splitlines(keepends=True)
            replace(path, "".join(row for row in rows if _is_kept(path, row, resume_step)))
    return CSVLogger(exp_name=experiment, log_dir=str(folder))


def _is_kept(path: Path, row: str, resume_step: int) -> bool:
    if not row.endswith("\n"):
        # A kill cut it off.
        return False
    step = row.partition(",")[0]
    if not (step.isascii() and step.isdecimal()):
        raise CheckpointError(
            f"{path}: a line does not begin with its step: {row[:60]!r}; repair or remove it, then resume"
        )
    return int(step) <= resume_step


def _tensorboard(folder: Path, experiment: str, resume_step: int | None) -> Logger:
    from torchrl.record.loggers import TensorboardLogger

    logger = TensorboardLogger(exp_name=experiment, log_dir=str(folder))
    if resume_step is not None:
        # TorchRL's logger cannot discard later steps, but TensorBoard's writer can.
        from torch.utils.tensorboard import SummaryWriter

        log_dir = logger.experiment.log_dir
        logger.experiment.close()
        logger.experiment = SummaryWriter(log_dir=log_dir, purge_step=resume_step + 1)
    return logger


def _wandb(folder: Path, experiment: str, logging: LoggingConfig, notes: list[str]) -> Logger:
    import wandb
    from torchrl.record.loggers import WandbLogger
    from wandb.errors import Error

    # Omit settings that are not given, so that W&B's environment variables apply.
    settings = {"entity": logging.entity, "group": logging.group, "tags": logging.tags}
    options: dict[str, Any] = {name: value for name, value in settings.items() if value}
    make = partial(
        WandbLogger,
        exp_name=experiment,
        save_dir=folder,
        id=_run_id(folder),
        project=logging.project,
        **options,
    )
    why = wandb_login.offline_reason()
    if why is None:
        try:
            limit = float(os.environ.get("WANDB_INIT_TIMEOUT", _WANDB_START_S))
            return make(settings=wandb.Settings(init_timeout=limit))
        except Error as error:
            why = f"cannot use its server ({first_line(error)})"
            # Otherwise it takes the run for one that it already has.
            wandb.teardown()
    logger = make(mode="offline")
    notes.append(f"W&B {why} and records offline; upload with `wandb sync {folder}/wandb/offline-run-*`.")
    return logger


def _trackio(folder: Path, experiment: str, logging: LoggingConfig) -> Logger:
    from torchrl.record.loggers.trackio import TrackioLogger

    # It continues a run of the same name, and run folders of two days may have the same.
    return TrackioLogger(exp_name=f"{experiment}-{_run_id(folder)[:6]}", project=logging.project)


def _run_id(folder: Path) -> str:
    """Return the id of the run in a logger's folder, which stays the same in all resumptions."""
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / "run_id"
    if not id_file.exists():
        replace(id_file, uuid.uuid4().hex[:12])
    return read_regular(id_file).decode()


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Flatten nested dictionaries to dotted keys, and convert values that TensorBoard rejects to text."""
    flat: dict[str, int | float | str | bool] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat


def _table(service: Any, rows: Sequence[Mapping[str, Any]], run_dir: Path) -> Any:
    """Return a table of responses, with a column for each reward and for each picture of a prompt.

    Args:
        service: module with the classes ``Table`` and ``Image``.
        rows: lines of ``rollouts.jsonl``.
        run_dir: folder of the run.
    """
    names = sorted({name for row in rows for name in row["rewards"]})
    files = [row.get("pictures", []) for row in rows]
    images = {}
    for file in {file for group in files for file in group}:
        picture = read_reduced(run_dir, file)
        images[file] = None if picture is None else service.Image(picture)
    count = max(map(len, files), default=0)
    plain = ["group_id", "prompt", "response", "reward", "advantage"]
    data = [
        [row[name] for name in plain]
        + [row["rewards"].get(name) for name in names]
        + [images[file] for file in group]
        + [None] * (count - len(group))
        for row, group in zip(rows, files, strict=True)
    ]
    pictures = [f"picture/{number + 1}" for number in range(count)]
    return service.Table(columns=[*plain, *(f"reward/{name}" for name in names), *pictures], data=data)


def _shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``rollouts.jsonl`` with the beginning and the end of a long prompt or response."""
    half = _CHARACTERS // 2
    texts = {name: row[name] for name in ("prompt", "response") if len(row[name]) > _CHARACTERS}
    return {**row, **{name: f"{text[:half]} [...] {text[-half:]}" for name, text in texts.items()}}


def _as_markdown(row: Mapping[str, Any]) -> str:
    """Return a response for TensorBoard, which reads Markdown; indented text is shown as it is."""
    parts = ("prompt", row["prompt"]), (f"response, reward {row['reward']:g}", row["response"])
    return "\n\n".join(
        f"{title}:\n\n{textwrap.indent(text, '    ', lambda _: True)}" for title, text in parts
    )
