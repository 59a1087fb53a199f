"""How a server is started: a command without an address, and environment variables without a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_grpo.inference.vllm_arguments import as_flags


@dataclass(frozen=True)
class Launch:
    """Everything that a server is started with but its address and its key.

    Attributes:
        words: command.
        variables: environment variables that it needs besides the usual ones.
        folder_variables: environment variables with the folder for the server's own sockets and temporary
            files. A run gives them a folder that it deletes.
    """

    words: list[str]
    variables: dict[str, str]
    folder_variables: tuple[str, ...]

    def command(self, where: Mapping[str, Any]) -> list[str]:
        """Return the command of a server that listens at an address: ``host`` and ``port``, or ``uds``."""
        return [*self.words, *as_flags(where)]
