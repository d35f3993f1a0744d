"""Opened releases of ranges: the nonparametric maximum likelihood estimate, and regression of what is known as a range."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.opened import Refusals
from dpdask.analysis.opened_points import KeptColumns
from dpdask.analysis.results import Query, Result
from dpdask.analysis.subset import intercept_by_means
from dpdask.analysis.values import count_since_1970, read_within, to_numbers
from dpdask.arrays import Ends, Floats, Pair, freeze_class
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, RangeCounts, RangeEstimate, bootstrap, npmle
from dpdask.inference.anchors import Anchors, Moment, Survival, average, score, slopes
from dpdask.inference.range_estimates import average as average_of_npmle
from dpdask.inference.range_estimates import count_ranges
from dpdask.mechanisms.card import OWN_NUMBERS, microseconds_of
from dpdask.streams import RunKey, stream

_N_KNOTS = 300
_REPEATS = 20
_GROUPS = 10
_FEW_ROWS = 20
_NEAREST = (50, 100, 200, 400, 800, 1600)  # ends of ranges
_PERTURBED = "the ranges are of perturbed values: so is the estimate, and only under the declared reference is it that of the original values"
_TOLD_TOO_LITTLE = (
    "groups of too few rows, whose ranges do not tell where their values lie, have no estimate"
)
_SLOW = "the distribution at a point is estimated at the rate of the cube root of the rows, so no standard error is given"
_BY_DESIGN = "the only assumption is that anchors are drawn independently of the values, from the distribution that the card gives"
_BY_ANCHORS = "the slope is of numbers that have the values' averages, whatever the law of the values: the anchors' distribution gives them"
_FEW_DECIDE = "a few rows decide on the slope, or on the variance of the explanatory variable, so no standard error is known"
_NORMAL = "the response is taken to have normal errors of one variance: if they have another law, the slope is off by an unknown amount"
_UNSETTLED = "the fit did not converge: the ranges tell too little for slopes"
_FAR = (
    "the bound on the bias is larger than the mean itself: values may lie far beyond the anchors, or the anchors lie so far apart that the ranges "
    "tell little; see npmle(), or release ranges with anchors where the values are"
)
_COARSE = "it lies between two ends of ranges that are as far apart as most values are, and nothing tells where between them; see npmle()"
_THIN = "few of the ranges end among the values, so this is very uncertain; release ranges with anchors where the values are"
_UNBOUNDED = (
    "the card gives no bounds in the numbers of the ranges, so no bound on the bias is known"
)
_UNMOVED = "the ranges do not tell where between anchors the values lie, since these lie too far apart, so no standard error is given"
_FEW_ENDS = 200  # ranges
_MIDDLE = (0.05, 0.95)
_GUESSES = 3
_STILL = 1e-9  # of the numbers: a standard error that is less is one of rounding alone


@freeze_class(kw_only=False)
class _Ranges:
    """The ranges of a column, or of the rows of one group."""

    lower: Floats
    upper: Floats
    bounds: Ends | None  # declared, in the numbers of the ranges

    def count(self) -> RangeCounts:
        """Return the counts of the ranges, with finer knots where their mass is."""
        return count_ranges(self.lower, self.upper, _N_KNOTS, bounds=self.bounds)

    def widen(self, counts: RangeCounts) -> Ends | None:
        """Return the declared bounds, so wide that they hold all anchors."""
        if self.bounds is None:
            return None
        low, high = self.bounds
        return min(low, float(counts.knots[0])), max(high, float(counts.knots[-1]))

    def fit(
        self,
        support: Ends | None = None,
        knots: Sequence[float] | None = None,
    ) -> NPMLE:
        if knots is None:
            counts = self.count()
        else:
            try:
                # a list of ends may have repeats
                places = np.unique(np.asarray(knots, float))
            except (TypeError, ValueError):
                what = "knots are numbers, those of the ranges' ends"
                use = "write them as in knots=[0, 10, 100, 1000]"
                raise SpecError(what, "npmle", use) from None
            counts = RangeCounts.of_batch(places, self.lower, self.upper)
        support = support or self.widen(counts)
        return npmle(counts, support=support, place="middle" if support else "right")

    @property
    def are_rings(self) -> bool:
        """Whether some are the outer ranges of rings."""
        return bool((self.lower > self.upper).any())

    def average(
        self, counts: RangeCounts, estimate: NPMLE, phi: Callable[[Floats], Floats]
    ) -> RangeEstimate:
        """Return the mean of φ under an estimate, and its standard error."""
        if not self.are_rings:
            return average_of_npmle(counts, estimate, phi)
        # of rings the information is nearly singular; any stream, as this is post-processing
        rng = stream(RunKey.insecure(0), "analysis/resample", "rings").seed_generator()
        return bootstrap(
            counts,
            lambda resample: resample.functional(phi),
            _REPEATS,
            rng=rng,
            support=self.widen(counts),
            place=estimate.place,
            max_ambiguity=1.0,
        )

    def is_thin(self, low: float, high: float) -> bool:
        """Return whether few ranges end between two places, between which nine tenths of the values lie."""
        ends = np.stack([self.lower, self.upper])
        return bool(((ends >= low) & (ends <= high)).any(axis=0).sum() < _FEW_ENDS)

    def are_even(self, anchors: Anchors, ends: Ends) -> bool:
        """Return whether anchors reach between two ends, and those released there weigh about the same."""
        low, high = self.bounds or (-math.inf, math.inf)
        low, high = max(low, ends[0]), min(high, ends[1])
        return anchors.reach(low, high) and anchors.is_even(self.lower, self.upper, low, high)

    def doubt(self, estimate: NPMLE, support: Ends) -> float:
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


def _find_middle(estimate: NPMLE) -> Ends:
    """Return the ends of what nine tenths of the mass lie in."""
    low, high = np.searchsorted(np.cumsum(estimate.masses), [0.05, 0.95])
    return float(estimate.left[low]), float(estimate.right[min(high, len(estimate.right) - 1)])


class OpenedRanges(KeptColumns):
    """Ranges that contain the values, beside the columns that were kept."""

    refusals: ClassVar[Refusals] = {
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
            "a range explains only if its anchors have a known distribution and reach from bound to bound",
            "use kept columns as explanatory variables, or release ranges of `case1` or `case2`",
        ),
        "npmle": ("the column was kept: its values are released", "use quantile() or histogram()"),
        "regress": ("the column was kept: its values are released", "use slope()"),
        "fit": ("the release holds rows, not weighted cells", "use slope() or regress()"),
    }

    def _plan(self, asked: Query) -> Callable[[], Any]:
        question, names = asked.kind, asked.names
        first, *others = names
        if question in ("slope", "regress"):
            if question == "regress" and self._is_kept(first):
                raise self._refusal(question, *names)
            hidden = self._list_private(others)
            if not all(question == "slope" and self._is_designed(name) for name in hidden):
                raise self._refusal("slope", *names)
            self._check_no_dates(others)
            if hidden:
                self._check_no_dates([first])
                return lambda: self._slope_on_ranges(first, others)
        if self._is_kept(first) and (self._is_kept(*others) or question in ("mean", "quantile")):
            return super()._plan(asked)
        grouped, q = self._is_kept(*others), asked.q
        match question:
            case "mean" if grouped and asked.values is None:
                within = asked.within
                ends = None if within is None else read_within(within, f"mean({first})")
                return lambda: self._for_each(partial(self._mean, within=ends), first, *others)
            case "quantile" if grouped and (not others or isinstance(q, float)):
                return lambda: self._for_each(partial(self._quantile_of, q=q), first, *others)
            case "histogram":
                return lambda: self._histogram_of(first, asked.bins)
            case "slope":
                return lambda: self._slope(first, others)
            case "intercept":
                self._plan(replace(asked, kind="slope"))
                return lambda: intercept_by_means(self, first, others)
            case "npmle":
                return lambda: self._ranges(first, self._rows(first)).fit(
                    asked.support, asked.knots
                )
            case "regress":
                return lambda: _regress(asked.estimator, first, *self._pairs(first, others))
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

    def _mean(self, column: str, ranges: _Ranges, *, within: Ends | None) -> Result:
        """Return the mean of values clipped to `within`, or to the declared bounds."""
        ends, anchors = within or ranges.bounds, self._anchors(column, ranges)
        if ends is None or anchors is None or not ranges.are_even(anchors, ends):
            return self._mean_of_npmle(column, ranges, within)
        if len(ranges.lower) < _FEW_ROWS:
            raise SpecError(_TOLD_TOO_LITTLE, f"column {column!r}", "use more rows")
        mean, error, find_ends = average(
            anchors, ranges.lower, ranges.upper, ranges.bounds, Moment(*ends)
        )
        low, high = ends
        if within is not None and ranges.bounds is not None:
            low, high = np.clip(ranges.bounds, *within).tolist()
        return Result(
            estimate=min(max(mean, low), high),
            standard_error=error or None,
            limits=(_BY_DESIGN, *self._limits(column)),
            find_ends=lambda deviations: tuple(np.clip(find_ends(deviations), low, high).tolist()),
        )

    def _mean_of_npmle(self, column: str, ranges: _Ranges, within: Ends | None) -> Result:
        counts = ranges.count()
        support, ends = ranges.widen(counts), within or (-math.inf, math.inf)
        # what rings leave open counts as a bias, so that they need not be refused
        most = 1.0 if ranges.are_rings and (support or within) else 0.1
        place: Literal["middle", "right"] = "middle" if support else "right"
        estimate = npmle(counts, support=support, place=place, max_ambiguity=most)
        found = ranges.average(counts, estimate, lambda y: np.clip(y, *ends))
        limits, bias, error = [*self._limits(column)], None, None
        if support is None and within is None:
            limits.append(_UNBOUNDED)
        else:
            # beyond what values are clipped to, nothing matters
            low, high = (np.clip(side, *ends) for side in (estimate.left, estimate.right))
            places = np.clip(estimate.points, *ends)
            bias = float(estimate.masses @ np.maximum(high - places, places - low))
            first, last = np.clip(support or ends, *ends).tolist()
            bias += ranges.doubt(estimate, (first, last)) + estimate.drift * (last - first)
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
        ranges, n = self._ranges(column, rows), len(rows)
        index = pd.IntervalIndex.from_breaks(edges, closed="right", name=column)
        limits = [WITHOUT_NULLS] if n < self.n_rows else []
        anchors = self._anchors(column, ranges)
        if anchors is None:
            fitted = ranges.fit()
            estimate = pd.Series(n * np.diff(fitted.cdf(edges)), index)
            limits += [_THIN] if ranges.is_thin(*_find_middle(fitted)) else []
            return self._without_error(column, estimate, limits)
        survival = Survival.of_ranges(anchors, ranges.lower, ranges.upper, ranges.bounds, edges)
        limits += [_THIN] if ranges.is_thin(*map(survival.quantile, _MIDDLE)) else []
        parts = [survival.between(each) for each in pairwise(edges.tolist())]
        shares, errors = np.array([part[:2] for part in parts]).T
        # how many rows have a value is drawn, too
        drawn = shares * math.sqrt(1.0 / n - 1.0 / self.n_rows)

        def find_ends(deviations: float) -> tuple[pd.Series, pd.Series]:
            low, high = np.array([part[2](deviations) for part in parts]).T
            low = shares - np.hypot(shares - low, deviations * drawn)
            high = shares + np.hypot(high - shares, deviations * drawn)
            return pd.Series(n * np.maximum(low, 0.0), index), pd.Series(n * high, index)

        return Result(
            estimate=pd.Series(n * shares, index),
            standard_error=pd.Series(n * np.hypot(errors, drawn), index),
            limits=(_BY_DESIGN, *limits, *self._limits(column)),
            find_ends=find_ends,
        )

    def _quantile_of(self, column: str, ranges: _Ranges, *, q: float | Sequence[float]) -> Result:
        several = None if isinstance(q, float) else pd.Index(q, name="q")
        ranks = np.atleast_1d(np.array(q)).tolist()

        def tell(numbers: Sequence[float] | Floats) -> Any:
            return float(numbers[0]) if several is None else pd.Series(numbers, several)

        anchors = self._anchors(column, ranges)
        if anchors is None:
            fitted = ranges.fit()
            quantiles, (low, high) = fitted.quantile(np.array(ranks)), _find_middle(fitted)
            places = np.minimum(np.searchsorted(fitted.points, quantiles), len(fitted.points) - 1)
            is_coarse = ((fitted.right - fitted.left)[places] > (high - low) / 2.0).any()
            limits = [_COARSE] if is_coarse else [_THIN] if ranges.is_thin(low, high) else []
            return self._without_error(column, tell(quantiles), limits)
        survival = Survival.of_ranges(anchors, ranges.lower, ranges.upper, ranges.bounds)
        found = [survival.quantile(rank) for rank in ranks]

        def find_ends(deviations: float) -> tuple[Any, Any]:
            ends = [survival.find_quantile_ends(rank, deviations) for rank in ranks]
            low, high = np.array(ends).T
            return tell(low), tell(high)

        limits = [_THIN] if ranges.is_thin(*map(survival.quantile, _MIDDLE)) else []
        return Result(
            estimate=tell(found),
            standard_error=tell([survival.quantile_error(rank) for rank in ranks]),
            limits=(_BY_DESIGN, *limits, *self._limits(column)),
            find_ends=find_ends,
        )

    def _without_error(self, column: str, estimate: Any, limits: Sequence[str]) -> Result:
        limits = (_SLOW, *limits, *self._limits(column))
        return Result(estimate=estimate, standard_error=None, bias_bound=None, limits=limits)

    def _anchors(self, column: str, ranges: _Ranges) -> Anchors | None:
        """Return the anchors of a column; None if its design tells too little of them."""
        ends = np.concatenate([ranges.lower, ranges.upper])
        ends = ends[np.isfinite(ends)]
        design = self._column(column).get("design")  # cards of 0.2.0 have none
        whole = bool((ends == np.round(ends)).all())
        return Anchors.of_design(design, whole=whole) if design else None

    def _is_designed(self, column: str) -> bool:
        """Return whether a column's anchors have a known distribution that reaches from bound to bound."""
        design, bounds = self._column(column).get("design"), self._bounds_of(column)
        anchors = Anchors.of_design(design, whole=True) if design else None
        return anchors is not None and bounds is not None and anchors.reach(*bounds)

    def _slope(self, response: str, features: Sequence[str]) -> Result:
        """Return least-squares slopes: of pseudo-values where the anchors are known; otherwise of `regress`, with the errors of a jackknife, of 10 groups of rows left out by a step of Newton, if it converged.

        References
        ----------
        Wu, Jackknife, bootstrap and other resampling methods in regression analysis (1986).
        """
        X, ends = self._pairs(response, features)
        _check_enough(response, X)
        ranges = _Ranges(ends[:, 0], ends[:, 1], self._bounds_of(response))
        anchors = self._anchors(response, ranges)
        if anchors is None or ranges.bounds is None or not ranges.are_even(anchors, ranges.bounds):
            with warnings.catch_warnings():
                # `limits` says it once
                warnings.filterwarnings("ignore", "interval regression did not converge")
                return self._slope_of_normal(response, X, ends, _regress(None, response, X, ends))
        features_of = X.to_numpy(float)
        # any guess will do: the better it is, the smaller is the error
        about = score(anchors, ranges.lower, ranges.upper, ranges.bounds, Moment(*ranges.bounds))
        guess = np.full(len(X), about.mean())
        for _ in range(_GUESSES):
            pseudo = anchors.pseudo_values(ranges.lower, ranges.upper, guess)
            beta, error = slopes(pseudo, features_of, {})
            guess = pseudo.mean() + (features_of - features_of.mean(axis=0)) @ beta
        return self._tell_slopes(X.columns, beta, error, [response])

    def _slope_on_ranges(self, response: str, features: Sequence[str]) -> Result:
        """Return least-squares slopes on features of which some are ranges."""
        names = [response, *features]
        hidden = self._list_private(names)
        rows = self._read_rows(
            [name for name in names if self._is_kept(name)]
            + [end for name in hidden for end in self._ends(name)]
        ).dropna()
        _check_enough(response, rows)
        parts: dict[str, pd.Series | Floats] = {}
        squares: dict[str, Floats] = {}
        for name in features:
            if name not in hidden:
                dummies = pd.get_dummies(rows[[name]], drop_first=True, dtype=float)
                parts |= {str(each): dummies[each] for each in dummies}
                continue
            parts[name], squares[name] = self._score_of(name, rows)
        y = (
            self._score_of(response, rows)[0]
            if response in hidden
            else to_numbers(rows[response], response)
        )
        labels = list(parts)
        beta, error = slopes(
            y,
            np.column_stack([np.asarray(part, float) for part in parts.values()]),
            {labels.index(name): each for name, each in squares.items()},
        )
        return self._tell_slopes(pd.Index(labels), beta, error, hidden)

    def _score_of(self, name: str, rows: pd.DataFrame) -> Pair:
        """Return the scores of a column of ranges, and those of its squared distance from their mean; refuse it if they have no normal law."""
        ranges = self._ranges(name, rows)
        anchors, bounds = self._anchors(name, ranges), ranges.bounds
        if anchors is None or bounds is None or not ranges.are_even(anchors, bounds):
            raise self._refusal("slope", name)
        found = score(anchors, ranges.lower, ranges.upper, bounds, Moment(*bounds))
        square = Moment(*bounds, power=2, centre=float(found.mean()))
        return found, score(anchors, ranges.lower, ranges.upper, bounds, square)

    def _tell_slopes(
        self, index: pd.Index, beta: Floats, error: Floats | None, hidden: Sequence[str]
    ) -> Result:
        limits = dict.fromkeys(limit for name in hidden for limit in self._limits(name))
        return Result(
            estimate=pd.Series(beta, index),
            standard_error=None if error is None else pd.Series(error, index),
            limits=(_BY_ANCHORS, *([_FEW_DECIDE] if error is None else []), *limits),
        )

    def _slope_of_normal(self, response: str, X: pd.DataFrame, ends: Floats, whole: Any) -> Result:
        limits, error = [_NORMAL, *self._limits(response)], None
        try:
            if not whole.converged_:
                raise np.linalg.LinAlgError
            module = importlib.import_module("dpdask.inference.interval_regression")
            group = np.arange(len(X)) % _GROUPS
            slopes = module.leave_out(whole, X.to_numpy(float), ends, group)
            error = pd.Series(np.sqrt((_GROUPS - 1) * np.var(slopes, axis=0)), X.columns)
        except np.linalg.LinAlgError:
            limits.append(_UNSETTLED)
        return Result(
            estimate=pd.Series(whole.estimator_.coef_, X.columns),
            standard_error=error,
            bias_bound=None,
            limits=tuple(limits),
        )

    def _ends(self, name: str) -> list[str]:
        released: list[str] = self._column(name)["released_as"]
        return released[:2]

    def _rows(self, name: str, *others: str) -> pd.DataFrame:
        """Return a column's ranges, with other columns; rows that miss one of them are left out."""
        return self._read_rows([*others, *self._ends(name)]).dropna()

    def _ranges(self, name: str, rows: pd.DataFrame) -> _Ranges:
        lower, upper = (rows[end].to_numpy(float) for end in self._ends(name))
        return _Ranges(lower, upper, self._bounds_of(name))

    def _bounds_of(self, name: str) -> Ends | None:
        """Return the declared bounds of a column in the numbers of its ranges; None if there are none, or its card does not tell which numbers."""
        column = self._column(name)
        bounds, micro = column.get("bounds"), microseconds_of(column.get("numbers"))
        is_own = column.get("numbers") == OWN_NUMBERS or "unit" in column
        if bounds is None or (micro is None and not is_own):
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
        return X, rows[self._ends(response)].to_numpy(float)

    def _limits(self, name: str) -> tuple[str, ...]:
        perturbed = self.content["guarantee"].get("epsilon_private") or ()
        return (_PERTURBED,) if name in perturbed else ()


def _check_enough(response: str, rows: pd.DataFrame) -> None:
    if len(rows) < 2 * _GROUPS:
        what = f"slopes need at least {2 * _GROUPS} rows"
        raise SpecError(what, f"slope({response})", "use more rows")


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
