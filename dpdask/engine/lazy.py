"""Lazy frames of any release: the randomised rows of a frame, or records; every partition is a function of its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from dask import delayed

from dpdask.engine.compute import guard, task_prefix
from dpdask.engine.scan import Chooser, filter_rows
from dpdask.engine.source import (
    LISTS,
    Frame,
    FramePart,
    FrameSource,
    as_frame,
    check_index,
    find_meta,
)
from dpdask.engine.work import TableWork, load
from dpdask.errors import DataError, SpecError
from dpdask.io.parquet import read_schema, read_shard
from dpdask.io.storage import Folder
from dpdask.mechanisms.mechanism import RecordRelease, RowRelease
from dpdask.streams import RunKey, fresh_seed

_COPIED = (*LISTS, pa.types.is_struct)
_EXACT = {pa.int64(): pd.Int64Dtype(), pa.uint64(): pd.UInt64Dtype()}
_NOT_COPIED = (pa.types.is_dictionary, pa.types.is_string_view, pa.types.is_binary_view)
_OBJECTS = (
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary),
    *(pa.types.is_date, pa.types.is_time, pa.types.is_decimal, pa.types.is_nested),
)
MAX_PARTITIONS = 10**6  # of drawn records: a graph of gigabytes


def transform_frame(
    source: FrameSource, release: RowRelease, sha256: str, work: TableWork
) -> Frame:
    """Return a frame's released rows: lazily for Dask, at once for pandas. The same batch always has the same noise.

    Parameters
    ----------
    release, sha256
        The fitted release, and the digest by which tasks read it.
    """
    frame, released_types = source.frame, release.types(work.released)
    meta = _make_published_meta(find_meta(frame), work)
    for name in released_types.names:  # the columns that the release makes
        if name not in work.released.names:
            dtype = released_types.field(name).type.to_pandas_dtype()
            meta[name] = pd.Series(dtype=dtype, index=meta.index)
    shared = work, sha256, type(release), meta[released_types.names]
    if isinstance(frame, pd.DataFrame):
        [(part, rows)] = source.parts
        return _transform_part(rows, part, *shared)
    # values of an index may be of rows that are not released
    whole = (work.fraction is None and work.unit is None) or frame._meta.index.name is None
    divisions = frame.divisions if frame.known_divisions and whole else None
    rows, parts = frame.to_delayed(optimize_graph=False), source.parts
    arguments = [(own, part, *shared) for own, (part, _) in zip(rows, parts, strict=True)]
    return _make_lazy("transform", _transform_part, arguments, shared[-1], divisions)


def _make_lazy(
    stage: str,
    function: Callable[..., pd.DataFrame],
    arguments: Sequence[tuple[Any, ...]],
    meta: pd.DataFrame,
    divisions: Any = None,
    *,
    verify_meta: bool = True,
) -> Frame:
    """Return a lazy frame with a partition for each call of a function."""
    import dask.dataframe as dd  # slow to import: files and pandas do not need it, nor do workers

    prefix, call = task_prefix(stage), delayed(function, pure=False)
    keys = (f"{prefix}-{number}" for number in range(len(arguments)))
    calls = [call(*each, dask_key_name=key) for key, each in zip(keys, arguments, strict=True)]
    named: dict[str, Any] = {"meta": meta, "divisions": divisions, "prefix": prefix}
    return dd.from_delayed(calls, **named, verify_meta=verify_meta)


@guard
def _transform_part(
    rows: pd.DataFrame,
    part: FramePart,
    work: TableWork,
    sha256: str,
    release_type: type[Any],
    meta: pd.DataFrame,
) -> pd.DataFrame:
    work = work.hold_keys()
    key = work.key()  # first: once the key is gone, nothing else is read or written
    check_index(rows.index, meta.index.names)

    def transform() -> Iterator[pd.DataFrame]:
        """Yield the released rows of each batch."""
        release: RowRelease | None = None
        start = 0
        for batch in part.read(rows, work, released=True):
            if release is None:
                release = load(work.secrets, sha256, release_type)
                chooser = Chooser(work, part.id, part.number)
                streams = release.streams(key, part.id)
            chosen, _ = chooser.split(batch)
            private = filter_rows(batch.select([*work.view.own, *work.also_read]), chosen)
            drawn = release.randomise(work.view.read(private), work.codecs, streams)
            random = work.view.write(drawn)
            names = [name for name in random.schema.names if name not in work.also_read]
            kept = [name for name in meta.columns if name not in names]
            own = rows.iloc[start : start + batch.num_rows]
            released = _convert_kept(own.loc[chosen, kept].copy(), meta)
            for name in names:
                values = _series(random.column(name), meta[name].dtype, released.index)
                released[name] = _uncover(values)
            yield released[list(meta.columns)]
            start += batch.num_rows

    return _join(transform(), len(rows))


def _join(pieces: Iterator[pd.DataFrame], most: int) -> pd.DataFrame:
    """Return frames of few rows as one of at most so many; columns of NumPy's dtypes are held once."""
    made: dict[str, Any] = {}
    indices, n_rows = [], 0
    for piece in pieces:
        indices.append(piece.index)
        for name, column in piece.items():
            if isinstance(column.dtype, np.dtype):
                if name not in made:
                    made[name] = np.empty(most, column.dtype)
                # a value of another dtype is an error, and is not changed in silence
                np.copyto(made[name][n_rows : n_rows + len(piece)], column, casting="no")
            else:
                made.setdefault(name, []).append(column)
        n_rows += len(piece)
    index = indices[0].append(indices[1:])
    for name, own in made.items():
        if isinstance(own, list):
            made[name] = pd.concat(own, ignore_index=True).set_axis(index)
        else:  # no memory behind the rows, where others may have been
            own.resize(n_rows, refcheck=False)
            made[name] = pd.Series(own, index, own.dtype, copy=False)  # texts stay objects
    return pd.DataFrame(made, index, piece.columns, copy=False)


