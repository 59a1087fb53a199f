"""Statistics of a report: intervals of an accuracy and of a mean, pass@k, peak memory. None needs scipy."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""
# Problems that differ, and whose wordings are answered alike, as a prior of the design effect.
_PRIOR = 0.5


def wilson(successes: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927), without continuity correction.

    Unlike the textbook interval ``p +- z sqrt(p (1-p) / n)`` it stays inside [0, 1] and is not empty at 0 or
    n successes, which are common for untrained and for well-trained models.

    Args:
        successes: number of successes; a fraction if single results are fractions.
        n: number of trials, or an effective one (:func:`effective_share`); with 0 the interval is (0, 1).
        z: quantile of the normal distribution; by default for 95 %.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: ``n`` is negative or ``successes`` lies outside [0, n].
    """
    if n < 0 or not 0.0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie within 0 and n={n}.")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    shrink = 1.0 + z * z / n
    center = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1.0 - p) / n + z * z / (4 * n * n))
    # The exact bound at the ends is 0 and 1; rounding would leave 1e-17 or so.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == n else min(1.0, center + half)
    return low, high


def design_effect(values: Sequence[float], problems: Sequence[Hashable]) -> float:
    """Return how many times more the mean of questions varies than if each were a problem of its own.

    Wordings of a problem are answered alike (design effect: Kish, Survey Sampling, 1965). Where few problems
    differ from the mean, they hardly show how alike. So the effect of wordings that are always answered alike
    counts too, as half a problem that differs: intervals then hold in 95 to 99 % of synthetic evaluations.

    Args:
        values: results ``[n]`` of questions.
        problems: the problem of each.

    Returns:
        1 if all problems are different, more if not, and infinity for wordings of a single problem.
    """
    n, members = len(values), Counter(problems)
    if len(members) == n:
        return 1.0
    if len(members) == 1:
        return math.inf
    mean = sum(values) / n
    sums: dict[Hashable, float] = dict.fromkeys(members, 0.0)
    for value, problem in zip(values, problems, strict=True):
        sums[problem] += value - mean
    alike = sum(count**2 for count in members.values()) / n
    squares = [value**2 for value in sums.values()]
    # With rounding, equal values may differ from their mean.
    of_questions = sum((value - mean) ** 2 for value in values) * n / (n - 1)
    if of_questions <= n * (1e-12 * mean) ** 2:
        return max(1.0, alike)
    effect = sum(squares) * len(members) / (len(members) - 1) / of_questions
    differing = sum(squares) ** 2 / sum(square**2 for square in squares) if any(squares) else 0.0
    return max(1.0, (effect * differing + alike * _PRIOR) / (differing + _PRIOR))


def effective_share(values: Sequence[float], problems: Sequence[Hashable]) -> float:
    """Return the share of questions that would show as much if each were a problem of its own.

    Few problems show less exactly how much they vary, so it also has the ratio of the normal quantile to
    Student's.

    Args:
        values: results of questions.
        problems: the problem of each.
    """
    effect, count = design_effect(values, problems), len({*problems})
    if count in (1, len(values)):
        return 1.0 / effect
    return (Z_95 / _t_95(count - 1)) ** 2 / effect


def paired_interval(
    pairs: Sequence[tuple[float, float]],
    weights: Sequence[tuple[float, float]] = (),
    problems: Sequence[Hashable] = (),
) -> tuple[float, tuple[float, float]]:
    """Return the difference of the means of pairs, first minus second, and its 95 % interval.

    If all values are 0 or 1 and count alike, the interval is that of Agresti and Min (2005), which adds half
    a pair to each of the four cases: it is not empty where all pairs agree. Otherwise it is that of Student's
    t distribution over pairs.

    Args:
        pairs: results of two models on the same questions, at least one.
        weights: weights of the results in the two means, such as numbers of tokens; equal by default.
        problems: the problem of each question; each has its own by default.
    """
    n = len(pairs)
    values = zip(*pairs, strict=True)
    of_models = zip(*(weights or [(1.0, 1.0)] * n), strict=True)
    (first, first_parts), (second, second_parts) = map(_deviations, values, of_models)
    mean = first - second
    parts = [a - b for a, b in zip(first_parts, second_parts, strict=True)]
    if {*weights} <= {(1, 1)} and all(value in (0.0, 1.0) for pair in pairs for value in pair):
        differences = [a - b for a, b in pairs]
        share = effective_share(parts, problems or range(n))
        gained, lost = (differences.count(sign) * share + 0.5 for sign in (1.0, -1.0))
        size = n * share + 2
        center = (gained - lost) / size
        half = Z_95 * math.sqrt((gained + lost) / size - center**2) / math.sqrt(size)
        return mean, (max(-1.0, min(mean, center - half)), min(1.0, max(mean, center + half)))
    half = _half(parts, problems)
    return mean, (mean - half, mean + half)


