"""How close a release is to its original: similarity of columns, pairs and tables, and prediction. CONFIDENTIAL."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.random import Generator

from dpdask.arrays import Floats, freeze_class
from dpdask.cells import DEFAULT_BINS, cut_columns
from dpdask.computed import View
from dpdask.engine.scan import scan
from dpdask.engine.source import Frame, FrameSource, as_frame, find_meta, find_types
from dpdask.engine.work import TableWork
from dpdask.errors import SpecError
from dpdask.estimators.frames import check_objects, close_secrets, declare_counted, open_secrets
from dpdask.evaluation.samples import Codes, Side
from dpdask.kernels import one_thread
from dpdask.references.histogram import as_fixed_bins
from dpdask.schema import Schema
from dpdask.stats import Clique, MarginalCounts
from dpdask.stats.marginals import TableStatistic

RARE = 0.01
_N_RARE, _N_WORST = 20, 20
_N_RANGES = 10
N_CODES = _N_RANGES + 3  # with those below, at the end or above, and null
_TEST, _MOST_CLASSES, _N_TREES = 0.3, 100, 40


@freeze_class
class Score:
    """A score within 0 to 1 and its standard error."""

    value: float
    standard_error: float


@freeze_class
class Compared:
    """One column or one pair."""

    names: tuple[str, ...]
    metric: str  # SDMetrics' name
    released: Score
    independent: Score | None  # None of a single column
    resample: Score


@freeze_class
class RareGroup:
    """A level that few rows have: how many of the sampled rows of the original and of the release."""

    name: str
    level: str
    original: int
    released: float  # in rows of the original's sample
    standard_error: float  # of the difference


@freeze_class
class ImpossiblePair:
    """The share of rows whose pair of levels half of the original does not have."""

    names: tuple[str, str]
    released: float
    independent: float
    floor: float  # of the other half of the original
    standard_error: float  # of the release's


@freeze_class
class Prediction:
    """How well a target is predicted in rows of the original that no model has seen, by training rows."""

    target: str
    metric: str  # `accuracy` of a category, `R²` of a number
    original: Score
    released: Score
    independent: Score
    guess: float  # the best constant's score


@freeze_class
class Comparison:
    """All that the report says; lists begin with the worst, or the rarest."""

    columns: tuple[Compared, ...]
    pairs: tuple[Compared, ...]
    rare: tuple[RareGroup, ...]
    impossible: tuple[ImpossiblePair, ...]
    # The mean of released, independent and floor over all pairs; None without two columns of levels.
    impossible_shares: tuple[float, ...] | None
    prediction: Prediction | None  # None without a target

    def average(self, of: str, which: str) -> Score | None:
        """Return the average score of `columns` or `pairs`, of the release or what stands beside it.

        Its standard error is at most this, since scores of one table vary together.
        """
        scores = [score for each in getattr(self, of) if (score := getattr(each, which))]
        if not scores:
            return None
        value, error = np.mean([(score.value, score.standard_error) for score in scores], axis=0)
        return Score(value=float(value), standard_error=float(error))


def compare_sides(
    original: Side, released: Side, *, target: str | None, rng: Generator
) -> Comparison:
    """Return how far a release is from its original: both are sampled rows of the same columns."""
    resample = original.take(rng.integers(0, original.n_rows, released.n_rows))
    independent = original.permute(rng)

    def compare(*names: str) -> Iterator[Compared]:
        n_numbers = sum(name not in original.levels for name in names)
        metric, measure = _MEASURES[len(names), n_numbers]
        found, floor = (measure(original, side, names) for side in (released, resample))
        alone = measure(original, independent, names) if len(names) == 2 else None
        if found and floor and (alone or len(names) == 1):
            yield Compared(
                names=names, metric=metric, released=found, independent=alone, resample=floor
            )

    def worst(groups: Iterator[tuple[str, ...]]) -> tuple[Compared, ...]:
        scored = (each for names in groups for each in compare(*names))
        return tuple(sorted(scored, key=lambda each: each.released.value))

    columns = worst((name,) for name in original.columns)
    pairs = worst(combinations(original.columns, 2))
    impossible = sorted(_find_impossible(original, released, rng), key=lambda each: -each.released)
    shares = [(each.released, each.independent, each.floor) for each in impossible]
    rare = sorted(
        _find_rare(original, released), key=lambda each: (each.original, each.name, each.level)
    )
    return Comparison(
        columns=columns,
        pairs=pairs,
        rare=tuple(rare[:_N_RARE]),
        impossible=tuple(impossible[:_N_WORST]),
        impossible_shares=tuple(np.mean(shares, axis=0).tolist()) if shares else None,
        prediction=None
        if target is None
        else _predict(original, released, independent, target, rng),
    )


# ---- columns and pairs


def ks_complement(real: Floats, other: Floats) -> Score | None:
    """Return 1 minus the Kolmogorov-Smirnov distance of numbers without nulls; None of no values."""
    real, other = np.sort(real[~np.isnan(real)]), np.sort(other[~np.isnan(other)])
    if not len(real) or not len(other):
        return None
    points = np.concatenate([real, other])
    f, g = (np.searchsorted(column, points, side="right") / len(column) for column in (real, other))
    at = int(np.argmax(np.abs(f - g)))
    error = math.sqrt(f[at] * (1.0 - f[at]) / len(real) + g[at] * (1.0 - g[at]) / len(other))
    return Score(value=1.0 - float(abs(f[at] - g[at])), standard_error=error)


def correlation_similarity(real: Sequence[Floats], other: Sequence[Floats]) -> Score | None:
    """Return 1 minus half the difference of Pearson's correlations; None if a column is constant."""
    found = []
    for one, two in (real, other):
        here = ~(np.isnan(one) | np.isnan(two))
        one, two = one[here], two[here]
        if len(one) < 3 or one.min() == one.max() or two.min() == two.max():
            return None
        r = float(np.corrcoef(one, two)[0, 1])
        found.append((r, (1.0 - r * r) / math.sqrt(len(one) - 1)))  # of normal columns
    (r, error), (s, error_s) = found
    return Score(value=1.0 - abs(r - s) / 2.0, standard_error=math.hypot(error, error_s) / 2.0)


