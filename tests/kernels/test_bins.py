"""Bins of ranks: null and atoms apart, the rest even; a round trip keeps the reference's distribution."""

import numpy as np
import pytest
from scipy.stats import kstest

from dpdask.kernels import rank as bins
from dpdask.kernels import rank as ecdf


def reference(atoms=(), null=0.0):
    values = np.sort(np.random.default_rng(1).lognormal(size=5000))
    x, c = ecdf.continualise(
        values, np.ones(5000), np.array(atoms), np.full(len(atoms), 2500.0), None, None
    )
    c = null + (1 - null) * c
    return x, c


def raw(rng, n):
    return rng.integers(0, 2**64 - 1, n, dtype=np.uint64, endpoint=True)


def test_null_and_each_atom_are_bins_of_their_own():
    x, c = reference(atoms=(0.0, 1.0), null=0.2)
    edges = bins.bin_edges(x, c, 10)
    assert edges[1] == pytest.approx(0.2)
    for atom in (0.0, 1.0):
        low, high = c[np.flatnonzero(x == atom)[[0, -1]]]
        assert np.isclose(edges, low).any()
        assert np.isclose(edges, high).any()
        assert not ((edges > low + 1e-9) & (edges < high - 1e-9)).any()


def test_values_fall_in_the_bin_of_their_rank_and_atoms_and_nulls_in_theirs():
    rng = np.random.default_rng(2)
    x, c = reference(atoms=(1.0,), null=0.25)
    edges = bins.bin_edges(x, c, 12)
    values = np.array([1.0, 0.0, np.exp(3.0), 0.0])
    is_null = np.array([False, True, False, False])
    cells = bins.cells_of(values, is_null, raw(rng, 4), x, c, edges, lattice=False)
    low, high = c[np.flatnonzero(x == 1.0)[[0, -1]]]
    assert edges[cells[0]] == pytest.approx(low)
    assert edges[cells[0] + 1] == pytest.approx(high)
    assert list(cells[1:]) == [0, len(edges) - 2, 1]


def test_drawing_from_all_bins_gives_the_reference_back():
    rng = np.random.default_rng(3)
    x, c = reference()
    edges = bins.bin_edges(x, c, 16)
    n = 100_000
    cells = np.repeat(np.arange(16, dtype=np.int32), n // 16)
    values, is_null = bins.draw_values(cells, raw(rng, len(cells)), x, c, edges, lattice=False)
    assert not is_null.any()
    assert kstest(np.interp(values, x, c), "uniform").pvalue > 1e-6
    back = bins.cells_of(values, is_null, raw(rng, len(cells)), x, c, edges, lattice=False)
    assert (back == cells).mean() > 0.999
    assert kstest(np.interp(values[: n // 2], x, c), "uniform").pvalue < 1e-6
