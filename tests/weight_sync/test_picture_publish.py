"""Publication of a model for pictures: parts that encode them with older weights are found at the start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import publishers
import pytest
import torch
from picture_prompts import prompts_of
from tiny_vlm import FAMILIES, build
from torch import Tensor

from torchrl_grpo.config.schema import LoraConfig
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.inference.protocol import Probe, ProbeResult
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models import lora
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.models.prepare import other_inputs
from torchrl_grpo.weight_sync import publisher as publish
from torchrl_grpo.weight_sync.probe import named_weights, probe_prompts
from torchrl_grpo.weight_sync.publisher import WeightPublisher


class EncodesWithOlderWeights(TransformersEngine):
    """Holds what was published, and encodes pictures with what it began with, as a cache of them would."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.older = copy.deepcopy(self.model)

    def next_tokens(self, probe: Probe) -> ProbeResult:
        own = [parameter.data for parameter in other_inputs(self.model)]
        for parameter, older in zip(other_inputs(self.model), other_inputs(self.older), strict=True):
            parameter.data = older.data
        result = super().next_tokens(probe)
        for parameter, data in zip(other_inputs(self.model), own, strict=True):
            parameter.data = data
        return result


def make_publisher(
    family: str,
    engine_type: type[TransformersEngine] = TransformersEngine,
    dtype: torch.dtype = torch.float32,
    has_adapters: bool = False,
    shows_pictures: bool = True,
) -> WeightPublisher:
    model, processor = build(family)
    pictures = PictureProcessor(processor)
    tokenizer = processor.tokenizer
    engine = engine_type(
        copy.deepcopy(model).to(dtype), [tokenizer.eos_token_id], tokenizer.pad_token_id, pictures=pictures
    )
    if has_adapters:
        lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    whole, shown = prompts_of(processor)
    prompts = probe_prompts([[token for token in whole[1] if token not in pictures.blocked]])
    if not shows_pictures:
        return publishers.make_publisher(model, engine, prompts, dtype, pictures)
    return publishers.make_publisher(
        model, engine, [*prompts, whole[0]], dtype, pictures, [*[None] * len(prompts), shown[0]]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_engine_passes_with_a_picture_in_its_probe(family: str, dtype: torch.dtype) -> None:
    publisher = make_publisher(family, dtype=dtype)
    before = {name: checksum(parameter) for name, parameter in publisher.model.named_parameters()}
    publisher.verify_at_start(0)
    assert {name: checksum(parameter) for name, parameter in publisher.model.named_parameters()} == before
    model: Any = publisher.model
    with torch.no_grad():
        for parameter in other_inputs(model):
            parameter.mul_(1.01)
    metrics = publisher.publish(1)
    if dtype is torch.float32:
        assert metrics["publish/logprob_diff_max"] < 1e-5
    # Nothing else has changed.
    assert metrics["publish/update_kl"] > 0


@pytest.mark.parametrize(
    ("family", "has_adapters"), [*((family, False) for family in FAMILIES), ("idefics3", True)]
)
def test_pictures_that_are_encoded_with_older_weights_are_found(family: str, has_adapters: bool) -> None:
    make_publisher(family, EncodesWithOlderWeights, shows_pictures=False).verify_at_start(0)
    publisher = make_publisher(family, EncodesWithOlderWeights, has_adapters=has_adapters)
    with pytest.raises(TrainingStopped, match="older parts that encode pictures"):
        publisher.verify_at_start(0)
    make_publisher(family, has_adapters=has_adapters).verify_at_start(0)


def test_vision_tower_that_is_not_published_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of weights to publish lacks it, so no checksum does."""

    def text_only(model: Any) -> Iterator[tuple[str, Tensor]]:
        hidden = {parameter.data_ptr() for parameter in other_inputs(model)}
        return ((name, tensor) for name, tensor in named_weights(model) if tensor.data_ptr() not in hidden)

    monkeypatch.setattr(publish, "named_weights", text_only)
    make_publisher("idefics3", shows_pictures=False).verify_at_start(0)
    with pytest.raises(TrainingStopped, match="it was not sent the new ones"):
        make_publisher("idefics3").verify_at_start(0)
