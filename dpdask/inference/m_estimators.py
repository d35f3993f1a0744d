"""M-estimators from a weighted sample, such as the cells of a perturbed histogram: arg min over θ of Σ w·m(x, θ).

Everything here needs the release and its card alone. It is post-processing: it costs no ε. Weights
may be negative where the objective still has a minimum; where it has none, or none can be told, the
fit is refused.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from numpy.random import Generator
from scipy import optimize, special

from dpdask.arrays import Floats, Pair, Triple, freeze_class
from dpdask.errors import SpecError
from dpdask.mechanisms.card import Card


def cell_widths(card: Mapping[str, Any], features: pd.DataFrame, weights: Floats) -> Floats:
    """Return the width of the cell of each feature, float64 array of the frame's shape; 0 where its centre needs no correction.

    Parameters
    ----------
    card
        The card of a perturbed histogram.
    features
        The centres of its cells, by column.
    weights
        The cells' weights.

    Raises
    ------
    InputError
        If this is no release card.
    SpecError
        If it is not that of a perturbed histogram, or a number lies outside its column's cells.

    Notes
    -----
    Columns whose cells were found are not corrected: their points have the cells' means, so their
    variance is not too large. Nor is a column where Σ w h²/12 is below twice the noise's standard
    deviation of Σ w (x - mean)², as with the threshold `none` at many cells.
    """
    content = Card.read(card, "card").to_dict()
    mechanism, columns = content["mechanism"], content["columns"]
    if "points" not in mechanism:
        raise SpecError(
            "belongs to another mechanism", "card", "give the card of the perturbed histogram"
        )
    widths = np.zeros(features.shape)
    if mechanism["points"] == "spread":
        return widths
    deviation = float(content["accounting"]["noise"]["cells"]["standard_deviation"])
    for place, name in enumerate(map(str, features.columns)):
        column = columns.get(name, {})
        if name in mechanism["found"] or not column.get("edges") or column["bounds"] is None:
            continue  # means of cells that were found, levels, indicators, the whole line
        x, edges = features.iloc[:, place].to_numpy(float), np.array(column["edges"])
        if (x < edges[0]).any() or (x > edges[-1]).any():
            raise SpecError(
                "holds a number outside the cells of its card",
                f"column {name!r}",
                "use the frame that the card was written for",
            )
        cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
        # of whole numbers: k of them have the variance (k² - 1) step² / 12
        step = column["bounds"][0] - edges[0]
        width = np.sqrt(np.maximum(np.diff(edges) ** 2 - step**2, 0.0))
        own = np.where(np.isin(x, np.array(column["atoms"], float)), 0.0, width[cell])
        mean = weights @ x / weights.sum()
        hidden = 2.0 * deviation * float(np.sqrt(((x - mean) ** 4).sum()))
        widths[:, place] = own if weights @ own**2 / 12.0 > hidden else 0.0
    return widths


Contrast = Callable[[Floats, Floats], Pair]
"""(points of shape (n, d), θ of shape (p,)) -> (m of shape (n,), its gradient in θ of shape (n, p))."""

Kind = Literal["linear", "logistic", "poisson", "huber", "median"]
_HUBER = 1.35  # the default of `huber`

EXTRA = "inference"
_SINGULAR = 1e-10  # of the largest eigenvalue of a standardised Gram matrix
_CURVED = 1e-8
_STEEP = 1e-6
_FAR = 1e100
HINT = "release with the threshold positive or enhanced, or with fewer cells"


@freeze_class(eq=False)
class WeightedSample:
    """Points with weights, and the response at each of them.

    Attributes
    ----------
    features
        float64 array of shape (n, d).
    response
        float64 array of shape (n,).
    weights
        float64 array of shape (n,): counts, noisy ones too, which may be negative. Their sum is
        positive.
    names
        The features' names, if they have any.
    widths
        float64 array of shape (n, d): of features that stand for cells of a continuous column the
        width of the cell, 0 of others. Only least squares uses it (Sheppard's correction). None:
        all 0.

    Raises
    ------
    SpecError
        If the shapes differ, a number is not finite, or the weights do not sum to more than 0.
    """

    features: Floats
    response: Floats
    weights: Floats
    names: tuple[str, ...] = ()
    widths: Floats | None = None

    def __post_init__(self) -> None:
        n = len(self.weights)
        if self.widths is not None and self.widths.shape != self.features.shape:
            raise SpecError(
                "the widths must have the shape of the features",
                "sample",
                "give one for each, or none",
            )
        if (
            self.features.ndim != 2
            or len(self.features) != n
            or self.response.shape != (n,)
            or self.weights.shape != (n,)
        ):
            raise SpecError(
                "features, response and weights must be one row each of the same points",
                "sample",
                "check their shapes",
            )
        _check_weights(self.weights)
        if not (np.isfinite(self.features).all() and np.isfinite(self.response).all()):
            raise SpecError(
                "a feature or response is null, NaN or infinite",
                "sample",
                "leave out cells of missing values first",
            )

    @classmethod
    def of_frame(
        cls,
        frame: pd.DataFrame,
        response: str,
        features: Sequence[str],
        *,
        weight: str = "weight",
        card: Mapping[str, Any] | None = None,
    ) -> WeightedSample:
        """Return a sample from a frame of cells: columns that are not numbers become one indicator for each level but the first.

        Parameters
        ----------
        frame
            As `HistogramRelease.cells` gives it.
        response, features, weight
            Names of its columns.
        card
            The card of the perturbed histogram that the frame is from: with it, the widths of its
            cells are known, and least squares is corrected for them. They are 0, for no correction,
            of dates, of atoms, of points that are `spread`, and where noise hides what a correction
            changes (`cell_widths`).

        Raises
        ------
        SpecError
            If a column is missing, the response is not a number, or as for the class.
        """
        for name in (response, weight, *features):
            if name not in frame.columns:
                raise SpecError(
                    "the frame has no such column", f"column {name!r}", "check its name"
                )
        if not pd.api.types.is_numeric_dtype(frame[response]):
            raise SpecError(
                "the response must be a number", f"column {response!r}", "code it in numbers first"
            )
        wide = pd.get_dummies(frame[list(features)], drop_first=True, dtype=float)
        weights = frame[weight].to_numpy(float)
        return cls(
            features=wide.to_numpy(float),
            response=frame[response].to_numpy(float),
            weights=weights,
            names=tuple(map(str, wide.columns)),
            widths=None if card is None else cell_widths(card, wide, weights),
        )


def _check_weights(weights: Floats) -> None:
    if not np.isfinite(weights).all():
        raise SpecError("a weight is not finite", "weights", "use the released weights as they are")
    if not weights.sum() > 0:
        raise SpecError(
            "the weights sum to 0, so they hold no sample",
            "weights",
            "release with a larger epsilon, or fewer cells",
        )


def least_squares(sample: WeightedSample, *, intercept: bool = True) -> Floats:
    """Return the coefficients of least squares, in closed form.

    Parameters
    ----------
    sample
        Weights may be negative as long as the weighted Gram matrix is positive definite: then the
        objective is convex.
    intercept
        Whether the first coefficient is a constant.

    Returns
    -------
    float64 array of shape (d + intercept,).

    Raises
    ------
    SpecError
        If the Gram matrix is not positive definite: collinear features, too much negative weight,
        or cells too wide for their correction.

    Notes
    -----
    The centres of cells of width h have a variance that is larger by h²/12 than that of a smooth
    density, so slopes are too small. From the diagonal of the Gram matrix the average of h²/12 is
    subtracted, by the sample's `widths`. Products of two columns need no correction. With cells of
    different widths the correction is a part of what is missing. A density that does not fall off
    to the column's bounds, as a uniform one, needs none either, and would be corrected too much:
    leave out the widths then.

    References
    ----------
    Sheppard, On the calculation of the most probable values of frequency-constants (1898).
    """
    z, centre, spread = _standardise(sample, intercept=intercept)
    weights = sample.weights / np.abs(sample.weights).sum()
    weighted = z * weights[:, None]
    gram = z.T @ weighted
    if sample.widths is not None:
        inside = np.diag_indices(len(gram))
        gram[inside] -= np.append(
            np.zeros(int(intercept)), weights @ sample.widths**2 / 12.0 / spread**2
        )
    values = np.linalg.eigvalsh(gram)
    if not values[0] > _SINGULAR * values[-1]:
        raise _ill_posed(
            sample.weights, "the weighted Gram matrix is not positive definite", "least squares"
        )
    return _restore(
        np.linalg.solve(gram, weighted.T @ sample.response), centre, spread, intercept=intercept
    )


def _bernoulli(eta: Floats, y: Floats) -> Triple:
    mean = special.expit(eta)
    return np.logaddexp(0.0, eta) - y * eta, mean - y, mean * (1.0 - mean)


def _count(eta: Floats, y: Floats) -> Triple:
    mean = np.exp(np.minimum(eta, 500.0))
    return mean - y * eta, mean - y, mean


# the loss of a response, and its first two derivatives in η
_LOSSES = {"logistic": _bernoulli, "poisson": _count}


def logistic(sample: WeightedSample, *, intercept: bool = True) -> Floats:
    """Return the coefficients of logistic regression of a response in {0, 1}; unpenalised.

    Weights of one sign are fitted by scikit-learn. With negative ones among them, the local minimum
    next to the fit of the positive parts is sought, which is what the paper's Theorem 4 is about.

    For the parameters see `least_squares`.

    Raises
    ------
    SpecError
        If the response is not 0 or 1; there is no (local) minimum, as with separable responses;
        scikit-learn is missing.

    References
    ----------
    Lei, Differentially private M-estimators (2011), section 3.1, example.
    """
    if not np.isin(sample.response, (0.0, 1.0)).all():
        raise SpecError(
            "the response of a logistic regression must be 0 or 1",
            "logistic",
            "code its two levels so",
        )
    unpenalised = {"C": math.inf}
    return _fit_generalised(
        "LogisticRegression", unpenalised, _bernoulli, sample, intercept=intercept
    )


def poisson(sample: WeightedSample, *, intercept: bool = True) -> Floats:
    """Return the coefficients of Poisson regression with the logarithmic link; as `logistic`, of a non-negative response.

    For the parameters see `least_squares`.
    """
    if (sample.response < 0).any():
        raise SpecError(
            "the response of a Poisson regression must not be negative",
            "poisson",
            "take another estimator",
        )
    return _fit_generalised("PoissonRegressor", {"alpha": 0.0}, _count, sample, intercept=intercept)


def huber(sample: WeightedSample, *, threshold: float = _HUBER, intercept: bool = True) -> Floats:
    """Return the coefficients of Huber's robust regression, its scale estimated along with them (scikit-learn's HuberRegressor).

    Parameters
    ----------
    sample
        Without negative weights.
    threshold
        Residuals beyond so many scales count linearly; above 1.
    intercept
        As in `least_squares`.

    Raises
    ------
    SpecError
        On negative weights, with which it has no guaranteed minimum; if it does not converge;
        scikit-learn is missing.
    """
    _refuse_negative(sample.weights, "huber")
    scale = float(np.sqrt(np.cov(sample.response, aweights=sample.weights))) or 1.0
    # its convergence is told in absolute terms
    scaled = replace(sample, response=sample.response / scale)
    settings = {"epsilon": threshold, "alpha": 0.0, "max_iter": 2000, "tol": 1e-8}
    return scale * _fit_weighted("HuberRegressor", settings, scaled, intercept=intercept)


def quantile_regression(
    sample: WeightedSample, tau: float = 0.5, *, intercept: bool = True
) -> Floats:
    """Return the coefficients of the regression of the τ-quantile, by linear programming (HiGHS).

    Parameters
    ----------
    sample
        Features, response and weights; no weight may be negative.
    tau, intercept
        The quantile's level, in (0, 1); whether there is a constant, the first coefficient.

    Raises
    ------
    SpecError
        On negative weights, with which the objective is not convex; if τ is not in (0, 1).

    References
    ----------
    Koenker and Bassett, Regression quantiles (1978), for the dual; Koenker and Hallock (2001).
    """
    _refuse_negative(sample.weights, "quantile regression")
    _check_tau(tau)
    z, centre, spread = _standardise(sample, intercept=intercept)
    used = sample.weights != 0.0
    z, response, weights = z[used], sample.response[used], sample.weights[used]
    # tolerances are absolute
    weights, size = weights / weights.mean(), float(np.abs(response).max()) or 1.0
    # the dual, max y'a where X'a = (1 - τ) X'w and 0 <= a <= w, has an equation for each coefficient
    found = optimize.linprog(
        -response / size,
        A_eq=z.T,
        b_eq=(1.0 - tau) * (weights @ z),
        bounds=np.column_stack([np.zeros(len(weights)), weights]),
        method="highs-ipm",  # with a crossover to a corner
        options={"presolve": False},  # it took most of the time
    )
    if found.status != 0:
        raise _ill_posed(sample.weights, "no minimum was found", "quantile regression")
    return _restore(-size * found.eqlin.marginals, centre, spread, intercept=intercept)


def quantile(values: Floats, weights: Floats, tau: float = 0.5) -> float:
    """Return the τ-quantile of weighted values, the smallest θ that minimises Σ w·ρ_τ(x - θ); τ = 1/2 is the median.

    Parameters
    ----------
    values
        float64 array of shape (n,). For a column on the whole line, the centres of its cells on the
        line: the transform is monotone, so this is log(q / (1-q)) of the quantile q of the
        transformed cells.
    weights
        float64 array of that shape; negative ones are allowed, since the objective grows to both
        sides while their sum is positive: then the global minimum is taken.
    tau
        In (0, 1).

    Raises
    ------
    SpecError
        If τ is out of range, the weights do not sum to more than 0, or a number is not finite.

    References
    ----------
    Lei (2011), section 3.2 and Corollary 6.
    """
    _check_tau(tau)
    _check_weights(weights)
    if values.shape != weights.shape or not np.isfinite(values).all():
        raise SpecError(
            "values must be finite numbers, one for each weight",
            "quantile",
            "leave out cells of missing values first",
        )
    x, place = np.unique(values, return_inverse=True)
    w = np.bincount(place, weights=weights, minlength=len(x))
    slope = np.cumsum(w) - tau * w.sum()  # of the objective, behind each value
    if (w >= 0).all():
        return float(x[np.argmax(slope >= 0)])
    rise = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(x))])
    return float(x[np.argmin(rise)])


def minimise(contrast: Contrast, points: Floats, weights: Floats, start: Floats) -> Floats:
    """Return the θ next to a start that minimises Σ w·m(x, θ) for any smooth contrast m.

    Parameters
    ----------
    contrast
        Gives m and its gradient at all points; see `Contrast`.
    points
        float64 array of shape (n, d).
    weights
        float64 array of shape (n,).
    start
        float64 array of shape (p,).

    Returns
    -------
    float64 array of shape (p,).

    Raises
    ------
    SpecError
        If the contrast gives NaN or other shapes; if no minimum is reached; if, with negative
        weights, what was reached is not a strict minimum.

    References
    ----------
    Lei (2011), Algorithm 1 and Theorem 4 (a local minimiser near the parameter exists with high
    probability).
    """
    _check_weights(weights)
    used = weights != 0
    x, w = points[used], weights[used] / weights.sum()

    def objective(theta: Floats) -> tuple[float, Floats]:
        # else the search runs away until infinities cancel
        if not np.abs(theta).max(initial=0.0) < _FAR:
            raise _ill_posed(weights, "no minimum of the objective was reached", "the contrast")
        m, gradient = contrast(x, theta)
        if np.shape(m) != (len(x),) or np.shape(gradient) != (len(x), len(theta)):
            raise SpecError(
                "must give m of shape (n,) and its gradient of shape (n, p)",
                "the contrast",
                "return both for all points at once",
            )
        if np.isnan(m).any() or np.isnan(gradient).any():
            raise SpecError(
                "gives NaN",
                "the contrast",
                "define it at every point and every θ, or begin elsewhere",
            )
        return float(w @ m), w @ gradient

    with np.errstate(all="ignore"):
        found = optimize.minimize(
            objective,
            np.asarray(start, float),
            jac=True,
            method="BFGS",
            options={"gtol": 1e-8, "maxiter": 2000},
        )
        value, gradient = objective(found.x)
    scale = 1.0 + float(np.abs(found.x).max(initial=0.0))
    if not np.isfinite(found.x).all() or not float(
        np.abs(gradient).max()
    ) * scale <= _STEEP * 100 * (1.0 + abs(value)):
        raise _ill_posed(weights, "no minimum of the objective was reached", "the contrast")
    if (weights < 0).any():
        steps = 1e-5 * (1.0 + np.abs(found.x))
        rows = np.array(
            [
                (objective(found.x + step)[1] - objective(found.x - step)[1]) / (2 * step.max())
                for step in np.diag(steps)
            ]
        )
        if not np.linalg.eigvalsh((rows + rows.T) / 2)[0] > 0:
            raise _ill_posed(
                weights, "what was reached is no strict minimum of the objective", "the contrast"
            )
    return found.x


def _standardise(sample: WeightedSample, *, intercept: bool) -> Triple:
    """Return the features with a constant before them if there is one, centred and scaled, with centres and scales."""
    share = np.abs(sample.weights) / np.abs(sample.weights).sum()
    centre = share @ sample.features if intercept else np.zeros(sample.features.shape[1])
    spread = np.sqrt(share @ (sample.features - centre) ** 2)
    if (spread <= 1e-12 * np.abs(centre)).any():
        raise SpecError(
            "a feature does not vary, so it has no coefficient of its own",
            "features",
            "leave it out",
        )
    z = (sample.features - centre) / spread
    return (np.column_stack([np.ones(len(z)), z]) if intercept else z), centre, spread


def _restore(coefficients: Floats, centre: Floats, spread: Floats, *, intercept: bool) -> Floats:
    slopes = coefficients[int(intercept) :] / spread
    return np.concatenate([[coefficients[0] - slopes @ centre], slopes]) if intercept else slopes


def _fit_weighted(
    name: str, settings: dict[str, Any], sample: WeightedSample, *, intercept: bool
) -> Floats:
    """Return the coefficients that a linear model of scikit-learn finds on the standardised features."""
    try:
        models = importlib.import_module("sklearn.linear_model")
    except ImportError:
        raise SpecError(
            "this estimator needs scikit-learn", name, f"pip install 'dpdask[{EXTRA}]'"
        ) from None
    used = sample.weights != 0
    sample = replace(
        sample,
        features=sample.features[used],
        response=sample.response[used],
        weights=sample.weights[used],
        widths=None,
    )
    z, centre, spread = _standardise(sample, intercept=intercept)
    with warnings.catch_warnings():
        # what does not converge, or meets a singular Hessian, is no estimate
        for kind in (UserWarning, RuntimeWarning):
            warnings.simplefilter("error", kind)
        try:
            model = getattr(models, name)(fit_intercept=intercept, **settings)
            model.fit(z[:, int(intercept) :], sample.response, sample_weight=sample.weights)
        except (UserWarning, RuntimeWarning, ValueError):
            raise _ill_posed(
                sample.weights, "the fit did not converge: there may be no minimum", name
            ) from None
    slopes = np.ravel(model.coef_)
    found = np.concatenate([np.atleast_1d(model.intercept_), slopes]) if intercept else slopes
    return _restore(found.astype(float), centre, spread, intercept=intercept)


def _fit_generalised(
    name: str,
    unpenalised: dict[str, Any],
    parts: Callable[[Floats, Floats], Triple],
    sample: WeightedSample,
    *,
    intercept: bool,
) -> Floats:
    """Return a generalised linear model's coefficients; `parts` gives the loss and its first two derivatives in η."""
    positive = replace(sample, weights=np.maximum(sample.weights, 0.0))
    settings = {"solver": "newton-cholesky", "max_iter": 200, "tol": 1e-9, **unpenalised}
    start = _fit_weighted(name, settings, positive, intercept=intercept)
    z, centre, spread = _standardise(sample, intercept=intercept)
    w, y = sample.weights / np.abs(sample.weights).sum(), sample.response
    slopes = start[int(intercept) :]
    constant = [start[0] + slopes @ centre] if intercept else []
    theta = np.concatenate([constant, slopes * spread])

    def derivatives(at: Floats) -> tuple[float, Floats, Floats]:
        loss, first, second = parts(z @ at, y)
        return float(w @ loss), z.T @ (w * first), (z * (w * second)[:, None]).T @ z

    if (sample.weights < 0).any():
        theta = optimize.minimize(
            lambda at: derivatives(at)[:2],
            theta,
            jac=True,
            hess=lambda at: derivatives(at)[2],
            method="trust-exact",
            options={"gtol": 1e-9, "maxiter": 500},
        ).x
    _, gradient, hessian = derivatives(theta)
    scale = 1.0 + float(np.abs(w @ (z * y[:, None])).max())
    if not float(np.abs(gradient).max()) <= _STEEP * scale or not np.linalg.eigvalsh(hessian)[
        0
    ] > _CURVED * max(1e-3, float(np.trace(hessian))):
        raise _ill_posed(
            sample.weights, "the objective has no minimum, or none that can be told", name
        )
    return _restore(theta, centre, spread, intercept=intercept)


