"""Prepare a model for training: no dropout, frozen unused inputs, attention and gradient checkpointing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.models.precision import resolve_autocast
from torchrl_grpo.models.quantization import keep_packing
from torchrl_grpo.models.scoring import picture_trial, trial
from torchrl_grpo.models.scoring.token_scorer import TokenScorer, max_logit_error, warn_about_prefix
from torchrl_grpo.models.scoring.upcast import Upcast
from torchrl_grpo.runtime.oom import ran_out_of_memory

# Largest difference in nats between compiled and plain layers, which may round in a different order.
_COMPILE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.5}
# Errors of a model that does not support an argument or a feature.
_UNSUPPORTED = (TypeError, ValueError, AttributeError, IndexError, KeyError)


def prepare_for_training(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Prepare ``model`` for training in place.

    Dropout is switched off, because the ratio of new to old policy must come from the update and not from a
    dropout mask.

    Raises:
        ModelError: log-probabilities cannot be computed from backbone and head, the model does not support
            the configured gradient checkpointing, or it has randomness that cannot be switched off.
    """
    model.eval()
    keep_packing(model)
    if not cfg.vision_tower:
        _freeze_other_inputs(model)
    if cfg.attn_implementation != "auto":
        _set_attention(model, cfg)
    check_logits(model)
    if cfg.gradient_checkpointing:
        _recompute_activations(model)


def check_logits(model: PreTrainedModel, key: str = "model.name") -> None:
    """Check that the model's logits are its output head applied to its last hidden state.

    Args:
        model: model in evaluation mode.
        key: key that names the model, for messages.

    Raises:
        ModelError: they are not, so log-probabilities would be wrong.
    """
    try:
        with trial.conditions(model):
            diff = trial.largest_difference(model, lambda: torch.tensor(max_logit_error(model)))
    except _UNSUPPORTED as error:
        raise ModelError(f"{type(model).__name__}: {error}; choose another {key}") from error
    if not diff <= trial.TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: its logits differ by {diff:.3g} from its output head applied to its "
            "last hidden state, so its forward pass scales or shifts them in a way that this version does "
            f"not support; choose another {key}"
        )


def _recompute_activations(model: PreTrainedModel) -> None:
    """Switch gradient checkpointing on, without the other effects of training mode."""

    def score() -> Tensor:
        with trial.conditions(model), Upcast(torch.float32):
            return trial.score_batch(model, shares_prefix=False)

    name, fix = type(model).__name__, "write train_model.gradient_checkpointing=false"
    expected = score()
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"{name}: {error}; {fix}") from error
    _switch_dropout_off(model)
    # Transformers recomputes activations in training mode only. Modules that do so are set to training mode,
    # but not their submodules, which may have dropout, or noise and sampling of experts.
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    # Twice, because a random result may be right by chance.
    diff = max(float((score() - expected).abs().max()) for _ in range(2))
    if not diff <= trial.TOLERANCE:
        raise ModelError(
            f"{name}: in training mode, which gradient checkpointing needs, its log-probabilities change by "
            f"{diff:.3g}, so it has dropout or other randomness that cannot be switched off; {fix}"
        )


def _freeze_other_inputs(model: PreTrainedModel) -> None:
    """Freeze the parts for images and audio. Text gives them no gradient, and ranks would wait for one."""
    for parameter in other_inputs(model):
        parameter.requires_grad_(False)


