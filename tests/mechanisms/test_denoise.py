"""Believable tables from noisy ones: less error, one set of margins, no negative counts, and the tree of the strongest dependence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import minimum_spanning_tree

from dpdask.kernels.marginals import independence, mutual_information
from dpdask.mechanisms.marginals.denoise import (
    Denoised,
    PairGroup,
    denoise,
    dependence_tree,
    stack_tables,
)
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure
from dpdask.privacy.events import DiscreteGaussian
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

ADULT = (
    16,
    9,
    40,
    16,
    16,
    7,
    15,
    6,
    5,
    2,
    20,
    20,
    20,
    2,
)  # sizes like those of the census's fourteen columns


def keyed(name: str) -> Any:
    return stream(RunKey.insecure(12), "denoise", name)


def named(*sizes: int) -> Domain:
    return Domain(names=tuple(f"c{place}" for place in range(len(sizes))), sizes=sizes)


def noise_of(
    domain: Domain, sigma: float, one_way: bool = True, pairs: bool = True
) -> MarginalNoise:
    event = DiscreteGaussian(sigma=sigma, sensitivity=1.0, adjacency="add-remove")
    return MarginalNoise(
        one_way=event if one_way else None,
        pairs=event if pairs and domain.n_attributes > 1 else None,
        cliques={},
    )


def chained(domain: Domain, n: int, keep: float, seed: int = 0) -> np.ndarray:
    """Rows in which each attribute repeats the one before, scaled to its own levels, with probability `keep`."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, domain.sizes[0], n)]
    for before, size in itertools.pairwise(domain.sizes):
        weights = rng.dirichlet(np.full(size, 3.0))
        rows.append(
            np.where(
                rng.random(n) < keep, rows[-1] * size // before, rng.choice(size, n, p=weights)
            )
        )
    return np.stack(rows).astype(domain.code_dtype)


def noisy_of(
    domain: Domain,
    codes: np.ndarray,
    sigma: float,
    name: str = "noise",
    public: bool = True,
    **options: bool,
) -> NoisyMarginals:
    return measure(
        MarginalCounts.of_codes(domain, codes),
        noise_of(domain, sigma, **options),
        n_rows_public=public,
        rng=keyed(name),
    )


# Consistency


def test_the_means_of_all_tables_have_the_error_that_their_weights_promise():
    """At σ 56.4 on a domain like Adult's, 56.4 becomes 33: each table of pairs adds 1/(levels summed over) to the precision."""
    domain, sigma = named(*ADULT), 56.4
    codes = chained(domain, 400_000, 0.3)
    truth = MarginalCounts.of_codes(domain, codes)
    squares = np.zeros(2)
    expected = np.zeros(2)
    for trial in range(6):
        noisy = noisy_of(domain, codes, sigma, f"consistency {trial}")
        for place, consistency in enumerate((False, True)):
            found = denoise(
                noisy, consistency=consistency, shrinkage=False, significance=False
            ).one_way
            for attribute, counts in enumerate(found):
                error = counts - truth.table((domain.names[attribute],))
                others = sum(1 / size for other, size in enumerate(ADULT) if other != attribute)
                squares[place] += (error**2).sum()
                expected[place] += (
                    sigma**2 / (1 + (others if consistency else 0)) * (len(counts) - 1)
                )  # the total is known
    assert squares / expected == pytest.approx([1, 1], abs=0.25)
    assert math.sqrt(squares[1] / squares[0]) == pytest.approx(33.0 / 50.7, abs=0.1)


def test_tables_of_pairs_alone_are_enough():
    domain = named(3, 4, 2)
    codes = chained(domain, 20_000, 0.5)
    truth = MarginalCounts.of_codes(domain, codes)
    cleaned = denoise(noisy_of(domain, codes, 5.0, one_way=False), consistency=False)
    for name, counts in zip(domain.names, cleaned.one_way, strict=True):
        assert np.abs(counts - truth.table((name,))).max() < 60


def test_one_way_tables_alone_are_projected_and_there_are_no_pairs():
    domain = named(3, 4)
    cleaned = denoise(noisy_of(domain, chained(domain, 1000, 0.5), 5.0, pairs=False))
    assert cleaned.groups == ()
    assert [counts.sum() for counts in cleaned.one_way] == pytest.approx([1000, 1000])
    with pytest.raises(KeyError):
        cleaned.table(0, 1)
    assert dependence_tree(cleaned) == [(0, -1), (1, -1)]


# What always holds

SIZES = st.lists(st.sampled_from([1, 2, 2, 3, 5, 9]), min_size=1, max_size=6)


