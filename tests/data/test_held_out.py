"""Nothing that is held out is trained on: not in the same words, and not in others.

What makes problems the same is read from their questions here, and not asked of the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_except

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.identity import keys, problem_names
from torchrl_grpo.data.load import load as load_problems
from torchrl_grpo.data.mixture import Mixture
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs.episodes.build import with_prompts
from torchrl_grpo.errors import DataError

CONFIG = Path(__file__).resolve().parents[2] / "config"
Oracle = Callable[[str, Example], Hashable]


def text(example: Example) -> str:
    return " ".join(example.messages[-1]["content"].split())


def numbers(question: str, example: Example | None = None) -> Hashable:
    """The numbers of a question, in any order."""
    return tuple(sorted(re.findall(r"\d+(?:\.\d+)?", question)))


def signed(question: str, example: Example) -> Hashable:
    """The terms of a sum with their signs, in any order."""
    terms = re.findall(r"(?:^|[ :(])([-+]?) ?(\d+(?:\.\d+)?)", question)
    return tuple(sorted((sign or "+", number) for sign, number in terms))


def words(pattern: str) -> Oracle:
    return lambda question, example: tuple(sorted(re.findall(pattern, question)))


def answer(question: str, example: Example) -> Hashable:
    return str(example.truth["entry"]["answer"])


def puzzle(question: str, example: Example) -> Hashable:
    """The numbers, in any order, with the target that they make."""
    row = example.columns or example.truth["entry"]["metadata"]
    return tuple(sorted(row["numbers"])), row["target"]


# Small versions of the tasks, in which problems come back in other words, and what makes them the same.
TASKS: dict[str, tuple[dict[str, Any], Oracle]] = {
    "basic_arithmetic": (
        {
            "max_terms": 2,
            "max_digits": 1,
            "operators": ["+"],
            "allow_parentheses": False,
            "format_style": "natural",
        },
        numbers,
    ),
    "chain_sum": ({"max_terms": 2, "max_digits": 1}, signed),
    "decimal_chain_sum": ({"max_terms": 2, "max_digits": 1, "max_decimal_places": 1}, signed),
    "products": ({"max_terms": 2, "max_digits": 1}, numbers),
    "bitwise_arithmetic": ({"difficulty": 1}, words(r"0x[0-9a-f]+")),
    "gcd": ({"max_value": 15}, numbers),
    "lcm": ({"max_value": 15}, numbers),
    "fraction_simplification": ({"max_value": 9, "max_factor": 3}, words(r"\d+")),
    "leg_counting": ({"min_animals": 2, "max_animals": 2, "max_instances": 1}, words(r"\d+ \w+")),
    "complex_arithmetic": (
        {
            "min_real": 1,
            "max_real": 3,
            "min_imag": 1,
            "max_imag": 2,
            "operations": ["+"],
            "operations_weights": [1.0],
        },
        words(r"\([^)]*i\)"),
    ),
    "simple_equations": (
        {"max_terms": 2, "max_value": 3, "operators": ["+"], "operators_weights": [1.0]},
        lambda question, example: re.sub("[a-z]", "?", question.rpartition(": ")[2]),
    ),
    "simple_geometry": ({"max_sides": 3, "min_angle": 80, "max_angle": 99}, numbers),
    "countdown": (
        {
            "min_numbers": 3,
            "max_numbers": 3,
            "max_value": 5,
            "min_target": 1,
            "max_target": 20,
            "operators": ["+", "*"],
        },
        puzzle,
    ),
    "number_sorting": (
        {"max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 3},
        lambda question, example: (question[:30], numbers(question.partition("Please")[0])),
    ),
    "number_filtering": (
        {"max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 3},
        lambda question, example: (
            question.partition(" in ")[0][-1:],
            numbers(question.partition(" in ")[2]),
        ),
    ),
    "palindrome_generation": (
        {"max_length": 4},
        lambda question, example: "".join(sorted(str(answer("", example)))),
    ),
    "caesar_cipher": ({"max_words": 4}, answer),
    "sentence_reordering": ({"max_words_in_sentence": 4}, answer),
    "aiw": ({}, lambda question, example: (len(question) > 400, "friend" in question, numbers(question))),
    "calendar_arithmetic": ({"tasks": ["is_leap_year"]}, numbers),
    "dice": ({"num_dice": 3, "max_dice_size": 6}, words(r"\d+d\d+|\d+ or higher")),
    "syllogism": (
        {},
        lambda question, example: tuple(sorted(re.findall(r"(?:\d\. |that: )([^.?]+)", question))),
    ),
    "coin_flip": ({}, lambda question, example: question),
    "tower_of_hanoi": ({}, lambda question, example: question),
    "knights_knaves": ({}, lambda question, example: str(example.truth["entry"]["metadata"]["statements"])),
}


def load(task: str, args: dict[str, Any], count: int = 40, size: int = 400) -> Problems:
    cfg = Config(env=EnvConfig(dataset="reasoning_gym", task=task, task_args=args, task_size=size))
    cfg.eval.num_problems = count
    return load_problems(cfg)


@pytest.mark.parametrize("task", slow_except(["coin_flip", "gcd", "leg_counting", "products"], TASKS))
def test_no_task_trains_on_what_it_holds_out(task: str) -> None:
    args, same = TASKS[task]
    problems = load(task, args)
    held_out, train = problems.held_out, problems.train[:]
    assert len({text(row) for row in held_out}) == len(held_out) > 5 and len(train) == 400
    assert not {text(row) for row in held_out} & {text(row) for row in train}
    assert not {same(text(row), row) for row in held_out} & {same(text(row), row) for row in train}


@pytest.mark.slow
def test_every_rule_fits_the_entries_of_its_task() -> None:
    from torchrl_grpo.data.gym_identity import _RULES

    for task in sorted(_RULES):
        problems = load(task, {}, count=0, size=2)
        assert all(row.identity for row in problems.train), task


def test_a_composite_task_holds_out_what_its_tasks_say_is_the_same() -> None:
    parts = [{"name": name, "config": TASKS[name][0]} for name in ("chain_sum", "gcd", "basic_arithmetic")]
    problems = load("composite", {"datasets": parts})

    def same(example: Example) -> Hashable:
        task = example.truth["entry"]["metadata"]["source_dataset"]
        return task == "gcd", signed(text(example), example) if task != "gcd" else numbers(text(example))

    assert not {same(row) for row in problems.held_out} & {same(row) for row in problems.train}


@pytest.mark.slow
def test_few_problems_are_held_out_with_all_their_wordings_and_half_remain() -> None:
    args, _ = TASKS["basic_arithmetic"]
    for count, share in ((40, 0.25), (200, 0.45), (400, 0.5)):
        problems = load("basic_arithmetic", args, count=count)
        sums = {numbers(text(row)) for row in problems.held_out}
        trained = {numbers(text(row)) for row in problems.train[:]}
        assert len(sums) <= share * 66 + 1 and not sums & trained and len(sums | trained) > 60
        (note,) = problems.notes
        assert f" were found. {len(sums)} of them are held out, in {len(problems.held_out)} questions" in note
        assert (len(problems.held_out) < count) == (f"eval.num_problems={count} would leave fewer" in note)
        assert (len(problems.held_out) == count) == (count < 400)
    assert not load("chain_sum", {}).notes


def test_a_task_with_a_single_problem_is_refused() -> None:
    args = {"tasks": ["is_leap_year"], "year": 2024, "leap_year_range": 1}
    with pytest.raises(
        DataError, match=r"the same problem.* widen env\.task_args, or set eval\.num_problems=0"
    ):
        load("calendar_arithmetic", args)


def test_a_problem_is_named_by_its_first_question() -> None:
    def problem(id: str, question: str, identity: str = "") -> Example:
        return Example(id, [{"role": "user", "content": question}], {}, identity=identity)

    questions = [
        problem("a", "Name a color."),
        problem("b", "What is 3 + 4?"),
        problem("c", "Give the sum.", "seven"),
        problem("d", "Please add 4 and 3."),
        problem("e", "Name a color."),
        # What joins two problems that were apart.
        problem("f", "What is 4 + 3?", "seven"),
        problem("g", "Give a sum.", "\ud800"),
    ]
    assert problem_names(questions) == ["a", "b", "b", "b", "a", "b", "g"]
    assert problem_names([]) == []


def test_replaced_problems_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    problems = load("gcd", TASKS["gcd"][0])
    caplog.set_level("INFO")
    assert problems.train[:] == problems.train[:]
    lines = [record.getMessage() for record in caplog.records if "held out" in record.getMessage()]
    assert 1 < len(lines) <= 3 and "10 were held out" in lines[1] and "in other words" in lines[1]


# --- several data sets --------------------------------------------------------------------------------


def write(path: Path, questions: Sequence[str], **more: Sequence[str]) -> str:
    rows = [
        {"question": question, "answer": "1"} | {name: values[i] for name, values in more.items()}
        for i, question in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_no_part_trains_in_other_words_on_what_another_part_holds_out(tmp_path: Path) -> None:
    args, _ = TASKS["basic_arithmetic"]
    questions = [
        f"{how} {a} + {b}?" for how in ("What is", "How much is") for a in range(10) for b in range(10)
    ]
    stories = [f"Ann has {n} eggs and eats one. How many are left?" for n in range(40)]
    word_problems = [f"Of {n} eggs Ann eats one. What is left?" for n in range(40)]
    gym: dict[str, Any] = {"dataset": "reasoning_gym", "task_size": 300}
    parts: list[dict[str, Any]] = [
        gym | {"name": "natural", "task": "basic_arithmetic", "task_args": args},
        gym | {"name": "both", "task": "basic_arithmetic", "task_args": args | {"operators": ["+", "-"]}},
        gym | {"name": "chain", "task": "chain_sum", "task_args": TASKS["chain_sum"][0]},
        {"name": "file", "dataset": "jsonl", "data_path": write(tmp_path / "a.jsonl", questions)},
        {"name": "stories", "dataset": "jsonl", "data_path": write(tmp_path / "b.jsonl", stories)},
        {
            "name": "told",
            "dataset": "jsonl",
            "data_path": write(
                tmp_path / "c.jsonl", word_problems[::-1], original=[f" {story}" for story in stories[::-1]]
            ),
            "fields": {"identity": "original"},
        },
    ]
    cfg = Config()
    cfg.env.mixture, cfg.eval.num_problems = parts, 12
    problems = load_problems(cfg)
    assert isinstance(problems, Mixture)

    def same(example: Example) -> Hashable:
        if example.part in ("stories", "told"):
            return numbers(text(example))
        return signed(text(example).replace("How much is", ":").replace("What is", ":"), example)

    held_out, train = problems.held_out, [problems.train[i] for i in range(len(problems.train))]
    assert {row.part for row in held_out} == {row.part for row in train} == {part["name"] for part in parts}
    assert not {text(row) for row in held_out} & {text(row) for row in train}
    assert not {same(row) for row in held_out} & {same(row) for row in train}
    notes = [note for part in problems.problems for note in part.notes]
    assert any(
        re.search(r"env\.mixture: told: \d+ of 28 .*: 0 with the same question", note) for note in notes
    )


def test_rewordings_of_a_file_are_held_out_together(tmp_path: Path) -> None:
    questions = [f"{how} {n}" for n in range(30) for how in ("a", "b", "c")]
    originals = [f"{n}" for n in range(30) for _ in "abc"]
    cfg = Config(env=EnvConfig(dataset="jsonl", fields={"identity": "original"}))
    cfg.env.data_path = write(tmp_path / "a.jsonl", questions, original=originals)
    cfg.eval.num_problems = 11
    problems = load_problems(cfg)
    held_out = {row.columns["original"] for row in problems.held_out}
    assert len(problems.held_out) == 11 and len(held_out) == 4
    assert {row.columns["original"] for row in problems.train} == set(originals) - held_out
    assert (
        "1 of 79 training problems are left out" in problems.notes[0]
        and "1 in other words" in problems.notes[0]
    )


def test_a_problem_with_most_of_the_rows_is_trained_on(tmp_path: Path) -> None:
    rows = [(f"question {n}", "one" if n % 10 else str(n)) for n in range(1_000)]
    cfg = Config(env=EnvConfig(dataset="jsonl", fields={"identity": "topic"}))
    cfg.env.data_path = write(
        tmp_path / "a.jsonl", [question for question, _ in rows], topic=[topic for _, topic in rows]
    )
    cfg.eval.num_problems = 50
    problems = load_problems(cfg)
    assert len(problems.held_out) == 50 and len(problems.train) == 950 and not problems.notes
    cfg.eval.num_problems = 300
    assert len(load_problems(cfg).train) == 900


def test_a_run_warns_if_most_training_problems_are_held_out(tmp_path: Path) -> None:
    cfg = Config(env=EnvConfig(dataset="jsonl"))
    cfg.env.data_path = write(tmp_path / "a.jsonl", [f"question {n}" for n in range(100)])
    cfg.env.eval_data_path = write(tmp_path / "b.jsonl", [f"question {n}" for n in range(60)])
    problems = load_problems(cfg)
    assert len(problems.train) == 40
    assert problems.notes[0].startswith("warning: ") and "eval.num_problems" in problems.notes[0]


STORY = "Ann's {n} sisters sold 1,0{n:02} eggs, all of them for ${n}. How many eggs did each one sell?"
COPIES: dict[str, Callable[[str], Any]] = {
    "system": lambda content: [
        {"role": "system", "content": 'Say\n"hi".'},
        {"role": "user", "content": content},
    ],
    "before": lambda content: f"Solve the following problem.\n\n{content}",
    "after": lambda content: f"{content} Let's think step by step.",
    "around": lambda content: f"Question: {content}\nAnswer:",
    "case": lambda content: content[0].lower() + content[1:],
    "end": lambda content: content.rstrip("?"),
    "unseen": lambda content: f"\u200b{content.replace('e', 'e' + chr(0x200D))}",
    "commas": lambda content: content.replace(",", ""),
    "dollars": lambda content: content.replace("$", r"\$"),
    "quotes": lambda content: content.replace("'", "\u2019"),
}


@pytest.mark.parametrize("how", COPIES)
def test_no_part_trains_on_a_copy_of_what_another_part_holds_out(how: str, tmp_path: Path) -> None:
    stories = [STORY.format(n=n) for n in range(60)]
    column = "messages" if how == "system" else "question"
    copied = [{column: COPIES[how](question), "answer": "1", "n": n} for n, question in enumerate(stories)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copied[::-1]))
    cfg = Config()
    cfg.env.mixture = [
        {
            "name": "a",
            "dataset": "jsonl",
            "data_path": write(tmp_path / "a.jsonl", stories, n=[str(n) for n in range(60)]),
        },
        {
            "name": "b",
            "dataset": "jsonl",
            "data_path": str(tmp_path / "b.jsonl"),
            "fields": {column: column},
        },
    ]
    cfg.eval.num_problems = 8
    problems = load_problems(cfg)
    held_out, train = (
        {int(row.columns["n"]) for row in part} for part in (problems.held_out, problems.train)
    )
    assert len(held_out) > 8 and train == set(range(60)) - held_out


# --- environments -------------------------------------------------------------------------------------


def game(tmp_path: Path, rows: list[dict[str, Any]], count: int = 10, **env: Any) -> Config:
    path = tmp_path / "game.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config(env=EnvConfig(dataset="jsonl", environment="guess", data_path=str(path), **env))
    cfg.eval.num_problems = count
    return cfg


def test_a_game_whose_question_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    # The same question has several answers, as a puzzle with several solutions has.
    problems = load_problems(
        game(tmp_path, [{"question": f"q{n // 3}", "answer": f"a{n}"} for n in range(60)])
    )
    assert len(problems.held_out) == 10 and len({text(row) for row in problems.held_out}) == 4
    assert not {text(row) for row in problems.held_out} & {text(row) for row in problems.train}
    assert len(problems.train) == 48


@pytest.mark.parametrize("split", [False, True])
def test_games_that_all_begin_alike_are_told_apart_by_their_rows(tmp_path: Path, split: bool) -> None:
    played = [{"question": "Let us play.", "board": [n]} for n in range(30)]
    cfg = game(tmp_path, played)
    if split:
        (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in played[:10]))
        cfg.env.eval_data_path = str(tmp_path / "test.jsonl")
    problems = load_problems(cfg)
    boards = [{row.columns["board"][0] for row in part} for part in (problems.train, problems.held_out)]
    assert [len(part) for part in boards] == [20, 10] and not boards[0] & boards[1]


@pytest.mark.slow
def test_an_environment_and_a_task_of_the_same_puzzle_share_no_problem() -> None:
    environment = {
        "dataset": "torchrl_grpo.envs.episodes.countdown:problems",
        "fields": {"identity": "identity"},
        "task_args": {"size": 300, "largest": 5},
    }
    task = {
        "dataset": "reasoning_gym",
        "task": "countdown",
        "task_size": 300,
        "task_args": TASKS["countdown"][0],
    }
    cfg = Config()
    cfg.env.mixture = [environment | {"name": "game"}, task]
    cfg.eval.num_problems = 40
    problems = load_problems(cfg)

    held_out = {puzzle("", row) for row in problems.held_out}
    assert len(held_out) > 40 and not held_out & {
        puzzle("", problems.train[i]) for i in range(len(problems.train))
    }


@pytest.mark.parametrize("alike", [False, True])
def test_prompts_that_an_environment_writes_are_held_out_too(tmp_path: Path, alike: bool) -> None:
    deal = "'go'" if alike else "f'deal {example.columns[\"n\"] % 7}'"
    (tmp_path / "cards.py").write_text(
        "class Cards:\n"
        "    def reset(self, example):\n"
        f"        return [{{'role': 'user', 'content': {deal}}}]\n"
        "    def step(self, message):\n"
        "        return 'no', 0.0, True\n"
    )
    cfg = game(tmp_path, [{"question": f"q{n}", "n": n} for n in range(40)], count=4)
    cfg.env.environment = f"{tmp_path / 'cards.py'}:Cards"
    tokenizer: Any = None
    problems = with_prompts(cfg, load_problems(cfg), tokenizer)
    assert len(problems.held_out) == 4
    if alike:
        # The prompt says nothing about the problem.
        assert len(problems.train) == 36 and not problems.notes
    else:
        assert problems.train and not {text(row) for row in problems.held_out} & {
            text(row) for row in problems.train
        }
        assert re.search(r"Cards: \d+ of 36 .* has the same prompt", problems.notes[0])


SHIPPED: dict[str, Oracle] = {
    "arithmetic": numbers,
    "reasoning_gym": signed,
    "countdown": puzzle,
    "guess": numbers,
    "gsm8k": lambda question, example: question,
    "math": lambda question, example: question,
    "jsonl": lambda question, example: question,
    "ifeval": lambda question, example: question,
}


@pytest.mark.parametrize(
    ("wording", "other", "same"),
    [
        ("What is 3 + 4?", "Compute 4 + 3.", True),
        ("Calculate 2 * (3 + 4).", "(4+3) × 2.0 = ?", True),
        ("4 - 3", "Evaluate: -3 + 4.", True),
        ("What is  the   time?", "What is the time?", True),
        ("2^3", "2 ** 3", True),
        ("3 - 4", "4 - 3", False),
        ("What is 7?", "Compute 7.", False),
        ("What happened on 9/11?", "What was built on 9/11?", False),
        ("8 / 2", "2 / 8", False),
        ("Please compute 3 + 4.", "What is 4 plus three?", True),
        ("How much does 3 + 4 equal?", "What is the sum of 4 and 3?", True),
        ("Add 3 and 4.", "What is $3 + 4$? Answer with a number.", True),
        ("What is the result of 3 x 4?", r"Simplify 4 \times 3", True),
        ("Q: 1,000 + 2\nA:", "1000 + 2", True),
        ("2(3+4)", "(3 + 4) * 2", True),
        ("Subtract 3 from 4.", "What is 4 minus 3?", True),
        ("What is the value of 8 divided by 2?", r"\frac{8}{2}", True),
        ("Subtract 3 from 5 times 2", "5 - 3 * 2", False),
        ("Add 3 and 14 times 2.", "3 + 14 * 2", False),
        ("What is 5 - sum of 3 and 4?", "5 - (3 + 4)", True),
        ("Twenty one plus 3", "twenty-one + 3", True),
        ("twenty-one plus 3", "20 - 1 + 3", False),
        ("What is 2\u00b2 + 1?", "What is 22 + 1?", False),
        ("2\u00be + 1", "23/4 + 1", False),
        (r"2\frac{3}{4} + 1", "2 * 3/4 + 1", False),
        ("Count the digits of 3 + 4.", "3 + 4", False),
        ("What is 3 + 4 mod 5?", "3 + 4", False),
        ("What is 5! + 3?", "5 + 3", False),
        ("Is 3 + 4 = 8?", "3 + 4", False),
        ("Add 5 -3.", "Subtract 5 -3.", False),
        ("What is the sum of (3) (4)?", "(3) * (4)", False),
        ("(" * 990, "-" * 990 + "1", False),
    ],
)
def test_a_calculation_is_the_same_in_any_words_and_order(wording: str, other: str, same: bool) -> None:
    first, second = (
        keys(Example("x", [{"role": "user", "content": question}])) for question in (wording, other)
    )
    assert first.isdisjoint(second) != same


@pytest.mark.parametrize(
    ("wording", "other", "same"),
    [
        ("Is \u201c3 \u2212 4\u201d Ann\u2019s?", 'is "3 - 4" Ann\'s', True),
        ("Round $1,000.50.", r"Round \$1000.50", True),
        ("Tell me 3-4", "Tell me 34", False),
        ("Tell me 3+4", "Tell me 3-4", False),
        ("Tell me 3.4", "Tell me 3 4", False),
        ("Tell me (3+4)*2", "Tell me 3+4*2", False),
        ("Tell me 5!", "Tell me 5", False),
        ("Derive f'(x)", "Derive f(x)", False),
        ("Tell me 3 < 4", "Tell me 3 > 4", False),
        ("Solve\n. X .\n$ . .", "Solve\n. X .\n. $ .", False),
        ('[["x', '[["y', False),
    ],
)
def test_the_words_of_a_question_have_one_case_and_spelling_but_all_signs(
    wording: str, other: str, same: bool
) -> None:
    first, second = (
        keys(Example("x", [{"role": "user", "content": question}])) for question in (wording, other)
    )
    assert first.isdisjoint(second) != same


def test_every_shipped_configuration_is_among_them() -> None:
    assert {path.stem for path in (CONFIG / "env").glob("*.yaml")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_configuration_trains_on_what_it_holds_out(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.mkdir()
    for split, spaces, start in (("train", " ", 0), ("test", "  ", 20)):
        rows = [
            {
                "question": f"How{spaces}many is {n}?",
                "problem": f"How{spaces}many is {n}?",
                "answer": f"#### {n}",
                "prompt": f"Write{spaces}about {n}.",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{}],
            }
            for n in range(start, start + 40)
        ]
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reads = [f"env.data_path={path}"] if name in ("gsm8k", "math", "jsonl", "ifeval") else []
    with composer(CONFIG, "grpo_gsm8k") as tree:
        (overrides,) = tree.jobs([f"env={name}", "env.task_size=400", *reads], sweep=False)
        cfg = parse(tree.compose(overrides).node)
    if name == "reasoning_gym":
        cfg.env.task_args = {"max_terms": 2, "max_digits": 1}
    problems = load_problems(cfg)
    same, train = SHIPPED[name], [problems.train[i] for i in range(len(problems.train))]
    assert len(problems.held_out) >= 40 and len(train) >= 20
    assert not {text(row) for row in problems.held_out} & {text(row) for row in train}
    assert not {same(text(row), row) for row in problems.held_out} & {same(text(row), row) for row in train}
