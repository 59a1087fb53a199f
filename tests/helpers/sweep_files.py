"""Writes the files of a sweep's trials, as runs would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from run_files import write_lines


def write_trial(
    folder: Path,
    seed: int,
    *words: str,
    grades: list[float],
    ended: bool = True,
    steps: tuple[int, ...] = (0, 10),
) -> Path:
    """Write a trial whose last evaluation has these grades; those before it have zeros."""
    hydra = folder / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "overrides.yaml").write_text(json.dumps([*words, f"seed={seed}"]))
    (hydra / "config.yaml").write_text(json.dumps({"seed": seed}))
    values = [float(np.mean(grades)) if step == steps[-1] else 0.0 for step in steps]
    metrics = [
        {
            "step": step,
            "eval/accuracy": value,
            "eval/accuracy_low": value - 0.1,
            "eval/accuracy_high": value + 0.1,
        }
        for step, value in zip(steps, values, strict=True)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    rows = [
        {"step": step, "id": id, "grade": grade if step == steps[-1] else 0.0}
        for step in steps
        for id, grade in enumerate(grades)
    ]
    write_lines(folder / "evaluations.jsonl", rows)
    if ended:
        (folder / "summary.json").write_text(json.dumps({"steps": steps[-1]}))
    return folder


def write_sweep(
    folder: Path, accuracy: dict[str, float], seeds: int = 3, problems: int = 100, spread: float = 0.01
) -> Path:
    """Write a sweep of settings with these accuracies on the same problems, which are not equally hard."""
    draw = np.random.default_rng(0)
    difficulty = draw.random(problems)
    number = 0
    for word, share in accuracy.items():
        for seed in range(seeds):
            shift = spread * draw.standard_normal()
            right = (0.7 * difficulty + 0.3 * draw.random(problems) < share + shift).astype(float)
            write_trial(folder / str(number), seed, word, "env=gsm8k", grades=right.tolist())
            number += 1
    return folder
