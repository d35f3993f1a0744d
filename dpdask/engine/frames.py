"""Dask and pandas frames as tables: surveyed at once, randomised lazily; streams are named by batch and partition number."""

from __future__ import annotations

import atexit
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa
from dask import delayed
from dask.base import tokenize

from dpdask.engine.batches import FITTED
from dpdask.engine.choose import Chooser
from dpdask.engine.compute import guarded, run_tasks, task_prefix
from dpdask.engine.published import check_index, declared_schema, plain_kept, published_meta
from dpdask.engine.reduce import tree_reduce
from dpdask.engine.release import with_bounds
from dpdask.engine.rows import DIP_ROWS, Rows
from dpdask.engine.seal import check_part
from dpdask.engine.selection import filter_rows
from dpdask.engine.survey import Statistic, Survey, merge_surveys, reduce_units, survey_batches, unit_rows_of_batches
from dpdask.engine.work import TableWork, table_work
from dpdask.errors import DataError
from dpdask.io.storage import Folder, absolute_url
from dpdask.privacy import UnitColumn
from dpdask.references import Reference
from dpdask.schema import Schema
from dpdask.stats.bounding import UnitRows

Frame: TypeAlias = Any  # a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree


def secret_folder(secrets: str | None) -> Folder:
    """Return a new private folder for a run key, removed when Python ends: inside `secrets`, or temporary."""
    if secrets is None:
        folder = Folder(absolute_url(tempfile.mkdtemp(prefix="dpdask-")))
    else:
        folder = Folder(absolute_url(secrets)).child(f"release-{uuid.uuid4().hex[:12]}")
        folder.create(private=True)
    atexit.register(folder.remove)
    return folder


def forget_secrets(folder: Folder) -> None:
    """Remove the key, the units' bounds and the seals from a folder, once nothing that follows needs a secret."""
    for name in folder.names():
        folder.child(name).remove()


def identity(frame: Frame) -> str:
    """Return what identifies a frame: its content for pandas, its expression for Dask. No stream is named by it."""
    return str(tokenize(frame)) if isinstance(frame, pd.DataFrame) else str(frame._name)


def parts_of(frame: Frame, batch: str) -> list[tuple[str, Any]]:
    """Return each partition with its fragment id, fixed now, because Dask's optimiser may renumber partitions.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    batch
        The name that `batches.Batches.take` returned for it, or `batches.PUBLIC`.
    """
    parts = [frame] if isinstance(frame, pd.DataFrame) else frame.to_delayed(optimize_graph=False)
    return [(blake2b(f"{batch}:{number}".encode(), digest_size=16).hexdigest(), part) for number, part in enumerate(parts)]


def frame_types(frame: Frame) -> pa.Schema:
    """Return the Arrow types of a frame's columns; nothing is computed."""
    meta = meta_of(frame)
    return pa.schema([pa.field(name, _arrow_type(meta[name])) for name in meta])


def meta_of(frame: Frame) -> pd.DataFrame:
    """Return an empty frame of a frame's columns and index."""
    return frame.head(0) if isinstance(frame, pd.DataFrame) else frame._meta


