"""Let what was written last win where two keys contradict each other.

A preset writes keys for its user's convenience. If the user then writes a key that excludes one of them,
the preset's key gives way. Layers come in Hydra's order: presets before the primary configuration's own
keys, then files chosen with ``+``, and the command line last. Two keys of the same layer, and most keys that
have their defaults, are left to the checks of the configuration. A key that repeats the value it already had
is kept itself, but makes no other give way, except in contradictions with ``defaults_too`` (see
:class:`~torchrl_grpo.config.contradictions.Contradiction`). A preset is a file of a config group, such as
``policy/dapo.yaml``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from torchrl_grpo.config.contradictions import DEFAULT, contradictions
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.schema import keys

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig


def settle(node: DictConfig, loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> list[str]:
    """Reset keys of a composed configuration that contradict one that was written later.

    Args:
        node: configuration composed over the schema, which is changed.
        loader: Hydra's loader of the configuration tree.
        config_name: name of the primary configuration.
        overrides: overrides of the job.

    Returns:
        A line for the user for each key that gave way.
    """

    # The contradictions read most keys several times.
    @functools.cache
    def read(key: str) -> Any:
        value = OmegaConf.select(node, key)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    lines: list[str] = []
    layers, changes = dict[str, int](), dict[str, int]()
    # What `others` get is `value`. Each contradiction is found in `node` as the ones before have left it.
    defaults = keys().defaults
    for key, others, value, defaults_too in contradictions(read):
        changed = [other for other in others if defaults_too or read(other) != defaults[other]]
        if changed and not layers:
            layers, changes = _layers(loader, config_name, overrides)
        # Layer in which `key` became what it is; 0 if it has its default. With defaults_too, repeating the
        # value counts too.
        written = (layers if defaults_too else changes).get(key, 0)
        for other in changed:
            before, new = read(other), defaults[other] if value is DEFAULT else value
            if isinstance(before, dict):
                # Each entry has a layer of its own, and the later ones stay.
                kept = {
                    name: entry
                    for name, entry in before.items()
                    if layers.get(f"{other}.{name}", 0) >= written
                }
                new = {**new, **kept}
            elif layers.get(other, 0) >= written:
                continue
            if new == before:
                continue
            because = f"{key}={show(read(key))}"
            lines.append(f"{other}={show(new)} instead of {show(before)}, because of {because}")
            OmegaConf.update(node, other, new, merge=False)
            read.cache_clear()
            layers[other] = max(layers.get(other, 0), written)
            changes[other] = max(changes.get(other, 0), written)
    return lines


def _layers(loader: Any, config_name: str, overrides: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the last layers that wrote each key and section, and the last that changed each, by number."""
    layers: dict[str, int] = {}
    changes: dict[str, int] = {}
    values: dict[str, Any] = {}

    def write(key: str, value: Any, number: int) -> None:
        layers[key] = number
        if key not in values or values[key] != value:
            changes[key] = number
        values[key] = value

    parts = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults
    for number, part in enumerate(parts, 1):
        if part.config_path in (None, "schema") or part.config_path.startswith("hydra/"):
            continue
        loaded = loader.repository.load_config(part.config_path)
        package = "" if part.package in (None, "", "_global_") else f"{part.package}."
        for key, value in _entries(OmegaConf.to_container(loaded.config, resolve=False), package):
            write(key, value, number)
    last = len(parts) + 1
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        names = override.key_or_group.split(".")
        for length in range(1, len(names)):
            layers[".".join(names[:length])] = last
        value = None if override.value_type is None else override.value()
        write(override.key_or_group, value, last)
        for key, entry in _entries(value, f"{override.key_or_group}."):
            write(key, entry, last)
    return layers, changes


def _entries(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{prefix}{name}", value
        yield from _entries(value, f"{prefix}{name}.")
