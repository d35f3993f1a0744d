"""Noisy counts as a release publishes them: one row a count, with what it is of and how large its noise is."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from dpdask.arrays import Floats, Ints
from dpdask.cells import Cells, ends
from dpdask.privacy.events import CentralEvent
from dpdask.privacy.noise import deviation

# what a count is of: rows without a value, at one value or level, in a range, or in one that no
# value is in
NULL, ATOM, LEVEL, WHOLE, REAL, EMPTY = "null", "atom", "level", "integers", "numbers", "empty"
SINGLE = (NULL, ATOM, LEVEL)
# a row for each noisy count of a table: the ranges of a level are in the order of their values, and
# each has as many of the next level as any other
COUNTS = pa.schema(
    [
        ("table", pa.string()),
        ("level", pa.int8()),  # 1 is the coarsest
        ("kind", pa.string()),
        ("low", pa.float64()),  # the first value of a range, and its last
        ("high", pa.float64()),
        ("count", pa.int64()),
        ("standard_deviation", pa.float64()),  # of its noise
    ]
)

Counts = Ints


AGAIN, IN_CELLS = ", again", " in cells"  # ends of labels
# of tables of persons: by the band of the number of rows, or by the number; of two different rows
# of a person; of persons whose rows all agree, by band
BY_BAND, NUMBERS, PAIRS, AGREEING = (
    ", by band",
    ", numbers of rows",
    ", pairs of rows",
    ", agreeing",
)


def label_table(*names: str) -> str:
    """Return the name of the table of some columns, a JSON list: no two tables have one."""
    return json.dumps(names, ensure_ascii=False)


def list_table_counts(label: str, noisy: Counts, event: CentralEvent) -> pa.Table:
    """Return the noisy counts of the levels or cells of some columns, in the order of the card's, as `COUNTS` has them."""
    n, nothing = noisy.size, pa.nulls(noisy.size, pa.float64())
    what = {"level": pa.repeat(pa.scalar(1, pa.int8()), n), "kind": pa.repeat(LEVEL, n)}
    rows = pa.table(what | {"low": nothing, "high": nothing})
    return complete_rows(rows, label, noisy.ravel(), event)


def list_cell_counts(cells: Cells, label: str, noisy: Counts, event: CentralEvent) -> pa.Table:
    """Return the noisy counts of the possible cells of a column, or of its levels, as `COUNTS` has them."""
    if cells.codec.has_levels:
        return list_table_counts(label, noisy, event)
    single, low, high = list_ends(cells)
    rows = make_rows(cells, 1, single, low, high)
    return complete_rows(rows.filter(pa.array(cells.possible)), label, noisy, event)


def list_ends(cells: Cells) -> tuple[Floats, Floats, Floats]:
    """Return the value of each single cell, NaN of null, and the first and the last value of each one of the line, NaN if it has none."""
    codec, edges = cells.codec, cells.edges
    single = np.array([*([math.nan] * codec.nulls), *codec.atoms], dtype=np.float64)
    low, high = (edges[:-1] + 1.0, edges[1:]) if codec.lattice else ends(codec, edges)
    possible = cells.possible[len(single) :]
    return single, np.where(possible, low, np.nan) + 0.0, np.where(possible, high, np.nan) + 0.0


def make_rows(cells: Cells, level: int, single: Floats, low: Floats, high: Floats) -> pa.Table:
    """Return the rows of one level, without what is counted."""
    kind = WHOLE if cells.codec.lattice else REAL
    kinds = [NULL if math.isnan(value) else ATOM for value in single.tolist()]
    kinds += [EMPTY if math.isnan(value) else kind for value in low.tolist()]
    first, last = (np.append(single, each) for each in (low, high))
    columns = {"level": np.full(len(kinds), level, dtype=np.int8), "kind": kinds}
    ends_of = {"low": first, "high": last}
    columns |= {name: pa.array(each, from_pandas=True) for name, each in ends_of.items()}
    return pa.table(columns)


def complete_rows(rows: pa.Table, label: str, noisy: Counts, event: CentralEvent) -> pa.Table:
    """Return rows with the noisy counts of a table."""
    n = rows.num_rows
    added = {
        "table": pa.repeat(label, n),
        "count": pa.array(noisy),
        "standard_deviation": pa.repeat(deviation(event), n),
    }
    columns = {each: rows[each] for each in rows.column_names} | added
    return pa.table([columns[each] for each in COUNTS.names], schema=COUNTS)


def write_counts(tables: Iterable[pa.Table]) -> bytes:
    """Return tables of noisy counts as an Arrow file, a batch for each; empty if there are none.

    The same counts give the same bytes. Parquet would do as well, but some readers of a folder of
    Parquet files look into all its folders, and would take counts for rows.
    """
    file, options = io.BytesIO(), pa.ipc.IpcWriteOptions(compression="zstd")
    n_tables = 0
    with pa.ipc.new_file(file, COUNTS, options=options) as writer:
        for n_tables, table in enumerate(tables, 1):  # noqa: B007 - how many there were
            writer.write_batch(table.combine_chunks().to_batches()[0])
    return file.getvalue() if n_tables else b""


def read_counts(data: bytes) -> dict[str, pa.Table]:
    """Return the tables of noisy counts in a file, by name; ValueError or an error of Arrow if it is another file."""
    reader, found = pa.ipc.open_file(io.BytesIO(data)), {}
    if not reader.schema.equals(COUNTS):
        raise ValueError("the file has other columns")
    for place in range(reader.num_record_batches):
        batch = reader.get_batch(place)
        [label], [spread] = (batch[name].unique() for name in ("table", "standard_deviation"))
        if label.as_py() in found or not 0.0 < spread.as_py() < math.inf:
            raise ValueError("a table is there twice, or its noise is not")
        found[label.as_py()] = pa.Table.from_batches([batch])
    return found
