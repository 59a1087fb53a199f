"""Silences optional packages in runs that do not use them. Imports none of them.

transformers and accelerate import DeepSpeed, and PEFT imports bitsandbytes, whenever they are installed.
Their warnings matter only to runs that use them.
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
