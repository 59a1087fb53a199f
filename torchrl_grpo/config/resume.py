"""The keys that may change when a run is resumed."""

from __future__ import annotations

from typing import Any

# A resumed run may change these keys and still be the same run.
FREE_KEYS = (
    "resume",
    "dry_run",
    "allocation_mode",
    "logging",
    "hub",
    "sweep",
    "checkpoint",
    "train.checkpoint_frequency",
    "train.max_skipped_steps",
    # These keys say which checkpoints are kept and when the run ends. They change no step.
    "train.keep_best",
    "train.stop_at",
    "train.patience",
    # These keys change memory and rounding only. A run that is out of memory is advised to change them.
    "train.max_tokens_per_microbatch",
    "train_model.gradient_checkpointing",
    "train_model.offload_optimizer",
    "inference_model.gpu_memory_utilization",
    "inference_model.kv_cache_gib",
    # These keys change rounding only. A run is advised to change the formats if the log-probabilities of
    # engine and trainer differ too much.
    "train_model.head_dtype",
    "inference_model.enforce_eager",
    "train_model.compile",
    "train_model.fused_head",
    "train_model.prefix_attention",
    "train_model.autocast",
    "inference_model.dtype",
    "inference_model.head_dtype",
    "ref_model.dtype",
    # This limit changes no number. It only stops a run whose engine and trainer differ too much.
    "inference_model.max_logprob_diff",
    # The number of devices and the layout of the model change rounding only. Checkpoints have the same format
    # for all layouts.
    "train_model.num_devices",
    "train_model.devices",
    "train_model.parallelism",
    "ref_model.num_devices",
    "ref_model.devices",
    "teacher_model.num_devices",
    "teacher_model.devices",
    "teacher_model.dtype",
    # The backend does not change the distribution that responses are sampled from.
    "inference_model.backend",
    # They belong to vLLM or to SGLang, so they must be removed when the backend changes. Some, such as vLLM's
    # quantization, change the distribution that is sampled from. The difference between engine and trainer is
    # therefore measured again.
    "inference_model.engine_args",
    "inference_model.servers",
    "inference_model.server_python",
    # How weights travel and how many devices an engine has change rounding at most.
    "inference_model.weight_transfer",
    "inference_model.weight_folder",
    "inference_model.tensor_parallel_size",
    "inference_model.pipeline_parallel_size",
    "collector.timeout_s",
    "collector.max_restarts",
    "inference_model.num_devices",
    "inference_model.devices",
    "inference_model.sleep",
    "ray",
)


# Free keys that have another name now, and that name. Earlier checkpoints have them.
EARLIER_NAMES = {"inference_model.max_logprob_gap": "inference_model.max_logprob_diff"}

# A resumed run may also change these keys if they had this value. With this value, a run ends at the first
# prompt that another value would treat differently.
FREE_FROM = {"env.overlong_prompts": "error"}


def is_changeable_on_resume(key: str, before: Any = None) -> bool:
    """Return whether a resumed run may have another value of a key.

    Args:
        key: dotted key.
        before: value that the run was started with; None asks whether any value may change.
    """
    if key in FREE_FROM and before == FREE_FROM[key]:
        return True
    return any(key == free or key.startswith(f"{free}.") for free in (*FREE_KEYS, *EARLIER_NAMES))
