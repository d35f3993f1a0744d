"""Noisy tables: the noise that a budget buys, the noise that is drawn, and what one row moves."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from mechanisms.noisy import keyed
from scipy import stats

from dpdask.errors import SpecError
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    margin_95,
    measure,
    pair_cells,
    plan_noise,
)
from dpdask.privacy import Budget, noise
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, from_dict, to_dict
from dpdask.privacy.events import epsilon as paid
from dpdask.privacy.noise import deviation
from dpdask.stats import Domain, MarginalCounts

ALPHA = 1e-10
DELTA = 2.0**-30


def budget(epsilon=1.0, delta=0, **changes):
    return Budget(epsilon=epsilon, delta=delta, **{"adjacency": "add-remove", **changes})


def named(*sizes):
    return Domain(names=tuple("abcdefgh"[: len(sizes)]), sizes=sizes)


def counts_of(domain, cliques=(), n=300):
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, size, n) for size in domain.sizes])
    return MarginalCounts.of_codes(domain, codes.astype(domain.code_dtype), cliques)


# ---- the plan


@pytest.mark.parametrize(("adjacency", "sigma"), [("add-remove", 56.4), ("replace-one", 79.8)])
def test_a_hundred_and_five_tables_cost_what_the_design_says(adjacency, sigma):
    planned = plan_noise(budget(delta=DELTA, adjacency=adjacency), 14)
    one_way, pairs = planned.event.events
    assert isinstance(one_way, DiscreteGaussian)
    assert isinstance(pairs, DiscreteGaussian)
    assert (one_way.count, pairs.count) == (14, 91)
    assert one_way.sigma == pairs.sigma == pytest.approx(sigma, abs=0.05)
    step = 1 if adjacency == "add-remove" else 2
    for event in plan_noise(budget(0.5, 0, adjacency=adjacency), 14).event.events:
        assert isinstance(event, DiscreteLaplace)  # without a δ, and ε is split evenly
        assert event.sensitivity == step
        assert event.scale == pytest.approx(105 * step / 0.5, rel=1e-9)


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


def test_tables_of_weight_zero_are_left_out_and_those_that_do_not_exist():
    terms = budget()
    assert plan_noise(terms, 3, one_way=0).one_way is None
    assert plan_noise(terms, 3, pairs=0).pairs is None
    alone = plan_noise(terms, 1)
    assert alone.pairs is None
    clique = plan_noise(terms, 5, one_way=0, pairs=0, cliques={("a", "b"): 3.0}).cliques["a", "b"]
    assert alone.one_way is not None
    assert deviation(clique) == pytest.approx(deviation(alone.one_way), rel=1e-6)
    with pytest.raises(SpecError, match="no table to measure"):
        plan_noise(terms, 1, one_way=0)


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


# ---- the noise that is drawn, against what the event says

WIDE = Domain(names=("a", "b"), sizes=(20_000, 2))
WIDE_CLIQUES = {("a",): 0.5, ("b", "a"): 3.0}


def moments_of(event):
    """The variance and fourth moment of the distribution that an event's JSON tells of."""
    is_gaussian = event["kind"] == "discrete-gaussian"
    size = event["sigma" if is_gaussian else "scale"]
    x = np.arange(-math.ceil(60 * size) - 20, math.ceil(60 * size) + 21).astype(float)
    mass = np.exp(-((x / size) ** 2) / 2) if is_gaussian else np.exp(-np.abs(x) / size)
    mass /= mass.sum()
    return float((x**2 * mass).sum()), float((x**4 * mass).sum())


def agrees(drawn, event):
    """A two-sided test of the mean square of noise on empty tables."""
    variance, fourth = moments_of(event)
    error = math.sqrt((fourth - variance**2) / drawn.size)
    z = ((drawn.astype(float) ** 2).mean() - variance) / error
    return bool(2 * stats.norm.sf(abs(z)) > ALPHA)


def drawn_groups(planned, rng):
    """The noise of each group of tables, in the event's order: one-way, two-way, each clique."""
    empty = MarginalCounts.identity(WIDE, WIDE_CLIQUES)
    noisy = measure(empty, planned, n_rows_public=True, rng=rng)
    return [noisy.one_way, noisy.pairs, *(noisy.cliques[clique].ravel() for clique in WIDE_CLIQUES)]


def events_of(planned):
    """The events as the ledger keeps them: JSON, and nothing of the objects it came from."""
    return list(json.loads(json.dumps(to_dict(planned.event)))["events"])


