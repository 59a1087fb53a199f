"""Builds a session from a configuration.

If a component cannot be built, those built before it are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import describe_length, needs_frozen_model, with_total_turns
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.envs.build import build_environment
from torchrl_grpo.envs.chat import end_of_message
from torchrl_grpo.envs.episodes.build import check_environment
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.models import loading, lora
from torchrl_grpo.models.build import weights_source
from torchrl_grpo.models.precision import resolve_dtype
from torchrl_grpo.models.reference import frozen_source, load_reference
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.observe import loggers
from torchrl_grpo.observe.guards import Guards
from torchrl_grpo.observe.metrics import (
    DiscardedWriter,
    EvaluationWriter,
    MetricsWriter,
    RolloutWriter,
    read_jsonl,
)
from torchrl_grpo.observe.past import Setting
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.observe.report import SUMMARY
from torchrl_grpo.planning import placement
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.request import build_request
from torchrl_grpo.planning.token_budget import with_budget
from torchrl_grpo.report.write import ReportWriter
from torchrl_grpo.rewards.graders import CountingGrader
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet
from torchrl_grpo.rollout.buffer import GroupBuffer
from torchrl_grpo.rollout.build import CollectorFactory, EngineSource, build_collector
from torchrl_grpo.rollout.log_prob_transform import LogProbScorer, LogProbWriter
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup
from torchrl_grpo.runtime import screen
from torchrl_grpo.runtime.rng import derive_seed
from torchrl_grpo.training.data_parallel_engine import build_data_parallel_engine
from torchrl_grpo.training.held_out_loss import HeldOutLoss
from torchrl_grpo.training.learner import Learner, LearnerSpec
from torchrl_grpo.training.prepare import prepare
from torchrl_grpo.training.probe import probe_inputs
from torchrl_grpo.training.rank_log_probs import (
    DistributedLogProbs,
    DistributedReference,
    proximal_transforms,
)
from torchrl_grpo.training.rounding_check import rounding_check_dtype, uneven_rounding_warning
from torchrl_grpo.training.run_checkpoints import try_out_checkpoint
from torchrl_grpo.training.schedule import RunSchedule
from torchrl_grpo.training.session import Outputs, Session
from torchrl_grpo.training.state import Parts, SessionState, seed_everything
from torchrl_grpo.weight_sync.publisher import WeightPublisher

# The most precise first.
_DTYPES_BY_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Job:
    """Configuration, data and rewards that a session is built from.

    Attributes:
        cfg: configuration of the run.
        run_dir: folder that the run writes to.
        problems: problems to train on and held-out ones.
        reward_set: rewards that score responses; closed by the caller.
        grader: grader of held-out responses; closed by the caller.
        resume_from: checkpoint to continue from; None for a new run.
        is_evaluation: whether the model is only evaluated. Of a checkpoint, only its weights are read, and
            nothing is logged.
    """

    cfg: Config
    run_dir: Path
    problems: Problems
    reward_set: RewardSet | MixtureRewardSet
    grader: CountingGrader
    resume_from: Path | None = None
    is_evaluation: bool = False


class MessageQueue:
    """Messages for the user. They are kept until the progress bar exists, which then shows them."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._show: Callable[[str], None] = self._kept.append

    def __call__(self, text: str | None) -> None:
        if text is not None:
            self._show(text)

    def attach(self, show: Callable[[str], None]) -> None:
        """Show the kept messages with ``show``, and each later message at once."""
        self._show = show
        for text in self._kept:
            show(text)
        self._kept.clear()


def build_session(
    job: Job,
    *,
    make_collector: CollectorFactory = build_collector,
    plan: Plan | None = None,
    ranks: Ranks | None = None,
) -> Session:
    """Build a session on rank 0.

    The other ranks build their learners in :func:`~torchrl_grpo.training.job.follow`.

    Args:
        job: configuration, data and rewards.
        make_collector: function that builds the workers and their collector.
        plan: placement on devices; None plans for the devices that this process sees.
        ranks: training ranks, of which this process is rank 0; None for this process alone.

    Raises:
        UserError: the data, checkpoint or model is invalid; the message names the fix.
    """
    ranks = Ranks(on_cpu=not torch.cuda.is_available()) if ranks is None else ranks
    if plan is None:
        request = build_request(job.cfg, asynchronous=False, ranks=ranks.size)
        plan = placement.plan(request, torch.cuda.device_count())
    with ExitStack() as exit_stack:
        # If a later component fails, close those built before it: a sweep's next job needs the memory.
        return _build(job, make_collector, plan, ranks, exit_stack)


