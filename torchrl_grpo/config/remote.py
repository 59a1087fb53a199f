"""Environments and tools of other programs: ``openenv:WHERE`` and ``mcp:WHERE``, a URL or a command."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import urlsplit

from torchrl_grpo.config.keys import bad_value

OPENENV, MCP = "openenv:", "mcp:"
#: Stands in a command for the port that the run chooses.
PORT = "{port}"


def is_remote(name: str) -> bool:
    """Whether a name of ``env.environment`` or ``env.tools`` is that of another program."""
    return name.startswith((OPENENV, MCP))


def place(name: str) -> str:
    """Return the URL or the command of such a name."""
    return name.partition(":")[2].strip()


def is_url(where: str) -> bool:
    """Whether a place is a URL. Otherwise it is a command."""
    return where.startswith(("http://", "https://"))


def is_moved(before: Any, now: Any) -> bool:
    """Whether names differ only in the URLs of servers, which may be elsewhere when a run is resumed."""
    if isinstance(before, list) and isinstance(now, list):
        pairs = list(zip(before, now, strict=False))
        return len(before) == len(now) and all(old == new or is_moved(old, new) for old, new in pairs)
    names = [name for name in (before, now) if isinstance(name, str) and is_remote(name)]
    kinds = [name.partition(":")[0] for name in names if is_url(place(name))]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def command(where: str) -> list[str]:
    """Split a command into words, as a shell does. No shell runs it."""
    return shlex.split(where)


def check_remote(key: str, value: str | list[str], name: str, prefix: str) -> None:
    """Check such a name of a key.

    Raises:
        ConfigError: the name is one of the other key, or has neither a URL nor a command.
    """
    url = f"{prefix}http://127.0.0.1:8000{'/mcp' if prefix == MCP else ''}"
    program = f"{prefix}python my_server.py{' --port ' + PORT if prefix == OPENENV else ''}"
    fix = f"{key}=[{url!r}]" if isinstance(value, list) else f"{key}={url}"
    where = place(name)
    if not name.startswith(prefix):
        raise bad_value(key, value, f"this key takes {prefix}URL and {prefix}COMMAND", fix)
    if is_url(where):
        if not _has_host(where):
            raise bad_value(key, value, f"{where} names no server", fix)
        return
    fix = f"{fix}, or for a command {program!r}"
    try:
        words = command(where)
    except ValueError as error:
        raise bad_value(key, value, f"the command cannot be split into words ({error})", fix) from error
    if not words or "://" in words[0]:
        raise bad_value(key, value, f"{prefix} is followed by neither http://, https:// nor a command", fix)
    if prefix == OPENENV and PORT not in where:
        wrong = f"the command does not say where its port goes, which the run puts in place of {PORT}"
        raise bad_value(key, value, wrong, f"{key}={program!r}, for example")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
