"""A batch of groups in pieces that fit in memory, by the tokens they really have.

Axes: ``P`` groups, ``G`` responses of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache
from tensordict import TensorDictBase

from torchrl_grpo.batch.schema import PROMPT_KEYS, token_counts, trim
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.runtime.oom import ran_out_of_memory, stopping

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """Some of a batch's groups, or some responses of one group.

    Attributes:
        rows: the groups, by their place in the batch.
        samples: of each group's responses, these.
    """

    rows: tuple[int, ...]
    samples: slice

    def of(self, batch: TensorDictBase) -> TensorDictBase:
        """The piece of ``batch``, no wider than its longest prompt and response."""
        piece = batch[list(self.rows)]
        if self.samples != slice(None):
            piece = piece.named_apply(
                lambda key, t: t if key in PROMPT_KEYS else t[:, self.samples], nested_keys=True
            )
        return trim(piece)


class TokenBudget:
    """How many tokens a micro-batch may have, and what to do when that was too many.

    A group costs its prompt and its responses; a model that cannot share the prompt pays it once a response.

    Args:
        tokens: in a micro-batch, at most.
        shares_prefix: whether a prompt is run once per group.
        say: where it is said that the budget was halved.
    """

    def __init__(self, tokens: int, shares_prefix: bool, say: Callable[[str], None]) -> None:
        self.tokens = tokens
        self._asked_for = tokens
        self.shares_prefix = shares_prefix
        self._say = say

    def run(
        self,
        batch: TensorDictBase,
        work: Callable[[MicroBatch], T],
        undo: Callable[[], None],
        pieces: Iterable[MicroBatch] | None = None,
    ) -> list[T]:
        """Do ``work`` on every micro-batch of ``batch``.

        When memory runs out, what was done is undone, the budget halves, and all of it starts again.

        Args:
            batch: groups as in :mod:`~torchrl_grpo.batch.schema`.
            work: on one micro-batch.
            undo: takes back whatever ``work`` left behind.
            pieces: cut these further where they are over the budget; None is the whole batch.

        Raises:
            TrainingStopped: a single sequence is over the budget, or does not fit in memory.
        """
        whole = [MicroBatch(tuple(range(len(batch))), slice(None))] if pieces is None else list(pieces)
        prompts, responses = token_counts(batch)
        while True:
            micro_batches = self.cut(batch, whole)
            results: list[T] = []
            try:
                for one in micro_batches:
                    results.append(work(one))
                return results
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
            # Outside of the handler, whose traceback holds on to every tensor of the failed attempt.
            failed = micro_batches[len(results)]
            del results
            undo()
            clear_device_cache(garbage_collection=True)
            self._halve(failed, prompts, responses)

    def cut(self, batch: TensorDictBase, pieces: Iterable[MicroBatch]) -> list[MicroBatch]:
        """``pieces`` of ``batch``, cut further where they are over the budget.

        Raises:
            TrainingStopped: a single sequence is over it.
        """
        prompts, responses = token_counts(batch)
        return [small for piece in pieces for small in self._cut(piece, prompts, responses, self.tokens)]

    def costs(self, batch: TensorDictBase) -> list[int]:
        """Tokens of each group of ``batch``."""
        prompts, responses = token_counts(batch)
        return [self._cost(MicroBatch((row,), slice(None)), prompts, responses) for row in range(len(batch))]

    @contextmanager
    def named_when_exceeded(self) -> Iterator[None]:
        """For several ranks, which cannot start again on their own: say what to change when memory runs out.

        Raises:
            TrainingStopped: memory ran out.
        """
        with stopping(
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
        self._say(
            f"memory ran out on a micro-batch of {tokens} tokens: the step is run again, from now on with "
            f"at most {self.tokens} (train.max_tokens_per_microbatch) or a single sequence"
        )

    def _cut(
        self, piece: MicroBatch, prompts: Sequence[int], responses: Sequence[Sequence[int]], budget: int
    ) -> list[MicroBatch]:
        costs = {row: self._cost(MicroBatch((row,), piece.samples), prompts, responses) for row in piece.rows}
        small = {row: cost for row, cost in costs.items() if cost <= budget}
        packed = [MicroBatch(rows, piece.samples) for rows in first_fit_decreasing(small, budget)]
        for row in (row for row in costs if row not in small):
            packed += self._cut_group(row, piece.samples, prompts[row], responses[row], budget)
        return packed

    def _cut_group(
        self, row: int, samples: slice, prompt: int, responses: Sequence[int], budget: int
    ) -> list[MicroBatch]:
        """A group over the budget, as runs of its responses, each with the prompt."""
        first, stop, _ = samples.indices(len(responses))
        cuts, cost = [first], prompt
        for sample in range(first, stop):
            tokens = responses[sample]
            # A budget that memory has lowered cuts no further than to single sequences.
            if prompt + tokens > self._asked_for:
                raise TrainingStopped(
                    f"train.max_tokens_per_microbatch={self._asked_for}: a sequence has {prompt + tokens} "
                    f"tokens, {prompt} of its prompt and {tokens} of its response; write "
                    f"train.max_tokens_per_microbatch={prompt + tokens} or more, or a lower "
                    "inference_model.max_new_tokens in a new run"
                )
            if sample > cuts[-1] and cost + tokens > budget:
                cuts.append(sample)
                cost = prompt
            cost += tokens if self.shares_prefix else prompt + tokens
        ends = [*cuts[1:], stop]
        return [MicroBatch((row,), slice(a, b)) for a, b in zip(cuts, ends, strict=True)]

    def _cost(self, piece: MicroBatch, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> int:
        cost = 0
        for row in piece.rows:
            tokens = responses[row][piece.samples]
            cost += sum(tokens) + prompts[row] * (1 if self.shares_prefix else len(tokens))
        return cost

    def state_dict(self) -> dict[str, int]:
        """What was asked for, and what memory has been found to hold."""
        return {"tokens": self.tokens, "asked_for": self._asked_for}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with what memory held, unless another budget is asked for now."""
        if state["asked_for"] == self._asked_for:
            self.tokens = state["tokens"]