def _series(array: pa.ChunkedArray, dtype: Any, index: pd.Index) -> pd.Series:
    """Return an Arrow array as a column of a dtype, every value exactly: nullable dtypes take no way round by floats."""
    if hasattr(dtype, "__from_arrow__"):
        return pd.Series(dtype.__from_arrow__(array), index=index)
    column: pd.Series = (
        array.to_pandas(integer_object_nulls=pd.api.types.is_object_dtype(dtype))
        .set_axis(index)
        .astype(dtype)
    )
    return column


def _make_published_meta(meta: pd.DataFrame, work: TableWork) -> pd.DataFrame:
    """Return the empty released frame. The categories of a private categorical become its public levels; kept ones become plain values."""
    released = meta[work.released.names].copy()
    for name in released.columns:
        codec, dtype = work.view.own.get(name), released[name].dtype
        if codec is not None and codec.has_levels and isinstance(dtype, pd.CategoricalDtype):
            levels = codec.own.drop_null().to_pandas()
            dtype = pd.CategoricalDtype(levels, ordered=codec.ordered)
            released[name] = released[name].astype(dtype)
            continue
        plain = _find_plain_dtype(dtype)
        if work.view.schema.columns[name].nulls == "level":
            plain = _nullable(plain)
        released[name] = _uncover(released[name].astype(plain))
    # whether pandas has type hints depends on what is installed
    result: pd.DataFrame = released.set_axis(_plain_index(released.index))
    return result


