"""Weighted estimators against numpy, scikit-learn and statsmodels on the rows that the weights stand for; refusals; the bootstrap."""

import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import refused
from numpy.random import default_rng

from dpdask.inference import m_estimators as me
from dpdask.inference.m_estimators import WeightedSample, noise_error
from dpdask.inference.redraw import make_redraw

linear = pytest.importorskip("sklearn.linear_model")
api = pytest.importorskip("statsmodels.api")


def glm(family):
    return lambda x, y: api.GLM(y, x, family=family).fit(tol=1e-13).params


# the estimator, what another library gives for the expanded rows, and how nearly they agree
FITS = {
    "linear": (me.least_squares, lambda x, y: np.linalg.lstsq(x, y, rcond=None)[0], 1e-9),
    "logistic": (me.logistic, glm(api.families.Binomial()), 1e-6),
    "poisson": (me.poisson, glm(api.families.Poisson()), 1e-6),
}


def sample(kind="linear", n=400, seed=0):
    rng = default_rng(seed)
    x = np.column_stack([rng.normal(1500.0, 400.0, n), rng.integers(0, 3, n)])
    eta = 0.3 + 0.002 * (x[:, 0] - 1500.0) - 0.5 * x[:, 1]
    y = {
        "linear": 10.0 * eta + rng.standard_t(3, n),
        "logistic": (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float),
        "poisson": rng.poisson(np.exp(eta)).astype(float),
    }[kind]
    return WeightedSample(features=x, response=y, weights=rng.integers(0, 6, n).astype(float))


def expanded(given):
    times = given.weights.astype(int)
    return np.repeat(given.features, times, axis=0), np.repeat(given.response, times)


def with_constant(x):
    return np.column_stack([np.ones(len(x)), x])


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kind", FITS)
def test_an_estimate_is_that_of_the_expanded_rows(kind, intercept):
    given, (fit, expected, rel) = sample(kind), FITS[kind]
    x, y = expanded(given)
    assert fit(given, intercept=intercept) == pytest.approx(
        expected(with_constant(x) if intercept else x, y), rel=rel
    )


@pytest.mark.parametrize("tau", [0.25, 0.5, 0.9])
def test_quantile_regression_reaches_the_least_objective_of_the_expanded_rows(tau):
    given = sample(n=150)
    x, y = expanded(given)

    def objective(theta):
        residual = y - with_constant(x) @ theta
        return float(np.sum(residual * (tau - (residual < 0))))

    found = me.quantile_regression(given, tau)
    expected = api.QuantReg(y, with_constant(x)).fit(q=tau, max_iter=20_000).params
    assert objective(found) <= objective(expected) * (1 + 1e-9)
    assert found == pytest.approx(expected, rel=0.05, abs=0.05)


def test_huber_is_that_of_the_expanded_rows():
    given = sample()
    x, y = expanded(given)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    model = linear.HuberRegressor(alpha=0.0, tol=1e-8, max_iter=2000).fit(z, y)
    slopes = model.coef_ / x.std(axis=0)
    assert me.huber(given) == pytest.approx(
        np.append(model.intercept_ - slopes @ x.mean(axis=0), slopes), rel=1e-3
    )


@pytest.mark.parametrize("tau", [0.1, 0.33, 0.5, 0.77, 0.999])
def test_quantiles_are_those_of_the_expanded_rows(tau):
    rng = default_rng(3)
    x, w = rng.integers(0, 40, 60).astype(float), rng.integers(0, 7, 60).astype(float)
    assert me.quantile(x, w, tau) == np.quantile(
        np.repeat(x, w.astype(int)), tau, method="inverted_cdf"
    )


def test_a_quantile_with_negative_weights_is_the_global_minimum():
    rng = default_rng(4)
    for _ in range(200):
        x, w = rng.integers(0, 15, 20).astype(float), rng.integers(-3, 6, 20).astype(float)
        if w.sum() > 0:
            at = np.unique(x)
            objective = [float(w @ ((x - theta) * (0.3 - (x < theta)))) for theta in at]
            assert objective[int(np.searchsorted(at, me.quantile(x, w, 0.3)))] == pytest.approx(
                min(objective), abs=1e-9
            )


def logistic_contrast(points, theta):
    x, y = with_constant(points[:, :-1]), points[:, -1]
    eta = x @ theta
    return np.logaddexp(0, eta) - y * eta, x * (1 / (1 + np.exp(-eta)) - y)[:, None]


