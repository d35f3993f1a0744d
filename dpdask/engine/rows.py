"""How a kind of release changes rows: what loads it, and which columns come out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from numpy.random import Generator

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.release import load_release
from dpdask.engine.work import TableWork, keep, kept
from dpdask.io.storage import Folder
from dpdask.mechanisms.interval.release import IntervalRelease, ends_of, is_lattice, released_schema
from dpdask.streams import RunKey


class RowRelease(Protocol):
    """A fitted release that randomises every row on its own."""

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each private column on one fragment, at its start."""
        ...

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Generator]) -> pa.RecordBatch:
        """Return the released rows of a batch, in its order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A kind of release row by row; its functions are modules' own, so that tasks can carry them.

    Attributes
    ----------
    load
        Returns the fitted release in a folder, checked against its sha256.
    released
        Returns the released columns and their types.
    few_valued
        Returns which of them have few distinct values.
    """

    load: Callable[[Folder, str], RowRelease]
    released: Callable[[TableWork], pa.Schema]
    few_valued: Callable[[TableWork], list[str]]


def _same_columns(work: TableWork) -> pa.Schema:
    return work.released


def _level_columns(work: TableWork) -> list[str]:
    return [name for name, codec in work.codecs.items() if isinstance(codec, LevelCodec)]


def _range_columns(work: TableWork) -> pa.Schema:
    return released_schema(work.released, list(work.codecs))


def _covered_columns(work: TableWork) -> pa.Schema:
    return released_schema(work.released, list(work.codecs), coverage=True)


def _whole_levels(work: TableWork) -> list[str]:
    """Return the ends of columns with few whole values: anchors are whole there too."""
    return [end for name, codec in work.codecs.items() if isinstance(codec, LevelCodec) and is_lattice(codec) for end in ends_of(name)]


def write_designs(release: IntervalRelease, secrets: Folder) -> str:
    """Write an interval release beside the run key and return its sha256."""
    data = release.to_bytes()
    return keep(secrets, _name(hashlib.sha256(data).hexdigest()), data)


@functools.lru_cache(maxsize=4)
def load_designs(secrets: Folder, sha256: str) -> IntervalRelease:
    """Return an interval release, read once by each process and checked against its digest.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    data = kept(secrets, _name(sha256), sha256, "the run's designs are not those that were written")
    return IntervalRelease.from_bytes(data, _name(sha256))


def _name(sha256: str) -> str:
    return f"designs-{sha256[:16]}.json"  # frames of several types share a folder


DIP_ROWS = Rows(load=load_release, released=_same_columns, few_valued=_level_columns)
RANGE_ROWS = Rows(load=load_designs, released=_range_columns, few_valued=_whole_levels)
COVERED_ROWS = Rows(load=load_designs, released=_covered_columns, few_valued=_whole_levels)
