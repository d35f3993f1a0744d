"""Counts of a released frame, and sums of products by released level, as pandas or Dask reduces them.

A frame is a pandas.DataFrame or anything with its `groupby`, `assign` and `sum` whose results
compute on demand, as Dask's do: only small tables of sums leave the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import special

from dpdask.arrays import Floats, Ints, Pair, freeze_class
from dpdask.errors import DataError, SpecError

Codes: TypeAlias = Ints
Frame: TypeAlias = (
    Any  # a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree
)

# null is a level, and a category that never occurs is no group
_GROUPING = {
    "dropna": False,
    "observed": True,
}


def _reduce(reduction: Any) -> Any:
    """Return a reduction's result: a Dask one is computed here, in the analyst's own process, a pandas one is there already."""
    finish = getattr(reduction, "compute", None)
    return reduction if finish is None else finish()


def level_key(value: object) -> float | str | None:
    """Return what a level of the card and a value of a frame are compared by: a number by its value, others by their text."""
    # NaN alone differs from itself
    if value is None or value is pd.NaT or value is pd.NA or value != value:
        return None
    if isinstance(value, bool | int | float | np.bool_ | np.number):
        return float(value)
    return str(value).removesuffix(" 00:00:00")  # a date read back as a timestamp is the same level


@freeze_class
class Outcomes:
    """What a row can be released as: a level of one column, or of a column and the one that it is given."""

    # the released column, last; before it the one whose released level chose its channel, if there
    # is one
    columns: tuple[str, ...]
    levels: tuple[tuple[object, ...], ...]  # the card's levels of each

    @property
    def size(self) -> int:
        """How many outcomes there are; the released column's levels follow each other."""
        return math.prod(map(len, self.levels))

    @property
    def where(self) -> str:
        """The released column, for messages."""
        return f"column {self.columns[-1]!r}"

    def codes(self, index: pd.Index) -> Codes:
        """Return the place of each outcome, int64 array.

        The index has levels, or one level for each of the columns.

        Raises
        ------
        DataError
            If a value is not one of the levels.
        """
        codes = np.zeros(len(index), dtype=np.int64)
        for place, (column, levels) in enumerate(zip(self.columns, self.levels, strict=True)):
            if index.nlevels != len(self.columns):
                raise DataError(
                    f"is released given {self.columns[0]!r}, so rows must be counted by both columns",
                    self.where,
                    "give the released frame",
                )
            codes = len(levels) * codes + level_codes(index.get_level_values(place), levels, column)
        return codes


def level_codes(values: Iterable[object], levels: Sequence[object], column: str) -> Codes:
    """Return the place of each value among the card's levels, int64 array.

    Raises
    ------
    DataError
        If a value is not one of the levels.
    """
    places = {level_key(level): place for place, level in enumerate(levels)}
    codes = np.array([places.get(level_key(value), -1) for value in values], dtype=np.int64)
    if (codes < 0).any():
        raise DataError(
            "holds a value that is not one of the card's levels",
            f"column {column!r}",
            "use the frame that the card was written for",
        )
    return codes


def outcome_counts(counts: Any, outcomes: Outcomes) -> Floats:
    """Return how many rows have each outcome, float64 array of shape (outcomes.size,).

    Counts are a released frame; counts by outcome, as `value_counts` or a mapping has them; or
    counts in the card's order.

    Raises
    ------
    DataError
        If counts are negative, not finite, of the wrong number, all zero, or of a value that is no
        level.
    """
    # a Dask series too has `columns`
    if getattr(counts, "ndim", 1) == 2 and hasattr(counts, "groupby"):
        counts = counts.groupby(list(outcomes.columns), **_GROUPING).size()
    counts = _reduce(counts)
    if isinstance(counts, Mapping):
        counts = pd.Series(dict(counts))
    if isinstance(counts, pd.Series):
        found = add_up(counts.to_numpy(float), outcomes.codes(counts.index), outcomes.size)
    else:
        found = np.asarray(counts, float).ravel()
    if (
        found.shape != (outcomes.size,)
        or not np.isfinite(found).all()
        or (found < 0).any()
        or found.sum() <= 0
    ):
        raise DataError(
            "the counts must be non-negative, one per level, and not all zero",
            outcomes.where,
            "count the released rows by level",
        )
    return found


def group_counts(frame: Frame, by: Sequence[str], outcomes: Outcomes) -> tuple[pd.Index, Floats]:
    """Return the groups of kept columns, sorted, and how many of their rows have each outcome: (G,) and (G, outcomes.size)."""
    sizes = _reduce(frame.groupby([*by, *outcomes.columns], **_GROUPING).size())
    codes = outcomes.codes(sizes.index.droplevel(list(range(len(by)))))
    places, groups = pd.factorize(
        sizes.index.droplevel(list(range(len(by), sizes.index.nlevels))),
        sort=True,
        use_na_sentinel=False,
    )
    table = np.zeros((len(groups), outcomes.size))
    np.add.at(table, (places, codes), sizes.to_numpy(float))
    return groups.set_names(by), table


