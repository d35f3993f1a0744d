"""The channel of a column of very many levels: a window of ranks on a circle, beside levels that stand alone. Its matrix is never made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, localcontext
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy import uint64

from dpdask.arrays import Floats, Indices, Int32s, Shorts, Words
from dpdask.kernels.channel import EXACT, TOTAL_BITS, draw, index_bits, integer_weights
from dpdask.kernels.jit import jit

TOTAL = 1 << TOTAL_BITS
_CIRCLE_BITS = 61  # so that three distances on the circle can be added in a word
_LARGEST = 20.0  # ε beyond which nearly every value stays, and rounding would show
_FINEST = 1e-6  # the least part of a row's window, of the largest that ε allows
_N_WIDTHS, _N_SHARES = 256, 128  # that are tried


class RankWindow(NamedTuple):
    """The whole numbers that are drawn from; the arrays are uint64, of shape (n_levels,).

    A draw is *apart* from the value with the probability `chance` / 2**63, and gives level j with
    `apart[j]` / 2**63. Otherwise a level k of no mass stays with `stays[k]` / 2**63, or becomes the
    level of any place of the circle; and a level that has some is at a random one of its places and
    goes to one of the 2**bits places around it. Levels lie on the circle in their order.
    """

    chance: int
    apart: Words
    stays: Words
    masses: Words  # how many places of the circle each level has; 0 where it stands alone
    bits: int


class Design(NamedTuple):
    """How many of the most frequent levels stand alone, how wide the window is, and what that keeps."""

    n_alone: int
    width: float  # the part of each row's window, as a draw apart from the value falls into it
    kept: float  # the share of rows that stay as they are


def bound_kept(probabilities: Floats, epsilon: float) -> float:
    """Return the share of rows that no ε-private channel that keeps the distribution can exceed."""
    return float((probabilities * keep_at_most(probabilities, epsilon)).sum())


def keep_at_most(shares: Floats, epsilon: float) -> Floats:
    """Return the probability that a level of each share stays, at most, in an ε-private channel that keeps the distribution."""
    return shares / (shares + math.exp(-epsilon) * (1.0 - shares))


def find_design(falling: Floats, epsilon: float) -> Design:
    """Return the design that keeps most; see docs/explanation/math.md, Channels.

    Parameters
    ----------
    falling
        The positive probabilities, from the largest on, summing to 1.
    """
    growth = math.expm1(min(epsilon, _LARGEST))
    n, top = len(falling), 1.0 / (1.0 + growth)
    parts = falling**2 / (1.0 + growth * falling)
    owned = np.cumsum(parts) - parts
    left = np.cumsum(falling[::-1])[::-1]
    best = Design(0, top, float(falling @ falling))  # a draw that does not look at the value
    counts = np.unique(np.geomspace(1, n, _N_SHARES).astype(np.intp)) - 1
    low, high = _FINEST * top, top
    for _ in range(2):
        widths = np.geomspace(low, high, _N_WIDTHS)
        kept = _measure_kept(falling, growth, counts, widths[:, None])
        row, column = divmod(int(np.argmax(kept)), len(counts))
        if kept[row, column] > best.kept:
            best = Design(int(counts[column]), float(widths[row]), float(kept[row, column]))
        low, high = widths[max(row - 1, 0)], widths[min(row + 1, _N_WIDTHS - 1)]
        # the widest window of each number of levels alone: no grid finds it where the others are very rare
        room = (1.0 - 1e-12) / (1.0 + growth)
        widest: Floats = room * (left[counts] + growth * owned[counts])
        kept = np.diagonal(_measure_kept(falling, growth, counts, widest[:, None]))
        if kept.max() > best.kept:
            place = int(np.argmax(kept))
            best = Design(int(counts[place]), float(widest[place]), float(kept[place]))
        near = best.n_alone + np.arange(-_N_SHARES, _N_SHARES)
        counts = near[(near >= 0) & (near < n)]
    return best


def _measure_kept(falling: Floats, growth: float, counts: Indices, widths: Floats) -> Floats:
    """Return what each number of levels alone keeps with each width; minus infinity where no level's places fit into the window."""

    def add(values: Floats) -> Floats:
        return np.concatenate([[0.0], np.cumsum(values)])

    def rest(values: Floats) -> Floats:
        return np.cumsum(values[::-1])[::-1]

    single = counts == len(falling) - 1  # on the circle, where every place is its own
    own = falling / (1.0 + growth * falling)
    shares, owned = add(falling), add(falling * own)
    whole = add((1.0 + growth) * falling * own)
    left, squares = rest(falling)[counts], rest(falling**2)[counts]
    # levels whose own part would be more than the window
    wide = np.searchsorted(-own, -widths[:, 0])[:, None]
    n_wide = np.minimum(wide, counts)
    stay = widths * shares[n_wide] + owned[counts] - owned[n_wide]
    measure = left - growth * (widths - stay)
    kept = (
        (1.0 - growth * widths) * add(falling**2)[n_wide]
        + growth * widths * shares[n_wide]
        + whole[counts]
        - whole[n_wide]
        + np.where(
            single,
            left * (measure + growth * widths),
            (1.0 + growth) * measure / left * squares,
        )
    )
    fits = (2.0 * falling[counts] * measure <= widths * left) | single
    fits &= measure >= widths
    return np.where(fits, kept, -np.inf)


def make_window(probabilities: Floats, design: Design, epsilon: float) -> RankWindow:
    """Return the whole numbers of a design, whose loss is at most ε, exactly.

    Parameters
    ----------
    probabilities
        float64 array of shape (n_levels,), summing to 1; zeros are levels that were never seen.
    """
    epsilon = min(epsilon, _LARGEST)
    slack, made = 2.0**-40, _round(probabilities, design, epsilon)
    while bound_loss(made) > Decimal(epsilon):  # by what rounding added
        made = _round(probabilities, design, epsilon - slack)
        slack = min(4.0 * slack, epsilon)
    return made


