"""Weights at which a pool of records meets two- and three-way tables, and records drawn from the pool by their weights.

The arithmetic is additions, multiplications and divisions in a fixed order: the same pool and tables give the same bits on
every machine, so that a task that runs twice draws the same records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

Codes = NDArray[np.uint8] | NDArray[np.uint16]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cells = NDArray[np.uint32]

LOWEST, HIGHEST = -4.0, 2.0  # how far the logarithm of a cell's weights may move in one visit
_STEPS = 50
_LANES = 4  # records whose cells are summed apart, so that no sum waits for the last one


@jit
def exponential(x: float) -> float:
    """Return exp(x) for |x| at most 8, up to a relative error of 1e-14, by additions and multiplications alone."""
    y = x / 64.0
    term = total = 1.0
    for k in range(1, 12):
        term *= y / k
        total += term
    for _ in range(6):
        total *= total
    return total


@jit
def solve_cell(wanted: float, found: float, theta: float, strength: float) -> float:
    """Return by how much θ moves: the d in [-4, 2] nearest to the root of θ + d = strength · (wanted - found · exp(d)).

    Parameters
    ----------
    wanted
        The table's count.
    found
        The records' weight in the cell, at least 0.
    theta
        What the cell's weights were moved by before, as a logarithm.
    strength
        How firmly the table is believed, per count.

    Notes
    -----
    Newton's method; the difference of the two sides is convex and grows with d, so it converges from everywhere. No step is
    longer than 1.
    """
    d = 0.0
    for _ in range(_STEPS):
        grown = strength * found * exponential(d)
        step = -(theta + d - strength * wanted + grown) / (1.0 + grown)
        step = min(max(step, -1.0), 1.0)
        before = d
        d = min(max(d + step, LOWEST), HIGHEST)
        if abs(d - before) < 1e-10:
            break
    return d


@jit
def rake(codes: Codes, sizes: Ints, tables: Ints, starts: Ints, targets: Floats, total: float, strengths: Floats, order: Ints) -> Floats:
    """Return weights at which the pool's tables are near the wanted ones.

    Parameters
    ----------
    codes
        uint8 or uint16 array of shape (n_attributes, n): the pool, every code below its attribute's size.
    sizes
        int64 array of shape (n_attributes,).
    tables
        int64 array of shape (n_tables, 3): the attributes of each table; the third one is -1 for a two-way table.
    starts
        int64 array of shape (n_tables,): where each table begins in `targets`.
    targets
        float64 array: the wanted counts, table after table.
    total
        What the weights sum to at first.
    strengths
        float64 array of shape (n_tables,): how firmly each table is believed, per count: a multiple of 1 / σ², for noise of
        standard deviation σ.
    order
        int64 array: the tables, in the order of the visits.

    Returns
    -------
    float64 array of shape (n,), positive; their sum is about `total`.

    Notes
    -----
    w_i ∝ exp(Σ θ_t(cell of record i in table t)). Each visit of a table solves `solve_cell` for each of its cells: at the
    end θ = strength · (wanted - found), the maximum entropy weights that are penalised by θ² / (2 · strength). Cells where the
    pool is thin are thus not forced. θ belongs to this pool: on another one it would be wrong, so it is not returned.
    """
    n = codes.shape[1]
    weights = np.full(n, total / n)
    thetas = np.zeros(len(targets))
    cells = np.zeros(n, dtype=np.uint32)  # of each record in the table that was visited last
    largest = 1
    for t in range(len(tables)):
        largest = max(largest, n_cells_of(tables[t], sizes))
    found = np.zeros((_LANES, largest))
    factors = np.ones(largest)
    for visit in range(len(order)):
        t = order[visit]
        start, n_cells = starts[t], n_cells_of(tables[t], sizes)
        found[:, :n_cells] = 0.0
        if tables[t, 2] < 0:
            _visit_pair(codes[tables[t, 0]], codes[tables[t, 1]], sizes[tables[t, 1]], weights, cells, factors, found)
        else:
            width, depth = sizes[tables[t, 1]], sizes[tables[t, 2]]
            _visit_triple(codes[tables[t, 0]], codes[tables[t, 1]], codes[tables[t, 2]], width, depth, weights, cells, factors, found)
        for cell in range(n_cells):
            met = ((found[0, cell] + found[1, cell]) + found[2, cell]) + found[3, cell]
            d = solve_cell(targets[start + cell], met, thetas[start + cell], strengths[t]) if met > 0.0 else 0.0
            thetas[start + cell] += d
            factors[cell] = exponential(d)
    for i in range(n):
        weights[i] *= factors[cells[i]]
    return weights


@jit
def n_cells_of(table: Ints, sizes: Ints) -> int:
    """Return how many cells a table has.

    Parameters
    ----------
    table
        int64 array of shape (3,): its attributes; the third one is -1 for a two-way table.
    sizes
        int64 array of shape (n_attributes,).
    """
    depth = sizes[table[2]] if table[2] >= 0 else 1
    return int(sizes[table[0]] * sizes[table[1]] * depth)


@jit
def _visit_pair(a: Codes, b: Codes, width: int, weights: Floats, cells: Cells, factors: Floats, found: Floats) -> None:
    """Multiply the weights by the last table's factors and sum them up in this table, in one pass."""
    for i in range(len(weights)):
        w = weights[i] * factors[cells[i]]
        weights[i] = w
        cell = a[i] * width + b[i]
        cells[i] = cell
        found[i % _LANES, cell] += w


@jit
def _visit_triple(a: Codes, b: Codes, c: Codes, width: int, depth: int, weights: Floats, cells: Cells, factors: Floats, found: Floats) -> None:
    """As `_visit_pair`, for a three-way table."""
    for i in range(len(weights)):
        w = weights[i] * factors[cells[i]]
        weights[i] = w
        cell = (a[i] * width + b[i]) * depth + c[i]
        cells[i] = cell
        found[i % _LANES, cell] += w


@jit
def resample(weights: Floats, order: Ints, n: int, uniform: float) -> Ints:
    """Return n records of a pool by systematic sampling: each as often as its share of the weights asks for, up to less than 1.

    Parameters
    ----------
    weights
        float64 array of shape (m,), not negative, with a positive sum.
    order
        int64 array of shape (m,): the pool in the order in which it is walked; neighbours stand in for each other.
    n
        How many.
    uniform
        In [0, 1), where the walk begins.

    Returns
    -------
    int64 array of shape (n,): places in the pool.
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
