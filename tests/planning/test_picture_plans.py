"""Plans of models for pictures count the vision tower, and those of the documentation fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.models.shape import ModelShape, read_shape, shape_of
from torchrl_grpo.planning import automatic, preflight
from torchrl_grpo.planning.advice import apply
from torchrl_grpo.planning.pictures import tower_bytes
from torchrl_grpo.planning.workload import workload_of
from torchrl_grpo.runtime.hardware import Hardware

ROOT = Path(__file__).resolve().parents[2]
# Sizes of Qwen3-VL-4B.
SETTINGS: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
MACHINES = {24: Hardware((23.5,), 64.0, ((9, 0),)), 80: Hardware((79.2,), 200.0, ((9, 0),))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def _shape(folder: Path, pictures: bool = True) -> ModelShape:
    shape = read_shape(ModelConfig(name=str(folder), pictures=pictures))
    assert isinstance(shape, ModelShape)
    return shape


def test_weights_of_the_tower_are_counted(folder: Path) -> None:
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**SETTINGS))
    shape = _shape(folder)
    assert shape.tower is not None
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=0.01)
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert shape.tower.parameters == pytest.approx(tower, rel=0.02)
    # What is not of the tower is counted as without pictures.
    text = _shape(folder, pictures=False)
    assert (shape.text, shape.layer, shape.outer, shape.matrices) == (
        text.parameters,
        text.layer,
        text.outer,
        text.matrices,
    )


@pytest.mark.parametrize(
    ("settings", "hidden", "patches"),
    [
        # Qwen2-VL: hidden_size is the width of what the tower hands over.
        (
            {"vision_config": {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "spatial_merge_size": 2}},
            1280,
            4,
        ),
        # InternVL and Gemma 3.
        ({"vision_config": {"hidden_size": 1024, "depth": 24}, "downsample_ratio": 0.5}, 1024, 4),
        (
            {
                "vision_config": {"hidden_size": 1152, "depth": 27, "image_size": 896, "patch_size": 14},
                "mm_tokens_per_image": 256,
            },
            1152,
            16,
        ),
    ],
)
def test_sizes_of_a_tower_are_read_from_each_familys_keys(
    settings: dict[str, Any], hidden: int, patches: int
) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    shape = shape_of({"text_config": text, **settings}, None, pictures=True)
    assert shape is not None and shape.tower is not None
    assert (shape.tower.hidden, shape.tower.patches) == (hidden, patches)


def test_tower_takes_more_if_it_is_trained(folder: Path) -> None:
    cfg, shape = Config(), _shape(folder)
    load = workload_of(cfg)
    frozen = tower_bytes(cfg, shape, load)
    cfg.train_model.vision_tower = True
    trained = tower_bytes(cfg, shape, load)
    cfg.train_model.gradient_checkpointing = True
    assert 0 < frozen < tower_bytes(cfg, shape, load) < trained
    assert tower_bytes(cfg, _shape(folder, pictures=False), load) == 0


def _documented(gib: int) -> list[str]:
    page = (ROOT / "docs/vision.md").read_text()
    (line,) = re.findall(rf"^grpo (\+recipe=gpu_{gib}gb .*)$", page, re.MULTILINE)
    return [word for word in line.split() if not word.startswith("model.name=")]


@pytest.mark.parametrize("gib", MACHINES)
def test_documented_command_fits_its_gpu(gib: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with composer(ROOT / "config", "grpo_gsm8k") as tree:
        words = [*_documented(gib), f"model.name={folder}"]
        cfg = preflight.resolve_proximal(parse(tree.compose(words, 0).node), False)
    cfg = apply(cfg, automatic.choose([cfg], False, MACHINES[gib]).changes)
    # It ends with an error if the memory does not suffice.
    preflight.report(cfg, False, MACHINES[gib])
    assert re.search(r"memory: cuda:0 at most ([0-9.]+) of ([0-9.]+) GiB", capsys.readouterr().out)
