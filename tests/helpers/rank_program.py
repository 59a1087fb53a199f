"""What each training rank of the tests runs: the same steps as one process, from the same batches.

RANK=0 WORLD_SIZE=2 ... python tests/helpers/rank_program.py OUTPUT KIND ...
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from batches import VOCAB, compiler_backend, make_batch, make_model, make_objective
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.config.values import OptimizerName
from torchrl_grpo.distributed import shard_transfer
from torchrl_grpo.distributed.parallelism import distribute, full_tensor, reshard_after, shard_like
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.models.prepare import compile_layers
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.aggregation import count_totals
from torchrl_grpo.training.optimizer_backend import TorchBackend
from torchrl_grpo.training.optimizer_step import OptimizerStep
from torchrl_grpo.training.optimizers import build_optimizer, muon_matrices

CPU = torch.device("cpu")
# Every term a loss can have, so that every metric is added up over ranks.
POLICY: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.01, "kl_inference_coef": 0.05}
# family, tokens of a micro-batch (None: no limit), policy
CASES: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "llama": ("llama", None, POLICY),
    "llama_tied": ("llama_tied", 30, POLICY),
    # The candidates of a teacher are scored too.
    "gpt2": ("gpt2", 30, {"distill_coef": 0.5, "distill_top_k": 4}),
    "gemma3": ("gemma3", None, {}),
    "qwen3, few groups move": ("qwen3", 25, {}),
}
RELOADED = ("llama_tied", "gpt2")
# Three ranks, which divide no size of a tensor, measure all cases. Two ranks measure one of them, and the
# same with compiled layers.
CASES_OF_TWO = ("llama",)
COMPILED = "llama, compiled"
# The same in bfloat16, where ranks round differently.
MIXED = {
    "llama in bfloat16": "llama",
    "llama_tied in bfloat16": "llama_tied",
    "gpt2 in bfloat16": "gpt2",
    "gemma3 in bfloat16, checkpointed": "gemma3",
    "llama in bfloat16, float32 head": "llama",
    "gemma3 in bfloat16, an idle step": "gemma3",
}
# One process in micro-batches of a group each, which shows whether numbers depend on the division here.
DIVIDED = "llama in bfloat16, float32 head, in small micro-batches"


def batch_of(case: str, step: int = 1) -> TensorDict:
    """Five groups, so that no number of ranks divides them, of very different lengths."""
    batch = make_batch(P=5, G=3, L=9, T=7, seed=3)
    if "gpt2" in case:
        g = torch.Generator().manual_seed(3)
        shape = *batch["tokens", "response"].shape[:2], 5, batch["tokens", "response"].shape[2]
        teacher = torch.randn(shape, generator=g, dtype=torch.float32).log_softmax(2)
        batch["tokens", "candidates"] = torch.randint(0, VOCAB, shape, generator=g)[:, :, :4]
        batch["log_probs", "candidates"] = teacher[:, :, :4].to(torch.get_default_dtype())
    if "idle" in case and step == 2:
        # No group has a gradient: no backward pass, and yet momentum moves the weights.
        batch["advantage"][:] = 0.0
    if "few" in case:
        # Only one group has a gradient: most ranks have nothing to do in the backward pass.
        batch["advantage"][1:] = 0.0
    return batch


def build(
    case: str, kind: str, ranks: Ranks, loads_parked: bool = False
) -> tuple[OptimizerStep, torch.nn.Module]:
    family, tokens, policy = CASES["llama" if case in (COMPILED, DIVIDED) else MIXED.get(case, case)]
    tokens = 30 if case == DIVIDED else tokens
    model = make_model(family)
    if "checkpointed" in case:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    scorer = TokenScorer(
        model,
        autocast_dtype=torch.bfloat16 if case in (*MIXED, DIVIDED) else None,
        head_dtype=torch.float32 if "float32 head" in case else None,
    )
    if case == COMPILED:
        # What the compiler writes is compared in test_compile.py.
        with compiler_backend("aot_eager"):
            compile_layers(model, scorer)
        assert sum(module._compiled_call_impl is not None for module in model.modules()) == 2
    network = distribute(scorer, kind, ranks.size, CPU)
    loss, _ = make_objective(scorer, **policy)
    loss.set_network(network)
    step = OptimizerStep(
        model,
        loss,
        # The first steps of Adam follow a gradient's sign, also where it is rounding; not with this eps.
        OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-2),
        total_steps=4,
        groups_per_batch=5,
        num_pieces=1,
        budget=TokenBudget(tokens or 10**9, shares_prefix=True, notify=lambda text: None),
        use_scaler=False,
        max_skipped_steps=1,
        ranks=ranks,
        network=network,
        loads_parked=loads_parked,
    )
    return step, model


def measure(case: str, kind: str, ranks: Ranks) -> dict[str, Any]:
    """Loss terms, gradients, and what two optimizer steps make of the weights; whole on every rank."""
    step, model = build(case, kind, ranks)
    batch = batch_of(case)
    with torch.no_grad(), reshard_after(step.network):
        at_start = _probe(step, batch)
    shares, totals = step.divide(batch)
    sums = step.accumulate(shares[ranks.rank], totals)
    storages = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
    gradients = {name: _gradient(p).clone() for name, p in model.named_parameters()}
    # Refused, which changes nothing and drops them.
    step.backend.step(apply=False)
    step.backend.zero_grad()
    held = {name: p for name, p in model.named_parameters()}
    metrics = [step(batch)]
    _park(step, ranks)
    metrics.append(step(batch_of(case, step=2)))
    weights = {name: full_tensor(p).clone() for name, p in model.named_parameters()}
    stale = [name for name, p in held.items() if not torch.equal(full_tensor(p), weights[name])]
    _park(step, ranks)
    state = _together(step.state_dict(), ranks)
    moments = [value for entry in state["optimizer"]["state"].values() for value in entry.values()]
    with torch.no_grad(), reshard_after(step.network):
        probe = _probe(step, batch)
    return {
        "sums": sums,
        "gradients": gradients,
        "storages of gradients": len(storages),
        "metrics": metrics,
        "weights": weights,
        "stale": stale,
        "probe at start": at_start,
        "probe": probe,
        "state": state,
        "kept": ranks.gather(sum(not shard_transfer.is_shard(moment) for moment in moments)),
        "reloaded": _reloaded(case, kind, ranks, state) if case in RELOADED else None,
        "tokens": float(count_totals(batch["masks", "loss"]).tokens),
    }


def _together(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """On rank 0, return what ranks have read, with whole tensors. The others keep their shards."""
    if ranks.is_main:
        whole: dict[str, Any] = shard_transfer.gather(state, ranks)
        return whole
    shard_transfer.send(state, ranks)
    return state


def _park(step: OptimizerStep, ranks: Ranks) -> None:
    """Move the moments to host memory. One process keeps them, as what ranks are compared with."""
    if ranks.size > 1:
        step.backend.park()


def _reloaded(case: str, kind: str, ranks: Ranks, state: dict[str, Any]) -> dict[str, Any]:
    """What is saved again by those who have loaded what rank 0 saved."""
    saved = copy.deepcopy(ranks.gather(state)[0])
    step, _ = build(case, kind, ranks, loads_parked=ranks.size > 1)
    step.load_state_dict(saved)
    for moments in saved["optimizer"]["state"].values():
        for value in moments.values():
            # What was given is no longer needed: it may lie in a file.
            value.fill_(-1.0)
    return _together(step.state_dict(), ranks)


def kept_of_weights(ranks: Ranks) -> float:
    """Bytes a weight that the graph holds of the layers' matrices after a forward pass in bfloat16."""
    step, model = build("llama in bfloat16", "fsdp2", ranks)
    whole_model: Any = model
    decoder = whole_model.get_decoder()
    matrices = [p for p in decoder.layers.parameters() if p.ndim == 2]
    shapes = {shape for p in matrices for shape in (p.shape, p.shape[::-1])}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes:
            saved.append(tensor)
        return tensor

    batch = batch_of("llama in bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        terms = step.loss(batch, totals=count_totals(batch["masks", "loss"]))
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}
    torch.stack([v for k, v in terms.items() if k.startswith("loss_")]).sum().backward()
    return float(sum(storages.values()) / sum(p.numel() for p in matrices))


