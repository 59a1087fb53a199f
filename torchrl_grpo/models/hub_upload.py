"""Uploads a trained model and its card to the Hugging Face hub, if ``hub.push`` names a repository."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.errors import first_line
from torchrl_grpo.runtime import hub, screen

_WEIGHTS = ["*.safetensors", "*.bin", "*.index.json", "adapter_config.json"]


def check(cfg: Config) -> None:
    """Check before a run trains that the hub can be reached, and that it knows the user.

    Raises:
        ConfigError: it cannot, or does not.
    """
    key, name = "hub.push", cfg.hub.push
    if name is None:
        return
    if (why := hub.why_unreachable()) is not None:
        wrong = f"the Hugging Face hub cannot be reached ({why})"
        raise bad_value(key, name, wrong, f"{key}=null, and upload the model after the run with `hf upload`")
    from huggingface_hub import HfApi, get_token

    fix = "HF_TOKEN=TOKEN in front of the command, with a token that may write, or run `hf auth login` once"
    if get_token() is None:
        raise bad_value(key, name, "nobody is logged in to the Hugging Face hub", fix)
    try:
        HfApi().whoami()
    # The error types depend on the library's HTTP client.
    except Exception as error:
        raise bad_value(key, name, f"the hub refuses the token ({first_line(error)})", fix) from error


def upload(cfg: Config, checkpoints: Path, last_step: int, best_step: int | None = None) -> None:
    """Upload the model of a checkpoint: the merged one if there is one.

    A model that cannot be uploaded is not lost, so a line says how to do it later.

    Args:
        cfg: configuration of the run.
        checkpoints: folder of the run's checkpoints.
        last_step: step of the last checkpoint.
        best_step: step with the best held-out value, whose checkpoint is taken if ``train.keep_best`` has
            kept one; None without evaluations.
    """
    if cfg.hub.push is None:
        return
    from huggingface_hub import HfApi

    checkpoint, which = checkpoints / str(last_step), "the last step"
    if cfg.train.keep_best and (checkpoints / str(best_step)).is_dir():
        checkpoint, which = checkpoints / str(best_step), "the best held-out value"
    merged = checkpoint / "merged"
    folder = merged if merged.is_dir() else checkpoint / "model"
    try:
        # This fails for a missing folder before a repository is made, which would stay empty.
        folder.stat()
        url = HfApi().create_repo(cfg.hub.push, private=cfg.hub.private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=cfg.hub.push,
            folder_path=folder,
            commit_message=f"Upload the model of step {checkpoint.name}",
            # Weights of another model in the repository would be loaded in place of these, or on top of them.
            delete_patterns=_WEIGHTS,
        )
    except Exception as error:  # noqa: BLE001  their types depend on the library's HTTP client
        private = ["--private"] if cfg.hub.private else []
        command = shlex.join(["hf", "upload", cfg.hub.push, str(folder.resolve()), ".", *private])
        screen.say(
            f"warning: hub.push={cfg.hub.push}: the model could not be uploaded ({first_line(error)}); this "
            f"command uploads it: {command}"
        )
        return
    sys.stdout.write(f"Uploaded {folder}, the model of {which}, to {url}\n")
