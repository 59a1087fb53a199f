"""Methods that a vLLM server's worker gets, so that a client can load weights and read them back.

vLLM mixes this class into its worker (``--worker-extension-cls``), and its route ``/collective_rpc`` calls
the methods. Arguments and results travel as JSON.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.inference.servers.channels import trial
from torchrl_grpo.inference.servers.channels.cuda_ipc import gpu_name
from torchrl_grpo.inference.servers.channels.group import ProcessGroupEnded
from torchrl_grpo.inference.servers.channels.receiver import Receiver
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.transfer_types import INTERRUPTED, Opening
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_folder import BucketReader
from torchrl_grpo.inference.servers.weight_stream import half_of_the_threads
from torchrl_grpo.inference.vllm_arguments import name_of
from torchrl_grpo.inference.vllm_compat import head_dtypes, let_prompts_be_cut
from torchrl_grpo.runtime.malloc import keep_freed_memory

if TYPE_CHECKING:
    from torchrl_grpo.inference.vllm_weights import VLLMWeights


_LOG = logging.getLogger(__name__)
# Differs between machines, and between two starts of one.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class WeightExtension:
    """Loads weights from files and computes checksums, as an engine in the trainer's process does."""

    _weights: VLLMWeights | None = None
    _reader: BucketReader | None = None
    # This rank's end of a GPU transfer channel.
    _receiver: Receiver | None = None
    # Whether an update has begun and not ended.
    _is_updating = False
    # Set while this process uses fewer threads. Closing it restores their number.
    _fewer_threads: ExitStack | None = None

    def grpo_describe(self, file: str, tensors: list[str] | None = None) -> dict[str, Any]:
        """Return what the server computes with, and which model it was started with.

        It creates the object that records how vLLM processes weights, so it must be called before weights are
        loaded. If an earlier client was killed during an update, it ends that update, because a model in that
        state cannot compute.

        Args:
            file: a file of the client, in the folder through which weights travel.
            tensors: names of the tensors that the client compares; None if it compares no model.
        """
        weights, config = self._vllm_weights(), vars(self)["model_config"]
        self._reader = BucketReader()
        if self._receiver is not None:
            self._receiver.close()
        if self._is_updating:
            self.grpo_finish_update()
        return {
            "dtype": name_of(weights.dtype),
            "head_dtypes": sorted(name_of(dtype) for dtype in head_dtypes(weights.model, weights.dtype)),
            "max_model_len": config.max_model_len,
            "logprobs_mode": str(config.logprobs_mode),
            "sees_file": Path(file).exists(),
            "ranks": weights.ranks,
            "gpu": gpu_name(vars(self)["device"]),
            "identity": f"{os.getpid()} on {_BOOT.read_text().strip()}",
            "model": None
            if tensors is None
            else describe(config.model, tensors, trust_remote_code=config.trust_remote_code),
        }

    def grpo_sign_of_life(self) -> None:
        """Do nothing: the answer shows that the engine runs."""

    def grpo_start_update(self, by_loader: bool = False, shares_cpu: bool = False) -> None:
        """Begin to replace the weights.

        Args:
            by_loader: whether vLLM's own loader must load them.
            shares_cpu: whether another process of this machine writes files on its CPU while this one loads.
        """
        self._vllm_weights().start_pieces(by_loader)
        self._is_updating = True
        if shares_cpu and self._fewer_threads is None:
            self._fewer_threads = ExitStack()
            self._fewer_threads.enter_context(half_of_the_threads())

    def grpo_open(self, opening: dict[str, Any]) -> str | None:
        """Open a GPU transfer channel, in place of an earlier one. With NCCL, also load all weights.

        Args:
            opening: an :class:`~torchrl_grpo.inference.servers.transfer_types.Opening` as JSON.

        Returns:
            ``INTERRUPTED`` if another server or the trainer was not there, or has left; else None.
        """
        try:
            self._receive(Opening.from_json(opening))
        except ProcessGroupEnded as error:
            # If this goes on, the trainer fails with an error that says more.
            _LOG.warning("weights are not received yet: %s", error)
            self.grpo_finish_update()
            return INTERRUPTED
        return None

    def _receive(self, item: Bucket | Opening) -> None:
        """Load what comes from the trainer's GPU."""
        weights = self._vllm_weights()
        assert weights.layout is not None, "grpo_locate_weights comes first"
        for pieces in self._channel().receive(item, weights.layout.shapes, weights.dtype):
            weights.load_pieces(pieces)

    def _channel(self) -> Receiver:
        if self._receiver is None:
            worker: Any = self
            self._receiver = Receiver(worker.device, worker.rank)
        return self._receiver

    def grpo_load(self, bucket: dict[str, Any]) -> None:
        """Load the tensors of a file or of a half.

        Args:
            bucket: a :class:`~torchrl_grpo.inference.servers.weight_files.Bucket` as JSON.

        Raises:
            RuntimeError: the content is not what was announced.
        """
        announced = Bucket.from_json(bucket)
        if announced.slot is None:
            assert self._reader is not None, "grpo_describe comes first"
            self._vllm_weights().load_pieces(self._reader.read(announced))
            return
        self._receive(announced)

    def grpo_try(
        self, opening: dict[str, Any] | None = None, bucket: dict[str, Any] | None = None
    ) -> str | None:
        """Receive an item of a trial, an opening or a bucket, and return what went wrong."""
        try:
            if opening is not None:
                trial.take(self._channel(), Opening.from_json(opening))
            elif bucket is not None:
                trial.take(self._channel(), Bucket.from_json(bucket))
        except Exception as error:  # noqa: BLE001  it is returned, so that the server lives on
            return f"{type(error).__name__}: {error}"
        return None

    def grpo_finish_update(self) -> None:
        """End the update."""
        stack, self._fewer_threads = self._fewer_threads, None
        if stack is not None:
            stack.close()
        self._vllm_weights().finish_pieces()
        self._is_updating = False

    def grpo_locate_weights(self, shapes: dict[str, list[int]]) -> None:
        """Find out where published tensors of these shapes lie.

        This overwrites the weights; load them again afterwards.
        """
        weights = self._vllm_weights()
        by_name = {name: tuple(shape) for name, shape in shapes.items()}
        weights.locate_weights(by_name, weights.load_whole, nullcontext())

    def grpo_held(self) -> dict[str, Any]:
        """Return what :meth:`grpo_checksums` will return, with zeros in place of the checksums."""
        return self._vllm_weights().held().to_json()

    def grpo_ignored(self, names: list[str]) -> list[str]:
        """Return the published tensors in ``names`` that this rank ignores: loading other values for
        them changes nothing that it holds.

        This overwrites the weights; load them again afterwards.
        """
        weights = self._vllm_weights()
        return [name for name in names if weights.ignores(name, weights.load_whole)]

    def grpo_checksums(self) -> dict[str, Any]:
        """Return the checksums of what this rank holds, as JSON."""
        return self._vllm_weights().checksums().to_json()

    def _vllm_weights(self) -> VLLMWeights:
        if self._weights is None:
            from torchrl_grpo.inference.vllm_weights import VLLMWeights

            worker: Any = self
            if worker.device.type == "cpu":
                # An update frees and allocates every packed matrix, and fresh pages cost more than packing.
                keep_freed_memory()
            let_prompts_be_cut(worker)
            self._weights = VLLMWeights(worker, worker.model_config.dtype)
        return self._weights
