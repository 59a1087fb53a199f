"""One optimizer step: gradient accumulation over micro-batches, clipping, and the weight update.

The update is skipped if the loss or the gradient is not finite. With several training ranks, each processes a
part of the groups. Denominators are computed over the whole batch, so gradients and metrics add up over ranks
as they do over micro-batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_grpo.batch.micro_batches import DUMMY_MICRO_BATCH, MicroBatch, Share, TokenBudget, split_evenly
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.config.values import MOMENT_BYTES
from torchrl_grpo.distributed.parallelism import reshard_after, synchronizing
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.precision import cast_weights_once
from torchrl_grpo.objectives.aggregation import BatchTotals, count_totals
from torchrl_grpo.objectives.loss import QUARTERS, GroupPolicyLoss
from torchrl_grpo.runtime.oom import stop_on_oom
from torchrl_grpo.training.optimizer_backend import make_backend
from torchrl_grpo.training.optimizers import build_optimizer

# With torch's default of 2^16, the first steps overflow until the scale is low enough.
_INITIAL_SCALE = 2.0**12

_NO_ROOM_FOR_UPDATE = (
    "memory ran out in the optimizer's update, which keeps {size:.3g} bytes a trained weight: start a new "
    "run with train_model.lora.rank=16 or a smaller model.name, or resume with the model divided among GPUs "
    "by train_model.parallelism=fsdp2 or, where vLLM is on the same GPU, with a lower "
    "inference_model.gpu_memory_utilization"
)

# Output key of the loss -> name of the metric.
_METRICS = {
    "loss_objective": "loss/objective",
    "loss_kl": "loss/kl",
    "loss_kl_inference": "loss/kl_inference",
    "loss_distill": "loss/distill",
    "loss_entropy": "loss/entropy",
    "kl_ref": "kl/reference",
    "reverse_kl": "distill/reverse_kl",
    "kl_approx": "kl/sampling_policy",
    "entropy": "policy/entropy",
    "clip_fraction": "policy/clip_fraction",
    "ratio": "policy/ratio",
    "logprob_diff": "policy/logprob_diff",
    "mismatch_kl_approx": "mismatch/kl",
    "ratio_outside": "mismatch/ratio_outside",
    "correction": "policy/correction",
    "correction_zero": "policy/correction_zero",
}


class Terms(NamedTuple):
    """Loss and metrics of a micro-batch, which stay on the device until the step ends.

    Attributes:
        names: names of the values.
        values: values ``[names]`` float64. The sum over micro-batches and ranks then hardly depends on how
            the batch is divided.
    """

    names: tuple[str, ...]
    values: Tensor


class OptimizerStep:
    """Turns an optimizer batch into one update of ``model``.

    Args:
        model: trained model.
        loss: objective of ``model``.
        cfg: optimizer settings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        groups_per_batch: number of groups in a full batch; a batch has fewer if groups were dropped.
        num_pieces: number of equal pieces that a batch is split into before the token budget splits them
            further; it changes the result by rounding only.
        budget: token budget that splits larger pieces further.
        use_scaler: whether to scale the loss, for float16.
        max_skipped_steps: largest number of consecutive skipped steps; one more stops training.
        ranks: ranks that take the step together; None for this process alone.
        network: module that the loss calls, made by
            :func:`~torchrl_grpo.distributed.parallelism.distribute`.
        loads_parked: whether optimizer state that is loaded from a checkpoint stays in host memory until the
            first update.

    Attributes:
        before_update: function that is called before weights and optimizer state change.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: GroupPolicyLoss,
        cfg: OptimizerConfig,
        *,
        total_steps: int,
        groups_per_batch: int,
        num_pieces: int,
        budget: TokenBudget,
        use_scaler: bool,
        max_skipped_steps: int,
        ranks: Ranks | None = None,
        network: nn.Module | None = None,
        loads_parked: bool = False,
    ) -> None:
        self.network = network
        self.ranks = Ranks(on_cpu=True) if ranks is None else ranks
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss = loss
        self.groups_per_batch = groups_per_batch
        self.num_pieces = num_pieces
        self.budget = budget
        self.max_skipped_steps = max_skipped_steps
        self._no_room_for_update = _NO_ROOM_FOR_UPDATE.format(size=MOMENT_BYTES[cfg.name])
        self.optimizer = build_optimizer(model, cfg)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, total_steps, cfg)
        )
        device = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(device, init_scale=_INITIAL_SCALE, enabled=use_scaler)
        self.backend = make_backend(network, self.optimizer, self.scaler, cfg.max_grad_norm, loads_parked)
        self.before_update: Callable[[], None] = lambda: None
        self.skipped = 0
        self.skipped_in_a_row = 0

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Update the model on ``batch`` (batch size ``[P]``), which every rank has."""
        shares, totals = self.divide(batch)
        return self.update(shares[self.ranks.rank], totals, batch["advantage"].shape[:2].numel())

    def divide(self, batch: TensorDictBase) -> tuple[list[Share], BatchTotals]:
        """Divide a batch among the ranks, and count what its loss mask has.

        Groups without a token in the mask are left out. Groups with and without a gradient are divided by
        themselves, because passes through the model differ.
        """
        counts = [count_totals(group["masks", "loss"]) for group in batch.unbind(0)]
        totals = BatchTotals(*(sum(column) for column in zip(*counts, strict=True)))
        used, has_gradient = (
            [row for row, count in enumerate(counts) if count.tokens],
            self.loss.has_gradient(batch),
        )
        kinds = [[row for row in used if has_gradient[row] == kind] for kind in (True, False)]
        return self.budget.divide(batch, self.ranks.size, kinds), totals

    def update(self, share: Share, totals: BatchTotals, responses: int) -> dict[str, float]:
        """Update the model on a batch of which each rank has its share.

        Args:
            share: groups of this rank.
            totals: counts of the whole batch.
            responses: number of responses of the whole batch, also of those outside of the loss mask.

        Returns:
            Metrics of the step. Terms of the loss are weighted as ``policy.aggregation`` says, and metrics of
            tokens are means over the loss mask. If the mask is empty, the model is not changed.

        Raises:
            TrainingStopped: more than ``max_skipped_steps`` steps in a row had a loss or a gradient that is
                not finite. Overflows that lower the loss scale of float16 do not count.
        """
        lr = float(self.scheduler.get_last_lr()[0])
        if not totals.tokens:
            self._advance_schedule()
            return {"optimizer/lr": lr, "optimizer/skipped": self.skipped}
        sums = self.accumulate(share, totals)
        loss = sums.pop("loss")
        self.before_update()
        # The first update allocates the optimizer's moments, and no smaller micro-batch can avoid that.
        with stop_on_oom(self._no_room_for_update):
            norm = self.backend.step(apply=math.isfinite(loss))
        finite = math.isfinite(loss) and math.isfinite(norm)
        self._count(finite, loss, norm)
        # Also after a skipped step: the scaler lowers its scale after an overflow.
        self.scaler.update()
        self._advance_schedule()
        self.backend.zero_grad()
        metrics = {
            "loss/total": loss,
            **{name: sums[key] for key, name in _METRICS.items() if key in sums},
            "policy/ess": _normalized_ess(sums["ratio"], sums["ratio_squared"]),
            **(
                {"mismatch/ess": _normalized_ess(sums["mismatch_ratio"], sums["mismatch_ratio_squared"])}
                if "mismatch_ratio" in sums
                else {}
            ),
            **_by_quarter(sums),
            **self._coefficients(),
            "optimizer/grad_norm": norm,
            "optimizer/lr": lr,
            "optimizer/skipped": self.skipped,
            **({"optimizer/loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}),
        }
        if finite:
            self.loss.update_coefficients(sums["entropy"], sums.get("kl_ref"), responses)
        return metrics

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            # The schedule advances in every step, even if the first step does not update the weights.
            warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
            self.scheduler.step()

    def _coefficients(self) -> dict[str, float]:
        """Return the current coefficients of the terms that are in use."""
        kl, entropy = self.loss.kl, self.loss.entropy
        return {
            **({"policy/kl_coef": kl.value} if kl.in_use else {}),
            **({"policy/entropy_coef": entropy.value} if entropy.in_use else {}),
        }

    def accumulate(self, share: Share, totals: BatchTotals) -> dict[str, float]:
        """Add the gradients of a batch to the parameters, and return its summed loss terms and metrics.

        Groups with zero gradient get only a forward pass, for the metrics. It takes a third of the time of
        forward and backward.
        """
        has_gradient = self.loss.has_gradient(share.groups)
        # A share may have a group that is not its own.
        own_rows = range(len(share.rows))
        terms = self._forward_only(share.groups, [row for row in own_rows if not has_gradient[row]], totals)
        backward = self._backward(share.groups, [row for row in own_rows if has_gradient[row]], totals)
        if not backward:
            # No rank has a group with a gradient. The optimizer still takes its step, with gradients of zero.
            # Some backends need a backward pass for that. It comes after the forward passes, because a retry
            # after an out-of-memory error drops all gradients.
            self.backend.set_zero_gradients(
                lambda: _total(self.loss(DUMMY_MICRO_BATCH.select(share.groups), totals=totals))
            )
        own = _summed([*terms, *backward])
        return self.ranks.all_reduce_sum(own, sorted(own))

    def _backward(self, groups: TensorDictBase, rows: Sequence[int], totals: BatchTotals) -> list[Terms]:
        def process(micro: MicroBatch, weight: float = 1.0, last: bool = True) -> Terms:
            with synchronizing(self.network, last):
                terms = self.loss(micro.select(groups), totals=totals)
                loss = _total(terms)
                # DDP averages gradients over ranks; scaled by their number the result is the sum.
                self.backend.backward(loss * (weight * self.ranks.size))
            return _to_terms(terms, loss, weight)

        samples = groups["advantage"].shape[1]
        pieces = [
            MicroBatch(tuple(rows[place] for place in piece.rows), piece.samples)
            for piece in split_evenly(len(rows), samples, self.num_pieces, self.groups_per_batch)
        ]
        if self.ranks.size > 1:
            # They may gather weights for each pass, and free them.
            return self._run_micro_batches(groups, process, pieces)
        passes = len(self.budget.split(groups, pieces))
        with cast_weights_once(self.parameters[0].device, passes):
            return self._run_micro_batches(groups, process, pieces)

    @torch.no_grad()
    def _forward_only(self, groups: TensorDictBase, rows: Sequence[int], totals: BatchTotals) -> list[Terms]:
        def process(micro: MicroBatch, weight: float = 1.0, last: bool = True) -> Terms:
            output = self.loss(micro.select(groups), totals=totals)
            return _to_terms(output, _total(output), weight)

        with reshard_after(self.network):
            return self._run_micro_batches(groups, process, [MicroBatch(tuple(rows), slice(None))])

    def _run_micro_batches(
        self,
        groups: TensorDictBase,
        process: Callable[..., Terms],
        pieces: Sequence[MicroBatch],
    ) -> list[Terms]:
        """Split pieces of ``groups`` into micro-batches, and call ``process`` on each.

        The token budget splits pieces that are too large. Passes through the model are collective: a rank
        with fewer micro-batches than another runs a dummy micro-batch with a weight of zero.
        """
        if self.ranks.size == 1:
            return self.budget.run(groups, process, self.backend.zero_grad, pieces)
        micro_batches = self.budget.split(groups, pieces)
        passes = self.ranks.all_reduce_max(len(micro_batches))
        dummies = [(DUMMY_MICRO_BATCH, 0.0)] * (passes - len(micro_batches))
        with self.budget.explain_oom():
            return [
                process(micro, weight, last=number == passes - 1)
                for number, (micro, weight) in enumerate([*((m, 1.0) for m in micro_batches), *dummies])
            ]

    def _count(self, finite: bool, loss: float, norm: float) -> None:
        if finite:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        # GradScaler lowers its scale only if gradients are not finite. A non-finite loss alone never lowers
        # it, so such a step must count, or the run would never stop.
        overflowed = self.scaler.is_enabled() and not math.isfinite(norm)
        if not (overflowed and self.scaler.get_scale() > 1.0):
            self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.max_skipped_steps:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} optimizer steps in a row were skipped because the loss ({loss}) or "
                f"the gradient norm ({norm}) is not finite, and train.max_skipped_steps="
                f"{self.max_skipped_steps}; resume with train_model.autocast=no (unless it is already no), "
                f"or start a new run with a lower optimizer.lr={self.optimizer.defaults['lr']}, from the "
                "weights of an earlier checkpoint with model.name=RUN/checkpoints/STEP/model"
            )

    def state_dict(self) -> dict[str, Any]:
        """State of optimizer, schedule, scaler and counters.

        Its format does not depend on the number of ranks, so a run with another number of ranks can load it
        once :func:`~torchrl_grpo.distributed.shard_transfer.gather` has put its shards together. Every rank
        must call this. Of the others, the result has shards only.
        """
        return {
            "optimizer": self.backend.optimizer_state(keep=self.ranks.is_main),
            "scheduler": {"last_epoch": self.scheduler.last_epoch},
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "budget": self.budget.state_dict(),
            "kl": self.loss.kl.state_dict(),
            "entropy": self.loss.entropy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the schedule follows the present configuration."""
        self.backend.load_optimizer_state(state["optimizer"])
        self.scheduler.last_epoch = state["scheduler"]["last_epoch"]
        rates = [
            base * factor(self.scheduler.last_epoch)
            for base, factor in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates
        if state["scaler"]:  # empty if the saved run used no scaler; the resumed run may use one
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if "budget" in state:  # not in checkpoints of earlier versions
            self.budget.load_state_dict(state["budget"])
        self.loss.kl.load_state_dict(state["kl"])
        self.loss.entropy.load_state_dict(state["entropy"])


def _total(output: TensorDictBase) -> Tensor:
    return torch.stack([value for name, value in output.items() if name.startswith("loss_")]).sum()


def _to_terms(output: TensorDictBase, loss: Tensor, weight: float) -> Terms:
    entries = {"loss": loss, **dict(output.items())}
    return Terms(
        tuple(entries), torch.stack([value.detach() for value in entries.values()]).double() * weight
    )


def _summed(terms: Sequence[Terms]) -> dict[str, float]:
    """Add up the terms of all micro-batches, and read them from the device in one copy."""
    # A sum that begins with 0 is never -0.
    total = terms[0].values + 0.0
    for addend in terms[1:]:
        assert addend.names == terms[0].names, (addend.names, terms[0].names)
        total = total + addend.values
    return dict(zip(terms[0].names, total.tolist(), strict=True))


def _by_quarter(sums: dict[str, float]) -> dict[str, float]:
    """Return the KL divergence from the engine in each quarter of the responses that has a token."""
    shares = {number: sums.get(f"quarter_{number}", 0.0) for number in QUARTERS}
    return {
        f"mismatch/kl_quarter_{number}": sums[f"kl_quarter_{number}"] / share
        for number, share in shares.items()
        if share > 0
    }


def _normalized_ess(mean: float, mean_square: float) -> float:
    """Kish's effective sample size of importance weights, as a share of the tokens; at most 1."""
    # Rounding could push the result above 1 when all ratios are equal.
    return min(mean**2 / mean_square, 1.0) if mean_square > 0 else math.nan


def learning_rate_factor(step: int, total_steps: int, cfg: OptimizerConfig) -> float:
    """Return the learning-rate multiplier at ``step`` (0-based): linear warm-up, then the schedule.

    A decay reaches ``min_lr_ratio`` in the last step. With ``min_lr_ratio=0`` the rate reaches 0 only one
    step after the last, as in transformers, so that no step is taken at rate 0.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    if cfg.schedule == "constant":
        return 1.0
    last = total_steps - 1 if cfg.min_lr_ratio > 0 else total_steps
    done = min(1.0, (step - cfg.warmup_steps) / max(1, last - cfg.warmup_steps))
    shape = 1 - done if cfg.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape
