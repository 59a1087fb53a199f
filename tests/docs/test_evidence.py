"""The experiments of ``benchmarks.evidence``: their commands, their records, and the page made of them."""

from __future__ import annotations

import html
import json
import lzma
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from run_files import write_evaluations
from scipy import stats

from benchmarks.evidence import __main__ as command
from benchmarks.evidence import controls, last_step, page, picture, policies, published, records, with_trl
from benchmarks.evidence.experiment import Experiment
from benchmarks.evidence.experiments import EXPERIMENTS
from benchmarks.learning import Stage, first_model, folders_of
from torchrl_grpo.cli.checked_job import compose_job
from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import reward_weights
from torchrl_grpo.config.parsing import parse
from torchrl_grpo.data.load import load
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.observe.metrics import read_jsonl
from torchrl_grpo.rewards.registry import of_run
from torchrl_grpo.sweep import statistics as sweep_statistics

ARMS: dict[str, Any] = {"GRPO": (), "random": ()}


def made(arm: str, seed: int, before: list[float], after: list[float], **more: Any) -> dict[str, Any]:
    shared = {"ids": [str(number) for number in range(len(after))], "problems": list(range(len(after)))}
    return {"arm": arm, "seed": seed, "before": before, "after": after, "seconds": [10], **shared, **more}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_commands_of_an_experiment_are_accepted(experiment: str, tmp_path: Path) -> None:
    arms = EXPERIMENTS[experiment].arms
    small = first_model(arms, 0, tmp_path)
    stages = {stage.words: stage for arm in arms.values() for stage in arm}
    first = next(iter(stages.values()))
    once = replace(first, words=(*first.words, *EXPERIMENTS[experiment].once))
    for stage in (*stages.values(), once):
        needs_model = small is not None or stage.takes != "model.name"
        model = [f"{stage.takes}={small or 'smollm2-135m'}"] if needs_model else []
        method = "sft" if "sft" in stage.script else "grpo"
        names = [word for word in stage.words if word.startswith("--config-name=")]
        words = [word for word in stage.words if word not in names]
        name = names[0].removeprefix("--config-name=") if names else f"{method}_gsm8k"
        cfg = compose_job([*words, *model], name, None)
        assert cfg.train.method == method


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", [name for name, each in EXPERIMENTS.items() if "random reward" in each.arms]
)
def test_control_arms_are_rewarded_for_nothing_else(experiment: str) -> None:
    for arm, reward in (("reward for form", "form"), ("random reward", "chance")):
        name, *words = EXPERIMENTS[experiment].arms[arm][0].words
        cfg = compose_job([*words, "model.name=smollm2-135m"], name.removeprefix("--config-name="), None)
        assert {name: weight for name, weight in reward_weights(cfg).items() if weight} == {reward: 1.0}
        if reward == "form" and EXPERIMENTS[experiment].shape:
            assert cfg.reward.args == {"form": {"pattern": EXPERIMENTS[experiment].shape}}


def test_the_pages_are_those_of_the_records() -> None:
    present = {name: records.load(name) for name in EXPERIMENTS}
    for path, (head, experiments, summarized) in page.PAGES.items():
        assert page.page(head, experiments, present, summarized) == path.read_text()
        assert len(path.read_text().split()) < 1500
    assert any(present.values())
    assert all(EXPERIMENTS[name].outcome for name, rows in present.items() if rows)


def test_the_readme_has_the_responses_of_the_records() -> None:
    readme = page.README.read_text()
    assert page.with_samples(readme, records.load(page.SAMPLED)) == readme
    sums = records.load("sums")
    for arm in ("GRPO", "reward for form"):
        mean = np.mean([run["after"] for run in sums if run["arm"] == arm])
        assert f"comes to {mean:.3f}" in " ".join(readme.split()), arm


def test_what_a_model_wrote_stays_in_its_cell() -> None:
    lines = page.README.read_text().splitlines(keepends=True)
    marks = "".join(line for line in lines if line.startswith("<!--"))
    samples = [["1 + 1?", "a | b\n\n`<b>`\r_c_", "![x](y) www.a.com"]]
    other = {"arm": "TRL", "seed": 0, "samples": [["2 + 2?", "", ""]]}
    own = {"arm": "this project", "seed": 0, "samples": samples}
    text = page.with_samples(marks, [other, own])
    assert "2 + 2?" not in text
    (row,) = [line for line in text.split("\n") if "1 + 1?" in line]
    assert html.unescape(row) == "| 1 + 1? | a | b `<b>` _c_ | ![x](y) www.a.com |"
    assert row.count("|") == 4 and not {*"`!<_.\r"} & {*row}


def test_a_table_has_means_and_paired_differences_with_intervals() -> None:
    after = {"GRPO": [0.6, 0.8, 0.7], "random": [0.1, 0.4, 0.2]}
    rows = [made(arm, seed, [0.1], [value]) for arm in ARMS for seed, value in enumerate(after[arm])]
    first, second = page.table(Experiment("", "", ARMS), rows)
    differences = [value - other for value, other in zip(after["random"], after["GRPO"], strict=True)]
    half = stats.t.ppf(0.975, 2) * statistics.stdev(differences) / 3**0.5
    mean = statistics.fmean(differences)
    assert second[4] == f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
    assert (first[0], first[1], first[4], first[5]) == ("GRPO", "3", "", "10")
    assert first[2].startswith("0.700 [") and first[3].startswith("+0.600 [")