def frame_work(frame: Frame, schema: Schema, reference: Reference | None, secrets: Folder, unit: UnitColumn | None = None) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema; nothing is computed."""
    return table_work(frame_types(frame), declared_schema(meta_of(frame), schema, lazy=not isinstance(frame, pd.DataFrame)), reference, secrets, unit)


def _arrow_type(column: pd.Series) -> pa.DataType:
    """Return the Arrow type of an empty column; one of plain objects is taken for text."""
    return pa.string() if column.dtype == object else pa.Schema.from_pandas(column.to_frame(), preserve_index=False).field(0).type


def survey_frame(frame: Frame, work: TableWork, batch: str) -> Mapping[str, Statistic]:
    """Compute the statistics of a frame's reference rows: the barrier.

    Parameters
    ----------
    frame, batch
        As for `parts_of`.
    work
        The work on it.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    prefix, call = task_prefix("survey"), delayed(_survey_part, pure=False)
    parts = enumerate(parts_of(frame, batch))
    leaves = [call(part, fragment_id, number, work, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in parts]
    [found] = run_tasks("survey", [tree_reduce(leaves, merge_surveys, task_prefix("merge"))])
    assert isinstance(found, Survey)
    return found.statistics


def randomise_frame(frame: Frame, work: TableWork, release_sha256: str, batch: str, kind: Rows = DIP_ROWS) -> Frame:
    """Return a frame's released rows: lazily for Dask, at once for pandas. The same batch always has the same noise.

    Parameters
    ----------
    frame, batch
        As for `parts_of`.
    work, release_sha256
        The work on it, and the fitted release.
    kind
        How rows are changed.
    """
    meta = _shown_meta(meta_of(frame), work, kind)
    parts = parts_of(frame, batch)
    if isinstance(frame, pd.DataFrame):
        [(fragment_id, part)] = parts
        return _randomise_part(part, fragment_id, 0, work, release_sha256, kind, meta)
    prefix, call = task_prefix("transform"), delayed(_randomise_part, pure=False)
    calls = [
        call(part, fragment_id, number, work, release_sha256, kind, meta, dask_key_name=f"{prefix}-{number}")
        for number, (fragment_id, part) in enumerate(parts)
    ]
    import dask.dataframe as dd  # slow to import: files and pandas do not need it, nor do workers

    whole = (work.fraction is None and work.unit is None) or frame._meta.index.name is None
    divisions = frame.divisions if frame.known_divisions and whole else None  # values of an index may be of rows that are not released
    return dd.from_delayed(calls, meta=meta, divisions=divisions, prefix=prefix, verify_meta=True)


def bound_frame(frame: Frame, work: TableWork) -> TableWork:
    """Return the work with the bounds of the fitted frame's units: a barrier, when the unit is not the row.

    Raises
    ------
    DataError
        If a row's unit is null.
    """
    if work.unit is None:
        return work
    prefix, call = task_prefix("units"), delayed(_units_of_part, pure=False)
    parts = enumerate(parts_of(frame, FITTED))
    leaves = [call(part, fragment_id, number, work, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in parts]
    return with_bounds(work, reduce_units(leaves))


def batch_of(part: pd.DataFrame, columns: Sequence[str], types: pa.Schema) -> pa.RecordBatch:
    """Return some columns of a partition as Arrow, without dictionaries."""
    plain = [types.field(name).type.value_type if pa.types.is_dictionary(types.field(name).type) else types.field(name).type for name in columns]
    try:
        wanted = pa.schema(list(zip(columns, plain, strict=True)))
        rows = pa.Table.from_pandas(part[list(columns)], schema=wanted, preserve_index=False).combine_chunks()  # texts may come in chunks
        return rows.to_batches()[0] if rows.num_rows else pa.RecordBatch.from_pylist([], wanted)
    except (pa.ArrowException, KeyError, TypeError, ValueError):  # these quote values
        raise DataError("a partition's values do not fit the frame's dtypes", "frame", "give every partition the dtypes of its meta") from None


@guarded
def _units_of_part(part: pd.DataFrame, fragment_id: str, number: int, work: TableWork) -> UnitRows:
    check_part(part, work.secrets, fragment_id)
    return unit_rows_of_batches([batch_of(part, work.unit_columns, work.types)], number, work)


@guarded
def _survey_part(part: pd.DataFrame, fragment_id: str, number: int, work: TableWork) -> Survey:
    check_index(part.index, part.index.names)  # before ε is spent on a frame that could not be released
    check_part(part, work.secrets, fragment_id)
    return survey_batches([batch_of(part, work.sealed, work.types)], Chooser(work, fragment_id, number), work)


@guarded
def _randomise_part(part: pd.DataFrame, fragment_id: str, number: int, work: TableWork, sha256: str, kind: Rows, meta: pd.DataFrame) -> pd.DataFrame:
    key = work.key()  # first: once the key is gone, nothing else is read or written
    check_index(part.index, meta.index.names)
    check_part(part, work.secrets, fragment_id)
    release = kind.load(work.secrets, sha256)
    batch = batch_of(part, work.sealed, work.types)
    chosen, _ = Chooser(work, fragment_id, number).split(batch)
    rows = filter_rows(batch.select([*work.codecs, *work.group_columns]), chosen)
    random = release.randomise(rows, work.codecs, release.streams(key, fragment_id))
    random = random.select([name for name in random.schema.names if name not in work.group_columns])
    kept = [name for name in meta.columns if name not in random.schema.names]
    released = plain_kept(part.loc[chosen, kept].copy(), meta)
    released.attrs = {}
    for name in random.schema.names:
        released[name] = _series(random.column(name), meta[name].dtype, released.index)
    return released[list(meta.columns)]


def _series(array: pa.Array, dtype: Any, index: pd.Index) -> pd.Series:
    """Return an Arrow array as a column of a dtype, every value exactly: nullable dtypes take no way round by floats."""
    if hasattr(dtype, "__from_arrow__"):
        return pd.Series(dtype.__from_arrow__(array), index=index)
    column: pd.Series = array.to_pandas().set_axis(index).astype(dtype)
    return column


def _shown_meta(meta: pd.DataFrame, work: TableWork, kind: Rows) -> pd.DataFrame:
    """Return the empty released frame, with new columns where a kind of release makes some."""
    shown, schema = published_meta(meta, work), kind.released(work)
    for name in schema.names:
        if name not in work.released.names:
            shown[name] = pd.Series(dtype=schema.field(name).type.to_pandas_dtype(), index=shown.index)
    return shown[schema.names]
