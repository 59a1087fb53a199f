"""AdamW in 8 bits and Muon: which weights, Muon in float64, the size of the state, and resumption."""

from __future__ import annotations

import copy
import importlib.util
import io
from typing import Any

import pytest
import torch
from batches import make_batch, make_model, make_objective, no_budget
from omegaconf import OmegaConf
from rounding import EXACT
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.checks.whole import check_installed
from torchrl_grpo.config.schema import LoraConfig, OptimizerConfig
from torchrl_grpo.config.values import MOMENT_BYTES, OptimizerName
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.lora import add_adapters, is_adapter
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.shape import ModelShape, shape_of
from torchrl_grpo.planning import memory, placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.runtime.hardware import Hardware
from torchrl_grpo.training.optimizer_step import OptimizerStep
from torchrl_grpo.training.optimizers import build_optimizer, muon_matrices

NAMES = list(OptimizerName)
# Entries of the state that have a size of the parameter.
HELD = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2", "absmax1", "absmax2")
# Their state has entries of more kinds than a model of one size has.
FAMILY, WIDE = "llama_tied", {"hidden_size": 64, "intermediate_size": 128}


def make_step(name: str, *, rank: int = 0, fp16: bool = False, **changes: Any) -> OptimizerStep:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = make_model(FAMILY, **WIDE)
    if rank:
        add_adapters(model, LoraConfig(rank=rank), seed=0)
    loss, _ = make_objective(TokenScorer(model))
    cfg = OptimizerConfig(**{"name": OptimizerName(name), "lr": 1e-2, "weight_decay": 0.1, **changes})
    return OptimizerStep(
        model, loss, cfg, total_steps=9, groups_per_batch=4, num_pieces=1, budget=no_budget(),
        use_scaler=fp16, max_skipped_steps=1,
    )  # fmt: skip


def chosen(model: PreTrainedModel) -> set[str]:
    ids = {id(parameter) for parameter in muon_matrices(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "gpt2", "gemma3"])
def test_muon_updates_the_matrices_of_layers_only(family: str) -> None:
    model = make_model(family)
    matrices = {
        name for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and (".layers." in name or ".h." in name)
    }  # fmt: skip
    assert chosen(model) == matrices and len(matrices) >= 8


