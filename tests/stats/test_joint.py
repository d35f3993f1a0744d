"""Joint counts against np.unique, their laws, and what one row moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mechanisms.noisy import lettered

from dpdask.errors import SpecError
from dpdask.stats.marginals import MAX_JOINT_CELLS, JointCounts, codes_of, keys_of, n_cells


def coded(domain, n, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, size, n) for size in domain.sizes]).astype(domain.code_dtype)


def same(one, other):
    return (
        one.domain == other.domain
        and np.array_equal(one.keys, other.keys)
        and np.array_equal(one.counts, other.counts)
    )


@pytest.mark.parametrize(
    "sizes", [(3,), (2, 5), (300, 2, 7), (65536, 65536, 65536), (65536, 65536, 65536, 2**14)]
)
def test_cells_are_the_flat_index_and_back(sizes):
    domain = lettered(*sizes)
    codes = coded(domain, 500)
    codes[:, -1] = np.array(sizes) - 1
    keys = keys_of(domain, codes)
    assert np.array_equal(
        keys, np.ravel_multi_index([code.astype(np.int64) for code in codes], sizes)
    )
    assert keys[-1] == n_cells(domain) - 1
    again = codes_of(domain, keys)
    assert again.dtype == domain.code_dtype
    assert np.array_equal(again, codes)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=40),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_counts_are_those_of_unique_and_merge_is_a_commutative_monoid(rows, first, second):
    domain = lettered(3, 5)
    codes = np.ascontiguousarray(np.array(rows, dtype=np.uint8).reshape(-1, 2).T)
    whole = JointCounts.of_codes(domain, codes)
    keys, counts = np.unique(keys_of(domain, codes), return_counts=True)
    assert np.array_equal(whole.keys, keys)
    assert np.array_equal(whole.counts, counts)
    assert (whole.n_rows, len(whole.keys)) == (len(rows), len(keys))
    low, high = sorted((first, second))
    a, b, c = (
        JointCounts.of_codes(domain, np.ascontiguousarray(part))
        for part in (codes[:, :low], codes[:, low:high], codes[:, high:])
    )
    nothing = JointCounts.identity(domain)
    assert all(
        same(whole, other)
        for other in (
            a.merge(b, c),
            c.merge(a).merge(b),
            a.merge(b.merge(c)),
            nothing.merge(whole),
            whole.merge(nothing),
            whole.merge(),
        )
    )
    assert a.merge(b, c).keys.dtype == a.merge(b, c).counts.dtype == np.int64


def test_refusals():
    with pytest.raises(SpecError, match="cells"):
        n_cells(lettered(65536, 65536, 65536, 2**14 + 1))
    assert n_cells(lettered(65536, 65536, 65536, 2**14)) == MAX_JOINT_CELLS
    with pytest.raises(SpecError, match="cells"):
        JointCounts.identity(lettered(*[65536] * 4))
    domain = lettered(3, 2)
    with pytest.raises(ValueError, match="not below"):
        JointCounts.of_codes(domain, np.array([[3], [0]], dtype=np.uint8))
    with pytest.raises(ValueError, match="different domains"):
        JointCounts.identity(domain).merge(JointCounts.identity(lettered(2, 3)))