@pytest.mark.parametrize("negative", [False, True])
def test_any_contrast_finds_what_the_named_estimator_finds(negative):
    given = sample("logistic")
    x = (given.features - [1500.0, 1.0]) / [400.0, 1.0]
    weights = given.weights - 2.0 * (np.arange(len(x)) % 25 == 0) if negative else given.weights
    assert bool((weights < 0).any()) is negative
    given = WeightedSample(features=x, response=given.response, weights=weights)
    found = me.minimise(
        logistic_contrast, np.column_stack([x, given.response]), weights, np.zeros(3)
    )
    assert me.logistic(given) == pytest.approx(found, rel=1e-4)


def test_negative_weights_cancel_positive_ones():
    """A cell and its negative are no cell: closed form and local minimum alike."""
    for kind, (fit, _, _) in FITS.items():
        given = sample(kind)
        double = WeightedSample(
            features=np.vstack([given.features, given.features[:90], given.features[:90]]),
            response=np.concatenate(
                [given.response, 0 * given.response[:90], 0 * given.response[:90]]
            ),
            weights=np.concatenate([given.weights, np.full(90, 2.0), np.full(90, -2.0)]),
        )
        assert fit(double) == pytest.approx(fit(given), rel=1e-5)


def test_samples_are_checked():
    given = sample()
    with refused("shapes"):
        replace(given, response=given.response[1:])
    with refused("not finite"):
        replace(given, weights=np.where(np.arange(400) == 3, np.nan, 1.0))
    with refused("null, NaN"):
        replace(given, features=given.features + np.inf)
    for left in (
        -given.weights,
        np.zeros(400),
        np.resize([1.0, -1.0], 400),
    ):  # as where a threshold left nothing
        with refused(
            "weights: the weights sum to 0, so they hold no sample; release with a larger epsilon"
        ):
            replace(given, weights=left)


def test_ill_posed_fits_are_refused():
    given = sample()
    collinear = replace(given, features=given.features[:, [0, 0]])
    with refused("not positive definite"):
        me.least_squares(collinear)
    far = np.abs(given.features[:, 0] - 1500.0) > 300
    with refused("not positive definite.*threshold"):
        me.least_squares(replace(given, weights=np.where(far, -1.0, 3.0)))
    with refused("does not vary"):
        me.least_squares(replace(given, features=0 * given.features + 1))
    negative = replace(given, weights=given.weights - 0.5)
    for fit in (me.huber, me.quantile_regression):
        with refused("not convex"):
            fit(negative)
    with refused("between 0 and 1"):
        me.quantile_regression(given, 1.0)
    with refused("between 0 and 1"):
        me.quantile(given.response, given.weights, 0.0)
    with refused("one for each weight"):
        me.quantile(given.response[1:], given.weights, 0.5)
    with refused("0 or 1"):
        me.logistic(given)
    with refused("not be negative"):
        me.poisson(given)


def test_logistic_fits_without_a_minimum_are_refused():
    given = sample("logistic")
    with refused(r"LogisticRegression: .*minimum"):
        me.logistic(replace(given, response=(given.features[:, 0] > 1500).astype(float)))
    with refused(r"LogisticRegression: .*minimum"):  # the curvature at the middle is taken away
        me.logistic(
            replace(given, weights=np.where(np.abs(given.features[:, 0] - 1500) > 400, 4.0, -1.6))
        )


def test_a_bad_contrast_is_one_clear_error():
    points, weights = np.ones((5, 1)), np.ones(5)
    with refused("gives NaN"):
        me.minimise(
            lambda x, theta: (np.sqrt(-1.0 - x[:, 0] ** 2), x), points, weights, np.zeros(1)
        )
    with refused("gives NaN"):  # on the way to the minimum, at 1
        off = lambda x, theta: theta[0] - x[:, 0]  # noqa: E731 - a contrast in one line
        me.minimise(
            lambda x, theta: (
                off(x, theta) ** 2 if theta[0] < 0.25 else np.nan * x[:, 0],
                2.0 * off(x, theta)[:, None],
            ),
            points,
            weights,
            np.zeros(1),
        )
    with refused("shape"):
        me.minimise(lambda x, theta: (np.float64(1.0), x), points, weights, np.zeros(1))  # type: ignore[arg-type,return-value]  # what is tested
    with refused("no minimum"):
        me.minimise(lambda x, theta: (x[:, 0] * theta[0], x), points, weights, np.zeros(1))
    with refused("no strict minimum"):
        me.minimise(
            lambda x, theta: (x[:, 0] * theta[0] ** 2, 2 * theta[0] * x),
            np.array([[-3.0], [1.0]]),
            np.array([2.0, -1.0]),
            np.zeros(1),
        )


