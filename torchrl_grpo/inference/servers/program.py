"""``python -m torchrl_grpo.inference.servers.program``: vLLM's server, with vLLM's own arguments.

Two environment variables tie it to the process that started it: it writes a line to the descriptor
``TORCHRL_GRPO_READY_FD`` once it is set up, and with ``TORCHRL_GRPO_END_WITH_STDIN`` it ends when its input
ends, so that it never outlives a run.
"""

from __future__ import annotations

import os
import signal
import threading

from torchrl_grpo.inference.vllm_compat import run_server
from torchrl_grpo.runtime.shared_memory import segments_of, unlink

READY_VARIABLE, END_VARIABLE = "TORCHRL_GRPO_READY_FD", "TORCHRL_GRPO_END_WITH_STDIN"


def main() -> None:
    """Run the server until it is ended."""
    if END_VARIABLE in os.environ:
        threading.Thread(target=_end_with_stdin, name="end with the run", daemon=True).start()
    run_server()


def _end_with_stdin() -> None:
    # Read the descriptor itself: a thread that waits in sys.stdin would hold its lock at the end of Python.
    while os.read(0, 4096):
        pass
    # The engine is a process of its own. Both are in the process group of this one.
    unlink(segments_of(os.getpgid(0)))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
