"""What each training rank of tests/training/test_data_parallel_engine.py runs: its share of an engine, driven
by rank 0; and an interrupt of all ranks in the middle of a collective call.

RANK=0 WORLD_SIZE=2 ... python tests/helpers/engine_program.py OUTPUT
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from batches import make_model
from publishers import Direct
from rounding import float64
from torch import Tensor

from torchrl_grpo.distributed.rank_engine import RankEngine
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.protocol import Probe, Request, Sampling
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.training.data_parallel_engine import DataParallelEngine
from torchrl_grpo.weight_sync.probe import named_weights
from torchrl_grpo.weight_sync.publisher import WeightPublisher

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17], [18, 19, 20, 21]]
END_IDS = (2,)
ASKS = {
    "sampled": (PROMPTS, Sampling(3, 6, 1.0, [7, 1000, 2000, 3000, 4000])),
    "greedy": (PROMPTS, Sampling(1, 6, 0.0)),
    "fewer than ranks": (PROMPTS[:1], Sampling(2, 6, 1.0, [7])),
}


class Noting(TransformersEngine):
    """Notes which prompts it was given."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, END_IDS, pad_token_id=0)
        self.prompts_seen: list[list[list[int]]] = []
        self.deaf = False

    def submit(self, requests: Sequence[Request]) -> None:
        prompts = {request.key[:-1]: list(request.tokens) for request in requests}  # type: ignore[index]
        self.prompts_seen.append(list(prompts.values()))
        super().submit(requests)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if not self.deaf:
            super().update(weights)


@dataclass
class Member:
    """What a rank holds, in the place of a learner."""

    ranks: Ranks
    engine: RankEngine
    own: Noting
    arrived: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def prompts_seen(self) -> list[Any]:
        return self.ranks.gather(self.own.prompts_seen)

    def scored(self, rows: Sequence[Tensor]) -> list[list[Tensor]]:
        """What rank 0 gets of each rank's rows, after what all ranks know of what each of them got."""
        received = self.ranks.gather_to_main(list(rows))
        self.counts = self.ranks.gather(len(received))
        return received

    def shared(self, share: str, common: int) -> list[Any]:
        return self.ranks.gather((share, common))

    def deafen(self, rank: int) -> None:
        self.own.deaf = self.ranks.rank == rank

    def interrupted(self) -> None:
        """As when a launcher interrupts all ranks while they are in the same call."""
        signal.raise_signal(signal.SIGINT)
        self.arrived = self.ranks.gather(self.ranks.rank)


def ask(engine: Any, rename: str = "") -> dict[str, Any]:
    answers: dict[str, Any] = {name + rename: engine.generate(*what) for name, what in ASKS.items()}
    answers[f"next{rename}"] = engine.next_tokens(Probe(PROMPTS[:3], 4))
    return answers


def error_of(call: Callable[[], Any], kind: type[BaseException]) -> str | None:
    try:
        call()
    except kind as error:
        return str(error)
    return None


def main(output: Path) -> None:
    torch.set_num_threads(1)
    here = Ranks(on_cpu=True)
    # Each rank begins with weights of its own, so that only published ones make them agree.
    torch.manual_seed(here.rank)
    own = make_model("llama")
    with torch.no_grad():
        for parameter in own.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    engine = Noting(own)
    member = Member(here, RankEngine(engine, here, CPU), engine)
    if not here.is_main:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        here.follow(member)
        return
    shared = DataParallelEngine(member)  # type: ignore[arg-type]
    new = make_model("llama")
    alone = Noting(make_model("llama"))
    probe = Probe(PROMPTS[:3], 4, {name: tuple(tensor.shape) for name, tensor in named_weights(new)})
    published = shared.publish(named_weights(new), 3, probe)
    results = {"published": published, "version": shared.policy_version, **ask(shared)}
    results |= ask(alone, ", alone")
    with float64():
        results |= ask(Noting(make_model("llama")), ", exact")
    shared.sleep()
    shared.wake()
    shared.load_weights(named_weights(new))
    results["next, woken"] = shared.next_tokens(probe)
    results["asked"] = here.call_all(Member.prompts_seen, member)
    shares = [f"of rank {rank}" for rank in range(here.size)]
    results["shared"] = here.call_each(Member.shared, member, shares, 7)
    rows = [[torch.randn(3, length) for length in range(rank, 4)] for rank in range(here.size)]
    results["rows"] = rows, here.call_each(Member.scored, member, rows), member.counts
    here.call_all(Member.deafen, member, here.size - 1)
    publisher = WeightPublisher(
        new,
        TokenScorer(new),
        engine=shared,
        probe_prompts=PROMPTS[:3],
        pad_token_id=2,
        precision=torch.float32,
        engine_dtype=torch.float32,
        transport=Direct(shared),
    )
    with torch.no_grad():
        new.lm_head.weight += 1
    results["refused"] = error_of(lambda: publisher.publish(4), TrainingStopped)
    results["interrupted"] = error_of(lambda: here.call_all(Member.interrupted, member), KeyboardInterrupt)
    # They are still in step.
    results["arrived"] = member.arrived, len(here.call_all(Member.prompts_seen, member))
    here.release()
    torch.save(results, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
