"""What people see of a run: metrics, rollouts, loggers, progress, and the report at its end.

Nothing here decides anything about training, and nothing but :mod:`.loggers` needs torch.
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
