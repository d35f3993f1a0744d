"""Sums and shares of ε and δ in exact arithmetic, rounded against the releaser at the very end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction


def round_down(exact: Fraction) -> float:
    """Return the greatest float that is not above `exact`, for budgets to spend."""
    rounded = float(exact)
    return math.nextafter(rounded, -math.inf) if Fraction(rounded) > exact else rounded


def round_up(exact: Fraction) -> float:
    """Return the least float that is not below `exact`, for spent budgets; infinity beyond the largest float."""
    try:
        rounded = float(exact)
    except OverflowError:
        return math.inf
    return math.nextafter(rounded, math.inf) if Fraction(rounded) < exact else rounded


def shorten(value: float, *, up: bool) -> str:
    """Return a float in at most nine digits, for people.

    Parameters
    ----------
    value
        The number.
    up
        Whether it is rounded up, as a spent budget is, or down, as what is left.
    """
    return repr(float(Context(prec=9, rounding=ROUND_CEILING if up else ROUND_FLOOR).plus(Decimal(repr(value)))))


def write_digits(value: float, digits: int = 2) -> str:
    """Return a number to so many digits, for people: with thousands apart, and never with an exponent.

    Parameters
    ----------
    value
        The number.
    digits
        How many digits count.
    """
    return f"{Context(prec=digits).create_decimal_from_float(float(value)):,f}"


def round_up_sum(parts: Iterable[float]) -> float:
    """Return the least float that is not below the exact sum of finite floats."""
    return round_up(sum(map(Fraction, parts), Fraction(0)))
