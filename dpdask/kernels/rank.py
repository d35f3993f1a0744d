"""The rank mechanism in whole numbers: discrete Laplace noise on ranks, and the way back to an undisturbed distribution.

A row's rank i in 0..B-1 becomes w = i + e with e discrete Laplace, Pr(e) ∝ α^|e|. Everything after w is post-processing:
w is placed uniformly inside its own probability under uniform ranks, and read through the inverse reference cdf, so the
output has the reference distribution. e is built from independent base-256 digits drawn from whole-number tables, so the
law that is drawn from is known exactly, and so is its epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

from dpdask.kernels.channel import TOTAL_BITS, alias_tables, integer_weights
from dpdask.kernels.jit import jit

N_CELLS = 2**16
MAX_EPSILON = 16.0
_BASE = 256
_CLAMP_BITS = 10  # ranks beyond B by more than log(2**10)/-log(α) become one outcome
_TAIL_BITS = 24  # and what those outcomes gain from the noise's unresolved tail is below 2**-24 of them
_EXACT = Context(prec=50)

Floats = NDArray[np.float64]
Weights = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNoise:
    """Discrete Laplace noise on the ranks 0..n_cells-1, as whole-number tables.

    Attributes
    ----------
    n_cells
        B, the number of ranks.
    rate
        -log(α), what one rank step costs.
    margin
        M: w is clamped to -M..B-1+M.
    sign
        uint64: e >= 0 with probability sign / 2**63.
    weights
        uint64 array of shape (n_digits, 256): the law of each base-256 digit, least significant first.
    epsilon
        An upper bound on ε*, the largest log ratio of any outcome's probabilities under two ranks.
    """

    n_cells: int
    rate: float
    margin: int
    sign: int
    weights: Weights
    epsilon: float


def rank_noise(epsilon: float, n_cells: int = N_CELLS) -> RankNoise:
    """Return the noise on `n_cells` ranks whose ε* is as large as it can be without passing `epsilon`.

    Raises
    ------
    ValueError
        If `epsilon` is not in (0, 16]: above it, the tables could no longer resolve the tail.
    """
    if not 0 < epsilon <= MAX_EPSILON:
        raise ValueError(f"the rank mechanism takes an epsilon in (0, {MAX_EPSILON:g}]")
    target = epsilon
    for _ in range(50):
        noise = _tables(target / (n_cells - 1), n_cells)
        if noise.epsilon <= epsilon:
            return noise
        target -= 1.25 * (noise.epsilon - epsilon)
    raise ValueError(f"no rank noise stays below epsilon {epsilon:g}")


def _tables(rate: float, n_cells: int) -> RankNoise:
    margin = math.ceil(_CLAMP_BITS * math.log(2) / rate)
    resolved = margin + n_cells + math.ceil(_TAIL_BITS * math.log(2) / rate)
    n_digits = max(1, math.ceil(math.log(resolved + 1, _BASE)))
    digits = np.arange(_BASE, dtype=np.float64)
    weights = integer_weights(np.array([np.exp(-rate * float(_BASE) ** k * digits) for k in range(n_digits)]))
    sign = round(2**TOTAL_BITS / (1 + math.exp(-rate)))
    epsilon = _bound(rate, n_cells, margin, resolved, sign, weights)
    return RankNoise(n_cells=n_cells, rate=rate, margin=margin, sign=sign, weights=weights, epsilon=epsilon)


def _bound(rate: float, n_cells: int, margin: int, resolved: int, sign: int, weights: Weights) -> float:
    """Return an upper bound on ε* of the noise that the tables really draw.

    Write log Pr(e) = const - rate·|e| + η(e). Ranks differ by at most B-1, so an outcome that is not clamped costs at
    most rate·(B-1) plus the range of η over the noise values resolved by the tables. A clamped outcome sums the tail
    from there on; what lies beyond the resolved values adds at most their share of it.
    """
    exact_rate = Decimal(rate)
    top = resolved // _BASE ** (len(weights) - 1)
    spread = abs(_ln(2**TOTAL_BITS - sign) - _ln(sign) + exact_rate)
    for k, row in enumerate(weights.tolist()):
        used = row[: top + 1] if k == len(weights) - 1 else row
        if min(used) == 0:
            return math.inf
        errors = [_ln(weight) + exact_rate * _BASE**k * digit for digit, weight in enumerate(used)]
        spread += max(errors) - min(errors)
    beyond = Decimal(sum(weights[-1].tolist()[top + 1 :])) / 2**TOTAL_BITS
    smallest_tail = _EXACT.exp(-exact_rate * (margin + n_cells) - spread) / 4
    unresolved = _EXACT.exp(-exact_rate * (resolved - margin - n_cells))
    # both tails of the clamped outcome: gained by what is beyond, lost by what is cut off
    tail = _EXACT.ln(1 + beyond / smallest_tail) - _EXACT.ln(1 - unresolved)
    return math.nextafter(float(exact_rate * (n_cells - 1) + spread + tail), math.inf)


def _ln(whole: int) -> Decimal:
    return _EXACT.ln(Decimal(whole))


@jit
def uniform_noise_cdf(w: int, rate: float, n_cells: int) -> float:
    """Return Pr(i + e <= w) for i uniform on 0..n_cells-1 and e discrete Laplace with rate -log(α)."""
    if w > n_cells - 2:
        return 1.0 - uniform_noise_cdf_below(n_cells - 2 - w, rate, n_cells) if w > n_cells - 1 else 1.0 - uniform_noise_cdf_below(-1, rate, n_cells)
    if w < 0:
        return uniform_noise_cdf_below(w, rate, n_cells)
    a = math.exp(-rate)
    k = a / (-math.expm1(-rate) * (1.0 + a))
    return (w + 1 + k * (math.exp(-rate * (w + 1)) - math.exp(-rate * (n_cells - 1 - w)))) / n_cells


@jit
def uniform_noise_cdf_below(w: int, rate: float, n_cells: int) -> float:
    """Return the same for w < 0, where it is a geometric tail."""
    a = math.exp(-rate)
    return math.exp(rate * w) * -math.expm1(-rate * n_cells) / (-math.expm1(-rate) * (1.0 + a) * n_cells)


def digit_tables(noise: RankNoise) -> tuple[Weights, NDArray[np.uint16]]:
    """Return the alias tables of the noise's digits, each of shape (n_digits, 256)."""
    return alias_tables(noise.weights)


