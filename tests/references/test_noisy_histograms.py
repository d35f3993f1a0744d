"""The noisy histograms that a run keeps are refused when they are another run's."""

import numpy as np
import pytest

from dpdask.errors import InputError
from dpdask.privacy.events import DiscreteLaplace
from dpdask.references.histogram import NoisyHistograms

EVENTS = {
    "rating": DiscreteLaplace(scale=2.0, sensitivity=2, adjacency="replace-one"),
    "age": DiscreteLaplace(scale=3.5, sensitivity=2, adjacency="replace-one"),
}
SIZES = {"rating": 3, "age": 2}
NOISY = NoisyHistograms(
    counts={"rating": np.array([3, -1, 7]), "age": np.array([2**40, 0])}, events=EVENTS, n_rows=9
)


@pytest.mark.parametrize(
    ("events", "sizes"),
    [
        (
            {**EVENTS, "age": DiscreteLaplace(scale=3.0, sensitivity=2, adjacency="replace-one")},
            SIZES,
        ),
        ({"rating": EVENTS["rating"]}, SIZES),
        (EVENTS, {**SIZES, "rating": 4}),
    ],
    ids=["another noise", "another column", "other cells"],
)
def test_those_of_another_run_are_refused(events, sizes):
    with pytest.raises(
        InputError,
        match=r"^the run's noisy histograms: these are not the noisy histograms of this run",
    ):
        NOISY.check(events, sizes)
    floats = NoisyHistograms(
        counts={name: own.astype(np.float64) for name, own in NOISY.counts.items()},
        events=EVENTS,
        n_rows=9,
    )  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not the noisy histograms of this run"):
        floats.check(EVENTS, SIZES)
    NOISY.check(EVENTS, SIZES)
