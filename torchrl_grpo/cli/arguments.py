"""Options of the command line: Hydra's own, read without Hydra."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from torchrl_grpo.config import elsewhere, groups
from torchrl_grpo.config.schema import keys
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.runtime.package_versions import VERSION


class Parser(argparse.ArgumentParser):
    """Parser that raises :class:`ConfigError`. Options cannot be abbreviated."""

    def __init__(
        self,
        prog: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        *,
        add_help: bool = True,
    ) -> None:
        super().__init__(
            prog=prog, description=description, epilog=epilog, add_help=add_help, allow_abbrev=False
        )
        # A training command shows more than the version, and has help of its own.
        if add_help:
            self.add_argument("--version", action="version", version=f"torchrl-grpo {VERSION}")

    def error(self, message: str) -> NoReturn:
        # For what is missing, argparse names the keys too, which may be left out.
        message = message.replace(", KEY=VALUE", "")
        if not message.startswith("unrecognized"):
            raise ConfigError(f"command line: {message}; write what --help shows")
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)(?:[= ]((?!-)[^\s=]+)(?=\s|$))?", message)
        advice = self.advice(unknown[1], unknown[2]) if unknown else None
        raise ConfigError(f"command line: {message}; {advice or 'write only options that --help lists'}")

    def advice(self, option: str, value: str | None) -> str | None:
        """Return what to write in place of an option that the command does not have, if that can be told.

        Args:
            option: the option, with its dashes.
            value: value that the user gave to it; None for none, which is how a flag is switched on.
        """
        own = {_squashed(name): name for name in self._option_string_actions if name.startswith("--")}
        name = own.get(_squashed(option))
        as_key = _as_key(option.lstrip("-").replace("-", "_"), value)
        if name is None and as_key is None:
            close = difflib.get_close_matches(_squashed(option), own, n=1, cutoff=0.85)
            name = own[close[0]] if close else None
        if name is not None:
            return f"write {name}{'' if value is None else f' {value}'} instead"
        if as_key is None:
            return None
        return f"{as_key}. Keys are written as key=value, without dashes, and --help lists the options"


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the options of a training command, and its overrides as ``overrides``.

    Raises:
        ConfigError: the words are not a command line. An unknown option may be a key, or that of another
            system.
    """
    parser = Parser(add_help=False)
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
        raise _unknown_option(parser, unknown[0], words)
    return known


def _unknown_option(parser: Parser, option: str, words: list[str]) -> ConfigError:
    """Build the error for an option that a training command does not have."""
    name, equals, value = option.partition("=")
    argument = value if equals else None
    following = words[words.index(option) + 1 :][:1]
    if not equals and following and re.match(r"[^-]|-[.\d]", following[0]) and "=" not in following[0]:
        (argument,) = following
        option = f"{option} {argument}"
    advice = parser.advice(name, argument) or "write only options that --help lists"
    return ConfigError(f"command line: unrecognized arguments: {option}; {advice}")


def _squashed(option: str) -> str:
    return option.replace("-", "").replace("_", "").lower()


def _as_key(name: str, value: str | None) -> str | None:
    """Return what to write in place of an option that is a key, or a name that a key has elsewhere."""
    book = keys()
    switched_off = value is None and name.startswith("no_") and _is_known(name.removeprefix("no_"))
    key = name.removeprefix("no_") if switched_off else name
    # A flag without a value is one that is switched on.
    explicit_value = ("false" if switched_off else "true") if value is None else value
    if key in groups.groups():
        return f"write {groups.choice(key, '' if value is None else value)} instead"
    if key in book.sections and elsewhere.find(key) is None:
        return book.into_section(key, value)
    if key in book.leaves or book.free_form_parent(key) is not None:
        return book.as_own(key, explicit_value)
    return book.advice(key, explicit_value) if _is_known(key) or groups.of_option(value) is not None else None


def _is_known(key: str) -> bool:
    """Return whether a name is that of a key, here or elsewhere, or like one."""
    book = keys()
    return book.knows(key) or elsewhere.find(key) is not None or book.nearest(key) is not None
