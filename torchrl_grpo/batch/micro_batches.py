"""Divide a batch of groups into micro-batches that fit in memory, by their number of real tokens.

Axes: ``P`` groups, ``G`` responses per group.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from accelerate.utils.memory import clear_device_cache
from tensordict import TensorDictBase

from torchrl_grpo.batch.schema import PICTURE_KEYS, PROMPT_KEYS, collate, pack, token_counts, unpack
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.runtime.oom import ran_out_of_memory, stop_on_oom

T = TypeVar("T")
_OF_GROUPS = (*PROMPT_KEYS, *PICTURE_KEYS)


@dataclass(frozen=True)
class MicroBatch:
    """Some of a batch's groups, or some responses of one group.

    Attributes:
        rows: indices of the groups in the batch.
        samples: slice of each group's responses.
    """

    rows: tuple[int, ...]
    samples: slice

    def select(self, batch: TensorDictBase) -> TensorDictBase:
        """Return this piece of ``batch``, padded to its longest prompt and response."""
        groups = [batch[row] for row in self.rows]
        if self.samples != slice(None):
            groups = [
                group.named_apply(
                    lambda key, t: t if key in _OF_GROUPS else t[self.samples], nested_keys=True
                )
                for group in groups
            ]
        return collate(groups)


@dataclass(frozen=True)
class Share:
    """What one training rank gets of a batch.

    Attributes:
        rows: indices of its groups in the batch.
        groups: its groups. A rank without any has one response of the batch, for passes through the model in
            which all ranks take part.
    """

    rows: list[int]
    groups: TensorDictBase

    def __reduce__(self) -> tuple[Any, ...]:
        return _share_of_packed, (self.rows, pack(self.groups))


def _share_of_packed(rows: list[int], packed: dict[str, Any]) -> Share:
    return Share(rows, unpack(packed))


# A micro-batch that every share has.
DUMMY_MICRO_BATCH = MicroBatch((0,), slice(0, 1))


class TokenBudget:
    """Largest number of tokens in a micro-batch. It is halved after an out-of-memory error.

    The cost of a group is the tokens of its prompt and its responses. If the model cannot share the prompt,
    the prompt counts once per response. Padding is not counted: there is none where prompts are shared, and
    otherwise each response is padded to the longest prompt and response of its micro-batch.

    Args:
        tokens: largest number of tokens in a micro-batch.
        shares_prefix: whether a prompt is run once per group.
        notify: function that receives a message when the budget is halved.
    """

    def __init__(self, tokens: int, shares_prefix: bool, notify: Callable[[str], None]) -> None:
        self.tokens = tokens
        self._configured = tokens
        self.shares_prefix = shares_prefix
        self._notify = notify

    def run(
        self,
        batch: TensorDictBase,
        process: Callable[[MicroBatch], T],
        undo: Callable[[], None],
        pieces: Iterable[MicroBatch] | None = None,
    ) -> list[T]:
        """Call ``process`` on every micro-batch of ``batch``.

        When memory runs out, ``undo`` is called, the budget is halved, and all micro-batches start again.

        Args:
            batch: groups as in :mod:`~torchrl_grpo.batch.schema`.
            process: function of one micro-batch.
            undo: function that reverts all effects of ``process``.
            pieces: pieces that are split further if they exceed the budget; None for the whole batch.

        Returns:
            The results of ``process``, one per micro-batch.

        Raises:
            TrainingStopped: a single sequence exceeds the budget, or does not fit in memory.
        """
        whole = [MicroBatch(tuple(range(len(batch))), slice(None))] if pieces is None else list(pieces)
        prompts, responses = token_counts(batch)
        while True:
            micro_batches = self.split(batch, whole)
            results: list[T] = []
            try:
                for micro_batch in micro_batches:
                    results.append(process(micro_batch))
                return results
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
            # Outside of the handler, because its traceback keeps every tensor of the failed attempt alive.
            failed = micro_batches[len(results)]
            del results
            undo()
            clear_device_cache(garbage_collection=True)
            self._halve(failed, prompts, responses)

    def split(self, batch: TensorDictBase, pieces: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Split ``pieces`` of ``batch`` further if they exceed the budget.

        Raises:
            TrainingStopped: a single sequence exceeds the budget.
        """
        prompts, responses = token_counts(batch)
        return [small for piece in pieces for small in self._split(piece, prompts, responses, self.tokens)]

    def costs(self, batch: TensorDictBase) -> list[int]:
        """Return the cost of each group of ``batch`` in tokens."""
        prompts, responses = token_counts(batch)
        return [self._cost(MicroBatch((row,), slice(None)), prompts, responses) for row in range(len(batch))]

    def divide(
        self, batch: TensorDictBase, ranks: int, kinds: Iterable[Sequence[int]] | None = None
    ) -> list[Share]:
        """Divide the groups of a batch among training ranks, so that each has about the same cost.

        Args:
            batch: groups as in :mod:`~torchrl_grpo.batch.schema`.
            ranks: number of ranks.
            kinds: lists of rows, each divided evenly by itself, such as groups with and without a gradient.
                Other rows are left out. None is one list of all rows.
        """
        costs = self.costs(batch)
        rows: list[list[int]] = [[] for _ in range(ranks)]
        for kind in [range(len(batch))] if kinds is None else kinds:
            for own, places in zip(
                rows, partition_balanced([costs[row] for row in kind], ranks), strict=True
            ):
                own += [kind[place] for place in places]
        return [
            Share(sorted(own), batch[sorted(own)] if own else DUMMY_MICRO_BATCH.select(batch)) for own in rows
        ]

    @contextmanager
    def explain_oom(self) -> Iterator[None]:
        """Convert an out-of-memory error to one that names the key to change.

        Use this instead of :meth:`run` with several ranks, because one rank cannot retry on its own.

        Raises:
            TrainingStopped: memory ran out.
        """
        with stop_on_oom(
            f"train.max_tokens_per_microbatch={self.tokens}: memory ran out on a training rank; write "
            f"train.max_tokens_per_microbatch={max(1, self.tokens // 2)}, or "
            "train_model.gradient_checkpointing=true, or train_model.parallelism=fsdp2, and resume"
        ):
            yield

    def _halve(self, failed: MicroBatch, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        tokens = self._cost(failed, prompts, responses)
        if len(failed.rows) == 1 and len(responses[failed.rows[0]][failed.samples]) == 1:
            raise TrainingStopped(
                f"memory ran out on a single sequence of {tokens} tokens: lower "
                "inference_model.max_new_tokens or take a smaller model.name in a new run, or resume with "
                "train_model.gradient_checkpointing=true or a lower inference_model.gpu_memory_utilization"
            )
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        self._notify(
            f"memory ran out on a micro-batch of {tokens} tokens: the step is run again, from now on with "
            f"at most {self.tokens} tokens (train.max_tokens_per_microbatch) or a single sequence"
        )

    def _split(
        self, piece: MicroBatch, prompts: Sequence[int], responses: Sequence[Sequence[int]], budget: int
    ) -> list[MicroBatch]:
        costs = {row: self._cost(MicroBatch((row,), piece.samples), prompts, responses) for row in piece.rows}
        small = {row: cost for row, cost in costs.items() if cost <= budget}
        packed = [MicroBatch(rows, piece.samples) for rows in first_fit_decreasing(small, budget)]
        for row in (row for row in costs if row not in small):
            packed += self._split_group(row, piece.samples, prompts[row], responses[row], budget)
        return packed

    def _split_group(
        self, row: int, samples: slice, prompt: int, responses: Sequence[int], budget: int
    ) -> list[MicroBatch]:
        """Split a group over the budget into runs of consecutive responses, each with the prompt."""
        first, stop, _ = samples.indices(len(responses))
        starts, cost = [first], prompt
        for sample in range(first, stop):
            tokens = responses[sample]
            # Only the configured budget is a hard limit. A halved one still allows single sequences.
            if prompt + tokens > self._configured:
                raise TrainingStopped(
                    f"train.max_tokens_per_microbatch={self._configured}: a sequence has {prompt + tokens} "
                    f"tokens, {prompt} of its prompt and {tokens} of its response; write "
                    f"train.max_tokens_per_microbatch={prompt + tokens} or more, or a lower "
                    "inference_model.max_new_tokens in a new run"
                )
            if sample > starts[-1] and cost + tokens > budget:
                starts.append(sample)
                cost = prompt
            cost += tokens if self.shares_prefix else prompt + tokens
        return [MicroBatch((row,), slice(a, b)) for a, b in zip(starts, [*starts[1:], stop], strict=True)]

    def _cost(self, piece: MicroBatch, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> int:
        cost = 0
        for row in piece.rows:
            tokens = responses[row][piece.samples]
            cost += sum(tokens) + prompts[row] * (1 if self.shares_prefix else len(tokens))
        return cost

    def state_dict(self) -> dict[str, int]:
        """Return the configured and the current budget."""
        return {"tokens": self.tokens, "asked_for": self._configured}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the current budget, unless the configured budget has changed."""
        if state["asked_for"] == self._configured:
            self.tokens = state["tokens"]


def first_fit_decreasing(costs: dict[int, int], budget: int) -> list[tuple[int, ...]]:
    """Pack rows into bins with first-fit-decreasing.

    The number of bins is at most 11/9 of the optimum plus 6/9 (Dósa 2007).

    Args:
        costs: cost of each row, at most ``budget``.
        budget: capacity of a bin.

    Returns:
        Bins; the rows of each are in ascending order.
    """
    if not costs:
        return []
    ascending = np.array(sorted(costs), dtype=np.int64)
    sizes = np.array([costs[row] for row in ascending.tolist()], dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    rows, descending = ascending[order], sizes[order].tolist()
    # Two rows of more than half a bin never share one, so each of these opens its own.
    opened = int((2 * sizes > budget).sum())
    # A tree with the room of each bin in its leaves, and in each other node the larger of the two below it.
    levels = (len(rows) - 1).bit_length()
    leaves = 1 << levels
    room = [budget] * (2 * leaves)
    room[leaves : leaves + opened] = [budget - cost for cost in descending[:opened]]
    for level in reversed(range(levels)):
        first, below = 1 << level, 2 << level
        room[first:below] = map(max, room[below : 2 * below : 2], room[below + 1 : 2 * below : 2])
    leaf_of = list(range(leaves, leaves + opened))
    for cost in descending[opened:]:
        node = 1
        # Most of the time is spent in these two loops. Addition is faster than multiplication, and a
        # comparison is faster than max().
        for _ in range(levels):
            node += node
            if room[node] < cost:
                node += 1
        leaf_of.append(node)
        most = room[node] = room[node] - cost
        while node > 1:
            other = room[node ^ 1]
            if other > most:
                most = other
            node >>= 1
            if room[node] == most:
                # Nor does any node above it change.
                break
            room[node] = most
    bins = np.array(leaf_of) - leaves
    members = rows[np.lexsort((rows, bins))].tolist()
    ends = np.bincount(bins).cumsum().tolist()
    return [tuple(members[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def split_evenly(groups: int, samples: int, pieces: int, full_groups: int) -> list[MicroBatch]:
    """Split a batch into pieces of equal size, between groups and, for many pieces, also within groups.

    Args:
        groups: number of groups in this batch. A smaller batch has fewer pieces of the same size.
        samples: number of responses per group.
        pieces: number of pieces of a full batch: a divisor of ``full_groups``, or ``full_groups`` times a
            divisor of ``samples``.
        full_groups: number of groups in a full batch.
    """
    if pieces <= full_groups:
        size = full_groups // pieces
        return [
            MicroBatch(tuple(range(start, min(start + size, groups))), slice(None))
            for start in range(0, groups, size)
        ]
    size = samples // (pieces // full_groups)
    return [
        MicroBatch((row,), slice(start, start + size))
        for row in range(groups)
        for start in range(0, samples, size)
    ]


def partition_balanced(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Divide rows into shares of about equal cost, one for each training rank.

    The algorithm is longest-processing-time-first. The largest share is at most 4/3 of the optimum (Graham
    1969).

    Args:
        costs: cost of each row.
        shares: number of shares.

    Returns:
        The rows of each share in ascending order.
    """
    rows: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, least = loads[0]
        rows[least].append(row)
        heapq.heapreplace(loads, (load + costs[row], least))
    return [sorted(share) for share in rows]
