"""Pretended GPUs: plain CPU tensors that say they lie on CUDA devices, and a check of every operator on them.

Inside ``with PretendedCuda(gpus=2) as machine:`` this process sees GPUs. ``tensor.to("cuda:1")`` marks the
storage of its result, and ``tensor.device`` reads that mark. Every operator, those of the backward pass
included, is checked by the rules of a real GPU and passes the mark on. An operator that mixes devices raises
:class:`DeviceMismatch`. The machine also counts what makes a program slow on a GPU: kernels that are
launched, and times that the CPU waits for the GPU.

Left out are the numerics of CUDA kernels (the CPU's compute everything), memory, streams, graphs, several
ranks, and vLLM. Autocast casts for the CPU's operators, so counts are near those of a real GPU and not equal.

:mod:`pretended_torch` holds what is replaced in torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import flash_kernel
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchrl_grpo

aten = torch.ops.aten

CPU = torch.device("cpu")
_TAG = "pretended_device"
# What a message names a line of. A string, for most frames of a stack are others.
_OWN = (f"{Path(torchrl_grpo.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_HELPERS = f"{Path(__file__).parent}{os.sep}"

# The real ones: they stand for what they were while torch says otherwise.
_real_device = torch._C.TensorBase.device.__get__
_real_storage = torch._C.TensorBase.untyped_storage

_COPIES = {aten.copy_.default, aten._foreach_copy_.default}
_READS_INDICES = {aten.index.Tensor, aten._unsafe_index.Tensor}
_WRITES_INDICES = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
# Take a number that lies on the CPU beside a tensor on a GPU, as every pointwise operator does.
_TAKES_NUMBER = {
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.fill.Tensor,
    aten.fill_.Tensor,
    aten.index_fill.int_Tensor,
    aten.index_fill_.int_Tensor,
}
# Give out memory or another look at it, and start no kernel.
_NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::resize_",
    "aten::set_",
    "aten::is_same_size",
    "aten::is_pinned",
    "aten::_local_scalar_dense",
}


def _histogram(values: Tensor, *args: Any) -> Tensor:
    counts: Tensor = aten.histc.default(values.float(), *args)
    return counts.to(values.dtype)


# What a GPU has and the CPU lacks.
_STAND_INS: dict[Any, Any] = {
    aten.histc.default: _histogram,
    aten._flash_attention_forward.default: flash_kernel.forward,
    aten._flash_attention_backward.default: flash_kernel.backward,
}


def _product_in_float32(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    assert left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16), (
        left.dtype,
        right.dtype,
    )
    assert out_dtype == torch.float32, out_dtype
    return aten.mm.default(left.float(), right.float())  # type: ignore[no-any-return]


_STAND_INS[aten.mm.dtype] = _product_in_float32


class DeviceMismatch(RuntimeError):
    """What a real GPU would have refused: tensors, an index or a generator of another device."""


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor lies or says it does."""
    real = _real_device(tensor)
    if real.type != "cpu":
        return real
    try:
        storage = _real_storage(tensor)
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have none
        return real
    # On the storage, which views share and which torch keeps as long as any of them lives.
    marked: torch.device = vars(storage).get(_TAG, real)
    return marked


