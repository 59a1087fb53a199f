"""What the rules need of a run's configuration and of its earlier lines, in a size that does not grow."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.config.builtin import NO_REWARDS
from torchrl_grpo.observe.held_out import HeldOut, held_out

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``. A value that was not finite is None."""

# Below this mean difference in nats, engine and trainer both compute in float32. In the quick start it was
# 1e-5 in float32, and 0.04 to 0.11 in bfloat16.
_FLOAT32_NATS = 1e-3
# That each of so many problems gets the same grade, and later each the same worse one, has a chance below
# 5 % if nothing has changed: it is 2 of 70 permutations.
_FEWEST = 4


@dataclass(frozen=True)
class Setting:
    """The part of a configuration that thresholds depend on.

    Attributes:
        float32: whether engine and trainer both compute in float32; None if ``auto`` decides.
        quantized: whether the engine or the trainer has weights of fewer than 16 bits.
        kl_estimator: value of ``policy.kl_estimator``.
        samples: responses to a prompt.
        has_baseline: whether a group of equal rewards teaches nothing.
        has_teacher: whether a teacher judges each token.
    """

    float32: bool | None = None
    quantized: bool = False
    kl_estimator: str = "k3"
    samples: int = 1
    has_baseline: bool = True
    has_teacher: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Setting:
        """Return what a configuration says, as a mapping of sections.

        Raises:
            KeyError: a key is missing.
            TypeError: it is no mapping, or a section is none.
            ValueError: ``env.repeats`` is no number from 1 on.
            OverflowError: it is larger than any float.
        """
        engine, trainer = _section(config, "inference_model"), _section(config, "train_model")
        policy = _section(config, "policy")
        formats = {str(engine["dtype"]), str(trainer["autocast"])}
        # Shares are raised to this power.
        if (samples := int(float(_section(config, "env")["repeats"]))) < 1:
            raise ValueError(f"env.repeats={samples}: it must be at least 1")
        # Runs of earlier versions have no such key.
        has_teacher = float(policy.get("distill_coef", 0.0)) != 0
        known = None if "auto" in formats else formats == {"float32", "no"}
        return cls(
            float32=False if formats & {"bfloat16", "float16", "bf16", "fp16"} else known,
            quantized=str(trainer["quantization"]) != "none" or "quantization" in engine["engine_args"],
            kl_estimator=str(policy["kl_estimator"]),
            samples=samples,
            has_baseline=not has_teacher and str(policy["advantage_estimator"]) != "reward",
            has_teacher=has_teacher,
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration, which may come from a damaged file."""
    if not isinstance(config, Mapping):
        raise TypeError("it has no sections")
    if not isinstance(section := config[name], Mapping):
        raise TypeError(f"{name} is of the type {type(section).__name__} and no section")
    return section


class Past:
    """The earlier lines of a run.

    Args:
        setting: what the configuration says.

    Attributes:
        has_rounds: whether a round with rewards came; supervised fine-tuning has none.
        has_signal: whether a group of the present round had different rewards; True without rewards.
        lost: largest factor by which the entropy has changed since the last round with a signal, if rewards
            have fallen below those of all rounds with a signal; 1 otherwise.
        fall: fall of the held-out value from its best, over the sum of the half intervals between them.
        risen: reward, or part of it, that is higher since the last evaluation than before the best one, and
            rose most; None if none is.
        shorter: factor by which held-out responses have become shorter than in the first evaluation, if
            rewards rose and the held-out value stayed within the 95 % interval of that one, or below it; 1
            otherwise.
        constant: expected share of groups without a signal, by the accuracy of the first evaluation; None
            without one.
        float32: whether engine and trainer both compute in float32.
        parameters: number of the model's parameters; None before a publication.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.has_rounds = False
        self.has_signal = True
        self.lost = 1.0
        self.fall = 0.0
        self.risen: str | None = None
        self.shorter = 1.0
        self.constant: float | None = None
        self.float32 = bool(setting.float32)
        self.parameters: float | None = None
        self._entropy: float | None = None
        self._lowest = math.inf
        self._first: HeldOut | None = None
        self._first_length: float | None = None
        self._best: HeldOut | None = None
        # Mean rewards before the first and before the best evaluation, by name.
        self._first_rewards: dict[str, float] = {}
        self._best_rewards: dict[str, float] = {}
        # Sums and numbers of the rewards since the last evaluation.
        self._sums, self._counts = defaultdict[str, float](float), Counter[str]()

    def take(self, row: Row) -> None:
        """Add a line, before rules read it."""
        self._take_publication(row)
        if row.get("reward/constant_groups") is not None:
            self.has_rounds = True
            self._take_round(row)
        present = held_out(row)
        if present is not None:
            self._take_evaluation(present, row)

    def _take_publication(self, row: Row) -> None:
        rate, seconds = row.get("throughput/published_parameters_per_s"), row.get("time/publish_s")
        if rate is None or seconds is None or self.parameters is not None:
            return
        self.parameters = rate * seconds
        nats = row.get("publish/logprob_diff_mean")
        if self.setting.float32 is None and nats is not None:
            self.float32 = nats < _FLOAT32_NATS

    def _take_round(self, row: Row) -> None:
        reward, entropy = row.get("reward/mean"), row.get("policy/entropy")
        if reward is None:
            return
        rewards = rewards_of(row)
        for name, value in rewards.items():
            self._sums[name] += value
            self._counts[name] += 1
        # No round comes before the evaluation before training, so the first one stands in for it.
        self._first_rewards = self._first_rewards or rewards
        self._best_rewards = self._best_rewards or rewards
        self.has_signal = row["reward/constant_groups"] < 1
        if self.has_signal:
            self.lost, self._entropy, self._lowest = 1.0, entropy, min(self._lowest, reward)
        elif reward < self._lowest and entropy and self._entropy:
            self.lost = max(self.lost, entropy / self._entropy, self._entropy / entropy)

    def _take_evaluation(self, present: HeldOut, row: Row) -> None:
        rewards = {name: self._sums[name] / count for name, count in self._counts.items()}
        self._sums, self._counts = defaultdict(float), Counter()
        length = row.get("eval/response_length")
        if self._first is None:
            self._first, self._first_length = present, length
            self.constant = self._expected_constant(row)
        # Of few problems, one more is right by chance.
        is_better = present.value > self._first.high
        is_paid = _largest_rise(self._first_rewards, rewards) is not None and not is_better
        self.shorter = self._first_length / length if is_paid and length and self._first_length else 1.0
        best = self._best
        if best is None or present.value > best.value:
            self._best, self.fall, self.risen = present, 0.0, None
            self._best_rewards = rewards or self._best_rewards
            return
        fall, room = best.value - present.value, best.value - best.low + present.high - present.value
        # Grades that are all the same have intervals without a width, and means that differ by rounding.
        if math.isclose(best.value, present.value, rel_tol=1e-6, abs_tol=1e-9):
            self.fall = 0.0
        elif room > 0:
            self.fall = fall / room
        else:
            self.fall = math.inf if (row.get("eval/num_problems") or 0) >= _FEWEST else 0.0
        self.risen = _largest_rise(self._best_rewards, rewards)

    def _expected_constant(self, row: Row) -> float | None:
        accuracy = row.get("eval/accuracy")
        return None if accuracy is None else constant_share(accuracy, self.setting.samples)


def rewards_of(row: Row) -> dict[str, float]:
    """Return the mean rewards of a line by their metrics: the total, each reward, and each part of one."""
    return {
        name: value
        for name, value in row.items()
        if name == "reward/mean"
        or (name.startswith("reward/") and name.removeprefix("reward/") not in NO_REWARDS)
        if value is not None
    }


def constant_share(accuracy: float, samples: int) -> float:
    """Return the expected share of groups whose responses are all right or all wrong: ``p^G + (1 - p)^G``."""
    # A line that is damaged may have any number.
    share = min(max(accuracy, 0.0), 1.0)
    return float(share**samples + (1 - share) ** samples)


def group_size_note(metrics: Row, samples: int) -> str | None:
    """Say how many groups will have no signal, by the accuracy before training; None without one.

    Args:
        metrics: metrics of the evaluation.
        samples: responses to a prompt.
    """
    accuracy = metrics.get("eval/accuracy")
    if accuracy is None or samples < 2:
        return None
    now, larger = constant_share(accuracy, samples), constant_share(accuracy, 2 * samples)
    return (
        f"group size: with an accuracy of {accuracy:.3f}, {now:.0%} of the groups of env.repeats={samples} "
        f"would be all right or all wrong, and {larger:.0%} with env.repeats={2 * samples}; rewards that "
        "grade partial success give more groups a signal"
    )


def equal_grades_note(metrics: Row, grader: str) -> str | None:
    """Say what is measured if a reward of the user may give verdicts, which its values do not show yet.

    Args:
        metrics: metrics of an evaluation whose grades are all 0 or all 1, or others.
        grader: name of the reward.
    """
    value = metrics.get("eval/primary")
    # What a failed call counts as says nothing about the reward.
    if value not in (0.0, 1.0) or "eval/accuracy" in metrics or metrics.get("eval/errors"):
        return None
    return (
        f"{grader} gave {value:.0f} for every held-out response, so its mean is reported until it also gives "
        f"{1 - value:.0f} and nothing else; eval.threshold=1 reports the share of responses that earn 1"
    )


def _largest_rise(before: Mapping[str, float], after: Mapping[str, float]) -> str | None:
    """Return the name of what rose: the total if it did, or else the part that rose most; None if none did.

    A part has to rise by a tenth of its value, because one of many is always somewhat higher by chance.
    """
    rises = {name: value - before[name] for name, value in after.items() if name in before}
    if rises.get("reward/mean", 0.0) > 0:
        return "reward/mean"
    parts = {name: rise for name, rise in rises.items() if rise > 0.1 * abs(after[name])}
    return max(parts, key=lambda name: parts[name], default=None)
