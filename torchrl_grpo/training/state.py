"""Components and counters of a run, and their checkpoint state (without the model's weights)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.observe import stats
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.training.evaluator import Evaluator
from torchrl_grpo.training.held_out_loss import HeldOutLoss
from torchrl_grpo.training.learner import Learner
from torchrl_grpo.training.rank_log_probs import DistributedReference
from torchrl_grpo.weight_sync.publisher import WeightPublisher


@dataclass
class Counters:
    """Progress of a run.

    Attributes:
        step: optimizer steps done, skipped ones included.
        steps_left_in_round: steps the buffer still has data for.
        response_tokens: response tokens generated.
        reward_errors: rewards that raised.
        seconds: time that earlier processes spent on the run; 0 if it was not resumed.
        accuracy_before: held-out accuracy before training; None if it was not measured.
        primary_before: mean held-out value of the reward that grades (``eval.reward`` or its default) before
            training; None if that is no reward of the user.
        loss_before: loss of held-out solutions before training; None if rewards grade.
        any_number: whether the reward that grades has had other values than 0 and 1.
        any_zero: whether a reward of the user that grades has been less than 1 in an evaluation.
        any_one: whether it has been more than 0.
        any_signal: whether the rewards of any group differed.
        peak_memory_gib: largest resident memory of the run's earlier processes, before it was resumed.
        peak_cuda_gib: largest GPU memory of the run's earlier processes.
        best_value: best held-out value; None as long as no evaluation gave a number.
        best_step: step of the first evaluation with this value.
        evaluations_since_best: number of evaluations after it.
        evaluated_step: step of the last evaluation that was counted; None before the first one.
    """

    step: int = 0
    steps_left_in_round: int = 0
    response_tokens: int = 0
    reward_errors: int = 0
    seconds: float = 0.0
    accuracy_before: float | None = None
    primary_before: float | None = None
    loss_before: float | None = None
    any_number: bool = False
    any_zero: bool = False
    any_one: bool = False
    any_signal: bool = False
    peak_memory_gib: float = 0.0
    peak_cuda_gib: float = 0.0
    best_value: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluated_step: int | None = None

    def take_held_out(self, value: float) -> None:
        """Count an evaluation of the current step, unless it was counted before the run was resumed.

        Args:
            value: held-out value, of which a larger one is better: a loss comes negated. One that is no
                number, such as that of a model that has diverged, is never the best.
        """
        if self.evaluated_step == self.step:
            return
        self.evaluated_step = self.step
        if math.isfinite(value) and (self.best_value is None or value > self.best_value):
            self.best_value, self.best_step, self.evaluations_since_best = value, self.step, 0
        else:
            self.evaluations_since_best += 1

    def take_grades(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count the grades of an evaluation, and return its metrics, without the accuracy if it has none.

        A reward of the user says what is right if all its values so far are 0 or 1, and both have occurred:
        one that may be any number may begin with zeros.
        """
        # There is no value either if a judge failed on all responses.
        self.any_number |= "eval/primary" in metrics and "eval/accuracy" not in metrics
        if (mean := metrics.get("eval/primary")) is not None:
            self.any_zero |= mean < 1
            self.any_one |= mean > 0
        if not self.any_number and (mean is None or (self.any_zero and self.any_one)):
            return dict(metrics)
        return {name: value for name, value in metrics.items() if not name.startswith("eval/accuracy")}

    @property
    def share_before(self) -> float | None:
        """Accuracy before training; None if the reward that grades has given no verdicts."""
        if self.primary_before is None:
            return None if self.any_number else self.accuracy_before
        is_verdict = self.any_zero and self.any_one and not self.any_number
        return self.primary_before if is_verdict else None

    @property
    def evaluated_before(self) -> bool:
        """Whether there was an evaluation before training."""
        return (self.accuracy_before, self.primary_before, self.loss_before) != (None, None, None)

    def state_dict(self) -> dict[str, Any]:
        """Return all counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters by name."""
        # Older checkpoints lack any_signal. Assume True, so that resuming one does not trigger the no-signal
        # warning.
        self.any_signal = True
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Parts:
    """Components of a run, built by :func:`~torchrl_grpo.training.build.build_session`.

    Attributes:
        ranks: training ranks, of which this process is the first.
        plan: devices of the trainer, the engines and the reference model.
        tokenizer: tokenizer of the model.
        learner: trained model with its objective and optimizer.
        workers: all workers as one engine.
        collector: source of rounds.
        reference: reference model in this process; None if there is none here.
        buffer: replay buffer that holds the current round.
        publisher: sends the weights to the engine and verifies that they arrived.
        rounding_check_dtype: dtype in which :func:`~torchrl_grpo.training.rounding_check.rounding_warning`
            estimates the share of updates that round to zero.
        evaluator: held-out problems and their grader.
    """

    ranks: Ranks
    plan: Plan
    tokenizer: PreTrainedTokenizerBase
    learner: Learner
    workers: WorkerGroup
    collector: Collector
    reference: LogProbScorer | DistributedReference | None
    buffer: GroupBuffer
    publisher: WeightPublisher
    rounding_check_dtype: torch.dtype
    evaluator: Evaluator | HeldOutLoss


