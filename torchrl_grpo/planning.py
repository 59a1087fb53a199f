"""The plan of a run: devices and memory, checked and printed before anything heavy is imported."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchrl_grpo import devices, hardware, launch, memory, validation_scripts
from torchrl_grpo.config import Config
from torchrl_grpo.config_keys import bad_value, show
from torchrl_grpo.devices_plan import Plan
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.hardware import Hardware
from torchrl_grpo.memory import GIB, PHASES, Prediction
from torchrl_grpo.model_shape import ModelShape, read_shape
from torchrl_grpo.workload import token_budget

_SUGGESTIONS = 3
# Predicted is the longest that is allowed, to within 20 %: what is short by less may well fit.
_TOLERATED = 1.2
# Nobody is told to make prompts or evaluations shorter than this.
_LEAST_PROMPT, _LEAST_PROBLEMS = 128, 50
_WHILE = {"generate": "generating", "score": "scoring", "optimise": "optimising"}

# Section, key, value.
Change = tuple[str, str, Any]


@dataclass(frozen=True)
class Planned:
    """A plan and what it takes.

    Attributes:
        plan: who runs where.
        asynchronous: of grpo-async.py.
        there: the devices it was made for.
        shape: of the model; None where it is not on this machine yet.
        prediction: the memory; None without a shape.
    """

    plan: Plan
    asynchronous: bool
    there: Hardware
    shape: ModelShape | None
    prediction: Prediction | None

    def peaks(self) -> list[str]:
        """A line for each device: how much it takes, of how much."""
        if self.prediction is None:
            return ["memory: unknown until the model is on this machine"]
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
    """
    plan = devices.plan(devices.request_of(cfg, asynchronous, launch.world_size()), len(there.gpus))
    if plan.apart and not asynchronous:
        validation_scripts.check_in_turn(cfg)
    if plan.sleeps:
        validation_scripts.check_sleep(cfg)
    shape = read_shape(cfg.model)
    prediction = None if shape is None else memory.predict(cfg, plan, shape, there.gpus)
    return Planned(plan, asynchronous, there, shape, prediction)


def with_proximal(cfg: Config, asynchronous: bool) -> Config:
    """``policy.proximal=auto`` as the script means it.

    A clip around a policy that is some rounds old lets the present one move no further from it than the bound
    in all these rounds together; around the trainer's own it bounds the step (AReaL, arXiv 2505.24298, sec.
    5.2).
    """
    if cfg.policy.proximal != "auto":
        return cfg
    ahead = asynchronous and cfg.collector.max_policy_age > 0
    return replace(cfg, policy=replace(cfg.policy, proximal="trainer" if ahead else "engine"))


def announce(cfg: Config, asynchronous: bool) -> Plan:
    """Plan a run that is about to start, and print the plan.

    Raises:
        ConfigError: devices or memory that are asked for are not there.
    """
    planned = make(cfg, asynchronous, hardware.present())
    check_memory(cfg, planned)
    sys.stdout.write(planned.plan.table() + "".join(f"{line}\n" for line in planned.peaks()))
    sys.stdout.flush()
    return planned.plan


def report(cfg: Config, asynchronous: bool, there: Hardware | None = None) -> None:
    """Print what ``dry_run=true`` asks for: the plan, and the memory of each role and phase.

    Raises:
        ConfigError: what is asked for is not there, or there is too little memory.
    """
    planned = make(cfg, asynchronous, there or hardware.present())
    sys.stdout.write(f"{planned.plan.table()}\n")
    if planned.prediction is not None:
        sys.stdout.write(f"{planned.prediction.table()}\n")
    sys.stdout.write("".join(f"{line}\n" for line in planned.peaks()))
    check_memory(cfg, planned)


def check_memory(cfg: Config, planned: Planned) -> None:
    """Check that every device has the memory that is predicted for it, as far as predictions go.

    Raises:
        ConfigError: one has not; the message names overrides with which all would fit.
    """
    if planned.prediction is None or planned.shape is None:
        return
    _check_share(cfg, planned.plan, planned.prediction, planned.there)
    for device, there in _present(planned.plan, planned.there).items():
        if there is None:
            continue
        needs = [(planned.prediction.need(device, phase), phase) for phase in PHASES]
        over = [one for one in needs if one[0] > _tolerated(cfg, planned.plan, device, one[1]) * there * GIB]
        if not over:
            continue
        need, phase = max(over)
        largest = planned.prediction.largest(device, phase)
        wrong = (
            f"{need / GIB:.2f} GiB are needed on {device} while {_WHILE[phase]}, most of it for "
            f"{largest.role} ({largest.phase}: {largest.total / GIB:.2f} GiB), and {there:.2f} GiB are there"
        )
        raise bad_value("model.name", cfg.model.name, wrong, " or ".join(_mends(cfg, planned)))


def _tolerated(cfg: Config, plan: Plan, device: str, phase: str) -> float:
    engine = cfg.inference_model.backend == "vllm" and device in plan.inference.devices
    # There nothing depends on lengths: weights, moments, and the share that vLLM takes in any case.
    return 1.0 if engine and device != "cpu" and phase == "generate" else _TOLERATED


