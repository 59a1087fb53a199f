"""Quotes of Hydra's command-line grammar. This module does not import Hydra."""

from __future__ import annotations

import re

# Backslashes escape only before these, and at the end. Elsewhere each one stands for itself.
_ESCAPED = re.compile(r"(\\*)('|\$\{|\Z)")


def quote(text: str) -> str:
    """Return a text as a quoted value of Hydra's command-line grammar."""
    return "'" + _ESCAPED.sub(lambda match: match[1] * 2 + (match[2] and "\\" + match[2]), text) + "'"
