"""What the numbers of a column stand for: dates, and the cells of a card."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.arrays import Ends, Flags, Floats, Pair, freeze_class
from dpdask.errors import SpecError
from dpdask.inference.tallies import Codes, add_up, level_codes
from dpdask.mechanisms.card import microseconds_of
from dpdask.scales import PER_SECOND, UNITS

_MOST_LEVELS = 10_000
_ROUNDING = 1e-12  # of the bounds: a number of ranges and the cells may divide them differently
_MICROSECONDS = {"D": 86_400_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}


@freeze_class
class DateScale:
    """How the dates of a column are numbers."""

    # what a number counts since 1970: D, s, ms or us; the card's bounds and edges count so too
    unit: str
    zone: Any = None

    @classmethod
    def of(cls, values: pd.Series) -> DateScale | None:
        """Return the scale of a column of dates; None if it holds none."""
        if pd.api.types.is_datetime64_any_dtype(values):
            return cls(unit="us" if values.dt.unit == "ns" else values.dt.unit, zone=values.dt.tz)
        return cls(unit="D") if pd.api.types.infer_dtype(values, skipna=True) == "date" else None

    @classmethod
    def of_card(cls, column: Mapping[str, Any], zone: Any = None) -> DateScale | None:
        """Return how a column's numbers in a card count dates; None if they are not those of dates."""
        microseconds, numbers = microseconds_of(column.get("numbers")), column.get("numbers") or ""
        zone = zone or ("UTC" if numbers.endswith(" UTC") else None)
        units = (unit for unit, n in _MICROSECONDS.items() if n == microseconds)
        return next((cls(unit=unit, zone=zone) for unit in units), None)

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
        numbers = found.astype(np.int64) / (self.microseconds / _MICROSECONDS[unit])
        return np.where(np.isnat(found), np.nan, numbers)

    def to_dates(self, numbers: Floats) -> pd.DatetimeIndex:
        """Return numbers as dates."""
        index = pd.DatetimeIndex(self._count(numbers).astype("datetime64[us]"))
        return index if self.zone is None else index.tz_localize("UTC").tz_convert(self.zone)

    @property
    def type(self) -> pa.DataType:
        """The type of the values that a condition compares."""
        return pa.date32() if self.unit == "D" else pa.timestamp("us", self.zone)

    def count(self, value: pa.Scalar) -> float:
        """Return a value of `type` as a number."""
        whole = value.cast(pa.int32() if self.unit == "D" else pa.int64()).as_py()
        return float(whole) if self.unit == "D" else float(whole / self.microseconds)

    def write(self, number: float) -> str:
        """Return a number as a date, as a condition has it."""
        date = self.to_dates(np.array([number]))[0]
        return str((date.date() if self.unit == "D" else date).isoformat())

    def to_spans(self, numbers: Floats) -> pd.TimedeltaIndex:
        """Return differences of numbers as spans of time."""
        return pd.TimedeltaIndex(self._count(numbers).astype("timedelta64[us]"))

    def to_edges(self, bins: Sequence[Any], where: str) -> Floats:
        """Return the edges of a histogram's ranges as numbers."""
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

    def _count(self, numbers: Floats) -> Codes:
        known = np.isfinite(numbers)
        micro = np.rint(np.where(known, numbers, 0.0) * self.microseconds).astype(np.int64)
        micro[~known] = np.iinfo(np.int64).min  # NaT
        return micro


