"""The rules by which a run is found to be dead or in danger, in one table.

A rule compares one number of a line of ``metrics.jsonl`` with a threshold. :mod:`torchrl_grpo.observe.guards`
applies the rules to the lines of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torchrl_grpo.config.schema import keys
from torchrl_grpo.observe.past import Past, Row

# From this number of parameters on, rounding to 16 bits changes log-probabilities less.
_LARGE = 1e9


@dataclass(frozen=True)
class Limit:
    """A threshold that applies in some runs only.

    Attributes:
        threshold: the threshold.
        where: where it applies, for the documentation.
        applies: function that says whether it applies to a run.
    """

    threshold: float
    where: str
    applies: Callable[[Past], bool]


@dataclass(frozen=True)
class Rule:
    """A sign that a run goes wrong.

    Attributes:
        name: name of the rule.
        reads: metrics that the number is made of. A line without the first of them is skipped.
        number: function that returns the number to compare, or None if the line says nothing about it.
        threshold: number that a bad line reaches.
        below: whether a bad line reaches it from above, as a gradient that becomes 0.
        window: number of bad lines in a row with which the warning begins.
        unit: what these lines are: rounds, steps or evaluations.
        seen: text of what was seen; it may have ``{row[METRIC]}``, ``{number}``, ``{past}`` and ``{window}``.
        advice: cause, and the keys to change.
        source: where the threshold comes from.
        limits: other thresholds; the first that applies takes the place of ``threshold``.
        explained_by: rules that name the cause of this sign. While one of them holds, this one is not shown.
    """

    name: str
    reads: tuple[str, ...]
    number: Callable[[Row, Past], float | None]
    window: int
    unit: str
    seen: str
    advice: str
    source: str
    threshold: float
    below: bool = False
    limits: tuple[Limit, ...] = ()
    explained_by: tuple[str, ...] = ()

    def is_bad(self, row: Row, past: Past) -> bool | None:
        """Whether a line shows the sign; None if the line says nothing about it."""
        if self.reads[0] not in row:
            return None
        number = self.number(row, past)
        if number is None:
            return None
        threshold = self.threshold_in(past)
        return number <= threshold if self.below else number >= threshold

    def threshold_in(self, past: Past) -> float:
        """Return the threshold for a run."""
        return next((limit.threshold for limit in self.limits if limit.applies(past)), self.threshold)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the configuration that the advice names."""
        words = re.findall(r"\b[a-z_]+\.[a-z_]+\b", self.advice)
        return tuple(dict.fromkeys(word for word in words if keys().knows(word)))


def _value(row: Row, name: str) -> float | None:
    value: float | None = row.get(name)
    return value


def _constant(row: Row, past: Past) -> float | None:
    # Without a baseline, with the KL in the reward, and with a teacher, equal rewards still teach.
    return (
        0.0
        if row.get("advantage/abs_mean") or past.setting.has_teacher
        else _value(row, "reward/constant_groups")
    )


def _gradient(row: Row, past: Past) -> float | None:
    if not past.has_signal:
        return None
    # A step in which the loss counts no token has no norm.
    norm = _value(row, "optimizer/grad_norm") if "optimizer/grad_norm" in row else 0.0
    # The groups of one step of a round may have no signal. Of a round without any gradient, the first counts.
    return norm if norm or "reward/constant_groups" in row or not past.has_rounds else None


def _while_sampling(name: str) -> Callable[[Row, Past], float | None]:
    # Supervised fine-tuning samples nothing, and is to move the model far and make it sure.
    return lambda row, past: _value(row, name) if "policy/ratio" in row else None


def _has_equal_weights(row: Row) -> bool:
    """Whether the trainer had the weights that sampled when the round came in: only rounding differs."""
    return bool(row.get("policy/version") == row["step"] - 1)


def _with_equal_weights(name: str) -> Callable[[Row, Past], float | None]:
    return lambda row, past: _value(row, name) if _has_equal_weights(row) else None


def _mismatch(row: Row, past: Past) -> float | None:
    name = "mismatch/kl" if "mismatch/kl" in row else "kl/sampling_policy"
    return _value(row, name) if _has_equal_weights(row) else None


