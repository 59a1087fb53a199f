"""The typed schema of every run: Hydra composes ``config/`` into these dataclasses.

It is the one source of each key's type, default and help. ``python -m torchrl_grpo.config`` writes
``config/base.yaml`` and ``config/policy/grpo.yaml`` from it. ``only_with`` of a key is the setting without
which nothing reads it (:func:`~torchrl_grpo.config.keys.key`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated

from torchrl_grpo.config.builtin import REWARDS
from torchrl_grpo.config.keys import KeyBook, key
from torchrl_grpo.config.schema_learning import PolicyConfig
from torchrl_grpo.config.schema_models import (
    InferenceModelConfig,
    LoraConfig,
    RefModelConfig,
    TeacherModelConfig,
    TrainModelConfig,
)
from torchrl_grpo.config.schema_task import EnvConfig, RewardConfig
from torchrl_grpo.config.values import (
    LOGGERS,
    LRSchedule,
    NonNegativeFloat,
    NonNegativeInt,
    OptimizerName,
    Placement,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    TrainMethod,
    WeightUpdate,
)

__all__ = [
    "CheckpointConfig",
    "CollectorConfig",
    "Config",
    "EnvConfig",
    "EvalConfig",
    "InferenceModelConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RayConfig",
    "RefModelConfig",
    "RewardConfig",
    "SweepConfig",
    "TeacherModelConfig",
    "TeacherName",
    "TrainConfig",
    "TrainModelConfig",
    "keys",
]

# Rewards that grade the evaluation by themselves.
_GRADERS = ", ".join(name for name, reward in REWARDS.items() if reward.is_correctness)


@dataclass
class ModelConfig:
    """The language model."""

    # Section of the configuration that names the model, for messages.
    section = "model"

    name: str = key(
        "smollm2-135m",
        "smollm2-135m (from its PyPI wheel, without the hub), a hub name, a folder, or auto. auto means "
        "Qwen/Qwen2.5-0.5B-Instruct with a GPU and smollm2-135m without one. It must be a causal "
        "language model; docs/step.md lists the families. The model is checked before training, and refused "
        "if its log-probabilities would be wrong.",
    )
    pictures: bool = key(
        False,
        "Read the pictures of the problems (docs/vision.md). The model must be one for pictures and text, "
        "with its processor.",
    )
    chat_template: str | None = key(
        None,
        "Jinja chat template, or a file that contains one, for a model whose tokenizer has none.",
    )
    trust_remote_code: bool = key(
        False,
        "Run Python code that comes with the model. Set this only for a source you trust.",
    )
    cache_dir: str | None = key(
        None,
        "Folder for downloaded and converted models; null means the usual cache.",
    )

    @property
    def shown(self) -> str:
        """The key and its value, for messages about the model."""
        return f"{self.section}.name={self.name}"


class TeacherName(ModelConfig):
    """The model of ``teacher_model.name``, as the functions take it that load a model."""

    section = "teacher_model"


@dataclass
class CollectorConfig:
    """How rollout workers generate and load new weights, and when a worker is replaced."""

    max_policy_age: NonNegativeInt = key(
        1,
        "grpo-async.py: largest age, in collection rounds, of a response that is trained on; 0 behaves "
        "like grpo.py.",
    )
    weight_update: WeightUpdate = key(
        WeightUpdate.in_flight,
        "grpo-async.py: how workers take new weights. drain finishes running groups first; in_flight pauses "
        "between two tokens and continues with the new weights.",
    )
    partial_rollout: bool = key(
        False,
        "grpo-async.py: let new weights interrupt groups, whatever collector.weight_update says, and put "
        "them back into the queue, so that any free worker continues them.",
    )
    timeout_s: PositiveFloat = key(
        600.0,
        "Seconds without an answer after which a worker counts as dead. The limit is at least 900 while a "
        "worker starts. For a process of the reference model it is always at least 900.",
    )
    max_restarts: NonNegativeInt = key(
        10,
        "Number of dead workers that are replaced before the run stops. For processes of the reference "
        "model the limit applies to each process separately.",
    )


@dataclass
class RayConfig:
    """Ray cluster and placement of the rollout workers."""

    address: str | None = key(
        None,
        "Where workers run: null starts Ray on this machine for the run, auto or HOST:PORT joins a running "
        "cluster. With an address, the engines of grpo.py run there too.",
    )
    placement: Placement = key(
        Placement.pack,
        "pack places workers on as few nodes as possible, spread on as many as possible.",
    )


@dataclass
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = key(
        OptimizerName.adamw,
        "Optimizer: adamw; adamw_8bit (AdamW with averages in 8 bits, a quarter of the memory; needs "
        "bitsandbytes; not with fsdp2); or muon (Muon for the matrices of layers and adapters, and AdamW for "
        "embeddings, output head, norms and biases). DeepSpeed takes adamw only.",
    )
    lr: NonNegativeFloat = key(
        1e-5,
        "Peak learning rate. An update of muon has a root mean square of 0.2 lr, whatever the matrix. Short "
        "runs need a higher rate than with AdamW, whose first updates are larger.",
    )
    weight_decay: NonNegativeFloat = key(0.0, "Decoupled weight decay.")
    betas: list[float] = key([0.9, 0.999], "AdamW's two averaging factors.")
    eps: PositiveFloat = key(1e-8, "AdamW's epsilon.")
    max_grad_norm: PositiveFloat = key(1.0, "Norm to which larger gradients are scaled down.")
    schedule: LRSchedule = key(
        LRSchedule.constant,
        "Learning rate after warm-up: constant, or a linear or cosine decay to min_lr_ratio.",
    )
    warmup_steps: NonNegativeInt = key(
        0, "Optimizer steps over which the learning rate rises linearly to lr."
    )
    min_lr_ratio: Share = key(
        0.0,
        "Learning rate of the last step, as a share of lr, if the schedule is a decay. With 0, the decay "
        "reaches 0 one step after the last step, as in transformers, so the last step still has a positive "
        "rate.",
    )


@dataclass
class TrainConfig:
    """How long and in which batches training runs."""

    method: TrainMethod = key(
        TrainMethod.grpo,
        "What is learned from: grpo (grpo.py, grpo-async.py) from rewards of the model's own responses, sft "
        "(sft.py) from the solutions of the dataset.",
    )

    total_dialog_turns: PositiveInt | None = key(
        64_000,
        "Responses in the whole run, a multiple of env.num_envs x env.repeats; null if num_epochs gives the "
        "length.",
    )
    num_epochs: PositiveFloat | None = key(
        None,
        "Passes over the training problems; total_dialog_turns is null then. The number of collection rounds "
        "is rounded up.",
    )
    optim_batch_size: PositiveInt | None = key(
        None,
        "Responses in one optimizer step: a multiple of env.repeats that divides a collection round. null "
        "means the whole round.",
    )
    gradient_accumulation_steps: PositiveInt = key(
        1,
        "Micro-batches into which an optimizer step is divided to save memory. The batch size does not "
        "change, and the result is the same up to rounding.",
    )
    max_tokens_per_microbatch: PositiveInt | None = key(
        None,
        "Largest number of tokens in a micro-batch, with a group's prompt counted once; larger micro-batches "
        "are divided further. null means 4096, or inference_model.max_model_len if that is larger. On a GPU, "
        "null means as many as the predicted memory allows, up to 65536. The number is halved automatically "
        "when memory runs out.",
    )
    epochs: PositiveInt = key(1, "Passes over each collection round.")
    weight_update_frequency: PositiveInt | None = key(
        None,
        "Optimizer steps between two publications of the weights to the engine; null means a collection "
        "round, and with train.method=sft before evaluations only. A larger interval needs either grpo.py "
        "with an engine in the trainer's process that does not sleep, or grpo-async.py with a large enough "
        "collector.max_policy_age.",
    )
    checkpoint_frequency: NonNegativeInt = key(
        100,
        "Optimizer steps between checkpoints; 0 writes none before the end. The end of the run always writes "
        "one.",
    )
    max_skipped_steps: PositiveInt = key(
        5,
        "Largest number of consecutive steps that are skipped because a loss or gradient is not finite.",
    )
    keep_best: bool = key(
        False,
        "Also keep the checkpoint with the best held-out value, beside the checkpoint.keep newest. One is "
        "written at each evaluation that finds a better value than all before it.",
    )
    stop_at: float | None = key(
        None,
        "Held-out value with which the run ends, such as 0.9, or the negative of a held-out loss; null "
        "trains to the last step.",
    )
    patience: PositiveInt | None = key(
        None,
        "Number of evaluations in a row without a better held-out value than before, after which the run "
        "ends; null trains to the last step.",
    )
    num_threads: PositiveInt | None = key(
        None,
        "CPU threads of the trainer; null means every core that no engine uses at the same time.",
    )


@dataclass
class EvalConfig:
    """Evaluation on held-out problems."""

    frequency: NonNegativeInt = key(
        50,
        "Optimizer steps between evaluations; 0 disables evaluations during the run. There is always one at "
        "the end.",
    )
    num_problems: NonNegativeInt | None = key(
        None,
        "Problems held out from training and answered greedily; 0 holds out none and evaluates nothing. null "
        "means 200. Where problems are split off the rows of a jsonl dataset or of your own, it means a "
        "tenth of them, at least 8, at most 200, and never more than half.",
    )
    samples: PositiveInt | None = key(
        None,
        "Responses to each held-out problem, sampled at eval.temperature; null answers once, greedily.",
    )
    at_start: bool = key(True, "Evaluate before the first step too.")
    pass_at_k: PositiveInt = key(
        1,
        "k of pass@k; 1 measures no pass@k. Above 1, k responses to each problem are "
        "also sampled at eval.temperature, unless eval.samples has as many.",
    )
    temperature: PositiveFloat = key(0.8, "Sampling temperature of eval.samples and pass@k.")
    reward: str | None = key(
        None,
        "Reward that grades held-out responses. null means the reward with the largest positive weight among "
        f"{_GRADERS} and reward.functions. If none has one, it is environment if env.environment is set, and "
        "otherwise the dataset's default.",
    )
    threshold: float | None = key(
        None,
        "Least value of the reward that grades for a right response; the share of right responses is the "
        "accuracy. null means 1 for built-in rewards. A reward of your own is then reported as its mean, "
        "which is an accuracy as long as all values are 0 or 1 and both have occurred.",
    )


@dataclass
class CheckpointConfig:
    """Retention and export of checkpoints."""

    keep: PositiveInt = key(2, "Number of the newest checkpoints to keep.")
    export_merged: bool = key(
        False,
        "Also write the model with its adapters merged, to merged/. A checkpoint of a run with adapters has "
        "only the adapters otherwise.",
        only_with="train_model.lora.rank",
    )


@dataclass
class LoggingConfig:
    """What is written and shown."""

    backends: list[str] = key(
        [],
        f"Loggers in addition to metrics.jsonl: any of {', '.join(LOGGERS)}, e.g. [csv,wandb].",
    )
    project: str = key("torchrl-grpo", "Project name for the loggers.")
    experiment: str | None = key(
        None,
        "Name of this run for the loggers; null means the name of the run folder.",
    )
    entity: str | None = key(
        None,
        "W&B user or team that owns the run; null means WANDB_ENTITY, or else the default of the login.",
    )
    group: str | None = key(
        None,
        "W&B group of the run, e.g. the name of a sweep; null means WANDB_RUN_GROUP if it is set.",
    )
    tags: list[str] = key([], "W&B tags of the run, e.g. [baseline,night]; [] means WANDB_TAGS if it is set.")
    rollouts: bool = key(
        True,
        "Write every response with its rewards to rollouts.jsonl, and held-out ones to evaluations.jsonl.",
    )
    table_rows: Annotated[int, Range(ge=0)] = key(
        0,
        "Responses of each round that W&B and trackio show as a table, e.g. 16, in the order of "
        "rollouts.jsonl. The table has the pictures of their prompts. 0 sends no text and no picture; any "
        "other number also sends them report.html, with the texts of all rounds. Of a prompt or a response "
        "that is longer than 2000 characters, the table shows the first and the last 1000.",
        only_with="logging.rollouts=true",
    )
    token_details: NonNegativeInt = key(
        0,
        "Responses of each round whose tokens rollouts.jsonl has with the log-probabilities of engine, "
        "trainer and teacher, for report.html. Each costs the trainer a forward pass; not for grpo-sft.",
        only_with="logging.rollouts=true",
    )
    progress: bool = key(True, "Show a progress bar, or plain lines if there is no terminal.")


@dataclass
class SweepConfig:
    """Trials of a sweep. Only commands with --multirun read it."""

    devices: PositiveInt | None = key(
        None,
        "With --multirun: devices of each trial, which are GPUs, or CPU cores on a machine without a GPU. "
        "Each trial is a process of its own, and as many run at the same time as devices are free. null runs "
        "one after the other in one process.",
    )
    seeds: PositiveInt | None = key(
        None, "With --multirun: number of seeds of each setting, e.g. 3 for seed=0,1,2; null means one."
    )
    trials: PositiveInt | None = key(
        None,
        "With --multirun: number of settings that Optuna chooses among the values, e.g. of "
        "optimizer.lr=tag(log,interval(1e-6,1e-4)). It needs the package optuna. null runs every "
        "combination.",
    )
    resume: str | None = key(
        None,
        "With --multirun: folder of a sweep that goes on with the same command. Trials that have ended are "
        "not run again, and others resume from their checkpoints. null starts a new sweep.",
        only_with="sweep.devices",
    )
    hopeless_after: PositiveInt | None = key(
        None,
        "With --multirun: number of evaluations in a row after which a trial ends early, if its interval of "
        "the held-out value is below that of another trial with the same seed; null ends none.",
        only_with="sweep.devices",
    )


@dataclass
class HubConfig:
    """Upload to the Hugging Face hub."""

    push: str | None = key(
        None,
        "Repository ORG/NAME that gets the model of the last checkpoint, or of the best one with "
        "train.keep_best, with its card, when the run has ended; null uploads nothing.",
    )
    private: bool = key(
        True, "Make that repository a private one, if it does not exist.", only_with="hub.push"
    )


@dataclass
class Config:
    """Configuration of a run."""

    # Random generators of the libraries take 32 bits.
    seed: Annotated[int, Range(ge=0, le=2**32 - 1)] = key(0, "Seed of data order, sampling and the engine.")
    resume: str | None = key(
        None,
        "Continue an earlier run. null starts a new one. auto continues the run of hydra.run.dir, or else "
        "the run under outputs/ that wrote a checkpoint last. auto_or_new continues the run of "
        "hydra.run.dir, or starts it if it has no checkpoint. A path names a run folder or one of its "
        "checkpoints.",
    )
    dry_run: bool = key(
        False,
        "Print the plan of roles, devices and memory, try data that are not on the hub, and do not run.",
    )
    allocation_mode: str | None = key(
        None,
        "Backends and devices of generation and training in one line, e.g. vllm:d4+fsdp:d4; null reads the "
        "keys of train_model and inference_model (docs/devices.md).",
    )
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    teacher_model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


@functools.cache
def keys() -> KeyBook:
    """Return the keys of the schema. They are read on first use, because many commands do not need them."""
    return KeyBook(Config)
