"""Mixtures of data sets: shares, order, rewards and held-out problems of each part."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from grading import grades

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.config.values import AnswerFormat
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import question_key
from torchrl_grpo.data.load import load
from torchrl_grpo.data.mixture import Mixture
from torchrl_grpo.envs.stream import MIXTURE_BLOCK, MixtureStream, shares
from torchrl_grpo.errors import ConfigError, DataError
from torchrl_grpo.rewards.registry import build_grader, build_reward_set


def examples(name: str, count: int) -> list[Example]:
    return [
        Example(f"{name}/{number}", [{"role": "user", "content": f"{name} {number}"}])
        for number in range(count)
    ]


def stream(
    seed: int = 0, weights: tuple[float, ...] = (0.7, 0.3), sizes: tuple[int, ...] = (50, 7)
) -> MixtureStream:
    parts = [
        (weight, examples(f"p{number}", size))
        for number, (weight, size) in enumerate(zip(weights, sizes, strict=True))
    ]
    return MixtureStream([example for _, part in parts for example in part], parts, seed)


def test_every_block_has_the_shares_and_every_part_its_own_epochs() -> None:
    made = stream()
    drawn = [made.draw(8) for _ in range(3 * MIXTURE_BLOCK // 8)]
    ids = [example.id for round_ in drawn for example in round_]
    for start in range(0, len(ids), MIXTURE_BLOCK):
        counts = Counter(identifier.partition("/")[0] for identifier in ids[start : start + MIXTURE_BLOCK])
        assert counts == {"p0": 700, "p1": 300}
    small = [identifier for identifier in ids if identifier.startswith("p1")]
    for epoch in range(len(small) // 7):
        assert len(set(small[7 * epoch : 7 * epoch + 7])) == 7, "an epoch has every problem once"
    assert small[:7] != small[7:14], "epochs are shuffled apart"


def test_the_order_is_a_function_of_the_seed_and_survives_a_resume() -> None:
    whole, again, other = stream(3), stream(3), stream(4)
    first = [example.id for _ in range(400) for example in whole.draw(5)]
    assert first == [again.at(number).id for number in range(2_000)]
    assert first[:50] != [other.at(number).id for number in range(50)]
    resumed = stream(3)
    resumed.load_state_dict({key: value for key, value in whole.state_dict().items()})
    assert resumed.drawn == whole.drawn == 2_000
    assert [example.id for example in resumed.draw(9)] == [example.id for example in whole.draw(9)]


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (1e-9, 1.0), (3, 3, 3), (5, 0.001, 0.002, 9)])
def test_shares_are_whole_and_near_the_weights(weights: tuple[float, ...]) -> None:
    counts = shares(weights, 1_000)
    assert sum(counts) == 1_000 and min(counts) >= 1
    for share, weight in zip(counts, weights, strict=True):
        assert share == pytest.approx(1_000 * weight / sum(weights), abs=len(weights) + 1)


# --- from a configuration ---------------------------------------------------------------------------------


def config(tmp_path: Path, *parts: dict[str, Any]) -> Config:
    for name in ("easy", "hard"):
        rows = [{"question": f"{name} {n}?", "answer": str(n)} for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config()
    cfg.eval.num_problems = 5
    cfg.env.mixture = list(parts) or [
        {
            "name": "easy",
            "dataset": "jsonl",
            "data_path": str(tmp_path / "easy.jsonl"),
            "weight": 3,
            "answer_format": "plain",
            "system_prompt": "Be brief.",
        },
        {
            "name": "hard",
            "dataset": "jsonl",
            "data_path": str(tmp_path / "hard.jsonl"),
            "answer_format": "tags",
            "reward": {"weights": {"exact_match": 2.0, "format": 0.5}},
        },
    ]
    return cfg


def test_each_part_has_its_prompts_and_its_held_out_problems(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    validate(cfg)
    mixture = load(cfg)
    assert isinstance(mixture, Mixture)
    assert Counter(example.part for example in mixture.train) == {"easy": 15, "hard": 15}
    assert Counter(example.part for example in mixture.held_out) == {"easy": 5, "hard": 5}
    easy, hard = mixture.train[0], mixture.train[-1]
    assert [m["role"] for m in easy.messages] == ["system", "user"] and "<answer>" not in easy.messages[1][
        "content"
    ]
    assert len(hard.messages) == 1 and "<answer>" in hard.messages[0]["content"]
    assert [weight for weight, _ in mixture.training_sets] == [3.0, 1.0]


@pytest.mark.parametrize("dataset", ["jsonl", "rows.py:problems"])
def test_own_data_in_a_mixture_keeps_its_prompt_unless_tags_are_asked_for(
    tmp_path: Path, dataset: str
) -> None:
    (tmp_path / "rows.py").write_text(
        'def problems():\n    return [{"question": f"easy {n}?", "answer": str(n)} for n in range(20)]\n'
    )
    own: dict[str, Any] = {"dataset": dataset.replace("rows", f"{tmp_path}/rows")}
    if dataset == "jsonl":
        own["data_path"] = str(tmp_path / "easy.jsonl")
    sums = {"dataset": "reasoning_gym", "task": "chain_sum"}
    parts = [own | {"name": "plain"}, own | {"name": "tags", "answer_format": "tags"}, sums]
    cfg = config(tmp_path, *parts)
    contents = [problems.train[0].messages[0]["content"] for problems in load(cfg).problems]  # type: ignore[attr-defined]
    plain, *others = ("<answer>" not in content for content in contents)
    assert plain and not any(others)
    assert contents[0].startswith("easy ") and contents[0].endswith("?")
    cfg.env.answer_format = AnswerFormat.equation
    assert [part.cfg.env.answer_format for part in mixture_parts(cfg)] == ["equation", "tags", "equation"]


def test_no_part_trains_on_what_another_part_holds_out(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    rows = [{"question": f"easy  {n}?", "answer": str(n)} for n in range(20)]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))
    generated = {
        "dataset": "reasoning_gym",
        "task": "chain_sum",
        "task_args": {"max_terms": 2, "max_digits": 1},
    }
    cfg.env.mixture += [generated | {"name": "one"}, generated | {"name": "two", "system_prompt": "Add."}]
    mixture = load(cfg)
    assert isinstance(mixture, Mixture)
    held_out = {question_key(example) for example in mixture.held_out}
    for part, problems in zip(mixture.parts, mixture.problems, strict=True):
        drawn = [problems.train[n] for n in range(min(300, len(problems.train)))]
        assert not held_out & {question_key(example) for example in drawn}, part.name
    # The two files have the same questions, with other templates: what is left of both is the same.
    assert {question_key(example) for example in mixture.problems[1].train} <= {
        question_key(example) for example in mixture.problems[0].train
    }


def test_a_part_that_is_held_out_as_a_whole_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    for name, question in (("small", "easy 3?"), ("other", "other?")):
        row = {"question": question, "answer": "3"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    path = {name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard", "small", "other")}
    cfg.eval.num_problems = 20
    cfg.env.mixture = [
        {"name": "large", "dataset": "jsonl", "data_path": path["hard"], "eval_data_path": path["easy"]},
        {"name": "small", "dataset": "jsonl", "data_path": path["small"], "eval_data_path": path["other"]},
    ]
    with pytest.raises(DataError, match=r"env\.mixture: every question of small is held out"):
        load(cfg)


def test_each_part_is_scored_and_graded_by_its_own_rewards(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    mixture = load(cfg)
    rewards = build_reward_set(cfg, mixture.first_examples())
    grader = build_grader(cfg, rewards, mixture.first_examples())
    assert rewards.names == ("easy/exact_match", "hard/exact_match", "hard/format")
    assert rewards.weights == (1.0, 2.0, 0.5)
    easy, hard = mixture.train[3], mixture.train[20]
    good = f"<think>so</think><answer>{hard.truth['answer']}</answer>"
    scores = rewards.score([good, easy.truth["answer"], "x"], [hard, easy, easy])
    assert [score.total for score in scores] == [2.5, 1.0, 0.0]
    assert {"hard/exact_match", "hard/format"} <= scores[0].parts.keys() and "easy/exact_match" not in scores[
        0
    ].parts
    assert scores[1].parts == {"easy/exact_match": 1.0}
    assert grader.metrics == ("accuracy", "easy/accuracy", "hard/accuracy") and grader.primary == "accuracy"
    assert grades(grader, good, hard) == {"accuracy": 1.0, "easy/accuracy": 0.0, "hard/accuracy": 1.0}
    assert grader.weights(easy) == {"accuracy": 1.0, "easy/accuracy": 1.0, "hard/accuracy": 0.0}
    grader.close()
    rewards.close()


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("gsm8k", r"env.mixture\[0\]=gsm8k: a part is a mapping"),
        ({"weight": 1}, "a part needs a data set"),
        ({"dataset": "jsonl"}, "part jsonl: env.data_path=null"),
        ({"dataset": "gsm9k"}, "part gsm9k: env.dataset=gsm9k.*gsm8k"),
        ({"dataset": "gsm8k", "num_envs": 3}, r"env.mixture\[0\].num_envs: a part has no such key"),
        ({"dataset": "gsm8k", "weights": 1}, r"\[0\].weights: a part has no such key; write weight instead"),
        ({"dataset": "gsm8k", "weight": 0}, r"env.mixture\[0\].weight=0: it must be a number greater than 0"),
        ({"dataset": "gsm8k", "weight": "much"}, "weight=much"),
        ({"dataset": "gsm8k", "task_size": "x"}, r"env.mixture\[0\].task_size=x"),
        ({"dataset": "gsm8k", "answer_format": "tag"}, r"env.mixture\[0\].answer_format=tag"),
        ({"dataset": "gsm8k", "reward": 1}, r"env.mixture\[0\].reward=1: it must be a mapping"),
        ({"dataset": "gsm8k", "reward": {"weight": {}}}, r"env.mixture\[0\].reward.weight"),
        ({"dataset": "gsm8k", "reward": {"weights": {"ifeval": 1.0}}}, "part gsm8k: .*cannot judge"),
        ({"dataset": "gsm8k", "eval_reward": "none"}, "part gsm8k: eval.reward=none"),
        ({"dataset": "gsm8k", "name": ""}, r"env.mixture\[0\].name"),
        ({"dataset": "gsm8k", "name": "a/b"}, r"env.mixture\[0\].name=a/b: it must be a name without /"),
        ({"dataset": "gsm8k", "task_size": 0}, r"env.mixture\[0\].task_size=0: it must be at least 1"),
        ({"dataset": "gsm8k", "reward": {"timeout_s": 0}}, r"env.mixture\[0\].reward.timeout_s=0"),
    ],
)
def test_a_mistake_in_a_part_names_the_part(tmp_path: Path, part: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        validate(config(tmp_path, part))


@pytest.mark.parametrize("dataset", ["reasoning_gym", "jsonl"])
def test_the_data_set_beside_a_mixture_needs_no_keys_of_its_own(tmp_path: Path, dataset: str) -> None:
    cfg = config(tmp_path, {"dataset": "gsm8k"}, {"dataset": "reasoning_gym", "task": "gcd"})
    cfg.env.dataset = dataset
    validate(cfg)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"env.task": "chain_sum"}, "each part of env.mixture has its own"),
        ({"env.train_split": "easy"}, "each part of env.mixture has its own"),
        ({"env.hub_subset": "main"}, "each part of env.mixture has its own"),
        ({"reward.weights": {"gsm8k": 1.0}}, "each part of env.mixture has its own"),
        ({"eval.reward": "gsm8k"}, "each part of env.mixture has its own"),
        ({"policy.reward_combination": "apart"}, "of which no group has all"),
    ],
)
def test_what_a_mixture_leaves_no_room_for_is_refused(
    tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    cfg = config(tmp_path)
    for key, value in change.items():
        group, _, leaf = key.partition(".")
        setattr(getattr(cfg, group), leaf, value)
    with pytest.raises(ConfigError, match=error):
        validate(cfg)


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, {"dataset": "gsm8k"}, {"dataset": "gsm8k"})
    with pytest.raises(ConfigError, match="two parts 'gsm8k'"):
        mixture_parts(cfg)


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        load(config(tmp_path, {"dataset": "jsonl", "data_path": str(tmp_path / "empty.jsonl")}))
