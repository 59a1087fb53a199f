"""Weights that pass through the two halves of a transfer buffer, while the trainer waits for its servers.

The trainer fills one half while servers load the other. So weights in transit need no more memory than the
transfer buffer, however large the model is, and the same memory is used again and again. The halves are two
small files (:class:`Segments`), or memory of a GPU (:mod:`~torchrl_grpo.inference.servers.channels`).

The stream reads the trainer's own weights and keeps no copy of them. A server that starts later gets them
when the trainer next waits for something: :meth:`WeightStream.send_until` runs in the trainer's thread.
"""

from __future__ import annotations

import shutil
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, get_num_threads, set_num_threads

from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.transfer_types import Channel, Opening
from torchrl_grpo.inference.servers.weight_files import Bucket, BucketSource, Folder, Segment, divide

# Least size of one file in bytes. A larger row needs more.
_LEAST_ROOM = 2**16


class TransferEnded(RuntimeError):
    """The trainer has stopped sending weights."""


class TransferPostponed(RuntimeError):
    """The trainer does not send now, and a server that asks again gets the weights later."""


class Halves(Channel):
    """The two halves of a transfer buffer, which weights pass through in turn.

    Servers may read in different passes.
    """

    @property
    @abstractmethod
    def room(self) -> int:
        """Size of a half in bytes."""

    @property
    def most_room(self) -> int:
        """Size that a half may grow to, as :func:`~.weight_files.divide` says."""
        return self.room

    @abstractmethod
    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        """Write pieces to half 0 or 1, whose earlier content every server has loaded.

        The pieces are in place when this returns.

        Raises:
            OSError: there is no room.
        """

    def open(self, servers: Sequence[Hashable]) -> Mapping[Hashable, Opening]:
        """Prepare a pass, and return what servers must open, for those that have to."""
        return {}

    def send(self, weights: Iterable[tuple[str, Tensor]], stream: WeightStream) -> bool:
        """See :meth:`Channel.send`. A server that leaves holds up nobody."""
        stream.announce(self.open(stream.readers()))
        for number, pieces in enumerate(divide(weights, self.room, self.most_room)):
            slot = number % 2
            stream.wait_until_loaded(slot)
            stream.announce_half(slot, self.write(slot, pieces))
        stream.wait_until_all_loaded()
        return True


