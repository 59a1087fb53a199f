"""What a sweep's files say: settings, differences to the baseline, the screen and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_files import HOSTILE, Elements, payload
from sweep_files import write_sweep, write_trial

from torchrl_grpo.cli.sweep import main
from torchrl_grpo.sweep.results import results, screen
from torchrl_grpo.sweep.trials import STOPPED, read_sweep, settings


def compared(folder: Path, baseline: str | None = None) -> dict[str, dict[str, Any]]:
    entries = results(read_sweep(folder), baseline)
    return {entry["name"]: entry for entry in entries["settings"]}


def test_settings_are_what_differs_and_seeds_are_no_setting(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1e-4": 0.5, "optimizer.lr=1e-5": 0.3})
    groups = settings(read_sweep(tmp_path))
    assert {name: [trial.seed for trial in group] for name, group in groups.items()} == {
        "optimizer.lr=1e-4": [0, 1, 2],
        "optimizer.lr=1e-5": [0, 1, 2],
    }


def test_settings_that_differ_in_a_secret_stay_apart_and_do_not_show_it(tmp_path: Path) -> None:
    for number, path in enumerate(("/home/me/a.jsonl", "/home/me/b.jsonl")):
        write_trial(tmp_path / str(number), 0, f"env.data_path={path}", grades=[1.0, 0.0])
    assert [*settings(read_sweep(tmp_path))] == ["env.data_path=(value 0)", "env.data_path=(value 1)"]


def test_a_large_difference_is_told_and_a_small_one_needs_more_seeds(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7, "optimizer.lr=3": 0.41}, spread=0.03)
    entries = compared(tmp_path)
    large, small = entries["optimizer.lr=2"]["difference"], entries["optimizer.lr=3"]["difference"]
    assert entries["optimizer.lr=1"]["difference"] is None
    assert large["verdict"] == "better" and large["more_seeds"] is None and large["problems"] == 100
    assert large["interval"][0] < large["mean"] < large["interval"][1]
    assert small["verdict"] == "not distinguishable"
    assert small["more_seeds"] is None or small["more_seeds"] > 0
    shown = screen(results(read_sweep(tmp_path)))
    assert shown.index("optimizer.lr=2") < shown.index("optimizer.lr=1")
    assert "Best: optimizer.lr=2. It is better than the baseline, optimizer.lr=1." in shown


def test_another_baseline_turns_the_difference_round(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    difference = compared(tmp_path, "optimizer.lr=2")["optimizer.lr=1"]["difference"]
    assert difference["verdict"] == "worse" and difference["mean"] < 0
    assert "the baseline. 1 of the others are distinguishably worse" in screen(
        results(read_sweep(tmp_path), "optimizer.lr=2")
    )


def test_only_seeds_that_both_settings_have_are_compared(tmp_path: Path) -> None:
    for number, (word, seed, ended) in enumerate(
        [("lr=1", 0, True), ("lr=1", 1, True), ("lr=2", 1, True), ("lr=2", 2, True), ("lr=2", 0, False)]
    ):
        write_trial(tmp_path / str(number), seed, f"optimizer.{word}", grades=[1.0, 0.0, 1.0], ended=ended)
    entry = compared(tmp_path)["optimizer.lr=2"]
    assert entry["difference"]["seeds"] == [1] and entry["seeds"] == [1, 2]
    assert entry["difference"]["interval"] is None and entry["states"] == {"ended": 2, "unfinished": 1}
    assert "needs at least 2 seeds in common" in screen(results(read_sweep(tmp_path)))


def test_a_setting_of_which_a_trial_was_stopped_has_no_mean(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7}, seeds=2)
    (tmp_path / "3/summary.json").unlink()
    (tmp_path / "3" / STOPPED).write_text("{}")
    entry = compared(tmp_path)["optimizer.lr=2"]
    assert entry["mean"] is None and entry["difference"] is None and entry["states"]["stopped early"] == 1
    other = compared(tmp_path, "optimizer.lr=2")["optimizer.lr=1"]
    assert other["mean"] is not None and other["difference"] is None, (
        "a baseline without a mean compares nothing"
    )


def test_grades_that_are_not_the_metric_leave_the_seeds(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    (tmp_path / "0/evaluations.jsonl").write_text('{"step": 10, "id": 1, "grade": 7}\n')
    assert compared(tmp_path)["optimizer.lr=2"]["difference"]["problems"] == 1


def test_the_command_writes_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert "Best: optimizer.lr=2" in shown and "sweep.json" in shown
    entries = json.loads((tmp_path / "sweep.json").read_text())
    assert entries["best"] == "optimizer.lr=2" and len(entries["trials"]) == 6


def test_the_page_has_the_table_and_the_means_of_the_seeds(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    main([str(tmp_path)])
    page = (tmp_path / "sweep.html").read_text()
    sweep = payload(page)["sweep"]
    assert sweep["table"][1][0] == "optimizer.lr=2" and "better" in sweep["table"][1][4]
    for curve in sweep["curves"]:
        low, mean, high = (curve["metrics"][f"eval/accuracy{end}"] for end in ("_low", "", "_high"))
        assert curve["steps"] == [0, 10] and mean[0] == 0 and low[1] < mean[1] < high[1]
    assert "connect-src 'none'" in page and "@@" not in page


def test_names_of_settings_make_no_element(tmp_path: Path) -> None:
    write_sweep(
        tmp_path, {f"logging.experiment={HOSTILE}": 0.4, "env.task=</script><img src=x>": 0.7}, seeds=1
    )
    main([str(tmp_path)])
    tags = [tag for tag, _ in Elements((tmp_path / "sweep.html").read_text()).tags]
    assert tags.count("script") == 3 and "img" not in tags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["."], "no folder of a sweep"),
        (["sweep", "--baseline=optimizer.lr=3"], "write one of optimizer.lr=1"),
    ],
)
def test_mistakes(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "sweep", {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7}, seeds=1)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err
