"""Imported before other modules, this keeps them from importing Ray, as TorchRL does where Ray is installed.

Ray reads its variables when it is imported, and the forks of a process have other variables.
"""

from __future__ import annotations

import sys

sys.modules["ray"] = None  # type: ignore[assignment]
