"""Private files in a store: what they hold comes back, and their lengths tell no counts."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("room", [2**12 - 8, 2**12, 10_000])
def test_the_length_is_that_of_the_room(room):
    lengths = {
        len(encrypt(KEY, "place", bytes(n), room))
        for n in (0, 1, 4087, 4088, 4089, room)
        if n <= room
    }
    assert len(lengths) == 1
    assert decrypt(KEY, "place", encrypt(KEY, "place", b"data", room)) == b"data"
