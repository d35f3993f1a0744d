"""Pseudo-values: functions g of the released level whose averages estimate averages of a function f of the original one.

They are made in a channel's canonical directions. A direction is inverted exactly, up to a cut-off;
or as far as the sum of squared bias and variance says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Floats = NDArray[np.float64]

MAX_CONDITION = 1e6
"""Above this ratio of singular values a channel's direction is taken as lost."""

_EXACT = 1e-6  # of the range of f: what T g may differ from f by and still count as equal
_MOST_CELLS = 10_000  # that the spread of groups is fitted to: more tell nothing new
_LEAST_SPREAD = 2.0**-14
_STEPS = 50
_UNBIASED_FOR = 1.1  # times the variance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Directions:
    """A channel's canonical directions under a distribution P of the original level.

    Attributes
    ----------
    matrix
        The channel, float64 array of shape (s, s).
    prior
        P, float64 array of shape (s,); levels of probability 0 are taken not to occur.
    own
        u_i(k), shape (s, r), orthonormal under P; the first is 1.
    released
        v_i(j), shape (s, r), orthonormal under P·T; the first is 1.
    singular
        σ_i, shape (r,), with E[v_i(Z̃) | Z = k] = σ_i u_i(k): 1 first, falling, 0 where v_i is 0.
    """

    matrix: Floats
    prior: Floats
    own: Floats
    released: Floats
    singular: Floats

    @classmethod
    def of(cls, matrix: Floats, prior: Floats) -> Directions:
        """Return the directions of a channel.

        Parameters
        ----------
        matrix, prior
            T and P.
        """
        rows, columns = np.flatnonzero(prior > 0), np.flatnonzero(prior @ matrix > 0)
        root, out = np.sqrt(prior[rows]), np.sqrt((prior @ matrix)[columns])
        whitened = root[:, None] * matrix[np.ix_(rows, columns)] / out
        # which doubles the first, so that it is the constant
        left, values, right = np.linalg.svd(whitened + np.outer(root, out))
        values[0] = 1.0
        n, r = len(values), len(rows)
        own, released, singular = np.zeros((len(prior), r)), np.zeros((len(prior), r)), np.zeros(r)
        own[rows], singular[:n] = left / root[:, None], values
        released[np.ix_(columns, np.arange(n))] = right[:n].T / out[:, None]
        sign = np.sign(left[0, 0])
        own[:, 0], released[:, 0] = own[:, 0] * sign, released[:, 0] * sign
        return cls(matrix=matrix, prior=prior, own=own, released=released, singular=singular)

    def coordinates(self, f: Floats) -> Floats:
        """Return φ with f = Σ φ_i u_i where P is positive, for f of shape (s,) or (s, n)."""
        found: Floats = self.own.T @ (self.prior * f.T).T
        return found

    def bias(self, g: Floats, f: Floats) -> Floats:
        """Return the largest |E[g(Z̃) | Z = k] - f(k)| over levels that occur.

        Parameters
        ----------
        g
            Shape (…, s).
        f
            Shape (s,).
        """
        seen = self.prior > 0
        found: Floats = np.abs(g @ self.matrix[seen].T - f[seen]).max(axis=-1)
        return found


def estimate_prior(matrix: Floats, start: Floats, counts: Floats) -> Floats:
    """Return roughly the distribution of the original levels: some steps of expectation and maximisation from a start.

    Parameters
    ----------
    matrix
        The channel.
    start
        Where to start, shape (s,); zeros stay zeros. A few steps leave it where the counts say
        little.
    counts
        How many rows were released as each level, shape (s,).
    """
    prior = start
    for _ in range(_STEPS if counts.any() else 0):
        expected = prior @ matrix
        prior = prior * (
            matrix @ np.divide(counts, expected, out=np.zeros_like(counts), where=expected > 0)
        )
        prior = prior / prior.sum()
    return prior


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PseudoValues:
    """Functions of the released level, for each group and stratum.

    Attributes
    ----------
    g
        float64 array of shape (groups, strata, s); one group stands for all if its length is 1.
    bias
        The largest bias of each group's average of g, for any original values; exactly 0 where T g
        = f. Shape (groups,) or (1,).
    shared
        The part of each average's variance that comes from the rows of all groups, of the shape of
        `bias`.
    """

    g: Floats
    bias: Floats
    shared: Floats


def invert(strata: Sequence[Directions], f: Floats, max_condition: float) -> PseudoValues:
    """Return the g with T g = f of least norm, in each stratum; or the nearest without the directions beyond the cut-off.

    Parameters
    ----------
    strata
        The directions of each channel.
    f
        float64 array of shape (s,).
    max_condition
        Directions whose singular value lies below 1/max_condition are not inverted.
    """
    g, bias = np.zeros((1, len(strata), len(f))), 0.0
    for place, each in enumerate(strata):
        seen = each.prior > 0
        used = each.singular >= each.singular[0] / max_condition
        g[0, place] = each.released[:, used] @ (each.coordinates(f)[used] / each.singular[used])
        left = float(each.bias(g[0, place], f))
        if left > _EXACT * np.ptp(f[seen]) + 1e-12 * np.abs(f[seen]).max():
            bias = max(bias, left)
    return PseudoValues(g=g, bias=np.array([bias]), shared=np.zeros(1))


