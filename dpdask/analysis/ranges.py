"""Opened releases of ranges: the nonparametric maximum likelihood estimate, and regression of what is known as a range."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.analysis.opened import Result
from dpdask.analysis.points import WITHOUT_NULLS, KeptColumns, count_since_1970
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, RangeCounts, bootstrap, npmle
from dpdask.inference.range_estimates import count_ranges
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRanges(KeptColumns):
    """Ranges that contain the values, beside the columns that were kept."""

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mean": (
            "ranges have no levels, and their groups are those of a kept column",
            "leave out `values`, and group by a column that was kept",
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
            case "mean" if grouped and options.get("values") is None:
                return lambda: self._for_each(lambda rows: self._mean(first, rows), first, *others)
            case "quantile" if grouped and (not others or isinstance(q, float)):
                return lambda: self._for_each(
                    lambda rows: self._quantile_of(first, rows, q), first, *others
                )
            case "histogram":
                return lambda: self._histogram_of(first, options["bins"])
            case "slope":
                return lambda: self._slope(first, others)
            case "npmle":
                return lambda: self._fit(first, self._ranges(first), **options)
            case "regress":
                return lambda: _regress(options["estimator"], first, *self._pairs(first, others))
        raise self._refusal(question, *names)

    def _for_each(
        self, find: Callable[[pd.DataFrame], Result], column: str, by: str | None = None
    ) -> Result:
        """Return what is estimated from a column's ranges, or from those of each group; a group whose ranges tell too little has NaN."""
        if by is None:
            return find(self._ranges(column))
        parts, left_out = {}, False
        for level, rows in self._ranges(column, by).groupby(by, sort=True):
            try:
                parts[level] = find(rows)
            except SpecError:
                parts[level], left_out = (
                    Result(estimate=np.nan, standard_error=np.nan, bias_bound=np.nan),
                    True,
                )
        if any(
            part.standard_error is not None and not np.isnan(part.standard_error)
            for part in parts.values()
        ):
            parts = {
                level: replace(part, standard_error=np.nan) if part.standard_error is None else part
                for level, part in parts.items()
            }
        found = Result.gather(list(parts.values()), pd.Index(list(parts), name=by))
        return replace(found, limits=(*found.limits, _TOLD_TOO_LITTLE)) if left_out else found

    def _histogram_of(self, column: str, bins: int | Sequence[float]) -> Result:
        edges, rows = self._edges(column, bins), self._ranges(column)
        fitted = self._fit(column, rows)
        index = pd.IntervalIndex.from_breaks(edges, closed="right", name=column)
        thin = [_THIN] if self._is_thin(column, rows, fitted) else []
        limits = (
            _SLOW,
            *thin,
            *([WITHOUT_NULLS] if len(rows) < self.n_rows else []),
            *self._limits(column),
        )
        estimate = pd.Series(len(rows) * np.diff(fitted.cdf(edges)), index)
        return Result(estimate=estimate, standard_error=None, bias_bound=None, limits=limits)

    def _quantile_of(self, column: str, rows: pd.DataFrame, q: float | Sequence[float]) -> Result:
        estimate = self._fit(column, rows)
        quantiles = estimate.quantile(np.atleast_1d(np.array(q)))
        value = (
            float(quantiles[0])
            if isinstance(q, float)
            else pd.Series(quantiles, pd.Index(q, name="q"))
        )
        coarse = (
            [_COARSE]
            if _is_coarse(estimate, quantiles)
            else [_THIN]
            if self._is_thin(column, rows, estimate)
            else []
        )
        return Result(
            estimate=value,
            standard_error=None,
            bias_bound=None,
            limits=(_SLOW, *coarse, *self._limits(column)),
        )

    def _slope(self, response: str, features: Sequence[str]) -> Result:
        """Return the slopes of `regress`, with a jackknife's errors, of 10 groups of rows.

        References
        ----------
        Wu, Jackknife, bootstrap and other resampling methods in regression analysis (1986).
        """
        X, ends = self._pairs(response, features)
        group = np.arange(len(X)) % _GROUPS
        if len(X) < 2 * _GROUPS:
            raise SpecError(
                f"slopes need at least {2 * _GROUPS} rows", f"slope({response})", "use more rows"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "interval regression did not converge"
            )  # `limits` says it once
            whole, *parts = (
                _regress(None, response, X[chosen], ends[chosen])
                for chosen in (group >= 0, *(group != k for k in range(_GROUPS)))
            )
        n_failed = sum(not each.converged_ for each in (whole, *parts))
        error = np.sqrt(
            (_GROUPS - 1) * np.array([part.estimator_.coef_ for part in parts]).var(axis=0)
        )
        failed = (
            [
                f"the fit did not converge in {n_failed} of {_GROUPS + 1} samples: the ranges tell too little for slopes"
            ]
            if n_failed
            else []
        )
        limits = (
            "the response is taken to have normal errors of one variance",
            *failed,
            *self._limits(response),
        )
        estimate, error = (pd.Series(part, X.columns) for part in (whole.estimator_.coef_, error))
        return Result(estimate=estimate, standard_error=error, bias_bound=None, limits=limits)

    def _mean(self, column: str, rows: pd.DataFrame) -> Result:
        counts = self._count(column, rows)
        support = self._support(column, counts)
        rng = stream(
            RunKey.insecure(0), "analysis/resample", column
        ).seed_generator()  # any stream: this is post-processing
        found = bootstrap(
            counts,
            lambda estimate: estimate.moment(1),
            _REPEATS,
            rng=rng,
            support=support,
            place="middle" if support else "right",
        )
        bias = None
        if support is not None:
            estimate = npmle(counts, support=support, place="middle")
            bias = float(estimate.masses @ (estimate.right - estimate.left)) / 2.0 + self._doubt(
                column, rows, estimate, support
            )
        size = max(abs(found.value), float(np.ptp(counts.knots)))
        error = found.standard_error if found.standard_error > _STILL * size else None
        is_of_dates = (
            microseconds_of(self._column(column).get("numbers")) is not None
        )  # whose 0 means nothing
        limits = (
            [_UNBOUNDED]
            if bias is None
            else [_FAR]
            if bias > abs(found.value) / 2.0 and not is_of_dates
            else []
        )
        limits += [_UNMOVED] if error is None else []
        return Result(
            estimate=found.value,
            standard_error=error,
            bias_bound=bias,
            limits=(*self._limits(column), *limits),
        )

    def _ends(self, name: str) -> list[str]:
        released: list[str] = self._column(name)["released_as"]
        return released[:2]

    def _ranges(self, name: str, *others: str) -> pd.DataFrame:
        """Return a column's ranges, with other columns; rows that miss one of them are left out."""
        return self.to_pandas([*others, *self._ends(name)]).dropna()

    def _count(self, name: str, rows: pd.DataFrame) -> RangeCounts:
        """Return the counts of a column's ranges, with finer knots where their mass is."""
        return count_ranges(*self._two_ends(name, rows), _N_KNOTS, bounds=self._bounds_of(name))

    def _two_ends(self, name: str, rows: pd.DataFrame) -> tuple[Floats, Floats]:
        lower, upper = (rows[end].to_numpy(dtype=np.float64) for end in self._ends(name))
        return lower, upper

    def _is_thin(self, name: str, rows: pd.DataFrame, estimate: NPMLE) -> bool:
        """Return whether few ranges end where nine tenths of the mass lie."""
        low, high = np.searchsorted(np.cumsum(estimate.masses), [0.05, 0.95])
        ends = np.stack(self._two_ends(name, rows))
        inside = (ends >= estimate.left[low]) & (
            ends <= estimate.right[min(high, len(estimate.right) - 1)]
        )
        return bool(inside.any(axis=0).sum() < _FEW_ENDS)

    def _doubt(
        self, name: str, rows: pd.DataFrame, estimate: NPMLE, support: tuple[float, float]
    ) -> float:
        """Return how far more mass beyond the outermost knots may move the mean, from there: as much as the ranges nearest to them allow.

        Of the rows that say whether their value is above an anchor beyond t, those that do are at
        least the share of values beyond all anchors; two standard deviations and the rule of three
        are added. The best t is taken.
        """
        lower, upper = self._two_ends(name, rows)
        total = 0.0
        for low, high, end, knot in (
            (lower, upper, support[1], estimate.knots[-1]),
            (-upper, -lower, -support[0], -estimate.knots[0]),
        ):
            if end <= knot:
                continue
            beyond = float(
                estimate.masses[
                    (estimate.left if end == support[1] else -estimate.right) >= knot
                ].sum()
            )
            above, below = (
                np.sort(low[np.isfinite(low)])[::-1],
                np.sort(high[np.isfinite(high)])[::-1],
            )
            bounds = []
            for size in _NEAREST:
                t = np.sort(np.append(above, below))[-min(size, len(above) + len(below))]
                n_above, n = (above >= t).sum(), (above >= t).sum() + (below >= t).sum()
                share = n_above / n
                bounds.append(
                    max(0.0, share + 2.0 * np.sqrt(share * (1.0 - share) / n) + 3.0 / n - beyond)
                    * (end - knot)
                )
            total += min(bounds)
        return float(total)

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

    def _support(self, name: str, counts: RangeCounts) -> tuple[float, float] | None:
        """Return the declared bounds, so wide that they hold all anchors."""
        bounds, knots = self._bounds_of(name), counts.knots
        return (
            None
            if bounds is None
            else (min(bounds[0], float(knots[0])), max(bounds[1], float(knots[-1])))
        )

    def _fit(
        self,
        name: str,
        rows: pd.DataFrame,
        support: tuple[float, float] | None = None,
        knots: Sequence[float] | None = None,
    ) -> NPMLE:
        counts = (
            self._count(name, rows)
            if knots is None
            else RangeCounts.of_batch(_check_knots(knots), *self._two_ends(name, rows))
        )
        support = support or self._support(name, counts)
        return npmle(counts, support=support, place="middle" if support else "right")

    def _pairs(self, response: str, features: Sequence[str]) -> tuple[pd.DataFrame, Floats]:
        """Return the features, an indicator for each level of a text but the first, and the ranges of the rows that have all of them."""
        rows = self._ranges(response, *features)
        return pd.get_dummies(rows[list(features)], drop_first=True, dtype=float), rows[
            self._ends(response)
        ].to_numpy(dtype=np.float64)

    def _limits(self, name: str) -> tuple[str, ...]:
        return (
            (_PERTURBED,)
            if name in (self.content["guarantee"].get("epsilon_private") or ())
            else ()
        )


