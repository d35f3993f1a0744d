"""Noisy tables: the noise that a budget buys, the noise that is drawn, what one row moves, and nothing exact under add-remove."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpdask.errors import SpecError
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    compute_spent,
    margin_95,
    measure,
    pair_cells,
    plan_noise,
)
from dpdask.privacy import Budget, noise
from dpdask.privacy.accountant import epsilon as paid
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, from_dict, leaves, to_dict
from dpdask.privacy.noise import deviation
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

ALPHA = 1e-10
DELTA = 2.0**-30


def keyed(name: str) -> Any:
    return stream(RunKey.insecure(11), "marginals", name)


def budget(epsilon: float = 1.0, delta: float = 0, **changes: Any) -> Budget:
    return Budget(epsilon=epsilon, delta=delta, **{"adjacency": "add-remove", **changes})


def named(*sizes: int) -> Domain:
    return Domain(names=tuple("abcdefgh"[: len(sizes)]), sizes=sizes)


def counts_of(domain: Domain, cliques: Any = (), n: int = 300, seed: int = 0) -> MarginalCounts:
    rng = np.random.default_rng(seed)
    return MarginalCounts.of_codes(
        domain,
        np.stack([rng.integers(0, size, n) for size in domain.sizes]).astype(domain.code_dtype),
        cliques,
    )


# The plan


@pytest.mark.parametrize(("adjacency", "sigma"), [("add-remove", 56.4), ("replace-one", 79.8)])
def test_a_hundred_and_five_tables_cost_what_the_design_says(adjacency, sigma):
    planned = plan_noise(budget(delta=DELTA, adjacency=adjacency), 14)
    assert isinstance(planned.one_way, DiscreteGaussian)
    assert isinstance(planned.pairs, DiscreteGaussian)
    assert (planned.one_way.count, planned.pairs.count) == (14, 91)
    assert planned.one_way.sigma == planned.pairs.sigma == pytest.approx(sigma, abs=0.05)
    assert {leaf.adjacency for leaf in leaves(planned.event)} == {adjacency}  # type: ignore[union-attr]


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("add-remove", 1), ("replace-one", 2)])
def test_without_a_delta_the_noise_is_laplace_and_epsilon_is_split_evenly(adjacency, sensitivity):
    planned = plan_noise(budget(0.5, 0, adjacency=adjacency), 14)
    for event, count in ((planned.one_way, 14), (planned.pairs, 91)):
        assert isinstance(event, DiscreteLaplace)
        assert (event.sensitivity, event.count) == (sensitivity, count)
        assert event.scale == pytest.approx(105 * sensitivity / 0.5, rel=1e-9)


CLIQUES = {("a", "b", "c"): 4.0, ("c",): 0.25}


@pytest.mark.parametrize("delta", [0, 1e-6])
def test_weights_are_shares_of_the_budget(delta):
    """A share w of a Gaussian's budget is a variance of 1/w, of Laplace's a scale of 1/w."""
    planned = plan_noise(budget(delta=delta), 6, one_way=2.0, pairs=1.0, cliques=CLIQUES)
    assert planned.one_way is not None
    assert planned.pairs is not None
    for event, weight in (
        (planned.one_way, 2.0),
        (planned.cliques["a", "b", "c"], 4.0),
        (planned.cliques["c",], 0.25),
    ):
        factor = math.sqrt(weight) if delta else weight
        size, unit = (
            (each.sigma if isinstance(each, DiscreteGaussian) else each.scale)
            for each in (event, planned.pairs)
        )
        assert size * factor == pytest.approx(unit, rel=1e-12)
    assert [planned.cliques[clique].count for clique in CLIQUES] == [1, 1]


def test_tables_of_weight_zero_are_left_out_and_those_that_do_not_exist():
    terms = budget()
    assert plan_noise(terms, 3, one_way=0).one_way is None
    assert plan_noise(terms, 3, pairs=0).pairs is None
    assert plan_noise(terms, 1).pairs is None
    alone, clique = (
        plan_noise(terms, 1).one_way,
        plan_noise(terms, 5, one_way=0, pairs=0, cliques={("a", "b"): 3.0}).cliques["a", "b"],
    )
    assert deviation(clique) == pytest.approx(deviation(alone), rel=1e-6)
    for nothing in ({"one_way": 0}, {"one_way": 0, "cliques": {}}):
        with pytest.raises(SpecError, match="no table to measure"):
            plan_noise(terms, 1, **nothing)


@pytest.mark.parametrize(
    ("adjacency", "delta"), [("add-remove", 0), ("replace-one", 0), ("replace-one", 1e-6)]
)
def test_a_unit_of_several_rows_takes_noise_in_proportion(adjacency, delta):
    row = plan_noise(budget(delta=delta, adjacency=adjacency), 4)
    unit = plan_noise(
        budget(delta=delta, adjacency=adjacency, unit={"column": "user", "max_rows": 5}), 4
    )
    for one, five in ((row.one_way, unit.one_way), (row.pairs, unit.pairs)):
        assert five.sensitivity == pytest.approx(5 * one.sensitivity, rel=1e-15)
        assert deviation(five) == pytest.approx(
            5 * deviation(one), rel=1e-3
        )  # the distribution is discrete: nearly in proportion


USER = {"column": "user", "max_rows": 3}
TERMS = [
    budget(0.1, 0),
    budget(1.0, 0, adjacency="replace-one"),
    budget(1 / 3, 0, unit=USER),
    budget(1.0, DELTA, adjacency="replace-one"),
    budget(8.0, 1e-6, unit=USER),
]


@pytest.mark.parametrize(
    "terms",
    TERMS,
    ids=[
        f"{terms.epsilon}-{terms.delta}-{terms.adjacency}-{terms.unit_column is not None}"
        for terms in TERMS
    ],
)
def test_the_budget_is_kept_and_spent(terms):
    planned = plan_noise(terms, 6, one_way=2.0, cliques=CLIQUES)
    found = compute_spent(planned, terms)
    assert terms.epsilon * (1 - 1e-4) < found <= terms.epsilon
    assert found == paid(
        from_dict(json.loads(json.dumps(to_dict(planned.event)))), terms.delta
    )  # what the ledger writes down


# The noise that is drawn, against what the event says

WIDE = Domain(names=("a", "b"), sizes=(20_000, 2))
WIDE_CLIQUES = {("a",): 0.5, ("b", "a"): 3.0}


def moments_of(event: dict[str, Any]) -> tuple[float, float]:
    """The variance and fourth moment of the distribution that an event's JSON tells of, summed from its definition."""
    size = event["sigma"] if event["kind"] == "discrete-gaussian" else event["scale"]
    x = np.arange(-math.ceil(60 * size) - 20, math.ceil(60 * size) + 21).astype(float)
    mass = (
        np.exp(-((x / size) ** 2) / 2)
        if event["kind"] == "discrete-gaussian"
        else np.exp(-np.abs(x) / size)
    )
    mass /= mass.sum()
    return float((x**2 * mass).sum()), float((x**4 * mass).sum())


