"""Records as a trie: from a row to its ranks given the columns before, and from ranks back to a row.

Depth l of the trie holds the distinct values of column l under each prefix of columns 0..l-1. A
path of a row's own values gives each column's rank among the records that share its prefix; another
path, built from noisy ranks, gives the released values. All nodes of one depth stand together,
those with one parent next to one another and sorted: the roots first, then the first column's, and
so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import uint64

from dpdask.arrays import Flags, Floats, Ints, Uint32s, Words
from dpdask.kernels.jit import jit
from dpdask.kernels.rank import TOGETHER, UNIT, Draws, disturb_block, interpolate, make_room, origin

Slots = Uint32s

_MOST_CODES = 2**62
_DENSE = 4  # cells for each record: so many are counted one by one


class Trie(NamedTuple):
    """Records as a trie: at most records · columns nodes of 32 bytes."""

    keys: Floats  # float64 array of shape (n_nodes,): the node's value; -inf for null, 0 for a root
    # Float64 array of shape (n_nodes,): the node stands for the numbers in (low, key], or for the
    # key alone where both are equal.
    lows: Floats
    # Int64 array of shape (n_nodes,): how many records lie under the node and its siblings before
    # it.
    cumulative: Ints
    # Int64 array of shape (n_inner + 1,): the children of node i are first[i]..first[i+1]-1; the
    # nodes of the last column have none.
    first: Ints

    def __repr__(self) -> str:
        """Show the class alone, and no record."""
        return "Trie(...)"


def grid(
    values: Floats, atoms: Floats, start: float | None, step: float | None
) -> tuple[Floats, Floats]:
    """Return the cells that the distinct values of a continuous or mixed column cut its line into.

    Parameters
    ----------
    values
        float64 array, the column's values over all records; -inf for null.

    Returns
    -------
    keys, lows
        float64 arrays of one length, keys increasing: a number stands for (low, key]; null and an
        atom for themselves.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (7) and (9): the cube on the immediate
    bottom-left.
    """
    keys = np.unique(values)
    points = keys[np.isfinite(keys)]
    lows = keys.copy()
    if len(points):
        lows[len(keys) - len(points) :] = np.concatenate(
            [[origin(points, start, step)], points[:-1]]
        )
    alone = np.isin(keys, atoms)
    lows[alone] = keys[alone]
    return keys, lows


def build(
    columns: Sequence[Floats],
    counts: Ints,
    groups: Ints,
    grids: Sequence[tuple[Floats, Floats] | None],
) -> Trie:
    """Return the trie of some records: all of them stand under its first root, and those of a group under its root, too.

    Parameters
    ----------
    columns
        For each column a float64 array of shape (n,), the records' values; a level's is its code,
        null's is -inf.
    counts
        int64 array of shape (n,), how often each record stands; positive.
    groups
        int64 array of shape (n,): the record's group, counted from 1, or 0 where it has none. Each
        group has a record.
    grids
        For each column the `grid` of its values, or None where it has levels.
    """
    numbers = [
        _number(column) if cells is None else np.searchsorted(cells[0], column)
        for column, cells in zip(columns, grids, strict=True)
    ]
    n_roots = 1 + int(groups.max())
    order, sums = _sort_distinct(numbers, counts)
    roots = np.zeros(len(order), dtype=np.int64)
    if n_roots > 1:
        inside, own_sums = _sort_distinct([groups, *numbers], counts)
        first = int(np.searchsorted(groups[inside], 1))  # those without a group come first
        order, sums = (
            np.concatenate([order, inside[first:]]),
            np.concatenate([sums, own_sums[first:]]),
        )
        roots = np.concatenate([roots, groups[inside[first:]]])
    total = np.concatenate([[0], np.cumsum(sums)])
    keys, lows, cumulative = (
        [np.zeros(n_roots)],
        [np.zeros(n_roots)],
        [np.zeros(n_roots, dtype=np.int64)],
    )
    children: list[Ints] = []
    is_first = np.diff(roots, prepend=-1) > 0
    offset, n_parents = n_roots, n_roots
    for column, number, cells in zip(columns, numbers, grids, strict=True):
        places, found, below, first_children = _split(column, order, total, is_first, n_parents)
        keys.append(found)
        lows.append(found if cells is None else cells[1][number[order[places]]])
        cumulative.append(below)
        children.append(offset + first_children)
        offset, n_parents = offset + len(places), len(places)
    children.append(np.array([offset]))
    return Trie(
        np.concatenate(keys),
        np.concatenate(lows),
        np.concatenate(cumulative),
        np.concatenate(children),
    )


def find_cells(trie: Trie, place: int) -> tuple[Floats, Floats, Floats]:
    """Return the cells of one column, and how many records lie in each."""
    start, end = 0, 1
    for _ in range(place + 1):
        parents, (start, end) = (start, end), (int(trie.first[start]), int(trie.first[end]))
    counts = np.diff(trie.cumulative[start:end], prepend=0)
    first = trie.first[parents[0] : parents[1]] - start
    counts[first] = trie.cumulative[start + first]
    keys, number = np.unique(trie.keys[start:end], return_inverse=True)
    lows = np.empty(len(keys))
    lows[number] = trie.lows[start:end]
    return keys, lows, np.bincount(number, weights=counts, minlength=len(keys)).astype(np.float64)


@jit
def _split(
    column: Floats, order: Ints, total: Ints, is_first: Flags, n_parents: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """Split each node of one depth by the values of the next column.

    Parameters
    ----------
    column
        float64 array of shape (n,), the values of the next column.
    order
        int64 array: the records, sorted; those of one node stand together.
    total
        int64 array, one longer: how many rows the records before have.
    is_first
        bool array, changed: whether a record is the first one of its node, before for the parents
        and after for the children.

    Returns
    -------
    first
        int64 array of shape (n_parents,): the number of each parent's first child.
    """
    places, keys = np.empty(len(order), dtype=np.int64), np.empty(len(order))
    cumulative, first = np.empty(len(order), dtype=np.int64), np.empty(n_parents, dtype=np.int64)
    n, parent, before, last = 0, 0, 0, 0.0
    for place in range(len(order)):
        value = column[order[place]]
        if is_first[place] or value != last:
            if n > 0:
                cumulative[n - 1] = total[place] - before
            if is_first[place]:
                first[parent] = n
                parent, before = parent + 1, total[place]
            is_first[place] = True
            places[n], keys[n] = place, value
            n, last = n + 1, value
    cumulative[n - 1] = total[len(order)] - before
    return places[:n], keys[:n], cumulative[:n], first


def _number(column: Floats) -> Ints:
    """Return numbers in the order of the values, none of them negative: codes as they are."""
    if column.min() >= 0.0 and column.max() < len(column) and (column == np.floor(column)).all():
        return column.astype(np.int64)
    return np.unique(column, return_inverse=True)[1]


def _sort_distinct(numbers: Sequence[Ints], counts: Ints) -> tuple[Ints, Ints]:
    """Return one place of each distinct tuple of numbers, in their order, and its count; the numbers are not negative."""
    codes, n_codes = numbers[0], int(numbers[0].max()) + 1
    for number in numbers[1:]:
        size = int(number.max()) + 1
        if n_codes * size > _MOST_CODES:
            found, codes = np.unique(codes, return_inverse=True)
            n_codes = len(found)
        codes, n_codes = codes * size + number, n_codes * size
    if n_codes <= _DENSE * len(codes):
        return _sum_cells(codes, counts, n_codes)
    order = np.argsort(codes)
    first = np.flatnonzero(np.diff(codes[order], prepend=-1))
    return order[first], np.add.reduceat(counts[order], first)


@jit
def _sum_cells(codes: Ints, counts: Ints, n_cells: int) -> tuple[Ints, Ints]:
    """Return one place of each code that is there, in their order, and its count; in less time than sorting takes."""
    sums, places = np.zeros(n_cells, dtype=np.int64), np.zeros(n_cells, dtype=np.int64)
    for row in range(len(codes)):
        sums[codes[row]] += counts[row]
        places[codes[row]] = row
    found = np.flatnonzero(sums)
    return places[found], sums[found]


@jit
def find_roots(hashes: Words, known: Words) -> Ints:
    """Return the root of each row: one more than the place of its group's hash among the known ones, and 0 for another group.

    Parameters
    ----------
    hashes
        uint64 array of shape (n,); rows of one group often stand together.
    """
    roots = np.empty(len(hashes), dtype=np.int64)
    for row in range(len(hashes)):
        if row > 0 and hashes[row] == hashes[row - 1]:
            roots[row] = roots[row - 1]
            continue
        place = np.searchsorted(known, hashes[row])
        roots[row] = place + 1 if place < len(known) and known[place] == hashes[row] else 0
    return roots


@jit
def find_ranks(values: Floats, nodes: Ints, words: Words, trie: Trie, ranks: Floats) -> None:
    """Find each value's rank among the children of its node, and replace the node by the child that stands for it.

    Parameters
    ----------
    nodes
        int64 array of shape (n,), changed: the current node of the row's path, and then the child
        whose cell holds the value, or the nearest one, the lower of two.
    ranks
        float64 array of shape (n,), changed; in [0, 1]: uniform on (a / (m + 1), (a + t + 1) /
        (m + 1)), where m records have the prefix, a of them a smaller value and t the same. Exactly
        uniform for a row that is exchangeable with them.
    """
    keys, cumulative, first = trie.keys, trie.cumulative, trie.first
    for row in range(len(values)):
        value, node = values[row], uint64(nodes[row])
        start, end = uint64(first[node]), uint64(first[node + uint64(1)])
        child = _first_key(value, keys, start, end)
        below = cumulative[child - uint64(1)] if child > start else 0
        is_key = child < end and keys[child] == value
        ties = cumulative[child] - below if is_key else 0
        uniform = (words[row] >> uint64(11)) * UNIT
        ranks[row] = (below + uniform * (ties + 1)) / (cumulative[end - uint64(1)] + 1)
        if not is_key and child > start:  # the cell that holds the value, or else the nearest one
            before = child - uint64(1)
            gap = trie.lows[child] - value if child < end else np.inf
            child = before if gap >= 0.0 and value - keys[before] <= gap else child
        nodes[row] = child


@jit
def _first_key(value: float, keys: Floats, start: uint64, end: uint64) -> uint64:
    """Return the first of the sorted siblings start..end-1 whose key is not below a value, or `end`.

    Levels count up from 0, so a level stands at most as far from the first sibling as their codes
    are apart, and there if none is missing. Other values are searched for, without a branch that
    depends on them: nobody can predict it.
    """
    one = uint64(1)
    apart = value - keys[start]
    if 0.0 <= apart < end - start:
        place = start + uint64(np.int64(apart))
        if keys[place] == value:
            return place
    size = end - start
    while size > one:
        half = size >> one
        start += half * uint64(keys[start + half - one] < value)
        size -= half
    return start + uint64(keys[start] < value)


@jit
def find_slots(trie: Trie) -> Slots:
    """Return where to begin to look for a rank among the children of a node, so that one step is enough on average."""
    slots = np.zeros(len(trie.keys), dtype=np.uint32)
    for node in range(len(trie.first) - 1):
        start, n = trie.first[node], trie.first[node + 1] - trie.first[node]
        child = 0
        for slot in range(n):
            # one less: a rank and its slot are rounded
            least = trie.cumulative[start + n - 1] * slot // n - 1
            while child < n - 1 and trie.cumulative[start + child] <= least:
                child += 1
            slots[start + slot] = child
    return slots


@jit
def find_values(
    ranks: Floats, nodes: Ints, trie: Trie, slots: Slots, lattice: bool, values: Floats
) -> None:
    """Find the value at each rank among the children of its node, and replace the node by the child that it comes from.

    Parameters
    ----------
    nodes
        int64 array of shape (n,), changed: the current node of the released path; every path is
        one of a record.
    values
        float64 array of shape (n,), changed: uniform ranks give the records' own distribution given
        the path, each record's weight spread evenly over its cell.
    """
    keys, lows, cumulative, first, one = (
        trie.keys,
        trie.lows,
        trie.cumulative,
        trie.first,
        uint64(1),
    )
    for row in range(len(ranks)):
        node = uint64(nodes[row])
        start, end = uint64(first[node]), uint64(first[node + one])
        assert end > start  # the released path is that of a record
        target, size = ranks[row] * cumulative[end - one], end - start
        whole, slot = np.int64(target), min(uint64(np.int64(ranks[row] * size)), size - one)
        child = start + uint64(slots[start + slot])
        # most need one step or none: no branch for it, since nobody can predict which
        child = min(child + uint64(cumulative[child] <= whole), end - one)
        while child + one < end and cumulative[child] <= whole:
            child += one
        values[row], nodes[row] = keys[child], child
        if lows[child] < keys[child]:
            below = cumulative[child - one] if child > start else 0
            share = min(max((target - below) / (cumulative[child] - below), 0.0), 1.0)
            values[row] = interpolate(lows[child], keys[child], share, lattice)


@jit
def release_rows(
    values: Floats,
    own: Ints,
    released: Ints,
    words: Words,
    draws: Draws,
    trie: Trie,
    slots: Slots,
    lattice: bool,
) -> None:
    """Replace the values of one column by released ones, and the current nodes of both paths by their children.

    Parameters
    ----------
    own, released
        int64 arrays of shape (n,), changed: the current nodes of the rows' own paths, and of the
        released ones.
    words
        uint64 array of shape (n, n_words), uniform and independent: the first of a row is for
        `find_ranks`, the others for `rank.disturb_rows`.
    """
    room, kept = make_room(), np.empty(TOGETHER)
    # rows that go through all steps while they stay near the processor
    for start in range(0, len(values), TOGETHER):
        rows = slice(start, min(start + TOGETHER, len(values)))
        ranks = kept[: rows.stop - start]
        find_ranks(values[rows], own[rows], words[rows, 0], trie, ranks)
        disturb_block(ranks, words[rows], draws, room, ranks)
        find_values(ranks, released[rows], trie, slots, lattice, values[rows])
