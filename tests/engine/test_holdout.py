"""The hold-out split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpdask.engine.scan import HOLDOUT_ID, holdout_mask
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(1)


@given(sizes=st.lists(st.integers(0, 70), min_size=1, max_size=8))
def test_the_split_does_not_depend_on_batching(sizes):
    whole = holdout_mask(stream(KEY, HOLDOUT_ID, "f"), sum(sizes), 0.3)
    rng = stream(KEY, HOLDOUT_ID, "f")
    assert (
        np.concatenate([holdout_mask(rng, size, 0.3) for size in sizes]).tolist() == whole.tolist()
    )


def test_fragments_and_keys_split_differently():
    masks = {
        holdout_mask(stream(key, HOLDOUT_ID, name), 200, 0.5).tobytes()
        for key in (KEY, RunKey.insecure(2))
        for name in "ab"
    }
    assert len(masks) == 4


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.9])
def test_the_held_out_share_is_the_fraction_no_more_and_no_less(fraction):
    n = 1_000_000
    held = int(holdout_mask(stream(KEY, HOLDOUT_ID, "f"), n, fraction).sum())
    assert stats.binomtest(held, n, fraction).pvalue > 1e-9
    assert stats.binomtest(held, n, fraction * 1.3 if fraction < 0.7 else 0.897).pvalue < 1e-9
    assert stats.binomtest(held, n, fraction * 0.8).pvalue < 1e-9


@pytest.mark.parametrize("fraction", [np.nextafter(0, 1), 2.0**-64, np.nextafter(1, 0)])
def test_extreme_fractions_hold_out_nobody_or_everybody(fraction):
    mask = holdout_mask(stream(KEY, HOLDOUT_ID, "f"), 1000, fraction)
    assert mask.all() if fraction > 0.5 else not mask.any()
