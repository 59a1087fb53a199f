"""A real SGLang server: tokens, weights and keys. One server serves all tests, and the last one ends it.

SGLang has an environment of its own. ``SGLANG_PYTHON`` names its Python; without it the tests are skipped.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
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
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.inference.protocol import Probe, Request, Sampling
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import Call, ServerConnection, ServerLost
from torchrl_grpo.inference.servers.kinds import SGLANG
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.sglang.seeds import draw
from torchrl_grpo.inference.servers.weight_files import Bucket, WeightFiles
from torchrl_grpo.tools.verify_resume import read
from torchrl_grpo.training.job import run

PYTHON = os.environ.get("SGLANG_PYTHON")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.float32,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="SGLANG_PYTHON names no environment with SGLang"),
]

PROMPTS = [list(range(5, 45)), list(range(50, 90)), list(range(100, 140))]
WANTED = ServerRequirements(torch.float32, None, 600, (2,))


@pytest.fixture(scope="module")
def process(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = started(tiny_model_dir, tmp_path_factory.mktemp("server"))
    yield made
    made.kill()


def started(tiny_model_dir: Path, folder: Path) -> ServerProcess:
    cfg = Config()
    cfg.model.name = str(tiny_model_dir)
    options = replace(cfg.inference_model, backend="sglang_server", server_python=PYTHON)
    cfg.inference_model = replace(options, dtype=Dtype.float32, max_model_len=600)
    launch = SGLANG.launch(
        cfg, str(tiny_model_dir), torch.device("cpu"), max_num_seqs=64, gpu_memory_utilization=0.5
    )
    log = folder / "server.log"
    made = ServerProcess(SGLANG, launch, environment={"OMP_NUM_THREADS": "1"}, log=log)
    made.wait_until_ready(600)
    return made


def connect(process: ServerProcess, folder: Path) -> ServerEngine:
    connection = ServerConnection(process.address, process.key, 60)
    connection.wait_until_up(20)
    return ServerEngine(connection, SGLANG.api, requirements=WANTED, folder=folder, timeout_s=60)


@pytest.fixture
def engine(process: ServerProcess, tmp_path: Path) -> Iterator[ServerEngine]:
    made = connect(process, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)


def log_probs_of(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.double() / temperature, -1)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_are_those_of_the_model_at_the_sampling_temperature(
    temperature: float, engine: ServerEngine, model: Any
) -> None:
    engine.load_weights(model.named_parameters())
    groups = engine.generate(PROMPTS, Sampling(4, 40, temperature, seeds=[11, 22, 33]))
    worst = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = log_probs_of(model, prompt, completion.token_ids, temperature or 1.0)
            worst = max(worst, float((torch.tensor(completion.log_probs) - expected).abs().max()))
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 2 else "length")
            assert 2 not in completion.token_ids[:-1] and len(completion.token_ids) <= 40
            if temperature == 0:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + completion.token_ids])).logits[
                        0, len(prompt) - 1 : -1
                    ]
                assert completion.token_ids == logits.argmax(-1).tolist()
    print(f"largest difference at temperature {temperature}: {worst:.1e}")
    assert worst < 1e-4


def test_a_seed_decides_the_tokens_whatever_else_is_generated(engine: ServerEngine) -> None:
    (alone,) = engine.generate(PROMPTS[:1], Sampling(2, 30, 1.0, seeds=[5]))
    among, *_ = engine.generate(PROMPTS, Sampling(2, 30, 1.0, seeds=[5, 6, 7]))
    (other,) = engine.generate(PROMPTS[:1], Sampling(2, 30, 1.0, seeds=[50]))
    assert [completion.token_ids for completion in alone] == [completion.token_ids for completion in among]
    assert alone[0].token_ids != alone[1].token_ids != other[0].token_ids


def test_tokens_are_drawn_as_often_as_they_are_likely(engine: ServerEngine, model: Any) -> None:
    engine.load_weights(model.named_parameters())
    count = 1000
    completions = engine.generate(PROMPTS[:1], Sampling(count, 1, 1.0, seeds=[12345]))[0]
    with torch.no_grad():
        chance = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1].double(), -1)
    drawn = torch.zeros_like(chance)
    for completion in completions:
        drawn[completion.token_ids[0]] += 1
    expected = chance * count
    common = expected > 5
    squares = ((drawn - expected) ** 2 / expected)[common].sum()
    degrees = int(common.sum())
    # Five standard deviations of chi-square.
    assert abs(float(squares) - degrees) < 5 * (2 * degrees) ** 0.5


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
    assert any(
        count < math.prod(shape) for bucket in older_buckets for _, _, shape, *_, count in bucket.entries
    )
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
        trained.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
    assert publisher.publish(1)["publish/logprob_diff_mean"] < 1e-4
    assert_faults_are_found(publisher, trained, older_buckets, monkeypatch)
    # What a server that was started anew would answer with.
    SGLANG.api.name_weights(engine._connection, "default")
    with pytest.raises(ServerLost, match="it was restarted"):
        engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))


def test_requests_go_on_after_an_update(engine: ServerEngine, model: Any) -> None:
    engine.load_weights(model.named_parameters())
    # As a publication does: an earlier test has cached these prompts with other weights.
    engine.reset_cache()
    (whole,) = engine.generate(PROMPTS[:1], Sampling(2, 300, 1.0, [7], ignore_eos=True))
    engine.submit([Request(n, PROMPTS[0], 300, 1.0, 7 + n, ignore_eos=True) for n in range(2)])
    engine.step()
    begun = engine.abort_all()
    assert {completion.finish_reason for completion in begun.values()} == {"aborted"}
    for number in range(2):
        completion = begun[number]
        assert 0 < len(completion.log_probs) == len(completion.token_ids) < 300
        assert completion.token_ids == whole[number].token_ids[: len(completion.token_ids)]
    engine.load_weights(model.named_parameters())
    engine.reset_cache()
    (again,) = engine.generate(PROMPTS[:1], Sampling(2, 300, 1.0, [7], ignore_eos=True))
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in whole]


def test_each_token_has_noise_of_its_own(engine: ServerEngine, model: Any) -> None:
    engine.load_weights(model.named_parameters())
    count, seed = 60, 7
    ((completion,),) = engine.generate(PROMPTS[:1], Sampling(1, count, 1.0, [seed], ignore_eos=True))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + completion.token_ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    same = torch.full((count,), seed)
    last = torch.arange(len(PROMPTS[0]) - 1, len(PROMPTS[0]) - 1 + count)
    by_shift = {
        shift: draw(logits.log_softmax(-1), same, last + shift).flatten().tolist() for shift in (-1, 0, 1)
    }
    agree = {
        shift: [a == b for a, b in zip(tokens, completion.token_ids, strict=True)]
        for shift, tokens in by_shift.items()
    }
    print({shift: (sum(flags), flags[:3]) for shift, flags in agree.items()})
    assert by_shift[0] == completion.token_ids


def test_requests_of_others_are_frozen_and_name_both_weights(
    engine: ServerEngine, model: Any, process: ServerProcess
) -> None:
    engine.load_weights(model.named_parameters())
    other = ServerConnection(process.address, process.key, 60)
    answers: list[Any] = []
    call = SGLANG.api.generate(Request("x", PROMPTS[0], 400, 1.0, 3, ignore_eos=True), ())
    other.send_later(replace(call, answer=None), answers.append)
    engine.generate(PROMPTS[1:2], Sampling(1, 60, 1.0, [1], ignore_eos=True))
    first = engine._weights_name
    engine.load_weights(model.named_parameters())
    engine.generate(PROMPTS[1:2], Sampling(1, 550, 1.0, [1], ignore_eos=True))
    (answer,) = answers
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [first, engine._weights_name]
    assert spans[0]["start"] == 0 and 0 < spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 400
    other.close()


def test_an_update_that_a_killed_trainer_left_half_done_is_made_good(
    engine: ServerEngine, process: ServerProcess, model: Any, tmp_path: Path
) -> None:
    engine.submit([Request("a", PROMPTS[0], 150, 1.0, 1, ignore_eos=True)])
    engine.start_update()
    half = WeightFiles(tmp_path).write(list(model.named_parameters())[:5])
    engine._call("grpo_load", bucket=next(half.buckets()).to_json())
    engine.close()
    again = connect(process, tmp_path)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    publisher = make_publisher(trained, again, PROMPTS)
    publisher.verify_at_start(0)
    assert publisher.publish(1)["publish/logprob_diff_mean"] < 1e-4
    assert len(again.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))[0]) == 1
    again.close()


def test_the_engine_gives_signs_of_life_and_caches_prompts(engine: ServerEngine) -> None:
    assert engine._connection.send(SGLANG.api.sign_of_life) is None
    engine.reset_cache()
    assert [engine.next_tokens(Probe(PROMPTS[:1], 3)).cached_tokens for _ in range(2)] == [0, 39]


def test_a_method_that_fails_is_an_error_and_not_the_end_of_the_server(engine: ServerEngine) -> None:
    with pytest.raises(ServerLost, match="grpo_nothing failed: ValueError: there is no method"):
        engine._call("grpo_nothing")
    with pytest.raises(ServerLost, match="grpo_load failed: FileNotFoundError"):
        engine.start_update()
        engine._call("grpo_load", bucket=Bucket("/nowhere", ()).to_json())
    engine.finish_update()
    assert len(engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))[0]) == 1


def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(
    process: ServerProcess, config: Config, train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SGLANG.engine.api_key_variable, process.key)
    config.inference_model.backend = "sglang_server"
    config.inference_model.servers = [process.address]
    config.checkpoint.keep = 4
    train("whole", train__checkpoint_frequency=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    config.resume = str(tmp_path / "again/checkpoints/2")
    run(config, tmp_path / "again")
    rollouts = [read(tmp_path / name / "rollouts.jsonl") for name in ("whole", "again")]
    assert len(rollouts[0]) == 64 and len({row["response"] for row in rollouts[0]}) > 8
    assert [row["response"] for row in rollouts[0]] == [row["response"] for row in rollouts[1]]
    metrics = [read(tmp_path / name / "metrics.jsonl") for name in ("whole", "again")]
    for ours, theirs in zip(*metrics, strict=True):
        # Which requests a server computes together changes rounding, and this loss is close to zero.
        assert ours["step"] == theirs["step"] and ours.get("loss/total") == pytest.approx(
            theirs.get("loss/total"), abs=1e-6
        )


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
                for method in [*methods, "options"]:
                    async with stranger.request(method, f"http://server{path}", json={}) as answer:
                        statuses[f"{method} {path}"] = answer.status
            for path in ("/metrics", "/openapi.json", "/docs", "/health", "/ready", "/health_generate"):
                async with stranger.get(f"http://server{path}") as answer:
                    statuses[path] = answer.status
        return statuses

    statuses = connection._run(ask_all())
    assert {"post /generate", "post /update_weights_from_tensor", "get /health"} <= statuses.keys()
    assert len(statuses) > 80
    # Whether it is up, which has no content.
    assert (statuses.pop("get /health"), statuses.pop("/health")) == (200, 200)
    assert set(statuses.values()) == {401}, {
        route: status for route, status in statuses.items() if status != 401
    }


def test_no_key_is_on_the_command_line(process: ServerProcess) -> None:
    first = psutil.Process(process._process.pid)
    for child in [first, *first.children(recursive=True)]:
        assert not any(process.key in word for word in child.cmdline())


def test_a_killed_server_is_lost_and_leaves_nothing_behind(process: ServerProcess, tmp_path: Path) -> None:
    first = psutil.Process(process._process.pid)
    family = [first, *first.children(recursive=True)]
    assert len(family) >= 2
    os.killpg(process._process.pid, signal.SIGKILL)
    process.kill()
    connection = ServerConnection(process.address, process.key, 5)
    with pytest.raises(ServerLost):
        connection.post("/flush_cache", {})
    connection.close()
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not Path(process.address.removeprefix("unix:")).parent.exists()


def test_a_server_runs_no_code_of_a_request(tiny_model_dir: Path, tmp_path: Path) -> None:
    import base64

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    # A server of its own: SGLang ends when it refuses a message.
    process = started(tiny_model_dir, tmp_path)
    engine = connect(process, tmp_path)
    engine.start_update()
    carrier = base64.b64encode(pickle.dumps([("x", Evil())])).decode()
    with pytest.raises(ServerLost):
        engine._connection.send(
            Call("/update_weights_from_tensor", {"serialized_named_tensors": [carrier]}), timeout_s=10
        )
    process._process.wait(60)
    assert not (tmp_path / "touched").exists()
    engine.close()
    process.kill()
