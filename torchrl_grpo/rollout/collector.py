"""The synchronous collector: one batched engine call per round, which becomes one TensorDict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.inference.protocol import Engine, Probe, Sampling
from torchrl_grpo.models.lora import merged_weights
from torchrl_grpo.rollout.groups import Group, response_from_completion
from torchrl_grpo.rollout.interface import CollectorInterface
from torchrl_grpo.rollout.round import Round, build_round, score_groups
from torchrl_grpo.rollout.workers.staleness import TRACKER_KEY, wrong_script_error
from torchrl_grpo.runtime.rng import group_seed
from torchrl_grpo.weight_sync.transport import Delivery, DirectTransport


class RolloutCollector(CollectorInterface):
    """Collects rounds of P prompts x G responses, with a part of the API of TorchRL's ``LLMCollector``.

    Iterating yields a :class:`Round`. See :mod:`~torchrl_grpo.rollout.interface` for the remaining methods
    and the omitted ones. It does not subclass ``LLMCollector`` for two reasons. Token ids and
    log-probabilities must reach the loss exactly as sampled; decoding and re-tokenizing would not guarantee
    this. And a round of finished groups has to be a function of weights and seed, also after a refill or a
    resumption.

    Args:
        env: problems and rewards, batch size ``[P, G]``.
        engine: engine that generates.
        tokenizer: tokenizer that turns responses into text.
        max_new_tokens: length bound of a response.
        temperature: sampling temperature.
        total_dialog_turns: number of responses after which iteration ends. The name is TorchRL's.
        seed: seed of the sampling; a round's seeds depend only on it and on the round's number.
        clock: function that returns seconds, for the two timings of a round.
    """

    def __init__(
        self,
        env: GroupTextEnv,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        temperature: float,
        total_dialog_turns: int,
        seed: int,
        clock: Any,
    ) -> None:
        self.env = env
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.total_dialog_turns = total_dialog_turns
        self.seed = seed
        # Rounds generated, and how many of them were not refills.
        self.rounds_sampled = self.training_rounds = 0
        self._clock = clock

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of responses in a round. The name is TorchRL's."""
        return int(self.env.batch_size.numel())

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next round is sampled with."""
        return self.engine.policy_version

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> Delivery:
        """Hand weights to the engine: see :meth:`~torchrl_grpo.weight_sync.transport.Transport.send`."""
        return DirectTransport(self.engine).send(weights, version, probe)

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Tensor] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Give the engine other weights and count them as the next version.

        The update is not verified. Training uses ``WeightPublisher`` instead.

        Args:
            policy_or_weights: the model, whose adapters are merged; or parameters by the names of its
                ``named_parameters``, which may be nested in a TensorDict.
            weights: parameters, in place of ``policy_or_weights``.
            policy: a model, in place of ``policy_or_weights``.

        Raises:
            ValueError: not exactly one of the three is given.
        """
        given = [one for one in (policy_or_weights, weights, policy) if one is not None]
        if len(given) != 1:
            raise ValueError("update_policy_weights_ takes one model, or the parameters of one")
        source = given[0]
        if isinstance(source, nn.Module):
            source = dict(merged_weights(source))
        elif isinstance(source, TensorDictBase):
            source = source.flatten_keys(".")
        self.engine.load_weights((name, tensor.detach()) for name, tensor in source.items())
        self.engine.reset_cache()
        self.engine.policy_version += 1

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset the data, the sampling seeds and the count of responses, as in a new collector with ``seed``.

        Args:
            seed: seed of the order of the data and of the sampling.
            static_seed: return ``seed`` itself.

        Returns:
            The next seed, as in TorchRL's ``set_seed``.
        """
        following: int = self.env.set_seed(seed, static_seed=static_seed)
        self.seed = seed
        self.rounds_sampled = self.training_rounds = 0
        self._tensordicts = None
        return following

    def round_metrics(self, round_: Round) -> dict[str, float]:
        """Throughput metrics of the round."""
        seconds, tokens = round_.seconds, round_.response_tokens
        return {
            "throughput/generated_tokens_per_s": tokens / seconds["time/generate_s"],
            "throughput/scored_tokens_per_s": tokens / seconds["time/score_s"],
        }

    def summary_entries(self) -> dict[str, Any]:
        """Entries of ``summary.json``."""
        return {"dialog_turns": self.rounds_sampled * self.dialog_turns_per_batch}

    def start(self) -> None:
        """Do nothing: the synchronous collector has no background work."""

    def shutdown(self) -> None:
        """Close the engine."""
        self.engine.close()

    def __iter__(self) -> Iterator[Round]:
        while self.rounds_sampled * self.dialog_turns_per_batch < self.total_dialog_turns:
            yield self.rollout()

    def rollout(self, is_refill: bool = False) -> Round:
        """Collect one round.

        Args:
            is_refill: whether the round completes the previous one, which had too few groups with a signal
                (dynamic sampling). It then does not count as a training round.
        """
        # Cached key/value states are valid, but their rounding depends on the batch in which they were
        # computed. With an empty cache, a round is a function of weights and seed, whatever ran before.
        self.engine.reset_cache()
        prompts = self.env.draw()
        start = self._clock()
        seeds = self._seeds(len(prompts))
        problems = [self.env.problem_of(prompt) for prompt in prompts]
        completions = self.engine.generate(
            [prompt.token_ids for prompt in prompts],
            Sampling(
                self.env.batch_size[1],
                self.max_new_tokens,
                self.temperature,
                seeds,
                problems=[one for one in problems if one is not None] or None,
            ),
        )
        generated = self._clock()
        version = self.engine.policy_version
        groups = [
            Group(
                prompt.group_id,
                prompt.token_ids,
                seed,
                [response_from_completion(one, version) for one in group],
                problem,
            )
            for prompt, seed, group, problem in zip(prompts, seeds, completions, problems, strict=True)
        ]
        examples = [prompt.example for prompt in prompts]
        scored = score_groups(self.env, self.tokenizer, groups=groups, examples=examples)
        seconds = {"time/generate_s": generated - start, "time/score_s": self._clock() - generated}
        self.rounds_sampled += 1
        self.training_rounds += not is_refill
        return build_round(
            scored,
            [prompt.text for prompt in prompts],
            reward_names=self.env.reward_set.names,
            pad_token_id=self.tokenizer.pad_token_id,
            seconds=seconds,
        )

    def _seeds(self, count: int) -> list[int]:
        first = self.rounds_sampled * count
        return [group_seed(self.seed, first + prompt, count) for prompt in range(count)]

    def state_dict(self) -> dict[str, int]:
        """Rounds sampled, rounds not counting refills, and the position in the data."""
        # "taken" counts the rounds that the trainer has taken, without refills.
        return {"rounds": self.rounds_sampled, "taken": self.training_rounds, **self.env.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict` of this collector, or of an asynchronous one with
        ``max_policy_age=0``.

        Raises:
            CheckpointError: the state is of a run of ``grpo-async.py`` that ran ahead.
        """
        if TRACKER_KEY in state:
            state = self._from_async_state(state[TRACKER_KEY])
        self.rounds_sampled, self.training_rounds = state["rounds"], state["taken"]
        self.env.stream.load_state_dict({"epoch": state["epoch"], "position": state["position"]})

    def _from_async_state(self, tracker_state: dict[str, Any]) -> dict[str, int]:
        # Older checkpoints lack max_age.
        if tracker_state.get("max_age") != 0:
            raise wrong_script_error("grpo-async.py")
        # The trainer has received "trained" + "dropped_filter" groups. When it asks for a refill,
        # uncount_last_round moves the groups of the last round from the first counter to the second, so the
        # sum counts every received group once. Groups that had started but had not reached the trainer are
        # sampled again.
        used = tracker_state["trained"] + tracker_state["dropped_filter"]
        epoch, position = divmod(used, len(self.env.stream.examples))
        return {
            "rounds": used // self.env.batch_size[0],
            "taken": tracker_state["taken"],
            "epoch": epoch,
            "position": position,
        }
