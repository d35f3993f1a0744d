"""Noisy tables as a mechanism: what a user may ask for, and its steps."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import BeforeValidator

from dpdask.arrays import freeze_class
from dpdask.cells import DEFAULT_BINS, CutColumns, FoundBins
from dpdask.codec import LevelCodec
from dpdask.documents import GrownDocument, suggest
from dpdask.domains import MAX_LISTED
from dpdask.errors import SpecError
from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.expectations import CellSearch, describe_wide_cells
from dpdask.mechanisms.levels import LevelSearch, check_delta, tell_selections
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    account_for,
    measure,
    plan_noise,
)
from dpdask.mechanisms.marginals.release import COUNT, MARGIN, TABLE, MarginalTables, make_types
from dpdask.mechanisms.mechanism import (
    Columns,
    NoisyCounts,
    NoisyCountsDescription,
    Search,
    Sentences,
    Spec,
    no_rows,
)
from dpdask.privacy import Budget
from dpdask.privacy.events import CentralEvent, Composed, write_digits
from dpdask.privacy.noise import deviation, margin_95
from dpdask.references.histogram import (
    Bins,
    cut_with_found,
    list_adaptive,
    warn_of_far_cells,
)
from dpdask.schema import Schema
from dpdask.stats import Clique, MarginalCounts
from dpdask.stats.marginals import TableStatistic, domain_of
from dpdask.streams import Noise, RunKey

_FEW_LEVELS = 16  # that a column must be able to have whose levels are found


@freeze_class
class NoisyTables(NoisyCounts):
    """A mechanism that counts contingency tables and adds noise to every cell.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted.
    """

    # The columns whose levels a round before this one found.
    listed: tuple[str, ...] = ()

    finds_levels: ClassVar = True

    @property
    @abstractmethod
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""

    @property
    @abstractmethod
    def bins(self) -> Bins:
        """How continuous and mixed columns are cut."""

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The columns whose cells are found."""
        return list_adaptive(self.schema, self.bins)

    def bins_of(self, columns: Columns) -> dict[str, int | Sequence[float] | FoundBins]:
        """Return how each continuous or mixed column is cut."""
        return bins_by_column(self.bins, self.cells(columns), self.found)

    def check_parameters(self) -> None:
        """Check that levels can be found, and what all noisy counts need."""
        if self.schema.discovered:
            check_delta(self.budget)
        NoisyCounts.check_parameters(self)

    def check(self, columns: Columns) -> None:
        """Check everything that needs the table's types; of levels that are yet to be found, that there may be a few."""
        if self.level_search is not None:
            self.level_search.check(columns)
            columns = self._suppose(columns, _FEW_LEVELS)
        self.check_tables(columns)

    @abstractmethod
    def check_tables(self, columns: Columns) -> None:
        """Check the bins and the tables' sizes."""

    @property
    def discovered(self) -> tuple[str, ...]:
        """The columns whose levels this run finds, or has found."""
        return self.schema.discovered or self.listed

    @property
    def search(self) -> Search | None:
        """What is measured in a round before the last; see `Mechanism.search`."""
        return self.level_search or self.cell_search

    @property
    def level_search(self) -> LevelSearch | None:
        """What finds the levels of columns in a first round; None if there are none to find, or they are found."""
        if not self.schema.discovered:
            return None
        events, count = self.noise.levels, self._count_most
        return LevelSearch(schema=self.schema, budget=self.budget, events=events, count_most=count)

    def with_found(self, found: Any) -> Self:
        """Return the mechanism of the next round, with the schema of the levels or the cells that were found."""
        if isinstance(found, Schema):
            declared = self.declared.take_levels(found)
            return replace(self, schema=found, declared=declared, listed=self.schema.discovered)
        return replace(self, found=found)

    def _count_most(self, columns: Columns) -> int:
        """Return how many levels each column may have whose levels are found: so many that all tables can be held."""
        most = self.most_levels
        while most > _FEW_LEVELS:
            with suppress(SpecError):
                self.check_tables(self._suppose(columns, most))
                break
            most //= 2
        return most

    def _suppose(self, columns: Columns, n_levels: int) -> Columns:
        """Return the columns as if so many levels had been found, which are good for nothing but their number."""
        supposed = {}
        for name in self.schema.discovered:
            codec, column = columns.codecs[name], self.schema.columns[name]
            if isinstance(codec, LevelCodec):
                n = column.count_levels(n_levels) + codec.nulls
                supposed[name] = replace(codec, levels=pa.nulls(n, codec.type))
        return replace(columns, codecs={**columns.codecs, **supposed})

    @property
    def cell_search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; None if there are none to find, or they are found."""
        event = self.noise.cells
        if event is None or self.found is not None:
            return None
        return CellSearch(names=self.adaptive, event=event, n_rows_public=not self.n_rows_private)

    @property
    def event(self) -> Composed:
        """One noisy table after the other."""
        return self.noise.event

    @property
    def counted(self) -> tuple[tuple[CentralEvent, int], ...]:
        """The noise of the tables that are measured whatever the rows are."""
        parts = self.noise.parts
        found = [(self.noise.one_way, 1), (self.noise.pairs, 1)]
        found += [(event, parts.get(each, 1)) for each, event in self.noise.cliques.items()]
        return tuple((event, n) for event, n in found if event is not None)

    def find_counted(self, column: str, columns: Columns) -> tuple[CentralEvent, int] | None:
        """Return the noise of the table with the fewest cells that has a column; see `Mechanism.find_counted`."""
        if self.noise.one_way is not None:
            return self.noise.one_way, 1
        sizes = {name: each.size for name, each in self.cells(columns).items() if name != column}
        tables = [
            (math.prod(sizes[name] for name in clique if name != column), event)
            for clique, event in self.noise.cliques.items()
            if column in clique
        ]
        n_summed, event = min(tables, key=itemgetter(0), default=(0, None))
        return None if event is None else (event, n_summed)

    def cells(self, columns: Columns) -> CutColumns:
        """Return the cells of each privatised column; before they are found, as many as there may be."""
        return cut_with_found(columns.codecs, self.bins, self.found)

    def check_counts(self, counts: Any, columns: Columns) -> None:
        """Check that a table whose rows were there in the search still has some; see `Mechanism.check_counts`."""
        if isinstance(counts, MarginalCounts) and counts.n_rows == 0 and not self.n_rows_private:
            later = self.found is not None or self.listed
            raise no_rows("second pass" if later else "table")

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of every table and return the noisy tables; see `Mechanism.draw`."""
        rng = noise("marginals/noise")
        return measure(counts, self.noise, n_rows_public=not self.n_rows_private, rng=rng)

    @property
    def search_stages(self) -> Sentences:
        """What the rounds before the tables do, in words; nothing if there is none."""
        return tuple(each.stage for each in (self.level_search, self.cell_search) if each)

    def sizes(self, columns: Columns) -> dict[str, int]:
        """Return how many cells each column has; of cells that are still to be found, about how many; of such levels, a few."""
        unknown = () if self.cell_search is None else self.adaptive
        columns = self._suppose(columns, _FEW_LEVELS)
        return {
            name: DEFAULT_BINS if name in unknown else cells.size
            for name, cells in self.cells(columns).items()
        }

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found


