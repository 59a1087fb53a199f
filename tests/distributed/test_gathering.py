"""FSDP2 gathers in 16 bits what autocast casts in any case: log-probabilities do not change by a bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch, make_model, make_objective
from families import FAMILIES, build
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchrl_grpo.distributed import gathering
from torchrl_grpo.distributed.gathering import as_gathered, layers_of
from torchrl_grpo.distributed.parallelism import distribute
from torchrl_grpo.models.scoring import trial
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.shape import shape_of

CPU = torch.device("cpu")
# How many of the three layers travel in 16 bits.
GATHERED = {
    "llama": 3,
    "llama tied": 3,
    "mistral window": 3,
    "qwen2": 3,
    "qwen3": 3,
    "gemma2": 3,
    "gemma3": 3,
    "phi3 window": 3,
    "olmo2": 3,
    "gpt2": 3,
    "cohere": 3,
    "nemotron": 3,
    "mixtral": 0,
    "qwen3-moe": 0,
    "phimoe": 0,
    "gpt-oss": 0,
    "gemma3n": 0,
    "doge": 0,
    # Its first layer is dense.
    "deepseek-v3": 1,
}


def scorer_of(name: str) -> TokenScorer:
    model = build(*FAMILIES[name][:2])
    return TokenScorer(model, autocast_dtype=torch.bfloat16, shares_prefix=False)


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.filterwarnings("ignore:train_model.parallelism=fsdp2")
def test_weights_as_they_are_gathered_give_the_numbers_of_autocast(name: str) -> None:
    scorer = scorer_of(name)
    layers, tokens = layers_of(scorer, CPU), trial.batch(scorer.model)
    assert sum(layer.in_16_bits for layer in layers) == GATHERED[name]
    shape = shape_of({**scorer.model.config.to_dict(), "intermediate_size": 48}, 1)
    # What is predicted for plain layers would be too little for others.
    assert shape is not None and shape.plain == (GATHERED[name] == 3)
    seen = []

    def look(module: nn.Module, *_: object) -> None:
        seen.append({parameter.dtype for parameter in module.parameters() if parameter.ndim == 2})

    for layer in layers:
        layer.module.register_forward_pre_hook(look)
    with torch.no_grad():
        expected = scorer(*tokens).log_probs
        seen.clear()
        with as_gathered(layers, torch.bfloat16):
            log_probs = scorer(*tokens).log_probs
    assert torch.equal(log_probs, expected) and bool((expected != 0).any())
    assert sum(formats == {torch.bfloat16} for formats in seen) == GATHERED[name]


class _Reading(nn.Module):
    """A feed-forward layer that reads a weight and does not call the layer it belongs to."""

    def __init__(self, mlp: Any, norm: Any) -> None:
        super().__init__()
        self.mlp, self.norm = mlp, norm

    def forward(self, states: Tensor) -> Tensor:
        if self.norm is not None:
            added: Tensor = self.mlp(states) + self.norm.weight
            return added
        shifted: Tensor = self.mlp(states) + self.mlp.up_proj.weight.float()[0].mean()
        return shifted


@pytest.mark.parametrize("what", ["a matrix", "a norm"])
def test_what_a_model_does_with_its_weights_is_tried(what: str) -> None:
    scorer = scorer_of("llama")
    scorer.model.train()
    before = [parameter.clone() for parameter in scorer.model.parameters()]
    layer = scorer.model.model.layers[1]
    layer.mlp = _Reading(layer.mlp, layer.input_layernorm if what == "a norm" else None)
    with pytest.warns(UserWarning, match="3 of 3 layers of Llama.* in float32 instead of bfloat16 .*change"):
        layers = layers_of(scorer, CPU)
    assert not any(layer.in_16_bits or layer.norms for layer in layers)
    # The trial leaves nothing behind.
    assert all(map(torch.equal, scorer.model.parameters(), before))
    assert {parameter.dtype for parameter in scorer.model.parameters()} == {torch.float32}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in scorer.model.modules())


def test_a_layer_that_refuses_16_bits_gets_float32() -> None:
    scorer = scorer_of("llama")

    def refuse(module: nn.Module, *_: object) -> None:
        if module.get_parameter("weight").dtype != torch.float32:
            raise RuntimeError("expected scalar type Float")

    scorer.model.model.layers[0].mlp.up_proj.register_forward_pre_hook(refuse)
    with pytest.warns(UserWarning, match="in float32 .* .RuntimeError: expected scalar type Float"):
        assert not any(layer.in_16_bits for layer in layers_of(scorer, CPU))


def test_one_rank_that_could_not_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = scorer_of("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(layer.in_16_bits for layer in layers_of(scorer, CPU))
    monkeypatch.setattr(gathering, "_everywhere", lambda value, device: False)
    with pytest.warns(UserWarning, match="another training rank"):
        assert not any(layer.in_16_bits for layer in layers_of(scorer, CPU))


def test_without_autocast_everything_is_gathered_in_float32() -> None:
    scorer = TokenScorer(build(*FAMILIES["llama"][:2]), shares_prefix=False)
    assert not any(layer.in_16_bits or layer.norms for layer in layers_of(scorer, CPU))


def test_shards_leave_inputs_on_the_cpu_where_their_lengths_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 moves inputs to a GPU, and a scorer that fetches them waits for it in every micro-batch."""
    real, devices = vars(_fsdp_state)["_to_kwargs"], []

    def to_gpu(args: Any, kwargs: Any, device: torch.device, side_stream: bool) -> Any:
        devices.append(device)
        # What was moved here cannot be read on the CPU again.
        return real(args, kwargs, torch.device("meta"), side_stream)

    monkeypatch.setattr(_fsdp_state, "_to_kwargs", to_gpu)
    batch = make_batch()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        scorer = TokenScorer(make_model())
        network: Any = distribute(scorer, "fsdp2", 2, CPU)
        loss, _ = make_objective(scorer)
        loss.set_network(network)
        loss(batch)["loss_objective"].backward()
        # From here on FSDP2 takes its device for a GPU.
        network._get_fsdp_state()._device = torch.device("cuda")
        loss(batch)["loss_objective"].backward()
        scores = network(
            prompt=batch["tokens", "prompt"],
            prompt_mask=batch["masks", "prompt"],
            response=batch["tokens", "response"],
            response_mask=batch["masks", "response"],
        )
        assert scores.log_probs.shape == batch["masks", "response"].shape
    finally:
        dist.destroy_process_group()
    assert len(devices) == 2
