"""The words with which a command was started, for the advice to start it again."""

from __future__ import annotations

import sys

import pytest

from torchrl_grpo.runtime import invocation


@pytest.mark.parametrize(
    ("called", "started_by", "environment", "words"),
    [
        ("grpo.py", "python -X utf8 grpo.py seed=1", {}, "python -X utf8 grpo.py"),
        ("/opt/bin/grpo", "/opt/bin/python /opt/bin/grpo seed=1", {}, "/opt/bin/grpo"),
        # The launcher is not this process but its parent.
        ("grpo.py", "python -u grpo.py", {"WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 grpo.py"),
        # The command has started this rank itself.
        ("grpo.py", "python grpo.py", {"WORLD_SIZE": "2", "TORCHRL_GRPO_LAUNCHER": "1"}, "python grpo.py"),
        # Another command looks at the run.
        ("other.py", "python other.py", {}, "grpo.py"),
    ],
)
def test_a_command_is_started_again_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch,
    called: str,
    started_by: str,
    environment: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "seed=1"])
    monkeypatch.setattr(sys, "orig_argv", started_by.split())
    monkeypatch.setattr(invocation, "parent_argv", "torchrun --nproc-per-node 2 grpo.py seed=1".split)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert invocation.program("grpo") == words.split()
