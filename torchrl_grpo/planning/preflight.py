"""The plan of a run: devices and memory, checked and printed before anything heavy is imported."""

from __future__ import annotations

import sys
from dataclasses import replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import load_built_in
from torchrl_grpo.config.checks import schedule, validate
from torchrl_grpo.config.checks.pictures import check_ranks
from torchrl_grpo.config.derived import models_of, teacher_of
from torchrl_grpo.config.engines import engines_with, reference_engine
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.values import Proximal
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.kind import check_kind
from torchrl_grpo.models.shape import ModelShape, Unknown, read_shape
from torchrl_grpo.planning import memory, placement, resolve, sizes
from torchrl_grpo.planning.advice import advise
from torchrl_grpo.planning.comparison import compare
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.planned import WHILE, Planned, beside_others, memory_by_device
from torchrl_grpo.planning.prediction import GIB, PHASES
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.planning.sizes import fits, small_cache, small_share
from torchrl_grpo.runtime import hardware as hardware_module
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.hardware import Hardware

# The prediction assumes the longest texts that are allowed, and may be 29 % too high. A run whose
# prediction exceeds the memory by less than this factor may still fit.
TOLERATED = 1.2
_SEVERAL_GPUS = engines_with(lambda kind: kind.spans_devices)[0]
_NOTHING_ELSE = (
    "a smaller model as model.name (shorter texts, smaller batches, shards, adapters and 4 bits are not "
    f"enough; an engine over several GPUs, with inference_model.backend={_SEVERAL_GPUS} and "
    "inference_model.tensor_parallel_size, was not tried)"
)


def make(cfg: Config, asynchronous: bool, hardware: Hardware) -> Planned:
    """Plan a run for the available devices.

    Args:
        cfg: validated configuration.
        asynchronous: whether the script is grpo-async.py.
        hardware: hardware to plan for.

    Raises:
        ConfigError: requested devices do not exist.
        ModelError: the model's files are damaged, or the model is not a causal language model.
    """
    shape = shape_of(cfg)
    # The kind of a model on the hub is unknown until read_shape() has fetched its config.json.
    for model in models_of(cfg):
        check_kind(model)
    return _make_plan(cfg, asynchronous, hardware, shape)


def shape_of(cfg: Config) -> ModelShape | Unknown:
    """Return the shape of the model, or why memory cannot be predicted: it or the teacher is unknown.

    Raises:
        ModelError: the files of a model are damaged.
    """
    teacher = teacher_of(cfg)
    if teacher is not None:
        teacher_shape = memory.read_teacher_shape(teacher.name, teacher.cache_dir)
        if isinstance(teacher_shape, Unknown):
            return teacher_shape
    return read_shape(cfg.model)


def place(cfg: Config, asynchronous: bool, num_gpus: int) -> Plan:
    """Place the roles of a run on devices, without a look at their memory.

    Args:
        cfg: validated configuration.
        asynchronous: whether the script is grpo-async.py.
        num_gpus: number of GPUs of the machine.

    Raises:
        ConfigError: requested devices do not exist, or the run cannot use them in this way.
    """
    plan = placement.plan(build_request(cfg, asynchronous, rank_env.world_size()), num_gpus)
    _check_plan(cfg, plan)
    return plan


def _check_plan(cfg: Config, plan: Plan) -> None:
    if plan.inference.own_process and not plan.asynchronous:
        schedule.check_in_turn(cfg)
    if plan.sleeps:
        schedule.check_sleep(cfg)
    if cfg.model.pictures and len(plan.train.devices) > 1:
        check_ranks(cfg, resolve.parallelism(cfg))


def _make_plan(cfg: Config, asynchronous: bool, hardware: Hardware, shape: ModelShape | Unknown) -> Planned:
    request = build_request(cfg, asynchronous, rank_env.world_size())
    planned = sizes.choose(cfg, request, hardware, shape)
    _check_plan(cfg, planned.plan)
    return planned


def replan(
    cfg: Config, asynchronous: bool, hardware: Hardware, shape: ModelShape | Unknown
) -> Planned | None:
    """Plan a changed configuration with all checks; return None if it is invalid.

    The configuration has the launcher's number of ranks already (:func:`~.resolve.resolved`).
    """
    try:
        validate(cfg)
        (schedule.check_async if asynchronous else schedule.check_sync)(cfg)
        resolve.parallelism(cfg)
        return _make_plan(cfg, asynchronous, hardware, shape)
    except ConfigError:
        return None


def resolve_proximal(cfg: Config, asynchronous: bool) -> Config:
    """Resolve ``policy.proximal=auto`` for the script.

    The clip is centered on the proximal policy. If that policy is several rounds old, the clip bounds the
    total change since then. If it is the trainer's own policy, the clip bounds the step (AReaL, arXiv
    2505.24298, section 5.2). ``auto`` selects the trainer if engines may generate ahead of it.
    """
    if cfg.policy.proximal != "auto":
        return cfg
    ahead = asynchronous and cfg.collector.max_policy_age > 0
    return replace(cfg, policy=replace(cfg.policy, proximal=Proximal.trainer if ahead else Proximal.engine))


