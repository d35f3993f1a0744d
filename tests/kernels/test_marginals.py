"""Contingency counts against pandas, over every way in which a pair is counted."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from dpdask.kernels import marginals as kernel

SIZES = st.one_of(st.integers(1, 5), st.sampled_from([1, 2, 2, 2, 17, 100, 255, 256, 257, 300]))
N_ROWS = st.one_of(
    st.integers(0, 200),
    st.sampled_from([0, 1, 63, 64, 65, 1000, kernel.BLOCK_ROWS, kernel.BLOCK_ROWS + 67]),
)


def random_codes(sizes, n_rows, seed=0, dtype=np.uint8):
    """Return a code matrix; a third of the columns is skewed, a third is constant at its last level now and then."""
    rng = np.random.default_rng(seed)
    codes = np.empty((len(sizes), n_rows), dtype=dtype if max(sizes) <= 256 else np.uint16)
    for column, size in zip(codes, sizes, strict=True):
        power, last = rng.choice([1, 6]), rng.random() < 0.1
        column[:] = size - 1 if last else (size * rng.random(n_rows) ** power).astype(int)
    return codes


def crosstab(codes, sizes, a, b):
    if codes.shape[1] == 0:
        return np.zeros((sizes[a], sizes[b]), dtype=np.int64)
    found = pd.crosstab(codes[a].astype(int), codes[b].astype(int))
    return found.reindex(index=range(sizes[a]), columns=range(sizes[b]), fill_value=0).to_numpy()


def all_crosstabs(codes, sizes):
    return [crosstab(codes, sizes, a, b) for a, b in combinations(range(len(sizes)), 2)]


def tables(flat, sizes):
    """Return the tables one by one, cut from the flat array in lexicographic order."""
    assert flat.dtype == np.int64
    shapes = [(sizes[a], sizes[b]) for a, b in combinations(range(len(sizes)), 2)]
    parts = np.split(flat, np.cumsum([s * t for s, t in shapes])) if shapes else [flat]
    assert len(parts[-1]) == 0
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]


def as_sizes(sizes):
    return np.array(sizes, dtype=np.int64)


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=7),
    n_rows=N_ROWS,
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.uint8, np.uint16]),
)
@example(sizes=[2] * 7, n_rows=kernel.BLOCK_ROWS + 67, seed=1, dtype=np.uint8)
@example(sizes=[300, 300, 2], n_rows=200, seed=1, dtype=np.uint8)
@example(sizes=[1, 1], n_rows=3, seed=1, dtype=np.uint8)
def test_all_pairs_equal_pandas_crosstab(sizes, n_rows, seed, dtype):
    codes = random_codes(sizes, n_rows, seed, dtype)
    found = tables(kernel.count_pairs(codes, as_sizes(sizes)), sizes)
    for table, expected in zip(found, all_crosstabs(codes, sizes), strict=True):
        assert_array_equal(table, expected)


def test_more_rows_of_bits_than_a_panel_equal_a_matrix_product():
    n_binary = 131
    sizes = [2] * n_binary
    sizes[7], sizes[100] = 3, 40
    codes = random_codes(sizes, kernel.BLOCK_ROWS + 1234)
    one_hot = np.concatenate(
        [column == np.arange(size)[:, None] for column, size in zip(codes, sizes, strict=True)]
    ).astype(np.float32)
    product = (one_hot @ one_hot.T).astype(np.int64)  # exact: counts are below 2**24
    ends = np.cumsum([0, *sizes])
    found = tables(kernel.count_pairs(codes, as_sizes(sizes)), sizes)
    for table, (a, b) in zip(found, combinations(range(n_binary), 2), strict=True):
        assert_array_equal(table, product[ends[a] : ends[a + 1], ends[b] : ends[b + 1]])


@pytest.mark.parametrize("cells", [0, 3, 10_000])
@pytest.mark.parametrize("tally_cells", [0, 1 << 14])
def test_every_way_of_counting_agrees(cells, tally_cells, monkeypatch):
    sizes = [2, 9, 2, 1, 4, 40, 40, 2]
    codes = random_codes(sizes, 2 * kernel.BLOCK_ROWS + 77)
    codes[4] = 3  # one cell holds whole blocks: the most that a private uint16 table has to hold
    codes[5] = 39
    monkeypatch.setattr(kernel, "BIT_CELLS", cells)
    monkeypatch.setattr(kernel, "TALLY_CELLS", tally_cells)
    for name in (
        "_count_pairs",
        "_tally_pairs",
    ):  # compiled code froze the constant: run the two that read it as Python
        monkeypatch.setattr(kernel, name, getattr(kernel, name).py_func)
    found = tables(kernel.count_pairs(codes, as_sizes(sizes)), sizes)
    for table, expected in zip(found, all_crosstabs(codes, sizes), strict=True):
        assert_array_equal(table, expected)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    n_rows=N_ROWS,
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_clique_equals_numpy_of_its_raveled_codes(sizes, n_rows, seed, data):
    codes = random_codes(sizes, n_rows, seed)
    clique = data.draw(
        st.permutations(range(len(sizes))).flatmap(
            lambda order: st.integers(1, len(order)).map(lambda k: order[:k])
        )
    )
    shape = [sizes[a] for a in clique]
    keys = np.ravel_multi_index([codes[a].astype(int) for a in clique], shape)
    expected = np.bincount(keys, minlength=int(np.prod(shape)))
    found = kernel.count_clique(codes, as_sizes(sizes), clique)
    assert found.dtype == np.int64
    assert_array_equal(found, expected)


def test_a_refused_batch_leaves_the_output_untouched():
    out = np.zeros(4, dtype=np.int64)
    with pytest.raises(ValueError, match="attribute 0"):
        kernel.count_pairs(np.array([[0, 2], [0, 0]], dtype=np.uint8), as_sizes([2, 2]), out)
    assert not out.any()
