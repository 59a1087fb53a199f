"""Optimizer steps on pretended GPUs: model families, planted faults, and bounds on what makes a step slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import batches
import pytest
import torch
from batches import make_batch, make_model, make_objective, no_budget
from pretended_cuda import DeviceMismatch, PretendedCuda
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.config.schema import OptimizerConfig
from torchrl_grpo.inference.protocol import Request
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.objectives import loss
from torchrl_grpo.objectives.surrogates import SURROGATES
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.training import optimizer_step
from torchrl_grpo.training.optimizer_step import OptimizerStep

pytestmark = pytest.mark.slow

EXPERTS = {"num_experts_per_tok": 2}
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**batches._COMMON, **EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**batches._COMMON, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}),
}
FAMILIES = (
    *(
        "llama",
        "llama_tied",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3",
        "mistral_sliding",
        "phi3",
        "gpt2",
    ),
    *MORE_FAMILIES,
)

# Bounds on a micro-batch whose prompts are all of one length, as are its responses. Beside each bound is what
# was measured. A model of 28 layers starts 4,400 kernels, which takes a CPU about 30 ms: a GPU that computes
# faster than that waits for it. Raise a bound only with a reason.
KERNELS_PER_LAYER = 160  # 149
KERNELS_BESIDE_LAYERS = 190  # 178
# Whatever depends on lengths is computed on the CPU, and metrics are read once a step.
SYNCS_PER_MICRO_BATCH = 0
UPLOADS_PER_MICRO_BATCH = 6  # 5: index vectors of scoring and of attention, and what the loss reads
# The same with attention for variable lengths, whatever the lengths are. A call of its stand-in counts as one
# kernel.
VARLEN_KERNELS_PER_LAYER = 160  # 153
VARLEN_KERNELS_OF_A_RAGGED_STEP = 550  # 520
VARLEN_SYNCS_OF_A_RAGGED_STEP = 2
# Clipping and AdamW take all parameters at once.
KERNELS_PER_UPDATE = 10  # 0 to 5
CASTS = 14  # matrices of two layers
SYNCS_PER_UPDATE = 2  # for the metrics and for the norm
# Lengths of a real batch fall into classes, each with attention of its own. Two layers, 8 groups of 8.
KERNELS_OF_A_RAGGED_STEP = 1450
SYNCS_OF_A_RAGGED_STEP = 2
# Of the transformers engine with two layers, for one more token of every row.
KERNELS_PER_TOKEN = 145  # 138
SYNCS_PER_TOKEN = 2  # transformers asks whether the mask hides anything, and the tokens are read
UPLOADS_PER_TOKEN = 0


@pytest.fixture(autouse=True)
def _more_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in MORE_FAMILIES.items():
        monkeypatch.setitem(batches.FAMILIES, name, family)


def make_step(
    family: str = "llama",
    groups: int = 4,
    micro_batches: int = 1,
    autocast: torch.dtype | None = torch.bfloat16,
    layers: int = 2,
    varlen: bool = False,
    **policy: Any,
) -> OptimizerStep:
    """A step of a model on ``cuda:0``."""
    depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    model = make_model(family, **depth).to("cuda")
    fuse_norms(model)
    scorer = TokenScorer(model, autocast_dtype=autocast)
    scorer.varlen = varlen
    objective, _ = make_objective(scorer, **policy)
    return OptimizerStep(
        model,
        objective,
        OptimizerConfig(),
        total_steps=2,
        groups_per_batch=groups,
        num_pieces=micro_batches,
        budget=no_budget(),
        use_scaler=autocast == torch.float16,
        max_skipped_steps=1,
    )


@pytest.mark.filterwarnings("ignore:.*prompts are run once per response")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_a_family(family: str) -> None:
    with PretendedCuda() as machine:
        step = make_step(family, kl_coef=0.1, entropy_coef=0.01)
        metrics = [step(make_batch()) for _ in range(2)]
        assert {p.device for p in step.parameters} == {torch.device("cuda:0")} == machine.allocated
        assert machine.autocasts == {torch.bfloat16}
    assert metrics[0]["loss/total"] != metrics[1]["loss/total"], "it should have moved"


@pytest.mark.parametrize("autocast", [None, torch.float16], ids=str)
def test_a_step_in_another_format(autocast: torch.dtype | None) -> None:
    with PretendedCuda() as machine:
        make_step(autocast=autocast, micro_batches=2)(make_batch())
        assert machine.autocasts == ({autocast} if autocast else set())


def test_a_reference_on_another_gpu_scores_a_batch_of_the_trainers() -> None:
    with PretendedCuda(gpus=3):
        scored = reference_on_cuda_2(make_batch(kl=False).to("cuda:0"))
    assert scored["log_probs", "reference"].shape == scored["tokens", "response"].shape


def reference_on_cuda_2(batch: TensorDict) -> TensorDict:
    scorer = LogProbScorer(TokenScorer(make_model().to("cuda:2")), "reference", no_budget())
    scored = scorer._inv_call(batch)
    assert isinstance(scored, TensorDict)
    return scored


Change = Callable[[Tensor, Tensor], Tensor]
LOSS_FAULTS: dict[str, tuple[Change, str]] = {
    "a buffer made on the CPU": (lambda new, advantage: new * torch.ones(new.shape), "mul"),
    "an advantage left on the CPU": (lambda new, advantage: new + advantage.cpu(), "add"),
    "a coefficient kept on another GPU": (
        lambda new, advantage: new * torch.ones((), device="cuda:1"),
        "mul",
    ),
    "an index made on the CPU": (
        lambda new, advantage: new.index_select(0, torch.arange(len(new))),
        "index_select",
    ),
    "a scan in numpy": (lambda new, advantage: new * float(new.detach().numpy().max()), "numpy"),
    "noise of a generator for the CPU": (
        lambda new, advantage: (
            new + torch.empty_like(new).normal_(generator=torch.Generator().manual_seed(0))
        ),
        "generator for cpu",
    ),
    "a term summed on the CPU": (
        lambda new, advantage: new + torch.zeros(()).add_(new.detach().sum()),
        "add_",
    ),
}


@pytest.mark.parametrize("fault", LOSS_FAULTS)
def test_a_fault_in_the_loss_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, (change, message) = SURROGATES["clip"], LOSS_FAULTS[fault]

    def faulty(log_ratio: Tensor, new: Tensor, advantage: Tensor, *rest: Any) -> Any:
        return honest(log_ratio, change(new, advantage), advantage, *rest)

    monkeypatch.setitem(SURROGATES, "clip", faulty)
    with (
        pytest.raises(DeviceMismatch, match=rf"{message}.* at test_pretended_cuda_steps\.py"),
        PretendedCuda(gpus=2),
    ):
        make_step()(make_batch())


def test_a_forgotten_move_is_found() -> None:
    with pytest.raises(DeviceMismatch), PretendedCuda() as machine:
        step = make_step()
        machine.forgetful = {"transfer.py"}
        step(make_batch())


def test_a_forgotten_move_in_the_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "upload", lambda tensor, device: tensor)
    with pytest.raises(DeviceMismatch, match=r"at loss\.py"), PretendedCuda():
        make_step()(make_batch())


@pytest.mark.parametrize(
    ("file", "message"),
    [("token_scorer.py", "cuda:0, cpu"), ("transfer.py", "cuda:2, cpu")],
    ids=["of what it reads", "of its indices"],
)
def test_a_forgotten_move_of_a_reference_is_found(file: str, message: str) -> None:
    with pytest.raises(DeviceMismatch, match=message), PretendedCuda(gpus=3) as machine:
        machine.forgetful = {file}
        reference_on_cuda_2(make_batch(kl=False).to("cuda:0"))


def even_batch(groups: int, samples: int = 4) -> TensorDict:
    """Prompts of one length and responses of one length."""
    batch = make_batch(P=groups, G=samples)
    for mask in ("prompt", "response", "loss"):
        batch["masks", mask].fill_(True)
    return batch


def count(batch: TensorDict, micro_batches: int = 1, **options: Any) -> tuple[int, int, int]:
    """Kernels, syncs and uploads of a second step: the first one makes the optimizer's moments."""
    with PretendedCuda() as machine:
        step = make_step(groups=len(batch), micro_batches=micro_batches, **options)
        step(batch.clone())
        machine.reset()
        step(batch.clone())
        return machine.launches, machine.syncs.total(), machine.uploads.total()


