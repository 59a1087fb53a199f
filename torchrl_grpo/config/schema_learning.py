"""The section of the schema that decides what is learned: the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torchrl_grpo.config.keys import key
from torchrl_grpo.config.values import (
    AdvantageEstimator,
    AdvantageStd,
    Aggregation,
    ConstantGroups,
    Correction,
    KLEstimator,
    KLIn,
    Level,
    NonNegativeFloat,
    NonNegativeInt,
    Overlong,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Proximal,
    Range,
    RewardCombination,
    Share,
    Surrogate,
)


@dataclass
class PolicyConfig:
    """The objective."""

    surrogate: Surrogate = key(
        Surrogate.clip,
        "Objective that is maximized per token: clip (PPO), cispo, log_likelihood or sapo.",
    )
    surrogate_args: dict[str, float] = key(
        {},
        "Options of the surrogate, e.g. {temperature_positive: 1.0} for sapo.",
    )
    clip_epsilon: PositiveShare = key(
        0.2,
        "The ratio's lower bound is 1 - clip_epsilon; 1 means no lower bound. Without clip_epsilon_high, the "
        "upper bound is 1 + clip_epsilon.",
    )
    clip_epsilon_high: PositiveFloat | None = key(
        None,
        "Upper bound of the ratio is 1 + clip_epsilon_high; null means clip_epsilon.",
    )
    dual_clip: Annotated[float, Range(gt=1)] | None = key(
        None,
        "Lower bound of the objective for a negative advantage, as a multiple (above 1) of the advantage; "
        "null is no bound.",
        only_with="policy.surrogate=clip",
    )
    ratio: Level = key(
        Level.token,
        "Level of the ratio: token, sequence (geometric mean of the tokens' ratios) or trajectory (their "
        "product).",
    )
    aggregation: Aggregation = key(
        Aggregation.token,
        "How the loss is averaged. token: mean over the batch's tokens. sequence: mean over each response, "
        "then over responses. constant: sum over each response divided by aggregation_length, then mean "
        "over responses.",
    )
    aggregation_length: PositiveInt | None = key(
        None,
        "Tokens by which aggregation=constant divides; null means inference_model.max_new_tokens.",
        only_with="policy.aggregation=constant",
    )
    advantage_estimator: AdvantageEstimator = key(
        AdvantageEstimator.group_mean,
        "How rewards become advantages. group_mean and leave_one_out (mean of the other responses) subtract "
        "a baseline. reward takes the reward as it is. maxent derives a weight for each response of a group "
        "(docs/objectives.md). none learns nothing from rewards, for distillation alone.",
    )
    advantage_std: AdvantageStd = key(
        AdvantageStd.unbiased,
        "Standard deviation by which advantages are divided: of the group, unbiased (n-1) or population "
        "(n); of the whole collection round (batch); or none.",
    )
    advantage_eps: NonNegativeFloat = key(1e-4, "Constant added to the standard deviation.")
    reward_combination: RewardCombination = key(
        RewardCombination.together,
        "How several rewards are combined. together: summed by weight, then normalized. apart: normalized "
        "one by one, then summed (GDPO).",
    )
    reward_shift: float = key(0.0, "Constant added to every reward first.")
    reward_scale: PositiveFloat = key(1.0, "Factor that multiplies every reward after the shift.")
    reward_clip: PositiveFloat | None = key(
        None,
        "Bound on the absolute value of every reward after scaling; null is no bound.",
    )
    constant_groups: ConstantGroups = key(
        ConstantGroups.keep,
        "What to do with groups whose rewards are all equal: keep, drop, or refill the round with other "
        "groups (dynamic sampling).",
    )
    max_refills: PositiveInt = key(
        3,
        "Largest number of further collection rounds that constant_groups=refill takes to fill one round.",
        only_with="policy.constant_groups=refill",
    )
    overlong: Overlong = key(
        Overlong.keep,
        "What to do with long responses: keep; mask (responses cut off at max_new_tokens leave the loss); "
        "penalise (subtract up to 1 from the reward).",
    )
    overlong_buffer: PositiveInt | None = key(
        None,
        "Number of tokens before max_new_tokens over which the penalty grows; null means a fifth of "
        "max_new_tokens.",
        only_with="policy.overlong=penalise",
    )
    kl_coef: NonNegativeFloat = key(
        0.0,
        "Weight of the KL divergence to the reference model. With 0 no reference model is loaded, unless "
        "kl_target is set.",
    )
    kl_estimator: KLEstimator = key(
        KLEstimator.k3,
        "Estimator of the KL divergence to the reference from samples: k1, k2 or k3. For the gradient of "
        "KL(policy || reference), take k2 with kl_in=loss or k1 with kl_in=reward. k3 with kl_in=loss has "
        "the gradient of KL(reference || policy).",
    )
    kl_in: KLIn = key(
        KLIn.loss,
        "Where the KL divergence counts: in the loss, the reward, or the weights of maxent.",
    )
    init_kl_coeff: NonNegativeFloat | None = key(
        None, "Initial coefficient if kl_target adapts it; null means kl_coef."
    )
    kl_target: PositiveFloat | None = key(
        None,
        "Target KL divergence, in nats per token, to which the coefficient is adapted; null keeps the "
        "coefficient constant.",
    )
    kl_horizon: PositiveInt = key(
        10_000,
        "Responses over which the adapted coefficient may change by about a fifth.",
        only_with="policy.kl_target",
    )
    distill_coef: NonNegativeFloat = key(
        0.0,
        "Weight of the reverse KL divergence per token to the teacher, teacher_model.name. 0 has no teacher.",
    )
    distill_top_k: NonNegativeInt = key(
        0,
        "Tokens of each position over which that divergence is summed: those that the teacher finds most "
        "probable, and all others as one. 0 estimates it from the sampled token.",
        only_with="policy.distill_coef",
    )
    kl_inference_coef: NonNegativeFloat = key(
        0.0,
        "Weight of the KL divergence to the policy that generated the samples.",
    )
    entropy_coef: NonNegativeFloat = key(0.0, "Weight of the entropy bonus.")
    entropy_target: PositiveFloat | None = key(
        None,
        "Entropy, in nats per token, below which the entropy bonus counts and its weight grows; null keeps "
        "the weight constant.",
    )
    entropy_delta: PositiveFloat = key(
        0.005,
        "Change of the weight of the entropy bonus in one optimizer step, if entropy_target is set.",
        only_with="policy.entropy_target",
    )
    entropy_coef_max: PositiveFloat = key(
        1.0,
        "Largest weight of the entropy bonus, if entropy_target is set.",
        only_with="policy.entropy_target",
    )
    proximal: Proximal = key(
        Proximal.auto,
        "Log-probabilities in the denominator of ratios: engine (at sampling time), trainer (when a round is "
        "received, before any step on it) or auto. auto means the trainer's for grpo-async.py with "
        "collector.max_policy_age above 0, and the engine's otherwise.",
    )
    correction: Correction = key(
        Correction.none,
        "Importance weights trainer / engine, with proximal=trainer: none, truncate (at the cap) or mask "
        "(remove from the loss what is above the cap or below the floor).",
    )
    correction_level: Level = key(
        Level.token,
        "Level of the importance weights: token, sequence (geometric mean) or trajectory (product).",
        only_with="policy.correction",
    )
    correction_cap: Annotated[float, Range(ge=1)] = key(
        2.0, "Largest importance weight.", only_with="policy.correction"
    )
    correction_floor: Share = key(
        0.0, "Smallest importance weight that correction=mask keeps.", only_with="policy.correction=mask"
    )
    tau: NonNegativeFloat = key(
        0.1,
        "maxent: entropy weight. A larger tau makes the weights of a group's responses more equal.",
        only_with="policy.advantage_estimator=maxent",
    )
    q_temperature: PositiveFloat = key(
        1.0,
        "maxent: temperature of the target distribution that the rewards define.",
        only_with="policy.advantage_estimator=maxent",
    )
    q_epsilon: NonNegativeFloat = key(
        1e-6,
        "maxent: smallest probability of a response in the target distribution.",
        only_with="policy.advantage_estimator=maxent",
    )
    length_normalize_ref: bool = key(
        True,
        "maxent: divide the reference's log-probability of a response by its number of tokens.",
        only_with="policy.advantage_estimator=maxent",
    )
