"""What the mechanisms that add noise to contingency tables have in common: the cells, the draw, and what is kept of it."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dpdask.cells import DEFAULT_BINS, Cells, FoundBins
from dpdask.mechanisms.cell_search import CellSearch
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.expectations import describe_wide_cells
from dpdask.mechanisms.marginals.noise import NoisyMarginals, measure
from dpdask.mechanisms.marginals.plan import MarginalNoise, margin_95
from dpdask.mechanisms.mechanism import Columns, Search
from dpdask.mechanisms.noisy_counts import NoisyCounts, no_rows
from dpdask.privacy.events import Composed
from dpdask.privacy.noise import deviation
from dpdask.privacy.rounding import write_digits
from dpdask.references.bins import Bins, Found, cut_with_found, list_adaptive, warn_of_far_cells
from dpdask.stats import Clique, MarginalCounts
from dpdask.stats.tables import TableStatistic, domain_of
from dpdask.streams import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyTables(NoisyCounts):
    """A mechanism that counts contingency tables and adds noise to every cell.

    Attributes
    ----------
    found
        The cells that the first round found; None before, or if there are none to find.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted.
    """

    found: Found | None = None

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

    @property
    def search(self) -> Search | None:
        """What is measured in a round before the last; see `Mechanism.search`."""
        return self.cell_search

    @property
    def cell_search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; None if there are none to find, or they are found."""
        event = None if self.found is not None else self.noise.cells
        return None if event is None else CellSearch(names=self.adaptive, event=event, n_rows_public=not self.n_rows_private)

    @property
    @abstractmethod
    def counted(self) -> dict[str, Any]:
        """Which tables are counted: `cliques` and `two_way` of `TableStatistic`."""

    def statistic(self, columns: Columns) -> TableStatistic:
        """Return what is counted: the tables."""
        return TableStatistic(cells=self.cells(columns), **self.counted)

    @property
    def event(self) -> Composed:
        """One noisy table after the other."""
        return self.noise.event

    def cells(self, columns: Columns) -> dict[str, Cells]:
        """Return the cells of each privatised column; before they are found, as many as there may be."""
        return cut_with_found(columns.codecs, self.bins, self.found)

    def check_counts(self, counts: Any, columns: Columns) -> None:
        """Check that a table whose rows were there in the search still has some; see `Mechanism.check_counts`."""
        del columns
        if isinstance(counts, MarginalCounts) and counts.n_rows == 0 and not self.n_rows_private:
            raise no_rows("second pass" if self.found is not None else "table")

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of every table and return the noisy tables; see `Mechanism.draw`."""
        del columns
        return measure(counts, self.noise, n_rows_public=not self.n_rows_private, rng=noise("marginals/noise"))

    @property
    def search_stages(self) -> tuple[str, ...]:
        """What the first round does, in words; nothing if there is none."""
        return () if self.cell_search is None else (self.cell_search.stage,)

    def expectations(self, columns: Columns) -> tuple[str, ...]:
        """Return how far the counts of the tables may be off; see `Mechanism.expectations`."""
        noise, sizes = self.noise, self._sizes(columns)
        named = {"a one-way table": noise.one_way, "a two-way table": noise.pairs}
        named |= {"the second measurement of a two-way table": noise.chosen, "a chosen three-way table": noise.triples}
        named |= {
            f"the table {' x '.join(clique)}, of {math.prod(sizes[name] for name in clique):,} cells,": noise.cliques[clique]
            for clique in noise.cliques
        }
        found = [
            f"a count of {table} is off by at most {margin_95(event):,.3g} with probability 0.95"
            for table, event in named.items()
            if event is not None
        ]
        found += describe_wide_cells(self.cells(columns), self.bins)
        if self.n_rows_private:  # then nothing can warn of too few
            needed = sorted(count_needed_rows(noise, sizes).values())
            few = write_digits(needed[len(needed) // 2])
            found.append(f"with fewer than about {few} rows, the average cell of half of the tables holds fewer rows than the σ of its noise")
        return (*found, *(() if self.cell_search is None else self.cell_search.expectations))

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should consider before a run: δ, far cells, tables whose cells are too fine; see `Mechanism.cautions`."""
        found = (*NoisyCounts.cautions(self, columns, n_rows), *warn_of_far_cells(columns.codecs, self.bins))
        if not n_rows:
            return found
        return (*found, *list_noisy_tables(self.noise, self._sizes(columns), n_rows))

    def _sizes(self, columns: Columns) -> dict[str, int]:
        """Return how many cells each column has; of cells that are still to be found, about how many."""
        unknown = () if self.cell_search is None else self.adaptive
        return {name: DEFAULT_BINS if name in unknown else cells.size for name, cells in self.cells(columns).items()}

    def with_found(self, found: Found) -> Self:
        """Return the mechanism with the cells that were found; see `Mechanism.with_found`."""
        return replace(self, found=found)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found


def count_needed_rows(noise: MarginalNoise, sizes: Mapping[str, int]) -> dict[Clique, float]:
    """Return for each table the number of rows at which a cell has as many on average as the noise's standard deviation.

    Parameters
    ----------
    noise
        The noise of the tables.
    sizes
        The number of cells of each column.
    """
    tables = dict(noise.cliques)
    tables |= {(name,): noise.one_way for name in sizes} if noise.one_way is not None else {}
    tables |= dict.fromkeys(itertools.combinations(sizes, 2), noise.pairs) if noise.pairs is not None else {}
    return {table: deviation(event) * math.prod(sizes[name] for name in table) for table, event in tables.items()}


def list_noisy_tables(noise: MarginalNoise, sizes: Mapping[str, int], n_rows: int) -> tuple[str, ...]:
    """Return a warning that names tables whose cells have fewer rows on average than the noise's standard deviation; none if there are none.

    Parameters
    ----------
    noise
        The noise of the tables.
    sizes
        The number of cells of each column.
    n_rows
        The public number of rows.
    """
    tables = count_needed_rows(noise, sizes)
    noisy = [table for table, needed in tables.items() if needed > n_rows]
    if not noisy:
        return ()
    named = ", ".join(" x ".join(table) for table in noisy[:3]) + (f" and {len(noisy) - 3:,} more" if len(noisy) > 3 else "")
    what = f"The cells of {len(noisy):,} of {len(tables):,} tables are too fine, with fewer rows on average than the noise of a count: {named}"
    return (f"{what}. Even strong dependence may come out weak there, or not at all. Take fewer cells or columns, or spend more ε.",)
