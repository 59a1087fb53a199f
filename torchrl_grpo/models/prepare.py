"""What a model needs before it is trained: no dropout, nothing trained in vain, attention and gradient
checkpointing as asked.
"""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.precision import resolve_autocast
from torchrl_grpo.models.quantization import keep_packing
from torchrl_grpo.models.scoring import trial
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, check_head, warn_about_prefix
from torchrl_grpo.models.scoring.upcast import Upcast
from torchrl_grpo.runtime.oom import ran_out_of_memory

# In nats, between layers as they are and compiled, which may round in another order.
_COMPILED = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}
# What a model raises that is asked for something it does not know.
_UNKNOWN = (TypeError, ValueError, AttributeError, IndexError, KeyError)


def prepare_for_training(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Set ``model`` up in place.

    Dropout is switched off: the ratio of new to old policy must come from the update, not from a mask.

    Raises:
        ModelError: its log-probabilities cannot be computed from backbone and head, or gradient checkpointing
            is asked for and not possible, or something random cannot be switched off.
    """
    model.eval()
    keep_packing(model)
    _freeze_other_inputs(model)
    if cfg.attn_implementation != "auto":
        _set_attention(model, cfg)
    try:
        with trial.conditions(model):
            gap = trial.gap(model, lambda: torch.tensor(check_head(model)))
    except _UNKNOWN as error:
        raise ModelError(f"{type(model).__name__}: {error}; choose another model.name") from error
    if not gap <= trial.TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: its logits differ by {gap:.3g} from its output head applied to its "
            "last hidden state, so its forward scales or shifts them in a way this version does not "
            "know; choose another model.name"
        )
    if cfg.gradient_checkpointing:
        _recompute_activations(model)


def _recompute_activations(model: PreTrainedModel) -> None:
    """Switch gradient checkpointing on, and nothing else that training mode does."""

    def score() -> Tensor:
        with trial.conditions(model), Upcast(torch.float32):
            return trial.together(model, shares_prefix=False)

    name, mend = type(model).__name__, "write train_model.gradient_checkpointing=false"
    expected = score()
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"{name}: {error}; {mend}") from error
    _switch_dropout_off(model)
    # Transformers recomputes activations in training mode only. Modules that do it are put in that mode, and
    # nothing inside them: neither dropout nor the noise and the sampling of experts that some mixtures have.
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    # Twice, as what is random may be right by chance.
    gap = max(float((score() - expected).abs().max()) for _ in range(2))
    if not gap <= trial.TOLERANCE:
        raise ModelError(
            f"{name}: in training mode, which gradient checkpointing needs, its log-probabilities change by "
            f"{gap:.3g}, so it drops something out that cannot be switched off; {mend}"
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


def _set_attention(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Switch to the attention that ``cfg`` wants, or say why the model keeps the one it has."""
    config, wanted = model.config.get_text_config(), cfg.attn_implementation
    before, reason = config._attn_implementation, "this model cannot change its own"
    try:
        model.set_attn_implementation(wanted)
        if config._attn_implementation == wanted and wanted.startswith("flash"):
            _try_kernel(model, before, resolve_autocast(cfg.autocast, model.device))
    except (ImportError, ValueError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if config._attn_implementation != before:
            model.set_attn_implementation(before)
    if config._attn_implementation != wanted:
        warnings.warn(
            f"train_model.attn_implementation={wanted} cannot be used ({reason}); {before} is used instead",
            stacklevel=3,
        )


def _try_kernel(model: PreTrainedModel, before: str, autocast_dtype: torch.dtype | None) -> None:
    """Score a few tokens as in training with the model's attention, made for 16 bits, and with ``before``.

    Raises:
        RuntimeError: the kernel does not run, or its numbers are others.
    """
    kernel = model.config.get_text_config()._attn_implementation
    tokens = trial.batch(model)

    def score(attention: str, dtype: torch.dtype | None) -> Tensor:
        model.set_attn_implementation(attention)
        return TokenScorer(model, autocast_dtype=dtype, shares_prefix=False)(*tokens).log_probs

    with torch.no_grad():
        found = score(kernel, autocast_dtype)
        rounded, exact = score(before, autocast_dtype), score(before, None)
        model.set_attn_implementation(kernel)
    gap, rounding = (float((rounded - other).abs().max()) for other in (found, exact))
    if not gap <= 2 * rounding + trial.TOLERANCE:
        raise RuntimeError(f"log-probabilities would change by {gap:.2g}")


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
    tokens = trial.batch(model)
    with torch.no_grad():
        expected = exact(*tokens).log_probs
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        found = [one(*tokens).log_probs for one in (exact, scorer)]
        torch.stack([one.sum() for one in found]).sum().backward()
    except (RuntimeError, OSError) as error:
        # Of a backend's error the first line is only its name.
        why = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
    else:
        gap = float((found[0].detach() - expected).abs().max())
        why = "" if gap <= _COMPILED[model.dtype] else f"its log-probabilities would change by {gap:.2g}"
    finally:
        model.zero_grad(set_to_none=True)
    if not why and layers:
        return
    for layer in layers:
        layer._compiled_call_impl = None
    reason = why or "it does not say which of its modules are layers"
    warnings.warn(f"train_model.compile=true: {type(model).__name__} runs as it is ({reason})", stacklevel=2)


def shares_prefix(model: PreTrainedModel, wanted: bool = True, longest: int | None = None) -> bool:
    """Whether running a prompt once for several responses gives this model's numbers, tried on a few tokens.

    Warns when it was wanted and the answer is no. Then every response is run with its own prompt and with
    padding, which is tried as well.

    Args:
        model: prepared, and not yet divided among ranks.
        wanted: False only tries what is done otherwise.
        longest: tokens a sequence has at most; None if that is not known.

    Raises:
        ModelError: padding changes the model's numbers, so that it cannot be trained in batches.
    """
    config = model.config.get_text_config()
    with trial.conditions(model, longest) as narrowest:
        attention = config._attn_implementation

        def difference(shared: bool) -> Tensor:
            if config._attn_implementation != attention:
                # What is compared with must not go through what is tried.
                model.set_attn_implementation(attention)
            expected = trial.alone(model)
            return trial.together(model, shared) - expected

        if wanted and TokenScorer(model).shares_prefix:
            try:
                gap = trial.gap(model, lambda: difference(True))
            except (*_UNKNOWN, RuntimeError) as error:
                if ran_out_of_memory(error):
                    raise
                why = f"it cannot ({type(error).__name__}: {error})"
            else:
                if gap <= trial.TOLERANCE:
                    return True
                why = f"its log-probabilities would change by {gap:.2g}"
            model.set_attn_implementation(attention)
            warn_about_prefix(model, why)
        try:
            gap = trial.gap(model, lambda: difference(False))
        except _UNKNOWN as error:
            raise ModelError(f"{type(model).__name__}: {error}; choose another model.name") from error
    if not gap <= trial.TOLERANCE:
        _refuse_padding(model, gap, narrowest)
    return False


def _refuse_padding(model: PreTrainedModel, gap: float, narrowest: int | None) -> NoReturn:
    mend = "choose another model.name"
    if narrowest is not None:
        with trial.conditions(model, longest=narrowest):
            right = trial.gap(model, lambda: trial.together(model, shares_prefix=False) - trial.alone(model))
        if right <= trial.TOLERANCE:
            mend = f"write inference_model.max_model_len={narrowest} or {mend}"
    raise ModelError(
        f"{type(model).__name__}: padding changes its log-probabilities by {gap:.2g} nats, so they cannot be "
        f"computed for several sequences at a time; {mend}"
    )
