"""Dask and pandas frames counted at once, and synthetic records as a lazy frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from dask import delayed

from dpdask.engine.batches import FITTED
from dpdask.engine.choose import Chooser
from dpdask.engine.compute import guarded, task_prefix
from dpdask.engine.frames import Frame, batch_of, frame_types, meta_of, parts_of
from dpdask.engine.published import check_index
from dpdask.engine.seal import check_part
from dpdask.engine.synthesise import drawn_batches, load_copula, load_histogram, record_batches
from dpdask.engine.tabulate import Counted, Tables, Tabulated, domain_of, merged, shared_work, tabulate_batches
from dpdask.engine.work import TableWork, tabulated_work
from dpdask.errors import DataError, SpecError
from dpdask.io.storage import Folder
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.privacy import UnitColumn
from dpdask.references.histogram import MAX_BINS
from dpdask.schema import Schema
from dpdask.stats import MarginalCounter, Marginals
from dpdask.streams import RunKey, fresh_seed


def frame_tables_work(frame: Frame, schema: Schema, bins: Any, secrets: Folder, unit: UnitColumn | None = None) -> TableWork:
    """Return the work on a frame whose privatised columns are counted, checked against the schema; nothing is computed.

    Raises
    ------
    DataError, SpecError
        If the frame does not fit the schema, or the bins are none.
    """
    for each in bins.values() if isinstance(bins, Mapping) else [bins]:
        listed = isinstance(bins, Mapping) and isinstance(each, list | tuple) and all(type(first) in (int, float) for first in each)
        if not listed and (type(each) is not int or not 1 <= each <= MAX_BINS):
            what = f"a number of cells from 1 to {MAX_BINS:,} is expected, or of a named column a list of the first value of each cell"
            raise SpecError(what, "bins", "correct them")
    return tabulated_work(frame_types(frame), _counted_schema(frame, schema), bins, secrets, unit)


def _counted_schema(frame: Frame, schema: Schema) -> Schema:
    """Return the schema without the frame's index, which is neither counted nor released, so that any will do if it is declared.

    Raises
    ------
    DataError
        If a column is not declared, or the index is to be privatised.
    """
    meta = meta_of(frame)
    index = [name for name in meta.index.names if name is not None and name not in meta.columns]
    schema.check_names([*index, *meta.columns])
    for name in index:
        if name in schema.privatised:
            raise DataError("an index is not counted, and its role is privatise", f"index {name!r}", "make it a column: reset_index()")
    return Schema(columns={name: column for name, column in schema.columns.items() if name not in index}) if index else schema


def tabulate_frame(frame: Frame, work: TableWork, tables: Tables, *, released: bool = False) -> Marginals:
    """Return the exact tables of a frame: the barrier.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    work, tables, released
        As for `tabulate.Counted`.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    prefix, call = task_prefix("tabulate"), delayed(_tabulate_part, pure=False)
    shared, parts = shared_work(work, tables, released=released), enumerate(parts_of(frame, FITTED))
    return merged([call(part, fragment_id, number, shared, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in parts]).counts


@guarded
def _tabulate_part(part: pd.DataFrame, fragment_id: str, number: int, counted: Counted) -> Tabulated:
    work, tables = counted.work, counted.tables
    if counted.released:
        check_index(part.index, part.index.names)
    if work.unit is not None or counted.released:
        check_part(part, work.secrets, fragment_id)
    counter = MarginalCounter(domain_of(work.cells), tables.cliques, two_way=tables.two_way)
    batches = [batch_of(part, [*work.codecs, *work.unit_columns], work.types)]
    n_rows, changed = tabulate_batches(batches, Chooser(work, fragment_id, number), counted, counter)
    return Tabulated(counts=counter.result(), n_released=(n_rows,), changed=changed)


def sample_frame(
    fitted: FittedCopula | FittedHistogram, folder: Folder, sha256: str, n_rows: int | None, rows_per_partition: int, seed: int | None
) -> Frame:
    """Return a lazy Dask frame of synthetic records.

    Parameters
    ----------
    fitted
        The copula or the perturbed histogram, for its columns.
    folder, sha256
        Where the workers read it.
    n_rows, rows_per_partition
        The number of records (None: as many as `fitted` says), and of records in a partition.
    seed
        Decides the records; no secret, because they are post-processing. None for a fresh one.

    Raises
    ------
    SpecError
        If a number is out of range.
    """
    for name, value in (("n_rows", 1 if n_rows is None else n_rows), ("rows_per_partition", rows_per_partition)):
        if type(value) is not int or value < 1:
            raise SpecError("must be a whole number, at least 1", name)
    seed = fresh_seed() if seed is None else seed
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise SpecError("must be a whole number, at least 0 and below 2**64", "seed")
    prefix = task_prefix("sample")
    call = delayed(_sample_part if isinstance(fitted, FittedCopula) else _draw_part, pure=False)
    n_drawn = fitted.n_drawn(n_rows)
    starts = range(0, max(1, n_drawn), rows_per_partition)
    calls = [
        call(folder, sha256, min(rows_per_partition, n_drawn - start), start, seed, number, dask_key_name=f"{prefix}-{number}")
        for number, start in enumerate(starts)
    ]
    ends = [*starts, max(0, n_drawn - 1)]
    import dask.dataframe as dd  # slow to import: files and pandas do not need it, nor do workers

    return dd.from_delayed(calls, meta=_frame_of(fitted, fitted.types.empty_table(), 0), divisions=tuple(ends), prefix=prefix, verify_meta=True)


@guarded
def _sample_part(folder: Folder, sha256: str, n_rows: int, start: int, seed: int, number: int) -> pd.DataFrame:
    fitted = load_copula(folder, sha256)
    key = RunKey.insecure(seed)
    batches = record_batches(fitted, n_rows, lambda purpose: fitted.model.stream(key, f"{number}/{purpose}"))
    return _frame_of(fitted, pa.Table.from_batches(batches, fitted.types), start)


@guarded
def _draw_part(folder: Folder, sha256: str, n_rows: int, start: int, seed: int, number: int) -> pd.DataFrame:
    fitted = load_histogram(folder, sha256)
    batches = drawn_batches(fitted, n_rows, RunKey.insecure(seed), str(number))
    return _frame_of(fitted, pa.Table.from_batches(batches, fitted.types), start)


def _frame_of(fitted: FittedCopula | FittedHistogram, table: pa.Table, start: int) -> pd.DataFrame:
    """Return records as a frame; whole numbers and truth values that may be null keep their type by Arrow's own dtypes."""
    exact = {
        field.name: pd.ArrowDtype(field.type)
        for field in fitted.types
        if fitted.schema.columns[field.name].nulls == "level" and (pa.types.is_integer(field.type) or pa.types.is_boolean(field.type))
    }
    plain = table.to_pandas().set_axis(pd.RangeIndex(start, start + table.num_rows))
    for name, dtype in exact.items():
        plain[name] = pd.Series(dtype.__from_arrow__(table.column(name)), index=plain.index)
    result: pd.DataFrame = plain
    return result
