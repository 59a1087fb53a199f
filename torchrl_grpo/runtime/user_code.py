"""Load a function or a class that the configuration names by file or by import path."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.paths import expanded


def parse(spec: str) -> tuple[str, str] | None:
    """Split ``PLACE:NAME``, or return None if ``spec`` has no such form."""
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and place and name.isidentifier() else None


def absolute(spec: str) -> str:
    """Return a name whose file has a whole path. Other names stay as they are."""
    place, colon, name = spec.rpartition(":")
    if not place.endswith((".py", ".pkl")):
        return spec
    return f"{expanded(place).resolve()}{colon}{name}"


def load(spec: str, key: str) -> Any:
    """Load what ``spec`` names, and run the code of its module once per process.

    Args:
        spec: ``FILE.py:NAME``, with the file relative to the working directory, ``PACKAGE.MODULE:NAME``, or
            ``FILE.pkl:NAME`` for an object that was passed to a trainer in Python. Modules beside a file can
            be imported from it.
        key: configuration key that has this value, for messages.

    Returns:
        The function or class.

    Raises:
        ConfigError: ``spec`` has no such form, there is no such file, module or name, or its code fails.
    """
    parsed = parse(spec)
    if parsed is None:
        raise ConfigError(
            f"{key}={spec!r} names no function; write FILE.py:NAME or PACKAGE.MODULE:NAME, for example "
            f"{key}=my_code.py:my_function"
        )
    place, name = parsed
    if place.endswith(".pkl"):
        return _pickled(place, name, key, spec)
    module = _from_file(place, key, spec) if place.endswith(".py") else _from_package(place, key, spec)
    target = getattr(module, name, None)
    if target is None:
        own = [(attr, value) for attr, value in vars(module).items() if not attr.startswith("_")]
        names = [attr for attr, value in own if getattr(value, "__module__", None) == module.__name__]
        names = difflib.get_close_matches(name, names, n=1) or names
        raise ConfigError(
            f"{key}={spec!r}: {place} has no {name}; write "
            f"{' or '.join(names) or 'its functions'} after the colon"
        )
    if not callable(target):
        raise ConfigError(
            f"{key}={spec!r}: {name} is {type(target).__name__}, not a function or class; name one of those"
        )
    return target


def signature(target: Any, key: str) -> inspect.Signature:
    """Return the signature of a function or a class.

    Raises:
        ConfigError: it has none that Python can read, as some functions written in C.
    """
    try:
        return inspect.signature(target)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; write a Python function that calls it") from error


def check_arguments(target: Any, arguments: Mapping[str, Any], key: str) -> None:
    """Check that a function or a class takes ``arguments``, without calling it.

    Args:
        target: function or class.
        arguments: keyword arguments.
        key: configuration key that has the arguments, for messages.

    Raises:
        ConfigError: it does not take these arguments, or a class needs others.
    """
    takes = signature(target, key)
    bind = takes.bind if inspect.isclass(target) else takes.bind_partial
    try:
        bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}={dict(arguments)!r}: {getattr(target, '__name__', 'it')}{takes} cannot be given these "
            f"arguments ({error}); write the names and values that it takes"
        ) from error


def with_arguments(target: Any, arguments: Mapping[str, Any]) -> Any:
    """Create the object if ``target`` is a class, or fix arguments of the function."""
    return target(**arguments) if inspect.isclass(target) else functools.partial(target, **arguments)


# Objects of a file that this process has written itself, by the file's path.
_remembered: dict[str, dict[str, Any]] = {}


def remember(path: Path, objects: Mapping[str, Any]) -> None:
    """Let this process use objects that it has written to a file, without reading them."""
    _remembered[str(path)] = dict(objects)


def _pickled(place: str, name: str, key: str, spec: str) -> Any:
    path = expanded(place).resolve()
    if str(path) not in _remembered:
        import cloudpickle

        if not path.is_file():
            raise ConfigError(f"{key}={spec!r}: there is no file {path}; correct the path before the colon")
        with _told(f"{key}={spec!r}: reading {path} failed"):
            _remembered[str(path)] = cloudpickle.loads(path.read_bytes())
    objects = _remembered[str(path)]
    if name not in objects:
        raise ConfigError(f"{key}={spec!r}: {place} has no {name}; it has {', '.join(objects)}")
    return objects[name]


def _from_file(place: str, key: str, spec: str) -> ModuleType:
    path = expanded(place).resolve()
    if not path.is_file():
        raise ConfigError(f"{key}={spec!r}: there is no file {path}; correct the path before the colon")
    # One module per file, so that two names of a file share its state.
    name = f"_torchrl_grpo_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        with _told(f"{key}={spec!r}: running {path} failed"):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(place: str, key: str, spec: str) -> ModuleType:
    # A command line tool does not have the working directory in its search path, and python -m does.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    with _told(f"{key}={spec!r}: importing {place} failed"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"{key}={spec!r}: there is no module {error.name}; install it, or name a file with its path, "
                f"for example {key}={place.replace('.', '/')}.py:{spec.rpartition(':')[2]}"
            ) from error


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn any error of the user's code, a call of sys.exit too, into one message."""
    try:
        yield
    except (KeyboardInterrupt, ConfigError):
        raise
    except BaseException as error:
        raise ConfigError(f"{what}: {describe(error)}; correct the file, or install what it needs") from error


_of_thread = threading.local()


def _runner() -> asyncio.Runner:
    """Return the event loop of this thread: tasks and clients that outlive a call are there in the next."""
    if not hasattr(_of_thread, "runner"):
        _of_thread.runner = asyncio.Runner()
    runner: asyncio.Runner = _of_thread.runner
    return runner


# Folders of code that a user's code calls.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class UserCodeError(Exception):
    """The user's code raised. The message has its error and its line."""


def call(function: Any, *positional: Any, **named: Any) -> Any:
    """Call a function of the user, and wait for its result if it is a coroutine function.

    Raises:
        UserCodeError: it raised.
    """

    async def finish(result: Any) -> Any:
        return await result

    try:
        result = function(*positional, **named)
        return _runner().run(finish(result)) if inspect.isawaitable(result) else result
    except Exception as error:
        raise UserCodeError(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return type and message of an error, and the user's line that raised it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        # Python adds the place to the text of the error, but no frame.
        return f"{type(error).__name__}: {error.msg}, line {error.lineno} of {Path(error.filename).name}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    last = (own or frames)[-1:]
    line = "".join(f", line {frame.lineno} of {Path(frame.filename).name}" for frame in last)
    return f"{type(error).__name__}: {error}{line}"
