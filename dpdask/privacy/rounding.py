"""Sums and shares of ε and δ in exact arithmetic, rounded against the releaser at the very end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction


def rounded_down(exact: Fraction) -> float:
    """Return the greatest float that is not above `exact`: what may be spent."""
    rounded = float(exact)
    return math.nextafter(rounded, -math.inf) if Fraction(rounded) > exact else rounded


def rounded_up(exact: Fraction) -> float:
    """Return the least float that is not below `exact`: what was spent; infinity beyond the largest float."""
    try:
        rounded = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(rounded, math.inf) if Fraction(rounded) < exact else rounded


def rounded_up_sum(parts: Iterable[float]) -> float:
    """Return the least float that is not below the exact sum of finite floats."""
    return rounded_up(sum(map(Fraction, parts), Fraction(0)))
