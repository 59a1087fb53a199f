"""Predicted memory: shapes read without torch, what autograd keeps, whole runs measured, too little of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_calls import ROOT
from forked import Finished, run_script
from omegaconf import DictConfig, OmegaConf

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks import whole as checks
from torchrl_grpo.config.derived import steps_per_round
from torchrl_grpo.config.schema import LoraConfig, ModelConfig
from torchrl_grpo.config.values import (
    AnswerFormat,
    Autocast,
    Dtype,
    PrefixAttention,
    Quantization,
)
from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.models import smollm2
from torchrl_grpo.models.kind import check_kind
from torchrl_grpo.models.shape import (
    _PLAIN,
    _SMOLLM2,
    ModelShape,
    TowerShape,
    Unknown,
    count_parameters,
    model_folder,
    read_shape,
    shape_of,
)
from torchrl_grpo.planning import memory, placement, preflight, token_budget
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.prediction import GIB, Prediction, Row
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.planning.workload import Workload, workload_of
from torchrl_grpo.runtime import hardware
from torchrl_grpo.runtime.hardware import Hardware

SEVEN_B = ModelShape(7_615_616_512, 152_064, 3584, 28, 18_944, 3584, 512)


def overridden(cfg: Config, words: str) -> Config:
    """A configuration with overrides, read as from a command line."""
    node = OmegaConf.merge(OmegaConf.structured(cfg), OmegaConf.from_dotlist(words.split()))
    assert isinstance(node, DictConfig)
    return parse(node)


def config(**changes: object) -> Config:
    cfg = Config()
    cfg.inference_model.backend, cfg.inference_model.dtype = "transformers", Dtype("float32")
    cfg.train_model.autocast, cfg.ref_model.dtype = Autocast("no"), Dtype("float32")
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        setattr(getattr(cfg, group), leaf, value)
    return cfg


def predicted(
    cfg: Config, gpus: tuple[float, ...] = (), apart: bool = False, shape: ModelShape = SEVEN_B
) -> Prediction:
    plan = placement.plan(build_request(cfg, apart), len(gpus))
    return memory.predict(cfg, plan, shape, Hardware(gpus))


def row(prediction: Prediction, role: str, phase: str) -> Row:
    (match,) = [entry for entry in prediction.rows if (entry.role, entry.phase) == (role, phase)]
    return match


# Shapes


def test_shape_of_a_folder(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = read_shape(ModelConfig(name=str(tiny_model_dir)))
    assert isinstance(shape, ModelShape)
    assert (shape.hidden, shape.layers, shape.mlp, shape.queries, shape.keys) == (32, 2, 64, 128, 64)
    assert shape.parameters == AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()


def test_shape_of_smollm2_is_known_before_it_is_converted(smollm2_dir: Path, tmp_path: Path) -> None:
    assert read_shape(ModelConfig(cache_dir=str(tmp_path))) == _SMOLLM2
    assert read_shape(ModelConfig(cache_dir=str(smollm2_dir.parent))) == _SMOLLM2
    assert smollm2_dir.name == smollm2.NAME


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}
QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN |= {"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}


def test_shapes_of_configurations() -> None:
    gpt2 = shape_of(GPT2, 5)
    assert gpt2 == ModelShape(5, 50257, 768, 12, 3072, 768, 768, gated=False)
    estimated = shape_of({"text_config": QWEN, "vision_config": {}}, None)
    assert estimated is not None and estimated.parameters == pytest.approx(494e6, rel=0.01)
    assert shape_of({"model_type": "mamba", "d_model": 8}, None) is None


@pytest.mark.parametrize(
    ("more", "full"),
    [
        ({}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 24}, True),
        ({"sliding_window": 4096}, False),
        ({"layer_types": ["full_attention", "linear_attention"] * 12}, False),
        ({"kv_lora_rank": 512}, False),
        # Jamba, Bamba, Nemotron-H, Zamba, Qwen3-Next: attention in some of the layers.
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, False),
        ({"attn_layer_indices": [9, 18, 27]}, False),
        ({"hybrid_override_pattern": "M-M-M*-M-"}, False),
        ({"layers_block_type": ["mamba", "hybrid"] * 12}, False),
        ({"full_attention_interval": 4}, False),
    ],
)
def test_layers_that_keep_all_keys_and_values(more: dict[str, Any], full: bool) -> None:
    shape = shape_of(QWEN | more, 5)
    assert shape is not None and shape.full_cache is full


FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024}
FALCON |= {"num_attention_heads": 71, "num_kv_heads": 71}
BIGCODE = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "vocab_size": 49152}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        # As published: Falcon-7B, which names a number that is not read, and Falcon-40B with both decoders.
        (FALCON | {"multi_query": True, "new_decoder_architecture": False}, 64),
        (FALCON, 64),
        (FALCON | {"multi_query": False}, 4544),
        (FALCON | {"num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 8 * 64),
        (QWEN | {"model_type": "RefinedWeb", "num_key_value_heads": None, "n_head_kv": 8}, 8 * 64),
        # StarCoder.
        (BIGCODE | {"multi_query": True}, 128),
        (BIGCODE, 128),
        (BIGCODE | {"multi_query": False}, 6144),
    ],
)
def test_heads_of_keys(settings: dict[str, Any], keys: int) -> None:
    shape = shape_of(settings, None)
    assert shape is not None and shape.keys == keys
    if keys == 64:
        # As published of Falcon-7B.
        assert shape.parameters == pytest.approx(6.92e9, rel=0.01)


@pytest.mark.parametrize("family", _PLAIN)
def test_families_with_a_gate(family: str) -> None:
    folder = family.removesuffix("_text")
    file = f"transformers/models/{folder}/modeling_{folder}.py"
    code = Path(str(importlib.metadata.distribution("transformers").locate_file(file))).read_text()
    shape = shape_of(QWEN | {"model_type": family}, 5)
    assert shape is not None and shape.gated is bool(re.search("gate_proj|gate_up_proj", code))


def test_weights_that_a_folder_holds_twice_are_counted_once(tmp_path: Path) -> None:
    def write(name: str, elements: int) -> None:
        header = json.dumps({name: {"dtype": "F32", "shape": [elements], "data_offsets": [0, 0]}}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)

    assert count_parameters(tmp_path) is None
    write("consolidated.safetensors", 1000)
    assert count_parameters(tmp_path) == 1000
    for part in (1, 2):
        write(f"model-0000{part}-of-00002.safetensors", 500)
    assert count_parameters(tmp_path) == 1000
    # An index says which files it is; others have been left there.
    write("model-00001-of-00001.safetensors", 7)
    names = {f"layers.{layer}": f"model-0000{layer % 2 + 1}-of-00002.safetensors" for layer in range(4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert count_parameters(tmp_path) == 1000
    # Half of a model says nothing of the whole.
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert count_parameters(tmp_path) is None
    # Transformers takes this one first.
    write("model.safetensors", 1000)
    assert count_parameters(tmp_path) == 1000


def cached(root: Path, name: str, settings: dict[str, Any]) -> Path:
    """A model of the hub of which the cache has its config.json; the file."""
    commit = "0" * 40
    folder = root / f"models--{name.replace('/', '--')}"
    for part in ("refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    file = folder / "snapshots" / commit / "config.json"
    file.write_text(json.dumps(settings))
    return file


def hub(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """A hub whose every model has this configuration; what is fetched of it."""
    import huggingface_hub

    fetched = []

    def download(name: str, file: str, cache_dir: str) -> str:
        fetched.append((name, file))
        return str(cached(Path(cache_dir), name, settings))

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fetched


def test_a_model_of_images_on_the_hub_gets_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = {"model_type": "qwen2_vl", "vision_config": {}, "text_config": QWEN}
    fetched = hub(monkeypatch, images | {"architectures": ["Qwen2VLForConditionalGeneration"]})
    cfg = config(model__name="some/images", model__cache_dir=str(tmp_path))
    for prepare in (preflight.report, preflight.announce):
        with pytest.raises(ModelError, match=r"model\.name=some/images: Qwen2VL\w+ reads more than text"):
            prepare(cfg, False)
    assert fetched == [("some/images", "config.json")] and capsys.readouterr().out == ""


def test_of_a_model_on_the_hub_the_configuration_alone_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = hub(monkeypatch, QWEN)
    for _ in range(2):
        shape = read_shape(ModelConfig(name="some/model", cache_dir=str(tmp_path)))
        assert isinstance(shape, ModelShape) and shape.parameters == pytest.approx(494e6, rel=0.01)
    # The second time it is in the cache.
    assert fetched == [("some/model", "config.json")]


def test_a_model_whose_sizes_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def no_network(url: str, timeout: float) -> None:
        raise ConnectionError("Name or service not known\nand more of it")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    cfg = config(model__name="some/model", model__cache_dir=str(tmp_path / "cache"))
    planned = preflight.make(cfg, False, Hardware((), 1.0))
    why = "the hub gave no config.json of model.name=some/model (Name or service not known)"
    assert planned.peaks() == [f"memory: not predicted: {why}"]
    preflight.check_memory(planned)
    for name, reason in (
        (str(tmp_path / "nowhere"), "no folder"),
        (str(tmp_path), "does not name its sizes"),
    ):
        (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
        shape = read_shape(ModelConfig(name=name))
        assert isinstance(shape, Unknown) and reason in shape.why


@pytest.mark.slow
def test_offline_nothing_is_asked_of_the_hub(tmp_path: Path) -> None:
    code = (
        "import sys; from torchrl_grpo.config.schema import ModelConfig\n"
        "from torchrl_grpo.models.shape import read_shape\n"
        f"print(read_shape(ModelConfig(name='some/model', cache_dir={str(tmp_path)!r})).why); "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True, text=True)
    assert "some/model" in result.stdout and "offline mode is enabled" in result.stdout


def test_weights_of_layers_and_of_no_layer() -> None:
    matrix = SEVEN_B.vocabulary * SEVEN_B.hidden
    assert SEVEN_B.outer == 2 * matrix
    assert SEVEN_B.layers * SEVEN_B.layer == pytest.approx(
        SEVEN_B.parameters - 2 * matrix, abs=SEVEN_B.layers
    )
    assert _SMOLLM2.outer == _SMOLLM2.vocabulary * _SMOLLM2.hidden
    moe = {**QWEN, "num_experts": 8, "moe_intermediate_size": 1000}
    shape = shape_of(moe, None)
    assert shape is not None
    attention = 2 * 896 * (14 * 64 + 2 * 64)
    assert shape.parameters == 24 * (attention + 8 * 3 * 896 * 1000) + 151936 * 896


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_model_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / file).write_bytes(b"{")
    with pytest.raises(ModelError, match=r"model\.name=.*damaged"):
        read_shape(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", '"text"', "null"])
def test_a_configuration_of_another_form_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    check_kind(ModelConfig(name=str(tmp_path)))
    with pytest.raises(ModelError, match=r"files in .* are damaged"):
        read_shape(ModelConfig(name=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ModelError, match="the folder holds adapters for an unknown model and no model"):
        model_folder(ModelConfig(name=str(tmp_path)))


# Work


def test_the_largest_pieces_of_work() -> None:
    cfg = config(env__num_envs=4, env__repeats=8, inference_model__max_model_len=300)
    cfg.inference_model.max_new_tokens, cfg.eval.num_problems = 100, 10
    assert workload_of(cfg) == Workload(
        200, 100, 4000, 4 * (8 * 300 + 200), 4 * 8 * 100 * 300, False, rows=32, prompts=800
    )
    assert workload_of(cfg, ranks=4).tokens == 1000
    # Whole groups, and whole problems, are divided among engines.
    assert [workload_of(cfg, engines=engines).rows for engines in (2, 3, 4, 8)] == [16, 16, 8, 8]
    cfg.train.max_tokens_per_microbatch = 1000
    assert workload_of(cfg) == Workload(
        200, 100, 1000, 8 * 300 + 200, 8 * 100 * 300, True, rows=32, prompts=200
    )
    cfg.train.max_tokens_per_microbatch, cfg.train.gradient_accumulation_steps = None, 8
    assert workload_of(cfg) == Workload(
        200, 100, 600, 4 * 300 + 200, 4 * 100 * 300, True, rows=32, prompts=200
    )
    cfg.train_model.shared_prefix, cfg.eval.num_problems = False, 100
    assert workload_of(cfg) == Workload(200, 100, 1200, 4 * 300, 0.0, True, rows=100, prompts=800)


# What autograd keeps


LENGTHS = pytest.mark.parametrize(
    ("queries", "keys", "prompt", "response"),
    [(8, 8, 64, 32), (8, 2, 64, 32), (4, 1, 16, 64), (8, 2, 200, 20)],
)
PROMPTS, SAMPLES = 2, 4


def kept_by_a_layer(queries: int, keys: int, prompt: int, response: int, size: int, varlen: bool) -> int:
    """Bytes that autograd keeps of one more layer, without weights; with ``varlen`` under autocast."""
    import flash_kernel
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchrl_grpo.models.scoring.token_scorer import TokenScorer

    totals = []
    for layers in (1, 2):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=96,
                intermediate_size=256,
                num_hidden_layers=layers,
                num_attention_heads=queries,
                num_key_value_heads=keys,
                head_dim=size,
            )
        ).eval()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        # Autocast's copies of weights, which are counted apart.
        matrices = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1]) if p.dim() == 2}
        kept: dict[int, int] = {}
        alive = []

        def pack(
            tensor: torch.Tensor,
            own: set[int] = own,
            kept: dict[int, int] = kept,
            matrices: set[torch.Size] = matrices,
        ) -> torch.Tensor:
            storage = tensor.untyped_storage()
            copied = tensor.dtype == torch.bfloat16 and tensor.shape in matrices
            if storage.data_ptr() not in own and not copied:
                kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # noqa: B023 - so that no address is used twice
            return tensor

        ids = torch.randint(3, 64, (PROMPTS, prompt))
        answers = torch.randint(3, 64, (PROMPTS, SAMPLES, response))
        masks = torch.ones_like(ids).bool(), torch.ones_like(answers).bool()
        scorer = TokenScorer(model, autocast_dtype=torch.bfloat16 if varlen else None)
        scorer.varlen = varlen
        with (
            flash_kernel.on_the_cpu(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            scorer(ids, masks[0], answers, masks[1])
        totals.append(sum(kept.values()))
    return totals[1] - totals[0]


def load_of(prompt: int, response: int) -> Workload:
    tokens = PROMPTS * (prompt + SAMPLES * response)
    attended = PROMPTS * (SAMPLES * (prompt + response) + prompt)
    return Workload(prompt, response, tokens, attended, 0.0, False, 8)


@LENGTHS
def test_bytes_that_autograd_keeps(queries: int, keys: int, prompt: int, response: int) -> None:
    shape = ModelShape(0, 64, 96, 1, 256, queries * 32, keys * 32)
    load = load_of(prompt, response)
    by_layer = memory.kept_by_layer(shape, load, False, "cpu")
    kept = kept_by_a_layer(queries, keys, prompt, response, 32, varlen=False)
    assert by_layer == pytest.approx(kept, rel=0.08)
    # Kernels for GPUs get the keys and values of each query head.
    more = memory.kept_by_layer(shape, load, False, "cuda") - by_layer
    assert more == 4 * load.attended * 2 * (queries - keys) * 32


@LENGTHS
def test_bytes_that_autograd_keeps_with_attention_for_variable_lengths(
    queries: int, keys: int, prompt: int, response: int
) -> None:
    shape = ModelShape(0, 64, 96, 1, 256, queries * 64, keys * 64)
    by_layer = memory.kept_by_layer(shape, load_of(prompt, response), True, "cuda", varlen=True)
    kept = kept_by_a_layer(queries, keys, prompt, response, 64, varlen=True)
    assert by_layer == pytest.approx(kept, rel=0.04)


def test_masks_of_long_responses_take_memory_and_variable_lengths_none() -> None:
    cfg = config(env__num_envs=1, env__repeats=8, inference_model__max_model_len=16_896)
    cfg.inference_model.max_new_tokens = 16_384
    load = workload_of(cfg)
    # One response a micro-batch.
    assert load.pairs == pytest.approx(16_384 * 16_896, rel=0.05)
    gpu = Hardware((80.0,), capabilities=((9, 0),))
    cfg.train_model.autocast = Autocast.bf16
    devices, masks = ["cuda:0"], memory.mask_bytes(load, True, "cuda")
    assert masks == 2 * load.pairs and memory.mask_bytes(load, False, "cpu") == 0
    assert memory.uses_varlen(cfg, devices, gpu) and not memory.uses_varlen(cfg, ["cpu"], gpu)
    peaks = {}
    for attention in ("varlen", "dense"):
        cfg.train_model.prefix_attention = PrefixAttention(attention)
        plan = placement.plan(build_request(cfg, False), 1)
        peaks[attention] = row(memory.predict(cfg, plan, SEVEN_B, gpu), "train", "optimize").activations
    assert peaks["dense"] - peaks["varlen"] > masks
    cfg.train_model.prefix_attention = PrefixAttention.auto
    assert not memory.uses_varlen(cfg, devices, Hardware((80.0,), capabilities=((7, 5),)))
    cfg.train_model.autocast = Autocast.no
    assert not memory.uses_varlen(cfg, devices, gpu)


@pytest.mark.parametrize(
    ("size", "attention", "compiled"),
    [
        ("135m", "varlen", False),
        ("135m", "dense", False),
        ("0.5b", "varlen", False),
        ("0.5b", "dense", False),
        ("0.5b", "varlen", True),
    ],
)
def test_a_step_takes_what_an_h100_reserved(size: str, attention: str, compiled: bool) -> None:
    recorded = json.loads((ROOT / "benchmarks/gpu/h100.json").read_text())["training"]
    (step,) = [
        entry
        for entry in recorded
        if (entry["shape"], entry["attention"], entry["compiled"]) == (size, attention, compiled)
    ]
    shape = {"135m": _SMOLLM2, "0.5b": ModelShape(494_032_768, 151_936, 896, 24, 4864, 896, 128)}[size]
    cfg = config(env__num_envs=8, env__repeats=8, inference_model__max_model_len=712)
    cfg.inference_model.max_new_tokens, cfg.train_model.autocast = 512, Autocast.bf16
    cfg.train.max_tokens_per_microbatch = step["micro_batch_tokens"]
    cfg.train_model.compile = compiled
    cfg.train_model.prefix_attention = PrefixAttention("auto" if attention == "varlen" else attention)
    plan = placement.plan(build_request(cfg, False), 1)
    gpu = Hardware((79.18,), capabilities=((9, 0),))
    total = row(memory.predict(cfg, plan, shape, gpu), "train", "optimize").total / GIB
    assert step["reserved_gib"] == pytest.approx(total, rel=0.04)


# Roles and phases


def test_an_engine_that_sleeps_needs_weights_before_each_round() -> None:
    machine = Hardware((80.0,), 64.0)
    # On a GPU with room for both it stays awake.
    assert not preflight.make(config(inference_model__backend="vllm"), False, machine).plan.sleeps
    machine = Hardware((8.0,), 64.0)
    settings = {"inference_model__backend": "vllm", "train__optim_batch_size": Config().env.repeats}
    steps = steps_per_round(config(**settings))
    assert steps > 1
    for frequency in (1, steps):
        assert preflight.make(
            config(train__weight_update_frequency=frequency, **settings), False, machine
        ).plan.sleeps
    cfg = config(train__weight_update_frequency=2 * steps, **settings)
    with pytest.raises(ConfigError, match=rf"weight_update_frequency={steps} or inference_model.sleep=false"):
        preflight.make(cfg, False, machine)
    cfg.inference_model.sleep = False
    assert not preflight.make(cfg, False, machine).plan.sleeps


def test_rows_on_a_gpu_with_an_engine_that_sleeps() -> None:
    cfg = config(
        inference_model__backend="vllm", train_model__autocast="bf16", inference_model__dtype="bfloat16"
    )
    whole = predicted(cfg, (80.0,))
    weights = 4 * SEVEN_B.parameters
    train = row(whole, "train", "optimize")
    assert (train.weights, train.optimizer) == (weights, 2 * weights)
    assert weights <= train.gradients <= weights * 1.1
    engine = row(whole, "inference", "generate")
    assert engine.total == pytest.approx(0.4 * 80 * GIB) and engine.weights == weights / 2
    assert row(whole, "inference", "optimize").total < GIB
    awake = predicted(config(inference_model__sleep=False, inference_model__backend="vllm"), (80.0,))
    assert row(awake, "inference", "optimize").total == pytest.approx(0.4 * 80 * GIB)
    assert whole.peak("cuda:0")[1] == "optimize"


def test_adapters_have_small_gradients_and_no_reference() -> None:
    cfg = config(policy__kl_coef=0.1)
    whole = predicted(cfg)
    cfg.train_model.lora.rank = 16
    adapters = predicted(cfg)
    assert row(whole, "reference", "prepare").weights == 4 * SEVEN_B.parameters
    assert not [entry for entry in adapters.rows if entry.role == "reference"]
    small = row(adapters, "train", "optimize")
    assert small.gradients + small.optimizer < 0.1 * row(whole, "train", "optimize").gradients


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"], ["down_proj"]])
def test_adapters_are_counted_as_peft_makes_them(targets: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from torchrl_grpo.models.lora import add_adapters, is_adapter

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    add_adapters(model, LoraConfig(rank=5, target_modules=targets), seed=0)
    shape = shape_of(model.config.to_dict(), None)
    assert shape is not None
    made = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
    assert shape.adapters(5, targets) == made


def test_adapters_of_layers_with_other_names_are_not_underrated() -> None:
    every = SEVEN_B.adapters(4, ["all-linear"])
    assert SEVEN_B.adapters(4, ["qkv_proj", "q_proj"]) == every > SEVEN_B.adapters(4, ["q_proj"])
    tower = replace(SEVEN_B, tower=TowerShape(1000, hidden=8, layers=2, mlp=12, patches=4))
    # Per layer four matrices of 8 by 8, and two of 8 by 12.
    assert tower.adapters(4, ["all-linear"], tower=True) == every + 4 * 2 * (4 * 16 + 2 * 20)


def test_an_engine_that_starts_beside_the_trainer_needs_two_copies_of_the_largest_matrix() -> None:
    matrix = SEVEN_B.vocabulary * SEVEN_B.hidden
    assert SEVEN_B.largest == matrix
    # vLLM fuses both projections of a feed-forward layer, and holds the experts of a layer together.
    assert replace(SEVEN_B, vocabulary=32_000).largest == 2 * SEVEN_B.mlp * SEVEN_B.hidden
    experts = replace(SEVEN_B, parameters=4 * SEVEN_B.parameters)
    assert experts.largest == experts.layer > matrix
    asleep, awake = (
        predicted(config(inference_model__sleep=sleeps, inference_model__backend="vllm"), (80.0,))
        for sleeps in (True, False)
    )
    for prediction, cache in ((asleep, 0.0), (awake, row(awake, "inference", "generate").cache)):
        start = row(prediction, "inference", "start")
        assert (start.activations, start.cache) == (2 * start.weights / SEVEN_B.parameters * matrix, cache)
        assert row(prediction, "train", "start").total == row(prediction, "train", "generate").total
    assert not [entry for entry in predicted(config(), ()).rows if entry.phase == "start"]


def test_a_reference_is_loaded_in_float32_beside_what_the_trainer_holds() -> None:
    usual = {"policy__kl_coef": 0.1, "train_model__autocast": "bf16", "ref_model__dtype": Dtype.auto}
    alone = predicted(config(**usual), (80.0,))
    whole = 4.0 * SEVEN_B.parameters
    assert alone.need("cuda:0", "load") == pytest.approx(2 * whole + row(alone, "program", "all").total)
    assert row(alone, "reference", "generate").weights < 0.7 * whole
    # Ranks with shards have held the whole model before.
    sharded = config(**usual, train_model__num_devices=4, train_model__parallelism="fsdp2")
    shards = predicted(sharded, (80.0,) * 4)
    assert shards.need("cuda:0", "load") == pytest.approx(
        1.25 * whole + row(shards, "program", "all").total
    ), "a quarter of the trainer's, and the whole reference"


def test_a_frozen_base_is_held_as_configured() -> None:
    cfg = config()
    cfg.train_model.lora.rank = 16
    sizes = {}
    for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("auto", "nf4")):
        cfg.train_model.lora.base_dtype, cfg.train_model.quantization = (
            Dtype(dtype),
            Quantization(quantization),
        )
        sizes[dtype] = row(predicted(cfg), "train", "optimize").weights
    adapters = 4 * SEVEN_B.adapters(16, ["all-linear"])
    assert sizes["float32"] == 4 * SEVEN_B.parameters + adapters
    assert sizes["bfloat16"] == 2 * SEVEN_B.parameters + adapters
    # Embedding and output head are not packed.
    packed = (sizes["auto"] - adapters - 4 * SEVEN_B.outer) / (SEVEN_B.parameters - SEVEN_B.outer)
    assert 0.5 < packed < 0.6


def test_copies_of_weights_that_a_pass_computes_with() -> None:
    whole = SEVEN_B.parameters

    def copies(**changes: object) -> float:
        """What autocast adds, as far as it does not shrink with the activations' format."""
        activations = []
        for base in ("float32", "bfloat16"):
            cfg = config(train_model__autocast="bf16", **changes)
            cfg.train_model.lora.rank, cfg.train_model.lora.base_dtype = 16, Dtype(base)
            activations.append(row(predicted(cfg), "train", "optimize").activations)
        return activations[0] - activations[1]

    # A base of 16 bits is computed with as it is; of one in float32 the backward pass keeps what was cast.
    assert copies() == 2 * whole
    assert copies(train_model__gradient_checkpointing=True) == 2 * SEVEN_B.layer
    shards = config(
        train_model__num_devices=4,
        train_model__parallelism="fsdp2",
        train_model__autocast="bf16",
        train_model__fused_head=True,
    )
    ranks = config(train_model__num_devices=4, train_model__autocast="bf16")
    kept = [row(predicted(cfg, (80.0,) * 8), "train", "optimize").activations for cfg in (ranks, shards)]
    # What is gathered for the whole pass comes in float32, and the fused head keeps a copy of its matrix.
    gathered = 4 * SEVEN_B.outer + 2 * SEVEN_B.vocabulary * SEVEN_B.hidden + 2 * 2 * SEVEN_B.layer
    assert kept[0] - kept[1] == 2 * whole - gathered
    # Layers with more than linear layers come in float32, and autocast keeps a copy of each.
    other = predicted(shards, (80.0,) * 8, shape=replace(SEVEN_B, plain=False))
    more = row(other, "train", "optimize").activations - kept[1]
    assert more == 2 * (whole - SEVEN_B.outer) + 2 * 2 * SEVEN_B.layer


