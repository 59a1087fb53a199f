"""Write ``config/base.yaml`` and ``config/policy/grpo.yaml``; run as ``python -m torchrl_grpo.config``.

The schema is the one source of every key, its default and its help. These two files show them to users, and
the other files of ``config/`` start from them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from torchrl_grpo.config.schema import Config, PolicyConfig

_WIDTH = 120
_GENERATED = (
    "Generated from torchrl_grpo/config by python -m torchrl_grpo.config: edit the schema, not this file."
)
_BASE = """\
# Every key of a run except those of the policy group (policy/*.yaml), with its meaning.
# The primary configurations (grpo_*.yaml) start from this file and change what differs.
# To change a key on the command line, write key=value, e.g. optimizer.lr=2e-5
"""
_POLICY = """\
# GRPO: group-normalized advantages and a clipped ratio, averaged over the batch's tokens. Every ingredient of
# an objective is a key of this file; the other presets of this folder start from it.
"""


def files() -> dict[str, str]:
    """Return the text of each generated file by its path below ``config/``."""
    base = _section(Config(), 0, leave_out="policy")
    policy = _section(PolicyConfig(), 0)
    return {
        "base.yaml": f"{_BASE}# {_GENERATED}\n\n{base}",
        "policy/grpo.yaml": f"{_POLICY}# {_GENERATED}\n\n{policy}",
    }


def _section(section: Any, indent: int, leave_out: str = "") -> str:
    """Return the keys of a section as YAML, each below its help."""
    blocks, space = [], " " * indent
    for field in dataclasses.fields(section):
        value = vars(section)[field.name]
        if field.name == leave_out:
            continue
        comment = ""
        if help_text := field.metadata.get("help"):
            comment = textwrap.fill(
                help_text, _WIDTH, initial_indent=f"{space}# ", subsequent_indent=f"{space}# "
            )
            comment += "\n"
        if dataclasses.is_dataclass(value):
            blocks.append(f"{comment}{space}{field.name}:\n{_section(value, indent + 2)}")
        else:
            blocks.append(f"{comment}{space}{field.name}: {_scalar(value)}\n")
    # The sections of a whole run are easier to find with lines between them.
    return ("\n" if isinstance(section, Config) else "").join(blocks)


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str):
        # A choice is a string of a type that PyYAML does not know.
        value = str(value)
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{Decimal(repr(value)):e}".split("e")
        # YAML takes 1e-5 for text.
        return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{int(exponent)}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def main() -> None:
    """Write the files into the repository's ``config/``."""
    folder = Path(__file__).resolve().parents[2] / "config"
    try:
        for name, text in files().items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"error: {error.filename} cannot be written ({error.strerror}); run this in a checkout"
        raise SystemExit(message) from None


if __name__ == "__main__":
    main()
