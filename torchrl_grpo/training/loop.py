"""The loop of both scripts: collect, score, advantage, buffer, optimize, publish, evaluate, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchrl_grpo.objectives.advantage import is_constant
from torchrl_grpo.observe.stats import cuda_in_use, peak_cuda_gib, peak_memory_gib
from torchrl_grpo.rollout.age import ages
from torchrl_grpo.rollout.collector import Round
from torchrl_grpo.rollout.dynamic_sampling import collect_with_signal
from torchrl_grpo.training.session import Session
from torchrl_grpo.training.throughput import rest_of


def train(run: Session, check_interrupts: Callable[[], None]) -> None:
    """Train until the run is as long as ``train.total_dialog_turns`` or ``train.num_epochs`` says.

    Args:
        run: prepared.
        check_interrupts: called before each step; raises KeyboardInterrupt where one got lost.
    """
    while not run.finished:
        check_interrupts()
        step(run)


def step(run: Session) -> dict[str, float]:
    """One optimizer step, with all that is due before and after it; returns its metrics.

    A round is collected when the buffer has been used up. Synchronously it is sampled then, by the weights it
    is first trained on: asynchronous training, which samples ahead, with a staleness bound of zero.
    """
    started = time.perf_counter()
    metrics: dict[str, float] = {}
    if run.counters.steps_left_in_round == 0:
        metrics |= collect(run)
    run.rest_engine()
    trained = time.perf_counter()
    batch = run.buffer.sample()
    metrics |= run.train_on(batch)
    metrics["time/train_s"] = time.perf_counter() - trained
    moves = run.optimize.loss.has_gradient(batch)
    metrics |= run.speed.trained(batch, moves, metrics["time/train_s"])
    metrics |= cuda_in_use("memory/train_cuda_gib", run.device)
    run.counters.step += 1
    run.unlogged = metrics
    run.refresh_reference()
    run.counters.steps_left_in_round -= 1
    if run.publication_is_due():
        metrics |= run.publish()
    if run.evaluation_is_due():
        metrics |= run.evaluate()
    metrics["time/step_s"] = time.perf_counter() - started
    metrics["time/other_s"] = rest_of(metrics)
    metrics["memory/peak_gib"] = peak_memory_gib()
    if run.device.type == "cuda":
        metrics["memory/peak_cuda_gib"] = peak_cuda_gib()
    run.log(metrics)
    if run.checkpoint_is_due():
        run.save()
    return metrics


def collect(run: Session) -> dict[str, float]:
    """Fill the buffer with a new round and return what the round looked like."""
    round_, refill = collect_with_signal(
        run.collector,
        run.advantage.without_signal,
        run.cfg.policy.max_refills if run.cfg.policy.constant_groups == "refill" else 0,
    )
    generating = cuda_in_use("memory/generate_cuda_gib", run.device)
    run.rest_engine()
    started = time.perf_counter()
    # Log-probabilities of other models and advantages are computed on the way in.
    run.buffer.refill(round_.groups)
    prepared = time.perf_counter() - started
    run.counters.steps_left_in_round = run.steps_per_round
    run.write_rollouts(round_)
    tokens = run.buffer.contents()["masks", "response"].sum().item()
    return {
        **describe(run, round_),
        **refill,
        **generating,
        **cuda_in_use("memory/prepare_cuda_gib", run.device),
        "time/prepare_s": prepared,
        "throughput/prepared_tokens_per_s": tokens / prepared,
    }


def describe(run: Session, round_: Round) -> dict[str, float]:
    """Metrics of a round: rewards, advantages, lengths, groups without a signal, throughput."""
    groups = run.buffer.contents()
    rewards = groups["next", "reward"]
    lengths = groups["masks", "response"].sum(-1).float()
    run.counters.response_tokens += round_.response_tokens
    run.counters.reward_errors += round_.error_count
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/constant_groups": float(is_constant(rewards.squeeze(-1)).float().mean()),
        "reward/errors": round_.error_count,
        "advantage/abs_mean": float(groups["advantage"].abs().mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(groups["truncated"].float().mean()),
        "policy/version": int(groups["policy_version"].min()),
        **ages(groups, run.counters.step, run.steps_per_round),
        "data/epoch": run.collector.env.stream.epoch_of(int(groups["group_id"].max())),
        **round_.seconds,
        **run.collector.figures(round_),
    }
    for name in sorted({name for parts in round_.parts for name in parts}):
        values = [parts[name] for parts in round_.parts if name in parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics
