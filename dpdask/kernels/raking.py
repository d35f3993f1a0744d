"""Weights at which a pool of records meets two- and three-way tables, and records drawn from the pool by their weights.

The arithmetic is additions, multiplications and divisions in a fixed order: the same pool and
tables give the same bits on every machine, so that a task that runs twice draws the same records.
"""

from __future__ import annotations

import numpy as np

from dpdask.arrays import Codes, Floats, Ints, Shorts, Singles, Uint32s
from dpdask.kernels.jit import jit

Cells = Shorts | Uint32s

LOWEST, HIGHEST = -4.0, 2.0  # how far the logarithm of a cell's weights may move in one visit
_STEPS = 9
_PACE = 1.5  # of the moves before the last sweep
_STRIP = 2**12  # records whose weights and cells stay in the first-level cache
_LANES = 4  # records whose cells are summed apart, so that no sum waits for the last one
_LEAST = np.float32(1e-30)  # a weight: smaller ones would be denormal, and slow


@jit
def exponential(x: float) -> float:
    """Return exp(x) for |x| at most 4, up to a relative error of 1e-12, by additions and multiplications alone."""
    y = x * (1.0 / 64.0)
    total = 1.0 + y * (
        1.0
        + y
        * (
            0.5
            + y
            * (
                1.0 / 6.0
                + y * (1.0 / 24.0 + y * (1.0 / 120.0 + y * (1.0 / 720.0 + y * (1.0 / 5040.0))))
            )
        )
    )
    for _ in range(6):
        total *= total
    return total


@jit
def solve_cells(
    wanted: Floats, found: Floats, thetas: Floats, strength: float, moves: Floats
) -> None:
    """Write by how much each θ moves: the d in [-4, 2] nearest to the root of θ + d = strength · (wanted - found · exp(d)).

    Parameters
    ----------
    thetas
        What each cell's weights were moved by before, as a logarithm.

    Notes
    -----
    Newton's method; the difference of the two sides is convex and grows with d, so it converges
    from everywhere. No step is longer than 1, and the number of steps is fixed, so that many cells
    are solved at once.
    """
    for cell in range(len(moves)):
        moves[cell] = 0.0
    for _ in range(_STEPS):
        for cell in range(len(moves)):
            d = moves[cell]
            grown = strength * found[cell] * exponential(d)
            step = np.divide(strength * wanted[cell] - thetas[cell] - d - grown, 1.0 + grown)
            step = -1.0 if step < -1.0 else 1.0 if step > 1.0 else step
            d += step
            moves[cell] = LOWEST if d < LOWEST else HIGHEST if d > HIGHEST else d


def rake(
    codes: Codes,
    sizes: Ints,
    tables: Ints,
    starts: Ints,
    targets: Floats,
    total: float,
    strengths: Floats,
    order: Ints,
    shares: Floats | None = None,
) -> Singles:
    """Return weights at which the pool's tables are near the wanted ones.

    Parameters
    ----------
    codes
        uint8 or uint16 array of shape (n_attributes, n): the pool, every code below its attribute's
        size.
    tables
        int64 array of shape (n_tables, 3): the attributes of each table; the third one is -1 for a
        two-way table.
    starts
        int64 array of shape (n_tables,): where each table begins in `targets`.
    strengths
        float64 array of shape (n_tables,): how firmly each table is believed, per count: a multiple
        of 1 / σ², for noise of standard deviation σ.
    shares
        float64 array of shape (n,), with the sum 1: how much each record stands for, of a pool that
        holds more of some; all stand for as much if None.

    Notes
    -----
    w_i ∝ exp(Σ θ_t(cell of record i in table t)). Each visit of a table moves every θ by 1.5 of
    what `solve_cells` says, and the last visit by exactly that (successive over-relaxation). At the
    end θ = strength · (wanted - found), the maximum entropy weights that are penalised by θ² / (2 ·
    strength). Cells where the pool is thin are thus not forced. θ belongs to this pool: on another
    one it would be wrong, so it is not returned.
    """
    largest = max((n_cells_of(table, sizes) for table in tables), default=1)
    cells: Cells = (
        np.zeros(codes.shape[1], np.uint16)
        if largest <= 2**16
        else np.zeros(codes.shape[1], np.uint32)
    )
    n = codes.shape[1]
    weights = np.full(n, np.float32(total / n))
    if shares is not None:
        weights[:] = total * shares
    return _rake(codes, sizes, tables, starts, targets, weights, strengths, order, cells, largest)


