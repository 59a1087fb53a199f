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


class Terminated(KeyboardInterrupt):
    """SIGTERM came. It ends a run like an interrupt from the keyboard."""


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


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


# Handlers that raise an interrupt.
_RAISING = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _raise_terminated}


@contextmanager
def raise_terminations() -> Iterator[None]:
    """Raise :class:`Terminated` when SIGTERM comes, unless a larger program has a handler of its own."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_terminations() -> None:
    """Let SIGTERM do nothing in this process. Processes that it starts do not inherit that."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)


@contextmanager
def keep_termination_handler() -> Iterator[None]:
    """Restore what SIGTERM does after a library has replaced it, also one that Python does not know of."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Python cannot restore a handler that was not set from Python, which is None.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def terminations_end_at_once() -> Iterator[None]:
    """Let SIGTERM end the process where it would only raise :class:`Terminated` once a long call is over."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _raise_terminated
    )
    with keep_termination_handler():
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield


@contextmanager
def remember_interrupts() -> Iterator[Callable[[], None]]:
    """Raise interrupts as usual, and remember that one came.

    Yields:
        A function that raises KeyboardInterrupt if one came and was swallowed.
    """
    came: int | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = number
        _RAISING[signal.Signals(number)](number, frame)

    def check() -> None:
        if came is not None:
            _RAISING[signal.Signals(came)](came, None)

    ours = [
        number
        for number, raising in _RAISING.items()
        if threading.current_thread() is threading.main_thread()
        # It is ignored under nohup, and a larger program around this one may have its own handler.
        and signal.getsignal(number) is raising
    ]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield check
    finally:
        for number in ours:
            signal.signal(number, _RAISING[number])


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay an interrupt to the end of the block; raise a second one at once.

    Raises:
        KeyboardInterrupt: at the end after one interrupt, or at the second one.
    """
    # Python runs handlers in the main thread only. One that is not callable (ignored, not Python's) stays.
    handlers = {number: signal.getsignal(number) for number in _RAISING}
    previous = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not previous:
        yield
        return
    came: signal.Signals | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came is not None:
            previous[signal.Signals(number)](number, frame)
        came = signal.Signals(number)
        # Not through the stream: the interrupted code may be writing to it. The other ranks must not be left
        # waiting because the terminal is closed.
        with suppress(OSError):
            os.write(screen.err_descriptor(), _HELD)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came is not None:
        previous[came](came, None)
