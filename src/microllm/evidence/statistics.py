"""The statistic of a paired comparison: effect and one-sided 97.5 % bounds over processes.

Place: under ``verdict`` and ``timing``. Works on the last axis, so that one session and 20,000 simulated ones are
the same call. Does not decide: see ``verdict``.

Sources: Hodges and Lehmann 1963 (the effect); Student's t with integer degrees of freedom in closed form
(Abramowitz and Stegun 26.7.3, 26.7.4).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
LEVEL = 0.975


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The effect with its one-sided bounds; each field has the shape of the input without its last axis.

    Units:   natural logarithm of a ratio of times; 0.01 reads as 1 % faster
    """

    effect: Array
    lower: Array
    upper: Array
    num_positive: NDArray[np.int64]
    count: int


def summarise(values: ArrayLike) -> Interval:
    """Return effect and bounds of ``values`` along the last axis (at least two values).

    Numbers: fp64; effect = Hodges-Lehmann estimate, bounds = mean ± t(97.5 %, n - 1) · s / √n.
    """
    x = np.asarray(values, dtype=np.float64)
    count = x.shape[-1]
    first, second = np.triu_indices(count)
    mean = x.mean(-1)
    half = t_quantile(LEVEL, count - 1) * x.std(-1, ddof=1) / math.sqrt(count)
    return Interval(
        effect=np.median((x[..., first] + x[..., second]) / 2, axis=-1),
        lower=mean - half,
        upper=mean + half,
        num_positive=(x > 0).sum(-1),
        count=count,
    )


def sign_flip_p(values: ArrayLike) -> float:
    """Return the exact one-sided p value of "the mean is not above 0" over all flips of signs (at most 2^16)."""
    x = np.asarray(values, dtype=np.float64)
    if not 1 <= x.size <= 16:
        raise ValueError(f"got {x.size} values; need 1 to 16: all sign flips are tried")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=x.size)))
    means = signs @ x
    return float((means >= x.sum() - 1e-12 * np.abs(x).sum()).mean())


def geometric_mean(ratios: ArrayLike) -> float:
    """Return the geometric mean of positive ratios."""
    return float(np.exp(np.log(np.asarray(ratios, dtype=np.float64)).mean()))


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t for a probability above one half (bisection on the closed form)."""
    low, high = 0.0, 1e4
    while high - low > 1e-10 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return low


def _t_cdf(t: float, degrees: int) -> float:
    theta = math.atan2(t, math.sqrt(degrees))
    if degrees % 2:
        term, total = math.cos(theta), 0.0
        for k in range(3, degrees + 1, 2):
            total += term
            term *= math.cos(theta) ** 2 * (k - 1) / k
        return 0.5 + (theta + math.sin(theta) * total) / math.pi
    term, total = 1.0, 0.0
    for k in range(2, degrees + 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (k - 1) / k
    return 0.5 + math.sin(theta) * total / 2