def resized(event, factor):
    key = "sigma" if event["kind"] == "discrete-gaussian" else "scale"
    return {**event, key: event[key] * factor}


@pytest.mark.parametrize(
    ("delta", "secure"), [(0, True), (1e-6, False)], ids=["laplace-secure", "gaussian-keyed"]
)
def test_every_cell_has_the_noise_that_its_event_says_and_neither_changes_alone(
    delta, secure, monkeypatch
):
    # no two groups have the same noise
    planned = plan_noise(budget(2.0, delta), 2, one_way=2.0, cliques=WIDE_CLIQUES)
    events = events_of(planned)
    assert [event["count"] for event in events] == [2, 1, 1, 1]
    groups = drawn_groups(planned, None if secure else keyed(f"dp {delta}"))
    assert [group.size for group in groups] == [20_002, 40_000, 20_000, 40_000]
    assert all(agrees(*pair) for pair in zip(groups, events, strict=True))
    # no two tables share noise: else the difference of two tables of the same rows would have none
    one_way, pairs, single, swapped = groups
    n = WIDE.sizes[0]
    parts = [one_way[:n], *pairs.reshape(n, 2).T, single, *swapped.reshape(2, n)]
    assert np.abs(np.corrcoef(parts) - np.eye(len(parts))).max() < 7 / math.sqrt(n)
    honest = noise.perturb
    for factor in (1.1, 1 / 1.1):
        # the event changed alone: 10 % of one group's noise is seen
        changed = [resized(event, factor) for event in events]
        assert not any(agrees(*pair) for pair in zip(groups, changed, strict=True))
        with monkeypatch.context() as patch:  # the noise changed alone

            def other(counts, event, *, rng=None, factor=factor):
                return honest(counts, from_dict(resized(to_dict(event), factor)), rng=rng)

            patch.setattr(noise, "perturb", other)
            drawn = drawn_groups(planned, keyed(f"changed {factor}"))
        assert not any(agrees(*pair) for pair in zip(drawn, events, strict=True))


def test_secure_noise_is_fresh_and_a_stream_repeats_itself():
    counts, planned = counts_of(named(2, 3)), plan_noise(budget(), 2)
    first, second, *fresh = (
        measure(counts, planned, n_rows_public=True, rng=rng).pairs.tolist()
        for rng in (keyed("again"), keyed("again"), None, None)
    )
    assert first == second
    assert fresh[0] != fresh[1]


# ---- the sensitivity, by brute force

Rows = tuple[tuple[int, ...], ...]


def replaced(rows, records, unit):
    """All tables in which the first rows, those of the unit, have other values."""
    for others in itertools.combinations_with_replacement(records, unit):
        yield (*others, *rows[unit:])


def removed(rows, records, unit):
    """All tables without some of the unit's rows."""
    yield from (rows[k:] for k in range(1, unit + 1))


NEIGHBOURS = {
    "replace-one": replaced,
    "add-remove": removed,
}


@pytest.mark.parametrize(
    ("adjacency", "unit", "sizes"),
    [
        ("replace-one", 1, (2, 3, 2)),
        ("add-remove", 1, (2, 2)),
        ("replace-one", 2, (2, 2)),
        ("add-remove", 2, (2, 3, 2)),
    ],
)
def test_the_declared_sensitivity_is_the_largest_change_of_each_table(adjacency, unit, sizes):
    domain = named(*sizes)
    records = list(itertools.product(*map(range, sizes)))
    clique = domain.names

    def counted(rows):
        codes = np.array(rows, dtype=np.uint8).reshape(len(rows), len(sizes)).T
        found = MarginalCounts.of_codes(domain, np.ascontiguousarray(codes), [clique])
        one_way = [found.table((name,)) for name in clique]
        return [one_way, [found.table(pair) for pair in domain.pairs()], [found.cliques[clique]]]

    cache = {rows: counted(rows) for n in range(3) for rows in itertools.product(records, repeat=n)}
    worst = np.zeros((2, 3))
    for rows in (rows for rows in cache if len(rows) >= unit):
        for other in NEIGHBOURS[adjacency](rows, records, unit):
            for group, (here, there) in enumerate(zip(cache[rows], cache[other], strict=True)):
                for left, right in zip(here, there, strict=True):
                    change = (left - right).astype(float)
                    norms = [np.abs(change).sum(), math.sqrt((change**2).sum())]
                    worst[:, group] = np.maximum(worst[:, group], norms)
    user = {"unit": {"column": "user", "max_rows": unit}} if unit > 1 else {}
    for norm, delta in enumerate((0, 1e-6)):
        terms = budget(1.0, delta, adjacency=adjacency, **user)
        events = events_of(plan_noise(terms, len(sizes), cliques={clique: 1.0}))
        declared = [event["sensitivity"] for event in events]
        assert (worst[norm] <= declared).all()
        assert worst[norm] == pytest.approx(declared, rel=1e-12)
        # and as many tables as it says
        assert [event["count"] for event in events] == [len(group) for group in cache[()]]
        assert {event["adjacency"] for event in events} == {adjacency}


