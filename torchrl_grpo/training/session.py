"""Everything a run is made of, put together from the configuration, with the few verbs the loop uses."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import length, with_turns
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.envs import GroupTextEnv, PromptStream, lengths
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import Engine
from torchrl_grpo.models import loading, saving
from torchrl_grpo.models.build import weights_source
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.observe import loggers
from torchrl_grpo.observe.metrics import MetricsWriter, RolloutWriter
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.observe.report import SUMMARY
from torchrl_grpo.observe.stats import peak_cuda_gib
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.reward_set import RewardSet
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.build import Collect, Source, one_engine
from torchrl_grpo.rollout.collector import Round
from torchrl_grpo.rollout.records import rollout_rows
from torchrl_grpo.runtime.malloc import give_back_freed_memory
from torchrl_grpo.runtime.rng import derive_seed
from torchrl_grpo.training import schedule
from torchrl_grpo.training.build import build_publisher, build_reference, coarser, update_format
from torchrl_grpo.training.counters import Counters, random_state, seed_everything, set_random_state
from torchrl_grpo.training.evaluator import Evaluator
from torchrl_grpo.training.learner import Learner
from torchrl_grpo.training.rounding_check import rounding_warning
from torchrl_grpo.training.shared_engine import shared_engine
from torchrl_grpo.training.throughput import Speedometer


class Session:
    """One run.

    Args:
        cfg: its configuration.
        run_dir: where it writes.
        problems: what it trains on and is measured by.
        reward_set: scores answers; closed by whoever made it.
        grader: judges held-out answers; likewise.
        resume_from: a checkpoint to continue from, or None.
        collect: puts together what collects.
        plan: who runs where; None plans for what this process sees.
        ranks: the training ranks, of which this process is the first; None for itself alone.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        problems: Problems,
        reward_set: RewardSet,
        grader: CountingGrader,
        resume_from: Path | None,
        collect: Collect = one_engine,
        plan: Plan | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = Ranks(on_cpu=not torch.cuda.is_available()) if ranks is None else ranks
        self.ranks = ranks
        self.cfg = cfg
        self.run_dir = run_dir
        self.counters = Counters()
        self.reward_weights = reward_set.weights
        self._started = time.perf_counter()
        seed_everything(cfg.seed)
        self.plan = plan or placement.plan(
            placement.request_of(cfg, asynchronous=False, ranks=ranks.size), torch.cuda.device_count()
        )
        self.device = torch.device(self.plan.train_device)
        source = loading.resolve(cfg.model)
        self.tokenizer: PreTrainedTokenizerBase = loading.load_tokenizer(source, cfg.model)
        loading.check_context(source, cfg)
        problems, fitted = lengths.fit(problems, self.tokenizer, cfg)
        self._notes = (fitted, length(cfg, len(problems.train)) if cfg.train.num_epochs else None)
        env = self._environment(problems, reward_set)
        self.evaluator = Evaluator(problems.held_out, self.tokenizer, grader, cfg)

        weights = weights_source(cfg, source, resume_from)
        # A checkpoint keeps the length as it was asked for.
        cfg = with_turns(cfg, len(problems.train))
        start = (cfg, weights, resume_from, reward_set.weights)
        with ranks.united():
            # The other ranks build theirs from the same.
            ranks.broadcast_object((*start, self.plan))
            # Looked up late: the progress bar is made last, when nothing can fail any more.
            self.learner = Learner(*start, self.device, ranks, lambda text: self.progress.note(text))
        self.model = self.learner.model
        self.advantage = self.learner.advantage
        self.optimize = self.learner.optimize
        self.steps_per_round, self.total_steps = self.learner.steps_per_round, self.learner.total_steps
        ends = loading.end_token_ids(self.model, self.tokenizer)
        form = self.learner.autocast_dtype, self.learner.shares_prefix
        make = partial(shared_engine, self.learner) if self.plan.engine_in_each_rank else build_engine
        engine_source = Source(weights, source, self.plan, ends, *form, make)
        self.engine, self.collector = collect(cfg, engine_source, env, self.tokenizer)
        self.asleep = False
        # Metrics of a step that has been taken and has no line yet.
        self.unlogged: dict[str, float] = {}
        try:
            self._build_around_engine(problems, source, resume_from)
        except BaseException:
            # A sweep goes on with its next job, which needs the memory.
            self.engine.close()
            raise

    def _build_around_engine(self, problems: Problems, source: str, resume_from: Path | None) -> None:
        self._make_buffer(source)
        self._make_publisher(problems)
        if resume_from is not None:
            rest = self.ranks.call_all(self.learner, "resume", str(resume_from))
            self.load_state_dict(rest)
        # Last: it cuts files back to the step resumed, and until here the resumption could still fail.
        self._open_logs(resume_from)

    def _environment(self, problems: Problems, reward_set: RewardSet) -> GroupTextEnv:
        options = self.cfg.inference_model
        return GroupTextEnv(
            PromptStream(problems.train, self.cfg.seed, self.cfg.env.shuffle),
            self.tokenizer,
            reward_set,
            num_envs=self.cfg.env.num_envs,
            repeats=self.cfg.env.repeats,
            max_prompt_tokens=options.max_model_len - options.max_new_tokens,
        )

    def _make_buffer(self, source: str) -> None:
        cfg, learner = self.cfg, self.learner
        # In processes of its own it has scored a group before the group comes here.
        self.reference = (
            None
            if self.plan.reference.apart
            else build_reference(cfg, source, self.plan.reference_devices, learner)
        )
        transforms = [*([self.reference] if self.reference else []), *learner.proximal(), self.advantage]
        self.buffer = GroupBuffer(
            cfg.env.num_envs, learner.groups_per_batch, transforms, derive_seed(cfg.seed, "buffer")
        )

    def refresh_reference(self) -> None:
        """Every ``ref_model.refresh_frequency`` optimizer steps, move the reference towards the policy."""
        frequency = self.cfg.ref_model.refresh_frequency
        if self.reference is not None and frequency > 0 and self.counters.step % frequency == 0:
            self.reference.mix_in(self.learner.published(), self.cfg.ref_model.refresh_mix)

    def _make_publisher(self, problems: Problems) -> None:
        engine_device = torch.device(self.plan.engine_device)
        precision = coarser(self.cfg, engine_device, self.model, self.learner.autocast_dtype)
        self.update_format = update_format(self.cfg, engine_device, precision)
        self.publisher = build_publisher(
            self.cfg,
            self.learner,
            self.engine,
            self.tokenizer,
            problems.train,
            precision,
            resolve_dtype(self.cfg.inference_model.dtype, engine_device),
            # Looked up late: the progress bar is made last.
            lambda text: self.progress.note(text),
        )

    def _open_logs(self, resume_from: Path | None) -> None:
        step = None if resume_from is None else int(resume_from.name)
        if step is not None:
            checkpoint.set_aside_after(self.run_dir, step)
            # Of steps that are taken again; beside their last checkpoint it would say that the run has ended.
            (self.run_dir / SUMMARY).unlink(missing_ok=True)
        self.metrics_writer = MetricsWriter(self.run_dir, step)
        self.rollout_writer = RolloutWriter(self.run_dir, step) if self.cfg.logging.rollouts else None
        self.loggers = loggers.build(self.cfg, self.run_dir, step)
        self.progress = Progress(self.total_steps, self.cfg.logging.progress, start_step=step or 0)
        if step is not None:
            end = "; it has already ended" if self.finished else ""
            self.progress.note(f"resumed {self.run_dir} after step {step} of {self.total_steps}{end}")
        for note in (*self._notes, *self.loggers.notes):
            if note is not None:
                self.progress.note(note)

    @property
    def finished(self) -> bool:
        """Whether every optimizer step has been taken."""
        return self.counters.step >= self.total_steps

    def begin(self) -> None:
        """Prove that publication works, and measure the weights before training."""
        proof = self.publisher.prove_at_start(
            self.counters.step, partial(self.collector.publish, self.publisher, wait=True)
        )
        dtype = self.learner.autocast_dtype or self.model.dtype
        self.speed = Speedometer(self.model, self.device, dtype, self.ranks.size)
        for note in (
            f"this machine multiplies matrices at {self.speed.gemm_rate / 1e9:,.0f} GFLOP/s in the trainer's "
            "numbers",
            self.publisher.summary(proof),
            rounding_warning(self.model, self.update_format, self.cfg.optimizer, self.total_steps),
        ):
            if note is not None:
                self.progress.note(note)
        # A checkpoint may be resumed more than once, and the lines of its own step are kept.
        logged = self.metrics_writer.last_step == self.counters.step
        at_start = self.counters.step == 0 and self.cfg.eval.at_start and self.cfg.eval.num_problems > 0
        if at_start and not logged:
            metrics = self.evaluate()
            self.counters.accuracy_before = metrics["eval/accuracy"]
            self.log(metrics)
        if self.unlogged and not logged:
            # Its workers stopped the run between this step and its line.
            self.log({**self.unlogged, **(self.evaluate() if self.evaluation_is_due() else {})})
        self.collector.start()

    def publication_is_due(self) -> bool:
        """Whether this step ends with a publication.

        That is as often as configured; before an evaluation; and before a checkpoint where the next round is
        sampled with what the engine holds now, since a run that goes on from there begins with the
        checkpoint's weights.
        """
        frequency = self.cfg.train.weight_update_frequency or self.steps_per_round
        until_next = frequency - self.counters.step % frequency
        if until_next == frequency or self.evaluation_is_due():
            return True
        return self.checkpoint_is_due() and until_next > self.counters.steps_left_in_round

    def publish(self) -> dict[str, float]:
        """Give the engine the present weights, proven."""
        started = time.perf_counter()
        if self.asleep:
            assert isinstance(self.engine, Engine)
            if self.device.type == "cuda":
                # What the trainer's allocator keeps of a step is missing where the engine takes its own back.
                torch.cuda.empty_cache()
            self.engine.wake()
            self.asleep = False
        wait = self.evaluation_is_due() or self.finished
        metrics = self.collector.publish(self.publisher, self.counters.step, wait)
        return {**metrics, **self.speed.published(time.perf_counter() - started)}

    def rest_engine(self) -> None:
        """With ``inference_model.sleep``, let the engine give up its memory until the next publication."""
        if self.plan.sleeps and not self.asleep:
            assert isinstance(self.engine, Engine)
            self.engine.sleep()
            self.asleep = True

    def train_on(self, batch: TensorDictBase) -> dict[str, float]:
        """One optimizer step, of all training ranks."""
        metrics: dict[str, float] = self.ranks.call_all(self.learner, "step", batch)
        return metrics

    def evaluation_is_due(self) -> bool:
        """Whether this step ends with an evaluation: every ``eval.frequency`` steps and at the end."""
        return schedule.evaluation(self.cfg.eval, self.counters.step, self.total_steps)

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the weights the engine holds.

        Raises:
            TrainingStopped: a worker that took part does not hold them.
        """
        started = time.perf_counter()
        metrics = self.evaluator(self.engine)
        # A worker that was replaced meanwhile has answered for its weights before it answered for them here.
        self.collector.check_proofs()
        return {**metrics, "time/eval_s": time.perf_counter() - started}

    def checkpoint_is_due(self) -> bool:
        """Whether this step ends with a checkpoint: as often as configured, and at the end."""
        frequency = self.cfg.train.checkpoint_frequency
        return schedule.at_interval_or_end(frequency, self.counters.step, self.total_steps)

    def save(self) -> Path:
        """Write a checkpoint of this step."""
        return checkpoint.save(
            self.run_dir,
            self.counters.step,
            self.cfg,
            partial(saving.save, self.model, self.tokenizer, weights=self.learner.published()),
            self.state_dict(),
            self.cfg.checkpoint.keep,
            partial(saving.save_merged, self.model, self.tokenizer)
            if self.cfg.checkpoint.export_merged
            else None,
        )

    def log(self, metrics: dict[str, float]) -> None:
        """Write the line of this step everywhere."""
        step = self.counters.step
        self.unlogged = {}
        self.metrics_writer.write(step, metrics)
        self.loggers.log_scalars(metrics, step)
        self.progress.update(
            step,
            reward=metrics.get("reward/mean"),
            accuracy=metrics.get("eval/accuracy"),
            kl=metrics.get("kl/reference", metrics.get("kl/sampling_policy")),
            tokens_per_s=metrics.get("throughput/generated_tokens_per_s"),
        )

    def write_rollouts(self, round_: Round) -> None:
        """Write every response of a round under the step it is first trained in."""
        if self.rollout_writer is None:
            return
        rows = rollout_rows(round_, self.buffer.contents())
        self.rollout_writer.write(self.counters.step + 1, rows)

    def figures(self) -> dict[str, Any]:
        """What the summary says beside accuracy, steps, time and memory."""
        return {
            "eval_problems": len(self.evaluator.examples),
            "response_tokens": self.counters.response_tokens,
            "reward_errors": self.counters.reward_errors,
            "skipped_steps": self.optimize.skipped,
            "peak_cuda_memory_gib": peak_cuda_gib(),
            **self.collector.account(),
        }

    def seconds(self) -> float:
        """Time spent on this run, over all resumptions."""
        return self.counters.seconds + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """All state beside the weights."""
        return {
            "counters": {**self.counters.state_dict(), "seconds": self.seconds()},
            "optimise": self.ranks.call_all(self.learner, "optimizer_state"),
            "collector": self.collector.state_dict(),
            "buffer": self.buffer.state_dict(),
            "publisher": self.publisher.state_dict(),
            "reference": self._reference_weights(),
            "unlogged": dict(self.unlogged),
            "random": random_state(),
        }

    def _reference_weights(self) -> dict[str, torch.Tensor]:
        """What cannot be loaded again from where the model came from."""
        if self.reference is None or self.cfg.ref_model.refresh_frequency == 0:
            return {}
        return dict(self.reference.scorer.model.named_parameters())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; :meth:`Learner.resume` takes what the ranks share."""
        self.counters.load_state_dict(state["counters"])
        # Checkpoints of earlier versions do not say how many rounds there were beside those refilled with.
        taken = (self.counters.step + self.counters.steps_left_in_round) // self.steps_per_round
        # Both keep the tensors they are given, and these lie in the checkpoint's file.
        self.collector.load_state_dict({"taken": taken, **checkpoint.in_memory(state["collector"])})
        self.buffer.load_state_dict(checkpoint.in_memory(state["buffer"]))
        self.publisher.load_state_dict(state["publisher"])
        if state["reference"]:
            assert self.reference is not None, "a checkpoint of another configuration"
            self.reference.load_weights(state["reference"])
        self.unlogged = state.get("unlogged", {})  # not in checkpoints of earlier versions
        set_random_state(state["random"])

    def close(self) -> None:
        """Free the engine and close every file, so that a sweep's next job starts afresh."""
        self.progress.close()
        self.loggers.close()
        self.metrics_writer.close()
        if self.rollout_writer is not None:
            self.rollout_writer.close()
        self.collector.shutdown()
        # Named one by one because an exception's traceback may keep this object alive until a sweep ends.
        del (
            self.learner,
            self.model,
            self.optimize,
            self.advantage,
            self.reference,
            self.publisher,
            self.buffer,
            self.collector,
            self.evaluator,
            self.engine,
        )
        give_back_freed_memory()
