"""Noise of tables of persons: what it costs, how it is shared, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from e2e.helpers import categorical, continuous, discrete, schema_of

from dpdask.computed import View
from dpdask.errors import DataError, InputError, SpecError
from dpdask.mechanisms import registry
from dpdask.mechanisms.copula.people import NoisyPersons
from dpdask.mechanisms.copula.spec import CopulaSpec
from dpdask.mechanisms.marginals.persons import denoise_persons
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy import Budget
from dpdask.privacy.events import epsilon
from dpdask.schema import Schema
from dpdask.stats import Domain
from dpdask.stats.people import GROUPS, LATTICE, PersonCounts, PersonDomain, PersonRows
from dpdask.streams import RunKey, stream

COLUMNS = {
    "user": {"role": "drop"},
    "sex": categorical(["f", "m"], constant=True),
    "rating": discrete([1, 2, 3, 4, 5]),
    "genre": categorical(["a", "b", "c"], nulls="level"),
    "price": continuous([0.0, 1.0]),
}
TYPES = {"sex": pa.string(), "rating": pa.int64(), "genre": pa.string(), "price": pa.float64()}
BUDGET = {
    "epsilon": 1.0,
    "delta": 1e-9,
    "adjacency": "add-remove",
    "unit": {"column": "user", "max_rows": 20},
}
WHOLE = {"PP": 1, "CC": LATTICE, "PC": LATTICE, "WW": LATTICE, "F": 1, "H": 1}
BOTH = ["add-remove", "replace-one"]


def make(columns=None, budget=(), undeclared=(), **spec):
    schema = Schema.from_dict({"columns": {**COLUMNS, **(columns or {})}, **dict(undeclared)})
    asked = CopulaSpec(**{"persons": True, "bins": 8, **spec})
    return registry.bind(asked, schema, Budget(**{**BUDGET, **dict(budget)}))


def columns_of(mechanism):
    types = pa.schema([(name, TYPES[name]) for name in mechanism.schema.privatised])
    return Columns(types=types, codecs=View.of(mechanism.schema, types).codecs)


@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("asked", [0.5, 1.0, 4.0])
def test_all_groups_together_cost_what_is_promised(adjacency, asked):
    mechanism = make(budget={"adjacency": adjacency, "epsilon": asked})
    cost = epsilon(mechanism.event, 1e-9)
    assert cost <= asked
    # an account of its own: Gaussian mechanisms compose to one, whatever their lattices
    moved = 1.0 if adjacency == "add-remove" else math.sqrt(2.0)
    rate = sum(
        event.count * (WHOLE[group] * moved / event.sigma) ** 2
        for group, event in mechanism.noise.items()
    )
    alone = pld.from_gaussian_mechanism(1.0 / math.sqrt(rate)).get_epsilon_for_delta(1e-9)
    assert alone <= asked * (1 + 1e-6)
    assert alone > 0.99 * asked  # nothing is wasted


@pytest.mark.parametrize("adjacency", BOTH)
def test_sensitivities_are_those_of_one_person(adjacency):
    mechanism = make(budget={"adjacency": adjacency})
    people = mechanism.statistic(columns_of(mechanism)).domain
    moved = 1.0 if adjacency == "add-remove" else math.sqrt(2.0)
    for group, event in mechanism.noise.items():
        # `tests/stats/test_persons_and_rows.py` enumerates persons: no part of a table is larger
        assert moved <= event.sensitivity / WHOLE[group] <= moved * (1 + 1e-12)
        assert event.count == len(people.shapes[group])
        assert event.adjacency == adjacency


def test_the_promise_is_of_whole_persons():
    """A person who is in the table of persons whether or not it has rows moves PP and H by √2: that is no neighbour."""
    text = make().description.guarantee("shuffled")
    assert "unit: one user, of whose rows at most 20 are used" in text
    assert "tests whether a user is there" in text
    assert "one who tests whether it had one value rather than another (counted twice: 2ε)" in text
    text = make(budget={"adjacency": "replace-one"}).description.guarantee("shuffled")
    assert "replace-one: one user is replaced, with all rows, unit: one user" in text
    assert "user's rows" not in text


def shares_of(noise):
    rates = {
        group: event.count * (WHOLE[group] / event.sigma) ** 2 for group, event in noise.items()
    }
    return {group: rate / sum(rates.values()) for group, rate in rates.items()}


def test_the_budget_is_shared_as_the_sizes_of_tables_say():
    mechanism = make()
    shares, noise = shares_of(mechanism.noise), mechanism.noise
    assert shares["H"] == pytest.approx(0.05)
    assert shares["F"] == pytest.approx(0.03)
    people = mechanism.statistic(columns_of(mechanism)).domain
    groups = ("PP", "CC", "PC", "WW")

    def total(sigmas):
        return sum(people.count_cells(group) * sigmas[group] for group in groups)

    sigmas = {group: noise[group].sigma / WHOLE[group] for group in groups}
    best = total(sigmas)
    # the least sum of |noise| at its price: any other division of the same price has more
    for giver in groups:
        for taker in groups:
            if giver != taker:
                rates = {group: noise[group].count / sigmas[group] ** 2 for group in groups}
                rates[giver], rates[taker] = (
                    0.9 * rates[giver],
                    rates[taker] + 0.1 * rates[giver],
                )
                moved = {g: math.sqrt(noise[g].count / rates[g]) for g in groups}
                assert total(moved) > best


def test_persons_with_one_row_have_no_pairs():
    mechanism = make(budget={"unit": {"column": "user", "max_rows": 1}})
    assert set(mechanism.noise) == {"PP", "CC", "PC", "H"}
    assert epsilon(mechanism.event, 1e-9) <= 1.0


def counts_of(mechanism, n, seed=1):
    people = mechanism.statistic(columns_of(mechanism)).domain
    rng, p = np.random.default_rng(seed), people.n_parents
    k = rng.integers(1, people.max_rows + 1, n)
    dtype = people.domain.code_dtype
    sizes = people.domain.sizes
    parents = np.stack([rng.integers(0, size, n).astype(dtype) for size in sizes[:p]])
    children = np.stack([rng.integers(0, size, k.sum()).astype(dtype) for size in sizes[p:]])
    return PersonCounts.of_persons(people, parents, children, np.concatenate([[0], np.cumsum(k)]))


def draw(mechanism, counts, seed=7):
    key = RunKey.insecure(seed)
    return mechanism.draw(counts, columns_of(mechanism), lambda name: stream(key, name, ""))


@pytest.mark.parametrize("adjacency", BOTH)
def test_noise_has_the_size_that_is_accounted_for(adjacency):
    mechanism = make(budget={"adjacency": adjacency})
    counts = counts_of(mechanism, 5000)
    noisy = [draw(mechanism, counts, seed) for seed in range(12)]
    for group in GROUPS:
        moved = np.concatenate([(each.tables[group] - counts.tables[group]) for each in noisy])
        sigma = mechanism.noise[group].sigma
        tolerance = 5.0 / math.sqrt(2.0 * moved.size)
        assert abs(moved.std() / sigma - 1.0) < tolerance, group
        assert abs(moved.mean()) < 5.0 * sigma / math.sqrt(moved.size), group
    n = [each.n_persons for each in noisy]
    if adjacency == "replace-one":
        assert set(n) == {5000.0}
    else:
        assert len(set(n)) == 12
        assert max(abs(each - 5000) for each in n) < 500


def rows_of(statistic, people, order=slice(None)):
    """Rows of some persons as a worker brings them together: by person, codes of all columns."""
    units = np.repeat([unit for unit, _ in people], [len(rows) for _, rows in people])
    codes = np.concatenate([rows for _, rows in people]).astype(statistic.rows.dtype)
    return PersonRows(units.astype(np.uint64)[order], codes[order].T.copy())


@pytest.mark.parametrize("n_rows", [1, 2, 50])
def test_a_person_is_in_one_fine_cell_of_each_column(n_rows):
    mechanism = make(bins="adaptive")
    statistic = mechanism.search.statistic(columns_of(mechanism))
    rng, key = np.random.default_rng(0), RunKey.insecure(3)
    sizes = [cells.size for cells in statistic.cells.values()]
    assert max(sizes) > 1_000
    people = []
    for unit in range(40):
        k = n_rows if unit == 0 else rng.integers(1, 9)
        rows = np.stack([rng.integers(0, size, k) for size in sizes], axis=1)
        rows[:, 0] = rows[0, 0]  # which is constant
        people.append((unit * 2**58, rows))
    whole = statistic.count([rows_of(statistic, people)], [], key)
    without = statistic.count([rows_of(statistic, people[1:])], [], key)
    assert whole.n_persons - without.n_persons == 1
    for name, counted in whole.columns.items():
        moved = counted.counts - without.columns[name].counts
        assert (moved >= 0).all()
        assert moved.sum() == 1
    # whatever the order of the rows, and wherever persons are cut
    n = sum(len(rows) for _, rows in people)
    mixed = rows_of(statistic, people, rng.permutation(n))
    parts = [statistic.count([mixed.select_part(part, 4)], [], key) for part in range(4)]
    merged = parts[0].merge(*parts[1:])
    assert merged.n_persons == whole.n_persons
    for name, counted in whole.columns.items():
        assert np.array_equal(merged.columns[name].counts, counted.counts)


@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("asked", [0.5, 4.0])
def test_fine_counts_and_tables_together_cost_what_is_promised(adjacency, asked):
    mechanism = make(bins="adaptive", budget={"adjacency": adjacency, "epsilon": asked})
    moved = 1.0 if adjacency == "add-remove" else math.sqrt(2.0)
    fine = mechanism.noise["fine_counts"]
    assert fine.count == 3  # the levels of one column
    assert moved <= fine.sensitivity < 1.0001 * moved
    rates = [
        event.count * (event.sensitivity / event.sigma) ** 2 for event in mechanism.noise.values()
    ]
    alone = pld.from_gaussian_mechanism(1.0 / math.sqrt(sum(rates)))
    assert 0.99 * asked < alone.get_epsilon_for_delta(1e-9) <= asked * (1 + 1e-6)
    assert math.isclose(rates[list(mechanism.noise).index("fine_counts")] / sum(rates), 0.05)
    assert mechanism.with_found({}).noise == mechanism.noise


@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("n", [5_000, 50_000])
def test_noise_moves_the_fitted_tables_about_as_a_plan_tells(adjacency, n):
    mechanism = make(budget={"adjacency": adjacency})
    counts = counts_of(mechanism, n)
    errors, scores = mechanism.estimate_errors(counts.domain), (None,) * len(mechanism.children)
    exact = replace(draw(mechanism, counts), tables=counts.tables).tell(scores, alone=True)
    moved = {group: [] for group in errors}
    for seed in range(5):
        fitted = denoise_persons(draw(mechanism, counts, seed).tell(scores, alone=True)).tables
        for key, table in fitted.items():
            truth = exact.tables[key]
            apart = np.abs(table / table.sum() - truth / truth.sum()).sum() / 2.0
            moved[key[0]].append(float(apart))
    for group, found in moved.items():
        assert 0.4 < np.mean(found) * n / errors[group] < 2.0, group


@pytest.mark.parametrize("n", [1_000, 30_000])
def test_the_least_epsilon_for_so_few_persons_is_enough_and_no_more(n):
    mechanism = make()
    people = mechanism.statistic(columns_of(mechanism)).domain
    least = float(mechanism.find_epsilon(people, n))
    for share, is_enough in ((1.05, True), (0.9, False)):
        asked = make(budget={"epsilon": share * least})
        errors = asked.estimate_errors(people)
        assert (max(errors.values()) <= 0.05 * n) == is_enough


def test_a_plan_warns_of_few_persons_where_their_number_is_public():
    mechanism = make(budget={"adjacency": "replace-one"})
    columns = columns_of(mechanism)
    [warned] = mechanism.description.cautions(columns, 500)
    assert f"use ε ≥ {mechanism.find_epsilon(mechanism.statistic(columns).domain, 500)}" in warned
    assert "for so few persons, 500" in warned
    for known in (None, 1_000_000):
        assert mechanism.description.cautions(columns, known) == ()


def test_the_tables_that_are_told_are_in_whole_persons():
    mechanism = make()
    counts = counts_of(mechanism, 3000)
    noisy = draw(mechanism, counts)
    told = noisy.tell((None,) * 3, alone=True)
    told.check()
    band = len(told.parent_sizes) - 1
    assert told.tables["H",][0] == 0.0
    assert (told.tables["PP", 0, band][:, 0] == 0.0).all()
    assert (told.tables["PC", band, 0][0] == 0.0).all()
    assert (told.tables["F", 0][:2] == 0.0).all()
    for key in (("CC", 0, 1), ("WW", 0, 1), ("PC", 0, 0)):
        size = told.tables[key].size
        assert abs(told.tables[key].sum() - 3000) < 200 + 6 * told.sigmas[key[0]] * math.sqrt(size)
    with_empty = noisy.tell((None,) * 3, alone=False)
    assert with_empty.tables["H",][0] != 0.0


def test_noisy_tables_are_kept_and_read():
    mechanism = make()
    noisy = draw(mechanism, counts_of(mechanism, 300))
    data = noisy.to_bytes()
    read = mechanism.read_drawn(data, columns_of(mechanism))
    assert read.to_bytes() == data
    other = make(budget={"epsilon": 2.0})
    with pytest.raises(InputError, match="another version"):
        other.read_drawn(data, columns_of(other))
    for wrong in (
        replace(noisy, tables={**noisy.tables, "H": noisy.tables["H"][1:]}),
        replace(noisy, tables={**noisy.tables, "H": noisy.tables["H"].astype(float)}),
        replace(noisy, n_persons=math.nan),
    ):
        with pytest.raises(InputError):
            NoisyPersons.from_bytes(wrong.to_bytes(), "here")
    domain = Domain(names=("a",), sizes=(2,))
    people = PersonDomain(domain=domain, n_parents=1, max_rows=2)
    with pytest.raises(InputError):
        NoisyPersons.from_bytes(replace(noisy, people=people, tables={}).to_bytes(), "here")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"budget": {"unit": "row"}}, "told apart by a column"),
        ({"budget": {"unit": {"column": "user", "max_rows": 300}}}, "at most 256 rows"),
        ({"budget": {"delta": 0}}, "needs a δ"),
        ({"target": "rating"}, "no such parameter"),
        ({"measured_again": 0}, "no such parameter"),
        ({"columns": {"user": {"role": "keep"}}}, "names of their own"),
        ({"columns": {"place": {"role": "keep"}}}, "role keep"),
        (
            {
                "columns": {
                    n: {**COLUMNS[n], "constant": True} for n in ("rating", "genre", "price")
                }
            },
            "no column is left",
        ),
        (
            {
                "columns": {"cost": continuous([0.0, 1.0])},
                "undeclared": {"rules": [{"ordered": "price <= cost"}]},
            },
            "relate levels only",
        ),
        (
            {"undeclared": {"rules": [{"forbid": {"genre": "z", "rating": 5}}]}},
            "none of its levels",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, what):
    with pytest.raises(SpecError, match=what):
        make(**changes)


@pytest.mark.parametrize("kind", [{}, {"persons": False, "bins": 8}])
def test_only_persons_have_constant_columns(kind):
    schema = schema_of(COLUMNS)
    with pytest.raises(SpecError, match="constant columns"):
        registry.bind(CopulaSpec(**kind), schema, Budget(**BUDGET))


def test_more_persons_than_exact_noise_can_count_are_refused_before_the_charge():
    mechanism = make()
    columns = columns_of(mechanism)
    counts = PersonCounts.identity(mechanism.statistic(columns).domain)
    counts.tables["H"][1] = 2**27
    mechanism.check_counts(counts, columns)
    counts.tables["H"][1] += 1
    with pytest.raises(DataError, match="at most 134,217,728 persons"):
        mechanism.check_counts(counts, columns)


def test_jobs_without_persons_keep_their_digests():
    assert "persons" not in CopulaSpec().model_dump()
    assert CopulaSpec(persons=True).model_dump()["persons"] is True
    plain = schema_of({"x": discrete([1, 2])})
    assert "constant" not in plain.model_dump()["columns"]["x"]


def test_too_many_cells_are_refused():
    mechanism = make({f"x{n}": discrete(list(range(2000))) for n in range(8)})
    wide = pa.schema([(name, TYPES.get(name, pa.int64())) for name in mechanism.schema.privatised])
    columns = Columns(types=wide, codecs=View.of(mechanism.schema, wide).codecs)
    with pytest.raises(SpecError, match="the limit is"):
        mechanism.check(columns)
