"""The predicted memory of a run: what each role takes in each phase, and the table that a user sees."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_grpo.planning.plan import aligned, show_devices

GIB = 2**30
# Loading the trainer, starting an engine in its process, and the phases of a round.
PHASES = ("load", "start", "generate", "prepare", "optimize")


@dataclass(frozen=True)
class Row:
    """The memory that one role takes in one phase on each of its devices, in bytes.

    Attributes:
        role: ``train``, ``inference``, ``reference``, or ``program`` for memory that belongs to no role.
        phase: one of PHASES, or ``all``.
        devices: names of the devices, as in :class:`~torchrl_grpo.planning.plan.RolePlan`.
        weights: bytes of the weights.
        gradients: bytes of the gradients.
        optimizer: bytes of the optimizer state.
        activations: bytes of the activations and of temporary arrays.
        cache: bytes of the key/value cache.
        other: bytes of everything else.
    """

    role: str
    phase: str
    devices: tuple[str, ...]
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    cache: float = 0
    other: float = 0

    @property
    def total(self) -> float:
        """The sum of all parts, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache + self.other


@dataclass(frozen=True)
class Prediction:
    """The rows of a run, and whether its phases overlap.

    Attributes:
        rows: rows of all roles and phases.
        own_process: whether the engines are workers, which keep their memory in every phase.
    """

    rows: tuple[Row, ...]
    own_process: bool

    def peak(self, device: str) -> tuple[float, str]:
        """Return the peak memory of ``device`` in bytes, and the phase of the peak."""
        needs = {phase: self.need(device, phase) for phase in PHASES}
        worst = max(needs, key=lambda phase: needs[phase])
        return needs[worst], worst

    def largest(self, device: str, phase: str) -> Row:
        """Return the row that takes the most memory of ``device`` in ``phase``."""
        return max(self._rows_in(device, phase), key=lambda row: self._here(row, device))

    def need(self, device: str, phase: str) -> float:
        """Return the bytes that ``device`` needs in ``phase``."""
        return sum(self._here(row, device) for row in self._rows_in(device, phase))

    def _rows_in(self, device: str, phase: str) -> list[Row]:
        def now(row: Row) -> bool:
            if phase == "load":
                # Engines and reference models start after the trainer has loaded.
                return row.phase == phase or row.role == "program"
            return row.phase in (phase, "all") or (self.own_process and row.role == "inference")

        return [row for row in self.rows if device in row.devices and now(row)]

    @staticmethod
    def _here(row: Row, device: str) -> float:
        # The CPU is listed once per process, and each process takes this memory.
        return row.total * row.devices.count(device)

    def table(self) -> str:
        """Return the rows as aligned lines, in GiB."""
        head = (
            "role",
            "phase",
            "device",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "cache",
            "total",
        )
        lines = [head]
        for row in self.rows:
            parts = (row.weights, row.gradients, row.optimizer, row.activations, row.cache, row.total)
            numbers = [f"{part / GIB:.2f}" if part else "-" for part in parts]
            lines.append((row.role, row.phase, show_devices(row.devices), *numbers))  # type: ignore[arg-type]
        return aligned(lines, frozenset(range(3, len(head))))
