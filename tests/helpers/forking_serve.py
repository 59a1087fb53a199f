"""``grpo-serve``, whose server is :mod:`forking_server`: its engine need not import vLLM again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_PROGRAM = Path(__file__).with_name("forking_server.py")


def forking_words(words: Sequence[str]) -> list[str]:
    """The command of a server, with the program that forks."""
    python, safe_path, module, _, *arguments = words
    assert (safe_path, module) == ("-P", "-m"), words
    return [python, str(_PROGRAM), *arguments]


if __name__ == "__main__":
    from torchrl_grpo.cli import serve

    honest = os.execve

    def execve(path: str, words: Sequence[str], environment: dict[str, str]) -> NoReturn:
        honest(path, forking_words(words), environment)

    os.execve = execve  # type: ignore[assignment]
    serve.main()