def balance(strata: Sequence[Directions], f: Floats, counts: Floats) -> PseudoValues:
    """Return the g of least squared bias and variance together, for averages over all rows.

    Parameters
    ----------
    strata
        The directions of each channel.
    f
        float64 array of shape (s,).
    counts
        How many rows of each stratum were released as each level, shape (strata, s).

    Notes
    -----
    With n rows, the noise gives direction i the variance (1 - σ_i²)/(n σ_i²). The coordinate of the
    rows' distribution in it is 0 under P, and its square is on average at most 1 (that of single
    values drawn from P), and 1/n more from the draw of the rows. The weight (n + 1) σ_i² / (1 + n
    σ_i²) on the inverse is the best for that: a soft cut-off at σ_i = 1/√n, and 1 without noise.
    Where the exact inverse has a variance that is at most a tenth larger, it is taken, since it has
    no bias.
    """
    exact = invert(strata, f, MAX_CONDITION)
    sizes = counts.sum(axis=1)
    g = np.stack(
        [
            each.released @ (each.coordinates(f) * _invert_softly(each.singular, n))
            for each, n in zip(strata, sizes, strict=True)
        ]
    )
    if not exact.bias[0] and _variance(exact.g[0], counts) <= _UNBIASED_FOR * _variance(g, counts):
        return exact
    bias = max(float(each.bias(own, f)) for each, own, n in zip(strata, g, sizes, strict=True) if n)
    return PseudoValues(g=g[None], bias=np.array([bias]), shared=np.zeros(1))


def _variance(g: Floats, counts: Floats) -> float:
    mean = (counts * g).sum() / counts.sum()
    return float((counts * (g - mean) ** 2).sum())


def _invert_softly(singular: Floats, n: float) -> Floats:
    inverse: Floats = (n + 1.0) * singular / (1.0 + n * singular**2)
    inverse[0] = 1.0  # the constant
    return inverse


def balance_groups(
    strata: Sequence[Directions], f: Floats, table: Floats, *, along: bool
) -> PseudoValues:
    """Return the g of least squared bias and variance together, for the average of each group.

    Parameters
    ----------
    strata
        The directions of each channel.
    f
        float64 array of shape (s,).
    table
        How many rows of each group and stratum were released as each level, shape (groups, strata,
        s).
    along
        Whether groups may differ along f by more than in other directions; otherwise all functions
        f share one spread.

    Notes
    -----
    The averages over all rows come from `balance`. Groups differ from them by coordinates whose
    covariance over groups is taken to be τ·1 + κ·p pᵀ, where p is f's own direction; the draw of
    its n rows adds 1/n. τ and κ are those of the largest normal likelihood of what was released. In
    group and stratum the coordinates x are seen as σ∘x with noise of variance about (1 - σ²)/n, and
    the linear predictor of f's part of x has the least squared bias and variance together. Without
    noise, or with n large, it is the exact inverse.
    """
    n_groups, n_strata, s = table.shape
    sizes = table.sum(axis=2)
    parts = [_stratum(each, f, table[:, place]) for place, each in enumerate(strata)]
    spread = _fit_spread(parts, along=along)
    share = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1.0)
    g, bias, shared = np.zeros((n_groups, n_strata, s)), np.zeros(n_groups), np.zeros(n_groups)
    for place, (each, part) in enumerate(zip(strata, parts, strict=True)):
        weights = part.predict(*spread)
        rest = part.shared_weights - weights
        g[:, place] = weights @ each.released.T + (part.constant + rest @ part.centre)[:, None]
        bias += share[:, place] * each.bias(g[:, place], f)
        shared += (
            share[:, place] ** 2
            * ((rest**2 + 2 * weights * rest) @ part.variance)
            / max(float(part.sizes.sum()), 1.0)
        )
    return PseudoValues(g=g, bias=bias, shared=shared)


