"""Which rows of a fragment are released and which are held out: by row, or by unit with a bound on its rows."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.engine.work import BOUNDS_NAME, TableWork, UnitWork, kept
from dpdask.errors import DataError, InputError
from dpdask.io.storage import Folder
from dpdask.kernels.siphash import siphash
from dpdask.stats import holdout_mask
from dpdask.stats.bounding import UnitBounds
from dpdask.stats.holdout import HOLDOUT_ID
from dpdask.streams import RunKey, stream, words

Words = NDArray[np.uint64]
_CHOSEN = "chosen"
_NULL = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """The keyed hashes of some rows: uint64 arrays of one length."""

    units: Words
    rows: Words
    positions: Words


class Hasher:
    """Hashes the units and rows of one fragment, batch by batch.

    Parameters
    ----------
    key
        The run's key.
    unit
        The unit's column, and the public columns that tell rows apart.
    number
        The fragment's place in the table.
    """

    def __init__(self, key: RunKey, unit: UnitWork, number: int) -> None:
        self._unit = unit
        self._unit_key = words(stream(key, "bounding/unit", ""), 2)
        self._row_key = words(stream(key, "bounding/row", ""), 2)
        self._holdout_key = words(stream(key, f"{HOLDOUT_ID}/unit", ""), 2)
        self._next = number << 32

    def hash(self, batch: pa.RecordBatch) -> Hashes:
        """Return the hashes of the next rows.

        Raises
        ------
        DataError
            If a row's unit is null.
        """
        names = [self._unit.column, *self._unit.public]
        if batch.column(self._unit.column).null_count:
            raise DataError("holds a null, and the unit of every row must be known", f"column {self._unit.column!r}", "fill it, or drop these rows")
        columns = np.empty((batch.num_rows, len(names)), dtype=np.uint64)
        for place, name in enumerate(names):
            columns[:, place] = _as_words(batch.column(name))
        positions = np.arange(self._next, self._next + batch.num_rows, dtype=np.uint64)
        self._next += batch.num_rows
        units = siphash(np.ascontiguousarray(columns[:, :1]), *self._unit_key)
        return Hashes(units=units, rows=siphash(columns, *self._row_key), positions=positions)

    def held_out(self, hashes: Hashes, fraction: float) -> NDArray[np.bool_]:
        """Return which rows belong to a held-out unit."""
        drawn = siphash(hashes.units.reshape(-1, 1), *self._holdout_key)
        result: NDArray[np.bool_] = drawn < np.uint64(int(fraction * 2**64))
        return result


class Chooser:
    """Splits one fragment's rows, batch by batch and in order: a pure function of the run key and the fragment.

    Parameters
    ----------
    work
        The work on the table.
    fragment_id
        Names the fragment.
    number
        The fragment's place in the table.
    """

    def __init__(self, work: TableWork, fragment_id: str, number: int) -> None:
        self._work, self._fragment_id = work, fragment_id
        self._rng = stream(work.key(), HOLDOUT_ID, fragment_id) if work.fraction is not None and work.unit is None else None
        self._hasher = Hasher(work.key(), work.unit, number) if work.unit is not None else None
        self._bounds = load_bounds(work.secrets, work.unit.bounds_sha256) if work.unit is not None else None
        self._split: list[NDArray[np.bool_]] = []

    def split(self, batch: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
        """Return which of the next rows are released, and which shape the reference (None: all that are in the bound).

        Raises
        ------
        DataError
            If a row's unit is null.
        """
        fraction = self._work.fraction
        if self._hasher is not None and self._bounds is not None:
            hashes = self._hasher.hash(batch)
            within = self._bounds.released(hashes.units, hashes.rows, hashes.positions)
            held_out = self._hasher.held_out(hashes, fraction) if fraction is not None else np.zeros(batch.num_rows, dtype=bool)
            self._split.append(within & ~held_out)
            return self._split[-1], within if fraction is None else within & held_out
        if self._rng is None or fraction is None:
            return np.ones(batch.num_rows, dtype=bool), None
        mask = holdout_mask(self._rng, batch.num_rows, fraction)
        return ~mask, mask

    def keep(self) -> None:
        """Keep which rows are released beside the run key, so that the writing stage need not hash them again."""
        if self._hasher is not None:
            released = np.concatenate([*self._split, np.zeros(0, dtype=bool)])
            self._work.secrets.claim(f"{_CHOSEN}/{self._fragment_id}", np.packbits(released).tobytes())

    def released(self) -> Callable[[Any], NDArray[np.bool_]]:
        """Return a function that tells, batch by batch, which rows are released: as kept, or computed anew."""
        name = f"{_CHOSEN}/{self._fragment_id}"
        if self._hasher is None or not self._work.secrets.exists(name):
            return lambda batch: self.split(batch)[0]
        bits = np.unpackbits(np.frombuffer(self._work.secrets.read(name), dtype=np.uint8)).view(bool)
        start = 0

        def read(batch: Any) -> NDArray[np.bool_]:
            nonlocal start
            start += batch.num_rows
            chosen: NDArray[np.bool_] = bits[start - batch.num_rows : start]
            if len(chosen) != batch.num_rows:
                raise InputError("a fragment has other rows than when the run began", None, "restore it and run again, or `dpdask abort` the run")
            return chosen

        return read


@functools.lru_cache(maxsize=2)
def load_bounds(secrets: Folder, sha256: str) -> UnitBounds:
    """Return the units' bounds, read once by each process and checked against their digest.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    return UnitBounds.from_bytes(kept(secrets, BOUNDS_NAME, sha256, "the run's unit bounds are not those that were written"))


def _as_words(array: pa.Array) -> Words:
    """Return a column as 64-bit words, equal where and only where the values are (texts: up to a 64-bit hash)."""
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
