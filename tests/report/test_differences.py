"""What differs between runs: keys, versions, and results on the same held-out problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from run_files import HOSTILE, inflated, payload, write_evaluations, write_lines, write_run

from torchrl_grpo.cli import report as command
from torchrl_grpo.observe.stats import paired_interval
from torchrl_grpo.report import change, differences, paired

A = {"env": {"dataset": "gsm8k"}, "optimizer": {"lr": 0.5}}
B = {"env": {"dataset": "gsm8k"}, "optimizer": {"lr": 0.25}}


def compared(runs: Sequence[Path]) -> dict[str, Any]:
    return differences.compare(runs, differences.read_runs(runs))


def held_out(*runs: Path) -> dict[str, Any]:
    (comparison,) = compared(runs)["comparisons"]
    assert isinstance(comparison, dict)
    return comparison


def test_results_are_paired_by_problem_with_an_interval(tmp_path: Path) -> None:
    first = {"p1": 1.0, "p2": 0.0, "p3": 0.0, "p4": 1.0, "only in a": 1.0}
    # In another order, and with another problem.
    second = {"only in b": 0.0, "p4": 1.0, "p3": 1.0, "p2": 1.0, "p1": 0.0}
    comparison = held_out(
        write_evaluations(tmp_path / "a", {0: first, 4: first}, A),
        write_evaluations(tmp_path / "b", {0: first, 4: second}, B),
    )
    (moment,) = comparison["moments"]
    pairs = [(second[id], first[id]) for id in ("p1", "p2", "p3", "p4")]
    mean, (low, high) = paired_interval(pairs)
    (metric,) = moment["metrics"]
    assert metric == {
        "name": "accuracy",
        "first": 0.5,
        "second": 0.75,
        "difference": mean,
        "low": low,
        "high": high,
        "problems": 4,
    }
    assert moment["steps"] == [4, 4] and moment["shared"] == 4
    states = {problem["id"]: problem["state"] for problem in moment["problems"]}
    assert states == {"p1": "only a solves", "p2": "only b solves", "p3": "only b solves"}
    texts = {problem["id"]: problem["texts"] for problem in moment["problems"]}
    assert [text["response"] for text in texts["p2"]] == ["a p2 4 0", "b p2 4 0"]
    assert comparison["notes"] == [
        "Problems that the other run does not have are left out: 1 of a and 1 of b."
    ]


def test_runs_of_different_length_are_compared_at_the_last_common_step_and_at_their_ends(
    tmp_path: Path,
) -> None:
    comparison = held_out(
        write_evaluations(tmp_path / "a", {0: {"p": 0.0}, 4: {"p": 0.0}, 6: {"p": 1.0}}, A),
        write_evaluations(tmp_path / "b", {0: {"p": 0.0}, 4: {"p": 1.0}, 9: {"p": 0.0, "q": 1.0}}, B),
    )
    assert [moment["steps"] for moment in comparison["moments"]] == [[4, 4], [6, 9]]
    assert [moment["metrics"][0]["difference"] for moment in comparison["moments"]] == [1.0, -1.0]
    assert comparison["notes"] == [
        "Step 6 and 9: Problems that the other run does not have are left out: 0 of a and 1 of b."
    ]


def test_each_reward_that_both_have_is_compared_once(tmp_path: Path) -> None:
    grades = {0: {"p": 1.0, "q": 1.0}}
    runs = [
        write_evaluations(
            tmp_path / name,
            grades,
            rewards={"accuracy": 1.0, "format": value, name: 1.0, "broken": None, "equal": 1.0},
            reward=1 + value,
        )
        for name, value in (("a", 0.25), ("b", 0.5))
    ]
    (moment,) = held_out(*runs)["moments"]
    results = {metric["name"]: metric["difference"] for metric in moment["metrics"]}
    assert results == {"accuracy": 0.0, "sum of rewards": 0.25, "reward format": 0.25, "reward equal": 0.0}


@pytest.mark.parametrize("naming", [["a"], ["b"], ["a", "b"]])
def test_questions_of_one_problem_count_as_fewer_if_either_run_names_it(
    naming: list[str], tmp_path: Path
) -> None:
    grades = {f"p{number}": float(number % 4 == 0) for number in range(12)}
    later = {**grades, "p1": 1.0, "p3": 1.0, "p5": 1.0, "p6": 1.0}
    problems = ["p0", "p1"] * 6
    for name, values in (("a", grades), ("b", later)):
        path = write_evaluations(tmp_path / name, {0: values}, A if name == "a" else B) / "evaluations.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if name in naming:
            # What is no name says nothing.
            names = [
                None if row["id"] == problem else problem for row, problem in zip(rows, problems, strict=True)
            ]
            rows = [{**row, "problem": name} for row, name in zip(rows, names, strict=True)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (moment,) = held_out(tmp_path / "a", tmp_path / "b")["moments"]
    mean, (low, high) = paired_interval([(later[id], grades[id]) for id in grades], (), problems)
    shown = moment["metrics"][0]
    assert (shown["difference"], shown["low"], shown["high"]) == (mean, low, high)
    assert low < paired_interval([(later[id], grades[id]) for id in grades])[1][0]


def test_several_responses_to_a_problem_count_as_their_mean(tmp_path: Path) -> None:
    (moment,) = held_out(
        write_evaluations(tmp_path / "a", {0: {"p": [1.0, 0.0, 0.0, 0.0], "q": [1.0, 1.0]}}),
        write_evaluations(tmp_path / "b", {0: {"p": [1.0, 0.0, 1.0, 1.0], "q": 0.0}}),
    )["moments"]
    assert moment["metrics"][0]["difference"] == paired_interval([(0.75, 0.25), (0.0, 1.0)])[0]
    assert [(problem["id"], problem["state"], problem["samples"]) for problem in moment["problems"]] == [
        ("q", "only a solves", [2, 1]),
        ("p", "better in b", [4, 4]),
    ]


def test_losses_are_weighted_by_tokens_and_solve_nothing(tmp_path: Path) -> None:
    runs = [write_evaluations(tmp_path / name, {}, metric="eval/loss") for name in ("a", "b")]
    for run, losses in zip(runs, ((1.0, 4.0), (2.0, 1.0)), strict=True):
        write_lines(run / "metrics.jsonl", [{"step": 0, "eval/loss": 1.0}])
        rows = zip(("p", "q"), losses, (1, 3), strict=True)
        write_lines(
            run / "evaluations.jsonl",
            [{"step": 0, "id": id, "grade": loss, "tokens": tokens} for id, loss, tokens in rows],
        )
    (moment,) = held_out(*runs)["moments"]
    metric = moment["metrics"][0]
    assert (metric["name"], metric["first"], metric["second"]) == ("loss", 3.25, 1.25)
    assert metric["difference"] == -2.0
    assert {p["id"]: p["state"] for p in moment["problems"]} == {"p": "better in a", "q": "better in b"}


DATA = ({"env": {"task_args": {"n": 1}}}, {"env": {"task_args": {"n": 2}}})


@pytest.mark.parametrize(
    ("prompts", "settings", "shared", "note"),
    [
        (("same", "x"), (A, B), 1, "Problems of the same name with another prompt are left out: 1."),
        (("x", "y"), (A, B), 2, "Problems are paired by their names."),
        (("x", "y"), DATA, 0, "taken for other problems and not compared. Their data differ: env.task_args."),
        (("x", "y"), (None, None), 0, "taken for other problems and not compared."),
    ],
)
def test_problems_of_the_same_name_and_another_prompt(
    tmp_path: Path, prompts: tuple[str, str], settings: tuple[Any, Any], shared: int, note: str
) -> None:
    runs = [
        write_evaluations(tmp_path / name, {0: {"p": 1.0, "q": 1.0}}, setting)
        for name, setting in zip(("a", "b"), settings, strict=True)
    ]
    lines = [json.loads(line) for line in (runs[0] / "evaluations.jsonl").read_text().splitlines()]
    old = ["prompt of p" if prompts[0] == "same" else prompts[0], prompts[1]]
    write_lines(
        runs[0] / "evaluations.jsonl",
        [{**line, "prompt": prompt} for line, prompt in zip(lines, old, strict=True)],
    )
    comparison = held_out(*runs)
    assert [moment["shared"] for moment in comparison["moments"]] == ([shared] if shared else [])
    assert comparison["notes"][0].endswith(note)


@pytest.mark.parametrize(
    "other",
    [
        {"right": {"reward": "math", "threshold": 1.0}},
        {"right": {"reward": "gsm8k", "threshold": 0.5}},
        {"metric": "eval/loss"},
    ],
)
def test_grades_that_mean_different_things_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    rewards = {"format": 0.5}
    comparison = held_out(
        write_evaluations(tmp_path / "a", {0: {"p": 0.0}}, rewards=rewards),
        write_evaluations(tmp_path / "b", {0: {"p": 1.0}}, rewards=rewards, **other),
    )
    assert "grades are not compared" in comparison["notes"][0]
    (moment,) = comparison["moments"]
    assert [metric["name"] for metric in moment["metrics"]] == ["reward format"] and not moment["problems"]


def test_sums_of_different_rewards_are_not_compared(tmp_path: Path) -> None:
    def metrics(**reward: Any) -> list[str]:
        folder = tmp_path / str(len(reward))
        runs = [
            write_evaluations(
                folder / name, {0: {"p": grade}}, settings, rewards={"format": grade}, reward=grade
            )
            for name, grade, settings in (("a", 0.0, A), ("b", 1.0, {**B, **reward}))
        ]
        (moment,) = held_out(*runs)["moments"]
        return [metric["name"] for metric in moment["metrics"]]

    assert "sum of rewards" in metrics()
    assert "sum of rewards" not in metrics(reward={"weights": {"format": 0.5}})


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    base = write_evaluations(tmp_path / "a", {0: {"p": 1.0}}, A)
    without = write_evaluations(tmp_path / "b", {}, B)
    write_lines(without / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    other_task = write_evaluations(tmp_path / "c", {0: {"z": 1.0}}, {"env": {"dataset": "ifeval"}})
    other_steps = write_evaluations(tmp_path / "d", {3: {"p": 1.0}}, {**A, "eval": {"temperature": 0.1}})
    comparisons = compared([base, without, other_task, other_steps])["comparisons"]
    assert comparisons[0]["notes"][0].startswith("b: evaluations.jsonl has no response")
    assert comparisons[1]["notes"] == ["They share no held-out problem. Their data differ: env.dataset."]
    assert comparisons[2]["notes"] == [
        "They were evaluated at no step in common.",
        "They were measured in different ways: eval.temperature.",
    ]
    assert [len(each["moments"]) for each in comparisons] == [0, 0, 1]


def test_keys_that_differ_are_marked_and_secrets_are_named_only(tmp_path: Path) -> None:
    grades = {0: {"p": 1.0}}
    changed = {
        "reward": {"args": {"key": "hf_secret1"}},
        "model": {"name": "/home/me/secret", "chat_template": None},
    }
    two = {
        "reward": {"args": {"key": "hf_secret2"}},
        "model": {"name": "smollm2-135m", "chat_template": None},
    }
    runs = [
        write_evaluations(tmp_path / "a", grades, {**A, **changed}),
        write_evaluations(tmp_path / "b", grades, {**B, **two}),
        write_evaluations(tmp_path / "c", grades),
    ]
    (runs[1] / ".hydra/overrides.yaml").write_text(json.dumps(["optimizer.lr=0.25"]))
    (runs[1] / ".hydra/about.json").write_text(json.dumps({"versions": {"torch": "2.11"}}))
    result = compared(runs)
    rows = {row["key"]: row["cells"] for row in result["settings"]["rows"]}
    assert rows.keys() == {"optimizer.lr", "model.name"}
    assert [cell and cell["value"] for cell in rows["optimizer.lr"]] == ["0.5", "0.25", None]
    assert [cell and cell["overridden"] for cell in rows["optimizer.lr"]] == [False, True, None]
    assert rows["model.name"][0]["value"] == "(not shown)"
    assert result["settings"]["hidden"] == ["reward.args"] and result["settings"]["unrecorded"] == ["c"]
    assert result["surroundings"] == [{"key": "torch", "cells": ["2.13", "2.11", "2.13"]}]
    assert "secret" not in json.dumps(result)


def test_runs_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    runs = [write_evaluations(tmp_path / name, {0: {"p": 1.0}}) for name in ("a/run", "b/run", "b/other")]
    assert [run["name"] for run in differences.read_runs(runs)] == ["a/run", "b/run", "b/other"]
    assert [run["name"] for run in differences.read_runs(runs[1:])] == ["run", "other"]
    trials = [write_evaluations(tmp_path / f"sweep/{number}", {0: {"p": 1.0}}) for number in range(2)]
    assert [run["name"] for run in differences.read_runs(trials)] == ["sweep/0", "sweep/1"]


def test_runs_share_the_bounds_of_a_single_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "MOST_ROLLOUTS", 100)
    monkeypatch.setattr(differences, "CHARACTERS", 3000)
    grades = {str(number): number % 2 * 1.0 for number in range(400)}
    runs = [write_run(tmp_path / "a"), write_evaluations(tmp_path / "b", {0: grades})]
    write_evaluations(tmp_path / "c", {0: {id: 1 - grade for id, grade in grades.items()}})
    runs[0].joinpath("evaluations.jsonl").write_text((tmp_path / "c/evaluations.jsonl").read_text())
    runs[0].joinpath(".hydra").mkdir()
    (tmp_path / "c/.hydra/about.json").rename(runs[0] / ".hydra/about.json")
    contents = differences.read_runs(runs)
    assert 25 < len(contents[0]["rollouts"]["step"]) <= 50
    assert len(json.dumps(contents[0]["texts"]["held_out"])) < 6000
    (moment,) = differences.compare(runs, contents)["comparisons"][0]["moments"]
    assert len(moment["problems"]) == 400
    responses = [text for problem in moment["problems"] for text in problem["texts"] if text is not None]
    assert 5 < len(responses) < 40


def test_problems_beyond_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("paired", "comparison"):
        monkeypatch.setattr(f"torchrl_grpo.report.{module}.MOST_PROBLEMS", 2)
    grades: dict[str, float | list[float]] = {"p": 1.0, "q": [0.0, 1.0], "r": 1.0}
    runs = [write_evaluations(tmp_path / name, {0: grades}) for name in ("a", "b")]
    assert paired.read_answers(runs[0], 0)["q"].samples == 2
    comparison = held_out(*runs)
    assert comparison["moments"][0]["shared"] == 2 and "first 2 problems" in comparison["notes"][0]


def test_long_ids_are_shortened_and_stay_apart(tmp_path: Path) -> None:
    ids = [f"{'x' * 2**20}{end}" for end in "ab"]
    grades = ({ids[0]: 1.0, ids[1]: 0.0}, {ids[0]: 0.0, ids[1]: 0.0})
    runs = [write_evaluations(tmp_path / name, {0: each}) for name, each in zip("ab", grades, strict=True)]
    (moment,) = held_out(*runs)["moments"]
    (problem,) = moment["problems"]
    assert moment["shared"] == 2 and len(problem["id"]) < 400
    kept = differences.read_runs(runs)[0]["held_out"]["ids"]
    assert len(set(kept)) == 2 and problem["id"] == kept[0]


def test_grades_of_unknown_rewards_are_compared_and_that_is_said(tmp_path: Path) -> None:
    runs = [write_evaluations(tmp_path / name, {0: {"p": 1.0}}, metric="eval/primary") for name in "ab"]
    for run in runs:
        (run / ".hydra/about.json").write_text("{}")
    (note,) = held_out(*runs)["notes"]
    assert note.startswith("Neither run says which reward grades it")


def test_a_mean_that_is_an_accuracy_in_one_run_is_compared_as_a_mean(tmp_path: Path) -> None:
    grades = ({"p": 1.0, "q": 0.0}, {"p": 0.0, "q": 0.0})
    runs = [
        write_evaluations(tmp_path / name, {0: each}, A, metric="eval/primary")
        for name, each in zip("ab", grades, strict=True)
    ]
    write_lines(runs[0] / "metrics.jsonl", [{"step": 0, "eval/primary": 0.5, "eval/accuracy": 0.5}])
    comparison = held_out(*runs)
    assert (comparison["kind"], comparison["notes"]) == ("value", [])
    assert comparison["moments"][0]["metrics"][0]["name"] == "the reward gsm8k"
    both = write_evaluations(tmp_path / "c", {0: grades[1]}, A, metric="eval/primary")
    write_lines(both / "metrics.jsonl", [{"step": 0, "eval/primary": 0.5, "eval/accuracy": 0.5}])
    assert held_out(runs[0], both)["kind"] == "accuracy"


def test_the_command_writes_one_page_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grades = {"p": 0.0, "q": 1.0}, {"p": 1.0, "q": 1.0}
    for name, settings, values in zip("ab", (A, B), grades, strict=True):
        write_evaluations(tmp_path / name, {0: values}, settings)
    monkeypatch.chdir(tmp_path)
    command.main(["a", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Keys that differ: 1 (* set by the command)",
        "                a    b",
        "  optimizer.lr  0.5  0.25",
    ]
    low, high = paired_interval([(1.0, 0.0), (1.0, 1.0)])[1]
    expected = f"    accuracy  +0.500  (95 % interval {low:+.3f} to {high:+.3f})  0.500 -> 1.000"
    assert lines[4:8] == [
        "Held-out problems, b minus a",
        "  step 0, 2 problems in both",
        expected,
        "    only b solves: 1",
    ]
    assert lines[-1].startswith(f"Written to {tmp_path}/report-diff.html (")
    data = payload((tmp_path / "report-diff.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert json.loads(inflated(data["differences"]))["comparisons"][0]["run"] == 1
    command.main(["a", "--output", "other.html"])
    assert payload((tmp_path / "other.html").read_text())["differences"] is None


def test_hostile_and_broken_files_are_compared_as_far_as_they_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {HOSTILE: 0.5, "format": "x", "huge": 1e300}
    runs = [
        write_evaluations(
            tmp_path / name,
            {0: {HOSTILE: grade}},
            {HOSTILE: {HOSTILE: name}},
            {"reward": [HOSTILE]},
            rewards=rewards,
            tokens=-3,
        )
        for name, grade in (("a", 0.5), ("b", 1.0))
    ]
    for run in runs:
        with (run / "evaluations.jsonl").open("a") as file:
            file.write('[1]\n{"step": 0, "id": [3], "prompt": null, "grade": "good"}\n{"step": 0, "torn": ')
    command.main([*map(str, runs), "--output", str(tmp_path / "d.html")])
    shown = capsys.readouterr().out
    assert "a: damaged lines of evaluations.jsonl that were skipped: 1" in shown and "+0.500" in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    page = (tmp_path / "d.html").read_text()
    assert page.count("<script") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "nowhere"], "RUN=nowhere: there is no metrics.jsonl"),
        (["a", "b", "./a/"], "RUN=a: this run is named twice"),
        (["a", "b", "--watch"], "--watch: it shows one run"),
        (["a", "--watch", "--output", "x.html"], "--output=x.html: --watch writes no file"),
        (["a", "b", "--output", "b/metrics.jsonl"], "--output=b/metrics.jsonl: a report is HTML"),
        (["a", "b", "--output", "gone/x.html"], "gone/x.html cannot be written: No such file or directory"),
        (["a", "fifo"], "fifo/evaluations.jsonl cannot be read: is not a regular file"),
    ],
)
def test_a_mistake_ends_the_command_with_what_to_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    for name in ("a", "b", "fifo"):
        write_evaluations(tmp_path / name, {0: {"p": 1.0}})
    (tmp_path / "fifo/evaluations.jsonl").unlink()
    (tmp_path / "fifo/evaluations.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "report-diff.html").exists()


def test_a_run_compares_its_first_evaluation_with_its_last(tmp_path: Path) -> None:
    first = {"a": [0.5, 0.0], "b": [1.0, 0.5], "c": [0.0, 0.0], "gone": [1.0, 1.0]}
    last = {"c": [0.5, 1.0], "b": [1.0, 0.0], "a": [0.5, 0.5], "new": [0.0, 0.0]}
    run = write_evaluations(tmp_path / "run", {0: first, 4: {"a": [9.0]}, 8: last})
    result = change.of_run(run, (0, 8), {"c": "What is c?"})
    assert result is not None
    difference, sample = result
    # Changes of the problems' means: +0.25, -0.25 and +0.75.
    mean, bounds = paired_interval([(0.5, 0.25), (0.5, 0.75), (0.75, 0.0)])
    assert (difference.difference, (difference.low, difference.high)) == (mean, bounds)
    assert difference.problems == 3
    assert sample == [
        "Held-out problem that changed most (0.000 -> 0.750, mean of 2 responses, here the first)",
        "  prompt  What is c?",
        "  before  run c 0 0",
        "  after   run c 8 0",
    ]


def test_a_run_without_two_evaluations_or_with_equal_responses_shows_no_sample(tmp_path: Path) -> None:
    run = write_evaluations(tmp_path / "run", {0: {"a": 0.5}})
    assert change.of_run(run, (0, 2), {}) is None
    (tmp_path / "losses").mkdir()
    assert change.of_run(tmp_path / "losses", (0, 2), {}) is None
    row = {"id": "a", "prompt": "p", "response": "the solution", "tokens": 3}
    write_lines(tmp_path / "losses/evaluations.jsonl", [{**row, "step": at, "grade": -at} for at in (0, 2)])
    result = change.of_run(tmp_path / "losses", (0, 2), {})
    assert result is not None and result[0].difference == -2.0 and result[1] == []


def test_the_sample_is_short_and_harmless_on_a_terminal(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "p"}
    responses = {0: "\x1b]0;title\x07\x1b[2J\u202eevil\r\n" + HOSTILE, 2: "word " * 5_000 + "end."}
    rows = [{**row, "step": at, "response": text, "grade": at / 2} for at, text in responses.items()]
    write_lines(tmp_path / "evaluations.jsonl", rows)
    result = change.of_run(tmp_path, (0, 2), {"a": "\x1b[31mred " + "x" * 1_000})
    assert result is not None and result[0].difference == 1.0
    sample = result[1]
    assert len(sample) <= 10 and all(len(line) <= 100 and line.isprintable() for line in sample)
    assert "]0;title[2Jevil" in "".join(sample) and sample[-1].endswith("word end.")
