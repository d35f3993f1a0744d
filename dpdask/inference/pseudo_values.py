"""Pseudo-values: functions g of the released level whose averages estimate averages of a function f of the original one.

They are made in a channel's canonical directions. A direction is inverted exactly, up to a cut-off;
or as far as the sum of squared bias and variance says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import optimize, special

from dpdask.arrays import Ends, Floats, freeze_class

MAX_CONDITION = 1e6
"""Above this ratio of singular values a channel's direction is taken as lost."""

_EXACT = 1e-6  # of the range of f: what T g may differ from f by and still count as equal
_MOST_CELLS = 10_000  # that the spread of groups is fitted to: more tell nothing new
_UNLIKELY = 1e-6  # pairs of spreads that are left out of averages
_STEPS = 50
_BEYOND = 0.03
_UNBIASED_FOR = 1.1  # times the variance


@freeze_class(eq=False)
class Directions:
    """A channel's canonical directions under a distribution P of the original level."""

    matrix: Floats  # the channel, shape (s, s)
    prior: Floats  # P, shape (s,); levels of probability 0 are taken not to occur
    own: Floats  # u_i(k), shape (s, r), orthonormal under P; the first is 1
    released: Floats  # v_i(j), shape (s, r), orthonormal under P·T; the first is 1
    # σ_i, shape (r,), with E[v_i(Z̃) | Z = k] = σ_i u_i(k): 1 first, falling, 0 where v_i is 0
    singular: Floats

    @classmethod
    def of(cls, matrix: Floats, prior: Floats) -> Directions:
        """Return the directions of a channel."""
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
        return self.own.T @ (self.prior * f.T).T

    def bias(self, g: Floats, f: Floats, most: Floats | None = None) -> Floats:
        """Return the largest |Σ_k π_k (E[g(Z̃) | Z = k] - f(k))| over distributions π of levels that occur.

        π may be at most `most`, anything if None; g and f have the shape (…, s).
        """
        seen = self.prior > 0
        off = g @ self.matrix[seen].T - f[..., seen]
        if most is None:
            return np.abs(off).max(axis=-1)
        caps = np.broadcast_to(most[..., seen], off.shape)
        return np.maximum(_fill(off, caps), _fill(-off, caps))

    def square_bias(self, g: Floats, f: Floats, most: Floats) -> float:
        """Return the largest mean of (E[g(Z̃) | Z] - f(Z))² over distributions of Z.

        See `bias`.
        """
        seen = self.prior > 0
        off = g @ self.matrix[seen].T - f[seen]
        return float(_fill(off**2, most[seen]))


def _fill(values: Floats, caps: Floats) -> Floats:
    """Return the largest average of values by a distribution below the caps: the largest values have as much as they may."""
    order = np.argsort(-values, axis=-1)
    values, caps = (np.take_along_axis(part, order, axis=-1) for part in (values, caps))
    ahead = np.cumsum(caps, axis=-1) - caps
    shares = np.clip(1.0 - ahead, 0.0, caps)
    return (shares * values).sum(axis=-1) / np.maximum(shares.sum(axis=-1), 1e-300)


def find_half_width(
    error: Floats, biases: Floats, probability: Floats, alpha: float = _BEYOND
) -> Floats:
    """Return how far on both sides a normal estimate holds the truth with probability 1 - alpha, if its bias is normal with one of several spreads.

    Biases and their probability have one dimension more, of the spreads. A bias is the same in
    every release: intervals that hold in 95 % of all groups and releases together never hold in
    some groups, so alpha is smaller by default.

    References
    ----------
    Morris, Parametric empirical Bayes inference (1983); the spread is averaged over, as in Laird and
    Louis, Empirical Bayes confidence intervals based on bootstrap samples (1987).
    """
    deviations = np.sqrt(error**2 + biases**2)
    least = -float(special.ndtri(alpha / 2.0))
    low, high = least * error, least * deviations.max(axis=0)
    for _ in range(40):
        middle = (low + high) / 2.0
        ratio = middle / np.maximum(deviations, 1e-300)
        is_enough = np.tensordot(probability, 2.0 * special.ndtr(-ratio), axes=1) <= alpha
        low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
    return high


def estimate_prior(matrix: Floats, start: Floats, counts: Floats, steps: int = _STEPS) -> Floats:
    """Return roughly the distribution of the original levels: some steps of expectation and maximisation from a start.

    Zeros of the start stay zeros, and a few steps leave it where the counts say little.
    """
    prior = start
    for _ in range(steps if counts.any() else 0):
        expected = prior @ matrix
        prior = prior * (
            matrix @ np.divide(counts, expected, out=np.zeros_like(counts), where=expected > 0)
        )
        prior = prior / prior.sum()
    return prior


