"""What the policy, its reference and the engine do alike: the head's numbers, and no plans of cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import inputs, make_batch, make_model
from pretended_cuda import PretendedCuda
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Autocast, Dtype, HeadDtype
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.inference import vllm_engine
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.precision import autocast
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.training.build import build_reference
from torchrl_grpo.training.learner import Learner, LearnerSpec

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_model_dir: Path) -> Config:
    cfg = Config()
    cfg.model.name, cfg.ref_model.dtype, cfg.train_model.autocast = (
        str(tiny_model_dir),
        Dtype("float32"),
        Autocast("bf16"),
    )
    cfg.policy.kl_coef = 0.1
    return cfg


@pytest.fixture(autouse=True)
def _cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


class Casts(TorchDispatchMode):
    """Records the shapes of tensors that change their format."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self._shapes.append(args[0].shape)
        return func(*args, **kwargs or {})

    def of(self, shape: torch.Size) -> int:
        """Return how many had a shape."""
        return sum(each == shape for each in self._shapes)


def make_learner(cfg: Config, device: torch.device = CPU) -> Learner:
    return Learner(
        LearnerSpec(cfg, cfg.model.name, None, (1.0,)),
        device,
        ranks=Ranks(on_cpu=True),
        notify=lambda text: None,
    )


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapters"])
@pytest.mark.parametrize(("head_dtype", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_policy_and_reference_compute_their_heads_alike(
    head_dtype: str, dtype: torch.dtype, rank: int, config: Config
) -> None:
    config.train_model.head_dtype, config.train_model.lora.rank = HeadDtype(head_dtype), rank
    with warnings.catch_warnings():
        # Of a base in bfloat16, PEFT warns.
        warnings.simplefilter("ignore")
        learner = make_learner(config)
    reference = build_reference(config, config.model.name, ["cpu"], learner)
    assert reference is not None
    batch = make_batch(P=2, G=2)
    policy, other = learner.scorer, reference.scorer
    assert policy._head_options().dtype == other._head_options().dtype == dtype
    with torch.no_grad():
        assert torch.equal(*(scorer(*inputs(batch)).log_probs for scorer in (policy, other)))


def test_memory_that_shards_have_freed_goes_back_to_the_driver(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in another process takes its share of a GPU from what the driver has."""
    events: list[str] = []

    def record(scorer: TokenScorer, *arguments: Any) -> TokenScorer:
        events.append("shards")
        return scorer

    monkeypatch.setattr("torchrl_grpo.training.learner.distribute", record)
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty_cache"))
        make_learner(config, torch.device("cuda:0"))
        monkeypatch.undo()
    assert events[-2:] == ["shards", "empty_cache"]


def test_autocast_keeps_copies_of_weights_for_gradients_alone() -> None:
    def num_casts() -> int:
        casts = Casts()
        with autocast(torch.bfloat16, CPU), casts:
            for _ in range(3):
                layer(torch.ones(1, 4))
        return casts.of(layer.weight.shape)

    layer = torch.nn.Linear(4, 5)
    assert num_casts() == 1
    with torch.no_grad():
        assert num_casts() == 3, "each copy ends with its product"


def test_a_frozen_model_has_micro_batches_of_its_own_size(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher may run a prompt once per response although the policy does not."""

    def unshared(*arguments: Any) -> TokenScorer:
        cfg, source, device, dtype, _ = arguments
        return load_reference(cfg, source, device, dtype, False)

    monkeypatch.setattr("torchrl_grpo.training.build.load_reference", unshared)
    reference = build_reference(config, config.model.name, ["cpu"], make_learner(config))
    assert reference is not None
    batch = make_batch(P=2, G=2)
    assert reference.budget.costs(batch) == TokenBudget(1, False, print).costs(batch)


@pytest.mark.parametrize(("head_dtype", "dtype"), [("auto", None), ("float32", torch.float32)])
@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_engines_compute_their_heads_as_they_are_told(
    backend: str, head_dtype: str, dtype: torch.dtype | None, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_options: dict[str, Any] = {}
    monkeypatch.setattr(vllm_engine, "VLLMEngine", lambda source, **options: engine_options.update(options))
    config.inference_model.backend, config.inference_model.dtype = backend, Dtype("bfloat16")
    config.inference_model.head_dtype = HeadDtype(head_dtype)
    engine = build_engine(config, config.model.name, CPU, [2], 0, 1)
    if backend == "vllm":
        assert engine_options["head_dtype"] == dtype
        return
    assert isinstance(engine, TransformersEngine)
    logits = engine.model(input_ids=torch.ones(1, 2, dtype=torch.int64)).logits
    assert logits.dtype is (dtype or torch.bfloat16)


def test_nothing_that_computes_with_transformers_lets_cudnn_plan_attention(config: Config) -> None:
    # cuDNN makes a plan for each new shape, about a second each, and micro-batches have new shapes always.
    def asked_again() -> bool:
        enabled = bool(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(True)
        return enabled

    assert asked_again()
    load_reference(config, config.model.name, CPU, None, shares_prefix=True)
    assert not asked_again(), "the reference"
    TransformersEngine(make_model(), [2], 0)
    assert not asked_again(), "the engine"
    make_learner(config)
    assert not asked_again(), "the trainer"
