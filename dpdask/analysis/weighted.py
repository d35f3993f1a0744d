"""What releases of records, cells and tables have in common: their estimates are weighted averages of points."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.opened import OpenedRelease, check_no_groups, check_one, check_probabilities
from dpdask.analysis.points import Points
from dpdask.analysis.result import Result
from dpdask.errors import SpecError


def check_features(question: str, response: str, features: Sequence[str]) -> None:
    """Check the columns of a regression.

    Parameters
    ----------
    question
        Where the check is made, for messages.
    response, features
        The columns.

    Raises
    ------
    SpecError
        If there is no feature, or a column is named twice.
    """
    if not features:
        raise SpecError("a regression needs a column that explains", question, "name one or more after the response")
    check_distinct(question, [response, *features])


def check_distinct(question: str, names: Sequence[str]) -> None:
    """Check that no column is named twice, and each by itself.

    Parameters
    ----------
    question
        Where the check is made, for messages.
    names
        The columns.

    Raises
    ------
    SpecError
        If one is, or a list stands for one.
    """
    for name in names:
        check_one(name, question)
    if len(set(names)) < len(names):
        raise SpecError("a column is named twice", question, "name each column once")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedPoints(OpenedRelease):
    """A release whose estimates are weighted averages."""

    @abstractmethod
    def _points(self, *names: str) -> Points:
        """Return the points of some columns."""

    def mean(self, column: str, *, by: str | None = None, values: Sequence[float] | None = None) -> Result:
        """Return the mean of a column; see `OpenedRelease.mean`."""
        names = [column] if by is None else [column, by]
        check_distinct("mean", names)
        return self._points(*names).mean(column, by, self._level_values(column, values))

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a column; see `OpenedRelease.share`."""
        check_no_groups("share", column, by)
        return self._points(column).share(column)

    def histogram(self, column: str, bins: int | Sequence[float] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers; see `OpenedRelease.histogram`."""
        points = self._points(column)
        return points.histogram(column, self._edges(column, bins, points.dates.get(column)))

    def quantile(self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None) -> Result:
        """Return a quantile of a column of numbers, or several; see `OpenedRelease.quantile`."""
        check_no_groups("quantile", column, by)
        probabilities, points = check_probabilities(q), self._points(column)
        found = [points.quantile(column, each) for each in probabilities]
        return found[0] if np.ndim(q) == 0 else Result.gather(found, pd.Index(probabilities, name="q"))

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels; see `OpenedRelease.crosstab`."""
        check_distinct("crosstab", [first, second])
        return self._points(first, second).crosstab(first, second)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression; see `OpenedRelease.slope`."""
        check_features("slope", response, features)
        return self._points(response, *features).slope(response, features)

    def _answers(self, name: str) -> set[str]:
        partners, levels = self._partners(name), self._levels(name)
        found = set() if levels is None else {"share", *(["crosstab"] if any(self._levels(other) is not None for other in partners) else [])}
        if levels is not None and not self._has_numbers(name):
            return found
        explained = self._may_explain(name) and any(self._may_explain(other) for other in partners)
        return found | {"mean", "histogram", "quantile"} | ({"slope"} if explained else set())

    def _may_explain(self, name: str) -> bool:
        """Return whether a column has numbers that a slope can be made of."""
        return not self._is_of_dates(name) if self._levels(name) is None else self._has_numbers(name)

    def _has_numbers(self, name: str) -> bool:
        """Return whether a column's levels are numbers, and no mere codes."""
        levels = self._levels(name) or ()
        return self._column(name).get("kind") != "categorical" and all(isinstance(level, int | float) for level in levels if level is not None)

    def _is_of_dates(self, name: str) -> bool:
        """Return whether a column without levels holds dates, as its first shard says."""
        return name in self._types.names and pa.types.is_temporal(self._types.field(name).type)

    def _level_map(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
        return {name: levels for name in names if (levels := self._levels(name)) is not None}

    def _bounds(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        return {name: (float(bounds[0]), float(bounds[1])) for name in names if (bounds := self._column(name).get("bounds"))}
