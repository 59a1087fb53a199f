"""Checks of the values of a configuration, alone and in combination. They need no model and no torch."""

from torchrl_grpo.config.checks.whole import check_installed, validate

__all__ = ["check_installed", "validate"]
