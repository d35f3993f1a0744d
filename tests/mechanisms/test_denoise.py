"""Believable tables from noisy ones: less error, one set of margins, no negative counts, a tree."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanisms.noisy import counts_of, named, noisy_of, variations
from numpy.random import default_rng
from scipy.sparse.csgraph import minimum_spanning_tree

from dpdask.kernels.marginals import independence, mutual_information
from dpdask.mechanisms.marginals.noise import Denoised, PairGroup, denoise, dependence_tree

# sizes like those of the census's fourteen columns
ADULT = (16, 9, 40, 16, 16, 7, 15, 6, 5, 2, 20, 20, 20, 2)


def chained(domain, n, keep, seed=0):
    """Rows in which each attribute repeats the one before, scaled, with probability `keep`."""
    rng = default_rng(seed)
    rows = [rng.integers(0, domain.sizes[0], n)]
    for before, size in itertools.pairwise(domain.sizes):
        weights = rng.dirichlet(np.full(size, 3.0))
        own = rng.choice(size, n, p=weights)
        rows.append(np.where(rng.random(n) < keep, rows[-1] * size // before, own))
    return np.stack(rows)


def test_the_means_of_all_tables_have_the_error_that_their_weights_promise():
    """On a domain like Adult's, σ 56.4 becomes 33: a table of pairs adds 1/(levels summed over)."""
    domain, sigma = named(*ADULT), 56.4
    codes = chained(domain, 100_000, 0.3)
    truth = counts_of(domain, codes)
    squares, expected = np.zeros(2), np.zeros(2)
    for trial in range(4):
        noisy = noisy_of(domain, codes, sigma, name=f"consistency {trial}")
        for place, consistency in enumerate((False, True)):
            options = {"shrinkage": False, "significance": False, "consistency": consistency}
            for attribute, counts in enumerate(denoise(noisy, **options).one_way):
                error = counts - truth.table((domain.names[attribute],))
                others = sum(1 / size for other, size in enumerate(ADULT) if other != attribute)
                squares[place] += (error**2).sum()
                # the total is known
                precision = 1 + (others if consistency else 0)
                expected[place] += sigma**2 / precision * (len(counts) - 1)
    assert squares / expected == pytest.approx([1, 1], abs=0.3)
    assert math.sqrt(squares[1] / squares[0]) == pytest.approx(33.0 / 50.7, abs=0.1)


KINDS = [{}, {}, {"one_way": False}, {"pairs": False}]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 2, 3, 5, 9]), min_size=1, max_size=6),
    n=st.sampled_from([0, 1, 50, 3000]),
    sigma=st.sampled_from([0.5, 20.0, 1000.0]),
    public=st.booleans(),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    kinds=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_counts_are_non_negative_and_sum_to_the_rows_and_every_pair_is_there_once(
    sizes, n, sigma, public, options, kinds, seed
):
    if len(sizes) == 1:
        kinds = {}
    domain, public = named(*sizes), public and n > 0
    codes = chained(domain, n, 0.5, seed)
    noisy = noisy_of(domain, codes, sigma, name=f"{seed}", public=public, **kinds)
    steps = ("consistency", "shrinkage", "significance")
    cleaned = denoise(noisy, **dict(zip(steps, options, strict=True)))
    assert (cleaned.n_rows, cleaned.domain) == (noisy.n_rows, domain)
    for size, counts in zip(sizes, cleaned.one_way, strict=True):
        assert counts.shape == (size,)
        assert (counts >= 0).all()
        assert counts.sum() == pytest.approx(noisy.n_rows, rel=1e-9)
    pairs = [
        (int(a), int(b))
        for group in cleaned.groups
        for a, b in zip(group.first, group.second, strict=True)
    ]
    expected = [] if "pairs" in kinds else list(itertools.combinations(range(len(sizes)), 2))
    assert sorted(pairs) == expected
    for a, b in pairs:
        table = cleaned.table(a, b)
        assert table.shape == (sizes[a], sizes[b])
        assert (table >= 0).all()
        assert table.sum(axis=1) == pytest.approx(cleaned.one_way[a], rel=1e-9, abs=1e-6)
        # raking of mere noise may not be at its end after 2,000 steps
        slack = 1e-6 if 50 * sigma < noisy.n_rows else 0.02
        margin = pytest.approx(cleaned.one_way[b], abs=slack * noisy.n_rows)
        assert table.sum(axis=0) == margin
        assert (cleaned.table(b, a) == table.T).all()
    order = dependence_tree(cleaned)
    assert sorted(attribute for attribute, _ in order) == list(range(len(sizes)))
    assert pairs or all(parent == -1 for _, parent in order)
    seen = [-1]
    for attribute, parent in order:
        assert parent in seen
        seen.append(attribute)


def test_no_pair_is_no_pair():
    noisy = noisy_of(named(3, 4), chained(named(3, 4), 100, 0.5), 1.0)
    for pair in ((0, 0), (0, 2), (-1, 0)):
        with pytest.raises(KeyError):
            denoise(noisy).table(*pair)
    for clique in (("x",), ("c0", "c0"), ()):
        with pytest.raises(KeyError):
            noisy.table(clique)


# ---- shrinkage and significance


