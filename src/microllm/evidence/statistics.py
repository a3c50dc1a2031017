"""The statistic of a paired comparison: effect and one-sided 97.5 % bounds over processes.

Place: under ``verdict`` and ``timing``. Works on the last axis, so that one session and 20,000 simulated ones are
the same call. Does not decide: see ``verdict``.

Sources: Hodges and Lehmann 1963 (the effect); Abramowitz and Stegun, table 26.10 and 26.7.5 (Student's t).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


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
    half = t_quantile(count - 1) * x.std(-1, ddof=1) / math.sqrt(count)
    return Interval(
        effect=np.median((x[..., first] + x[..., second]) / 2, axis=-1), lower=mean - half, upper=mean + half,
        num_positive=(x > 0).sum(-1), count=count,
    )  # fmt: skip


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


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t.

    Numbers: the printed table up to 12 degrees of freedom, beyond it the normal's expansion (within 6e-5)
    """
    if degrees <= len(_T_TABLE):
        return _T_TABLE[degrees - 1]
    z, n = 1.959963985, degrees
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + terms[0] / n + terms[1] / n**2 + terms[2] / n**3


_T_TABLE = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139, 2.200985,
    2.178813,
)  # fmt: skip
