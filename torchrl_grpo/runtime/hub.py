"""Asks whether the Hugging Face hub can be reached, and otherwise lets its clients use their cache.

Without a network, or behind a firewall that drops packets, each client would repeat each request for half a
minute. A network that fails for a moment is asked again, because a run may need the hub hours later.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

# Time limit of the hub's answer in seconds.
LIMIT_S = 10
# Seconds after which a hub that has not answered is asked again.
_RETRY_S = 30.0
# Says to the processes that this one starts that it set HF_HUB_OFFLINE, and not the user.
_UNREACHABLE = "TORCHRL_GRPO_HUB_UNREACHABLE"


@dataclass
class _Answer:
    """What came of the last request.

    Attributes:
        why: why there was no answer; None if there was one.
        at: time of the request.
    """

    why: str | None
    at: float


_last: _Answer | None = None


def why_unreachable() -> str | None:
    """Return why the hub cannot be used; None if it answers, or has answered before.

    If it does not answer, its clients in this process, and in those that it starts, do not ask it until the
    next call of this function in the same process that gets an answer.
    """
    global _last
    from huggingface_hub import constants, get_session

    failed = _last is not None and _last.why is not None
    if constants.is_offline_mode() and _UNREACHABLE not in os.environ:
        return "HF_HUB_OFFLINE is set"
    if _last is not None and (not failed or time.monotonic() < _last.at + _RETRY_S):
        return _last.why
    why = None
    if _UNREACHABLE in os.environ:
        # The client refuses to ask while it is offline.
        _set_offline(False)
    try:
        get_session().head(constants.ENDPOINT, timeout=LIMIT_S)
    # The error types depend on the library's HTTP client. Whichever it is, there was no answer.
    except Exception as error:  # noqa: BLE001
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        _set_offline(True)
    _last = _Answer(why, time.monotonic())
    return why


def _set_offline(offline: bool) -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = str(int(offline))
    if offline:
        os.environ[_UNREACHABLE] = "1"
    else:
        os.environ.pop(_UNREACHABLE, None)
    constants.HF_HUB_OFFLINE = offline
    if (datasets := sys.modules.get("datasets")) is not None:
        # It copies the constant when it is imported, unless a variable of its own is set.
        own = os.environ.get("HF_DATASETS_OFFLINE", "").upper()
        offline = offline or own in constants.ENV_VARS_TRUE_VALUES
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = offline