def _growing_mismatch(row: Row, past: Past) -> float | None:
    first, last = (_value(row, f"mismatch/kl_quarter_{quarter}") for quarter in (1, 4))
    if first is None or last is None or not _has_equal_weights(row):
        return None
    return last if last >= _GROWTH * first else 0.0


def _few_signals(row: Row, past: Past) -> float | None:
    share = _value(row, "reward/constant_groups")
    if share is None or past.constant is None or not past.setting.has_baseline:
        return None
    # Without any signal, more samples are not the first thing to change.
    return min(share, past.constant) if share < 1 else 0.0


def _fallen(rewards_rise: bool) -> Callable[[Row, Past], float | None]:
    return lambda row, past: past.fall if (past.risen is not None) == rewards_rise else 0.0


# What rounding does to the KL divergence between engine and trainer.
_ROUNDING = (
    Limit(1e-3, "in float32", lambda past: past.float32),
    Limit(
        5e-3,
        "in 16 bits from a billion parameters on",
        lambda past: (past.parameters or 0) >= _LARGE and not past.setting.quantized,
    ),
)
_ROUNDING_SOURCE = (
    "in 16 bits, measured 0.0014 to 0.0022 with 0.13 billion parameters, and tinker-cookbook has 0.0002 to "
    "0.002 from 27 billion on, stable below 0.01, and 0.09 for a fault; NeMo-RL looks at 0.001"
)
# The last quarter of the responses is further apart than the first by at least this factor.
_GROWTH = 3.0

