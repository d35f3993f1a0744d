"""The one place that reads a Parquet footer.

pyarrow's accessors of a row group's columns end the whole process if the footer is corrupt or its
columns are encrypted. So the numbers are read from the footer's own encoding (Thrift, compact
protocol) and checked. Arrow has the parsed footer only to read rows, where it reports failures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.errors import InputError
from dpdask.io.fragment import TEXT_BYTES, find_layout

TAIL_BYTES = 2**16
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END_BYTES = 12  # the footer's length, and the magic number at both ends of a file
REWRITE = "write it again"
_DECRYPT = "write it without encryption"
INT96, _BYTE_ARRAY, _FIXED = 3, 6, 7
# of these physical types
_NUMBERS = {
    1: pa.int32(),
    2: pa.int64(),
    4: pa.float32(),
    5: pa.float64(),
}
_USUAL = rb"""
    \x26 %(number)s \x1c \x15 (%(number)s) \x19 %(encodings)s \x19 \x18 %(text)s \x15 %(number)s
    \x16 (%(number)s) \x16 (%(number)s) \x16 (%(number)s) \x26 (%(number)s) (?: \x26 (?P<dictionary> %(number)s) )?
    (?: (?(dictionary) \x1c | \x3c) (?: \x18 (%(value)s) \x18 (%(value)s) \x16 | \x36 ) (?P<nulls> %(number)s)
        (?: (?: \x16 %(number)s \x18 | \x28 ) (%(text)s) \x18 (%(text)s) [\x11\x12]{0,2} )? \x00 )?
    (?: (?(nulls) \x19 | (?(dictionary) \x29 | \x49)) %(pages)s
        (?: \x3c (?: (?: \x16 %(number)s \x19 | \x29 ) (%(levels)s) \x19 | \x16 %(number)s \x29 | \x39 ) (%(levels)s) \x00 )? )?
    \x00 (?: \x16 %(number)s \x15 %(number)s \x16 %(number)s \x15 %(number)s )? \x00