def agrees(drawn: np.ndarray, event: dict[str, Any]) -> bool:
    """A two-sided test of the mean square of noise on empty tables."""
    variance, fourth = moments_of(event)
    z = ((drawn.astype(float) ** 2).mean() - variance) / math.sqrt(
        (fourth - variance**2) / drawn.size
    )
    return bool(2 * stats.norm.sf(abs(z)) > ALPHA)


def drawn_groups(planned: MarginalNoise, rng: Any) -> list[np.ndarray]:
    """The noise of each group of tables, in the event's order: one-way, two-way, each clique."""
    noisy = measure(
        MarginalCounts.identity(WIDE, WIDE_CLIQUES), planned, n_rows_public=True, rng=rng
    )
    return [noisy.one_way, noisy.pairs, *(noisy.cliques[clique].ravel() for clique in WIDE_CLIQUES)]


def events_of(planned: MarginalNoise) -> list[dict[str, Any]]:
    """The events as the ledger keeps them: JSON, and nothing of the objects it came from."""
    return list(json.loads(json.dumps(to_dict(planned.event)))["events"])


def resized(event: dict[str, Any], factor: float) -> dict[str, Any]:
    key = "sigma" if event["kind"] == "discrete-gaussian" else "scale"
    return {**event, key: event[key] * factor}


