"""``make gpu-check`` in pretense: its stages are reached, and faults where a GPU has them are named."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretended_cuda
import pytest
import torch
from pretended_cuda import PretendedCuda, device_of
from stages_in_process import SMALL, StagesInProcess, machine, run_pretended
from torch import Tensor

from torchrl_grpo.cli.checked_job import compose_job
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Autocast, Dtype
from torchrl_grpo.distributed import parking
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference import noise, transformers_engine
from torchrl_grpo.inference.protocol import Sampling
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.build import build_model
from torchrl_grpo.planning import preflight, speeds
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.tools.gpu_check import generation, kernels, runs, speed, step
from torchrl_grpo.tools.gpu_check.__main__ import run_stage
from torchrl_grpo.tools.gpu_check.results import Status
from torchrl_grpo.tools.gpu_check.runs import Context
from torchrl_grpo.tools.gpu_check.stages import STAGES
from torchrl_grpo.training import learner

pytestmark = pytest.mark.slow

aten = torch.ops.aten
Patch = pytest.MonkeyPatch


@pytest.fixture
def context(tmp_path: Path, tiny_model_dir: Path, monkeypatch: Patch) -> Context:
    monkeypatch.setattr(speeds, "path", lambda: tmp_path / "speeds.json")
    return Context(tmp_path, tiny_model_dir, 1, SMALL, 60.0)


def test_stages_with_sleep_and_a_sweep_in_pretense(context: Context, monkeypatch: Patch) -> None:
    # Of the sweep, the first job is trained where a job leaks.
    stages = FirstRunAgain(monkeypatch, trained=2).stages
    result = run_stage("sleep", STAGES["sleep"], context)
    assert result.status is Status.passed, result.reason
    assert (result.figures["sleep_true_gib"], result.figures["sleep_false_gib"]) == (0.5, 0.7)
    result = run_stage("sweep", STAGES["sweep"], context)
    assert result.status is Status.passed, result.reason
    assert len(stages.configs) == 4
    for cfg in stages.configs:
        assert cfg.inference_model.enforce_eager is False
        assert (cfg.inference_model.dtype, cfg.train_model.autocast) == (Dtype.bfloat16, Autocast.bf16)
    assert [cfg.inference_model.sleep for cfg in stages.configs] == [True, False, True, True]


def test_the_words_of_stages_with_several_gpus(context: Context, monkeypatch: Patch) -> None:
    plans: dict[str, tuple[Config, Plan]] = {}

    def plan(cfg: Config, folder: Path) -> None:
        plans[folder.name] = cfg, preflight.make(cfg, folder.name == "async", machine(2)).plan

    StagesInProcess(monkeypatch, plan, gpus=2)
    monkeypatch.setattr(runs, "check", lambda *args, **named: {})
    names = ("compiled", "ipc", "ipc_peer", "nccl", "tensor_parallel", "async", "ranks")
    # The engines are vLLM's own.
    for name in names:
        result = run_stage(name, STAGES[name], replace(context, gpus=2, words=()))
        assert result.status is Status.passed, result.reason
    assert set(plans) == set(names)
    for name in ("ipc", "ipc_peer", "nccl", "tensor_parallel", "async"):
        cfg = plans[name][0]
        assert cfg.inference_model.enforce_eager is False, "as recipes run engines"
        assert (cfg.inference_model.dtype, cfg.train_model.autocast) == (Dtype.bfloat16, Autocast.bf16)
    cfg, two = plans["tensor_parallel"]
    assert (two.engine_size, cfg.inference_model.enforce_eager) == (2, False)
    assert cfg.inference_model.dtype == Dtype.bfloat16
    cfg, two = plans["ranks"]
    assert (two.num_ranks, cfg.train_model.parallelism, cfg.train_model.autocast) == (2, "fsdp2", "bf16")


RECIPES = sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))
MACHINES = {"cpu": (0, 0.0), "gpu_24gb": (1, 23.2), "gpu_80gb": (1, 79.0), "gpu_8x80gb": (8, 79.0)}


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*((name, False) for name in RECIPES), ("gpu_8x80gb", True)]
)
def test_a_recipe_is_reached_on_its_machine(
    name: str, asynchronous: bool, context: Context, monkeypatch: Patch
) -> None:
    gpus, gib = MACHINES[name]
    stages = StagesInProcess(monkeypatch, lambda cfg, folder: None)
    monkeypatch.setattr(hardware, "present", lambda: machine(gpus, gib))
    made: list[str] = []

    def make(context: Context, what: str, folder: Path) -> runs.Figures:
        made.append(folder.name)
        shutil.copytree(context.model, folder)
        return {}

    monkeypatch.setattr(runs, "measure", make)
    checked: list[bool] = []

    def check(folder: Path, nats: float, steps: int, is_async: bool) -> runs.Figures:
        checked.append(is_async)
        return {"steps": steps}

    monkeypatch.setattr(runs, "check", check)
    stage = STAGES[f"recipe_{name}{'_async' if asynchronous else ''}"]
    result = run_stage(name, stage, replace(context, gpus=gpus, words=()))
    assert result.status is Status.passed and result.figures == {"steps": 20}, result.reason
    assert checked == [asynchronous]
    (cfg,) = stages.configs
    assert cfg.train.total_dialog_turns == 20 * cfg.env.num_envs * cfg.env.repeats
    assert Path(cfg.model.name).name == made[0] == ("tiny" if gpus == 0 else made[0])
    assert (cfg.train_model.lora.rank > 0) == (name == "gpu_24gb")
    if gpus:
        assert made[0].startswith("Qwen2.5-")
        # Its rounds are shorter than the recipe's, whose plan has to be tried all the same.
        whole = compose_job([f"+recipe={name}", f"model.name={cfg.model.name}"], "grpo_gsm8k", None)
        plan = preflight.make(whole, asynchronous, machine(gpus, gib)).plan
        used = preflight.make(cfg, asynchronous, machine(gpus, gib)).plan
        assert (used.sleeps, used.gpu_memory_utilization) == (plan.sleeps, plan.gpu_memory_utilization)
        monkeypatch.setattr(hardware, "present", lambda: machine(gpus, 0.7 * gib))
        assert stage.lacks(replace(context, gpus=gpus)).startswith(f"it needs {gpus} x ")


@pytest.mark.parametrize("fault", [1.0, 2.0])
def test_speed_and_memory_in_pretense(fault: float, context: Context, monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: machine(1))
    monkeypatch.setattr(speed, "_SIZES", {"cuda": (2, 2, 12, 6)})
    monkeypatch.setattr(speed, "gemm_rate", lambda device, dtype, width: 1e12)
    with PretendedCuda(), monkeypatch.context() as patch:
        predicted = speed._predicted_gib(speed._plan(context.model, torch.device("cuda:0")))
        peak = iter([1.0 * predicted["prepare"], fault * predicted["optimize"]])
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30 * next(peak))
        if fault > 1:
            with pytest.raises(
                TrainingStopped, match=r"memory, optimize: .* GiB were used, and .* predicted"
            ):
                speed.speed(context.model)
            return
        figures = speed.speed(context.model)
    assert figures["attention"] == "varlen"
    assert float(figures["kernels"]) > 100 and float(figures["optimize_s"]) > 0
    assert float(figures["product_share"]) == pytest.approx(float(figures["tflops"]))
    assert figures["optimize_predicted_gib"] == predicted["optimize"] > 1


def test_a_model_that_does_not_fit_is_no_fault(context: Context, monkeypatch: Patch) -> None:
    monkeypatch.setattr(hardware, "present", lambda: machine(1, gib=0.5))
    with PretendedCuda(gib=0.5):
        assert "GiB are needed on cuda:0" in str(speed.speed(context.model)["not_run"])


class FirstRunAgain:
    """Trains the first runs of stages; the others are copies of it, but for the memory in use on the GPU.

    Args:
        monkeypatch: of the test.
        trained: number of runs that are trained.
    """

    def __init__(self, monkeypatch: Patch, trained: int = 1) -> None:
        self.stages = StagesInProcess(monkeypatch, self._do)
        self._trained = trained
        self._first: tuple[Path, float] | None = None

    def _do(self, cfg: Config, folder: Path) -> None:
        self._first = self._first or (folder, self.stages.gib)
        if len(self.stages.configs) <= self._trained:
            run_pretended(cfg, folder)
            return
        first, gib = self._first
        shutil.copytree(first, folder, ignore=shutil.ignore_patterns(".hydra"), dirs_exist_ok=True)
        lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.update({k: v + self.stages.gib - gib for k, v in line.items() if k.endswith("_cuda_gib")})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def keep_a_tensor(patch: Patch, stages: StagesInProcess) -> None:
    """A tensor that is not written after the engine has slept."""
    update, wake = TransformersEngine.update, TransformersEngine.wake
    slept: list[bool] = []

    def woken(engine: TransformersEngine) -> None:
        slept.append(engine._asleep)
        wake(engine)

    def stale(engine: TransformersEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
        update(engine, [pair for pair in weights if pair[0] != "model.norm.weight" or not any(slept)])

    patch.setattr(TransformersEngine, "wake", woken)
    patch.setattr(TransformersEngine, "update", stale)


def keep_a_graph(patch: Patch, stages: StagesInProcess) -> None:
    """A graph that was captured with the first weights, and reads them ever after."""
    honest, kept = TransformersEngine._step, list[Any]()

    def captured(engine: TransformersEngine, *inputs: Tensor, **named: Tensor) -> Tensor:
        if not kept:
            kept.append(SimpleNamespace(model=copy.deepcopy(engine.model).to(engine._device)))
        return honest(kept[0], *inputs, **named)

    patch.setattr(TransformersEngine, "_step", captured)


def load_float32(patch: Patch, stages: StagesInProcess) -> None:
    """An engine in another format than the weights that are published to it."""
    patch.setattr(transformers_engine, "resolve_dtype", lambda name, device: torch.float32)


def train_in_bfloat16(patch: Patch, stages: StagesInProcess) -> None:
    """Trained weights, or shards of them, in the format that products are computed in."""
    patch.setattr(learner, "build_model", lambda *args: build_model(*args).bfloat16())


def take_twice_the_memory(patch: Patch, stages: StagesInProcess) -> None:
    """Activations that were forgotten in the prediction."""
    stages.gib = 5.0


def stay_awake(patch: Patch, stages: StagesInProcess) -> None:
    """An engine that sleeps and keeps its memory."""
    patch.setattr(TransformersEngine, "sleep", lambda engine: None)


def leak(patch: Patch, stages: StagesInProcess) -> None:
    """A job that leaves memory behind."""
    run = stages.do

    def leaking(cfg: Config, folder: Path) -> None:
        run(cfg, folder)
        stages.gib += 0.55

    stages.do = leaking


FAULTS_OF_RUNS: dict[str, tuple[str, Callable[[Patch, StagesInProcess], None], str]] = {
    "a stale tensor after sleep": ("sleep", keep_a_tensor, r"the first is model\.norm\.weight"),
    "a graph with old weights": ("sleep", keep_a_graph, "a compiled graph holds a copy of older weights"),
    "an engine in another format": ("sleep", load_float32, "computes in float32, .* published in bfloat16"),
    "shards of another dtype": ("sleep", train_in_bfloat16, "was trained in BF16, and F32 is right"),
    "memory twice the prediction": ("sleep", take_twice_the_memory, r"memory, .*: 5\.20 GiB were used"),
    "an engine that stays awake": ("sleep", stay_awake, r"leaves 0\.70 GiB in use, .* awake 0\.70"),
    "a job that leaks": ("sweep", leak, r"the second job took 1\.05 GiB, and the first 0\.50"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_RUNS)
def test_a_fault_of_a_run_is_named(fault: str, context: Context, monkeypatch: Patch) -> None:
    stage, plant, message = FAULTS_OF_RUNS[fault]
    plant(monkeypatch, FirstRunAgain(monkeypatch).stages)
    with pytest.raises(Exception, match=message):
        STAGES[stage].run(context)


def lose_moments(patch: Patch) -> None:
    """Moments whose memory is freed before their copies have arrived in host memory."""
    honest = parking.MomentParking.park

    def park(own: parking.MomentParking) -> None:
        honest(own)
        for moment in own._host.values():
            moment.zero_()

    patch.setattr(parking.MomentParking, "park", park)


def round_the_head(patch: Patch) -> None:
    """A product whose partial sums are rounded to bfloat16 (``allow_bf16_reduced_precision_reduction``)."""

    def reduced(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        total = torch.zeros(left.shape[0], right.shape[1])
        for first in range(0, left.shape[1], 4):
            part = slice(first, first + 4)
            total = (total + left[:, part].float() @ right[part].float()).bfloat16().float()
        return total

    patch.setitem(pretended_cuda._STAND_INS, aten.mm.dtype, reduced)


def draw_other_noise(patch: Patch) -> None:
    """Integers that overflow otherwise on a GPU."""
    honest = noise.mixed
    patch.setattr(noise, "mixed", lambda keys: honest(keys) + (device_of(keys).type == "cuda") * 2**40)


def multiply_in_tf32(patch: Patch) -> None:
    """Products in float32 that keep 10 bits of their factors on a GPU."""

    def cut(factor: Tensor) -> Tensor:
        if device_of(factor).type != "cuda" or factor.dtype != torch.float32:
            return factor
        return (factor.view(torch.int32) & ~0x1FFF).view(torch.float32)

    for product in (aten.mm.default, aten.bmm.default):
        patch.setitem(
            pretended_cuda._STAND_INS, product, lambda a, b, product=product: product(cut(a), cut(b))
        )


FAULTS_OF_KERNELS: dict[str, tuple[Callable[[Path], runs.Figures], Callable[[Patch], None], str]] = {
    "lost moments": (step.step, lose_moments, "change of .* of parameter"),
    "a rounded head": (step.step, round_the_head, "difference of the head's product"),
    "other noise": (step.step, draw_other_noise, "difference of the noise"),
    "products in TF32": (kernels.scores, multiply_in_tf32, "to_cpu_(nats|gradient) is .* rounding"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_KERNELS)
def test_a_fault_of_a_kernel_is_named(fault: str, context: Context, monkeypatch: Patch) -> None:
    measure, plant, message = FAULTS_OF_KERNELS[fault]
    plant(monkeypatch)
    in_use = iter([8 * 2**30, 0])
    with PretendedCuda(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "memory_allocated", lambda: next(in_use))
        with pytest.raises(TrainingStopped, match=message):
            measure(context.model)


class SlowEngine:
    """Takes 7 ms for a token, and 26 microseconds for each response at a time, of a clock of its own."""

    clock = 0.0

    def generate(self, prompts: Any, sampling: Sampling) -> None:
        assert sampling.ignore_eos and sampling.num_samples == 1
        SlowEngine.clock += 0.5 + sampling.max_new_tokens * (7e-3 + 26e-6 * len(prompts))

    def locate_weights(self, shapes: Any) -> None:
        SlowEngine.clock += 99

    def load_weights(self, weights: Any) -> None:
        SlowEngine.clock += sum(weight.nbytes for _, weight in weights) / 5e9

    def sleep(self) -> None:
        SlowEngine.clock += 0.07

    def wake(self) -> None:
        SlowEngine.clock += 0.02

    def checksums(self) -> None:
        pass

    reset_cache = close = checksums


def test_an_engine_is_measured_for_the_planner(context: Context, monkeypatch: Patch) -> None:
    built: dict[str, Any] = {}
    kept: dict[str, float] = {}

    def build(cfg: Config, source: str, device: torch.device, **options: Any) -> SlowEngine:
        built.update(options, eager=cfg.inference_model.enforce_eager, dtype=cfg.inference_model.dtype)
        return SlowEngine()

    def seconds(work: Callable[[], object]) -> float:
        start = SlowEngine.clock
        work()
        return SlowEngine.clock - start

    monkeypatch.setattr(generation, "build_engine", build)
    monkeypatch.setattr(generation, "seconds", seconds)
    monkeypatch.setattr(generation, "_links", lambda device: {"host_gb_per_s": 20.0})
    monkeypatch.setattr(generation, "keep_speeds", lambda **figures: kept.update(figures))
    with PretendedCuda():
        figures = generation.generation(context.model)
    assert figures == kept and set(figures) <= set(speeds.MEASURED)
    expected = {"engine_ms": 7.0, "response_us": 26.0, "publish_gb_per_s": 5.0, "sleep_s": 0.09}
    assert figures == pytest.approx({**expected, "host_gb_per_s": 20.0})
    assert (built["sleeps"], built["eager"], built["dtype"]) == (True, False, Dtype.bfloat16)


def test_an_engine_of_a_cpu_is_measured_too(context: Context, monkeypatch: Patch) -> None:
    monkeypatch.setattr(generation, "keep_speeds", pytest.fail)
    figures = generation.generation(context.model)
    assert set(figures) == {"engine_ms", "response_us", "publish_gb_per_s"}
    assert all(float(value) > 0 for value in figures.values())
