"""This project's collection path around an engine that answers at once: what remains is overhead."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.protocol import serve
from benchmarks.workers.ours import Drawn, config
from benchmarks.workload import Workload, use_all_cores
from torchrl_grpo.config.schema import PolicyConfig
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.objectives.advantage import GroupAdvantage
from torchrl_grpo.objectives.coefficients import KLCoefficient
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.build import EngineSource, collector_with_local_worker


class _Instant(SteppingEngine):
    """Answers with the same tokens for ever."""

    def __init__(self, tokens: int) -> None:
        # Ordinary words of any vocabulary of a few hundred.
        self._ids = [100 + number % 97 for number in range(tokens)]

    def submit(self, requests: Sequence[Request]) -> None:
        self._keys = [request.key for request in requests]

    def step(self) -> list[tuple[Hashable, Completion]]:
        return [(key, Completion(self._ids, [-1.0] * len(self._ids), "length")) for key in self._keys]

    def abort_all(self) -> dict[Hashable, Completion]:
        return {}

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe) -> ProbeResult:
        return ProbeResult(torch.empty(0), torch.empty(0), 0)

    def next_tokens(self, probe: Probe) -> ProbeResult:
        raise NotImplementedError

    def start_update(self) -> None:
        raise NotImplementedError

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def finish_update(self) -> None:
        raise NotImplementedError

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        raise NotImplementedError

    def checksums(self) -> tuple[Checksums, ...]:
        raise NotImplementedError

    def reset_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    use_all_cores()
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    examples = [Example(str(number), chat) for number, chat in enumerate(workload.messages(tokenizer))]
    env = GroupTextEnv(
        PromptStream(examples, 0, True),
        tokenizer,
        RewardSet([(Drawn(), 1.0)]),
        num_envs=workload.prompts,
        repeats=workload.samples,
        max_prompt_tokens=workload.prompt_tokens + 64,
    )
    cfg = config(workload)
    plan = placement.plan(build_request(cfg, asynchronous=False), num_gpus=0)

    def make_engine(*arguments: Any, **options: Any) -> _Instant:
        return _Instant(workload.response_tokens)

    name, vocabulary = workload.model, len(tokenizer)
    source = EngineSource(name, name, plan, [], vocabulary, None, True, make_engine)
    collector = collector_with_local_worker(cfg, source, env, tokenizer)
    collector.worker_group.send([], 0, Probe([], 0))
    # Advantages and the buffer are part of the path to the loss, as they are of the other library's.
    advantage = GroupAdvantage(PolicyConfig(), KLCoefficient(0.0), (1.0,), workload.response_tokens)
    buffer = GroupBuffer(workload.prompts, workload.prompts, [advantage], 0)

    def step() -> dict[str, float]:
        started = time.perf_counter()
        buffer.replace_contents(collector.rollout().groups)
        buffer.sample()
        return {"collect": time.perf_counter() - started}

    return step


if __name__ == "__main__":
    serve(build)
