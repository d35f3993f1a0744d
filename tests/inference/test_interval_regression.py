"""Regression on ranges: the truth recovered where midpoints are biased, σ, rings and points, refusals, scikit-learn's own checks."""

import importlib
import math
import sys
import warnings

import numpy as np
import pytest
from numpy.random import default_rng

pytest.importorskip("sklearn", reason="interval regression needs the extra dpdask[inference]")

from sklearn.base import clone
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from dpdask.inference.interval_regression import IntervalRegressor, leave_out

INF = math.inf
SLOPES = np.array([2.0, -1.0])
SIGMA = 1.5
NOISES = ["gaussian", "logistic"]


def line(rng, n, noise="gaussian"):
    """X and Y = 3 + 2 X₁ - X₂ + ε."""
    X = rng.normal(size=(n, 2))
    standard = (
        rng.normal(size=n)
        if noise == "gaussian"
        else rng.logistic(scale=math.sqrt(3) / math.pi, size=n)
    )
    return X, 3 + X @ SLOPES + SIGMA * standard


def case_two(rng, y, centre=3.0, scale=3.0):
    u, v = np.sort(rng.logistic(centre, scale, (len(y), 2)), axis=1).T
    return np.column_stack(
        [
            np.where(y <= u, -INF, np.where(y <= v, u, v)),
            np.where(y <= u, u, np.where(y <= v, v, INF)),
        ]
    )


def rings(rng, y):
    """(u, v] where Y is inside, else the two outer ranges joined."""
    u, v = np.sort(rng.logistic(3, 3, (len(y), 2)), axis=1).T
    inside = (u < y) & (y <= v)
    return np.column_stack([np.where(inside, u, v), np.where(inside, v, u)])


def midpoints(ranges):
    low = np.where(np.isinf(ranges[:, 0]), ranges[:, 1], ranges[:, 0])
    return (low + np.where(np.isinf(ranges[:, 1]), ranges[:, 0], ranges[:, 1])) / 2


def t_values(slopes):
    """How many standard errors the mean over replications lies from the truth, by slope."""
    return np.abs(slopes.mean(axis=0) - SLOPES) / (
        slopes.std(axis=0, ddof=1) / np.sqrt(len(slopes))
    )


# The truth recovered


@pytest.mark.parametrize("noise", NOISES)
def test_the_line_is_recovered_where_midpoints_are_biased(noise):
    ours, naive, sigmas = [], [], []
    for k in range(8):
        rng = default_rng([11, k])
        X, y = line(rng, 400, noise)
        ranges = case_two(rng, y)
        model = IntervalRegressor(noise=noise, tolerance=1e-3).fit(X, ranges)
        ours.append(model.estimator_.coef_)
        sigmas.append(model.sigma_)
        naive.append(LinearRegression().fit(X, midpoints(ranges)).coef_)
    assert t_values(np.array(ours)).max() < 4.5
    assert t_values(np.array(naive)).min() > 8  # the same check has the power to refuse
    assert np.abs(np.array(ours).mean(axis=0) - SLOPES).max() < 0.1
    error = np.std(sigmas, ddof=1) / math.sqrt(len(sigmas))
    assert abs(np.mean(sigmas) - SIGMA) < 4.5 * error + 0.02  # σ̂ has a bias of order 1/n
    assert error < 0.07


@pytest.mark.parametrize("noise", NOISES)
def test_rings_and_mixtures_are_used(noise):
    rng = default_rng(12)
    X, y = line(rng, 3000, noise)
    ranges = rings(rng, y)
    ranges[:300] = y[:300, None]
    ranges[300:400] = [-INF, INF]  # no information: neither help nor harm
    model = IntervalRegressor(noise=noise).fit(X, ranges)
    assert model.converged_
    assert np.abs(model.estimator_.coef_ - SLOPES).max() < 0.15
    assert model.sigma_ == pytest.approx(SIGMA, abs=0.15)
    assert model.responses_[:300] == pytest.approx(y[:300], rel=0, abs=0)


def test_the_likelihood_never_falls():
    rng = default_rng(14)
    X, y = line(rng, 400)
    model = IntervalRegressor().fit(X, case_two(rng, y))
    assert len(model.objective_path_) == model.n_iter_ + 1
    assert np.diff(model.objective_path_).min() > -1e-12
    assert model.objective_path_[-1] == pytest.approx(
        model.score(X, case_two(default_rng(14), y)), abs=1.0
    )


def test_the_answer_moves_with_the_data():
    rng = default_rng(15)
    X, y = line(rng, 500)
    ranges = case_two(rng, y)
    model = IntervalRegressor().fit(X, ranges)
    moved = IntervalRegressor().fit(X, 1e4 + 10 * ranges)
    assert moved.predict(X) == pytest.approx(1e4 + 10 * model.predict(X), abs=1e-4)
    assert moved.sigma_ == pytest.approx(10 * model.sigma_, rel=1e-6)
    mirrored = IntervalRegressor().fit(X, -ranges[:, ::-1])
    assert mirrored.predict(X) == pytest.approx(-model.predict(X), abs=1e-6)


