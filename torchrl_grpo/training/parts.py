"""Parts of a run that take more than a call to put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.inference.protocol import Inference
from torchrl_grpo.models import loading, lora
from torchrl_grpo.models.logprobs import TokenScorer
from torchrl_grpo.models.precision import resolve_autocast, resolve_dtype
from torchrl_grpo.objectives.control import needs_reference
from torchrl_grpo.rollout.log_probs import LogProbScorer
from torchrl_grpo.rollout.micro_batches import TokenBudget
from torchrl_grpo.rollout.seeds import derive_seed
from torchrl_grpo.training.publish import WeightPublisher, probe_prompts

_COARSENESS = (torch.float32, torch.float16, torch.bfloat16)


def weights_source(cfg: Config, source: str, resume_from: Path | None) -> str:
    """What model and engines are loaded from: ``source``, or the model of the checkpoint that is resumed.

    A checkpoint of adapters holds no model: with them it is ``source``, whose weights are frozen.
    """
    if resume_from is None or cfg.train_model.lora.rank > 0:
        return source
    return str(resume_from / "model")


def build_model(cfg: Config, weights: str, device: torch.device, resume_from: Path | None) -> PreTrainedModel:
    """The model that is trained, in float32; with ``train_model.lora`` adapters in float32 on a frozen base.

    Args:
        cfg: ``model``, ``train_model`` and ``seed`` are read.
        weights: see :func:`weights_source`.
        device: where it runs.
        resume_from: a checkpoint whose adapters to take, or None.

    Raises:
        ConfigError: the adapters are for layers that the model does not have.
    """
    adapters = cfg.train_model.lora
    if adapters.rank == 0:
        return loading.load_model(weights, cfg.model, device, torch.float32)
    dtype = resolve_autocast(cfg.train_model.autocast, device) or torch.float32
    if adapters.base_dtype != "auto":
        dtype = resolve_dtype(adapters.base_dtype, device)
    model = loading.load_model(weights, cfg.model, device, dtype, cfg.train_model.quantization)
    lora.add_adapters(model, adapters, derive_seed(cfg.seed, "lora"))
    if resume_from is not None:
        lora.load_adapters(model, resume_from / "model")
    return model


def build_reference(
    cfg: Config,
    policy: PreTrainedModel,
    source: str,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    shares_prefix: bool,
    budget: Callable[[], TokenBudget],
) -> LogProbScorer | None:
    """The reference scorer; None, and no model in memory, where no coefficient asks for one.

    With adapters the reference is their base, which is in memory already: ``policy`` without its adapters.

    Args:
        cfg: ``policy``, ``ref_model``, ``train_model`` and ``model`` are read.
        policy: the model that is trained.
        source: folder or hub name of the reference model.
        device: where it runs.
        autocast_dtype: the trainer's, used where the reference is held in float32 too.
        shares_prefix: run a prompt once for all its responses.
        budget: makes one of its own: what another device or model can hold says nothing about the trainer.
    """
    if not needs_reference(cfg.policy):
        return None
    temperature = cfg.inference_model.temperature
    if cfg.train_model.lora.rank > 0:
        scorer = TokenScorer(policy, temperature, autocast_dtype, shares_prefix)
        return LogProbScorer(scorer, "reference", budget(), partial(lora.adapters_off, policy))
    dtype = resolve_dtype(cfg.ref_model.dtype, device)
    if cfg.ref_model.dtype == "auto" and cfg.ref_model.refresh_mix < 1:
        # In 16 bits, most steps of a slow average round to nothing.
        dtype = torch.float32
    model = loading.load_model(source, cfg.model, device, dtype).requires_grad_(False)
    same_format = autocast_dtype if dtype == torch.float32 else None
    scorer = TokenScorer(model, temperature, same_format, shares_prefix)
    return LogProbScorer(scorer, "reference", budget())


def coarser(
    cfg: Config, device: torch.device, model: PreTrainedModel, autocast_dtype: torch.dtype | None
) -> torch.dtype:
    """The coarsest of the number formats of the engine on ``device``, of ``model`` and of its products."""
    engine_dtype = resolve_dtype(cfg.inference_model.dtype, device)
    return max(engine_dtype, model.dtype, autocast_dtype or torch.float32, key=_COARSENESS.index)


def update_format(cfg: Config, device: torch.device, precision: torch.dtype) -> torch.dtype:
    """The format that updates must not vanish in: that of :func:`coarser`, and for adapters the engine's."""
    return resolve_dtype(cfg.inference_model.dtype, device) if cfg.train_model.lora.rank > 0 else precision


def build_publisher(
    cfg: Config,
    model: PreTrainedModel,
    scorer: TokenScorer,
    engine: Inference,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    precision: torch.dtype,
) -> WeightPublisher:
    """The publisher, with a probe cut from the first training prompts.

    Args:
        cfg: ``inference_model`` is read.
        model: what is published.
        scorer: around it, at temperature 1.
        engine: takes the weights.
        tokenizer: renders the prompts.
        examples: of training.
        precision: see :func:`coarser`.
    """
    first = [examples[index] for index in range(min(8, len(examples)))]
    length = min(40, cfg.inference_model.max_model_len - 1)
    prompts = [render(tokenizer, example.messages)[1] for example in first]
    return WeightPublisher(
        model,
        scorer,
        engine,
        probe_prompts(prompts, length=length),
        tokenizer.pad_token_id,
        precision,
        cfg.inference_model.max_logprob_gap,
    )