def nearest_probabilities(channels: Floats, reference: Floats, table: Floats) -> Floats:
    """Return the distribution of the original levels: in each stratum the nearest one of weighted least squares, then mixed by rows.

    Parameters
    ----------
    channels
        T of each stratum, shape (strata, s, s).
    reference
        P, shape (s,); levels of probability 0 keep it, and where several distributions are as near,
        the one next to P is taken.
    table
        Counts by stratum and released level, shape (strata, s).

    Notes
    -----
    In a stratum, Σ_j (q_j - (p T)_j)² / q_j is the least over p ≥ 0 of sum 1.
    """
    seen = reference > 0
    mixture = np.zeros(len(reference))
    for matrix, counts in zip(channels, table, strict=True):
        if not counts.any():
            continue
        shares = counts[seen] / counts.sum()
        weight = 1 / np.sqrt(np.maximum(shares, 1 / counts.sum()))
        tie = 1e-6 / np.sqrt(reference[seen])
        rows = np.vstack(
            [
                weight[:, None] * matrix[np.ix_(seen, seen)].T,
                np.diag(tie),
                np.full((1, int(seen.sum())), 1e4),
            ]
        )
        solution, _ = optimize.nnls(
            rows, np.concatenate([weight * shares, tie * reference[seen], [1e4]])
        )
        mixture[seen] += counts.sum() * solution / solution.sum()
    found: Floats = mixture / table.sum()
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stratum:
    """What the groups' coordinates in one stratum are: all arrays leave the constant out, at place 0, as zeros."""

    constant: float  # φ_0
    length: float  # |φ|
    slope: Floats  # σ∘p, (r,)
    singular: Floats
    centre: Floats  # the released coordinates of all rows
    variance: Floats  # of one row's released coordinates
    offsets: Floats  # of each group's released coordinates from the centre, (groups, r)
    shared_weights: Floats  # of the released coordinates of all rows, in the average of all rows
    sizes: Floats  # of the groups, in rows

    def predict(self, tau: float, kappa: float) -> Floats:
        """Return the weights of each group's released coordinates, (groups, r)."""
        drawn = self.variance / np.maximum(self.sizes, 1.0)[:, None]
        noisy = self.singular**2 * tau + drawn + 1e-300
        scaled = self.slope / noisy  # what is seen has the covariance diag(noisy) + κ·slope slopeᵀ
        total = 1.0 + kappa * (scaled @ self.slope)
        own = self.slope * drawn / noisy
        along = ((tau + kappa) - kappa * (own @ self.slope)) / total
        return self.length * (along[:, None] * scaled + own)

    def likelihood(self, tau: float, kappa: float) -> float:
        """Return the logarithm of the normal likelihood of the groups' offsets, up to a constant."""
        here = self.sizes > 0
        used = self.singular > 1 / MAX_CONDITION
        used[0] = False
        noisy = (
            self.singular[used] ** 2 * tau + self.variance[used] / self.sizes[here, None] + 1e-300
        )
        offsets, slope = self.offsets[np.ix_(here, used)], self.slope[used]
        q, r = (slope**2 / noisy).sum(axis=1), (offsets * slope / noisy).sum(axis=1)
        terms = (
            np.log(noisy).sum(axis=1)
            + (offsets**2 / noisy).sum(axis=1)
            + np.log1p(kappa * q)
            - kappa * r**2 / (1.0 + kappa * q)
        )
        return -0.5 * float(terms.sum())


def _stratum(directions: Directions, f: Floats, counts: Floats) -> _Stratum:
    phi = directions.coordinates(f)
    constant, phi[0] = float(phi[0]), 0.0
    length = float(np.linalg.norm(phi))
    sizes, v = counts.sum(axis=1), directions.released.copy()
    v[:, 0] = 0.0
    n_rows = float(sizes.sum())
    centre = counts.sum(axis=0) @ v / max(n_rows, 1.0)
    return _Stratum(
        constant=constant,
        length=length,
        slope=directions.singular * phi / (length or 1.0),
        singular=directions.singular,
        centre=centre,
        variance=counts.sum(axis=0) @ (v - centre) ** 2 / max(n_rows, 1.0),
        offsets=counts @ v / np.maximum(sizes, 1.0)[:, None] - centre,
        shared_weights=phi * _invert_softly(directions.singular, n_rows),
        sizes=sizes,
    )


def _fit_spread(parts: Sequence[_Stratum], *, along: bool) -> tuple[float, float]:
    """Return τ and κ of the largest likelihood: on a grid of factors 4, then between its points."""
    step = -(-sum(len(part.sizes) for part in parts) // _MOST_CELLS)
    some = [replace(each, offsets=each.offsets[::step], sizes=each.sizes[::step]) for each in parts]

    def likelihood(at: tuple[float, float]) -> float:
        return sum(part.likelihood(*at) for part in some)

    grid = [4.0**-k for k in range(8)]
    tau, kappa = max(
        ((t, k) for t in grid for k in ([0.0, *grid] if along else [0.0])), key=likelihood
    )
    near = [
        (t, k)
        for t in (tau / 2, tau, 2 * tau)
        for k in ((kappa / 2, kappa, 2 * kappa) if kappa else (0.0,))
    ]
    tau, kappa = max(near, key=likelihood)
    return min(max(tau, _LEAST_SPREAD), 1.0), min(kappa, 1.0)
