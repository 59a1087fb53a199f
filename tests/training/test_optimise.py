"""One optimizer step: AdamW by hand, schedules, clipping, refusal of what is not finite, and its state."""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from batches import FixedScorer, make_batch, make_model, make_objective, no_budget, split
from pretended_cuda import PretendedCuda
from rounding import EQUAL, EXACT, assert_rounds_alike, float64
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.config.values import LRSchedule
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.models.precision import cast_weights_once
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives.aggregation import BatchTotals, count_totals
from torchrl_grpo.objectives.coefficients import EntropyCoefficient, KLCoefficient
from torchrl_grpo.training import optimizer_step
from torchrl_grpo.training.optimizer_step import OptimizerStep, _normalized_ess, learning_rate_factor
from torchrl_grpo.training.optimizers import parameter_groups

# A schedule that moves although the very first step was refused is meant here, and no reason to warn.
pytestmark = pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")


class Quadratic(nn.Module):
    """A loss whose gradients are known: ``(sum matrix x + sum vector x) / tokens`` per token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.factor = 1.0
        self.kl, self.entropy = KLCoefficient(0.0), EntropyCoefficient(0.0)

    def has_gradient(self, batch: TensorDict) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)

    def update_coefficients(self, entropy: float, kl: float | None, responses: int) -> None:
        pass

    def forward(self, batch: TensorDict, totals: BatchTotals) -> TensorDict:
        tokens = batch["masks", "response"].sum()
        value = sum((p * torch.arange(1.0, p.numel() + 1).view_as(p)).sum() for p in self.model.parameters())
        zero = torch.zeros(())
        share = tokens / totals.tokens
        return TensorDict(
            {
                "loss_objective": self.factor * value * share,
                **{name: zero for name in ("entropy", "clip_fraction", "kl_approx", "logprob_diff")},
                "ratio": share,
                "ratio_squared": share,
            }
        )


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[0.5, -0.3], [0.2, 0.9]]))
        self.vector = nn.Parameter(torch.tensor([0.7, -0.1]))


def make_step(model: nn.Module, loss: Any, total_steps: int = 10, **changes: Any) -> OptimizerStep:
    options: dict[str, Any] = {
        "budget": no_budget(),
        "groups_per_batch": 4,
        "num_pieces": 1,
        "use_scaler": False,
        "max_skipped_steps": 2,
    }
    options |= {key: changes.pop(key) for key in list(changes) if key in options}
    return OptimizerStep(model, loss, OptimizerConfig(**changes), total_steps=total_steps, **options)


def adamw_by_hand(
    p: Tensor, gradients: list[Tensor], lrs: list[float], decay: float, betas: tuple[float, float], eps: float
) -> Tensor:
    """Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, in float64."""
    p, m, v = p.double().clone(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g.double()
        v = betas[1] * v + (1 - betas[1]) * g.double() ** 2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        p = p - lr * decay * p - lr * m_hat / (v_hat.sqrt() + eps)
    return p


@pytest.mark.usefixtures("float64")
def test_the_result_equals_adamw_by_hand() -> None:
    model = Tiny()
    before = copy.deepcopy(dict(model.named_parameters()))
    step = make_step(
        model,
        Quadratic(model),
        lr=0.1,
        weight_decay=0.3,
        betas=[0.8, 0.95],
        eps=1e-3,
        max_grad_norm=2.0,
        schedule="linear",
        warmup_steps=2,
        total_steps=6,
    )
    norm = math.sqrt(sum(i**2 for i in (1, 2, 3, 4)) + 1 + 4)
    # Warm-up 1/3, 2/3, then the line from 1 to 0 over the four steps that are left.
    lrs = [0.1 * f for f in (1 / 3, 2 / 3, 1.0, 0.75, 0.5)]
    metrics = [step(make_batch()) for _ in lrs]
    assert [m["optimizer/lr"] for m in metrics] == pytest.approx(lrs)
    assert [m["optimizer/grad_norm"] for m in metrics] == pytest.approx([norm] * 5, **EQUAL)
    for name, decay in (("matrix", 0.3), ("vector", 0.0)):
        p = before[name].detach()
        gradient = torch.arange(1.0, p.numel() + 1).view_as(p) * 2.0 / norm
        expected = adamw_by_hand(p, [gradient] * 5, lrs, decay, (0.8, 0.95), 1e-3)
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, **EXACT)
    assert metrics[-1]["optimizer/skipped"] == 0
    assert metrics[0]["loss/total"] == pytest.approx(0.5 - 0.6 + 0.6 + 3.6 + 0.7 - 0.2)


def test_a_gradient_below_the_bound_is_not_scaled() -> None:
    results = []
    for bound in (1e6, 1e9):
        model = Tiny()
        make_step(model, Quadratic(model), lr=0.1, eps=1.0, max_grad_norm=bound)(make_batch())
        results.append(model.matrix.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "schedule,warmup,ratio,expected",
    [
        ("constant", 0, 0.0, [1.0] * 8),
        ("constant", 3, 0.0, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", 0, 0.0, [1 - i / 8 for i in range(8)]),
        ("cosine", 0, 0.0, [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]),
        # A decay that does not end in 0 ends in the last step.
        ("linear", 4, 0.1, [0.2, 0.4, 0.6, 0.8, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", 0, 0.1, [0.1 + 0.45 * (1 + math.cos(math.pi * i / 7)) for i in range(8)]),
    ],
)
def test_schedules(schedule: str, warmup: int, ratio: float, expected: list[float]) -> None:
    cfg = OptimizerConfig(schedule=LRSchedule(schedule), warmup_steps=warmup, min_lr_ratio=ratio)
    assert [learning_rate_factor(step, 8, cfg) for step in range(8)] == pytest.approx(expected)
    assert learning_rate_factor(50, 8, cfg) == pytest.approx(1.0 if schedule == "constant" else ratio)


def test_warm_up_longer_than_the_run_never_leaves_the_ramp() -> None:
    cfg = OptimizerConfig(schedule=LRSchedule("cosine"), warmup_steps=20)
    factors = [learning_rate_factor(step, 8, cfg) for step in range(9)]
    assert factors == sorted(factors) and factors[0] > 0 and factors[-1] < 0.5


def test_matrices_decay_and_vectors_do_not() -> None:
    model = make_model("gpt2")
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all(p.ndim >= 2 for p in decayed["params"]) and all(p.ndim == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("steps,warmup", [(1, 0), (2, 0), (10, 0), (10, 4), (10, 9)])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_ends_in_the_last_step_and_never_in_a_step_at_rate_0(
    steps: int, warmup: int, schedule: str
) -> None:
    cfg = OptimizerConfig(schedule=LRSchedule(schedule), warmup_steps=warmup, min_lr_ratio=0.25)
    factors = [learning_rate_factor(step, steps, cfg) for step in range(steps)]
    # One step after warm-up is both the first and the last; it has the whole rate.
    assert factors[-1] == pytest.approx(0.25 if steps - warmup > 1 else 1.0)
    assert factors[warmup] == 1.0
    cfg.min_lr_ratio = 0.0
    assert all(learning_rate_factor(step, steps, cfg) > 0 for step in range(steps))


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 2,
}


@pytest.mark.parametrize(
    "kind,changes,plain_matrices",
    [
        ("gpt_oss", _EXPERTS, ["down_proj_bias", "gate_up_proj_bias"]),
        ("cohere", {"use_qk_norm": True}, ["k_norm.weight", "q_norm.weight"]),
        ("stablelm", {"qk_layernorm": True}, []),
        ("qwen3", {}, []),
    ],
)
def test_biases_and_norms_that_are_matrices_do_not_decay(
    kind: str, changes: dict[str, Any], plain_matrices: list[str]
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_SMALL, **changes}))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model, 0.1)
    assert not [names[id(p)] for p in decayed["params"] if "norm" in names[id(p)] or "bias" in names[id(p)]]
    matrices = sorted(names[id(p)] for p in plain["params"] if p.ndim > 1)
    assert len(matrices) == len(plain_matrices)
    assert all(name.endswith(end) for name, end in zip(matrices, plain_matrices, strict=True))
    # Everything else that is a matrix, embeddings among them.
    assert len(decayed["params"]) == sum(p.ndim > 1 for p in model.parameters()) - len(plain_matrices)
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_the_effective_sample_size_is_never_above_1(pieces: int) -> None:
    sizes = []
    for seed in range(20):
        batch = make_batch(P=8, G=4, T=6, seed=seed)
        gap = 1e-3 * torch.randn((), generator=torch.Generator().manual_seed(seed))
        loss, _ = make_objective(FixedScorer(batch["log_probs", "response"] + gap))
        sums: dict[str, float] = {}
        for piece in split(batch, 8, pieces):
            loss.actor_network = FixedScorer(piece["log_probs", "response"] + gap)
            terms = loss(piece, totals=count_totals(batch["masks", "loss"]))
            for name in ("ratio", "ratio_squared"):
                sums[name] = sums.get(name, 0.0) + float(terms[name])
        # All ratios are equal, to rounding of the log-probabilities.
        exact = sums["ratio"] ** 2 / sums["ratio_squared"]
        assert exact == pytest.approx(1.0, abs=1e-12)
        sizes.append(_normalized_ess(sums["ratio"], sums["ratio_squared"]))
    assert max(sizes) <= 1.0 and min(sizes) > 1 - 1e-12


def test_the_effective_sample_size_of_ratios_that_differ() -> None:
    assert _normalized_ess(1.0, 1.0 - 1e-9) == 1.0
    assert _normalized_ess(0.5, 0.5) == 0.5
    assert math.isnan(_normalized_ess(0.0, 0.0)) and math.isnan(_normalized_ess(math.nan, 1.0))


def real_step(**changes: Any) -> tuple[nn.Module, OptimizerStep]:
    model = make_model()
    loss, _ = make_objective(TokenScorer(model), clip_epsilon_high=0.28, kl_coef=0.05)
    return model, make_step(model, loss, **{"lr": 1e-2, **changes})


def one_update(batch: TensorDict, **changes: Any) -> tuple[list[Tensor], dict[str, float]]:
    model, step = real_step(**changes)
    # With this eps, AdamW's first step is nearly proportional to the gradient, so errors show up as they are.
    metrics = step(batch)
    return [p.detach().clone() for p in model.parameters()], metrics


class _Casts(TorchDispatchMode):
    """Counts casts of matrices to bfloat16, by shape."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.count += result.shape in self.shapes
        return result