@freeze_class(eq=False)
class PseudoValues:
    """Functions of the released level, for each group and stratum."""

    g: Floats  # shape (groups, strata, s); one group stands for all if its length is 1
    # the largest bias of each group's average of g, for any original values; exactly 0 where T g =
    # f. Shape (groups,) or (1,)
    bias: Floats
    # the part of each average's variance that comes from the rows of all groups, of the shape of
    # `bias`
    shared: Floats
    f: Floats  # what is averaged, shape (groups, s) or (1, s)
    # the standard deviation of the bias over groups, if groups differ along the directions that the
    # channel hides as they do along the others, for each of several spreads: shape (spreads,
    # groups). None if it is not known
    likely: Floats | None = None
    # That of each spread, by the likelihood of what was released, shape (spreads,)
    probability: Floats | None = None

    def minus(self, shift: Floats, other: PseudoValues) -> PseudoValues:
        """Return the pseudo-values of f - shift · f of the other.

        There is one shift for each group.
        """
        size = np.abs(shift)
        likely = probability = None
        if self.probability is not None and other.probability is not None:
            assert self.likely is not None
            assert other.likely is not None
            # the two have spreads of their own: their root mean squares are added
            likely = np.sqrt(self.probability @ self.likely**2)
            likely = (likely + size * np.sqrt(other.probability @ other.likely**2))[None]
            probability = np.ones(1)
        one, two = (np.sqrt(np.maximum(part.shared, 0.0)) for part in (self, other))
        return PseudoValues(
            g=self.g - shift[:, None, None] * other.g,
            bias=self.bias + size * other.bias,
            shared=(one + size * two) ** 2,
            f=self.f - shift[:, None] * other.f,
            likely=likely,
            probability=probability,
        )


def invert(strata: Sequence[Directions], f: Floats, max_condition: float) -> PseudoValues:
    """Return the g with T g = f of least norm, in each stratum; or the nearest without the directions beyond the cut-off.

    Singular values below 1/max_condition are not inverted.
    """
    g, bias = np.zeros((1, len(strata), len(f))), 0.0
    for place, each in enumerate(strata):
        seen = each.prior > 0
        used = each.singular >= each.singular[0] / max_condition
        g[0, place] = each.released[:, used] @ (each.coordinates(f)[used] / each.singular[used])
        left = float(each.bias(g[0, place], f))
        if left > _EXACT * np.ptp(f[seen]) + 1e-12 * np.abs(f[seen]).max():
            bias = max(bias, left)
    return PseudoValues(g=g, bias=np.array([bias]), shared=np.zeros(1), f=f[None])