def announce(cfg: Config, asynchronous: bool) -> Plan:
    """Plan a run that is about to start, and print the plan.

    Raises:
        ConfigError: requested devices do not exist, or there is too little memory.
    """
    planned = make(cfg, asynchronous, hardware_module.present())
    _check_build(planned)
    check_memory(planned)
    lines = [*planned.peaks(), *hints(planned), *_slow_formats(planned)]
    sys.stdout.write(planned.plan.table() + "".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return planned.plan


def report(
    cfg: Config, asynchronous: bool, hardware: Hardware | None = None, other: Planned | None = None
) -> None:
    """Print the report of ``dry_run=true``: the plan, the memory of each role and phase, and the time.

    Args:
        cfg: validated configuration.
        asynchronous: whether the script is grpo-async.py.
        hardware: hardware to plan for; None for that of this machine.
        other: another division of the GPUs, to compare the plan with.

    Raises:
        ConfigError: requested devices do not exist, or there is too little memory.
    """
    planned = make(cfg, asynchronous, hardware or hardware_module.present())
    if hardware is None:
        _check_build(planned)
    sys.stdout.write(f"{planned.plan.table()}\n")
    if planned.prediction is not None:
        sys.stdout.write(f"{planned.prediction.table()}\n")
    sys.stdout.write("".join(f"{line}\n" for line in planned.peaks()))
    sys.stdout.flush()
    check_memory(planned)
    sys.stdout.write("".join(f"{line}\n" for line in (*hints(planned), *_slow_formats(planned))))
    sys.stdout.write(compare(planned, [plan for plan in (planned.other, other) if plan is not None]))


def _check_build(planned: Planned) -> None:
    """Check that the installed program of the engine runs on this machine.

    Raises:
        ConfigError: it was built for GPUs, and the plan runs an engine on the CPU.
    """
    engine = planned.cfg.inference_model.engine
    if engine.needs_gpu and "cpu" in planned.plan.inference.devices and load_built_in(engine.needs_gpu)():
        wrong = f"the {engine.program} that is installed is one for GPUs, and no GPU is visible here"
        raise ConfigError(
            f"inference_model.backend={show(planned.cfg.inference_model.backend)}: {wrong}; write "
            f"inference_model.backend={reference_engine()}, or run `make setup ACCELERATOR=cpu` and repeat "
            "the command"
        )


def check_memory(planned: Planned) -> None:
    """Check that every device has its predicted memory, within the accuracy of the prediction.

    Raises:
        ConfigError: a device has too little memory. The message names overrides with which the run fits.
            For a resumed run, it names overrides for a new run if no key that may change is enough.
    """
    short = _lack(planned)
    if short is None:
        return
    key, value, wrong = short
    fix = " or ".join(_advice(planned))
    if not fix and planned.cfg.resume is not None:
        # Keys that a resumed run must not change may be enough.
        fresh = replace(planned, cfg=replace(planned.cfg, resume=None))
        if advice := _advice(fresh):
            fix = f"in a new run {' or '.join(advice)}"
    raise bad_value(key, value, wrong, fix or _NOTHING_ELSE)


def is_tolerable(planned: Planned) -> bool:
    """Return whether :func:`check_memory` accepts a plan."""
    return _lack(planned) is None


def _lack(planned: Planned) -> tuple[str, object, str] | None:
    """Return key, value and mistake if a device has too little memory; None if each has enough."""
    return small_share(planned) or small_cache(planned) or _shortage(planned)


def hints(planned: Planned) -> list[str]:
    """Return advice to save memory if the longest texts need slightly more memory than the devices have."""
    if planned.prediction is None or fits(planned) or small_share(planned) or small_cache(planned):
        return []
    advice = " or ".join(_advice(planned, mild=True))
    return [f"memory: the longest texts may not fit; {advice} takes less"] if advice else []


def _slow_formats(planned: Planned) -> list[str]:
    """Return advice to compute in float32 if this processor is slow in the chosen formats."""
    trained, engine, plan = planned.cfg.train_model, planned.cfg.inference_model, planned.plan
    chosen = {
        "train_model.autocast": trained.autocast in ("bf16", "fp16") and "cpu" in plan.train.devices,
        "inference_model.dtype": engine.dtype in ("bfloat16", "float16") and "cpu" in plan.inference.devices,
    }
    keys = [key for key, is_slow in chosen.items() if is_slow]
    if not keys or not hardware_module.cpu_lacks_16_bits():
        return []
    instead = " ".join(f"{key}=auto" for key in keys)
    return [
        "speed: this processor has no AVX-512, without which products in 16 bits take at least ten times as "
        f"long as in float32; {instead} takes float32"
    ]


def _shortage(planned: Planned) -> tuple[str, object, str] | None:
    """Return key, value and mistake if a device has clearly too little memory."""
    if planned.prediction is None:
        return None
    for device, available_gib in memory_by_device(planned.plan, planned.hardware).items():
        if available_gib is None:
            continue
        needs = [(planned.prediction.need(device, phase), phase) for phase in PHASES]
        over = [row for row in needs if row[0] > _tolerated(planned, device, row[1]) * available_gib * GIB]
        if not over:
            continue
        need, phase = max(over)
        largest = planned.prediction.largest(device, phase)
        wrong = (
            f"{need / GIB:.2f} GiB are needed on {device} while {WHILE[phase]}, most of it for "
            f"{largest.role} ({largest.phase}: {largest.total / GIB:.2f} GiB), and "
            f"{available_gib:.2f} GiB are there{beside_others(planned, device)}"
        )
        return "model.name", planned.cfg.model.name, wrong
    return None


def _tolerated(planned: Planned, device: str, phase: str) -> float:
    known = planned.cfg.inference_model.engine.has_known_needs
    engine = known and device in planned.plan.inference.devices
    # In these phases nothing depends on text lengths: the memory holds weights, optimizer moments and vLLM's
    # fixed share.
    fixed = phase == "load" or (engine and phase == "generate")
    return 1.0 if fixed and device != "cpu" else TOLERATED


def _advice(planned: Planned, mild: bool = False) -> list[str]:
    """Return overrides with which the prediction fits; each was planned again (:func:`~.advice.advise`)."""

    def plan(changed: Config) -> Planned | None:
        return replan(changed, planned.asynchronous, planned.hardware, planned.shape)

    return advise(planned.cfg, plan, fits, mild)
