"""The measurements of ``python -m benchmarks.scale`` run, and its table says what they gave."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.scale import rounds
from benchmarks.scale.__main__ import PARTS
from benchmarks.scale.parts import Part, exponent, in_turn, microseconds, table

_SMALL = {
    "dispatcher": (4, 8),
    "rewards": (16,),
    "joined": (32,),
    "checkpoint": (8_000,),
    "resume": (8_000,),
    "packing": (16, 64),
    "curriculum": (8, 16),
    "ray": (16_000,),
    "servers": (16_000,),
    "judge": (16,),
    "publication": (1,),
    "folder": (1,),
    "gathered": (2,),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SMALL)
def test_a_part_can_be_measured_at_small_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_MOST_TOKENS", 16_000)
    costs = replace(PARTS[name], sizes=_SMALL[name]).costs()
    assert len(costs) == len(_SMALL[name]) and all(cost > 0 for cost in costs)


def test_parts_and_sizes_take_turns_and_the_least_cost_of_each_counts() -> None:
    costs, measured = [2.0, 8.0, 5.0, 1.0, 9.0], list[int]()

    def measure(size: int) -> float:
        measured.append(size)
        return costs[len(measured) - 1]

    often = Part("sorting", "rows", (1, 4), measure, microseconds, "µs a row", repeats=2)
    once = Part("summing", "rows", (2,), measure, microseconds, "µs a row")
    lines = list[str]()
    first, second = in_turn({"often": often, "once": once}, lines.append)
    assert (first["name"], first["costs"], second["costs"]) == ("often", [1.0, 8.0], [5.0])
    assert measured == [1, 4, 2, 1, 4]
    # From 2 to 8, and from 1 to 9.
    assert first["exponent"] == pytest.approx((1 + math.log(9, 4)) / 2)
    assert [line.partition(":")[0] for line in lines] == ["once", "often"]


def test_the_table_has_costs_and_the_power_with_which_they_grow() -> None:
    assert exponent((10, 1_000), (2.0, 20_000.0)) == pytest.approx(2)
    sizes = (1_000, 4_000)
    part = Part("sorting", "rows", sizes, lambda size: size**1.5 * 1e-6, microseconds, "µs a row", target=70)
    assert table([part.result([part.costs()])]).splitlines()[-1] == (
        "| sorting | 1,000 to 4,000 rows | 31.6 µs a row | 63.2 µs a row | at most 70 µs a row | 1.50 | no |"
    )


@pytest.mark.parametrize(
    ("target", "is_least", "target_from", "holds"),
    [
        (10.0, False, 0, True),
        (9.0, False, 0, False),
        # The cost of a row falls from 10 to 5.
        (5.0, False, 4, True),
        (5.0, True, 0, True),
        (6.0, True, 0, False),
        (None, False, 0, True),
    ],
)
def test_a_target_bounds_the_figures_of_its_sizes(
    target: float | None, is_least: bool, target_from: int, holds: bool
) -> None:
    part = Part(
        "sorting",
        "rows",
        (1, 4),
        lambda size: 10 * size**0.5,
        lambda size, cost: cost / size,
        "a row",
        target,
        is_least,
        target_from,
    )
    assert part.result([part.costs()])["holds"] is holds
