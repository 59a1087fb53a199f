"""The receiving end of every GPU transfer channel: a rank of a server, or a worker on Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from torchrl_grpo.inference.layout import Shape
from torchrl_grpo.inference.pieces import Piece
from torchrl_grpo.inference.servers.channels.cuda_ipc import OpenedHalves
from torchrl_grpo.inference.servers.channels.group import ProcessGroupEnded, WeightGroup
from torchrl_grpo.inference.servers.channels.nccl import receive_weights
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.weight_files import Bucket


class Receiver:
    """One process's end of a channel, which the first :class:`Opening` opens.

    Args:
        device: where the process's weights are.
        rank: number of the process in its server.
    """

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._device, self._rank = device, rank
        self._halves: OpenedHalves | None = None
        self._group: WeightGroup | None = None

    def receive(
        self, item: Bucket | Opening, shapes: Mapping[str, Shape], dtype: torch.dtype
    ) -> Iterator[Iterable[Piece]]:
        """Yield what comes with a bucket or an opening. The memory is used again when the next is asked for.

        Args:
            item: a bucket in GPU memory, or what to open. With ``nccl``, opening brings all weights.
            shapes: shapes of all weights by name, in the order in which they are sent.
            dtype: their dtype.

        Raises:
            ProcessGroupEnded: another process or the trainer was not there, or has left.
            RuntimeError: the content is not what was sent or announced.
        """
        if isinstance(item, Bucket):
            if self._halves is None:
                raise RuntimeError("a half of weights was announced before its transfer channel was opened")
            yield self._halves.read(item)
            self._halves.wait_until_unused()
        elif item.brings_all:
            yield from self._from_group(item, shapes, dtype)
        else:
            self.close()
            self._halves = OpenedHalves(item.content, self._device, self._rank)

    def _from_group(
        self, opening: Opening, shapes: Mapping[str, Shape], dtype: torch.dtype
    ) -> Iterator[Iterable[Piece]]:
        content = opening.content
        try:
            if "first" in content:
                self.close()
                self._group = WeightGroup(content, content["first"] + self._rank, self._device)
            assert self._group is not None, "the trainer keeps a group that all have joined"
            yield from receive_weights(self._group, shapes, dtype, self._device, content["room"])
        except ProcessGroupEnded:
            self.close()
            raise

    def close(self) -> None:
        """Leave the channel. What is being received ends."""
        group, self._group, self._halves = self._group, None, None
        if group is not None:
            group.leave()
