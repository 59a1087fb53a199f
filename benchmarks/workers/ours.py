"""This project: the session and the loop that ``grpo.py`` runs, a step at a time."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from benchmarks.protocol import serve
from benchmarks.workload import Workload, reward, settle, use_all_cores
from torchrl_grpo.batch.micro_batches import TokenBudget
from torchrl_grpo.batch.schema import build_batch, token_counts
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import AnswerFormat, Autocast, Dtype
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.inference.protocol import Completion, SteppingEngine
from torchrl_grpo.models import loading
from torchrl_grpo.models.precision import resolve_autocast
from torchrl_grpo.models.prepare import compile_layers, prepare_for_training
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen_choice import choose_attention
from torchrl_grpo.objectives.build import build_objective
from torchrl_grpo.rewards.registry import build_grader
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.runtime.malloc import keep_freed_memory
from torchrl_grpo.training.build import Job, build_session
from torchrl_grpo.training.loop import step as loop_step
from torchrl_grpo.training.optimizer_step import OptimizerStep
from torchrl_grpo.training.session import Session


class Drawn:
    """The reward that every library is given."""

    name = "exact_match"

    def __call__(self, completion: str, example: Example) -> float:
        return reward(completion)


def config(workload: Workload) -> Config:
    """The run's configuration; what the workload does not name has its default."""
    cfg = Config()
    cfg.model.name = workload.model
    cfg.env.dataset = "jsonl"
    # The prompt as it is given: any other format appends a request for tags.
    cfg.env.answer_format = AnswerFormat("plain")
    cfg.env.num_envs, cfg.env.repeats = workload.prompts, workload.samples
    cfg.reward.weights = {"exact_match": 1.0}
    cfg.inference_model.max_new_tokens = workload.response_tokens
    longest = workload.prompt_tokens + 64 + workload.response_tokens
    cfg.inference_model.max_model_len = -(-longest // 128) * 128
    cfg.optimizer.lr = workload.lr
    cfg.train.total_dialog_turns = 10**6 * workload.prompts * workload.samples
    cfg.train.checkpoint_frequency = 0
    cfg.train_model.autocast = Autocast(workload.autocast)
    cfg.inference_model.dtype = Dtype("float32" if workload.autocast == "no" else "bfloat16")
    cfg.eval.num_problems = 0
    cfg.logging.progress = False
    for key, value in workload.settings.items():
        group, _, leaf = key.partition(".")
        setattr(getattr(cfg, group), leaf, value)
    return cfg


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    use_all_cores()
    return _whole_step(workload) if workload.rollouts is None else _training_phase(workload)


def begin(workload: Workload) -> Session:
    """Start a run of the workload, whose steps the caller takes."""
    cfg = config(workload)
    folder = Path(tempfile.mkdtemp())
    cfg.env.data_path = str(folder / "questions.jsonl")
    workload.write_questions(Path(cfg.env.data_path))
    reward_set = RewardSet([(Drawn(), 1.0)])
    grader = build_grader(cfg, reward_set)
    session = build_session(Job(cfg, folder / "run", load(cfg), reward_set, grader))
    engine = session.parts.workers.local_engine
    assert isinstance(engine, SteppingEngine)
    submit = engine.submit
    engine.submit = lambda requests: submit(  # type: ignore[method-assign]
        [dataclasses.replace(request, ignore_eos=True) for request in requests]
    )
    session.begin()
    return session


def _whole_step(workload: Workload) -> Callable[[], dict[str, float]]:
    session = begin(workload)
    record = Path(record) if (record := os.environ.get("BENCH_RECORD")) else None

    def step() -> dict[str, float]:
        metrics = loop_step(session)
        assert metrics["response/length_mean"] == workload.response_tokens, metrics
        groups = session.parts.buffer.contents()
        if record is not None and not record.exists():
            torch.save(_rollouts(groups), record)
        return {
            "prompt_tokens": statistics.fmean(token_counts(groups)[0]),
            "generate": metrics["time/generate_s"],
            "train": metrics["time/train_s"],
            "rest": metrics["time/step_s"] - metrics["time/generate_s"] - metrics["time/train_s"],
            "publish": metrics["time/publish_s"],
            "score": metrics["time/score_s"],
            "prepare": metrics["time/prepare_s"],
            "other": metrics["time/other_s"],
            "gemm_share": metrics["throughput/train_gemm_share"],
            "flops": metrics["throughput/train_flops_per_s"] * metrics["time/train_s"],
        }

    return step


def _rollouts(groups: TensorDictBase) -> dict[str, Any]:
    """A round, whose responses are equally long, as plain lists, for ``Workload.rollouts``."""
    return {
        "prompts": [group["tokens", "prompt"].tolist() for group in groups],
        "responses": groups["tokens", "response"].tolist(),
        "log_probs": groups["log_probs", "response"].tolist(),
        "rewards": groups["next", "reward"].squeeze(-1).tolist(),
    }


def _training_phase(workload: Workload) -> Callable[[], dict[str, float]]:
    cfg = config(workload)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recorded: dict[str, Any] = torch.load(str(workload.rollouts), weights_only=True)
    keep_freed_memory()
    model = loading.load_model(workload.model, cfg.model, device, torch.float32)
    prepare_for_training(model, cfg.train_model)
    autocast = resolve_autocast(cfg.train_model.autocast, device)
    scorer = TokenScorer(model, 1.0, autocast, cfg.train_model.shared_prefix)
    choose_attention(scorer, cfg.train_model.prefix_attention)
    if cfg.train_model.compile:
        compile_layers(model, scorer)
    loss, advantage = build_objective(cfg.policy, scorer, (1.0,), workload.response_tokens)
    groups = len(recorded["prompts"])
    samples = len(recorded["responses"][0])
    optimize = OptimizerStep(
        model,
        loss,
        cfg.optimizer,
        total_steps=10**6,
        groups_per_batch=groups,
        num_pieces=1,
        budget=TokenBudget(cfg.train.max_tokens_per_microbatch or 4096, True, print),
        use_scaler=False,
        max_skipped_steps=0,
    )
    rewards = torch.tensor(recorded["rewards"])[..., None]
    completions = [
        [Completion(tokens, values, "length") for tokens, values in zip(*group, strict=True)]
        for group in zip(recorded["responses"], recorded["log_probs"], strict=True)
    ]
    batch = build_batch(
        recorded["prompts"],
        completions,
        rewards,
        rewards,
        torch.arange(groups)[:, None].expand(groups, samples),
        0,
        0,
    )
    buffer = GroupBuffer(groups, groups, [advantage], 0)

    def step() -> dict[str, float]:
        # Advantages are part of training here, as they are of the other libraries' loss step.
        fresh = batch.clone()
        started = time.perf_counter()
        buffer.replace_contents(fresh)
        optimize(buffer.sample())
        settle()
        return {"train": time.perf_counter() - started}

    return step


if __name__ == "__main__":
    serve(build)
