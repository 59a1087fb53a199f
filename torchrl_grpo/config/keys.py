"""The keys of a schema: their names, their types, and the error messages about them.

A :class:`KeyBook` reads a dataclass schema once. The command line and the parser use it to look up a
dotted key, to find the existing key that is nearest to a misspelled one, and to build an error that
names the key, its value and a fix. It depends neither on Hydra nor on the meaning of the values.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from enum import EnumType
from typing import Any, TypeVar

from torchrl_grpo.config import elsewhere, groups
from torchrl_grpo.config.fitting import fitting
from torchrl_grpo.config.values import Range
from torchrl_grpo.errors import ConfigError

_T = TypeVar("_T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "a value"}
_PLURALS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "names", Any: "values"}
_EXAMPLES = {int: "1", float: "0.5", bool: "true", str: "NAME", Any: "VALUE"}
# Lists and mappings can also hold mappings.
_PLURALS[dict[str, Any]] = "mappings"
_EXAMPLES[dict[str, Any]] = "{name:VALUE}"
_EXAMPLES_OF_KEYS = {
    "reward.functions": "{NAME:FILE.py:FUNCTION}",
    "env.fields": "{question:COLUMN,answer:COLUMN}",
}


# How similar two names are at least, from 0 to 1 (difflib), so that one is taken for a misspelling of the
# other. Fewer names to choose from allow less similarity.
_MISSPELLED, _IN_ANY_SECTION, _SIMILAR, _IN_SECTION, _WHOLE_KEY = 0.85, 0.8, 0.75, 0.65, 0.6


def key(default: Any, help: str, only_with: str | None = None, choices: Collection[str] = ()) -> Any:
    """Declare a key of the schema.

    Args:
        default: value if neither a file nor the command line sets one; a list or a mapping is copied.
        help: meaning of the key, for users. ``python -m torchrl_grpo.config`` writes it into the YAML files.
        only_with: setting without which nothing reads the key: ``KEY=VALUE``, or ``KEY`` alone for any value
            but its default. None if the key is always read.
        choices: values of a text, if they are registered elsewhere; otherwise any text is valid.

    Returns:
        The dataclass field.
    """
    metadata = {"help": help, "only_with": only_with, "choices": choices}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def show(value: Any, scalar: Callable[[Any], str] = str) -> str:
    """Format a value as the command line accepts it.

    Args:
        value: configuration value: None, a scalar, a list or a mapping.
        scalar: function that formats a text or a number.

    Returns:
        The text, e.g. ``null``, ``true``, ``[0,1]``, ``{a:1}``.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item, scalar) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item, scalar)}" for key, item in value.items()) + "}"
    return scalar(value)


def bad_value(key: str, value: Any, wrong: str, fix: str) -> ConfigError:
    """Build the error for an invalid value, which is one sentence.

    Args:
        key: dotted key.
        value: value of the key.
        wrong: the mistake as a clause with a subject, e.g. ``"it must be at least 2"``.
        fix: end of the sentence, after "write", e.g. ``"env.repeats=8"``.

    Returns:
        The error, not raised yet.
    """
    return ConfigError(f"{key}={show(value)}: {wrong}; write {fix}")