def _regress(estimator: Any, response: str, X: pd.DataFrame, ends: Floats) -> Any:
    """Return a fitted regression of ranges; refuse ranges that determine none."""
    try:
        module = importlib.import_module("dpdask.inference.interval_regression")
    except ModuleNotFoundError:
        raise SpecError(
            "interval regression needs scikit-learn", "regress", "install dpdask[inference]"
        ) from None
    try:
        return module.IntervalRegressor(estimator).fit(X, ends)
    except module.UnidentifiedError:
        raise SpecError(
            "the ranges tell too little for a regression",
            f"column {response!r}",
            "release ranges with anchors where values are",
        ) from None


def _is_coarse(estimate: NPMLE, quantiles: Floats) -> bool:
    """Return whether an interval that a quantile lies in is over half as wide as what nine tenths of the mass lie in."""
    low, high = np.searchsorted(np.cumsum(estimate.masses), [0.05, 0.95])
    places = np.minimum(np.searchsorted(estimate.points, quantiles), len(estimate.points) - 1)
    return bool(
        (
            (estimate.right - estimate.left)[places]
            > (estimate.right[high] - estimate.left[low]) / 2.0
        ).any()
    )


def _check_knots(knots: Sequence[float]) -> Floats:
    """Return knots as an increasing array without repeats, as a list of ends may have them."""
    try:
        return np.unique(np.asarray(knots, dtype=np.float64))
    except (TypeError, ValueError):
        raise SpecError(
            "knots are numbers, those of the ranges' ends",
            "npmle",
            "write them as in knots=[0, 10, 100, 1000]",
        ) from None
