"""The largest and the second largest of many sums in each row: a tile of rows at a time, in registers.

Additions and comparisons alone, row by row in the order of the levels: the same bits on every machine, whatever its vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite ships no types; numba brings it
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dpdask.kernels.jit import jit

NEVER = -3e38  # less than any sum
_ROWS = 16  # of a tile: one AVX-512 register, two of AVX2
_LEVELS = 4  # whose offsets are read at once
_STRIP = 512
_FLOAT, _SHORT, _INT = ir.FloatType(), ir.IntType(16), ir.IntType(32)

Utilities = NDArray[np.float32]
Offsets = NDArray[np.float32]
Codes = NDArray[np.uint16]
Gaps = NDArray[np.float32]


def _transpose(builder: Any, parts: list[Any]) -> list[Any]:
    """Return four vectors with an item of each of the parts, which are as many vectors of four."""
    joined = parts
    while len(joined) > 1:
        width = 2 * joined[0].type.count
        everything = ir.Constant(ir.VectorType(_INT, width), list(range(width)))
        joined = [builder.shuffle_vector(joined[place], joined[place + 1], everything) for place in range(0, len(joined), 2)]
    undefined = ir.Constant(joined[0].type, ir.Undefined)
    masks = [ir.Constant(ir.VectorType(_INT, _ROWS), [_LEVELS * row + level for row in range(_ROWS)]) for level in range(_LEVELS)]
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
        data = {place: context.make_array(signature.args[place])(context, builder, arguments[place]).data for place in (0, *range(5, 11))}
        row, stride, begin, last = arguments[1:5]
        word, floats, shorts = row.type, ir.VectorType(_FLOAT, _ROWS), ir.VectorType(_SHORT, _ROWS)
        four, states = ir.VectorType(_FLOAT, _LEVELS).as_pointer(), (floats, floats, shorts, shorts)
        padded = builder.mul(builder.sdiv(builder.add(last, ir.Constant(word, _LEVELS)), ir.Constant(word, _LEVELS)), ir.Constant(word, _LEVELS))
        loaded = []
        for place in range(_ROWS):
            group = builder.zext(builder.load(builder.gep(data[6], [builder.add(row, ir.Constant(word, place))])), word)
            address = builder.gep(data[5], [builder.add(builder.mul(group, padded), begin)])
            loaded.append(builder.load(builder.bitcast(address, four), align=4))
        places = [builder.bitcast(builder.gep(data[7 + number], [row]), kind.as_pointer()) for number, kind in enumerate(states)]
        high, low, winner, second = (builder.load(address, align=2) for address in places)
        undefined, zeros = ir.Constant(shorts, ir.Undefined), ir.Constant(ir.VectorType(_INT, _ROWS), [0] * _ROWS)
        for number, added in enumerate(_transpose(builder, loaded)):
            level = builder.add(begin, ir.Constant(word, number))
            known = builder.select(builder.icmp_signed("<", level, last), level, last)  # beyond the last level, offsets never win
            address = builder.gep(data[0], [builder.add(row, builder.mul(known, stride))])
            value = builder.fadd(builder.load(builder.bitcast(address, floats.as_pointer()), align=4), added)
            wins, follows = builder.fcmp_ordered(">", value, high), builder.fcmp_ordered(">", value, low)
            own = builder.insert_element(undefined, builder.trunc(level, _SHORT), ir.Constant(_INT, 0))
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
def find_rivals(utilities: Utilities, offsets: Offsets, groups: Codes, chosen: Codes, seconds: Codes, gaps: Gaps) -> None:
    """Write each row's best and second best level, and by how much their sums differ; of equal sums, the first level is the better one.

    Parameters
    ----------
    utilities
        float32 array of shape (n_levels, m), m at least n, rows of C order: each level's latent variable in each row.
    offsets
        float32 array of shape (n_groups, n_levels): what is added in each group of rows.
    groups
        uint16 array of shape (n,): the group of each row.
    chosen, seconds
        uint16 arrays of shape (n,), overwritten.
    gaps
        float32 array of shape (n,), overwritten.
    """
    n, (n_groups, n_levels) = len(groups), offsets.shape
    width = -(-n_levels // _LEVELS) * _LEVELS
    padded = np.empty(n_groups * width, np.float32)
    for group in range(n_groups):
        for level in range(width):
            padded[group * width + level] = offsets[group, level] if level < n_levels else np.float32(NEVER)
    whole = n // _ROWS * _ROWS
    _compete(utilities, padded, groups[:whole], chosen[:whole], seconds[:whole], gaps[:whole])
    if whole < n:  # the rest of a tile, in a tile of its own
        part, own = np.zeros((n_levels, _ROWS), np.float32), np.zeros(_ROWS, np.uint16)
        for i in range(n - whole):
            own[i] = groups[whole + i]
            for level in range(n_levels):
                part[level, i] = utilities[level, whole + i]
        first, second, apart = np.empty(_ROWS, np.uint16), np.empty(_ROWS, np.uint16), np.empty(_ROWS, np.float32)
        _compete(part, padded, own, first, second, apart)
        for i in range(n - whole):
            chosen[whole + i], seconds[whole + i], gaps[whole + i] = first[i], second[i], apart[i]


@jit
def _compete(utilities: Utilities, padded: Offsets, groups: Codes, chosen: Codes, seconds: Codes, gaps: Gaps) -> None:
    """As `find_rivals`, for whole tiles, and for offsets that are padded to a multiple of levels."""
    flat, (n_levels, stride) = utilities.reshape(-1), utilities.shape
    after = np.empty(len(groups), np.float32)
    for row in range(len(groups)):
        chosen[row], seconds[row], gaps[row], after[row] = 0, 0, np.float32(NEVER), np.float32(NEVER)
    for start in range(0, len(groups), _STRIP):  # the state of a strip stays in the first-level cache, and each level is read line after line
        for level in range(0, n_levels, _LEVELS):
            for row in range(start, min(start + _STRIP, len(groups)), _ROWS):
                _race(flat, row, stride, level, n_levels - 1, padded, groups, gaps, after, chosen, seconds)
    for row in range(len(groups)):
        gaps[row] -= after[row]
