"""Rewards by name, each data set's default weights, and the grader that goes with a run's rewards."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import REWARD_READS
from torchrl_grpo.config.values import DATASETS
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.format import FormatReward
from torchrl_grpo.rewards.graders import AccuracyGrader, CountingGrader, Gsm8kGrader
from torchrl_grpo.rewards.gsm8k import Gsm8kReward
from torchrl_grpo.rewards.ifeval import IFEvalGrader, IFEvalReward
from torchrl_grpo.rewards.math_verify import MathVerifyReward
from torchrl_grpo.rewards.reasoning_gym import ReasoningGymReward
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rewards.text import BareNumberReward, ClosenessReward, ExactMatchReward
from torchrl_grpo.rewards.types import Grader, Reward

#: Used where ``reward.weights`` is empty.
DEFAULT_WEIGHTS: dict[str, dict[str, float]] = {
    "gsm8k": {"gsm8k": 1.0, "format": 0.1},
    "math": {"math_verify": 1.0, "format": 0.1},
    "reasoning_gym": {"reasoning_gym": 1.0},
    "jsonl": {"exact_match": 1.0},
    "ifeval": {"ifeval": 1.0},
}


def _gsm8k(cfg: Config) -> Reward:
    # Who asks for tags wants them used; who asks for nothing takes the number wherever it stands.
    return Gsm8kReward("strict" if cfg.env.answer_format == "tags" else "flexible")


REWARDS: dict[str, Callable[[Config], Reward]] = {
    "gsm8k": _gsm8k,
    "format": lambda cfg: FormatReward(),
    "math_verify": lambda cfg: MathVerifyReward(cfg.reward.timeout_s, cfg.reward.workers),
    "reasoning_gym": lambda cfg: ReasoningGymReward(
        cfg.env.answer_format, cfg.reward.timeout_s, cfg.reward.workers
    ),
    "ifeval": lambda cfg: IFEvalReward(),
    "exact_match": lambda cfg: ExactMatchReward(cfg.env.answer_format),
    "bare_number": lambda cfg: BareNumberReward(cfg.env.answer_format),
    "closeness": lambda cfg: ClosenessReward(cfg.env.answer_format),
}


def check_weights(cfg: Config) -> dict[str, float]:
    """The weights of a run, after every check that starts nothing.

    Args:
        cfg: ``reward.weights`` and ``env.dataset`` are read.

    Returns:
        Reward name -> weight; the data set's defaults where the configuration gives none.

    Raises:
        ConfigError: a name is unknown, a weight is not finite, a reward cannot judge the data set, or all
            weights are 0.
    """
    weights = cfg.reward.weights or DEFAULT_WEIGHTS[cfg.env.dataset]
    for name, weight in weights.items():
        if name not in REWARDS:
            raise ConfigError(
                f"reward.weights.{name}={weight!r}: no such reward; write one of: {', '.join(REWARDS)}"
            )
        if not math.isfinite(weight):
            raise ConfigError(f"reward.weights.{name}={weight!r} is not a finite number; write e.g. 1.0")
        if cfg.env.dataset not in (reads := REWARD_READS.get(name, DATASETS)):
            raise ConfigError(
                f"reward.weights.{name}: this reward cannot judge env.dataset={cfg.env.dataset}; it reads "
                f"{', '.join(reads)}. Write e.g. reward.weights={DEFAULT_WEIGHTS[cfg.env.dataset]}"
            )
    if not any(weights.values()):
        raise ConfigError(
            f"reward.weights={dict(weights)!r} are all 0, so nothing is rewarded; give one a weight"
        )
    return dict(weights)


def build(cfg: Config) -> RewardSet:
    """The rewards of a run; worker processes start here, so close the result.

    Args:
        cfg: ``reward``, ``env.dataset`` and ``env.answer_format`` are read.

    Returns:
        The rewards, combined.

    Raises:
        ConfigError: see :func:`check_weights`.
    """
    pairs = [(REWARDS[name](cfg), weight) for name, weight in check_weights(cfg).items()]
    return RewardSet(pairs, cfg.reward.on_error, cfg.reward.workers)


#: The rewards that say right or wrong, and the one that grades where none of them has a weight.
JUDGES = ("gsm8k", "math_verify", "exact_match", "reasoning_gym", "ifeval")
_OWN_JUDGE = {
    "gsm8k": "gsm8k",
    "math": "math_verify",
    "reasoning_gym": "reasoning_gym",
    "jsonl": "exact_match",
    "ifeval": "ifeval",
}


def judge(cfg: Config) -> str:
    """The reward whose verdict evaluation reports: of the judges rewarded, the one with the largest weight.

    Args:
        cfg: ``reward.weights`` and ``env.dataset`` are read.

    Returns:
        Its name; the data set's own judge where none is rewarded, or where it is among several with the
        largest weight, or else the first of these.
    """
    weights = cfg.reward.weights or DEFAULT_WEIGHTS[cfg.env.dataset]
    own = _OWN_JUDGE[cfg.env.dataset]
    rewarded = {name: weight for name, weight in weights.items() if name in JUDGES and weight > 0}
    heaviest = [name for name, weight in rewarded.items() if weight == max(rewarded.values())]
    return own if own in heaviest or not heaviest else heaviest[0]


def grader(cfg: Config, shared: RewardSet | None = None) -> CountingGrader:
    """The grader of a run, which follows its rewards (:func:`judge`); it may start workers, so close it.

    Args:
        cfg: ``env.dataset``, ``env.answer_format`` and ``reward`` are read.
        shared: the run's rewards. Where the grader needs a reward that is among them, it uses that one and
            its worker processes instead of starting its own; close the grader before the rewards.

    Returns:
        A grader that counts its errors.
    """
    inner: Grader
    name = judge(cfg)
    if name == "gsm8k":
        inner = Gsm8kGrader()
    elif name == "ifeval":
        inner = IFEvalGrader()
    else:
        reward = shared.get(name) if shared is not None else None
        inner = AccuracyGrader(reward or REWARDS[name](cfg), owned=reward is None)
    return CountingGrader(inner)