@freeze_class
class ClockScale:
    """How times of a day are numbers."""

    per_second: int  # how many of them are a second

    @classmethod
    def of_card(cls, column: Mapping[str, Any]) -> ClockScale | None:
        """Return how a column's numbers in a card count times of a day; None if they are not those of times."""
        unit, _, rest = (column.get("numbers") or "").partition(" ")
        known = {name: unit for unit, name in UNITS.items()}
        if rest != "since midnight" or unit not in known:
            return None
        return cls(per_second=PER_SECOND[known[unit]])

    @property
    def type(self) -> pa.DataType:
        """The type of the values that a condition compares."""
        return pa.time64("ns")

    def count(self, value: pa.Scalar) -> float:
        """Return a time of a day as a number."""
        return float(value.cast(pa.int64()).as_py() / (10**9 // self.per_second))

    def write(self, number: float) -> str:
        """Return a number as a time of a day, as a condition has it."""
        time = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=number / self.per_second)  # noqa: DTZ001 - of no day
        return f"'{time.time().isoformat()}'"


def count_since_1970(bound: str, microseconds: int, *, last: bool) -> float:
    """Return a bound of a card of ranges, an ISO text, as a number.

    A date without a time is its last moment, or its first one.
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


def in_units(scale: DateScale | None, estimate: Any, error: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Return an estimate, its error and its bias; of dates a date and two spans of time."""
    if scale is None:
        return estimate, error, bias
    spans = (scale.to_spans(np.atleast_1d(part)) for part in (error, bias))
    found = scale.to_dates(np.atleast_1d(estimate)), *spans
    if isinstance(estimate, pd.Series):
        date, *others = found
        error, bias = (
            pd.Series(each, estimate.index) if len(each) == len(date) else each for each in others
        )
        return pd.Series(date, estimate.index), error, bias
    return found if np.ndim(estimate) else (found[0][0], found[1][0], found[2][0])


def find_ranges(x: Floats, edges: Floats) -> Codes:
    """Return in which range [edge, next edge) each number lies, the last with its upper edge; their number if in none."""
    n = len(edges) - 1
    found = np.where(x == edges[-1], n - 1, np.searchsorted(edges, x, side="right") - 1)
    return np.where((x < edges[0]) | (x > edges[-1]) | np.isnan(x), n, found).astype(np.int64)


def index_ranges(
    edges: Floats, scale: DateScale | None, name: str, closed: Literal["left", "right"] = "left"
) -> pd.IntervalIndex:
    """Return the ranges as an index."""
    breaks = edges if scale is None else scale.to_dates(edges)
    return pd.IntervalIndex.from_breaks(breaks, closed=closed, name=name)


def follow_cells(edges: Floats, column: Mapping[str, Any]) -> tuple[Floats, Floats] | None:
    """Return edges for ranges that hold their upper edge, as cells do, and the least value after each edge; None where no edge cuts a cell, or one is no end of a cell."""
    if "edges" not in column or column["bounds"] is None:
        return None
    (low, high), (least, ends) = column["bounds"], _least_values(column)
    if (edges[1:-1] <= low).any() or (edges[:-1] >= high).any():
        return None
    # the first range holds the lower bound, and the last one its upper edge in any case
    is_outer = np.zeros(len(edges), dtype=np.bool_)
    is_outer[[0, -1]] = edges[0] <= low, True
    own = np.clip(np.searchsorted(ends, edges) - 1, 0, len(least) - 1)
    if (is_outer | (least[own] >= edges)).all():
        return None  # no edge cuts a cell
    at = np.where(edges - ends[own] < ends[own + 1] - edges, own, own + 1)
    off = 0.0 if _is_whole(column) else _ROUNDING * (high - low)
    if not (is_outer | (np.abs(ends[at] - edges) <= off)).all():
        return None
    behind = least[np.minimum(at, len(least) - 1)]
    return np.where(is_outer, edges, ends[at]), np.where(is_outer, edges, behind)


def list_cells(column: Mapping[str, Any]) -> list[object]:
    """Return a value in each cell of a column of a card: its levels; or null, the atoms, and the means of the ranges by the fine counts, else the middles."""
    if "levels" in column:
        return list(column["levels"])
    least, edges = _least_values(column)
    means = np.array(column.get("means") or (least + edges[1:]) / 2.0, float)
    return [*_list_single(column), *means[_have_value(column)].tolist()]


def _list_single(column: Mapping[str, Any]) -> list[float]:
    """Return null, as NaN, and the atoms of a column with edges."""
    return [*([math.nan] if column["nulls"] == "level" else []), *map(float, column["atoms"])]


def _have_value(column: Mapping[str, Any]) -> Flags:
    """Return which ranges of a column with edges have a value: none lies between an atom and the whole number below it."""
    least, edges = _least_values(column)
    atoms = np.array(column["atoms"], float)
    return (least < edges[1:]) | ~np.isin(edges[1:], atoms)


def list_ends(column: Mapping[str, Any]) -> tuple[Floats, Floats, int, bool]:
    """Return the least and the greatest value of each cell of a column of a card, how many cells are null or an atom, and whether its values are whole numbers.

    Of levels both are their place in the list.
    """
    if "levels" in column:
        places = np.arange(len(column["levels"]), dtype=float)
        return places, places, 0, False
    (least, edges), single, here = _least_values(column), _list_single(column), _have_value(column)
    low, high = (np.append(single, ends[here]) for ends in (least, edges[1:]))
    return low, high, len(single), _is_whole(column)


def find_cells(column: Mapping[str, Any], values: pd.Series) -> Codes:
    """Return in which cell of a column of a card each of its released values lies."""
    name = str(values.name)
    if "levels" in column:
        return find_levels(values, column["levels"], name)
    x, (_, edges), here = to_numbers(values, name), _least_values(column), _have_value(column)
    single = _list_single(column)
    cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(here) - 1)
    place = len(single) + np.cumsum(here)[cell] - 1
    for number, value in enumerate(single):
        place[np.isnan(x) if math.isnan(value) else x == value] = number
    return place


