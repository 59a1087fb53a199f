"""The loop of all scripts: collect, score, advantage, buffer, optimize, publish, evaluate, log, save.

A group has a *signal* if its responses have different rewards. A group without a signal does not show which
response is better. :meth:`~torchrl_grpo.objectives.advantage.GroupAdvantage.no_signal_mask` has the exact
conditions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tensordict import TensorDictBase

from torchrl_grpo.batch.schema import sampled_counts, token_counts
from torchrl_grpo.objectives.advantage import is_constant
from torchrl_grpo.observe.stats import cuda_in_use, peak_cuda_gib, peak_memory_gib
from torchrl_grpo.rollout.dynamic_sampling import collect_with_signal
from torchrl_grpo.rollout.round import (
    Round,
    check_rewards,
    episode_metrics,
    error_share,
    pass_rates,
    staleness_metrics,
)
from torchrl_grpo.runtime.interrupts import StopRequested, stop_requested
from torchrl_grpo.training.session import Session
from torchrl_grpo.training.throughput import unattributed_seconds


def train(run: Session, check_interrupts: Callable[[], None]) -> None:
    """Train for the length set by ``train.total_dialog_turns`` or ``train.num_epochs``.

    The held-out value may end the run earlier (``train.stop_at``, ``train.patience``).

    Args:
        run: session that has begun.
        check_interrupts: function called before each step; raises KeyboardInterrupt if a library
            suppressed an earlier one.

    Raises:
        StopRequested: the process was asked to stop. What was trained is saved.
        CheckpointError: the disk was full for a checkpoint.
        RunFolderLost: the folder of the run was deleted meanwhile.
    """
    counters, schedule = run.counters, run.schedule
    while not run.is_finished():
        check_interrupts()
        # Here and not in the step: what a checkpoint holds is whole between two steps.
        run.checkpoints.writer.check()
        if stop_requested():
            # If a resumed run would sample the next round with other weights than this run, take further
            # steps until it would not. After a checkpoint that was due it never would.
            saved = counters.step == run.saved_step
            if saved or schedule.resumes_exactly(counters.step, counters.steps_left_in_round):
                if not saved:
                    run.save()
                run.checkpoints.writer.finish()
                raise StopRequested
        step(run)
    run.checkpoints.writer.finish()


def step(run: Session) -> dict[str, float]:
    """Take one optimizer step, with everything due before and after it; return its metrics.

    A round is collected when the buffer is used up. ``grpo.py`` then samples it with the weights that
    were published last. By default these are the trainer's current weights, because every round ends with a
    publication. ``grpo-async.py``
    samples ahead. With a staleness bound of zero the two are the same.
    """
    counters, schedule = run.counters, run.schedule
    device = run.parts.learner.device
    started = time.perf_counter()
    metrics: dict[str, float] = {}
    if counters.steps_left_in_round == 0:
        metrics |= collect(run)
    run.sleep_engine()
    train_started = time.perf_counter()
    batch = run.parts.buffer.sample()
    metrics |= run.train_on(batch)
    metrics["time/train_s"] = time.perf_counter() - train_started
    metrics |= run.training_throughput(batch, metrics["time/train_s"])
    metrics |= cuda_in_use("memory/train_cuda_gib", device)
    counters.step += 1
    counters.steps_left_in_round -= 1
    # If workers are lost before run.log(), the checkpoint that is then saved contains these metrics.
    run.state.unlogged = metrics
    if schedule.is_reference_refresh_due(counters.step):
        run.refresh_reference()
    if schedule.is_publication_due(counters.step, counters.steps_left_in_round):
        metrics |= run.publish()
    if schedule.is_evaluation_due(counters.step):
        metrics |= run.evaluate()
    metrics["time/step_s"] = time.perf_counter() - started
    metrics["time/other_s"] = unattributed_seconds(metrics)
    metrics["memory/peak_gib"] = peak_memory_gib()
    if device.type == "cuda":
        metrics["memory/peak_cuda_gib"] = peak_cuda_gib()
    run.log(metrics)
    if schedule.is_checkpoint_due(counters.step) or run.is_finished() or run.is_best():
        run.save()
    return metrics


def collect(run: Session) -> dict[str, float]:
    """Fill the buffer with a new round and return the metrics of the round."""
    # No component of run.parts is kept in a local variable: the traceback of an exception would keep it alive
    # until a sweep ends.
    policy_cfg, device = run.cfg.policy, run.parts.learner.device
    round_, refill = collect_with_signal(
        run.parts.collector.rollout,
        run.parts.learner.advantage.no_signal_mask,
        policy_cfg.max_refills if policy_cfg.constant_groups == "refill" else 0,
        # A curriculum learns most from the groups that are thrown away: those that are solved or hopeless.
        lambda collected: observe_pass_rates(run, collected),
        run.write_discarded,
    )
    run.write_too_old()
    # Verify what workers have reported since the last check: checksums, the number of probe tokens that came
    # from the prefix cache, and log-probabilities. It comes before training on this round, because the run
    # stops if a checksum shows that a worker held the wrong weights.
    run.parts.publisher.verify_new_results()
    generating = cuda_in_use("memory/generate_cuda_gib", device)
    run.sleep_engine()
    started = time.perf_counter()
    # The buffer's write transforms add the log-probabilities of the reference and of the proximal policy, and
    # the advantages.
    run.parts.buffer.replace_contents(round_.groups)
    prepared = time.perf_counter() - started
    run.counters.steps_left_in_round = run.schedule.steps_per_round
    groups = run.parts.buffer.contents()
    run.write_rollouts(round_, groups)
    _, lengths = token_counts(groups)
    return {
        **(record_round(run, round_, groups) if run.learns_from_samples else record_solutions(run, groups)),
        **refill,
        **generating,
        **cuda_in_use("memory/prepare_cuda_gib", device),
        "time/prepare_s": prepared,
        "throughput/prepared_tokens_per_s": sum(map(sum, lengths)) / prepared,
    }


def observe_pass_rates(run: Session, collected: Round) -> None:
    """Tell the stream of problems how many responses of each group were right."""
    if run.learns_from_samples:
        run.parts.collector.env.stream.observe(pass_rates(collected, run.pass_reward, run.pass_threshold))


def record_solutions(run: Session, groups: TensorDictBase) -> dict[str, float]:
    """Return the metrics of a round of solutions."""
    # Solutions need no signal, so the end of the run must not warn that no group had one.
    run.counters.any_signal = True
    return {
        **_lengths(groups),
        "data/epoch": run.parts.collector.env.stream.epoch_of(int(groups["group_id"].max())),
    }


def _lengths(groups: TensorDictBase) -> dict[str, float]:
    lengths = sampled_counts(groups).float()
    return {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(groups["truncated"].float().mean()),
    }


def record_round(run: Session, round_: Round, groups: TensorDictBase) -> dict[str, float]:
    """Update the counters with a round and return its metrics.

    These are rewards, the share of groups with equal rewards, advantages, lengths, staleness, episodes and
    throughput.

    Raises:
        TrainingStopped: every reward failed on every response of the run's first round.
    """
    if run.counters.step == 0:
        check_rewards(round_.rewards_by_name, round_.errors, run.reward_weights, "the first round")
    rewards = groups["next", "reward"]
    run.counters.response_tokens += round_.response_tokens
    run.counters.reward_errors += round_.error_count
    stream = run.parts.collector.env.stream
    run.counters.any_signal |= not bool(run.parts.learner.advantage.no_signal_mask(groups).all())
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/constant_groups": float(is_constant(rewards.squeeze(-1).float()).float().mean()),
        "reward/errors": round_.error_count,
        **error_share(round_),
        "advantage/abs_mean": float(groups["advantage"].abs().mean()),
        **_lengths(groups),
        "policy/version": int(groups["policy_version"].min()),
        **staleness_metrics(groups, run.counters.step, run.schedule.steps_per_round),
        "data/epoch": stream.epoch_of(int(groups["group_id"].max())),
        **stream.metrics(),
        **episode_metrics(round_),
        **round_.seconds,
        **run.parts.collector.round_metrics(round_),
    }
    for name in sorted({name for parts in round_.rewards_by_name for name in parts}):
        values = [parts[name] for parts in round_.rewards_by_name if name in parts]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics
