"""Run a model in a wider number format than its weights, without a copy of the model.

Every operation casts its operands, so only one matrix at a time is in memory twice. It is meant for trials:
it is slower than a converted model and has no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# These functions only select from their operands. Casting the result is cheaper than casting a whole matrix.
_PICK = {
    Tensor.__getitem__,
    F.embedding,
    torch.embedding,
    Tensor.index_select,
    torch.index_select,
    Tensor.detach,
}


class Upcast(TorchFunctionMode):
    """Context in which operations on floating-point formats narrower than ``dtype`` run in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Property getters need no cast, and tensors that are written in place keep their format.
        if func in _PICK or func.__name__ in ("__get__", "__set__", "__setitem__") or "out" in kwargs:
            return func(*args, **kwargs)
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].to(self._wide(torch.get_default_dtype()))
        return func(*self._cast(args), **{name: self._cast(value) for name, value in kwargs.items()})

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize else dtype

    def _cast(self, value: Any) -> Any:
        # torch's tree_map takes longer than most operations of a trial.
        if type(value) in (tuple, list):
            return type(value)(map(self._cast, value))
        if isinstance(value, torch.dtype):
            return self._wide(value)
        if isinstance(value, Tensor) and self._wide(value.dtype) != value.dtype:
            return value.to(self.dtype)
        return value
