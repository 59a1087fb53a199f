"""``allocation_mode``: what a line means, which plan follows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.allocation import meaning
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.checks.schedule import check_async
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.parsing import schema_node
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.request import build_request

TRAIN, INFER = "train_model", "inference_model"


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)


def parsed(line: str, *words: str) -> Config:
    overrides = [f"allocation_mode={line}", *words]
    node = OmegaConf.merge(schema_node(), OmegaConf.from_dotlist(overrides))
    assert isinstance(node, DictConfig)
    return parse(node)


# The line, GPUs, whether grpo-async.py; then GPUs of the trainer and of the engines, and what they are.
PLANS: list[tuple[str, int, bool, str, str, str, str]] = [
    ("vllm:d1+fsdp:d1", 2, False, "0", "1", "vllm", "auto"),
    ("vllm:d1+fsdp:d1", 2, True, "0", "1", "vllm", "auto"),
    ("vllm:d4+fsdp:d4", 8, False, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4+fsdp:d4", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d2+fsdp:d6", 8, True, "0-5", "6-7", "vllm", "fsdp2"),
    ("vllm:d6+fsdp:d2", 8, True, "0-1", "2-7", "vllm", "fsdp2"),
    ("vllm:d4p1t1+fsdp:d4p1t1", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4t1p1+fsdp:d4t1p1c1e1", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:t1d4+fsdp:p1d4", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4+d4", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4p1t1+d4p1t1", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm.d4p1t1+d4p1t1", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("d4+d4", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4 + fsdp:d4", 8, True, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4+ddp:d4", 8, False, "0-3", "4-7", "vllm", "ddp"),
    ("vllm:d4+fsdp2:d4", 8, False, "0-3", "4-7", "vllm", "fsdp2"),
    ("vllm:d4+deepspeed_zero2:d4", 8, False, "0-3", "4-7", "vllm", "deepspeed_zero2"),
    ("vllm:d1+deepspeed_zero3:d7", 8, False, "0-6", "7", "vllm", "deepspeed_zero3"),
    ("vllm_server:d4+fsdp:d4", 8, True, "0-3", "4-7", "vllm_server", "fsdp2"),
    ("sglang:d4p1t1+d4p1t1", 8, True, "0-3", "4-7", "sglang_server", "fsdp2"),
    ("sglang:d4+fsdp:d4", 8, True, "0-3", "4-7", "sglang_server", "fsdp2"),
    ("vllm_server:d1+fsdp:d1", 2, False, "0", "1", "vllm_server", "auto"),
    ("transformers:d1+fsdp:d1", 2, False, "0", "1", "transformers", "auto"),
    ("fsdp:d1", 1, False, "0", "0", "vllm", "auto"),
    ("fsdp:d4", 8, False, "0-3", "0-3", "vllm", "fsdp2"),
    ("fsdp:d8", 8, False, "0-7", "0-7", "vllm", "fsdp2"),
    ("fsdp:d1", 4, False, "0", "0", "vllm", "auto"),
    ("vllm:d1|fsdp:d1", 4, False, "0", "0", "vllm", "auto"),
    ("ddp:d2", 2, False, "0-1", "0-1", "vllm", "ddp"),
    ("d8", 8, False, "0-7", "0-7", "vllm", "fsdp2"),
    ("vllm:d8|fsdp:d8", 8, False, "0-7", "0-7", "vllm", "fsdp2"),
    ("vllm:d1|fsdp:d1", 1, False, "0", "0", "vllm", "auto"),
    ("transformers:d4|ddp:d4", 4, False, "0-3", "0-3", "transformers", "ddp"),
    # Engines of several devices, which are servers.
    ("vllm:d4t2+fsdp:d8", 16, True, "0-7", "8-15", "vllm_server", "fsdp2"),
    ("vllm:d4t2+fsdp:d8", 16, False, "0-7", "8-15", "vllm_server", "fsdp2"),
    ("vllm:d4p2+fsdp:d8", 16, True, "0-7", "8-15", "vllm_server", "fsdp2"),
    ("vllm:d2t2p2+fsdp:d8", 16, True, "0-7", "8-15", "vllm_server", "fsdp2"),
    ("vllm:t8+fsdp:d8", 16, True, "0-7", "8-15", "vllm_server", "fsdp2"),
    ("vllm_server:d1t4+ddp:d4", 8, False, "0-3", "4-7", "vllm_server", "ddp"),
    ("vllm:t2+fsdp:d1", 4, False, "0", "1-2", "vllm_server", "auto"),
    ("vllm:d3t2+d2", 8, True, "0-1", "2-7", "vllm_server", "fsdp2"),
    ("d2t2+d4", 8, True, "0-3", "4-7", "vllm_server", "fsdp2"),
    ("vllm:d2t2p2|fsdp:d4", 8, False, "0-3", "0-7", "vllm_server", "fsdp2"),
    ("vllm:d2t2|fsdp:d4", 4, False, "0-3", "0-3", "vllm_server", "fsdp2"),
    ("vllm:d1t4|fsdp:d4", 8, False, "0-3", "0-3", "vllm_server", "fsdp2"),
    ("vllm:p4|ddp:d4", 4, False, "0-3", "0-3", "vllm_server", "ddp"),
]  # fmt: skip


def gpus(names: tuple[str, ...]) -> str:
    numbers = [name.removeprefix("cuda:") for name in names]
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


@pytest.mark.parametrize(("line", "count", "asynchronous", "train", "engines", "backend", "kind"), PLANS)
def test_a_line_is_planned(
    line: str, count: int, asynchronous: bool, train: str, engines: str, backend: str, kind: str
) -> None:
    cfg = parsed(line, "env.num_envs=8")
    chosen = plan(build_request(cfg, asynchronous), count)
    assert (gpus(chosen.train.devices), gpus(chosen.inference.devices)) == (train, engines)
    assert (cfg.inference_model.backend, cfg.train_model.parallelism) == (backend, kind)
    # The plan says what the line stands for, and these keys give the same plan.
    (note,) = chosen.notes
    settings = ", ".join(f"{key}={show(value)}" for key, value in meaning(cfg).items())
    assert note == f"allocation_mode={line} is {settings}"
    node = OmegaConf.merge(
        schema_node(),
        OmegaConf.from_dotlist([f"{key}={show(value)}" for key, value in meaning(cfg).items()]),
    )
    assert isinstance(node, DictConfig)
    same = plan(build_request(parse(node), asynchronous), count)
    size = cfg.inference_model.tensor_parallel_size * cfg.inference_model.pipeline_parallel_size
    assert chosen.engine_size == size and chosen.num_engines * size == len(chosen.inference.devices)
    assert (same.train, same.inference) == (chosen.train, chosen.inference)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("vllm", "'vllm' is not BACKEND:SIZES, as in vllm:d4 or fsdp:d8"),
        ("", "'' is not BACKEND:SIZES"),
        ("vllm:d4+", "'' is not BACKEND:SIZES"),
        ("vllm:d4+fsdp:4", "'fsdp:4' is not BACKEND:SIZES"),
        ("vllm:d4-fsdp:d4", "'vllm:d4-fsdp:d4' is not BACKEND:SIZES"),
        ("vllm:x4+fsdp:d4", "x4 in 'vllm:x4' is no size; sizes are d (data), t (tensor)"),
        ("vllm:d0+fsdp:d4", "d0 in 'vllm:d0' must be at least d1"),
        ("vllm:d2d2+fsdp:d4", "d2 in 'vllm:d2d2' is no size; sizes are"),
        ("transformers:d4t2+fsdp:d8", "an engine of transformers has one device; write vllm, or t1 and p1"),
        ("vllm:d4c2+fsdp:d8", "c2 in 'vllm:d4c2' asks for context parallelism, which does not exist here"),
        ("vllm:d4t2+d4t2", "a trainer has data parallelism only; write t1 and p1 for it, and more of d"),
        ("vllm:d1t2|fsdp:d4", "2 and 4 devices cannot be the same ones"),
        ("vllm:d4+fsdp:d4t2", "t2 in 'fsdp:d4t2' asks for tensor parallelism"),
        ("vllm:d4+fsdp:d4c2", "c2 in 'fsdp:d4c2' asks for context parallelism"),
        ("vllm:d4+fsdp:d4e2", "e2 in 'fsdp:d4e2' asks for expert parallelism"),
        (
            "lmdeploy:d4+fsdp:d4",
            "nothing generates with 'lmdeploy' here; write one of vllm, vllm_server, sglang, sgl",
        ),
        ("vllm:d4+megatron:d4", "nothing trains with 'megatron' here; write one of fsdp, fsdp2, ddp"),
        ("vllm:d4+fsdp:d2+fsdp:d2", "it has more than two parts"),
        ("vllm:d4", "it says nothing of the trainer; write allocation_mode=vllm:d4+fsdp:d1"),
        (
            "vllm:d4|fsdp:d8",
            "4 and 8 devices cannot be the same ones; write the same sizes on both sides of |",
        ),
        ("megatron:(attn:d2p2|ffn:d2e2)", "layouts of experts and names of parts are not supported"),
        ("vllm[rollout]:d4+fsdp[actor]:d4", "layouts of experts and names of parts are not supported"),
    ],
)
def test_a_line_that_cannot_be_followed_is_refused(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(f"'{line}'")
    message = str(refused.value)
    assert message.startswith(f"allocation_mode={line}: ") and says in message and "write " in message


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "train_model.num_devices=2",
            "allocation_mode=vllm:d4+fsdp:d4 says train_model.num_devices=4; remove one",
        ),
        ("inference_model.num_devices=2", "says inference_model.num_devices=4; remove one of the two"),
        ("train_model.parallelism=ddp", "says train_model.parallelism=fsdp2; remove one of the two"),
        ("inference_model.backend=transformers", "says inference_model.backend=vllm; remove one of the two"),
    ],
)
def test_a_contradiction_is_one_error(word: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("vllm:d4+fsdp:d4", word)
    assert str(refused.value).startswith(f"{word}: ") and says in str(refused.value)


def test_what_the_line_says_may_be_said_twice(capsys: Any) -> None:
    cfg = parsed("vllm:d4+fsdp:d4", f"{TRAIN}.num_devices=4", f"{INFER}.backend=vllm_server")
    assert cfg.train_model.num_devices == 4 and cfg.inference_model.backend == "vllm_server"


def test_workers_that_run_ahead_have_devices_of_their_own() -> None:
    check_async(parsed("vllm:d2+fsdp:d2"))
    check_async(parsed("vllm:d1|fsdp:d1"))
    with pytest.raises(
        ConfigError, match=r"allocation_mode=vllm:d2\|fsdp:d2: workers .*write .*=vllm:d4\+fsdp:d4"
    ):
        check_async(parsed("vllm:d2|fsdp:d2"))
