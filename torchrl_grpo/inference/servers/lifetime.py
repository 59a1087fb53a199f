"""Two environment variables that tie a server to the process that started it.

A server writes a line to the descriptor ``TORCHRL_GRPO_READY_FD`` once it is set up. With
``TORCHRL_GRPO_END_WITH_STDIN`` it ends when its input ends, so that it never outlives a run.
"""

from __future__ import annotations

import os
import signal

from torchrl_grpo.runtime.shared_memory import segments_of, unlink

READY_VARIABLE, END_VARIABLE = "TORCHRL_GRPO_READY_FD", "TORCHRL_GRPO_END_WITH_STDIN"


def end_with_stdin() -> None:
    """Wait for the end of the input, and end this process and its group then."""
    # Read the descriptor itself: a thread that waits in sys.stdin would hold its lock at the end of Python.
    while os.read(0, 4096):
        pass
    # The engine is a process of its own. Both are in the process group of this one.
    unlink(segments_of(os.getpgid(0)))
    os.killpg(0, signal.SIGKILL)