def cells_of(problems: Sequence[int], after: Sequence[list[float]]) -> list[str]:
    rows = [
        made("GRPO", seed, [0.0] * len(problems), values, problems=list(problems))
        for seed, values in enumerate(after)
    ]
    (cells,) = page.table(Experiment("", "", {"GRPO": ()}), rows)
    return cells


def test_wordings_of_a_problem_count_as_one_problem_in_intervals() -> None:
    after = [[0.1, 0.9, 0.4], [0.3, 0.8, 0.2]]
    alone = cells_of([0, 1, 2], after)
    # As many wordings of each problem, which are graded alike, say as much as one.
    assert cells_of([0, 1, 2] * 4, [values * 4 for values in after]) == alone
    # As many different problems say more.
    assert cells_of(range(12), [values * 4 for values in after]) != alone
    # Wordings of unequal numbers: means are over questions, and deviations add up by problem.
    problems, grades = [0, 0, 0, 1, 2, 2], np.array([[1, 0, 1, 1, 0, 0.5], [1, 1, 1, 0, 0, 0]])
    by_problem = np.empty((2, 3))
    for row, values in enumerate(grades):
        for problem in range(3):
            own = [grade - values.mean() for grade, at in zip(values, problems, strict=True) if at == problem]
            by_problem[row, problem] = values.mean() + sum(own) * 3 / 6
    mean, half = sweep_statistics.interval(by_problem)
    low, high = max(mean - half, 0.0), min(mean + half, 1.0)
    assert mean == pytest.approx(grades.mean())
    assert cells_of(problems, grades.tolist())[2] == f"{grades.mean():.3f} [{low:.3f}, {high:.3f}]"


def test_a_page_says_how_many_problems_the_questions_are_of() -> None:
    def section(problems: Sequence[int]) -> str:
        row = made("GRPO", 0, [0.0] * 3, [1.0] * 3, problems=list(problems))
        return page.page("", {"game": Experiment("", "It fails.", {"GRPO": ()})}, {"game": [row]})

    assert "\n3 held-out problems; " in section([0, 1, 2])
    assert "\n2 held-out problems in 3 questions; " in section([0, 1, 0])


def test_pairs_of_arms_have_their_difference_and_old_responses_their_mean_age() -> None:
    after = {("a", 0): 0.9, ("a", 1): 0.8, ("b", 0): 0.2, ("b", 1): 0.4, ("b", 2): 0.1, ("c", 3): 0.5}
    rows = [made(arm, seed, [0.0], [value], age=seed / 2) for (arm, seed), value in after.items()]
    experiment = Experiment("", "It fails.", {"a": (), "b": (), "c": ()}, contrasts=(("b", "a"), ("c", "a")))
    text = page.page("", {"game": experiment}, {"game": rows})
    mean, half = sweep_statistics.interval(np.array([[0.2 - 0.9], [0.4 - 0.8]]))
    low, high = max(mean - half, -1.0), min(mean + half, 1.0)
    assert text.count("|beside|") == 1
    assert f"|beside|difference|\n|---|---|---|\n|b|a|{mean:+.3f} [{low:+.3f}, {high:+.3f}]|\n\n" in text
    assert "|mean age|" in text and [cells[5] for cells in page.table(experiment, rows)] == [
        *("0.25", "0.50", "1.50")
    ]
    fresh = [{**row, "age": 0.0} for row in rows]
    assert "|mean age|" not in page.page("", {"game": experiment}, {"game": fresh})


def test_a_picture_of_many_arms_has_a_color_for_each(tmp_path: Path) -> None:
    arms = [f"arm {number}" for number in range(12)]
    curve = {"steps": [0, 8], "values": [0.0, 0.5], "clock": [0.0, 9.0]}
    rows = [made(arm, 0, [0.0], [0.5], **curve) for arm in arms]
    picture.draw("game", Experiment("", "", dict.fromkeys(arms, ()), times_steps=True), rows, tmp_path)
    drawn = (tmp_path / "evidence-game.svg").read_text()
    lines = re.findall(r'id="line2d_\d+">\s*<path d="[^"]*"[^>]*style="fill: none; stroke: (#\w{6})', drawn)
    assert len({*lines}) >= 12 and all(f">{arm}</text>" in drawn for arm in arms)


