"""Where rows come from: files or a frame. Each is a list of parts, and the name of a part decides its random streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any, ClassVar, Protocol, TypeAlias
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

from dpdask.engine.work import TableWork
from dpdask.errors import DataError, SpecError
from dpdask.io.faults import report_change
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import read_batches
from dpdask.io.storage import Folder
from dpdask.schema import Column, Schema
from dpdask.streams import stream, words

_COLLECTIONS = (list, tuple, dict, set, frozenset, np.ndarray)
_MAX_DEPTH = 8


class TooDeep:
    """Stands for the types of what is nested too deeply to be looked at."""


def find_cell_types(cells: Iterable[Any], depth: int = _MAX_DEPTH) -> set[type]:
    """Return the types of the cells, and of what their collections hold.

    Parameters
    ----------
    depth
        How many collections within one another are opened. For those below it, there is `TooDeep`.
    """
    cells = list(cells)
    types = set(map(type, cells))
    nested = tuple(each for each in types if issubclass(each, _COLLECTIONS))
    if not nested:
        return types
    if depth == 0:
        return types | {TooDeep}
    return types | find_cell_types(
        chain.from_iterable(_open(cell) for cell in cells if isinstance(cell, nested)), depth - 1
    )


def _open(cell: Any) -> Iterable[Any]:
    if isinstance(cell, np.ndarray):
        return cell.ravel().tolist() if cell.dtype.hasobject else ()
    return chain(cell.keys(), cell.values()) if isinstance(cell, dict) else cell


_SEALS = "seals"
_SEAL_BYTES = 16
_SLICE = 2**30  # bytes at once: OpenSSL counts them in a C int
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)
_STABLE = (  # types of Python whose values are written and hashed alike in every process
    *(
        str,
        bytes,
        int,
        float,
        complex,
        Decimal,
        np.generic,
        type(None),
        type(pd.NA),
        dt.date,
        dt.time,
        dt.timedelta,
        UUID,
    ),
    *(pd.Period, pd.Interval, list, tuple, np.ndarray),
)


class Seal:
    """The running digest of one fragment's rows: the same however they are cut into batches.

    Parameters
    ----------
    columns
        The columns that are sealed: the private ones, and those that name the unit.
    key
        A key of the fragment, derived from the run key: 32 bytes.

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
            secret = blake2b(
                f"{part} {name}".encode(), key=self._key, digest_size=32, person=b"dpdask seal"
            ).digest()
            self._tags[name, part] = Cipher(AES256(secret), GCM(bytes(12))).encryptor()
        return self._tags[name, part]

    def digest(self) -> bytes:
        """Return the keyed digest of all batches, 16 bytes; no batch can be added any more."""
        parts = [repr((self._n_rows, sorted(self._types.items()))).encode()]
        for (name, part), tag in sorted(self._tags.items()):
            tag.finalize()
            parts += [repr((name, part)).encode(), tag.tag]
        return blake2b(
            b"".join(len(part).to_bytes(8, "little") + part for part in parts),
            key=self._key,
            digest_size=_SEAL_BYTES,
        ).digest()

    def check(self, secrets: Folder, name: str, where: str) -> None:
        """Seal the fragment, or compare it with its seal."""
        if not _same(secrets, name, self.digest()):
            raise report_change(where)


def _list_parts(array: pa.Array, start: int) -> dict[str, NDArray[np.uint8]]:
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
        array = array.cast(
            pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary()
        )
        width = 0
    array = array.drop_null() if array.null_count else array
    buffers, end = array.buffers(), array.offset + len(array)
    if width:
        return parts | {"values": _view(buffers[1], np.uint8)[array.offset * width : end * width]}
    if len(array):
        ends = _view(buffers[1], np.int64)[array.offset : end + 1]
        parts |= {
            "lengths": np.diff(ends).view(np.uint8),
            "values": _view(buffers[2], np.uint8)[ends[0] : ends[-1]],
        }
    return parts


