"""Intervals over seeds and problems, and the number of seeds that a difference needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit

from torchrl_grpo.sweep import statistics


def synthetic(
    seeds: int, sweeps: int = 2_000, problems: int = 150
) -> tuple[statistics.Values, statistics.Values]:
    """Return right and wrong answers of two settings, ``[sweeps, 2, S, P]``, and their true means.

    Logits have a part of the problem, which both settings share, one of the problem under a setting, one of
    the seed, and one of the seed on the problem. How large they are differs from sweep to sweep.
    """
    draw = np.random.default_rng(seeds)

    def normal(*shape: int) -> statistics.Values:
        return draw.standard_normal((sweeps, *shape))

    def scale(low: float, high: float) -> statistics.Values:
        return draw.uniform(low, high, (sweeps, 1, 1, 1))

    base = draw.uniform(-1.5, 1.5, (sweeps, 2, 1, 1))
    sizes = [scale(1.5, 2.5), scale(0.2, 0.8), scale(0.05, 0.6), scale(0.3, 1.2)]
    parts = [normal(1, 1, problems), normal(2, 1, problems), normal(2, seeds, 1), normal(2, seeds, problems)]
    logits = base + sum(size * part for size, part in zip(sizes, parts, strict=True))
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    total = np.sqrt(sum(size**2 for size in sizes))
    truth = (expit(base + total * nodes) * weights / weights.sum()).sum(-1)[..., 0]
    return (draw.random(logits.shape) < expit(logits)).astype(float), truth


@pytest.mark.parametrize("seeds", [3, 4, 5])
def test_intervals_hold_in_95_percent_of_synthetic_sweeps(seeds: int) -> None:
    answers, truth = synthetic(seeds)
    means, halves = statistics.interval(answers[:, 0])
    held = np.mean(np.abs(means - truth[:, 0]) <= halves)
    differences, widths = statistics.interval(answers[:, 1] - answers[:, 0])
    paired = np.mean(np.abs(differences - (truth[:, 1] - truth[:, 0])) <= widths)
    print(f"{seeds} seeds: means {held:.3f}, differences {paired:.3f}")
    assert 0.93 <= held <= 0.97 and 0.93 <= paired <= 0.97


def test_the_bootstrap_of_three_seeds_does_not_hold() -> None:
    answers, truth = synthetic(3)
    means = (answers[:, 1] - answers[:, 0]).mean(-1)
    result: Any = stats.bootstrap((means,), np.mean, axis=-1, method="percentile", n_resamples=200, rng=0)
    low, high = result.confidence_interval
    difference = truth[:, 1] - truth[:, 0]
    assert np.mean((low <= difference) & (difference <= high)) < 0.85


def test_without_grades_of_problems_it_is_the_t_interval_of_the_seeds() -> None:
    values = np.array([[0.5], [0.6], [0.65]])
    mean, half = statistics.interval(values)
    expected = stats.ttest_1samp(values[:, 0], 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((expected.low, expected.high))


def test_equal_values_have_an_interval_without_width() -> None:
    for problems in (1, 7):
        assert statistics.interval(np.full((3, problems), 0.5))[1] == 0


def test_a_small_difference_needs_more_seeds_and_a_large_one_none() -> None:
    noise = np.array([-0.05, 0.0, 0.05])
    needed = [statistics.seeds_needed((shift + noise)[:, None]) for shift in (0.3, 0.05, 0.02, 0.0)]
    assert needed[0] == 3 and needed[3] is None
    assert needed[1] is not None and needed[2] is not None and 3 < needed[1] < needed[2]
    # Standard deviation 0.05 and mean 0.02: 51 by the usual formula with its t quantile.
    assert needed[2] == pytest.approx(51, abs=2)


def test_a_stricter_interval_needs_more_seeds() -> None:
    differences = np.array([[-0.03], [0.02], [0.07]])
    usual, strict = (statistics.seeds_needed(differences, level) for level in (0.95, 0.99))
    assert usual is not None and strict is not None and strict > usual


def test_where_problems_are_too_few_no_number_of_seeds_is_enough() -> None:
    of_problems = np.array([-1.0, 0.9, 1.0, -0.8])
    assert statistics.seeds_needed(np.tile(of_problems, (3, 1)) + 0.001 * np.eye(3, 4)) is None


def test_the_permutation_test_of_three_seeds_cannot_show_anything() -> None:
    assert statistics.permutation_p(np.array([[0.5], [0.6], [0.7]])) == pytest.approx(0.25)
