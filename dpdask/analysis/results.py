"""What a question is answered with: an estimate, its error, the bound on its bias, and what they leave out."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from dpdask.arrays import Ends, Floats
from dpdask.errors import SpecError
from dpdask.html import make_html_table
from dpdask.inference.measured import NORMAL_95

TABLES = (pd.Series, pd.DataFrame)
_SHOWN = 12
N_BINS = 20
MANY = 1e6  # times the rows: a share of so many has the law of a Poisson count
NO_LINE = "the noise affects slope, means and spread together, and their joint error is not known"
NO_ERROR, _NO_BOUND = "no standard error is known", "no bound on the bias is known"
_ENDS = {"low": "95 % low", "high": "95 % high", "standard_error": "standard error"}


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
    possible
        The least and the greatest value that the true one can have, as what each value is clipped
        to, each one number or of the shape of the estimate: intervals end there. None if it is not
        known.
    find_ends
        From a number of standard errors to the ends of the interval, where these are not so far from
        the estimate: of a quantile the values at the ranks so far below and above it; of rows that
        are weighted by units further ends, where few units make most of the error. None of others.
    drawn
        Of shares and of numbers of rows, the number of rows n that were drawn, and the number N of which
        the estimate is a part, 1 of a share: drawing gives a true y the variance y (N - y) / n. None
        of other numbers.
    of_table
        Whether it is of the whole table, although the rows of each unit were bounded: they are
        weighted by published numbers of rows.
    """

    estimate: Any
    standard_error: Any
    bias_bound: Any = 0.0
    limits: tuple[str, ...] = ()
    possible: tuple[Any, Any] | None = None
    find_ends: Callable[[float], tuple[Any, Any]] | None = None
    drawn: Ends | None = None
    of_table: bool = False

    @classmethod
    def gather(cls, parts: Sequence[Result], index: pd.Index) -> Result:
        """Return several results of numbers as one, with Series."""
        columns = (
            [getattr(part, name) for part in parts]
            for name in ("estimate", "standard_error", "bias_bound")
        )
        # what one part does not know is missing there alone
        estimate, error, bias = (
            None if all(each is None for each in column) else pd.Series(column, index)
            for column in columns
        )
        error, bias = (
            each.astype(float) if each is not None and each.dtype == object else each
            for each in (error, bias)
        )
        limits = tuple(dict.fromkeys(limit for part in parts for limit in part.limits))
        finders = [part.find_ends or (lambda _: (np.nan, np.nan)) for part in parts]

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = zip(*(find(deviations) for find in finders), strict=True)
            return pd.Series(low, index), pd.Series(high, index)

        are_found = any(part.find_ends is not None for part in parts)
        return cls(
            estimate=estimate,
            standard_error=error,
            bias_bound=bias,
            limits=limits,
            find_ends=find_ends if are_found else None,
            of_table=all(part.of_table for part in parts),
        )

    def interval(self, confidence: float = 0.95, *, approximate: bool = False) -> tuple[Any, Any]:
        """Return the normal confidence interval, that of a quantile by ranks and that of a share by its score, widened by the bound on the bias.

        Parameters
        ----------
        confidence
            The probability with which it contains the true value, in (0, 1).
        approximate
            Whether an interval without the bias will do, where no bound of it is known or its bound
            is left out on purpose: it then holds the true value with that probability only if there
            is no bias.

        Raises
        ------
        SpecError
            If no standard error or no bound on the bias is known, or the confidence is not within 0
            to 1.

        Notes
        -----
        The variance of the share of few rows depends on the share: the ends are those y that are so
        many standard deviations of their own from the estimate. The noise has the same variance at all y.

        References
        ----------
        Wilson, Probable inference, the law of succession, and statistical inference (1927).
        """
        if not isinstance(confidence, int | float | np.floating) or not 0 < confidence < 1:
            raise SpecError(
                "the confidence is a probability between 0 and 1",
                "interval",
                "give a fraction such as 0.95, not a percentage",
            )
        why = self._why_no_interval
        if why is not None and not (approximate and why == _NO_BOUND):
            use = "see `limits`"
            if why == _NO_BOUND:
                use += "; interval(approximate=True) uses the standard error alone"
            raise SpecError(f"{why}, so there is no interval", "interval", use)
        deviations = float(special.ndtri(0.5 + confidence / 2))
        low, high = self.reach(deviations)
        # that of dates is a span of time, unless there is none
        if not approximate and not _is_zero(self.bias_bound):
            low, high = low - self.bias_bound, high + self.bias_bound
        if self.possible is None:
            return low, high
        return clip_to(low, self.possible), clip_to(high, self.possible)

    def reach(self, deviations: float) -> tuple[Any, Any]:
        """Return the ends of the interval so many standard errors away, without the bias and wherever the true value may lie."""
        if self.find_ends is not None:
            return self.find_ends(deviations)
        error = self.standard_error
        if isinstance(error, TABLES):
            error = error.where(error != error * 0)  # an error of 0 is not known
        if self.drawn is not None:
            return _find_score_ends(self.estimate, error, *self.drawn, deviations)
        return self.estimate - deviations * error, self.estimate + deviations * error

    def change(self, change: Callable[[Any], Any]) -> Result:
        """Return the result with its Series or frames, and the ends of its interval, changed alike."""

        def each(part: Any) -> Any:
            changed = change(part) if isinstance(part, TABLES) else part
            return float(changed) if isinstance(changed, np.floating) else changed

        def find_ends(deviations: float) -> tuple[Any, Any]:
            assert self.find_ends is not None
            low, high = self.find_ends(deviations)
            return each(low), each(high)

        return replace(
            self,
            estimate=each(self.estimate),
            standard_error=each(self.standard_error),
            bias_bound=each(self.bias_bound),
            possible=self.possible and (each(self.possible[0]), each(self.possible[1])),
            find_ends=self.find_ends and find_ends,
        )

    def square(self) -> Result:
        """Return the square of a number between -1 and 1, its interval by the squares of the ends."""
        own, bias, size = self.reach, self.bias_bound, abs(self.estimate)

        def find_ends(deviations: float) -> Ends:
            low, high = (min(max(end, -1.0), 1.0) for end in own(deviations))
            ends = sorted((low * low, high * high))
            return (0.0 if low < 0.0 < high else ends[0]), ends[1]

        if bias is not None:  # the true one may be larger than the estimate
            low, high = own(NORMAL_95)
            bias *= 2.0 * min(max(size, -low, high) + bias, 1.0)
        return replace(
            self,
            estimate=self.estimate**2,
            standard_error=None,
            bias_bound=bias,
            possible=(0.0, 1.0),
            find_ends=find_ends,
        )

    def plot(self, ax: Any = None, *, confidence: float = 0.95) -> Any:
        """Draw the estimate with its intervals as error bars, and return the axes; it needs matplotlib.

        Parameters
        ----------
        ax
            The matplotlib axes to draw in; new ones if None.
        confidence
            The probability with which the intervals contain the true values, in (0, 1).
        """
        ax = _import_pyplot().subplots()[1] if ax is None else ax
        frame, why = self.to_frame(confidence), self._why_no_interval
        table = isinstance(self.estimate, pd.DataFrame)
        series: list[tuple[str | None, pd.DataFrame]] = [(None, frame)]
        if table:
            groups = frame.groupby(level=1, sort=False, dropna=False)
            series = [(str(name), part.droplevel(1)) for name, part in groups]
        for number, (name, part) in enumerate(series):
            places = np.arange(len(part)) + (number - (len(series) - 1) / 2.0) * 0.6 / len(series)
            middle = part["estimate"].to_numpy()
            # a quantile may lie at an end of its interval
            ends = [
                np.maximum(middle - part["low"].to_numpy(), middle * 0),
                np.maximum(part["high"].to_numpy() - middle, middle * 0),
            ]
            bars = None if why else ends
            ax.errorbar(places, middle, yerr=bars, fmt="o", ms=4, capsize=3, label=name)
        index = series[0][1].index
        labels = []
        if isinstance(self.estimate, TABLES):
            tuples = (each if isinstance(each, tuple) else (each,) for each in index)
            labels = [" | ".join(map(str, each)) for each in tuples]
            ax.set_xlabel(", ".join(str(name) for name in index.names if name is not None))
        turned = {"rotation": 45, "ha": "right"} if len(labels) > 4 else {}
        ax.set_xticks(range(len(labels)), labels, **turned)
        if table:
            ax.legend(title=str(self.estimate.columns.name or ""))
        told = f"no interval: {why}" if why else f"{confidence * 100:g} % intervals"
        ax.set_title(told, fontsize=9)
        return ax

    @property
    def _why_no_interval(self) -> str | None:
        """Why no interval is known to hold the true value; None if there is one."""
        error = self.standard_error
        is_number = not isinstance(error, TABLES)
        if self.find_ends is None and (error is None or (is_number and error == error * 0)):
            return NO_ERROR
        return _NO_BOUND if self.bias_bound is None else None

    def to_frame(self, confidence: float = 0.95) -> pd.DataFrame:
        """Return a row for each number of the estimate: the estimate, the ends of its interval, its standard error and the bound on its bias; what is not known is missing. A missing level is `null`.

        Parameters
        ----------
        confidence
            The probability with which the interval contains the true value, in (0, 1).
        """
        of = self.estimate
        index: pd.Index = of.index if isinstance(of, pd.Series) else pd.RangeIndex(1)
        if isinstance(of, pd.DataFrame):
            index = pd.MultiIndex.from_product([of.index, of.columns])
        low, high = (None, None) if self._why_no_interval else self.interval(confidence)
        parts = (of, low, high, self.standard_error, self.bias_bound)
        names = ("estimate", "low", "high", "standard_error", "bias_bound")
        numbers = {
            name: np.ravel(np.broadcast_to(np.nan if part is None else part, np.shape(of)))
            for name, part in zip(names, parts, strict=True)
        }
        return _name_nulls(pd.DataFrame(numbers, index=index))

    def _shorten(self) -> tuple[pd.DataFrame, list[str]]:
        """Return what is shown of the estimates: their interval, or their standard error, and lines on what they leave out."""
        frame, why, lines = self.to_frame(), self._why_no_interval, list(self.limits)
        if len(frame) > _SHOWN:
            lines.insert(0, f"… {len(frame) - _SHOWN:,} more")
        if why is not None:
            lines.insert(0, f"no interval: {why}")
        shown = frame[["estimate", "low", "high"] if why is None else ["estimate"]]
        if why == _NO_BOUND and self.standard_error is not None:
            shown = frame[["estimate", "standard_error"]]
        return shown.head(_SHOWN), lines

    def __repr__(self) -> str:
        frame, lines = self._shorten()
        if isinstance(self.estimate, TABLES):
            text = frame.rename(columns=_ENDS).to_string(float_format=_write, na_rep="unknown")
            return "\n".join([str(text), *lines])
        [numbers] = frame.to_dict("records")
        text = _write(numbers.pop("estimate"))
        if "low" in numbers:
            text += f" (95 %: {_write(numbers['low'])} to {_write(numbers['high'])})"
        elif "standard_error" in numbers:
            text += f" (standard error {_write(numbers['standard_error'])})"
        return "\n".join([text, *lines])

    def _repr_html_(self) -> str:
        frame, lines = self._shorten()
        names = [str(name or "") for name in frame.index.names]
        named = isinstance(self.estimate, TABLES)
        rows = [
            [
                *((label if isinstance(label, tuple) else (label,)) if named else ()),
                *map(_write, row),
            ]
            for label, row in zip(frame.index, frame.to_numpy(dtype=object), strict=True)
        ]
        head = [*(names if named else ()), *frame.rename(columns=_ENDS).columns]
        return make_html_table("Estimate", head, rows, "; ".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a release is asked: its kind, the columns, and how."""

    kind: str
    names: tuple[str, ...]
    values: Sequence[float] | None = None  # a number for each level
    within: Sequence[Any] | None = None  # what numbers are clipped to
    bins: int | Sequence[Any] = N_BINS
    # which edge ranges hold: `left` the lower one; None the upper one where ranges are cells
    closed: str | None = None
    q: float | Sequence[float] = 0.5
    support: Ends | None = None
    knots: Sequence[float] | None = None
    estimator: Any = None
    each: str = "person"  # what weighs the same, where rows have persons

    def put(
        self,
        answers: Any,
        *,
        values: Floats | None = None,
        ends: Ends | None = None,
        edges: Floats | None = None,
    ) -> Result:
        """Return the answer of points, counts, ranks or weighted rows, with the options as numbers."""
        first, *others = self.names
        match self.kind:
            case "mean":
                return answers.mean(first, *others, values=values, within=ends)
            case "histogram":
                return answers.histogram(first, edges)
            case "quantile":
                if isinstance(self.q, float):
                    return answers.quantile(first, self.q)
                parts = [answers.quantile(first, each) for each in self.q]
                return Result.gather(parts, pd.Index(self.q, name="q"))
            case "slope":
                return answers.slope(first, others)
            case "intercept" | "r_squared":
                return answers.line(self.kind, first, others)
        return getattr(answers, self.kind)(*self.names)  # a share, a count or a crosstab


def plot_all(found: Mapping[str, Result]) -> list[Any]:
    """Draw results side by side, each with its name above it, and return the axes."""
    columns = min(3, max(1, len(found)))
    rows = -(-len(found) // columns) or 1
    figure, axes = _import_pyplot().subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    drawn = [each.plot(ax) for each, ax in zip(found.values(), axes.flat, strict=False)]
    for name, ax in zip(found, drawn, strict=True):
        ax.set_title(f"{name}, {ax.get_title()}", fontsize=9)
        ax.set_xlabel("")
    for ax in axes.flat[len(drawn) :]:
        figure.delaxes(ax)
    return drawn


def _import_pyplot() -> Any:
    try:
        from matplotlib import pyplot as plt  # nothing else needs it
    except ModuleNotFoundError:
        what = "plots need matplotlib, which is not installed"
        raise SpecError(what, "plot", "pip install 'dpdask[plot]'") from None
    return plt


def _write(number: Any) -> str:
    """Return a number or a date for people."""
    if pd.isna(number):
        return "unknown"
    if isinstance(number, dt.date | pd.Timedelta):
        return str(number)
    return f"{number:.6g}"


def clip_to(numbers: Any, ends: tuple[Any, Any]) -> Any:
    """Return numbers or dates, none of them beyond two others; what is missing stays so."""
    if isinstance(
        numbers, pd.DataFrame
    ):  # whose own `clip` looks at labels that Python may not hold
        least, most = (np.asarray(each) for each in ends)
        return pd.DataFrame(
            np.clip(numbers.to_numpy(), least, most), numbers.index, numbers.columns
        )
    if isinstance(numbers, pd.Series):
        return numbers.clip(*ends)
    return numbers if pd.isna(numbers) else min(max(numbers, ends[0]), ends[1])


def _is_zero(bias: Any) -> bool:
    numbers = np.asarray(bias)
    return numbers.dtype.kind in "fi" and not (numbers != 0).any()


def _find_score_ends(
    estimate: Any, error: Any, n_drawn: float, whole: float, deviations: float
) -> tuple[Any, Any]:
    """Return the solutions y of (estimate - y)² = deviations² (y (whole - y) / n_drawn + noise), what the error has more than the draw being noise."""
    y = clip_to(estimate, (0.0, whole))
    # no row at all may be one that was not drawn
    least = clip_to(
        y, (min(whole / n_drawn, whole / 2.0), max(whole - whole / n_drawn, whole / 2.0))
    )
    spread = least * (whole - least)
    rate = np.minimum(1.0 / n_drawn, error**2 / spread)
    noise = error**2 - rate * spread
    own = deviations**2 * rate
    centre = y + own * whole / 2.0
    root = (centre**2 - (1.0 + own) * (y**2 - deviations**2 * noise)) ** 0.5
    return (centre - root) / (1.0 + own), (centre + root) / (1.0 + own)


def find_half(error: Any, bias: Any) -> float:
    """Return the median half-width of 95 % intervals; infinite where none is known."""
    half = np.asarray(NORMAL_95 * error + bias, float)
    return float(np.nanmedian(half)) if np.isfinite(half).any() else math.inf


def _name_nulls(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame in whose labels a missing value is written as null, of whatever type it is."""
    names, several = frame.index.names, isinstance(frame.index, pd.MultiIndex)
    columns = [list(frame.index.get_level_values(place)) for place in range(len(names))]
    if not any(pd.isna(each) for column in columns for each in column):
        return frame
    named = [["null" if pd.isna(each) else each for each in column] for column in columns]
    index = pd.MultiIndex.from_arrays(named, names=names)
    return frame.set_axis(index if several else pd.Index(named[0], name=names[0], dtype=object))
