"""Which rows of a part are released and which are held out, by row or by unit; and some rows of a batch, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.engine.cluster import remember
from dpdask.engine.work import TableWork, UnitWork, read_kept
from dpdask.errors import DataError, InputError
from dpdask.io.encrypted import BOUNDS_NAME
from dpdask.io.storage import Folder
from dpdask.kernels.rows import keep_chosen, take_at
from dpdask.kernels.siphash import siphash
from dpdask.stats.bounding import UnitBounds
from dpdask.stats.hashing import as_words
from dpdask.streams import Rng, RunKey, stream, words

Words = NDArray[np.uint64]
HOLDOUT_ID = "holdout"
_CHOSEN = "chosen"
_WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits


def holdout_mask(rng: Rng, n_rows: int, fraction: float) -> NDArray[np.bool_]:
    """Return which of the next `n_rows` rows are held out, each with probability `fraction`, independently.

    Parameters
    ----------
    rng
        The fragment's stream of mechanism `holdout`; row r of the fragment owns its r-th word, so the split depends
        on the run key, the fragment and the position in it, and on nothing else.
    n_rows
        How many rows come next.
    fraction
        In (0, 1).

    Returns
    -------
    bool array of shape (n_rows,).
    """
    return words(rng, n_rows) < np.uint64(int(fraction * 2**64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """The keyed hashes of some rows: uint64 arrays of one length."""

    units: Words
    held_units: Words
    rows: Words
    positions: Words


class Hasher:
    """Hashes the units and rows of one fragment, batch by batch.

    Parameters
    ----------
    key
        The run's key.
    holdout_key
        The key of the hold-out: the run's key, or one that several runs share.
    unit
        The unit's column, and the public columns that tell rows apart.
    number
        The fragment's place in the table.
    """

    def __init__(self, key: RunKey, holdout_key: RunKey, unit: UnitWork, number: int) -> None:
        self._unit = unit
        self._unit_key = words(stream(key, "bounding/unit", ""), 2)
        self._row_key = words(stream(key, "bounding/row", ""), 2)
        self._held_unit_key = words(stream(holdout_key, "bounding/unit", ""), 2)
        self._holdout_key = words(stream(holdout_key, f"{HOLDOUT_ID}/unit", ""), 2)
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
            columns[:, place] = as_words(batch.column(name))
        positions = np.arange(self._next, self._next + batch.num_rows, dtype=np.uint64)
        self._next += batch.num_rows
        units = siphash(np.ascontiguousarray(columns[:, :1]), *self._unit_key)
        held = units if np.array_equal(self._held_unit_key, self._unit_key) else siphash(np.ascontiguousarray(columns[:, :1]), *self._held_unit_key)
        return Hashes(units=units, held_units=held, rows=siphash(columns, *self._row_key), positions=positions)

    def choose_held_out(self, hashes: Hashes, fraction: float) -> NDArray[np.bool_]:
        """Return which rows belong to a held-out unit.

        Parameters
        ----------
        hashes
            The hashes of some rows.
        fraction
            The fraction of units that is held out.
        """
        drawn = siphash(hashes.held_units.reshape(-1, 1), *self._holdout_key)
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

    Attributes
    ----------
    fragment_id
        As given.
    """

    def __init__(self, work: TableWork, fragment_id: str, number: int) -> None:
        self._work, self.fragment_id = work, fragment_id
        self._rng = stream(work.holdout_key(), HOLDOUT_ID, fragment_id) if work.fraction is not None and work.unit is None else None
        self._hasher = Hasher(work.key(), work.holdout_key(), work.unit, number) if work.unit is not None else None
        self._split: list[NDArray[np.bool_]] = []

    def split(self, batch: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
        """Return which of the next rows are released, and which shape the reference (None: all that are in the bound).

        Raises
        ------
        DataError
            If a row's unit is null.
        """
        fraction = self._work.fraction
        if self._hasher is not None and self._work.unit is not None:
            hashes = self._hasher.hash(batch)
            within = load_bounds(self._work.secrets, self._work.unit.bounds_sha256).is_released(hashes.units, hashes.rows, hashes.positions)
            held_out = self._hasher.choose_held_out(hashes, fraction) if fraction is not None else np.zeros(batch.num_rows, dtype=bool)
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
            self._work.secrets.claim(f"{_CHOSEN}/{self._work.hide(self.fragment_id)}", np.packbits(released).tobytes())

    def find_released(self) -> Callable[[Any], NDArray[np.bool_]]:
        """Return a function that tells, batch by batch, which rows are released: as kept, or computed anew."""
        name = f"{_CHOSEN}/{self._work.hide(self.fragment_id)}"
        if self._hasher is None or not self._work.secrets.exists(name):
            return lambda batch: self.split(batch)[0]
        bits = np.unpackbits(np.frombuffer(self._work.secrets.read(name), dtype=np.uint8)).view(bool)
        start = 0

        def read(batch: Any) -> NDArray[np.bool_]:
            nonlocal start
            start += batch.num_rows
            chosen: NDArray[np.bool_] = bits[start - batch.num_rows : start]
            if len(chosen) != batch.num_rows:
                raise InputError("the rows of a fragment changed since the run began", None, "restore it and run again, or `dpdask abort` the run")
            return chosen

        return read


@remember(maxsize=2)
def load_bounds(secrets: Folder, sha256: str) -> UnitBounds:
    """Return the units' bounds, read once by each process and checked against their digest.

    Parameters
    ----------
    secrets
        The folder of the run key.
    sha256
        The digest of the bounds.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    return UnitBounds.from_bytes(read_kept(secrets, BOUNDS_NAME, sha256, "the run's unit bounds are not those that were written"), BOUNDS_NAME)


def filter_rows(rows: pa.RecordBatch, chosen: NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the chosen rows of a batch, in their order.

    Parameters
    ----------
    rows
        The batch.
    chosen
        Which of the rows are kept, bool of shape (n_rows,).
    """
    if chosen.all():
        return rows
    n_chosen, mask = int(chosen.sum()), pa.array(chosen)
    arrays = []
    for array in rows.columns:
        values = _view_words(array)
        if values is None:
            arrays.append(_by_plain_type(array, lambda plain: plain.filter(mask)))
        else:
            arrays.append(_as_array(keep_chosen(values, chosen, n_chosen), array.type))
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def take_values(array: pa.Array, places: NDArray[np.uint32]) -> pa.Array:
    """Return the values at some places, in the order of the places.

    Parameters
    ----------
    array
        The values.
    places
        The numbers of the rows, of shape (n_taken,).
    """
    values = _view_words(array)
    if values is None:
        return _by_plain_type(array, lambda plain: plain.take(pa.array(places)))
    return _as_array(take_at(values, places), array.type)


def _view_words(array: pa.Array) -> NDArray[np.unsignedinteger] | None:
    """Return the values of a column as unsigned integers of their width; None if it has nulls, or no fixed width of 8 to 64 bits."""
    dtype = _WORDS.get(array.type.bit_width) if pa.types.is_primitive(array.type) and not array.null_count else None
    return None if dtype is None else np.frombuffer(array.buffers()[1], dtype=dtype)[array.offset : array.offset + len(array)]


def _as_array(values: NDArray[np.unsignedinteger], type_: pa.DataType) -> pa.Array:
    """Return the column that `_view_words` saw."""
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def _by_plain_type(array: pa.Array, select: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return some values; Arrow selects none of its view types, so these take the way over plain ones."""
    plain = _plain(array.type)
    return select(array) if plain == array.type else select(array.cast(plain)).cast(array.type)


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = type_.value_field.with_type(_plain(type_.value_type))
        return pa.list_(inner) if pa.types.is_list(type_) else pa.large_list(inner)
    return type_
