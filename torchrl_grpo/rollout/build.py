"""Builds the collector of a configuration, with an engine in this process or a group of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import rounds, steps_per_round, total_turns
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.distributed.ranks import cores_to_divide
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import Engine, Inference, SteppingEngine
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.planning.cores import divide_cores
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.workload import max_num_seqs
from torchrl_grpo.rollout.async_collector import AsyncCollector, GroupSource
from torchrl_grpo.rollout.collector import RolloutCollector
from torchrl_grpo.rollout.workers.dispatcher import START_LIMIT_S, Dispatcher
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import Pool, ReferenceClient
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime import rank_env, user_code

if TYPE_CHECKING:
    from torchrl_grpo.rollout.workers.ray_pool import RayPool, WorkerSpec
    from torchrl_grpo.rollout.workers.reference_actors import ReferenceActors

Collection = tuple[Inference, RolloutCollector | AsyncCollector]


class MakeEngine(Protocol):
    """Builds an engine in this process: see :func:`~torchrl_grpo.inference.build.build_engine`."""

    def __call__(
        self,
        cfg: Config,
        source: str,
        device: torch.device,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_num_seqs: int,
        sleeps: bool,
        gpu_memory_utilization: float,
    ) -> Engine:
        """Build it with the weights at ``source``."""


@dataclass(frozen=True)
class EngineSource:
    """Model, devices and options from which engines are built.

    Attributes:
        weights: folder or hub name of the model, or a checkpoint's copy of it.
        model: folder or hub name of the model. A worker may start long after that checkpoint was removed, and
            is given weights before it samples.
        plan: plan of the devices.
        eos_token_ids: tokens that end a response.
        autocast_dtype: dtype of the trainer's autocast, for a reference model in separate processes.
        shares_prefix: whether the trainer computes a prompt once per group; the reference does the same.
        make_engine: function that builds an engine in this process: :func:`build_engine`, or one that builds
            a part of the engine on each rank.
    """

    weights: str
    model: str
    plan: Plan
    eos_token_ids: Sequence[int]
    autocast_dtype: torch.dtype | None
    shares_prefix: bool
    make_engine: MakeEngine = build_engine

    def max_num_seqs(self, cfg: Config) -> int:
        """Return the largest number of responses that an engine decodes at a time."""
        return self.plan.max_num_seqs or max_num_seqs(cfg)

    @property
    def device(self) -> torch.device:
        """Device of an engine, by its name inside the engine's process."""
        return torch.device(self.plan.engine_device)


# Builds the engine or worker group of a run, and its collector: build_single_engine, build_ray_workers,
# build_servers, or one of the last two in turn with training.
CollectorFactory = Callable[[Config, EngineSource, GroupTextEnv, PreTrainedTokenizerBase], Collection]


def collection_for(cfg: Config, plan: Plan) -> CollectorFactory:
    """Return the function that builds the collection of a plan."""
    if not plan.inference.own_process:
        return build_single_engine
    build = build_servers if cfg.inference_model.engine.has_servers else build_ray_workers
    return build if plan.asynchronous else partial(build_in_turn, build)


