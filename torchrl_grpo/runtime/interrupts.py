"""Makes sure that no interrupt is lost, and that an interrupt does not bring training ranks out of step.

A library may swallow KeyboardInterrupt, for example if it takes any exception of an import for a missing
package. A rank that leaves a collective call early leaves the other ranks waiting in it.

``STOP_SIGNAL`` asks a run to write a checkpoint and to end. It is blocked and never handled. The run looks
between two steps whether it is pending. Processes that the run starts inherit the blocked signal, so a
scheduler that signals all of them ends none of them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torchrl_grpo.runtime import screen

STOP_SIGNAL = signal.SIGUSR1
_HELD = b"interrupted: the training ranks finish what they have begun together; interrupt again to end now\n"


class StopRequested(BaseException):
    """``STOP_SIGNAL`` came, and the run has saved what it had. It is no error, like KeyboardInterrupt."""


@contextmanager
def stop_signal_blocked() -> Iterator[None]:
    """Keep ``STOP_SIGNAL`` pending for :func:`stop_requested`.

    Threads inherit the blocked signal only if they start later. So the main thread enters this before it
    imports a library that starts threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    try:
        yield
    finally:
        if STOP_SIGNAL not in before:
            # A request that nobody has seen must not end the program that has called this one.
            signal.sigtimedwait({STOP_SIGNAL}, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_requested() -> bool:
    """Whether ``STOP_SIGNAL`` is pending in this process."""
    return STOP_SIGNAL in signal.sigpending()


@contextmanager
def stop_signal_forwarded(send: Callable[[], None]) -> Iterator[None]:
    """Call ``send`` in a thread whenever ``STOP_SIGNAL`` comes to this process, which has it blocked."""

    def forward() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
        waiting.set()
        while True:
            signal.sigwait({STOP_SIGNAL})
            if ended.is_set():
                return
            send()

    waiting, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=forward, name="stop signal", daemon=True)
    thread.start()
    waiting.wait()
    try:
        yield
    finally:
        ended.set()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, STOP_SIGNAL)
        thread.join()


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
def delay_interrupts() -> Iterator[None]:
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
