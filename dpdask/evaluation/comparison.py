"""How far a release is from its original, column by column and pair by pair. CONFIDENTIAL: measured on private rows.

Each score stands beside two others of the same original: of a table whose columns are independent, which keeps no dependence at all; and
of a resample of the original's own rows, which no release can be expected to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.random import Generator

from dpdask.evaluation.prediction import Prediction, predict
from dpdask.evaluation.samples import Codes, Side
from dpdask.evaluation.similarity import (
    Score,
    contingency_similarity,
    correlation_similarity,
    cut_ranges,
    ks_complement,
    tv_complement,
)

RARE = 0.01
_N_RARE, _N_WORST = 20, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One column or one pair; confidential: measured on private rows.

    Attributes
    ----------
    names
        The column, or both.
    metric
        SDMetrics' name of the score.
    released, independent, resample
        The score of the release, of independent columns (None of a single column) and of a resample of the original.
    """

    names: tuple[str, ...]
    metric: str
    released: Score
    independent: Score | None
    resample: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class RareGroup:
    """A level that few rows have; confidential: an exact count of sampled private rows.

    Attributes
    ----------
    name, level
        The column and its level.
    original, released
        How many of the sampled rows have it; the second in rows of the original's sample.
    standard_error
        Of the difference.
    """

    name: str
    level: str
    original: int
    released: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpossiblePair:
    """The share of rows whose pair of levels half of the original does not have; confidential: measured on private rows.

    Attributes
    ----------
    names
        Both columns.
    released, independent, floor
        Of the release, of independent columns, and of the other half of the original.
    standard_error
        Of the release's share.
    """

    names: tuple[str, str]
    released: float
    independent: float
    floor: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that the report says; confidential: measured on private rows.

    Attributes
    ----------
    columns, pairs
        Every column and every pair, the worst first.
    rare
        The rarest levels of the original, the rarest first.
    impossible
        The pairs with the most impossible rows.
    impossible_shares
        The average over all pairs, in the order of `ImpossiblePair`; None without two columns of levels.
    prediction
        What models learn that are trained on the release; None without a target.
    """

    columns: tuple[Compared, ...]
    pairs: tuple[Compared, ...]
    rare: tuple[RareGroup, ...]
    impossible: tuple[ImpossiblePair, ...]
    impossible_shares: tuple[float, float, float] | None
    prediction: Prediction | None

    def average(self, of: str, which: str) -> Score | None:
        """Return an average score; its standard error is at most this, since scores of one table vary together.

        Parameters
        ----------
        of
            `columns` or `pairs`.
        which
            `released`, `independent` or `resample`.
        """
        scores = [score for each in getattr(self, of) if (score := getattr(each, which)) is not None]
        if not scores:
            return None
        return Score(value=float(np.mean([s.value for s in scores])), standard_error=float(np.mean([s.standard_error for s in scores])))


def compare_sides(original: Side, released: Side, *, target: str | None, rng: Generator) -> Comparison:
    """Return how far a release is from its original; confidential: reads private rows.

    Parameters
    ----------
    original, released
        Sampled rows of the same columns.
    target
        A column to predict from the others; None for no prediction.
    rng
        Draws the resample, the permutations and the halves.

    Raises
    ------
    SpecError
        If the target cannot be predicted, or scikit-learn is missing.
    """
    resample, independent = original.take(rng.integers(0, original.n_rows, released.n_rows)), original.permute(rng)
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
        if (found := score(released)) is not None and (alone := score(independent)) is not None and (floor := score(resample)) is not None
    ]
    impossible = sorted(_find_impossible(original, released, rng), key=lambda each: -each.released)
    shares = [(each.released, each.independent, each.floor) for each in impossible]
    average = tuple(float(share) for share in np.mean(shares, axis=0)) if shares else None
    return Comparison(
        columns=tuple(sorted(columns, key=lambda each: each.released.value)),
        pairs=tuple(sorted(pairs, key=lambda each: each.released.value)),
        rare=tuple(sorted(_find_rare(original, released), key=lambda each: (each.original, each.name, each.level))[:_N_RARE]),
        impossible=tuple(impossible[:_N_WORST]),
        impossible_shares=average if average is None else (average[0], average[1], average[2]),
        prediction=None if target is None else predict(original, released, independent, target, rng),
    )


def _score_of_column(original: Side, name: str) -> tuple[str, Callable[[Side], Score | None]]:
    if name in original.levels:
        size = len(original.levels[name])
        return "TVComplement", lambda other: tv_complement(original.columns[name].astype(np.int64), other.columns[name].astype(np.int64), size)
    return "KSComplement", lambda other: ks_complement(original.columns[name].astype(np.float64), other.columns[name].astype(np.float64))


def _score_of_pair(original: Side, one: str, two: str) -> tuple[str, Callable[[Side], Score | None]]:
    n_numbers = sum(name not in original.levels for name in (one, two))
    if n_numbers == 2:

        def correlate(other: Side) -> Score | None:
            real, given = ((side.columns[one].astype(np.float64), side.columns[two].astype(np.float64)) for side in (original, other))
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
        real, given = (np.bincount(side.columns[name], minlength=len(levels)) for side in (original, released))
        for place in np.flatnonzero((real > 0) & (real < RARE * original.n_rows)):
            n, m = int(real[place]), float(given[place])
            level = "null" if levels[place] is None else str(levels[place])
            error = float(np.sqrt(n + factor**2 * m))
            yield RareGroup(name=name, level=level, original=n, released=factor * m, standard_error=error)


def _find_impossible(original: Side, released: Side, rng: Generator) -> Iterator[ImpossiblePair]:
    order = rng.permutation(original.n_rows)
    seen, rest = original.take(order[::2]), original.take(order[1::2])
    if not rest.n_rows:
        return
    independent = original.permute(rng)
    for one, two in combinations(original.levels, 2):
        size = len(original.levels[two])

        def code(side: Side, one: str = one, two: str = two, size: int = size) -> Codes:
            codes: Codes = side.columns[one].astype(np.int64) * size + side.columns[two].astype(np.int64)
            return codes

        known = np.zeros(len(original.levels[one]) * size, dtype=np.bool_)
        known[code(seen)] = True
        found, alone, floor = (float(1.0 - known[code(side)].mean()) for side in (released, independent, rest))
        error = float(np.sqrt(found * (1.0 - found) / released.n_rows))
        yield ImpossiblePair(names=(one, two), released=found, independent=alone, floor=floor, standard_error=error)
