"""The hold-out split: which rows shape the reference and are not released."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.streams import Rng, words

HOLDOUT_ID = "holdout"


def holdout_mask(rng: Rng, n_rows: int, fraction: float) -> NDArray[np.bool_]:
    """Return which of the next `n_rows` rows are held out, each with probability `fraction`, independently.

    Parameters
    ----------
    rng
        The fragment's stream of mechanism `holdout`; row r of the fragment owns its r-th word, so the split depends
        on the run key, the fragment and the position in it, and on nothing else.
    n_rows
        How many rows come next.
    fraction
        In (0, 1).

    Returns
    -------
    bool array of shape (n_rows,).
    """
    return words(rng, n_rows) < np.uint64(int(fraction * 2**64))
