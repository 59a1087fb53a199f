"""Event loops of asyncio in threads of the process, to which other threads give work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopClosed(RuntimeError):
    """The connection takes no more work."""


class _Loop:
    """An event loop and its thread, for as long as something uses it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.users = 0
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


_shared: dict[str, _Loop] = {}
_lock = threading.Lock()


class SharedLoop:
    """A part of an event loop that connections of one kind share, with its own tasks.

    With a thread for each of hundreds of connections, threads would mostly wait for the interpreter's lock.
    The thread runs as long as one of them is open.

    Args:
        name: kind of connection, and name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        with _lock:
            # A process that was forked has the loop and not its thread.
            if name not in _shared or not _shared[name].thread.is_alive():
                _shared[name] = _Loop(name)
            self._loop = _shared[name]
            self._loop.users += 1
        # Whoever submits work or closes holds it, so that no work is submitted after the last.
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work, and return its future, which is canceled if this is closed before.

        Raises:
            LoopClosed: it is closed.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise LoopClosed("the event loop is closed")
            return asyncio.run_coroutine_threadsafe(self._listed(work), self._loop.loop)

    async def _listed(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all its work and do ``last``. It may be called twice, from any thread but the loop's.

        Args:
            last: what closes the things that the work used.
        """
        assert threading.current_thread() is not self._loop.thread, "it would wait for itself"
        with self._lock:
            if self._closed:
                last.close()
                return
            self._closed = True
        try:
            # Work that was submitted before has become a task when this one runs, and is canceled by it.
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop.loop).result()
        finally:
            with _lock:
                self._loop.users -= 1
                is_last = not self._loop.users
                if is_last and _shared.get(self._name) is self._loop:
                    del _shared[self._name]
            if is_last:
                self._loop.end()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last
