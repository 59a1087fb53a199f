"""Text of a model on a terminal. A model may write anything, also what a terminal would obey."""

from __future__ import annotations

import unicodedata

# Joiners, which emoji and several scripts need. The other format characters hide text or turn its direction.
_HARMLESS = frozenset("\n\t\u200c\u200d")


def printable(text: str) -> str:
    """Return a text without control and format characters, and with the rest of escape sequences visible."""
    return "".join(
        char
        for char in text
        if char in _HARMLESS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    )
