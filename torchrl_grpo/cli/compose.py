"""Compose configurations from command-line overrides, and report errors that a user can act on.

Hydra composes the configurations. This module checks every override first, because Hydra's own
messages name neither the nearest key nor a fix. It starts no run and creates no folder.
"""

from __future__ import annotations

import copy
import functools
import itertools
import numbers
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from torchrl_grpo.cli.help import primary_configs
from torchrl_grpo.cli.precedence import settle
from torchrl_grpo.config import groups
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.parsing import register_schema, schema_node
from torchrl_grpo.config.schema import keys
from torchrl_grpo.errors import ConfigError, first_line
from torchrl_grpo.runtime.quoting import quote

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

register_schema()


@dataclass(frozen=True)
class Job:
    """One composed job.

    Attributes:
        node: configuration, without Hydra's own section.
        settled: lines for the user on keys that gave way to others (:mod:`~torchrl_grpo.cli.precedence`).
        run_dir: folder that the job would write to.
        sweep_dir: folder that the job's sweep would write to.
    """

    node: DictConfig
    settled: list[str]
    run_dir: Path
    sweep_dir: Path


class Composer:
    """Compose one primary configuration with overrides.

    Args:
        loader: Hydra's loader of the configuration tree.
        config_name: name of the primary configuration.
    """

    def __init__(self, loader: ConfigLoader, config_name: str) -> None:
        self._loader = loader
        self._config_name = config_name
        self._parser = OverridesParser.create(config_loader=loader)
        # Values are written here to see whether their types fit: the sections of the schema with such values.
        self._scratch: dict[str, DictConfig] = {}

    def jobs(self, words: list[str], sweep: bool | None) -> list[list[str]]:
        """Split a command line into the overrides of its jobs and check each override.

        Args:
            words: ``key=value`` arguments.
            sweep: whether several values of a key make several jobs; None for a command without sweeps.

        Returns:
            One list of overrides per job, and a single list without ``sweep``. With a sweeper other than
            Hydra's basic one, values that cannot be listed (such as ``interval``) are left out.

        Raises:
            ConfigError: an argument is not an override, its key or group option is unknown, or its value
                has the wrong type.
        """
        overrides = [self._parse(word) for word in words]
        chosen = {o.key_or_group: o.value() for o in overrides if not o.is_sweep_override()}
        is_searched = (
            chosen.get("hydra/sweeper", "basic") != "basic" or chosen.get("sweep.trials") is not None
        )
        choices: dict[str, list[str]] = {}
        for override in overrides:
            line = str(override.input_line)
            if not override.is_sweep_override():
                choices[override.get_key_element()] = [line]
            elif not sweep:
                raise _several_values(override, has_sweeps=sweep is not None)
            elif override.is_discrete_sweep():
                key = override.get_key_element()
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
                if not choices[key]:
                    raise self._no_choice(override)
            elif not is_searched:
                raise ConfigError(
                    f"{line}: Hydra's basic sweeper takes lists only; write --multirun "
                    f"{override.key_or_group}=VALUE,VALUE instead, or add sweep.trials=20 for a search"
                )
            elif not keys().knows(override.key_or_group):
                raise keys().unknown(override.key_or_group, line)
        for line in dict.fromkeys(itertools.chain.from_iterable(choices.values())):
            self._check(self._parse(line))
        return [list(job) for job in itertools.product(*choices.values())]

    def values(self, words: list[str]) -> dict[str, Any]:
        """Return the values of ``key=value`` arguments by key, for a configuration that was composed before.

        Raises:
            ConfigError: see :meth:`jobs`; or an argument chooses the file of a group.
        """
        for override in map(self._parse, words):
            group = override.key_or_group
            if self._options(group) and not override.is_delete() and not isinstance(override.value(), dict):
                raise ConfigError(
                    f"{override.input_line}: the configuration of a run has its values already, so no file "
                    f"of config/{group} is chosen; write --config-name={self._config_name} beside it to "
                    "compose another one"
                )
        (lines,) = self.jobs(words, sweep=None)
        return {override.key_or_group: override.value() for override in map(self._parse, lines)}

    def compose(self, overrides: list[str], number: int = 0) -> Job:
        """Compose the configuration of one job.

        Hydra's own section stays in ``HydraConfig``, so that interpolations such as
        ``${hydra:job.num}`` resolve until the next job is composed.

        Args:
            overrides: overrides of one job, from :meth:`jobs`.
            number: number of the job in its sweep.

        Returns:
            The job.

        Raises:
            ConfigError: Hydra cannot compose the configuration.
        """
        try:
            cfg = compose(self._config_name, overrides, return_hydra_config=True)
            run_dir, sweep_dir = Path(str(cfg.hydra.run.dir)), Path(str(cfg.hydra.sweep.dir))
            with read_write(cfg.hydra), open_dict(cfg.hydra):
                cfg.hydra.job.num = number
                cfg.hydra.job.id = str(number)
                cfg.hydra.runtime.output_dir = str(run_dir.absolute())
            HydraConfig.instance().set_config(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            settled = settle(cfg, self._loader, self._config_name, overrides)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise _composition_error(error) from error
        return Job(cfg, settled, run_dir, sweep_dir)

    def _parse(self, word: str) -> Override:
        try:
            override = self._parser.parse_override(word)
            # glob(*) asks the loader for the options of a group, and parse_override() does not set it.
            override.config_loader = self._loader
            return override
        except HydraException as error:
            if "=" not in word:
                known = word in keys().leaves or keys().free_form_parent(word) is not None
                match = word if known else keys().nearest(word)
                fix = f"{match}=VALUE" if match else "key=value"
                raise ConfigError(f"{word}: it is no key=value pair; write {fix} instead") from error
            key, value = word.split("=", 1)
            if (free := key.lstrip("+")) in keys().free_form:
                # An entry without a value, or a bracket that is not closed.
                own = keys().fitting(free, f"[{value.strip('{}')}]") or keys().example(free)
                raise ConfigError(
                    f"{free}={value}: it cannot be read ({first_line(error)}); write {free}={own} instead"
                ) from error
            # As a shell reads it between double quotes.
            quoted = re.sub(r'(["\\$`])', r"\\\1", f"{key}={quote(value)}")
            raise ConfigError(
                f'{word}: it cannot be read ({first_line(error)}); write "{quoted}" '
                "with the quotes instead, or close every bracket and quote"
            ) from error

    def _no_choice(self, override: Override) -> ConfigError:
        """Build the error for a glob that matches nothing."""
        key, line = override.key_or_group, str(override.input_line)
        options = self._loader.get_group_options(key)
        if options:
            return ConfigError(
                f"{line}: it matches none of {', '.join(options)}; write {key}=glob(*) instead"
            )
        fix = f"--multirun {key}=VALUE,VALUE" if keys().knows(key) else "a group that --help lists"
        return ConfigError(f"{line}: glob chooses among the files of a group; write {fix} instead")

    def _check(self, override: Override) -> None:
        key, line = override.key_or_group, str(override.input_line)
        if keys().free_form_parent(key) is not None:
            # The user need not have written what open_free_form() adds.
            line = line.lstrip("+")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return
        value = None if override.value_type is None else override.value()
        if override.is_delete():
            own = f"{key}=0" if key.startswith("reward.weights.") else f"{key}= and another value"
            fix = f"{key}={keys().example(key)}" if key in keys().leaves else own
            raise ConfigError(f"{line}: a key cannot be taken away; write {fix}, for example")
        plain = line.lstrip("+")
        options = self._options(key)
        if options and not isinstance(value, dict):
            self._check_option(override, value, options)
            return
        if not keys().knows(key):
            raise keys().unknown(key, line)
        free = keys().free_form_parent(key)
        if override.is_add() and free is None:
            raise ConfigError(
                f"{line}: the key is there already, and + only adds new ones; write {plain} instead"
            )
        if key in keys().sections:
            if not isinstance(value, dict):
                raise keys().section_value(key, line)
            return
        section, schema = key.partition(".")[0], schema_node()
        if section not in self._scratch:
            # A masked copy has the types of a section, but not of a single value. Copying all takes longer.
            is_section = section in keys().sections
            copied = OmegaConf.masked_copy(schema, section) if is_section else copy.deepcopy(schema)
            self._scratch[section] = copied
        try:
            OmegaConf.update(self._scratch[section], key, value, force_add=free is not None)
        except OmegaConfBaseException as error:
            raise keys().wrong_type(key, line) from error
        if key in keys().registered and str(value) not in keys().registered[key]:
            raise keys().wrong_type(key, line)

    def _check_option(self, override: Override, value: object, options: list[str]) -> None:
        group, line = override.key_or_group, str(override.input_line)
        sign = "" if group in self._chosen_groups else "+"
        for name in value if isinstance(value, list) else [value]:
            if name not in options:
                fix = groups.choice(group, str(name), options, sign)
                raise ConfigError(f"{line}: config/{group} has no such file; write {fix} instead")
        plain = line.lstrip("+")
        if override.is_add() and not sign:
            raise ConfigError(f"{line}: {group} is chosen already; write {plain} instead")
        if sign and not override.is_add():
            raise ConfigError(f"{line}: no {group} is chosen so far, and + adds one; write +{plain} instead")

    def _options(self, key: str) -> list[str]:
        """Return the files of a group; empty if the key is none."""
        return self._loader.get_group_options(key) if "." not in key else []

    @functools.cached_property
    def _chosen_groups(self) -> set[str]:
        """The groups of which the primary configuration chooses a file."""
        parts = self._loader.compute_defaults_list(self._config_name, [], RunMode.RUN).defaults
        return {str(part.config_path).rpartition("/")[0] for part in parts}


def _several_values(override: Override, has_sweeps: bool) -> ConfigError:
    """Build the error for several values without --multirun; the fix is a list, a sweep, or one value."""
    key, line = override.key_or_group, str(override.input_line)
    if key in keys().free_form and (own := keys().fitting(key, line.split("=", 1)[1])) is not None:
        plain = line.lstrip("+")
        return ConfigError(f"{plain}: a mapping stands in curly brackets; write {key}={own} instead")
    if keys().is_list(key):
        value = line.split("=", 1)[1]
        return ConfigError(f"{line}: a list stands in square brackets; write {key}=[{value}] instead")
    if not has_sweeps:
        return ConfigError(
            f"{line}: several values make a sweep, which this command does not have; write a single value of "
            f"{key} instead"
        )
    return ConfigError(f"{line}: several values make a sweep; write --multirun {line} instead")


def open_free_form(word: str) -> str:
    """Prefix an override of a free-form mapping with ``++``, which Hydra needs to add a key.

    Args:
        word: override, e.g. ``reward.weights.format=0.2``.

    Returns:
        The override, with ``++`` in front if it sets a key of a free-form mapping.
    """
    key = word.split("=", 1)[0]
    return f"++{word}" if "=" in word and keys().free_form_parent(key) is not None else word


def write_override(key: str, value: object) -> str:
    """Write a key and its value as an override.

    Args:
        key: dotted key, or name of a group.
        value: number, text, bool, None, list or mapping.

    Returns:
        The override, see :func:`open_free_form`.
    """
    return open_free_form(f"{key}={show(value, _quoted)}")


def _quoted(value: object) -> str:
    # Numbers of NumPy print with the name of their type.
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return quote(str(value))


@contextmanager
def composer(config_dir: Path, config_name: str, extra_dir: Path | None = None) -> Iterator[Composer]:
    """Open a configuration tree.

    Args:
        config_dir: folder of the tree.
        config_name: name of the primary configuration.
        extra_dir: folder with more configurations, or None.

    Yields:
        The composer.

    Raises:
        ConfigError: there is no such configuration.
    """
    folders = [folder for folder in (config_dir, extra_dir) if folder is not None]
    if not any((folder / f"{config_name}.yaml").is_file() for folder in folders):
        known = ", ".join(name for folder in folders for name in primary_configs(folder))
        raise ConfigError(
            f"--config-name={config_name}: {config_dir} has no such configuration; "
            f"write one of {known} instead"
        )
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        if extra_dir is not None:
            # Hydra does the same for --config-dir. The repository has already read the search path, so it
            # must be initialized again.
            path = loader.get_search_path()
            path.prepend("command-line", f"file://{extra_dir}", SearchPathQuery(provider="schema"))
            assert isinstance(loader, ConfigLoaderImpl)
            loader.repository.initialize_sources(path)
        yield Composer(loader, config_name)


def _composition_error(error: Exception) -> ConfigError:
    """Reduce an error of Hydra or YAML to one line, with the key if the error names one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(
            f"{mark.name}: cannot be read, {error.problem} in line {mark.line + 1}; "
            "write YAML with closed brackets and even indentation instead"
        )
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    # The line "In 'FILE': ... raised while composing config:" precedes the line with the cause.
    file = re.match(r"In '(.*)': \w+ raised while composing", lines[0])
    text = lines[1] if file and len(lines) > 1 else lines[0]
    where = f" (in {file[1]}.yaml)" if file else ""
    full_key = re.search(r"^\s*full_key: (\S+)$", str(cause), re.MULTILINE)
    key = full_key[1] if full_key else ""
    if key and not keys().knows(key) and key.split(".")[0] != "hydra":
        return keys().unknown(key, f"{key}{where}")
    if key in keys().leaves:
        good = f"for example {key}={keys().example(key)}, {keys().describe(key)},"
        return ConfigError(f"{key}: {text}{where}; write {good} instead")
    return ConfigError(f"configuration: {text}{where}; write keys that --help and --cfg job show instead")
