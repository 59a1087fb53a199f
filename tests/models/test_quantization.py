"""Adapters over a base in 4 bits; needs bitsandbytes, which runs on a CPU too."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from adapters import move
from batches import END, PAD, inputs, make_batch, make_model, no_budget
from faulty_engines import prompts
from omegaconf import OmegaConf
from publishers import Direct
from tiny_runs import Runner, config, train  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.schema import LoraConfig, ModelConfig, TrainModelConfig
from torchrl_grpo.config.values import Autocast, Dtype, Quantization
from torchrl_grpo.errors import ConfigError, TrainingStopped
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models import loading, lora, saving
from torchrl_grpo.models.flops import FlopCounter
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.weight_sync.publisher import WeightPublisher

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def test_quantization_is_for_frozen_models_and_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.train_model.quantization = Quantization("nf4")
    with pytest.raises(ConfigError, match=r"quantization=nf4: .*write train_model\.lora\.rank=16"):
        checks.validate(cfg)
    cfg.train_model.lora.rank = 8
    checks.validate(cfg)
    cfg.inference_model.backend = "transformers"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"quantization=nf4: bitsandbytes is not installed"):
        checks.check_installed(cfg)
    with pytest.raises(ConfigError, match="one of none, nf4"):
        parse(OmegaConf.create({"train_model": {"quantization": "int4"}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("bitsandbytes")
    make_model("llama_tied", **SHAPE).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def quantized(folder: Path, moved: float = 0.1, **settings: object) -> PreTrainedModel:
    model = loading.load_model(str(folder), ModelConfig(), CPU, torch.float32, "nf4")
    lora.add_adapters(model, LoraConfig(rank=4, alpha=12.0, **settings), seed=0)  # type: ignore[arg-type]
    prepare_for_training(model, TrainModelConfig())
    move(model, moved)
    return model


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """A model of plain matrices with the weights that ``model`` publishes."""
    other = make_model("llama_tied", **SHAPE)
    own = dict(other.named_parameters())
    with torch.no_grad():
        for name, tensor in lora.merged_weights(model):
            own.pop(name).copy_(tensor)
    assert not own
    return other


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"]])
def test_published_weights_compute_what_the_quantized_model_computes(
    folder: Path, targets: list[str]
) -> None:
    model, batch = quantized(folder, target_modules=targets), make_batch(P=2, G=2, kl=False)
    packed = sum(p.numel() for p in model.parameters() if not p.is_floating_point())
    assert packed == sum(2 * 64 * n for n in (64, 32, 32, 64, 3 * 128)) // 2, "half a byte a weight"
    assert shares_prefix(model)
    scores = TokenScorer(model)(*inputs(batch)).log_probs
    scores.sum().backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if lora.is_adapter(name))
    with torch.no_grad():
        expected = TokenScorer(plain(model))(*inputs(batch)).log_probs
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        base = TokenScorer(plain(quantized(folder, moved=0)))(*inputs(batch)).log_probs
    off = LogProbScorer(TokenScorer(model), "reference", no_budget(), lambda: lora.disable_adapters(model))
    torch.testing.assert_close(off.inv(batch)["log_probs", "reference"], base, atol=1e-4, rtol=1e-4)
    small, whole = make_model("llama_tied", **SHAPE), FlopCounter(model)([5], [[4]], backward=False)
    assert 1 < whole / FlopCounter(small)([5], [[4]], backward=False) < 1.3


@pytest.mark.slow
def test_weight_verification_covers_a_quantized_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publisher() -> WeightPublisher:
        model = quantized(folder, moved=0)
        engine = TransformersEngine(make_model("llama_tied", **SHAPE), [END], PAD)
        return WeightPublisher(
            model,
            TokenScorer(model),
            engine=engine,
            probe_prompts=prompts(),
            pad_token_id=PAD,
            precision=torch.float32,
            engine_dtype=torch.float32,
            transport=Direct(engine),
        )

    sound = publisher()
    before = {name: p.detach().clone() for name, p in sound.model.named_parameters()}
    assert sound.verify_at_start(0)["publish/logprob_diff_max"] < 1e-3
    assert all(torch.equal(p, before[name]) for name, p in sound.model.named_parameters())
    move(sound.model, 0.01)
    assert sound.publish(1)["publish/logprob_diff_max"] < 1e-3
    # The base as it was before it was quantized is not what the trainer computes with.
    full = dict(make_model("llama_tied", **SHAPE).named_parameters())
    left_out = "model.layers.1.mlp.up_proj"
    honest = lora.merged_weight
    sabotaged = publisher()
    layer = lora.adapted_layers(sabotaged.model)[left_out]  # type: ignore[arg-type]
    monkeypatch.setattr(
        lora,
        "merged_weight",
        lambda module: (
            full[f"{left_out}.weight"].detach() + module.get_delta_weight("default")
            if module is layer
            else honest(module)
        ),
    )
    with pytest.raises(TrainingStopped, match="not equal to the base matrix plus its adapter"):
        sabotaged.verify_at_start(0)


def test_a_quantized_base_is_exported_unpacked(folder: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    model, ids = quantized(folder), torch.arange(3, 20)[None]
    tokenizer = loading.load_tokenizer(str(tiny_model_dir), ModelConfig())
    (tmp_path / "merged").mkdir()
    saving.save_merged(model, tokenizer, tmp_path / "merged")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(
            merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4
        )
    (tmp_path / "adapters").mkdir()
    saving.save(model, tokenizer, tmp_path / "adapters")
    again = quantized(folder, moved=0.2)
    lora.load_adapters(again, tmp_path / "adapters")
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.slow
def test_a_run_over_four_bits_moves_and_resumes(train: Runner, config: Config, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config.train_model.lora.rank, config.train_model.quantization = 4, Quantization("nf4")
    config.train_model.autocast, config.inference_model.dtype = Autocast("no"), Dtype("float32")
    whole = train("whole", optimizer__lr=3e-2, policy__kl_coef=0.1, train__total_dialog_turns=48)
    assert whole[1]["kl/reference"] == pytest.approx(0.0, abs=1e-6) and whole[-1]["kl/reference"] > 1e-4
    train("broken", train__checkpoint_frequency=1, checkpoint__keep=5)
    assert train("broken", resume=str(tmp_path / "broken/checkpoints/2")) == whole