def test_a_micro_batch_starts_few_kernels_and_waits_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, syncs, uploads = count(even_batch(4), micro_batches=4)
    kernels_1, syncs_1, uploads_1 = count(even_batch(4))
    assert kernels - kernels_1 <= 3 * (2 * KERNELS_PER_LAYER + KERNELS_BESIDE_LAYERS)
    assert syncs - syncs_1 <= 3 * SYNCS_PER_MICRO_BATCH
    assert uploads - uploads_1 <= 3 * UPLOADS_PER_MICRO_BATCH
    # What is left of a step with one micro-batch is the update, and the casts of its weights.
    assert kernels_1 - (kernels - kernels_1) / 3 <= KERNELS_PER_UPDATE + CASTS
    assert syncs_1 - (syncs - syncs_1) / 3 <= SYNCS_PER_UPDATE
    monkeypatch.setattr(optimizer_step, "cast_weights_once", lambda device, passes: nullcontext())
    assert count(even_batch(4), micro_batches=4)[0] == kernels + 3 * CASTS, "casts in every micro-batch"


def test_layers_start_kernels_and_never_wait() -> None:
    kernels, *waits = count(even_batch(2))
    kernels_4, *waits_4 = count(even_batch(2), layers=4)
    assert kernels_4 - kernels <= 2 * KERNELS_PER_LAYER
    assert waits_4 == waits


