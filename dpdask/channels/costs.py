"""Costs of changing a level: squared differences of values or ranks, 0/1, or the user's own matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import SpecError

Floats = NDArray[np.float64]


def compute_squared(positions: Floats) -> Floats:
    """Return cost[k, j] = (positions[k] - positions[j])², for levels that lie on a line."""
    return np.square(positions[:, None] - positions[None, :])


def compute_rank(probabilities: Floats) -> Floats:
    """Return the squared differences of the levels' mid-ranks under a reference."""
    return compute_squared(np.cumsum(probabilities) - probabilities / 2)


def compute_zero_one(n_levels: int) -> Floats:
    """Return 1 for every change of level, for unordered levels."""
    return 1.0 - np.eye(n_levels)


def check_declared(matrix: Sequence[Sequence[float]], n_levels: int, where: str) -> Floats:
    """Check a user's matrix of costs and return it as an array.

    Parameters
    ----------
    matrix
        cost[k][j] of releasing level j for level k; null first, when null is a level.
    n_levels
        How many levels there are.
    where
        For the message.

    Raises
    ------
    SpecError
        If it is not n_levels × n_levels, or an entry is negative or not finite.
    """
    try:
        cost = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError("the cost must be a matrix of numbers", where, "one row and one column per level") from None
    if cost.shape != (n_levels, n_levels):
        raise SpecError(f"the cost must have {n_levels} rows and columns", where, "one per level (null first, when null is a level)")
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise SpecError("the costs must be finite and not negative", where, "correct the matrix")
    return cost
