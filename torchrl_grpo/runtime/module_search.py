"""Where processes that this project starts look for modules."""

from __future__ import annotations

import itertools
import os
import sys

#: Environment variable of workers on Ray: the working directory of the process that has started them. Ray
#: puts it first, and their own may be another one.
RAY_WORKER_VARIABLE = "TORCHRL_GRPO_RAY_WORKER"


def search_working_directory_last() -> None:
    """Look for modules in the working directory after all others, in processes that this project starts.

    ``python -m`` and Ray let Python look there first. A user's ``math.py`` would take the place of Python's.
    """
    pairs = itertools.pairwise(sys.orig_argv)
    is_command = any(flag == "-m" and module.startswith("torchrl_grpo") for flag, module in pairs)
    here = os.environ.get(RAY_WORKER_VARIABLE, os.getcwd() if is_command else None)
    if sys.path[0] == here:
        sys.path.append(sys.path.pop(0))