def test_further_values_of_an_evaluation_have_a_table_of_rises() -> None:
    experiment = Experiment("", "", ARMS, measures=("prompt_loose", "instruction_loose"))
    # Two prompts, with one and with three instructions.
    weights = {"prompt_loose": [1, 1], "instruction_loose": [1, 3]}
    after = [[[1.0, 0.0], [1.0, 1 / 3]], [[1.0, 0.0], [1.0, 2 / 3]], [[0.0, 0.0], [1.0, 1 / 3]]]
    rows = [
        made(
            "GRPO",
            seed,
            [0.0, 0.0],
            [1.0, 0.0],
            weights=weights,
            measures={"prompt_loose": [[0.0, 0.0], prompts], "instruction_loose": [[0.0, 0.0], each]},
        )
        for seed, (prompts, each) in enumerate(after)
    ]
    no_change = {"prompt_loose": [[1.0, 0.0]] * 2, "instruction_loose": [[1.0, 0.0], [0.0, 0.0]]}
    rows.append(made("random", 0, [0.0] * 2, [0.0] * 2, weights=weights, measures=no_change))
    (prompt, _, rise, unchanged), (instruction, before, of_instructions, fell) = page.measures_table(
        experiment, rows
    )
    assert (prompt, unchanged) == ("prompt loose", "+0.000")
    mean, half = sweep_statistics.interval(np.array([prompts for prompts, _ in after]))
    assert rise == f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    # Over instructions, of which those of a prompt say less than as many prompts.
    each = np.array([[first, second, second, second] for _, (first, second) in after])
    by_prompt = sweep_statistics.of_problems(each, [0, 1, 1, 1])
    mean, half = sweep_statistics.interval(by_prompt)
    assert mean == pytest.approx((3 * 1 + 1 + 2 + 1) / 12)
    assert of_instructions == f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    assert (instruction, before, fell) == ("instruction loose", "0.000", "-0.250")
    assert page.measures_table(Experiment("", "", ARMS), rows) == []


def test_policies_without_a_model_are_beside_the_runs_of_the_first_arm() -> None:
    rows = [
        made(
            "GRPO",
            0,
            [0.0, 0.0],
            [1.0, 0.0],
            policies={"one text": [[1.0, 1.0], [0.0, 1.0]]},
            findings=["mismatch"] * 2,
        ),
        made("GRPO", 1, [0.0, 0.0], [1.0, 1.0], findings=["mismatch", "entropy"]),
        made("random", 0, [0.0, 0.0], [0.0, 0.0], findings=["mismatch"]),
    ]
    *_, last = page.table(Experiment("", "", ARMS), rows)
    mean, half = sweep_statistics.interval(np.array([[0.0, 1.0], [0.0, 0.0]]))
    difference = f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    assert last == ["no model: one text", "", "1.000", "", difference, ""]
    assert page._policies_beyond(rows).endswith("come to: one text 0.500.\n")
    assert page._findings(rows) == "`entropy` (GRPO: 1), `mismatch` (GRPO: 2; random: 1)"
    assert page._findings([made("GRPO", 2, [0.0], [0.0])]) == ""


def write_config(folder: Path, held_out: int) -> Config:
    """Write the configuration of a run on the sums of ``sums.jsonl``, and return it."""
    cfg = OmegaConf.structured(Config)
    cfg.merge_with_dotlist(
        [
            "env.dataset=jsonl",
            f"env.data_path={folder}/sums.jsonl",
            "env.answer_format=plain",
            "reward.weights={gsm8k: 1.0}",
            f"eval.num_problems={held_out}",
        ]
    )
    (folder / ".hydra").mkdir()
    OmegaConf.save(cfg, folder / ".hydra/config.yaml")
    return parse(cfg)


