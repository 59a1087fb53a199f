"""Asks the Hugging Face hub for a model that the user names; a refusal becomes a message for the user."""

from __future__ import annotations

from torchrl_grpo.errors import ModelError, first_line
from torchrl_grpo.models import smollm2
from torchrl_grpo.runtime.hub import LIMIT_S


def check_name(name: str, section: str = "model") -> None:
    """Check that a name may be that of a repository.

    Args:
        name: the name.
        section: section of the configuration that has it, for messages.

    Raises:
        ModelError: it may not.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    shown = f"{section}.name={name}"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(
            f"{shown}: there is no such folder, and a name on the Hugging Face hub is ORG/NAME of "
            "letters, digits and single characters - _ . between them; write such a name, a folder saved by "
            f"save_pretrained, or {smollm2.NAME}"
        ) from error


def has_file(name: str, file: str, section: str = "model") -> bool:
    """Return whether a repository has a file.

    Args:
        name: name of the repository.
        file: name of the file.
        section: section of the configuration that has the name, for messages.

    Raises:
        ModelError: the name is none, or the hub does not have the repository for this user, or does not
            answer.
    """
    check_name(name, section)
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    shown = f"{section}.name={name}"
    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=LIMIT_S)
    except EntryNotFoundError:
        return False
    except GatedRepoError as error:
        raise ModelError(
            f"{shown}: its owner on the Hugging Face hub gives it only to users who have asked; "
            "ask on its page, then run `hf auth login` once, or write HF_TOKEN=TOKEN in front of the command"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{shown}: the Hugging Face hub has no such model, or a private one; correct the name, "
            "or run `hf auth login` once, or write HF_TOKEN=TOKEN in front of the command"
        ) from error
    # The error types depend on the library's HTTP client.
    except Exception as error:
        raise ModelError(
            f"{shown}: the Hugging Face hub gave no answer that can be used ({first_line(error)}); "
            "try again later, or write a folder saved by save_pretrained"
        ) from error
    return True
