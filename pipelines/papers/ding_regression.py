"""The regression experiments of Ding and Ding, Interval privacy: section IV-B (Figures 10 and 11) and S1 (Figures 12 and 13).

    python pipelines/papers/ding_regression.py --replications 50

The paper draws these results and prints few numbers; each line says what it asserts and what is found here. Medians stand
beside means: where almost all of 200 rows say nothing, single replications weigh heavily. Needs the `inference` extra.
`ding_figures.py` draws figures 12 to 14.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression

from dpdask.inference.interval_regression import IntervalRegressor

Floats = Any
ROWS = 200
ITERATIONS = 20
SHOWN = (1, 3, 10, 20)
SCALES = (0.1, 0.3, 0.5, 1, 3, 5, 10, 20, 30)
DEGREES = (1000, 100, 10, 5, 3, 1)


def ranges(y: Floats, anchors: Floats) -> Floats:
    """Return the range (lower, upper] that contains each y, float64 array (n, 2); `anchors` (n, m) are sorted in their rows."""
    ends = np.column_stack([np.full(len(y), -np.inf), anchors, np.full(len(y), np.inf)])
    place = (y[:, None] > anchors).sum(axis=1)[:, None]
    return np.take_along_axis(ends, np.hstack([place, place + 1]), axis=1)


def coverage(y: Floats, anchors: Floats) -> float:
    """Return the mean over anchors of Σ F(range)², F the empirical distribution of a large sample y."""
    ordered = np.sort(y)
    below = np.searchsorted(ordered, anchors, side="right") / len(y)
    steps = np.diff(np.column_stack([np.zeros(len(anchors)), below, np.ones(len(anchors))]), axis=1)
    return float((steps**2).sum(axis=1).mean())


def linear(
    rng: np.random.Generator, n: int, noise: Callable[[int], Floats] | None = None
) -> tuple[Floats, Floats]:
    """Return X and Y = X + ε of the first experiment."""
    x = rng.normal(size=n)
    return x[:, None], x + (rng.normal(size=n) if noise is None else noise(n))


def quadratic(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    """Return features (X, X²) and Y = X² - 2X + 3 + ε of the second."""
    x = rng.normal(size=n)
    return np.column_stack([x, x**2]), x**2 - 2 * x + 3 + rng.normal(size=n)


def through_origin(sigma: float | None, iterations: int = ITERATIONS) -> IntervalRegressor:
    """Return Algorithm 1 as in Figure 10: f̂(x) = β̂x from f̂ = 0, `iterations` times unless it converges."""
    return IntervalRegressor(
        LinearRegression(fit_intercept=False), sigma=sigma, initial=0.0, max_iterations=iterations
    )


def loss(estimator: LinearRegression) -> float:
    """Return E (f(X) - f̂(X))² of a slope, X ~ N(0, 1), where the true slope is 1."""
    return float((estimator.coef_[0] - 1) ** 2)


def forest(seed: int) -> RandomForestRegressor:
    return RandomForestRegressor(100, max_depth=3, random_state=seed)


def refitted(
    rng: np.random.Generator,
    replications: int,
    scale: float,
    noise: Callable[[int], Floats] | None = None,
) -> Floats:
    """Return the losses of Figure 10's regression after 20 refits, for anchors of some scale."""
    losses = []
    for _ in range(replications):
        X, y = linear(rng, ROWS, noise)
        seen = ranges(y, rng.logistic(0, scale, (ROWS, 1)))
        losses.append(loss(through_origin(1.0).fit(X, seen).estimator_))
    return np.array(losses)


def line(what: str, ours: Floats, paper: str) -> None:
    found = np.asarray(ours)
    error = found.std(ddof=1) / np.sqrt(len(found))
    print(
        f"{what:<66} {found.mean():9.4f} ± {error:.4f} (median {np.median(found):.4f})   paper: {paper}"
    )


