"""The folder of the YAML files, and the page that error messages read."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """Return the folder of the configuration tree.

    A wheel carries the tree inside the package, because an installed package has no folder of its own above
    it. A checkout has it at its top as ``config/``, and an editable installation reads it there.
    """
    inside = Path(__file__).resolve().parents[1] / "config" / "yaml"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "config"


def coming_from() -> Path:
    """Return the page with the names of other systems. A wheel carries it as it carries the YAML files."""
    inside = Path(__file__).resolve().parents[1] / "config" / "pages" / "coming_from.md"
    return inside if inside.is_file() else Path(__file__).resolve().parents[2] / "docs" / inside.name
