"""Reads each file of ``config/`` once: hundreds of tests compose them, and reading takes a third of that."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

from hydra._internal.config_repository import ConfigRepository

# Files that no test writes.
_OURS = f"file://{Path(__file__).resolve().parents[2] / 'config'}"
_FIXED = ("pkg://", "structured://")
_LOAD = ConfigRepository.load_config
_read: dict[tuple[tuple[str, ...], str], Any] = {}


def start() -> None:
    """Remember what Hydra has read, in this process."""
    mock.patch.object(ConfigRepository, "load_config", _load).start()


def _load(self: ConfigRepository, config_path: str) -> Any:
    places = tuple(source.full_path() for source in self.get_sources())
    if not all(place == _OURS or place.startswith(_FIXED) for place in places):
        return _LOAD(self, config_path)
    key = places, config_path
    if key not in _read:
        _read[key] = _LOAD(self, config_path)
    return copy.deepcopy(_read[key])
