"""Intervals of means over seeds and held-out problems, and how many seeds a difference needs.

Each seed is graded on the same problems, so the two are crossed. Other seeds and other problems would both
give other values, and both count here.

Three to five seeds are too few for the bootstrap, which draws from the seeds that there are: its 95 %
interval of a difference held in 72 % of synthetic sweeps with three seeds, and in 83 % with five. Those here,
of Student's t distribution with Satterthwaite's degrees of freedom, held in 95 to 96 %
(``tests/sweep/test_statistics.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

LEVEL = 0.95
# Chance with which the advised number of seeds shows a difference as large as the one that was measured.
POWER = 0.8
MOST_SEEDS = 1_000

Values = NDArray[np.float64]


class Variance(NamedTuple):
    """Variance of the mean of values ``[..., S, P]`` of S seeds on P problems, in two parts.

    Attributes:
        seeds: part that falls with the number of seeds.
        problems: part that falls with the number of problems only.
        freedom: degrees of freedom of the sum.
    """

    seeds: Values
    problems: Values
    freedom: Values

    @property
    def total(self) -> Values:
        """Variance of the mean."""
        return self.seeds + self.problems


def variance(values: Values) -> Variance:
    """Estimate the variance of the mean over seeds and problems (two-way random effects, one value a cell).

    Args:
        values: values ``[..., S, P]`` with S >= 2; P is 1 if only the means of seeds are known.
    """
    seeds, problems = values.shape[-2:]
    of_seeds, of_problems = values.mean(-1), values.mean(-2)
    by_seed = problems * of_seeds.var(-1, ddof=1)
    if problems == 1:
        return Variance(by_seed / seeds, np.zeros_like(by_seed), np.full_like(by_seed, seeds - 1.0))
    by_problem = seeds * of_problems.var(-1, ddof=1)
    mean = of_seeds.mean(-1)[..., None, None]
    rest = ((values - of_seeds[..., None] - of_problems[..., None, :] + mean) ** 2).sum((-1, -2))
    remaining = (seeds - 1) * (problems - 1)
    rest = rest / remaining
    # No part of a variance is negative, though its estimate may be.
    first, second = np.maximum(by_seed, rest), np.maximum(by_problem - rest, 0.0)
    terms = by_seed**2 / (seeds - 1) + by_problem**2 / (problems - 1) + rest**2 / remaining
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = np.where(terms > 0, (first + second) ** 2 / terms, remaining)
    cells = seeds * problems
    return Variance(first / cells, second / cells, np.maximum(freedom, 1.0))


def of_problems(values: Values, problems: Sequence[Hashable]) -> Values:
    """Return values ``[S, P]`` of problems that are asked in several wordings. Means of seeds stay the same.

    Wordings of a problem say less than as many problems. The mean over questions is a ratio, of sums over
    problems, so each problem has the sum of its deviations (linearization of a ratio: Cochran, Sampling
    Techniques, 1977, chapter 6).

    Args:
        values: values ``[S, Q]`` of S seeds on Q questions.
        problems: the problem of each question.
    """
    numbers = {problem: number for number, problem in enumerate(dict.fromkeys(problems))}
    if len(numbers) == len(problems):
        return values
    means = values.mean(-1, keepdims=True)
    sums = np.zeros((len(numbers), len(values)))
    np.add.at(sums, [numbers[problem] for problem in problems], (values - means).T)
    return np.asarray(means + sums.T * len(numbers) / len(problems), np.float64)


def interval(values: Values, level: float = LEVEL) -> tuple[Values, Values]:
    """Return the mean of values ``[..., S, P]`` and half the width of its interval.

    Args:
        values: values of S >= 2 seeds on P problems, see :func:`variance`.
        level: coverage.
    """
    estimate = variance(values)
    half = stdtrit(estimate.freedom, (1 + level) / 2) * np.sqrt(estimate.total)
    return values.mean((-1, -2)), half


def seeds_needed(differences: Values, level: float = LEVEL) -> int | None:
    """Return the number of seeds with which the measured difference would most likely be told from 0.

    It assumes that the difference and its variances are as measured.

    Args:
        differences: differences ``[S, P]`` with S >= 2.
        level: coverage of the interval that shall exclude 0.

    Returns:
        The number, at least S; None if more seeds are not enough, as the problems are too few or the
        difference is too small.
    """
    estimate, measured = variance(differences), abs(float(differences.mean()))
    seeds, problems = differences.shape
    for count in range(seeds, MOST_SEEDS + 1):
        error = np.sqrt(estimate.seeds * seeds / count + estimate.problems)
        freedom = max(count - 1, 1) if problems == 1 else max(float(estimate.freedom), count - 1)
        if measured > (stdtrit(freedom, (1 + level) / 2) + ndtri(POWER)) * error:
            return count
    return None


def permutation_p(differences: Values) -> float:
    """Return the p-value of the exact paired permutation test of the seeds' means.

    With S seeds it is at least 2 / 2^S, so it can show nothing with fewer than six.

    Args:
        differences: differences ``[S, P]``.
    """
    # It takes a second to import, and a sweep without several seeds has no use for it.
    from scipy.stats import permutation_test

    means = differences.mean(-1)
    result: Any = permutation_test(
        (means, np.zeros_like(means)),
        lambda first, second, axis: np.mean(first - second, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=10_000,
        rng=0,
    )
    return float(result.pvalue)
