"""Noisy tables of persons with their rows as a mechanism: each person weighs 1, and a row 1/k of its person's k rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dpdask.archive import Json
from dpdask.arrays import Ints, freeze_class
from dpdask.cells import CutColumns
from dpdask.errors import DataError, SpecError, say_count
from dpdask.mechanisms.card import CoveredRows, Section
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    scale_drafts,
)
from dpdask.mechanisms.marginals.release import MarginalTables, make_types
from dpdask.mechanisms.marginals.spec import (
    MarginalsDescription,
    MarginalsMechanism,
    NoisyTables,
)
from dpdask.mechanisms.mechanism import Columns, NoisyCounts, Sentences
from dpdask.privacy import Budget, noisy_counts_text
from dpdask.privacy.events import CentralEvent, DiscreteGaussian, RowOrder
from dpdask.privacy.noise import MAX_COUNT, deviation, perturb
from dpdask.stats import Clique, MarginalCounts
from dpdask.stats.people import LATTICE, MOST_ROWS, PersonTableStatistic
from dpdask.streams import Noise

EVERY_PERSON = "every person, with all rows"
BEYOND = "rows beyond the bound of a person"


def draft_persons(
    budget: Budget, variance: float, parts: int = 1, count: int = 1
) -> DiscreteGaussian:
    """Return the event of tables in which each person weighs 1, up to the factor that all noise has in common.

    Parameters
    ----------
    variance
        Of the noise, in persons, relative to that of other tables.
    parts
        Of how many parts a person's weight is.

    Privacy
    -------
    Unit and adjacency: the budget's; the sensitivities are those of `stats.people.PersonCounts`.
    Under replace-one a person's rows are replaced by others, of another number: its parts of a table
    have no number below 0, so two of them differ by √2 at most.
    """
    norm = math.nextafter(math.sqrt(2.0), 2.0) if budget.adjacency == "replace-one" else 1.0
    return DiscreteGaussian(
        sigma=parts * math.sqrt(variance),
        sensitivity=parts * norm,
        adjacency=budget.adjacency,
        count=count,
    )


def estimate_persons(tables: Iterable[tuple[Ints, CentralEvent, int]]) -> float:
    """Return the number of persons by the sums of tables, by inverse variance; at least 1.

    Parameters
    ----------
    tables
        Each with its noise, and of how many parts a person's weight is.
    """
    sums, weights = [], []
    for table, event, parts in tables:
        sums.append(float(table.sum()) / parts)
        weights.append(1.0 / ((deviation(event) / parts) ** 2 * table.size))
    return max(1.0, float(np.average(sums, weights=weights)))


@dataclass(frozen=True, kw_only=True)  # no slots: it stands beside another base
class CountsPersons(NoisyCounts):
    """What mechanisms have in common that count persons, each with all its rows."""

    # The column that names a person in a table of persons; None: persons are known by their rows.
    key: str | None = None
    drops_orphans: bool = False  # rows whose person that table lacks

    counts_persons: ClassVar = True
    bounds_rows: ClassVar = False

    @property
    def unit(self) -> str:
        """The column that names a person."""
        unit = self.budget.unit_column
        assert unit is not None
        return unit.column

    @property
    def parents(self) -> tuple[str, ...]:
        """The columns of persons."""
        return tuple(name for name in self.schema.privatised if self.schema.columns[name].constant)

    @property
    def children(self) -> tuple[str, ...]:
        """The columns of rows."""
        return tuple(name for name in self.schema.privatised if name not in self.parents)

    def check_persons(self) -> None:
        """Check the unit, the budget and the columns before the noise is planned."""
        unit = self.budget.unit_column
        if unit is None:
            what = "persons are told apart by a column, and the unit is the row"
            raise SpecError(what, "`unit`", "set `unit: {column: …, max_rows: …}`")
        if unit.max_rows > MOST_ROWS:
            what = f"at most {MOST_ROWS} rows of a person can be counted"
            raise SpecError(what, "`unit.max_rows`", "lower it: fewer rows of each cost less noise")
        if self.budget.delta <= 0:
            what = "tables of persons have Gaussian noise, which needs a δ"
            raise SpecError(what, "`delta`", "set it to 1e-9 or so")
        if not self.children:
            what = "no column is left for the rows of a person"
            raise SpecError(what, "schema", "privatise a column that is not constant")

    # what is public under replace-one is the number of persons
    n_rows_private: ClassVar = True

    @property
    def counted_by(self) -> Json:
        """How the statistic tells persons apart."""
        return {
            "parents": self.parents,
            "unit": self.unit,
            "key": self.key,
            "drops_orphans": self.drops_orphans,
        }

    @property
    def knows_persons(self) -> bool:
        """Whether the number of persons is public."""
        return self.budget.adjacency == "replace-one"

    @property
    def also_read(self) -> tuple[str, ...]:
        """The unit's column."""
        return (self.unit,)

    def order(self, cells: CutColumns) -> CutColumns:
        """Return the cells of each column, those of persons first."""
        return {name: cells[name] for name in (*self.parents, *self.children)}

    def check_number(self, n_persons: int) -> None:
        """Check that there is anybody, where their number is public, and that nobody's count is beyond exact noise."""
        if n_persons > MAX_COUNT // LATTICE:
            what = f"at most {MAX_COUNT // LATTICE:,} persons can be counted"
            raise DataError(what, "input", "release parts of the table")
        if self.knows_persons and n_persons == 0:
            raise DataError("the table has no rows", "input", "check the job's input.path")

    @property
    def counting(self) -> str:
        """How persons are counted, in words."""
        most, unit = self.budget.rows_per_unit, self.unit
        read = f"read {unit} and {len(self.schema.privatised)} columns once"
        return f"tabulate: {read}; bring the rows of each {unit} together, choose at most {most} of them by a keyed hash, and count"

    def tell_persons(self, section: Section, n_persons: float | None) -> Section:
        """Return a card's section of persons, and not of rows."""
        return replace(
            section,
            text=noisy_counts_text(self.budget, persons=True),
            n_rows=None,
            public_rows=n_persons if self.knows_persons else None,
            protected=CoveredRows(who=EVERY_PERSON, fraction=1.0, of="persons"),
            unprotected=CoveredRows(who="nobody", fraction=0.0, of="persons"),
        )


