"""Reading CSV: one file is one fragment, parsed by the types that the schema declares, never by guessing."""

from __future__ import annotations

import codecs
import contextlib
import csv as standard_csv
import datetime as dt
import functools
import gzip
import hashlib
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.filesystems import report_change
from dpdask.io.fragment import Fragment, estimate_width, group_rows
from dpdask.io.storage import call_storage, open_remote
from dpdask.schema import Column, Schema, arrow_type

_SAMPLE_BYTES = 2**16
_VALUES = {"true", "false", "null", "none", "nan", "n/a"}
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BLOCK_BYTES = 2**22
_BATCH_ROWS = 2**17
_ALIKE_BYTES = 2**14
_LF, _CR = b"\n\r"
_HEXADECIMAL, _FINITE = r"^\s*[-+]?0[xX]", r"\d"
_HEADER = "begin the file with the names of its columns, separated by commas"
_NO_HEADER = "this CSV file has no readable header line"
_FILE = "a CSV file"
_QUOTES = "close each quote on the line on which it was opened, or convert the file to Parquet"
_STAMPS = ("ETag", "etag", "mtime", "updated", "last_modified", "LastModified")
_GZIP = b"\x1f\x8b"  # which begins no text
BAD_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)


def inspect(url: str, name: str, schema: Schema) -> tuple[Versions, pa.Schema]:
    """Return the digests and the size of a file, and the columns with their declared types."""
    schema.check_dates()
    versions = call_storage(url, _find_versions)
    names = read_names(url, name)
    if not set(names) & set(schema.columns):
        line = names[0] if len(names) == 1 else ""
        separators = (sign for sign in _SEPARATORS if set(_split(line, sign)) & set(schema.columns))
        found = next(separators, None)
        if found is not None:
            raise _refuse_separator(found, name)
        raise DataError("its first line names no declared column", name, _HEADER)
    schema.check_header(names, name)
    declared = schema.columns
    types = pa.schema(
        [(each, csv_type(declared[each]) if each in declared else pa.string()) for each in names]
    )
    for field in types:
        if not _is_read(field.type):
            what = f"CSV files cannot be read as {field.type}"
            raise SpecError(what, f"column {field.name!r}", "declare another `type`")
    return versions, types


@functools.cache
def _is_read(type_: pa.DataType) -> bool:
    """Return whether Arrow reads a type from texts."""
    convert = pa_csv.ConvertOptions(column_types={"x": type_})
    try:
        pa_csv.read_csv(io.BytesIO(b"x\n"), convert_options=convert)
    except pa.ArrowException:
        return False
    return True


def _refuse_gzip(name: str) -> InputError:
    what = "this file cannot be decompressed: it is truncated or corrupt"
    return InputError(what, name, "write it again")


def read_names(url: str, name: str) -> list[str]:
    """Return the names in a file's header line; nothing else of the file is used."""
    try:
        with open_url(url) as file:
            header = file.readline(_SAMPLE_BYTES)
        names = _split(header.decode("utf-8-sig"), ",")
    except UnicodeDecodeError:
        is_utf_16 = header[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        what = f"{_NO_HEADER}: its encoding is {'UTF-16' if is_utf_16 else 'not UTF-8'}"
        raise InputError(what, name, "write it in UTF-8") from None
    except BAD_GZIP:
        raise _refuse_gzip(name) from None
    except standard_csv.Error:
        names = []
    if not names:
        raise InputError(_NO_HEADER, name, "write it in UTF-8 with its column names first")
    return names


def digest(url: str) -> bytes | None:
    """Return the SHA-256 of a file's text, decompressed; None if it has no rows, or is corrupt."""
    try:
        # every byte is a letter, and every end of a line is known
        with io.TextIOWrapper(open_url(url), encoding="latin-1") as lines:
            is_single = len(_split(next(lines, ""), ",")) == 1
            if not any(is_single or line.strip("\n") for line in lines):
                return None
        with open_url(url) as file:
            return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]  # fsspec's files have readinto
    except BAD_GZIP:
        return None


def check_names(names: Sequence[str], name: str) -> None:
    """Check that a first line has names of columns, before they are shown: it may be a row."""
    found = next((sign for sign in _SEPARATORS if len(names) == 1 and sign in names[0]), None)
    fields = _split(names[0], found) if found is not None else names
    if len(set(names)) < len(names) or any(map(_is_value, fields)):
        what = "its first line looks like a row: a field is empty, repeated, a number or a date"
        raise DataError(what, name, _HEADER)
    if found is not None:
        raise _refuse_separator(found, name)


def _refuse_separator(found: str, name: str) -> DataError:
    what = f"its columns are separated by {_SEPARATORS[found]}, and commas are expected"
    return DataError(what, name, "write it with commas, or convert it to Parquet")


