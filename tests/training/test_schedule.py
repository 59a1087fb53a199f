"""What is due at which step, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrl_grpo.config import Config
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
    found = RunSchedule.from_config(cfg)
    # 4 rounds of 16 samples, each trained on twice in batches of 8.
    assert (found.steps_per_round, found.total_steps, found.publish_every) == (4, 16, 4)
    assert (found.evaluate_every, found.checkpoint_every, found.refresh_every) == (3, 5, 7)
    cfg.train.weight_update_frequency = 3
    cfg.eval.num_problems = 0
    found = RunSchedule.from_config(cfg)
    assert (found.publish_every, found.evaluates) == (3, False)


@pytest.mark.parametrize(("interval", "expected"), [(0, [12]), (5, [5, 10, 12]), (4, [4, 8, 12])])
def test_evaluations_and_checkpoints_come_at_their_interval_and_at_the_end(
    interval: int, expected: list[int]
) -> None:
    schedule = replace(SCHEDULE, evaluate_every=interval, checkpoint_every=interval)
    assert steps(schedule.is_evaluation_due) == steps(schedule.is_checkpoint_due) == expected
    assert steps(replace(schedule, evaluates=False).is_evaluation_due) == []


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
