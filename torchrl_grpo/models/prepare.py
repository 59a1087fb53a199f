"""What a model needs before it is trained: no dropout, nothing trained in vain, attention and gradient
checkpointing as asked.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import PreTrainedModel

from torchrl_grpo.config import TrainModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.logprobs import TokenScorer, check_head, warn_about_prefix
from torchrl_grpo.models.quantization import keep_packing

# Rounding, in nats; anything beyond means the model's forward does more than its head, or that packing
# changes it. A model is in 16 bits only as the frozen base of adapters.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}


def prepare_for_training(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Set ``model`` up in place.

    Dropout is switched off: the ratio of new to old policy must come from the update, not from a mask.

    Raises:
        ModelError: its log-probabilities cannot be computed from backbone and head, or gradient checkpointing
            is asked for and its dropout cannot be switched off.
    """
    model.eval()
    keep_packing(model)
    _freeze_other_inputs(model)
    if cfg.attn_implementation != "auto":
        _set_attention(model, cfg.attn_implementation)
    try:
        gap = check_head(model)
    except ValueError as error:
        raise ModelError(f"{type(model).__name__}: {error}; choose another model.name") from error
    if gap > _TOLERANCE[model.dtype]:
        raise ModelError(
            f"{type(model).__name__}: its logits differ by {gap:.3g} from its output head applied to its "
            "last hidden state, so its forward scales or shifts them in a way this version does not "
            "know; choose another model.name"
        )
    if not cfg.gradient_checkpointing:
        return
    with torch.no_grad():
        expected = TokenScorer(model, shares_prefix=False)(*_trial()).log_probs
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Transformers recomputes activations in training mode only.
    _switch_dropout_off(model)
    model.train()
    with torch.no_grad():
        gap = float((TokenScorer(model, shares_prefix=False)(*_trial()).log_probs - expected).abs().max())
    if gap > _TOLERANCE[model.dtype]:
        raise ModelError(
            f"{type(model).__name__}: in training mode, which gradient checkpointing needs, its "
            f"log-probabilities change by {gap:.3g}, so it drops something out that cannot be switched off; "
            "write train_model.gradient_checkpointing=false"
        )


def _freeze_other_inputs(model: PreTrainedModel) -> None:
    """Freeze what takes images or sound: text gives it no gradient, for which training ranks would wait."""
    if model.config is model.config.get_text_config():
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in of_text:
            parameter.requires_grad_(False)


def _switch_dropout_off(model: PreTrainedModel) -> None:
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Models that call the function keep its probability as a number: dropout, attn_pdrop, layerdrop.
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def _set_attention(model: PreTrainedModel, wanted: str) -> None:
    """Switch to the attention ``wanted``, or say why the model keeps the one it has."""
    config = model.config.get_text_config()
    before, reason = config._attn_implementation, "this model cannot change its own"
    try:
        model.set_attn_implementation(wanted)
    except (ImportError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if config._attn_implementation != wanted:
        warnings.warn(
            f"train_model.attn_implementation={wanted} cannot be used ({reason}); {before} is used instead",
            stacklevel=3,
        )


def _trial() -> tuple[torch.Tensor, ...]:
    """A few tokens in two groups of two, ragged, as a scorer takes them."""
    prompt = torch.arange(3, 9).view(2, 3)
    prompt_mask = torch.tensor([[False, True, True], [True, True, True]])
    response = torch.arange(9, 21).view(2, 2, 3)
    mask = torch.tensor(
        [[[True, True, True], [True, False, False]], [[True, True, False], [True, True, True]]]
    )
    return prompt, prompt_mask, response, mask


def compile_layers(model: PreTrainedModel, scorer: TokenScorer) -> None:
    """Compile the decoder layers with ``torch.compile``, in place; warns where that cannot be done.

    Layer by layer, as they are alike: what is compiled for the first serves all of them. Sizes are left open,
    since the number of tokens changes with every micro-batch.

    Args:
        model: prepared, and not yet divided among ranks.
        scorer: around it; tried on a few tokens, there and back.
    """
    names = model._no_split_modules or []
    layers = [module for module in model.modules() if type(module).__name__ in names]
    # Without mixed precision, where both round alike; that it works with it is tried, too.
    exact = TokenScorer(model, shares_prefix=scorer.shares_prefix)
    with torch.no_grad():
        expected = exact(*_trial()).log_probs
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        found = [one(*_trial()).log_probs for one in (exact, scorer)]
        torch.stack([one.sum() for one in found]).sum().backward()
    except (RuntimeError, OSError) as error:
        # Of a backend's error the first line is only its name.
        why = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
    else:
        gap = float((found[0].detach() - expected).abs().max())
        why = "" if gap <= _TOLERANCE[model.dtype] else f"its log-probabilities would change by {gap:.2g}"
    finally:
        model.zero_grad(set_to_none=True)
    if not why and layers:
        return
    for layer in layers:
        layer._compiled_call_impl = None
    reason = why or "it does not say which of its modules are layers"
    warnings.warn(f"train_model.compile=true: {type(model).__name__} runs as it is ({reason})", stacklevel=2)


def shares_prefix(model: PreTrainedModel) -> bool:
    """Whether running a prompt once for several responses gives this model's numbers, tried on a few tokens.

    A model may take its positions from something that packing or a repeated cache does not carry (ALiBi,
    recurrent states); no list of names would be complete, so it is measured. Warns when the answer is no.
    """
    batch = _trial()
    attention = model.config.get_text_config()._attn_implementation
    with torch.no_grad():
        # Before anything is changed about the model's attention.
        expected = TokenScorer(model, shares_prefix=False)(*batch).log_probs
        if not TokenScorer(model).shares_prefix:
            return False
        try:
            gap = float((TokenScorer(model)(*batch).log_probs - expected).abs().max())
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            why = f"it cannot ({type(error).__name__}: {error})"
        else:
            if gap <= _TOLERANCE[model.dtype]:
                return True
            why = f"its log-probabilities would change by {gap:.2g}"
    model.set_attn_implementation(attention)
    warn_about_prefix(model, why)
    return False