"""  # a column chunk as most writers write it: up to its codec, its places, statistics, sizes, indexes
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}  # of values of the other physical types, in bytes


Ranges = list[tuple[Any, Any]]


class Chunk(NamedTuple):
    """The part of a row group that holds one leaf of a column.

    `n_text` is the length of a text that a dictionary holds once, else 0; `limits` the least and
    the greatest value as they are stored, if known.
    """

    column: str
    physical: int
    start: int
    n_bytes: int
    n_bytes_decoded: int
    n_text: int
    n_nulls: int | None
    limits: tuple[bytes, bytes] | None


class RowGroup(NamedTuple):
    """A row group, with its leaves in the order of the schema."""

    n_rows: int
    chunks: tuple[Chunk, ...]


class Footer(NamedTuple):
    """A checked footer; `digest` is that of the file's size and the footer, `start` its place, `parsed` Arrow's own form of it."""

    digest: str
    start: int
    n_file_bytes: int
    groups: tuple[RowGroup, ...]
    parsed: Any

    @property
    def n_rows(self) -> int:
        """The rows of all row groups."""
        return sum(group.n_rows for group in self.groups)


class _Leaf(NamedTuple):
    column: str
    physical: int
    width: int | None
    n_repeated: int  # how many levels repeat, and how many may be absent
    n_optional: int


class _EncryptedError(Exception):
    """The columns are encrypted."""


def read_tail(
    read: Callable[[int, int], bytes],
    size: int,
    name: str,
    hint: str = REWRITE,
    tail_bytes: int = TAIL_BYTES,
) -> bytes:
    """Return the end of a file from its footer on; the bytes from `start` to `end` are `read(start, end)`."""
    raw = read(max(0, size - max(tail_bytes, _END_BYTES)), size)
    if raw[-4:] == _ENCRYPTED:
        raise InputError("its Parquet footer is encrypted", name, _DECRYPT)
    length = (
        int.from_bytes(raw[-8:-4], "little")
        if len(raw) >= _END_BYTES and raw[-4:] == _MAGIC
        else size
    )
    if length + _END_BYTES > size:
        raise InputError(
            "this is not a complete Parquet file: it is truncated or corrupt", name, hint
        )
    return raw[-length - 8 :] if length + 8 <= len(raw) else read(size - length - 8, size)


def digest_footer(raw: bytes, size: int) -> str:
    """Return the digest of a file's size and footer: the footer holds every column's place and size, so a rewritten file has another."""
    return blake2b(size.to_bytes(8, "little") + raw, digest_size=16).hexdigest()


def parse_footer(raw: bytes, size: int, name: str, hint: str = REWRITE) -> Footer:
    """Return what `read_tail` has read, parsed and checked."""
    start = size - len(raw)
    try:
        groups, n_leaves = _read_groups(raw, start)
        parsed = pq.read_metadata(pa.BufferReader(_MAGIC + raw))
        if (parsed.num_columns, parsed.num_row_groups) != (n_leaves, len(groups)):
            raise ValueError
    except _EncryptedError:
        raise InputError("its columns are encrypted", name, _DECRYPT) from None
    except (
        pa.ArrowException,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ):
        raise InputError("its Parquet footer cannot be read: it is corrupt", name, hint) from None
    return Footer(digest_footer(raw, size), start, size, groups, parsed)


def find_ranges(footer: Footer, columns: Collection[str]) -> dict[str, Ranges | None]:
    """Return the least and the greatest value in each row group that holds values; None of a column if a row group does not tell them.

    They are exact values of the file. A column with fields has none.
    """
    types = footer.parsed.schema.to_arrow_schema()
    chunks: dict[str, list[Chunk]] = {name: [] for name in columns}
    for group in footer.groups:
        for chunk in group.chunks:
            if chunk.column in chunks and chunk.n_nulls != group.n_rows:
                chunks[chunk.column].append(chunk)
    return {
        name: _decode(found, types.field(name).type) if name in types.names else None
        for name, found in chunks.items()
    }


def _decode(chunks: list[Chunk], type_: pa.DataType) -> Ranges | None:
    """Return the limits of chunks as Python's values; None if these are not in the same order, or Python has no such date."""
    stored = [end for chunk in chunks for end in chunk.limits or ()]
    if len(stored) < 2 * len(chunks) or pa.types.is_nested(type_):
        return None
    try:
        values = _read_values(stored, chunks[0].physical, type_) if chunks else []
    except (pa.ArrowException, OverflowError, ValueError):
        return None
    return None if values is None else list(zip(values[::2], values[1::2], strict=True))


def _read_values(stored: list[bytes], physical: int, type_: pa.DataType) -> list[Any] | None:
    if pa.types.is_decimal(type_):
        order: Literal["little", "big"] = "little" if physical in _NUMBERS else "big"
        return [
            Decimal(f"{int.from_bytes(each, order, signed=True)}E{-type_.scale}") for each in stored
        ]
    if layout := find_layout(type_):
        return [each.decode() for each in stored] if layout == pa.string() else stored
    if pa.types.is_boolean(type_):
        return [each != b"\0" for each in stored]
    if physical not in _NUMBERS:
        return None
    numbers = pa.Array.from_buffers(
        _NUMBERS[physical], len(stored), [None, pa.py_buffer(b"".join(stored))]
    )
    is_same = type_.bit_width == numbers.type.bit_width
    values: list[Any] = (numbers.view(type_) if is_same else numbers.cast(type_)).to_pylist()
    return values


def _read_groups(raw: bytes, end: int) -> tuple[tuple[RowGroup, ...], int]:
    """Return the row groups, and how many leaves the schema has; a row group's fields are dropped as soon as it is checked."""
    leaves: list[_Leaf] = []

    def check_group(fields: dict[int, Any], found: dict[int, Any]) -> RowGroup:
        if not leaves:
            leaves.extend(_find_leaves(found[2]))
        n_rows, pairs = fields[3], zip(fields[1], leaves, strict=True)
        if n_rows < 0:
            raise ValueError
        return RowGroup(n_rows, tuple(_make_chunk(*pair, n_rows, end) for pair in pairs))

    found, _ = _read_struct(raw, 0, check_group)
    starts = [
        group.chunks[0].start for group in found[4] if group.chunks and group.chunks[0].n_bytes
    ]
    if len(set(starts)) < len(starts):  # its rows would be read twice
        raise ValueError
    return tuple(found[4]), len(leaves) or len(list(_find_leaves(found[2])))


