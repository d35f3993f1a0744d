"""The channel of distribution-invariant privatisation as published: Laplace noise on ranks, in closed form on levels."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels import channel as kernel
from dpdask.kernels.jit import Floats, Words

_BISECTIONS = 45
_LEAST_SCALE = 1e-3  # below it the noise vanishes for every ε that a budget allows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelChannel:
    """A row-stochastic matrix on levels, held in whole numbers."""

    # Uint64 array of shape (s, s): Pr(output j | input k) = weights[k, j] / 2**63, exactly as it is
    # sampled.
    weights: Words
    epsilon: float  # Ε*, the channel's exact privacy loss under replace-one, rounded up

    @property
    def matrix(self) -> Floats:
        """The channel as probabilities, float64 array of shape (s, s)."""
        return self.weights.astype(np.float64) / 2.0**kernel.TOTAL_BITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Margins:
    """The distributions of a channel's input and output, on the levels that have positive probability."""

    n_levels: int  # how many levels there are in all
    rows: NDArray[np.intp]  # the levels that go in and come out, increasing; indices among all
    columns: NDArray[np.intp]
    source: Floats  # float64 arrays, their probabilities, each summing to 1
    target: Floats

    @classmethod
    def of(cls, probabilities: Floats, target: Floats | None) -> Self:
        """Return both margins; without a target they are equal."""
        rows, source = _seen(probabilities)
        columns, wanted = (rows, source) if target is None else _seen(target)
        return cls(
            n_levels=len(probabilities), rows=rows, columns=columns, source=source, target=wanted
        )


def _seen(probabilities: Floats) -> tuple[NDArray[np.intp], Floats]:
    seen = np.flatnonzero(probabilities > kernel.UNSEEN)
    return seen, probabilities[seen] / probabilities[seen].sum()


def laplace(
    probabilities: Floats,
    epsilon: float,
    *,
    ordered: bool,
    target: Floats | None = None,
) -> LevelChannel:
    """Return the channel of Laplace noise with scale 1/epsilon on ranks.

    Parameters
    ----------
    probabilities
        The distribution P of the level that goes in, float64 array of shape (s,), summing to 1;
        zeros are levels that were never seen.
    ordered
        Whether the levels have an order. If not, the paper's mechanism has none either: it then
        works on the order in which the levels are declared, which keeps the privacy and the
        invariance but makes that order matter.
    target
        The distribution Q that the released level is to have, float64 array of shape (s,), summing
        to 1; P if not given, and the channel then leaves the reference as it is.

    Privacy
    -------
    Unit: one value. Adjacency: replace-one. ε* is computed from the whole-number weights that are
    sampled, and holds whatever the distribution of the input is.

    Notes
    -----
    A level that P never saw takes the row of the nearest seen one (ordered; the lower of two) or Q
    itself (categorical). Both are rows that already satisfy ε, so ε* does not change.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, equations (3)-(4), as one closed-form
    channel; with a target, ranks under P are read through the quantiles of Q, as the text around
    (2) does from one conditional distribution to another.
    """
    margins = Margins.of(probabilities, target)
    weights = kernel.repair_weights(
        kernel.laplace_channel(margins.source, 1.0 / epsilon, margins.target),
        margins.target,
        epsilon,
    )
    return spread_over_unseen(weights, margins, epsilon, ordered=ordered)


def calibrate(
    probabilities: Floats,
    epsilon: float,
    *,
    ordered: bool,
    target: Floats | None = None,
) -> LevelChannel:
    """Return the channel of Laplace noise on ranks whose scale is as small as ε allows.

    With few levels, the published scale 1/ε leaves part of ε unspent: ε* is 0.92 ε on half-star
    ratings and 0.43 ε on a fair coin at ε = 1. Here the scale is bisected until ε* reaches ε, and
    never passes it.

    See `laplace` for the parameters, the result and the privacy.
    """
    margins = Margins.of(probabilities, target)
    weights = find_scale(margins.source.tobytes(), margins.target.tobytes(), float(epsilon))
    return spread_over_unseen(weights, margins, epsilon, ordered=ordered)


@lru_cache(maxsize=64)
def find_scale(source_bytes: bytes, target_bytes: bytes, epsilon: float) -> Words:
    """Return the weights of the calibrated channel, which has the least scale.

    Parameters
    ----------
    source_bytes, target_bytes
        The bytes of both float64 margins, by which it is remembered.
    """
    source, target = np.frombuffer(source_bytes), np.frombuffer(target_bytes)
    low, high = min(_LEAST_SCALE, 1.0 / epsilon), 1.0 / epsilon  # ε* is not above ε at high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        weights = kernel.integer_weights(kernel.laplace_channel(source, middle, target))
        low, high = (low, middle) if kernel.is_private(weights, epsilon) else (middle, high)
    return kernel.repair_weights(kernel.laplace_channel(source, high, target), target, epsilon)


def spread_over_unseen(
    small: Words, margins: Margins, epsilon: float, *, ordered: bool
) -> LevelChannel:
    """Return the channel on all levels, from a channel on the levels of the margins; see the notes of `laplace`.

    Parameters
    ----------
    ordered
        Whether a level that was never seen takes the nearest seen level's row; otherwise it takes
        Q.
    """
    n_levels = margins.n_levels
    weights = np.zeros((n_levels, n_levels), dtype=np.uint64)
    nearest = np.abs(np.arange(n_levels)[:, None] - margins.rows[None, :]).argmin(axis=1)
    rows = small[nearest]
    if not ordered:
        unseen = np.setdiff1d(np.arange(n_levels), margins.rows)
        rows[unseen] = kernel.integer_weights(margins.target[None, :])
    weights[:, margins.columns] = rows
    bound = kernel.exact_epsilon(weights)
    # the target's own row, rounded, may stand a unit outside the others'
    if bound > Decimal(epsilon):
        weights[:, margins.columns] = small[nearest]
        bound = kernel.exact_epsilon(weights)
    return LevelChannel(
        weights=weights, epsilon=min(np.nextafter(float(bound), np.inf), epsilon) if bound else 0.0
    )
