"""What the mechanisms that add noise to contingency tables have in common: the cells, the draw, and what is kept of it."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dpdask.cells import Cells, FoundBins
from dpdask.errors import DataError
from dpdask.mechanisms.cell_search import CellSearch
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.marginals.noise import NoisyMarginals, measure
from dpdask.mechanisms.marginals.plan import MarginalNoise, margin_95
from dpdask.mechanisms.mechanism import Columns, Search
from dpdask.mechanisms.noisy_counts import NoisyCounts
from dpdask.privacy.events import Composed
from dpdask.privacy.noise import deviation
from dpdask.references.bins import Bins, Found, cut_with_found, list_adaptive, warn_of_far_cells
from dpdask.stats import MarginalCounts
from dpdask.stats.tables import TableStatistic, domain_of
from dpdask.streams import Noise

_TV_OF_NOISE = 0.4  # half the mean absolute value of noise, in standard deviations


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

    def check_counts(self, counts: Any) -> None:
        """Check that a table whose rows were there in the search still has some; see `Mechanism.check_counts`."""
        if isinstance(counts, MarginalCounts) and counts.n_rows == 0 and not self.n_rows_private:
            hint = "leave its files alone until the run ends; persist a Dask frame before its first use"
            raise DataError("the table has no rows", "second pass" if self.found is not None else "table", hint)

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
        noise, sizes = self.noise, {name: cells.size for name, cells in self.cells(columns).items()}
        named = {"a one-way table": noise.one_way, "a two-way table": noise.pairs}
        named |= {"a two-way table's second measurement": noise.chosen, "a chosen three-way table": noise.triples}
        named |= {
            f"the table {' x '.join(clique)}, of {math.prod(sizes[name] for name in clique):,} cells,": noise.cliques[clique]
            for clique in noise.cliques
        }
        found = [
            f"a count of {table} is off by at most {margin_95(event):,.3g} with probability 0.95"
            for table, event in named.items()
            if event is not None
        ]
        return (*found, *(() if self.cell_search is None else self.cell_search.expectations))

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should consider before a run: δ, far cells, tables whose noise is as large as all rows; see `Mechanism.cautions`."""
        found = (*NoisyCounts.cautions(self, columns, n_rows), *warn_of_far_cells(columns.codecs, self.bins))
        if not n_rows:
            return found
        return (*found, *list_noisy_tables(self.noise, {name: cells.size for name, cells in self.cells(columns).items()}, n_rows))

    def with_found(self, found: Found) -> Self:
        """Return the mechanism with the cells that were found; see `Mechanism.with_found`."""
        return replace(self, found=found)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found


def list_noisy_tables(noise: MarginalNoise, sizes: Mapping[str, int], n_rows: int) -> tuple[str, ...]:
    """Return a warning that names tables whose noise moves as many rows as there are; none if there are none.

    Parameters
    ----------
    noise
        The noise of the tables.
    sizes
        The number of cells of each column.
    n_rows
        The public number of rows.
    """
    tables = [(clique, event) for clique, event in noise.cliques.items()]
    tables += [((name,), noise.one_way) for name in sizes] if noise.one_way is not None else []
    tables += [(pair, noise.pairs) for pair in itertools.combinations(sizes, 2)] if noise.pairs is not None else []
    noisy = [table for table, event in tables if _TV_OF_NOISE * deviation(event) * math.prod(sizes[name] for name in table) > n_rows]
    if not noisy:
        return ()
    named = ", ".join(" x ".join(table) for table in noisy[:3]) + (f" and {len(noisy) - 3:,} more" if len(noisy) > 3 else "")
    what = f"The noise of {len(noisy):,} of {len(tables):,} tables is as large as the table itself: {named}"
    return (f"{what}. Even strong dependence may come out weak there, or not at all. Take fewer cells or columns, or spend more ε.",)
