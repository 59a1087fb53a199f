"""A single-turn TorchRL environment: P problems, G responses per problem, and one reward per response.

Each prompt is rendered once for its group, and a batch is scored in one call. A reset always replaces the
whole batch. Episodes of several turns run in the engine (:mod:`torchrl_grpo.envs.episodes`). For them this
environment gives the prompts and the rewards, and ``step`` is not used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Categorical, Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase

from torchrl_grpo.data.episode import ResponseText
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_length, check_lengths, prompt_pictures, render, render_text
from torchrl_grpo.envs.control_tokens import special_ends
from torchrl_grpo.envs.openings import Opening, opening
from torchrl_grpo.envs.responses import INPUT_MODES, is_truncated, response_texts
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.inference.protocol import PromptPictures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet
    from torchrl_grpo.rewards.types import ResponseScore


@dataclass(frozen=True)
class Prompt:
    """A problem as a model reads it.

    Attributes:
        group_id: id of the group of its responses: position among all problems drawn since the run began.
        example: the problem.
        text: rendered prompt.
        token_ids: token ids of ``text``, not padded, with all tokens of pictures.
        pictures: pictures of the prompt; None for a model of text.
    """

    group_id: int
    example: Example
    text: str
    token_ids: list[int]
    pictures: PromptPictures | None = None


class GroupTextEnv(EnvBase):
    """TorchRL environment with batch size ``[P, G]``: it presents problems and rewards responses.

    ``reset`` draws the next P examples and returns

    * ``("text", "prompt")`` and ``"example_id"``, text ``[P, G]``;
    * ``"group_id"``, int64 ``[P, G]``: number of the problem since the start of the run;
    * with ``with_tokens``: ``("tokens", "prompt")``, int64 ``[P, G, L]``, padded on the left, and
      ``("masks", "all_attention_mask")``, bool ``[P, G, L]``, False on padding;
    * with ``input_mode="history"``: ``("history", "prompt")``, a ``History`` ``[P, G, messages]``.

    ``step`` reads the policy's responses (:mod:`~torchrl_grpo.envs.responses`) and removes special tokens
    from their ends, where TorchRL's own policies leave them in the text. Tags stay. It writes
    ``("next", "reward")`` and, for each name of ``part_names``, ``("next", "reward_parts", <name>)``. All are
    float32 ``[P, G, 1]``.
    A reward or component without a value for a response is NaN. In the TensorDict of a round
    (:mod:`~torchrl_grpo.batch.schema`), one tensor has all rewards instead, without their components.
    ``done`` is always True. ``truncated`` is True if the response was cut off at the maximum length, as far
    as the policy's tokens show. ``terminated`` is its negation.

    All entries of the batch end in the same step, so ``LLMCollector`` always yields completed trajectories.
    Its option ``yield_completed_trajectories`` is for entries that end at different times. The option does
    not support a batch of two dimensions.

    Token ids of prompts have no control tokens from the data
    (:mod:`~torchrl_grpo.envs.control_tokens`). A policy that tokenizes text or messages itself does not know
    which text is from the data.

    ``reset`` and ``step`` wrap :meth:`draw` and :meth:`score` in TensorDicts. This package's collectors call
    these two methods directly, because they have token ids already and need :class:`ResponseScore` objects.

    Attributes:
        prompts: the P prompts that the last reset drew.

    Args:
        stream: source of the examples.
        tokenizer: a Hugging Face tokenizer with a pad or an end token.
        reward_set: rewards that score the responses; only ``names`` and ``score`` are used here.
        num_envs: P, number of problems per batch.
        repeats: G, number of responses per problem.
        max_prompt_tokens: length in tokens of the longest prompt that leaves room for a response.
        part_names: rewards, or components of rewards (``<name>/<part>``), that get an entry in the
            tensordict. The default is the rewards themselves. :meth:`score` always returns the components
            too.
        with_tokens: whether ``tokens`` and ``masks`` are in the tensordict, which takes 1 to 2 ms per
            response. The default is True only for ``input_mode="tokens"``. :attr:`prompts` always has the
            token ids.
        chat_template: Jinja text that replaces the tokenizer's own template. A policy that reads ``history``
            renders it with its own template.
        device: device of the tensors; None for TorchRL's default.
        input_mode: input of the policy, and the form of its response: ``text``, ``tokens`` or ``history``, as
            in TorchRL's wrappers.
        max_new_tokens: maximum length of a response in tokens, for ``truncated``. Without it, ``truncated``
            depends on the end token only.
        episodes: whether responses are episodes of several turns.

    Raises:
        ValueError: ``input_mode`` is unknown, or is ``tokens`` with ``with_tokens=False``.
        DataError: an example's prompt is longer than ``max_prompt_tokens``.
        ModelError: there is no chat template, or it cannot render an example.
    """

    def __init__(
        self,
        stream: PromptStream,
        tokenizer: PreTrainedTokenizerBase,
        reward_set: RewardSet | MixtureRewardSet,
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
        episodes: bool = False,
    ) -> None:
        if input_mode not in INPUT_MODES:
            raise ValueError(f"input_mode={input_mode!r} is unknown; write one of {', '.join(INPUT_MODES)}")
        with_tokens = input_mode == "tokens" if with_tokens is None else with_tokens
        if input_mode == "tokens" and not with_tokens:
            raise ValueError("with_tokens=False leaves nothing to read for input_mode='tokens'; remove it")
        super().__init__(device=device, batch_size=torch.Size([num_envs, repeats]))
        self.stream = stream
        if chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template
        self.tokenizer = tokenizer
        self.reward_set = reward_set
        self.max_prompt_tokens = max_prompt_tokens
        self.part_names = tuple(reward_set.names if part_names is None else part_names)
        self.with_tokens = with_tokens
        self.input_mode = input_mode
        self.max_new_tokens = max_new_tokens
        self.episodes = episodes
        self.prompts: list[Prompt] = []
        if isinstance(stream.examples, list):
            # Problems that are generated on demand are checked when they are drawn.
            check_lengths(tokenizer, stream.examples, max_prompt_tokens)
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
            # TorchRL's wrappers read this name only. Without it they would treat every pad token as padding,
            # including those that end a message.
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
            # These are observations and not rewards, because stock transforms that expect a single reward key
            # reject an environment with a second one.
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
                raise RuntimeError("GroupTextEnv resets whole batches; set every entry of _reset to True.")
        self.prompts = self.draw()
        return self._make_observation([[0.0] * self.batch_size.numel()] * len(self.part_names))

    def _render(self, group_id: int, example: Example) -> Prompt:
        text, ids = render(self.tokenizer, example)
        check_length(example, len(ids), self.max_prompt_tokens)
        return Prompt(group_id, example, text, ids, prompt_pictures(self.tokenizer, example, ids))

    def draw(self) -> list[Prompt]:
        """Draw the next P prompts of the stream.

        Raises:
            DataError: a prompt is longer than ``max_prompt_tokens``.
        """
        first = self.stream.drawn
        examples = self.stream.draw(self.batch_size[0])
        return [self._render(first + offset, example) for offset, example in enumerate(examples)]

    def problem_of(self, prompt: Prompt) -> Example | None:
        """Return the problem that an environment starts an episode with; None if a response is one turn.

        All of its values can be written as JSON, because it travels to workers and into checkpoints.
        """
        return Example(**prompt.example.plain()) if self.episodes else None

    def prompt(self, group_id: int) -> Prompt:
        """Render the prompt of group ``group_id``, whether or not it has been drawn yet.

        Raises:
            DataError: the prompt is longer than ``max_prompt_tokens``.
        """
        return self._render(group_id, self.stream.at(group_id))

    def score(self, texts: Sequence[str], examples: Sequence[Example]) -> list[ResponseScore]:
        """Score one response to each of ``examples``.

        Args:
            texts: what rewards judge, or the texts that a policy wrote. Those lose the tokens at their ends,
                and get the tags that their prompts have opened.
            examples: problem of each response.
        """
        known: dict[int, Opening] = {}

        def judged(text: str, example: Example) -> ResponseText:
            if isinstance(text, ResponseText):
                return text
            if id(example) not in known:
                known[id(example)] = opening(render_text(self.tokenizer, example))
            start = known[id(example)]
            return ResponseText(start.opened + self._strip_end(text), start.block)

        return list(self.reward_set.score([*map(judged, texts, examples)], examples))

    def _make_observation(self, parts: Sequence[Sequence[float]]) -> TensorDictBase:
        """Build the observation of the current examples, with a row of values for each of ``part_names``."""
        repeats = self.batch_size[1]
        groups = torch.tensor([prompt.group_id for prompt in self.prompts])
        observation = TensorDict(
            {
                "text": {"prompt": self._repeat_text([prompt.text for prompt in self.prompts])},
                "group_id": groups[:, None].repeat(1, repeats),
                "example_id": self._repeat_text([prompt.example.id for prompt in self.prompts]),
            },
            batch_size=self.batch_size,
            device=self.device,
        )
        if self.with_tokens:
            tokens, mask = self._pad_prompts()
            observation["tokens", "prompt"] = tokens[:, None].repeat(1, repeats, 1)
            observation["masks", "all_attention_mask"] = mask[:, None].repeat(1, repeats, 1)
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
        # Lazy stacks let tensordict merge responses of several lengths into the existing tokens.
        return lazy_stack([lazy_stack(list(group.unbind(0))) for group in observation.unbind(0)])

    def _pad_prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids ``[P, L]`` of the prompts, padded on the left, and their bool mask ``[P, L]``."""
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        ids = [prompt.token_ids for prompt in self.prompts]
        width = max(len(row) for row in ids)
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
        lengths = torch.tensor([len(row) for row in ids])
        # The mask comes from lengths and not from tokens, because the pad token may be the end token of a
        # turn.
        return tokens, torch.arange(width) >= width - lengths[:, None]

    def _repeat_text(self, texts: Sequence[str]) -> Any:
        """Return the texts of the P prompts as non-tensor data ``[P, G]``, with one object per group."""
        return lazy_stack([NonTensorData(text, batch_size=[self.batch_size[1]]) for text in texts])

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        """Return P x G numbers as float32 ``[P, G, 1]``."""
        return torch.tensor(values, dtype=torch.float32, device=self.device).view(*self.batch_size, 1)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.episodes:
            raise RuntimeError(
                "a response of several turns ends in the engine; use a collector of this package"
            )
        group_id = tensordict.get("group_id", None)
        first = self.prompts[0].group_id if self.prompts else 0
        if group_id is not None and int(group_id[0, 0]) != first:
            raise RuntimeError(
                f"These answers belong to group {int(group_id[0, 0])}, but the last reset started group "
                f"{first}; call step before the next reset."
            )
        examples = [prompt.example for prompt in self.prompts for _ in range(self.batch_size[1])]
        scores = self.score(response_texts(tensordict, self.tokenizer, self.input_mode), examples)
        parts = [[scored.parts.get(name, math.nan) for scored in scores] for name in self.part_names]
        result = self._make_observation(parts)
        result["reward"] = self._column([scored.total for scored in scores])
        flags = is_truncated(tensordict, self.tokenizer, self.max_new_tokens)
        truncated = torch.tensor(flags, device=self.device).view(*self.batch_size, 1)
        result["done"] = torch.ones_like(truncated)
        result["terminated"], result["truncated"] = ~truncated, truncated
        return result

    def _strip_end(self, text: str) -> str:
        """Remove the special tokens at the end of a response, except for tags."""
        ends = tuple(special_ends(self.tokenizer) - {""})
        while text.endswith(ends):
            text = text[: -max(len(token) for token in ends if text.endswith(token))]
        return text

    def _set_seed(self, seed: int | None) -> None:
        """Restart the data in the order of another seed."""
        if seed is not None:
            self.stream = self.stream.reseeded(seed)

    def get_extra_state(self) -> dict[str, int]:
        """Return the position in the data, which ``state_dict`` includes."""
        return self.stream.state_dict()

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Continue at a position in the data; see :meth:`PromptStream.load_state_dict`."""
        self.stream.load_state_dict(state)