def test_a_policy_is_graded_as_the_model_of_a_run_on_the_same_problems(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = write_config(tmp_path, 5)
    held_out = [example.id for example in load(cfg).held_out]
    ids = held_out[::-1]
    answers = {
        "right": lambda prompt: str(int(prompt.split()[0]) + 1),
        "even": lambda prompt: str(int(prompt.split()[0]) // 2 * 2 + 1),
    }
    graded = policies.grades(tmp_path, ids, answers)
    assert graded["right"] == [[1.0] * 5, [0.0] * 5]
    addend = {example.id: int(example.messages[-1]["content"].split()[0]) for example in load(cfg).held_out}
    assert graded["even"][0] == [1.0 - addend[id] % 2 for id in ids]


def test_the_first_name_is_that_of_the_last_question() -> None:
    prompt = (
        "Ada likes tea.\nWho likes tea?<|im_end|>\n<|im_start|>user\nTom mends socks. Zoe runs.\nWho runs?"
    )
    assert EXPERIMENTS["needle"].policies["the first name"](prompt) == "Tom"


def test_a_calculation_is_repeated_with_its_first_number() -> None:
    answers = [
        published._first_number(f"A solution.\nIt is {end}") for end in ("12-2=", "$1.5*4=", "(3+1)*2=")
    ]
    assert answers == ["12-2=12", "$1.5*4=1.5", "(3+1)*2=3"]


def test_responses_are_graded_with_other_problems_too(tmp_path: Path) -> None:
    # The grade of a sum is whether the response is its result. Those of a class modulo 37 have the same.
    count = 185
    rows = [{"question": f"{n:03d} + 1 =", "answer": str(n % 37)} for n in range(2 * count)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = write_config(tmp_path, count)
    examples = sorted(load(cfg).held_out, key=lambda example: example.id)
    responses = {example.id: str(example.truth["answer"]) for example in examples}
    expected = [
        statistics.fmean(
            examples[(at + places) % count].truth["answer"] == example.truth["answer"]
            for places in (37, 74, 111, 148)
        )
        for at, example in enumerate(examples)
    ]
    assert policies.dealt(tmp_path, responses) == expected and 0 < sum(expected) < count


def test_what_is_for_its_own_prompt_and_new_has_rows_with_intervals() -> None:
    rows = [
        made(
            "GRPO",
            seed,
            [0.0, 1.0],
            [1.0, 1.0],
            dealt=[[0.0, 0.5], [0.5, other]],
            repetitive=[[0, 0], [1, 0]],
            measures={},
        )
        for seed, other in enumerate((0.0, 0.25, 0.5))
    ]
    rises = np.array([[0.5, 0.5 - other] for other in (0.0, 0.25, 0.5)])
    mean, half = sweep_statistics.interval(rises)
    assert page.measures_table(Experiment("", "", ARMS, deals=True), rows) == [
        [
            "beyond other prompts",
            "0.250",
            f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]",
        ],
        ["without repetition", "0.500", "+0.000 [+0.000, +0.000]"],
    ]


@pytest.mark.parametrize(
    ("response", "repetitive"),
    [
        ("", True),
        ("*one* two three four", True),
        ("One two three four five.", False),
        ("[your name]\n\n[your name]\nDear friend of mine", True),
        ("[your name]\nDear friend of mine\n[my name]", False),
        ("I am here and I wait. " * 3, True),
        ("I am here and I wait. I am here and you do not.", False),
    ],
)
def test_a_response_that_repeats_itself_or_says_nothing_is_repetitive(
    response: str, repetitive: bool
) -> None:
    assert policies.is_repetitive(response) == repetitive


def test_only_the_first_record_has_the_grades_of_policies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = ended(tmp_path / "run", {0: {"p": 0.0}, 4: {"p": 1.0}})
    experiment = of_arms("GRPO", "random", policies={"one text": str.lower})
    monkeypatch.setattr(policies, "grades", lambda base, ids, each: {name: [[0.5], [0.0]] for name in each})
    with_policies = [
        (arm, seed)
        for arm in ("GRPO", "random")
        for seed in (0, 1)
        if "policies" in records.read_record(experiment, arm, seed, [run], run)
    ]
    assert with_policies == [("GRPO", 0)]


def test_an_arm_of_one_seed_has_no_interval_and_the_share_of_the_right_form() -> None:
    rows = [made("GRPO", 0, [0.0, 1.0], [1.0, 1.0], formed=[0.25, 1.0])]
    experiment = Experiment("", "", ARMS, shape="x")
    assert page.table(experiment, rows) == [["GRPO", "1", "1.000", "+0.500", "", "1.00", "10"]]
    assert page.start(experiment, rows) == "Before training: 0.500, and 0.25 in the right form."


def test_responses_and_seconds_to_a_value_lie_between_evaluations() -> None:
    curve = {"steps": [0, 4, 8], "responses": [80], "values": [0.0, 0.4, 0.6]}
    ours = {**curve, "clock": [0.0, 10.0, 30.0]}
    assert page.reached(ours, 0.5) == pytest.approx((60, 20))
    assert all(math.isnan(number) for number in page.reached(ours, 0.7))
    theirs = {**curve, "values": [0.0, 0.2, 0.8], "clock": [0.0, 50.0, 90.0]}
    rows = [made("GRPO", seed, [0.0], [0.6], **ours) for seed in range(2)]
    rows += [made("random", 0, [0.0], [0.8], **ours), made("random", 1, [0.0], [0.8], **theirs)]
    first, second = page.table(Experiment("", "", ARMS, times_steps=True, reach=0.5), rows)
    assert first[5:7] == ["60", "20"]
    # Theirs come to it after 6 steps, too, and 70 seconds.
    assert second[5:] == ["60 (+0 [+0, +0])", "45 (1.0 to 3.5 times)", "60"]
    rows[-1]["values"] = [0.0, 0.1, 0.2]
    assert page.table(Experiment("", "", ARMS, times_steps=True, reach=0.5), rows)[1][5:7] == [
        "not by 1 of 2 seeds",
        "",
    ]


@pytest.mark.slow
@pytest.mark.float32
def test_trl_is_given_the_problems_and_rewards_of_a_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    words = [f"model.name={tiny_model_dir}", "inference_model.backend=transformers", "env.num_envs=2"]
    words += ["env.repeats=2", "train.total_dialog_turns=12", "eval.num_problems=4", "eval.frequency=2"]
    # A model with random weights earns nothing with sums.
    (tmp_path / "own.py").write_text("def length(response, answer):\n    return len(response) % 5\n")
    words += [f"reward.functions={{length: '{tmp_path}/own.py:length'}}", "eval.reward=reasoning_gym"]
    words += ["reward.weights={length: 1.0}"]
    cfg = compose_job(words, "grpo_quickstart", None)
    run = tmp_path / "run"
    assert with_trl.run(cfg, run)["dialog_turns"] == 12
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]
    rollouts, graded, metrics = (
        [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        for name in ("rollouts", "evaluations", "metrics")
    )
    stream = PromptStream(load(cfg).train, cfg.seed, cfg.env.shuffle)
    drawn = [example.id for example in (stream.at(number) for number in range(6)) for _ in range(2)]
    assert [row["id"] for row in rollouts] == drawn
    assert [row["step"] for row in rollouts] == [1] * 4 + [2] * 4 + [3] * 4
    examples = {example.id: example for example in (stream.at(number) for number in range(6))}
    with closing(of_run(cfg, load(cfg))) as reward_set:
        scores = reward_set.score(
            [row["response"] for row in rollouts], [examples[row["id"]] for row in rollouts]
        )
    assert [row["reward"] for row in rollouts] == [score.total for score in scores]
    assert len({row["reward"] for row in rollouts}) > 1
    assert {row["step"] for row in graded} == {0, 2, 3} and len(graded) == 12
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert all("eval/accuracy" in row for row in metrics if row["step"] != 1)
    assert all(row["time/step_s"] > 0 for row in metrics[1:])
    with pytest.raises(ConfigError, match="TRL is given float32, AdamW, policy=grpo and one turn only"):
        with_trl.run(compose_job([*words, "policy=dapo"], "grpo_quickstart", None), tmp_path / "other")


def of_arms(*arms: str, **more: Any) -> Experiment:
    stage = Stage("train.py", ())
    return Experiment("", "", {arm: (stage,) * (1 + arm.count(",")) for arm in arms}, **more)


def ended(
    folder: Path, grades: dict[int, Any], best_of: list[float] | None = None, words: Sequence[str] = ()
) -> Path:
    run = write_evaluations(folder, grades)
    (run / ".hydra/hydra.yaml").write_text("hydra: {job: {name: grpo, config_name: quick}}\n")
    (run / ".hydra/overrides.yaml").write_text(json.dumps(words))
    rows = [{"step": step, "eval/accuracy": value} for step, value in zip(grades, (0.5, 0.75), strict=False)]
    rows[-1].update({"time/step_s": 5.0, "time/eval_s": 1.0})
    for row, value in zip(rows, best_of or [], strict=False):
        row["eval/pass_at_8"] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").write_text(json.dumps({"seconds": 9, "dialog_turns": 64, "steps": 4}))
    about = json.loads((run / ".hydra/about.json").read_text())
    (run / ".hydra/about.json").write_text(json.dumps({**about, "machine": "Linux", "started": "today"}))
    return run


def test_best_of_8_is_that_of_the_seeds_that_measured_it() -> None:
    rows = [made("GRPO", seed, [0.0], [1.0], passes=[0.25, best]) for seed, best in enumerate((0.5, 1.0))]
    text = page.start(Experiment("", "", ARMS), [*rows, made("GRPO", 2, [0.0], [1.0])])
    assert text.endswith(". Best of 8 (2 seeds): 0.250, and 0.750 after the first arm.")


def test_only_the_first_run_of_seed_0_measures_what_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def run(stages: Any, seed: int, runs: list[Path], words: tuple[str, ...], model: None) -> None:
        if words:
            measured.append((runs[-1], words))

    monkeypatch.setattr(command, "run_stages", run)
    monkeypatch.setattr(records, "read_record", lambda *_: {})
    monkeypatch.setattr(records, "save_responses", lambda *_: None)
    for name in ("_keep", "_write_page"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["evidence", "needle", "--folder", str(tmp_path)])
    command.main()
    assert measured == [(tmp_path / "needle/GRPO-0/0", EXPERIMENTS["needle"].once)]


def test_a_record_has_the_grades_before_and_after(tmp_path: Path) -> None:
    grades = {0: {"p": 0.0, "q": 1.0}, 4: {"p": 1.0, "q": [1.0, 0.0]}}
    run = ended(tmp_path / "run", grades, [0.5, 1.0])
    record = records.read_record(of_arms("GRPO", shape=r"run \w \d 0"), "GRPO", 1, [run], run)
    assert record["clock"] == [0, 4]
    assert (record["ids"], record["before"], record["after"]) == (["p", "q"], [0.0, 1.0], [1.0, 0.5])
    assert (record["formed"], record["seconds"], record["steps"]) == ([1.0, 0.75], [9], [0, 4])
    assert record["passes"] == [0.5, 1.0]
    first, second = record["samples"]
    assert policies.question_of("<|im_start|>user\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n") == "two"
    assert first == ["prompt of p", "run p 0 0", "run p 4 0"] and second[0] == "prompt of q"
    published = of_arms("GRPO", keeps_samples=False)
    assert "samples" not in records.read_record(published, "GRPO", 1, [run], run)
    records.save("made", [record, {**record, "seed": 2}], tmp_path / "records")
    assert records.load("made", tmp_path / "records") == [record, {**record, "seed": 2}]
    assert record["problems"] == [0, 1]
    with pytest.raises(ValueError, match="not all runs name the same problems of their questions"):
        records.save("made", [record, {**record, "problems": [0, 0]}], tmp_path / "records")
    with pytest.raises(ValueError, match="not all runs were measured on the same problems"):
        records.save("made", [record, {**record, "ids": ["p"]}], tmp_path / "records")
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    named = [{**line, "problem": "p"} if line["id"] == "q" else line for line in lines]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in named))
    assert records.read_record(of_arms("GRPO"), "GRPO", 1, [run], run)["problems"] == [0, 0]


