"""Where rows come from: files or a frame. Each is a list of parts, and the name of a part decides its random streams.

A part is sealed when it is first read: a seal is a digest of its rows, so that the part's noise is never drawn for anything else.
A stream is named by its part, not by the part's content. If the content changed between two passes, two attempts or two computations
of a lazy frame, the same noise would be added to other values, and the difference of the two outputs would reveal them, which no ε
covers. So the first task that reads a part seals it, and every later task compares.

Seals of files go with the results of the pass that counts them, and with the tasks that write; a job without such a pass reads each
fragment once, and what is staged is replaced, or in a store written once. They travel in tasks, so they are keyed with the run key:
who knows all rows but one cannot test guesses of the last. Seals of units' rows and of a frame's partitions are files beside the run
key, since several passes, or whoever computes a frame, read them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any, ClassVar, TypeAlias
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from dask._task_spec import TaskRef
from dask.base import tokenize
from numpy.typing import NDArray

from dpdask.arrays import Bytes, freeze_class
from dpdask.engine.work import TableWork
from dpdask.errors import DataError, SpecError
from dpdask.io.filesystems import report_change
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import read_batches
from dpdask.schema import Column, Schema
from dpdask.streams import stream, words

# a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree
Frame: TypeAlias = Any

_SLICE = 2**30  # bytes at once: OpenSSL counts them in a C int
LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)
_COLLECTIONS = (list, tuple, dict, set, frozenset, np.ndarray)
_MAX_DEPTH = 8


class _TooDeep:
    """Stands for the types of cells that are nested too deeply to be looked at."""


# types of Python whose values are written and hashed alike in every process
_STABLE = (
    *(str, bytes, int, float, complex, Decimal, np.generic, type(None), type(pd.NA), dt.date),
    *(dt.time, dt.timedelta, UUID, pd.Period, pd.Interval, list, tuple, np.ndarray),
)
_CONTAINERS = (
    *(pd.api.extensions.ExtensionArray, pd.Index, pd.Series, pd.DataFrame),
    *(pa.Array, pa.ChunkedArray, pa.Scalar, pa.RecordBatch, pa.Table),
    np.ma.MaskedArray,  # behind whose mask are values
    _TooDeep,  # to tell
)

# ---- files


@freeze_class(kw_only=False)
class FilePart:
    """A fragment of a file, which a task reads itself."""

    fragment: Fragment

    @property
    def id(self) -> str:
        """The name of its streams and its seal, made of the file's content."""
        return self.fragment.id

    @property
    def number(self) -> int:
        """Its place in the table."""
        return self.fragment.number

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragment alone; see `compute.describe_largest`."""
        return (self.fragment,)

    @property
    def n_rows(self) -> int | None:
        """How many rows it has, if the footer tells."""
        return self.fragment.n_rows

    def read(
        self, rows: None, work: TableWork, *, released: bool, seals: list[bytes] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the columns that the work seals; nothing counted may be kept if that fails.

        Parameters
        ----------
        released
            Whether rows are read that are released later. Then, and if units are bounded, another
            pass sees the same rows, so they are sealed.
        seals
            Takes the seal of a file whose rows are released, if the unit is the row.
        """
        del rows
        if work.unit is not None:
            yield from self._read_sealed(work.sealed, work)
        elif released and seals is not None:
            seal = Seal.of_part(work, work.sealed, self.id)
            for batch in read_batches(self.fragment, work.sealed, work.types):
                seal.add(batch)
                yield batch
            seals.append(seal.digest())
        else:  # nothing of a row is released, and each pass is an event of its own
            yield from read_batches(self.fragment, work.sealed, work.types, encoded=work.encoded)

    def read_all(self, work: TableWork) -> Iterator[pa.RecordBatch]:
        """Yield the rows with all columns that are released or choose rows, and compare them with the seal at the end."""
        columns = dict.fromkeys([*work.read.names, *work.unit_columns])
        return self._read_sealed(list(columns), work)

    def _read_sealed(self, columns: list[str], work: TableWork) -> Iterator[pa.RecordBatch]:
        batches = read_batches(self.fragment, columns, work.types, work.public)
        if work.unit is None and not self.fragment.seal:  # no earlier pass has read it
            yield from batches
            return
        seal = Seal.of_part(work, work.sealed, self.id)
        for batch in batches:
            seal.add(batch)
            yield batch
        digest = seal.digest()
        if digest != (
            self.fragment.seal if work.unit is None else work.claim_seal(self.id, digest)
        ):
            raise report_change(self.fragment.where)


