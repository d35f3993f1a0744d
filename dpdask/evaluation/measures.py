"""How close a release is to its original: similarity of columns and pairs, and prediction. CONFIDENTIAL."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dpdask.errors import SpecError
from dpdask.evaluation.samples import Side

Floats: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int64]

N_RANGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A score within 0 to 1 and its standard error; confidential where it was measured on private rows."""

    value: float
    standard_error: float


def ks_complement(real: Floats, other: Floats) -> Score | None:
    """Return 1 minus the Kolmogorov-Smirnov distance of two columns of numbers, nulls left out; None if one has no value."""
    real, other = np.sort(real[~np.isnan(real)]), np.sort(other[~np.isnan(other)])
    if not len(real) or not len(other):
        return None
    points = np.concatenate([real, other])
    f, g = (np.searchsorted(column, points, side="right") / len(column) for column in (real, other))
    at = int(np.argmax(np.abs(f - g)))
    error = math.sqrt(f[at] * (1.0 - f[at]) / len(real) + g[at] * (1.0 - g[at]) / len(other))
    return Score(value=1.0 - float(abs(f[at] - g[at])), standard_error=error)


def tv_complement(real: Codes, other: Codes, size: int) -> Score:
    """Return 1 minus the total variation distance of two columns of categories, null being one of them."""
    return _compare_counts(np.bincount(real, minlength=size), np.bincount(other, minlength=size))


def contingency_similarity(
    real: tuple[Codes, Codes], other: tuple[Codes, Codes], sizes: tuple[int, int]
) -> Score:
    """Return 1 minus the total variation distance of two tables of a pair of categories."""
    tables = (
        np.bincount(one * sizes[1] + two, minlength=sizes[0] * sizes[1])
        for one, two in (real, other)
    )
    return _compare_counts(*tables)


def correlation_similarity(
    real: tuple[Floats, Floats], other: tuple[Floats, Floats]
) -> Score | None:
    """Return 1 minus half the difference of Pearson's correlations; None if a column does not vary."""
    found = [_correlate(one, two) for one, two in (real, other)]
    if found[0] is None or found[1] is None:
        return None
    (r, error), (s, error_s) = found[0], found[1]
    return Score(value=1.0 - abs(r - s) / 2.0, standard_error=math.hypot(error, error_s) / 2.0)


