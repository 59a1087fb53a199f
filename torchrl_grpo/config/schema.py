"""The typed schema of every run: Hydra composes ``config/`` into these dataclasses.

The meaning of each key is written next to it in the YAML files under ``config/``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EnvConfig:
    """The problems and how many of them a collection round takes."""

    dataset: str = "gsm8k"
    task: str | None = None
    task_args: dict[str, Any] = field(default_factory=dict)
    task_size: int = 10_000
    data_path: str | None = None
    eval_data_path: str | None = None
    hub_name: str | None = None
    hub_subset: str | None = None
    train_split: str | None = None
    eval_split: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    num_envs: int = 8
    repeats: int = 8
    system_prompt: str | None = None
    prompt_template: str = "{question}"
    answer_format: str = "tags"
    overlong_prompts: str = "error"
    shuffle: bool = True
    train_on_ifeval: bool = False


@dataclass
class RewardConfig:
    """The rewards and how they are run."""

    weights: dict[str, float] = field(default_factory=dict)
    on_error: float = 0.0
    timeout_s: float = 5.0
    workers: int = 1


@dataclass
class ModelConfig:
    """The language model."""

    name: str = "smollm2-135m"
    chat_template: str | None = None
    trust_remote_code: bool = False
    cache_dir: str | None = None


@dataclass
class PolicyConfig:
    """The objective."""

    surrogate: str = "clip"
    surrogate_args: dict[str, float] = field(default_factory=dict)
    clip_epsilon: float = 0.2
    clip_epsilon_high: float | None = None
    dual_clip: float | None = None
    ratio: str = "token"
    aggregation: str = "token"
    aggregation_length: int | None = None
    advantage_estimator: str = "group_mean"
    advantage_std: str = "unbiased"
    advantage_eps: float = 1e-4
    reward_combination: str = "together"
    reward_shift: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    constant_groups: str = "keep"
    max_refills: int = 3
    overlong: str = "keep"
    overlong_buffer: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    init_kl_coeff: float | None = None
    kl_target: float | None = None
    kl_horizon: int = 10_000
    kl_inference_coef: float = 0.0
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    entropy_delta: float = 0.005
    entropy_coef_max: float = 1.0
    proximal: str = "auto"
    correction: str = "none"
    correction_level: str = "token"
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    tau: float = 0.1
    q_temperature: float = 1.0
    q_epsilon: float = 1e-6
    length_normalize_ref: bool = True


@dataclass
class LoraConfig:
    """Low-rank adapters on the trained copy."""

    rank: int = 0
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    base_dtype: str = "auto"


@dataclass
class TrainModelConfig:
    """The trained copy of the model."""

    num_devices: int | str = "auto"
    devices: list[int] | None = None
    parallelism: str = "auto"
    autocast: str = "auto"
    head_dtype: str = "auto"
    gradient_checkpointing: bool = False
    shared_prefix: bool = True
    attn_implementation: str = "auto"
    compile: bool = False
    fused_head: bool = True
    quantization: str = "none"
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class RefModelConfig:
    """The frozen copy for the KL divergence."""

    num_devices: int | str = "auto"
    devices: list[int] | None = None
    dtype: str = "auto"
    refresh_frequency: int = 0
    refresh_mix: float = 1.0


@dataclass
class InferenceModelConfig:
    """The engine that generates."""

    backend: str = "vllm"
    num_devices: int | str = "auto"
    devices: list[int] | None = None
    dtype: str = "auto"
    head_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    kv_cache_gib: int = 1
    block_size: int | None = None
    enforce_eager: bool | None = None
    sleep: bool | None = None
    max_model_len: int = 1024
    max_new_tokens: int = 256
    temperature: float = 1.0
    max_logprob_gap: float | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    num_threads: int | None = None


@dataclass
class CollectorConfig:
    """How far grpo-async.py collects ahead."""

    max_policy_age: int = 1
    weight_update: str = "in_flight"
    partial_rollout: bool = False
    timeout_s: float = 600.0
    max_restarts: int = 10


@dataclass
class RayConfig:
    """Where the rollout workers of grpo-async.py live."""

    address: str | None = None
    placement: str = "pack"


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0


@dataclass
class TrainConfig:
    """How long and in which batches training runs."""

    total_dialog_turns: int | None = 64_000
    num_epochs: float | None = None
    optim_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    max_tokens_per_microbatch: int | None = None
    epochs: int = 1
    weight_update_frequency: int | None = None
    checkpoint_frequency: int = 100
    max_skipped_steps: int = 5
    num_threads: int | None = None


@dataclass
class EvalConfig:
    """Measuring on held-out problems."""

    frequency: int = 50
    num_problems: int = 200
    at_start: bool = True
    pass_at_k: int = 1
    temperature: float = 0.8


@dataclass
class CheckpointConfig:
    """Which checkpoints stay."""

    keep: int = 2
    export_merged: bool = False


@dataclass
class LoggingConfig:
    """What is written and shown."""

    backends: list[str] = field(default_factory=list)
    project: str = "torchrl-grpo"
    experiment: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    rollouts: bool = True
    progress: bool = True


@dataclass
class Config:
    """Everything a run needs to know."""

    seed: int = 0
    resume: str | None = None
    dry_run: bool = False
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
