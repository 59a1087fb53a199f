"""Errors that the user can fix. The command line prints them and exits with code 2."""

from __future__ import annotations


class UserError(ValueError):
    """The user's input is wrong. The message names the key, its value and a fix."""


class ConfigError(UserError):
    """A configuration key, its value, or a combination of keys is wrong."""


class DataError(UserError):
    """A file, a row or a data set is missing, malformed or empty."""


class CheckpointError(UserError):
    """A checkpoint is missing, cannot be used, or cannot be written."""


class ModelError(UserError):
    """A model cannot be loaded, or lacks a feature that the configuration needs."""


class RanksApart(UserError):
    """The training ranks do not find each other. Each of them reports it."""


class TrainingStopped(UserError):
    """Training stopped itself, for example after a failed weight verification, too many skipped steps, or a
    full disk.
    """


class RunFolderLost(TrainingStopped):
    """The run folder, or a file in it, was deleted or moved while the run wrote to it."""


class WorkersLost(TrainingStopped):
    """Rollout workers or reference processes failed too often. The trainer is intact and can be saved."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its end of a sentence; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".!")


def typed_first_line(error: BaseException) -> str:
    """Return the type of an error and, if it has a message, :func:`first_line` of that."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name