@pytest.mark.parametrize(
    "estimator",
    [
        RandomForestRegressor(30, max_depth=4, random_state=0),
        GradientBoostingRegressor(n_estimators=30, random_state=0),
    ],
)
def test_a_tree_ensemble_beats_itself_on_midpoints(estimator):
    rng = default_rng(17)
    X = rng.normal(size=(500, 1))
    truth = X[:, 0] ** 2 - 2 * X[:, 0] + 3
    ranges = case_two(rng, truth + rng.normal(size=500), centre=0.0, scale=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = IntervalRegressor(estimator, max_iterations=20).fit(X, ranges)
    ours = np.mean((model.predict(X) - truth) ** 2)
    naive = np.mean((clone(estimator).fit(X, midpoints(ranges)).predict(X) - truth) ** 2)
    assert ours < 0.5 * naive
    assert model.objective_path_[-1] > model.objective_path_[0]


# Points


@pytest.mark.parametrize(
    "estimator", [LinearRegression(), RandomForestRegressor(10, random_state=3)]
)
@pytest.mark.parametrize("noise", NOISES)
def test_points_alone_are_the_plain_regression(estimator, noise):
    rng = default_rng(18)
    X, y = line(rng, 200)
    plain = clone(estimator).fit(X, y).predict(X)
    for responses in (y, np.column_stack([y, y])):
        model = IntervalRegressor(estimator, noise=noise).fit(X, responses)
        np.testing.assert_array_equal(model.predict(X), plain)
        assert (model.n_iter_, model.converged_, len(model.objective_path_)) == (1, True, 1)
        assert model.sigma_ == pytest.approx(math.sqrt(np.mean((y - plain) ** 2)))


# What scikit-learn expects


def test_scores():
    rng = default_rng(19)
    X, y = line(rng, 300)
    ranges = case_two(rng, y)
    model = IntervalRegressor().fit(X, ranges)
    residual = np.sum((y - model.predict(X)) ** 2) / np.sum((y - y.mean()) ** 2)
    assert model.score(X, y) == pytest.approx(1 - residual)
    assert model.score(X, ranges) == pytest.approx(model.objective_path_[-1])
    assert model.score(X, ranges, sample_weight=np.arange(300) == 0) == pytest.approx(
        model.score(X[:1], ranges[:1])
    )
    search = GridSearchCV(
        IntervalRegressor(tolerance=1e-3, max_iterations=500), {"sigma": [0.2, SIGMA, 9.0]}, cv=3
    ).fit(X, ranges)
    assert search.best_params_ == {"sigma": SIGMA}  # ranges alone can choose


def test_no_convergence_is_said():
    rng = default_rng(21)
    X, y = line(rng, 200)
    with pytest.warns(ConvergenceWarning, match="did not converge in 2 refits"):
        model = IntervalRegressor(max_iterations=2).fit(X, case_two(rng, y))
    assert not model.converged_
    assert model.n_iter_ == 2


def test_sigma_does_not_reach_zero():
    X = np.arange(20.0)[:, None]
    ranges = np.column_stack([X[:, 0] - 0.5, X[:, 0] + 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = IntervalRegressor().fit(X, ranges)
    assert model.sigma_ > 0
    assert np.isfinite(model.predict(X)).all()
    assert np.abs(model.predict(X) - X[:, 0]).max() < 0.5


X4 = [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("y", "says"),
    [
        ([[-INF, INF]] * 4, "do not identify f"),
        ([[-INF, 1], [-INF, 2], [-INF, 3], [-INF, INF]], "do not identify f"),
        ([[2, INF], [3, INF], [4, INF], [5, INF]], "do not identify f"),
        ([[2, 1], [3, 1], [4, 1], [5, 1]], "do not identify f"),
        ([[-INF, 1], [1, INF], [1, INF], [-INF, 1]], "do not identify sigma"),
        ([[0, 1], [INF, INF], [1, 2], [3, 4]], "empty range"),
        ([[0, 1], [1, -INF], [1, 2], [3, 4]], "empty range"),
        ([[0, 1], [INF, 2], [1, 2], [3, 4]], "empty range"),
        ([[0, 1], [math.nan, 2], [1, 2], [3, 4]], "NaN"),
        ([[0, 1, 2]] * 4, "shape"),
        ([1, 2, INF, 3], "infinity"),
        ([[0, 1]] * 3, "inconsistent"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_line(y, says):
    with pytest.raises(ValueError, match=says) as caught:
        IntervalRegressor().fit(X4, y)
    if says != "infinity":
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": "cauchy"},
        {"sigma": 0.0},
        {"sigma": INF},
        {"sigma": math.nan},
        {"initial": INF},
        {"max_iterations": 0},
        {"tolerance": 0.0},
        {"damping": 1.0},
        {"damping": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError):
        IntervalRegressor(**settings).fit(X4, [1, 2, 3, 4])


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    name = "dpdask.inference.interval_regression"
    for module in [module for module in sys.modules if module.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"dpdask\[inference\]"):
        importlib.import_module(name)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        IntervalRegressor(),
        IntervalRegressor(
            GradientBoostingRegressor(n_estimators=20), noise="logistic", random_state=0
        ),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)  # none is expected to fail


# Without some rows


@pytest.mark.parametrize("kind", [case_two, rings])
def test_slopes_without_a_group_are_those_of_a_fit_of_the_others(kind):
    rng = default_rng(29)
    X, y = line(rng, 600)
    X *= [10.0, 0.1]
    ranges, group = kind(rng, y), np.arange(600) % 5
    settings = {"tolerance": 1e-8, "max_iterations": 2000}
    model = IntervalRegressor(**settings).fit(X, ranges)
    fits = [IntervalRegressor(**settings).fit(X[group != k], ranges[group != k]) for k in range(5)]
    moved = np.stack([each.estimator_.coef_ for each in fits]) - model.estimator_.coef_
    found = leave_out(model, X, ranges, group) - model.estimator_.coef_
    assert (np.abs(found - moved).max(axis=0) < 0.15 * np.abs(moved).max(axis=0)).all()
    with pytest.raises(np.linalg.LinAlgError):
        leave_out(model, X * [1.0, 0.0], ranges, group)
