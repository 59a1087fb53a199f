"""Choose what placed roles leave open: vLLM's share of a GPU, sleep, and the size of micro-batches.

A larger share lets an engine decode more responses at a time, and leaves less for micro-batches. So both are
searched together: of the shares with which everything fits, awake or asleep, the one with the shortest
predicted round is chosen (:mod:`~torchrl_grpo.planning.cost`). What the configuration sets stays. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.models.shape import ModelShape, Unknown
from torchrl_grpo.planning import memory, placement, token_budget
from torchrl_grpo.planning.cost import cost_of
from torchrl_grpo.planning.plan import OWN_GPU, Plan
from torchrl_grpo.planning.planned import Planned, memory_by_device
from torchrl_grpo.planning.prediction import GIB
from torchrl_grpo.planning.request import Request
from torchrl_grpo.planning.workload import max_num_seqs
from torchrl_grpo.runtime.hardware import Hardware

# Factor by which the memory must exceed the prediction where two models share a GPU. The prediction is rarely
# more than 20 % too low.
SPARE = 1.2
# By default, the optimizer's moments may wait in host memory if they take at most this share of it. Pinned
# memory is handed out in powers of two, so they may take twice as much.
_PARKED_SHARE = 0.25
# Plans whose predicted rounds differ by less than this factor count as equally fast.
EQUALLY_FAST = 1.02


def choose(cfg: Config, request: Request, hardware: Hardware, shape: ModelShape | Unknown) -> Planned:
    """Place the roles, and choose the sizes of the plan with the shortest predicted round.

    If none fits, these are the usual sizes, for which advice is given.

    Args:
        cfg: validated configuration.
        request: request to the planner.
        hardware: hardware to plan for.
        shape: shape of the model, or the reason why it is unknown.

    Raises:
        ConfigError: requested devices do not exist.
    """
    usual = place_roles(cfg, request, hardware, shape)
    variants = list(_variants(usual, request))
    for suits in (is_roomy, fits):
        suitable = [planned for planned in variants if suits(planned)]
        costs = [(cost.step, planned) for planned in suitable if (cost := cost_of(planned))]
        if not costs:
            continue
        least = min(step for step, _ in costs)
        # Of equally fast plans, take one without sleep. What a round does not need is room for evaluations.
        costs.sort(key=lambda pair: (pair[0], -pair[1].plan.gpu_memory_utilization))
        equal = [planned for step, planned in costs if step <= EQUALLY_FAST * least]
        best = min(equal, key=lambda planned: planned.plan.sleeps)
        others = sorted((planned for _, planned in costs if planned is not best), key=best.resembles)
        return replace(best, other=next(iter(others), None))
    return usual


def _variants(usual: Planned, request: Request) -> Iterator[Planned]:
    """Yield plans with the shares and the sleep that the configuration leaves open, if vLLM shares GPUs."""
    plan = usual.plan
    if not plan.colocated or not usual.vllm_on_gpus:
        return
    for sleeps in {False, plan.sleeps} if request.sleep is None else (plan.sleeps,):
        for share in _shares(usual, request):
            changed = replace(request, sleep=sleeps, gpu_memory_utilization=share)
            yield place_roles(usual.cfg, changed, usual.hardware, usual.shape)


def _shares(usual: Planned, request: Request) -> list[float]:
    """Return the shares to try, in steps of 1/20: up to one that holds all responses at full length."""
    if request.gpu_memory_utilization is not None:
        return [request.gpu_memory_utilization]
    shares = []
    for step in range(round(20 * (usual.least_share or 1)) + 1, round(20 * OWN_GPU) + 1):
        shares.append(step / 20)
        if usual.responses_in(step / 20) >= usual.most_responses:
            break
    return shares


def is_roomy(planned: Planned) -> bool:
    """Return whether a plan fits, with a fifth to spare if vLLM or a reference is beside the trainer."""
    plan = planned.plan
    if planned.prediction is None:
        # Two models on a GPU may be too much, and nothing says so before they are loaded.
        return not plan.colocated
    has_known_needs = plan.inference.own_process or planned.cfg.inference_model.engine.has_known_needs
    if plan.colocated and has_known_needs and not plan.sleeps:
        return fits(planned, SPARE)
    # Several ranks cannot go on with smaller micro-batches when memory runs out.
    return fits(planned) and (not plan.reference_in_each_rank or fits(planned, SPARE, plan.train.devices))


def place_roles(cfg: Config, request: Request, hardware: Hardware, shape: ModelShape | Unknown) -> Planned:
    """Place the roles, with the largest micro-batches for which there is memory.

    Args and errors are those of :func:`choose`.
    """
    plan = placement.plan(request, len(hardware.gpus))
    plan = replace(plan, offload_optimizer=_offloads(cfg, plan, shape, hardware))
    budget = token_budget.choose(cfg, plan, shape, hardware)
    plan = replace(plan, token_budget=budget.tokens)
    prediction = budget.prediction
    if prediction is None and isinstance(shape, ModelShape):
        prediction = memory.predict(token_budget.with_budget(cfg, budget.tokens), plan, shape, hardware)
    planned = Planned(cfg, plan, request.asynchronous, hardware, shape, prediction, budget)
    if not cfg.inference_model.engine.has_known_needs or plan.inference.placement == "servers":
        return planned
    if plan.num_gpus == 0:
        return planned
    room = planned.room_for_sequences
    return replace(planned, plan=replace(plan, max_num_seqs=max_num_seqs(cfg, on_gpu=True, room=room)))


def _offloads(cfg: Config, plan: Plan, shape: ModelShape | Unknown, hardware: Hardware) -> bool:
    """Return whether the optimizer's moments wait in host memory while the engine generates."""
    configured = cfg.train_model.offload_optimizer
    if configured is not None or not plan.sleeps or cfg.train_model.parallelism in ZERO_STAGES:
        return bool(configured) and plan.train_device.startswith("cuda")
    if isinstance(shape, Unknown) or not plan.train_device.startswith("cuda"):
        return False
    needs = {
        offloads: memory.predict(cfg, replace(plan, offload_optimizer=offloads), shape, hardware)
        for offloads in (False, True)
    }
    moments = max(row.optimizer for row in needs[False].rows if row.role == "train") * len(plan.train.devices)
    if hardware.cpu_gib is not None and moments > _PARKED_SHARE * hardware.cpu_gib * GIB:
        return False
    sizes = memory_by_device(plan, hardware)
    return any(
        gib is not None
        and needs[True].need(name, "generate") <= gib * GIB < needs[False].need(name, "generate")
        for name, gib in sizes.items()
        if name in plan.train.devices
    )


