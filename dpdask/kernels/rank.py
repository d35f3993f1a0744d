"""The rank mechanism in whole numbers: discrete Laplace noise on ranks, and the map back to the reference distribution.

A row's rank i in 0..B-1 becomes w = i + e with e discrete Laplace, Pr(e) ∝ α^|e|. Everything after
w is post-processing: w is placed uniformly inside its own probability under uniform ranks, and read
through the inverse reference cdf, so the output has the reference distribution. e is built from
independent base-256 digits drawn from whole-number tables, so the distribution that is drawn from
is known exactly, and so is its epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import uint64

from dpdask.kernels.cdf import UNIT, guide, own_ranks, values_at
from dpdask.kernels.channel import TOTAL_BITS, alias_tables, integer_weights
from dpdask.kernels.jit import Flags, Floats, Ints, Shorts, Words, jit

N_CELLS = 2**16
MIN_EPSILON = 1e-6
MAX_EPSILON = 16.0
_BASE = 256
_MOST_POWERS = 2**17
TOGETHER = 2**10  # rows that go through all loops while they stay near the processor
_CLAMP_BITS = 10  # ranks beyond B by more than log(2**10)/-log(α) become one outcome
_TAIL_BITS = (
    24  # and what those outcomes gain from the noise's unresolved tail is below 2**-24 of them
)
_EXACT = Context(prec=50)

Tables = tuple[Words, Shorts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankNoise:
    """Discrete Laplace noise on the ranks 0..n_cells-1, as whole-number tables."""

    n_cells: int
    rate: float  # -log(α), the cost of one rank step
    margin: int
    sign: int  # uint64: e >= 0 with probability sign / 2**63
    # Uint64 array of shape (n_digits, 256): the distribution of each base-256 digit, least
    # significant first.
    weights: Words
    # An upper bound on ε*, the largest log ratio of any outcome's probabilities under two ranks.
    epsilon: float

    @property
    def scalars(self) -> dict[str, float]:
        """All attributes but the weights, by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "weights"}


def rank_noise(epsilon: float, n_cells: int = N_CELLS) -> RankNoise:
    """Return the noise on `n_cells` ranks whose ε* is as large as it can be without passing `epsilon`."""
    if not MIN_EPSILON <= epsilon <= MAX_EPSILON:
        raise ValueError(
            f"the rank mechanism takes an epsilon in [{MIN_EPSILON:g}, {MAX_EPSILON:g}]"
        )
    target = epsilon
    while target > epsilon / 2:
        noise = _tables(target / (n_cells - 1), n_cells)
        if noise.epsilon <= epsilon:
            return noise
        target -= 1.25 * (noise.epsilon - epsilon)
    raise ValueError(f"no rank noise on {n_cells} cells stays below epsilon {epsilon:g}")


@lru_cache(maxsize=128)
def _tables(rate: float, n_cells: int) -> RankNoise:
    margin = math.ceil(_CLAMP_BITS * math.log(2) / rate)
    resolved = margin + n_cells + math.ceil(_TAIL_BITS * math.log(2) / rate)
    n_digits = max(1, math.ceil(math.log(resolved + 1, _BASE)))
    digits = np.arange(_BASE, dtype=np.float64)
    weights = integer_weights(
        np.array([np.exp(-rate * float(_BASE) ** k * digits) for k in range(n_digits)])
    )
    weights.setflags(write=False)  # shared by all who ask again
    sign = round(2**TOTAL_BITS / (1 + math.exp(-rate)))
    with localcontext(_EXACT):
        epsilon = _bound(rate, n_cells, margin, resolved, sign, weights)
    return RankNoise(
        n_cells=n_cells, rate=rate, margin=margin, sign=sign, weights=weights, epsilon=epsilon
    )


