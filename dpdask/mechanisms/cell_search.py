"""The first round of mechanisms that find the cells of continuous and mixed columns under privacy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpdask.cells import DEFAULT_BINS, cells
from dpdask.codec import LevelCodec
from dpdask.mechanisms.expectations import TAILS
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy.events import CentralEvent
from dpdask.privacy.noise import deviation, perturb
from dpdask.references.bins import Found
from dpdask.references.hierarchy import Hierarchy, find_bins, make_grid
from dpdask.references.histogram import NoisyHistograms
from dpdask.references.statistics import ColumnCounts, ColumnStatistic
from dpdask.stats.cell_counts import CellCounts
from dpdask.streams import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSearch:
    """Fine counts of the columns whose cells are found, and what they decide.

    Attributes
    ----------
    names
        The columns.
    event
        The noise: one vector for each level of each column.
    n_rows_public
        Whether neighbours have the same number of rows.
    n_bins
        Into how many cells of equal counts each column is cut; a fine cell with many rows is a cell of its own.
    affords
        Whether so many rows allow these cells: then the most are taken that they allow, up to `n_bins`, and at least one. None: they allow any.

    Privacy
    -------
    Unit, adjacency and sensitivity: those of the event. A row is in one count of each level of each column. Protected: every row
    counted. The cells are post-processing of the noisy counts.
    """

    names: tuple[str, ...]
    event: CentralEvent
    n_rows_public: bool
    n_bins: int = DEFAULT_BINS
    affords: Callable[[Columns, Found, float], bool] | None = None

    @property
    def stage(self) -> str:
        """What the first round does, in words."""
        names = ", ".join(self.names)
        cut = f"cut each into about {self.n_bins} cells of equal counts" + ("" if self.affords is None else ", or fewer if the rows are too few")
        return f"search: read all privatised columns once; count {names} in fine cells, add noise, {cut}"

    @property
    def expectations(self) -> tuple[str, ...]:
        """What the noise of the fine counts allows, in sentences."""
        return (f"{', '.join(self.names)}: {TAILS}",)

    def statistic(self, columns: Columns) -> ColumnStatistic:
        """Return what is counted: every column, since all rows are checked before the first noise."""
        cut = {name: codec for name, codec in columns.codecs.items() if not isinstance(codec, LevelCodec)}
        return ColumnStatistic(
            codecs=columns.codecs, cells={name: make_grid(codec) if name in self.names else cells(codec, 1) for name, codec in cut.items()}
        )

    def draw(self, counts: ColumnCounts, columns: Columns, noise: Noise) -> NoisyHistograms:
        """Draw the noise of the fine counts.

        Parameters
        ----------
        counts
            The exact counts.
        columns
            The table's columns.
        noise
            Returns the random stream of each measurement.
        """
        drawn, n_rows = {}, 0
        for name in self.names:
            counted = counts.columns[name]
            assert isinstance(counted, CellCounts)
            n_rows, exact = counted.n_rows, Hierarchy(make_grid(columns.codecs[name])).count(counted)
            drawn[name] = perturb(exact, self.event, rng=noise(f"cells/{name}"))
        return NoisyHistograms(counts=drawn, events=dict.fromkeys(self.names, self.event), n_rows=n_rows if self.n_rows_public else None)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistograms:
        """Return the noisy fine counts that an earlier driver kept.

        Parameters
        ----------
        data
            The bytes that were kept.
        columns
            The table's columns.

        Raises
        ------
        InputError
            If they are of other columns, or have other noise.
        """
        found = NoisyHistograms.from_bytes(data, "the run's fine counts")
        found.check(dict.fromkeys(self.names, self.event), {name: Hierarchy(make_grid(columns.codecs[name])).size for name in self.names})
        return found

    def find(self, drawn: NoisyHistograms, columns: Columns) -> Found:
        """Return the cells of each column.

        Parameters
        ----------
        drawn
            The noisy fine counts.
        columns
            The table's columns.
        """
        grids = {name: make_grid(columns.codecs[name]) for name in self.names}
        counts = {name: Hierarchy(grid).estimate(drawn.counts[name], self.event, drawn.n_rows) for name, grid in grids.items()}

        noise, tails = deviation(self.event), self.affords is not None

        def cut(n_bins: int) -> Found:
            return {name: find_bins(grid, counts[name], n_bins, noise, tails=tails) for name, grid in grids.items()}

        if self.affords is None:
            return cut(self.n_bins)
        n_rows = sum(float(each.sum()) for each in counts.values()) / len(counts)
        low, high = 1, self.n_bins + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.affords(columns, cut(middle), n_rows) else (low, middle)
        return cut(low)
