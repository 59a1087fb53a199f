"""The weights of one publication, as a transport reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor


class SentWeights:
    """The weights of one publication, which a transport may read several times.

    Args:
        read: function that yields names and weights in the engine's dtype, and adds checksums to a list.

    Attributes:
        sums: names and checksums of what the last reader has read.
    """

    def __init__(self, read: Callable[[list[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]) -> None:
        self._read = read
        self.sums: list[tuple[str, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and weights as they are now."""
        self.sums = []
        yield from self._read(self.sums)
