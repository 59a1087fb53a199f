"""Packages that some runs use and that others import whenever they are installed. Imports none of them.

transformers and accelerate import DeepSpeed, and PEFT imports bitsandbytes, to see what they could do. What
these warn of then concerns nobody who has not asked for them.
"""

from __future__ import annotations

import logging

from torchrl_grpo.config.schema import Config
from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.distributed.launch import parallelism


class _ErrorsOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


# A filter, because DeepSpeed sets the level of its logger when it is imported.
_ERRORS_ONLY = _ErrorsOnly()


def quieten_unused(cfg: Config | None) -> None:
    """Show warnings of DeepSpeed and bitsandbytes only in a job that uses them.

    Args:
        cfg: the job's configuration; None where another process speaks for it.
    """
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.removeFilter(_ERRORS_ONLY)
    if cfg is None or parallelism(cfg) not in ZERO_STAGES:
        deepspeed.addFilter(_ERRORS_ONLY)
    quantized = cfg is not None and cfg.train_model.quantization != "none"
    # Its warnings come from loggers below this one.
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET if quantized else logging.ERROR)