def _convert_kept(kept: pd.DataFrame, meta: pd.DataFrame) -> pd.DataFrame:
    """Return the kept columns of released rows in the dtypes of the empty released frame."""
    for name in kept.columns:
        dtype, wanted = kept[name].dtype, meta[name].dtype
        check_kept_dtype(name, dtype)
        plain = _find_plain_dtype(dtype)
        if plain != dtype:
            texts = pd.api.types.is_string_dtype(plain) and pd.api.types.is_string_dtype(wanted)
            if plain != wanted and not texts:
                what = "a partition's values do not fit the frame's dtypes"
                hint = "give every partition the dtypes of its meta"
                raise DataError(what, f"column {name!r}", hint)
            kept[name] = pd.Series(_find_values(kept[name], wanted), index=kept.index)
        kept[name] = _uncover(kept[name])
    result: pd.DataFrame = kept.set_axis(_plain_index(kept.index))
    return result


def _find_values(column: pd.Series | pd.Index, plain: Any) -> Any:
    """Return values without categories as a dtype, each exactly: pandas itself takes the way over floats where one is null."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return column.astype(plain).array
    return pd.array(column.dtype.categories.astype(plain), dtype=plain).take(
        column.array.codes, allow_fill=True
    )


def check_kept_dtype(name: str, dtype: Any) -> None:
    """Check that the values of released rows can be told from those of other rows: a dictionary or a view inside a value cannot be cut."""
    if isinstance(dtype, pd.CategoricalDtype):
        ranges, dtype = dtype.categories, dtype.categories.dtype
        # released as float64
        whole = isinstance(dtype, pd.IntervalDtype) and dtype.subtype.kind in "iu"
        if whole and any(abs(int(end)) > 2**53 for end in (*ranges.left, *ranges.right)):
            what = "its categories are ranges whose ends float64 does not hold: whole numbers beyond ±2**53"
            raise DataError(what, f"column {name!r}", "make texts of them, or drop it")
    if not isinstance(dtype, pd.ArrowDtype):
        return
    arrow = dtype.pyarrow_dtype
    if not _is_own(arrow.value_type if pa.types.is_dictionary(arrow) else arrow):
        what = "its values hold dictionaries or views, which may hold values of rows that are not released"
        raise DataError(
            what, f"column {name!r}", "cast it to an Arrow type without them, or drop it"
        )


def _is_own(arrow: pa.DataType) -> bool:
    """Return whether some rows of a column can be copied without anything of the others."""
    if isinstance(arrow, pa.BaseExtensionType):
        return _is_own(arrow.storage_type)
    if any(is_one(arrow) for is_one in _COPIED):
        return all(_is_own(arrow.field(number).type) for number in range(arrow.num_fields))
    return not (pa.types.is_nested(arrow) or any(is_one(arrow) for is_one in _NOT_COPIED))


def _uncover(column: Any) -> Any:
    """Return a column or an index in memory of its own: without what lies behind its nulls, and in Arrow beside its rows."""
    dtype = column.dtype
    if not pd.api.types.is_extension_array_dtype(dtype):
        return column
    array = column.array
    if isinstance(array, pd.arrays.ArrowExtensionArray):
        parts = array.__arrow_array__()
        own = dtype.__from_arrow__(
            pa.chunked_array([*map(_uncover_arrow, parts.chunks)], parts.type)
        )
    else:
        known = ~np.asarray(array.isna())
        own = array[known].take(np.where(known, np.cumsum(known) - 1, -1), allow_fill=True)
    return (
        pd.Index(own, name=column.name)
        if isinstance(column, pd.Index)
        else pd.Series(own, column.index, name=column.name)
    )


def _uncover_arrow(array: pa.Array) -> pa.Array:
    """Return an array of the same values, at any depth without those behind a null; Arrow itself copies the fields of a struct that is null."""
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return type_.wrap_array(_uncover_arrow(array.storage))
    if pa.types.is_struct(type_) and type_.num_fields:
        return pa.StructArray.from_arrays(
            [*map(_uncover_arrow, array.flatten())], fields=[*type_], mask=array.is_null()
        )
    own = array.take(pa.array(range(len(array)), pa.int64()))
    if pa.types.is_struct(type_) or not pa.types.is_nested(type_):
        return own
    return pa.Array.from_buffers(
        type_, len(own), own.buffers()[: type_.num_buffers], children=[_uncover_arrow(own.values)]
    )


def _find_plain_dtype(dtype: Any) -> Any:
    """Return the dtype of a column's values without categories; it allows nulls for whole numbers and booleans."""
    if isinstance(dtype, pd.ArrowDtype):
        arrow = dtype.pyarrow_dtype
        return pd.ArrowDtype(arrow.value_type) if pa.types.is_dictionary(arrow) else dtype
    if not isinstance(dtype, pd.CategoricalDtype):
        return dtype
    plain = dtype.categories.dtype
    if isinstance(plain, pd.IntervalDtype) and plain.subtype.kind in "iu":
        return pd.IntervalDtype("float64", plain.closed)  # the dtype that pandas uses beside a null
    return _nullable(plain)


