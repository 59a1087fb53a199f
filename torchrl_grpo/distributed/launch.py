"""Starts the training ranks of a run that asks for several and was started without a launcher.

Each rank runs the same command line; :mod:`~torchrl_grpo.runtime.rank_env` tells it which one it is.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import num_devices
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning.cores import allowed_cores
from torchrl_grpo.runtime import rank_env

# What a process ends with that was interrupted.
INTERRUPTED_CODE = 130
# What the launcher's process ends with when a rank was ended by a signal.
_ENDED_BY_SIGNAL = 1
# What an interrupted rank 0 has to finish what the ranks are in and to end in good order: minutes, for a step
# of a large model or a round of long responses.
_FAREWELL_S = 600


def ranks_wanted(configs: Sequence[Config]) -> int:
    """Training ranks that the jobs of a command ask for.

    Raises:
        ConfigError: they differ from job to job.
    """
    counts = sorted({num_devices(cfg.train_model) for cfg in configs})
    if rank_env.launched():
        return rank_env.world_size()
    if len(counts) > 1:
        raise bad_value(
            "train_model.num_devices",
            counts,
            "all jobs of a sweep run in the same training ranks",
            f"train_model.num_devices={counts[0]}, and a sweep of its own for {counts[1]}",
        )
    return counts[0]


def left_alone() -> str | None:
    """What to tell somebody whose launcher was asked for several ranks and has started this process alone.

    Without a GPU, and without a word about how, ``accelerate launch --num_processes 2`` does so. It does not
    say what it was asked for; its command line does.

    Returns:
        A line, or None.
    """
    if rank_env.launched() or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    asked = _processes_asked_for(_words_of_parent())
    if asked < 2:
        return None
    return (
        f"warning: accelerate launch was asked for {asked} processes and has started one, as it does without "
        "a GPU; write --multi_gpu or --config_file config/accelerate/multi_gpu.yaml for the launcher, or "
        f"start the script without it and with train_model.num_devices={asked}"
    )


def _words_of_parent() -> list[str]:
    """The command line of the process that started this one; nothing where the system does not show it."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    except OSError:
        return []
    return text.split("\0")


def _processes_asked_for(words: Sequence[str]) -> int:
    """The number behind ``--num_processes`` in a launcher's words, 1 without one."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name.replace("-", "_") == "__num_processes" and (value or following).isdecimal():
            return int(value or following)
    return 1


def launch(words: Sequence[str], count: int) -> int:
    """Run this script's command line in ``count`` ranks on this machine.

    Args:
        words: the command line without the script's name.
        count: of ranks.

    Returns:
        The exit code: that of the first rank that failed, 0 when none did; after an interrupt rank 0's.

    Raises:
        KeyboardInterrupt: it was interrupted, and rank 0 ended in good order or not in time.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # Ranks that compute on the CPU share its cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, allowed_cores() // count))),
    }
    # The library answers an interrupt by killing all ranks; rank 0 still has something to say and to finish.
    with _held_back(signal.SIGINT) as interrupts:
        ranks = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args={number: (sys.argv[0], *words) for number in range(count)},
            envs={
                number: {**common, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)
            },
            logs_specs=DefaultLogsSpecs(),
        )
    try:
        if interrupts:
            raise KeyboardInterrupt
        result = ranks.wait()
    except KeyboardInterrupt:
        assert isinstance(ranks, SubprocessContext), "of a script, not of a function"
        main = ranks.subprocess_handlers[0].proc
        # Another interrupt ends all of them at once.
        main.send_signal(signal.SIGINT)
        # For rank 0 alone: one that it has let go may fail while it leaves, which must not cut rank 0 short.
        with suppress(subprocess.TimeoutExpired):
            main.wait(timeout=_FAREWELL_S)
        if main.returncode in (None, 0, INTERRUPTED_CODE, -signal.SIGINT):
            raise
        return _shown(main.returncode)
    finally:
        ranks.close()
    assert result is not None
    if not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    return _shown(first.exitcode)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[list[int]]:
    """Collect a signal instead of acting on it, and restore its handler at the end.

    An interrupt while ranks are being started would leave those that run already behind. A signal that is
    ignored, as under nohup, stays ignored.

    Args:
        number: the signal.

    Yields:
        A list that gets an entry for each signal that arrives.
    """
    arrived: list[int] = []
    before = signal.getsignal(number)
    # The library must not put its own handler in the place of this one.
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    chosen = os.environ.get(variable)
    os.environ[variable] = "SIGTERM,SIGHUP,SIGQUIT"
    if before != signal.SIG_IGN:
        signal.signal(number, lambda received, frame: arrived.append(received))
    try:
        yield arrived
    finally:
        signal.signal(number, before)
        if chosen is None:
            del os.environ[variable]
        else:
            os.environ[variable] = chosen


def _shown(code: int) -> int:
    return code if code > 0 else _ENDED_BY_SIGNAL


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
