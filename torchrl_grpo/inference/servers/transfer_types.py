"""Types that every stream of weights uses: through files, and through GPU transfer channels.

The terms of these modules:

* stream: what sends the trainer's weights through a channel; one complete sending is a pass;
* channel: where a stream writes, two files in shared memory or a buffer on the GPU;
* piece: adjacent elements of one tensor;
* bucket: the pieces that travel together, as one file or as one half of a transfer buffer;
* opening: what makes receivers open a channel. With CUDA IPC, buckets follow; with NCCL, a broadcast of all
  weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torchrl_grpo.inference.servers.weight_stream import WeightStream

# What a rank returns if weights did not come whole, because another server or the trainer has left.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Opening:
    """What the ranks of a server, or a worker on Ray, must open before weights reach them.

    Attributes:
        kind: how weights travel: ``cuda_ipc`` or ``nccl``.
        content: arguments as JSON.
    """

    kind: str
    content: Mapping[str, Any]

    @property
    def brings_all(self) -> bool:
        """Whether all weights come with it, and no buckets follow."""
        return self.kind == "nccl"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"kind": self.kind, "content": dict(self.content)}

    @staticmethod
    def from_json(opening: Mapping[str, Any]) -> Opening:
        """Return the opening that :meth:`to_json` was called on."""
        return Opening(opening["kind"], opening["content"])


class Channel(ABC):
    """A way for weights to leave the trainer's process.

    Attributes:
        on_this_machine: whether servers must see the files of this machine.
        by_cpu: whether the CPU of this machine copies weights on both ends.
    """

    on_this_machine: bool
    by_cpu: bool

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:  # noqa: B027
        """Take on a server, or a worker on Ray. A server itself reports whether it sees files.

        Args:
            server: what the stream knows it by.
            address: its address, as :class:`ServerConnection` takes it.
            gpus: name of the GPU of each rank; empty texts on a CPU.

        Raises:
            ConfigError: weights cannot reach it in this way.
        """

    def dismiss(self, server: Hashable) -> None:  # noqa: B027
        """Forget a server. This may be called from any thread, and for a server that was never admitted."""

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        """Return whether a pass must wait for a server that is not among ``servers``."""
        return False

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]], stream: WeightStream) -> bool:
        """Send all weights to the servers that read the stream now.

        Returns:
            False if the pass was interrupted. The servers then ask again.

        Raises:
            OSError: there is no room.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the channel holds."""