def _least_values(column: Mapping[str, Any]) -> Pair:
    """Return the least value of each cell, and the edges: a cell does not hold its lower one.

    Of whole numbers the first edge lies one below the bound, and so does each edge below the least value of its cell.
    """
    edges = np.array(column["edges"], float)
    if _is_whole(column):
        return edges[:-1] + 1.0, edges
    least = np.where(np.isfinite(edges[:-1]), np.nextafter(edges[:-1], np.inf), -np.inf)
    if column["bounds"] is not None and edges[0] == column["bounds"][0]:
        least[0] = edges[0]  # which the first cell holds
    return least, edges


def _is_whole(column: Mapping[str, Any]) -> bool:
    """Return whether the cells of a column are of whole numbers: of others, the first edge is the number before the bound, or the bound."""
    return column["bounds"] is not None and column["bounds"][0] - column["edges"][0] >= 0.5


def cell_ends(column: Mapping[str, Any], values: pd.Series) -> Pair:
    """Return the least and the greatest value of the cell of each value of a column with edges; of an atom both are itself."""
    x, (least, edges) = to_numbers(values, str(values.name)), _least_values(column)
    cell = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    single = np.isnan(x) | np.isin(x, np.array(column["atoms"], float))
    low, high = np.minimum(least[cell], x), np.maximum(edges[cell + 1], x)
    return np.where(single, x, low), np.where(single, x, high)


def to_numbers(values: pd.Series, name: str) -> Floats:
    """Return a column as float64, nulls as NaN; refuse one that is not numeric."""
    scale = DateScale.of(values)
    if scale is not None:
        return scale.to_numbers(values)
    try:
        numbers: Floats = pd.to_numeric(values).to_numpy(float, na_value=np.nan)
    except (TypeError, ValueError):
        raise SpecError(
            "does not hold numbers", f"column {name!r}", "use share() or crosstab()"
        ) from None
    return numbers


def _read_numbers(values: Sequence[Any], where: str, scale: DateScale | None) -> Floats:
    """Return numbers, or those of dates; none of what is neither."""
    try:
        return np.asarray(values, float) if scale is None else scale.to_edges(values, where)
    except (TypeError, ValueError):
        return np.zeros(0)


def read_within(within: Sequence[Any], where: str, scale: DateScale | None = None) -> Ends:
    """Return the two numbers that values are clipped to."""
    found = _read_numbers(within, where, scale)
    if found.shape != (2,) or not np.isfinite(found).all() or not found[0] < found[1]:
        use = "write it as in within=(0, 100), of dates as texts or dates"
        raise SpecError("two values that increase are expected", where, use)
    return float(found[0]), float(found[1])


def read_edges(
    bins: int | Sequence[Any],
    bounds: Ends | None,
    where: str,
    scale: DateScale | None = None,
) -> Floats:
    """Return the edges of a histogram's ranges; a number of them lies between the bounds."""
    if isinstance(bins, int):
        if bins < 1 or bins is True:
            use = "write it as in bins=10, or give the edges: bins=[0, 10, 20]"
            raise SpecError("the number of ranges is at least 1", where, use)
        if bounds is None:
            what = "a number of ranges needs the bounds of the column, and none were declared"
            raise SpecError(what, where, "give the edges: bins=[0, 10, 20]")
        return np.linspace(*bounds, bins + 1)
    edges = _read_numbers(bins, where, scale)
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


