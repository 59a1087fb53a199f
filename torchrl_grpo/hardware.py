"""GPUs and memory of this machine, asked of the driver and the kernel and not of torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchrl_grpo.errors import ConfigError

_SMI_LIMIT_S = 30


@dataclass(frozen=True)
class Hardware:
    """What there is.

    Attributes:
        gpus: memory of each visible GPU in GiB, in CUDA's order; None where nobody says.
        cpu_gib: memory of the machine that is available to this process; None where nobody says.
    """

    gpus: tuple[float | None, ...] = ()
    cpu_gib: float | None = None


def present() -> Hardware:
    """The hardware that this process may use.

    Raises:
        ConfigError: nvidia-smi does not answer.
    """
    return Hardware(_gpus(), available_gib())


def cpu_has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies matrices faster in bfloat16 than in float32.

    Measured on two cores, GFLOP/s of bfloat16 and float32: 774 and 190 on AMD with AVX512_BF16, 150 and 250
    on Intel with the same instructions and no AMX, 1 and 137 with AVX2. By the processor's name and not by a
    clock, so that a run computes in the same numbers each time it is resumed.
    """
    said = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "amx_bf16" in said or ("avx512_bf16" in said and "AuthenticAMD" in said)


def _gpus() -> tuple[float | None, ...]:
    # This installation of torch would not use them.
    if importlib.metadata.version("torch").endswith("+cpu"):
        return ()
    return visible(_listed(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _listed() -> list[tuple[str, float | None]]:
    """Identifier and memory in GiB of every GPU of the machine."""
    if shutil.which("nvidia-smi") is None:
        return [("", None) for _ in Path("/dev").glob("nvidia[0-9]*")]
    command = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi: no answer within {_SMI_LIMIT_S} s, so nobody knows which GPUs there are; mend the "
            "driver, or write CUDA_VISIBLE_DEVICES= before the command to run on the CPU"
        ) from error
    # Without a driver or without a GPU it says so and fails.
    return read_smi(done.stdout) if done.returncode == 0 else []


def read_smi(text: str) -> list[tuple[str, float | None]]:
    """Identifier and memory in GiB of each GPU out of nvidia-smi's lines ``uuid, MiB``."""
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    return [(uuid, int(mib) / 1024 if mib.strip().isdigit() else None) for uuid, mib in rows]


def visible(listed: list[tuple[str, float | None]], wanted: str | None) -> tuple[float | None, ...]:
    """The GPUs that CUDA shows.

    Args:
        listed: identifier and memory of all.
        wanted: CUDA_VISIBLE_DEVICES: numbers or identifiers; None is all of them. As CUDA does, whatever
            follows one that is not there is left out.
    """
    if wanted is None:
        return tuple(memory for _, memory in listed)
    found: list[float | None] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdigit() and int(entry) < len(listed):
            found.append(listed[int(entry)][1])
        elif entry.startswith("MIG-"):
            # A slice of a GPU; its size stands nowhere that can be read without its driver's library.
            found.append(None)
        elif match := [memory for uuid, memory in listed if entry and uuid.startswith(entry)]:
            found.append(match[0])
        else:
            break
    return tuple(found)


def available_gib(root: Path = Path("/")) -> float | None:
    """Memory in GiB that this process can still take: the machine's, or less where a control group says so.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    found = [int(lines["MemAvailable"].split()[0]) / 2**20, *(room / 2**30 for room in _group_rooms(root))]
    return min(found)


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each control group that this process is in."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        # A limit of any group above holds too; in a container only the groups below its own are to be seen.
        for group in (one for one in (folder, *folder.parents) if one == base or base in one.parents):
            room = _room(group, *names)
            if room is not None:
                yield room


def _room(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    if not (group / limit).exists() or not (group / usage).exists():
        return None
    most = (group / limit).read_text().strip()
    if most == "max":
        return None
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Cached files count as used, and are dropped as soon as somebody needs the memory.
    return int(most) - int((group / usage).read_text()) + int(stat.get(reclaimable, 0))
