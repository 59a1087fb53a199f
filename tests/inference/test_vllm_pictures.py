"""The real vLLM generates from pictures what the trainer scores, in this process and in a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_server import start_server
from picture_prompts import log_probs_of, prompts_of, sampling, scores
from publishers import make_publisher
from tiny_runs import Runner, config, train, without_eval  # noqa: F401  fixtures
from tiny_vlm import build, build_tiny_vlm
from vllm_arguments import ON_A_CPU, quick_engines

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.vllm_arguments import vllm_arguments
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run_async

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.float32, pytest.mark.timeout(600)]

_SIZES: dict[str, Any] = {**ON_A_CPU, "max_model_len": 512, "max_num_seqs": 16, "dtype": torch.float32}


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[ServerProcess, ServerEngine]]:
    """A server of a model, and its engine."""
    sizes = {name: value for name, value in _SIZES.items() if name != "device"}
    # vLLM fills its cache with zeros, which takes a second for a GiB.
    arguments = vllm_arguments(on_cpu=True, **sizes) | {"kv_cache_memory_bytes": 2**26}
    launch = vllm_launch(str(model), arguments, on_cpu=True)
    process = start_server(launch, folder / "server.log")
    try:
        process.wait_until_ready(300)
        connection = ServerConnection(process.address, process.key, 60)
        connection.wait_until_up(10)
        requirements = ServerRequirements(torch.float32, None, 512)
        engine = ServerEngine(connection, VLLM.api, requirements=requirements, folder=folder, timeout_s=60)
        yield process, engine
        engine.close()
    finally:
        process.kill()


def check(engine: SteppingEngine, family: str) -> None:
    """Compare it with the trainer, also after a publication that changes the vision tower."""
    _, processor = build(family)
    pictures = PictureProcessor(processor)
    prompts, shown = prompts_of(processor)
    for seed in range(2):
        model, _ = build(family, seed)
        if seed:
            publisher = make_publisher(model, engine, prompts[1::2], processor=pictures, pictures=shown[1::2])
            publisher.verify_at_start(seed)
            assert publisher.unreadable == []
        completions = engine.generate(prompts, sampling(shown))
        expected = scores(model, pictures, prompts, shown, completions)
        torch.testing.assert_close(log_probs_of(completions), expected, rtol=0, atol=1e-5)
        tokens = {token for group in completions for each in group for token in each.token_ids}
        assert tokens.isdisjoint(pictures.blocked)


@quick_engines()
def test_vllm_in_the_process_samples_what_the_trainer_scores(tmp_path: Path) -> None:
    """vLLM's own class of LLaVA needs torchvision, so vLLM computes with that of transformers."""
    build_tiny_vlm(tmp_path, "llava")
    engine = VLLMEngine(
        str(tmp_path), **_SIZES, engine_args={"model_impl": "transformers", "num_gpu_blocks_override": 512}
    )
    try:
        check(engine, "llava")
    finally:
        engine.close()


def test_vllm_in_a_server_samples_what_the_trainer_scores(
    config: Config, train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_vlm(tmp_path / "model")
    with served(model, tmp_path) as (process, engine):
        check(engine, "idefics3")
        config.model.name, config.model.pictures = str(model), True
        config.env.dataset, config.env.data_path = "pictures", None
        config.env.task_args = {"kinds": ["count", "dice"], "size": 48}
        config.inference_model.max_model_len, config.train.total_dialog_turns = 256, 32
        config.eval.frequency = 0
        monkeypatch.setenv(KEY_VARIABLE, process.key)
        config.inference_model.backend = "vllm_server"
        config.inference_model.servers = [process.address]
        together = without_eval(train("sync"))
        config.collector.max_policy_age = 0
        run_async(config, tmp_path / "async")
        apart = without_eval(read(tmp_path / "async/metrics.jsonl"))
        assert len(together) == len(apart) == 2
        assert all(line["policy/logprob_diff"] < 1e-5 for line in [*together, *apart])
        first, second = (read(tmp_path / run / "rollouts.jsonl") for run in ("sync", "async"))
        for key in ("prompt", "pictures", "response"):
            assert [row[key] for row in first] == [row[key] for row in second]
