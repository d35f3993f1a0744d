"""Channels that depend on the released level of another column: drawing from them, and the privacy loss of each outcome."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.channel import TOTAL_BITS, alias_tables, draw, index_bits
from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]
Weights = NDArray[np.uint64]

_TOP_BITS = 16
_ROUNDING = 2.0**-48  # relative and absolute: many times the error of a quotient of two doubles and of its logarithm


class GivenTables(NamedTuple):
    """The alias tables of channels that depend on a parent's level: row b · n_levels + k is that of parent level b and own level k.

    Attributes
    ----------
    packed
        uint32 array of shape (n_parent_levels · n_levels, 2**bits): of each threshold the highest 16 bits, and then the alias.
    thresholds, aliases
        From `channel.alias_tables`, of the same shape.
    """

    packed: NDArray[np.uint32]
    thresholds: Weights
    aliases: NDArray[np.uint16]


def make_given_tables(weights: Weights) -> GivenTables:
    """Return the tables to draw from; `weights` is a uint64 array of shape (n_parent_levels, n_levels, n_levels)."""
    thresholds, aliases = alias_tables(weights.reshape(-1, weights.shape[2]))
    shift = np.uint64(TOTAL_BITS - _TOP_BITS - index_bits(thresholds))
    highest = np.minimum(thresholds >> shift, np.uint64(2**_TOP_BITS - 1)).astype(np.uint32)  # a threshold that no word reaches has a bit more
    return GivenTables((highest << np.uint32(_TOP_BITS)) | aliases, thresholds, aliases)


@jit
def sample_given(parents: NDArray[np.uint16], own: NDArray[np.int32], words: Weights, n_levels: int, tables: GivenTables) -> NDArray[np.uint16]:
    """Return one output level for each row, drawn from the row's own level and the released level of its parent.

    Parameters
    ----------
    parents
        uint16 array of shape (n,): the parent's released levels; zeros for a column without one.
    own
        int32 array of shape (n,): the column's own levels, below `n_levels`.
    words
        uint64 array of shape (n,), uniform and independent.
    n_levels
        How many levels the column has.
    tables
        From `make_given_tables`.

    Notes
    -----
    The same levels as `channel.draw` gives for the same words. The packed tables decide, but for a row in 2**16 whose word agrees with the
    threshold in its highest bits.
    """
    packed, thresholds, aliases = tables
    bits = index_bits(thresholds)
    cells, shift = np.uint64(thresholds.shape[1] - 1), np.uint64(TOTAL_BITS - _TOP_BITS)
    out = np.empty(len(own), dtype=np.uint16)
    for i in range(len(own)):
        row = np.int64(parents[i]) * n_levels + own[i]
        rest = words[i] >> np.uint64(1)
        cell = np.int64(rest & cells)
        entry = np.uint64(packed[row, cell])
        highest, threshold = rest >> shift, entry >> np.uint64(_TOP_BITS)
        if highest == threshold:
            out[i] = draw(words[i], row, bits, thresholds, aliases)
        else:
            out[i] = np.uint64(cell) if highest < threshold else entry & np.uint64(2**_TOP_BITS - 1)
    return out


def losses(weights: Weights) -> Floats:
    """Return log(max_k w[b, k, j] / min_k w[b, k, j]) for each parent level b and output j, rounded up.

    Parameters
    ----------
    weights
        uint64 array of shape (n_parent_levels, n_levels, n_levels).

    Returns
    -------
    float64 array of shape (n_parent_levels, n_levels); -infinity where no input gives j, infinity where only some do.
    """
    lows, highs = weights.min(axis=1), weights.max(axis=1)
    low, high = lows.astype(np.float64), highs.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(high / low)
    bound = np.where(highs > lows, found * (1.0 + _ROUNDING) + _ROUNDING, 0.0)
    return np.where(highs == 0, -np.inf, bound)