def small_share(planned: Planned) -> tuple[str, object, str] | None:
    """Return key, value and mistake if vLLM's share of a GPU holds little more than the weights."""
    share = planned.plan.gpu_memory_utilization
    for gib, weights, _ in planned.vllm_on_gpus:
        if share * gib * GIB < memory.VLLM_FLOOR * weights:
            wrong = (
                f"{share * gib:.2f} GiB of {gib:.2f} leave too little room for keys and values besides "
                f"weights of {weights / GIB:.2f} GiB"
            )
            return "inference_model.gpu_memory_utilization", share, wrong
    return None


def small_cache(planned: Planned) -> tuple[str, object, str] | None:
    """Return key, value and mistake if vLLM's cache on a CPU cannot hold the longest sequence."""
    options, least = planned.cfg.inference_model, planned.least_cache_gib
    if least is None or options.kv_cache_gib >= least:
        return None
    wrong = (
        f"keys and values of one sequence of inference_model.max_model_len={options.max_model_len} tokens "
        f"need {least} GiB, and vLLM does not start with less"
    )
    return "inference_model.kv_cache_gib", options.kv_cache_gib, wrong


def fits(planned: Planned, margin: float = 1.0, devices: Collection[str] | None = None) -> bool:
    """Return whether every device, or each of ``devices``, has the predicted memory, times a margin."""
    assert planned.prediction is not None
    prediction = planned.prediction
    return not (small_share(planned) or small_cache(planned)) and all(
        available_gib is None or margin * prediction.peak(device)[0] <= available_gib * GIB
        for device, available_gib in memory_by_device(planned.plan, planned.hardware).items()
        if devices is None or device in devices
    )
