"""Commands as tests/helpers/plans.txt and docs/devices.md write them, and what they print."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import parse
from torchrl_grpo.config.parsing import schema_node
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning import preflight
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.request import Request, build_request
from torchrl_grpo.runtime.hardware import Hardware

PLANS = Path(__file__).parent / "plans.txt"
CONFIG = Path(__file__).resolve().parents[2] / "config"


def read() -> dict[str, str]:
    """What is asked for to what is printed."""
    _, *blocks = PLANS.read_text().split("\n> ")
    return {block.split("\n", 1)[0]: block.split("\n", 1)[1].rstrip() + "\n" for block in blocks}


def request_of(case: str) -> tuple[Request, int]:
    """What is asked of the planner, and the GPUs there are, out of ``SCRIPT, N GPUs: WORDS``."""
    head, _, text = case.partition(":")
    script, gpus = head.split(", ")
    words = text.split()
    values = [word for word in words if word != "lora"]
    node = OmegaConf.merge(schema_node(), OmegaConf.from_dotlist(values))
    assert isinstance(node, DictConfig)
    cfg = parse(node)
    request = build_request(cfg, asynchronous=script == "grpo-async.py")
    return replace(request, lora="lora" in words), int(gpus.split()[0])


def answer(case: str) -> str:
    """What the planner says to it."""
    request, num_gpus = request_of(case)
    try:
        return plan(request, num_gpus).table()
    except ConfigError as error:
        return f"error: {error}\n"


def dry_run(case: str) -> str:
    """What ``dry_run=true`` prints, out of ``SCRIPT, N GPUs of M GiB: WORDS`` or ``SCRIPT, M GiB: WORDS``."""
    head, _, text = case.partition(":")
    script, size = head.split(", ")
    numbers = [float(number) for number in re.findall(r"\d+", size)]
    there = (
        Hardware((), numbers[0]) if len(numbers) == 1 else Hardware((numbers[1],) * int(numbers[0]), 999.0)
    )
    with composer(CONFIG, "grpo_gsm8k") as tree:
        (overrides,) = tree.jobs(text.split(), sweep=False)
        cfg = parse(tree.compose(overrides).node)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        try:
            preflight.report(cfg, script == "grpo-async.py", there)
        except ConfigError as error:
            written.write(f"error: {error}\n")
    return written.getvalue()
