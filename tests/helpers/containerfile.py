"""Reads a container file: its instructions, with variables put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"\$\{(\w+)\}")
# Their variables are the shell's, which gets them from the environment.
_FOR_THE_SHELL = ("RUN", "CMD")


@dataclass(frozen=True)
class Instruction:
    """One instruction, e.g. ``COPY`` and ``scripts/ scripts/``."""

    name: str
    text: str


def read_instructions(file: Path, arguments: Mapping[str, str] | None = None) -> list[Instruction]:
    """Return the instructions of a file.

    Args:
        file: the file.
        arguments: build arguments; those that the file declares and that are not here have its defaults.
    """
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    known: dict[str, str] = {}
    instructions = []
    for line in joined.splitlines():
        name, _, text = " ".join(line.split()).partition(" ")
        if not name:
            continue
        if name not in _FOR_THE_SHELL:
            text = _NAME.sub(lambda match: known[match[1]], text)
        if name == "ARG":
            key, _, default = text.partition("=")
            known[key] = (arguments or {}).get(key, default)
        instructions.append(Instruction(name, text))
    return instructions