def figure_10(seed: int, replications: int) -> dict[int, Floats]:
    """Print the error of the linear regression as it is refitted; return its losses after so many refits."""
    rng = np.random.default_rng([seed, 10])
    losses: dict[int, list[float]] = {steps: [] for steps in SHOWN}
    known, free, oracle = [], [], []
    for _ in range(replications):
        X, y = linear(rng, ROWS)
        seen = ranges(y, rng.logistic(0, 5, (ROWS, 1)))
        settings = [(found, 1.0, steps) for steps, found in losses.items()]
        for found, sigma, steps in (*settings, (known, 1.0, 500), (free, None, 500)):
            found.append(loss(through_origin(sigma, steps).fit(X, seen).estimator_))
        oracle.append(loss(LinearRegression(fit_intercept=False).fit(X, y)))
    large = linear(rng, 100_000)[1]
    covered = [coverage(large, rng.logistic(0, 5, (1000, 1))) for _ in range(9)]
    line("Figure 10, linear: coverage", covered, "around 0.9")
    for steps, found in losses.items():
        what = f"Figure 10, linear: L2 loss after {steps} refits, σ = 1"
        line(what, found, "falls from 1, flat within 20")
    line("Figure 10, linear: L2 loss at convergence, σ = 1", known, "that after 20")
    line("Figure 10, linear: L2 loss at convergence, σ estimated", free, "-")
    line("Figure 10, linear: L2 loss of the raw data", oracle, "-")
    return {steps: np.array(found) for steps, found in losses.items()}


def figure_11(seed: int, replications: int) -> None:
    """Print the error of the random forest on Case-II ranges, of the raw data's, and of a forest on midpoints."""
    rng = np.random.default_rng([seed, 11])
    X_new, _ = quadratic(rng, 5000)
    truth = X_new[:, 1] - 2 * X_new[:, 0] + 3
    refits = {
        "1 refit": (1, 1.0),
        "3 refits": (3, 1.0),
        "20 refits": (20, 1.0),
        "20 refits, σ estimated": (20, None),
    }
    losses: dict[str, list[float]] = {what: [] for what in (*refits, "raw data", "midpoints")}
    coverages = []
    for k in range(replications):
        X, y = quadratic(rng, ROWS)
        anchors = np.sort(rng.logistic(0, 5, (ROWS, 2)), axis=1)
        seen = ranges(y, anchors)
        coverages.append(coverage(y, anchors))
        fitted = {
            what: IntervalRegressor(forest(k), sigma=sigma, initial=0.0, max_iterations=steps).fit(
                X, seen
            )
            for what, (steps, sigma) in refits.items()
        }
        fitted["raw data"] = forest(k).fit(X, y)
        fitted["midpoints"] = forest(k).fit(X, midpoints(seen))
        for what, model in fitted.items():
            losses[what].append(float(np.mean((model.predict(X_new) - truth) ** 2)))
    line("Figure 11, forest: coverage", coverages, "around 0.9")
    for what, found in losses.items():
        paper = "falls, flat within 20" if "refit" in what else "-"
        line(f"Figure 11, forest: L2 loss, {what}", found, paper)


def midpoints(seen: Floats) -> Floats:
    """Return what one would do without Algorithm 1: the middle of a range, or its finite end."""
    low = np.where(np.isinf(seen[:, 0]), seen[:, 1], seen[:, 0])
    high = np.where(np.isinf(seen[:, 1]), seen[:, 0], seen[:, 1])
    return (low + high) / 2


def figure_12(seed: int, replications: int) -> list[tuple[float, float, Floats]]:
    """Print loss against coverage as the anchors spread; return (scale, coverage, losses)."""
    rng = np.random.default_rng([seed, 12])
    large, found = linear(rng, 100_000)[1], []
    for scale in SCALES:
        losses = refitted(rng, replications, scale)
        covered = coverage(large, rng.logistic(0, scale, (5000, 1)))
        line(
            f"Figure 12: L2 loss, anchors' scale {scale}, coverage {covered:.3f}",
            losses,
            "flat until coverage is very near 1",
        )
        found.append((scale, covered, losses))
    return found


def figure_13(seed: int, replications: int) -> list[tuple[int, Floats]]:
    """Print loss when ε is t-distributed and taken for a Gaussian; return (degrees, losses)."""
    rng = np.random.default_rng([seed, 13])
    found = []
    for degrees in DEGREES:
        noise = partial(rng.standard_t, degrees)
        losses = refitted(rng, replications, 5, noise)
        line(
            f"Figure 13: L2 loss, t noise of {degrees} degrees",
            losses,
            "not severely affected; least at 1000",
        )
        found.append((degrees, losses))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--replications", type=int, default=50, help="of figures 10, 12 and 13; of 11, a fifth"
    )
    options = parser.parse_args(arguments)
    if options.replications < 10:
        parser.error("--replications must be at least 10")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the paper stops after 20 refits
        figure_10(options.seed, options.replications)
        figure_11(options.seed, options.replications // 5)
        figure_12(options.seed, options.replications)
        figure_13(options.seed, options.replications)


if __name__ == "__main__":
    main()
