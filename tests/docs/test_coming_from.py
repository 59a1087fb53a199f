"""The names of other systems lead to keys that exist, and each key of the other systems has a row.

Messages about unknown keys, options and arguments read the rows. docs/coming_from.md shows them as tables.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.site_tables import with_tables
from torchrl_grpo import GRPOTrainer
from torchrl_grpo.cli.arguments import read_arguments
from torchrl_grpo.config import elsewhere
from torchrl_grpo.config.schema import keys
from torchrl_grpo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = with_tables((ROOT / "docs" / "coming_from.md").read_text())
# Section -> the least number of rows of its table.
ROWS = {
    "TRL": 84,
    "verl": 42,
    "AReaL": 76,
    "OpenRLHF": 60,
    "NeMo-RL": 62,
    "prime-rl": 30,
    "MaxEnt-GRPO": 80,
    "TorchRL": 63,
    "Other names": 25,
    elsewhere.ARGUMENTS: 12,
}
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
OURS = set(inspect.signature(GRPOTrainer).parameters) - {"unknown"}


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
    _, heading, rest = PAGE.partition(f"\n## {section}\n")
    assert heading, f"there is no section {section}"
    found_rows = []
    for line in rest.partition("\n## ")[0].splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, f"{section}: not three columns: {line}"
            found_rows.append(Row(codes(cells[0]), cells[1], cells[2]))
    return found_rows[2:]


def exists(word: str) -> bool:
    """Whether a word is a key, one with a value, or a preset of a group of configurations."""
    key, separator, value = word.partition("=")
    if separator and (ROOT / "config" / key).is_dir():
        return (ROOT / "config" / key / f"{value}.yaml").is_file()
    return key not in keys().sections and keys().knows(key)


@sections
def test_every_key_of_ours_exists(section: str) -> None:
    for row in rows(section):
        for word in codes(row.ours):
            known = word in OURS if section == elsewhere.ARGUMENTS else exists(word)
            assert known, f"{row.theirs}: there is no key {word}"


def test_a_key_that_does_not_exist_would_be_seen() -> None:
    assert exists("policy.kl_coef") and exists("policy=maxent") and exists("seed")
    assert not exists("policy.kl_coeff") and not exists("policy=maxnet") and not exists("sead")
    assert not exists("policy") and exists("train.num_epochs=2")


@sections
def test_a_section_introduces_a_table_of_many_rows(section: str) -> None:
    introduction = PAGE.partition(f"\n## {section}\n")[2].partition("\n|")[0]
    if section != "Other names":
        assert "`" in introduction and len(introduction.split()) > 20
    assert len(rows(section)) >= ROWS[section]
    kind = "argument" if section == elsewhere.ARGUMENTS else "key"
    assert f"## {section}\n{introduction}\n| their {kind} | our {kind} | what differs |\n" in PAGE


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


def test_the_page_shows_every_row_of_the_file() -> None:
    assert {row.section for row in elsewhere.rows()} == set(ROWS)
    assert sum(len(rows(section)) for section in ROWS) == len(elsewhere.rows())
    assert {row.value for row in elsewhere.rows()} == {"", "same", "unit"}


def test_a_table_of_names_that_are_not_in_the_file_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows of TLR"):
        with_tables("<!-- table: TLR -->")


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


# -- messages


def first_rows(arguments: bool) -> dict[str, Row]:
    """Name of another system -> the first row that has it."""
    by_name: dict[str, Row] = {}
    for section in ROWS:
        for row in rows(section) if (section == elsewhere.ARGUMENTS) is arguments else ():
            for name in row.theirs:
                by_name.setdefault(name.replace(": ", "."), row)
    return by_name


def test_every_name_of_the_tables_leads_to_its_row_as_a_key() -> None:
    names = {name: row for name, row in first_rows(False).items() if not keys().knows(name)}
    assert len(names) > 400
    for name, row in names.items():
        advice = str(keys().unknown(name, f"{name}=1"))
        expected = codes(row.ours)
        assert all(word in advice for word in expected), f"{name}: {advice}"
        instead = "write nothing in its place" if not row.differs.startswith("Write ") else "write "
        assert expected or instead in advice, f"{name}: {advice}"


@pytest.mark.slow
def test_every_name_of_the_tables_leads_to_its_row_as_an_option() -> None:
    for number, (name, row) in enumerate(first_rows(False).items()):
        # A parser takes milliseconds to make, so each name is tried in one of three ways.
        words = ([f"--{name}=1"], [f"--{name.replace('_', '-')}", "1"], [f"--{name}"])[number % 3]
        with pytest.raises(ConfigError) as raised:
            read_arguments([*words, "seed=1"])
        message = str(raised.value)
        assert words[0] in message and "without dashes" in message
        expected = [] if keys().knows(name) else codes(row.ours)
        assert all(word in message for word in expected), f"{name}: {message}"


def test_every_name_of_the_tables_leads_to_its_row_as_an_argument() -> None:
    rows_of_arguments = first_rows(True)
    for name, row in {**first_rows(False), **rows_of_arguments}.items():
        if not name.isidentifier() or name in OURS or name in keys().sections:
            continue
        arguments: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigError, match=f"GRPOTrainer has no such argument: {name}: ") as raised:
            GRPOTrainer(**arguments)
        assert all(word in str(raised.value) for word in codes(row.ours)), raised.value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("report_to=wandb", "write logging.backends=[wandb] instead"),
        ("bf16=true", "write train_model.autocast=bf16 instead"),
        ("lr_scheduler_type=cosine", "write optimizer.schedule=cosine instead"),
        ("vllm_mode=server", "write inference_model.backend=vllm_server instead"),
        ("learning_rate=2e-5", "write optimizer.lr=2e-5 instead"),
        ("filter_overlong_prompts=True", "write env.overlong_prompts=drop instead"),
        ("train_dataset.batch_size=4", "write env.num_envs=4 instead. Prompts in both"),
        ("beta=0.04", "write policy.kl_coef=0.04 instead"),
        ("vllm_gpu_memory_utilization=0.5", "write inference_model.gpu_memory_utilization=0.5 instead"),
        ("warmup_steps=10", "write optimizer.warmup_steps=10 instead"),
        ("epsilon_high=0.28", "write policy.clip_epsilon_high=0.28 instead. Subtract 1 with"),
        ("lora_target_modules=q_proj", "write train_model.lora.target_modules=[q_proj] instead"),
        # The table says what a value is called here.
        ("scale_rewards=group", "write policy.advantage_std=unbiased instead"),
        ("kl_loss_type=low_var_kl", "write policy.kl_estimator=k3 instead"),
        ("mask_truncated_completions=true", "write policy.overlong=mask instead"),
        ("advantage_estimator=dr_grpo", "write policy=dr_grpo instead"),
        # The row says what to do without a key.
        ("output_dir=out", "write hydra.run.dir=out, or use the dated folder"),
        ("logging_dir=out", "write hydra.run.dir=out."),
        ("disable_dropout=true", "write nothing in its place. Dropout is always off"),
        # The key takes another kind of value.
        (
            "save_strategy=epoch",
            "write train.checkpoint_frequency=VALUE instead, where VALUE is a whole",
        ),
        ("lr_scheduler_type=step", "VALUE is one of constant, linear, cosine. Our default is constant"),
        ("adam_beta1=0.9", "write optimizer.betas instead. One list"),
        ("dtype=bfloat16", "write train_model.autocast=bf16 instead"),
        (
            "num_devices=2",
            "write train_model.num_devices=2, ref_model.num_devices=2, teacher_model.num_devices=2 or",
        ),
        # What chooses one of several files.
        ("env.name=gsm8k", "write env=gsm8k instead"),
        ("dataset=gsm8k", "write env=gsm8k instead"),
        ("algorithm=dapo", "write policy=dapo instead"),
        # The meaning differs, so the value is not carried over.
        (
            "max_prompt_length=512",
            "write inference_model.max_model_len instead. Prompt and response together",
        ),
        ("eval_dataset=x", "write env.eval_data_path or env.eval_split instead"),
        # A part of a long name.
        ("rollout.n=4", "write env.repeats=4 instead"),
        ("train.eval_steps=4", "eval.frequency"),
        # A page of the documentation, and no link.
        ("scheduler.type=slurm", "(docs/slurm.md)"),
    ],
)
def test_a_value_is_carried_over_where_it_means_the_same(written: str, meant: str) -> None:
    advice = str(keys().unknown(written.partition("=")[0], written))
    assert meant in advice and "`" not in advice and "](" not in advice


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--env gsm8k", "write env=gsm8k instead"),
        ("--env=gsm8k", "write env=gsm8k instead"),
        ("--env nothing_like_it", "write env= and one of arithmetic, "),
        ("--recipe cpu", "write +recipe=cpu instead"),
        ("--method sft", "write +method=sft instead"),
        ("--method grpo", "write train.method=grpo instead"),
        ("--algorithm dapo", "write policy=dapo instead"),
        ("--config_name grpo_ifeval", "write --config-name grpo_ifeval instead"),
        ("--config-nmae grpo_ifeval", "write --config-name grpo_ifeval instead"),
        ("--multi_run", "write --multirun instead"),
        ("--env gsm9k", "write env=gsm8k instead"),
        ("--env my.py:shop", "write env.environment=my.py:shop for a class or env.dataset=my.py:shop for a"),
        ("--train x", "write for example train.method=VALUE instead, because train is a group of keys"),
        ("--logging_dir x", "write hydra.run.dir=x. "),
        ("--inference_model vllm", "write inference_model.backend=vllm instead"),
        (
            "--save_strategy steps",
            "write train.checkpoint_frequency=VALUE instead, where VALUE is a whole",
        ),
        ("--bf16", "write train_model.autocast=bf16 instead"),
        ("--use_vllm", "write inference_model.backend=vllm instead"),
        ("--use_vllm false", "write inference_model.backend=transformers instead"),
        ("--dry-run", "write dry_run=true instead"),
        ("--no-shuffle", "write env.shuffle=false instead"),
        ("--resume", "write resume=auto instead"),
        ("--use_lora", "write train_model.lora.rank=16 instead"),
        ("--lr", "write optimizer.lr=VALUE instead, where VALUE is a number"),
        ("--reward_shift -1", "write policy.reward_shift=-1 instead"),
    ],
)
def test_an_option_leads_to_a_whole_override(words: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_arguments([*words.split(), "seed=1"])
    assert f"unrecognized arguments: {words}; {meant}" in str(raised.value)


def test_no_section_is_proposed_with_a_value() -> None:
    groups = {path.name for path in (ROOT / "config").iterdir() if path.is_dir()}
    for section in keys().sections - groups:
        for name in (section, f"{section}_x", f"{section}s"):
            advice = keys().advice(name, "x")
            assert f"write {section}=" not in advice and f" {section}=x" not in advice, advice


def test_a_key_written_as_an_option_is_a_key() -> None:
    for words in (["--optimizer.lr", "1e-5"], ["--optimizer.lr=1e-5"], ["--lr", "1e-5"]):
        with pytest.raises(ConfigError, match=r"write optimizer\.lr=1e-5 instead"):
            read_arguments(words)
    with pytest.raises(ConfigError, match="--no-such-option; write only options that --help lists"):
        read_arguments(["--no-such-option", "seed=1"])
