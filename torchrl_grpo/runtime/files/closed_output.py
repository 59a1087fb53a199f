"""Ends a command whose output nobody reads any more as Unix tools end: at once and without a word."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# What a shell shows of a process that SIGPIPE has ended.
CLOSED_CODE = 128 + signal.SIGPIPE
_FAILED_CODE = 2


@contextmanager
def quiet_end() -> Iterator[None]:
    """Surround a command, or decorate its main function.

    Raises:
        SystemExit: with code 141 if the reader of the output has ended, with code 2 if the output cannot be
            written.
    """
    _open_missing()
    try:
        try:
            yield
        finally:
            # Python would show what is wrong as an ignored exception when it ends.
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise
        for stream in closed:
            _discard(stream)
        raise SystemExit(CLOSED_CODE) from None
    except OSError as error:
        if error.filename is not None or not _fails(sys.stdout):
            raise
        _discard(sys.stdout)
        sys.stderr.write(f"error: stdout cannot be written: {error.strerror}; write it to another place\n")
        raise SystemExit(_FAILED_CODE) from None


def _open_missing() -> None:
    """Open descriptors that the caller has closed. The next files would get their numbers, and the output."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    # Python has no stream for a descriptor that was closed when it started.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  (it lasts as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _is_closed(stream: TextIO) -> bool:
    """Whether a stream leads to a pipe or socket that nobody reads."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except OSError:
        # It is no file: that of a notebook or a test.
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fails(stream: TextIO) -> bool:
    """Whether a stream cannot be written. The error that was raised may have been one of another file."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return True
    return False


def _discard(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
