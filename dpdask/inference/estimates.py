"""What an estimate of the original column is, and averages over the rows whose level has a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from dpdask.inference.tallies import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """An estimate of a quantity of the original column.

    Attributes
    ----------
    value
        A number, a Series (by level, group or covariate) or a DataFrame (groups × levels).
    standard_error
        The spread of `value` over drawing rows from a population and releasing them, of the same shape. For the released
        table itself it is an upper bound on average, since the rows are then fixed.
    condition_number
        The ratio of the largest to the smallest singular value that was inverted, by at least a half: the
        largest factor by which noise in the released column is amplified.
    worst_bias
        Zero where the channel determines the value and it was inverted. Otherwise the largest possible bias, for any original
        values; infinite where no bound is known. Most biases are much smaller.
    """

    value: Any
    standard_error: Any
    condition_number: float
    worst_bias: Any = 0.0

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Return the normal confidence interval, widened by the worst bias."""
        half = float(special.ndtri(0.5 + confidence / 2)) * self.standard_error + self.worst_bias
        return self.value - half, self.value + half


def average_known(average: Callable[[Floats], Estimate], values: Floats) -> Estimate:
    """Return an average over the rows whose level has a number: the ratio of two averages over all rows.

    Parameters
    ----------
    average
        From a number of each level to its average over all rows, or that of each group.
    values
        The number of each level; NaN leaves the rows of a level out.
    """
    here = np.isfinite(values)
    if here.all():
        return average(values)
    centre = float(values[here].mean()) if here.any() else 0.0
    above, inside = average(np.where(here, values - centre, 0.0)), average(here.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(inside.value, 0.0)
        shift = above.value / share
        error, bias = (
            (one + np.abs(shift) * two) / share for one, two in ((above.standard_error, inside.standard_error), (above.worst_bias, inside.worst_bias))
        )
    return replace(above, value=centre + shift, standard_error=error, worst_bias=bias)
