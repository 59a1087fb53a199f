"""Parse a composed configuration into a validated :class:`~torchrl_grpo.config.schema.Config`."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config.allocation import with_allocation
from torchrl_grpo.config.checks import validate
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.schema import Config, keys
from torchrl_grpo.errors import ConfigError, first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig


def register_schema() -> None:
    """Let Hydra find the schema, with which every primary configuration begins."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


@functools.cache
def schema_node() -> DictConfig:
    """Return the schema with its defaults, built once, because that takes as long as reading all files.

    Do not write to it, but to a copy.
    """
    from omegaconf import OmegaConf

    node: DictConfig = OmegaConf.structured(Config)
    return node


def parse(node: DictConfig) -> Config:
    """Parse a composed configuration and check it.

    Args:
        node: configuration, without Hydra's own ``hydra`` section. It need not have been composed over
            the schema. Every key is checked, because ``+key=value`` on the command line bypasses the
            schema. Types are checked unless the configuration was composed over the schema, which checks
            them.

    Returns:
        The configuration with every interpolation resolved.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, a value is invalid, or two values
            contradict each other. The message names the key, its value and a fix.
    """
    # Imported here so that callers that read only the keys and the help do not import omegaconf.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "configuration"
        raise ConfigError(f"{key}: {first_line(error)}; write a value for it") from error
    if not isinstance(plain, dict):
        raise ConfigError(
            f"configuration={show(plain)}: it must be a mapping of keys; write lines of key: value"
        )
    values = {str(key): value for key, value in plain.items()}
    _check_keys(values, "", Config)
    try:
        if OmegaConf.get_type(node) is Config:
            # It was composed over the schema, which checked the types.
            config = _built(Config, values)
        else:
            config = OmegaConf.to_object(OmegaConf.merge(schema_node(), values))
    except OmegaConfBaseException as error:
        raise _type_error(error, values) from error
    assert isinstance(config, Config)
    config = with_allocation(config)
    validate(config)
    return config


def _check_keys(values: dict[str, Any], prefix: str, schema: type) -> None:
    defaults = vars(schema())
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in defaults:
            raise keys().unknown(key, f"{key}={show(value)}")
        if dataclasses.is_dataclass(defaults[name]):
            if not isinstance(value, dict):
                raise keys().section_value(key, f"{key}={show(value)}")
            _check_keys(value, f"{key}.", type(defaults[name]))


def _built(schema: type, values: dict[str, Any]) -> Any:
    """Build an object of the schema, with its sections, from values of the right types.

    ``OmegaConf.to_object`` does the same, but reads and resolves the whole node once more.
    """
    defaults = vars(schema())
    return schema(
        **{
            name: _built(type(defaults[name]), value) if dataclasses.is_dataclass(defaults[name]) else value
            for name, value in values.items()
        }
    )


def _type_error(error: Exception, values: dict[str, Any]) -> ConfigError:
    """Build the error for the first value that the schema refuses; omegaconf's error names only the type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    scratch = copy.deepcopy(schema_node())
    for key in keys().leaves:
        value: Any = values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            try:
                OmegaConf.update(scratch, key, value, force_add=True)
            except OmegaConfBaseException:
                return keys().wrong_type(key, f"{key}={show(value)}")
    return ConfigError(f"configuration: {first_line(error)}; write values as --cfg job shows them")