def tv_complement(real: Codes, other: Codes, size: int) -> Score:
    """Return 1 minus the total variation distance of two columns of codes below a size."""
    counts = [np.bincount(codes, minlength=size) for codes in (real, other)]
    p, q = shares = [each / max(each.sum(), 1) for each in counts]
    sign = np.sign(p - q)
    variance = sum(
        (share @ sign**2 - (share @ sign) ** 2) / max(each.sum(), 1)
        for share, each in zip(shares, counts, strict=True)
    )
    error = math.sqrt(max(float(variance), 0.0)) / 2.0
    return Score(value=1.0 - float(np.abs(p - q).sum()) / 2.0, standard_error=error)


def cut_ranges(real: Floats, other: Floats) -> tuple[Codes, Codes]:
    """Return codes of numbers by 10 ranges of equal width over the first column, 1 to 10.

    0 is below it, 11 its end and beyond, 12 null. A first column without 10 different ranges, such
    as one of a single value, has as many as it has.
    """
    known = real[np.isfinite(real)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    edges = np.unique(np.linspace(low, high, _N_RANGES + 1))
    if len(edges) == 1:
        edges = np.array([low, np.nextafter(low, np.inf)])
    first, second = (
        np.where(np.isnan(column), N_CODES - 1, np.digitize(column, edges))
        for column in (real, other)
    )
    return first, second


def _compare_numbers(original: Side, other: Side, names: Sequence[str]) -> Score | None:
    real, given = ([side.columns[name] for name in names] for side in (original, other))
    if len(names) == 2:
        return correlation_similarity(real, given)
    return ks_complement(*real, *given)


def _compare_tables(original: Side, other: Side, names: Sequence[str]) -> Score:
    real = given = np.zeros(1, dtype=np.int64)
    size = 1
    for name in names:
        own = original.columns[name], other.columns[name]
        is_number = name not in original.levels
        one, two = cut_ranges(*own) if is_number else own
        n = N_CODES if is_number else len(original.levels[name])
        real, given, size = real * n + one, given * n + two, size * n
    return tv_complement(real, given, size)


# by the numbers of columns, and of columns of numbers among them
_MEASURES: dict[tuple[int, int], tuple[str, Callable[..., Score | None]]] = {
    (1, 0): ("TVComplement", _compare_tables),
    (1, 1): ("KSComplement", _compare_numbers),
    (2, 0): ("ContingencySimilarity", _compare_tables),
    (2, 1): ("ContingencySimilarity", _compare_tables),
    (2, 2): ("CorrelationSimilarity", _compare_numbers),
}


# ---- levels


def _find_rare(original: Side, released: Side) -> Iterator[RareGroup]:
    factor = original.n_rows / released.n_rows
    for name, levels in original.levels.items():
        real, given = (
            np.bincount(side.columns[name], minlength=len(levels)) for side in (original, released)
        )
        for place in np.flatnonzero((real > 0) & (real < RARE * original.n_rows)):
            n, m = int(real[place]), float(given[place])
            yield RareGroup(
                name=name,
                level="null" if levels[place] is None else str(levels[place]),
                original=n,
                released=factor * m,
                standard_error=math.sqrt(n + factor**2 * m),
            )


def _find_impossible(original: Side, released: Side, rng: Generator) -> Iterator[ImpossiblePair]:
    order = rng.permutation(original.n_rows)
    seen, rest = original.take(order[::2]), original.take(order[1::2])
    if not rest.n_rows:
        return
    independent = original.permute(rng)
    for one, two in combinations(original.levels, 2):
        known = np.zeros((len(original.levels[one]), len(original.levels[two])), bool)
        known[seen.columns[one], seen.columns[two]] = True
        found, alone, floor = (
            1.0 - float(known[side.columns[one], side.columns[two]].mean())
            for side in (released, independent, rest)
        )
        yield ImpossiblePair(
            names=(one, two),
            released=found,
            independent=alone,
            floor=floor,
            standard_error=math.sqrt(found * (1.0 - found) / released.n_rows),
        )


# ---- train on synthetic, test on real


def _predict(
    original: Side, released: Side, independent: Side, target: str, rng: Generator
) -> Prediction:
    """Return how well gradient-boosted trees predict a column in held-back rows of the original."""

    def refuse(what: str, hint: str = "name another column") -> SpecError:
        return SpecError(what, f"--target {target!r}", hint)

    if target not in original.columns or len(original.columns) < 2:
        what = "is not among the compared columns, or the only one"
        raise refuse(what, "name a column of the release")
    if len(original.levels.get(target, ())) > _MOST_CLASSES:
        raise refuse(f"has more than {_MOST_CLASSES} classes")
    is_test = rng.random(original.n_rows) < _TEST
    held, rest = (original.take(np.flatnonzero(rows)) for rows in (is_test, ~is_test))
    is_class = target in original.levels
    y = held.columns[target].astype(float)
    here = ~np.isnan(y)
    y = y[here]
    if not len(y) or np.ptp(y) == 0:
        raise refuse("does not vary")
    n_train = min(rest.n_rows, released.n_rows)
    scores = []
    for table in (rest, released, independent):
        predicted = _predict_by(table, held, target, n_train, rng)[here]
        if is_class:
            score = float((predicted == y).mean())
            error = math.sqrt(score * (1.0 - score) / len(y))
        else:  # R², and its standard error by its influence function
            squares, spread = (y - predicted) ** 2, (y - y.mean()) ** 2
            score = 1.0 - float(squares.mean() / spread.mean())
            influence = (squares - (1.0 - score) * spread) / spread.mean()
            error = float(influence.std() / math.sqrt(len(y)))
        scores.append(Score(value=score, standard_error=error))
    of_original, of_released, alone = scores
    return Prediction(
        target=target,
        metric="accuracy" if is_class else "R²",
        original=of_original,
        released=of_released,
        independent=alone,
        guess=float(np.bincount(y.astype(np.int64)).max() / len(y)) if is_class else 0.0,
    )


def _predict_by(table: Side, held: Side, target: str, n_rows: int, rng: Generator) -> Any:
    """Return what a model of the target that was trained on a table says of held-back rows."""
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ModuleNotFoundError:
        what = "a prediction needs scikit-learn"
        raise SpecError(what, "--target", "install dpdask[report]") from None
    y = table.columns[target].astype(float)
    rows = rng.permutation(np.flatnonzero(~np.isnan(y)))[:n_rows]
    if not len(rows) or np.ptp(y[rows]) == 0:
        return np.full(held.n_rows, y[rows[0]] if len(rows) else 0.0)
    given, asked = (
        np.column_stack([own.astype(float) for name, own in side.columns.items() if name != target])
        for side in (table, held)
    )
    kind = "Classifier" if target in table.levels else "Regressor"
    model = getattr(ensemble, f"HistGradientBoosting{kind}")(
        max_iter=_N_TREES, max_leaf_nodes=15, random_state=0, early_stopping=False
    )
    with one_thread():  # its threads wait by spinning, which starves a busy machine
        model.fit(given[rows], y[rows])
    return model.predict(asked)


def exact_marginals(
    frame: Frame,
    schema: Schema,
    cliques: Iterable[Sequence[str]] | None = None,
    *,
    bins: int | Mapping[str, int | Sequence[float]] = DEFAULT_BINS,
) -> MarginalCounts:
    """Return the EXACT contingency tables of a frame, in one pass. They are private: only for those who may see the rows.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    schema
        The declared columns; the privatised ones are counted.
    cliques
        The tables, each a tuple of columns; by default every column and every pair of columns.
    bins
        How continuous and mixed columns are cut: a number of cells of equal width, or for each
        column such a number or a list of the first value of each cell.

    Returns
    -------
    MarginalCounts
        `.table(("age", "sex"))` is an int64 array with an axis for each column: levels in the
        schema's order, null first.

    Raises
    ------
    DataError, SpecError
        If the frame violates the schema, or a table is too large to hold.

    Privacy
    -------
    None: the counts are exact. `dpdask.Marginals` releases tables with noise.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> dpdask.exact_marginals(pd.DataFrame({"x": [0, 1, 1]}), schema).table(("x",)).tolist()
    [1, 2]
    """
    place = open_secrets(None)
    try:
        frame = as_frame(frame)
        declared = declare_counted(find_meta(frame), schema)
        types = find_types(frame, declared)
        check_objects(frame, types, declared)
        released = declared.select_released(types)
        plain = declared.model_copy(update={"rules": ()})  # each column is counted as it is
        view = View.of(plain, released)
        try:
            fixed: Any = as_fixed_bins(bins)
        except ValueError as error:
            raise SpecError(str(error), "`bins`", "correct them") from None
        cells = cut_columns(view.codecs, fixed)
        chosen = _check_cliques(cliques or (), cells)
        statistic = TableStatistic(cells=cells, cliques=chosen, two_way=cliques is None)
        statistic.check_size()
        work = TableWork(types=types, released=released, view=view, fraction=None, secrets=place)
        return scan(FrameSource(frame, "frame"), work, statistic, "tabulate").value
    finally:
        close_secrets(place)


def _check_cliques(
    cliques: Iterable[Sequence[str]], columns: Collection[str]
) -> tuple[Clique, ...]:
    chosen = []
    for clique in cliques:
        if isinstance(clique, str) or not clique or len(set(clique)) < len(clique):
            what = "a table is a tuple of one or more different columns"
            raise SpecError(what, f"`cliques`, {clique!r}", "correct it")
        for name in clique:
            if name not in columns:
                hint = "correct its name, or its role in the schema"
                raise SpecError("is not a privatised column", f"`cliques`, {name!r}", hint)
        chosen.append(tuple(clique))
    return tuple(chosen)
