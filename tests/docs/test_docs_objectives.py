"""docs/objectives.md shows what presets set, and names every key of an objective."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.site_tables import with_tables
from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import parse
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.schema import PolicyConfig, keys

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "config"
PRESETS = sorted(path.stem for path in (CONFIG / "policy").glob("*.yaml"))


@functools.cache
def objectives() -> str:
    """The page with its tables, for which each preset is composed."""
    return with_tables((ROOT / "docs" / "objectives.md").read_text())


@functools.cache
def preset(name: str, primary: str = "grpo_gsm8k") -> dict[str, Any]:
    """The keys of ``policy`` as a run gets them."""
    teacher = ["teacher_model.name=NAME"] if name == "distill" else []
    with composer(CONFIG, primary) as tree:
        return dataclasses.asdict(parse(tree.compose([f"policy={name}", *teacher]).node).policy)


def shown() -> dict[str, dict[str, str]]:
    """The table of presets: a key to the cells of its row, by preset."""
    start = "| key | `grpo` |"
    table = f"{start}{objectives().partition(start)[2]}".partition("\n\n")[0]
    (_, *names), _, *rows = (
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    return {key: dict(zip(names, cells, strict=True)) for key, *cells in rows}


def test_the_table_of_presets_is_what_the_files_compose_to() -> None:
    plain = preset("grpo")
    for name in PRESETS:
        for key, value in preset(name).items():
            cell = shown().get(f"policy.{key}", {}).get(name, "")
            if value != plain[key] or (name == "grpo" and f"policy.{key}" in shown()):
                assert cell == show(value), (name, key)
            else:
                assert cell == "", (name, key)


def test_the_table_holds_exactly_the_keys_that_some_preset_changes() -> None:
    plain = preset("grpo")
    changed = {key for name in PRESETS for key, value in preset(name).items() if value != plain[key]}
    assert shown().keys() == {f"policy.{key}" for key in changed}
    assert all(row.keys() == set(PRESETS) for row in shown().values())


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
    assert [
        key for key in ours if not re.search(rf"`[^`\n]*\b{re.escape(key)}\b[^`\n]*`", objectives())
    ] == []


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md", "docs/objectives.md"])
def test_pages_that_list_the_presets_list_all(page: str) -> None:
    text = (ROOT / page).read_text()  # without the tables that only the site has
    assert [name for name in PRESETS if not re.search(rf"`(policy=)?{name}`", text)] == []
