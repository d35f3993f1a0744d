"""Rows by their words: keyed hashes, permutations, distinct records, units, and some rows of a column."""

from __future__ import annotations

import numpy as np
from numpy import uint64

from dpdask.arrays import Bytes, Flags, Int32s, Ints, Uint32s, Words
from dpdask.kernels.jit import jit


@jit
def _rotate(value: uint64, bits: int) -> uint64:
    return uint64((value << uint64(bits)) | (value >> uint64(64 - bits)))


@jit
def _round(v0: uint64, v1: uint64, v2: uint64, v3: uint64) -> tuple[uint64, uint64, uint64, uint64]:
    v0 = uint64(v0 + v1)
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = uint64(v2 + v3)
    v3 = _rotate(v3, 16) ^ v2
    v0 = uint64(v0 + v3)
    v3 = _rotate(v3, 21) ^ v0
    v2 = uint64(v2 + v1)
    v1 = _rotate(v1, 17) ^ v2
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@jit
def siphash(rows: Words, key0: uint64, key1: uint64) -> Words:
    """Return the SipHash-2-4 of each row.

    Parameters
    ----------
    rows
        uint64 array of shape (n, m): each row is a message of m little-endian words.
    """
    out = np.empty(len(rows), dtype=uint64)
    length = uint64((rows.shape[1] * 8) & 255) << uint64(56)
    for row in range(len(rows)):
        if row > 0 and _equals(rows, row, rows, row - 1):  # tables are often sorted by their units
            out[row] = out[row - 1]
            continue
        v0 = key0 ^ uint64(0x736F6D6570736575)
        v1 = key1 ^ uint64(0x646F72616E646F6D)
        v2 = key0 ^ uint64(0x6C7967656E657261)
        v3 = key1 ^ uint64(0x7465646279746573)
        for position in range(rows.shape[1] + 1):
            word = rows[row, position] if position < rows.shape[1] else length
            v3 ^= word
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0 ^= word
        v2 ^= uint64(255)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        out[row] = v0 ^ v1 ^ v2 ^ v3
    return out


MAX_ROWS = 2**32 - 1


@jit
def below(word: uint64, n: int) -> np.int64:
    """Return floor(word * n / 2**64), exactly: uniform on 0..n-1 up to a bias of at most n / 2**64; n < 2**32."""
    factor, half = uint64(n), uint64(32)
    low = uint64((word & uint64(0xFFFFFFFF)) * factor) >> half
    return np.int64(uint64(uint64((word >> half) * factor) + low) >> half)


@jit
def permutation(words: Words) -> Uint32s:
    """Return a random permutation of 0..n-1 (Fisher-Yates, in Durstenfeld's form), with one word for each element.

    Parameters
    ----------
    words
        uint64 array of shape (n,), independent and uniform; n is at most `MAX_ROWS`.
    """
    out = np.arange(len(words)).astype(np.uint32)
    for last in range(len(words) - 1, 0, -1):
        chosen = below(words[last], last + 1)
        out[last], out[chosen] = out[chosen], out[last]
    return out


Grades = Bytes

_AHEAD = 64  # rows whose places are read ahead
_SAMPLED_BITS = 6  # of a hash: those that are 0 there are a sample of one in 64


