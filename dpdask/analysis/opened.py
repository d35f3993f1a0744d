"""An opened release: its table, its card, and the questions that any release may be asked; each kind of release answers some of them."""

from __future__ import annotations

import copy
import datetime as dt
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
from scipy import special

from dpdask.engine.lazy import read_frame, read_shards
from dpdask.engine.source import Frame
from dpdask.errors import SpecError
from dpdask.inference import NPMLE, WeightedSample
from dpdask.io.parquet import read_schema
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import say_date
from dpdask.privacy.rounding import write_digits

Floats = NDArray[np.float64]
_MICROSECONDS = {"D": 86_400_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class DateScale:
    """How the dates of a column are numbers.

    Attributes
    ----------
    unit
        What a number counts since 1970: days (`D`), seconds, milliseconds or microseconds. The
        card's bounds and edges count so too.
    zone
        The time zone; None if there is none.
    """

    unit: str
    zone: Any = None

    @classmethod
    def of(cls, values: pd.Series) -> DateScale | None:
        """Return the scale of a column of dates; None if it holds none."""
        if pd.api.types.is_datetime64_any_dtype(values):
            return cls(unit="us" if values.dt.unit == "ns" else values.dt.unit, zone=values.dt.tz)
        return cls(unit="D") if pd.api.types.infer_dtype(values, skipna=True) == "date" else None

    @property
    def microseconds(self) -> int:
        """How long one unit is."""
        return _MICROSECONDS[self.unit]

    def to_numbers(self, dates: pd.Series | Sequence[object]) -> Floats:
        """Return dates as float64 numbers, missing ones as NaN."""
        index = pd.DatetimeIndex(dates)
        if index.tz is not None:
            index = index.tz_convert("UTC").tz_localize(None)
        elif self.zone is not None:
            index = index.tz_localize(self.zone).tz_convert("UTC").tz_localize(None)
        found = index.to_numpy()
        unit = np.datetime_data(found.dtype)[0]
        if unit == "ns":
            found, unit = found.astype("datetime64[us]"), "us"
        numbers: Floats = np.where(
            np.isnat(found),
            np.nan,
            found.astype(np.int64) / (self.microseconds / _MICROSECONDS[unit]),
        )  # years may be far
        return numbers

    def to_dates(self, numbers: Floats) -> pd.DatetimeIndex:
        """Return numbers as dates."""
        index = pd.DatetimeIndex(self._count(numbers).astype("datetime64[us]"))
        return index if self.zone is None else index.tz_localize("UTC").tz_convert(self.zone)

    def to_spans(self, numbers: Floats) -> pd.TimedeltaIndex:
        """Return differences of numbers as spans of time."""
        return pd.TimedeltaIndex(self._count(numbers).astype("timedelta64[us]"))

    def to_edges(self, bins: Sequence[Any], where: str) -> Floats:
        """Return the edges of a histogram's ranges as numbers.

        Parameters
        ----------
        bins
            Timestamps, dates or their ISO texts.
        where
            The column, for messages.

        Raises
        ------
        SpecError
            If one of them is no date.
        """
        try:
            if any(isinstance(each, int | float | np.number) for each in bins):
                raise ValueError("numbers")
            return self.to_numbers(list(bins))
        except (TypeError, ValueError):
            raise SpecError(
                "the edges of a column of dates are dates",
                where,
                "write them as in bins=['2026-01-01', '2026-07-01']",
            ) from None

    def _count(self, numbers: Floats) -> NDArray[np.int64]:
        known = np.isfinite(numbers)
        missing = np.iinfo(np.int64).min  # NaT
        micro: NDArray[np.int64] = np.where(
            known, np.rint(np.where(known, numbers, 0.0) * self.microseconds), 0.0
        ).astype(np.int64)
        micro[~known] = missing
        return micro


def count_since_1970(bound: str, microseconds: int, *, last: bool) -> float:
    """Return a bound of a card of ranges, an ISO text, as a number.

    Parameters
    ----------
    bound
        A date, or a time; one without a zone is in UTC.
    microseconds
        How long one unit of the number is.
    last
        Whether a date that bounds times is its last moment, and not its first one.
    """
    time = dt.datetime.fromisoformat(bound)  # pandas counts in nanoseconds, which end in 2262
    since = (time if time.tzinfo else time.replace(tzinfo=dt.UTC)) - dt.datetime(
        1970, 1, 1, tzinfo=dt.UTC
    )
    rest = _MICROSECONDS["D"] // microseconds - 1 if last and len(bound) == len("2000-01-31") else 0
    return since / dt.timedelta(microseconds=microseconds) + rest


def find_scales(frame: pd.DataFrame) -> dict[str, DateScale]:
    """Return how the numbers of each column of dates count them."""
    return {
        str(name): scale
        for name in frame.columns
        if (scale := DateScale.of(frame[name])) is not None
    }


def check_no_dates(names: Sequence[str], dates: Mapping[str, DateScale]) -> None:
    """Check that no column of a regression holds dates.

    Parameters
    ----------
    names
        The columns.
    dates
        Those that hold dates.

    Raises
    ------
    SpecError
        If one does.
    """
    for name in names:
        if name in dates:
            raise SpecError(
                "holds dates, and slopes of dates are not supported",
                f"column {name!r}",
                "use mean(), quantile() or histogram()",
            )


_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result:
    """An estimate of a quantity of the original table.

    Attributes
    ----------
    estimate
        A number, a Series or a DataFrame; of dates Timestamps, whose errors are Timedeltas.
    standard_error
        Its standard deviation over drawing the rows from a population and releasing them, of the
        shape of the estimate. None where no standard error is known.
    bias_bound
        The largest possible bias, of the shape of the estimate or one number; 0.0 if there is none.
        None where no bound is known.
    limits
        What the numbers leave out, in words.
    find_ends
        Of a quantile: from a number of standard errors to the values at the ranks so far below and
        above it; None of others.
    """

    estimate: Any
    standard_error: Any
    bias_bound: Any = 0.0
    limits: tuple[str, ...] = ()
    find_ends: Callable[[float], tuple[Any, Any]] | None = None

    @classmethod
    def gather(cls, parts: Sequence[Result], index: pd.Index) -> Result:
        """Return several results of numbers as one, with Series.

        Parameters
        ----------
        parts
            The results, one or more.
        index
            What each is of.
        """
        columns = {
            name: [getattr(part, name) for part in parts]
            for name in ("estimate", "standard_error", "bias_bound")
        }
        estimate, error, bias = (
            None if all(each is None for each in column) else pd.Series(column, index)
            for column in columns.values()
        )
        bias = None if None in columns["bias_bound"] else bias
        error = error if error is None or error.dtype != object else error.astype(float)
        limits = tuple(dict.fromkeys(limit for part in parts for limit in part.limits))
        finders = [part.find_ends for part in parts if part.find_ends is not None]

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = zip(*(find(deviations) for find in finders), strict=True)
            return pd.Series(low, index), pd.Series(high, index)

        own = find_ends if len(finders) == len(parts) else None
        return cls(
            estimate=estimate, standard_error=error, bias_bound=bias, limits=limits, find_ends=own
        )

    def interval(self, confidence: float = 0.95, *, ignore_bias: bool = False) -> tuple[Any, Any]:
        """Return the normal confidence interval, that of a quantile by ranks, widened by the bound on the bias.

        Parameters
        ----------
        confidence
            The probability with which it contains the true value, in (0, 1).
        ignore_bias
            Leave the bias out: the interval then holds the true value with that probability only if
            there is no bias.

        Raises
        ------
        SpecError
            If no standard error or no bound on the bias is known, or the confidence is not within 0
            to 1.
        """
        if not isinstance(confidence, int | float | np.floating) or not 0 < confidence < 1:
            raise SpecError(
                "the confidence is a probability between 0 and 1",
                "interval",
                "give a fraction such as 0.95, not a percentage",
            )
        deviations = float(special.ndtri(0.5 + confidence / 2))
        if self.find_ends is not None:
            low, high = self.find_ends(deviations)
        elif self.standard_error is None:
            raise SpecError(
                "no standard error is known, so there is no interval", "interval", "see `limits`"
            )
        else:
            low, high = (
                self.estimate - deviations * self.standard_error,
                self.estimate + deviations * self.standard_error,
            )
        if not ignore_bias:
            if self.bias_bound is None:
                what = (
                    "no bound on the bias is known, so no interval is known to hold the true value"
                )
                use = "see `limits`; interval(ignore_bias=True) has the standard error alone"
                raise SpecError(what, "interval", use)
            low, high = low - self.bias_bound, high + self.bias_bound
        return low, high

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each number of the estimate: the estimate, its standard error and the bound on its bias."""
        if isinstance(self.estimate, pd.DataFrame):
            index: pd.Index = pd.MultiIndex.from_product(
                [self.estimate.index, self.estimate.columns]
            )
        else:
            index = (
                self.estimate.index if isinstance(self.estimate, pd.Series) else pd.RangeIndex(1)
            )
        parts = {
            "estimate": self.estimate,
            "standard_error": self.standard_error,
            "bias_bound": self.bias_bound,
        }
        shape = np.shape(self.estimate)
        numbers = {
            name: np.ravel(np.broadcast_to(np.nan if part is None else part, shape))
            for name, part in parts.items()
        }
        return pd.DataFrame(numbers, index=index)

    def __repr__(self) -> str:
        if isinstance(self.estimate, pd.Series | pd.DataFrame):
            frame = self.to_frame()
            more = f"\n… {len(frame) - _SHOWN:,} more" if len(frame) > _SHOWN else ""
            return (
                str(frame.head(_SHOWN).to_string(float_format=lambda number: f"{number:.4g}"))
                + more
            )
        if isinstance(self.estimate, pd.Timestamp):
            return self._describe_date(self.estimate)
        error = (
            "no standard error"
            if self.standard_error is None
            else f"standard error {write_digits(self.standard_error)}"
        )
        bias = (
            "no bound on its bias"
            if self.bias_bound is None
            else f"bias at most {write_digits(self.bias_bound)}"
        )
        bias = "unbiased" if self.bias_bound == 0.0 else bias
        if self.standard_error is None and self.find_ends is not None:
            low, high = self.find_ends(float(special.ndtri(0.975)))
            error, bias = (
                f"at ranks within 1.96 standard errors {low:.6g} to {high:.6g}",
                "" if self.bias_bound == 0.0 else bias,
            )
            return f"{self.estimate:.6g} ({', '.join(filter(None, (error, bias)))})"
        return f"{self.estimate:.6g} ({error}, {bias})"

    def _describe_date(self, estimate: pd.Timestamp) -> str:
        bias = (
            "no bound on its bias"
            if self.bias_bound is None
            else f"bias at most {self.bias_bound}"
            if self.bias_bound
            else "unbiased"
        )
        return f"{estimate} (standard error {self.standard_error}, {bias})"


QUESTIONS = (
    "mean",
    "share",
    "histogram",
    "quantile",
    "crosstab",
    "slope",
    "npmle",
    "regress",
    "fit",
)
_N_BINS = 20


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenedRelease:
    """A release as an analyst sees it: its table, its card, and estimates of the original table with their standard errors.

    Everything is computed from the folder alone, and costs no ε. A question that this kind of
    release does not answer is refused with one line that says why, and what to use.

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
            ends = " to ".join(
                say_date(bound, column.get("numbers")) or str(bound) for bound in bounds or ()
            )
            domain = ends if levels is None else f"{len(levels)} levels"
            answers = ", ".join(
                question for question in QUESTIONS if question in self._answers(name)
            )
            rows[name] = {
                "role": column["role"],
                "kind": column.get("kind") or "",
                "domain": domain,
                "answers": answers,
            }
        return pd.DataFrame.from_dict(
            rows, orient="index", columns=["role", "kind", "domain", "answers"]
        )

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

    def mean(
        self, column: str, *, by: str | None = None, values: Sequence[float] | None = None
    ) -> Result:
        """Return the mean of a column, or its mean in each group of another column.

        Parameters
        ----------
        column
            A column of numbers.
        by
            A column whose levels make the groups.
        values
            A number for each level, in the card's order, null first, where a column's levels are
            not numbers; `[0, 0, 1]` gives the share of the third. NaN leaves the rows of a level
            out, as nulls are left out by default.
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

    def quantile(
        self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None
    ) -> Result:
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

    def npmle(
        self,
        column: str,
        *,
        support: tuple[float, float] | None = None,
        knots: Sequence[float] | None = None,
    ) -> NPMLE:
        """Return the distribution under which a column's released ranges are most likely.

        Parameters
        ----------
        column
            The original column.
        support
            Bounds that no value lies outside of; the declared ones if not given.
        knots
            Where the estimate may tell values apart, such as `numpy.geomspace(100, 1e6, 300)`. By
            default they are quantiles of the ranges' ends, and more ends where the distribution has
            its mass.
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

    def fit(
        self,
        estimator: Callable[[WeightedSample], NDArray[np.float64]],
        response: str,
        *features: str,
    ) -> Result:
        """Return the coefficients of an M-estimator of weighted cells, a Series.

        Parameters
        ----------
        estimator
            One of `dpdask.inference`, such as `logistic`, or any function from a `WeightedSample`
            to coefficients.
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
            raise SpecError(
                "the columns must be a list of names",
                "to_pandas",
                'write it as in to_pandas(["age", "city"])',
            )
        chosen = list(columns)
        held = self._types.names
        missing = next((name for name in chosen if name not in held), None)
        if missing is not None:
            near = difflib.get_close_matches(str(missing), held, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"use some of {', '.join(held[:_SHOWN])}{', …' if len(held) > _SHOWN else ''}"
            )
            raise SpecError(
                "no released column has this name", f"to_pandas, column {missing!r}", hint
            )
        return chosen

    def _levels(self, name: str) -> tuple[object, ...] | None:
        levels = self._column(name).get("levels")
        return None if levels is None else tuple(levels)

    def _level_values(
        self, name: str, values: Sequence[float] | None
    ) -> NDArray[np.float64] | None:
        """Return the number of each level, NaN for null; None for a column without levels."""
        levels = self._levels(name)
        if levels is None:
            if values is not None:
                raise SpecError(
                    "`values` are for a column with levels", f"mean({name})", "leave them out"
                )
            return None
        shown = ", ".join("null" if level is None else str(level) for level in levels[:_SHOWN]) + (
            ", …" if len(levels) > _SHOWN else ""
        )
        if values is None:
            if not all(level is None or isinstance(level, int | float) for level in levels):
                raise SpecError(
                    "does not hold numbers",
                    f"column {name!r}",
                    f"use share(), or give `values`, a number for each of {shown}",
                )
            values = [
                math.nan if level is None else float(level)
                for level in levels
                if level is None or isinstance(level, int | float)
            ]
        try:
            found = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (len(levels),) or np.isinf(found).any():
            raise SpecError(
                f"needs {len(levels)} values, in the order of the levels",
                f"mean({name})",
                f"give a number, or NaN, for each of {shown}",
            )
        return found

    def _bounds_of(self, name: str) -> tuple[float, float] | None:
        """Return the declared bounds of a column in the numbers of its estimates; None if there are none."""
        bounds = self._column(name).get("bounds")
        return None if bounds is None else (float(bounds[0]), float(bounds[1]))

    def _edges(
        self, name: str, bins: int | Sequence[Any], scale: DateScale | None = None
    ) -> NDArray[np.float64]:
        """Return the edges of a histogram's ranges; a number of them lies between the declared bounds."""
        if isinstance(bins, int):
            bounds = self._bounds_of(name)
            if any(isinstance(level, str) for level in self._levels(name) or ()):
                raise SpecError("does not hold numbers", f"column {name!r}", "use share()")
            if bounds is None or bins < 1 or bins is True:
                raise SpecError(
                    "a number of ranges needs declared bounds, and is at least 1",
                    f"column {name!r}",
                    "give the edges: bins=[0, 10, 20]",
                )
            return np.linspace(*bounds, bins + 1)
        try:
            edges = (
                np.asarray(bins, dtype=np.float64)
                if scale is None
                else scale.to_edges(bins, f"column {name!r}")
            )
        except (TypeError, ValueError):
            edges = np.zeros(0)
        if (
            edges.ndim != 1
            or len(edges) < 2
            or not np.isfinite(edges).all()
            or (np.diff(edges) <= 0).any()
        ):
            raise SpecError(
                "the edges must be finite numbers that increase, at least two",
                "bins",
                "write them as in bins=[0, 10, 20]",
            )
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
        private = [
            name
            for name, column in self.content["columns"].items()
            if column["role"] == "privatised"
        ]
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
        first = (
            next((name for name in column if isinstance(name, str)), None)
            if isinstance(column, list | tuple)
            else None
        )
        hint = "give its name, a text" if first is None else f"give a name such as {first!r}"
        raise SpecError(
            "one column is expected",
            f"{f'{where}, ' if where else ''}a {type(column).__name__}",
            hint,
        )


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
        raise SpecError(
            "a quantile's probability lies between 0 and 1",
            "quantile",
            "give a fraction, not a percentage; or a list of fractions",
        )
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
        raise SpecError(
            f"{question}() takes no groups",
            f"{question}({column}, by={by})",
            f"{use} where the release answers it: see `.columns`",
        )
