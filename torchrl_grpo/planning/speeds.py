"""How fast a GPU is: what ``make gpu-check`` measured on this machine, or a table. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models import smollm2
from torchrl_grpo.runtime.files import shared_files
from torchrl_grpo.runtime.hardware import Hardware

# The fields of Speeds that make gpu-check measures.
MEASURED = (
    *("tflops", "tflops_float32", "tb_per_s", "layer_ms", "link_gb_per_s", "engine_ms", "response_us"),
    *("publish_gb_per_s", "sleep_s", "host_gb_per_s"),
)


@dataclass(frozen=True)
class Speeds:
    """Speeds of a GPU, and where the numbers are from.

    Attributes:
        source: source of the numbers, for users.
        tflops: TFLOP/s of large products in bfloat16.
        tflops_float32: the same in float32.
        tb_per_s: TB/s of the GPU's memory, reads and writes together.
        link_gb_per_s: GB/s from one GPU of the machine to another.
        layer_ms: ms that a CPU takes to launch the kernels of a layer, forward and backward. The default is
            an estimate: 190 kernels, at 10 microseconds each.
        engine_ms: ms of a step of vLLM with CUDA graphs; an H100's by default, as all that follow.
        response_us: microseconds that each response at a time adds to it.
        publish_gb_per_s: GB/s at which an engine loads and verifies new weights on a GPU.
        sleep_s: seconds to free the engine's memory and take it back.
        host_gb_per_s: GB/s between the memory of the host and that of the GPU.
    """

    source: str
    tflops: float
    tflops_float32: float
    tb_per_s: float
    link_gb_per_s: float
    layer_ms: float = 1.9
    engine_ms: float = 7.0
    response_us: float = 26.0
    publish_gb_per_s: float = 5.0
    sleep_s: float = 0.1
    host_gb_per_s: float = 20.0


# Part of nvidia-smi's name -> NVIDIA's data sheet: dense TFLOP/s in bfloat16 (of a T4 in float16) and in
# float32, TB/s of memory, and GB/s to another GPU (NVLink, or 16 lanes of PCIe). The first match counts.
_DATA_SHEETS = {
    "B200": (2250, 75, 7.7, 900),
    "H200": (989, 67, 4.8, 450),
    "H100 PCIe": (756, 51, 2.0, 64),
    "H100 NVL": (835, 60, 3.9, 300),
    "H100": (989, 67, 3.35, 450),
    "A100": (312, 19.5, 2.0, 300),
    "L40S": (362, 91.6, 0.86, 32),
    "L40": (181, 90.5, 0.86, 32),
    "A10G": (70, 31.5, 0.6, 32),
    "A10": (125, 31.2, 0.6, 32),
    "L4": (121, 30.3, 0.3, 32),
    "RTX 5090": (209, 105, 1.79, 64),
    "RTX 4090": (165, 82.6, 1.01, 32),
    "RTX 3090": (71, 35.6, 0.94, 32),
    "T4": (65, 8.1, 0.32, 16),
}
# Shares of its data sheet that the H100 of benchmarks/MEASURED.md reached. Others are assumed to reach them.
_REACHED, _REACHED_FLOAT32, _REACHED_MEMORY = 737 / 989, 50.9 / 67, 2.88 / 3.35


def of(hardware: Hardware) -> Speeds:
    """Return the speeds of the first GPU of a machine.

    Those of an unknown GPU are an H100's. They can compare plans, but all seconds are wrong by some factor.

    Raises:
        ConfigError: the file with measured speeds is damaged or cannot be read.
    """
    name = hardware.names[0] if hardware.names else ""
    part = next((part for part in _DATA_SHEETS if part in name), None)
    products, float32, memory, link = _DATA_SHEETS[part or "H100"]
    source = f"{name}, by its data sheet and what an H100 reached of its own"
    if part is None:
        source = f"an H100, because those of {name or 'this GPU'} are not known; make gpu-check measures them"
    elif part == "H100":
        source = f"{name}, as measured for benchmarks/MEASURED.md"
    table = Speeds(
        source, _REACHED * products, _REACHED_FLOAT32 * float32, _REACHED_MEMORY * memory, float(link)
    )
    measured = _read().get(name)
    if measured is None:
        return table
    if "tflops" in measured:
        source = f"{name}, as measured by make gpu-check"
    return replace(table, **{"source": source, **measured})  # type: ignore[arg-type]


def write(name: str, figures: Mapping[str, float]) -> None:
    """Keep what was measured of a GPU for the plans of later runs.

    Args:
        name: name of the GPU.
        figures: fields of :class:`Speeds` -> what was measured; other names are left out.
    """
    kept = _read()
    kept.setdefault(name, {}).update({field: figures[field] for field in MEASURED if field in figures})
    path().parent.mkdir(parents=True, exist_ok=True)
    shared_files.replace(path(), json.dumps(kept, indent=1) + "\n")


def path() -> Path:
    """Return the file with measured speeds."""
    return smollm2.default_cache_dir() / "gpu_speeds.json"


def _read() -> dict[str, dict[str, float]]:
    try:
        if not path().is_file():
            return {}
        kept = {
            str(name): {field: float(entry[field]) for field in MEASURED if field in entry}
            for name, entry in json.loads(path().read_bytes()).items()
        }
        for name, entry in kept.items():
            # Seconds are divided by speeds.
            if wrong := [value for value in entry.values() if not 0 < value < math.inf]:
                raise ValueError(f"a speed of {name} is {wrong[0]}")
    except OSError as error:
        raise ConfigError(f"{path()}: the file cannot be read ({error.strerror}); delete it") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path()}: the file is damaged ({error}); delete it") from error
    return kept
