"""Private files in a store: what they hold comes back, and their lengths tell no counts."""

from __future__ import annotations

import numpy as np
import pytest

from dpdask.engine.units import UnitBounds
from dpdask.errors import InputError
from dpdask.io.encrypted import decrypt, encrypt

KEY = b"k" * 32


@pytest.mark.parametrize("length", [0, 1, 4087, 4088, 4089, 2**16 - 8, 2**16 - 7, 100_000])
def test_what_is_encrypted_comes_back(length):
    data = np.random.default_rng(length).bytes(length)
    kept = encrypt(KEY, "place", data)
    padded = len(kept) - len(encrypt(KEY, "place", b"")) + 2**12
    assert padded.bit_count() == 1
    assert length + 8 <= padded <= max(2**12, 2 * (length + 8))
    assert decrypt(KEY, "place", kept) == data
    assert encrypt(KEY, "place", data) == kept


@pytest.mark.parametrize("place", ["place", "other"])
def test_what_was_changed_is_refused(place):
    kept = encrypt(KEY, "place", b"data")
    with pytest.raises(InputError, match="this file of the unfinished run was changed"):
        decrypt(KEY, place, kept if place == "other" else kept[:-1])


def test_lengths_tell_no_counts():
    def length(units: int) -> int:
        hashes = np.arange(units, dtype=np.uint64)
        return len(encrypt(KEY, "bounds.npz", UnitBounds(units=hashes, hashes=hashes, positions=hashes).to_bytes()))

    assert len({length(units) for units in (0, 1, 10, 100)}) == 1
    assert length(1000) == length(1001)
    chosen = {len(encrypt(KEY, f"chosen/{rows}", np.packbits(np.ones(rows, dtype=bool)).tobytes())) for rows in (1, 9, 1000, 30_000)}
    assert len(chosen) == 1
