"""Interrupts that are not lost.

A library may catch KeyboardInterrupt where it meant to catch its own errors: one that tries an import, say,
and takes whatever goes wrong in it for a package that is not installed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered() -> Iterator[Callable[[], None]]:
    """Remember an interrupt that comes inside, beside raising it as always.

    Yields:
        A call that raises KeyboardInterrupt again if one has come and has got lost.
    """
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        # Ignored under nohup, and somebody else's business where this is part of a larger program.
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