@pytest.mark.parametrize(
    ("backend", "gpus", "copies"), [("vllm", (), 1), ("transformers", (), 1), ("vllm", (80.0,), 0)]
)
def test_a_head_in_float32_of_an_engine_in_16_bits_is_copied(
    backend: str, gpus: tuple[float, ...], copies: int
) -> None:
    def need(**more: str) -> float:
        # Few rows: the copy must not hide behind the cache that the transformers engine grows.
        options: dict[str, Any] = {"inference_model__backend": backend, "inference_model__dtype": "bfloat16"}
        options |= {"env__num_envs": 1, "env__repeats": 2, "eval__num_problems": 1}
        return row(predicted(config(**options | more), gpus), "inference", "generate").total

    auto, float32 = need(), need(inference_model__head_dtype="float32")
    whole = 4 * SEVEN_B.vocabulary * SEVEN_B.hidden
    assert 0.9 * copies * whole <= float32 - auto <= copies * whole
    full = need(inference_model__dtype="float32")
    assert need(inference_model__dtype="float32", inference_model__head_dtype="float32") == full


def test_the_reference_is_held_as_the_policy_computes() -> None:
    cfg = config(policy__kl_coef=0.1, ref_model__dtype="auto")
    matrices = SEVEN_B.parameters - SEVEN_B.outer
    for autocast, mix, element in (("no", 1.0, 4), ("bf16", 1.0, 2), ("bf16", 0.5, 4)):
        cfg.train_model.autocast, cfg.ref_model.refresh_mix = Autocast(autocast), mix
        weights = row(predicted(cfg), "reference", "prepare").weights
        assert weights == 4 * SEVEN_B.outer + element * matrices