@freeze_class(kw_only=False)
class FileSource:
    """A table of files."""

    fragments: tuple[Fragment, ...]  # in the order of the rows
    where: str  # the table's place, for messages

    hint: ClassVar[str] = "check the job's input.path"
    is_lasting: ClassVar[bool] = True  # the record of the run names the input
    nodes: ClassVar[None] = None  # tasks read the rows themselves

    @property
    def parts(self) -> Sequence[tuple[FilePart, None]]:
        """Each fragment."""
        return [(FilePart(fragment), None) for fragment in self.fragments]


@freeze_class
class LinkedSource:
    """A table of persons' rows, and one of the persons."""

    rows: FileSource
    persons: FileSource
    # The declared columns of each, and their types.
    rows_as: tuple[Schema, pa.Schema]
    persons_as: tuple[Schema, pa.Schema]
    key: str  # the column that names a person in the table of persons

    hint: ClassVar[str] = FileSource.hint
    is_lasting: ClassVar[bool] = True
    nodes: ClassVar[None] = None

    @property
    def where(self) -> str:
        """The place of the rows, for messages."""
        return self.rows.where

    @property
    def parts(self) -> Sequence[tuple[FilePart, None]]:
        """Each fragment of rows."""
        return self.rows.parts

    def open_tables(self, work: TableWork) -> tuple[TableWork, TableWork]:
        """Return the work on each of the two tables, of that on their columns together."""
        rows = work.narrow(*self.rows_as)
        return rows, replace(work.narrow(*self.persons_as), also_read=(self.key,))


# ---- frames


