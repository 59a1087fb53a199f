"""One rank's end of a GPU transfer channel: it is opened, and what arrives is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.servers.channels.buffers import CudaMemory
from torchrl_grpo.inference.servers.channels.cuda_ipc import SharedReceiver
from torchrl_grpo.inference.servers.channels.nccl import SentReceiver
from torchrl_grpo.inference.servers.channels.types import Receiver
from torchrl_grpo.inference.servers.weight_files import Bucket


def open_receiver(opening: Mapping[str, Any], device: torch.device, rank: int) -> Receiver:
    """Open what the trainer has announced.

    Args:
        opening: an :class:`Opening` as JSON.
        device: where the rank's weights are.
        rank: number of the rank in its server.
    """
    if opening["kind"] == "cuda_ipc":
        return SharedReceiver(CudaMemory(device), opening["of_rank"][rank])
    assert opening["kind"] == "nccl", opening["kind"]
    return SentReceiver(device, rank, opening)


def receive(receiver: Receiver | None, bucket: Bucket) -> Tensor | None:
    """Return the content of a half, which must be what was announced; None if the pass was interrupted.

    Raises:
        RuntimeError: nothing was opened, or the half is another one.
    """
    assert bucket.slot is not None
    if receiver is None:
        raise RuntimeError("a half of weights was announced before its transfer channel was opened")
    content = receiver.receive(bucket.slot, bucket.size)
    if content is not None and checksum(content) != bucket.checksum:
        raise RuntimeError(
            f"half {bucket.slot} of the weights has {len(content)} bytes with another checksum than announced"
        )
    return content