def _check_share(cfg: Config, plan: Plan, prediction: Prediction, there: Hardware) -> None:
    """Check that the share of a GPU that vLLM takes holds more than the weights.

    Raises:
        ConfigError: it does not.
    """
    share = plan.gpu_share
    if cfg.inference_model.backend != "vllm":
        return
    for row in prediction.rows:
        if row.role != "inference" or row.phase != "generate":
            continue
        for gib in (there.gpus[int(name.removeprefix("cuda:"))] for name in row.devices if name != "cpu"):
            if gib is None or share * gib * GIB > row.weights:
                continue
            enough = math.ceil(20 * 1.1 * row.weights / (gib * GIB)) / 20
            raise bad_value(
                "inference_model.gpu_memory_utilization",
                share,
                f"{share * gib:.2f} GiB of {gib:.2f} leave no room for keys and values beside weights of "
                f"{row.weights / GIB:.2f} GiB",
                f"{enough:.2f}" if enough < 1 else "a smaller model.name",
            )


def _present(plan: Plan, there: Hardware) -> dict[str, float | None]:
    """The devices that the plan uses, and what each has in GiB."""
    used = dict.fromkeys([*plan.train.devices, *plan.inference.devices, *plan.reference.devices])
    return {
        name: there.cpu_gib if name == "cpu" else there.gpus[int(name.removeprefix("cuda:"))]
        for name in used
        if name != "ray"
    }


def _mends(cfg: Config, planned: Planned) -> list[str]:
    """Overrides with which the prediction fits; each was tried."""
    found = itertools.islice(_fitting(cfg, planned), _SUGGESTIONS)
    return list(found) or ["a smaller model (no budget, cache or length would be enough)"]


def _fitting(cfg: Config, planned: Planned) -> Iterator[str]:
    ladders = list(_ladders(cfg, planned.plan))
    # One key, the mildest change of it that is enough; then two at a time, and so on.
    fitted: set[str] = set()
    for number in range(1, len(ladders) + 1):
        for chosen in itertools.combinations(ladders, number):
            if any(ladder[0][1] in fitted for ladder in chosen):
                continue
            changes = next((one for one in _rungs(chosen) if _fits(cfg, planned, one)), None)
            if changes is not None:
                fitted |= {key for _, key, _ in changes}
                yield " ".join(f"{section}.{key}={show(value)}" for section, key, value in changes)


def _rungs(ladders: tuple[list[Change], ...]) -> Iterator[tuple[Change, ...]]:
    """Steps down several ladders at the same time, the shorter ones waiting at their ends."""
    for step in range(max(map(len, ladders))):
        yield tuple(ladder[min(step, len(ladder) - 1)] for ladder in ladders)


def _ladders(cfg: Config, plan: Plan) -> Iterator[list[Change]]:
    """What takes less memory, the mildest change of a key first; keys that change no number before others."""
    longest, budget = cfg.inference_model.max_model_len, token_budget(cfg)
    budgets = [budget // 2**step for step in range(1, 20) if budget // 2**step > longest]
    if budget > longest:
        yield [("train", "max_tokens_per_microbatch", tokens) for tokens in [*budgets, longest]]
    if not cfg.train_model.gradient_checkpointing:
        yield [("train_model", "gradient_checkpointing", True)]
    if cfg.inference_model.backend == "vllm":
        yield from _ladders_of_vllm(cfg, plan)
    least = cfg.inference_model.max_new_tokens + _LEAST_PROMPT
    lengths = [length for length in (longest // 2, longest // 4) if length >= least]
    if lengths:
        yield [("inference_model", "max_model_len", length) for length in lengths]
    if plan.reference_actors > 1:
        yield [("ref_model", "num_devices", count) for count in range(plan.reference_actors - 1, 0, -1)]
    if cfg.eval.num_problems > _LEAST_PROBLEMS:
        yield [("eval", "num_problems", _LEAST_PROBLEMS)]


def _ladders_of_vllm(cfg: Config, plan: Plan) -> Iterator[list[Change]]:
    if plan.num_gpus == 0:
        if cfg.inference_model.kv_cache_gib > 1:
            less = range(cfg.inference_model.kv_cache_gib - 1, 0, -1)
            yield [("inference_model", "kv_cache_gib", gib) for gib in less]
        return
    if plan.colocated and not plan.apart and not plan.sleeps and validation_scripts.may_sleep(cfg):
        yield [("inference_model", "sleep", True)]
    if plan.colocated and len(plan.inference.devices) > 1 and cfg.inference_model.num_devices == "auto":
        yield [("inference_model", "num_devices", 1)]
    tenths = range(int(plan.gpu_share * 20 - 1e-6), 1, -1)
    if tenths:
        yield [("inference_model", "gpu_memory_utilization", step / 20) for step in tenths]


def _fits(cfg: Config, planned: Planned, changes: tuple[Change, ...]) -> bool:
    trial = copy.deepcopy(cfg)
    for section, key, value in changes:
        setattr(vars(trial)[section], key, value)
    other = make(trial, planned.asynchronous, planned.there)
    assert other.prediction is not None
    try:
        _check_share(trial, other.plan, other.prediction, other.there)
    except ConfigError:
        return False
    limits = _present(other.plan, other.there)
    return all(
        there is None or other.prediction.peak(device)[0] <= there * GIB for device, there in limits.items()
    )
