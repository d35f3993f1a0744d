"""Quotas and decoding against their definitions, the argmax, and the best assignment there is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy.optimize import linear_sum_assignment

from dpdask.kernels.decode import calibrate, calibrate_groups, decode, quotas

SEEDS = st.integers(0, 2**32 - 1)


def shares(rng, n_groups, n_levels):
    """Random probabilities, some of them 0 and some tiny."""
    raw = rng.dirichlet(np.full(n_levels, rng.choice([0.05, 0.5, 5.0])), size=n_groups)
    raw[rng.random(raw.shape) < 0.2] = 0.0
    raw[raw.sum(axis=1) == 0, 0] = 1.0
    return raw / raw.sum(axis=1, keepdims=True)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def counted(chosen, groups, shape):
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, (groups.astype(int), chosen.astype(int)), 1)
    return counts


# Quotas


@settings(max_examples=80)
@given(
    SEEDS,
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([0, 3, 2000, 10**9]),
    st.sampled_from([None, 0.0, np.nextafter(1.0, 0.0)]),
)
def test_quotas_sum_to_the_rows_and_are_less_than_one_off(seed, n_groups, n_levels, most, uniform):
    rng = default_rng(seed)
    probabilities, rows = shares(rng, n_groups, n_levels), rng.integers(0, most + 1, n_groups)
    found = quotas(
        probabilities, rows, rng.random(n_groups) if uniform is None else np.full(n_groups, uniform)
    )
    assert found.dtype == np.int64
    assert (found.sum(axis=1) == rows).all()
    assert (np.abs(found - probabilities * rows[:, None]) < 1 + 1e-6).all()
    assert (found[probabilities == 0] == 0).all()
    assert (found >= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_expectation_over_uniforms_is_what_is_asked_for(seed):
    rng = default_rng(seed)
    probabilities, rows, steps = shares(rng, 3, 7), np.array([1, 17, 400]), 2000
    found = (
        sum(
            quotas(probabilities, rows, np.full(3, (k + 0.5) / steps)).astype(float)
            for k in range(steps)
        )
        / steps
    )
    assert np.abs(found - probabilities * rows[:, None]).max() <= 2 / steps


# Decoding


@given(SEEDS, st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, 2, 7, 60, 400]))
def test_every_groups_quotas_are_kept_exactly(seed, n_groups, n_levels, n):
    rng = default_rng(seed)
    probabilities, groups = (
        shares(rng, n_groups, n_levels),
        rng.integers(0, n_groups, n).astype(np.uint16),
    )
    if rng.random() < 0.2:
        groups[:] = groups[0]  # all rows in one group, the others empty
    uniforms, spread = rng.random(n_groups), rng.choice([0.0, 0.1, 3.0])
    offsets = (rng.normal(size=probabilities.shape) * spread).astype(np.float32)
    chosen = decode(normal(rng, n_levels, n), offsets, probabilities, groups, uniforms)
    assert chosen.dtype == np.uint16
    rows = np.bincount(groups, minlength=n_groups)
    assert (
        counted(chosen, groups, probabilities.shape) == quotas(probabilities, rows, uniforms)
    ).all()


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
def test_ties_everywhere_are_settled_too(value):
    """Rows that are all alike, as where an attribute has no variable of its own."""
    n = 500
    probabilities = np.array([[0.2, 0.5, 0.3]])
    chosen = decode(
        np.full((3, n), value, dtype=np.float32),
        np.zeros((1, 3), np.float32),
        probabilities,
        np.zeros(n, np.uint16),
        np.zeros(1),
    )
    assert np.bincount(chosen).tolist() == [100, 250, 150]


@pytest.mark.parametrize("seed", range(10))
def test_without_a_surplus_each_row_takes_its_best_level(seed):
    rng = default_rng(seed)
    n_groups, n_levels, n = 3, int(rng.integers(1, 8)), 600
    utilities, offsets, groups = (
        normal(rng, n_levels, n),
        normal(rng, n_groups, n_levels),
        rng.integers(0, n_groups, n).astype(np.uint16),
    )
    best = (utilities + offsets[groups].T).argmax(axis=0)
    found = counted(best, groups, offsets.shape)
    chosen = decode(
        utilities, offsets, found / found.sum(axis=1, keepdims=True), groups, np.full(n_groups, 0.5)
    )
    assert (chosen == best).all()


def optimum(utilities, quota):
    seats = np.repeat(np.arange(len(quota)), quota)
    value = utilities[seats].T.astype(float)
    rows, columns = linear_sum_assignment(value, maximize=True)
    return float(value[rows, columns].sum())


@pytest.mark.parametrize("n_levels", [2, 3, 5, 9])
@pytest.mark.parametrize(("calibrated", "slack"), [(True, 0.02), (False, 0.1)])
def test_the_total_utility_is_near_the_best_assignments(n_levels, calibrated, slack):
    """As a part of what the best assignment is better than a random one, whose utility is 0 in the mean."""
    best = found = 0.0
    for seed in range(8):
        rng = default_rng(seed)
        n = 250
        utilities, probabilities = (
            normal(rng, n_levels, n),
            rng.dirichlet(np.full(n_levels, 2.0), 1),
        )
        start = np.zeros(n_levels, dtype=np.float32)
        offsets = (calibrate(utilities, probabilities[0], start) if calibrated else start).reshape(
            1, -1
        )
        chosen = decode(utilities, offsets, probabilities, np.zeros(n, np.uint16), np.array([0.5]))
        found += utilities[chosen, np.arange(n)].sum()
        best += optimum(utilities, np.bincount(chosen, minlength=n_levels))
    assert best * (1 - slack) <= found <= best * (1 + 1e-6)


# Calibration


@pytest.mark.parametrize("n_levels", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("seed", range(3))
def test_after_calibration_the_best_levels_come_as_often_as_asked(n_levels, seed):
    rng = default_rng(seed)
    n = 4000
    utilities, wanted = normal(rng, n_levels, n), rng.dirichlet(np.full(n_levels, 1.0))
    offsets = calibrate(utilities, wanted, np.zeros(n_levels, dtype=np.float32))
    found = np.bincount((utilities + offsets[:, None]).argmax(axis=0), minlength=n_levels)
    assert np.abs(found - wanted * n).max() <= 8
    assert np.abs(found - wanted * n).sum() <= 0.005 * n


def test_groups_are_calibrated_apart_and_an_empty_one_stays():
    rng = default_rng(1)
    n, probabilities = 6000, np.array([[0.8, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.05, 0.05, 0.9]])
    utilities, groups = normal(rng, 3, n), rng.choice(np.array([0, 2], dtype=np.uint16), n)
    start = normal(rng, 3, 3)
    offsets = calibrate_groups(utilities, probabilities, groups, start)
    assert offsets[1].tolist() == start[1].tolist()
    found = counted((utilities + offsets[groups].T).argmax(axis=0), groups, (3, 3))
    for group in (0, 2):
        assert np.abs(found[group] - probabilities[group] * found[group].sum()).max() <= 8
        alone = calibrate(
            np.ascontiguousarray(utilities[:, groups == group]), probabilities[group], start[group]
        )
        assert offsets[group].tolist() == alone.tolist()
