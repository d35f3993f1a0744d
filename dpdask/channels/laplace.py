"""The channel of distribution-invariant privatisation as published: Laplace noise on ranks, in closed form on levels."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import channel as kernel

_BISECTIONS = 45
_LEAST_SCALE = 1e-3  # below it nothing is left of the noise for any ε that a budget allows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelChannel:
    """A row-stochastic matrix on levels, held in whole numbers.

    Attributes
    ----------
    weights
        uint64 array of shape (s, s): Pr(output j | input k) = weights[k, j] / 2**63, exactly what is sampled.
    epsilon
        ε*, the channel's exact privacy loss under replace-one, rounded up.
    """

    weights: NDArray[np.uint64]
    epsilon: float

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The channel as probabilities, float64 array of shape (s, s)."""
        return self.weights.astype(np.float64) / 2.0**kernel.TOTAL_BITS


def laplace(probabilities: NDArray[np.float64], epsilon: float, *, ordered: bool) -> LevelChannel:
    """Return the channel of Laplace noise with scale 1/epsilon on ranks.

    Parameters
    ----------
    probabilities
        The reference, float64 array of shape (s,), summing to 1; zeros are levels that the reference never saw.
    epsilon
        Privacy parameter, positive and finite.
    ordered
        Whether the levels have an order. If not, the paper's mechanism has none either: it then works on the order in
        which the levels are declared, which keeps the privacy and the invariance but makes that order matter.

    Returns
    -------
    LevelChannel
        With P·T = P and ε* <= epsilon.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. ε* is computed from the whole-number weights that are sampled.

    Notes
    -----
    A level that the reference never saw takes the row of the nearest seen one (ordered; the lower of two) or the
    reference itself (categorical). Both are rows that already satisfy ε, so ε* does not change.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, equations (3)-(4), as one closed-form channel.
    """
    seen = np.flatnonzero(probabilities > kernel.UNSEEN)
    reference = probabilities[seen] / probabilities[seen].sum()
    weights = kernel.repaired_weights(kernel.laplace_channel(reference, 1.0 / epsilon), reference, epsilon)
    return spread_over_unseen(weights, reference, seen, len(probabilities), epsilon, ordered=ordered)


def calibrated(probabilities: NDArray[np.float64], epsilon: float, *, ordered: bool) -> LevelChannel:
    """Return the channel of Laplace noise on ranks whose scale is as small as ε allows.

    The published scale 1/ε leaves part of ε unspent on few levels: ε* is 0.92 ε on half-star ratings and 0.43 ε on a
    fair coin at ε = 1. Here the scale is bisected until ε* reaches ε, and never passes it.

    Parameters, returns and privacy are those of `laplace`.
    """
    seen = np.flatnonzero(probabilities > kernel.UNSEEN)
    reference = probabilities[seen] / probabilities[seen].sum()
    low, high = min(_LEAST_SCALE, 1.0 / epsilon), 1.0 / epsilon  # ε* is not above ε at high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        spent = kernel.exact_epsilon(kernel.integer_weights(kernel.laplace_channel(reference, middle)))
        low, high = (low, middle) if spent <= Decimal(epsilon) else (middle, high)
    weights = kernel.repaired_weights(kernel.laplace_channel(reference, high), reference, epsilon)
    return spread_over_unseen(weights, reference, seen, len(probabilities), epsilon, ordered=ordered)


def spread_over_unseen(
    small: NDArray[np.uint64], reference: NDArray[np.float64], seen: NDArray[np.intp], n_levels: int, epsilon: float, *, ordered: bool
) -> LevelChannel:
    """Return a channel on all levels from one on those that the reference saw, as the notes of `laplace` say."""
    weights = np.zeros((n_levels, n_levels), dtype=np.uint64)
    nearest = np.abs(np.arange(n_levels)[:, None] - seen[None, :]).argmin(axis=1)
    rows = small[nearest]
    if not ordered:
        unseen = np.setdiff1d(np.arange(n_levels), seen)
        rows[unseen] = kernel.integer_weights(reference[None, :])
    weights[:, seen] = rows
    bound = kernel.exact_epsilon(weights)
    if bound > Decimal(epsilon):  # the reference's own row, rounded, may stand a unit outside the others'
        weights[:, seen] = small[nearest]
        bound = kernel.exact_epsilon(weights)
    return LevelChannel(weights=weights, epsilon=min(np.nextafter(float(bound), np.inf), epsilon) if bound else 0.0)
