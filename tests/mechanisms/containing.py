"""Whether released ranges hold what they stand for."""

import numpy as np


def held_by(ranges, values):
    """Where the range contains the value: always, unless the value is perturbed or null."""
    above, below = ranges.lower < values, values <= ranges.upper
    inside = np.where(ranges.lower > ranges.upper, above | below, above & below)
    return np.where(ranges.lower == ranges.upper, values == ranges.lower, inside) & ~ranges.is_null