@settings(max_examples=60)
@given(
    sizes=SIZES,
    n=st.sampled_from([0, 1, 50, 3000]),
    sigma=st.sampled_from([0.5, 20.0, 1000.0]),
    public=st.booleans(),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_counts_are_non_negative_and_sum_to_the_rows_and_every_pair_is_there_once(
    sizes, n, sigma, public, options, seed
):
    domain = named(*sizes)
    public = public and n > 0
    noisy = noisy_of(domain, chained(domain, n, 0.5, seed), sigma, f"{seed}", public=public)
    cleaned = denoise(
        noisy, **dict(zip(("consistency", "shrinkage", "significance"), options, strict=True))
    )
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
    assert sorted(pairs) == list(itertools.combinations(range(len(sizes)), 2))
    for a, b in pairs:
        table = cleaned.table(a, b)
        assert table.shape == (sizes[a], sizes[b])
        assert (table >= 0).all()
        assert table.sum(axis=1) == pytest.approx(cleaned.one_way[a], rel=1e-9, abs=1e-6)
        slack = (
            1e-6 if 50 * sigma < noisy.n_rows else 0.02
        )  # raking of mere noise may not be at its end after 2,000 steps
        assert table.sum(axis=0) == pytest.approx(cleaned.one_way[b], abs=slack * noisy.n_rows)
        assert (cleaned.table(b, a) == table.T).all()
    order = dependence_tree(cleaned)
    assert sorted(attribute for attribute, _ in order) == list(range(len(sizes)))
    seen = [-1]
    for attribute, parent in order:
        assert parent in seen
        seen.append(attribute)


def test_groups_hold_the_tables_where_they_begin():
    domain = named(2, 3, 2, 3)
    noisy = noisy_of(domain, chained(domain, 500, 0.5), 1.0)
    for group in denoise(noisy).groups:
        held = stack_tables(noisy.pairs, group.starts, group.tables.shape[1:])
        for a, b, table in zip(group.first.tolist(), group.second.tolist(), held, strict=True):
            assert (table == noisy.table((domain.names[a], domain.names[b]))).all()
        assert group.significant.shape == group.tables.shape


def test_no_pair_is_no_pair():
    cleaned = denoise(noisy_of(named(3, 4), chained(named(3, 4), 100, 0.5), 1.0))
    for pair in ((0, 0), (0, 2), (-1, 0)):
        with pytest.raises(KeyError):
            cleaned.table(*pair)


# Shrinkage and significance


def distance(cleaned: Denoised, codes: np.ndarray) -> float:
    """The mean total variation of all pairs from the truth."""
    truth, names = MarginalCounts.of_codes(cleaned.domain, codes), cleaned.domain.names
    pairs = list(itertools.combinations(range(len(names)), 2))
    return float(
        np.mean(
            [
                np.abs(cleaned.table(a, b) - truth.table((names[a], names[b]))).sum()
                / 2
                / codes.shape[1]
                for a, b in pairs
            ]
        )
    )


def test_shrinkage_brings_the_tables_nearer_to_the_truth():
    domain = named(8, 12, 2, 10, 6)
    for keep in (0.0, 0.3, 0.9):
        codes = chained(domain, 20_000, keep)
        noisy = noisy_of(domain, codes, 50.0)
        assert distance(denoise(noisy), codes) < 0.9 * distance(
            denoise(noisy, shrinkage=False), codes
        )


def test_significant_is_what_departs_by_more_than_the_noise():
    domain = named(6, 6, 6)
    codes = chained(domain, 20_000, 0.0)
    codes[1] = np.where(np.random.default_rng(1).random(20_000) < 0.5, codes[0], codes[1])
    cleaned = denoise(noisy_of(domain, codes, 50.0))
    kept = {
        (int(a), int(b)): mask
        for group in cleaned.groups
        for a, b, mask in zip(group.first, group.second, group.significant, strict=True)
    }
    assert kept[0, 1].diagonal().all()
    assert not kept[0, 2].any()
    assert not kept[1, 2].any()
    raw = denoise(
        noisy_of(domain, codes, 50.0), shrinkage=False
    )  # of mere noise, with its margins known, about a quarter exceeds σ
    flat = np.concatenate([group.significant[group.second == 2].ravel() for group in raw.groups])
    assert 0.1 < flat.mean() < 0.4
    assert all(
        group.significant.all()
        for group in denoise(noisy_of(domain, codes, 50.0), significance=False).groups
    )


def test_without_noise_the_tables_are_the_truth():
    domain = named(3, 4, 2)
    codes = chained(domain, 5000, 0.5)
    noisy = noisy_of(domain, codes, 0.05)  # every draw is 0
    assert distance(denoise(noisy), codes) < 1e-4


# The tree


def denoised_of(tables: dict[tuple[int, int], np.ndarray], sizes: tuple[int, ...]) -> Denoised:
    """Tables as they are, each a group of its own."""
    zero = np.array([0])
    groups = tuple(
        PairGroup(
            first=np.array([a]),
            second=np.array([b]),
            starts=zero,
            tables=table[None],
            significant=np.ones((1, *table.shape), dtype=bool),
            dependent=np.ones(1, dtype=bool),
            sigma=0.0,
        )
        for (a, b), table in tables.items()
    )
    return Denoised(
        domain=named(*sizes),
        n_rows=1.0,
        one_way=tuple(np.full(size, 1 / size) for size in sizes),
        groups=groups,
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_has_the_most_mutual_information_of_all_trees(seed):
    rng = np.random.default_rng(seed)
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
    order = dependence_tree(denoised_of(tables, sizes))
    assert [parent for _, parent in order].count(-1) == 1
    assert sum(shared[min(edge), max(edge)] for edge in order[1:]) == pytest.approx(best, rel=1e-12)
    sums = [
        sum(value for pair, value in shared.items() if attribute in pair) for attribute in range(7)
    ]
    assert order[0][0] == int(np.argmax(sums))


def test_no_smaller_change_makes_a_better_tree():
    """Brute force over all trees of four attributes."""
    rng = np.random.default_rng(3)
    pairs = list(itertools.combinations(range(4), 2))
    tables = {pair: rng.dirichlet(np.full(6, 0.5)).reshape(2, 3) for pair in pairs}
    shared = {pair: float(mutual_information(table[None])[0]) for pair, table in tables.items()}

    def spans(edges: tuple[tuple[int, int], ...]) -> bool:
        reached = {0}
        for _ in range(3):
            reached |= {end for edge in edges for end in edge if reached & set(edge)}
        return len(reached) == 4

    best = max(
        sum(shared[edge] for edge in edges)
        for edges in itertools.combinations(pairs, 3)
        if spans(edges)
    )
    order = dependence_tree(denoised_of(tables, (2, 3, 2, 3)))
    assert sum(shared[min(edge), max(edge)] for edge in order if edge[1] >= 0) == pytest.approx(
        best, rel=1e-12
    )


def test_what_is_independent_of_everything_is_a_root_of_its_own():
    half = np.array([[0.4, 0.1], [0.1, 0.4]])
    flat = independence(np.array([[0.3, 0.7]]), np.array([[0.5, 0.5]]), 1.0)[0]
    tables = {
        pair: half if pair in ((0, 1), (2, 3)) else flat
        for pair in itertools.combinations(range(5), 2)
    }
    order = dependence_tree(denoised_of(tables, (2,) * 5))
    roots = [attribute for attribute, parent in order if parent == -1]
    assert len(roots) == 3
    assert 4 in roots
    assert {frozenset(edge) for edge in order if edge[1] >= 0} == {
        frozenset((0, 1)),
        frozenset((2, 3)),
    }


def test_the_tree_of_a_chain_is_the_chain():
    domain = named(5, 5, 5, 5)
    noisy = noisy_of(domain, chained(domain, 50_000, 0.6), 20.0)
    assert {frozenset(edge) for edge in dependence_tree(denoise(noisy)) if edge[1] >= 0} == {
        frozenset((a, a + 1)) for a in range(3)
    }


# Corrections


def test_a_correction_takes_away_what_a_sample_shows_too_much_of_within_frechets_bounds():
    table = np.array([[[300.0, 100.0], [200.0, 400.0]]])
    group = PairGroup(
        first=np.array([0]),
        second=np.array([1]),
        starts=np.array([2]),
        tables=table,
        significant=np.ones((1, 2, 2), dtype=bool),
        dependent=np.ones(1, dtype=bool),
        sigma=0.0,
    )
    scale = 100  # a sample of 100,000: its own chance is small
    shown = np.array([0, 0, 250, 150, 250, 350]) * scale
    wanted = group.correct(table, shown, 1000 * scale, 0.5)
    assert wanted.tolist() == [[[325.0, 75.0], [175.0, 425.0]]]
    assert group.correct(table, shown, 1000 * scale, 1e9).tolist() == [
        [[400.0, 0.0], [100.0, 500.0]]
    ]
    exact = np.array([0, 0, 300, 100, 200, 400]) * scale
    assert group.correct(table, exact, 1000 * scale, 0.5).tolist() == table.tolist()
    chance = np.array([0, 0, 301, 99, 199, 401])  # within the chance of a thousand records
    assert group.correct(table, chance, 1000, 0.5).tolist() == table.tolist()
