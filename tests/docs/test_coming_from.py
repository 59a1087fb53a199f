"""docs/coming_from.md names keys that exist, and has a row for each key of the other systems."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from torchrl_grpo.config.parsing import keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
# Section -> the least number of rows of its table.
ROWS = {"TRL": 84, "verl": 42, "AReaL": 76, "MaxEnt-GRPO": 80, "TorchRL": 63}
# Arguments that TRL's configuration inherits, and those of its trainer.
INHERITED = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "max_grad_norm",
    "warmup_ratio",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "run_name",
    "seed",
    "output_dir",
    "eval_strategy",
    "eval_steps",
    "resume_from_checkpoint",
    "deepspeed",
    "torch_compile",
    "learning_rate",
    "reward_funcs",
    "peft_config",
    "train_dataset",
    "eval_dataset",
}

sections = pytest.mark.parametrize("section", ROWS)


class Row(NamedTuple):
    """A row of a table: keys of theirs, keys of ours, and what differs."""

    theirs: list[str]
    ours: str
    differs: str


def codes(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def rows(section: str) -> list[Row]:
    """The rows of a section's table, without its head."""
    _, found, rest = PAGE.partition(f"\n## {section}\n")
    assert found, f"there is no section {section}"
    found_rows = []
    for line in rest.partition("\n## ")[0].splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, f"{section}: not three columns: {line}"
            found_rows.append(Row(codes(cells[0]), cells[1], cells[2]))
    return found_rows[2:]


def exists(word: str) -> bool:
    """Whether a word is a key, one with a value, or a preset of a group of configurations."""
    key, given, value = word.partition("=")
    if given and (ROOT / "config" / key).is_dir():
        return (ROOT / "config" / key / f"{value}.yaml").is_file()
    return key not in keys().sections and keys().knows(key)


@sections
def test_every_key_of_ours_exists(section: str) -> None:
    for row in rows(section):
        for word in codes(row.ours):
            assert exists(word), f"{row.theirs}: there is no key {word}"


def test_a_key_that_does_not_exist_would_be_seen() -> None:
    assert exists("policy.kl_coef") and exists("policy=maxent") and exists("seed")
    assert not exists("policy.kl_coeff") and not exists("policy=maxnet") and not exists("sead")
    assert not exists("policy") and exists("train.num_epochs=2")


@sections
def test_a_section_introduces_a_table_of_many_rows(section: str) -> None:
    introduction = PAGE.partition(f"\n## {section}\n")[2].partition("\n|")[0]
    assert "`" in introduction and len(introduction.split()) > 20
    assert len(rows(section)) >= ROWS[section]
    assert f"## {section}\n{introduction}\n| their key | our key | what differs |\n" in PAGE


@sections
def test_every_row_is_complete(section: str) -> None:
    for row in rows(section):
        assert row.theirs, f"{section}: a row without a key: {row}"
        assert row.ours == "-" or codes(row.ours), f"{row.theirs}: neither a key nor -"
        assert row.differs, f"{row.theirs}: the last column is empty"


@sections
def test_no_key_of_theirs_has_two_rows(section: str) -> None:
    counts = Counter(key for row in rows(section) for key in row.theirs)
    assert not [key for key, count in counts.items() if count > 1]


def test_there_is_no_section_without_a_number_of_rows() -> None:
    assert set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) == set(ROWS)


def test_arguments_of_trl_outside_its_configuration_have_rows() -> None:
    assert not INHERITED - {key for row in rows("TRL") for key in row.theirs}


@pytest.mark.slow
def test_every_field_of_trls_configuration_has_a_row() -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(trl.GRPOConfig)} - inherited
    assert len(own) > 60
    assert not own - {key for row in rows("TRL") for key in row.theirs}
