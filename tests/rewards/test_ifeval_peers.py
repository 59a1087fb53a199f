"""IFEval's checks on responses as in the benchmark's own tests, with the verdicts of those tests."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_grpo.data.ifeval.schema import clean_truth
from torchrl_grpo.rewards.ifeval import text
from torchrl_grpo.rewards.ifeval.scoring import follow_list

LEAST, LESS = "at least", "less than"
LONG = "One.\n\nTwo, too.\n\n{}\n\nFour.\n\nHaha, five."

# instruction, arguments, response, whether it follows.
CASES: list[tuple[str, dict[str, Any], str, bool]] = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": LEAST},
        "\nHERE are THREE PArtly CAPITAL words.\n",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 5, "capital_relation": LESS},
        "\nTHESE are Four FULLY CAPITAL WORDS. Others Are Partly So.\n",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 4, "capital_relation": LESS},
        "\nTHESE are Four FULLY CAPITAL WORDS. Others Are Partly So.\n",
        False,
    ),
    (
        "change_case:english_capital",
        {},
        "\nTHIS IS AN ENGLISH SENTENCE. ALL OF ITS LETTERS ARE CAPITALS!!! YES.\n",
        True,
    ),
    ("change_case:english_capital", {}, "\nEvery Word Is Capitalized.\n", False),
    ("change_case:english_lowercase", {}, "\nevery letter here is a small one.\n", True),
    ("change_case:english_lowercase", {}, "\nNearly every letter here is a small one.\n", False),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a note."},
        "Write a note. Dear all,\nhello.\n",
        True,
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a note."}, "Dear all. Write a note.\n", False),
    ("combination:two_responses", {}, "\nOne.\n******\nTwo.\n", True),
    ("combination:two_responses", {}, "\nOne.\n******\nOne.\n", False),
    ("combination:two_responses", {}, "\nOne.\n******\nTwo.\n******\nThree.\n", False),
    ("combination:two_responses", {}, "\n******\nOne.\n******\n******\nTwo.\n******\n", False),
    ("combination:two_responses", {}, "\n******\nOne.\n******\nTwo.\n******\n", True),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 5},
        "A form:\n[Name]\n[Email]\n[Phone]\n[Street]\n[City]\nFill it in.",
        True,
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 7},
        "A [adjective] [noun] is [adjective] [noun]. I [verb] and [verb].",
        False,
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "\n  Done.\n\n  P.S. I hope so.", True),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "\n  Done.\n\n  P.S. I hope so.", False),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "\n  Done.\n\n  P.P.S. Ask me.\n\n  More?",
        True,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "On the same line. (Here) P.S. enjoy\n it!",
        True,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "\n  Done.\n  p.p.s in small letters?\n",
        True,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "\n  Done.\n  P. S. With P. and S. apart..\n",
        True,
    ),
    ("detectable_format:constrained_response", {}, "\n My answer is no.\n", True),
    ("detectable_format:constrained_response", {}, "\n  My answer is no. I am\n  still learning.", True),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 3},
        'Mark each with "Section X":\n  Section 1\n  [a]\n  Section 2\n  [b]',
        False,
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\n  [a]\n  SECTION 2\n  [b]",
        True,
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 3},
        "\n  Use an asterisk (*). So:\n  * one.\n  *(no space) two.\n  * three.\n  and no more.",
        True,
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "\n  Inside a line (*), *, it does not count.\n    * one.\n    * two.\n    . a dot",
        True,
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 3},
        "\n  So:\n  - one\n  - two, too\n  -three",
        True,
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 1},
        "\n  a\n  ***\n  b\n  ***\n  c\n  * one\n  ",
        True,
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "\n  Use the * character. Write `it` as:*it*, and with two ** as\n  **it** ",
        True,
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "\n  Methods:\n  *First\n  *Second*\n  *Third\n  *Fourth\n  Done!",
        False,
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 4},
        "\n  Some *two words* and *more of them*\n  here. **These too** and **those.**\n  ",
        True,
    ),
    ("detectable_format:title", {}, "\n  <<A Song>>\n  La la.\n", True),
    ("detectable_format:title", {}, "\n  At the end?\n  <<Why not>>\n", True),
    ("detectable_format:title", {}, "\n  << >>\n  No title.\n", False),
    ("detectable_format:title", {}, "\n  <<No title.\n  Two lines.>>\n", False),
    (
        "keywords:existence",
        {"keywords": ["romantic", "river", "Mona Lisa"]},
        "The romantic river\n and the Mona Lisa.",
        True,
    ),
    (
        "keywords:existence",
        {"keywords": ["romantic", "river", "Mona Lisa"]},
        "A romantic river\n and a smile.",
        False,
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["HOUSE", "POWER", "BECOME"]},
        "They came to power.",
        False,
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["HOUSE", "POWER", "BECOME"]},
        "They came to stay.",
        True,
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["GOOGLE", "TEXT"]},
        "Models of text, as Google has.",
        False,
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["GENE", "TRANSFORM"]},
        "A Generative Transformer.",
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "  keyword ", "frequency": 3, "relation": LEAST},
        "\nkeyword, Keyword, KEYWORD\n",
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "KEYWORD", "frequency": 4, "relation": LEAST},
        "\n *keyword\n *Keyword\n *KEYWORD\n",
        False,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "T", "let_frequency": 4, "let_relation": LEAST},
        "\n  There is the T. Four T's.\n",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 4, "let_relation": LESS},
        "\n asdfghjkl!!aA\n",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "p", "let_frequency": 4, "let_relation": LEAST},
        "\n asdfghjkl!!aA\n",
        False,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": LEAST},
        "#a #b #c #d",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": LEAST},
        "#a #b #c",
        False,
    ),
    ("language:response_language", {"language": "en"}, "The response is English", True),
    ("language:response_language", {"language": "es"}, "Desayunamos en McDonald's hoy", True),
    ("language:response_language", {"language": "en"}, "Today we visit the Louvre", True),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"},
        "\n  a 1\n\n  I am 2\n\n  a 3",
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"},
        "\n  a 1\n\n  I am 2",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "I"},
        "\n  a 1\n\n  we are 2\n\n  a 3",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 5, "nth_paragraph": 5, "first_word": "haha"},
        LONG.format("Three?"),
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 5, "nth_paragraph": 3, "first_word": "Really"},
        LONG.format('"Really?! Three? No!"'),
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 5, "nth_paragraph": 3, "first_word": "Really"},
        LONG.format("Rea!lly three? No!"),
        False,
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, "\n  a\n  ***\n  b\n  ***\n  c", True),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 3},
        "\n   ***\n  a\n   ***\n b\n   ***\n  c",
        True,
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 3},
        "\n  a\n   ***\n b\n   ***\n  c\n   ***",
        True,
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "\n  a\n   ***\n b\n   ***\n   ***",
        False,
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 4, "relation": LESS},
        "aa,b. aa,b! aa/b. a{b}a?",
        False,
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 5, "relation": LESS},
        "aaaa. aa,b! aaaa. a(b)a?",
        True,
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 4, "relation": LEAST},
        "aaaa. aa,b! aa|b. a&b a?",
        True,
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 5, "relation": LEAST},
        "aa-b. aa,b! aa}b. a,bb?",
        False,
    ),
    (
        "length_constraints:number_words",
        {"num_words": 8, "relation": LESS},
        "\n w1th s0me d1g1ts 1n 7 shoRt w0rds.",
        True,
    ),
    (
        "length_constraints:number_words",
        {"num_words": 16, "relation": LESS},
        "A M0DEL: it us3s s0me d4ta & l3arns, or tr4nsforms\n text b4sed on the pr3vious d4ta & w0rds.",
        False,
    ),
    ("punctuation:no_comma", {}, "\n  Short ones. They need none.\n", True),
    ("punctuation:no_comma", {}, "\n  Since then, there is one.\n", False),
    (
        "startend:end_checker",
        {"end_phrase": "\n  Any more questions?\n  "},
        "\n  It is 7. Any more questions?\n",
        True,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "\n  This is the end.\n  "},
        "\n  I must say that this is the end.\n",
        True,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "\n  This will fail.\n  "},
        "\n  This will fail. It does.\n",
        False,
    ),
    ("startend:quotation", {}, '\n  "All of it is in quotation marks."\n  ', True),
    ("startend:quotation", {}, '\n  "A part is in quotation marks." The rest is not.\n  ', False),
]


@pytest.mark.parametrize(("name", "kwargs", "response", "follows"), CASES)
def test_verdicts_are_those_of_the_benchmarks_tests(
    name: str, kwargs: dict[str, Any], response: str, follows: bool
) -> None:
    strict, _ = follow_list(response, clean_truth([name], [kwargs], "the case"))
    assert strict == [follows]


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("aa,b. aa,b! aa/b. a{b}a? a.", 5),
        ("aa,b! aaaa. a(b)a?", 3),
        ("aaaa. aa,b! aa|b. a&b a?", 4),
        ("aa-b]aa,b! a{b}aa,b.", 2),
        ("A company makes phones. It was founded in 1998 by Lee Park\nand Kim Cho. Its aim is\nto grow.", 3),
        ("The U.S.A has many Ph.D. students. Each may have a .com address\nfor the work that is done.", 2),
        # Rare abbreviations that the trained model knows, and common ones that it does not.
        ("He lives in Calif. and Ore. now.", 1),
        ("Wash. and Va. are states.", 1),
        ("See Fig. 3 for it.", 2),
        ("Ask e.g. Mrs. Hill.", 2),
        ("He met Gov. Hill and Rev. Lee.", 3),
        # How the next word is usually written decides.
        ("It opens at 5 p.m. Dogs may come.", 2),
        ("It opens at 5 p.m. Nobody came.", 1),
        ("Wait... What? Yes.", 2),
    ],
)
def test_sentences_are_counted_as_the_trained_model_counts(response: str, count: int) -> None:
    assert text.count_sentences(response, stop_at=100) == count


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ("word1, word2, word3, word4.", 4),
        ("\n  Which is the best way from a hydro-thermal\n  system to a hydro-renewable one", 15),
        ("\n Hyphenated-word has two word counts.\n ", 6),
    ],
)
def test_words_are_counted_as_the_benchmark_counts(response: str, count: int) -> None:
    assert text.count_words(response) == count