def first_fit_decreasing(costs: dict[int, int], budget: int) -> list[tuple[int, ...]]:
    """Pack rows into as few bins of ``budget`` as first-fit-decreasing finds (Johnson 1973: at most 11/9 of
    the best, and 6/9 of a bin).

    Args:
        costs: of each row, none above ``budget``.
        budget: of a bin.

    Returns:
        Bins, the rows of each in ascending order.
    """
    bins: list[list[int]] = []
    left: list[int] = []
    for row, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        place = next((index for index, room in enumerate(left) if cost <= room), None)
        if place is None:
            bins.append([row])
            left.append(budget - cost)
        else:
            bins[place].append(row)
            left[place] -= cost
    return [tuple(sorted(rows)) for rows in bins]


def equal_pieces(groups: int, samples: int, pieces: int, full_groups: int) -> list[MicroBatch]:
    """Cut a batch into pieces of equal size: along groups while they last, then within them.

    Args:
        groups: in this batch; with fewer than in a full one there are fewer pieces of the same size.
        samples: of a group.
        pieces: that a full batch is cut into: a divisor of ``full_groups``, or that times a divisor of
            ``samples``.
        full_groups: of a full batch.
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


def divide(costs: Sequence[int], shares: int) -> list[list[int]]:
    """Rows for each of several workers, so that they have about equally much to do.

    Longest-processing-time-first (Graham 1969): at most 4/3 of the best division's longest.

    Args:
        costs: of each row.
        shares: how many.

    Returns:
        The rows of each share, ascending.
    """
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        least = min(range(shares), key=lambda share: (loads[share], share))
        found[least].append(row)
        loads[least] += costs[row]
    return [sorted(rows) for rows in found]
