"""Movie means from released ratings: what each channel keeps, and the error of estimates beside randomised response.

    python -m pipelines.benchmarks.means --ratings ml_latest_small_ratings.parquet --json means.json

Channels are made for the frequencies of MovieLens-25M; the ratings' own rows are drawn from them. Without `--ratings`, they are simulated. For
movies with at least 30 ratings the figures are root mean square errors of the movies' means, averaged over repeats: of `ReleasedColumn`'s
default and of its unbiased estimate, of randomised response with exact debiasing, and of a constant, the mean of all original ratings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpdask import channels
from dpdask.channels import compute_squared
from dpdask.inference import ReleasedColumn
from dpdask.simulate import ML25M_RATING_COUNTS
from pipelines.benchmarks.common import keep, parser

STARS = np.arange(1, 11) / 2
PROBABILITIES = np.array(ML25M_RATING_COUNTS) / sum(ML25M_RATING_COUNTS)
EPSILONS = (1.0, 2.0, 3.0, 4.0)
LEAST_ROWS = 30


def simulate(n_rows: int, n_movies: int, rng: np.random.Generator) -> pd.DataFrame:
    """Return ratings with MovieLens' frequencies, by movies of uneven popularity whose means differ as MovieLens' do."""
    popularity = (1.0 + np.arange(n_movies)) ** -0.9
    movie = rng.choice(n_movies, n_rows, p=popularity / popularity.sum())
    score = 0.4 * rng.normal(size=n_movies)[movie] + np.sqrt(1 - 0.4**2) * rng.normal(size=n_rows)
    codes = np.searchsorted(
        np.cumsum(PROBABILITIES)[:-1], np.argsort(np.argsort(score)) / n_rows, side="right"
    )
    return pd.DataFrame({"movieId": movie, "rating": STARS[codes]})


def randomised_response(epsilon: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    other = 1.0 / (np.exp(epsilon) + len(STARS) - 1)
    return (
        np.full((len(STARS), len(STARS)), other)
        + np.eye(len(STARS)) * (np.exp(epsilon) - 1) * other
    )


def release(
    ratings: pd.DataFrame, matrix: np.ndarray[Any, Any], rng: np.random.Generator
) -> pd.DataFrame:
    codes = (2 * ratings["rating"].to_numpy()).astype(int) - 1
    drawn = (rng.random(len(codes))[:, None] > matrix.cumsum(axis=1)[codes, :-1]).sum(axis=1)
    return ratings.assign(rating=STARS[drawn])


def measure(ratings: pd.DataFrame, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Return the constant's error, and by ε what optimal-unbiased keeps and the errors of each channel's estimates."""
    rng = np.random.default_rng(seed)
    large = ratings.groupby("movieId").size() >= LEAST_ROWS
    truth = ratings.groupby("movieId")["rating"].mean()[large]

    def error(means: pd.Series) -> float:
        return float(np.sqrt(((means[large] - truth) ** 2).mean()))

    rows = []
    for epsilon in EPSILONS:
        unbiased = channels.optimal_unbiased(PROBABILITIES, epsilon, STARS)
        matrices = {
            "optimal": channels.optimal(PROBABILITIES, epsilon, compute_squared(STARS)).matrix,
            "optimal-unbiased": unbiased.matrix,
            "randomised response": randomised_response(epsilon),
        }
        line = channels.measure_attenuation(unbiased.weights, STARS)
        assert line is not None
        row: dict[str, Any] = {
            "epsilon": epsilon,
            "factor": line.factor,
            "bias_at_most": line.bias_at_most,
        }
        for name, matrix in matrices.items():
            column = ReleasedColumn(name="rating", levels=tuple(STARS.tolist()), matrix=matrix)
            frames = [release(ratings, matrix, rng) for _ in range(repeats)]
            row[name] = float(
                np.mean([error(column.group_means(frame, "movieId").value) for frame in frames])
            )
            if name != "optimal":
                exact = [
                    error(column.group_means(frame, "movieId", approximate=False).value)
                    for frame in frames
                ]
                row[f"{name}, unbiased"] = float(np.mean(exact))
        rows.append(row)
    return {
        "ratings": len(ratings),
        "movies": len(truth),
        "constant": float(np.sqrt(((truth - ratings["rating"].mean()) ** 2).mean())),
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--ratings",
        type=Path,
        help="a Parquet file with movieId and rating in half stars; simulated if not given",
    )
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args(arguments)
    ratings = (
        pd.read_parquet(given.ratings, columns=["movieId", "rating"])
        if given.ratings
        else simulate(100_000, 9_000, np.random.default_rng(1))
    )
    found = measure(ratings, given.repeats)
    print(
        f"{found['ratings']:,} ratings, {found['movies']:,} movies with at least {LEAST_ROWS}; constant {found['constant']:.3f}"
    )
    print(
        pd.DataFrame(found["rows"])
        .set_index("epsilon")
        .T.to_string(float_format=lambda value: f"{value:.3g}")
    )
    keep(found, given.json)


if __name__ == "__main__":
    main()
