"""The prompts on which engine and trainer are compared after each publication of weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.config.schema import InferenceModelConfig
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import prompt_pictures, render
from torchrl_grpo.inference.protocol import PromptPictures
from torchrl_grpo.models.pictures import processor_of
from torchrl_grpo.weight_sync.probe import probe_length, probe_prompts

# Number of problems from which prompts are made.
_PROBLEMS = 8


def probe_inputs(
    cfg: InferenceModelConfig, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> tuple[list[list[int]], list[PromptPictures | None] | None]:
    """Make the prompts of the probe from the first problems.

    They are pieces of one length, cut from the joined text of the prompts. If problems have pictures, the
    shortest of the first prompts with pictures follows uncut.

    Args:
        cfg: settings of the engine.
        tokenizer: tokenizer that renders the prompts.
        examples: training problems.

    Returns:
        Tokens of each prompt, and the pictures of each, which are None without a prompt with pictures.
    """
    processor = processor_of(tokenizer)
    # Tokens of pictures in a part of a prompt would stand for pictures that are not there.
    blocked = () if processor is None else processor.blocked
    rendered = [
        [token for token in render(tokenizer, examples[index])[1] if token not in blocked]
        for index in range(min(_PROBLEMS, len(examples)))
    ]
    prompts = probe_prompts(rendered, length=probe_length(cfg.block_size, cfg.max_model_len))
    shown = islice((example for example in examples if example.pictures), _PROBLEMS)
    whole = [(render(tokenizer, example)[1], example) for example in shown] if processor is not None else []
    if not whole:
        return prompts, None
    tokens, example = min(whole, key=lambda pair: len(pair[0]))
    return [*prompts, tokens], [*[None] * len(prompts), prompt_pictures(tokenizer, example, tokens)]
