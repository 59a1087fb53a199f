"""Files of runs that no run wrote, as long as a test needs them, and what a report of them has."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
    "<!-- @@DATA@@ \u0000\u0007\u001b[31m \u202eright to left\u202c \u2028 \ud800 & 'quotes' \"too\" \\u003c"
)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rollout(step: int, group: int, sample: int = 0, **more: Any) -> dict[str, Any]:
    right = (step + group + sample) % 3 == 0
    return {
        "step": step,
        "prompt": f"What is {group % 7} + {group % 5}?",
        "response": f"response {sample} of group {group} in step {step}",
        "reward": 1.1 if right else 0.0,
        "rewards": {"correct": float(right), "format": 0.1 * right},
        "advantage": 1.0 if right else -0.5,
        "policy_version": step - 1,
        "group_id": group,
        "length": 5 + sample,
        "truncated": sample == 3,
        **more,
    }


def write_run(folder: Path, steps: int = 20, groups: int = 4, samples: int = 4) -> Path:
    """Write the files of a run of ordinary numbers, with an evaluation at each tenth step."""
    draw = random.Random(0)
    metrics: list[dict[str, Any]] = []
    for step in range(steps + 1):
        share = step / steps
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {
                "reward/mean": 0.1 + 0.7 * share + 0.1 * draw.random(),
                "reward/correct": 0.6 * share,
                "reward/format": 0.1 * share,
                "reward/constant_groups": 0.25,
                "policy/entropy": 1.5 - share,
                "kl/reference": 0.2 * share,
                "policy/clip_fraction": 0.01,
                "response/length_mean": 20 - 5 * share,
                "response/truncated": 0.2,
                "policy/logprob_diff": 1e-5,
                "policy/version": step - 1,
                "optimizer/lr": 1e-5,
                "optimizer/grad_norm": 1.0,
                "time/generate_s": 2.0,
                "time/score_s": 0.2,
                "time/train_s": 3.0,
                "time/publish_s": 0.5,
                "time/step_s": 5.8,
                "memory/peak_gib": 4 + share,
            }
        if step % 10 == 0:
            accuracy = 0.1 + 0.8 * share
            row |= {"eval/accuracy": accuracy, "eval/num_problems": 4}
            row |= {"eval/accuracy_low": accuracy - 0.1, "eval/accuracy_high": accuracy + 0.1}
        metrics.append(row)
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(
        folder / "rollouts.jsonl",
        (
            rollout(step, (step - 1) * groups + group, sample)
            for step in range(1, steps + 1)
            for group in range(groups)
            for sample in range(samples)
        ),
    )
    # Grades of four problems: learned, forgotten, never solved, always solved.
    after = {"learned": (0, 1), "forgotten": (1, 0), "never": (0, 0), "always": (1, 1)}
    write_lines(
        folder / "evaluations.jsonl",
        (
            {
                "step": step,
                "id": id,
                "prompt": f"held-out problem {id}",
                "response": f"{id} at step {step}",
                "rewards": {"accuracy": grades[step > 0]},
                "grade": float(grades[step > 0]),
            }
            for step in range(0, steps + 1, 10)
            for id, grades in after.items()
        ),
    )
    return folder


def write_evaluations(
    folder: Path,
    grades: Mapping[int, Mapping[str, float | list[float]]],
    settings: Mapping[str, Any] | None = None,
    right: Mapping[str, Any] | None = None,
    metric: str = "eval/accuracy",
    **more: Any,
) -> Path:
    """Write the files of a run of evaluations alone.

    Args:
        folder: folder of the run.
        grades: grades of each problem, by step and problem.
        settings: sections of the configuration; None writes no record of it.
        right: what grades; the reward ``gsm8k`` by default.
        metric: name of the held-out value.
        more: further entries of each line.
    """
    write_lines(folder / "metrics.jsonl", [{"step": step, metric: 0.5} for step in grades])
    rows = []
    for step, problems in grades.items():
        for id, values in problems.items():
            for number, grade in enumerate(values if isinstance(values, list) else [values]):
                text = {"prompt": f"prompt of {id}", "response": f"{folder.name} {id} {step} {number}"}
                rows.append({"step": step, "id": id, **text, "grade": grade, **more})
    write_lines(folder / "evaluations.jsonl", rows)
    (folder / ".hydra").mkdir()
    about = {"versions": {"torch": "2.13"}, "right": right or {"reward": "gsm8k", "threshold": 1.0}}
    (folder / ".hydra/about.json").write_text(json.dumps(about))
    if settings is not None:
        # JSON is YAML.
        (folder / ".hydra/config.yaml").write_text(json.dumps(settings))
    return folder


class Elements(HTMLParser):
    """Elements of a page, and the content of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.content.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            tag, text = self.content[-1]
            self.content[-1] = tag, text + data


def payload(page: str) -> Any:
    return json.loads(next(text for tag, text in Elements(page).content if text.startswith("{")))


def inflated(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