def _half(deviations: Sequence[float], problems: Sequence[Hashable]) -> float:
    """Return half the width of the interval of a mean by Student's t distribution; infinity for one problem.

    Args:
        deviations: deviation of each question, see :func:`_deviations`.
        problems: the problem of each; each has its own by default.
    """
    n = len(deviations)
    own = problems or range(n)
    count = len({*own})
    if count == 1:
        return math.inf
    variance = sum(deviation**2 for deviation in deviations) / (n - 1) / n
    return _t_95(count - 1) * math.sqrt(variance * design_effect(deviations, own))


def _deviations(values: Sequence[float], weights: Sequence[float]) -> tuple[float, list[float]]:
    """Return a weighted mean, and how much each value moves it, times their number.

    The mean is a ratio of two sums, and these are the terms of its linear approximation. With equal weights
    they are the differences from the mean.
    """
    total = sum(weights)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    scale = total / len(values)
    return mean, [weight * (value - mean) / scale for value, weight in zip(values, weights, strict=True)]


def mean_interval(
    values: Sequence[float], weights: Sequence[float] = (), problems: Sequence[Hashable] = ()
) -> tuple[float, float] | None:
    """95 % interval of a mean by Student's t distribution; None for fewer than two problems.

    Args:
        values: results of questions.
        weights: weights of the results in the mean; equal by default.
        problems: the problem of each question; each has its own by default.
    """
    if not values:
        return None
    mean, deviations = _deviations(values, weights or [1.0] * len(values))
    half = _half(deviations, problems)
    return None if math.isinf(half) else (mean - half, mean + half)


def _t_95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    From four degrees of freedom on, it is that of the normal distribution, expanded (Abramowitz and Stegun,
    26.7.5), which is exact to 1 %.
    """
    if freedom < 4:
        return (12.7062, 4.3027, 3.1824)[freedom - 1]
    z, v = Z_95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` samples is correct (arXiv 2107.03374, eq. 1).

    ``1 - C(n - correct, k) / C(n, k)``, as a product so that no large number appears.

    Args:
        n: samples drawn for the problem.
        correct: number of correct samples.
        k: samples allowed, at most ``n``.

    Returns:
        The estimate, in [0, 1].

    Raises:
        ValueError: unless ``0 <= correct <= n`` and ``1 <= k <= n``.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct={correct} must lie within 0 and n={n}.")
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must lie within 1 and n={n}.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def peak_memory_gib() -> float:
    """Largest resident memory this process has had, in GiB; its children are not counted.

    On Linux a child inherits ``ru_maxrss`` of its parent, so this reads the peak that the kernel keeps
    for each process (``VmHWM``) if there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    import resource  # not on Windows, where this module must still import

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def cuda_in_use(name: str, device: torch.device) -> dict[str, float]:
    """A metric: memory of a GPU in use by all processes, in GiB; none on a CPU.

    Memory that PyTorch freed and caches counts as used, so after a phase this is the most that it needed.
    """
    if device.type != "cuda":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {name: (total - free) / 2**30}


def peak_cuda_gib() -> float:
    """Largest memory PyTorch has held on all CUDA devices together, in GiB; 0 where CUDA is unused."""
    torch = sys.modules.get("torch")  # not imported means not used, and importing it takes seconds
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0.0
    return float(sum(torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count())) / 2**30)
