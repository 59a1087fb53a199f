"""Whole asynchronous runs in this process: workers are threads, all else is what grpo-async.py runs."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from async_runs import AsyncRunner, pools, train  # noqa: F401  fixtures
from local_pool import LocalPool
from tiny_runs import Runner, config, without_eval  # noqa: F401  fixtures
from tiny_runs import train as train_sync  # noqa: F401
from torch import Tensor

from torchrl_grpo.batch.schema import collate
from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.errors import CheckpointError, ModelError, TrainingStopped, WorkersLost
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.tools.verify_resume import read, unmeasured

pytestmark = pytest.mark.slow


def as_sync(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a synchronous run would have logged too."""
    return [
        {name: value for name, value in line.items() if not name.startswith("workers/")} for line in lines
    ]


def sampled(folder: Path) -> list[str]:
    return [row["response"] for row in read(folder / "rollouts.jsonl")]


def groups(folder: Path) -> dict[str, int]:
    summary = json.loads((folder / "summary.json").read_text())
    books: dict[str, int] = summary["groups"]
    assert (
        books["issued"] == books["trained"] + books["dropped_age"] + books["dropped_filter"] + books["left"]
    )
    return books


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train__optim_batch_size": 8, "train__epochs": 2, "train__total_dialog_turns": 32},
        {"policy__constant_groups": "refill", "policy__max_refills": 9},
        {"policy__kl_coef": 0.1, "policy__proximal": "trainer", "eval__pass_at_k": 2},
    ],
    ids=["plain", "several steps a round", "refilled", "reference and proximal policy"],
)
def test_an_age_of_zero_is_the_synchronous_run_line_by_line(
    train: AsyncRunner, train_sync: Runner, tmp_path: Path, settings: dict[str, Any]
) -> None:
    together = train_sync("sync", **settings)
    assert any(line["advantage/abs_mean"] > 0 for line in together[1:]), (
        "a run without a signal tests nothing"
    )
    for update in ("drain", "in_flight"):
        apart = train(update, collector__max_policy_age=0, collector__weight_update=update)
        assert as_sync(apart) == together
        assert read(tmp_path / update / "rollouts.jsonl") == read(tmp_path / "sync/rollouts.jsonl")
        books = groups(tmp_path / update)
        assert books["dropped_age"] == books["left"] == 0
        if "policy__constant_groups" in settings:
            assert books["dropped_filter"] == 4 * sum(line.get("rollout/refills", 0) for line in together)


@pytest.mark.float32
def test_an_age_of_zero_with_two_workers_samples_the_same_responses(
    train: AsyncRunner, train_sync: Runner
) -> None:
    together = train_sync("sync", optimizer__lr=1e-4)
    apart = train("async", collector__max_policy_age=0, inference_model__num_devices=2)
    for line, other in zip(together[1:], apart[1:], strict=True):
        assert other["loss/total"] == pytest.approx(line["loss/total"], abs=1e-5)
        assert other["response/length_mean"] == line["response/length_mean"]


