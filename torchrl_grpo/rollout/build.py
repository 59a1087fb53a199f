"""Builds the collector of a configuration, with a worker in this process or a group of workers elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Unpack

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import rounds, steps_per_round, total_turns
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.distributed.ranks import cores_to_divide
from torchrl_grpo.envs.chat import end_of_message
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.hints import teacher_prompt
from torchrl_grpo.inference.build import EngineOptions, build_engine
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.planning.cores import divide_cores
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.workload import max_num_seqs
from torchrl_grpo.rollout.collector import Collector, GroupSource
from torchrl_grpo.rollout.solutions import SolutionSource
from torchrl_grpo.rollout.workers.dispatcher import START_LIMIT_S, Dispatcher
from torchrl_grpo.rollout.workers.local_pool import LocalPool, TrainerThread
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import Pool, ReferenceClient
from torchrl_grpo.rollout.workers.worker import RolloutWorker
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime import rank_env, user_code

if TYPE_CHECKING:
    from torchrl_grpo.rollout.workers.ray_pool import RayPool
    from torchrl_grpo.rollout.workers.ray_worker import WorkerSpec
    from torchrl_grpo.rollout.workers.reference_actors import ReferenceActors


class MakeEngine(Protocol):
    """Builds an engine in this process: see :func:`~torchrl_grpo.inference.build.build_engine`."""

    def __call__(
        self, cfg: Config, source: str, device: torch.device, **options: Unpack[EngineOptions]
    ) -> SteppingEngine:
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
        vocabulary: number of tokens that the model has.
        autocast_dtype: dtype of the trainer's autocast, for a reference model in separate processes.
        shares_prefix: whether the trainer computes a prompt once per group; the reference does the same.
        make_engine: function that builds an engine in this process: :func:`build_engine`, or one that builds
            a part of the engine on each rank.
        frozen: folder or hub name of the reference or teacher in separate processes; None for ``model``.
    """

    weights: str
    model: str
    plan: Plan
    eos_token_ids: Sequence[int]
    vocabulary: int
    autocast_dtype: torch.dtype | None
    shares_prefix: bool
    make_engine: MakeEngine = build_engine
    frozen: str | None = None

    def max_num_seqs(self, cfg: Config) -> int:
        """Return the largest number of responses that an engine decodes at a time."""
        return self.plan.max_num_seqs or max_num_seqs(cfg)

    @property
    def device(self) -> torch.device:
        """Device of an engine, by its name inside the engine's process."""
        return torch.device(self.plan.engine_device)


# Builds the workers of a run, and their collector.
CollectorFactory = Callable[[Config, EngineSource, GroupTextEnv, PreTrainedTokenizerBase], Collector]


