"""Advice of the planner for models that do not fit: planned again, it does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from slow_cases import slow_except

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks import schedule, whole
from torchrl_grpo.config.resume import is_changeable_on_resume
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning import memory, preflight
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.runtime.hardware import Hardware

# As published: Qwen2.5 of five sizes, and Llama-2-7B.
SHAPES = {
    "0.5B": ModelShape(494_032_768, 151_936, 896, 24, 4864, 896, 128),
    "1.5B": ModelShape(1_543_714_304, 151_936, 1536, 28, 8960, 1536, 256),
    "3B": ModelShape(3_085_938_688, 151_936, 2048, 36, 11_008, 2048, 256),
    "7B": ModelShape(7_615_616_512, 152_064, 3584, 28, 18_944, 3584, 512),
    "llama-7B": ModelShape(6_738_415_616, 32_000, 4096, 32, 11_008, 4096, 4096),
    "14B": ModelShape(14_770_033_664, 152_064, 5120, 48, 13_824, 5120, 1024),
    "32B": ModelShape(32_763_876_352, 152_064, 5120, 64, 27_648, 5120, 1024),
}
# GPUs and the memory that is left of each.
MACHINES = {"1x24": (1, 23.99), "1x80": (1, 79.6), "6x80": (6, 79.6), "8x80": (8, 79.6)}
# Of these a rank that loads a whole model in float32 may take more than one that trains a shard.
MACHINES |= {"8x24": (8, 23.99), "8x48": (8, 47.99)}
FAST = [("1.5B", "1x24"), ("7B", "8x80")]
# Of two sizes one machine is enough.
ONLY_ON = {"3B": "1x80", "llama-7B": "6x80", "14B": "8x48"}
TRAINED = {
    "full": "",
    "adapters": "train_model.lora.rank=16",
    "kl": "policy.kl_coef=0.1",
    # What somebody writes who wants all of a machine.
    "ranks": "train_model.num_devices=MOST",
    "reference": "policy.kl_coef=0.1 ref_model.num_devices=1",
}
SCRIPTS = {"sync": False, "async": True}
# The engine's weights, 14 and 61 GiB, leave no room beside a trainer: not even one that takes turns with it.
# Those of 61 GiB fit on no smaller GPU.
HOPELESS = re.compile(r"7B-1x24-async|32B-1x|32B-8x[24]")
LARGE = "train.max_tokens_per_microbatch=65536"
SMALLER = ["train.max_tokens_per_microbatch=8192", "train_model.gradient_checkpointing=true"]
SCHEMA = OmegaConf.structured(Config)


@pytest.fixture(autouse=True)
def _a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "cuda_device_present", lambda: True)


def read(words: str) -> Config:
    """A configuration of the default recipe with overrides, read as from a command line."""
    node = OmegaConf.merge(SCHEMA, OmegaConf.from_dotlist(words.split()))
    assert isinstance(node, DictConfig)
    return parse(node)


def planned(words: str, asynchronous: bool, there: Hardware) -> Planned:
    """The plan of a command, with all that is checked before a run."""
    cfg = read(words)
    (schedule.check_async if asynchronous else schedule.check_sync)(cfg)
    result = preflight.make(cfg, asynchronous, there)
    preflight.check_memory(result)
    return result


def advised(error: str) -> list[str]:
    advice = error.partition("; write ")[2]
    return [] if advice.startswith("a smaller model") else advice.split(" or ")


CASES = [
    (f"{size}-{machine}-{script}-{what}", size, machine, script, what)
    for size in SHAPES
    for machine in MACHINES
    for script in SCRIPTS
    for what in TRAINED
    if not (what == "ranks" and machine.startswith("1x")) and ONLY_ON.get(size, machine) == machine
]


@pytest.mark.parametrize(
    ("name", "size", "machine", "script", "what"),
    slow_except([case for case in CASES if case[1:3] in FAST], CASES),
    ids=[case[0] for case in CASES],
)
def test_what_is_advised_fits(
    name: str, size: str, machine: str, script: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])
    number, gib = MACHINES[machine]
    there, asynchronous = Hardware((gib,) * number, 900.0, ((9, 0),) * number), SCRIPTS[script]
    words = TRAINED[what].replace("MOST", str(number))
    try:
        planned(words, asynchronous, there)
        return
    except ConfigError as error:
        advice = advised(str(error))
    assert bool(advice) is not bool(HOPELESS.match(name)), name
    for proposal in advice:
        # As a user would: the advice after the words that were wrong.
        again = planned(f"{words} {proposal}", asynchronous, there)
        assert again.prediction is not None
        for device in {*again.plan.train.devices, *again.plan.inference.devices}:
            assert again.prediction.peak(device)[0] <= gib * 2**30, proposal


def test_a_large_teacher_is_loaded_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["0.5B"])
    monkeypatch.setattr(memory, "read_teacher_shape", lambda name, cache_dir: SHAPES["32B"])
    there = Hardware((79.2,) * 3, 900.0, ((9, 0),) * 3)
    words = "policy.distill_coef=1 teacher_model.name=large teacher_model.num_devices=1"
    with pytest.raises(ConfigError, match=r"122\.\d\d GiB .* while loading, most of it for teacher") as error:
        planned(words, False, there)
    assert advised(str(error.value)) == ["teacher_model.dtype=bfloat16"]
    planned(f"{words} teacher_model.dtype=bfloat16", False, there)


@pytest.mark.parametrize(
    ("size", "machine", "expected"),
    [
        # What used to be told to take a smaller model.
        ("1.5B", "1x24", ["train_model.lora.rank=16"]),
        ("7B", "1x80", ["train_model.lora.rank=16"]),
        (
            "7B",
            "8x80",
            ["train_model.num_devices=4 train_model.parallelism=fsdp2", "train_model.lora.rank=16"],
        ),
        (
            "llama-7B",
            "6x80",
            ["train_model.num_devices=4 train_model.parallelism=fsdp2", "train_model.lora.rank=16"],
        ),
    ],
)
def test_large_models_are_told_of_shards_and_adapters(
    size: str, machine: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])
    number, gib = MACHINES[machine]
    with pytest.raises(ConfigError) as caught:
        planned("", False, Hardware((gib,) * number, 900.0))
    assert advised(str(caught.value)) == expected


@pytest.mark.parametrize(
    ("size", "machine", "shards"),
    [
        ("1.5B", "8x24", True),
        ("7B", "8x24", False),
        ("7B", "8x48", True),
        ("14B", "8x48", False),
    ],
)
def test_shards_are_advised_only_where_the_whole_model_can_be_loaded(
    size: str, machine: str, shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])
    number, gib = MACHINES[machine]
    there = Hardware((gib,) * number, 900.0)
    with pytest.raises(ConfigError) as caught:
        planned("", False, there)
    advice = advised(str(caught.value))
    assert advice and any("parallelism=fsdp2" in proposal for proposal in advice) is shards
    for proposal in advice:
        planned(proposal, False, there)
    # Each rank loads all of it on its own GPU, whatever its shard is.
    assert (4 * SHAPES[size].parameters / 2**30 + 0.7 <= gib) is shards


def test_ranks_that_cannot_load_what_they_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["7B"])
    # What used to be advised: the largest phase of a step takes 20.79 GiB.
    words = "train_model.num_devices=7 train_model.parallelism=fsdp2 train_model.gradient_checkpointing=true"
    message = r"29\.07 GiB are needed on cuda:0 while loading, most of it for train \(load: 28\.37 GiB\)"
    # Nothing of it depends on lengths: a little less is too little too.
    for gib in (24.0, 29.0):
        with pytest.raises(ConfigError, match=message) as caught:
            planned(words, False, Hardware((gib,) * 8, 900.0))
        advice = advised(str(caught.value))
        assert advice and all("train_model.parallelism=ddp" in proposal for proposal in advice)
    planned(words, False, Hardware((48.0,) * 8, 900.0))


def test_a_share_is_advised_only_with_what_else_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["7B"])
    there = Hardware((23.99,), 900.0)
    with pytest.raises(ConfigError) as caught:
        planned("", False, there)
    (advice,) = advised(str(caught.value))
    assert "gpu_memory_utilization=0.7" in advice and "quantization=nf4" in advice
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\(needs the package bitsandbytes, which is not installed\)$"):
        planned("", False, there)


@pytest.mark.parametrize(
    ("size", "words", "expected"),
    [
        ("1.5B", "", ["train_model.lora.rank=16"]),
        # Adapters are enough, and take a new run.
        ("1.5B", "resume=auto", ["in a new run train_model.lora.rank=16"]),
        ("0.5B", LARGE, SMALLER),
        ("0.5B", f"{LARGE} resume=auto", SMALLER),
        # Nothing is enough, of a new run either.
        ("32B", "resume=auto", []),
    ],
)
def test_a_run_that_is_resumed_is_told_only_what_it_may_change(
    size: str, words: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])
    there = Hardware((23.99,), 900.0)
    with pytest.raises(ConfigError) as caught:
        planned(words, False, there)
    advice = advised(str(caught.value))
    assert advice == expected
    for proposal in advice:
        change, new = proposal.removeprefix("in a new run "), proposal.startswith("in a new run ")
        # Of a run that goes on every key is one that it may change; of a new one none has to be.
        assert (
            new
            or "resume" not in words
            or all(is_changeable_on_resume(word.split("=")[0]) for word in change.split())
        )
        planned(f"{words} {change} {'resume=null' if new else ''}", False, there)


def test_a_line_says_what_takes_less_where_it_may_be_too_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words: dict[str, Any] = {"model.cache_dir": tmp_path, "inference_model.backend": "transformers"}
    cfg = read(" ".join(f"{key}={value}" for key, value in words.items()))
    needs = preflight.make(cfg, False, Hardware((), 99.0)).prediction
    assert needs is not None
    peak = needs.peak("cpu")[0] / 2**30
    for share, warns in ((1.1, False), (0.9, True)):
        preflight.report(cfg, False, Hardware((), peak * share))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("memory: the longest texts may not fit; ") is warns, lines
    for proposal in lines[-1].partition("; ")[2].removesuffix(" takes less").split(" or "):
        again = preflight.make(
            read(" ".join([*(f"{key}={value}" for key, value in words.items()), proposal])), False, Hardware()
        )
        assert again.prediction is not None and again.prediction.peak("cpu")[0] <= peak * 0.9 * 2**30
