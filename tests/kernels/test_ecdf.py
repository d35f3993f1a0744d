"""Weighted samples: merging, compressing within the stated error, and the continualised cdf."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.kernels import rank as ecdf

NOTHING = np.empty(0)


@st.composite
def samples(draw, largest_weight=1000):
    """Sorted distinct values with positive weights, a few of them heavy."""
    values = sorted(draw(st.sets(st.integers(-1000, 1000), min_size=1, max_size=80)))
    weights = draw(
        st.lists(
            st.one_of(st.integers(1, 3), st.integers(1, largest_weight)),
            min_size=len(values),
            max_size=len(values),
        )
    )
    return np.array(values, dtype=float), np.array(weights, dtype=np.int64)


def rank_of(points, values, weights):
    """Return the weight at or below each point."""
    return np.concatenate([[0], np.cumsum(weights)])[np.searchsorted(values, points, side="right")]


@given(st.lists(st.sampled_from([-1.5, 0.0, -0.0, 2.0, 1e300]), min_size=1))
def test_distinct_counts_every_value_once(values):
    found, counts = np.unique(np.array(values), return_counts=True)
    assert found.tolist() == sorted(set(values))
    assert counts.tolist() == [values.count(value) for value in found]


@given(st.lists(samples(), min_size=1, max_size=5))
def test_merge_equals_the_distinct_values_of_everything(parts):
    values, weights = ecdf.merge([part[0] for part in parts], [part[1] for part in parts])
    everything = np.concatenate([np.repeat(*part) for part in parts])
    found, counts = np.unique(everything, return_counts=True)
    assert values.tolist() == found.tolist()
    assert weights.tolist() == counts.tolist()


@given(sample=samples(), n_points=st.integers(2, 90))
def test_compress_keeps_total_ends_and_ranks_within_the_stated_error(sample, n_points):
    values, weights = sample
    kept, new_weights, error = ecdf.compress(values, weights, n_points)
    assert len(kept) <= n_points or len(values) <= n_points
    assert new_weights.sum() == weights.sum()
    assert (kept[0], kept[-1]) == (values[0], values[-1])
    assert np.isin(kept, values).all()
    moved = np.abs(rank_of(values, values, weights) - rank_of(values, kept, new_weights))
    assert moved.max() == error
    assert error < -(-int(weights.sum()) // (n_points - 1))
    assert not np.abs(rank_of(kept, values, weights) - rank_of(kept, kept, new_weights)).any()


def paper_cdf(point, values, weights, is_atom, origin):
    """Return the continualised cdf (3), (7) directly: a number's weight is spread over the gap below it, an atom's is not."""
    total, below = 0.0, origin
    for value, weight, atom in zip(values, weights, is_atom, strict=True):
        share = (
            float(point >= value) if atom else min(max((point - below) / (value - below), 0.0), 1.0)
        )
        total += weight * share
        below = value
    return total / weights.sum()


@given(
    sample=samples(9), data=st.data(), start=st.sampled_from([None, -1000.0]), lattice=st.booleans()
)
def test_continualise_equals_the_papers_formula_with_atoms(sample, data, start, lattice):
    values, weights = sample
    is_atom = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    )
    x, c = ecdf.continualise(
        values[~is_atom],
        weights[~is_atom] * 1.0,
        values[is_atom],
        weights[is_atom] * 1.0,
        start,
        1.0 if lattice else None,
    )
    assert (c[0], c[-1]) == (0.0, 1.0)
    assert (np.diff(x) >= 0).all()
    assert (np.diff(c) >= 0).all()
    for point in [*values, *(values + 0.25), values[0] - 0.5]:
        k = int(np.searchsorted(x, point, side="right"))
        read = (
            c[k - 1]
            if k == len(x) or (k and x[k - 1] == point)
            else np.interp(point, x[max(k - 1, 0) : k + 1], c[max(k - 1, 0) : k + 1])
        )
        if x[0] < values[0] or is_atom[0]:
            assert read == pytest.approx(
                paper_cdf(point, values, weights, is_atom, x[0]), abs=1e-12
            )


@pytest.mark.parametrize(
    ("values", "start", "step", "origin"),
    [
        ([3.0, 5.0], None, None, 1.0),
        ([3.0, 5.0], 2.0, None, 2.0),
        ([3.0, 5.0], None, 1.0, 2.0),
        ([3.0, 5.0], 3.0, 1.0, 2.0),
        ([3.0], None, None, 2.0),
    ],
)
def test_the_gap_below_the_smallest_value_is_as_documented(values, start, step, origin):
    x, c = ecdf.continualise(np.array(values), np.ones(len(values)), NOTHING, NOTHING, start, step)
    assert x.tolist() == [origin, *values]
    assert c[0] == 0.0


def test_an_unseen_atom_leaves_no_knot():
    x, c = ecdf.continualise(
        np.array([1.0]), np.ones(1), np.array([0.0, 5.0]), np.array([1.0, 0.0]), None, None
    )
    assert x.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert c.tolist() == [0.0, 0.0, 0.5, 1.0]
