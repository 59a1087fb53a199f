"""A trial of a GPU transfer channel: before the first weights, a few numbers go the way that weights will go.

Whether GPUs read each other's memory, and whether NCCL connects them, shows only when it is tried. Nothing is
lost then: no worker has begun to load, and weights can still go through the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import torch

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.servers.carriers import StreamCarrier
from torchrl_grpo.inference.servers.channels.receiver import Receiver
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_stream import StreamReader, TransferEnded, TransferPostponed
from torchrl_grpo.runtime import screen

_KEY = "inference_model.weight_transfer"
_SHAPE = (2**16,)


def take(receiver: Receiver, item: Bucket | Opening) -> None:
    """Receive an item of a trial, whose checksum is checked.

    Raises:
        RuntimeError: it is not what was sent, or cannot be received.
    """
    for _ in receiver.receive(item, {"trial": _SHAPE}, torch.uint8):
        pass


def trial_error(
    carrier: StreamCarrier,
    takes: Mapping[Any, Callable[[Bucket | Opening], None]],
    device: torch.device,
) -> Exception | None:
    """Send numbers to all servers or workers, and return what went wrong; None if nothing did.

    Of several errors, the one of a server that hangs is returned, because no other way may be taken then.

    Args:
        carrier: the trainer's end, which has admitted all of them. After an error it must not be used.
        takes: for each of them, a function that has it :func:`take` an item, and fails after a while.
        device: where the trainer's weights are.
    """
    stream = carrier.put([("trial", torch.arange(_SHAPE[0], device=device).to(torch.uint8))])
    readers = {server: stream.reader_for(server) for server in takes}

    def hand_over(server: Hashable, reader: StreamReader) -> None:
        try:
            with closing(reader.buckets()) as items:
                for item in items:
                    if item is not None:
                        takes[server](item)
            reader.mark_received()
        except Exception:
            # The others must not wait for it.
            carrier.dismiss(server)
            raise
        finally:
            reader.mark_done()

    with ThreadPoolExecutor(len(takes) + 1) as threads:
        trials = [threads.submit(hand_over, *entry) for entry in readers.items()]
        errors: list[Exception] = []
        try:
            stream.send_until(threads.submit(wait, trials))
        except Exception as error:  # noqa: BLE001  it is returned
            errors.append(error)
    errors += [failed for trial in trials if isinstance(failed := trial.exception(), Exception)]
    # Those that were interrupted do not say why.
    interrupted = TransferPostponed | TransferEnded
    return min(errors, key=lambda e: (not _hangs(e), isinstance(e, interrupted)), default=None)


def _hangs(error: Exception) -> bool:
    """Return whether a server or a worker did not answer in time; errors of a connection have it as cause."""
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


def fall_back(error: Exception, way: str, otherwise: str, *, automatic: bool) -> None:
    """Say that weights go through the memory of the host, because of an error of a trial.

    Args:
        error: the error.
        way: value of ``inference_model.weight_transfer`` that was tried.
        otherwise: value with which weights go through the memory of the host.
        automatic: whether nobody asked for ``way``.

    Raises:
        ConfigError: somebody did, or a worker still hangs in the trial.
    """
    automatic = automatic and not _hangs(error)
    if not isinstance(error, ConfigError):
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        wrong = f"{_KEY}={way}: a trial before the first weights failed ({reason}); write {_KEY}={otherwise}"
        error = ConfigError(wrong)
    if not automatic:
        raise error
    screen.say(f"warning: weights go by {otherwise.replace('_', ' ')}, through the host's memory. {error}")
