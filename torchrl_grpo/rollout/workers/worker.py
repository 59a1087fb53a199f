"""A rollout worker: generates groups with its engine, takes new weights in between, and evaluates.

On Ray it runs in the process of its engine. With servers it is a thread of the trainer's process that drives
one server. It knows nothing of Ray, and runs one call at a time. The dispatcher computes the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchrl_grpo.inference.protocol import (
    Completion,
    Probe,
    ProbeResult,
    Request,
    Sampling,
    SteppingEngine,
    build_requests,
    in_order,
)
from torchrl_grpo.rollout.groups import Group
from torchrl_grpo.rollout.workers.types import Command, GenerateGroups, LoadWeightsCommand
from torchrl_grpo.runtime.rng import derive_seed

# Longest duration of a call that generates, in seconds. A call that generates groups ends earlier if one
# finishes. With weight_update=in_flight, new weights never wait much longer.
MAX_CALL_S = 0.5


@dataclass
class GroupsResult:
    """Result of one call to :meth:`RolloutWorker.generate_groups`.

    Attributes:
        finished: groups that have finished.
        tokens: number of sampled tokens, each counted once: when its response ends, is interrupted or is
            dropped.
        seconds: duration of the call.
    """

    finished: list[Group] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


class RolloutWorker:
    """Generates groups with an engine of its own.

    Args:
        engine: engine that generates; closed with the worker.
        max_new_tokens: length bound of a response.
        temperature: sampling temperature.
        clock: function that returns seconds.
    """

    def __init__(
        self, engine: SteppingEngine, max_new_tokens: int, temperature: float, clock: Callable[[], float]
    ) -> None:
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._clock = clock
        self._groups: dict[int, Group] = {}
        # Groups that may have finished since step() was called last.
        self._extended: set[int] = set()
        self._num_sampled = 0
        # Responses of the evaluation that is under way.
        self._answers: dict[Hashable, Completion] | None = None

    def run(
        self, command: Command
    ) -> GroupsResult | tuple[ProbeResult, list[Group]] | list[list[Completion]] | None:
        """Run a command: :meth:`generate_groups`, :meth:`load` or :meth:`generate`."""
        if isinstance(command, GenerateGroups):
            return self.generate_groups(command.groups, command.dropped)
        if isinstance(command, LoadWeightsCommand):
            return self.load(
                command.content,
                command.version,
                probe=command.probe,
                return_interrupted=command.return_interrupted,
            )
        return self.generate(command.prompts, command.sampling)

    def generate_groups(self, groups: Sequence[Group], dropped: Sequence[int]) -> GroupsResult:
        """Take on ``groups``, forget ``dropped``, and generate until a group ends or half a second is over.

        Args:
            groups: new groups, or interrupted ones to be continued.
            dropped: numbers of groups to stop generating.
        """
        start = self._clock()
        if dropped:
            self._pause()
            for number in dropped:
                group = self._groups.pop(number, None)
                if group is not None:
                    self.engine.forget((number, sample) for sample in range(len(group.responses)))
            self._submit(self._groups.values())
        if groups:
            if not self._groups:
                # Rounding depends on what the cache holds. Clear the cache when no other group is running, so
                # that results are reproducible.
                self.engine.reset_cache()
            self._groups |= {group.group_id: group for group in groups}
            self._extended |= {group.group_id for group in groups}
            self._submit(groups)
        result = GroupsResult()
        while self._groups and not result.finished and self._clock() - start < MAX_CALL_S:
            for key, completion in self.engine.step():
                self._extend(key, completion)
            extended, self._extended = self._extended, set()
            result.finished = [
                group for number, group in self._groups.items() if number in extended and group.is_finished
            ]
        for group in result.finished:
            del self._groups[group.group_id]
        result.tokens, self._num_sampled = self._num_sampled, 0
        result.seconds = self._clock() - start
        return result

    def load(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        probe: Probe,
        return_interrupted: bool,
    ) -> tuple[ProbeResult, list[Group]]:
        """Take new weights between two tokens.

        Args:
            weights: names and tensors of the whole model.
            version: number of optimizer steps that produced these weights.
            probe: see :meth:`Engine.publish`.
            return_interrupted: whether to return the groups that are interrupted, and not continue them here.

        Returns:
            The probe result with checksums of what the engine holds, and the groups that are returned.
        """
        self._pause()
        return self._go_on(self.engine.publish(weights, version, probe), return_interrupted)

    def start_loading(self) -> None:
        """Begin what :meth:`load` does, for weights that come in several calls of the engine's ``update``."""
        self._pause()
        self.engine.start_update()

    def finish_loading(self, command: LoadWeightsCommand) -> tuple[ProbeResult, list[Group]]:
        """End it; see :meth:`load`."""
        self.engine.finish_update()
        return self._go_on(self.engine.prove(command.version, command.probe), command.return_interrupted)

    def _go_on(self, result: ProbeResult, return_interrupted: bool) -> tuple[ProbeResult, list[Group]]:
        if return_interrupted:
            interrupted, self._groups = list(self._groups.values()), {}
            return result, interrupted
        self._submit(self._groups.values())
        return result, []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]] | None:
        """See :meth:`Engine.generate`; running groups wait.

        Returns:
            None when half a second is over and there is more to do: call again with the same arguments. Each
            call is short, so a call that times out means that the worker hangs.
        """
        start = self._clock()
        requests = build_requests(prompts, sampling)
        if self._answers is None:
            self._pause()
            self.engine.submit(requests)
            self._answers = {}
        while len(self._answers) < len(requests) and self._clock() - start < MAX_CALL_S:
            self._answers.update(self.engine.step())
        if len(self._answers) < len(requests):
            return None
        answers, self._answers = self._answers, None
        self._submit(self._groups.values())
        return in_order(answers, len(prompts), sampling.num_samples)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _pause(self) -> None:
        for key, completion in self.engine.abort_all().items():
            self._extend(key, completion)

    def _extend(self, key: Hashable, completion: Completion) -> None:
        assert isinstance(key, tuple)
        group, sample = key
        self._extended.add(group)
        self._groups[group].responses[sample].extend(completion, self.engine.policy_version)
        # None means that the model sampled every token, and none came from an environment.
        sampled = completion.sampled
        self._num_sampled += len(completion.token_ids) if sampled is None else sum(sampled)

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
            # An interrupted response must not draw again what it drew for its first tokens.
            derive_seed(seed, "continued", len(done)) if done else seed,
            problem=group.problem,
            pictures=group.pictures,
        )
