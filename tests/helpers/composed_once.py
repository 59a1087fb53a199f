"""Hydra that reads and merges each selection of files of ``config/`` once in a process, and copies faster.

Tests compose thousands of configurations, nearly all of them from a few selections. Most of the 0.10 s of a
core that this takes are for what is the same each time. Overrides of values are applied each time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.metadata
import pickle
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, grammar_parser

# No test writes there.
_CONFIG = str(Path(__file__).resolve().parents[2] / "config")
_FOLDERS = (_CONFIG, str(Path(hydra.__file__).parent))


def compose_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what has been parsed, selected and merged. Files in other folders are read each time."""
    load, select, version = OmegaConf.load, create_defaults_list, importlib.metadata.version
    merge, parse = ConfigLoaderImpl._compose_config_from_defaults_list, OverridesParser.parse_rule
    parsed, selected, merged = dict[str, bytes](), dict[Hashable, Any](), dict[Hashable, bytes]()
    words_read = dict[str, Override]()

    def load_once(file: Any) -> Any:
        name = getattr(file, "name", file)
        if not (isinstance(name, str) and name.startswith(_FOLDERS)):
            return load(file)
        if name not in parsed:
            parsed[name] = pickle.dumps(load(file))
        return pickle.loads(parsed[name])

    def select_once(
        repo: Any, config_name: Any, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
    ) -> Any:
        choices, values = list[Any](), list[Any]()
        for override in overrides_list:
            (choices if repo.group_exists(override.key_or_group) else values).append(override)
        where = _sources(repo)
        # A mapping sets values of a group, and chooses no file of it.
        is_plain = not any(isinstance(override.value(), dict) for override in choices)
        if where is None or not is_plain or any(override.is_sweep_override() for override in overrides_list):
            return select(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        words = tuple(override.input_line for override in choices)
        key = where, config_name, words, prepend_hydra, skip_missing
        if key not in selected:
            selected[key] = select(repo, config_name, choices, prepend_hydra, skip_missing)
        return dataclasses.replace(selected[key], config_overrides=values)

    def merge_once(loader: Any, defaults: list[Any], repo: Any) -> Any:
        if (where := _sources(repo)) is None:
            return merge(loader, defaults, repo)
        key = where, tuple((part.config_path, part.package, part.primary) for part in defaults)
        if key not in merged:
            merged[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged[key])

    def parse_once(self: OverridesParser, word: str, rule: str) -> Any:
        if rule != "override":
            return parse(self, word, rule)
        if word not in words_read:
            words_read[word] = parse(self, word, rule)
        # Hydra adds the loader to each.
        return copy.copy(words_read[word])

    def set_without_copying(self: HydraConfig, cfg: DictConfig) -> None:
        OmegaConf.set_readonly(cfg.hydra, True)
        self.cfg = DictConfig({"hydra": cfg.hydra}, flags={"no_deepcopy_set_nodes": True})  # type: ignore[assignment]
        cfg.hydra._set_parent(cfg)

    def copied(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        parent = self._get_parent()
        self._set_parent(None)
        try:
            # A third of the time of copying node by node.
            other: DictConfig = pickle.loads(pickle.dumps(self))
        finally:
            self._set_parent(parent)
        other._set_parent(parent)
        return other

    patch.setattr(DictConfig, "__deepcopy__", copied)
    patch.setattr(OmegaConf, "load", load_once)
    patch.setattr(OverridesParser, "parse_rule", parse_once)
    # The patterns of the folders of runs.
    patch.setattr("omegaconf.base.parse", functools.cache(grammar_parser.parse))
    patch.setattr(HydraConfig, "set_config", set_without_copying)
    # A composition asks for the versions of torch and vLLM, and reads files for that.
    patch.setattr(importlib.metadata, "version", functools.cache(version))
    patch.setattr(config_loader_impl, "create_defaults_list", select_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
    # Each composition copies its sources, and they all have the one store.
    patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)


def _sources(repo: Any) -> Hashable | None:
    """Where configurations are looked for, or None where a test may have written some of them."""
    sources = tuple((source.scheme(), source.path) for source in repo.get_sources())
    others = [path for scheme, path in sources if scheme == "file" and not path.startswith(_CONFIG)]
    return None if others else sources
