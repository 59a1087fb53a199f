"""A single-turn TorchRL environment: P problems, G answers to each, one reward an answer.

Each prompt is rendered once for its group, and a batch is scored in one call. Left out: several turns, tools,
and any step after the answer; a reset always replaces the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_length, check_lengths, render
from torchrl_grpo.envs.responses import INPUT_MODES, hit_length_bound, response_texts
from torchrl_grpo.envs.stream import PromptStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.rewards import RewardSet, Scored


@dataclass(frozen=True)
class Prompt:
    """A problem as a model reads it.

    Attributes:
        number: position among all problems drawn since the run began; it names the group of its answers.
        example: the problem.
        text: rendered prompt.
        token_ids: token ids of ``text``, not padded.
    """

    number: int
    example: Example
    text: str
    token_ids: list[int]


class GroupTextEnv(EnvBase):
    """Problems in, rewards out, with batch size ``[P, G]``.

    ``reset`` draws the next P examples and gives ``("text", "prompt")``; ``"group_id"``, int64 ``[P, G]``,
    counting the problems drawn since the run began; ``"example_id"``; and, for policies that read them,

    * ``("tokens", "prompt")``, int64 ``[P, G, L]``, padded on the left, and
      ``("masks", "all_attention_mask")``, bool of that shape, False on padding, with ``with_tokens``;
    * ``("history", "prompt")``, a ``History`` ``[P, G, messages]``, with ``input_mode="history"``.

    ``step`` reads the policy's answers (:mod:`~torchrl_grpo.envs.responses`), cuts special tokens off their
    ends (stock policies decode them), and writes ``("next", "reward")`` and
    ``("next", "reward_parts", <name>)``, float32 ``[P, G, 1]``. A part without a value for an answer is NaN.
    ``done`` is always True; ``truncated`` is True where the length bound ended the answer, as far as the
    policy's tokens tell, and ``terminated`` is True elsewhere.

    Every entry of the batch ends in the same step, so ``LLMCollector`` yields completed trajectories anyway.
    Its ``yield_completed_trajectories`` is for entries that end at different times; it refuses a batch of two
    dimensions.

    ``reset`` and ``step`` are :meth:`draw` and :meth:`score` with TensorDicts around them. The collectors
    here call these two directly, because they have token ids already and need the rewards as they are.

    Attributes:
        prompts: the P prompts drawn last.

    Args:
        stream: where examples come from.
        tokenizer: a Hugging Face tokenizer with a pad or an end token.
        reward_set: scores the answers; only its ``names`` and ``score`` are used.
        num_envs: P, problems a batch.
        repeats: G, answers a problem.
        max_prompt_tokens: longest prompt that still leaves room for an answer.
        part_names: reward parts that get an entry in the tensordict, the reward set's names when left out;
            :meth:`score` returns all parts whatever is chosen.
        with_tokens: put ``tokens`` and ``masks`` into the tensordict, which takes 1 to 2 ms an answer;
            :attr:`prompts` has the token ids anyway. Left out, that depends on whether ``input_mode`` is
            ``tokens``.
        chat_template: Jinja text in place of the tokenizer's own template. A policy that reads ``history``
            renders it by a template of its own.
        device: where the tensors go; TorchRL's default when left out.
        input_mode: ``text``, ``tokens`` or ``history``, as in TorchRL's wrappers: what the policy reads, and
            whose answer is the action.
        max_new_tokens: length bound of an answer, for ``truncated``; without it the end token decides alone.

    Raises:
        ValueError: another ``input_mode``, or one of tokens without tokens.
        DataError: an example's prompt is longer than ``max_prompt_tokens``.
        ModelError: there is no chat template, or it cannot render an example.
    """

    def __init__(
        self,
        stream: PromptStream,
        tokenizer: PreTrainedTokenizerBase,
        reward_set: RewardSet,
        *,
        num_envs: int,
        repeats: int,
        max_prompt_tokens: int,
        part_names: Sequence[str] | None = None,
        with_tokens: bool | None = None,
        chat_template: str | None = None,
        device: torch.device | str | None = None,
        input_mode: str = "text",
        max_new_tokens: int | None = None,
    ) -> None:
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} is none of {', '.join(INPUT_MODES)}")
        with_tokens = input_mode == "tokens" if with_tokens is None else with_tokens
        if input_mode == "tokens" and not with_tokens:
            raise ValueError("input_mode='tokens' needs with_tokens=True: there would be nothing to read")
        super().__init__(device=device, batch_size=torch.Size([num_envs, repeats]))
        self.stream = stream
        self.tokenizer = tokenizer
        self.reward_set = reward_set
        self.max_prompt_tokens = max_prompt_tokens
        self.part_names = tuple(reward_set.names if part_names is None else part_names)
        self.with_tokens = with_tokens
        self.chat_template = chat_template
        self.input_mode = input_mode
        self.max_new_tokens = max_new_tokens
        self.prompts: list[Prompt] = []
        if isinstance(stream.examples, list):
            # Problems that are generated when asked for are checked when they are drawn.
            check_lengths(tokenizer, stream.examples, max_prompt_tokens, chat_template)
        self._make_specs()

    def _make_specs(self) -> None:
        shape, device = self.batch_size, self.device

        def text() -> NonTensor:
            return NonTensor(example_data="a string", shape=shape, device=device)

        def part() -> Unbounded:
            return Unbounded(shape=(*shape, 1), dtype=torch.float32, device=device)

        def nest(**leaves: Any) -> Composite:
            return Composite(leaves, shape=shape, device=device)

        observation = nest(
            text=nest(prompt=text()),
            group_id=Unbounded(shape=shape, dtype=torch.int64, device=device),
            example_id=text(),
        )
        if self.with_tokens:
            wide = torch.Size([*shape, -1])  # as wide as the longest prompt of the batch
            observation["tokens"] = nest(prompt=Unbounded(shape=wide, dtype=torch.int64, device=device))
            # The one name in "masks" that wrappers of TorchRL have room for. Without this entry they would
            # take pad tokens for padding, also those that end a message.
            mask = Binary(shape=wide, dtype=torch.bool, device=device)
            observation["masks"] = nest(all_attention_mask=mask)
        if self.input_mode == "history":
            wide = torch.Size([*shape, -1])  # messages
            fields = {"role": "user", "content": "a string", "is_complete": True}
            messages = Composite(
                {name: NonTensor(shape=wide, example_data=data) for name, data in fields.items()},
                shape=shape,
                device=device,
                data_cls=History,
            )
            observation["history"] = nest(prompt=messages)
        if self.part_names:
            # Observations and not rewards: with a second reward key, stock transforms that ask for
            # "the" reward key refuse the environment.
            observation["reward_parts"] = nest(**{name: part() for name in self.part_names})
        self.full_observation_spec = observation
        if self.input_mode == "tokens":
            ids = Categorical(len(self.tokenizer), shape=torch.Size([*shape, -1]), device=device)
            self.full_action_spec = nest(tokens=nest(response=ids))
        else:
            self.full_action_spec = nest(text=nest(response=text()))
        self.full_reward_spec = nest(reward=part())
        done = Binary(n=1, shape=(*shape, 1), dtype=torch.bool, device=device)
        self.full_done_spec = nest(done=done, terminated=done.clone(), truncated=done.clone())

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        if tensordict is not None:
            chosen = tensordict.get("_reset", None)
            if chosen is not None and not chosen.all():
                raise RuntimeError("GroupTextEnv resets whole batches: every entry of _reset must be True.")
        self.prompts = self.draw()
        return self._observe([[0.0] * self.batch_size.numel()] * len(self.part_names))

    def _render(self, number: int, example: Example) -> Prompt:
        text, ids = render(self.tokenizer, example.messages, self.chat_template)
        check_length(example, len(ids), self.max_prompt_tokens)
        return Prompt(number, example, text, ids)

    def draw(self) -> list[Prompt]:
        """The next P prompts of the stream.

        Raises:
            DataError: one is longer than ``max_prompt_tokens``.
        """
        first = self.stream.drawn
        examples = self.stream.draw(self.batch_size[0])
        return [self._render(first + offset, example) for offset, example in enumerate(examples)]

    def prompt(self, number: int) -> Prompt:
        """The prompt of group ``number``, whether or not it has been drawn.

        Raises:
            DataError: it is longer than ``max_prompt_tokens``.
        """
        return self._render(number, self.stream.at(number))

    def score(self, texts: Sequence[str], examples: Sequence[Example]) -> list[Scored]:
        """Rewards of answers to ``examples``, one each, special tokens at their ends left out."""
        return list(self.reward_set.score([self._without_end(text) for text in texts], examples))

    def _observe(self, parts: Sequence[Sequence[float]]) -> TensorDictBase:
        """The observation of the current examples, with the given values of the reward parts."""
        repeats = self.batch_size[1]
        groups_P = torch.tensor([prompt.number for prompt in self.prompts])
        observation = TensorDict(
            {
                "text": {"prompt": self._repeat_text([prompt.text for prompt in self.prompts])},
                "group_id": groups_P[:, None].repeat(1, repeats),
                "example_id": self._repeat_text([prompt.example.id for prompt in self.prompts]),
            },
            batch_size=self.batch_size,
            device=self.device,
        )
        if self.with_tokens:
            tokens_PT, mask_PT = self._pad_prompts()
            observation["tokens", "prompt"] = tokens_PT[:, None].repeat(1, repeats, 1)
            observation["masks", "all_attention_mask"] = mask_PT[:, None].repeat(1, repeats, 1)
        if self.input_mode == "history":
            chats = [
                [
                    {"role": message["role"], "content": message["content"]}
                    for message in prompt.example.messages
                ]
                for prompt in self.prompts
            ]
            observation["history", "prompt"] = History.from_chats([[chat] * repeats for chat in chats])
        for name, values in zip(self.part_names, parts, strict=True):
            observation["reward_parts", name] = self._column(values)
        if not self.with_tokens:
            return observation
        # Tensordict can merge answers of several lengths into tokens that are there if all is stacked lazily.
        return lazy_stack([lazy_stack(list(group.unbind(0))) for group in observation.unbind(0)])

    def _pad_prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of the P prompts side by side, padded on the left, and where they are no padding."""
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        ids_P = [prompt.token_ids for prompt in self.prompts]
        width = max(len(ids) for ids in ids_P)
        tokens_PT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in ids_P])
        lengths_P = torch.tensor([len(ids) for ids in ids_P])
        # By length and never by token: the pad token may be the end token of a turn.
        return tokens_PT, torch.arange(width) >= width - lengths_P[:, None]

    def _repeat_text(self, texts: Sequence[str]) -> Any:
        """Texts of the P prompts as non-tensor data ``[P, G]``, with one object a group."""
        return lazy_stack([NonTensorData(text, batch_size=[self.batch_size[1]]) for text in texts])

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        """P x G numbers as float32 ``[P, G, 1]``."""
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(*self.batch_size, 1)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        asked = tensordict.get("group_id", None)
        first = self.prompts[0].number if self.prompts else 0
        if asked is not None and int(asked[0, 0]) != first:
            raise RuntimeError(
                f"These answers belong to group {int(asked[0, 0])}, but the environment has moved on to "
                f"group {first}: step before the next reset."
            )
        truths = [prompt.example for prompt in self.prompts for _ in range(self.batch_size[1])]
        found = self.score(response_texts(tensordict, self.tokenizer, self.input_mode), truths)
        parts = [[scored.parts.get(name, math.nan) for scored in found] for name in self.part_names]
        result = self._observe(parts)
        result["reward"] = self._column([scored.total for scored in found])
        cut_off = hit_length_bound(tensordict, self.tokenizer, self.max_new_tokens)
        truncated = torch.tensor(cut_off, device=self.device).view(*self.batch_size, 1)
        result["done"] = torch.ones_like(truncated)
        result["terminated"], result["truncated"] = ~truncated, truncated
        return result

    def _without_end(self, text: str) -> str:
        """The answer without the special tokens at its end."""
        ends = tuple(token for token in self.tokenizer.all_special_tokens if token)
        while text.endswith(ends):
            text = text[: -max(len(end) for end in ends if text.endswith(end))]
        return text

    def _set_seed(self, seed: int | None) -> None:
        """Starts the data over in the order of another seed."""
        if seed is not None:
            self.stream = PromptStream(self.stream.examples, seed, self.stream.shuffle)

    def get_extra_state(self) -> dict[str, int]:
        """Position in the data: what ``state_dict`` holds of this environment."""
        return self.stream.state_dict()

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Goes on at a position in the data; see :meth:`PromptStream.load_state_dict`."""
        self.stream.load_state_dict(state)
