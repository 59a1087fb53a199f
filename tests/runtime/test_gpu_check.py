"""``make gpu-check``: results are written at once, faults are found, and what a machine lacks is skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from batches import inputs, make_batch
from forked import ForkedPopen
from omegaconf import OmegaConf
from pretended_cuda import PretendedCuda
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import whole
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.scoring import varlen
from torchrl_grpo.models.scoring.scores import TokenScores
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.planning import speeds
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware
from torchrl_grpo.tools.gpu_check import __main__ as command
from torchrl_grpo.tools.gpu_check import kernels, runs, shapes, step
from torchrl_grpo.tools.gpu_check.results import Result, Status, line, table, write
from torchrl_grpo.tools.gpu_check.runs import Context
from torchrl_grpo.tools.gpu_check.stages import STAGES, Stage
from torchrl_grpo.tools.processes import family
from torchrl_grpo.tools.verify_resume import read


@pytest.fixture
def context(tmp_path: Path, tiny_model_dir: Path) -> Context:
    return Context(tmp_path, tiny_model_dir, 0, [], 60.0)


def test_each_result_is_written_before_the_next_stage(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def look(context: Context) -> runs.Figures:
        path = context.folder / command.RESULTS
        seen.append([entry["stage"] for entry in json.loads(path.read_text())] if path.exists() else [])
        return {"speed": 2.5, "gpu": "none"}

    def fail(context: Context) -> runs.Figures:
        raise TrainingStopped("it is wrong")

    chosen = {"one": Stage(look, ""), "two": Stage(fail, ""), "three": Stage(look, "", lambda _: "no GPU")}
    monkeypatch.setattr(command, "STAGES", {**chosen, "four": Stage(look, "")})
    code = command.main(["--folder", str(tmp_path), "--model", str(tiny_model_dir)])
    assert code == 1
    assert seen == [[], ["one", "two", "three"]]
    by_stage = {entry["stage"]: entry for entry in json.loads((tmp_path / command.RESULTS).read_text())}
    assert [by_stage[name]["status"] for name in ("one", "two", "three", "four")] == [
        "passed", "failed", "skipped", "passed",
    ]  # fmt: skip
    assert (
        by_stage["two"]["reason"] == "TrainingStopped: it is wrong"
        and by_stage["one"]["figures"]["speed"] == 2.5
    )
    output = capsys.readouterr().out
    assert "speed 2.5, gpu none" in output and output.count("it is wrong") == 2 and "no GPU" in output


def test_stages_can_be_chosen(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def note(name: str) -> Stage:
        return Stage(lambda context: ran.append(name) or {}, "")  # type: ignore[func-returns-value]

    monkeypatch.setattr(command, "STAGES", {name: note(name) for name in "abc"})
    common = ["--folder", str(tmp_path), "--model", str(tiny_model_dir)]
    assert command.main(["--only", "c", "a", *common]) == 0
    assert command.main(["--skip", "b", *common]) == 0
    assert command.main(["optimizer.lr=0.1", *common, "--only", "b", "a", "--skip", "b"]) == 0
    assert ran == ["c", "a", "a", "c", "a"]
    assert command.main(["--model", "/nowhere", "--folder", str(tmp_path)]) == 1


def test_overrides_follow_stages_too(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Context] = []
    stage = Stage(lambda context: seen.append(context) or {}, "")  # type: ignore[func-returns-value]
    monkeypatch.setattr(command, "STAGES", dict.fromkeys("ab", stage))
    common = ["--folder", str(tmp_path), "--model", str(tiny_model_dir)]
    assert command.main(["x=1", *common, "--only", "b", "+y=2", "~z", "--skip", "a", "w=3"]) == 0
    assert [context.words for context in seen] == [["x=1", "+y=2", "~z", "w=3"]]
    with pytest.raises(SystemExit):
        command.main([*common, "--only", "c"])
    assert "c: there is no such stage; write one of a, b" in capsys.readouterr().err


@pytest.mark.slow
def test_stages_that_no_longer_fit_are_skipped_by_name(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleeps(context: Context) -> runs.Figures:
        runs.call(context, "sleeps", [sys.executable, "-c", "import signal; signal.pause()"])
        return {}

    chosen = {
        "cut": Stage(sleeps, "", takes_s=0.1),
        "long": Stage(sleeps, ""),
        "short": Stage(lambda _: {}, "", takes_s=-9),
    }
    monkeypatch.setattr(command, "STAGES", chosen)
    common = ["--folder", str(tmp_path), "--model", str(tiny_model_dir)]
    assert command.main([*common, "--seconds", "1"]) == 0
    results = json.loads((tmp_path / command.RESULTS).read_text())
    assert [result["status"] for result in results] == ["skipped", "skipped", "passed"]
    assert "not done after" in results[0]["reason"]
    assert results[1]["reason"] == "it takes about 60 s, and --seconds leaves 0"
    assert command.main([*common, "--limit", "0.5", "--seconds", "9", "--only", "cut"]) == 1


def test_a_model_is_made_only_for_stages_that_use_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(context: Context, shape: str) -> Path:
        made.append(shape)
        return context.folder / shape

    monkeypatch.setattr(command, "make_model", make)
    stage = Stage(lambda context: {"model": context.model.name}, "")
    monkeypatch.setattr(command, "STAGES", {"with": stage, "without": replace(stage, uses_model=False)})
    # No GPU has been looked for, and no wheel of weights.
    monkeypatch.setattr(hardware, "present", lambda: Hardware(()))
    assert command.main(["--folder", str(tmp_path), "--only", "without"]) == 0 and made == []
    assert command.main(["--folder", str(tmp_path)]) == 0 and made == ["tiny"]
    monkeypatch.setattr(hardware, "present", lambda: Hardware((80.0,)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(["--folder", str(tmp_path)]) == 0 and made == ["tiny", "smollm2-135m"]


def test_two_results_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    common = Result("scores", Status.passed, 1.0, {"nats": 2.0, "gpu": "H100"})
    write(paths[0], [common, Result("step", Status.passed, figures={"step_s": 0.0})])
    write(paths[1], [replace(common, figures={"nats": 3.0, "gpu": "H200"}), Result("step", Status.failed)])
    assert command.main(["--compare", *map(str, paths)]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["scores", "nats", "2", "3", "1.5"],
        ["scores", "gpu", "H100", "H200"],
        ["step", "result", "passed", "failed"],
        ["step", "step_s", "0"],
    ]
    paths[1].write_text("{}")
    paths[0].write_text('[{"stage": "x"}]')
    assert command.main(["--compare", *map(str, paths)]) == 1
    assert f"--compare {paths[0]}: it is no result of gpu-check" in capsys.readouterr().err


def test_a_random_model_has_its_shape_and_reads_any_text(tmp_path: Path) -> None:
    figures = shapes.write(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    assert float(figures["billions"]) == sum(p.numel() for p in model.parameters()) / 1e9
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert len(tokenizer) == model.config.vocab_size == 512
    text = "What is 3 + 4? Größe \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(range(300, 512)), "each number of the vocabulary is a token"
    turns = [{"role": "user", "content": "7"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    # The sizes are those of the published models, in billions of weights.
    for name, billions in (("0.5B", 0.494), ("1.5B", 1.544), ("7B", 7.616)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shapes.SHAPES[f"Qwen2.5-{name}-Instruct"])
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_lines_and_the_table() -> None:
    results = [
        Result("scores", Status.passed, 12.3, {"nats": 1.23456e-5, "gpu": "H200"}),
        Result("sleep", Status.skipped, reason="it needs a GPU"),
    ]
    assert line(results[0]) == "scores       passed      12 s  nats 1.235e-05, gpu H200"
    assert line(results[1]) == "sleep        skipped      0 s  it needs a GPU"
    rows = table(results).splitlines()
    assert rows[0].split() == ["stage", "result", "seconds", "figures"]
    assert rows[1].endswith("nats 1.235e-05, gpu H200") and rows[2].endswith("it needs a GPU")


def test_what_a_machine_lacks_is_skipped(context: Context) -> None:
    why = {name: stage.lacks(context) for name, stage in STAGES.items()}
    assert why["sleep"] == "it needs a GPU"
    assert "GPU" in why["qlora"] or "bitsandbytes" in why["qlora"]
    assert not any(why[name] for name in ("environment", "scores", "float32", "sweep", "servers", "ranks"))
    one_gpu = Context(context.folder, context.model, 1, [], 60.0)
    assert STAGES["ranks"].lacks(one_gpu) == STAGES["async"].lacks(one_gpu) == "it needs two GPUs"
    assert (
        STAGES["sleep"].lacks(one_gpu)
        == STAGES["ipc"].lacks(one_gpu)
        == STAGES["ipc_ray"].lacks(one_gpu)
        == ""
    )
    assert why["ipc"] == "it needs a GPU" and why["nccl"] == "", "gloo takes NCCL's place on a CPU"
    for name in ("ipc_peer", "nccl", "tensor_parallel"):
        assert (
            STAGES[name].lacks(one_gpu) == "it needs two GPUs"
            and STAGES[name].lacks(replace(one_gpu, gpus=2)) == ""
        )


@pytest.mark.slow
def test_the_scores_of_this_machine(context: Context) -> None:
    figures = kernels.scores(context.model)
    assert float(figures["to_cpu_nats"]) <= 1e-5 and float(figures["shared_to_plain_nats"]) <= 1e-4
    assert 0 < float(figures["bfloat16_nats"]) < 0.5 and float(figures["shared_speedup"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("freed", [1.0, 0.0])
def test_a_step_of_a_pretended_gpu(context: Context, freed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated() -> float:
        return float(next(in_use))

    with PretendedCuda():
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(context.model).parameters())
        in_use = iter([8e9, 8e9 - freed * 8 * weights])
        monkeypatch.setattr(speeds, "path", lambda: context.folder / "speeds.json")
        monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
        if not freed:
            with pytest.raises(
                TrainingStopped, match=r"share of the moments that stays: 1, and at most 0\.1"
            ):
                step.step(context.model)
            return
        figures = step.step(context.model)
    assert float(figures["head_difference"]) < 1e-4 and float(figures["noise_difference"]) == 0
    assert float(figures["parked_mib"]) == pytest.approx(8 * weights / 2**20)
    (kept,) = json.loads((context.folder / "speeds.json").read_text()).values()
    assert kept == {"layer_ms": figures["layer_ms"]}


def test_speeds_of_a_pretended_gpu_are_kept(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "path", lambda: context.folder / "speeds.json")
    monkeypatch.setattr(kernels, "_matrix_product", lambda device, dtype: float(dtype.itemsize))
    monkeypatch.setattr(kernels, "_copy", lambda device: 2.5)
    with PretendedCuda():
        name = torch.cuda.get_device_properties(0).name
        assert kernels.environment(context.model)["copy_tb_per_s"] == 2.5
    speed = speeds.of(Hardware((80.0,), names=(name,)))
    assert (speed.tflops, speed.tflops_float32, speed.tb_per_s) == (2.0, 4.0, 2.5)
    assert "measured by make gpu-check" in speed.source


def test_a_gpu_is_measured_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(speeds, "path", lambda: tmp_path / "file/speeds.json")
    with PretendedCuda(), pytest.warns(UserWarning, match=r"speeds\.json: the measured speeds are not kept"):
        kernels.keep_speeds(tflops=1.0)


@pytest.mark.slow
def test_waits_of_a_micro_batch_are_found(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(self: Any, *args: Any) -> Any:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        # torch says this of its watch itself, and it is no wait.
        warnings.warn("a prototype that does not yet detect all synchronizing operations", stacklevel=2)
        return honest(self, *args)

    honest = TokenScorer.forward
    monkeypatch.setattr(TokenScorer, "forward", waiting)
    with PretendedCuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TrainingStopped, match="waits in a micro-batch: 1, and at most 0 is right"):
            step.step(context.model)


@pytest.mark.slow
def test_attention_without_masks_on_a_pretended_gpu(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "batch_of", lambda vocabulary: inputs(make_batch()))
    monkeypatch.setattr(kernels, "_TIMED_PROMPT", 8)
    monkeypatch.setattr(kernels, "_TIMED_RESPONSES", (4, 8))
    with PretendedCuda():
        figures = kernels.flash(context.model)
    assert 1e-3 < float(figures["kernel_error"]) < 4e-3
    assert 0 < float(figures["varlen_gradient"]) < 2 * float(figures["masks_gradient"])
    assert float(figures["times_as_fast_4"]) > 0 and float(figures["times_as_fast_8"]) > 0
    with PretendedCuda(capability=(7, 5)):
        assert "compute capability 7.5" in str(kernels.flash(context.model)["not_used"])

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return tuple(1.1 * gradient for gradient in backward(*args, **kwargs))

    backward = varlen._backward
    monkeypatch.setattr(varlen, "_backward", faulty)
    with PretendedCuda(), pytest.raises(TrainingStopped, match=r"kernel_error is 0.1, .* 0.02 is rounding"):
        kernels.flash(context.model)
    assert STAGES["flash"].lacks(context) == "it needs a GPU"


def test_scores_that_depend_on_the_shared_prompt_are_found(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TokenScorer.forward

    def wrong(self: Any, *args: Any) -> TokenScores:
        scores = honest(self, *args)
        return TokenScores(scores.log_probs * (1.01 if self.shares_prefix else 1.0), scores.entropy)

    monkeypatch.setattr(TokenScorer, "forward", wrong)
    with pytest.raises(TrainingStopped, match=r"shared_to_plain_nats is .* at most 0.0002 is rounding"):
        kernels.scores(context.model)


def test_a_number_that_is_none_is_found() -> None:
    with pytest.raises(TrainingStopped):
        kernels._check("nats", float("nan"), 1.0)
    kernels._check("nats", 1.0, 1.0)


def test_a_command_that_fails_or_hangs_fails_its_stage(context: Context) -> None:
    with pytest.raises(TrainingStopped, match=r"exit code 3: the last line \(.*/one.log\)"):
        runs.call(context, "one", [sys.executable, "-c", "print('first\\nthe last line'); exit(3)"])
    quick = Context(context.folder, context.model, 0, [], 0.2)
    with pytest.raises(TrainingStopped, match=r"not done after 0.2 s"):
        runs.call(quick, "two", [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(TrainingStopped, match=r"the package of no_such_thing is not installed"):
        runs.call(context, "three", [sys.executable, "-c", "import no_such_thing.part"])
    nothing: runs.Figures = {}
    result = command.run_stage("x", Stage(lambda context: {"a": nothing["b"]}, ""), context)
    assert result.status is Status.failed and result.reason == "KeyError: 'b'"


def test_nothing_is_left_of_a_command_that_hangs(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks have a group of their own, too.
    rank = "import signal, sys; print(1, file=open(sys.argv[1], 'w')); signal.pause()"
    launcher = (
        "import signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}, sys.argv[1]], start_new_session=True)\n"
        "signal.pause()\n"
    )
    started, ranks = context.folder / "started", list[psutil.Process]()
    os.mkfifo(started)

    class HangsOnceStarted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            started.read_text()
            ranks.extend(family(self.pid))
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", HangsOnceStarted)
    with pytest.raises(runs.OutOfTime):
        runs.call(context, "launcher", [sys.executable, "-c", launcher, str(started)])
    assert len(ranks) == 1 and not psutil.wait_procs(ranks, timeout=30)[1]


def run_folder(folder: Path, **changes: Any) -> Path:
    """A run that has ended well, with changes."""
    weights = folder / "checkpoints/4/model"
    weights.mkdir(parents=True)
    save_file({"layer": torch.zeros(2, dtype=changes.pop("dtype", torch.float32))}, weights / "a.safetensors")
    figures = {
        "optimizer/grad_norm": 1.0,
        "publish/logprob_diff_mean": 1e-5,
        "throughput/generated_tokens_per_s": 10.0,
        "throughput/trained_tokens_per_s": 20.0,
        "time/publish_s": 0.1,
    }
    rows = [{"step": 0, "eval/accuracy": 0.0}]
    rows += [{"step": step, **figures, **changes} for step in range(1, 5)]
    # It warms up in the first step; with workers, nothing is left to generate in the last.
    rows[1]["throughput/generated_tokens_per_s"] = 1.0
    rows[-1]["throughput/generated_tokens_per_s"] = 0.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"steps": changes.get("steps", 4), "peak_memory_gib": changes.get("peak", 1.0)}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


PREDICTED = {"generate": 4.0, "prepare": 1.0, "optimize": 1.0, "peak": 1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 3}, "3 steps and no gradient"),
        ({"optimizer/grad_norm": 0.0}, "nothing was learned"),
        ({"publish/logprob_diff_mean": 0.1}, "differ by 0.1 nats on average; 0.001 is rounding"),
        ({"publish/logprob_diff_mean": float("nan")}, "differ by nan nats"),
        ({"peak": 2.0}, "memory, peak: 2.00 GiB were used, and 1.00 predicted"),
        (
            {"memory/train_cuda_gib": 2.0, "memory/generate_cuda_gib": 4.5},
            "memory, optimize: 2.00 GiB were used, and 1.00 predicted",
        ),
        ({"memory/generate_cuda_gib": 8.0}, "memory, generate: 8.00 GiB were used, and 4.00 predicted"),
        ({"dtype": torch.bfloat16}, "layer was trained in BF16, and F32 is right"),
    ],
)
def test_a_run_with_wrong_figures_fails(
    changes: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "predicted_gib", lambda folder, asynchronous: PREDICTED)
    with pytest.raises(TrainingStopped, match=says):
        runs.check(run_folder(tmp_path / "run", **changes), 1e-3)


@pytest.mark.parametrize("sleeps", [True, False])
def test_memory_that_a_phase_leaves_is_predicted_for_the_others_too(
    sleeps: bool, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "present", lambda: Hardware((79.0,), 200.0, ((9, 0),)))
    monkeypatch.setattr(whole, "cuda_device_present", lambda: True)
    cfg = Config()
    cfg.model.name, cfg.inference_model.sleep = str(tiny_model_dir), sleeps
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.structured(cfg), tmp_path / ".hydra/config.yaml")
    needs = runs.predicted_gib(tmp_path, asynchronous=False)
    # PyTorch gives memory back when an engine wakes.
    assert (needs["generate"] == needs["prepare"] == needs["optimize"] == needs["peak"]) is not sleeps


def test_the_figures_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "predicted_gib", lambda folder, asynchronous: PREDICTED)
    assert runs.check(run_folder(tmp_path / "run", peak=1.2), 1e-3) == {
        "engine_to_trainer_nats": 1e-5,
        "generated_tokens_per_s": 10.0,
        "trained_tokens_per_s": 20.0,
        "publish_s": 0.1,
        "peak_gib": 1.2,
        "peak_predicted_gib": 1.0,
    }


@pytest.mark.slow
def test_a_stage_that_trains(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["inference_model.backend=transformers", "inference_model.max_model_len=200", "optimizer.lr=1e-3"]
    there = Context(context.folder, context.model, 0, words, 120.0)

    def start(command: Any, stdout: Any, start_new_session: bool, **_: Any) -> ForkedPopen:
        assert start_new_session, "a stage that takes too long is ended with all that it started"
        return ForkedPopen(command, stdout=stdout)

    monkeypatch.setattr("torchrl_grpo.tools.gpu_check.runs.subprocess.Popen", start)
    result = command.run_stage("float32", STAGES["float32"], there)
    assert result.status is Status.passed, result.reason
    assert float(result.figures["engine_to_trainer_nats"]) < 1e-4
    lines = read(context.folder / "float32/metrics.jsonl")
    assert len(lines) == 5 and all(torch.isfinite(torch.tensor(line["loss/total"])) for line in lines[1:])


_SHARING = """
import sys
from pathlib import Path
from torchrl_grpo.runtime import hardware
from torchrl_grpo.tools.gpu_check import shaped

hardware.present = lambda: hardware.Hardware((float(sys.argv[1]),), 100.0, ((9, 0),))
print(*shaped._sharing("gpu_80gb", Path(sys.argv[2]), False))
"""


def test_a_recipe_shares_a_larger_gpu_as_those_that_it_is_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    names = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**names, **sizes, **heads}))
    # In a process that has imported nothing else, as the command's own.
    command = [sys.executable, "-c", _SHARING, "139", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A GPU of 139 GiB would have room for an engine that never sleeps.
    assert "inference_model.sleep=true" in done.stdout.split()
