"""Distributions on levels: their projection; the exact channel of distribution-invariant privatisation on levels, its exact epsilon, and its exact sampling.

A channel is drawn from in whole numbers: row k holds weights that sum to 2**63, so what is sampled
is exactly what is audited, and no rounding stands between the printed epsilon and the drawn noise.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy import uint64
from numpy.typing import NDArray

from dpdask.arrays import Floats, Int32s, Shorts, Uint32s, Words
from dpdask.kernels.jit import jit


@jit
def find_codes(values: NDArray[np.floating], levels: Floats, codes: Int32s) -> tuple[Int32s, bool]:
    """Return the code of each value, and whether all values are levels; a value that is none gets the code of some level.

    Notes
    -----
    Where the levels are evenly spaced, as stars are, the place of a level is computed; otherwise it
    is searched for.
    """
    n_levels, low = len(levels), levels[0]
    span = levels[-1] - low
    scale = (n_levels - 1) / span if span > 0.0 else 0.0
    is_even = True
    for level in range(n_levels):
        found = (levels[level] - low) * scale + 0.5
        is_even &= (found >= level) & (found < level + 1)
    out = np.empty(len(values), dtype=np.int32)
    n_others = 0
    if is_even:
        for row in range(len(values)):  # without a branch: a third of the time
            value = np.float64(values[row])
            found = (value - low) * scale + 0.5
            inside = (found >= 0.0) & (found < n_levels)  # NaN is not
            # unsigned: numba would look for places counted from the end
            place = uint64(np.int64(found if inside else 0.0))
            n_others += levels[place] != value
            out[row] = codes[place]
    else:
        for row in range(len(values)):
            value = np.float64(values[row])
            place = uint64(min(int(np.searchsorted(levels, value)), n_levels - 1))
            n_others += levels[place] != value
            out[row] = codes[place]
    return out, n_others == 0


def project(values: Floats, total: float) -> Floats:
    """Return the non-negative vector with sum `total` that is nearest to `values` in Euclidean distance.

    Notes
    -----
    Of the positions k of the sorted values, the support is the last at which the k-th largest still
    exceeds the t that the k largest alone would need. The values are first shifted by their
    largest, so t is found without cancellation.

    References
    ----------
    Held, Wolfe and Crowder, Validation of subgradient optimization (1974), section 2; Duchi,
    Shalev-Shwartz, Singer and Chandra, Efficient projections onto the l1-ball (2008), figure 1.
    """
    if len(values) == 0 or not np.isfinite(values).all() or not 0 < total < np.inf:
        raise ValueError("a projection needs finite values and a positive, finite total")
    shifted = values - values.max()
    descending = np.sort(shifted)[::-1]
    needed = (np.cumsum(descending) - total) / np.arange(1, len(values) + 1)
    last = np.flatnonzero(descending > needed)[-1]
    result: Floats = np.maximum(shifted - needed[last], 0.0)
    result *= total / result.sum()
    return result


def project_each(values: Floats, totals: Floats) -> Floats:
    """Return each vector of the last axis, projected as by `project`.

    Parameters
    ----------
    values
        float64 array of shape (…, n); minus infinity where an entry must be 0. At least one entry
        of each vector is finite.
    totals
        float64 array of shape (…), positive: the sum of each vector.
    """
    falling = -np.sort(-values, axis=-1)
    finite = np.isfinite(falling)
    excess = np.cumsum(np.where(finite, falling, 0.0), axis=-1) - totals[..., None]
    sizes = np.arange(1, values.shape[-1] + 1)
    support = (finite & (np.where(finite, falling, 0.0) > excess / sizes)).sum(
        axis=-1, keepdims=True
    )
    t = np.take_along_axis(excess, np.maximum(support - 1, 0), axis=-1) / np.maximum(support, 1)
    return np.maximum(values - t, 0.0)


TOTAL_BITS = 63
UNSEEN = 2.0**-44  # below this probability a level's weights could not be resolved in whole numbers
EXACT = Context(prec=60)
_LOG_ERROR = 1e-12  # more than two logarithms of doubles can be wrong by


def uniform_laplace_quantile(c: Floats, b: float) -> Floats:
    """Return G⁻¹(c) for c in [0, 1], with -inf and inf at its ends; in between to a few units in the last place.

    G is the cdf of Unif(0, 1) + Laplace(b) (Bi & Shen, appendix, first section).

    Notes
    -----
    On [0, 1], G(x) = x + b·exp(-1/2b)·sinh((1/2 - x)/b): the paper's difference of two
    exponentials, written so that nothing cancels when b is large.
    """
    c = np.asarray(c, dtype=np.float64)
    edge = -b / 2 * math.expm1(-1 / b)  # G(0) = 1 - G(1)
    with np.errstate(divide="ignore"):
        lower = b * np.log(c / edge)
        upper = 1.0 - b * np.log((1.0 - c) / edge)
    inside = _search_quantiles(c.ravel(), b).reshape(c.shape)
    return np.where(c <= edge, lower, np.where(c >= 1.0 - edge, upper, inside))


@jit
def _search_quantiles(c: Floats, b: float) -> Floats:
    """Return G⁻¹(c) where it is in [0, 1], by bisection."""
    factor = b * math.exp(-1 / (2 * b))
    out = np.empty(len(c))
    for i in range(len(c)):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if middle + factor * math.sinh((0.5 - middle) / b) < c[i]:
                low = middle
            else:
                high = middle
        out[i] = (low + high) / 2
    return out


def laplace_channel(probabilities: Floats, b: float, target: Floats | None = None) -> Floats:
    """Return T[k, j] = Pr(output level j | input level k) of the paper's mechanism with Laplace scale b on the ranks.

    Parameters
    ----------
    probabilities
        P, the input's distribution: float64 array of shape (m,), positive, summing to 1.
    b
        The scale of the Laplace noise, in units of rank (0, 1].
    target
        Q, the distribution that the output is to have: float64 array of shape (n,), positive,
        summing to 1; P if not given.

    Notes
    -----
    With q_j = G⁻¹(d_j), where c and d are the cumulative probabilities of P and Q, T[k, j] is the
    Laplace density of q - c integrated over [q_j, q_{j+1}] × [c_k, c_{k+1}], divided by P_k. It is
    summed from positive parts, so every entry is accurate relative to its own size, and ratios of
    entries, which are the privacy loss, are too.
    """
    cumulative = _cumulative(probabilities)
    cuts = cumulative if target is None else _cumulative(target)
    quantiles = np.concatenate([[-np.inf], uniform_laplace_quantile(cuts[1:-1], b), [np.inf]])
    q_low, q_high = quantiles[None, :-1], quantiles[None, 1:]
    c_low, c_high = cumulative[:-1, None], cumulative[1:, None]
    # where the two intervals overlap the density has its kink: a square on the diagonal, and rectangles on either side
    start, end = np.clip(q_low, c_low, c_high), np.clip(q_high, c_low, c_high)
    width = end - start
    mass = (
        _square(width, b)
        + _rectangle(0.0, width, start - c_low, b)
        + _rectangle(0.0, width, c_high - end, b)
    )
    left, right = np.minimum(q_high, c_low), np.maximum(q_low, c_high)
    mass += _rectangle(c_low - left, np.maximum(left - q_low, 0.0), c_high - c_low, b)
    mass += _rectangle(right - c_high, np.maximum(q_high - right, 0.0), c_high - c_low, b)
    return mass / (c_high - c_low)


def _cumulative(probabilities: Floats) -> Floats:
    cumulative = np.concatenate([[0.0], np.cumsum(probabilities)])
    cumulative[-1] = 1.0
    return cumulative


def _rectangle(gap: Floats | float, width: Floats, height: Floats, b: float) -> Floats:
    """Return the integral of the Laplace(b) density of q - c over a rectangle that lies `gap` off the diagonal."""
    return b / 2 * np.exp(-gap / b) * np.expm1(-width / b) * np.expm1(-height / b)


def _square(width: Floats, b: float) -> Floats:
    """Return the integral of the Laplace(b) density of q - c over a square on the diagonal, w - b(1 - exp(-w/b))."""
    z = width / b
    series = z * z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5 * (1 - z / 6))))
    return b * np.where(z < 1e-3, series, z + np.expm1(-z))


def integer_weights(channel: Floats) -> Words:
    """Return a channel as whole numbers: uint64 of the same shape, each row summing to exactly 2**63."""
    if not (channel >= 0.0).all() or not np.isfinite(channel).all():
        raise ValueError("a channel has a negative probability, or one that is no number")
    total = 1 << TOTAL_BITS
    scaled = channel / channel.sum(axis=1, keepdims=True)
    weights: Words = np.floor(scaled * float(total)).astype(uint64)
    rows = np.arange(len(weights))
    largest = np.argmax(weights, axis=1)
    # modulo 2**64, so also when it is negative
    weights[rows, largest] += uint64(total) - weights.sum(axis=1, dtype=uint64)
    return weights


def exact_epsilon(weights: Words) -> Decimal:
    """Return ε* = max_j log(max_k w[k, j] / min_k w[k, j]), rounded up at the 50th digit.

    Levels that no row ever gives (a column of zeros) do not count; a level that only some rows give
    makes it infinite.
    """
    lows, highs, losses = _losses(weights)
    if not lows.all():
        return Decimal("Infinity")
    # no other level can have the greatest loss
    near = losses >= losses.max(initial=0.0) - 2 * _LOG_ERROR
    pairs = set(zip(lows[near].tolist(), highs[near].tolist(), strict=True))
    if not pairs:
        return Decimal(0)
    low, high = max(pairs, key=lambda pair: Fraction(pair[1], pair[0]))
    # operators round in the context of the moment, which is the caller's otherwise
    with localcontext(EXACT):
        return (Decimal(high).ln() - Decimal(low).ln() + Decimal("1e-50")).quantize(
            Decimal("1e-50"), rounding=ROUND_CEILING
        )


def is_private(weights: Words, epsilon: float) -> bool:
    """Return whether ε* is at most `epsilon`, exactly; without its 50 digits where it is clear.

    Parameters
    ----------
    weights
        uint64 array of shape (m, n), each row summing to 2**63.
    """
    lows, _, losses = _losses(weights)
    if not lows.all():
        return False
    distance = float(losses.max(initial=0.0)) - epsilon
    return (
        distance < 0.0
        if abs(distance) > _LOG_ERROR * max(1.0, epsilon)
        else exact_epsilon(weights) <= Decimal(epsilon)
    )


def _losses(weights: Words) -> tuple[Words, Words, Floats]:
    """Return the least and the greatest weight of each level whose rows differ, and the logarithm of their ratio."""
    lows, highs = weights.min(axis=0), weights.max(axis=0)
    lows, highs = lows[highs > lows], highs[highs > lows]
    with np.errstate(divide="ignore"):
        return lows, highs, np.log(highs.astype(np.float64)) - np.log(lows.astype(np.float64))


def repair_weights(channel: Floats, probabilities: Floats, epsilon: float) -> Words:
    """Return the whole-number weights of a channel whose ε* is at most `epsilon`, exactly.

    Where rounding left ε* above it, or an entry below 0, the channel is mixed with the constant
    channel 1·Qᵀ by the least power of two that brings it below, where Q = `probabilities` is the
    distribution of what the channel gives: mixing keeps both the rows and P·T = Q, which for P = Q
    is the invariance.
    """
    share, mixed = 2.0**-52, channel
    while (mixed < 0.0).any() or not is_private(weights := integer_weights(mixed), epsilon):
        mixed = (1.0 - share) * channel + share * probabilities[None, :]
        share = min(1.0, 2.0 * share)
    return weights


def alias_tables(weights: Words) -> tuple[Words, Shorts]:
    """Return exact alias tables for rows of whole-number weights (Walker 1977, Vose 1991, in integers).

    Parameters
    ----------
    weights
        uint64 array of shape (rows, s), s <= 2**16, rows summing to 2**63.

    Notes
    -----
    A word's lowest bit is ignored, its next `bits` bits pick a cell, and the remaining ones,
    compared with the cell's threshold, decide between the cell and its alias. Every outcome has
    exactly the probability weight / 2**63.
    """
    rows, s = weights.shape
    bits = max(1, (s - 1).bit_length())
    padded = np.zeros((rows, 1 << bits), dtype=uint64)
    if s == 1:
        return padded, np.zeros(padded.shape, dtype=np.uint16)
    padded[:, :s] = weights
    aliases = np.zeros(padded.shape, dtype=np.uint16)
    _fill_alias(padded, aliases, uint64(1 << (TOTAL_BITS - bits)))
    return padded, aliases


@jit
def _fill_alias(thresholds: Words, aliases: Shorts, capacity: uint64) -> None:
    rows, cells = thresholds.shape
    small = np.empty(cells, dtype=np.int64)
    large = np.empty(cells, dtype=np.int64)
    for row in range(rows):
        n_small, n_large = 0, 0
        for cell in range(cells):
            aliases[row, cell] = cell
            if thresholds[row, cell] < capacity:
                small[n_small] = cell
                n_small += 1
            else:
                large[n_large] = cell
                n_large += 1
        while n_small > 0:
            n_small -= 1
            poor, rich = small[n_small], large[n_large - 1]
            aliases[row, poor] = rich
            thresholds[row, rich] -= capacity - thresholds[row, poor]
            if thresholds[row, rich] < capacity:
                n_large -= 1
                small[n_small] = rich
                n_small += 1


@jit
def index_bits(thresholds: Words) -> int:
    """Return how many bits of a word name a column of the tables."""
    bits = 0
    while (1 << bits) < thresholds.shape[1]:
        bits += 1
    return bits


@jit
def draw(
    word: uint64,
    row: int,
    bits: int,
    thresholds: Words,
    aliases: Shorts,
) -> int:
    """Return the output level that a uniform word draws from one row of the tables; `bits` is `index_bits` of them."""
    rest = word >> uint64(1)
    cell = np.int64(rest & uint64(thresholds.shape[1] - 1))
    # read in any case: a branch that nobody can predict costs more
    alias = np.int64(aliases[row, cell])
    return int(cell if (rest >> uint64(bits)) < thresholds[row, cell] else alias)


_TOP_BITS = 16
# relative and absolute: many times the error of a quotient of two doubles and of its logarithm
_ROUNDING = 2.0**-48


class Tables(NamedTuple):
    """The alias tables of a channel, or of one for each parent's level: row b · n_levels + k is that of parent level b and own level k."""

    # Uint32 array of shape (n_rows, 2**bits): of each threshold the highest 16
    # bits, and then the alias.
    packed: Uint32s
    thresholds: Words
    aliases: Shorts


