"""What the math_verify worker does: parse both answers and compare them. Runs in a worker process only."""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify

# It warns once that its own time limit is off; the limit is the pool's.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_HAS_MATH = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")


def run(payload: dict[str, str]) -> float:
    """Compare an answer with the truth.

    Args:
        payload: ``answer``: what the model gave, a short answer or a whole text; ``truth``: LaTeX.

    Returns:
        1.0 if they are mathematically the same, else 0.0.

    Raises:
        ValueError: the truth cannot be read, so nothing could ever equal it.
    """
    truth = _parse(payload["truth"])
    if not truth:
        raise ValueError(f"math_verify cannot read the truth {payload['truth']!r}")
    answer = _parse(payload["answer"])
    # Its own limits are signals; they are off, the pool's limit stands in. Errors inside must not become
    # "wrong".
    return float(math_verify.verify(truth, answer, timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    """The expressions in a text; LaTeX that stands alone is first read as a formula."""
    found: list[Any] = []
    if not _HAS_MATH.search(text) and len(text) <= 1_000:
        found = math_verify.parse(f"${text}$", parsing_timeout=None)
    return found or math_verify.parse(text, parsing_timeout=None)
