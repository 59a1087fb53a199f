"""Methods that a vLLM server's worker gets, so that a client can load weights and read them back.

vLLM mixes this class into its worker (``--worker-extension-cls``), and its route ``/collective_rpc`` calls
the methods. Arguments and results travel as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torchrl_grpo.inference.servers.weight_files import Bucket, read_bucket

if TYPE_CHECKING:
    from torch import Tensor

    from torchrl_grpo.inference.vllm_weights import VLLMWeights


class WeightExtension:
    """Loads weights from files and computes checksums, as an engine in the trainer's process does."""

    _weights: VLLMWeights | None = None

    def grpo_describe(self) -> dict[str, str]:
        """Return the dtype of the weights.

        It creates what records vLLM's processing of weights, so it must be called before weights are loaded.
        """
        return {"dtype": str(self._known().dtype).removeprefix("torch.")}

    def grpo_start_update(self) -> None:
        """Begin to replace the weights."""
        self._known().start()

    def grpo_load(self, bucket: dict[str, Any]) -> None:
        """Load the tensors of a file.

        Args:
            bucket: a :class:`~torchrl_grpo.inference.servers.weight_files.Bucket` as JSON.
        """
        self._known().load(read_bucket(Bucket.from_json(bucket)))

    def grpo_finish_update(self) -> None:
        """End the update."""
        self._known().finish()

    def grpo_locate_weights(self, shapes: dict[str, list[int]]) -> None:
        """Find out where published tensors of these shapes lie. The weights are lost."""
        known = self._known()

        def update(weights: Iterable[tuple[str, Tensor]]) -> None:
            known.start()
            known.load(weights)
            known.finish()

        known.locate_weights({name: tuple(shape) for name, shape in shapes.items()}, update)

    def grpo_checksums(self) -> dict[str, Any]:
        """Return the checksums of the weights, ``{"dtype": ..., "values": {NAME: [NUMBER, ...]}}``."""
        found = self._known().checksums()
        return {"dtype": found.dtype, "values": {name: list(copies) for name, copies in found.values.items()}}

    def _known(self) -> VLLMWeights:
        if self._weights is None:
            from torchrl_grpo.inference.vllm_weights import VLLMWeights

            worker: Any = self
            self._weights = VLLMWeights(worker, worker.model_config.dtype)
        return self._weights