def make_tables(weights: Words) -> Tables:
    """Return the tables to draw from; `weights` is a uint64 array of shape ([n_parent_levels,] n_levels, n_levels)."""
    thresholds, aliases = alias_tables(weights.reshape(-1, weights.shape[-1]))
    shift = uint64(TOTAL_BITS - _TOP_BITS - index_bits(thresholds))
    # a threshold that no word reaches has a bit more
    highest = np.minimum(thresholds >> shift, uint64(2**_TOP_BITS - 1)).astype(np.uint32)
    return Tables((highest << np.uint32(_TOP_BITS)) | aliases, thresholds, aliases)


@jit
def sample(
    parents: Shorts,
    own: Int32s,
    words: Words,
    n_levels: int,
    tables: Tables,
) -> Shorts:
    """Return one output level for each row, drawn from the row's own level and the released level of its parent.

    Parameters
    ----------
    parents
        uint16 array of shape (n,): the parent's released levels; zeros for a column without one.
    own
        int32 array of shape (n,): the column's own levels, below `n_levels`.

    Notes
    -----
    The same levels as `channel.draw` gives for the same words. The packed tables decide, but for a
    row in 2**16 whose word agrees with the threshold in its highest bits.
    """
    packed, thresholds, aliases = tables
    bits = index_bits(thresholds)
    cells, shift = uint64(thresholds.shape[1] - 1), uint64(TOTAL_BITS - _TOP_BITS)
    out = np.empty(len(own), dtype=np.uint16)
    for i in range(len(own)):
        row = np.int64(parents[i]) * n_levels + own[i]
        rest = words[i] >> uint64(1)
        cell = np.int64(rest & cells)
        entry = uint64(packed[row, cell])
        highest, threshold = rest >> shift, entry >> uint64(_TOP_BITS)
        if highest == threshold:
            out[i] = draw(words[i], row, bits, thresholds, aliases)
        else:
            out[i] = uint64(cell) if highest < threshold else entry & uint64(2**_TOP_BITS - 1)
    return out


def losses(weights: Words) -> Floats:
    """Return log(max_k w[b, k, j] / min_k w[b, k, j]) for each parent level b and output j, rounded up."""
    lows, highs = weights.min(axis=1), weights.max(axis=1)
    low, high = lows.astype(np.float64), highs.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(high / low)
    bound = np.where(highs > lows, found * (1.0 + _ROUNDING) + _ROUNDING, 0.0)
    return np.where(highs == 0, -np.inf, bound)
