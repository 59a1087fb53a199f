"""Whole runs on servers: with servers in threads of the test, all else is what the commands run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, FakeSGLang, make_engine
from tiny_model import build_tiny_model
from tiny_runs import Runner, config  # noqa: F401  fixtures
from tiny_runs import train as train_in_process  # noqa: F401

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError, WorkersLost
from torchrl_grpo.inference.servers.sglang import loader
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.rollout import build
from torchrl_grpo.rollout.workers import dispatcher, server_pool
from torchrl_grpo.tools.verify_resume import read, unmeasured
from torchrl_grpo.training.job import run, run_async

pytestmark = pytest.mark.slow


@dataclass
class Servers:
    """Servers of the test, which come back at the same address after they were killed."""

    folder: Path
    model: Path
    dtype: torch.dtype
    kind: type[FakeServer] = FakeServer
    running: list[FakeServer] = field(default_factory=list)
    # transformers builds models under settings of the whole process, so not while another thread computes.
    spares: list[TransformersEngine] = field(default_factory=list)
    kills: int = 0

    def start(self, count: int, spares: int = 0) -> list[str]:
        self.spares = [make_engine(self.model, self.dtype) for _ in range(count + spares)]
        for number in range(count):
            self.running.append(self.kind(self.spares.pop(), self.folder / f"server{number}"))
        return [server.address for server in self.running]

    def restart(self, number: int) -> None:
        """Kill a server and start it anew, with the weights on the disk."""
        old = self.running[number]
        old.kill()
        self.kills += 1
        self.running[number] = self.kind(self.spares.pop(), old.path)


@pytest.fixture
def servers(
    config: Config, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Servers]:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("SGLANG_API_KEY", "secret")
    # The fake SGLang replaces it, and this puts it back.
    monkeypatch.setattr(loader, "_server_args", loader._server_args)
    made = Servers(tmp_path, tiny_model_dir, getattr(torch, config.inference_model.dtype))
    yield made
    for server in made.running:
        server.kill()


def on(servers: Servers, config: Config, count: int, spares: int = 0) -> Config:
    config.inference_model.backend = servers.kind.kind.engine.name
    config.inference_model.servers = servers.start(count, spares)
    return config


def texts(folder: Path) -> list[str]:
    return [row["response"] for row in read(folder / "rollouts.jsonl")]


def without_workers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in unmeasured(line).items() if not k.startswith("workers/")} for line in lines]


@pytest.mark.float32
def test_a_run_on_servers_is_the_run_of_an_engine_in_the_process(
    config: Config,
    train_in_process: Runner,
    servers: Servers,
    tmp_path: Path,
) -> None:
    expected = without_workers(train_in_process("alone"))
    assert any(line.get("optimizer/grad_norm") for line in expected)
    for kind, count in ((FakeServer, 1), (FakeServer, 2), (FakeSGLang, 2)):
        started = Servers(tmp_path / f"{kind.__name__}{count}", servers.model, servers.dtype, kind)
        started.folder.mkdir()
        on(started, config, count)
        servers.running += started.running
        run(config, started.folder / "run")
        assert texts(started.folder / "run") == texts(tmp_path / "alone")
        lines = without_workers(read(started.folder / "run/metrics.jsonl"))
        for ours, theirs in zip(lines, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert all(server.requests.count(kind.generate_route) > 20 for server in started.running)


def test_servers_collect_while_the_trainer_trains(config: Config, servers: Servers, tmp_path: Path) -> None:
    config.collector.max_policy_age = 2
    run_async(on(servers, config, 2), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    books = summary["groups"]
    assert books["trained"] == 16 and summary["worker_restarts"] == 0
    assert (
        books["issued"] == books["trained"] + books["dropped_age"] + books["dropped_filter"] + books["left"]
    )
    ages = [line["policy/age_max"] for line in read(tmp_path / "run/metrics.jsonl") if line["step"] > 0]
    assert 0 <= min(ages) <= max(ages) <= 2


class Kills:
    """Restarts a server before it answers some of its requests."""

    def __init__(self, servers: Servers, moments: dict[int, list[int]]) -> None:
        self.servers, self.moments = servers, moments
        self.counts = [0] * len(servers.running)

    def watch(self, number: int) -> Callable[[str], None]:
        def fault(route: str) -> None:
            self.counts[number] += 1
            if self.counts[number] in self.moments.get(number, ()):
                # The server cannot wait for its own thread.
                threading.Thread(target=self._restart, args=(number,)).start()

        return fault

    def _restart(self, number: int) -> None:
        self.servers.restart(number)
        self.servers.running[number].fault = self.watch(number)


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [(FakeServer, False), (FakeServer, True), (FakeSGLang, True)]
)
def test_servers_that_die_at_any_moment_lose_and_double_no_group(
    kind: type[FakeServer], asynchronous: bool, config: Config, servers: Servers, tmp_path: Path
) -> None:
    servers.kind = kind
    on(servers, config, 2, spares=10)
    # The first requests of a server describe it and load weights; then it generates.
    moments = {0: [3, 30, 60, 90, 140], 1: [8, 40, 75, 100, 120]}
    kills = Kills(servers, moments)
    for number, server in enumerate(servers.running):
        server.fault = kills.watch(number)
    config.collector.max_restarts = 40
    config.train.total_dialog_turns = 128
    (run_async if asynchronous else run)(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    books = summary["groups"]
    assert servers.kills >= 6 and summary["worker_restarts"] >= servers.kills - 2
    assert books["trained"] == 32
    assert (
        books["issued"] == books["trained"] + books["dropped_age"] + books["dropped_filter"] + books["left"]
    )
    rows = read(tmp_path / "run/rollouts.jsonl")
    assert len(rows) == 128
    groups = [row["group_id"] for row in rows]
    assert len(set(groups)) == 32 and all(groups.count(group) == 4 for group in set(groups))


def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint(
    config: Config, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "START_LIMIT_S", 1.0)
    monkeypatch.setattr(build, "START_LIMIT_S", 1.0)
    on(servers, config, 1)
    config.collector.max_restarts, config.collector.timeout_s = 2, 1.0

    def leave(route: str) -> None:
        if servers.running[0].requests.count("/inference/v1/generate") == 60:
            threading.Thread(target=servers.running[0].kill).start()

    servers.running[0].fault = leave
    with pytest.raises(
        WorkersLost, match=r"0 failed \(ConfigError: .*no server answered at unix:.*restarts=2"
    ):
        run(config, tmp_path / "run")
    assert list((tmp_path / "run/checkpoints").iterdir())


def test_a_server_that_is_not_there_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "START_LIMIT_S", 0.5)
    monkeypatch.setattr(server_pool, "_SILENT_S", 0.1)
    config.collector.timeout_s = 0.5
    config.inference_model.backend = "vllm_server"
    config.inference_model.servers = [f"unix:{tmp_path}/nobody"]
    with pytest.raises(
        ConfigError, match=r"no server answered at unix:.*/nobody .* start one there with grpo-serve --uds /"
    ):
        run(config, tmp_path / "run")
    waits = f"no server answers at unix:{tmp_path}/nobody; waiting for up to 0.0075 minutes: start one there"
    assert waits in capsys.readouterr().err


def test_a_run_with_another_model_than_its_server_is_refused(
    config: Config, servers: Servers, tmp_path: Path
) -> None:
    on(servers, config, 1)
    config.model.name = str(build_tiny_model(tmp_path / "other", seed=1))
    with pytest.raises(
        ConfigError, match=r"was started with another model, .*tiny, .*start it with grpo-serve"
    ):
        run(config, tmp_path / "refused")
    # It lives on, and serves its own model: also that of a run that is resumed.
    config.model.name = str(servers.model)
    config.train.checkpoint_frequency, config.train.total_dialog_turns = 1, 32
    run(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/2")
    run(replace(config, resume=str(tmp_path / "run")), tmp_path / "run")
    assert len(read(tmp_path / "run/metrics.jsonl")) == 3