def _list_nested(array: pa.Array, place: str) -> dict[str, NDArray[np.uint8]]:
    """Return the bytes of lists, structs and maps, and of what they hold: of each level, which values are no nulls, and how long lists are."""
    parts = {f"{place}known": array.is_valid().cast(pa.uint8()).to_numpy()}
    if pa.types.is_struct(array.type):
        children = array.flatten()
    elif any(is_one(array.type) for is_one in _LISTS):
        array = array.drop_null() if array.null_count else array
        if not pa.types.is_fixed_size_list(array.type):
            ends = array.offsets.to_numpy().astype(np.int64)
            parts[f"{place}lengths"] = np.diff(ends).view(np.uint8)
        children = (
            [each[ends[0] : ends[-1]] for each in (array.keys, array.items)]
            if pa.types.is_map(array.type)
            else [array.flatten()]
        )
    else:
        known = array.drop_null() if array.null_count else array
        return parts | {place + name: data for name, data in _list_parts(known, 0).items()}
    for number, child in enumerate(children):
        parts |= _list_nested(child, f"{place}{number}.")
    return parts


def _view(buffer: pa.Buffer | None, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the content of an array's buffer; an array without a value may have none."""
    return np.zeros(0, dtype=dtype) if buffer is None else np.frombuffer(buffer, dtype=dtype)


def check_part(seal: bytes, secrets: Folder, name: str) -> None:
    """Keep the seal of a frame's partition, or compare it with the one that is kept."""
    if not _same(secrets, name, seal):
        raise DataError(
            "a partition's rows changed since they were first read",
            "frame",
            "persist the frame before its first use, or fit again",
        )


def find_content(column: pd.Series | pd.Index) -> pa.Array | None:
    """Return what a seal takes of a kept column or an index: its values, or where Arrow has no plain type for them, their hashes.

    Nothing is drawn for kept columns. They tell whether the rows are in another order, in which
    each would meet another row's noise.
    """
    if isinstance(
        column.dtype, pd.CategoricalDtype
    ):  # by its values: the same whatever the order of the categories
        content, codes = find_content(column.array.categories), column.array.codes
        return None if content is None else content.take(pa.array(codes, mask=codes < 0))
    if column.dtype == object and not all(
        issubclass(each, _STABLE) for each in find_cell_types(column.to_numpy())
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
        return pa.array(
            pd.util.hash_array(
                column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array
            )
        )
    except (pa.ArrowException, NotImplementedError, TypeError, ValueError):
        return None


def _strip(array: pa.Array) -> pa.Array:
    """Return an array as the one that an extension type lies in, or as the values of a dictionary."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _strip(array.storage)
    return (
        _strip(array.dictionary).take(array.indices)
        if pa.types.is_dictionary(array.type)
        else array
    )


def _is_sealed(type_: pa.DataType) -> bool:
    """Return whether a seal takes values of a type: plain ones, and lists, structs and maps of such."""
    if any(is_one(type_) for is_one in (*_LISTS, pa.types.is_struct)):
        return all(_is_sealed(type_.field(number).type) for number in range(type_.num_fields))
    return not (
        pa.types.is_nested(type_)
        or pa.types.is_dictionary(type_)
        or isinstance(type_, pa.BaseExtensionType)
    )


def _same(secrets: Folder, name: str, digest: bytes) -> bool:
    return secrets.claim(f"{_SEALS}/{name}", digest) == digest


_SEAL_ID, _SEAL_WORDS = "seal", 4
_CONTAINERS = (
    *(pd.api.extensions.ExtensionArray, pd.Index, pd.Series, pd.DataFrame),
    *(pa.Array, pa.ChunkedArray, pa.Scalar, pa.RecordBatch, pa.Table),
    np.ma.MaskedArray,  # behind whose mask are values
    TooDeep,  # to tell
)

Frame: TypeAlias = (
    Any  # a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree
)


class Part(Protocol):
    """One part of a table: what a task is told of it."""

    @property
    def id(self) -> str:
        """What names its streams and its seal."""

    @property
    def number(self) -> int:
        """Its place in the table."""

    @property
    def n_rows(self) -> int | None:
        """How many rows it has, if that is known before they are read."""

    def read(
        self, rows: Any, work: TableWork, *, released: bool, seals: list[bytes] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the columns that the work seals.

        Parameters
        ----------
        released
            Whether rows are read that are released later. Then, and if units are bounded, another
            pass sees the same rows, so they are sealed: see `seal`.
        seals
            Takes the seal of a file whose rows are released, if the unit is the row.
        """


class Source(Protocol):
    """A table as its parts."""

    @property
    def parts(self) -> Sequence[tuple[Part, Any]]:
        """Each part with its rows: what a task takes for them, or None if the task reads them itself."""

    @property
    def nodes(self) -> Mapping[Any, Any] | None:
        """The tasks that compute the rows; None if the parts' own tasks read them."""

    @property
    def where(self) -> str:
        """The table's place, for messages."""

    @property
    def hint(self) -> str:
        """What to do if the table has no rows, for messages."""

    @property
    def is_lasting(self) -> bool:
        """Whether a second process sees the same parts, so that it can go on where the first one stopped."""

    def count_released(self, work: TableWork) -> tuple[int, ...] | None:
        """Return how many rows of each part are released; None if that is known only after a pass; an empty tuple if the numbers are not needed."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A fragment of a file, which a task reads itself."""

    fragment: Fragment

    @property
    def id(self) -> str:
        """The fragment's id, made of the file's content."""
        return self.fragment.id

    @property
    def number(self) -> int:
        """The fragment's place in the table."""
        return self.fragment.number

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """What is read: the fragment alone."""
        return (self.fragment,)

    @property
    def n_rows(self) -> int | None:
        """How many rows the footer tells."""
        return self.fragment.n_rows

    def read(
        self, rows: None, work: TableWork, *, released: bool, seals: list[bytes] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows; see `Part.read`. Those of units are compared with their seal at the end."""
        assert rows is None
        if work.unit is not None:
            yield from self._read_sealed(work.sealed, work)
        elif released and seals is not None:
            seal = _make_seal(work, work.sealed, self.id)
            for batch in read_batches(self.fragment, work.sealed, work.types):
                seal.add(batch)
                yield batch
            seals.append(seal.digest())
        else:  # nothing of a row is released, and each pass is an event of its own
            yield from read_batches(self.fragment, work.sealed, work.types)

    def read_all(self, work: TableWork) -> Iterator[pa.RecordBatch]:
        """Yield the rows with all columns that are released or that choose rows, and compare them with the seal at the end."""
        return self._read_sealed(
            list(dict.fromkeys([*work.released.names, *work.unit_columns])), work
        )

    def _read_sealed(self, columns: Sequence[str], work: TableWork) -> Iterator[pa.RecordBatch]:
        if work.unit is None and not self.fragment.seal:  # no earlier pass has read it
            yield from read_batches(self.fragment, list(columns), work.types, work.public)
            return
        seal = _make_seal(work, work.sealed, self.id)
        for batch in read_batches(self.fragment, list(columns), work.types, work.public):
            seal.add(batch)
            yield batch
        if work.unit is not None:
            seal.check(work.secrets, work.hide(self.fragment.id), self.fragment.where)
        elif seal.digest() != self.fragment.seal:
            raise report_change(self.fragment.where)


@dataclass(frozen=True, slots=True)
class FileSource:
    """A table of files."""

    fragments: tuple[Fragment, ...]
    where: str

    hint: ClassVar[str] = "check the job's input.path"
    is_lasting: ClassVar[bool] = True  # the record of the run names the input

    @property
    def parts(self) -> Sequence[tuple[FilePart, None]]:
        """Each fragment; tasks read the rows themselves."""
        return [(FilePart(fragment), None) for fragment in self.fragments]

    @property
    def nodes(self) -> None:
        """None: tasks read the rows themselves."""

    def count_released(self, work: TableWork) -> tuple[int, ...] | None:
        """Return how many rows of each fragment are released, if all footers tell, all rows are released, and units are not bounded."""
        known = tuple(fragment.n_rows for fragment in self.fragments if fragment.n_rows is not None)
        return (
            known
            if len(known) == len(self.fragments) and work.unit is None and work.fraction is None
            else None
        )


@dataclass(frozen=True, slots=True)
class FramePart:
    """A partition of a frame, named by its batch and number, because Dask's optimiser may renumber partitions."""

    id: str
    number: int

    @property
    def n_rows(self) -> None:
        """None: nothing is known of a partition before it is computed."""

    def read(
        self,
        rows: pd.DataFrame,
        work: TableWork,
        *,
        released: bool,
        seals: list[bytes] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows; see `Part.read`. They are compared with the seal first."""
        del seals
        if released:
            check_index(
                rows.index, rows.index.names
            )  # before ε is spent on a frame that could not be released
            for name in work.public:
                if name in rows.columns:  # a public table may lack it
                    check_cells(name, rows[name])
            if rows.index.name is not None:
                check_cells(str(rows.index.name), rows.index)
        batch = make_batch(rows, work.sealed, work.types)
        if released or work.unit is not None:
            check_part(seal_part(rows, batch, work, self.id), work.secrets, work.hide(self.id))
        yield batch


def _make_seal(work: TableWork, columns: Sequence[str], part_id: str) -> Seal:
    return Seal(columns, words(stream(work.key(), _SEAL_ID, part_id), _SEAL_WORDS).tobytes())


def seal_part(rows: pd.DataFrame, batch: pa.RecordBatch, work: TableWork, part_id: str) -> bytes:
    """Return the seal of a frame's partition: of the values as its noise meets them, and of the kept columns and the index."""
    columns = {f"column {name}": batch.column(name) for name in batch.schema.names}
    kept = {f"column {name}": rows[name] for name in work.public if name in rows.columns} | {
        "index": rows.index
    }
    columns |= {
        name: content
        for name in kept.keys() - columns.keys()
        if (content := find_content(kept[name])) is not None
    }
    seal = _make_seal(work, sorted(columns), part_id)
    seal.add(pa.RecordBatch.from_pydict(columns))
    return seal.digest()


@dataclass(frozen=True, slots=True)
class FrameSource:
    """A Dask or pandas frame."""

    frame: Frame
    batch: str  # the name that `batches.Batches.take` returned for it, or `batches.PUBLIC`

    is_lasting: ClassVar[bool] = False  # each process makes its own frames
    where: ClassVar[str] = "frame"
    hint: ClassVar[str] = "give it some rows"

    @property
    def parts(self) -> Sequence[tuple[FramePart, Any]]:
        """Each partition with its rows, or with a reference to the task that computes them."""
        rows = (
            [self.frame]
            if isinstance(self.frame, pd.DataFrame)
            else [TaskRef(key) for key in self.frame.__dask_keys__()]
        )
        return [
            (FramePart(name_part(self.batch, number), number), part)
            for number, part in enumerate(rows)
        ]

    @property
    def nodes(self) -> Mapping[Any, Any] | None:
        """The tasks of a Dask frame; None if it is a pandas frame."""
        return None if isinstance(self.frame, pd.DataFrame) else dict(self.frame.__dask_graph__())

    def count_released(self, work: TableWork) -> tuple[int, ...]:
        """Return nothing: a lazy frame needs no counts before it is computed."""
        del work
        return ()


def check_index(index: pd.Index, names: Sequence[Any]) -> None:
    """Check that an index may be published: it is a `RangeIndex`, or the index that the schema declares."""
    if (
        len(names) > 1
        or list(index.names) != list(names)
        or (names[0] is None and not isinstance(index, pd.RangeIndex))
    ):
        what = "its index would be published, but is neither row numbers (a RangeIndex) nor one column that the schema declares"
        raise DataError(
            what, "frame", "reset_index(drop=True), or name it and declare it with role keep"
        )


def check_cells(name: str, column: pd.Series | pd.Index) -> None:
    """Check that the cells of a kept column of objects neither are nor hold containers of pandas or Arrow, which may hold all categories."""
    values = column.dtype.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    if values.dtype == object and any(
        issubclass(each, _CONTAINERS) for each in find_cell_types(values.to_numpy())
    ):
        what = "its cells hold containers of pandas or Arrow (or are nested too deeply to tell), which may hold values of rows that are not released"
        raise DataError(what, f"column {name!r}", "make them lists, or drop it")


def name_part(batch: str, number: int) -> str:
    """Return the id of a frame's partition, from the batch's name and the partition's number."""
    return blake2b(f"{batch}:{number}".encode(), digest_size=16).hexdigest()


def identify(frame: Frame) -> str:
    """Return what identifies a frame: its content for pandas, its expression for Dask. No stream is named by it."""
    return str(tokenize(frame)) if isinstance(frame, pd.DataFrame) else str(frame._name)


def find_types(frame: Frame, schema: Schema | None = None) -> pa.Schema:
    """Return the Arrow types of a frame's columns; nothing is computed.

    Parameters
    ----------
    schema
        What is declared: it decides the type of a pandas frame's column of Python objects in which
        every row is null.

    Privacy
    -------
    Of a column of Python objects in a pandas frame, the first value that is no null decides whether
    it holds dates, truth values or texts; only which of them it is, and nothing else of it, is
    looked at. Values of other types are found where the rows are counted.
    """
    meta = find_meta(frame)
    types = {name: _arrow_type(meta[name]) for name in meta}
    if isinstance(frame, pd.DataFrame):
        declared = {} if schema is None else schema.columns
        types |= {
            name: _find_object_type(frame[name], declared.get(name))
            for name in meta
            if meta[name].dtype == object
        }
    return pa.schema(list(types.items()))


def find_meta(frame: Frame) -> pd.DataFrame:
    """Return an empty frame of a frame's columns and index."""
    if isinstance(frame, pd.DataFrame):
        return frame.head(0)
    meta = getattr(frame, "_meta", None)
    if not isinstance(meta, pd.DataFrame):
        raise SpecError(
            f"a pandas or Dask frame is expected, not {_name_type(frame)}",
            "`frame`",
            _say_how_to_make_frame(frame),
        )
    return meta


def _name_type(given: Any) -> str:
    package = type(given).__module__.partition(".")[0]
    return type(given).__name__ if package == "builtins" else f"{package}.{type(given).__name__}"


def _say_how_to_make_frame(given: Any) -> str:
    if isinstance(given, str | PurePath):
        return "read the table first, as by dask.dataframe.read_parquet(path)"
    made = [
        f"make one of it: {name}()" for name in ("to_frame", "to_pandas") if hasattr(given, name)
    ]  # a Series, an Arrow table
    return made[0] if made else "give a DataFrame"


def _arrow_type(column: pd.Series) -> pa.DataType:
    """Return the Arrow type of an empty column; one of plain objects is taken for text."""
    if column.dtype == object:
        return pa.string()
    try:
        return pa.Schema.from_pandas(column.to_frame(), preserve_index=False).field(0).type
    except (pa.ArrowException, TypeError):  # complex numbers, sparse arrays
        raise DataError(
            f"its dtype {column.dtype} has no Arrow type",
            f"column {column.name!r}",
            "cast it to another one, or drop it",
        ) from None


def _find_object_type(column: pd.Series, declared: Column | None) -> pa.DataType:
    """Return the Arrow type of a column of Python objects: dates, as pandas makes them of `date32`, truth values beside nulls, or texts.

    Where every row is null, what is declared decides; it may be numbers then.
    """
    known = column.notna().to_numpy()
    if known.any():
        example: Any = column.iloc[int(known.argmax())]
    else:
        values = (
            () if declared is None else declared.levels or declared.bounds or declared.atoms or ()
        )
        example = next(iter(values), None)
        types = set(map(type, values))
        if types and types <= {int, float}:
            return (
                pa.int64()
                if declared is not None and declared.levels and types == {int}
                else pa.float64()
            )
    return (
        pa.date32()
        if type(example) is dt.date
        else pa.bool_()
        if isinstance(example, bool)
        else pa.string()
    )


def make_batch(part: pd.DataFrame, columns: Sequence[str], types: pa.Schema) -> pa.RecordBatch:
    """Return some columns of a partition as Arrow, without dictionaries."""
    plain = [
        types.field(name).type.value_type
        if pa.types.is_dictionary(types.field(name).type)
        else types.field(name).type
        for name in columns
    ]
    try:
        for name, type_ in zip(columns, plain, strict=True):
            if (
                pa.types.is_date(type_)
                and part[name].dtype == object
                and set(map(type, part[name].dropna())) - {dt.date}
            ):
                raise TypeError  # Arrow would cut times to dates, and take whole numbers for days
        wanted = pa.schema(list(zip(columns, plain, strict=True)))
        rows = pa.Table.from_pandas(
            part[list(columns)], schema=wanted, preserve_index=False
        ).combine_chunks()  # texts may come in chunks
        return rows.to_batches()[0] if rows.num_rows else pa.RecordBatch.from_pylist([], wanted)
    except (pa.ArrowException, KeyError, TypeError, ValueError):  # these quote values
        raise DataError(
            "a partition's values do not fit the frame's dtypes",
            "frame",
            "give every partition the dtypes of its meta",
        ) from None
