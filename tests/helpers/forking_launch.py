"""A launcher whose ranks are forks: ``forking_launch.py WORD ...`` is ``python -m WORD ...``, or a script.

Each rank that a launcher starts imports for six seconds of a core before it does what a test looks at. This
program is started by :mod:`forked`, and its ranks are forks as it is itself. It is the real launcher, which
decides what processes there are, with which variables, and ends them. Ten starts take two minutes less.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from multiprocessing import forkserver
from typing import Any

from forked import ForkedPopen
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler


def fork(handler: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> ForkedPopen:
    """Start a rank in place of ``subprocess.Popen``."""
    return ForkedPopen([word for word in words if word != "-u"], variables=environment)


if __name__ == "__main__":
    # The server that has forked this process forks the ranks, too.
    server: Any = forkserver
    server.ensure_running = server._forkserver.ensure_running = lambda: None
    SubprocessHandler._popen = fork  # type: ignore[assignment]
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        importlib.import_module(sys.argv[0]).main()
