"""Choose how many GPUs train and generate, and whether ranks hold shards. Imports no torch.

A run gets as many of a machine's GPUs as it has work for. Either every GPU trains and generates in turn, or
some train and the others generate. There are no more ranks and no more engines than groups. Of the divisions
that fit into memory, whole or in shards, each with its own best sizes (:mod:`~torchrl_grpo.planning.sizes`),
the one with the shortest predicted round is chosen. If seconds cannot be predicted, groups are counted: each
rank trains ``ceil(groups / ranks)`` of them and each engine generates ``ceil(groups / engines)``.

With numbers that are given, by the configuration or by a launcher, ranks hold the whole model if it fits, and
shards if only shards do.

The choice is a set of overrides, as a user could write them. Training ranks and a resumed run read them like
any others. :mod:`~torchrl_grpo.planning.placement` places the numbers on devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import frozen_model, needs_frozen_model, num_devices, optim_batch_size
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.values import Parallelism
from torchrl_grpo.planning import preflight, sizes
from torchrl_grpo.planning.advice import Changes, apply
from torchrl_grpo.planning.cost import cost_of
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.request import reward_gpus
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.hardware import Hardware

_TRAIN, _INFERENCE = "train_model.num_devices", "inference_model.num_devices"


@dataclass(frozen=True)
class Division:
    """How many GPUs train, and how many generate.

    Attributes:
        ranks: number of training ranks, each with one GPU.
        engine_gpus: number of GPUs that generate. An engine may have several of them.
        shared: whether each rank's GPU has an engine too.
    """

    ranks: int
    engine_gpus: int
    shared: bool


@dataclass(frozen=True)
class Choice:
    """The overrides of the chosen division, and the next best plan.

    Attributes:
        changes: overrides; empty if the configuration decides, or if nothing fits.
        other: the next best plan of the first job, of another kind if possible.
    """

    changes: Changes = ()
    other: Planned | None = None


def choose(configs: Sequence[Config], asynchronous: bool, hardware: Hardware) -> Choice:
    """Choose as many GPUs as there is work for, and shards if they are faster or nothing else fits.

    Args:
        configs: configurations of the jobs of one command, which run in the same training ranks.
        asynchronous: whether the script is grpo-async.py.
        hardware: hardware to plan for.

    Raises:
        ModelError: a model's files are damaged.
    """
    # Those of reward models are theirs alone.
    kept = max(len({gpu for _, gpu in reward_gpus(cfg)}) for cfg in configs)
    gpus, may_shard = len(hardware.gpus) - kept, all(_may_shard(cfg) for cfg in configs)
    divides = gpus > 1 and not rank_env.launched() and all(_leaves_open(cfg) for cfg in configs)
    shards = list(_shards(configs[0], gpus)) if may_shard else []
    if not (divides or shards):
        return Choice()
    shapes = [preflight.shape_of(cfg) for cfg in configs]

    def plans(changes: Changes, fits: Callable[[Planned], bool]) -> list[Planned] | None:
        """Return the plans of all jobs; None if one is invalid or does not fit."""
        job_plans = []
        for cfg, shape in zip(configs, shapes, strict=True):
            planned = preflight.replan(apply(cfg, changes), asynchronous, hardware, shape)
            if planned is None or not fits(planned):
                return None
            job_plans.append(planned)
        return job_plans

    if divides:
        divisions: list[tuple[float, int, bool, float, int, Changes, Planned]] = []
        for division in _divisions(configs[0], asynchronous, gpus):
            for parallelism in (None, Parallelism.fsdp2) if may_shard and division.ranks > 1 else (None,):
                changes = _changes(configs[0], division, parallelism)
                planned = plans(changes, sizes.is_roomy)
                if planned is not None:
                    idle = max(len(job.plan.idle) for job in planned)
                    step, work = map(sum, zip(*(_step(job, division) for job in planned), strict=True))
                    shards_used = parallelism is not None
                    divisions.append((step, idle, shards_used, work, division.ranks, changes, planned[0]))
        if divisions:
            least = min(step for step, *_ in divisions)
            # Among equally fast divisions, prefer fewer idle GPUs, whole models, less work, and fewer ranks.
            equal = [division for division in divisions if division[0] <= sizes.EQUALLY_FAST * least]
            *_, changes, best = min(equal, key=lambda division: division[1:5])
            divisions.sort(key=lambda division: division[:5])
            others = sorted((job for *_, job in divisions if job is not best), key=best.resembles)
            return Choice(changes, next(iter(others), None))
    # A plan that may be a little too large is better than none, but no better than shards that fit.
    for fits in (_fits, preflight.is_tolerable):
        for changes in ((), *shards) if shards else ():
            if plans(changes, fits) is not None:
                return Choice(changes)
    return Choice()


def _shards(cfg: Config, gpus: int) -> Iterator[Changes]:
    """Yield changes with which several ranks hold shards: as many ranks as given, or as possible."""
    sharded: Changes = (("train_model.parallelism", Parallelism.fsdp2),)
    if max(num_devices(cfg.train_model), rank_env.world_size()) > 1:
        yield sharded
    elif cfg.train_model.num_devices == "auto" and cfg.train_model.devices is None:
        for count in range(gpus, 1, -1):
            yield ((_TRAIN, count), *sharded)


def overrides(changes: Changes) -> list[str]:
    """Return a choice as overrides of the command line."""
    return [f"{key}={show(value)}" for key, value in changes]


def written(changes: Changes) -> str:
    """Return a choice as a line for the user; empty if there is none."""
    return f"devices: auto chose {' '.join(overrides(changes))}\n" if changes else ""


def _leaves_open(cfg: Config) -> bool:
    """Return whether the planner may choose a number. Lists of GPUs, and a cluster, are the user's choice."""
    roles = (cfg.train_model, cfg.inference_model, frozen_model(cfg))
    decided = cfg.allocation_mode is not None or cfg.ray.address is not None
    named = decided or any(role.devices is not None for role in roles)
    return not named and "auto" in (cfg.train_model.num_devices, _engines(cfg))


