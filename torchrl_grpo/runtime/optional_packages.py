"""Packages that some runs use and that others import whenever they are installed. Imports none of them.

transformers and accelerate import DeepSpeed, and PEFT imports bitsandbytes, to see what they could do. What
these warn of then concerns nobody who has not asked for them.
"""

from __future__ import annotations

import logging


class _ErrorsOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


# A filter, because DeepSpeed sets the level of its logger when it is imported.
_ERRORS_ONLY = _ErrorsOnly()


def quiet_unused(uses_deepspeed: bool, uses_bitsandbytes: bool) -> None:
    """Show warnings of DeepSpeed and bitsandbytes only in a job that uses them."""
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.removeFilter(_ERRORS_ONLY)
    if not uses_deepspeed:
        deepspeed.addFilter(_ERRORS_ONLY)
    # Its warnings come from loggers below this one.
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET if uses_bitsandbytes else logging.ERROR)
