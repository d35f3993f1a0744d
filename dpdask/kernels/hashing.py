"""Keyed hashes and permutations of rows, and the sketch of distinct records that is built on them."""

from __future__ import annotations

import numpy as np
from numpy import uint64
from numpy.typing import NDArray

from dpdask.kernels.jit import Ints, Words, jit


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
def _same(one: Words, other: Words) -> bool:
    for position in range(len(one)):  # noqa: SIM110 - numba compiles no generator
        if one[position] != other[position]:
            return False
    return True


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
        if row > 0 and _same(rows[row], rows[row - 1]):  # tables are often sorted by their units
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
def permutation(words: Words) -> NDArray[np.uint32]:
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


Grades = NDArray[np.uint8]

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
        _look_ahead(
            keys[start : start + n], grades[start : start + n], least, entries, slots, hashes, seen
        )
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
def _look_ahead(
    keys: Words,
    grades: Grades,
    least: int,
    entries: Words,
    slots: Words,
    hashes: Words,
    seen: Words,
) -> None:
    """Find the hashes of some rows, and read the slot and the entry where each is looked for first; `seen` makes sure that they are read."""
    low, one, m = uint64(0xFFFFFFFF), uint64(1), keys.shape[1]
    last = uint64(len(slots) - 1)
    for row in range(len(keys)):
        hashed = uint64(grades[row])
        if grades[row] >= least:
            for position in range(m):
                hashed = _mix(hashed, keys[row, position])
        hashes[row] = hashed
    for row in range(len(keys)):
        seen[row] = slots[hashes[row] & last] & low if grades[row] >= least else uint64(0)
    for row in range(len(keys)):
        if seen[row] != 0:
            seen[row] = entries[seen[row] - one, m]


@jit
def sample_hashes(keys: Words, grades: Grades) -> Words:
    """Return the hashes of about one in 64 entries: of equal entries all or none."""
    found, n = np.empty(len(keys), dtype=uint64), 0
    for row in range(len(keys)):
        hashed = uint64(grades[row])
        for position in range(keys.shape[1]):
            hashed = _mix(hashed, keys[row, position])
        found[n] = hashed
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
        hashed = entries[place, m]
        for position in range(m):
            hashed = _mix(hashed, entries[place, position])
        slot = hashed & last
        while slots[slot] != 0:
            slot = (slot + one) & last
        slots[slot] = (hashed >> half << half) | uint64(place + 1)
    return slots


@jit
def _mix(hashed: uint64, word: uint64) -> uint64:
    mixed = (hashed ^ word) * uint64(0x9E3779B97F4A7C15)
    return uint64(mixed ^ (mixed >> uint64(32)))


@jit
def _equals(keys: Words, row: int, entries: Words, place: uint64) -> bool:
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
