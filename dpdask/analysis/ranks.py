"""Answers about a column of numbers from the public channel of its ranks, whatever the distribution of its original values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.results import Result
from dpdask.analysis.values import DateScale, in_units, index_ranges
from dpdask.inference.noisy_ranks import Bounds, NoisyRanks
from dpdask.inference.tallies import Codes, Floats, Outcomes, moments

_ANY = (
    "no distribution of the original values is assumed: the bound on the bias holds for any that the released rows may have come from, and is "
    "large where the noise hides what is asked"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnswers:
    """The questions that `Points` answers, for one column of numbers and kept groups."""

    name: str
    column: NoisyRanks
    scale: DateScale | None  # of dates
    limits: tuple[str, ...]

    def code(self, released: pd.Series) -> Codes:
        """Return the outcome of each released value."""
        return self.column.code(to_floats(released, self.scale))

    def count(self, released: pd.Series) -> Floats:
        """Return how many rows have each outcome."""
        codes = self.code(released)
        return np.bincount(codes, minlength=self.column.n_outcomes).astype(np.float64)

    def mean(
        self, table: Floats, within: tuple[float, float], groups: pd.Index | None = None
    ) -> Result:
        """Return the mean of the clipped values, or of each group; a table has a row for each."""
        limits = (_ANY, *self.limits, *([WITHOUT_NULLS] if self.column.has_null else []))
        return self._tell(self.column.mean(table, within), limits, groups)

    def slope(
        self, frame: pd.DataFrame, features: Sequence[str], possible: tuple[float, float]
    ) -> Result:
        """Return the slopes of the values on kept columns."""
        coded = frame[list(features)].assign(**{self.name: self.code(frame[self.name])})
        levels = tuple(range(self.column.n_outcomes))
        found = moments(coded, features, Outcomes(columns=(self.name,), levels=(levels,)))
        parts = self.column.slope(found, possible)
        estimate, error, bias = (pd.Series(part, pd.Index(list(features))) for part in parts)
        limits = (_ANY, *self.limits, *([WITHOUT_NULLS] if self.column.has_null else []))
        return Result(estimate=estimate, standard_error=error, bias_bound=bias, limits=limits)

    def histogram(self, counts: Floats, edges: Floats) -> Result:
        """Return how many rows lie in each range."""
        ends = np.append(edges[1:-1], np.nextafter(edges[-1], np.inf))
        parts = [
            self._tell(self.column.share(counts, float(low), float(end)), (_ANY, *self.limits))
            for low, end in zip(edges[:-1], ends, strict=True)
        ]
        index = index_ranges(edges, self.scale, self.name)
        return _scale(Result.gather(parts, index), float(counts.sum()))

    def quantile(self, counts: Floats, q: float | Sequence[float]) -> Result:
        """Return a quantile, or several."""
        if not isinstance(q, float):
            parts = [self.quantile(counts, each) for each in q]
            return Result.gather(parts, pd.Index(q, name="q"))
        found = self.column.quantile(counts, q)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = (self._in_units(end) for end in found.find_ends(deviations))
            return low, high

        has_null = self.column.has_null
        return Result(
            estimate=self._in_units(found.value),
            standard_error=None,
            limits=(_ANY, *self.limits, *([WITHOUT_NULLS] if has_null else [])),
            find_ends=find_ends,
        )

    def _in_units(self, value: float) -> Any:
        return in_units(self.scale, value, 0.0, 0.0)[0]

    def _tell(
        self,
        bounds: Bounds,
        limits: tuple[str, ...],
        groups: pd.Index | None = None,
    ) -> Result:
        """Return averages as a result: of groups as Series."""
        low, high = bounds.find_ends(0.0)
        value, bias = bounds.value, np.maximum(high - low, 0.0) / 2.0

        def shape(part: Floats) -> Any:
            return float(part[0]) if groups is None else pd.Series(part, groups)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            # what the bound on the bias adds again
            low, high = bounds.find_ends(deviations)
            ends = (low + bias, high - bias)
            first, last = (in_units(self.scale, shape(end), 0.0, 0.0)[0] for end in ends)
            return first, last

        parts = in_units(self.scale, *map(shape, (value, bounds.standard_error, bias)))
        unknown = groups is None and bool(np.isnan(bounds.standard_error[0]))
        return Result(
            estimate=parts[0],
            standard_error=None if unknown else parts[1],
            bias_bound=parts[2],
            limits=limits,
            find_ends=find_ends,
        )


def to_floats(released: pd.Series, scale: DateScale | None) -> Floats:
    """Return released values as numbers, NaN of null."""
    if scale is not None:
        return scale.to_numbers(released)
    return released.to_numpy(dtype=np.float64, na_value=np.nan)


def _scale(found: Result, factor: float) -> Result:
    """Return a result times a number."""
    finder: Callable[[float], tuple[Any, Any]] | None = found.find_ends
    assert finder is not None

    def find_ends(deviations: float) -> tuple[Any, Any]:
        low, high = finder(deviations)
        return factor * low, factor * high

    return Result(
        estimate=factor * found.estimate,
        standard_error=None if found.standard_error is None else factor * found.standard_error,
        bias_bound=factor * found.bias_bound,
        limits=found.limits,
        find_ends=find_ends,
    )