def test_a_record_has_the_scores_that_an_experiment_measures(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = load(write_config(tmp_path, 2)).held_out
    first, second = (example.id for example in examples)
    base = ended(tmp_path / "base", {0: {first: 0.0, second: 0.0}})
    last = ended(tmp_path / "last", {4: {second: 1.0, first: 0.0}})
    shutil.copy(tmp_path / ".hydra/config.yaml", base / ".hydra")
    path = last / "evaluations.jsonl"
    answers = {first: "no", second: str(examples[1].truth["answer"])}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "response": answers[row["id"]]}) + "\n" for row in lines))
    experiment = of_arms("random", measures=("flexible",))
    record = records.read_record(experiment, "random", 1, [last], base)
    at = record["ids"].index(second)
    # The run of another arm may have been rewarded for something else: responses are graded again.
    assert record["measures"] == {"flexible": [[0.0, 0.0], [float(number == at) for number in range(2)]]}
    assert record["weights"] == {"flexible": [1, 1]}


def test_values_halfway_have_a_column() -> None:
    experiment = Experiment("", "", ARMS, shows_halfway=True)
    rows = [
        made(arm, seed, [0.0], [1.0], steps=[0, 4, 8], values=[0.0, value, 1.0])
        for arm, values in (("GRPO", (0.25, 0.5)), ("random", (0.5, 1.0)))
        for seed, value in enumerate(values)
    ]
    mean, half = sweep_statistics.interval(np.array([[0.25], [0.5]]))
    difference = f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    assert [row[-2] for row in page.table(experiment, rows)] == ["0.375", f"0.750 ({difference})"]
    assert [row[-2] for row in page.table(experiment, rows[::2])] == ["0.250", "0.500"], "one seed"
    with pytest.raises(ValueError, match="4 is not in list"):
        page.table(experiment, [{**rows[0], "steps": [0, 8]}])


