"""The output head in blocks: values and gradients against full logits in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_cuda import PretendedCuda
from rounding import EXACT, float64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_grpo.models.scoring.head import HeadOptions, score_tokens, top_tokens


def problem(n: int, width: int, vocab: int, *, bias: bool = False, seed: int = 0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g)
    weight = torch.randn(vocab, width, generator=g)
    return [hidden, torch.randint(0, vocab, (n,), generator=g), weight, torch.randn(vocab) if bias else None]


def full(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> Any:
    """The definition, with all logits at once."""
    logits = options.scale * (hidden @ weight.T + (0 if bias is None else bias))
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    log_p = torch.log_softmax(logits / options.temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def with_gradients(score: Any, inputs: list[Any], by_entropy: bool) -> tuple[list[Tensor], ...]:
    hidden, targets, weight, bias = inputs
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    rest = leaves[2] if bias is not None else None
    log_probs, entropy = score(leaves[0], targets, leaves[1], rest)
    slope = torch.linspace(-1, 1, len(targets), dtype=hidden.dtype)
    loss = (slope * log_probs).sum()
    if by_entropy:
        loss = loss + (slope.flip(0) * entropy).sum()
    loss.backward()
    return [log_probs.detach(), entropy.detach()], [leaf.grad for leaf in leaves]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [1, 7, 64, 500, 10**7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(
    "temperature,softcap,scale", [(1.0, None, 1.0), (0.6, None, 0.25), (1.3, 4.0, 1.0), (1.3, 4.0, 0.5)]
)
def test_blocks_equal_full_logits_with_gradients(
    block: int, bias: bool, entropy_gradient: bool, temperature: float, softcap: float | None, scale: float
) -> None:
    inputs = problem(9, 6, 23, bias=bias)
    options = HeadOptions(temperature, softcap, torch.float64, entropy_gradient, scale)
    values, gradients = with_gradients(lambda *args: full(*args, options), inputs, entropy_gradient)
    outputs, slopes = with_gradients(
        lambda *args: score_tokens(*args, options, block), inputs, entropy_gradient
    )
    for ours, theirs in zip([*outputs, *slopes], [*values, *gradients], strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [1, 64, 10**7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature,softcap,scale", [(0.6, None, 0.25), (1.3, 4.0, 1.0)])
def test_several_targets_of_a_position_equal_full_logits_with_gradients(
    block: int, entropy_gradient: bool, temperature: float, softcap: float | None, scale: float
) -> None:
    hidden, _, weight, bias = problem(9, 6, 23, bias=True)
    # The same token may be there twice.
    targets = torch.randint(0, 23, (9, 4), generator=torch.Generator().manual_seed(1))
    targets[0, 1] = targets[0, 0]
    options = HeadOptions(temperature, softcap, torch.float64, entropy_gradient, scale)
    slopes = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    # A row without a slope is left out of the backward pass.
    slopes[3] = 0.0

    def columns(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor) -> Any:
        scores = [full(hidden, column, weight, bias, options) for column in targets.unbind(1)]
        return torch.stack([log_probs for log_probs, _ in scores], 1), scores[0][1]

    results = []
    for score in (columns, lambda *args: score_tokens(*args, options, block)):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        log_probs, entropy = score(leaves[0], targets, leaves[1], leaves[2])
        loss = (slopes * log_probs).sum() + (entropy.sum() if entropy_gradient else 0.0)
        results.append([log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [1, 40, 10**7])
@pytest.mark.parametrize("count", [1, 5, 23])
def test_the_most_probable_tokens_are_those_of_full_logits(block: int, count: int) -> None:
    hidden, _, weight, bias = problem(9, 6, 23, bias=True)
    options = HeadOptions(0.6, dtype=torch.float64)
    expected = (hidden @ weight.T + bias).topk(count, 1).indices
    assert torch.equal(top_tokens(hidden, weight, bias, options, count, block), expected)
    assert top_tokens(hidden[:0], weight, bias, options, count, block).shape == (0, count)


@given(n=st.integers(1, 12), vocab=st.integers(1, 40), block=st.integers(1, 600), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_any_shape_and_block(n: int, vocab: int, block: int, seed: int) -> None:
    options = HeadOptions(dtype=torch.float64)
    with float64():
        inputs = problem(n, 5, vocab, seed=seed)
        outputs, expected = score_tokens(*inputs, options, block), full(*inputs, options)
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, **EXACT)


@pytest.mark.usefixtures("float64")
def test_large_logits_do_not_overflow() -> None:
    inputs = problem(8, 6, 50)
    inputs[2] = inputs[2] * 300
    options = HeadOptions(dtype=torch.float64)
    log_probs, entropy = score_tokens(*inputs, options, block_elements=20)
    expected, _ = full(*inputs, options)
    assert float(expected.min()) < -1000, "the exponential of all logits would be finite"
    torch.testing.assert_close(log_probs, expected, **EXACT)
    assert entropy.isfinite().all() and (entropy > -1e-9).all()


@pytest.mark.usefixtures("float64")
def test_the_gradient_passes_gradcheck() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 6, 3])
    options = HeadOptions(0.8, 3.0, torch.float64, entropy_gradient=True)
    assert torch.autograd.gradcheck(
        lambda h, w: score_tokens(h, targets, w, None, options, 10), (hidden, weight)
    )


@pytest.mark.usefixtures("float64")
def test_rows_without_a_gradient_are_left_out_of_the_backward_pass() -> None:
    hidden, targets, weight, _ = problem(6, 4, 11)
    hidden.requires_grad_()
    weight.requires_grad_()
    options = HeadOptions(dtype=torch.float64)
    log_probs, _ = score_tokens(hidden, targets, weight, options=options)
    (log_probs * torch.tensor([0.0, 1.0, 0.0, 0.0, -2.0, 0.0])).sum().backward()
    assert hidden.grad[[0, 2, 3, 5]].eq(0).all() and hidden.grad[[1, 4]].abs().sum(-1).gt(0).all()
    again = hidden.detach().clone().requires_grad_()
    expected, _ = full(again, targets, weight.detach(), None, options)
    (expected[1] - 2 * expected[4]).backward()
    torch.testing.assert_close(hidden.grad, again.grad, **EXACT)


def test_a_frozen_weight_gets_no_gradient_and_no_tokens_are_no_error() -> None:
    hidden, targets, weight, _ = problem(5, 4, 11)
    log_probs, _ = score_tokens(hidden.requires_grad_(), targets, weight)
    log_probs.sum().backward()
    assert weight.grad is None and hidden.grad.any()
    nothing, entropy = score_tokens(hidden[:0], targets[:0], weight)
    assert nothing.shape == entropy.shape == (0,)


def test_no_more_than_a_block_of_logits_is_ever_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(40, 6, 1000)
    inputs[0].requires_grad_()
    sizes: list[int] = []
    linear = torch.nn.functional.linear

    def counting(*args: Any) -> Tensor:
        out = linear(*args)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr("torchrl_grpo.models.scoring.head.F.linear", counting)
    log_probs, _ = score_tokens(*inputs, block_elements=500)
    assert max(sizes) <= 500 and sum(sizes) == 40 * 1000
    log_probs.sum().backward()
    # And all of them once more, in the backward pass.
    assert max(sizes) <= 500 and sum(sizes) == 2 * 40 * 1000


def test_bfloat16_operands_are_summed_in_float32() -> None:
    inputs = problem(16, 32, 200)
    exact, _ = full(inputs[0].double(), inputs[1], inputs[2].double(), None, HeadOptions())
    rough, _ = score_tokens(*inputs, options=HeadOptions(dtype=torch.bfloat16))
    gap = (rough.double() - exact).abs()
    assert rough.dtype == torch.float32 and 1e-4 < float(gap.max()) < 0.2


def test_a_float32_head_rounds_nothing_of_states_and_weights_in_bfloat16() -> None:
    inputs = [
        t.bfloat16().float() if t is not None and t.is_floating_point() else t for t in problem(16, 32, 200)
    ]
    exact = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    values, gradients = with_gradients(lambda *args: full(*args, HeadOptions()), exact, False)
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        options = HeadOptions(dtype=dtype)
        outputs, slopes = with_gradients(lambda *args, o=options: score_tokens(*args, o, 700), inputs, False)
        errors.append(
            [
                float((mine - right).norm() / right.norm())
                for mine, right in zip([outputs[0], *slopes], [values[0], *gradients], strict=True)
            ]
        )
    for error, rounded in zip(*errors, strict=True):
        assert 1e-3 < rounded < 0.1 and error < rounded / 100


@pytest.mark.parametrize(
    "options",
    [
        HeadOptions(dtype=torch.bfloat16),
        HeadOptions(0.7, dtype=torch.bfloat16, scale=0.5),
        HeadOptions(0.7, 30.0, torch.bfloat16, scale=0.5),
        HeadOptions(0.7, dtype=torch.bfloat16, entropy_gradient=True),
    ],
    ids=["plain", "temperature", "cap", "entropy"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gpu_does_not_round_products_of_16_bits(options: HeadOptions, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    # Logits of up to 60: in bfloat16 their neighbors are 0.25 apart.
    hidden = (3 * torch.randn(40, 32, generator=g)).bfloat16().float()
    weight = torch.randn(90, 32, generator=g).bfloat16().float()
    offset = torch.randn(90, generator=g) if bias else None
    targets, slopes = torch.randint(0, 90, (40,), generator=g), torch.randn(2, 40, generator=g)
    slopes[:, ::5] = 0
    if not options.entropy_gradient:
        slopes[1] = 0

    def run(device: str, score: Any, dtype: torch.dtype) -> list[Tensor]:
        tensors = [x for x in (hidden, weight, offset) if x is not None]
        leaves = [x.clone().to(device, dtype).requires_grad_() for x in tensors]
        log_probs, entropy = score(leaves[0], leaves[1], leaves[2] if bias else None)
        loss = (slopes[0].to(device) * log_probs).sum()
        if options.entropy_gradient:
            loss = loss + (slopes[1].to(device) * entropy).sum()
        loss.backward()
        results = [log_probs.detach(), *(x.grad for x in leaves if x.grad is not None)]
        return [value.cpu().double() for value in results]

    def exact(h: Tensor, w: Tensor, b: Tensor | None) -> Any:
        return full(h, targets, w, b, options)

    def blocks(h: Tensor, w: Tensor, b: Tensor | None) -> Any:
        return score_tokens(h, targets.to(h.device), w, b, options, block_elements=400)

    expected, on_cpu = run("cpu", exact, torch.float64), run("cpu", blocks, torch.float32)
    with PretendedCuda() as machine:
        on_gpu = run("cuda", blocks, torch.float32)
        assert not [where for where in machine.syncs if " head.py" in where], machine.syncs
    assert (on_gpu[0] - expected[0]).abs().max() < 2e-4 < 1e-2 < (on_cpu[0] - expected[0]).abs().max()
    for value, other, exactly in zip(on_gpu[1:], on_cpu[1:], expected[1:], strict=True):
        error, rounded = ((x - exactly).norm() / exactly.norm() for x in (value, other))
        assert error < 4e-3 and error < rounded


class _Passes(TorchDispatchMode):
    """Notes the operations that read or write all of ``size`` logits, other than products."""

    VIEWS = "view slice select transpose t unbind expand detach alias permute unsqueeze"
    OTHERS = "mm addmm addmm_ linear gather index_put_ scatter_add_ empty_like empty new_empty"

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.names = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        touched = [x for x in (*args, result) if isinstance(x, Tensor) and x.numel() == self.size]
        if touched and name not in f"{self.VIEWS} {self.OTHERS}".split():
            self.names.append(name)
        return result


def test_a_token_that_is_certain_has_no_gradient_where_logits_are_rounded() -> None:
    # 20.06 is no number of bfloat16. Its probability is 1, so nothing pushes it further.
    hidden = torch.tensor([[4.0, 1.0]], requires_grad=True)
    weight = torch.zeros(50, 2)
    weight[7] = torch.tensor([5.0, 0.06])
    log_probs, _ = score_tokens(
        hidden, torch.tensor([7]), weight.requires_grad_(), options=HeadOptions(dtype=torch.bfloat16)
    )
    log_probs.sum().backward()
    assert log_probs.abs().max() < 1e-3
    for leaf in (hidden, weight):
        assert leaf.grad is not None and leaf.grad.abs().max() < 1e-3


@pytest.mark.parametrize("forbidden", [-1e9, -torch.inf])
def test_a_bias_may_forbid_the_first_token(forbidden: float) -> None:
    hidden, targets, weight, bias = problem(6, 4, 11, bias=True)
    targets = targets.clamp(min=1)
    bias[0] = forbidden
    log_probs, _ = score_tokens(hidden, targets, weight, bias)
    expected, _ = score_tokens(hidden, targets - 1, weight[1:], bias[1:])
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "passes"),
    # Before blocks were merged at the end and products subtracted the normalizer: 9, 12 and 9.
    [("cuda", torch.bfloat16, 4), ("cpu", torch.bfloat16, 10), ("cpu", torch.float32, 5)],
    ids=str,
)
def test_few_passes_over_the_logits(device: str, dtype: torch.dtype, passes: int) -> None:
    with PretendedCuda() if device == "cuda" else nullcontext():
        hidden, targets, weight = (tensor.to(device) for tensor in problem(50, 32, 90)[:3])
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        with _Passes(50 * 90) as seen:
            log_probs, _ = score_tokens(leaves[0], targets, leaves[1], options=HeadOptions(dtype=dtype))
            log_probs.sum().backward()
    assert len(seen.names) == passes, seen.names
