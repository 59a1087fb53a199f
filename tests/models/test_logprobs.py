"""Token log-probabilities: groups in one row, the head in blocks, temperature, and when to fall back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from batches import FAMILIES, VOCAB, gradients, inputs, make_batch, make_model, widen
from families import in_default_format
from rounding import EXACT, assert_rounds_alike
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.scores import TokenScores
from torchrl_grpo.models.scoring.shared_prefix import PrefixLayout
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, max_logit_error

# Gemma 2 caps its attention scores, which no fused kernel does.
SHAREABLE = [name for name in FAMILIES if not name.startswith("gemma2")]


def by_hand(model: PreTrainedModel, batch: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, one unpadded sequence at a time through the model's own forward."""
    prompt, prompt_mask, response, mask = inputs(batch)
    log_probs, entropy = torch.zeros(response.shape), torch.zeros(response.shape)
    for p in range(response.shape[0]):
        for s in range(response.shape[1]):
            start, length = int(prompt_mask[p].sum()), int(mask[p, s].sum())
            ids = torch.cat([prompt[p][prompt_mask[p]], response[p, s][mask[p, s]]])
            logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / temperature
            log_p = torch.log_softmax(logits, -1)
            for t in range(length):
                row = log_p[start + t - 1]
                log_probs[p, s, t] = row[ids[start + t]]
                entropy[p, s, t] = -(row.exp() * row).sum()
    return log_probs, entropy


def scored(model: PreTrainedModel, batch: Any, **options: Any) -> tuple[TokenScores, dict[str, Tensor]]:
    """Scores, and the gradients of a loss that weighs every token differently."""
    model.zero_grad()
    scores = TokenScorer(model, **options)(*inputs(batch))
    weight = torch.linspace(-1, 1, scores.log_probs.numel()).view_as(scores.log_probs)
    (scores.log_probs * weight).sum().backward()
    return scores, gradients(model)


