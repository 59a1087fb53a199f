"""Values of a row by column, by a dotted path into one, or by a Jinja template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_grpo.data.rows.sources import Row
from torchrl_grpo.errors import ConfigError, DataError


def is_template(field: str) -> bool:
    """Whether a field is a Jinja template."""
    return "{{" in field or "{%" in field


def resolve(row: Row, field: str, key: str) -> Row:
    """Return a row that has ``field`` as a column.

    Args:
        row: the row.
        field: name of a column; a path such as ``answer.text`` or ``answers.0``; or a Jinja template of the
            columns, such as ``{{ title }}: {{ text }}``. A column with exactly this name comes first.
        key: configuration key of the field, for messages.

    Returns:
        The row with the value under the name ``field``; the row itself if it has none.

    Raises:
        ConfigError: the template cannot be read.
        DataError: the template cannot be rendered with this row.
    """
    if field in row.values:
        return row
    if is_template(field):
        return _with(row, field, _render(row, field, key))
    value: Any = row.values
    for part in field.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.lstrip("-").isdigit():
            number = int(part)
            if not -len(value) <= number < len(value):
                return row
            value = value[number]
        else:
            return row
    return _with(row, field, value)


def _with(row: Row, field: str, value: Any) -> Row:
    return Row({**row.values, field: value}, row.number, row.source)


def _render(row: Row, field: str, key: str) -> str:
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        return str(SandboxedEnvironment(undefined=StrictUndefined).from_string(field).render(row.values))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{key}={field!r} is no Jinja template: {error}; correct it") from error
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        present = ", ".join(map(repr, row.values)) or "none"
        raise DataError(
            f"{key}={field!r}: {row.where} cannot fill it: {error}; the row has the columns {present}"
        ) from error