def _refuse_negative(weights: Floats, where: str) -> None:
    if (weights < 0).any():
        raise SpecError(
            "some weights are negative, and with them its objective is not convex", where, HINT
        )


def _check_tau(tau: float) -> None:
    if not 0 < tau < 1:
        raise SpecError("τ must lie between 0 and 1", "quantile", "correct it")


def _ill_posed(weights: Floats, what: str, where: str) -> SpecError:
    """Return the refusal of a fit, with the hint for negative weights where there are some."""
    hint = "leave out features that others determine, or take another estimator"
    return SpecError(what, where, HINT if (weights < 0).any() else hint)


def find_influence(sample: WeightedSample, coefficients: Floats, *, kind: Kind) -> Floats:
    """Return how far one more row at each point moves the coefficients of a regression: a step of Newton.

    Parameters
    ----------
    sample
        What was fitted, with an intercept.
    coefficients
        What was found, the intercept first.
    kind
        The regression: least squares; the canonical link of a Bernoulli or a Poisson response;
        Huber's, its scale held; or the median's, its density by a normal kernel.

    Returns
    -------
    float64 array of shape (n, p).
    """
    z = np.column_stack([np.ones(len(sample.weights)), sample.features])
    eta, weights = z @ coefficients, sample.weights
    score = sample.response - eta
    slope = np.ones(len(eta))
    if kind in _LOSSES:
        _, score, slope = _LOSSES[kind](eta, sample.response)
        score = -score
    elif kind == "huber":
        # the scale solves Σ w min((r / s)², ε²) = Σ w, which scikit-learn minimises
        scales = np.sqrt(np.average(score**2, weights=np.abs(weights))) * np.geomspace(1e-3, 2, 400)
        share = np.abs(weights) / np.abs(weights).sum()
        size = np.array([share @ np.minimum((score / s) ** 2, _HUBER**2) for s in scales])
        end = _HUBER * float(scales[np.argmin(np.abs(size - 1.0))])
        slope = (np.abs(score) < end).astype(float)
        score = np.clip(score, -end, end)
    elif kind == "median":
        spread = np.sqrt(np.average(score**2, weights=np.abs(weights)))
        width = 1.06 * max(float(spread), 1e-300) * max(float(weights.sum()), 1.0) ** -0.2
        slope = np.exp(-0.5 * (score / width) ** 2) / (width * math.sqrt(2.0 * math.pi))
        score = 0.5 * np.sign(np.where(np.abs(score) < 1e-9 * spread, 0.0, score))
    hessian = (z * (weights * slope)[:, None]).T @ z
    return (z * score[:, None]) @ np.linalg.pinv(hessian)