def test_a_frame_gives_indicators_of_its_levels():
    frame = pd.DataFrame(
        {
            "price": [1.0, 2.0, 3.0],
            "county": ["A", "B", "A"],
            "year": [2003, 2004, 2005],
            "weight": [2, 3, 4],
        }
    )
    given = WeightedSample.of_frame(frame, "price", ["year", "county"])
    assert given.names == ("year", "county_B")
    assert given.features.tolist() == [[2003, 0], [2004, 1], [2005, 0]]
    with refused("no such column"):
        WeightedSample.of_frame(frame, "price", ["size"])
    with refused("must be a number"):
        WeightedSample.of_frame(frame, "county", ["year"])


# The bootstrap of the noise


def grid(seed=0):
    rng = default_rng(seed)
    x = rng.random(40_000)
    cells = np.histogram2d(
        x, 0.2 + 0.5 * x + rng.normal(0, 0.1, len(x)), bins=12, range=[[0, 1], [-0.2, 1.2]]
    )[0]
    a, b = np.meshgrid(
        (np.arange(12) + 0.5) / 12, -0.2 + 1.4 * (np.arange(12) + 0.5) / 12, indexing="ij"
    )
    return WeightedSample(features=a.reshape(-1, 1), response=b.ravel(), weights=cells.ravel())


@pytest.mark.parametrize(("cut", "tolerance"), [(None, 0.25), (30, 0.35)])
def test_the_bootstrap_gives_the_spread_of_repeated_noise(cut, tolerance):
    rng, exact, scale = default_rng(5), grid(), 20.0
    release = make_redraw(exact, scale, cut)
    true = np.std([me.least_squares(release(rng)) for _ in range(400)], axis=0, ddof=1)
    found = np.mean(
        [
            noise_error(
                me.least_squares, make_redraw(release(rng), scale, cut), repeats=100, rng=rng
            ).standard_error
            for _ in range(4)
        ],
        axis=0,
    )
    assert found == pytest.approx(true, rel=tolerance)
    half = noise_error(
        me.least_squares, make_redraw(release(rng), scale / 2, cut), repeats=150, rng=rng
    ).standard_error
    assert half != pytest.approx(true, rel=tolerance)


def test_redrawn_noise_has_its_variance_and_its_threshold():
    rng, scale = default_rng(6), 3.0
    wide = WeightedSample(
        features=np.ones((100_000, 1)), response=np.ones(100_000), weights=np.full(100_000, 5.0)
    )
    noise = make_redraw(wide, scale)(rng).weights - 5.0
    alpha = np.exp(-1 / scale)
    assert noise.var() == pytest.approx(2 * alpha / (1 - alpha) ** 2, rel=0.04)
    kept = make_redraw(wide, scale, 4)(rng).weights
    assert set(np.unique(kept)) & {1.0, 2.0, 3.0, -1.0} == set()
    assert (kept == 0).any()


def test_a_bootstrap_that_cannot_fit_says_so():
    rng = default_rng(7)
    with refused("at least 2"):
        noise_error(me.least_squares, make_redraw(grid(), 1.0), repeats=1, rng=rng)
    with refused("often no estimate"):
        noise_error(
            me.least_squares,
            make_redraw(replace(grid(), weights=grid().weights / 1000), 100.0),
            repeats=50,
            rng=rng,
        )
    counted = noise_error(
        lambda given: me.quantile(given.response, given.weights, 0.5),
        make_redraw(grid(), 20.0),
        repeats=20,
        rng=rng,
    )
    assert (counted.repeats, counted.refused, counted.standard_error.shape) == (20, 0, ())
    x, y, weights = (
        np.array([[0.0], [1.0], [2.0], [3.0]]),
        np.array([0.0, 1.0, 2.0, 9.0]),
        np.array([3.0, 2.0, 4.0, 0.0]),
    )
    widened = WeightedSample(
        features=x, response=y, weights=weights, widths=np.ones_like(x)
    )  # a point without a weight changes nothing
    np.testing.assert_allclose(me.quantile_regression(widened), [0.0, 1.0], atol=1e-9)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with refused(r"pip install 'dpdask\[inference\]'"):
        me.huber(sample())
