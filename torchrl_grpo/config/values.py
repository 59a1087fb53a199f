"""The choices and ranges of single values, and the values that error messages suggest."""

from __future__ import annotations

from enum import StrEnum

# The choices of a key. omegaconf reads and prints an enum member by its name, so users write names, and each
# name equals its value. The functional form avoids writing each name twice.
AnswerFormat = StrEnum("AnswerFormat", ["tags", "plain", "equation"])
OverlongPrompts = StrEnum(
    "OverlongPrompts", ["error", "drop", "truncate_left", "truncate_right", "truncate_middle"]
)
ProblemSampling = StrEnum("ProblemSampling", ["uniform", "pass_rate"])
Surrogate = StrEnum("Surrogate", ["clip", "cispo", "log_likelihood", "sapo"])
Level = StrEnum("Level", ["token", "sequence", "trajectory"])
Aggregation = StrEnum("Aggregation", ["token", "sequence", "constant"])
AdvantageEstimator = StrEnum("AdvantageEstimator", ["group_mean", "leave_one_out", "reward", "maxent"])
AdvantageStd = StrEnum("AdvantageStd", ["population", "unbiased", "batch", "none"])
RewardCombination = StrEnum("RewardCombination", ["together", "apart"])
ConstantGroups = StrEnum("ConstantGroups", ["keep", "drop", "refill"])
Overlong = StrEnum("Overlong", ["keep", "mask", "penalise"])
KLEstimator = StrEnum("KLEstimator", ["k1", "k2", "k3"])
KLIn = StrEnum("KLIn", ["loss", "reward", "weights"])
Proximal = StrEnum("Proximal", ["auto", "engine", "trainer"])
Correction = StrEnum("Correction", ["none", "truncate", "mask"])
Parallelism = StrEnum("Parallelism", ["auto", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
Autocast = StrEnum("Autocast", ["auto", "no", "bf16", "fp16"])
Dtype = StrEnum("Dtype", ["auto", "float32", "bfloat16", "float16"])
HeadDtype = StrEnum("HeadDtype", ["auto", "float32"])
Attention = StrEnum("Attention", ["auto", "sdpa", "eager", "flash_attention_2"])
PrefixAttention = StrEnum("PrefixAttention", ["auto", "varlen", "dense"])
Quantization = StrEnum("Quantization", ["none", "nf4"])
Backend = StrEnum("Backend", ["vllm", "vllm_server", "sglang_server", "transformers"])
WeightTransfer = StrEnum(
    "WeightTransfer",
    ["auto", "in_process", "shared_memory", "folder", "cuda_ipc", "nccl", "ray_objects"],
)
WeightUpdate = StrEnum("WeightUpdate", ["drain", "in_flight"])
Placement = StrEnum("Placement", ["pack", "spread"])
TrainMethod = StrEnum("TrainMethod", ["grpo", "sft"])
LRSchedule = StrEnum("LRSchedule", ["constant", "linear", "cosine"])

# Surrogate -> its options and their defaults. A test compares this table with objectives/surrogates.py.
SURROGATE_OPTIONS: dict[str, dict[str, float]] = {
    "clip": {},
    "cispo": {},
    "log_likelihood": {},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
}
# Values of train_model.parallelism that use DeepSpeed -> its ZeRO stage.
ZERO_STAGES = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}

# Environment variables with the keys of servers. The first is vLLM's own, so that its check and ours agree.
KEY_VARIABLE, SGLANG_KEY_VARIABLE = "VLLM_API_KEY", "SGLANG_API_KEY"
# Values of inference_model.backend with which vLLM generates.
VLLM_BACKENDS = (Backend.vllm, Backend.vllm_server)
# Values of inference_model.backend with which a server generates.
SERVER_BACKENDS = (Backend.vllm_server, Backend.sglang_server)
# Values of inference_model.backend whose engine takes memory for its key/value cache when it starts: a share
# of a GPU, or inference_model.kv_cache_gib of a CPU's memory.
CACHING_BACKENDS = (*VLLM_BACKENDS, Backend.sglang_server)

# Key -> the smallest valid value, and a value to suggest.
AT_LEAST: dict[str, tuple[float, str]] = {
    "seed": (0, "0"),
    "env.task_size": (1, "10000"),
    "env.unseen_weight": (0, "1.0"),
    "env.num_envs": (1, "8"),
    "env.repeats": (1, "8"),
    "env.max_turns": (1, "8"),
    "env.max_turn_tokens": (1, "null"),
    "env.max_tool_characters": (1, "2000"),
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
    "inference_model.tensor_parallel_size": (1, "1"),
    "inference_model.pipeline_parallel_size": (1, "1"),
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

# Key whose value must be above 0 -> a value to suggest.
ABOVE_ZERO: dict[str, str] = {
    "env.tool_timeout_s": "10.0",
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

# vLLM raises a lower temperature to this one, so its log-probabilities would be of another distribution.
VLLM_LEAST_TEMPERATURE = 0.01
# vLLM's CPU attention kernel takes multiples of 32 only. With the smallest one, short prompts can be shared.
VLLM_CPU_BLOCK_SIZE = 32

# Key -> the largest valid value, and a value to suggest.
AT_MOST: dict[str, tuple[float, str]] = {
    "seed": (2**32 - 1, "0"),  # random generators of the libraries take 32 bits
    "inference_model.gpu_memory_utilization": (1, "null"),
    "optimizer.min_lr_ratio": (1, "0.1"),
    "policy.clip_epsilon": (1, "0.2"),
    "ref_model.refresh_mix": (1, "1.0"),
}
