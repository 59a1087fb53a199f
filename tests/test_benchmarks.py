"""The benchmark: equal work, pairs, the report, and its own command on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import build_tiny_model
from transformers import AutoTokenizer

from benchmarks import results
from benchmarks.pairs import Comparison, Spread
from benchmarks.workload import Workload, reward

ROOT = Path(__file__).resolve().parents[1]


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
    found = Comparison(("ours", "theirs"), ours, theirs)
    # The machine was slow for both sides of the third pair: medians of each side would say 2.
    assert found.ratio() == Spread(2.0, 3.0, 5.0)
    assert found.ratio().show() == "3.00 (2.00 to 5.00)"


def test_a_part_keeps_its_place_when_another_is_measured(tmp_path: Path) -> None:
    part = results.Part("One", "Held equal: all.", ["", "s"], [["us", "1"]], {"ratio": [1]})
    other = results.Part("Two", "Held equal: all.", ["", "s"], [["us", "2"]], {})
    results.save("one", part, 5, tmp_path)
    results.save("two", other, 3, tmp_path)
    results.save("one", part, 7, tmp_path)
    report = (tmp_path / "RESULTS.md").read_text()
    assert report.index("## One") < report.index("## Two")
    assert "7 pairs" in report and "3 pairs" in report and "5 pairs" not in report
    assert "| us | 2 |" in report and "torch 2" in report


def command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_an_unknown_part_is_an_error_that_lists_the_parts(tmp_path: Path) -> None:
    outcome = command(tmp_path, "colection")
    assert outcome.returncode == 2
    assert "there is no part colection" in outcome.stderr and "collection, growth" in outcome.stderr


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_collection_and_training_are_measured_against_the_real_libraries(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    outcome = command(
        tmp_path, "collection", "training-trl", "--pairs", "1", "--warm-up", "0", "--model", str(model),
        "--prompts", "2", "--samples", "4",
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    figures = json.loads((tmp_path / "results.json").read_text())
    (ours,), (theirs,) = (figures["training-trl"]["figures"][side] for side in ("ours", "theirs"))
    assert figures["training-trl"]["figures"]["ratio"][1] == theirs["train"] / ours["train"]
    report = (tmp_path / "RESULTS.md").read_text()
    assert "against TRL GRPOTrainer" in report and "stock TorchRL path" in report
