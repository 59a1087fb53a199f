"""Experiments that compare settings on the sums of the quick start, and experiments that need a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.evidence.experiment import Experiment
from benchmarks.learning import Stage

_GRPO, _ASYNC = "sota-implementations/grpo/grpo.py", "sota-implementations/grpo/grpo-async.py"
_PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "sapo", "maxent")
# Two runs of the same arm differ by their seeds. A comparison needs more of them than a rise does.
_SEEDS = 5
_CORRECTIONS: dict[str, Sequence[str]] = {
    "ratio to the engine": ("policy.proximal=engine",),
    "no correction": ("policy.proximal=trainer",),
    "truncated": ("policy.proximal=trainer", "policy.correction=truncate"),
    "masked": ("policy.proximal=trainer", "policy.correction=mask", "policy.correction_floor=0.5"),
    "decoupled": ("policy.proximal=trainer", "policy.correction=mask", "policy.correction_floor=0.0"),
}


def _sums(
    claim: str,
    refuted_by: str,
    arms: Mapping[str, Sequence[str]],
    script: str = _GRPO,
) -> Experiment:
    """Return a comparison on sums, at equal numbers of samples.

    Args:
        claim: see :class:`Experiment`.
        refuted_by: see :class:`Experiment`.
        arms: words of each arm.
        script: script that runs them.
    """
    common = ("--config-name=grpo_quickstart", "eval.num_problems=300", "train.checkpoint_frequency=0")
    return Experiment(
        claim,
        refuted_by,
        {name: (Stage(script, (*common, *words)),) for name, words in arms.items()},
        seeds=_SEEDS,
    )


def _gsm8k(claim: str, refuted_by: str, words: Sequence[str], needs: str) -> Experiment:
    """Return GRPO on all of GSM8K's test problems, which needs a GPU."""
    common = ("--config-name=grpo_gsm8k", "eval.num_problems=1319")
    return Experiment(claim, refuted_by, {"GRPO": (Stage(_GRPO, (*common, *words)),)}, needs=needs)


EXPERIMENTS: dict[str, Experiment] = {
    "presets": _sums(
        "Presets of `policy` learn equally well from as many samples.",
        "The interval of a paired difference to `grpo` excludes 0.",
        {name: (f"policy={name}",) for name in _PRESETS},
    ),
    "ages": _sums(
        "An age of 1 costs less than one of 4, and corrections make up for it.",
        "The interval of the difference to an age of 0 is the same for both ages or for all corrections.",
        {
            "age 0": ("collector.max_policy_age=0",),
            **{
                f"age {age}, {name}": (f"collector.max_policy_age={age}", *words)
                for age in (1, 4)
                for name, words in _CORRECTIONS.items()
            },
        },
        script=_ASYNC,
    ),
    "adapters": _sums(
        "Adapters of rank 16 learn as well as all weights do.",
        "The interval of the difference excludes 0.",
        {"all weights": (), "adapters": ("train_model.lora.rank=16", "optimizer.lr=3e-4")},
    ),
    "reference": _sums(
        "A KL divergence to the reference makes no difference in 16 steps.",
        "The interval of the difference excludes 0.",
        {"no KL": ("policy.kl_coef=0",), "KL 0.04": ("policy.kl_coef=0.04",)},
    ),
    "group-sizes": _sums(
        "Groups of 8 teach as much as groups of 4 or 16.",
        "The interval of the difference of another size is above 0.",
        {f"groups of {size}": (f"env.num_envs={64 // size}", f"env.repeats={size}") for size in (8, 4, 16)},
    ),
    "dynamic-sampling": _sums(
        "Refilled rounds teach more in as many steps.",
        "The interval of the difference includes 0.",
        {"kept": ("policy.constant_groups=keep",), "refilled": ("policy.constant_groups=refill",)},
    ),
    "number-formats": _sums(
        "bfloat16 learns less than float32 in 16 steps.",
        "The interval of the difference includes 0.",
        {
            "float32": (),
            "bfloat16": ("train_model.autocast=bf16", "inference_model.dtype=bfloat16"),
        },
    ),
    "gsm8k-0.5b": _gsm8k(
        "16,000 samples raise Qwen2.5-0.5B-Instruct (published: 43.6 to 50.2).",
        "The interval of the rise includes 0.",
        ("model.name=Qwen/Qwen2.5-0.5B-Instruct", "train.total_dialog_turns=16000"),
        "GPU of 24 GB, 23 GB, 0.3 hours",
    ),
    "gsm8k-1.5b-lora": _gsm8k(
        "Adapters of rank 32 raise Qwen2.5-1.5B-Instruct.",
        "The interval of the rise includes 0.",
        ("+recipe=gpu_24gb",),
        "GPU of 24 GB, 17 GB, 0.5 hours",
    ),
    "gsm8k-1.5b": _gsm8k(
        "64,000 samples raise Qwen2.5-1.5B-Instruct (published elsewhere: 79.6).",
        "The interval of the rise includes 0.",
        ("+recipe=gpu_80gb",),
        "GPU of 80 GB, 56 GB, 1.5 hours",
    ),
    "gsm8k-3b": _gsm8k(
        "64,000 samples raise Qwen2.5-3B-Instruct (published elsewhere: 86.1).",
        "The interval of the rise includes 0.",
        (
            "+recipe=gpu_80gb",
            "model.name=Qwen/Qwen2.5-3B-Instruct",
            "train_model.gradient_checkpointing=true",
        ),
        "GPU of 80 GB, 75 GB, 2.5 hours",
    ),
}
