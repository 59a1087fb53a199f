"""Whether a run ends before its last step: its held-out value is good enough, or no longer improves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_grpo.config.schema import TrainConfig
from torchrl_grpo.observe import report


def ended_by(cfg: TrainConfig, best: float | None, evaluations_since_best: int) -> str | None:
    """Return the setting that ends the run now; None if none does.

    Args:
        cfg: settings ``stop_at`` and ``patience``.
        best: best held-out value so far; None before the first evaluation.
        evaluations_since_best: number of evaluations after that of the best value.
    """
    if cfg.stop_at is not None and best is not None and best >= cfg.stop_at:
        return _stop_at(cfg)
    if cfg.patience is not None and evaluations_since_best >= cfg.patience:
        return _patience(cfg)
    return None


def summary_of_ended_run(cfg: TrainConfig, run_dir: Path, step: int) -> dict[str, Any] | None:
    """Return the summary of a run that has ended with ``step``; None if it has not, or now goes on.

    A run that a setting has ended goes on if it is resumed with another value of it.
    """
    summary = report.of_ended_run(run_dir, step)
    setting = None if summary is None else summary.get("ended_by")
    return summary if setting in (None, _stop_at(cfg), _patience(cfg)) else None


def _stop_at(cfg: TrainConfig) -> str:
    return f"train.stop_at={cfg.stop_at}"


def _patience(cfg: TrainConfig) -> str:
    return f"train.patience={cfg.patience}"
