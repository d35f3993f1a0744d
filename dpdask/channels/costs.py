"""What a column's levels are worth: costs of changing a level, which a channel minimises, and the values whose mean it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels.jit import Floats


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
    """
    try:
        cost = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(
            "the cost must be a matrix of numbers", where, "one row and one column per level"
        ) from None
    if cost.shape != (n_levels, n_levels):
        raise SpecError(
            f"the cost must have {n_levels} rows and columns",
            where,
            "one per level (null first, when null is a level)",
        )
    if not np.isfinite(cost).all() or (cost < 0).any():
        raise SpecError("the costs must be finite and not negative", where, "correct the matrix")
    return cost


def level_cost(
    codec: LevelCodec, probabilities: Floats, cost: str | Sequence[Sequence[float]]
) -> Floats:
    """Return what each change of a level costs, float64 of shape (n_levels, n_levels)."""
    if not isinstance(cost, str):
        return check_declared(cost, codec.n_levels, f"`cost.{codec.name}`")
    if cost == "zero-one":
        return compute_zero_one(codec.n_levels)
    if not codec.ordered:
        raise SpecError(
            f"categories have no {cost}", f"`cost.{codec.name}`", "take zero-one, or a matrix"
        )
    if cost == "rank":
        return compute_rank(probabilities)
    return _value_cost(codec.levels)


def level_values(codec: Codec) -> Floats:
    """Return the values of a column's levels, whose mean the channel optimal-unbiased keeps; dates and times count from 1970-01-01."""
    if not codec.has_levels or not codec.ordered or codec.levels.null_count:
        what = "the channel optimal-unbiased takes levels that are numbers or dates, without null"
        raise SpecError(
            what, f"column {codec.name!r}", "declare such levels, or set `channel` to optimal"
        )
    return _numbers(codec.levels)


def _numbers(levels: pa.Array) -> Floats:
    """Return levels as numbers, 0 for null; dates and times in their own unit since 1970-01-01."""
    whole = (
        levels.cast(pa.int32() if pa.types.is_date32(levels.type) else pa.int64())
        if pa.types.is_temporal(levels.type)
        else levels
    )
    return np.asarray(
        pc.cast(whole, pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False),
        dtype=np.float64,
    )


def _value_cost(levels: pa.Array) -> Floats:
    """Return squared differences of level values; null is as far from every value as the farthest two are."""
    cost = compute_squared(_numbers(levels))
    if levels.null_count:
        cost[0, :] = cost[:, 0] = cost[1:, 1:].max() if len(cost) > 2 else 1.0
        cost[0, 0] = 0.0
    return cost


def check_cost(codec: Codec, cost: str | Sequence[Sequence[float]]) -> None:
    """Check that a column can have a cost."""
    if codec.has_levels:
        level_cost(codec, np.full(codec.n_levels, 1.0 / codec.n_levels), cost)
    elif cost != "rank":
        raise SpecError(
            "the cost of a continuous or mixed column is always rank",
            f"`cost.{codec.name}`",
            "remove it",
        )
