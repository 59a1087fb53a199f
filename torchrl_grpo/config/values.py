"""What single values may be: choices and ranges, with what to write instead."""

from __future__ import annotations

DATASETS = ("gsm8k", "math", "ifeval", "reasoning_gym", "jsonl")
# Surrogate -> its options and their defaults. A test compares them with objectives/surrogates.py.
SURROGATE_OPTIONS: dict[str, dict[str, float]] = {
    "clip": {},
    "cispo": {},
    "log_likelihood": {},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
}
LEVELS = ("token", "sequence", "trajectory")

# Values of train_model.parallelism that are DeepSpeed's, and what it calls them.
ZERO_STAGES = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}

CHOICES: dict[str, tuple[str, ...]] = {
    "env.dataset": DATASETS,
    "env.answer_format": ("tags", "plain", "equation"),
    "env.overlong_prompts": ("error", "drop", "truncate_left", "truncate_right", "truncate_middle"),
    "policy.surrogate": tuple(SURROGATE_OPTIONS),
    "policy.ratio": LEVELS,
    "policy.aggregation": ("token", "sequence", "constant"),
    "policy.advantage_estimator": ("group_mean", "leave_one_out", "maxent"),
    "policy.advantage_std": ("population", "unbiased", "batch", "none"),
    "policy.reward_combination": ("together", "apart"),
    "policy.constant_groups": ("keep", "drop", "refill"),
    "policy.overlong": ("keep", "mask", "penalise"),
    "policy.kl_estimator": ("k1", "k2", "k3"),
    "policy.kl_in": ("loss", "reward", "weights"),
    "policy.proximal": ("auto", "engine", "trainer"),
    "policy.correction": ("none", "truncate", "mask"),
    "policy.correction_level": LEVELS,
    "train_model.parallelism": ("auto", "ddp", "fsdp2", *ZERO_STAGES),
    "train_model.autocast": ("auto", "no", "bf16", "fp16"),
    "train_model.head_dtype": ("auto", "float32"),
    "train_model.attn_implementation": ("auto", "sdpa", "eager", "flash_attention_2"),
    "train_model.quantization": ("none", "nf4"),
    "train_model.lora.base_dtype": ("auto", "float32", "bfloat16", "float16"),
    "ref_model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "inference_model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "inference_model.head_dtype": ("auto", "float32"),
    "inference_model.backend": ("vllm", "transformers"),
    "collector.weight_update": ("drain", "in_flight"),
    "ray.placement": ("pack", "spread"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
}

# key -> smallest value, and what to write instead
AT_LEAST: dict[str, tuple[float, str]] = {
    "seed": (0, "0"),
    "env.task_size": (1, "10000"),
    "env.num_envs": (1, "8"),
    "env.repeats": (2, "8"),
    "reward.workers": (1, "1"),
    "policy.advantage_eps": (0, "1e-4"),
    "policy.aggregation_length": (1, "null"),
    "policy.max_refills": (1, "3"),
    "policy.overlong_buffer": (1, "null"),
    "policy.kl_coef": (0, "0.01"),
    "policy.init_kl_coeff": (0, "null"),
    "policy.kl_inference_coef": (0, "0.0"),
    "policy.entropy_coef": (0, "0.001"),
    "policy.entropy_delta": (0, "0.005"),
    "policy.entropy_coef_max": (0, "1.0"),
    "policy.correction_floor": (0, "0.0"),
    "policy.tau": (0, "0.1"),
    "policy.q_epsilon": (0, "1e-6"),
    "train_model.lora.rank": (0, "16"),
    "ref_model.refresh_frequency": (0, "0"),
    "inference_model.block_size": (1, "null"),
    "inference_model.max_model_len": (2, "1024"),
    "inference_model.max_new_tokens": (1, "256"),
    "inference_model.num_threads": (1, "null"),
    "collector.max_policy_age": (0, "1"),
    "collector.max_restarts": (0, "10"),
    "optimizer.lr": (0, "1e-5"),
    "optimizer.weight_decay": (0, "0.01"),
    "optimizer.warmup_steps": (0, "0"),
    "optimizer.min_lr_ratio": (0, "0.1"),
    "train.total_dialog_turns": (1, "64000"),
    "train.optim_batch_size": (1, "null"),
    "train.gradient_accumulation_steps": (1, "1"),
    "train.max_tokens_per_microbatch": (1, "null"),
    "train.epochs": (1, "1"),
    "train.weight_update_frequency": (1, "null"),
    "train.checkpoint_frequency": (0, "100"),
    "train.max_skipped_steps": (1, "5"),
    "train.num_threads": (1, "null"),
    "eval.frequency": (0, "50"),
    "eval.num_problems": (0, "200"),
    "eval.pass_at_k": (1, "1"),
    "checkpoint.keep": (1, "2"),
}

ABOVE_ZERO: dict[str, str] = {
    "reward.timeout_s": "5.0",
    "collector.timeout_s": "600.0",
    "policy.clip_epsilon": "0.2",
    "policy.clip_epsilon_high": "null",
    "policy.reward_clip": "null",
    "policy.reward_scale": "1.0",
    "policy.kl_target": "null",
    "policy.kl_horizon": "10000",
    "policy.entropy_target": "null",
    "policy.q_temperature": "1.0",
    "train_model.lora.alpha": "32.0",
    "ref_model.refresh_mix": "1.0",
    "inference_model.gpu_memory_utilization": "null",
    "inference_model.kv_cache_gib": "1",
    "inference_model.temperature": "1.0",
    "inference_model.max_logprob_gap": "null",
    "optimizer.eps": "1e-8",
    "optimizer.max_grad_norm": "1.0",
    "train.num_epochs": "1",
    "eval.temperature": "0.8",
}

# Below it vLLM samples at this temperature instead, and log-probabilities would be of another distribution.
VLLM_LEAST_TEMPERATURE = 0.01
# vLLM's CPU attention kernel takes multiples of 32 only, and the smallest lets short prompts be shared.
VLLM_CPU_BLOCK_SIZE = 32

AT_MOST: dict[str, tuple[float, str]] = {
    "seed": (2**32 - 1, "0"),  # the random generators of the libraries below us take 32 bits
    "inference_model.gpu_memory_utilization": (1, "null"),
    "optimizer.min_lr_ratio": (1, "0.1"),
    "policy.clip_epsilon": (1, "0.2"),
    "ref_model.refresh_mix": (1, "1.0"),
}