@pytest.mark.few(2)
@pytest.mark.parametrize("delta", [0, 1e-6], ids=["laplace", "gaussian"])
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "keyed"])
def test_every_cell_has_the_noise_that_its_event_says_and_neither_changes_alone(
    delta, secure, monkeypatch
):
    terms = budget(2.0, delta)
    planned = plan_noise(
        terms, 2, one_way=2.0, cliques=WIDE_CLIQUES
    )  # no two groups with the same noise
    events = events_of(planned)
    assert paid(from_dict(to_dict(planned.event)), delta) <= terms.epsilon
    assert [event["count"] for event in events] == [2, 1, 1, 1]
    groups = drawn_groups(planned, None if secure else keyed(f"dp {delta}"))
    assert [group.size for group in groups] == [20_002, 40_000, 20_000, 40_000]
    assert all(agrees(*pair) for pair in zip(groups, events, strict=True))
    for factor in (1.1, 1 / 1.1):  # the event changed alone: 10 % of one group's noise is seen
        assert not any(
            agrees(group, resized(event, factor))
            for group, event in zip(groups, events, strict=True)
        )
    honest = noise.perturb
    for factor in (1.1, 1 / 1.1):  # the noise changed alone
        with monkeypatch.context() as patch:

            def other(counts: Any, event: Any, *, rng: Any = None, factor: float = factor) -> Any:
                return honest(counts, from_dict(resized(to_dict(event), factor)), rng=rng)

            patch.setattr(noise, "perturb", other)
            changed = drawn_groups(planned, keyed(f"changed {factor}"))
        assert not any(agrees(*pair) for pair in zip(changed, events, strict=True))


@pytest.mark.parametrize("secure", [True, False], ids=["secure", "keyed"])
def test_no_two_tables_share_their_noise(secure):
    """With what they share, the difference of two noisy tables of the same rows would have no noise at all."""
    one_way, pairs, single, swapped = drawn_groups(
        plan_noise(budget(2.0, 1e-6), 2, cliques=WIDE_CLIQUES), None if secure else keyed("apart")
    )
    n = WIDE.sizes[0]
    parts = [
        one_way[:n],
        pairs.reshape(n, 2)[:, 0],
        pairs.reshape(n, 2)[:, 1],
        single,
        swapped.reshape(2, n)[0],
        swapped.reshape(2, n)[1],
    ]
    assert np.abs(np.corrcoef(parts) - np.eye(len(parts))).max() < 7 / math.sqrt(n)


def test_the_noise_is_added_to_the_counts():
    domain = named(2, 3, 2)
    counts = counts_of(domain, [("a", "b", "c")])
    tiny = DiscreteGaussian(sigma=1e-3, sensitivity=1.0, adjacency="add-remove")
    further = DiscreteLaplace(scale=0.02, sensitivity=1, adjacency="add-remove")
    planned = MarginalNoise(one_way=tiny, pairs=tiny, cliques={("a", "b", "c"): further})
    noisy = measure(counts, planned, n_rows_public=False)
    assert noisy.one_way.tolist() == counts.one_way.tolist()
    assert noisy.pairs.tolist() == counts.pairs.tolist()
    assert noisy.table(("a", "b", "c")).tolist() == counts.table(("a", "b", "c")).tolist()
    assert noisy.n_rows == pytest.approx(300, rel=1e-12)


def test_secure_noise_is_fresh_and_a_stream_repeats_itself():
    counts, planned = counts_of(named(2, 3)), plan_noise(budget(), 2)
    first, second = (
        measure(counts, planned, n_rows_public=True, rng=keyed("again")) for _ in range(2)
    )
    assert first.pairs.tolist() == second.pairs.tolist()
    fresh = [measure(counts, planned, n_rows_public=True).pairs.tolist() for _ in range(2)]
    assert fresh[0] != fresh[1]


# The sensitivity, by brute force

Rows = tuple[tuple[int, ...], ...]


def replaced(rows: Rows, records: list[tuple[int, ...]], unit: int) -> Iterator[Rows]:
    """All tables in which the first rows, those of the unit, have other values."""
    for others in itertools.combinations_with_replacement(records, unit):
        yield (*others, *rows[unit:])


def removed(rows: Rows, records: list[tuple[int, ...]], unit: int) -> Iterator[Rows]:
    """All tables without some of the unit's rows."""
    yield from (rows[k:] for k in range(1, unit + 1))


NEIGHBOURS: dict[str, Callable[..., Iterator[Rows]]] = {
    "replace-one": replaced,
    "add-remove": removed,
}