@freeze_class(kw_only=False)
class NoisyTablesDescription(NoisyCountsDescription):
    """What is said of every release of noisy tables."""

    mechanism: NoisyTables

    def expectations(self, columns: Columns) -> Sentences:
        """Return how far the counts of the tables may be off."""
        asked = self.mechanism
        noise, sizes, search = asked.noise, asked.sizes(columns), asked.cell_search
        parts = dict[str, int]()
        named = {
            "a one-way table": noise.one_way,
            "a two-way table": noise.pairs,
            "the second measurement of a two-way table": noise.chosen,
            "a chosen three-way table": noise.triples,
        }
        for clique, event in noise.cliques.items():
            n_cells = math.prod(sizes[name] for name in clique)
            size = "" if {*clique} & {*asked.discovered} else f", of {n_cells:,} cells,"
            table = f"the table {' x '.join(clique)}{size}"
            named[table], parts[table] = event, noise.parts.get(clique, 1)
        found = [
            f"a count of {table} is off by at most {margin_95(event) / parts.get(table, 1):,.3g} with probability 0.95"
            for table, event in named.items()
            if event is not None
        ]
        found += describe_wide_cells(asked.cells(columns), asked.bins)
        if asked.n_rows_private:  # then nothing can warn of too few
            needed = sorted(count_needed_rows(noise, sizes).values())
            few, whose = write_digits(needed[len(needed) // 2]), _name_counted(noise)
            found.append(
                f"with fewer than about {few} {whose}, the average cell of half of the tables holds"
                f" fewer {whose} than the σ of its noise"
            )
        searches = [each for each in (asked.level_search, search) if each is not None]
        return (*found, *(line for each in searches for line in each.expectations))

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should consider before a run: δ, far cells, tables whose cells are too fine."""
        asked, of_delta = self.mechanism, NoisyCountsDescription.cautions(self, columns, n_rows)
        found = (*of_delta, *warn_of_far_cells(columns.codecs, asked.bins))
        if not n_rows:
            return found
        return (*found, *list_noisy_tables(asked.noise, asked.sizes(columns), n_rows))


def _name_counted(noise: MarginalNoise) -> str:
    return "persons" if noise.parts else "rows"


def count_needed_rows(noise: MarginalNoise, sizes: Mapping[str, int]) -> dict[Clique, float]:
    """Return for each table the number of rows at which a cell has as many on average as the noise's standard deviation."""
    tables = dict(noise.cliques)
    for n, event in ((1, noise.one_way), (2, noise.pairs)):
        if event is not None:
            tables |= dict.fromkeys(itertools.combinations(sizes, n), event)
    return {
        table: deviation(event)
        / noise.parts.get(table, 1)
        * math.prod(sizes[name] for name in table)
        for table, event in tables.items()
    }


def list_noisy_tables(noise: MarginalNoise, sizes: Mapping[str, int], n_rows: int) -> Sentences:
    """Return a warning that names tables whose cells have fewer rows on average than the noise's standard deviation; none if there are none."""
    tables = count_needed_rows(noise, sizes)
    noisy = [table for table, needed in tables.items() if needed > n_rows]
    if not noisy:
        return ()
    named, whose = ", ".join(" x ".join(table) for table in noisy[:3]), _name_counted(noise)
    more = f" and {len(noisy) - 3:,} more" if len(noisy) > 3 else ""
    return (
        (
            f"The cells of {len(noisy):,} of {len(tables):,} tables are too fine, with fewer {whose} on"
            f" average than the noise of a count: {named}{more}. Even strong dependence may come out"
            " weak there, or not at all. Take fewer cells or columns, or spend more ε."
        ),
    )


def tables_accounting(noisy: NoisyMarginals, budget: Budget) -> dict[str, Any]:
    """Return what noisy tables cost, and how far their counts may be off."""
    noise = noisy.noise
    named: dict[str, CentralEvent | None] = {
        **({"levels": next(iter(noise.levels.values())).noise} if noise.levels else {}),
        "fine_counts": noise.cells,
        "one_way": noise.one_way,
        "two_way": noise.pairs,
        "measured_again": noise.chosen,
        "three_way": noise.triples,
        **{" x ".join(clique): event for clique, event in noise.cliques.items()},
    }
    found = account_for(noise.event, named, budget, "tables")
    for clique, parts in noise.parts.items():
        for each in found["noise"][" x ".join(clique)]:
            found["noise"][" x ".join(clique)][each] /= parts
    return found


def _as_cliques(value: object) -> object:
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(clique, list | tuple) and clique for clique in value)
    ):
        what = "a list of tables is expected, each a list of columns"
        raise ValueError(f"{what}, such as [[age], [age, income]]")
    if any(type(name) is not str for clique in value for name in clique):
        raise ValueError("a table is a list of columns' names")
    return tuple(tuple(clique) for clique in value)


