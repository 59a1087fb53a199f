"""A real vLLM server: tokens, weights and keys. One server serves all tests, and the last one ends it."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from publishers import make_publisher
from server_faults import assert_faults_are_found
from tiny_model import build_tiny_model
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM
from vllm_arguments import ON_A_CPU, quick_engines

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import KEY_VARIABLE
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference import vllm_engine
from torchrl_grpo.inference.protocol import Request, Sampling
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.servers.weight_files import WeightFiles
from torchrl_grpo.inference.vllm_arguments import vllm_arguments
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.runtime import shared_memory
from torchrl_grpo.tools.verify_resume import read

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.float32, pytest.mark.timeout(600)]

PROMPTS = [list(range(5, 45)), list(range(50, 90)), list(range(100, 140))]
WANTED = ServerRequirements(torch.float32, None, 200)
SIZES: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 64, "dtype": torch.float32}


@pytest.fixture(scope="module")
def process(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = {name: value for name, value in ON_A_CPU.items() if name != "device"}
    # Files of the user must not take the place of modules of Python.
    here = tmp_path_factory.mktemp("here")
    for name in ("math", "queue", "random", "statistics", "tokenize", "fractions", "torchvision"):
        (here / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    before = Path.cwd()
    os.chdir(here)
    made = ServerProcess(
        VLLM,
        vllm_launch(
            str(tiny_model_dir),
            # vLLM fills its cache with zeros, which takes a second for a GiB. Of the prompts, a step computes
            # one and a part of the next.
            vllm_arguments(on_cpu=True, **arguments, **SIZES)
            | {"kv_cache_memory_bytes": 2**26, "max_num_batched_tokens": 64},
            on_cpu=True,
        ),
        environment={"OMP_NUM_THREADS": "1"},
        log=tmp_path_factory.mktemp("server") / "server.log",
    )
    os.chdir(before)
    made.wait_until_ready(300)
    yield made
    made.kill()


@pytest.fixture
def engine(process: ServerProcess, tmp_path: Path) -> Iterator[ServerEngine]:
    connection = ServerConnection(process.address, process.key, 60)
    connection.wait_until_up(10)
    made = ServerEngine(connection, VLLM.api, requirements=WANTED, folder=tmp_path, timeout_s=60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)


@quick_engines()
def test_a_server_generates_what_an_engine_in_the_process_does(
    engine: ServerEngine, config: Config, train: Runner, process: ServerProcess,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    sampling = Sampling(3, 20, 0.7, seeds=[11, 22, 33])
    build, inside = vllm_engine.build, []

    def build_and_generate(*arguments: Any, **options: Any) -> VLLMEngine:
        made = build(*arguments, **options)
        # It computes all prompts in one step.
        inside.extend(made.generate(PROMPTS, sampling))
        return made

    monkeypatch.setattr(vllm_engine, "build", build_and_generate)
    # Whole runs generate the same, too, also after a publication.
    config.train.total_dialog_turns, config.eval.num_problems = 32, 0
    config.inference_model.backend = "vllm"
    config.inference_model.engine_args = {"num_gpu_blocks_override": 256}
    train("inside", inference_model__kv_cache_gib=1)
    config.inference_model.engine_args = {}
    for ours, theirs in zip(engine.generate(PROMPTS, sampling), inside, strict=True):
        for completion, other in zip(ours, theirs, strict=True):
            assert completion.token_ids == other.token_ids and completion.finish_reason == other.finish_reason
            assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    monkeypatch.setenv(KEY_VARIABLE, process.key)
    config.inference_model.backend = "vllm_server"
    config.inference_model.servers = [process.address]
    train("served")
    runs = [read(tmp_path / name / "rollouts.jsonl") for name in ("inside", "served")]
    assert [row["response"] for row in runs[0]] == [row["response"] for row in runs[1]]


def test_weights_are_published_and_proved_and_their_loss_is_found(
    engine: ServerEngine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**16)
    trained = copy.deepcopy(model)
    publisher = make_publisher(trained, engine, PROMPTS)
    publisher.verify_at_start(0)
    assert publisher.unreadable == []
    older = WeightFiles(tmp_path).write(trained.named_parameters())
    older_buckets = list(older.buckets())
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
    assert publisher.publish(1)["publish/logprob_diff_mean"] < 1e-4
    assert_faults_are_found(publisher, trained, older_buckets, monkeypatch)
    # What a server that was started anew would answer with.
    engine._connection.post("/update_weight_version", {"new_version": "default"})
    with pytest.raises(ServerLost, match="it was restarted"):
        engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))


def test_requests_go_on_after_an_update(engine: ServerEngine, model: Any) -> None:
    engine.load_weights(model.named_parameters())
    whole = {
        key: completion
        for key, completion in zip(
            "ab", engine.generate(PROMPTS[:1], Sampling(2, 90, 1.0, [7]))[0], strict=True
        )
    }
    engine.submit([Request(key, PROMPTS[0], 90, 1.0, 7 + n) for n, key in enumerate("ab")])
    engine.step()
    begun = engine.abort_all()
    assert {completion.finish_reason for completion in begun.values()} <= {"aborted", "stop", "length"}
    for key, completion in begun.items():
        assert completion.token_ids == whole[str(key)].token_ids[: len(completion.token_ids)]
        assert len(completion.log_probs) == len(completion.token_ids)
    engine.load_weights(model.named_parameters())
    engine.reset_cache()
    (again,) = engine.generate(PROMPTS[:1], Sampling(2, 90, 1.0, [7]))
    assert [completion.token_ids for completion in again] == [whole[key].token_ids for key in "ab"]


def test_an_update_that_a_killed_trainer_left_half_done_is_made_good(
    engine: ServerEngine, process: ServerProcess, model: Any, tmp_path: Path
) -> None:
    engine.submit([Request("a", PROMPTS[0], 150, 1.0, 1, ignore_eos=True)])
    engine.start_update()
    half = WeightFiles(tmp_path).write(list(model.named_parameters())[:5])
    engine._call("grpo_load", bucket=next(half.buckets()).to_json())
    engine.close()
    connection = ServerConnection(process.address, process.key, 20)
    again = ServerEngine(connection, VLLM.api, requirements=WANTED, folder=tmp_path, timeout_s=20)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    publisher = make_publisher(trained, again, PROMPTS)
    publisher.verify_at_start(0)
    assert publisher.publish(1)["publish/logprob_diff_mean"] < 1e-4
    assert len(again.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))[0]) == 1
    again.close()


def test_every_route_asks_for_the_key(engine: ServerEngine, process: ServerProcess) -> None:
    connection = engine._connection

    async def ask_all() -> dict[str, int]:
        async with connection._session.get("http://server/openapi.json") as answer:
            routes = (await answer.json())["paths"]
        statuses = {}
        unix = aiohttp.UnixConnector(process.address.removeprefix("unix:"))
        async with aiohttp.ClientSession(
            connector=unix, headers={"Authorization": "Bearer guess"}
        ) as stranger:
            for path, methods in routes.items():
                for method in methods:
                    async with stranger.request(method, f"http://server{path}", json={}) as answer:
                        statuses[f"{method} {path}"] = answer.status
            for path in ("/metrics", "/openapi.json", "/docs"):
                async with stranger.get(f"http://server{path}") as answer:
                    statuses[path] = answer.status
            async with stranger.get("http://server/health") as answer:
                assert await answer.read() == b""
        return statuses

    statuses = connection._run(ask_all())
    assert {
        "post /pause",
        "post /collective_rpc",
        "post /inference/v1/generate",
        "get /health",
    } <= statuses.keys()
    assert len(statuses) > 20
    # Whether it is up, which has no content.
    assert statuses.pop("get /health") == 200
    assert set(statuses.values()) == {401}, {
        route: status for route, status in statuses.items() if status != 401
    }


def test_a_server_with_another_model_is_refused_and_serves_its_own(
    process: ServerProcess, tiny_model_dir: Path, tmp_path: Path
) -> None:
    def connect(model: Path) -> ServerEngine:
        connection = ServerConnection(process.address, process.key, 60)
        requirements = replace(WANTED, model=describe(str(model)))
        return ServerEngine(connection, VLLM.api, requirements=requirements, folder=tmp_path, timeout_s=60)

    with pytest.raises(ConfigError, match=r"another model, .*tiny, than this run .*: all sizes are equal"):
        connect(build_tiny_model(tmp_path / "other", seed=1))
    connect(tiny_model_dir).close()


def test_a_killed_server_is_lost_and_leaves_nothing_behind(
    engine: ServerEngine, process: ServerProcess
) -> None:
    first = psutil.Process(process._process.pid)
    family = [first, *first.children(recursive=True)]
    assert len(family) >= 2
    # A process for the model alone would look for work on a core of its own.
    assert not [member for member in family if "VLLM::Worker" in " ".join(member.cmdline())]
    assert not shared_memory.segments_of(process._process.pid)
    # Many, so that some still run when it is killed.
    engine.submit([Request(n, PROMPTS[0], 150, 1.0, n, ignore_eos=True) for n in range(256)])
    # Not by the run: the system does that if memory runs out.
    os.killpg(process._process.pid, signal.SIGKILL)
    process.kill()
    with pytest.raises(ServerLost):
        for _ in range(500):
            engine.step()
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not Path(process.address.removeprefix("unix:")).parent.exists()
