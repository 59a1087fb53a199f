"""The planner: what it prints in every case of tests/plans.txt, and what holds in all cases."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import answer, dry_run, read

from torchrl_grpo import hardware, planning, validation
from torchrl_grpo.config import Config
from torchrl_grpo.devices import Request, Role, plan, request_of
from torchrl_grpo.devices_plan import Plan, show_devices
from torchrl_grpo.errors import ConfigError

CASES = read()


@pytest.fixture(autouse=True)
def _gpus_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration is read as on a machine with GPUs; how many there are, each case says."""
    monkeypatch.setattr(validation, "cuda_device_present", lambda: True)


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str) -> None:
    assert answer(case) == CASES[case]


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 100
    for gpus, script in itertools.product((6, 8), ("grpo.py", "grpo-async.py")):
        for what in ("num_devices=2", r"devices=\["):
            assert any(
                re.match(rf"{script}, {gpus} GPUs: train_model.{what}.* ref_model", one) for one in CASES
            )


@pytest.mark.parametrize("case", [one for one in CASES if CASES[one].startswith("error")])
def test_what_an_error_says_to_write_is_a_plan(case: str) -> None:
    """As often as there is an error, for several keys may be wrong."""
    asked = case
    for _ in range(3):
        said = answer(asked)
        if not said.startswith("error"):
            return
        key, _, value = said.partition("write ")[2].removesuffix(" instead\n").partition("=")
        changed = re.sub(rf"{re.escape(key)}=\S+", f"{key}={value}", asked)
        asked = changed if changed != asked else f"{asked} {key}={value}"
    pytest.fail(f"{asked}: {said}")


def everything() -> list[tuple[Request, int]]:
    counts = (None, 1, 2, 3)
    return [
        (
            Request(
                Role("train_model", t),
                Role("inference_model", i),
                Role("ref_model", r),
                apart,
                uses_reference=True,
                lora=lora,
                backend=backend,
            ),
            gpus,
        )
        for t, i, r in itertools.product(counts, counts, counts)
        for apart, lora in itertools.product((False, True), (False, True))
        for backend in ("vllm", "transformers")
        for gpus in (1, 2, 4, 6, 9)
    ]


def test_numbers_partition_without_conflict_and_are_what_was_asked_for() -> None:
    planned = 0
    for request, gpus in everything():
        wants = [request.train.count, request.inference.count, 0 if request.lora else request.reference.count]
        try:
            found = plan(request, gpus)
        except ConfigError:
            # Only a role of several devices is ever refused, and only where there are too few.
            assert sum(wants) > gpus and max(wants) > 1
            continue
        planned += 1
        roles = [found.train, found.inference, found.reference][: 2 if request.lora else 3]
        assert [len(role.devices) for role in roles] == wants[: len(roles)]
        used = [name for role in roles for name in role.devices]
        assert set(used) | set(found.idle) == {f"cuda:{gpu}" for gpu in range(gpus)}
        if sum(wants) <= gpus:
            assert len(set(used)) == len(used), "enough for everybody, and two roles share one"
            in_order = sorted(used, key=lambda name: int(name[5:])) == used
            assert in_order or (found.train.devices, found.inference.devices) == (("cuda:1",), ("cuda:0",))
    assert planned > 500


def test_numbers_mean_the_same_to_both_scripts() -> None:
    for request, gpus in everything():
        if request.apart or request.backend == "vllm":
            continue
        results = []
        for apart in (False, True):
            try:
                found = plan(replace(request, apart=apart), gpus)
                results.append((found.train.devices, found.inference.devices, found.reference.devices))
            except ConfigError as error:
                results.append((str(error), (), ()))
        assert results[0] == results[1]


def two(**changes: object) -> Plan:
    return plan(replace(Request(uses_reference=True), **changes), 2)  # type: ignore[arg-type]


def test_names_that_a_run_reads() -> None:
    here = two()
    assert (here.train_device, here.engine_device, here.reference_device) == ("cuda:1", "cuda:0", "cuda:1")
    assert not here.sleeps and not here.colocated and here.tensor_parallel == 1
    apart = two(apart=True)
    assert (apart.train_device, apart.engine_device, apart.worker_gpus) == ("cuda:0", "cuda:0", [1])
    cluster = two(apart=True, cluster=True, inference=Role("inference_model", 4))
    assert (cluster.workers, cluster.worker_gpus, cluster.engine_device) == (4, [], "cuda:0")
    off = two(uses_reference=False)
    assert (off.reference.devices, off.reference_device) == ((), "cuda:1")
    one = plan(Request(), 1)
    assert one.sleeps and one.colocated
    cpu = plan(Request(apart=True), 0)
    assert (cpu.train_device, cpu.engine_device, cpu.worker_gpus) == ("cpu", "cpu", [])


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
        "import sys; from torchrl_grpo import devices, hardware, planning; hardware.present(); "
        "assert not {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


# At run: vLLM in this process


@pytest.mark.parametrize(
    ("devices", "train", "backend", "apart", "refused"),
    [
        ([1], None, "vllm", False, True),
        (None, [0], "vllm", False, True),
        ([0], None, "vllm", False, False),
        ([1], None, "transformers", False, False),
        ([1], None, "vllm", True, False),
        (None, None, "vllm", False, False),
    ],
)
def test_vllm_in_this_process_takes_the_first_gpu(
    devices: list[int] | None, train: list[int] | None, backend: str, apart: bool, refused: bool
) -> None:
    cfg = Config()
    cfg.inference_model.devices, cfg.inference_model.backend = devices, backend
    cfg.train_model.devices = train
    found = plan(request_of(cfg, apart), 2)
    if not refused:
        planning.check_engine_gpu(cfg, found)
        return
    with pytest.raises(
        ConfigError, match=r"inference_model\.devices=.*first GPU .*inference_model\.devices=\[0\]"
    ):
        planning.check_engine_gpu(cfg, found)


# What there is


SMI = "GPU-aa, 81559\nGPU-bb, 40960\nGPU-cc, [N/A]\n"


@pytest.mark.parametrize(
    ("wanted", "expected"),
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
def test_gpus_that_cuda_shows(wanted: str | None, expected: tuple[float | None, ...]) -> None:
    found = hardware.visible(hardware.read_smi(SMI), wanted)
    assert [None if gib is None else round(gib, 1) for gib in found] == list(expected)


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
    text = (Path(__file__).resolve().parents[1] / "docs/devices.md").read_text()
    return dict(re.findall(r"^```\n> (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE))


@pytest.mark.parametrize("case", page_cases())
def test_examples_of_the_page_are_what_is_printed(case: str) -> None:
    assert page_cases()[case] == (dry_run(case) if "GiB" in case else answer(case))


def test_the_page_has_examples() -> None:
    assert len(page_cases()) >= 7
