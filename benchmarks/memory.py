"""Measure the memory of a long asynchronous run from outside."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers.overlap import random_model
from benchmarks.workload import Workload
from torchrl_grpo.runtime import own_variables
from torchrl_grpo.tools.processes import check, newest_step, started

_MIB = 2**20


def watch(work: Workload, steps: int) -> list[dict[str, float]]:
    """Run ``grpo-async.py`` for ``steps`` small steps, and measure its memory about every two seconds.

    Returns:
        One point per measurement: ``step``, and in MiB ``trainer``, ``workers`` and ``object_store``. The
        memory of processes is resident and excludes shared pages, so pages of the object store count only
        once. ``object_store`` is the growth of the machine's shared memory in use.
    """
    folder = Path(tempfile.mkdtemp())
    questions = folder / "questions.jsonl"
    work.write_questions(questions)
    model = random_model(folder / "model", work.model)
    before = _shared()
    points: list[dict[str, float]] = []
    argv = _argv(work, model, questions, steps)
    # Always on the CPU, because two workers and a trainer would need three GPUs.
    with (
        own_variables.temporary({"CUDA_VISIBLE_DEVICES": ""}),
        started(folder / "run", argv, "grpo-async.py") as process,
    ):
        trainer = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                points.append(
                    {
                        "step": newest_step(folder / "run"),
                        "trainer": _own(trainer),
                        "workers": sum(map(_own, _workers(trainer))),
                        "object_store": (_shared() - before) / _MIB,
                    }
                )
            # Wait for the end of the run or the next measurement: memory has no event to wait for.
            with contextlib.suppress(psutil.TimeoutExpired):
                trainer.wait(timeout=2)
        process.wait()
    check(folder / "run", process)
    shutil.rmtree(folder)
    return points


def _argv(work: Workload, model: Path, questions: Path, steps: int) -> list[str]:
    return [
        f"model.name={model}",
        "env.dataset=jsonl",
        f"env.data_path={questions}",
        "env.fields={question: question, answer: answer}",
        "env.num_envs=4",
        "env.repeats=4",
        "reward.weights={bare_number: 1.0}",
        # No answer of a random model is correct, so the entropy bonus is the only gradient of every step.
        "policy.entropy_coef=0.01",
        "inference_model.backend=transformers",
        "inference_model.num_devices=2",
        "inference_model.max_model_len=256",
        "inference_model.max_new_tokens=8",
        "collector.max_policy_age=2",
        f"train.total_dialog_turns={steps * 16}",
        "train.checkpoint_frequency=0",
        "eval.num_problems=0",
        "logging.rollouts=false",
        "logging.progress=false",
    ]


def _workers(trainer: psutil.Process) -> Iterator[psutil.Process]:
    for child in trainer.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::RolloutActor" in " ".join(child.cmdline()):
                yield child


def _own(process: psutil.Process) -> float:
    held = process.memory_info()
    return float(held.rss - held.shared) / _MIB


def _shared() -> float:
    return float(shutil.disk_usage("/dev/shm").used)


def growth(points: list[dict[str, float]], key: str, warm_up: int) -> dict[str, Any]:
    """Return the medians of the second and the last fifth after step ``warm_up``, and the relative growth."""
    kept = [point[key] for point in points if point["step"] > warm_up]
    fifth = max(1, len(kept) // 5)
    early, late = sorted(kept[fifth : 2 * fifth]), sorted(kept[-fifth:])
    first, last = early[len(early) // 2], late[len(late) // 2]
    return {"early": first, "late": last, "growth": last / first - 1 if first else 0.0}
