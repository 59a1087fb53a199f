"""A plan of who runs where, and how it is printed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# What vLLM takes of a GPU's memory: where the trainer or the reference needs some too, and where nobody does.
# The rest of the latter is CUDA's own.
SHARED_GPU, OWN_GPU = 0.4, 0.85


@dataclass(frozen=True)
class RolePlan:
    """Where one role runs.

    Attributes:
        devices: ``cuda:N``, ``cpu`` (once a process) or ``ray`` (once a worker of the cluster); none where no
            model is loaded.
        placement: ``separate``, ``colocated`` with another role, ``cluster``, ``adapter off`` or ``off``.
        why: the reason, for people.
        own_process: whether the reference runs in processes of its own, one on each device, each of which
            sees its own GPU as the first.
    """

    devices: tuple[str, ...]
    placement: str
    why: str
    own_process: bool = False


@dataclass(frozen=True)
class Plan:
    """Where the three roles run.

    Attributes:
        train: the model that is trained; one process (rank) a device.
        inference: the engines.
        reference: the reference model.
        own_process: whether the engines are workers in processes of their own, one on each device. Each
            sees its own GPU as the first. Otherwise one runs in the trainer's process, or in each rank's.
        num_gpus: GPUs of this machine.
        sleeps: whether the engine frees its memory while the trainer trains.
        asynchronous: of grpo-async.py: engines work while the trainer does.
        engine_in_each_rank: each training rank has an engine in its process, which generates its share.
        gpu_memory_utilization: of a GPU's memory that vLLM takes where it runs on one.
        notes: what was asked for and is not done.
    """

    train: RolePlan
    inference: RolePlan
    reference: RolePlan
    own_process: bool
    num_gpus: int
    sleeps: bool
    asynchronous: bool = False
    engine_in_each_rank: bool = False
    gpu_memory_utilization: float = SHARED_GPU
    notes: tuple[str, ...] = ()

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
        """An engine's device, as its own process names it."""
        if not self.own_process:
            return self.inference.devices[0]
        return "cpu" if self.num_gpus == 0 else "cuda:0"

    @property
    def reference_devices(self) -> tuple[str, ...]:
        """Where a reference model is loaded: the trainer's device where it has none of its own."""
        return self.reference.devices or (self.train_device,)

    @property
    def workers(self) -> int:
        """The number of engines, in processes of their own or not."""
        return len(self.inference.devices)

    @property
    def reference_actors(self) -> int:
        """Processes of the reference model beside the trainer's."""
        return len(self.reference.devices) if self.reference.own_process else 0

    @property
    def worker_gpus(self) -> list[int]:
        """GPUs of this machine for workers and processes of the reference; none of a cluster."""
        own_process = (
            *self.inference.devices,
            *(self.reference.devices if self.reference.own_process else ()),
        )
        return [_index(name) for name in own_process if name.startswith("cuda:")]

    @property
    def idle(self) -> list[str]:
        """GPUs of this machine that no role has."""
        used = {*self.train.devices, *self.inference.devices, *self.reference.devices}
        names = [f"cuda:{gpu}" for gpu in range(self.num_gpus)]
        return [name for name in names if name not in used]

    def table(self) -> str:
        """The plan as aligned lines, and what was asked for and is not done."""
        roles = (("train", self.train), ("inference", self.inference), ("reference", self.reference))
        rows = [("role", "devices", "placement", "why")]
        rows += [(name, show_devices(role.devices), role.placement, role.why) for name, role in roles]
        if self.idle:
            rows.append(("idle", show_devices(self.idle), "", "no role asks for them"))
        return aligned(rows) + "".join(f"note: {note}\n" for note in self.notes)


def resolved_utilization(
    gpu_memory_utilization: float | None, inference: RolePlan, reference: RolePlan
) -> float:
    """Return the share of a GPU's memory that vLLM takes.

    Args:
        gpu_memory_utilization: configured value, or None.
        inference: plan of the engines.
        reference: plan of the reference model.
    """
    if gpu_memory_utilization is not None:
        return gpu_memory_utilization
    # A cluster may put a worker on the trainer's GPU: Ray does not know that it is taken.
    alone = inference.placement == "separate" and not set(inference.devices) & set(reference.devices)
    return OWN_GPU if alone else SHARED_GPU


def _index(name: str) -> int:
    return int(name.removeprefix("cuda:"))


def show_devices(names: Sequence[str]) -> str:
    """Devices in few words: ``cuda:0-2``, ``cuda:4, cuda:6``, ``cpu x 4``."""
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
    # Two in a row are as short one by one.
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(gpu) for gpu in run] for run in runs]
    return ", ".join(f"cuda:{part}" for run in parts for part in run)


def aligned(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Rows as text with columns side by side.

    Args:
        rows: of equally many cells.
        numbers: columns that are aligned on the right.
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
    """GPUs as they are written in the configuration."""
    return "[" + ",".join(map(str, gpus)) + "]"


def which(gpus: Sequence[int]) -> str:
    """GPUs that were dealt out, in words."""
    free = "" if list(gpus) == list(range(len(gpus))) else " free"
    return f"the first{free} GPU" if len(gpus) == 1 else f"the first {len(gpus)}{free} GPUs"


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count} {what}" + ("" if count == 1 else "s")
