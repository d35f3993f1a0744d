"""Draws that depend on a parent's released level, and the losses of their outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import channel as kernel


def random_weights(n_parents, n, seed=1):
    rng = np.random.default_rng(seed)
    return channel_kernel.integer_weights(rng.dirichlet(np.ones(n), size=n_parents * n)).reshape(
        n_parents, n, n
    )


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
