"""The joint distribution of two level columns with noise of their own: of the pair, the channel is the product of the two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpdask.arrays import Ends, Floats, Pair, Triple, freeze_class
from dpdask.inference.measured import NORMAL_95
from dpdask.inference.pseudo_values import (
    MAX_CONDITION,
    Directions,
    find_half_width,
    list_spreads,
)

_MOST_ALONG = 256  # directions: a covariance that is not diagonal is inverted for each spread


@freeze_class(eq=False)
class Margin:
    """What is known of one column: its channel, the shares of its original levels, their standard errors and the bounds on their biases."""

    matrix: Floats  # float64 array of shape (s, s): T[k, j] = Pr(released level j | original k)
    share: Floats
    error: Floats
    bias: Floats | float = 0.0
    numbers: Floats | None = None  # the levels, if they are numbers

    @property
    def shares(self) -> Floats:
        """The shares as probabilities above 0."""
        found: Floats = np.maximum(np.nan_to_num(self.share), 1e-6)
        return found / float(found.sum())

    def align(self, directions: Directions) -> Floats:
        """Return the projection on the direction of the numbers; the identity if there are none."""
        own = directions.own[:, 1:]
        if self.numbers is None:
            return np.eye(own.shape[1])
        axis = own.T @ (directions.prior * self.numbers)
        axis = axis / (float(np.linalg.norm(axis)) or 1.0)
        return np.outer(axis, axis)


def estimate_pairs(one: Margin, two: Margin, counts: Floats) -> Triple:
    """Return the share of each pair of original levels, its standard error, and how far the noise may move it, by how dependent the columns seem.

    Counts are of released pairs, shape (s, t).

    Notes
    -----
    The joint distribution is p_k q_l (1 + Σ_ij ρ_ij u_i(k) w_j(l)) with the columns' canonical
    directions u and w. A pair of directions is seen as σ_i τ_j ρ_ij, with the noise of the draw of
    the rows. The ρ are taken to be normal with covariance τ·1 + κ·A ⊗ B, where A projects on the
    direction of the first column's numbers (the identity if it has none), B on that of the second.
    The pairs τ and κ on a grid of factors 4 are alike before, as far as the mean square contingency,
    Σ ρ², can be as large: it is at most the smaller number of levels less 1. The estimate is the
    mean of the ρ given what was seen. The bound is that of `find_half_width`, less 1.96 standard
    errors: where directions are lost, it is as large as those that are seen say.
    """
    n, shares = float(counts.sum()), (one.shares, two.shares)
    first, second = (
        Directions.of(margin.matrix, share)
        for margin, share in zip((one, two), shares, strict=True)
    )
    seen = np.outer(first.singular[1:], second.singular[1:]).ravel()
    table = counts / n
    v, w = (
        each.released[:, 1:] - table.sum(axis=side) @ each.released[:, 1:]
        for each, side in ((first, 1), (second, 0))
    )
    basis = np.einsum("ki,lj->klij", v, w).reshape(counts.size, -1)
    offset = table.ravel() @ basis
    covariance = ((basis * table.reshape(-1, 1)).T @ basis - np.outer(offset, offset)) / n
    p, q = shares
    parts = np.einsum("ki,lj->klij", first.own[:, 1:] * p[:, None], second.own[:, 1:] * q[:, None])
    parts = parts.reshape(counts.size, -1)
    axis: Floats | None = None
    if len(seen) <= _MOST_ALONG and not (one.numbers is None and two.numbers is None):
        axis = np.kron(one.align(first), two.align(second)).astype(float)
    variance = np.maximum(np.diag(covariance), 1e-12)
    length = 0.0 if axis is None else float(np.trace(axis))
    pairs = list_spreads(len(seen), length, min(counts.shape) - 1.0)
    weights, probability = _predict(seen, offset, variance, axis, pairs)
    value = np.outer(p, q) + (parts @ weights @ offset).reshape(counts.shape)
    drawn = np.einsum("ki,ij,kj->k", parts @ weights, covariance, parts @ weights)
    of_margins = np.outer(one.error, q) ** 2 + np.outer(p, two.error) ** 2
    error = np.sqrt(np.maximum(drawn.reshape(counts.shape), 0.0) + of_margins)
    lost = parts @ (weights * seen) - parts
    along = 0.0 if axis is None else np.einsum("ki,ij,kj->k", lost, axis, lost)
    squares = np.array([tau * (lost**2).sum(axis=1) + kappa * along for tau, kappa in pairs])
    doubts = np.outer(one.bias + 0.0 * p, q), np.outer(p, two.bias + 0.0 * q)
    squares = squares.reshape(-1, *counts.shape) + sum((part / NORMAL_95) ** 2 for part in doubts)
    biases = np.sqrt(np.maximum(squares, 0.0))
    bias = find_half_width(error, biases, probability) - NORMAL_95 * error
    # nothing is known of levels that cannot be released
    unknown = np.isnan(error)
    value, error, bias = (np.where(unknown, 0.0, part) for part in (value, error, bias))
    return value, error, bias


def _predict(
    seen: Floats,
    offset: Floats,
    variance: Floats,
    axis: Floats | None,
    pairs: Sequence[Ends],
) -> Pair:
    """Return the weights of what is seen in the mean of all coordinates given it, averaged over spreads, and the probability of each."""
    used = seen > 1.0 / MAX_CONDITION
    found, said = [], []
    for tau, kappa in pairs:
        if axis is None:
            noisy = tau * seen**2 + variance
            said.append(-0.5 * (offset**2 / noisy + np.log(noisy))[used].sum())
            found.append(np.diag(tau * seen * used / noisy))
            continue
        prior = tau * np.eye(len(seen)) + kappa * axis
        noisy = (seen[:, None] * prior * seen + np.diag(variance))[np.ix_(used, used)]
        root = np.linalg.cholesky(noisy)
        scaled = np.linalg.solve(root, offset[used])
        said.append(-0.5 * scaled @ scaled - np.log(np.diag(root)).sum())
        weights = np.zeros_like(prior)
        weights[:, used] = np.linalg.solve(noisy, (prior * seen)[:, used].T).T
        found.append(weights)
    probability = np.exp(np.array(said) - max(said))
    probability /= probability.sum()
    return np.tensordot(probability, np.array(found), axes=1), probability
