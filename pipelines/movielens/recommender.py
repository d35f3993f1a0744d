"""What a recommender loses when it is trained on released ratings: test RMSE on MovieLens-1M.

    python pipelines/movielens/recommender.py RATINGS.parquet [--epsilons 1 2 3 4] [--seed 0] [--json]

RATINGS has the columns UserID, MovieID and Rating (1 to 5); its licence forbids passing it on, so fetch it yourself:
https://grouplens.org/datasets/movielens/1m/. A random quarter of the rows is the test set; its ratings are the true
ones, and every method is judged on them. Of the other three quarters:

hold-out    a quarter shapes the reference and is not released; the rest is released with ε. The non-private baseline
            beside it is trained on the very same rows.
histogram   all are released: the reference is their histogram with discrete Laplace noise (ε_ref = 0.1 ε), each row
            pays ε_row = 0.9 ε, so every training row is covered by ε. Its baseline is trained on all of them.

A debiased method replaces each released rating by its pseudo-rating g with T g = ratings (dpdask.inference), from the
channel alone; where the channel merges ratings or nearly loses a direction (condition number above 10), by the nearest.

The model is ours (the libraries for explicit ratings that were tried did not install beside numpy 2): mean + user bias + movie
bias + product of 8 factors, by alternating least squares. All methods are tuned by one rule, which a user of the
release can follow too: a tenth of the ratings *as the method sees them* is set aside, and of one grid of ridge
penalties (in units of the residual standard deviation) the best on it is taken. True ratings never tune a private method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass, replace

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpdask import channels
from dpdask.cells import cells
from dpdask.codec import LevelCodec
from dpdask.inference import ReleasedColumn
from dpdask.privacy.noise import perturb
from dpdask.references.histogram import distribution_of, histogram_event
from dpdask.stats.statistic import CellCounts

RATINGS = np.arange(1.0, 6.0)
N_FACTORS, SWEEPS, BIAS_SWEEPS = 8, 8, 6
BIAS_PENALTIES = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
# from strong to weak, until it gets worse
FACTOR_PENALTIES = (80.0, 50.0, 35.0, 25.0, 18.0, 13.0, 9.0)
REFERENCE_SHARE = 0.1
MAX_CONDITION = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Who rated what, and how: three arrays of one length, users and movies numbered from 0."""

    users: np.ndarray
    movies: np.ndarray
    ratings: np.ndarray
    shape: tuple[int, int]

    def rows(self, which: np.ndarray) -> Table:
        parts = {name: getattr(self, name)[which] for name in ("users", "movies", "ratings")}
        return replace(self, **parts)

    def rated(self, ratings: np.ndarray) -> Table:
        return replace(self, ratings=ratings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """mean + user bias + movie bias + user factors · movie factors."""

    mean: float
    user_bias: np.ndarray
    movie_bias: np.ndarray
    user_factors: np.ndarray | None = None
    movie_factors: np.ndarray | None = None

    def predict(self, table: Table) -> np.ndarray:
        rating = self.mean + self.user_bias[table.users] + self.movie_bias[table.movies]
        if self.user_factors is not None:
            rating += np.einsum(
                "ij,ij->i", self.user_factors[table.users], self.movie_factors[table.movies]
            )
        return rating

    def error(self, table: Table) -> float:
        """Return the mean squared error."""
        return float(np.mean((self.predict(table) - table.ratings) ** 2))


def fit_biases(table: Table, user_penalty: float, movie_penalty: float) -> Model:
    users, movies = np.zeros(table.shape[0]), np.zeros(table.shape[1])
    mean = float(table.ratings.mean())
    centred = table.ratings - mean
    per_user = np.bincount(table.users, minlength=table.shape[0]) + user_penalty
    per_movie = np.bincount(table.movies, minlength=table.shape[1]) + movie_penalty
    for _ in range(BIAS_SWEEPS):
        movies = np.bincount(table.movies, centred - users[table.users], table.shape[1]) / per_movie
        users = np.bincount(table.users, centred - movies[table.movies], table.shape[0]) / per_user
    return Model(mean=mean, user_bias=users, movie_bias=movies)


def fit_factors(table: Table, biases: Model, penalty: float) -> Model:
    """Return the model with factors of the biases' residuals; the penalty is in units of their standard deviation."""
    residuals = table.ratings - biases.predict(table)
    scale = float(residuals.std())
    sides = [
        grouped(table.users, table.movies, residuals / scale, table.shape[0]),
        grouped(table.movies, table.users, residuals / scale, table.shape[1]),
    ]
    movies = np.random.default_rng(0).normal(0.0, 0.1, (table.shape[1], N_FACTORS))
    users = np.zeros((table.shape[0], N_FACTORS))
    for _ in range(SWEEPS):
        solve_side(*sides[0], users, movies, penalty)
        solve_side(*sides[1], movies, users, penalty)
    return replace(biases, user_factors=users * scale, movie_factors=movies)


def grouped(
    keys: np.ndarray, others: np.ndarray, values: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=n))])
    return starts, others[order], values[order]


