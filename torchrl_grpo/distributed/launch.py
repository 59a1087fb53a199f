"""Starts several training ranks if the run needs them and no launcher started the process.

Each rank runs the same command line. It reads its number from :mod:`~torchrl_grpo.runtime.rank_env`.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import num_devices
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.planning import launcher
from torchrl_grpo.planning.cores import allowed_cores
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.interrupts import STOP_SIGNAL, Terminated, raise_terminations, stop_signal_forwarded
from torchrl_grpo.runtime.invocation import parent_argv
from torchrl_grpo.runtime.paths import expanded

# Exit code of an interrupted process.
INTERRUPTED_CODE = 130
# Exit code of a process that SIGTERM has ended.
TERMINATED_CODE = 128 + signal.SIGTERM
# Exit code of the launcher if a signal ended a rank.
_ENDED_BY_SIGNAL = 1
# What usually sends a signal that a rank cannot report itself.
_CAUSES = {
    "SIGKILL": ", as the system does if memory runs out; lower train.max_tokens_per_microbatch and resume",
    "SIGSEGV": ", a crash of a library; the log of the run may say more",
}
# Time limit for an interrupted rank 0 to finish the current work and to shut down. A step of a large model,
# or a round of long responses, takes minutes.
_SHUTDOWN_TIMEOUT_S = 600


def ranks_wanted(configs: Sequence[Config]) -> int:
    """Return the number of training ranks that the jobs of a command need.

    Under a launcher this is the launcher's number.

    Raises:
        ConfigError: the jobs need different numbers of ranks.
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


def warnings() -> list[str]:
    """Return what to say about the launcher: processes that are missing, and settings that are not used."""
    missing = missing_ranks_warning()
    return [*([] if missing is None else [missing]), *launcher.notes()]


def missing_ranks_warning() -> str | None:
    """Return a warning if a launcher should have started several ranks but started only this process.

    This detects ``accelerate launch --num_processes N`` on a machine without a GPU, which silently starts one
    process. N is read from the command line of the parent process or from the file that it names, because
    accelerate does not export it.

    Returns:
        The warning; None if there is nothing to warn about.
    """
    if rank_env.launched() or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    requested = _requested_processes(parent_argv())
    if requested < 2:
        return None
    return (
        f"warning: accelerate launch was asked for {requested} processes and has started one, as it does "
        "without a GPU; write --multi_gpu or --config_file config/accelerate/multi_gpu.yaml for the "
        f"launcher, or start grpo.py without it and with train_model.num_devices={requested}"
    )


def _requested_processes(argv: Sequence[str]) -> int:
    """Return ``--num_processes`` of a launcher's arguments, else of its file; 1 if both lack it."""
    options: dict[str, str] = {}
    for argument, following in itertools.pairwise([*argv, ""]):
        name, _, value = argument.partition("=")
        if name.startswith("--"):
            options.setdefault(name[2:].replace("-", "_"), value or following)
    if "num_processes" in options:
        return int(options["num_processes"]) if options["num_processes"].isdecimal() else 1
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "accelerate/default_config.yaml"
    file = expanded(options.get("config_file", cache))
    try:
        settings = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return 1
    count = settings.get("num_processes") if isinstance(settings, dict) else None
    return count if isinstance(count, int) else 1


@raise_terminations()
def launch(argv: Sequence[str], count: int) -> int:
    """Run this script's command line in ``count`` ranks on this machine.

    Args:
        argv: command line without the script's name.
        count: number of ranks.

    Returns:
        The exit code of the first rank that failed, or 0 if none failed. After an interrupt, the exit code of
        rank 0 if it failed.

    Raises:
        KeyboardInterrupt: the run was interrupted or terminated, and rank 0 had not begun its work, shut down
            without an error, or timed out.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    # Each rank prints its own error. The library would add where its process ran and which binary it was.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rank_env.free_port()),
        rank_env.OWN_LAUNCHER: "1",
        # Ranks that compute on the CPU share its cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, allowed_cores() // count))),
    }
    # The library kills all ranks on an interrupt, but rank 0 must still finish its work and print messages.
    with _defer_signals() as interrupts:
        ranks = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args={number: (sys.argv[0], *argv) for number in range(count)},
            envs={
                number: {**common, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)
            },
            logs_specs=DefaultLogsSpecs(),
        )
    assert isinstance(ranks, SubprocessContext), "start_processes() runs a script"
    main = ranks.subprocess_handlers[0].proc
    if interrupts:
        # No rank has begun its work, so none needs time to finish it.
        ranks.close(signal.SIGKILL)
        raise Terminated if interrupts[0] == signal.SIGTERM else KeyboardInterrupt
    try:
        with stop_signal_forwarded(lambda: main.send_signal(STOP_SIGNAL)):
            result = ranks.wait()
    except KeyboardInterrupt as interrupt:
        # Forward the interrupt to rank 0. A second one ends all ranks at once.
        number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        main.send_signal(number)
        # Wait for rank 0 only: a rank that it has released may fail on exit, and this must not end rank 0.
        with suppress(subprocess.TimeoutExpired):
            main.wait(timeout=_SHUTDOWN_TIMEOUT_S)
        if main.returncode in (None, 0, INTERRUPTED_CODE, TERMINATED_CODE, -number):
            raise
        return _exit_code(main.returncode)
    finally:
        # Ranks that wait for rank 0 ignore other signals.
        ranks.close(signal.SIGKILL)
    assert result is not None
    if not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        sys.stderr.write(
            f"error: training rank {first.local_rank} was ended by {name}{_CAUSES.get(name, '')}\n"
        )
    return _exit_code(first.exitcode)


@contextmanager
def _defer_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of acting on them, and restore their handlers at the end.

    An interrupt during the start would leave behind the ranks that already run. An ignored signal stays
    ignored; nohup, for example, ignores signals.

    Yields:
        A list that gets an entry for each signal that arrives.
    """
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Keep the library from replacing this handler with its own.
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    chosen = os.environ.get(variable)
    os.environ[variable] = "SIGHUP,SIGQUIT"
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: arrived.append(received))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if chosen is None:
            del os.environ[variable]
        else:
            os.environ[variable] = chosen


def _exit_code(returncode: int) -> int:
    return returncode if returncode > 0 else _ENDED_BY_SIGNAL