def _bound(
    rate: float, n_cells: int, margin: int, resolved: int, sign: int, weights: Words
) -> float:
    """Return an upper bound on ε* of the noise that the rounded tables draw.

    Write log Pr(e) = const - rate·|e| + η(e). Ranks differ by at most B-1, so an outcome that is
    not clamped costs at most rate·(B-1) plus the range of η over the noise values resolved by the
    tables. A clamped outcome sums the tail from there on; what lies beyond the resolved values adds
    at most their share of it.
    """
    exact_rate = Decimal(rate)
    top = resolved // _BASE ** (len(weights) - 1)
    spread = abs(Decimal(2**TOTAL_BITS - sign).ln() - Decimal(sign).ln() + exact_rate)
    for k, row in enumerate(weights.tolist()):
        used = row[: top + 1] if k == len(weights) - 1 else row
        if min(used) == 0:
            return math.inf
        errors = [
            Decimal(weight).ln() + exact_rate * _BASE**k * digit
            for digit, weight in enumerate(used)
        ]
        spread += max(errors) - min(errors)
    beyond = Decimal(sum(weights[-1].tolist()[top + 1 :])) / 2**TOTAL_BITS
    smallest_tail = (-exact_rate * (margin + n_cells) - spread).exp() / 4
    unresolved = (-exact_rate * (resolved - margin - n_cells)).exp()
    # both tails of the clamped outcome: gained by what is beyond, lost by what is cut off
    tail = (1 + beyond / smallest_tail).ln() - (1 - unresolved).ln()
    return math.nextafter(float(exact_rate * (n_cells - 1) + spread + tail), math.inf)


def digit_tables(noise: RankNoise) -> Tables:
    """Return the alias tables of the noise's digits, each of shape (n_digits, 256)."""
    return alias_tables(noise.weights)


def words_per_row(noise: RankNoise) -> int:
    """Return how many 64-bit words `privatise` consumes for one row."""
    return len(noise.weights) + 3


def privatise(
    values: Floats,
    is_null: Flags,
    words: Words,
    x: Floats,
    c: Floats,
    noise: RankNoise,
    tables: Tables,
    *,
    lattice: bool,
) -> tuple[Floats, Flags]:
    """Return a randomised value, or null, for each value.

    Parameters
    ----------
    words
        uint64 array of shape (n, n_digits + 3), uniform and independent.
    x, c
        The knots of the continualised reference cdf; null holds the ranks below c[0].
    """
    ranks = own_ranks(values, is_null, words[:, 0], x, c, lattice)
    return values_at(disturb(ranks, words, noise, tables), x, c, guide(c), lattice)


def disturb(ranks: Floats, words: Words, noise: RankNoise, tables: Tables) -> Floats:
    """Return ranks with noise: uniform ones become uniform ones."""
    return disturb_rows(ranks, words, make_draws(noise, tables))


class Draws(NamedTuple):
    """What noise is drawn from, as kernels take it."""

    n_cells: int
    rate: float
    margin: int
    sign: uint64
    thresholds: Words
    aliases: Shorts
    # Powers of α by two look-ups and a product: α^k is coarse[k // 256] · fine[k % 256]; `coarse`
    # is empty where that takes too much memory.
    coarse: Floats
    fine: Floats


def make_draws(noise: RankNoise, tables: Tables) -> Draws:
    """Return what noise is drawn from."""
    powers = _powers(noise.rate, noise.n_cells + noise.margin)
    return Draws(noise.n_cells, noise.rate, noise.margin, uint64(noise.sign), *tables, *powers)


@lru_cache(maxsize=16)
def _powers(rate: float, most: int) -> tuple[Floats, Floats]:
    """Return the powers α^k for k up to `most`."""
    n_coarse = most // _BASE + 1
    return np.exp(-rate * _BASE * np.arange(n_coarse if n_coarse <= _MOST_POWERS else 0)), np.exp(
        -rate * np.arange(_BASE)
    )


@jit
def disturb_rows(ranks: Floats, words: Words, draws: Draws) -> Floats:
    """Return ranks with noise; digits are drawn from words 1..n_digits, the sign and the place from the next two.

    Notes
    -----
    A block of rows goes through one simple loop after another: a compiler turns them into vector
    instructions, but not one long loop. No draw decides a branch, since nobody can predict which
    one. Indices that come from words are unsigned, since numba looks for negative ones otherwise.
    """
    out, room = np.empty(len(ranks)), make_room()
    for start in range(0, len(ranks), TOGETHER):
        rows = slice(start, min(start + TOGETHER, len(ranks)))
        disturb_block(ranks[rows], words[rows], draws, room, out[rows])
    return out