def _as_weights(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of positive weights is expected, one for each table")  # noqa: TRY004 - pydantic reports no TypeError
    for weight in value:
        if type(weight) not in (int, float) or not 0 < weight < float("inf"):
            raise ValueError(f"a weight is a positive number, not {weight!r}")
    return tuple(float(weight) for weight in value)


class MarginalsSpec(GrownDocument, Spec):
    """Noisy contingency tables."""

    kind: Literal["marginals"] = "marginals"
    cliques: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_as_cliques)]
    """The tables, each a list of columns."""
    weights: Annotated[tuple[float, ...], BeforeValidator(_as_weights)] | None = None
    """Each table's share of the budget, relative to the others; equal if not given."""
    bins: Bins = "adaptive"
    """How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts
    that are found under privacy, in a pass of their own. A number: into that many cells of equal
    width. A mapping: for each column one of these, or a list of the first value of each cell.
    """
    persons: bool = False
    """Whether all rows of a value of the unit's column are one person, who weighs 1 in each table; each
    of its k rows weighs 1/k. Tables may have columns of persons and of rows. `bins` must be declared.
    """

    later: ClassVar[frozenset[str]] = frozenset(("persons",))


@freeze_class
class MarginalsMechanism(NoisyTables):
    """The noisy tables of a schema under a budget.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted. Everything after
    the noise is post-processing.
    """

    spec: MarginalsSpec

    nobody: ClassVar = "the cells of a table"
    most_levels: ClassVar = MAX_LISTED
    release_type: ClassVar = MarginalTables

    def check_spec(self) -> None:
        """Check the parameters of the tables."""
        cliques, weights, names = self.spec.cliques, self.spec.weights, self.schema.privatised
        seen: set[frozenset[str]] = set()
        for clique in cliques:
            for name in clique:
                if name not in names:
                    hint = suggest(name, names, "correct its name, or its role in the schema")
                    raise SpecError("is not a privatised column", f"`cliques`, {name!r}", hint)
                if name in (TABLE, COUNT, MARGIN):
                    what = "this name is reserved for a column of the released tables"
                    raise SpecError(what, f"column {name!r}", "rename it")
            if len(set(clique)) < len(clique) or frozenset(clique) in seen:
                what, where = "a column or a table is repeated", f"`cliques`, {' x '.join(clique)}"
                raise SpecError(what, where, "remove one of the two")
            seen.add(frozenset(clique))
        if weights is not None and len(weights) != len(cliques):
            what = f"there must be one weight for each table, not {len(weights)} for {len(cliques)}"
            raise SpecError(what, "`weights`", f"give {len(cliques)}")

    @cached_property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        weights = self.spec.weights or (1.0,) * len(self.spec.cliques)
        chosen = dict(zip(self.spec.cliques, weights, strict=True))
        return plan_noise(
            self.budget,
            len(self.schema.privatised),
            one_way=0.0,
            pairs=0.0,
            cliques=chosen,
            n_found=len(self.adaptive),
            discovered=self.discovered,
        )

    @property
    def bins(self) -> Bins:
        """How continuous and mixed columns are cut."""
        return self.spec.bins

    def check_tables(self, columns: Columns) -> None:
        """Check the bins and the tables' sizes."""
        self.statistic(columns).check_size()

    def statistic(self, columns: Columns) -> TableStatistic:
        """Return what is counted: the declared tables."""
        cells = self.cells(columns)
        return TableStatistic(cells=cells, cliques=self.spec.cliques, two_way=False)

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: those of the tables, whatever the types of the table's own."""
        return make_types(self.spec.cliques)

    def fit(self, counts: NoisyMarginals, columns: Columns, key: RunKey) -> MarginalTables:
        """Return the noisy tables with the columns that their cells stand for; see `Mechanism.fit`."""
        bins = self.bins_of(columns)
        return MarginalTables(schema=self.schema, columns=columns.types, bins=bins, noisy=counts)

    def n_records(self, release: MarginalTables) -> int:
        """Return how many rows a job writes: one for each cell."""
        return release.n_cells

    @property
    def description(self) -> MarginalsDescription:
        """What is said of it."""
        return MarginalsDescription(self)