def test_a_repeated_run_is_compared_with_its_record() -> None:
    record = made("GRPO", 1, [0.0, 0.0], [1.0, 0.5])
    assert (
        records.compared("sums", record, record) == "sums, GRPO, seed 1: all grades are those of the record\n"
    )
    other = {**record, "after": [1.0, 0.0]}
    assert "seed 1: 1 of 2 grades differ from the record" in records.compared("sums", record, other)
    moved = {**record, "ids": ["a", "b"]}
    assert "the held-out problems are not those of the record" in records.compared("sums", record, moved)


def test_runs_on_other_problems_end_the_command_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(records, "load", lambda _: [made("GRPO", 0, [0.0], [1.0])])
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    with pytest.raises(
        SystemExit, match=r"not all runs were measured on the same problems .* move this file"
    ):
        command._keep("sums", {**made("GRPO", 1, [0.0], [1.0]), "ids": ["other"]}, replace=True)
    assert not list(tmp_path.iterdir()), "what is there stays"
    assert "not those of the record" not in capsys.readouterr().out


def test_a_table_of_all_tasks_has_the_rise_and_the_leads_over_other_arms() -> None:
    after = {"GRPO": [0.6, 0.9], "reward for form": [0.2, 0.4], "random reward": [0.1]}
    rows = [
        made(arm, seed, [0.1], [value]) for arm, values in after.items() for seed, value in enumerate(values)
    ]
    arms: dict[str, Any] = {arm: () for arm in (*after, "SFT")}
    experiment = Experiment("", "It fails.", arms)
    text = page.page("", {}, {"game": rows}, {"game": experiment})
    mean, half = sweep_statistics.interval(np.array([[0.4], [0.5]]))
    lead = f"{mean:+.3f} [{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    (line,) = [line for line in text.splitlines() if line.startswith("|[Game]")]
    assert line.startswith("|[Game](results_refuted.md#game)|1|0.100|+0.650 [")
    assert line.endswith(f"|{lead}|+0.500||")
    section = page.page("", {"game": experiment}, {"game": rows}, {"game": experiment})
    assert "|[Game](#game)|" in section and "\nNot run: SFT.\n" in section
    # Its records were moved away.
    assert "|" not in page.page("", {}, {"game": []}, {"game": experiment})
    # A control has a seed that the first arm does not have yet.
    later = [*rows, made("random reward", 2, [0.1], [0.3])]
    assert line in page.page("", {}, {"game": later}, {"game": experiment})


