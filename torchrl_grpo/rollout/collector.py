"""Makes rounds of groups that workers generate, in turn with the trainer or ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import prompt_pictures, render_text
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.inference.protocol import Probe
from torchrl_grpo.models.lora import merged_weights
from torchrl_grpo.models.pictures import processor_of
from torchrl_grpo.rollout import saved_groups
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.round import Round, build_round, score_groups
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime.rng import group_seed

Postproc = Callable[[TensorDictBase], TensorDictBase]

# Key of the StalenessTracker's state. It cannot be renamed, because stored checkpoints have it.
TRACKER_KEY = "ledger"


class GroupSource:
    """Creates the group with a given number, its ``group_id``, and computes its rewards.

    Args:
        env: problems and rewards.
        tokenizer: tokenizer that turns responses into text.
        seed: seed of the run. A group's seed depends only on it, on the group's number, and on the number of
            groups in a round.
        teacher_prompt: function that makes the prompt of a teacher; None if it is the policy's.
    """

    def __init__(
        self,
        env: GroupTextEnv,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        teacher_prompt: Callable[[Example], list[int]] | None = None,
    ) -> None:
        self.env = env
        self.teacher_prompt = teacher_prompt
        self.tokenizer = tokenizer
        self.seed = seed

    def new_group(self, group_id: int) -> Group:
        """Return group ``group_id`` before its first token."""
        prompt = self.env.prompt(group_id)
        return Group(
            group_id,
            prompt.token_ids,
            group_seed(self.seed, group_id, self.env.batch_size[0]),
            [Response() for _ in range(self.env.batch_size[1])],
            self.env.problem_of(prompt),
            None if self.teacher_prompt is None else self.teacher_prompt(prompt.example),
            prompt.pictures,
        )

    def read_pictures(self, group: Group) -> None:
        """Give a group of a checkpoint the pictures of its prompt, which checkpoints do not have."""
        if processor_of(self.tokenizer) is None:
            # Nothing to read, and a stream of problems may draw one to answer.
            return
        example = self.env.stream.at(group.group_id)
        group.pictures = prompt_pictures(self.tokenizer, example, group.prompt)

    def score_rewards(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return finished groups with their texts and rewards."""
        examples = [self.env.stream.at(group.group_id) for group in groups]
        return score_groups(self.env, self.tokenizer, groups=groups, examples=examples)


