"""Bins of ranks: the bin of a value, and a value drawn from a bin, both by the continualised reference cdf."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.cdf import rank_interval, values_at
from dpdask.kernels.guide import Guide, guide
from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]
Weights = NDArray[np.uint64]

_UNIT = 1.0 / 9007199254740992.0  # 2**-53


def bin_edges(x: Floats, c: Floats, n_bins: int) -> Floats:
    """Return the edges of about `n_bins` bins of ranks: null and every atom a bin of its own, the rest cut evenly.

    Parameters
    ----------
    x, c
        The knots of the continualised cdf; it jumps where x repeats, and null holds the ranks below c[0].
    n_bins
        How many bins a cdf without null and atoms would be cut into.

    Returns
    -------
    float64 array, strictly increasing from 0 to 1.
    """
    jumps = np.flatnonzero((np.diff(x) == 0) & (np.diff(c) > 0))
    fixed = np.unique(np.concatenate([[0.0, c[0]], c[jumps], c[jumps + 1], [1.0]]))
    whole = {(float(c[jump]), float(c[jump + 1])) for jump in jumps} | {(0.0, float(c[0]))}
    edges = [0.0]
    for low, high in zip(fixed[:-1].tolist(), fixed[1:].tolist(), strict=True):
        pieces = 1 if (low, high) in whole else max(1, round((high - low) * n_bins))
        edges.extend(np.linspace(low, high, pieces + 1)[1:].tolist())
    return np.unique(np.array(edges))


def cells_of(values: Floats, is_null: NDArray[np.bool_], words: Weights, x: Floats, c: Floats, edges: Floats, *, lattice: bool) -> NDArray[np.int32]:
    """Return the bin of each value: that of a rank drawn uniformly from the interval of ranks that it stands for.

    Parameters
    ----------
    values, is_null
        float64 and bool arrays of shape (n,).
    words
        uint64 array of shape (n,), uniform and independent.
    x, c
        The knots of the continualised cdf.
    edges
        From `bin_edges`.
    lattice
        Whether values are whole numbers.
    """
    return _cells(values, is_null, words, x, c, guide(x), edges, lattice)


@jit
def _cells(
    values: Floats, is_null: NDArray[np.bool_], words: Weights, x: Floats, c: Floats, guide: Guide, edges: Floats, lattice: bool
) -> NDArray[np.int32]:
    out = np.empty(len(values), dtype=np.int32)
    for row in range(len(values)):
        low, high = (0.0, c[0]) if is_null[row] else rank_interval(values[row], x, c, guide, lattice)
        rank = low + (words[row] >> np.uint64(11)) * _UNIT * (high - low)
        out[row] = min(max(np.searchsorted(edges, rank, side="right") - 1, 0), len(edges) - 2)
    return out


def draw_values(cells: NDArray[np.int32], words: Weights, x: Floats, c: Floats, edges: Floats, *, lattice: bool) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a value, or null, from each bin, distributed as the reference is inside it.

    Parameters
    ----------
    cells
        int32 array of shape (n,): each row's bin.
    words
        uint64 array of shape (n,), uniform.
    x, c
        The knots of the continualised cdf and its values there.
    edges
        float64 array: the ranks between the bins.
    lattice
        Whether values are whole numbers.
    """
    place = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT
    ranks = edges[cells] + place * (edges[cells + 1] - edges[cells])
    return values_at(ranks, x, c, guide(c), lattice)
