"""Quotes of Hydra's command-line grammar. This module does not import Hydra."""

from __future__ import annotations


def quote(text: str) -> str:
    """Return a text as a quoted value of Hydra's command-line grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"
