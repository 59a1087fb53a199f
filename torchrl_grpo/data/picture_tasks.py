"""Questions about pictures that are drawn here, with exact answers: ``env.dataset=pictures``.

``env.task_args.kinds`` chooses among counting shapes, a clock, bars, dice, a number line and a fraction. A
problem depends only on the seed and its number. Whether it is held out depends on what is drawn, so no run
trains on a held-out problem, in whatever colors where they do not matter.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Set
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.pictures import PICTURE_KINDS
from torchrl_grpo.config.derived import held_out_problems
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.data import pictures, problems, prompts
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.rows import columns, sources
from torchrl_grpo.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

# One problem of this many is held out.
_HELD_OUT_SHARE = 5
_MOST_DRAWS = 1_000
_SIZE = 96
_COLORS = {
    "red": (204, 32, 32),
    "green": (24, 140, 60),
    "blue": (36, 72, 210),
    "orange": (235, 140, 0),
    "purple": (140, 50, 160),
}
_INK = (30, 30, 30)


class Drawn(NamedTuple):
    """A drawn problem.

    Attributes:
        question: what is asked.
        answer: the answer.
        identity: what is drawn, without its colors and places where they do not matter.
        picture: the picture.
    """

    question: str
    answer: str
    identity: str
    picture: Image


Draw = Callable[[random.Random, int], Drawn]


def load(cfg: Config) -> problems.Problems:
    """Load the training problems, which are drawn on demand, and the held-out ones.

    Raises:
        ConfigError: ``env.task_args`` is wrong.
        DataError: no problem is held out.
    """
    count = held_out_problems(cfg)
    held_out: dict[str, Example] = {}
    drawn = Generated(cfg.env, problems.HELD_OUT_SEED, "test", is_held_out=True)
    for number in range(20 * count):
        if len(held_out) == count:
            break
        example = drawn.example_at(number)
        held_out.setdefault(example.identity, example)
    notes = []
    if len(held_out) < count:
        notes.append(f"env.dataset=pictures has {len(held_out)} different held-out problems of these kinds")
    train = Generated(cfg.env, cfg.seed, "train", is_held_out=False)
    return problems.Problems(train=train, held_out=list(held_out.values()), notes=notes)


def example(row: sources.Row, env: EnvConfig, id: str) -> Example:
    """Convert a row of stored answers to an example without its picture.

    Raises:
        DataError: a column is missing.
    """
    question = columns.text(row, "question", "pictures")
    answer = columns.answer(row, "answer", "pictures")
    return Example(id, prompts.messages(env, "pictures", question), {"answer": answer}, question=question)


class Generated(LazyExamples):
    """``env.task_size`` problems, each drawn on access.

    Args:
        env: configuration; ``task_args``, ``task_size`` and the prompt keys are read.
        seed: seed of the problems.
        split: name of the split, for the ids.
        is_held_out: whether the problems are those that no run trains on.
    """

    def __init__(self, env: EnvConfig, seed: int, split: str, is_held_out: bool) -> None:
        self._env, self._seed, self._split, self._is_held_out = env, seed, split, is_held_out
        self._kinds = list(env.task_args.get("kinds", PICTURE_KINDS))
        self._size = int(env.task_args.get("size", _SIZE))
        self._trusted = prompts.trusted(env, "pictures")

    def __len__(self) -> int:
        return self._env.task_size

    def without(self, keys: Set[str]) -> Generated:
        """Return these examples: none of them is held out."""
        return self

    def example_at(self, index: int) -> Example:
        """See :class:`~torchrl_grpo.data.example.LazyExamples`.

        Raises:
            DataError: the kinds have too few different problems.
        """
        for attempt in range(_MOST_DRAWS):
            rng = random.Random(f"{self._seed}/{self._split}/{index}/{attempt}")
            kind = self._kinds[rng.randrange(len(self._kinds))]
            drawn = _DRAW[kind](rng, self._size)
            if _is_held_out(drawn.identity) == self._is_held_out:
                return self._example(drawn, index)
        split = "held out" if self._is_held_out else "to train on"
        raise DataError(
            f"env.task_args.kinds={self._kinds}: none of {_MOST_DRAWS} drawn problems is one {split}; add a "
            "kind"
        )

    def _example(self, drawn: Drawn, index: int) -> Example:
        id = f"pictures/{self._split}/{index + 1}"
        picture = pictures.from_bytes(pictures.encode(drawn.picture), id)
        turns = prompts.messages(self._env, "pictures", drawn.question)
        turns[-1]["content"] = pictures.MARK + turns[-1]["content"]
        return Example(
            id,
            turns,
            {"answer": drawn.answer},
            solution=prompts.solution(self._env, "", drawn.answer),
            question=pictures.identity(drawn.question, [picture]),
            identity=drawn.identity,
            trusted=self._trusted,
            pictures=(picture,),
        )


def _is_held_out(identity: str) -> bool:
    return hashlib.sha256(identity.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def _canvas(size: int) -> tuple[Image, ImageDraw]:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (size, size), "white")
    return picture, ImageDraw.Draw(picture)


@lru_cache(maxsize=8)
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _color(rng: random.Random) -> tuple[int, int, int]:
    return _COLORS[rng.choice(list(_COLORS))]


def _count(rng: random.Random, size: int) -> Drawn:
    """How many shapes of a color, or of a form: they stand in the cells of a grid."""
    picture, draw = _canvas(size)
    cells = [(row, column) for row in range(4) for column in range(4)]
    asked_color, asked_form = rng.choice(list(_COLORS)), rng.choice(["circles", "squares"])
    shapes = [
        (rng.choice(list(_COLORS)), rng.choice(["circles", "squares"]), cell)
        for cell in rng.sample(cells, rng.randint(1, 10))
    ]
    step = size / 4
    for color, form, (row, column) in shapes:
        box = [step * (column + 0.15), step * (row + 0.15), step * (column + 0.85), step * (row + 0.85)]
        (draw.ellipse if form == "circles" else draw.rectangle)(box, fill=_COLORS[color])
    if rng.random() < 0.5:
        answer = sum(color == asked_color for color, _, _ in shapes)
        question = f"How many {asked_color} shapes are in the picture?"
    else:
        answer = sum(form == asked_form for _, form, _ in shapes)
        question = f"How many {asked_form} are in the picture?"
    return Drawn(question, str(answer), f"count {question} {sorted(shapes)}", picture)


def _clock(rng: random.Random, size: int) -> Drawn:
    picture, draw = _canvas(size)
    hour, minute = rng.randrange(1, 13), 5 * rng.randrange(12)
    middle, radius = size / 2, size * 0.45
    draw.ellipse([middle - radius, middle - radius, middle + radius, middle + radius], outline=_INK, width=2)

    def point(turn: float, length: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn
        return middle + length * math.sin(angle), middle - length * math.cos(angle)

    for mark in range(12):
        inner = 0.8 if mark % 3 == 0 else 0.9
        draw.line([point(mark / 12, radius * inner), point(mark / 12, radius)], fill=_INK, width=2)
    color = _color(rng)
    draw.line([(middle, middle), point((hour + minute / 60) / 12, radius * 0.5)], fill=color, width=5)
    draw.line([(middle, middle), point(minute / 60, radius * 0.8)], fill=color, width=2)
    question = "What time does the clock show? Write it as hours:minutes, for example 3:05."
    return Drawn(question, f"{hour}:{minute:02}", f"clock {hour}:{minute:02}", picture)


def _bars(rng: random.Random, size: int) -> Drawn:
    """How much more one bar shows than another; lines stand at each unit."""
    picture, draw = _canvas(size)
    names = rng.sample(list(_COLORS), 3)
    heights = [rng.randint(1, 9) for _ in names]
    unit, bottom = size * 0.095, size * 0.95
    for level in range(10):
        draw.line([(0, bottom - level * unit), (size, bottom - level * unit)], fill=(215, 215, 215))
    for place, (name, height) in enumerate(zip(names, heights, strict=True)):
        left = size * (0.1 + 0.3 * place)
        draw.rectangle([left, bottom - height * unit, left + size * 0.2, bottom], fill=_COLORS[name])
    draw.line([(0, bottom), (size, bottom)], fill=_INK, width=2)
    first, second = rng.sample(range(3), 2)
    if heights[first] < heights[second]:
        first, second = second, first
    question = (
        f"Lines are one unit apart. By how many units is the {names[first]} bar taller than the "
        f"{names[second]} bar?"
    )
    if heights[first] == heights[second]:
        question = f"Lines are one unit apart. How many units tall is the {names[first]} bar?"
    answer = heights[first] - heights[second] or heights[first]
    third = sum(heights) - heights[first] - heights[second]
    return Drawn(question, str(answer), f"bars {heights[first]} {heights[second]} {third}", picture)


def _dice(rng: random.Random, size: int) -> Drawn:
    picture, draw = _canvas(size)
    values = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    spots = {1: [4], 2: [0, 8], 3: [0, 4, 8], 4: [0, 2, 6, 8], 5: [0, 2, 4, 6, 8], 6: [0, 2, 3, 5, 6, 8]}
    half, color = size / 2, _color(rng)
    for value, cell in zip(values, rng.sample(range(4), len(values)), strict=True):
        left, top = half * (cell % 2) + size * 0.05, half * (cell // 2) + size * 0.05
        side = half - size * 0.1
        draw.rectangle([left, top, left + side, top + side], outline=_INK, width=2)
        for spot in spots[value]:
            x, y = left + side * (0.25 + 0.25 * (spot % 3)), top + side * (0.25 + 0.25 * (spot // 3))
            draw.ellipse([x - side * 0.09, y - side * 0.09, x + side * 0.09, y + side * 0.09], fill=color)
    question = "What is the sum of the spots on all dice?"
    return Drawn(question, str(sum(values)), f"dice {sorted(values)}", picture)


def _number_line(rng: random.Random, size: int) -> Drawn:
    picture, draw = _canvas(size)
    start, step = rng.randrange(0, 50, 5), rng.choice([1, 2, 5])
    place = rng.randrange(1, 10)
    left, width, level = size * 0.08, size * 0.84, size * 0.6
    draw.line([(left, level), (left + width, level)], fill=_INK, width=2)
    for mark in range(11):
        x = left + width * mark / 10
        draw.line([(x, level - size * 0.04), (x, level + size * 0.04)], fill=_INK)
        if mark in (0, 10):
            text = str(start + mark * step)
            draw.text((x, level + size * 0.15), text, fill=_INK, font=_font(size // 7), anchor="mm")
    x = left + width * place / 10
    tip, top = (x, level - size * 0.05), level - size * 0.2
    draw.polygon([tip, (x - size * 0.05, top), (x + size * 0.05, top)], fill=_color(rng))
    question = "Which number does the arrow on the number line point to?"
    return Drawn(question, str(start + place * step), f"number line {start} {step} {place}", picture)


def _fraction(rng: random.Random, size: int) -> Drawn:
    picture, draw = _canvas(size)
    parts = rng.randint(2, 12)
    colored = rng.randint(1, parts - 1)
    box, turn, color = [size * 0.05, size * 0.05, size * 0.95, size * 0.95], rng.randrange(360), _color(rng)
    for part in range(parts):
        start, stop = (turn + 360 * edge / parts for edge in (part, part + 1))
        draw.pieslice(box, start, stop, fill=color if part < colored else "white", outline=_INK)
    divisor = math.gcd(colored, parts)
    question = "What share of the circle is colored? Write a fraction in lowest terms, for example 1/2."
    return Drawn(question, f"{colored // divisor}/{parts // divisor}", f"fraction {colored}/{parts}", picture)


_DRAW: dict[str, Draw] = {
    "count": _count,
    "clock": _clock,
    "bars": _bars,
    "dice": _dice,
    "number_line": _number_line,
    "fraction": _fraction,
}
assert tuple(_DRAW) == PICTURE_KINDS
