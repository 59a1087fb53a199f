"""Small causal models of several families and ragged batches of groups, to test the training core with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.batch.micro_batches import TokenBudget, split_evenly
from torchrl_grpo.batch.schema import collate
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.models.scoring.scores import TokenScores
from torchrl_grpo.objectives.advantage import GroupAdvantage
from torchrl_grpo.objectives.build import build_objective
from torchrl_grpo.objectives.loss import GroupPolicyLoss

VOCAB = 61
# Also where ``rounding.float64`` makes ``torch.float32`` the name of another format.
FLOAT32 = torch.float32
# The pad token is the end token, as in SmolLM2: whoever masks by id fails.
PAD = END = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
_NO_HEAD_DIM = {key: value for key, value in _COMMON.items() if key != "head_dim"}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": END,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "llama_tied": ("llama", {**_COMMON, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON),
    "mistral": ("mistral", {**_COMMON, "sliding_window": None}),
    "mistral_sliding": ("mistral", {**_COMMON, "sliding_window": 4}),
    "gpt2": ("gpt2", _GPT2),
    "gemma": ("gemma", _COMMON),
    "gemma3": (
        "gemma3_text",
        {**_COMMON, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("phi", {**_NO_HEAD_DIM, "num_key_value_heads": 4}),
    "phi3": ("phi3", {**_NO_HEAD_DIM, "sliding_window": 3}),
    "gemma2": ("gemma2", {**_COMMON, "sliding_window": 4, "final_logit_softcapping": 5.0}),
    "gemma2_full": (
        "gemma2",
        {**_COMMON, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 5.0},
    ),
}


def make_model(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in evaluation mode, in PyTorch's default format.

    The weights are the same in each format, and the caller's random numbers stay as they were.
    """
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=FLOAT32).eval()
    return model.to(torch.get_default_dtype())


def compiler_backend(backend: Any) -> Any:
    """A context in which modules are compiled with ``backend``; "aot_eager" runs what it traced."""
    real = nn.Module.compile

    def compile_with(self: nn.Module, **options: Any) -> None:
        real(self, backend=backend, **options)

    return mock.patch.object(nn.Module, "compile", compile_with)


def ragged_masks(P: int, G: int, L: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks ``[P, L]`` and ``[P, G, T]`` with lengths from 1 to the full width, the full width among them."""
    prompt_lengths = torch.randint(1, L + 1, (P,), generator=generator)
    response_lengths = torch.randint(1, T + 1, (P, G), generator=generator)
    prompt_lengths[-1], response_lengths[0, -1] = L, T
    return (
        torch.arange(L) >= L - prompt_lengths[:, None],
        torch.arange(T) < response_lengths[..., None],
    )


def make_batch(P: int = 4, G: int = 4, L: int = 7, T: int = 6, seed: int = 0, kl: bool = True) -> TensorDict:
    """Random groups as they come out of the buffer, the same in each format.

    End tokens stand in the middle of prompts, too.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=FLOAT32).to(torch.get_default_dtype())

    prompt_mask, mask = ragged_masks(P, G, L, T, g)
    prompt = torch.randint(0, VOCAB, (P, L), generator=g).masked_fill(~prompt_mask, PAD)
    response = torch.randint(0, VOCAB, (P, G, T), generator=g).masked_fill(~mask, PAD)
    zero = torch.zeros(())
    # About what a small random model gives a random token, so that ratios fall on both sides of the clip.
    log_probs = torch.where(mask, -4.5 + 1.5 * normal(P, G, T), zero)
    reference = torch.where(mask, -4.5 + 1.5 * normal(P, G, T), zero)
    rewards = normal(P, G, 1)
    return TensorDict(
        {
            "tokens": TensorDict({"prompt": prompt, "response": response}, [P]),
            "masks": TensorDict({"prompt": prompt_mask, "response": mask, "loss": mask.clone()}, [P]),
            "log_probs": TensorDict({"response": log_probs, **({"reference": reference} if kl else {})}, [P]),
            "next": TensorDict({"reward": rewards, "reward_parts": rewards.clone()}, [P]),
            "truncated": torch.zeros(P, G, 1, dtype=torch.bool),
            "advantage": normal(P, G, 1),
            "policy_version": torch.zeros(P, G, dtype=torch.int64),
            "group_id": torch.arange(P)[:, None].expand(P, G).clone(),
        },
        batch_size=[P],
    )


def ragged(batch: TensorDictBase) -> LazyStackedTensorDict:
    """The groups of a padded batch, each at its own width, as in a round."""
    return lazy_stack([collate([group])[0] for group in batch.unbind(0)])


def size_in_bytes(groups: TensorDictBase) -> int:
    """Memory of the tensors of groups."""
    tensors = (value for group in groups.unbind(0) for value in group.values(True, True))
    return sum(value.numel() * value.element_size() for value in tensors)


def assert_same_groups(groups: TensorDictBase, others: TensorDictBase) -> None:
    """Check that groups, whose widths may differ, have the same entries and numbers."""
    assert len(groups) == len(others)
    for group, other in zip(groups.unbind(0), others.unbind(0), strict=True):
        assert set(group.keys(True, True)) == set(other.keys(True, True))
        for key in group.keys(True, True):
            assert group[key].dtype == other[key].dtype and torch.equal(group[key], other[key]), key


def make_objective(
    scorer: Any, max_new_tokens: int = 6, weights: tuple[float, ...] = (1.0,), **policy: Any
) -> tuple[GroupPolicyLoss, GroupAdvantage]:
    """Loss and advantage of the ``policy.*`` keys given, around ``scorer``."""
    return build_objective(PolicyConfig(**policy), scorer, weights, max_new_tokens)


def no_budget() -> TokenBudget:
    """One that never cuts."""
    return TokenBudget(10**9, shares_prefix=True, notify=lambda text: None)


def split(batch: TensorDict, groups: int, pieces: int) -> list[TensorDict]:
    """The equal pieces of a batch of ``groups`` groups."""
    samples = batch["tokens", "response"].shape[1]
    return [piece.select(batch) for piece in split_evenly(len(batch), samples, pieces, groups)]


class FixedScorer(nn.Module):
    """Answers with a parameter, so that a loss has a gradient by token."""

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(log_probs.clone())
        self.entropy_gradient = False

    def forward(self, *_: Tensor) -> TokenScores:
        return TokenScores(self.log_probs, torch.full_like(self.log_probs, 0.25).detach())


def inputs(batch: TensorDict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a TokenScorer is called with."""
    return (
        batch["tokens", "prompt"],
        batch["masks", "prompt"],
        batch["tokens", "response"],
        batch["masks", "response"],
    )


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of every gradient by name; parameters without one count as zero."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def widen(batch: TensorDict, left: int, right: int, junk: int = 7) -> TensorDict:
    """The same groups with more padding, filled with ``junk`` everywhere it may stand."""
    out = batch.clone()
    pad = torch.nn.functional.pad
    out["tokens"] = TensorDict(
        {
            "prompt": pad(batch["tokens", "prompt"], (left, 0), value=junk),
            "response": pad(batch["tokens", "response"], (0, right), value=junk),
        },
        batch.batch_size,
    )
    out["masks"] = TensorDict(
        {
            "prompt": pad(batch["masks", "prompt"], (left, 0), value=False),
            "response": pad(batch["masks", "response"], (0, right), value=False),
            "loss": pad(batch["masks", "loss"], (0, right), value=False),
        },
        batch.batch_size,
    )
    out["log_probs"] = TensorDict(
        {key: pad(value, (0, right), value=-0.5) for key, value in batch["log_probs"].items()},
        batch.batch_size,
    )
    return out
