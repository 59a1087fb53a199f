"""Parts of a run that take more than a call to put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import needs_reference
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.inference.protocol import Inference
from torchrl_grpo.models import lora
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer
from torchrl_grpo.training.learner import Learner
from torchrl_grpo.weight_sync.probe import probe_prompts
from torchrl_grpo.weight_sync.publisher import WeightPublisher

_COARSENESS = (torch.float32, torch.float16, torch.bfloat16)


def build_reference(
    cfg: Config, source: str, devices: Sequence[str], learner: Learner
) -> LogProbScorer | None:
    """The reference scorer; None, and no model in memory, where no coefficient asks for one.

    With adapters the reference is their base, which is in memory already: the model without its adapters.

    Args:
        cfg: ``policy``, ``ref_model``, ``train_model`` and ``model`` are read.
        source: folder or hub name of the reference model.
        devices: where it runs; on each a copy, which scores its share of the groups.
        learner: holds the trained model, whose number format is used where the reference is in float32 too.
    """
    if not needs_reference(cfg.policy):
        return None
    temperature = cfg.inference_model.temperature
    if cfg.train_model.lora.rank > 0:
        policy = learner.model
        form = learner.autocast_dtype, learner.shares_prefix
        scorer = TokenScorer(policy, temperature, *form, head_dtype=learner.scorer.head_dtype)
        off = partial(lora.adapters_off, policy)
        return LogProbScorer(scorer, "reference", learner.make_budget(), off)
    form = learner.autocast_dtype, learner.shares_prefix
    (scorer, budget), *others = (
        (load_reference(cfg, source, torch.device(device), *form), learner.make_budget())
        for device in devices
    )
    return LogProbScorer(scorer, "reference", budget, others=others)


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
    learner: Learner,
    engine: Inference,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    precision: torch.dtype,
    engine_dtype: torch.dtype,
    warn: Callable[[str], None],
) -> WeightPublisher:
    """The publisher, with a probe cut from the first training prompts.

    Args:
        cfg: ``inference_model`` is read.
        learner: holds what is published.
        engine: takes the weights.
        tokenizer: renders the prompts.
        examples: of training.
        precision: see :func:`coarser`.
        engine_dtype: of the engine.
        warn: where warnings go.
    """
    first = [examples[index] for index in range(min(8, len(examples)))]
    length = min(40, cfg.inference_model.max_model_len - 1)
    prompts = [render(tokenizer, example.messages)[1] for example in first]
    return WeightPublisher(
        learner.published(),
        learner.prober(),
        engine,
        probe_prompts(prompts, length=length),
        tokenizer.pad_token_id,
        precision,
        engine_dtype,
        cfg.inference_model.max_logprob_gap,
        warn,
        cfg.inference_model.backend,
    )
