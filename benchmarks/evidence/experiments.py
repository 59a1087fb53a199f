"""All experiments by name."""

from __future__ import annotations

from benchmarks.evidence import comparisons, published, tasks
from benchmarks.evidence.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = tasks.EXPERIMENTS | published.EXPERIMENTS | comparisons.EXPERIMENTS
