"""A person's rows, chosen among candidates of the same person so that the tables of a block of persons are met.

The arithmetic is additions, multiplications and divisions in a fixed order: the same candidates,
tables and random words give the same rows on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpdask.arrays import Bytes, Floats, Ints, Shorts, Singles, Words
from dpdask.kernels.jit import jit

FREE, SEVERAL, CONSTANT = 0, 1, 2  # what a person's rows are to be in a column


class Gaps(NamedTuple):  # numba takes named tuples apart, not dataclasses
    """How far the chosen rows of a block are from the wanted tables, and how much that matters.

    Levels of all child columns are numbered through; so are those of all parent columns.
    """

    rows: Floats
    """float64 of shape (n_levels, n_levels), symmetric: found less wanted counts of two levels of one row."""
    row_weights: Floats
    """The weight of each squared gap, of the same shape; 0 where nothing is wanted."""
    parents: Floats
    """float64 of shape (n_parent_levels, n_levels): of a parent's level and a row's."""
    parent_weights: Floats
    """The weights, of the same shape."""
    pairs: Floats
    """float64 of shape (n_levels, n_levels), symmetric: of two different rows of a person."""
    pair_weights: Floats
    """The weights, of the same shape."""


@jit
def choose_levels(
    shared: Singles,
    own: Singles,
    owners: Ints,
    scales: Singles,
    first: int,
    n_latents: int,
    offsets: Singles,
    levels: Shorts,
    out: Shorts,
) -> None:
    """Write each row's level of one column: the one whose latent variables and offset have the largest sum.

    Parameters
    ----------
    shared
        float32 array of shape (n_all_latents, n_persons): what all rows of a person share.
    own
        float32 array of shape (n_all_latents, m), m at least n: each row's own part.
    owners
        int64 array of shape (n,): each row's person.
    scales
        float32 array of shape (n_persons,): of the rows' own parts.
    first, n_latents
        Which latent variables are the column's. If there is one less than offsets, the first level
        has none, and a sum of 0.
    """
    n_open = len(offsets) - n_latents
    for i in range(len(owners)):
        person = owners[i]
        best, winner = offsets[0], 0
        for level in range(len(offsets)):
            if level >= n_open:
                place = first + level - n_open
                value = shared[place, person] + own[place, i] * scales[person] + offsets[level]
                if level == 0 or value > best:
                    best, winner = value, level
        out[i] = levels[winner]


@jit
def _next(state: np.uint64) -> np.uint64:
    """Return the next word of a small generator (Marsaglia's xorshift64*), for trials alone."""
    state ^= state >> np.uint64(12)
    state ^= state << np.uint64(25)
    return state ^ (state >> np.uint64(27))


@jit
def _below(state: np.uint64, n: int) -> int:
    """Return a whole number below n from the upper half of a word."""
    high = (state * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(32)
    return int((high * np.uint64(n)) >> np.uint64(32))


@jit
def _count_person(
    rows: Shorts, start: int, k: int, parents: Shorts, histogram: Floats, gaps: Gaps
) -> None:
    """Add a person's chosen rows to the tables, and leave in `histogram` how many rows have each level."""
    n_columns = rows.shape[1]
    share = np.divide(1.0, k)
    pair = np.divide(1.0, k * (k - 1)) if k > 1 else 0.0
    histogram[:] = 0.0
    for row in range(start, start + k):
        for c in range(n_columns):
            one = rows[row, c]
            histogram[one] += 1.0
            for parent in parents:
                gaps.parents[parent, one] += share
            for d in range(n_columns):
                two = rows[row, d]
                if c != d:
                    gaps.rows[one, two] += share
                gaps.pairs[one, two] -= pair
    for one in range(len(histogram)):
        if histogram[one] > 0.0 and k > 1:
            for two in range(len(histogram)):
                gaps.pairs[one, two] += histogram[one] * histogram[two] * pair


@jit
def _gain(rows: Shorts, old: int, new: int, k: int, parents: Shorts, gaps: Gaps) -> float:
    """Return by how much half the weighted squares of gaps of rows' own tables grow if one row replaces another."""
    n_columns = rows.shape[1]
    share = np.divide(1.0, k)
    half = 0.5 * share
    total: float = 0.0
    for c in range(n_columns):
        x, y = rows[old, c], rows[new, c]
        if x != y:
            for parent in parents:
                total += gaps.parent_weights[parent, y] * (gaps.parents[parent, y] + half)
                total -= gaps.parent_weights[parent, x] * (gaps.parents[parent, x] - half)
        for d in range(c):
            u, v = rows[old, d], rows[new, d]
            if x != y or u != v:
                total += gaps.row_weights[y, v] * (gaps.rows[y, v] + half)
                total -= gaps.row_weights[x, u] * (gaps.rows[x, u] - half)
    return total * share


@jit
def _gain_of_pairs(
    rows: Shorts, old: int, new: int, pair: float, others: Floats, gaps: Gaps
) -> float:
    """Return by how much half the weighted squares of gaps of pairs of rows grow, for the levels of the other rows."""
    half, total = 0.5 * pair, 0.0
    for c in range(rows.shape[1]):
        x, y = rows[old, c], rows[new, c]
        if x != y:
            worse, better = gaps.pairs[y], gaps.pairs[x]
            more, less = gaps.pair_weights[y], gaps.pair_weights[x]
            for level in range(len(others)):
                count = others[level]
                if count > 0.0:
                    total += count * (
                        more[level] * (worse[level] + half * count)
                        - less[level] * (better[level] - half * count)
                    )
    return total * pair


@jit
def _exchange(
    rows: Shorts, old: int, new: int, k: int, parents: Shorts, others: Floats, gaps: Gaps
) -> None:
    """Let one row replace another, in the tables and among the rows."""
    n_columns = rows.shape[1]
    share = np.divide(1.0, k)
    pair = np.divide(1.0, k * (k - 1)) if k > 1 else 0.0
    for c in range(n_columns):
        x, y = rows[old, c], rows[new, c]
        for d in range(n_columns):
            if c != d:
                gaps.rows[x, rows[old, d]] -= share
                gaps.rows[y, rows[new, d]] += share
        if x != y:
            for parent in parents:
                gaps.parents[parent, x] -= share
                gaps.parents[parent, y] += share
            for level in range(len(others)):
                if others[level] > 0.0:
                    part = others[level] * pair
                    gaps.pairs[y, level] += part
                    gaps.pairs[level, y] += part
                    gaps.pairs[x, level] -= part
                    gaps.pairs[level, x] -= part
    _swap(rows, old, new)


@jit
def _may(rows: Shorts, new: int, k: int, others: Floats, kinds: Bytes) -> bool:
    """Return whether a row may replace another: a person's rows do not come to agree where they shall not."""
    for c in range(rows.shape[1]):
        if kinds[c] == SEVERAL and k > 1 and others[rows[new, c]] == k - 1:
            return False
    return True


@jit
def _count_agreeing(rows: Shorts, start: int, k: int, kinds: Bytes) -> int:
    """Return in how many columns a person's rows agree and shall not."""
    found = 0
    for c in range(rows.shape[1]):
        if kinds[c] == SEVERAL:
            agree = True
            for row in range(start + 1, start + k):
                agree = agree and rows[row, c] == rows[start, c]
            found += agree
    return found


@jit
def _swap(rows: Shorts, one: int, two: int) -> None:
    for c in range(rows.shape[1]):
        rows[one, c], rows[two, c] = rows[two, c], rows[one, c]


@jit
def _separate(rows: Shorts, start: int, stop: int, k: int, kinds: Bytes) -> None:
    """Put other candidates among a person's rows until they agree in no column in which they shall not, if any do."""
    left = _count_agreeing(rows, start, k, kinds)
    for row in range(start + k, stop):
        for place in range(start, start + k):
            if left == 0:
                return
            _swap(rows, place, row)
            now = _count_agreeing(rows, start, k, kinds)
            if now < left:
                left = now
            else:
                _swap(rows, place, row)


@jit
def _relabel(
    rows: Shorts,
    start: int,
    stop: int,
    k: int,
    c: int,
    new: int,
    parents: Shorts,
    histogram: Floats,
    gaps: Gaps,
) -> None:
    """Let all candidates of a person, which agree in a column, have another level there if that brings the tables nearer."""
    old = rows[start, c]
    if new == old:
        return
    total: float = 0.25 * (
        gaps.pair_weights[new, new] * (2.0 * gaps.pairs[new, new] + 1.0)
        - gaps.pair_weights[old, old] * (2.0 * gaps.pairs[old, old] - 1.0)
    )
    for parent in parents:
        total += gaps.parent_weights[parent, new] * (gaps.parents[parent, new] + 0.5)
        total -= gaps.parent_weights[parent, old] * (gaps.parents[parent, old] - 0.5)
    for level in range(len(histogram)):
        if histogram[level] > 0.0 and level != old:
            part = np.divide(histogram[level], k)
            half = 0.5 * part
            more = gaps.row_weights[new, level] * (gaps.rows[new, level] + half)
            less = gaps.row_weights[old, level] * (gaps.rows[old, level] - half)
            more += gaps.pair_weights[new, level] * (gaps.pairs[new, level] + half)
            less += gaps.pair_weights[old, level] * (gaps.pairs[old, level] - half)
            total += part * (more - less)
    if total >= 0.0:
        return
    gaps.pairs[new, new] += 1.0
    gaps.pairs[old, old] -= 1.0
    for parent in parents:
        gaps.parents[parent, new] += 1.0
        gaps.parents[parent, old] -= 1.0
    for level in range(len(histogram)):
        if histogram[level] > 0.0 and level != old:
            part = np.divide(histogram[level], k)
            for table in (gaps.rows, gaps.pairs):
                table[new, level] += part
                table[level, new] += part
                table[old, level] -= part
                table[level, old] -= part
    histogram[new], histogram[old] = float(k), 0.0
    for row in range(start, stop):
        rows[row, c] = new


@jit
def settle(
    rows: Shorts,
    starts: Ints,
    counts: Ints,
    parents: Shorts,
    kinds: Bytes,
    seeds: Words,
    n_sweeps: int,
    gaps: Gaps,
) -> None:
    """Choose each person's rows among the candidates: the first ones of each person, after exchanges that bring the block nearer to the wanted tables.

    Parameters
    ----------
    rows
        uint16 array of shape (n_rows, n_columns), changed: each candidate's levels, numbered through
        all columns. A person's candidates are exchanged among each other and never with others'.
    starts
        int64 array of shape (n + 1,): where each person's candidates begin.
    counts
        int64 array of shape (n,): how many of them each person has at the end; at most as many as
        candidates.
    parents
        uint16 array of shape (n, n_parents): each person's own levels, numbered through.
    kinds
        uint8 array of shape (n, n_columns): `SEVERAL` where rows may not all agree, `CONSTANT` where
        all candidates do, at least two of them.
    seeds
        uint64 array of shape (n,), random.
    gaps
        Less than what is wanted: minus the wanted tables. Changed to what remains.

    Notes
    -----
    In each sweep each chosen row of each person is compared with one candidate at random, which
    replaces it if the weighted sum of squared gaps becomes smaller. Where a person's rows are
    constant, the level of another person is tried for all of them.
    """
    others = np.zeros(len(gaps.pairs))
    for person in range(len(counts)):
        if counts[person]:
            start, stop, k = starts[person], starts[person + 1], counts[person]
            if k > 1:
                _separate(rows, start, stop, k, kinds[person])
            _count_person(rows, start, k, parents[person], others, gaps)
    for _ in range(n_sweeps):
        for person in range(len(counts)):
            start, k = starts[person], counts[person]
            n_left = starts[person + 1] - start - k
            if not k or not n_left:
                continue
            others[:] = 0.0
            for row in range(start, start + k):
                for c in range(rows.shape[1]):
                    others[rows[row, c]] += 1.0
            state = seeds[person] | np.uint64(1)
            for c in range(rows.shape[1]):
                if kinds[person, c] == CONSTANT:
                    state = _next(state)
                    level = rows[_below(state, len(rows)), c]
                    _relabel(
                        rows, start, starts[person + 1], k, c, level, parents[person], others, gaps
                    )
            for old in range(start, start + k):
                state = _next(state)
                new = start + k + _below(state, n_left)
                _try(rows, old, new, k, parents[person], kinds[person], others, gaps)
            seeds[person] = state


@jit
def _try(
    rows: Shorts,
    old: int,
    new: int,
    k: int,
    parents: Shorts,
    kinds: Bytes,
    others: Floats,
    gaps: Gaps,
) -> None:
    """Let a candidate replace a row if that brings the tables nearer."""
    n_columns = rows.shape[1]
    for c in range(n_columns):
        others[rows[old, c]] -= 1.0
    if _may(rows, new, k, others, kinds):
        gain = _gain(rows, old, new, k, parents, gaps)
        if k > 1:
            gain += _gain_of_pairs(rows, old, new, np.divide(1.0, k * (k - 1)), others, gaps)
        if gain < 0.0:
            _exchange(rows, old, new, k, parents, others, gaps)
    for c in range(n_columns):
        others[rows[old, c]] += 1.0
