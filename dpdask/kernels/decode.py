"""From latent variables to levels: one level for each row and attribute, in the counts that the model gives.

An attribute's levels have one latent variable and one offset each; a row takes the level of the
largest sum. Offsets belong to groups of rows (the value of the attribute's parent in the tree).
Within a block of rows every group gets each level as often as its probabilities say, up to a
rounding that is drawn once: rows that the rounding leaves over move to the level that costs them
the least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite ships no types; numba brings it
from numba import types
from numba.extending import intrinsic

from dpdask.arrays import Flags, Floats, Ints, Shorts, Singles
from dpdask.kernels.jit import jit

NEVER = -3e38  # less than any sum
_ROWS = 16  # of a tile: one AVX-512 register, two of AVX2
_LEVELS = 4  # whose offsets are read at once
_RIVAL_STRIP = 512
_FLOAT, _SHORT, _INT = ir.FloatType(), ir.IntType(16), ir.IntType(32)


def _transpose(builder: Any, parts: list[Any]) -> list[Any]:
    """Return four vectors with an item of each of the parts, which are as many vectors of four."""
    joined = parts
    while len(joined) > 1:
        width = 2 * joined[0].type.count
        everything = ir.Constant(ir.VectorType(_INT, width), list(range(width)))
        joined = [
            builder.shuffle_vector(joined[place], joined[place + 1], everything)
            for place in range(0, len(joined), 2)
        ]
    undefined = ir.Constant(joined[0].type, ir.Undefined)
    masks = [
        ir.Constant(ir.VectorType(_INT, _ROWS), [_LEVELS * row + level for row in range(_ROWS)])
        for level in range(_LEVELS)
    ]
    return [builder.shuffle_vector(joined[0], undefined, mask) for mask in masks]


def _race_code(
    _context: Any,
    utilities: Any,
    _row: Any,
    _stride: Any,
    _level: Any,
    _last: Any,
    offsets: Any,
    groups: Any,
    best: Any,
    after: Any,
    one: Any,
    two: Any,
) -> Any:
    """Return the type and the code that lets some levels compete in a tile of rows with the best and the second best of the levels before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = {
            place: context.make_array(signature.args[place])(
                context, builder, arguments[place]
            ).data
            for place in (0, *range(5, 11))
        }
        row, stride, begin, last = arguments[1:5]
        word, floats, shorts = row.type, ir.VectorType(_FLOAT, _ROWS), ir.VectorType(_SHORT, _ROWS)
        four, states = ir.VectorType(_FLOAT, _LEVELS).as_pointer(), (floats, floats, shorts, shorts)
        padded = builder.mul(
            builder.sdiv(builder.add(last, ir.Constant(word, _LEVELS)), ir.Constant(word, _LEVELS)),
            ir.Constant(word, _LEVELS),
        )
        loaded = []
        for place in range(_ROWS):
            group = builder.zext(
                builder.load(builder.gep(data[6], [builder.add(row, ir.Constant(word, place))])),
                word,
            )
            address = builder.gep(data[5], [builder.add(builder.mul(group, padded), begin)])
            loaded.append(builder.load(builder.bitcast(address, four), align=4))
        places = [
            builder.bitcast(builder.gep(data[7 + number], [row]), kind.as_pointer())
            for number, kind in enumerate(states)
        ]
        high, low, winner, second = (builder.load(address, align=2) for address in places)
        undefined, zeros = (
            ir.Constant(shorts, ir.Undefined),
            ir.Constant(ir.VectorType(_INT, _ROWS), [0] * _ROWS),
        )
        for number, added in enumerate(_transpose(builder, loaded)):
            level = builder.add(begin, ir.Constant(word, number))
            # beyond the last level, offsets never win
            known = builder.select(builder.icmp_signed("<", level, last), level, last)
            address = builder.gep(data[0], [builder.add(row, builder.mul(known, stride))])
            value = builder.fadd(
                builder.load(builder.bitcast(address, floats.as_pointer()), align=4), added
            )
            wins, follows = (
                builder.fcmp_ordered(">", value, high),
                builder.fcmp_ordered(">", value, low),
            )
            own = builder.insert_element(
                undefined, builder.trunc(level, _SHORT), ir.Constant(_INT, 0)
            )
            own = builder.shuffle_vector(own, undefined, zeros)
            low = builder.select(wins, high, builder.select(follows, value, low))
            second = builder.select(wins, winner, builder.select(follows, own, second))
            high, winner = builder.select(wins, value, high), builder.select(wins, own, winner)
        for address, value in zip(places, (high, low, winner, second), strict=True):
            builder.store(value, address, align=2)
        return context.get_dummy_value()

    return types.void(utilities, *[types.intp] * 4, offsets, groups, best, after, one, two), build


