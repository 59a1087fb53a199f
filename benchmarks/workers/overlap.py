"""Several steps of grpo.py or grpo-async.py with engines that take a set time for a round.

Settings: ``workers``, 0 for grpo.py; ``generate_s``, seconds a round takes, however many workers share it;
``steps`` in one turn. The engines sleep, so that what is measured is scheduling and not who gets the cores.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.protocol import serve
from benchmarks.workers.ours import Drawn, config
from benchmarks.workload import Workload
from torchrl_grpo.config.derived import num_devices
from torchrl_grpo.data.load import load
from torchrl_grpo.inference.protocol import Completion, Request, SteppingEngine
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.rewards.registry import build_grader
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout import build as collections
from torchrl_grpo.rollout.collector import Collector
from torchrl_grpo.rollout.workers.ray_pool import RayPool
from torchrl_grpo.rollout.workers.ray_worker import RolloutActor, WorkerSpec
from torchrl_grpo.training.build import Job, build_session
from torchrl_grpo.training.loop import step as loop_step

_TOKEN = 100
_SETTLE = 2


class _Timed(TransformersEngine):
    """Holds real weights, and answers with one token over and over, so many seconds each."""

    def __init__(self, engine: SteppingEngine, token_s: float) -> None:
        assert isinstance(engine, TransformersEngine)
        super().__init__(engine.model, engine.eos_token_ids.tolist(), engine.pad_token_id)
        self.token_s = token_s
        self._running: dict[Hashable, tuple[Request, int]] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self._running |= {request.key: (request, 0) for request in requests}

    def step(self) -> list[tuple[Hashable, Completion]]:
        time.sleep(self.token_s)
        self._running = {key: (request, done + 1) for key, (request, done) in self._running.items()}
        ended = [key for key, (request, done) in self._running.items() if done == request.max_new_tokens]
        return [(key, self._answer(self._running.pop(key)[1], "length")) for key in ended]

    def abort_all(self) -> dict[Hashable, Completion]:
        taken = {key: self._answer(done, "aborted") for key, (_, done) in self._running.items()}
        self._running = {}
        return taken

    @staticmethod
    def _answer(tokens: int, reason: str) -> Completion:
        return Completion([_TOKEN] * tokens, [-1.0] * tokens, reason)


class _Actor(RolloutActor):
    """A worker with such an engine."""

    token_s = 0.0

    def make_engine(self, spec: WorkerSpec) -> SteppingEngine:
        return _Timed(super().make_engine(spec), self.token_s)


def random_model(folder: Path, source: str) -> Path:
    """A random model that trains for a second or so a step on one core, with the tokenizer of ``source``."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    settings = dict(workload.settings)
    workers, generate_s, steps = settings["workers"], settings["generate_s"], settings["steps"]
    folder = Path(tempfile.mkdtemp())
    cfg = config(
        Workload(
            **{**vars(workload), "model": str(random_model(folder / "model", workload.model)), "settings": {}}
        )
    )
    cfg.env.data_path = str(folder / "questions.jsonl")
    workload.write_questions(Path(cfg.env.data_path))
    cfg.inference_model.backend = "transformers"
    cfg.inference_model.num_devices = max(1, workers)
    # The same on both sides, so that training takes the same time.
    cfg.inference_model.num_threads = 1
    torch.set_num_threads(1)
    reward_set = RewardSet([(Drawn(), 1.0)])
    grader = build_grader(cfg, reward_set)
    token_s = generate_s / workload.response_tokens
    collect = functools.partial(_in_workers, token_s) if workers else functools.partial(_here, token_s)
    # Both sides on the CPU: what takes its time is a clock.
    plan = placement.plan(build_request(cfg, asynchronous=workers > 0), num_gpus=0)
    session = build_session(
        Job(cfg, folder / "run", load(cfg), reward_set, grader), make_collector=collect, plan=plan
    )
    session.begin()

    def turn() -> dict[str, float]:
        # While the other side had its turn, workers have run ahead: that must be used up first.
        for _ in range(_SETTLE):
            loop_step(session)
        started = time.perf_counter()
        metrics = [loop_step(session) for _ in range(steps)]
        seconds = time.perf_counter() - started

        def total(name: str) -> float:
            return sum(line.get(name, 0.0) for line in metrics)

        return {
            "seconds": seconds,
            "generate": generate_s * steps,
            "train": total("time/step_s") - total("time/generate_s") - total("time/wait_s"),
            "wait": total("time/wait_s"),
            "age": max(line["policy/age_max"] for line in metrics),
        }

    return turn


def _here(token_s: float, cfg: Any, source: Any, env: Any, tokenizer: Any) -> Collector:
    def make_engine(*arguments: Any, **options: Any) -> SteppingEngine:
        return _Timed(source.make_engine(*arguments, **options), token_s)

    return collections.collector_with_local_worker(
        cfg, replace(source, make_engine=make_engine), env, tokenizer
    )


def _in_workers(token_s: float, cfg: Any, source: Any, env: Any, tokenizer: Any) -> Collector:
    actor = type("TimedActor", (_Actor,), {"token_s": token_s})
    spec = WorkerSpec(
        cfg, source.model, source.eos_token_ids, tokenizer.pad_token_id, 64, threads=1, on_gpu=False
    )
    pool = RayPool(cfg, spec, count=num_devices(cfg.inference_model), actor=actor)
    return collections.collector_with_workers(cfg, source, env, tokenizer, pool)


if __name__ == "__main__":
    serve(build)