@jit
def add_rows(
    keys: Words,
    grades: Grades,
    counts: Ints,
    least: int,
    entries: Words,
    slots: Words,
    n_entries: int,
) -> int:
    """Add rows to a table and return how many entries it has then.

    Parameters
    ----------
    keys
        uint64 array of shape (n, m): row r's key is its m words.
    grades, counts
        uint8 and int64 arrays of shape (n,); of shape (0,), if each row counts once.
    entries
        uint64 array of shape (n_entries + n or more, m + 2), changed: the key, grade and count of
        each entry, in the order of their first rows.
    slots
        uint64 array, changed: at least twice as many as there can be entries, a power of two. A
        slot has the place of an entry, counted from 1, in its lower half, and some bits of its hash
        in the upper one; an empty slot is 0.

    Notes
    -----
    The slots and entries of the next rows are read first: these reads overlap, whereas rows that
    are added one by one would each wait for memory.
    """
    low, half, one, m = uint64(0xFFFFFFFF), uint64(32), uint64(1), keys.shape[1]
    last = uint64(len(slots) - 1)
    hashes, seen = np.empty(_AHEAD, dtype=uint64), np.empty(_AHEAD, dtype=uint64)
    for start in range(0, len(keys), _AHEAD):
        n = min(_AHEAD, len(keys) - start)
        for ahead in range(n):
            row = start + ahead
            hashes[ahead] = _hash(keys, row, m, grades[row]) if grades[row] >= least else uint64(0)
        for ahead in range(n):  # the slot, and then the entry, where each row is looked for first
            found = slots[hashes[ahead] & last] & low
            seen[ahead] = found if grades[start + ahead] >= least else uint64(0)
        for ahead in range(n):  # they are kept, so that they are read
            if seen[ahead] != 0:
                seen[ahead] = entries[seen[ahead] - one, m]
        for ahead in range(n):
            row, grade = start + ahead, uint64(grades[start + ahead])
            if grade < least:
                continue
            slot, tag = hashes[ahead] & last, hashes[ahead] >> half
            count = uint64(counts[row]) if len(counts) else one
            while True:
                found = slots[slot]
                if found == 0:
                    for position in range(m):
                        entries[n_entries, position] = keys[row, position]
                    entries[n_entries, m], entries[n_entries, m + 1] = grade, count
                    n_entries += 1
                    slots[slot] = (tag << half) | uint64(n_entries)
                    break
                place = (found & low) - one
                if (
                    found >> half == tag
                    and entries[place, m] == grade
                    and _equals(keys, row, entries, place)
                ):
                    entries[place, m + 1] += count
                    break
                slot = (slot + one) & last
    return n_entries


@jit
def sample_hashes(keys: Words, grades: Grades) -> Words:
    """Return the hashes of about one in 64 entries: of equal entries all or none."""
    found, n = np.empty(len(keys), dtype=uint64), 0
    for row in range(len(keys)):
        hashed = found[n] = _hash(keys, row, keys.shape[1], grades[row])
        n += int(hashed >> uint64(64 - _SAMPLED_BITS) == 0)
    return found[:n].copy()


@jit
def find_slots(entries: Words, n_entries: int, n_slots: int) -> Words:
    """Return the slots of entries that are distinct; see `add_rows`.

    Parameters
    ----------
    n_slots
        A power of two, at least twice as many as there can be entries.
    """
    half, one, m = uint64(32), uint64(1), entries.shape[1] - 2
    last = uint64(n_slots - 1)
    slots = np.zeros(n_slots, dtype=uint64)
    for place in range(n_entries):
        hashed = _hash(entries, place, m, entries[place, m])
        slot = hashed & last
        while slots[slot] != 0:
            slot = (slot + one) & last
        slots[slot] = (hashed >> half << half) | uint64(place + 1)
    return slots


@jit
def _hash(keys: Words, row: int, n_columns: int, grade: uint64) -> uint64:
    hashed = uint64(grade)
    for position in range(n_columns):
        mixed = (hashed ^ keys[row, position]) * uint64(0x9E3779B97F4A7C15)
        hashed = uint64(mixed ^ (mixed >> uint64(32)))
    return hashed


@jit
def _equals(keys: Words, row: int, entries: Words, place: int | uint64) -> bool:
    for position in range(keys.shape[1]):  # noqa: SIM110 - numba compiles no generator
        if keys[row, position] != entries[place, position]:
            return False
    return True


@jit
def leading_zeros(words: Words) -> Grades:
    """Return how many zero bits each word begins with, 0 to 64: at least k with probability 2**-k."""
    out, one = np.empty(len(words), dtype=np.uint8), uint64(1)
    for row in range(len(words)):
        # its highest bit stays, and the next one is 0: rounding to a float cannot reach a higher
        # bit
        word = words[row] & ~(words[row] >> one)
        exponent = np.float64(word).view(np.int64) >> 52
        out[row] = min(int(1086 - exponent), 64)
    return out