def test_a_step_casts_each_weight_once_and_its_gradients_are_those_of_casts_in_every_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradients(pieces: int) -> tuple[int, list[Tensor]]:
        # A width that no number of tokens has.
        model = make_model(hidden_size=88, intermediate_size=152)
        loss, _ = make_objective(TokenScorer(model, autocast_dtype=torch.bfloat16))
        step = make_step(model, loss, num_pieces=pieces)
        matrices = [p for n, p in model.named_parameters() if "proj" in n]
        with _Casts({p.shape for p in matrices}) as casts:
            # Groups without a gradient come first, and their copies have none.
            batch = make_batch(P=4, G=4)
            batch["advantage"][0] = 0.0
            shares, totals = step.divide(batch)
            step.accumulate(shares[0], totals)
        return casts.count - len(matrices), [p.grad for p in model.parameters() if p.grad is not None]

    once, expected = gradients(1)
    count, split_up = gradients(3)
    assert count == once > 0
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_step, "cast_weights_once", lambda device, passes: nullcontext())
        count, plain = gradients(3)
    assert count == 3 * once
    assert len(split_up) == len(plain) == len(expected)
    assert all(map(torch.equal, split_up, plain))


@pytest.mark.parametrize(
    ("device", "pieces", "is_kept"), [("cpu", 1, True), ("cuda", 1, False), ("cuda", 3, True)]
)
def test_a_gpu_keeps_cast_weights_for_several_micro_batches_only(
    device: str, pieces: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[object] = []

    def kept(*args: Any) -> Any:
        contexts.append(cast_weights_once(*args))
        return contexts[-1]

    monkeypatch.setattr(optimizer_step, "cast_weights_once", kept)
    with PretendedCuda() if device == "cuda" else nullcontext():
        model = make_model().to(device)
        loss, _ = make_objective(TokenScorer(model))
        make_step(model, loss, num_pieces=pieces)(make_batch(P=4, G=4))
    assert [isinstance(context, torch.autocast) for context in contexts] == [is_kept]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("pieces", [2, 4, 8, 16])
def test_the_update_does_not_depend_on_the_micro_batches(pieces: int) -> None:
    batch = make_batch(P=4, G=4)
    whole, metrics = one_update(batch, eps=1.0)
    split_up, other = one_update(batch, eps=1.0, num_pieces=pieces)
    for a, b in zip(whole, split_up, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert metrics.keys() == other.keys()
    for name, value in metrics.items():
        assert other[name] == pytest.approx(value, **EQUAL), name
    assert {"loss/kl", "kl/reference", "policy/ess", "policy/clip_fraction"} <= metrics.keys()
    assert 0 < metrics["policy/ess"] <= 1


def test_split_cuts_groups_first_and_then_samples() -> None:
    batch = make_batch(P=2, G=4)
    batch["masks", "response"][:] = True
    batch["masks", "prompt"][:] = True
    halves = list(split(batch, 2, 2))
    assert [h["tokens", "response"].shape[:2] for h in halves] == [(1, 4), (1, 4)]
    quarters = list(split(batch, 2, 8))
    assert [q["tokens", "response"].shape[:2] for q in quarters] == [(1, 1)] * 8
    glued = torch.cat([q["tokens", "response"][0] for q in quarters]).view_as(batch["tokens", "response"])
    assert torch.equal(glued, batch["tokens", "response"])
    for index, piece in enumerate(quarters):
        assert torch.equal(piece["tokens", "prompt"][0], batch["tokens", "prompt"][index // 4])
        assert torch.equal(piece["advantage"][0, 0], batch["advantage"][index // 4, index % 4])


@pytest.mark.usefixtures("float64")
def test_groups_without_a_gradient_are_measured_and_not_run_backwards() -> None:
    batch = make_batch(P=4, G=3, kl=False)
    batch["advantage"][[0, 2]] = 0.0
    updates, metrics = [], []
    for everything in (True, False):
        model = make_model()
        loss, _ = make_objective(TokenScorer(model), clip_epsilon_high=0.28)
        if everything:
            loss.has_gradient = lambda batch: torch.ones(len(batch), dtype=torch.bool)  # type: ignore[method-assign,assignment]
        rows: list[tuple[bool, int]] = []
        model.get_input_embeddings().register_forward_hook(
            lambda *call, rows=rows: rows.append((torch.is_grad_enabled(), call[1][0].numel()))
        )
        metrics.append(make_step(model, loss, lr=1e-2, eps=1.0)(batch))
        updates.append([p.detach().clone() for p in model.parameters()])
    with_gradient = {enabled: tokens for enabled, tokens in rows}
    assert set(with_gradient) == {True, False} and all(with_gradient.values())
    for a, b in zip(*updates, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    for name, value in metrics[0].items():
        assert metrics[1][name] == pytest.approx(value, **EQUAL), name


def test_terms_beside_the_advantage_keep_every_group() -> None:
    batch = make_batch(P=4, G=3)
    batch["advantage"][1] = 0.0
    scorer = TokenScorer(make_model())
    every = torch.ones(4, dtype=torch.bool)
    policies: list[dict[str, Any]] = [{"kl_coef": 0.1}, {"kl_inference_coef": 0.1}, {"entropy_coef": 0.1}]
    for policy in policies:
        assert torch.equal(make_objective(scorer, **policy)[0].has_gradient(batch), every), policy
    policies = [{}, {"kl_coef": 0.1, "kl_in": "reward"}, {"surrogate": "cispo"}, {"surrogate": "sapo"}]
    for policy in policies:
        kept = make_objective(scorer, **policy)[0].has_gradient(batch)
        assert kept.tolist() == [True, False, True, True], policy


def test_a_batch_without_any_gradient_is_an_update_by_zero() -> None:
    model, step = real_step()
    loss, _ = make_objective(TokenScorer(model))
    step.loss = loss
    batch = make_batch()
    step(batch)
    before = [p.detach().clone() for p in model.parameters()]
    idle = batch.clone()
    idle["advantage"].zero_()
    metrics = step(idle)
    assert metrics["optimizer/grad_norm"] == 0 and metrics["optimizer/skipped"] == 0
    assert metrics["policy/entropy"] > 0
    # AdamW goes on with the momentum of the step before.
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def weights_after_two_steps(*, fp16: bool, idle: bool, fails: bool) -> dict[str, Tensor]:
    """With ``fails``, memory runs out in the second step, after some micro-batches have left gradients."""
    first, second = make_batch(P=4, G=4), make_batch(P=4, G=4, seed=1)
    if idle:
        second["advantage"].zero_()
    model = make_model()
    loss, _ = make_objective(TokenScorer(model))
    messages: list[str] = []
    budget = TokenBudget(20, True, messages.append)
    # With this eps, AdamW does not make the most of the smallest gradients.
    step = make_step(model, loss, lr=1e-2, eps=1e-2, weight_decay=0.1, use_scaler=fp16, budget=budget)
    step(first)
    calls: list[int] = []

    def run_out(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no more")

    if fails:
        model.get_input_embeddings().register_forward_hook(run_out)
    metrics = step(second)
    assert len(messages) == fails and metrics["optimizer/skipped"] == 0
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("idle", [False, True], ids=["a signal", "none"])
def test_memory_that_runs_out_once_changes_nothing_about_the_step(fp16: bool, idle: bool) -> None:
    with float64():
        exact = weights_after_two_steps(fp16=False, idle=idle, fails=False)
    # Smaller micro-batches round otherwise.
    weights, plain = (weights_after_two_steps(fp16=fp16, idle=idle, fails=fails) for fails in (True, False))
    assert_rounds_alike(weights, plain, exact)


def test_an_update_without_room_for_its_moments_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = real_step()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step.optimizer, "step", full)
    with pytest.raises(TrainingStopped, match=r"optimizer's update.*lora\.rank=16.*gpu_memory_utilization"):
        step(make_batch())


@pytest.mark.parametrize("fp16", [False, True])
def test_the_very_first_batch_may_have_no_gradient(fp16: bool) -> None:
    model = make_model()
    loss, _ = make_objective(TokenScorer(model))
    step, batch = make_step(model, loss, use_scaler=fp16), make_batch()
    idle = batch.clone()
    idle["advantage"].zero_()
    assert step(idle)["optimizer/grad_norm"] == 0
    resumed = make_step(model, loss, use_scaler=fp16)
    resumed.load_state_dict(step.state_dict())
    assert resumed(idle)["optimizer/skipped"] == 0
    assert resumed(batch)["optimizer/grad_norm"] > 0


def spoilt(batch: TensorDict, value: float = math.nan) -> TensorDict:
    broken = batch.clone()
    broken["advantage"][0, 0] = value
    return broken


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_no_parameter(value: float) -> None:
    model, step = real_step()
    batch = make_batch()
    step(batch)
    before = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(step.optimizer.state_dict()["state"])
    metrics = step(spoilt(batch, value))
    assert metrics["optimizer/skipped"] == 1 and not math.isfinite(metrics["loss/total"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for index, state in step.optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, moments[index][name]), name
    # And the next good step is untouched by it.
    assert math.isfinite(step(batch)["loss/total"])
    assert not torch.equal(next(iter(model.state_dict().values())), next(iter(before.values())))


def test_a_gradient_that_is_not_finite_is_refused_although_the_loss_is_finite() -> None:
    model, step = real_step()
    before = copy.deepcopy(model.state_dict())
    hook = next(model.parameters()).register_hook(lambda g: torch.full_like(g, math.inf))
    metrics = step(make_batch())
    assert math.isfinite(metrics["loss/total"]) and not math.isfinite(metrics["optimizer/grad_norm"])
    assert metrics["optimizer/skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    hook.remove()
    assert step(make_batch())["optimizer/skipped"] == 1


def test_training_stops_after_too_many_refusals_in_a_row() -> None:
    _, step = real_step(max_skipped_steps=2)
    batch = make_batch()
    for _ in range(2):
        step(spoilt(batch))
    with pytest.raises(
        TrainingStopped, match=r"3 optimizer steps in a row.*max_skipped_steps=2.*optimizer.lr"
    ):
        step(spoilt(batch))


def test_a_good_step_starts_the_count_anew() -> None:
    _, step = real_step(max_skipped_steps=2)
    batch = make_batch()
    for _ in range(4):
        step(spoilt(batch))
        step(spoilt(batch))
        assert step.skipped_in_a_row == 2
        step(batch)
        assert step.skipped_in_a_row == 0
    assert step.skipped == 8


def test_no_refusal_is_allowed_when_the_bound_is_zero() -> None:
    _, step = real_step(max_skipped_steps=0)
    with pytest.raises(TrainingStopped):
        step(spoilt(make_batch()))


def test_a_refused_step_still_moves_the_schedule() -> None:
    _, step = real_step(schedule="linear", total_steps=4)
    batch = make_batch()
    lrs = [step(data)["optimizer/lr"] for data in (batch, spoilt(batch), batch)]
    assert lrs == pytest.approx([1e-2, 0.75e-2, 0.5e-2])


@pytest.mark.parametrize("fp16", [False, True])
def test_the_state_goes_through_a_file(fp16: bool) -> None:
    def build() -> tuple[nn.Module, OptimizerStep]:
        return real_step(use_scaler=fp16, schedule="cosine", warmup_steps=2, total_steps=9)

    batches = [make_batch(seed=i) for i in range(5)]
    batches[1] = spoilt(batches[1])
    model, step = build()
    for batch in batches[:3]:
        step(batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": step.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other_model, other = build()
    other_model.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["step"])
    assert other.skipped == 1
    for batch in batches[3:]:
        assert other(batch) == step(batch)
    for (name, a), b in zip(model.named_parameters(), other_model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_scale_of_fp16_changes_neither_gradient_nor_update() -> None:
    batch = make_batch()
    plain, metrics = one_update(batch)
    scaled, other = one_update(batch, use_scaler=True)
    # A power of two rounds nothing.
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert other["optimizer/grad_norm"] == pytest.approx(metrics["optimizer/grad_norm"], **EQUAL)
    assert other.pop("optimizer/loss_scale") == 2.0**12


def test_an_overflow_lowers_the_scale_and_counts_only_once_that_is_used_up() -> None:
    model, step = real_step(use_scaler=True, max_skipped_steps=2)
    batch, before = spoilt(make_batch()), copy.deepcopy(model.state_dict())
    scales = [step(batch)["optimizer/loss_scale"] for _ in range(12)]
    assert scales == [2.0**12 / 2 ** (i + 1) for i in range(12)]
    assert step.skipped == 12 and step.skipped_in_a_row == 0
    with pytest.raises(TrainingStopped):
        for _ in range(3):
            step(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loss_that_is_not_finite_where_gradients_are_does_not_count_as_an_overflow() -> None:
    model = make_model()
    loss, _ = make_objective(TokenScorer(model), kl_coef=0.05)
    step = make_step(model, loss, use_scaler=True, max_skipped_steps=2)
    batch = make_batch()
    batch["log_probs", "reference"][0, 0, 0] = math.nan
    batch["masks", "response"][0, 0, 0] = batch["masks", "loss"][0, 0, 0] = True
    metrics = step(batch)
    assert math.isnan(metrics["loss/total"]) and math.isfinite(metrics["optimizer/grad_norm"])
    assert metrics["optimizer/loss_scale"] == 2.0**12
    with pytest.raises(TrainingStopped, match=r"train\.max_skipped_steps=2"):
        for _ in range(2):
            step(batch)


def test_fp16_autocast_on_cpu_takes_a_step() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    scorer = TokenScorer(model, autocast_dtype=torch.float16)
    loss, _ = make_objective(scorer)
    metrics = make_step(model, loss, use_scaler=True, lr=1e-3)(make_batch())
    assert metrics["optimizer/skipped"] == 0 and math.isfinite(metrics["loss/total"])
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def adaptive_step() -> OptimizerStep:
    model = make_model()
    loss, _ = make_objective(TokenScorer(model), init_kl_coeff=0.1, kl_target=0.01, kl_horizon=160)
    return make_step(model, loss, max_skipped_steps=9)


def test_the_coefficient_moves_by_the_responses_of_the_whole_batch() -> None:
    step, batch = adaptive_step(), make_batch(P=4, G=4)
    batch["masks", "loss"][0] = False
    metrics = step(batch)
    assert metrics["kl/reference"] > 0.02 and metrics["policy/kl_coef"] == 0.1
    assert step.loss.kl.value == pytest.approx(0.1 * (1 + 0.2 * 16 / 160))


def test_a_refused_step_moves_no_coefficient() -> None:
    step, batch = adaptive_step(), make_batch(P=4, G=4)
    batch["advantage"][0] = math.nan
    assert step(batch)["optimizer/skipped"] == 1
    assert step.loss.kl.value == 0.1


def test_a_batch_without_a_token_to_count_moves_only_the_schedule() -> None:
    step, batch = adaptive_step(), make_batch(P=4, G=4)
    before = [p.detach().clone() for p in step.parameters]
    batch["masks", "loss"] = torch.zeros_like(batch["masks", "loss"])
    assert step(batch).keys() == {"optimizer/lr", "optimizer/skipped"}
    assert step.scheduler.last_epoch == 1
    assert all(torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))