def find_levels(values: pd.Series, levels: Sequence[object], name: str) -> Codes:
    """Return the place of each value among the levels; each different value is looked up once."""
    codes, found = pd.factorize(values, use_na_sentinel=False)
    return level_codes(found, levels, name)[codes]


def without_levels(name: str) -> SpecError:
    """Return the refusal of a question about levels of a column that has none."""
    what, use = "it holds numbers, without levels", "use histogram(), mean() or quantile()"
    return SpecError(what, f"column {name!r}", use)


def list_values(column: pd.Series) -> Sequence[object] | None:
    """Return the different values of a kept column; None if there are too many."""
    found = column.unique()
    if len(found) > _MOST_LEVELS:
        return None
    values = sorted(found[pd.notna(found)].tolist())
    return [*([None] if column.hasnans else []), *values]


@freeze_class(eq=False)
class NoisyCells:
    """The cells that noise was added to, as far as they matter for some columns."""

    frame: pd.DataFrame  # a point of each cell
    variance: float  # of the noise of one, as a share of the rows
    sizes: Floats | None = None  # how many cells each point stands for; None: one each

    def add(self, chosen: Codes, n: int, values: Floats | float = 1.0) -> Floats:
        """Return the sum of values over the cells of each of n groups; cells of another are in none."""
        weights = np.ones(len(self.frame)) if self.sizes is None else self.sizes
        inside = chosen < n
        return add_up((weights * values)[inside], chosen[inside], n)

    @property
    def n_cells(self) -> float:
        """How many there are."""
        return float(len(self.frame) if self.sizes is None else self.sizes.sum())

    def add_squares(self, numbers: Floats, chosen: Codes, centre: Floats, is_few: Flags) -> Floats:
        """Return the sum of the squared distances of each group's cells from its centre.

        Groups of few rows have the largest one for any centre, as their own may be far from the
        true mean (Fieller 1954: the noise of A - m B is that at the true ratio m).
        """
        here = np.isfinite(numbers)
        found = self.add(chosen, len(centre), np.where(here, numbers - centre[chosen], 0.0) ** 2)
        for end in (numbers[here].min(), numbers[here].max()) if is_few.any() else ():
            most = self.add(chosen, len(centre), np.where(here, numbers - end, 0.0) ** 2)
            found = np.where(is_few, np.maximum(found, most), found)
        return found


@freeze_class(eq=False)
class HeldOut:
    """How the draw of held-out rows moves averages of released values: only as far as the channel changes values."""

    n_rows: float  # that were held out
    code: Codes  # the outcome of each point
    channel: Floats  # the probabilities of the outcomes, given the own one

    def move(self, weights: Floats, codes: Codes, n: int, x: Floats) -> Floats:
        """Return var(f - T f) / var f for n functions: function k is x where the code is k, and 0 elsewhere.

        Notes
        -----
        P is the distribution of the rows, Q that of the held-out rows, and T the channel, with Q T =
        Q. Released rows have the distribution P T, so their average of f is off by (Q - P)(f - T f).
        What f varies inside an outcome counts in full.
        """
        s, flat = len(self.channel), self.code * (n + 1) + np.minimum(codes, n)
        sizes = add_up(weights, self.code, s)[:, None] / weights.sum()
        sums, squares = (
            add_up(weights * part, flat, s * (n + 1)).reshape(s, n + 1)[:, :n] / weights.sum()
            for part in (x, x**2)
        )
        means = sums / np.where(sizes > 0.0, sizes, 1.0)
        inside = (squares - sums * means).sum(axis=0)
        moved = means - self.channel @ means
        moved = inside + (sizes * (moved - (sizes * moved).sum(axis=0)) ** 2).sum(axis=0)
        every = squares.sum(axis=0) - sums.sum(axis=0) ** 2
        return np.where(every > 0.0, moved / np.where(every > 0.0, every, 1.0), 1.0)
