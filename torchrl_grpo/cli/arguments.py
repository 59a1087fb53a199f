"""Options of the command line: Hydra's own, read without Hydra."""

from __future__ import annotations

import argparse
from typing import NoReturn

from torchrl_grpo.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Parser that raises :class:`ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; write only options that --help lists")


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the options of a training command, and its overrides as ``overrides``.

    Raises:
        ConfigError: the words are not a command line.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    return parser.parse_intermixed_args(words)