def words_per_row(noise: RankNoise) -> int:
    """Return how many 64-bit words `privatise` consumes for one row."""
    return len(noise.weights) + 3


@jit
def rank_interval(value: float, x: Floats, c: Floats, lattice: bool) -> tuple[float, float]:
    """Return the interval of ranks that a value stands for under the continualised cdf (x, c).

    An atom stands for its jump; a whole number v of a lattice for (C(v-1), C(v)]; another number that is a knot for the
    linear piece that ends there; and any other for the single rank C(value).
    """
    left = np.searchsorted(x, value, side="left")
    right = np.searchsorted(x, value, side="right")
    if right - left > 1:
        return c[left], c[right - 1]
    high = c[left] if right > left else _between(value, left, x, c)
    if lattice:
        below = np.searchsorted(x, value - 1.0, side="right")
        known = below > 0 and x[below - 1] == value - 1.0
        return c[below - 1] if known else _between(value - 1.0, below, x, c), high
    if right > left and left > 0:
        return c[left - 1], high
    return high, high


@jit
def _between(value: float, right: int, x: Floats, c: Floats) -> float:
    """Return C(value) for a value that is no knot; `right` is the first knot above it."""
    if right == 0:
        return c[0]
    if right == len(x):
        return c[-1]
    return c[right - 1] + (c[right] - c[right - 1]) * ((value - x[right - 1]) / (x[right] - x[right - 1]))


@jit
def value_at(rank: float, x: Floats, c: Floats, lattice: bool) -> float:
    """Return the inverse of the continualised cdf at a rank in (c[0], 1], as a whole number for a lattice."""
    k = min(max(np.searchsorted(c, rank, side="left"), 1), len(c) - 1)
    width = c[k] - c[k - 1]
    share = (rank - c[k - 1]) / width if width > 0 else 1.0
    value = x[k - 1] + (x[k] - x[k - 1]) * min(max(share, 0.0), 1.0)
    return math.ceil(value) if lattice else value


@jit
def privatise(
    values: Floats,
    is_null: NDArray[np.bool_],
    words: Weights,
    x: Floats,
    c: Floats,
    lattice: bool,
    n_cells: int,
    rate: float,
    margin: int,
    sign: np.uint64,
    thresholds: Weights,
    aliases: NDArray[np.uint16],
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a randomised value, or null, for each value.

    Parameters
    ----------
    values, is_null
        float64 and bool arrays of shape (n,).
    words
        uint64 array of shape (n, n_digits + 3), uniform and independent.
    x, c
        The knots of the continualised reference cdf; null holds the ranks below c[0].
    lattice
        Whether values are whole numbers.
    n_cells, rate, margin, sign
        Of the `RankNoise`.
    thresholds, aliases
        From `digit_tables`.

    Returns
    -------
    values, is_null
        Of the same shapes.
    """
    n_digits = len(thresholds)
    unit = 1.0 / 9007199254740992.0  # 2**-53
    out = np.empty(len(values), dtype=np.float64)
    out_null = np.zeros(len(values), dtype=np.bool_)
    for row in range(len(values)):
        low, high = 0.0, c[0]
        if not is_null[row]:
            low, high = rank_interval(values[row], x, c, lattice)
        uniform = (words[row, 0] >> np.uint64(11)) * unit
        rank = min(int(n_cells * (low + uniform * (high - low))), n_cells - 1)
        noise = 0
        for k in range(n_digits - 1, -1, -1):
            word = words[row, k + 1] >> np.uint64(1)
            cell = np.int64(word & np.uint64(255))
            noise = noise * 256 + (cell if (word >> np.uint64(8)) < thresholds[k, cell] else np.int64(aliases[k, cell]))
        if (words[row, n_digits + 1] >> np.uint64(1)) >= sign:
            noise = -1 - noise
        w = min(max(rank + noise, -margin), n_cells - 1 + margin)
        below = 0.0 if w == -margin else uniform_noise_cdf(w - 1, rate, n_cells)
        above = 1.0 if w == n_cells - 1 + margin else uniform_noise_cdf(w, rate, n_cells)
        place = ((words[row, n_digits + 2] >> np.uint64(11)) + 0.5) * unit
        released = below + (above - below) * place
        out_null[row] = released < c[0]
        out[row] = 0.0 if out_null[row] else value_at(released, x, c, lattice)
    return out, out_null
