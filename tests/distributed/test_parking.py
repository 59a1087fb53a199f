"""Moments of the optimizer in host memory: same numbers, same checkpoints, less memory in between."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import make_batch, make_model, make_objective, no_budget
from pretended_cuda import PretendedCuda
from torch import Tensor

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.config.values import OptimizerName
from torchrl_grpo.distributed.host_copies import HostCopies
from torchrl_grpo.distributed.parking import is_parked
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.training import run_checkpoints
from torchrl_grpo.training.optimizer_step import OptimizerStep
from torchrl_grpo.training.run_checkpoints import RunCheckpoints


def make_step(device: str, loads_parked: bool = False, name: str = "adamw") -> OptimizerStep:
    # Matrices of this size have averages in 8 bits.
    model = make_model(hidden_size=64, intermediate_size=128).to(device)
    loss, _ = make_objective(TokenScorer(model))
    return OptimizerStep(
        model,
        loss,
        OptimizerConfig(name=OptimizerName(name), lr=1e-2),
        total_steps=9,
        groups_per_batch=4,
        num_pieces=1,
        budget=no_budget(),
        use_scaler=False,
        max_skipped_steps=1,
        loads_parked=loads_parked,
    )


def moments(step: OptimizerStep) -> list[Tensor]:
    return [
        value for state in step.optimizer.state.values() for name, value in state.items() if name != "step"
    ]


def weights(step: OptimizerStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.parameters]


def same(value: Any, other: Any) -> bool:
    return len(value) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(value, other, strict=True))


@pytest.mark.slow
def test_parked_moments_take_no_memory_and_change_no_number() -> None:
    with PretendedCuda() as machine:
        plain, parked = make_step("cuda"), make_step("cuda")
        parked.backend.park()  # before there are any
        for seed in range(3):
            plain(make_batch(seed=seed))
            parked(make_batch(seed=seed))
            assert same(weights(plain), weights(parked))
            held = moments(parked)
            assert not any(is_parked(moment) for moment in held)
            parked.backend.park()
            assert all(is_parked(moment) for moment in held)
            parked.backend.park()  # the second time does nothing
        assert {moment.device for moment in moments(parked)} == {torch.device("cuda:0")}
        assert not machine.problems


@pytest.mark.parametrize("loads_parked", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_of_parked_moments(name: str, loads_parked: bool) -> None:
    with PretendedCuda():
        check_checkpoint("cuda", name, loads_parked)


@pytest.mark.parametrize("loads_parked", [False, True])
def test_a_checkpoint_of_parked_moments_in_8_bits(loads_parked: bool) -> None:
    pytest.importorskip("bitsandbytes")
    # Its kernels have no pretended GPU.
    check_checkpoint("cpu", "adamw_8bit", loads_parked)


def check_checkpoint(device: str, name: str, loads_parked: bool) -> None:
    """Parked moments are saved as they are, and loaded into a step that goes on bit for bit."""
    step = make_step(device, name=name)
    step(make_batch())
    # The state is the optimizer's own.
    expected = copy.deepcopy(step.state_dict()["optimizer"])
    step.backend.park()
    optimizer_state = step.state_dict()["optimizer"]
    assert all(is_parked(moment) for moment in moments(step)), "saving fetches one at a time"
    for index, entry in expected["state"].items():
        tensors = [value for value in optimizer_state["state"][index].values() if isinstance(value, Tensor)]
        assert same([value.cpu() for value in entry.values() if isinstance(value, Tensor)], tensors)
        assert {value.device.type for value in tensors if value.dim()} == {"cpu"}
    resumed = make_step(device, loads_parked, name)
    for own, theirs in zip(resumed.parameters, step.parameters, strict=True):
        own.data.copy_(theirs.data)
    resumed.load_state_dict(step.state_dict())
    assert {is_parked(moment) for moment in moments(resumed)} == {loads_parked}
    for train_step in (step, resumed):
        train_step(make_batch(seed=1))
    assert same(weights(step), weights(resumed)) and same(moments(step), moments(resumed))


def checkpoints_of(step: OptimizerStep, run_dir: Path, offloads: bool) -> RunCheckpoints:
    """Checkpoints of a run of which there is only the optimizer step."""
    learner = SimpleNamespace(
        model=torch.nn.ParameterList(step.parameters),
        device=torch.device("cuda:0"),
        network=None,
        optimizer_step=step,
        ranks=Ranks(on_cpu=True),
        host_copies=HostCopies(),
        sender=BackgroundWriter(),
    )
    state = SimpleNamespace(
        parts=SimpleNamespace(
            learner=learner, tokenizer=None, plan=SimpleNamespace(offload_optimizer=offloads)
        ),
        counters=SimpleNamespace(step=1),
        state_dict=lambda: {"unlogged": {}},
    )
    return RunCheckpoints(Config(), state, run_dir, "exact_match")  # type: ignore[arg-type]


@pytest.mark.parametrize("offloads", [False, True])
def test_a_checkpoint_that_is_written_during_the_next_step_has_its_own_moments(
    offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendedCuda():
        step = make_step("cuda")
        step(make_batch())
        if offloads:
            step.backend.park()
        begun, disk, path = threading.Event(), threading.Event(), tmp_path / "trainer.pt"

        def save(*_: object, state: dict[str, Any], on_state_read: Any, **__: object) -> None:
            begun.set()
            disk.wait()
            torch.save(state, path)
            on_state_read()

        monkeypatch.setattr(checkpoint, "save", save)
        checkpoints, waited = checkpoints_of(step, tmp_path, offloads), list[bool]()
        expected = copy.deepcopy(step.state_dict()["optimizer"]["state"])

        def before_update() -> None:
            waited.append(not checkpoints.writer._has_read.is_set())
            if waited[-1]:
                disk.set()
            checkpoints.writer.wait_until_read()

        step.before_update = before_update
        checkpoints.save()
        assert begun.wait(60)
        step(make_batch(seed=1))
        step.backend.park()
        disk.set()
        checkpoints.writer.finish()
        written = torch.load(path, weights_only=True)["optimise"]["optimizer"]["state"]
        for index, entry in expected.items():
            assert same([value.cpu() for value in entry.values()], list(written[index].values()))
        # Only what a thread has copied may change while a disk is slow.
        assert waited == [offloads]


@pytest.mark.parametrize(
    ("free", "offloads", "waits"),
    # Weights and moments are three times the size of the weights, of which parked moments are not copied.
    [(5.9, False, True), (6.1, False, False), (1.9, True, True), (2.1, True, False), (None, False, False)],
)
def test_a_run_waits_for_a_checkpoint_whose_copy_takes_half_of_the_host_memory(
    free: float | None, offloads: bool, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendedCuda():
        step = make_step("cuda")
        step(make_batch())
        if offloads:
            step.backend.park()
        size = sum(parameter.nbytes for parameter in step.parameters) / 2**30
        monkeypatch.setattr(run_checkpoints, "available_gib", lambda: None if free is None else free * size)
        monkeypatch.setattr(checkpoint, "save", lambda *_, on_state_read, **__: on_state_read())
        checkpoints = checkpoints_of(step, tmp_path, offloads)
        checkpoints.save()
        assert (checkpoints.writer._write is None) == waits
        checkpoints.writer.finish()


def test_ranks_that_an_error_has_left_out_of_step_write_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = checkpoints_of(make_step("cpu"), tmp_path, offloads=False)
    ranks = checkpoints._state.parts.learner.ranks
    with pytest.raises(ZeroDivisionError), ranks.mark_broken_on_error():
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="checkpoints/1: the checkpoint cannot be written, because an"):
        checkpoints.save()


def test_a_skipped_update_leaves_them_parked() -> None:
    step = make_step("cpu")
    step(make_batch())
    step.backend.park()
    batch = make_batch(seed=1)
    batch["advantage"].fill_(torch.inf)
    step(batch)
    assert step.skipped == 1 and all(is_parked(moment) for moment in moments(step))
    step(make_batch(seed=2))
    assert not any(is_parked(moment) for moment in moments(step))
