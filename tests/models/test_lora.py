"""Adapters: where they go, what they compute, what is published and saved of them, and the base below."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from adapters import adapted, by_formula, move
from batches import FAMILIES, gradients, inputs, make_batch, make_model, no_budget
from rounding import EXACT
from torch.utils.flop_counter import FlopCounterMode

from torchrl_grpo.config.schema import LoraConfig, TrainModelConfig
from torchrl_grpo.errors import CheckpointError, ConfigError
from torchrl_grpo.models import lora
from torchrl_grpo.models.flops import FlopCounter
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer

SOME = ["llama", "llama_tied", "qwen2", "gpt2", "gemma3", "phi"]


# Where they go


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_begins_as_the_base_and_only_float32_adapters_train(family: str) -> None:
    base, model, batch = make_model(family), adapted(family, moved=0), make_batch(P=2, G=2)
    assert type(model) is type(base) and type(model.base_model) is type(base.base_model)
    with torch.no_grad():
        expected, actual = (
            TokenScorer(m, shares_prefix=False)(*inputs(batch)).log_probs for m in (base, model)
        )
    assert torch.equal(expected, actual)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if lora.is_adapter(name)}
    layers = lora.adapted_layers(model)
    assert len(trained) == 2 * len(layers) and len(layers) >= 8
    assert not any("embed" in name or "wte" in name or "lm_head" in name for name in layers)


def test_adapters_are_a_function_of_the_seed_and_leave_other_random_numbers_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = adapted(), adapted()
    assert torch.equal(torch.get_rng_state(), before)
    other = make_model()
    lora.add_adapters(other, LoraConfig(rank=4, alpha=12.0), seed=6)
    move(other, 0.1)
    a, b, c = (dict(m.named_parameters()) for m in (first, again, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if "lora_A" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_are_float32_over_a_base_in_16_bits(dtype: torch.dtype) -> None:
    model = adapted(dtype=dtype)
    kinds = {(lora.is_adapter(name), p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, dtype)}
    merged = dict(lora.merged_weights(model))
    assert merged["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert merged["model.embed_tokens.weight"].dtype == dtype


def test_layers_are_chosen_by_the_ends_of_their_names() -> None:
    some = lora.adapted_layers(adapted(target_modules=["q_proj", "mlp.up_proj"]))
    assert {name.rpartition(".")[2] for name in some} == {"q_proj", "up_proj"} and len(some) == 4


@pytest.mark.parametrize(
    "family,wrong,known",
    [("llama", "query", "down_proj, gate_proj, k_proj"), ("gpt2", "q_proj", "c_attn, c_fc, c_proj")],
)
def test_an_unknown_layer_is_named_with_those_there_are(family: str, wrong: str, known: str) -> None:
    with pytest.raises(ConfigError, match=rf"target_modules=\[{wrong}\]: .*no linear layer {wrong}.*{known}"):
        adapted(family, target_modules=[wrong])
    with pytest.raises(ConfigError, match="no linear layer lm_head"):
        adapted("llama", target_modules=["q_proj", "lm_head"])


# What they compute


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_scores_and_gradients_are_those_of_the_merged_model(family: str, checkpointing: bool) -> None:
    model, batch = adapted(family), make_batch(P=2, G=3)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=checkpointing))
    scores = TokenScorer(model, shares_prefix=shares_prefix(model))(*inputs(batch)).log_probs
    weight = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    (scores * weight).sum().backward()
    whole = make_model(family)
    own = dict(whole.named_parameters())
    with torch.no_grad():
        for name, tensor in by_formula(model).items():
            own[name].copy_(tensor)
    expected = TokenScorer(whole, shares_prefix=False)(*inputs(batch)).log_probs
    torch.testing.assert_close(scores, expected, **EXACT)
    (expected * weight).sum().backward()
    grads, whole_grads = gradients(model), gradients(whole)
    layers = lora.adapted_layers(model)
    assert len(layers) >= 8
    # By the chain rule from the gradient D of W + s B A: s D A^T for B, s B^T D for A.
    for name, layer in layers.items():
        D = whole_grads[f"{name}.weight"]
        D = D.T if family == "gpt2" else D
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for part, by_hand in (("B", 3.0 * D @ a.T), ("A", 3.0 * b.T @ D)):
            gradient = grads[f"{name}.lora_{part}.default.weight"]
            torch.testing.assert_close(gradient, by_hand.detach(), **EXACT, msg=f"{name} {part}")
    assert all(p.grad is None for name, p in model.named_parameters() if not lora.is_adapter(name))


def test_a_base_in_bfloat16_shares_its_prompts_and_trains_under_autocast() -> None:
    model, batch = adapted(dtype=torch.bfloat16), make_batch(P=2, G=2)
    prepare_for_training(model, TrainModelConfig())
    assert shares_prefix(model)
    scores = TokenScorer(model, autocast_dtype=torch.bfloat16)(*inputs(batch)).log_probs
    scores.sum().backward()
    grads = [p.grad for name, p in model.named_parameters() if lora.is_adapter(name)]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() and g.any() for g in grads)


def test_operations_count_no_gradient_of_frozen_matrices() -> None:
    model = adapted()
    tokens, prompt = 11, 5
    ids = torch.arange(tokens)[None]
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model.set_attn_implementation("eager")
        # As if embeddings were trained: what the first layer need not hand down is counted too.
        embedded = model.get_input_embeddings()(ids[:, :-1]).requires_grad_()
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, prompt - 1 :]
        model.get_output_embeddings()(hidden).sum().backward()
    per_pair, n = 3 * 4 * 2 * 4 * 8, tokens - 1
    expected = counter.get_total_flops() - n * n * per_pair + n * (n + 1) // 2 * per_pair
    ours = FlopCounter(model)([prompt], [[tokens - prompt]], backward=True)
    assert ours == pytest.approx(expected, rel=1e-6)
    whole = FlopCounter(make_model())([prompt], [[tokens - prompt]], backward=True)
    assert ours < whole


# What is published


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", SOME)
def test_merged_weights_are_the_formula_and_leave_the_model_alone(family: str) -> None:
    model = adapted(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    merged, expected = dict(lora.merged_weights(model)), by_formula(model)
    assert list(merged) == list(dict(make_model(family).named_parameters()))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], **EXACT)
        assert not tensor.requires_grad
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # Deterministic: the checksum of one listing is compared with another's.
    assert all(torch.equal(tensor, merged[name]) for name, tensor in lora.merged_weights(model))


def test_one_merged_matrix_is_made_at_a_time() -> None:
    model = adapted()
    listing = lora.merged_weights(model)
    held = {name: tensor.data_ptr() for name, tensor in zip(range(3), (t for _, t in listing), strict=False)}
    own = {p.data_ptr() for p in model.parameters()}
    assert sum(address in own for address in held.values()) == 1, "the embedding, and no adapted matrix"


# The reference below


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_without_its_adapters_the_model_is_its_base(family: str, shared: bool) -> None:
    model, batch = adapted(family), make_batch(P=3, G=3, kl=False)
    base = TokenScorer(make_model(family), 0.7, shares_prefix=shared)
    off = LogProbScorer(
        TokenScorer(model, 0.7, shares_prefix=shared),
        "reference",
        no_budget(),
        lambda: lora.disable_adapters(model),
    )
    with torch.no_grad():
        with_adapters = TokenScorer(model, 0.7, shares_prefix=shared)(*inputs(batch)).log_probs
        expected = base(*inputs(batch)).log_probs
    log_probs = off.inv(batch.clone())["log_probs", "reference"]
    torch.testing.assert_close(log_probs, expected, **EXACT)
    assert float((with_adapters - expected).abs().max()) > 0.1
    with torch.no_grad():
        again = TokenScorer(model, 0.7, shares_prefix=shared)(*inputs(batch)).log_probs
    assert torch.equal(again, with_adapters)
    assert all(p.requires_grad == lora.is_adapter(name) for name, p in model.named_parameters())


def test_adapters_are_on_again_after_an_error() -> None:
    model, ids = adapted(), torch.arange(8)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="out of memory"), lora.disable_adapters(model):
            assert not torch.equal(model(input_ids=ids).logits, before)
            raise RuntimeError("out of memory")
        assert torch.equal(model(input_ids=ids).logits, before)
    assert all(p.requires_grad == lora.is_adapter(name) for name, p in model.named_parameters())


# What is saved


@pytest.mark.parametrize("family", ["llama_tied", "gpt2"])
def test_saved_adapters_are_read_by_peft_and_by_us(family: str, tmp_path: Path) -> None:
    import peft

    model, ids = adapted(family), torch.arange(8)[None]
    lora.save_adapters(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = peft.PeftModel.from_pretrained(make_model(family), str(tmp_path)).eval()
    ours = adapted(family, moved=0.3)
    lora.load_adapters(ours, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        assert torch.equal(ours(input_ids=ids).logits, expected)
        assert torch.equal(theirs(input_ids=ids).logits, expected)
    for (name, p), (_, q) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(p, q) and p.requires_grad == q.requires_grad, name


def test_adapters_of_other_layers_are_refused(tmp_path: Path) -> None:
    lora.save_adapters(adapted(target_modules=["q_proj"]), tmp_path)
    with pytest.raises(CheckpointError, match="it has 4 adapter matrices, but this model has 28"):
        lora.load_adapters(adapted(), tmp_path)


def test_stirring_moves_every_matrix_and_is_taken_back_bit_for_bit() -> None:
    model = adapted(moved=0)
    before = copy.deepcopy(model.state_dict())
    base = dict(make_model().named_parameters())
    with pytest.raises(RuntimeError, match="in between"), lora.perturbed_adapters(model, 0.25):
        for name in lora.adapted_layers(model):
            weight = base[f"{name}.weight"]
            merged = lora.merged_weight(lora.adapted_layers(model)[name])
            assert float((merged - weight).norm() / weight.norm()) == pytest.approx(0.25, rel=1e-3)
        raise RuntimeError("in between")
    after = model.state_dict()
    assert all(torch.equal(after[name].view(torch.int32), t.view(torch.int32)) for name, t in before.items())
