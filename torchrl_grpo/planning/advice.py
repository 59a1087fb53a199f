"""Advise overrides for a run that needs more memory than the devices have.

Every piece of advice is a set of overrides. The changed configuration was planned again, and it fits.
Overrides that only process less at a time, and do not change the result of training, come first. Shards on
more devices, and adapters, are advised only if those overrides are not enough; shorter responses and smaller
rounds only if nothing else is. Few keys come before many. This module does not decide whether a configuration
fits; :mod:`~torchrl_grpo.planning.preflight` does.

A ladder lists the changes of a key, from the mildest to the strongest; a rung is one of them. Texts of
another length have other ladders, so each length starts a search of its own.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import schedule
from torchrl_grpo.config.derived import frozen_model, held_out_problems, token_budget
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.resume import is_changeable_on_resume
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.runtime import rank_env

_SUGGESTIONS = 3
# The advice never makes prompts and responses shorter than this many tokens, or evaluations than this many
# problems.
_LEAST_PROMPT, _LEAST_RESPONSE, _LEAST_PROBLEMS = 128, 128, 50
# Rank of the adapters that are advised.
_RANK = 16

# A dotted key and its value.
Change = tuple[str, Any]
Changes = tuple[Change, ...]
# Plans a configuration. Returns None if it is invalid or does not match the devices.
Planner = Callable[[Config], Planned | None]
# Returns the rungs of a key for a plan; none if the key saves nothing.
Ladder = Callable[[Planned], list[Change]]


def advise(cfg: Config, plan: Planner, fits: Callable[[Planned], bool], mild: bool = False) -> list[str]:
    """Return at most three sets of overrides with which a configuration fits; each was planned again.

    Args:
        cfg: configuration that does not fit.
        plan: function that plans a changed configuration.
        fits: function that returns whether the devices have enough memory for a plan.
        mild: whether to leave out advice that shards or quantizes the model, trains only adapters, or
            shortens responses and rounds.
    """
    search = _Search(cfg, plan, fits)
    suggestions = list(itertools.islice(search.fitting([()]), _SUGGESTIONS))
    if suggestions or mild:
        return suggestions
    ways = [list(way) for way in (_in_shards(cfg, plan), _adapters(cfg), _in_4_bits(cfg))]
    shards, adapters, packed = (next(search.fitting(way), None) for way in ways)
    suggestions = [way for way in (shards, adapters or packed) if way is not None]
    if suggestions:
        return suggestions
    every, smaller = [(), *itertools.chain(*ways)], list(_smaller(cfg))
    every = [changes for changes in every if smaller and not search.is_hopeless(changes + smaller[-1])]
    return list(itertools.islice(search.fitting([more + less for less in smaller for more in every]), 1))


def apply(cfg: Config, changes: Changes) -> Config:
    """Return a copy of the configuration with other values, which shares the sections that do not change."""
    other = copy.copy(cfg)
    for key, value in changes:
        *sections, leaf = key.split(".")
        section: Any = other
        for name in sections:
            setattr(section, name, copy.copy(getattr(section, name)))
            section = getattr(section, name)
        setattr(section, leaf, value)
    return other


def _in_shards(cfg: Config, plan: Planner) -> Iterator[Changes]:
    """Yield changes that use more training ranks, each of which holds a shard of the model."""
    kind, devices = cfg.train_model.parallelism, cfg.train_model.devices
    now = plan(cfg)
    if now is None or cfg.train_model.lora.rank > 0:
        return
    divided: Changes = (("train_model.parallelism", "fsdp2"),) if kind in ("auto", "ddp") else ()
    if divided and now.plan.num_ranks > 1:
        yield divided
    if devices is not None or rank_env.launched():
        # A launcher fixes the number of ranks.
        return
    counts = range(len(now.plan.train.devices) + 1, now.plan.num_gpus + 1)
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


def _smaller(cfg: Config) -> Iterator[Changes]:
    """Yield changes that shorten responses or make a round smaller, by halves; the strongest is last."""
    longest, response = cfg.inference_model.max_model_len, cfg.inference_model.max_new_tokens
    fewer: list[tuple[str, int, int]] = [
        ("env.num_envs", cfg.env.num_envs, 1),
        ("env.repeats", cfg.env.repeats, 2),
    ]

    def shorter(step: int) -> Changes:
        tokens = max(_LEAST_RESPONSE, response // 2**step)
        length = max(tokens + _LEAST_PROMPT, longest // 2**step)
        if tokens >= response or length >= longest:
            return ()
        return (("inference_model.max_new_tokens", tokens), ("inference_model.max_model_len", length))

    def smaller(key: str, count: int, least: int, step: int) -> Changes:
        return ((key, max(least, count // 2**step)),) if count > least else ()

    steps = range(1, max(longest, cfg.env.num_envs, cfg.env.repeats).bit_length())
    alone = [[shorter(step) for step in steps]]
    alone += [[smaller(*changes, step) for step in steps] for changes in fewer]
    together = [sum(parts, ()) for parts in zip(*alone, strict=True)]
    for changes in dict.fromkeys(itertools.chain(*alone, together)):
        if changes:
            yield changes


class _Search:
    """Search for changes with which a configuration fits.

    Args:
        cfg: configuration that does not fit.
        plan: see :func:`advise`.
        fits: see :func:`advise`.
    """

    def __init__(self, cfg: Config, plan: Planner, fits: Callable[[Planned], bool]) -> None:
        self._cfg = cfg
        self._fits = fits
        self._plan: Callable[[Changes], Planned | None] = functools.cache(
            lambda changes: plan(apply(cfg, changes))
        )

    def fitting(self, ways: Sequence[Changes]) -> Iterator[str]:
        """Yield advice that starts from one of several alternative changes.

        Advice with few keys comes first. A key is in one piece of advice only, with the mildest change that
        is enough.
        """
        starts = [start for way in ways if self._may_change(way) for start in self._starts(way)]
        advised: set[str] = set()
        most = max((len(changes) + len(ladders) for changes, ladders in starts), default=0)
        for number in range(1, most + 1):
            for changes, ladders in starts:
                if number < len(changes):
                    continue
                for chosen in itertools.combinations(ladders, number - len(changes)):
                    mildest = self._mildest(changes, chosen)
                    if mildest is not None and advised.isdisjoint(key for key, _ in mildest):
                        advised |= {key for key, _ in mildest}
                        yield _written(mildest)

    def is_hopeless(self, way: Changes) -> bool:
        """Return whether a configuration is valid, and nothing is enough with it."""
        return self._plan(way) is not None and not self._starts(way)

    def _starts(self, way: Changes) -> list[tuple[Changes, list[Ladder]]]:
        """Return a way with texts of each length, and its ladders, where all of them together are enough."""
        starts: list[tuple[Changes, list[Ladder]]] = []
        lengths = [length for length in _lengths(apply(self._cfg, way)) if self._may_change(length)]
        for length in reversed(lengths):
            changes = tuple(dict(way + length).items())
            planned = self._plan(changes)
            ladders = [] if planned is None else [rung for rung in _LADDERS if self._rungs(rung, planned)]
            if self._climb(changes, ladders) is None:
                # If everything together is not enough, it is not with longer texts either.
                break
            starts.append((changes, ladders))
        return starts[::-1]

    def _may_change(self, changes: Changes) -> bool:
        return self._cfg.resume is None or all(is_changeable_on_resume(key) for key, _ in changes)

    def _is_enough(self, changes: Changes) -> bool:
        planned = self._plan(changes)
        return planned is not None and self._fits(planned)

    def _rungs(self, ladder: Ladder, planned: Planned) -> list[Change]:
        rungs = ladder(planned)
        return rungs if self._may_change(tuple(rungs)) else []

    def _climb(self, changes: Changes, ladders: Sequence[Ladder]) -> list[list[Change]] | None:
        """Return the rungs of the ladders; None if the last ones together are not enough."""
        climbed: list[list[Change]] = []
        for ladder in ladders:
            planned = self._plan(changes)
            rungs = [] if planned is None else self._rungs(ladder, planned)
            if not rungs:
                return None
            climbed.append(rungs)
            changes += (rungs[-1],)
        return climbed if self._is_enough(changes) else None

    def _mildest(self, changes: Changes, ladders: Sequence[Ladder]) -> Changes | None:
        """Return changes and the lowest rungs that are enough with them; None if none are."""
        rungs = self._climb(changes, ladders)
        if rungs is None:
            return None

        def at(steps: Sequence[int]) -> Changes:
            return changes + tuple(rungs_of[step] for rungs_of, step in zip(rungs, steps, strict=True))

        # Up all ladders in parallel, and then down each one as far as it goes.
        tops = [len(ladder) - 1 for ladder in rungs]
        parallel = ([min(step, top) for top in tops] for step in range(max(tops, default=0) + 1))
        steps = next(rung_numbers for rung_numbers in parallel if self._is_enough(at(rung_numbers)))
        for number in range(len(steps)):
            while steps[number] > 0 and self._is_enough(
                at([*steps[:number], steps[number] - 1, *steps[number + 1 :]])
            ):
                steps[number] -= 1
        return at(steps)


def _written(changes: Changes) -> str:
    overrides = " ".join(f"{key}={show(value)}" for key, value in changes)
    nf4 = ("train_model.quantization", "nf4") in changes
    if nf4 and importlib.util.find_spec("bitsandbytes") is None:
        return f"{overrides} (needs the package bitsandbytes, which is not installed)"
    return overrides


def _lengths(cfg: Config) -> Iterator[Changes]:
    """Yield no change, and then changes that shorten the longest text by halves."""
    yield ()
    longest = cfg.inference_model.max_model_len
    least = cfg.inference_model.max_new_tokens + _LEAST_PROMPT
    for step in range(1, longest.bit_length()):
        if longest // 2**step >= least:
            yield (("inference_model.max_model_len", longest // 2**step),)


def _tokens(planned: Planned) -> list[Change]:
    cfg = planned.cfg
    longest, budget = cfg.inference_model.max_model_len, token_budget(cfg)
    budgets = [budget // 2**step for step in range(1, 20) if budget // 2**step > longest]
    key = "train.max_tokens_per_microbatch"
    return [(key, tokens) for tokens in [*budgets, longest]] if budget > longest else []


def _checkpointing(planned: Planned) -> list[Change]:
    done = planned.cfg.train_model.gradient_checkpointing
    return [] if done else [("train_model.gradient_checkpointing", True)]


def _parking(planned: Planned) -> list[Change]:
    # By default the planner decides.
    refused = planned.cfg.train_model.offload_optimizer is False and planned.plan.num_gpus > 0
    return [("train_model.offload_optimizer", None)] if refused else []


def _cache(planned: Planned) -> list[Change]:
    options = planned.cfg.inference_model
    if not options.engine.has_known_needs or planned.plan.num_gpus > 0:
        return []
    # Raise the cache if it is too small for one sequence. Otherwise lower it to the least that one needs.
    fewest, now = planned.least_cache_gib or 1, options.kv_cache_gib
    sizes = range(now - 1, fewest - 1, -1) if now >= fewest else range(fewest, fewest + 1)
    return [("inference_model.kv_cache_gib", gib) for gib in sizes]


def _sleep(planned: Planned) -> list[Change]:
    # On a CPU, sleep of the transformers engine saved no memory when measured.
    cfg, plan = planned.cfg, planned.plan
    may = plan.num_gpus > 0 and cfg.inference_model.engine.sleeps_on_gpu and schedule.may_sleep(cfg)
    awake = plan.colocated and not plan.inference.own_process and not plan.sleeps
    return [("inference_model.sleep", True)] if may and awake else []


def _engines(planned: Planned) -> list[Change]:
    options, plan = planned.cfg.inference_model, planned.plan
    if not options.engine.has_known_needs or plan.num_gpus == 0 or options.num_devices != "auto":
        return []
    several = plan.colocated and len(plan.inference.devices) > 1
    return [("inference_model.num_devices", 1)] if several else []


def _reference_copies(planned: Planned) -> list[Change]:
    counts = range(planned.plan.reference_actors - 1, 0, -1)
    return [(f"{frozen_model(planned.cfg).section}.num_devices", count) for count in counts]


def _teacher_format(planned: Planned) -> list[Change]:
    is_open = planned.plan.teaches and frozen_model(planned.cfg).dtype == Dtype.auto
    return [(f"{frozen_model(planned.cfg).section}.dtype", Dtype.bfloat16)] if is_open else []


def _evaluation(planned: Planned) -> list[Change]:
    evaluates_many = held_out_problems(planned.cfg) > _LEAST_PROBLEMS
    return [("eval.num_problems", _LEAST_PROBLEMS)] if evaluates_many else []


def _share(planned: Planned) -> list[Change]:
    on_gpu = planned.cfg.inference_model.engine.has_known_needs and planned.plan.num_gpus > 0
    least, now = planned.least_share, planned.plan.gpu_memory_utilization
    if not on_gpu or least is None:
        return []
    # In steps of 1/20. Raise the share if it is too small for the weights. Otherwise lower it as far as the
    # weights allow.
    lowest, highest = round(least * 20), int(now * 20 - 1e-6)
    steps = range(highest, lowest - 1, -1) if now >= least else range(lowest, lowest + 1)
    return [("inference_model.gpu_memory_utilization", step / 20) for step in steps]


# Keys that do not change the numbers of a run come before keys that do. The share is the last, because the
# least share depends on the others.
_LADDERS: tuple[Ladder, ...] = (
    _tokens,
    _checkpointing,
    _parking,
    _cache,
    _sleep,
    _engines,
    _reference_copies,
    _teacher_format,
    _evaluation,
    _share,
)