def _build(
    job: Job, make_collector: CollectorFactory, plan: Plan, ranks: Ranks, exit_stack: ExitStack
) -> Session:
    cfg, resume_from, messages = job.cfg, job.resume_from, MessageQueue()
    seed_everything(cfg.seed)
    check_environment(cfg)
    base_model = loading.resolve(cfg.model)
    tokenizer = loading.load_tokenizer(base_model, cfg.model)
    loading.check_context(base_model, cfg)
    frozen = frozen_source(cfg, base_model, tokenizer)
    problems, evaluator = prepare(cfg, tokenizer, job.problems, job.grader, messages)
    if not job.is_evaluation:
        messages(describe_length(cfg, len(problems.train)))
    env = build_environment(cfg, problems, job.reward_set, tokenizer)
    initial_weights = weights_source(cfg, base_model, resume_from)
    # From here on total_dialog_turns is set, also if the user gave num_epochs, and so is the token budget.
    # The session keeps the configuration without them, which checkpoints contain.
    cfg = with_total_turns(cfg, len(problems.train))
    if plan.token_budget is not None:
        cfg = with_budget(cfg, plan.token_budget)
    cfg = replace(
        cfg,
        train_model=replace(cfg.train_model, offload_optimizer=plan.offload_optimizer),
        inference_model=replace(cfg.inference_model, dtype=choose_engine_dtype(cfg, plan)),
    )
    schedule = RunSchedule.from_config(cfg)
    start_step = 0 if resume_from is None else int(resume_from.name)
    progress = Progress(schedule.total_steps, cfg.logging.progress, start_step=start_step)
    exit_stack.callback(progress.close)
    messages.attach(progress.note)
    progress.phase("loading the model")
    spec = LearnerSpec(cfg, initial_weights, resume_from, job.reward_set.weights)
    with ranks.mark_broken_on_error():
        # The other ranks build their learners from the same specification.
        ranks.broadcast_object((spec, plan, screen.log_file()))
        learner = Learner(spec, torch.device(plan.train_device), ranks=ranks, notify=messages)
    if not job.is_evaluation:
        due = schedule.checkpoints_after(start_step, cfg.train.keep_best)
        try_out_checkpoint(job.cfg, job.run_dir, learner.model, tokenizer, due)
    engine_source = EngineSource(
        weights=initial_weights,
        model=base_model,
        frozen=frozen,
        plan=plan,
        eos_token_ids=loading.end_token_ids(learner.model, tokenizer),
        vocabulary=learner.model.get_input_embeddings().num_embeddings,
        autocast_dtype=learner.autocast_dtype,
        shares_prefix=learner.shares_prefix,
        make_engine=partial(build_data_parallel_engine, learner)
        if plan.engine_in_each_rank
        else build_engine,
    )
    # A reference model in processes of its own scores a group before the group reaches the trainer. The
    # trainer's is loaded before the engine takes its share of the GPU, because in float32 it is larger.
    reference: LogProbWriter | None = None
    # An evaluation reads no divergence.
    needs_reference = not (plan.reference.own_process or job.is_evaluation)
    if needs_reference and plan.reference_in_each_rank:
        ranks.call_all(Learner.load_reference, learner, frozen)
        reference = DistributedReference(learner)
    elif needs_reference:
        reference = build_reference(cfg, frozen, plan.reference_devices, learner)
    progress.phase("starting the engine")
    collector = make_collector(cfg, engine_source, env, tokenizer)
    exit_stack.callback(collector.shutdown)
    transforms = [*([reference] if reference else []), *proximal_transforms(learner), learner.advantage]
    buffer = GroupBuffer(
        cfg.env.num_envs, learner.groups_per_batch, transforms, derive_seed(cfg.seed, "buffer")
    )
    engine_device = torch.device(plan.engine_device)
    precision = least_precise_dtype(cfg, engine_device, learner.model, learner.autocast_dtype)
    engine_dtype = resolve_dtype(cfg.inference_model.dtype, engine_device)
    uneven = uneven_rounding_warning(cfg, learner.autocast_dtype or torch.float32, engine_dtype)
    if uneven is not None and not job.is_evaluation:
        progress.note(uneven)
    publisher = build_publisher(
        cfg,
        learner,
        engine=collector.worker_group,
        tokenizer=tokenizer,
        examples=problems.train,
        precision=precision,
        engine_dtype=engine_dtype,
        warn=messages,
    )
    parts = Parts(
        ranks=ranks,
        plan=plan,
        tokenizer=tokenizer,
        learner=learner,
        workers=collector.worker_group,
        collector=collector,
        reference=reference if isinstance(reference, LogProbScorer | DistributedReference) else None,
        buffer=buffer,
        publisher=publisher,
        rounding_check_dtype=rounding_check_dtype(cfg, engine_device, precision),
        evaluator=evaluator
        or HeldOutLoss(
            problems.held_out,
            tokenizer,
            learner,
            end_of_message(tokenizer, engine_source.eos_token_ids),
            cfg.inference_model.max_new_tokens,
        ),
    )
    state = SessionState(parts, saves_reference=schedule.refresh_every > 0)
    if resume_from is not None and not job.is_evaluation:
        state.load_state_dict(ranks.call_all(Learner.resume, learner, resume_from))
    # This truncates the output files to the resumed step, so it comes after everything that can fail.
    discards = cfg.policy.constant_groups == "refill" or bool(
        plan.asynchronous and cfg.collector.max_policy_age
    )
    outputs = _open_outputs(job, schedule, state, exit_stack, progress, discards)
    return Session(job.cfg, schedule, state=state, outputs=outputs, exit_stack=exit_stack.pop_all())


