"""The cells of a histogram whose noisy count reaches a threshold, without drawing the noise of the empty cells that do not.

Each of m empty cells has discrete Laplace noise e, Pr(e) ∝ α^|e|, α = exp(-1/scale), and is released if e >= t >= 1. So the
number released is Binomial(m, α^t / (1 + α)), any set of so many cells is as likely as another, and the values are t plus
independent geometric numbers. Nothing here is decided by a floating-point number.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpdask.privacy import noise
from dpdask.stats.joint import merge_cells
from dpdask.streams import Rng, RunKey, Stream, stream, words

Counts = NDArray[np.int64]

_DIGITS = Context(prec=200)
_FIXED = 384  # bits after the point of the binomial weights, relative to the largest
_FLOOR = 1 << 64  # weights below are left out: at most 2**-300 of them all
_ODDS = 1024
_GROUP = 1000  # cells of one count: fewer are as soon drawn one by one
_MAX_GROUPS = 1000


def compute_tail(scale: float, cut: int) -> float:
    """Return Pr(e >= cut) = α^cut / (1 + α) for discrete Laplace noise, cut at least 1, to double precision.

    Parameters
    ----------
    scale
        The scale of the noise.
    cut
        The threshold.
    """
    return math.exp(-cut / scale) / (1.0 + math.exp(-1.0 / scale))


def least_cut(n_cells: int, scale: float, most: float) -> int:
    """Return the least threshold, at least 1, that at most `most` of `n_cells` empty cells are expected to reach by noise alone.

    Parameters
    ----------
    n_cells
        The number of empty cells.
    scale
        The scale of the noise.
    most
        The most cells that may be expected to reach the threshold.
    """
    cut = max(1, math.ceil(scale * (math.log(n_cells / most) - math.log1p(math.exp(-1.0 / scale)))))
    while n_cells * compute_tail(scale, cut) > most:  # correct for rounding
        cut += 1
    return cut


def compute_excess_mean(scale: float) -> float:
    """Return E(e - cut | e >= cut) = α / (1 - α), for any cut at least 0."""
    return 1.0 / math.expm1(1.0 / scale)


def open_secure_stream() -> Stream:
    """Return a stream under a fresh key of the operating system that nobody keeps."""
    return stream(RunKey.fresh(), "histogram", "empty cells")


def draw_kept(keys: Counts, counts: Counts, n_cells: int, scale: float, cut: int, *, rng: Rng | None = None) -> tuple[Counts, Counts]:
    """Return the cells whose noisy count reaches a threshold, and that count.

    Parameters
    ----------
    keys, counts
        int64 arrays of one shape: the occupied cells, increasing, and their counts, at least 1.
    n_cells
        How many cells there are, at most 2**62.
    scale
        The scale of the discrete Laplace noise.
    cut
        The threshold, at least 1.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so, and to redraw what is already released.

    Returns
    -------
    keys, weights
        int64 arrays of one shape; keys increasing, which tells nothing of who was occupied; weights at least `cut`.

    Privacy
    -------
    The distribution is that of a histogram with noise in every cell, cut afterwards, so ε is the same; unit, adjacency and
    sensitivity are the caller's event's. The distribution of how many cells are raised is held to 2**-256 in total variation, that
    of which, and of their values, exactly, given uniform words. The words are AES-128 in counter mode under a key from the
    operating system, the values OpenDP's. No δ is charged for either, as for none of the package's random numbers.

    Notes
    -----
    What holds for empty cells holds for all that have the same count below the threshold, at t less that count: they are
    raised together too, and the time taken is that of what is released. It still tells a little of the counts to whoever
    can watch the run; the noise does not hide that.

    References
    ----------
    Cormode, Procopiuc, Srivastava and Tran, Differentially private summaries for sparse data (2012), section 4, with exact
    draws in place of floating-point ones (Mironov 2012).
    """
    source = open_secure_stream() if rng is None else rng
    n_empty = n_cells - len(keys)
    ranks = _raise_counts(n_empty, scale, cut, source)
    # the r-th empty cell stands behind all occupied ones that have at most r empty cells before them
    empty = ranks + np.searchsorted(keys - np.arange(len(keys)), ranks, side="right")
    alone = np.ones(len(keys), dtype=np.bool_)
    together = [np.empty(0, dtype=np.int64)]
    for count in np.flatnonzero(np.bincount(counts[counts < min(cut, _MAX_GROUPS)]) >= _GROUP):
        group = np.flatnonzero(counts == count)
        alone[group] = False
        together.append(keys[group[_raise_counts(len(group), scale, cut - int(count), source)]])
    noisy = noise.discrete_laplace(counts[alone], scale, rng=rng)
    place = np.concatenate([*together, keys[alone][noisy >= cut]])
    n_together = len(place) - int((noisy >= cut).sum())
    weight = np.concatenate([cut + _geometric(n_together, scale, rng=rng), noisy[noisy >= cut]])
    order = np.argsort(place)
    return merge_cells(empty, cut + _geometric(len(empty), scale, rng=rng), place[order], weight[order])


def _raise_counts(n: int, scale: float, least: int, rng: Rng) -> Counts:
    """Return which of n cells have noise of at least `least`, itself at least 1: increasing, int64."""
    return _distinct_below(rng, draw_binomial(n, scale, least, rng=rng), n)


def draw_binomial(n_trials: int, scale: float, cut: int, *, rng: Rng) -> int:
    """Return a draw of Binomial(n_trials, Pr(e >= cut)), by inversion in whole numbers.

    Parameters
    ----------
    n_trials
        The number of trials.
    scale, cut
        As for `compute_tail`.
    rng
        A stream.

    Notes
    -----
    The weights follow from w(k+1) / w(k) = (n-k)/(k+1) · p/(1-p), begun at the mode with 2**384 and cut off below 2**64;
    p/(1-p) = α^t / (1 + α - α^t) is known to 200 digits. Rounding moves each weight by less than its distance from the
    mode, in units of 2**-384 of the largest. About 42 standard deviations of weights are computed: 0.3 s for a mean of 10⁷.
    """
    odds = _odds(scale, cut)
    if n_trials == 0 or odds < Decimal(2) ** -512:  # then the probability of any is below 2**-449
        return 0
    ratio = int(_DIGITS.multiply(odds, Decimal(1 << _ODDS)))
    mode = (n_trials + 1) * ratio // ((1 << _ODDS) + ratio)
    up: list[int] = [1 << _FIXED]
    down: list[int] = []
    k = mode
    while k < n_trials and up[-1] >= _FLOOR:
        up.append(up[-1] * (n_trials - k) * ratio // ((k + 1) << _ODDS))
        k += 1
    k, weight = mode, up[0]
    while k > 0 and weight >= _FLOOR:
        weight = ((weight * k) << _ODDS) // ((n_trials - k + 1) * ratio)
        down.append(weight)
        k -= 1
    return k + _choose_cells(down[::-1] + up, rng)


@lru_cache(maxsize=128)
def _odds(scale: float, cut: int) -> Decimal:
    """Return p / (1 - p) to 200 digits; the float scale is the fraction that it is."""
    exact = Decimal(scale)
    alpha, power = (_DIGITS.exp(_DIGITS.divide(Decimal(-j), exact)) for j in (1, cut))
    return _DIGITS.divide(power, _DIGITS.subtract(_DIGITS.add(Decimal(1), alpha), power))


def _choose_cells(weights: list[int], rng: Rng) -> int:
    """Return an index with probability proportional to its weight, exactly."""
    total = sum(weights)
    n_bits = total.bit_length()
    n_words = n_bits // 64 + 1
    drawn: int = total
    while drawn >= total:
        drawn = int.from_bytes(words(rng, n_words).tobytes(), "little") >> (64 * n_words - n_bits)
    for index, weight in enumerate(weights):
        drawn -= weight
        if drawn < 0:
            return index
    raise AssertionError("the weights sum to their total")


def draw_uniform_below(rng: Rng, n: int, bound: int) -> Counts:
    """Return n independent whole numbers, exactly uniform on 0..bound-1; bound within 1 to 2**62.

    Parameters
    ----------
    rng
        A stream.
    n
        How many.
    bound
        The first number that is not drawn.
    """
    shift = np.uint64(64 - max(1, (bound - 1).bit_length()))
    found = np.empty(0, dtype=np.int64)
    while len(found) < n:  # a word is taken with probability above 1/2
        missing = n - len(found)
        drawn = (words(rng, missing + missing // 8 + 16) >> shift).astype(np.int64)
        found = np.concatenate([found, drawn[drawn < bound][:missing]])
    return found


def _distinct_below(rng: Rng, n: int, bound: int) -> Counts:
    """Return n distinct whole numbers below a bound, every set as likely as another: the first n that a uniform sequence shows."""
    found = np.empty(0, dtype=np.int64)
    while len(found) < n:
        found = np.concatenate([found, draw_uniform_below(rng, n - len(found), bound)])
        found.sort(kind="stable")  # quick: all but the end is sorted already
        found = found[np.diff(found, prepend=-1) > 0]
    return found


def _geometric(n: int, scale: float, *, rng: Rng | None) -> Counts:
    """Return n independent numbers k >= 0 with Pr(k) ∝ α^k: discrete Laplace noise folded at -1/2, both halves being geometric."""
    drawn = noise.discrete_laplace(np.zeros(n, dtype=np.int64), scale, rng=rng)
    return drawn ^ (drawn >> 63)