@numba.njit(fastmath=True)
def solve_side(starts, others, values, factors, fixed, penalty):
    """Solve each row's ridge regression on the fixed side's factors, in place, by Cholesky."""
    k = fixed.shape[1]
    gram, right = np.empty((k, k)), np.empty(k)
    for row in range(len(starts) - 1):
        gram[:], right[:] = 0.0, 0.0
        for place in range(starts[row], starts[row + 1]):
            other = fixed[others[place]]
            for i in range(k):
                right[i] += other[i] * values[place]
                for j in range(i + 1):
                    gram[i, j] += other[i] * other[j]
        for i in range(k):
            gram[i, i] += penalty
            for j in range(i + 1):
                for m in range(j):
                    gram[i, j] -= gram[i, m] * gram[j, m]
                gram[i, j] = np.sqrt(gram[i, i]) if i == j else gram[i, j] / gram[j, j]
            for m in range(i):
                right[i] -= gram[i, m] * right[m]
            right[i] /= gram[i, i]
        for i in range(k - 1, -1, -1):
            for m in range(i + 1, k):
                right[i] -= gram[m, i] * right[m]
            right[i] /= gram[i, i]
        factors[row] = right


def tuned(table: Table, rng: np.random.Generator) -> tuple[Model, dict[str, float | None]]:
    """Return the model fitted to a table of ratings as a method sees them, its penalties chosen on a tenth of them."""
    aside = rng.random(len(table.ratings)) < 0.1
    inner, outer = table.rows(~aside), table.rows(aside)
    by_biases = {
        (u, m): fit_biases(inner, u, m).error(outer) for u in BIAS_PENALTIES for m in BIAS_PENALTIES
    }
    user, movie = min(by_biases, key=by_biases.__getitem__)
    best, chosen, biases = by_biases[user, movie], None, fit_biases(inner, user, movie)
    for penalty in FACTOR_PENALTIES:
        error = fit_factors(inner, biases, penalty).error(outer)
        if error > best * 1.0005:
            break
        if error < best:
            best, chosen = error, penalty
    model = fit_biases(table, user, movie)
    if chosen is not None:
        model = fit_factors(table, model, chosen)
    return model, {"user": user, "movie": movie, "factors": chosen}


def rmse(model: Model, test: Table) -> float:
    found = np.clip(model.predict(test), RATINGS[0], RATINGS[-1])
    return float(np.sqrt(np.mean((found - test.ratings) ** 2)))


def make_channel(kind: str, reference: np.ndarray, epsilon: float) -> np.ndarray:
    if kind == "optimal":
        return channels.optimal(reference, epsilon, channels.compute_squared(RATINGS)).matrix
    return channels.laplace(reference, epsilon, ordered=True).matrix


