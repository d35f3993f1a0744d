"""Shrinkage, raking and mutual information of stacks of tables: what noise leaves, what structure keeps, in both directions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from dpdask.kernels.marginals import (
    estimate,
    independence,
    mutual_information,
    project_stack,
    rake,
    shrink_values,
    tell_dependence,
)

SHAPES = [(2, 2), (2, 9), (5, 5), (4, 16), (12, 7), (20, 20)]
SIGMA = 50.0
TOTAL = 32_000.0


def margins(rng, k, m, n):
    return TOTAL * rng.dirichlet(np.full(m, 4.0), k), TOTAL * rng.dirichlet(np.full(n, 4.0), k)


def dependent(rng, k, m, n, strength):
    """Tables with a rank-one departure from independence, of `strength` times σ in Frobenius norm."""
    rows, columns = margins(rng, k, m, n)
    left, right = (
        side - side.mean(axis=1, keepdims=True)
        for side in (rng.normal(size=(k, m)), rng.normal(size=(k, n)))
    )
    departure = left[:, :, None] * right[:, None, :]
    departure *= strength * SIGMA / np.linalg.norm(departure, axis=(1, 2), keepdims=True)
    return independence(rows, columns, TOTAL) + departure


def noised(rng, tables):
    return tables + rng.normal(size=tables.shape) * SIGMA


def square(tables):
    return float((tables**2).sum(axis=(1, 2)).mean())


def shrunken(tables, noisy, sigma=SIGMA):
    return estimate(noisy, tables.sum(axis=2), tables.sum(axis=1), TOTAL, sigma)


# Shrinkage


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_pure_noise_is_taken_out_and_only_the_right_sigma_does_so(m, n):
    rng = default_rng(m * n)
    rows, columns = margins(rng, 400, m, n)
    flat = independence(rows, columns, TOTAL)
    noisy = noised(rng, flat)
    free = (m - 1) * (n - 1) * SIGMA**2
    left = estimate(noisy, rows, columns, TOTAL, SIGMA) - flat
    assert (
        square(left) < (0.6 if m == n == 2 else 0.15) * free
    )  # one number with its noise tells little of its own size
    assert (
        np.abs(left).max(axis=(1, 2)) < 1e-6
    ).mean() > 0.45  # half of the tables are independence itself
    assert (
        square(estimate(noisy, rows, columns, TOTAL, SIGMA / 3) - flat) > 0.5 * free
    )  # understated, the noise stays
    assert square(estimate(noisy, rows, columns, TOTAL, 3 * SIGMA) - flat) < 0.01 * free


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0, 4.0, 16.0])
def test_the_error_is_less_than_the_noisy_tables_and_no_other_sigma_does_better(m, n, strength):
    rng = default_rng(int(m * n + strength))
    truth = dependent(rng, 300, m, n, strength * (math.sqrt(m - 1) + math.sqrt(n - 1)))
    noisy = noised(rng, truth)
    error = square(shrunken(truth, noisy) - truth)
    assert error < 0.95 * square(noisy - truth)
    if min(m, n) > 2:  # with more than one singular value there is noise to tell apart
        understated, overstated = (
            square(shrunken(truth, noisy, SIGMA * factor) - truth) for factor in (1 / 3, 3)
        )
        assert error < understated
        assert error < 1.02 * overstated or strength < 4.0


def test_transposing_commutes_the_total_is_believed_and_no_noise_changes_nothing():
    rng = default_rng(2)
    truth = dependent(rng, 5, 4, 9, 60.0)
    noisy = noised(rng, truth)
    found = shrunken(truth, noisy)
    back = shrunken(truth.transpose(0, 2, 1), noisy.transpose(0, 2, 1))
    assert_allclose(back.transpose(0, 2, 1), found, rtol=1e-9, atol=1e-6)
    assert_allclose(found.sum(axis=(1, 2)), TOTAL, rtol=1e-9)
    assert_allclose(shrunken(truth, truth, 1e-9), truth, rtol=1e-9)


# The choice between the two estimates


def parts(noisy, truth):
    """The two estimates of tables with the true margins: by singular values, and the nearest without negative counts."""
    flat = independence(truth.sum(axis=2), truth.sum(axis=1), TOTAL)
    departure = noisy - flat
    departure -= departure.mean(axis=1, keepdims=True)
    departure -= departure.mean(axis=2, keepdims=True)
    return flat + shrink_values(departure, SIGMA)[0], project_stack(flat + departure, TOTAL)[0]


def diagonal(rng, k, size):
    """Tables in which each attribute says the other: full rank, and most cells empty."""
    return TOTAL * rng.dirichlet(np.full(size, 4.0), k)[:, :, None] * np.eye(size)


def test_a_diagonal_takes_the_projection_and_low_rank_takes_the_shrinkage():
    rng = default_rng(8)
    cases = {"diagonal": diagonal(rng, 100, 16), "low rank": dependent(rng, 100, 16, 16, 30.0)}
    errors = {}
    for name, truth in cases.items():
        noisy = noised(rng, truth)
        errors[name] = tuple(
            square(found - truth) for found in (*parts(noisy, truth), shrunken(truth, noisy))
        )
    by_values, by_projection, chosen = errors["diagonal"]
    assert by_projection < 0.5 * by_values
    assert chosen < 1.05 * by_projection
    by_values, by_projection, chosen = errors["low rank"]
    assert by_values < 0.5 * by_projection
    assert chosen < 1.05 * by_values


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_the_divergences_are_those_of_the_maps(m, n):
    """Against the derivative along every centred direction, by differences."""
    m, n = min(m, n), max(m, n)
    rng = default_rng(m + 31 * n)
    truth = dependent(rng, 1, m, n, 1.5 * (math.sqrt(m - 1) + math.sqrt(n - 1)))
    flat = (
        independence(truth.sum(axis=2), truth.sum(axis=1), TOTAL) * 0.02
    )  # so that the projection empties cells
    noise = rng.normal(size=(m, n)) * 2.0 * SIGMA
    centred = [
        np.linalg.qr(np.column_stack([np.ones(size), rng.normal(size=(size, size - 1))]))[0][:, 1:]
        for size in (m, n)
    ]
    departure = (centred[0] @ centred[0].T @ noise @ centred[1] @ centred[1].T)[None]
    step = 1e-4
    sums = np.zeros(2)
    for left in centred[0].T:
        for right in centred[1].T:
            direction = np.outer(left, right)
            moved = [
                (
                    shrink_values(departure + sign * step * direction, SIGMA)[0],
                    project_stack(flat + departure + sign * step * direction, TOTAL)[0],
                )
                for sign in (1, -1)
            ]
            sums += [
                float(((up - down)[0] * direction).sum()) / (2 * step)
                for up, down in zip(*moved, strict=True)
            ]
    assert sums[0] == pytest.approx(shrink_values(departure, SIGMA)[1][0], rel=1e-4, abs=1e-6)
    assert sums[1] == pytest.approx(
        project_stack(flat + departure, TOTAL)[1][0], rel=1e-4, abs=1e-6
    )


# Raking


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8))
def test_raked_tables_have_the_wanted_margins_and_keep_frechets_bounds(seed, k, m, n):
    rng = default_rng(seed)
    rows, columns = margins(rng, k, m, n)
    raked = rake(noised(rng, independence(rows, columns, TOTAL)), rows, columns)
    assert (raked >= 0).all()
    assert_allclose(raked.sum(axis=2), rows, rtol=1e-9, atol=1e-9)
    assert_allclose(raked.sum(axis=1), columns, rtol=0, atol=1e-5 * TOTAL)
    slack = 1e-5 * TOTAL
    low, high = (
        rows[:, :, None] + columns[:, None, :] - TOTAL,
        np.minimum(rows[:, :, None], columns[:, None, :]),
    )
    assert (raked >= low - slack).all()
    assert (raked <= high + slack).all()


def test_raking_keeps_a_table_that_has_its_margins_and_every_odds_ratio_otherwise():
    rng = default_rng(8)
    table = rng.gamma(2.0, 100.0, size=(1, 3, 4))
    assert_allclose(rake(table, table.sum(axis=2), table.sum(axis=1)), table, rtol=1e-6)
    rows, columns = (table.sum() * rng.dirichlet(np.full(size, 5.0), 1) for size in (3, 4))
    raked = rake(table, rows, columns)

    def odds(given):
        return given[0, :-1, :-1] * given[0, 1:, 1:] / (given[0, :-1, 1:] * given[0, 1:, :-1])

    assert_allclose(odds(raked), odds(table), rtol=1e-6)


# Mutual information


def information(table):
    """By the definition, cell by cell."""
    total, value = table.sum(), 0.0
    for i, j in np.ndindex(*table.shape):
        if table[i, j] > 0:
            value += (
                table[i, j]
                / total
                * math.log(table[i, j] * total / (table[i].sum() * table[:, j].sum()))
            )
    return value


@pytest.mark.parametrize(("m", "n"), [*SHAPES, (1, 5)])
def test_mutual_information_is_its_definition(m, n):
    tables = default_rng(9).poisson(3.0, size=(20, m, n)).astype(float)
    assert_allclose(
        mutual_information(tables), [information(table) for table in tables], rtol=1e-9, atol=1e-12
    )
    assert_allclose(
        mutual_information(tables.transpose(0, 2, 1)),
        mutual_information(tables),
        rtol=1e-9,
        atol=1e-12,
    )


def test_dependence_is_told_from_noise_and_noise_is_not_told():
    rng = default_rng(4)
    rows, columns = np.full((200, 6), 500.0), np.full((200, 8), 375.0)
    even = np.full((200, 6, 8), 3000.0 / 48)
    noisy = even + rng.normal(0.0, 20.0, even.shape)
    assert (
        tell_dependence(noisy, rows, columns, 3000.0, 20.0).mean() < 0.3
    )  # the largest singular value scatters about the edge
    pattern = np.outer([1, -1, 1, -1, 1, -1], [1, -1] * 4) * 25.0
    assert tell_dependence(noisy + pattern, rows, columns, 3000.0, 20.0).all()
    assert not tell_dependence(even[:, :1], rows[:, :1] * 6, columns, 3000.0, 20.0).any()
