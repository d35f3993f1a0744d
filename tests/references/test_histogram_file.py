"""The noisy histograms that a run keeps: read back as they were written, and refused when they are others."""

from __future__ import annotations

import numpy as np
import pytest

from dpdask.errors import InputError
from dpdask.privacy.events import DiscreteLaplace
from dpdask.references.histogram_file import histograms_from_bytes, histograms_to_bytes

EVENTS = {
    "rating": DiscreteLaplace(scale=2.0, sensitivity=2, adjacency="replace-one"),
    "age": DiscreteLaplace(scale=3.5, sensitivity=2, adjacency="replace-one"),
}
NOISY = {"rating": np.array([3, -1, 7]), "age": np.array([2**40, 0])}
SIZES = {"rating": 3, "age": 2}


def test_they_are_read_back_as_they_were_written() -> None:
    data = histograms_to_bytes(NOISY, EVENTS)
    assert histograms_to_bytes(NOISY, EVENTS) == data
    found = histograms_from_bytes(data, EVENTS, SIZES, "noisy.npz")
    assert list(found) == list(NOISY)
    assert all((found[name] == counts).all() for name, counts in NOISY.items())


@pytest.mark.parametrize(
    ("events", "sizes"),
    [
        ({**EVENTS, "age": DiscreteLaplace(scale=3.0, sensitivity=2, adjacency="replace-one")}, SIZES),
        ({"rating": EVENTS["rating"]}, SIZES),
        (EVENTS, {**SIZES, "rating": 4}),
    ],
    ids=["another noise", "another column", "other cells"],
)
def test_those_of_another_run_are_refused(events: dict[str, DiscreteLaplace], sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="not the noisy histograms of this run"):
        histograms_from_bytes(histograms_to_bytes(NOISY, EVENTS), events, sizes, "noisy.npz")


@pytest.mark.parametrize("data", [b"", b"something else", histograms_to_bytes(NOISY, EVENTS)[:-30]], ids=["nothing", "text", "cut off"])
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        histograms_from_bytes(data, EVENTS, SIZES, "noisy.npz")
