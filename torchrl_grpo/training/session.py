"""State of one training run, and the operations that the training loop calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_grpo.batch.schema import collate
from torchrl_grpo.config import Config
from torchrl_grpo.objectives.loss import QUARTERS
from torchrl_grpo.observe.guards import Guards
from torchrl_grpo.observe.held_out import held_out
from torchrl_grpo.observe.loggers import Loggers
from torchrl_grpo.observe.metrics import (
    DiscardedWriter,
    EvaluationWriter,
    MetricsWriter,
    RolloutWriter,
)
from torchrl_grpo.observe.past import equal_grades_note, group_size_note
from torchrl_grpo.observe.pictures import write_pictures
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.report.write import ReportWriter
from torchrl_grpo.rewards.registry import eval_reward_name
from torchrl_grpo.rollout.round import Round, check_rewards, discarded_rows, pictures_of, rollout_rows
from torchrl_grpo.rollout.token_details import token_details
from torchrl_grpo.runtime.interrupts import Terminated
from torchrl_grpo.runtime.malloc import release_freed_memory
from torchrl_grpo.training import early_end
from torchrl_grpo.training.held_out_loss import HeldOutLoss
from torchrl_grpo.training.learner import Learner
from torchrl_grpo.training.rounding_check import rounding_warning
from torchrl_grpo.training.run_checkpoints import RunCheckpoints
from torchrl_grpo.training.schedule import RunSchedule
from torchrl_grpo.training.state import SessionState
from torchrl_grpo.training.throughput import ThroughputMeter

_TOO_OLD = "older than collector.max_policy_age allows"
# Metrics that compare the model with the policy that sampled.
_OF_SAMPLING = frozenset(
    {"kl/sampling_policy", "policy/clip_fraction", "policy/ratio", "policy/ess", "policy/logprob_diff"}
    | {"mismatch/ratio_outside", *(f"mismatch/kl_quarter_{number}" for number in QUARTERS)}
)


@dataclass(frozen=True)
class Outputs:
    """Files and loggers that a run writes its measurements to.

    Attributes:
        run_dir: folder of the run.
        metrics: writer of ``metrics.jsonl``.
        rollouts: writer of ``rollouts.jsonl``; None with ``logging.rollouts=false``.
        evaluations: writer of ``evaluations.jsonl``; None with ``logging.rollouts=false`` too.
        discarded: writer of ``discarded.jsonl``; None where no group is thrown away.
        loggers: loggers of ``logging.backends``.
        progress: progress bar, or plain lines.
        grader: what grades the evaluation.
        report: writer of ``report.html``.
        guards: watch over the metrics.
    """

    run_dir: Path
    metrics: MetricsWriter
    rollouts: RolloutWriter | None
    evaluations: EvaluationWriter | None
    discarded: DiscardedWriter | None
    loggers: Loggers
    progress: Progress
    grader: str
    report: ReportWriter
    guards: Guards = field(default_factory=Guards)

    def lost_lines(self, step: int, schedule: RunSchedule, state: SessionState) -> list[str]:
        """Describe what the files of a run that is resumed after ``step`` lack."""
        evaluated = state.counters.evaluated_before
        # The run may have ended before it wrote the metrics of its last step, which the checkpoint then has.
        steps = range(0 if evaluated else 1, step if state.unlogged else step + 1)
        rounds = range(1, step + 1, schedule.steps_per_round)
        messages = [self.metrics.missing(steps)]
        if self.rollouts is not None:
            messages.append(self.rollouts.missing(rounds))
        if self.evaluations is not None:
            due = [each for each in steps if each == 0 or schedule.is_evaluation_due(each)]
            messages.append(self.evaluations.missing(due))
        return [message for message in messages if message is not None]

    def check(self) -> None:
        """Make sure that what is written is found.

        Raises:
            RunFolderLost: a file was deleted or moved.
        """
        for writer in (self.metrics, self.rollouts, self.evaluations, self.discarded):
            if writer is not None:
                writer.check()

    def write(self, step: int, metrics: dict[str, float], responses: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics of one step everywhere, and the responses of its evaluation.

        Raises:
            RunFolderLost: a file was deleted or moved. Nothing is written then.
        """
        self.check()
        if self.evaluations is not None:
            # Before the metrics: lines without metrics are removed when the run is resumed.
            self.evaluations.write(step, responses)
        self.metrics.write(step, metrics)
        self.loggers.log_scalars(metrics, step)
        names = {
            "eval/accuracy": "accuracy",
            "eval/primary": f"held-out {self.grader}",
            "eval/loss": "held-out loss",
        }
        held_out, name = next(
            ((metrics[key], name) for key, name in names.items() if key in metrics), (None, "")
        )
        self.progress.update(
            step,
            reward=metrics.get("reward/mean"),
            loss=None if "reward/mean" in metrics else metrics.get("loss/total"),
            held_out=held_out,
            held_out_name=name,
            kl=metrics.get("kl/reference"),
            tokens_per_s=metrics.get("throughput/generated_tokens_per_s"),
        )
        for finding in self.guards.take(step, metrics):
            self.progress.note(str(finding))
        if "eval/num_problems" in metrics:
            self.report.write()


