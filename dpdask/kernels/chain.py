"""Records as a trie: from a row to its ranks given the columns before, and from ranks back to a row.

Depth l of the trie holds the distinct values of column l under each prefix of columns 0..l-1. A path of a row's own values
gives each column's rank among the records that share its prefix; another path, built from noisy ranks, gives the
released values. All nodes of one depth stand together, those with one parent next to one another and sorted: the roots
first, then the first column's, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.ecdf import origin
from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_UNIT = 1.0 / 9007199254740992.0  # 2**-53


class Trie(NamedTuple):
    """Records as a trie: at most records · columns nodes of 32 bytes.

    Attributes
    ----------
    keys
        float64 array of shape (n_nodes,): the node's value; -inf for null, 0 for a root.
    lows
        float64 array of shape (n_nodes,): the node stands for the numbers in (low, key], or for the key alone where both
        are equal.
    cumulative
        int64 array of shape (n_nodes,): how many records lie under the node and its siblings before it.
    first
        int64 array of shape (n_inner + 1,): the children of node i are first[i]..first[i+1]-1; the nodes of the last
        column have none.
    """

    keys: Floats
    lows: Floats
    cumulative: Ints
    first: Ints

    def __repr__(self) -> str:
        """Show the class alone, and no record."""
        return "Trie(...)"


def grid(values: Floats, atoms: Floats, start: float | None, step: float | None) -> tuple[Floats, Floats]:
    """Return the cells that the distinct values of a continuous or mixed column cut its line into.

    Parameters
    ----------
    values
        float64 array, the column's values over all records; -inf for null.
    atoms
        The declared atoms, increasing.
    start, step
        As for `ecdf.continualise`: the line's lower bound, and the lattice's step.

    Returns
    -------
    keys, lows
        float64 arrays of one length, keys increasing: a number stands for (low, key]; null and an atom for themselves.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (7) and (9): the cube on the immediate bottom-left.
    """
    keys = np.unique(values)
    points = keys[np.isfinite(keys)]
    lows = keys.copy()
    if len(points):
        lows[len(keys) - len(points) :] = np.concatenate([[origin(points, start, step)], points[:-1]])
    alone = np.isin(keys, atoms)
    lows[alone] = keys[alone]
    return keys, lows


def build(columns: Sequence[Floats], counts: Ints, roots: Ints, n_roots: int, grids: Sequence[tuple[Floats, Floats] | None]) -> Trie:
    """Return the trie of some records.

    Parameters
    ----------
    columns
        For each column a float64 array of shape (n,), the records' values; a level's is its code, null's is -inf.
    counts
        int64 array of shape (n,), how often each record stands; positive.
    roots
        int64 array of shape (n,): under which root it stands.
    n_roots
        How many roots there are; each has a record.
    grids
        For each column the `grid` of its values, or None where it has levels.
    """
    order = np.lexsort([*reversed(columns), roots])
    total = np.concatenate([[0], np.cumsum(counts[order])])
    starts = np.searchsorted(roots[order], np.arange(n_roots))
    keys, lows, cumulative = [np.zeros(n_roots)], [np.zeros(n_roots)], [np.zeros(n_roots, dtype=np.int64)]
    first: list[Ints] = []
    new = np.zeros(len(order), dtype=np.bool_)
    new[starts] = True
    offset = n_roots
    for column, cells in zip(columns, grids, strict=True):
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
        nodes = np.flatnonzero(new)
        places = np.searchsorted(nodes, starts)
        sizes = np.diff(places, append=len(nodes))
        found = values[nodes]
        keys.append(found)
        lows.append(found if cells is None else cells[1][np.unique(column, return_inverse=True)[1][order[nodes]]])
        cumulative.append(total[np.append(nodes[1:], len(order))] - np.repeat(total[starts], sizes))
        first.append(offset + places)
        starts, offset = nodes, offset + len(nodes)
    first.append(np.array([offset]))
    return Trie(np.concatenate(keys), np.concatenate(lows), np.concatenate(cumulative), np.concatenate(first))


@jit
def ranks_of(values: Floats, nodes: Ints, words: Words, trie: Trie) -> tuple[Floats, Ints]:
    """Return each value's rank among the children of its node, and the child that stands for it.

    Parameters
    ----------
    values
        float64 array of shape (n,).
    nodes
        int64 array of shape (n,): the current node of the row's path.
    words
        uint64 array of shape (n,), uniform and independent.
    trie
        The records.

    Returns
    -------
    ranks
        float64 array of shape (n,), in [0, 1]: uniform on (a / (m + 1), (a + t + 1) / (m + 1)), where m records have the
        prefix, a of them a smaller value and t the same. Exactly uniform for a row that is exchangeable with them.
    nodes
        int64 array of shape (n,): the child whose cell holds the value, or the nearest one, the lower of two.
    """
    ranks = np.empty(len(values), dtype=np.float64)
    found = np.empty(len(values), dtype=np.int64)
    for row in range(len(values)):
        value = values[row]
        start, end = trie.first[nodes[row]], trie.first[nodes[row] + 1]
        child = _first_key(value, trie.keys, start, end)
        below = trie.cumulative[child - 1] if child > start else 0
        ties = trie.cumulative[child] - below if child < end and trie.keys[child] == value else 0
        uniform = (words[row] >> np.uint64(11)) * _UNIT
        ranks[row] = (below + uniform * (ties + 1)) / (trie.cumulative[end - 1] + 1)
        found[row] = child if ties else _nearest(value, child, start, end, trie)
    return ranks, found


@jit
def _first_key(value: float, keys: Floats, low: int, high: int) -> int:
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < value:
            low = middle + 1
        else:
            high = middle
    return int(low)


@jit
def _nearest(value: float, child: int, start: int, end: int, trie: Trie) -> int:
    """Return the sibling nearest to a value that is no key; `child` is the first sibling whose key lies above the value."""
    if child == end:
        return end - 1
    if child == start or trie.lows[child] < value:
        return child
    return child - 1 if value - trie.keys[child - 1] <= trie.lows[child] - value else child


@jit
def values_at(ranks: Floats, nodes: Ints, trie: Trie, lattice: bool) -> tuple[Floats, Ints]:
    """Return the value at each rank among the children of its node, and the child that it comes from.

    Parameters
    ----------
    ranks
        float64 array of shape (n,), in (0, 1).
    nodes
        int64 array of shape (n,): the current node of the released path.
    trie
        The records.
    lattice
        Whether values inside a cell are whole numbers.

    Returns
    -------
    values
        float64 array of shape (n,): uniform ranks give the records' own distribution given the path, each record's
        weight spread evenly over its cell.
    nodes
        int64 array of shape (n,): every path is one of a record.
    """
    values = np.empty(len(ranks), dtype=np.float64)
    found = np.empty(len(ranks), dtype=np.int64)
    for row in range(len(ranks)):
        start, end = trie.first[nodes[row]], trie.first[nodes[row] + 1]
        assert end > start  # the released path is that of a record
        target = ranks[row] * trie.cumulative[end - 1]
        child = min(_first_above(target, trie.cumulative, start, end), end - 1)
        below = trie.cumulative[child - 1] if child > start else 0
        share = min(max((target - below) / (trie.cumulative[child] - below), 0.0), 1.0)
        values[row] = _interpolate(trie.lows[child], trie.keys[child], share, lattice)
        found[row] = child
    return values, found


@jit
def _first_above(target: float, cumulative: Ints, low: int, high: int) -> int:
    while low < high:
        middle = (low + high) >> 1
        if cumulative[middle] <= target:
            low = middle + 1
        else:
            high = middle
    return int(low)


@jit
def _interpolate(low: float, key: float, share: float, lattice: bool) -> float:
    """Return a share of the way from `low` to `key`, as a whole number above `low` for a lattice."""
    if low == key:
        return key
    if lattice:
        return float(low + min(max(np.ceil((key - low) * share), 1.0), key - low))
    half = (key / 2 - low / 2) * share  # halved: the gap between the largest floats is no float
    return float(min((low + half) + half, key))