def choose_engine_dtype(cfg: Config, plan: Plan) -> Dtype:
    """Resolve ``inference_model.dtype=auto``: bfloat16 if every engine's device computes fast in it.

    GPUs of a machine may differ. Weights are cast once for all engines.
    """
    here = [torch.device(name) for name in plan.inference.devices if name.startswith("cuda")]
    # The devices of a cluster or of servers are unknown here.
    devices = here or [torch.device(plan.engine_device)]
    dtypes = {resolve_dtype(cfg.inference_model.dtype, device) for device in devices}
    dtype = torch.float32 if len(dtypes) > 1 else dtypes.pop()
    return Dtype(str(dtype).removeprefix("torch."))


def _open_outputs(
    job: Job,
    schedule: RunSchedule,
    state: SessionState,
    exit_stack: ExitStack,
    progress: Progress,
    discards: bool,
) -> Outputs:
    cfg, run_dir = job.cfg, job.run_dir
    step = None if job.resume_from is None or job.is_evaluation else int(job.resume_from.name)
    if step is not None:
        checkpoint.rename_checkpoints_after(run_dir, step)
        # If the run had finished, its summary no longer holds: the steps after this one are repeated.
        (run_dir / SUMMARY).unlink(missing_ok=True)
    metrics = MetricsWriter(run_dir, step)
    exit_stack.callback(metrics.close)
    rollouts = RolloutWriter(run_dir, step) if cfg.logging.rollouts else None
    if rollouts is not None:
        exit_stack.callback(rollouts.close)
    evaluated = step
    if step is not None and state.unlogged and metrics.last_step != step:
        # The metrics of the step were not written, so its evaluation is repeated.
        evaluated = step - 1
    evaluations = EvaluationWriter(run_dir, evaluated) if cfg.logging.rollouts else None
    if evaluations is not None:
        exit_stack.callback(evaluations.close)
    discarded = DiscardedWriter(run_dir, step) if cfg.logging.rollouts and discards else None
    if discarded is not None:
        exit_stack.callback(discarded.close)
    chosen = loggers.build(cfg, run_dir, step, job.grader.name)
    exit_stack.callback(chosen.close)
    if step is not None:
        end = "; it has already ended" if schedule.is_finished(step) else ""
        progress.note(f"resumed {run_dir} after step {step} of {schedule.total_steps}{end}")
    report = ReportWriter(run_dir, progress.note)
    guards = Guards(Setting.of(asdict(cfg)))
    outputs = Outputs(
        run_dir, metrics, rollouts, evaluations, discarded, chosen, progress, job.grader.name, report, guards
    )
    lost = [] if step is None else outputs.lost_lines(step, schedule, state)
    holding = [] if step is None else outputs.guards.replay(read_jsonl(metrics.path))
    for note in (*lost, *chosen.notes, *map(str, holding)):
        progress.note(note)
    return outputs