def _is_value(field: str) -> bool:
    """Return whether a text is empty, an address, no value, a truth value, a number or a date."""
    if "@" in field or field.strip().lower() in _VALUES:
        return True
    bare = re.sub(r"(?<=\d)[eETZ](?=[-+\d]|$)", "", field.strip())
    return not bare or (any(map(str.isdigit, bare)) and not any(map(str.isalpha, bare)))


def _split(line: str, separator: str) -> list[str]:
    return next(standard_csv.reader(io.StringIO(line), delimiter=separator), [])


def csv_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a column in a CSV file: the declared type, or the one that its domain implies.

    A kept column without a `type` is text, which passes it through letter by letter.
    """
    if column.type is not None:
        return arrow_type(column.type)
    if column.kind in ("continuous", "mixed"):
        declared = (*(column.bounds or ()), *(column.atoms or ()))
        if any(isinstance(value, dt.datetime) for value in declared):
            return pa.timestamp("us")
        has_dates = any(isinstance(value, dt.date) for value in declared)
        return pa.date32() if has_dates else pa.float64()
    domain = column.listed or ("",)
    if isinstance(domain[0], bool):
        return pa.bool_()
    if isinstance(domain[0], dt.date):
        return pa.date32()
    if isinstance(domain[0], str):
        return pa.string()
    return pa.float64() if any(isinstance(level, float) for level in domain) else pa.int64()


def read_batches(
    fragment: Fragment, columns: list[str], types: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield a file's rows; an empty field is null."""
    if call_storage(fragment.url, _find_versions).version != fragment.version:
        raise report_change(fragment.name)
    convert = pa_csv.ConvertOptions(
        column_types={field.name: field.type for field in types},
        include_columns=columns,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    read = pa_csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    single = len(types) - len(fragment.constants) == 1
    ragged: list[pa_csv.InvalidRow] = []

    def note(row: Any) -> str:
        ragged.append(row)
        return "error"

    # of one column, an empty line is a row
    parse = pa_csv.ParseOptions(ignore_empty_lines=not single, invalid_row_handler=note)
    row_bytes = sum(estimate_width(types.field(name).type) for name in columns)
    n_rows = max(1, min(_BATCH_ROWS, int(_BLOCK_BYTES / row_bytes)))
    try:
        with open_url(fragment.url) as file:
            text = _Text(file)
            with pa_csv.open_csv(text, read, parse, convert) as reader:
                # where the blocks of a text end depends on the length of each value, private ones too
                for held in group_rows(text.check(reader), n_rows):
                    yield from _join(held)
            text.check_lines(empty_count=single)
        if text.is_odd:
            _check_numbers(fragment.url, [types.field(name) for name in columns])
    except BAD_GZIP:
        raise _refuse_gzip(fragment.name) from None
    except pa.ArrowException as error:
        lacking = set(columns).difference(read_names(fragment.url, fragment.name))
        if lacking:
            hint = "write all files with the declared columns"
            where = f"{fragment.name}, column {min(lacking)!r}"
            raise DataError("the file has no such column", where, hint) from None
        if text.has_rows:
            raise _describe(str(error), ragged, types) from None


class _Text(io.RawIOBase):
    """A file that is read, and what its bytes tell beside the rows that Arrow makes of them.

    Arrow takes a line break behind an open quote for a part of the field: one quote too many would
    make one row of all that follow, and the private values in them a part of a kept one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._n_rows, self._n_ends, self._n_filled, self._last = 0, 0, 0, b"\n"
        self.is_odd = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if data:
            # the byte before tells what its first one begins
            text = np.frombuffer(self._last + data, dtype=np.uint8)
            ends, returns = (np.flatnonzero(text == sign) for sign in b"\n\r")
            pairs = int((text[ends[ends > 0] - 1] == _CR).sum()) + int(text[0] in b"\n\r")
            self._n_ends += len(ends) + len(returns) - pairs
            after = np.concatenate([ends, returns]) + 1
            self._n_filled += int((~np.isin(text[after[after < len(text)]], [_LF, _CR])).sum())
            crosses = np.flatnonzero((text[1:] | 0x20) == ord("x"))
            self.is_odd = self.is_odd or bool((text[crosses] == ord("0")).any())
            self._last = data[-1:]
        return data

    def check(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches, and count their rows; infinite numbers may be texts beyond a float."""
        for batch in batches:
            self._n_rows += batch.num_rows
            floats = (each for each in batch.columns if pa.types.is_floating(each.type))
            sums = filter(None, (pc.sum(column).as_py() for column in floats))
            self.is_odd = self.is_odd or not all(map(math.isfinite, sums))
            yield batch

    @property
    def has_rows(self) -> bool:
        """Whether there is more than a header."""
        return self._n_filled > 1 or self._n_ends > 1

    def check_lines(self, *, empty_count: bool) -> None:
        """Check that each line was a row, but the header."""
        n_lines = self._n_filled
        if empty_count:
            n_lines = self._n_ends + (self._last not in (b"\n", b"\r"))
        if self._n_rows != n_lines - 1:
            raise DataError("a quoted field goes on over the end of its line", _FILE, _QUOTES)


def _check_numbers(url: str, fields: Sequence[pa.Field]) -> None:
    """Refuse texts that Arrow reads as other numbers: 0xFF as -1, and 1e400 as infinite.

    The file is read again, since such texts are rare.
    """
    types = {field.name: field.type for field in fields}
    wrong = {name: _HEXADECIMAL for name, type_ in types.items() if pa.types.is_integer(type_)}
    wrong |= {name: _FINITE for name, type_ in types.items() if pa.types.is_floating(type_)}
    if not wrong:
        return
    texts = dict.fromkeys(wrong, pa.string())
    convert = pa_csv.ConvertOptions(column_types=texts, include_columns=list(wrong))
    read = pa_csv.ReadOptions(use_threads=False)
    with open_url(url) as file, pa_csv.open_csv(file, read, convert_options=convert) as reader:
        for batch in reader:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                type_ = types[name]
                odd = column.filter(pc.match_substring_regex(column, wrong[name]))
                if pa.types.is_floating(type_):
                    odd = odd.filter(pc.is_inf(odd.cast(type_)))
                if odd.drop_null():
                    what = f"a number is in hexadecimal, or too large for {type_}"
                    raise DataError(what, f"column {name!r}", "correct it")


def _join(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) == 1:
        return batches
    return pa.Table.from_batches(batches).combine_chunks().to_batches()  # type: ignore[no-any-return]  # untyped


def _describe(message: str, ragged: Sequence[Any], types: pa.Schema) -> DataError:
    """Return the error of a line, or of a value: only numbers are taken from Arrow's message.

    A line that cannot be split or decoded is named. Where a value of another type stands is not
    told.
    """
    line = re.search(r"Row #(\d+)", message)
    here = f"line {line[1]}" if line else "a line"
    for row in ragged:
        n_fields, n_columns = row.actual_columns, row.expected_columns
        what = f"{here} has {n_fields} fields, separated by commas, and the header has {n_columns}"
        hint = "correct the line, or put fields that hold commas in quotes"
        return DataError(what, _FILE, hint)
    number = re.match(r"In CSV column #(\d+)", message)
    column = f"column {types.names[int(number[1])]!r}" if number else _FILE
    if message.endswith("invalid UTF8 data"):
        return DataError(f"a text in {here} is not in UTF-8", column, "convert the file to UTF-8")
    if number is None:
        return DataError("a line cannot be split into fields", column, _QUOTES)
    type_, hint = types.field(int(number[1])).type, "correct the file, or the schema's `type`"
    if pa.types.is_timestamp(type_):
        zone = (
            f"timestamp[{type_.unit}, tz=UTC]" if type_.tz is None else f"timestamp[{type_.unit}]"
        )
        ends = "end with Z or an offset" if type_.tz is None else "have no offset"
        hint = f"{hint}; times that {ends} are of the type {zone}"
    return DataError(f"a value cannot be read as {type_}", column, hint)


def open_url(url: str) -> IO[bytes]:
    """Open a file to read, decompressed if its name or its beginning says so."""
    file = open_remote(url)
    packed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if packed or url.lower().endswith(".gz") else file  # type: ignore[return-value]  # it is one in all but name


class Versions(NamedTuple):
    """What tells a file from others."""

    content: str  # A digest of the size, the first and the last 64 KiB
    version: str  # one with the file's time or ETag too, so that a change in between is noticed
    # One of the beginning of the text, whether or not it is compressed: copies have the same.
    alike: str
    n_bytes: int


def _find_versions(fs: Any, path: str) -> Versions:
    fs.invalidate_cache()
    info = fs.info(path)
    size = int(info["size"])
    head = fs.cat_file(path, start=0, end=min(size, _SAMPLE_BYTES))
    tail = fs.cat_file(path, start=max(0, size - _SAMPLE_BYTES), end=size)
    content = blake2b(size.to_bytes(8, "little") + head + tail, digest_size=16).hexdigest()
    stamp = [str(info.get(key)) for key in _STAMPS if key in info]
    version = blake2b(f"{content} {stamp}".encode(), digest_size=16).hexdigest()
    return Versions(content, version, blake2b(_unpack(head), digest_size=16).hexdigest(), size)


def _unpack(head: bytes) -> bytes:
    """Return the beginning of a text, which may be compressed, in one member or several."""
    if not head.startswith(_GZIP):
        return head[:_ALIKE_BYTES]
    text = b""
    with contextlib.suppress(zlib.error):
        while head.startswith(_GZIP) and len(text) < _ALIKE_BYTES:
            member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            text += member.decompress(head, _ALIKE_BYTES - len(text))
            head = member.unused_data
    return text