def _find_leaves(elements: Sequence[dict[int, Any]]) -> Iterator[_Leaf]:
    """Yield the leaves of a schema, which lists each group before its children."""
    # of each open group: children to come, levels that repeat, levels that may be null
    above = [[elements[0].get(5, 0), 0, 0]]
    column = ""
    for element in elements[1:]:
        while not above[-1][0]:
            above.pop()
        above[-1][0] -= 1
        name = element[4].decode()
        column = sys.intern(name) if len(above) == 1 else column
        repetition = element.get(3, 0)
        n_repeated, n_optional = above[-1][1] + (repetition == 2), above[-1][2] + (repetition != 0)
        if element.get(5):
            above.append([element[5], n_repeated, n_optional])
        else:
            yield _Leaf(
                column,
                element[1],
                element[2] if element[1] == _FIXED else _WIDTHS.get(element[1]),
                n_repeated,
                n_optional,
            )


def _make_chunk(
    found: dict[int, Any] | tuple[Any, ...], leaf: _Leaf, n_rows: int, end: int
) -> Chunk:
    """Return a column chunk if its place lies in the file, its type is the schema's, and its values are as many as the rows."""
    found = _pick(found) if isinstance(found, dict) else found
    (
        physical,
        n_values,
        n_decoded,
        n_bytes,
        data,
        dictionary,
        old_greatest,
        old_least,
        n_nulls,
        greatest,
        least,
        n_repeated,
        n_optional,
    ) = found
    start = min(dictionary or data, data or dictionary or 0)
    has_place = n_bytes >= 0 <= n_decoded and (not n_bytes or len(_MAGIC) <= start <= end - n_bytes)
    has_sizes = n_repeated in (0, leaf.n_repeated + 1) and n_optional in (0, leaf.n_optional + 1)
    if (
        not has_place
        or not has_sizes
        or physical != leaf.physical
        or (n_values != n_rows and not leaf.n_repeated)
    ):
        raise ValueError
    if physical != _BYTE_ARRAY:
        least, greatest = (
            old_least if least is None else least,
            old_greatest if greatest is None else greatest,
        )
    known = [len(each) for each in (least, greatest) if each is not None]
    n_text = (
        max(known, default=TEXT_BYTES) if dictionary is not None and physical == _BYTE_ARRAY else 0
    )
    limits = (
        (least, greatest)
        if len(known) == 2 and (leaf.width is None or known == [leaf.width] * 2)
        else None
    )
    return Chunk(leaf.column, physical, start, n_bytes, n_decoded, n_text, n_nulls, limits)


def _pick(fields: dict[int, Any]) -> tuple[Any, ...]:
    """Return the fields of a column chunk that are used, in their order in a file."""
    if 8 in fields or 9 in fields:
        raise _EncryptedError
    about = fields[3]
    statistics, sizes = about.get(12, {}), about.get(16, {})
    placed = about[1], about[5], about[6], about[7], about[9], about.get(11)
    return (
        *placed,
        *(statistics.get(number) for number in (1, 2, 3, 5, 6)),
        len(sizes.get(2, ())),
        len(sizes.get(3, ())),
    )


def _read_chunk(raw: bytes, at: int) -> tuple[dict[int, Any] | tuple[Any, ...], int]:
    """Return a column chunk, and where it ends: its fields, or, if it is written as usual, those that are used, found by one match."""
    usual = _compile_usual().match(raw, at)
    if usual is None:
        return _read_struct(raw, at)
    *numbers, dictionary, old_greatest, old_least, nulls, greatest, least = usual.groups()[:-2]
    repeated, optional = usual.groups()[-2:]
    return (
        *map(_decode_integer, numbers),
        dictionary and _decode_integer(dictionary),
        old_greatest and old_greatest[1:],
        old_least and old_least[1:],
        nulls and _decode_integer(nulls),
        greatest and greatest[1:],
        least and least[1:],
        repeated[0] >> 4 if repeated else 0,
        optional[0] >> 4 if optional else 0,
    ), usual.end()


