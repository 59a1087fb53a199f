"""Choose how many tokens a micro-batch has at most. Imports no torch.

A GPU is fast with large micro-batches: launching a kernel takes a CPU the same time for any number of tokens.
So on GPUs the budget is what the predicted memory leaves. On a CPU it is a fixed number, because larger
products are no faster there.
"""

from __future__ import annotations

import copy
import functools
from bisect import bisect_right
from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import token_budget
from torchrl_grpo.models.shape import ModelShape, Unknown
from torchrl_grpo.planning import memory
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.prediction import GIB, Prediction
from torchrl_grpo.planning.workload import workload_of
from torchrl_grpo.runtime.hardware import Hardware

# Share of a GPU's memory that the trainer's phases may take with the chosen budget. The prediction is
# rarely more than 20 % too low.
_SHARE = 0.8
# More tokens gain nothing: kernels of this size keep any GPU busy.
MOST = 65_536
_STEP = 4096
_NO_BOUND = 10**12
_PHASES = ("prepare", "optimize")


@dataclass(frozen=True)
class Budget:
    """The largest number of tokens in a micro-batch, and why.

    Attributes:
        tokens: number of tokens.
        why: reason for users.
        prediction: memory of the plan with this budget, if the memory decides.
    """

    tokens: int
    why: str
    prediction: Prediction | None = None


def choose(cfg: Config, plan: Plan, shape: ModelShape | Unknown, hardware: Hardware) -> Budget:
    """Choose the token budget of a plan.

    Args:
        cfg: configuration; a value of ``train.max_tokens_per_microbatch`` is taken as it is.
        plan: placement of the roles.
        shape: shape of the model, or the reason why it is unknown.
        hardware: hardware; the memory of each GPU is read.
    """
    least = token_budget(cfg)
    if cfg.train.max_tokens_per_microbatch is not None:
        return Budget(least, "as train.max_tokens_per_microbatch says")
    devices = [name for name in (*plan.train.devices, *plan.reference.devices) if name.startswith("cuda:")]
    sizes = {name: hardware.free_gib(name) for name in devices}
    if isinstance(shape, Unknown) or not plan.train.devices[0].startswith("cuda:") or None in sizes.values():
        why = "the default on a CPU" if not devices else "the default, because the memory is not predicted"
        return Budget(least, why)
    # A larger budget than that of one micro-batch with the longest texts changes nothing.
    whole = workload_of(with_budget(cfg, _NO_BOUND), plan.num_ranks).tokens
    choices = [least, *range(_STEP * (least // _STEP + 1), min(MOST, whole) + _STEP, _STEP)]

    @functools.cache
    def predict(tokens: int) -> Prediction:
        return memory.predict(with_budget(cfg, tokens), plan, shape, hardware)

    def exceeds(tokens: int) -> bool:
        return any(
            gib is not None and predict(tokens).need(name, phase) > _SHARE * gib * GIB
            for name, gib in sizes.items()
            for phase in _PHASES
        )

    fitting = bisect_right(choices, False, key=exceeds)
    if fitting == 0:
        why = f"the least: the longest texts take more than {_SHARE:.0%} of a GPU's memory"
        return Budget(least, why, predict(least))
    tokens = choices[fitting - 1]
    if tokens == choices[-1]:
        why = "the whole step at once" if tokens >= whole else "more gains nothing"
    else:
        why = f"the longest texts then take at most {_SHARE:.0%} of a GPU's memory"
    return Budget(tokens, why, predict(tokens))


def with_budget(cfg: Config, tokens: int) -> Config:
    """Return a copy of the configuration with ``tokens`` in a micro-batch."""
    # A search plans thousands of times, and replace() takes several times as long.
    changed, changed.train = copy.copy(cfg), copy.copy(cfg.train)
    changed.train.max_tokens_per_microbatch = tokens
    return changed
