"""Log-probabilities of single tokens of a few responses, of engine, trainer and teacher, for the report."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.batch.schema import sampled_mask


def token_details(
    groups: TensorDictBase,
    trainer: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    has_teacher: bool = False,
) -> list[dict[str, list[Any]]]:
    """Return texts and log-probabilities of the tokens of the first responses, group by group.

    Args:
        groups: groups, see :mod:`torchrl_grpo.batch.schema`.
        trainer: ``[P, G, T]``, log-probabilities under the trained model.
        tokenizer: tokenizer of the model.
        count: number of responses.
        has_teacher: whether ``("log_probs", "reference")`` is of a teacher.

    Returns:
        For each response ``text``, ``engine``, ``trainer`` and, with a teacher, ``teacher``, with an entry
        per token. Numbers of a token that the model did not sample, as of a tool's result, are None.
    """
    sampled = sampled_mask(groups)
    columns = groups["tokens", "response"], groups["masks", "response"], sampled
    rows = zip(*(column.flatten(0, 1)[:count] for column in columns), strict=True)
    numbers = {"engine": groups["log_probs", "response"], "trainer": trainer}
    if has_teacher:
        numbers["teacher"] = groups["log_probs", "reference"]
    by_name = {name: values.flatten(0, 1) for name, values in numbers.items()}
    details = []
    for number, (tokens, real, own) in enumerate(rows):
        length = int(real.sum())
        masks = own[:length].tolist()
        details.append(
            {
                "text": [tokenizer.decode([token]) for token in tokens[:length].tolist()],
                **{
                    name: [
                        round(value, 5) if mask else None
                        for value, mask in zip(values[number, :length].tolist(), masks, strict=True)
                    ]
                    for name, values in by_name.items()
                },
            }
        )
    return details