_race: Callable[..., None] = intrinsic(_race_code)


@jit
def find_rivals(
    utilities: Singles,
    offsets: Singles,
    groups: Shorts,
    chosen: Shorts,
    seconds: Shorts,
    gaps: Singles,
) -> None:
    """Write each row's best and second best level, and by how much their sums differ; of equal sums, the first level is the better one.

    Parameters
    ----------
    utilities
        float32 array of shape (n_levels, m), m at least n, rows of C order: each level's latent
        variable in each row.
    offsets
        float32 array of shape (n_groups, n_levels): what is added in each group of rows.
    """
    n, (n_groups, n_levels) = len(groups), offsets.shape
    width = -(-n_levels // _LEVELS) * _LEVELS
    padded = np.empty(n_groups * width, np.float32)
    for group in range(n_groups):
        for level in range(width):
            padded[group * width + level] = (
                offsets[group, level] if level < n_levels else np.float32(NEVER)
            )
    whole = n // _ROWS * _ROWS
    _compete(utilities, padded, groups[:whole], chosen[:whole], seconds[:whole], gaps[:whole])
    if whole < n:  # the rest of a tile, in a tile of its own
        part, own = np.zeros((n_levels, _ROWS), np.float32), np.zeros(_ROWS, np.uint16)
        for i in range(n - whole):
            own[i] = groups[whole + i]
            for level in range(n_levels):
                part[level, i] = utilities[level, whole + i]
        first, second, apart = (
            np.empty(_ROWS, np.uint16),
            np.empty(_ROWS, np.uint16),
            np.empty(_ROWS, np.float32),
        )
        _compete(part, padded, own, first, second, apart)
        for i in range(n - whole):
            chosen[whole + i], seconds[whole + i], gaps[whole + i] = first[i], second[i], apart[i]


@jit
def _compete(
    utilities: Singles,
    padded: Singles,
    groups: Shorts,
    chosen: Shorts,
    seconds: Shorts,
    gaps: Singles,
) -> None:
    """As `find_rivals`, for whole tiles, and for offsets that are padded to a multiple of levels."""
    flat, (n_levels, stride) = utilities.reshape(-1), utilities.shape
    after = np.empty(len(groups), np.float32)
    for row in range(len(groups)):
        chosen[row], seconds[row], gaps[row], after[row] = (
            0,
            0,
            np.float32(NEVER),
            np.float32(NEVER),
        )
    # the state of a strip stays in the first-level cache, and each level is read line after line
    for start in range(0, len(groups), _RIVAL_STRIP):
        for level in range(0, n_levels, _LEVELS):
            for row in range(start, min(start + _RIVAL_STRIP, len(groups)), _ROWS):
                _race(
                    flat,
                    row,
                    stride,
                    level,
                    n_levels - 1,
                    padded,
                    groups,
                    gaps,
                    after,
                    chosen,
                    seconds,
                )
    for row in range(len(groups)):
        gaps[row] -= after[row]


"""The latent variables of an attribute's levels, one row for each; the first of two levels has none, and one level none at all."""

_STEPS = 60
_MISPLACED = 2.0**-9  # the share of rows that calibration may leave for `decode` to move
_ROUNDS = 64
_STRIP = 1024
_LANES = 4
_EXCHANGES = 4
# how far the first search for rows to move reaches: a multiple of their share of the rarer side,
# at most so far
_NEAR, _FAR = (1.0, 0.25)


@jit
def quotas(probabilities: Floats, n_of_group: Ints, uniforms: Floats) -> Ints:
    """Return how many rows of each group take each level: systematic rounding of the expected counts.

    Parameters
    ----------
    probabilities
        float64 array of shape (n_groups, n_levels); each row sums to 1.
    uniforms
        float64 array in [0, 1), one for each group; with uniform ones, a quota's expectation is
        exactly the expected count.
    """
    n_groups, n_levels = probabilities.shape
    result = np.zeros((n_groups, n_levels), dtype=np.int64)
    for group in range(n_groups):
        n, total, taken = n_of_group[group], 0.0, 0
        last = 0
        for level in range(n_levels):
            if probabilities[group, level] > 0.0:
                last = level
        for level in range(last + 1):
            total += probabilities[group, level]
            upto = min(np.int64(np.floor(total * n + uniforms[group])), n) if level < last else n
            result[group, level] = max(upto - taken, 0)
            taken = max(upto, taken)
    return result


@jit
def _choose(
    utilities: Singles,
    offsets: Singles,
    groups: Shorts,
    chosen: Shorts,
    seconds: Shorts,
    gaps: Singles,
) -> Ints:
    """Write each row's best and second best level and by how much they differ, and return how many rows of each group chose each level."""
    n, (n_groups, n_levels) = len(groups), offsets.shape
    n_free = n_levels - len(utilities)  # the first level of two has no latent variable
    if n_levels == 2 and n_free == 1:
        differences = offsets[:, 1] - offsets[:, 0]
        for start in range(0, n, _STRIP):
            part = slice(start, min(start + _STRIP, n))
            utility, of = utilities[0, part], groups[part]
            one, two, gap = chosen[part], seconds[part], gaps[part]
            # one question for each row, in short loops, which are vectorised
            for i in range(len(gap)):
                gap[i] = utility[i] + differences[of[i]]
            for i in range(len(gap)):
                one[i] = np.uint16(gap[i] > np.float32(0.0))
            for i in range(len(gap)):
                two[i] = np.uint16(1) - one[i]
            for i in range(len(gap)):
                gap[i] = abs(gap[i])
        return _count(groups, chosen, n_groups, n_levels)
    every = utilities
    if n_free > 0:
        every = np.zeros((n_levels, n), dtype=np.float32)
        for level in range(n_free, n_levels):
            for i in range(n):
                every[level, i] = utilities[level - n_free, i]
    find_rivals(every, offsets, groups, chosen, seconds, gaps)
    return _count(groups, chosen, n_groups, n_levels)


@jit
def _count(groups: Shorts, chosen: Shorts, n_groups: int, n_levels: int) -> Ints:
    """Return how many rows of each group have each level; neighbouring rows are counted apart, so that no sum waits for the last one."""
    lanes, counts = (
        np.zeros((_LANES, n_groups * n_levels), dtype=np.int64),
        np.zeros((n_groups, n_levels), dtype=np.int64),
    )
    for i in range(len(groups)):
        lanes[i % _LANES, np.int64(groups[i]) * n_levels + chosen[i]] += 1
    for group in range(n_groups):
        for level in range(n_levels):
            for lane in range(_LANES):
                counts[group, level] += lanes[lane, group * n_levels + level]
    return counts


@jit
def _find_near(
    chosen: Shorts,
    seconds: Shorts,
    gaps: Singles,
    groups: Shorts,
    counts: Ints,
    quota: Ints,
    attempt: int,
) -> tuple[Ints, Ints]:
    """Return how many rows each group must move, and the rows that may: near to a second best level that has too few."""
    n_groups, n_levels = quota.shape
    near = np.empty(len(chosen) + 1, dtype=np.int64)
    limits, wanting = (
        np.empty((n_groups, n_levels), dtype=np.float32),
        np.empty((n_groups, n_levels), dtype=np.bool_),
    )
    left = np.zeros(n_groups, dtype=np.int64)
    for group in range(n_groups):
        size = 0
        for level in range(n_levels):
            size += quota[group, level]
        for level in range(n_levels):
            own, over = quota[group, level], counts[group, level] - quota[group, level]
            left[group] += max(over, 0)
            wanting[group, level] = over < 0
            reach = min(_NEAR * (over + 4) / max(min(own, size - own), 1), _FAR) * 8.0**attempt
            limits[group, level] = np.float32(reach) if over > 0 else np.float32(0.0)
    n_near = 0
    if attempt < _EXCHANGES and left.any():  # the last attempt only counts
        for row in range(len(chosen)):
            near[n_near] = row
            n_near += (gaps[row] < limits[groups[row], chosen[row]]) & wanting[
                groups[row], seconds[row]
            ]
    return left, near[:n_near]


@jit
def _move(
    rows: Ints,
    goals: Ints,
    groups: Shorts,
    chosen: Shorts,
    counts: Ints,
    quota: Ints,
    anywhere: bool,
) -> None:
    """Move rows in their order to their goals, or to where there is most room: from levels that have too many, to levels that have too few."""
    for place in range(len(rows)):
        row, new = rows[place], goals[place]
        group, old = groups[row], chosen[row]
        if counts[group, old] <= quota[group, old]:
            continue
        if anywhere:
            new = np.argmax(quota[group] - counts[group])
        if counts[group, new] < quota[group, new]:
            chosen[row] = new
            counts[group, old] -= 1
            counts[group, new] += 1


def _exchange(
    chosen: Shorts,
    seconds: Shorts,
    gaps: Singles,
    groups: Shorts,
    counts: Ints,
    quota: Ints,
) -> Ints:
    """Move rows from levels that have too many to their second best if it has too few, the cheapest first; return what is left over by group."""
    for attempt in range(_EXCHANGES + 1):
        left, found = _find_near(chosen, seconds, gaps, groups, counts, quota, attempt)
        if not left.any():
            break
        if not len(found):
            continue
        costs = gaps[found]
        n_best = 4 * int(left.sum()) + 64  # a few more than needed, for those whose goal is full
        if len(found) > n_best:
            cheap = costs <= np.partition(costs, n_best)[n_best]
            found, costs = found[cheap], costs[cheap]
        found = found[np.argsort(costs, kind="stable")]
        _move(found, seconds[found].astype(np.int64), groups, chosen, counts, quota, False)
    return left


@jit
def _find_goals(
    utilities: Singles,
    offsets: Singles,
    crowd: Ints,
    wanting: Flags,
    chosen: Shorts,
) -> tuple[Singles, Ints]:
    """Return for each row of the crowd its best level among those with too few rows, and the cost of moving there."""
    best = np.empty(len(crowd), dtype=np.float32)
    others = np.full(len(crowd), -1, dtype=np.int64)
    n_free = len(offsets) - len(utilities)
    # level by level: the rows of one level lie together in memory
    for level in range(len(wanting)):
        if wanting[level]:
            for place in range(len(crowd)):
                value = (
                    offsets[level]
                    if level < n_free
                    else utilities[level - n_free, crowd[place]] + offsets[level]
                )
                if others[place] < 0 or value > best[place]:
                    best[place], others[place] = value, level
    for place in range(len(crowd)):
        level = chosen[crowd[place]]
        value = (
            offsets[level]
            if level < n_free
            else utilities[level - n_free, crowd[place]] + offsets[level]
        )
        best[place] = value - best[place]
    return best, others


def _settle(
    utilities: Singles,
    offsets: Singles,
    rows: Ints,
    groups: Shorts,
    quota: Ints,
    chosen: Shorts,
    counts: Ints,
) -> None:
    """Move rows of one group from levels that have too many to levels that have too few, the cheapest moves first."""
    group = groups[rows[0]]
    for attempt in range(_ROUNDS + 1):
        over = counts[group] - quota[group]
        surplus = int(np.maximum(over, 0).sum())
        if surplus == 0:
            return
        crowd = rows[(over > 0)[chosen[rows]]]
        costs, goals = _find_goals(utilities, offsets[group], crowd, over < 0, chosen)
        # all moves of a round are among the cheapest of their levels; a few more than needed, for
        # those whose goal is full
        n_best = min(len(crowd), 4 * surplus + 16) if attempt < _ROUNDS else len(crowd)
        near = np.flatnonzero(costs <= np.partition(costs, n_best - 1)[n_best - 1])
        near = near[np.argsort(costs[near], kind="stable")]
        # whatever is left at last goes where there is room
        _move(crowd[near], goals[near], groups, chosen, counts, quota, attempt == _ROUNDS)


def _rows_by_group(groups: Shorts, n_groups: int) -> list[Ints]:
    """Return the rows of each group, in order."""
    ends = np.cumsum(np.bincount(groups, minlength=n_groups))
    return np.split(np.argsort(groups, kind="stable"), ends[:-1])


def decode(
    utilities: Singles,
    offsets: Singles,
    probabilities: Floats,
    groups: Shorts,
    uniforms: Floats,
) -> Shorts:
    """Return each row's level: the largest utility plus offset, with every group's quotas kept exactly.

    Parameters
    ----------
    utilities
        float32 array of shape (n_levels, m), m at least n: each level's latent variable in each
        row. If the first level has none (0 in every row), the shape is (n_levels - 1, m).
    uniforms
        float64 array of shape (n_groups,), for the rounding of the quotas.
    """
    n = len(groups)
    chosen, seconds, gaps = (
        np.empty(n, dtype=np.uint16),
        np.empty(n, dtype=np.uint16),
        np.empty(n, dtype=np.float32),
    )
    counts = _choose(utilities, offsets, groups, chosen, seconds, gaps)
    quota = quotas(probabilities, counts.sum(axis=1), uniforms)
    left = _exchange(chosen, seconds, gaps, groups, counts, quota)
    if left.any():
        by_group = _rows_by_group(groups, len(offsets))
        for group in np.flatnonzero(left):
            _settle(utilities, offsets, by_group[group], groups, quota, chosen, counts)
    return chosen


@jit
def calibrate(utilities: Singles, probabilities: Floats, start: Singles) -> Singles:
    """Return the offsets at which the largest sum falls on each level as often as asked, for the rows of one group.

    Parameters
    ----------
    utilities
        float32 array of shape (n_levels, n), or (n_levels - 1, n), as for `decode`.
    probabilities
        float64 array of shape (n_levels,), summing to 1. A level of probability 0 gets an offset
        that no latent reaches.

    Notes
    -----
    The offsets minimise a convex function (they are the prices of an optimal transport from the
    rows to the levels), so steps of each offset by the logarithm of wanted over found frequency,
    halved when they change direction, end near the one minimum; `decode` moves the few rows that
    they leave over.
    """
    n_levels, n = len(probabilities), utilities.shape[1]
    offsets, step, before = (
        np.empty((1, n_levels), dtype=np.float32),
        np.empty(n_levels),
        np.zeros(n_levels),
    )
    for level in range(n_levels):
        offsets[0, level] = start[level] if probabilities[level] > 0.0 else np.float32(-1e9)
        step[level] = 0.5
    groups, chosen = np.zeros(n, dtype=np.uint16), np.empty(n, dtype=np.uint16)
    seconds, gaps = np.empty(n, dtype=np.uint16), np.empty(n, dtype=np.float32)
    for _ in range(_STEPS):
        counts = _choose(utilities, offsets, groups, chosen, seconds, gaps)[0]
        misplaced = 0.0
        for level in range(n_levels):
            misplaced += abs(probabilities[level] * n - counts[level]) / 2.0
        if misplaced <= _MISPLACED * n:
            break
        for level in range(n_levels):
            if probabilities[level] > 0.0:
                change = np.log((probabilities[level] * n + 0.25) / (counts[level] + 0.25))
                if change * before[level] < 0.0:
                    step[level] *= 0.7
                before[level] = change
                offsets[0, level] += np.float32(step[level] * min(max(change, -1.0), 1.0))
    return offsets[0]


def calibrate_groups(
    utilities: Singles,
    probabilities: Floats,
    groups: Shorts,
    start: Singles,
) -> Singles:
    """Return `calibrate` for every group of rows; a group without rows keeps its first offsets."""
    offsets = start.copy()
    for group, rows in enumerate(_rows_by_group(groups, len(probabilities))):
        if len(rows):
            offsets[group] = calibrate(
                utilities.take(rows, axis=1), probabilities[group], start[group]
            )
    return offsets
