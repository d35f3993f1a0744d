"""Train on synthetic, test on real: what a model learns from a release. CONFIDENTIAL: it is tested on private rows."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dpdask.errors import SpecError
from dpdask.evaluation.samples import Side
from dpdask.evaluation.similarity import Score

Floats: TypeAlias = NDArray[np.float64]
_TEST = 0.3
_MOST_CLASSES = 100
_N_TREES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How well a target is predicted in rows of the original that no model has seen; confidential: measured on private rows.

    Attributes
    ----------
    target
        The column.
    metric
        `accuracy` of a category, `R²` of a number.
    original, released, independent
        The score of a model that was trained on other rows of the original, on the release, and on independent columns.
    guess
        The score of the best constant.
    """

    target: str
    metric: str
    original: Score
    released: Score
    independent: Score
    guess: float


def predict(original: Side, released: Side, independent: Side, target: str, rng: Generator) -> Prediction:
    """Return how well gradient-boosted trees predict a column, trained on each table and tested on held-back rows of the original.

    Parameters
    ----------
    original, released, independent
        The tables; the third has independent columns.
    target
        The column.
    rng
        Chooses the test rows.

    Raises
    ------
    SpecError
        If the target is not compared, has too many classes or no variation, there is no other column, or scikit-learn is missing.
    """
    if target not in original.columns or len(original.columns) < 2:
        raise SpecError("is not among the compared columns, or the only one", f"--target {target!r}", "name a column of the release")
    if len(original.levels.get(target, ())) > _MOST_CLASSES:
        raise SpecError(f"has more than {_MOST_CLASSES} classes", f"--target {target!r}", "name another column")
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
    scores = [_score(_train(table, features, target, n_train, rng), held, features, y, here, is_class) for table in tables]
    guess = float(np.bincount(y[here].astype(np.int64)).max() / here.sum()) if is_class else 0.0
    return Prediction(
        target=target, metric="accuracy" if is_class else "R²", original=scores[0], released=scores[1], independent=scores[2], guess=guess
    )


def _train(table: Side, features: list[str], target: str, n_rows: int, rng: Generator) -> Any:
    try:
        ensemble = importlib.import_module("sklearn.ensemble")
    except ModuleNotFoundError:
        raise SpecError("a prediction needs scikit-learn", "--target", "install dpdask[report]") from None
    y = table.columns[target].astype(np.float64)
    rows = rng.permutation(np.flatnonzero(~np.isnan(y)))[:n_rows]
    if not len(rows) or np.ptp(y[rows]) == 0:
        return float(y[rows[0]]) if len(rows) else 0.0
    kind = ensemble.HistGradientBoostingClassifier if target in table.levels else ensemble.HistGradientBoostingRegressor
    model = kind(max_iter=_N_TREES, max_leaf_nodes=15, random_state=0, early_stopping=False)
    with threadpool_limits(1):  # its threads wait by spinning, which starves a busy machine
        return model.fit(_matrix(table, features)[rows], y[rows])


def _matrix(table: Side, features: list[str]) -> Floats:
    return np.column_stack([table.columns[name].astype(np.float64) for name in features])


def _score(model: Any, held: Side, features: list[str], y: Floats, here: NDArray[np.bool_], is_class: bool) -> Score:
    told = np.full(len(y), model) if isinstance(model, float) else model.predict(_matrix(held, features))
    n, y, told = int(here.sum()), y[here], told[here]
    if is_class:
        accuracy = float((told == y).mean())
        return Score(value=accuracy, standard_error=math.sqrt(accuracy * (1.0 - accuracy) / n))
    squares, spread = (y - told) ** 2, (y - y.mean()) ** 2
    r2 = 1.0 - float(squares.mean() / spread.mean())
    influence = (squares - (1.0 - r2) * spread) / spread.mean()
    return Score(value=r2, standard_error=float(influence.std() / math.sqrt(n)))