def other_inputs(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the parts for images and audio, what projects them included."""
    if model.config is model.config.get_text_config():
        return []
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {id(parameter) for part in parts for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in of_text]


def _switch_dropout_off(model: PreTrainedModel) -> None:
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Models that call F.dropout keep the probability as a float: dropout, attn_pdrop, layerdrop.
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def _set_attention(model: PreTrainedModel, cfg: TrainModelConfig) -> None:
    """Switch to the configured attention, or warn why the model keeps its current one."""
    config, chosen = model.config.get_text_config(), cfg.attn_implementation
    before, reason = config._attn_implementation, "this model cannot change its attention"
    try:
        model.set_attn_implementation(chosen)
        if config._attn_implementation == chosen and chosen.startswith("flash"):
            _try_kernel(model, before, resolve_autocast(cfg.autocast, model.device))
    except (ImportError, ValueError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        reason = first_line(error)
        if config._attn_implementation != before:
            model.set_attn_implementation(before)
    if config._attn_implementation != chosen:
        warnings.warn(
            f"train_model.attn_implementation={chosen} cannot be used ({reason}); {before} is used instead",
            stacklevel=3,
        )


def _try_kernel(model: PreTrainedModel, before: str, autocast_dtype: torch.dtype | None) -> None:
    """Compare the model's 16-bit attention kernel with the attention ``before`` on a few tokens.

    Raises:
        RuntimeError: the kernel does not run, or its log-probabilities differ by more than rounding.
    """
    kernel = model.config.get_text_config()._attn_implementation
    tokens = trial.batch(model)

    def score(attention: str, dtype: torch.dtype | None) -> Tensor:
        model.set_attn_implementation(attention)
        scorer = TokenScorer(model, autocast_dtype=dtype, shares_prefix=False)
        log_probs: Tensor = scorer(*tokens).log_probs
        return log_probs

    with torch.no_grad():
        actual = score(kernel, autocast_dtype)
        rounded, exact = score(before, autocast_dtype), score(before, None)
        model.set_attn_implementation(kernel)
    diff, rounding = (float((rounded - other).abs().max()) for other in (actual, exact))
    if not diff <= 2 * rounding + trial.TOLERANCE:
        raise RuntimeError(f"log-probabilities would change by {diff:.2g}")


def compile_layers(model: PreTrainedModel, scorer: TokenScorer) -> bool:
    """Compile the decoder layers with ``torch.compile``, in place. It warns if that is not possible.

    Layers are compiled one by one, because they are alike and share the compiled code. Shapes are dynamic,
    because the number of tokens changes with every micro-batch.

    Args:
        model: prepared model, not yet sharded.
        scorer: scorer of the model. Its forward and backward pass are tried on a few tokens.

    Returns:
        Whether the layers are compiled.
    """
    layers = _layers(model)
    # Numbers are compared without mixed precision, where both round alike. With it, only success is tested.
    exact = TokenScorer(model, shares_prefix=scorer.shares_prefix)
    tokens = trial.batch(model)
    with torch.no_grad():
        expected = exact(*tokens).log_probs
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        log_probs = [run(*tokens).log_probs for run in (exact, scorer)]
        # Backward through all layers, without a gradient for each weight of a model that is not sharded yet.
        trained = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        smallest = [min(own, key=Tensor.numel) for own in trained if own]
        if smallest:
            sums = torch.stack([values.sum() for values in log_probs])
            torch.autograd.grad(sums.sum(), smallest, allow_unused=True)
    except (RuntimeError, OSError) as error:
        if ran_out_of_memory(error):
            raise
        # The first line of a backend's error is only the backend's name.
        why = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
    else:
        diff = float((log_probs[0].detach() - expected).abs().max())
        tolerance = _COMPILE_TOLERANCE[model.dtype]
        why = "" if diff <= tolerance else f"its log-probabilities would change by {diff:.2g}"
    if not why and layers:
        return True
    discard_compiled_layers(model)
    reason = why or "it does not declare which of its modules are layers"
    warnings.warn(
        f"train_model.compile=true: {type(model).__name__} is not compiled ({reason})", stacklevel=2
    )
    return False


def discard_compiled_layers(model: PreTrainedModel) -> None:
    """Let the layers of ``model`` run as they are, in place."""
    for layer in _layers(model):
        layer._compiled_call_impl = None


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, as far as the model says which of its modules these are."""
    names = model._no_split_modules or []
    return [module for module in model.modules() if type(module).__name__ in names]


def shares_prefix(
    model: PreTrainedModel,
    requested: bool = True,
    longest: int | None = None,
    key: str = "model.name",
    pictures: PictureProcessor | None = None,
) -> bool:
    """Whether running a prompt once for several responses gives correct numbers, tested on a few tokens.

    If it does not although it is wanted, a warning is emitted. Then every response is run with its own prompt
    and with padding, which is tested too.

    Args:
        model: prepared model, not yet sharded.
        requested: whether prompts should be shared. False only tests padding.
        longest: largest number of tokens in a sequence; None if unknown.
        key: key that names the model, for messages.
        pictures: processor of a model for pictures and text, which is tested with pictures too.

    Raises:
        ModelError: padding changes the model's numbers, so it cannot be trained in batches.
    """
    attention = model.config.get_text_config()._attn_implementation
    shares = _shares_prefix_of_text(model, requested, longest, key)
    return shares if pictures is None else _shares_prefix_of_pictures(model, shares, attention, pictures)


def _shares_prefix_of_pictures(
    model: PreTrainedModel, shares: bool, attention: str, processor: PictureProcessor
) -> bool:
    """Whether a prompt with pictures can be run once per group, tested as for text.

    Args:
        model: prepared model.
        shares: whether a prompt of text can.
        attention: attention of the model as it was loaded.
        processor: processor of the model.
    """
    name = type(model).__name__

    def difference(shared: bool) -> Tensor:
        model.get_decoder().set_attn_implementation(attention)
        expected = picture_trial.score_one_by_one(model, processor)
        return picture_trial.score_batch(model, processor, shared) - expected

    with trial.conditions(model, longest=0):
        _check_causal(model, processor)
        if shares:
            try:
                diff = trial.largest_difference(model, lambda: difference(True))
            except (*_UNSUPPORTED, RuntimeError) as error:
                if ran_out_of_memory(error):
                    raise
                why = f"it cannot with pictures ({first_line(error)})"
            else:
                if diff <= trial.TOLERANCE:
                    return True
                why = f"its log-probabilities with pictures would change by {diff:.2g}"
            warn_about_prefix(model, why)
        diff = _largest_with_pictures(model, lambda: difference(False))
    if not diff <= trial.TOLERANCE:
        raise ModelError(
            f"{name}: padding changes its log-probabilities with pictures by {diff:.2g} nats, so they cannot "
            "be computed for several sequences at a time; choose another model.name"
        )
    return False


def _check_causal(model: PreTrainedModel, processor: PictureProcessor) -> None:
    diff = _largest_with_pictures(model, lambda: picture_trial.look_ahead(model, processor))
    if not diff <= trial.TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}: with pictures, its log-probabilities change by {diff:.2g} nats with "
            "the tokens after them, so they are not those of sampling; choose another model.name"
        )


