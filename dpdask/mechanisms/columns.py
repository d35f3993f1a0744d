"""The columns that the codes of a fitted release stand for, and how they are written into its file."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.archive import Archived, Contents, Json, Named, check_array, require
from dpdask.arrays import Uint32s, freeze_class
from dpdask.cells import DEFAULT_BINS, CutColumns, FoundBins, cells
from dpdask.codec import Codec
from dpdask.computed import View
from dpdask.errors import SpecError
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.privacy.events import Composed
from dpdask.references.hierarchy import make_grid
from dpdask.references.histogram import Bins as GivenBins
from dpdask.references.histogram import Found
from dpdask.schema import Schema
from dpdask.stats import Domain
from dpdask.stats.marginals import domain_of
from dpdask.streams import Rng, words

CHUNK_ROWS = 2**15  # records that are drawn together; what the memory of a worker depends on

Bins = Mapping[str, int | Sequence[float] | FoundBins]
Codes = NDArray[np.integer]


def bins_by_column(
    bins: GivenBins | Bins, columns: CutColumns, found: Found | None = None
) -> dict[str, int | Sequence[float] | FoundBins]:
    """Return how each continuous or mixed column is cut."""
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    given: Named = bins if isinstance(bins, Mapping) else {}
    return {
        name: (found or {}).get(name, given.get(name, usual))
        for name, column in columns.items()
        if len(column.edges)
    }


def describe_bins(bins: Bins, columns: CutColumns) -> dict[str, int | list[float]]:
    """Return bins as a card says them: as they were declared, or the first value of each cell that was found."""
    found: dict[str, int | list[float]] = {}
    for name, each in bins.items():
        found[name] = (
            columns[name].firsts.tolist()
            if isinstance(each, FoundBins)
            else each
            if isinstance(each, int)
            else list(each)
        )
    return found


def _to_header(bins: int | Sequence[float] | FoundBins) -> int | list[float] | Json:
    if isinstance(bins, FoundBins):
        masses = base64.b64encode(zlib.compress(bins.masses.astype("<f4").tobytes())).decode()
        cuts = np.searchsorted(bins.edges, bins.cuts).tolist()
        return {"cuts": cuts, "masses": masses, "numbers": bins.numbers.tolist()}
    return bins if isinstance(bins, int) else list(bins)


def _from_header(written: Any, codec: Codec) -> int | Sequence[float] | FoundBins:
    """Return the bins that `_to_header` wrote."""
    if isinstance(written, list) or (type(written) is int and 1 <= written <= MAX_LEVELS):
        return written
    is_found = isinstance(written, dict) and not codec.has_levels
    require(is_found, "the bins are neither a number of cells, their first values, nor found")
    grid, cuts = make_grid(codec), np.array(written["cuts"])
    n_fine = len(grid.edges) - 1
    data = zlib.decompressobj().decompress(base64.b64decode(written["masses"]), 4 * n_fine + 1)
    masses = np.frombuffer(data, dtype="<f4").astype(np.float64)
    check_array(cuts, np.int64, (len(cuts),), 0, n_fine)
    is_whole = len(cuts) > 1 and (np.diff(cuts) > 0).all() and [*cuts[[0, -1]]] == [0, n_fine]
    require(is_whole, "the cuts are not among the edges of the fine cells")
    check_array(masses, np.float64, (n_fine,), 0.0, np.finfo(np.float64).max)
    numbers = np.array(written.get("numbers", []), dtype=np.float64)  # older files have none
    inside = (numbers > grid.edges[0]) & (numbers <= grid.edges[-1])
    apart = np.diff(np.searchsorted(grid.edges, numbers)) > 0
    require(numbers.ndim == 1 and inside.all() and apart.all(), "numbers in one fine cell, or none")
    return FoundBins(cuts=grid.edges[cuts], edges=grid.edges, masses=masses, numbers=numbers)


def cut_released(names: Iterable[str], schema: Schema, types: pa.Schema, bins: Bins) -> CutColumns:
    """Return the public cells of each named column, in their order.

    Parameters
    ----------
    bins
        How each column is cut; one cell if it is not named.
    """
    codecs = View.of(schema, types).codecs
    return {name: cells(codecs[name], bins.get(name, 1)) for name in names}


def columns_to_header(schema: Schema, types: pa.Schema, bins: Bins) -> Json:
    """Return the privatised columns, and no other, as a part of an archive's header."""
    private = Schema(
        columns={name: schema.columns[name] for name in schema.privatised}, rules=schema.rules
    )
    types_ = base64.b64encode(types.serialize().to_pybytes()).decode()
    return {
        "schema": private.model_dump(exclude_none=True),
        "types": types_,
        "bins": {name: _to_header(each) for name, each in bins.items()},
    }


