"""Groups of the trainer and ranks of servers, in which the trainer sends to all others.

The group's meeting point is a store in the trainer's process. A note in it ends the group, and so does the
end of the trainer. Every other rank waits for the note in a thread, and then aborts what it waits for.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from torchrl_grpo.inference import vllm_compat

_ENDED = "grpo ended"
# Longer than any run.
_FOREVER = timedelta(days=365)
# Seconds within which the note of an end arrives after a connection broke.
_NOTE_S = 5.0


class NotTogether(RuntimeError):
    """Not all processes of a group came in time, or one ended before all were connected."""


class Group(Protocol):
    """A group whose rank 0 sends to all others."""

    def broadcast(self, content: Tensor) -> None:
        """Send ``content`` (rank 0) or fill it (the others), and block until that is done here.

        Raises:
            RuntimeError: it was aborted, or another rank is gone.
        """

    def abort(self) -> None:
        """End the group from any thread. A :meth:`broadcast` that is under way fails or returns."""


class NcclGroup:
    """GPUs, connected by NCCL.

    Args:
        meeting: processes of the group, from :func:`~torchrl_grpo.inference.vllm_compat.join_group`.
        device: this process's GPU.
    """

    def __init__(self, meeting: Any, device: torch.device) -> None:
        self._device = device
        # Threads start with the first GPU.
        torch.cuda.set_device(device)
        self._communicator = vllm_compat.join_nccl(meeting, device)

    def broadcast(self, content: Tensor) -> None:
        """See :meth:`Group.broadcast`."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(content, src=0, stream=stream)
            stream.synchronize()

    def abort(self) -> None:
        """See :meth:`Group.abort`."""
        self._communicator.destroy()


class GlooGroup:
    """Processes without GPUs, connected by gloo.

    Args:
        meeting: processes of the group, from :func:`~torchrl_grpo.inference.vllm_compat.join_group`.
        timeout_s: seconds within which a broadcast ends.
    """

    def __init__(self, meeting: Any, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        # Any, because torch's annotations lack its operations.
        self._backend: Any = distributed.ProcessGroupGloo(
            meeting.store, meeting.rank, meeting.world_size, limit
        )

    def broadcast(self, content: Tensor) -> None:
        """See :meth:`Group.broadcast`."""
        self._backend.broadcast(content, 0).wait()

    def abort(self) -> None:
        """See :meth:`Group.abort`."""
        self._backend.abort()


class Membership:
    """This process's place in a group.

    Args:
        host: address of rank 0.
        port: its port.
        rank: number of this process in the group; 0 is the trainer.
        size: number of processes.
        device: where weights lie.
        timeout_s: seconds within which all processes must be there.

    Raises:
        NotTogether: the others did not come in time, or cannot be connected.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, *, device: torch.device, timeout_s: float
    ) -> None:
        self._ended = threading.Event()
        try:
            meeting = vllm_compat.join_group(host, port, rank, size, timeout_s)
            self._store = meeting.store
            self._group: Group = (
                NcclGroup(meeting, device) if device.type == "cuda" else GlooGroup(meeting, timeout_s)
            )
        except (RuntimeError, OSError) as error:
            raise NotTogether(f"rank {rank} of {size} at {host}:{port}: {error}") from error
        self._watches = rank > 0
        if self._watches:
            threading.Thread(target=self._watch, name="weight group", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._store.wait([_ENDED], _FOREVER)
        except RuntimeError:
            # The trainer's process has ended, which says the same.
            pass
        finally:
            self._end()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._group.abort()

    def broadcast(self, content: Tensor) -> bool:
        """Send or fill ``content``; return False if the group has ended, and ``content`` is not whole.

        Raises:
            RuntimeError: it failed for another reason.
        """
        try:
            self._group.broadcast(content)
        except RuntimeError:
            # An end of the group that this rank does not know of yet shows first as a broken connection.
            # Rank 0 ends it itself.
            if not self._ended.wait(_NOTE_S if self._watches else 0):
                raise
        return not self._ended.is_set()

    def end(self) -> None:
        """End the group for all its processes. Only rank 0 may: a rank that watches holds its store."""
        if not self._ended.is_set():
            self._store.set(_ENDED, "")
            self._end()

    def leave(self) -> None:
        """Leave the group, which thereby cannot send any more."""
        self._end()