class KeyBook:
    """The keys of one dataclass schema.

    Args:
        schema: root dataclass type; nested dataclasses are its sections.

    Attributes:
        leaves: map from dotted key to type hint, for every key that holds a value.
        sections: dotted names of the nested dataclasses.
        help: map from dotted key to its help.
        defaults: map from dotted key to its default.
        ranges: map from dotted key to the range of its value, for numbers that have one.
        only_with: map from dotted key to the setting without which nothing reads it, as :func:`key` takes it.
        registered: map from dotted key to the registered names that it takes.
        free_form: keys that hold a mapping whose own keys the user chooses.
    """

    def __init__(self, schema: type) -> None:
        self.leaves: dict[str, Any] = {}
        self.sections: set[str] = set()
        self.help: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        self.ranges: dict[str, Range] = {}
        self.only_with: dict[str, str] = {}
        self.registered: dict[str, Collection[str]] = {}
        self._read(schema, schema(), "")
        self.free_form = {key for key, hint in self.leaves.items() if typing.get_origin(hint) is dict}

    def _read(self, schema: type, defaults: Any, prefix: str) -> None:
        metadata = {field.name: field.metadata for field in dataclasses.fields(schema)}
        annotated = typing.get_type_hints(schema, include_extras=True)
        for name, hint in typing.get_type_hints(schema).items():
            value = vars(defaults)[name]
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                self.sections.add(prefix + name)
                self._read(hint, value, f"{prefix}{name}.")
            else:
                self.leaves[prefix + name] = hint
                self.help[prefix + name] = metadata[name]["help"]
                self.defaults[prefix + name] = value
                if metadata[name]["only_with"] is not None:
                    self.only_with[prefix + name] = metadata[name]["only_with"]
                if choices := metadata[name]["choices"]:
                    self.registered[prefix + name] = choices
                # A number, or a number or null.
                for option in (annotated[name], *typing.get_args(annotated[name])):
                    if typing.get_origin(option) is typing.Annotated:
                        (self.ranges[prefix + name],) = option.__metadata__

    def last_names(self, section: str) -> dict[str, str]:
        """Return the keys of a section by the part of their names behind it."""
        return {known.rpartition(".")[2]: known for known in self.leaves if known.startswith(f"{section}.")}

    def free_form_parent(self, key: str) -> str | None:
        """Return the free-form key that equals ``key`` or contains it, or None."""
        return next((free for free in self.free_form if key == free or key.startswith(free + ".")), None)

    def knows(self, key: str) -> bool:
        """Return whether ``key`` is a key, a section, or a part of a free-form key."""
        return key in self.leaves or key in self.sections or self.free_form_parent(key) is not None

    def is_list(self, key: str) -> bool:
        """Return whether ``key`` holds a list, or a list or null."""
        hint = self.leaves.get(key)
        return any(typing.get_origin(option) is list for option in (hint, *typing.get_args(hint)))

    def is_number(self, key: str) -> bool:
        """Return whether ``key`` holds nothing but numbers, true, false and null."""
        hint = self.leaves.get(key)
        options = () if typing.get_origin(hint) is list else typing.get_args(hint)
        return set(options or (hint,)) <= {int, float, bool, type(None)}

    def choices(self, key: str) -> list[str]:
        """Return the values of ``key`` if they are a fixed set of names, or else an empty list."""
        hint = self.leaves.get(key)
        return list(hint.__members__ if isinstance(hint, EnumType) else self.registered.get(key, ()))

    def nearest(self, key: str) -> str | None:
        """Return the existing key that ``key``, a misspelling or another system's name, most likely means.

        None if there is none.
        """
        row = self._elsewhere(key)
        return self._misspelled(key) if row is None else next(iter(row.ours), None)

    def _elsewhere(self, key: str) -> elsewhere.Counterpart | None:
        """Return what ``key``, a name of another system, is here; None if it is rather a misspelling."""
        if (row := elsewhere.find(key)) is not None:
            return row
        section, _, last = key.rpartition(".")
        row = elsewhere.find_part(key)
        # Inside of a section here, a close misspelling takes precedence, and this over a weak similarity.
        own = self.last_names(section) if section else ()
        return None if difflib.get_close_matches(last, own, n=1, cutoff=_MISSPELLED) else row

    def _misspelled(self, key: str) -> str | None:
        """Return the key or section whose name is nearest to ``key``, or None."""
        section, _, last = key.rpartition(".")
        if not section and (close := difflib.get_close_matches(key, self.sections, n=1, cutoff=_SIMILAR)):
            return close[0]
        if section in self.sections:
            # Compare without the section, because a common prefix makes any two keys look similar.
            own = self.last_names(section)
            if close := difflib.get_close_matches(last, own, n=1, cutoff=_IN_SECTION):
                return own[close[0]]
        same_name = [known for known in self.leaves if known.rsplit(".", 1)[-1] == last]
        candidates = same_name or ([] if section in self.sections else list(self.leaves))
        # A key of the same name in another section is meant, however the sections differ.
        close = difflib.get_close_matches(key, candidates, n=3, cutoff=0.0 if same_name else _WHOLE_KEY)
        # Names that have only their section in common mean different things.
        for known in close:
            if difflib.get_close_matches(last, [known.rpartition(".")[2]], cutoff=_IN_SECTION):
                return known
        names = {known.rsplit(".", 1)[-1]: known for known in self.leaves}
        close = difflib.get_close_matches(last, names, n=1, cutoff=_IN_ANY_SECTION)
        return names[close[0]] if close else None

    def describe(self, key: str) -> str:
        """Return the type of ``key`` in words, e.g. ``"a whole number or null"``."""
        hint, optional = _without_null(self.leaves[key])
        if choices := self.choices(key):
            return f"one of {', '.join(choices)}"
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is list:
            words = f"a list of {_PLURALS[arguments[0]]} in square brackets"
        elif origin is dict:
            words = f"a mapping of names to {_PLURALS[arguments[1]]} in curly brackets"
        else:
            # A key such as num_devices takes an integer or a word.
            words = " or ".join(_WORDS[option] for option in arguments or (hint,))
        return words + (" or null" if optional else "")

    def example(self, key: str) -> str:
        """Return an example value of ``key``, as the command line accepts it."""
        if key in _EXAMPLES_OF_KEYS:
            return _EXAMPLES_OF_KEYS[key]
        default = self.defaults[key]
        if default not in (None, "", [], {}):
            return show(default)
        hint, _ = _without_null(self.leaves[key])
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is list:
            return "[0]" if arguments[0] is int else f"[{_EXAMPLES[arguments[0]]}]"
        if origin is dict:
            return "{name:" + _EXAMPLES[arguments[1]] + "}"
        return _EXAMPLES[hint]

    def unknown(self, key: str, shown: str) -> ConfigError:
        """Build the error for a key that does not exist.

        Args:
            key: dotted key.
            shown: key and value as the user wrote them, e.g. ``"policy.kl_coeff=0.1"``.

        Returns:
            The error, not raised yet.
        """
        value = shown.split("=", 1)[1] if "=" in shown else None
        return ConfigError(f"{shown}: there is no key {key}; {self.advice(key, value)}")

    def advice(self, key: str, value: str | None) -> str:
        """Return what to write in place of a key that does not exist.

        Args:
            key: dotted key.
            value: value that the user gave; None for none.
        """
        section, _, last = key.partition(".")
        is_misspelled = difflib.get_close_matches(last, self.last_names(section), n=1, cutoff=_SIMILAR)
        if last and not is_misspelled and value in groups.groups().get(section, ()):
            assert value is not None
            return f"write {groups.choice(section, value)} instead"
        if (row := self._elsewhere(key)) is not None:
            # Several keys stand for a data set, and its name may be that of a preset: env=gsm8k.
            section = row.ours[0].partition(".")[0] if len(row.ours) > 1 else ""
            if value is not None and section == "env" and value in groups.groups()[section]:
                return f"write {groups.choice(section, value)} instead"
            return row.advice(key, value, self)
        match = self._misspelled(key)
        if match in self.sections and (value is None or not value.startswith("{")):
            return self.into_section(match, value)
        if match is None and value is not None and (group := groups.of_option(value)) is not None:
            return f"write {groups.choice(group, value)} instead"
        if match is None:
            return "write one of the keys that --cfg job lists instead"
        alike = [known for known in self.leaves if known.rpartition(".")[2] == key] or [match]
        taken = [self._taken(known, value) for known in alike]
        if None in taken:
            return f"write {alike[0]}=VALUE instead, where VALUE is {self.describe(alike[0])}"
        *first, final = [f"{known}={word}" for known, word in zip(alike, taken, strict=True)]
        return f"write {', '.join(first)}{' or ' if first else ''}{final} instead"

    def as_own(self, key: str, value: str) -> str:
        """Return what to write for an existing key whose value is written as elsewhere, or missing."""
        own = self._taken(key, value)
        where = "" if own is not None else f", where VALUE is {self.describe(key)}"
        return f"write {key}={own or 'VALUE'} instead{where}"

    def _taken(self, key: str, value: str | None) -> str | None:
        if value is None or key in self.sections:
            return value or "..."
        return self.fitting(key, elsewhere.translate_value(key, value))

    def into_section(self, section: str, value: str | None) -> str:
        """Return what to write in place of a section with a plain value."""
        if value is not None and value in groups.groups().get(section, ()):
            return f"write {groups.choice(section, value)} instead"
        own = [known for known in self.leaves if known.startswith(section + ".")]
        if (known := next((known for known in own if value in self.choices(known)), None)) is not None:
            return f"write {known}={value} instead"
        name = f"{section}.name" if f"{section}.name" in own else own[0]
        if value is not None and name.endswith(".name") and not self.choices(name):
            return f"write {name}={value} instead, because {section} is a group of keys"
        options = groups.groups().get(section)
        choice = f", or {section}= and one of {', '.join(options)}" if options else ""
        return f"write for example {name}=VALUE instead{choice}, because {section} is a group of keys"

    def fitting(self, key: str, value: str) -> str | None:
        """Return a value from elsewhere as ``key`` takes it; None if it is of another type.

        Args:
            key: dotted key that holds a value, or a key under a free-form key.
            value: value as the user wrote it, see :func:`~torchrl_grpo.config.fitting.fitting`.
        """
        return fitting(self.leaves.get(key, Any), value)

    def wrong_type(self, key: str, shown: str) -> ConfigError:
        """Build the error for a value of the wrong type.

        Args:
            key: dotted key that holds a value, or a key under a free-form key.
            shown: key and value as the user wrote them.

        Returns:
            The error, not raised yet.
        """
        free = self.free_form_parent(key)
        if free is not None and key != free:
            value_type = typing.get_args(self.leaves[free])[1]
            example = f"{key}={_EXAMPLES[value_type]}"
            return ConfigError(f"{shown}: it must be {_WORDS[value_type]}; write {example}, for example")
        example, value = self.example(key), shown.partition("=")[2]
        if key in self.free_form or (self.is_list(key) and self.defaults[key] in (None, [])):
            # Often only the brackets are missing.
            example = self.fitting(key, value) or example
        if choices := self.choices(key):
            close = difflib.get_close_matches(value, choices, n=1)
            example = close[0] if close else example
            if elsewhere.translate_value(key, value) != value:
                example = elsewhere.translate_value(key, value)
        return ConfigError(f"{shown}: it must be {self.describe(key)}; write {key}={example}, for example")

    def section_value(self, section: str, shown: str) -> ConfigError:
        """Build the error for a section that is set to a plain value."""
        return ConfigError(f"{shown}: {self.into_section(section, shown.partition('=')[2])}")


