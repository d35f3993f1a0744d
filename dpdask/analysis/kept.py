"""Columns that a release of rows kept as they are: their estimates are those of any table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.dates import find_scales
from dpdask.analysis.points import Points
from dpdask.analysis.weighted import OpenedPoints
from dpdask.errors import SpecError

_MOST_LEVELS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class KeptColumns(OpenedPoints):
    """A release of rows: its kept columns are exact, and their errors are those of drawing the rows."""

    def _is_kept(self, *names: str) -> bool:
        return all(self._column(name)["role"] == "kept" for name in names)

    def _points(self, *names: str) -> Points:
        frame = self.to_pandas(names)
        with read_as_python(*names):
            levels, dates = {name: levels for name in names if (levels := _list_values(frame[name])) is not None}, find_scales(frame)
        return Points(
            frame=frame,
            weights=np.ones(len(frame)),
            n_rows=float(self.n_rows),
            sampling=1.0 / self.n_rows,
            levels=levels,
            limits=self._limits_of_units(),
            dates=dates,
        )

    def _limits_of_units(self) -> tuple[str, ...]:
        unit = self.content["guarantee"]["unit"]
        return (f"rows that share a {unit['column']!r} are taken to be independent",) if isinstance(unit, dict) else ()

    def _answers(self, name: str) -> set[str]:
        type_ = self._types.field(name).type if name in self._types.names else pa.null()
        numbers = pa.types.is_integer(type_) or pa.types.is_floating(type_)
        own = {"mean", "histogram", "quantile"} if numbers or pa.types.is_date(type_) or pa.types.is_timestamp(type_) else set()
        return {"share", "crosstab"} | own | ({"slope"} if numbers else set())


@contextmanager
def read_as_python(*names: str) -> Iterator[None]:
    """Refuse kept columns whose values, such as dates after the year 9999, Python cannot hold."""
    try:
        yield
    except (pa.ArrowException, NotImplementedError, OverflowError):
        what = "holds values that Python cannot hold, so no question about it is answered"
        raise SpecError(what, f"column {' or '.join(map(repr, names))}", "use to_pandas(), and convert it") from None


def _list_values(column: pd.Series) -> Sequence[object] | None:
    """Return the different values of a kept column; None if there are too many."""
    found = column.unique()
    if len(found) > _MOST_LEVELS:
        return None
    values = sorted(found[pd.notna(found)].tolist())
    return [*([None] if column.hasnans else []), *values]
