"""Weights that pass through the two halves of a bucket in turn, while the trainer waits for its servers.

The trainer fills one half while servers load the other. So the weights on their way take one bucket of memory
however large the model is, and the same memory is used again and again. The halves are two small files
(:class:`Segments`), or memory of a GPU (:mod:`~torchrl_grpo.inference.servers.channels`).

The trainer's own weights are what is sent. A server that starts later gets them again, when the trainer waits
for something: :meth:`WeightStream.serve` runs in its thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, get_num_threads, set_num_threads

from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.channels.types import Halves, Opening, nothing_to_do
from torchrl_grpo.inference.servers.weight_files import Bucket, Folder, Segment, divide, whole_tensors

# Longest time between a broken connection and the notice that the server has exited, in seconds.
_EXIT_NOTICE_S = 30.0


class TransferEnded(RuntimeError):
    """The trainer has stopped sending weights."""


class TransferPostponed(RuntimeError):
    """The trainer does not send now, and a server that asks again gets the weights later."""


class Segments:
    """The two files, which together have the size of a bucket.

    Args:
        parent: folder to create them in, e.g. ``/dev/shm``.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = Folder(parent)
        self._files: dict[int, Segment] = {}

    all_in_one_pass = False
    on_this_machine = True
    by_cpu = True

    @property
    def room(self) -> int:
        """Size of one file in bytes."""
        return weight_files.BUCKET_BYTES // 2

    def admit(self, server: Hashable, address: str, gpus: Sequence[str]) -> None:
        """See :meth:`Halves.admit`. A server says itself whether it sees the folder."""

    def dismiss(self, server: Hashable) -> None:
        """See :meth:`Halves.dismiss`."""

    def misses_a_server(self, servers: Collection[Hashable]) -> bool:
        """See :meth:`Halves.misses_a_server`."""
        return False

    def open(self, servers: Sequence[Hashable]) -> tuple[Mapping[Hashable, Opening], Future[None]]:
        """See :meth:`Halves.open`."""
        return {}, nothing_to_do()

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        """See :meth:`Halves.write`."""
        size = weight_files.room_for(pieces)
        if slot not in self._files or self._files[slot].size < size:
            self._files[slot] = Segment(self._folder.path / str(slot), max(size, self.room))
        return self._files[slot].write(pieces)

    def send(self, slot: int, size: int) -> Future[None]:
        """See :meth:`Halves.send`. Servers read the file where it is."""
        return nothing_to_do()

    def interrupt(self) -> None:
        """See :meth:`Halves.interrupt`."""

    def close(self) -> None:
        """Delete the files."""
        self._folder.close()


class _Reader:
    """What one server gets in one pass over the weights."""

    def __init__(self, server: Hashable) -> None:
        self.server = server
        # Each with its slot, or None for an Opening.
        self.inbox: deque[tuple[int | None, Bucket | Opening]] = deque()
        # Slots of buckets that it has taken and may still load.
        self.loading: deque[int] = deque()
        # Whether the last bucket of the pass is in the inbox, or was.
        self.has_all = False
        self.ended = False
        # Whether the pass was interrupted, because another server has left.
        self.interrupted = False


