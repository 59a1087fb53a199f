"""The rules by which a run is found to be dead or in danger, in one table.

A rule compares one number of a line of ``metrics.jsonl`` with a threshold. :mod:`torchrl_grpo.observe.guards`
applies the rules to the lines of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.observe.held_out import HeldOut, held_out

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``. A value that was not finite is None."""


class Past:
    """What the rules need of the earlier lines. Its size does not grow with the run.

    Attributes:
        has_signal: whether a group of the present round had different rewards; True without rewards.
        lost: largest factor by which the entropy has changed since the last round with a signal, if rewards
            have fallen below those of all rounds with a signal; 1 otherwise.
        fall: fall of the held-out value from its best, over the sum of the half intervals between them.
        rise: by how much the training rewards before this evaluation exceed those before the best one; None
            without rewards.
    """

    def __init__(self) -> None:
        self.has_signal = True
        self.lost = 1.0
        self.fall = 0.0
        self.rise: float | None = None
        self._entropy: float | None = None
        self._lowest = math.inf
        self._best: HeldOut | None = None
        self._best_reward: float | None = None
        # Sum and number of the mean rewards since the last evaluation.
        self._reward_sum, self._reward_count = 0.0, 0

    def take(self, row: Row) -> None:
        """Add a line, before rules read it."""
        if row.get("reward/constant_groups") is not None:
            self._take_round(row)
        present = held_out(row)
        if present is not None:
            self._take_evaluation(present)

    def _take_round(self, row: Row) -> None:
        reward, entropy = row.get("reward/mean"), row.get("policy/entropy")
        if reward is None:
            return
        self._reward_sum += reward
        self._reward_count += 1
        if self._best_reward is None:
            # No round comes before the evaluation before training, so the first one stands in for it.
            self._best_reward = reward
        self.has_signal = row["reward/constant_groups"] < 1
        if self.has_signal:
            self.lost, self._entropy, self._lowest = 1.0, entropy, min(self._lowest, reward)
        elif reward < self._lowest and entropy and self._entropy:
            self.lost = max(self.lost, entropy / self._entropy, self._entropy / entropy)

    def _take_evaluation(self, present: HeldOut) -> None:
        reward = self._reward_sum / self._reward_count if self._reward_count else None
        self._reward_sum, self._reward_count = 0.0, 0
        best = self._best
        if best is None or present.value > best.value:
            self._best, self.fall, self.rise = present, 0.0, None
            self._best_reward = reward if reward is not None else self._best_reward
            return
        room = best.value - best.low + present.high - present.value
        self.fall = (best.value - present.value) / room if room > 0 else 0.0
        self.rise = None if reward is None or self._best_reward is None else reward - self._best_reward


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
        seen: text of what was seen; ``{row[METRIC]}`` and ``{window}`` may stand in it.
        advice: cause, and the keys to change.
        source: where the threshold comes from.
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
    explained_by: tuple[str, ...] = ()

    def is_bad(self, row: Row, past: Past) -> bool | None:
        """Whether a line shows the sign; None if the line says nothing about it."""
        if self.reads[0] not in row:
            return None
        number = self.number(row, past)
        if number is None:
            return None
        return number <= self.threshold if self.below else number >= self.threshold


def _value(row: Row, name: str) -> float | None:
    value: float | None = row.get(name)
    return value


def _constant(row: Row, past: Past) -> float | None:
    # Without a baseline, and with the KL in the reward, equal rewards still teach.
    return 0.0 if row.get("advantage/abs_mean") else _value(row, "reward/constant_groups")


def _gradient(row: Row, past: Past) -> float | None:
    if not past.has_signal:
        return None
    # A step in which the loss counts no token has no norm.
    return _value(row, "optimizer/grad_norm") if "optimizer/grad_norm" in row else 0.0


def _while_sampling(name: str) -> Callable[[Row, Past], float | None]:
    # Supervised fine-tuning samples nothing, and is to move the model far and make it sure.
    return lambda row, past: _value(row, name) if "policy/ratio" in row else None


def _mismatch(row: Row, past: Past) -> float | None:
    if "mismatch/kl" in row:
        return _value(row, "mismatch/kl")
    # If the present weights are those that sampled, only engine and trainer differ.
    return _value(row, "kl/sampling_policy") if row.get("policy/version") == row["step"] - 1 else None


def _hacked(row: Row, past: Past) -> float | None:
    return past.fall if past.rise is not None and past.rise > 0 else 0.0


def _worse(row: Row, past: Past) -> float | None:
    return past.fall if past.rise is None or past.rise <= 0 else 0.0


RULES = (
    Rule(
        name="reward_fails",
        reads=("reward/constant_groups", "reward/error_share"),
        number=lambda row, past: row.get("reward/error_share", 0.0),
        threshold=1.0,
        window=1,
        unit="round",
        seen="every call of a reward failed",
        advice="correct the function in reward.functions, or what it calls (the run's log and rollouts.jsonl "
        "have each error); until then it counts as reward.on_error",
        source="by definition",
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
        "answers. A model that never ends its turn may have the wrong model.chat_template",
        source="measured: the quick start begins with up to 0.98 and learns; AReaL acts on 0.05",
        explained_by=("collapse",),
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
        window=2,
        unit="step",
        seen="the KL divergence to the reference is {row[kl/reference]:.2g} nats per token",
        advice="the policy has left its reference: lower optimizer.lr, or raise policy.kl_coef "
        "(policy.kl_target adapts it)",
        source="measured: 0.52 at the end of the quick start with policy.kl_coef=1e-3, which learns",
    ),
    Rule(
        name="mismatch",
        reads=("reward/mean", "mismatch/kl", "kl/sampling_policy"),
        number=_mismatch,
        threshold=0.01,
        window=3,
        unit="round",
        seen="engine and trainer disagree with equal weights, in {window} rounds in a row",
        advice="compute alike in both: inference_model.dtype, train_model.autocast, and float32 heads "
        "(train_model.head_dtype, inference_model.head_dtype); policy.proximal=trainer with "
        "policy.correction=truncate corrects what is left",
        source="tinker-cookbook: stable below 0.01; NeMo-RL looks at 0.001",
    ),
    Rule(
        name="reward_hacked",
        reads=("eval/num_problems", "eval/accuracy", "reward/mean"),
        number=_hacked,
        threshold=1.0,
        window=1,
        unit="evaluation",
        seen="the held-out value fell below its best, beyond both 95 % intervals, while rewards rose",
        advice="the rewards pay for something else than the task: read rollouts.jsonl, then change "
        "reward.weights; policy.kl_coef holds the policy back, and train.keep_best keeps the best checkpoint",
        source="95 % intervals that do not meet",
    ),
    Rule(
        name="held_out_falls",
        reads=("eval/num_problems", "eval/accuracy"),
        number=_worse,
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
