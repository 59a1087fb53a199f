"""The options of the command that concern Slurm, and the header that they make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrl_grpo.errors import ConfigError

# Options of sbatch that an option of this command sets, and that option.
_SET = {
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "gres": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-node",
    "mem": "--memory-per-node",
    "time": "--time",
    "signal": "--signal-seconds",
    "job-name": "--job-name",
}
# Seconds before the time limit at which a run saves itself, if there is time for that.
USUAL_SIGNAL_S = 600
# Seconds by which Slurm may send a signal too early. It also counts time limits in minutes.
EARLY_S = 60
# Time limits of sbatch without one.
_UNLIMITED = ("infinite", "unlimited", "-1")
# Options of sbatch that the script itself needs to have a certain value.
_OWN = ("ntasks", "ntasks-per-node", "requeue", "no-requeue", "open-mode", "array")


@dataclass(frozen=True)
class SlurmOptions:
    """What a job asks Slurm for.

    Attributes:
        nodes: number of nodes.
        gpus_per_node: GPUs of each node, as sbatch takes them: ``4``, ``a100:4``, or ``0``.
        cpus_per_node: cores of each node; None for Slurm's default.
        memory_per_node: memory of each node, as sbatch takes it; None for Slurm's default.
        time: time limit, as sbatch takes it; None for that of the partition.
        partition, account, qos, mail_user, mail_type: as sbatch takes them, or None.
        job_name: name of the job.
        signal_seconds: seconds before the time limit at which the run is asked to save itself; None for
            ``USUAL_SIGNAL_S``, or a third of a short time limit.
        extra: further options of sbatch, one a line, e.g. ``--exclusive``.
        setup: lines of shell that set up the environment.
        folder: folder for the folders of jobs, which all nodes see.
        start_seconds: seconds that servers, or nodes of Ray, have to come up.
        template: the user's template of the script; None for the one of this project that fits.
    """

    nodes: int
    gpus_per_node: str
    cpus_per_node: int | None
    memory_per_node: str | None
    time: str | None
    partition: str | None
    account: str | None
    qos: str | None
    mail_user: str | None
    mail_type: str
    job_name: str
    signal_seconds: int | None
    extra: Sequence[str]
    setup: Sequence[str]
    folder: str
    start_seconds: int
    template: Path | None

    @property
    def gpus(self) -> int:
        """The number of GPUs of each node."""
        return int(self.gpus_per_node.rpartition(":")[2])

    @property
    def signal_s(self) -> int:
        """Seconds before the time limit at which the run is asked to save itself."""
        if self.signal_seconds is not None:
            return self.signal_seconds
        limit = None if self.time is None else seconds_of(self.time)
        return USUAL_SIGNAL_S if limit is None else min(USUAL_SIGNAL_S, max(EARLY_S, limit // 3))

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is not one that Slurm takes, or contradicts the script.
        """
        if not re.fullmatch(r"([\w.-]+:)?\d+", self.gpus_per_node):
            raise _bad("--gpus-per-node", self.gpus_per_node, "it is not a number of GPUs", "4 or a100:4")
        for option, value, least in (
            ("--nodes", self.nodes, 1),
            ("--cpus-per-node", self.cpus_per_node, 1),
            ("--signal-seconds", self.signal_seconds, 1),
            ("--start-seconds", self.start_seconds, 1),
        ):
            if value is not None and value < least:
                raise _bad(option, value, f"it must be at least {least}", str(least))
        if self.signal_s > 65535:
            raise _bad("--signal-seconds", self.signal_seconds, "Slurm takes at most 65535", "3600")
        limit = None if self.time is None else seconds_of(self.time)
        if limit is not None and limit <= self.signal_s + EARLY_S:
            # The job would save itself at once, go back into the queue, and never train.
            wrong = (
                f"the run saves itself --signal-seconds={self.signal_s} before it, and Slurm may be "
                f"{EARLY_S} seconds early, so no time is left to train"
            )
            least = -(-(self.signal_s + EARLY_S) // 60) + 1
            raise _bad("--time", self.time, wrong, f"--time={least} or more")
        if re.search(r"['\"$`\\\n%]", self.folder) or not self.folder:
            raise _bad("--folder", self.folder, "it must be a plain path", "outputs/slurm")
        for line in self.extra:
            self._check_extra(line)
        for name, text in vars(self).items():
            if isinstance(text, str) and "\n" in text:
                raise _bad(f"--{name.replace('_', '-')}", text, "it is more than one line", "one line")

    def _check_extra(self, line: str) -> None:
        name = line.partition("=")[0].partition(" ")[0].removeprefix("--")
        if not re.fullmatch(r"--[a-z][a-z-]*([= ]\S.*)?", line):
            raise _bad(
                "--sbatch", line, "it is not a long option of sbatch", "--sbatch=--constraint=ib, for example"
            )
        if re.search(r"\s--[a-z]", line):
            raise _bad("--sbatch", line, "it is more than one option", "--sbatch once for each option")
        if name in _SET:
            fix = f"{_SET[name]}=VALUE"
            raise ConfigError(f"--sbatch={line}: an option of this command sets it; write {fix}")
        if name in _OWN:
            wrong = "the script needs a value of its own"
            raise ConfigError(f"--sbatch={line}: {wrong}; remove it")

    def header(self) -> list[str]:
        """Return the ``#SBATCH`` lines."""
        values = {
            "job-name": self.job_name,
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node if self.gpus else None,
            "cpus-per-task": self.cpus_per_node,
            "mem": self.memory_per_node,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "mail-user": self.mail_user,
            "mail-type": self.mail_type if self.mail_user else None,
            # To the shell of this script alone, which knows which step has to save itself.
            "signal": f"B:USR1@{self.signal_s}",
        }
        lines = [f"--{name}={_quoted(str(value))}" for name, value in values.items() if value is not None]
        # A job that begins again goes on in the same file.
        lines += ["--requeue", "--open-mode=append", *map(_with_quoted_value, self.extra)]
        return [f"#SBATCH {line}" for line in lines]


def _quoted(value: str) -> str:
    """Quote a value as sbatch reads it, if it has to be one word."""
    escaped = re.sub(r"([\\'])", r"\\\1", value)
    return f"'{escaped}'" if re.search(r"[\s'\"\\#]", value) else value


def _with_quoted_value(option: str) -> str:
    # Whoever has quoted the value keeps that.
    if re.search(r"['\"\\]", option):
        return option
    name, separator, value = (
        re.split("([= ])", option, maxsplit=1) if re.search("[= ]", option) else (option, "", "")
    )
    return f"{name}{separator}{_quoted(value)}"


def _bad(option: str, value: object, wrong: str, fix: str) -> ConfigError:
    return ConfigError(f"{option}={value}: {wrong}; write {fix}")


def seconds_of(time: str) -> int | None:
    """Return a time limit of sbatch in seconds; None if it is unlimited.

    Raises:
        ConfigError: it has none of the forms that sbatch takes.
    """
    if time.lower() in _UNLIMITED:
        return None
    match = re.fullmatch(r"(?:(\d+)-(?=\d))?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise _bad("--time", time, "it is no time limit of Slurm", "90 (minutes), 24:00:00 or 2-12")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    # After days, and of three numbers, the first counts hours. Otherwise it counts minutes.
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    # Slurm takes 0 for no limit.
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None