def muon_steps(kind: str, ranks: Ranks) -> dict[str, Any]:
    """The weights after two updates by Muon with given gradients, and its state, loaded in between."""
    model = make_model("llama_tied")
    scorer = TokenScorer(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    distribute(scorer, kind, ranks.size, CPU)
    cfg = OptimizerConfig(name=OptimizerName("muon"), lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    backend = TorchBackend(build_optimizer(model, cfg), scaler, 1e9, loads_parked=ranks.size > 1)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        for name, parameter in model.named_parameters():
            gradient = torch.randn(shapes[name], generator=generator) / 100
            parameter.grad = shard_like(gradient, parameter)
        backend.step(apply=True)
        if step == 0:
            state = ranks.gather(_together(backend.optimizer_state(keep=ranks.is_main), ranks))[0]
            backend.load_optimizer_state(state)
    weights = {name: full_tensor(p).clone() for name, p in model.named_parameters()}
    matrices = {id(parameter) for parameter in muon_matrices(model)}
    return {
        "weights": weights,
        "matrices": [name for name, p in model.named_parameters() if id(p) in matrices],
        "state": _together(backend.optimizer_state(), ranks),
    }


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is not None:
        return full_tensor(parameter.grad)
    from deepspeed.utils import safe_get_full_grad

    gradient: Tensor = safe_get_full_grad(parameter)
    return gradient


def _probe(step: OptimizerStep, batch: TensorDict) -> Tensor:
    network: Any = step.network
    scorer = getattr(network, "module", network)
    log_probs: Tensor = scorer.next_token_log_probs(batch["tokens", "prompt"], batch["masks", "prompt"])
    return log_probs


def measure_all(kinds: Sequence[str], cases: Sequence[str], ranks: Ranks) -> dict[Any, Any]:
    """What :func:`measure` finds for each pair of a case and a kind."""
    return {(case, kind): measure(case, kind, ranks) for kind in kinds for case in cases}


def main(output: Path, kinds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    here = Ranks(on_cpu=True)
    measured = measure_all(kinds, (*CASES_OF_TWO, *MIXED) if here.size == 2 else (*CASES,), here)
    if here.size == 2:
        measured |= measure_all(["fsdp2"], [COMPILED], here)
    measured["kept of weights"] = kept_of_weights(here)
    measured["muon"] = muon_steps("fsdp2", here)
    if here.is_main:
        torch.save(measured, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
