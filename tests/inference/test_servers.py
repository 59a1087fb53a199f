"""Engines behind HTTP: tokens, weights, keys and faults, with a server in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_server import FakeServer, FakeSGLang, make_engine
from publishers import make_publisher
from tiny_model import build_tiny_model
from transformers import AutoModelForCausalLM

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import ConfigError, ModelError, TrainingStopped
from torchrl_grpo.inference.checksums import compute_checksums
from torchrl_grpo.inference.protocol import Completion, Probe, Request, Sampling
from torchrl_grpo.inference.servers import engine as server_engine
from torchrl_grpo.inference.servers import process, weight_files
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection, ServerLost
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.require_key import RequireKey
from torchrl_grpo.inference.servers.sglang import loader, seeds
from torchrl_grpo.inference.servers.sglang.weights import SGLangWeights
from torchrl_grpo.inference.servers.vllm import api as vllm_api
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.servers.weight_files import (
    Bucket,
    WeightFiles,
    remove_abandoned,
    whole_tensors,
)
from torchrl_grpo.inference.servers.weight_folder import BucketReader, FolderWeights
from torchrl_grpo.inference.vllm_arguments import as_flags, vllm_arguments
from torchrl_grpo.models import saving
from torchrl_grpo.models.loading import load_tokenizer
from torchrl_grpo.models.prepare import prepare_for_training
from torchrl_grpo.runtime.files import shared_files, socket_folder

ROOT = Path(__file__).resolve().parents[2]
WANTED = ServerRequirements(torch.float32, None, 1000)
PROMPTS = [list(range(5, 45)), list(range(50, 90)), list(range(100, 140))]


@pytest.fixture(params=[FakeServer, FakeSGLang], ids=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeServer]:
    # The fake SGLang replaces it, and this puts it back.
    monkeypatch.setattr(loader, "_server_args", loader._server_args)
    made = request.param(make_engine(tiny_model_dir), tmp_path / "socket")
    yield made
    made.kill()


def connect(
    server: FakeServer,
    tmp_path: Path,
    *,
    timeout_s: float = 20.0,
    key: str = "secret",
    model: dict[str, Any] | None = None,
    vocabulary: int = 1000,
) -> ServerEngine:
    connection = ServerConnection(server.address, key, timeout_s, server.kind.engine.api_key_variable)
    requirements = replace(WANTED, model=model, vocabulary=vocabulary)
    return ServerEngine(
        connection, server.kind.api, requirements=requirements, folder=tmp_path, timeout_s=timeout_s
    )


@pytest.fixture
def engine(server: FakeServer, tmp_path: Path) -> Iterator[ServerEngine]:
    made = connect(server, tmp_path)
    yield made
    made.close()


def test_responses_are_those_of_the_engine_behind_the_server(
    engine: ServerEngine, server: FakeServer, tiny_model_dir: Path
) -> None:
    sampling = Sampling(3, 12, 0.7, seeds=[11, 22, 33])
    groups = engine.generate(PROMPTS, sampling)
    expected = make_engine(tiny_model_dir).generate(PROMPTS, sampling)
    for ours, theirs in zip(groups, expected, strict=True):
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
        assert [answer.finish_reason for answer in ours] == [answer.finish_reason for answer in theirs]
        for answer, other in zip(ours, theirs, strict=True):
            assert answer.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert engine.step() == [], "nothing runs any more"


def test_a_token_of_the_request_ends_a_response(engine: ServerEngine) -> None:
    ((whole,),) = engine.generate(PROMPTS[:1], Sampling(1, 12, 0.0, ignore_eos=True))
    last = whole.token_ids[4]
    engine.submit([Request("a", PROMPTS[0], 12, 0.0, stop_token_ids=(last,))])
    completions: dict[Hashable, Completion] = {}
    while not completions:
        completions.update(engine.step())
    assert completions["a"].token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
    assert completions["a"].finish_reason == "stop"


def test_aborted_requests_return_what_they_have(engine: ServerEngine) -> None:
    engine.submit([Request(("a", n), PROMPTS[0], 400, 1.0, n, ignore_eos=True) for n in range(3)])
    completions = engine.abort_all()
    assert set(completions) == {("a", 0), ("a", 1), ("a", 2)}
    assert {answer.finish_reason for answer in completions.values()} == {"aborted"}
    assert all(len(answer.token_ids) == len(answer.log_probs) < 400 for answer in completions.values())
    assert engine.abort_all() == {}


def test_likeliest_tokens_are_those_of_the_engine(engine: ServerEngine, tiny_model_dir: Path) -> None:
    likeliest = engine.next_tokens(Probe(PROMPTS, 5))
    expected = make_engine(tiny_model_dir).next_tokens(Probe(PROMPTS, 5))
    assert torch.equal(likeliest.token_ids, expected.token_ids)
    torch.testing.assert_close(likeliest.log_probs, expected.log_probs)


def test_weights_are_published_and_proved(
    engine: ServerEngine, server: FakeServer, tiny_model_dir: Path
) -> None:
    model = make_engine(tiny_model_dir).model
    publisher = make_publisher(model, engine, PROMPTS)
    publisher.verify_at_start(0)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-3
    metrics = publisher.publish(1)
    assert metrics["publish/logprob_diff_mean"] < 1e-5 and engine.policy_version == 1
    theirs = dict(server.engine.model.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters())


def test_weights_in_a_folder_reach_the_engine_in_pieces(
    engine: ServerEngine,
    server: FakeServer,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**12)
    model = make_engine(tiny_model_dir).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    weights = FolderWeights(tmp_path).write(model.named_parameters())
    pieces = [entry[0] for bucket in weights.buckets() for entry in bucket.entries]
    assert len(pieces) > len(set(pieces)), "some tensors are cut"
    engine.load_weights(weights)
    theirs = dict(server.engine.model.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("what", ["a bucket is skipped", "an older bucket"])
def test_weights_that_do_not_arrive_are_found(
    what: str, engine: ServerEngine, server: FakeServer, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several buckets, so that one of them can be lost.
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**14)
    model = make_engine(tiny_model_dir).model
    publisher = make_publisher(model, engine, PROMPTS)
    publisher.verify_at_start(0)
    older = WeightFiles(server.path.parent).write(model.named_parameters())
    older_buckets = list(older.buckets())
    honest = server.engine.update
    count = iter(range(1000))

    def update(weights: Any) -> None:
        if next(count) == 2:
            if what == "an older bucket":
                honest(whole_tensors([older_buckets[2]]))
            return
        honest(weights)

    monkeypatch.setattr(server.engine, "update", update)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    with pytest.raises(
        TrainingStopped, match=r"after publishing version 1, .* tensors .* are not the trainer's"
    ):
        publisher.publish(1)


def test_a_server_that_was_restarted_cannot_pass_for_the_one_that_has_the_weights(
    engine: ServerEngine, server: FakeServer, tiny_model_dir: Path
) -> None:
    engine.load_weights(make_engine(tiny_model_dir).model.named_parameters())
    assert engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))
    server.version = "default"
    with pytest.raises(
        ServerLost, match=r"generated with weights \['default'\] and was given .*: it was restarted"
    ):
        engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))


def test_a_server_that_ends_is_lost(engine: ServerEngine, server: FakeServer) -> None:
    engine.submit([Request("a", PROMPTS[0], 100_000, 1.0, 1, ignore_eos=True)])
    assert engine.step() == []
    server.kill()
    with pytest.raises(ServerLost, match=f"socket: {server.generate_route}"):
        while engine.step() == []:
            pass
    with pytest.raises(ServerLost):
        engine.start_update()


@pytest.mark.slow
def test_a_server_whose_engine_gives_no_sign_of_life_is_lost(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "_QUIET_S", 0.1)
    monkeypatch.setattr(server_engine, "_STEP_S", 0.02)
    engine = connect(server, tmp_path, timeout_s=0.5)
    server.hangs = True
    engine.submit([Request("a", PROMPTS[0], 5, 1.0, 1)])
    with pytest.raises(ServerLost, match=r"its engine gave no sign of life within 0.5 s"):
        while engine.step() == []:
            pass
    engine.close()


@pytest.mark.slow
def test_a_full_server_is_not_taken_for_a_dead_one(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "_QUIET_S", 0.0)
    monkeypatch.setattr(server_engine, "_STEP_S", 0.01)
    engine = connect(server, tmp_path, timeout_s=2.0)
    server.places = 1
    steps = 0
    engine.submit([Request(n, PROMPTS[0], 150, 1.0, n, ignore_eos=True) for n in range(2)])
    completions: dict[Any, Any] = {}
    while len(completions) < 2:
        completions.update(engine.step())
        steps += 1
    assert [len(completions[n].token_ids) for n in range(2)] == [150, 150]
    # It was asked for signs of life in between, and no step waited for one.
    assert server.requests.count(server.kind.api.sign_of_life.path) > 2 and steps > 5
    engine.close()


def test_a_request_that_somebody_else_aborts_is_no_response(engine: ServerEngine, server: FakeServer) -> None:
    engine.submit([Request("a", PROMPTS[0], 100_000, 1.0, 1, ignore_eos=True)])
    assert engine.step() == []
    server.kind.api.abort_all(engine._connection)
    with pytest.raises(ServerLost, match="has aborted a request"):
        while engine.step() == []:
            pass


def test_a_server_that_an_earlier_run_left_paused_is_resumed(server: FakeServer, tmp_path: Path) -> None:
    first = connect(server, tmp_path)
    first.submit([Request("a", PROMPTS[0], 100_000, 1.0, 1, ignore_eos=True)])
    first.start_update()
    # The run ends here.
    first.close()
    assert server.paused
    engine = connect(server, tmp_path)
    assert len(engine.generate(PROMPTS[:1], Sampling(1, 3, 1.0, [1]))[0]) == 1
    engine.close()


def test_a_connection_can_be_closed_while_others_use_it(server: FakeServer) -> None:
    for number in range(60):
        connection = ServerConnection(server.address, "secret", 20.0)
        ended = threading.Event()

        def work(connection: ServerConnection = connection, ended: threading.Event = ended) -> None:
            with contextlib.suppress(ServerLost):
                while True:
                    server.kind.api.resume(connection)
            ended.set()

        threading.Thread(target=work, daemon=True).start()
        ended.wait(number * 2e-4)
        connection.close()
        connection.close()
        assert ended.wait(10), "whoever waits for an answer must not wait forever"
        with pytest.raises(ServerLost, match="is closed"):
            server.kind.api.resume(connection)


@pytest.mark.parametrize(
    ("requirements", "says"),
    [
        (
            ServerRequirements(torch.float32, torch.bfloat16, 100),
            "computes logits in float32, and the run needs bfloat16",
        ),
        (
            ServerRequirements(torch.float32, None, 20_000),
            "takes 10000 tokens, and the run needs .*max_model_len=20000",
        ),
    ],
)
def test_a_server_that_computes_otherwise_is_refused(
    requirements: ServerRequirements, says: str, server: FakeServer, tmp_path: Path
) -> None:
    connection = ServerConnection(server.address, "secret", 20.0)
    with pytest.raises(ConfigError, match=says):
        ServerEngine(connection, server.kind.api, requirements=requirements, folder=tmp_path, timeout_s=20.0)
    connection.close()


def another_model(model: Path, folder: Path, what: str) -> Path:
    """Write a model that differs from ``model`` in what ``what`` says."""
    if what == "weights":
        return build_tiny_model(folder, seed=1)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for name, value in json.loads(what).items():
        setattr(loaded.config, name, value)
        if name == "eos_token_id":
            loaded.generation_config.eos_token_id = value
    made = AutoModelForCausalLM.from_config(loaded.config)
    if loaded.config.hidden_size == 32:
        made.load_state_dict(loaded.state_dict(), strict=False)
    made.generation_config = loaded.generation_config
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ('{"hidden_size": 64}', "hidden_size is 64 there and 32 here"),
        ('{"num_hidden_layers": 3}', "num_hidden_layers is 3 there and 2 here"),
        ('{"tie_word_embeddings": false}', "tie_word_embeddings is False there and True here"),
        (
            '{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}',
            "head_dim is 64 there and 32 here",
        ),
        ('{"rms_norm_eps": 0.01}', "rms_norm_eps is 0.01 there and 1e-06 here"),
        ('{"eos_token_id": [0, 2]}', r"responses end with the tokens \[0, 2\] there and \[2\] here"),
        ("weights", "all sizes are equal, and its weights have nothing to do with these"),
    ],
)
def test_a_server_with_another_model_is_refused_and_lives_on(
    what: str,
    says: str,
    server: FakeServer,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = another_model(tiny_model_dir, tmp_path / "other", what)
    monkeypatch.setattr(server.engine.model, "name_or_path", str(other))
    before = compute_checksums(server.engine.model.named_parameters(), torch.float32)
    with pytest.raises(
        ConfigError, match=f"was started with another model, {other}, than this run .*: {says}; start"
    ):
        connect(server, tmp_path, model=describe(str(tiny_model_dir)))
    assert compute_checksums(server.engine.model.named_parameters(), torch.float32) == before
    connect(server, tmp_path, model=describe(str(other))).close()


def test_a_server_with_weights_of_the_same_model_is_accepted(
    server: FakeServer, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = describe(str(tiny_model_dir))
    assert len(ours["tensors"]) >= 4 and ours["config"]["hidden_size"] == 32
    # An earlier run has trained for long, which does not count.
    first = connect(server, tmp_path, model=ours)
    first.load_weights(
        (name, 3 - weight) for name, weight in make_engine(tiny_model_dir).model.named_parameters()
    )
    first.close()
    connect(server, tmp_path, model=ours).close()
    # It was started with a checkpoint, as this project writes them.
    trained = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = load_tokenizer(str(tiny_model_dir), ModelConfig(name=str(tiny_model_dir)))
    prepare_for_training(trained, Config().train_model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    (tmp_path / "checkpoint").mkdir()
    saving.save(trained.bfloat16(), tokenizer, tmp_path / "checkpoint")
    monkeypatch.setattr(server.engine.model, "name_or_path", str(tmp_path / "checkpoint"))
    connect(server, tmp_path, model=ours).close()
    # Its files lie where only its own loader finds them.
    monkeypatch.setattr(server.engine.model, "name_or_path", "s3://bucket/model")
    connect(server, tmp_path, model=ours).close()


def test_a_server_that_does_not_see_the_folder_is_refused(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ServerEngine._call

    def elsewhere(self: ServerEngine, method: str, **arguments: Any) -> list[Any]:
        return honest(
            self, method, **(arguments | {"file": "/nowhere"} if "file" in arguments else arguments)
        )

    monkeypatch.setattr(ServerEngine, "_call", elsewhere)
    with pytest.raises(ConfigError, match=r"does not see files in .*; start it on this machine"):
        connect(server, tmp_path)
    # With NCCL, nothing travels through files.
    connection = ServerConnection(server.address, "secret", 20.0)
    ServerEngine(
        connection, server.kind.api, requirements=WANTED, folder=tmp_path, timeout_s=20.0, needs_folder=False
    ).close()


def test_a_server_that_divides_its_model_where_weights_do_not_reach_is_refused(
    server: FakeServer, tmp_path: Path
) -> None:
    server.ranks = 2
    with pytest.raises(ConfigError, match=r"divides its model among 2 processes, and weights reach 1 of"):
        connect(server, tmp_path)


def test_a_wrong_key_is_a_mistake_of_the_user(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"inference_model.servers: unix:.* refuses the key; set (VLLM|SGLANG)_API_KEY"
    ):
        connect(server, tmp_path, key="guess")


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_takes_neither_prompts_nor_key_elsewhere(
    status: int, server: FakeServer, tmp_path: Path
) -> None:
    arrived: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        elsewhere = f"http://127.0.0.1:{other.getsockname()[1]}/"
        redirecting = FakeServer(server.engine, tmp_path / "redirecting")
        redirecting.redirect = status, elsewhere
        other.settimeout(0.2)
        try:
            with closing(ServerConnection(redirecting.address, "secret", 5.0)) as connection:
                connection.wait_until_up(5.0)
                with pytest.raises(ConfigError, match=rf"redirect to {elsewhere}, .* write the address"):
                    connection.post("/generate", {"token_ids": [1, 2, 3]})
            with contextlib.suppress(TimeoutError):
                arrived.append(other.accept()[0].recv(4096))
        finally:
            redirecting.kill()
    assert arrived == []


def test_another_number_format_is_a_mistake_of_the_user(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = FakeServer(make_engine(tiny_model_dir, torch.bfloat16), tmp_path / "socket")
    with pytest.raises(
        ConfigError, match=r"computes in bfloat16, and .* in float32; write inference_model.dtype="
    ):
        connect(server, tmp_path)
    server.kill()


def test_a_log_probability_that_is_not_finite_is_nan() -> None:
    assert math.isnan(vllm_api._log_prob(-9999.0, None))
    assert vllm_api._log_prob(-2.5, 1) == -2.5


def _log_probs(*values: float) -> dict[str, Any]:
    return {"content": [{"logprob": value, "rank": 1} for value in values]}


class Hostile(FakeServer):
    """A server that has one answer for every prompt."""

    content: str

    async def _generate(self, request: web.Request) -> web.Response:
        return web.Response(text=self.content, content_type="application/json")


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"token_ids": [1, 2]}, "2 tokens and 1 log-prob"),
        ({"token_ids": ["1"]}, r"Expected `int`, got `str` - at `\$.choices\[0\].token_ids"),
        ({"logprobs": None}, "Expected `object`, got `null`"),
        ({"logprobs": {"content": [{"rank": 1}]}}, "missing required field `logprob`"),
        (None, "no response: .*length 1"),
        ({"token_ids": [], "logprobs": {"content": []}}, "a response without a token"),
        ({"finish_reason": "error"}, "ended for the reason 'error'"),
        ({"token_ids": [1] * 13, "logprobs": _log_probs(*[-1.0] * 13)}, "13 tokens, and 12 were the most"),
        ({"token_ids": [-1]}, "the token -1, and the model has 64 tokens"),
        ({"token_ids": [64]}, "the token 64, and the model has 64 tokens"),
        ({"token_ids": [2**40]}, f"the token {2**40}, and"),
        ({"logprobs": _log_probs(0.5)}, r"the log-probability 0\.5"),
        ({"logprobs": _log_probs(-1e300)}, r"the log-probability -1e\+300"),
    ],
)
def test_an_answer_that_is_no_response_ends_the_server(
    choice: dict[str, Any] | None, why: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    right = {"token_ids": [1], "logprobs": _log_probs(-1.0), "finish_reason": "stop", "weight_versions": None}
    choices = [] if choice is None else [right | choice]
    content = json.dumps({"choices": choices, "usage": {"prompt_tokens": len(PROMPTS[0])}})
    expect_lost(content, why, tiny_model_dir, tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (" " * (2**24 + 2**16), "its answer is longer than"),
        ('{"x": ' + "[" * 10**5, "no response: .*recursion"),
    ],
    ids=["long", "deep"],
)
def test_an_answer_without_an_end_ends_the_server(
    content: str, why: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    expect_lost(content, why, tiny_model_dir, tmp_path)


def expect_lost(content: str, why: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    server = Hostile(make_engine(tiny_model_dir), tmp_path / "socket")
    server.content = content
    engine = connect(server, tmp_path, vocabulary=64)
    engine.submit([Request("a", PROMPTS[0], 12, 0.0)])
    with pytest.raises(ServerLost, match=why):
        while not engine.step():
            pass
    engine.close()
    server.kill()


# -- weights in files


def weights_in_all_formats() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((3,), (5, 7), (2, 3, 4), (1, 1), (0, 4)):
            weights[f"{dtype} {shape}"] = torch.randn(shape, generator=generator).to(dtype)
    weights["turned"] = torch.randn(6, 4, generator=generator).T
    return weights


@pytest.mark.parametrize("size", [1, 200, 2**20])
def test_tensors_come_out_of_files_as_they_went_in(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", size)
    monkeypatch.setattr(weight_files, "MOST_BYTES", size)
    sent = weights_in_all_formats()
    files = WeightFiles(tmp_path).write(sent.items())
    # As over the wire, and read after the files are gone.
    buckets = [Bucket.from_json(bucket.to_json()) for bucket in files.buckets()]
    # One row is the least that is sent at a time.
    rows = sum(
        max(1, tensor.shape[0] if tensor.dim() == 1 else tensor.numel() // tensor.shape[-1])
        for tensor in sent.values()
    )
    assert len(buckets) == (rows if size == 1 else 1 if size == 2**20 else len(buckets)) > 0
    arrived = list(whole_tensors(buckets))
    assert [name for name, _ in files] == list(sent)
    files.close()
    assert list(tmp_path.iterdir()) == []
    assert [name for name, _ in arrived] == list(sent)
    for name, tensor in arrived:
        assert tensor.dtype is sent[name].dtype and torch.equal(tensor, sent[name]), name


def test_whoever_changes_what_was_read_changes_no_file(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path).write([("one", torch.ones(8))])
    ((_, first),) = files
    first.zero_()
    ((_, second),) = files
    assert bool((second == 1).all())


def test_files_end_with_the_object(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path).write([("one", torch.ones(8))])
    assert len(list(tmp_path.iterdir())) == 1
    assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o700, (
        "nobody else may read or change weights"
    )
    del files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weights_of_a_process_that_was_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    code = """
