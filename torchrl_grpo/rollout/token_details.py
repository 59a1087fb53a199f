"""Log-probabilities of the single tokens of a few responses, of engine and trainer, for the report."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.batch.schema import sampled_mask


def token_details(
    groups: TensorDictBase, trainer: Tensor, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[dict[str, list[Any]]]:
    """Return texts and log-probabilities of the tokens of the first responses, group by group.

    Args:
        groups: groups, see :mod:`torchrl_grpo.batch.schema`.
        trainer: ``[P, G, T]``, log-probabilities under the trained model.
        tokenizer: tokenizer of the model.
        count: number of responses.

    Returns:
        For each response ``text``, ``engine`` and ``trainer``, with an entry per token. Numbers of a token
        that the model did not sample, as of a tool's result, are None.
    """
    sampled = sampled_mask(groups)
    columns = groups["tokens", "response"], groups["masks", "response"], sampled
    rows = zip(*(column.flatten(0, 1)[:count] for column in columns), strict=True)
    numbers = [values.flatten(0, 1)[:count] for values in (groups["log_probs", "response"], trainer)]
    details = []
    for (tokens, real, own), engine, policy in zip(rows, *numbers, strict=True):
        length = int(real.sum())
        masks = own[:length].tolist()
        details.append(
            {
                "text": [tokenizer.decode([token]) for token in tokens[:length].tolist()],
                **{
                    name: [round(value, 5) if mask else None for value, mask in zip(row, masks, strict=True)]
                    for name, row in (
                        ("engine", engine[:length].tolist()),
                        ("trainer", policy[:length].tolist()),
                    )
                },
            }
        )
    return details
