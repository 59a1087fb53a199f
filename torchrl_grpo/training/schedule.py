"""What is due after which optimizer step: functions of the configuration and of the counters alone."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import held_out_problems, rounds, steps_per_round


@dataclass(frozen=True)
class RunSchedule:
    """When a run publishes, evaluates, saves, refreshes the reference model, and ends.

    A ``step`` is the number of optimizer steps taken so far. For evaluations and checkpoints, an interval of
    0 means that they are due at the end of the run only.

    Attributes:
        steps_per_round: optimizer steps that a collection round is trained for.
        total_steps: optimizer steps of the whole run.
        publish_every: optimizer steps from one publication to the next; 0 publishes for evaluations only.
        evaluate_every: optimizer steps from one evaluation to the next.
        checkpoint_every: optimizer steps from one checkpoint to the next.
        refresh_every: optimizer steps from one refresh of the reference model to the next; 0 for never.
        evaluates: whether there are held-out problems.
        evaluates_at_start: whether they are also evaluated before the first step.
    """

    steps_per_round: int
    total_steps: int
    publish_every: int
    evaluate_every: int = 0
    checkpoint_every: int = 0
    refresh_every: int = 0
    evaluates: bool = True
    evaluates_at_start: bool = True

    @classmethod
    def from_config(cls, cfg: Config) -> RunSchedule:
        """Return the schedule of a configuration.

        The configuration comes from :func:`~torchrl_grpo.config.derived.with_total_turns`.
        """
        per_round = steps_per_round(cfg)
        total_steps = rounds(cfg) * per_round
        # Without sampling, the engine needs weights for evaluations only.
        publish_every = 0 if cfg.train.method == "sft" else per_round
        return cls(
            steps_per_round=per_round,
            total_steps=total_steps,
            publish_every=cfg.train.weight_update_frequency or publish_every,
            evaluate_every=cfg.eval.frequency,
            checkpoint_every=cfg.train.checkpoint_frequency,
            refresh_every=cfg.ref_model.refresh_frequency,
            evaluates=held_out_problems(cfg) > 0,
            evaluates_at_start=cfg.eval.at_start,
        )

    def is_finished(self, step: int) -> bool:
        """Whether every optimizer step has been taken."""
        return step >= self.total_steps

    def is_evaluation_due(self, step: int) -> bool:
        """Whether an evaluation is due: every ``evaluate_every`` steps and at the end."""
        return self.evaluates and self._at_interval_or_end(self.evaluate_every, step)

    def is_initial_evaluation_due(self, step: int) -> bool:
        """Whether an evaluation is due before training begins."""
        return self.evaluates and self.evaluates_at_start and step == 0

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is due: every ``checkpoint_every`` steps and at the end."""
        return self._at_interval_or_end(self.checkpoint_every, step)

    def checkpoints_after(self, step: int, keep_best: bool = False) -> int:
        """Return how many checkpoints are due after ``step`` steps, at most if the best are written too."""
        every = self.checkpoint_every or self.total_steps
        regular = self.total_steps // every - step // every
        at_end = self.total_steps % every > 0 and step < self.total_steps
        best = self.total_steps // self.evaluate_every - step // self.evaluate_every if keep_best else 0
        return max(0, regular) + at_end + max(0, best)

    def is_publication_due(self, step: int, steps_left_in_round: int) -> bool:
        """Whether the engine must get the weights of this step.

        It must every ``publish_every`` steps, and before an evaluation. A checkpoint also publishes if the
        next round would otherwise be sampled with older weights. A resumed run publishes the checkpoint's
        weights before that round, and the uninterrupted run must sample it with the same weights.
        """
        if self.publish_every == 0:
            return self.is_evaluation_due(step)
        until_next = self.publish_every - step % self.publish_every
        if until_next == self.publish_every or self.is_evaluation_due(step):
            return True
        return self.is_checkpoint_due(step) and until_next > steps_left_in_round

    def resumes_exactly(self, step: int, steps_left_in_round: int) -> bool:
        """Whether a run that ends here and is resumed equals the run that goes on.

        A resumed run publishes the checkpoint's weights before it samples. That changes the run if the round
        after this one is sampled with older weights.
        """
        if self.publish_every == 0 or step % self.publish_every == 0:
            return True
        return self.publish_every - step % self.publish_every <= steps_left_in_round

    def is_reference_refresh_due(self, step: int) -> bool:
        """Whether the reference model moves toward the policy after this step."""
        return self.refresh_every > 0 and step % self.refresh_every == 0

    def _at_interval_or_end(self, interval: int, step: int) -> bool:
        return (interval > 0 and step % interval == 0) or step == self.total_steps
