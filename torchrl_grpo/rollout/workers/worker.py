"""A rollout worker: generates groups with its engine, takes new weights in between, and evaluates.

It runs where its engine is, knows nothing of Ray, and answers one call at a time. Left out: rewards, which
are given where the groups come together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchrl_grpo.inference.protocol import (
    Completion,
    NextTokens,
    Probe,
    Request,
    Sampling,
    SteppingEngine,
    requests_of,
)
from torchrl_grpo.rollout.groups import Group
from torchrl_grpo.rollout.workers.types import Command, TakeWeights, Work
from torchrl_grpo.runtime.rng import derive_seed

# A call to work() ends when a group does, or after this long: new weights never wait much longer.
MAX_WORK_S = 0.5


@dataclass
class WorkResult:
    """What a call to :meth:`RolloutWorker.work` brought.

    Attributes:
        finished: whole groups.
        tokens: tokens sampled since the call before, those of cut and of dropped responses too.
        seconds: spent.
    """

    finished: list[Group] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


class RolloutWorker:
    """Generates groups with an engine of its own.

    Args:
        engine: generates; closed with the worker.
        max_new_tokens: length bound of a response.
        temperature: sampling temperature.
        clock: seconds.
    """

    def __init__(
        self, engine: SteppingEngine, max_new_tokens: int, temperature: float, clock: Callable[[], float]
    ) -> None:
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._clock = clock
        self._groups: dict[int, Group] = {}
        self._sampled = 0
        # Of an evaluation under way.
        self._answers: dict[Hashable, Completion] | None = None

    def run(
        self, command: Command
    ) -> WorkResult | tuple[NextTokens, list[Group]] | list[list[Completion]] | None:
        """Run a command: :meth:`work`, :meth:`load` or :meth:`generate`."""
        if isinstance(command, Work):
            return self.work(command.groups, command.dropped)
        if isinstance(command, TakeWeights):
            return self.load(
                command.content, command.version, probe=command.probe, give_back=command.give_back
            )
        return self.generate(command.prompts, command.sampling)

    def work(self, groups: Sequence[Group], dropped: Sequence[int]) -> WorkResult:
        """Take on ``groups``, forget ``dropped``, generate until a group is whole or half a second is over.

        Args:
            groups: new ones, or cut ones to be continued.
            dropped: numbers of groups nobody wants any more.
        """
        start = self._clock()
        if dropped:
            self._pause()
            for number in dropped:
                self._groups.pop(number, None)
            self._submit(self._groups.values())
        if groups:
            if not self._groups:
                # Rounding depends on what the cache holds: a batch that starts alone starts with none.
                self.engine.reset_cache()
            self._groups |= {group.group_id: group for group in groups}
            self._submit(groups)
        result = WorkResult()
        while self._groups and not result.finished and self._clock() - start < MAX_WORK_S:
            for key, completion in self.engine.step():
                self._extend(key, completion)
            result.finished = [group for group in self._groups.values() if group.whole]
        for group in result.finished:
            del self._groups[group.group_id]
        result.tokens, self._sampled = self._sampled, 0
        result.seconds = self._clock() - start
        return result

    def load(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        probe: Probe,
        give_back: bool,
    ) -> tuple[NextTokens, list[Group]]:
        """Take new weights between two tokens.

        Args:
            weights: names and tensors of the whole model.
            version: optimizer steps behind them.
            probe: see :meth:`Engine.publish`.
            give_back: return the groups that are cut, and do not go on with them here.

        Returns:
            The answer to the probe with checksums of what the engine holds, and the groups given back.
        """
        self._pause()
        answer = self.engine.publish(weights, version, probe)
        if give_back:
            cut, self._groups = list(self._groups.values()), {}
            return answer, cut
        self._submit(self._groups.values())
        return answer, []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]] | None:
        """See :meth:`Engine.generate`; running groups wait.

        Returns:
            None when half a second is over and there is more to do: call again with the same arguments. So
            however long an evaluation takes, a worker that does not answer is one that hangs.
        """
        start = self._clock()
        requests = requests_of(prompts, sampling)
        if self._answers is None:
            self._pause()
            self.engine.submit(requests)
            self._answers = {}
        while len(self._answers) < len(requests) and self._clock() - start < MAX_WORK_S:
            self._answers.update(self.engine.step())
        if len(self._answers) < len(requests):
            return None
        found, self._answers = self._answers, None
        self._submit(self._groups.values())
        return [[found[p, g] for g in range(sampling.num_samples)] for p in range(len(prompts))]

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _pause(self) -> None:
        for key, completion in self.engine.withdraw().items():
            self._extend(key, completion)

    def _extend(self, key: Hashable, completion: Completion) -> None:
        assert isinstance(key, tuple)
        group, sample = key
        self._groups[group].responses[sample].extend(completion, self.engine.policy_version)
        self._sampled += len(completion.token_ids)

    def _submit(self, groups: Iterable[Group]) -> None:
        self.engine.submit(
            [
                self._request(group, sample)
                for group in groups
                for sample, response in enumerate(group.responses)
                if response.finish_reason is None
            ]
        )

    def _request(self, group: Group, sample: int) -> Request:
        done = group.responses[sample].token_ids
        seed = group.seed + sample
        return Request(
            (group.group_id, sample),
            [*group.prompt, *done],
            self.max_new_tokens - len(done),
            self.temperature,
            # A cut response must not draw again what it drew for its first tokens.
            derive_seed(seed, "continued", len(done)) if done else seed,
        )
