"""A run of two rounds that ``make test-fast`` takes: the loop does all that is due, and can go on from it."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.checkpoints.run_dir import complete_checkpoints


def test_a_short_run_does_what_is_due_and_a_resumed_one_repeats_it(train: Runner, tmp_path: Path) -> None:
    settings = {"train__total_dialog_turns": 32, "train__checkpoint_frequency": 1, "checkpoint__keep": 9}
    start, *steps = train("run", eval__frequency=1, **settings)
    first, last = complete_checkpoints(tmp_path / "run")
    assert (first.name, last.name) == ("1", "2") and [line["step"] for line in steps] == [1, 2]
    assert "eval/accuracy" in start
    for line in steps:
        assert line["optimizer/grad_norm"] > 0
        assert {"eval/accuracy", "publish/logprob_diff_max"} <= line.keys()
    assert train("run", resume=str(first)) == [start, *steps]