def released(table: Table, matrix: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return released codes, each drawn from its rating's row of the channel."""
    codes = table.ratings.astype(int) - 1
    return (rng.random(len(codes))[:, None] > matrix.cumsum(axis=1)[codes, :-1]).sum(axis=1)


def pseudo_ratings(matrix: np.ndarray) -> np.ndarray:
    """Return g with T g = ratings, or the nearest g of moderate variance."""
    return ReleasedColumn(
        name="Rating", levels=tuple(RATINGS), matrix=matrix, max_condition=MAX_CONDITION
    ).transform_for(approximate=True)


def shares(table: Table) -> np.ndarray:
    counts = np.bincount(table.ratings.astype(int) - 1, minlength=len(RATINGS))
    return counts.astype(float) / len(table.ratings)


def noisy_shares(table: Table, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Return the ratings' shares as `reference: histogram` measures them; keyed noise, so that the experiment repeats."""
    codec = LevelCodec(name="Rating", levels=pa.array(RATINGS), ordered=True)
    public = cells(codec, bins=2)
    counts = CellCounts.of_batch(public, pa.array(table.ratings).cast(codec.levels.type))
    noisy = perturb(
        counts.counts[public.possible], histogram_event(epsilon, "replace-one"), rng=rng
    )
    return distribution_of(public, noisy, counts.n_rows).probabilities


def read(path: str, rows: int | None = None) -> Table:
    names = ["UserID", "MovieID", "Rating"]
    columns = pq.read_table(path, columns=names)
    users, movies, ratings = (columns[name].to_numpy()[:rows] for name in names)
    of_users, users = np.unique(users, return_inverse=True)
    of_movies, movies = np.unique(movies, return_inverse=True)
    shape = len(of_users), len(of_movies)
    return Table(users=users, movies=movies, ratings=ratings.astype(float), shape=shape)


def experiment(table: Table, epsilons: list[float], seed: int) -> list[dict[str, object]]:
    """Return one row per trained model."""
    rng = np.random.default_rng(seed)
    split = rng.random(len(table.ratings))
    test, training = table.rows(split < 0.25), table.rows(split >= 0.25)
    out = rng.random(len(training.ratings)) < 0.25
    held_out, kept = training.rows(out), training.rows(~out)
    results: list[dict[str, object]] = []
    baselines: dict[str, float] = {}

    def train(
        seen: Table,
        reference: str,
        channel: str = "none",
        epsilon: float | None = None,
        debiased: bool = False,
    ) -> None:
        model, penalties = tuned(seen, np.random.default_rng(seed + 1))
        found = rmse(model, test)
        excess = found - baselines.setdefault(reference, found)
        row = {
            "reference": reference,
            "channel": channel,
            "debiased": debiased,
            "epsilon": epsilon,
            "rows": len(seen.ratings),
        }
        results.append(row | {"rmse": found, "excess": excess, "penalties": penalties})

    train(kept, "holdout")
    train(training, "histogram")
    for epsilon in epsilons:
        for reference, rows, share in (
            ("holdout", kept, 1.0),
            ("histogram", training, 1.0 - REFERENCE_SHARE),
        ):
            law = (
                shares(held_out)
                if reference == "holdout"
                else noisy_shares(training, REFERENCE_SHARE * epsilon, rng)
            )
            for channel in ("laplace", "optimal"):
                matrix = make_channel(channel, law, share * epsilon)
                codes = released(rows, matrix, rng)
                train(rows.rated(RATINGS[codes]), reference, channel, epsilon)
                train(rows.rated(pseudo_ratings(matrix)[codes]), reference, channel, epsilon, True)
    return results


def acceptance(results: list[dict[str, object]], epsilons: list[float]) -> list[dict[str, float]]:
    """Return, by ε, the part of Laplace's excess that optimal + debias closes, and what `histogram` costs on top."""
    keys = ("epsilon", "reference", "channel", "debiased")
    by = {tuple(row[key] for key in keys): row for row in results}
    found = []
    for epsilon in epsilons:
        best = by[epsilon, "holdout", "optimal", True]
        laplace = by[epsilon, "holdout", "laplace", False]
        histogram = by[epsilon, "histogram", "optimal", True]
        found.append(
            {
                "epsilon": epsilon,
                "closed": 1 - best["excess"] / laplace["excess"],
                "histogram_over_holdout": histogram["rmse"] / best["rmse"] - 1,
            }
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ratings")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="only the first rows, for a trial")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    results = experiment(read(options.ratings, options.rows), options.epsilons, options.seed)
    summary = acceptance(results, options.epsilons)
    if options.json:
        seconds = round(time.perf_counter() - begun, 1)
        head = {"seed": options.seed, "seconds": seconds}
        print(json.dumps({**head, "results": results, "acceptance": summary}, indent=1))
        return
    for reference in ("holdout", "histogram"):
        baseline, *private = (row for row in results if row["reference"] == reference)
        print(
            f"{reference}: non-private on the same {baseline['rows']:,} rows, test RMSE {baseline['rmse']:.4f}"
        )
        print(
            f"  {'excess RMSE over it':24}"
            + "".join(f"{f'ε = {epsilon:g}':>10}" for epsilon in options.epsilons)
        )
        for channel, debiased in itertools.product(("laplace", "optimal"), (False, True)):
            cells = [
                f"{row['excess']:+10.4f}"
                for row in private
                if row["channel"] == channel and row["debiased"] is debiased
            ]
            print(f"  {channel + (' + debias' if debiased else ''):24}" + "".join(cells))
    print(
        "optimal + debias closes of Laplace's excess: "
        + ", ".join(f"{row['closed']:.0%} (ε = {row['epsilon']:g})" for row in summary)
    )
    print(
        "its RMSE, histogram over hold-out: "
        + ", ".join(
            f"{row['histogram_over_holdout']:+.2%} (ε = {row['epsilon']:g})" for row in summary
        )
    )
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
