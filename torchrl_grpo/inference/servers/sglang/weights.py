"""Loads weights into SGLang's model, and reads back the weights that it multiplies with.

SGLang fuses matrices when it loads them, and computes with what its loader has filled. It neither packs nor
transforms weights that are not quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.checksums import Checksums, collect_parts
from torchrl_grpo.inference.layout import (
    Layout,
    Seen,
    Shape,
    fingerprint,
    in_format,
    locate_weights,
    readable,
)


class SGLangWeights:
    """Access to the weights of one SGLang model.

    Args:
        model: SGLang's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        self.dtype, self._device = first.dtype, first.device
        self._layout: Layout | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights with SGLang's own loader, under the names of the Hugging Face model."""
        self._model.load_weights((name, tensor.to(self.dtype)) for name, tensor in weights)  # type: ignore[operator]

    def locate(self, shapes: Mapping[str, Shape]) -> None:
        """Learn which tensor of SGLang holds each published tensor.

        This overwrites the weights; load them again afterwards.

        Args:
            shapes: shapes of the published tensors by name.

        Raises:
            ModelError: SGLang does not load a tensor, or loads only a part of it.
        """
        seen = self._with_fingerprints(shapes)
        self._layout = locate_weights(shapes, self.dtype, seen, self._device)
        if self._layout.torn:
            raise _loading_error(f"only a part of {self._layout.torn[0]}")
        # SGLang may have transformed a tensor that was not found. If another fingerprint of it changes
        # nothing, SGLang ignores the tensor.
        for name in self._layout.unreadable(shapes):
            again = self._with_fingerprints(shapes, other=name)
            if all(torch.equal(again[key].rows, record.rows) for key, record in seen.items()):
                raise _loading_error(f"nothing of {name}")

    def _with_fingerprints(self, shapes: Mapping[str, Shape], other: str | None = None) -> dict[str, Seen]:
        self.load(
            (name, fingerprint(name, shape, self.dtype, self._device, name == other))
            for name, shape in shapes.items()
        )
        return {key: Seen.of(in_format(tensor, self.dtype)) for key, tensor in readable(self._model)}

    def checksums(self) -> Checksums:
        """Compute the checksums of all weights that the model computes with."""
        assert self._layout is not None
        sums = [
            item for key, tensor in readable(self._model) for item in self._layout.read_parts(key, tensor)
        ]
        return collect_parts(sums, self.dtype)


def _loading_error(what: str) -> ModelError:
    return ModelError(
        f"inference_model.backend=sglang_server: of the published weights, SGLang loads {what}; "
        "write inference_model.backend=vllm_server"
    )
