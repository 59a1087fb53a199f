"""The typed schema of every run: Hydra composes ``config/`` into these dataclasses.

It is the one source of each key's type, default and help. ``python -m torchrl_grpo.config`` writes
``config/base.yaml`` and ``config/policy/grpo.yaml`` from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo.config.keys import key
from torchrl_grpo.config.schema_learning import (
    InferenceModelConfig,
    LoraConfig,
    PolicyConfig,
    RefModelConfig,
    TrainModelConfig,
)
from torchrl_grpo.config.values import (
    AnswerFormat,
    LRSchedule,
    OverlongPrompts,
    Placement,
    ProblemSampling,
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
    "TrainConfig",
    "TrainModelConfig",
]


@dataclass
class EnvConfig:
    """The problems and how many of them a collection round takes."""

    dataset: str = key(
        "gsm8k",
        "Source of the problems: gsm8k, math, ifeval, reasoning_gym, jsonl, or a function of your own, "
        "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.",
    )
    task: str | None = key(None, "The reasoning_gym task, e.g. chain_sum; null for every other dataset.")
    task_args: dict[str, Any] = key(
        {},
        "Arguments of the reasoning_gym task, e.g. {max_terms: 3}, or of your own function in dataset.",
    )
    task_size: int = key(
        10_000,
        "Number of problems to generate for training, for reasoning_gym and for composed IFEval prompts.",
    )
    data_path: str | None = key(
        None,
        "Read problems from this path instead of the hub: a JSONL file, a folder of splits or a saved "
        "dataset.",
    )
    eval_data_path: str | None = key(
        None,
        "Read the held-out problems from this path; null reads them from eval_split.",
    )
    hub_name: str | None = key(
        None,
        "Name of the dataset on the Hugging Face hub; null takes the dataset's usual one.",
    )
    hub_subset: str | None = key(
        None,
        "Configuration of the dataset on the hub; null takes the dataset's usual one.",
    )
    train_split: str | None = key(None, "Split to train on; null takes train.")
    eval_split: str | None = key(
        None,
        "Split of the held-out problems. null takes a test or validation split, or part of the training "
        "split if there is none. If it names the training split, part of that split is held out.",
    )
    fields: dict[str, str] = key(
        {},
        "Columns of a jsonl dataset or of your own: question or messages, and answer. Each is a column, a "
        "path into one, e.g. {question: item.text}, or a Jinja template, e.g. "
        "{question: '{{ title }}: {{ text }}'}.",
    )
    environment: str | None = key(
        None,
        "Environment in which a response is an episode of several turns: guess, countdown, or a class of "
        "your own, FILE.py:CLASS or PACKAGE.MODULE:CLASS. null is one turn, unless there are tools.",
    )
    environment_args: dict[str, Any] = key({}, "Arguments of the environment.")
    tools: list[str] = key(
        [],
        "Tools that the model may call in a response: calculator, python, or functions of your own, e.g. "
        "[calculator, my_tools.py:search].",
    )
    max_turns: int = key(
        8, "With an environment or tools: largest number of the model's turns in a response."
    )
    max_turn_tokens: int | None = key(
        None,
        "With an environment or tools: largest number of tokens of one turn of the model. A longer turn is "
        "cut off and ends the response. null leaves inference_model.max_new_tokens, which bounds the whole "
        "response.",
    )
    tool_timeout_s: float = key(
        10.0,
        "Seconds that one call of a tool or of an environment of your own may take before its process is "
        "stopped.",
    )
    max_tool_characters: int = key(2_000, "Longest result of a tool, in characters. The rest is cut off.")
    mixture: list[dict[str, Any]] = key(
        [],
        "Several data sets in place of one, e.g. [{dataset: gsm8k, weight: 0.7}, {dataset: reasoning_gym, "
        "task: countdown, weight: 0.3}]. A part may have the keys of a data set above, prompt_template, "
        "system_prompt, answer_format, reward (a mapping like the section reward), eval_reward and name.",
    )
    num_envs: int = key(8, "Prompts in one collection round.")
    repeats: int = key(
        8,
        "Responses to each prompt: the group within which advantages are computed. At least 2.",
    )
    system_prompt: str | None = key(None, "System message before every question; null sends none.")
    prompt_template: str = key(
        "{question}",
        "Text of the user message; {question} is replaced by the question.",
    )
    answer_format: AnswerFormat = key(
        AnswerFormat.tags,
        "How a response gives its answer: tags expects <answer>...</answer>, plain expects the bare answer, "
        'equation expects anything that ends in "= answer".',
    )
    overlong_prompts: OverlongPrompts = key(
        OverlongPrompts.error,
        "What to do with a prompt that leaves no room for inference_model.max_new_tokens in max_model_len: "
        "error ends the run, drop skips the problem, truncate_left, truncate_right and truncate_middle cut "
        "the question at that place.",
    )
    shuffle: bool = key(
        True,
        "Draw training problems in an order that depends on the seed; false keeps the order of the file.",
    )
    sampling: ProblemSampling = key(
        ProblemSampling.uniform,
        "How training problems are drawn: uniform takes each once per epoch, pass_rate draws them by the "
        "share of right responses so far.",
    )
    pass_rate_bands: list[float] = key(
        [0.1, 0.9],
        "With sampling=pass_rate: the bounds between bands of pass rates.",
    )
    pass_rate_weights: list[float] = key(
        [0.2, 1.0, 0.2],
        "With sampling=pass_rate: the weight of a problem in each band, one more than there are bounds.",
    )
    unseen_weight: float = key(
        1.0,
        "With sampling=pass_rate: the weight of a problem that no group has answered.",
    )
    order_by: str | None = key(
        None,
        "Column by which training problems are sorted, smallest first, e.g. a difficulty. It needs "
        "shuffle=false. null keeps the order of the file.",
    )
    train_on_ifeval: bool = key(
        False,
        "Train on the prompts of the IFEval benchmark itself. Its accuracy then says nothing about new "
        "prompts.",
    )


@dataclass
class RewardConfig:
    """The rewards and how they are run."""

    weights: dict[str, float] = key(
        {},
        "Weight of each reward in the sum, e.g. {gsm8k: 1.0, format: 0.2}; {} takes the dataset's defaults. "
        "Names: gsm8k, format, math_verify, reasoning_gym, bare_number, closeness, ifeval, exact_match, "
        "environment.",
    )
    functions: dict[str, str] = key(
        {},
        "Rewards of your own by name, each FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, e.g. "
        "{brevity: my_rewards.py:brevity}. docs/tasks_and_rewards.md describes the functions. Without "
        "reward.weights, each has weight 1 and the dataset's defaults do not apply.",
    )
    args: dict[str, Any] = key(
        {},
        "Arguments of the rewards in functions, by name, e.g. {brevity: {target: 50}}.",
    )
    on_error: float = key(
        0.0,
        "Value of a reward that raises an error. The error is also counted and logged.",
    )
    timeout_s: float = key(
        5.0,
        "Seconds that one call of a checker or of a function of your own may take before its process is "
        "stopped.",
    )
    workers: int = key(
        1,
        "Worker processes per reward. math_verify, reasoning_gym and each function of your own start this "
        "many.",
    )


@dataclass
class ModelConfig:
    """The language model."""

    name: str = key(
        "smollm2-135m",
        "smollm2-135m (from its PyPI wheel, without the hub), a hub name, or a folder. It must be a causal "
        "language model; docs/step.md lists the families. The model is checked before training, and refused "
        "if its log-probabilities would be wrong.",
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
        "Folder for downloaded and converted models; null takes the usual cache.",
    )


@dataclass
class CollectorConfig:
    """How far grpo-async.py collects ahead."""

    max_policy_age: int = key(
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
        "grpo-async.py: put groups that new weights interrupt back into the queue, so that any free worker "
        "continues them.",
    )
    timeout_s: float = key(
        600.0,
        "Seconds without an answer after which a worker counts as dead. The limit is at least 900 while a "
        "worker starts. For a process of the reference model it is always at least 900.",
    )
    max_restarts: int = key(
        10,
        "Number of dead workers that are replaced before the run stops. Each process of the reference model "
        "has this number of its own.",
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
    """AdamW and its schedule."""

    lr: float = key(1e-5, "Peak learning rate of AdamW.")
    weight_decay: float = key(0.0, "Decoupled weight decay.")
    betas: list[float] = key([0.9, 0.999], "AdamW's two averaging factors.")
    eps: float = key(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = key(1.0, "Norm to which larger gradients are scaled down.")
    schedule: LRSchedule = key(
        LRSchedule.constant,
        "Learning rate after warm-up: constant, or a linear or cosine decay to min_lr_ratio.",
    )
    warmup_steps: int = key(0, "Optimizer steps over which the learning rate rises linearly to lr.")
    min_lr_ratio: float = key(
        0.0,
        "Learning rate of the last step of a decay, as a share of lr. With 0, the decay reaches 0 one "
        "step after the end, as in transformers, so that the last step has a positive rate.",
    )


@dataclass
class TrainConfig:
    """How long and in which batches training runs."""

    total_dialog_turns: int | None = key(
        64_000,
        "Responses in the whole run, a multiple of env.num_envs x env.repeats; null if num_epochs gives the "
        "length.",
    )
    num_epochs: float | None = key(
        None,
        "Passes over the training problems; needs total_dialog_turns=null. The number of collection rounds "
        "is rounded up.",
    )
    optim_batch_size: int | None = key(
        None,
        "Responses in one optimizer step: a multiple of env.repeats that divides a collection round. null "
        "takes the whole round.",
    )
    gradient_accumulation_steps: int = key(
        1,
        "Micro-batches into which an optimizer step is divided to save memory. The batch size does not "
        "change, and the result is the same up to rounding.",
    )
    max_tokens_per_microbatch: int | None = key(
        None,
        "Largest number of tokens in a micro-batch, with a group's prompt counted once; larger micro-batches "
        "are divided further. null takes 4096, or inference_model.max_model_len if that is larger. It is "
        "halved automatically when memory runs out.",
    )
    epochs: int = key(1, "Passes over each collection round.")
    weight_update_frequency: int | None = key(
        None,
        "Optimizer steps between two publications of the weights to the engine; null takes a collection "
        "round. A larger interval needs either grpo.py with an engine in the trainer's process that does not "
        "sleep, or grpo-async.py with a large enough collector.max_policy_age.",
    )
    checkpoint_frequency: int = key(
        100,
        "Optimizer steps between checkpoints; 0 writes none before the end. The end of the run always writes "
        "one.",
    )
    max_skipped_steps: int = key(
        5,
        "Largest number of consecutive steps that are skipped because a loss or gradient is not finite.",
    )
    num_threads: int | None = key(
        None,
        "CPU threads of the trainer; null takes every core that no engine uses at the same time.",
    )


@dataclass
class EvalConfig:
    """Evaluation on held-out problems."""

    frequency: int = key(
        50,
        "Optimizer steps between evaluations; 0 disables evaluations during the run. There is always one at "
        "the end.",
    )
    num_problems: int = key(
        200,
        "Problems held out from training and answered greedily; 0 holds out none and evaluates nothing.",
    )
    at_start: bool = key(True, "Evaluate before the first step too.")
    pass_at_k: int = key(
        1,
        "k of pass@k. With 1, only the greedy response is graded. Above 1, k responses to each problem are "
        "also sampled at eval.temperature.",
    )
    temperature: float = key(0.8, "Sampling temperature of pass@k.")
    reward: str | None = key(
        None,
        "Reward that grades held-out responses; a value of 1 or more counts as correct. null takes the one "
        "of gsm8k, math_verify, exact_match, reasoning_gym and ifeval that has the largest positive weight, "
        "or the dataset's default if none has one.",
    )


@dataclass
class CheckpointConfig:
    """Retention and export of checkpoints."""

    keep: int = key(2, "Number of the newest checkpoints to keep.")
    export_merged: bool = key(
        False,
        "Also write the model with its adapters merged, to merged/. A checkpoint of a run with adapters has "
        "only the adapters otherwise.",
    )


@dataclass
class LoggingConfig:
    """What is written and shown."""

    backends: list[str] = key(
        [],
        "Loggers in addition to metrics.jsonl: any of csv, tensorboard and wandb, e.g. [csv,wandb].",
    )
    project: str = key("torchrl-grpo", "Project name for the loggers.")
    experiment: str | None = key(
        None,
        "Name of this run for the loggers; null takes the name of the run folder.",
    )
    entity: str | None = key(
        None,
        "W&B user or team that owns the run; null takes WANDB_ENTITY, or else the default of the login.",
    )
    group: str | None = key(
        None,
        "W&B group of the run, e.g. the name of a sweep; null takes WANDB_RUN_GROUP if it is set.",
    )
    tags: list[str] = key([], "W&B tags of the run, e.g. [baseline,night]; [] takes WANDB_TAGS if it is set.")
    rollouts: bool = key(True, "Write every response with its rewards to rollouts.jsonl.")
    progress: bool = key(True, "Show a progress bar, or plain lines if there is no terminal.")


@dataclass
class Config:
    """Configuration of a run."""

    seed: int = key(0, "Seed of data order, sampling and the engine.")
    resume: str | None = key(
        None,
        "Continue an earlier run. null starts a new one; auto takes the run of hydra.run.dir, or else the "
        "run under outputs/ that wrote a checkpoint last; a path names a run folder or one of its "
        "checkpoints.",
    )
    dry_run: bool = key(False, "Print the plan of roles, devices and memory, and do not run.")
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
