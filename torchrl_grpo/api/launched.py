"""A trainer in Python that a launcher has started as several processes, each with the same script.

Rank 0 runs the program, as with the commands. The others serve it, and get what its methods return.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from torchrl_grpo.cli.endings import exit_codes
from torchrl_grpo.distributed import launch
from torchrl_grpo.errors import RanksApart
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.interrupts import ignore_terminations

if TYPE_CHECKING:
    from torchrl_grpo.distributed.ranks import Ranks

_T = TypeVar("_T")


@contextmanager
def told_once() -> Iterator[None]:
    """Under a launcher, print a mistake once and end the processes, as the commands do.

    Otherwise each rank would show the same traceback.

    Raises:
        UserError: in the block, without a launcher.
        SystemExit: under a launcher: there was a mistake or an interrupt.
    """
    if not rank_env.launched():
        yield
        return
    with exit_codes():
        yield


def warn() -> None:
    """Print, on rank 0, the warnings about the launcher's settings: the missing and the ignored ones."""
    for line in launch.warnings() if rank_env.rank() == 0 else ():
        sys.stderr.write(f"{line}\n")


def on_all_ranks(program: Callable[[], _T]) -> _T:
    """Run a program on rank 0 while the other ranks serve it.

    Args:
        program: program of rank 0. It ends what ``job.follow`` does on the others, as
            :meth:`~torchrl_grpo.training.session.Session.close` does. It must not return None, which
            means that rank 0 has ended.

    Returns:
        Its result, on every rank.
    """
    if rank_env.rank() > 0:
        _serve()
        result_of_rank_0: _T | None
        try:
            result_of_rank_0 = _ranks().recv()
        except RanksApart:
            # Rank 0 has ended, so this rank cannot meet it again.
            result_of_rank_0 = None
        if result_of_rank_0 is None:
            # recv() returns None if the connection to rank 0 breaks: it has ended, and has said why.
            raise SystemExit(0)
        return result_of_rank_0
    result = program()
    if rank_env.launched():
        _ranks().broadcast_object(result)
    return result


def _serve() -> None:
    """Repeat the calls of rank 0 until it releases this rank."""
    from torchrl_grpo.training import job

    # A launcher signals all ranks. Rank 0 handles the signal and then releases this rank.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_terminations()
    try:
        job.follow()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ranks() -> Ranks:
    """Return a new group of all ranks. Every rank must call this."""
    import torch

    from torchrl_grpo.distributed.ranks import Ranks

    return Ranks(on_cpu=not torch.cuda.is_available())
