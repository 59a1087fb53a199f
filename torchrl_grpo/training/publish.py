"""Weight publication with proof: after it, the engine is shown to hold the trainer's weights.

Three kinds of evidence, because each misses what another sees:

* a receipt: a checksum of every tensor the engine took, against the live model's own. It sees a tensor
  that was left out or came from a stale copy, however small the update was;
* the engine's answer: log-probabilities of the likeliest next tokens after fixed probe prompts, against
  the trainer's. It sees weights that arrived but are not the ones that answer;
* the engine's count of cached tokens. It sees key/value states of earlier weights that are still served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.protocol import Inference, NextTokens, Probe
from torchrl_grpo.inference.receipts import Receipt, checksum, signed
from torchrl_grpo.models import lora
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.models.quantization import is_quantized
from torchrl_grpo.padding import pad_left

if TYPE_CHECKING:
    from torchrl_grpo.training.learner import GatheredModel

_T = TypeVar("_T")

# What test adapters change their matrices by, as a share: far above what the bound lets pass, and little, but
# above the rounding of any number format.
_STIR, _LITTLE = 0.25, 1 / 64

TOP_K = 20
# What two correct implementations may differ by at the start, in nats; several times what was measured
# (float32: 1e-5 to 1e-4; bfloat16: up to 0.1 on unlikely tokens).
_START_BOUND = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.2}
# Later the bound is this many times the gap seen at the start, but never below the floor.
_GROWTH = 20.0
_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


@dataclass
class Gap:
    """Result of one comparison, in nats.

    Attributes:
        now: largest difference of log-probabilities between the engine and the trainer as it is.
        before: the same against the trainer as it was some publications ago; None at the first.
        shift: how far the trainer itself has moved since; None at the first.
    """

    now: float
    before: float | None
    shift: float | None


@dataclass(frozen=True)
class Expectation:
    """What an engine must answer once it holds certain weights.

    Attributes:
        version: optimiser steps behind them.
        ours: ``[N, V]``, the trainer's log-probabilities after each probe prompt.
        anchor: the same of some publications ago; None at the first.
    """

    version: int
    ours: Tensor
    anchor: Tensor | None


class WeightPublisher:
    """Publishes the weights of ``model`` to ``engine`` and proves that they arrived.

    Args:
        model: the model that is trained; published tensor by tensor, without a copy of the whole.
        scorer: around ``model``.
        engine: takes the weights.
        probe_prompts: token ids; long enough to fill a block of a prefix cache, no common beginning.
        pad_id: padding id.
        precision: the coarser of the engine's and the trainer's number formats.
        bound: largest gap allowed, None to derive it from the first gap seen.
    """

    def __init__(
        self,
        model: nn.Module | GatheredModel,
        scorer: TokenScorer | GatheredModel,
        engine: Inference,
        probe_prompts: Sequence[Sequence[int]],
        pad_id: int,
        precision: torch.dtype,
        bound: float | None = None,
    ) -> None:
        self.model = model
        self.scorer = scorer
        self.engine = engine
        self.probe = Probe(probe_prompts, TOP_K)
        self.start_bound = _START_BOUND[precision] if bound is None else bound
        self.bound = self.start_bound
        self._derive_bound = bound is None
        self._floor = _FLOOR[precision]
        self._precision = str(precision)
        self._noise = 0.0
        self._padded = pad_left(probe_prompts, pad_id)
        # The trainer's view of some publications ago: it stays until the trainer has moved far enough from it
        # to be told apart, so that updates below the rounding of the engine add up instead of slipping by.
        self._anchor: Tensor | None = None
        self._resumed = False

    def prove_at_start(
        self, version: int, publish: Callable[[int], dict[str, float]] | None = None
    ) -> dict[str, float]:
        """Show that the proof works: perturbed weights must reach the engine, and be put back.

        Every tensor is perturbed, so one that does not arrive shows up as a gap: a packed copy of a tied
        output head, say, that the engine never renews. In 16-bit formats the gap must exceed their rounding
        to be told from it.

        Args:
            version: of the weights that are in the model now.
            publish: what the weights are published with afterwards; :meth:`publish` unless told.

        Returns:
            ``publish/perturbation``, the change seen in the engine, and the metrics of :meth:`publish`.

        Raises:
            TrainingStopped: the perturbation did not arrive, or not wholly, or the proof failed afterwards.
        """
        ours = self._trainer_view()
        with perturbed(self.model):
            _, answer = self._load(named_weights(self.model), version, self.engine.publish)
            seen = self._difference(ours, answer)
            gap = self._difference(self._trainer_view(), answer)
        # Not "more than the bound", which a user may have set high; and written so that NaN fails too.
        if not (gap <= self.start_bound and seen > max(self._floor, 2 * gap)):
            raise TrainingStopped(
                f"{self._engine_name()}: all weights were perturbed for a test; its log-probabilities moved "
                f"by {seen:.2g} nats and are {gap:.2g} nats from the trainer's (allowed: "
                f"{self.start_bound:.2g}): published weights do not all reach the model that answers. Look "
                "at the engine's load_weights; inference_model.backend=transformers works meanwhile"
            )
        rounding = 0.0 if self._resumed else self._rounding_of_merging(version)
        metrics = (publish or self.publish)(version)
        if not self._resumed:
            self._noise = max(metrics["publish/gap"], rounding)
            if self._derive_bound:
                self.bound = min(self.start_bound, max(self._floor, _GROWTH * self._noise))
        return {"publish/perturbation": seen, **metrics}

    def _rounding_of_merging(self, version: int) -> float:
        """Gap that adapters will make once they have moved, in nats; 0 without any.

        An engine in 16 bits rounds what they add to a matrix, the trainer does not; at the start there is
        nothing to round, because published models were rounded when they were saved.
        """
        if not isinstance(self.model, nn.Module) or not lora.adapted_layers(self.model):
            return 0.0
        with lora.stirred(self.model, _LITTLE):
            _, answer = self._load(named_weights(self.model), version, self.engine.publish)
            return self._difference(self._trainer_view(), answer)

    def state_dict(self) -> dict[str, Any]:
        """The noise seen at the run's start, of which formats, and the bound derived from it."""
        return {"noise": self._noise, "bound": self.bound, "precision": self._precision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judge by what the run began with, so that a resumed run stops where the uninterrupted one would.

        Noise of other formats says nothing of these: then it is measured anew. A bound that the user gives
        now stands; without one, that of before.
        """
        if state.get("precision", self._precision) != self._precision:  # not in earlier checkpoints
            return
        self._noise, self._resumed = state["noise"], True
        if self._derive_bound:
            self.bound = state["bound"]

    def publish(self, version: int) -> dict[str, float]:
        """Publish the weights as they are now.

        Args:
            version: optimiser steps behind them.

        Returns:
            ``publish/gap``, the largest difference of log-probabilities between engine and trainer.

        Raises:
            TrainingStopped: the engine does not hold these weights; the message says what to look at.
        """
        expectation = self.expect(version)
        answer, _ = self.hand_over(version, self.engine.publish)
        gap = self.judge(expectation, answer)
        self.engine.policy_version = version
        return {"publish/gap": gap}

    def expect(self, version: int) -> Expectation:
        """What an engine must answer that is given the weights as they are now."""
        ours, anchor = self._trainer_view(), self._anchor
        if anchor is None or self._shift(ours, anchor) > self._telling_shift():
            self._anchor = ours
        return Expectation(version, ours, anchor)

    def hand_over(self, version: int, take: Callable[..., _T]) -> tuple[_T, Receipt]:
        """Hand the weights as they are now to ``take``, as :meth:`Inference.publish` takes them.

        Returns:
            What ``take`` returned, and the receipt of the live weights.

        Raises:
            TrainingStopped: it did not ask for all of them, or they were not the live ones.
        """
        receipt, result = self._load(named_weights(self.model), version, take)
        live = {name: checksum(tensor) for name, tensor in named_weights(self.model)}
        self.check_receipt(receipt, live)
        return result, live

    def judge(self, expectation: Expectation, answer: NextTokens) -> float:
        """Compare an answer with what was expected; the largest difference in nats.

        Raises:
            TrainingStopped: the engine does not hold the weights.
        """
        if answer.cached_tokens:
            raise TrainingStopped(
                f"{self._engine_name()}: after publishing version {expectation.version}, "
                f"{answer.cached_tokens} tokens of the probe came out of a prefix cache that older weights "
                "had filled. Look at the engine's reset_cache"
            )
        gap = self._compare(expectation, answer)
        self._check(gap, expectation.version)
        return gap.now

    def _load(
        self, weights: Iterable[tuple[str, Tensor]], version: int, take: Callable[..., _T]
    ) -> tuple[Receipt, _T]:
        receipt: Receipt = {}
        result = take(signed(weights, receipt), version, self.probe)
        return receipt, result

    def check_receipt(self, receipt: Receipt, live: Receipt) -> None:
        """Compare what was taken with what there is to take.

        Raises:
            TrainingStopped: something is missing or different.
        """
        missing = sorted(live.keys() - receipt.keys())
        different = sorted(name for name in live.keys() & receipt.keys() if live[name] != receipt[name])
        if missing or different:
            wrong, how = (missing, "not published") if missing else (different, "stale")
            raise TrainingStopped(
                f"{self._engine_name()}: {len(wrong)} tensors were {how}, the first is {wrong[0]}: the "
                "engine does not hold the trainer's weights. Look at how weights are listed for publication"
            )

    def _check(self, gap: Gap, version: int) -> None:
        if not gap.now <= self.bound:  # so that NaN fails too
            raise TrainingStopped(
                f"{self._engine_name()}: after publishing version {version}, its log-probabilities differ "
                f"from the trainer's by up to {gap.now:.3g} nats, and {self.bound:.3g} is allowed. Either "
                "weights did not arrive (look at the engine's load_weights), or the two compute in formats "
                "that differ more than usual (compare inference_model.dtype with train_model.autocast, or "
                "raise inference_model.max_logprob_gap)"
            )
        if gap.before is None or gap.shift is None:
            return
        # Sharper than the bound when updates are small: rounding cannot make the engine look like the past.
        if gap.shift > self._telling_shift() and gap.before < gap.now:
            raise TrainingStopped(
                f"{self._engine_name()}: after publishing version {version}, its log-probabilities are "
                f"nearer to earlier weights ({gap.before:.3g} nats) than to the present ones "
                f"({gap.now:.3g} nats): it still answers with the old weights. Look at the engine's "
                "load_weights and reset_cache"
            )

    def _compare(self, expectation: Expectation, answer: NextTokens) -> Gap:
        now = self._difference(expectation.ours, answer)
        if expectation.anchor is None:
            return Gap(now, None, None)
        before = self._difference(expectation.anchor, answer)
        moved = self._shift(expectation.ours, expectation.anchor, answer.token_ids)
        return Gap(now, before, moved)

    def _shift(self, ours: Tensor, anchor: Tensor, token_ids: Tensor | None = None) -> float:
        """How far the trainer has moved: over ``token_ids``, or over its own likeliest tokens."""
        chosen = ours.topk(min(TOP_K, ours.shape[-1])).indices if token_ids is None else token_ids
        return float((_below(ours, chosen) - _below(anchor, chosen)).abs().max())

    def _telling_shift(self) -> float:
        """How far the trainer must have moved for rounding not to hide where the engine stands, in nats."""
        return 4 * max(self._noise, 1e-6)

    def _difference(self, ours: Tensor, answer: NextTokens) -> float:
        return float((_below(ours, answer.token_ids) - answer.log_probs).abs().max())

    @torch.no_grad()
    def _trainer_view(self) -> Tensor:
        return self.scorer.next_token_log_probs(*self._padded).cpu()

    def _engine_name(self) -> str:
        return type(self.engine).__name__


def _below(ours: Tensor, token_ids: Tensor) -> Tensor:
    """``ours`` at ``token_ids``, which may hold the answers of several workers, one below the other."""
    return ours.repeat(len(token_ids) // len(ours), 1).gather(1, token_ids)


def named_weights(model: nn.Module | GatheredModel) -> Iterator[tuple[str, Tensor]]:
    """What is published, by name: the parameters, tied ones once, detached but not copied.

    Of a model with adapters each matrix with its adapter merged in: see :func:`lora.merged_weights`.
    """
    return lora.merged_weights(model) if isinstance(model, nn.Module) else model.named_parameters()


@contextmanager
def perturbed(model: nn.Module | GatheredModel) -> Iterator[None]:
    """Halve every eighth column of every parameter, and double it again on the way out.

    Powers of two change only the exponent, so the weights come back bit for bit without a copy of them, but
    for float16, whose small numbers lose a bit when they are halved: there the columns are copied. Only some
    columns, so that no normalisation layer cancels the change. Adapters, which change nothing at their
    beginning, are stirred first.
    """

    def scale(factor: float) -> None:
        if not isinstance(model, nn.Module):
            model.scale_columns(factor)
            return
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_quantized(parameter):  # moved by its adapter
                    parameter[..., ::8] *= factor

    halves = (
        [p for p in model.parameters() if p.dtype == torch.float16] if isinstance(model, nn.Module) else []
    )
    with lora.stirred(model, _STIR) if isinstance(model, nn.Module) else nullcontext():
        kept = [parameter.detach()[..., ::8].clone() for parameter in halves]
        scale(0.5)
        try:
            yield
        finally:
            scale(2.0)
            for parameter, columns in zip(halves, kept, strict=True):
                parameter.detach()[..., ::8] = columns


def probe_prompts(prompts: Sequence[Sequence[int]], count: int = 3, length: int = 40) -> list[list[int]]:
    """Token sequences for the probe, cut from real prompts so that none begins like another.

    Args:
        prompts: at least one tokenised prompt.
        count: sequences wanted.
        length: tokens of each; more than one cache block (32 tokens on a CPU, 16 on a GPU).
    """
    stream = [token for prompt in prompts for token in prompt]
    # Real prompts all begin with the same system text; a different rotation of the stream does not.
    starts = [1 + index * (len(stream) // count + 1) for index in range(count)]
    doubled = stream * (2 + (length + max(starts)) // len(stream))
    return [doubled[start : start + length] for start in starts]
