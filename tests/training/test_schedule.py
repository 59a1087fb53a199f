"""What is due at which step, without a model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks import schedule as checks
from torchrl_grpo.config.derived import with_total_turns
from torchrl_grpo.config.parsing import schema_node
from torchrl_grpo.config.values import LRSchedule
from torchrl_grpo.training.optimizer_step import learning_rate_factor
from torchrl_grpo.training.schedule import RunSchedule

SCHEDULE = RunSchedule(steps_per_round=2, total_steps=12, publish_every=2)


def steps(due: object, end: int = 12) -> list[int]:
    return [step for step in range(1, end + 1) if due(step)]  # type: ignore[operator]


def publications(schedule: RunSchedule) -> list[int]:
    per_round = schedule.steps_per_round
    return steps(lambda step: schedule.is_publication_due(step, -step % per_round))


def test_a_configuration_gives_the_schedule() -> None:
    cfg = Config()
    cfg.env.num_envs, cfg.env.repeats = 4, 4
    cfg.train.epochs, cfg.train.optim_batch_size, cfg.train.total_dialog_turns = 2, 8, 64
    cfg.train.checkpoint_frequency, cfg.eval.frequency, cfg.ref_model.refresh_frequency = 5, 3, 7
    schedule = RunSchedule.from_config(cfg)
    # 4 rounds of 16 samples, each trained on twice in batches of 8.
    assert (schedule.steps_per_round, schedule.total_steps, schedule.publish_every) == (4, 16, 4)
    assert (schedule.evaluate_every, schedule.checkpoint_every, schedule.refresh_every) == (3, 5, 7)
    cfg.train.weight_update_frequency = 3
    cfg.eval.num_problems = 0
    schedule = RunSchedule.from_config(cfg)
    assert (schedule.publish_every, schedule.evaluates) == (3, False)


@pytest.mark.parametrize(("interval", "expected"), [(0, [12]), (5, [5, 10, 12]), (4, [4, 8, 12])])
def test_evaluations_and_checkpoints_come_at_their_interval_and_at_the_end(
    interval: int, expected: list[int]
) -> None:
    schedule = replace(SCHEDULE, evaluate_every=interval, checkpoint_every=interval)
    assert steps(schedule.is_evaluation_due) == steps(schedule.is_checkpoint_due) == expected
    assert steps(replace(schedule, evaluates=False).is_evaluation_due) == []


@pytest.mark.parametrize("every", [0, 1, 4, 5, 12, 20])
def test_checkpoints_that_will_be_written_are_counted(every: int) -> None:
    schedule = replace(SCHEDULE, checkpoint_every=every)
    for start in range(13):
        due = sum(map(schedule.is_checkpoint_due, range(start + 1, 13)))
        assert schedule.checkpoints_after(start) == due


def test_the_evaluation_at_the_start_comes_before_the_first_step_only() -> None:
    assert SCHEDULE.is_initial_evaluation_due(0) and not SCHEDULE.is_initial_evaluation_due(1)
    assert not replace(SCHEDULE, evaluates=False).is_initial_evaluation_due(0)
    assert not replace(SCHEDULE, evaluates_at_start=False).is_initial_evaluation_due(0)


def test_weights_are_published_at_their_interval_and_before_an_evaluation() -> None:
    assert publications(SCHEDULE) == [2, 4, 6, 8, 10, 12]
    assert publications(replace(SCHEDULE, evaluate_every=5)) == [2, 4, 5, 6, 8, 10, 12]
    assert publications(replace(SCHEDULE, publish_every=1)) == list(range(1, 13))


def test_a_checkpoint_needs_a_publication_only_if_none_comes_before_the_next_round() -> None:
    # Every round begins with weights published at its start: the checkpoint in the middle changes nothing.
    assert publications(replace(SCHEDULE, checkpoint_every=3)) == [2, 4, 6, 8, 10, 12]
    # Weights are published every second round only. A checkpoint at step 6 ends a round without one.
    sparse = replace(SCHEDULE, publish_every=4)
    assert publications(sparse) == [4, 8, 12]
    assert publications(replace(sparse, checkpoint_every=6)) == [4, 6, 8, 12]
    # The publication of step 4 comes before the round after step 3. None comes before the round after step 9.
    assert publications(replace(sparse, checkpoint_every=3)) == [4, 6, 8, 9, 12]


def test_the_reference_is_refreshed_at_its_interval_and_never_for_zero() -> None:
    assert steps(SCHEDULE.is_reference_refresh_due) == []
    assert steps(replace(SCHEDULE, refresh_every=5).is_reference_refresh_due) == [5, 10]


def test_a_run_ends_with_its_last_step() -> None:
    assert steps(SCHEDULE.is_finished, end=13) == [12, 13]


# 16 steps of 64 responses, two of them a round.
SHORT = "env.num_envs=16 train.optim_batch_size=64 train.total_dialog_turns=1024"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", []),
        ("optimizer.warmup_steps=14 optimizer.schedule=cosine", []),
        (
            "optimizer.warmup_steps=16",
            [
                "optimizer.warmup_steps=16: the run has 16 optimizer steps, so the learning rate ends at "
                "9.41e-06 and never reaches optimizer.lr=1e-05; write optimizer.warmup_steps=1 or "
                "train.total_dialog_turns=1152"
            ],
        ),
        ("optimizer.warmup_steps=15 optimizer.schedule=constant", []),
        (
            "optimizer.warmup_steps=15 optimizer.schedule=linear",
            [
                "optimizer.schedule=linear: the run has 16 optimizer steps, and optimizer.warmup_steps=15, "
                "so the learning rate never falls; write optimizer.warmup_steps=1 or "
                "train.total_dialog_turns=1152"
            ],
        ),
        ("policy.kl_coef=0.1 ref_model.refresh_frequency=14", []),
        ("policy.kl_coef=0.1 ref_model.refresh_frequency=15", ["ref_model.refresh_frequency=15: "]),
        ("train.weight_update_frequency=14", []),
        ("train.weight_update_frequency=16", ["train.weight_update_frequency=16: "]),
        ("policy.kl_coef=0.1 policy.kl_target=0.1 policy.kl_horizon=1024", []),
        ("policy.kl_coef=0.1 policy.kl_target=0.1", ["policy.kl_horizon=10000: "]),
        ("env.shuffle=false env.order_by=level", ["env.order_by=level: the run draws 128 of 200 problems"]),
    ],
)
def test_schedules_that_the_run_is_too_short_for_are_told(words: str, expected: list[str]) -> None:
    warnings = checks.length_warnings(read(f"{SHORT} optimizer.lr=1e-5 {words}"), problems=200)
    assert len(warnings) == len(expected) and all(map(str.startswith, warnings, expected)), warnings
    for sentence in warnings:
        # As a user would: each of the alternatives.
        for fix in sentence.partition("; write ")[2].split(" or "):
            again = with_total_turns(read(f"{SHORT} optimizer.lr=1e-5 {words} {fix}"), 200)
            assert checks.length_warnings(again, problems=200) == []


def test_a_default_length_that_passes_over_few_problems_for_days_is_told(repo_root: Path) -> None:
    def warnings_of(words: str, problems: int | None) -> list[str]:
        return checks.length_warnings(with_total_turns(read(words), problems or 0), problems)

    assert warnings_of("", 32) == [
        "train.total_dialog_turns=64000: this default makes 1000 optimizer steps, which pass over the 32 "
        "problems 250 times; write train.num_epochs=8 or a smaller train.total_dialog_turns"
    ]
    (of_sft,) = warnings_of("train.total_dialog_turns=14944 env.repeats=2 env.num_envs=16", 36)
    assert of_sft.startswith("train.total_dialog_turns=14944: ") and "208 times" in of_sft
    files = [OmegaConf.load(repo_root / f"config/{name}.yaml") for name in ("base", "sft_gsm8k")]
    assert tuple(file.train.total_dialog_turns for file in files) == checks.DEFAULT_TURNS
    # 20 passes, a length that the user chose, and data on the hub in a dry run.
    for words, problems in (
        ("", 400),
        ("train.total_dialog_turns=8000", 4),
        ("train.num_epochs=40 train.total_dialog_turns=null", 4),
        ("", None),
    ):
        assert warnings_of(words, problems) == []


@pytest.mark.slow
def test_a_rate_is_reached_if_nothing_is_told() -> None:
    for warmup, steps, kind in itertools.product(range(6), range(1, 6), LRSchedule):
        cfg = read(
            f"optimizer.warmup_steps={warmup} optimizer.schedule={kind} optimizer.min_lr_ratio=0.1 "
            f"train.total_dialog_turns={steps * 64}"
        )
        factors = [learning_rate_factor(step, steps, cfg.optimizer) for step in range(steps)]
        falls = kind == "constant" or factors[-1] < 1 or steps == 1
        assert (checks.length_warnings(cfg) == []) == (max(factors) == 1.0 and falls), cfg.optimizer


def read(words: str) -> Config:
    node = OmegaConf.merge(schema_node(), OmegaConf.from_dotlist(words.split()))
    assert isinstance(node, DictConfig)
    return parse(node)
