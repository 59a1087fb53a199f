"""Low-rank adapters on a frozen model (LoRA, arXiv 2106.09685), implemented with PEFT.

An adapted matrix ``W`` acts as ``W + s B A`` with ``s = alpha / r``. Only ``A`` ``[r, in]`` and ``B``
``[out, r]`` are trained, in float32. ``B`` starts at zero, so the initial policy is the base model. Linear
layers are replaced in place, and the model keeps its class and its backbone. Adapters on embeddings and the
output head, several adapters at a time, and dropout are not supported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torchrl_grpo.config.checks.lora import ALL_LINEAR
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.schema import LoraConfig
from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.models.quantization import dequantized_weight, is_quantized
from torchrl_grpo.models.shards import local_shard

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# PEFT's default name of an adapter, and the prefix of all names in its files.
_ADAPTER = "default"
_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, cfg: LoraConfig, seed: int, only_text: bool = False) -> None:
    """Freeze ``model`` and add adapters to its linear layers, in place.

    Args:
        model: model in any number format.
        cfg: rank, scale and target layers.
        seed: seed of ``A``. The caller's random state is not changed.
        only_text: whether what encodes pictures gets no adapters.

    Raises:
        ConfigError: ``cfg.target_modules`` names a layer that the model does not have.
    """
    layers = _linear_layers(model)
    others: list[str] = []
    if only_text:
        of_text = set(model.get_decoder().modules())
        others = [name for name, layer in layers.items() if layer not in of_text]
        layers = {name: layer for name, layer in layers.items() if layer in of_text}
    chosen = cfg.target_modules
    for target in chosen if chosen != [ALL_LINEAR] else []:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            wrong = f"{type(model).__name__} has no linear layer {target} (except its output head)"
            fix = f"some of {', '.join(kinds)}, or [{ALL_LINEAR}]"
            raise bad_value("train_model.lora.target_modules", chosen, wrong, fix)
    import peft

    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        target_modules=ALL_LINEAR if chosen == [ALL_LINEAR] else list(chosen),
        exclude_modules=others or None,
        # GPT-2 stores its matrices as [in, out].
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path or None,
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # PEFT draws on the CPU
        peft.inject_adapter_in_model(config, model, _ADAPTER)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return name -> layer for the layers with an adapter. It is empty for a model without adapters."""
    # A model with adapters implies that PEFT is imported. Otherwise avoid its import, which takes a second.
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f".{_ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the merged model under the names of the base model.

    ``W + s B A`` is computed in float32, lazily and one matrix at a time. Other parameters are yielded as
    they are, or unpacked if they are quantized. Tied parameters are yielded once. ``model`` is not changed.
    """
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        owner, _, leaf = name.rpartition(".")
        outer = owner.removesuffix(".base_layer")
        if outer != owner and leaf == "weight":
            yield f"{outer}.weight", merged_weight(layers[outer])
        elif is_quantized(parameter):
            yield name, dequantized_weight(model.get_submodule(owner))
        else:
            yield f"{outer}.{leaf}" if outer else name, parameter.detach()


def merged_weight(layer: LoraLayer) -> Tensor:
    """Return ``W + s B A`` of one layer as a new float32 tensor in the layout of ``W``."""
    delta: Tensor = layer.get_delta_weight(_ADAPTER)
    return delta.add_(dequantized_weight(layer.get_base_layer()))


@torch.no_grad()
def merge_error(layer: LoraLayer, matrix: Tensor) -> float:
    """Return the relative error of the merged ``matrix``, measured on the output for a random input.

    The expected output is computed without the product of ``A`` and ``B``: ``W v + s B (A v)``.
    """
    weight = dequantized_weight(layer.get_base_layer()).float()
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    generator = torch.Generator(weight.device).manual_seed(0)
    v = torch.randn(down.shape[1], generator=generator, device=weight.device)
    if layer.fan_in_fan_out:
        weight, matrix = weight.T, matrix.T
    expected = weight @ v + layer.scaling[_ADAPTER] * (up @ (down @ v))
    return float((matrix.float() @ v - expected).norm() / expected.norm().clamp(min=1e-30))


@torch.no_grad()
def weight_change_bounds(model: nn.Module, delta: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield upper bounds of the change of published weights after a small change of trained weights.

    Args:
        model: model with or without adapters.
        delta: absolute change of each trained weight.

    Yields:
        A parameter, or a matrix ``W`` with an adapter, and a bound of its change that broadcasts to its
        shape. The bound is ``delta`` without adapters, and ``s delta sum_r |A_ri|`` with adapters, because
        ``B`` starts at zero.
    """
    layers = adapted_layers(model)
    if not layers:
        for parameter in map(local_shard, model.parameters()):
            yield parameter, torch.tensor(delta, device=parameter.device)
    for layer in layers.values():
        bound = layer.scaling[_ADAPTER] * delta * layer.lora_A[_ADAPTER].weight.abs().sum(0)
        yield dequantized_weight(layer.get_base_layer()), bound[:, None] if layer.fan_in_fan_out else bound


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of ``model`` inside the context, so that it computes as its base model."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def perturbed_adapters(model: nn.Module, share: float, unchanged: Collection[int] = ()) -> Iterator[None]:
    """Perturb every adapter inside the context. A model without adapters is not changed.

    A new adapter has no effect, so a test could not see whether it is published. ``B`` is copied and restored
    bit for bit.

    Args:
        model: model that is changed in place.
        share: norm of the perturbation of each matrix, relative to the norm of the matrix.
        unchanged: ids of parameters that stay as they are.
    """
    layers = enumerate(adapted_layers(model).values())
    weights = [(seed, layer, layer.lora_B[_ADAPTER].weight) for seed, layer in layers]
    kept = [(seed, layer, weight) for seed, layer, weight in weights if id(weight) not in unchanged]
    copies = [weight.detach().clone() for *_, weight in kept]
    try:
        with torch.no_grad():
            for seed, layer, weight in kept:
                before = weight.clone()
                # A matrix is perturbed alike, whichever others are.
                generator = torch.Generator().manual_seed(seed)
                weight.copy_(torch.randn(weight.shape, generator=generator))
                base = dequantized_weight(layer.get_base_layer()).float()
                size = share * base.norm() / layer.get_delta_weight(_ADAPTER).norm()
                weight.mul_(size).add_(before)
        yield
    finally:
        with torch.no_grad():
            for (*_, weight), copied in zip(kept, copies, strict=True):
                weight.copy_(copied)


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters to ``folder`` in the format of ``PeftModel.from_pretrained(base, folder)``."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    tensors = {f"{_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Load adapters that :func:`save_adapters` wrote into the adapters of ``model``.

    Raises:
        CheckpointError: the file's adapters do not match those of the model.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, set_peft_model_state_dict

    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    own = {name for name, _ in model.named_parameters() if is_adapter(name)}
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    result = set_peft_model_state_dict(model, state, adapter_name=_ADAPTER)
    if result.unexpected_keys or len(state) != len(own):
        raise CheckpointError(
            f"{folder}: it has {len(state)} adapter matrices, but this model has {len(own)}; resume with "
            "the model.name and train_model.lora.target_modules of the original run"
        )
