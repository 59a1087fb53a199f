"""Metrics, rollouts, loggers, progress, and the report at the end of a run.

Nothing here influences training. Only functions of :mod:`.loggers` and :mod:`.stats` import torch.
"""

from torchrl_grpo.observe.loggers import Loggers, build
from torchrl_grpo.observe.metrics import EvaluationWriter, MetricsWriter, RolloutWriter, read_jsonl
from torchrl_grpo.observe.progress import Progress
from torchrl_grpo.observe.report import plot, summary
from torchrl_grpo.observe.stats import mean_interval, pass_at_k, peak_cuda_gib, peak_memory_gib, wilson

__all__ = [
    "EvaluationWriter",
    "Loggers",
    "MetricsWriter",
    "Progress",
    "RolloutWriter",
    "build",
    "mean_interval",
    "pass_at_k",
    "peak_cuda_gib",
    "peak_memory_gib",
    "plot",
    "read_jsonl",
    "summary",
    "wilson",
]
