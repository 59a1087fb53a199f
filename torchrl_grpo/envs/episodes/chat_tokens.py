"""The tokens between two turns of the model, as the chat template writes them.

What the model wrote is never tokenized again. After its turn, the rest of the assistant's message, the
messages of the environment and the start of the next turn are appended. Their text is what the template adds
to a short conversation of the same shape. So a template that treats earlier messages differently, for example
one that removes reasoning from them, does not change tokens that the model has already read. Their tokens are
cut from those of the whole text, because a tokenizer may write a space before a text that stands alone, and
because some tokens take the white space beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from torchrl_grpo.envs.control_tokens import control_tokens
from torchrl_grpo.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.envs.episodes.tools.call_turns import CallTurn
    from torchrl_grpo.envs.episodes.types import Message

# Stands for the model's message. No template changes letters.
_ANSWER = "zqxanswerxqz"


class TurnTokens:
    """Renders what comes between two turns of the model.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: JSON schemas of the tools, as in the prompt.
        calls: how the template renders messages with calls; None if calls are ordinary text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        calls: CallTurn | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        self._tools = list(tools) or None
        self._calls = calls

    def between(self, end_token: int, messages: Sequence[Message]) -> list[int]:
        """Return the tokens from the model's end token to the start of its next turn.

        Args:
            end_token: token that ended the model's turn. It is not repeated.
            messages: messages of the environment and of tools. None of their text becomes a control token.

        Raises:
            ModelError: the template cannot render the messages, or the tokenizer does not begin a token where
                the model's turn ends.
        """
        text = self._control.render(self._after_answer, messages)
        added = self._tokenizer.added_tokens_decoder.get(end_token)
        # The text of any other token may be a part of an added one.
        end = "" if added is None else str(added.content)
        own, written_end, rest = text.partition(end) if end else ("", "", text)
        if not written_end or own.strip():
            # The model has ended its turn with another end token than the template writes. Both are kept.
            own, rest = "", text
        turn = _ANSWER + own + end
        before, whole = self._control.ids([turn, turn + rest])
        is_missed = added is not None and before[-1] != end_token
        if is_missed or whole[: len(before)] != before:
            raise ModelError(
                f"The tokenizer of {self._tokenizer.name_or_path} does not find the end of the "
                f"model's message, {own + end!r}, before {rest[:20]!r}, so a turn would have other tokens "
                "than the whole conversation; give another chat template as model.chat_template"
            )
        tokens = whole[len(before) :]
        return tokens[1:] if added is None and tokens[:1] == [end_token] else tokens

    def _after_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        results = [item for item in messages if self._calls and {"name", "tool_call_id"} <= item.keys()]
        answer: Mapping[str, Any] = {"role": "assistant", "content": _ANSWER}
        if self._calls is not None and results:
            # Templates look up the calls that results belong to.
            answer = self._calls.before(results)
        start = [{"role": "user", "content": "-"}, answer]
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    [*start, *messages],
                    tools=self._tools,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
            raise ModelError(
                f"The chat template of {name} refuses messages of the roles {roles} after the model's: "
                f"{first_line(error)}; give another one as model.chat_template, or return messages of other "
                "roles"
            ) from error
        after = self._calls.after(text) if self._calls is not None and results else _after_text(text)
        if after is None:
            raise ModelError(
                f"The chat template of {self._tokenizer.name_or_path} leaves out the model's own messages, "
                "so an episode cannot go on; give another one as model.chat_template"
            )
        return after


def _after_text(text: str) -> str | None:
    _, mark, rest = text.partition(_ANSWER)
    return rest if mark else None
