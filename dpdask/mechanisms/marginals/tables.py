"""What the mechanisms that add noise to contingency tables have in common: the cells, the draw, and what is kept of it."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dpdask.cells import Cells, FoundBins
from dpdask.mechanisms.cell_search import CellSearch
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, margin_95, measure
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.noisy_counts import NoisyCounts
from dpdask.privacy.events import Composed
from dpdask.privacy.noise import deviation
from dpdask.references.bins import Bins, Found, cut_with_found, list_adaptive
from dpdask.references.histogram import NoisyHistograms
from dpdask.references.statistics import ColumnStatistic
from dpdask.stats.tables import TableStatistic, domain_of
from dpdask.streams import Noise

_TV_OF_NOISE = 0.4  # half the mean absolute value of noise, in standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyTables(NoisyCounts):
    """A mechanism that counts contingency tables and adds noise to every cell.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted.
    """

    @property
    @abstractmethod
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""

    @property
    @abstractmethod
    def bins(self) -> Bins:
        """How continuous and mixed columns are cut."""

    found: Found | None = None

    @property
    def n_found(self) -> int:
        """The number of columns whose cells are found."""
        return len(list_adaptive(self.schema, self.bins))

    def bins_of(self, columns: Columns) -> dict[str, int | Sequence[float] | FoundBins]:
        """Return how each continuous or mixed column is cut."""
        return bins_by_column(self.bins, self.cells(columns), self.found)

    @property
    def search(self) -> CellSearch | None:
        """What finds the cells of columns, in a first round; None if there are none to find, or they are found."""
        names = list_adaptive(self.schema, self.bins)
        if not names or self.found is not None:
            return None
        assert self.noise.cells is not None
        return CellSearch(names=names, event=self.noise.cells, n_rows_public=not self.n_rows_private)

    @property
    @abstractmethod
    def counted(self) -> dict[str, Any]:
        """Which tables are counted: `cliques` and `two_way` of `TableStatistic`."""

    def tables(self, columns: Columns) -> TableStatistic:
        """Return the tables that are counted."""
        return TableStatistic(cells=self.cells(columns), **self.counted)

    def statistic(self, columns: Columns) -> TableStatistic | ColumnStatistic:
        """Return what is counted: the fine counts of a first round, or the tables."""
        return self.tables(columns) if self.search is None else self.search.statistic(columns)

    @property
    def event(self) -> Composed:
        """One noisy table after the other."""
        return self.noise.event

    def cells(self, columns: Columns) -> dict[str, Cells]:
        """Return the cells of each privatised column; before they are found, as many as there may be."""
        return cut_with_found(columns.codecs, self.bins, self.found)

    def draw(self, counts: Any, columns: Columns, noise: Noise) -> NoisyHistograms | NoisyMarginals:
        """Draw the noise of every count and return the noisy counts; see `Mechanism.draw`."""
        if self.search is not None:
            return self.search.draw(counts, columns, noise)
        return measure(counts, self.noise, n_rows_public=not self.n_rows_private, rng=noise("marginals/noise"))

    @property
    def search_stages(self) -> tuple[str, ...]:
        """What the first round does, in words; nothing if there is none."""
        return () if self.search is None else (self.search.stage,)

    def expectations(self, columns: Columns) -> tuple[str, ...]:
        """Return how far the counts of the tables may be off; see `Mechanism.expectations`."""
        noise, sizes = self.noise, {name: cells.size for name, cells in self.cells(columns).items()}
        named = {"a one-way table": noise.one_way, "a two-way table": noise.pairs}
        named |= {
            f"the table {' x '.join(clique)}, of {math.prod(sizes[name] for name in clique):,} cells,": noise.cliques[clique]
            for clique in noise.cliques
        }
        found = [
            f"a count of {table} is off by at most {margin_95(event):,.3g} with probability 0.95"
            for table, event in named.items()
            if event is not None
        ]
        return (*found, *(() if self.search is None else self.search.expectations))

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should consider before a run: δ, and tables whose noise is as large as all rows; see `Mechanism.cautions`."""
        found = NoisyCounts.cautions(self, columns, n_rows)
        return (*found, *list_drowned(self.noise, {name: cells.size for name, cells in self.cells(columns).items()}, n_rows)) if n_rows else found

    def refine(self, drawn: Any, columns: Columns) -> Self | None:
        """Return the mechanism with the cells that the fine counts give; see `Mechanism.refine`."""
        return None if self.search is None else replace(self, found=self.search.find(drawn, columns))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistograms | NoisyMarginals:
        """Return the noisy counts that an earlier driver kept; see `Mechanism.read_drawn`."""
        if self.search is not None:
            return self.search.read_drawn(data, columns)
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found


def list_drowned(noise: MarginalNoise, sizes: Mapping[str, int], n_rows: int) -> tuple[str, ...]:
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
    drowned = [table for table, event in tables if _TV_OF_NOISE * deviation(event) * math.prod(sizes[name] for name in table) > n_rows]
    if not drowned:
        return ()
    named = ", ".join(" x ".join(table) for table in drowned[:3]) + (f" and {len(drowned) - 3:,} more" if len(drowned) > 3 else "")
    what = f"The noise of {len(drowned):,} of {len(tables):,} tables is as large as the table itself: {named}"
    return (f"{what}. Even strong dependence may come out weak there, or not at all. Take fewer cells or columns, or spend more ε.",)