# ---- the tables


def noisy_of(domain, cliques=(), **options):
    weights = dict.fromkeys(cliques, 2.0)
    planned = plan_noise(budget(4.0), domain.n_attributes, cliques=weights, **options)
    return measure(counts_of(domain, cliques), planned, n_rows_public=True, rng=keyed("tables"))


def test_noise_is_added_to_each_table_at_its_place_in_any_order_of_its_attributes():
    domain = named(2, 3, 1, 4)
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
    noisy = noisy_of(named(2, 3), [("b", "a")])
    assert noisy.noise.pairs is not None
    for clique in (("a", "b"), ("b", "a")):
        own = margin_95(noisy.noise.cliques["b", "a"])
        assert noisy.margin(clique) == own < margin_95(noisy.noise.pairs)
    assert (noisy.table(("a", "b")) == noisy.cliques["b", "a"].T).all()


@pytest.mark.parametrize(
    ("options", "clique"),
    [
        *(({}, clique) for clique in (("x",), ("a", "x"), ("a", "a"), ("a", "b", "c"), ())),
        ({"one_way": 0}, ("a",)),
        ({"pairs": 0}, ("a", "b")),
    ],
)
def test_a_table_that_was_not_measured_is_a_key_error(options, clique):
    noisy = noisy_of(named(2, 3, 2), **options)
    for read in (noisy.table, noisy.margin):
        with pytest.raises(KeyError):
            read(clique)


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
    assert mass[np.abs(x) <= margin - 2.001].sum() < 0.95
    if size >= 20:
        assert mass[np.abs(x) <= margin].sum() < 0.96
    rel = 1e-9 if kind == "laplace" else 1e-5
    assert deviation(event) ** 2 == pytest.approx((x**2 * mass).sum(), rel=rel, abs=0.04)


# ---- the number of rows


@pytest.mark.parametrize(
    "options", [{}, {"one_way": 0}, {"pairs": 0}, {"one_way": 0, "pairs": 0}], ids=str
)
def test_under_add_remove_the_number_of_rows_comes_from_noisy_tables_alone(
    options,
):
    counts = counts_of(named(2, 3, 2), [("a", "c")], n=5000)
    planned = plan_noise(budget(), 3, cliques={("a", "c"): 1.0}, **options)
    found = {
        measure(replace(counts, n_rows=n), planned, n_rows_public=False, rng=keyed("rows")).n_rows
        for n in (5000, 0, 10**9)
    }
    assert len(found) == 1
    assert 4000 < found.pop() < 6000
    public = measure(counts, planned, n_rows_public=True, rng=keyed("rows"))
    assert public.n_rows == 5000.0


def test_the_estimated_number_of_rows_is_as_good_as_the_weights_say():
    domain, rng = named(2, 9, 4), keyed("total")
    counts, planned = counts_of(domain, n=20_000), plan_noise(budget(), 3, one_way=2.0)
    assert planned.one_way is not None
    assert planned.pairs is not None
    precision = sum(1 / (deviation(planned.one_way) ** 2 * size) for size in domain.sizes)
    pairs = pair_cells(domain).tolist()
    precision += sum(1 / (deviation(planned.pairs) ** 2 * cells) for cells in pairs)
    draws = (measure(counts, planned, n_rows_public=False, rng=rng).n_rows for _ in range(400))
    errors = np.array(list(draws)) - 20_000
    assert abs(errors.mean()) * math.sqrt(400 * precision) < 6.5
    spread = (errors**2).mean() * precision
    assert spread == pytest.approx(1, abs=6.5 * math.sqrt(3 / 400))


def test_a_table_of_no_rows_counts_at_least_one():
    counts, planned = MarginalCounts.identity(named(2, 2)), plan_noise(budget(), 2)
    rngs = [keyed(f"none {trial}") for trial in range(20)]
    found = {measure(counts, planned, n_rows_public=False, rng=rng).n_rows for rng in rngs}
    assert min(found) == 1.0
