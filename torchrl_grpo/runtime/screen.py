"""Keeps what libraries print off the screen of a run and in its log file.

Libraries print from C++ and from child processes too, so inside :func:`libraries_to_log` file descriptors 1
and 2 themselves lead to the log. What the project prints goes to :func:`out` and :func:`err`.
"""

from __future__ import annotations

import copy
import faulthandler
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO


@dataclass(frozen=True)
class _Screen:
    out: TextIO
    err: TextIO


_screen: _Screen | None = None


def out() -> TextIO:
    """The stdout that the user sees."""
    return sys.stdout if _screen is None else _screen.out


def err() -> TextIO:
    """The stderr that the user sees."""
    return sys.stderr if _screen is None else _screen.err


def say(text: str) -> None:
    """Print a line for the user, from any thread, above a line of progress."""
    stream = err()
    clear = "\r\x1b[K" if stream.isatty() else ""
    stream.write(f"{clear}{text}\n")
    stream.flush()


def logs_to_file() -> bool:
    """Whether the output of libraries now goes to a file instead of the screen."""
    return _screen is not None


def err_descriptor() -> int:
    """Descriptor of :func:`err`, for signal handlers, which must not use a stream."""
    try:
        return err().fileno()
    except OSError:
        return 2


def log_file() -> Path | None:
    """The file that the root logger writes to; None without one."""
    for handler in logging.getLogger().handlers:
        # Not subclasses: tests and programs around this one have handlers for purposes of their own.
        if type(handler) is logging.FileHandler:
            return Path(handler.baseFilename)
    return None


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Send records of the root logger to a file, the one that :func:`libraries_to_log` takes by default."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@contextmanager
def libraries_to_log(path: Path | None = None) -> Iterator[None]:
    """Send whatever this process and its children print to a file.

    On the screen remain :func:`out`, :func:`err` and warnings of this project. If a handler of the root
    logger shows records there, those of this project and errors of libraries remain too. An exception is
    raised once the screen is back, below a line that names the file if something was written to it.

    Args:
        path: file to append to; by default that of the root logger. Without one, or without its folder on
            this machine, nothing changes.
    """
    global _screen
    path = path or log_file()
    if path is None or not path.parent.is_dir() or _screen is not None:
        yield
        return
    before = path.stat().st_size if path.exists() else 0
    try:
        with ExitStack() as stack:
            _screen = _divert(path, stack)
            stack.callback(_forget)
            _show_records(_screen, stack)
            _show_warnings(_screen, stack)
            yield
    except BrokenPipeError:
        # Nobody reads what is printed.
        raise
    except Exception:
        if path.exists() and path.stat().st_size > before:
            sys.stderr.write(f"libraries printed more to {path}\n")
        raise


def _forget() -> None:
    global _screen
    _screen = None


def _divert(path: Path, stack: ExitStack) -> _Screen:
    """Point descriptors 1 and 2 to the file until ``stack`` is closed; return streams to where they led."""
    seen = _Screen(_kept(sys.stdout, 1, stack), _kept(sys.stderr, 2, stack))
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        stack.callback(_point, number, os.dup(number))
        os.dup2(log, number)
    os.close(log)
    # A process that crashes in C or C++ says so where the user looks.
    if not faulthandler.is_enabled() and _has_descriptor(seen.err):
        faulthandler.enable(seen.err)
        stack.callback(faulthandler.disable)
    return seen


def _kept(stream: TextIO, number: int, stack: ExitStack) -> TextIO:
    """A stream to where ``stream`` leads now; itself if it does not write to descriptor ``number``."""
    stream.flush()
    try:
        descriptor = stream.fileno()
    except OSError:
        return stream
    if descriptor != number:
        return stream
    return stack.enter_context(
        open(os.dup(number), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)
    )


def _has_descriptor(stream: TextIO) -> bool:
    """Whether a stream leads to a file. That of a notebook does not."""
    try:
        stream.fileno()
    except OSError:
        return False
    return True


def _point(number: int, descriptor: int) -> None:
    # What libraries have left in Python's buffers belongs into the file.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, number)
    os.close(descriptor)


def _show_records(screen: _Screen, stack: ExitStack) -> None:
    """Let the root logger's handlers for the screen still write there, and only what users can act on."""
    for handler in logging.getLogger().handlers:
        if type(handler) is not logging.StreamHandler or handler.stream not in (sys.stdout, sys.stderr):
            continue
        stream = handler.stream
        handler.setStream(screen.out if stream is sys.stdout else screen.err)
        stack.callback(handler.setStream, stream)
        fold = _Fold(handler)
        handler.addFilter(fold)
        stack.callback(handler.removeFilter, fold)


class _Fold(logging.Filter):
    """Shows what users can act on; of records that are alike only the first, the 10th, the 100th and so on.

    Records are alike if they have the same attribute ``fold``, which ``extra`` gives them.

    Args:
        handler: handler of the records.
    """

    def __init__(self, handler: logging.StreamHandler[TextIO]) -> None:
        super().__init__()
        self._handler = handler
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        kind: str | None = getattr(record, "fold", None)
        if kind is None or not _for_users(record):
            return _for_users(record)
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
        if count > 1 and str(count).strip("0") == "1":
            # A copy: other handlers write the record as it is.
            counted = copy.copy(record)
            counted.msg, counted.args = f"{record.getMessage()} ({count} times so far)", None
            self._handler.acquire()
            try:
                self._handler.emit(counted)
            finally:
                self._handler.release()
        return count == 1


def _for_users(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "torchrl_grpo" or record.levelno >= logging.ERROR


def _show_warnings(screen: _Screen, stack: ExitStack) -> None:
    """Let warnings that this project issues reach the screen; those of libraries go to stderr, the log."""
    show = warnings.showwarning

    def show_ours(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        # By who called warnings.warn: with a stacklevel, libraries name a line of this project.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] in ("warnings", "_py_warnings"):
            frame = frame.f_back
        if frame is None or frame.f_globals["__name__"].partition(".")[0] != "torchrl_grpo":
            show(message, category, filename, lineno, file, line)
            return
        say(f"warning: {message}")

    warnings.showwarning = show_ours
    stack.callback(setattr, warnings, "showwarning", show)
