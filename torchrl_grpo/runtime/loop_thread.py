"""An asyncio event loop in a thread of its own, to which other threads give work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class LoopClosed(RuntimeError):
    """The loop takes no more work."""


class LoopThread:
    """An event loop and its thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Whoever submits work or closes holds it, so that no work is submitted to a loop that ends.
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work, and return its future, which is canceled if the loop is closed before.

        Raises:
            LoopClosed: the loop is closed.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise LoopClosed("the event loop is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all work, do ``last``, and end the thread. It may be called twice, from any thread.

        Args:
            last: what closes the things that the work used.
        """
        with self._lock:
            if self._closed:
                last.close()
                return
            self._closed = True
        # Work that was submitted before has become a task when this one runs, and is canceled by it.
        asyncio.run_coroutine_threadsafe(_cancel_all(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all(last: Coroutine[Any, Any, None]) -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last
