"""One piece of the input that is read and randomised as a whole, and its rows as the table has them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dpdask.arrays import Bytes, Flags, freeze_class
from dpdask.errors import DataError

TEXT_BYTES = 64
UTC = {"UTC", "+00:00", "Etc/UTC", "Z"}
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def pack(deleted: Flags) -> bytes:
    """Return a mask of deleted rows in a compact form; empty if no row is deleted."""
    return zlib.compress(np.packbits(deleted).tobytes(), 1) if deleted.any() else b""


def unpack(packed: bytes, start: int, n_rows: int) -> Flags:
    """Return the mask of some deleted rows; rows beyond the end of what was packed are not deleted."""
    mask = np.zeros(n_rows, dtype=np.bool_)
    found = _unpack_all(packed)[start : start + n_rows]
    mask[: len(found)] = found
    return mask


def count_deleted(packed: bytes) -> int:
    """Return how many rows are deleted."""
    return int(_unpack_all(packed).sum())


def _unpack_all(packed: bytes) -> Bytes:
    raw = zlib.decompress(packed) if packed else b""
    return np.unpackbits(np.frombuffer(raw, dtype=np.uint8))


def widen(one: pa.DataType, other: pa.DataType, *, lake: bool = False) -> pa.DataType | None:
    """Return the type that holds the values of two types; None if there is no such type.

    Times get the finer unit, which may not hold a far time: conversions check it. A `lake` says of
    times without a zone whether they are in UTC.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if (one, other) != (plain := (_find_storage(one), _find_storage(other))):
        return widen(*plain, lake=lake)
    for is_number in (pa.types.is_integer, pa.types.is_floating):
        if is_number(one) and is_number(other):
            types = (one.to_pandas_dtype(), other.to_pandas_dtype())
            wide = pa.from_numpy_dtype(np.promote_types(*types))
            return wide if is_number(wide) else None  # of int64 and uint64 numpy makes float64
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = scale + max(one.precision - one.scale, other.precision - other.scale)
        decimal = pa.decimal256 if digits > 38 else pa.decimal128
        return decimal(digits, scale) if digits <= 76 else None
    layout = find_layout(one)
    if layout is not None and layout == find_layout(other):
        return _LARGE[layout] if _LARGE[layout] in (one, other) else layout
    widen_more = _widen_nested if pa.types.is_nested(one) else _widen_times
    return widen_more(one, other, lake)


def _widen_times(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    kinds = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time)
    is_time = next((each for each in kinds if each(one) and each(other)), None)
    if is_time is None:
        return None
    unit = max(one.unit, other.unit, key=("s", "ms", "us", "ns").index)
    if is_time is pa.types.is_duration:
        return pa.duration(unit)
    if is_time is pa.types.is_time:
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    zones = {
        "UTC" if type_.tz in UTC or (lake and type_.tz is None) else type_.tz
        for type_ in (one, other)
    }
    return pa.timestamp(unit, *zones) if len(zones) == 1 else None


