"""Scores of a reward model. It runs in a process of its own, which has the model's device.

The model is a sequence classifier with one label. It reads the prompt and the response as a conversation in
the chat template of its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.envs.control_tokens import control_tokens
from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.planning.cores import allowed_cores
from torchrl_grpo.runtime import hub


class RewardModel:
    """A reward model and its tokenizer.

    Args:
        source: name on the hub, or a folder.
        device: where it computes.
        dtype: number format, by its name.
        batch_size: conversations in one forward pass.
        max_tokens: longest conversation; None for what the model can read.

    Raises:
        ModelError: it cannot be loaded, has not exactly one label, lacks weights, or has no chat template.
    """

    def __init__(
        self, source: str, device: str, dtype: str, batch_size: int, max_tokens: int | None = None
    ) -> None:
        hub.why_unreachable()
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
            loaded = AutoModelForSequenceClassification.from_pretrained(
                source, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"hf:{source} cannot be loaded: {first_line(error)}; name another model"
            ) from error
        model: PreTrainedModel = loaded[0]
        if model.config.num_labels != 1:
            raise ModelError(
                f"hf:{source} has {model.config.num_labels} labels, and a reward model has one; name another"
            )
        if missing := sorted(loaded[1]["missing_keys"]):
            # transformers makes them up, other ones in each process.
            raise ModelError(
                f"hf:{source} lacks {missing[0]}, so its scores would be random; name a model that was saved "
                f"as {type(model).__name__}"
            )
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of hf:{source} has no chat template, without which it cannot read a "
                "conversation; name another model, or add chat_template.jinja to a copy of its folder"
            )
        self._model = model.to(device).eval()
        self._device, self._batch_size = device, batch_size
        can_read = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._max_tokens = max_tokens if can_read is None else min(max_tokens or can_read, can_read)

    def score(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], responses: Sequence[str]
    ) -> list[float | str]:
        """Return the score of each response to the messages of its prompt, or what is wrong with it."""
        ids = self.token_ids(prompts, responses)
        longest = self._max_tokens
        scores: list[float | str] = [
            f"the conversation has {len(row)} tokens, and the model reads {longest}" for row in ids
        ]
        # Conversations of about the same length, so that there is little padding.
        fitting = sorted(
            (row for row in range(len(ids)) if longest is None or len(ids[row]) <= longest),
            key=lambda row: len(ids[row]),
        )
        for start in range(0, len(fitting), self._batch_size):
            rows = fitting[start : start + self._batch_size]
            for row, value in zip(rows, self._forward([ids[row] for row in rows]), strict=True):
                scores[row] = value
        return scores

    def token_ids(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], responses: Sequence[str]
    ) -> list[list[int]]:
        """Return the tokens of each conversation. Text never becomes one of the template's own tokens."""
        tokens = control_tokens(self._tokenizer)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return str(self._tokenizer.apply_chat_template([*messages], tokenize=False))

        return tokens.ids(
            [
                tokens.render(render, [*prompt, {"role": "assistant", "content": response}])
                for prompt, response in zip(prompts, responses, strict=True)
            ]
        )

    def _forward(self, ids: Sequence[Sequence[int]]) -> list[float]:
        config = self._model.config.get_text_config()
        # Classifiers on top of a decoder read the last token that is no padding. Without a token for padding,
        # it is any that no conversation has.
        pad = config.pad_token_id
        if pad is None:
            used = {token for row in ids for token in row}
            pad = config.pad_token_id = next(token for token in range(config.vocab_size) if token not in used)
            try:
                return self._padded(ids, pad)
            finally:
                config.pad_token_id = None
        return self._padded(ids, pad)

    @torch.inference_mode()
    def _padded(self, ids: Sequence[Sequence[int]], pad: int) -> list[float]:
        width = max(map(len, ids))
        tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        output = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device))
        scores: list[float] = output.logits[:, 0].double().cpu().tolist()
        return scores


# The model of this process.
_loaded: list[RewardModel] = []


def prepare(setup: dict[str, Any]) -> None:
    """Load the model; see :class:`RewardModel` for the arguments in ``setup`` and the errors."""
    # Only a process that computes on the CPU needs more than one, and the trainer waits for it.
    torch.set_num_threads(allowed_cores())
    _loaded.append(RewardModel(**setup))


def run(payload: dict[str, Any]) -> list[float | str]:
    """Score the ``responses`` of a payload to the messages in its ``prompts``; see :class:`RewardModel`."""
    return _loaded[-1].score(payload["prompts"], payload["responses"])
