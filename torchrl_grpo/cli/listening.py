"""Whether a server could listen where it is told to. It would say so with a traceback, after a minute."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.files.socket_folder import LONGEST


def check_port(host: str, port: int) -> None:
    """Check that this process may listen at a port.

    Raises:
        ConfigError: it may not.
    """
    if not 0 < port < 2**16:
        raise ConfigError(f"--port={port}: it is no port; write a number from 1 to 65535")
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as probe:
            # A server that has just ended does not hold its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _refused(host, port, error) from error


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port={port}: another program listens there at {host}; end it, or write another --port"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port={port}: this user may not listen there; write a --port from 1024 on")
    return ConfigError(
        f"--host={host}: this machine cannot listen there ({error.strerror}); write an address that it has, "
        "such as 127.0.0.1"
    )


def check_socket(path: Path) -> None:
    """Check that this process may listen at a socket file, and remove one that a killed server has left.

    Raises:
        ConfigError: it may not.
    """
    if len(os.fsencode(path)) > LONGEST:
        raise ConfigError(
            f"--uds={path}: the path of a socket has at most {LONGEST} bytes, and this one has "
            f"{len(os.fsencode(path))}; write a shorter one"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--uds={path}: nothing can be created in {path.parent}; write the path of a socket in a folder "
            "that exists and is writable"
        )
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"--uds={path}: this file exists and is no socket; write another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"--uds={path}: {error.strerror}; write another path") from error
    raise ConfigError(f"--uds={path}: another program listens there; end it, or write another --uds")
