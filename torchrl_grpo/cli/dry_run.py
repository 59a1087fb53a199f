"""What ``dry_run=true`` shows: the plan, what would be trained on, and how long."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config, derived
from torchrl_grpo.config.checks import schedule
from torchrl_grpo.planning import preflight
from torchrl_grpo.training import rehearsal
from torchrl_grpo.training.early_end import summary_of_ended_run

if TYPE_CHECKING:
    from torchrl_grpo.planning.planned import Planned


def show(cfg: Config, resumed: Path | None, asynchronous: bool, other_plan: Planned | None) -> None:
    """Show what a job would do.

    Args:
        cfg: its configuration.
        resumed: folder that it would resume, or None.
        asynchronous: whether the command's engines generate while the trainer trains.
        other_plan: next best division of the GPUs, to be compared with the chosen one.

    Raises:
        UserError: the run would be refused.
    """
    if resumed is not None:
        last_checkpoint = checkpoint.find(resumed, str(cfg.resume), verify_checksums=False)
        checkpoint.check_same_run(last_checkpoint, preflight.resolve_proximal(cfg, asynchronous))
        ended = summary_of_ended_run(cfg.train, resumed, int(last_checkpoint.name)) is not None
        nothing = ", where it has ended: nothing is left to do" if ended else ""
        sys.stdout.write(f"resumes {resumed} after step {last_checkpoint.name}{nothing}\n")
    preflight.report(cfg, asynchronous, other=other_plan)
    rehearsal.check_model_and_environment(cfg)
    loaded = rehearsal.load_problems(cfg)
    problems = None if loaded is None else len(loaded.train)
    if loaded is not None:
        sys.stdout.write(rehearsal.rehearse(cfg, loaded))
    drops = cfg.env.overlong_prompts == "drop" and problems is not None
    dropped = ", minus the prompts that are dropped for their length" if drops else ""
    sys.stdout.write(f"{derived.describe_length(cfg, problems)}{dropped}\n")
    for sentence in schedule.length_warnings(derived.with_total_turns(cfg, problems or 0), problems):
        sys.stderr.write(f"warning: {sentence}\n")
