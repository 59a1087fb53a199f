"""Metrics, rollouts, loggers, progress, and the report at the end of a run.

Nothing here influences training. Only functions of :mod:`.loggers` and :mod:`.stats` import torch.
"""

from torchrl_grpo.observe.loggers import Loggers, build
from torchrl_grpo.observe.metrics import MetricsWriter, RolloutWriter, read_jsonl
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.observe.report import plot, summary
from torchrl_grpo.observe.stats import pass_at_k, peak_cuda_gib, peak_memory_gib, wilson

__all__ = [
    "Loggers",
    "MetricsWriter",
    "Progress",
    "RolloutWriter",
    "build",
    "pass_at_k",
    "peak_cuda_gib",
    "peak_memory_gib",
    "plot",
    "read_jsonl",
    "summary",
    "wilson",
]
