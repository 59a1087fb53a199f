"""Interrupts that are not lost, and that leave several ranks in step.

A library may catch KeyboardInterrupt where it meant to catch its own errors: one that tries an import, say,
and takes whatever goes wrong in it for a package that is not installed. And a rank that leaves a collective
call half done leaves the others waiting in it.
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


@contextmanager
def held() -> Iterator[None]:
    """Keep an interrupt that comes inside until the end, where it is raised; a second is raised at once.

    Raises:
        KeyboardInterrupt: at the end, or at the second one.
    """
    previous = signal.getsignal(signal.SIGINT)
    # Python's handlers run in the main thread only; what is no call (ignored, not Python's) stays as it is.
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            previous(number, frame)
        came = True
        # Not through the stream: what was interrupted may be writing to it. A terminal that is gone is no
        # reason to leave the others half way.
        with suppress(OSError):
            os.write(screen.err_descriptor(), _HELD)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        previous(signal.SIGINT, None)