@pytest.mark.few
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("unit", [1, 2])
def test_the_declared_sensitivity_is_the_largest_change_of_each_table(sizes, adjacency, unit):
    domain = named(*sizes)
    records = list(itertools.product(*map(range, sizes)))
    clique = domain.names

    def counted(rows: Rows) -> list[list[np.ndarray]]:
        codes = np.array(rows, dtype=np.uint8).reshape(len(rows), len(sizes)).T
        found = MarginalCounts.of_codes(domain, np.ascontiguousarray(codes), [clique])
        return [
            [found.table((name,)) for name in clique],
            [found.table(pair) for pair in domain.pairs()],
            [found.cliques[clique]],
        ]

    cache = {rows: counted(rows) for n in range(3) for rows in itertools.product(records, repeat=n)}
    worst = np.zeros((2, 3))
    for rows in (rows for rows in cache if len(rows) >= unit):
        for other in NEIGHBOURS[adjacency](rows, records, unit):
            for group, (here, there) in enumerate(zip(cache[rows], cache[other], strict=True)):
                for left, right in zip(here, there, strict=True):
                    change = (left - right).astype(float)
                    worst[:, group] = np.maximum(
                        worst[:, group], [np.abs(change).sum(), math.sqrt((change**2).sum())]
                    )
    terms = {
        "adjacency": adjacency,
        **({"unit": {"column": "user", "max_rows": unit}} if unit > 1 else {}),
    }
    for norm, delta in enumerate(
        (0, 1e-6) if len(sizes) == 3 else (0,)
    ):  # a plan with a delta takes its second
        planned = plan_noise(budget(1.0, delta, **terms), len(sizes), cliques={clique: 1.0})
        declared = [event["sensitivity"] for event in events_of(planned)]
        assert (worst[norm] <= declared).all()
        assert worst[norm] == pytest.approx(declared, rel=1e-12)
        assert [event["count"] for event in events_of(planned)] == [
            len(group) for group in cache[()]
        ]  # and as many tables as it says
        assert {event["adjacency"] for event in events_of(planned)} == {adjacency}


# The tables


def noisy_of(
    domain: Domain, cliques: Any = (), n_rows_public: bool = True, **options: Any
) -> tuple[MarginalCounts, NoisyMarginals]:
    counts = counts_of(domain, cliques)
    planned = plan_noise(
        budget(4.0), domain.n_attributes, cliques=dict.fromkeys(cliques, 2.0), **options
    )
    return counts, measure(counts, planned, n_rows_public=n_rows_public, rng=keyed("tables"))


def test_each_table_is_at_its_place_in_any_order_of_its_attributes():
    domain = named(2, 3, 1, 4)
    counts = counts_of(domain, [("d", "a", "b")])
    further = {("d", "a", "b"): counts.table(("d", "a", "b"))}
    planned = plan_noise(budget(), 4)
    flat = NoisyMarginals(
        domain=domain,
        n_rows=300.0,
        noise=planned,
        one_way=counts.one_way,
        pairs=counts.pairs,
        cliques=further,
    )
    for clique in [(name,) for name in domain.names] + [
        tuple(pair) for pair in itertools.permutations(domain.names, 2)
    ]:
        assert flat.table(clique).tolist() == counts.table(clique).tolist()
    for clique in itertools.permutations(("a", "b", "d")):
        assert flat.table(clique).tolist() == counts.table(clique).tolist()
    assert pair_cells(domain).tolist() == [
        math.prod(domain.shape_of(pair)) for pair in domain.pairs()
    ]


def test_a_chosen_pair_comes_before_the_pair_of_all_pairs_with_the_margin_of_its_own():
    _, noisy = noisy_of(named(2, 3), [("b", "a")])
    for clique in (("a", "b"), ("b", "a")):
        assert (
            noisy.margin(clique)
            == margin_95(noisy.noise.cliques["b", "a"])
            < margin_95(noisy.noise.pairs)
        )
    assert (
        noisy.table(("b", "a")) is noisy.cliques["b", "a"]
        or (noisy.table(("b", "a")) == noisy.cliques["b", "a"]).all()
    )
    assert (noisy.table(("a", "b")) == noisy.cliques["b", "a"].T).all()


@pytest.mark.parametrize("clique", [("x",), ("a", "x"), ("a", "a"), ("a", "b", "c"), ()])
def test_what_was_not_measured_is_a_key_error(clique):
    _, noisy = noisy_of(named(2, 3, 2))
    with pytest.raises(KeyError):
        noisy.table(clique)
    with pytest.raises(KeyError):
        noisy.margin(clique)


@pytest.mark.parametrize(
    ("options", "clique"),
    [({"one_way": 0}, ("a",)), ({"pairs": 0}, ("a", "b")), ({"pairs": 0}, ("b", "a"))],
)
def test_what_was_left_out_is_a_key_error(options, clique):
    _, noisy = noisy_of(named(2, 3), **options)
    with pytest.raises(KeyError):
        noisy.table(clique)
    with pytest.raises(KeyError):
        noisy.margin(clique)


# Margins