def balance(strata: Sequence[Directions], f: Floats, counts: Floats) -> PseudoValues:
    """Return the g of least squared bias and variance together, for averages over all rows.

    Counts have the shape (strata, s).

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
    return PseudoValues(g=g[None], bias=np.array([bias]), shared=np.zeros(1), f=f[None])


def _variance(g: Floats, counts: Floats) -> float:
    mean = (counts * g).sum() / counts.sum()
    return float((counts * (g - mean) ** 2).sum())


def _invert_softly(singular: Floats, n: float) -> Floats:
    inverse: Floats = (n + 1.0) * singular / (1.0 + n * singular**2)
    inverse[0] = 1.0  # the constant
    return inverse


@freeze_class(eq=False)
class Spread:
    """How groups differ: the coordinates in each stratum, and pairs τ and κ with their probabilities."""

    parts: tuple[_Stratum, ...]
    pairs: tuple[Ends, ...]
    probability: Floats


def fit_spread(
    strata: Sequence[Directions], table: Floats, axis: Floats | None, *, of_all: bool = False
) -> Spread:
    """Return how groups differ from the average of all rows; or how all rows, as one group, differ from the distribution that the channel keeps.

    The table has the shape (groups, strata, s). Along the `axis`, a function of the level,
    groups may differ by more, as numbers do first in their mean. `of_all`: the table is that of
    all rows, which need not follow the channel's distribution.

    Notes
    -----
    Groups differ from all rows by coordinates whose covariance over groups is τ·1 + κ·a aᵀ, where a
    is the direction of the axis; the draw of its n rows adds 1/n. All pairs on a grid of factors 4
    are alike before, and some between the points about the best one. The sum of the squared
    coordinates, the mean square contingency, is at most min(groups, s) - 1 on average, so no pair
    is beyond it.
    """
    parts = tuple(_stratum(each, table[:, place], axis) for place, each in enumerate(strata))
    if of_all:
        parts = tuple(
            replace(each, offsets=each.offsets + each.centre, centre=np.zeros_like(each.centre))
            for each in parts
        )
    n_levels = max(int((each.prior > 0).sum()) for each in strata)
    return _weigh_pairs(parts, n_levels, math.inf if of_all else min(len(table), n_levels) - 1.0)


def fit_slopes(directions: Directions, sums: Floats, n_rows: float, axis: Floats) -> Spread:
    """Return how the level depends on covariates, which take the place of groups: its coordinates are the correlations with them.

    `sums` are of covariates of mean 0 and mean square 1 over the rows of each released level,
    shape (covariates, s). By Bessel's inequality a covariate's squared correlations add up to
    at most 1.
    """
    v = directions.released.copy()
    v[:, 0] = 0.0
    part = _Stratum(
        axis=_align(directions, axis),
        singular=directions.singular,
        centre=np.zeros(v.shape[1]),
        variance=np.append(0.0, np.ones(v.shape[1] - 1)),
        offsets=sums @ v / n_rows,
        sizes=np.full(len(sums), n_rows),
    )
    return _weigh_pairs((part,), int((directions.prior > 0).sum()), 1.0)


def _weigh_pairs(parts: tuple[_Stratum, ...], n_levels: int, most: float) -> Spread:
    """Return pairs τ and κ that give the coordinates at most a mean sum of squares, with their probabilities."""
    step = -(-sum(len(part.sizes) for part in parts) // _MOST_CELLS)
    some = [replace(each, offsets=each.offsets[::step], sizes=each.sizes[::step]) for each in parts]

    def likelihood(at: Ends) -> float:
        return sum(part.likelihood(*at) for part in some)

    along = any(part.axis.any() for part in parts)
    grid = list_spreads(n_levels - 1, float(along), most)
    found = [likelihood(at) for at in grid]
    tau, kappa = grid[int(np.argmax(found))]
    near = [
        (t, k)
        for t in (tau / 2, tau, 2 * tau)
        for k in ((kappa / 2, kappa, 2 * kappa) if kappa else (0.0,))
        if (t, k) != (tau, kappa) and (n_levels - 1) * t + k <= most
    ]
    found += [likelihood(at) for at in near]
    probability = np.exp(np.array(found) - max(found))
    return Spread(parts=parts, pairs=(*grid, *near), probability=probability / probability.sum())


def list_spreads(n: int, length: float, most: float) -> list[Ends]:
    """Return pairs τ and κ, on a grid of factors 4, that give coordinates at most a mean sum of squares.

    There are n coordinates of variance τ; `length` is the trace of the matrix that κ is a
    factor of, 0 if there is none.
    """
    levels = [4.0**-k for k in range(8)]
    grid = [(t, k) for t in levels for k in ([0.0, *levels] if length else [0.0])]
    return [(t, k) for t, k in grid if t * n + k * length <= most] or grid[-1:]


def balance_groups(
    strata: Sequence[Directions], f: Floats, spread: Spread, of_all: Spread | None = None
) -> PseudoValues:
    """Return the g of least squared bias and variance together, for the average of each group.

    `of_all` is None if all rows follow the channel's distribution, so that their average is
    that of `balance`.

    Notes
    -----
    In group and stratum the coordinates x are seen as σ∘x with noise of variance about (1 - σ²)/n,
    and the linear predictor of f's part of x has the least squared bias and variance together; it
    is averaged over the pairs τ and κ. Without noise, or with n large, it is the exact inverse.
    """
    sizes = np.column_stack([part.sizes for part in spread.parts])
    n_groups, n_strata = sizes.shape
    share = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1.0)
    g, bias = np.zeros((n_groups, n_strata, len(f))), np.zeros(n_groups)
    shared, squares = np.zeros(n_groups), np.zeros((len(spread.pairs), n_groups))
    for place, (each, part) in enumerate(zip(strata, spread.parts, strict=True)):
        phi = each.coordinates(f)
        constant, phi[0] = float(phi[0]), 0.0
        n_rows = float(part.sizes.sum())
        weights = part.average(phi, spread)
        if of_all is None:
            shared_weights = phi * _invert_softly(each.singular, n_rows)
            # the average of all rows is known as well as their draw and the reference's allow
            doubt = 2.0 * ((phi - each.singular * shared_weights)[1:] ** 2).sum()
            doubt /= max(n_rows, 1.0)
        else:
            all_rows = of_all.parts[place]
            shared_weights = all_rows.average(phi, of_all)[0]
            lost = phi - each.singular * shared_weights
            doubt = float(of_all.probability @ all_rows.square(lost[None], of_all.pairs)[:, 0])
        doubt = 0.0 if of_all is spread else doubt
        rest = shared_weights - weights
        g[:, place] = weights @ each.released.T + (constant + rest @ part.centre)[:, None]
        bias += share[:, place] * each.bias(g[:, place], f)
        shared += (
            share[:, place] ** 2
            * ((rest**2 + 2 * weights * rest) @ part.variance)
            / max(n_rows, 1.0)
        )
        own = part.square(phi - each.singular * weights, spread.pairs)
        squares += share[:, place] ** 2 * (own + doubt)
    return PseudoValues(
        g=g,
        bias=bias,
        shared=shared,
        f=f[None],
        likely=np.sqrt(squares),
        probability=spread.probability,
    )


def nearest_probabilities(channels: Floats, reference: Floats, table: Floats) -> Floats:
    """Return the distribution of the original levels: in each stratum the nearest one of weighted least squares, then mixed by rows.

    Levels of probability 0 in the reference keep it, and of several distributions that are as
    near the one next to it is taken. Channels have the shape (strata, s, s), the table (strata,
    s).

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
    return mixture / table.sum()