def put_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Mark the storage of a CPU tensor as lying on ``device``; returns the tensor."""
    if _real_device(tensor).type == "cpu":
        try:
            setattr(_real_storage(tensor), _TAG, device)
        except (RuntimeError, NotImplementedError):
            # Without a storage it stays on the CPU, and the next operator says so.
            assert device == CPU, f"{type(tensor).__name__} cannot be pretended to lie on {device}"
    return tensor


class PretendedCuda:
    """A machine with GPUs, for as long as the context lasts; see the module.

    Threads that are started inside see it too. Contexts may be nested: each counts for itself, and the inner
    one says which GPUs there are. The whole process is pretended to, so only one thread at a time may do it.

    Args:
        gpus: how many there are.
        capability: compute capability of each; below 8.0 there is no bfloat16.
        gib: memory of each.

    Attributes:
        launches: kernels started, copies between GPUs included.
        syncs: times the CPU waited for a GPU, by what it waited in and the line of the project.
        uploads: copies from the CPU's memory to a GPU, by line.
        problems: messages of what a real GPU would have refused.
        allocated: devices that memory was given out on.
        autocasts: formats that autocast computed in on a GPU.
        forgetful: names of files of the project in which moves between devices do nothing. It plants faults.

    Raises:
        DeviceMismatch: a real GPU would refuse an operator. Raised where it runs, and once more at the end if
            the code under test has swallowed it.
        RuntimeError: another thread pretends already.
    """

    _owner: threading.Thread | None = None
    _depth = 0

    def __init__(self, gpus: int = 1, capability: tuple[int, int] = (9, 0), gib: float = 80.0) -> None:
        self.gpus, self.capability, self.gib = gpus, capability, gib
        self.current = 0
        self.active = False
        # Whether operators are parts of one kernel, which whoever sets this counts.
        self.merges = False
        self.allocated: set[torch.device] = set()
        self.autocasts: set[torch.dtype] = set()
        self.forgetful: set[str] = set()
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.launches = 0
        self.syncs: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def __enter__(self) -> PretendedCuda:
        from pretended_torch import cleared_caches, replacements  # which needs this module

        cls, me = PretendedCuda, threading.current_thread()
        if cls._owner not in (None, me):
            raise RuntimeError(f"thread {cls._owner} pretends already, and torch is one for all threads")
        with ExitStack() as stack:
            stack.enter_context(cleared_caches())
            for owner, name, value in replacements(self):
                # A build for CPUs lacks some of torch's functions in C++.
                patch = mock.patch.object(owner, name, value, create=owner is torch._C)
                stack.enter_context(patch)
            stack.enter_context(Watch(self))
            self._stack = stack.pop_all()
        cls._owner, cls._depth = me, cls._depth + 1
        self.active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cls = PretendedCuda
        self.active = False
        self._stack.close()
        cls._depth -= 1
        if cls._depth == 0:
            cls._owner = None
        if error is None and self.problems:
            raise DeviceMismatch(f"said and swallowed: {'; '.join(self.problems)}")

    def device(self, spec: torch.device | str | int) -> torch.device:
        """What ``spec`` names; ``cuda`` alone is the current device.

        Raises:
            DeviceMismatch: there is no such GPU.
        """
        device = torch.device("cuda", spec) if isinstance(spec, int) else torch.device(spec)
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= self.gpus:
            self.refuse(f"cuda:{index} of {self.gpus} GPUs")
        return torch.device("cuda", index)

    def refuse(self, what: str) -> None:
        """Note down and raise what a real GPU would refuse."""
        text = f"{what} at {_line()}"
        self.problems.append(text)
        raise DeviceMismatch(text)

    def forgets(self) -> bool:
        """Whether the move that is asked for stands in a file of ``forgetful``."""
        return bool(self.forgetful) and _line().partition(":")[0] in self.forgetful

    def launched(self) -> None:
        """Count a kernel."""
        with self._lock:
            self.launches += 1

    @contextmanager
    def merged(self, kernels: int) -> Iterator[None]:
        """Count what runs inside as ``kernels``, as the fused operator of a GPU would be."""
        self.merges = True
        try:
            yield
        finally:
            self.merges = False
        with self._lock:
            self.launches += kernels

    def waited(self, what: str) -> None:
        """Count that the CPU waits for a GPU."""
        with self._lock:
            self.syncs[f"{what} at {_line()}"] += 1

    def copied(self, source: torch.device, target: torch.device) -> None:
        """Count a copy between devices."""
        if source.type == "cuda" and target.type == "cuda":
            self.launched()
        elif source.type == "cuda":
            self.waited("copy to the CPU")
        elif target.type == "cuda":
            with self._lock:
                self.uploads[_line()] += 1

    def gave(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Mark what was made on ``device``."""
        if device.type == "cuda":
            self.allocated.add(device)
        return put_on(tensor, device)

    def place(self, func: torch._ops.OpOverload, args: Any, tensors: list[Tensor]) -> torch.device:
        """The device that an operator runs on.

        Args:
            func: the operator.
            args: its arguments by position.
            tensors: all tensors among its arguments.

        Raises:
            DeviceMismatch: they lie on devices that a real GPU does not mix.
        """
        devices = [device_of(tensor) for tensor in tensors]
        first = devices[0]
        if all(device == first for device in devices):
            return first
        if func in _COPIES:
            self.copied(devices[-1], first)
            return first
        if func in _READS_INDICES or func in _WRITES_INDICES:
            self._check_index(func, args)
            return first
        takes_number = torch.Tag.pointwise in func.tags or func in _TAKES_NUMBER
        written = tensors[0] if func._schema.is_mutable else None
        strict = [
            device
            for device, tensor in zip(devices, tensors, strict=True)
            if not (takes_number and device == CPU and tensor.dim() == 0 and tensor is not written)
        ]
        if len(set(strict)) > 1:
            self.refuse(f"{func} of tensors on {', '.join(str(device) for device in devices)}")
        return strict[0]

    def _check_index(self, func: torch._ops.OpOverload, args: Any) -> None:
        own = device_of(args[0])
        for index in args[1]:
            if index is not None and (where := device_of(index)) != own:
                if where != CPU:
                    self.refuse(f"{func} of a tensor on {own} with an index on {where}")
                self.copied(CPU, own)
        if func in _WRITES_INDICES:
            value = args[2]
            if device_of(value) not in (own, CPU) or (device_of(value) != own and value.dim() > 0):
                self.refuse(f"{func} of a value on {device_of(value)} into a tensor on {own}")

    def ran(self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
        """Count an operator that runs on a GPU."""
        if self.merges:
            return
        if not func.is_view and func._schema.name not in _NO_KERNEL:
            self.launched()
        if func in _READS_INDICES or func in _WRITES_INDICES:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        elif func is aten.repeat_interleave.Tensor:
            waits = kwargs.get("output_size") is None
        else:
            waits = bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))
        if waits:
            self.waited(str(func))


class Watch(TorchDispatchMode):
    """Sees every operator of this thread: asks the machine where it runs, and marks what comes out."""

    def __init__(self, machine: PretendedCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        # A thread may outlive the context.
        if not tensors or not self.machine.active:
            return func(*args, **kwargs)
        device = self.machine.place(func, args, tensors)
        if device.type == "cuda":
            self.machine.ran(func, args, kwargs)
        out = _STAND_INS.get(func, func)(*args, **kwargs)
        for tensor in _tensors((out,)):
            if not any(tensor is argument for argument in tensors):
                self.machine.gave(tensor, device)
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _line() -> str:
    """The innermost line of the project or of a test, as ``loss.py:120 (forward)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OWN) and not path.startswith(_HELPERS):
            return f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "no line of the project"
