"""What :class:`pretended_cuda.PretendedCuda` replaces in torch, in the process and in this project.

Methods and functions are replaced, and no ``TorchFunctionMode`` is used, for that is off in backward passes.
Whatever needs a GPU and is not replaced here fails: :func:`_cuda` replaces what torch initializes CUDA with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import peft.tuners.lora.bnb
import torch
import torch._dynamo
import transformers.utils.import_utils
from pretended_cuda import CPU, PretendedCuda, Watch, device_of, put_on
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

import torchrl_grpo.inference.transformers_engine
import torchrl_grpo.rollout.build
import torchrl_grpo.training.build
from torchrl_grpo.runtime import hardware

# Imported before anything is replaced: many modules keep what they find in torch.
_ALREADY = (
    peft.tuners.lora.bnb,
    torch._dynamo,
    torchrl_grpo.inference,
    torchrl_grpo.rollout,
    torchrl_grpo.training,
)

# Its result is kept, and must hold the real functions.
_CONSTRUCTORS = _device._device_constructors()
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
_RANDOM = (
    "exponential_",
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "geometric_",
    "log_normal_",
    "cauchy_",
)
_GIB = 2**30

_Base = torch._C.TensorBase
_to, _numpy, _tolist = _Base.to, _Base.numpy, _Base.tolist
_deepcopy = torch.UntypedStorage.__deepcopy__
_real_grouped = torch._C._group_tensors_by_device_and_dtype

_FACTORIES = {
    name: getattr(torch, name)
    for name in (*(function.__name__ for function in _CONSTRUCTORS), *_LIKE)
    if hasattr(torch, name)
}
_DRAWS = {name: getattr(torch, name) for name in ("multinomial", "bernoulli")}

Replacement = tuple[Any, str, Any]


def replacements(machine: PretendedCuda) -> Iterator[Replacement]:
    """Owner, name and new value of everything that is replaced."""
    yield from _tensor_methods(machine)
    yield from _factories(machine)
    yield from _autocast(machine)
    yield from _cuda(machine)
    yield torch, "Generator", Generator
    yield F, "rms_norm", _rms_norm(machine)
    yield torch._C, "_group_tensors_by_device_and_dtype", _grouped
    yield threading.Thread, "start", _watched_start(machine)
    memory = (machine.gib,) * machine.gpus
    # The planner asks the driver and not torch.
    yield hardware, "present", lambda: hardware.Hardware(memory, cpu_gib=64.0)


@contextmanager
def cleared_caches() -> Iterator[None]:
    """Have transformers ask again whether there are GPUs, here and afterwards."""

    def clear() -> None:
        for module in (transformers.utils, transformers.utils.import_utils):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    clear()
    yield
    clear()


class Generator(torch.Generator):
    """A generator that says which device it is for."""

    target: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> Generator:
        made: Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.target = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.target


class _Move(torch.autograd.Function):
    """A copy on another device, whose gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.source = device_of(tensor)
        return put_on(tensor.clone(), device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return put_on(gradients[0].clone(), ctx.source), None


def _moved(machine: PretendedCuda, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``tensor.to(...)`` in all its forms."""
    device, dtype, other = (kwargs.pop(name, None) for name in ("device", "dtype", "other"))
    flags = [value for value in args if isinstance(value, bool)]
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            other = value
        elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
            device = value
    if other is not None:
        device, dtype = device_of(other), other.dtype
    kwargs.pop("non_blocking", None)
    kwargs["copy"] = kwargs.get("copy", len(flags) > 1 and flags[1])
    kwargs["dtype"] = tensor.dtype if dtype is None else dtype
    here = device_of(tensor)
    there = here if device is None else machine.device(device)
    if there == here:
        return _to(tensor, **kwargs)
    if there.type not in ("cpu", "cuda") or here.type not in ("cpu", "cuda"):
        return _to(tensor, device=CPU if there.type == "cuda" else there, **kwargs)
    if machine.forgets():
        return _to(tensor, **kwargs)
    machine.copied(here, there)
    moved: Tensor = _Move.apply(tensor, there)  # type: ignore[no-untyped-call]
    machine.gave(moved, there)
    return _to(moved, **{**kwargs, "copy": False})


def _rms_norm(machine: PretendedCuda) -> Callable[..., Tensor]:
    """A norm that is fused on a GPU: one kernel, and two in its backward pass."""
    real = F.rms_norm

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
            ctx.save_for_backward(states, weight)
            ctx.eps = eps
            with machine.merged(kernels=1):
                return real(states, weight.shape, weight, eps)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
            with machine.merged(kernels=2), torch.enable_grad():
                states, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
                out = real(states, weight.shape, weight, ctx.eps)
                by_states, by_weight = torch.autograd.grad(out, (states, weight), gradients[0])
            return by_states, by_weight, None

    def norm(states: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        assert tuple(shape) == weight.shape, (shape, weight.shape)
        if device_of(states).type != "cuda":
            return real(states, shape, weight, eps)
        out: Tensor = Fused.apply(states, weight, eps)  # type: ignore[no-untyped-call]
        return out

    return norm


def _tensor_methods(machine: PretendedCuda) -> Iterator[Replacement]:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _moved(machine, tensor, *args, **kwargs)

    def cuda(tensor: Tensor, device: Any = "cuda", **kwargs: Any) -> Tensor:
        return _moved(machine, tensor, "cuda" if device is None else device, **kwargs)

    def cpu(tensor: Tensor, **kwargs: Any) -> Tensor:
        return _moved(machine, tensor, CPU, **kwargs)

    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (device := device_of(tensor)).type == "cuda":
            machine.refuse(f"numpy() of a tensor on {device}")
        return _numpy(tensor, *args, **kwargs)

    def tolist(tensor: Tensor) -> Any:
        if device_of(tensor).type == "cuda":
            machine.waited("tolist")
        return _tolist(tensor)

    def is_on(kind: str) -> property:
        return property(lambda tensor: device_of(tensor).type == kind)

    def get_device(tensor: Tensor) -> int:
        device = device_of(tensor)
        return -1 if device.index is None else device.index

    def deepcopy(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage:
        copied: torch.UntypedStorage = _deepcopy(storage, memo)  # type: ignore[no-untyped-call]
        vars(copied).update(vars(storage))
        return copied

    yield Tensor, "device", property(device_of)
    yield Tensor, "is_cuda", is_on("cuda")
    yield Tensor, "is_cpu", is_on("cpu")
    yield Tensor, "get_device", get_device
    yield from ((Tensor, method.__name__, method) for method in (to, cuda, cpu, numpy, tolist))
    yield torch.UntypedStorage, "__deepcopy__", deepcopy
    # Nothing to pin where nothing is copied.
    yield Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor
    yield Tensor, "is_pinned", lambda tensor, *args, **kwargs: False
    yield from ((Tensor, name, _with_generator(machine, getattr(_Base, name))) for name in _RANDOM)


def _check_generator(machine: PretendedCuda, generator: Any, device: torch.device) -> None:
    if isinstance(generator, torch._C.Generator) and generator.device.type != device.type:
        machine.refuse(f"a generator for {generator.device} used on {device}")


def _with_generator(machine: PretendedCuda, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method or function that draws; its first argument says where."""

    @wraps(real)
    def drawn(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for value in (*args, *kwargs.values()):
            _check_generator(machine, value, device_of(tensor))
        return real(tensor, *args, **kwargs)

    return drawn


def _factories(machine: PretendedCuda) -> Iterator[Replacement]:
    yield from ((torch, name, _factory(machine, name, real)) for name, real in _FACTORIES.items())
    yield from ((Tensor, name, _factory(machine, name, getattr(_Base, name))) for name in _NEW)
    yield from ((torch, name, _with_generator(machine, real)) for name, real in _DRAWS.items())


def _device_of_context() -> torch.device | None:
    """The device of the innermost ``with torch.device(...)``, which the real functions would go to."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _device.DeviceContext)]
    return modes[-1].device if modes else None


def _factory(machine: PretendedCuda, name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor where its argument ``device`` says."""
    inherits = name in _LIKE or name in _NEW

    @wraps(real)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is None and not inherits:
            device = _device_of_context()
        # There is no memory to pin.
        kwargs.pop("pin_memory", None)
        if device is None:
            if not inherits:
                _check_generator(machine, kwargs.get("generator"), CPU)
            return real(*args, **kwargs)
        device = machine.device(device)
        _check_generator(machine, kwargs.get("generator"), device)
        if device.type != "cuda" and not (device == CPU and inherits):
            return real(*args, **kwargs)
        if name in ("as_tensor", "asarray") and isinstance(args[0], Tensor):
            return _moved(machine, args[0], device, kwargs.get("dtype"))
        out = real(*args, **{**kwargs, "device": CPU})
        if name in _FROM_DATA:
            machine.copied(CPU, device)
        elif device.type == "cuda" and "empty" not in name:
            machine.launched()
        return machine.gave(out, device)

    return made


def _grouped(lists: list[list[Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
    """Tensors by device and format, for fused updates and clipping: torch's own reads the real device."""
    groups = _real_grouped(lists, with_indices)
    (device,) = {device_of(tensor) for tensor in lists[0] if tensor is not None} or {CPU}
    return {(device, dtype): group for (_, dtype), group in groups.items()}


class _Autocast(torch.autocast):
    """For a GPU it is the CPU's, since the tensors are; ``machine`` is told the format."""

    machine: PretendedCuda

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)
        if device_type == "cuda" and self._enabled:
            self.machine.autocasts.add(self.fast_dtype)


def _autocast(machine: PretendedCuda) -> Iterator[Replacement]:
    """Autocast itself and the functions that ask about it."""
    autocast = type("autocast", (_Autocast,), {"machine": machine})

    def of_cpu(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *kind: real(*("cpu" if name == "cuda" else name for name in kind))

    for owner in (torch, torch.amp, torch.amp.autocast_mode):
        yield owner, "autocast", autocast
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, of_cpu(getattr(torch._C, name))


def _cuda(machine: PretendedCuda) -> Iterator[Replacement]:
    """The functions of ``torch.cuda`` that do not fail here."""
    states = [torch.zeros(16, dtype=torch.uint8) for _ in range(machine.gpus)]

    def set_device(device: Any) -> None:
        machine.current = machine.device(device).index

    class device:
        def __init__(self, target: Any) -> None:
            self.target = target

        def __enter__(self) -> None:
            self.before = machine.current
            set_device(self.target)

        def __exit__(self, *error: object) -> None:
            machine.current = self.before

    def set_states(new: list[Tensor]) -> None:
        assert len(new) <= machine.gpus, f"{len(new)} random states for {machine.gpus} GPUs"
        states[: len(new)] = [state.clone() for state in new]

    def properties(device: Any = None) -> SimpleNamespace:
        major, minor = machine.capability
        return SimpleNamespace(
            name="a pretended GPU",
            uuid=f"GPU-{machine.device('cuda' if device is None else device).index}",
            major=major,
            minor=minor,
            total_memory=int(machine.gib * _GIB),
            multi_processor_count=100,
        )

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def not_pretended() -> None:
        # Torch remembers that it was once initialized, and would say other things from then on.
        raise NotImplementedError("this needs a real GPU: nothing in pretended_torch stands for it")

    def bytes_in_use(*args: Any, **kwargs: Any) -> int:
        return _GIB

    new: dict[str, Any] = {
        "_lazy_init": not_pretended,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: machine.gpus,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "device": device,
        # Kernels run at once, so that no stream is ahead of another.
        "Stream": nothing,
        "current_stream": lambda device=None: SimpleNamespace(
            record_event=lambda: SimpleNamespace(synchronize=nothing)
        ),
        "stream": nullcontext,
        "synchronize": lambda device=None: machine.waited("torch.cuda.synchronize"),
        "get_device_capability": lambda device=None: machine.capability,
        "get_device_name": lambda device=None: properties().name,
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or machine.capability >= (8, 0)
        ),
        "mem_get_info": lambda device=None: (int(machine.gib * _GIB) - _GIB, int(machine.gib * _GIB)),
        "get_rng_state": lambda device=None: states[machine.current].clone(),
        "get_rng_state_all": lambda: [state.clone() for state in states],
        "set_rng_state": nothing,
        "set_sync_debug_mode": nothing,
        "set_rng_state_all": set_states,
        **dict.fromkeys(("manual_seed", "manual_seed_all", "empty_cache", "ipc_collect"), nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats"), nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), bytes_in_use),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), bytes_in_use),
    }
    yield from ((torch.cuda, name, value) for name, value in new.items())
    yield torch._C, "_host_emptyCache", nothing


def _watched_start(machine: PretendedCuda) -> Callable[[threading.Thread], None]:
    """``Thread.start`` that has operators of the new thread watched, too: a mode is one thread's."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            # It holds the thread, which holds it.
            del thread.run
            with Watch(machine):
                run()

        thread.run = watched  # type: ignore[method-assign]
        real(thread)

    return start
