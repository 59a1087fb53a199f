"""Runs that cannot learn say why, and which key to change, before a tenth of them is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.training import loop
from torchrl_grpo.training.session import Session

pytestmark = pytest.mark.slow

STEPS = 40
BROKEN = {
    "raises": ("def mine(completion, example):\n    return foo(completion)\n", "name 'foo' is not defined"),
    "returns None": ("def mine(completion, example):\n    len(completion) / 8\n", "it returned None"),
}
DIFFERENT = "def mine(completion, example):\n    return max(0, len(set(completion)) - 5) / 8\n"
RIGHT = "def mine(completion, example):\n    return float(completion == example.truth['answer'])\n"
DEAD: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "learning rate far too high": (
        DIFFERENT,
        {"optimizer__lr": 3.0},
        ["one update moved the policy by", "lower optimizer.lr"],
    ),
    "responses far too short": (
        RIGHT,
        {"inference_model__max_new_tokens": 2, "optimizer__lr": 1e-4},
        [
            "all responses were cut off in 3 rounds in a row, the last at 2 tokens",
            "inference_model.max_new_tokens",
        ],
    ),
    "KL divergence": (
        DIFFERENT,
        {"optimizer__lr": 1.0, "policy__kl_coef": 1e-3},
        ["the KL divergence to the reference is", "policy.kl_coef"],
    ),
}


def own_reward(config: Config, folder: Path, source: str) -> None:
    (folder / "my_reward.py").write_text(source)
    config.reward.functions = {"mine": f"{folder}/my_reward.py:mine"}
    config.reward.weights = {"mine": 1.0}
    config.train.total_dialog_turns = STEPS * 16
    config.eval.num_problems = 0


@pytest.mark.parametrize("kind", BROKEN)
def test_a_reward_that_fails_throughout_the_first_round_stops_the_run_with_its_error(
    train: Runner, config: Config, tmp_path: Path, kind: str
) -> None:
    source, error = BROKEN[kind]
    own_reward(config, tmp_path, source)
    with pytest.raises(TrainingStopped, match=rf"all 16 responses of the first round: mine with .*{error}"):
        train("run")
    assert error in (tmp_path / "run/rollouts.jsonl").read_text()


def test_a_reward_that_fails_before_training_stops_the_run_there(
    train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, error = BROKEN["raises"]
    own_reward(config, tmp_path, source)
    config.eval.num_problems = 4
    with pytest.raises(
        TrainingStopped, match=rf"all 4 responses of the first evaluation: mine with .*{error}"
    ):
        train("run")
    assert error in (tmp_path / "run/evaluations.jsonl").read_text()
    assert "for every held-out response" not in capsys.readouterr().err


def test_a_reward_that_fails_beside_another_is_warned_of_at_once(
    train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_reward(config, tmp_path, BROKEN["raises"][0])
    config.reward.weights["bare_number"] = 1.0
    lines = train("run", train__total_dialog_turns=32)
    assert [line["reward/error_share"] for line in lines] == [1.0, 1.0]
    screen = capsys.readouterr()
    assert screen.err.count("warning: 100% of the calls of a reward failed (since step 1)") == 1
    assert "failed rewards     32" in screen.out and "100% of the calls of a reward failed" in screen.out


@pytest.mark.parametrize("kind", DEAD)
def test_a_dead_run_names_cause_and_key_before_a_tenth_of_it_is_over(
    train: Runner,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    source, changes, says = DEAD[kind]
    own_reward(config, tmp_path, source)
    whole_step = loop.step

    def step(run: Session) -> dict[str, float]:
        assert run.schedule.total_steps == STEPS
        if run.counters.step == STEPS // 10:
            raise KeyboardInterrupt
        return whole_step(run)

    monkeypatch.setattr(loop, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train("run", logging__progress=True, **changes)
    screen = capsys.readouterr().err
    (warning,) = (line for line in screen.splitlines() if says[0] in line)
    assert says[1] in warning


def test_a_resumed_run_repeats_what_holds(
    train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_reward(config, tmp_path, RIGHT)
    settings: dict[str, Any] = {"inference_model__max_new_tokens": 2, "train__total_dialog_turns": 80}
    whole = train("run", train__checkpoint_frequency=4, checkpoint__keep=9, **settings)
    screens = [capsys.readouterr()]
    assert train("run", resume=str(tmp_path / "run/checkpoints/4")) == whole
    screens.append(capsys.readouterr())
    for screen in screens:
        assert (
            screen.err.count("all responses were cut off")
            == screen.out.count("all responses were cut off")
            == 1
        )


def test_the_line_of_a_step_has_the_kl_to_the_reference_or_none(
    train: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    train("without", train__total_dialog_turns=16, logging__progress=True, eval__num_problems=0)
    assert "kl " not in capsys.readouterr().err
    train("with", policy__kl_coef=0.1)
    assert "kl 0  " in capsys.readouterr().err
