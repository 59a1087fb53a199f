"""Cases of a parametrized test of which ``make test-fast`` takes a few."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for ``parametrize``, with the mark ``slow`` on those that are not in ``fast``."""
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
