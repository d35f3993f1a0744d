"""The order of a column's values along a table: whether it is sorted, so that the position of a row reveals its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from numpy.typing import NDArray

Range = tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # contains values, so it must never be printed
class ColumnOrder:
    """Whether the values of neighbouring rows, or the ranges of neighbouring parts, rise or fall; neighbours can be merged in order.

    Attributes
    ----------
    first, last
        The smallest and the largest value of the first and of the last part; a row is a part with one value. None if there is
        no value, or if values both rise and fall, because then they are no longer needed.
    rises, falls
        Whether some part has a value that is larger (smaller) than some value of the part before it.

    Notes
    -----
    Merging is associative, with `identity`, and not commutative: merge in the order of the table.
    """

    first: Range | None = None
    last: Range | None = None
    rises: bool = False
    falls: bool = False

    @classmethod
    def identity(cls) -> Self:
        """Return the order of no rows."""
        return cls()

    @classmethod
    def of_batch(cls, values: NDArray[Any]) -> Self:
        """Return the order of neighbouring rows.

        Parameters
        ----------
        values
            Numbers of shape (n,), without nulls, in the same order as the column's values and equal where these are equal.
        """
        if not len(values):
            return cls()
        first, last = values[0].item(), values[-1].item()
        before, after = values[:-1], values[1:]
        return cls(first=(first, first), last=(last, last), rises=bool((after > before).any()), falls=bool((after < before).any()))._plain()

    @classmethod
    def of_range(cls, low: Any, high: Any) -> Self:
        """Return the order of one part whose values are in [low, high], in unknown order.

        Parameters
        ----------
        low, high
            The least and the greatest value of the part.
        """
        return cls(first=(low, high), last=(low, high))

    def merge(self, *others: Self) -> Self:
        """Return the order of this one's rows followed by the others'."""
        merged = self
        for other in others:
            merged = merged._follow(other)
        return merged

    def _follow(self, other: Self) -> Self:
        if self.is_mixed or (other.first is None and not other.is_mixed):
            return self
        if other.is_mixed or self.last is None or other.first is None:
            return other
        rises, falls = other.first[1] > self.last[0], other.first[0] < self.last[1]
        return type(self)(
            first=self.first, last=other.last, rises=self.rises or other.rises or rises, falls=self.falls or other.falls or falls
        )._plain()

    def _plain(self) -> Self:
        """Return this order without its values if they are no longer needed, so that equal orders compare equal."""
        return type(self)(rises=True, falls=True) if self.is_mixed else self

    @property
    def is_mixed(self) -> bool:
        """Whether values both rise and fall; later rows cannot change that."""
        return self.rises and self.falls

    @property
    def is_sorted(self) -> bool:
        """Whether values rise and never fall, or fall and never rise. A constant column is not sorted: its order reveals nothing."""
        return self.rises != self.falls
