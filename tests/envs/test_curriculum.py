"""Problems drawn by their pass rate: probabilities, memory and state."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import validate
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.envs.curriculum import PassRateStream
from torchrl_grpo.errors import ConfigError, DataError

EXAMPLES = [Example(f"e/{n}", [{"role": "user", "content": str(n)}]) for n in range(6)]


def stream(seed: int = 0, **changes: Any) -> PassRateStream:
    settings = {"bands": [0.2, 0.8], "weights": [1.0, 4.0, 0.0], "unseen_weight": 2.0, **changes}
    return PassRateStream(EXAMPLES, seed, **settings)


def index_of(example: Example) -> int:
    return EXAMPLES.index(example)


def with_rates(rates: dict[int, float], **changes: Any) -> PassRateStream:
    """A stream that knows these pass rates of problems."""
    made = stream(**changes)
    made.load_learned_state({"rates": list(rates.items()), "chosen": []})
    return made


@pytest.mark.slow
def test_the_weights_of_the_bands_are_the_probabilities() -> None:
    made = with_rates({0: 0.0, 1: 0.5, 2: 1.0, 3: 0.2})
    counts = Counter(index_of(example) for example in made.draw(20_000))
    weights = {0: 1.0, 1: 4.0, 2: 0.0, 3: 4.0, 4: 2.0, 5: 2.0}
    assert counts[2] == 0
    for index, weight in weights.items():
        assert counts[index] / 20_000 == pytest.approx(weight / 13, abs=0.012)


def test_a_new_group_counts_half() -> None:
    made = stream()
    first = index_of(made.at(0))
    made.observe({0: 0.5})
    number = next(n for n in range(1, 1_000) if index_of(made.at(n)) == first)
    made.observe({number: 1.0})
    assert dict(made.learned_state()["rates"])[first] == 0.75
    assert made.metrics() == {"data/seen": 1 / 6, "data/pass_rate": 0.75}


def test_a_draw_stays_what_it_was_when_rates_change() -> None:
    made = stream()
    before = [made.at(number).id for number in range(50)]
    made.observe({number: 1.0 for number in range(40)})
    assert [made.at(number).id for number in range(50)] == before
    after = [made.at(number).id for number in range(50, 300)]
    solved = set(before[:40])
    assert len(solved) == 6 or not solved & set(after), "solved problems have weight 0"


def test_problems_are_drawn_evenly_where_every_weight_is_zero() -> None:
    made = with_rates(dict.fromkeys(range(6), 1.0))
    counts = Counter(index_of(example) for example in made.draw(6_000))
    assert min(counts.values()) > 800


def test_the_state_goes_on_with_the_same_problems() -> None:
    whole = stream(5)
    for start in range(0, 64, 8):
        whole.draw(8)
        whole.observe({number: (number % 3) / 2 for number in range(start, start + 8)})
    resumed = stream(5)
    resumed.load_state_dict(whole.state_dict())
    resumed.load_learned_state(json.loads(json.dumps(whole.learned_state())))
    assert [example.id for example in resumed.draw(40)] == [example.id for example in whole.draw(40)]
    assert resumed.learned_state() == whole.learned_state()
    assert [example.id for example in stream(6).draw(40)] != [example.id for example in stream(5).draw(40)]


@pytest.mark.parametrize("count", [1, 2, 7, 64, 100])
def test_a_draw_is_that_of_all_weights_in_a_row(count: int) -> None:
    examples = [Example(str(n), []) for n in range(count)]
    settings: dict[str, Any] = {"bands": [0.1, 0.7], "weights": [0.3, 1.0, 0.1], "unseen_weight": 0.7}
    made = PassRateStream(examples, 3, **settings)
    rates: dict[int, float] = {}
    moments = random.Random(count)
    for start in range(0, 400, 8):
        weights = [0.7 if n not in rates else settings["weights"][(rates[n] >= 0.1) + (rates[n] >= 0.7)]
                   for n in range(count)]  # fmt: skip
        for number in range(start, start + 8):
            draw = random.Random(f"3/pass_rate/{number}").random() * sum(weights)
            expected = next(n for n, bound in enumerate(itertools.accumulate(weights)) if bound > draw)
            assert made.at(number).id == str(expected)
        made.observe({number: moments.choice([0.0, 0.5, 1.0]) for number in range(start, start + 8)})
        rates = dict(made.learned_state()["rates"])


def test_a_draw_of_many_problems_takes_hardly_longer_than_one_of_few() -> None:
    def seconds(count: int) -> float:
        made = PassRateStream(
            [Example("e", [])] * count, 0, bands=[0.5], weights=[1.0, 0.3], unseen_weight=0.7
        )
        made.at(0)
        starts = [time.perf_counter()]
        for number in range(1, 30):
            made.observe({number - 1: 0.5})
            made.at(number)
            starts.append(time.perf_counter())
        return min(after - before for before, after in itertools.pairwise(starts))

    # To look at each of them would take a thousand times as long.
    assert seconds(200_000) < 100 * seconds(200)


def config(tmp_path: Path, **changes: Any) -> Config:
    rows = [{"question": f"{n}?", "answer": str(n), "level": (7 * n) % 10} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = Config()
    cfg.eval.num_problems = 2
    cfg.env.dataset, cfg.env.data_path = "jsonl", str(tmp_path / "rows.jsonl")
    for name, value in changes.items():
        setattr(cfg.env, name, value)
    return cfg


def test_a_column_orders_the_problems(tmp_path: Path) -> None:
    cfg = config(tmp_path, order_by="level", shuffle=False)
    validate(cfg)
    levels = [example.columns["level"] for example in load(cfg).train]
    assert levels == sorted(levels) and len(levels) == 8


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"order_by": "depth", "shuffle": False},
            "has no such column; its columns are question, answer, level",
        ),
        ({"order_by": "level"}, "an order needs env.shuffle=false"),
        ({"pass_rate_weights": [1.0, 2.0]}, "only read if env.sampling is pass_rate"),
        ({"sampling": "pass_rate", "pass_rate_bands": [0.5, 0.5]}, "in increasing order"),
        ({"sampling": "pass_rate", "pass_rate_bands": [0.5]}, "must be 2 numbers, one for each band"),
        ({"sampling": "pass_rate", "pass_rate_weights": [0.0, 0.0, 0.0]}, "not all of them 0"),
        ({"sampling": "pass_rate", "mixture": [{"dataset": "gsm8k"}]}, "env"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, DataError), match=error):
        cfg = config(tmp_path, **changes)
        validate(cfg)
        load(cfg)
