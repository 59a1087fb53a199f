"""Reads the files of a run into data of bounded size, and again what has been added to them since.

Numbers of each rollout are kept, and texts of a sample (:mod:`torchrl_grpo.report.texts`).
"""

from __future__ import annotations

import heapq
import json
import math
import re
from array import array
from pathlib import Path
from typing import Any

from torchrl_grpo.observe.doctor import read_setting
from torchrl_grpo.observe.guards import Finding, Guards
from torchrl_grpo.observe.held_out import held_out_metric
from torchrl_grpo.observe.metrics import DISCARDED, EVALUATIONS, METRICS, ROLLOUTS, jsonable
from torchrl_grpo.observe.report import SUMMARY
from torchrl_grpo.report.about import about
from torchrl_grpo.report.columns import Columns, number
from torchrl_grpo.report.held_out import HeldOutHistory
from torchrl_grpo.report.lines import GrowingFile, LinesRepeated
from torchrl_grpo.report.pictures import PictureUrls, names_of
from torchrl_grpo.report.texts import TextSample, shorten
from torchrl_grpo.runtime.files.shared_files import read_small

MOST_ROLLOUTS = 1_000_000
# Of responses to held-out problems, a third of it comes on top, and so it does of pictures.
CHARACTERS = 24_000_000
# Metrics beyond these are left out, and so are those that older runs have of each worker.
_MOST_METRICS = 500
_OF_EACH_WORKER = re.compile(r"workers/(tokens_per_s|busy_share)_\d+")
UNKNOWN, ENDED, CUT_OFF, FAILED = range(4)