@jit
def groups(units: Words) -> tuple[Ints, int]:
    """Return the group of each row, numbered by first appearance, and how many groups there are.

    Parameters
    ----------
    units
        uint64 array: keyed hashes, so that their low bits spread them evenly over the table.
    """
    size = 16
    while size < 2 * len(units):
        size *= 2
    mask = np.uint64(size - 1)
    slots = np.full(size, -1, dtype=np.int64)
    names = np.empty(len(units), dtype=np.uint64)
    found = np.empty(len(units), dtype=np.int64)
    n_groups = 0
    for row in range(len(units)):
        unit = units[row]
        if row > 0 and unit == units[row - 1]:
            found[row] = found[row - 1]
            continue
        slot = np.int64(unit & mask)
        while slots[slot] >= 0 and names[slots[slot]] != unit:
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot] = n_groups
            names[n_groups] = unit
            n_groups += 1
        found[row] = slots[slot]
    return found, n_groups


@jit
def first_rows(group: Ints, n_groups: int, hashes: Words, positions: Words, n_first: int) -> Ints:
    """Return the indices of each group's first `n_first` rows in the order (hash, position), group by group.

    Notes
    -----
    A group that has more rows keeps them in a heap whose root comes last, and a row that comes
    before the root replaces it. A group that is full therefore begins with its last row.
    """
    sizes = np.zeros(n_groups + 1, dtype=np.int64)
    for row in range(len(group)):
        sizes[group[row] + 1] += 1
    starts = np.zeros(n_groups + 1, dtype=np.int64)
    for index in range(n_groups):
        starts[index + 1] = starts[index] + min(sizes[index + 1], n_first)
    out = np.empty(starts[n_groups], dtype=np.int64)
    filled = np.zeros(n_groups, dtype=np.int64)
    for row in range(len(group)):
        index = group[row]
        start, count = starts[index], filled[index]
        if count < n_first:  # a further leaf, which moves up
            place = count
            while place > 0:
                parent = (place - 1) // 2
                if not _before(out[start + parent], row, hashes, positions):
                    break
                out[start + place] = out[start + parent]
                place = parent
            out[start + place] = row
            filled[index] = count + 1
        elif _before(row, out[start], hashes, positions):  # a new root, which moves down
            place = 0
            while 2 * place + 1 < n_first:
                child = 2 * place + 1
                if child + 1 < n_first and _before(
                    out[start + child], out[start + child + 1], hashes, positions
                ):
                    child += 1
                if not _before(row, out[start + child], hashes, positions):
                    break
                out[start + place] = out[start + child]
                place = child
            out[start + place] = row
    return out


@jit
def _before(one: int, other: int, hashes: Words, positions: Words) -> bool:
    return bool(
        hashes[one] < hashes[other]
        or (hashes[one] == hashes[other] and positions[one] < positions[other])
    )


@jit
def join_keys(
    units: Words,
    sizes: Int32s,
    codes: Int32s,
    starts: Ints,
    most: int,
    last: Ints,
    is_hashed: Flags,
    out_units: Words,
    out_sizes: Int32s,
    out_codes: Int32s,
    n_units: int,
    n_pairs: int,
) -> tuple[int, int]:
    """Add the keys of the units of several parts to those before, and return how many units and keys of units there are then.

    Parameters
    ----------
    units, starts
        uint64 array, increasing within each part: part p's units begin at starts[p]. They come after
        those before. A part may hold a unit several times.
    sizes, codes
        int32 arrays: how many keys each unit has, and the keys of all units, unit by unit, of shape
        (sizes.sum(),).
    last
        int64 array, changed: the number of the last unit that has each key, counted from 1.
    is_hashed
        Flags, changed: the keys of units that have more than `most` become true.
    out_units, out_sizes, out_codes
        Changed: each unit once, and each of its keys once.
    """
    heads, rows = starts[:-1].copy(), np.zeros(len(starts) - 1, dtype=np.int64)
    for part in range(1, len(heads)):
        rows[part] = rows[part - 1]
        for place in range(starts[part - 1], starts[part]):
            rows[part] += sizes[place]
    n_left = len(units)
    while n_left > 0:
        unit = uint64(0xFFFFFFFFFFFFFFFF)
        for part in range(len(heads)):
            if heads[part] < starts[part + 1]:
                unit = min(unit, units[heads[part]])
        first = n_pairs
        for part in range(len(heads)):
            while heads[part] < starts[part + 1] and units[heads[part]] == unit:
                stop = rows[part] + sizes[heads[part]]
                for row in range(rows[part], stop):
                    if last[codes[row]] != n_units + 1:
                        last[codes[row]] = n_units + 1
                        out_codes[n_pairs] = codes[row]
                        n_pairs += 1
                rows[part] = stop
                heads[part] += 1
                n_left -= 1
        if n_pairs - first > most:
            for row in range(first, n_pairs):
                is_hashed[out_codes[row]] = True
        out_units[n_units], out_sizes[n_units] = unit, n_pairs - first
        n_units += 1
    return n_units, n_pairs


