"""The reference model: equal weights have no divergence, in whatever format the policy computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import build_tiny_model
from tiny_runs import Runner, config, train  # noqa: F401 - fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models import precision
from torchrl_grpo.models.reference import frozen_source, hold_as_computed, load_reference
from torchrl_grpo.models.scoring.token_scorer import TokenScorer


@pytest.mark.slow
@pytest.mark.parametrize(("autocast", "fast"), [("no", True), ("bf16", True), ("bf16", False)])
def test_the_first_step_has_no_divergence(
    autocast: str,
    fast: bool,
    train: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever auto would choose by the machine.
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast)
    settings = {"policy__kl_coef": 0.1, "train_model__autocast": autocast, "train__total_dialog_turns": 16}
    alike, rounded = (
        train(dtype, ref_model__dtype=dtype, **settings)[1]["kl/reference"] for dtype in ("auto", "bfloat16")
    )
    # The reference scores other batches than the trainer, and products of other shapes may round otherwise.
    # That is far less than where a reference holds and computes everything in bfloat16.
    assert abs(alike) < rounded / 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_held_in_16_bits_give_the_same_numbers(dtype: torch.dtype, tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=96, tie_word_embeddings=tied, attention_bias=True, **sizes)
    )
    model.requires_grad_(False).eval()
    ids, answers = torch.randint(3, 96, (2, 9)), torch.randint(3, 96, (2, 3, 5))
    batch = (ids, torch.ones_like(ids).bool(), answers, torch.ones_like(answers).bool())
    scored = [TokenScorer(model, 0.7, dtype)(*batch).log_probs]
    hold_as_computed(model, dtype)
    held = {parameter.dtype for parameter in model.parameters()}
    assert held == {dtype, torch.float32}
    assert model.get_output_embeddings().weight.dtype == torch.float32
    scored.append(TokenScorer(model, 0.7, dtype)(*batch).log_probs)
    assert torch.equal(*scored)


@pytest.mark.parametrize(
    ("dtype", "mix", "formats"),
    [
        ("auto", 1.0, {torch.bfloat16, torch.float32}),
        # Most steps of a slow average would round to nothing.
        ("auto", 0.5, {torch.float32}),
        ("float32", 1.0, {torch.float32}),
        ("bfloat16", 1.0, {torch.bfloat16}),
    ],
)
def test_formats_of_the_reference(dtype: str, mix: float, formats: set[torch.dtype], tmp_path: Path) -> None:
    cfg = Config()
    cfg.model.name = str(build_tiny_model(tmp_path / "model"))
    cfg.ref_model.dtype, cfg.ref_model.refresh_mix = Dtype(dtype), mix
    scorer = load_reference(cfg, cfg.model.name, torch.device("cpu"), torch.bfloat16, True)
    assert {parameter.dtype for parameter in scorer.model.parameters()} == formats


@pytest.mark.parametrize("difference", [-5, 0, 5])
def test_a_teacher_has_a_row_for_each_token_of_the_policy(difference: int, tmp_path: Path) -> None:
    policy, teacher = build_tiny_model(tmp_path / "policy"), build_tiny_model(tmp_path / "teacher")
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    rows = len(tokenizer) + difference
    model.resize_token_embeddings(rows)
    model.save_pretrained(teacher)
    cfg = Config()
    cfg.model.name, cfg.teacher_model.name = str(policy), str(teacher)
    cfg.policy.distill_coef, cfg.inference_model.max_model_len = 1.0, 64
    if difference >= 0:
        assert frozen_source(cfg, str(policy), tokenizer) == str(teacher)
        return
    message = rf"teacher_model\.name=.*: its vocabulary matrix has {rows} rows, none for .* number {rows} of"
    with pytest.raises(ModelError, match=message):
        frozen_source(cfg, str(policy), tokenizer)
    # Tokens that the policy itself has no row for are never read.
    assert frozen_source(cfg, str(teacher), tokenizer) == str(teacher)
