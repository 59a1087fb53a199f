"""Strict and loose scoring of the instructions of a row.

Strict scoring checks the response as it is. Loose scoring accepts any of eight versions of it, because a
model may add an opening line, a closing line or Markdown emphasis. The versions are the response as it is,
without the first line, without the last line, and without both, each of them with and without ``*``. An empty
response or version follows no instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.rewards.ifeval.checks import CHECKS


def variants(response: str) -> list[str]:
    """Return the versions of ``response`` for loose scoring, starting with the response itself."""
    lines = response.split("\n")
    trimmed = [
        response,
        "\n".join(lines[1:]).strip(),
        "\n".join(lines[:-1]).strip(),
        "\n".join(lines[1:-1]).strip(),
    ]
    versions = [*trimmed, *(version.replace("*", "") for version in trimmed)]
    return [version for version in dict.fromkeys(versions) if version.strip()]


def follow_list(response: str, truth: Mapping[str, Any]) -> tuple[list[bool], list[bool]]:
    """Check whether ``response`` follows each instruction of ``truth``.

    Args:
        response: text that the model wrote.
        truth: validated truth, see :func:`torchrl_grpo.data.ifeval.schema.clean_truth`.

    Returns:
        Strict and loose results, in the order of ``instruction_id_list``. Strict success implies loose
        success.
    """
    strict: list[bool] = []
    loose: list[bool] = []
    versions = variants(response)
    for instruction, kwargs in zip(truth["instruction_id_list"], truth["kwargs"], strict=True):
        check = CHECKS[instruction]
        followed = bool(response.strip()) and check(response, kwargs)
        strict.append(followed)
        loose.append(followed or any(check(version, kwargs) for version in versions))
    return strict, loose
