"""Simulated tables of the papers' shapes at any scale, for demonstrations and benchmarks; they hold no person's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray
from scipy.special import ndtri

from dpdask.arrays import Floats, Int32s, Ints, Singles, Uint32s, Words
from dpdask.errors import OutputError, UsageError


def _check(
    out: str, n_rows: int, seed: int, rows_per_file: int, **ranges: tuple[int, int, int]
) -> None:
    """Check that each number lies in its closed range, and that the place is a path."""
    common = {"n_rows": (n_rows, 1, 1 << 53), "seed": (seed, 0, (1 << 64) - 1)}
    common["rows_per_file"] = (rows_per_file, 1, 1 << 26)  # pyarrow splits longer row groups
    for name, (value, low, high) in (common | ranges).items():
        if not low <= value <= high:
            raise UsageError(f"{value} is not in {low}..{high}", name, "give one that is")
    if "://" in out:
        raise UsageError("simulated tables are written to local folders only", out, "give a path")


def _claim(out: str) -> Path:
    """Return the output folder, made with its parents."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = next(folder.iterdir(), None) is not None
    except OSError as error:
        what = f"is not a folder that can be made or read ({type(error).__name__})"
        raise OutputError(what, out, "choose another") from error
    if occupied:
        raise OutputError("exists and is not empty", out, "choose another folder, or delete it")
    return folder


