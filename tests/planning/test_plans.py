"""The chosen plan is the fastest by the planner's own prediction, which agrees with measured steps."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slow_cases import slow_except
from test_advice import SHAPES, read
from test_recipes import read as recipe

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import whole
from torchrl_grpo.config.values import Parallelism
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning import automatic, memory, placement, preflight, sizes, speeds, token_budget
from torchrl_grpo.planning.advice import apply
from torchrl_grpo.planning.cost import Cost, cost_of
from torchrl_grpo.planning.plan import OWN_GPU
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.planning.token_budget import Budget
from torchrl_grpo.runtime.hardware import Hardware

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {"1x24": (1, 23.99), "1x80": (1, 79.6), "8x80": (8, 79.6)}
TEXTS = {
    "default": "",
    "long": "env.num_envs=64 inference_model.max_model_len=2048 inference_model.max_new_tokens=1536",
}


@pytest.fixture(autouse=True)
def _a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(whole, "cuda_device_present", lambda: True)
    # No machine's own measurements.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def there(machine: str, name: str = "NVIDIA H100 80GB HBM3") -> Hardware:
    number, gib = MACHINES[machine]
    return Hardware((gib,) * number, 900.0, ((9, 0),) * number, (), (name,) * number)


def chosen(
    cfg: Config, size: str, asynchronous: bool, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> Planned:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES[size])
    changes = automatic.choose([cfg], asynchronous, machine).changes
    return preflight.make(apply(cfg, changes), asynchronous, machine)


def every_plan(cfg: Config, size: str, asynchronous: bool, machine: Hardware) -> Iterator[Planned]:
    """All divisions, shares and budgets with which vLLM starts and the trainer has a fifth to spare.

    An independent search: it places roles and predicts memory for each combination, without a rule about
    which of them are worth a look.
    """
    gpus = len(machine.gpus)
    counts: list[tuple[int | str, int | str]] = [("auto", "auto"), (gpus, "auto")]
    counts += [(ranks, engines) for ranks in range(1, gpus) for engines in range(1, gpus - ranks + 1)]
    for (ranks, engines), kind in itertools.product(counts, (Parallelism.auto, Parallelism.fsdp2)):
        train = replace(cfg.train_model, num_devices=ranks, parallelism=kind)
        inference = replace(cfg.inference_model, num_devices=engines)
        divided = replace(cfg, train_model=train, inference_model=inference)
        request = build_request(divided, asynchronous)
        if gpus == 1 and (ranks != "auto" or kind != "auto"):
            continue
        if kind == Parallelism.fsdp2 and cfg.train_model.lora.rank > 0:
            continue
        # Beside no trainer a share matters little, so fewer of them are enough there.
        shares = [step / 20 for step in (range(1, 18) if engines == "auto" else (5, 9, 13, 17))]
        for share, sleeps in itertools.product(shares, (False, True)):
            variant = replace(request, gpu_memory_utilization=share, sleep=sleeps)
            try:
                plan = placement.plan(variant, gpus)
            except ConfigError:
                continue
            for tokens in (2**power for power in range(12, 17)):
                plan = replace(plan, token_budget=tokens)
                needs = memory.predict(token_budget.with_budget(divided, tokens), plan, SHAPES[size], machine)
                planned = Planned(
                    divided, plan, asynchronous, machine, SHAPES[size], needs, Budget(tokens, "")
                )
                least = planned.least_share
                if (
                    least is not None
                    and share > least
                    and sizes.fits(planned, 1.0 if sleeps else sizes.SPARE)
                ):
                    yield planned


CASES = list(itertools.product(("0.5B", "1.5B", "7B", "32B"), MACHINES, (False, True), TEXTS))
CASES += [("1.5B", "1x80", True, "servers"), ("1.5B", "8x80", False, "servers")]
# Where all weights are too many.
ADAPTERS = [("1.5B", "1x24"), ("7B", "1x80"), ("7B", "8x80"), ("32B", "8x80")]
CASES += [(*case, asynchronous, "adapters") for case in ADAPTERS for asynchronous in (False, True)]
CASES += [
    (size, "8x80", asynchronous, "reference") for size in ("1.5B", "7B") for asynchronous in (False, True)
]


@pytest.mark.parametrize(
    ("size", "machine", "asynchronous", "texts"),
    slow_except([case for case in CASES if case[:2] == ("1.5B", "1x80")], CASES),
)
def test_no_plan_that_fits_is_much_faster(
    size: str, machine: str, asynchronous: bool, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {
        **TEXTS,
        "servers": "inference_model.backend=vllm_server env.num_envs=64",
        "adapters": "env.num_envs=64 train_model.lora.rank=16 train_model.gradient_checkpointing=true",
        "reference": "env.num_envs=64 policy.kl_coef=0.1",
    }
    cfg, hardware = read(words[texts]), there(machine)
    planned = chosen(cfg, size, asynchronous, hardware, monkeypatch)
    steps = [cost.step for other in every_plan(cfg, size, asynchronous, hardware) if (cost := cost_of(other))]
    cost = cost_of(planned)
    assert cost is not None
    if steps:
        assert cost.step <= 1.05 * min(steps)
    elif sizes.fits(planned):
        # It has less than a fifth to spare, where nothing has more.
        assert not sizes.fits(planned, sizes.SPARE)


def groups(planned: Planned) -> int:
    """The length of a round in groups, one after the other or at the same time."""
    number, plan = planned.cfg.env.num_envs, planned.plan
    train, generate = -(-number // len(plan.train.devices)), -(-number // plan.num_engines)
    return max(train, generate) if planned.asynchronous else train + generate


@pytest.mark.parametrize(
    ("name", "size", "kind"), [("gpu_80gb", "1.5B", "ddp"), ("gpu_8x80gb", "7B", "fsdp2")]
)
def test_recipes_use_eight_gpus_for_training_and_generation(
    name: str, size: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, hardware = recipe("grpo_gsm8k", f"+recipe={name}"), there("8x80")
    planned = chosen(cfg, size, False, hardware, monkeypatch)
    # The plan of earlier versions, and their recipe.
    four = ["train_model.num_devices=4", "inference_model.num_devices=4", f"train_model.parallelism={kind}"]
    earlier = recipe("grpo_gsm8k", f"+recipe={name}", "train_model.compile=false", *four)
    divided = preflight.make(earlier, False, hardware)
    assert groups(divided) >= 1.8 * groups(planned)
    assert planned.plan.colocated and sizes.fits(planned, sizes.SPARE)
    # All GPUs in turn, as if they had memory for any share and micro-batch: no plan of grpo.py is faster.
    budget, everything = Budget(token_budget.MOST, ""), replace(planned.plan, gpu_memory_utilization=OWN_GPU)
    endless = replace(planned, plan=everything, budget=budget)
    plans = {"4 train, 4 generate": divided, "chosen": planned, "chosen, with endless memory": endless}
    rows, seconds, page = list[str](), list[float](), (ROOT / "benchmarks/MEASURED.md").read_text()
    for words, plan in plans.items():
        cost = cost_of(plan)
        assert cost is not None
        seconds.append(cost.step)
        phases = f"{cost.generate:.2f} | {cost.train:.2f} | {cost.publish:.2f} | {cost.step:.2f}"
        ratio = seconds[0] / cost.step
        rows.append(f"| {words} | `{name}` | {groups(plan)} | {phases} | {ratio:.2f} |\n")
    assert seconds[2] <= seconds[1] <= 1.05 * seconds[2]
    assert "".join(rows) in page, "".join(rows)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inference_model.gpu_memory_utilization", 0.6),
        ("inference_model.sleep", True),
        ("inference_model.sleep", False),
        ("train.max_tokens_per_microbatch", 5000),
    ],
)
def test_what_the_configuration_sets_stays(
    key: str, value: float | bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = chosen(read(f"{key}={value}"), "0.5B", False, there("1x80"), monkeypatch)
    plan = planned.plan
    assert value in (plan.gpu_memory_utilization, plan.sleeps, planned.budget.tokens)
    usual = chosen(read(""), "0.5B", False, there("1x80"), monkeypatch).plan
    assert (usual.gpu_memory_utilization, usual.sleeps) == (0.15, False)


# Against figures of an H100


def measured(
    shape: ModelShape, attention: str, monkeypatch: pytest.MonkeyPatch, compiled: bool = False
) -> Planned:
    words = "env.repeats=8 inference_model.max_model_len=712 inference_model.max_new_tokens=512 "
    words += f"train_model.prefix_attention={attention} inference_model.sleep=false "
    words += f"train_model.compile={compiled}"
    monkeypatch.setattr(preflight, "read_shape", lambda model: shape)
    return preflight.make(read(words), False, there("1x80"))


def test_predicted_seconds_are_near_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = json.loads((ROOT / "benchmarks/gpu/h100.json").read_text())
    shapes = {"0.5b": SHAPES["0.5B"], "135m": ModelShape(134_515_008, 49_152, 576, 30, 1536, 576, 192)}
    for step in figures["training"]:
        attention = "auto" if step["attention"] == "varlen" else "dense"
        cost = cost_of(measured(shapes[step["shape"]], attention, monkeypatch, step["compiled"]))
        assert cost is not None
        assert 0.75 < cost.train / step["step_s"] < 1.25, step
    cost = cost_of(measured(shapes["0.5b"], "auto", monkeypatch))
    seconds = {
        phase: sorted(step[f"time/{phase}_s"] for step in figures["runs"]["cuda_graphs"])
        for phase in ("generate", "publish")
    }
    assert cost is not None
    assert seconds["generate"][0] < cost.generate < seconds["generate"][-1]
    assert seconds["publish"][0] < cost.publish < seconds["publish"][-1]


# Speeds


def test_a_gpu_has_the_speeds_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {
        name: speeds.of(there("1x80", name)) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA X")
    }
    assert [round(speed.tflops) for speed in of.values()] == [233, 270, 737]
    assert "by its data sheet" in of["NVIDIA L40S"].source
    assert "make gpu-check measures them" in of["NVIDIA X"].source
    assert speeds.of(Hardware((80.0,))).tflops == of["NVIDIA X"].tflops


def test_measured_speeds_are_kept_and_used(tmp_path: Path) -> None:
    speeds.write("NVIDIA X", {"tflops": 100.0, "tb_per_s": 1.0, "gpus": 8.0})
    speeds.write("NVIDIA X", {"layer_ms": 3.0})
    speed = speeds.of(there("1x80", "NVIDIA X"))
    assert (speed.tflops, speed.tb_per_s, speed.layer_ms) == (100.0, 1.0, 3.0)
    assert speed.source == "NVIDIA X, as measured by make gpu-check"
    assert speeds.path().is_relative_to(tmp_path)
    speeds.path().write_text('{"NVIDIA X": 1}')
    with pytest.raises(ConfigError, match=r"gpu_speeds\.json: the file is damaged .*; delete it"):
        speeds.of(there("1x80"))


@pytest.mark.parametrize("value", ["0", "-5", "NaN", "Infinity", "9" * 400, "[" * 100_000])
def test_speeds_that_no_gpu_has_are_refused(value: str) -> None:
    speeds.path().parent.mkdir(parents=True)
    speeds.path().write_text(f'{{"NVIDIA X": {{"tflops": {value}}}}}')
    with pytest.raises(ConfigError, match=r"gpu_speeds\.json: the file is damaged .*; delete it"):
        speeds.of(there("1x80"))


def test_the_speeds_of_an_engine_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(**measured: float) -> Cost:
        speeds.write("NVIDIA H100 80GB HBM3", measured)
        planned = chosen(read("inference_model.sleep=true"), "0.5B", False, there("1x80"), monkeypatch)
        predicted = cost_of(planned)
        assert predicted is not None
        return predicted

    usual = cost()
    slower = cost(engine_ms=21.0, response_us=78.0, publish_gb_per_s=2.5, sleep_s=1.1)
    assert slower.generate == pytest.approx(3 * usual.generate, rel=0.02), "but for the prompts"
    assert slower.publish == pytest.approx(2 * (usual.publish - 0.1) + 1.1)
    assert slower.train == usual.train


def test_speeds_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    speeds.write("NVIDIA X", {"tflops": 100.0})
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); delete it"):
        speeds.of(there("1x80"))


# The report


def test_a_dry_run_compares_the_best_two_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, hardware = recipe("grpo_gsm8k", "+recipe=gpu_8x80gb"), there("8x80")
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["7B"])
    choice = automatic.choose([cfg], False, hardware)
    preflight.report(apply(cfg, choice.changes), False, hardware, choice.other)
    *_, why, head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["plan", "share", "tokens", "generate", "prepare", "train", "publish", "seconds"]
    assert first.startswith("1. 8 GPUs train in shards and generate, awake")
    assert second.startswith("2. 5 train in shards, 3 generate")
    numbers = [[float(cell) for cell in line.split()[-5:]] for line in (first, second)]
    for *phases, total in numbers:
        assert sum(phases) == pytest.approx(total, abs=0.03)
    ratio = f"{numbers[1][-1] / numbers[0][-1]:.2f}"
    assert why.startswith(f"The first plan was chosen: it is {ratio} times as fast (generate ")


PAGE = [
    ("gpu_24gb", "1.5B", "1x24", "NVIDIA GeForce RTX 4090"),
    ("gpu_80gb", "1.5B", "1x80", "NVIDIA H100 80GB HBM3"),
    ("gpu_80gb", "1.5B", "8x80", "NVIDIA H100 80GB HBM3"),
    ("gpu_8x80gb", "7B", "8x80", "NVIDIA H100 80GB HBM3"),
]


@pytest.mark.slow
def test_the_pages_table_is_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for (name, size, machine, gpu), script in itertools.product(PAGE, ("grpo.py", "grpo-async.py")):
        monkeypatch.setattr(preflight, "read_shape", lambda model, size=size: SHAPES[size])
        cfg, hardware = recipe("grpo_gsm8k", f"+recipe={name}"), there(machine, gpu)
        changes = automatic.choose([cfg], script != "grpo.py", hardware).changes
        preflight.report(apply(cfg, changes), script != "grpo.py", hardware)
        (line,) = re.findall(r"^1\. (.*)$", capsys.readouterr().out, re.MULTILINE)
        words, *numbers = re.split("  +", line)
        gpus = (
            f"{len(hardware.gpus)} x {gpu.removeprefix('NVIDIA ').removeprefix('GeForce ').split(' 80GB')[0]}"
        )
        rows.append(f"| `{name}` | {gpus} | `{script}` | {words} | {' | '.join(numbers)} |")
    page = (ROOT / "benchmarks/MEASURED.md").read_text()
    assert re.findall(r"^\| `gpu_.*$", page, re.MULTILINE) == rows, "\n".join(rows)


def test_one_gpu_compares_sleep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["0.5B"])
    preflight.report(read(""), False, there("1x80"))
    *_, first, second = capsys.readouterr().out.splitlines()
    assert "awake" in first and "sleeps" in second


@pytest.mark.parametrize("machine", [Hardware((), 64.0), there("1x80")])
def test_no_seconds_are_shown_where_nothing_was_measured(
    machine: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SHAPES["0.5B"])
    preflight.report(read("inference_model.backend=transformers"), False, machine)
    assert "seconds" not in capsys.readouterr().out
