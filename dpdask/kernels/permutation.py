"""Random permutations from raw 64-bit words: the same words give the same permutation with any library version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

MAX_ROWS = 2**32 - 1


@jit
def below(word: np.uint64, n: int) -> np.int64:
    """Return floor(word * n / 2**64), exactly: uniform on 0..n-1 up to a bias of at most n / 2**64; n < 2**32.

    Parameters
    ----------
    word
        A uniform word.
    n
        How many values are possible, below 2**32.
    """
    factor, half = np.uint64(n), np.uint64(32)
    low = np.uint64((word & np.uint64(0xFFFFFFFF)) * factor) >> half
    return np.int64(np.uint64(np.uint64((word >> half) * factor) + low) >> half)


@jit
def permutation(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return a random permutation of 0..n-1 (Fisher-Yates, in Durstenfeld's form), with one word for each element.

    Parameters
    ----------
    words
        uint64 array of shape (n,), independent and uniform; n is at most `MAX_ROWS`.

    Returns
    -------
    uint32 array of shape (n,).
    """
    out = np.arange(len(words)).astype(np.uint32)
    for last in range(len(words) - 1, 0, -1):
        chosen = below(words[last], last + 1)
        out[last], out[chosen] = out[chosen], out[last]
    return out
