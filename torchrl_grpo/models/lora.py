"""Low-rank adapters on a frozen model (LoRA, arXiv 2106.09685), put there and saved with PEFT.

An adapted matrix ``W`` acts as ``W + s B A``. ``A`` ``[r, in]`` and ``B`` ``[out, r]``, in float32, are all
that is trained; ``s`` is ``alpha / r``. ``B`` begins at zero, so the policy begins as the base model. The
model keeps its class and its backbone: linear layers are replaced in place. Left out: adapters on embeddings
and the output head, several adapters at a time, and dropout, which this project trains without.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torchrl_grpo.config.checks_lora import ALL_LINEAR
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.schema import LoraConfig
from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.models.quantization import is_quantized, plain_weight
from torchrl_grpo.models.shards import own_part

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# The name PEFT gives an adapter unless told, and what its files put before every name.
_ADAPTER = "default"
_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, cfg: LoraConfig, seed: int) -> None:
    """Freeze ``model`` and put an adapter on its linear layers, in place.

    Args:
        model: in any number format.
        cfg: rank, scale, and which layers.
        seed: of ``A``; the caller's random numbers stay as they were.

    Raises:
        ConfigError: ``cfg.target_modules`` names a layer that the model does not have.
    """
    layers = _linear_layers(model)
    chosen = cfg.target_modules
    for target in chosen if chosen != [ALL_LINEAR] else []:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            kinds = sorted({name.rpartition(".")[2] for name in layers})
            wrong = f"{type(model).__name__} has no linear layer {target} (beside its output head)"
            good = f"some of {', '.join(kinds)}, or [{ALL_LINEAR}]"
            raise bad_value("train_model.lora.target_modules", chosen, wrong, good)
    import peft

    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        target_modules=ALL_LINEAR if chosen == [ALL_LINEAR] else list(chosen),
        # As GPT-2 stores its matrices: [in, out].
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
    """The layers with an adapter by name; empty for a model without."""
    # Whoever has put adapters there has imported PEFT; without any nobody waits a second for it.
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f".{_ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model that ``model`` with its adapters amounts to, under the base model's own names.

    ``W + s B A`` is computed in float32, for one matrix at a time and only when it is asked for; every other
    parameter, tied ones once, comes as it is, or unpacked where it is quantized. ``model`` is not touched.
    """
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        owner, _, leaf = name.rpartition(".")
        outer = owner.removesuffix(".base_layer")
        if outer != owner and leaf == "weight":
            yield f"{outer}.weight", merged(layers[outer])
        elif is_quantized(parameter):
            yield name, plain_weight(model.get_submodule(owner))
        else:
            yield f"{outer}.{leaf}" if outer else name, parameter.detach()


def merged(layer: LoraLayer) -> Tensor:
    """``W + s B A`` of one layer in float32, a new tensor in the layout of ``W``."""
    return layer.get_delta_weight(_ADAPTER).add_(plain_weight(layer.get_base_layer()))


@torch.no_grad()
def merge_error(layer: LoraLayer, matrix: Tensor) -> float:
    """How far ``matrix`` is from what the layer amounts to, as a share of its output on a random input.

    The layer is computed the other way: ``W v + s B (A v)``, without a product of ``A`` and ``B``.
    """
    weight = plain_weight(layer.get_base_layer()).float()
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    generator = torch.Generator(weight.device).manual_seed(0)
    v = torch.randn(down.shape[1], generator=generator, device=weight.device)
    if layer.fan_in_fan_out:
        weight, matrix = weight.T, matrix.T
    expected = weight @ v + layer.scaling[_ADAPTER] * (up @ (down @ v))
    return float((matrix.float() @ v - expected).norm() / expected.norm().clamp(min=1e-30))


@torch.no_grad()
def reach(model: nn.Module, move: float) -> Iterator[tuple[Tensor, Tensor]]:
    """What training changes of the model that is published, and how far at most, as long as that is little.

    Args:
        model: with or without adapters.
        move: of each trained weight, in either direction.

    Yields:
        A parameter, or a matrix ``W`` with an adapter, and a bound of its moves that broadcasts over it:
        ``move``, or ``s move sum_r |A_ri|``, because ``B`` begins at zero.
    """
    layers = adapted_layers(model)
    if not layers:
        for parameter in map(own_part, model.parameters()):
            yield parameter, torch.tensor(move, device=parameter.device)
    for layer in layers.values():
        bound = layer.scaling[_ADAPTER] * move * layer.lora_A[_ADAPTER].weight.abs().sum(0)
        yield plain_weight(layer.get_base_layer()), bound[:, None] if layer.fan_in_fan_out else bound


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute as its base alone, and with its adapters again on the way out."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def stirred(model: nn.Module, share: float) -> Iterator[None]:
    """Give every adapter a weight of its own for a while; nothing happens to a model without adapters.

    An adapter at its beginning changes nothing, and whether it is published could not be seen. ``B`` is
    copied and put back bit for bit.

    Args:
        model: is changed in place.
        share: norm of what each adapter now adds to its matrix, over the norm of the matrix.
    """
    kept = [(layer, layer.lora_B[_ADAPTER].weight) for layer in adapted_layers(model).values()]
    copies = [weight.detach().clone() for _, weight in kept]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for layer, weight in kept:
                before = weight.clone()
                weight.copy_(torch.randn(weight.shape, generator=generator))
                base = plain_weight(layer.get_base_layer()).float()
                size = share * base.norm() / layer.get_delta_weight(_ADAPTER).norm()
                weight.mul_(size).add_(before)
        yield
    finally:
        with torch.no_grad():
            for (_, weight), copied in zip(kept, copies, strict=True):
                weight.copy_(copied)


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters into ``folder`` as ``PeftModel.from_pretrained(base, folder)`` reads them."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    tensors = {f"{_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters that :func:`save_adapters` wrote into those of ``model``.

    Raises:
        CheckpointError: they belong to other layers.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, set_peft_model_state_dict

    tensors = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    own = {name for name, _ in model.named_parameters() if is_adapter(name)}
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    result = set_peft_model_state_dict(model, state, adapter_name=_ADAPTER)
    if result.unexpected_keys or len(state) != len(own):
        raise CheckpointError(
            f"{folder}: it holds {len(state)} adapter matrices, and this model has {len(own)}; resume with "
            "the model.name and train_model.lora.target_modules that the run was started with"
        )