@dataclass
class SessionState:
    """State that a checkpoint holds in addition to the model's weights.

    Attributes:
        parts: components whose state is saved.
        saves_reference: whether the weights of the reference model change and must be saved.
        counters: progress of the run.
        unlogged: metrics not yet written to ``metrics.jsonl``.
        started: seconds by ``time.perf_counter`` at which this process began.
    """

    parts: Parts
    saves_reference: bool
    counters: Counters = field(default_factory=Counters)
    unlogged: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Seconds spent on the run, over all resumptions."""
        return self.counters.seconds + time.perf_counter() - self.started

    def peak_memory_gib(self) -> float:
        """Largest resident memory of the run, over all resumptions, in GiB."""
        return max(self.counters.peak_memory_gib, stats.peak_memory_gib())

    def peak_cuda_gib(self) -> float:
        """Largest GPU memory of the run, over all resumptions, in GiB."""
        return max(self.counters.peak_cuda_gib, stats.peak_cuda_gib())

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, by the keys of the file ``trainer.pt``. The run may change them.

        They lack the optimizer's state, which :func:`~torchrl_grpo.training.held_state.read` returns.
        """
        parts = self.parts
        return {
            "counters": {
                **self.counters.state_dict(),
                "seconds": self.seconds(),
                "peak_memory_gib": self.peak_memory_gib(),
                "peak_cuda_gib": self.peak_cuda_gib(),
            },
            "collector": parts.collector.state_dict(),
            # Pass rates of env.sampling=pass_rate.
            "curriculum": parts.collector.env.stream.learned_state(),
            "buffer": parts.buffer.state_dict(),
            "publisher": parts.publisher.state_dict(),
            "reference": self._reference_weights(),
            "unlogged": dict(self.unlogged),
            "random": random_state(),
        }

    def _reference_weights(self) -> dict[str, torch.Tensor]:
        """All weights of the reference model if it is refreshed during the run; empty otherwise."""
        if self.parts.reference is None or not self.saves_reference:
            return {}
        return dict(self.parts.reference.scorer.model.named_parameters())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all of :meth:`state_dict` except what :meth:`Learner.resume` loads on every rank."""
        parts = self.parts
        self.counters.load_state_dict(state["counters"])
        # Older checkpoints lack "taken", the number of rounds collected, not counting refill rounds. It is
        # computed here from the number of steps. Collector._from_rounds reads it, for checkpoints without a
        # tracker.
        steps = self.counters.step + self.counters.steps_left_in_round
        training_rounds = steps // parts.learner.steps_per_round
        # Copy, because collector and buffer keep these tensors, which are mapped from the checkpoint's file.
        parts.collector.load_state_dict(
            {"taken": training_rounds, **checkpoint.clone_tensors(state["collector"])}
        )
        if state.get("curriculum"):
            # Empty without a curriculum, and missing in older checkpoints.
            parts.collector.env.stream.load_learned_state(state["curriculum"])
        parts.buffer.load_state_dict(checkpoint.clone_tensors(state["buffer"]))
        parts.publisher.load_state_dict(state["publisher"])
        if state["reference"]:
            assert parts.reference is not None, "a checkpoint of another configuration"
            parts.reference.load_weights(state["reference"])
        self.unlogged = state.get("unlogged", {})  # missing in older checkpoints
        set_random_state(state["random"])


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, numpy and torch, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast("tuple[Any, ...]", numpy.random.get_state())
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        # The run may be resumed on a machine with fewer GPUs.
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
