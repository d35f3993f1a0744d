"""Estimates of a table from the bounded rows of its units, each of which stands for so many rows of the unit.

Of the n rows of a unit, m are drawn without replacement, so the sum of n/m times a score over
these estimates the unit's sum without bias (Horvitz and Thompson 1952). The score of a randomised
level is a pseudo-value g with T g = f, whose mean given the original level is f. Both draws and
the noise are independent from unit to unit, so errors are those of the jackknife that leaves out
one unit at a time (Quenouille 1956, Tukey 1958). Where no unit with many rows happens to be in a
rare group they are too small: intervals are no narrower than if weights and scores were independent
(Kish 1965).
"""

from __future__ import annotations

import numpy as np
from scipy import special

from dpdask.arrays import Floats, Pair, Triple, freeze_class
from dpdask.inference.tallies import Codes, add_up


@freeze_class(eq=False)
class WeightedRows:
    """Released rows, the unit of each, and how many rows of the table each stands for."""

    units: Codes  # int64 array of shape (n,): a number of each row's unit, from 0 to `n_units` - 1
    weights: Floats  # shape (n,), the same for all rows of a unit

    @property
    def n_units(self) -> int:
        """How many units there are."""
        return int(self.units.max(initial=-1)) + 1

    @property
    def n_rows(self) -> float:
        """How many rows of the table the units have."""
        return float(self.weights.sum())

    def _add_up(self, scores: Floats) -> Floats:
        """Return the weighted sum of a score over the rows of each unit."""
        return add_up(self.weights * scores, self.units, self.n_units)

    def average(self, scores: Floats, known: Floats, groups: Codes, n_groups: int) -> Triple:
        """Return the mean of a score in each group, its standard error, and the one for intervals; NaN for groups of one unit.

        A score is 0 where it counts as missing, and `known` is the score of whether it is
        there.
        """
        pairs, place = np.unique(groups * self.n_units + self.units, return_inverse=True)
        own = pairs // max(1, self.n_units)
        above, below = (add_up(self.weights * each, place, len(pairs)) for each in (scores, known))
        a, b = (add_up(each, own, n_groups) for each in (above, below))
        n = np.bincount(own, minlength=n_groups)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = a / b
            moved = (a[own] - above) / (b[own] - below) - value[own]
            squares, fourths = (add_up(moved**power, own, n_groups) for power in (2, 4))
            rest = add_up((scores - value[groups] * known) ** 2, groups, n_groups)
            rest = rest / np.bincount(groups, minlength=n_groups)
            least = rest * add_up(self.weights**2, groups, n_groups) / b**2
            found = _find_errors(squares, fourths, n.astype(float))
            error, wide = (np.where(n > 1, each, np.nan) for each in found)
            return value, error, np.fmax(wide, np.sqrt(least))

    def share(self, scores: Floats, groups: Codes, n_groups: int) -> Triple:
        """Return the sum of a score in each group over the number of all rows, its standard error, and the one for intervals."""
        pairs, place = np.unique(groups * self.n_units + self.units, return_inverse=True)
        own, unit = np.divmod(pairs, max(1, self.n_units))
        above, sizes = (
            add_up(self.weights * scores, place, len(pairs)),
            self._add_up(np.ones(len(groups))),
        )
        a, n = add_up(above, own, n_groups), self.n_units
        with np.errstate(invalid="ignore", divide="ignore"):
            value, left = a / self.n_rows, 1.0 / (self.n_rows - sizes)
            moved, still = ((a[own] - part) * left[unit] - value[own] for part in (above, 0.0))
            powers = []
            # of units without rows in the group; others are put in their place
            for power in (2, 4):
                all_still = a**power * ((left - 1.0 / self.n_rows) ** power).sum()
                more = add_up(moved**power - still**power, own, n_groups)
                powers.append(np.maximum(all_still + more, 0.0))
            squares, sums = (
                add_up(scores**power, groups, n_groups) / len(scores) for power in (2, 1)
            )
            kish = float((self.weights**2).sum()) / self.n_rows**2
            least = kish * np.maximum(squares - 2.0 * value * sums + value**2, 0.0)
            error, wide = _find_errors(powers[0], powers[1], n)
            return value, error, np.fmax(wide, np.sqrt(least))

    def solve(self, left: Floats, right: Floats) -> Triple:
        """Return the solution of the summed linear equations of the rows, its standard errors, and those for intervals.

        They have the shapes (n, p, p) and (n, p).

        Raises
        ------
        numpy.linalg.LinAlgError
            If the equations have no solution, or none without one of the units.
        """
        p, n = right.shape[1], self.n_units
        of_units = np.empty((n, p, p + 1))
        for row in range(p):
            of_units[:, row, p] = self._add_up(right[:, row])
            for column in range(p):
                of_units[:, row, column] = self._add_up(left[:, row, column])
        total = of_units.sum(axis=0)
        value = np.linalg.solve(total[:, :p], total[:, p])
        rest = total - of_units
        without = np.linalg.solve(rest[:, :, :p], rest[:, :, p:])[:, :, 0]
        squares, fourths = (((without - value) ** power).sum(axis=0) for power in (2, 4))
        return value, *_find_errors(squares, fourths, n)


def _find_errors(squares: Floats, fourths: Floats, n: Floats | int) -> Pair:
    """Return the jackknife's standard error, and the one for intervals, given the sums of powers of what n units move.

    If few of them make most of it, the error is known from few numbers: it is widened as Student's
    quantile is beyond the normal one, with the degrees of freedom that such a sum of squares has
    (Satterthwaite 1946).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(squares * (n - 1) / n)
        widened = special.stdtrit(2.0 * squares**2 / fourths, 0.975) / special.ndtri(0.975)
        return error, error * np.fmax(widened, 1.0)
