"""Check whether a frame's rows are sorted by a private column: the position of a row then reveals its value, whatever the noise."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.source import Frame
from dpdask.engine.work import TableWork

_FEW_ROWS = 10  # fewer rows are sorted by chance


def find_order_warning(frame: Frame, work: TableWork) -> str | None:
    """Return a warning if a pandas frame is sorted by a private column, else None; Dask frames are not checked.

    Parameters
    ----------
    frame
        The frame that is released.
    work
        The work on it.

    Privacy
    -------
    For the steward only: the warning names columns and says that they are sorted.
    """
    if not isinstance(frame, pd.DataFrame) or len(frame) < _FEW_ROWS:
        return None
    found = [name for name, codec in work.codecs.items() if _in_order(frame[name], codec)]
    if not found:
        return None
    what = "rows keep the order of the frame, which is sorted by"
    return (
        f"{what} {', '.join(map(repr, found))}: a row's position reveals its value; shuffle the rows first, frame.sample(frac=1, ignore_index=True)"
    )


def _in_order(column: pd.Series, codec: Codec) -> bool:
    """Return whether a column is sorted (for levels: whether equal levels are contiguous); False if all its values are equal."""
    if isinstance(codec, LevelCodec):
        codes, levels = pd.factorize(column)
        n_runs = 1 + int(np.count_nonzero(np.diff(codes)))
        return n_runs > 1 and n_runs == len(levels) + bool((codes < 0).any())
    known = column.dropna()
    if isinstance(known.dtype, pd.CategoricalDtype):
        known = known.astype(known.dtype.categories.dtype)
    return known.nunique() > 1 and bool(known.is_monotonic_increasing or known.is_monotonic_decreasing)
