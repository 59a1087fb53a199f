"""IFEval's checks, its strict and loose scores, the reward and the grader."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchrl_grpo.data.example import Example
from torchrl_grpo.data.ifeval.schema import ARGUMENTS, clean_truth
from torchrl_grpo.errors import ConfigError, DataError
from torchrl_grpo.rewards.ifeval import IFEvalGrader, IFEvalReward
from torchrl_grpo.rewards.ifeval import text as ifeval_text
from torchrl_grpo.rewards.ifeval.checks import CHECKS
from torchrl_grpo.rewards.ifeval.scoring import follow_list, variants
from torchrl_grpo.rewards.types import ResponseScore

ENGLISH = "the people in this town are happy to share a long story with their friends"

# id -> [(kwargs, responses that follow it, responses that do not)]
CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["BIG and TALL.", "I saw A dog.", "We met NASA. In the USA."],
            ["BIG and tall", "Big Tall", "bIG tALL"],
        ),
        (
            {"capital_frequency": 2, "capital_relation": "less than"},
            ["only ONE here", "none"],
            ["ONE and TWO", "ONE. TWO. THREE."],
        ),
    ],
    "change_case:english_capital": [
        (
            {},
            [ENGLISH.upper(), "12 " + ENGLISH.upper() + "!"],
            [ENGLISH, ENGLISH.upper() + "s", "1234", "DAS IST EIN SEHR SCHÖNER TAG UND WIR GEHEN NACH HAUSE"],
        )
    ],
    "change_case:english_lowercase": [
        ({}, [ENGLISH], [ENGLISH.title(), "1234", "das ist ein sehr schöner tag und wir gehen nach hause"])
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Write a poem.\nNow!"},
            ["Write a poem.\nNow!\n\nRoses.", "  write a POEM.\nnow! x"],
            ["Sure. Write a poem.\nNow!", "Write a poem. Now!", "Write a poem."],
        )
    ],
    "combination:two_responses": [
        (
            {},
            ["one\n******\ntwo", "******one******two******", "one******two"],
            ["one", "one******one ", "a******b******c", "a************b", "one***two"],
        )
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[a] and [b]", "[[x] [y]", "[] []", "[a]\n[b]\n[c]"],
            ["[a]", "[a\nb] [c]", "(a) (b)", "[ [ ["],
        )
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["Hi\n\nP.S. bye", "p. s. bye"], ["PS bye", "Hi", "P.P.S bye"]),
        ({"postscript_marker": "P.P.S"}, ["Hi P.P.S. bye", "p. p. s"], ["P.S. bye", "PPS"]),
        ({"postscript_marker": "Note:"}, ["Hi\nNOTE: bye"], ["Note bye"]),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "Well. My answer is maybe. Ask again.", "**My answer is no.**"],
            ["my answer is yes.", "My answer is yes", "yes", "My answer is perhaps."],
        )
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1]}', '```json\n{"a": 1}\n```', "```JSON\n[]```", "```\n3\n```", ' "text" '],
            ["{'a': 1}", 'Here: {"a": 1}', '{"a": 1', "```json\n```", "[" * 100_000, "yes"],
        )
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            ["SECTION 1 a SECTION 2 b", "SECTION1\nSECTION 22", "SECTION 1 SECTION 2 SECTION 3"],
            ["SECTION 1 a", "Section 1 Section 2", "SECTION one SECTION two"],
        ),
        ({"section_spliter": "Part (a)", "num_sections": 1}, ["Part (a) 1"], ["Part a 1"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "- a\n- b", "text\n  * a\n\n\n - b", "*a\n-b", "* a\n** bold **\n* b"],
            ["* a", "* a\n* b\n* c", "1. a\n2. b", "text * a * b", "***\n***"],
        ),
        ({"num_bullets": 0}, ["text"], ["- text"]),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*a* and *b*", "**a** and **b**", "*a* **b**", "*a*b*c*"],
            ["*a*", "* * and **", "*a\nb* c", "a * b", "** **"],
        )
    ],
    "detectable_format:title": [
        (
            {},
            ["<<A title>>\ntext", "x <<<y>>> z", "<<a>> >>", "<< >> <<b>>"],
            ["<<>>", "<<  >>", "<A title>", "<<a\nb>>", ">>a<<"],
        )
    ],
    "keywords:existence": [
        (
            {"keywords": ["cat", "C++"]},
            ["Category of c++", "CAT C++"],
            ["cat", "c++", "cat CCC", ""],
        )
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["cat", "hot dog"]},
            ["category", "hot dogs", "a tomcat"],
            ["A Cat!", "no cat-like", "one HOT DOG"],
        )
    ],
    "keywords:frequency": [
        (
            {"keyword": "war", "frequency": 2, "relation": "at least"},
            ["war War", "warm wart"],
            ["war", "peace"],
        ),
        ({"keyword": "war", "frequency": 2, "relation": "less than"}, ["war", "peace"], ["war, WAR"]),
    ],
    "keywords:letter_frequency": [
        ({"letter": "Q", "let_frequency": 2, "let_relation": "at least"}, ["qQ", "quick quiz"], ["q", "x"]),
        ({"letter": "q", "let_frequency": 2, "let_relation": "less than"}, ["q", "x"], ["Quick quiz"]),
        ({"letter": "#", "let_frequency": 2, "let_relation": "at least"}, ["#a #b"], ["#a", "hash hash"]),
    ],
    "language:response_language": [
        (
            {"language": "de"},
            ["Das ist ein sehr schöner Tag und wir gehen jetzt nach Hause.", "12345"],
            ["This is a very nice day and we are going home now."],
        ),
        ({"language": "hi"}, ["मुझे लगता है कि यह एक बहुत अच्छा विचार है"], [ENGLISH]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
            ["One\n\nweekend two", 'One.\n\n"Weekend, two"', "One\n\n'WEEKEND! two"],
            ["weekend\n\ntwo", "One\n\nweekends", "One\nweekend", "One\n\nweekend\n\nthree", "weekend"],
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"}, ["So it goes"], ["\n\nSo it goes"]),
        ({"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "so"}, [], ["So it goes", "so\n\nso"]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["one\n***\ntwo", "one***two", "***one***two***"],
            ["one", "one\n\ntwo", "a***b***c", "a\n***\n***\nb", "a ****** b"],
        )
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 2, "relation": "at least"},
            ["One. Two.", "Really? Yes! Good.", "Come at 3 p.m. The door is open."],
            ["One", "One, two; three", "Dr. Smith met Mr. Jones", "It costs 3.50 today"],
        ),
        ({"num_sentences": 2, "relation": "less than"}, ["One.", "Ask Mrs. Hill."], ["One. Two."]),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, ["a b c", "don't go", "one-two three"], ["a b", "..."]),
        ({"num_words": 3, "relation": "less than"}, ["a b", "!!!"], ["a b c", "it's me"]),
    ],
    "punctuation:no_comma": [({}, ["a; b", "a、b"], ["a, b", "1,000"])],
    "startend:end_checker": [
        (
            {"end_phrase": "Any questions?"},
            ["Hi. Any questions?", "Hi. ANY questions? \n", '"Any questions?"'],
            ["Any questions? Bye", "Any question?", "Hi"],
        )
    ],
    "startend:quotation": [({}, ['"Hi"', ' "Hi" \n', '""'], ['"', "'Hi'", '"Hi', '"Hi".', "“Hi”"])],
}

TABLE = [
    pytest.param(name, kwargs, response, expected, id=f"{name}-{response[:30]!r}-{expected}")
    for name, groups in CASES.items()
    for kwargs, good, bad in groups
    for expected, responses in ((True, good), (False, bad))
    for response in responses
]


def test_every_type_has_a_check_arguments_and_cases_both_ways() -> None:
    assert set(CHECKS) == set(ARGUMENTS) == set(CASES)
    assert len(CHECKS) == 25
    for name, groups in CASES.items():
        assert any(good for _, good, _ in groups), name
        assert any(bad for _, _, bad in groups), name


@pytest.mark.parametrize(("name", "kwargs", "response", "expected"), TABLE)
def test_check(name: str, kwargs: dict[str, Any], response: str, expected: bool) -> None:
    truth = clean_truth([name], [kwargs], "the case")
    assert follow_list(response, truth)[0] == [expected]


@pytest.mark.parametrize(
    ("name", "kwargs", "response"),
    [
        (
            "keywords:frequency",
            {"keyword": "  key ", "frequency": 3, "relation": "at least"},
            "key, Key, KEY",
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part ", "num_sections": 2},
            "Part 1 Part 2",
        ),
        ("detectable_content:postscript", {"postscript_marker": "P.S. "}, "bye\nP.S. x"),
        ("detectable_content:postscript", {"postscript_marker": " PS:"}, "bye\nPS: x"),
        (
            "keywords:letter_frequency",
            {"letter": " a", "let_frequency": 2, "let_relation": "at least"},
            "a A",
        ),
        ("startend:end_checker", {"end_phrase": " The end. "}, "This is the end."),
    ],
)
def test_spaces_around_an_argument_do_not_count(name: str, kwargs: dict[str, Any], response: str) -> None:
    assert CHECKS[name](response, kwargs)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_an_empty_response_follows_nothing(name: str) -> None:
    truth = clean_truth([name], [CASES[name][0][0]], "the case")
    assert follow_list(" \n", truth) == ([False], [False])


@pytest.mark.parametrize("unit", ["[", "<<", "*", "\n", " ", '"', "* \n", "*a ", "a", "P. ", "\x00é", "({<"])
def test_every_check_takes_linear_time_on_long_garbage(unit: str) -> None:
    response = (unit * 50_000)[:50_000]  # quadratic time would be minutes
    for name, groups in CASES.items():
        if name != "change_case:capital_word_frequency":  # NLTK's tokenizer: linear, but slow by itself
            CHECKS[name](response, groups[0][0])


def test_variants_are_the_benchmarks_eight() -> None:
    assert variants("*a*\nb\n*c*") == [
        "*a*\nb\n*c*",
        "b\n*c*",
        "*a*\nb",
        "b",
        "a\nb\nc",
        "b\nc",
        "a\nb",
    ]
    assert variants("one line") == ["one line"]


@pytest.mark.parametrize(
    ("name", "kwargs", "response", "loose"),
    [
        ("detectable_format:json_format", {}, 'Sure:\n{"a": 1}', True),
        ("detectable_format:json_format", {}, '{"a": 1}\nDone!', True),
        ("detectable_format:json_format", {}, 'Sure:\n{"a": 1}\nDone!', True),
        ("detectable_format:json_format", {}, '**{"a": 1}**', True),
        ("detectable_format:json_format", {}, 'Sure:\n*{"a": 1}*\nDone!', True),
        ("detectable_format:json_format", {}, 'Sure:\nhere\n{"a": 1}', False),
        ("startend:end_checker", {"end_phrase": "Bye."}, "Hi\n*Bye.*", True),
        ("startend:end_checker", {"end_phrase": "Bye."}, "Bye.\nHi\nHo", False),
        ("punctuation:no_comma", {}, "Sure, here:\ntext", True),
        ("punctuation:no_comma", {}, "Sure, here:", False),  # nothing is left without its only line
    ],
)
def test_loose_forgives_a_line_at_either_end_and_emphasis(
    name: str, kwargs: dict[str, Any], response: str, loose: bool
) -> None:
    assert follow_list(response, clean_truth([name], [kwargs], "the case")) == ([False], [loose])


@pytest.mark.slow
def test_loose_follows_from_strict_on_random_text() -> None:
    rng = random.Random(0)
    pieces = [response for groups in CASES.values() for _, good, bad in groups for response in good + bad]
    for _ in range(25):
        response = "\n".join(piece[:200] for piece in rng.sample(pieces, 3))
        for name, groups in CASES.items():
            strict, loose = follow_list(response, clean_truth([name], [groups[0][0]], "the case"))
            assert loose >= strict, (name, response)


def _example(ids: list[str], kwargs: list[dict[str, Any]]) -> Example:
    return Example(
        "ifeval/test/3", [{"role": "user", "content": "?"}], {"instruction_id_list": ids, "kwargs": kwargs}
    )


NO_COMMA_AND_JSON = _example(["punctuation:no_comma", "detectable_format:json_format"], [{}, {}])


def test_reward_is_the_strict_fraction_with_the_four_scores_beside_it() -> None:
    reward = IFEvalReward()
    assert reward.name == "ifeval"
    assert reward("Sure:\n{}", NO_COMMA_AND_JSON) == {
        "score": 0.5,
        "prompt_strict": 0.0,
        "prompt_loose": 1.0,
        "instruction_strict": 0.5,
        "instruction_loose": 1.0,
    }
    assert reward("{}", NO_COMMA_AND_JSON)["score"] == 1.0
    assert reward("a, b", NO_COMMA_AND_JSON)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>Yes, JSON, so braces.</think>\n\n{}", 1.0),
        ("<think>I see.</think>\n\n{}, a", 0.0),
        ("<think>No commas here", 0.0),  # Thoughts that do not end hide the answer.
        ("<think>No commas here</think>", 0.0),
    ],
)
def test_thoughts_before_the_answer_do_not_count(response: str, score: float) -> None:
    assert IFEvalReward()(response, NO_COMMA_AND_JSON)["score"] == score


def test_grader_weighs_instruction_scores_by_the_number_of_instructions() -> None:
    grader = IFEvalGrader()
    assert grader.primary in grader.metrics
    assert set(grader.grade("{}", NO_COMMA_AND_JSON, ResponseScore(0.0))) == set(grader.metrics)
    assert grader.weights(NO_COMMA_AND_JSON) == {
        "prompt_strict": 1.0,
        "prompt_loose": 1.0,
        "instruction_strict": 2.0,
        "instruction_loose": 2.0,
    }
    grader.close()


def test_scores_do_not_change_from_call_to_call_where_the_language_is_a_close_call() -> None:
    example = _example(["language:response_language"], [{"language": "no"}])
    scores = {IFEvalReward()("Det er en fin dag", example)["score"] for _ in range(20)}
    assert len(scores) == 1


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["keywords:exist"], [{}], "unknown instruction 'keywords:exist'"),
        ([7], [{}], "unknown instruction 7"),
        ([], [], "at least one instruction id"),
        ("punctuation:no_comma", [{}], "list of at least one"),
        (None, [{}], "instruction_id_list None"),
        (["punctuation:no_comma"], [], "one mapping per instruction"),
        (["punctuation:no_comma"], None, "one mapping per instruction"),
        (["punctuation:no_comma"], ["x"], "kwargs 'x'"),
        (["keywords:existence"], [{}], "lacks the argument 'keywords'"),
        (["keywords:existence"], [None], "lacks the argument 'keywords'"),
        (["keywords:existence"], [{"keywords": None}], "lacks the argument 'keywords'"),
        (["keywords:existence"], [{"keywords": []}], "keywords=[]"),
        (["keywords:existence"], [{"keywords": "cat"}], "keywords='cat'"),
        (["keywords:existence"], [{"keywords": [""]}], "a list of texts"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": "3"}], "a whole number"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": 2.5}], "num_bullets=2.5"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": -1}], "num_bullets=-1"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": True}], "num_bullets=True"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "more"}], "relation='more'"),
        (
            ["keywords:letter_frequency"],
            [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            "a single character",
        ),
    ],
)
def test_a_bad_truth_names_the_row_the_value_and_the_mend(ids: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        clean_truth(ids, kwargs, "row 17 of some.jsonl")
    assert "row 17 of some.jsonl" in str(caught.value)
    assert message in str(caught.value)


def test_the_reward_names_the_example_whose_truth_is_bad() -> None:
    with pytest.raises(DataError, match="ifeval/test/3"):
        IFEvalReward()("text", Example("ifeval/test/3", [{"role": "user", "content": "?"}], {"answer": "3"}))


def test_the_hubs_padding_with_none_and_whole_floats_is_cleaned_away() -> None:
    every = {name: None for arguments in ARGUMENTS.values() for name in arguments}
    truth = clean_truth(
        ["punctuation:no_comma", "length_constraints:number_words"],
        [every, {**every, "num_words": 30.0, "relation": "at least"}],
        "the case",
    )
    assert truth["kwargs"] == [{}, {"num_words": 30, "relation": "at least"}]
    assert isinstance(truth["kwargs"][1]["num_words"], int)


@pytest.mark.parametrize("entry", [IFEvalReward, IFEvalGrader])
def test_a_missing_package_is_said_before_the_first_response(
    entry: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ifeval_text, "find_spec", lambda name: None if name == "langdetect" else object())
    with pytest.raises(ConfigError, match=r"needs langdetect.*requirements_ifeval\.txt"):
        entry()
