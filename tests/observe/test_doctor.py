"""The doctor reads the files of a run: what the rules find there, and a response that shows it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchrl_grpo.cli import report as report_command
from torchrl_grpo.config import Config
from torchrl_grpo.errors import DataError
from torchrl_grpo.observe.doctor import diagnose, findings, read_setting
from torchrl_grpo.observe.past import Setting


def line(step: int, **changes: Any) -> dict[str, Any]:
    """A line of a healthy step, with changes: two underscores stand for a slash."""
    healthy = {
        "reward/mean": 0.3,
        "reward/constant_groups": 0.2,
        "advantage/abs_mean": 0.2,
        "response/truncated": 0.1,
        "response/length_max": 12.0,
        "policy/version": step - 1,
        "policy/ratio": 1.0,
        "policy/entropy": 1.0,
        "kl/sampling_policy": 1e-10,
        "optimizer/grad_norm": 1.0,
        "optimizer/lr": 1e-5,
    }
    return {"step": step, **healthy, **{name.replace("__", "/"): value for name, value in changes.items()}}


def write(folder: Path, name: str, rows: list[Any]) -> None:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("".join(f"{text}\n" for text in texts))


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    write(tmp_path, "metrics.jsonl", [line(step) for step in range(1, 20)])
    diagnosis = diagnose(tmp_path)
    assert diagnosis.findings == [] and diagnosis.last_step == 19 and not diagnosis.ended
    assert len(diagnosis.notes) == 1 and ".hydra/config.yaml" in diagnosis.notes[0]


def test_a_finding_has_its_steps_and_says_whether_it_is_over(tmp_path: Path) -> None:
    cut = [line(step, response__truncated=1.0 if 3 <= step <= 8 else 0.1) for step in range(1, 13)]
    write(tmp_path, "metrics.jsonl", [*cut, *(line(step, policy__entropy=1e-3) for step in range(13, 17))])
    (tmp_path / "summary.json").write_text("{}")
    truncated, entropy = findings(tmp_path)
    assert (truncated.rule.name, truncated.since, truncated.step, truncated.is_over) == (
        "truncated",
        3,
        5,
        True,
    )
    assert (entropy.rule.name, entropy.since, entropy.step, entropy.is_over) == ("entropy", 13, 15, False)
    assert "inference_model.max_new_tokens" in truncated.rule.keys
    assert diagnose(tmp_path).ended


def test_a_finding_that_another_one_explains_later_is_not_over(tmp_path: Path) -> None:
    equal = {"reward__constant_groups": 1.0, "advantage__abs_mean": 0.0}
    rows = [line(step, **equal, response__truncated=1.0 if step > 5 else 0.5) for step in range(1, 12)]
    write(tmp_path, "metrics.jsonl", rows)
    assert [(each.rule.name, each.is_over) for each in findings(tmp_path)] == [
        ("no_signal", False),
        ("truncated", False),
    ]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    damaged = [
        "{",
        "[1]",
        '{"step": "x"}',
        '{"step": 2, "reward/mean": "a"}',
        "[" * 100_000,
        '{"step": 1e400}',
        f'{{"step": 2, "reward/mean": 1{"0" * 400}, "reward/constant_groups": 0.5}}',
    ]
    rows = [line(step, response__truncated=1.0) for step in range(1, 5)]
    write(tmp_path, "metrics.jsonl", [rows[0], *damaged, *rows[1:]])
    write(
        tmp_path, "rollouts.jsonl", ["\x00", {"step": 3, "response": "cut", "reward": 10**400}, '{"step": 3']
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward/mean"')
    diagnosis = diagnose(tmp_path)
    assert [finding.rule.name for finding in diagnosis.findings] == ["truncated"] and diagnosis.last_step == 4
    assert diagnosis.damaged == {"metrics.jsonl": len(damaged) + 1, "rollouts.jsonl": 2}
    example = diagnosis.examples["truncated"]
    assert example.response == "cut" and example.reward is None


def test_the_response_of_a_finding_is_of_its_step_and_has_the_error(tmp_path: Path) -> None:
    failing = {"reward__error_share": 1.0}
    lines = [line(1), line(2), *(line(step, **failing) for step in range(3, 6))]
    write(tmp_path, "metrics.jsonl", lines)
    rollouts = [
        {"step": 1, "response": "early", "reward": 1.0},
        {"step": 3, "response": "graded", "reward": 0.0},
        {"step": 3, "response": "failed", "reward": None, "errors": {"mine": "KeyError: 'x'"}},
        {"step": 4, "response": "late", "reward": 0.0},
    ]
    write(tmp_path, "rollouts.jsonl", rollouts)
    example = diagnose(tmp_path).examples["reward_fails"]
    assert (example.step, example.response, example.error) == (3, "failed", "KeyError: 'x'")


def test_a_finding_of_evaluations_shows_a_response_to_a_held_out_problem(tmp_path: Path) -> None:
    def evaluated(step: int, value: float) -> dict[str, Any]:
        near = {"eval/accuracy_low": value - 0.05, "eval/accuracy_high": value + 0.05}
        return {**line(step), "eval/accuracy": value, "eval/num_problems": 50, **near}

    write(tmp_path, "metrics.jsonl", [evaluated(1, 0.7), evaluated(2, 0.3)])
    answers = [{"step": step, "id": "a", "response": f"of {step}", "grade": 0.0} for step in (1, 2)]
    write(tmp_path, "evaluations.jsonl", answers)
    write(tmp_path, "rollouts.jsonl", [{"step": 2, "response": "of training", "reward": 0.0}])
    diagnosis = diagnose(tmp_path)
    assert [finding.rule.name for finding in diagnosis.findings] == ["held_out_falls"]
    assert diagnosis.examples["held_out_falls"].response == "of 2"


def test_thresholds_follow_the_newest_configuration(tmp_path: Path) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    assert Setting.of(config) == Setting.of(asdict(Config()))
    write(tmp_path, "metrics.jsonl", [line(step, kl__sampling_policy=0.004) for step in range(1, 6)])
    assert findings(tmp_path) == []
    config["inference_model"]["dtype"], config["train_model"]["autocast"] = "float32", "no"
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(OmegaConf.to_yaml(config))
    assert [finding.rule.name for finding in findings(tmp_path)] == ["mismatch"]


def test_the_newest_configuration_is_that_of_the_last_resumption_whatever_the_times_of_files(
    tmp_path: Path,
) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    for number, name in [(3, "resume-10"), (2, "resume-9"), (1, "."), (4, "resume-x")]:
        folder = tmp_path / ".hydra" / name
        folder.mkdir(parents=True, exist_ok=True)
        config["env"]["repeats"] = number
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    assert read_setting(tmp_path, []).samples == 3


def test_a_configuration_that_grows_with_its_aliases_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    lists = [f"l{number}: &l{number} [{', '.join([f'*l{number - 1}'] * 9)}]" for number in range(1, 30)]
    lines = ["l0: &l0 [x]", *lists, "inference_model: {dtype: *l29}", "train_model: {autocast: 1}"]
    (tmp_path / ".hydra/config.yaml").write_text("\n".join(lines))
    notes: list[str] = []
    assert read_setting(tmp_path, notes) == Setting() and "cannot be read" in notes[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no sections"),
        ("[1]", "it has no sections"),
        ("a: [", "expected the node content, but found '<stream end>' in line 1"),
        # What is quoted could be a key.
        ('a: 1\nkey: "SECRET', "found unexpected end of stream in line 2"),
        ("inference_model: 3", "inference_model is of the type int and no section"),
        ("inference_model: {dtype: 1}", "train_model is missing"),
        ("inference_model: {}\ntrain_model: {}\npolicy:", "policy is of the type NoneType and no section"),
        ("inference_model: {}\ntrain_model: {}\npolicy: [a]", "policy is of the type list and no section"),
        ("inference_model: {}\ntrain_model: {}\npolicy: {}", "dtype is missing"),
    ],
)
def test_a_damaged_configuration_is_named(
    tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "metrics.jsonl", [line(1)])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(text)
    (note,) = diagnose(tmp_path).notes
    assert note.startswith(".hydra/config.yaml cannot be read (") and reason in note and "\n" not in note
    assert "SECRET" not in note
    report_command.main([str(tmp_path)])
    assert capsys.readouterr().out.startswith(f"note: {tmp_path}: {note}\nWritten to ")


@pytest.mark.parametrize("repeats", [".inf", ".nan", "0", "-2", f"1{'0' * 400}", "many"])
def test_numbers_that_no_run_has_are_no_crash(tmp_path: Path, repeats: str) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    config["env"]["repeats"] = "REPEATS"
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(OmegaConf.to_yaml(config).replace("REPEATS", repeats))
    write(tmp_path, "metrics.jsonl", [{**line(1), "eval/accuracy": 0.0}])
    (note,) = diagnose(tmp_path).notes
    assert ".hydra/config.yaml cannot be read" in note
    OmegaConf.save(OmegaConf.structured(Config), tmp_path / ".hydra/config.yaml")
    write(tmp_path, "metrics.jsonl", [{**line(1), "eval/accuracy": 1e300}])
    assert diagnose(tmp_path).findings == []


def test_a_folder_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics of a run.*outputs/DATE/TIME"):
        diagnose(tmp_path)


def _word_problems(folder: Path, solves: bool) -> None:
    """Write a run of 60 steps on word problems, rewarded for format and digits, whose answers become short.

    Args:
        folder: folder of the run.
        solves: whether the held-out value rises meanwhile, as that of a model that learns to stop.
    """
    lines, rollouts, answers = [], [], []
    for step in range(61):
        done = min(1.0, step / 15)
        words = round(110 - 88 * done)
        row: dict[str, Any] = {"step": 0}
        if step:
            rewards = {"reward/mean": 0.4 + 1.1 * done, "reward/form": 0.3 + 0.6 * done}
            length = {"response/length_mean": float(words)}
            row = {**line(step), **rewards, **length, "reward/digits": 0.1 + 0.5 * done}
            rollouts.append(
                {"step": step, "response": "step " * words + "#### 7", "reward": 0.4 + 1.1 * done}
            )
        if step % 10 == 0:
            # Of 200 problems, 36 were right before.
            value = 0.18 + (0.3 if solves else -0.05) * done
            near = {"eval/accuracy_low": value - 0.05, "eval/accuracy_high": value + 0.05}
            row |= {
                "eval/accuracy": value,
                **near,
                "eval/num_problems": 200,
                "eval/response_length": float(words),
            }
            answers.append({"step": step, "id": "a", "response": "#### 7", "grade": 0.0})
        lines.append(row)
    for name, rows in (("metrics", lines), ("rollouts", rollouts), ("evaluations", answers)):
        write(folder, f"{name}.jsonl", rows)


def test_answers_of_22_tokens_for_format_and_digits_are_seen_in_the_first_third(tmp_path: Path) -> None:
    _word_problems(tmp_path, solves=False)
    diagnosis = diagnose(tmp_path)
    (finding,) = diagnosis.findings
    assert finding.rule.name == "short_answers" and finding.step <= 60 / 3
    assert "22 tokens" in finding.seen and "reward.weights" in finding.rule.keys
    assert diagnosis.examples["short_answers"].response == "#### 7"


def test_answers_that_become_short_and_right_are_no_finding(tmp_path: Path) -> None:
    _word_problems(tmp_path, solves=True)
    assert findings(tmp_path) == []
