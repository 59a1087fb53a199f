"""Errors that a user caused and a user can mend; the command line ends on them with exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave is wrong: the message names the thing, its value and the mend."""


class ConfigError(UserError):
    """A configuration key, its value, or a combination of keys is wrong."""


class DataError(UserError):
    """A file, a row or a data set is missing, malformed or empty."""


class CheckpointError(UserError):
    """There is nothing to resume from, what is there cannot be used, or one cannot be written."""


class ModelError(UserError):
    """A model cannot be loaded or does not fit what is asked of it."""


class TrainingStopped(UserError):
    """Training stopped itself: a failed proof of weights, too many skipped steps, a full disk."""


class WorkersLost(TrainingStopped):
    """Workers, or processes of the reference, failed too often; the trainer is sound and can be saved."""