def test_a_gpu_without_bfloat16_computes_in_float32() -> None:
    cfg = config(train_model__autocast="auto", inference_model__dtype="auto")
    plan = placement.plan(build_request(cfg, False), 1)
    element = {}
    for capability in ((7, 5), (8, 0)):
        prediction = memory.predict(cfg, plan, SEVEN_B, Hardware((80.0,), 64.0, (capability,)))
        element[capability] = row(prediction, "inference", "generate").weights / SEVEN_B.parameters
    assert element == {(7, 5): 4, (8, 0): 2}


def test_shards_divide_what_is_trained() -> None:
    whole = row(predicted(config(train_model__num_devices=4), (80.0,) * 8), "train", "optimize")
    cfg = config(train_model__num_devices=4, train_model__parallelism="fsdp2")
    shards = row(predicted(cfg, (80.0,) * 8), "train", "optimize")
    assert shards.weights == whole.weights / 4 and shards.optimizer == whole.optimizer / 4


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed_zero3"])
def test_a_rank_loads_all_of_what_it_divides(kind: str) -> None:
    cfg = config(train_model__num_devices=7, train_model__parallelism=kind)
    cfg.train_model.gradient_checkpointing, cfg.train.max_tokens_per_microbatch = True, 1024
    prediction = predicted(cfg, (24.0,) * 8)
    # CUDA's own is there beside it; the engine starts later.
    assert prediction.need("cuda:0", "load") == 4 * SEVEN_B.parameters + 0.7 * GIB
    assert prediction.need("cuda:7", "load") == 0.7 * GIB
    alone = config(train_model__parallelism=kind)
    for undivided in (config(train_model__num_devices=7), alone):
        # Who holds all of it for good takes more later.
        assert not [entry for entry in predicted(undivided, (24.0,) * 8).rows if entry.phase == "load"]


