"""A reference distribution: probabilities of levels, or the knots of a continualised cdf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.errors import DataError, SpecError
from dpdask.kernels import ecdf
from dpdask.stats.levels import LevelCounts
from dpdask.stats.ranks import MAX_KNOTS, MAX_RANK_ERROR, RankSummary

MARGINS = "margins: each column's own distribution, and nothing of how they depend on each other"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LevelDistribution:
    """The probability of each level: float64 array of shape (n_levels,), summing to 1, zeros allowed."""

    probabilities: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RankDistribution:
    """A continualised cdf.

    Attributes
    ----------
    x, c
        float64 arrays of one length, at most 2**16 + 2 * atoms + 1, both non-decreasing: the cdf is linear between the
        knots and jumps where x repeats. c runs from the probability of null to 1.
    rank_error
        By how much the cdf may differ from that of the rows it was made of.
    kept
        Of noisy counts, where rows may be and how many the counts put beyond, as a card has it: `Hierarchy.tell_kept`.
    """

    x: NDArray[np.float64]
    c: NDArray[np.float64]
    rank_error: float
    kept: Mapping[str, Any] = field(default_factory=dict)


Distribution = LevelDistribution | RankDistribution


def from_statistic(codec: Codec, statistic: LevelCounts | RankSummary) -> Distribution:
    """Return the empirical distribution of the rows that a statistic was made of (Bi & Shen (3), (7)).

    Parameters
    ----------
    codec
        The column's codec.
    statistic
        The counts or the rank summary of its rows.

    Raises
    ------
    DataError
        If it stands for fewer than 2 rows, or for no row that is not null.
    """
    where = f"column {codec.name!r}"
    if statistic.n_rows < 2:
        raise DataError("the reference has fewer than 2 rows", where, "enlarge the hold-out's fraction, or the table it comes from")
    if isinstance(statistic, LevelCounts):
        return LevelDistribution(statistic.counts / statistic.n_rows)
    assert isinstance(codec, ValueCodec)
    if statistic.n_nulls == statistic.n_rows:
        raise DataError("every row of the reference is null", where, "give the column the role drop")
    summary = statistic.compress(MAX_KNOTS)
    error = summary.error / summary.n_rows
    if error > MAX_RANK_ERROR:
        raise DataError("the reference's rank error is above 2**-15", where, "merge the input into fewer, larger fragments")
    weights, atom_weights = summary.weights.astype(np.float64), summary.atom_counts.astype(np.float64)
    return make_continuous(codec, summary.values, weights, atom_weights, float(summary.n_nulls), error)


def make_continuous(
    codec: ValueCodec,
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    atom_weights: NDArray[np.float64],
    null_weight: float,
    rank_error: float,
) -> RankDistribution:
    """Return the continualised cdf of a weighted sample, its atoms, and its nulls, in one scale of ranks.

    Parameters
    ----------
    codec
        The column's codec.
    values
        float64 array of shape (n,), increasing: the sample's values that are not atoms.
    weights
        float64 array of shape (n,): their weights.
    atom_weights
        The weight of each atom of the codec.
    null_weight
        The weight of nulls.
    rank_error
        The largest error of a rank.
    """
    total = weights.sum() + atom_weights.sum() + null_weight
    start = codec.bounds[0] if codec.bounds else None
    atoms = np.array(codec.atoms, dtype=np.float64)
    x, c = ecdf.continualise(values, weights, atoms, atom_weights, start, 1.0 if codec.lattice else None)
    null = null_weight / total
    return RankDistribution(x, np.append(null + (1.0 - null) * c[:-1], 1.0), rank_error)


def check_levels(codec: LevelCodec, probabilities: NDArray[np.float64]) -> LevelDistribution:
    """Return declared probabilities as a distribution, rescaled to sum to 1 exactly.

    Parameters
    ----------
    codec
        The column's codec.
    probabilities
        One probability per level.

    Raises
    ------
    SpecError
        If there is not one per level, one is negative or not finite, or they do not sum to 1 within 1e-6.
    """
    where, hint = f"column {codec.name!r}", "correct the job's reference"
    if len(probabilities) != codec.n_levels:
        raise SpecError("there must be one probability per level (null first, when null is a level)", where, hint)
    if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > 1e-6:
        raise SpecError("the probabilities must be non-negative and sum to 1", where, hint)
    return LevelDistribution(probabilities / probabilities.sum())