def columns_from_header(header: Named, domain: Domain) -> tuple[Schema, pa.Schema, Bins]:
    """Return the schema, the Arrow types and the bins that `columns_to_header` wrote."""
    types, written = (
        pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["types"]))),
        header["bins"],
    )
    schema = Schema.from_dict(header["schema"])
    require(sorted(types.names) == sorted(schema.columns), "the types are those of other columns")
    codecs = View.of(schema, types).codecs
    is_counted = codecs.keys() == set(domain.names) and written.keys() <= codecs.keys()
    require(is_counted, "the columns are not those of the counts")
    bins = {name: _from_header(each, codecs[name]) for name, each in written.items()}
    cut = domain_of(cut_released(domain.names, schema, types, bins))
    require(cut == domain, "the cells are not those of the counts")
    return schema, types, bins


@freeze_class(eq=False)
class ReleasedCounts(Archived):
    """Noisy counts with the columns that their codes stand for: no row, no exact count, no key."""

    counts_type: ClassVar[type[Archived]]

    schema: Schema
    columns: pa.Schema  # the Arrow types of the privatised columns, in the order of the table
    bins: Bins  # how each continuous or mixed column is cut
    noisy: Any  # of `counts_type`

    @property
    def view(self) -> View:
        """The columns as they were counted, and how those of the table are made of them."""
        return View.of(self.schema, self.columns)

    @property
    def few_valued(self) -> list[str]:
        """Which columns have few distinct values: those with levels."""
        return [name for name in self.schema.privatised if self.schema.columns[name].has_levels]

    def cells(self) -> CutColumns:
        """Return the public cells of each column, in the order of the domain."""
        return cut_released(self.noisy.domain.names, self.schema, self.columns, self.bins)

    def condition(self, asked: Any) -> Any:
        """Return which records a text or a frame asks for; refused unless they are drawn from a model."""
        what = "records of this release are drawn without conditions"
        raise SpecError(
            what,
            "`where`" if isinstance(asked, str) else "`like`",
            "leave it out, or take the mechanism copula",
        )

    @property
    def event(self) -> Composed:
        """What was drawn."""
        return self.noisy.event

    def _contents(self) -> Contents:
        noisy = np.frombuffer(self.noisy.to_bytes(), dtype=np.uint8)
        return columns_to_header(self.schema, self.columns, self.bins), {"noisy": noisy}

    @classmethod
    def _read_counts(cls, header: Named, arrays: Named) -> Json:
        """Return these fields from what `_contents` wrote."""
        noisy: Any = cls.counts_type.from_bytes(arrays["noisy"].tobytes(), "the noisy counts")
        schema, columns, bins = columns_from_header(header, noisy.domain)
        return {"schema": schema, "columns": columns, "bins": bins, "noisy": noisy}

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        return cls(**cls._read_counts(header, arrays))


def draw_records(
    types: pa.Schema,
    columns: CutColumns,
    chunks: Iterable[Iterable[Codes]],
    open_stream: Callable[[str], Rng],
    places: Mapping[str, Uint32s] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield records: their cells, with a value drawn inside each.

    Parameters
    ----------
    columns
        The public cells of each, in the order of the domain.
    chunks
        The codes of each column, in the order of the domain, for some records after the other.
    open_stream
        Returns the random stream of a column's values inside its cells.
    places
        Of some columns, where in their cells the values of all records lie; see `Cells.draw`.
    """
    # levels are decided by their code alone
    rngs = {name: open_stream(name) for name, column in columns.items() if len(column.edges)}
    none, given, done = np.zeros(0, dtype=np.uint64), places or {}, 0
    for chunk in chunks:
        arrays, n = {}, 0
        for (name, column), codes in zip(columns.items(), chunk, strict=True):
            n = len(codes)
            drawn = words(rngs[name], n) if name in rngs else none
            own = given[name][done : done + n] if name in rngs and name in given else None
            arrays[name] = column.draw(codes, drawn, own)
        done += n
        yield pa.RecordBatch.from_arrays([arrays[name] for name in types.names], schema=types)
