"""``allocation_mode``: backends and devices of generation and training in one line.

The notation is AReaL's, e.g. ``vllm:d4+fsdp:d4``: a backend, a colon, and sizes of its parallelism. ``+``
gives the two GPUs of their own, and ``|`` has them share GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torchrl_grpo.config.engines import DEFAULT_ENGINE, ENGINES, engine_kind
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.schema import Config
from torchrl_grpo.config.values import Parallelism
from torchrl_grpo.errors import ConfigError

_KEY = "allocation_mode"
# Backend of the notation -> value of train_model.parallelism.
_TRAINS = {
    "fsdp": Parallelism.fsdp2,
    "fsdp2": Parallelism.fsdp2,
    "ddp": Parallelism.ddp,
    "deepspeed_zero2": Parallelism.deepspeed_zero2,
    "deepspeed_zero3": Parallelism.deepspeed_zero3,
}
_DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"(?:([a-z_0-9]+)[:.])?((?:[a-z]\d+)+)")
_SIZE = re.compile(r"([a-z])(\d+)")
_FIX = f"{_KEY}=vllm:d4+fsdp:d4, for example"


@dataclass(frozen=True)
class _Part:
    """One side: its backend, None if it is not named, its number of devices, and those of one engine."""

    backend: str | None
    devices: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Devices of one engine."""
        return self.tensor * self.pipeline


def with_allocation(cfg: Config) -> Config:
    """Set the keys that ``allocation_mode`` stands for.

    Args:
        cfg: configuration before it is validated.

    Returns:
        ``cfg`` itself if ``allocation_mode`` is not set, otherwise a copy with the backend, the numbers of
        devices and the parallelism of the line.

    Raises:
        ConfigError: the line cannot be read, asks for something that does not exist here, or contradicts a
            key.
    """
    return cfg if cfg.allocation_mode is None else _changed(cfg, cfg.allocation_mode, meaning(cfg))


def meaning(cfg: Config) -> dict[str, Any]:
    """Return the keys that ``allocation_mode`` stands for, with their values.

    Args:
        cfg: configuration with ``allocation_mode``.

    Raises:
        ConfigError: the line cannot be read, or asks for something that does not exist here.
    """
    line = cfg.allocation_mode
    assert line is not None
    generate, train, shared = _read(line)
    if train.size > 1:
        raise _bad(line, "a trainer has data parallelism only", "t1 and p1 for it, and more of d")
    if train.backend is not None and train.backend not in _TRAINS:
        raise _bad(line, f"nothing trains with {train.backend!r} here", f"one of {', '.join(_TRAINS)}")
    keys_of_mode: dict[str, Any] = {"train_model.num_devices": train.devices}
    # One device needs no shards.
    if train.devices > 1:
        keys_of_mode["train_model.parallelism"] = _TRAINS[train.backend or "fsdp"]
    if generate is not None:
        backend, generates = generate.backend or DEFAULT_ENGINE, _generates()
        if backend not in generates:
            raise _bad(line, f"nothing generates with {backend!r} here", f"one of {', '.join(generates)}")
        same = generates[backend]
        if generate.size > 1:
            same = [name for name in same if engine_kind(name).spans_devices]
            if not same:
                wrong = f"an engine of {backend} has one device"
                raise _bad(line, wrong, "vllm, or t1 and p1")
            keys_of_mode["inference_model.tensor_parallel_size"] = generate.tensor
            keys_of_mode["inference_model.pipeline_parallel_size"] = generate.pipeline
        # Both ways to run vLLM are vllm in this notation.
        chosen = cfg.inference_model.backend
        keys_of_mode["inference_model.backend"] = chosen if chosen in same else same[0]
        if not shared:
            keys_of_mode["inference_model.num_devices"] = generate.devices
    if shared:
        # Engines without a number of their own would get GPUs of their own if some are left.
        gpus = list(range(train.devices))
        engines = gpus if generate is None else list(range(generate.devices))
        keys_of_mode |= {"train_model.devices": gpus, "inference_model.devices": engines}
    return keys_of_mode


