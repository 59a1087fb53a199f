"""Fixtures of whole runs in the test's process: a tiny random model, the transformers engine, sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import AnswerFormat, Autocast, Dtype
from torchrl_grpo.observe import report
from torchrl_grpo.rewards.text import BareNumberReward
from torchrl_grpo.tools.verify_resume import read, unmeasured
from torchrl_grpo.training.job import run


@pytest.fixture
def config(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number_format: str,
    request: pytest.FixtureRequest,
) -> Config:
    """Four rounds of four groups of four on a file of sums, in one of two number formats."""
    # Drawing takes as long as training; tests/observe and tests/runs/test_integration.py look at the picture.
    monkeypatch.setattr(report, "plot", lambda run_dir, grader: None)
    # A random model is never right; this tells its answers apart, so that there is something to learn.
    monkeypatch.setattr(BareNumberReward, "__call__", lambda self, text, example: len(text) % 5 / 4)
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config()
    cfg.env.dataset, cfg.env.answer_format = "jsonl", AnswerFormat.plain
    cfg.env.data_path = str(data)
    cfg.env.num_envs = cfg.env.repeats = 4
    cfg.model.name = str(tiny_model_dir)
    cfg.reward.weights = {"exact_match": 1.0, "bare_number": 0.3}
    # Not what this machine is fast in: a test does the same on every machine.
    cfg.train_model.autocast = Autocast({"float32": "no", "bfloat16": "bf16"}[number_format])
    cfg.inference_model.dtype = Dtype(number_format)
    cfg.inference_model.backend = "transformers"
    cfg.inference_model.max_model_len, cfg.inference_model.max_new_tokens = 200, 6
    cfg.optimizer.lr = 1e-2
    if request.node.get_closest_marker("float32") is not None:
        # The first steps of Adam follow a gradient's sign, also where it is rounding; not with this eps. Two
        # runs that round otherwise would soon sample other tokens.
        cfg.optimizer.eps = 1e-2
    cfg.train.total_dialog_turns = 64
    cfg.train.checkpoint_frequency = 0
    cfg.eval.num_problems, cfg.eval.frequency = 6, 2
    cfg.logging.progress = False
    return cfg


Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def train(config: Config, tmp_path: Path) -> Runner:
    """Runs the configuration with changes into a folder and returns its metrics, timings aside."""

    def runs(name: str, **changes: object) -> list[dict[str, Any]]:
        for key, value in changes.items():
            group, _, leaf = key.partition("__")
            setattr(getattr(config, group) if leaf else config, leaf or group, value)
        run(config, tmp_path / name)
        return read(tmp_path / name / "metrics.jsonl")

    return runs


def without_eval(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [
        {k: v for k, v in unmeasured(line).items() if not k.startswith(("eval/", "publish/"))}
        for line in lines
    ]
    return [line for line in kept if line["step"] > 0]
