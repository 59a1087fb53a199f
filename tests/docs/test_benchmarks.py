"""The benchmark: equal work, pairs, the report, and its own command on a tiny model."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedPopen
from tiny_model import build_tiny_model
from transformers import AutoTokenizer

from benchmarks import __main__ as main
from benchmarks import pairs, protocol, results
from benchmarks.pairs import Comparison, Spread
from benchmarks.waking import touch_memory
from benchmarks.workers.ours import config
from benchmarks.workload import Workload, reward
from torchrl_grpo.data.load import load


def test_prompts_have_the_length_that_was_asked_for(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path))
    work = Workload(str(tmp_path), prompts=5, prompt_tokens=60)
    lengths = [len(work.render(tokenizer, chat)) for chat in work.messages(tokenizer)]
    assert len(lengths) == 5 and all(60 <= length < 80 for length in lengths)
    assert len({chat[0]["content"] for chat in work.messages(tokenizer)}) == 5
    assert Workload.from_json(work.to_json()) == work


def test_rewards_differ_within_a_group() -> None:
    values = [reward(f"response {number}") for number in range(100)]
    assert len(set(values)) == 100 and all(0 <= value < 1 for value in values)
    assert values == [reward(f"response {number}") for number in range(100)]


def test_ratios_are_taken_pair_by_pair() -> None:
    ours = [{"seconds": seconds} for seconds in (1.0, 2.0, 4.0)]
    theirs = [{"seconds": seconds} for seconds in (3.0, 4.0, 20.0)]
    comparison = Comparison(("ours", "theirs"), ours, theirs)
    # The machine was slow for both sides of the third pair: medians of each side would say 2.
    assert comparison.ratio() == Spread(2.0, 3.0, 5.0)
    assert comparison.ratio().show() == "3.00 (2.00 to 5.00)"


def test_this_project_is_given_the_same_prompts(tmp_path: Path) -> None:
    work = Workload(str(build_tiny_model(tmp_path / "model")), prompts=3, prompt_tokens=60)
    cfg = config(work)
    cfg.env.data_path = str(tmp_path / "questions.jsonl")
    work.write_questions(Path(cfg.env.data_path))
    chats = [example.messages for example in load(cfg).train]
    assert chats == work.messages(AutoTokenizer.from_pretrained(work.model))


@pytest.mark.slow
def test_memory_that_was_written_to_is_read_and_none_is_made() -> None:
    before = touch_memory()
    reserved, used = mmap.mmap(-1, 2**28, mmap.MAP_PRIVATE), mmap.mmap(-1, 2**27, mmap.MAP_PRIVATE)
    for at in range(0, 2**27, mmap.PAGESIZE):
        used[at] = 1
    growth = touch_memory() - before
    reserved.close()
    used.close()
    assert 0.9 * 2**27 < growth < 1.5 * 2**27


class Scripted:
    """A worker that answers what it is told to."""

    answers: dict[str, list[dict[str, float] | None]]

    def __init__(self, name: str, workload: Workload) -> None:
        self.name = name
        self._answers = iter(Scripted.answers[name])

    def step(self) -> dict[str, float]:
        answer = next(self._answers)
        if answer is None:
            raise RuntimeError(f"the worker {self.name} ended")
        return answer

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None: ...


def scripted(
    monkeypatch: pytest.MonkeyPatch, ours: list[dict[str, float] | None], theirs: list[dict[str, float]]
) -> Iterator[Comparison]:
    Scripted.answers = {"ours": ours, "theirs": list(theirs)}
    monkeypatch.setattr(pairs, "Worker", Scripted)
    work = Workload("model")
    return pairs.compare(("ours", work), ("theirs", work), pairs=2, warm_up=1, notify=lambda text: None)


def test_pairs_are_told_as_they_are_measured_without_those_to_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparisons = scripted(
        monkeypatch,
        [{"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 2.0}],
        [{"seconds": 9.0}, {"seconds": 3.0}, {"seconds": 8.0}],
    )
    assert [comparison.ratio() for comparison in comparisons] == [
        Spread(3.0, 3.0, 3.0),
        Spread(3.0, 3.5, 4.0),
    ]


def test_what_was_measured_before_a_worker_ended_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = scripted(
        monkeypatch,
        [{"seconds": 9.0}, {"seconds": 1.0}, None],
        [{"seconds": 9.0}, {"seconds": 3.0}],
    )
    assert next(comparisons).ratio().median == 3.0
    with pytest.raises(RuntimeError, match="the worker ours ended"):
        next(comparisons)


def test_prompts_of_different_lengths_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = scripted(
        monkeypatch, [{"seconds": 1.0, "prompt_tokens": 128.0}], [{"seconds": 2.0, "prompt_tokens": 100.0}]
    )
    with pytest.raises(RuntimeError, match=r"ours 128\.0 and theirs 100\.0 tokens"):
        next(comparisons)


def section(title: str, seconds: str, counted: str) -> results.Part:
    return results.Part(title, "Held equal: all.", ["", "s"], [["us", seconds]], {"ratio": [1]}, counted)


@pytest.mark.parametrize(
    ("autocast", "settings", "differs"),
    [("bf16", {"autocast": "no"}, True), ("bf16", {}, False), ("no", {"autocast": "no"}, False)],
)
def test_numbers_that_are_not_equal_are_said(autocast: str, settings: dict[str, str], differs: bool) -> None:
    ours, theirs = (
        Workload("model", autocast=autocast),
        Workload("model", autocast=autocast, settings=settings),
    )
    step = {"seconds": 9.0, "generate": 3.0, "train": 5.0, "peak_gib": 1.0, "gemm_share": 0.5}
    comparison = Comparison(("ours", "torchrl_stock"), [step], [step])
    for part in (
        results.whole_step(ours, theirs, comparison, 1),
        results.training_phase(ours, theirs, comparison, 1),
    ):
        assert ("Not equal: the other side trains in float32" in part.held) == differs


def test_a_part_keeps_its_place_when_another_is_measured(tmp_path: Path) -> None:
    results.save("one", section("One", "1", "5 pairs"), "this machine", tmp_path)
    results.save("two", section("Two", "2", "3 pairs"), "this machine", tmp_path)
    results.save("one", section("One", "3", "7 pairs"), "that machine", tmp_path)
    report = (tmp_path / "RESULTS.md").read_text()
    assert report.index("## One") < report.index("## Two")
    assert "7 pairs; that machine" in report and "3 pairs; this machine" in report
    assert "5 pairs" not in report and "| us | 2 |" in report and "| us | 1 |" not in report
    assert {path.name for path in tmp_path.iterdir()} == {"RESULTS.md", "results.json"}


@pytest.mark.slow
def test_a_part_that_fails_leaves_what_it_found_and_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(options: main.Options) -> Iterator[results.Part]:
        yield section("Broken", "1", results.counted(1, options.pairs, "pairs"))
        raise RuntimeError("the worker ours ended")

    def whole(options: main.Options) -> Iterator[results.Part]:
        yield section("Whole", "2", results.counted(options.pairs, options.pairs, "pairs"))

    monkeypatch.setattr(main, "PARTS", {"broken": broken, "whole": whole})
    monkeypatch.setattr(main, "ON_GPU", {})
    model = build_tiny_model(tmp_path / "model")
    words = ["--model", str(model), "--prompts", "4", "--pairs", "2", "--output", str(tmp_path / "report")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit, match="failed: broken;"):
        main.main()
    report = (tmp_path / "report" / "RESULTS.md").read_text()
    assert "stopped after 1 of 2 pairs" in report and "## Whole" in report and "\n2 pairs; " in report
    written = json.loads((tmp_path / "report" / "results.json").read_text())
    # Beside the section of the usual sizes, not in its place.
    assert all(key.endswith("-model=model-prompts=4") for key in written)


def test_an_unknown_part_is_an_error_that_lists_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "collections", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "there is no part collections" in error and "collection, growth" in error


# A worker in a fork, which imports neither torch nor this project again. TorchRL's imports vLLM and sets up
# tensordict before anything else, so it is a process of its own.
_FORKED = """
import os, runpy, sys