def _largest_with_pictures(model: PreTrainedModel, difference: Callable[[], Tensor]) -> float:
    try:
        return trial.largest_difference(model, difference)
    except (*_UNSUPPORTED, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        name = type(model).__name__
        raise ModelError(
            f"{name} cannot be run with pictures ({first_line(error)}); choose another model.name"
        ) from error


def _shares_prefix_of_text(model: PreTrainedModel, requested: bool, longest: int | None, key: str) -> bool:
    config = model.config.get_text_config()
    with trial.conditions(model, longest) as narrowest:
        attention = config._attn_implementation

        def difference(shared: bool) -> Tensor:
            if config._attn_implementation != attention:
                # The expected numbers must not come from the attention that is tested.
                model.set_attn_implementation(attention)
            expected = trial.score_one_by_one(model)
            return trial.score_batch(model, shared) - expected

        if requested and TokenScorer(model).shares_prefix:
            try:
                diff = trial.largest_difference(model, lambda: difference(True))
            except (*_UNSUPPORTED, RuntimeError) as error:
                if ran_out_of_memory(error):
                    raise
                why = f"it cannot ({type(error).__name__}: {error})"
            else:
                if diff <= trial.TOLERANCE:
                    return True
                why = f"its log-probabilities would change by {diff:.2g}"
            model.set_attn_implementation(attention)
            warn_about_prefix(model, why)
        try:
            diff = trial.largest_difference(model, lambda: difference(False))
        except _UNSUPPORTED as error:
            raise ModelError(f"{type(model).__name__}: {error}; choose another {key}") from error
    if not diff <= trial.TOLERANCE:
        _refuse_padding(model, diff, narrowest, key)
    return False


def _refuse_padding(model: PreTrainedModel, diff: float, narrowest: int | None, key: str) -> NoReturn:
    fix = f"choose another {key}"
    if narrowest is not None:
        with trial.conditions(model, longest=narrowest):
            short = trial.largest_difference(
                model, lambda: trial.score_batch(model, shares_prefix=False) - trial.score_one_by_one(model)
            )
        if short <= trial.TOLERANCE:
            fix = f"write inference_model.max_model_len={narrowest} or {fix}"
    raise ModelError(
        f"{type(model).__name__}: padding changes its log-probabilities by {diff:.2g} nats, so they cannot "
        f"be computed for several sequences at a time; {fix}"
    )
