"""Draws the learning curves of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence.experiment import Experiment

# Most arms whose legend fits into a panel of a picture.
_MOST_IN_PANEL = 6


def draw(name: str, experiment: Experiment, records: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw the mean held-out value of each arm, between its lowest and its highest seed.

    The axis is that of optimizer steps. With ``times_steps`` there is one of seconds beside it, with a thin
    line for each seed.
    """
    from matplotlib import pyplot

    # Text as text is a third of the lines of its outlines.
    pyplot.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    panels = {"steps": "optimizer steps"}
    if experiment.times_steps:
        panels["clock"] = "seconds of generating and training"
    has_many = len({record["arm"] for record in records}) > _MOST_IN_PANEL
    # With many arms the legend has a third of the width, and matplotlib's usual ten colors are too few.
    size = (9, 3.6) if has_many else (6, 3.2)
    figure, each_axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axes in each_axes[0] if has_many else ():
        axes.set_prop_cycle(color=pyplot.colormaps["tab20"](range(20)))
    for axes, (across, title) in zip(each_axes[0], panels.items(), strict=True):
        for arm in experiment.arms:
            runs = [record for record in records if record["arm"] == arm]
            if not runs or any(run["steps"] != runs[0]["steps"] for run in runs):
                continue
            at, values = (np.array([run[key] for run in runs]) for key in (across, "values"))
            (line,) = axes.plot(at.mean(0), values.mean(0), marker=".", label=arm)
            if across == "steps":
                axes.fill_between(at[0], values.min(0), values.max(0), color=line.get_color(), alpha=0.2)
            else:
                # Seeds differ in their seconds, too.
                axes.plot(at.T, values.T, color=line.get_color(), alpha=0.3, linewidth=1)
        axes.set(xlabel=title, ylim=(0, 1))
    each_axes[0, 0].set(ylabel="held-out value")
    if has_many:
        each_axes[0, -1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    else:
        each_axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"evidence-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