def build_single_engine(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collection:
    """Build an engine in this process, or in that of each rank. It generates when a round is requested."""
    engine = source.make_engine(
        cfg,
        source.weights,
        source.device,
        eos_token_ids=source.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=source.max_num_seqs(cfg),
        sleeps=source.plan.sleeps,
        gpu_memory_utilization=source.plan.gpu_memory_utilization,
    )
    if isinstance(engine, SteppingEngine):
        # An engine of several ranks is none. It is made of engines that have their episodes already.
        engine = with_episodes(cfg, engine, source.max_num_seqs(cfg))
    collector = RolloutCollector(
        env,
        engine,
        tokenizer,
        max_new_tokens=cfg.inference_model.max_new_tokens,
        temperature=cfg.inference_model.temperature,
        total_dialog_turns=total_turns(cfg),
        seed=cfg.seed,
        clock=time.perf_counter,
    )
    return engine, collector


def build_in_turn(
    build: CollectorFactory,
    cfg: Config,
    source: EngineSource,
    env: GroupTextEnv,
    tokenizer: PreTrainedTokenizerBase,
) -> Collection:
    """Build workers for ``grpo.py``, with a staleness bound of zero as with a single engine."""
    in_turn = replace(cfg.collector, max_policy_age=0, partial_rollout=False)
    return build(replace(cfg, collector=in_turn), source, env, tokenizer)


def build_servers(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collection:
    """Build a worker for each server, which runs ahead as far as ``collector.max_policy_age`` allows."""
    from torchrl_grpo.rollout.workers.server_pool import ServerPool, ServerSpec

    plan, ranks = source.plan, rank_env.local_world_size()
    servers = cfg.inference_model.servers
    spec = ServerSpec(
        cfg=cfg,
        source=source.model,
        addresses=[] if servers == "auto" else servers,
        gpus=plan.worker_gpus,
        engine_size=plan.engine_size,
        weight_transfer=plan.weight_transfer,
        train_device=torch.device(plan.train_device),
        device=source.device,
        max_num_seqs=source.max_num_seqs(cfg),
        threads=divide_cores(cfg, plan, cores_to_divide(ranks), ranks)[1],
        gpu_memory_utilization=plan.gpu_memory_utilization,
        eos_token_ids=source.eos_token_ids,
        # A little less than the dispatcher's, so that the error says what is missing.
        start_limit_s=0.9 * max(START_LIMIT_S, cfg.collector.timeout_s),
    )
    pool = ServerPool(spec, plan.num_engines)
    return with_workers(
        cfg, env, tokenizer, pool, plan.num_engines, pool.put_weights, overwrites=pool.overwrites
    )


def build_ray_workers(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collection:
    """Build workers on Ray, which run ahead of the trainer as far as ``collector.max_policy_age`` allows."""
    from torchrl_grpo.rollout.workers.ray_pool import RayPool, WorkerSpec

    assert source.plan.inference.own_process, "workers see their own GPU as the first one"
    count, ranks = source.plan.num_engines, rank_env.local_world_size()
    on_gpu = source.device.type == "cuda"
    # Decided here: a worker's machine may be fast in another format, and weights are cast before they leave.
    dtype = Dtype(str(resolve_dtype(cfg.inference_model.dtype, source.device)).removeprefix("torch."))
    spec = WorkerSpec(
        cfg=replace(
            cfg,
            inference_model=replace(cfg.inference_model, dtype=dtype),
            # The working folder of a worker may be another one.
            env=replace(
                cfg.env,
                environment=cfg.env.environment and user_code.absolute(cfg.env.environment),
                tools=[user_code.absolute(tool) for tool in cfg.env.tools],
            ),
        ),
        source=source.model,
        eos_token_ids=source.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=source.max_num_seqs(cfg),
        threads=divide_cores(cfg, source.plan, cores_to_divide(ranks), ranks)[1],
        on_gpu=on_gpu,
        gpus=source.plan.worker_gpus,
        gpu_memory_utilization=source.plan.gpu_memory_utilization,
    )
    num_extra_actors = source.plan.reference_actors
    pool = RayPool(cfg, spec, count=count, num_extra_actors=num_extra_actors)
    try:
        reference = _reference_actors(cfg, source, pool, spec) if num_extra_actors else None
    except BaseException:
        pool.close()
        raise
    return with_workers(cfg, env, tokenizer, pool, count, pool.put_weights, reference)


def _reference_actors(
    cfg: Config, source: EngineSource, pool: RayPool, worker: WorkerSpec
) -> ReferenceActors:
    from torchrl_grpo.rollout.workers.reference_actors import ReferenceActors, ReferenceSpec

    spec = ReferenceSpec(
        cfg=cfg,
        source=source.model,
        pad_token_id=worker.pad_token_id,
        threads=worker.threads,
        on_gpu=worker.on_gpu,
        autocast_dtype=source.autocast_dtype,
        shares_prefix=source.shares_prefix,
    )
    limit_s = max(START_LIMIT_S, cfg.collector.timeout_s)
    return ReferenceActors(pool, spec, source.plan.reference_actors, limit_s)


def with_workers(
    cfg: Config,
    env: GroupTextEnv,
    tokenizer: PreTrainedTokenizerBase,
    pool: Pool,
    count: int,
    put_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    reference: ReferenceClient | None = None,
    overwrites: bool = False,
) -> Collection:
    """Build a group of workers on ``pool``, and its collector.

    Args:
        cfg: the run's configuration.
        env: problems and rewards.
        tokenizer: tokenizer of the model.
        pool: pool of the workers.
        count: number of workers.
        put_weights: see :class:`WorkerGroup`.
        reference: see :class:`Dispatcher`.
        overwrites: see :class:`WorkerGroup`.
    """
    source = GroupSource(env, tokenizer, cfg.seed)
    tracker = StalenessTracker(
        cfg.env.num_envs, cfg.collector.max_policy_age, rounds(cfg), steps_per_round(cfg)
    )
    scheduler = Scheduler(
        tracker,
        count,
        source.new_group,
        wait_for_running=cfg.collector.weight_update == "drain",
        return_interrupted=cfg.collector.partial_rollout,
    )
    dispatcher = Dispatcher(
        scheduler,
        pool,
        score_rewards=source.score_rewards,
        timeout_s=cfg.collector.timeout_s,
        max_restarts=cfg.collector.max_restarts,
        may_refill=cfg.policy.constant_groups == "refill",
        reference=reference,
    )
    worker_group = WorkerGroup(dispatcher, put_weights, overwrites)
    return worker_group, AsyncCollector(env, worker_group, tokenizer, total_dialog_turns=total_turns(cfg))
