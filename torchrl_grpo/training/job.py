"""Runs one job, from its configuration to its summary.

Errors in the data or the resumption are reported before torch is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.run_dir import claimed, explained_errors
from torchrl_grpo.config import Config
from torchrl_grpo.config.checks import schedule
from torchrl_grpo.config.derived import with_total_turns
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.data.load import load
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.errors import CheckpointError, RunFolderLost, TrainingStopped, UserError, WorkersLost
from torchrl_grpo.models import hub_upload
from torchrl_grpo.observe.held_out import held_out
from torchrl_grpo.planning import cores, preflight, resolve
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.report import change
from torchrl_grpo.rewards import registry
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.registry import build_grader, build_reward_set, grader_of_run
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet
from torchrl_grpo.runtime import hardware, rank_env, screen
from torchrl_grpo.runtime.disk_full import is_disk_full_error
from torchrl_grpo.runtime.files import compile_cache
from torchrl_grpo.runtime.interrupts import STOP_SIGNAL, StopRequested
from torchrl_grpo.runtime.no_collection import no_collection
from torchrl_grpo.runtime.optional_packages import quiet_unused
from torchrl_grpo.training.early_end import summary_of_ended_run

if TYPE_CHECKING:
    from torchrl_grpo.training.session import Session


# Seconds in which rank 0 takes the shards of its last checkpoint from a rank that has failed.
_LAST_SHARDS_S = 600.0


def run(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train as ``cfg`` says, and write to ``run_dir``.

    Args:
        cfg: validated configuration.
        run_dir: folder of the run; with ``cfg.resume``, the folder of the run to continue.

    Returns:
        The contents of ``summary.json``.

    Raises:
        UserError: the data, checkpoint, model or training is invalid; the message names the fix.
    """
    return _claim_and_train(cfg, run_dir, asynchronous=False)


