"""Groups of the trainer and ranks of servers, in which the trainer sends to all others.

vLLM's communicator connects GPUs by NCCL. Without GPUs, gloo takes its place. The group's meeting point is a
store in the trainer's process. A note in it ends the group, and so does the end of the trainer. Every other
rank waits for the note in a thread, and then aborts what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from torchrl_grpo.inference import vllm_compat

_ENDED = "grpo ended"
# Longer than any run.
_FOREVER = timedelta(days=365)
# Seconds within which the note of an end arrives after a connection broke, and in which a broadcast begins.
_NOTE_S = 5.0


class ProcessGroupEnded(RuntimeError):
    """The group ended before everything was sent, because a process has left it."""


class NotTogether(ProcessGroupEnded):
    """Not all processes of a group came in time, or they cannot be connected."""


class WeightGroup:
    """This process's place in a group.

    Args:
        meeting: address (``host``, ``port``) of rank 0, number of processes (``size``), and seconds within
            which all of them must be there (``timeout_s``).
        rank: number of this process in the group; 0 is the trainer.
        device: where weights lie.

    Raises:
        NotTogether: the others did not come in time, or cannot be connected.
    """

    def __init__(self, meeting: Mapping[str, Any], rank: int, device: torch.device) -> None:
        host, port, size, timeout_s = (meeting[key] for key in ("host", "port", "size", "timeout_s"))
        self._device, self._watches = device, rank > 0
        self._ended = threading.Event()
        # Held while a broadcast begins: one that begins after the group was aborted would wait in vain.
        self._beginning = threading.Lock()
        try:
            processes = vllm_compat.join_group(host, port, rank, size, timeout_s)
            self._store = processes.store
            # Any, because torch's annotations lack gloo's operations.
            self._backend: Any
            if device.type == "cuda":
                # Threads start with the first GPU.
                torch.cuda.set_device(device)
                # Otherwise vLLM moves what this thread computes to a stream of its own.
                with torch.cuda.stream(torch.cuda.current_stream(device)):
                    self._backend = vllm_compat.join_nccl(processes, device)
            else:
                limit = timedelta(seconds=timeout_s)
                self._backend = distributed.ProcessGroupGloo(self._store, rank, size, limit)
        except (ImportError, RuntimeError, OSError) as error:
            raise NotTogether(f"rank {rank} of {size} at {host}:{port}: {error}") from error
        if self._watches:
            threading.Thread(target=self._watch, name="weight group", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._store.wait([_ENDED], _FOREVER)
        except RuntimeError:
            # The trainer's process has ended, which says the same.
            pass
        finally:
            self.leave()

    def broadcast(self, content: Tensor) -> None:
        """Send ``content`` (rank 0) or fill it (the others), in order with what the device computes.

        Raises:
            ProcessGroupEnded: the group has ended.
            RuntimeError: it failed for another reason.
        """
        on_gpu = self._device.type == "cuda"
        stream = [torch.cuda.current_stream(self._device)] if on_gpu else []
        try:
            with self._beginning:
                self._check()
                work = self._backend.broadcast(content, 0, *stream)
            if not on_gpu:
                work.wait()
        except RuntimeError:
            # An end of the group that this rank does not know of yet shows first as a broken connection.
            # Rank 0 ends it itself.
            self._ended.wait(_NOTE_S if self._watches else 0)
            self._check()
            raise

    def synchronize(self) -> None:
        """Block until everything has been sent or has arrived.

        Raises:
            ProcessGroupEnded: the group has ended, so not everything was.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._check()

    def _check(self) -> None:
        if self._ended.is_set():
            raise ProcessGroupEnded("a process has left the group that weights are sent to")

    def end(self) -> None:
        """End the group for all its processes. Only rank 0 may: a rank that watches holds its store."""
        if not self._ended.is_set():
            self._store.set(_ENDED, "")
            self.leave()

    def leave(self) -> None:
        """Leave the group from any thread. A :meth:`broadcast` that is under way fails or returns."""
        # NCCL may not return from the beginning of a broadcast either.
        is_held = self._beginning.acquire(timeout=_NOTE_S)
        try:
            if not self._ended.is_set():
                self._ended.set()
                if self._device.type == "cuda":
                    self._backend.destroy()
                else:
                    self._backend.abort()
        finally:
            if is_held:
                self._beginning.release()
