"""The choices and ranges of single values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The range of a number. The schema has it beside the number's type: ``Annotated[int, Range(ge=1)]``.

    Attributes:
        gt: number that is too small itself.
        ge: smallest number.
        le: largest number.
    """

    gt: float | None = None
    ge: float | None = None
    le: float | None = None

    def mistake(self, number: float) -> str | None:
        """Return what is wrong with a number, or None."""
        if self.gt is not None and number <= self.gt:
            return f"it must be greater than {self.gt}"
        if self.ge is not None and number < self.ge:
            return f"it must be at least {self.ge}"
        return f"it must be at most {self.le}" if self.le is not None and number > self.le else None


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
PositiveShare = Annotated[float, Range(gt=0, le=1)]

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
AdvantageEstimator = StrEnum(
    "AdvantageEstimator", ["group_mean", "leave_one_out", "reward", "maxent", "none"]
)
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
WeightTransfer = StrEnum(
    "WeightTransfer",
    ["auto", "in_process", "shared_memory", "folder", "cuda_ipc", "nccl", "ray_objects"],
)
WeightUpdate = StrEnum("WeightUpdate", ["drain", "in_flight"])
Placement = StrEnum("Placement", ["pack", "spread"])
TrainMethod = StrEnum("TrainMethod", ["grpo", "sft"])
OptimizerName = StrEnum("OptimizerName", ["adamw", "adamw_8bit", "muon"])
LRSchedule = StrEnum("LRSchedule", ["constant", "linear", "cosine"])

# Surrogate -> its options and their defaults. A test compares this table with objectives/surrogates.py.
SURROGATE_OPTIONS: dict[str, dict[str, float]] = {
    "clip": {},
    "cispo": {},
    "log_likelihood": {},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
}
# Values of logging.backends -> the packages that they need.
LOGGERS = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
# Values of optimizer.name -> bytes that the optimizer keeps for a weight of a layer's matrix: two averages in
# float32; two in 8 bits, with a float32 scale for every 256 of each; one average in float32.
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256), "muon": 4.0}
# Values of train_model.parallelism that use DeepSpeed -> its ZeRO stage.
ZERO_STAGES = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}

# Environment variables with the keys of servers. The first is vLLM's own, so that its check and ours agree.
KEY_VARIABLE, SGLANG_KEY_VARIABLE = "VLLM_API_KEY", "SGLANG_API_KEY"

# vLLM's CPU attention kernel takes multiples of 32 only. With the smallest one, short prompts can be shared.
VLLM_CPU_BLOCK_SIZE = 32