def build_collector(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collector:
    """Build the workers that the plan of ``source`` names, and their collector."""
    if cfg.train.method == "sft":
        # A chat template without an end must be refused before engines start.
        end_of_message(tokenizer, source.eos_token_ids)
    if not source.plan.asynchronous:
        cfg = replace(cfg, collector=replace(cfg.collector, max_policy_age=0, partial_rollout=False))
    if not source.plan.inference.own_process:
        return collector_with_local_worker(cfg, source, env, tokenizer)
    build = collector_with_servers if cfg.inference_model.engine.has_servers else collector_with_ray_workers
    return build(cfg, source, env, tokenizer)


def collector_with_local_worker(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collector:
    """Build a worker in this process, or in that of each rank. It works while the trainer waits for it."""
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
    if not source.plan.engine_in_each_rank:
        # Engines of ranks have their episodes already.
        engine = with_episodes(cfg, engine, source.max_num_seqs(cfg))
    options = cfg.inference_model
    worker = RolloutWorker(engine, options.max_new_tokens, options.temperature, time.perf_counter)
    return collector_with_workers(cfg, source, env, tokenizer, LocalPool(worker, TrainerThread()))


def collector_with_servers(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collector:
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
        vocabulary=source.vocabulary,
        # A little less than the dispatcher's, so that the error says what is missing.
        start_limit_s=0.9 * max(START_LIMIT_S, cfg.collector.timeout_s),
    )
    return collector_with_workers(cfg, source, env, tokenizer, ServerPool(spec, plan.num_engines))


def collector_with_ray_workers(
    cfg: Config, source: EngineSource, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase
) -> Collector:
    """Build workers on Ray, which run ahead of the trainer as far as ``collector.max_policy_age`` allows."""
    from torchrl_grpo.rollout.workers.ray_pool import RayPool
    from torchrl_grpo.rollout.workers.ray_worker import WorkerSpec

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
        weight_transfer=source.plan.weight_transfer,
        train_device=torch.device(source.plan.train_device),
    )
    num_extra_actors = source.plan.reference_actors
    pool = RayPool(cfg, spec, count=count, num_extra_actors=num_extra_actors)
    try:
        reference = _reference_actors(cfg, source, pool, spec, len(tokenizer)) if num_extra_actors else None
    except BaseException:
        pool.close()
        raise
    return collector_with_workers(cfg, source, env, tokenizer, pool, reference)


def _reference_actors(
    cfg: Config, source: EngineSource, pool: RayPool, worker: WorkerSpec, vocabulary: int
) -> ReferenceActors:
    from torchrl_grpo.rollout.workers.reference_actors import ReferenceActors, ReferenceSpec

    spec = ReferenceSpec(
        cfg=cfg,
        source=source.frozen or source.model,
        pad_token_id=worker.pad_token_id,
        threads=worker.threads,
        on_gpu=worker.on_gpu,
        autocast_dtype=source.autocast_dtype,
        shares_prefix=source.shares_prefix,
        vocabulary=vocabulary,
    )
    limit_s = max(START_LIMIT_S, cfg.collector.timeout_s)
    return ReferenceActors(pool, spec, source.plan.reference_actors, limit_s)


def collector_with_workers(
    cfg: Config,
    source: EngineSource,
    env: GroupTextEnv,
    tokenizer: PreTrainedTokenizerBase,
    pool: Pool,
    reference: ReferenceClient | None = None,
) -> Collector:
    """Build a group of workers on ``pool``, and its collector.

    Args:
        cfg: the run's configuration.
        source: what engines are built from.
        env: problems and rewards.
        tokenizer: tokenizer of the model.
        pool: pool of the workers.
        reference: see :class:`Dispatcher`.
    """
    local = pool if isinstance(pool, LocalPool) else None
    make_scored = None
    if cfg.train.method == "sft":
        end_token_id = end_of_message(tokenizer, source.eos_token_ids)
        make_scored = SolutionSource(env, tokenizer, end_token_id, cfg.inference_model.max_new_tokens).group
    groups = GroupSource(env, tokenizer, cfg.seed, teacher_prompt(cfg, tokenizer))
    tracker = StalenessTracker(
        cfg.env.num_envs,
        cfg.collector.max_policy_age if source.plan.asynchronous else None,
        rounds(cfg),
        steps_per_round(cfg),
    )
    scheduler = Scheduler(
        tracker,
        1 if local else source.plan.num_engines,
        groups.new_group,
        wait_for_running=cfg.collector.weight_update == "drain",
        return_interrupted=cfg.collector.partial_rollout,
    )
    dispatcher = Dispatcher(
        scheduler,
        pool,
        score_rewards=groups.score_rewards,
        # Nobody could end a worker of this process.
        timeout_s=math.inf if local else cfg.collector.timeout_s,
        max_restarts=None if local else cfg.collector.max_restarts,
        may_refill=cfg.policy.constant_groups == "refill",
        reference=reference,
        trainer_thread=local.thread if local else None,
        make_scored=make_scored,
        reward_threads=env.reward_set.parallel_calls,
        groups_per_call=env.reward_set.groups_per_call,
    )
    worker_group = WorkerGroup(dispatcher, local.worker.engine if local else None)
    return Collector(groups, worker_group, total_dialog_turns=total_turns(cfg))
