"""Whether W&B can record online: whether there is a key, and whether its server answers.

W&B itself would try for minutes to reach a server, and then end the run.
"""

from __future__ import annotations

import http.client
import netrc
import os
import queue
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlparse

from torchrl_grpo.errors import ConfigError

# Values of WANDB_MODE with which W&B records online.
_ONLINE = ("online", "run")
# Seconds within which the server must answer.
_LIMIT_S = 5.0
# Answers of a proxy, or of a server that is down.
_PROXY_NEEDS_LOGIN, _SERVER_ERROR = 407, 500


def offline_reason() -> str | None:
    """Return why W&B must record offline; None if it can record online, or if WANDB_MODE says what to do.

    Raises:
        ConfigError: the netrc file cannot be read.
    """
    chosen = os.environ.get("WANDB_MODE", "")
    if chosen and chosen not in _ONLINE:
        return None
    import wandb

    # The variable wins over the file that `wandb login --host` writes.
    url = os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url)
    if not chosen and not _has_key(urlparse(url).hostname or ""):
        return "has no key"
    why = _why_unreachable(url)
    return None if why is None else f"cannot reach {url} ({why})"


def _has_key(host: str) -> bool:
    """Return whether W&B finds a login in the environment or in the netrc file, without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    if not path.exists():
        return False
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}), so it is unknown whether W&B has a key: fix the "
            "file, or set WANDB_MODE=offline."
        ) from error


def _why_unreachable(url: str) -> str | None:
    """Return why nothing answers at ``url``; None if something does."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # In a thread, because nothing limits how long a name is looked up.
    threading.Thread(target=lambda: answers.put(_ask(url)), name="reach W&B", daemon=True).start()
    try:
        return answers.get(timeout=_LIMIT_S)
    except queue.Empty:
        return f"no answer within {_LIMIT_S:g} s"


def _ask(url: str) -> str | None:
    # Nothing secret is sent, and W&B has its own ways to name the certificates that it trusts.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        # Through the proxy that the environment names, as W&B.
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=_LIMIT_S, context=context):
            return None
    except urllib.error.HTTPError as error:
        with error:
            down = error.code == _PROXY_NEEDS_LOGIN or error.code >= _SERVER_ERROR
        return f"HTTP status {error.code}" if down else None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
