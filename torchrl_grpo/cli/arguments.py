"""Options of the command line: Hydra's own, read without Hydra."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from torchrl_grpo.config import elsewhere
from torchrl_grpo.config.parsing import keys
from torchrl_grpo.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Parser that raises :class:`ConfigError`."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        advice = _as_key(unknown[1], None) if unknown else None
        raise ConfigError(f"command line: {message}; {advice or 'write only options that --help lists'}")


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the options of a training command, and its overrides as ``overrides``.

    Raises:
        ConfigError: the words are not a command line. An unknown option may be a key, or that of another
            system.
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
    known, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        raise _unknown_option(unknown[0], words)
    return known


def _unknown_option(option: str, words: list[str]) -> ConfigError:
    """Build the error for an option that a training command does not have."""
    name, equals, value = option.partition("=")
    given = value if equals else None
    following = words[words.index(option) + 1 :][:1]
    if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
        (given,) = following
        option = f"{option} {given}"
    advice = _as_key(name, given) or "write only options that --help lists"
    return ConfigError(f"command line: unrecognized arguments: {option}; {advice}")


def _as_key(option: str, value: str | None) -> str | None:
    """Return what to write in place of an option that is a key, or a name that a key has elsewhere."""
    name, _, after = option.lstrip("-").partition("=")
    key, book = name.replace("-", "_"), keys()
    value = after or value
    if key in book.leaves or book.free_form_parent(key) is not None:
        advice = f"write {key}={value or 'VALUE'} instead"
    elif book.nearest(key) is None and elsewhere.find(key) is None:
        return None
    else:
        advice = book.advice(key, value)
    return f"{advice}. Keys are written as key=value, without dashes, and --help lists the options"
