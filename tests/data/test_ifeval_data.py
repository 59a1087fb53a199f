"""Loading IFEval: composed prompts to train on, the benchmark to evaluate on, and what goes wrong."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.data.identity import question_key
from torchrl_grpo.data.ifeval import load
from torchrl_grpo.errors import DataError, UserError


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "key": i,
            "prompt": f"Say something about the number {i}.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        }
        for i in range(count)
    ]


def _config(folder: Path, rows: list[dict[str, Any]], **env: Any) -> Config:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cfg = Config()
    cfg.env.dataset = "ifeval"
    cfg.env.data_path = str(path)
    cfg.env.task_size = 30
    cfg.eval.num_problems = 4
    for name, value in env.items():
        setattr(cfg.env, name, value)
    return cfg


def test_load_trains_on_composed_prompts_and_holds_out_the_benchmark(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problems = load.load(_config(tmp_path, _rows(10)))
    assert len(problems.train) == 30
    assert len(problems.held_out) == 4
    assert all(example.messages[-1]["content"].startswith("Say something") for example in problems.held_out)
    assert not any(example.messages[-1]["content"].startswith("Say something") for example in problems.train)
    assert len({example.id for example in [*problems.train, *problems.held_out]}) == 34


def test_load_is_the_same_twice_and_another_seed_trains_on_other_prompts(tmp_path: Path) -> None:
    cfg = _config(tmp_path, _rows(10))
    first, again = load.load(cfg), load.load(cfg)
    assert first == again
    cfg.seed = 1
    other = load.load(cfg)
    assert other.train != first.train
    assert other.held_out == first.held_out


def test_no_composed_prompt_is_a_benchmark_prompt_even_one_that_is_not_held_out(tmp_path: Path) -> None:
    composed = load.load(_config(tmp_path, _rows(10))).train
    rows = [{**row, "prompt": composed[i].messages[-1]["content"]} for i, row in enumerate(_rows(10))]
    problems = load.load(_config(tmp_path, rows))
    assert len(problems.train) == 30
    assert not {row["prompt"] for row in rows} & {row.messages[-1]["content"] for row in problems.train}


def test_training_on_ifeval_warns_and_leaves_the_held_out_rows_alone(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="train_on_ifeval"):
        problems = load.load(_config(tmp_path, _rows(10), train_on_ifeval=True))
    assert len(problems.train) == 6
    assert len(problems.held_out) == 4
    assert not {question_key(row) for row in problems.train} & {
        question_key(row) for row in problems.held_out
    }


def test_training_on_all_of_ifeval_but_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.warns(UserWarning), pytest.raises(DataError, match=r"eval\.num_problems"):
        load.load(_config(tmp_path, _rows(4), train_on_ifeval=True))


def test_eval_data_path_is_held_out_instead(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    own = [{**row, "prompt": "My own " + row["prompt"]} for row in _rows(2)]
    other = _config(tmp_path / "own", own).env.data_path
    problems = load.load(_config(tmp_path, _rows(10), eval_data_path=other))
    assert [row.messages[-1]["content"][:6] for row in problems.held_out] == ["My own", "My own"]


# The last is what IFEval's authors call their file.
@pytest.mark.parametrize("split", ["test", "train", "input_data"])
def test_a_folder_with_one_split_will_do(tmp_path: Path, split: str) -> None:
    cfg = _config(tmp_path, _rows(10))
    (tmp_path / "rows.jsonl").rename(tmp_path / f"{split}.jsonl")
    cfg.env.data_path = str(tmp_path)
    assert len(load.load(cfg).held_out) == 4


def test_the_split_of_the_benchmark_is_chosen(tmp_path: Path) -> None:
    cfg = _config(tmp_path, _rows(10), eval_split="mine")
    (tmp_path / "rows.jsonl").rename(tmp_path / "mine.jsonl")
    (tmp_path / "test.jsonl").write_text("no JSON")
    cfg.env.data_path = str(tmp_path)
    assert len(load.load(cfg).held_out) == 4
    cfg.env.eval_split = "theirs"
    with pytest.raises(DataError, match=r"env\.eval_split=theirs: .*splits are mine, test"):
        load.load(cfg)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction_id_list": ["punctuation:no_colon"]}, "punctuation:no_colon"),
        ({"kwargs": []}, "one mapping per instruction"),
        ({"instruction_id_list": ["keywords:existence"]}, "'keywords'"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": 3}, "not a string"),
    ],
)
def test_a_bad_row_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = _rows(3)
    rows[1].update(change)
    with pytest.raises(DataError) as caught:
        load.load(_config(tmp_path, rows))
    assert "row 2 of" in str(caught.value) and "rows.jsonl" in str(caught.value)
    assert message in str(caught.value)


def test_missing_and_empty_places_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"env\.data_path=.*does not exist"):
        load.load(_config(tmp_path, _rows(3), data_path=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"env\.data_path=.*neither a test nor a train split"):
        load.load(_config(tmp_path, _rows(3), data_path=str(tmp_path / "empty")))
    with pytest.raises(UserError, match=r"env\.task_size=0"):
        load.load(_config(tmp_path, _rows(3), task_size=0))


@pytest.mark.slow
def test_without_hub_and_without_a_path_the_error_says_which_key_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"google/IFEval.*env\.data_path"):
        load.load(_config(tmp_path, _rows(3), data_path=None))
