"""The policy-gradient loss over groups of responses, as a TorchRL ``LossModule``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_grpo.batch.schema import collate, picture_inputs
from torchrl_grpo.config.derived import initial_kl_coef
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.transfer import upload
from torchrl_grpo.objectives import actors
from torchrl_grpo.objectives.aggregation import BatchTotals, count_totals, token_weights
from torchrl_grpo.objectives.coefficients import EntropyCoefficient, KLCoefficient
from torchrl_grpo.objectives.importance import aggregate_log_ratio, correction_weights
from torchrl_grpo.objectives.kl import candidate_kl, kl_estimate
from torchrl_grpo.objectives.surrogates import SURROGATES, Bounds, exp_bounded

# Numbers of the quarters of a response.
QUARTERS = (1, 2, 3, 4)
# A ratio is usual from 1 minus this to 1 plus this.
_USUAL_RATIO = 0.1


class GroupPolicyLoss(LossModule):
    """``sum_it a_it (-c_it J_it + kl_coef k_it + kl_inference_coef k'_it) - entropy_coef sum_it H_it / N``.

    With a teacher, the advantage of a token in ``J`` is that of its response plus ``distill_coef (log q_it -
    log pi_it)``. ``q`` is the teacher, and ``pi`` the current policy, without gradient. The expected gradient
    is then that of ``distill_coef KL(pi, q)`` of the next token after each prefix. With ``distill_top_k``,
    the loss has ``distill_coef sum_it a_it KL_it`` instead
    (:func:`~torchrl_grpo.objectives.kl.candidate_kl`).

    ``i`` is a response, one of P x G, and ``t`` one of its tokens. ``J`` is the surrogate
    (:mod:`~torchrl_grpo.objectives.surrogates`). ``c`` is the correction for the mismatch of engine and
    trainer (:mod:`~torchrl_grpo.objectives.importance`). ``k`` and ``k'`` estimate the KL divergence to the
    reference and to the policy that sampled (:mod:`~torchrl_grpo.objectives.kl`). ``H`` is the entropy. ``a``
    is the weight of a token in the whole optimizer batch (:mod:`~torchrl_grpo.objectives.aggregation`), and N
    is the number of tokens in the loss mask of that batch. The terms of micro-batches add up to those of one
    large batch, and padding never counts. TorchRL's ``GRPOLoss`` averages over a micro-batch, and counts
    padding in its KL and its metrics.

    The loss reads ``("tokens"|"masks", "prompt")`` ``[P, L]``,
    ``("tokens"|"masks"|"log_probs", "response")`` ``[P, G, T]``, ``("masks", "loss")`` ``[P, G, T]`` and
    ``"advantage"`` ``[P, G, 1]``. Depending on the configuration it also reads
    ``("log_probs", "reference")``, of the reference or the teacher, and ``("log_probs", "proximal")``
    ``[P, G, T]``. If the actor is a ``TensorDictModule``, its ``in_keys`` replace the tokens and their masks.

    Called with a batch, the loss returns a TensorDict. Called with tensors, in the order of ``in_keys`` or by
    name (``tokens_prompt=...``), it returns its ``out_keys`` as a tuple, or as one tensor if there is one
    key.

    The actor is a submodule, so ``parameters()``, ``state_dict()`` and ``to()`` include the model. A step of
    training without this project's trainer::

        loss = GroupPolicyLoss(TokenScorer(model), PolicyConfig(clip_epsilon_high=0.28))
        optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-5)
        terms = loss(batch)
        sum(terms[name] for name in loss.out_keys).backward()
        optimizer.step()

    Args:
        actor_network: module that scores responses with gradients: a
            :class:`~torchrl_grpo.models.scoring.token_scorer.TokenScorer`, or any module with the same call
            signature; a ``TensorDictModule`` that reads keys of the batch and writes
            ``("log_probs", "response")`` ``[P, G, T]`` and optionally ``"entropy"`` of the same shape; or a
            TorchRL ``TransformersWrapper`` with ``input_mode="tokens"`` and ``generate=False``, which scores
            at temperature 1 and gives no entropy.
        cfg: configuration of the objective; None for the defaults of ``policy.*``.
        constant_length: divisor in tokens for ``policy.aggregation=constant``; None for
            ``cfg.aggregation_length``.
        has_proximal_log_probs: whether batches contain the log-probabilities of the proximal policy, for
            ``policy.proximal=trainer``. If a round is trained for one step only, they are not needed, because
            the proximal policy is the current one.

    Raises:
        ValueError: the actor generates or reads text, or ``constant_length`` is missing.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the loss's inputs and of the actor's outputs."""

        prompt: NestedKey = ("tokens", "prompt")
        prompt_mask: NestedKey = ("masks", "prompt")
        response: NestedKey = ("tokens", "response")
        response_mask: NestedKey = ("masks", "response")
        loss_mask: NestedKey = ("masks", "loss")
        sample_log_prob: NestedKey = ("log_probs", "response")
        proximal_log_prob: NestedKey = ("log_probs", "proximal")
        ref_log_prob: NestedKey = ("log_probs", "reference")
        candidates: NestedKey = ("tokens", "candidates")
        candidate_log_prob: NestedKey = ("log_probs", "candidates")
        advantage: NestedKey = "advantage"
        # Output keys of an actor that is a TensorDictModule.
        actor_log_prob: NestedKey = ("log_probs", "response")
        # Log-probabilities of prompt and response in one row, as TorchRL's own policies write them.
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
        constant_length: int | None = None,
        has_proximal_log_probs: bool = True,
    ) -> None:
        super().__init__()
        actors.check_actor(actor_network)
        cfg = PolicyConfig() if cfg is None else cfg
        length = cfg.aggregation_length if constant_length is None else constant_length
        if cfg.aggregation == "constant" and length is None:
            raise ValueError("policy.aggregation=constant needs a length in tokens; give constant_length")
        self.actor_network = actor_network
        # Not registered as a submodule: it wraps the actor, whose parameters would appear twice.
        self.__dict__["_network"] = None
        self.cfg = cfg
        self.kl = KLCoefficient(initial_kl_coef(cfg), cfg.kl_target, cfg.kl_horizon)
        self.entropy = EntropyCoefficient(
            cfg.entropy_coef, cfg.entropy_target, cfg.entropy_delta, cfg.entropy_coef_max
        )
        self.constant_length = 1 if length is None else length
        self.has_proximal_log_probs = has_proximal_log_probs
        high = cfg.clip_epsilon if cfg.clip_epsilon_high is None else cfg.clip_epsilon_high
        self.bounds = Bounds(cfg.clip_epsilon, high, cfg.dual_clip)
        self._surrogate = SURROGATES[cfg.surrogate]

    def set_network(self, network: nn.Module) -> None:
        """Score by calling ``network``, a wrapper of the actor for several training ranks (such as DDP)."""
        self.__dict__["_network"] = network

    @property
    def distills(self) -> bool:
        """Whether a teacher's log-probabilities are in the batch."""
        return self.cfg.distill_coef != 0

    @property
    def sums_candidates(self) -> bool:
        """Whether the divergence from the teacher is a sum over its most probable tokens."""
        return self.distills and self.cfg.distill_top_k > 0

    @property
    def functional(self) -> bool:
        """False: the parameters are the actor's own, not TorchRL's functional copy."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that the loss reads in this configuration."""
        keys = self.tensor_keys
        scored = [keys.prompt, keys.prompt_mask, keys.response, keys.response_mask]
        read = [*actors.actor_in_keys(self.actor_network, scored), keys.loss_mask]
        read += [keys.sample_log_prob, keys.advantage]
        if self.cfg.proximal == "trainer" and self.has_proximal_log_probs:
            read.append(keys.proximal_log_prob)
        if self.kl.in_use or self.distills:
            read.append(keys.ref_log_prob)
        if self.sums_candidates:
            read += [keys.candidates, keys.candidate_log_prob]
        return list(dict.fromkeys(read))

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the loss terms in this configuration, or those chosen by ``select_out_keys``.

        Metrics are not listed.
        """
        selected: list[NestedKey] = self.__dict__.get("_out_keys_apparent", self.out_keys_source)
        return selected

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys_apparent = list(values)

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """Keys of the loss terms in this configuration."""
        terms: dict[str, bool] = {
            "loss_objective": True,
            "loss_kl": self.kl.in_use and self.cfg.kl_in == "loss",
            "loss_distill": self.sums_candidates,
            "loss_kl_inference": self.cfg.kl_inference_coef != 0,
            "loss_entropy": self.entropy.in_use,
        }
        return [name for name, in_use in terms.items() if in_use]

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """Do nothing: there is no value network."""

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase, totals: BatchTotals | None = None) -> TensorDict:
        """Compute the loss terms of one micro-batch.

        Args:
            tensordict: micro-batch ``[P]`` of groups. Those of a round are padded here.
            totals: counts of the whole optimizer batch; None counts this batch.

        Returns:
            Scalars. Those named ``loss_*`` add up to the loss and have gradients. The others are
            contributions to a mean over the tokens of the optimizer batch, to be summed over micro-batches:

            * ``entropy`` in nats, if the actor gives it, and ``clip_fraction``;
            * ``kl_approx`` (KL(sampling policy || current policy), estimated with k3), ``ratio``,
              ``ratio_squared`` and ``logprob_diff`` (absolute difference in nats) relative to the engine's
              log-probabilities;
            * with ``policy.proximal=trainer``: ``mismatch_kl_approx``, ``mismatch_ratio`` and
              ``mismatch_ratio_squared`` of the proximal policy relative to the engine;
            * ``ratio_outside``, the share of tokens whose ratio to the engine is outside of 0.9 to 1.1,
              ``kl_quarter_<n>``, the KL divergence from the engine in the n-th quarter of each response times
              the share of tokens there, and ``quarter_<n>``, that share; these are of the proximal policy
              with ``policy.proximal=trainer``;
            * with a reference: ``kl_ref``; with a teacher: ``reverse_kl``, in nats;
            * with a correction: ``correction``, the mean weight, and ``correction_zero``, the fraction of
              weights that are 0.

        Raises:
            ValueError: the actor gives no log-probabilities, or no entropy although the bonus needs it.
        """
        keys = self.tensor_keys
        if isinstance(tensordict, LazyStackedTensorDict):
            tensordict = collate(tensordict.tensordicts)
        log_probs, entropy, candidates = self._score(tensordict)

        def get(key: NestedKey) -> Tensor:
            value: Tensor = tensordict.get(key)
            return upload(value, log_probs.device)

        mask = get(keys.loss_mask)
        totals = count_totals(mask) if totals is None else totals
        weights = token_weights(mask, self.cfg.aggregation, totals, self.constant_length, log_probs.dtype)

        outside = ~mask

        def mean(values: Tensor) -> Tensor:
            return values.masked_fill(outside, 0.0).sum() / max(1, totals.tokens)

        def loss(values: Tensor) -> Tensor:
            return (values.masked_fill(outside, 0.0) * weights).sum()

        def masked(key: NestedKey) -> Tensor:
            # Values in the padding must not enter a product of the backward pass.
            return get(key).masked_fill(outside, 0.0)

        sampled = masked(keys.sample_log_prob)
        proximal = sampled
        if self.cfg.proximal == "trainer":
            stored = self.has_proximal_log_probs
            proximal = (
                masked(keys.proximal_log_prob) if stored else log_probs.detach().masked_fill(outside, 0.0)
            )
        advantage, reverse_kl = get(keys.advantage), None
        if self.distills:
            reverse_kl = log_probs.detach() - masked(keys.ref_log_prob)
            if candidates is not None:
                teacher = get(keys.candidate_log_prob).to(candidates.dtype)
                reverse_kl = candidate_kl(candidates, teacher)
            else:
                advantage = advantage - self.cfg.distill_coef * reverse_kl
        objective, clipped = self._surrogate(
            aggregate_log_ratio(log_probs - proximal, mask, self.cfg.ratio),
            log_probs,
            advantage,
            self.bounds,
            **self.cfg.surrogate_args,
        )
        out = self._metrics(log_probs.detach(), sampled, mean)
        if self.cfg.proximal == "trainer":
            mismatch = self._metrics(proximal, sampled, mean)
            out |= {f"mismatch_{name}": mismatch[name] for name in ("kl_approx", "ratio", "ratio_squared")}
        closest = proximal if self.cfg.proximal == "trainer" else log_probs.detach()
        out |= self._by_position(closest, sampled, mask, totals)
        if entropy is not None:
            out["entropy"] = mean(entropy.detach())
        out["clip_fraction"] = mean(torch.zeros_like(log_probs) if clipped is None else clipped.float())
        if self.cfg.correction != "none":
            correction = self._correction(proximal - sampled, mask)
            objective = objective * correction
            out["correction"] = mean(correction)
            out["correction_zero"] = mean((correction == 0).float())
        out["loss_objective"] = -loss(objective)
        if self.kl.in_use:
            kl = kl_estimate(log_probs, masked(keys.ref_log_prob), self.cfg.kl_estimator)
            out["kl_ref"] = mean(kl.detach())
            if self.cfg.kl_in == "loss":
                out["loss_kl"] = self.kl.value * loss(kl)
        if reverse_kl is not None:
            out["reverse_kl"] = mean(reverse_kl.detach())
            if candidates is not None:
                out["loss_distill"] = self.cfg.distill_coef * loss(reverse_kl)
        if self.cfg.kl_inference_coef != 0:
            out["loss_kl_inference"] = self.cfg.kl_inference_coef * loss(
                kl_estimate(log_probs, sampled, "k3")
            )
        if self.entropy.in_use:
            if entropy is None:
                raise ValueError(
                    f"The actor {type(self.actor_network).__name__} gives no {keys.actor_entropy!r}, which "
                    "the entropy bonus needs; remove policy.entropy_coef and policy.entropy_target, or "
                    "score with a TokenScorer"
                )
            out["loss_entropy"] = -self.entropy.value * mean(entropy)
        return TensorDict(out, batch_size=[])

    def _score(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what :func:`~torchrl_grpo.objectives.actors.score` returns."""
        keys = self.tensor_keys

        def inputs() -> actors.Inputs:
            read = [keys.prompt, keys.prompt_mask, keys.response, keys.response_mask]
            if isinstance(self.actor_network, TokenScorer) or self.sums_candidates:
                # Between the turns of an episode are tokens that the loss does not count.
                read.append(keys.loss_mask)
            if self.sums_candidates:
                read.append(keys.candidates)
            return tuple(tensordict.get(key) for key in read)

        return actors.score(
            self.actor_network if self._network is None else self._network,
            tensordict,
            inputs,
            tensordict.get(keys.loss_mask),
            actors.ActorKeys(keys.actor_log_prob, keys.actor_full_log_prob, keys.actor_entropy),
            picture_inputs(tensordict) if isinstance(self.actor_network, TokenScorer) else None,
        )

    def has_gradient(self, tensordict: TensorDictBase) -> Tensor:
        """Return ``[P]`` bool, True for groups whose gradient may differ from 0.

        Every surrogate is proportional to the advantage. If all advantages of a group are 0 and no other term
        is in use, its gradient is exactly 0.
        """
        other_terms = (
            (self.kl.in_use and self.cfg.kl_in == "loss")
            or self.cfg.kl_inference_coef != 0
            or self.distills
            or self.entropy.in_use
        )
        nonzero = tensordict.get(self.tensor_keys.advantage).ne(0).flatten(1).any(1)
        return torch.ones_like(nonzero) if other_terms else nonzero

    def _metrics(
        self, log_probs: Tensor, sampled: Tensor, mean: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        log_ratio = log_probs - sampled
        # Double precision, because the effective sample size compares the squared mean with the mean square.
        ratio = exp_bounded(log_ratio).double()
        return {
            "kl_approx": mean(kl_estimate(sampled, log_probs, "k3")),
            "ratio": mean(ratio),
            "ratio_squared": mean(ratio.square()),
            "logprob_diff": mean(log_ratio.abs()),
        }

    def _by_position(
        self, log_probs: Tensor, sampled: Tensor, mask: Tensor, totals: BatchTotals
    ) -> dict[str, Tensor]:
        """Return how far engine and trainer are apart on tokens, and in each quarter of the responses."""
        ratio = exp_bounded(log_probs - sampled)
        outside = (ratio - 1).abs() > _USUAL_RATIO
        kl = kl_estimate(sampled, log_probs, "k3")
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        quarter = (mask.cumsum(-1) - 1).mul(4).div(lengths, rounding_mode="floor")
        members = (quarter == torch.arange(4, device=mask.device).view(4, 1, 1, 1)) & mask
        values = torch.stack([kl.masked_fill(~mask, 0.0), torch.ones_like(kl)])
        # [2, 4]: sums of the divergence and numbers of tokens, as shares of all tokens of the batch.
        sums = (values.unsqueeze(1) * members).sum((2, 3, 4)) / max(1, totals.tokens)
        return {
            "ratio_outside": (outside & mask).sum() / max(1, totals.tokens),
            **{f"kl_quarter_{number}": sums[0, number - 1] for number in QUARTERS},
            **{f"quarter_{number}": sums[1, number - 1] for number in QUARTERS},
        }

    def _correction(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return correction_weights(
            log_ratio,
            mask,
            kind=self.cfg.correction,
            level=self.cfg.correction_level,
            cap=self.cfg.correction_cap,
            floor=self.cfg.correction_floor,
        )

    def update_coefficients(self, entropy: float, kl: float | None, responses: int) -> None:
        """Update the coefficients with the means over the tokens of an optimizer step, in nats."""
        self.entropy.update(entropy)
        if kl is not None:
            self.kl.update(kl, responses)