def shares_devices(line: str) -> bool:
    """Return whether generation and training share several devices."""
    _, train, shared = _read(line)
    return shared and train.devices > 1


def _generates() -> dict[str, list[str]]:
    """Return, for each backend of the notation, the values of ``inference_model.backend`` that mean it.

    The name of a package means all engines that need it; the first one is the default.
    """
    means: dict[str, list[str]] = {}
    for name, kind in ENGINES.items():
        if kind.package is not None:
            means.setdefault(kind.package, []).append(name)
        if name != kind.package:
            means[name] = [name]
    return means


def _read(line: str) -> tuple[_Part | None, _Part, bool]:
    """Return generation (None if the line has one part only), training, and whether they share devices."""
    shared = "|" in line
    if "(" in line or "[" in line:
        raise _bad(line, "layouts of experts and names of parts are not supported", _FIX)
    parts = [_read_part(line, text.strip()) for text in re.split(r"[+|]", line)]
    if len(parts) > 2:
        raise _bad(line, "it has more than two parts", _FIX)
    if len(parts) == 1:
        if parts[0].backend in _generates():
            raise _bad(line, "it says nothing of the trainer", f"{_KEY}={line}+fsdp:d1")
        # Training alone: the engines share its devices.
        return None, parts[0], True
    generate, train = parts
    # The trainer may use some of the GPUs of engines that have several each.
    whole_engines = generate.size > 1 and generate.devices >= train.devices
    if shared and generate.devices != train.devices and not whole_engines:
        wrong = f"{generate.devices} and {train.devices} devices cannot be the same ones"
        raise _bad(line, wrong, "the same sizes on both sides of |")
    return generate, train, shared


def _read_part(line: str, text: str) -> _Part:
    matched = _PART.fullmatch(text)
    if matched is None:
        raise _bad(line, f"{text!r} is not BACKEND:SIZES, as in vllm:d4 or fsdp:d8", _FIX)
    sizes: dict[str, int] = {}
    for name, size in _SIZE.findall(matched[2]):
        if name in _DIMENSIONS and int(size) < 1:
            raise _bad(line, f"{name}{size} in {text!r} must be at least {name}1", _FIX)
        if name not in _DIMENSIONS or name in sizes:
            known = ", ".join(f"{short} ({long})" for short, long in _DIMENSIONS.items())
            raise _bad(line, f"{name}{size} in {text!r} is no size; sizes are {known}, each once", _FIX)
        sizes[name] = int(size)
    trains = matched[1] in _TRAINS
    for name, size in sizes.items():
        if name not in ("d" if trains else "dtp") and size > 1:
            what = _DIMENSIONS[name]
            wrong = f"{name}{size} in {text!r} asks for {what} parallelism, which does not exist here"
            raise _bad(line, wrong, f"{name}1, and more of d")
    tensor, pipeline = sizes.get("t", 1), sizes.get("p", 1)
    return _Part(matched[1], sizes.get("d", 1) * tensor * pipeline, tensor, pipeline)


def _changed(cfg: Config, line: str, changes: dict[str, Any]) -> Config:
    defaults, sections = Config(), dict[str, dict[str, Any]]()
    for key, value in changes.items():
        read = attrgetter(key)
        if read(cfg) not in (read(defaults), value):
            raise ConfigError(
                f"{key}={show(read(cfg))}: {_KEY}={line} says {key}={show(value)}; remove one of the two"
            )
        section, _, leaf = key.partition(".")
        sections.setdefault(section, {})[leaf] = value
    changed = {name: replace(vars(cfg)[name], **leaves) for name, leaves in sections.items()}
    return replace(cfg, **changed)


def _bad(line: str, wrong: str, fix: str) -> ConfigError:
    return bad_value(_KEY, line, wrong, fix)
