"""An engine is a module and a line in the registry: no other code knows its name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.builtin import load_built_in
from torchrl_grpo.config.engines import ENGINES, EngineKind
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.loading import load_model

CONFIG = Path(__file__).parents[2] / "config"


# A module with an engine.
class CountingEngine(TransformersEngine):
    submitted = 0

    def submit(self, requests: Sequence[Request]) -> None:
        type(self).submitted += len(requests)
        super().submit(requests)


def build(
    cfg: Config,
    source: str,
    device: torch.device,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    **_: object,
) -> CountingEngine:
    return CountingEngine(load_model(source, cfg.model, device, torch.float32), eos_token_ids, pad_token_id)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its line.
    monkeypatch.setitem(ENGINES, "counting", EngineKind("counting", "Counting", build=f"{__name__}:build"))
    monkeypatch.setattr(CountingEngine, "submitted", 0)


@pytest.mark.float32
@pytest.mark.usefixtures("counting")
def test_a_registered_engine_trains(train: Runner) -> None:
    one_round = {"train__total_dialog_turns": 16, "eval__num_problems": 0}
    lines = train("run", inference_model__backend="counting", **one_round)
    assert CountingEngine.submitted == 16
    assert lines[-1]["step"] == 1 and lines[-1]["optimizer/grad_norm"] > 0


@pytest.mark.usefixtures("counting")
def test_a_registered_engine_is_named_on_the_command_line() -> None:
    with composer(CONFIG, "grpo_quickstart") as tree:
        (words,) = tree.jobs(["inference_model.backend=counting"], sweep=False)
        assert parse(tree.compose(words).node).inference_model.engine.program == "Counting"
        names = ", ".join(ENGINES)
        with pytest.raises(ConfigError, match=f"must be one of {names}; write .*=counting, for example"):
            tree.jobs(["inference_model.backend=counted"], sweep=False)


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES)
def test_what_is_registered_of_an_engine_exists(kind: EngineKind) -> None:
    assert (kind.build is None) == kind.has_servers
    for path in (kind.build, kind.needs_gpu):
        assert path is None or callable(load_built_in(path))
    if kind.servers is not None:
        assert load_built_in(kind.servers).engine is kind and kind.api_key_variable
    if kind.engine_args_rules is not None:
        assert importlib.import_module(kind.engine_args_rules).SET_BY_KEY


def test_an_engine_that_only_servers_have_is_not_built_here() -> None:
    cfg = Config()
    cfg.inference_model.backend = "vllm_server"
    with pytest.raises(AssertionError, match="in servers only"):
        build_engine(cfg, "model", torch.device("cpu"), [0], 0, 1)
