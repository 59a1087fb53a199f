"""Comparisons that do not depend on how a processor rounds.

Processors add the products of a matrix multiplication in different orders, so float32 results differ from one
to the next. A tolerance that was fitted on one of them may fail on another. There are two ways out:

- :func:`float64` computes both sides with nine more digits. Rounding is then far below ``EXACT``, and any
  mistake is far above it.
- :func:`assert_rounds_alike` is for computations in float32 or less. It measures the error of a plain
  computation in the same format, and allows a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Results of tiny models in float64 differ by 1e-13 at most. For assert_close, and the same for pytest.approx.
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
EQUAL: dict[str, Any] = {"rel": 1e-9, "abs": 1e-9}
# Errors of two computations in one format are of the same size, and those of a small tensor within 3 times.
FACTOR = 10.0


@contextmanager
def float64() -> Iterator[None]:
    """Everything is computed in float64: ``torch.float32`` is another name of it.

    Norms and output heads cast to float32 whatever the format of the weights, so a model in float64 alone
    would round as before.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
            mock.patch.object(Tensor, "float", Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def relative_error(measured: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The error of all tensors together, as a share of their size."""
    errors, sizes = _norms(measured, exact)
    return math.hypot(*errors.values()) / math.hypot(*sizes.values())


def assert_rounds_alike(
    measured: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """Fail unless ``measured`` is as near to ``exact`` as ``plain`` is, up to ``FACTOR``.

    The error of a tensor is allowed that of the plain tensor, or as much of its size as all plain tensors
    together are off, or what float32 can tell apart, whichever is largest.

    Args:
        measured: tensors that are tested.
        plain: the same from a plain computation in the same format.
        exact: the same in float64.
    """
    assert measured.keys() == plain.keys() == exact.keys()
    share = max(relative_error(plain, exact), torch.finfo(torch.float32).eps / 2)
    assert share < 0.1, "the plain computation is wrong"
    errors, sizes = _norms(plain, exact)
    for name, error in _norms(measured, exact)[0].items():
        allowed = FACTOR * max(errors[name], share * sizes[name])
        assert error <= allowed, f"{name} is off by {error:.2e}, and rounding explains {allowed:.2e}"


def _norms(
    measured: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """The error and the size of each tensor."""
    errors = {name: float((measured[name].double() - right).norm()) for name, right in exact.items()}
    return errors, {name: float(right.double().norm()) for name, right in exact.items()}
