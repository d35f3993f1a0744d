"""Ranks and cdfs: a continualised cdf read both ways, and the disturbance of ranks by discrete Laplace noise."""

from __future__ import annotations

import math
from dataclasses import fields
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import uint64

from dpdask.arrays import Flags, Floats, Int32s, Ints, Shorts, Words, freeze_class
from dpdask.kernels.channel import TOTAL_BITS, integer_weights
from dpdask.kernels.jit import jit

UNIT = 2.0**-53  # of a uniform number: what the upper bits of a word are counted in


class Guide(NamedTuple):
    """An index of sorted knots, for quick search."""

    # Int32 array of shape (n_buckets + 1,): how many knots lie in the buckets before each one.
    starts: Int32s
    # The centre of the knots and one over their spread, by which a number finds its bucket.
    middle: float
    scale: float


@jit
def guide(knots: Floats) -> Guide:
    """Return the guide of sorted knots, with as many buckets as there are knots.

    Notes
    -----
    Buckets are equal steps of t / (1 + |t|), where t is the distance from the median in halves of
    the interquartile range: about equally full for bell-shaped and for heavy-tailed knots. A knot
    and a number find their buckets by the same monotone function, so a bucket never misleads,
    however its arithmetic rounds.
    """
    n = len(knots)
    spread = knots[3 * n // 4] / 2 - knots[n // 4] / 2
    middle, scale = knots[n // 2], 1.0 / min(max(spread, 1e-300), 1e300)
    starts = np.zeros(n + 1, dtype=np.int32)
    for knot in knots:
        starts[_bucket(knot, n, middle, scale) + 1] += 1
    for bucket in range(n):
        starts[bucket + 1] += starts[bucket]
    return Guide(starts, middle, scale)


@jit
def _bucket(value: float, n_buckets: int, middle: float, scale: float) -> int:
    """Return the bucket of a number; every step rounds monotonically."""
    t = (value - middle) * scale
    share = 2.0 - 1.0 / (1.0 + t) if t >= 0.0 else 1.0 / (1.0 - t)
    return min(int(share * (n_buckets / 2.0)), n_buckets - 1)


def uniforms(words: Words) -> Floats:
    """Return a number in (0, 1] for each word."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * UNIT


@jit
def first_knot(value: float, knots: Floats, guide: Guide) -> int:
    """Return the index of the first knot that is not below `value`."""
    bucket = _bucket(value, len(knots), guide.middle, guide.scale)
    low, high = guide.starts[bucket], guide.starts[bucket + 1]
    while low < high:
        middle = (low + high) >> 1
        if knots[middle] < value:
            low = middle + 1
        else:
            high = middle
    return int(low)


@jit
def rank_interval(
    value: float, x: Floats, c: Floats, guide: Guide, lattice: bool
) -> tuple[float, float]:
    """Return the interval of ranks that a value stands for under the continualised cdf (x, c).

    An atom stands for its jump; a whole number v of a lattice for (C(v-1), C(v)]; another number
    that is a knot for the linear piece that ends there; and any other for the single rank C(value).
    """
    left = first_knot(value, x, guide)
    right = left
    while right < len(x) and x[right] == value:
        right += 1
    if right - left > 1:
        return c[left], c[right - 1]
    high = c[left] if right > left else _between(value, left, x, c)
    if lattice:
        # C(value - 1): no knot lies strictly between the two whole numbers
        known = left > 0 and x[left - 1] == value - 1.0
        return (c[left - 1] if known else _between(value - 1.0, left, x, c)), high
    if right > left and left > 0:
        return c[left - 1], high
    return high, high


@jit
def _between(value: float, right: int, x: Floats, c: Floats) -> float:
    """Return C(value) for a value that is no knot; `right` is the first knot above it."""
    if right == 0:
        return float(c[0])
    if right == len(x):
        return float(c[-1])
    # halved: knots may be the largest floats
    share = (value / 2 - x[right - 1] / 2) / (x[right] / 2 - x[right - 1] / 2)
    return float(c[right - 1] + (c[right] - c[right - 1]) * share)


@jit
def value_at(rank: float, x: Floats, c: Floats, guide: Guide, lattice: bool) -> float:
    """Return the inverse of the continualised cdf at a rank in (c[0], 1], as a whole number for a lattice.

    For the parameters see `rank_interval`; `guide` is that of c.
    """
    k = min(max(first_knot(rank, c, guide), 1), len(c) - 1)
    width = c[k] - c[k - 1]
    share = min(max((rank - c[k - 1]) / width, 0.0), 1.0) if width > 0 else 1.0
    return interpolate(x[k - 1], x[k], share, lattice)


@jit
def interpolate(low: float, high: float, share: float, lattice: bool) -> float:
    """Return a share of the way from `low` to `high`, as a whole number above `low` for a lattice."""
    if lattice:  # whole steps are added to a whole number: no rounding, however large the numbers
        return float(low + min(max(np.ceil((high - low) * share), 1.0), high - low))
    half = (high / 2 - low / 2) * share  # halved: the gap between the largest floats is no float
    # rounding must not pass the knot, which may be the column's bound
    return float(min((low + half) + half, high))


@jit
def own_ranks(
    values: Floats, is_null: Flags, words: Words, x: Floats, c: Floats, lattice: bool
) -> Floats:
    """Return a rank of each value, uniform in the interval that it stands for, from a word of its own."""
    out, at = np.empty(len(values)), guide(x)
    for row in range(len(values)):
        low, high = (0.0, c[0]) if is_null[row] else rank_interval(values[row], x, c, at, lattice)
        out[row] = low + (words[row] >> np.uint64(11)) * UNIT * (high - low)
    return out


@jit
def values_at(
    ranks: Floats, x: Floats, c: Floats, guide: Guide, lattice: bool
) -> tuple[Floats, Flags]:
    """Return the value at each rank, null below c[0]; for the parameters see `value_at`."""
    out = np.zeros(len(ranks))
    is_null = ranks < c[0]
    for row in range(len(ranks)):
        if not is_null[row]:
            out[row] = value_at(ranks[row], x, c, guide, lattice)
    return out, is_null


def merge(values: list[Floats], weights: list[Ints]) -> tuple[Floats, Ints]:
    """Return the union of weighted samples: sorted distinct values and their summed weights."""
    found, inverse = np.unique(np.concatenate(values), return_inverse=True)
    summed = np.zeros(len(found), dtype=np.int64)
    np.add.at(summed, inverse, np.concatenate(weights))
    return found, summed


def compress(values: Floats, weights: Ints, n_points: int) -> tuple[Floats, Ints, int]:
    """Return at most `n_points` of the values, each carrying the weight of those dropped just below it.

    Returns
    -------
    values, weights
        The compressed sample: the same total weight, the same smallest and largest value.
    error
        By how much weight the rank of any number can have moved, below ceil(total / (n_points -
        1)).

    Notes
    -----
    The cumulative weight is cut into n_points - 1 equal widths. A point is kept when a cut falls
    inside its weight or at its end, so that all points dropped between two kept ones lie inside one
    width, however heavy the kept ones are. Ranks at the kept points are exact; in between, at most
    the dropped weight is misplaced.
    """
    if len(values) <= n_points:
        return values, weights, 0
    cumulative = np.cumsum(weights)
    width = -(-int(cumulative[-1]) // (n_points - 1))
    keep = np.diff(cumulative // width, prepend=0) > 0
    keep[0] = keep[-1] = True  # where the distribution begins and ends
    kept = np.flatnonzero(keep)
    new_weights = np.diff(cumulative[kept], prepend=0)
    dropped = new_weights - weights[kept]
    return values[kept], new_weights.astype(np.int64), int(dropped.max())


def continualise(
    values: Floats,
    weights: Floats,
    atoms: Floats,
    atom_weights: Floats,
    start: float | None,
    step: float | None,
) -> tuple[Floats, Floats]:
    """Return the knots (x, c) of the continualised cdf: linear between the values, with a jump at each atom.

    Parameters
    ----------
    step
        The lattice step (1 for whole numbers), or None for real numbers.

    Returns
    -------
    x, c
        float64 arrays of one length, both non-decreasing; c runs from 0 to 1. Where x repeats, c
        jumps.

    Notes
    -----
    Bi & Shen (3) and (7): the weight of a value is spread over the gap below it. The gap below the
    smallest is not in the paper: one lattice step, or the width of the gap above it, and never past
    `start`.
    """
    points = np.concatenate([values, atoms])
    masses = np.concatenate([weights, atom_weights])
    is_atom = np.concatenate([np.zeros(len(values), bool), np.ones(len(atoms), bool)])
    order = np.argsort(points, kind="stable")
    points, masses, is_atom = points[order], masses[order], is_atom[order]
    points, masses, is_atom = points[masses > 0], masses[masses > 0], is_atom[masses > 0]
    below = np.concatenate([[0.0], np.cumsum(masses)[:-1]])
    above = below + masses
    # every point closes a linear piece; an atom is a piece of no width, preceded by a flat one
    x = np.repeat(points, np.where(is_atom, 2, 1))
    c = np.repeat(above, np.where(is_atom, 2, 1))
    c[np.cumsum(np.where(is_atom, 2, 1))[is_atom] - 2] = below[is_atom]
    first = points[0] if is_atom[0] else origin(points, start, step)
    return np.concatenate([[first], x]), np.concatenate([[0.0], c / above[-1]])


def origin(points: Floats, start: float | None, step: float | None) -> float:
    """Return where the gap below the smallest of some sorted points begins; parameters as for `continualise`."""
    gap = step if step is not None else float(points[1] - points[0]) if len(points) > 1 else 1.0
    below = float(points[0]) - gap
    return below if start is None or step is not None else max(start, below)


def bin_edges(x: Floats, c: Floats, n_bins: int) -> Floats:
    """Return the edges of about `n_bins` bins of ranks: null and every atom a bin of its own, the rest cut evenly.

    Parameters
    ----------
    x, c
        The knots of the continualised cdf; it jumps where x repeats, and null holds the ranks below
        c[0].
    n_bins
        How many bins a cdf without null and atoms would be cut into.
    """
    jumps = np.flatnonzero((np.diff(x) == 0) & (np.diff(c) > 0))
    fixed = np.unique(np.concatenate([[0.0, c[0]], c[jumps], c[jumps + 1], [1.0]]))
    whole = {(float(c[jump]), float(c[jump + 1])) for jump in jumps} | {(0.0, float(c[0]))}
    edges = [0.0]
    for low, high in zip(fixed[:-1].tolist(), fixed[1:].tolist(), strict=True):
        pieces = 1 if (low, high) in whole else max(1, round((high - low) * n_bins))
        edges.extend(np.linspace(low, high, pieces + 1)[1:].tolist())
    return np.unique(np.array(edges))


@jit
def cells_of(
    values: Floats,
    is_null: Flags,
    words: Words,
    x: Floats,
    c: Floats,
    edges: Floats,
    lattice: bool,
) -> Int32s:
    """Return the bin of each value: that of a rank drawn uniformly from the interval of ranks that it stands for."""
    out, ranks = (
        np.empty(len(values), dtype=np.int32),
        own_ranks(values, is_null, words, x, c, lattice),
    )
    for row in range(len(values)):
        place = int(np.searchsorted(edges, ranks[row], side="right")) - 1
        out[row] = min(max(place, 0), len(edges) - 2)
    return out


def draw_values(
    cells: Shorts, words: Words, x: Floats, c: Floats, edges: Floats, *, lattice: bool
) -> tuple[Floats, Flags]:
    """Return a value, or null, from each bin, distributed as the reference is inside it."""
    ranks = edges[cells] + uniforms(words) * (edges[cells + 1] - edges[cells])
    return values_at(ranks, x, c, guide(c), lattice)


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


@freeze_class(eq=False)
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
        names = (each.name for each in fields(self) if each.name != "weights")
        return {name: getattr(self, name) for name in names}


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
    noisy = disturb_rows(ranks, words, make_draws(noise, tables))
    return values_at(noisy, x, c, guide(c), lattice)


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
    """Return ranks with noise, uniform ones if they were uniform; digits are drawn from words 1..n_digits, the sign and the place from the next two.

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