@contextmanager
def _stage(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; the file written there is renamed to `path` at the end, and removed on failure."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        what = f"cannot be written ({type(error).__name__})"
        hint = "delete the folder, make room, run again"
        raise OutputError(what, str(path), hint) from error
    finally:
        temporary.unlink(missing_ok=True)


CENSUS_ROWS: Final = 5_240_260
CENSUS_ATTRIBUTES: Final = 27
CENSUS_LEVELS: Final = 674

_BLOCK_ROWS: Final = 131_072  # a row group at most; part of what a seed means
_MAX_ATTRIBUTES = 10_000
_MAX_MEAN_LEVELS = (
    64  # the largest attribute then has some 350: int16 holds it, and the schema allows 2,048
)
_FEW_LEVELS = 12  # attributes with more levels are ages, years, counts: their order has a meaning
_SKEW = (0.3, 2.5)  # exponents of Zipf's law, from nearly even to nearly constant
_ONE = 1 << 32


class _Relation(Enum):
    """How an attribute depends on its parent: the range of the weight of dependence, and whether some pairs cannot occur."""

    INDEPENDENT = (0.0, 0.0, False)
    WEAK = (0.03, 0.1, False)
    STRONG = (0.5, 0.9, False)
    EXCLUSIVE = (0.2, 0.4, True)


# The relation of attribute i to its parent is number i mod 6; attribute 0 has no parent.
_RELATIONS = (
    _Relation.EXCLUSIVE,
    _Relation.STRONG,
    _Relation.WEAK,
    _Relation.EXCLUSIVE,
    _Relation.STRONG,
    _Relation.INDEPENDENT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    """One column: its parent, and its distribution given the parent's level."""

    parent: int  # the number of an earlier attribute; of attribute 0, itself
    relation: _Relation
    # Uint64 array of shape (parent's levels, levels - 1): level k is drawn where edges[k - 1] <= u
    # < edges[k] for u uniform on the whole numbers below 2**32. A level between equal edges cannot
    # occur.
    edges: Words


def _sizes(n_attributes: int, n_levels: int) -> list[int]:
    """Levels of each attribute: a geometric progression from 2, `n_levels` in sum, in an order that the arguments fix."""
    place = np.linspace(1, 0, n_attributes)
    low, high = 2.0, float(n_levels)
    sizes = np.full(n_attributes, 2)
    for _ in range(60):  # the largest size, by bisection
        middle = (low + high) / 2
        tried = np.floor(2 * (middle / 2) ** place).astype(np.int64)
        low, high, sizes = (
            (middle, high, tried) if tried.sum() <= n_levels else (low, middle, sizes)
        )
    sizes[: n_levels - int(sizes.sum())] += 1
    return [
        int(size)
        for size in Generator(PCG64(SeedSequence([n_attributes, n_levels]))).permutation(sizes)
    ]


def _table(relation: _Relation, n_parent: int, base: Floats, rng: Generator) -> Floats:
    """Probability of each level given each level of the parent: a distribution without the parent, mixed with a peak that moves with it."""
    least, most, exclusive = relation.value
    n = len(base)
    weight = rng.uniform(least, most)
    centre = (np.arange(n_parent) + 0.5) / n_parent * n
    peak = np.exp(-np.abs(np.arange(n) + 0.5 - centre[:, None]) / max(0.5, n / 20))
    table: Floats = (1 - weight) * base + weight * peak / peak.sum(axis=1, keepdims=True)
    if exclusive:  # impossible pairs, as children are not married: the parent's first third of levels occurs with the first third only
        table[: -(-n_parent // 3), -(-n // 3) :] = 0
    table /= table.sum(axis=1, keepdims=True)
    return table


def _model(sizes: list[int], seed: int) -> list[_Attribute]:
    """The distribution of the table: a tree in which attribute i is a child of attribute (i - 1) // 2, whatever the number of rows."""
    attributes = []
    for number, (size, child) in enumerate(
        zip(sizes, SeedSequence(seed).spawn(len(sizes)), strict=True)
    ):
        rng = Generator(PCG64(child))
        zipf = np.arange(1, size + 1) ** -rng.uniform(*_SKEW)
        base = rng.permutation(zipf / zipf.sum())
        parent = max(0, (number - 1) // 2)
        relation = _RELATIONS[number % len(_RELATIONS)] if number else _Relation.INDEPENDENT
        table = _table(relation, sizes[parent] if number else 1, base, rng)
        edges = np.rint(table.cumsum(axis=1)[:, :-1] * _ONE).astype(np.uint64)
        attributes.append(_Attribute(parent=parent, relation=relation, edges=edges))
    return attributes


def _draw_levels(
    uniform: Uint32s,
    given: NDArray[np.integer],
    edges: Words,
    out: NDArray[np.integer],
) -> None:
    for row in range(len(uniform)):
        u, line = uniform[row], given[row]
        low, n_left = 0, edges.shape[1]
        while n_left > 0:  # a search without a branch on u, which no processor could foresee
            half = (n_left + 1) // 2
            low += half * (edges[line, low + half - 1] <= u)
            n_left -= half
        out[row] = low


_draw: Callable[..., None] = numba.njit(nogil=True)(_draw_levels)


def _blocks(
    model: list[_Attribute], schema: pa.Schema, n_rows: int, seed: int
) -> Iterator[pa.Table]:
    """The rows, one block at a time."""
    for number, first in enumerate(range(0, n_rows, _BLOCK_ROWS)):
        n = min(_BLOCK_ROWS, n_rows - first)
        rng = Generator(PCG64(SeedSequence([seed, number])))
        codes = np.zeros((len(model), n), schema.types[0].to_pandas_dtype())
        for out, attribute in zip(codes, model, strict=True):
            uniform = rng.integers(0, _ONE - 1, n, dtype=np.uint32, endpoint=True)
            # attribute 0 is its own parent, still all zeros
            _draw(uniform, codes[attribute.parent], attribute.edges, out)
        yield pa.table(list(codes), schema=schema)


def _schema_text(names: list[str], sizes: list[int]) -> str:
    """The schema of a job on the table, as YAML."""
    kinds = ("discrete" if size > _FEW_LEVELS else "categorical" for size in sizes)
    lines = (
        f"  {name}: {{role: privatise, kind: {kind}, levels: [{', '.join(map(str, range(size)))}]}}"
        for name, kind, size in zip(names, kinds, sizes, strict=True)
    )
    head = "# A simulated census: every attribute's levels are the whole numbers from 0."
    return "\n".join([head, "columns:", *lines, ""])


def simulate_census(
    out: str,
    *,
    n_rows: int,
    n_attributes: int = CENSUS_ATTRIBUTES,
    n_levels: int | None = None,
    seed: int = 0,
    rows_per_file: int = 8 * _BLOCK_ROWS,
    on_file: Callable[[int, int], None] | None = None,
) -> dict[str, int | str]:
    """Write a table of a census's shape, of any length, as a folder of Parquet files, and its schema beside the folder.

    Parameters
    ----------
    out
        Local folder, made with its parents; it must be missing or empty. Receives
        `people-00000.parquet`, ...: row groups of at most 131,072 rows, dictionary-encoded, not
        compressed, columns `a00`, `a01`, ... int8 (all int16 if one has more than 128 levels), each
        0..levels - 1. `<out>-schema.yaml` declares every one of them privatised; it must not exist.
    n_levels
        Levels of all attributes together, 2 to 64 per attribute. By default in proportion to 674
        for 27; 2 * n_attributes makes every attribute binary.
    seed
        0..2**64 - 1. It fixes the distribution of the table, and the rows. Equal arguments, equal
        rows, under one version of numpy; `rows_per_file` changes none.
    on_file
        Called after each file with the number of files written and the number of files in total.

    Returns
    -------
    dict
        `rows`, `attributes`, `levels`, `files`, `bytes` (without the schema's), `schema` (its
        path).

    Privacy
    -------
    The table is drawn from an invented distribution, so it describes no person.

    Notes
    -----
    The numbers of levels are a geometric progression from 2 in shuffled order, fixed by n_attributes and n_levels: 2 to 97 for 27 and
    674. Attribute i > 0 is drawn given its parent, attribute (i - 1) // 2, by P(k | j) = (1 - w) base(k) + w peak(k, j): base is Zipf's
    distribution with an exponent of 0.3 to 2.5, its levels shuffled; peak falls on both sides of the level k that stands where j does. By i mod 6,
    w is 0.5 to 0.9 (1 and 4: strong), 0.03 to 0.1 (2: weak), 0 (5: independent), or 0.2 to 0.4 (0 and 3) with pairs that never
    occur: the first third of the parent's levels (rounded up) meets only the first third of the attribute's. A block of 131,072 rows
    takes 4 bytes of randomness per value, and its own bytes twice over in memory.

    References
    ----------
    H. J. Asghar, M. Ding, T. Rakotoarivelo, S. Mrabet, M. A. Kaafar (2020), Differentially Private
    Release of Datasets using Gaussian Copula, Journal of Privacy and Confidentiality 10(2): the
    size of its largest table, 5,240,260 rows of 27 attributes with 674 levels.
    """
    if n_levels is None:
        n_levels = max(2, n_attributes * CENSUS_LEVELS // CENSUS_ATTRIBUTES)
    most = _MAX_MEAN_LEVELS * n_attributes
    attributes, levels = (n_attributes, 1, _MAX_ATTRIBUTES), (n_levels, 2 * n_attributes, most)
    _check(out, n_rows, seed, rows_per_file, n_attributes=attributes, n_levels=levels)
    place = Path(out).resolve()  # the schema stands beside the folder, which a job reads whole
    place = place.with_name(f"{place.name}-schema.yaml")
    if place.exists():
        raise OutputError("exists", str(place), "choose another folder, or delete it")
    folder = _claim(out)
    sizes = _sizes(n_attributes, n_levels)
    digits = max(2, len(str(n_attributes - 1)))
    names = [f"a{number:0{digits}}" for number in range(n_attributes)]
    schema = pa.schema([(name, pa.int8() if max(sizes) <= 128 else pa.int16()) for name in names])
    n_files = -(-n_rows // rows_per_file)
    blocks = _blocks(_model(sizes, seed), schema, n_rows, seed)
    rest = next(blocks)
    bytes_ = 0
    for number in range(n_files):
        n_left = min(rows_per_file, n_rows - number * rows_per_file)
        path = folder / f"people-{number:05d}.parquet"
        # the dictionary packs a value into as many bits as its levels need: nothing is left to compress, and no file is read faster
        with (
            _stage(path) as temporary,
            pq.ParquetWriter(temporary, schema, compression="none", store_schema=False) as writer,
        ):
            while n_left:
                piece = rest[:n_left]
                writer.write_table(piece)
                n_left -= len(piece)
                rest = rest[len(piece) :] if len(piece) < len(rest) else next(blocks, rest)
        bytes_ += path.stat().st_size
        if on_file is not None:
            on_file(number + 1, n_files)
    with _stage(place) as temporary:
        temporary.write_text(_schema_text(names, sizes), encoding="utf-8")
    return {
        "rows": n_rows,
        "attributes": n_attributes,
        "levels": n_levels,
        "files": n_files,
        "bytes": bytes_,
        "schema": str(place),
    }


ML25M_ROWS: Final = 25_000_095
ML25M_USERS: Final = 162_541
ML25M_MOVIES: Final = 59_047
ML25M_RATING_COUNTS: Final = (
    393_068,
    776_815,
    399_490,
    1_640_868,
    1_262_797,
    4_896_928,
    3_177_318,
    6_639_798,
    2_200_539,
    3_612_474,
)

_USER_VARIANCE, _MOVIE_VARIANCE = 0.2, 0.25
# 20 + lognormal: median 71, mean 154
_MIN_ACTIVITY, _MEDIAN_EXCESS, _EXCESS_SIGMA = (20.0, 51.0, 1.389)
# at 59,047 movies: the top one has 0.326 % of the ratings, the median one 6 of 25 million
_ZIPF_EXPONENT, _ZIPF_OFFSET = (2.14, 350.0)
# 1995-01-09T00:00:00Z, 2019-11-21T23:59:59Z
_FIRST_SECOND, _LAST_SECOND = (789_609_600, 1_574_380_799)
_INT32_MAX = (1 << 31) - 1
_SCHEMA = pa.schema(
    [
        ("userId", pa.int32()),
        ("movieId", pa.int32()),
        ("rating", pa.float32()),
        ("timestamp", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Population:
    """What is fixed for a whole table: users in order of id, movies in order of popularity; the residual completes the variance to 1."""

    user_ends: Ints  # the row at which each user's ratings end
    user_effects: Singles
    user_starts: Ints  # the second from which each user rates
    movie_ids: Int32s
    movie_effects: Singles
    residual_std: np.float32


def _movie_shares(n_movies: int) -> Floats:
    """Probability of each rank of a movie, by the law that `_rows` inverts."""
    beyond = np.power(1 + np.arange(n_movies + 1) / _ZIPF_OFFSET, 1 - _ZIPF_EXPONENT)
    return np.diff(-beyond / (1 - beyond[-1]))


def _effects(shares: Floats, variance: float, rng: Generator) -> tuple[Singles, float]:
    """Effects that are N(0, `variance`) when weighted by `shares`, in random order, and the weighted variance reached.

    Weighted normal scores, not free draws: a movie with 0.3 % of the ratings would otherwise move
    the marginal.
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
    activity_rng, user_rng, start_rng, movie_rng, id_rng = (
        Generator(PCG64(child)) for child in SeedSequence(seed).spawn(5)
    )
    # ratings per user: at least 1 each, in the proportions of 20 + lognormal at stratified quantiles
    quantiles = ndtri((activity_rng.permutation(n_users) + 0.5) / n_users)
    share = _MIN_ACTIVITY - 1 + _MEDIAN_EXCESS * np.exp(_EXCESS_SIGMA * quantiles)
    ends = np.cumsum(share)
    spare = np.floor(ends * ((n_rows - n_users) / ends[-1])).astype(np.int64)
    spare[-1] = n_rows - n_users
    counts = 1 + np.ediff1d(spare, to_begin=spare[0])
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


def _rows(population: _Population, first: int, last: int, rng: Generator) -> pa.Table:
    """Rows `first` to `last` (not included) of the table, sorted by user."""
    n, ends = last - first, population.user_ends
    users = slice(
        int(np.searchsorted(ends, first, side="right")),
        int(np.searchsorted(ends, last - 1, side="right")) + 1,
    )
    upto = np.minimum(ends[users], last)
    per_user = np.ediff1d(upto, to_begin=upto[0] - first)
    # the rank of a movie, 0 the most popular: a discretised Zipf-Mandelbrot law, by inversion
    n_movies, power = len(population.movie_ids), 1 - _ZIPF_EXPONENT
    tail: float = (1 + n_movies / _ZIPF_OFFSET) ** power
    place: Floats = _ZIPF_OFFSET * ((1 - rng.random(n) * (1 - tail)) ** (1 / power) - 1)
    rank = place.clip(max=n_movies - 1).astype(np.int64)
    latent = rng.standard_normal(n, dtype=np.float32) * population.residual_std
    latent += population.movie_effects[rank]
    latent += np.repeat(population.user_effects[users], per_user)
    # the published frequencies, as thresholds at their normal quantiles
    level, cumulative = np.ones(n, np.uint8), np.cumsum(ML25M_RATING_COUNTS)
    for threshold in ndtri(cumulative[:-1] / cumulative[-1]).astype(np.float32):
        level += latent > threshold
    start = np.repeat(population.user_starts[users], per_user)
    elapsed = rng.random(n)
    for _ in range(3):  # the 8th power: most of a user's ratings come soon, some years later
        elapsed *= elapsed
    columns = {
        "userId": np.repeat(np.arange(users.start + 1, users.stop + 1, dtype=np.int32), per_user),
        "movieId": population.movie_ids[rank],
        "rating": level * np.float32(0.5),
        "timestamp": start + (elapsed * (_LAST_SECOND - start)).astype(np.int64),
    }
    return pa.table(columns, schema=_SCHEMA)


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
        Local folder, made with its parents; it must be missing or empty. Receives
        `ratings-00000.parquet`, ...: zstd, one row group each, columns `userId` int32 (1..n_users),
        `movieId` int32 (1..n_movies), `rating` float32 (0.5, 1, ..., 5), `timestamp` int64 (seconds
        since 1970, 1995-01-09 to 2019-11-21 UTC).
    n_users
        Users, 1..n_rows, each with at least one rating. By default as many as leave 153.8 ratings
        per user.
    n_movies
        Movies that can be rated, at least 1. By default 59,047 * (n_rows / 25,000,095)**0.6, at
        most 59,047.
    seed
        0..2**64 - 1. Equal arguments, equal tables, under one version of numpy.
    rows_per_file
        Rows of each file but the last, 1..2**26; memory is in proportion to it.
    on_file
        Called after each file with the number of files written and the number of files in total.

    Privacy
    -------
    The table is simulated from published figures: it describes no person.

    Notes
    -----
    Row i of user u rates movie m by thresholding a standard normal latent a_u + b_m + e_i at the
    normal quantiles of ML-25M's cumulative rating frequencies, with variances 0.2, 0.25 and 0.55.
    The effects a and b are normal scores weighted by the ratings each user or movie receives, and
    the variance of e makes up what few users or movies lack, so the marginal distribution of the
    rating is ML-25M's (nearly so for a handful of movies, whose effects are not normal). Ratings
    per user are in the proportions of 20 + 51 exp(1.389 z), z at stratified normal quantiles: at
    the default scale at least 20, median 71, mean 153.8. Movies are drawn with P(rank >= r) falling
    as (1 + r/350)**-1.14, cut at n_movies: at 25 million rows 0.33 % for the first, 6 ratings for
    the median one, none for one in twenty.

    Unlike the original: **a user may rate a movie twice** (draws are with replacement: a fifth of
    the rows repeat an earlier pair), ids are contiguous, a user's rows are in no order, and
    popularity, effects, ids, activity and time are independent of each other.

    References
    ----------
    F. M. Harper and J. A. Konstan (2015), The MovieLens Datasets: History and Context, ACM TiiS
    5(4), 19. Ratings, users, dates and the least activity:
    https://files.grouplens.org/datasets/movielens/ml-25m-README.html (62,423 movies, tagged ones
    included). The rest: ratings.csv.
    """
    if n_users is None:
        n_users = max(1, n_rows * ML25M_USERS // ML25M_ROWS)
    if n_movies is None:
        n_movies = round(ML25M_MOVIES * (min(max(n_rows, 1), ML25M_ROWS) / ML25M_ROWS) ** 0.6)
    users, movies = (n_users, 1, min(n_rows, _INT32_MAX)), (n_movies, 1, _INT32_MAX)
    _check(out, n_rows, seed, rows_per_file, n_users=users, n_movies=movies)
    folder = _claim(out)
    population = _population(n_rows, n_users, n_movies, seed)
    n_files = -(-n_rows // rows_per_file)
    rated = np.zeros(n_movies + 1, np.bool_)
    bytes_ = 0
    for number in range(n_files):
        rng = Generator(PCG64(SeedSequence([seed, number])))
        table = _rows(
            population, number * rows_per_file, min(n_rows, (number + 1) * rows_per_file), rng
        )
        rated[table["movieId"].to_numpy()] = True
        path = folder / f"ratings-{number:05d}.parquet"
        with _stage(path) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                row_group_size=len(table),
                use_dictionary=table.column_names[:3],  # one of the timestamps would only cost time
                store_schema=False,
            )
        bytes_ += path.stat().st_size
        if on_file is not None:
            on_file(number + 1, n_files)
    return {
        "rows": n_rows,
        "users": n_users,
        "movies": int(rated.sum()),
        "files": n_files,
        "bytes": bytes_,
    }


__all__ = [
    "CENSUS_ATTRIBUTES",
    "CENSUS_LEVELS",
    "CENSUS_ROWS",
    "ML25M_MOVIES",
    "ML25M_RATING_COUNTS",
    "ML25M_ROWS",
    "ML25M_USERS",
    "simulate_census",
    "simulate_movielens",
]
