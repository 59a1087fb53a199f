"""A search: what Optuna chooses among, and that a sweep that goes on asks for the same settings."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest
from cli_calls import BEHAVE, SEEN, call, set_up
from hydra.core.override_parser.overrides_parser import OverridesParser
from run_files import write_lines

from torchrl_grpo.config import Config
from torchrl_grpo.sweep.search import Space

WORDS = [
    "optimizer.lr=tag(log,interval(1e-6,1e-3))",
    "env.repeats=interval(2,8)",
    "policy=grpo,dapo",
    "seed=0,1",
    "env.num_envs=4",
]


def test_settings_are_drawn_and_seeds_stay_an_axis() -> None:
    space = Space(OverridesParser.create().parse_overrides(WORDS))
    lr, repeats = space.distributions["optimizer.lr"], space.distributions["env.repeats"]
    assert lr == optuna.distributions.FloatDistribution(1e-6, 1e-3, log=True)
    # Hydra reads both ends as floats; the key takes whole numbers.
    assert repeats == optuna.distributions.IntDistribution(2, 8)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    first, second = space.jobs(study.ask(space.distributions))
    assert first[:-1] == second[:-1] and (first[-1], second[-1]) == ("seed=0", "seed=1")
    assert first[0] == "env.num_envs=4" and 1e-6 <= float(first[1].removeprefix("optimizer.lr=")) <= 1e-3


def test_a_setting_that_was_begun_is_read_from_its_folder(tmp_path: Path) -> None:
    space = Space(OverridesParser.create().parse_overrides(WORDS))
    assert space.recorded(tmp_path) is None
    (tmp_path / ".hydra").mkdir()
    words = ["env.num_envs=4", "optimizer.lr=2.5e-05", "env.repeats=3", "policy=dapo", "seed=0", "resume=x"]
    (tmp_path / ".hydra/overrides.yaml").write_text(json.dumps(words))
    assert space.recorded(tmp_path) == {"optimizer.lr": 2.5e-5, "env.repeats": 3, "policy": "dapo"}
    for damaged in ("[a", "{}", json.dumps(["optimizer.lr=many", *words[2:]]), json.dumps(words[2:])):
        (tmp_path / ".hydra/overrides.yaml").write_text(damaged)
        assert space.recorded(tmp_path) is None


@pytest.mark.slow
def test_a_search_finds_the_better_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(tmp_path, monkeypatch)

    def train(cfg: Config, run_dir: Path) -> None:
        value = 1 - abs(cfg.policy.kl_coef - 0.3) + 0.01 * cfg.seed
        write_lines(run_dir / "metrics.jsonl", [{"step": 4, "eval/accuracy": value}])
        (run_dir / "summary.json").write_text('{"steps": 4}')

    BEHAVE["do"] = train
    search = ["policy.kl_coef=interval(0.0,0.9)", "sweep.seeds=2", "sweep.trials=4", "hydra.sweep.dir=sweep"]
    assert call("--multirun", *search) == 0
    assert len(SEEN) == 8 and [cfg.seed for cfg, _ in SEEN[:4]] == [0, 1, 0, 1]
    tried = [cfg.policy.kl_coef for cfg, _ in SEEN]
    assert tried[::2] == tried[1::2] and len(set(tried)) == 4
    nearest = min(tried, key=lambda value: abs(value - 0.3))
    entries = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert len(entries["settings"]) == 4 and entries["best"] == f"policy.kl_coef={nearest}"
