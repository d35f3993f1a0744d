"""A part of a release's rows, in groups: conditions and groups become one column, by which the questions that there are answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.results import NO_ERROR, Result
from dpdask.analysis.values import (
    ClockScale,
    DateScale,
    find_levels,
    list_values,
    to_numbers,
    without_levels,
)
from dpdask.arrays import Ends, Flags, Pair
from dpdask.errors import SpecError
from dpdask.inference.tallies import Codes
from dpdask.rules import ColumnTest, TypedColumn, read_condition

_BY_MEANS = "computed from slopes and means, whose errors are assumed to add up, so the interval is wider than needed"
_PLAIN = "computed from the released rows as they are, with an unknown error: {}"
_EVERY = "every level meets the condition: this is the number of rows, which is public"
_REST = "-"  # the code of rows that the condition leaves out
_MOST_GROUPS = 10_000
_MOST_ALTERNATIVES = 1_000
Alternatives = tuple[tuple[ColumnTest, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Derived:
    """A column that is made of others: the group of each row."""

    names: tuple[str, ...]  # of the columns that it is made of
    alternatives: Alternatives  # of the condition; none if all rows count
    types: Mapping[str, TypedColumn]
    groups: Mapping[str, Sequence[Any]]  # by column that makes groups, its levels
    cells: Mapping[str, Mapping[str, Any]]  # what the card says of those with edges
    scales: Mapping[str, Any]  # how the numbers of private columns count dates and times of a day

    @property
    def labels(self) -> list[str]:
        """The codes: of all groups, and of the rows that are left out."""
        n = math.prod(len(levels) for levels in self.groups.values())
        return [*([_REST] if self.alternatives else []), *(f"{place:06d}" for place in range(n))]

    def label(self, code: str) -> tuple[Any, ...]:
        """Return the levels of a group."""
        shape = [len(levels) for levels in self.groups.values()]
        places = np.unravel_index(int(code), shape)
        return tuple(levels[int(k)] for levels, k in zip(self.groups.values(), places, strict=True))

    def of_rows(self, rows: pd.DataFrame) -> Any:
        """Return the code of each released row."""

        def meet(each: ColumnTest) -> Flags:
            name, values = each.column, rows[each.column]
            scale = DateScale.of_card(self.cells[name])
            if scale is not None and self.cells[name]["role"] != "kept":
                values = scale.to_numbers(values)
            array = pa.array(values, self.types[name].type, from_pandas=True)
            return each.meet(array)

        return self._code(rows, meet)

    def of_cells(self, frame: pd.DataFrame, ends: Mapping[str, Pair]) -> Any:
        """Return the code of each cell; refuse a condition that cuts one, by their ends."""

        def meet(each: ColumnTest) -> Flags:
            name = each.column
            levels = self.types[name].levels
            if levels is not None:
                return each.meet(levels)[find_levels(frame[name], levels.to_pylist(), name)]
            x = to_numbers(frame[name], name)
            of_low, of_high = (
                each.meet(pa.array(end, pa.float64(), from_pandas=True))
                for end in ends.get(name, (x, x))
            )
            is_cut = (of_low != of_high).any() or (each.sign in ("=", "!=") and name in ends)
            if is_cut:
                edges = np.array(self.cells[name]["edges"][1:-1])
                asked = [float(value.as_py()) for value in each.values]
                near = sorted({float(edges[np.abs(edges - x).argmin()]) for x in asked})
                what = (
                    "the condition cuts a cell, and the places of rows inside a cell are not known"
                )
                use = f"compare with an edge of its cells, as {' or '.join(self._name_edge(name, edge) for edge in near)}"
                raise SpecError(what, f"`where`, column {name!r}", use)
            return of_low

        return self._code(frame, meet)

    def _name_edge(self, name: str, edge: float) -> str:
        """Return a condition that cuts no cell at an edge: the greatest value of a cell, or the number before the least one of the next."""
        scale = self.scales[name]
        if scale is not None:
            return f"`> {scale.write(edge)}`"
        after = float(np.nextafter(edge, np.inf)) + 0.0  # of no negative zero
        return f"`>= {after}`" if len(str(after)) < len(str(edge)) else f"`> {edge}`"

    def _code(self, frame: pd.DataFrame, meet: Callable[[ColumnTest], Flags]) -> Any:
        place: Codes = np.zeros(len(frame), dtype=np.int64)
        for name, levels in self.groups.items():
            place = place * len(levels) + find_levels(frame[name], levels, name)
        found = np.char.zfill(place.astype(str), 6).astype(object)
        if self.alternatives:
            parts = (reduce(and_, map(meet, together)) for together in self.alternatives)
            found[~reduce(or_, parts)] = _REST
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """Rows of a release that meet conditions, in groups; `count`, `mean` and `sum` answer as the questions of the release do.

    Attributes
    ----------
    opened
        The release.
    conditions
        Texts that all hold.
    groups
        The columns that make the groups.
    """

    opened: Any  # an `OpenedRelease`, whose module imports this one
    conditions: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def where(self, condition: str) -> Subset:
        """Return those of the rows that also meet a condition."""
        return replace(self, conditions=(*self.conditions, condition))

    def groupby(self, columns: str | Sequence[str]) -> Subset:
        """Return the rows in groups of the levels of columns."""
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if len(set(names)) < len(names) or not names:
            raise SpecError("one column or more are expected, each once", "groupby", "name them")
        return replace(self, groups=names)

    def count(self, *, approximate: bool = False) -> Result:
        """Return how many rows there are, in each group.

        Parameters
        ----------
        approximate
            Whether a plain answer of released rows will do, with no error, where there is no other.

        Raises
        ------
        SpecError
            If the release does not answer, with the reason.
        """
        return self._or_plain(self._count, lambda rows: rows.size(), approximate=approximate)

    def mean(
        self,
        column: str,
        *,
        values: Sequence[float] | None = None,
        within: Sequence[Any] | None = None,
        approximate: bool = False,
    ) -> Result:
        """Return the mean of a column, in each group.

        Parameters
        ----------
        column, values, within
            As for `OpenedRelease.mean`.
        approximate
            As for `count`.
        """
        is_usual = values is None and within is None
        return self._or_plain(
            lambda: self._mean(column, values, within),
            lambda rows: rows[column].mean(),
            [column],
            approximate=approximate and is_usual,
        )

    def sum(
        self, column: str, *, within: Sequence[Any] | None = None, approximate: bool = False
    ) -> Result:
        """Return the sum of a column of numbers, in each group.

        Parameters
        ----------
        column, within, approximate
            As for `mean`.
        """

        def find() -> Result:
            if self.opened._is_of_dates(column):
                raise SpecError("dates have no sum", f"column {column!r}", "use mean()")
            mean, known = self._mean(column, None, within), self
            may_lack = self._may_lack(column)
            if may_lack:
                known = self.where(f"`{column}` is not null")
            try:
                rows = known._count()
            except SpecError:
                if not may_lack:
                    raise
                what = "a sum is the mean times the number of rows with a value, which is not told"
                raise SpecError(what, f"sum({column})", "use mean()") from None
            return _multiply(mean, rows, independent=not self.opened.joins_private)

        allowed = approximate and within is None
        return self._or_plain(find, lambda rows: rows[column].sum(), [column], approximate=allowed)

    def __repr__(self) -> str:
        where = f" where {' and '.join(self.conditions)}" if self.conditions else ""
        by = f" by {', '.join(self.groups)}" if self.groups else ""
        return f"Subset({self.opened!r}:{where}{by})"

    # ---- how it is asked

    def _may_lack(self, name: str) -> bool:
        column = self.opened._column(name)
        if column["role"] == "kept":
            return bool(self.opened._read([name])[name].isna().any())
        return column.get("nulls") == "level" or None in (self.opened._levels(name) or ())

    def _told(self, name: str) -> TypedColumn:
        opened, levels = self.opened, self.opened._levels(name)
        if levels is not None:
            array = pa.array(levels)
            return TypedColumn(array.type, array)
        if opened._is_kept(name):
            return TypedColumn(opened._types.field(name).type)
        return TypedColumn(pa.float64())

    def _scale(self, name: str) -> DateScale | ClockScale | None:
        """Return how the dates or the times of a day of a private column are compared as numbers."""
        opened = self.opened
        if opened._is_kept(name) or opened._levels(name) is not None:
            return None
        return ClockScale.of_card(opened._column(name)) or opened._scale(name)

    def _read(self, text: str, told: Mapping[str, TypedColumn]) -> Alternatives:
        """Return the alternatives of a condition; dates and times of a day of private columns as their numbers."""
        scales = {name: scale for name in told if (scale := self._scale(name)) is not None}
        types = {name: TypedColumn(scale.type) for name, scale in scales.items()}

        def count(test: ColumnTest) -> ColumnTest:
            if test.column not in scales or not test.values:
                return test
            numbers = map(scales[test.column].count, test.values)
            return replace(test, values=tuple(map(pa.scalar, numbers)))

        found = read_condition(text, {**told, **types})
        return tuple(tuple(map(count, together)) for together in found)

    def _parse(self) -> tuple[Alternatives, dict[str, TypedColumn]]:
        """Return all conditions as one: alternatives of each are joined with those of the others."""
        opened = self.opened
        names = [each for each in opened.content["columns"] if not opened._is_computed(each)]
        told = {
            each: self._told(each)
            for each in names
            if opened._is_kept(each) <= (each in opened._types.names)
        }
        parts = [self._read(each, told) for each in self.conditions]
        n = math.prod(map(len, parts))
        if n > _MOST_ALTERNATIVES:
            what = f"the conditions have {n:,} alternatives together; the limit is {_MOST_ALTERNATIVES:,}"
            raise SpecError(what, "`where`", "use fewer `or`s, or `in (…)` in their place")
        joined = tuple(
            tuple(itertools.chain.from_iterable(each)) for each in itertools.product(*parts)
        )
        return (joined if parts else ()), told

    def _view(
        self, alternatives: Alternatives, groups: Sequence[str], *, is_plain: bool = False
    ) -> tuple[Any, str]:
        """Return the release with a column of the groups, and its name."""
        opened = self.opened
        names = tuple(dict.fromkeys([*groups, *_named(alternatives)]))
        if not (is_plain or opened.joins_private or opened._is_kept(*names)):
            what = "the noise of a column would decide which rows are selected"
            use = "use kept columns in conditions and groups, or count(), crosstab() or slope()"
            raise SpecError(what, ", ".join(names), use)
        levels: dict[str, Sequence[Any]] = {}
        for name in groups:
            found = opened._levels(name)
            if found is None and opened._is_kept(name):
                found = list_values(opened._read([name])[name])
            if found is None:
                raise without_levels(name)
            levels[name] = list(found)
        n_groups = math.prod(map(len, levels.values()))
        if n_groups > _MOST_GROUPS:
            what = f"there are {n_groups:,} groups; the limit is {_MOST_GROUPS:,}"
            raise SpecError(what, "groupby", "group by fewer columns")
        derived = Derived(
            names=names or (opened._types.names[0],),
            alternatives=alternatives,
            types={name: self._told(name) for name in _named(alternatives)},
            groups=levels,
            cells=opened.content["columns"],
            scales={name: self._scale(name) for name in _named(alternatives)},
        )
        label = f"{' and '.join(self.conditions) or 'rows'} by {', '.join(groups) or 'nothing'}"
        columns = {**opened.content["columns"], label: {"role": "kept"}}
        content = {**opened.content, "columns": columns}
        return replace(opened, content=content, derived={label: derived}), label

    def _label(self, found: Result, derived: Derived) -> Result:
        """Return a result by code as one by the levels of the groups, those alone that were asked for."""

        def change(part: Any) -> Any:
            part = part[part.index != _REST]
            if not derived.groups:
                return part.iloc[0] if len(part) else math.nan
            labels = [derived.label(code) for code in part.index]
            return part.set_axis(_index(labels, list(derived.groups)))

        told = found.change(change)
        if not derived.groups and pd.isna(told.estimate):
            what, use = "no released row meets the condition", "ask about other rows"
            raise SpecError(what, "`where`", use)
        return told

    def _mean(
        self, column: str, values: Sequence[float] | None, within: Sequence[Any] | None
    ) -> Result:
        opened, (alternatives, told), groups = self.opened, self._parse(), self.groups
        if column in groups:
            raise SpecError("a column is named twice", "mean", "group by another column")
        own, others = _split(alternatives, column)
        if own and not opened._is_kept(column):
            levels = told[column].levels
            if levels is None or len(alternatives) > 1:
                what = "a condition on the averaged column needs levels, and no `or`"
                raise SpecError(what, f"column {column!r}", "use mean(…, within=(low, high))")
            numbers = opened._level_values(column, values, within)
            met = reduce(and_, (each.meet(levels) for each in own))
            values, within = np.where(met, numbers, np.nan).tolist(), None
            alternatives = others
        if not alternatives and len(groups) < 2:
            return opened.mean(column, by=next(iter(groups), None), values=values, within=within)
        view, label = self._view(alternatives, groups)
        found = view.mean(column, by=label, values=values, within=within)
        return self._label(found, view.derived[label])

    def _count(self) -> Result:
        opened, (alternatives, told) = self.opened, self._parse()
        named = list(dict.fromkeys([*self.groups, *_named(alternatives)]))
        private = opened._list_private(named)
        if len(named) == 1 and private and opened._levels(private[0]) is None:
            return self._count_range(private[0], alternatives)
        if private and not opened.joins_private:
            return self._count_randomised(private, alternatives, told)
        if private and len(named) == 1 and opened._is_counted:
            n_rows = float(opened.content["n_rows"]["value"])
            return self._count_levels(
                private[0], _meet(alternatives, told[private[0]].levels), n_rows
            )
        view, label = self._view(alternatives, self.groups)
        return self._label(view._ask("count", label), view.derived[label])

    def _count_levels(self, name: str, met: Flags, n_rows: float) -> Result:
        """Return counts of the levels of one column by its share, which more than their own table may tell."""
        if not met.any():
            raise SpecError("no row can meet it", "`where`", f"see the levels of {name!r}")
        if not self.groups:
            share = self.opened.mean(name, values=met.astype(float).tolist())
            found = Result.gather([share], pd.Index([0])).change(lambda part: n_rows * part.iloc[0])
            if not met.all():
                return replace(found, possible=(0.0, n_rows))
            return replace(
                found,
                estimate=n_rows,
                standard_error=None,
                bias_bound=0.0,
                find_ends=lambda _: (n_rows, n_rows),
                limits=(*found.limits, _EVERY),
            )
        found = self.opened.share(name)
        counts = found.change(lambda part: n_rows * part[met])
        drawn = found.drawn and (found.drawn[0], n_rows)
        return replace(counts, drawn=drawn, possible=(0.0, n_rows))

    def _count_range(self, name: str, alternatives: Alternatives) -> Result:
        """Return the number of rows in one range of a column of numbers."""
        bounds, scale = self.opened._column(name).get("bounds"), self._scale(name)
        signs = {"<", "<=", ">", ">=", *(["="] if scale is not None else [])}
        is_range = len(alternatives) == 1 and all(
            each.sign in signs and not each.is_not and len(each.values) == 1
            for each in alternatives[0]
        )
        if not is_range or bounds is None or self.opened._column(name).get("released_as"):
            what = "numbers are counted in one range within declared bounds only, and only if their values are released"
            use = "compare by <, <=, > and >=, or use histogram()"
            raise SpecError(what, f"column {name!r}", use)
        low, high = map(float, bounds)
        start, end = low, math.inf
        for each in alternatives[0]:
            value = float(each.values[0].as_py())
            # ranges hold their lower edge; dates and times are whole numbers
            at, after = value, float(np.nextafter(value, np.inf))
            if scale is not None:
                at, after = float(np.ceil(value)), float(np.floor(value)) + 1.0
            if each.sign != "<" and each.sign != "<=":
                start = max(start, after if each.sign == ">" else at)
            if each.sign != ">" and each.sign != ">=":
                end = min(end, at if each.sign == "<" else after)
        if start > high or end <= low:
            raise SpecError("no row can meet it", "`where`", "see the bounds of the column")
        if start >= end:
            raise SpecError("no row can meet it", "`where`", "its parts exclude each other")
        if start == high or end == high:
            what = "rows at the upper bound are not told apart from those below it"
            raise SpecError(what, "`where`", "ask about a range below the bound, or up to it by <=")
        edges = sorted({low, high, *(edge for edge in (start, end) if low < edge < high)})
        bins = scale.to_dates(np.array(edges)) if isinstance(scale, DateScale) else edges
        found = self.opened._ask("histogram", name, bins=bins, closed="left")
        place = edges.index(start)
        return found.change(lambda part: part.iloc[place])

    def _count_randomised(
        self, private: list[str], alternatives: Alternatives, told: Mapping[str, TypedColumn]
    ) -> Result:
        """Return counts of a column of levels with noise of its own, in groups of kept columns."""
        opened, name = self.opened, private[0]
        if set(self.groups) == set(private) and len(private) == 2 and not alternatives:
            labels = [list(opened._levels(each) or ()) for each in self.groups]
            rows = list(itertools.product(*labels))
            return opened.crosstab(*self.groups).change(lambda part: self._flatten(part, rows))
        own, others = _split(alternatives, name)
        levels = told[name].levels
        if len(private) > 1 or levels is None or (own and len(alternatives) > 1):
            what = "several randomised columns, a randomised number beside other columns, or an `or` with one cannot be counted together"
            use = "use one column of levels, beside kept ones"
            raise SpecError(what, ", ".join(private), use)
        view, label = self._view(others, [each for each in self.groups if each != name])
        derived = view.derived[label]
        met = _meet((own,), levels)
        is_grouped = name in self.groups
        if len(derived.labels) == 1:  # all rows, whose number is public
            rows = view._ask("count", label)
            found = self._count_levels(name, met, float(rows.estimate.iloc[0]))
            return replace(found, limits=tuple(dict.fromkeys((*found.limits, *rows.limits))))
        if not is_grouped:
            values = met.astype(float).tolist()
            answer, rows = view.mean(name, by=label, values=values), view._ask("count", label)
            found = _multiply(answer, rows, independent=True)
            return self._label(replace(found, possible=(0.0, math.inf)), derived)

        def change(table: Any) -> Any:
            table = table.loc[table.index != _REST].loc[:, met]
            places = {each: k for k, each in enumerate([*derived.groups, name])}
            rows = [(*derived.label(code), level) for code in table.index for level in table]
            return self._flatten(
                table, [tuple(row[places[g]] for g in self.groups) for row in rows]
            )

        return view.crosstab(label, name).change(change)

    def _flatten(self, table: Any, labels: Sequence[tuple[Any, ...]]) -> pd.Series:
        return pd.Series(np.asarray(table).ravel(), _index(labels, self.groups))

    def _or_plain(
        self,
        find: Callable[[], Result],
        plain: Callable[[Any], pd.Series],
        columns: Sequence[str] = (),
        *,
        approximate: bool,
    ) -> Result:
        """Return an answer; or, if the caller allows it and there is none, the plain one of released rows."""
        try:
            return find()
        except SpecError as refusal:
            told = set(columns) <= set(self.opened._types.names)
            if not (approximate and told and self.opened.holds_rows):
                raise
            view, label = self._view(self._parse()[0], self.groups, is_plain=True)
            rows = view._read_rows([label, *columns])
            limits = (_PLAIN.format(refusal.what),)
            estimate = plain(rows.groupby(label))
            found = Result(estimate=estimate, standard_error=None, bias_bound=None, limits=limits)
            return self._label(found, view.derived[label])


def _index(labels: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pd.Index:
    if len(names) == 1:
        return pd.Index([each[0] for each in labels], name=names[0])
    return pd.MultiIndex.from_tuples(labels, names=list(names))


def _meet(alternatives: Alternatives, levels: Any) -> Flags:
    """Return which levels meet the conditions, which are of their column alone."""
    every = np.ones(len(levels), bool)
    parts = [reduce(and_, (each.meet(levels) for each in one), every) for one in alternatives]
    return reduce(or_, parts) if parts else every


def _split(alternatives: Alternatives, name: str) -> tuple[tuple[ColumnTest, ...], Alternatives]:
    """Return the tests of one column, and the alternatives without them, where there is one."""
    own = tuple(each for one in alternatives for each in one if each.column == name)
    rest = tuple(each for each in alternatives[0] if each.column != name) if own else ()
    return own, ((rest,) if rest else ()) if own else alternatives


def _named(alternatives: Alternatives) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.column for one in alternatives for each in one))


def _multiply(mean: Result, rows: Result, *, independent: bool) -> Result:
    """Return means times numbers of rows; the errors of dependent ones add up at worst."""
    m, n = mean.estimate, rows.estimate
    # of units with weights, the rows and the values of a unit go together
    estimate, add = m * n, np.hypot if independent and not mean.of_table else np.add
    known = not mean._why_no_interval and not rows._why_no_interval

    def find_ends(deviations: float) -> tuple[Any, Any]:
        (m_low, m_high), (n_low, n_high) = mean.reach(deviations), rows.reach(deviations)
        of_rows = abs(m) * (n_high - n_low) / 2.0
        return estimate - add(n * (m - m_low), of_rows), estimate + add(n * (m_high - m), of_rows)

    error = None
    if add is np.hypot and known and mean.standard_error is not None:
        doubt = 0.0 if rows.standard_error is None else rows.standard_error  # of an exact number
        error = np.hypot(n * mean.standard_error, m * doubt)
    bias = None
    if mean.bias_bound is not None and rows.bias_bound is not None:
        bias = n * mean.bias_bound + (abs(m) + mean.bias_bound) * rows.bias_bound
    possible = None
    if mean.possible is not None:  # the sum has the sign of a mean that has one
        least, most = np.min(mean.possible[0]), np.max(mean.possible[1])
        possible = (0.0 if least >= 0 else -math.inf, 0.0 if most <= 0 else math.inf)
    return Result(
        estimate=estimate,
        standard_error=error,
        bias_bound=bias,
        limits=tuple(dict.fromkeys((*mean.limits, *rows.limits))),
        possible=possible,
        find_ends=find_ends if known else None,
        of_table=mean.of_table and rows.of_table,
    )


def intercept_by_means(opened: Any, response: str, features: Sequence[str]) -> Result:
    """Return the intercept of a regression by its slopes and the means: the ends are as far as all may be off together."""
    slopes = opened.slope(response, *features)
    means = {name: opened.mean(name) for name in (response, *features)}
    if any(Subset(opened=opened)._may_lack(name) for name in means):
        what = "slopes and means leave out different rows where values are missing"
        raise SpecError(what, f"intercept({response}, …)", "use slope() and mean()")
    parts = [slopes, *means.values()]
    of_x = {name: float(means[name].estimate) for name in features}
    b = slopes.estimate
    value = float(means[response].estimate) - sum(b[name] * x for name, x in of_x.items())

    def add(spread: Callable[[Result], Any]) -> float:
        of_slopes = spread(slopes)
        total = float(spread(means[response]))
        for name, x in of_x.items():
            total += abs(x) * float(of_slopes[name]) + abs(b[name]) * float(spread(means[name]))
        return total

    def find_ends(deviations: float) -> Ends:
        def half(part: Result) -> Any:
            low, high = part.reach(deviations)
            return np.maximum(part.estimate - low, high - part.estimate)

        return value - add(half), value + add(half)

    def bound(part: Result) -> Any:
        bias = part.bias_bound
        return pd.Series(bias, b.index) if part is slopes and np.ndim(bias) == 0 else bias

    is_known = all(part.bias_bound is not None for part in parts)
    limits = itertools.chain([_BY_MEANS], *(part.limits for part in parts))
    return Result(
        estimate=value,
        standard_error=None,
        bias_bound=add(bound) if is_known else None,
        limits=tuple(dict.fromkeys(limits)),
        find_ends=find_ends if all(part._why_no_interval != NO_ERROR for part in parts) else None,
    )
