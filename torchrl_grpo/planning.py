"""The plan of a run: devices and memory, checked and printed before anything heavy is imported."""

from __future__ import annotations

import sys

from torchrl_grpo import devices, hardware
from torchrl_grpo.config import Config
from torchrl_grpo.config_keys import bad_value
from torchrl_grpo.devices_plan import Plan


def announce(cfg: Config, apart: bool) -> Plan:
    """Plan a run that is about to start, and print the plan.

    Args:
        cfg: a validated configuration.
        apart: of grpo-async.py.

    Raises:
        ConfigError: what is asked for is not there, or this version cannot run it.
    """
    there = hardware.present()
    plan = devices.plan(devices.request_of(cfg, apart), len(there.gpus))
    check_engine_gpu(cfg, plan)
    sys.stdout.write(plan.table())
    sys.stdout.flush()
    return plan


def report(cfg: Config, apart: bool) -> None:
    """Print what ``dry_run=true`` asks for.

    Raises:
        ConfigError: what is asked for is not there.
    """
    there = hardware.present()
    plan = devices.plan(devices.request_of(cfg, apart), len(there.gpus))
    sys.stdout.write(plan.table())


def check_engine_gpu(cfg: Config, plan: Plan) -> None:
    """Check that the engine of grpo.py has a GPU that it can take.

    Raises:
        ConfigError: vLLM, which takes the first GPU that its process sees, is planned for another.
    """
    engine = plan.inference.devices[0]
    if plan.apart or cfg.inference_model.backend != "vllm" or engine in ("cpu", "cuda:0"):
        return
    number = engine.removeprefix("cuda:")
    wrong = "vLLM in grpo.py's process takes the first GPU it sees, and the plan gives it cuda:" + number
    if cfg.inference_model.devices is None:
        # Another role was given the first one by name.
        raise bad_value(
            "inference_model.devices", None, wrong, "inference_model.devices=[0] and others for the rest"
        )
    raise bad_value(
        "inference_model.devices",
        cfg.inference_model.devices,
        f"{wrong}; CUDA_VISIBLE_DEVICES chooses which GPU is the first",
        "inference_model.devices=[0]",
    )
