"""The program of a vLLM server whose processes are forks of the first one, so that vLLM is imported once.

On a CPU, vLLM starts each process of a server of two ranks anew, four in all, and each imports vLLM for eight
seconds of a core. On a GPU it forks them, too.
"""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.utils import system_utils

fork = multiprocessing.get_context("fork")
# Modules that are imported already have the function that calls this.
system_utils.multiprocessing = SimpleNamespace(get_context=lambda method: fork)
# Ranks look for the next message in a loop, for a second after each, on the cores of other tests.
SpinCondition.__init__.__defaults__ = (0.1,)

if __name__ == "__main__":
    from torchrl_grpo.inference.servers.vllm.program import main

    main()
