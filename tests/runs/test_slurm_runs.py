"""A job of a real Slurm with two nodes, which is signaled and put back into the queue while it runs."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forking_serve
import local_slurm
import pytest
from local_slurm import LocalSlurm

from torchrl_grpo.checkpoints.run_dir import complete_checkpoints
from torchrl_grpo.slurm.command import script_for
from torchrl_grpo.tools.processes import newest_step
from torchrl_grpo.tools.verify_resume import first_difference, read

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.float32,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(local_slurm.missing()), reason=local_slurm.missing()),
]
STEPS = 24


@pytest.fixture(scope="module")
def slurm() -> Iterator[LocalSlurm]:
    with local_slurm.local_slurm() as made:
        yield made


@pytest.fixture
def arguments(tiny_model_dir: Path, tmp_path: Path, repo_root: Path) -> list[str]:
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A random model is never right; this tells its answers apart, so that there is something to learn.
    (tmp_path / "reward.py").write_text("def length(text, example):\n    return len(text) % 5 / 4\n")
    commands = sysconfig.get_path("scripts")
    # On a CPU, vLLM starts its engine's process anew, which takes it seven seconds of a core to import.
    serve = tmp_path / "bin/grpo-serve"
    serve.parent.mkdir()
    serve.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(forking_serve.__file__)}" "$@"\n')
    serve.chmod(0o755)
    return [
        "--nodes=2",
        "--time=30",
        f"--setup=export PATH={serve.parent}:{commands}:$PATH PYTHONPATH={repo_root} OMP_NUM_THREADS=1",
        f"--folder={tmp_path}/jobs",
        "inference_model.backend=vllm_server",
        f"model.name={tiny_model_dir}",
        "env.dataset=jsonl",
        f"env.data_path={tmp_path}/sums.jsonl",
        "env.answer_format=plain",
        "env.num_envs=4",
        "env.repeats=4",
        f"reward.functions={{length: '{tmp_path}/reward.py:length'}}",
        "reward.weights={length: 1.0}",
        "eval.reward=length",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=16",
        "inference_model.dtype=float32",
        "inference_model.enforce_eager=true",
        "inference_model.kv_cache_gib=1",
        "train_model.autocast='no'",
        "optimizer.lr=1e-2",
        f"train.total_dialog_turns={STEPS * 16}",
        # Only a signal, and the end, write checkpoints.
        "train.checkpoint_frequency=0",
        "eval.num_problems=6",
        "eval.frequency=8",
        "logging.progress=false",
    ]


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")  # codespell:ignore cancelled


def run_to_end(slurm: LocalSlurm, job: str, folder: Path) -> None:
    slurm.wait("the job ends", lambda: slurm.state(job)["JobState"] in ENDED, 600)
    assert slurm.state(job)["JobState"] == "COMPLETED", output_of(folder)


def reach(slurm: LocalSlurm, job: str, step: int, folder: Path) -> None:
    """Wait until a job has taken an optimizer step."""

    def reached() -> bool:
        assert slurm.state(job)["JobState"] not in ENDED, output_of(folder)
        return newest_step(folder / "jobs" / job / "run") >= step

    slurm.wait(f"step {step} of job {job}", reached, 600)


def without_workers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without the metrics that say how long servers worked and waited."""
    return [{k: v for k, v in line.items() if not k.startswith("workers/")} for line in lines]


def output_of(folder: Path) -> str:
    return "\n".join(
        f"--- {path}\n{path.read_text(errors='replace')[-3000:]}"
        for path in [*folder.glob("slurm-*.out"), *folder.rglob("logs/*/*.log")]
    )


def test_a_job_on_two_nodes_survives_signals_and_requeues(
    slurm: LocalSlurm, arguments: list[str], tmp_path: Path
) -> None:
    script = script_for(arguments)
    whole = slurm.submit(script, tmp_path)
    run_to_end(slurm, whole, tmp_path)
    expected = tmp_path / "jobs" / whole / "run"
    assert newest_step(expected) == STEPS

    job = slurm.submit(script, tmp_path)
    folder = tmp_path / "jobs" / job
    saved = []
    # Once to the shell of the script, as at the time limit, and once to the steps themselves.
    for step, option in ((5, ["--batch"]), (12, [])):
        reach(slurm, job, step, tmp_path)
        steps = slurm.call("squeue", "--steps", "--noheader", "--format=%j %N", f"--jobs={job}")
        where = dict(line.split() for line in steps.splitlines())
        assert where["server"] == "node2" and where["trainer"] == "node1"
        slurm.call("scancel", "--signal=USR1", *option, job)
        slurm.start_again(job)
        saved.append(int(complete_checkpoints(folder / "run")[-1].name))
    run_to_end(slurm, job, tmp_path)
    assert slurm.state(job)["Restarts"] == "2"
    assert 5 <= saved[0] < saved[1] < STEPS and saved[1] >= 12
    print(f"stopped after steps {saved}; {STEPS} steps")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        ours, theirs = (without_workers(read(of / name)) for of in (folder / "run", expected))
        print(f"{name}: {len(ours)} lines")
        assert len(ours) == {"metrics.jsonl": STEPS + 1, "rollouts.jsonl": STEPS * 16}[name]
        assert name != "metrics.jsonl" or all(line["optimizer/grad_norm"] > 0 for line in ours[1:])
        assert first_difference(ours, theirs) is None
    # Each attempt has logs of its own, and waited for a real answer of its server.
    assert os.readlink(folder / "logs/latest") == "2"
    for attempt in "012":
        logs = folder / "logs" / attempt
        assert {path.name for path in logs.iterdir()} == {"server-0.log", "gate.log", "trainer.log"}
        assert "has generated a token" in (logs / "gate.log").read_text()
    for attempt, step in zip("12", saved, strict=True):
        resumed = f"resumed {folder}/run after step {step} of {STEPS}"
        assert resumed in (folder / "logs" / attempt / "trainer.log").read_text()


def test_a_server_that_fails_ends_the_job(slurm: LocalSlurm, arguments: list[str], tmp_path: Path) -> None:
    job = slurm.submit(script_for([*arguments, "inference_model.engine_args.no_such=1"]), tmp_path)
    slurm.wait("the job ends", lambda: slurm.state(job)["JobState"] in ENDED, 300)
    assert slurm.state(job)["JobState"] == "FAILED", output_of(tmp_path)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert "server has ended, and the job needs it" in output
    assert "trainer begins" not in output
