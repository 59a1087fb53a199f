"""The plan that places each role on devices, and its text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Share of a GPU's memory that vLLM takes: first on a GPU that it shares with the trainer or the reference
# model, then on a GPU of its own. CUDA needs the rest of the latter.
SHARED_GPU, OWN_GPU = 0.4, 0.85


@dataclass(frozen=True)
class RolePlan:
    """The placement of one role.

    Attributes:
        devices: names of the devices: ``cuda:N``, ``cpu`` (once per process), ``ray`` (once per worker of
            the cluster) or ``server`` (once per server that runs already). Empty if no model is loaded.
        placement: ``separate``, ``colocated`` with another role, ``cluster``, ``servers``, ``adapter off`` or
            ``off``.
        why: reason for the placement, for users.
        own_process: whether this role runs in processes of its own: engines as workers or servers, and the
            reference model as actors. Each process sees its own GPU as the first. Always False for the
            trainer.
    """

    devices: tuple[str, ...]
    placement: str
    why: str
    own_process: bool = False


@dataclass(frozen=True)
class Plan:
    """The placement of the three roles.

    Attributes:
        train: placement of the trained model, with one process (rank) per device.
        inference: placement of the engines. Without processes of their own, one engine runs in the process of
            the trainer or of each rank.
        reference: placement of the reference model, or of the teacher in its place.
        num_gpus: number of GPUs of this machine.
        sleeps: whether the engine frees its memory while the trainer trains.
        asynchronous: whether the script is grpo-async.py, whose engines generate while the trainer trains.
        engine_in_each_rank: whether each training rank has an engine in its process for its share of a round.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes if it runs on a GPU.
        engine_size: number of devices of one engine.
        weight_transfer: how new weights reach the engines, a value of ``inference_model.weight_transfer``
            other than ``auto``.
        notes: lines for the user: what ``allocation_mode`` means, and requests that the plan does not follow.
        token_budget: largest number of tokens in a micro-batch; None takes that of the configuration.
        offload_optimizer: whether the optimizer's moments wait in host memory while the engine generates.
        ranks: number of training ranks on all machines, if a launcher has started them.
        teaches: whether that model is a teacher.
        reference_in_each_rank: whether each of several training ranks has a copy of it, and scores its share.
        reward_gpus: names of rewards with a GPU of their own, and its number.
        max_num_seqs: largest number of responses that vLLM decodes at a time on a GPU; None on a CPU.
    """

    train: RolePlan
    inference: RolePlan
    reference: RolePlan
    num_gpus: int
    sleeps: bool
    asynchronous: bool = False
    engine_in_each_rank: bool = False
    gpu_memory_utilization: float = SHARED_GPU
    engine_size: int = 1
    weight_transfer: str = "in_process"
    notes: tuple[str, ...] = ()
    token_budget: int | None = None
    teaches: bool = False
    reference_in_each_rank: bool = False
    max_num_seqs: int | None = None
    offload_optimizer: bool = False
    ranks: int = 1
    reward_gpus: tuple[tuple[str, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of training ranks on all machines."""
        return max(self.ranks, len(self.train.devices))

    @property
    def colocated(self) -> bool:
        """Whether trainer and engine share a device."""
        return self.inference.placement == "colocated"

    @property
    def train_device(self) -> str:
        """The device of the trainer's first rank, by torch's name."""
        return self.train.devices[0]

    @property
    def engine_device(self) -> str:
        """Device of an engine, by its name inside the engine's process."""
        if not self.inference.own_process:
            return self.inference.devices[0]
        return "cpu" if self.num_gpus == 0 else "cuda:0"

    @property
    def reference_devices(self) -> tuple[str, ...]:
        """Devices of the reference model, or the trainer's device if it has none of its own."""
        return self.reference.devices or (self.train_device,)

    @property
    def num_engines(self) -> int:
        """The number of engines, whether or not they run in processes of their own."""
        return len(self.inference.devices) // self.engine_size

    @property
    def reference_actors(self) -> int:
        """The number of processes that hold the reference model only."""
        return len(self.reference.devices) if self.reference.own_process else 0

    @property
    def worker_gpus(self) -> list[int]:
        """GPUs of this machine for workers and reference processes. GPUs of a cluster are left out."""
        names = (
            *self.inference.devices,
            *(self.reference.devices if self.reference.own_process else ()),
        )
        return [_index(name) for name in names if name.startswith("cuda:")]

    @property
    def idle(self) -> list[str]:
        """GPUs of this machine that no role uses."""
        rewards = (f"cuda:{gpu}" for _, gpu in self.reward_gpus)
        used = {*self.train.devices, *self.inference.devices, *self.reference.devices, *rewards}
        names = [f"cuda:{gpu}" for gpu in range(self.num_gpus)]
        return [name for name in names if name not in used]

    def table(self) -> str:
        """Return the plan as aligned lines, followed by its notes."""
        frozen = "teacher" if self.teaches else "reference"
        roles = (("train", self.train), ("inference", self.inference), (frozen, self.reference))
        rows = [("role", "devices", "placement", "why")]
        rows += [(name, show_devices(role.devices), role.placement, role.why) for name, role in roles]
        for name, gpu in self.reward_gpus:
            rows.append((f"reward {name}", f"cuda:{gpu}", "separate", f"as reward.args.{name}.device says"))
        if self.idle:
            rows.append(("idle", show_devices(self.idle), "", "no role asks for them"))
        return aligned(rows) + "".join(f"note: {note}\n" for note in self.notes)


def resolved_utilization(
    gpu_memory_utilization: float | None, inference: RolePlan, reference: RolePlan
) -> float:
    """Return the share of a GPU's memory that vLLM takes.

    Args:
        gpu_memory_utilization: configured value, or None.
        inference: placement of the engines.
        reference: placement of the reference model.
    """
    if gpu_memory_utilization is not None:
        return gpu_memory_utilization
    # A Ray cluster may place a worker on the trainer's GPU, because Ray does not know that the GPU is in use.
    alone = inference.placement == "separate" and not set(inference.devices) & set(reference.devices)
    return OWN_GPU if alone else SHARED_GPU


def _index(name: str) -> int:
    return int(name.removeprefix("cuda:"))


def show_devices(names: Sequence[str]) -> str:
    """Format devices briefly, e.g. ``cuda:0-2``, ``cuda:4, cuda:6`` or ``cpu x 4``."""
    if not names:
        return "-"
    if not names[0].startswith("cuda:"):
        return names[0] if len(names) == 1 else f"{names[0]} x {len(names)}"
    runs: list[list[int]] = []
    for gpu in map(_index, names):
        if runs and runs[-1][-1] == gpu - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    # A range of two GPUs would not be shorter than both names.
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(gpu) for gpu in run] for run in runs]
    return ", ".join(f"cuda:{part}" for run in parts for part in run)


def aligned(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Format rows as text with aligned columns.

    Args:
        rows: rows with the same number of cells.
        numbers: indices of the columns to align on the right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def show_list(gpus: Iterable[int]) -> str:
    """Format GPUs as a list in the configuration."""
    return "[" + ",".join(map(str, gpus)) + "]"


def which(gpus: Sequence[int]) -> str:
    """Describe allocated GPUs in words, e.g. ``the first 2 free GPUs``."""
    free = "" if list(gpus) == list(range(len(gpus))) else " free"
    return f"the first{free} GPU" if len(gpus) == 1 else f"the first {len(gpus)}{free} GPUs"


def counted(count: int, what: str) -> str:
    """Return a count with its noun in the singular or the plural, e.g. ``2 workers``."""
    return f"{count} {what}" + ("" if count == 1 else "s")