def _nullable(plain: Any) -> Any:
    """Return a dtype that holds the same values and null."""
    if pd.api.types.is_extension_array_dtype(plain) or plain.kind not in "iub":
        return plain
    return (
        pd.BooleanDtype()
        if plain.kind == "b"
        else pd.api.types.pandas_dtype(f"{'U' if plain.kind == 'u' else ''}Int{8 * plain.itemsize}")
    )


def _plain_index(index: pd.Index) -> pd.Index:
    plain = _find_plain_dtype(index.dtype)
    return _uncover(
        index if plain == index.dtype else pd.Index(_find_values(index, plain), name=index.name)
    )


def sample_frame(
    release: RecordRelease,
    folder: Folder,
    sha256: str,
    n_rows: int | None,
    rows_per_partition: int,
    seed: int | None,
    where: str | None = None,
    like: Any = None,
) -> Frame:
    """Return a lazy Dask frame of records.

    Parameters
    ----------
    n_rows, rows_per_partition
        The number of records (None: as many as the release says), and of records in a partition.
    seed
        Decides the records; no secret, because they are post-processing. None for a fresh one.
    where, like
        Which records are wanted, or a public frame that each has the values of a row of; None for
        all.
    """
    given = None if like is None else read_like(release, like, n_rows, where)
    if given is not None:
        n_rows = given.n_rows
    elif where is not None:
        release.condition(where)  # refused here, and read again by each task
    check_count("n_rows", 1 if n_rows is None else n_rows)
    check_count("rows_per_partition", rows_per_partition)
    seed = check_seed(seed)
    n_drawn = release.n_drawn(n_rows)
    if n_drawn > MAX_PARTITIONS * rows_per_partition:
        what = f"{n_drawn:,} records would be more than {MAX_PARTITIONS:,} partitions"
        raise SpecError(what, "n_rows", "ask for fewer, or raise `rows_per_partition`")
    starts = range(0, max(1, n_drawn), rows_per_partition)
    arguments: list[tuple[Any, ...]] = []
    for number, start in enumerate(starts):
        n = min(rows_per_partition, n_drawn - start)
        asked = where if given is None else given.part(start, start + n)
        shared = folder, sha256, type(release), seed, n_drawn, asked
        arguments.append((*shared, start, n, number))
    meta = record_frame(release, release.types.empty_table(), 0)
    divisions = (*starts, max(0, n_drawn - 1))
    return _make_lazy("sample", _sample_part, arguments, meta, divisions)


def read_like(release: RecordRelease, like: Any, n_rows: int | None, where: str | None) -> Any:
    """Return what a public frame asks for."""
    if n_rows is not None or where is not None:
        what = "the frame says how many records, and which"
        raise SpecError(what, "`like`", "leave `n_rows` and `where` out")
    return release.condition(as_frame(like))


def check_count(name: str, value: int) -> int:
    """Return a parameter that counts rows."""
    if type(value) is not int or value < 1:
        raise SpecError(f"must be a whole number of at least 1, not {value!r}", name)
    return value


