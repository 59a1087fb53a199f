"""A plan with its predicted memory: what is needed and what is there."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import VLLM_CPU_BLOCK_SIZE
from torchrl_grpo.models.shape import ModelShape, Unknown
from torchrl_grpo.planning import memory
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.prediction import GIB, Prediction
from torchrl_grpo.planning.token_budget import Budget
from torchrl_grpo.planning.workload import MIN_SEQS_GPU, workload_of
from torchrl_grpo.runtime.hardware import Hardware

# Phase of a round -> what a device does in it.
WHILE = {
    "load": "loading",
    "start": "starting",
    "generate": "generating",
    "prepare": "preparing",
    "optimize": "optimizing",
}


@dataclass(frozen=True)
class Planned:
    """A plan and its predicted memory.

    Attributes:
        cfg: configuration that was planned.
        plan: placement of the roles.
        asynchronous: whether the script is grpo-async.py.
        hardware: hardware that the plan was made for.
        shape: shape of the model, or the reason why it is unknown.
        prediction: predicted memory; None without a shape.
        budget: largest number of tokens in a micro-batch.
        other: the next best sizes, of another kind if possible; None if nothing was searched.
    """

    cfg: Config
    plan: Plan
    asynchronous: bool
    hardware: Hardware
    shape: ModelShape | Unknown
    prediction: Prediction | None
    budget: Budget
    other: Planned | None = None

    def resembles(self, other: Planned) -> bool:
        """Return whether another plan shares GPUs, sleeps and holds the model in the same way."""

        def kind(planned: Planned) -> tuple[bool, bool, str]:
            return planned.plan.colocated, planned.plan.sleeps, planned.cfg.train_model.parallelism

        return kind(self) == kind(other)

    @functools.cached_property
    def vllm_on_gpus(self) -> list[tuple[float, float, float]]:
        """GPUs with vLLM and a known size: size in GiB, bytes of weights, bytes that vLLM needs to start."""
        vllm = self.cfg.inference_model.engine.has_known_needs
        if self.prediction is None or isinstance(self.shape, Unknown) or not vllm:
            return []
        shares, load = [], workload_of(self.cfg)
        for row in self.prediction.rows:
            for name in row.devices if (row.role, row.phase) == ("inference", "generate") else ():
                gib = self.hardware.gpu_gib(name)
                if gib is not None:
                    least = memory.least_for_vllm(self.shape, load, row.weights, gib)
                    shares.append((gib, row.weights, least))
        return shares

    @property
    def room_for_sequences(self) -> int | None:
        """The number of longest sequences whose keys and values fit in vLLM's share; None if unknown."""
        return self._room(self.plan.gpu_memory_utilization) if self.vllm_on_gpus else None

    def _room(self, share: float) -> int:
        """Return the number of longest sequences whose keys and values fit in a share of each GPU."""
        assert isinstance(self.shape, ModelShape)
        longest, rooms = self.cfg.inference_model.max_model_len, []
        for gib, weights, least in self.vllm_on_gpus:
            each = memory.cache_of(self.shape, weights / self.shape.parameters, longest)
            # The least includes the cache of one sequence.
            rooms.append(1 + int((share * gib * GIB - least) // each))
        return max(0, min(rooms))

    def responses_in(self, share: float) -> int:
        """Return how many responses at full length an engine decodes at a time with a share of its GPUs.

        One step of 1/20 is left for CUDA graphs, which the prediction does not count.
        """
        return max(1, self._room(share - 1 / 20))

    @property
    def most_responses(self) -> int:
        """The number of responses that an engine may have to decode at a time."""
        return max(workload_of(self.cfg, engines=self.plan.num_engines).rows, MIN_SEQS_GPU)

    @property
    def least_share(self) -> float | None:
        """The smallest share of GPU memory with which vLLM starts, in steps of 1/20; None if none exists."""
        shares = [math.ceil(20 * least / (gib * GIB)) / 20 for gib, _, least in self.vllm_on_gpus]
        return max(shares) if shares and max(shares) < 1 else None

    @property
    def least_cache_gib(self) -> int | None:
        """The smallest ``kv_cache_gib`` with which vLLM starts on a CPU: room for the longest sequence.

        None if vLLM does not run on a CPU, if the shape of the model does not determine the size, or if
        ``kv_cache_dtype`` is set.
        """
        options = self.cfg.inference_model
        if self.prediction is None or isinstance(self.shape, Unknown) or not options.engine.has_known_needs:
            return None
        if not self.shape.full_cache or "kv_cache_dtype" in options.engine_args:
            return None
        for row in self.prediction.rows:
            if (row.role, row.phase) == ("inference", "generate") and "cpu" in row.devices:
                block = options.block_size or VLLM_CPU_BLOCK_SIZE
                # vLLM allocates whole blocks and keeps one of them empty.
                tokens = block * (-(-options.max_model_len // block) + 1)
                element = row.weights / self.shape.parameters
                return math.ceil(memory.cache_of(self.shape, element, tokens) / GIB)
        return None

    def peaks(self) -> list[str]:
        """Return the size of micro-batches, and for each device its predicted and its available memory."""
        lines = []
        if self.plan.train_device.startswith("cuda"):
            lines.append(f"micro-batches: at most {self.budget.tokens} tokens ({self.budget.why})")
        if self.plan.offload_optimizer:
            lines.append("optimizer: its moments wait in host memory while the engine generates")
        if (sequences := self.plan.max_num_seqs) is not None:
            lines.append(f"engine: at most {sequences} responses at a time")
        if self.prediction is None:
            assert isinstance(self.shape, Unknown)
            return [*lines, f"memory: not predicted: {self.shape.why}"]
        for device, available_gib in memory_by_device(self.plan, self.hardware).items():
            need, phase = self.prediction.peak(device)
            of = "" if available_gib is None else f" of {available_gib:.2f}"
            others = beside_others(self, device)
            lines.append(f"memory: {device} at most {need / GIB:.2f}{of} GiB{others}, while {WHILE[phase]}")
        return lines


def memory_by_device(plan: Plan, hardware: Hardware) -> dict[str, float | None]:
    """Return the devices that the plan uses, with the memory of each in GiB that the run may take."""
    used = dict.fromkeys([*plan.train.devices, *plan.inference.devices, *plan.reference.devices])
    return {name: hardware.free_gib(name) for name in used if name not in ("ray", "server")}


def beside_others(planned: Planned, device: str) -> str:
    """Return what a message adds about the memory that other processes take of a device."""
    taken = planned.hardware.taken_gib(device)
    return f" beside {taken:.2f} GiB of other processes" if round(taken, 2) > 0 else ""