class Segments(Halves):
    """Two files, which are the halves of a transfer buffer in shared memory.

    Args:
        parent: folder to create them in, e.g. ``/dev/shm``.
    """

    on_this_machine = True
    by_cpu = True

    def __init__(self, parent: Path) -> None:
        self._folder = Folder(parent)
        self._files: dict[int, Segment] = {}
        # Set at the first pass, when all servers have taken what they need.
        self._room = self._most_room = 0

    @property
    def room(self) -> int:
        """Size of one file in bytes. The two together take at most half of the room that is left there."""
        if not self._room:
            free = shutil.disk_usage(self._folder.path).free
            self._room = min(weight_files.BUCKET_BYTES // 2, max(_LEAST_ROOM, free // 4))
            self._most_room = max(self._room, min(weight_files.MOST_BYTES, free // 4))
        return self._room

    @property
    def most_room(self) -> int:
        """See :attr:`Halves.most_room`; :attr:`room` is asked for first."""
        return self._most_room

    def write(self, slot: int, pieces: Sequence[Piece]) -> Bucket:
        size = weight_files.room_for(pieces)
        if slot not in self._files or self._files[slot].size < size:
            # A power of two, so that a file that grows is not made anew for each of its contents.
            room = self.room
            while room < size <= self._most_room:
                room = min(2 * room, self._most_room)
            self._files[slot] = Segment(self._folder.path / str(slot), max(size, room))
        return self._files[slot].write(pieces)

    def close(self) -> None:
        """Delete the files."""
        self._folder.close()


class _Pass:
    """The state of one server in one pass over the weights."""

    def __init__(self, server: Hashable, lock: threading.RLock) -> None:
        self.server = server
        # Notified if the server has something to do. With a condition for all, each half of the buffer would
        # wake every server for every other.
        self.changed = threading.Condition(lock)
        # What the server has not taken yet: each bucket with its slot, and an Opening with None.
        self.inbox: deque[tuple[int | None, Bucket | Opening]] = deque()
        # Slots of buckets that it has taken and may still load.
        self.loading: deque[int] = deque()
        # Whether the last bucket of the pass has been put into the inbox.
        self.has_all = False
        self.ended = False
        # Whether the pass was interrupted, because another server has left.
        self.interrupted = False


class WeightStream:
    """The weights of one publication, on their way to servers.

    Args:
        weights: names and tensors; read again for each server that starts later.
        channel: way to send them. Only one stream at a time may use it.
        no_room: function that makes the error that is raised if there is no room for the files.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        channel: Channel,
        no_room: Callable[[OSError], Exception],
    ) -> None:
        self._weights, self._channel, self._no_room = weights, channel, no_room
        self._lock = threading.RLock()
        # Notified if the thread that sends may have something to do.
        self._changed = threading.Condition(self._lock)
        # Servers that were told to load. A server is removed when it begins to read, or when it fails.
        self._expected: set[Hashable] = set()
        # Servers that have read all weights.
        self._servers_done: set[Hashable] = set()
        # Passes that have not begun, and passes that have.
        self._waiting: set[_Pass] = set()
        self._reading: set[_Pass] = set()
        # For each half: passes of servers that have not loaded its content yet.
        self._holding: tuple[set[_Pass], set[_Pass]] = (set(), set())
        # Whether the trainer sends weights now, or is about to.
        self._open = True
        self._closed = False

    @property
    def by_cpu(self) -> bool:
        return self._channel.by_cpu

    def reader_for(self, server: Hashable) -> StreamReader:
        """Return a reader for a server that was told to load; the next pass waits for that server."""
        with self._changed:
            self._expected.add(server)
        return StreamReader(self, server)

    def mark_done(self, server: Hashable) -> None:
        """Note that a server no longer loads: it has loaded the weights, has failed, or has ended."""
        with self._changed:
            self._expected.discard(server)
            self._changed.notify_all()

    def mark_received(self, server: Hashable) -> None:
        """Note that a server has all weights, whatever becomes of the pass for others."""
        with self._changed:
            self._servers_done.add(server)
            self._changed.notify_all()

    def buckets(self, server: Hashable) -> Generator[Bucket | Opening | None]:
        """Yield the buckets of a whole pass to a server.

        If the server must open something first, the first item is an :class:`Opening`.
        :class:`~torchrl_grpo.inference.servers.weight_files.BucketSource` says when the content of a bucket
        may be overwritten, and what None means.

        Raises:
            TransferEnded: the trainer has stopped.
            TransferPostponed: the trainer is no longer waiting, or another server has left during the pass.
        """
        server_pass = _Pass(server, self._lock)
        with self._changed:
            self._expected.discard(server)
            self._waiting.add(server_pass)
            self._changed.notify_all()
        try:
            while True:
                with self._lock:
                    server_pass.changed.wait_for(lambda: self._has_news_for(server_pass))
                    if server_pass.interrupted:
                        raise TransferPostponed("another server has left while weights were sent")
                    if self._waits_in_vain(server_pass) and not self._closed:
                        raise TransferPostponed("the trainer is no longer waiting")
                    if self._closed and not server_pass.ended:
                        raise TransferEnded("the trainer has stopped sending weights")
                    slot, bucket = server_pass.inbox.popleft() if server_pass.inbox else (None, None)
                    if bucket is None and not server_pass.loading:
                        return
                    if slot is not None:
                        server_pass.loading.append(slot)
                yield bucket
                # A server may still load a file when it asks for the next one, but not a half of GPU memory.
                may_stay = 1 if isinstance(bucket, Bucket) and bucket.slot is None else 0
                with self._changed:
                    while len(server_pass.loading) > may_stay:
                        passes = self._holding[server_pass.loading.popleft()]
                        passes.discard(server_pass)
                        if not passes:
                            self._changed.notify_all()
        finally:
            with self._changed:
                for passes in (self._waiting, self._reading, *self._holding):
                    passes.discard(server_pass)
                self._changed.notify_all()

    def _has_news_for(self, server_pass: _Pass) -> bool:
        """Return whether the server of a pass has something to do: to load, to finish or to fail."""
        return bool(
            server_pass.inbox
            or server_pass.ended
            or server_pass.interrupted
            or (server_pass.has_all and server_pass.loading)
            or self._closed
            or self._waits_in_vain(server_pass)
        )

    def _waits_in_vain(self, server_pass: _Pass) -> bool:
        return not self._open and server_pass in self._waiting

    def open(self) -> None:
        """Let servers ask for the weights, which :meth:`send_until` is about to send."""
        with self._changed:
            self._open = True

    def postpone(self) -> None:
        """Refuse servers that wait for weights, until :meth:`open` is called. They get TransferPostponed."""
        with self._lock:
            self._open = False
            self._notify(self._waiting)

    def _notify(self, passes: Iterable[_Pass]) -> None:
        for server_pass in passes:
            server_pass.changed.notify()

    def send_until(self, until: Future[Any]) -> None:
        """Send the weights to every server that asks for them, until a future is done.

        The calling thread reads the weights, so they must not change before this returns.

        Raises:
            Exception: there is no room for the files.
        """
        until.add_done_callback(self.wake)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: until.done() or (bool(self._waiting) and not self._must_wait())
                    )
                    if until.done():
                        return
                    self._reading, self._waiting = self._waiting, set()
                    passes = list(self._reading)
                with half_of_the_threads() if self.by_cpu else nullcontext():
                    whole = self._channel.send(self._weights, self)
                with self._changed:
                    for server_pass in passes:
                        server_pass.ended, server_pass.interrupted = whole, not whole
                        if whole and server_pass in self._reading:
                            self._servers_done.add(server_pass.server)
                    self._notify(passes)
        except OSError as error:
            self.close()
            raise self._no_room(error) from error
        except BaseException:
            self.close()
            raise

    def _must_wait(self) -> bool:
        """Return whether another server is about to ask for the weights."""
        waiting = {server_pass.server for server_pass in self._waiting}
        return bool(self._expected) or self._channel.misses_a_server(self._servers_done | waiting)

    def readers(self) -> list[Hashable]:
        """Return the servers of the pass that is under way."""
        with self._changed:
            return [server_pass.server for server_pass in self._reading]

    def announce(self, openings: Mapping[Hashable, Opening]) -> None:
        """Tell servers of the pass what they must open."""
        with self._changed:
            for server_pass in self._reading:
                if server_pass.server in openings:
                    server_pass.inbox.append((None, openings[server_pass.server]))
            self._notify(self._reading)

    def announce_half(self, slot: int, bucket: Bucket) -> None:
        """Tell all servers of the pass what a half holds."""
        with self._changed:
            self._holding[slot].update(self._reading)
            for server_pass in self._reading:
                server_pass.inbox.append((slot, bucket))
            self._notify(self._reading)

    def wait_until_loaded(self, slot: int) -> None:
        """Wait until every server has loaded what a half holds, or has left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holding[slot])

    def wait_until_all_loaded(self) -> None:
        """Wait until every server has loaded everything that was announced, or has left."""
        with self._changed:
            for server_pass in self._reading:
                server_pass.has_all = True
            self._notify(self._reading)
        for slot in range(2):
            self.wait_until_loaded(slot)

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for what changes when a server comes or goes, or with a call of :meth:`wake`.

        Returns:
            Whether it holds; False after so many seconds.
        """
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def wake(self, _: object = None) -> None:
        """Have the thread that sends look again at what it waits for."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Release servers that wait for weights; they get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._notify(self._waiting | self._reading)


@contextmanager
def half_of_the_threads() -> Iterator[None]:
    """Compute with half of this process's threads, because another process computes on the same cores.

    If two processes together have more threads than there are cores, threads wait for cores. Both processes
    are then slower than with half as many threads each.

    A vLLM server later replaces ``torch.set_num_threads`` by a function that does nothing. So this module
    imports the original function by name.
    """
    threads = get_num_threads()
    set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        set_num_threads(threads)


class StreamReader(BucketSource):
    """A stream as one server reads it.

    Args:
        stream: the stream.
        server: what the stream knows the server by.
    """

    def __init__(self, stream: WeightStream, server: Hashable) -> None:
        self._stream, self._server = stream, server
        self.shares_cpu = stream.by_cpu

    def buckets(self) -> Generator[Bucket | Opening | None]:
        return self._stream.buckets(self._server)

    def mark_received(self) -> None:
        self._stream.mark_received(self._server)

    def mark_done(self) -> None:
        self._stream.mark_done(self._server)