def _without_null(hint: Any) -> tuple[Any, bool]:
    """Return a type without ``None``, and whether it had it."""
    arguments = typing.get_args(hint)
    if type(None) not in arguments:
        return hint, False
    return next(item for item in arguments if item is not type(None)), True


def typed(
    schema: type[_T], values: Mapping[str, Any], prefix: str, base: Mapping[str, Any] | None = None
) -> _T:
    """Return an object of the schema with the values of the user.

    Args:
        schema: dataclass.
        values: values of some of its keys. Of a mapping, all entries are replaced.
        prefix: dotted name of the place of the values, for messages.
        base: values of the other keys; None for their defaults.

    Raises:
        ConfigError: a key is unknown, or a value is of another type than the schema's, or out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    book, node = KeyBook(schema), OmegaConf.structured(schema(**(base or {})))
    for name, value in values.items():
        if name not in book.leaves:
            close = difflib.get_close_matches(name, book.leaves, n=1)
            fix = f"{prefix}.{close[0]}" if close else f"one of {', '.join(book.leaves)}"
            raise ConfigError(f"{prefix}.{name}: there is no such key; write {fix} instead")
        try:
            OmegaConf.update(node, name, value, merge=False)
            mistake = None
        except OmegaConfBaseException:
            mistake = f"it must be {book.describe(name)}"
        bounds = book.ranges.get(name)
        if mistake is None and bounds is not None and node[name] is not None:
            mistake = bounds.mistake(node[name])
        if mistake is not None:
            raise bad_value(f"{prefix}.{name}", value, mistake, f"{prefix}.{name}={book.example(name)}")
    built = OmegaConf.to_object(node)
    assert isinstance(built, schema)
    return built