@freeze_class(kw_only=False)
class MarginalsDescription(NoisyTablesDescription):
    """What is said of noisy tables, each of its own."""

    mechanism: MarginalsMechanism

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{len(self.mechanism.spec.cliques)} tables with noise on every cell"

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        asked = self.mechanism
        n_columns, n_tables = len(asked.schema.privatised), len(asked.spec.cliques)
        return (
            *asked.search_stages,
            f"tabulate: read {n_columns} columns once; count {n_tables} tables, merged in a tree",
            "fit: add noise to every cell on the driver, and write the tables once",
            "write: the noisy tables, one row a cell",
        )

    def quality(self, release: MarginalTables) -> str:
        """Return which part of the counts exceeds its margin of error; see `Mechanism.quality`."""
        noisy = release.noisy
        above = sum(
            int((counts > noisy.margin(clique)).sum()) for clique, counts in noisy.cliques.items()
        )
        return (
            f"{above:,} of {release.n_cells:,} counts are larger than what noise alone gives with"
            " probability 0.95"
        )

    def section(
        self,
        release: MarginalTables,
        columns: Columns,
        **_: Any,
    ) -> Section:
        """Return the tables' part of the release card.

        Privacy
        -------
        Holds parameters and the public domain. Nothing exact; under add-remove the number of rows
        is the noisy tables' own estimate.
        """
        noisy, budget = release.noisy, self.mechanism.budget
        section = noisy_counts_section(
            budget=budget,
            mechanism={"kind": "marginals", "cliques": list(noisy.cliques)},
            schema=release.schema,
            cells=release.cells(),
            accounting=tables_accounting(noisy, budget),
            n_rows=noisy.n_rows,
        )
        return tell_selections(section, noisy.noise.levels)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return that it is not known before; see `Description.n_expected`."""
        return None