import os, sys, torch
from pathlib import Path
from torchrl_grpo.inference.servers.weight_files import WeightFiles
files = WeightFiles(Path(sys.argv[1])).write([("one", torch.ones(8))])
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    mine = WeightFiles(tmp_path).write([("one", torch.ones(8))])
    (left,) = [folder for folder in tmp_path.iterdir() if folder != Path(next(mine.buckets()).path).parent]
    remove_abandoned(tmp_path)
    assert not left.exists() and Path(next(mine.buckets()).path).exists()


@pytest.mark.parametrize("checksum", [None, 7])
@pytest.mark.parametrize("kind", ["fifo", "link to a device"])
def test_a_server_reads_weights_from_regular_files_alone(
    kind: str, checksum: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "0"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    bucket = Bucket(str(path), (("one", "float32", (2,), 0, 0, 2),), 64, checksum)
    refused: queue.SimpleQueue[OSError] = queue.SimpleQueue()

    def read() -> None:
        with pytest.raises(OSError) as raised:
            list(BucketReader().read(bucket))
        refused.put(raised.value)

    threading.Thread(target=read, daemon=True).start()
    assert refused.get(timeout=20).filename == str(path)


def test_weights_in_shared_memory_that_belong_to_somebody_else_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WeightFiles(tmp_path).write([("one", torch.ones(8))])
    (bucket,) = files.buckets()
    assert list(BucketReader().read(bucket))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        list(BucketReader().read(bucket))


def test_temporary_files_of_a_server_whose_run_was_killed_are_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # That folder has a long path, and no other socket lies there.
    monkeypatch.setattr(process, "_SOCKET_ROOM", 0)
    program = (
        "import os, sys, tempfile; tempfile.mkstemp(prefix='vllm_dist_');"
        "os.write(int(os.environ['TORCHRL_GRPO_READY_FD']), b'+'); sys.stdin.read()"
    )
    variables = vllm_launch("model", {"enforce_eager": True}, on_cpu=True).folder_variables
    launch = Launch([sys.executable, "-c", program], {}, variables)
    with monkeypatch.context() as killed:
        # A process that is killed leaves its folder, and the kernel takes back its lock.
        killed.setattr(shared_files, "_delete", lambda folder, lock: lock.close())
        server = ServerProcess(VLLM, launch, environment={}, log=None)
        server.wait_until_ready(60)
        server.kill()
    (left,) = tmp_path.iterdir()
    assert [path.name.partition("_")[0] for path in sorted(left.iterdir())] == ["lock", "vllm"]
    server = ServerProcess(VLLM, launch, environment={}, log=None)
    server.wait_until_ready(60)
    assert not left.exists() and len(list(tmp_path.iterdir())) == 1
    server.kill()
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        WeightFiles(tmp_path).write([("one", torch.ones(8))])


def test_a_path_of_a_socket_that_would_be_too_long_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    program = (
        "import os, socket, uuid; place = os.environ['VLLM_RPC_BASE_PATH'] + '/' + str(uuid.uuid4());"
        "socket.socket(socket.AF_UNIX).bind(place); os.write(int(os.environ['TORCHRL_GRPO_READY_FD']), b'+');"
        "input()"
    )
    variables = vllm_launch("model", {"enforce_eager": True}, on_cpu=True).folder_variables
    server = ServerProcess(
        VLLM, Launch([sys.executable, "-c", program], {}, variables), environment={}, log=None
    )
    server.wait_until_ready(60)
    folder = Path(server.address.removeprefix("unix:")).parent
    about = folder.stat()
    assert (about.st_mode & 0o777, about.st_uid) == (0o700, os.geteuid()) and list(long.iterdir()) == []
    server.kill()
    assert not folder.exists()


@pytest.mark.parametrize("length", [10, 49, 50, 300])
def test_where_sockets_lie(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = "/" + "u" * (length - 1)
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp")
    folder = socket_folder.socket_parent(58, usual)
    assert folder == Path(usual if length <= 49 else "/var/tmp")
    monkeypatch.setattr(os, "access", lambda path, mode: path == usual)
    if length > 49:
        with pytest.raises(ConfigError, match=rf"TMPDIR={usual}: .* 107 bytes.* set TMPDIR"):
            socket_folder.socket_parent(58, usual)


# -- the key


def ask(app: RequireKey, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(app({"path": "/pause", "headers": [], **scope}, receive, send))
    return sent


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> RequireKey:
    monkeypatch.setenv("VLLM_API_KEY", "secret")

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete" if scope["type"] == "lifespan" else "passed"})

    return RequireKey(inner)


@pytest.mark.parametrize(
    "header", [None, "secret", "Bearer", "Bearer ", "Bearer Secret", "Basic secret", "Bearer secret "]
)
@pytest.mark.parametrize("path", ["/health", "/pause", "/v1/models", "/metrics", "/collective_rpc"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_nothing_is_answered_without_the_key(
    guarded: RequireKey, header: str | None, path: str, method: str
) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    sent = ask(guarded, {"type": "http", "path": path, "method": method, "headers": headers})
    if (path, method) == ("/health", "GET"):
        # The application answers it, see the next test.
        assert sent[0]["type"] == "passed"
        return
    assert sent[0]["type"] == "http.response.start" and sent[0]["status"] == 401


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("status", [200, 503])
def test_whether_a_server_is_healthy_needs_no_key_and_has_no_content(
    status: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"5"), (b"x-model", b"mine")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"model"})

    health = {"type": "http", "path": "/health", "method": method}
    start, body = ask(RequireKey(inner), health)
    assert start["status"] == status and start["headers"] == [(b"content-length", b"0")]
    assert body == {"type": "http.response.body", "body": b""}
    for other in ("/health/", "/health/x", "//health", "/health_generate", "/Health"):
        assert ask(RequireKey(inner), {**health, "path": other})[0]["status"] == 401
    # With the key, all of it.
    headers = [(b"authorization", b"Bearer secret")]
    assert ask(RequireKey(inner), {**health, "headers": headers})[1]["body"] == b"model"


def test_the_key_opens(guarded: RequireKey) -> None:
    headers = [(b"host", b"x"), (b"authorization", b"bearer secret")]
    assert ask(guarded, {"type": "http", "headers": headers}) == [{"type": "passed"}]
    assert ask(guarded, {"type": "websocket", "headers": headers}) == [{"type": "passed"}]
    assert ask(guarded, {"type": "websocket"}) == [{"type": "websocket.close", "code": 1008}]


def test_a_server_says_when_it_is_up(guarded: RequireKey, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("TORCHRL_GRPO_READY_FD", str(write))
    ask(guarded, {"type": "lifespan"})
    assert os.read(read, 10) == b"\n"
    os.close(read)
    os.close(write)


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        RequireKey(None)  # type: ignore[arg-type]


# -- seeds of SGLang on a CPU


def test_a_token_depends_on_the_seed_and_the_position_alone() -> None:
    log_probs = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    seed, position = torch.tensor([1, 1, 2, 2**47, 3, 3]), torch.tensor([5, 6, 5, 5, 8, 8])
    whole = seeds.draw(log_probs, seed, position)
    assert whole.shape == (6, 1)
    for row in range(6):
        alone = slice(row, row + 1)
        assert torch.equal(seeds.draw(log_probs[alone], seed[alone], position[alone]), whole[alone])
    numbers = seeds.noise_seeds(seed, position).tolist()
    assert len(set(numbers)) == 5 and numbers[4] == numbers[5]
    # Rounding of engines does not change what is drawn.
    assert torch.equal(seeds.draw(log_probs + 1e-6 * log_probs.roll(1, 1), seed, position), whole)


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    chance = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05, 0.0])
    count = 10_000
    for seed, position in (
        (torch.arange(count), torch.full((count,), 7)),
        (torch.full((count,), 2**47 + 3), torch.arange(count)),
    ):
        drawn = seeds.draw(chance.log().expand(count, -1), seed, position).flatten().bincount(minlength=6)
        assert drawn[1] == drawn[5] == 0
        torch.testing.assert_close(drawn / count, chance, atol=0.02, rtol=0)


def test_a_batch_gets_the_seeds_of_its_requests() -> None:
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (7, None, 2**47)
    ]
    batch = SimpleNamespace(sampling_seed=None)
    seeds._give_seeds(batch, object, SimpleNamespace(reqs=requests), 100)
    assert batch.sampling_seed is not None and batch.sampling_seed.tolist() == [7, 0, 2**47]


# -- messages to SGLang


@pytest.mark.parametrize("name", ["weights.bin", "torchrl-grpo-answer-link", "torchrl-grpo-answer-fifo"])
def test_no_file_but_one_for_an_answer_is_written(name: str, tmp_path: Path) -> None:
    target = tmp_path / "weights.bin"
    target.write_text("precious")
    if "link" in name:
        (tmp_path / name).symlink_to(target)
    if "fifo" in name:
        os.mkfifo(tmp_path / name)
    message = json.dumps({"method": "grpo_checksums", "arguments": {}, "answer": str(tmp_path / name)})
    loader.answer(torch.nn.Linear(2, 2), [(message, torch.empty(0))])
    assert target.read_text() == "precious"


class Fusing(torch.nn.Module):
    """It fuses two matrices that are published apart.

    Args:
        left_out: name of a published tensor that it does not load.
        part: whether it loads half of that one.
    """

    def __init__(self, left_out: str | None = None, part: bool = False) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(24, 16))
        self.norm = torch.nn.Parameter(torch.zeros(16))
        self.left_out, self.part = left_out, part

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == self.left_out:
                tensor = tensor[: len(tensor) // 2 if self.part else 0]
            target, start = (self.norm, 0) if name == "norm" else (self.fused, {"q": 0, "k": 8}[name])
            target.data[start : start + len(tensor)].copy_(tensor)


def test_fused_weights_are_compared_and_those_left_out_are_found() -> None:
    shapes: dict[str, tuple[int, ...]] = {"q": (8, 16), "k": (16, 16), "norm": (16,)}
    whole = SGLangWeights(Fusing())
    whole.locate(shapes)
    generator = torch.Generator().manual_seed(0)
    sent = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    whole.load(sent.items())
    assert whole.checksums() == compute_checksums(sent.items(), torch.float32)
    sent["k"][3, 4] += 1e-3
    assert whole.checksums() != compute_checksums(sent.items(), torch.float32)
    with pytest.raises(ModelError, match="SGLang loads nothing of k"):
        SGLangWeights(Fusing("k")).locate(shapes)
    with pytest.raises(ModelError, match="SGLang loads only a part of k"):
        SGLangWeights(Fusing("k", part=True)).locate(shapes)


# -- arguments


def test_arguments_become_flags() -> None:
    arguments: dict[str, Any] = {
        "max_num_seqs": 64,
        "enforce_eager": True,
        "trust_remote_code": False,
        "dtype": "float32",
    }
    arguments |= {"middleware": ["a", "b"], "nothing": None}
    arguments |= {"hf_overrides": {"head_dtype": "float32"}, "gpu_memory_utilization": 0.5}
    assert as_flags(arguments) == [
        *("--max-num-seqs", "64", "--enforce-eager", "--no-trust-remote-code", "--dtype", "float32"),
        *("--middleware", "a", "b"),
        *("--hf-overrides", '{"head_dtype": "float32"}', "--gpu-memory-utilization", "0.5"),
    ]


def test_a_server_has_the_arguments_of_an_engine_in_the_trainer_s_process() -> None:
    common: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "max_model_len": 100,
        "max_num_seqs": 8,
        "seed": 3,
        "gpu_memory_utilization": 0.3,
        "kv_cache_gib": 2,
    }
    on_cpu = vllm_arguments(on_cpu=True, **common)
    assert on_cpu["kv_cache_memory_bytes"] == 2 * 2**30 and "gpu_memory_utilization" not in on_cpu
    assert on_cpu["enforce_eager"] and on_cpu["logprobs_mode"] == "processed_logprobs"
    on_gpu = vllm_arguments(
        on_cpu=False, enable_sleep=True, engine_args={"max_num_batched_tokens": 9}, **common
    )
    assert on_gpu["gpu_memory_utilization"] == 0.3 and on_gpu["enable_sleep_mode"]
    assert not on_gpu["enforce_eager"] and on_gpu["max_num_batched_tokens"] == 9


@pytest.mark.parametrize(
    ("responses", "batched_tokens", "tokens", "at_a_time"),
    [
        # vLLM's own default, which is never less, may be more.
        (2048, None, None, 2048),
        (2049, None, 8192, 2049),
        (9000, None, 9000, 9000),
        (100, 64, 64, 64),
        (64, 100, 100, 64),
    ],
)
def test_a_step_of_an_engine_has_tokens_for_all_responses_of_it(
    responses: int, batched_tokens: int | None, tokens: int | None, at_a_time: int
) -> None:
    arguments = vllm_arguments(
        on_cpu=True, dtype=torch.bfloat16, max_model_len=100, max_num_seqs=responses, seed=3,
        gpu_memory_utilization=0.3, kv_cache_gib=2,
        engine_args={} if batched_tokens is None else {"max_num_batched_tokens": batched_tokens},
    )  # fmt: skip
    assert arguments.get("max_num_batched_tokens") == tokens and arguments["max_num_seqs"] == at_a_time
