"""An opened release: its table, its card, and the questions that any release may be asked; each kind of release answers some of them."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.analysis.dates import DateScale
from dpdask.analysis.result import Result
from dpdask.engine.lazy import read_frame, read_shards
from dpdask.engine.source import Frame
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, WeightedSample
from dpdask.io.parquet import read_schema
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import say_date

QUESTIONS = ("mean", "share", "histogram", "quantile", "crosstab", "slope", "npmle", "regress", "fit")
_N_BINS = 20
_SHOWN = 12


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenedRelease:
    """A release as an analyst sees it: its table, its card, and estimates of the original table with their standard errors.

    Everything is computed from the folder alone, and costs no ε. A question that this kind of release does not answer is refused
    with one line that says why, and what to use.

    Attributes
    ----------
    folder
        The output folder.
    shards
        The names of the shards.
    n_rows
        How many rows the released table has.
    content
        The card, as plain values.
    """

    folder: Folder
    shards: tuple[str, ...]
    n_rows: int
    content: Mapping[str, Any]

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what was promised, to whom, and how."""
        return copy.deepcopy(dict(self.content))

    @cached_property
    def _types(self) -> pa.Schema:
        """The released columns, as the first shard has them."""
        return read_schema(self.folder, self.shards[0])

    @property
    def columns(self) -> pd.DataFrame:
        """A row for each column of the original table: its role, its kind, its domain, and which questions it answers."""
        rows = {}
        for name, column in self.content["columns"].items():
            levels, bounds = column.get("levels"), column.get("bounds")
            ends = " to ".join(say_date(bound, column.get("numbers")) or str(bound) for bound in bounds or ())
            domain = ends if levels is None else f"{len(levels)} levels"
            answers = ", ".join(question for question in QUESTIONS if question in self._answers(name))
            rows[name] = {"role": column["role"], "kind": column.get("kind") or "", "domain": domain, "answers": answers}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["role", "kind", "domain", "answers"])

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the released table as a pandas frame, or some of its columns.

        Parameters
        ----------
        columns
            The names of released columns, in the order wanted; all if None.

        Raises
        ------
        SpecError
            If it is not a list of released columns.
        """
        chosen = None if columns is None else self._check_released(columns)
        return read_shards(self.folder, self.shards, chosen)

    def to_dask(self) -> Frame:
        """Return the released table as a lazy Dask frame, with a partition for each shard."""
        return read_frame(self.folder, self.shards)

    def mean(self, column: str, *, by: str | None = None, values: Sequence[float] | None = None) -> Result:
        """Return the mean of a column, or its mean in each group of another column.

        Parameters
        ----------
        column
            A column of numbers.
        by
            A column whose levels make the groups.
        values
            A number for each level, in the card's order, null first, where a column's levels are not numbers; `[0, 0, 1]` gives the share
            of the third. NaN leaves the rows of a level out, as nulls are left out by default.
        """
        del by, values
        self._refuse("mean", column)

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a column, a Series.

        Parameters
        ----------
        column
            A column of levels.
        by
            Not offered: `crosstab` counts the levels in each group.
        """
        del by
        self._refuse("share", column)

    def histogram(self, column: str, bins: int | Sequence[float] = _N_BINS) -> Result:
        """Return how many rows lie in each range of a column of numbers, a Series.

        Parameters
        ----------
        column
            A column of numbers.
        bins
            How many ranges of equal width; or their edges.
        """
        del bins
        self._refuse("histogram", column)

    def quantile(self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None) -> Result:
        """Return a quantile of a column of numbers or dates; or several, a Series by probability.

        Parameters
        ----------
        column
            The column.
        q
            Its probability, in (0, 1); or several.
        by
            A kept column whose levels make the groups, for ranges; elsewhere `mean` has groups.
        """
        del q, by
        self._refuse("quantile", column)

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of values, a DataFrame.

        Parameters
        ----------
        first, second
            The columns of its rows and of its columns.
        """
        self._refuse("crosstab", first, second)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression, a Series by feature; a constant is always in it.

        Parameters
        ----------
        response
            The column that is explained.
        features
            The columns that explain it.
        """
        self._refuse("slope", response, *features)

    def npmle(self, column: str, *, support: tuple[float, float] | None = None, knots: Sequence[float] | None = None) -> NPMLE:
        """Return the distribution under which a column's released ranges are most likely.

        Parameters
        ----------
        column
            The original column.
        support
            Bounds that no value lies outside of; the declared ones if not given.
        knots
            Where the estimate may tell values apart, such as `numpy.geomspace(100, 1e6, 300)`. By default they are quantiles of the ranges' ends, and
            more ends where the distribution has its mass.
        """
        del support, knots
        self._refuse("npmle", column)

    def regress(self, response: str, *features: str, estimator: Any = None) -> Any:
        """Return a fitted regression of a column that is released as ranges, `inference.IntervalRegressor`.

        Parameters
        ----------
        response
            The column that is explained.
        features
            Columns that were kept.
        estimator
            A scikit-learn regressor; linear regression if not given.
        """
        del estimator
        self._refuse("regress", response, *features)

    def fit(self, estimator: Callable[[WeightedSample], NDArray[np.float64]], response: str, *features: str) -> Result:
        """Return the coefficients of an M-estimator of weighted cells, a Series.

        Parameters
        ----------
        estimator
            One of `dpdask.inference`, such as `logistic`, or any function from a `WeightedSample` to coefficients.
        response
            The column that is explained.
        features
            The columns that explain it.
        """
        del estimator
        self._refuse("fit", response, *features)

    def _answers(self, name: str) -> set[str]:
        """Return the questions that a column answers."""
        raise NotImplementedError

    def _partners(self, name: str) -> list[str]:
        """Return the other columns that a question about a column may also name."""
        return [other for other in self.content["columns"] if other != name]

    def _column(self, name: str) -> Mapping[str, Any]:
        """Return a column's part of the card; refuse a name that is not there."""
        check_one(name)
        columns: Mapping[str, Mapping[str, Any]] = self.content["columns"]
        if not isinstance(name, str) or name not in columns:
            near = difflib.get_close_matches(str(name), columns, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see `.columns`"
            raise SpecError("the release has no such column", f"column {name!r}", hint)
        return columns[name]

    def _check_released(self, columns: Sequence[str]) -> list[str]:
        """Return the names of columns; refuse what is not a list of columns that the shards have."""
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            raise SpecError("the columns must be a list of names", "to_pandas", 'write it as in to_pandas(["age", "city"])')
        chosen = list(columns)
        held = self._types.names
        missing = next((name for name in chosen if name not in held), None)
        if missing is not None:
            near = difflib.get_close_matches(str(missing), held, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(held[:_SHOWN])}{', …' if len(held) > _SHOWN else ''}"
            raise SpecError("no released column has this name", f"to_pandas, column {missing!r}", hint)
        return chosen

    def _levels(self, name: str) -> tuple[object, ...] | None:
        levels = self._column(name).get("levels")
        return None if levels is None else tuple(levels)

    def _level_values(self, name: str, values: Sequence[float] | None) -> NDArray[np.float64] | None:
        """Return the number of each level, NaN for null; None for a column without levels."""
        levels = self._levels(name)
        if levels is None:
            if values is not None:
                raise SpecError("`values` are for a column with levels", f"mean({name})", "leave them out")
            return None
        shown = ", ".join("null" if level is None else str(level) for level in levels[:_SHOWN]) + (", …" if len(levels) > _SHOWN else "")
        if values is None:
            if not all(level is None or isinstance(level, int | float) for level in levels):
                raise SpecError("does not hold numbers", f"column {name!r}", f"use share(), or give `values`, a number for each of {shown}")
            values = [math.nan if level is None else float(level) for level in levels if level is None or isinstance(level, int | float)]
        try:
            found = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (len(levels),) or np.isinf(found).any():
            raise SpecError(f"needs {len(levels)} values, in the order of the levels", f"mean({name})", f"give a number, or NaN, for each of {shown}")
        return found

    def _bounds_of(self, name: str) -> tuple[float, float] | None:
        """Return the declared bounds of a column in the numbers of its estimates; None if there are none."""
        bounds = self._column(name).get("bounds")
        return None if bounds is None else (float(bounds[0]), float(bounds[1]))

    def _edges(self, name: str, bins: int | Sequence[Any], scale: DateScale | None = None) -> NDArray[np.float64]:
        """Return the edges of a histogram's ranges; a number of them lies between the declared bounds."""
        if isinstance(bins, int):
            bounds = self._bounds_of(name)
            if any(isinstance(level, str) for level in self._levels(name) or ()):
                raise SpecError("does not hold numbers", f"column {name!r}", "use share()")
            if bounds is None or bins < 1 or bins is True:
                raise SpecError("a number of ranges needs declared bounds, and is at least 1", f"column {name!r}", "give the edges: bins=[0, 10, 20]")
            return np.linspace(*bounds, bins + 1)
        try:
            edges = np.asarray(bins, dtype=np.float64) if scale is None else scale.to_edges(bins, f"column {name!r}")
        except (TypeError, ValueError):
            edges = np.zeros(0)
        if edges.ndim != 1 or len(edges) < 2 or not np.isfinite(edges).all() or (np.diff(edges) <= 0).any():
            raise SpecError("the edges must be finite numbers that increase, at least two", "bins", "write them as in bins=[0, 10, 20]")
        return edges

    def _refuse(self, question: str, *names: str) -> NoReturn:
        """Raise the SpecError that says why a question is not answered, and what to use."""
        for name in names:
            self._column(name)
        why, use = self.refusals[question]
        where = f"{question}({', '.join(names)})"
        raise SpecError(why, where, use)

    def __repr__(self) -> str:
        kind, promised = self.content["mechanism"]["kind"], self.content["guarantee"]["epsilon"]
        promise = "no epsilon" if promised is None else f"epsilon={promised:g}"
        insecure = ", INSECURE" if self.content["insecure"] else ""
        private = [name for name, column in self.content["columns"].items() if column["role"] == "privatised"]
        return f"{type(self).__name__}({kind}, {self.n_rows:,} rows, {promise}{insecure}, privatised: {', '.join(private)})"


def check_one(column: object, where: str | None = None) -> None:
    """Refuse several columns in the place of one.

    Parameters
    ----------
    column
        What is given as a column's name.
    where
        Where the check is made, for messages.

    Raises
    ------
    SpecError
        If it is a list or another collection.
    """
    if isinstance(column, Iterable) and not isinstance(column, str):
        first = next((name for name in column if isinstance(name, str)), None) if isinstance(column, list | tuple) else None
        hint = "give its name, a text" if first is None else f"give a name such as {first!r}"
        raise SpecError("one column is expected", f"{f'{where}, ' if where else ''}a {type(column).__name__}", hint)


def check_probabilities(q: float | Sequence[float]) -> list[float]:
    """Return the probabilities of quantiles.

    Raises
    ------
    SpecError
        If one is not within 0 to 1, or there are none.
    """
    try:
        found = np.atleast_1d(np.asarray(q, dtype=np.float64))
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 1 or not found.size or not ((found > 0) & (found < 1)).all():
        raise SpecError("a quantile's probability lies between 0 and 1", "quantile", "give a fraction, not a percentage; or a list of fractions")
    return found.tolist()  # type: ignore[no-any-return]  # numpy's typing


def check_no_groups(question: str, column: str, by: str | None) -> None:
    """Refuse the groups that a question does not take.

    Parameters
    ----------
    question, column
        What is asked, and of which column.
    by
        The column of the groups, or None.

    Raises
    ------
    SpecError
        If there is one.
    """
    if by is not None:
        use = f"use crosstab({by!r}, {column!r})" if question == "share" else "use mean(…, by=…)"
        raise SpecError(f"{question}() takes no groups", f"{question}({column}, by={by})", f"{use} where the release answers it: see `.columns`")