def test_deepspeed_divides_what_it_says_and_updates_a_copy() -> None:
    whole = row(predicted(config(train_model__num_devices=4), (80.0,) * 8), "train", "optimize")
    for kind, weights in (("deepspeed_zero2", 1 + 1 / 4), ("deepspeed_zero3", 2 / 4)):
        cfg = config(train_model__num_devices=4, train_model__parallelism=kind)
        part = row(predicted(cfg, (80.0,) * 8), "train", "optimize")
        assert part.weights == whole.weights * weights and part.optimizer == whole.optimizer / 4


def test_checkpointing_and_smaller_micro_batches_take_less() -> None:
    plain = row(predicted(config()), "train", "optimize").activations
    again = row(predicted(config(train_model__gradient_checkpointing=True)), "train", "optimize").activations
    half = row(predicted(config(train__max_tokens_per_microbatch=2048)), "train", "optimize").activations
    assert again < plain / 2 and half == pytest.approx(plain / 2, rel=0.1)


def test_processes_of_a_cpu_share_its_memory() -> None:
    single = predicted(config(), apart=True)
    three = predicted(config(inference_model__num_devices=3), apart=True)
    worker = row(single, "inference", "generate").total + row(single, "program", "all").total
    assert three.peak("cpu")[0] - single.peak("cpu")[0] == pytest.approx(2 * worker)
    # Workers generate while the trainer trains; in one process the two take turns.
    assert single.peak("cpu")[0] > predicted(config()).peak("cpu")[0]