@freeze_class
class Moments:
    """Sums of products of standardised kept columns, by outcome."""

    # its columns `level0`, … (those of the outcomes), `z1`, `z2`, … (standardised, without missing
    # values) and `z0` = 1; not computed if it is Dask's
    frame: Frame
    n_columns: int  # how many z there are, the constant included
    scale: Floats  # what a kept column was divided by, shape (n_columns - 1,)
    # Σ z_a z_b over the rows of outcome j, shape (n_columns, n_columns, outcomes.size)
    products: Floats
    outcomes: Outcomes  # what a row can be released as

    @property
    def n_rows(self) -> float:
        """How many rows have no missing value among the kept columns."""
        return float(self.products[0, 0].sum())

    def weigh(self, coefficients: Floats, n_weighted: int) -> Floats:
        """Return Σ z_a z_b eᵐ by outcome for e = Σ_c coefficients_c z_c, m = 0, 1, 2 and the first `n_weighted` z, (3, w, w, outcomes)."""
        z = [self.frame[f"z{place}"] for place in range(self.n_columns)]
        e = sum(float(coefficient) * z_ for coefficient, z_ in zip(coefficients, z, strict=True))
        sums = {
            f"{a}-{b}-{power}": z[a] * z[b] * e**power
            for a in range(n_weighted)
            for b in range(a + 1)
            for power in (1, 2)
        }
        found = _sums_by_outcome(self.frame, sums, self.outcomes)
        result = np.zeros((3, n_weighted, n_weighted, self.outcomes.size))
        result[0] = self.products[:n_weighted, :n_weighted]
        for a in range(n_weighted):
            for b in range(a + 1):
                for power in (1, 2):
                    result[power, a, b] = result[power, b, a] = found[f"{a}-{b}-{power}"]
        return result

    def weigh_sizes(self, rows: Floats, coefficients: Floats) -> Pair:
        """Return Σ |Σ_c rows_jc z_c| by outcome, and the same times |e|, e = Σ_c coefficients_c z_c: both of shape (rows, outcomes)."""
        z = [self.frame[f"z{place}"] for place in range(self.n_columns)]

        def combine(factors: Floats) -> Any:
            return abs(sum(float(c) * z_ for c, z_ in zip(factors, z, strict=True)))

        e = combine(coefficients)
        sums = {f"{place}-0": combine(row) for place, row in enumerate(rows)}
        sums |= {f"{place}-1": combine(row) * e for place, row in enumerate(rows)}
        found = _sums_by_outcome(self.frame, sums, self.outcomes)
        one, two = (np.array([found[f"{j}-{k}"] for j in range(len(rows))]) for k in (0, 1))
        return one, two


def moments(frame: Frame, kept: Sequence[str], outcomes: Outcomes) -> Moments:
    """Return the moments of kept numeric columns by outcome; rows that lack one of them are left out.

    Raises
    ------
    SpecError
        If a kept column is not numeric, or does not vary.
    """
    names = [f"z{place}" for place in range(1, len(kept) + 1)]
    kinds = frame[list(kept)].dtypes
    if any(not pd.api.types.is_numeric_dtype(kind) for kind in kinds):
        raise SpecError(
            "a slope needs numeric kept columns",
            "slope",
            "give numbers, or indicator columns of the categories",
        )
    released = {column: f"level{place}" for place, column in enumerate(outcomes.columns)}
    part = frame[[*released, *kept]].rename(
        columns={**released, **dict(zip(kept, names, strict=True))}
    )
    part = part.dropna(subset=names).astype(dict.fromkeys(names, "float64"))
    n, means, deviations = (
        _reduce(reduction)
        for reduction in (part["z1"].count(), part[names].mean(), part[names].std(ddof=0))
    )
    centre, spread = (
        np.array([float(found[name]) for name in names]) for found in (means, deviations)
    )
    if n <= len(names) + 2 or not (spread > 1e-12 * np.abs(centre)).all():
        raise SpecError(
            "a kept column does not vary, or too few rows have them all",
            "slope",
            "leave it out: the constant is always there",
        )
    part = part.assign(
        z0=1.0,
        **{
            name: (part[name] - float(m)) / float(d)
            for name, m, d in zip(names, centre, spread, strict=True)
        },
    )
    places = range(len(names) + 1)
    sums = _sums_by_outcome(
        part,
        {f"{a}-{b}": part[f"z{a}"] * part[f"z{b}"] for a in places for b in places if b <= a},
        outcomes,
    )
    products = np.array([[sums[f"{max(a, b)}-{min(a, b)}"] for b in places] for a in places])
    return Moments(
        frame=part, n_columns=len(names) + 1, scale=spread, products=products, outcomes=outcomes
    )


def _sums_by_outcome(
    frame: Frame, terms: Mapping[str, Any], outcomes: Outcomes
) -> dict[str, Floats]:
    """Return each term's sum over the rows of each outcome."""
    keys = [f"level{place}" for place in range(len(outcomes.columns))]
    table = _reduce(frame[keys].assign(**terms).groupby(keys, **_GROUPING).sum())
    codes = outcomes.codes(table.index)
    return {name: add_up(table[name].to_numpy(), codes, outcomes.size) for name in terms}


def add_up(values: Floats, codes: Codes, n: int) -> Floats:
    """Return the sum of values in each of n groups; see `numpy.bincount`."""
    return np.bincount(codes, weights=values, minlength=n).astype(float)


@freeze_class(eq=False)
class Estimate:
    """An estimate of a quantity of the original column.

    Attributes
    ----------
    value
        A number, a Series (by level, group or covariate) or a DataFrame (groups × levels).
    standard_error
        The spread of `value` over drawing rows from a population and releasing them, of the same
        shape. For the released table itself it is an upper bound on average, since the rows are
        then fixed.
    condition_number
        The ratio of the largest to the smallest singular value that was inverted, by at least a
        half: the largest factor by which noise in the released column is amplified.
    worst_bias
        Zero where the channel determines the value and it was inverted. Otherwise the largest
        possible bias, for any original values; infinite where no bound is known. Most biases are
        much smaller.
    """

    value: Any
    standard_error: Any
    condition_number: float
    worst_bias: Any = 0.0

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Return the normal confidence interval, widened by the worst bias."""
        half = float(special.ndtri(0.5 + confidence / 2)) * self.standard_error + self.worst_bias
        return self.value - half, self.value + half