def distance(cleaned, codes):
    """The mean total variation of all pairs from the truth."""
    pairs = {
        (cleaned.domain.names[a], cleaned.domain.names[b]): cleaned.table(a, b)
        for a, b in itertools.combinations(range(cleaned.domain.n_attributes), 2)
    }

    class Tables:
        domain = cleaned.domain
        table = staticmethod(pairs.__getitem__)

    truth = counts_of(cleaned.domain, codes)
    return float(np.mean(variations(Tables(), truth)))  # it has what is asked for


@pytest.mark.parametrize("keep", [0.0, 0.9])
def test_shrinkage_brings_the_tables_nearer_to_the_truth(keep):
    domain = named(8, 12, 2, 10, 6)
    codes = chained(domain, 20_000, keep)
    noisy = noisy_of(domain, codes, 50.0)
    plain = denoise(noisy, shrinkage=False)
    assert distance(denoise(noisy), codes) < 0.9 * distance(plain, codes)
    exact = noisy_of(domain, codes, 0.05)  # every draw is 0
    assert distance(denoise(exact), codes) < 1e-3


def test_significant_is_what_departs_by_more_than_the_noise():
    domain = named(6, 6, 6)
    codes = chained(domain, 20_000, 0.0)
    codes[1] = np.where(default_rng(1).random(20_000) < 0.5, codes[0], codes[1])
    noisy = noisy_of(domain, codes, 50.0)
    [group] = denoise(noisy).groups
    kept = dict(zip(zip(group.first, group.second, strict=True), group.significant, strict=True))
    assert kept[0, 1].diagonal().all()
    assert not kept[0, 2].any()
    assert not kept[1, 2].any()
    # of mere noise, with its margins known, about a quarter exceeds σ
    [raw] = denoise(noisy, shrinkage=False).groups
    assert 0.1 < raw.significant[raw.second == 2].mean() < 0.4
    assert denoise(noisy, significance=False).groups[0].significant.all()


# ---- the tree


def group_of(pair, table, start=0):
    return PairGroup(
        first=np.array(pair[:1]),
        second=np.array(pair[1:]),
        starts=np.array([start]),
        tables=table[None],
        significant=np.ones((1, *table.shape), dtype=bool),
        dependent=np.ones(1, dtype=bool),
        sigma=0.0,
    )


def denoised_of(tables, *sizes):
    """Tables as they are, each a group of its own."""
    groups = tuple(group_of(pair, table) for pair, table in tables.items())
    one_way = tuple(np.full(size, 1 / size) for size in sizes)
    return Denoised(domain=named(*sizes), n_rows=1.0, one_way=one_way, groups=groups)


@pytest.mark.parametrize("seed", range(3))
def test_the_tree_has_the_most_mutual_information_of_all_trees(seed):
    rng = default_rng(seed)
    sizes = tuple(int(size) for size in rng.integers(2, 5, 7))
    tables = {
        (a, b): rng.dirichlet(np.full(sizes[a] * sizes[b], 0.7)).reshape(sizes[a], sizes[b])
        for a, b in itertools.combinations(range(7), 2)
    }
    shared = {pair: float(mutual_information(table[None])[0]) for pair, table in tables.items()}
    costs = np.zeros((7, 7))
    for pair, value in shared.items():
        costs[pair] = 10.0 - value
    best = 60.0 - minimum_spanning_tree(costs).sum()
    order = dependence_tree(denoised_of(tables, *sizes))
    assert [parent for _, parent in order].count(-1) == 1
    found = sum(shared[min(edge), max(edge)] for edge in order[1:])
    assert found == pytest.approx(best, rel=1e-12)
    sums = [sum(value for pair, value in shared.items() if c in pair) for c in range(7)]
    assert order[0][0] == int(np.argmax(sums))


def test_an_attribute_that_is_independent_of_all_others_is_a_root():
    half = np.array([[0.4, 0.1], [0.1, 0.4]])
    flat = independence(np.array([[0.3, 0.7]]), np.array([[0.5, 0.5]]), 1.0)[0]
    pairs = itertools.combinations(range(5), 2)
    tables = {pair: half if pair in ((0, 1), (2, 3)) else flat for pair in pairs}
    order = dependence_tree(denoised_of(tables, *(2,) * 5))
    roots = [attribute for attribute, parent in order if parent == -1]
    assert len(roots) == 3
    assert 4 in roots
    edges = {frozenset(edge) for edge in order if edge[1] >= 0}
    assert edges == {frozenset((0, 1)), frozenset((2, 3))}


# ---- corrections


@pytest.mark.parametrize(
    ("shown", "n_sampled", "gain", "wanted"),
    [
        # of a sample of 100,000, whose own chance is small
        ([25_000, 15_000, 25_000, 35_000], 100_000, 0.5, [[325.0, 75.0], [175.0, 425.0]]),
        ([25_000, 15_000, 25_000, 35_000], 100_000, 1e9, [[400.0, 0.0], [100.0, 500.0]]),
        ([30_000, 10_000, 20_000, 40_000], 100_000, 0.5, [[300.0, 100.0], [200.0, 400.0]]),
        # within the chance of a thousand records
        ([301, 99, 199, 401], 1000, 0.5, [[300.0, 100.0], [200.0, 400.0]]),
    ],
)
def test_a_correction_takes_away_an_excess_of_a_sample_within_frechets_bounds(
    shown, n_sampled, gain, wanted
):
    table = np.array([[300.0, 100.0], [200.0, 400.0]])
    found = group_of((0, 1), table, 2).correct(
        table[None], np.array([0, 0, *shown]), n_sampled, gain
    )
    assert found.tolist() == [wanted]
