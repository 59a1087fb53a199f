"""What grpo-async.py asks of a configuration, how it divides cores, and how it counts ages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.checks.schedule import check_async, check_in_turn, check_sync
from torchrl_grpo.config.derived import describe_length, rounds, steps_per_round, with_total_turns
from torchrl_grpo.config.values import ConstantGroups, Proximal, WeightTransfer
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning.cores import divide_cores
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.preflight import resolve_proximal
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rollout.round import staleness_metrics


def config(**changes: object) -> Config:
    cfg = Config()
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        setattr(getattr(cfg, group), leaf, value)
    validate(cfg)
    return cfg


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__weight_update_frequency": 3, "collector__max_policy_age": 1},
            r"train\.weight_update_frequency=3: .* 2 rounds .*write train\.weight_update_frequency=2$",
        ),
        (
            {"train__weight_update_frequency": 2, "collector__max_policy_age": 0},
            r"collector\.max_policy_age=0 allows less.*train\.weight_update_frequency=1",
        ),
        (
            {"train__optim_batch_size": 16, "train__weight_update_frequency": 3},
            r"train\.weight_update_frequency=3: it must divide a collection round of 4 optimizer steps",
        ),
        (
            {
                "collector__max_policy_age": 3,
                "train__weight_update_frequency": 4,
                "inference_model__backend": "vllm_server",
                "inference_model__weight_transfer": WeightTransfer.nccl,
            },
            r"weight_update_frequency=4: .*weight_transfer=nccl allows none.*weight_update_frequency=1",
        ),
        (
            # Workers on Ray.
            {
                "collector__max_policy_age": 3,
                "train__weight_update_frequency": 4,
                "inference_model__weight_transfer": WeightTransfer.nccl,
            },
            r"weight_update_frequency=4: .*weight_transfer=nccl allows none.*weight_update_frequency=1",
        ),
        (
            {"collector__partial_rollout": True, "collector__max_policy_age": 0},
            r"collector\.partial_rollout=true: .*write collector\.max_policy_age=1",
        ),
        (
            {"inference_model__num_devices": 9},
            r"inference_model\.num_devices=9: .*env\.num_envs=8 groups.*inference_model\.num_devices=8",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_async(config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"collector__max_policy_age": 0},
        {"collector__max_policy_age": 3, "train__weight_update_frequency": 4},
        {"train__optim_batch_size": 16, "train__weight_update_frequency": 2, "collector__max_policy_age": 0},
        {"inference_model__num_devices": 8, "collector__partial_rollout": True},
    ],
)
def test_keys_that_fit_are_taken(changes: dict[str, object]) -> None:
    check_async(config(**changes))


@pytest.mark.parametrize("check", [check_async, check_in_turn])
def test_each_engine_needs_a_group(check: Callable[[Config], None]) -> None:
    cfg = config()
    cfg.inference_model.backend = "vllm_server"
    cfg.inference_model.num_devices = 2 * cfg.env.num_envs
    cfg.inference_model.tensor_parallel_size = 2
    check(cfg)
    cfg.inference_model.num_devices += 2
    with pytest.raises(ConfigError, match=r"inference_model\.num_devices=18: .*num_devices=16$"):
        check(cfg)
    cfg.inference_model.num_devices = "auto"
    cfg.inference_model.servers = [f"http://host:{port}" for port in range(9)]
    with pytest.raises(ConfigError, match=r"inference_model\.servers=\[.*host:8\]: .*host:7\]$"):
        check(cfg)


@pytest.mark.parametrize("check", [check_sync, check_async])
def test_each_training_rank_needs_a_group(check: Callable[[Config], None]) -> None:
    groups = config().env.num_envs
    check(config(train_model__num_devices=groups))
    check(config(train_model__devices=list(range(groups))))
    with pytest.raises(ConfigError, match=rf"only {groups} groups.*write train_model\.num_devices={groups}$"):
        check(config(train_model__num_devices=groups + 1))


def test_an_engine_that_sleeps_cannot_work_beside_the_trainer() -> None:
    cfg = config()
    cfg.inference_model.sleep = True
    with pytest.raises(ConfigError, match=r"inference_model\.sleep=false"):
        check_async(cfg)


@pytest.mark.parametrize(
    ("cores", "age", "workers", "on_gpu", "expected"),
    [
        (2, 0, 1, False, (2, 2)),  # in turn: everything, as grpo.py has
        (2, 1, 1, False, (1, 1)),
        (2, 2, 4, False, (1, 1)),
        (16, 1, 1, False, (8, 8)),
        (16, 1, 3, False, (4, 4)),
        (16, 0, 4, False, (16, 4)),
        (16, 2, 4, True, (16, 4)),
    ],
)
def test_cores_are_divided(
    cores: int, age: int, workers: int, on_gpu: bool, expected: tuple[int, int]
) -> None:
    cfg = config(collector__max_policy_age=age, inference_model__num_devices=workers)
    assert divide_cores(cfg, planned(cfg, on_gpu), cores, ranks=1) == expected


def test_cores_go_where_they_are_sent() -> None:
    cfg = config(train__num_threads=5, inference_model__num_threads=3)
    assert divide_cores(cfg, planned(cfg), 16, ranks=1) == (5, 3)
    cfg.train.num_threads = None
    assert divide_cores(cfg, planned(cfg), 16, ranks=1) == (13, 3)
    cfg.policy.kl_coef, cfg.ref_model.num_devices = 0.1, 2
    assert divide_cores(cfg, planned(cfg), 16, ranks=1) == (7, 3), "two processes of the reference"
    cfg.policy.kl_coef = 0.0
    assert divide_cores(cfg, planned(cfg), 16, ranks=2) == (6, 3)
    # In turn all of them are free for whoever has its turn.
    assert divide_cores(cfg, planned(cfg, asynchronous=False), 16, ranks=2) == (8, 3)


def planned(cfg: Config, on_gpu: bool = False, asynchronous: bool = True) -> Plan:
    return plan(build_request(cfg, asynchronous), 9 if on_gpu else 0)


def test_rounds_and_steps() -> None:
    cfg = config(train__optim_batch_size=16, train__epochs=2, train__total_dialog_turns=640)
    assert (steps_per_round(cfg), rounds(cfg)) == (8, 10)


@pytest.mark.parametrize(
    ("epochs", "problems", "expected"),
    [
        (1.0, 64, 8),
        (1.0, 65, 9),
        (2.0, 63, 16),
        (0.1, 30, 1),
        (0.5, 48, 3),
        (0.001, 10, 1),
        (3.0, 7473, 2803),
    ],
)
def test_epochs_are_as_many_rounds_as_ask_every_problem(epochs: float, problems: int, expected: int) -> None:
    cfg = config(train__total_dialog_turns=None, train__num_epochs=epochs)
    whole = with_total_turns(cfg, problems)
    validate(whole)
    assert rounds(whole) == expected
    assert whole.train.total_dialog_turns == expected * 64 and whole.train.num_epochs is None
    assert cfg.train.num_epochs == epochs, "what was asked for stays as it was"
    description = describe_length(cfg, problems)
    assert f"{expected} rounds of 8 problems x 8 samples" in description
    # Refills draw further problems, and nobody knows how many.
    cfg.policy.constant_groups = ConstantGroups("refill")
    assert describe_length(cfg, problems) == f"{description}, and more for refills" and description.endswith(
        " problems"
    )


def test_a_length_in_samples_stays() -> None:
    cfg = config()
    assert with_total_turns(cfg, 3) is cfg


@pytest.mark.parametrize(
    ("asynchronous", "age", "meant"), [(False, 1, "engine"), (True, 0, "engine"), (True, 1, "trainer")]
)
def test_the_proximal_policy_is_automatic_only_where_nobody_chose(
    asynchronous: bool, age: int, meant: str
) -> None:
    cfg = config(collector__max_policy_age=age)
    assert resolve_proximal(cfg, asynchronous).policy.proximal == meant
    for choice in ("engine", "trainer"):
        cfg.policy.proximal = Proximal(choice)
        assert resolve_proximal(cfg, asynchronous) == cfg


def test_ages_are_counted_in_rounds() -> None:
    groups = TensorDict(
        {
            "policy_version": torch.tensor([[8, 8], [4, 5]]),
            "newest_policy_version": torch.tensor([[8, 8], [4, 8]]),
        },
        [2],
    )
    assert staleness_metrics(groups, step=8, steps_per_round=4) == {
        "policy/age_mean": 0.5,
        "policy/age_max": 1,
        "policy/age_0": 0.5,
        "policy/age_1": 0.5,
        "policy/mixed": 0.25,
    }