def test_servers_have_more_processes_and_one_copy_of_the_weights_on_the_way() -> None:
    options = {"inference_model__backend": "vllm_server"}
    workers = predicted(config(inference_model__backend="vllm"), apart=True)
    prediction = predicted(config(**options))
    two = predicted(config(inference_model__num_devices=2, **options))
    weights = row(prediction, "inference", "generate").weights
    server = prediction.peak("cpu")[0] - workers.peak("cpu")[0]
    assert server == pytest.approx(1.5 * GIB)
    # A server that runs ahead may start again while the trainer's weights have moved on.
    copied = predicted(config(**options), apart=True).peak("cpu")[0] - prediction.peak("cpu")[0]
    assert copied == pytest.approx(weights)
    each = row(prediction, "inference", "generate").total + row(prediction, "program", "all").total + server
    assert two.peak("cpu")[0] - prediction.peak("cpu")[0] == pytest.approx(each)
    there = config(inference_model__servers=["unix:/a"], **options)
    assert not [entry for entry in predicted(there).rows if entry.role == "inference"]


def test_workers_of_a_cluster_are_not_counted_here() -> None:
    cfg = config(inference_model__num_devices=4, ray__address="auto")
    assert not [entry for entry in predicted(cfg, apart=True).rows if entry.role == "inference"]


