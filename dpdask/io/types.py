"""The types of a column in several files: the one that holds the values of all, and whether it does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_LAYOUTS = (
    ((pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view), pa.string(), pa.large_string()),
    ((pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary), pa.binary(), pa.large_binary()),
)
_NARROW = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(), pa.binary_view(): pa.binary()}
UTC = {"UTC", "+00:00", "Etc/UTC", "Z"}


def widen(one: pa.DataType, other: pa.DataType, *, lake: bool = False) -> pa.DataType | None:
    """Return the type of a column that has these two types in two files: it holds the values of both. None if there is no such type.

    Times get the finer unit, which may not hold a far time: conversions check it. A `lake` says of times without a zone whether they are in UTC.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if (one, other) != (plain := (_find_storage(one), _find_storage(other))):
        return widen(*plain, lake=lake)
    for is_number in (pa.types.is_integer, pa.types.is_floating):
        if is_number(one) and is_number(other):
            wide = pa.from_numpy_dtype(np.promote_types(one.to_pandas_dtype(), other.to_pandas_dtype()))
            return wide if is_number(wide) else None  # of int64 and uint64 numpy makes float64
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = scale + max(one.precision - one.scale, other.precision - other.scale)
        return None if digits > 76 else pa.decimal256(digits, scale) if digits > 38 else pa.decimal128(digits, scale)
    for are_layouts, plain, large in _LAYOUTS:
        if all(any(is_layout(type_) for is_layout in are_layouts) for type_ in (one, other)):
            return large if large in (one, other) else plain
    return _widen_nested(one, other, lake) if pa.types.is_nested(one) else _widen_times(one, other, lake)


def _widen_times(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    is_time = next((each for each in (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time) if each(one) and each(other)), None)
    if is_time is None:
        return None
    unit = max(one.unit, other.unit, key=("s", "ms", "us", "ns").index)
    if is_time is pa.types.is_duration:
        return pa.duration(unit)
    if is_time is pa.types.is_time:
        return pa.time32(unit) if unit == "ms" else pa.time64(unit)
    zones = {"UTC" if type_.tz in UTC or (lake and type_.tz is None) else type_.tz for type_ in (one, other)}
    return pa.timestamp(unit, *zones) if len(zones) == 1 else None


def _widen_nested(one: pa.DataType, other: pa.DataType, lake: bool) -> pa.DataType | None:
    types = one, other
    inner = [widen(mine.type, its.type, lake=lake) for mine, its in zip(*map(_list_fields, types), strict=False)]
    if any(type_ is None for type_ in inner):
        return None
    if all(any(is_list(type_) for is_list in _LISTS) for type_ in types):
        return (pa.large_list if any(map(pa.types.is_large_list, types)) else pa.list_)(inner[0])
    if all(map(pa.types.is_map, types)):
        return pa.map_(*inner)
    names = [[field.name for field in _list_fields(type_)] for type_ in types]
    return pa.struct(zip(names[0], inner, strict=True)) if all(map(pa.types.is_struct, types)) and names[0] == names[1] else None


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a Delta or Iceberg table's type holds the values of a file's type; conversions check times."""
    joined = widen(found, wanted, lake=True)
    return joined is not None and _shape(joined) == _shape(wanted)


def _find_storage(type_: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary, or in an extension type."""
    if isinstance(type_, pa.BaseExtensionType):
        return type_.storage_type
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _list_fields(type_: pa.DataType) -> list[pa.Field]:
    if pa.types.is_map(type_):
        return [type_.key_field, type_.item_field]
    return [type_.field(number) for number in range(type_.num_fields)]


def _shape(type_: pa.DataType) -> object:
    """Return a type without what conversions change or check: the layout of values, the names of list items, units and zones of times."""
    type_ = _find_storage(type_)
    if pa.types.is_nested(type_):
        is_struct = pa.types.is_struct(type_)
        return is_struct, pa.types.is_map(type_), [(is_struct and field.name, _shape(field.type)) for field in _list_fields(type_)]
    return pa.types.is_timestamp(type_) or _NARROW.get(type_, type_)
