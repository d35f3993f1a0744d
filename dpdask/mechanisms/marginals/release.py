"""Released noisy tables with the columns that their cells stand for: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive
from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.errors import SpecError
from dpdask.mechanisms.columns import ReleasedCounts
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.stats import Clique
from dpdask.streams import RunKey

if TYPE_CHECKING:
    import pandas as pd

TABLE = "table"
COUNT = "count"
MARGIN = "margin_95"


def make_types(cliques: Iterable[tuple[str, ...]], *, persons: bool = False) -> pa.Schema:
    """Return the columns in which tables are written; a count of persons may hold parts of them."""
    names = dict.fromkeys(name for clique in cliques for name in clique)
    return pa.schema(
        [
            (TABLE, pa.string()),
            *((name, pa.string()) for name in names),
            (COUNT, pa.float64() if persons else pa.int64()),
            (MARGIN, pa.float64()),
        ]
    )


@freeze_class(eq=False)
class MarginalTables(ReleasedCounts):
    """Noisy contingency tables, written one row a cell."""

    archive: ClassVar = Archive(
        kind="marginals", format=2, noun="release of noisy tables", is_compressed=True
    )

    counts_type: ClassVar = NoisyMarginals

    noisy: NoisyMarginals

    def table(self, clique: Clique) -> Any:
        """Return one noisy table, an int64 array with an axis for each of its columns, in the order asked for; may be negative. Of persons it is a float64 array."""
        counts = self.noisy.table(self._check_clique(clique))
        return counts / self._count_parts(clique) if self.noisy.noise.parts else counts

    def margin(self, clique: Clique) -> float:
        """Return the half-width, in rows or persons, of a 95 % interval for one cell of a table."""
        return self.noisy.margin(self._check_clique(clique)) / self._count_parts(clique)

    def _count_parts(self, clique: Clique) -> int:
        """Return of how many parts a count of 1 is."""
        parts = self.noisy.noise.parts.items()
        return next((each for known, each in parts if {*known} == {*clique}), 1)

    def to_frame(self, clique: Clique) -> pd.DataFrame:
        """Return one noisy table as a frame: the labels of each of its columns, `count`, and `margin_95`."""
        counts = self.table(clique)
        rows = self._make_rows(clique, counts, self._labels(), np.arange(counts.size))
        table = pa.table({name: rows[name] for name in (*clique, COUNT, MARGIN)})
        return table.to_pandas()

    def _check_clique(self, clique: Clique) -> Clique:
        if sorted(clique) not in map(sorted, self.noisy.cliques):
            tables = ", ".join(" x ".join(known) for known in self.noisy.cliques)
            what = f"there is no table of the columns {list(clique)}"
            raise SpecError(what, "the noisy tables", f"ask for one of {tables}")
        return clique

    @property
    def types(self) -> pa.Schema:
        """The columns that are written: `table`, one text for each column of any table, `count`, `margin_95`."""
        return make_types(self.noisy.cliques, persons=bool(self.noisy.noise.parts))

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values: all but the counts."""
        return [name for name in self.types.names if name != COUNT]

    @property
    def n_cells(self) -> int:
        """How many cells all tables have together."""
        return sum(counts.size for counts in self.noisy.cliques.values())

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many rows are written: one for each cell."""
        if wanted is not None:
            what = "tables are no sample, so no number of rows can be chosen"
            raise SpecError(what, "n_rows", "leave it out to get every cell")
        return self.n_cells

    def batches(
        self, start: int, n_rows: int, n_total: int, key: RunKey, part: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield cells as rows: the labels, the count (may be negative) and the margin of error.

        A column that is not of the table is null; the level null is the text `null`.
        """
        types, labels, first = self.types, self._labels(), 0
        for clique in self.noisy.cliques:
            counts = self.table(clique)
            places = np.arange(max(start, first), min(start + n_rows, first + counts.size)) - first
            first += counts.size
            if len(places):
                rows = self._make_rows(clique, counts, labels, places)
                null = pa.nulls(len(places), pa.string())
                arrays = [rows.get(name, null) for name in types.names]
                yield pa.RecordBatch.from_arrays(arrays, schema=types)

    def _labels(self) -> dict[str, list[str]]:
        return {name: column.labels() for name, column in self.cells().items()}

    def _make_rows(
        self,
        clique: Clique,
        counts: Ints | Floats,
        labels: Mapping[str, list[str]],
        places: Ints,
    ) -> dict[str, pa.Array]:
        """Return some cells of a table, by their places in it, as columns."""
        codes = np.unravel_index(places, counts.shape)
        return {
            TABLE: pa.array([" x ".join(clique)] * len(places)),
            **{
                name: pa.array(labels[name]).take(pa.array(code))
                for name, code in zip(clique, codes, strict=True)
            },
            COUNT: pa.array(counts.ravel()[places]),
            MARGIN: pa.array([self.margin(clique)] * len(places)),
        }
