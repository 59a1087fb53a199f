"""The keys that may change when a run is resumed."""

from __future__ import annotations

import itertools
from typing import Any

# Keys that a resumed run may change and still be the same run, by what changes with them. The documentation's
# site shows them as a table.
FREE: dict[str, tuple[str, ...]] = {
    "no number": ("resume", "dry_run", "logging", "hub", "sweep"),
    "which checkpoints are written and kept": (
        "checkpoint",
        "train.checkpoint_frequency",
        "train.keep_best",
    ),
    "when the run ends; with another value, a run that one of them has ended goes on": (
        "train.stop_at",
        "train.patience",
    ),
    # A run that is out of memory is advised to change them.
    "memory, speed and rounding": (
        "train.max_tokens_per_microbatch",
        "train_model.gradient_checkpointing",
        "train_model.offload_optimizer",
        "train_model.compile",
        "train_model.fused_head",
        "train_model.prefix_attention",
    ),
    # A run is advised to change the formats if the log-probabilities of engine and trainer differ too much.
    "rounding": (
        "train_model.autocast",
        "train_model.head_dtype",
        "inference_model.dtype",
        "inference_model.head_dtype",
        "inference_model.enforce_eager",
        "inference_model.tensor_parallel_size",
        "inference_model.pipeline_parallel_size",
        "ref_model.dtype",
        "teacher_model.dtype",
    ),
    # Checkpoints have the same format for all layouts of the model.
    "devices, and rounding": (
        "allocation_mode",
        "train_model.num_devices",
        "train_model.devices",
        "train_model.parallelism",
        "ref_model.num_devices",
        "ref_model.devices",
        "teacher_model.num_devices",
        "teacher_model.devices",
    ),
    # The backend does not change the distribution that responses are sampled from.
    "who samples, and where": (
        "inference_model.backend",
        "inference_model.num_devices",
        "inference_model.devices",
        "inference_model.sleep",
        "inference_model.gpu_memory_utilization",
        "inference_model.kv_cache_gib",
        "inference_model.servers",
        "inference_model.server_python",
        "inference_model.weight_transfer",
        "inference_model.weight_folder",
        "collector.timeout_s",
        "collector.max_restarts",
        "ray",
    ),
    # They belong to vLLM or to SGLang, so they must be removed when the backend changes. Some, such as vLLM's
    # quantization, change the distribution that is sampled from. The difference between engine and trainer is
    # therefore measured again.
    "how the engine computes, and with `quantization` or `kv_cache_dtype` the distribution of responses": (
        "inference_model.engine_args",
    ),
    "when a warning is given or the run stops": (
        "inference_model.max_logprob_diff",
        "train.max_skipped_steps",
    ),
}
FREE_KEYS = tuple(itertools.chain(*FREE.values()))

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
