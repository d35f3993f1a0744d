"""Opened releases of ranges: the nonparametric maximum likelihood estimate, and regression of what is known as a range."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.analysis.kept import KeptColumns
from dpdask.analysis.opened import check_no_groups, check_probabilities
from dpdask.analysis.result import Result
from dpdask.analysis.weighted import check_features
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, RangeCounts, bootstrap, npmle
from dpdask.mechanisms.card import OWN_NUMBERS
from dpdask.stats.ranges import grid_of_ranges
from dpdask.streams import RunKey, stream

Floats = NDArray[np.float64]
_N_KNOTS = 300
_REPEATS = 50
_GROUPS = 10
_PERTURBED = "the ranges are of perturbed values: so is the estimate, and only under the declared reference is it that of the original values"
_SLOW = "the distribution at a point is estimated at the rate of the cube root of the rows, so no standard error is given; use mean()"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRanges(KeptColumns):
    """Ranges that contain the values, beside the columns that were kept."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mean": ("the means of groups are not offered for ranges", "filter to_pandas() and use dpdask.inference.npmle, or use slope()"),
        "share": ("the values are known as ranges", "use histogram() or quantile(); share() is for columns that were kept"),
        "crosstab": ("the values are known as ranges, so no row has a level", "use slope(), or release with the mechanism `dip`"),
        "slope": ("a range cannot explain: only the response of a regression may be a range", "explain it by columns that were kept"),
        "npmle": ("the column was kept: its values are released", "use quantile() or histogram()"),
        "regress": ("the column was kept: its values are released", "use slope()"),
        "fit": ("the release holds rows, not weighted cells", "use slope() or regress()"),
    }

    def mean(self, column: str, *, by: str | None = None, values: Sequence[float] | None = None) -> Result:
        """Return the mean of a column; see `OpenedRelease.mean`. Its standard error is that of 50 resamples of the ranges."""
        if self._is_kept(column):
            return super(OpenedRanges, self).mean(column, by=by, values=values)
        if by is not None or values is not None:
            self._refuse("mean", column)
        counts, support = self._count(column), self._support(column, None)
        rng = stream(RunKey.insecure(0), "analysis/resample", column)  # any stream: this is post-processing
        found = bootstrap(counts, lambda estimate: estimate.moment(1), _REPEATS, rng=rng, support=support, place="middle" if support else "right")
        bias = None
        if support is not None:
            estimate = npmle(counts, support=support, place="middle")
            bias = float(estimate.masses @ (estimate.right - estimate.left)) / 2.0
        return Result(estimate=found.value, standard_error=found.standard_error, bias_bound=bias, limits=self._limits(column))

    def histogram(self, column: str, bins: int | Sequence[float] = 20) -> Result:
        """Return how many rows lie in each range of a column; see `OpenedRelease.histogram`. Ranges have no standard error."""
        if self._is_kept(column):
            return super(OpenedRanges, self).histogram(column, bins)
        edges = self._edges(column, bins)
        shares = np.diff(self.npmle(column).cdf(edges))
        index = pd.IntervalIndex.from_breaks(edges, closed="right", name=column)
        limits = (_SLOW, *self._limits(column))
        return Result(estimate=pd.Series(self.n_rows * shares, index), standard_error=None, bias_bound=None, limits=limits)

    def quantile(self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None) -> Result:
        """Return a quantile of a column, or several; see `OpenedRelease.quantile`. That of ranges has no standard error."""
        check_no_groups("quantile", column, by)
        probabilities = check_probabilities(q)
        if self._is_kept(column):
            return super(OpenedRanges, self).quantile(column, q)
        found = self.npmle(column).quantile(np.array(probabilities))
        value = float(found[0]) if np.ndim(q) == 0 else pd.Series(found, pd.Index(probabilities, name="q"))
        return Result(estimate=value, standard_error=None, bias_bound=None, limits=(_SLOW, *self._limits(column)))

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a kept column, a Series; see `OpenedRelease.share`."""
        check_no_groups("share", column, by)
        if not self._is_kept(column):
            self._refuse("share", column)
        return super(OpenedRanges, self).share(column)

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels of kept columns; see `OpenedRelease.crosstab`."""
        if not self._is_kept(first, second):
            self._refuse("crosstab", first, second)
        return super(OpenedRanges, self).crosstab(first, second)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression on kept columns; see `OpenedRelease.slope`.

        Notes
        -----
        Of a column that is released as ranges, the slopes are those of `regress`; their standard errors are a jackknife's, of 10 groups
        of rows (Wu, Jackknife, bootstrap and other resampling methods in regression analysis, 1986).
        """
        check_features("slope", response, features)
        if not self._is_kept(*features):
            self._refuse("slope", response, *features)
        if self._is_kept(response):
            return super(OpenedRanges, self).slope(response, *features)
        X, ends = self._pairs(response, features)
        group = np.arange(len(X)) % _GROUPS
        if len(X) < 2 * _GROUPS:
            raise SpecError(f"slopes need at least {2 * _GROUPS} rows", f"slope({response})", "use more rows")
        index = pd.Index(list(features))
        parts = np.array([_make_regressor(None).fit(X[group != k], ends[group != k]).estimator_.coef_ for k in range(_GROUPS)])
        error = np.sqrt((_GROUPS - 1) * parts.var(axis=0))
        estimate = _make_regressor(None).fit(X, ends).estimator_.coef_
        limits = ("the response is taken to have normal errors of one variance", *self._limits(response))
        return Result(estimate=pd.Series(estimate, index), standard_error=pd.Series(error, index), bias_bound=None, limits=limits)

    def npmle(self, column: str, *, support: tuple[float, float] | None = None) -> NPMLE:
        """Return the distribution under which a column's ranges are most likely; see `OpenedRelease.npmle`."""
        if self._is_kept(column):
            self._refuse("npmle", column)
        support = self._support(column, support)
        return npmle(self._count(column), support=support, place="middle" if support else "right")

    def regress(self, response: str, *features: str, estimator: Any = None) -> Any:
        """Return a fitted regression of a column that is released as ranges; see `OpenedRelease.regress`."""
        if self._is_kept(response):
            self._refuse("regress", response, *features)
        check_features("regress", response, features)
        if not self._is_kept(*features):
            self._refuse("slope", response, *features)
        return _make_regressor(estimator).fit(*self._pairs(response, features))

    def _answers(self, name: str) -> set[str]:
        if self._is_kept(name):
            return super(OpenedRanges, self)._answers(name)
        return {"mean", "histogram", "quantile", "slope", "npmle", "regress"}

    def _ends(self, name: str) -> list[str]:
        released: list[str] = self._column(name)["released_as"]
        return released[:2]

    def _count(self, name: str) -> RangeCounts:
        """Return the counts of a column's ranges; rows whose value is missing are left out."""
        low, high = self._ends(name)
        ranges = self.to_pandas([low, high]).dropna()
        lower, upper = (ranges[end].to_numpy(dtype=np.float64) for end in (low, high))
        return RangeCounts.of_batch(grid_of_ranges(lower, upper, _N_KNOTS), lower, upper)

    def _support(self, name: str, given: tuple[float, float] | None) -> tuple[float, float] | None:
        """Return the bounds of a column's values: those given, or the declared ones, so wide that they hold all anchors."""
        bounds = self._column(name).get("bounds")
        if given is not None or bounds is None or self._column(name).get("numbers") != OWN_NUMBERS:
            return given
        knots = self._count(name).knots
        return min(float(bounds[0]), float(knots[0])), max(float(bounds[1]), float(knots[-1]))

    def _pairs(self, response: str, features: Sequence[str]) -> tuple[pd.DataFrame, Floats]:
        """Return the features and the ranges of the rows that have all of them."""
        ends = self._ends(response)
        rows = self.to_pandas([*features, *ends]).dropna()
        return rows[list(features)], rows[ends].to_numpy(dtype=np.float64)

    def _limits(self, name: str) -> tuple[str, ...]:
        return (_PERTURBED,) if name in (self.content["guarantee"].get("epsilon_private") or ()) else ()


def _make_regressor(estimator: Any) -> Any:
    try:
        module = importlib.import_module("dpdask.inference.interval_regression")
    except ModuleNotFoundError:
        raise SpecError("interval regression needs scikit-learn", "regress", "install dpdask[inference]") from None
    return module.IntervalRegressor(estimator)