def cut_ranges(real: Floats, other: Floats) -> tuple[Codes, Codes]:
    """Return the codes of two columns of numbers cut into 10 ranges of equal width over the first; 0 below it, 11 at its end, 12 null.

    A first column without 10 different ranges, such as one of a single value, has as many as it
    has: 0 is below it, 12 null.
    """
    known = real[np.isfinite(real)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    edges = (
        np.unique(np.linspace(low, high, N_RANGES + 1))
        if low < high
        else np.array([low, np.nextafter(low, np.inf)])
    )
    first, second = (
        np.where(np.isnan(column), N_RANGES + 2, np.digitize(column, edges)).astype(np.int64)
        for column in (real, other)
    )
    return first, second


def _compare_counts(real: Codes, other: Codes) -> Score:
    p, q = real / max(real.sum(), 1), other / max(other.sum(), 1)
    sign = np.sign(p - q)
    variance = sum(
        (share @ sign**2 - (share @ sign) ** 2) / max(counts.sum(), 1)
        for share, counts in ((p, real), (q, other))
    )
    return Score(
        value=1.0 - float(np.abs(p - q).sum()) / 2.0,
        standard_error=math.sqrt(max(float(variance), 0.0)) / 2.0,
    )


def _correlate(one: Floats, two: Floats) -> tuple[float, float] | None:
    """Return Pearson's correlation and its standard error for normal columns; None if a column does not vary."""
    here = ~(np.isnan(one) | np.isnan(two))
    one, two = one[here], two[here]
    if len(one) < 3 or one.min() == one.max() or two.min() == two.max():
        return None
    r = float(np.corrcoef(one, two)[0, 1])
    return r, (1.0 - r * r) / math.sqrt(len(one) - 1)


_TEST = 0.3
_MOST_CLASSES = 100
_N_TREES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How well a target is predicted in rows of the original that no model has seen; confidential: measured on private rows."""

    target: str
    metric: str  # `accuracy` of a category, `R²` of a number
    # The score of a model that was trained on other rows of the original, on the release, and on
    # independent columns.
    original: Score
    released: Score
    independent: Score
    guess: float


def predict(
    original: Side, released: Side, independent: Side, target: str, rng: Generator
) -> Prediction:
    """Return how well gradient-boosted trees predict a column, trained on each table and tested on held-back rows of the original."""
    if target not in original.columns or len(original.columns) < 2:
        raise SpecError(
            "is not among the compared columns, or the only one",
            f"--target {target!r}",
            "name a column of the release",
        )
    if len(original.levels.get(target, ())) > _MOST_CLASSES:
        raise SpecError(
            f"has more than {_MOST_CLASSES} classes", f"--target {target!r}", "name another column"
        )
    test = rng.random(original.n_rows) < _TEST
    held, rest = original.take(np.flatnonzero(test)), original.take(np.flatnonzero(~test))
    n_train = min(rest.n_rows, released.n_rows)
    tables = (rest, released, independent)
    is_class = target in original.levels
    y = held.columns[target].astype(np.float64)
    here = ~np.isnan(y)
    if not here.any() or np.ptp(y[here]) == 0:
        raise SpecError("does not vary", f"--target {target!r}", "name another column")
    features = [name for name in original.columns if name != target]
    scores = [
        _score(_train(table, features, target, n_train, rng), held, features, y, here, is_class)
        for table in tables
    ]
    guess = float(np.bincount(y[here].astype(np.int64)).max() / here.sum()) if is_class else 0.0
    return Prediction(
        target=target,
        metric="accuracy" if is_class else "R²",
        original=scores[0],
        released=scores[1],
        independent=scores[2],
        guess=guess,
    )


def _train(table: Side, features: list[str], target: str, n_rows: int, rng: Generator) -> Any:
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ModuleNotFoundError:
        raise SpecError(
            "a prediction needs scikit-learn", "--target", "install dpdask[report]"
        ) from None
    y = table.columns[target].astype(np.float64)
    rows = rng.permutation(np.flatnonzero(~np.isnan(y)))[:n_rows]
    if not len(rows) or np.ptp(y[rows]) == 0:
        return float(y[rows[0]]) if len(rows) else 0.0
    kind = (
        ensemble.HistGradientBoostingClassifier
        if target in table.levels
        else ensemble.HistGradientBoostingRegressor
    )
    model = kind(max_iter=_N_TREES, max_leaf_nodes=15, random_state=0, early_stopping=False)
    with threadpool_limits(1):  # its threads wait by spinning, which starves a busy machine
        return model.fit(_matrix(table, features)[rows], y[rows])


def _matrix(table: Side, features: list[str]) -> Floats:
    return np.column_stack([table.columns[name].astype(np.float64) for name in features])


def _score(
    model: Any, held: Side, features: list[str], y: Floats, here: NDArray[np.bool_], is_class: bool
) -> Score:
    told = (
        np.full(len(y), model)
        if isinstance(model, float)
        else model.predict(_matrix(held, features))
    )
    n, y, told = int(here.sum()), y[here], told[here]
    if is_class:
        accuracy = float((told == y).mean())
        return Score(value=accuracy, standard_error=math.sqrt(accuracy * (1.0 - accuracy) / n))
    squares, spread = (y - told) ** 2, (y - y.mean()) ** 2
    r2 = 1.0 - float(squares.mean() / spread.mean())
    influence = (squares - (1.0 - r2) * spread) / spread.mean()
    return Score(value=r2, standard_error=float(influence.std() / math.sqrt(n)))


RARE = 0.01
_N_RARE, _N_WORST = 20, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One column or one pair; confidential: measured on private rows."""

    names: tuple[str, ...]
    metric: str
    # The score of the release, of independent columns (None of a single column) and of a resample
    # of the original.
    released: Score
    independent: Score | None
    resample: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class RareGroup:
    """A level that few rows have; confidential: an exact count of sampled private rows."""

    name: str
    level: str
    # How many of the sampled rows have it; the second in rows of the original's sample.
    original: int
    released: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossiblePair:
    """The share of rows whose pair of levels half of the original does not have; confidential: measured on private rows."""

    names: tuple[str, str]
    released: float  # of the release, of independent columns, and of the other half of the original
    independent: float
    floor: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that the report says; confidential: measured on private rows."""

    columns: tuple[Compared, ...]  # every column and every pair, the worst first
    pairs: tuple[Compared, ...]
    rare: tuple[RareGroup, ...]  # the rarest levels of the original, the rarest first
    impossible: tuple[ImpossiblePair, ...]  # the pairs with the most impossible rows
    # The average over all pairs, in the order of `ImpossiblePair`; None without two columns of
    # levels.
    impossible_shares: tuple[float, float, float] | None
    # What models learn that are trained on the release; None without a target.
    prediction: Prediction | None

    def average(self, of: str, which: str) -> Score | None:
        """Return an average score; its standard error is at most this, since scores of one table vary together."""
        scores = [
            score for each in getattr(self, of) if (score := getattr(each, which)) is not None
        ]
        if not scores:
            return None
        return Score(
            value=float(np.mean([s.value for s in scores])),
            standard_error=float(np.mean([s.standard_error for s in scores])),
        )


def compare_sides(
    original: Side, released: Side, *, target: str | None, rng: Generator
) -> Comparison:
    """Return how far a release is from its original; confidential: reads private rows.

    Parameters
    ----------
    target
        A column to predict from the others; None for no prediction.
    """
    resample, independent = (
        original.take(rng.integers(0, original.n_rows, released.n_rows)),
        original.permute(rng),
    )
    columns = [
        Compared(names=(name,), metric=metric, released=found, independent=None, resample=floor)
        for name in original.columns
        for metric, score in [_score_of_column(original, name)]
        if (found := score(released)) is not None and (floor := score(resample)) is not None
    ]
    pairs = [
        Compared(names=pair, metric=metric, released=found, independent=alone, resample=floor)
        for pair in combinations(original.columns, 2)
        for metric, score in [_score_of_pair(original, *pair)]
        if (found := score(released)) is not None
        and (alone := score(independent)) is not None
        and (floor := score(resample)) is not None
    ]
    impossible = sorted(_find_impossible(original, released, rng), key=lambda each: -each.released)
    shares = [(each.released, each.independent, each.floor) for each in impossible]
    average = tuple(float(share) for share in np.mean(shares, axis=0)) if shares else None
    return Comparison(
        columns=tuple(sorted(columns, key=lambda each: each.released.value)),
        pairs=tuple(sorted(pairs, key=lambda each: each.released.value)),
        rare=tuple(
            sorted(
                _find_rare(original, released),
                key=lambda each: (each.original, each.name, each.level),
            )[:_N_RARE]
        ),
        impossible=tuple(impossible[:_N_WORST]),
        impossible_shares=average if average is None else (average[0], average[1], average[2]),
        prediction=None
        if target is None
        else predict(original, released, independent, target, rng),
    )


def _score_of_column(original: Side, name: str) -> tuple[str, Callable[[Side], Score | None]]:
    if name in original.levels:
        size = len(original.levels[name])
        return "TVComplement", lambda other: tv_complement(
            original.columns[name].astype(np.int64), other.columns[name].astype(np.int64), size
        )
    return "KSComplement", lambda other: ks_complement(
        original.columns[name].astype(np.float64), other.columns[name].astype(np.float64)
    )


def _score_of_pair(
    original: Side, one: str, two: str
) -> tuple[str, Callable[[Side], Score | None]]:
    n_numbers = sum(name not in original.levels for name in (one, two))
    if n_numbers == 2:

        def correlate(other: Side) -> Score | None:
            real, given = (
                (side.columns[one].astype(np.float64), side.columns[two].astype(np.float64))
                for side in (original, other)
            )
            return correlation_similarity(real, given)

        return "CorrelationSimilarity", correlate

    def tabulate(other: Side) -> Score:
        coded = [_code(original, other, name) for name in (one, two)]
        sizes = coded[0][2], coded[1][2]
        return contingency_similarity((coded[0][0], coded[1][0]), (coded[0][1], coded[1][1]), sizes)

    return "ContingencySimilarity", tabulate


def _code(original: Side, other: Side, name: str) -> tuple[Codes, Codes, int]:
    """Return a column of both tables as codes, numbers cut into ranges, and the number of codes."""
    real, given = original.columns[name], other.columns[name]
    if name in original.levels:
        return real.astype(np.int64), given.astype(np.int64), len(original.levels[name])
    first, second = cut_ranges(real.astype(np.float64), given.astype(np.float64))
    return first, second, int(max(first.max(), second.max())) + 1


def _find_rare(original: Side, released: Side) -> Iterator[RareGroup]:
    factor = original.n_rows / released.n_rows
    for name, levels in original.levels.items():
        real, given = (
            np.bincount(side.columns[name], minlength=len(levels)) for side in (original, released)
        )
        for place in np.flatnonzero((real > 0) & (real < RARE * original.n_rows)):
            n, m = int(real[place]), float(given[place])
            level = "null" if levels[place] is None else str(levels[place])
            error = float(np.sqrt(n + factor**2 * m))
            yield RareGroup(
                name=name, level=level, original=n, released=factor * m, standard_error=error
            )


def _find_impossible(original: Side, released: Side, rng: Generator) -> Iterator[ImpossiblePair]:
    order = rng.permutation(original.n_rows)
    seen, rest = original.take(order[::2]), original.take(order[1::2])
    if not rest.n_rows:
        return
    independent = original.permute(rng)
    for one, two in combinations(original.levels, 2):
        size = len(original.levels[two])

        def code(side: Side, one: str = one, two: str = two, size: int = size) -> Codes:
            codes: Codes = side.columns[one].astype(np.int64) * size + side.columns[two].astype(
                np.int64
            )
            return codes

        known = np.zeros(len(original.levels[one]) * size, dtype=np.bool_)
        known[code(seen)] = True
        found, alone, floor = (
            float(1.0 - known[code(side)].mean()) for side in (released, independent, rest)
        )
        error = float(np.sqrt(found * (1.0 - found) / released.n_rows))
        yield ImpossiblePair(
            names=(one, two), released=found, independent=alone, floor=floor, standard_error=error
        )