module, answers, orders = sys.argv[1:4]
os.environ["BENCH_ANSWERS"] = str(os.open(answers, os.O_WRONLY))
sys.stdin = open(orders)
del sys.argv[1:4]
runpy.run_module(module, run_name="__main__")
"""


class ForkedWorker(ForkedPopen):
    """In place of the process of a worker.

    Args:
        folder: empty folder for files between the two processes.
        command: ``python -m MODULE WORKLOAD``.
        cwd: the checkout.
        env: variables of the worker.
        answers: number of the pipe for answers.
    """

    def __init__(
        self, folder: Path, command: list[str], cwd: Path, env: Mapping[str, str], answers: int
    ) -> None:
        python, _, module, workload = command
        script, orders = folder / "worker.py", folder / "orders"
        script.write_text(f"import sys\nsys.path.insert(0, {str(cwd)!r})\n{_FORKED}")
        os.mkfifo(orders)
        words = [module, f"/proc/{os.getpid()}/fd/{answers}", str(orders), workload]
        with (folder / "output").open("wb") as output:
            super().__init__([python, str(script), *words], cwd=cwd, stdout=output, variables=env)
        # Waits until the worker has opened both files.
        self.stdin = orders.open("w")


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_collection_and_training_are_measured_against_the_real_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_model(tmp_path / "model")
    words = ["collection", "training-trl", "--pairs", "1", "--warm-up", "0", "--model", str(model)]
    words += ["--prompts", "2", "--samples", "4", "--no-compile", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])

    def start(command: list[str], **options: Any) -> Any:
        if ".torchrl_" in command[2]:
            return subprocess.Popen(command, **options)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return ForkedWorker(folder, command, options["cwd"], options["env"], options["pass_fds"][0])

    monkeypatch.setattr(protocol, "Popen", start)
    # TorchRL's side is written for a CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    main.main()
    written = json.loads((tmp_path / "results.json").read_text())
    figures = written["training-trl-model=model-prompts=2-samples=4-no-compile"]["figures"]
    (ours,), (theirs,) = (figures[side] for side in ("ours", "theirs"))
    assert figures["ratio"][1] == theirs["train"] / ours["train"]
    report = (tmp_path / "RESULTS.md").read_text()
    assert "against TRL GRPOTrainer" in report and "stock TorchRL path" in report
