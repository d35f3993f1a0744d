"""MarginalCounts of code matrices against pandas, their merge laws, and what they refuse."""

import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.stats import Domain, MarginalCounter, MarginalCounts

DOMAIN = Domain(names=("sex", "age", "one", "income"), sizes=(2, 5, 1, 3))
TRIPLE = ("income", "sex", "age")


def random_codes(domain, n_rows, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, size, n_rows) for size in domain.sizes]).astype(
        domain.code_dtype
    )


def expected_table(domain, codes, clique):
    """Return a clique's table by pandas."""
    frame = pd.DataFrame(dict(zip(domain.names, codes.astype(int), strict=True)))
    index = pd.MultiIndex.from_product([range(size) for size in domain.shape_of(clique)])
    counts = frame.groupby(list(clique)).size()
    counts.index = pd.MultiIndex.from_arrays(
        [counts.index.get_level_values(i) for i in range(len(clique))]
    )
    return (
        counts.reindex(index, fill_value=0)
        .to_numpy(dtype=np.int64)
        .reshape(domain.shape_of(clique))
    )


def plain(marginals):
    cliques = {clique: counts.tolist() for clique, counts in marginals.cliques.items()}
    return (
        marginals.domain,
        marginals.n_rows,
        marginals.one_way.tolist(),
        marginals.pairs.tolist(),
        cliques,
    )


@pytest.mark.parametrize("two_way", [True, False])
def test_a_chosen_clique_is_found_in_any_order_of_its_attributes(two_way):
    codes = random_codes(DOMAIN, 500)
    marginals = MarginalCounts.of_codes(
        DOMAIN, codes, [TRIPLE, ("age", "sex"), TRIPLE], two_way=two_way
    )
    assert list(marginals.cliques) == [TRIPLE, ("age", "sex")]
    for clique in [
        TRIPLE,
        ("age", "income", "sex"),
        ("age", "sex"),
        ("sex", "age"),
        *((name,) for name in DOMAIN.names),
    ]:
        np.testing.assert_array_equal(
            marginals.table(clique), expected_table(DOMAIN, codes, clique)
        )


def test_what_was_not_counted_is_refused():
    marginals = MarginalCounts.of_codes(DOMAIN, random_codes(DOMAIN, 9), two_way=False)
    assert marginals.pairs.shape == (0,)
    for clique in [("sex", "age"), TRIPLE]:
        with pytest.raises(ValueError, match="not counted"):
            marginals.table(clique)
    for clique in [(), ("sex", "sex")]:
        with pytest.raises(ValueError, match="distinct attributes"):
            marginals.table(clique)
        with pytest.raises(ValueError, match="attribute"):
            MarginalCounts.identity(DOMAIN, [clique])
    with pytest.raises(ValueError, match="'height' is not an attribute"):
        marginals.table(("height",))


@pytest.mark.parametrize("two_way", [True, False])
@given(n_rows=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_merged_marginals_are_those_of_all_rows_in_any_grouping(two_way, n_rows):
    batches = [random_codes(DOMAIN, n, seed) for seed, n in enumerate(n_rows)]
    parts = [MarginalCounts.of_codes(DOMAIN, batch, [TRIPLE], two_way=two_way) for batch in batches]
    identity = MarginalCounts.identity(DOMAIN, [TRIPLE], two_way=two_way)
    before = [plain(part) for part in parts]
    forward, backward = identity, identity
    for part in parts:
        forward = forward.merge(part)
    for part in reversed(parts):
        backward = part.merge(backward)
    expected = plain(
        MarginalCounts.of_codes(DOMAIN, np.concatenate(batches, axis=1), [TRIPLE], two_way=two_way)
    )
    assert (
        plain(forward)
        == plain(backward)
        == plain(identity.merge(*parts))
        == plain(parts[0].merge(*parts[1:]))
        == expected
    )
    assert [plain(part) for part in parts] == before
    assert plain(identity)[1] == 0


def test_a_counter_adds_batches_and_starts_again_after_its_result():
    codes = random_codes(DOMAIN, 700)
    counter = MarginalCounter(DOMAIN, [TRIPLE])
    for batch in np.split(codes, [100, 100, 350], axis=1):
        counter.add(np.ascontiguousarray(batch))
    first = counter.result()
    assert plain(first) == plain(MarginalCounts.of_codes(DOMAIN, codes, [TRIPLE]))
    assert plain(counter.result()) == plain(MarginalCounts.identity(DOMAIN, [TRIPLE]))
    assert first.n_rows == first.table(TRIPLE).sum() == 700


def test_marginals_of_other_domains_or_cliques_do_not_merge():
    marginals = MarginalCounts.identity(DOMAIN)
    other = Domain(names=("a", "b", "c", "d"), sizes=DOMAIN.sizes)
    for part in [
        MarginalCounts.identity(other),
        MarginalCounts.identity(DOMAIN, [TRIPLE]),
        MarginalCounts.identity(DOMAIN, two_way=False),
    ]:
        with pytest.raises(ValueError, match="cannot be merged"):
            marginals.merge(part)


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        ((), (), "at least one"),
        (("a", "a"), (2, 2), "distinct"),
        (("a", "b"), (2,), "2 sizes"),
        (("a",), (0,), "0 levels"),
        (("a",), (65_537,), "65537 levels"),
    ],
)
def test_a_domain_that_is_none_is_refused(names, sizes, message):
    with pytest.raises(ValueError, match=message):
        Domain(names=names, sizes=sizes)


def test_marginals_travel_and_show_no_counts():
    marginals = MarginalCounts.of_codes(DOMAIN, random_codes(DOMAIN, 50), [TRIPLE])
    assert plain(pickle.loads(pickle.dumps(marginals))) == plain(marginals)
    assert "array" not in repr(marginals)
