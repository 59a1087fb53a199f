"""``python -m torchrl_grpo.rewards``."""

from __future__ import annotations

import sys

from torchrl_grpo.rewards.cli import main

if __name__ == "__main__":
    sys.exit(main())