def _widen_nested(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    types = one, other
    fields = [_list_fields(type_) for type_ in types]
    inner = [widen(*(each.type for each in pair), lake=lake) for pair in zip(*fields, strict=False)]
    if any(type_ is None for type_ in inner):
        return None
    kinds = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if all(any(is_kind(type_) for is_kind in kinds) for type_ in types):
        return (pa.large_list if any(map(pa.types.is_large_list, types)) else pa.list_)(inner[0])
    if all(map(pa.types.is_map, types)):
        return pa.map_(*inner)
    names, other_names = ([each.name for each in part] for part in fields)
    if not all(map(pa.types.is_struct, types)) or names != other_names:
        return None
    return pa.struct(zip(names, inner, strict=True))


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a lake's type holds the values of a file's type; conversions check times."""
    joined = widen(found, wanted, lake=True)
    return joined is not None and _shape(joined) == _shape(wanted)


def _find_storage(type_: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, or in an extension type."""
    if isinstance(type_, pa.BaseExtensionType):
        return type_.storage_type
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def find_layout(type_: pa.DataType, *, views: bool = True) -> pa.DataType | None:
    """Return the plain type of texts or of bytes, whose offsets may be laid out in several ways."""
    for kind, plain in (("string", pa.string()), ("binary", pa.binary())):
        names = (f"is_{kind}", f"is_large_{kind}", *([f"is_{kind}_view"] if views else []))
        if any(getattr(pa.types, name)(type_) for name in names):
            return plain
    return pa.binary() if views and pa.types.is_fixed_size_binary(type_) else None


def _list_fields(type_: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(type_):
        return [type_.key_field, type_.item_field]
    return [type_.field(number) for number in range(type_.num_fields)]


def _shape(type_: pa.DataType) -> object:
    """Return a type without what conversions change or check.

    That is the layout of values, the names of list items, units and zones of times.
    """
    type_ = _find_storage(type_)
    if pa.types.is_nested(type_):
        is_struct = pa.types.is_struct(type_)
        fields = [(is_struct and each.name, _shape(each.type)) for each in _list_fields(type_)]
        return is_struct, pa.types.is_map(type_), fields
    if pa.types.is_fixed_size_binary(type_):
        return type_
    return pa.types.is_timestamp(type_) or find_layout(type_) or type_


@freeze_class
class Layout:
    """Where the columns of a row group lie in its file, so that a reader need not ask first."""

    n_file_bytes: int
    footer_start: int
    columns: tuple[tuple[str, int, int], ...]  # each leaf column's path with its start and end


@freeze_class
class Fragment:
    """One piece of the input that is read and randomised as a whole."""

    id: str
    # The file. Its folders may hold values of a partition column, so it is not shown.
    url: str = field(repr=False)
    # The file's path inside the table, for messages: without the values of partition columns.
    name: str
    format: Literal["parquet", "csv"]
    row_group: int  # the number of the row group in a Parquet file; 0 for CSV
    n_rows: int | None  # from the footer, without deleted rows; None for CSV, which has none
    n_bytes: int
    version: str  # A digest by which a changed file is noticed
    # A digest that CSV files with the same rows have in common; empty for Parquet, where `version`
    # is that.
    alike: str = ""
    number: int = 0
    # The digest of its private values when they were counted; empty before. Private.
    seal: bytes = field(default=b"", repr=False)
    # How many bytes its columns that are not dropped have when they are decompressed; 0 if no
    # footer tells.
    n_bytes_decoded: int = 0
    layout: Layout | None = field(default=None, repr=False)  # where its columns lie; None for CSV
    # The columns that the file does not hold, each with the value that all its rows have: partition
    # columns, and columns that the table got later.
    constants: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    # The columns that have another name in the file, each with that name.
    renamed: tuple[tuple[str, str], ...] = ()
    # The rows that the table no longer has, as `pack` writes them; empty if there are
    # none.
    deleted: bytes = field(default=b"", repr=False)

    @property
    def where(self) -> str:
        """The fragment's place, for messages."""
        return f"{self.name}, row group {self.row_group}" if self.format == "parquet" else self.name


def estimate_width(type_: pa.DataType) -> float:
    """Estimate the bytes of a value from its type alone; texts, lists and the like count 64."""
    return float(type_.bit_width) / 8 if has_width(type_) else TEXT_BYTES


def has_width(type_: pa.DataType) -> bool:
    """Return whether all values of a type take the same bytes."""
    try:
        return bool(type_.bit_width)
    except ValueError:
        return False


def find_stored(fragment: Fragment, columns: list[str]) -> list[str]:
    """Return the names in a fragment's file of the columns that it holds."""
    constants, renamed = dict(fragment.constants), dict(fragment.renamed)
    return [renamed.get(name, name) for name in columns if name not in constants]


def complete(
    batches: Iterator[pa.RecordBatch],
    fragment: Fragment,
    columns: list[str],
    types: pa.Schema,
    encoded: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's rows as its table has them.

    Parameters
    ----------
    batches
        All rows of the fragment's file or row group, in order, with the columns that `find_stored`
        names.
    encoded
        Columns that may stay dictionaries of their type.
    """
    constants, renamed = dict(fragment.constants), dict(fragment.renamed)
    wanted = pa.schema([(name, types.field(name).type) for name in columns])
    typed = {
        name: pa.scalar(constants[name], wanted.field(name).type)
        for name in columns
        if name in constants
    }
    start = 0
    for batch in batches:
        n_rows = batch.num_rows
        if fragment.deleted:
            keep = ~unpack(fragment.deleted, start, n_rows)
            start, n_rows = start + n_rows, int(keep.sum())
            batch = batch.filter(pa.array(keep)) if batch.num_columns else batch
        batch = batch.replace_schema_metadata()
        if batch.schema.equals(wanted, check_metadata=True):
            yield batch  # of many columns, to make a batch anew takes longer than to read it
            continue
        arrays = [
            pa.repeat(typed[name], n_rows)
            if name in typed
            else _convert(batch.column(renamed.get(name, name)), name, type_, name in encoded)
            for name, type_ in zip(columns, wanted.types, strict=True)
        ]
        if encoded:
            yield pa.RecordBatch.from_arrays(arrays, names=columns)
            continue
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _convert(array: pa.Array, name: str, type_: pa.DataType, may_be_encoded: bool) -> pa.Array:
    if array.type == type_ or (may_be_encoded and array.type == pa.dictionary(pa.int32(), type_)):
        return array
    where, hint = f"column {name!r}", "write all files with one type"
    if not fits(array.type, type_):  # a dropped column that names the unit
        raise DataError("its type in one file is not the table's", where, hint)
    try:
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        return (array.storage if isinstance(array, pa.ExtensionArray) else array).cast(type_)
    except pa.ArrowInvalid:
        what = (
            f"a value whose type in its file is {array.type} does not fit the table's type {type_}"
        )
        raise DataError(what, where, hint) from None


def group_rows(
    batches: Iterable[pa.RecordBatch], n_rows: int, n_bytes: float = math.inf
) -> Iterator[list[pa.RecordBatch]]:
    """Yield rows in groups of the same number; a group ends earlier only where it has so many bytes."""
    held = list[pa.RecordBatch]()
    n_held = bytes_held = 0
    for batch in batches:
        while batch.num_rows:
            part = batch.slice(0, n_rows - n_held)
            held.append(part)
            batch, n_held = batch.slice(part.num_rows), n_held + part.num_rows
            bytes_held += part.nbytes
            if n_held == n_rows or bytes_held >= n_bytes:
                yield held
                held, n_held, bytes_held = [], 0, 0
    if held:
        yield held
