"""The folder of the YAML files."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """Return the folder of the configuration tree.

    A wheel carries the tree inside the package, because an installed package has no folder of its own above
    it. A checkout has it at its top as ``config/``, and an editable installation reads it there.
    """
    inside = Path(__file__).resolve().parents[1] / "config" / "yaml"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "config"
