"""Values as 64-bit words, and their keyed hashes, which name units and groups."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_NULL = np.uint64(0x9E3779B97F4A7C15)


def as_words(array: pa.Array) -> Words:
    """Return a column as 64-bit words, equal if and only if the values are (for texts, up to a 64-bit hash)."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
        floating = pa.types.is_floating(array.type)
        numbers = array.cast(pa.float64() if floating else pa.int64(), safe=False)
        found = np.asarray((numbers.fill_null(0) if numbers.null_count else numbers).to_numpy(zero_copy_only=False))
        plain = (np.where(np.isnan(found), np.nan, found + 0.0) if floating else found).view(np.uint64)  # one zero, one NaN
    else:
        encoded = array.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        hashed = [int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") for value in distinct]
        codes = np.asarray(encoded.indices.fill_null(0).to_numpy(zero_copy_only=False))
        plain = np.array(hashed or [0], dtype=np.uint64)[codes]
    if array.null_count:
        plain = np.where(np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False)), _NULL, plain)
    return np.ascontiguousarray(plain, dtype=np.uint64)
