"""Types that every stream of weights to servers uses: through files, and through GPU transfer channels."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers.weight_files import Bucket

# What a rank returns for a half that it did not get, because another server has left during the pass.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Opening:
    """What the ranks of a server must open before weights can reach them.

    Attributes:
        kind: how weights travel: ``cuda_ipc`` or ``nccl``.
        content: arguments as JSON; ``of_rank`` lists what differs between the ranks, if anything does.
    """

    kind: str
    content: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"kind": self.kind, **self.content}


class Halves(Protocol):
    """The two halves of a transfer buffer, which weights pass through in turn.

    Attributes:
        room: size of a half in bytes.
        all_in_one_pass: whether all servers must read in one pass, and a pass ends if one of them leaves.
        on_this_machine: whether servers must see the files of this machine.
        by_cpu: whether the CPU of this machine copies weights on both ends.
    """

    @property
    def room(self) -> int:
        """See above."""

    @property
    def all_in_one_pass(self) -> bool:
        """See above."""

    @property
    def on_this_machine(self) -> bool:
        """See above."""

    @property
    def by_cpu(self) -> bool:
        """See above."""

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        """Take on a server.

        Args:
            server: what the stream knows the server by.
            address: its address, as :class:`ServerConnection` takes it.
            gpus: name of the GPU of each rank; empty texts on a CPU.

        Raises:
            ConfigError: weights cannot reach it in this way.
        """

    def dismiss(self, server: Hashable) -> None:
        """Forget a server. This may be called from any thread, and for a server that was never admitted."""

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        """Return whether a pass must wait for a server that is not among ``servers``."""

    def open(self, servers: Sequence[Hashable]) -> tuple[Mapping[Hashable, Opening], Future[None]]:
        """Prepare a pass.

        Returns:
            What servers must open, for those that have to, and a future that is done when that has worked.
        """

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        """Write pieces to half 0 or 1, whose earlier content every server has loaded.

        The pieces are in place when this returns.

        Raises:
            OSError: there is no room.
        """

    def send(self, slot: int, size: int) -> Future[None]:
        """Bring ``size`` bytes of a half to servers that know what it holds.

        The future is done when they have them.
        """

    def interrupt(self) -> None:
        """End what :meth:`open` or :meth:`send` has begun; its future and the servers' ends fail."""

    def close(self) -> None:
        """Give the halves back."""


class Receiver(Protocol):
    """The end of one rank of a server."""

    def receive(self, slot: int, size: int) -> Tensor | None:
        """Return the first ``size`` bytes of a half; None if the trainer has interrupted the pass."""

    def wait_until_unused(self) -> None:
        """Block until nothing reads what :meth:`receive` returned any more."""

    def close(self) -> None:
        """Give up what was opened."""


def nothing_to_do() -> Future[None]:
    """Return a future that is done."""
    done: Future[None] = Future()
    done.set_result(None)
    return done
