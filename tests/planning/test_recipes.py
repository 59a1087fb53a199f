"""The recipes of ``config/recipe``: each is composed, checked and planned on the machine that it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks.schedule import check_async, check_method, check_sync
from torchrl_grpo.config.values import TrainMethod
from torchrl_grpo.planning import automatic, preflight, resolve
from torchrl_grpo.planning.advice import apply
from torchrl_grpo.planning.resolve import with_model
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware

CONFIG = Path(__file__).resolve().parents[2] / "config"
HOPPER = (9, 0)
# Recipe -> the machine that it is for; 24 GB cards have a little less.
MACHINES = {
    "cpu": Hardware((), 16.0),
    "gpu_24gb": Hardware((23.5,), 64.0, (HOPPER,)),
    "gpu_80gb": Hardware((79.2,), 200.0, (HOPPER,)),
    "gpu_8x80gb": Hardware((79.2,) * 8, 1000.0, (HOPPER,) * 8),
}
# Settings of the models' config.json.
SIZES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 28, 28, 4, 18944, 152064, False),
}


def read(name: str, *words: str) -> Config:
    with composer(CONFIG, name) as tree:
        return parse(tree.compose(list(words), 0).node)


def on_disk(cfg: Config, folder: Path) -> Config:
    """Put a folder with the model's settings in place of its hub name."""
    if cfg.model.name in SIZES:
        hidden, layers, queries, keys, mlp, words, tied = SIZES[cfg.model.name]
        settings = {
            "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": queries, "num_key_value_heads": keys, "intermediate_size": mlp,
            "vocab_size": words, "tie_word_embeddings": tied, "max_position_embeddings": 32768,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(settings))
        cfg.model.name = str(folder)
    return cfg


def test_every_recipe_has_a_machine_here() -> None:
    assert {path.stem for path in (CONFIG / "recipe").glob("*.yaml")} == set(MACHINES)


@pytest.mark.parametrize(
    ("primary", "asynchronous"),
    [
        ("grpo_gsm8k", False),
        ("grpo_gsm8k", True),
        ("grpo_ifeval", False),
        ("grpo_ifeval", True),
        ("grpo_quickstart", False),
    ],
)
@pytest.mark.parametrize("recipe", MACHINES)
def test_a_recipe_fits_its_machine_and_uses_all_of_it(
    recipe: str, primary: str, asynchronous: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = read(primary, f"+recipe={recipe}")
    (check_async if asynchronous else check_sync)(cfg)
    machine = MACHINES[recipe]
    # It ends with an error if the memory does not suffice.
    cfg = preflight.resolve_proximal(on_disk(cfg, tmp_path), asynchronous)
    cfg = apply(cfg, automatic.choose([cfg], asynchronous, machine).changes)
    preflight.report(cfg, asynchronous, machine)
    lines = re.findall(r"memory: (\S+) at most ([0-9.]+) of ([0-9.]+) GiB", capsys.readouterr().out)
    assert len(lines) == max(1, len(machine.gpus)), "a device has nothing to do"
    assert all(float(needed) <= float(there) for _, needed, there in lines)


@pytest.mark.parametrize("recipe", MACHINES)
def test_a_recipe_is_one_for_solutions_too(recipe: str, tmp_path: Path) -> None:
    cfg = read("sft_gsm8k", f"+recipe={recipe}")
    check_method(cfg, TrainMethod.sft)
    preflight.make(on_disk(cfg, tmp_path), False, MACHINES[recipe])


def test_words_of_the_command_line_win_over_a_recipe() -> None:
    cfg = read("grpo_gsm8k", "+recipe=gpu_24gb", "optimizer.lr=1e-4", "env.num_envs=16")
    assert (cfg.optimizer.lr, cfg.env.num_envs, cfg.train_model.lora.rank) == (1e-4, 16, 32)


@pytest.mark.parametrize("name", ["grpo_gsm8k", "grpo_ifeval", "sft_gsm8k"])
@pytest.mark.parametrize("recipe", ["cpu", "gpu_24gb"])
def test_the_default_model_is_that_of_the_machine(
    name: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "present", lambda: MACHINES[recipe])
    cfg = with_model(read(name))
    expected = resolve.WITH_GPU if MACHINES[recipe].gpus else resolve.WITHOUT_GPU
    assert cfg.model.name == expected
    preflight.make(on_disk(cfg, tmp_path), False, MACHINES[recipe])


def test_a_model_that_was_named_stays() -> None:
    assert with_model(read("grpo_gsm8k", "model.name=some/model")).model.name == "some/model"
    assert with_model(read("grpo_quickstart")).model.name == "smollm2-135m"
