"""The Gaussian copula as its paper has it, each dummy with a threshold of its own, and answers beside it. CONFIDENTIAL but for `dpc`.

`pipelines/adult/compare.py` compares ours with them. `cop`, `cop_id`, `cop_one` and the answers of independent attributes read private rows without noise, and the
noise of `laplace_answers` is floating-point noise from an ordinary generator, which protects nobody. Dummies are a uint8 matrix of
shape (Σ s_a, n), one row for each level of each attribute in the order of `pipelines.papers.asghar_utility`. A column of it need not
be a record: nothing keeps an attribute from having two levels, or none.

References
----------
Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
Gaussian copula (2019), sections 3 and 4.3, table 1: "cop", "cop-ID", "cop-1", "dpc", "Lap" and "no-cor".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.special import ndtri

from dpdask.kernels import correlation as correlation_kernel
from dpdask.kernels import normal as normal_kernel
from dpdask.kernels.correlation import pack, room_for
from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula.model import draw_latents
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals
from dpdask.privacy.events import Adjacency, DiscreteLaplace
from dpdask.privacy.noise import laplace_scale
from pipelines.papers.asghar_utility import (
    Answers,
    Codes,
    Counts,
    Floats,
    check_queries,
    one_way_counts,
    three_way_counts,
    two_way_counts,
)

Dummies = NDArray[np.uint8]

_FLOOR = 1e-6  # the paper's "small positive values" for eigenvalues of zero
_TOLERANCE = 1e-3  # of a wanted count, in rows
_EXACT_ROWS = 1 << 16  # sums of so many zeros and ones are exact in float32


def cop(codes: Codes, sizes: Sequence[int], *, rng: Generator) -> Dummies:
    """Return dummies of the Gaussian copula with the rows' exact means and correlations (cop); confidential: reads private rows, without noise.

    Two levels of one attribute never meet, and their latent correlation is the one that says so.

    Parameters
    ----------
    codes
        Integer array of shape (m, n): row a holds the codes 0 .. s_a - 1 of attribute a.
    sizes
        How many levels each attribute has, s_1 .. s_m.
    rng
        Draws the latent variables.

    Returns
    -------
    uint8 array of shape (Σ s_a, n).

    Raises
    ------
    ValueError
        If the table is not such a matrix, or a code is outside its attribute's levels.
    """
    n = codes.shape[-1]
    means, meets = one_way_counts(codes, sizes) / n, two_way_counts(codes, sizes) / n
    return _drawn(means, meets, sizes, n, rng)


def cop_id(codes: Codes, sizes: Sequence[int], *, rng: Generator) -> Dummies:
    """Return dummies with the rows' exact means and no correlation at all (cop-ID); confidential: reads private rows, without noise.

    The parameters, the result and the errors are those of `cop`.
    """
    means = one_way_counts(codes, sizes) / codes.shape[-1]
    return _thresholded(np.eye(len(means)), means, codes.shape[-1], rng)


def cop_one(codes: Codes, sizes: Sequence[int], *, rng: Generator) -> Dummies:
    """Return dummies with the rows' exact means and all correlations 1 (cop-1); confidential: reads private rows, without noise.

    One latent variable decides all dummies of a row. The parameters, the result and the errors are those of `cop`.
    """
    means = one_way_counts(codes, sizes) / codes.shape[-1]
    factor = np.zeros((len(means), len(means)))
    factor[:, 0] = 1.0  # the Cholesky factor of a matrix of ones
    return _thresholded(factor, means, codes.shape[-1], rng)


def dpc(noisy: NoisyMarginals, *, rng: Generator) -> Dummies:
    """Return dummies of the paper's own private recipe (dpc); as private as the tables are, not confidential.

    Parameters
    ----------
    noisy
        All one-way and two-way tables, with the noise of `paper_noise`.
    rng
        Draws the latent variables.

    Returns
    -------
    uint8 array of shape (Σ s_a, n'): n' is the number of rows, which replace-one makes public, or under add-remove what the
    noisy tables say.

    Privacy
    -------
    Unit: a row. Protected: every row. Sensitivity (L1) of each of the m + m (m - 1) / 2 tables: 2 under replace-one, 1 under
    add-remove. Event: `paper_noise`. Everything else is post-processing.

    Notes
    -----
    Algorithms 1 and 2: negative counts become 0; two-way frequencies are clipped to the Fréchet bounds of the noisy means.
    Algorithm 1 adds noise to a dummy's zeros too, so that its mean stays below 1. Here they are the number of rows less
    the noisy ones, because noise of their own costs more than the paper says: see `paper_noise`.
    """
    n = max(1, round(noisy.n_rows))
    means = np.clip(noisy.one_way / noisy.n_rows, 0.0, 1.0)
    meets = np.maximum(noisy.pairs / noisy.n_rows, 0.0)
    return _drawn(means, meets, noisy.domain.sizes, n, rng)


def paper_noise(
    n_attributes: int, *, epsilon: float, delta: float, adjacency: Adjacency
) -> MarginalNoise:
    """Return the paper's noise for an adjacency, Laplace of one scale on every one- and two-way table; depends on no data, not confidential.

    Parameters
    ----------
    n_attributes
        How many attributes there are, m.
    epsilon, delta, adjacency
        The target of advanced composition, both positive, δ below 1; and what the noise is calibrated for.

    Raises
    ------
    ValueError
        As of `table_epsilon`.

    Notes
    -----
    Each of k = m + m (m - 1) / 2 tables gets the ε' of `table_epsilon`. A row that is there or not changes one cell of a
    table, so that noise of scale 1/ε' is enough; a row with other values changes two, the L1 sensitivity is 2 and the scale
    2/ε'. Noise of scale 1/ε' read as replace-one would cost 2ε' a table, and twice the stated ε and more.

    The paper calls databases neighbours when they differ in one row. The noise in its results is of scale 2/ε', this
    function's for replace-one: of 16,867 two-way counts, mostly 0, its Laplace answers miss 95 % by at most 317 and 99 % by
    at most 536 (table 2), where scale 2/ε' = 135 gives 312 and 529, and 1/ε' half of that. What its accounting leaves out is
    the noise on the zeros of every dummy (algorithm 1): published with those of the ones, they cost 2ε' for each one-way
    table under replace-one, and under add-remove half an ε' for each of the attribute's levels.
    """
    n_pairs = n_attributes * (n_attributes - 1) // 2
    sensitivity = 2 if adjacency == "replace-one" else 1
    scale = laplace_scale(
        sensitivity, table_epsilon(n_attributes + n_pairs, epsilon=epsilon, delta=delta)
    )
    one_way = DiscreteLaplace(
        scale=scale, sensitivity=sensitivity, adjacency=adjacency, count=n_attributes
    )
    pairs = (
        DiscreteLaplace(scale=scale, sensitivity=sensitivity, adjacency=adjacency, count=n_pairs)
        if n_pairs
        else None
    )
    return MarginalNoise(one_way=one_way, pairs=pairs, cliques={})


def table_epsilon(n_tables: int, *, epsilon: float, delta: float) -> float:
    """Return the largest ε' at which n_tables ε'-private tables are (ε, δ)-private by advanced composition; no data, not confidential.

    Parameters
    ----------
    n_tables
        At least 1.
    epsilon, delta
        Positive and finite; δ below 1.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    ε = ε' √(2k log(1/δ)) + k ε' (exp(ε') - 1), by bisection, rounded down. Basic composition, k ε' = ε, is the better of
    the two for few tables, but not what the paper took.

    References
    ----------
    Dwork, Rothblum and Vadhan, Boosting and differential privacy (2010); theorem 3 of the paper.
    """
    if n_tables < 1 or not 0 < epsilon < math.inf or not 0 < delta < 1:
        raise ValueError(
            "advanced composition needs a table, a positive and finite epsilon, and a delta between 0 and 1"
        )
    low, high = 0.0, min(epsilon, 700.0) / math.sqrt(2 * n_tables * -math.log(delta))
    for _ in range(200):
        middle = (low + high) / 2
        cost = middle * math.sqrt(2 * n_tables * -math.log(delta)) + n_tables * middle * math.expm1(
            middle
        )
        low, high = (middle, high) if cost <= epsilon else (low, middle)
    return low


def laplace_answers(
    true_counts: Counts, *, scale: float, clip: bool = True, rng: Generator
) -> Floats:
    """Return counts with independent Laplace noise (Lap), for a comparison only: they stay confidential.

    Parameters
    ----------
    true_counts
        Integer array of any shape.
    scale
        The noise's scale, its mean absolute value, in rows; positive and finite. The caller knows the privacy it stands
        for: a table at ε needs 1/ε if neighbours differ by one row more, 2/ε if one row is replaced.
    clip
        Whether negative answers become 0, as in the paper (its algorithms 1 and 2).
    rng
        Draws the noise.

    Returns
    -------
    float64 array of the counts' shape.

    Raises
    ------
    ValueError
        If the scale is not positive and finite.
    """
    if not 0 < scale < math.inf:
        raise ValueError("Laplace noise needs a positive, finite scale")
    noisy: Floats = true_counts + rng.laplace(scale=scale, size=true_counts.shape)
    return np.maximum(noisy, 0.0) if clip else noisy


def independent_two_way(codes: Codes, sizes: Sequence[int]) -> Floats:
    """Return the two-way counts if attributes were independent (no-cor), in the order of `two_way_counts`; confidential: reads private rows.

    Parameters
    ----------
    codes
        Integer array of shape (m, n): row a holds the codes 0 .. s_a - 1 of attribute a.
    sizes
        How many levels each attribute has, s_1 .. s_m.

    Returns
    -------
    float64 array of shape (Σ_{a<b} s_a s_b,): n times the product of the two frequencies.

    Raises
    ------
    ValueError
        If the table is not such a matrix, or a code is outside its attribute's levels.
    """
    frequencies = np.split(one_way_counts(codes, sizes) / codes.shape[1], np.cumsum(sizes)[:-1])
    tables = [np.outer(first, second).ravel() for first, second in combinations(frequencies, 2)]
    answers: Floats = np.concatenate([np.zeros(0), *tables]) * codes.shape[1]
    return answers


def independent_three_way(codes: Codes, sizes: Sequence[int], queries: Counts) -> Floats:
    """Return the counts of three-way conjunctions if attributes were independent (no-cor); confidential: reads private rows.

    Parameters
    ----------
    codes, sizes
        As of `independent_two_way`.
    queries
        int64 array of shape (q, 3): dummies, as `three_way_queries` draws them.

    Returns
    -------
    float64 array of shape (q,): n times the product of the three frequencies.

    Raises
    ------
    ValueError
        As of `independent_two_way` and of `check_queries`.
    """
    check_queries(queries, sizes)
    frequencies = one_way_counts(codes, sizes) / codes.shape[1]
    answers: Floats = frequencies[queries].prod(axis=1) * codes.shape[1]
    return answers


def dummy_answers(dummies: Dummies, sizes: Sequence[int], queries: Counts) -> Answers:
    """Return the one-, two- and three-way conjunction counts of dummies; confidential if the dummies are.

    Parameters
    ----------
    dummies
        uint8 array of zeros and ones, shape (Σ s_a, n), n >= 1.
    sizes
        How many levels each attribute has, s_1 .. s_m.
    queries
        As of `three_way_counts`; none if there are fewer than three attributes.

    Returns
    -------
    Answers
        In the orders of `one_way_counts`, `two_way_counts` and the queries.

    Raises
    ------
    ValueError
        If the dummies are not such a matrix, or as of `check_queries`.
    """
    _check_dummies(dummies, sizes)
    if len(queries):
        check_queries(queries, sizes)
    together = np.zeros((len(dummies), len(dummies)), dtype=np.int64)
    for start in range(0, dummies.shape[1], _EXACT_ROWS):
        block = dummies[:, start : start + _EXACT_ROWS].astype(np.float32)
        together += (block @ block.T).astype(np.int64)
    rows, columns = _pair_cells(sizes)
    # each dummy is an attribute of its own, of two levels: its one is dummy 2i + 1
    three_way = (
        three_way_counts(dummies, (2,) * len(dummies), 2 * queries + 1)
        if len(queries)
        else np.zeros(0, dtype=np.int64)
    )
    return Answers(
        n_rows=dummies.shape[1],
        one_way=np.diagonal(together),
        two_way=together[rows, columns],
        three_way=three_way,
    )


def valid_share(dummies: Dummies, sizes: Sequence[int]) -> float:
    """Return the share of rows that are records, with exactly one level of every attribute; confidential if the dummies are.

    The parameters and errors are those of `dummy_answers`.
    """
    _check_dummies(dummies, sizes)
    chosen = np.add.reduceat(dummies, np.cumsum([0, *sizes])[:-1], axis=0, dtype=np.int64)
    return float((chosen == 1).all(axis=0).mean())


def _check_dummies(dummies: Dummies, sizes: Sequence[int]) -> None:
    if (
        dummies.ndim != 2
        or dummies.dtype != np.uint8
        or not dummies.shape[1]
        or any(size < 1 for size in sizes)
    ):
        raise ValueError(
            "dummies are a uint8 matrix of shape (dummies, rows), with at least one row, of attributes that have levels"
        )
    if len(dummies) != sum(sizes) or dummies.max(initial=0) > 1:
        raise ValueError("there is one dummy for each level of each attribute, zero or one")


def _pair_cells(
    sizes: Sequence[int], *, within: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the two dummies of each two-way cell, in the order of `two_way_counts`; or of all pairs within attributes."""
    starts = np.cumsum([0, *sizes])
    spans = [np.arange(starts[a], starts[a + 1]) for a in range(len(sizes))]
    grids = [np.zeros((2, 0), dtype=np.int64)]
    for a, span in enumerate(spans):
        if within:
            grids.append(span[np.stack(np.triu_indices(len(span), k=1))])
        else:
            grids += [
                np.stack(np.meshgrid(span, other, indexing="ij")).reshape(2, -1)
                for other in spans[a + 1 :]
            ]
    rows, columns = np.concatenate(grids, axis=1)
    return rows, columns


def _drawn(means: Floats, meets: Floats, sizes: Sequence[int], n: int, rng: Generator) -> Dummies:
    """Return n rows of dummies with these means, that meet as often as asked as far as a correlation matrix can."""
    matrix = np.eye(len(means))
    own = _pair_cells(sizes, within=True)
    for (rows, columns), meet in ((_pair_cells(sizes), meets), (own, np.zeros(len(own[0])))):
        matrix[rows, columns] = matrix[columns, rows] = _latent_correlations(
            means[rows], means[columns], meet, n
        )
    nearest = correlation_kernel.nearest_correlation(matrix, floor=_FLOOR)
    return _thresholded(np.linalg.cholesky(nearest.matrix), means, n, rng)


def _latent_correlations(first: Floats, second: Floats, meets: Floats, n: int) -> Floats:
    """Return the correlation of two latent variables whose dummies have these means and meet so often, to a thousandth of a row.

    Of the correlations that good, the one nearest to 0: two rare dummies that never meet are then nearly independent, where
    -1 would be as good for them and ruin the nearest correlation matrix for the others. The paper bisects to a tolerance
    that it does not tell; this one is in its favour.
    """
    independent = first * second
    wanted = np.clip(meets, np.maximum(first + second - 1.0, 0.0), np.minimum(first, second))
    moved = wanted + np.clip(independent - wanted, -_TOLERANCE / n, _TOLERANCE / n)
    cuts = ndtri(1.0 - first), ndtri(1.0 - second)
    return normal_kernel.tetrachoric(*cuts, moved)


def _thresholded(factor: Floats, means: Floats, n: int, rng: Generator) -> Dummies:
    """Return n rows of dummies, one where a latent variable exceeds its threshold (equation 6)."""
    cuts = ndtri(1.0 - means).astype(np.float32)[:, np.newaxis]
    panels, room = pack(factor.astype(np.float32)), room_for(len(factor), min(CHUNK_ROWS, n))
    result = np.empty((len(means), n), dtype=np.uint8)
    for start in range(0, n, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, n)
        draw_latents(panels, stop - start, rng, room)
        result[:, start:stop] = room[: len(means), : stop - start] > cuts
    return result
