"""Channels that depend on the released level of another column: drawing from them, and the privacy loss of each outcome."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.channel import draw, index_bits
from dpdask.kernels.jit import jit

Floats = NDArray[np.float64]
Weights = NDArray[np.uint64]

_ROUNDING = 2.0**-48  # relative and absolute: many times the error of a quotient of two doubles and of its logarithm


@jit
def sample_given(
    parents: NDArray[np.uint16], own: NDArray[np.int32], words: Weights, n_levels: int, thresholds: Weights, aliases: NDArray[np.uint16]
) -> NDArray[np.uint16]:
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
    thresholds, aliases
        From `channel.alias_tables`, of shape (n_parent_levels · n_levels, 2**bits): row b · n_levels + k is that of parent
        level b and own level k.
    """
    bits = index_bits(thresholds)
    out = np.empty(len(own), dtype=np.uint16)
    for i in range(len(own)):
        out[i] = draw(words[i], np.int64(parents[i]) * n_levels + own[i], bits, thresholds, aliases)
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
