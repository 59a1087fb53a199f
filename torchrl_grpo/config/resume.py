"""Which keys a resumed run may have another value of."""

from __future__ import annotations

from typing import Any

# A resumed run may change these and still be the same run.
FREE_KEYS = (
    "resume",
    "dry_run",
    "logging",
    "checkpoint",
    "train.checkpoint_frequency",
    "train.max_skipped_steps",
    # Memory only, to rounding: what a run that ran out of it is told to change.
    "train.max_tokens_per_microbatch",
    "train_model.gradient_checkpointing",
    "inference_model.gpu_memory_utilization",
    "inference_model.kv_cache_gib",
    # Rounding only; formats are what a run is told to change whose engine and trainer are too far apart.
    "train_model.head_dtype",
    "inference_model.enforce_eager",
    "train_model.compile",
    "train_model.fused_head",
    "train_model.autocast",
    "inference_model.dtype",
    "inference_model.head_dtype",
    "ref_model.dtype",
    # When it is taken for more than rounding changes no number but when the run stops.
    "inference_model.max_logprob_gap",
    # How many hold the model changes nothing but rounding; checkpoints are the same for all layouts.
    "train_model.num_devices",
    "train_model.devices",
    "train_model.parallelism",
    "ref_model.num_devices",
    "ref_model.devices",
    # Who samples a response does not change what it is sampled from.
    "inference_model.backend",
    # What one backend alone takes, and has to go when another takes its place. Some (quantization) change
    # what is sampled from; what engine and trainer differ by is measured anew.
    "inference_model.engine_args",
    "collector.timeout_s",
    "collector.max_restarts",
    "inference_model.num_devices",
    "inference_model.devices",
    "inference_model.sleep",
    "ray",
)


# A resumed run may change these too, from this value: with it a run ends where it would have mattered.
FREE_FROM = {"env.overlong_prompts": "error"}


def may_change(key: str, before: Any = None) -> bool:
    """Whether a resumed run may have another value of a key.

    Args:
        key: dotted.
        before: the value that the run was started with; None asks whether any may change.
    """
    if key in FREE_FROM and before == FREE_FROM[key]:
        return True
    return any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
