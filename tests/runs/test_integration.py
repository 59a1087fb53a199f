"""The commands a user runs, with the real vLLM and the real SmolLM2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedPopen, preload_vllm, run_script
from processors import multiplies_in_bfloat16
from run_files import payload

from torchrl_grpo.tools import verify_resume

# A run here starts vLLM up to three times, which on a busy machine takes minutes each.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = (
    "model.name=smollm2-135m",
    "env.num_envs=2",
    "env.repeats=4",
    "train.total_dialog_turns=16",
    "inference_model.max_model_len=512",
    "inference_model.max_new_tokens=24",
    "eval.num_problems=4",
    "eval.frequency=0",
    "train.checkpoint_frequency=0",
)

# What engine and trainer may differ by in nats, on average.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def relative_to(folder: Path, target: Path) -> str:
    return os.path.relpath(target, folder)


@pytest.mark.usefixtures("smollm2_dir")
def test_gsm8k_trains_evaluates_saves_and_loads(
    repo_root: Path, shared_data: Path | None, tmp_path: Path
) -> None:
    data = shared_data / "gsm8k" if shared_data is not None else write_gsm8k(tmp_path / "gsm8k")
    write_brevity(tmp_path)
    numbers, autocast = ("bfloat16", "bf16") if multiplies_in_bfloat16() else ("float32", "no")
    # Another directory than the checkout, and a path relative to it.
    command = [
        sys.executable,
        str(repo_root / "sota-implementations/grpo/grpo.py"),
        *SMALL,
        f"env.data_path={relative_to(tmp_path, data)}",
        "hydra.run.dir=run",
        "logging.backends=[csv,tensorboard]",
        "reward.functions={brevity: own.py:brevity}",
        "reward.weights={gsm8k: 1.0, format: 0.1, math_verify: 0.5, brevity: 1.0}",
        # As on every GPU, with a rate that moves weights far from those that bfloat16 was made of.
        f"inference_model.dtype={numbers}",
        f"train_model.autocast={autocast}",
        "optimizer.lr=1e-4",
        "policy.kl_coef=0.01",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert f"272 tensors in the engine equal the trainer's in {numbers}" in printed
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert {"eval/strict", "eval/flexible", "eval/accuracy_low"} <= metrics[0].keys()
    assert all(line["publish/logprob_diff_mean"] < ROUNDING[numbers] for line in metrics[1:])
    assert all(line["optimizer/grad_norm"] is not None for line in metrics[1:])
    # The reference is the starting point: nothing but rounding at first, more after updates.
    divergences = [line["kl/reference"] for line in metrics[1:]]
    assert divergences[0] == pytest.approx(0.0, abs=ROUNDING[numbers] / 10) and divergences[1] > 0
    rollouts = lines(run / "rollouts.jsonl")
    assert len(rollouts) == 16
    assert {"gsm8k", "format", "math_verify", "brevity"} <= rollouts[0]["rewards"].keys()
    assert all(len(row["response"]) > 0 and row["prompt"].endswith("assistant\n") for row in rollouts)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    # tests/planning/test_memory.py compares a run of another shape.
    (predicted,) = re.findall(r"memory: cpu at most ([0-9.]+) of", printed)
    assert float(predicted) == pytest.approx(summary["peak_memory_gib"], rel=0.2)
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert payload((run / "report.html").read_text())["runs"][0]["summary"]["steps"]
    assert "held-out accuracy" in printed and str(run) in printed

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints/2/model")
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints/2/model")
    assert model.config.vocab_size == 49152 and tokenizer.chat_template


def test_ifeval_trains_on_composed_prompts_in_a_sweep_of_two(
    repo_root: Path,
    shared_data: Path | None,
    tiny_model_dir: Path,
    tmp_path: Path,
    number_format: str,
    format_words: list[str],
) -> None:
    source = (
        shared_data / "ifeval" / "input_data.jsonl" if shared_data is not None else write_ifeval(tmp_path)
    )
    write_brevity(tmp_path)
    argv = [
        repo_root / "sota-implementations/grpo/grpo.py",
        "--config-name=grpo_ifeval",
        "--multirun",
        *SMALL,
        *format_words,
        # The run above has the real model.
        f"model.name={tiny_model_dir}",
        "inference_model.max_model_len=1024",
        f"env.data_path={relative_to(tmp_path, source)}",
        "env.task_size=64",
        "hydra.sweep.dir=sweep",
        "reward.functions={brevity: own.py:brevity}",
        "reward.weights={ifeval: 1.0, brevity: 1.0}",
        "optimizer.lr=1e-2,1e-3",
        "policy.kl_coef=0.01",
        "train_model.lora.rank=8",
    ]
    preload_vllm()
    done = run_script(argv, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for job, lr in (("0", 1e-2), ("1", 1e-3)):
        run = tmp_path / "sweep" / job
        metrics = lines(run / "metrics.jsonl")
        assert [line["step"] for line in metrics] == [0, 1, 2]
        assert metrics[1]["optimizer/lr"] == lr
        # The reference is the model without its adapters: nothing at first, something after an update.
        assert metrics[1]["kl/reference"] == pytest.approx(0.0, abs=ROUNDING[number_format] / 10)
        assert metrics[2]["kl/reference"] > 0
        assert {"eval/prompt_strict", "eval/prompt_loose", "eval/instruction_strict"} <= metrics[2].keys()
        rewards = [row["reward"] for row in lines(run / "rollouts.jsonl")]
        assert len(rewards) == 16 and len(set(rewards)) > 1
    # The second job starts where the first one started, not where it ended.
    first, second = (lines(tmp_path / "sweep" / job / "metrics.jsonl")[0] for job in "01")
    assert {k: v for k, v in first.items() if k.startswith("eval/")} == {
        k: v for k, v in second.items() if k.startswith("eval/")
    }


def test_a_run_killed_inside_a_checkpoint_resumes_as_if_uninterrupted_on_vllm(
    tiny_model_dir: Path, tmp_path: Path, format_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preload_vllm()
    monkeypatch.setattr("torchrl_grpo.tools.processes.Popen", ForkedPopen)
    words = [f"model.name={tiny_model_dir}", "train.total_dialog_turns=64", *format_words]
    assert verify_resume.main(["--folder", str(tmp_path), "--kills", "1", *words]) == 0


def test_runs_killed_at_random_moments_resume_as_if_uninterrupted_on_transformers(
    tiny_model_dir: Path, tmp_path: Path, format_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_grpo.tools.processes.Popen", ForkedPopen)
    words = ["inference_model.backend=transformers", f"model.name={tiny_model_dir}", "train.epochs=2"]
    words.append("train.total_dialog_turns=96")
    argv = ["--folder", str(tmp_path), "--kills", "2", "--seed", "3", *words, *format_words]
    assert verify_resume.main(argv) == 0


def write_brevity(folder: Path) -> None:
    """A reward in which answers always differ. Otherwise seed and processor decide whether weights move."""
    (folder / "own.py").write_text(
        "def brevity(completion, example):\n    return 1 / (1 + len(completion))\n"
    )


def write_gsm8k(folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "question": f"Tom has {n} apples and buys {k} more ({split}). How many has he?",
                "answer": f"#### {n + k}",
            }
            for n in range(2, 6)
            for k in range(3, 7)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_ifeval(folder: Path) -> Path:
    rows = [
        {
            "key": key,
            "prompt": f"Write about topic {key} in at least {10 + key} words, without commas.",
            "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
            "kwargs": [{"relation": "at least", "num_words": 10 + key}, {}],
        }
        for key in range(8)
    ]
    path = folder / "ifeval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
