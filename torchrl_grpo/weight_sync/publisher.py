"""Publishes weights and verifies that the engine then holds the trainer's weights, bit for bit.

The publisher compares two sets of checksums (:mod:`torchrl_grpo.inference.checksums`). One set covers the
weights that the engine computes with, in its own number format. The other covers the trainer's weights, cast
to that format. Checksums do not depend on rounding: a correct engine always passes, and a single stale
element always fails. A count of cached tokens shows whether the engine still serves key/value states of
earlier weights.

The publisher also measures, on a few prompts, how far the log-probabilities of engine and trainer are apart.
This difference shows how differently the two compute. After the start test it stops a run in two cases: it is
not finite, or it exceeds its bound and the engine holds tensors that cannot be read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.checksums import Checksums, checksum, digest, gathered
from torchrl_grpo.inference.protocol import Inference, NextTokens, Probe
from torchrl_grpo.models import lora
from torchrl_grpo.models.quantization import is_quantized
from torchrl_grpo.models.scoring.padding import pad_left
from torchrl_grpo.weight_sync.probe import named_weights, perturbed
from torchrl_grpo.weight_sync.source import Prober, ShardedWeights
from torchrl_grpo.weight_sync.transport import Delivery, DirectTransport, Transport, stacked

TOP_K = 20
# Lower limit of the derived bound on the mean difference of log-probabilities, in nats. It is several times
# what correct engines showed (float32: 1e-5; bfloat16: up to 0.25; float16: 0.02).
_FLOOR = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
# The bound is the first measured mean times this factor, if that is larger. Runs with adapters or a quantized
# engine start with a larger mean.
_GROWTH = 5.0
# Tolerance for the mean with equal weights, in nats: kernels may sum in another order.
_SAME = 1e-3
# Largest relative difference between two ways to compute a layer with an adapter in float32. Rounding causes
# about 1e-6.
_MERGE_ERROR = 1e-5
# If tensors cannot be read back, the run stops once the mean exceeds its first value times this factor. In
# bfloat16 runs with correct weights, it grew to 2.4 times its first value.
_UNREAD_GROWTH = 4.0
_OTHER_ENGINE = "Set inference_model.backend=transformers, which copies weights without a loader"
_DEFECT = "This is a defect of the program; please report it"


@dataclass(frozen=True)
class Expectation:
    """Checksums and log-probabilities expected from an engine that loaded one version of the weights.

    Attributes:
        version: number of optimizer steps that produced the weights.
        ours: the trainer's log-probabilities ``[N, V]`` of the token after each probe prompt.
        checksums: checksums of the weights in the engine's number format.
    """

    version: int
    ours: Tensor
    checksums: Checksums


@dataclass(frozen=True)
class Difference:
    """Absolute differences of log-probabilities between the engine and the trainer, in nats.

    Attributes:
        mean: mean over the likeliest tokens after the probe prompts.
        p99: 99th percentile.
        largest: largest difference.
    """

    mean: float
    p99: float
    largest: float

    @classmethod
    def of(cls, ours: Tensor, answer: NextTokens) -> Difference:
        """Compare ``ours`` ``[N, V]`` with an answer.

        The answer may hold the rows of several engines, concatenated. All differences are NaN if one of them
        is not finite.
        """
        rows = ours.repeat(len(answer.token_ids) // len(ours), 1)
        found = (rows.gather(1, answer.token_ids) - answer.log_probs).abs().flatten()
        if not bool(found.isfinite().all()):
            return cls(math.nan, math.nan, math.nan)
        return cls(float(found.mean()), float(found.quantile(0.99)), float(found.max()))


class WeightPublisher:
    """Publishes the weights of ``model`` to ``engine`` and verifies that they arrived.

    Args:
        model: model that is trained. It is published tensor by tensor, without a copy of the whole model.
        scorer: scorer that computes with ``model``.
        engine: engine that receives the weights.
        probe_prompts: token ids of the probe prompts. Each prompt must fill a block of a prefix cache, and no
            two prompts may share a prefix.
        pad_id: padding id.
        precision: coarser one of the engine's and the trainer's number formats.
        engine_dtype: number format of the engine. Weights are cast to it before they leave the trainer.
        bound: largest mean difference of log-probabilities that causes no warning, in nats. None derives it
            from the first difference measured.
        warn: function that shows a warning once the bound is exceeded.
        backend: value of ``inference_model.backend``; error messages give advice for it.
        transport: transport that carries the weights to ``engine``. None hands them over directly.
    """

    def __init__(
        self,
        model: nn.Module | ShardedWeights,
        scorer: Prober,
        *,
        engine: Inference,
        probe_prompts: Sequence[Sequence[int]],
        pad_id: int,
        precision: torch.dtype,
        engine_dtype: torch.dtype,
        bound: float | None = None,
        warn: Callable[[str], None] = lambda text: None,
        backend: str = "vllm",
        transport: Transport | None = None,
    ) -> None:
        self.model = model
        self.scorer = scorer
        self.engine = engine
        self._transport = DirectTransport(engine) if transport is None else transport
        # Deliveries whose engines may still answer, each with its expectation.
        self._open: list[tuple[Expectation, Delivery]] = []
        self.engine_dtype = engine_dtype
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
        self.probe = Probe(probe_prompts, TOP_K, self._shapes)
        self._precision = str(precision).removeprefix("torch.")
        self._floor = _FLOOR[precision]
        self.bound = self._floor if bound is None else bound
        self._derives_bound = self._may_derive = bound is None
        self._noise = 0.0
        self._padded = pad_left(probe_prompts, pad_id)
        self._warn = warn
        self._warned = False
        # The transformers backend is the fallback, so no other backend can be recommended for it.
        self._advice = _DEFECT if backend == "transformers" else _OTHER_ENGINE
        # Tensors that an engine could not read back in its latest answer. Only the probe's log-probabilities
        # can verify them.
        self.unread: list[str] = []

    def prove_at_start(self, version: int) -> dict[str, float]:
        """Verify that the engine answers with the published weights, and that it loads them correctly.

        This method publishes perturbed weights. They must change the engine's answers as they change the
        trainer's. It then publishes the original weights. With them the engine must compute as it did with
        the weights that it read from disk itself. An engine whose loader misplaces a published tensor
        computes something else.

        Args:
            version: version of the weights that are in the model now.

        Returns:
            ``publish/perturbation``, the mean change of the engine's log-probabilities in nats, and the
            metrics of :meth:`publish`.

        Raises:
            TrainingStopped: the perturbed weights did not arrive, did not change the answers, or the check of
                the original weights failed.
        """
        before = self._trainer_view()
        with perturbed(self.model):
            delivery, expectation = self.hand_over(version)
            delivery.wait()
            answer = stacked(delivery.answers())
            self._check_cache(answer, version)
            self._check_weights(answer, expectation)
        metrics = self.publish(version)
        now = metrics["publish/logprob_diff_mean"]
        was = math.inf if answer.before is None else Difference.of(before, answer.before).mean
        if now > 2 * was + _SAME:
            raise TrainingStopped(
                f"{self._engine_name()}: with the weights that it read itself its log-probabilities were "
                f"{was:.2g} nats from the trainer's on average, and with those published to it they are "
                f"{now:.2g}: its loader puts published tensors where others belong. {self._advice}"
            )
        seen, left = Difference.of(before, answer).mean, Difference.of(expectation.ours, answer).mean
        # The comparison is negated so that NaN fails too.
        if not seen > 2 * left:
            raise TrainingStopped(
                f"{self._engine_name()}: all weights were perturbed for a test, which moved its "
                f"log-probabilities by {seen:.2g} nats on average and left them {left:.2g} nats from the "
                "trainer's, so it does not compute with the weights that it was given. A compiled graph may "
                f"hold a copy of older ones: set inference_model.enforce_eager=true. {self._advice}"
            )
        return {"publish/perturbation": seen, **metrics}

    def summary(self, proof: dict[str, float]) -> str:
        """Return one line that reports the result of :meth:`prove_at_start`."""
        count = len(self._shapes) - len(self.unread)
        dtype = str(self.engine_dtype).removeprefix("torch.")
        rest = f" ({len(self.unread)} cannot be read back, as {self.unread[0]})" if self.unread else ""
        return (
            f"weights proven: {count} tensors in the engine equal the trainer's in {dtype}{rest}; "
            f"log-probabilities differ by {proof['publish/logprob_diff_mean']:.2g} nats on average, and "
            f"perturbed weights move them by {proof['publish/perturbation']:.2g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the mean difference at the run's start, the bound, and the number format of both."""
        return {"noise": self._noise, "bound": self.bound, "precision": self._precision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the bound that the run derived at its start.

        A bound that is given now takes precedence. A saved bound for another number format is ignored.
        """
        if self._derives_bound and state.get("precision") == self._precision:
            self._noise, self.bound = state["noise"], state["bound"]
            self._derives_bound = False

    def publish(self, version: int, wait: bool = True) -> dict[str, float]:
        """Publish the weights as they are now.

        Args:
            version: number of optimizer steps that produced the weights.
            wait: whether to block until every engine has loaded the weights and passed the check. If false, a
                later call of this method or of :meth:`check_proofs` judges the answers that arrive later.

        Returns:
            Metrics of :meth:`judge`, each the largest over all answers since the last call. These answers may
            be about different versions of the weights. The dictionary is empty if no answer arrived.

        Raises:
            TrainingStopped: an engine does not hold the weights it was given.
        """
        delivery, expectation = self.hand_over(version)
        # Keep older deliveries, because a slow worker may still answer. Keep answered ones too: a worker that
        # replaces a lost one receives the newest weights and answers for them again.
        self._open = [*self._open[-8:], (expectation, delivery)]
        if wait:
            delivery.wait()
        found = self.check_proofs()
        self.engine.policy_version = version
        return {name: max(one[name] for one in found) for name in (found[0] if found else ())}

    def check_proofs(self) -> list[dict[str, float]]:
        """Judge every answer that has arrived since the last call.

        Returns:
            Metrics of :meth:`judge` for each answer.

        Raises:
            TrainingStopped: an engine does not hold the weights it was given.
        """
        return [
            self.judge(expectation, answer)
            for expectation, delivery in self._open
            for answer in delivery.answers()
        ]

    def hand_over(self, version: int) -> tuple[Delivery, Expectation]:
        """Send the weights as they are now.

        Returns:
            The delivery, and the expectation that an engine with these weights must meet.

        Raises:
            TrainingStopped: the transport did not take all weights, or they are not those of the model.
        """
        ours = self._trainer_view()
        sums: list[tuple[str, Tensor]] = []
        delivery = self._transport.send(self._listed(sums), version, self.probe)
        missing = sorted(self._shapes.keys() - {name for name, _ in sums})
        if missing:
            raise TrainingStopped(
                f"{self._engine_name()}: {len(missing)} of {len(self._shapes)} tensors were not published, "
                f"the first is {missing[0]}: the engine did not ask for them. {self._advice}"
            )
        expected = gathered(sums, self.engine_dtype)
        self._check_merged(expected)
        return delivery, Expectation(version, ours, expected)

    def _listed(self, sums: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights in the engine's number format, and append each checksum to ``sums``."""
        own = dict(self.model.named_parameters()) if isinstance(self.model, nn.Module) else {}
        for name, tensor in named_weights(self.model):
            plain = own.get(name)
            if plain is not None and not is_quantized(plain) and plain.data_ptr() != tensor.data_ptr():
                raise TrainingStopped(
                    f"{self._engine_name()}: the weights listed for publication are stale, the first is "
                    f"{name}: they are a copy of the model and not the model that is trained"
                )
            cast = tensor.to(self.engine_dtype)
            sums.append((name, digest(cast)))
            yield name, cast

    def _check_merged(self, published: Checksums) -> None:
        """Compare the published matrices of layers with adapters with what those layers compute."""
        layers = lora.adapted_layers(self.model) if isinstance(self.model, nn.Module) else {}
        stale, wrong = [], []
        for path, layer in layers.items():
            name, matrix = f"{path}.weight", lora.merged(layer)
            if published.values[name] != (checksum(matrix.to(self.engine_dtype)),):
                stale.append(name)
            elif not lora.merge_error(layer, matrix) <= _MERGE_ERROR:
                wrong.append(name)
        if stale or wrong:
            how = "stale" if stale else "not what matrix and adapter amount to"
            raise TrainingStopped(
                f"{self._engine_name()}: {len(stale or wrong)} of the weights listed for publication are "
                f"{how}, the first is {(stale or wrong)[0]}: adapters are merged wrongly. This is a defect "
                "of the program; a new run with train_model.lora.rank=0 trains without adapters"
            )

    def judge(self, expectation: Expectation, answer: NextTokens) -> dict[str, float]:
        """Compare an engine's weights and answers with the expectation.

        Args:
            expectation: expected checksums and log-probabilities.
            answer: answer of the engine.

        Returns:
            ``publish/logprob_diff_mean``, ``_p99`` and ``_max``: absolute differences of log-probabilities
            between engine and trainer over the likeliest tokens after the probe prompts, in nats.

        Raises:
            TrainingStopped: the engine does not hold the weights.
        """
        self._check_cache(answer, expectation.version)
        self._check_weights(answer, expectation)
        found = Difference.of(expectation.ours, answer)
        if self._derives_bound:
            self._noise, self._derives_bound = found.mean, False
            self.bound = max(self._floor, _GROWTH * self._noise) if math.isfinite(found.mean) else self._floor
        self._check_answers(found, expectation.version)
        return {
            "publish/logprob_diff_mean": found.mean,
            "publish/logprob_diff_p99": found.p99,
            "publish/logprob_diff_max": found.largest,
        }

    def _check_cache(self, answer: NextTokens, version: int) -> None:
        if answer.cached_tokens:
            raise TrainingStopped(
                f"{self._engine_name()}: after publishing version {version}, {answer.cached_tokens} tokens "
                f"of the probe came out of a prefix cache that older weights had filled. {self._advice}"
            )

    def _check_weights(self, answer: NextTokens, expectation: Expectation) -> None:
        expected = expectation.checksums
        unread: set[str] = set() if answer.checksums else set(expected.values)
        for number, held in enumerate(answer.checksums):
            which = f" {number}" if len(answer.checksums) > 1 else ""
            if held.dtype != expected.dtype:
                raise TrainingStopped(
                    f"{self._engine_name()}{which} computes in {held.dtype}, and weights are published in "
                    f"{expected.dtype}: machines differ in what inference_model.dtype=auto means. Write "
                    f"inference_model.dtype={held.dtype}"
                )
            unread |= {name for name in expected.values if not held.values.get(name)}
            wrong = sorted(
                name
                for name, (value,) in expected.values.items()
                if any(copy != value for copy in held.values.get(name, ()))
            )
            if wrong:
                raise TrainingStopped(
                    f"{self._engine_name()}{which}: after publishing version {expectation.version}, "
                    f"{len(wrong)} of {len(expected.values)} tensors that it computes with are not the "
                    f"trainer's in {held.dtype}, the first is {wrong[0]}: they did not arrive, or not whole. "
                    f"{self._advice}"
                )
        self.unread = sorted(unread)

    def _check_answers(self, found: Difference, version: int) -> None:
        bound = self.bound
        if self.unread and self._may_derive:
            bound = max(_SAME, _UNREAD_GROWTH * self._noise)
        if found.mean <= bound:
            return
        what = (
            f"{self._engine_name()}: after publishing version {version}, its log-probabilities differ from "
            f"the trainer's by {found.mean:.3g} nats on average (99th percentile {found.p99:.3g}), and "
            f"{bound:.3g} is expected"
        )
        advice = (
            "Compare inference_model.dtype with train_model.autocast; train_model.head_dtype=float32 and "
            "inference_model.head_dtype=float32 compute the output head more exactly"
        )
        if math.isnan(found.mean):
            raise TrainingStopped(
                f"{what}: the engine or the trainer computes numbers that are not finite. Start a new "
                "run from the weights of an earlier checkpoint, with a lower optimizer.lr and "
                "model.name=RUN/checkpoints/STEP/model"
            )
        if self.unread:
            raise TrainingStopped(
                f"{what}; {len(self.unread)} of its tensors cannot be read back, the first is "
                f"{self.unread[0]}, so the answers are all there is to tell whether weights arrived. "
                f"{advice}; inference_model.max_logprob_gap={2 * found.mean:.2g} with resume=auto goes on "
                "all the same"
            )
        if not self._warned:
            self._warned = True
            self._warn(
                f"warning: {what}. The weights are the trainer's, bit for bit: the two compute differently. "
                f"{advice}. This is said once; publish/logprob_diff_mean goes on"
            )

    @torch.no_grad()
    def _trainer_view(self) -> Tensor:
        prompt, prompt_mask = self._padded
        return self.scorer.next_token_log_probs(prompt, prompt_mask).cpu()

    def _engine_name(self) -> str:
        return type(self.engine).__name__
