"""Pieces of tensors, in which published weights reach an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_grpo.inference.layout import Shape


@dataclass(frozen=True)
class Piece:
    """Adjacent elements of a published tensor.

    Attributes:
        name: name of the tensor.
        shape: shape of the whole tensor.
        first: number of the first element. In a tensor of two dimensions or more, a row begins there.
        content: the elements, as a vector.
    """

    name: str
    shape: Shape
    first: int
    content: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements."""
        return self.content.numel() == math.prod(self.shape)


class Assembler:
    """Puts pieces together to whole tensors, for a loader that takes no pieces."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Tensor, int]] = {}

    def take(self, pieces: Iterable[Piece]) -> Iterable[tuple[str, Tensor]]:
        """Yield names and tensors that are complete with these pieces; they share no memory with them."""
        for piece in pieces:
            buffer, count = self._open.pop(piece.name, (None, 0))
            if buffer is None:
                content = piece.content
                buffer = torch.empty(math.prod(piece.shape), dtype=content.dtype, device=content.device)
            buffer[piece.first : piece.first + len(piece.content)] = piece.content
            count += len(piece.content)
            if count == len(buffer):
                yield piece.name, buffer.view(piece.shape)
            else:
                self._open[piece.name] = (buffer, count)
