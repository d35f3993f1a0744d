"""Some rows of a column of fixed width without nulls, in less time than Arrow's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit


@jit
def keep_chosen(values: NDArray[np.unsignedinteger], chosen: NDArray[np.bool_], n_chosen: int) -> NDArray[np.unsignedinteger]:
    """Return the values of the chosen rows, in their order.

    Parameters
    ----------
    values
        Array of shape (n,).
    chosen
        bool array of shape (n,).
    n_chosen
        How many rows are chosen.
    """
    out = np.empty(n_chosen + 1, dtype=values.dtype)  # one more: a row that is not chosen is overwritten by the next one
    place = 0
    for row in range(len(values)):
        out[place] = values[row]
        place += chosen[row]
    return out[:n_chosen]


@jit
def take_at(values: NDArray[np.unsignedinteger], places: NDArray[np.uint32]) -> NDArray[np.unsignedinteger]:
    """Return the values at some places, in the order of the places.

    Parameters
    ----------
    values
        Array of shape (n,).
    places
        Array of shape (n_taken,), below n.
    """
    out = np.empty(len(places), dtype=values.dtype)
    for row in range(len(places)):
        out[row] = values[places[row]]
    return out
