"""Publishes weights and verifies that the engine then holds the trainer's weights, bit for bit.

The publisher compares two sets of checksums (:mod:`torchrl_grpo.inference.checksums`). One set covers the
weights that the engine computes with, in its own dtype. The other covers the trainer's weights, cast to that
dtype. Checksums do not depend on rounding: a correct engine always passes, and a single stale
element always fails. A count of cached tokens shows whether the engine still serves key/value states of
earlier weights.

The publisher also measures, on a few prompts, the difference between the engine's and the trainer's
log-probabilities. It shows how differently the two compute. After the start test, this difference stops a run
only if it is NaN, or if it exceeds its bound and the engine holds tensors that cannot be read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from torchrl_grpo.config.engines import DEFAULT_ENGINE, engine_kind, reference_engine
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.checksums import Checksums, checksum, checksum_tensor, collect_checksums
from torchrl_grpo.inference.protocol import Inference, Probe, ProbeResult, PromptPictures
from torchrl_grpo.models import lora
from torchrl_grpo.models.quantization import is_quantized
from torchrl_grpo.models.scoring.padding import pad_left
from torchrl_grpo.weight_sync.other_inputs import encoders_are_stale, log_probs_with_stale_encoders
from torchrl_grpo.weight_sync.probe import NextTokenScorer, ShardedWeights, named_weights, perturbed
from torchrl_grpo.weight_sync.results import ExpectedResult, LogProbDiff
from torchrl_grpo.weight_sync.transport import Delivery, SentWeights, Transport, concatenate_results

TOP_K = 20
# Lower limit of the derived bound on the mean difference of log-probabilities, in nats. It is at least
# twice what correct engines showed (float32: 1e-5; bfloat16: up to 0.25; float16: 0.02).
_MIN_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
# The bound is the first measured mean times this factor, if that is larger. Runs with adapters or a quantized
# engine start with a larger mean.
_BOUND_FACTOR = 5.0
# Tolerance for the mean difference with equal weights, in nats: kernels may sum in another order.
_EQUAL_WEIGHTS_TOL = 1e-3
# Largest relative difference between two ways to compute a layer with an adapter in float32. Rounding causes
# about 1e-6.
_MERGE_ERROR = 1e-5
# If tensors cannot be read back, the run stops once the mean exceeds its first value times this factor. In
# bfloat16 runs with correct weights, it grew to 2.4 times its first value.
_UNREADABLE_BOUND_FACTOR = 4.0
_OTHER_ENGINE = f"set inference_model.backend={reference_engine()}, which copies weights without a loader"
_DEFECT = "this is a defect of the program; please report it"


class WeightPublisher:
    """Publishes the weights of ``model`` to ``engine`` and verifies that they arrived.

    Args:
        model: model that is trained. It is published tensor by tensor, without a copy of the whole model.
        scorer: scorer that computes with ``model``.
        engine: engine that receives the weights.
        probe_prompts: token ids of the probe prompts. Each prompt must fill at least one block of a prefix
            cache, and no two prompts may share a prefix.
        probe_pictures: pictures of each probe prompt; None for a model of text. The first prompt has none.
        pad_token_id: padding id.
        precision: the less precise of the engine's and the trainer's dtypes.
        engine_dtype: dtype of the engine. Weights are cast to it before they leave the trainer.
        transport: transport that carries the weights to ``engine``.
        bound: largest mean difference of log-probabilities that causes no warning, in nats. None derives it
            from the first difference measured.
        warn: function that shows a warning once the bound is exceeded.
        backend: value of ``inference_model.backend``; error messages give advice for it.
    """

    def __init__(
        self,
        model: nn.Module | ShardedWeights,
        scorer: NextTokenScorer,
        *,
        engine: Inference,
        probe_prompts: Sequence[Sequence[int]],
        pad_token_id: int,
        precision: torch.dtype,
        engine_dtype: torch.dtype,
        transport: Transport,
        bound: float | None = None,
        warn: Callable[[str], None] = lambda text: None,
        backend: str = DEFAULT_ENGINE,
        probe_pictures: Sequence[PromptPictures | None] | None = None,
    ) -> None:
        self.model = model
        self.scorer = scorer
        self.engine = engine
        self._transport = transport
        # Deliveries that may still bring probe results, each with its expected result.
        self._deliveries: list[tuple[ExpectedResult, Delivery]] = []
        self.engine_dtype = engine_dtype
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
        self.probe = Probe(probe_prompts, TOP_K, self._shapes, probe_pictures)
        self._precision = str(precision).removeprefix("torch.")
        self._min_bound = _MIN_BOUND[precision]
        self.bound = self._min_bound if bound is None else bound
        self._bound_is_automatic = bound is None
        # Whether the first verified result will set the bound.
        self._bound_pending = self._bound_is_automatic
        # Mean difference of log-probabilities in the first verified result.
        self._first_published_diff = 0.0
        # The trainer's log-probabilities at the latest publication of the training.
        self._published_log_probs: Tensor | None = None
        self._padded = (*pad_left(probe_prompts, pad_token_id), self.probe.files)
        self._warn = warn
        self._warned = False
        # The reference engine is the fallback, so no other engine can be recommended for it.
        self._advice = _DEFECT if engine_kind(backend).is_reference else _OTHER_ENGINE
        # Tensors that an engine could not read back in its latest result. Only the probe's log-probabilities
        # can verify them.
        self.unreadable: list[str] = []

    def verify_at_start(self, version: int) -> dict[str, float]:
        """Verify that the engine computes with the published weights, and that it loads them correctly.

        This method publishes perturbed weights. They must change the engine's log-probabilities as they
        change the trainer's. It then publishes the original weights. With them the engine's
        log-probabilities must not be much farther from the trainer's than with the weights that it read from
        disk itself. An engine whose loader misplaces a published tensor computes something else. This last
        comparison shows nothing if the engine has read other weights, as workers and servers of a resumed
        run have.

        Args:
            version: version of the weights that are in the model now.

        Returns:
            ``publish/perturbation``, the mean difference in nats between the log-probabilities of the
            perturbed engine and those of the unperturbed trainer; and the metrics of :meth:`publish`.

        Raises:
            TrainingStopped: the perturbed weights did not arrive or did not change the log-probabilities, or
                the check of the original weights failed.
        """
        trainer_log_probs, published = self._trainer_log_probs(), self._published_log_probs
        stale = log_probs_with_stale_encoders(self.model, self.probe, self._trainer_log_probs)
        with perturbed(self.model):
            delivery, expected = self.send_weights(version)
            delivery.wait()
            perturbed_result = concatenate_results(delivery.new_results())
            self._check_cache(perturbed_result, version)
            self._check_weights(perturbed_result, expected)
        metrics = self.publish(version)
        if published is not None:
            # A resumed run compares its next publication with the one that the uninterrupted run had.
            self._published_log_probs = published
        published_diff = metrics["publish/logprob_diff_mean"]
        disk_diff = (
            math.inf
            if perturbed_result.initial_result is None
            else LogProbDiff.between(trainer_log_probs, perturbed_result.initial_result).mean
        )
        if published_diff > 2 * disk_diff + _EQUAL_WEIGHTS_TOL:
            raise TrainingStopped(
                f"{self._engine_name()}: its log-probabilities differ from the trainer's by "
                f"{published_diff:.2g} nats on average with the published weights, but only by "
                f"{disk_diff:.2g} with the weights that it read from disk, so its weight loader assigns "
                f"tensors to the wrong parameters; {self._advice}"
            )
        if stale is not None and encoders_are_stale(self.probe, stale, expected, perturbed_result):
            raise TrainingStopped(
                f"{self._engine_name()}: a test perturbed all weights; after a prompt with pictures, the "
                "engine's log-probabilities are those of the older parts that encode pictures, so it was not "
                f"sent the new ones or does not use them; {self._advice}"
            )
        diff_to_original = LogProbDiff.between(trainer_log_probs, perturbed_result).mean
        diff_to_perturbed = LogProbDiff.between(expected.trainer_log_probs, perturbed_result).mean
        # The comparison is negated so that NaN fails too.
        if not diff_to_original > 2 * diff_to_perturbed:
            raise TrainingStopped(
                f"{self._engine_name()}: a test perturbed all weights; the engine's log-probabilities "
                f"changed by {diff_to_original:.2g} nats on average and still differ by "
                f"{diff_to_perturbed:.2g} from the trainer's, so the engine does not use the weights that it "
                f"received, or a compiled graph holds a copy of older weights; set "
                f"inference_model.enforce_eager=true, and if that does not help, {self._advice}"
            )
        return {"publish/perturbation": diff_to_original, **metrics}

    def summary(self, metrics: dict[str, float]) -> str:
        """Return one line that reports the result of :meth:`verify_at_start`."""
        count = len(self._shapes) - len(self.unreadable)
        dtype = str(self.engine_dtype).removeprefix("torch.")
        rest = (
            f" ({len(self.unreadable)} cannot be read back, e.g. {self.unreadable[0]})"
            if self.unreadable
            else ""
        )
        return (
            f"weights verified: {count} tensors in the engine equal the trainer's in {dtype}{rest}; "
            f"log-probabilities differ by {metrics['publish/logprob_diff_mean']:.2g} nats on average, and "
            f"perturbed weights move them by {metrics['publish/perturbation']:.2g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the mean difference at the run's start, the bound, and the precision that both apply to.

        The trainer's log-probabilities at the latest publication are returned too.
        """
        return {
            "noise": self._first_published_diff,
            "bound": self.bound,
            "precision": self._precision,
            "published": self._published_log_probs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the bound that the run derived at its start.

        A bound that is given now takes precedence. A saved bound for another precision is ignored.
        Checkpoints of earlier versions have no log-probabilities.
        """
        self._published_log_probs = state.get("published")
        if self._bound_pending and state.get("precision") == self._precision:
            self._first_published_diff, self.bound = state["noise"], state["bound"]
            self._bound_pending = False

    def publish(self, version: int, wait: bool = True) -> dict[str, float]:
        """Publish the weights as they are now.

        Args:
            version: number of optimizer steps that produced the weights.
            wait: whether to block until every engine that is up has loaded the weights and passed the check.
                If false, a later call of this method or of :meth:`verify_new_results` verifies the results
                that arrive then.

        Returns:
            ``publish/update_kl``, the KL divergence of the policy of the publication before from this one, in
            nats per token, over the token after each probe prompt. The first publication has none. Then the
            metrics of :meth:`verify_result`, each the largest over the results verified in this call. These
            results may be about different versions of the weights. Results that
            :meth:`verify_new_results` verified earlier are not included. There are none if no result arrived.

        Raises:
            TrainingStopped: an engine does not hold the weights it was given.
        """
        delivery, expected = self.send_weights(version)
        # Keep older deliveries, because a slow worker may still return a result. Keep completed ones too: a
        # worker that replaces a lost one receives the newest weights and returns a result for them again.
        self._deliveries = [*self._deliveries[-8:], (expected, delivery)]
        if wait:
            delivery.wait()
        results = self.verify_new_results()
        self.engine.policy_version = version
        before, after = self._published_log_probs, expected.trainer_log_probs
        self._published_log_probs = after
        metrics = {name: max(result[name] for result in results) for name in (results[0] if results else ())}
        # An earlier version had a probe without pictures.
        if before is not None and before.shape == after.shape:
            moved = kl_div(after.double(), before.double(), reduction="batchmean", log_target=True)
            metrics["publish/update_kl"] = float(moved)
        return metrics

    def verify_new_results(self) -> list[dict[str, float]]:
        """Verify every ``ProbeResult`` (checksums, cache count, log-probabilities) not verified before.

        Returns:
            Metrics of :meth:`verify_result` for each result.

        Raises:
            TrainingStopped: an engine does not hold the weights it was given.
        """
        return [
            self.verify_result(expected, result)
            for expected, delivery in self._deliveries
            for result in delivery.new_results()
        ]

    def send_weights(self, version: int) -> tuple[Delivery, ExpectedResult]:
        """Send the weights as they are now.

        Returns:
            The delivery, and the probe result expected from an engine with these weights.

        Raises:
            TrainingStopped: the transport did not read all weights, or they differ from the model's.
        """
        trainer_log_probs = self._trainer_log_probs()
        sent = SentWeights(self._cast_and_checksum)
        delivery = self._transport.send(sent, version, self.probe)
        missing = sorted(self._shapes.keys() - {name for name, _ in sent.sums})
        if missing:
            raise TrainingStopped(
                f"{self._engine_name()}: {len(missing)} of {len(self._shapes)} tensors were not sent, the "
                f"first is {missing[0]}: the engine stopped reading before the end of the weights; "
                f"{self._advice}"
            )
        checksums = collect_checksums(sent.sums, self.engine_dtype)
        self._check_merged(checksums)
        return delivery, ExpectedResult(version, trainer_log_probs, checksums)

    def _cast_and_checksum(self, sums: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights in the engine's dtype, and append each checksum to ``sums``."""
        own = dict(self.model.named_parameters()) if isinstance(self.model, nn.Module) else {}
        for name, tensor in named_weights(self.model):
            plain = own.get(name)
            if plain is not None and not is_quantized(plain) and plain.data_ptr() != tensor.data_ptr():
                raise TrainingStopped(
                    f"{self._engine_name()}: the weights listed for publication are stale, the first is "
                    f"{name}: they are a copy of the model and not the model that is trained"
                )
            cast = tensor.to(self.engine_dtype)
            sums.append((name, checksum_tensor(cast)))
            yield name, cast

    def _check_merged(self, published: Checksums) -> None:
        """Check for each layer with an adapter that the published matrix is what the layer computes with."""
        layers = lora.adapted_layers(self.model) if isinstance(self.model, nn.Module) else {}
        stale, wrong = [], []
        for path, layer in layers.items():
            name, matrix = f"{path}.weight", lora.merged_weight(layer)
            if published.values[name] != (checksum(matrix.to(self.engine_dtype)),):
                stale.append(name)
            elif not lora.merge_error(layer, matrix) <= _MERGE_ERROR:
                wrong.append(name)
        if stale or wrong:
            how = "stale" if stale else "not equal to the base matrix plus its adapter"
            raise TrainingStopped(
                f"{self._engine_name()}: {len(stale or wrong)} of the weights listed for publication are "
                f"{how}, the first is {(stale or wrong)[0]}: adapters are merged wrongly, which is a defect "
                "of the program; a new run with train_model.lora.rank=0 trains without adapters"
            )

    def verify_result(self, expected: ExpectedResult, result: ProbeResult) -> dict[str, float]:
        """Compare an engine's checksums and log-probabilities with the expected ones.

        Args:
            expected: expected checksums and log-probabilities.
            result: probe result of the engine.

        Returns:
            ``publish/logprob_diff_mean``, ``_p99`` and ``_max``: absolute differences of log-probabilities
            between engine and trainer over the likeliest tokens after the probe prompts, in nats.

        Raises:
            TrainingStopped: the engine does not hold the weights.
        """
        self._check_cache(result, expected.version)
        self._check_weights(result, expected)
        diff = LogProbDiff.between(expected.trainer_log_probs, result)
        if self._bound_pending:
            self._first_published_diff, self._bound_pending = diff.mean, False
            derived = _BOUND_FACTOR * diff.mean if math.isfinite(diff.mean) else 0.0
            self.bound = max(self._min_bound, derived)
        self._check_log_prob_diff(diff, expected.version)
        return {
            "publish/logprob_diff_mean": diff.mean,
            "publish/logprob_diff_p99": diff.p99,
            "publish/logprob_diff_max": diff.largest,
        }

    def _check_cache(self, result: ProbeResult, version: int) -> None:
        if result.cached_tokens:
            raise TrainingStopped(
                f"{self._engine_name()}: after publishing version {version}, {result.cached_tokens} tokens "
                f"of the probe came out of a prefix cache that older weights had filled; {self._advice}"
            )

    def _check_weights(self, result: ProbeResult, expected: ExpectedResult) -> None:
        checksums = expected.checksums
        unreadable: set[str] = set() if result.checksums else set(checksums.values)
        for number, held in enumerate(result.checksums):
            which = f" {number}" if len(result.checksums) > 1 else ""
            if held.dtype != checksums.dtype:
                raise TrainingStopped(
                    f"{self._engine_name()}{which} computes in {held.dtype}, and weights are published in "
                    f"{checksums.dtype}: inference_model.dtype=auto resolves to different dtypes on the "
                    f"trainer's and the engine's machine; write inference_model.dtype={held.dtype}"
                )
            unreadable |= {name for name in checksums.values if not held.values.get(name)}
            wrong = sorted(
                name
                for name, (value,) in checksums.values.items()
                if any(copy != value for copy in held.values.get(name, ()))
            )
            if wrong:
                raise TrainingStopped(
                    f"{self._engine_name()}{which}: after publishing version {expected.version}, "
                    f"{len(wrong)} of {len(checksums.values)} tensors that it computes with are not the "
                    f"trainer's in {held.dtype}, the first is {wrong[0]}: the published values did not "
                    f"arrive, or only a part of them; {self._advice}"
                )
        self.unreadable = sorted(unreadable)

    def _check_log_prob_diff(self, diff: LogProbDiff, version: int) -> None:
        bound = self.bound
        if self.unreadable and self._bound_is_automatic:
            bound = max(_EQUAL_WEIGHTS_TOL, _UNREADABLE_BOUND_FACTOR * self._first_published_diff)
        if diff.mean <= bound:
            return
        what = (
            f"{self._engine_name()}: after publishing version {version}, its log-probabilities differ from "
            f"the trainer's by {diff.mean:.3g} nats on average (99th percentile {diff.p99:.3g}), and "
            f"{bound:.3g} is expected"
        )
        advice = (
            "compare inference_model.dtype with train_model.autocast; train_model.head_dtype=float32 and "
            "inference_model.head_dtype=float32 compute the output head more exactly"
        )
        if math.isnan(diff.mean):
            raise TrainingStopped(
                f"{what}: the engine or the trainer computes numbers that are not finite; start a new "
                "run from the weights of an earlier checkpoint, with a lower optimizer.lr and "
                "model.name=RUN/checkpoints/STEP/model"
            )
        if self.unreadable:
            raise TrainingStopped(
                f"{what}; {len(self.unreadable)} of its tensors cannot be read back, the first is "
                f"{self.unreadable[0]}, so only the log-probabilities can show whether the weights arrived; "
                f"{advice}; inference_model.max_logprob_diff={2 * diff.mean:.2g} with resume=auto continues "
                "anyway"
            )
        if not self._warned:
            self._warned = True
            self._warn(
                f"warning: {what}. Its weights equal the trainer's, bit for bit, so engine and trainer "
                f"compute differently with them; {advice}. This warning is shown once; the metric "
                "publish/logprob_diff_mean is still logged"
            )

    @torch.no_grad()
    def _trainer_log_probs(self) -> Tensor:
        return self.scorer.next_token_log_probs(*self._padded).cpu()

    def _engine_name(self) -> str:
        return self.engine.name
