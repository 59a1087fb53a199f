"""Runs a rollout worker as a Ray actor: its engine, and how weights reach it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import ray
import torch
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.inference.pieces import Assembler
from torchrl_grpo.inference.protocol import Probe, SteppingEngine
from torchrl_grpo.inference.servers.channels import trial
from torchrl_grpo.inference.servers.channels.cuda_ipc import gpu_name
from torchrl_grpo.inference.servers.channels.group import ProcessGroupEnded
from torchrl_grpo.inference.servers.channels.receiver import Receiver
from torchrl_grpo.inference.servers.transfer_types import Opening
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_stream import TransferPostponed
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.planning.plan import SHARED_GPU
from torchrl_grpo.rollout.workers.types import Command, LoadWeightsCommand


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker.

    Attributes:
        cfg: configuration of the run.
        source: folder or hub name of the model; on a cluster, a folder that every node sees.
        eos_token_ids: ids of the tokens that end a response.
        pad_token_id: padding id.
        max_num_seqs: largest number of responses decoded at a time.
        threads: number of CPU threads of the engine.
        on_gpu: whether the worker has a GPU.
        gpus: indices of the GPUs of all workers and reference processes together, for a Ray cluster that this
            run starts.
        gpu_memory_utilization: fraction of the GPU's memory that vLLM takes.
        weight_transfer: how weights travel, a value of ``inference_model.weight_transfer``.
        train_device: where the trainer's weights are.
    """

    cfg: Config
    source: str
    eos_token_ids: Sequence[int]
    pad_token_id: int
    max_num_seqs: int
    threads: int
    on_gpu: bool
    gpus: Sequence[int] = ()
    gpu_memory_utilization: float = SHARED_GPU
    weight_transfer: str = "ray_objects"
    train_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        """Device of the engine, by its name inside the worker."""
        return torch.device("cuda:0" if self.on_gpu else "cpu")


# Weights by name, each as bytes, dtype and shape. Ray transfers this form without a copy.
PackedWeights = dict[str, tuple[numpy.ndarray, torch.dtype, tuple[int, ...]]]


def pack(weights: Iterable[tuple[str, Tensor]]) -> PackedWeights:
    """Convert weights to arrays of bytes, which hold any number format.

    Contiguous tensors on the CPU are not copied.
    """
    return {
        name: (
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(),
            tensor.dtype,
            tuple(tensor.shape),
        )
        for name, tensor in weights
    }


def unpack(packed: PackedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights that :func:`pack` was given."""
    for name, (content, dtype, shape) in packed.items():
        # Copy, because torch warns about tensors in the read-only memory of the object store.
        yield name, torch.from_numpy(content.copy()).view(dtype).view(shape)


class RolloutActor:
    """A rollout worker in its own process."""

    def setup(self, spec: WorkerSpec) -> tuple[str, str]:
        """Build the engine, and return the address of this machine and the name of its GPU.

        The constructor does not do this, because its errors do not reach the caller unchanged.
        """
        from torchrl_grpo.rollout.workers.worker import RolloutWorker
        from torchrl_grpo.runtime.malloc import keep_freed_memory

        torch.set_num_threads(spec.threads)
        if not spec.on_gpu:
            keep_freed_memory()
        options = spec.cfg.inference_model
        self.device, self.dtype = spec.device, resolve_dtype(options.dtype, spec.device)
        self.worker = RolloutWorker(
            self.make_engine(spec), options.max_new_tokens, options.temperature, time.perf_counter
        )
        self.receiver = Receiver(spec.device)
        return ray.util.get_node_ip_address(), gpu_name(spec.device)

    def make_engine(self, spec: WorkerSpec) -> SteppingEngine:
        """Build the engine that the configuration selects."""
        from torchrl_grpo.envs.episodes.build import with_episodes
        from torchrl_grpo.inference.build import build_engine

        engine = build_engine(
            spec.cfg,
            spec.source,
            spec.device,
            spec.eos_token_ids,
            spec.pad_token_id,
            spec.max_num_seqs,
            gpu_memory_utilization=spec.gpu_memory_utilization,
        )
        return with_episodes(spec.cfg, engine, spec.max_num_seqs)

    def load(self, packed: PackedWeights, command: LoadWeightsCommand) -> Any:
        """Run ``command`` with these weights.

        Ray resolves an object reference only if the reference itself is an argument, so ``packed`` is not
        part of ``command``.
        """
        return self.worker.run(replace(command, content=unpack(packed)))

    def try_out(self, item: Bucket | Opening) -> None:
        """Receive what a trial sends: see :mod:`~torchrl_grpo.inference.servers.channels.trial`."""
        trial.take(self.receiver, item)

    def prepare(self, probe: Probe) -> None:
        """Do what may take long, before the trainer sends weights from its device to this one."""
        self.worker.engine.prepare(probe)

    def start_loading(self, probe: Probe) -> None:
        """Begin to load weights, which come with :meth:`take`."""
        self._shapes, self._assembler = probe.shapes, Assembler()
        self.worker.start_loading()

    def take(self, item: Bucket | Opening) -> None:
        """Load what comes with a bucket or an opening: see :meth:`Receiver.receive`.

        Raises:
            TransferPostponed: another worker or the trainer was not there, or has left.
        """
        try:
            for pieces in self.receiver.receive(item, self._shapes, self.dtype):
                self.worker.engine.update(self._assembler.take(pieces))
        except ProcessGroupEnded as error:
            # The engine takes all weights again.
            self.worker.engine.finish_update()
            raise TransferPostponed(str(error)) from error

    def finish_loading(self, command: LoadWeightsCommand) -> Any:
        """End what :meth:`start_loading` began, and return what :meth:`RolloutWorker.load` returns."""
        return self.worker.finish_loading(command)

    def run(self, command: Command) -> Any:
        """Run any command except :class:`LoadWeightsCommand`. See :meth:`RolloutWorker.run`."""
        return self.worker.run(command)
