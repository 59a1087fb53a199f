"""Weights that pass through two small files in turn, while the trainer waits for its servers.

The trainer fills one file while servers load the other. So the weights on their way take one bucket of memory
however large the model is, and the pages of the files are used again and again.

The trainer's own weights are what is sent. A server that starts later gets them again, when the trainer waits
for something: :meth:`WeightStream.serve` runs in its thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.weight_files import Bucket, Folder, Segment, divide, whole_tensors


class TransferEnded(RuntimeError):
    """The trainer has stopped sending weights."""


class TransferPostponed(RuntimeError):
    """The trainer does not wait any more, and will send weights when it waits again."""


class Segments:
    """The two files, which together have the size of a bucket.

    Args:
        parent: folder to create them in, e.g. ``/dev/shm``.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = Folder(parent)
        self._files: dict[int, Segment] = {}

    @property
    def room(self) -> int:
        """Size of one file in bytes."""
        return weight_files.BUCKET_BYTES // 2

    def file(self, slot: int, size: int) -> Segment:
        """Return the file of a slot with room for ``size`` bytes; most have :attr:`room`."""
        if slot not in self._files or self._files[slot].size < size:
            self._files[slot] = Segment(self._folder.path / str(slot), max(size, self.room))
        return self._files[slot]

    def close(self) -> None:
        """Delete the files."""
        self._folder.close()


class _Reader:
    """What one server gets in one pass over the weights."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[int, Bucket]] = deque()
        self.ended = False


class WeightStream:
    """The weights of one publication, on their way to servers.

    Args:
        weights: names and tensors; read again for each server that starts later.
        segments: files that they pass through. Only one stream at a time may use them.
        no_room: function that makes the error that is raised if there is no room for the files.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        segments: Segments,
        no_room: Callable[[OSError], Exception],
    ) -> None:
        self._weights, self._segments, self._no_room = weights, segments, no_room
        self._changed = threading.Condition()
        # Servers that were told to load, and have neither begun nor failed.
        self._expected: set[Hashable] = set()
        self._waiting: set[_Reader] = set()
        self._reading: set[_Reader] = set()
        # By slot: servers that have not loaded what lies there.
        self._holding: tuple[set[_Reader], set[_Reader]] = (set(), set())
        # Whether the trainer sends weights now, or is about to.
        self._open = True
        self._closed = False

    def reader_for(self, server: Hashable) -> StreamReader:
        """Return the weights as a server that is told to load them reads them; a pass waits for it."""
        with self._changed:
            self._expected.add(server)
        return StreamReader(self, server)

    def settle(self, server: Hashable) -> None:
        """Note that a server loads no more, whatever the reason."""
        with self._changed:
            self._expected.discard(server)
            self._changed.notify_all()

    def buckets(self, server: Hashable) -> Iterator[Bucket]:
        """Yield the buckets of a whole pass to a server. A bucket changes when the next one is asked for.

        Raises:
            TransferEnded: the trainer has stopped.
            TransferPostponed: the trainer waits no more.
        """
        reader = _Reader()
        with self._changed:
            self._expected.discard(server)
            self._waiting.add(reader)
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: reader.inbox or reader.ended or self._closed or self._is_left(reader)
                    )
                    if self._is_left(reader) and not self._closed:
                        raise TransferPostponed("the trainer waits no more")
                    if self._closed and not reader.ended:
                        raise TransferEnded("the trainer has stopped sending weights")
                    if not reader.inbox:
                        return
                    slot, bucket = reader.inbox.popleft()
                yield bucket
                with self._changed:
                    self._holding[slot].discard(reader)
                    self._changed.notify_all()
        finally:
            with self._changed:
                for readers in (self._waiting, self._reading, *self._holding):
                    readers.discard(reader)
                self._changed.notify_all()

    def _is_left(self, reader: _Reader) -> bool:
        return not self._open and reader in self._waiting

    def open(self) -> None:
        """Let servers ask for the weights, which :meth:`serve` is about to send."""
        with self._changed:
            self._open = True

    def postpone(self) -> None:
        """Send servers away that wait for weights, until :meth:`open`."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def serve(self, until: Future[Any]) -> None:
        """Send the weights to every server that asks for them, until a future is done.

        The calling thread reads the weights, so they must not change before this returns.

        Raises:
            Exception: there is no room for the files.
        """

        def wake(_: Future[Any]) -> None:
            with self._changed:
                self._changed.notify_all()

        until.add_done_callback(wake)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: until.done() or (bool(self._waiting) and not self._expected)
                    )
                    if until.done():
                        return
                    self._reading, self._waiting = self._waiting, set()
                    readers = list(self._reading)
                self._send()
                with self._changed:
                    for reader in readers:
                        reader.ended = True
                    self._changed.notify_all()
        except OSError as error:
            self.close()
            raise self._no_room(error) from error
        except BaseException:
            self.close()
            raise

    def _send(self) -> None:
        for number, pieces in enumerate(divide(self._weights, self._segments.room)):
            slot = number % 2
            self._wait_until_loaded(slot)
            bucket = self._segments.file(slot, weight_files.room_for(pieces)).write(pieces)
            with self._changed:
                self._holding[slot].update(self._reading)
                for reader in self._reading:
                    reader.inbox.append((slot, bucket))
                self._changed.notify_all()
        for slot in range(2):
            self._wait_until_loaded(slot)

    def _wait_until_loaded(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._holding[slot])

    def close(self) -> None:
        """Release servers that wait for weights; they get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class StreamReader:
    """A stream as one server reads it.

    Args:
        stream: the stream.
        server: what the stream knows the server by.
    """

    def __init__(self, stream: WeightStream, server: Hashable) -> None:
        self._stream, self._server = stream, server

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and whole tensors of a pass."""
        return whole_tensors(self.buckets())

    def buckets(self) -> Iterator[Bucket]:
        """See :meth:`WeightStream.buckets`."""
        return self._stream.buckets(self._server)

    def settle(self) -> None:
        """See :meth:`WeightStream.settle`."""
        self._stream.settle(self._server)
