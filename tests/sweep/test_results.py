"""What a sweep's files say: settings, differences to the baseline, the screen and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_files import HOSTILE, Elements, payload, write_lines
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


def test_a_setting_with_unfinished_trials_is_not_the_best(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1e-3": 0.7, "optimizer.lr=1e-5": 0.4})
    for number in (0, 1):
        # As a run that diverges: it stops with an error.
        (tmp_path / f"{number}/summary.json").unlink()
    shown = screen(results(read_sweep(tmp_path)))
    assert "Best: optimizer.lr=1e-5." in shown and "Best: optimizer.lr=1e-3" not in shown
    assert shown.index("\noptimizer.lr=1e-5") < shown.index("\noptimizer.lr=1e-3")
    assert "cannot be the best: optimizer.lr=1e-3 (1 of 3). A run that failed" in shown
    # In the middle of a sweep, all of them may be unfinished.
    (tmp_path / "3/summary.json").unlink()
    entries = results(read_sweep(tmp_path))
    assert entries["best"] is None and [entry["mean"] is None for entry in entries["settings"]] == [False] * 2
    shown = screen(entries)
    assert "No setting has ended with all of its trials" in shown and "No trial has ended" not in shown
    assert "optimizer.lr=1e-3 (1 of 3), optimizer.lr=1e-5 (2 of 3)" in shown


def test_a_setting_without_a_value_is_no_baseline_unless_it_is_named(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7, "optimizer.lr=3": 0.3})
    for number in range(3):
        (tmp_path / f"{number}/metrics.jsonl").write_text("")
        (tmp_path / f"{number}/summary.json").unlink()
    entries = results(read_sweep(tmp_path))
    assert entries["baseline"] == "optimizer.lr=2" and entries["comparisons"] == 1
    named = results(read_sweep(tmp_path), "optimizer.lr=1")
    assert named["comparisons"] == 0 and all(entry["difference"] is None for entry in named["settings"])
    shown = screen(named)
    assert "It shares no seed that has ended with the baseline, optimizer.lr=1." in shown
    assert "cannot be told" not in shown and "are looked at" not in shown


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


def test_wordings_of_a_problem_are_one_problem(tmp_path: Path) -> None:
    accuracy = {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.5}
    for name in ("alone", "worded"):
        write_sweep(tmp_path / name, accuracy, seeds=3, problems=30)
    for path in tmp_path.glob("*/*/evaluations.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        # Three more wordings of each problem, with equal grades.
        more = [{**row, "id": f"{row['id']}-{number}"} for row in rows for number in range(3)]
        if path.parts[-3] == "worded":
            more = [{**row, "problem": row["id"].split("-")[0]} for row in more]
            rows = [{**row, "problem": str(row["id"])} for row in rows]
        write_lines(path, rows + more)
    alone, worded = (compared(tmp_path / name)["optimizer.lr=2"] for name in ("alone", "worded"))
    assert alone["difference"]["problems"] == 120 and worded["difference"]["problems"] == 30
    assert worded["mean"] == pytest.approx(alone["mean"])
    widths = [entry["interval"][1] - entry["interval"][0] for entry in (alone, worded)]
    assert widths[0] < widths[1]
    # One trial that names the problems is enough, whichever it is.
    path = tmp_path / "worded/0/evaluations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [{name: value for name, value in row.items() if name != "problem"} for row in rows])
    assert compared(tmp_path / "worded")["optimizer.lr=2"] == worded
    # They say no more than the problems alone.
    write_sweep(tmp_path / "single", accuracy, seeds=3, problems=30)
    single = compared(tmp_path / "single")["optimizer.lr=2"]
    assert worded["interval"] == pytest.approx(single["interval"])
    assert worded["difference"]["interval"] == pytest.approx(single["difference"]["interval"])


def test_grades_that_are_not_the_metric_leave_the_seeds(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    (tmp_path / "0/evaluations.jsonl").write_text('{"step": 10, "id": 1, "grade": 7}\n')
    assert compared(tmp_path)["optimizer.lr=2"]["difference"]["problems"] == 1


def test_equal_differences_of_few_seeds_without_grades_show_nothing(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7}, seeds=2)
    for trial, value in zip(("0", "1", "2", "3"), (0.865, 0.86, 0.905, 0.9), strict=True):
        (tmp_path / trial / "evaluations.jsonl").unlink()
        write_lines(tmp_path / trial / "metrics.jsonl", [{"step": 10, "eval/accuracy": value}])
    difference = compared(tmp_path)["optimizer.lr=2"]["difference"]
    assert difference["verdict"] == "not distinguishable" and difference["interval"] is None
    assert "needs more seeds, as these are equal" in screen(results(read_sweep(tmp_path)))


@pytest.mark.parametrize("last", [None, "nan"])
def test_a_trial_whose_last_loss_is_not_finite_does_not_count_with_an_earlier_one(
    tmp_path: Path, last: Any
) -> None:
    for number, (word, loss) in enumerate([("lr=1", 2.0), ("lr=1", 2.1), ("lr=2", 1.0), ("lr=2", last)]):
        trial = write_trial(tmp_path / str(number), number % 2, f"optimizer.{word}", grades=[0.0])
        values = [{"step": 0, "eval/loss": 1.5}, {"step": 10, "eval/loss": loss}]
        write_lines(trial / "metrics.jsonl", values)
    entries = results(read_sweep(tmp_path))
    diverged = entries["settings"][1]
    assert diverged["mean"] is None and diverged["states"] == {"ended": 1, "ended without a value": 1}
    assert entries["best"] == "optimizer.lr=1" and "1 ended without a value" in screen(entries)
    assert entries["settings"][0]["mean"] == pytest.approx(-2.05) and "-loss" in screen(entries)


def test_settings_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"train.method=grpo": 0.4, "train.method=sft": 0.5, "train.method=x": 0.7}, seeds=2)
    for trial in ("2", "3"):
        write_lines(tmp_path / trial / "metrics.jsonl", [{"step": 10, "eval/primary": 70.0}])
    entries = results(read_sweep(tmp_path))
    assert entries["best"] == "train.method=x" and entries["comparisons"] == 1
    assert entries["settings"][1]["difference"] is None and entries["settings"][1]["mean"] == 70
    expected = (
        "train.method=sft was measured by eval/primary and not by eval/accuracy, so it is not compared."
    )
    assert entries["notes"] == [expected] and expected in screen(entries)


def test_what_limits_a_comparison_is_said(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"eval.temperature=0": 0.4, "eval.temperature=1": 0.7}, seeds=2)
    for trial in ("2", "3"):
        path = tmp_path / trial / "evaluations.jsonl"
        path.write_text(path.read_text().replace('"id": ', '"id": 5'))
    write_trial(tmp_path / "4", 1, "eval.temperature=1", "env=gsm8k", grades=[1.0, 1.0])
    entries = results(read_sweep(tmp_path))
    assert entries["settings"][1]["difference"]["problems"] == 1
    assert entries["notes"] == [
        "2 trials of eval.temperature=1 have seed 1; only the last that has ended counts.",
        "Settings are measured in different ways, so their values need not mean the same: eval.temperature.",
        "Held-out problems differ from those of the baseline, so nothing is paired by them: "
        "eval.temperature=1.",
    ]


def test_files_that_no_run_wrote_end_nothing(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7}, seeds=2)
    (tmp_path / "0/.hydra/overrides.yaml").write_text("a: [")
    (tmp_path / "1/.hydra/config.yaml").write_text("- &a [*a]")
    (tmp_path / "1/summary.json").write_bytes(b"\xff")
    rows: list[dict[str, Any]] = [
        {"step": 5, "eval/accuracy": "0.5"},
        {"step": 6, "eval/accuracy": float("nan"), "eval/loss": [1]},
        {"step": 7, "eval/accuracy": 10**400},
        {"step": 3, "eval/accuracy": 0.1},
        {"step": 10, "eval/accuracy": 0.5, "eval/accuracy_low": "low"},
    ]
    write_lines(tmp_path / "2/metrics.jsonl", rows)
    grades: list[dict[str, Any]] = [{"step": 10, "id": [1], "grade": float("nan")}, {"step": 3, "grade": 1}]
    write_lines(tmp_path / "2/evaluations.jsonl", [*grades, {"step": 10, "id": {}, "grade": 10**400}])
    main([str(tmp_path)])
    third = read_sweep(tmp_path)[2]
    assert (third.values, third.bounds, third.grades) == ([0.5], [(0.5, 0.5)], {})


def test_a_trial_without_an_evaluation_takes_no_curve_away(tmp_path: Path) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4}, seeds=3)
    write_lines(tmp_path / "2/metrics.jsonl", [{"step": 1, "reward/mean": 0.1}])
    for trial in ("0", "1"):
        values = [{"step": step, "eval/loss": 1.0 + int(trial)} for step in (0, 10)]
        write_lines(tmp_path / trial / "metrics.jsonl", values)
    main([str(tmp_path)])
    (curve,) = payload((tmp_path / "sweep.html").read_text())["sweep"]["curves"]
    assert curve["steps"] == [0, 10] and curve["metrics"]["eval/loss"] == [1.5, 1.5]


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
