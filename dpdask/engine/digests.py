"""Digests of the keys of rows, to know a row again whatever file, order and codec it comes in."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.arrays import Words, freeze_class
from dpdask.codec import is_bytes
from dpdask.engine.compute import Progress, guard, make_stage, run_stage
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import read_batches

_BYTES = 16
_PERSON = b"dpdask row keys"
DIGEST = np.dtype(f"S{_BYTES}")
_NULL, _VALUE, _NEXT, _EMPTY = (
    pa.scalar(text, pa.large_string()) for text in ("null", "value", "\x1f", "")
)


@freeze_class
class Hashing:
    """What all tasks share."""

    columns: tuple[str, ...]
    types: pa.Schema
    name: bytes


def add_key(hashes: NDArray[np.bytes_], key: bytes) -> NDArray[np.bytes_]:
    """Return hashes that nobody can test guesses by who does not have the key."""
    data = hashes.tobytes()
    keyed = (
        blake2b(data[at : at + _BYTES], key=key, digest_size=_BYTES, person=_PERSON).digest()
        for at in range(0, len(data), _BYTES)
    )
    return np.frombuffer(b"".join(keyed), dtype=DIGEST)


def hash_rows(
    fragments: Sequence[Fragment],
    columns: Sequence[str],
    types: pa.Schema,
    name: bytes,
    progress: Progress | None = None,
) -> dict[int, NDArray[np.bytes_]]:
    """Return the hashes of the rows of each fragment, by its number; rows with equal values in some columns have equal ones.

    Parameters
    ----------
    columns
        Columns that are released as they are: their hashes may be seen wherever they may.
    name
        Of the key; under another name, a row has another hash.
    """
    shared = Hashing(columns=tuple(columns), types=types, name=name)
    arguments = [(fragment,) for fragment in fragments]
    stage = make_stage("keys", hash_fragment, arguments, shared, join_parts)
    return dict(chain.from_iterable(chain.from_iterable(run_stage(stage, progress))))


def sum_rows(
    fragments: Sequence[Fragment],
    columns: Sequence[str],
    types: pa.Schema,
    progress: Progress | None = None,
) -> dict[int, Words]:
    """Return the sum of the hashes of the rows of each fragment, by its number: their order does not change it.

    Privacy
    -------
    Exact, of private rows: compare it and discard it.
    """
    shared = Hashing(columns=tuple(columns), types=types, name=b"")
    stage = make_stage("rows", sum_fragment, [(each,) for each in fragments], shared, join_parts)
    return dict(chain.from_iterable(chain.from_iterable(run_stage(stage, progress))))


@guard
def sum_fragment(fragment: Fragment, shared: Hashing) -> list[tuple[int, Words]]:
    """Return the sum of the hashes of a fragment's rows."""
    total, columns = np.zeros(2, dtype=np.uint64), list(shared.columns)
    for batch in read_batches(fragment, columns, shared.types):
        total += hash_batch(batch, columns).view(np.uint64).reshape(-1, 2).sum(axis=0)
    return [(fragment.number, total)]


@guard
def hash_fragment(fragment: Fragment, shared: Hashing) -> list[tuple[int, NDArray[np.bytes_]]]:
    """Return the hashes of a fragment's rows."""
    parts = [np.zeros(0, dtype=DIGEST)]
    columns = list(shared.columns)
    parts += [
        hash_batch(batch, columns, shared.name)
        for batch in read_batches(fragment, columns, shared.types, columns)
    ]
    return [(fragment.number, np.concatenate(parts))]


@guard
def join_parts(parts: list[list[tuple[int, Any]]]) -> list[tuple[int, Any]]:
    """Return the numbers and hashes of several tasks."""
    return list(chain.from_iterable(parts))


def hash_batch(
    batch: pa.RecordBatch, columns: Sequence[str], name: bytes = b""
) -> NDArray[np.bytes_]:
    """Return a hash of each row, which depends on its values alone: not on how a file stores them."""
    texts = [_write(batch.column(name)) for name in columns]
    # with their lengths, so that no two rows are written alike
    sizes = [pc.binary_length(text).cast(pa.large_string()) for text in texts]
    joined = pc.binary_join_element_wise(*sizes, *texts, _NEXT)
    key = blake2b(name, digest_size=32).digest()
    values = joined.cast(pa.large_binary()).to_pylist()
    data = b"".join(
        blake2b(value, key=key, digest_size=_BYTES, person=_PERSON).digest() for value in values
    )
    return np.frombuffer(data, dtype=DIGEST)


def _write(array: Any) -> Any:
    """Return values as texts; nulls are unlike any value."""
    if pa.types.is_nested(array.type) or is_bytes(array.type):
        texts = pa.array([None if each is None else repr(each) for each in array.to_pylist()])
        written = texts.cast(pa.large_string())
    else:
        written = array.cast(pa.large_string())
    marked = pc.binary_join_element_wise(_VALUE, written, _EMPTY)
    return marked.fill_null(_NULL)