def run_async(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Train like :func:`run`, with workers on Ray or with servers that generate while the trainer trains."""
    return _claim_and_train(cfg, run_dir, asynchronous=True)


def evaluate(cfg: Config, resume_from: Path | None) -> dict[str, float]:
    """Measure the held-out accuracy or rewards of a model, without a run folder.

    Args:
        cfg: validated configuration.
        resume_from: checkpoint with the model; None for ``model.name``.

    Returns:
        The metrics ``eval/*``.

    Raises:
        UserError: the data, checkpoint or model is invalid.
    """
    metrics, _ = evaluate_problems(cfg, resume_from)
    return metrics


def evaluate_problems(cfg: Config, resume_from: Path | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the metrics of :func:`evaluate`, and for each problem ``id``, ``response`` and ``grade``."""
    if cfg.eval.num_problems == 0:
        raise bad_value("eval.num_problems", 0, "it leaves nothing to evaluate", "eval.num_problems=200")
    # Do not open a run in the user's loggers for an evaluation.
    cfg = replace(cfg, logging=replace(cfg.logging, backends=[], rollouts=False))
    problems = load(cfg)
    examples = problems.first_examples(held_out=True)
    plan = preflight.announce(cfg, asynchronous=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        screen.libraries_to_log(),
        closing(build_reward_set(cfg)) as reward_set,
        closing(build_grader(cfg, reward_set, examples)) as grader,
    ):
        _prepare_process(cfg, plan)
        with no_collection():
            import torch

            from torchrl_grpo.distributed.ranks import Ranks
            from torchrl_grpo.training.build import Job, build_session

        ranks = Ranks(on_cpu=not torch.cuda.is_available())
        job = Job(cfg, Path(folder), problems, reward_set, grader, resume_from, is_evaluation=True)
        try:
            session = build_session(job, plan=plan, ranks=ranks)
            try:
                metrics = session.evaluate_only()
                if held_out(metrics) is None:
                    raise _no_grades(session.responses)
                return metrics, session.responses
            finally:
                session.close()
        finally:
            ranks.release()


def _no_grades(rows: Sequence[Mapping[str, Any]]) -> TrainingStopped:
    error = next((text for row in rows for text in row.get("errors", {}).values()), "its reward gave none")
    return TrainingStopped(
        f"no held-out response has a grade: {error}; correct the arguments of the judge, or choose "
        "another reward to grade"
    )


def follow() -> None:
    """Run a training rank other than rank 0: build its learner, and repeat the calls of rank 0."""
    _prepare_process(None, None)
    with no_collection():
        import torch

        from torchrl_grpo.distributed.ranks import Ranks, divide_threads
        from torchrl_grpo.runtime.malloc import release_freed_memory
        from torchrl_grpo.training.learner import Learner

    ranks = Ranks(on_cpu=not torch.cuda.is_available())
    start = ranks.recv()
    if start is None:
        return
    spec, plan, log = start
    device = torch.device(plan.train.devices[rank_env.local_rank()])
    divide_threads(spec.cfg, plan)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with screen.libraries_to_log(log):
        learner = Learner(spec, device, ranks=ranks, notify=lambda text: None)
        # Rank 0 may still need the shards of its last checkpoint.
        try:
            ranks.follow(learner)
        except BaseException:
            learner.sender.wait(_LAST_SHARDS_S)
            raise
        learner.sender.wait()
    # As Session.close() does: a sweep's next job needs the memory.
    del learner
    release_freed_memory()


def _claim_and_train(cfg: Config, run_dir: Path, asynchronous: bool) -> dict[str, Any]:
    cfg = preflight.resolve_proximal(cfg, asynchronous)
    # A new run loads its data before it locks its folder, so it leaves no lock if the data cannot be read. A
    # resumed run first compares its configuration with that of the checkpoint.
    problems = load(cfg) if cfg.resume is None else None
    with explained_errors(run_dir), claimed(run_dir):
        resume_from = None
        if cfg.resume is not None:
            checkpoint.clean(run_dir)
            resume_from = checkpoint.find(run_dir, cfg.resume)
            checkpoint.check_same_run(resume_from, cfg)
        problems = problems or load(cfg)
        plan = preflight.announce(cfg, asynchronous)
        hub_upload.check(cfg)
        count = len(problems.train)
        for sentence in schedule.length_warnings(with_total_turns(cfg, count), count):
            sys.stderr.write(f"warning: {sentence}\n")
        summary = _prepare_and_train(cfg, run_dir, problems, resume_from=resume_from, plan=plan)
        # Summaries of older versions have no best_step.
        hub_upload.upload(cfg, run_dir / "checkpoints", summary["steps"], summary.get("best_step"))
        return summary


def _prepare_and_train(
    cfg: Config, run_dir: Path, problems: Problems, *, resume_from: Path | None, plan: Plan
) -> dict[str, Any]:
    try:
        with (
            screen.libraries_to_log(),
            closing(registry.of_run(cfg, problems, run_dir)) as reward_set,
            closing(grader_of_run(cfg, problems, reward_set, run_dir)) as grader,
        ):
            return _train(
                cfg,
                run_dir,
                problems=problems,
                reward_set=reward_set,
                grader=grader,
                resume_from=resume_from,
                plan=plan,
            )
    except StopRequested:
        sys.stderr.write(f"{STOP_SIGNAL.name}: stopped; {checkpoint.how_to_continue(run_dir)}\n")
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"{checkpoint.how_to_continue(run_dir)}\n")
        raise
    except OSError as error:
        if not is_disk_full_error(error):
            raise
        where = "there" if error.filename else f"on the disk of {run_dir} and that of temporary files"
        raise TrainingStopped(f"{error}; make room {where}: {checkpoint.how_to_continue(run_dir)}") from error


def _train(
    cfg: Config,
    run_dir: Path,
    *,
    problems: Problems,
    reward_set: RewardSet | MixtureRewardSet,
    grader: CountingGrader,
    resume_from: Path | None,
    plan: Plan,
) -> dict[str, Any]:
    _prepare_process(cfg, plan)
    with no_collection():
        import torch

        from torchrl_grpo.distributed.ranks import Ranks, divide_threads
        from torchrl_grpo.observe import report
        from torchrl_grpo.observe.metrics import METRICS, read_jsonl
        from torchrl_grpo.runtime.interrupts import remember_interrupts
        from torchrl_grpo.runtime.malloc import frozen_objects
        from torchrl_grpo.training.build import Job, build_session
        from torchrl_grpo.training.loop import train

    ranks = Ranks(on_cpu=not torch.cuda.is_available())
    divide_threads(cfg, plan)
    if plan.num_gpus > 0:
        # Accelerate takes the GPU of the rank's number, which is not always the plan's.
        torch.cuda.set_device(plan.train_device)
    step = None if resume_from is None else int(resume_from.name)
    if step is not None and (summary := summary_of_ended_run(cfg.train, run_dir, step)):
        # The run has already ended with this checkpoint. Its summary.json describes the whole run, and going
        # on from here would only overwrite it.
        ranks.release()
        steps = summary["steps"]
        screen.err().write(f"resumed {run_dir} after step {steps} of {steps}; it has already ended\n")
        return summary
    try:
        job = Job(cfg, run_dir, problems, reward_set, grader, resume_from)
        session = build_session(job, plan=plan, ranks=ranks)
    except BaseException:
        ranks.release()
        raise
    try:
        session.outputs.report.record(cfg, plan.table())
        with remember_interrupts() as check_interrupts:
            session.begin()
            try:
                # A dispatcher makes many objects, so that collections are frequent.
                with frozen_objects() if plan.asynchronous else nullcontext():
                    train(session, check_interrupts)
            except RunFolderLost:
                raise
            except UserError as ended:
                try:
                    if isinstance(ended, WorkersLost):
                        _save_last(session)
                    session.checkpoints.writer.finish()
                except CheckpointError as error:
                    raise CheckpointError(f"{ended}; and {error}") from ended
                raise
        session.outputs.check()
        rows = read_jsonl(run_dir / METRICS)
        extras, seconds = session.summary_entries(), session.state.seconds()
        prompts = {
            example.id: example.messages[-1]["content"] for example in session.parts.evaluator.examples
        }
        peak_memory_gib = session.state.peak_memory_gib()
    except RunFolderLost as lost:
        raise TrainingStopped(f"{lost}; {_save_again(session)}") from lost
    finally:
        try:
            ranks.release()
        finally:
            session.close()
    counters, last = session.counters, rows[-1]
    session.outputs.report.draw(grader.name)
    sample: list[str] = []
    evaluated = [row["step"] for row in rows if "eval/num_problems" in row]
    if len(evaluated) > 1 and (result := change.of_run(run_dir, (evaluated[0], evaluated[-1]), prompts)):
        difference, sample = result
        extras |= {"change": difference.difference, "change_ci95": (difference.low, difference.high)}
    after, mean = last.get("eval/accuracy"), last.get("eval/primary")
    if mean is not None:
        bounds = [last.get("eval/primary_low"), last.get("eval/primary_high")]
        extras |= {"primary_before": counters.primary_before, "primary_after": mean, "primary_ci95": bounds}
    if "eval/loss" in last:
        bounds = [last.get("eval/loss_low"), last.get("eval/loss_high")]
        extras |= {"loss_before": counters.loss_before, "loss_after": last["eval/loss"], "loss_ci95": bounds}
    path = report.summary(
        run_dir,
        accuracy_before=counters.share_before,
        accuracy_after=after,
        accuracy_ci95=None if after is None else (last["eval/accuracy_low"], last["eval/accuracy_high"]),
        steps=counters.step,
        seconds=seconds,
        peak_memory_gib=peak_memory_gib,
        extras=extras,
        any_signal=counters.any_signal,
        kept_best=cfg.train.keep_best,
        findings=session.outputs.guards.holding(),
        sample=sample,
        write_page=session.outputs.report.write,
        stream=screen.out(),
    )
    return dict(json.loads(path.read_text()))


def _save_again(session: Session) -> str:
    """Save what was trained in a run whose folder was deleted, and describe where."""
    if session.counters.step == 0:
        return "nothing was trained yet, so start the run again"
    saved = _save_last(session)
    return f"what was trained is now in {saved}: {checkpoint.how_to_continue(session.outputs.run_dir)}"


def _save_last(session: Session) -> Path:
    """Write a checkpoint of a run that ends, whatever became of the one before, and return its folder."""
    # The new checkpoint takes the place of one that could not be written, and its own error is raised.
    with suppress(Exception):
        session.checkpoints.writer.finish()
    saved = session.save()
    session.checkpoints.writer.finish()
    return saved


def _prepare_process(cfg: Config | None, plan: Plan | None) -> None:
    # Rank 0 passes its configuration, and shows the warnings of DeepSpeed and bitsandbytes if the run uses
    # them. The other ranks pass None and never show these warnings.
    quiet_unused(
        cfg is not None and resolve.parallelism(cfg) in ZERO_STAGES,
        cfg is not None and cfg.train_model.quantization != "none",
    )
    # An engine that sleeps on a GPU has an allocator of its own, and its CUDA graphs are incompatible with
    # expandable segments. The other ranks have no plan yet, and never such an engine.
    sleeps = plan is not None and plan.sleeps and cfg is not None and cfg.inference_model.engine.sleeps_on_gpu
    on_gpu = plan is None or plan.num_gpus > 0
    if on_gpu:
        # The ranks of a launcher list no GPUs.
        hardware.number_gpus_by_bus()
        hardware.put_own_programs_on_path()
    if on_gpu and not sleeps:
        hardware.use_expandable_segments()
    cores.wait_passively()
    compile_cache.use_own()