class RunReader:
    """What the files of a run say.

    Args:
        run_dir: folder of the run.
        most_rollouts: number of rollouts whose numbers are kept.
        characters: number of characters of texts of rollouts that are kept.

    Attributes:
        notes: what of the run's configuration could not be read.
    """

    def __init__(
        self, run_dir: Path, most_rollouts: int = MOST_ROLLOUTS, characters: int = CHARACTERS
    ) -> None:
        self.run_dir = run_dir
        self._limits = most_rollouts, characters
        self._pictures = PictureUrls(run_dir, characters // 3)
        self._clear()

    def _clear(self) -> None:
        most_rollouts, characters = self._limits
        self._files = {
            name: GrowingFile(self.run_dir / name) for name in (METRICS, ROLLOUTS, DISCARDED, EVALUATIONS)
        }
        self._steps = array("i")
        self._metrics: dict[str, array[float]] = {}
        self._measured_by = ""
        self.notes: list[str] = []
        self._guards = Guards(read_setting(self.run_dir, self.notes))
        self._findings: list[Finding] = []
        self._rollouts = Columns(most_rollouts)
        self._texts = TextSample(characters)
        self._problems: dict[int, int] = {}
        self._reasons = [""]
        self._held_out = HeldOutHistory(characters // 3)

    def update(self) -> None:
        """Read what was added to the files. If they were cut, all is read again."""
        if any(file.was_cut() for file in self._files.values()):
            self._clear()
        try:
            self._read()
        except LinesRepeated:
            self._clear()
            # A step that falls once more is in a file that no run wrote.
            self._read(skip_falls=True)

    def _read(self, skip_falls: bool = False) -> None:
        new = {name: file.new_lines(skip_falls) for name, file in self._files.items()}
        for row in new[METRICS]:
            self._take_metrics(row)
        # By step, as the oldest rollouts give way, and the sample of texts is of rounds in order.
        for row in heapq.merge(new[ROLLOUTS], new[DISCARDED], key=lambda row: row["step"]):
            self._take_rollout(row)
        for row in new[EVALUATIONS]:
            self._held_out.take(row)

    def _take_metrics(self, row: dict[str, Any]) -> None:
        numbers = {
            name: number(value)
            for name, value in row.items()
            if name != "step" and not _OF_EACH_WORKER.fullmatch(name)
        }
        for name in numbers:
            if name not in self._metrics and len(self._metrics) < _MOST_METRICS:
                self._metrics[name] = array("d", [math.nan]) * len(self._steps)
        self._steps.append(row["step"])
        for name, column in self._metrics.items():
            column.append(numbers.get(name, math.nan))
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._measured_by = held_out_metric(finite) or self._measured_by
        self._findings += self._guards.take(row["step"], finite)

    def _take_rollout(self, row: dict[str, Any]) -> None:
        prompt, response = str(row.get("prompt", "")), str(row.get("response", ""))
        rewards, errors = _mapping(row.get("rewards")), _mapping(row.get("errors"))
        pictures = names_of(row.get("pictures"))
        reason = str(row.get("discarded", ""))
        if reason not in self._reasons and len(self._reasons) < 256:
            self._reasons.append(reason)
        group = _integer(row.get("group_id"))
        numbers: dict[str, int | float] = {
            "step": row["step"],
            "group": group,
            "problem": self._problems.setdefault(hash((prompt, *pictures)), len(self._problems)),
            "length": _integer(row.get("length")),
            "version": _integer(row.get("policy_version")),
            "finish": _finish(row, errors),
            "discarded": self._reasons.index(reason) if reason in self._reasons else 0,
            "reward": number(row.get("reward")),
            "advantage": number(row.get("advantage")),
        }
        number_of_row = self._rollouts.append(numbers, rewards)
        entry: dict[str, Any] = {"prompt": shorten(prompt), "response": shorten(response)}
        if isinstance(messages := row.get("messages"), list):
            entry["messages"] = [_message(message) for message in messages[:200]]
        if errors:
            entry["errors"] = {str(name): shorten(str(error)) for name, error in errors.items()}
        if verdicts := _mapping(row.get("verdicts")):
            entry["verdicts"] = {str(name): shorten(str(text)) for name, text in verdicts.items()}
        if pictures:
            entry["pictures"] = pictures
        if (tokens := _tokens(row.get("tokens"))) is not None:
            entry["tokens"] = tokens
        size = sum(len(text) for text in _texts(entry))
        self._texts.add(row["step"], group, number_of_row, entry, size)

    def contents(self) -> dict[str, Any]:
        """Return all of it, for :mod:`torchrl_grpo.report.page_file`."""
        prompts: dict[str, int] = {}
        texts: list[dict[str, Any]] = []
        text_of = array("i", [-1]) * len(self._rollouts)
        for row, entry in self._texts.entries():
            if row < self._rollouts.dropped:
                continue
            text_of[row - self._rollouts.dropped] = len(texts)
            texts.append({**entry, "prompt": prompts.setdefault(entry["prompt"], len(prompts))})
        holding = {finding.rule.name for finding in self._guards.holding(explained=True)}
        return {
            "name": self.run_dir.resolve().name,
            "about": about(self.run_dir),
            "summary": _summary(self.run_dir / SUMMARY),
            "steps": self._steps,
            "metrics": {**self._metrics, **self._accuracies()},
            "notes": self.notes,
            "findings": [_finding(finding, holding) for finding in self._findings],
            "rollouts": {**self._rollouts.columns, "text": text_of},
            "reasons": self._reasons,
            "texts": {
                "prompts": list(prompts),
                "rollouts": texts,
                "held_out": self._held_out.texts(),
                # Those of held-out problems and of the newest rounds come first.
                "pictures": self._pictures.of(
                    name
                    for entry in (*self._held_out.texts(), *reversed(texts))
                    for name in (entry or {}).get("pictures", ())
                ),
            },
            "held_out": {**self._held_out.contents(), "metric": self._measured_by},
            "damaged": {name: file.damaged for name, file in self._files.items() if file.damaged},
            "dropped": self._rollouts.dropped,
            "sampled": self._texts.lost,
        }

    def _accuracies(self) -> dict[str, array[float]]:
        """Return the accuracy with the means of evaluations that did not show yet that they were one."""
        if self._measured_by != "eval/accuracy":
            return {}
        columns = {}
        for end in ("", "_low", "_high"):
            shares, means = (self._metrics.get(f"eval/{name}{end}") for name in ("accuracy", "primary"))
            if shares is not None and means is not None:
                pairs = zip(shares, means, strict=True)
                columns[f"eval/accuracy{end}"] = array("d", (m if math.isnan(s) else s for s, m in pairs))
        return columns


def _finding(finding: Finding, holding: set[str]) -> dict[str, Any]:
    return {
        "rule": finding.rule.name,
        "since": finding.since,
        "seen": finding.seen,
        "advice": finding.rule.advice,
        "source": finding.rule.source,
        "reads": list(finding.rule.reads),
        "holds": finding.rule.name in holding,
    }


def _finish(row: dict[str, Any], errors: dict[str, Any]) -> int:
    if "environment" in errors:
        return FAILED
    truncated = row.get("truncated")
    return (CUT_OFF if truncated else ENDED) if isinstance(truncated, bool) else UNKNOWN


def _integer(value: Any) -> int:
    return value if type(value) is int and abs(value) < 2**31 else -1


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tokens(details: Any) -> dict[str, list[Any]] | None:
    """Return texts and numbers of tokens; None for anything else."""
    parts = _mapping(details)
    text, engine, trainer = (parts.get(name) for name in ("text", "engine", "trainer"))
    if not (isinstance(text, list) and isinstance(engine, list) and isinstance(trainer, list)):
        return None
    if not len(text) == len(engine) == len(trainer):
        return None
    numbers = {"engine": engine, "trainer": trainer}
    if isinstance(teacher := parts.get("teacher"), list) and len(teacher) == len(text):
        numbers["teacher"] = teacher
    finite = {name: [jsonable(number(value)) for value in values] for name, values in numbers.items()}
    return {"text": [str(piece) for piece in text], **finite}


def _message(message: Any) -> dict[str, str]:
    """Return role and content of a message of an episode as text."""
    parts = _mapping(message)
    content = parts.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    if calls := parts.get("tool_calls"):
        text = f"{text}\n{json.dumps(calls)}"
    return {"role": str(parts.get("role", "")), "content": shorten(text)}


def _texts(entry: dict[str, Any]) -> list[str]:
    messages = [message["content"] for message in entry.get("messages", ())]
    # The numbers of a token take about as much room as thirty characters.
    tokens = [" " * 30 * len(entry["tokens"]["text"])] if "tokens" in entry else []
    of_rewards = [*entry.get("errors", {}).values(), *entry.get("verdicts", {}).values()]
    return [entry["prompt"], entry["response"], *messages, *of_rewards, *tokens]


def _summary(path: Path) -> dict[str, Any]:
    """Return the entries that the page shows, and no other, as the file may lead to another one."""
    try:
        entries = _mapping(json.loads(read_small(path)))
    except (OSError, ValueError, RecursionError):
        # The run has not ended, or the file is damaged.
        return {}
    return {name: jsonable(number(entries[name])) for name in ("steps", "seconds") if name in entries}
