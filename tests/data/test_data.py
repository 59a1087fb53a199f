"""Data: what is read, what is refused and how, and that training and held-out problems never meet."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.config.values import ConstantGroups
from torchrl_grpo.data import problems, prompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import conversation, question_key
from torchrl_grpo.data.latex import last_boxed
from torchrl_grpo.data.load import load
from torchrl_grpo.data.rows import codec, sources
from torchrl_grpo.errors import ConfigError, DataError, UserError
from torchrl_grpo.rewards.registry import build_reward_set

ROOT = Path(__file__).resolve().parents[2]
SHARED_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gsm8k_rows(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n:,}"}
        for n in range(start, start + count)
    ]


def config(dataset: str = "gsm8k", num_problems: int = 5, **env: Any) -> Config:
    cfg = Config(env=EnvConfig(dataset=dataset, **env))
    cfg.eval.num_problems = num_problems
    return cfg


def questions(examples: Any) -> list[str]:
    return [example.messages[-1]["content"] for example in examples]


# --- gsm8k and the local sources ------------------------------------------------------------------


def test_gsm8k_truth_is_the_number_after_the_hashes_without_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", gsm8k_rows(700, start=400))
    problems_ = load(config(data_path=str(path), answer_format="plain"))
    by_question = {e.messages[-1]["content"]: e.truth for e in problems_.train}
    assert by_question["What is 1000 + 1000?"] == {"answer": "2000"}


def test_a_lone_file_is_split_the_same_way_whatever_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", gsm8k_rows(40))
    first, second = config(data_path=str(path)), config(data_path=str(path))
    second.seed = 7
    problems, two = load(first), load(second)
    assert problems.held_out == two.held_out
    assert len(problems.held_out) == 5 and len(problems.train) == 35
    assert not set(questions(problems.train)) & set(questions(problems.held_out))
    assert len({e.id for e in [*problems.train, *problems.held_out]}) == 40


def test_a_folder_of_splits_uses_its_test_split_and_drops_shared_questions(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", gsm8k_rows(10))
    write(tmp_path / "test.jsonl", gsm8k_rows(6, start=7))
    problems = load(config(data_path=str(tmp_path), num_problems=100, answer_format="plain"))
    assert questions(problems.held_out) == [f"What is {n} + {n}?" for n in range(7, 13)]
    assert questions(problems.train) == [f"What is {n} + {n}?" for n in range(7)]


def test_a_folder_without_a_test_split_is_split_off(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", gsm8k_rows(10))
    problems = load(config(data_path=str(tmp_path)))
    assert (len(problems.train), len(problems.held_out)) == (5, 5)


def test_eval_data_path_takes_the_place_of_the_test_split(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", gsm8k_rows(10))
    held_out = write(tmp_path / "b.jsonl", gsm8k_rows(3, start=9))
    problems = load(config(data_path=str(train), eval_data_path=str(held_out)))
    assert len(problems.held_out) == 3
    assert len(problems.train) == 9


def test_at_most_num_problems_are_held_out_and_each_question_once(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", gsm8k_rows(3))
    write(tmp_path / "test.jsonl", gsm8k_rows(20, start=10) * 2)
    problems = load(config(data_path=str(tmp_path), num_problems=8))
    assert len(set(questions(problems.held_out))) == len(problems.held_out) == 8


def test_data_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", gsm8k_rows(10))
    monkeypatch.chdir(tmp_path)
    assert len(load(config(data_path="a.jsonl")).train) == 5


def test_json_arrays_parquet_and_saved_datasets_read_alike(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = gsm8k_rows(10)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    split = tmp_path / "split"
    split.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), split / "train-00000-of-00001.parquet")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(
        {"train": table, "test": datasets.Dataset.from_list(gsm8k_rows(4, 50))}
    ).save_to_disk(str(tmp_path / "dict"))
    expected = load(config(data_path=str(write(tmp_path / "a.jsonl", rows))))
    for name in ("a.json", "a.parquet", "saved", "split"):
        problems = load(config(data_path=str(tmp_path / name)))
        assert (problems.train, problems.held_out) == (expected.train, expected.held_out), name
    both = load(config(data_path=str(tmp_path / "dict")))
    assert (len(both.train), len(both.held_out)) == (10, 4)


def test_a_byte_order_mark_blank_lines_and_odd_line_separators_do_no_harm(tmp_path: Path) -> None:
    lines = [
        json.dumps({"question": f"q{n}\u2028x", "answer": "#### 1"}, ensure_ascii=False) for n in range(6)
    ]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert len(load(config(data_path=str(tmp_path / "a.jsonl"))).train) == 1


@pytest.mark.slow
def test_the_whole_gsm8k(tmp_path: Path) -> None:
    folder = SHARED_GSM8K
    if not folder.is_dir():  # a checkout without the shared data beside it: rows of our own
        folder = tmp_path
        write(folder / "train.jsonl", gsm8k_rows(900, start=36))
        write(folder / "test.jsonl", gsm8k_rows(300, start=2_000))
    rows = sum(1 for _ in (folder / "train.jsonl").open(encoding="utf-8"))
    problems = load(config(data_path=str(folder), num_problems=200))
    assert (len(problems.train), len(problems.held_out)) == (rows, 200)
    assert problems.train[0].truth == {"answer": "72"}
    assert all(e.truth["answer"].lstrip("-").replace(".", "").isdigit() for e in problems.train)


# --- what is refused ------------------------------------------------------------------------------


def text_file(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


GOOD = '{"question": "q", "answer": "#### 1"}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ("\n\n", ["is empty"]),
        (GOOD + "{oops\n", ["line 2", "not valid JSON", "oops"]),
        (GOOD + "[1]\n", ["line 2", "not a JSON object"]),
        (GOOD + '{"question": "q", "answer": "no mark"}\n', ["row 2", "'####'", "no mark"]),
        (GOOD + '{"question": "q", "answer": "ends ####  "}\n', ["row 2", "'####'"]),
        ('{"prompt": "q", "answer": "#### 1"}\n', ["row 1", "'question'", "'prompt'", "'answer'"]),
        ('{"question": 3, "answer": "#### 1"}\n', ["row 1", "'question'", "int", "not a string"]),
        ('{"question": null, "answer": "#### 1"}\n', ["row 1", "'question'", "not a string"]),
        ('{"question": " ", "answer": "#### 1"}\n', ["row 1", "'question'", "empty"]),
        (GOOD, ["1 different question", "eval.num_problems=5", "env.eval_data_path"]),
    ],
)
def test_bad_files_name_the_row_and_the_mend(tmp_path: Path, text: str, words: list[str]) -> None:
    path = text_file(tmp_path / "a.jsonl", text)
    with pytest.raises(DataError) as caught:
        load(config(data_path=path))
    for word in [*words, "a.jsonl"]:
        assert word in str(caught.value)


def test_missing_files_splits_and_kinds(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"env\.data_path='nowhere\.jsonl' does not exist"):
        load(config(data_path="nowhere.jsonl"))
    path = str(write(tmp_path / "a.jsonl", gsm8k_rows(9)))
    with pytest.raises(DataError, match=r"env\.eval_data_path='nowhere\.jsonl' does not exist"):
        load(config(data_path=path, eval_data_path="nowhere.jsonl"))
    folder = tmp_path / "folder"
    write(folder / "tests.jsonl", gsm8k_rows(1))
    with pytest.raises(
        DataError, match=r"no train split; its splits are tests; write for example env\.train_split=tests"
    ):
        load(config(data_path=str(folder)))
    for name in ("test_sft", "train_sft"):
        write(tmp_path / "sft" / f"{name}.jsonl", gsm8k_rows(1))
    with pytest.raises(DataError, match=r"write for example env\.train_split=train_sft"):
        load(config(data_path=str(tmp_path / "sft")))
    with pytest.raises(DataError, match=r"'\.csv' file; give \.jsonl"):
        load(config(data_path=text_file(tmp_path / "a.csv", "question,answer")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9", "answer": "#### 1"}')
    with pytest.raises(DataError, match="not UTF-8"):
        load(config(data_path=str(tmp_path / "latin.jsonl")))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load(config(data_path=text_file(tmp_path / "a.parquet", "nonsense")))


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", gsm8k_rows(4)))
    with pytest.raises(DataError, match="nothing is left to train on"):
        load(config(data_path=path, eval_data_path=path))


def test_an_unknown_dataset_lists_the_known_ones() -> None:
    cfg = config()
    cfg.env.dataset = "gsm9k"
    with pytest.raises(ConfigError, match="none of gsm8k, math, ifeval, reasoning_gym, jsonl"):
        load(cfg)


# --- the hub ----------------------------------------------------------------------------------------


def test_an_unreachable_hub_names_env_data_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"openai/gsm8k \(main\).*HF_HUB_OFFLINE is set.*env\.data_path"):
        load(config())
    monkeypatch.setattr(sources, "why_unreachable", lambda: None)
    with pytest.raises(DataError, match=r"openai/gsm8k \(main\).*no route.*env\.data_path"):
        load(config())


def test_the_hub_is_asked_for_the_right_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    requests: list[tuple[str, str | None]] = []

    def answer(name: str, subset: str | None) -> dict[str, list[dict[str, str]]]:
        requests.append((name, subset))
        return {
            split: [
                {"problem": f"p{n}", "solution": f"\\boxed{{{n}}}"} | row
                for n, row in enumerate(gsm8k_rows(3, start))
            ]
            for split, start in (("train", 100), ("test", 200))
        }

    monkeypatch.setattr(datasets, "load_dataset", answer)
    load(config(num_problems=2))
    load(config(hub_name="me/mine"))
    load(config(hub_subset="socratic"))
    load(config("jsonl", hub_name="me/mine", hub_subset="s"))
    assert requests == [
        ("openai/gsm8k", "main"),
        ("me/mine", None),
        ("openai/gsm8k", "socratic"),
        ("me/mine", "s"),
    ]
    requests.clear()
    with pytest.raises(DataError, match="nothing is left"):
        load(config("math"))
    assert len(requests) == 7


def on_hub(folder: Path, parquet: bool = False, first: int = 0, **splits: int) -> str:
    """A data set as the datasets library reads it from the hub: a folder with a file for each split."""
    import datasets

    for number, (split, count) in enumerate(splits.items()):
        rows = datasets.Dataset.from_list(gsm8k_rows(count, first + 100 * number))
        folder.mkdir(exist_ok=True)
        if parquet:
            rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        else:
            rows.to_json(folder / f"{split}.jsonl")
    return str(folder)


@pytest.fixture
def library_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("library_cache")
@pytest.mark.parametrize("parquet", [False, True])
def test_a_hub_dataset_without_a_test_split_is_split(tmp_path: Path, parquet: bool) -> None:
    name = on_hub(tmp_path / "only_train", parquet, train=12)
    cfg = config(hub_name=name)
    problems = load(cfg)
    cfg.seed = 7
    assert (len(problems.train), len(problems.held_out)) == (7, 5)
    assert not {question_key(e) for e in problems.train} & {question_key(e) for e in problems.held_out}
    assert problems == load(cfg), "the same rows whatever the seed"
    assert len(load(config(hub_name=name, num_problems=0)).train) == 12


@pytest.mark.usefixtures("library_cache")
def test_a_stream_is_read_as_far_as_the_run_needs_it(tmp_path: Path) -> None:
    cfg = config("jsonl", hub_name=on_hub(tmp_path / "rows", train=90, test=40), shuffle_buffer=3)
    cfg.env.repeats, cfg.train.total_dialog_turns = 4, 40
    problems = load(cfg)
    # Ten that are drawn, five held out and three further ones; the same of the test split.
    assert (len(problems.train), len(problems.held_out)) == (18, 5)
    assert "rows is a stream, of which the first 18 rows are read" in problems.notes[0]
    cfg.policy.constant_groups, cfg.policy.max_refills = ConstantGroups.refill, 2
    assert len(load(cfg).train) == 38
    cfg.env.shuffle_buffer = None
    assert len(load(cfg).train) == 90
    cfg.env.shuffle_buffer, cfg.train.num_epochs = 3, 1.0
    with pytest.raises(ConfigError, match=r"train.num_epochs=1.0: a stream is not read to its end"):
        load(cfg)


def test_a_function_may_return_an_endless_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import itertools\n"
        "def load():\n"
        "    return ({'prompt': f'Greet guest number {n}.'} for n in itertools.count())\n"
    )
    cfg = config("mine.py:load", shuffle_buffer=50)
    cfg.env.repeats, cfg.train.total_dialog_turns = 4, 40
    assert len(load(cfg).train) == 10 + 50


@pytest.mark.usefixtures("library_cache")
@pytest.mark.parametrize("hub", [False, True])
def test_splits_are_chosen(tmp_path: Path, hub: bool) -> None:
    folder = on_hub(tmp_path / "rows", train=9, test=8, validation=7)
    place: dict[str, Any] = {"hub_name": folder} if hub else {"data_path": folder}

    def sizes(num_problems: Any = 99, **env: Any) -> tuple[int, int]:
        problems = load(config(num_problems=num_problems, **place, **env))
        return len(problems.train), len(problems.held_out)

    assert sizes() == (9, 8)
    assert sizes(eval_split="validation") == (9, 7)
    assert sizes(train_split="test") == (8, 7), "a split that is trained on is not taken to hold out"
    assert sizes(num_problems=4, train_split="validation", eval_split="validation") == (3, 4)
    assert sizes(num_problems=0, eval_split="nowhere") == (9, 0)
    for key in ("train_split", "eval_split"):
        with pytest.raises(DataError, match=rf"env\.{key}=dev: .*such split; its splits are .*env\.{key}="):
            sizes(**{key: "dev"})
    held_out = on_hub(tmp_path / "other", first=1000, test=3, hard=2)
    assert sizes(eval_data_path=held_out) == (9, 3)
    assert sizes(eval_data_path=held_out, eval_split="hard") == (9, 2)


def test_a_file_has_no_splits_to_choose(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", gsm8k_rows(9)))
    for key in ("train_split", "eval_split"):
        with pytest.raises(DataError, match=rf"env\.{key}=test: .*no splits; write env\.{key}=null"):
            other: dict[str, Any] = {key: "test"}
            load(config(data_path=path, **other))


# --- math and jsonl ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{unclosed", None),
        (r"\boxed{}", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_math_takes_answer_or_the_boxed_solution(tmp_path: Path) -> None:
    rows = [
        {"problem": r"Find \frac{a}{b}", "solution": r"It is \boxed{\frac{1}{2}}."},
        {"problem": "p1", "solution": r"\boxed{2}", "answer": "two"},
    ]
    held_out = str(write(tmp_path / "b.jsonl", [{"problem": "h", "answer": "1"}]))
    cfg = config("math", data_path=str(write(tmp_path / "a.jsonl", rows)), eval_data_path=held_out)
    assert [e.truth["answer"] for e in load(cfg).train] == [r"\frac{1}{2}", "two"]
    for row, word in [({"problem": "p", "solution": "none"}, "boxed"), ({"problem": "p"}, "neither")]:
        cfg.env.data_path = str(write(tmp_path / "c.jsonl", [row]))
        with pytest.raises(DataError, match=word):
            load(cfg)


def test_jsonl_takes_the_columns_of_env_fields(tmp_path: Path) -> None:
    rows = [{"frage": f"f{n}", "antwort": f" a{n} "} for n in range(8)]
    path = str(write(tmp_path / "a.jsonl", rows))
    problems = load(config("jsonl", data_path=path, fields={"question": "frage", "answer": "antwort"}))
    assert problems.train[0].truth["answer"].startswith("a")
    with pytest.raises(DataError, match=r"no column 'question', and its columns are 'frage', 'antwort'"):
        load(config("jsonl", data_path=path))
    with pytest.raises(ConfigError, match=r"env\.fields={frage:question}: frage is none of question"):
        load(config("jsonl", data_path=path, fields={"frage": "question"}))
    with pytest.raises(ConfigError, match=r"write env\.data_path"):
        load(config("jsonl"))


def test_answers_may_be_numbers(tmp_path: Path) -> None:
    numbers = [3, -4.0, 0.5, 1e300, 12345678901234567890]
    rows = [{"question": f"q{n}", "problem": f"q{n}", "answer": value} for n, value in enumerate(numbers)]
    path = str(write(tmp_path / "a.jsonl", rows))
    for dataset in ("jsonl", "math"):
        problems = load(config(dataset, num_problems=0, data_path=path))
        assert [e.truth["answer"] for e in problems.train] == [
            "3",
            "-4",
            "0.5",
            "1e+300",
            "12345678901234567890",
        ]
    for value in (True, float("inf"), [3]):
        row = {"question": "q", "answer": value}
        path = str(write(tmp_path / "b.jsonl", [row]))
        named = {"question": "question", "answer": "answer"}
        with pytest.raises(DataError, match=r"column 'answer' is .* not a string"):
            load(config("jsonl", num_problems=0, data_path=path, fields=named))
        # A column that nobody has named is for a reward of one's own.
        (example,) = load(config("jsonl", num_problems=0, data_path=path)).train
        assert example.truth == {} and example.columns["answer"] == value
    with pytest.raises(DataError, match="column 'question' is 3, of type int"):
        load(config("jsonl", data_path=str(write(tmp_path / "c.jsonl", [{"question": 3, "answer": 3}]))))


# --- prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"question": "question", "answer": "answer", "solution": "solution"}])
@pytest.mark.parametrize("null", [None, float("nan")])
def test_a_null_answer_is_none(tmp_path: Path, fields: dict[str, str], null: float | None) -> None:
    rows = [{"question": f"q{number}", "answer": null, "solution": None} for number in range(4)]
    path = str(write(tmp_path / "a.jsonl", rows))
    problems = load(config("jsonl", num_problems=2, data_path=path, fields=fields))
    assert all(row.truth == {} and row.solution == "" for row in (*problems.train, *problems.held_out))
    # Where some rows have an answer, a reward that compares with it is refused, and others are not.
    others = [{**row, "question": f"new {row['question']}"} for row in rows]
    mixed = str(write(tmp_path / "b.jsonl", [{"question": "new", "answer": "1", "solution": None}, *others]))
    held_out = load(config("jsonl", num_problems=9, fields=fields, data_path=path, eval_data_path=mixed))
    cfg = config("jsonl", num_problems=1, fields=fields, data_path=mixed)
    for examples in (load(cfg).first_examples(), held_out.first_examples(held_out=True)):
        with pytest.raises(ConfigError, match=r"exact_match: jsonl/\w+/2 has no answer .* to compare with"):
            build_reward_set(cfg, examples)
    cfg.reward.weights = {"format": 1.0}
    build_reward_set(cfg, load(cfg).first_examples()).close()


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Say hi."}, [{"role": "user", "content": "Say hi."}]),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, [{"role": "user", "content": "Hi"}]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, [{"role": "user", "content": "Hi"}]),
        ({"prompt": "no", "question": "yes"}, [{"role": "user", "content": "yes"}]),
    ],
)
def test_the_column_of_the_prompt_is_found(
    tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]
) -> None:
    path = str(write(tmp_path / "a.jsonl", [row]))
    (example,) = load(config("jsonl", 0, data_path=path, answer_format="plain")).train
    assert example.messages == messages and example.truth == {}
    with pytest.raises(DataError, match="has no column 'question', and its columns are 'text'"):
        load(config("jsonl", 0, data_path=str(write(tmp_path / "b.jsonl", [{"text": "?"}]))))


@pytest.mark.parametrize(("rows", "held_out"), [(2, 1), (10, 5), (16, 8), (40, 8), (300, 30), (2_300, 200)])
def test_a_tenth_of_ones_own_rows_is_held_out(tmp_path: Path, rows: int, held_out: int) -> None:
    path = str(write(tmp_path / "a.jsonl", [{"prompt": f"Tell me of {number}."} for number in range(rows)]))
    cfg = config("jsonl", data_path=path)
    cfg.eval.num_problems = None
    problems = load(cfg)
    assert (len(problems.train), len(problems.held_out)) == (rows - held_out, held_out)
    assert f"{held_out} of {rows} questions are held out; eval.num_problems=N" in problems.notes[0]
    # Where there are held-out rows, so many of them are taken.
    more = str(write(tmp_path / "b.jsonl", [{"prompt": f"Explain {number}."} for number in range(250)]))
    apart = load(Config(env=EnvConfig(dataset="jsonl", data_path=path, eval_data_path=more)))
    assert len(apart.train) == rows and len(apart.held_out) == 200 and not apart.notes


@pytest.mark.parametrize(
    ("dataset", "row", "column"),
    [
        ("jsonl", {"question": None, "answer": "1"}, "question"),
        ("gsm8k", {"question": "q", "answer": None}, "answer"),
        ("math", {"problem": "q", "answer": None}, "answer"),
    ],
)
def test_a_null_that_is_needed_is_named(
    tmp_path: Path, dataset: str, row: dict[str, str | None], column: str
) -> None:
    path = str(write(tmp_path / "a.jsonl", [row]))
    with pytest.raises(DataError, match=f"row 1 of .*: column '{column}' is null, not a string; fill it or"):
        load(config(dataset, num_problems=0, data_path=path))


def test_tags_are_asked_for_by_default_and_only_then() -> None:
    def content(dataset: str = "gsm8k", **env: Any) -> str:
        return prompts.messages(EnvConfig(**env), dataset, "Q?")[-1]["content"]

    default = content()
    assert default.startswith("Q?\n\n")
    assert all(tag in default for tag in ("<think>", "</think>", "<answer>", "</answer>", "number"))
    assert "<answer>" in content("math") and "<answer>" in content("reasoning_gym")
    assert content("ifeval") == "Q?"
    assert content(answer_format="plain") == "Q?"
    assert content(system_prompt="Be brief.") == "Q?"
    assert content(prompt_template="{question} Go.") == "Q? Go."


def test_the_system_prompt_comes_first() -> None:
    turns = prompts.messages(EnvConfig(system_prompt="S"), "gsm8k", "Q")
    assert turns == [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]


def test_braces_in_template_and_question_survive() -> None:
    env = EnvConfig(prompt_template=r"Box it: \boxed{x}. {question} {")
    content = prompts.messages(env, "math", r"\frac{1}{2} {question} {0}")[0]["content"]
    assert content == r"Box it: \boxed{x}. \frac{1}{2} {question} {0} {"


def test_a_template_without_the_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.prompt_template='Hello' .*\{question\}"):
        prompts.messages(EnvConfig(prompt_template="Hello"), "gsm8k", "Q")


# --- choosing ---------------------------------------------------------------------------------------


def test_conversations_that_end_alike_are_different_problems(tmp_path: Path) -> None:
    def chat(number: int, last: str) -> dict[str, Any]:
        turns = [("user", f"What is {number} plus {number}?"), ("assistant", "Which form?"), ("user", last)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"messages": messages, "answer": str(2 * number)}

    for name, numbers in (("train", range(50)), ("test", range(40, 60))):
        rows = [chat(number, "Digits  please.") for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load(
        config("jsonl", data_path=str(tmp_path), fields={"messages": "messages"}, num_problems=20)
    )
    assert (len(problems.train), len(problems.held_out)) == (40, 20)
    # A question is the same whether it is a text or a chat of one message.
    single = Example("x", [{"role": "system", "content": "s"}], question=conversation(
        [{"role": "user", "content": "a  b"}]))  # fmt: skip
    assert question_key(single) == question_key(Example("y", [{"role": "user", "content": "a b"}]))


def test_values_of_a_row_keep_their_kind_on_the_way_to_a_reward() -> None:
    row = {
        "list": np.array(["a", "b"], dtype=object),
        "numbers": np.arange(2_000),
        "no": np.bool_(False),
        "seven": np.int64(7),
        "half": np.float32(0.5),
        "tensor": torch.tensor([[1, 2], [3, 4]]),
        "nested": {"x": [np.int8(1), (2, None)], 3: {4}},
        "day": datetime.date(2026, 1, 2),
        "text": np.str_("t"),
    }
    columns = json.loads(json.dumps(Example("e", [], {}, row).plain()))["columns"]
    assert columns == {
        "list": ["a", "b"],
        "numbers": list(range(2_000)),
        "no": False,
        "seven": 7,
        "half": 0.5,
        "tensor": [[1, 2], [3, 4]],
        "nested": {"x": [1, [2, None]], "3": [4]},
        "day": "2026-01-02",
        "text": "t",
    }
    assert columns["no"] is False
    with pytest.raises(DataError, match=r"e: column 'picture' has a bytes, .* remove the column"):
        Example("e", [], {}, {"picture": b"png"}).plain()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"question": "cut \ud83d here", "answer": "1"}', r"row 2 of .*rows.jsonl: .* lone surrogate"),
        (
            '{"question": "q", "answer": "1", "n": ' + "1" * 5_000 + "}",
            r"line 2 of .*rows.jsonl cannot be read",
        ),
        ('{"question": ' + "[" * 100_000, r"line 2 of .*rows.jsonl cannot be read"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "1"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        load(config("jsonl", data_path=str(tmp_path / "rows.jsonl"), num_problems=0))


def test_choose_is_a_sample_in_the_source_order() -> None:
    examples = [Example(str(n), [{"role": "user", "content": f"q{n}"}]) for n in range(50)]
    chosen = problems.choose(examples, 10)
    numbers = [int(e.id) for e in chosen]
    assert numbers == sorted(numbers) and len(set(numbers)) == 10
    assert numbers != list(range(10))
    assert problems.choose(examples, 10) == chosen


# --- reasoning_gym ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_reasoning_gym_splits_are_disjoint_and_repeatable() -> None:
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    cfg = config("reasoning_gym", 60, task="chain_sum", task_args=args, task_size=300)
    problems, two = load(cfg), load(cfg)
    assert len(problems.train) == 300 and len(problems.held_out) == 60
    assert len(set(questions(problems.held_out))) == 60
    assert not set(questions(problems.train)) & set(questions(problems.held_out))
    assert two.train[17] == problems.train[17] and two.held_out == problems.held_out
    assert problems.train[-1] == problems.train[299]
    assert problems.train[3:5] == [problems.train[3], problems.train[4]]
    with pytest.raises(IndexError):
        problems.train[300]
    cfg.seed = 1
    other = load(cfg)
    assert questions(other.train) != questions(problems.train) and other.held_out == problems.held_out


def test_reasoning_gym_truth_survives_json() -> None:
    import reasoning_gym

    for task in ("chain_sum", "graph_color", "knights_knaves", "rearc", "gsm_symbolic"):
        example = load(config("reasoning_gym", 1, task=task, task_size=1, answer_format="plain")).train[0]
        truth = json.loads(json.dumps(example.truth))
        entry = codec.decode(truth["entry"])
        scorer = reasoning_gym.create_dataset(task, seed=0, size=1)
        assert truth["task"] == task
        assert entry["question"] == example.messages[-1]["content"]
        if entry["answer"] is not None:
            assert scorer.score_answer(entry["answer"], entry) == 1.0, task


@pytest.mark.slow
def test_every_task_of_reasoning_gym_loads_and_its_own_answer_is_right() -> None:
    from torchrl_grpo.data.reasoning_gym import task_names
    from torchrl_grpo.rewards.sandbox.gym_job import run

    names = task_names()
    assert len(names) >= 100
    unanswered = set()
    for task in names:
        if task == "composite":  # it has no default; see below
            continue
        problems = load(config("reasoning_gym", 1, task=task, task_size=1))
        truth = json.loads(json.dumps(problems.train[0].truth))
        answer = truth["entry"]["answer"]
        if answer is None:  # any answer with the right properties will do
            unanswered.add(task)
            assert 0.0 <= run({"answer": "none of these", "truth": truth}) < 1.0, task
        else:
            assert run({"answer": answer, "truth": truth}) == 1.0, task
    assert len(unanswered) < 10


def test_a_composite_task_takes_plain_dictionaries() -> None:
    args = {"datasets": [{"name": "chain_sum"}, {"name": "gcd", "weight": 2.0}]}
    problems = load(config("reasoning_gym", 4, task="composite", task_args=args, task_size=30))
    assert {e.truth["entry"]["metadata"]["source_dataset"] for e in problems.train} == {"chain_sum", "gcd"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, ["env.task", "chain_sum"]),
        ({"task": "chain_summ"}, ["'chain_summ'", "did you mean", "chain_sum"]),
        ({"task": "chain_sum", "task_args": {"terms": 3}}, ["terms", "min_terms"]),
        (
            {"task": "chain_sum", "task_args": {"min_terms": 9, "max_terms": 3}},
            ["env.task_args", "min_terms"],
        ),
        ({"task": "chain_sum", "task_args": {"seed": 3}}, ["env.task_args.seed=3", "seed"]),
        ({"task": "chain_sum", "task_size": 0}, ["env.task_size=0", "1 or more"]),
        ({"task": "chain_sum", "task_args": {"size": 3}}, ["env.task_args.size=3", "env.task_size"]),
    ],
)
def test_reasoning_gym_mistakes(env: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(config("reasoning_gym", **env))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, 3)),
        {1: "a", (2, 3): [None, 1.5]},
        {"__tuple__": [1]},
        {"a": {"__pairs__": 2}},
        [True, "x", {}],
        {"price": Fraction(7, 3), "all": (Fraction(2), 0.5)},
        {"__fraction__": [1, 2]},
    ],
)
def test_the_codec_loses_nothing(value: Any) -> None:
    back = codec.decode(json.loads(json.dumps(codec.encode(value))))
    assert back == value and type(back) is type(value)


def test_the_codec_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="set"):
        codec.encode({"a": {1, 2}})


# --- weight of the imports --------------------------------------------------------------------------


def test_local_files_load_without_torch_or_a_hub_client(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", gsm8k_rows(9))
    code = (
        "import sys; from torchrl_grpo.config import Config; from torchrl_grpo.data.load import load\n"
        f"cfg = Config(); cfg.env.data_path = {str(path)!r}; cfg.eval.num_problems = 2\n"
        "print(len(load(cfg).train), [m for m in ('torch', 'datasets', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "7 []"


@pytest.mark.slow
def test_reasoning_gym_imports_what_draws_for_the_tasks_that_compute_with_it() -> None:
    code = (
        "import sys; from torchrl_grpo.data.gym_library import reasoning_gym\n"
        "print('matplotlib' in sys.modules)\n"
        "game = reasoning_gym.create_dataset('game_of_life', size=1, seed=0)\n"
        "import cellpylib; print(game.score_answer(game[0]['answer'], game[0]), hasattr(cellpylib, 'plot'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "1.0", "True"]


def test_rows_say_where_they_are() -> None:
    assert sources.Row({}, 17, "f.jsonl").where == "row 17 of f.jsonl"