def test_more_responses_in_a_micro_batch_cost_no_kernel() -> None:
    few, more = count(even_batch(2)), count(even_batch(6, samples=8))
    assert more == few


def test_a_ragged_batch_stays_bounded() -> None:
    kernels, syncs, uploads = count(make_batch(P=8, G=8, T=40))
    assert kernels <= KERNELS_OF_A_RAGGED_STEP
    assert syncs <= SYNCS_OF_A_RAGGED_STEP
    assert uploads <= UPLOADS_PER_MICRO_BATCH


@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_with_attention_for_variable_lengths_a_ragged_batch_is_as_fast_as_an_even_one(family: str) -> None:
    batch = make_batch(P=4, G=4, T=20)
    kernels, syncs, uploads = count(batch, varlen=True, family=family)
    assert kernels <= VARLEN_KERNELS_OF_A_RAGGED_STEP
    assert syncs <= VARLEN_SYNCS_OF_A_RAGGED_STEP
    assert uploads <= UPLOADS_PER_MICRO_BATCH
    kernels_4, *waits_4 = count(batch, varlen=True, family=family, layers=4)
    assert kernels_4 - kernels <= 2 * VARLEN_KERNELS_PER_LAYER
    assert waits_4 == [syncs, uploads], "layers never wait"
    assert count(even_batch(2), varlen=True, family=family)[0] == kernels


def test_a_generated_token_starts_few_kernels_and_waits_seldom() -> None:
    def generated(tokens: int, rows: int) -> Counter[str]:
        engine = TransformersEngine(
            make_model().to("cuda"), eos_token_ids=[batches.END], pad_token_id=batches.PAD
        )
        machine.reset()
        engine.submit(
            [Request(row, [3, 4], tokens, temperature=1.0, seed=row, ignore_eos=True) for row in range(rows)]
        )
        ended = 0
        while ended < rows:
            ended += len(engine.step())
        return Counter(kernels=machine.launches, syncs=machine.syncs.total(), uploads=machine.uploads.total())

    with PretendedCuda() as machine:
        of_8_tokens = [generated(12, rows) - generated(4, rows) for rows in (2, 8)]
    assert of_8_tokens[0] == of_8_tokens[1], "rows are generated side by side"
    assert of_8_tokens[0] <= Counter(
        kernels=8 * KERNELS_PER_TOKEN, syncs=8 * SYNCS_PER_TOKEN, uploads=8 * UPLOADS_PER_TOKEN
    )
