"""The joint histogram of all coded columns, as its occupied cells, from which a perturbed histogram is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.kernels.jit import jit
from dpdask.kernels.marginals import Codes
from dpdask.stats.marginals import Counts, Domain

MAX_JOINT_CELLS = 2**62
"""Cell numbers are int64, and one more step of the mixed radix must not overflow."""

Keys = NDArray[np.int64]


def n_cells(domain: Domain) -> int:
    """Return how many cells the joint histogram has, occupied or not.

    Raises
    ------
    SpecError
        If they are more than 2**62.
    """
    total = math.prod(domain.sizes)
    if total > MAX_JOINT_CELLS:
        hint = "declare fewer bins or levels for its columns, or drop one"
        raise SpecError(f"has {total:.2e} cells; the limit is 2**62", "the joint histogram", hint)
    return total


def keys_of(domain: Domain, codes: Codes) -> Keys:
    """Return the cell of each row: the codes as the digits of one number, the first attribute's the highest.

    Parameters
    ----------
    codes
        uint8 or uint16 array of shape (n_attributes, n_rows), row a below the domain's sizes[a].

    Returns
    -------
    int64 array of shape (n_rows,), each in 0..n_cells-1: the C-ordered flat index of the domain's joint table.

    Raises
    ------
    ValueError
        If the array has another shape or dtype, or a code is not below its attribute's levels.
    SpecError
        As `n_cells`.
    """
    n_cells(domain)
    if codes.ndim != 2 or codes.dtype not in (np.uint8, np.uint16) or len(codes) != domain.n_attributes:
        raise ValueError(f"codes are a uint8 or uint16 matrix of {domain.n_attributes} rows, not {codes.dtype} of shape {codes.shape}")
    for column, name, size in zip(codes, domain.names, domain.sizes, strict=True):
        if column.max(initial=0) >= size:  # the code itself is private and stays out of the message
            raise ValueError(f"attribute {name!r} has a code that is not below its {size} levels")
    keys = np.zeros(codes.shape[1], dtype=np.int64)
    for column, size in zip(codes, domain.sizes, strict=True):
        keys *= size
        keys += column
    return keys


def codes_of(domain: Domain, keys: Keys) -> Codes:
    """Return the codes of each cell: the inverse of `keys_of`, of shape (n_attributes, len(keys)), in the domain's code dtype.

    Parameters
    ----------
    domain
        The attributes and their sizes.
    keys
        int64 array: the cells.
    """
    codes: Codes = np.empty((domain.n_attributes, len(keys)), dtype=domain.code_dtype)
    left = keys
    for place in reversed(range(domain.n_attributes)):
        left, codes[place] = np.divmod(left, domain.sizes[place])
    return codes


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # Dask logs the arguments of a task that failed
class JointCounts:
    """Exact counts of the occupied cells of the joint histogram of some rows.

    Attributes
    ----------
    domain
        The attributes.
    keys
        int64 array of shape (n_occupied,), increasing: the occupied cells, as `keys_of` numbers them.
    counts
        int64 array of that shape, each at least 1.

    Privacy
    -------
    A table of private rows, and so is the set of its keys: which cells are occupied is private too. One row, added or
    removed, changes one cell by one; replaced, at most two cells by one each.
    """

    domain: Domain
    keys: Keys
    counts: Counts

    @classmethod
    def identity(cls, domain: Domain) -> Self:
        """Return the counts of no rows.

        Raises
        ------
        SpecError
            As `n_cells`.
        """
        n_cells(domain)
        return cls(domain, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @classmethod
    def of_codes(cls, domain: Domain, codes: Codes) -> Self:
        """Return the counts of a code matrix; arguments and errors as for `keys_of`."""
        keys = keys_of(domain, codes)
        keys.sort()
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        return cls(domain, keys[first], np.diff(first, append=len(keys)).astype(np.int64))

    def merge(self, *others: Self) -> Self:
        """Return the counts of all rows together.

        Raises
        ------
        ValueError
            If they are not of the same domain.
        """
        if any(part.domain != self.domain for part in others):
            raise ValueError("joint counts of different domains cannot be merged")
        parts = [(part.keys, part.counts) for part in (self, *others)]
        while len(parts) > 1:  # neighbours in rounds: every cell is moved log2(n) times, not n times
            merged = [merge_cells(*first, *second) for first, second in zip(parts[::2], parts[1::2], strict=False)]
            parts = merged + parts[2 * len(merged) :]
        return type(self)(self.domain, *parts[0])

    @property
    def n_rows(self) -> int:
        """How many rows were counted."""
        return int(self.counts.sum())


@jit
def merge_cells(keys_a: Keys, counts_a: Counts, keys_b: Keys, counts_b: Counts) -> tuple[Keys, Counts]:
    """Return the union of two increasing lists of cells, counts of common cells added.

    Parameters
    ----------
    keys_a, counts_a
        Cells, increasing, and their counts.
    keys_b, counts_b
        Likewise.
    """
    keys = np.empty(len(keys_a) + len(keys_b), dtype=np.int64)
    counts = np.empty(len(keys), dtype=np.int64)
    a = b = n = 0
    while a < len(keys_a) or b < len(keys_b):
        take_a = b == len(keys_b) or (a < len(keys_a) and keys_a[a] <= keys_b[b])
        take_b = a == len(keys_a) or (b < len(keys_b) and keys_b[b] <= keys_a[a])
        keys[n] = keys_a[a] if take_a else keys_b[b]
        counts[n] = 0
        if take_a:
            counts[n] += counts_a[a]
            a += 1
        if take_b:
            counts[n] += counts_b[b]
            b += 1
        n += 1
    return keys[:n].copy(), counts[:n].copy()  # a view would keep the longer arrays alive, and travel with them
