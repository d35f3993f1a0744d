"""Answers about a column of numbers from the public channel of its ranks, whatever the distribution of its original values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.results import Result
from dpdask.analysis.values import DateScale, in_units, index_ranges
from dpdask.arrays import Ends, Floats
from dpdask.inference.noisy_ranks import Bounds, NoisyRanks
from dpdask.inference.tallies import Codes, Outcomes, moments

_ANY = (
    "no distribution of the original values is assumed: the bound on the bias holds for any that the released rows may have come from, and is "
    "large where the noise hides what is asked"
)
_HIDDEN = "the noise hides the answer, or that of some groups: its interval is all that is possible"


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: a cached property
class RankAnswers:
    """The questions that `Points` answers, for one column of numbers and kept groups."""

    frame: pd.DataFrame  # the released column, and what a question is about besides
    column: NoisyRanks
    scale: DateScale | None  # of dates
    within: Ends | None  # what numbers are clipped to
    limits: tuple[str, ...]

    @cached_property
    def _codes(self) -> Codes:
        """The outcome of each released value; the column is the first one."""
        return self.column.code(to_floats(self.frame.iloc[:, 0], self.scale))

    @cached_property
    def _counts(self) -> Floats:
        """How many rows have each outcome."""
        return np.bincount(self._codes, minlength=self.column.n_outcomes).astype(float)

    @property
    def _limits(self) -> tuple[str, ...]:
        return (_ANY, *self.limits, *([WITHOUT_NULLS] if self.column.has_null else []))

    def mean(self, _name: str, by: str | None = None, **_options: Any) -> Result:
        """Return the mean of the clipped values, or of each group."""
        assert self.within is not None
        if by is None:
            return self._tell(self.column.mean(self._counts[None, :], self.within), self._limits)
        n = self.column.n_outcomes
        place, groups = pd.factorize(self.frame[by], sort=True, use_na_sentinel=False)
        table = np.bincount(n * place + self._codes, minlength=n * len(groups))
        found = self.column.mean(table.reshape(-1, n).astype(float), self.within)
        return self._tell(found, self._limits, pd.Index(groups, name=by))

    def slope(self, name: str, features: Sequence[str]) -> Result:
        """Return the slopes of the values on kept columns."""
        assert self.within is not None
        coded = self.frame[list(features)].assign(**{name: self._codes})
        levels = tuple(range(self.column.n_outcomes))
        found = moments(coded, features, Outcomes(columns=(name,), levels=(levels,)))
        parts = self.column.slope(found, self.within)
        estimate, error, bias = (pd.Series(part, pd.Index(features)) for part in parts)
        return Result(estimate=estimate, standard_error=error, bias_bound=bias, limits=self._limits)

    def histogram(self, name: str, edges: Floats) -> Result:
        """Return how many rows lie in each range."""
        ends = np.append(edges[1:-1], np.nextafter(edges[-1], np.inf))
        parts = [
            self._tell(
                self.column.share(self._counts, float(low), float(end)), (_ANY, *self.limits)
            )
            for low, end in zip(edges[:-1], ends, strict=True)
        ]
        index = index_ranges(edges, self.scale, name)
        n = float(self._counts.sum())
        return Result.gather(parts, index).change(lambda part: n * part)

    def quantile(self, _name: str, q: float) -> Result:
        """Return a quantile."""
        found = self.column.quantile(self._counts, q)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = (self._in_units(end) for end in found.find_ends(deviations))
            return low, high

        return Result(
            estimate=self._in_units(found.value),
            standard_error=None,
            limits=self._limits,
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
            limits=(*limits, *([_HIDDEN] if bounds.is_hidden.any() else [])),
            find_ends=find_ends,
        )


def to_floats(released: pd.Series, scale: DateScale | None) -> Floats:
    """Return released values as numbers, NaN of null."""
    if scale is not None:
        return scale.to_numbers(released)
    return released.to_numpy(float, na_value=np.nan)