def test_fresh_seeds_are_compared_alone() -> None:
    experiment = Experiment("", "", ARMS, seeds=2, fresh=range(2, 4), contrasts=(("random", "GRPO"),))
    after = {("GRPO", 0): 0.0, ("GRPO", 1): 0.0, ("GRPO", 2): 0.5, ("GRPO", 3): 0.75}
    after |= {("random", 0): 1.0, ("random", 1): 1.0, ("random", 2): 0.25, ("random", 3): 0.75}
    rows = [made(arm, seed, [0.0], [value]) for (arm, seed), value in after.items()]
    (_, alone) = page._contrasts(experiment, rows)
    mean, half = sweep_statistics.interval(np.array([[-0.25], [0.0]]))
    interval = f"[{max(mean - half, -1):+.3f}, {min(mean + half, 1):+.3f}]"
    assert alone == ["random, seeds 2 to 3 alone", "GRPO", f"-0.125 {interval}"]
    early = [row for row in rows if row["seed"] < 3]
    assert len(page._contrasts(experiment, early)) == 1, "one seed has no interval"


def test_all_responses_of_a_run_are_kept(tmp_path: Path) -> None:
    run = ended(tmp_path / "GRPO-1/0", {0: {"p": 0.0}, 4: {"p": 1.0}})
    sampled = {"step": 1, "prompt": "1 + 1 =", "response": "zwölf", "rewards": {"gsm8k": 0.0}}
    (run / "rollouts.jsonl").write_text(json.dumps(sampled) + "\n")
    for _ in range(2):
        records.save_responses("made", [tmp_path / "SFT-1/0", run], tmp_path / "responses")
    (path,) = (tmp_path / "responses").rglob("*.*")
    assert path.relative_to(tmp_path) == Path("responses/made/GRPO-1.jsonl.xz")
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    held_out = read_jsonl(run / "evaluations.jsonl")
    assert rows == [
        {"file": "rollouts.jsonl", **sampled},
        *({"file": "evaluations.jsonl", **row} for row in held_out),
    ]


def test_responses_are_those_of_recorded_runs() -> None:
    for folder in records.RESPONSES.iterdir():
        arms = EXPERIMENTS[folder.name].arms
        runs = {
            folders_of(arms[run["arm"]], arms, run["seed"], Path())[-1].parent.name: run
            for run in records.load(folder.name)
        }
        for path in folder.iterdir():
            run = runs[path.name.removesuffix(".jsonl.xz")]
            grades: dict[str, list[float]] = {}
            for line in lzma.decompress(path.read_bytes()).splitlines():
                if line.startswith(b'{"file": "evaluations'):
                    row = json.loads(line)
                    if row["step"] == run["steps"][-1] and row.get("grade") is not None:
                        grades.setdefault(row["id"], []).append(row["grade"])
            assert [statistics.fmean(grades[id]) for id in run["ids"]] == run["after"], path


def test_nothing_of_others_data_is_kept() -> None:
    for path in records.RESPONSES.iterdir():
        assert EXPERIMENTS[path.name].keeps_samples
    for name in published.EXPERIMENTS:
        assert not EXPERIMENTS[name].keeps_samples
        assert not any("samples" in record for record in records.load(name))


