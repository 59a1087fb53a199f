"""``grpo-eval``: the number of a run's own evaluation, and the comparison of two models."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.cli import model_argument
from torchrl_grpo.cli.evaluate import main
from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import show
from torchrl_grpo.errors import CheckpointError, ConfigError, ModelError
from torchrl_grpo.observe.evaluation_files import Measured, difference, lm_eval
from torchrl_grpo.observe.stats import (
    design_effect,
    effective_share,
    mean_interval,
    paired_interval,
    wilson,
)
from torchrl_grpo.runtime.printable import printable
from torchrl_grpo.training import job


def evaluate(folder: Path, *words: str | Path) -> dict[str, Any]:
    main([*map(str, words), "--output", str(folder)])
    return dict(json.loads((folder / "evaluation.json").read_text()))


def of_step(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name.startswith("eval/")}


@pytest.mark.slow
def test_a_run_gets_its_own_number_and_is_compared_with_its_base(
    train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_, last = train("run", eval__reward="bare_number", policy__kl_coef=0.1)
    assert "rounds of" in "".join(capsys.readouterr())
    results = evaluate(tmp_path / "both", tmp_path / "run", "--against", config.model.name)
    (after, before) = results["models"].values()
    assert after["metrics"] == of_step(last) and before["metrics"] == of_step(first)
    change = last["eval/accuracy"] - first["eval/accuracy"]
    assert results["difference"]["value"] == pytest.approx(change)
    low, high = results["difference"]["ci95"]
    shown = "".join(capsys.readouterr())
    assert low <= change <= high and f"{change:+.3f}" in shown
    # Nothing is trained, so the length of a run says nothing.
    assert "rounds of" not in shown
    rows = [json.loads(line) for line in (tmp_path / "both/responses.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and sum(row["grade"] for row in rows[:6]) / 6 == last["eval/accuracy"]
    (task,) = json.loads((tmp_path / "both/lm_eval.json").read_text())["results"].values()
    assert task["acc,none"] == last["eval/accuracy"] and task["acc_stderr,none"] >= 0
    # A checkpoint, and another task.
    checkpoint = tmp_path / "run/checkpoints/4"
    fewer = evaluate(tmp_path / "fewer", checkpoint, "eval.num_problems=3")
    assert fewer["models"][str(checkpoint)]["metrics"]["eval/num_problems"] == 3


@pytest.mark.slow
@pytest.mark.float32
def test_adapters_are_measured_in_their_run_and_alone(train: Runner, config: Config, tmp_path: Path) -> None:
    config.train_model.lora.rank = 4
    *_, last = train("run", eval__reward="bare_number")
    alone = shutil.copytree(tmp_path / "run/checkpoints/4/model", tmp_path / "alone")
    results = evaluate(tmp_path / "both", tmp_path / "run", "--against", alone)
    in_run, apart = (entry["metrics"] for entry in results["models"].values())
    assert in_run == of_step(last)
    assert apart["eval/accuracy"] == last["eval/accuracy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all"], "error: model.name=nowhere/at/all: there is no such folder"),
        (["~nobody/at"], "error: model.name=~nobody/at: there is no such folder"),
        (["two words"], "error: model.name=two words: there is no such folder, and a name on the"),
        (["empty"], "error: model.name=empty: the folder holds no config.json"),
        (["run"], "error: run: this run has no complete checkpoint"),
        (["empty", "--config-dir=nowhere"], "error: --config-dir=nowhere: there is no such folder"),
        (["file"], "error: model.name=file: this is a file; write a folder saved by save_pretrained"),
        (
            [],
            "error: command line: the following arguments are required: MODEL_OR_RUN; write what ",
        ),
        (["empty", "--bogus"], "error: command line: unrecognized arguments: --bogus"),
        (["empty", "eval.num_problem=3"], "error: eval.num_problem=3: there is no key"),
        (
            ["empty", "eval.num_problems=1,2"],
            "error: eval.num_problems=1,2: several values make a sweep, which this command does not",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(message)
    assert not (tmp_path / "evaluations").exists()


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("env=gsm8k", "write --config-name=grpo_gsm8k beside it"),
        ("+policy=dapo", "write --config-name=grpo_gsm8k beside it"),
        ("eval.num_problems=1,2", "write a single value of eval.num_problems instead"),
    ],
)
def test_what_a_run_of_its_own_configuration_cannot_take(
    word: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run/checkpoints/4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.setattr(model_argument, "config_of", lambda checkpoint: Config())
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "run"), word])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(f"error: {word}: ") and fix in line


def test_a_checkpoint_from_before_a_key_was_renamed_is_read(tmp_path: Path) -> None:
    cfg = Config()
    cfg.inference_model.max_logprob_diff = 0.5
    written = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    (tmp_path / "config.yaml").write_text(written.replace("max_logprob_diff", "max_logprob_gap"))
    assert model_argument.config_of(tmp_path) == cfg


@pytest.mark.parametrize(
    "text",
    [
        "env: {system_prompt: '${oc.env:HOME}'}",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "- 1",
        "model: !!python/object:os.system {}",
    ],
)
def test_the_configuration_of_somebody_elses_run_is_read_as_plain_values(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be read .*; write the folder of another"):
        model_argument.config_of(tmp_path)


CODE = {"marker": "MARK.py:score", "length": "MARK.py:score"}


@pytest.mark.parametrize(
    ("section", "key", "value", "written"),
    [
        ("model", "trust_remote_code", True, {"model.trust_remote_code": True}),
        (
            "reward",
            "functions",
            CODE,
            {"reward.functions": {"marker": "a.py:b"}, "reward.functions.length": "a.py:b"},
        ),
        ("reward", "sandbox", False, {"reward.sandbox": True}),
        ("env", "dataset", "MARK.py:problems", {"env.dataset": "gsm8k"}),
        ("env", "environment", "MARK.py:Game", {"env.environment": None}),
        ("env", "environment", "openenv:touch ran {port}", {"env.environment": None}),
        ("env", "tools", ["calculator", "MARK.py:search"], {"env.tools": []}),
        ("env", "tools", ["mcp:touch ran"], {"env.tools": []}),
        ("env", "mixture", [{"dataset": "MARK.py:problems"}], {"env.mixture": []}),
        ("env", "mixture", [{"dataset": "gsm8k", "reward": {"functions": CODE}}], {"env.mixture": []}),
        ("ray", "address", "10.0.0.1:6379", {"ray.address": None}),
        ("inference_model", "server_python", "evil/python", {"inference_model.server_python": None}),
        ("inference_model", "engine_args", {"a": "b"}, {"inference_model.engine_args": {"a": "c"}}),
        # It may not take the warning off the screen.
        ("inference_model", "server_python", "\x1b[2K\revil", {"inference_model.server_python": None}),
    ],
)
def test_code_that_the_configuration_of_a_run_names_does_not_run_unasked(
    section: str,
    key: str,
    value: Any,
    written: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MARK.py").write_text("open('ran', 'w')")
    checkpoint = tmp_path / "run/checkpoints/4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    cfg = Config()
    setattr(getattr(cfg, section), key, value)
    monkeypatch.setattr(model_argument, "config_of", lambda checkpoint: cfg)
    with pytest.raises(SystemExit) as stopped:
        main(["run"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and not (tmp_path / "ran").exists()
    assert line.startswith("error: run: the configuration of this run names code that would run here: ")
    assert line.endswith(
        f": {section}.{key}={printable(show(value))}; look at it, and write --trust-run too if you trust it"
    )
    # Values that the user writes are his.
    run = model_argument.read("run")
    model_argument.check_trusted(run, cfg, written)
    if key == "functions":
        written = {"reward.functions": {"marker": "a.py:b"}}
        with pytest.raises(ConfigError, match=r": reward\.functions={length:MARK.py:score}; look"):
            model_argument.check_trusted(run, cfg, written)
    if key == "trust_remote_code":
        with pytest.raises(
            ConfigError, match=r"^model.trust_remote_code=true: the configuration of the run run "
        ):
            model_argument.with_model(Config(), run, tmp_path / "merged", trusted=False)
        model_argument.with_model(Config(), run, tmp_path / "merged", trusted=True)


def test_the_address_of_a_judge_of_a_run_is_shown_before_it_gets_a_key(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    run, cfg = model_argument.read(str(tmp_path / "run")), Config()
    cfg.reward.functions = {"own": "judge"}
    cfg.reward.args = {"own": {"url": "http://evil.test/v1", "key_variable": "OPENAI_API_KEY"}, "other": {}}
    with pytest.raises(ConfigError, match=r"reward\.args=\{own:.*evil\.test.*OPENAI_API_KEY.*--trust-run"):
        model_argument.check_trusted(run, cfg, {"reward.functions": {"own": "judge"}})


def test_a_folder_for_results_that_cannot_be_made_is_one_line(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file/results"
    with pytest.raises(SystemExit) as stopped:
        main([str(tiny_model_dir), "--config-name=grpo_quickstart", f"--output={folder}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(f"error: --output={folder}: the folder cannot be made")


def test_the_first_result_is_kept_if_the_second_model_fails(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(cfg: Config, checkpoint: Path | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
        if cfg.model.name != str(tiny_model_dir):
            raise ModelError("it cannot be loaded")
        metrics = {"eval/accuracy": 0.25, "eval/accuracy_low": 0.1, "eval/accuracy_high": 0.5}
        # Two responses to each problem.
        rows = [{"id": str(at // 2), "grade": float(at < 2)} for at in range(8)]
        return {**metrics, "eval/num_problems": 4}, rows

    monkeypatch.setattr(job, "evaluate_problems", measure)
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    with pytest.raises(SystemExit) as stopped:
        evaluate(tmp_path / "both", tiny_model_dir, "--against", other, "inference_model.max_model_len=512")
    output = capsys.readouterr()
    assert stopped.value.code == 2 and output.err.endswith("error: it cannot be loaded\n")
    assert "held-out accuracy, 4 problems\n  0.250   (95 % interval 0.100 to 0.500)" in output.out
    (results,) = json.loads((tmp_path / "both/evaluation.json").read_text())["models"].values()
    assert results["value"] == 0.25
    assert len((tmp_path / "both/responses.jsonl").read_text().splitlines()) == 8


def test_the_interval_of_a_paired_difference() -> None:
    # Agresti and Min (2005) for 10 gained, 2 lost of 50: the mean difference with half a pair more in
    # each of the four cases, and 1.96 of its standard errors.
    pairs = [(1.0, 0.0)] * 10 + [(0.0, 1.0)] * 2 + [(1.0, 1.0)] * 38
    mean, (low, high) = paired_interval(pairs)
    assert mean == pytest.approx(0.16)
    assert (low, high) == pytest.approx((0.153846 - 0.129306, 0.153846 + 0.129306), abs=1e-5)
    # Models that agree everywhere may still differ.
    mean, (low, high) = paired_interval([(1.0, 1.0)] * 20)
    assert mean == 0.0 and -0.15 < low < 0.0 < high < 0.15
    mean, (low, high) = paired_interval([(0.5, 0.2), (0.6, 0.4), (0.9, 0.5)])
    assert mean == pytest.approx(0.3) and low < 0.3 < high
    # Of five pairs, those of the normal distribution would hold in 88 %.
    draw, held = random.Random(0), 0
    for _ in range(2_000):
        low, high = paired_interval([(draw.gauss(0.3), 0.0) for _ in range(5)])[1]
        held += low <= 0.3 <= high
    assert 0.93 <= held / 2_000 <= 0.97


def test_intervals_hold_where_questions_word_the_same_problem() -> None:
    """240 questions of 40 problems, of which some have many wordings, and which are not equally hard."""
    draw, trials, held = np.random.default_rng(0), 1_000, np.zeros(5)
    for _ in range(trials):
        sizes = draw.multinomial(200, draw.dirichlet(np.full(40, 3.0))) + 1
        problems = np.repeat(np.arange(40), sizes).tolist()
        first, second = (
            (draw.random(240) < np.repeat(draw.uniform(0.2, 1.0, 40), sizes)).astype(float).tolist()
            for _ in range(2)
        )
        share, pairs = effective_share(first, problems), list(zip(first, second, strict=True))
        intervals = [
            wilson(sum(first) * share, 240 * share),
            mean_interval(first, (), problems) or (0.0, 0.0),
            paired_interval(pairs, (), problems)[1],
            wilson(sum(first), 240),
            paired_interval(pairs)[1],
        ]
        truths = (0.6, 0.6, 0.0, 0.6, 0.0)
        held += [low <= truth <= high for (low, high), truth in zip(intervals, truths, strict=True)]
    *by_problem, by_question, paired_by_question = held / trials
    assert all(0.93 <= share <= 0.99 for share in by_problem)
    assert by_question < 0.85 and paired_by_question < 0.85


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_intervals_of_nearly_equal_answers_do_not_collapse(wrong: int) -> None:
    # 32 problems in 8 wordings each. One wrong answer says little of how alike the others are.
    values, problems = [0.0] * wrong + [1.0] * (256 - wrong), [number % 32 for number in range(256)]
    share = effective_share(values, problems)
    low, _ = wilson(sum(values) * share, 256 * share)
    assert 0.88 <= low <= 0.955 < wilson(sum(values), 256)[0]


def test_wordings_that_are_answered_alike_say_as_much_as_their_problems() -> None:
    values, problems = [1.0, 0.0, 1.0, 0.0, 1.0], "abcde"
    alone = design_effect(values, problems)
    assert alone == 1.0
    # Three wordings of each.
    variances = [np.var(part, ddof=1) / len(part) for part in (values, values * 3)]
    differing = np.sum(deviations := (np.array(values) - 0.6) ** 2) ** 2 / np.sum(deviations**2)
    effect = (variances[0] / variances[1] * differing + 3 * 0.5) / (differing + 0.5)
    assert design_effect(values * 3, problems * 3) == pytest.approx(effect)
    # Nothing shows how alike they are where no answer differs, not even by rounding.
    for value in (1.0, 0.1):
        assert design_effect([value] * 15, problems * 3) == pytest.approx(3.0)
    # Few problems have the quantile of Student's t in place of the normal one.
    quantiles = stats.t.ppf(0.975, 4) / stats.norm.ppf(0.975)
    assert effective_share(values * 3, problems * 3) == pytest.approx(1 / effect / quantiles**2, rel=0.01)
    error = math.sqrt(np.var(values * 3, ddof=1) / 15 * effect)
    low, high = mean_interval(values * 3, (), problems * 3) or (0.0, 0.0)
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 4) * error, rel=0.01)
    # One problem shows nothing of others.
    assert design_effect([1.0, 0.0], "aa") == math.inf
    assert mean_interval([1.0, 0.0], (), "aa") is None
    assert paired_interval([(1.0, 0.5), (0.0, 0.5)], (), "aa") == (0.0, (-math.inf, math.inf))
    low, high = paired_interval([(1.0, 0.0), (0.0, 0.0)], (), "aa")[1]
    assert -1.0 < low < -0.5 and high == pytest.approx(0.98, abs=0.01)


def of_losses(name: str, rows: list[tuple[float, int]]) -> Measured:
    loss = sum(grade * tokens for grade, tokens in rows) / sum(tokens for _, tokens in rows)
    problems = [{"id": str(at), "grade": grade, "tokens": tokens} for at, (grade, tokens) in enumerate(rows)]
    return Measured(name, {"eval/loss": loss, "eval/num_problems": len(rows)}, problems)


def test_losses_and_their_difference_are_per_token() -> None:
    # The second model is better on the long solution, and worse on the three short ones.
    first = of_losses("first", [(2.0, 1), (2.0, 1), (2.2, 1), (1.0, 97)])
    second = of_losses("second", [(1.0, 1), (1.1, 1), (1.0, 1), (1.5, 97)])
    mean, (low, high) = difference(first, second)
    assert mean == pytest.approx(first.primary[0] - second.primary[0]) and low < mean < high
    assert mean == pytest.approx((1.0 + 0.9 + 1.2 - 0.5 * 97) / 100)
    value, bounds = first.primary
    assert bounds is not None and bounds[0] < value < bounds[1]
    # Losses that are equal leave no doubt of their mean, however many tokens they have.
    assert mean_interval([1.0, 1.0], [3, 9]) == (1.0, 1.0)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 40])
def test_the_interval_of_a_mean_is_that_of_students_t_distribution(count: int) -> None:
    values = [math.sin(index) for index in range(count)]
    by_scipy = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(by_scipy, rel=0.01)


def test_a_problem_with_several_responses_counts_once() -> None:
    grades = {"a": [1.0, 1.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 1.0], "c": [1.0] * 4}
    rows = [{"id": id, "grade": grade} for id, values in grades.items() for grade in values]
    metrics = {"eval/accuracy": 2 / 3, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.9}
    model = Measured("model", {**metrics, "eval/num_problems": 3}, rows)
    worse = Measured("worse", model.metrics, [{**row, "grade": 0.0} for row in rows])
    assert model.num_problems == 3
    entries = lm_eval("task", {}, model)
    assert entries["n-samples"] == {"task": {"original": 3, "effective": 3}}
    deviation = math.sqrt(sum((value - 2 / 3) ** 2 for value in (0.75, 0.25, 1.0)) / 2 / 3)
    assert entries["results"]["task"]["acc_stderr,none"] == pytest.approx(deviation)
    mean, (_, high) = difference(model, worse)
    assert mean == pytest.approx(2 / 3) and high - mean == pytest.approx(4.3 * deviation, rel=0.1)
    # Of two of them that word one problem, the error and the interval are wider.
    same = {"a": "x", "c": "x"}
    first, second = (
        Measured("", each.metrics, [{**row, "problem": same.get(row["id"], "y")} for row in each.rows])
        for each in (model, worse)
    )
    worded = math.sqrt(deviation**2 * design_effect([0.75, 0.25, 1.0], ["x", "y", "x"]))
    assert lm_eval("task", {}, first)["results"]["task"]["acc_stderr,none"] == pytest.approx(worded)
    assert difference(first, second)[1][1] > high
