"""Token log-probabilities: the shared-prefix path, chunks, temperature, the head, and when to fall back."""

from __future__ import annotations

import warnings

import pytest
import torch
from batches import FAMILIES, gradients, inputs, make_batch, make_model, widen
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_grpo.models.logprobs import TokenScorer, TokenScores, check_head

SHAREABLE = [name for name in FAMILIES if name not in ("mistral_sliding", "gemma2")]


def by_hand(model: PreTrainedModel, batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
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


def scored(model: PreTrainedModel, batch, **options) -> tuple[TokenScores, dict[str, Tensor]]:
    """Scores, and the gradients of a loss that weighs every token differently."""
    model.zero_grad()
    scores = TokenScorer(model, **options)(*inputs(batch))
    weight = torch.linspace(-1, 1, scores.log_probs.numel()).view_as(scores.log_probs)
    (scores.log_probs * weight).sum().backward()
    return scores, gradients(model)


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name in one:
        scale = max(1.0, float(other[name].abs().max()))
        assert float((one[name] - other[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_scores_equal_the_models_own_forward_on_unpadded_sequences(family: str, shared: bool) -> None:
    model, batch = make_model(family), make_batch(P=3, G=3)
    with torch.no_grad():
        expected, entropy = by_hand(model, batch, temperature=0.7)
        scores = TokenScorer(model, 0.7, shared_prefix=shared)(*inputs(batch))
    torch.testing.assert_close(scores.log_probs, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=2e-5, rtol=1e-5)


PACKED, REPEATED = 10_000, 0


@pytest.mark.parametrize("width", [PACKED, REPEATED], ids=["packed", "repeated"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("family", SHAREABLE)
def test_shared_prefix_equals_plain_with_gradients(
    family: str, samples: int, attention: str, width: int
) -> None:
    model, batch = make_model(family), make_batch(P=3, G=samples, seed=samples)
    model.set_attn_implementation(attention)
    shared, shared_gradients = scored(model, batch, shared_prefix=True, max_packed_width=width)
    plain, plain_gradients = scored(model, batch, shared_prefix=False)
    assert TokenScorer(model).shared_prefix
    torch.testing.assert_close(shared.log_probs, plain.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared.entropy, plain.entropy, atol=1e-5, rtol=1e-5)
    assert_same_gradients(shared_gradients, plain_gradients)
    assert max(float(g.abs().max()) for g in shared_gradients.values()) > 0.1, "nothing was compared"


@pytest.mark.parametrize("width", [PACKED, REPEATED], ids=["packed", "repeated"])
@pytest.mark.parametrize("samples", [1, 3])
def test_responses_of_one_token(samples: int, width: int) -> None:
    model, batch = make_model(), make_batch(P=3, G=samples, T=1)
    shared, shared_gradients = scored(model, batch, shared_prefix=True, max_packed_width=width)
    plain, plain_gradients = scored(model, batch, shared_prefix=False)
    expected, _ = by_hand(model, batch)
    torch.testing.assert_close(shared.log_probs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.log_probs, expected, atol=1e-5, rtol=1e-5)
    assert_same_gradients(shared_gradients, plain_gradients)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
def test_more_padding_changes_nothing(shared: bool) -> None:
    model, batch = make_model(), make_batch(P=3, G=2)
    narrow, narrow_gradients = [], []
    for one in (batch, widen(batch, 5, 4)):
        model.zero_grad()
        scores = TokenScorer(model, shared_prefix=shared)(*inputs(one))
        weight = torch.linspace(-1, 1, 6)
        (scores.log_probs[..., :6] * weight).sum().backward()
        narrow.append(scores)
        narrow_gradients.append(gradients(model))
    torch.testing.assert_close(narrow[1].log_probs[..., :6], narrow[0].log_probs, atol=1e-5, rtol=1e-5)
    assert not narrow[1].log_probs[..., 6:].any() and not narrow[1].entropy[..., 6:].any()
    assert_same_gradients(*narrow_gradients)


def test_padded_positions_are_zero_and_float32() -> None:
    batch = make_batch()
    scores = TokenScorer(make_model())(*inputs(batch))
    mask = batch["masks", "response"]
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    assert not scores.log_probs[~mask].any() and not scores.entropy[~mask].any()
    assert (scores.log_probs[mask] < 0).all()
    assert not scores.entropy.requires_grad


@pytest.mark.parametrize("chunk", [1, 3, 7, 10_000])
def test_chunks_equal_full_logits_with_gradients(chunk: int) -> None:
    model, batch = make_model("llama_tied"), make_batch(P=3, G=3)
    chunked, chunked_gradients = scored(model, batch, chunk_tokens=chunk)
    model.zero_grad()
    prompt, prompt_mask, response, mask = inputs(batch)
    # Full logits of every position, straight from the definition.
    ids = torch.cat([prompt.repeat_interleave(3, 0), response.flatten(0, 1)], 1)
    attention = torch.cat([prompt_mask.repeat_interleave(3, 0), mask.flatten(0, 1)], 1).long()
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False)
    log_p = torch.log_softmax(output.logits[:, prompt.shape[1] - 1 : -1], -1)
    full = log_p.gather(-1, response.flatten(0, 1)[..., None]).squeeze(-1).view_as(response) * mask
    (full * torch.linspace(-1, 1, full.numel()).view_as(full)).sum().backward()
    torch.testing.assert_close(chunked.log_probs, full, atol=1e-5, rtol=1e-5)
    assert_same_gradients(chunked_gradients, gradients(model))


def test_only_a_chunk_of_logits_exists_at_a_time() -> None:
    model, batch = make_model(), make_batch()
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda *call: sizes.append(call[2].shape[0]))
    scored(model, batch, chunk_tokens=5)
    assert max(sizes) == 5
    # Once forward and once again in the backward pass.
    assert sum(sizes) == 2 * int(batch["masks", "response"].sum())


def test_temperature_divides_the_logits() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    with torch.no_grad():
        cold, _ = by_hand(model, batch, 0.3)
        scores = TokenScorer(model, 0.3)(*inputs(batch))
        warm = TokenScorer(model, 1.0)(*inputs(batch))
    torch.testing.assert_close(scores.log_probs, cold, atol=5e-5, rtol=1e-5)
    assert float((scores.log_probs - warm.log_probs).abs().max()) > 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_next_token_log_probs(family: str) -> None:
    model, batch = make_model(family), make_batch()
    prompt, mask, _, _ = inputs(batch)
    with torch.no_grad():
        ours = TokenScorer(model, temperature=0.5).next_token_log_probs(prompt, mask)
        for row, ids in zip(ours, (p[m] for p, m in zip(prompt, mask, strict=True)), strict=True):
            expected = torch.log_softmax(model(input_ids=ids[None]).logits[0, -1] / 0.5, -1)
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "mistral_sliding"])
def test_sliding_windows_fall_back_with_one_warning(family: str) -> None:
    model = make_model(family)
    with pytest.warns(UserWarning, match=r"once per response .* sliding_attention") as caught:
        scorer = TokenScorer(model)
    assert len(caught) == 1
    assert not scorer.shared_prefix
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer(*inputs(make_batch()))


def test_gradient_checkpointing_falls_back_with_one_warning() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    expected, expected_gradients = scored(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with pytest.warns(UserWarning, match="gradient checkpointing") as caught:
        scores, found = scored(model, batch)
    assert len(caught) == 1
    torch.testing.assert_close(scores.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    assert_same_gradients(found, expected_gradients)


def test_the_plain_path_is_taken_in_silence_where_it_is_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not TokenScorer(make_model("gemma2"), shared_prefix=False).shared_prefix


def test_the_shared_path_runs_each_prompt_once() -> None:
    model, batch = make_model(), make_batch(P=3, G=4, L=7, T=6)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
    TokenScorer(model, max_packed_width=REPEATED)(*inputs(batch))
    assert seen == [3 * 7, 3 * 4 * 5]
    seen.clear()
    TokenScorer(model, max_packed_width=PACKED)(*inputs(batch))
    # Real tokens only, but for the padding to the longest row of the batch.
    tokens = batch["masks", "response"].sum((1, 2)) - 4
    assert seen == [3 * (7 + int(tokens.max()))]
    assert TokenScorer(model).max_packed_width == model.config.hidden_size


@pytest.mark.parametrize("family", FAMILIES)
def test_check_head_knows_these_families(family: str) -> None:
    assert check_head(make_model(family)) < 1e-4


def test_check_head_sees_a_forward_that_does_more() -> None:
    # Granite divides its logits by a constant after the head, Cohere multiplies them.
    settings = {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"}
    from transformers import GraniteConfig, GraniteForCausalLM

    model = GraniteForCausalLM(GraniteConfig(**settings, logits_scaling=8.0)).eval()
    assert check_head(model) > 0.05


def test_autocast_computes_in_bfloat16_and_returns_float32() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    exact = TokenScorer(model)(*inputs(batch)).log_probs
    rough = TokenScorer(model, autocast_dtype=torch.bfloat16)(*inputs(batch)).log_probs
    difference = float((exact - rough).detach().abs().max())
    assert rough.dtype == torch.float32
    assert 1e-4 < difference < 0.5