@pytest.mark.parametrize(
    ("name", "fast", "expected"),
    [("float32", True, False), ("bfloat16", False, True), ("auto", False, False), ("auto", True, True)],
)
def test_formats_of_16_bits(name: str, fast: bool, expected: bool) -> None:
    assert memory.bits16(name, {"bfloat16"}, fast) is expected


@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        ("AuthenticAMD", "avx2", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16 avx512_fp16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_tile", True),
    ],
)
def test_processors_that_compute_fast_in_bfloat16(
    vendor: str, flags: str, fast: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    assert hardware.cpu_has_fast_bfloat16(tmp_path / "cpuinfo") is fast
    assert not hardware.cpu_has_fast_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "lacks"),
    [
        ("sse4_2 avx2", True),
        ("avx2 avx512f avx512bw", False),
        ("avx2 avx_ne_convert", False),
        ("asimd", False),
    ],
)
def test_a_run_in_16_bits_says_that_the_processor_is_slow_in_them(
    flags: str,
    lacks: bool,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    assert hardware.cpu_lacks_16_bits(tmp_path / "cpuinfo") is lacks
    monkeypatch.setattr(hardware, "cpu_lacks_16_bits", lambda: lacks)
    cfg = config(train_model__autocast="bf16", inference_model__dtype="bfloat16")
    cfg.model.name = str(tiny_model_dir)
    advice = "train_model.autocast=auto inference_model.dtype=auto takes float32"
    for prepare in (preflight.report, preflight.announce):
        prepare(cfg, False)
        assert (advice in capsys.readouterr().out) == lacks
    preflight.announce(config(model__name=str(tiny_model_dir)), False)
    assert "speed:" not in capsys.readouterr().out


def test_a_processor_is_named_by_its_model_or_by_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: AMD EPYC\n")
    assert hardware.processor(tmp_path / "cpuinfo") == "AMD EPYC"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert hardware.processor(tmp_path / "cpuinfo") == hardware.processor(tmp_path / "none") != ""


# Too little of it


SHORT: list[tuple[dict[str, Any], Hardware, bool]] = [
    ({}, Hardware((), 7.0), False),
    ({}, Hardware((), 5.5), False),
    ({"inference_model__num_devices": 2}, Hardware((), 14.0), True),
    ({"inference_model__backend": "vllm", "inference_model__kv_cache_gib": 8}, Hardware((), 12.0), False),
    ({"inference_model__backend": "vllm", "inference_model__sleep": False}, Hardware((8.0,), 64.0), False),
    ({"inference_model__backend": "vllm"}, Hardware((8.0,), 64.0), True),
    ({"policy__kl_coef": 0.1}, Hardware((7.0, 7.0), 64.0), False),
    ({"inference_model__backend": "vllm", "train_model__num_devices": 2}, Hardware((8.0, 8.0), 64.0), False),
    ({"train_model__num_devices": 2}, Hardware((6.5, 6.5), 64.0), False),
]


@pytest.mark.parametrize(("changes", "there", "apart"), SHORT)
def test_too_little_memory_names_what_would_fit(
    changes: dict[str, Any], there: Hardware, apart: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    cfg = config(model__cache_dir=str(tmp_path), **changes)
    with pytest.raises(ConfigError) as caught:
        preflight.check_memory(preflight.make(cfg, apart, there))
    message = str(caught.value)
    assert re.search(
        r"GiB are needed on (cpu|cuda:\d) while \w+, most of it for \w+ \(\w+: .* GiB are there;", message
    )
    fixes = message.partition("; write ")[2].split(" or ")
    assert 1 <= len(fixes) <= 3
    for fix in fixes:
        preflight.check_memory(preflight.make(overridden(cfg, fix), apart, there))


def a_7b(engine: str = "vllm", **changes: Any) -> tuple[Config, Any]:
    """A configuration for 7B, all of it trained in float32 by one GPU, and its plan for GPUs of some size."""
    cfg = config(inference_model__backend=engine, inference_model__dtype="bfloat16", **changes)

    def planned(*gpus: float, apart: bool = False) -> Planned:
        plan = placement.plan(build_request(cfg, apart), len(gpus))
        there = Hardware(gpus, 900.0)
        needs = memory.predict(cfg, plan, SEVEN_B, there)
        budget = token_budget.choose(cfg, plan, SEVEN_B, there)
        return Planned(cfg, plan, apart, there, SEVEN_B, needs, budget)

    return cfg, planned


def test_what_depends_on_no_text_must_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    # Weights and moments in float32, 85 GiB, beside vLLM's share.
    for share, fits in ((0.35, True), (0.45, False)):
        _, planned = a_7b(
            inference_model__gpu_memory_utilization=share, train_model__gradient_checkpointing=True
        )
        plan = planned(140.0)
        need = plan.prediction.need("cuda:0", "generate")
        assert need == pytest.approx(GIB * (share * 140 + 3 * 4 * SEVEN_B.parameters / GIB + 0.7), rel=1e-3)
        # Both are within what predictions of the longest texts may be off by.
        assert need < 1.2 * 140 * GIB
        monkeypatch.setattr(preflight, "_advice", lambda *_: ["less"])
        if fits:
            preflight.check_memory(plan)
        else:
            with pytest.raises(ConfigError, match="GiB are needed on cuda:0 while"):
                preflight.check_memory(plan)


def test_vllm_takes_most_of_a_gpu_that_it_has_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    cases: list[tuple[dict[str, Any], float]] = [({}, 0.85)]
    cases.append(({"inference_model__gpu_memory_utilization": 0.5}, 0.5))
    for changes, share in cases:
        _, planned = a_7b(**changes)
        plan = planned(400.0, 80.0, apart=True)
        preflight.check_memory(plan)
        assert plan.prediction.need("cuda:1", "generate") == pytest.approx(GIB * (share * 80 + 0.7), rel=1e-3)


def test_a_share_that_holds_no_more_than_the_weights_is_refused() -> None:
    _, planned = a_7b(inference_model__gpu_memory_utilization=0.15)
    with pytest.raises(ConfigError) as caught:
        preflight.check_memory(planned(400.0, 80.0, apart=True))
    message = str(caught.value)
    assert "inference_model.gpu_memory_utilization=0.15: 12.00 GiB of 80.00 leave too little room" in message
    # With the largest batch of vLLM on such a GPU, which is tried when it starts.
    assert "14.19 GiB; write inference_model.gpu_memory_utilization=0.25" in message
    _, planned = a_7b(inference_model__gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match=r"=0\.9: .*write a smaller model as model.name "):
        preflight.check_memory(planned(400.0, 12.0, apart=True))
    # Of unequal ones the one that is too small.
    _, planned = a_7b(inference_model__gpu_memory_utilization=0.5, inference_model__num_devices=2)
    with pytest.raises(
        ConfigError, match=r"=0\.5: 12\.00 GiB of 24\.00 .*write inference_model.gpu_memory_utilization=0\.7$"
    ):
        preflight.check_memory(planned(400.0, 80.0, 24.0, apart=True))
    preflight.check_memory(planned(400.0, 80.0, 80.0, apart=True))
    _, planned = a_7b("transformers", inference_model__gpu_memory_utilization=0.15)
    preflight.check_memory(planned(400.0, 80.0, apart=True))


@pytest.mark.parametrize(("share", "starts"), [(0.18, False), (0.19, False), (0.2, True)])
def test_a_share_that_holds_little_more_than_the_weights_is_refused(share: float, starts: bool) -> None:
    # Weights of 14.19 GiB; vLLM needs a tenth more at least, 15.60 GiB.
    _, planned = a_7b(inference_model__gpu_memory_utilization=share)
    if starts:
        preflight.check_memory(planned(400.0, 80.0, apart=True))
        return
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.25"):
        preflight.check_memory(planned(400.0, 80.0, apart=True))


LONG = {"inference_model__max_model_len": 16_384, "inference_model__max_new_tokens": 2000}


@pytest.mark.parametrize(("dtype", "least"), [("float32", 2), ("bfloat16", 1)])
def test_a_cache_too_small_for_a_sequence_is_refused(
    dtype: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SEVEN_B)
    # 28 layers with keys and values of 512: 1.75 GiB in float32, and a block that vLLM keeps.
    cfg = config(inference_model__backend="vllm", **LONG)
    cfg.inference_model.dtype = Dtype(dtype)
    there = Hardware((), 900.0)
    assert preflight.make(cfg, False, there).least_cache_gib == least
    preflight.check_memory(
        preflight.make(overridden(cfg, f"inference_model.kv_cache_gib={least}"), False, there)
    )
    if least == 1:
        return
    with pytest.raises(ConfigError) as caught:
        preflight.check_memory(preflight.make(cfg, False, there))
    assert str(caught.value).startswith(
        "inference_model.kv_cache_gib=1: keys and values of one sequence of "
        "inference_model.max_model_len=16384 tokens need 2 GiB, and vLLM does not start with less; "
        "write inference_model.kv_cache_gib=2 or "
    )
    for words in ("backend=transformers", "engine_args.kv_cache_dtype=fp8"):
        preflight.check_memory(preflight.make(overridden(cfg, f"inference_model.{words}"), False, there))
    # Windows and packed keys take less, how much is not known.
    monkeypatch.setattr(preflight, "read_shape", lambda model: replace(SEVEN_B, full_cache=False))
    preflight.check_memory(preflight.make(cfg, False, there))


def test_a_block_that_vllm_keeps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exactly 1 GiB for the longest sequence.
    shape = replace(SEVEN_B, layers=32, keys=256)
    monkeypatch.setattr(preflight, "read_shape", lambda model: shape)
    cfg = config(inference_model__backend="vllm", **LONG)
    assert preflight.make(cfg, False, Hardware((), 900.0)).least_cache_gib == 2
    cfg.inference_model.max_model_len -= 32
    assert preflight.make(cfg, False, Hardware((), 900.0)).least_cache_gib == 1


def test_a_smaller_cache_is_advised_only_as_far_as_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SEVEN_B)
    cfg = config(inference_model__backend="vllm", inference_model__kv_cache_gib=8, **LONG)
    cfg.train_model.lora, cfg.train_model.gradient_checkpointing = LoraConfig(rank=16), True
    cfg.env.num_envs = cfg.env.repeats = cfg.eval.num_problems = 2
    cfg.ref_model.dtype = Dtype("auto")
    needs = preflight.make(cfg, False, Hardware((), 900.0)).prediction
    assert needs is not None
    for less, advised in ((5.5, True), (6.5, False)):
        preflight.report(cfg, False, Hardware((), needs.peak("cpu")[0] / GIB - less))
        output = capsys.readouterr().out
        assert ("; inference_model.kv_cache_gib=2 " in output) is advised
        assert "kv_cache_gib=1" not in output


@pytest.mark.parametrize(("gib", "some"), [(24.0, False), (44.0, True), (48.0, True)])
def test_no_share_is_recommended_that_would_be_refused(
    gib: float, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "cuda_device_present", lambda: True)
    monkeypatch.setattr(preflight, "read_shape", lambda model: SEVEN_B)
    cfg, planned = a_7b(train_model__lora=LoraConfig(rank=8), inference_model__gpu_memory_utilization=0.9)
    cfg.inference_model.sleep, cfg.ref_model.dtype = False, Dtype("auto")
    with pytest.raises(ConfigError) as caught:
        preflight.check_memory(planned(gib))
    shares = re.findall(r"gpu_memory_utilization=([\d.]+)", str(caught.value))
    assert bool(shares) is some
    assert all(float(share) * gib > 14.19 for share in shares)


def test_a_model_that_never_fits(tmp_path: Path) -> None:
    cfg = config(model__cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.name=smollm2-135m: .*write a smaller model as "):
        preflight.check_memory(preflight.make(cfg, False, Hardware((), 1.0)))
    preflight.check_memory(preflight.make(cfg, False, Hardware((), None)))  # nobody knows


# The command


def dry_run(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "sota-implementations" / "grpo" / script
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-X", "importtime", str(path), "dry_run=true", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_dry_run_prints_and_does_nothing(script: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    words = [
        "inference_model.backend=transformers",
        "train_model.num_devices=2",
        f"model.name={tiny_model_dir}",
    ]
    result = dry_run(script, tmp_path, *words)
    assert result.returncode == 0, result.stderr[-500:]
    assert re.search(r"^train +c\w+", result.stdout) is None and "role " in result.stdout
    assert re.search(r"^train +optimize", result.stdout, re.MULTILINE) and "\nmemory: c" in result.stdout
    imported = {
        line.rsplit("|", 1)[1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line
    }
    assert "torchrl_grpo" in imported
    assert not imported & {"torch", "vllm", "transformers", "torchrl", "tensordict", "numpy", "datasets"}
    assert list(tmp_path.iterdir()) == []


def dry_run_of_sweep(folder: Path, *words: str) -> Finished:
    return run_script([ROOT / "sota-implementations/grpo/grpo.py", "--multirun", *words], cwd=folder)


@pytest.mark.slow
def test_dry_run_of_a_sweep_shows_every_job(tmp_path: Path, tiny_model_dir: Path) -> None:
    words = [f"model.name={tiny_model_dir}", "policy.kl_coef=0,0.1", "inference_model.backend=transformers"]
    result = dry_run_of_sweep(tmp_path, "dry_run=true", *words)
    assert result.returncode == 0
    assert "job 0\n" in result.stdout and "job 1\n" in result.stdout and "reference  prepare" in result.stdout


@pytest.mark.slow
def test_a_sweep_that_cannot_run_is_refused_by_its_dry_run_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    words = [
        f"model.name={tiny_model_dir}",
        "train_model.num_devices=1,2",
        "inference_model.backend=transformers",
    ]
    errors = []
    for dry in ("true", "false"):
        result = dry_run_of_sweep(tmp_path, *words, f"dry_run={dry}")
        assert result.returncode == 2
        errors.append(next(line for line in result.stderr.splitlines() if line.startswith("error: ")))
    assert errors[0] == errors[1] and "train_model.num_devices=[1,2]: all jobs of a sweep" in errors[0]
    assert list(tmp_path.iterdir()) == []


# Measured

QUESTIONS = [
    f"Tell a long story about {a} birds and {b} fishes, and what each of them did every day of the week."
    for a in range(6)
    for b in range(6)
]


def build_wide_model(folder: Path, tiny: Path) -> Path:
    """A random model of few wide layers and a small, untied vocabulary, unlike SmolLM2 in each of these."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=8000, **sizes, **heads, **ends))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_predicted_memory_is_that_of_a_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    """For SmolLM2, tests/runs/test_integration.py compares the two."""
    model = build_wide_model(tmp_path / "model", tiny_model_dir)
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in QUESTIONS)
    )
    # Two rounds: the moments of the optimizer are there from the second step on.
    cfg = config(env__num_envs=2, env__repeats=4, env__prompt_template="{question}")
    cfg.model.name, cfg.env.data_path, cfg.env.answer_format = (
        str(model),
        "questions.jsonl",
        AnswerFormat("plain"),
    )
    cfg.inference_model.max_model_len, cfg.inference_model.max_new_tokens = 128, 48
    cfg.train.total_dialog_turns, cfg.train.checkpoint_frequency = 16, 0
    cfg.eval.num_problems, cfg.logging.progress = 0, False
    # No answer is right; this gives every response a gradient.
    cfg.policy.entropy_coef = 1e-3
    code = (
        "import json, sys; from pathlib import Path; from omegaconf import OmegaConf\n"
        "from torchrl_grpo.config import parse; from torchrl_grpo.training.job import run\n"
        "run(parse(OmegaConf.load(sys.argv[1])), Path(sys.argv[2]))"
    )
    OmegaConf.save(OmegaConf.structured(cfg), tmp_path / "run.yaml")
    command = [sys.executable, "-c", code, "run.yaml", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=550)
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["peak_memory_gib"]
    prediction = preflight.make(cfg, False, Hardware()).prediction
    assert prediction is not None
    assert prediction.peak("cpu")[0] / GIB == pytest.approx(measured, rel=0.2)
