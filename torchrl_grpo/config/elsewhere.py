"""What keys, options and arguments of other systems are called here, for messages about unknown names.

The tables of ``docs/coming_from.md`` are the only source, and are read when a message needs them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_grpo.runtime.config_dir import coming_from

# The section whose second column has arguments of GRPOTrainer. That of the others has keys.
ARGUMENTS = "Arguments of GRPOTrainer"
# How the last column begins if a value can be taken over as it is. With the second there is more to say.
_ALIKE = ("The same", "Our default")
_SAME_UNIT = ("Needs", "Optimizer steps")
# Value as other systems write it, with the key here or the name there -> the value here.
_WRITTEN = {
    "env.overlong_prompts=true": "drop",
    "env.overlong_prompts=false": "error",
    "env.overlong_prompts=left": "truncate_left",
    "env.overlong_prompts=right": "truncate_right",
    "env.overlong_prompts=middle": "truncate_middle",
    "inference_model.backend=true": "vllm",
    "inference_model.backend=false": "transformers",
    "inference_model.backend=colocate": "vllm",
    "inference_model.backend=server": "vllm_server",
    "logging.backends=wandb": "[wandb]",
    "logging.backends=tensorboard": "[tensorboard]",
    "logging.backends=none": "[]",
    "bf16=true": "bf16",
    "fp16=true": "fp16",
    "train_model.autocast=bfloat16": "bf16",
    "train_model.autocast=float16": "fp16",
}


@dataclass(frozen=True)
class Counterpart:
    """A row of a table.

    Attributes:
        section: name of the table's section, usually that of the other system.
        theirs: names there.
        ours: keys here, or arguments in :data:`ARGUMENTS`; empty if nothing corresponds to the names.
        differs: what differs, as plain text without a full stop.
    """

    section: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    differs: str

    def advice(self, name: str, value: str | None, choices: Sequence[str] = ()) -> str:
        """Return what to write, and what differs.

        Args:
            name: the name there.
            value: value that the user gave to it; None for none.
            choices: values of the key here, if they are a fixed set of names.
        """
        if not self.ours:
            return f"write nothing in its place: {self.differs}"
        if value is not None and len(self.ours) == 1:
            (key,) = self.ours
            own = _WRITTEN.get(f"{name}={value.lower()}", written(key, value))
            if own != value or own in choices or self.differs.startswith(_ALIKE):
                return f"write {key}={own} instead"
            if self.differs.startswith(_SAME_UNIT):
                return f"write {key}={own} instead. {self.differs}"
        said = "" if self.differs == "The same" else f". {self.differs}"
        *first, last = self.ours
        return f"write {', '.join(first)}{' or ' if first else ''}{last} instead{said}"


def written(key: str, value: str) -> str:
    """Return a value of another system as ``key`` has it here; the value itself if there is no difference."""
    return _WRITTEN.get(f"{key}={value.lower()}", value)


def find(name: str) -> Counterpart | None:
    """Return the row of a whole name, such as ``actor.path``; the first one if several systems have it."""
    return _whole().get(_plain(name))


def find_part(name: str) -> Counterpart | None:
    """Return the row of a name that ends like ``name``, or as the end of ``name`` does.

    None if there is none, or if rows with this end have different counterparts.
    """
    parts = _plain(name).split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if start and end in _whole():
            return _whole()[end]
        rows = [row for whole, row in _whole().items() if whole.endswith(f".{end}")]
        if rows:
            return rows[0] if len({row.ours for row in rows}) == 1 else None
    return None


def find_argument(name: str) -> Counterpart | None:
    """Return the row of an argument of another system's trainer in Python."""
    rows = [row for row in tables() if row.section == ARGUMENTS]
    return next((row for row in rows if name in row.theirs), None)


@functools.cache
def tables() -> Sequence[Counterpart]:
    """Return the rows of all tables, in the order of the page."""
    found, section = [], ""
    for line in coming_from().read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            theirs, ours, differs = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            names = tuple(_plain(name.replace(": ", ".")) for name in _codes(theirs))
            found.append(Counterpart(section, names, tuple(_codes(ours)), _text(differs)))
    return found


@functools.cache
def _whole() -> dict[str, Counterpart]:
    rows: dict[str, Counterpart] = {}
    for row in tables():
        if row.section != ARGUMENTS:
            for name in row.theirs:
                rows.setdefault(name, row)
    return rows


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _text(cell: str) -> str:
    """Return a cell without the marks of Markdown. Links become the paths of pages."""
    cell = re.sub(r"\[[^\]]*\]\(([^)#]+)[^)]*\)", r"docs/\1", cell)
    return cell.replace("`", "").replace("\\|", "|").removesuffix(".")
