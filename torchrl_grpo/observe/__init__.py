"""Metrics, rollouts, loggers, progress, and the report at the end of a run.

Nothing here influences training. Only functions of :mod:`.loggers` and :mod:`.stats` import torch.
"""
