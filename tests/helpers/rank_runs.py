"""What the tests of several training ranks share: ways to start them, and what their numbers must be."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Finished, run_launcher, run_script
from rank_program import DIVIDED, measure
from rounding import FACTOR, assert_rounds_alike, float64, relative_error

from torchrl_grpo.distributed.ranks import Ranks


def in_ranks(count: int, output: Path, kinds: Sequence[str], program: str = "rank_program.py") -> Any:
    """What ``program`` finds with ``count`` processes."""
    done = run_script([Path(__file__).with_name(program), output, *kinds], ranks=count)
    assert done.returncode == 0, done.stderr
    return torch.load(output, weights_only=False)


@functools.cache
def measured_alone(case: str) -> dict[str, Any]:
    """What one process finds, in one thread as ranks are, since threads may change the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(case, "ddp", Ranks(on_cpu=True))
    finally:
        torch.set_num_threads(threads)


@functools.cache
def measured_exactly(case: str) -> dict[str, Any]:
    with float64():
        return measure(case, "ddp", Ranks(on_cpu=True))


def check_same_numbers(measured: dict[str, Any], case: str) -> None:
    """What several ranks found is what one process did, to rounding."""
    alone, exact = measured_alone(case), measured_exactly(case)
    # Sums cancel, so what they are off by is no share of theirs.
    allowed = FACTOR * relative_error(alone["gradients"], exact["gradients"])
    assert measured["sums"] == pytest.approx(alone["sums"], rel=allowed, abs=allowed)
    for part in ("gradients", "weights"):
        assert_rounds_alike(measured[part], alone[part], exact[part])
    assert any(gradient.abs().max() > 1e-3 for gradient in alone["gradients"].values())
    for ours, expected in zip(measured["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(measured["probe"], alone["probe"], rtol=1e-4, atol=1e-4)


def check_same_state(measured: dict[str, Any], alone: dict[str, Any]) -> None:
    """And so is the optimizer's state, which every layout saves alike."""
    assert measured["optimizer"]["param_groups"] == alone["optimizer"]["param_groups"]
    assert measured["optimizer"]["state"].keys() == alone["optimizer"]["state"].keys()
    for index, entry in alone["optimizer"]["state"].items():
        for name, expected in entry.items():
            torch.testing.assert_close(
                measured["optimizer"]["state"][index][name], expected, rtol=1e-4, atol=1e-6
            )


def check_rounds_alike(measured: dict[str, Any], alone: dict[str, Any], exact: dict[str, Any]) -> None:
    """In bfloat16 ranks are as near to the float32 numbers as one process in bfloat16 is."""
    for part in ("gradients", "weights"):
        theirs, ours = (_distance(run[part], exact[part]) for run in (alone, measured))
        # Between the two steps a ratio may be on the other side of the clip.
        assert 0 < ours < 2 * theirs < 0.3, (part, ours, theirs)
    for name, value in exact["sums"].items():
        assert measured["sums"][name] == pytest.approx(value, rel=0.1, abs=0.05), name


def check_same_head(measured: dict[str, Any], alone: dict[str, Any]) -> None:
    """With layers in bfloat16 and the head in float32: log-probabilities, loss and the head's gradients."""
    torch.testing.assert_close(measured["probe at start"], alone["probe at start"], rtol=1e-5, atol=1e-5)
    # Each rank has a part of the batch. Some processors round a part in another way than the whole.
    is_alike = measured_alone(DIVIDED)["sums"] == pytest.approx(alone["sums"], rel=1e-5, abs=1e-6)
    share = 1e-5 if is_alike else 2**-5
    assert measured["sums"] == pytest.approx(alone["sums"], rel=share, abs=share / 10)
    for name in ("lm_head.weight", "model.norm.weight"):
        expected = alone["gradients"][name]
        assert (measured["gradients"][name] - expected).abs().max() <= share * expected.abs().max() > 0, name


def _distance(measured: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all tensors together, as a share of their size."""
    apart = sum(float((measured[name] - tensor).square().sum()) for name, tensor in expected.items())
    share: float = float(apart / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5
    return share


def check_kept_and_loaded(measured: dict[str, Any], ranks: int) -> None:
    """Rank 0 alone holds the moments it saves, and from them each rank gets its part back, bit for bit."""
    moments = sum(len(entry) for entry in measured["state"]["optimizer"]["state"].values())
    assert measured["kept"] == [moments] + [0] * (ranks - 1) and moments > 0
    saved, again = measured["state"]["optimizer"], measured["reloaded"]["optimizer"]
    assert again["param_groups"] == saved["param_groups"] and again["state"].keys() == saved["state"].keys()
    for index, entry in saved["state"].items():
        for name, value in entry.items():
            assert torch.equal(again["state"][index][name], value), (index, name)


def check_follows(folder: Path, one_rank: Path) -> None:
    """The first steps of the run in ``folder`` have the metrics of the one in one rank."""
    expected, lines = metrics(one_rank), metrics(folder)
    assert len(expected) == 1 + STEPS <= len(lines)
    for ours, theirs in zip(lines, expected, strict=False):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


# ---- the commands a user would run

# Of a run, with a checkpoint and an evaluation in the middle.
STEPS = 6


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
        # What several ranks do is compared to rounding, and bfloat16 rounds much.
        "inference_model.dtype=float32",
        "train_model.autocast=no",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=6",
        "optimizer.lr=1e-3",
        # The first steps of Adam follow a gradient's sign, also where it is rounding; not with this eps.
        "optimizer.eps=1e-2",
        f"train.total_dialog_turns={16 * STEPS}",
        f"train.checkpoint_frequency={STEPS // 2}",
        "checkpoint.keep=9",
        "eval.num_problems=6",
        f"eval.frequency={STEPS // 2}",
        "logging.progress=false",
        *more,
    ]


def grpo_script(root: Path) -> Path:
    return root / "sota-implementations/grpo/grpo.py"


def launch_forks(root: Path, launcher: str, arguments: list[str], options: Sequence[object] = ()) -> Finished:
    """The command with ``accelerate launch`` and a file of config/accelerate, in forks."""
    file = root / f"config/accelerate/{launcher}.yaml"
    script_words = ("--config_file", file, *options, grpo_script(root), *arguments)
    return run_launcher("accelerate.commands.launch", *script_words, cwd=root)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timings = ("time/", "throughput/", "memory/")
    return [{k: v for k, v in line.items() if not k.startswith(timings)} for line in lines]


@pytest.fixture(scope="module")
def one_rank(
    repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    done = run_script([grpo_script(repo_root), *words(sums, tiny_model_dir, folder)], cwd=repo_root)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass
class Runs:
    """Commands whose runs must follow the one in one rank."""

    root: Path
    sums: Path
    model: Path
    one_rank: Path

    def start_forks(self, folder: Path, launcher: str, *more: str) -> subprocess.CompletedProcess[str]:
        """All steps, started by ``accelerate launch`` with a file of config/accelerate, in forks."""
        done = launch_forks(self.root, launcher, words(self.sums, self.model, folder, *more))
        return self._checked(folder, done)

    def go_on(
        self, folder: Path, *more: str, step: int = STEPS // 2, ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """The steps after ``step`` again, from its checkpoint."""
        first, *others = words(self.sums, self.model, folder, f"resume={folder}/checkpoints/{step}", *more)
        assert first.startswith("hydra.run.dir")
        done = run_script([grpo_script(self.root), *others], ranks=ranks, cwd=self.root)
        return self._checked(folder, done)

    def take_over(
        self, folder: Path, *more: str, step: int = STEPS // 2, ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """The same, from the checkpoint of one rank."""
        shutil.copytree(self.one_rank, folder)
        return self.go_on(folder, *more, step=step, ranks=ranks)

    def _checked(
        self, folder: Path, done: subprocess.CompletedProcess[str]
    ) -> subprocess.CompletedProcess[str]:
        assert done.returncode == 0, done.stderr
        check_follows(folder, self.one_rank)
        assert len(metrics(folder)) == 1 + STEPS
        return done


@pytest.fixture(scope="module")
def runs(repo_root: Path, sums: Path, tiny_model_dir: Path, one_rank: Path) -> Runs:
    return Runs(repo_root, sums, tiny_model_dir, one_rank)
