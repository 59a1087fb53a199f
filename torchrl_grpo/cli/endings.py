"""How a command, or a trainer that a launcher has started, ends: exit codes, and mistakes told once."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torchrl_grpo.distributed.launch import INTERRUPTED_CODE, TERMINATED_CODE
from torchrl_grpo.errors import UserError
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.files.closed_output import quiet_end
from torchrl_grpo.runtime.interrupts import StopRequested, Terminated, raise_terminations
from torchrl_grpo.runtime.printable import printable

USER_ERROR_CODE = 2
# A run that was asked to stop has saved itself and can go on. EX_TEMPFAIL of sysexits.h says "try again".
STOPPED_CODE = os.EX_TEMPFAIL
# Time for rank 0 to report a mistake that all ranks have, in seconds.
_PATIENCE_S = 10.0


@contextmanager
def exit_codes(is_shared: Callable[[UserError], bool] = lambda error: True) -> Iterator[None]:
    """Turn what ends the block into an exit code, and a mistake into one line on stderr.

    Args:
        is_shared: whether rank 0 is expected to report the same error.

    Raises:
        SystemExit: with code 2 for a user error, 130 for an interrupt, 143 for SIGTERM, 75 if the run was
            asked to stop.
    """
    try:
        with raise_terminations():
            yield
    except UserError as error:
        if rank_env.rank() > 0 and is_shared(error):
            _end_after_rank_0(error)
        report(error)
        raise SystemExit(USER_ERROR_CODE) from None
    except Terminated:
        sys.stderr.write("terminated\n")
        raise SystemExit(TERMINATED_CODE) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED_CODE) from None
    except StopRequested:
        raise SystemExit(STOPPED_CODE) from None


def run_tool(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> None:
    """Run a command that is not training.

    Args:
        parser: parser of its arguments.
        run: what the command does with them.
        argv: arguments; those of this process if None.

    Raises:
        SystemExit: as in :func:`exit_codes`, with code 141 if nobody reads the output, and as ``run`` says.
    """
    with quiet_end(), exit_codes():
        run(parser.parse_intermixed_args(argv))


def report(error: UserError, where: str = "") -> None:
    """Write a mistake to stderr, after what stdout has. It may quote files of other users."""
    sys.stdout.flush()
    sys.stderr.write(f"error: {where}{printable(str(error))}\n")
    sys.stderr.flush()


def _end_after_rank_0(error: UserError) -> NoReturn:
    """End a rank other than rank 0 that has found a mistake, which rank 0 has most often found too.

    Rank 0 reports it, and the launcher then ends this rank. A launcher that sees this rank fail first would
    end rank 0. A mistake of this rank alone, such as a folder that its machine lacks, is reported here:
    otherwise rank 0 would wait for this rank for ever.

    Raises:
        SystemExit: rank 0 has not ended.
    """
    try:
        threading.Event().wait(_PATIENCE_S)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_CODE) from None
    report(error, f"rank {rank_env.rank()}: ")
    raise SystemExit(USER_ERROR_CODE) from None
