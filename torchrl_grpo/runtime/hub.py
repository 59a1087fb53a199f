"""Asks once whether the Hugging Face hub can be reached, and otherwise lets its clients use their cache.

Without a network, or behind a firewall that drops packets, each client would repeat each request for half a
minute.
"""

from __future__ import annotations

import functools
import os
import sys

# Time limit of the hub's answer in seconds.
LIMIT_S = 10


@functools.cache
def why_unreachable() -> str | None:
    """Return why the hub cannot be used; None if it answers.

    If it does not answer, its clients in this process, and in those that it starts, no longer ask it.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=LIMIT_S)
    # The error types depend on the library's HTTP client. Whichever it is, there was no answer.
    except Exception as error:  # noqa: BLE001
        _go_offline()
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return None


def _go_offline() -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if (datasets := sys.modules.get("datasets")) is not None:
        # It copies the constant when it is imported.
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
