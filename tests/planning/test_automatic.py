"""Machines with several GPUs are used whole where the configuration leaves it open."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from slow_cases import slow_except
from test_advice import MACHINES, SHAPES, advised, read

from torchrl_grpo import GRPOTrainer
from torchrl_grpo.cli import main as cli
from torchrl_grpo.config.checks import whole
from torchrl_grpo.distributed import launch
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import Unknown
from torchrl_grpo.planning import automatic, preflight, resolve
from torchrl_grpo.planning.advice import apply
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware

PAGE = Path(__file__).resolve().parents[2] / "benchmarks/MEASURED.md"
SIZES = ("0.5B", "1.5B", "7B", "32B")
SCRIPTS = {"grpo.py": False, "grpo-async.py": True}
EIGHT = Hardware((79.6,) * 8, 900.0, ((9, 0),) * 8)


@pytest.fixture(autouse=True)
def _a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "cuda_device_present", lambda: True)


def of_size(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])


def plan(overrides: str, asynchronous: bool, there: Hardware) -> tuple[str, Planned]:
    """What the command line adds to overrides, and the plan, as before a run."""
    cfg = read(overrides)
    changes = automatic.choose([cfg], asynchronous, there).changes
    return " ".join(automatic.overrides(changes)), preflight.make(apply(cfg, changes), asynchronous, there)


# The table of benchmarks/MEASURED.md


def row(size: str, machine: str, script: str) -> tuple[list[str], list[str]]:
    """A row of the table, and the advice where the model does not fit."""
    number, gib = MACHINES[machine]
    there = Hardware((gib,) * number, 900.0, ((9, 0),) * number)
    chosen, planned = plan("", SCRIPTS[script], there)
    assert planned.prediction is not None
    roles = (planned.plan.train, planned.plan.inference)
    peaks = [planned.prediction.peak(role.devices[0])[0] / 2**30 for role in roles]
    peak = f"{peaks[0]:.0f}" if planned.plan.colocated else f"{peaks[0]:.0f} and {peaks[1]:.0f}"
    head = [size, f"{number} x {round(gib)} GB", f"`{script}`"]
    try:
        preflight.check_memory(planned)
    except ConfigError as error:
        advice = advised(str(error))
        fix = f"too large; `{advice[0]}`" if advice else "too large for this machine"
        return [*head, fix, peak], advice
    assert not planned.plan.idle
    train = "train in shards" if "fsdp2" in chosen else "train"
    if planned.plan.colocated:
        gpus = "the GPU trains and generates" if number == 1 else f"all {number} {train} and generate"
        state = "the engine sleeps" if planned.plan.sleeps else "awake"
        where = f"{gpus}, {state}"
    else:
        where = f"{len(roles[0].devices)} {train}, {len(roles[1].devices)} generate"
    return [*head, where, peak], []


@pytest.mark.slow
def test_the_pages_table_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for size in SIZES:
        of_size(size, monkeypatch)
        for machine in ("1x24", "1x80", "8x80"):
            rows += ["| " + " | ".join(row(size, machine, script)[0]) + " |" for script in SCRIPTS]
    printed = re.findall(r"^\| \d\S*B \| \d x .*$", PAGE.read_text(), re.MULTILINE)
    assert printed == rows, "\n".join(rows)


@pytest.mark.parametrize("size", slow_except(["1.5B"], SIZES))
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_advised_fits_and_leaves_no_gpu_idle(
    size: str, machine: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_size(size, monkeypatch)
    number, gib = MACHINES[machine]
    there = Hardware((gib,) * number, 900.0, ((9, 0),) * number)
    for overrides in row(size, machine, script)[1]:
        _, planned = plan(overrides, SCRIPTS[script], there)
        preflight.check_memory(planned)
        assert not planned.plan.idle, overrides


# What is chosen


@pytest.mark.parametrize(
    ("size", "overrides", "asynchronous", "gpus", "chosen"),
    [
        ("0.5B", "", False, 8, "train_model.num_devices=8"),
        ("0.5B", "", True, 8, "train_model.num_devices=4 inference_model.num_devices=4"),
        ("0.5B", "", False, 2, "train_model.num_devices=2"),
        ("0.5B", "", True, 2, ""),
        ("0.5B", "", False, 1, ""),
        ("1.5B", "", False, 8, "train_model.num_devices=8"),
        # Both do not fit on a GPU of 80 GB with a fifth to spare, but a shard and an engine do.
        ("3B", "", False, 8, "train_model.num_devices=8 train_model.parallelism=fsdp2"),
        (
            "7B",
            "",
            True,
            8,
            "train_model.num_devices=4 inference_model.num_devices=4 train_model.parallelism=fsdp2",
        ),
        # An engine takes little longer with three groups than with two.
        ("1.5B", "policy.kl_coef=0.1", True, 8, "train_model.num_devices=4 inference_model.num_devices=4"),
        ("0.5B", "policy.kl_coef=0.1 ref_model.num_devices=2", True, 8, None),
        # One number is open.
        ("0.5B", "train_model.num_devices=2", True, 8, "inference_model.num_devices=6"),
        ("0.5B", "train_model.num_devices=2", False, 8, "inference_model.num_devices=6"),
        # The GPU of a reward model is left alone.
        (
            "0.5B",
            "train_model.num_devices=2 reward.functions.rm=hf:o/m reward.args.rm.device=cuda:0",
            True,
            8,
            "inference_model.num_devices=5",
        ),
        ("0.5B", "inference_model.num_devices=6", True, 8, "train_model.num_devices=2"),
        ("0.5B", "train_model.num_devices=8", False, 8, ""),
        # More ranks or engines than groups have nothing to do.
        (
            "0.5B",
            "env.num_envs=2 train.total_dialog_turns=16",
            False,
            8,
            "train_model.num_devices=2 inference_model.num_devices=2",
        ),
        # The user has decided.
        ("0.5B", "train_model.num_devices=2 inference_model.num_devices=2", False, 8, ""),
        ("0.5B", "train_model.devices=[0]", False, 8, ""),
        ("0.5B", "inference_model.devices=[3]", False, 8, ""),
        ("0.5B", "allocation_mode=vllm:d2+fsdp:d2", True, 8, ""),
        ("0.5B", "ray.address=auto", True, 8, ""),
        ("7B", "train_model.parallelism=ddp", False, 8, ""),
        # Six GPUs are three engines.
        (
            "0.5B",
            "inference_model.backend=vllm_server inference_model.tensor_parallel_size=2",
            True,
            8,
            "train_model.num_devices=2 inference_model.num_devices=6",
        ),
        # Servers that run elsewhere leave all GPUs to the trainer.
        (
            "0.5B",
            "inference_model.backend=vllm_server inference_model.servers=[http://127.0.0.1:1]",
            False,
            4,
            "train_model.num_devices=4",
        ),
        ("32B", "", False, 8, ""),
    ],
)
def test_choices(
    size: str,
    overrides: str,
    asynchronous: bool,
    gpus: int,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_size(size, monkeypatch)
    there = Hardware(EIGHT.gpus[:gpus], 900.0, ((9, 0),) * gpus)
    choice, planned = plan(overrides, asynchronous, there)
    if chosen is None:
        assert not planned.plan.idle and len(planned.plan.reference.devices) == 2
    else:
        assert choice == chosen


FOUR = "train_model.num_devices=4 inference_model.num_devices=4"
SHARDS = "train_model.parallelism=fsdp2"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("size", "overrides", "gpus", "chosen"),
    [
        ("llama-7B", FOUR, 8, SHARDS),
        (
            "llama-7B",
            "train_model.num_devices=2 inference_model.num_devices=2 ref_model.num_devices=2 "
            "policy.kl_coef=0.1",
            6,
            SHARDS,
        ),
        ("7B", "train_model.devices=[0,1,2,3] inference_model.devices=[4,5,6,7]", 8, SHARDS),
        ("7B", "train_model.devices=[4,5,6,7] inference_model.devices=[0]", 8, SHARDS),
        ("7B", "inference_model.devices=[4,5,6,7]", 8, f"train_model.num_devices=4 {SHARDS}"),
        ("7B", "train_model.num_devices=4 ray.address=auto", 4, SHARDS),
        (
            "7B",
            f"{FOUR} inference_model.backend=vllm_server inference_model.tensor_parallel_size=2",
            8,
            SHARDS,
        ),
        # All of them train, and nothing is left for engines.
        ("7B", "train_model.num_devices=8", 8, SHARDS),
        # The whole model fits, or the user has decided.
        ("1.5B", FOUR, 8, ""),
        ("7B", f"{FOUR} train_model.lora.rank=16", 8, ""),
        ("7B", f"{FOUR} train_model.parallelism=ddp", 8, ""),
        # Each rank loads the whole model first.
        ("32B", FOUR, 8, ""),
    ],
)
def test_numbers_that_are_given_are_trained_in_shards_if_nothing_else_fits(
    size: str, overrides: str, gpus: int, chosen: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_size(size, monkeypatch)
    there = Hardware(EIGHT.gpus[:gpus], 900.0, ((9, 0),) * gpus)
    choice, planned = plan(overrides, asynchronous, there)
    assert choice == chosen
    if chosen:
        preflight.check_memory(planned)
        assert planned.plan.num_ranks > 1


def test_ranks_of_a_launcher_hold_shards_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    of_size("7B", monkeypatch)
    # Two machines with four GPUs each.
    for name, value in {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    four = Hardware(EIGHT.gpus[:4], 900.0, ((9, 0),) * 4)
    for size, words, chosen in (
        ("7B", "", SHARDS),
        ("1.5B", "", ""),
        ("7B", "train_model.parallelism=ddp", ""),
        ("7B", "train_model.lora.rank=16", ""),
        ("7B", "optimizer.name=muon", SHARDS),
        ("7B", "optimizer.name=adamw_8bit", ""),
    ):
        of_size(size, monkeypatch)
        cfg = resolve.resolved(read(f"inference_model.backend=transformers {words}"))
        changes = automatic.choose([cfg], False, four).changes
        assert " ".join(automatic.overrides(changes)) == chosen
    changes = ((SHARDS.partition("=")[0], "fsdp2"),)
    cfg = resolve.resolved(read("inference_model.backend=transformers"))
    of_8 = preflight.replan(apply(cfg, changes), False, four, SHAPES["7B"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    of_4 = preflight.replan(apply(cfg, changes), False, four, SHAPES["7B"])
    assert (
        of_8 is not None and of_4 is not None and of_8.prediction is not None and of_4.prediction is not None
    )
    weights = [
        next(row.weights for row in prediction.rows if (row.role, row.phase) == ("train", "optimize"))
        for prediction in (of_8.prediction, of_4.prediction)
    ]
    assert weights[0] == weights[1] / 2


def test_a_trainer_in_python_holds_shards_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    of_size("7B", monkeypatch)
    monkeypatch.setattr(hardware, "present", lambda: Hardware(EIGHT.gpus[:4], 900.0, ((9, 0),) * 4))
    config = {"inference_model.backend": "transformers", "train.total_dialog_turns": 64}
    for rank in ("0", "1"):
        for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": rank}.items():
            monkeypatch.setenv(name, value)
        trainer = GRPOTrainer("some/model", config=config, output_dir=tmp_path)
        assert trainer.cfg.train_model.parallelism == "fsdp2"
        output = capsys.readouterr().out
        assert (f"devices: auto chose {SHARDS}\n" in output) is (rank == "0")


def test_a_model_of_unknown_size_shares_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: Unknown("no config.json"))
    choice, planned = plan("model.name=some/model", False, EIGHT)
    assert choice == "train_model.num_devices=4 inference_model.num_devices=4"
    assert not planned.plan.colocated


def test_jobs_of_a_sweep_run_in_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_size("0.5B", monkeypatch)
    few = read("env.num_envs=2 train.total_dialog_turns=16")
    both = automatic.overrides(automatic.choose([read(""), few], False, EIGHT).changes)
    assert both == ["train_model.num_devices=2", "inference_model.num_devices=2"]
    assert automatic.choose([read(""), read("train_model.devices=[0]")], False, EIGHT).changes == ()


# The command line


def test_ranks_are_started_with_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    of_size("0.5B", monkeypatch)
    monkeypatch.setattr(hardware, "present", lambda: EIGHT)
    started: list[tuple[list[str], int]] = []

    def start(argv: Sequence[str], count: int) -> int:
        started.append((list(argv), count))
        return 0

    monkeypatch.setattr(launch, "launch", start)
    overrides = [
        "model.name=smollm2-135m",
        "inference_model.backend=transformers",
        f"hydra.run.dir={tmp_path}/run",
    ]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *overrides])
    with pytest.raises(SystemExit) as ended:
        cli.main(cli.Command("unused:run"))
    assert ended.value.code == 0
    assert started == [([*overrides, "train_model.num_devices=8"], 8)]
    assert capsys.readouterr().out == "devices: auto chose train_model.num_devices=8\n"
    assert not (tmp_path / "run").exists()


# Sleep


@pytest.mark.parametrize(
    ("size", "gib", "overrides", "sleeps"),
    [
        ("0.5B", 79.6, "", False),
        ("0.5B", 23.99, "", True),
        ("1.5B", 79.6, "", False),
        ("3B", 79.6, "", True),
        ("0.5B", 79.6, "inference_model.sleep=true", True),
        ("0.5B", 23.99, "inference_model.sleep=false", False),
    ],
)
def test_the_engine_sleeps_only_where_memory_asks_for_it(
    size: str, gib: float, overrides: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_size(size, monkeypatch)
    _, planned = plan(overrides, False, Hardware((gib,), 900.0, ((9, 0),)))
    assert planned.plan.sleeps is sleeps
    assert planned.plan.inference.why.endswith("sleeps" if sleeps else "stays awake")
