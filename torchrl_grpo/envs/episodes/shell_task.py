"""Tasks in a folder: the model works there with the ``shell`` tool, and a command of the row grades it."""

from __future__ import annotations

import os
import sys

from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.episodes.tools.python_tool import CodeFailed, NotRun
from torchrl_grpo.envs.episodes.tools.shell_tool import PROGRAMS, ShellFolder
from torchrl_grpo.envs.episodes.types import Step
from torchrl_grpo.errors import DataError

# Python would otherwise import modules that the model has left in the folder. That of the system may be older
# than 3.11, which came with the first variable.
_OF_CHECKS = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "HOME": "/nonexistent",
    "PATH": os.pathsep.join((f"{sys.base_prefix}/bin", *PROGRAMS)),
}
_LONGEST_S = 86_400


def check_row(example: Example) -> None:
    """Check that a row says how it is graded.

    Raises:
        DataError: the column ``check`` or ``setup`` is no command line, or nothing is checked.
    """
    for name, may_miss in (("check", False), ("setup", True)):
        value = example.columns.get(name)
        # An empty command line succeeds.
        is_command = isinstance(value, str) and (may_miss or value.strip())
        if not is_command and not (may_miss and value is None):
            raise DataError(
                f"env.environment=shell: the column {name!r} of {example.id} is {value!r:.80}; write a "
                "command line, such as test -s answer.txt"
            )


class ShellTask:
    """One task. ``setup`` of the row runs first; if ``check`` then succeeds at the end, the reward is 1.

    Args:
        limit_s: time limit of either in seconds.

    Raises:
        ConfigError: that is no time.
    """

    def __init__(self, limit_s: float = 10.0) -> None:
        if not isinstance(limit_s, int | float) or not 0 < limit_s <= _LONGEST_S:
            raise bad_value(
                "env.environment_args.limit_s",
                limit_s,
                f"it is no positive number of seconds up to {_LONGEST_S}",
                "env.environment_args={limit_s: 60}, for example",
            )
        self._limit_s = limit_s
        self.folder = ShellFolder()

    def reset(self, example: Example) -> None:
        """Prepare the folder.

        Raises:
            RuntimeError: ``setup`` of the row fails.
        """
        check_row(example)
        self._check = example.columns["check"]
        if setup := example.columns.get("setup"):
            status, text = self.folder.result(setup, self._limit_s, waits=True)
            if status:
                raise RuntimeError(f"setup of {example.id} ended with status {status}: {text[-200:]}")

    def step(self, message: str) -> Step:
        """Grade the folder, which ends the episode. A check that is ended has failed.

        Raises:
            NotRun: the check was not run.
        """
        try:
            status, _ = self.folder.result(self._check, self._limit_s, _OF_CHECKS, waits=True)
        except NotRun:
            raise
        except CodeFailed:
            status = 1
        return Step(reward=float(status == 0), done=True)