@freeze_class(eq=False)
class _Stratum:
    """What the groups' coordinates in one stratum are: all arrays leave the constant out, at place 0, as zeros."""

    axis: Floats  # a, (r,): of length 1, or 0 if no direction is before others
    singular: Floats
    centre: Floats  # the released coordinates of all rows
    variance: Floats  # of one row's released coordinates
    offsets: Floats  # of each group's released coordinates from the centre, (groups, r)
    sizes: Floats  # of the groups, in rows

    def predict(self, phi: Floats, tau: float, kappa: float) -> Floats:
        """Return the weights of each group's released coordinates in the average of Σ φ_i u_i, (groups, r)."""
        drawn = self.variance / np.maximum(self.sizes, 1.0)[:, None]
        noisy = self.singular**2 * tau + drawn + 1e-300
        slope = self.singular * self.axis
        # the draw of a group's rows is a part of what they are
        along = kappa * (self.axis @ phi) * self.axis
        wanted = self.singular * ((tau + drawn) * phi + along)
        # what is seen has the covariance diag(noisy) + κ·slope slopeᵀ
        found, scaled = wanted / noisy, slope / noisy
        ahead = kappa * (found @ slope) / (1.0 + kappa * (scaled @ slope))
        return found - ahead[:, None] * scaled

    def average(self, phi: Floats, spread: Spread) -> Floats:
        """Return the weights, averaged over how groups may differ, (groups, r)."""
        likely = spread.probability > _UNLIKELY
        shares = spread.probability[likely] / spread.probability[likely].sum()
        pairs = [pair for pair, is_likely in zip(spread.pairs, likely, strict=True) if is_likely]
        parts = [self.predict(phi, *pair) for pair in pairs]
        return np.tensordot(shares, parts, axes=1)

    def square(self, lost: Floats, pairs: Sequence[Ends]) -> Floats:
        """Return the mean square of Σ lost_i x_i over groups, for each pair τ and κ, (pairs, groups)."""
        tau, kappa = np.array(pairs).T[:, :, None]
        return tau * (lost[:, 1:] ** 2).sum(axis=1) + kappa * (lost @ self.axis) ** 2

    def likelihood(self, tau: float, kappa: float) -> float:
        """Return the logarithm of the normal likelihood of the groups' offsets, up to a constant."""
        here = self.sizes > 0
        used = self.singular > 1 / MAX_CONDITION
        used[0] = False
        noisy = (
            self.singular[used] ** 2 * tau + self.variance[used] / self.sizes[here, None] + 1e-300
        )
        offsets, slope = self.offsets[np.ix_(here, used)], (self.singular * self.axis)[used]
        q, r = (slope**2 / noisy).sum(axis=1), (offsets * slope / noisy).sum(axis=1)
        terms = (np.log(noisy) + offsets**2 / noisy).sum(axis=1)
        terms += np.log1p(kappa * q) - kappa * r**2 / (1.0 + kappa * q)
        return -0.5 * float(terms.sum())


def _align(directions: Directions, axis: Floats | None) -> Floats:
    """Return the direction of a function, (r,), of length 1; zeros if it is None or constant."""
    if axis is None:
        return np.zeros(len(directions.singular))
    own = directions.coordinates(axis)
    own[0] = 0.0
    return own / (float(np.linalg.norm(own)) or 1.0)


def _stratum(directions: Directions, counts: Floats, axis: Floats | None) -> _Stratum:
    sizes, v = counts.sum(axis=1), directions.released.copy()
    v[:, 0] = 0.0
    share = counts.sum(axis=0) / max(float(sizes.sum()), 1.0)
    centre = share @ v
    return _Stratum(
        axis=_align(directions, axis),
        singular=directions.singular,
        centre=centre,
        variance=share @ (v - centre) ** 2,
        offsets=counts @ v / np.maximum(sizes, 1.0)[:, None] - centre,
        sizes=sizes,
    )
