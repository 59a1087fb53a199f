"""The trial before training: what is not computed as the model would is found, and goes another way."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from batches import FAMILIES, FLOAT32, inputs, make_batch, make_model
from families import in_default_format
from rounding import EXACT
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.config.values import Attention, Autocast
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring import trial
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.upcast import Upcast

_LLAMA = FAMILIES["llama"][1]
_PLAIN = {k: v for k, v in _LLAMA.items() if k != "head_dim"}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_MOE = {**_PLAIN, **_EXPERTS, "shared_expert_intermediate_size": 24, "use_sliding_window": True}
_QWEN_MOE |= {"sliding_window": 64, "max_window_layers": 2}
_DEEPSEEK = {**_PLAIN, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
_DEEPSEEK |= {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {"qk_nope_head_dim": 8, "first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 16}


def build(kind: str, **settings: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=FLOAT32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, dtype=FLOAT32))
    return in_default_format(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_a_row_of_groups_does_not_carry_is_found_however_wide(dtype: torch.dtype) -> None:
    # Qwen2-MoE puts its window into the mask alone, which a row has no use for.
    model = build("qwen2_moe", **_QWEN_MOE).to(dtype)
    prepare_for_training(model, TrainModelConfig())
    with pytest.warns(UserWarning, match="once per response .* log-probabilities would change"):
        assert not shares_prefix(model, longest=65)
    # Sequences that are no longer than the window never meet it.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shares_prefix(model, longest=64)
    assert shares_prefix(build("qwen2_moe", **{**_QWEN_MOE, "use_sliding_window": False}))


@pytest.mark.parametrize("family", ["mistral_sliding", "phi3", "gemma3", "qwen3"])
def test_a_window_that_is_carried_is_no_reason(family: str) -> None:
    settings = {} if family == "qwen3" else {"sliding_window": 100}
    assert shares_prefix(make_model(family, **settings))


def test_a_small_difference_is_a_difference() -> None:
    model = build("doge", **_PLAIN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):
                parameter.mul_(0.02)
    with pytest.warns(UserWarning, match=r"would change by 0\.00"):
        assert not shares_prefix(model)


def test_in_16_bits_rounding_is_no_difference() -> None:
    # So many layers of large weights that bfloat16 answers by chance.
    model, batch = make_model("llama", num_hidden_layers=24).bfloat16(), make_batch(P=3, G=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(2 if "proj" in name else 1)
        rounded = TokenScorer(model, shares_prefix=True)(*inputs(batch)).log_probs
        exact = TokenScorer(copy.deepcopy(model).float(), shares_prefix=True)(*inputs(batch)).log_probs
    assert float((rounded - exact).abs().max()) > 0.1
    assert shares_prefix(model)


@pytest.mark.parametrize("requested", [True, False])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_a_model_whose_numbers_padding_changes_is_refused(requested: bool) -> None:
    windows = {"lru_width": 32, "attention_window_size": 7}
    model = build("recurrent_gemma", **_PLAIN, **windows)
    prepare_for_training(model, TrainModelConfig())
    with pytest.raises(ModelError, match=r"RecurrentGemmaForCausalLM: padding changes .*; choose another mo"):
        shares_prefix(model, requested)
    # It chooses among more keys than a sequence may have.
    model = build("deepseek_v32", **_DEEPSEEK, index_topk=64)
    prepare_for_training(model, TrainModelConfig())
    with pytest.raises(ModelError, match=r"padding changes .*; write inference_model.max_model_len=64 or "):
        shares_prefix(model, requested, longest=65)
    assert not shares_prefix(model, requested, longest=64)


def state(model: PreTrainedModel) -> list[Any]:
    tensors = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    modes = [module.training for module in model.modules()]
    return [tensors, modes, copy.deepcopy(model.config.to_dict()), torch.get_rng_state()]


@pytest.mark.parametrize("requested", [True, False])
def test_the_trial_leaves_everything_as_it_was(requested: bool) -> None:
    model = make_model("mistral_sliding", sliding_window=100)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    before = state(model)
    assert shares_prefix(model, requested) == requested
    after = state(model)
    assert all(map(torch.equal, before[0], after[0])) and before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])
    assert model.config.sliding_window == 100


def test_its_tokens_are_ordinary_ones() -> None:
    prompt, prompt_mask, response, mask = trial.batch(make_model("llama", vocab_size=49152))
    ids = torch.cat([prompt[prompt_mask], response[mask]])
    assert int(ids.min()) >= 49152 // 64 and int(ids.max()) < 49152 // 2
    assert sorted(prompt_mask.sum(-1).tolist()) == [4, 9] and sorted(mask.sum(-1).flatten().tolist())[0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_model_in_16_bits_computes_in_more(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).bfloat16()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(input_ids=ids).logits
        with Upcast(dtype):
            logits = model(input_ids=ids).logits
        rough = model(input_ids=ids).logits
    assert logits.dtype == dtype and rough.dtype == torch.bfloat16
    assert float((logits - expected).abs().max()) < 1e-4 < 1e-2 < float((rough - expected).abs().max())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


NOISY: dict[str, dict[str, Any]] = {
    "mixtral": {**_PLAIN, **_EXPERTS, "router_jitter_noise": 0.1, "attention_dropout": 0.5},
    "phimoe": {**_PLAIN, **_EXPERTS, "router_jitter_noise": 0.01, "input_jitter_noise": 0.1},
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", NOISY)
def test_gradient_checkpointing_switches_no_noise_on(kind: str) -> None:
    model, batch = build(kind, **NOISY[kind]), make_batch(P=2, G=3)
    with torch.no_grad():
        expected = TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    calls: list[int] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    for shared in (False, True, True):
        log_probs = TokenScorer(model, shares_prefix=shared)(*inputs(batch)).log_probs
        torch.testing.assert_close(log_probs, expected, **EXACT)
    log_probs.sum().backward()
    assert len(calls) == 4, "the layer was not run again"


def test_a_model_that_cannot_recompute_says_what_to_write() -> None:
    model = build("jetmoe", **_PLAIN, num_local_experts=4, num_experts_per_tok=2, kv_channels=8)
    with pytest.raises(ModelError, match=r"JetMoeForCausalLM: .*write train_model.gradient_checkpointing=fa"):
        prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    prepare_for_training(model, TrainModelConfig())
    assert shares_prefix(model)


def test_a_backbone_under_another_name() -> None:
    settings = {**_LLAMA, **_EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": 8}
    model, batch = build("llama4_text", **settings, intermediate_size_mlp=48), make_batch(P=2, G=2)
    prepare_for_training(model, TrainModelConfig())
    with pytest.warns(UserWarning, match="its layers are chunked_attention"):
        assert not shares_prefix(model)
    scores = TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs
    assert scores.isfinite().all()


def only_16_bits(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
) -> Any:
    """A kernel of attention that refuses other formats, as flash-attn's do."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")
    query, key, value = (x.to(dtype) for x in (query, key, value))
    return sdpa_attention_forward(module, query, key, value, *rest, **more)


