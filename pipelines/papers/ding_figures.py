"""Figures 12, 13 and 14 of Ding and Ding, Interval privacy, as SVG, with the numbers that they draw.

    python -m pipelines.papers.ding_figures --folder out/figures

All data are simulated. Needs the `inference` and `papers` extras: pip install -e '.[inference,papers]'.

- Figure 12: prediction error against coverage, and coverage against the spread of the anchors; 50 replications.
- Figure 13: prediction error when t-distributed noise is taken for a Gaussian; 200 replications. Means stand with medians:
  at one degree of freedom (Cauchy) the mean is of a few replications.
- Figure 14: 100 uniform values on [0, 1], their mean estimated by Example 2 from anchors uniform on [-b, 1 + b], and from
  values with Laplace noise: which coverage τ and which α err alike, over 1,000 replications. The paper pairs seven b with
  seven α that it says err almost the same. With noise of scale 1/α, which is what α asks on [0, 1], Example 2 errs 1.7 to 2.0
  times as much, for all seven pairs; with 2/α, which is α/2-private, 0.9 to 1.1 times. So the paper's noise was, it seems,
  twice what its α asks. Both are drawn; the right plot's α holds for the paper's pairs.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from pipelines.papers.ding_moments import mean_case_one
from pipelines.papers.ding_regression import figure_12, figure_13

Floats = Any
N_ROWS = 100
PAIRS = ((22, 0.2), (8, 0.5), (5, 0.8), (4, 1), (2, 2), (1.5, 2.5), (1, 3))
"""b of the anchors and α, as the paper pairs them."""


class Pair(NamedTuple):
    """A point of Figure 14: a b, its coverage τ, an α, and absolute errors of the mean: of Example 2, of Laplace noise of scale 1/α and of 2/α."""

    b: float
    coverage: float
    alpha: float
    interval: Floats
    laplace: Floats
    twice: Floats


def uniform_coverage(b: float) -> float:
    """Return E[F(U)² + (1 - F(U))²], Y uniform on [0, 1], U on [-b, 1 + b], b >= 0: anchors outside [0, 1] tell nothing, those inside 1/3."""
    return (2 * b + 2 / 3) / (1 + 2 * b)


def pair(rng: np.random.Generator, b: float, alpha: float, replications: int) -> Pair:
    """Return the errors of the three over replications, shape (replications,) each; both scales have the same noise."""
    errors = np.empty((3, replications))
    for k in range(replications):
        y, u = rng.uniform(size=N_ROWS), rng.uniform(-b, 1 + b, N_ROWS)
        noise = rng.laplace(0, 1 / alpha, N_ROWS).mean()
        errors[:, k] = (
            mean_case_one(u, y <= u, -b, 1 + b).value,
            y.mean() + noise,
            y.mean() + 2 * noise,
        )
    return Pair(b, uniform_coverage(b), alpha, *np.abs(errors - 0.5))


def standard_error(values: Floats) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def figure_14(seed: int, replications: int) -> list[Pair]:
    """Print what Figure 14 draws; return its pairs."""
    rng, found = np.random.default_rng([seed, 14]), []
    print(
        f"Figure 14: b {'τ':>5} {'α':>5}   {'Example 2':17} {'Laplace, 1/α':17} {'Laplace, 2/α':17} ratios to Laplace   paper"
    )
    for b, alpha in PAIRS:
        one = pair(rng, b, alpha, replications)
        shown = "   ".join(
            f"{losses.mean():.4f} ± {standard_error(losses):.4f}"
            for losses in (one.interval, one.laplace, one.twice)
        )
        ratios = " and ".join(
            f"{one.interval.mean() / losses.mean():.2f}" for losses in (one.laplace, one.twice)
        )
        print(f"{b:10} {one.coverage:6.3f} {alpha:4}   {shown}   {ratios}   almost the same")
        found.append(one)
    return found


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing SVG that is the same at each run."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise SystemExit("figures need matplotlib: pip install -e '.[inference,papers]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ding"
    return importlib.import_module("matplotlib.pyplot")


def band(axes: Any, xs: list[float], losses: list[Floats]) -> None:
    """Draw means by x, with standard errors as a band."""
    means = np.array([one.mean() for one in losses])
    errors = np.array([standard_error(one) for one in losses])
    axes.plot(xs, means, marker="o", label="mean")
    axes.fill_between(xs, means - errors, means + errors, alpha=0.3)


def draw_12(plt: Any, tradeoff: list[tuple[float, float, Floats]]) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    covered = [coverage for _, coverage, _ in tradeoff]
    band(left, covered, [losses for *_, losses in tradeoff])
    left.set(xlabel="privacy coverage", ylabel="prediction error")
    right.plot([scale * np.pi / np.sqrt(3) for scale, *_ in tradeoff], covered, marker="o")
    right.set(xlabel="standard deviation of U", ylabel="privacy coverage")
    return figure


def draw_13(plt: Any, wrong: list[tuple[int, Floats]]) -> Any:
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    degrees = [float(d) for d, _ in wrong]
    band(axes, degrees, [losses for _, losses in wrong])
    medians = [np.median(losses) for _, losses in wrong]
    axes.plot(degrees, medians, marker="s", linestyle="--", label="median")
    axes.set(xlabel="degrees of freedom of the noise", ylabel="mean squared error")
    axes.set(xscale="log", yscale="log")
    axes.legend()
    return figure


def draw_14(plt: Any, pairs: list[Pair]) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    alphas = [one.alpha for one in pairs]
    labels = {
        "interval": "Example 2",
        "laplace": "Laplace, scale 1/α",
        "twice": "Laplace, scale 2/α",
    }
    for name, label in labels.items():
        losses = [getattr(one, name) for one in pairs]
        means, errors = [x.mean() for x in losses], [standard_error(x) for x in losses]
        left.errorbar(alphas, means, errors, marker="o", label=label)
    left.set(xlabel="α (of b: the α that it is paired with)", ylabel="E|error of the mean|")
    left.legend()
    right.plot(alphas, [one.coverage for one in pairs], marker="o")
    right.set(xlabel="α of local differential privacy", ylabel="τ of interval privacy")
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--replications",
        type=int,
        nargs=3,
        default=(50, 200, 1000),
        metavar=("F12", "F13", "F14"),
        help="of each figure",
    )
    options = parser.parse_args(arguments)
    if min(options.replications) < 2:
        parser.error("--replications must be at least 2 each")
    plt = pyplot()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the paper stops after 20 refits
        figures = ((12, figure_12, draw_12), (13, figure_13, draw_13), (14, figure_14, draw_14))
        drawn = {
            f"figure-{number}": draw(plt, experiment(options.seed, n))
            for (number, experiment, draw), n in zip(figures, options.replications, strict=True)
        }
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(options.folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"{name}.svg")


if __name__ == "__main__":
    main()