@jit
def _rake(
    codes: Codes,
    sizes: Ints,
    tables: Ints,
    starts: Ints,
    targets: Floats,
    weights: Singles,
    strengths: Floats,
    order: Ints,
    cells: Cells,
    largest: int,
) -> Singles:
    n = codes.shape[1]
    thetas = np.zeros(len(targets))
    # double precision: in single, sums of many equal weights would err all one way
    lanes, found = (np.zeros((_LANES, largest)), np.zeros(largest))
    # of the table that was visited last
    moves, factors = (np.zeros(largest), np.ones(largest, dtype=np.float32))
    for visit in range(len(order)):
        t = order[visit]
        start, n_cells = starts[t], n_cells_of(tables[t], sizes)
        for lane in range(_LANES):
            for cell in range(n_cells):
                lanes[lane, cell] = 0.0
        for first in range(0, n, _STRIP):
            strip = slice(first, min(first + _STRIP, n))
            _multiply(weights[strip], cells[strip], factors)
            _find_cells(codes, strip, tables[t], sizes, cells[strip])
            _sum_up(weights[strip], cells[strip], lanes)
        for cell in range(n_cells):
            found[cell] = (lanes[0, cell] + lanes[1, cell]) + (lanes[2, cell] + lanes[3, cell])
        own = thetas[start : start + n_cells]
        solve_cells(
            targets[start : start + n_cells], found[:n_cells], own, strengths[t], moves[:n_cells]
        )
        pace = _PACE if visit < len(order) - len(tables) else 1.0
        for cell in range(n_cells):
            move = moves[cell] * pace if found[cell] > 0.0 else 0.0
            move = LOWEST if move < LOWEST else HIGHEST if move > HIGHEST else move
            own[cell] += move
            factors[cell] = np.float32(exponential(move))
    _multiply(weights, cells, factors)
    return weights


@jit
def _multiply(weights: Singles, cells: Cells, factors: Singles) -> None:
    for i in range(len(weights)):
        weight = weights[i] * factors[cells[i]]
        weights[i] = weight if weight > _LEAST else _LEAST


@jit
def _find_cells(codes: Codes, strip: slice, table: Ints, sizes: Ints, cells: Cells) -> None:
    """Write each record's cell in a table; apart from the sums, so that it is vectorised."""
    a, b, width = codes[table[0], strip], codes[table[1], strip], np.uint32(sizes[table[1]])
    if table[2] < 0:
        for i in range(len(cells)):
            cells[i] = np.uint32(a[i]) * width + np.uint32(b[i])
    else:
        c, depth = codes[table[2], strip], np.uint32(sizes[table[2]])
        for i in range(len(cells)):
            cells[i] = (np.uint32(a[i]) * width + np.uint32(b[i])) * depth + np.uint32(c[i])


@jit
def _sum_up(weights: Singles, cells: Cells, lanes: Floats) -> None:
    for i in range(len(weights)):
        lanes[i % _LANES, cells[i]] += weights[i]


@jit
def n_cells_of(table: Ints, sizes: Ints) -> int:
    """Return how many cells a table has.

    Parameters
    ----------
    table
        int64 array of shape (3,): its attributes; the third one is -1 for a two-way table.
    """
    depth = sizes[table[2]] if table[2] >= 0 else 1
    return int(sizes[table[0]] * sizes[table[1]] * depth)


@jit
def resample(weights: Singles, order: Ints, n: int, uniform: float) -> Ints:
    """Return n records of a pool by systematic sampling: each as often as its share of the weights asks for, up to less than 1.

    Parameters
    ----------
    weights
        float32 array of shape (m,), not negative, with a positive sum.
    order
        int64 array of shape (m,): the pool in the order in which it is walked; neighbours stand in
        for each other.
    """
    total = 0.0
    for place in order:
        total += weights[place]
    chosen = np.empty(n, dtype=np.int64)
    walked, at = 0.0, -1
    for k in range(n):
        goal = (k + uniform) / n * total
        while at < len(order) - 1 and (at < 0 or walked <= goal):
            at += 1
            walked += weights[order[at]]
        chosen[k] = order[at]
    return chosen