Sampled = TypeVar("Sampled")

_REFUSED = 0.05


@freeze_class(eq=False)
class NoiseError:
    """The part of an estimate's error that comes from the privacy noise.

    Attributes
    ----------
    standard_error
        float64 array of the estimate's shape: its standard deviation over redrawn noise.
    mean
        float64 array of that shape: its mean over redrawn noise.
    repeats
        How many redrawn samples were fitted.
    refused
        How many more were not, having no minimum: they are left out, so the errors are somewhat too
        small if there are any.
    """

    standard_error: Floats
    mean: Floats
    repeats: int
    refused: int


def noise_error(
    estimator: Callable[[Sampled], Any],
    redraw: Callable[[Generator], Sampled],
    *,
    repeats: int = 200,
    rng: Generator,
) -> NoiseError:
    """Return the standard errors that the privacy noise causes, by a parametric bootstrap of the noise; it costs no ε.

    Parameters
    ----------
    estimator
        From a sample to a number or an array.
    redraw
        Gives the released sample with the noise drawn once more, as `make_redraw` or
        `NoisyHistogram.redraw` do.
    repeats
        How many times, at least 2.
    rng
        One of numpy's generators: to analyse a release protects nobody.

    Raises
    ------
    SpecError
        If there are fewer than 2 repeats, or more than one in twenty redrawn samples has no
        estimate.

    Notes
    -----
    The noise is added to counts that have it already. Where the estimate is nearly linear in the
    counts that is no matter; after a threshold, cells that the noise has removed are not there to
    be removed again. Sampling error and the error of taking centres for values are not in it.

    References
    ----------
    Efron and Tibshirani, An introduction to the bootstrap (1993), section 6.5.
    """
    if repeats < 2:
        raise SpecError("the bootstrap needs at least 2 repeats", "repeats", "take 200")
    found: list[Floats] = []
    refused = 0
    while len(found) < repeats:
        try:
            found.append(np.asarray(estimator(redraw(rng)), float))
        except SpecError as error:
            refused += 1
            if refused > max(1.0, _REFUSED * repeats):
                raise SpecError(
                    f"with the noise alone there is often no estimate: {error.what}",
                    error.where,
                    HINT,
                ) from None
    return NoiseError(
        standard_error=np.std(found, axis=0, ddof=1),
        mean=np.mean(found, axis=0),
        repeats=repeats,
        refused=refused,
    )
