"""What is known of the model of a judge's own server: its files, and the control tokens of its tokenizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_grpo.data.control_texts import USUAL, any_of, control_texts

_log = logging.getLogger(__name__)


def identity(model: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the model apart from others of the same name, as JSON.

    Args:
        model: folder, or name on the hub of what was downloaded.
        engine_args: options of the server.

    Returns:
        The options, and the model's commit on the hub, or name, size and time of each file of the folder.
    """
    folder = Path(model)
    if folder.is_dir():
        stats = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
        files: Any = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    else:
        files = _commit(model, engine_args)
    return {"engine_args": dict(engine_args), "files": files}


def _commit(model: str, engine_args: Mapping[str, Any]) -> str | None:
    from huggingface_hub import snapshot_download

    revision, cache = engine_args.get("revision"), engine_args.get("download_dir")
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)).name
    except (OSError, ValueError) as error:
        _log.warning(
            "the version of the judge %s is not known, so verdicts in a shared folder may be those of an "
            "earlier one: %s",
            model, error,
        )  # fmt: skip
        return None


def control_pattern(model: str, engine_args: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern of the texts that no response may bring into the judge's conversation.

    Args:
        model: see :func:`identity`.
        engine_args: options of the server.
    """
    from transformers import AutoTokenizer

    place = {"revision": engine_args.get("revision"), "cache_dir": engine_args.get("download_dir")}
    try:
        # Otherwise it would ask on a terminal whether to run code of the model, and wait.
        name = engine_args.get("tokenizer") or model
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **place)
    except (OSError, ValueError, ImportError, KeyError) as error:
        _log.warning("of the judge %s only the usual control tokens are known: %s", model, error)
        return USUAL
    own = any_of(control_texts(tokenizer, str(tokenizer.chat_template)))
    return re.compile(f"{USUAL.pattern}|{own.pattern}", USUAL.flags)