def assert_same_gradients(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in first:
        torch.testing.assert_close(first[name], other[name], **EXACT, msg=name)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_scores_equal_the_models_own_forward_on_unpadded_sequences(family: str, shared: bool) -> None:
    model, batch = make_model(family), make_batch(P=3, G=3)
    with torch.no_grad():
        expected, entropy = by_hand(model, batch, temperature=0.7)
        scores = TokenScorer(model, 0.7, shares_prefix=shared)(*inputs(batch))
    torch.testing.assert_close(scores.log_probs, expected, **EXACT)
    torch.testing.assert_close(scores.entropy, entropy, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("family", SHAREABLE)
def test_shared_prefix_equals_plain_with_gradients(family: str, samples: int, attention: str) -> None:
    model, batch = make_model(family), make_batch(P=3, G=samples, L=9, T=8, seed=samples)
    model.set_attn_implementation(attention)
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    shared, shared_gradients = scored(model, batch)
    assert TokenScorer(model).shares_prefix
    torch.testing.assert_close(shared.log_probs, plain.log_probs, **EXACT)
    torch.testing.assert_close(shared.entropy, plain.entropy, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)
    assert max(float(g.abs().max()) for g in shared_gradients.values()) > 0.1, "nothing was compared"


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", SHAREABLE)
def test_a_batch_without_padding(family: str) -> None:
    model, batch = make_model(family), make_batch(P=2, G=3, L=5, T=6)
    batch["masks", "prompt"][:] = True
    batch["masks", "response"][:] = True
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    shared, shared_gradients = scored(model, batch)
    torch.testing.assert_close(shared.log_probs, plain.log_probs, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", SHAREABLE)
def test_shared_prefix_with_gradient_checkpointing(family: str) -> None:
    model, batch = make_model(family), make_batch(P=3, G=3)
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    rows, seen = [], []
    model.get_input_embeddings().register_forward_hook(lambda *call: rows.append(call[1][0].shape))
    list(model.base_model.modules())[-1].register_forward_hook(lambda *call: seen.append(1))
    shared, shared_gradients = scored(model, batch)
    torch.testing.assert_close(shared.log_probs, plain.log_probs, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)
    mask = batch["masks", "response"]
    assert rows == [(1, int(batch["masks", "prompt"].sum() + mask.sum() - mask.any(-1).sum()))]


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_shared_prefix_with_lora(family: str, checkpointing: bool) -> None:
    from peft import LoraConfig

    model, batch = make_model(family), make_batch(P=3, G=3)
    layers = ["c_attn", "c_fc"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    # Both matrices of an adapter start at random, so that each has a gradient.
    model.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=checkpointing))
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    shared, shared_gradients = scored(model, batch)
    torch.testing.assert_close(shared.log_probs, plain.log_probs, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)
    moved = [name for name, gradient in shared_gradients.items() if gradient.any()]
    assert len(moved) >= 8 and all("lora" in name for name in moved)


@pytest.mark.parametrize("family", SHAREABLE)
def test_shared_prefix_under_autocast_agrees_to_bfloat16(family: str) -> None:
    model, batch = make_model(family), make_batch(P=3, G=3)
    options = {"autocast_dtype": torch.bfloat16}
    exact, plain, shared = (
        {"log-probabilities": scores.log_probs.detach(), **slopes}
        for scores, slopes in (
            scored(model, batch, shares_prefix=False),
            scored(model, batch, shares_prefix=False, **options),
            scored(model, batch, **options),
        )
    )
    assert_rounds_alike(shared, plain, exact)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("samples", [1, 3])
def test_responses_of_one_token(samples: int) -> None:
    model, batch = make_model(), make_batch(P=3, G=samples, T=1)
    shared, shared_gradients = scored(model, batch)
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    expected, _ = by_hand(model, batch)
    torch.testing.assert_close(shared.log_probs, expected, **EXACT)
    torch.testing.assert_close(plain.log_probs, expected, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_lengths_far_apart_are_attended_in_rectangles_half_full(family: str) -> None:
    model, batch = make_model(family), make_batch(P=5, G=4, L=30, T=40)
    lengths = torch.tensor([[40, 1, 3, 20], [7, 2, 1, 39], [1, 5, 12, 13], [9, 9, 8, 1], [1, 1, 1, 1]])
    batch["masks", "response"] = torch.arange(40) < lengths[..., None]
    prompts = torch.tensor([3, 30, 1, 4, 29])
    batch["masks", "prompt"] = torch.arange(30) >= 30 - prompts[:, None]
    layout = PrefixLayout(*inputs(batch), torch.device("cpu"))
    runs = [run.responses for length_class in layout.classes for run in length_class.runs]
    rectangles = [*runs, *(length_class.prompts for length_class in layout.classes)]
    assert len(layout.classes) == 3 and len(runs) > 4
    assert all(2 * rectangle.total >= rectangle.rows * rectangle.width for rectangle in rectangles)
    # Keys of a response are its class's prompt and its own: none stands beside a prompt of another length.
    assert [length_class.prompts.width for length_class in layout.classes] == [30, 4, 1]
    assert sum(run.total for run in runs) == int((lengths - 1).sum())
    assert layout.ids.shape[1] == int((lengths - 1).sum() + prompts.sum())
    plain, plain_gradients = scored(model, batch, shares_prefix=False)
    shared, shared_gradients = scored(model, batch)
    torch.testing.assert_close(shared.log_probs, plain.log_probs, **EXACT)
    assert_same_gradients(shared_gradients, plain_gradients)


def test_no_response_has_a_token() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    batch["masks", "response"][:] = False
    assert not TokenScorer(model)(*inputs(batch)).log_probs.any()
    empty = batch["tokens", "response"][..., :0], batch["masks", "response"][..., :0]
    scores = TokenScorer(model)(batch["tokens", "prompt"], batch["masks", "prompt"], *empty)
    assert scores.log_probs.shape == (2, 2, 0)


@pytest.mark.usefixtures("float64")
def test_a_response_without_tokens_changes_nothing_for_the_others() -> None:
    model, batch = make_model(), make_batch(P=3, G=3)
    expected, _ = by_hand(model, batch)
    batch["masks", "response"][1, 1] = False
    scores, slopes = scored(model, batch)
    assert not scores.log_probs[1, 1].any()
    expected[1, 1] = 0
    torch.testing.assert_close(scores.log_probs, expected, **EXACT)
    assert all(g.isfinite().all() for g in slopes.values())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
def test_more_padding_changes_nothing(shared: bool) -> None:
    model, batch = make_model(), make_batch(P=3, G=2)
    narrow, narrow_gradients = [], []
    for padded in (batch, widen(batch, 5, 4)):
        model.zero_grad()
        scores = TokenScorer(model, shares_prefix=shared)(*inputs(padded))
        weight = torch.linspace(-1, 1, 6)
        (scores.log_probs[..., :6] * weight).sum().backward()
        narrow.append(scores)
        narrow_gradients.append(gradients(model))
    torch.testing.assert_close(narrow[1].log_probs[..., :6], narrow[0].log_probs, **EXACT)
    assert not narrow[1].log_probs[..., 6:].any() and not narrow[1].entropy[..., 6:].any()
    assert_same_gradients(narrow_gradients[0], narrow_gradients[1])


def test_padded_positions_are_zero_and_float32() -> None:
    batch = make_batch()
    scores = TokenScorer(make_model())(*inputs(batch))
    mask = batch["masks", "response"]
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    assert not scores.log_probs[~mask].any() and not scores.entropy[~mask].any()
    assert (scores.log_probs[mask] < 0).all()
    assert not scores.entropy.requires_grad


@pytest.mark.usefixtures("float64")
def test_temperature_divides_the_logits() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    with torch.no_grad():
        cold, _ = by_hand(model, batch, 0.3)
        scores = TokenScorer(model, 0.3)(*inputs(batch))
        warm = TokenScorer(model, 1.0)(*inputs(batch))
    torch.testing.assert_close(scores.log_probs, cold, **EXACT)
    assert float((scores.log_probs - warm.log_probs).abs().max()) > 1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_next_token_log_probs(family: str) -> None:
    model, batch = make_model(family), make_batch()
    prompt, mask, _, _ = inputs(batch)
    with torch.no_grad():
        ours = TokenScorer(model, temperature=0.5).next_token_log_probs(prompt, mask)
        for row, ids in zip(ours, (p[m] for p, m in zip(prompt, mask, strict=True)), strict=True):
            expected = torch.log_softmax(model(input_ids=ids[None]).logits[0, -1], -1)
            torch.testing.assert_close(row, expected, **EXACT)


UNABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "attn_logit_softcapping": FAMILIES["gemma2"],
    "its layers are conv": (
        "lfm2",
        {**FAMILIES["llama"][1], "layer_types": ["conv", "full_attention"]},
    ),
    "attention interface": ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("reason", UNABLE)
def test_a_model_that_cannot_share_falls_back_with_one_warning(reason: str) -> None:
    kind, settings = UNABLE[reason]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with pytest.warns(UserWarning, match=f"once per response .*{reason}") as caught:
        scorer = TokenScorer(model)
    assert len([warning for warning in caught if "once per response" in str(warning.message)]) == 1
    assert not scorer.shares_prefix
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer(*inputs(make_batch()))


@pytest.mark.usefixtures("float64")
def test_attention_sinks_are_found_before_anything_is_changed() -> None:
    settings = {**FAMILIES["llama"][1], "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    model = in_default_format(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **settings)))
    model.eval()
    attention = model.config._attn_implementation
    batch = make_batch(P=2, G=2)
    with torch.no_grad():
        expected, _ = by_hand(model, batch)
    with pytest.warns(UserWarning, match="once per response .* s_aux"):
        assert not shares_prefix(model)
    assert model.config._attn_implementation == attention
    with torch.no_grad():
        scores = TokenScorer(model, shares_prefix=False)(*inputs(batch))
    torch.testing.assert_close(scores.log_probs, expected, **EXACT)


def test_the_plain_path_is_taken_in_silence_where_it_is_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not TokenScorer(make_model("gemma2"), shares_prefix=False).shares_prefix


def test_the_shared_path_runs_real_tokens_only_and_each_prompt_once() -> None:
    model, batch = make_model(), make_batch(P=3, G=4, L=7, T=6)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
    TokenScorer(model)(*inputs(batch))
    # The last token of a response is only predicted.
    assert seen == [int(batch["masks", "prompt"].sum() + batch["masks", "response"].sum()) - 3 * 4]


@pytest.mark.usefixtures("float64")
def test_the_model_answers_as_before_where_no_layout_is_given() -> None:
    model = make_model("mistral_sliding")
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    TokenScorer(model)
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=mask).logits[mask.bool()], expected, **EXACT
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", FAMILIES)
def test_check_head_knows_these_families(family: str) -> None:
    assert max_logit_error(make_model(family)) < 1e-9


_NO_HEAD_DIM = {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"}


def test_check_head_sees_a_forward_that_does_more() -> None:
    model = make_model("llama")
    head = model.lm_head
    head.register_forward_hook(lambda *call: call[2] + 0.5)
    assert max_logit_error(model) > 0.05


# Granite divides its logits by a number, the others multiply them, Falcon-H1 and Cohere by default.
SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 3.0, "sliding_window": 4},
    "hyperclovax": {"logits_scaling": 0.25},
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("kind", SCALED)
def test_logits_that_a_model_scales(kind: str, shared: bool) -> None:
    config = AutoConfig.for_model(kind, **_NO_HEAD_DIM, **SCALED[kind])
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), make_batch(P=2, G=2)
    prepare_for_training(model, TrainModelConfig())
    assert max_logit_error(model) < 1e-9
    model.zero_grad()
    expected, entropy = by_hand(model, batch, 0.7)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weight).sum().backward()
    right = gradients(model)
    model.zero_grad()
    scorer = TokenScorer(model, 0.7, shares_prefix=shared)
    assert scorer.shares_prefix == shared
    scores = scorer(*inputs(batch))
    (scores.log_probs * weight).sum().backward()
    torch.testing.assert_close(scores.log_probs, expected, **EXACT)
    torch.testing.assert_close(scores.entropy, entropy.detach(), **EXACT)
    assert_same_gradients(gradients(model), right)
    ids = batch["tokens", "prompt"][:, -1:]
    own = torch.log_softmax(model(input_ids=ids).logits[:, -1], -1)
    torch.testing.assert_close(scorer.next_token_log_probs(ids, torch.ones_like(ids).bool()), own, **EXACT)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
def test_a_float32_head_under_mixed_precision_rounds_nothing_after_the_last_hidden_state(
    shared: bool, weights: torch.dtype
) -> None:
    model, batch = make_model("gemma2" if not shared else "llama").to(weights), make_batch(P=2, G=2)
    autocast = torch.bfloat16 if weights == torch.float32 else None
    kept: list[Tensor] = []
    backbone = model.base_model
    backbone.register_forward_hook(lambda *call: kept.append(call[2].last_hidden_state.detach()))
    weight = model.lm_head.weight.detach().double()
    cap = model.config.to_dict().get("final_logit_softcapping")

    def gaps(head_dtype: torch.dtype | None) -> tuple[float, float]:
        """To float64 logits of the same hidden states: of log-probabilities and of the next token's."""
        kept.clear()
        scorer = TokenScorer(model, 0.7, autocast, shared, head_dtype=head_dtype)
        log_probs = scorer(*inputs(batch)).log_probs.detach()
        following = scorer.next_token_log_probs(*inputs(batch)[:2]).detach()
        everything, last = (hidden.double() @ weight.T for hidden in kept)
        if cap is not None:
            everything, last = (cap * torch.tanh(logits / cap) for logits in (everything, last))
        right = torch.log_softmax(everything / 0.7, -1)
        # The first response token of the first group is predicted by its prompt's last token.
        first = batch["tokens", "response"][0, 0, 0]
        nearest = (right[..., first] - log_probs[0, 0, 0]).abs().min()
        return float(nearest), float((torch.log_softmax(last[:, -1], -1) - following).abs().max())

    rounded = gaps(None)[1]
    assert rounded > 1e-3 and max(gaps(torch.float32)) < rounded / 100


def test_autocast_computes_in_bfloat16_and_returns_float32() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    exact = TokenScorer(model)(*inputs(batch)).log_probs
    rough = TokenScorer(model, autocast_dtype=torch.bfloat16)(*inputs(batch)).log_probs
    difference = float((exact - rough).detach().abs().max())
    assert rough.dtype == torch.float32
    assert 1e-4 < difference < 0.5


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
def test_the_head_is_computed_for_the_tokens_that_are_asked_for_only(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model("llama_tied"), make_batch(P=2, G=3)
    scorer = TokenScorer(model, 0.7, shares_prefix=shared)
    whole = scorer(*inputs(batch))
    mask = batch["masks", "response"]
    chosen = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.4)
    weight = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    (whole.log_probs * weight * chosen).sum().backward()
    right = gradients(model)
    model.zero_grad()
    counts = []
    compute = scorer._score

    def counted(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts.append(len(targets))
        return compute(hidden, targets)

    monkeypatch.setattr(scorer, "_score", counted)
    scores = scorer(*inputs(batch), chosen)
    (scores.log_probs * weight).sum().backward()
    assert counts == [int(chosen.sum())]
    torch.testing.assert_close(scores.log_probs, whole.log_probs * chosen, **EXACT)
    torch.testing.assert_close(scores.entropy, whole.entropy * chosen, **EXACT)
    assert_same_gradients(gradients(model), right)
    # Nothing to score: ranks still need a backward pass through every layer.
    model.zero_grad()
    nothing = scorer(*inputs(batch), torch.zeros_like(mask))
    nothing.log_probs.sum().backward()
    assert counts[-1] == 0 and all(parameter.grad is not None for parameter in model.parameters())
    assert not any(gradient.any() for gradient in gradients(model).values())
