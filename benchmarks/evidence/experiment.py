"""What an experiment is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.evidence.policies import Policy
from benchmarks.learning import Stage

# What refutes most claims.
NO_RISE = (
    "The interval of the rise, or of the lead over the reward for form or the random reward, reaches 0 or "
    "below."
)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        claim: what it supports.
        refuted_by: which result would refute the claim.
        arms: commands of each arm; each takes the model of the one before. The first arm is the one that the
            others are compared with.
        shape: regular expression of a whole response in the right form; empty if there is no form.
        seeds: number of seeds, from 0.
        fresh: further seeds, chosen when those had been looked at. Their differences are also given alone.
        outcome: what the results say of the claim; empty until there are some.
        settings: words that each arm adds to those of all, which have a table; empty for none.
        needs: GPU that it needs, with the peak and the hours that the planner predicts; empty for a CPU.
        once: further words of the first arm's run with seed 0, for what is too slow for every seed.
        contrasts: further pairs of arms, whose differences have a table.
        shows_halfway: whether the table has the held-out value after half of the steps.
        times_steps: whether seconds are those of steps alone, and the picture has an axis of them.
        reach: held-out value; the table has the responses and seconds that each arm takes to it. None for no
            such columns.
        measures: names of further held-out values of an evaluation, such as ``prompt_loose``. A second table
            has how much each arm raises them.
        policies: policies without a model, by name, which the table has below the arms.
        deals: whether the second table also has how much more responses earn with their own problems than
            with others, and what those earn that do not repeat themselves. For one response a problem.
        data_key: key that takes a local copy of the data set.
        keeps_samples: whether responses are kept, and a few in the records. False for data sets of others,
            whose questions are not copied.
    """

    claim: str
    refuted_by: str
    arms: Mapping[str, Sequence[Stage]]
    shape: str = ""
    seeds: int = 3
    fresh: Sequence[int] = ()
    outcome: str = ""
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    needs: str = ""
    once: Sequence[str] = ()
    contrasts: Sequence[tuple[str, str]] = ()
    shows_halfway: bool = False
    times_steps: bool = False
    reach: float | None = None
    measures: Sequence[str] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    deals: bool = False
    data_key: str = "env.data_path"
    keeps_samples: bool = True

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """All seeds, the fresh ones last."""
        return (*range(self.seeds), *self.fresh)
