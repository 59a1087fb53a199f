"""Quotes of Hydra's command-line grammar. This module does not import Hydra."""

from __future__ import annotations

import re

# Characters that Hydra reads as they are.
_PLAIN = re.compile(r"[\w/.:+@%-]+", re.ASCII)
# Backslashes escape only before these, and at the end. Elsewhere each one stands for itself.
_ESCAPED = re.compile(r"(\\*)('|\$\{|\Z)")


def quote(text: str) -> str:
    """Return a text as a quoted value of Hydra's command-line grammar."""
    return "'" + _ESCAPED.sub(lambda match: match[1] * 2 + (match[2] and "\\" + match[2]), text) + "'"


def quote_if_needed(text: str) -> str:
    """Return a text as a value of Hydra's command-line grammar, with quotes only if it needs them."""
    return text if _PLAIN.fullmatch(text) else quote(text)
