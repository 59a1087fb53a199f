"""What is saved of a model: every file that loads can be saved, and a run tries it before it trains."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, modeling_utils

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.errors import CheckpointError, ModelError, UserError
from torchrl_grpo.models import loading, saving
from torchrl_grpo.training import build

# As models of the hub have them. Transformers loads each, and refuses to save some.
GENERATION_CONFIGS: dict[str, Any] = {
    "greedy with temperature": {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
    "temperature alone": {"temperature": 0.7},
    "greedy with top_k and min_p": {"do_sample": False, "top_k": 20, "min_p": 0.05},
    "typical_p": {"do_sample": False, "typical_p": 0.9, "epsilon_cutoff": 0.1},
    "early stopping without beams": {"num_beams": 1, "early_stopping": True, "length_penalty": 0.8},
    "beam groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "early_stopping": True},
    "penalty_alpha": {"do_sample": False, "penalty_alpha": 0.6, "top_k": 4},
    "null values": {"do_sample": None, "temperature": None, "top_p": None, "max_length": None},
    "unknown keys": {"chat_format": "chatml", "max_window_size": 6144, "nested": {"a": [1, None]}},
    "several end tokens": {"eos_token_id": [2, 0], "do_sample": False, "top_p": 0.8},
    "no padding token": {"pad_token_id": None, "eos_token_id": 2, "bos_token_id": 1, "temperature": 0.6},
    "older version": {"transformers_version": "4.31.0.dev0", "temperature": 0.9, "do_sample": False},
    "from the model's configuration": {"_from_model_config": True, "eos_token_id": 2, "temperature": 0.1},
    "cache": {"use_cache": False, "cache_implementation": "hybrid", "return_legacy_cache": True},
    "both lengths": {"max_length": 4096, "max_new_tokens": 2048, "temperature": 0.6, "do_sample": False},
    "an empty object": {},
    "an empty file": "nothing",
}


def with_generation_config(model: Path, folder: Path, content: Any) -> Path:
    """Copy a model, with another generation_config.json."""
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text("" if content == "nothing" else json.dumps(content))
    return folder


def settings(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name != "transformers_version"}


@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_weights_are_written_as_safetensors_writes_them(
    size: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = modeling_utils.safe_save_file
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    monkeypatch.setattr(model, "save_pretrained", partial(model.save_pretrained, max_shard_size=size))
    model.save_pretrained(tmp_path / "library")
    written = saving.save(model, AutoTokenizer.from_pretrained(tiny_model_dir), tmp_path / "ours")
    assert modeling_utils.safe_save_file is library
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > (size == "100KB") and sorted(written) == files
    for file in files:
        content = file.read_bytes()
        assert content == (tmp_path / "library" / file.name).read_bytes()
        assert written[file] == (len(content), xxhash.xxh3_64_hexdigest(content))


def test_weights_that_are_not_float32_are_written_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model.model.norm.bfloat16()
    assert saving.save(model, AutoTokenizer.from_pretrained(tiny_model_dir), tmp_path) == {}
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(saved["model.norm.weight"], model.model.norm.weight)


@pytest.mark.parametrize("case", GENERATION_CONFIGS)
def test_a_generation_config_is_saved_as_it_was_read(case: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    source = with_generation_config(tiny_model_dir, tmp_path / "model", GENERATION_CONFIGS[case])
    options = ModelConfig(name=str(source))
    model = loading.load_model(str(source), options, torch.device("cpu"), torch.float32)
    tokenizer = loading.load_tokenizer(str(source), options)
    expected = settings(model.generation_config)
    content = {} if GENERATION_CONFIGS[case] == "nothing" else dict(GENERATION_CONFIGS[case])
    for name in ("transformers_version", "_from_model_config"):
        content.pop(name, None)
    assert {name: expected[name] for name in content} == content
    saved, merged = tmp_path / "saved", tmp_path / "merged"
    for place in (saved, merged):
        place.mkdir()
        saving.try_out(model, tokenizer, place, trust_remote_code=False, merged=place == merged)
    assert settings(GenerationConfig.from_pretrained(merged)) == expected
    saving.save(model, tokenizer, saved)
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert settings(again.generation_config) == expected
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)
    # And once more, from a checkpoint.
    saving.save(again, tokenizer, merged)
    assert settings(GenerationConfig.from_pretrained(merged)) == expected


def test_a_run_ends_with_a_model_whose_generation_config_is_refused_by_transformers(
    config: Config, train: Runner, tiny_model_dir: Path, tmp_path: Path
) -> None:
    content = GENERATION_CONFIGS["greedy with temperature"]
    config.model.name = str(with_generation_config(tiny_model_dir, tmp_path / "model", content))
    config.eval.num_problems, config.train.total_dialog_turns = 0, 16
    train("run")
    loaded = GenerationConfig.from_pretrained(tmp_path / "run/checkpoints/1/model")
    assert (loaded.do_sample, loaded.temperature, loaded.top_p) == (False, 0.6, 0.9)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


@pytest.mark.parametrize("content", ["[]", "null", '{"max_new_tokens": 0}'])
def test_a_generation_config_that_cannot_be_read_is_one_line(
    content: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    source = str(with_generation_config(tiny_model_dir, tmp_path / "model", json.loads(content)))
    with pytest.raises(ModelError, match=rf"^model.name={source}: the model cannot be loaded \(.*\); write "):
        loading.load_model(source, ModelConfig(name=source), torch.device("cpu"), torch.float32)


def test_a_configuration_that_cannot_be_saved_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    path = tmp_path / "model/config.json"
    # As of a model that was saved for another attention.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"output_attentions": True}))
    options = ModelConfig(name=str(tmp_path / "model"))
    model = loading.load_model(options.name, options, torch.device("cpu"), torch.float32)
    tokenizer = loading.load_tokenizer(options.name, options)
    with pytest.raises(
        ModelError, match=rf"^{options.name}: what is trained could not be saved, .*correct a"
    ):
        saving.try_out(model, tokenizer, tmp_path, trust_remote_code=False)


def test_what_cannot_be_saved_is_refused_before_the_engine_starts(
    config: Config, train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = loading.load_tokenizer

    def load_tokenizer(source: str, cfg: ModelConfig) -> Any:
        tokenizer = honest(source, cfg)
        # JSON has no sets.
        tokenizer.init_kwargs["oddity"] = {1, 2}
        return tokenizer

    monkeypatch.setattr(loading, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(build, "build_engine", lambda *args, **named: pytest.fail("the engine was started"))
    with pytest.raises(
        ModelError, match=r"could not be saved, because of a file of this model .*set.*; correct"
    ):
        train("run")
    # Nothing looks like a run that could be resumed.
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_disk_without_room_for_the_checkpoints_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.try_out(tmp_path, {}, 1)
    with pytest.raises(CheckpointError, match=r"at least 1073741824.00 GiB, and .* are free .*; make room"):
        checkpoint.try_out(tmp_path, {}, 2**60)
    # Room for two, and three are there while the third is written.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * 2**30))
    checkpoint.try_out(tmp_path, {}, 2**30, due=2, keep=2)
    checkpoint.try_out(tmp_path, {}, 2**30, due=9, keep=1)
    with pytest.raises(CheckpointError, match=r": 3 .* least 3.00 GiB.* or h"):
        checkpoint.try_out(tmp_path, {}, 2**30, due=3, keep=2)
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    checkpoint.try_out(tmp_path, {}, 2**30, due=3, keep=2)


def test_a_place_where_no_checkpoint_can_be_written_is_found_at_the_start(
    config: Config, train: Runner, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("not a folder")
    with pytest.raises(UserError, match="checkpoints"):
        train("run")