@freeze_class(kw_only=False)
class FramePart:
    """A partition of a frame, named by its batch and number, because Dask's optimiser may renumber partitions."""

    id: str
    number: int

    n_rows: ClassVar[None] = None  # not known before it is computed

    def read(
        self,
        rows: pd.DataFrame,
        work: TableWork,
        *,
        released: bool,
        seals: list[bytes] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows, some at a time, after comparing all with the seal; see `FilePart.read`."""
        del seals
        if released:  # before ε is spent on a frame that could not be released
            check_index(rows.index, rows.index.names)
            for name in work.public:
                if name in rows.columns:  # a public table may lack it
                    _check_cells(name, rows[name])
            if rows.index.name is not None:
                _check_cells(str(rows.index.name), rows.index)
        if released or work.unit is not None:
            digest = self._seal(rows, work)  # whose arrays are gone when rows are randomised
            if work.claim_seal(self.id, digest) != digest:
                raise DataError(
                    "a partition's rows changed since they were first read",
                    "frame",
                    "persist the frame before its first use, or fit again",
                )
        yield from _make_batches(rows, work.sealed, work.types)

    def _seal(self, rows: pd.DataFrame, work: TableWork) -> bytes:
        """Return the seal: of the values as the noise meets them, and of the kept columns and the index."""
        kept = [name for name in work.public if name in rows.columns and name not in work.sealed]

        def list_kept(part: pd.DataFrame) -> dict[str, pd.Series | pd.Index]:
            return {"index": part.index} | {f"column {name}": part[name] for name in kept}

        # all cells of a column decide of which type Python's objects are
        objects = {key: each for key, each in list_kept(rows).items() if each.dtype == object}
        whole = {key: find_content(each) for key, each in objects.items()}
        seal, start = None, 0
        for batch in _make_batches(rows, work.sealed, work.types):
            columns = {f"column {name}": batch.column(name) for name in work.sealed}
            for key, each in list_kept(rows.iloc[start : start + batch.num_rows]).items():
                content = whole[key] if key in whole else find_content(each)
                if content is not None:
                    columns[key] = content.slice(start if key in whole else 0, batch.num_rows)
            seal = seal or Seal.of_part(work, sorted(columns), self.id)
            seal.add(pa.RecordBatch.from_pydict(columns))
            start += batch.num_rows
        assert seal is not None  # of one batch at least
        return seal.digest()


@freeze_class(kw_only=False)
class FrameSource:
    """A Dask or pandas frame."""

    frame: Frame
    batch: str  # the name that `Batches.take` returned for it, or `PUBLIC`

    is_lasting: ClassVar[bool] = False  # each process makes its own frames
    where: ClassVar[str] = "frame"
    hint: ClassVar[str] = "give it some rows"

    @property
    def parts(self) -> Sequence[tuple[FramePart, Any]]:
        """Each partition with its rows, or with a reference to the task that computes them."""
        rows = [self.frame]
        if not isinstance(self.frame, pd.DataFrame):
            rows = [TaskRef(key) for key in self.frame.__dask_keys__()]
        ids = (f"{self.batch}:{number}".encode() for number in range(len(rows)))
        names = [blake2b(each, digest_size=16).hexdigest() for each in ids]
        return [
            (FramePart(name, number), part)
            for number, (name, part) in enumerate(zip(names, rows, strict=True))
        ]

    @property
    def nodes(self) -> Mapping[Any, Any] | None:
        """The tasks of a Dask frame; None if it is a pandas frame."""
        return None if isinstance(self.frame, pd.DataFrame) else dict(self.frame.__dask_graph__())


Part: TypeAlias = FilePart | FramePart
Source: TypeAlias = FileSource | LinkedSource | FrameSource


def check_index(index: pd.Index, names: Sequence[Any]) -> None:
    """Check that an index may be published: it is a `RangeIndex`, or the index that the schema declares."""
    undeclared = names[0] is None and not isinstance(index, pd.RangeIndex)
    if len(names) > 1 or list(index.names) != list(names) or undeclared:
        what = "its index would be published, but is neither row numbers (a RangeIndex) nor one column that the schema declares"
        hint = "reset_index(drop=True), or name it and declare it with role keep"
        raise DataError(what, "frame", hint)


def _check_cells(name: str, column: pd.Series | pd.Index) -> None:
    """Check that the cells of a kept column neither are nor hold containers of pandas or Arrow, which may hold all categories."""
    values = column.dtype.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    if values.dtype == object and any(
        issubclass(each, _CONTAINERS) for each in _find_cell_types(values.to_numpy())
    ):
        what = "its cells hold containers of pandas or Arrow (or are nested too deeply to tell), which may hold values of rows that are not released"
        raise DataError(what, f"column {name!r}", "make them lists, or drop it")


def _find_cell_types(cells: Iterable[Any], depth: int = _MAX_DEPTH) -> set[type]:
    """Return the types of the cells, and of the contents of their collections down to a depth."""
    cells = list(cells)
    types = set(map(type, cells))
    nested = tuple(each for each in types if issubclass(each, _COLLECTIONS))
    if not nested:
        return types
    if depth == 0:
        return types | {_TooDeep}
    inner: list[Any] = []
    for cell in cells:
        if isinstance(cell, np.ndarray):
            inner += cell.ravel().tolist() if cell.dtype.hasobject else ()
        elif isinstance(cell, dict):
            inner += chain(cell.keys(), cell.values())
        elif isinstance(cell, nested):
            inner += cell
    return types | _find_cell_types(inner, depth - 1)


def identify(frame: Frame) -> str:
    """Return an identity of a frame: its content for pandas, its expression for Dask. No stream is named by it."""
    return str(tokenize(frame)) if isinstance(frame, pd.DataFrame) else str(frame._name)


def as_frame(frame: Any) -> Frame:
    """Return a pandas or Dask frame: of a table that gives itself as an Arrow stream, such as one of Arrow, polars or DuckDB, its columns, of which only views and dictionaries are copied."""
    is_frame = isinstance(frame, pd.DataFrame) or hasattr(frame, "_meta")
    can_be_read_again = not isinstance(frame, pa.RecordBatchReader)
    table = None
    if not is_frame and can_be_read_again and hasattr(frame, "__arrow_c_stream__"):
        with suppress(TypeError, ValueError, pa.ArrowException):  # a column alone
            table = pa.table(frame)
    if table is None:
        find_meta(frame)
        return frame
    columns = {name: _make_plain(table[name]) for name in table.column_names}
    return pa.table(columns).to_pandas(types_mapper=pd.ArrowDtype)


_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _make_plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without what holds values of rows that may not be released: dictionaries and views."""
    type_ = column.type
    if not pa.types.is_dictionary(type_):
        return column.cast(_VIEWS.get(type_, type_))
    values = _VIEWS.get(type_.value_type, type_.value_type)
    chunks = [chunk.dictionary.cast(values).take(chunk.indices) for chunk in column.chunks]
    return pa.chunked_array(chunks, values)


def find_meta(frame: Frame) -> pd.DataFrame:
    """Return an empty frame of a frame's columns and index, after checking that it is a frame."""
    meta = frame.head(0) if isinstance(frame, pd.DataFrame) else getattr(frame, "_meta", None)
    if isinstance(meta, pd.DataFrame):
        return meta
    package, name = type(frame).__module__.partition(".")[0], type(frame).__name__
    hint = "give a DataFrame"
    if isinstance(frame, str | PurePath):
        hint = "read the table first, as by dask.dataframe.read_parquet(path)"
    # a Series, a dataset, a stream of Arrow, a query of polars
    for method in ("to_frame", "to_table", "read_all", "collect"):
        if hasattr(frame, method):
            hint = f"make one of it: {method}()"
    what = name if package == "builtins" else f"{package}.{name}"
    raise SpecError(
        f"a frame of pandas, Dask or polars, or an Arrow table, is expected, not {what}",
        "`frame`",
        hint,
    )


def find_types(frame: Frame, schema: Schema | None = None) -> pa.Schema:
    """Return the Arrow types of a frame's columns; nothing is computed.

    Parameters
    ----------
    schema
        It decides the type of a pandas frame's column of Python objects in which every row is null.

    Privacy
    -------
    Of a column of Python objects in a pandas frame, the first value that is no null decides whether
    it holds dates, times of a day, truth values, bytes or texts; only which of them it is, and nothing else of it, is
    looked at. Values of other types are found where the rows are counted.
    """
    meta, types = find_meta(frame), {}
    for name in meta:
        if meta[name].dtype != object:
            types[name] = _find_arrow_type(meta[name])
        elif isinstance(frame, pd.DataFrame):
            declared = None if schema is None else schema.columns.get(name)
            types[name] = _find_object_type(frame[name], declared)
        else:
            types[name] = pa.string()
    return pa.schema(list(types.items()))


def _find_arrow_type(column: pd.Series) -> pa.DataType:
    try:
        return pa.Schema.from_pandas(column.to_frame(), preserve_index=False).field(0).type
    except (pa.ArrowException, TypeError):  # complex numbers, sparse arrays
        what, where = f"its dtype {column.dtype} has no Arrow type", f"column {column.name!r}"
        raise DataError(what, where, "cast it to another one, or drop it") from None


def _find_object_type(column: pd.Series, declared: Column | None) -> pa.DataType:
    """Return the Arrow type of a column of Python objects: dates and times, as pandas makes them of `date32` and `time64`, truth values beside nulls, bytes, or texts.

    Where every row is null, the declaration decides; it may be numbers then.
    """
    known = column.notna().to_numpy()
    if known.any():
        example: Any = column.iloc[int(known.argmax())]
    else:
        values: Any = ()
        if declared is not None and declared.encoding:
            return pa.binary()
        if declared is not None:
            values = declared.listed or declared.bounds or declared.atoms or ()
        example = next(iter(values), None)
        types = set(map(type, values))
        if types and types <= {int, float}:
            whole = declared is not None and declared.listed and types == {int}
            return pa.int64() if whole else pa.float64()
    if type(example) in (dt.date, dt.time):
        return pa.date32() if type(example) is dt.date else pa.time64("us")
    if isinstance(example, bytes):
        return pa.binary()
    return pa.bool_() if isinstance(example, bool) else pa.string()


# of a partition, converted and randomised at a time; allocators round powers of two up by a quarter
_BATCH_ROWS = 2**16 - 2**7


def _make_batches(
    part: pd.DataFrame, columns: Sequence[str], types: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a partition as Arrow, in one batch at least."""
    for start in range(0, max(len(part), 1), _BATCH_ROWS):
        yield _make_batch(part.iloc[start : start + _BATCH_ROWS], columns, types)


def _make_batch(part: pd.DataFrame, columns: Sequence[str], types: pa.Schema) -> pa.RecordBatch:
    """Return some columns of a partition as Arrow, without dictionaries."""
    fields = []
    for name in columns:
        type_ = types.field(name).type
        fields.append((name, type_.value_type if pa.types.is_dictionary(type_) else type_))
    try:
        for name, type_ in fields:
            wanted = dt.date if pa.types.is_date(type_) else dt.time
            objects = pa.types.is_date(type_) or pa.types.is_time(type_)
            objects = objects and part[name].dtype == object
            if objects and set(map(type, part[name].dropna())) - {wanted}:
                raise TypeError  # Arrow would cut times to dates, and take whole numbers for days
        plain = pa.schema(fields)
        rows = pa.Table.from_pandas(part[list(columns)], schema=plain, preserve_index=False)
        rows = rows.combine_chunks()  # texts may come in chunks
        return rows.to_batches()[0] if rows.num_rows else pa.RecordBatch.from_pylist([], plain)
    except (pa.ArrowException, KeyError, TypeError, ValueError):  # these quote values
        what, hint = (
            "a partition's values do not fit the frame's dtypes",
            "give every partition the dtypes of its meta",
        )
        raise DataError(what, "frame", hint) from None


# ---- seals


class Seal:
    """The running digest of one part's rows: the same however they are cut into batches.

    Parameters
    ----------
    columns
        The columns that are sealed: the private ones, and those that name the unit.
    key
        A key of the part, derived from the run key: 32 bytes.

    Notes
    -----
    Each column's bytes go through GHASH, which takes a seventh of the time of SHA-256. It is a
    universal hash: whoever does not know its key finds no two contents with the same tag, other
    than by a chance of at most n / 2**128 for n blocks of 16 bytes. Tags under one key would reveal
    it, so they never leave this object: its digest is their keyed BLAKE2b.
    """

    def __init__(self, columns: Iterable[str], key: bytes) -> None:
        self._columns, self._key = list(columns), key
        self._tags: dict[tuple[str, str], Any] = {}
        self._types: dict[str, str] = {}
        self._n_rows = 0

    @classmethod
    def of_part(cls, work: TableWork, columns: Sequence[str], part_id: str) -> Seal:
        """Return an empty seal of a part, with its key."""
        return cls(columns, words(stream(work.key(), "seal", part_id), 4).tobytes())

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next batch."""
        for name in self._columns:
            array = batch.column(name)
            plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
            self._types[name] = str(plain.type)
            for part, data in _list_parts(plain, self._n_rows).items():
                for start in range(0, len(data), _SLICE):
                    self._tag(name, part).authenticate_additional_data(data[start : start + _SLICE])
        self._n_rows += batch.num_rows

    def _tag(self, name: str, part: str) -> Any:
        if (name, part) not in self._tags:
            text = f"{part} {name}".encode()
            secret = blake2b(text, key=self._key, digest_size=32, person=b"dpdask seal").digest()
            self._tags[name, part] = Cipher(AES256(secret), GCM(bytes(12))).encryptor()
        return self._tags[name, part]

    def digest(self) -> bytes:
        """Return the keyed digest of all batches, 16 bytes; no batch can be added any more."""
        parts = [repr((self._n_rows, sorted(self._types.items()))).encode()]
        for (name, part), tag in sorted(self._tags.items()):
            tag.finalize()
            parts += [repr((name, part)).encode(), tag.tag]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake2b(data, key=self._key, digest_size=16).digest()


def _list_parts(array: pa.Array, start: int) -> dict[str, Bytes]:
    """Return the bytes of an array's values: of the values themselves, of the lengths of texts, and of the rows of nulls."""
    if pa.types.is_nested(array.type):
        return _list_nested(array, "")
    parts = {}
    if array.null_count:
        rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) + start
        parts["nulls"] = rows.astype(np.int64).view(np.uint8)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    try:
        width = array.type.bit_width // 8
    except ValueError:  # texts: Arrow removes no nulls of its view types
        is_view = pa.types.is_string_view(array.type)
        array, width = array.cast(pa.large_string() if is_view else pa.large_binary()), 0
    array = array.drop_null() if array.null_count else array
    buffers, end = array.buffers(), array.offset + len(array)
    if width:
        return parts | {"values": _view(buffers[1], np.uint8)[array.offset * width : end * width]}
    if len(array):
        ends = _view(buffers[1], np.int64)[array.offset : end + 1]
        parts["lengths"] = np.diff(ends).view(np.uint8)
        parts["values"] = _view(buffers[2], np.uint8)[ends[0] : ends[-1]]
    return parts


def _list_nested(array: pa.Array, place: str) -> dict[str, Bytes]:
    """Return the bytes of lists, structs and maps: of each level, which values are no nulls, and how long lists are."""
    parts = {f"{place}known": array.is_valid().cast(pa.uint8()).to_numpy()}
    if pa.types.is_struct(array.type):
        children = array.flatten()
    else:
        array = array.drop_null() if array.null_count else array
        if not any(is_one(array.type) for is_one in LISTS):
            return parts | {place + name: data for name, data in _list_parts(array, 0).items()}
        if not pa.types.is_fixed_size_list(array.type):
            ends = array.offsets.to_numpy().astype(np.int64)
            parts[f"{place}lengths"] = np.diff(ends).view(np.uint8)
        if pa.types.is_map(array.type):
            children = [each[ends[0] : ends[-1]] for each in (array.keys, array.items)]
        else:
            children = [array.flatten()]
    for number, child in enumerate(children):
        parts |= _list_nested(child, f"{place}{number}.")
    return parts


def _view(buffer: pa.Buffer | None, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the content of an array's buffer; an array without a value may have none."""
    return np.zeros(0, dtype=dtype) if buffer is None else np.frombuffer(buffer, dtype=dtype)


def find_content(column: pd.Series | pd.Index) -> pa.Array | None:
    """Return the content of a kept column or an index for its seal: its values, or where Arrow has no plain type for them, their hashes.

    Nothing is drawn for kept columns. They tell whether the rows are in another order, in which
    each would meet another row's noise. None stands for Python's dictionaries, sets, and objects of
    other classes than those of plain values: they may look changed in another process though they
    are the same, or have no hash.
    """
    # the same whatever the order of the categories
    if isinstance(column.dtype, pd.CategoricalDtype):
        content, codes = find_content(column.array.categories), column.array.codes
        return None if content is None else content.take(pa.array(codes, mask=codes < 0))
    if column.dtype == object and not all(
        issubclass(each, _STABLE) for each in _find_cell_types(column.to_numpy())
    ):
        return None
    try:
        array = pa.array(column, from_pandas=True)
        array = _strip(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
        if _is_sealed(array.type):
            return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):  # objects of several types
        pass
    try:
        plain = isinstance(column.dtype, np.dtype)
        return pa.array(pd.util.hash_array(column.to_numpy() if plain else column.array))
    except (pa.ArrowException, NotImplementedError, TypeError, ValueError):
        return None


def _strip(array: pa.Array) -> pa.Array:
    """Return an array as the one that an extension type lies in, or as the values of a dictionary."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _strip(array.storage)
    if pa.types.is_dictionary(array.type):
        return _strip(array.dictionary).take(array.indices)
    return array


def _is_sealed(type_: pa.DataType) -> bool:
    """Return whether a seal takes values of a type: plain ones, and lists, structs and maps of such."""
    if any(is_one(type_) for is_one in (*LISTS, pa.types.is_struct)):
        return all(_is_sealed(type_.field(number).type) for number in range(type_.num_fields))
    if pa.types.is_nested(type_) or pa.types.is_dictionary(type_):
        return False
    return not isinstance(type_, pa.BaseExtensionType)
