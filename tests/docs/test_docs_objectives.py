"""docs/objectives.md shows what presets set and how one was added, and names every key of an objective."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import parse
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.schema import PolicyConfig, keys

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "config"
PAGE = (ROOT / "docs" / "objectives.md").read_text()
PRESETS = sorted(path.stem for path in (CONFIG / "policy").glob("*.yaml"))
BEGIN, END = "<!-- presets -->\n", "<!-- /presets -->\n"


@functools.cache
def preset(name: str, primary: str = "grpo_gsm8k") -> dict[str, Any]:
    """The keys of ``policy`` as a run gets them."""
    with composer(CONFIG, primary) as tree:
        return dataclasses.asdict(parse(tree.compose([f"policy={name}"]).node).policy)


def table(columns: list[str]) -> str:
    """The table of what presets set: a cell is empty where the value is that of grpo."""
    values = {name: preset(name) for name in columns}
    plain = preset("grpo")
    rows = [["key", *(f"`{name}`" for name in columns)], ["---"] * (len(columns) + 1)]
    for key, default in plain.items():
        if any(value[key] != default for value in values.values()):
            cells = [
                show(value[key]) if name == "grpo" or value[key] != default else ""
                for name, value in values.items()
            ]
            rows.append([f"`policy.{key}`", *cells])
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|\n" for row in rows)


def shown() -> str:
    return PAGE.partition(BEGIN)[2].partition(END)[0]


def columns_shown() -> list[str]:
    return re.findall(r"`(\w+)`", shown().partition("\n")[0])


def test_every_preset_has_a_column_and_every_column_is_a_preset() -> None:
    assert sorted(columns_shown()) == PRESETS


def test_the_table_of_presets_is_what_the_files_compose_to() -> None:
    known = [name for name in columns_shown() if name in PRESETS]
    right = table([*known, *(name for name in PRESETS if name not in known)])
    assert shown() == right, f"docs/objectives.md: between the markers of the presets should stand\n\n{right}"


def test_the_table_holds_exactly_the_keys_that_some_preset_changes() -> None:
    plain = preset("grpo")
    changed = {key for name in PRESETS for key, value in preset(name).items() if value != plain[key]}
    assert set(re.findall(r"^\| `policy\.(\w+)`", shown(), re.MULTILINE)) == changed
    assert len(changed) > 8


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_arrives_unchanged_in_every_primary_configuration(name: str) -> None:
    assert preset(name) == preset(name, "grpo_quickstart") == preset(name, "grpo_ifeval")


@pytest.mark.parametrize("primary", ["grpo_gsm8k", "grpo_ifeval", "grpo_quickstart"])
def test_the_shipped_recipes_take_one_optimizer_step_a_round(primary: str) -> None:
    with composer(CONFIG, primary) as tree:
        train = parse(tree.compose([]).node).train
    assert (train.optim_batch_size, train.epochs) == (None, 1)


def test_every_key_of_an_objective_is_mentioned() -> None:
    ours = [key for key in keys().leaves if key.startswith(("policy.", "ref_model.refresh"))]
    assert len(ours) > len(dataclasses.fields(PolicyConfig))
    assert [key for key in ours if not re.search(rf"`[^`\n]*\b{re.escape(key)}\b[^`\n]*`", PAGE)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md", "docs/objectives.md"])
def test_pages_that_list_the_presets_list_all(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [name for name in PRESETS if not re.search(rf"`(policy=)?{name}`", text)] == []


def block(language: str) -> str:
    """The code block of a language under "Adding a variant"."""
    section = PAGE.partition("\n## Adding a variant\n")[2]
    match = re.search(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def test_the_variant_shown_is_that_of_the_code() -> None:
    source = ast.parse((ROOT / "torchrl_grpo" / "objectives" / "surrogates.py").read_text())
    (function,) = ast.parse(block("python")).body
    assert isinstance(function, ast.FunctionDef)
    (real,) = [n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == function.name]
    assert ast.get_docstring(real)
    real.body.pop(0)
    assert ast.unparse(function) == ast.unparse(real)
    assert block("yaml") == (CONFIG / "policy" / f"{function.name}.yaml").read_text()
