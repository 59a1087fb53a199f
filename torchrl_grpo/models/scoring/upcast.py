"""Run a model in more digits than its weights have, without a copy of them.

Every operation gets its operands in the wider format, one at a time, so that what is held twice is one matrix
and no model. For trials: slower than a converted model, and without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# These only pick from their operands: rows of a matrix are cast later, and not all of it for a few rows.
_PICK = {
    Tensor.__getitem__,
    F.embedding,
    torch.embedding,
    Tensor.index_select,
    torch.index_select,
    Tensor.detach,
}


class Upcast(TorchFunctionMode):
    """Inside, floating-point numbers are computed in ``dtype`` where they would be in a narrower format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A property's getter takes no copy of what it looks at; what is written in place keeps its format.
        if func in _PICK or func.__name__ in ("__get__", "__set__", "__setitem__") or "out" in kwargs:
            return func(*args, **kwargs)
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].to(self._wide(torch.get_default_dtype()))
        return func(*tree_map(self._cast, args), **tree_map(self._cast, kwargs))

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize else dtype

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._wide(value)
        if isinstance(value, Tensor) and self._wide(value.dtype) != value.dtype:
            return value.to(self.dtype)
        return value