def _round(probabilities: Floats, design: Design, epsilon: float) -> RankWindow:
    growth, width = math.expm1(epsilon), design.width
    is_alone = np.zeros(len(probabilities), dtype=np.bool_)
    is_alone[np.argsort(-probabilities, kind="stable")[: design.n_alone]] = True
    alone, others = (np.where(each, probabilities, 0.0) for each in (is_alone, ~is_alone))
    own = np.minimum(width, alone / (1.0 + growth * alone))
    left = others.sum()
    measure = left - growth * (width - float(alone @ own))
    apart = np.where(is_alone, alone * (1.0 - growth * own), others * (measure / left))
    share = min(width / measure, 1.0)
    bits = math.floor(_CIRCLE_BITS + math.log2(share))
    masses = np.rint(others / left * (2.0**bits / share)).astype(uint64)
    lacking = (1 << bits) - int(masses.sum())
    if lacking > 0:  # the window is the whole circle, which rounding made shorter
        masses[np.argmax(masses)] += uint64(lacking)
    stays = np.minimum(np.rint(own / width * float(TOTAL)), float(TOTAL)).astype(uint64)
    chance = round(Fraction(1.0 - growth * width) * TOTAL)
    return RankWindow(chance, integer_weights(apart[None, :])[0], stays, masses, bits)


def bound_loss(window: RankWindow) -> Decimal:
    """Return an upper bound on ε*, exact but for 2**-64 of a probability, rounded up at the 50th digit.

    Notes
    -----
    Level j has at least the probability `chance` · `apart[j]`, whatever the value is. To it comes at
    most (2**63 - `chance`) · `stays[j]`, or for a level on the circle the part of the window that it
    fills: a place is reached from 2**bits places at most, so with at most 2**-bits however the place
    of the value is drawn. A place of the whole circle is drawn from one word, to 2**-64.
    """
    seen = np.flatnonzero((window.masses > 0) | (window.stays > 0) | (window.apart > 0))
    apart = window.apart[seen]
    if not apart.all() or window.chance <= 0:
        return Decimal("Infinity")
    filled = np.minimum(window.masses[seen].astype(np.float64) * 2.0**-window.bits, 1.0)
    filled += np.where(window.masses[seen] > 0, 2.0**-64, 0.0)  # as below: rare levels feel it
    added = np.maximum(window.stays[seen].astype(np.float64) / TOTAL, filled) / apart
    near = np.unique(seen[added >= added.max() * (1.0 - 1e-9)])
    loss = max(
        max(
            Fraction(int(window.stays[j]), TOTAL),
            min(Fraction(int(window.masses[j]), 1 << window.bits), Fraction(1)) + Fraction(1, 2**64)
            if window.masses[j]
            else Fraction(0),
        )
        / int(window.apart[j])
        for j in near.tolist()
    )
    ratio = 1 + Fraction(TOTAL - window.chance, window.chance) * TOTAL * loss
    with localcontext(EXACT):
        found = Decimal(ratio.numerator).ln() - Decimal(ratio.denominator).ln() + Decimal("1e-50")
        return found.quantize(Decimal("1e-50"), rounding=ROUND_CEILING)


def read_window(shown: Mapping[str, Any]) -> RankWindow:
    """Return the window of a release card, whose numbers have 53 bits."""
    bits = math.floor(_CIRCLE_BITS + math.log2(shown["width"]))
    masses = np.rint(np.array(shown["circle"]) * (2.0**bits / shown["width"]))
    apart, stays = (np.rint(np.array(shown[name]) * TOTAL) for name in ("apart", "stays"))
    return RankWindow(
        chance=round(shown["chance"] * TOTAL),
        apart=apart.astype(uint64),
        stays=stays.astype(uint64),
        masses=masses.astype(uint64),
        bits=bits,
    )


@jit
def _high(word: uint64, factor: uint64) -> uint64:
    """Return the upper 64 bits of a product: a place below `factor`, each with its share of the words up to one."""
    half, low = uint64(32), uint64(0xFFFFFFFF)
    a, b, c, d = word >> half, word & low, factor >> half, factor & low
    cross = b * c
    middle = a * d + ((b * d) >> half) + (cross & low)
    return a * c + (cross >> half) + (middle >> half)


@jit
def sample(
    own: Int32s,
    words: Words,
    chance: uint64,
    thresholds: Words,
    aliases: Shorts,
    stays: Words,
    masses: Words,
    bits: int,
) -> Shorts:
    """Return one released level for each row.

    Parameters
    ----------
    own
        int32 array of shape (n,): the rows' levels.
    words
        uint64 array of shape (n, 3), uniform and independent.
    thresholds, aliases
        `alias_tables` of the weights `apart`.
    """
    out, at = np.empty(len(own), dtype=np.uint16), index_bits(thresholds)
    ends = np.cumsum(masses)
    circle, half = ends[-1], uint64(1) << uint64(bits - 1)
    shift = uint64(64 - bits)
    for row in range(len(own)):
        first, second, third = words[row, 0], words[row, 1], words[row, 2]
        level = own[row]
        if (first >> uint64(1)) < chance:
            out[row] = draw(second, 0, at, thresholds, aliases)
        elif masses[level] > 0:
            place = ends[level] - masses[level] + _high(second, masses[level])
            place = (place + (third >> shift) + circle - half) % circle
            out[row] = np.searchsorted(ends, place, side="right")
        elif (third >> uint64(1)) < stays[level]:
            out[row] = level
        else:
            out[row] = np.searchsorted(ends, _high(second, circle), side="right")
    return out
