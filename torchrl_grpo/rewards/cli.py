"""Score stored completions without training.

    python -m torchrl_grpo.rewards --dataset gsm8k completions.jsonl

Each line of the input is a JSON object with a ``completion`` and the data set's own fields (gsm8k:
``question``, ``answer``). A line of ``rollouts.jsonl`` or ``evaluations.jsonl`` has it as ``response``, and
is read with ``--dataset jsonl``. A completion begins with the tags that its prompt has opened, such as
``<think>``. Each line of the output is ``{"total": ..., "parts": {...}, "errors": {...}}``, in the same
order, and ``verdicts`` has the words of judges. If a reward fails on a completion, its error is listed in
``errors``, it counts as ``--on-error``, and the command goes on. The input and the mean of each reward go to
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS
from torchrl_grpo.config.schema import EnvConfig, RewardConfig
from torchrl_grpo.config.values import AnswerFormat
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import dataset_module
from torchrl_grpo.data.rows.sources import Row, read_file
from torchrl_grpo.errors import ConfigError, DataError, UserError
from torchrl_grpo.rewards.registry import build_reward_set, check_weights
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.runtime.files.closed_output import quiet_end

_BATCH = 64


@quiet_end()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: command-line arguments; those of the process by default.

    Returns:
        Exit code: 0, or 2 after a user error, which is printed to stderr.
    """
    args = _parser().parse_args(argv)
    try:
        cfg = _config(args)
        check_weights(cfg)
        rows = _rows(args.input)
        completions, examples = _examples(rows, cfg.env)
        means = _Means()
        with contextlib.ExitStack() as stack:
            rewards = build_reward_set(cfg, {"": examples[0]})
            stack.callback(rewards.close)
            output = stack.enter_context(_output(args.output))
            source = "stdin" if args.input == "-" else args.input
            sys.stderr.write(f"scoring {len(rows)} completions of {source} as {args.dataset}\n")
            for start in range(0, len(rows), _BATCH):
                batch = slice(start, start + _BATCH)
                for scored in rewards.score(completions[batch], examples[batch]):
                    line = {"total": scored.total, "parts": scored.parts, "errors": scored.errors}
                    if scored.verdicts:
                        line["verdicts"] = scored.verdicts
                    output.write(json.dumps(line) + "\n")
                    means.add(scored)
                output.flush()
        sys.stderr.write(means.table())
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