def test_muon_leaves_stacks_of_experts_and_biases_to_adamw() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **sizes, **heads, **experts))
    layer = "model.layers.0."
    attention = {f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"}
    assert chosen(model) == {*attention, f"{layer}mlp.router.weight"}


def test_muon_updates_every_matrix_of_adapters() -> None:
    model = make_model()
    add_adapters(model, LoraConfig(rank=4), seed=0)
    assert chosen(model) == {name for name, _ in model.named_parameters() if is_adapter(name)}


@pytest.mark.parametrize("name", NAMES)
def test_the_groups_have_every_trained_parameter_once_and_decay_matrices_only(name: str) -> None:
    step = make_step(name)
    groups = step.optimizer.param_groups
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(map(id, step.parameters))
    for group in groups:
        assert group["weight_decay"] == (0.1 if all(p.ndim == 2 for p in group["params"]) else 0.0)


def muon_by_hand(weight: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Muon in float64, from the singular values: the iteration maps each by a polynomial, five times.

    Jordan et al. 2024 have the iteration and Nesterov's momentum, and arXiv 2502.16982 the factor.
    """
    weight, momentum = weight.double().clone(), torch.zeros_like(weight).double()
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        left, values, right = torch.linalg.svd(
            0.95 * momentum + 0.05 * gradient.double(), full_matrices=False
        )
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        update = left @ torch.diag(values) @ right
        weight = (1 - rate * decay) * weight - rate * 0.2 * max(weight.shape) ** 0.5 * update
    return weight


@pytest.mark.usefixtures("float64")
def test_muon_in_a_run_is_muon_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # The iteration computes in bfloat16, whatever the format of the weights. Not here.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    step = make_step("muon", schedule="linear", max_grad_norm=1e9)
    matrices = step.optimizer.param_groups[0]["params"]
    before = {index: matrix.detach().clone() for index, matrix in enumerate(matrices)}
    gradients: dict[int, list[Tensor]] = {index: [] for index in before}
    rates = []

    def keep(*_: object) -> None:
        for index, matrix in enumerate(matrices):
            gradients[index].append(matrix.grad.clone())

    step.optimizer.register_step_pre_hook(keep)
    for seed in range(3):
        rates.append(step(make_batch(seed=seed))["optimizer/lr"])
    assert rates[0] > rates[1] > rates[2] > 0
    for index, matrix in enumerate(matrices):
        exact = muon_by_hand(before[index], gradients[index], rates, 0.1)
        torch.testing.assert_close(matrix.detach(), exact, **EXACT)


@pytest.mark.usefixtures("float64")
def test_what_muon_leaves_is_updated_as_adamw_does() -> None:
    # One step, because the next has another gradient.
    steps = {name: make_step(name) for name in ("adamw", "muon")}
    for step in steps.values():
        step(make_batch())
    weights = {name: dict(step.loss.named_parameters()) for name, step in steps.items()}
    ids = {id(p) for p in steps["muon"].optimizer.param_groups[0]["params"]}
    rest = [name for name, parameter in weights["muon"].items() if id(parameter) not in ids]
    assert len(rest) == 6
    for name in rest:
        # Two passes over the same batch differ in the last bit on some processors.
        torch.testing.assert_close(weights["muon"][name], weights["adamw"][name], **EXACT)


@pytest.mark.parametrize("fp16", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("rank", [0, 64], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, rank: int, fp16: bool) -> None:
    step = make_step(name, rank=rank, fp16=fp16)
    for seed in range(2):
        step(make_batch(seed=seed))
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    weights = copy.deepcopy([parameter.detach() for parameter in step.parameters])
    resumed = make_step(name, rank=rank, fp16=fp16)
    with torch.no_grad():
        for parameter, weight in zip(resumed.parameters, weights, strict=True):
            parameter.copy_(weight)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(2, 4):
        metrics = [train_step(make_batch(seed=seed)) for train_step in (step, resumed)]
        assert metrics[0] == metrics[1]
    for ours, theirs, weight in zip(resumed.parameters, step.parameters, weights, strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, weight)


def test_a_skipped_step_leaves_the_state_of_muon() -> None:
    step = make_step("muon")
    step(make_batch())
    before = copy.deepcopy(step.state_dict()["optimizer"]["state"])
    broken = make_batch()
    broken["advantage"][0, 0] = float("nan")
    assert step(broken)["optimizer/skipped"] == 1
    after = step.state_dict()["optimizer"]["state"]
    assert all(torch.equal(v, after[i][name]) for i, entry in before.items() for name, v in entry.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_large_matrix_has_the_size_that_is_planned(name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    linear = torch.nn.Linear(512, 512, bias=False)
    optimizer = build_optimizer(linear, OptimizerConfig(name=OptimizerName(name)))
    linear.weight.grad = torch.ones_like(linear.weight)
    optimizer.step()
    tensors = [tensor for key, tensor in optimizer.state[linear.weight].items() if key in HELD]
    held = sum(tensor.nbytes for tensor in tensors) / linear.weight.numel()
    assert held == pytest.approx(MOMENT_BYTES[name], rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_planner_counts_the_state_of_a_whole_model(name: str, tied: bool) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 2000}
    model = make_model(FAMILY, **sizes, tie_word_embeddings=tied)
    shape = shape_of(model.config.to_dict(), model.num_parameters())
    cfg = Config()
    cfg.optimizer.name = OptimizerName(name)
    plan = placement.plan(build_request(cfg, False), 0)
    assert isinstance(shape, ModelShape)
    rows = memory.predict(cfg, plan, shape, Hardware()).rows
    (planned,) = [row.optimizer for row in rows if (row.role, row.phase) == ("train", "optimize")]
    optimizer = build_optimizer(model, cfg.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for name, value in entry.items() if name in HELD]
    assert planned == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.1)


def test_an_optimizer_that_is_unknown_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name=lion: .*one of adamw, adamw_8bit, muon"):
        parse(OmegaConf.create({"optimizer": {"name": "lion"}}))
    cfg = Config()
    cfg.inference_model.backend = "transformers"
    cfg.optimizer.name = OptimizerName("adamw_8bit")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"optimizer\.name=adamw_8bit: bitsandbytes is not installed; "):
        check_installed(cfg)
