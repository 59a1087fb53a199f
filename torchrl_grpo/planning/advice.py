"""Advise overrides for a run that needs more memory than the devices have.

Every piece of advice is a set of overrides. The changed configuration was planned again, and it fits.
Overrides that only process less at a time, and do not change the result of training, come first. Shards on
more devices, and adapters, are advised only if those overrides are not enough. This module does not decide
whether a configuration fits; :mod:`~torchrl_grpo.planning.preflight` does.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import schedule
from torchrl_grpo.config.derived import token_budget
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.resume import is_changeable_on_resume
from torchrl_grpo.config.values import VLLM_BACKENDS
from torchrl_grpo.runtime import rank_env

if TYPE_CHECKING:
    from torchrl_grpo.planning.plan import Plan
    from torchrl_grpo.planning.preflight import Planned

_SUGGESTIONS = 3
# The advice never makes prompts shorter than this many tokens, or evaluations than this many problems.
_LEAST_PROMPT, _LEAST_PROBLEMS = 128, 50
# Rank of the adapters that are advised.
_RANK = 16

# A dotted key and its value.
Change = tuple[str, Any]
Changes = tuple[Change, ...]
# Plans a configuration. Returns None if it is invalid or does not match the devices.
Planner = Callable[[Config], "Planned | None"]


def advise(cfg: Config, plan: Planner, fits: Callable[[Planned], bool], mild: bool = False) -> list[str]:
    """Return at most three sets of overrides with which a configuration fits; each was planned again.

    Args:
        cfg: configuration that does not fit.
        plan: function that plans a changed configuration.
        fits: function that returns whether the devices have enough memory for a plan.
        mild: whether to leave out advice that shards or quantizes the model or trains only adapters.
    """
    found = list(itertools.islice(_fitting(cfg, [()], plan, fits), _SUGGESTIONS))
    if found or mild:
        return found
    shards, adapters, packed = (
        next(_fitting(cfg, list(way), plan, fits), None)
        for way in (_in_shards(cfg, plan), _adapters(cfg), _in_4_bits(cfg))
    )
    return [one for one in (shards, adapters or packed) if one is not None]


def apply(cfg: Config, changes: Changes) -> Config:
    """Return a copy of the configuration with other values."""
    other = copy.deepcopy(cfg)
    for key, value in changes:
        section, _, leaf = key.rpartition(".")
        setattr(attrgetter(section)(other), leaf, value)
    return other


def _in_shards(cfg: Config, plan: Planner) -> Iterator[Changes]:
    """Yield changes that use more training ranks, each of which holds a shard of the model."""
    kind, devices = cfg.train_model.parallelism, cfg.train_model.devices
    now = plan(cfg)
    if now is None or now.plan.num_gpus < 2 or cfg.train_model.lora.rank > 0 or rank_env.launched():
        # A launcher fixes the number of ranks.
        return
    divided: Changes = (("train_model.parallelism", "fsdp2"),) if kind in ("auto", "ddp") else ()
    ranks = len(now.plan.train.devices)
    if divided and ranks > 1:
        yield divided
    if devices is not None:
        return
    counts = range(ranks + 1, now.plan.num_gpus + 1)
    # Try numbers of ranks that divide the groups evenly first.
    for count in sorted(counts, key=lambda number: (cfg.env.num_envs % number != 0, number)):
        yield (("train_model.num_devices", count), *divided)


def _adapters(cfg: Config) -> Iterator[Changes]:
    """Yield changes that train adapters, on the requested ranks or on one rank.

    With one rank, a GPU may become free for the engine.
    """
    if cfg.train_model.lora.rank > 0:
        return
    changes: Changes = (("train_model.lora.rank", _RANK), *_without_shards(cfg))
    yield changes
    if cfg.train_model.num_devices not in ("auto", 1) and cfg.train_model.devices is None:
        yield (*changes, ("train_model.num_devices", 1))


def _in_4_bits(cfg: Config) -> Iterator[Changes]:
    if cfg.train_model.quantization == "none":
        for changes in list(_adapters(cfg)) or [()]:
            yield (*changes, ("train_model.quantization", "nf4"))


def _without_shards(cfg: Config) -> Changes:
    """Return the changes that adapters require.

    Adapters cannot be sharded. The frozen base model doubles as the reference model, so the reference model
    takes no devices of its own.
    """
    sharded = cfg.train_model.parallelism not in ("auto", "ddp")
    changes: Changes = (("train_model.parallelism", "ddp"),) if sharded else ()
    if cfg.ref_model.devices is not None:
        changes += (("ref_model.devices", None),)
    return changes if cfg.ref_model.num_devices == "auto" else (*changes, ("ref_model.num_devices", "auto"))


def _fitting(
    cfg: Config, way: Sequence[Changes], plan: Planner, fits: Callable[[Planned], bool]
) -> Iterator[str]:
    """Yield advice that starts from one of several alternative changes.

    Advice with few keys comes first. For each key, the mildest change that is enough is advised. The ladder
    of a key lists its changes from the mildest to the strongest; a rung is one of them.
    """
    starts = []
    for changes in way:
        if _may_change(cfg, changes) and (planned := plan(apply(cfg, changes))) is not None:
            starts.append((changes, _ladders(cfg, planned)))

    def enough(changes: Changes) -> bool:
        planned = plan(apply(cfg, changes))
        return planned is not None and fits(planned)

    # If the strongest changes of all keys are not enough together, no subset of them is.
    starts = [(changes, ladders) for changes, ladders in starts if enough(changes + _ends(ladders))]
    fitted: set[str] = set()
    for number in range(max((len(ladders) for _, ladders in starts), default=0) + 1):
        for changes, ladders in starts:
            for chosen in itertools.combinations(ladders, number):
                seen = any(ladder[0][0][0] in fitted for ladder in chosen)
                if seen or not (changes or chosen) or not enough(changes + _ends(chosen)):
                    continue
                more = next((one for one in _rungs(chosen) if enough(changes + one)), ())
                fitted |= {key for key, _ in more}
                yield _written(changes + more)


def _ends(ladders: Sequence[list[Changes]]) -> Changes:
    return tuple(itertools.chain(*(ladder[-1] for ladder in ladders)))


def _rungs(ladders: Sequence[list[Changes]]) -> Iterator[Changes]:
    """Yield the steps of several ladders taken in parallel; a shorter ladder stays at its last rung."""
    for step in range(max(map(len, ladders), default=0)):
        yield tuple(itertools.chain(*(ladder[min(step, len(ladder) - 1)] for ladder in ladders)))


def _written(changes: Changes) -> str:
    overrides = " ".join(f"{key}={show(value)}" for key, value in changes)
    nf4 = ("train_model.quantization", "nf4") in changes
    if nf4 and importlib.util.find_spec("bitsandbytes") is None:
        return f"{overrides} (needs the package bitsandbytes, which is not installed)"
    return overrides


def _may_change(cfg: Config, changes: Changes) -> bool:
    return cfg.resume is None or all(is_changeable_on_resume(key) for key, _ in changes)


def _ladders(cfg: Config, planned: Planned) -> list[list[Changes]]:
    """Return a ladder for each key that can save memory: its changes, the mildest first.

    Keys that do not change the numbers of a run come before keys that do.
    """
    found = [
        *_ladders_of_trainer(cfg),
        *_ladders_of_engine(cfg, planned),
        *_ladders_of_lengths(cfg, planned.plan),
    ]
    return [[(rung,) for rung in ladder] for ladder in found if ladder and _may_change(cfg, (ladder[0],))]


def _ladders_of_trainer(cfg: Config) -> Iterator[list[Change]]:
    longest, budget = cfg.inference_model.max_model_len, token_budget(cfg)
    budgets = [budget // 2**step for step in range(1, 20) if budget // 2**step > longest]
    if budget > longest:
        yield [("train.max_tokens_per_microbatch", tokens) for tokens in [*budgets, longest]]
    if not cfg.train_model.gradient_checkpointing:
        yield [("train_model.gradient_checkpointing", True)]


def _ladders_of_engine(cfg: Config, planned: Planned) -> Iterator[list[Change]]:
    plan, vllm = planned.plan, cfg.inference_model.backend in VLLM_BACKENDS
    on_gpu = plan.num_gpus > 0
    if vllm and not on_gpu:
        # Raise the cache if it is too small for one sequence. Otherwise lower it to the least that one needs.
        fewest, now = planned.least_cache_gib or 1, cfg.inference_model.kv_cache_gib
        sizes = range(now - 1, fewest - 1, -1) if now >= fewest else range(fewest, fewest + 1)
        yield [("inference_model.kv_cache_gib", gib) for gib in sizes]
    # vLLM can sleep on GPUs only. On a CPU, sleep of the transformers engine saved no memory when measured.
    may_sleep = on_gpu and vllm and schedule.may_sleep(cfg)
    if plan.colocated and not plan.inference.own_process and not plan.sleeps and may_sleep:
        yield [("inference_model.sleep", True)]
    if not (vllm and on_gpu):
        return
    if plan.colocated and len(plan.inference.devices) > 1 and cfg.inference_model.num_devices == "auto":
        yield [("inference_model.num_devices", 1)]
    least = planned.least_share
    if least is not None:
        # In steps of 1/20. Raise the share if it is too small for the weights. Otherwise lower it as far as
        # the weights allow.
        lowest, highest = round(least * 20), int(plan.gpu_memory_utilization * 20 - 1e-6)
        steps = (
            range(highest, lowest - 1, -1)
            if plan.gpu_memory_utilization >= least
            else range(lowest, lowest + 1)
        )
        yield [("inference_model.gpu_memory_utilization", step / 20) for step in steps]


def _ladders_of_lengths(cfg: Config, plan: Plan) -> Iterator[list[Change]]:
    longest = cfg.inference_model.max_model_len
    least = cfg.inference_model.max_new_tokens + _LEAST_PROMPT
    yield [
        ("inference_model.max_model_len", length)
        for length in (longest // 2, longest // 4)
        if length >= least
    ]
    if plan.reference_actors > 1:
        yield [("ref_model.num_devices", count) for count in range(plan.reference_actors - 1, 0, -1)]
    if cfg.eval.num_problems > _LEAST_PROBLEMS:
        yield [("eval.num_problems", _LEAST_PROBLEMS)]