RULES = (
    Rule(
        name="reward_fails",
        reads=("reward/constant_groups", "reward/error_share"),
        number=lambda row, past: row.get("reward/error_share", 0.0),
        threshold=0.5,
        window=1,
        unit="round",
        seen="{number:.0%} of the calls of a reward failed",
        advice="correct the function in reward.functions, or what it calls (the run's log and rollouts.jsonl "
        "have each error); until then a failed call counts as reward.on_error, and one of a judge or reward "
        "model does not count",
        source="a reward that fails on half of the responses says little about them",
    ),
    Rule(
        name="large_update",
        reads=("publish/update_kl", "policy/ratio"),
        number=_while_sampling("publish/update_kl"),
        threshold=0.05,
        window=1,
        unit="step",
        seen="one update moved the policy by {number:.2g} nats per token",
        advice="it was too large for the model: start again with a lower optimizer.lr, or with "
        "optimizer.warmup_steps",
        source="measured: 0.11 in the first step of the quick start with optimizer.lr=1e-3, which ends the "
        "model, and at most 0.023 in 22 runs that learned",
    ),
    Rule(
        name="collapse",
        reads=("reward/constant_groups", "reward/mean", "policy/entropy"),
        number=lambda row, past: past.lost,
        threshold=3.0,
        window=1,
        unit="round",
        seen="rewards differ in no group any more, they fell below all before (to {row[reward/mean]:.3g}), "
        "and the entropy changed more than threefold (to {row[policy/entropy]:.2g} nats per token)",
        advice="an update was too large for the model: start again with a lower optimizer.lr, or with "
        "optimizer.warmup_steps",
        source="measured: 5.4 at optimizer.lr=1e-3 in the quick start, at most 2.0 in five runs at 1e-5",
        explained_by=("large_update",),
    ),
    Rule(
        name="truncated",
        reads=("reward/mean", "response/truncated"),
        number=lambda row, past: _value(row, "response/truncated"),
        threshold=1.0,
        window=3,
        unit="round",
        seen="all responses were cut off in {window} rounds in a row, the last at "
        "{row[response/length_max]:.0f} tokens",
        advice="raise inference_model.max_new_tokens (and inference_model.max_model_len), or ask for shorter "
        "answers. A model that never ends its turn may have the wrong model.chat_template. If all rewards "
        "are equal and not 0, the function in reward.functions does not tell responses apart either",
        source="measured: the quick start begins with up to 0.98 and learns; AReaL acts on 0.05",
        explained_by=("collapse",),
    ),
    Rule(
        name="mostly_truncated",
        reads=("reward/mean", "response/truncated"),
        number=lambda row, past: _value(row, "response/truncated"),
        threshold=0.9,
        window=10,
        unit="round",
        seen="nearly all responses were cut off in {window} rounds in a row ({number:.0%} in the last)",
        advice="raise inference_model.max_new_tokens (and inference_model.max_model_len), or ask for shorter "
        "answers",
        source="measured: of the 16 rounds of the quick start, 2 in a row with env.answer_format=plain",
        explained_by=("collapse", "truncated"),
    ),
    Rule(
        name="no_signal",
        reads=("reward/constant_groups", "advantage/abs_mean"),
        number=_constant,
        threshold=1.0,
        window=3,
        unit="round",
        seen="in {window} rounds in a row all responses of each group had the same reward (mean "
        "{row[reward/mean]:.3g}), so rewards taught nothing",
        advice="if rewards are low, take easier problems (env.task_args, or another env.dataset), a reward "
        "that also grades partial success (reward.weights), or a higher inference_model.temperature; if they "
        "are high, take harder problems; more samples per problem (env.repeats) help in both cases",
        source="DAPO leaves such groups out; three rounds without any are chance only in small rounds",
        explained_by=("reward_fails", "collapse", "truncated"),
    ),
    Rule(
        name="no_gradient",
        reads=("optimizer/lr", "optimizer/grad_norm"),
        number=_gradient,
        threshold=1e-12,
        below=True,
        window=3,
        unit="step",
        seen="the gradient was 0 in {window} optimizer steps in a row, although there was a signal",
        advice="every token is masked or clipped: see policy.overlong=mask, policy.clip_epsilon, "
        "policy.correction_cap and the weights in reward.weights",
        source="by definition",
        explained_by=("truncated",),
    ),
    Rule(
        name="entropy",
        reads=("policy/entropy",),
        number=_while_sampling("policy/entropy"),
        threshold=0.01,
        below=True,
        window=3,
        unit="step",
        seen="the entropy is nearly gone ({row[policy/entropy]:.2g} nats per token), so responses to a "
        "prompt hardly differ",
        advice="raise policy.clip_epsilon_high (0.28 in policy=dapo), add policy.entropy_coef or "
        "policy.entropy_target, or lower optimizer.lr",
        source="prime-rl and DAPO: near 0 is collapse; the quick start ends at 0.19 to 0.46",
        explained_by=("collapse",),
    ),
    Rule(
        name="kl",
        reads=("kl/reference",),
        number=_while_sampling("kl/reference"),
        threshold=2.0,
        limits=(Limit(4.0, "with policy.kl_estimator=k2", lambda past: past.setting.kl_estimator == "k2"),),
        window=2,
        unit="step",
        seen="the KL divergence to the reference is {row[kl/reference]:.2g} nats per token",
        advice="the policy has left its reference: lower optimizer.lr, or raise policy.kl_coef "
        "(policy.kl_target adapts it)",
        source="measured: 0.52 at the end of the quick start with policy.kl_coef=1e-3, which learns; k2 is "
        "3.9 where k1 and k3 are 1.9, if logits differ by Gaussian noise",
    ),
    Rule(
        name="mismatch",
        reads=("reward/mean", "mismatch/kl", "kl/sampling_policy"),
        number=_mismatch,
        threshold=0.01,
        limits=_ROUNDING,
        window=3,
        unit="round",
        seen="engine and trainer disagree with equal weights, in {window} rounds in a row: their KL "
        "divergence is {number:.2g} nats per token",
        advice="compute alike in both: inference_model.dtype, train_model.autocast, and float32 heads "
        "(train_model.head_dtype, inference_model.head_dtype); policy.proximal=trainer with "
        "policy.correction=truncate corrects what is left",
        source=_ROUNDING_SOURCE,
        explained_by=("mismatch_grows",),
    ),
    Rule(
        name="mismatch_grows",
        reads=("mismatch/kl_quarter_4", "mismatch/kl_quarter_1"),
        number=_growing_mismatch,
        threshold=0.01,
        limits=_ROUNDING,
        window=3,
        unit="round",
        seen="engine and trainer disagree more and more along a response, with equal weights: their KL "
        "divergence is {row[mismatch/kl_quarter_1]:.2g} nats per token in the first quarter of responses and "
        "{number:.2g} in the last",
        advice="their positions or their attention differ: compare train_model.attn_implementation, "
        "train_model.shared_prefix and train_model.prefix_attention, and the model's scaling of positions "
        "beyond inference_model.max_model_len; a shorter inference_model.max_new_tokens avoids it",
        source="tinker-cookbook: healthy below 0.011 at every depth, and from 0.02 to 0.16 with a fault",
    ),
    Rule(
        name="batch_sensitive",
        reads=("mismatch/ratio_outside",),
        number=_with_equal_weights("mismatch/ratio_outside"),
        threshold=0.2,
        limits=(Limit(0.01, "in float32", lambda past: past.float32),),
        window=3,
        unit="round",
        seen="before any step, {number:.0%} of the tokens have a ratio outside of 0.9 to 1.1",
        advice="log-probabilities depend on the batch that they are computed in: compute more exactly "
        "(train_model.autocast=no, inference_model.dtype=float32, float32 in train_model.head_dtype and "
        "inference_model.head_dtype), or take the trainer's own in the ratio (policy.proximal=trainer)",
        source="TRL's users measured 0.075 in bfloat16, and 0.08 for the trainer alone in other batches",
        explained_by=("mismatch", "mismatch_grows"),
    ),
    Rule(
        name="group_size",
        reads=("reward/constant_groups", "eval/accuracy"),
        number=_few_signals,
        threshold=0.9,
        window=5,
        unit="round",
        seen="{row[reward/constant_groups]:.0%} of the groups have no signal, as the accuracy before "
        "training foretold, in {window} rounds in a row",
        advice="more samples per problem (env.repeats), problems of another difficulty (env.task_args), or "
        "policy.constant_groups=refill leave more groups with a signal",
        source="p^G + (1 - p)^G of groups of G responses have no signal; the quick start has 0.63 at first",
    ),
    Rule(
        name="short_answers",
        reads=("eval/response_length", "eval/num_problems", "reward/mean"),
        number=lambda row, past: past.shorter,
        threshold=3.0,
        window=1,
        unit="evaluation",
        seen="held-out responses became {number:.1f} times as short ({row[eval/response_length]:.0f} tokens) "
        "without a clear gain in the held-out value, while rewards rose",
        advice="short answers earn the rewards without solving the task: give one that checks the result "
        "more weight in reward.weights (eval.reward names the one that grades); policy.kl_coef holds the "
        "policy back",
        source="a public run with rewards for format and digits ends at 22 tokens; the quick start, which "
        "learns, becomes 1.4 times as short",
    ),
    Rule(
        name="reward_hacked",
        reads=("eval/num_problems", "eval/accuracy", "reward/mean"),
        number=_fallen(rewards_rise=True),
        threshold=1.0,
        window=1,
        unit="evaluation",
        seen="the held-out value fell below its best, beyond both 95 % intervals, while {past.risen} rose",
        advice="the rewards pay for something else than the task: read rollouts.jsonl, then change "
        "reward.weights; policy.kl_coef holds the policy back, and train.keep_best keeps the best checkpoint",
        source="95 % intervals that do not meet",
        explained_by=("short_answers",),
    ),
    Rule(
        name="held_out_falls",
        reads=("eval/num_problems", "eval/accuracy", "eval/loss"),
        number=_fallen(rewards_rise=False),
        threshold=1.0,
        window=1,
        unit="evaluation",
        seen="the held-out value fell below its best, beyond both 95 % intervals",
        advice="lower optimizer.lr, or end earlier with train.patience; train.keep_best keeps the best "
        "checkpoint",
        source="95 % intervals that do not meet",
        explained_by=("collapse",),
    ),
)

NO_SIGNAL = next(rule for rule in RULES if rule.name == "no_signal")
