"""The shipped configurations, the schema, and what the parser and its checks let through."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import runpy
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from key_use import read_keys
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.cli.compose import composer, open_free_form
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.__main__ import files
from torchrl_grpo.config.builtin import DATASETS, ENVIRONMENTS, REWARDS, TOOLS, load_built_in
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import LOGGERS
from torchrl_grpo.data.load import load
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards import registry
from torchrl_grpo.rewards.reward_set import close_all

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "config"
# Those of the launcher have keys of their own: tests/distributed/test_ranks.py.
YAMLS = sorted(path for path in CONFIG.rglob("*.yaml") if path.parent.name != "accelerate")
PRIMARIES = ["grpo_gsm8k", "grpo_ifeval", "grpo_quickstart", "grpo_quickstart_lora"]
# Rooms that show keys and check them. Of their modules only these act on keys.
NOT_READERS = {"cli", "config"}
READERS = {"cli/dry_run.py", "cli/main.py", "cli/multirun.py", "config/derived.py", "config/mixture.py"}


def composed(*words: str, name: str = "grpo_gsm8k") -> Config:
    with composer(CONFIG, name) as tree:
        (overrides,) = tree.jobs([open_free_form(word) for word in words], sweep=False)
        return parse(tree.compose(overrides).node)


def leaves(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or (prefix and keys().free_form_parent(prefix[:-1]) is not None):
        return [prefix[:-1]]
    return [leaf for name, value in node.items() for leaf in leaves(value, f"{prefix}{name}.")]


def is_global(path: Path) -> bool:
    """Whether a file of a group sets keys of several groups."""
    return path.read_text(encoding="utf-8").startswith("# @package _global_\n")


def yaml_keys(path: Path) -> list[str]:
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    node.pop("defaults", None)
    package = "" if path.parent == CONFIG or is_global(path) else f"{path.parent.name}."
    return [key for key in leaves(node, package) if key]


# The files


@pytest.mark.parametrize("name", PRIMARIES)
def test_shipped_configuration_is_valid(name: str) -> None:
    assert isinstance(composed(name=name), Config)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(CONFIG)))
def test_every_key_of_a_file_exists_and_is_explained_where_it_stands(path: Path) -> None:
    assert set(yaml_keys(path)) <= set(keys().leaves)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "a file says in its first line what it is"
    inside_defaults = False
    for number, line in enumerate(lines):
        if re.match(r"\S", line) and not line.startswith("#"):
            inside_defaults = line.startswith("defaults:")
        match = re.match(r"( *)([a-z_]+):(.*)", line)
        if match is None or inside_defaults:
            continue
        spans_groups = path.parent == CONFIG or is_global(path)
        opens_section = not match[3].strip() and match[1] == "" and spans_groups
        if not opens_section:
            assert lines[number - 1].strip().startswith("# "), f"{path.name}: no comment above {line}"


def test_every_key_of_the_schema_has_help_and_stands_in_the_base_or_the_policy() -> None:
    shown = {*yaml_keys(CONFIG / "base.yaml"), *yaml_keys(CONFIG / "policy" / "grpo.yaml")}
    assert shown == set(keys().leaves)
    assert not [key for key, text in keys().help.items() if not text.rstrip().endswith(".")]


@pytest.mark.parametrize(("name", "text"), files().items())
def test_base_and_policy_are_generated_from_the_schema(name: str, text: str) -> None:
    shipped = (CONFIG / name).read_text(encoding="utf-8")
    assert shipped == text, f"config/{name} differs from the schema; run python -m torchrl_grpo.config"


def test_base_and_policy_show_the_defaults_of_the_schema() -> None:
    base = OmegaConf.to_container(OmegaConf.load(CONFIG / "base.yaml"))
    assert isinstance(base, dict)
    base["policy"] = OmegaConf.to_container(OmegaConf.load(CONFIG / "policy" / "grpo.yaml"))
    assert base == dataclasses.asdict(Config())


def test_help_names_every_choice_of_a_key() -> None:
    for key in keys().leaves:
        for choice in keys().choices(key):
            assert re.search(rf"\b{choice}\b", keys().help[key]), (key, choice)


def test_help_names_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (DATASETS, ENVIRONMENTS, REWARDS, TOOLS, LOGGERS):
        # As if one more was registered: a reward of correctness, for example.
        monkeypatch.setitem(names, "one_more", next(iter(names.values())))
    again = {
        module: runpy.run_path(str(ROOT / f"torchrl_grpo/config/{module}.py"))
        for module in ("schema", "schema_task")
    }
    for module, section, name in (
        ("schema_task", "EnvConfig", "dataset"),
        ("schema_task", "EnvConfig", "environment"),
        ("schema_task", "EnvConfig", "tools"),
        ("schema_task", "RewardConfig", "weights"),
        ("schema", "EvalConfig", "reward"),
        ("schema", "LoggingConfig", "backends"),
    ):
        fields = {field.name: field for field in dataclasses.fields(again[module][section])}
        assert "one_more" in fields[name].metadata["help"], name


def test_choices_are_written_as_they_are_named() -> None:
    choices = [hint for hint in keys().leaves.values() if isinstance(hint, type) and issubclass(hint, Enum)]
    assert len(choices) > 20
    assert all(choice.name == choice.value for hint in choices for choice in hint)


@pytest.mark.slow
def test_every_key_of_every_shipped_configuration_is_read_by_code() -> None:
    read: set[str] = set()
    package = ROOT / "torchrl_grpo"
    for path in package.rglob("*.py"):
        module = path.relative_to(package)
        if module.parts[0] not in NOT_READERS or module.as_posix() in READERS:
            read |= read_keys(path.read_text(encoding="utf-8"))
    shipped = {key for path in YAMLS for key in yaml_keys(path)} | set(keys().leaves)
    assert sorted(shipped - read) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = cfg.env.num_envs", True),
        ("x = self.cfg.env.num_envs", True),
        ("env = self._cfg.env\nx = env.num_envs", True),
        ("self._env = cfg.env\nx = self._env.num_envs", True),
        ("a, env = 1, cfg.env\nx = env.num_envs", True),
        ("def f(e: EnvConfig) -> int:\n    return e.num_envs", True),
        ("def f(self, e: EnvConfig) -> None:\n    self.e = e\n    return self.e.num_envs", True),
        ("cfg.env.num_envs = 3", False),
        ("x = env.num_envs", False),
        ("x = cfg.train.num_envs", False),
        ("x = 'cfg.env.num_envs'  # cfg.env.num_envs", False),
        ("def f(num_envs: int) -> int:\n    return num_envs", False),
    ],
)
def test_key_use_finds_reads_and_only_reads(source: str, expected: bool) -> None:
    assert ("env.num_envs" in read_keys(source)) is expected


def test_what_is_registered_exists_and_has_its_own_name() -> None:
    for dataset in DATASETS.values():
        module = importlib.import_module(dataset.module)
        assert callable(module.load) and callable(module.example)
    for name, reward in REWARDS.items():
        built = load_built_in(reward.build)(Config())
        assert built.name == name
        close_all([built])
        assert reward.grader is None or load_built_in(reward.grader)().primary
    for environment in ENVIRONMENTS.values():
        assert callable(load_built_in(environment).step)
    assert [load_built_in(tool)().name for tool in TOOLS.values()] == list(TOOLS)


def test_a_reward_judges_the_datasets_that_it_is_registered_for_and_no_others() -> None:
    for dataset in DATASETS:
        for reward, registered in REWARDS.items():
            cfg = Config()
            cfg.env.dataset, cfg.reward.weights = dataset, {reward: 1.0}
            if dataset in registered.datasets:
                assert registry.check_weights(cfg)
            else:
                with pytest.raises(ConfigError):
                    registry.check_weights(cfg)


# Commands that must be right


@pytest.mark.parametrize("name", PRIMARIES)
@pytest.mark.parametrize(
    "words",
    [
        "train_model.num_devices=1 ref_model.num_devices=1 inference_model.num_devices=1",
        "train_model.devices=[0] ref_model.devices=[0] inference_model.devices=[0]",
        "optimizer.lr=2e-5 optimizer.weight_decay=0.01",
        "model.name=some/model policy.kl_coef=0.01 inference_model.gpu_memory_utilization=0.5",
        "env.num_envs=4 env.repeats=2 train.total_dialog_turns=16 train.optim_batch_size=4",
        "inference_model.backend=transformers train.checkpoint_frequency=3 logging.backends=[csv]",
        "env=gsm8k env.dataset=ifeval",
        "env=math",
        "env=reasoning_gym env.task=gsm_symbolic",
        "policy=grpo ++policy.kl_coef=0.1 +reward.weights.format=0.5",
        "train.gradient_accumulation_steps=64 train.optim_batch_size=null",
    ],
)
def test_promised_commands_are_valid(name: str, words: str) -> None:
    composed(*words.split(), name=name)


def test_dataset_key_alone_swaps_the_dataset_of_the_default_configuration() -> None:
    assert composed("env.dataset=ifeval").env.dataset == "ifeval"
    assert composed("env.dataset=reasoning_gym", "env.task=gsm_symbolic").env.task == "gsm_symbolic"


def test_values_arrive_with_their_types(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("")
    cfg = composed(
        "env=jsonl",
        f"env.data_path={file}",
        "env.fields={question: q, answer: a}",
        "reward.weights={exact_match: 1, format: 0.5}",
        "logging.backends=[csv,wandb]",
        "policy.clip_epsilon_high=0.28",
    )
    assert cfg.env.fields == {"question": "q", "answer": "a"}
    assert cfg.reward.weights == {"exact_match": 1.0, "format": 0.5}
    assert isinstance(cfg.reward.weights["exact_match"], float)
    assert cfg.logging.backends == ["csv", "wandb"]
    assert cfg.policy.clip_epsilon_high == 0.28
    assert type(cfg.env).__name__ == "EnvConfig" and type(cfg.logging.backends) is list


def test_interpolations_are_resolved() -> None:
    assert (
        composed("logging.experiment=${model.name}", "model.name=smollm2-135m").logging.experiment
        == "smollm2-135m"
    )


# The parser by itself


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"foo": 1}, "there is no key foo"),
        ({"env": {"repeat": 2}}, "write env.repeats=2 instead"),
        ({"env": 3}, "env is a group of keys"),
        ({"train": {"epochs": "many"}}, "train.epochs=many: it must be a whole number"),
        ({"train": {"epochs": 1.5}}, "train.epochs=1.5: it must be a whole number"),
        ({"reward": {"weights": {"format": "much"}}}, "reward.weights={format:much}"),
        ({"model": {"name": "${nowhere}"}}, "model.name"),
        ({"model": {"name": "???"}}, "model.name"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas=0.9: it must be a list of numbers"),
    ],
)
def test_parser_needs_no_schema_to_refuse(node: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(OmegaConf.create(node))


def test_parser_refuses_a_key_that_was_forced_past_the_schema() -> None:
    node = OmegaConf.structured(Config)
    OmegaConf.update(node, "env.extra", 1, force_add=True)
    with pytest.raises(ConfigError, match=r"env\.extra"):
        parse(node)


def test_parser_keeps_nothing_of_what_it_has_parsed() -> None:
    before = parse(OmegaConf.create({}))
    changed = parse(OmegaConf.create({"optimizer": {"lr": 0.5}, "reward": {"weights": {"format": 7}}}))
    changed.reward.weights["format"] = 8
    with pytest.raises(ConfigError, match=r"optimizer\.lr=fast: it must be a number"):
        parse(OmegaConf.create({"optimizer": {"lr": "fast"}, "seed": 3}))
    assert parse(OmegaConf.create({})) == before


def test_parser_leaves_its_node_as_it_was() -> None:
    node = OmegaConf.structured(Config)
    before = OmegaConf.to_yaml(node)
    parse(node).env.num_envs = 99
    assert isinstance(node, DictConfig) and OmegaConf.to_yaml(node) == before


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("policy.kl_coeff", "policy.kl_coef"),
        ("lr", "optimizer.lr"),
        ("kl_coef", "policy.kl_coef"),
        ("train.lr", "optimizer.lr"),
        ("env.num_env", "env.num_envs"),
        ("optim_batchsize", "train.optim_batch_size"),
        ("gpu_memory_utilisation", "inference_model.gpu_memory_utilization"),
        ("polcy", "policy"),  # codespell:ignore polcy
        ("optimizer.learning_rate", "optimizer.lr"),
        ("env.group_size", "env.repeats"),
        ("optimizer.beta", "optimizer.betas"),
        ("beta", "policy.kl_coef"),
        ("train.total_epochs", "train.num_epochs"),
        ("env.split", "env.train_split"),
        (
            "inference_model.max_num_batched_tokens",
            "inference_model.engine_args.max_num_batched_tokens",
        ),
        ("optimizer.grad_clip", "optimizer.max_grad_norm"),
        ("trainer.n_gpus", "train_model.num_devices"),
        ("trainer.profile", None),
        ("logging.steps", None),
        ("optimizer.zzz", None),
        ("zzz", None),
    ],
)
def test_nearest_key(key: str, meant: str | None) -> None:
    assert keys().nearest(key) == meant


def test_a_missing_package_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cfg = Config()
    with pytest.raises(
        ConfigError, match=r"vllm is not installed; write inference_model\.backend=transformers"
    ):
        checks.check_installed(cfg)
    cfg.inference_model.backend = "transformers"
    checks.check_installed(cfg)
    cfg.logging.backends = ["wandb"]
    with pytest.raises(ConfigError, match="wandb is not installed"):
        checks.check_installed(cfg)


def test_arguments_of_the_engine_pass_as_they_are() -> None:
    words = "inference_model.engine_args={tensor_parallel_size: 1, compilation_config: {level: 0}}"
    cfg = composed(words, "inference_model.engine_args.max_num_batched_tokens=8192")
    assert cfg.inference_model.engine_args == {
        "tensor_parallel_size": 1,
        "compilation_config": {"level": 0},
        "max_num_batched_tokens": 8192,
    }


def test_sleep_is_allowed_where_there_is_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    assert composed("inference_model.sleep=true").inference_model.sleep


# What only the data can tell


def jsonl(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


GOOD_ROWS = [f'{{"question": "What is {n} + {n}?", "answer": "#### {2 * n}"}}' for n in range(9)]


def test_good_rows_load(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *GOOD_ROWS)
    problems = load(composed(f"env.data_path={path}", "eval.num_problems=3"))
    assert (len(problems.train), len(problems.held_out)) == (6, 3)


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        ([], [], "is empty"),
        ([*GOOD_ROWS, '{"question": "Cut off'], [], "10"),
        ([*GOOD_ROWS, "[1, 2]"], [], "10"),
        ([*GOOD_ROWS, '{"question": "No answer?"}'], [], "answer"),
        ([*GOOD_ROWS, '{"question": "No mark?", "answer": "5"}'], [], "####"),
        ([*GOOD_ROWS, '{"question": 5, "answer": "#### 5"}'], [], "question"),
        (GOOD_ROWS[:2], [], "eval.num_problems"),
        (GOOD_ROWS, ["env.dataset=jsonl", "env.fields={question:q,answer:a}"], "q"),
        (GOOD_ROWS, ["env.dataset=ifeval"], "prompt"),
    ],
    ids=[
        "empty",
        "not JSON",
        "no object",
        "no column",
        "no mark",
        "no text",
        "few",
        "columns",
        "other dataset",
    ],
)
def test_bad_data_names_the_file_and_the_trouble(
    tmp_path: Path, rows: list[str], words: list[str], says: str
) -> None:
    from torchrl_grpo.errors import UserError

    path = jsonl(tmp_path, *rows)
    cfg = composed(f"env.data_path={path}", "eval.num_problems=3", *words)
    with pytest.raises(UserError) as caught:
        load(cfg)
    assert str(path) in str(caught.value)
    assert says in str(caught.value).replace(str(path), "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["env.task=chain_sun"], "chain_sum"),
        (["env.task=chain_sum", "env.task_args.max_term=3"], "max_term"),
        (["env.task=chain_sum", "env.task_args={min_terms:5,max_terms:2}"], "terms"),
    ],
)
def test_bad_tasks_name_the_trouble(words: list[str], says: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=says):
        load(composed("env=reasoning_gym", *words))
