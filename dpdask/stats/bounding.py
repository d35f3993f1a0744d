"""Bounds on unit contributions: the first rows of each unit by a keyed hash, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from dpdask.archive import Archive, Archived, Contents
from dpdask.kernels import hashing as kernel
from dpdask.kernels.jit import Flags, Words


# Dask logs the arguments of a task that failed
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class UnitRows:
    """Of each unit, its first `max_rows` + 1 rows in the order (hash, position); mergeable and exact."""

    max_rows: int  # how many rows of a unit may be released
    # Uint64 arrays of one length: a keyed hash of the unit, a keyed hash of the row's public
    # content, and the row's place in the table (which only decides between rows that are alike).
    # The rows of a unit stand together; where there are `max_rows` + 1 of them, the last of these
    # comes first.
    units: Words
    hashes: Words
    positions: Words

    @classmethod
    def identity(cls, max_rows: int) -> Self:
        """Return the statistic of no rows."""
        none = np.empty(0, dtype=np.uint64)
        return cls(max_rows=max_rows, units=none, hashes=none, positions=none)

    @classmethod
    def of_batch(cls, max_rows: int, units: Words, hashes: Words, positions: Words) -> Self:
        """Return the statistic of some rows.

        Parameters
        ----------
        units, hashes, positions
            uint64 arrays of shape (n,): each row's unit, hash and position.
        """
        group, n_groups = kernel.groups(units)
        first = kernel.first_rows(group, n_groups, hashes, positions, max_rows + 1)
        return cls(
            max_rows=max_rows, units=units[first], hashes=hashes[first], positions=positions[first]
        )

    def merge(self, *others: Self) -> Self:
        """Return the statistic of all rows together."""
        parts = (self, *others)
        columns = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("units", "hashes", "positions")
        ]
        return self.of_batch(self.max_rows, *columns)

    def select_part(self, part: int, n_parts: int) -> Self:
        """Return the rows of those units whose hash lies in the part-th of `n_parts` equal ranges (a power of two)."""
        chosen = (
            self.units >> np.uint64(64 - (n_parts - 1).bit_length()) == part
            if n_parts > 1
            else np.ones(len(self.units), dtype=bool)
        )
        return type(self)(
            max_rows=self.max_rows,
            units=self.units[chosen],
            hashes=self.hashes[chosen],
            positions=self.positions[chosen],
        )

    def bounds(self) -> UnitBounds:
        """Return, for each unit that has too many rows, the first one that is not released."""
        starts = np.flatnonzero(
            np.append(self.units[:1] == self.units[:1], self.units[1:] != self.units[:-1])
        )
        counts = np.diff(starts, append=len(self.units))
        over = starts[counts > self.max_rows]
        over = over[np.argsort(self.units[over])]
        return UnitBounds(
            units=self.units[over], hashes=self.hashes[over], positions=self.positions[over]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class UnitBounds(Archived):
    """For each unit with too many rows, the first that is not released; units that are not listed keep all of theirs."""

    archive: ClassVar[Archive] = Archive(kind="unit-bounds", format=2, noun="file of unit bounds")

    units: Words  # uint64 arrays of one length, sorted by unit
    hashes: Words
    positions: Words

    @classmethod
    def concatenate(cls, parts: Sequence[UnitBounds]) -> Self:
        """Return the bounds of all parts, which follow one another in the order of their units."""
        names = ("units", "hashes", "positions")
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        )

    def is_released(self, units: Words, hashes: Words, positions: Words) -> Flags:
        """Return which rows are released: those before their unit's bound.

        Parameters
        ----------
        units, hashes, positions
            uint64 arrays of shape (n,): each row's unit, hash and position.
        """
        return kernel.before_bounds(
            units, hashes, positions, self.units, self.hashes, self.positions
        )

    def _contents(self) -> Contents:
        return {}, {"units": self.units, "hashes": self.hashes, "positions": self.positions}

    @classmethod
    def _of_contents(cls, _: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(units=arrays["units"], hashes=arrays["hashes"], positions=arrays["positions"])
