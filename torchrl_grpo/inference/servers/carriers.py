"""Ways in which weights come from the trainer to servers, behind one protocol.

A carrier takes the weights of a publication and returns what a server reads them from. The trainer's copy of
the weights may be all there is (:class:`StreamCarrier`), or the carrier keeps one for servers that load
later.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.servers.transfer_types import Channel
from torchrl_grpo.inference.servers.weight_files import WeightFiles, remove_abandoned
from torchrl_grpo.inference.servers.weight_folder import FolderWeights
from torchrl_grpo.inference.servers.weight_stream import Segments, WeightStream
from torchrl_grpo.runtime.paths import expanded

SHARED_MEMORY = Path("/dev/shm")


class Carrier(ABC):
    """A way on which weights travel to engines in other processes.

    Attributes:
        folder: folder through which weights travel.
        needs_folder: whether servers must see it.
        overwrites: whether :meth:`put` overwrites the previous weights, so no server may be reading them.
    """

    folder: Path
    needs_folder = True
    overwrites = False

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:  # noqa: B027
        """Take on a server: see :meth:`Channel.admit`."""

    def dismiss(self, server: Hashable) -> None:  # noqa: B027
        """Forget a server: see :meth:`Channel.dismiss`."""

    @abstractmethod
    def put(self, weights: Iterable[tuple[str, Tensor]]) -> object:
        """Take the weights of a publication, and return them in the form that servers read."""

    def release(self) -> None:  # noqa: B027
        """Send no more; servers that wait for weights get an error."""

    @abstractmethod
    def close(self) -> None:
        """Delete the weights in transit. No server reads them any more."""


class StreamCarrier(Carrier):
    """Sends the trainer's weights through one transfer buffer, while the trainer waits.

    Args:
        parent: folder in shared memory.
        channel: way to send them; by default two files in that folder.
    """

    def __init__(self, parent: Path = SHARED_MEMORY, channel: Channel | None = None) -> None:
        remove_abandoned(parent)
        self.folder = parent
        self._channel: Channel = Segments(parent) if channel is None else channel
        self.needs_folder = self._channel.on_this_machine
        self._current: WeightStream | None = None

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        self._channel.admit(server, address, gpus)

    def dismiss(self, server: Hashable) -> None:
        self._channel.dismiss(server)
        if self._current is not None:
            self._current.mark_done(server)

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> WeightStream:
        """See :meth:`Carrier.put`. The weights are read when servers ask for them."""
        self._current = WeightStream(weights, self._channel, _no_room)
        return self._current

    def release(self) -> None:
        if self._current is not None:
            self._current.close()

    def close(self) -> None:
        self._channel.close()


class CopyCarrier(Carrier):
    """Shared memory with one copy of the weights, for servers that load while the trainer trains.

    Args:
        parent: folder in shared memory.
    """

    overwrites = True

    def __init__(self, parent: Path = SHARED_MEMORY) -> None:
        remove_abandoned(parent)
        self.folder = parent
        self._files = WeightFiles(parent)

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> WeightFiles:
        """See :meth:`Carrier.put`.

        Raises:
            ConfigError: there is no room.
        """
        try:
            return self._files.write(weights)
        except OSError as error:
            raise _no_room(error) from error

    def close(self) -> None:
        self._files.close()


class FolderCarrier(Carrier):
    """A folder that servers on any machine see, with the newest weights.

    Args:
        folder: the folder; created if there is none.
        servers: number of servers.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, folder: Path, servers: int) -> None:
        self.folder = expanded(folder).absolute()
        self._servers = servers
        # All versions that still exist. Servers may still read one that is not the newest.
        self._versions: weakref.WeakSet[FolderWeights] = weakref.WeakSet()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        remove_abandoned(self.folder)

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> FolderWeights:
        """See :meth:`Carrier.put`. The files are deleted when nobody holds the result any more.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        try:
            version = FolderWeights(self.folder, self._servers)
            self._versions.add(version)
            return version.write(weights)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"inference_model.weight_folder={self.folder}: weights cannot be written there "
            f"({error.strerror}); name a folder with room for two copies of them, which the trainer and all "
            "servers see"
        )

    def close(self) -> None:
        for version in list(self._versions):
            version.close()


def _no_room(error: OSError) -> ConfigError:
    return ConfigError(
        f"inference_model.weight_transfer=shared_memory: weights travel through {SHARED_MEMORY}, which has "
        f"no room for them ({error.strerror}); enlarge it (docker run --shm-size=32g; docs/servers.md "
        "says how much they take), or write inference_model.weight_transfer=folder"
    )
