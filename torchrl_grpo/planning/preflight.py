"""The plan of a run: devices and memory, checked and printed before anything heavy is imported."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from torchrl_grpo.config import Config, checks_schedule
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import VLLM_CPU_BLOCK_SIZE, Proximal
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.kind import check_kind
from torchrl_grpo.models.shape import ModelShape, Unknown, read_shape
from torchrl_grpo.planning import launcher, memory, placement
from torchrl_grpo.planning.advice import advise
from torchrl_grpo.planning.memory import GIB, PHASES, Prediction
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.request import request_of
from torchrl_grpo.planning.workload import workload_of
from torchrl_grpo.runtime import hardware, rank_env
from torchrl_grpo.runtime.hardware import Hardware

# Predicted is the longest that is allowed, to within 20 %: what is short by less may well fit.
_TOLERATED = 1.2
_NOTHING_ELSE = "model (no budget, cache or length, no adapters and no shards would be enough)"
_WHILE = {"load": "loading", "generate": "generating", "score": "scoring", "optimize": "optimizing"}


@dataclass(frozen=True)
class Planned:
    """A plan and what it takes.

    Attributes:
        cfg: what was planned.
        plan: who runs where.
        asynchronous: of grpo-async.py.
        there: the devices it was made for.
        shape: of the model, or why it is not known.
        prediction: the memory; None without a shape.
    """

    cfg: Config
    plan: Plan
    asynchronous: bool
    there: Hardware
    shape: ModelShape | Unknown
    prediction: Prediction | None

    @property
    def vllm_on_gpus(self) -> list[tuple[float, float, float]]:
        """Of each GPU with vLLM and a known size: GiB, bytes of weights, bytes that it needs to start."""
        vllm = self.cfg.inference_model.backend == "vllm"
        if self.prediction is None or isinstance(self.shape, Unknown) or not vllm:
            return []
        found, load = [], workload_of(self.cfg)
        for row in self.prediction.rows:
            for name in row.devices if (row.role, row.phase) == ("inference", "generate") else ():
                gib = self.there.gpus[int(name.removeprefix("cuda:"))] if name != "cpu" else None
                if gib is not None:
                    least = memory.least_for_vllm(self.shape, load, row.weights, gib)
                    found.append((gib, row.weights, least))
        return found

    @property
    def least_share(self) -> float | None:
        """The smallest share of its GPUs, in twentieths, that vLLM starts with; None where there is none."""
        shares = [math.ceil(20 * least / (gib * GIB)) / 20 for gib, _, least in self.vllm_on_gpus]
        return max(shares) if shares and max(shares) < 1 else None

    @property
    def least_cache_gib(self) -> int | None:
        """The smallest ``kv_cache_gib`` with which vLLM starts on a CPU: room for the longest sequence.

        None where there is none, where the shape does not tell, or where keys and values have a format of
        their own.
        """
        options = self.cfg.inference_model
        if self.prediction is None or isinstance(self.shape, Unknown) or options.backend != "vllm":
            return None
        if not self.shape.full_cache or "kv_cache_dtype" in options.engine_args:
            return None
        for row in self.prediction.rows:
            if (row.role, row.phase) == ("inference", "generate") and "cpu" in row.devices:
                block = options.block_size or VLLM_CPU_BLOCK_SIZE
                # Whole blocks, and one that vLLM keeps empty.
                tokens = block * (-(-options.max_model_len // block) + 1)
                element = row.weights / self.shape.parameters
                return math.ceil(memory.cache_of(self.shape, element, tokens) / GIB)
        return None

    def peaks(self) -> list[str]:
        """A line for each device: how much it takes, of how much."""
        if self.prediction is None:
            assert isinstance(self.shape, Unknown)
            return [f"memory: not predicted: {self.shape.why}"]
        lines = []
        for device, there in _present(self.plan, self.there).items():
            need, phase = self.prediction.peak(device)
            of = "" if there is None else f" of {there:.2f}"
            lines.append(f"memory: {device} at most {need / GIB:.2f}{of} GiB, while {_WHILE[phase]}")
        return lines


def make(cfg: Config, asynchronous: bool, there: Hardware) -> Planned:
    """Plan a run for the devices that are there.

    Args:
        cfg: a validated configuration.
        asynchronous: of grpo-async.py.
        there: devices and their memory.

    Raises:
        ConfigError: what is asked for is not there.
        ModelError: the model's files are damaged, or it is no causal language model.
    """
    shape = read_shape(cfg.model)
    # Of a model on the hub nobody knew before its config.json was fetched.
    check_kind(cfg.model)
    return _made(cfg, asynchronous, there, shape)


def _made(cfg: Config, asynchronous: bool, there: Hardware, shape: ModelShape | Unknown) -> Planned:
    plan = placement.plan(request_of(cfg, asynchronous, rank_env.world_size()), len(there.gpus))
    if plan.own_process and not asynchronous:
        checks_schedule.check_in_turn(cfg)
    if plan.sleeps:
        checks_schedule.check_sleep(cfg)
    prediction = memory.predict(cfg, plan, shape, there) if isinstance(shape, ModelShape) else None
    return Planned(cfg, plan, asynchronous, there, shape, prediction)


def with_proximal(cfg: Config, asynchronous: bool) -> Config:
    """``policy.proximal=auto`` as the script means it.

    A clip around a policy that is some rounds old lets the present one move no further from it than the bound
    in all these rounds together; around the trainer's own it bounds the step (AReaL, arXiv 2505.24298, sec.
    5.2).
    """
    if cfg.policy.proximal != "auto":
        return cfg
    ahead = asynchronous and cfg.collector.max_policy_age > 0
    return replace(cfg, policy=replace(cfg.policy, proximal=Proximal.trainer if ahead else Proximal.engine))


def announce(cfg: Config, asynchronous: bool) -> Plan:
    """Plan a run that is about to start, and print the plan.

    Raises:
        ConfigError: devices or memory that are asked for are not there.
    """
    planned = make(cfg, asynchronous, hardware.present())
    _check_vllm(planned)
    check_memory(planned)
    lines = [*planned.peaks(), *hints(planned)]
    sys.stdout.write(planned.plan.table() + "".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return planned.plan


def report(cfg: Config, asynchronous: bool, there: Hardware | None = None) -> None:
    """Print what ``dry_run=true`` asks for: the plan, and the memory of each role and phase.

    Raises:
        ConfigError: what is asked for is not there, or there is too little memory.
    """
    planned = make(cfg, asynchronous, there or hardware.present())
    if there is None:
        _check_vllm(planned)
    sys.stdout.write(f"{planned.plan.table()}\n")
    if planned.prediction is not None:
        sys.stdout.write(f"{planned.prediction.table()}\n")
    sys.stdout.write("".join(f"{line}\n" for line in planned.peaks()))
    sys.stdout.flush()
    check_memory(planned)
    sys.stdout.write("".join(f"{line}\n" for line in hints(planned)))


def _check_vllm(planned: Planned) -> None:
    """Check that the vLLM that is installed runs on this machine.

    Raises:
        ConfigError: it is one for GPUs, and its engines are to run on the CPU.
    """
    on_cpu = "cpu" in planned.plan.inference.devices
    if planned.cfg.inference_model.backend == "vllm" and on_cpu and hardware.vllm_needs_gpu():
        wrong = "the vLLM that is installed is one for GPUs, and no GPU is visible here"
        good = "inference_model.backend=transformers, or make setup ACCELERATOR=cpu and the same,"
        raise bad_value("inference_model.backend", "vllm", wrong, good)


def check_memory(planned: Planned) -> None:
    """Check that every device has the memory that is predicted for it, as far as predictions go.

    Raises:
        ConfigError: one has not; the message names overrides with which all would fit; those of a new
            run where one is resumed and nothing that it may change is enough.
    """
    short = _small_share(planned) or _small_cache(planned) or _shortage(planned)
    if short is None:
        return
    key, value, wrong = short
    instead = " or ".join(_advice(planned))
    if not instead and planned.cfg.resume is not None:
        # What a resumed run may not change may well be enough.
        fresh = replace(planned, cfg=replace(planned.cfg, resume=None))
        if advice := _advice(fresh):
            instead = f"in a new run {' or '.join(advice)}"
    raise bad_value(key, value, wrong, instead or f"a smaller {_NOTHING_ELSE}")


def hints(planned: Planned) -> list[str]:
    """Lines that say what takes less memory, where the longest texts need a little more than there is."""
    if planned.prediction is None or _fits(planned) or _small_share(planned) or _small_cache(planned):
        return []
    advice = " or ".join(_advice(planned, mild=True))
    return [f"memory: the longest texts may not fit; {advice} takes less"] if advice else []


def _shortage(planned: Planned) -> tuple[str, object, str] | None:
    """Key, value and what is wrong where a device has clearly less than is needed."""
    if planned.prediction is None:
        return None
    for device, there in _present(planned.plan, planned.there).items():
        if there is None:
            continue
        needs = [(planned.prediction.need(device, phase), phase) for phase in PHASES]
        over = [one for one in needs if one[0] > _tolerated(planned, device, one[1]) * there * GIB]
        if not over:
            continue
        need, phase = max(over)
        largest = planned.prediction.largest(device, phase)
        wrong = (
            f"{need / GIB:.2f} GiB are needed on {device} while {_WHILE[phase]}, most of it for "
            f"{largest.role} ({largest.phase}: {largest.total / GIB:.2f} GiB), and {there:.2f} GiB are there"
        )
        return "model.name", planned.cfg.model.name, wrong
    return None


def _tolerated(planned: Planned, device: str, phase: str) -> float:
    engine = planned.cfg.inference_model.backend == "vllm" and device in planned.plan.inference.devices
    # There nothing depends on lengths: weights, moments, and the share that vLLM takes in any case.
    fixed = phase == "load" or (engine and phase == "generate")
    return 1.0 if fixed and device != "cpu" else _TOLERATED


def _small_share(planned: Planned) -> tuple[str, object, str] | None:
    """Key, value and what is wrong where vLLM's share of a GPU holds little more than the weights."""
    share = planned.plan.gpu_memory_utilization
    for gib, weights, _ in planned.vllm_on_gpus:
        if share * gib * GIB < memory.VLLM_FLOOR * weights:
            wrong = (
                f"{share * gib:.2f} GiB of {gib:.2f} leave too little room for keys and values beside "
                f"weights of {weights / GIB:.2f} GiB"
            )
            return "inference_model.gpu_memory_utilization", share, wrong
    return None


