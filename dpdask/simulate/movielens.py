"""A table of MovieLens-25M's shape, of any length.

Every file is drawn from its own stream, a pure function of (seed, file number), beside tables of one number per user
and per movie: memory does not grow with the number of files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray
from scipy.special import ndtri

from dpdask.simulate.output import SEEDS, check_local, check_ranges, claim, stage

ML25M_ROWS: Final = 25_000_095
ML25M_USERS: Final = 162_541
ML25M_MOVIES: Final = 59_047
ML25M_RATING_COUNTS: Final = (393_068, 776_815, 399_490, 1_640_868, 1_262_797, 4_896_928, 3_177_318, 6_639_798, 2_200_539, 3_612_474)

_USER_VARIANCE, _MOVIE_VARIANCE = 0.2, 0.25
_MIN_ACTIVITY, _MEDIAN_EXCESS, _EXCESS_SIGMA = 20.0, 51.0, 1.389  # 20 + lognormal: median 71, mean 154
_ZIPF_EXPONENT, _ZIPF_OFFSET = 2.14, 350.0  # at 59,047 movies: the top one has 0.326 % of the ratings, the median one 6 of 25 million
_FIRST_SECOND, _LAST_SECOND = 789_609_600, 1_574_380_799  # 1995-01-09T00:00:00Z, 2019-11-21T23:59:59Z
_MAX_ROWS_PER_FILE = 1 << 26  # pyarrow splits longer row groups
_INT32_MAX = (1 << 31) - 1
_SCHEMA = pa.schema([("userId", pa.int32()), ("movieId", pa.int32()), ("rating", pa.float32()), ("timestamp", pa.int64())])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Population:
    """What is fixed for a whole table: users in order of id, movies in order of popularity; the residual completes the variance to 1."""

    user_ends: NDArray[np.int64]  # the row at which each user's ratings end
    user_effects: NDArray[np.float32]
    user_starts: NDArray[np.int64]  # the second from which each user rates
    movie_ids: NDArray[np.int32]
    movie_effects: NDArray[np.float32]
    residual_std: np.float32


def _activity(n_rows: int, n_users: int, rng: Generator) -> NDArray[np.int64]:
    """Ratings per user: at least 1 each, `n_rows` in sum, in the proportions of 20 + lognormal at stratified quantiles."""
    quantiles = ndtri((rng.permutation(n_users) + 0.5) / n_users)
    share = _MIN_ACTIVITY - 1 + _MEDIAN_EXCESS * np.exp(_EXCESS_SIGMA * quantiles)
    ends = np.cumsum(share)
    spare = np.floor(ends * ((n_rows - n_users) / ends[-1])).astype(np.int64)
    spare[-1] = n_rows - n_users
    return 1 + np.ediff1d(spare, to_begin=spare[0])


def _movie_rank(uniform: NDArray[np.float64], n_movies: int) -> NDArray[np.int64]:
    """Rank (0 is the most popular) at quantiles of a discretised Zipf-Mandelbrot law cut at `n_movies`, by inversion."""
    tail: float = (1 + n_movies / _ZIPF_OFFSET) ** (1 - _ZIPF_EXPONENT)
    place: NDArray[np.float64] = _ZIPF_OFFSET * ((1 - uniform * (1 - tail)) ** (1 / (1 - _ZIPF_EXPONENT)) - 1)
    return place.clip(max=n_movies - 1).astype(np.int64)


def _movie_shares(n_movies: int) -> NDArray[np.float64]:
    """Probability of each rank under the distribution of `_movie_rank`."""
    beyond = np.power(1 + np.arange(n_movies + 1) / _ZIPF_OFFSET, 1 - _ZIPF_EXPONENT)
    return np.diff(-beyond / (1 - beyond[-1]))


def _effects(shares: NDArray[np.float64], variance: float, rng: Generator) -> tuple[NDArray[np.float32], float]:
    """Effects that are N(0, `variance`) when weighted by `shares`, in random order, and the weighted variance reached.

    Weighted normal scores, not free draws: a movie with 0.3 % of the ratings would otherwise move the marginal.
    """
    order = rng.permutation(len(shares))
    ordered = shares[order]
    upto = np.cumsum(ordered)
    effects = np.empty(len(shares))
    effects[order] = ndtri((upto - ordered / 2) / upto[-1]) * np.sqrt(variance)
    effects -= np.average(effects, weights=shares)
    return effects.astype(np.float32), float(np.average(effects**2, weights=shares))


def _population(n_rows: int, n_users: int, n_movies: int, seed: int) -> _Population:
    """Fix the users and movies of a table."""
    activity_rng, user_rng, start_rng, movie_rng, id_rng = (Generator(PCG64(child)) for child in SeedSequence(seed).spawn(5))
    counts = _activity(n_rows, n_users, activity_rng)
    user_effects, user_variance = _effects(counts / n_rows, _USER_VARIANCE, user_rng)
    movie_effects, movie_variance = _effects(_movie_shares(n_movies), _MOVIE_VARIANCE, movie_rng)
    return _Population(
        user_ends=np.cumsum(counts),
        user_effects=user_effects,
        user_starts=start_rng.integers(_FIRST_SECOND, _LAST_SECOND, n_users, endpoint=True),
        movie_ids=id_rng.permutation(np.arange(1, n_movies + 1, dtype=np.int32)),
        movie_effects=movie_effects,
        residual_std=np.float32(np.sqrt(1 - user_variance - movie_variance)),
    )


def _ratings(latent: NDArray[np.float32]) -> NDArray[np.float32]:
    """Ratings 0.5, 1, ..., 5 of standard normal latents: the published frequencies, as thresholds at their normal quantiles."""
    cumulative = np.cumsum(ML25M_RATING_COUNTS)
    level = np.ones(len(latent), np.uint8)
    for threshold in ndtri(cumulative[:-1] / cumulative[-1]).astype(np.float32):
        level += latent > threshold
    return level * np.float32(0.5)


def _rows(population: _Population, first: int, last: int, rng: Generator) -> pa.Table:
    """Rows `first` to `last` (not included) of the table, sorted by user."""
    n, ends = last - first, population.user_ends
    users = slice(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last - 1, side="right")) + 1)
    upto = np.minimum(ends[users], last)
    per_user = np.ediff1d(upto, to_begin=upto[0] - first)
    rank = _movie_rank(rng.random(n), len(population.movie_ids))
    latent = rng.standard_normal(n, dtype=np.float32) * population.residual_std
    latent += population.movie_effects[rank]
    latent += np.repeat(population.user_effects[users], per_user)
    start = np.repeat(population.user_starts[users], per_user)
    elapsed = rng.random(n)
    for _ in range(3):  # the 8th power: most of a user's ratings come soon, some years later
        elapsed *= elapsed
    columns = {
        "userId": np.repeat(np.arange(users.start + 1, users.stop + 1, dtype=np.int32), per_user),
        "movieId": population.movie_ids[rank],
        "rating": _ratings(latent),
        "timestamp": start + (elapsed * (_LAST_SECOND - start)).astype(np.int64),
    }
    return pa.table(columns, schema=_SCHEMA)


def _write(table: pa.Table, path: Path) -> int:
    """Write one file and return its bytes."""
    with stage(path) as temporary:
        repetitive = table.column_names[:3]  # a dictionary of the timestamps would only cost time
        pq.write_table(table, temporary, compression="zstd", row_group_size=len(table), use_dictionary=repetitive, store_schema=False)
        return temporary.stat().st_size


def simulate_movielens(
    out: str,
    *,
    n_rows: int,
    n_users: int | None = None,
    n_movies: int | None = None,
    seed: int = 0,
    rows_per_file: int = 1_000_000,
    on_file: Callable[[int, int], None] | None = None,
) -> dict[str, int | float]:
    """Write a table of MovieLens-25M's shape, of any length, as a folder of Parquet files sorted by `userId`.

    Parameters
    ----------
    out
        Local folder, made with its parents; it must be missing or empty. Receives `ratings-00000.parquet`, ...: zstd, one row group
        each, columns `userId` int32 (1..n_users), `movieId` int32 (1..n_movies), `rating` float32 (0.5, 1, ..., 5), `timestamp` int64
        (seconds since 1970, 1995-01-09 to 2019-11-21 UTC).
    n_rows
        Ratings in total, at least 1.
    n_users
        Users, 1..n_rows, each with at least one rating. By default as many as leave 153.8 ratings per user.
    n_movies
        Movies that can be rated, at least 1. By default 59,047 * (n_rows / 25,000,095)**0.6, at most 59,047.
    seed
        0..2**64 - 1. Equal arguments, equal tables, under one version of numpy.
    rows_per_file
        Rows of each file but the last, 1..2**26; memory is in proportion to it.
    on_file
        Called after each file with the number of files written and the number of files in total.

    Returns
    -------
    dict
        `rows`, `users`, `movies` (the movies that were rated), `files`, `bytes`.

    Raises
    ------
    UsageError
        A number is out of its range, or `out` is a URL.
    OutputError
        `out` is not empty or cannot be written; files already complete stay there.

    Privacy
    -------
    The table is simulated from published figures: it describes no person.

    Notes
    -----
    Row i of user u rates movie m by thresholding a standard normal latent a_u + b_m + e_i at the normal quantiles of ML-25M's cumulative
    rating frequencies, with variances 0.2, 0.25 and 0.55. The effects a and b are normal scores weighted by the ratings each user or
    movie receives, and the variance of e makes up what few users or movies lack, so the marginal distribution of the rating is ML-25M's (nearly
    so for a handful of movies, whose effects are not normal). Ratings per user are in the proportions of 20 + 51 exp(1.389 z), z at
    stratified normal quantiles: at the default scale at least 20, median 71, mean 153.8. Movies are drawn with P(rank >= r) falling as
    (1 + r/350)**-1.14, cut at n_movies: at 25 million rows 0.33 % for the first, 6 ratings for the median one, none for one in twenty.

    Unlike the original: **a user may rate a movie twice** (draws are with replacement: a fifth of the rows repeat an earlier pair), ids are
    contiguous, a user's rows are in no order, and popularity, effects, ids, activity and time are independent of each other.

    References
    ----------
    F. M. Harper and J. A. Konstan (2015), The MovieLens Datasets: History and Context, ACM TiiS 5(4), 19. Ratings, users, dates and the least
    activity: https://files.grouplens.org/datasets/movielens/ml-25m-README.html (62,423 movies, tagged ones included). The rest: ratings.csv.
    """
    if n_users is None:
        n_users = max(1, n_rows * ML25M_USERS // ML25M_ROWS)
    if n_movies is None:
        n_movies = round(ML25M_MOVIES * (min(max(n_rows, 1), ML25M_ROWS) / ML25M_ROWS) ** 0.6)
    ranges = {"n_rows": (n_rows, 1, 1 << 53), "n_users": (n_users, 1, min(n_rows, _INT32_MAX)), "n_movies": (n_movies, 1, _INT32_MAX)}
    ranges |= {"seed": (seed, *SEEDS), "rows_per_file": (rows_per_file, 1, _MAX_ROWS_PER_FILE)}
    check_ranges(ranges)
    check_local(out)
    folder = claim(out)
    population = _population(n_rows, n_users, n_movies, seed)
    n_files = -(-n_rows // rows_per_file)
    rated = np.zeros(n_movies + 1, np.bool_)
    bytes_ = 0
    for number in range(n_files):
        rng = Generator(PCG64(SeedSequence([seed, number])))
        table = _rows(population, number * rows_per_file, min(n_rows, (number + 1) * rows_per_file), rng)
        rated[table["movieId"].to_numpy()] = True
        bytes_ += _write(table, folder / f"ratings-{number:05d}.parquet")
        if on_file is not None:
            on_file(number + 1, n_files)
    return {"rows": n_rows, "users": n_users, "movies": int(rated.sum()), "files": n_files, "bytes": bytes_}