class Collector:
    """Collects rounds of P prompts x G responses, with a part of the API of TorchRL's ``LLMCollector``.

    Iterating yields a :class:`Round`; :meth:`iterator` and :meth:`next` give its TensorDict alone. It does
    not subclass ``LLMCollector`` for two reasons. Token ids and log-probabilities must reach the loss exactly
    as sampled; decoding and re-tokenizing would not guarantee this. And a round of finished groups has to be
    a function of weights and seed, also after a refill or a resumption.

    ``increment_version`` is left out, because a version belongs to weights and changes with them. Replay
    buffers, remote copies and weight updaters are left out, because they are the trainer's work here.

    Args:
        source: problems and rewards, batch size ``[P, G]``.
        worker_group: workers that generate.
        total_dialog_turns: number of responses after which iteration ends. The name is TorchRL's.
        clock: function that returns seconds.

    Attributes:
        postproc: what :meth:`set_postproc` was given.
    """

    postproc: Postproc | None = None

    def __init__(
        self,
        source: GroupSource,
        worker_group: WorkerGroup,
        *,
        total_dialog_turns: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = source
        self.worker_group = worker_group
        self.total_dialog_turns = total_dialog_turns
        self._dispatcher = worker_group.dispatcher
        self._tracker = worker_group.dispatcher.scheduler.tracker
        self._first_counts = self._tracker.state_dict()
        self._is_local = worker_group.local_engine is not None
        self._clock = clock
        self._since = (clock(), self._worker_stats())
        self._waited = 0.0
        self._tensordicts: Iterator[TensorDictBase] | None = None

    @property
    def env(self) -> GroupTextEnv:
        """Problems and rewards."""
        return self.source.env

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of responses in a round. The name is TorchRL's."""
        return int(self.env.batch_size.numel())

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps that produced the weights that were published last."""
        return self.worker_group.policy_version

    def get_policy_version(self) -> int:
        """:attr:`policy_version`, as a call."""
        return self.policy_version

    def set_postproc(self, postproc: Postproc) -> None:
        """Have every TensorDict of :meth:`iterator` and :meth:`next` go through ``postproc``.

        Raises:
            RuntimeError: one is set already.
        """
        if self.postproc is not None:
            raise RuntimeError("This collector has a postproc already: compose the two into one")
        self.postproc = postproc

    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Tensor] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Tensor] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Give the workers other weights, and count them as those of one more optimizer step.

        The update is not verified. Training uses ``WeightPublisher`` instead. Engines cast the weights to
        their dtype, except with ``inference_model.weight_transfer=nccl``, where they must have it already.

        Args:
            policy_or_weights: the model, whose adapters are merged; or parameters by the names of its
                ``named_parameters``, which may be nested in a TensorDict.
            weights: parameters, in place of ``policy_or_weights``.
            policy: a model, in place of ``policy_or_weights``.

        Raises:
            ValueError: not exactly one of the three is given.
        """
        sources = [candidate for candidate in (policy_or_weights, weights, policy) if candidate is not None]
        if len(sources) != 1:
            raise ValueError("update_policy_weights_ takes one model, or the parameters of one")
        source = sources[0]
        if isinstance(source, nn.Module):
            source = dict(merged_weights(source))
        elif isinstance(source, TensorDictBase):
            source = source.flatten_keys(".")
        named = {name: tensor.detach() for name, tensor in source.items()}
        prompt = [self.source.tokenizer.eos_token_id]
        probe = Probe([prompt], 1, {name: tuple(tensor.shape) for name, tensor in named.items()})
        version = self.policy_version + 1
        self.worker_group.send(named.items(), version, probe).wait()
        self.worker_group.policy_version = version

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset the data, the sampling seeds and the count of responses, as in a new collector with ``seed``.

        Args:
            seed: seed of the order of the data and of the sampling.
            static_seed: return ``seed`` itself.

        Returns:
            The next seed, as in TorchRL's ``set_seed``.

        Raises:
            RuntimeError: workers run ahead with the seed with which they started.
        """
        if self._tracker.max_age:
            raise RuntimeError("Workers run ahead with the seed with which they started")
        following: int = self.env.set_seed(seed, static_seed=static_seed)
        self.source.seed = seed
        self._tensordicts = None
        self._dispatcher.run_in_thread(lambda: self._tracker.load_state_dict(self._first_counts))
        return following

    def start(self) -> None:
        """Let workers run ahead of the trainer from now on, as far as the staleness bound allows."""

        def begin() -> None:
            self._dispatcher.scheduler.may_run_ahead = bool(self._tracker.max_age)

        self._dispatcher.run_in_thread(begin)

    def shutdown(self) -> None:
        """End the workers."""
        self.worker_group.close()

    def __iter__(self) -> Iterator[Round]:
        """Rounds until ``total_dialog_turns`` responses have been collected."""
        while self._tracker.trained * self.env.batch_size[1] < self.total_dialog_turns:
            yield self.rollout()

    def iterator(self) -> Iterator[TensorDictBase]:
        """The groups of each round, ``[P]``: see :mod:`~torchrl_grpo.batch.schema`."""
        for round_ in self:
            yield round_.groups if self.postproc is None else self.postproc(round_.groups)

    def next(self) -> TensorDictBase | None:
        """The groups of the next round; None when all turns are collected."""
        if self._tensordicts is None:
            self._tensordicts = self.iterator()
        return next(self._tensordicts, None)

    def rollout(self, is_refill: bool = False) -> Round:
        """Wait for a round.

        Args:
            is_refill: whether the round completes the previous one, which had too few groups with a signal
                (dynamic sampling). It then does not count as a training round.

        Raises:
            WorkersLost: workers failed too often.
        """
        start, scored_s = self._clock(), self._dispatcher.stats.score_seconds
        groups = self._dispatcher.wait_for_round(is_refill)
        waited = self._clock() - start
        scored_s = self._dispatcher.stats.score_seconds - scored_s
        self._waited += waited
        return self._round(
            groups,
            {"time/generate_s": waited - scored_s, "time/score_s": scored_s}
            if self._is_local
            else {"time/wait_s": waited},
        )

    def take_too_old(self) -> Round | None:
        """Return the scored groups that have become too old since the last call; None without any.

        A group that was dropped before it was finished is not among them.
        """
        groups = self._dispatcher.run_in_thread(self._dispatcher.take_too_old)
        return self._round([replace(scored, reference=None) for scored in groups], {}) if groups else None

    def _round(self, groups: Sequence[ScoredGroup], seconds: dict[str, float]) -> Round:
        return build_round(
            groups,
            [render_text(self.env.tokenizer, self.env.stream.at(each.group.group_id)) for each in groups],
            reward_names=self.env.reward_set.names,
            pad_token_id=self.source.tokenizer.pad_token_id,
            seconds=seconds,
        )

    def round_metrics(self, round_: Round) -> dict[str, float]:
        """Throughput of the round; with workers elsewhere, metrics of their activity since the last call."""
        if self._is_local:
            seconds, sampled = round_.seconds, round_.response_tokens
            return {
                # A coarse clock may not have moved.
                "throughput/generated_tokens_per_s": sampled / max(seconds["time/generate_s"], 1e-9),
                "throughput/scored_tokens_per_s": sampled / max(seconds["time/score_s"], 1e-9),
            }
        before, stats = self._since[1], self._worker_stats()
        span = max(self._clock() - self._since[0], 1e-9)
        self._since = (self._clock(), stats)
        count = len(stats["tokens"])
        busy = [now - then for now, then in zip(stats["seconds"], before["seconds"], strict=True)]
        tokens = [now - then for now, then in zip(stats["tokens"], before["tokens"], strict=True)]
        waited, self._waited = self._waited, 0.0
        mean_busy = sum(busy) / count
        # Of those that generated. One that had nothing to do is not slow.
        rates = {
            number: sampled / seconds
            for number, (sampled, seconds) in enumerate(zip(tokens, busy, strict=True))
            if seconds > 0
        }
        slowest = min(rates, key=rates.__getitem__, default=None)
        return {
            "throughput/generated_tokens_per_s": sum(tokens) / span,
            "workers/busy_share": min(1.0, mean_busy / span),
            "workers/wait_s": max(0.0, span - mean_busy),
            # Overlap is generation while the trainer trained. Workers are assumed to be busy whenever the
            # trainer waits, so overlap is their busy time minus the time that it waited.
            "workers/overlap": min(1.0, max(0.0, mean_busy - waited) / span),
            "workers/score_s": stats["score_seconds"] - before["score_seconds"],
            "workers/restarts": stats["restarts"],
            "workers/queue": stats["queue"],
            # A call counts when it ends, and may have begun before.
            "workers/busy_share_min": min(1.0, min(busy) / span),
            "workers/busy_share_max": min(1.0, max(busy) / span),
            **(
                {}
                if slowest is None
                else {
                    "workers/tokens_per_s": sum(rates.values()) / len(rates),
                    "workers/tokens_per_s_min": rates[slowest],
                    "workers/tokens_per_s_max": max(rates.values()),
                    "workers/slowest": slowest,
                }
            ),
        }

    def _worker_stats(self) -> dict[str, Any]:
        stats = self._dispatcher.stats
        return {
            "tokens": list(stats.tokens),
            "seconds": list(stats.seconds),
            "score_seconds": stats.score_seconds,
            "restarts": stats.restarts,
            "queue": len(self._tracker.accepted),
        }

    def summary_entries(self) -> dict[str, Any]:
        """Entries of ``summary.json``; with workers elsewhere, counts of what happened to all groups too."""
        groups = self._dispatcher.run_in_thread(self._tracker.counts)
        turns = (groups["trained"] + groups["dropped_filter"]) * self.env.batch_size[1]
        if self._is_local:
            return {"dialog_turns": turns}
        restarts = self._dispatcher.stats.restarts
        return {"dialog_turns": turns, "groups": groups, "worker_restarts": restarts}

    def state_dict(self) -> dict[str, Any]:
        """Counts of the tracker, and every group that waits for the trainer; running groups start again."""

        def read() -> tuple[dict[str, Any], list[ScoredGroup]]:
            counts = {
                TRACKER_KEY: self._tracker.state_dict(),
                "restarts": self._dispatcher.stats.restarts,
            }
            return counts, [scored for _, scored in sorted(self._dispatcher.accepted.items())]

        # Nothing changes an accepted group, so workers go on while it is converted here.
        counts, accepted = self._dispatcher.run_in_thread(read)
        return counts | saved_groups.to_state(accepted)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`.

        Raises:
            CheckpointError: the checkpoint is of a run of ``grpo-async.py`` with an age above 0 and this run
                is not, or the reverse.
        """
        if TRACKER_KEY not in state:
            state = self._from_rounds(state)
        accepted = saved_groups.from_state(state)
        for scored in accepted:
            self.source.read_pictures(scored.group)
        self._sync_reference_log_probs(accepted)

        def write() -> None:
            self._tracker.load_state_dict(state[TRACKER_KEY])
            self._dispatcher.stats.restarts = state["restarts"]
            self._dispatcher.accepted = {scored.group.group_id: scored for scored in accepted}
            self._dispatcher.scheduler.reissue(list(self._tracker.running))

        self._dispatcher.run_in_thread(write)

    def _from_rounds(self, state: Mapping[str, int]) -> dict[str, Any]:
        """Return the state of an older checkpoint of ``grpo.py`` or ``sft.py``, which has rounds only."""
        size, taken = self.env.batch_size[0], state["taken"]
        rounds = state.get("rounds", taken)
        counts = {
            **self._tracker.state_dict(),
            "taken": taken,
            "issued": rounds * size,
            "trained": taken * size,
            "dropped_filter": (rounds - taken) * size,
            "max_age": 0,
        }
        return {TRACKER_KEY: counts, "accepted": [], "restarts": 0}

    def _sync_reference_log_probs(self, accepted: list[ScoredGroup]) -> None:
        """Compute the reference log-probabilities that a checkpoint's groups lack.

        If the trainer computes them in this run, those of the checkpoint are dropped.
        """
        reference = self._dispatcher.reference
        if reference is None:
            for scored in accepted:
                # The trainer computes them.
                scored.reference = None
            return
        missing = [scored for scored in accepted if scored.reference is None]
        futures = self._dispatcher.run_in_thread(
            lambda: [reference.log_probs(scored.group) for scored in missing]
        )
        for scored, future in zip(missing, futures, strict=True):
            scored.reference = future.result()
