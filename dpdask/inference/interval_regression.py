"""Regression when the response is known only as ranges: any scikit-learn regressor, refitted to expected responses.

Scikit-learn is an optional dependency, and this module the only one that imports it; nothing in
dpdask imports this module by itself. What is done here is post-processing of ranges that were
already reported: it reveals nothing further.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import numpy as np

from dpdask.arrays import Ends, Flags, Floats, Ints, Triple, freeze_class
from dpdask.kernels import normal as truncated

try:
    from sklearn.base import BaseEstimator, RegressorMixin, clone  # type: ignore[import-untyped, unused-ignore]  # it ships no types
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped, unused-ignore]  # as above
    from sklearn.linear_model import LinearRegression  # type: ignore[import-untyped, unused-ignore]  # as above
    from sklearn.utils import check_random_state, get_tags  # type: ignore[import-untyped, unused-ignore]  # as above
    from sklearn.utils import validation as checks  # type: ignore[import-untyped, unused-ignore]  # as above
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "sklearn":
        raise
    raise ModuleNotFoundError(
        "interval regression needs scikit-learn; install dpdask[inference]", name="sklearn"
    ) from error


_START_STEPS = 50  # of a constant fit, which only has to land near the data
_SMALLEST = 1e-6  # of the starting σ: a learner that can follow every range would otherwise divide by a σ of 0


@freeze_class(kw_only=False, eq=False)
class _Ranges:
    """Responses as ranges; a point has low == high, a ring low > high."""

    low: Floats
    high: Floats

    @property
    def is_point(self) -> Flags:
        return self.low == self.high

    def expect(self, noise: truncated.NoiseFamily, fitted: Floats, sigma: float) -> Triple:
        """Return E(Y | range), Var(Y | range) and the log-likelihood of each row, of a point its log density."""
        form, point = truncated.FORMS[noise], self.is_point
        scale = sigma / math.sqrt(form.variance)
        low, high = (self.low - fitted) / scale, (self.high - fitted) / scale
        found = truncated.truncate(noise, low, high)
        mean = np.where(point, self.low, fitted + scale * found.mean)
        spread = np.maximum(found.square - found.mean**2, 0.0)
        likelihood = found.log_probability.copy()
        likelihood[point] = form.log_density(low[point]) - math.log(scale)
        return mean, np.where(point, 0.0, scale**2 * spread), likelihood


class UnidentifiedError(ValueError):
    """Ranges that determine no regression."""


class IntervalRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """A regression Y = f(X) + ε fitted to ranges that contain Y: Algorithm 1 around any scikit-learn regressor.

    Parameters
    ----------
    estimator
        A scikit-learn regressor for f; None: `LinearRegression()`. It is cloned and refitted at
        every iteration. It also judges X: missing values, sparse matrices and frames are allowed
        where it allows them.
    noise
        The distribution of ε, of mean 0: "gaussian" or "logistic".
    sigma
        The standard deviation of ε (of both distributions), positive. None: estimated.
    initial
        Where f̂ begins, a constant; the paper's is 0.0. None: the constant that fits the ranges
        best, so that the result does not depend on where Y has its zero.
    max_iterations
        At most this many refits.
    tolerance
        Converged when the fitted values (root mean square) and σ̂ change by at most this part of
        σ̂.
    damping
        In [0, 1): how much of the previous expected responses is kept. 0 is Algorithm 1; more calms
        a learner whose fit jumps.
    random_state
        Seeds the estimator's `random_state` parameters that are None, once, so that refits differ
        by their responses alone. An int gives the same result at every fit.

    Attributes
    ----------
    estimator_
        The estimator fitted last.
    sigma_
        σ as given or estimated.
    n_iter_, converged_
        How many refits there were, and whether the last met the tolerance.
    objective_path_
        Mean log-likelihood of the ranges (of a point: of its density) before the first refit and
        after each, float64 array of shape (n_iter_ + 1,); of shape (1,) where all responses are
        points. It never falls when ε is Gaussian, `damping` is 0 and the estimator is least
        squares: then this is an EM algorithm.
    responses_
        The expected responses ỹ that the last refit was given, float64 array of shape (n,).
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    Repeats ỹ = f̂(x) + E(ε | ε in range - f̂(x)), f̂ = fit(x, ỹ) (equation (13)). The mechanism
    that chose the ranges need not be known, as long as it looked at Y only to pick a range.

    σ̂² is the mean of (ỹ - f̂(x))² + Var(ε | range). The paper's suggestion (Remark 5), the mean of
    squared differences alone, leaves out the second term: the spread that ỹ, a conditional mean, no
    longer has. It is too small. The logistic distribution's σ is its standard deviation here, so
    its scale is σ√3/π; the supplement calls the scale σ.

    With logistic noise σ̂ solves E[E(ε² | range)] = σ², which is not the likelihood's equation, but
    unbiased as well. A learner that follows single rows (a deep tree) fits inside every range and
    makes σ̂ too small: limit its depth, or give `sigma`.

    Where ranges say little, convergence is slow (linear, at the rate of the missing information).

    Examples
    --------
    Of ten incomes two were reported exactly, the others above or below an anchor:

    >>> X = [[1], [2], [3], [4], [5], [6], [7], [8], [9], [10]]
    >>> low = [-np.inf, 15, 31, -np.inf, 45, -np.inf, 62, 80, -np.inf, 85]
    >>> high = [14, np.inf, 31, 46, np.inf, 66, np.inf, 80, 99, np.inf]
    >>> model = IntervalRegressor(sigma=3.0).fit(X, np.column_stack([low, high]))
    >>> model.predict([[5], [20]]).round(0).tolist()
    [50.0, 200.0]

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection, section
    III-E, Algorithm 1, equations (10)-(13), Remark 5, supplement S2; Buckley and James, Linear
    regression with censored data, 1979.
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        noise: truncated.NoiseFamily = "gaussian",
        sigma: float | None = None,
        initial: float | None = None,
        max_iterations: int = 200,
        tolerance: float = 1e-4,
        damping: float = 0.0,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.noise = noise
        self.sigma = sigma
        self.initial = initial
        self.max_iterations = max_iterations
        self.tolerance = tolerance
        self.damping = damping
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit f and, unless it is given, σ.

        Parameters
        ----------
        X
            Covariates, n rows, as the estimator takes them.
        y
            Shape (n, 2), a range (lower, upper] in each row: ends may be -inf and inf; lower ==
            upper is an exact value; lower > upper, both finite, is the ring (-inf, upper] ∪ (lower,
            inf). Or shape (n,): exact values.

        Returns
        -------
        The fitted regressor.

        Raises
        ------
        ValueError
            If a parameter is out of its range; if a range is empty or an end is NaN; if the ranges
            do not identify f (none is bounded from above, or none from below) or σ (they share one
            end), so that no answer is right.

        Warns
        -----
        ConvergenceWarning
            If `max_iterations` refits did not meet the tolerance.
        """
        self._check_parameters()
        ranges = _ranges(y)
        checks.check_consistent_length(X, ranges.low)
        checks.validate_data(self, X, skip_check_array=True)
        template = _seed(
            LinearRegression() if self.estimator is None else clone(self.estimator),
            self.random_state,
        )
        if ranges.is_point.all():
            return self._fit_points(template, X, ranges)
        _refuse_unidentified(ranges, sigma_known=self.sigma is not None)
        return self._iterate(template, X, ranges)

    def predict(self, X: Any) -> Floats:
        """Return f̂(X), float64 array of shape (n,)."""
        checks.check_is_fitted(self)
        return np.asarray(self.estimator_.predict(X))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R² where y has shape (n,), exact values; where it holds ranges, their mean log-likelihood.

        Parameters
        ----------
        X, y
            As for `fit`.
        sample_weight
            Weights of the rows, shape (n,).

        Notes
        -----
        R² needs the exact responses. Without them the likelihood compares models on held-out
        ranges; as in every score, more is better.
        """
        if np.asarray(y).ndim == 2 and np.asarray(y).shape[1] == 2:
            *_, likelihood = _ranges(y).expect(self.noise, self.predict(X), self.sigma_)
            return float(np.average(likelihood, weights=sample_weight))
        return float(super().score(X, y, sample_weight))

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags; the inner estimator checks X."""
        tags = super().__sklearn_tags__()
        inner = get_tags(LinearRegression() if self.estimator is None else self.estimator)
        tags.input_tags = inner.input_tags
        tags.regressor_tags.poor_score = (
            inner.regressor_tags.poor_score if inner.regressor_tags else False
        )
        tags.non_deterministic = inner.non_deterministic
        return tags

    def _check_parameters(self) -> None:
        if self.noise not in ("gaussian", "logistic"):
            raise ValueError('noise must be "gaussian" or "logistic"')
        if self.sigma is not None and not 0 < self.sigma < math.inf:
            raise ValueError("sigma must be positive and finite, or None")
        if self.initial is not None and not math.isfinite(self.initial):
            raise ValueError("initial must be finite, or None")
        if (
            self.max_iterations < 1
            or not 0 < self.tolerance < math.inf
            or not 0 <= self.damping < 1
        ):
            raise ValueError(
                "max_iterations must be at least 1, tolerance positive and damping in [0, 1)"
            )

    def _fit_points(self, template: Any, X: Any, points: _Ranges) -> Self:
        """Fit exact values: one fit of the given estimator."""
        y = points.low
        self.estimator_ = template.fit(X, y)
        fitted = np.asarray(self.estimator_.predict(X), float)
        self.sigma_ = _deviation(y, 0.0, fitted) if self.sigma is None else float(self.sigma)
        self.n_iter_, self.converged_, self.responses_ = 1, True, y
        objective = math.inf
        if self.sigma_ > 0:
            objective = float(points.expect(self.noise, fitted, self.sigma_)[2].mean())
        self.objective_path_ = np.array([objective])
        return self

    def _iterate(self, template: Any, X: Any, ranges: _Ranges) -> Self:
        centre, sigma = self._start(ranges)
        smallest = _SMALLEST * sigma
        fitted = np.full(len(ranges.low), centre)
        mean, variance, likelihood = ranges.expect(self.noise, fitted, sigma)
        responses, path, self.converged_ = mean, [likelihood.mean()], False
        for _ in range(self.max_iterations):
            responses = self.damping * responses + (1 - self.damping) * mean
            self.estimator_ = clone(template).fit(X, responses)
            before, fitted = fitted, np.asarray(self.estimator_.predict(X), float)
            previous = sigma
            if self.sigma is None:
                sigma = max(_deviation(mean, variance, fitted), smallest)
            mean, variance, likelihood = ranges.expect(self.noise, fitted, sigma)
            path.append(likelihood.mean())
            moved = max(_deviation(before, 0.0, fitted), abs(sigma - previous))
            if moved <= self.tolerance * sigma:
                self.converged_ = True
                break
        self.sigma_, self.n_iter_, self.responses_ = float(sigma), len(path) - 1, responses
        self.objective_path_ = np.array(path)
        if not self.converged_:
            warnings.warn(
                f"interval regression did not converge in {self.n_iter_} refits: the last moved the fit by {moved / sigma:.1e} of sigma; "
                "allow more iterations, a larger tolerance, or damping",
                ConvergenceWarning,
                stacklevel=3,
            )
        return self

    def _start(self, ranges: _Ranges) -> Ends:
        """Return a constant f and its σ, by the same iteration; given values stay."""
        ends = np.concatenate([ranges.low, ranges.high])
        ends = ends[np.isfinite(ends)]
        centre = float(np.median(ends)) if self.initial is None else float(self.initial)
        sigma = _deviation(ends, 0.0, centre) if self.sigma is None else float(self.sigma)
        for _ in range(_START_STEPS):
            mean, variance, _ = ranges.expect(self.noise, np.full(len(ranges.low), centre), sigma)
            if self.initial is None:
                centre = float(mean.mean())
            if self.sigma is None:
                sigma = _deviation(mean, variance, centre)
        return centre, sigma


def leave_out(model: IntervalRegressor, X: Floats, y: Floats, group: Ints) -> Floats:
    """Return the slopes without each group of rows, of shape (groups, d), by one step of Newton from a linear fit of all rows that has converged.

    Parameters
    ----------
    model
        Fitted to X and y, with normal noise and linear regression.
    group
        The group of each row, int64 of shape (n,), from 0 on.

    Raises
    ------
    numpy.linalg.LinAlgError
        If the rows of the other groups do not determine a slope.

    Notes
    -----
    With m and v the mean and the variance of Y given its range, f the fit and r = m - f, the score
    of a row is (r z / σ, (r² + v) / σ² - 1), by β z / σ and by log σ. Its derivatives are
    differences.
    """
    ranges, centre, spread = _ranges(y), X.mean(axis=0), X.std(axis=0)
    if not (spread > 0.0).all():
        raise np.linalg.LinAlgError
    z = np.column_stack([np.ones(len(X)), (X - centre) / spread])
    fitted, step = model.estimator_.intercept_ + X @ model.estimator_.coef_, 1e-3

    def score(shift: Floats) -> Floats:
        sigma = model.sigma_ * math.exp(shift[-1])
        here = fitted + model.sigma_ * (z @ shift[:-1])
        mean, variance, _ = ranges.expect("gaussian", here, sigma)
        off = mean - here
        of_spread = (off**2 + variance) / sigma**2 - 1.0
        return np.column_stack([z * (off * model.sigma_ / sigma**2)[:, None], of_spread])

    def add_up(rows: Floats) -> Floats:
        found = np.zeros((int(group.max()) + 1, rows.shape[1]))
        np.add.at(found, group, rows)
        return found.sum(axis=0) - found

    moves = step * np.eye(z.shape[1] + 1)
    slopes = [add_up(score(move) - score(-move)) / (2.0 * step) for move in moves]
    shifts = np.linalg.solve(
        -np.stack(slopes, axis=-1), add_up(score(np.zeros(len(moves))))[..., None]
    )
    moved: Floats = model.sigma_ * shifts[:, 1:-1, 0] / spread
    return np.asarray(model.estimator_.coef_, float) + moved


def _deviation(mean: Floats, variance: Floats | float, fitted: Floats | float) -> float:
    """Return the root of the mean of E[(Y - f)²]."""
    return float(np.sqrt(np.mean((mean - fitted) ** 2 + variance)))


def _ranges(y: Any) -> _Ranges:
    """Return responses of shape (n,) or (n, 2) as ranges, or refuse them."""
    if y is None:
        raise ValueError("IntervalRegressor requires y to be passed, but the target y is None")
    shape = np.asarray(y).shape
    if len(shape) != 2 or shape[1] == 1:
        exact = checks.check_array(y, ensure_2d=False, dtype=float, input_name="y")
        exact = np.array(checks.column_or_1d(exact, warn=True), float)
        return _Ranges(exact, exact)
    pairs = checks.check_array(y, dtype=float, ensure_all_finite=False, input_name="y")
    if pairs.shape[1] != 2:
        raise ValueError(
            "y must have shape (n,), exact values, or (n, 2), the lower and upper ends of ranges"
        )
    low, high = pairs[:, 0].copy(), pairs[:, 1].copy()
    if np.isnan(pairs).any():
        raise ValueError("y has an end that is NaN; use -inf and inf for open ends")
    if (low == math.inf).any() or (high == -math.inf).any():
        raise ValueError("y has an empty range: a lower end of inf or an upper end of -inf")
    return _Ranges(low, high)


def _refuse_unidentified(ranges: _Ranges, *, sigma_known: bool) -> None:
    """Refuse ranges that leave f̂ unbounded, or that let f and σ be scaled together.

    Notes
    -----
    A ring bounds neither side: its likelihood is largest with f at ±∞. One shared anchor tells Pr(Y
    <= u | x) and no more, which is the same for u - c(u - f) and cσ.
    """
    interval = ranges.low <= ranges.high
    if (
        not (interval & (ranges.low > -math.inf)).any()
        or not (interval & (ranges.high < math.inf)).any()
    ):
        raise UnidentifiedError(
            "the ranges do not identify f: at least one interval must be bounded from below, and one from above"
        )
    ends = np.concatenate([ranges.low, ranges.high])
    if not sigma_known and len(np.unique(ends[np.isfinite(ends)])) < 2:
        raise UnidentifiedError(
            "the ranges do not identify sigma: all have the same end; give sigma, or use random anchors"
        )


def _seed(estimator: Any, random_state: Any) -> Any:
    """Return the estimator with seeds in the place of every random_state that is None."""
    generator = check_random_state(random_state)
    names = sorted(
        name
        for name, value in estimator.get_params(deep=True).items()
        if value is None and name.rpartition("__")[2] == "random_state"
    )
    return estimator.set_params(**{name: int(generator.randint(2**31 - 1)) for name in names})
