"""The measurements of ``python -m benchmarks.scale`` run, and its table says what they gave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale import collection, rounds
from benchmarks.scale.parts import Part, exponent, microseconds, table

_SMALL = {
    "dispatcher": (4, 8),
    "rewards": (16,),
    "checkpoint": (8_000,),
    "resume": (8_000,),
    "packing": (16, 64),
    "curriculum": (8, 16),
    "ray": (16_000,),
    "tokens": (16_000,),
}


@pytest.mark.parametrize("name", _SMALL)
def test_a_part_can_be_measured_at_small_sizes(name: str) -> None:
    part = {**collection.PARTS, **rounds.PARTS}[name]
    result = replace(part, sizes=_SMALL[name]).run()
    assert all(cost > 0 for cost in result["costs"])


def test_the_table_has_costs_and_the_power_with_which_they_grow() -> None:
    assert exponent((10, 1_000), (2.0, 20_000.0)) == pytest.approx(2)
    part = Part("sorting", "rows", (1_000, 4_000), lambda size: size**1.5 * 1e-6, microseconds("row"))
    assert table([part.run()]).splitlines()[-1] == (
        "| sorting | 1,000 to 4,000 rows | 31.6 µs a row | 63.2 µs a row | 1.50 |"
    )
