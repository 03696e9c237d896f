"""Means of items with 95 % intervals, and pass^k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

_TAIL = 0.025
"""Share beyond each side of a 95 % interval."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean and its 95 % interval; all three are finite."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float], *, least: float, most: float) -> Estimate:
    """Return the mean of independent values in [least, most], and its interval.

    The interval is Student's t with n - 1 degrees of freedom, cut off at the ends of the range: columns of 20 to 30
    items do not know their deviation well enough for the normal's 1.96.

    Values that are all equal have no deviation, but their mean is not certain. If a value has a probability below
    p = 0.025^(1/n), n samples of it alone are seen less than once in 40 times. So a share p is taken to have this
    value, and the rest may be anywhere in the range. At an end of the range that is Clopper and Pearson's bound.

    Raises:
        ValueError: there are none, or one is not in the range.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        raise ValueError("there is no mean of nothing; estimate needs at least one value")
    if not bool(np.all((x >= least) & (x <= most))):  # also where one is not a number
        raise ValueError(f"estimate: the values span {x.min()} to {x.max()}, their range is {least} to {most}")
    if float(np.ptp(x)) <= 1e-12 * (most - least):
        mean, same = float(x[0]), _TAIL ** (1 / x.size)
        return Estimate(mean, same * mean + (1 - same) * least, same * mean + (1 - same) * most)
    from scipy.special import stdtrit  # jax's own dependency; here, since it takes 0.2 s to import

    mean = float(x.mean())
    half = float(stdtrit(x.size - 1, 1 - _TAIL)) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(mean, max(least, mean - half), min(most, mean + half))


def combined(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent means, each weighing the same, and its interval.

    The distances from each mean to its limits are added like deviations, each side for itself, since a category's
    limits at 100 % are not symmetric (MOVER: Zou and Donner, Statistics in Medicine 27, 2008).

    Raises:
        ValueError: there are none.
    """
    if not estimates:
        raise ValueError("there is no mean of nothing; combined needs at least one estimate")
    count = len(estimates)
    mean = math.fsum(one.mean for one in estimates) / count
    below = math.sqrt(math.fsum((one.mean - one.low) ** 2 for one in estimates)) / count
    above = math.sqrt(math.fsum((one.high - one.mean) ** 2 for one in estimates)) / count
    return Estimate(mean, mean - below, mean + above)


def pass_hat(successes: Sequence[int], trials: int) -> list[float]:
    """Return pass^k for k = 1 … trials: the probability that k independent trials of an item all succeed.

    It is tau-bench's unbiased estimate (arXiv 2406.12045): C(c, k) / C(n, k) of c successes in n trials, averaged over
    items. `successes` are each item's; the results are shares of 1, and the first is the mean.
    """
    count = len(successes)
    return [
        math.fsum(math.comb(c, k) for c in successes) / (math.comb(trials, k) * count) for k in range(1, trials + 1)
    ]
