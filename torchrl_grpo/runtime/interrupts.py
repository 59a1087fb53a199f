"""Keeps interrupts from getting lost, and ranks in step when one is interrupted.

A library may swallow KeyboardInterrupt, for example if it takes any exception of an import for a missing
package. A rank that leaves a collective call early leaves the other ranks waiting in it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torchrl_grpo.runtime import screen

_HELD = b"interrupted: the training ranks finish what they have begun together; interrupt again to end now\n"


@contextmanager
def remember_interrupts() -> Iterator[Callable[[], None]]:
    """Raise interrupts as usual, and remember that one came.

    Yields:
        A function that raises KeyboardInterrupt if one came and was swallowed.
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
        # It is ignored under nohup, and a larger program around this one may have its own handler.
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held() -> Iterator[None]:
    """Delay an interrupt to the end of the block; raise a second one at once.

    Raises:
        KeyboardInterrupt: at the end after one interrupt, or at the second one.
    """
    previous = signal.getsignal(signal.SIGINT)
    # Python runs handlers in the main thread only. One that is not callable (ignored, not Python's) stays.
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            previous(number, frame)
        came = True
        # Not through the stream: the interrupted code may be writing to it. The other ranks must not be left
        # waiting because the terminal is closed.
        with suppress(OSError):
            os.write(screen.err_descriptor(), _HELD)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        previous(signal.SIGINT, None)