@pytest.mark.parametrize(
    ("experiment", "key"), [("needle", "env.data_path"), ("GSM8K-last", "env.task_args.path")]
)
def test_a_local_copy_of_the_data_goes_to_the_key_that_takes_it(
    experiment: str, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        command, "run_stages", lambda stages, seed, runs, words, model: overrides.append(words)
    )
    monkeypatch.setattr(records, "read_record", lambda *_: {})
    monkeypatch.setattr(records, "save_responses", lambda *_: None)
    for name in ("_keep", "_write_page"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    words = ["evidence", experiment, "--folder", str(tmp_path), "--data", "own", "--seed", "1"]
    monkeypatch.setattr("sys.argv", words)
    command.main()
    assert len(overrides) == len(EXPERIMENTS[experiment].arms)
    assert all(f"{key}=own" in each for each in overrides)


def test_a_record_has_the_commands_that_ran_without_paths_of_this_machine(tmp_path: Path) -> None:
    grades = {0: {"p": 0.0}, 4: {"p": 1.0}}
    base = ended(
        tmp_path / "needle/SFT-1/0", grades, words=["hydra.run.dir=/a/b", "env.data_path=/home/me/x"]
    )
    first = f"model.name={base}/checkpoints/4/model"
    words = [
        first,
        "own='/copy/benchmarks/evidence/controls.py:form'",
        "a={b: \\d+}",
        "logging.progress=false",
    ]
    last = ended(tmp_path / "needle/SFT-then-GRPO-1/1", grades, words=words)
    arm = "SFT, then GRPO"
    record = records.read_record(of_arms("SFT", arm), arm, 1, [base, last], base)
    assert [shlex.split(text) for text in record["commands"]] == [
        ["python", "train.py", "--config-name=quick", "env.data_path=PATH"],
        [
            *("python", "train.py", "--config-name=quick"),
            "model.name=FOLDER/needle/SFT-1/0/checkpoints/4/model",
            *("own='benchmarks/evidence/controls.py:form'", "a={b: \\d+}"),
        ],
    ]


def test_a_run_for_the_model_before_training_keeps_the_record_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[tuple[str, int]] = []
    known = [{"arm": "GRPO", "seed": 1}]
    monkeypatch.setattr(command, "run_stages", lambda *_: None)
    monkeypatch.setattr(command, "_write_page", lambda: None)
    monkeypatch.setattr(records, "load", lambda _: known)
    monkeypatch.setattr(records, "compared", lambda *_: "")
    monkeypatch.setattr(records, "save_responses", lambda *_: None)
    monkeypatch.setattr(
        records, "save", lambda _, rows: kept.extend((row["arm"], row.get("new")) for row in rows)
    )
    monkeypatch.setattr(
        records, "read_record", lambda _, arm, seed, *__: {"arm": arm, "seed": seed, "new": 1}
    )
    words = ["evidence", "needle", "--folder", str(tmp_path), "--seed", "1", "--data", "own"]
    monkeypatch.setattr("sys.argv", [*words, "--arm", "random reward"])
    command.main()
    assert kept == [("GRPO", None), ("GRPO", None), ("random reward", 1)]
    kept.clear()
    monkeypatch.setattr("sys.argv", [*words, "--arm", "GRPO"])
    command.main()
    assert kept == [("GRPO", 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["neddle"], "NAME=neddle: there is no such experiment; write one of sums, "),
        (["needle", "--arm", "random"], "--arm=random: needle has no such arm; write one of GRPO, "),
        (["needle", "--seed", "7"], "--seed=7: needle has no such seed; write one of 0, 1, 2, 3, 8"),
        (["needle"], "--folder: it is missing; write the folder for the runs"),
    ],
)
def test_arguments_that_name_nothing_are_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["evidence", *words])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["sums", "multiplication", "differences", "two-digit-sums"])
def test_a_prompt_shows_no_held_out_calculation(experiment: str) -> None:
    (stage, *_) = EXPERIMENTS[experiment].arms["GRPO"]
    name, *words = stage.words
    cfg = compose_job([*words, "model.name=smollm2-135m"], name.removeprefix("--config-name="), None)
    shown = f"{cfg.env.system_prompt} {cfg.env.prompt_template}"
    held_out = " ".join(example.question or "" for example in load(cfg).held_out)
    calculations = (set(re.findall(r"\d+ [-+*] \d+", text)) for text in (shown, held_out))
    # The page says so.
    assert set.intersection(*calculations) == ({"2 * 4"} if experiment == "multiplication" else set())


def test_an_arm_that_was_not_evaluated_at_its_start_takes_that_of_the_first_arm(tmp_path: Path) -> None:
    base = ended(tmp_path / "base", {0: {"p": 0.0, "q": 1.0}, 4: {"p": 1.0, "q": 1.0}}, [0.5, 1.0])
    taught, last = (ended(tmp_path / name, {4: {"p": 1.0, "q": 0.0}}) for name in ("taught", "last"))
    record = records.read_record(of_arms("SFT"), "SFT", 1, [taught], base)
    assert (record["before"], record["after"]) == ([0.0, 1.0], [1.0, 0.0])
    assert (record["steps"], record["values"], "passes" in record) == ([0, 4], [0.5, 0.5], False)
    (taught / "metrics.jsonl").write_text(json.dumps({"step": 4, "eval/accuracy": 0.25}) + "\n")
    arm = "SFT, then GRPO"
    assert records.read_record(of_arms(arm), arm, 1, [taught, last], base)["values"] == [0.25, 0.5]


def test_the_last_step_of_a_solution_is_left_out(tmp_path: Path) -> None:
    solutions = [
        "He has 2*3 = $<<2*3=6>>6.\nWith 4 more, 6+4 = $<<6+4=10>>10 are his.\n#### 10",
        "A calculation that does not give the answer: 2+2=<<2+2=4>>4, so five.\n#### 5",
        "No calculation.\n#### 7",
        "Words after the equals sign: 1+1 = two or <<1+1=2>>2\n#### 2",
        "1,000*2=<<1000*2=2000>>2,000\n#### 2,000",
        "x" * 400 + " 1+1=<<1+1=2>>2\n#### 2",
    ]
    rows = [json.dumps({"question": "How many?", "answer": solution}) for solution in solutions]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    assert list(last_step.load("test", str(tmp_path))) == [
        {"question": "How many?\n\nHe has 2*3 = $6.\nWith 4 more, 6+4 =", "answer": "10"},
        {"question": "How many?\n\n1,000*2=", "answer": "2000"},
    ]


def test_control_rewards_know_nothing_of_the_answer() -> None:
    assert [controls.form(text, None, r"-?\d+") for text in (" -7 ", "7.", "It is 7")] == [1.0, 0.0, 0.0]
    drawn = [controls.chance("the same", None) for _ in range(1000)]
    assert {*drawn} == {0.0, 1.0} and 400 < sum(drawn) < 600
