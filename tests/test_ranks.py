"""Several training ranks compute what one does: gradients, metrics, steps, states; and ways to start them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from rank_program import CASES, measure

from torchrl_grpo.training.ranks import Ranks, divide

KINDS = ("ddp", "fsdp2")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_ranks(count: int, output: Path) -> Any:
    """What ``rank_program`` finds with ``count`` processes."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_program.py")), str(output)],
            env={**os.environ, **common, "RANK": str(number), "LOCAL_RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(errors)
    return torch.load(output, weights_only=False)


@functools.cache
def measured_alone(case: str) -> dict[str, Any]:
    return measure(case, "ddp", Ranks(on_cpu=True))


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return {count: in_ranks(count, folder / f"{count}.pt") for count in (2, 3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_does(
    by_ranks: dict[int, Any], case: str, count: int, kind: str
) -> None:
    alone, found = measured_alone(case), by_ranks[count][case, kind]
    assert found["sums"] == pytest.approx(alone["sums"], rel=1e-5, abs=1e-6)
    for part in ("gradients", "weights"):
        assert found[part].keys() == alone[part].keys()
        for name, expected in alone[part].items():
            difference = (found[part][name] - expected).abs().max()
            assert difference <= 1e-5 * expected.abs().max(), (part, name, float(difference))
    assert any(gradient.abs().max() > 1e-3 for gradient in alone["gradients"].values())
    for ours, expected in zip(found["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(found["probe"], alone["probe"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimiser_s_state_is_the_same_for_all_layouts(by_ranks: dict[int, Any], kind: str) -> None:
    alone = measured_alone("llama")["state"]
    found = by_ranks[2]["llama", kind]["state"]
    assert found["optimizer"]["param_groups"] == alone["optimizer"]["param_groups"]
    for index, entry in alone["optimizer"]["state"].items():
        for name, expected in entry.items():
            torch.testing.assert_close(
                found["optimizer"]["state"][index][name], expected, rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize(
    ("costs", "ranks", "loads"),
    [
        ([5, 4, 3, 2, 1], 2, [8, 7]),
        ([1, 1, 1], 5, [1, 1, 1, 0, 0]),
        ([9, 1, 1, 1, 1], 2, [9, 4]),
        ([], 2, [0, 0]),
        ([7, 7, 7, 7], 2, [14, 14]),
    ],
)
def test_groups_are_divided_by_cost(costs: list[int], ranks: int, loads: list[int]) -> None:
    shares = divide(costs, ranks)
    assert [sum(costs[row] for row in rows) for rows in shares] == loads
    assert sorted(row for rows in shares for row in rows) == list(range(len(costs)))
    assert shares == [sorted(rows) for rows in shares]


# ---- the commands a user would run


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(sums: Path, model: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"hydra.run.dir={folder}",
        "env=jsonl",
        f"env.data_path={sums}",
        "env.answer_format=plain",
        "env.num_envs=4",
        "env.repeats=4",
        f"model.name={model}",
        "reward.weights={bare_number: 1.0, closeness: 0.3}",
        "inference_model.backend=transformers",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=6",
        "optimizer.lr=1e-3",
        "train.total_dialog_turns=64",
        "train.checkpoint_frequency=2",
        "checkpoint.keep=9",
        "eval.num_problems=6",
        "eval.frequency=2",
        "logging.progress=false",
        *more,
    ]


def command(root: Path, how: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # Not the test's own: a rank is what the launcher says.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LD_PRELOAD")}
    script = str(root / "sota-implementations/grpo/grpo.py")
    return subprocess.run(
        [*how, script, *arguments], capture_output=True, text=True, timeout=240, env=environment, cwd=root
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timings = ("time/", "throughput/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(timings)} for line in lines]


def accelerate(root: Path, name: str) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    return [*launcher, "--config_file", str(root / f"config/accelerate/{name}.yaml")]


HOW: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "grpo.py starts two ranks": (None, ("train_model.num_devices=2",)),
    "grpo.py starts two shards": (None, ("train_model.num_devices=2", "train_model.parallelism=fsdp2")),
    "accelerate launch, ddp": ("multi_gpu", ()),
    "accelerate launch, fsdp2": ("fsdp2", ("train_model.num_devices=2",)),
}


@pytest.mark.parametrize(
    ("name", "kind"), [("single_gpu", "NO"), ("multi_gpu", "MULTI_GPU"), ("fsdp2", "FSDP")]
)
def test_files_for_the_launcher_are_what_it_reads(repo_root: Path, name: str, kind: str) -> None:
    found = load_config_from_file(str(repo_root / f"config/accelerate/{name}.yaml"))
    assert found.distributed_type.name == kind
    assert found.mixed_precision == "no", "train_model.autocast chooses the numbers"


@pytest.fixture(scope="module")
def one_rank(repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    done = command(repo_root, [sys.executable], words(sums, tiny_model_dir, folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("how", HOW)
def test_a_run_on_two_ranks_follows_the_run_on_one_and_so_does_its_continuation_on_one(
    how: str, one_rank: Path, repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config, more = HOW[how]
    folder = tmp_path / "run"
    start = [sys.executable] if config is None else accelerate(repo_root, config)
    done = command(repo_root, start, words(sums, tiny_model_dir, folder, *more))
    assert done.returncode == 0, done.stderr
    expected = metrics(one_rank)
    assert len(expected) == 5
    for ours, theirs in zip(metrics(folder), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    # Written by two, continued by one.
    again = words(sums, tiny_model_dir, folder, f"resume={folder}/checkpoints/2")[1:]
    done = command(repo_root, [sys.executable], again)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(metrics(folder), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_an_interrupt_ends_all_ranks_in_good_order(
    repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ("train_model.num_devices=2", "train.total_dialog_turns=160000")
    script = str(repo_root / "sota-implementations/grpo/grpo.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LD_PRELOAD")}
    process = subprocess.Popen(
        [sys.executable, script, *words(sums, tiny_model_dir, folder, *more)],
        env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints/2").exists() and time.monotonic() < deadline:
        # Nothing tells another process that a checkpoint is there.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "continues from its last checkpoint" in said and "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_adapters_train_on_two_ranks_as_on_one(
    repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 2):
        more = ("train_model.lora.rank=4", "policy.kl_coef=0.1", f"train_model.num_devices={ranks}")
        done = command(repo_root, [sys.executable], words(sums, tiny_model_dir, tmp_path / str(ranks), *more))
        assert done.returncode == 0, done.stderr
        found.append(metrics(tmp_path / str(ranks)))
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_one_rank_continues_on_two(
    kind: str, repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path, one_rank: Path
) -> None:
    folder = tmp_path / "run"
    done = command(repo_root, [sys.executable], words(sums, tiny_model_dir, folder))
    assert done.returncode == 0, done.stderr
    more = [f"resume={folder}/checkpoints/2", "train_model.num_devices=2", f"train_model.parallelism={kind}"]
    done = command(repo_root, [sys.executable], words(sums, tiny_model_dir, folder, *more)[1:])
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(metrics(folder), metrics(one_rank), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            None,
            ("train_model.num_devices=5",),
            "train_model.num_devices=5: an optimiser batch has only 4 groups",
        ),
        (
            None,
            ("train_model.num_devices=2", "model.name=/nowhere"),
            "model.name=/nowhere: there is no such folder",
        ),
        (
            None,
            ("train_model.num_devices=2", "inference_model.backend=vllm"),
            "error: inference_model.backend=vllm: with 2 training ranks",
        ),
        # Found by all ranks, when they read the model.
        (
            None,
            (
                "train_model.num_devices=2",
                "train_model.lora.rank=4",
                "train_model.lora.target_modules=[nope]",
            ),
            "error: train_model.lora.target_modules",
        ),
        ("multi_gpu", ("train_model.num_devices=3",), "the launcher has started 2 processes"),
        ("fsdp2", ("train_model.parallelism=ddp",), "the launcher was configured for FSDP"),
    ],
)
def test_mistakes_are_told_once_and_leave_nothing_running(
    config: str | None,
    more: tuple[str, ...],
    message: str,
    repo_root: Path,
    sums: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    start = [sys.executable] if config is None else accelerate(repo_root, config)
    done = command(repo_root, start, words(sums, tiny_model_dir, tmp_path / "run", *more))
    # accelerate's launcher has one code for every failure.
    assert done.returncode == (2 if config is None else 1)
    assert done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()