class Room(NamedTuple):
    """What `disturb_block` finds of at most `TOGETHER` rows on its way: made once, since new arrays cost time."""

    magnitudes: Words
    noisy: Ints
    near: Floats
    far: Floats


@jit
def make_room() -> Room:
    """Return the room that `disturb_block` needs."""
    near, far = np.empty(TOGETHER), np.empty(TOGETHER)
    return Room(np.empty(TOGETHER, uint64), np.empty(TOGETHER, np.int64), near, far)


@jit
def disturb_block(ranks: Floats, words: Words, draws: Draws, room: Room, out: Floats) -> None:
    """Find the noisy ranks of at most `TOGETHER` rows; `out` is changed, and may be `ranks`."""
    magnitudes, noisy, near, far = room
    n_cells, rate, margin, n_digits = draws.n_cells, draws.rate, draws.margin, len(draws.thresholds)
    one, byte, low_byte, last = uint64(1), uint64(8), uint64(255), n_cells - 1
    # a number from the digits' tables, the most significant digit first
    magnitudes[: len(words)] = 0
    for place in range(n_digits):
        digit = n_digits - 1 - place
        thresholds, aliases = draws.thresholds[digit], draws.aliases[digit]
        drawn = words[:, digit + 1]
        for row in range(len(drawn)):
            word = drawn[row] >> one
            entry = word & low_byte
            alias = uint64(aliases[entry])
            chosen = alias + (entry - alias) * uint64((word >> byte) < thresholds[entry])
            magnitudes[row] = (magnitudes[row] << byte) + chosen
    # the noisy rank w in whole numbers, clamped: -1 - magnitude is added where the sign is negative
    signs, places = words[:, n_digits + 1], words[:, n_digits + 2]
    for row in range(len(ranks)):
        is_negative = np.int64((signs[row] >> one) >= draws.sign)
        rank = min(max(int(n_cells * ranks[row]), 0), last)
        w = rank + int(np.int64(magnitudes[row]) ^ -is_negative)
        noisy[row] = min(max(w, -margin), last + margin)
    # powers of α: of the distance from 0..n_cells-1 if w lies outside, else of those from both ends
    coarse, fine = draws.coarse, draws.fine
    tabulated = len(coarse) > 0
    for row in range(len(ranks)):
        w = noisy[row]
        beyond = max(-1 - w, w - n_cells)  # how far outside; negative inside
        inside = int(beyond < 0)
        low, high = uint64(beyond + (w - beyond) * inside), uint64((last - w) * inside)
        if tabulated:
            near[row] = coarse[low >> byte] * fine[low & low_byte]
            far[row] = coarse[high >> byte] * fine[high & low_byte]
        else:
            near[row], far[row] = math.exp(-rate * low), math.exp(-rate * high)
    # w is placed uniformly inside its own probability under uniform ranks: with
    # k = α / ((1-α)(1+α)), Pr(i + e <= w) is (w + 1 + k(α^(w+1) - α^(n-1-w))) / n for w in -1..n-1,
    # and a geometric tail on either side
    a = math.exp(-rate)
    k = a / (-math.expm1(-rate) * (1.0 + a))
    tail, step = k * -math.expm1(-rate * n_cells) / n_cells, 1.0 / n_cells
    for row in range(len(ranks)):
        w, near_power, far_power = noisy[row], near[row], far[row]
        is_inside = max(-1 - w, w - n_cells) < 0
        outer = tail * near_power
        inner = outer * a
        below, above = (inner, outer) if w < 0 else (1.0 - outer, 1.0 - inner)
        below = (w + k * (near_power - far_power * a)) * step if is_inside else below
        above = (w + 1 + k * (near_power * a - far_power)) * step if is_inside else above
        below = 0.0 if w == -margin else below
        above = 1.0 if w == last + margin else above
        uniform = ((places[row] >> uint64(11)) + 0.5) * UNIT
        out[row] = below + (above - below) * uniform
