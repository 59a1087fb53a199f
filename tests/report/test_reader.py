"""What a report reads of a run: all numbers, a sample of the texts, and nothing of damaged lines."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_files import HOSTILE, rollout, write_lines, write_run
from tiny_vlm import picture

from torchrl_grpo.config import Config
from torchrl_grpo.data.pictures import decode
from torchrl_grpo.report.about import record
from torchrl_grpo.report.columns import Columns
from torchrl_grpo.report.reader import CUT_OFF, ENDED, FAILED, UNKNOWN, RunReader


def read(folder: Path, **limits: int) -> dict[str, Any]:
    reader = RunReader(folder, **limits)
    reader.update()
    return reader.contents()


def texts_of(contents: dict[str, Any], step: int) -> list[str]:
    columns = contents["rollouts"]
    rows = [row for row, at in enumerate(columns["step"]) if at == step and columns["text"][row] >= 0]
    return [contents["texts"]["rollouts"][columns["text"][row]]["response"] for row in rows]


def test_numbers_and_texts_of_each_rollout_are_read(tmp_path: Path) -> None:
    failed = rollout(3, 9, errors={"environment": "it is gone"})
    old = {name: value for name, value in rollout(3, 9).items() if name not in ("length", "truncated")}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    rows = [rollout(1, 7, verdicts={"quality": "It is long."}), rollout(1, 7, 3), failed, old]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    contents = read(tmp_path)
    columns = contents["rollouts"]
    assert list(columns["step"]) == [1, 1, 3, 3]
    assert list(columns["group"]) == [7, 7, 9, 9]
    assert list(columns["length"]) == [5, 8, 5, -1]
    assert list(columns["finish"]) == [ENDED, CUT_OFF, FAILED, UNKNOWN]
    assert list(columns["reward"]) == pytest.approx([row["reward"] for row in rows])
    assert list(columns["part:format"]) == pytest.approx([row["rewards"]["format"] for row in rows])
    assert columns["problem"][0] == columns["problem"][1] != columns["problem"][2]
    assert [text["response"] for text in contents["texts"]["rollouts"]] == [row["response"] for row in rows]
    assert contents["texts"]["rollouts"][2]["errors"] == {"environment": "it is gone"}
    assert contents["texts"]["rollouts"][0]["verdicts"] == {"quality": "It is long."}
    assert not contents["sampled"] and not contents["dropped"] and not contents["damaged"]


def test_pictures_are_small_and_bounded(tmp_path: Path) -> None:
    stored = tmp_path / "pictures"
    stored.mkdir()
    names = [f"{number:032x}.png" for number in range(4)]
    for number, name in enumerate(names[:3]):
        picture(400, 20, number).save(stored / name)
    (stored / names[3]).write_bytes(b"no picture")
    secret = tmp_path / "secret.png"
    picture(9, 9).save(secret)
    linked = f"{9:032x}.png"
    (stored / linked).symlink_to(secret)
    hostile = ["../secret.png", str(secret), HOSTILE, 3, None, linked]
    rows = [rollout(1, 0, pictures=[*names[:2], *hostile]), rollout(2, 1, pictures=names[2:])]
    write_lines(tmp_path / "rollouts.jsonl", [*rows, rollout(3, 2, pictures="x")])
    texts = read(tmp_path)["texts"]
    assert [text.get("pictures") for text in texts["rollouts"]] == [[*names[:2], linked], names[2:], None]
    assert texts["pictures"].keys() == set(names[:3])
    for url in texts["pictures"].values():
        assert url.startswith("data:image/")
        assert decode(base64.b64decode(url.partition(",")[2])).size == (320, 16)
    # The same words about other pictures are another problem.
    assert len(set(read(tmp_path)["rollouts"]["problem"])) == 3
    # The newest have the room.
    size = len(texts["pictures"][names[2]])
    assert read(tmp_path, characters=3 * size * 3 // 2)["texts"]["pictures"].keys() == {names[2]}
    held_out = {"step": 0, "id": "a", "prompt": "p", "response": "r", "grade": 1.0, "pictures": names[:1]}
    write_lines(tmp_path / "evaluations.jsonl", [held_out])
    texts = read(tmp_path, characters=3 * size * 3 // 2)["texts"]
    assert texts["held_out"][0]["pictures"] == names[:1] and texts["pictures"].keys() == {names[0]}


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    damaged = ["{", "[1]", '{"step": "1"}', '{"step": true}', "[" * 100_000, '{"step": 1e400}', "\ufffd"]
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        lines = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([*damaged, *lines, '{"step": 2, "torn": ']))
    contents = read(tmp_path)
    assert contents["damaged"] == dict.fromkeys(
        ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"), len(damaged)
    )
    assert list(contents["steps"]) == [0, 1, 2] and len(contents["rollouts"]["step"]) == 32


@pytest.mark.parametrize(
    "row",
    [
        {
            "step": 1,
            "prompt": None,
            "response": [1],
            "rewards": 3,
            "errors": "x",
            "messages": [None, {"role": 1}],
        },
        {
            "step": 1,
            "reward": "1",
            "rewards": {"a": None, "b": "x", "c": 1e300},
            "group_id": 2**40,
            "length": 1.5,
        },
        {"step": 1, "tokens": {"text": "x", "engine": None}, "truncated": "no", "discarded": {"a": [1]}},
        {
            "step": 1,
            "tokens": {"text": [1], "engine": [float("nan")]},
            "reward": float("inf"),
            "advantage": True,
        },
        {"step": 1, "truncated": [], "policy_version": {}, "prompt": 10**400},
    ],
)
def test_rows_of_unknown_shape_are_read_as_far_as_they_go(tmp_path: Path, row: dict[str, Any]) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": [1], "x": "y"}])
    write_lines(tmp_path / "rollouts.jsonl", [row])
    write_lines(tmp_path / "evaluations.jsonl", [{**row, "id": [1], "grade": "good"}])
    contents = read(tmp_path)
    assert len(contents["rollouts"]["step"]) == len(contents["steps"]) == 1
    json.dumps(contents["texts"], allow_nan=False)


def test_a_second_update_reads_what_was_added_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, steps=3)
    reader = RunReader(tmp_path)
    reader.update()
    rows = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout(4, 99)) + "\n" + json.dumps(rollout(5, 100))[:20])
    lines: list[bytes] = []
    loads = json.loads

    def spy(line: bytes) -> Any:
        lines.append(line)
        return loads(line)

    monkeypatch.setattr(json, "loads", spy)
    reader.update()
    assert len(lines) == 1
    monkeypatch.undo()
    assert list(reader.contents()["rollouts"]["step"])[-2:] == [3, 4]
    assert len(reader.contents()["rollouts"]["step"]) == len(rows) + 1


@pytest.mark.parametrize("then_grows", [False, True])
def test_a_resumed_run_whose_files_were_cut_is_read_again(tmp_path: Path, then_grows: bool) -> None:
    write_run(tmp_path, steps=4)
    reader = RunReader(tmp_path)
    reader.update()
    # The steps after the checkpoint are gone, and the run may have repeated them before the next look.
    write_run(tmp_path, steps=2)
    more = [rollout(step, 50, sample) for step in (3, 4) for sample in range(40)] if then_grows else []
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in more)
    reader.update()
    assert list(reader.contents()["rollouts"]["step"]) == [1] * 16 + [2] * 16 + [3] * len(more[::2]) + [
        4
    ] * len(more[::2])


def test_metrics_have_a_gap_where_a_line_lacks_them(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "loss/total": None}]
    )
    metrics = read(tmp_path)["metrics"]
    assert metrics["eval/accuracy"][0] == 0.5 and math.isnan(metrics["eval/accuracy"][1])
    assert all(map(math.isnan, metrics["loss/total"]))


def test_the_newest_evaluation_decides_what_the_held_out_value_is(tmp_path: Path) -> None:
    first, second = {"eval/primary": 0.0, "eval/primary_low": 0.0}, {"eval/primary": 0.5}
    shares = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25}
    rows = [{"step": 0, **first}, {"step": 1, "loss/total": 1.0}, {"step": 2, **second, **shares}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    contents = read(tmp_path)
    assert contents["held_out"]["metric"] == "eval/accuracy"
    accuracy, low = (list(contents["metrics"][f"eval/accuracy{end}"]) for end in ("", "_low"))
    assert accuracy == pytest.approx([0.0, math.nan, 0.5], nan_ok=True)
    assert low == pytest.approx([0.0, math.nan, 0.25], nan_ok=True)
    # Then the reward gives another number.
    write_lines(tmp_path / "metrics.jsonl", [*rows, {"step": 3, "eval/primary": 0.7}])
    contents = read(tmp_path)
    assert contents["held_out"]["metric"] == "eval/primary"
    assert math.isnan(contents["metrics"]["eval/accuracy"][0])


def test_findings_are_those_of_the_table_of_rules(tmp_path: Path) -> None:
    row = {"reward/mean": 0.0, "reward/constant_groups": 1.0, "response/length_mean": 3.0}
    better = {**row, "reward/constant_groups": 0.5}
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": step, **(better if step == 6 else row)} for step in range(1, 7)],
    )
    (finding,) = read(tmp_path)["findings"]
    assert (finding["rule"], finding["since"], finding["holds"]) == ("no_signal", 1, False)
    assert "env.task_args" in finding["advice"] and finding["source"]


def test_texts_of_a_long_run_are_a_sample_with_its_beginning_and_its_end(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    long = "x" * 500
    rows = [
        rollout(step, group, sample, response=f"{step} {sample} {long}")
        for step in range(1, 101)
        for group in range(2)
        for sample in range(2)
    ]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    contents = read(tmp_path, characters=30_000)
    assert contents["sampled"] and len(contents["rollouts"]["step"]) == 400
    texts = contents["texts"]["rollouts"]
    assert 15_000 < sum(len(text["response"]) for text in texts) <= 30_000
    for step in (1, 100):
        assert len(texts_of(contents, step)) == 4
    kept = [step for step in range(1, 101) if texts_of(contents, step)]
    assert len(kept) > 10 and max(b - a for a, b in pairwise(kept)) < 20
    # Groups are whole, and the texts are those of their rows.
    assert all(len(texts_of(contents, step)) in (2, 4) for step in kept)
    assert all(text.startswith(f"{step} ") for step in kept for text in texts_of(contents, step))


def test_a_text_of_a_megabyte_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    write_lines(tmp_path / "rollouts.jsonl", [rollout(1, 0, response="begin" + "x" * 2**20 + "end")])
    (text,) = read(tmp_path)["texts"]["rollouts"]
    response = text["response"]
    assert response.startswith("begin") and response.endswith("end") and "1,032,584 characters" in response
    assert len(response) < 20_000


def test_one_round_cannot_take_the_room_of_all(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    rows = [rollout(step, group, response="x" * 1000) for step in (1, 2, 3) for group in range(100)]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    contents = read(tmp_path, characters=40_000)
    assert {step: len(texts_of(contents, step)) for step in (1, 3)} == {1: 9, 3: 9}
    assert len(contents["rollouts"]["step"]) == 300


def test_the_oldest_rollouts_give_way_beyond_the_bound(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step, step) for step in range(1, 1001)])
    contents = read(tmp_path, most_rollouts=100)
    steps = list(contents["rollouts"]["step"])
    assert steps == list(range(contents["dropped"] + 1, 1001)) and 75 <= len(steps) <= 100
    assert texts_of(contents, 1000) == [rollout(1000, 1000)["response"]]


def test_a_reward_that_appears_later_has_gaps_before() -> None:
    columns = Columns(10)
    row = dict.fromkeys(columns.columns, 0)
    columns.append(row, {"a": 1.0})
    columns.append(row, {"b": 2.0})
    assert columns.columns["part:a"][0] == 1.0 and math.isnan(columns.columns["part:a"][1])
    assert math.isnan(columns.columns["part:b"][0]) and columns.columns["part:b"][1] == 2.0


def test_held_out_problems_have_their_grades_and_first_and_newest_response(tmp_path: Path) -> None:
    write_run(tmp_path)
    contents = read(tmp_path)
    held_out, texts = contents["held_out"], contents["texts"]["held_out"]
    assert held_out["ids"] == ["learned", "forgotten", "never", "always"] and held_out["steps"] == [0, 10, 20]
    assert list(held_out["grades"]) == [0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert (texts[0]["first"]["response"], texts[0]["last"]["response"]) == (
        "learned at step 0",
        "learned at step 20",
    )


def test_the_plan_and_versions_of_the_start_are_read_and_secrets_are_not(tmp_path: Path) -> None:
    hydra = tmp_path / ".hydra"
    cfg = Config()
    record(tmp_path, cfg, HOSTILE)
    job = {"hydra": {"job": {"name": "grpo.py", "config_name": "grpo_gsm8k"}}}
    (hydra / "hydra.yaml").write_text(json.dumps(job))
    (hydra / "overrides.yaml").write_text(json.dumps(["optimizer.lr=2e-5", "reward.args.key=secret"]))
    config = {
        "optimizer": {"lr": 2e-5, "eps": 1e-8},
        "reward": {"args": {"key": "secret"}},
        "hub": {"push": "a/b"},
    }
    (hydra / "config.yaml").write_text(yaml.safe_dump(config))
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    about = read(tmp_path)["about"]
    assert about["plan"] == HOSTILE and about["versions"]["torchrl-grpo"]
    assert about["right"] == {"reward": "gsm8k", "threshold": 1.0}
    assert "--config-name=grpo_gsm8k optimizer.lr=2e-5" in about["command"]
    settings = {entry["key"]: entry for entry in about["config"]}
    assert settings["optimizer.lr"]["overridden"] and settings["optimizer.lr"]["changed"]
    assert not settings["optimizer.eps"]["overridden"] and not settings["optimizer.eps"]["changed"]
    assert "secret" not in json.dumps(about) and "a/b" not in json.dumps(about)


@pytest.mark.parametrize("name", ["summary.json", ".hydra/about.json", ".hydra/config.yaml", ".hydra"])
def test_links_of_a_folder_from_somebody_else_are_not_followed(tmp_path: Path, name: str) -> None:
    private = tmp_path / "private"
    private.mkdir()
    secret = {
        "plan": "hf_secret",
        "seconds": 71,
        "right": {"reward": "hf_secret"},
        "optimizer": {"lr": "hf_secret"},
    }
    for file in ("secret", "about.json", "config.yaml"):
        (private / file).write_text(json.dumps(secret))
    run = write_run(tmp_path / "run", steps=1)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(private if name == ".hydra" else private / "secret")
    contents = read(run)
    assert "hf_secret" not in json.dumps(contents["about"]) and contents["summary"] == {}


def test_only_what_the_page_shows_is_taken_of_the_records_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / ".hydra").mkdir()
    (run / "summary.json").write_text(json.dumps({"seconds": 71, "steps": [1], "token": "hf_secret"}))
    (run / ".hydra/about.json").write_text(json.dumps({"plan": ["x"], "right": None, "token": "hf_secret"}))
    contents = read(run)
    assert contents["summary"] == {"seconds": 71, "steps": None}
    assert contents["about"]["plan"] == "" and contents["about"]["right"] == {}
    assert "hf_secret" not in json.dumps(contents["about"])


@pytest.mark.parametrize("name", ["summary.json", ".hydra/about.json", ".hydra/config.yaml"])
def test_a_pipe_in_a_folder_is_not_read(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / ".hydra").mkdir()
    os.mkfifo(run / name)

    def answer_whoever_reads() -> None:
        with contextlib.suppress(BrokenPipeError):
            (run / name).write_text(json.dumps({"seconds": 71, "plan": "x", "train": {"seed": 1}}))

    threading.Thread(target=answer_whoever_reads, daemon=True).start()
    contents = read(run)
    assert contents["summary"] == {} and contents["about"]["plan"] == "" and contents["about"]["config"] == []


def test_discarded_rollouts_do_not_displace_those_that_were_trained_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    text = "x" * 1000
    trained = [rollout(step, step, response=text) for step in range(1, 61)]
    discarded = [rollout(step, 100 + step, response=text, discarded="full") for step in range(1, 61)]
    write_lines(tmp_path / "rollouts.jsonl", trained)
    write_lines(tmp_path / "discarded.jsonl", discarded)
    contents = read(tmp_path, characters=40_000)
    columns = contents["rollouts"]
    assert list(columns["step"]) == sorted([*range(1, 61), *range(1, 61)])
    with_text = {
        kind: [
            step
            for step, at, text in zip(*(columns[name] for name in ("step", "discarded", "text")), strict=True)
            if at == kind and text >= 0
        ]
        for kind in (0, 1)
    }
    assert all(steps[0] == 1 and steps[-1] == 60 for steps in with_text.values())
    columns = read(tmp_path, most_rollouts=40)["rollouts"]
    kept = [sum(at == kind for at in columns["discarded"]) for kind in (0, 1)]
    assert abs(kept[0] - kept[1]) <= 1


def test_steps_that_fall_in_a_file_are_damaged_lines(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", rows * 2)
    reader = RunReader(tmp_path)
    for _ in range(2):
        reader.update()
        contents = reader.contents()
        # Of the repeated lines, the last is not earlier than the one before.
        assert list(contents["steps"]) == [1, 2, 3, 3] and contents["damaged"] == {"metrics.jsonl": 2}


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ("optimizer: {lr: 2020-01-01}", [["optimizer.lr", '"2020-01-01"']]),
        ("model: {name: [{2020-01-01: x}]}", [["model.name", "[{}]"]]),
        ("model: {name: &a [*a]}", []),
        ("model: &a {name: *a}", []),
    ],
)
def test_configurations_that_hydra_did_not_write_are_read_as_far_as_they_go(
    tmp_path: Path, config: str, shown: list[list[str]]
) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / ".hydra").mkdir()
    (run / ".hydra/config.yaml").write_text(config)
    assert [[entry["key"], entry["value"]] for entry in read(run)["about"]["config"]] == shown


def test_command_and_configuration_are_those_of_the_last_resumption(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    # Neither the order of names nor that of times is the order of starts.
    for number, name in [(10, "resume-10"), (2, "resume-2"), (0, ".")]:
        record = tmp_path / ".hydra" / name
        record.mkdir(parents=True, exist_ok=True)
        job = {"hydra": {"job": {"name": "grpo.py", "config_name": "grpo_gsm8k"}}}
        (record / "hydra.yaml").write_text(json.dumps(job))
        (record / "overrides.yaml").write_text(json.dumps([f"train.seed={number}"]))
        (record / "config.yaml").write_text(json.dumps({"train": {"seed": number}}))
    about = read(tmp_path)["about"]
    assert about["command"] == "grpo.py --config-name=grpo_gsm8k train.seed=10"
    assert about["overrides"] == ["train.seed=10"] and about["config"][0]["value"] == "10"


def test_a_file_that_was_cut_and_has_grown_beyond_its_size_is_read_again(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": 0.1} for step in range(1, 6)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    reader = RunReader(tmp_path)
    reader.update()
    # Steps 3 to 5 were repeated with other numbers, before the next look.
    write_lines(
        tmp_path / "metrics.jsonl", rows[:2] + [{"step": step, "reward/mean": 0.9} for step in range(3, 9)]
    )
    reader.update()
    contents = reader.contents()
    assert list(contents["steps"]) == list(range(1, 9))
    assert list(contents["metrics"]["reward/mean"]) == [0.1] * 2 + [0.9] * 6
