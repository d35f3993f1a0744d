"""DIP along a tree: the distribution of its pairs, the exact privacy loss of a row, its tables, its price, and what it refuses."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import schema_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy import stats
from strategies import level_codec, value_codec

from dpdask.cells import cells
from dpdask.errors import SpecError
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.dip.tree import (
    MAX_WEIGHTS,
    check_tree,
    clean_tables,
    compose_events,
    fit_tree,
    measure_tree,
    plan_tree_noise,
    scale_noise,
)
from dpdask.mechanisms.marginals.noise import MarginalNoise
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.budget import UnitColumn
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, LocalRelease, leaves
from dpdask.privacy.events import epsilon as priced
from dpdask.references.histogram import Tree
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(11)
SIZES = {"a": 3, "b": 2, "c": 4, "d": 3}
CHANNELS = ("laplace", "laplace-calibrated", "optimal")
TINY = MarginalNoise(
    one_way=DiscreteLaplace(scale=0.05, sensitivity=2, adjacency="replace-one", count=4),
    pairs=DiscreteLaplace(scale=0.05, sensitivity=2, adjacency="replace-one", count=6),
    chosen=DiscreteLaplace(scale=0.05, sensitivity=2, adjacency="replace-one", count=3),
)


def spend_tree(budget, tree, columns, weights=None):
    """Return the mechanism that spends a budget on a tree of columns."""
    declared = {
        name: {"role": "privatise", "kind": "discrete", "levels": [0, 1]} for name in columns
    }
    schema = schema_of(declared | {"id": {"role": "drop"}})
    return bind(DipSpec(reference=tree, weights=weights), schema, budget)


def level_cells(sizes):
    return {
        name: cells(level_codec(range(size), name, ordered=name != "c"), 1)
        for name, size in sizes.items()
    }


def chain(sizes, seed=5):
    """Return the distribution of the first column, and of each further one given the one before: strong dependence, no zeros."""
    rng = default_rng(seed)
    n = list(sizes.values())
    return rng.dirichlet(np.full(n[0], 5.0)), [
        rng.dirichlet(np.full(after, 0.7), size=before) * 0.9 + 0.1 / after
        for before, after in itertools.pairwise(n)
    ]


def chain_codes(sizes, n, seed=5):
    first, steps = chain(sizes, seed)
    rng = default_rng(seed + 1)
    codes = [rng.choice(len(first), p=first, size=n)]
    for step in steps:
        codes.append((rng.random(n)[:, None] > step[codes[-1]].cumsum(axis=1)[:, :-1]).sum(axis=1))
    return np.stack(codes).astype(np.uint8)


def counted(sizes, n=20_000, seed=5):
    return MarginalCounts.of_codes(
        Domain(names=tuple(sizes), sizes=tuple(sizes.values())), chain_codes(sizes, n, seed)
    )


def fitted(channel="laplace", epsilon=1.0, sizes=SIZES, seed=5):
    noisy = measure_tree(counted(sizes, seed=seed), TINY, rng=stream(KEY, "test", ""))
    return fit_tree(noisy, level_cells(sizes), dict.fromkeys(sizes, epsilon), channel)


def distribution(release, row):
    """Return the exact probability of every released row, in the order of the tree, given an own row."""
    found = {(): Fraction(1)}
    for place, (name, column) in enumerate(release.columns.items()):
        above = -1 if column.parent is None else list(release.columns).index(column.parent)
        after = {}
        for released, probability in found.items():
            weights = column.weights[0 if above < 0 else released[above], row[name]].tolist()
            assert len(released) == place
            after |= {
                (*released, level): probability * Fraction(weight, 2**63)
                for level, weight in enumerate(weights)
            }
        found = after
    return found


def all_rows(release):
    names = list(release.columns)
    return [
        dict(zip(names, row, strict=True))
        for row in itertools.product(*(range(release.columns[name].n_levels) for name in names))
    ]


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_rows_epsilon_is_that_of_all_rows_and_outcomes_counted_one_by_one(channel):
    release = fitted(channel, 0.8)
    distributions = [distribution(release, row) for row in all_rows(release)]
    outcomes = [
        outcome for outcome in distributions[0] if any(each[outcome] for each in distributions)
    ]
    worst = max(
        math.log(
            max(each[outcome] for each in distributions)
            / min(each[outcome] for each in distributions)
        )
        for outcome in outcomes
    )
    assert worst <= release.epsilon + 1e-12
    assert release.epsilon == pytest.approx(worst, abs=1e-9)
    assert release.epsilon <= sum(column.epsilon for column in release.columns.values())
    assert all(column.epsilon <= 0.8 for column in release.columns.values())


@pytest.mark.parametrize("channel", CHANNELS)
def test_rows_of_the_tree_are_released_with_its_very_pairs(channel):
    noisy = measure_tree(counted(SIZES), TINY, rng=stream(KEY, "test", ""))
    release = fit_tree(noisy, level_cells(SIZES), dict.fromkeys(SIZES, 1.5), channel)
    one_way, edges = clean_tables(noisy)
    conditionals = {
        child: table / table.sum(axis=1, keepdims=True) for (_, child), table in edges.items()
    }
    names = list(release.columns)
    pairs = {edge: np.zeros((SIZES[edge[0]], SIZES[edge[1]])) for edge in release.edges}
    for row in all_rows(release):
        own = 1.0
        for name, column in release.columns.items():
            own *= (
                one_way[name][row[name]] / noisy.n_rows
                if column.parent is None
                else conditionals[name][row[column.parent], row[name]]
            )
        for released, probability in distribution(release, row).items():
            for parent, child in release.edges:
                pairs[parent, child][
                    released[names.index(parent)], released[names.index(child)]
                ] += own * float(probability)
    assert set(release.edges) == set(noisy.cliques)
    assert len(release.edges) == 3
    for edge, table in edges.items():
        np.testing.assert_allclose(
            pairs[edge], table / table.sum(), rtol=0, atol=1e-7
        )  # raking's own tolerance
    independent = {
        edge: np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum() ** 2
        for edge, table in edges.items()
    }
    assert (
        max(np.abs(independent[edge] - pairs[edge]).max() for edge in edges) > 0.02
    )  # what column by column would give


def rows_of(codes):
    return pa.RecordBatch.from_pydict(
        {name: pa.array(part.astype(np.int64)) for name, part in zip(SIZES, codes, strict=True)}
    )


CODECS = {name: column.codec for name, column in level_cells(SIZES).items()}


def released(release, batch, cuts=()):
    rngs = release.streams(KEY, "f")
    edges = [0, *cuts, batch.num_rows]
    parts = [
        release.randomise(batch.slice(low, high - low), CODECS, rngs)
        for low, high in itertools.pairwise(edges)
    ]
    return pa.Table.from_batches(parts).combine_chunks()


def stacked(table):
    return np.stack([table[name].to_numpy() for name in SIZES])


def test_released_rows_follow_the_exact_law_and_no_other():
    release = fitted("laplace", 1.0)
    n = 100_000
    row = {"a": 2, "b": 0, "c": 3, "d": 1}
    batch = rows_of(np.repeat(np.array([[row[name]] for name in SIZES]), n, axis=1))
    out = released(release, batch)
    names = list(release.columns)
    keys = np.ravel_multi_index(
        [out[name].to_numpy() for name in names], [SIZES[name] for name in names]
    )
    observed = np.bincount(keys, minlength=math.prod(SIZES.values()))

    def fits(expected):
        probabilities = np.array([float(value) for value in expected.values()])
        kept = probabilities * n > 5
        parts = np.append(probabilities[kept], probabilities[~kept].sum())
        counts = np.append(observed[kept], observed[~kept].sum())
        use = parts > 0
        return bool(stats.chisquare(counts[use], n * parts[use] / parts[use].sum()).pvalue > 1e-6)

    assert fits(distribution(release, row))
    assert not fits(distribution(release, {**row, "d": 0}))
    assert not fits(distribution(fitted("laplace", 0.8), row))
    assert not fits(distribution(fitted("laplace", 1.25), row))


MIXED = {
    "income": value_codec("income", bounds=(0.0, 100.0), atoms=(0.0, 50.0), nulls=True),
    "age": value_codec("age", pa.int16(), bounds=(18.0, 99.0)),
    "town": level_codec([None, "x", "y"], "town", ordered=False),
}


def mixed_batch(n=30_000, seed=3):
    rng = default_rng(seed)
    trait = rng.random(n)
    income = np.where(trait < 0.3, 0.0, np.where(trait < 0.5, 50.0, 100 * trait))
    age = 18 + (81 * np.where(rng.random(n) < 0.7, trait, rng.random(n))).astype(np.int16)
    town = np.where(rng.random(n) < 0.8, np.where(trait < 0.4, "x", "y"), "x")
    return pa.RecordBatch.from_pydict(
        {
            "income": pa.array(income, mask=rng.random(n) < 0.05),
            "age": pa.array(age, type=pa.int16()),
            "town": pa.array(town, mask=rng.random(n) < 0.1),
        }
    )


def fitted_mixed(channel):
    cut = {name: cells(codec, 6) for name, codec in MIXED.items()}
    batch = mixed_batch()
    domain = Domain(names=tuple(cut), sizes=tuple(column.size for column in cut.values()))
    codes = np.stack([column.codes(batch.column(name)) for name, column in cut.items()]).astype(
        np.uint8
    )
    noisy = measure_tree(
        MarginalCounts.of_codes(domain, codes),
        plan_tree_noise(Budget(epsilon=50), 3),
        rng=stream(KEY, "test", ""),
    )
    return fit_tree(noisy, cut, dict.fromkeys(cut, 1.0), channel), cut


def test_noise_on_ranks_goes_by_values_not_by_the_order_of_cells():
    release, cut = fitted_mixed("laplace")
    column = release.columns["income"]
    labels = cut["income"].labels()
    low, middle, high = labels.index("0.0"), labels.index("50.0"), len(labels) - 1
    weights = column.weights.astype(np.float64).sum(axis=0)
    assert (
        weights[low, low] / weights[high, low] > weights[middle, low] / weights[high, low] > 1.0
    )  # 50 lies between 0 and 100


def sparse(seed, n):
    """Return tables of few rows: many empty cells, levels that nobody has."""
    rng = default_rng(seed)
    sizes = tuple(int(size) for size in rng.integers(1, 9, size=int(rng.integers(1, 5))))
    trait = rng.random(n)
    codes = np.stack(
        [
            np.minimum(
                (np.where(rng.random(n) < 0.8, trait, rng.random(n)) ** 2 * size).astype(int),
                size - 1,
            )
            for size in sizes
        ]
    )
    return MarginalCounts.of_codes(
        Domain(names=tuple("abcd"[: len(sizes)]), sizes=sizes), codes.astype(np.uint8)
    )


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([2, 30, 1000]),
    channel=st.sampled_from(CHANNELS),
    epsilon=st.sampled_from([0.05, 1.0, 6.0]),
    delta=st.sampled_from([0.0, 1e-6]),
)
def test_whatever_the_tables_are_the_channels_keep_their_epsilon(seed, n, channel, epsilon, delta):
    counts = sparse(seed, n)
    sizes = dict(zip(counts.domain.names, counts.domain.sizes, strict=True))
    budget = Budget(epsilon=epsilon, delta=delta)
    mechanism = spend_tree(budget, Tree(share=0.5), counts.domain.names)
    noisy = measure_tree(counts, mechanism.noise, rng=stream(KEY, f"{seed}", ""))
    release = fit_tree(noisy, level_cells(sizes), mechanism.spending.row, channel)
    assert set(release.columns) == set(sizes)
    for name, column in release.columns.items():
        assert column.epsilon <= mechanism.spending.row[name]
        assert {sum(row) for table in column.weights.tolist() for row in table} == {2**63}
        assert 0.0 <= column.solved <= 1.0
    assert 0.0 <= release.epsilon <= mechanism.row_total
    assert mechanism.accounting(release)["epsilon_exact"] <= epsilon


@pytest.mark.parametrize(
    ("delta", "unit", "share", "total"),
    [(0.0, "row", 0.1, 0.1), (2.0**-30, UnitColumn(column="id", max_rows=7), 0.9, 20.0)],
    ids=["row", "unit"],
)
def test_everything_together_costs_at_most_epsilon(delta, unit, share, total):
    budget = Budget(epsilon=total, delta=delta, unit=unit)
    mechanism = spend_tree(
        budget, Tree(share=share), ("a", "b", "c"), {"a": 1.0, "b": 2.0, "c": 5.0}
    )
    spending, event = mechanism.spending, mechanism.event
    rows = spending.rows_per_unit
    assert spending.reference == {}  # the tables are of all columns together
    assert priced(event, delta) <= total
    found = list(leaves(event))
    assert [type(each) for each in found] == [
        *([DiscreteGaussian if delta else DiscreteLaplace] * 3),
        LocalRelease,
    ]
    assert all(
        each.sensitivity == pytest.approx(rows * (math.sqrt(2) if delta else 2))
        for each in found[:3]
    )
    assert found[3].n == rows == (1 if unit == "row" else 7)
    assert spending.row["c"] == pytest.approx(5 * spending.row["a"])
    tables = mechanism.accounting(fitted())["epsilon_tables"]
    assert Fraction(tables) + rows * sum(map(Fraction, spending.row.values())) <= Fraction(total)
    cheaper = compose_events(
        scale_noise(mechanism.noise, 0.9), mechanism.row_event(mechanism.row_total)
    )
    assert priced(cheaper, delta) > total * (1 if delta == 0 else 0.5)
    assert event.unit == ("row" if unit == "row" else "column id")


def test_an_epsilon_of_rows_that_no_delta_can_be_composed_with_is_refused():
    with pytest.raises(SpecError, match="cannot be composed with a δ"):
        spend_tree(Budget(epsilon=60.0, delta=2.0**-30), Tree(share=0.02), ("a", "b"))
    assert spend_tree(
        Budget(epsilon=60.0), Tree(share=0.02), ("a", "b")
    ).row_total == pytest.approx(58.8)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_rows_that_cost_nothing_have_an_account(delta):
    mechanism = spend_tree(Budget(epsilon=1.0, delta=delta), Tree(), ("a",))
    noisy = measure_tree(counted({"a": 1}, 100), mechanism.noise, rng=stream(KEY, "test", ""))
    release = fit_tree(noisy, level_cells({"a": 1}), mechanism.spending.row)
    assert release.epsilon == 0.0
    assert (
        0.0
        < mechanism.accounting(release)["epsilon_exact"]
        <= mechanism.accounting(release)["epsilon_tables"]
    )


def test_a_rows_own_record_is_recognised_no_more_often_than_epsilon_allows():
    codes = chain_codes(SIZES, 200_000)
    release = fitted("optimal", 0.5)
    out = stacked(released(release, rows_of(codes)))
    own = (out == codes).all(axis=0).mean()
    other = (np.roll(out, 1, axis=1) == codes).all(axis=0).mean()
    assert own <= other * math.exp(release.epsilon) * 1.02
    assert own > other * 1.1  # there is something to recognise: the attack has power
    strong = fitted("optimal", 3.0)
    freer = stacked(released(strong, rows_of(codes)))
    assert (freer == codes).all(axis=0).mean() > other * math.exp(
        release.epsilon
    )  # and tells a weaker promise from this one


AGE_CELLS = {"age": cells(MIXED["age"], 5)}
ABCD_CELLS = level_cells(SIZES)


@pytest.mark.parametrize(
    ("columns", "channel", "cost", "says"),
    [
        (level_cells({"a": 600, "b": 600}), "laplace", None, "more channels than can be held"),
        (
            level_cells({f"c{i}": 180 for i in range(5)}),
            "laplace",
            None,
            "the channels of all columns",
        ),
        (level_cells({"a": 101, "b": 2}), "optimal", None, r"column 'a'.*101 cells"),
        (level_cells({"a": 101, "b": 2}), "laplace", None, None),
        (ABCD_CELLS, "laplace", {"a": "rank"}, "belongs to the channel optimal"),
        (ABCD_CELLS, "optimal", {"z": "rank"}, "not a privatised column"),
        (ABCD_CELLS, "optimal", {"a": ((0.0, 1.0), (1.0, 0.0))}, "rows and columns"),
        (AGE_CELLS, "optimal", {"age": "zero-one"}, "always rank"),
        (AGE_CELLS, "optimal", {"age": "rank"}, None),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_any_row_is_read(columns, channel, cost, says):
    assert 180 * 180 * 256 <= MAX_WEIGHTS < 5 * 180 * 180 * 256
    if says is None:
        check_tree(columns, channel, cost)
        return
    with pytest.raises(SpecError, match=says) as caught:
        check_tree(columns, channel, cost)
    assert caught.value.exit_code == 64