class Session:
    """One run, built by :func:`~torchrl_grpo.training.build.build_session`.

    Args:
        cfg: configuration before the length of the run, the token budget and dtypes were filled in; saved in
            checkpoints.
        schedule: steps at which events are due.
        state: components of the run and its counters.
        outputs: files and loggers that the run writes to.
        exit_stack: stack that closes the engine and every file.
    """

    throughput: ThroughputMeter
    # Step of the newest checkpoint. It is 0 before the first one: a run that stops before its first step has
    # nothing to save.
    saved_step: int

    def __init__(
        self,
        cfg: Config,
        schedule: RunSchedule,
        *,
        state: SessionState,
        outputs: Outputs,
        exit_stack: ExitStack,
    ) -> None:
        self.cfg = cfg
        # Reward that says whether a response is right, and its least value for one that is.
        self.pass_reward = eval_reward_name(cfg)
        self.pass_threshold = 1.0 if cfg.eval.threshold is None else cfg.eval.threshold
        # Whether the model learns from responses that it sampled, and not from solutions.
        self.learns_from_samples = cfg.train.method == "grpo"
        self.schedule = schedule
        self.state = state
        self.parts = state.parts
        self.counters = state.counters
        self.outputs = outputs
        self._exit_stack = exit_stack
        self._asleep = False
        # Responses of the newest evaluation, for as long as they are not written.
        self.responses: list[dict[str, Any]] = []
        self.saved_step = state.counters.step
        self.checkpoints = RunCheckpoints(cfg, state, outputs.run_dir, outputs.grader)
        # When the newest checkpoint is whole, and before loggers close.
        exit_stack.callback(self._close_report)
        # First of all, while the model is there.
        exit_stack.callback(self.checkpoints.writer.close)

    def _close_report(self) -> None:
        """Write the last report, also of a run that is stopped, but not of one that has to end at once."""
        error = sys.exception()
        if not isinstance(error, Terminated):
            # An upload may take long, and a run that failed may be about to be repeated.
            self.outputs.report.close(self.outputs.loggers if error is None else None)

    def begin(self) -> None:
        """Verify that weight updates work, and evaluate the weights before training."""
        step = self.counters.step
        self.outputs.progress.phase("verifying that weights reach the engine")
        verified = self.parts.publisher.verify_at_start(step)
        self.throughput = self._throughput_meter()
        for note in (
            f"matrix multiplication in the trainer's dtype: {self.throughput.gemm_rate / 1e9:,.0f} GFLOP/s",
            self.parts.publisher.summary(verified),
            rounding_warning(
                self.parts.learner.model,
                self.parts.rounding_check_dtype,
                self.cfg.optimizer,
                self.schedule.total_steps,
            ),
        ):
            if note is not None:
                self.outputs.progress.note(note)
        # After a resumption, metrics.jsonl usually has this step already, so it is not evaluated and logged
        # again. The step is missing there if the checkpoint was written before the step was logged.
        logged = self.outputs.metrics.last_step == step
        grader, evaluator = self.outputs.grader, self.parts.evaluator
        if self.schedule.evaluates:
            self.outputs.progress.note(f"held out: {len(evaluator.examples)} problems, graded by {grader}")
        if self.schedule.is_initial_evaluation_due(step) and not logged:
            self.outputs.progress.phase(f"measuring {evaluator.what} before training")
            metrics = self.evaluate()
            self.counters.accuracy_before = metrics.get("eval/accuracy")
            self.counters.primary_before = metrics.get("eval/primary")
            self.counters.loss_before = metrics.get("eval/loss")
            responses = self.responses
            self.log(metrics)
            self._check_graded(responses)
            foretold = group_size_note(metrics, self.cfg.env.repeats) if self.learns_from_samples else None
            for note in (foretold, None if self.counters.any_number else equal_grades_note(metrics, grader)):
                if note is not None:
                    self.outputs.progress.note(note)
            if self.is_finished():
                # The run ends here, and ends with a checkpoint as after any other step.
                self.save()
        if self.state.unlogged and not logged:
            # The run lost its workers after this step, before the step's metrics were written.
            evaluation = self.evaluate() if self.schedule.is_evaluation_due(step) else {}
            self.log({**self.state.unlogged, **evaluation})
            if evaluation:
                # The checkpoint of this step does not count the evaluation yet, and a logged one is not
                # repeated.
                self.save()
        self.outputs.progress.start()
        self.parts.collector.start()

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward of the run by its name."""
        reward_set = self.parts.collector.env.reward_set
        return dict(zip(reward_set.names, reward_set.weights, strict=True))

    def _check_graded(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Stop a run whose rewards, and what grades, failed on every response before training.

        Raises:
            TrainingStopped: they did. The message has the errors.
        """
        errors = [row.get("errors", {}) for row in rows]
        # A grader that is no reward of the run may fail without harm to training.
        if self.learns_from_samples and all(self.pass_reward in each for each in errors):
            rewards = [row["rewards"] for row in rows]
            check_rewards(rewards, errors, self.reward_weights, "the first evaluation")

    def _throughput_meter(self) -> ThroughputMeter:
        learner = self.parts.learner
        dtype = learner.autocast_dtype or learner.model.dtype
        return ThroughputMeter(learner.model, learner.device, dtype, self.parts.ranks.size)

    def sleep_engine(self) -> None:
        """Free the engine's memory until the next publication, if the plan says that the engine sleeps."""
        if self.parts.plan.sleeps and not self._asleep:
            assert self.parts.workers.local_engine is not None
            self.parts.workers.local_engine.sleep()
            self._asleep = True

    def train_on(self, batch: TensorDictBase) -> dict[str, float]:
        """Take one optimizer step on all training ranks."""
        metrics = self.parts.learner.step(batch)
        if self.learns_from_samples:
            return metrics
        return {name: value for name, value in metrics.items() if name not in _OF_SAMPLING}

    def training_throughput(self, batch: TensorDictBase, seconds: float) -> dict[str, float]:
        """Return the throughput of an optimizer step on ``batch`` that took ``seconds``."""
        has_gradient = self.parts.learner.optimizer_step.loss.has_gradient(batch)
        return self.throughput.training_metrics(batch, has_gradient, seconds)

    def refresh_reference(self) -> None:
        """Move the reference model toward the policy by ``ref_model.refresh_mix``."""
        if self.parts.reference is not None:
            self.checkpoints.writer.wait_until_read()
            self.parts.reference.interpolate_toward(
                self.parts.learner.full_model(), self.cfg.ref_model.refresh_mix
            )

    def publish(self) -> dict[str, float]:
        """Send the current weights to the engine and verify that they arrived."""
        started = time.perf_counter()
        step = self.counters.step
        if self.parts.plan.offload_optimizer:
            self.checkpoints.writer.wait_until_read()
            self.parts.ranks.call_all(Learner.park_optimizer, self.parts.learner)
        if self._asleep:
            assert self.parts.workers.local_engine is not None
            if self.parts.learner.device.type == "cuda":
                # The engine needs the memory that the trainer's allocator has cached.
                torch.cuda.empty_cache()
            self.parts.workers.local_engine.wake()
            self._asleep = False
        wait = self.schedule.is_evaluation_due(step) or self.schedule.is_finished(step)
        metrics = self.parts.publisher.publish(step, wait=wait)
        return {**metrics, **self.throughput.publication_metrics(time.perf_counter() - started)}

    def evaluate(self) -> dict[str, float]:
        """Measure the held-out accuracy or rewards of the weights that were published last.

        Raises:
            TrainingStopped: a worker that took part does not hold these weights.
        """
        started = time.perf_counter()
        if isinstance(self.parts.evaluator, HeldOutLoss):
            # The trainer's model computes it.
            self.sleep_engine()
        evaluation = self.parts.evaluator(self.parts.workers)
        # A worker that was restarted during the evaluation reported its checksums before it generated, so
        # check them now.
        self.parts.publisher.verify_new_results()
        metrics, self.responses = self.counters.take_grades(evaluation.metrics), evaluation.rows
        if (present := held_out(metrics)) is not None:
            self.counters.take_held_out(present.value)
        if self.outputs.evaluations is not None:
            write_pictures(self.outputs.run_dir, evaluation.pictures)
        return {**metrics, "time/eval_s": time.perf_counter() - started}

    def ended_by(self) -> str | None:
        """Return the setting by which the held-out value ends the run before its last step, or None."""
        counters = self.counters
        if self.schedule.is_finished(counters.step):
            return None
        return early_end.ended_by(self.cfg.train, counters.best_value, counters.evaluations_since_best)

    def is_finished(self) -> bool:
        """Whether the run takes no further step."""
        return self.schedule.is_finished(self.counters.step) or self.ended_by() is not None

    def is_best(self) -> bool:
        """Whether the current step gets a checkpoint because its held-out value is the best."""
        best, step = self.counters.best_value, self.counters.best_step
        return self.cfg.train.keep_best and best is not None and step == self.counters.step

    def evaluate_only(self) -> dict[str, float]:
        """Give the engine the model's weights, and measure their held-out accuracy."""
        self.parts.publisher.verify_at_start(self.counters.step)
        return {name: value for name, value in self.evaluate().items() if name.startswith("eval/")}

    def log(self, metrics: dict[str, float]) -> None:
        """Write the metrics of the current step everywhere."""
        self.outputs.write(self.counters.step, metrics, self.responses)
        self.state.unlogged, self.responses = {}, []

    def write_rollouts(self, round_: Round, groups: TensorDictBase) -> None:
        """Write every response of a round, under the first of the steps that train on the round.

        Args:
            round_: the round.
            groups: its groups from the buffer, with advantages.
        """
        if self.outputs.rollouts is not None:
            rows = rollout_rows(round_, groups)
            count = self.cfg.logging.token_details
            if count and self.learns_from_samples:
                details = self._token_details(groups, count)
                for row, tokens in zip(rows, details, strict=False):
                    row["tokens"] = tokens
            write_pictures(self.outputs.run_dir, pictures_of(groups))
            self.outputs.rollouts.write(self.counters.step + 1, rows)
            self.outputs.loggers.log_rollouts(rows, self.counters.step + 1, self.outputs.run_dir)

    def _token_details(self, groups: TensorDictBase, count: int) -> list[dict[str, list[Any]]]:
        # Whole groups, because the prompt of one is computed once.
        scored = collate(groups.unbind(0)[: -(-count // groups["group_id"].shape[1])])
        trainer = torch.stack(self.parts.learner.log_probs(scored))
        has_teacher = self.cfg.policy.distill_coef != 0
        return token_details(scored, trainer, self.parts.tokenizer, count, has_teacher)

    def write_discarded(self, round_: Round, reasons: list[str]) -> None:
        """Write every response of the groups that the next round leaves out."""
        if self.outputs.discarded is not None:
            write_pictures(self.outputs.run_dir, pictures_of(round_.groups))
            self.outputs.discarded.write(self.counters.step + 1, discarded_rows(round_, reasons))

    def write_too_old(self) -> None:
        """Write the finished groups that were thrown away because of their age."""
        # Taken also where they are not written, as they would pile up.
        round_ = self.parts.collector.take_too_old()
        if round_ is not None:
            self.write_discarded(round_, [_TOO_OLD] * len(round_.prompts))

    def save(self) -> Path:
        """Begin to write a checkpoint of the current step, and return its folder.

        Raises:
            CheckpointError: the disk is full, which the checkpoint before may have met.
        """
        self.checkpoints.save()
        self.saved_step = self.counters.step
        return self.outputs.run_dir / "checkpoints" / str(self.saved_step)

    def summary_entries(self) -> dict[str, Any]:
        """Return the entries of ``summary.json`` other than accuracy, steps, time and memory."""
        return {
            "grader": self.outputs.grader,
            "eval_problems": len(self.parts.evaluator.examples),
            "response_tokens": self.counters.response_tokens,
            "reward_errors": self.counters.reward_errors,
            "skipped_steps": self.parts.learner.optimizer_step.skipped,
            "best_value": self.counters.best_value,
            "best_step": None if self.counters.best_value is None else self.counters.best_step,
            "ended_by": self.ended_by(),
            "peak_cuda_memory_gib": self.state.peak_cuda_gib(),
            **self.parts.collector.summary_entries(),
        }

    def close(self) -> None:
        """Free the engine and the model, and close every file, so that a sweep's next job starts afresh."""
        try:
            self._exit_stack.close()
        finally:
            # The traceback of an exception may keep this object alive until a sweep ends.
            del self.parts, self.state, self.checkpoints
            release_freed_memory()
