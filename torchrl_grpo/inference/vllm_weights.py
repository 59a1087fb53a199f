"""Loads weights into a running vLLM and reads back the weights that it multiplies with.

vLLM fuses and packs the weights that it loads. A parameter that stays readable is read from the memory that
the kernels use. A matrix may be quantized, or packed for a CPU and then freed. Its checksum is taken from the
source tensor right before or after packing, and is stored together with the function that multiplies with the
packed copy. Some columns of the packed matrix are multiplied out and compared. This comparison is exact: each
product is one times a number, plus zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.checksums import Checksums, Part, collect_parts, ordered_row_sums, row_sums
from torchrl_grpo.inference.layout import (
    Layout,
    Seen,
    Shape,
    fingerprint,
    in_format,
    locate_weights,
    readable,
)
from torchrl_grpo.inference.pieces import Assembler, Piece
from torchrl_grpo.inference.vllm_in_place import InPlaceLoader, repack_kept

# Number of columns of a packed matrix that are multiplied out when the layout is learned. A publication
# checks one column of about one in ``_ONE_IN`` packed matrices, chosen at random.
_LEARNED_COLUMNS, _ONE_IN = 8, 16
# Number of publications compared with the weights that vLLM read from disk; the start test publishes twice.
_COMPARED = 2


@dataclass
class _Packed:
    """Record of the last packing of a layer.

    Attributes:
        sums: name of a published tensor, its part that is there (None for all of it) and its checksum.
        multiply: function that multiplies with the packed copy, if the layer has one.
        sound: whether the packed copy reproduced the columns that were checked.
    """

    sums: list[tuple[str, Part | None, Tensor]]
    multiply: Any
    sound: bool


class VLLMWeights:
    """Access to the weights of one vLLM worker.

    Args:
        worker: vLLM worker, which holds the whole model or, with several ranks, a part of it.
        dtype: data type of the model.
    """

    def __init__(self, worker: Any, dtype: torch.dtype) -> None:
        self._worker = worker
        self.dtype = dtype
        parallel = worker.vllm_config.parallel_config
        # Number of processes that hold the model together, and of those that share each layer.
        self.ranks: int = parallel.world_size
        self._shards: int = parallel.tensor_parallel_size
        self.layout: Layout | None = None
        # Engine tensors before vLLM processed them; set while the layout is learned.
        self._seen: dict[str, Seen] | None = None
        # What the layout was learned from, until weights are published.
        self._learned: dict[str, Seen] = {}
        self._packed: dict[str, _Packed] = {}
        self._packed_keys: set[str] = set()
        # Shapes, before vLLM's processing, of the tensors that it processes.
        self._shapes_before: dict[str, Shape] = {}
        self._in_place: InPlaceLoader | None = None
        self._assembler = Assembler()
        # Whether the update that is under way is done by vLLM's own loader.
        self._by_loader = True
        # Row sums of the weights that vLLM itself read from disk, and the number of publications that are
        # still to be compared with them.
        self._first: dict[str, Tensor] = {}
        self._comparisons_left = 0
        # vLLM's quantization methods whose weight processing is wrapped.
        self._methods: list[Any] = []
        self._generator = torch.Generator().manual_seed(0)
        self._watch()

    @property
    def model(self) -> nn.Module:
        """Model that computes the responses."""
        model: nn.Module = self._worker.model_runner.get_model()
        return model

    def start(self) -> None:
        """Begin an update: :meth:`load` may then be called several times."""
        self._by_loader = True
        with self._inside():
            vllm_compat.start_reload(self.model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights with vLLM's own loader, under the names of the Hugging Face model."""
        with self._inside():
            self.model.load_weights((name, tensor.to(self.dtype)) for name, tensor in weights)  # type: ignore[operator]

    def finish(self) -> None:
        """End an update: process the loaded weights, and clear caches that older weights filled."""
        runner = self._worker.model_runner
        with self._inside():
            vllm_compat.finish_reload(self.model, runner.model_config)
            runner.reset_encoder_cache()
            runner.reset_mm_cache()
        self._repack_tied_heads()

    def load_whole(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights with vLLM's own loader."""
        self.start()
        self.load(weights)
        self.finish()

    def start_pieces(self, by_loader: bool = False) -> None:
        """Begin an update: :meth:`load_pieces` may then be called several times.

        Args:
            by_loader: whether vLLM's own loader must be used. It is used anyway if vLLM processes weights
                in a way that it alone knows.
        """
        self._by_loader = by_loader or self._in_place is None
        self._assembler = Assembler()
        if self._by_loader:
            self.start()
        else:
            assert self._in_place is not None
            self._in_place.start()

    def load_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors, one at a time, in an update that :meth:`start_pieces` has begun."""
        if self._by_loader:
            self.load(weights)
            return
        for name, tensor in weights:
            self.load_pieces([Piece(name, tuple(tensor.shape), 0, tensor.detach().reshape(-1))])

    def load_pieces(self, pieces: Iterable[Piece]) -> None:
        """Load pieces of weights. The caller may overwrite their memory once this returns."""
        if self._by_loader:
            self.load(self._assembler.take(pieces))
        else:
            assert self._in_place is not None
            with self._inside():
                self._in_place.load(pieces)

    def finish_pieces(self) -> None:
        """End an update that :meth:`start_pieces` has begun."""
        if self._by_loader:
            self.finish()
            return
        runner = self._worker.model_runner
        with self._inside():
            repack_kept(self.model)
            vllm_compat.renew_attention(self.model, runner.model_config.dtype)
            runner.reset_encoder_cache()
            runner.reset_mm_cache()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with torch.no_grad(), vllm_compat.in_config(self._worker.vllm_config):
            yield

    def _repack_tied_heads(self) -> None:
        """Repack output heads that are tied to the embedding.

        On a CPU, vLLM multiplies with a packed copy of each matrix. It renews this copy for every layer that
        it reloads. It does not reload a head that shares its matrix with the embedding, so the head would
        keep the old copy.
        """
        modules: list[Any] = list(self.model.modules())
        tables = {id(module.weight) for module in modules if vllm_compat.is_embedding(module)}
        for module in modules:
            packed = vllm_compat.is_output_head(module) and "cpu_linear" in vars(module)
            # An untied head was reloaded and packed like every other layer.
            if packed and id(module.weight) in tables:
                module.quant_method.process_weights_after_loading(module)

    def release(self) -> None:
        """Release the model, so that no global state of vLLM keeps it alive."""
        vllm_compat.forget_reload(self.model)
        for method in self._methods:
            del method.process_weights_after_loading
        self._methods.clear()
        self._packed.clear()
        self._in_place = None

    def locate_weights(
        self,
        shapes: Mapping[str, Shape],
        update: Callable[[Iterable[tuple[str, Tensor]]], None],
        with_room: AbstractContextManager[None],
    ) -> None:
        """Learn which tensor of vLLM holds each published tensor.

        This overwrites the weights, so load weights afterwards.

        Args:
            shapes: shapes of the published tensors by name.
            update: function that replaces all weights.
            with_room: context to replace them in. It may discard the weights at its start.

        Raises:
            ModelError: vLLM does not load a tensor, or loads only a part of it. With several ranks, the
                caller compares what they hold.
        """
        # vLLM's own loader shows where the tensors lie.
        self._in_place = None
        self._first = dict(self._sums_of_rows())
        self._comparisons_left = _COMPARED
        with with_room:
            self._locate(shapes, update)

    def _locate(
        self, shapes: Mapping[str, Shape], update: Callable[[Iterable[tuple[str, Tensor]]], None]
    ) -> None:
        device = self._worker.device
        seen = self._with_fingerprints(shapes, update)
        for path, module in self.model.named_modules():
            if "cpu_linear" in vars(module) and f"{path}.weight" not in seen:
                raise _loading_error(f"nothing of {path}, whose packed copy no update renews")
        self._learned = seen
        self.layout = locate_weights(shapes, self.dtype, seen, device, self._shards)
        packed = {key: self._shapes_before[key] for key in self._packed_keys}
        if self.ranks > 1 or not self.layout.unreadable(shapes):
            with self._inside():
                self._in_place = InPlaceLoader.build(self.model, self.layout, packed, self.dtype)
        if self.ranks > 1:
            return
        if self.layout.torn:
            raise _loading_error(f"only a part of {self.layout.torn[0]}")
        for name in self.layout.unreadable(shapes):
            if self.ignores(name, update):
                raise _loading_error(f"nothing of {name}")

    def ignores(self, name: str, update: Callable[[Iterable[tuple[str, Tensor]]], None]) -> bool:
        """Return whether vLLM ignores a published tensor that was not found in it.

        vLLM ignores a tensor if another fingerprint of it changes nothing that vLLM holds. Otherwise vLLM
        holds it in a transformed form. This overwrites the weights, so load weights afterwards.
        """
        assert self.layout is not None
        return _equal(self._with_fingerprints(self.layout.shapes, update, other=name), self._learned)

    def held(self) -> Checksums:
        """Return which published tensors, and which parts of them, are here, with zeros for checksums."""
        assert self.layout is not None
        zero = torch.tensor(0)
        places = [place for listed in self.layout.places.values() for place in listed]
        return collect_parts([(place.name, place.part, zero) for place in places], self.dtype)

    def _with_fingerprints(
        self,
        shapes: Mapping[str, Shape],
        update: Callable[[Iterable[tuple[str, Tensor]]], None],
        other: str | None = None,
    ) -> dict[str, Seen]:
        """Load fingerprints and record vLLM's tensors.

        Args:
            shapes: shapes of the published tensors by name.
            update: function that replaces all weights.
            other: name of a tensor that gets its second fingerprint; None for no tensor.
        """
        device = self._worker.device
        self._seen, self._packed, self._packed_keys = {}, {}, set()
        update(
            (name, fingerprint(name, shape, self.dtype, device, name == other))
            for name, shape in shapes.items()
        )
        seen, self._seen = self._seen, None
        self._packed_keys = {key for key, record in seen.items() if not self._stays(key, record)}
        for key, tensor in readable(self.model):
            if key in self._packed_keys:
                # An embedding, for example, has a plain copy for look-ups besides the packed one.
                key = f"{key}:plain"
            seen[key] = Seen.of(in_format(tensor, self.dtype))
        return seen

    def checksums(self) -> Checksums:
        """Compute the checksums of all weights that the model computes with."""
        assert self.layout is not None
        self._learned = {}
        self._compare_with_the_first()
        sums: list[tuple[str, Part | None, Tensor]] = []
        for key, tensor in readable(self.model):
            sums += self.layout.read_parts(f"{key}:plain" if key in self._packed_keys else key, tensor)
        modules = dict(self.model.named_modules())
        wrong = torch.tensor(-1, device=self._worker.device)
        for key, packed in self._packed.items():
            module = modules[key.rpartition(".")[0]]
            sound = packed.sound and vars(module).get("cpu_linear") is packed.multiply
            sums += [(name, part, value if sound else wrong) for name, part, value in packed.sums]
        return collect_parts(sums, self.dtype)

    def _compare_with_the_first(self) -> None:
        """Check that a publication puts each row in the same place as vLLM's own loading from disk.

        Checksums cannot detect a row that is misplaced in the same way in fingerprints and in weights.

        Raises:
            ModelError: the rows of a tensor are in another order.
        """
        if self._comparisons_left == 0:
            self._first.clear()
            return
        self._comparisons_left -= 1
        for key, now in self._sums_of_rows():
            if key not in self._first:
                continue
            was = self._first[key]
            if torch.equal(was.sort().values, now.sort().values) and not torch.equal(was, now):
                raise _loading_error(f"rows of {key} in another order than from disk")

    def _sums_of_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield keys and row sums of all matrices. A packed matrix is represented by some of its columns."""
        for key, tensor in readable(self.model):
            if tensor.dim() > 1:
                yield key, row_sums(tensor)
        for path, module in self.model.named_modules():
            if "cpu_linear" in vars(module):
                width = _width(module)
                columns = torch.linspace(0, width - 1, _LEARNED_COLUMNS).long()
                yield f"{path}:columns", row_sums(_multiplied_out(module, columns, width, self.dtype))

    def _stays(self, key: str, before: Seen) -> bool:
        """Return whether vLLM's processing left a tensor unchanged, and the kernels use it directly."""
        path, _, leaf = key.rpartition(".")
        module = self.model.get_submodule(path)
        tensor = dict(module.named_parameters(recurse=False)).get(leaf)
        is_packed = leaf == "weight" and "cpu_linear" in vars(module)
        if tensor is None or is_packed or tensor.dtype is not self.dtype:
            return False
        return len(before.rows) == len(sums := ordered_row_sums(tensor)) and bool((sums == before.rows).all())

    def _watch(self) -> None:
        """Wrap vLLM's weight processing, to read every tensor right before it is processed."""
        paths = {module: path for path, module in self.model.named_modules()}
        methods = {id(m.quant_method): m.quant_method for m in paths if hasattr(m, "quant_method")}
        for method in methods.values():
            if hasattr(method, "process_weights_after_loading"):
                self._methods.append(method)
                method.process_weights_after_loading = self._watched(
                    method.process_weights_after_loading, paths
                )

    def _watched(self, process: Callable[..., None], paths: Mapping[nn.Module, str]) -> Callable[..., None]:
        def watched(module: nn.Module, *arguments: Any) -> None:
            path = paths[module]
            before = {
                f"{path}.{leaf}": parameter.detach()
                for leaf, parameter in module.named_parameters(recurse=False)
                if parameter.is_floating_point()
            }
            if self._seen is not None:
                self._shapes_before |= {key: tuple(tensor.shape) for key, tensor in before.items()}
                self._seen |= {key: Seen.of(in_format(tensor, self.dtype)) for key, tensor in before.items()}
                process(module, *arguments)
                if not self._gives_back(module, path, before, _LEARNED_COLUMNS):
                    raise ModelError(
                        f"inference_model.backend=vllm: vLLM multiplies with other numbers than it was given "
                        f"for {path}; write inference_model.backend=transformers"
                    )
                return
            # vLLM's own loader may change the source, so its checksum is taken first.
            noted = self._noted(before) if self._by_loader else {}
            # Choose at random. A counter would select the same layers every time if the number of layers and
            # the period had a common divisor.
            columns = int(torch.randint(_ONE_IN, (1,), generator=self._generator) == 0)
            process(module, *arguments)
            if not self._by_loader:
                # Copying in place leaves the source unchanged, and the source may be memory that the trainer
                # shares. Taken after packing, the checksum shows if the trainer has overwritten it too early.
                noted = self._noted(before)
            sound = not columns or not noted or self._gives_back(module, path, before, columns)
            multiply = vars(module).get("cpu_linear")
            self._packed |= {key: _Packed(sums, multiply, sound) for key, sums in noted.items()}

        return watched

    def _noted(self, tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Part | None, Tensor]]]:
        """Compute the checksums of what packed tensors hold."""
        if self.layout is None:
            return {}
        packed = tensors.keys() & self._packed_keys
        return {key: list(self.layout.read_parts(key, tensors[key])) for key in packed}

    def _gives_back(self, module: nn.Module, path: str, before: Mapping[str, Tensor], columns: int) -> bool:
        """Return whether a matrix packed for a CPU reproduces some random columns of its source."""
        matrix = before.get(f"{path}.weight")
        if "cpu_linear" not in vars(module) or matrix is None or matrix.dim() != 2:
            return True
        chosen = torch.randint(matrix.shape[1], (columns,), generator=self._generator)
        products = _multiplied_out(module, chosen, matrix.shape[1], matrix.dtype)
        same = bool((products == matrix[:, chosen]).all())
        # Zero times a non-finite number is not zero, so skip such weights here. The probe detects them.
        return same or not bool(matrix.isfinite().all())


def _multiplied_out(module: Any, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Multiply out columns of the matrix that a layer multiplies with on a CPU.

    Args:
        module: layer.
        columns: indices ``[C]`` of the columns.
        width: number of columns of the matrix.
        dtype: data type of the matrix.

    Returns:
        The columns ``[R, C]``.
    """
    ones = torch.zeros(len(columns), width, dtype=dtype)
    ones[torch.arange(len(columns)), columns] = 1
    products: Tensor = module.cpu_linear(ones, module.weight, None)
    return products.t()


def _width(module: Any) -> int:
    """Return the number of columns of a layer's matrix, even if packing freed the matrix."""
    return int(module.weight.shape[-1]) if module.weight.numel() else vllm_compat.width_of(module)


def _equal(seen: Mapping[str, Seen], other: Mapping[str, Seen]) -> bool:
    return seen.keys() == other.keys() and all(torch.equal(seen[k].rows, other[k].rows) for k in seen)


def _loading_error(what: str) -> ModelError:
    return ModelError(
        f"inference_model.backend=vllm: of the published weights, vLLM loads {what}; "
        "write inference_model.backend=transformers"
    )
