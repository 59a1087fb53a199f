"""What of a run's settings may be published."""

from __future__ import annotations

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.public import public_config, public_overrides, shown_overrides


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.lr=2e-5",
        "policy=dapo",
        "+recipe=gpu_24gb",
        "model.name=ORG/NAME",
        "reward.weights={format:0.2}",
        "++reward.weights.format=0.2",
    ],
)
def test_settings_of_the_training_are_public(word: str) -> None:
    assert public_overrides([word]) == [word]


@pytest.mark.parametrize(
    "word",
    [
        "hydra.job.env_set.HF_TOKEN=hf_SECRET",
        "+hydra.job.env_set.HF_TOKEN=hf_SECRET",
        "reward.args.judge.api_key=sk-SECRET",
        "++reward.args.judge.api_key=sk-SECRET",
        "reward={args:{judge:{api_key:sk-SECRET}}}",
        "inference_model.engine_args={api_key:SECRET}",
        "inference_model.servers=[http://10.0.0.1:8000]",
        "model.name=/home/SECRET/model",
        "env.data_path='~/SECRET.jsonl'",
        "env.mixture=[SECRET]",
        "env.environment='openenv:http://SECRET:8000'",
        "env.tools=[calculator,'mcp:env KEY=SECRET server']",
        "reward.functions={a:/home/SECRET/a.py:f}",
        "hub.push=SECRET/name",
    ],
)
def test_what_may_be_secret_is_left_out(word: str) -> None:
    assert public_overrides(["seed=1", word]) == ["seed=1"]


def test_a_command_says_what_it_leaves_out() -> None:
    words = ["seed=1", "+model.name=/home/SECRET", "hydra.run.dir=/home/SECRET", "reward={args:{key:SECRET}}"]
    assert shown_overrides(words) == ["seed=1", "+model.name=LEFT_OUT", "reward=LEFT_OUT"]


def test_a_public_configuration_has_no_secret() -> None:
    cfg = Config()
    cfg.reward.args = {"judge": {"api_key": "SECRET"}}
    cfg.reward.functions = {"judge": "judge.py:f", "own": "/home/SECRET/judge.py:f"}
    part = {
        "dataset": "jsonl",
        "data_path": "/SECRET.jsonl",
        "reward": {"args": {"judge": {"key": "SECRET"}}},
    }
    cfg.env.mixture = [part]
    cfg.env.tools = ["calculator", "/home/SECRET/tools.py:search", "mcp:env KEY=SECRET server"]
    cfg.inference_model.engine_args = {"api_key": "SECRET"}
    cfg.inference_model.servers = ["http://SECRET:8000"]
    cfg.model.name = "/home/SECRET"
    cfg.hub.push = "SECRET/name"
    published = public_config(cfg)
    assert "SECRET" not in str(published)
    assert published["optimizer"]["lr"] == cfg.optimizer.lr
    assert published["reward"]["functions"] == {"judge": "judge.py:f"}
    assert published["env"]["tools"] == ["calculator"]
