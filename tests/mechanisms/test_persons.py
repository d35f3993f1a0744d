"""The two-level copula on simulated persons: what it keeps, what each part of it is for, and what it refuses."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import default_rng

from dpdask.errors import SpecError
from dpdask.mechanisms.copula.persons import PersonModel, PersonTables, fit_persons
from dpdask.mechanisms.marginals.persons import _average_sides, denoise_persons
from dpdask.rules import CellRules
from dpdask.streams import RunKey, stream

PARENTS, CHILDREN = (2, 4, 4), (5, 4, 2)
EDGES, MOST = (0, 1, 2, 6), 8
SCORES = (np.arange(1.0, 6.0), None, None)
EXACT = dict.fromkeys(("PP", "CC", "PC", "WW", "H", "F"), 0.0)


def simulate(n, seed=0):
    """Persons who like what they do: stars, a place that is one for half of them, and a flag that follows the stars."""
    rng = default_rng(seed)
    taste, group = rng.normal(size=n), rng.integers(0, 2, n)
    k = np.minimum(rng.geometric(0.25, n) - 1, MOST)
    age = np.clip(2 + group + rng.normal(size=n).round(), 0, 3).astype(int)
    parents = np.stack([group, age, np.searchsorted(EDGES, k, side="right") - 1], axis=1)
    owners = np.repeat(np.arange(n), k)
    noise = rng.normal(size=len(owners))
    stars = np.clip(np.round(2 + 0.8 * taste[owners] + 0.5 * group[owners] + noise), 0, 4)
    stays, home = rng.random(n) < 0.5, rng.integers(0, 4, n)
    moved = rng.integers(0, 4, len(owners))
    place = np.where(stays[owners] | (rng.random(len(owners)) < 0.3), home[owners], moved)
    flag = rng.random(len(owners)) < np.where(stars > 2, 0.8, 0.2)
    return parents, np.stack([stars, place, flag], axis=1).astype(int), owners


def count(parents, children, owners, parent_sizes=PARENTS, child_sizes=CHILDREN, most=MOST):
    """The tables, cell by cell as they are defined."""
    n, (n_p, n_c) = len(parents), (len(parent_sizes), len(child_sizes))
    k = np.bincount(owners, minlength=n)
    tables = {("H",): np.bincount(k, minlength=most + 1).astype(float)}

    def table(first, second, weights, shape):
        cells = np.zeros(shape)
        np.add.at(cells, (first, second), weights)
        return cells

    for a, b in itertools.combinations(range(n_p), 2):
        shape = parent_sizes[a], parent_sizes[b]
        tables["PP", a, b] = table(parents[:, a], parents[:, b], 1.0, shape)
    for a, c in itertools.product(range(n_p), range(n_c)):
        shape = parent_sizes[a], child_sizes[c]
        tables["PC", a, c] = table(parents[owners, a], children[:, c], 1 / k[owners], shape)
    if n_p == 1:
        tables["PP", 0] = np.bincount(parents[:, 0], minlength=parent_sizes[0]).astype(float)
    if n_c == 1:
        share = np.bincount(children[:, 0], weights=1 / k[owners], minlength=child_sizes[0])
        tables["CC", 0] = share
    for c, d in itertools.combinations(range(n_c), 2):
        shape = child_sizes[c], child_sizes[d]
        tables["CC", c, d] = table(children[:, c], children[:, d], 1 / k[owners], shape)
    if most < 2:
        return tables
    several = k[owners] > 1
    pair = 1 / (k * (k - 1.0))[owners[several]]
    of = [np.zeros((n, size)) for size in child_sizes]
    for c in range(n_c):
        np.add.at(of[c], (owners, children[:, c]), 1.0)
        agree = (of[c].max(axis=1) == k) & (k > 1)
        bands = np.bincount(parents[agree, -1], minlength=parent_sizes[-1])
        tables["F", c] = bands.astype(float)
    weight = np.where(k > 1, 1 / np.maximum(k * (k - 1.0), 1), 0)[:, None]
    for c, d in itertools.combinations_with_replacement(range(n_c), 2):
        same = table(
            children[several, c], children[several, d], pair, (child_sizes[c], child_sizes[d])
        )
        tables["WW", c, d] = (of[c] * weight).T @ of[d] - same
    return tables


def tables_of(parents, children, owners, sigma=0.0, seed=0, **others):
    rng = default_rng(seed)
    exact = count(parents, children, owners, **others)
    sizes = {
        "parent_sizes": others.get("parent_sizes", PARENTS),
        "child_sizes": others.get("child_sizes", CHILDREN),
        "max_rows": others.get("most", MOST),
    }
    return PersonTables(
        **sizes,
        band_edges=EDGES[: sizes["parent_sizes"][-1]],
        n_persons=float(len(parents)),
        tables={key: table + sigma * rng.normal(size=table.shape) for key, table in exact.items()},
        sigmas=dict.fromkeys(EXACT, sigma),
        child_scores=SCORES if sizes["child_sizes"] == CHILDREN else (),
    )


def draw(model, n, block=0, seed=0):
    return model.draw(stream(RunKey.insecure(seed), "copula", f"block {block}/persons"), n)


def distances(one, two):
    """The mean total variation distance of each group of tables."""
    found = {}
    for key, table in one.items():
        apart = np.abs(table / table.sum() - two[key] / two[key].sum()).sum() / 2
        found.setdefault(key[0], []).append(apart)
    return {group: float(np.mean(values)) for group, values in found.items()}


def variance_between(tables):
    """The covariance of the stars of two rows of a person."""
    share = tables["WW", 0, 0] / tables["WW", 0, 0].sum()
    centred = SCORES[0] - share.sum(axis=1) @ SCORES[0]
    return float(centred @ share @ centred)


TRUTH = simulate(6000)
COUNTED = count(*TRUTH)


@pytest.fixture(scope="module")
def exact():
    return fit_persons(tables_of(*TRUTH))


@pytest.fixture(scope="module")
def drawn(exact):
    return draw(exact, 6000)


def test_without_noise_every_table_is_met(drawn):
    apart = distances(COUNTED, count(*map(np.int64, drawn)))
    again = distances(COUNTED, count(*simulate(6000, 1)))
    assert apart["PP"] < 0.01
    assert max(apart[group] for group in ("CC", "PC", "WW")) < 0.006
    assert apart["H"] < 0.002
    assert all(apart[group] < again[group] for group in ("PP", "CC", "PC", "WW", "H"))


def test_each_person_has_a_number_of_rows_of_its_band(drawn):
    parents, children, owners = drawn
    k = np.bincount(owners, minlength=6000)
    assert (np.diff(owners) >= 0).all()
    assert children.shape == (k.sum(), 3)
    assert (parents[:, -1] == np.searchsorted(EDGES, k, side="right") - 1).all()
    wanted = COUNTED["H",]
    assert np.abs(np.bincount(k, minlength=MOST + 1) - wanted).max() <= 0.002 * 6000


def test_levels_are_those_of_their_columns(drawn):
    parents, children, _ = drawn
    assert (parents.max(axis=0) < PARENTS).all()
    assert (children.max(axis=0) < CHILDREN).all()
    assert parents.dtype == children.dtype == np.uint16


def test_as_many_persons_as_measured_have_rows_that_agree(drawn):
    found = count(*map(np.int64, drawn))
    for column in range(3):
        assert np.abs(found["F", column] - COUNTED["F", column]).max() <= 0.02 * 6000


def test_variance_between_persons_is_kept_and_lost_without_their_effect(exact, drawn):
    truth = variance_between(COUNTED)
    assert variance_between(count(*map(np.int64, drawn))) == pytest.approx(truth, rel=0.05)
    alone = dict(tables_of(*TRUTH).tables)
    for key in list(alone):
        if key[0] == "F":
            del alone[key]
        if key[0] == "WW":
            table = alone[key]
            alone[key] = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    without = fit_persons(replace(tables_of(*TRUTH), tables=alone))
    found = count(*map(np.int64, draw(without, 6000)))
    assert abs(variance_between(found)) < 0.1 * truth


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_tables_are_nearer_than_the_noisy_ones(seed):
    noisy = tables_of(*TRUTH, sigma=25.0, seed=seed)
    found = count(*map(np.int64, draw(fit_persons(noisy), 6000, seed=seed)))
    apart, raw = distances(COUNTED, found), distances(COUNTED, noisy.tables)
    assert all(apart[group] < raw[group] for group in ("CC", "PC", "WW"))
    scores = SCORES[0] - SCORES[0].mean()
    error = 25.0 * (scores @ scores) / COUNTED["WW", 0, 0].sum()
    assert abs(variance_between(found) - variance_between(COUNTED)) < 3 * error


def forbid(shape, *cells):
    table = np.ones(shape, dtype=bool)
    table[tuple(zip(*cells, strict=True))] = False
    return table


RULES = CellRules(  # on columns of persons, of rows, of both, and of three
    pairs={
        (0, 1): forbid((2, 4), (0, 3), (1, 0)),
        (2, 4): forbid((5, 2), (0, 1), (4, 0)),
        (1, 3): forbid((4, 4), (2, 0), (3, 1), (3, 2)),
    },
    larger=(((0, np.array([True, False])), (2, np.arange(5) == 2), (3, np.arange(4) == 3)),),
)


def test_every_row_keeps_rules_beside_its_person():
    parents, children, owners = simulate(20_000)

    def find_kept(parents, children, owners):
        return RULES.keep(np.concatenate([parents[owners, :2].T, children.T]))

    # persons whose rows all keep the rules, as everybody knows
    good = np.bincount(owners, ~find_kept(parents, children, owners), len(parents)) == 0
    good &= RULES.limit(2).keep(parents.T)
    place = np.cumsum(good) - 1
    own = good[owners]
    tables = tables_of(parents[good], children[own], place[owners[own]])
    model = fit_persons(tables)
    drawn = draw(model, 4_000)
    assert not find_kept(*drawn).all()  # without the rules some are broken
    found = model.draw(stream(RunKey.insecure(0), "test", "0"), 4_000, RULES)
    assert find_kept(*found).all()
    assert RULES.limit(2).keep(found[0].T).all()
    numbers = np.bincount(found[2], minlength=4_000)
    bands = np.searchsorted(EDGES, numbers, side="right") - 1
    assert np.array_equal(bands, found[0][:, -1])
    near = distances(tables.tables, count(*map(np.int64, found)))
    assert max(near.values()) < 0.015, near


def test_rules_that_nobody_keeps_are_refused(exact):
    nobody = CellRules(pairs={(2, 3): np.zeros((5, 4), dtype=bool)}, larger=())
    with pytest.raises(SpecError, match="fewer than 1 in 1,000"):
        exact.draw(stream(RunKey.insecure(0), "test", "0"), 500, nobody)


def test_the_same_stream_draws_the_same_persons(exact):
    first, again, other = draw(exact, 500), draw(exact, 500), draw(exact, 500, block=1)
    assert [part.tobytes() for part in first] == [part.tobytes() for part in again]
    assert first[0].tobytes() != other[0].tobytes()
    refitted = fit_persons(tables_of(*TRUTH))
    assert [part.tobytes() for part in draw(refitted, 500)] == [part.tobytes() for part in first]


@pytest.mark.parametrize("n", [1, 2, 37])
def test_few_persons_can_be_drawn(exact, n):
    parents, children, owners = draw(exact, n)
    assert parents.shape == (n, 3)
    assert children.shape == (len(owners), 3)


def test_levels_without_a_cell_are_never_drawn():
    parents, children, owners = simulate(4000)
    k = np.bincount(owners, minlength=4000)
    kept = np.flatnonzero(k > 0)
    place = np.cumsum(k > 0) - 1
    children[children[:, 1] == 3, 1] = 0
    noisy = tables_of(parents[kept], children, place[owners], sigma=30.0)
    for key, table in noisy.tables.items():
        if key[0] in ("PP", "PC") and key[1] == 2:
            table[0] = 0.0
        if key[0] == "PP" and key[2] == 2:
            table[:, 0] = 0.0
        for axis, column in enumerate(key[1:]):
            if key[0] in ("CC", "WW", "PC") and column == 1 and (key[0] != "PC" or axis == 1):
                np.moveaxis(table, axis, 0)[3] = 0.0
    noisy.tables["H",][0] = 0.0
    parents, children, owners = draw(fit_persons(noisy), 4000)
    assert (np.bincount(owners, minlength=4000) > 0).all()
    assert (parents[:, -1] > 0).all()
    assert (children[:, 1] != 3).all()


@pytest.mark.parametrize("sigma", [0.0, 20.0])
def test_one_column_and_one_row_are_enough(sigma):
    _, children, owners = simulate(2000)
    firsts = np.unique(owners, return_index=True)[1]
    band = np.isin(np.arange(2000), owners).astype(int)[:, None]
    alone = {"parent_sizes": (2,), "child_sizes": (5,), "most": 1}
    noisy = tables_of(band, children[firsts, :1], owners[firsts], sigma=sigma, **alone)
    parents, rows, of = draw(fit_persons(noisy), 2000)
    assert (np.bincount(of, minlength=2000) == parents[:, 0]).all()
    shares = np.bincount(rows[:, 0], minlength=5) / len(rows)
    wanted = np.bincount(children[firsts, 0], minlength=5) / len(firsts)
    np.testing.assert_allclose(shares, wanted, atol=0.01 + sigma / 400)


def test_tables_of_noise_alone_can_be_fitted():
    noisy = tables_of(*simulate(50), sigma=400.0)
    parents, children, owners = draw(fit_persons(noisy), 50)
    assert len(parents) == 50
    assert len(children) == len(owners)


def test_an_archive_holds_the_model(exact):
    header, arrays = exact.to_archive()
    again = PersonModel.from_archive(json.loads(json.dumps(header)), arrays)
    for one, two in zip(draw(exact, 300), draw(again, 300), strict=True):
        np.testing.assert_array_equal(one, two)
    own = again.to_archive()
    assert own[0] == header
    assert all(
        np.array_equal(own[1][name], array, equal_nan=True) for name, array in arrays.items()
    )


def changed(array, place, value):
    other = array.copy()
    other[place] = value
    return other


DAMAGED = {
    "levels": [lambda own: own[:-1], lambda own: own[::-1], lambda own: own.astype(np.int64)],
    "n_levels": [lambda own: own[:-1], lambda own: own - own, lambda own: own + 1],
    "probabilities": [lambda own: own * 2, lambda own: changed(own, 0, np.nan), lambda own: -own],
    "offsets": [lambda own: changed(own, 0, np.inf), lambda own: own.astype(np.float64)],
    "person_factor": [lambda own: own[:-1], lambda own: changed(own, 0, np.nan)],
    "row_factor": [lambda own: own[:-1], lambda own: changed(own, 0, 3.0)],
    "counts": [lambda own: own[:-1], lambda own: -own - 1, lambda own: changed(own, 0, np.nan)],
    "agreeing": [lambda own: own + 2.0, lambda own: own[:, :-1]],
    "single": [lambda own: own[:-1], lambda own: own - 2.0],
    "wanted_rows": [lambda own: own[:-1], lambda own: changed(own, (0, 5), 0.5)],
    "wanted_parents": [lambda own: own - 1.0, lambda own: own.astype(np.float32)],
    "wanted_pairs": [lambda own: own.T[:-1], lambda own: changed(own, (0, 1), 0.7)],
    "raked_tables": [lambda own: own + 3],
    "raked_counts": [lambda own: own[:-1]],
    "raked_strengths": [lambda own: -own],
}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name, own in DAMAGED.items() for damage in own]
)
def test_a_damaged_archive_is_refused(exact, name, damage):
    header, arrays = exact.to_archive()
    with pytest.raises(ValueError, match=r".+"):
        PersonModel.from_archive(header, {**arrays, name: damage(arrays[name])})


@pytest.mark.parametrize("name", ["levels", "counts", "wanted_pairs", "raked_tables", "row_factor"])
def test_an_archive_without_a_part_is_refused(exact, name):
    header, arrays = exact.to_archive()
    del arrays[name]
    with pytest.raises(KeyError):
        PersonModel.from_archive(header, arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parent_sizes", (2, 4, 3)),
        ("parent_sizes", (2, 4.0, 4)),
        ("child_sizes", ()),
        ("band_edges", (0, 1, 2, 9)),
        ("band_edges", (1, 2, 3, 6)),
        ("max_rows", 5),
        ("n_persons", float("nan")),
        ("n_persons", "many"),
    ],
)
def test_a_wrong_header_is_refused(exact, name, value):
    header, arrays = exact.to_archive()
    with pytest.raises(ValueError, match=r".+"):
        PersonModel.from_archive({**header, name: value}, arrays)


@pytest.mark.parametrize(
    ("key", "table"),
    [
        (("PP", 0, 1), np.zeros((4, 2))),
        (("WW", 0, 0), np.zeros((5, 4))),
        (("H",), np.zeros(MOST)),
        (("F", 0), np.zeros(5)),
        (("CC", 0, 1), np.full((5, 4), np.inf)),
        (("CC", 0, 1), np.zeros((5, 4), dtype=np.int64)),
    ],
)
def test_tables_of_other_columns_are_refused(key, table):
    noisy = tables_of(*simulate(100))
    with pytest.raises(ValueError, match="table"):
        replace(noisy, tables={**noisy.tables, key: table}).check()


@pytest.mark.parametrize(
    "key",
    [
        ("PP", 1, 0),
        ("CC", 1, 1),
        ("WW", 1, 0),
        ("PC", 0, 3),
        ("F", 3),
        ("F",),
        ("H", 0),
        ("XX", 0, 1),
        ("PP", 0),
        ("PP", 0, "1"),
    ],
)
def test_no_other_table_is_known(key):
    with pytest.raises(KeyError):
        tables_of(*simulate(100)).shape_of(key)


def test_what_a_fit_needs_must_be_there():
    noisy = tables_of(*simulate(100))
    for gone in (("H",), ("PP", 0, 1)):
        left = {key: table for key, table in noisy.tables.items() if key != gone}
        if gone[0] == "PP":
            left = {key: table for key, table in left.items() if key[:2] != ("PP", 0)}
        with pytest.raises(ValueError, match="no table"):
            fit_persons(replace(noisy, tables=left))
    with pytest.raises(ValueError, match="standard deviation"):
        replace(noisy, sigmas={}).check()
    with pytest.raises(ValueError, match="numbers"):
        replace(noisy, child_scores=(np.arange(4.0), None, None)).check()


def test_tables_of_pairs_tell_of_all_rows_where_all_persons_have_two():
    """Margins are averaged over more tables, so they have less noise; not where some persons have one row."""
    rng = default_rng(5)
    n = 3_000
    owners = np.repeat(np.arange(n), MOST)
    parents = np.stack([rng.integers(0, 2, n), rng.integers(0, 4, n), np.full(n, 3)], axis=1)
    children = np.stack(
        [
            rng.choice(size, len(owners), p=np.arange(1, size + 1) / sum(range(size + 1)))
            for size in CHILDREN
        ],
        axis=1,
    )
    all_two, some_one = (parents, children, owners), TRUTH
    for truth, gain in ((all_two, True), (some_one, False)):
        squares = np.zeros(2)
        exact = count(*truth)
        for seed in range(20):
            noisy = tables_of(*truth, sigma=20.0, seed=seed)
            total = exact["CC", 0, 1].sum()
            fewer = _average_sides(noisy, ("CC", "PC"), CHILDREN, total)
            found = denoise_persons(noisy).rows
            for place, each in enumerate((found, fewer)):
                shares = each[0] / each[0].sum() - exact["CC", 0, 1].sum(axis=1) / total
                squares[place] += float(shares @ shares)
        if gain:
            assert squares[0] < 0.9 * squares[1]
        else:
            assert squares[0] == pytest.approx(squares[1], rel=0.05)


def test_dependence_below_the_noise_is_left_out_and_other_is_kept():
    """Columns that do not depend on each other stay so; without noise any dependence is kept."""
    rng = default_rng(6)
    parents, children, owners = TRUTH
    mixed = np.stack([rng.permutation(column) for column in children.T], axis=1)
    for rows, sigma, depends in ((mixed, 60.0, False), (children, 60.0, True), (mixed, 0.0, True)):
        noisy = tables_of(parents, rows, owners, sigma=sigma, seed=1)
        table = denoise_persons(noisy).tables["CC", 0, 2]
        apart = table - np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
        assert (np.abs(apart).sum() > 1e-6 * table.sum()) == depends
