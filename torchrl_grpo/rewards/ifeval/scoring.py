"""Which of a row's instructions a response follows, strictly and loosely.

Strict: the response as it is. Loose: any of eight versions of it, because a model may wrap what was
asked in an opening line, a closing line or Markdown emphasis: as it is, without its first line,
without its last, without both, and each of the four also with every ``*`` taken out. An empty
response, or an empty version, follows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_grpo.rewards.ifeval.checks import CHECKS


def variants(response: str) -> list[str]:
    """The versions of ``response`` that loose scoring accepts, the response itself first."""
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
    """For each instruction of ``truth``, whether ``response`` follows it.

    Args:
        response: what the model wrote.
        truth: a cleaned truth, see :func:`torchrl_grpo.data.ifeval.schema.clean_truth`.

    Returns:
        Two lists in the order of ``instruction_id_list``: strict, and loose. Loose follows from strict.
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
