"""Updates that a 16-bit format would round away are found before the run."""

from __future__ import annotations

import pytest
import torch
from batches import make_model
from torch import nn

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import (
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
    TrainModelConfig,
)
from torchrl_grpo.config.values import LRSchedule, Proximal, TrainMethod
from torchrl_grpo.models import lora
from torchrl_grpo.models.precision import lost_to_rounding
from torchrl_grpo.training.rounding_check import rounding_warning, uneven_rounding_warning


def _model(values: list[float]) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values).repeat_interleave(16))
    return model


def test_a_move_is_lost_below_half_the_distance_of_two_numbers() -> None:
    # Between 1 and 2 bfloat16 numbers are 1/128 apart, between 1/4 and 1/2 they are 1/512 apart.
    model = _model([1.25, 1.5, 0.3125, 0.375])
    assert lost_to_rounding(model, torch.bfloat16, 1 / 1024 - 1e-5) == 1.0
    assert lost_to_rounding(model, torch.bfloat16, 1 / 1024 + 1e-5) == 0.5
    assert lost_to_rounding(model, torch.bfloat16, 1 / 256 + 1e-5) == 0.0
    assert lost_to_rounding(model, torch.float16, 1 / 1024 + 1e-5) == 0.0


@pytest.mark.parametrize(
    ("dtype", "lr", "steps", "warns"),
    [
        (torch.bfloat16, 1e-5, 16, True),
        (torch.bfloat16, 1e-5, 2000, False),
        (torch.bfloat16, 1e-3, 16, False),
        (torch.float16, 1e-5, 16, True),
        (torch.float32, 1e-5, 16, False),
    ],
)
def test_a_run_of_lost_updates_is_told_of_and_no_other(
    dtype: torch.dtype, lr: float, steps: int, warns: bool
) -> None:
    model = _model([1.25, 1.5, 1.625, 1.75])
    text = rounding_warning(model, dtype, OptimizerConfig(lr=lr), steps)
    assert (text is not None) == warns
    if text is not None:
        assert "optimizer.lr=1e-05" in text
        assert "inference_model.dtype=float32 train_model.autocast=no" in text


def test_a_schedule_counts_with_what_it_leaves_of_the_rate() -> None:
    # 300 steps of 1e-5 move a weight by 3e-3 and, on the way down to zero, by half of it.
    model = _model([1.25, 1.5, 1.625, 1.75])
    constant = OptimizerConfig(lr=1.6e-5, schedule=LRSchedule("constant"))
    assert rounding_warning(model, torch.bfloat16, constant, 300) is None
    assert rounding_warning(
        model, torch.bfloat16, OptimizerConfig(lr=1.6e-5, schedule=LRSchedule("linear")), 300
    )


def test_bounds_are_where_the_weights_are() -> None:
    # Any device that is not the CPU: a bound left there cannot be added to weights on a GPU.
    model = make_model().to("meta")
    reached = list(lora.weight_change_bounds(model, 0.01))
    assert len(reached) == len(list(model.parameters()))
    assert all(weights.device == bound.device for weights, bound in reached)
    lora.add_adapters(model, LoraConfig(rank=4, alpha=4.0), seed=0)
    model = model.to_empty(device="meta")
    assert all(weights.device == bound.device for weights, bound in lora.weight_change_bounds(model, 0.01))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_reach_as_far_as_their_product(family: str) -> None:
    model, move = make_model(family), 0.01
    lora.add_adapters(model, LoraConfig(rank=4, alpha=12.0), seed=0)
    own = dict(make_model(family).named_parameters())
    layers = lora.adapted_layers(model)
    reached = list(lora.weight_change_bounds(model, move))
    assert len(reached) == len(layers)
    with torch.no_grad():
        for layer in layers.values():
            # The largest change of any weight is that of B of the size and the signs that suit it.
            layer.lora_B["default"].weight.copy_(move * layer.lora_A["default"].weight.sign()[:, 0])
        for (name, layer), (weight, bound) in zip(layers.items(), reached, strict=True):
            change = lora.merged_weight(layer) - own[f"{name}.weight"]
            assert weight.data_ptr() == layer.get_base_layer().weight.data_ptr()
            assert bool((change.abs() <= bound.expand_as(weight) + 1e-6).all())
            first = (
                (change, bound.expand_as(weight))
                if family == "llama"
                else (change.T, bound.expand_as(weight).T)
            )
            torch.testing.assert_close(first[0][:, 0], first[1][:, 0], atol=1e-6, rtol=1e-4)


def test_a_run_of_adapters_whose_merge_rounds_to_nothing_is_told_of() -> None:
    model = make_model()
    lora.add_adapters(model, LoraConfig(rank=4, alpha=4.0), seed=0)
    text = rounding_warning(model, torch.bfloat16, OptimizerConfig(lr=1e-6), 16)
    assert text is not None and "adapters" in text and "inference_model.dtype=float32" in text
    assert rounding_warning(model, torch.bfloat16, OptimizerConfig(lr=1e-3), 16) is None
    assert rounding_warning(model, torch.float32, OptimizerConfig(lr=1e-6), 16) is None


@pytest.mark.parametrize(
    ("trainer", "engine", "fix"),
    [
        (torch.bfloat16, torch.float32, "inference_model.dtype=bfloat16 train_model.autocast=bf16"),
        (torch.float32, torch.bfloat16, "inference_model.dtype=bfloat16 train_model.autocast=bf16"),
        (torch.float16, torch.float32, "inference_model.dtype=float16 train_model.autocast=fp16"),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.float16, None),
    ],
)
def test_updates_that_reach_either_engine_or_trainer_are_told_of(
    trainer: torch.dtype, engine: torch.dtype, fix: str | None
) -> None:
    text = uneven_rounding_warning(Config(), trainer, engine)
    assert (text is None) == (fix is None)
    if text is not None and fix is not None:
        names = [str(dtype).removeprefix("torch.") for dtype in (engine, trainer)]
        assert f"weights in {names[0]} and the trainer in {names[1]}" in text and fix in text


@pytest.mark.parametrize(
    "cfg",
    [
        Config(train_model=TrainModelConfig(lora=LoraConfig(rank=4))),
        Config(policy=PolicyConfig(proximal=Proximal("trainer"))),
        Config(train=TrainConfig(method=TrainMethod("sft"))),
    ],
)
def test_a_run_that_samples_nothing_or_is_corrected_is_not_warned_of_uneven_rounding(cfg: Config) -> None:
    assert uneven_rounding_warning(cfg, torch.bfloat16, torch.float32) is None