@dataclass(frozen=True, kw_only=True)  # no slots: of two bases
class PersonTablesMechanism(CountsPersons, MarginalsMechanism):
    """The noisy tables of persons with their rows, under a budget.

    Privacy
    -------
    Unit: a person, that is one value of the unit's column. Sensitivity and events: `draft_persons`,
    of tables of columns of persons in whole persons, of others in parts of 2²⁶. Protected: every
    person. Everything after the noise is post-processing.
    """

    finds_levels: ClassVar = False

    def check_parameters(self) -> None:
        """Check persons, and that all cells are declared."""
        self.check_persons()
        if self.adaptive:
            what = "in tables of persons no cells are found"
            hint = "declare how many cells it has, or the first value of each"
            raise SpecError(what, f"`bins`, column {self.adaptive[0]!r}", hint)
        NoisyTables.check_parameters(self)

    @cached_property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        cliques, whole = self.spec.cliques, {*self.parents}
        parts = {clique: 1 if {*clique} <= whole else LATTICE for clique in cliques}
        weights = self.spec.weights or (1.0,) * len(cliques)
        drafts = {
            clique: draft_persons(self.budget, 1.0 / weight, parts[clique])
            for clique, weight in zip(cliques, weights, strict=True)
        }
        events = scale_drafts(self.budget, drafts)
        return MarginalNoise(one_way=None, pairs=None, cliques=events, parts=parts)

    def find_counted(self, column: str, columns: Columns) -> None:
        """Return None: how many persons a mean is of is not known before; see `Mechanism.find_counted`."""

    def cells(self, columns: Columns) -> CutColumns:
        """Return the cells of each column, those of persons first."""
        return self.order(NoisyTables.cells(self, columns))

    def check_tables(self, columns: Columns) -> None:
        """Check the bins and the tables' sizes."""
        MarginalsMechanism.statistic(self, columns).check_size()

    def statistic(self, columns: Columns) -> Any:
        """Return what is counted, a `PersonTableStatistic`."""
        return PersonTableStatistic(
            cells=self.cells(columns),
            max_rows=self.budget.rows_per_unit,
            cliques=self.spec.cliques,
            **self.counted_by,
        )

    def check_counts(self, counts: MarginalCounts, columns: Columns) -> None:
        """Check the number of persons; see `Mechanism.check_counts`."""
        self.check_number(counts.n_rows)

    @property
    def complete(self) -> tuple[Clique, ...]:
        """The tables that everybody is in: of columns of persons, or all if nobody is without rows."""
        parts = self.noise.parts
        return tuple(clique for clique in parts if self.key is None or parts[clique] == 1)

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of every table and return the noisy tables; see `Mechanism.draw`."""
        rng, events = noise("persons/noise"), self.noise.cliques
        tables = {
            clique: perturb(counts.table(clique), event, rng=rng)
            for clique, event in events.items()
        }
        n, nothing = float(counts.n_rows), np.zeros(0, dtype=np.int64)
        if not self.knows_persons:
            n = estimate_persons(
                (tables[clique], events[clique], self.noise.parts[clique])
                for clique in self.complete or tables
            )
        return NoisyMarginals(
            domain=counts.domain,
            n_rows=n,
            noise=self.noise,
            one_way=nothing,
            pairs=nothing,
            cliques=tables,
        )

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: those of the tables, with numbers of persons."""
        return make_types(self.spec.cliques, persons=True)

    @property
    def description(self) -> PersonTablesDescription:
        """What is said of it."""
        return PersonTablesDescription(self)