def test_a_finished_group_that_became_too_old_is_recorded_with_the_reason(
    train: AsyncRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire = StalenessTracker.expire

    def expire_the_sixth_group_too(tracker: StalenessTracker) -> list[int]:
        if 5 in tracker.accepted:
            tracker.accepted[5] = tracker._held(-9)
        return expire(tracker)

    monkeypatch.setattr(StalenessTracker, "expire", expire_the_sixth_group_too)
    train("run", collector__max_policy_age=1, policy__kl_coef=0.1)
    assert groups(tmp_path / "run")["dropped_age"] == 1
    discarded = read(tmp_path / "run/discarded.jsonl")
    assert [row["group_id"] for row in discarded] == [5] * 4 and "advantage" not in discarded[0]
    assert {row["discarded"] for row in discarded} == {"older than collector.max_policy_age allows"}
    trained = read(tmp_path / "run/rollouts.jsonl")
    assert 5 not in {row["group_id"] for row in trained}
    assert discarded[0].keys() - {"discarded"} == trained[0].keys() - {"advantage"}


@pytest.mark.parametrize(
    ("update", "partial"), [("drain", False), ("in_flight", False), ("drain", True), ("in_flight", True)]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_running_ahead_keeps_the_bound_and_the_books(
    train: AsyncRunner, tmp_path: Path, update: str, partial: bool, workers: int
) -> None:
    lines = train(
        "run",
        {"delay": 0.02},
        collector__max_policy_age=2,
        collector__weight_update=update,
        collector__partial_rollout=partial,
        inference_model__num_devices=workers,
        inference_model__max_new_tokens=12,
        train__total_dialog_turns=64,
        eval__frequency=0,
        eval__num_problems=0,
    )
    assert [line["step"] for line in lines] == list(range(1, 5))
    ages = [line["policy/age_max"] for line in lines]
    assert 1 <= max(ages) <= 2 and ages[0] == 0
    for line in lines:
        shares = {
            int(name[11:]): value
            for name, value in line.items()
            if name[:11] == "policy/age_" and name[11:].isdigit()
        }
        assert sum(shares.values()) == pytest.approx(1.0)
        assert sum(age * share for age, share in shares.items()) == pytest.approx(line["policy/age_mean"])
    books = groups(tmp_path / "run")
    assert books["trained"] == 16
    trained = [row["group_id"] for row in read(tmp_path / "run/rollouts.jsonl")]
    assert len(set(trained)) == 16 and len(trained) == 64, "no group is trained on twice"
    if update == "drain" and not partial:
        assert all(line["policy/mixed"] == 0 for line in lines), "whole groups come of one version"


def test_responses_that_new_weights_cut_keep_their_log_probs_and_know_their_versions(
    train: AsyncRunner, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_grpo.rollout import buffer

    seen: list[Any] = []
    honest = buffer.GroupBuffer.replace_contents

    def watched(self: buffer.GroupBuffer, batch: Any) -> None:
        seen.append(collate(batch.unbind(0)))
        honest(self, batch)

    monkeypatch.setattr(buffer.GroupBuffer, "replace_contents", watched)
    train(
        "run",
        {"delay": 0.03},
        collector__max_policy_age=3,
        inference_model__max_new_tokens=40,
        train__total_dialog_turns=112,
        eval__num_problems=0,
    )
    mixed = 0
    for batch in seen:
        versions, mask = batch["versions", "response"], batch["masks", "response"]
        for p, g in [(p, g) for p in range(4) for g in range(4)]:
            row = versions[p, g][mask[p, g]].tolist()
            assert row == sorted(row), "weights only get newer"
            assert (min(row), max(row)) == (
                batch["policy_version"][p, g],
                batch["newest_policy_version"][p, g],
            )
            mixed += row[0] != row[-1]
        assert (batch["log_probs", "response"][mask] < 0).all()
    assert mixed > 0


def test_dead_workers_are_replaced_and_their_groups_reissued(
    train: AsyncRunner, train_sync: Runner, tmp_path: Path, pools: list[LocalPool]
) -> None:
    together = train_sync("sync")
    for method in ("work", "load", "generate"):
        dead: list[int] = []

        def fault(number: int, name: str, count: int, method: str = method, dead: list[int] = dead) -> None:
            if name == method and len(dead) < 3 and count % 2:
                dead.append(count)
                raise ConnectionError("the worker was killed")

        apart = train(method, {"fault": fault}, collector__max_policy_age=0)
        assert len(dead) == 3 and pools[-1].killed == 3
        # Seeds belong to groups and not to workers: whoever samples a group anew samples the same.
        assert sampled(tmp_path / method) == sampled(tmp_path / "sync")
        assert as_sync(apart) == together
        assert groups(tmp_path / method)["issued"] == 16


def test_a_worker_that_hangs_is_given_up(train: AsyncRunner, tmp_path: Path, pools: list[LocalPool]) -> None:
    let_go = threading.Event()

    def fault(number: int, name: str, count: int) -> None:
        if name == "work" and pools[-1].killed == 0:
            let_go.wait(60)

    lines = train("run", {"fault": fault}, collector__timeout_s=3.0)
    let_go.set()
    assert len(lines) == 5 and pools[-1].killed == 1
    assert json.loads((tmp_path / "run/summary.json").read_text())["worker_restarts"] == 1


def test_too_many_deaths_stop_the_run_with_the_last_error_and_a_checkpoint(
    train: AsyncRunner, tmp_path: Path, pools: list[LocalPool]
) -> None:
    def fault(number: int, name: str, count: int) -> None:
        if name == "work" and count > 6:
            raise RuntimeError("device lost")

    with pytest.raises(WorkersLost, match=r"device lost.*collector\.max_restarts=2"):
        train("run", {"fault": fault}, collector__max_restarts=2, collector__max_policy_age=0)
    assert pools[-1].closed
    saved = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved, "what was trained is not lost"
    whole = train("run", resume="auto", collector__max_restarts=10)
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]


def test_workers_lost_while_the_disk_is_full_is_said_with_both_reasons(
    train: AsyncRunner, tmp_path: Path, pools: list[LocalPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(number: int, name: str, count: int) -> None:
        if name == "work" and count > 6:
            raise RuntimeError("device lost")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_fill", full)
    both = r"device lost.*collector\.max_restarts=2.*could not be written.*No space left"
    with pytest.raises(CheckpointError, match=both):
        train("run", {"fault": fault}, collector__max_restarts=2, collector__max_policy_age=0)
    assert pools[-1].closed


def dies_in_evaluation(calls: list[int], numbers: Container[int]) -> Callable[[int, str, int], None]:
    """Each evaluation is put down in ``calls``; those of ``numbers``, from 1, are the end of their worker."""

    def fault(number: int, name: str, count: int) -> None:
        if name == "generate":
            calls.append(count)
            if len(calls) in numbers:
                raise RuntimeError("device lost")

    return fault


def test_a_run_that_lost_its_workers_goes_on_as_if_it_had_kept_them(
    train: AsyncRunner, train_sync: Runner, tmp_path: Path
) -> None:
    together = train_sync("sync")

    def at_work(number: int, name: str, count: int) -> None:
        if name == "work":
            raise RuntimeError("device lost")

    # Evaluations are at the start, after step 2, and at the end. The last one fails, also when it is asked
    # again. A checkpoint whose step was not logged can be resumed more than once.
    for name, fault, restarts, logged, resumed in (
        ("before the first step", at_work, 1, [0], ["auto"]),
        (
            "after step 2",
            dies_in_evaluation([], {2}),
            0,
            [0, 1],
            [f"{tmp_path}/after step 2/checkpoints/2"] * 2,
        ),
        ("at the end", dies_in_evaluation([], range(3, 99)), 1, [0, 1, 2, 3], ["auto"]),
    ):
        settings = {"collector__max_policy_age": 0, "checkpoint__keep": 9}
        with pytest.raises(WorkersLost, match="device lost"):
            train(name, {"fault": fault}, resume=None, collector__max_restarts=restarts, **settings)
        assert [line["step"] for line in read(tmp_path / name / "metrics.jsonl")] == logged
        for resume in resumed:
            assert as_sync(train(name, resume=resume)) == together
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["accuracy_before"] == together[0]["eval/accuracy"]


def test_a_worker_replaced_during_the_last_evaluation_is_verified_too(train: AsyncRunner) -> None:
    calls: list[int] = []

    class Successor(TransformersEngine):
        """Once a worker has died, takes no weights."""

        def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            if len(calls) < 3:
                super().update(weights)

    options = {"fault": dies_in_evaluation(calls, {3}), "engine_type": Successor}
    with pytest.raises(TrainingStopped, match="tensors that it computes with are not the trainer's"):
        train("run", options, collector__max_policy_age=0)
    assert len(calls) == 4, "the successor has answered"


def test_a_mistake_that_a_worker_finds_is_the_users_error(train: AsyncRunner) -> None:
    def fault(number: int, name: str, count: int) -> None:
        assert name == "start", "the run must not begin"
        raise ModelError("inference_model.dtype=float16: not on this device; write float32")

    with pytest.raises(ModelError, match=r"inference_model\.dtype=float16"):
        train("run", {"fault": fault})


class Deaf(TransformersEngine):
    """Takes the first publications and then no more."""

    taken = 0

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.taken += 1
        if self.taken <= 3:
            super().update(weights)


class Forgetful(TransformersEngine):
    """Takes the first publications and then all tensors but one."""

    taken = 0

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.taken += 1
        super().update((name, w) for name, w in weights if self.taken <= 3 or "layers.1.mlp.up" not in name)


@pytest.mark.parametrize("age", [0, 2])
@pytest.mark.parametrize("engine_type", [Deaf, Forgetful])
def test_a_worker_that_keeps_old_weights_stops_the_run(
    train: AsyncRunner, age: int, engine_type: type
) -> None:
    with pytest.raises(TrainingStopped, match="tensors that it computes with are not the trainer's"):
        train("run", {"engine_type": engine_type}, collector__max_policy_age=age)


@pytest.mark.parametrize("age", [0, 2])
def test_a_resumed_run_goes_on(train: AsyncRunner, tmp_path: Path, age: int) -> None:
    settings = {"collector__max_policy_age": age, "inference_model__num_devices": 1}
    whole = train("whole", train__checkpoint_frequency=1, checkpoint__keep=9, **settings)
    resumed = train("whole", resume=str(tmp_path / "whole/checkpoints/2"))
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    if age == 0:
        assert as_sync(resumed) == as_sync(whole)
    books = groups(tmp_path / "whole")
    assert books["trained"] == 16
    trained = [row["group_id"] for row in read(tmp_path / "whole/rollouts.jsonl")]
    assert len(set(trained)) == 16, "a group of the checkpoint is neither lost nor trained on twice"


def test_weights_are_published_as_often_as_told(train: AsyncRunner) -> None:
    lines = train(
        "run",
        train__weight_update_frequency=2,
        collector__max_policy_age=1,
        eval__num_problems=0,
        train__total_dialog_turns=128,
    )
    versions = {line["policy/version"] for line in lines}
    assert versions <= {0, 2, 4, 6}
    assert max(line["policy/age_max"] for line in lines) == 1


class Shipment(list[tuple[str, Tensor]]):
    """A list that can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_no_more_copies_of_the_weights_are_held_than_there_are_workers_and_two(
    train: AsyncRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest, the one that replaces it, and what each worker is taking: however slow a worker is."""
    held: weakref.WeakSet[Shipment] = weakref.WeakSet()
    most = []

    def watched(self: LocalPool, weights: Iterable[tuple[str, Tensor]]) -> Shipment:
        made = Shipment((name, tensor.clone()) for name, tensor in weights)
        held.add(made)
        most.append(len(held))
        return made

    def slow(number: int, method: str, count: int) -> None:
        if number == 0 and method == "load" and len(most) > 2:
            time.sleep(1.0)

    monkeypatch.setattr(LocalPool, "put_weights", watched)
    train(
        "run",
        {"fault": slow},
        inference_model__num_devices=2,
        collector__max_policy_age=8,
        eval__num_problems=0,
        train__total_dialog_turns=128,
    )
    assert len(most) > 8
    assert max(most) <= 4


def test_threads_end_with_the_run(train: AsyncRunner, pools: list[LocalPool]) -> None:
    train("run", inference_model__num_devices=2)
    assert pools[-1].closed
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith(("dispatcher", "rewards")) for name in names), names


def test_unmeasured_lines_have_no_times_left(train: AsyncRunner) -> None:
    lines = without_eval(train("run"))
    assert lines and not any(name.startswith(("time/", "throughput/")) for line in lines for name in line)
    assert os.environ["HF_HUB_OFFLINE"] == "1" and unmeasured({"time/step_s": 1.0, "loss/total": 2.0}) == {
        "loss/total": 2.0
    }
