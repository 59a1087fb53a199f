"""Builds the optimizer of ``optimizer.name``: AdamW, AdamW with averages in 8 bits, or Muon.

With FSDP2, AdamW updates shards. Muon needs each matrix whole, so it gathers one at a time. DeepSpeed divides
the state of AdamW only (:func:`~torchrl_grpo.planning.resolve.parallelism` refuses the rest).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.config.values import OptimizerName
from torchrl_grpo.distributed.parallelism import full_tensor, shard_like, writable

# Name of torch's state of a matrix in Muon.
_MOMENTUM = "momentum_buffer"


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters of ``model``.

    Args:
        model: trained model; its parameters may be shards already.
        cfg: optimizer settings.
    """
    groups = parameter_groups(model, cfg.weight_decay)
    adamw: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.betas[0], cfg.betas[1]), "eps": cfg.eps}
    if cfg.name == OptimizerName.adamw_8bit:
        # An optional package, whose classes have no types.
        bitsandbytes: Any = importlib.import_module("bitsandbytes.optim")
        quantized: torch.optim.Optimizer = bitsandbytes.AdamW8bit(groups, **adamw)
        return quantized
    if cfg.name == OptimizerName.adamw:
        return torch.optim.AdamW(groups, **adamw, fused=True)
    matrices = muon_matrices(model)
    chosen = {id(parameter) for parameter in matrices}
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    # Updates have the size that AdamW's have in a long run (arXiv 2502.16982).
    muon = torch.optim.Muon(
        [{"params": matrices}], lr=cfg.lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return MuonWithAdamW(muon, torch.optim.AdamW(rest, **adamw, fused=True))


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers as one: schedule, scaler, checkpoints and parking see one list of groups and one state.

    Args:
        muon: optimizer of matrices.
        adamw: optimizer of the other parameters.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": adamw.defaults["lr"]})
        self._muon, self._adamw = muon, adamw
        self._share()

    def _share(self) -> None:
        """Let both optimizers use the groups and the state of this one."""
        count = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Loading replaces groups and state.
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if any(isinstance(p, DTensor) for group in self._muon.param_groups for p in group["params"]):
            for group in self._muon.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_on_shard(parameter, group)
        else:
            self._muon.step()
        self._adamw.step()

    def _step_on_shard(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update this rank's shard of a matrix. Every rank computes the update of the whole matrix.

        On shards, the products of Muon would be sums of rounded parts, and some shapes fail in torch 2.13.
        """
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        whole = nn.Parameter(full_tensor(parameter))
        whole.grad = full_tensor(parameter.grad)
        muon = torch.optim.Muon([whole], **{name: group[name] for name in self._muon.defaults})
        muon.state[whole][_MOMENTUM] = full_tensor(state[_MOMENTUM])
        muon.step()
        for shard, updated in ((parameter, whole.detach()), (state[_MOMENTUM], muon.state[whole][_MOMENTUM])):
            own = shard_like(updated, shard)
            assert isinstance(own, DTensor)
            with writable(shard) as values:
                values.copy_(own.to_local())


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that Muon updates: matrices, without embeddings, output head, norms and biases.

    The matrices of adapters are among them. The experts of a layer, where they are one tensor of three axes,
    are not.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    decayed: list[nn.Parameter] = parameter_groups(model, 0.0)[0]["params"]
    return [parameter for parameter in decayed if parameter.ndim == 2 and id(parameter) not in excluded]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters into matrices, with weight decay, and biases and norms, without.

    Biases and norms have none even if they are stored as matrices: GPT-OSS has the biases of all experts in
    one matrix, and Cohere's norms have a row for each head.
    """
    no_decay = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim < 2 or "bias" in name or "norm" in type(module).__name__.lower()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in no_decay], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in no_decay], "weight_decay": 0.0},
    ]