def check_seed(seed: int | None) -> int:
    """Return the seed of records, a fresh one if none is given."""
    seed = fresh_seed() if seed is None else seed
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise SpecError(f"must be a whole number from 0 to below 2**64, not {seed!r}", "seed")
    return seed


@guard
def _sample_part(
    folder: Folder,
    sha256: str,
    release_type: type[Any],
    seed: int,
    n_total: int,
    asked: Any,
    start: int,
    n_rows: int,
    number: int,
) -> pd.DataFrame:
    release: RecordRelease = load(folder, sha256, release_type)
    wanted = () if asked is None else (release.condition(asked),)
    batches = release.batches(start, n_rows, n_total, RunKey.insecure(seed), str(number), *wanted)
    return record_frame(release, pa.Table.from_batches(batches, release.types), start)


def record_frame(release: RecordRelease, table: pa.Table, start: int) -> pd.DataFrame:
    """Return records as a frame; whole numbers and truth values that may be null are of pandas' nullable dtypes, so that they stay exact."""
    declared = release.schema.columns
    records = _make_frame(table).set_axis(pd.RangeIndex(start, start + table.num_rows))
    for field in release.types:
        whole = pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)
        if whole and field.name in declared and declared[field.name].nulls == "level":
            dtype = _nullable(np.dtype(field.type.to_pandas_dtype()))
            values = dtype.__from_arrow__(table.column(field.name))
            records[field.name] = pd.Series(values, index=records.index)
    return records


def _make_frame(table: pa.Table) -> pd.DataFrame:
    """Return a table as a frame without columns of Python objects but texts, since Dask would turn them into texts."""
    return _convert(table, _find_arrow_dtype)


def _convert(
    table: pa.Table, find_dtype: Callable[[pa.DataType], Any] | None = None
) -> pd.DataFrame:
    """Return a table as a frame, every value exactly.

    Whole numbers of 64 bits beside nulls are of pandas' nullable dtypes, since floats round those
    beyond 2⁵³; values that neither pandas nor Python can hold, such as nanoseconds of a time of day
    or dates after the year 9999, are of Arrow's own.
    """

    def convert(name: str) -> pd.Series:
        column = table.column(name)
        mapper = _EXACT.get if column.type in _EXACT and column.null_count else find_dtype
        try:
            return table.select([name]).to_pandas(types_mapper=mapper)[name]
        except (pa.ArrowException, OverflowError, ValueError):
            return pd.Series(pd.ArrowDtype(column.type).__from_arrow__(column))

    return pd.DataFrame({name: convert(name) for name in table.column_names})


def _find_arrow_dtype(type_: pa.DataType) -> pd.ArrowDtype | None:
    """Return Arrow's own dtype for a type whose values would be Python objects, such as dates and decimals; else None, for the usual one."""
    return pd.ArrowDtype(type_) if any(is_one(type_) for is_one in _OBJECTS) else None


def read_frame(folder: Folder, names: Sequence[str]) -> Frame:
    """Return released shards as a lazy Dask frame, with a partition for each."""
    meta = _make_frame(read_schema(folder, names[0]).empty_table())
    arguments = [(folder, name) for name in names]
    # whole numbers have another dtype in a shard with nulls
    return _make_lazy("read", _read_part, arguments, meta, verify_meta=False)


@guard
def _read_part(folder: Folder, name: str) -> pd.DataFrame:
    return _make_frame(_read_table(folder, name, None))


@guard
def read_shards(
    folder: Folder, names: Sequence[str], columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Return the rows of released shards, or some of their columns."""
    return _convert(pa.concat_tables([_read_table(folder, name, columns) for name in names]))


def _read_table(folder: Folder, name: str, columns: Sequence[str] | None) -> pa.Table:
    return pa.Table.from_batches(read_shard(folder, name, columns))
