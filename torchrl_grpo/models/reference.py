"""The frozen model that scores the policy's responses: the reference of a KL divergence, or a teacher.

The reference is loaded from the same weights as the policy, and a teacher may be any model with its tokens.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import frozen_model, teacher_of
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import choose_kernels, resolve_dtype, resolve_head
from torchrl_grpo.models.prepare import check_logits
from torchrl_grpo.models.prepare import shares_prefix as can_share_prefix
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen_choice import choose_attention


def load_reference(
    cfg: Config,
    source: str,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    shares_prefix: bool,
) -> TokenScorer:
    """Load a scorer of a frozen copy of the model, or of the teacher.

    Args:
        cfg: configuration; ``ref_model`` or ``teacher_model``, ``model``, the sampling temperature, and the
            keys ``fused_head``, ``head_dtype`` and ``prefix_attention`` of ``train_model`` are read.
        source: folder or hub name of the model, see :func:`frozen_source`.
        device: device of the model.
        autocast_dtype: dtype of the trainer's matrix products, or None for float32. The reference uses it
            too, unless ``ref_model.dtype`` is a 16-bit format.
        shares_prefix: whether a prompt is run once per group.

    Raises:
        ModelError: the model cannot be loaded, or the teacher's log-probabilities would be wrong.
        TrainingStopped: memory ran out.
    """
    choose_kernels()
    # Equal weights must have no divergence, so auto computes like the policy: float32 with its autocast.
    options, teacher = frozen_model(cfg), teacher_of(cfg)
    auto = options.dtype == "auto"
    dtype = torch.float32 if auto else resolve_dtype(options.dtype, device)
    section = options.section
    instead = f"write {section}.dtype=bfloat16, or give it a device of its own with {section}.devices"
    name = cfg.model if teacher is None else teacher
    model = loading.load_model(source, name, device, dtype, instead=instead).requires_grad_(False)
    if teacher is not None:
        # The policy was tried by the trainer. A teacher may have another architecture.
        key = f"{section}.name"
        check_logits(model, key)
        shares_prefix = can_share_prefix(model, shares_prefix, cfg.inference_model.max_model_len, key)
    autocast = autocast_dtype if dtype == torch.float32 else None
    # In 16 bits, most updates of a slow moving average would round to nothing.
    if auto and autocast is not None and (teacher is not None or cfg.ref_model.refresh_mix == 1):
        hold_as_computed(model, autocast)
        if device.type == "cuda":
            # An engine in another process may need what this has freed.
            torch.cuda.empty_cache()
    fuse_norms(model)
    # The head must round like the policy's. Otherwise equal models would have a divergence.
    head_dtype = resolve_head(cfg.train_model.head_dtype)
    temperature = cfg.inference_model.temperature
    pictures = loading.load_processor(source, cfg.model)
    scorer = TokenScorer(
        model, temperature, autocast, shares_prefix, head_dtype=head_dtype, pictures=pictures
    )
    choose_attention(scorer, cfg.train_model.prefix_attention, cfg.inference_model.max_model_len)
    if cfg.train_model.fused_head:
        scorer.fuse_head()
    return scorer


def frozen_source(cfg: Config, base_model: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the folder or hub name of the frozen model: of the teacher, or ``base_model``.

    Args:
        cfg: configuration.
        base_model: folder or hub name of the policy before training.
        tokenizer: tokenizer of the policy.

    Raises:
        ModelError: the teacher cannot be loaded, has other or fewer tokens than the policy, or a shorter
            context.
    """
    teacher = teacher_of(cfg)
    if teacher is None:
        return base_model
    source = loading.resolve(teacher)
    loading.check_context(source, cfg, teacher)
    check_tokens(teacher.name, loading.read_tokenizer(source, teacher), cfg.model.name, tokenizer)
    rows, own = (
        loading.read_config(place, name).vocab_size
        for place, name in ((source, teacher), (base_model, cfg.model))
    )
    missing = [(number, token) for token, number in tokenizer.get_vocab().items() if rows <= number < own]
    if missing:
        number, token = min(missing)
        raise ModelError(
            f"teacher_model.name={teacher.name}: its vocabulary matrix has {rows} rows, none for the token "
            f"{token!r} with the number {number} of model.name={cfg.model.name}; write the name of a teacher "
            "with a row for each token"
        )
    return source


def check_tokens(
    teacher_name: str,
    teacher: PreTrainedTokenizerBase,
    policy_name: str,
    policy: PreTrainedTokenizerBase,
) -> None:
    """Check that every token of the policy has the same number and text for the teacher, which reads numbers.

    Raises:
        ModelError: it has not.
    """
    tokens, known = policy.get_vocab(), teacher.get_vocab()
    if tokens == known:
        return
    token = min(
        (token for token, number in {**known, **tokens}.items() if tokens.get(token) != known.get(token)),
        key=lambda token: (tokens.get(token, len(tokens)), token),
    )
    numbers = [vocabulary.get(token, "missing") for vocabulary in (tokens, known)]
    raise ModelError(
        f"teacher_model.name={teacher_name}: its tokenizer is another one than that of "
        f"model.name={policy_name} (the token {token!r} is {numbers[0]} there and {numbers[1]} here), and a "
        "teacher reads the policy's own tokens; write the name of a model of the same family"
    )


def hold_as_computed(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store the matrices of a frozen float32 model in the dtype to which autocast casts them.

    This halves the memory, and results stay the same to the last bit. Weights with other uses than products
    (norms, embeddings) stay in float32. So does the output head, which the loss computes separately.

    Args:
        model: float32 model, changed in place.
        dtype: dtype of autocast.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        # A subclass of nn.Linear may do more than multiply.
        if type(module) is nn.Linear and module is not head:
            module.to(dtype)