def wrong(*arguments: Any, **more: Any) -> Any:
    out, weights = only_16_bits(*arguments, **more)
    return out.flip(1), weights


@pytest.mark.parametrize(
    ("kernel", "autocast", "reason"),
    [
        (only_16_bits, "bf16", None),
        (only_16_bits, "no", "FlashAttention only supports fp16 and bf16 data type"),
        (wrong, "bf16", "log-probabilities would change by"),
    ],
)
def test_a_kernel_for_16_bits_is_tried_under_autocast(
    kernel: Any, autocast: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    model, name = make_model("llama"), "flash_attention_2"
    # As if the package were there.
    monkeypatch.setattr(
        PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **_: name
    )
    monkeypatch.setitem(AttentionInterface._global_mapping, name, kernel)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)
    cfg = TrainModelConfig(
        attn_implementation=Attention(name), autocast=Autocast(autocast), shared_prefix=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_for_training(model, cfg)
    messages = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert model.config._attn_implementation == (name if reason is None else "sdpa")
    assert len(messages) == (0 if reason is None else 1)
    assert reason is None or re.search(
        f"{name} cannot be used .{reason}.*; sdpa is used instead", messages[0]
    )
    # And the trials before training run without it.
    assert not shares_prefix(model, requested=False)
    assert model.config._attn_implementation == (name if reason is None else "sdpa")
