"""Seals: a digest of what a fragment held when it was first seen, so that its noise is never drawn for anything else.

A stream is named by its fragment, not by the fragment's content. If the content changed between two passes, two attempts
or two computations of a lazy frame, the same noise would be added to other values, and the difference of the two outputs would
reveal them, which no ε covers. So the first task that reads a fragment seals it, and every later task compares.

Seals of files go with the results of the pass that counts them, and with the tasks that write; a job without such a pass reads
each fragment once, and what is staged is replaced, or in a store written once. They travel in tasks, so they are keyed with the run
key: who knows all rows but one cannot test guesses of the last. Seals of units' rows and of a frame's partitions are files beside the
run key, since several passes, or whoever computes a frame, read them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from decimal import Decimal
from hashlib import blake2b
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from numpy.typing import NDArray

from dpdask.errors import DataError
from dpdask.io.faults import report_change
from dpdask.io.storage import Folder
from dpdask.objects import find_cell_types

_SEALS = "seals"
_SEAL_BYTES = 16
_SLICE = 2**30  # bytes at once: OpenSSL counts them in a C int
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)
_STABLE = (  # types of Python whose values are written and hashed alike in every process
    *(str, bytes, int, float, complex, Decimal, np.generic, type(None), type(pd.NA), dt.date, dt.time, dt.timedelta, UUID),
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
    Each column's bytes go through GHASH, which takes a seventh of the time of SHA-256. It is a universal hash: whoever does not know its key
    finds no two contents with the same tag, other than by a chance of at most n / 2**128 for n blocks of 16 bytes. Tags under one
    key would reveal it, so they never leave this object: its digest is their keyed BLAKE2b.
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
            secret = blake2b(f"{part} {name}".encode(), key=self._key, digest_size=32, person=b"dpdask seal").digest()
            self._tags[name, part] = Cipher(AES256(secret), GCM(bytes(12))).encryptor()
        return self._tags[name, part]

    def digest(self) -> bytes:
        """Return the keyed digest of all batches, 16 bytes; no batch can be added any more."""
        parts = [repr((self._n_rows, sorted(self._types.items()))).encode()]
        for (name, part), tag in sorted(self._tags.items()):
            tag.finalize()
            parts += [repr((name, part)).encode(), tag.tag]
        return blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), key=self._key, digest_size=_SEAL_BYTES).digest()

    def check(self, secrets: Folder, name: str, where: str) -> None:
        """Seal the fragment, or compare it with its seal.

        Parameters
        ----------
        secrets
            The folder of the run key.
        name
            The fragment's, which tells nothing of its content.
        where
            The fragment's place, for the message.

        Raises
        ------
        InputError
            If it held something else before.
        """
        if not _same(secrets, name, self.digest()):
            raise report_change(where)


def _list_parts(array: pa.Array, start: int) -> dict[str, NDArray[np.uint8]]:
    """Return the bytes of an array's values: of the values themselves, of the lengths of texts, and of the rows of nulls.

    Parameters
    ----------
    array
        The values, without a dictionary.
    start
        The number of the first row in the fragment.
    """
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
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
        width = 0
    array = array.drop_null() if array.null_count else array
    buffers, end = array.buffers(), array.offset + len(array)
    if width:
        return parts | {"values": _view(buffers[1], np.uint8)[array.offset * width : end * width]}
    if len(array):
        ends = _view(buffers[1], np.int64)[array.offset : end + 1]
        parts |= {"lengths": np.diff(ends).view(np.uint8), "values": _view(buffers[2], np.uint8)[ends[0] : ends[-1]]}
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
        children = [each[ends[0] : ends[-1]] for each in (array.keys, array.items)] if pa.types.is_map(array.type) else [array.flatten()]
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
    """Keep the seal of a frame's partition, or compare it with the one that is kept.

    Parameters
    ----------
    seal
        The digest of what the partition holds.
    secrets
        The folder of the run key.
    name
        The partition's.

    Raises
    ------
    DataError
        If it held something else before.
    """
    if not _same(secrets, name, seal):
        raise DataError("a partition's rows changed since they were first read", "frame", "persist the frame before its first use, or fit again")


def find_content(column: pd.Series | pd.Index) -> pa.Array | None:
    """Return what a seal takes of a kept column or an index: its values, or where Arrow has no plain type for them, their hashes.

    Nothing is drawn for kept columns. They tell whether the rows are in another order, in which each would meet another row's noise.

    Parameters
    ----------
    column
        The values.

    Returns
    -------
    An array without dictionaries and Arrow's extension types. None for Python's dictionaries, sets, and objects of other classes than those of
    plain values: they may look changed in another process though they are the same, or have no hash.
    """
    if isinstance(column.dtype, pd.CategoricalDtype):  # by its values: the same whatever the order of the categories
        content, codes = find_content(column.array.categories), column.array.codes
        return None if content is None else content.take(pa.array(codes, mask=codes < 0))
    if column.dtype == object and not all(issubclass(each, _STABLE) for each in find_cell_types(column.to_numpy())):
        return None
    try:
        array = pa.array(column, from_pandas=True)
        array = _strip(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
        if _is_sealed(array.type):
            return array
    except (pa.ArrowException, OverflowError, TypeError, ValueError):  # objects of several types
        pass
    try:
        return pa.array(pd.util.hash_array(column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array))
    except (pa.ArrowException, NotImplementedError, TypeError, ValueError):
        return None


def _strip(array: pa.Array) -> pa.Array:
    """Return an array as the one that an extension type lies in, or as the values of a dictionary."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _strip(array.storage)
    return _strip(array.dictionary).take(array.indices) if pa.types.is_dictionary(array.type) else array


def _is_sealed(type_: pa.DataType) -> bool:
    """Return whether a seal takes values of a type: plain ones, and lists, structs and maps of such."""
    if any(is_one(type_) for is_one in (*_LISTS, pa.types.is_struct)):
        return all(_is_sealed(type_.field(number).type) for number in range(type_.num_fields))
    return not (pa.types.is_nested(type_) or pa.types.is_dictionary(type_) or isinstance(type_, pa.BaseExtensionType))


def _same(secrets: Folder, name: str, digest: bytes) -> bool:
    return secrets.claim(f"{_SEALS}/{name}", digest) == digest