def _engines(cfg: Config) -> int | str:
    servers = cfg.inference_model.servers
    return cfg.inference_model.num_devices if servers == "auto" else len(servers)


def _may_shard(cfg: Config) -> bool:
    may_divide = cfg.train_model.lora.rank == 0 and cfg.optimizer.name != "adamw_8bit"
    return cfg.train_model.parallelism == "auto" and may_divide


def _groups(cfg: Config) -> int:
    return max(1, optim_batch_size(cfg) // cfg.env.repeats)


def _step(planned: Planned, division: Division) -> tuple[float, float]:
    """Return the time of a round, and the time of all phases, in seconds or, without any, in groups."""
    if (cost := cost_of(planned)) is not None:
        return cost.step, cost.generate + cost.prepare + cost.train + cost.publish
    cfg, groups = planned.cfg, _groups(planned.cfg)
    # A round may have several optimizer batches, and each has the same share of the round's groups.
    train = -(-groups // division.ranks) * cfg.env.num_envs / groups
    options = cfg.inference_model
    size = options.tensor_parallel_size * options.pipeline_parallel_size
    # The GPUs of one engine generate the same groups.
    generate = -(-cfg.env.num_envs // max(1, division.engine_gpus // size))
    return max(train, generate) if planned.asynchronous else train + generate, train + generate


def _divisions(cfg: Config, asynchronous: bool, gpus: int) -> Iterator[Division]:
    """Yield the divisions of the GPUs that agree with the numbers in the configuration."""
    asked_ranks, asked_engines = cfg.train_model.num_devices, _engines(cfg)
    elsewhere = cfg.inference_model.servers != "auto"
    reference = _reference(cfg)
    for ranks in range(1, gpus - reference + 1):
        if asked_ranks not in ("auto", ranks):
            continue
        if elsewhere:
            assert isinstance(asked_engines, int)
            yield Division(ranks, asked_engines, shared=False)
            continue
        for engines in range(1, gpus - reference - ranks + 1):
            if asked_engines in ("auto", engines):
                yield Division(ranks, engines, shared=False)
    # If every GPU trains, none is left for other roles. Then engines share the trainer's GPUs if their number
    # is not given.
    takes_turns = not asynchronous and not elsewhere and asked_engines == "auto"
    if takes_turns and asked_ranks in ("auto", gpus) and reference == 0:
        yield Division(gpus, gpus, shared=True)


def _reference(cfg: Config) -> int:
    """Return the number of GPUs that only the frozen model may use.

    It is 0 where the number is not given. Then it has a GPU if one is left, and else shares the trainer's.
    """
    adapter_off = cfg.train_model.lora.rank > 0 and cfg.policy.distill_coef == 0
    count = frozen_model(cfg).num_devices
    return count if needs_frozen_model(cfg.policy) and not adapter_off and isinstance(count, int) else 0


def _changes(cfg: Config, division: Division, parallelism: Parallelism | None) -> Changes:
    changes: Changes = ()
    if cfg.train_model.num_devices == "auto" and division.ranks > 1:
        changes += ((_TRAIN, division.ranks),)
    if cfg.inference_model.num_devices == "auto" and not division.shared and division.engine_gpus > 1:
        changes += ((_INFERENCE, division.engine_gpus),) if cfg.inference_model.servers == "auto" else ()
    if parallelism is not None and division.ranks > 1:
        changes += (("train_model.parallelism", parallelism),)
    return changes


def _fits(planned: Planned) -> bool:
    return planned.prediction is None or sizes.fits(planned)
