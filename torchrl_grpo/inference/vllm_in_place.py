"""Copies published weights straight into the tensors of a running vLLM, piece by piece.

vLLM's own reload builds every layer in fresh memory and then copies it over the old one, so that each weight
is written twice. Once the layout is known (:mod:`~torchrl_grpo.inference.layout`), the rows of a published
tensor can be copied to the rows that hold them. Nothing but the piece itself is needed besides the model.

On a CPU, vLLM packs matrices. If a whole matrix arrived in one contiguous block of memory, it is packed from
there. If not, it is assembled in a buffer of the size of its layer, and packed when it is complete. A model
with other processed weights, such as quantized ones, is not loaded in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.checksums import whole
from torchrl_grpo.inference.layout import Layout, Place, Shape
from torchrl_grpo.inference.pieces import Piece


class _Target:
    """A tensor of vLLM that is written by rows, and a function to call when all of it has been written.

    Args:
        rows: function that returns the tensor, with memory to write into.
        size: number of published elements that are written into it.
        done: called in each update when all of them have been written.
    """

    def __init__(self, rows: Callable[[], Tensor], size: int, done: Callable[[], None] | None = None) -> None:
        self.rows, self.size, self.done = rows, size, done
        self.left = size
        # The buffer that packs the matrix. None if the engine does not pack it.
        self.staging: _Staging | None = None
        # Names of the published tensors that make up the rows of the matrix, in order. Empty if its rows are
        # not exactly those of whole tensors. It can then not be packed straight from where they arrived.
        self.tensors: list[str] = []


class InPlaceLoader:
    """Writes pieces into vLLM's tensors, at the places that a layout gives.

    Args:
        places: targets and places of each published tensor.
    """

    def __init__(self, places: Mapping[str, list[tuple[_Target, Place]]]) -> None:
        self._places = places
        self._targets = {id(target): target for listed in places.values() for target, _ in listed}

    @staticmethod
    def build(
        model: nn.Module, layout: Layout, packed: Mapping[str, Shape], dtype: torch.dtype
    ) -> InPlaceLoader | None:
        """Return a loader for ``model``, or None if vLLM processes weights in another way than packing.

        Args:
            model: model of one vLLM worker.
            layout: where its tensors hold the published ones.
            packed: shapes before packing, by key, of the tensors that vLLM's processing changes.
            dtype: data type of the model.
        """
        if any(vllm_compat.derives_weights(module) for module in model.modules()):
            return None
        readable = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        modules = dict(model.named_modules())
        places: dict[str, list[tuple[_Target, Place]]] = {}
        # Addresses of tensors that are written as a whole, and of those that packed copies are made from.
        written, sources = set(), set()
        for key, listed in layout.places.items():
            name = key.removesuffix(":plain")
            path, _, leaf = name.rpartition(".")
            module = modules.get(path)
            if module is None or any(place.transposed for place in listed):
                return None
            size = sum((place.part or whole(layout.shapes[place.name])).size for place in listed)
            if name in packed:
                if leaf != "weight" or "cpu_linear" not in vars(module) or len(packed[name]) != 2:
                    return None
                if not _keeps_weight(module):
                    staging = _Staging(module, packed[name], dtype, size)
                    target = _Target(staging.rows, size, staging.pack)
                    if staging.copies():
                        target.staging = staging
                        target.tensors = _whole_rows(listed, packed[name][0])
                elif key == name:
                    # The packed copy is made from the plain matrix. With tied weights, the plain matrix may
                    # belong to another layer.
                    sources.add(cast(Any, module).weight.data_ptr())
                    continue
                else:
                    written.add(cast(Any, module).weight.data_ptr())
                    target = _Target(_reader(module, leaf), size)
            else:
                tensor = readable.get(name)
                if tensor is None or not tensor.is_contiguous():
                    return None
                if (
                    size == tensor.numel()
                    or vllm_compat.is_embedding(module)
                    or vllm_compat.is_output_head(module)
                ):
                    written.add(tensor.data_ptr())
                target = _Target(_reader(module, leaf), size)
            for place in listed:
                places.setdefault(place.name, []).append((target, place))
        for listed_targets in places.values():
            for target, _ in listed_targets:
                # A tensor with another place must be written there too.
                if any(len(places[name]) > 1 for name in target.tensors):
                    target.tensors = []
        # A sleeping engine loses its weights, and only vLLM's own loader restores what nobody publishes. So
        # every parameter must be written as a whole.
        held = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel()}
        return InPlaceLoader(places) if sources | held <= written else None

    @property
    def names(self) -> set[str]:
        """Names of the published tensors that this rank holds, or a part of."""
        return set(self._places)

    def start(self) -> None:
        """Begin an update."""
        for target in self._targets.values():
            target.left = target.size

    def load(self, pieces: Iterable[Piece]) -> None:
        """Write pieces. What this rank does not hold is left out."""
        arrived, at = list(pieces), 0
        while at < len(arrived):
            if count := self._pack_contiguous(arrived[at:]):
                at += count
                continue
            piece = arrived[at]
            for target, place in self._places.get(piece.name, ()):
                written = _write(piece, target, place)
                target.left -= written
                if written and target.left == 0 and target.done is not None:
                    target.done()
            at += 1

    def _pack_contiguous(self, pieces: Sequence[Piece]) -> int:
        """Pack a matrix if the first pieces are all of it, contiguous in memory.

        Returns:
            The number of pieces that were packed, or 0.
        """
        held = self._places.get(pieces[0].name, ())
        if not held or not (tensors := held[0][0].tensors):
            return 0
        target, rows = held[0][0], pieces[: len(tensors)]
        if [piece.name for piece in rows] != tensors or not all(piece.is_whole for piece in rows):
            return 0
        stops = [piece.content.data_ptr() + piece.content.nbytes for piece in rows]
        starts = [piece.content.data_ptr() for piece in rows]
        assert target.staging is not None
        if stops[:-1] != starts[1:] or any(piece.content.dtype is not target.staging.dtype for piece in rows):
            return 0
        target.staging.pack_from(rows[0].content)
        target.left = 0
        return len(rows)

    def unfinished(self) -> list[str]:
        """Return names of published tensors that did not arrive as a whole since :meth:`start`."""
        return [name for name, listed in self._places.items() if any(target.left for target, _ in listed)]


class _Staging:
    """The buffer of a matrix until it is packed."""

    def __init__(self, module: Any, shape: Shape, dtype: torch.dtype, size: int) -> None:
        self._module, self._shape, self.dtype = module, shape, dtype
        # Rows that nobody publishes are zero.
        self._make = torch.empty if size == math.prod(shape) else torch.zeros
        self._buffer: Tensor | None = None

    def rows(self) -> Tensor:
        if self._buffer is None:
            self._buffer = self._make(self._shape, dtype=self.dtype)
        return self._buffer

    def pack(self) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._pack(buffer)

    def pack_from(self, first: Tensor) -> None:
        """Pack the matrix that begins with the first element of a tensor."""
        self._pack(first.as_strided(self._shape, (self._shape[1], 1)))
        assert not _keeps_weight(self._module), "this memory is written over, so no layer may keep it"

    def _pack(self, matrix: Tensor) -> None:
        self._module.weight = nn.Parameter(matrix, requires_grad=False)
        repack(self._module)

    def copies(self) -> bool:
        """Return whether the layer multiplies with a copy of what was packed.

        This overwrites the layer's weights; load them again afterwards.
        """
        matrix = torch.ones(self._shape, dtype=self.dtype)
        self._pack(matrix)
        matrix.zero_()
        row = torch.ones(1, self._shape[1], dtype=self.dtype)
        return bool(self._module.cpu_linear(row, self._module.weight, None).all())


def _whole_rows(places: Sequence[Place], count: int) -> list[str]:
    """Return the names of the published tensors that make up all ``count`` rows of a matrix, in order.

    The list is empty if anything else is among the rows.
    """
    rows: list[tuple[int, int, str]] = []
    for place in places:
        if place.part is not None or place.vector or not isinstance(place.where, slice):
            return []
        rows.append((place.where.start, place.where.stop, place.name))
    rows.sort()
    starts, stops = [start for start, _, _ in rows], [stop for _, stop, _ in rows]
    return [name for _, _, name in rows] if [*starts, count] == [0, *stops] else []


def repack_kept(model: nn.Module) -> None:
    """Pack the layers again that keep their plain matrix beside the packed copy: embeddings and output heads.

    If an embedding shares its matrix with a head, only the head is packed. The embedding's packed copy is
    freed, because an embedding only looks rows up.
    """
    kept = [
        cast(Any, module)
        for module in model.modules()
        if "cpu_linear" in vars(module) and _keeps_weight(module)
    ]
    heads = {id(module.weight) for module in kept if vllm_compat.is_output_head(module)}
    for module in kept:
        if vllm_compat.is_output_head(module) or id(module.weight) not in heads:
            repack(module)
        else:
            del module.cpu_linear


def repack(module: Any) -> None:
    """Pack a matrix again for a CPU, and free the old copy before."""
    del module.cpu_linear
    module.quant_method.process_weights_after_loading(module)


def _keeps_weight(module: Any) -> bool:
    """Return whether a layer keeps its matrix in addition to the packed copy, as an embedding does."""
    return bool(module.weight.numel())


def _reader(module: nn.Module, leaf: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor: Tensor = getattr(module, leaf)
        return tensor.detach()

    return read


def _write(piece: Piece, target: _Target, place: Place) -> int:
    """Copy what a piece and a place have in common, and return the number of elements."""
    part = place.part or whole(piece.shape)
    stop = piece.first + len(piece.content)
    if place.vector:
        low, high = max(piece.first, part.columns[0]), min(stop, part.columns[1])
        if low >= high:
            return 0
        source = piece.content[low - piece.first : high - piece.first]
        _copy(target.rows().view(-1), place.where, low - part.columns[0], source)
        return high - low
    columns = piece.shape[-1]
    begin, end = piece.first // columns, stop // columns
    low, high = max(begin, part.rows[0]), min(end, part.rows[1])
    if low >= high:
        return 0
    rows = piece.content.view(-1, columns)[low - begin : high - begin, part.columns[0] : part.columns[1]]
    held = target.rows()
    _copy(held.view(-1, held.shape[-1]), place.where, low - part.rows[0], rows)
    return rows.numel()


def _copy(held: Tensor, where: slice | Tensor, first: int, source: Tensor) -> None:
    if isinstance(where, slice):
        start = where.start + first
        held[start : start + len(source)].copy_(source)
    else:
        chosen = where[first : first + len(source)].to(held.device)
        held.index_copy_(0, chosen, source.to(held.device, held.dtype))
