"""Train a language model with GRPO, collecting and optimizing at the same time, on Ray.

    python sota-implementations/grpo/grpo-async.py --help

It takes every configuration that ``grpo.py`` takes. What differs is in ``docs/async.md``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("torchrl_grpo") is None:
    # A clone that was not installed: the package lies next to this folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from torchrl_grpo.cli.commands import grpo_async

    grpo_async()