@lru_cache(2**12)
def _decode_integer(raw: bytes) -> int:
    number = 0
    for byte in reversed(raw):
        number = number << 7 | byte & 127
    return number >> 1 ^ -(number & 1)


@cache
def _compile_usual() -> re.Pattern[bytes]:
    """Return the pattern of a column chunk as most writers write it; texts and lists that are long are no part of it."""

    def either(patterns: Iterable[bytes]) -> bytes:
        return b"(?:%s)" % b"|".join(patterns)

    def text(lengths: Iterable[int]) -> bytes:
        return either(rb"\x%02x.{%d}" % (n, n) for n in lengths)

    def many(kind: int, item: bytes, most: int) -> bytes:
        return either(rb"\x%02x(?:%s){%d}" % (n << 4 | kind, item, n) for n in range(most + 1))

    number = rb"[\x80-\xff]{0,9}[\0-\x7f]"
    parts = {
        b"number": number,
        b"value": text(range(17)),
        b"text": text(range(48)),
        b"encodings": many(5, number, 6),
        b"pages": many(12, rb"\x15%s\x15%s\x15%s\0" % (number, number, number), 4),
        b"levels": many(6, number, 6),
    }
    return re.compile(re.sub(rb"\s", b"", _USUAL) % parts, re.DOTALL)


def _read_struct(
    raw: bytes, at: int, shorten: Callable[[dict[int, Any], dict[int, Any]], Any] | None = None
) -> tuple[dict[int, Any], int]:
    """Return a struct's fields by their numbers, and where it ends; of its row groups only what `shorten` makes of each.

    A value that goes on beyond the end is noticed by the next byte that is looked at: a struct ends
    with a zero.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := raw[at]:
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _read_integer(raw, at)
        kind = head & 15
        if kind == 6 or kind == 5:
            byte = raw[at]
            at += 1
            if byte > 127 and raw[at] < 128:
                byte += (raw[at] - 1) << 7
                at += 1
            elif byte > 127:
                byte, at = _read_number(raw, at - 1)
            fields[number] = (byte >> 1) ^ -(byte & 1)
        elif kind < 3:
            fields[number] = kind == 1
        elif kind == 9 and number == 4 and shorten is not None:
            n_groups, _, at = _read_head(raw, at)
            fields[4] = []
            for _ in range(n_groups):
                group, at = _read_struct(raw, at)
                fields[4].append(shorten(group, fields))
        else:
            fields[number], at = _read_value(raw, at, kind)
    return fields, at + 1


def _read_value(raw: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Return a value, and where it ends."""
    if kind == 8:
        length, at = _read_number(raw, at)
        return raw[at : at + length], at + length
    if kind == 12:
        return _read_struct(raw, at)
    if kind == 9:
        length, inner, at = _read_head(raw, at)
        read = _read_integer if inner in (4, 5, 6) else _read_chunk if inner == 12 else None
        values = []
        for _ in range(length):
            value, at = read(raw, at) if read else _read_value(raw, at, inner)
            values.append(value)
        return values, at
    if kind in (4, 5, 6):
        return _read_integer(raw, at)
    if kind < 4 or kind == 7:
        return None, at + (1 if kind < 4 else 8)
    raise ValueError  # a footer has no sets and maps


def _read_head(raw: bytes, at: int) -> tuple[int, int, int]:
    """Return how many elements a list has, their kind, and where they begin."""
    head = raw[at]
    length, at = _read_number(raw, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
    return length, head & 15, at


def _read_integer(raw: bytes, at: int) -> tuple[int, int]:
    number, at = _read_number(raw, at)
    return (number >> 1) ^ -(number & 1), at


def _read_number(raw: bytes, at: int) -> tuple[int, int]:
    number = raw[at]
    at += 1
    if number < 128:
        return number, at
    number &= 127
    for shift in range(7, 70, 7):
        byte = raw[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise ValueError
