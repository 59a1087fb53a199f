"""Makes rounds of groups that workers generate: with ``grpo-async.py`` while the trainer trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.inference.protocol import Probe
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.interface import CollectorInterface
from torchrl_grpo.rollout.round import Round, build_round, score_groups
from torchrl_grpo.rollout.workers.staleness import TRACKER_KEY, wrong_script_error
from torchrl_grpo.rollout.workers.types import WorkerDelivery
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime.rng import group_seed


class GroupSource:
    """Creates the group with a given number, and computes its rewards.

    Args:
        env: problems and rewards.
        tokenizer: tokenizer that turns responses into text.
        seed: seed of the run.
    """

    def __init__(self, env: GroupTextEnv, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.env = env
        self.tokenizer = tokenizer
        self.seed = seed

    def new_group(self, number: int) -> Group:
        """Return group ``number`` before its first token."""
        prompt = self.env.prompt(number)
        return Group(
            number,
            prompt.token_ids,
            group_seed(self.seed, number, self.env.batch_size[0]),
            [Response() for _ in range(self.env.batch_size[1])],
            self.env.problem_of(prompt),
        )

    def score_rewards(self, group: Group) -> ScoredGroup:
        """Return a finished group with its texts and rewards."""
        examples = [self.env.stream.at(group.group_id)]
        return score_groups(self.env, self.tokenizer, groups=[group], examples=examples)[0]


class AsyncCollector(CollectorInterface):
    """Collects rounds of P prompts x G responses from a group of workers.

    ``grpo.py`` also uses it if its engines are workers. They then generate while the trainer waits.

    It has a part of the API of TorchRL's ``LLMCollector``: see :mod:`~torchrl_grpo.rollout.interface`. There
    is no ``update_policy_weights_``: workers take weights through :meth:`send` alone, which returns what is
    needed to verify them. There is no ``set_seed``, because workers run ahead with the seed with which they
    started.

    Args:
        env: problems and rewards, batch size ``[P, G]``.
        worker_group: workers that generate.
        tokenizer: tokenizer of the model; only its padding id is used.
        total_dialog_turns: number of responses after which iteration ends. The name is TorchRL's.
        clock: function that returns seconds.
    """

    def __init__(
        self,
        env: GroupTextEnv,
        worker_group: WorkerGroup,
        tokenizer: PreTrainedTokenizerBase,
        *,
        total_dialog_turns: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.env = env
        self.worker_group = worker_group
        self.tokenizer = tokenizer
        self.total_dialog_turns = total_dialog_turns
        self._dispatcher = worker_group.dispatcher
        self._tracker = worker_group.dispatcher.scheduler.tracker
        self._clock = clock
        self._since = (clock(), self._worker_stats())
        self._waited = 0.0

    @property
    def dialog_turns_per_batch(self) -> int:
        """Number of responses in a round. The name is TorchRL's."""
        return int(self.env.batch_size.numel())

    @property
    def policy_version(self) -> int:
        """Version of the weights that were published last."""
        return self.worker_group.policy_version

    def start(self) -> None:
        """Let workers run ahead of the trainer from now on, as far as the staleness bound allows."""
        ahead = self._tracker.max_age > 0

        def begin() -> None:
            self._dispatcher.scheduler.may_run_ahead = ahead

        self._dispatcher.run_in_thread(begin)

    def shutdown(self) -> None:
        """End the workers."""
        self.worker_group.close()

    def __iter__(self) -> Iterator[Round]:
        while self._tracker.trained * self.env.batch_size[1] < self.total_dialog_turns:
            yield self.rollout()

    def rollout(self, is_refill: bool = False) -> Round:
        """Wait for a round.

        Args:
            is_refill: whether the round completes the previous one, which had too few groups with a signal
                (dynamic sampling). It then does not count as a training round.

        Raises:
            WorkersLost: workers failed too often.
        """
        start = self._clock()
        groups = self._dispatcher.wait_for_round(is_refill)
        self._waited += self._clock() - start
        return build_round(
            groups,
            [self.env.prompt(group.group.group_id).text for group in groups],
            reward_names=self.env.reward_set.names,
            pad_token_id=self.tokenizer.pad_token_id,
            seconds={"time/wait_s": self._clock() - start},
        )

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> WorkerDelivery:
        """Send weights to the workers: see :meth:`~torchrl_grpo.weight_sync.transport.Transport.send`.

        With a staleness bound of zero this also waits until every worker has loaded them: nothing can be
        generated before that.
        """
        delivery = self.worker_group.send(weights, version, probe)
        if self._tracker.max_age == 0:
            delivery.wait()
        return delivery

    def round_metrics(self, round_: Round) -> dict[str, float]:
        """Metrics of the workers' activity since the last call; ``round_`` is not used."""
        before, stats = self._since[1], self._worker_stats()
        span = max(self._clock() - self._since[0], 1e-9)
        self._since = (self._clock(), stats)
        count = len(stats["tokens"])
        busy = [now - then for now, then in zip(stats["seconds"], before["seconds"], strict=True)]
        tokens = [now - then for now, then in zip(stats["tokens"], before["tokens"], strict=True)]
        waited, self._waited = self._waited, 0.0
        mean_busy = sum(busy) / count
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
            **{f"workers/tokens_per_s_{number}": rate / span for number, rate in enumerate(tokens)},
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
        """Entries of ``summary.json``: counts of what happened to the groups of the run."""
        groups = self._dispatcher.run_in_thread(self._tracker.counts)
        return {
            "dialog_turns": (groups["trained"] + groups["dropped_filter"]) * self.env.batch_size[1],
            "groups": groups,
            "worker_restarts": self._dispatcher.stats.restarts,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts of the tracker, and every group that waits for the trainer; running groups start again."""

        def read() -> dict[str, Any]:
            accepted = [
                {
                    "group": one.group.state_dict(),
                    "texts": one.texts,
                    "scored": [[score.total, dict(score.parts), dict(score.errors)] for score in one.scores],
                    "reference": one.reference,
                }
                for _, one in sorted(self._dispatcher.accepted.items())
            ]
            restarts = self._dispatcher.stats.restarts
            return {TRACKER_KEY: self._tracker.state_dict(), "accepted": accepted, "restarts": restarts}

        return self._dispatcher.run_in_thread(read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; with ``max_policy_age=0`` also from one of ``grpo.py``.

        Raises:
            CheckpointError: the state is of a run of ``grpo.py`` and this one runs ahead, or the other way
                round.
        """
        if TRACKER_KEY not in state:
            state = self._from_sync_state(state)
        else:
            saved_age = self._saved_max_age(state[TRACKER_KEY])
            if self._tracker.max_age == 0 and saved_age > 0:
                # This run is grpo.py with workers. The state is of an asynchronous run.
                raise wrong_script_error("grpo-async.py")
            if self._tracker.max_age > 0 and saved_age == 0:
                raise wrong_script_error("grpo.py")
        accepted = [
            ScoredGroup(
                Group.from_state_dict(one["group"]),
                one["texts"],
                [ResponseScore(*score) for score in one["scored"]],
                one.get("reference"),
            )
            for one in state["accepted"]
        ]
        self._sync_reference_log_probs(accepted)

        def write() -> None:
            self._tracker.load_state_dict(state[TRACKER_KEY])
            self._dispatcher.stats.restarts = state["restarts"]
            self._dispatcher.accepted = {one.group.group_id: one for one in accepted}
            self._dispatcher.scheduler.reissue(list(self._tracker.running))

        self._dispatcher.run_in_thread(write)

    def _sync_reference_log_probs(self, accepted: list[ScoredGroup]) -> None:
        """Compute the reference log-probabilities that a checkpoint's groups lack.

        If the trainer computes them in this run, those of the checkpoint are dropped.
        """
        reference = self._dispatcher.reference
        if reference is None:
            for one in accepted:
                # The trainer computes them.
                one.reference = None
            return
        missing = [one for one in accepted if one.reference is None]
        futures = self._dispatcher.run_in_thread(lambda: [reference.log_probs(one.group) for one in missing])
        for one, future in zip(missing, futures, strict=True):
            one.reference = future.result()

    def _saved_max_age(self, counts: dict[str, Any]) -> int:
        """The staleness bound of the run that saved the counts; older checkpoints lack it."""
        return int(counts.get("max_age", self._tracker.max_age))

    def _from_sync_state(self, state: dict[str, int]) -> dict[str, Any]:
        if self._tracker.max_age > 0:
            raise wrong_script_error("grpo.py")
        size, rounds = self.env.batch_size[0], state["rounds"]
        taken = state["taken"]
        counts = {
            "taken": taken,
            "issued": rounds * size,
            "trained": taken * size,
            "dropped_age": 0,
            "dropped_filter": (rounds - taken) * size,
            "running": [],
            "accepted": {},
        }
        return {TRACKER_KEY: counts, "accepted": [], "restarts": 0}
