"""Weighted empirical distributions: merged exactly, compressed with a stated rank error, read as a continuous cdf."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def find_distinct(values: Floats) -> tuple[Floats, Ints]:
    """Return the sorted distinct values (float64) and how often each occurs (int64)."""
    found, counts = np.unique(values, return_counts=True)
    return found, counts.astype(np.int64)


def merge(values: list[Floats], weights: list[Ints]) -> tuple[Floats, Ints]:
    """Return the union of weighted samples: sorted distinct values and their summed weights.

    Parameters
    ----------
    values
        float64 arrays, one per sample.
    weights
        int64 arrays, one per sample: the weight of each value.
    """
    found, inverse = np.unique(np.concatenate(values), return_inverse=True)
    summed = np.zeros(len(found), dtype=np.int64)
    np.add.at(summed, inverse, np.concatenate(weights))
    return found, summed


def compress(values: Floats, weights: Ints, n_points: int) -> tuple[Floats, Ints, int]:
    """Return at most `n_points` of the values, each carrying the weight of those dropped just below it.

    Parameters
    ----------
    values, weights
        A weighted sample, sorted and distinct; weights are positive.
    n_points
        How many points to keep, at least 2.

    Returns
    -------
    values, weights
        The compressed sample: the same total weight, the same smallest and largest value.
    error
        By how much weight the rank of any number can have moved, below ceil(total / (n_points - 1)).

    Notes
    -----
    The cumulative weight is cut into n_points - 1 equal widths. A point is kept when a cut falls inside its weight or at
    its end, so that all points dropped between two kept ones lie inside one width, however heavy the kept ones are.
    Ranks at the kept points are exact; in between, at most the dropped weight is misplaced.
    """
    if len(values) <= n_points:
        return values, weights, 0
    cumulative = np.cumsum(weights)
    width = -(-int(cumulative[-1]) // (n_points - 1))
    keep = np.diff(cumulative // width, prepend=0) > 0
    keep[0] = keep[-1] = True  # where the distribution begins and ends
    kept = np.flatnonzero(keep)
    new_weights = np.diff(cumulative[kept], prepend=0)
    dropped = new_weights - weights[kept]
    return values[kept], new_weights.astype(np.int64), int(dropped.max())


def continualise(
    values: Floats, weights: Floats, atoms: Floats, atom_weights: Floats, start: float | None, step: float | None
) -> tuple[Floats, Floats]:
    """Return the knots (x, c) of the continualised cdf: linear between the values, with a jump at each atom.

    Parameters
    ----------
    values, weights
        The sample apart from the atoms: sorted, distinct; float64 weights.
    atoms, atom_weights
        The declared atoms, increasing, and their weights (0 allowed).
    start
        The lower bound of the line, if it has one.
    step
        The lattice step (1 for whole numbers), or None for real numbers.

    Returns
    -------
    x, c
        float64 arrays of one length, both non-decreasing; c runs from 0 to 1. Where x repeats, c jumps.

    Notes
    -----
    Bi & Shen (3) and (7): the weight of a value is spread over the gap below it. The gap below the smallest is not in
    the paper: one lattice step, or the width of the gap above it, and never past `start`.
    """
    points = np.concatenate([values, atoms])
    masses = np.concatenate([weights, atom_weights])
    is_atom = np.concatenate([np.zeros(len(values), bool), np.ones(len(atoms), bool)])
    order = np.argsort(points, kind="stable")
    points, masses, is_atom = points[order], masses[order], is_atom[order]
    points, masses, is_atom = points[masses > 0], masses[masses > 0], is_atom[masses > 0]
    below = np.concatenate([[0.0], np.cumsum(masses)[:-1]])
    above = below + masses
    # every point closes a linear piece; an atom is a piece of no width, preceded by a flat one
    x = np.repeat(points, np.where(is_atom, 2, 1))
    c = np.repeat(above, np.where(is_atom, 2, 1))
    c[np.cumsum(np.where(is_atom, 2, 1))[is_atom] - 2] = below[is_atom]
    first = points[0] if is_atom[0] else origin(points, start, step)
    return np.concatenate([[first], x]), np.concatenate([[0.0], c / above[-1]])


def origin(points: Floats, start: float | None, step: float | None) -> float:
    """Return where the gap below the smallest of some sorted points begins; parameters as for `continualise`."""
    gap = step if step is not None else float(points[1] - points[0]) if len(points) > 1 else 1.0
    below = float(points[0]) - gap
    return below if start is None or step is not None else max(start, below)
