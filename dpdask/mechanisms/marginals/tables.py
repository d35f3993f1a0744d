"""What the mechanisms that add noise to contingency tables have in common: the cells, the draw, and what is kept of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpdask.cells import Cells, cut_columns
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.noisy_counts import NoisyCounts
from dpdask.privacy.events import Composed
from dpdask.stats import MarginalCounts
from dpdask.stats.tables import domain_of
from dpdask.streams import Noise

if TYPE_CHECKING:
    from dpdask.references.bins import Bins


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

    @property
    def event(self) -> Composed:
        """One noisy table after the other."""
        return self.noise.event

    def cells(self, columns: Columns) -> dict[str, Cells]:
        """Return the cells of each privatised column."""
        return cut_columns(columns.codecs, self.bins)

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of every table and return the noisy tables; see `Mechanism.draw`."""
        del columns
        return measure(counts, self.noise, n_rows_public=not self.n_rows_private, rng=noise("marginals/noise"))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyMarginals:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyMarginals.from_bytes(data, "the run's noisy tables")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found
