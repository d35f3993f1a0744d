"""Sums and shares of ε and δ in exact arithmetic, rounded against the releaser at the very end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Literal


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
    up
        Whether it is rounded up, as a spent budget is, or down, as what is left.
    """
    return repr(
        float(
            Context(prec=9, rounding=ROUND_CEILING if up else ROUND_FLOOR).plus(
                Decimal(repr(value))
            )
        )
    )


def write_digits(value: float, digits: int = 2) -> str:
    """Return a number to so many digits, for people: with thousands apart, and never with an exponent."""
    return f"{Context(prec=digits).create_decimal_from_float(float(value)):,f}"


def round_up_sum(parts: Iterable[float]) -> float:
    """Return the least float that is not below the exact sum of finite floats."""
    return round_up(sum(map(Fraction, parts), Fraction(0)))


RowOrder = Literal["shuffled", "keep"]

_KEPT = (
    "rows keep the order of the input, which is published: if the input is sorted by a private column, the position of a row reveals "
    "roughly what its value was, whatever the noise, and no ε covers that"
)
_SHUFFLED = (
    "rows are shuffled: the rows of one shard come from neighbouring fragments of the input (files or row groups), in random order "
    "(in parts of 128 MiB, if they are larger), and the shards are numbered at random; a shard's size can reveal that it holds the end of "
    "the input, and the release reveals which rows were in the same part of the input: if the input is sorted by a private column, such "
    "rows had similar values, their released values together reveal roughly which, whatever the noise of each, and no ε covers that"
)


def order_text(order: RowOrder) -> str:
    """Return what a release card says about the order of its rows."""
    return _KEPT if order == "keep" else _SHUFFLED


def describe_published(order: RowOrder) -> str:
    """Return what is published besides the private columns, as a sentence without its full stop."""
    if order == "keep":
        return "The kept columns, the number and the order of the rows, and the presence of each row are published as they are"
    shuffled = "rows are shuffled, but the rows of one shard were close together in the input"
    return f"The kept columns, the number of rows and the presence of each row are published as they are; {shuffled}"
