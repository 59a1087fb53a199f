"""Import ``reasoning_gym`` without its warnings.

The import takes seconds, so import this module inside functions.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # One of its dependencies compares literals with ``is``, and Python warns whenever it compiles that file.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym

__all__ = ["reasoning_gym"]
