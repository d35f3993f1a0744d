"""Draws that depend on a parent's released level, and the losses of their outcomes."""

import numpy as np
import pytest

from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import channel as kernel


def random_weights(n_parents, n, seed=1):
    rng = np.random.default_rng(seed)
    return channel_kernel.integer_weights(rng.dirichlet(np.ones(n), size=n_parents * n)).reshape(
        n_parents, n, n
    )


def draw_each(rows, words, thresholds, aliases):
    """Each word's level by all of its threshold, without the packed tables."""
    bits = channel_kernel.index_bits(thresholds)
    return [
        channel_kernel.draw(word, row, bits, thresholds, aliases)
        for word, row in zip(words, rows, strict=True)
    ]


@pytest.mark.parametrize(("n_parents", "n"), [(1, 1), (1, 5), (3, 4), (7, 300)])
def test_a_draw_is_that_of_the_row_of_its_parent_and_own_level(n_parents, n):
    weights = random_weights(n_parents, n)
    thresholds, aliases = channel_kernel.alias_tables(weights.reshape(-1, n))
    rng = np.random.default_rng(2)
    parents = rng.integers(0, n_parents, size=2_000).astype(np.uint16)
    own = rng.integers(0, n, size=2_000).astype(np.int32)
    words = rng.integers(0, 2**64, size=2_000, dtype=np.uint64)
    expected = draw_each(parents.astype(np.int64) * n + own, words, thresholds, aliases)
    found = kernel.sample(parents, own, words, n, kernel.make_tables(weights))
    assert found.dtype == np.uint16
    assert found.tolist() == expected


@pytest.mark.parametrize("n", [2, 5, 64, 300])
def test_words_beside_a_threshold_are_compared_with_all_of_it(n):
    weights = random_weights(1, n)
    weights[0, 0] = 0
    weights[0, 0, n - 1] = 2**63  # cells that no word reaches, and one that every word reaches
    tables = kernel.make_tables(weights)
    bits = int(channel_kernel.index_bits(tables.thresholds))
    rows, cells = (each.ravel() for each in np.indices(tables.thresholds.shape))
    for step in (-1, 0, 1):
        rest = np.clip(
            tables.thresholds.ravel().astype(object) + step, 0, 2 ** (63 - bits) - 1
        ).astype(np.uint64)
        words = ((rest << np.uint64(bits)) | cells.astype(np.uint64)) << np.uint64(1)
        own = rows.astype(np.int32)
        found = kernel.sample(np.zeros(len(own), dtype=np.uint16), own, words, n, tables)
        assert found.tolist() == draw_each(rows, words, tables.thresholds, tables.aliases)


def test_losses_are_the_exact_ones_rounded_up():
    weights = random_weights(4, 6)
    found = kernel.losses(weights)
    for table, losses in zip(weights, found, strict=True):
        for level, loss in enumerate(losses):
            pair = np.stack(
                [table[:, level], (1 << 63) - table[:, level]], axis=1
            )  # one outcome against all others
            ends = pair[[table[:, level].argmin(), table[:, level].argmax()]]
            ratio = np.log(np.longdouble(ends[1, 0])) - np.log(np.longdouble(ends[0, 0]))
            assert 0 <= loss - ratio < 1e-13
        assert losses.max() >= float(channel_kernel.exact_epsilon(table))


def test_losses_of_outcomes_that_never_happen_or_only_for_some_rows():
    half = 2**62
    weights = np.array([[[half, half, 0], [2 * half, 0, 0], [half, half, 0]]], dtype=np.uint64)
    assert kernel.losses(weights)[0, 1:].tolist() == [np.inf, -np.inf]
    same = np.array([[[half, half], [half, half]]], dtype=np.uint64)
    assert kernel.losses(same).tolist() == [[0.0, 0.0]]
