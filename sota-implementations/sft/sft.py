"""Fine-tune a language model on the solutions of a data set.

    python sota-implementations/sft/sft.py --help

What a run does is in ``torchrl_grpo/training/job.py``; what its keys mean is in ``config/``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("torchrl_grpo") is None:
    # A clone that was not installed: the package lies next to this folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from torchrl_grpo.cli.commands import sft

    sft()
