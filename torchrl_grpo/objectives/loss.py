"""The policy-gradient loss over groups of responses, as a TorchRL ``LossModule``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_grpo.config.derived import kl_start
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.objectives import actors
from torchrl_grpo.objectives.aggregation import BatchTotals, token_weights, totals_of
from torchrl_grpo.objectives.coefficients import EntropyCoefficient, KLCoefficient
from torchrl_grpo.objectives.importance import at_level, correction_weights
from torchrl_grpo.objectives.kl import kl_estimate
from torchrl_grpo.objectives.surrogates import SURROGATES, Bounds, exp_bounded


class GroupPolicyLoss(LossModule):
    """``sum_it a_it (-c_it J_it + kl KL_it + kl_inference KL'_it) - entropy sum_it H_it / N``.

    ``J`` is the surrogate (:mod:`~torchrl_grpo.objectives.surrogates`), ``c`` the correction for the engine's
    mismatch (:mod:`~torchrl_grpo.objectives.importance`), ``a`` the share of a token in the whole optimizer
    batch (:mod:`~torchrl_grpo.objectives.aggregation`), N the tokens in it. The terms of micro-batches add up
    to those of one large batch, and padding appears nowhere. TorchRL's ``GRPOLoss`` takes its means over a
    micro-batch and counts padding in its KL and its metrics.

    Reads ``("tokens"|"masks", "prompt")`` ``[P, L]``, ``("tokens"|"masks"|"log_probs", "response")``
    ``[P, G, T]``, ``("masks", "loss")`` ``[P, G, T]``, ``"advantage"`` ``[P, G, 1]`` and, where a key asks
    for it, ``("log_probs", "reference")`` and ``("log_probs", "proximal")``. Where the actor is a
    ``TensorDictModule``, its own ``in_keys`` take the place of the tokens and their masks. Called with a
    batch the loss returns a TensorDict; called with tensors, in the order of ``in_keys`` or by name
    (``tokens_prompt=...``), it returns its ``out_keys`` as a tuple, or alone if it is one.

    The actor is a submodule: ``parameters()``, ``state_dict()`` and ``to()`` reach the model.

    Args:
        actor_network: scores responses, with gradients: a
            :class:`~torchrl_grpo.models.scoring.token_scorer.TokenScorer`, or any module that is called like
            it; a ``TensorDictModule`` that reads keys of the batch and writes ``("log_probs", "response")``
            ``[P, G, T]`` and, if it has it, ``"entropy"`` of the same shape; or a ``TransformersWrapper`` of
            TorchRL's with ``input_mode="tokens"`` and ``generate=False``, whose temperature is 1 and which
            gives no entropy.
        cfg: the ingredients; the defaults of ``policy.*`` when left out.
        kl: weight of the KL term to the reference, as ``cfg`` has it when left out.
        entropy: weight of the entropy bonus, likewise.
        constant_length: tokens, for ``policy.aggregation=constant``; ``cfg.aggregation_length`` when left
            out.
        proximal_given: with a proximal policy of the trainer's, whether batches bring its log-probabilities.
            A round that is trained for one step needs none: the policy before the step is the one that the
            loss is computed with.

    Raises:
        ValueError: the actor generates or reads text; or a length is needed and not given.
    """

    @dataclass
    class _AcceptedKeys:
        """Where the loss finds its inputs."""

        prompt: NestedKey = ("tokens", "prompt")
        prompt_mask: NestedKey = ("masks", "prompt")
        response: NestedKey = ("tokens", "response")
        response_mask: NestedKey = ("masks", "response")
        loss_mask: NestedKey = ("masks", "loss")
        sample_log_prob: NestedKey = ("log_probs", "response")
        proximal_log_prob: NestedKey = ("log_probs", "proximal")
        ref_log_prob: NestedKey = ("log_probs", "reference")
        advantage: NestedKey = "advantage"
        # Where an actor that is a TensorDictModule writes.
        actor_log_prob: NestedKey = ("log_probs", "response")
        actor_full_log_prob: NestedKey = ("log_probs", "full")
        actor_entropy: NestedKey = "entropy"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    actor_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        cfg: PolicyConfig | None = None,
        *,
        kl: KLCoefficient | None = None,
        entropy: EntropyCoefficient | None = None,
        constant_length: int | None = None,
        proximal_given: bool = True,
    ) -> None:
        super().__init__()
        actors.check_actor(actor_network)
        cfg = PolicyConfig() if cfg is None else cfg
        length = cfg.aggregation_length if constant_length is None else constant_length
        if cfg.aggregation == "constant" and length is None:
            raise ValueError("policy.aggregation=constant needs constant_length, tokens of a response")
        self.actor_network = actor_network
        # Not a submodule: it holds the actor, whose parameters would be found twice.
        self.__dict__["_network"] = None
        self.cfg = cfg
        self.kl = KLCoefficient(kl_start(cfg), cfg.kl_target, cfg.kl_horizon) if kl is None else kl
        self.entropy = (
            EntropyCoefficient(cfg.entropy_coef, cfg.entropy_target, cfg.entropy_delta, cfg.entropy_coef_max)
            if entropy is None
            else entropy
        )
        self.constant_length = 1 if length is None else length
        self.proximal_given = proximal_given
        high = cfg.clip_epsilon if cfg.clip_epsilon_high is None else cfg.clip_epsilon_high
        self.bounds = Bounds(cfg.clip_epsilon, high, cfg.dual_clip)
        self._surrogate = SURROGATES[cfg.surrogate]

    def score_through(self, network: nn.Module) -> None:
        """Score by calling ``network``, the actor as several training ranks hold it."""
        self.__dict__["_network"] = network

    @property
    def functional(self) -> bool:
        """The parameters are the actor's own, not a copy of TorchRL's."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        """What the loss reads, with the ingredients it has."""
        keys = self.tensor_keys
        scored = [keys.prompt, keys.prompt_mask, keys.response, keys.response_mask]
        read = [*actors.actor_in_keys(self.actor_network, scored), keys.loss_mask]
        read += [keys.sample_log_prob, keys.advantage]
        if self.cfg.proximal == "trainer" and self.proximal_given:
            read.append(keys.proximal_log_prob)
        if self.kl.in_use:
            read.append(keys.ref_log_prob)
        return list(dict.fromkeys(read))

    @property
    def out_keys(self) -> list[NestedKey]:
        """The loss terms, with the ingredients it has, or those selected; metrics come beside them."""
        return self.__dict__.get("_out_keys_apparent", self.out_keys_source)

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys_apparent = list(values)

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """The loss terms, with the ingredients it has."""
        terms: dict[str, bool] = {
            "loss_objective": True,
            "loss_kl": self.kl.in_use and self.cfg.kl_in == "loss",
            "loss_kl_inference": self.cfg.kl_inference_coef != 0,
            "loss_entropy": self.entropy.in_use,
        }
        return [name for name, there in terms.items() if there]

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value network."""

    @dispatch
    def forward(self, tensordict: TensorDictBase, totals: BatchTotals | None = None) -> TensorDict:
        """The loss terms of one micro-batch.

        Args:
            tensordict: a micro-batch ``[P]`` of groups.
            totals: of the whole optimizer batch; this batch's own when omitted.

        Returns:
            Scalars. Those named ``loss_*`` add up to the loss and carry gradients. The rest are shares of a
            mean over the batch's tokens, to be summed over micro-batches: ``entropy`` (nats, of an actor that
            gives it), ``clip_fraction``, ``kl_approx`` (k3 of the sampling policy to this one), ``ratio``,
            ``ratio_squared`` and ``gap`` (absolute difference of log-probabilities) to the engine's
            log-probabilities; with a proximal policy of the trainer's the first three of that one, as
            ``mismatch_*``; with a reference ``kl_ref``, with a correction ``correction`` and
            ``correction_zero``, the mean weight and the share of weights that are 0.

        Raises:
            ValueError: the actor gives no log-probabilities, or no entropy where a bonus needs it.
        """
        keys = self.tensor_keys
        new, entropy = self._score(tensordict)

        def get(key: NestedKey) -> Tensor:
            return tensordict.get(key).to(new.device)

        mask = get(keys.loss_mask)
        totals = totals_of(mask) if totals is None else totals
        weights = token_weights(mask, self.cfg.aggregation, totals, self.constant_length, new.dtype)

        def mean(values: Tensor) -> Tensor:
            return values.masked_fill(~mask, 0.0).sum() / totals.tokens

        def loss(values: Tensor) -> Tensor:
            return (values.masked_fill(~mask, 0.0) * weights).sum()

        def log_probs(key: NestedKey) -> Tensor:
            # What stands in the padding must not come back through a product in the backward pass.
            return get(key).masked_fill(~mask, 0.0)

        sampled = log_probs(keys.sample_log_prob)
        proximal = sampled
        if self.cfg.proximal == "trainer":
            given = self.proximal_given
            proximal = log_probs(keys.proximal_log_prob) if given else new.detach().masked_fill(~mask, 0.0)
        objective, clipped = self._surrogate(
            at_level(new - proximal, mask, self.cfg.ratio),
            new,
            get(keys.advantage),
            self.bounds,
            **self.cfg.surrogate_args,
        )
        out = self._metrics(new.detach(), sampled, mean)
        if self.cfg.proximal == "trainer":
            mismatch = self._metrics(proximal, sampled, mean)
            out |= {f"mismatch_{name}": mismatch[name] for name in ("kl_approx", "ratio", "ratio_squared")}
        if entropy is not None:
            out["entropy"] = mean(entropy.detach())
        out["clip_fraction"] = mean(torch.zeros_like(new) if clipped is None else clipped.float())
        if self.cfg.correction != "none":
            correction = self._correction(proximal - sampled, mask)
            objective = objective * correction
            out["correction"] = mean(correction)
            out["correction_zero"] = mean((correction == 0).float())
        out["loss_objective"] = -loss(objective)
        if self.kl.in_use:
            kl = kl_estimate(new, log_probs(keys.ref_log_prob), self.cfg.kl_estimator)
            out["kl_ref"] = mean(kl.detach())
            if self.cfg.kl_in == "loss":
                out["loss_kl"] = self.kl.value * loss(kl)
        if self.cfg.kl_inference_coef != 0:
            out["loss_kl_inference"] = self.cfg.kl_inference_coef * loss(kl_estimate(new, sampled, "k3"))
        if self.entropy.in_use:
            if entropy is None:
                raise ValueError(
                    f"The actor {type(self.actor_network).__name__} gives no {keys.actor_entropy!r}, which "
                    "the entropy bonus needs: leave out policy.entropy_coef and policy.entropy_target, or "
                    "score with a TokenScorer"
                )
            out["loss_entropy"] = -self.entropy.value * mean(entropy)
        return TensorDict(out, batch_size=[])

    def _score(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and, if there are any, entropies of the responses ``[P, G, T]``."""
        keys = self.tensor_keys

        def inputs() -> actors.Inputs:
            return (
                tensordict.get(keys.prompt),
                tensordict.get(keys.prompt_mask),
                tensordict.get(keys.response),
                tensordict.get(keys.response_mask),
            )

        return actors.score(
            self.actor_network if self._network is None else self._network,
            tensordict,
            inputs,
            tensordict.get(keys.loss_mask),
            actors.ActorKeys(keys.actor_log_prob, keys.actor_full_log_prob, keys.actor_entropy),
        )

    def has_gradient(self, tensordict: TensorDictBase) -> Tensor:
        """``[P]`` bool: groups that can move the model at all.

        Every surrogate is a multiple of the advantage. Where all advantages of a group are 0 and no other
        term is in use, its gradient is exactly 0.
        """
        other_terms = (
            (self.kl.in_use and self.cfg.kl_in == "loss")
            or self.cfg.kl_inference_coef != 0
            or self.entropy.in_use
        )
        moves = tensordict.get(self.tensor_keys.advantage).ne(0).flatten(1).any(1)
        return torch.ones_like(moves) if other_terms else moves

    def _metrics(self, new: Tensor, sampled: Tensor, mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        log_ratio = new - sampled
        # Doubles: the effective sample size compares the square of the mean with the mean of the squares.
        ratio = exp_bounded(log_ratio).double()
        return {
            "kl_approx": mean(kl_estimate(sampled, new, "k3")),
            "ratio": mean(ratio),
            "ratio_squared": mean(ratio.square()),
            "gap": mean(log_ratio.abs()),
        }

    def _correction(self, log_gap: Tensor, mask: Tensor) -> Tensor:
        return correction_weights(
            log_gap,
            mask,
            kind=self.cfg.correction,
            level=self.cfg.correction_level,
            cap=self.cfg.correction_cap,
            floor=self.cfg.correction_floor,
        )

    def after_step(self, entropy: float, kl: float | None, responses: int) -> None:
        """Let the coefficients follow what the optimizer step measured (means over its tokens, nats)."""
        self.entropy.update(entropy)
        if kl is not None:
            self.kl.update(kl, responses)