def _small_cache(planned: Planned) -> tuple[str, object, str] | None:
    """Key, value and what is wrong where vLLM's cache on a CPU does not hold the longest sequence."""
    options, least = planned.cfg.inference_model, planned.least_cache_gib
    if least is None or options.kv_cache_gib >= least:
        return None
    wrong = (
        f"keys and values of one sequence of inference_model.max_model_len={options.max_model_len} tokens "
        f"need {least} GiB, and vLLM does not start with less"
    )
    return "inference_model.kv_cache_gib", options.kv_cache_gib, wrong


def _present(plan: Plan, there: Hardware) -> dict[str, float | None]:
    """The devices that the plan uses, and what each has in GiB."""
    used = dict.fromkeys([*plan.train.devices, *plan.inference.devices, *plan.reference.devices])
    return {
        name: there.cpu_gib if name == "cpu" else there.gpus[int(name.removeprefix("cuda:"))]
        for name in used
        if name != "ray"
    }


def _fits(planned: Planned) -> bool:
    """Whether all of what is predicted is there."""
    assert planned.prediction is not None
    prediction = planned.prediction
    return not (_small_share(planned) or _small_cache(planned)) and all(
        there is None or prediction.peak(device)[0] <= there * GIB
        for device, there in _present(planned.plan, planned.there).items()
    )


def _advice(planned: Planned, mild: bool = False) -> list[str]:
    """Overrides with which the prediction fits; each was tried (:func:`~.advice.advise`)."""
    check = checks_schedule.check_async if planned.asynchronous else checks_schedule.check_sync

    def plan(changed: Config) -> Planned | None:
        try:
            validate(changed)
            check(changed)
            return _made(launcher.resolved(changed), planned.asynchronous, planned.there, planned.shape)
        except ConfigError:
            return None

    return advise(planned.cfg, plan, _fits, mild)