@jit
def keep_first(
    units: Words,
    sizes: Int32s,
    codes: Int32s,
    words: Words,
    ranks: Ints,
    n_bits: int,
    n_first: int,
    key0: uint64,
    key1: uint64,
) -> int:
    """Keep the keys of each unit whose keyed hashes come first, and of one hash, the lesser keys; return how many they are.

    Parameters
    ----------
    sizes, codes
        int32 arrays, changed: how many keys each unit has, and the keys of all units, unit by unit.
    words, ranks
        uint64 and int64 arrays: what of each key is hashed, and its place in the order of the keys.
    n_bits
        How many bits of a hash are compared.
    """
    start = n_kept = 0
    for unit in range(len(units)):
        size = sizes[unit]
        if size > n_first:
            own, pairs = codes[start : start + size].copy(), np.empty((size, 2), dtype=uint64)
            positions = np.empty(size, dtype=uint64)
            for row in range(size):
                pairs[row, 0], pairs[row, 1] = units[unit], words[own[row]]
                positions[row] = ranks[own[row]]
            hashes = siphash(pairs, key0, key1)
            for row in range(size):
                hashes[row] >>= uint64(64 - n_bits)
            group = np.zeros(size, dtype=np.int64)
            first = first_rows(group, 1, hashes, positions, n_first)
            for row in range(n_first):
                codes[n_kept + row] = own[first[row]]
            sizes[unit] = n_first
        else:
            for row in range(size):
                codes[n_kept + row] = codes[start + row]
        start += size
        n_kept += sizes[unit]
    return n_kept


@jit
def add_weights(codes: Int32s, sizes: Int32s, weights: Ints, n_keys: int) -> Ints:
    """Return the sum of the weights of each key's units.

    Parameters
    ----------
    codes
        int32 array: the keys of all units, unit by unit.
    sizes
        int32 array: how many of these each unit has, at least 1.
    weights
        int64 array: what a unit adds to each of its keys, by how many it has.
    """
    out, row = np.zeros(n_keys, dtype=np.int64), 0
    for size in sizes:
        for _ in range(size):
            out[codes[row]] += weights[size]
            row += 1
    return out


@jit
def before_bounds(
    units: Words,
    hashes: Words,
    positions: Words,
    bound_units: Words,
    bound_hashes: Words,
    bound_positions: Words,
) -> Flags:
    """Return which rows come before their unit's bound; a unit without one keeps all. `bound_units` is sorted.

    Parameters
    ----------
    bound_units
        uint64 array of shape (k,), increasing: the units that have a bound.
    """
    out = np.ones(len(units), dtype=np.bool_)
    bound = 0
    for row in range(len(units)):
        if row == 0 or units[row] != units[row - 1]:
            bound = np.searchsorted(bound_units, units[row])
        if bound < len(bound_units) and bound_units[bound] == units[row]:
            same = hashes[row] == bound_hashes[bound]
            out[row] = hashes[row] < bound_hashes[bound] or (
                same and positions[row] < bound_positions[bound]
            )
    return out