class _Means:
    """Mean of each reward over the completions that it scored, and the number of its errors."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {"total": []}
        self._errors: Counter[str] = Counter()

    def add(self, scored: ResponseScore) -> None:
        for name, value in {"total": scored.total, **scored.parts}.items():
            self._values.setdefault(name, []).append(value)
        self._errors.update(scored.errors.keys())

    def table(self) -> str:
        width = max(len(name) for name in self._values)
        lines = []
        for name, values in self._values.items():
            errors = self._errors[name]
            failed = f"   {errors} errors" if errors else ""
            lines.append(
                f"  {name:<{width}}  mean {sum(values) / len(values):.4f}   n {len(values)}{failed}\n"
            )
        return "".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_grpo.rewards",
        description="Score stored completions. Input: one JSON object per line with completion and the data "
        "set's own fields. Output: one JSON object per line with total, parts and errors.",
    )
    parser.add_argument("input", metavar="FILE", help="JSONL file of completions, or - for stdin")
    parser.add_argument(
        "--dataset", required=True, choices=sorted(DATASETS), help="data set of the fields and rewards"
    )
    parser.add_argument("--output", metavar="FILE", help="file for the scores (default: stdout)")
    parser.add_argument("--weight", action="append", default=[], metavar="NAME=W", dest="weights",
                        help="a reward and its weight, repeatable (default: the data set's own)")  # fmt: skip
    parser.add_argument(
        "--function",
        action="append",
        default=[],
        metavar="NAME=SPEC",
        dest="functions",
        help="a reward of your own, NAME=FILE.py:FUNCTION, repeatable, as reward.functions",
    )
    parser.add_argument(
        "--function-args",
        default="{}",
        metavar="JSON",
        help='as reward.args, e.g. {"brevity": {"target": 50}}',
    )
    parser.add_argument(
        "--answer-format",
        choices=[*AnswerFormat.__members__],
        help="as env.answer_format (default: plain for jsonl, otherwise tags)",
    )
    parser.add_argument("--task", help="reasoning_gym: the task, as env.task")
    parser.add_argument("--task-args", default="{}", metavar="JSON", help="reasoning_gym: as env.task_args")
    parser.add_argument("--field", action="append", default=[], metavar="ROLE=COLUMN", dest="fields",
                        help="jsonl: question=COLUMN or answer=COLUMN, as env.fields")  # fmt: skip
    parser.add_argument(
        "--on-error", type=float, default=0.0, help="value of a reward that fails (default 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="as reward.timeout_s (default 5)"
    )
    parser.add_argument("--no-sandbox", action="store_true", help="as reward.sandbox=false")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of completions scored in parallel (default 1)"
    )
    return parser


def _config(args: argparse.Namespace) -> Config:
    if args.timeout <= 0 or args.workers < 1:
        raise ConfigError(
            f"--timeout {args.timeout:g} --workers {args.workers}: both must be positive; "
            "write e.g. --timeout 5 --workers 1"
        )
    env = EnvConfig(
        dataset=args.dataset,
        task=args.task,
        task_args=_json_object("--task-args", args.task_args, '{"max_terms": 3}'),
        fields=dict(_pair(item, "--field") for item in args.fields),
        answer_format=AnswerFormat(args.answer_format or ("plain" if args.dataset == "jsonl" else "tags")),
    )
    weights = {
        name: _weight(name, value) for name, value in (_pair(item, "--weight") for item in args.weights)
    }
    reward = RewardConfig(
        weights=weights,
        functions=dict(_pair(item, "--function") for item in args.functions),
        args=_json_object("--function-args", args.function_args, '{"brevity": {"target": 50}}'),
        on_error=args.on_error,
        timeout_s=args.timeout,
        workers=args.workers,
        sandbox=not args.no_sandbox,
    )
    return Config(env=env, reward=reward)


def _json_object(option: str, text: str, example: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} {text!r} is not JSON: {error}; write e.g. '{example}'") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{option} {text!r} is not a JSON object; write e.g. '{example}'")
    return parsed


def _pair(item: str, option: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{option} {item!r} is not NAME=VALUE; write e.g. {option} answer=1.0")
    return name, value


def _weight(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(
            f"--weight {name}={value}: {value!r} is not a number; write e.g. {name}=1.0"
        ) from error


def _rows(source: str) -> list[Row]:
    if source != "-":
        path = Path(source)
        if not path.is_file():
            raise DataError(f"{source!r} is not a file; name a JSONL file of completions, or - for stdin")
        return read_file(path)
    with tempfile.TemporaryDirectory() as folder:  # read_file() needs a file, not a pipe
        path = Path(folder) / "stdin.jsonl"
        path.write_bytes(sys.stdin.buffer.read())
        return read_file(path)


def _examples(rows: list[Row], env: EnvConfig) -> tuple[list[str], list[Example]]:
    module = dataset_module(env.dataset)
    completions = []
    examples = []
    for row in rows:
        # The files of a run have responses.
        column = next((name for name in ("completion", "response") if name in row.values), None)
        if column is None:
            present = ", ".join(map(repr, row.values)) or "none"
            raise DataError(
                f"{row.where} has no column 'completion' with the text to score, and no 'response', as a run "
                f"writes it; its columns are {present}; rename the column of the text to completion"
            )
        completion = row.values[column]
        if not isinstance(completion, str):
            raise DataError(
                f"{row.where}: {column!r} is {type(completion).__name__}, not a string; write it in quotes"
            )
        fields = {name: value for name, value in row.values.items() if name != column}
        completions.append(completion)
        example = module.example(Row(fields, row.number, row.source), env, f"{env.dataset}/line/{row.number}")
        examples.append(replace(example, columns=fields))
    return completions, examples


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed below; only open() is in the try block)
    except OSError as error:
        raise DataError(
            f"--output {path!r} cannot be written: {error.strerror}; name another file"
        ) from error
    with file:
        yield file
