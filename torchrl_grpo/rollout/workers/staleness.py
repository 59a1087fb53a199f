"""Bounds the number of groups in flight (staleness control) and counts what happens to each group.

Staleness is bounded where groups are admitted, as in AReaL (arXiv 2505.24298, sec. 5.1, eq. 3), and once more
where they are taken for training.

Notation: B groups a round; r rounds taken by the trainer so far; v the version of the weights that a worker
samples with, in rounds; S the largest age allowed. A group sampled by v and trained in round k has age k - v.

**Equation.** A worker that holds v may begin a group only while

    running + accepted < (v + S + 1 - r) B,

``running`` being the groups that have begun and are not yet accepted, ``accepted`` those that wait for the
trainer.

**Argument.** A group begun now may be trained in the rounds r, r + 1, ..., v + S: (v + S + 1 - r) of them, of
B groups each. The trainer takes the oldest groups first, so only groups that are running or accepted now can
be trained before it. While they are fewer than (v + S + 1 - r) B, a slot is left for the new group before it
expires. With S = 0 and v = r that is one round; once the round is taken, r = v + 1 and the right side is 0
until weights of version r are there: synchronous training. With r = n / B for n groups trained, adding n to
both sides gives AReaL's n + running + accepted < (v + S + 1) B.

A group that takes longer than all others may still miss its last round. It is then dropped, and counted:
:meth:`StalenessTracker.take` never returns a group older than S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.errors import CheckpointError


@dataclass
class StalenessTracker:
    """Counts of the groups of a run: issued = trained + dropped_age + dropped_filter + outstanding.

    Attributes:
        groups_per_round: B.
        max_age: S, in rounds. None for a run in turn: groups begin when the trainer asks for a round, with
            the weights that were published last, however old they are.
        rounds: rounds of the whole run; no more groups are issued than they can use.
        steps_per_round: optimizer steps that a round is trained for; a version counts optimizer steps.
        training_rounds: r.
        issued: groups that have begun, each counted once however often it starts again.
        trained: groups of the rounds that the trainer trains on.
        dropped_age: groups thrown away because they were, or would have been, too old.
        dropped_filter: groups thrown away by dynamic sampling. Each refill collects B further groups, and
            only B of all of them are trained on, so B groups are counted per refill.
        running: group number -> policy version (in rounds) of the group's oldest token. It is None until a
            worker starts to sample the group. Groups that wait for a worker are included.
        accepted: the same mapping for finished groups that wait for the trainer.
    """

    groups_per_round: int
    max_age: int | None
    rounds: int
    steps_per_round: int = 1
    training_rounds: int = 0
    issued: int = 0
    trained: int = 0
    dropped_age: int = 0
    dropped_filter: int = 0
    running: dict[int, int | None] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    # No group that runs or is accepted has an older version than this, in rounds.
    _no_older_than: float = math.inf

    @property
    def outstanding(self) -> int:
        """Groups running or accepted."""
        return len(self.running) + len(self.accepted)

    def in_rounds(self, version: int) -> int:
        """A version of the weights, given in optimizer steps, in whole rounds."""
        return version // self.steps_per_round

    def num_admissible(self, version: int) -> int:
        """Number of new groups that a worker with weights of ``version`` (optimizer steps) may begin."""
        last = self.training_rounds if self.max_age is None else self.in_rounds(version) + self.max_age
        rounds = min(last + 1, self.rounds) - self.training_rounds
        return rounds * self.groups_per_round - self.outstanding

    def register_group(self) -> int:
        """Register a new group and return its number."""
        group_id = self.issued
        self.issued += 1
        self.running[group_id] = None
        return group_id

    def start(self, group_id: int, version: int) -> None:
        """Record that a worker begins a group with ``version``.

        If the worker continues a group, ``version`` is the one that sampled the group's oldest token.
        """
        self.running[group_id] = self._held(version)

    def restart(self, group_id: int) -> None:
        """The group will be sampled anew from its first token."""
        self.running[group_id] = None

    def too_old(self, version_in_rounds: int | None) -> bool:
        """Whether the next round to be taken is too late for this version."""
        if version_in_rounds is None or self.max_age is None:
            return False
        return self.training_rounds - version_in_rounds > self.max_age

    def accept(self, group_id: int, version: int) -> None:
        """A group has finished; ``version`` is its oldest token's.

        A group that is too old for the next round is kept here; :meth:`expire` drops it later. The last round
        may still be refilled (see :meth:`uncount_last_round`), and the group may be fresh enough for that
        round.
        """
        del self.running[group_id]
        self.accepted[group_id] = self._held(version)

    def _held(self, version: int) -> int:
        """Return a version in rounds, and note that a group has it."""
        rounds = self.in_rounds(version)
        self._no_older_than = min(self._no_older_than, rounds)
        return rounds

    def expire(self) -> list[int]:
        """Drop every group that is too old for the next round, running or accepted; return their numbers."""
        if self.max_age is None or self.training_rounds - self._no_older_than <= self.max_age:
            return []
        held: Iterable[dict[int, Any]] = (self.running, self.accepted)
        gone = [
            (groups, group_id)
            for groups in held
            for group_id, version in groups.items()
            if self.too_old(version)
        ]
        for groups, group_id in gone:
            del groups[group_id]
        self.dropped_age += len(gone)
        versions = [*self.accepted.values(), *(v for v in self.running.values() if v is not None)]
        self._no_older_than = min(versions, default=math.inf)
        return [group_id for _, group_id in gone]

    def take(self) -> list[int] | None:
        """Take the B oldest accepted groups for the next round.

        Call :meth:`expire` before.

        Returns:
            Their numbers in ascending order; None if fewer than B groups are accepted.
        """
        if len(self.accepted) < self.groups_per_round:
            return None
        assert not any(map(self.too_old, self.accepted.values())), "expire() must come first"
        oldest_first = sorted(self.accepted, key=lambda group_id: (self.accepted[group_id], group_id))
        chosen = sorted(oldest_first[: self.groups_per_round])
        for group_id in chosen:
            del self.accepted[group_id]
        self.training_rounds += 1
        self.trained += len(chosen)
        return chosen

    def uncount_last_round(self) -> None:
        """Let the next round complete the round taken last, which had too few groups with a signal.

        Of the two rounds together only B groups are trained on. So B groups count as dropped in place of
        trained, and the next round has the number of the last one.
        """
        self.training_rounds -= 1
        self.trained -= self.groups_per_round
        self.dropped_filter += self.groups_per_round

    def counts(self) -> dict[str, int]:
        """The counts as entries of ``summary.json``."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped_age": self.dropped_age,
            "dropped_filter": self.dropped_filter,
            "left": self.outstanding,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the versions of accepted groups; running ones start again."""
        return {
            "taken": self.training_rounds,
            **{name: count for name, count in self.counts().items() if name != "left"},
            "max_age": self.max_age or 0,
            "running": sorted(self.running),
            "accepted": dict(self.accepted),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            CheckpointError: the checkpoint is of a run of ``grpo-async.py`` with an age above 0 and this run
                is not, or the reverse.
        """
        # Older checkpoints lack max_age.
        saved_age = state.get("max_age", self.max_age)
        if bool(saved_age) != bool(self.max_age):
            ahead = f"grpo-async.py and collector.max_policy_age={saved_age}"
            how = ahead if saved_age else "grpo.py, or with grpo-async.py and collector.max_policy_age=0"
            raise CheckpointError(
                f"resume: this run was started with {how}; resume it in the same way, or start a new run "
                "from its weights with model.name=RUN/checkpoints/STEP/model and without resume"
            )
        self.training_rounds = state["taken"]
        for name in ("issued", "trained", "dropped_age", "dropped_filter"):
            setattr(self, name, state[name])
        self.running = dict.fromkeys(state["running"])
        self.accepted = dict(state["accepted"])
        self._no_older_than = min(self.accepted.values(), default=math.inf)
