"""Loads weights into a running vLLM and reads back the weights that it multiplies with.

vLLM fuses and packs the weights that it loads. A parameter that stays readable is read where the kernels read
it. A matrix may be packed for a CPU and then freed, or quantized. Its checksum is taken of the tensor that is
packed, at the moment of packing, and kept with the function that multiplies with the result. Some columns of
the packed matrix are multiplied out and compared. This is exact: one times a number, plus zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.checksums import Checksums, gathered, ordered_row_sums, row_sums
from torchrl_grpo.inference.layout import Layout, Seen, Shape, fingerprint, in_format, learn

# Columns of a packed matrix that are multiplied out when the layout is learned. At a publication, one column
# is multiplied out of one in this many matrices, drawn at random.
_LEARNED_COLUMNS, _ONE_IN = 8, 16
# Number of publications compared with the weights that vLLM read from disk; the start test publishes twice.
_COMPARED = 2


@dataclass
class _Packed:
    """Record of the last packing of a layer.

    Attributes:
        sums: checksums by name of the published tensor.
        multiply: function that multiplies with the packed copy, if the layer has one.
        sound: whether the packed copy reproduced the columns that were checked.
    """

    sums: list[tuple[str, Tensor]]
    multiply: Any
    sound: bool


class VLLMWeights:
    """The weights of one vLLM worker.

    Args:
        worker: vLLM worker that holds the whole model.
        dtype: number format of the model.
    """

    def __init__(self, worker: Any, dtype: torch.dtype) -> None:
        self._worker = worker
        self.dtype = dtype
        self.layout: Layout | None = None
        # Engine tensors before vLLM processed them; set while the layout is learned.
        self._seen: dict[str, Seen] | None = None
        self._packed: dict[str, _Packed] = {}
        self._packed_keys: set[str] = set()
        # Row sums of the weights that vLLM itself read from disk, and the publications compared with them.
        self._first: dict[str, Tensor] = {}
        self._compared = 0
        # vLLM's quantization methods, whose processing of weights is watched.
        self._methods: list[Any] = []
        self._generator = torch.Generator().manual_seed(0)
        self._watch()

    @property
    def model(self) -> nn.Module:
        """The model that answers."""
        model: nn.Module = self._worker.model_runner.get_model()
        return model

    def start(self) -> None:
        """Begin an update: :meth:`load` may then be called several times."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._inside():
            initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hand weights, in the names of the Hugging Face model, to vLLM's own loader."""
        with self._inside():
            self.model.load_weights((name, tensor.to(self.dtype)) for name, tensor in weights)  # type: ignore[operator]

    def finish(self) -> None:
        """End an update: what was loaded is processed, and what was computed with older weights forgotten."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self._worker.model_runner
        with self._inside():
            finalize_layerwise_reload(self.model, runner.model_config)
            runner.reset_encoder_cache()
            runner.reset_mm_cache()
        self._repack_tied_heads()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self._worker.vllm_config):
            yield

    def _repack_tied_heads(self) -> None:
        """Pack shared output heads anew.

        On a CPU vLLM multiplies with a packed copy of each matrix and renews the copy of every layer it
        reloads. A head that shares its matrix with the embedding is not reloaded, and would keep the old one.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        modules: list[Any] = list(self.model.modules())
        tables = {
            id(module.weight)
            for module in modules
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        }
        for module in modules:
            packed = isinstance(module, ParallelLMHead) and "cpu_linear" in vars(module)
            # A head with a matrix of its own was reloaded, and packed, like every other layer.
            if packed and id(module.weight) in tables:
                module.quant_method.process_weights_after_loading(module)

    def release(self) -> None:
        """Let go of the model: nothing that vLLM keeps for longer may hold it."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for module in self.model.modules():
            # What it notes of a tied matrix holds both layers, and so itself, for ever.
            LAYERWISE_INFO.pop(module, None)
        for method in self._methods:
            del method.process_weights_after_loading
        self._methods.clear()
        self._packed.clear()

    def learn(
        self, shapes: Mapping[str, Shape], update: Callable[[Iterable[tuple[str, Tensor]]], None]
    ) -> None:
        """Find out which tensor of vLLM holds which published one. Afterwards weights must be loaded.

        Args:
            shapes: of the published tensors by name.
            update: loads weights as publications do.

        Raises:
            ModelError: a tensor, or a part of one, is not taken.
        """
        device = self._worker.device
        self._first = dict(self._sums_of_rows())
        self._compared = _COMPARED
        seen = self._with_fingerprints(shapes, update)
        for path, module in self.model.named_modules():
            if "cpu_linear" in vars(module) and f"{path}.weight" not in seen:
                raise _not_taken(f"nothing of {path}, whose packed copy no update renews")
        self.layout = learn(shapes, self.dtype, seen, device)
        if self.layout.torn:
            raise _not_taken(f"only a part of {self.layout.torn[0]}")
        # One that lies nowhere may be computed with. If what vLLM holds does not depend on it, it is ignored.
        for name in self.layout.unread(shapes):
            if _equal(self._with_fingerprints(shapes, update, other=name), seen):
                raise _not_taken(f"nothing of {name}")

    def _with_fingerprints(
        self,
        shapes: Mapping[str, Shape],
        update: Callable[[Iterable[tuple[str, Tensor]]], None],
        other: str | None = None,
    ) -> dict[str, Seen]:
        """What vLLM's tensors are with fingerprints loaded, that of ``other`` another one than usual."""
        device = self._worker.device
        self._seen, self._packed, self._packed_keys = {}, {}, set()
        update(
            (name, fingerprint(name, shape, self.dtype, device, name == other))
            for name, shape in shapes.items()
        )
        seen, self._seen = self._seen, None
        self._packed_keys = {key for key, one in seen.items() if not self._stays(key, one)}
        for key, tensor in self._readable():
            if key in self._packed_keys:
                # The copy that is looked up, as of an embedding, beside the one that is multiplied with.
                key = f"{key}:plain"
            seen[key] = Seen.of(in_format(tensor, self.dtype))
        return seen

    def checksums(self) -> Checksums:
        """Of all that the model computes with."""
        assert self.layout is not None
        self._compare_with_the_first()
        sums: list[tuple[str, Tensor]] = []
        for key, tensor in self._readable():
            sums += self.layout.read(f"{key}:plain" if key in self._packed_keys else key, tensor)
        modules = dict(self.model.named_modules())
        wrong = torch.tensor(-1, device=self._worker.device)
        for key, packed in self._packed.items():
            module = modules[key.rpartition(".")[0]]
            sound = packed.sound and vars(module).get("cpu_linear") is packed.multiply
            sums += [(name, value if sound else wrong) for name, value in packed.sums]
        return gathered(sums, self.dtype)

    def _compare_with_the_first(self) -> None:
        """Find rows that publications put elsewhere than vLLM's own reading of the same weights.

        Where they are put by fingerprints and by weights alike, checksums cannot tell.

        Raises:
            ModelError: there are such rows.
        """
        if self._compared == 0:
            self._first.clear()
            return
        self._compared -= 1
        for key, now in self._sums_of_rows():
            if key not in self._first:
                continue
            was = self._first[key]
            if torch.equal(was.sort().values, now.sort().values) and not torch.equal(was, now):
                raise _not_taken(f"rows of {key} in another order than from disk")

    def _sums_of_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and sums of the rows of all matrices; of a packed one by some columns that it gives back."""
        for key, tensor in self._readable():
            if tensor.dim() > 1:
                yield key, row_sums(tensor)
        for path, module in self.model.named_modules():
            if "cpu_linear" in vars(module):
                width = _width(module)
                columns = torch.linspace(0, width - 1, _LEARNED_COLUMNS).long()
                yield f"{path}:columns", row_sums(_multiplied_out(module, columns, width, self.dtype))

    def _readable(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and tensors of parameters and buffers that are there, each storage once."""
        known = set()
        for name, tensor in itertools.chain(self.model.named_parameters(), self.model.named_buffers()):
            if tensor.numel() and tensor.is_floating_point() and tensor.data_ptr() not in known:
                known.add(tensor.data_ptr())
                yield name, tensor

    def _stays(self, key: str, before: Seen) -> bool:
        """Whether a tensor is after processing what it was before, and is multiplied with as it is."""
        path, _, leaf = key.rpartition(".")
        module = self.model.get_submodule(path)
        tensor = dict(module.named_parameters(recurse=False)).get(leaf)
        if tensor is None or "cpu_linear" in vars(module) or tensor.dtype is not self.dtype:
            return False
        return len(before.rows) == len(sums := ordered_row_sums(tensor)) and bool((sums == before.rows).all())

    def _watch(self) -> None:
        """See every tensor that vLLM processes, in the moment before it does."""
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
                self._seen |= {key: Seen.of(in_format(tensor, self.dtype)) for key, tensor in before.items()}
                process(module, *arguments)
                if not self._gives_back(module, path, before, _LEARNED_COLUMNS):
                    raise ModelError(
                        f"inference_model.backend=vllm: vLLM multiplies with other numbers than it was given "
                        f"for {path}; write inference_model.backend=transformers"
                    )
                return
            noted = {}
            for key in before.keys() & self._packed_keys:
                assert self.layout is not None
                noted[key] = list(self.layout.read(key, before[key]))
            # Drawn, because a count would come to the same layers again wherever both numbers have a divisor.
            columns = int(torch.randint(_ONE_IN, (1,), generator=self._generator) == 0)
            process(module, *arguments)
            sound = not columns or not noted or self._gives_back(module, path, before, columns)
            multiply = vars(module).get("cpu_linear")
            self._packed |= {key: _Packed(sums, multiply, sound) for key, sums in noted.items()}

        return watched

    def _gives_back(self, module: nn.Module, path: str, before: Mapping[str, Tensor], columns: int) -> bool:
        """Whether a matrix packed for a CPU gives back some columns, drawn at random, of its source."""
        matrix = before.get(f"{path}.weight")
        if "cpu_linear" not in vars(module) or matrix is None or matrix.dim() != 2:
            return True
        chosen = torch.randint(matrix.shape[1], (columns,), generator=self._generator)
        found = _multiplied_out(module, chosen, matrix.shape[1], matrix.dtype)
        same = bool((found == matrix[:, chosen]).all())
        # Zeros times what is not finite are not zeros; the answers show such weights.
        return same or not bool(matrix.isfinite().all())


def _multiplied_out(module: Any, columns: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Columns ``[R, C]`` of the matrix that a layer multiplies with on a CPU, whose rows have ``width``."""
    ones = torch.zeros(len(columns), width, dtype=dtype)
    ones[torch.arange(len(columns)), columns] = 1
    found: Tensor = module.cpu_linear(ones, module.weight, None)
    return found.t()


def _width(module: Any) -> int:
    """The width of a layer's matrix, also where it was freed once it was packed."""
    from vllm.model_executor.layers.linear import LinearBase

    if module.weight.numel():
        return int(module.weight.shape[-1])
    return int(module.input_size if isinstance(module, LinearBase) else module.embedding_dim)


def _equal(one: Mapping[str, Seen], other: Mapping[str, Seen]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k].rows, other[k].rows) for k in one)


def _not_taken(what: str) -> ModelError:
    return ModelError(
        f"inference_model.backend=vllm: of the weights that are published to it, vLLM takes {what}; "
        "write inference_model.backend=transformers"
    )
