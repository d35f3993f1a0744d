"""Whether released ranges hold what they stand for."""

from __future__ import annotations

import numpy as np

from dpdask.mechanisms.interval.ranges import Ranges


def held_by(ranges: Ranges, values: np.ndarray) -> np.ndarray:
    """Where the range contains the value: always, unless the value is perturbed or null."""
    above, below = ranges.lower < values, values <= ranges.upper
    inside = np.where(ranges.lower > ranges.upper, above | below, above & below)
    return np.where(ranges.lower == ranges.upper, values == ranges.lower, inside) & ~ranges.is_null
