"""Tables of the documentation's site whose rows stand in code, in configurations or in a data file."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import elsewhere, parse
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.resume import FREE
from torchrl_grpo.observe.rules import RULES

_ROOT = Path(__file__).resolve().parents[1]
_MARKER = re.compile(r"^<!-- table: (.*) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """Return a text with its tables.

    A line ``<!-- table: NAME -->`` becomes a table: ``presets`` is what the files of ``config/policy`` set,
    ``schema`` that of a batch, ``rules`` by which a run is watched, ``resume`` what a resumed run may change,
    and every other name a section of ``other_systems.tsv``.
    """
    return _MARKER.sub(lambda marker: _table(marker[1]), markdown)


@functools.cache
def _table(name: str) -> str:
    match name:
        case "presets":
            head, *body = _presets()
        case "schema":
            head, *body = _schema()
        case "rules":
            head, *body = _rules()
        case "resume":
            head, *body = _resume()
        case _:
            head, *body = _names(name)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def _names(section: str) -> list[list[str]]:
    """Return what the names of another system are called here."""
    kind = "argument" if section == elsewhere.ARGUMENTS else "key"
    rows = [row for row in elsewhere.rows() if row.section == section]
    if not rows:
        raise ValueError(f"other_systems.tsv has no rows of {section}")
    cells = [[_codes(row.theirs), _codes(row.ours), row.differs] for row in rows]
    return [[f"their {kind}", f"our {kind}", "what differs"], *cells]


def _codes(names: str) -> str:
    return names if names == "-" else ", ".join(f"`{name}`" for name in names.split(", "))


def _schema() -> list[list[str]]:
    """Return the table of a docstring, whose rules of "=" show where the columns begin."""
    module = ast.parse((_ROOT / "torchrl_grpo" / "batch" / "schema.py").read_text(encoding="utf-8"))
    lines = (ast.get_docstring(module) or "").splitlines()
    top, middle, bottom = (number for number, line in enumerate(lines) if line.startswith("="))
    starts = [rule.start() for rule in re.finditer("=+", lines[top])]
    rows: list[list[str]] = []
    for line in [lines[top + 1], *lines[middle + 1 : bottom]]:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1][-1] += f" {cells[-1]}"
    head, *body = rows
    return [head, *([f"`{key}`", f"`{shape}`", *rest] for key, shape, *rest in body)]


def _rules() -> list[list[str]]:
    """Return the rules by which a run is watched."""
    rows = [["warning", "sign, of", "begins after", "cause, and key to change", "source of the threshold"]]
    for rule in RULES:
        limits = "".join(f", {limit.threshold:g} {limit.where}" for limit in rule.limits)
        bound = f"{'at most' if rule.below else 'at least'} {rule.threshold:g}{limits}"
        lasts = f"{rule.window} {rule.unit}{'s' if rule.window > 1 else ''}"
        rows.append([f"`{rule.name}`", f"{bound}: {', '.join(rule.reads)}", lasts, rule.advice, rule.source])
    return rows


def _resume() -> list[list[str]]:
    """Return the keys that a resumed run may change, and what changes with them."""
    rows = [[_codes(", ".join(names)), effect] for effect, names in FREE.items()]
    return [["may change", "what changes with it"], *rows]


def _presets() -> list[list[str]]:
    """Return the keys of ``policy`` that a preset changes. An empty cell has the value of grpo."""
    names = {path.stem for path in (_ROOT / "config" / "policy").glob("*.yaml")} - {"grpo"}
    default, others = _policy("grpo"), [_policy(name) for name in sorted(names)]
    rows = [["key", "`grpo`", *(f"`{name}`" for name in sorted(names))]]
    for key, value in default.items():
        cells = [show(other[key]) if other[key] != value else "" for other in others]
        if any(cells):
            rows.append([f"`policy.{key}`", show(value), *cells])
    return rows


def _policy(name: str) -> dict[str, Any]:
    """Return the keys of ``policy`` as a run with the preset gets them."""
    teacher = ["teacher_model.name=NAME"] if name == "distill" else []
    with composer(_ROOT / "config", "grpo_gsm8k") as tree:
        return dataclasses.asdict(parse(tree.compose([f"policy={name}", *teacher]).node).policy)
