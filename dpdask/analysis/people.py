"""Opened releases of synthetic persons with their rows: two tables that a key joins, and answers from the noisy tables of persons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from scipy import sparse

from dpdask.analysis.measured import WITHOUT_NULLS, average_tables
from dpdask.analysis.opened_points import OpenedPoints
from dpdask.analysis.results import Query, Result
from dpdask.analysis.values import find_cells, in_units, list_ends
from dpdask.arrays import Flags, Floats, Pair
from dpdask.engine.lazy import read_frame, read_shards
from dpdask.engine.source import Frame
from dpdask.errors import SpecError
from dpdask.inference.measured import MeasuredColumn
from dpdask.references.counts import BY_BAND, NUMBERS, PAIRS, label_table
from dpdask.stats.people import LATTICE, make_edges

Each = Literal["person", "row"]

_DRAWN = "standard errors hold the noise of the tables, and the draw of the persons, who are taken to differ as the synthetic ones do"
_ALIKE = "each person with rows weighs the same, however many it has; `each='row'` has the mean and the shares of rows"
_OF_ROWS = "numbers of rows were counted in bands: the bound on the bias is for persons who have more rows than others of their band"
_OF_PAIRS = "of persons with two rows or more, each of whom weighs the same"
_IN_CELLS = "numbers were cut into cells: the bound on the bias is for any place of them in theirs"
_NO_GROUP = "groups whose persons cannot be told from the noise have no estimate"
_SURE = (
    4.0  # standard deviations of its noise that a number of persons has at least to divide by it
)
_NO_TABLE, _BESIDE = (
    "no noisy table of it is beside this release",
    "use join(), whose errors are unknown",
)
_NO_ONE = "the tables are of two columns, and no error of what the synthetic rows show beyond these is known"
_LARGER = "release with a larger epsilon"


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonColumn(MeasuredColumn):
    """The noisy counts of cells of rows, in which each person weighs 1: what the draw of persons adds is told by the synthetic ones."""

    shares: (
        Any  # sparse, of shape (n_persons, n_cells): of the rows of each synthetic person with rows
    )

    @property
    def _scale(self) -> float:
        return max(self.total, 1.0) / max(self.shares.shape[0], 1)

    def draw_sum(self, weights: Floats) -> float:
        """Return the variance that the draw of the persons gives a weighted sum of the counts, about 0."""
        return self._scale * float(np.square(self.shares @ weights).sum())

    def draw_count(self, weights: Floats, n: float, share: float) -> float:
        """Return the variance that the draw of n persons gives a sum of their parts in some cells."""
        least = 1.0 - 1.0 / n if n > 2.0 else 0.5  # no person may be one who was not drawn
        return max(self.draw_sum(weights) - n * share**2, least)

    def draw_ranks(self, p: float, rows: float) -> Floats:
        """Return the variance of the parts up to each of the cells in order, less p of all with a value."""
        del rows
        square, order = (self.shares.T @ self.shares).toarray(), self.ordered
        up_to = square[np.ix_(order, order)].cumsum(axis=0).cumsum(axis=1)
        found: Floats = np.diagonal(up_to) - 2.0 * p * up_to[:, -1] + p * p * up_to[-1, -1]
        return np.maximum(self._scale * found, 0.0)

    @property
    def draw_cells(self) -> Floats:
        """The variance that the draw of the persons gives the count of each cell, of at least one person."""
        squares = np.asarray(self.shares.power(2).sum(axis=0)).ravel()
        return np.maximum(self._scale * squares - self.counts**2 / max(self.total, 1.0), 1.0)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenedPersons(OpenedPoints):
    """Synthetic persons and their rows. Questions are answered from the noisy tables, in which each person weighs 1."""

    person_shards: tuple[str, ...]
    """The names of the shards of persons."""

    refusals: ClassVar[Any] = {
        "slope": (_NO_ONE, "use crosstab(), or mean() with `by`"),
        "npmle": ("the release holds values, not ranges", "use share(), histogram() or quantile()"),
        "regress": ("the release holds values, not ranges", "use crosstab(), or mean() with `by`"),
        "fit": (_NO_ONE, "use join(), whose errors are unknown"),
        **dict.fromkeys(("count", "intercept", "r_squared"), (_NO_ONE, "use crosstab() or mean()")),
    }

    @property
    def key(self) -> str:
        """The column that names a person in both tables."""
        return self._told["unit"]

    def persons(self) -> pd.DataFrame:
        """Return the persons, a row each: the key and the columns of persons."""
        return read_shards(self.folder, self.person_shards, None)

    def rows(self) -> pd.DataFrame:
        """Return the rows of all persons: the key and the columns of rows."""
        return self.to_pandas()

    def join(self) -> pd.DataFrame:
        """Return the rows with the columns of their persons; persons without rows are left out."""
        return self.rows().merge(self.persons(), on=self.key, how="left", validate="many_to_one")

    def to_dask(self, table: str = "rows") -> Frame:
        """Return the `rows`, or the `persons`, as a lazy Dask frame, with a partition for each shard."""
        if table not in ("rows", "persons"):
            what = "the tables are `rows` and `persons`"
            raise SpecError(what, f"to_dask, table {table!r}", "name one of them")
        return read_frame(self.folder, self.shards if table == "rows" else self.person_shards)

    def person_means(self, column: str) -> pd.Series:
        """Return the mean of a column of numbers over the rows of each synthetic person, by the key; it has no standard error.

        Parameters
        ----------
        column
            A column of rows with numbers.
        """
        self._check_numbers("person_means", column)
        rows = self._read_rows([self.key, column])
        return rows.groupby(self.key)[column].mean()

    def mean(
        self,
        column: str,
        *,
        by: str | None = None,
        values: Sequence[float] | None = None,
        within: Sequence[Any] | None = None,
        each: Each = "person",
    ) -> Result:
        """Return the mean of a column, or its mean in each group of another column.

        Parameters
        ----------
        column, by, values, within
            As for other releases. Groups by a column of rows hold a person with the part of its rows that is in them.
        each
            What weighs the same: each `person`, which has the mean of its own rows, or each `row`, of a column of rows and without `by`.
        """
        options = {"values": values, "within": within}
        return self._ask("mean", column, *([] if by is None else [by]), each=each, **options)

    def share(self, column: str, *, by: str | None = None, each: Each = "person") -> Result:
        """Return the share of each level of a column, a Series.

        Parameters
        ----------
        column
            A column of levels.
        by
            Not offered: `crosstab` counts the levels in each group.
        each
            As for `mean`.
        """
        if by is not None:
            raise self._no_groups("share", column, by)
        return self._ask("share", column, each=each)

    def variance_between(self, column: str, *, values: Sequence[float] | None = None) -> Result:
        """Return the variance between persons of a column of rows: the covariance of two different rows of one person.

        It is that of the persons' own expected values, without what their rows vary around these. Below 0, rows of a person are less
        alike than those of others. Persons with two rows or more weigh the same.

        Parameters
        ----------
        column
            A column of rows with numbers.
        values
            A number for each level, as for `mean`.
        """
        return self._ask("variance_between", column, values=values)

    # ---- how a question finds its answer

    def _plan(self, asked: Query) -> Callable[[], Any]:
        if asked.each not in ("person", "row"):
            what = f"`each` is 'person' or 'row', and not {asked.each!r}"
            raise SpecError(what, asked.kind, "give one of them")
        is_variance = asked.kind == "variance_between"
        if asked.kind == "slope":
            raise self._refusal(asked.kind, *asked.names)
        if not is_variance and asked.each == "person":
            found = super()._plan(asked)
            if not self._measured:
                raise SpecError(_NO_TABLE, asked.kind, _BESIDE)
            of_table = self._are_of_persons(*asked.names)
            return lambda: replace(found(), of_table=of_table)
        first, *others = asked.names
        if others:
            use = "leave `by` out, or let each person weigh the same"
            raise SpecError(_NO_ONE, f"{asked.kind}({first}, by={others[0]}, each='row')", use)
        if first not in self._told["children"]:
            self._column(first)
            raise SpecError("is no column of rows", f"column {first!r}", "see `.columns`")
        if asked.kind == "share" and self._levels(first) is None:
            super()._plan(asked)  # which refuses it
        values = (
            None if asked.kind == "share" else self._level_values(first, asked.values, asked.within)
        )
        if self._is_of_dates(first):
            what = "it holds dates, which are averaged by persons"
            raise SpecError(what, f"column {first!r}", "leave `each` out")
        if is_variance:
            return lambda: self._vary_between(first, values)
        return lambda: self._ask_rows(asked, values)

    @property
    def _told(self) -> Mapping[str, Any]:
        return self.content["mechanism"]["persons"]

    @property
    def _n_counted(self) -> float | None:
        """How many persons there are, where that is public."""
        return self._told["n_persons"] if self._told["exact"] else None

    def _are_of_persons(self, *names: str) -> bool:
        return all(name in self._told["parents"] for name in names)

    def _limits_of_units(self) -> tuple[str, ...]:
        return ()

    def _check_numbers(self, question: str, column: str) -> None:
        self._column(column)
        if column not in self._told["children"] or not self._has_numbers(column):
            what = "is no column of numbers of the rows"
            raise SpecError(what, f"{question}, column {column!r}", "see `.columns`")

    def _ends(self, name: str) -> Pair:
        return list_ends(self._column(name))[:2]

    def _find_table(
        self, names: Sequence[str], shape: tuple[int, ...], end: str = ""
    ) -> tuple[Floats, float] | None:
        """Return a noisy table in whole persons, and the standard deviation of its noise; None if it was not drawn."""
        rows = self._measured.get(label_table(*names) + end)
        if rows is None:
            return None
        with self._check_counts():
            counts = rows["count"].to_numpy().astype(float).reshape(shape)
        whole = 1 if self._are_of_persons(*names) else LATTICE
        return counts / whole, float(rows["standard_deviation"][0].as_py()) / whole

    def _by_band(self, name: str) -> tuple[Floats, float] | None:
        """Return the counts of a column's cells by the band of the number of rows, those of nobody left out."""
        shape = len(self._ends(name)[0]), len(self._told["bands"])
        found = self._find_table((name,), shape, BY_BAND)
        if found is None or (self._are_of_persons(name) and self._has_empty):
            return found
        return found[0][:, 1:], found[1]

    @property
    def _has_empty(self) -> bool:
        """Whether a person may have no rows: not where persons are known by theirs alone."""
        return bool(self._told["empty"])

    def _read_counts(self, name: str, n_rows: float | None) -> MeasuredColumn | None:
        """Return the counts of a column by the sums of all tables that it is in, weighted by inverse variance."""
        del n_rows
        persons, rows = self._told["parents"], self._told["children"]
        low, high, n_single, is_whole = list_ends(self._column(name))
        own, found, tables = self._find_table((name,), low.shape), self._by_band(name), []
        if own is not None:
            tables.append((*own, 1))
        if found is not None:
            tables.append((found[0].sum(axis=1), found[1], found[0].shape[1]))
        for other in persons if name in persons else (*persons, *rows):
            if other == name:
                continue
            for pair in ((name, other), (other, name)):
                both = tuple(len(self._ends(each)[0]) for each in pair)
                found = self._find_table(pair, both)
                if found is not None:
                    axis = pair.index(other)
                    tables.append((found[0].sum(axis=axis), found[1], both[axis]))
        if not tables:
            return None
        return self._make_column(
            (name,),
            *average_tables(tables),
            low=low,
            high=high,
            n_single=n_single,
            is_whole=is_whole,
        )

    def _make_column(
        self,
        names: tuple[str, ...],
        counts: Floats,
        deviation: float,
        *,
        low: Floats,
        high: Floats,
        n_single: int = 0,
        is_whole: bool = False,
    ) -> MeasuredColumn:
        """Return noisy counts of cells, with the number of persons where it is public."""
        knows = self._are_of_persons(*names) or not self._has_empty
        parts: Any = {
            "low": low,
            "high": high,
            "is_null": np.isnan(low),
            "singles": counts[:n_single],
            "levels": [counts[n_single:]],
            "deviation": deviation,
            "n_rows": self._n_counted if knows else None,
            "is_whole": is_whole,
        }
        if self._are_of_persons(*names):
            return MeasuredColumn(**parts)
        return PersonColumn(**parts, shares=self._share(names, len(counts)))

    @cached_property
    def _cells(self) -> dict[str, Any]:
        """By column, the cell of each synthetic row, or of each synthetic person."""
        return {}

    def _find_cells(self, name: str) -> Any:
        if name not in self._cells:
            own = name in self._told["parents"]
            columns = [name] if own else [self.key, name]
            if own:
                frame = self._load(self.person_shards, columns)
            else:
                frame = self._read_rows(columns)
                self._cells[self.key] = frame[self.key].to_numpy()
            self._cells[name] = find_cells(self._column(name), frame[name])
        return self._cells[name]

    def _share(self, names: tuple[str, ...], n_cells: int) -> Any:
        """Return which part of the rows of each synthetic person with rows is in each cell of one or two columns."""
        children = [name for name in names if name in self._told["children"]]
        of_rows = {name: self._find_cells(name) for name in children}
        owners = self._cells[self.key]
        cell = np.zeros(len(owners), dtype=np.int64)
        for name in names:
            own = of_rows.get(name)
            place = self._find_cells(name)[owners] if own is None else own
            cell = cell * (1 if len(names) == 1 else len(self._ends(name)[0])) + place
        _, person, numbers = np.unique(owners, return_inverse=True, return_counts=True)
        shape = len(numbers), n_cells
        return sparse.csr_matrix((1.0 / numbers[person], (person, cell)), shape=shape)

    def _put(self, asked: Query, values: Floats | None) -> Result:
        """Answer by the noisy counts of a column, or by the table of two."""
        if len(asked.names) == 1:
            return super()._put(asked, values)
        for names in (
            asked.names,
            asked.names[::-1],
        ):  # a table of both kinds begins with that of persons
            shape = tuple(len(self._ends(name)[0]) for name in names)
            found = self._find_table(names, shape)
            if found is not None:
                places = np.arange(found[0].size, dtype=float)
                counts, sigma = found[0].ravel(), found[1]
                table = self._make_column(names, counts, sigma, low=places, high=places)
                if asked.kind == "mean":
                    return self._average_groups(asked, values, table, names, shape)
                return self._cross(asked, table, names, shape)
        raise SpecError(_NO_TABLE, f"{asked.kind}({', '.join(asked.names)})", _BESIDE)

    def _average_groups(
        self,
        asked: Query,
        values: Floats | None,
        table: MeasuredColumn,
        names: tuple[str, ...],
        shape: tuple[int, ...],
    ) -> Result:
        """Return the mean of a column in each group of another, from their table."""
        name, by = asked.names
        x, half, known = self._numbers_of(name, values, asked.within)

        def spread(of: str, numbers: Any) -> Floats:
            numbers = np.asarray(numbers, float)
            own: Any = numbers[:, None] if of == names[0] else numbers[None]
            return np.broadcast_to(own, shape).ravel()

        parts, groups = [], self._levels(by) or ()
        for here in np.eye(len(groups)):
            below = spread(by, here) * spread(name, known)
            found = table.ratio(below * spread(name, x), below)
            width = max(0.0, float((below * spread(name, half)) @ table.counts))
            parts.append((*found, width / max(float(below @ table.counts), 1e-300)))
        scale, index = self._scale(name), pd.Index(groups, name=by)
        estimate, error, bias = np.array(parts).T
        bias = np.where(np.isnan(estimate), np.nan, bias)
        ends = np.array([(x - half)[known].min(), (x + half)[known].max()])
        possible = in_units(scale, ends, 0.0 * ends, 0.0 * ends)[0]
        told = [pd.Series(each, index) for each in in_units(scale, estimate, error, bias)]
        said = self._limits(names, half, known)
        return Result(
            estimate=told[0],
            standard_error=told[1],
            bias_bound=told[2],
            limits=(*said, *([_NO_GROUP] if np.isnan(estimate).any() else [])),
            possible=(possible[0], possible[1]),
        )

    def _cross(
        self, asked: Query, table: MeasuredColumn, names: tuple[str, ...], shape: tuple[int, ...]
    ) -> Result:
        """Return the number of persons with each pair of levels; a person with several rows is divided among theirs."""
        index, columns = (pd.Index(self._levels(name) or (), name=name) for name in names)
        noise = table.deviation**2 * (1.0 if table.n_rows is None else 1.0 - 1.0 / table.low.size)
        frames = [
            pd.DataFrame(each.reshape(shape), index, columns)
            for each in (table.counts, np.sqrt(noise + table.draw_cells))
        ]
        estimate, error = (each if names == asked.names else each.T for each in frames)
        whole = max(table.total, 1.0), max(table.total, 1.0)
        return Result(
            estimate=estimate, standard_error=error, limits=self._limits(names), drawn=whole
        )

    def _find_measured(self, name: str) -> Any:
        found = super()._find_measured(name)
        return None if found is None else replace(found, limits=self._limits((name,)))

    def _limits(
        self, names: Sequence[str], half: Floats | None = None, known: Flags | None = None
    ) -> tuple[str, ...]:
        said = [] if self._are_of_persons(*names) else [_ALIKE]
        beside = [] if half is None or not half.any() else [_IN_CELLS]
        return (*said, _DRAWN, *beside, *([] if known is None or known.all() else [WITHOUT_NULLS]))

    def _numbers_of(
        self, name: str, values: Floats | None, within: Any
    ) -> tuple[Floats, Floats, Flags]:
        """Return the middle of each cell of a column, half its width, and whether it has a value."""
        low, high = self._ends(name) if values is None else (values, values)
        ends = self._check_within(name, within, self._scale(name))
        if ends is not None and values is None:
            low, high = np.clip(low, *ends), np.clip(high, *ends)
        known = ~np.isnan(low)
        middle, half = (np.where(known, each / 2.0, 0.0) for each in (low + high, high - low))
        return middle, half, known

    def _ask_rows(self, asked: Query, values: Floats | None) -> Result:
        """Return the mean, or the shares, of rows: by bands of the number of rows, each with its mean number."""
        name, levels = asked.names[0], self._levels(asked.names[0]) or ()
        if asked.kind == "mean":
            x, half, known = self._numbers_of(name, values, asked.within)
            found = self._average_rows(name, x, half, known)
        else:
            half, known = np.zeros(len(levels)), np.ones(len(levels), bool)
            parts = [self._average_rows(name, each, half, known) for each in np.eye(len(levels))]
            found = Result.gather(parts, pd.Index(levels, name=name))
        return replace(found, limits=(_OF_ROWS, *self._limits((name,), half, known)[1:]))

    def _average_rows(self, name: str, x: Floats, half: Floats, known: Flags) -> Result:
        """Return the mean of a number of each cell over all rows.

        Notes
        -----
        Of a band with the counts T and the mean number of rows k̄, Σ k̄ x T is short of the sum over
        rows by Σ (k - k̄)(m - μ) over its persons, whose mean is m: at most √(Σ (k - k̄)² Σ (m - μ)²), and Σ (m - μ)²
        is at most Σ T (x - μ)². The first is counted, the second follows from T.
        """
        most = self._told["max_rows"]
        table, counted = self._by_band(name), self._find_table((), (most + 1,), NUMBERS)
        if table is None or counted is None:
            raise SpecError(_NO_TABLE, name, _BESIDE)
        (counts, sigma), (numbers, of_numbers) = table, counted
        bands = (*make_edges(most)[1:], most + 1)
        mean, vary, spread, doubt = (np.zeros(len(bands) - 1) for _ in range(4))
        for place, (first, end) in enumerate(itertools.pairwise(bands)):
            k, h = np.arange(first, end), numbers[first:end]
            n, least = float(h.sum()), _SURE * of_numbers * math.sqrt(end - first)
            mean[place] = (
                np.clip(k @ h / n, first, end - 1) if n > least else (first + end - 1) / 2.0
            )
            off = k - mean[place]
            vary[place] = of_numbers**2 * float(off @ off) / max(n, least) ** 2
            spread[place], doubt[place] = h @ off**2, of_numbers**2 * float(np.sum(off**4))
        below = float(known.astype(float) @ counts @ mean)
        if not below > _SURE * sigma * math.sqrt(float(known.sum()) * float(mean @ mean)):
            raise SpecError(
                "the rows with a value are too few to be told from the noise", name, _LARGER
            )
        value = float(x * known @ counts @ mean) / below
        off = np.where(known, x - value, 0.0)
        noise = sigma**2 * float(off @ off) * float(mean @ mean) + float(vary @ (off @ counts) ** 2)
        n_persons = float(counts.sum())
        cell, owners = self._find_cells(name), self._cells[self.key]
        sums = np.bincount(owners, weights=off[cell])
        drawn = n_persons / len(np.unique(owners)) * float(sums @ sums)
        uneven = max(0.0, float(spread.sum())) + 2.0 * math.sqrt(float(doubt.sum()))
        apart = max(0.0, float(off**2 @ counts.sum(axis=1)))
        bias = (math.sqrt(uneven * apart) + max(0.0, float(half @ counts @ mean))) / below
        ends = float((x - half)[known].min()), float((x + half)[known].max())
        return Result(
            estimate=value,
            standard_error=math.sqrt(noise + drawn) / below,
            bias_bound=bias,
            possible=ends,
        )

    def _vary_between(self, name: str, values: Floats | None) -> Result:
        """Return the covariance of two rows of one person, from the table of them.

        Notes
        -----
        Of a column of cells, the middle differs from a value by d, at most h: the covariance of values differs from that of middles by
        at most 2 s √(Σ h²/n) + Σ h²/n, where s is the standard deviation of the middles.
        """
        if values is None:
            self._check_numbers("variance_between", name)
        x, half, known = self._numbers_of(name, values, None)
        found = self._find_table((name, name), (len(x), len(x)), PAIRS)
        if found is None:
            what = "no table of two rows of one person was drawn"
            raise SpecError(what, f"variance_between({name})", "it needs `max_rows` of 2 or more")
        (table, sigma), here = found, known.astype(float)
        n = float(here @ table @ here)
        if not n > _SURE * sigma * float(here.sum()):
            raise SpecError(
                "persons with two rows are too few to be told from the noise", name, _LARGER
            )
        margin = (table @ here + here @ table) / 2.0 * here
        centre = float(x @ margin) / n
        off = np.where(known, x - centre, 0.0)
        value = float(off @ table @ off) / n
        influence = np.outer(off, off) - value * np.outer(here, here)
        noise = sigma**2 * float(np.sum(influence**2))
        cell, owners = self._find_cells(name), self._cells[self.key]
        sums, squares, k = (np.bincount(owners, weights=each[cell]) for each in (off, off**2, here))
        several = k > 1.0
        k = k[several]
        moved = (sums[several] ** 2 - squares[several]) / (k * (k - 1.0)) - value
        drawn = n / max(len(k), 1) * float(moved @ moved)
        spread, width = (max(0.0, float(each**2 @ margin) / n) for each in (off, half))
        return Result(
            estimate=value,
            standard_error=math.sqrt(noise + drawn) / n,
            bias_bound=2.0 * math.sqrt(spread * width) + width,
            limits=(_OF_PAIRS, *self._limits((name,), half, known)[1:]),
        )
