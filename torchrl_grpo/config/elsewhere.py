"""What keys, options and arguments of other systems are called here, for messages about unknown names.

``other_systems.tsv`` is the only source, and is read when a message needs it. The documentation's site shows
it as the tables of ``docs/coming_from.md``. Each line is a :class:`Row`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchrl_grpo.config.keys import KeyBook

# The section whose third column has arguments of GRPOTrainer. That of the others has keys.
ARGUMENTS = "Arguments of GRPOTrainer"
# Value as other systems write it, with the key here or the name there -> the value here.
_WRITTEN = {
    "env.overlong_prompts=false": "error",
    "env.overlong_prompts=left": "truncate_left",
    "env.overlong_prompts=right": "truncate_right",
    "env.overlong_prompts=middle": "truncate_middle",
    "inference_model.backend=true": "vllm",
    "inference_model.backend=false": "transformers",
    "resume=true": "auto",
    "use_lora=true": "16",
    "use_lora=false": "0",
    "use_peft=true": "16",
    "use_peft=false": "0",
    "logging.backends=wandb": "[wandb]",
    "logging.backends=tensorboard": "[tensorboard]",
    "logging.backends=none": "[]",
    "use_wandb=true": "[wandb]",
    "wandb=true": "[wandb]",
    "use_tensorboard=true": "[tensorboard]",
    "bf16=true": "bf16",
    "fp16=true": "fp16",
    "train_model.autocast=bfloat16": "bf16",
    "train_model.autocast=float16": "fp16",
}


class Row(NamedTuple):
    """A line of the file, as it stands there.

    Attributes:
        section: name of the section, usually that of the other system.
        theirs: names there, separated by commas; ``env: dataset`` is a key written as in YAML.
        ours: keys here, separated by commas; arguments in :data:`ARGUMENTS`. "-" if nothing corresponds.
        value: ``same`` if a value can be taken over as it is, and nothing more needs to be said. ``unit`` if
            a number there counts something else. Empty otherwise.
        differs: what differs, in Markdown. ```group` is `batch``` gives the name here of a value there. A
            first word that is a value here is what the switch ``true`` of the other system means.
    """

    section: str
    theirs: str
    ours: str
    value: str
    differs: str


@dataclass(frozen=True)
class Counterpart:
    """A row with its parts.

    Attributes:
        section: name of the section, usually that of the other system.
        theirs: names there.
        ours: keys here, or arguments in :data:`ARGUMENTS`; empty if nothing corresponds to the names.
        value: as in :class:`Row`.
        differs: what differs, as plain text without a full stop.
        words: values there, in lower case, and what they are called here.
    """

    section: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    value: str
    differs: str
    words: Mapping[str, str]

    def advice(self, name: str, value: str | None, values: KeyBook | None = None) -> str:
        """Return what to write, and what differs.

        Args:
            name: the name there.
            value: value that the user gave to it; None for none.
            values: what the keys here take, if a value is given.
        """
        if not self.ours:
            return self._without_key(value)
        differs = re.sub(r"^The same\b", "It means the same", self.differs)
        note = "" if self.differs == "The same" else f". {differs}"
        (key, *others) = self.ours
        if value is not None and values is not None and not others and "=" not in key:
            word = self._translated(name, key, value, values.choices(key))
            if "=" in word:
                return f"write {word} instead"
            own = values.fitting(key, word)
            if own is None:
                sentence, _, rest = self.differs.partition(". ")
                # A list of the values is in the message already.
                is_list = sentence.split()[0].rstrip(",") in values.choices(key)
                more = (f". {rest}" if rest else "") if is_list else note
                return f"write {key}=VALUE instead, where VALUE is {values.describe(key)}{more}"
            if word != value or own in values.choices(key) or self.value == "same":
                return f"write {key}={own} instead"
            if values.is_number(key) and self.value != "unit":
                return f"write {key}={own} instead{note}"
        *first, last = self.ours
        return f"write {', '.join(first)}{' or ' if first else ''}{last} instead{note}"

    def _translated(self, name: str, key: str, value: str, choices: Sequence[str]) -> str:
        """Return what a value there is called here; the value itself if it has no other name."""
        plain = value.lower()
        for word in (f"{name.rpartition('.')[2]}={plain}", f"{key}={plain}"):
            if word in _WRITTEN:
                return _WRITTEN[word]
        if plain == "true" and (first := self.differs.split(maxsplit=1)[0].rstrip(".,;")) in choices:
            # A switch there, and a choice here.
            return first
        return self.words.get(plain, value)

    def _without_key(self, value: str | None) -> str:
        """Return what the row says to do where no key corresponds to a name."""
        if self.differs.startswith("Write "):
            instead = self.differs.removeprefix("Write ")
            if value not in (None, "true", "false"):
                instead = instead.replace("=FOLDER", f"={value}")
            return f"write {instead}"
        why = self.differs.removeprefix("Not needed: ")
        return f"write nothing in its place. {why[0].upper()}{why[1:]}"


def translate_value(key: str, value: str) -> str:
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
    rows = [row for row in counterparts() if row.section == ARGUMENTS]
    return next((row for row in rows if name in row.theirs), None)


def rows() -> Sequence[Row]:
    """Return the lines of the file, in its order."""
    lines = Path(__file__).with_name("other_systems.tsv").read_text(encoding="utf-8").splitlines()
    return [Row(*line.split("\t")) for line in lines[1:]]


@functools.cache
def counterparts() -> Sequence[Counterpart]:
    """Return the rows with their parts, in the order of the file."""
    counterparts = []
    for row in rows():
        names = tuple(_plain(name.replace(": ", ".")) for name in row.theirs.split(", "))
        ours = () if row.ours == "-" else tuple(row.ours.split(", "))
        words = {there.lower(): here for there, here in re.findall(r"`([^`]+)` is `([^`]+)`", row.differs)}
        counterparts.append(Counterpart(row.section, names, ours, row.value, _text(row.differs), words))
    return counterparts


@functools.cache
def _whole() -> dict[str, Counterpart]:
    rows: dict[str, Counterpart] = {}
    for row in counterparts():
        if row.section != ARGUMENTS:
            for name in row.theirs:
                rows.setdefault(name, row)
    return rows


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _text(cell: str) -> str:
    """Return a cell without the marks of Markdown. Links become the paths of pages."""
    cell = re.sub(r"\[[^\]]*\]\(([^)#]+)[^)]*\)", r"docs/\1", cell)
    return cell.replace("`", "").replace("\\|", "|").removesuffix(".")
