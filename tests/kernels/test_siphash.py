"""SipHash-2-4 against its authors' vectors, and against a plain one written from the paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.kernels.hashing import siphash

KEY = tuple(np.uint64(int.from_bytes(bytes(range(start, start + 8)), "little")) for start in (0, 8))
MASK = 2**64 - 1
words_of = st.integers(0, MASK)


def rotated(value, bits):
    return (value << bits | value >> (64 - bits)) & MASK


def plain(message, key0, key1):
    """SipHash-2-4 as the paper has it (section 2), in Python's whole numbers."""
    v = [
        key0 ^ 0x736F6D6570736575,
        key1 ^ 0x646F72616E646F6D,
        key0 ^ 0x6C7967656E657261,
        key1 ^ 0x7465646279746573,
    ]

    def rounds(n):
        for _ in range(n):
            for a, b, s, t in ((0, 1, 13, 32), (2, 3, 16, 0), (0, 3, 21, 0), (2, 1, 17, 32)):
                v[a] = (v[a] + v[b]) & MASK
                v[b] = rotated(v[b], s) ^ v[a]
                v[a] = rotated(v[a], t) if t else v[a]

    for word in [*message, (8 * len(message) % 256) << 56]:
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 255
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


@pytest.mark.parametrize(
    ("n_words", "expected"),
    [(0, 0x726FDB47DD0E0E31), (1, 0x93F5F5799A932462), (2, 0x3F2ACC7F57C29BDB)],
)
def test_the_vectors_of_its_authors(n_words, expected):
    message = (
        np.frombuffer(bytes(range(8 * n_words)), dtype="<u8").astype(np.uint64).reshape(1, n_words)
    )
    assert siphash(message, *KEY).tolist() == [expected]
    assert plain([int(word) for word in message[0]], int(KEY[0]), int(KEY[1])) == expected


@given(
    st.integers(0, 5).flatmap(
        lambda m: st.lists(st.lists(words_of, min_size=m, max_size=m), min_size=1, max_size=4)
    ),
    words_of,
    words_of,
)
def test_rows_are_hashed_each_on_its_own(rows, key0, key1):
    found = siphash(
        np.array(rows, dtype=np.uint64).reshape(len(rows), -1), np.uint64(key0), np.uint64(key1)
    )
    assert found.dtype == np.uint64
    assert found.tolist() == [plain(row, key0, key1) for row in rows]
