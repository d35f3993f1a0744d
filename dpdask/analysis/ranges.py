"""Opened releases of ranges: the nonparametric maximum likelihood estimate, and regression of what is known as a range."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.opened import Result
from dpdask.analysis.points import KeptColumns
from dpdask.analysis.values import count_since_1970
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, RangeCounts, bootstrap, npmle
from dpdask.inference.range_estimates import (
    Anchors,
    count_ranges,
    find_quantile_ends,
    share_between,
    slopes_of_pseudo_values,
)
from dpdask.mechanisms.card import OWN_NUMBERS, microseconds_of
from dpdask.streams import RunKey, stream

Floats = NDArray[np.float64]
_N_KNOTS = 300
_REPEATS = 50
_GROUPS = 10
_NEAREST = (50, 100, 200, 400, 800, 1600)  # ends of ranges
_PERTURBED = "the ranges are of perturbed values: so is the estimate, and only under the declared reference is it that of the original values"
_TOLD_TOO_LITTLE = (
    "groups of too few rows, whose ranges do not tell where their values lie, have no estimate"
)
_SLOW = "the distribution at a point is estimated at the rate of the cube root of the rows, so no standard error is given"
_MONOTONE = "the interval uses no more than that anchors are drawn independently of values, so it is wider than that of a smooth distribution would be"
_BY_ANCHORS = "the slope is of numbers that have the values' averages, whatever the law of the values: the anchors' distribution gives them"
_FEW_DECIDE = "a few rows decide on the slope, so no standard error is known"
_NORMAL = "the response is taken to have normal errors of one variance: if they have another law, the slope is off by an unknown amount"
_FAR = (
    "the bound on the bias is larger than the mean itself: values may lie far beyond the anchors, or the anchors lie so far apart that the ranges "
    "tell little; see npmle(), or release ranges with anchors where the values are"
)
_COARSE = "it lies between two ends of ranges that are as far apart as most values are, and nothing tells where between them; see npmle()"
_THIN = "few of the ranges end among the values, so this is very uncertain; release ranges with anchors where the values are"
_UNBOUNDED = (
    "the card gives no bounds in the numbers of the ranges, so no bound on the bias is known"
)
_UNMOVED = "resamples of the ranges do not vary, since the anchors lie too far apart, so no standard error is given"
_FEW_ENDS = 200  # ranges
_STILL = 1e-9  # of the numbers: resamples that differ by less differ by rounding alone


@dataclass(frozen=True, slots=True)
class _Ranges:
    """The ranges of a column, or of the rows of one group."""

    lower: Floats
    upper: Floats
    bounds: tuple[float, float] | None  # declared, in the numbers of the ranges

    def count(self) -> RangeCounts:
        """Return the counts of the ranges, with finer knots where their mass is."""
        return count_ranges(self.lower, self.upper, _N_KNOTS, bounds=self.bounds)

    def widen(self, counts: RangeCounts) -> tuple[float, float] | None:
        """Return the declared bounds, so wide that they hold all anchors."""
        if self.bounds is None:
            return None
        low, high = self.bounds
        return min(low, float(counts.knots[0])), max(high, float(counts.knots[-1]))

    def fit(
        self,
        support: tuple[float, float] | None = None,
        knots: Sequence[float] | None = None,
    ) -> NPMLE:
        if knots is None:
            counts = self.count()
        else:
            try:
                # a list of ends may have repeats
                places = np.unique(np.asarray(knots, dtype=np.float64))
            except (TypeError, ValueError):
                what = "knots are numbers, those of the ranges' ends"
                use = "write them as in knots=[0, 10, 100, 1000]"
                raise SpecError(what, "npmle", use) from None
            counts = RangeCounts.of_batch(places, self.lower, self.upper)
        support = support or self.widen(counts)
        return npmle(counts, support=support, place="middle" if support else "right")

    def is_thin(self, estimate: NPMLE) -> bool:
        """Return whether few ranges end where nine tenths of the mass lie."""
        low, high = _find_middle(estimate)
        ends = np.stack([self.lower, self.upper])
        return bool(((ends >= low) & (ends <= high)).any(axis=0).sum() < _FEW_ENDS)

    def doubt(self, estimate: NPMLE, support: tuple[float, float]) -> float:
        """Return how far more mass beyond the outermost knots may move the mean, from there: as much as the ranges nearest to them allow.

        Of the rows that say whether their value is above an anchor beyond t, those that do are at
        least the share of values beyond all anchors; two standard deviations and the rule of three
        are added. The best t is taken.
        """
        total = 0.0
        knots = estimate.knots
        for low, high, end, knot, places in (
            (self.lower, self.upper, support[1], knots[-1], estimate.left),
            (-self.upper, -self.lower, -support[0], -knots[0], -estimate.right),
        ):
            if end <= knot:
                continue
            beyond = float(estimate.masses[places >= knot].sum())
            above, below = (np.sort(side[np.isfinite(side)])[::-1] for side in (low, high))
            ends, bounds = np.sort(np.append(above, below)), []
            for size in _NEAREST:
                t = ends[-min(size, len(ends))]
                n_above, n = (above >= t).sum(), (ends >= t).sum()
                share = n_above / n
                most = share + 2.0 * np.sqrt(share * (1.0 - share) / n) + 3.0 / n
                bounds.append(max(0.0, most - beyond) * (end - knot))
            total += min(bounds)
        return float(total)


def _find_middle(estimate: NPMLE) -> tuple[float, float]:
    """Return the ends of what nine tenths of the mass lie in."""
    low, high = np.searchsorted(np.cumsum(estimate.masses), [0.05, 0.95])
    return float(estimate.left[low]), float(estimate.right[min(high, len(estimate.right) - 1)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRanges(KeptColumns):
    """Ranges that contain the values, beside the columns that were kept."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mean": (
            "ranges have no levels and are not clipped, and their groups are those of a kept column",
            "leave out `values` and `within`, and group by a column that was kept",
        ),
        "quantile": (
            "the groups of ranges are those of a kept column, and take one probability",
            "group by a column that was kept, for one q",
        ),
        "share": (
            "the values are known as ranges",
            "use histogram() or quantile(); share() is for columns that were kept",
        ),
        "crosstab": (
            "the values are known as ranges, so no row has a level",
            "use slope(), or release with the mechanism `dip`",
        ),
        "slope": (
            "a range cannot explain: only the response of a regression may be a range",
            "explain it by columns that were kept",
        ),
        "npmle": ("the column was kept: its values are released", "use quantile() or histogram()"),
        "regress": ("the column was kept: its values are released", "use slope()"),
        "fit": ("the release holds rows, not weighted cells", "use slope() or regress()"),
    }

    def _plan(self, question: str, names: Sequence[str], **options: Any) -> Callable[[], Any]:
        first, *others = names
        if question in ("slope", "regress"):
            if question == "regress" and self._is_kept(first):
                raise self._refusal(question, *names)
            if not self._is_kept(*others):
                raise self._refusal("slope", *names)
            self._check_no_dates(others)
        if self._is_kept(first) and (self._is_kept(*others) or question in ("mean", "quantile")):
            return super(OpenedRanges, self)._plan(question, names, **options)
        grouped, q = self._is_kept(*others), options.get("q", 0.5)
        match question:
            case "mean" if grouped and options.get("values") is options.get("within") is None:
                return lambda: self._for_each(self._mean, first, *others)
            case "quantile" if grouped and (not others or isinstance(q, float)):
                return lambda: self._for_each(partial(self._quantile_of, q=q), first, *others)
            case "histogram":
                return lambda: self._histogram_of(first, options["bins"])
            case "slope":
                return lambda: self._slope(first, others)
            case "npmle":
                return lambda: self._ranges(first, self._rows(first)).fit(**options)
            case "regress":
                return lambda: _regress(options["estimator"], first, *self._pairs(first, others))
        raise self._refusal(question, *names)

    def _for_each(
        self, find: Callable[[str, _Ranges], Result], column: str, by: str | None = None
    ) -> Result:
        """Return what is estimated from a column's ranges, or from those of each group; a group whose ranges tell too little has NaN."""
        if by is None:
            return find(column, self._ranges(column, self._rows(column)))
        parts, limits = {}, []
        for level, rows in self._rows(column, by).groupby(by, sort=True):
            try:
                parts[level] = find(column, self._ranges(column, rows))
            except SpecError:
                parts[level] = Result(estimate=np.nan, standard_error=np.nan, bias_bound=np.nan)
                limits = [_TOLD_TOO_LITTLE]
        errors = [part.standard_error for part in parts.values()]
        if any(error is not None and not np.isnan(error) for error in errors):
            for level, part in parts.items():
                if part.standard_error is None:
                    parts[level] = replace(part, standard_error=np.nan)
        found = Result.gather(list(parts.values()), pd.Index(list(parts), name=by))
        return replace(found, limits=(*found.limits, *limits))

    def _mean(self, column: str, ranges: _Ranges) -> Result:
        counts = ranges.count()
        support = ranges.widen(counts)
        # any stream: this is post-processing
        rng = stream(RunKey.insecure(0), "analysis/resample", column).seed_generator()
        found = bootstrap(
            counts,
            lambda estimate: estimate.moment(1),
            _REPEATS,
            rng=rng,
            support=support,
            place="middle" if support else "right",
        )
        limits, bias, error = [*self._limits(column)], None, None
        if support is None:
            limits.append(_UNBOUNDED)
        else:
            estimate = npmle(counts, support=support, place="middle")
            bias = float(estimate.masses @ (estimate.right - estimate.left)) / 2.0
            bias += ranges.doubt(estimate, support)
            # a date of 0 means nothing
            if bias > abs(found.value) / 2.0 and not self._is_of_dates(column):
                limits.append(_FAR)
        if found.standard_error > _STILL * max(abs(found.value), float(np.ptp(counts.knots))):
            error = found.standard_error
        else:
            limits.append(_UNMOVED)
        return Result(
            estimate=found.value, standard_error=error, bias_bound=bias, limits=tuple(limits)
        )

    def _histogram_of(self, column: str, bins: int | Sequence[float]) -> Result:
        edges, rows = self._edges(column, bins), self._rows(column)
        ranges = self._ranges(column, rows)
        fitted = ranges.fit()
        index = pd.IntervalIndex.from_breaks(edges, closed="right", name=column)
        shares = np.diff(fitted.cdf(edges))
        estimate = pd.Series(len(rows) * shares, index)
        limits = [_THIN] if ranges.is_thin(fitted) else []
        if len(rows) < self.n_rows:
            limits.append(WITHOUT_NULLS)
        anchors = self._anchors(column, ranges)
        if anchors is None:
            return self._without_error(column, estimate, limits)
        low, high = self._bounds_of(column) or (-math.inf, math.inf)
        ends = [-math.inf if edge < low else math.inf if edge >= high else edge for edge in edges]

        def find_ends(deviations: float) -> tuple[pd.Series, pd.Series]:
            parts = np.array(
                [
                    share_between(anchors, ranges.lower, ranges.upper, each, deviations)
                    for each in pairwise(ends)
                ]
            )
            # how many rows have a value is drawn, too
            drawn = deviations * shares * math.sqrt(1.0 / len(rows) - 1.0 / self.n_rows)
            low_part, high_part = (
                np.hypot(np.maximum(side, 0.0), drawn)
                for side in (shares - parts[:, 0], parts[:, 1] - shares)
            )
            low_counts = pd.Series(len(rows) * np.maximum(shares - low_part, 0.0), index)
            return low_counts, pd.Series(len(rows) * (shares + high_part), index)

        return self._with_ends(column, estimate, limits, find_ends)

    def _quantile_of(self, column: str, ranges: _Ranges, *, q: float | Sequence[float]) -> Result:
        fitted = ranges.fit()
        quantiles = fitted.quantile(np.atleast_1d(np.array(q)))
        low, high = _find_middle(fitted)
        places = np.minimum(np.searchsorted(fitted.points, quantiles), len(fitted.points) - 1)
        limits = []
        if ((fitted.right - fitted.left)[places] > (high - low) / 2.0).any():
            limits.append(_COARSE)
        elif ranges.is_thin(fitted):
            limits.append(_THIN)
        several = None if isinstance(q, float) else pd.Index(q, name="q")
        value = float(quantiles[0]) if several is None else pd.Series(quantiles, several)
        anchors = self._anchors(column, ranges)
        if anchors is None:
            return self._without_error(column, value, limits)

        def find_ends(deviations: float) -> tuple[Any, Any]:
            parts = np.array(
                [
                    find_quantile_ends(anchors, ranges.lower, ranges.upper, each, deviations)
                    for each in np.atleast_1d(np.array(q))
                ]
            )
            lows, highs = np.minimum(parts[:, 0], quantiles), np.maximum(parts[:, 1], quantiles)
            if several is None:
                return float(lows[0]), float(highs[0])
            return pd.Series(lows, several), pd.Series(highs, several)

        return self._with_ends(column, value, limits, find_ends)

    def _with_ends(
        self,
        column: str,
        estimate: Any,
        limits: Sequence[str],
        find_ends: Callable[[float], tuple[Any, Any]],
    ) -> Result:
        return Result(
            estimate=estimate,
            standard_error=None,
            bias_bound=0.0,
            limits=(_MONOTONE, *limits, *self._limits(column)),
            find_ends=find_ends,
        )

    def _without_error(self, column: str, estimate: Any, limits: Sequence[str]) -> Result:
        limits = (_SLOW, *limits, *self._limits(column))
        return Result(estimate=estimate, standard_error=None, bias_bound=None, limits=limits)

    def _anchors(self, column: str, ranges: _Ranges) -> Anchors | None:
        """Return the anchors of a column; None if its design tells too little of them, or they do not reach all values."""
        ends = np.concatenate([ranges.lower, ranges.upper])
        ends = ends[np.isfinite(ends)]
        whole = bool((ends == np.round(ends)).all())
        design = self._column(column).get("design")  # cards of 0.2.0 have none
        anchors = design and Anchors.of_design(design, whole=whole)
        if anchors is None or ranges.bounds is None:
            return None
        low, high = anchors.support
        # the anchors of whole numbers are rounded down
        reaches = low <= ranges.bounds[0] and ranges.bounds[1] <= high + anchors.step
        return anchors if reaches and anchors.is_even(ranges.lower, ranges.upper) else None

    def _slope(self, response: str, features: Sequence[str]) -> Result:
        """Return least-squares slopes: of pseudo-values where the anchors are known; otherwise of `regress`, with a jackknife's errors, of 10 groups of rows.

        References
        ----------
        Wu, Jackknife, bootstrap and other resampling methods in regression analysis (1986).
        """
        X, ends = self._pairs(response, features)
        if len(X) < 2 * _GROUPS:
            what = f"slopes need at least {2 * _GROUPS} rows"
            raise SpecError(what, f"slope({response})", "use more rows")
        ranges = _Ranges(ends[:, 0], ends[:, 1], self._bounds_of(response))
        anchors = self._anchors(response, ranges)
        with warnings.catch_warnings():
            # `limits` says it once
            warnings.filterwarnings("ignore", "interval regression did not converge")
            whole = _regress(None, response, X, ends)
            if anchors is None:
                return self._slope_of_normal(response, X, ends, whole)
        # any guess will do: the better it is, the smaller is the error
        pseudo = anchors.pseudo_values(ranges.lower, ranges.upper, whole.predict(X))
        beta, error = slopes_of_pseudo_values(pseudo, X.to_numpy(dtype=np.float64))
        return Result(
            estimate=pd.Series(beta, X.columns),
            standard_error=None if error is None else pd.Series(error, X.columns),
            bias_bound=0.0,
            limits=(
                _BY_ANCHORS,
                *([] if error is not None else [_FEW_DECIDE]),
                *self._limits(response),
            ),
        )

    def _slope_of_normal(self, response: str, X: pd.DataFrame, ends: Floats, whole: Any) -> Result:
        group = np.arange(len(X)) % _GROUPS
        samples = (group != k for k in range(_GROUPS))
        parts = [_regress(None, response, X[chosen], ends[chosen]) for chosen in samples]
        limits = [_NORMAL]
        if n_failed := sum(not fit.converged_ for fit in [whole, *parts]):
            limits.append(
                f"the fit did not converge in {n_failed} of {_GROUPS + 1} samples: the ranges tell too little for slopes"
            )
        slopes = [fit.estimator_.coef_ for fit in parts]
        return Result(
            estimate=pd.Series(whole.estimator_.coef_, X.columns),
            standard_error=pd.Series(np.sqrt((_GROUPS - 1) * np.var(slopes, axis=0)), X.columns),
            bias_bound=None,
            limits=(*limits, *self._limits(response)),
        )

    def _ends(self, name: str) -> list[str]:
        released: list[str] = self._column(name)["released_as"]
        return released[:2]

    def _rows(self, name: str, *others: str) -> pd.DataFrame:
        """Return a column's ranges, with other columns; rows that miss one of them are left out."""
        return self.to_pandas([*others, *self._ends(name)]).dropna()

    def _ranges(self, name: str, rows: pd.DataFrame) -> _Ranges:
        lower, upper = (rows[end].to_numpy(dtype=np.float64) for end in self._ends(name))
        return _Ranges(lower, upper, self._bounds_of(name))

    def _bounds_of(self, name: str) -> tuple[float, float] | None:
        """Return the declared bounds of a column in the numbers of its ranges; None if there are none, or its card does not tell which numbers."""
        column = self._column(name)
        bounds, micro = column.get("bounds"), microseconds_of(column.get("numbers"))
        if bounds is None or (micro is None and column.get("numbers") != OWN_NUMBERS):
            return None
        low, high = (
            float(bound)
            if isinstance(bound, int | float)
            else count_since_1970(str(bound), micro or 1, last=last)
            for bound, last in zip(bounds, (False, True), strict=True)
        )
        return low, high

    def _pairs(self, response: str, features: Sequence[str]) -> tuple[pd.DataFrame, Floats]:
        """Return the features, an indicator for each level of a text but the first, and the ranges of the rows that have all of them."""
        rows = self._rows(response, *features)
        X = pd.get_dummies(rows[list(features)], drop_first=True, dtype=float)
        return X, rows[self._ends(response)].to_numpy(dtype=np.float64)

    def _limits(self, name: str) -> tuple[str, ...]:
        perturbed = self.content["guarantee"].get("epsilon_private") or ()
        return (_PERTURBED,) if name in perturbed else ()


def _regress(estimator: Any, response: str, X: pd.DataFrame, ends: Floats) -> Any:
    """Return a fitted regression of ranges; refuse ranges that determine none."""
    try:
        module = importlib.import_module("dpdask.inference.interval_regression")
    except ModuleNotFoundError:
        use = "install dpdask[inference]"
        raise SpecError("interval regression needs scikit-learn", "regress", use) from None
    try:
        return module.IntervalRegressor(estimator).fit(X, ends)
    except module.UnidentifiedError:
        what = "the ranges tell too little for a regression"
        use = "release ranges with anchors where values are"
        raise SpecError(what, f"column {response!r}", use) from None
