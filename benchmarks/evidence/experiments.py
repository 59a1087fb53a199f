"""All experiments by name."""

from __future__ import annotations

from benchmarks.evidence import comparisons, other_ways, published, tasks
from benchmarks.evidence.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = (
    tasks.EXPERIMENTS | other_ways.EXPERIMENTS | published.EXPERIMENTS | comparisons.EXPERIMENTS
)
