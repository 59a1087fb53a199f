"""A trial's process, which a Ray actor starts where its devices are free.

Ray queues the actors and chooses the devices. The process is an ordinary command, so a crash ends one trial
only. This module imports nothing that is slow to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchrl_grpo.checkpoints.run_dir import LOCK
from torchrl_grpo.runtime.supervised import die_with_parent


class TrialProcess:
    """A trial's process. Ray calls :meth:`run` and :meth:`stop` in two threads of an actor.

    Args:
        folder: folder of the sweep.
        name: name of the trial's folder in it.
        cores: number of CPU cores that the trial gets for itself; None leaves it those of this process.
    """

    def __init__(self, folder: str, name: str, cores: int | None) -> None:
        self._folder, self._name, self._cores = Path(folder), name, cores
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        # No signal may come between the question whether to begin and the beginning.
        self._beginning = threading.Lock()

    def placed(self) -> None:
        """Answer once Ray has given this actor its devices."""

    def run(self, command: Sequence[str], environment: Mapping[str, str], directory: str) -> int | None:
        """Run the command, and append what it prints to ``<name>.log`` in the folder of the sweep.

        Args:
            command: the command.
            environment: its environment, to which the GPUs that Ray has chosen are added.
            directory: its working directory.

        Returns:
            Its exit code, negative for a signal; None if it was stopped before it began.
        """
        own = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if os.environ.get(name)}
        with self._own_cores(), (self._folder / f"{self._name}.log").open("ab") as log:
            self._wait_until_left()
            with self._beginning:
                if self._is_stopped:
                    return None
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, **own},
                    cwd=directory,
                    # Only the sweep handles Ctrl-C.
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            return self._process.wait()

    def stop(self, number: int) -> None:
        """Send a signal to the process, or let it not begin."""
        with self._beginning:
            self._is_stopped = True
        if self._process is not None:
            self._process.send_signal(signal.Signals(number))

    @contextlib.contextmanager
    def _own_cores(self) -> Iterator[None]:
        """Restrict this thread, and so the process, to cores that no other trial on this machine has.

        Ray counts cores and does not choose them. The kernel releases locks however a process ends.
        """
        allowed = sorted(os.sched_getaffinity(0))
        with contextlib.ExitStack() as locks:
            free: list[int] = []
            for core in allowed if self._cores is not None else []:
                file = locks.enter_context((self._folder / f".core-{core}").open("w"))
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free.append(core)
                if len(free) == self._cores:
                    break
            if free:
                os.sched_setaffinity(0, free)
            yield
            os.sched_setaffinity(0, allowed)

    def _wait_until_left(self) -> None:
        """Wait until a process of a sweep that was killed has left the folder, which takes a moment."""
        path = self._folder / self._name / LOCK
        if path.is_file():
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
