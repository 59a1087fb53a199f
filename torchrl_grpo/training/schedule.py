"""What ends with which optimizer step."""

from __future__ import annotations

from torchrl_grpo.config.schema import EvalConfig


def at_interval_or_end(frequency: int, step: int, total_steps: int) -> bool:
    """Every ``frequency`` steps, never for 0; and at the end of the run."""
    return (frequency > 0 and step % frequency == 0) or step == total_steps


def evaluation(cfg: EvalConfig, step: int, total_steps: int) -> bool:
    """Every ``eval.frequency`` steps and at the end, if there are problems to evaluate on."""
    return cfg.num_problems > 0 and at_interval_or_end(cfg.frequency, step, total_steps)
