"""Ray's workers as forks of a process that has imported what they import.

A worker imports for six seconds of a core. For nodes that begin after :func:`use_forks`, this file is Ray's
program that sets up a worker: it asks a server for a fork, which runs Ray's program of a worker, and ends
with it. The tests of ``test_async_ray.py`` start twenty, so this saves a minute of ``make test``.

Only tests of workers see what differs in :mod:`forked`, and that a worker is no child of its node's process.
"""

from __future__ import annotations

# Nothing that takes long to import: each worker begins with this.
import argparse
import functools
import json
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver, resource_tracker
from typing import Any

#: Environment variable of nodes: address of the server. A run that finds nothing in it begins a server.
VARIABLE = "TORCHRL_GRPO_FORKED_WORKERS"
#: Parameters of nodes. The two helpers that are left out import Ray for what no test needs.
NODE: dict[str, Any] = {"setup_worker_path": __file__, "include_log_monitor": False, "no_monitor": True}


def use_forks() -> None:
    """Have nodes of Ray that this process starts fork workers, if its environment has ``VARIABLE``."""
    if VARIABLE not in os.environ:
        return
    # Before Ray is imported, whose variables are other ones in forks.
    os.environ[VARIABLE] = os.environ[VARIABLE] or _begin_server()
    from ray._private.parameter import RayParams

    changed = functools.partialmethod(RayParams.__init__, **NODE)
    RayParams.__init__ = changed


def _begin_server() -> str:
    """Begin a server, which ends with this process, and return its address."""
    # In Linux's own namespace of sockets, which leaves no file. A variable cannot hold its first byte.
    address = f"@torchrl-grpo-workers-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.replace("@", "\0"))
    listener.listen()
    alive, held = os.pipe()
    if not os.fork():
        try:
            os.close(held)
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    return address


def _work(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be a worker, in a fork."""
    from forked import run_in_fork

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default="{}")
    parser.add_argument("--language")
    options, argv = parser.parse_known_args(words)
    variables = options.serialized_runtime_env_context.get("env_vars", {})
    # In a session of its own, because whoever ends a worker ends its group of processes.
    run_in_fork(argv, folder, environment | variables)


def _ask_for_fork() -> None:
    """Have the server fork a worker, and end as it does."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    # The worker itself starts no node.
    server._forkserver_address = os.environ.pop(VARIABLE).replace("@", "\0")
    # Neither is needed, and a fork wants both.
    server._forkserver_alive_fd = tracker._fd = os.open(os.devnull, os.O_RDWR)
    server.ensure_running = tracker.ensure_running = lambda: None
    arguments = sys.argv[1:], os.getcwd(), dict(os.environ)
    worker = multiprocessing.get_context("forkserver").Process(target=_work, args=arguments)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)


if __name__ == "__main__":
    _ask_for_fork()