@pytest.mark.parametrize("size", [0.2, 0.9, 3.0, 20.0, 150.0])
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_margin_covers_at_least_95_percent_and_hardly_more(kind, size):
    if kind == "gaussian":
        event: Any = DiscreteGaussian(sigma=size, sensitivity=1.0, adjacency="add-remove")
        distribution = np.exp(-(np.arange(-10_000, 10_001) ** 2) / (2 * size**2))
    else:
        event = DiscreteLaplace(scale=size, sensitivity=1, adjacency="add-remove")
        distribution = np.exp(-np.abs(np.arange(-10_000, 10_001)) / size)
    x, distribution = np.arange(-10_000, 10_001), distribution / distribution.sum()
    margin = margin_95(event)
    assert distribution[np.abs(x) <= margin].sum() >= 0.95 - 1e-12
    assert distribution[np.abs(x) <= margin - 2.001].sum() < 0.95
    if size >= 20:
        assert distribution[np.abs(x) <= margin].sum() < 0.96
    assert deviation(event) ** 2 == pytest.approx(
        (x**2 * distribution).sum(), rel=1e-9 if kind == "laplace" else 1e-5, abs=0.04
    )


def test_the_margin_of_a_table_covers_its_true_counts():
    counts = MarginalCounts.identity(WIDE)
    noisy = measure(counts, plan_noise(budget(), 2), n_rows_public=True, rng=keyed("margin"))
    covered = (np.abs(noisy.table(("a", "b"))) <= noisy.margin(("a", "b"))).mean()
    assert 0.95 - 6.5 * math.sqrt(0.05 * 0.95 / 40_000) < covered < 0.965


# The number of rows


@pytest.mark.parametrize("options", [{}, {"one_way": 0}, {"pairs": 0}, {"one_way": 0, "pairs": 0}])
def test_under_add_remove_the_number_of_rows_comes_from_noisy_tables_alone(options):
    domain = named(2, 3, 2)
    counts = counts_of(domain, [("a", "c")], n=5000)
    planned = plan_noise(budget(), 3, cliques={("a", "c"): 1.0}, **options)
    noisy = [
        measure(replace(counts, n_rows=n), planned, n_rows_public=False, rng=keyed("rows"))
        for n in (5000, 0, 10**9)
    ]
    assert len({each.n_rows for each in noisy}) == 1
    assert 4000 < noisy[0].n_rows < 6000
    assert noisy[0].n_rows != 5000
    assert measure(counts, planned, n_rows_public=True, rng=keyed("rows")).n_rows == 5000.0


def test_the_estimated_number_of_rows_is_as_good_as_the_weights_say():
    domain, errors = named(2, 9, 4), []
    counts, planned = counts_of(domain, n=20_000), plan_noise(budget(), 3, one_way=2.0)
    precision = sum(1 / (deviation(planned.one_way) ** 2 * size) for size in domain.sizes)
    precision += sum(
        1 / (deviation(planned.pairs) ** 2 * cells) for cells in pair_cells(domain).tolist()
    )
    rng = keyed("total")
    for _ in range(400):
        errors.append(measure(counts, planned, n_rows_public=False, rng=rng).n_rows - 20_000)  # noqa: PERF401
    assert abs(np.mean(errors)) * math.sqrt(400 * precision) < 6.5
    assert np.mean(np.square(errors)) * precision == pytest.approx(1, abs=6.5 * math.sqrt(3 / 400))


def test_a_table_of_no_rows_counts_at_least_one():
    counts = MarginalCounts.identity(named(2, 2))
    found = {
        measure(
            counts, plan_noise(budget(), 2), n_rows_public=False, rng=keyed(f"none {trial}")
        ).n_rows
        for trial in range(20)
    }
    assert min(found) == 1.0


# The file


@pytest.mark.parametrize(
    ("options", "delta"), [({}, 0), ({"one_way": 0}, 0), ({"pairs": 0}, 0), ({}, 1e-6)]
)
def test_noisy_tables_come_back_from_their_bytes(delta, options):
    counts = counts_of(named(2, 3, 2), [("c", "a"), ("a", "b", "c")])
    planned = plan_noise(
        budget(delta=delta), 3, cliques={("c", "a"): 1.0, ("a", "b", "c"): 2.0}, **options
    )
    noisy = measure(counts, planned, n_rows_public=False, rng=keyed("file"))
    back = NoisyMarginals.from_bytes(noisy.to_bytes(), "noisy.npz")
    assert (back.domain, back.n_rows, back.noise) == (noisy.domain, noisy.n_rows, noisy.noise)
    assert (back.one_way.tolist(), back.pairs.tolist()) == (
        noisy.one_way.tolist(),
        noisy.pairs.tolist(),
    )
    assert {clique: table.tolist() for clique, table in back.cliques.items()} == {
        clique: table.tolist() for clique, table in noisy.cliques.items()
    }
