"""Reads tests/plans.txt: commands, and the plans that they get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from torchrl_grpo.config import Config, parse
from torchrl_grpo.devices import Request, plan, request_of
from torchrl_grpo.errors import ConfigError

PLANS = Path(__file__).parent / "plans.txt"


def read() -> dict[str, str]:
    """What is asked for to what is printed."""
    _, *blocks = PLANS.read_text().split("\n> ")
    return {block.split("\n", 1)[0]: block.split("\n", 1)[1].rstrip() + "\n" for block in blocks}


def asked(case: str) -> tuple[Request, int]:
    """What is asked of the planner, and the GPUs there are, out of ``SCRIPT, N GPUs: WORDS``."""
    head, _, text = case.partition(":")
    script, gpus = head.split(", ")
    words = text.split()
    values = [word for word in words if word != "lora"]
    cfg: Config = parse(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(values)))
    request = request_of(cfg, apart=script == "grpo-async.py")
    return replace(request, lora="lora" in words), int(gpus.split()[0])


def answer(case: str) -> str:
    """What the planner says to it."""
    request, num_gpus = asked(case)
    try:
        return plan(request, num_gpus).table()
    except ConfigError as error:
        return f"error: {error}\n"