class WeightStream:
    """The weights of one publication, on their way to servers.

    Args:
        weights: names and tensors; read again for each server that starts later.
        halves: what they pass through. Only one stream at a time may use it.
        no_room: function that makes the error that is raised if there is no room for the files.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        halves: Halves,
        no_room: Callable[[OSError], Exception],
    ) -> None:
        self._weights, self._halves, self._no_room = weights, halves, no_room
        self._changed = threading.Condition()
        # Servers that were told to load, and have neither begun nor failed.
        self._expected: set[Hashable] = set()
        # Servers that have read a whole pass.
        self._served: set[Hashable] = set()
        self._waiting: set[_Reader] = set()
        self._reading: set[_Reader] = set()
        # By slot: servers that have not loaded what lies there.
        self._holding: tuple[set[_Reader], set[_Reader]] = (set(), set())
        # Whether the trainer sends weights now, or is about to.
        self._open = True
        self._closed = False

    @property
    def by_cpu(self) -> bool:
        """See :class:`Halves`."""
        return self._halves.by_cpu

    def reader_for(self, server: Hashable) -> StreamReader:
        """Return a reader for a server that was told to load; the next pass waits for that server."""
        with self._changed:
            self._expected.add(server)
        return StreamReader(self, server)

    def settle(self, server: Hashable) -> None:
        """Note that a server is done loading, whatever the reason."""
        with self._changed:
            self._expected.discard(server)
            self._changed.notify_all()

    def buckets(self, server: Hashable) -> Generator[Bucket | Opening | None]:
        """Yield the buckets of a whole pass to a server, and what it opens before the first one.

        When they change is said in :class:`~torchrl_grpo.inference.servers.carriers.Buckets`.

        Raises:
            TransferEnded: the trainer has stopped.
            TransferPostponed: the trainer is no longer waiting, or another server has left in the middle.
        """
        reader = _Reader(server)
        with self._changed:
            self._expected.discard(server)
            self._waiting.add(reader)
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._concerns(reader))
                    if reader.interrupted:
                        raise TransferPostponed("another server has left in the middle of the weights")
                    if self._waits_in_vain(reader) and not self._closed:
                        raise TransferPostponed("the trainer is no longer waiting")
                    if self._closed and not reader.ended:
                        raise TransferEnded("the trainer has stopped sending weights")
                    slot, bucket = reader.inbox.popleft() if reader.inbox else (None, None)
                    if bucket is None and not reader.loading:
                        return
                    if slot is not None:
                        reader.loading.append(slot)
                yield bucket
                # A file may be loaded while the next one is asked for.
                may_stay = 1 if isinstance(bucket, Bucket) and bucket.slot is None else 0
                with self._changed:
                    while len(reader.loading) > may_stay:
                        self._holding[reader.loading.popleft()].discard(reader)
                    self._changed.notify_all()
        finally:
            with self._changed:
                for readers in (self._waiting, self._reading, *self._holding):
                    readers.discard(reader)
                self._changed.notify_all()

    def _concerns(self, reader: _Reader) -> bool:
        """Return whether something has happened that a reader waits for."""
        return bool(
            reader.inbox
            or reader.ended
            or reader.interrupted
            or (reader.has_all and reader.loading)
            or self._closed
            or self._waits_in_vain(reader)
        )

    def _waits_in_vain(self, reader: _Reader) -> bool:
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
                        lambda: until.done() or (bool(self._waiting) and not self._must_wait())
                    )
                    if until.done():
                        return
                    self._reading, self._waiting = self._waiting, set()
                    readers = list(self._reading)
                with half_of_the_threads() if self.by_cpu else nullcontext():
                    whole = self._send(readers)
                with self._changed:
                    for reader in readers:
                        reader.ended, reader.interrupted = whole, not whole
                        if whole and reader in self._reading:
                            self._served.add(reader.server)
                    self._changed.notify_all()
        except OSError as error:
            self.close()
            raise self._no_room(error) from error
        except BaseException:
            self.close()
            raise

    def _must_wait(self) -> bool:
        """Return whether another server is about to ask for the weights."""
        waiting = {reader.server for reader in self._waiting}
        return bool(self._expected) or self._halves.misses_a_server(self._served | waiting)

    def _send(self, readers: Sequence[_Reader]) -> bool:
        """Send all weights; return False if the pass was interrupted."""
        openings, opened = self._halves.open([reader.server for reader in readers])
        with self._changed:
            for reader in readers:
                if reader.server in openings:
                    reader.inbox.append((None, openings[reader.server]))
            self._changed.notify_all()
        if not self._arrived(opened, readers):
            return False
        for number, pieces in enumerate(divide(self._weights, self._halves.room)):
            slot = number % 2
            self._wait_until_loaded(slot)
            bucket = self._halves.write(slot, pieces)
            with self._changed:
                self._holding[slot].update(self._reading)
                for reader in self._reading:
                    reader.inbox.append((slot, bucket))
                self._changed.notify_all()
            if not self._arrived(self._halves.send(slot, bucket.size), readers):
                return False
        with self._changed:
            for reader in self._reading:
                reader.has_all = True
            self._changed.notify_all()
        for slot in range(2):
            self._wait_until_loaded(slot)
        return True

    def _arrived(self, sending: Future[None], readers: Sequence[_Reader]) -> bool:
        """Wait until something has reached all servers; return False if one has left that was needed."""

        def wake(_: Future[None]) -> None:
            with self._changed:
                self._changed.notify_all()

        def one_departed() -> bool:
            return self._halves.all_in_one_pass and not self._reading.issuperset(readers)

        sending.add_done_callback(wake)
        with self._changed:
            self._changed.wait_for(lambda: sending.done() or one_departed())
            left = one_departed()
        if not left and (error := sending.exception()) is not None:
            # As a rule, the connection to a server that ended breaks here before it is known to have ended.
            self._halves.interrupt()
            with self._changed:
                if not self._changed.wait_for(one_departed, _EXIT_NOTICE_S):
                    raise error
            return False
        if left:
            self._halves.interrupt()
        return not left

    def _wait_until_loaded(self, slot: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._holding[slot])

    def close(self) -> None:
        """Release servers that wait for weights; they get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@contextmanager
def half_of_the_threads() -> Iterator[None]:
    """Compute with half of this process's threads, because another process computes on the same cores.

    Threads of two processes that wait for each other's cores make both slower than with half as many. A vLLM
    server replaces ``torch.set_num_threads`` by a function that does nothing, after this module was imported.
    """
    threads = get_num_threads()
    set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        set_num_threads(threads)


class StreamReader:
    """A stream as one server reads it.

    Args:
        stream: the stream.
        server: what the stream knows the server by.
    """

    def __init__(self, stream: WeightStream, server: Hashable) -> None:
        self._stream, self._server = stream, server

    @property
    def in_turn(self) -> bool:
        """See :class:`BucketSource`."""
        return self._stream.by_cpu

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and whole tensors of a pass through files."""
        return whole_tensors(one for one in self.buckets() if isinstance(one, Bucket))

    def buckets(self) -> Generator[Bucket | Opening | None]:
        """See :meth:`WeightStream.buckets`."""
        return self._stream.buckets(self._server)

    def settle(self) -> None:
        """See :meth:`WeightStream.settle`."""
        self._stream.settle(self._server)