@freeze_class(kw_only=False)
class PersonTablesDescription(MarginalsDescription):
    """What is said of noisy tables of persons with their rows."""

    mechanism: PersonTablesMechanism

    protected: ClassVar = EVERY_PERSON

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        n = say_count(len(self.mechanism.spec.cliques), "table")
        return f"{n} of persons with their rows, with noise on every cell"

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        return noisy_counts_text(self.mechanism.budget, persons=True)

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        _, *others = MarginalsDescription.stages(self, columns)
        return (self.mechanism.counting, *others)

    def expectations(self, columns: Columns) -> Sentences:
        """Return how far the counts of the tables may be off, in persons, and what a row weighs."""
        most = self.mechanism.budget.rows_per_unit
        weight = f"each person weighs 1, and of its k rows each 1/k; of rows beyond {most} nothing is released"
        return (*MarginalsDescription.expectations(self, columns), weight)

    def section(self, release: MarginalTables, columns: Columns, **more: Any) -> Section:
        """Return the tables' part of the release card.

        Privacy
        -------
        Holds parameters and the public domain. The number of persons is exact under replace-one,
        else the estimate of the noisy tables that everybody is in, if there are any.
        """
        asked, n = self.mechanism, release.noisy.n_rows
        told = n if asked.knows_persons or asked.complete else None
        section = MarginalsDescription.section(self, release, columns, **more)
        persons: Mapping[str, Any] = {
            "unit": asked.unit,
            "n_persons": told,
            "exact": asked.knows_persons,
            "max_rows": asked.budget.rows_per_unit,
            "empty": asked.key is not None,  # whether a person may have no rows
            "parents": list(asked.parents),
            "children": list(asked.children),
            "lost": [BEYOND],
        }
        mechanism = {**section.mechanism, "persons": persons}
        return asked.tell_persons(replace(section, mechanism=mechanism), told)