def build_reference(
    cfg: Config, source: str, devices: Sequence[str], learner: Learner
) -> LogProbWriter | None:
    """Build the scorer of the reference, or of the teacher in its place; None if nothing needs one.

    With LoRA, the frozen base model doubles as the reference, and each training rank scores a share.

    Args:
        cfg: configuration; ``policy``, ``ref_model``, ``teacher_model``, ``train_model`` and ``model`` are
            read.
        source: folder or hub name of the frozen model.
        devices: devices that each get a copy, which scores its share of the groups.
        learner: trained model. A reference with float32 weights computes in the same autocast dtype.
    """
    if not needs_frozen_model(cfg.policy):
        return None
    temperature = cfg.inference_model.temperature
    if cfg.train_model.lora.rank > 0 and cfg.policy.distill_coef == 0:
        policy = learner.model
        if learner.ranks.size > 1:
            return DistributedLogProbs(learner, "reference", of="base")
        scorer = TokenScorer(
            policy,
            temperature,
            learner.autocast_dtype,
            learner.shares_prefix,
            head_dtype=learner.scorer.head_dtype,
            pictures=learner.scorer.pictures,
        )
        # Attention must round like the policy's.
        scorer.varlen = learner.scorer.varlen
        off = partial(lora.disable_adapters, policy)
        return LogProbScorer(scorer, "reference", learner.make_budget(), off)
    scorers = [
        load_reference(cfg, source, torch.device(device), learner.autocast_dtype, learner.shares_prefix)
        for device in devices
    ]
    # A teacher may run a prompt once per response although the policy does not.
    (scorer, budget), *others = ((each, learner.make_budget(each.shares_prefix)) for each in scorers)
    vocabulary = learner.model.get_input_embeddings().num_embeddings
    top_k = cfg.policy.distill_top_k
    return LogProbScorer(scorer, "reference", budget, others=others, top_k=top_k, vocabulary=vocabulary)


def least_precise_dtype(
    cfg: Config, device: torch.device, model: PreTrainedModel, autocast_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the least precise of three dtypes: the engine's, the trained model's, and its autocast dtype.

    Args:
        cfg: configuration; ``inference_model`` is read.
        device: device of the engine.
        model: trained model.
        autocast_dtype: autocast dtype of the trained model; None without autocast.
    """
    engine_dtype = resolve_dtype(cfg.inference_model.dtype, device)
    least_precise: torch.dtype = max(
        engine_dtype, model.dtype, autocast_dtype or torch.float32, key=_DTYPES_BY_PRECISION.index
    )
    return least_precise


def build_publisher(
    cfg: Config,
    learner: Learner,
    *,
    engine: WorkerGroup,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    precision: torch.dtype,
    engine_dtype: torch.dtype,
    warn: Callable[[str], None],
) -> WeightPublisher:
    """Build the publisher, with a probe made from the first training prompts.

    Args:
        cfg: configuration; ``inference_model`` is read.
        learner: learner whose weights are published.
        engine: workers that receive the weights.
        tokenizer: tokenizer that renders the prompts.
        examples: training problems.
        precision: result of :func:`least_precise_dtype`.
        engine_dtype: dtype of the engine.
        warn: function called with a warning for the user.
    """
    prompts, pictures = probe_inputs(cfg.inference_model, tokenizer, examples)
    return WeightPublisher(
        learner.full_model(),
        learner.probe_scorer(),
        engine=engine,
        probe_prompts=prompts,
        probe_pictures=pictures,
        pad_token_id=tokenizer.pad_token_id,
        precision=precision,
        engine_dtype=engine_dtype,
        transport=engine,
        bound=cfg.inference_model.max_logprob_diff,
        warn=warn,
        backend=cfg.inference_model.backend,
    )
