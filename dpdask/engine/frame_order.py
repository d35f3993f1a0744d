"""Whether a frame's rows stand in the order of a private value, which their place then gives away whatever the noise."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.frames import Frame
from dpdask.engine.work import TableWork

_FEW_ROWS = 10  # fewer stand in some order by chance


def order_warning(frame: Frame, work: TableWork) -> str | None:
    """Return what to think of before a pandas frame's rows are released in its order, or None; of Dask frames nothing is known.

    Privacy
    -------
    For the steward alone: it names columns, and tells that they are sorted.
    """
    if not isinstance(frame, pd.DataFrame) or len(frame) < _FEW_ROWS:
        return None
    found = [name for name, codec in work.codecs.items() if _in_order(frame[name], codec)]
    if not found:
        return None
    what = "rows are released in the frame's order, and it is sorted by"
    return f"{what} {', '.join(map(repr, found))}: a row's place tells its value; shuffle the rows first, frame.sample(frac=1, ignore_index=True)"


def _in_order(column: pd.Series, codec: Codec) -> bool:
    """Return whether values rise or fall all along, or rows of the same level stand together, and not all are alike."""
    if isinstance(codec, LevelCodec):
        codes, levels = pd.factorize(column)
        n_runs = 1 + int(np.count_nonzero(np.diff(codes)))
        return n_runs > 1 and n_runs == len(levels) + bool((codes < 0).any())
    known = column.dropna()
    if isinstance(known.dtype, pd.CategoricalDtype):
        known = known.astype(known.dtype.categories.dtype)
    return known.nunique() > 1 and bool(known.is_monotonic_increasing or known.is_monotonic_decreasing)
