"""``math_verify``: what its job pays for, and that nobody earns it by copying numbers from the question."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from torchrl_grpo.rewards.sandbox import math_job


def verdict(answer: str, truth: str) -> float:
    return math_job.run({"answer": answer, "truth": truth})


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("I think 16+16 is something else entirely.", "32"),
        ("What is 16+16?", "32"),
        (r"\boxed{16+16}", "32"),
        ("16+16=5", "32"),
        ("5=16+16", "32"),
        ("x=16+16", "32"),
        ("4*8", "32"),
        ("64/2", "32"),
        ("(64)/(2)", "32"),
        ("I think 64/2 is something else entirely.", "32"),
        (r"$64 \div 2$", "32"),
        (r"\frac{64}{2}", "32"),
        (r"\left(\frac{64}{2}\right)", "32"),
        (r"$$\left[ \frac{64}{2} \right]$$", "32"),
        ("{64}/{2}", "32"),
        (r"64\,/\,2", "32"),
        (r"64 \over 2", "32"),
        (r"{64 \over 2}", "32"),
        (r"-\frac{-64}{2}", "32"),
        (r"\frac{ 64 }{ -2 }", "-32"),
        (r"\frac{\frac{128}{2}}{2}", "32"),
        ("128/2/2", "32"),
        (r"64/2 \cdot 1", "32"),
        (r"\frac{64}{2}^\circ", "32"),
        (r"x=\frac{64}{2}", "32"),
        (r"5=\frac{64}{2}", "32"),
        (r"\frac{64}{2}=128/4", "32"),
        ("2^5", "32"),
        (r"\sqrt{1024}", "32"),
        (r"\binom{5}{2}", "10"),
        ("5!", "120"),
        ("$(10^9)!$", "120"),
        (r"\log_2 8", "3"),
        (r"\sqrt8+\sqrt2", r"3\sqrt{2}"),
        (r"\frac13+\frac13", r"\frac{2}{3}"),
        ("(1+1,2)", "(2,2)"),
    ],
)
def test_the_question_earns_nothing(answer: str, truth: str) -> None:
    assert verdict(answer, truth) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("16+16=32", "32"),
        ("The sum 16+16 is 32.", "32"),
        ("It is 5 cm", "5"),
        ("$x=2+3=5$", "5"),
        # The side that is worked out last, wherever it stands and whatever the others are.
        ("x = 5 * 4 = 20", "20"),
        (r"$x = 5 \cdot 4 = 20$", "20"),
        (r"\boxed{n = 4 \cdot 5 = 20}", "20"),
        ("total = 16 + 4 = 20", "20"),
        ("area = 5 * 4 = 20", "20"),
        ("x = 2 * 10 = 5 * 4 = 16 + 4 = 20", "20"),
        ("x = 20 = 5 * 4", "20"),
        ("16 + 4 = 20 = x", "20"),
        ("y = x + 1 + 1 = x + 2", "x+2"),
        ("20 = 5 * 4 = 20", "20"),
        (r"4 = \frac{8}{2}", "4"),
        (r"4 = \frac{8}{2} = 16/4", "4"),
        (r"\frac{8}{2} = 4", "4"),
        ("32.0", "32"),
        ("10/4", "2.5"),
        (r"2\frac{1}{2}", r"\frac{5}{2}"),
        (r"1/\sqrt{3}", r"\frac{\sqrt{3}}{3}"),
        (r"3 \times 10^5", "300000"),
        ("50%", r"50\%"),
        (r"90^\circ", "90"),
        ("3:4", r"\frac{3}{4}"),
        (r"\left(\frac{3}{4}\right)", "0.75"),
        (r"\left(32\right)", "32"),
        ("{32}", "32"),
        (r"\{32\}", r"\{32\}"),
        ("-(-32)", "32"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt2+1", r"1+\sqrt{2}"),
        # What the truth leaves undone, an answer may.
        ("2^{100}", "2^{100}"),
        ("10!", "10!"),
        ("1024", "2^{10}"),
        (r"\infty", r"\infty"),
        ("no solution", r"\text{no solution}"),
    ],
)
def test_what_is_worked_out_earns(answer: str, truth: str) -> None:
    assert verdict(answer, truth) == 1.0


# Of a truth that is one number, the answer must have the number written out.
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        # Numbers side by side, which the parser adds.
        ("48 24", "72"),
        ("1 2 3 66", "72"),
        ("12 345", "357"),
        (r"\boxed{48 24}", "72"),
        (r"\boxed{48 24", "72"),
        ("$48 24$", "72"),
        (r"\(48 24\)", "72"),
        ("48(24)", "72"),
        ("(48)(24)", "72"),
        ("{48}{24}", "72"),
        (r"48\,24", "72"),
        (r"48 \text{ } 24", "72"),
        (r"48\quad 24", "72"),
        ("48~24", "72"),
        ("４８ ２４", "72"),
        (r"48 \frac{48}{2}", "72"),
        ("71 1/1", "72"),
        ("x = 48 24", "72"),
        ("48 24 clips", "72"),
        # Several numbers, one of which is right.
        ("48, 24", "24"),
        ("48; 24", "24"),
        ("48\n24", "24"),
        ("$48$ $24$", "24"),
        ("$48$\n$24$", "24"),
        ("48 & 24", "24"),
        ("48 and 24", "24"),
        ("48 plus 24", "24"),
        ("$48$ plus $24$", "24"),
        (r"\boxed{48} \boxed{24}", "24"),
        (r"\boxed{48, 24", "24"),
        ("48, 72, 24", "72"),
        ("72 or 73", "72"),
        ("It is 1 or 72", "72"),
        ("The answer is 48 24.", "48"),
        ("She sold 48 · 24 in total", "24"),
        ("She sold ４８ ２４ in total", "24"),
        ("The answer is 2^{5}.", "2"),
        ("x=48, y=24", "24"),
        ("x=48 y=24", "24"),
        (r"\{48, 24\}", "24"),
        ("(48, 24)", "24"),
        (r"\begin{pmatrix}48&24\end{pmatrix}", "24"),
        # What the parser works out.
        (r"\gcd(144, 72)", "72"),
        (r"\operatorname{lcm}(8, 9)", "72"),
        (r"\begin{vmatrix}48&-24\\1&1\end{vmatrix}", "72"),
        (r"\int_{-24}^{48} 1 dx", "72"),
        (r"\sum_{i=1}^{2} 36", "72"),
        (r"7.2 \times 10^1", "72"),
        (r"72 \cdot 1", "72"),
        ("72^1", "72"),
        ("7200%", "72"),
        ("4!", "24"),
        # Not the number.
        ("5x", "5"),
        ("5 - x", "5"),
        ("5+", "5"),
        ("> 5", "5"),
        ("x != 5", "5"),
        (r"5\pi", "5"),
        ("-5", "5"),
        ("72²", "72"),
        ("72³", "72"),
        ("72⁻¹", "72"),
        ("(72)²", "72"),
        ("I think the answer is 72².", "72"),
        ("negative 72", "72"),
        ("minus 72", "72"),
        (r"\text{minus }72", "72"),
        ("I think it is minus 72", "72"),
        ("I think it is negative 72.", "72"),
        ("x minus 5", "-5"),
        ("10 minus 5", "-5"),
        ("negative -5", "-5"),
        ("--72", "72"),
        ("sqrt(72)", "72"),
        ("So the answer is sqrt(72)", "72"),
        ("log(72)", "72"),
        ("72 pi", "72"),
        ("half of 72", "72"),
        ("I think it is half of 72", "72"),
        ("It is twice $72$", "72"),
        ("double 72", "72"),
        ("72 dozen", "72"),
        ("72 hundred", "72"),
        ("72 thousand", "72"),
        ("72 million", "72"),
        ("It is about 72 million in total", "72"),
        ("The answer is $72$ million.", "72"),
        # Around units and in emphasis.
        (r"48 \text{ cm} \cdot 24 \text{ cm}", "1152"),
        (r"48 \cdot \text{cm } 24", "48"),
        (r"48 \frac{m}{24}", "2"),
        (r"72 \frac{km}{2h}", "72"),
        (r"72 \frac{km}{2h}", "36"),
        (r"\operatorname{round}(72)", "72"),
        ("*48*24*", "24"),
        ("*48* *24*", "24"),
        ("48 *24* 3", "24"),
        ("_48_24_", "24"),
        # Units in the truth make no difference.
        ("144/2", "72 cm"),
        ("48 24", r"72\text{ cm}"),
    ],
)
def test_a_number_must_be_written_out(answer: str, truth: str) -> None:
    assert verdict(answer, truth) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("18 dollars", "18"),
        ("12.50 dollars", "12.50"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        ("$18 per day", "18"),
        ("14 people", "14"),
        ("6 years old", "6"),
        ("72 km/h", "72"),
        ("72 m/s^2", "72"),
        (r"72\text{ cm}^2", "72"),
        ("72 8-ounce glasses", "72"),
        ("x is 5", "5"),
        ("Total: 72", "72"),
        ("**72** clips", "72"),
        (r"$72$ clips", "72"),
        (r"\boxed{72 \text{ clips}}", "72"),
        (r"\boxed{72 clips}", "72"),
        ("10%", "10"),
        (r"50\%", "0.5"),
        ("0.5", r"50\%"),
        ("100%", "1"),
        ("1 1/2", "3/2"),
        ("1½", "3/2"),
        ("5 1/2 cups", "5.5"),
        (r"2\frac{1}{2}", "5/2"),
        ("11/2", "5 1/2"),
        ("1 000", "1000"),
        ("12 345", "12345"),
        ("1,234", "1234"),
        (r"10,\!000", "10000"),
        ("1000,99", "1000.99"),
        ("７２", "72"),
        ("0.333333", r"\frac{1}{3}"),
        (r"x = \frac{1}{3} \approx 0.3", r"\frac{1}{3}"),
        (r"x \approx 72", "72"),
        ("72 = 48 + 24", "72"),
        (r"2x = 144 \Rightarrow x = 72", "72"),
        ("48 + 24 = 72 clips", "72"),
        ("48 + 24 = <<48+24=72>>72", "72"),
        ("48 + 24 = 36 * 2\n36 * 2 = 72", "72"),
        ("She sold 48 and 24. That makes 72 in all.", "72"),
        ("$48 + 24$ is $72$", "72"),
        ("In April she sold $\\boxed{48}$. With the clips of May it is $\\boxed{72}$.", "72"),
        ("It is $x$, and \\boxed{255} is only a part. The final answer is $72$. I hope it is correct.", "72"),
        ("The temperature is -5 degrees", "-5"),
        ("minus 5", "-5"),
        ("x = minus 5", "-5"),
        ("negative 5", "-5"),
        ("The temperature is negative 5 degrees", "-5"),
        (r"-\frac{-1}{2}", "1/2"),
        ("72 N·m", "72"),
        (r"72 N\cdot m", "72"),
        ("72 kg·m/s", "72"),
        (r"72\ \text{kg}\cdot\text{m/s}^2", "72"),
        (r"72 \frac{\text{m}}{\text{s}}", "72"),
        (r"72\,\frac{km}{h}", "72"),
        (r"72\ \mathrm{\frac{m}{s^{2}}}", "72"),
        (r"{\bf 72}", "72"),
        (r"72 \rm cm", "72"),
        (r"72 \operatorname{cm}", "72"),
        (r"\therefore 72", "72"),
        (r"\textdollar 72", "72"),
        (r"72\cent", "72"),
        ("*72*", "72"),
        ("***72***", "72"),
        ("_72_", "72"),
        ("*72* clips", "72"),
        ("n = 72 (n ≥ 0)", "72"),
        ("72 hundred-dollar bills", "72"),
        ("Half of 144 is 72", "72"),
        (r"72\text{ million dollars}", r"72\text{ million}"),
        ("72", "72 cm"),
        ("72 cm", r"72\text{ cm}"),
    ],
)
def test_a_number_may_have_a_unit_words_and_notation_around_it(answer: str, truth: str) -> None:
    assert verdict(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "value"),
    [
        ("1,2", "1, 2", 1.0),
        ("2 and 1", "1, 2", 1.0),
        ("x=1 or x=2", "1, 2", 1.0),
        (r"\{2, 1\}", r"\{1,2\}", 1.0),
        (r"\{1, 1 1\}", r"\{1,2\}", 0.0),
        ("(3, 4)", "(3,4)", 1.0),
        ("(3, 4).", "(3,4)", 1.0),
        ("(4, 3)", "(3,4)", 0.0),
        ("(1 1/2, 3)", r"(\frac{3}{2}, 3)", 1.0),
        ("(24 24, 24)", "(48, 24)", 0.0),
        (r"(1,2) \cup (3,4)", r"(1,2)\cup(3,4)", 1.0),
        ("5 < x", "x > 5", 1.0),
        ("2√2", r"2\sqrt{2}", 1.0),
        (r"2 \sqrt{3} 4", r"8\sqrt{3}", 0.0),
        (r"\int_0^1 \frac{1}{1+x^2} dx", r"\frac{\pi}{4}", 0.0),
        ("6yx", "6xy", 1.0),
        ("6", "6xy", 0.0),
        ("x = 4*8 = 32", "x = 32", 1.0),
        ("y = 4*8 = 32", "x = 32", 0.0),
        ("x = 4*8", "x = 32", 0.0),
        ("x = 16 16", "x = 32", 0.0),
        # The parser divides 12 by 0.
        ("12:00", "12:00", 1.0),
        ("11:00", "12:00", 0.0),
    ],
)
def test_other_truths_are_compared_as_expressions(answer: str, truth: str, value: float) -> None:
    assert verdict(answer, truth) == value


# --- GSM8K --------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?")
SEPARATORS = [" ", ", ", "; ", "\n", " and ", " or ", " & ", "~", r"\,", r"\ ", r"\quad ", r" \text{ } "]
SEPARATORS += ["+", " * ", r" \times ", r" \cdot ", " - ", " plus ", "$ $", "* *", r" cm\cdot ", r"\cdot cm "]
AROUND = ["{}", r"\boxed{{{}}}", "${}$", "*{}*"]


def gsm8k(folder: Path | None) -> list[tuple[str, str]]:
    if folder is None:
        pytest.skip("the full test set of GSM8K is not on this machine")
    rows = map(json.loads, (folder / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["question"], row["answer"].rpartition("####")[2].strip()) for row in rows]


def side_by_side(numbers: tuple[str, ...]) -> Iterator[str]:
    for separator in SEPARATORS:
        yield separator.join(numbers)
    yield "".join(f"({number})" for number in numbers)
    yield "".join(f"{{{number}}}" for number in numbers)
    yield rf"\{{{','.join(numbers)}\}}"
    yield rf"{numbers[0]} \frac{{cm}}{{{numbers[1]}}}"
    yield ", ".join(f"{name}={number}" for name, number in zip("xyz", numbers, strict=False))
    yield " ".join(numbers).translate({ord(str(digit)): chr(0xFF10 + digit) for digit in range(10)})


@pytest.mark.slow
def test_numbers_of_the_question_earn_nothing(shared_data: Path | None) -> None:
    """Pairs and triples whose sum or product is the truth, pairs with the truth in them, and some others.

    What is around them changes with the set of numbers, so that each way to write them has all four.
    """
    tried, paid = 0, []
    draw = random.Random(0)
    turns = itertools.count()
    for question, truth in gsm8k(shared_data):
        numbers = list(dict.fromkeys(NUMBER.findall(question)))[:6]
        value = Fraction(truth.replace(",", ""))
        for chosen in itertools.chain(itertools.combinations(numbers, 2), itertools.combinations(numbers, 3)):
            values = [Fraction(number.replace(",", "")) for number in chosen]
            results = [sum(values), math.prod(values), *(values if len(values) == 2 else [])]
            if value not in results and draw.random() > 0.02:
                continue
            turn = next(turns)
            for number, text in enumerate(side_by_side(chosen)):
                answer = AROUND[(turn + number) % len(AROUND)].format(text)
                tried += 1
                if verdict(answer, truth) != 0.0:
                    paid.append((answer, truth))
    assert tried > 10_000 and paid == []


@pytest.mark.slow
def test_the_right_number_earns_with_the_noun_of_the_question(shared_data: Path | None) -> None:
    right = []
    for question, truth in gsm8k(shared_data):
        for noun in re.findall(r"[Hh]ow many ((?:[^\s?.,;]+ ?){1,3})", question):
            words = noun.split()
            answers = [f"{truth} {' '.join(words[:count])}" for count in range(1, len(words) + 1)]
            right += [verdict(answer, truth) for answer in [*answers, rf"\boxed{{{answers[-1]}}}"]]
        right += [verdict(form.format(truth), truth) for form in ("${}", "{} dollars", "x is {}")]
    assert len(right) > 5_000 and sum(right) >= 0.995 * len(right)


@pytest.mark.parametrize("name", ["think", "thinking", "THINK ", "seed:think"])
def test_only_what_follows_the_thoughts_is_judged(name: str) -> None:
    assert verdict(f"<{name}>Is it 4 or 5?</{name}>6", "6") == 1.0
    assert verdict(f"<{name}>6</{name}>7", "6") == 0.0
