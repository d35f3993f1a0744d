"""Noisy tables: the noise that a budget buys, the noise that is drawn, and what one row moves."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from mechanisms.noisy import keyed, lettered

from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    margin_95,
    measure,
    pair_cells,
    plan_noise,
)
from dpdask.privacy import Budget
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, from_dict, to_dict
from dpdask.privacy.events import epsilon as paid
from dpdask.privacy.noise import deviation, excess_95
from dpdask.stats import MarginalCounts

DELTA = 2.0**-30


def budget(epsilon=1.0, delta=0, **changes):
    return Budget(epsilon=epsilon, delta=delta, **{"adjacency": "add-remove", **changes})


def counts_of(domain, cliques=(), n=300):
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, size, n) for size in domain.sizes])
    return MarginalCounts.of_codes(domain, codes.astype(domain.code_dtype), cliques)


# ---- the plan


CLIQUES = {("a", "b", "c"): 4.0, ("c",): 0.25}


@pytest.mark.parametrize("delta", [0, 1e-6])
def test_weights_are_shares_of_the_budget(delta):
    """A share w of a Gaussian's budget is a variance of 1/w, of Laplace's a scale of 1/w."""
    one_way, pairs, *cliques = plan_noise(
        budget(delta=delta), 6, one_way=2.0, cliques=CLIQUES
    ).event.events
    size = lambda event: event.sigma if delta else event.scale  # noqa: E731
    for event, weight in zip((one_way, *cliques), (2.0, 4.0, 0.25), strict=True):
        factor = math.sqrt(weight) if delta else weight
        assert size(event) * factor == pytest.approx(size(pairs), rel=1e-12)


USER = {"column": "user", "max_rows": 3}
TERMS = [
    budget(0.1, 0),
    budget(1.0, 0, adjacency="replace-one"),
    budget(1 / 3, 0, unit=USER),
    budget(8.0, DELTA, adjacency="replace-one"),
    budget(1.0, 1e-6, unit=USER),
]


@pytest.mark.parametrize(
    "terms", TERMS, ids=[f"{t.epsilon}-{t.delta}-{t.adjacency}" for t in TERMS]
)
def test_the_budget_is_kept_and_spent_and_a_unit_takes_noise_in_proportion(terms):
    planned = plan_noise(terms, 6, one_way=2.0, cliques=CLIQUES)
    found = paid(planned.event, terms.delta)
    assert terms.epsilon * (1 - 1e-4) < found <= terms.epsilon
    # and it is the price of what the ledger writes down
    assert found == paid(from_dict(json.loads(json.dumps(to_dict(planned.event)))), terms.delta)
    if terms.unit_column:
        row = plan_noise(terms.model_copy(update={"unit": "row"}), 6, one_way=2.0, cliques=CLIQUES)
        for one, three in zip(row.event.events, planned.event.events, strict=True):
            assert three.sensitivity == pytest.approx(3 * one.sensitivity, rel=1e-15)
            # the distribution is discrete: nearly in proportion
            assert deviation(three) == pytest.approx(3 * deviation(one), rel=2e-3)


# ---- the tables


def noisy_of(domain, cliques=(), **options):
    weights = dict.fromkeys(cliques, 2.0)
    planned = plan_noise(budget(4.0), domain.n_attributes, cliques=weights, **options)
    return measure(counts_of(domain, cliques), planned, n_rows_public=True, rng=keyed("tables"))


def test_noise_is_added_to_each_table_at_its_place_in_any_order_of_its_attributes():
    domain = lettered(2, 3, 1, 4)
    counts = counts_of(domain, [("d", "a", "b")])
    tiny = DiscreteGaussian(sigma=1e-3, sensitivity=1.0, adjacency="add-remove")
    further = DiscreteLaplace(scale=0.02, sensitivity=1, adjacency="add-remove")
    planned = MarginalNoise(one_way=tiny, pairs=tiny, cliques={("d", "a", "b"): further})
    noisy = measure(counts, planned, n_rows_public=False)  # every draw is 0
    assert noisy.n_rows == pytest.approx(300, rel=1e-12)
    cliques = [(name,) for name in domain.names] + list(itertools.permutations(domain.names, 2))
    for clique in cliques + list(itertools.permutations(("a", "b", "d"))):
        assert noisy.table(clique).tolist() == counts.table(clique).tolist()
    cells = [math.prod(domain.shape_of(pair)) for pair in domain.pairs()]
    assert pair_cells(domain).tolist() == cells


def test_a_declared_pair_comes_before_the_pair_of_all_pairs_with_the_margin_of_its_own():
    noisy = noisy_of(lettered(2, 3), [("b", "a")])
    for clique in (("a", "b"), ("b", "a")):
        own = margin_95(noisy.noise.cliques["b", "a"])
        assert noisy.margin(clique) == own < margin_95(noisy.noise.pairs)
    assert (noisy.table(("a", "b")) == noisy.cliques["b", "a"].T).all()


# ---- margins


@pytest.mark.parametrize("size", [0.2, 3.0, 150.0])
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_margin_covers_at_least_95_percent_and_hardly_more(kind, size):
    x = np.arange(-10_000, 10_001)
    if kind == "gaussian":
        event = DiscreteGaussian(sigma=size, sensitivity=1.0, adjacency="add-remove")
        mass = np.exp(-(x**2) / (2 * size**2))
    else:
        event = DiscreteLaplace(scale=size, sensitivity=1, adjacency="add-remove")
        mass = np.exp(-np.abs(x) / size)
    mass /= mass.sum()
    margin = margin_95(event)
    assert mass[np.abs(x) <= margin].sum() >= 0.95 - 1e-12
    assert margin == 0 or mass[np.abs(x) <= margin - 1].sum() < 0.95
    assert excess_95(event, int(margin)) <= 1.0 + 1e-5
    assert margin == 0 or excess_95(event, int(margin) - 1) > 1.0
    if size >= 20:
        assert mass[np.abs(x) <= margin].sum() < 0.96
    rel = 1e-9 if kind == "laplace" else 1e-5
    assert deviation(event) ** 2 == pytest.approx((x**2 * mass).sum(), rel=rel, abs=0.04)


# ---- the number of rows


@pytest.mark.parametrize(
    "options", [{}, {"one_way": 0}, {"pairs": 0}, {"one_way": 0, "pairs": 0}], ids=str
)
def test_under_add_remove_the_number_of_rows_comes_from_noisy_tables_alone(options):
    counts = counts_of(lettered(2, 3, 2), [("a", "c")], n=5000)
    planned = plan_noise(budget(), 3, cliques={("a", "c"): 1.0}, **options)
    found = {
        measure(replace(counts, n_rows=n), planned, n_rows_public=False, rng=keyed("rows")).n_rows
        for n in (5000, 0, 10**9)
    }
    assert len(found) == 1
    assert 4000 < found.pop() < 6000
    public = measure(counts, planned, n_rows_public=True, rng=keyed("rows"))
    assert public.n_rows == 5000.0
