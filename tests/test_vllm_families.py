"""The real vLLM with tiny models of several families: every part of every tensor that is stale is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_publish import PARTS, move_everything
from tiny_model import build_tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.protocol import Probe
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.training.publish import WeightPublisher

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

# Sizes that vLLM's kernels for CPUs take.
_COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GPT2 = {"vocab_size": 384, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 512}
FAMILIES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama, tied": ("llama", {**_COMMON, "tie_word_embeddings": True}, torch.float32),
    "qwen2": ("qwen2", _COMMON, torch.bfloat16),
    "qwen3": ("qwen3", _COMMON, torch.float32),
    "mistral": ("mistral", {**_COMMON, "sliding_window": None}, torch.bfloat16),
    "gemma3": ("gemma3_text", {**_COMMON, "layer_types": ["full_attention"]}, torch.bfloat16),
    "phi3": ("phi3", _COMMON, torch.float32),
    "gpt2": ("gpt2", _GPT2, torch.bfloat16),
    "granite": ("granite", _COMMON, torch.bfloat16),
    # Served as transformers' own model, which the trainer has in the same process.
    "olmo2": ("olmo2", _COMMON, torch.bfloat16),
    "llama, tied, float32 head": ("llama", {**_COMMON, "tie_word_embeddings": True}, torch.bfloat16),
    "qwen3, float32 head": ("qwen3", _COMMON, torch.bfloat16),
}
PROMPTS = [list(range(start, start + 40)) for start in (10, 100, 200)]


class KeepsAPart(VLLMEngine):
    """What vLLM is handed of the tensor ``victim`` is partly what it held before."""

    victim: str | None = None
    part = ""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().update(self._spoiled(weights))

    def _spoiled(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name != self.victim:
                yield name, tensor
                continue
            spoiled = tensor.clone()
            rows, old = spoiled.view(-1, tensor.shape[-1]), self.before[name].view(-1, tensor.shape[-1])
            if self.part == "tensor":
                rows.copy_(old)
            elif self.part == "row":
                rows[-1] = old[-1]
            elif self.part == "element":
                rows[len(rows) // 2, -1] = old[len(rows) // 2, -1]
            else:
                rows[[0, -1]] = rows[[-1, 0]]
            yield name, spoiled


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_any_tensor_that_is_stale_in_vllm_is_found(family: str, tmp_path: Path) -> None:
    kind, settings, dtype = FAMILIES[family]
    folder = build_tiny_model(tmp_path / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    engine = KeepsAPart(
        str(folder),
        device=torch.device("cpu"),
        dtype=dtype,
        head_dtype=torch.float32 if "float32 head" in family else None,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
        gpu_memory_utilization=0.4,
        kv_cache_gib=1,
    )
    try:
        form = dtype, dtype
        publisher = WeightPublisher(model, TokenScorer(model), engine, PROMPTS, 2, *form)
        publisher.prove_at_start(0)
        assert publisher.unread == []
        tensors = dict(model.named_parameters())
        cases = [(n, part) for n, t in tensors.items() for part in PARTS if t.dim() > 1 or part != PARTS[3]]
        for number, (name, part) in enumerate(cases):
            engine.before = {n: t.detach().to(dtype).clone() for n, t in tensors.items()}
            engine.victim, engine.part = name, part
            move_everything(model, number)
            with pytest.raises(TrainingStopped, match=f"1 of {len(tensors)} tensors .* first is {name}: "):
                publisher.publish(1)
        engine.victim = None
        publisher.publish(2)
        if "float32 head" in family:
            check_head(engine, model.lm_head.weight.detach().to(dtype))
        assert_others_compute_alike(model)
        publisher.publish(3)
    finally:
        engine.close()
    assert_others_compute_alike(model)


def assert_others_compute_alike(model: PreTrainedModel) -> None:
    """``model``, built before an engine, and one of its class built now give the same logits."""
    later = type(model)(model.config).eval()
    later.load_state_dict(model.state_dict())
    with torch.no_grad():
        before, after = (one(torch.tensor(PROMPTS)).logits for one in (model, later))
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def check_head(engine: VLLMEngine, weight: Tensor) -> None:
    """Answers are those of ``weight``, which was published last, and no logit is rounded to 16 bits."""
    hidden: list[Tensor] = []
    processor = engine._weights.model.get_submodule("logits_processor")
    hook = processor.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[1].clone()))
    engine.reset_cache()
    answer = engine.next_tokens(Probe(PROMPTS, top_k=5))
    hook.remove()
    states = torch.cat(hidden)
    assert states.dtype is torch.bfloat16 and len(states) == len(PROMPTS)
    logits = states.double() @ weight.double().T
    right, rounded = (torch.log_softmax(one.double(), -1) for one in (logits, logits.bfloat16()))
    assert (right - rounded).abs().max() > 1e-2
    torch.testing.assert_close(
        answer.log_probs.double(), right.gather(1, answer.token_ids), rtol=0, atol=1e-3
    )
