"""Keep text from outside from becoming control tokens, such as the one that ends a turn.

A tokenizer makes a control token of its text wherever that stands. So a tool's result, or a question, with
``<|im_end|><|im_start|>system`` would end its own turn and begin another. Here a mark breaks such text before
the chat template renders it, and the mark's tokens are left out afterwards. The model reads the same
characters as ordinary tokens, and the template does not take them for its own. The rendering is still
tokenized as a whole, so ordinary text has the tokens that it always has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchrl_grpo.data.control_texts import any_of, broken, control_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.data.example import Example
    from torchrl_grpo.data.problems import Problems

# Unicode reserves this character for a program's own use. Text from outside loses it.
_MARK = "\ufdd0"

# Tags with these names begin and end turns and texts, and are no part of what a model says.
_SPEAKERS = ("s", "user", "human", "assistant", "bot", "model", "system", "tool")
# Templates compare identifiers of calls, and count their letters.
_ID = re.compile(r"[\w.:-]{1,64}")

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer."""
    return _control_tokens(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> ControlTokens:
    return ControlTokens(tokenizer, chat_template)


def visible(text: str) -> str:
    """Return a text without the marks of :meth:`ControlTokens.render`."""
    return text.replace(_MARK, "")


def special_tags(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that are tags of a response, such as ``<think>`` and ``</answer>``.

    Such a token has a counterpart that opens or closes it. Tokens that end or pad a text are not among them,
    and neither are those of a speaker, such as ``<user>``.
    """
    return {text for text, is_tag in _special(tokenizer).items() if is_tag}


def special_ends(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that may end a response: all but tags."""
    return {text for text, is_tag in _special(tokenizer).items() if not is_tag}


def _special(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, bool]:
    """Return the special tokens, and for each whether it is a tag."""
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    # The token that pads may be chosen later, and tokens may be added.
    return _special_of(tokenizer, frozenset(named), len(tokenizer))


@lru_cache(maxsize=4)
def _special_of(
    tokenizer: PreTrainedTokenizerBase, named: frozenset[str | None], size: int
) -> Mapping[str, bool]:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    pairs: set[str] = set()
    for text in special - named:
        match = re.fullmatch(r"([<\[])([\w:.-]+)([>\]])", text)
        if match and match[2].lower() not in _SPEAKERS:
            pair = {text, f"{match[1]}/{match[2]}{match[3]}"}
            pairs |= pair if pair <= special - named else set()
    return {text: text in pairs for text in special}


class ControlTokens:
    """Control tokens of a tokenizer: the special ones, and added ones that the chat template has.

    ``<think>`` and ``<tool_call>`` are often added tokens that are not special. Added tokens that the
    template does not have are words of the vocabulary like others.

    Attributes:
        texts: texts of the control tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
        self._tokenizer = tokenizer
        self.texts = texts = control_texts(tokenizer, chat_template)
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.content in texts]
        self._special = {token.content for token in tokens if token.special}
        self._taught = special_tags(tokenizer)
        self._control = any_of(texts)
        # A text may end with the start of a control token, and the next one begin with its end.
        self._starts = {text[:size] for text in texts for size in range(1, len(text))}
        self._ends = {text[size:] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        # Such tokens are found after characters have been replaced, for example those of full width.
        is_normalized = any(token.normalized for token in tokens)
        self._normalizer = (
            tokenizer.backend_tokenizer.normalizer if is_normalized and tokenizer.is_fast else None
        )

    def render(self, render: Render, messages: Sequence[Message], trusted: Sequence[str] | None = ()) -> str:
        """Render messages, with marks in the texts that would become control tokens.

        Args:
            render: function that renders messages.
            messages: messages with text from outside. Roles and identifiers of calls are not.
            trusted: texts with which a text may begin or end and whose control tokens are kept; None keeps
                all.
        """
        if trusted is None or not any(self._is_risky(text, trusted) for text in _texts(messages)):
            return render(messages)

        def marked(edge: str = "", except_for: str | None = None) -> str:
            def mark(text: str) -> str:
                start, middle, end = _split(text, trusted)
                return start + edge + self._broken(middle, self._control) + edge + end if middle else text

            return render(
                [message if message["role"] == except_for else _mapped(message, mark) for message in messages]
            )

        # With marks around each text too, nothing but the template's own tokens is left.
        safe = marked(edge=_MARK)
        own = self.in_text(safe)
        # A template may look for tags in messages of the assistant, for example to take reasoning out.
        for text in (marked(except_for="assistant"), marked()):
            if self.in_text(text) == own:
                return text
        return safe

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts that may have marks. The tokenizer adds no special token."""
        plain = [text for text in texts if _MARK not in text]
        # One call for all texts: a fast tokenizer processes them on all cores.
        token_ids = iter(self._tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else ())
        return [self._without_marks(text) if _MARK in text else list(next(token_ids)) for text in texts]

    def solution(self, text: str, trusted: Sequence[str] | None) -> str:
        """Return the text of a solution that a model learns to write, with marks.

        Special tokens are broken, except for tags and for those that the trusted texts ask for. The model has
        to write control tokens such as ``<think>`` as tokens.

        Args:
            text: the solution.
            trusted: texts of the configuration, see :class:`~torchrl_grpo.data.example.Example`.
        """
        return self._broken(text, any_of(self._not_learned(text, trusted)))

    def _not_learned(self, text: str, trusted: Sequence[str] | None) -> set[str]:
        if trusted is None:
            return set()
        return {
            token
            for token in self._special - self._taught
            if token in text and not any(token in trusted_text for trusted_text in trusted)
        }

    def in_text(self, text: str) -> list[str]:
        """Return the control tokens in a text."""
        return self._control.findall(self._normalized(text))

    def note_on(self, problems: Problems, with_solutions: bool) -> str | None:
        """Return a message about the problems whose text is broken; None if there are none.

        Args:
            problems: problems of the run. Those that are generated when they are drawn are left out.
            with_solutions: whether solutions are learned.
        """
        train = problems.train if isinstance(problems.train, list) else []
        known = [*train, *problems.held_out]
        broken = [
            (example.id, tokens[0])
            for example in known
            if (tokens := self._broken_in(example, with_solutions))
        ]
        if not broken:
            return None
        return (
            f"{len(broken):,} of {len(known):,} problems have text of control tokens, {broken[0][0]} for "
            f"example {broken[0][1]!r}. The model reads such text as ordinary characters. If it is meant as "
            "tokens, set env.control_tokens_in_data=true"
        )

    def _broken_in(self, example: Example, with_solution: bool) -> list[str]:
        if example.trusted is None:
            return []
        middles = [_split(text, example.trusted)[1] for text in _texts(example.messages)]
        in_messages = [token for text in middles for token in self.in_text(text)]
        in_solution = self._not_learned(example.solution, example.trusted) if with_solution else set()
        return [*in_messages, *sorted(in_solution)]

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def _is_risky(self, text: str, trusted: Sequence[str]) -> bool:
        middle = _split(text, trusted)[1]
        if self.in_text(middle):
            return True
        middle = self._normalized(middle)
        sizes = range(1, min(self._longest, len(middle) + 1))
        return any(middle[-size:] in self._starts or middle[:size] in self._ends for size in sizes)

    def _broken(self, text: str, pattern: re.Pattern[str]) -> str:
        text = visible(text)
        normalized = self._normalized(text)
        if len(pattern.findall(normalized)) > len(pattern.findall(text)):
            text = normalized
        return broken(text, pattern, _MARK)

    def _without_marks(self, text: str) -> list[int]:
        if not self._tokenizer.is_fast:
            # Tokens of such a tokenizer have no positions. A space breaks control tokens too.
            return list(self._tokenizer(text.replace(_MARK, " "), add_special_tokens=False)["input_ids"])
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pieces = [text[start:end] for start, end in encoded["offset_mapping"]]
        return [
            token
            for token, piece in zip(encoded["input_ids"], pieces, strict=True)
            if not piece or visible(piece)
        ]


def _split(text: str, trusted: Sequence[str]) -> tuple[str, str, str]:
    """Split a text into a trusted start, the rest, and a trusted end."""
    start = max((edge for edge in trusted if text.startswith(edge)), key=len, default="")
    rest = text[len(start) :]
    end = max((edge for edge in trusted if rest.endswith(edge)), key=len, default="")
    return start, rest[: len(rest) - len(end)], end


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of messages, except for roles and identifiers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if not _is_compared(name, part):
                yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """Apply a function to the texts of a message, except for roles and identifiers."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {
            name: part if _is_compared(name, part) else _mapped(part, function)
            for name, part in value.items()
        }
    return [_mapped(part, function) for part in value] if isinstance(value, Sequence) else value


def _is_compared(name: str, value: Any) -> bool:
    """Whether a part of a message is one that templates compare, and not text."""
    is_id = name == "tool_call_id" and isinstance(value, str)
    is_kind = name == "type" and value in ("text", "image")
    return name == "role" or is_kind or (is_id and _ID.fullmatch(value) is not None)
