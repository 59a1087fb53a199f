"""What a user writes wins over what a preset, a recipe or a primary configuration wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cli_calls
import pytest
from cli_calls import ROOT, accept, call

from torchrl_grpo.cli.checked_job import resolve_job
from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("policy=maxent policy.init_kl_coeff=0.4", {"policy.kl_coef": 0.4, "policy.kl_in": "weights"}),
    (
        "policy=maxent policy.init_kl_coeff=0.4 policy.kl_target=0.3",
        {"policy.kl_coef": 0.0, "policy.init_kl_coeff": 0.4},
    ),
    ("policy=rloo policy.kl_in=loss policy.kl_coef=0.1", {"policy.kl_estimator": "k3"}),
    (
        "policy=rloo policy.reward_combination=apart policy.kl_coef=0.1",
        {"policy.kl_in": "loss", "policy.kl_estimator": "k3"},
    ),
    ("policy=sapo policy.surrogate=clip", {"policy.surrogate_args": {}}),
    ("policy=maxent policy.advantage_estimator=group_mean", {"policy.kl_in": "loss", "policy.kl_coef": 0.04}),
    ("policy=rloo policy.advantage_estimator=maxent", {"policy.kl_in": "weights"}),
    ("policy.advantage_estimator=maxent policy.kl_coef=0.1", {"policy.kl_in": "weights"}),
    ("train.num_epochs=2", {"train.total_dialog_turns": None, "train.num_epochs": 2.0}),
    ("train={num_epochs:2} env.num_envs=7", {"train.total_dialog_turns": None}),
    ("+recipe=cpu train.num_epochs=1", {"train.total_dialog_turns": None}),
    ("+recipe=cpu env.num_envs=12", {"train.total_dialog_turns": 8064}),
    ("+recipe=cpu inference_model.max_new_tokens=600", {"inference_model.max_model_len": 1112}),
    ("+recipe=gpu_24gb train_model.parallelism=fsdp2", {"train_model.lora.rank": 0}),
    (
        "+recipe=gpu_8x80gb allocation_mode=vllm:d2+ddp:d2",
        {"train_model.num_devices": 2, "train_model.parallelism": "ddp", "inference_model.num_devices": 2},
    ),
    ("env=arithmetic env.task=chain_sum", {"env.task_args": {}}),
    ("env=arithmetic env.task=chain_sum env.task_args.min_terms=3", {"env.task_args": {"min_terms": 3}}),
    ("env=arithmetic env.task=chain_sum env.task_args={min_terms:3}", {"env.task_args": {"min_terms": 3}}),
    ("env=arithmetic env.task_args.min_terms=1", {"env.task_args.format_style": "natural"}),
    ("env=countdown env.dataset=mine.py:problems", {"env.fields": {}}),
    ("env=countdown env.dataset=mine.py:problems env.fields={answer:a}", {"env.fields": {"answer": "a"}}),
    ("env=countdown env.dataset=gsm8k", {"env.fields": {}}),
    (
        "env=arithmetic env.dataset=gsm8k",
        {"env.task": None, "env.task_args": {}, "reward.weights": {}},
    ),
    ("env=countdown", {"env.fields": {"identity": "identity"}}),
    ("env.dataset=mine.py:problems", {"env.answer_format": "plain"}),
    ("env.dataset=jsonl env.data_path=.", {"env.answer_format": "plain"}),
    ("env=jsonl env.data_path=.", {"env.answer_format": "plain"}),
    ("env.dataset=mine.py:problems env.answer_format=tags", {"env.answer_format": "tags"}),
    ("env=jsonl env.data_path=. env.answer_format=tags", {"env.answer_format": "tags"}),
    ("env=arithmetic env.dataset=mine.py:problems", {"env.answer_format": "equation"}),
    ("env.dataset=math", {"env.answer_format": "tags"}),
    # The data set that the columns are of.
    (
        "env=countdown env.dataset=torchrl_grpo.envs.episodes.countdown:problems",
        {"env.fields": {"identity": "identity"}},
    ),
    # Nothing contradicts anything.
    ("policy=maxent policy.kl_coef=0.2", {"policy.kl_coef": 0.2}),
    ("policy=dapo policy.kl_coef=0.1", {"policy.constant_groups": "refill"}),
]


def read(cfg: Config, key: str) -> Any:
    """Value of a key, or of an entry of a mapping."""
    value: Any = cfg
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else vars(value)[name]
    return value


@pytest.mark.parametrize(("words", "expected"), CASES, ids=[words for words, _ in CASES])
def test_a_preset_gives_way_to_the_command_line(words: str, expected: dict[str, Any]) -> None:
    cfg = accept(*words.split())
    assert {key: read(cfg, key) for key in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        # Both are the user's own.
        "policy=maxent policy.kl_coef=0.1 policy.kl_target=0.1 policy.init_kl_coeff=0.4",
        "policy=maxent policy.kl_in=loss",
        "policy.advantage_estimator=maxent policy.kl_in=reward",
        "train.num_epochs=2 train.total_dialog_turns=64000",
        "policy.kl_coef=0.1 policy.kl_in=loss policy.kl_estimator=k1",
        "train_model.lora.rank=16 train_model.parallelism=fsdp2",
        "+recipe=cpu train.num_epochs=1 train.total_dialog_turns=8000",
        "train_model.lora={rank:8,alpha:32} train_model.parallelism=fsdp2",
        "train_model={lora:{rank:8}} train_model.parallelism=fsdp2",
        "train={total_dialog_turns:64} train.num_epochs=2",
        "train={total_dialog_turns:100} env.num_envs=7",
        "train={optim_batch_size:6} env.repeats=8",
    ],
)
def test_words_of_the_user_that_contradict_each_other_are_refused(words: str) -> None:
    with pytest.raises(ConfigError):
        accept(*words.split())


# The names that Hydra's own files and the schema begin with are not taken for theirs.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "hydra_test", "schema_test"])
def test_a_primary_configuration_wins_over_its_preset_and_gives_way_to_the_command_line(
    name: str,
    tmp_path: Path,
) -> None:
    (tmp_path / f"{name}.yaml").write_text(
        "defaults: [schema, base, {env: gsm8k}, {policy: maxent}, _self_]\n"
        "policy: {init_kl_coeff: 0.4, kl_target: 0.3}\n"
        "train: {num_epochs: 3}\n"
        "train_model: {num_devices: 4, parallelism: fsdp2}\n"
    )

    def read(*words: str) -> Config:
        with composer(ROOT / "config", name, tmp_path) as tree:
            (overrides,) = tree.jobs(list(words), sweep=False)
            return resolve_job(tree.compose(overrides).node, lambda cfg: None)

    written, changed = read(), read("policy.kl_coef=0.1")
    assert (written.policy.kl_coef, written.policy.init_kl_coeff) == (0.0, 0.4)
    assert (written.train.num_epochs, written.train.total_dialog_turns) == (3, None)
    assert read("train_model.devices=[0,1]").train_model.num_devices == "auto"
    assert read("train_model.lora.rank=16").train_model.parallelism == "auto"
    longer = read("train.total_dialog_turns=64000")
    assert (longer.train.num_epochs, longer.train.total_dialog_turns) == (None, 64000)
    assert (changed.policy.kl_coef, changed.policy.init_kl_coeff, changed.policy.kl_target) == (
        0.1,
        None,
        0.3,
    )


def test_the_run_gets_what_was_checked_and_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_calls.set_up(tmp_path, monkeypatch)
    assert call("model.name=smollm2-135m", "policy=rloo", "policy.kl_in=loss", "policy.kl_coef=0.1") == 0
    ((cfg, _),) = cli_calls.SEEN
    assert cfg.policy.kl_estimator == "k3"
    line = "note: policy.kl_estimator=k3 instead of k1, because of policy.kl_in=loss\n"
    assert capsys.readouterr().out.count(line) == 1
