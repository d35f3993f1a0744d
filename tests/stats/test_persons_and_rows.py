"""Persons weigh 1 in every table: a one-line oracle, sensitivities by enumeration, and a choice of rows without bias."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from dpdask.cells import cells
from dpdask.codec import codec_for
from dpdask.errors import DataError
from dpdask.schema import Column
from dpdask.stats import Domain
from dpdask.stats.people import (
    GROUPS,
    LATTICE,
    MOST_ROWS,
    PersonCounts,
    PersonDomain,
    PersonStatistic,
    PersonTableStatistic,
    make_edges,
)
from dpdask.streams import RunKey, Streams

WHOLE = {"PP": 1, "CC": LATTICE, "PC": LATTICE, "WW": LATTICE, "F": 1, "H": 1}
KEY = RunKey.insecure(1)


def domain_of(parents, children, max_rows):
    names = tuple(f"x{place}" for place in range(len(parents) + len(children)))
    domain = Domain(names=names, sizes=(*parents, *children))
    return PersonDomain(domain=domain, n_parents=len(parents), max_rows=max_rows)


def count(domain, persons, counts=PersonCounts):
    """The tables of persons, each a tuple of its own codes and a list of its rows' codes."""
    dtype = domain.domain.code_dtype
    n_children = len(domain.child_sizes)
    parents = (
        np.array([own for own, _ in persons], dtype=dtype).reshape(len(persons), domain.n_parents).T
    )
    rows = [row for _, rows in persons for row in rows]
    children = np.array(rows, dtype=dtype).reshape(-1, n_children).T
    starts = np.cumsum([0, *(len(rows) for _, rows in persons)])
    contiguous = np.ascontiguousarray(parents), np.ascontiguousarray(children)
    return counts.of_persons(domain, *contiguous, starts)


def tables(counts):
    return {
        key: table
        for group in GROUPS
        for key, table in counts.domain.split(group, counts.tables[group])
    }


def expect(domain, persons):
    """What `PersonTables` says, literally."""
    found = {
        key: np.zeros(shape, dtype=np.int64)
        for shapes in domain.shapes.values()
        for key, shape in shapes.items()
    }
    for own, rows in persons:
        k = len(rows)
        band = max(place for place, edge in enumerate(domain.edges) if edge <= k)
        parent = (*own, band)
        for key, table in found.items():
            group, *places = key
            if group == "H":
                table[k] += 1
            elif group == "PP":
                table[tuple(parent[place] for place in places)] += 1
            elif group == "F":
                table[band] += k >= 2 and len({row[places[0]] for row in rows}) == 1
            elif group == "WW":
                for one, other in itertools.permutations(rows, 2):
                    table[one[places[0]], other[places[1]]] += LATTICE // (k * (k - 1))
            else:
                for row in rows:
                    cell = (
                        [parent[places[0]], row[places[1]]]
                        if group == "PC"
                        else [row[place] for place in places]
                    )
                    table[tuple(cell)] += LATTICE // k
    return found


def persons_of(domain, rng, n):
    sizes = domain.domain.sizes
    p = domain.n_parents
    return [
        (
            tuple(rng.integers(0, size) for size in sizes[:p]),
            [
                tuple(rng.integers(0, size) for size in sizes[p:])
                for _ in range(rng.integers(0, domain.max_rows + 1))
            ],
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    "domain",
    [
        domain_of((), (3,), 1),
        domain_of((), (2, 3), 4),
        domain_of((4,), (3,), 5),
        domain_of((2, 3), (3, 2, 4), 7),
        domain_of((2,), (300, 2), 3),
    ],
)
def test_the_tables_are_those_that_are_described(domain):
    persons = persons_of(domain, default_rng(3), 40)
    counts = count(domain, persons)
    expected = expect(domain, persons)
    found = tables(counts)
    assert found.keys() == expected.keys()
    for key, table in found.items():
        assert_array_equal(table, expected[key], err_msg=str(key))
    assert counts.n_persons == 40
    assert counts.n_rows == sum(len(rows) for _, rows in persons)
    halves = count(domain, persons[:17]).merge(count(domain, persons[17:]))
    assert all((halves.tables[group] == counts.tables[group]).all() for group in GROUPS)


def all_persons(domain):
    """Each person that there can be, up to the order of its rows."""
    sizes = domain.domain.sizes
    p = domain.n_parents
    own = list(itertools.product(*map(range, sizes[:p])))
    rows = list(itertools.product(*map(range, sizes[p:])))
    for k in range(domain.max_rows + 1):
        for chosen in itertools.combinations_with_replacement(rows, k):
            yield from ((each, list(chosen)) for each in own)


def largest_parts(domain, counts=PersonCounts):
    """The largest L2 norms of one table that a person adds, and that differ between two persons, in whole persons."""
    parts = [tables(count(domain, [person], counts)) for person in all_persons(domain)]
    added, replaced = dict.fromkeys(GROUPS, 0.0), dict.fromkeys(GROUPS, 0.0)
    for key in parts[0]:
        stacked = np.stack([part[key].ravel() for part in parts]) / WHOLE[key[0]]
        added[key[0]] = max(added[key[0]], np.linalg.norm(stacked, axis=1).max())
        squares = (stacked**2).sum(axis=1)
        apart = squares[:, None] + squares[None, :] - 2.0 * stacked @ stacked.T
        replaced[key[0]] = max(replaced[key[0]], np.sqrt(max(apart.max(), 0.0)))
    return added, replaced


SMALL = domain_of((2,), (2, 2), 4)


def test_no_person_adds_more_than_one_to_a_table():
    added, replaced = largest_parts(SMALL)
    for group in GROUPS:
        # the bound is met: by equal rows, where it is met by rows
        assert 1.0 - 1e-6 <= added[group] <= 1.0, group
        assert np.sqrt(2.0) - 1e-6 <= replaced[group] <= np.sqrt(2.0) + 1e-12, group
    worst = ((0,), [(1, 1)] * 4)
    for key, table in tables(count(SMALL, [worst])).items():
        norm = np.linalg.norm(table.ravel()) / WHOLE[key[0]]
        assert 1.0 - 1e-6 <= norm <= 1.0


class _RowsWeighAlike(PersonDomain):
    """Each row weighs 1/m, whatever the number of rows."""

    @property
    def plan(self):
        plan = PersonDomain.plan.fget(self)
        return plan._replace(rows=np.full_like(plan.rows, LATTICE // self.max_rows))


class _PairsCountTwice(PersonDomain):
    """Each unordered pair has the weight of an ordered one, in both orders."""

    @property
    def plan(self):
        plan = PersonDomain.plan.fget(self)
        return plan._replace(pairs=2 * plan.pairs)


@pytest.mark.parametrize(
    ("wrong", "group", "what"),
    [(_RowsWeighAlike, "CC", "less"), (_PairsCountTwice, "WW", "more")],
)
def test_the_check_of_sensitivities_finds_wrong_weights(wrong, group, what):
    domain = wrong(domain=SMALL.domain, n_parents=1, max_rows=4)
    found = largest_parts(domain)[0][group]
    one_row = np.linalg.norm(
        tables(count(domain, [((0,), [(1, 1)])]))["CC", 0, 1].ravel() / LATTICE
    )
    # a lone row must weigh 1, and nobody more
    assert one_row < 0.5 if what == "less" else found > 1.5


CLIQUES = [("x0",), ("x1",), ("x0", "x1"), ("x2", "x1"), ("x0", "x2", "x1")]


def count_cliques(person, kind=PersonTableStatistic):
    """The parts that one person adds to each of `CLIQUES`, whose columns are those of `SMALL`."""
    own, rows = person
    levels = tuple(range(2))
    column = Column(role="privatise", kind="categorical", levels=levels)
    cut = {name: cells(codec_for(name, column, pa.int64()), 1) for name in SMALL.domain.names}
    asked = kind(cells=cut, parents=("x0",), unit="u", max_rows=4, cliques=tuple(CLIQUES))
    codes = np.array(rows, dtype=np.uint8).reshape(-1, 2).T
    counts = asked._count(np.array([own], dtype=np.uint8).T, codes, np.array([len(rows)]))
    return {clique: counts.table(clique) for clique in CLIQUES}


def norms_of_cliques(kind=PersonTableStatistic):
    """The largest L2 norms that a person adds to a chosen table, and that differ between two, in whole persons."""
    parts = [count_cliques(person, kind) for person in all_persons(SMALL)]
    for clique in CLIQUES:
        whole = 1 if clique == ("x0",) else LATTICE
        flat = np.stack([part[clique].ravel() / whole for part in parts])
        squares = (flat**2).sum(axis=1)
        apart = squares[:, None] + squares[None, :] - 2.0 * flat @ flat.T
        yield np.sqrt(squares.max()), np.sqrt(max(apart.max(), 0.0)), flat.sum(axis=1)


def test_no_person_adds_more_than_one_to_a_chosen_table():
    for added, replaced, weights in norms_of_cliques():
        assert 1.0 - 1e-6 <= added <= 1.0
        assert np.sqrt(2.0) - 1e-6 <= replaced <= np.sqrt(2.0) + 1e-12
        # nobody, or one, and no one less for having several rows
        assert ((weights == 0.0) | (weights >= 1.0 - 1e-6)).all()
    worst, lone = count_cliques(((0,), [(1, 1)] * 4)), count_cliques(((0,), [(1, 1)]))
    none = count_cliques(((0,), []))
    for clique in CLIQUES:
        assert worst[clique].max() == lone[clique].max()
        assert none[clique].sum() == (clique == ("x0",))


def test_chosen_tables_are_those_of_all_groups():
    """The same parts as `PersonCounts` has, of each person there can be."""
    for person in all_persons(SMALL):
        found, known = count_cliques(person), tables(count(SMALL, [person]))
        assert_array_equal(found["x2", "x1"].T, known["CC", 0, 1])
        assert_array_equal(found["x0", "x1"], known["PC", 0, 0])
        assert_array_equal(found[("x0",)], known["PP", 0, 1].sum(axis=1))


class _RowsWeigh1(PersonTableStatistic):
    """Each row weighs 1."""

    @staticmethod
    def _weigh_rows(sizes):
        return np.full_like(sizes, LATTICE)


class _RowsWeighLess(PersonTableStatistic):
    """Each row weighs 1/m."""

    @staticmethod
    def _weigh_rows(sizes):
        return np.full_like(sizes, LATTICE // 4)


@pytest.mark.parametrize("wrong", [_RowsWeigh1, _RowsWeighLess])
def test_the_check_of_chosen_tables_finds_wrong_weights(wrong):
    found = list(norms_of_cliques(wrong))[1:]
    if wrong is _RowsWeigh1:
        assert all(added > 3.9 for added, _, _ in found)
    else:
        assert all(((weights > 0.0) & (weights < 0.9)).any() for _, _, weights in found)


def test_no_number_of_rows_is_beyond_the_lattice():
    domain = domain_of((), (2,), MOST_ROWS)
    plan = domain.plan
    k = np.arange(MOST_ROWS + 1)
    rows, pairs = k * plan.rows, k * (k - 1) * plan.pairs
    assert (rows <= LATTICE).all()
    assert (pairs <= LATTICE).all()
    assert rows[1:].min() > 0.999 * LATTICE
    assert pairs[2:].min() > 0.999 * LATTICE


@pytest.mark.parametrize("m", [1, 2, 3, 5, 20, 50, MOST_ROWS])
def test_bands_cover_every_number_of_rows(m):
    edges = make_edges(m)
    assert edges[0] == 0
    assert list(edges) == sorted(set(edges))
    assert edges[-1] <= m < 2 * max(edges[-1], 1) + 1


def make_statistic(n_levels=(2, 3, 4), max_rows=3, parents=("sex",)):
    names = ("sex", "item", "hour")
    declared = [
        Column(role="privatise", kind="categorical", levels=tuple(range(n))) for n in n_levels
    ]
    codecs = [
        codec_for(name, column, pa.int64()) for name, column in zip(names, declared, strict=True)
    ]
    cut = {codec.name: cells(codec, 1) for codec in codecs}
    return PersonStatistic(cells=cut, parents=parents, unit="user", max_rows=max_rows)


def collect(statistic, batch):
    counter = statistic.rows.counter()
    counter.add(batch, None, Streams(lambda: KEY, "part"))
    return counter.result()


def table_of(rng, n_users, n_rows):
    users = rng.integers(0, n_users, n_rows)
    return pa.record_batch(
        {
            "user": pa.array([f"u{user}" for user in users]),
            "sex": pa.array(users % 2),
            "item": pa.array(rng.integers(0, 3, n_rows)),
            "hour": pa.array(rng.integers(0, 4, n_rows)),
        }
    )


def test_counts_do_not_depend_on_how_rows_are_cut_or_ordered():
    rng, statistic = default_rng(5), make_statistic()
    batch = table_of(rng, 60, 400)
    whole = statistic.count([collect(statistic, batch)], [], KEY)
    mixed = batch.take(pa.array(rng.permutation(400)))
    parts = [collect(statistic, mixed.slice(start, 70)) for start in range(0, 400, 70)]
    found = [
        statistic.count([part.select_part(place, 8) for part in parts], [], KEY)
        for place in range(8)
    ]
    together = found[0].merge(*found[1:])
    for group in GROUPS:
        assert_array_equal(together.tables[group], whole.tables[group])
    assert whole.n_persons == len(set(batch["user"].to_pylist()))
    assert whole.tables["H"][4:].sum() == 0


def test_rows_are_chosen_evenly_equal_ones_too():
    """Of three equal rows and a different one, each set of two is as likely: half of them has the lone row."""
    statistic = make_statistic(max_rows=2, parents=())
    n = 4000
    rows = np.tile([0, 0, 0, 1], n)
    users = np.repeat(np.arange(n), 4)
    batch = pa.record_batch({"user": users, "sex": rows, "item": rows, "hour": rows})
    counts = statistic.count([collect(statistic, batch)], [], KEY)
    item = tables(counts)["CC", 0, 1].sum(axis=1) / LATTICE
    # a person has the lone row with probability 1/2, and then half of its weight
    assert abs(item[1] / n - 0.25) < 5 * 0.25 / np.sqrt(n)
    other = statistic.count([collect(statistic, batch)], [], RunKey.insecure(2))
    assert (other.tables["CC"] != counts.tables["CC"]).any()


def test_what_is_declared_constant_must_be():
    statistic = make_statistic()
    batch = pa.record_batch({"user": [1, 2, 1], "sex": [0, 1, 1], "item": [0] * 3, "hour": [0] * 3})
    with pytest.raises(DataError, match="several values") as error:
        statistic.count([collect(statistic, batch)], [], KEY)
    assert "'sex'" in str(error.value)


def test_every_row_needs_a_person():
    statistic = make_statistic()
    batch = pa.record_batch(
        {"user": pa.array([1, None]), "sex": [0, 1], "item": [0] * 2, "hour": [0] * 2}
    )
    with pytest.raises(DataError, match="null"):
        collect(statistic, batch)


def test_codes_beyond_the_domain_are_refused():
    with pytest.raises(ValueError, match="not below"):
        count(SMALL, [((2,), [(1, 1)])])
    with pytest.raises(ValueError, match="not below"):
        count(SMALL, [((1,), [(1, 2)])])


def test_nobody_is_counted_as_nobody():
    statistic = make_statistic()
    counts = statistic.count([], [], KEY)
    assert counts.n_persons == counts.n_rows == 0


def make_linked(**changes):
    return replace(make_statistic(), key="id", **changes)


def persons_table(n):
    return pa.record_batch({"id": [f"u{user}" for user in range(n)], "sex": np.arange(n) % 2})


def collect_persons(statistic, batch):
    counter = statistic.persons.counter()
    counter.add(batch, None, Streams(lambda: KEY, "persons"))
    return counter.result()


def test_a_table_of_persons_gives_what_constant_columns_do_and_persons_without_rows():
    rng, linked = default_rng(5), make_linked()
    batch = table_of(rng, 60, 400)
    alone = make_statistic()
    expected = alone.count([collect(alone, batch)], [], KEY)
    n_known = expected.n_persons
    without = batch.drop_columns(["sex"])
    parts = [collect(linked, without.slice(start, 90)) for start in range(0, 400, 90)]
    persons = collect_persons(linked, persons_table(75))
    found = []
    for place in range(4):
        pieces = [part.select_part(place, 4) for part in parts]
        found.append(linked.count(pieces, [persons.select_part(place, 4)], KEY))
    together = found[0].merge(*found[1:])
    assert together.n_persons == 75
    assert together.tables["H"][0] == 75 - n_known
    # rows of one person are chosen by another content, but the sums of tables are the same
    assert_array_equal(together.tables["H"][1:], expected.tables["H"][1:])
    band = tables(together)["PP", 0, 1] - tables(expected)["PP", 0, 1]
    assert band[:, 1:].sum() == 0
    assert band[:, 0].sum() == 75 - n_known


def test_a_table_of_persons_without_columns_tells_who_has_no_rows():
    linked = replace(make_linked(), parents=())
    batch = table_of(default_rng(6), 20, 90)
    persons = collect_persons(linked, persons_table(30).select(["id"]))
    counts = linked.count([collect(linked, batch)], [persons], KEY)
    assert counts.n_persons == 30


def test_rows_without_a_person_are_refused_or_dropped():
    batch = table_of(default_rng(5), 60, 400)
    linked, dropping = make_linked(), make_linked(drops_orphans=True)
    persons = collect_persons(linked, persons_table(40))
    with pytest.raises(DataError, match="table of persons lacks"):
        linked.count([collect(linked, batch)], [persons], KEY)
    counts = dropping.count([collect(dropping, batch)], [persons], KEY)
    assert counts.n_persons == 40
    within = batch.filter(pa.array([int(user[1:]) < 40 for user in batch["user"].to_pylist()]))
    expected = linked.count([collect(linked, within)], [persons], KEY)
    for group in GROUPS:
        assert_array_equal(counts.tables[group], expected.tables[group])


def test_a_person_stands_once_in_the_table_of_persons():
    linked = make_linked()
    twice = pa.record_batch({"id": ["u1", "u2", "u1"], "sex": [0, 1, 0]})
    with pytest.raises(DataError, match="several rows"):
        linked.count([], [collect_persons(linked, twice)], KEY)


class _PairsOfRowsTwice(PersonStatistic):
    """Counts with the weights of `_PairsCountTwice`."""

    @property
    def domain(self):
        right = PersonStatistic.domain.fget(self)
        return _PairsCountTwice(
            domain=right.domain, n_parents=right.n_parents, max_rows=right.max_rows
        )


def norms_of_one(rows, *, has_parent, kind=PersonStatistic):
    """The L2 norm of each table's change, in whole persons, if one is added to others whose rows stand around its own."""
    right = make_linked(drops_orphans=True)
    linked = kind(
        cells=right.cells, parents=("sex",), unit="user", max_rows=3, key="id", drops_orphans=True
    )
    others = table_of(np.random.default_rng(5), 60, 400).drop_columns(["sex"])
    items, hours = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    own = pa.record_batch({"user": ["u60"] * len(rows), "item": items, "hour": hours})
    parts = [others.slice(0, 150), own, others.slice(150)]
    listed = [collect_persons(linked, persons_table(60 + more)) for more in (0, has_parent)]
    without = linked.count([collect(linked, part) for part in parts[::2]], listed[:1], KEY)
    whole = linked.count([collect(linked, part) for part in parts], listed[1:], KEY)
    known, norms = tables(without), {}
    for key, table in tables(whole).items():
        assert (table >= known[key]).all(), "another person's rows were moved"
        norms[key] = np.linalg.norm(table - known[key]) / WHOLE[key[0]]
    return norms


ROWS = {
    "one row": [(1, 2)],
    "m equal rows": [(1, 2)] * 3,
    "no row": [],
    "a hot key": [(1, 2)] * 300,
    "a hot key of all rows": [*itertools.product(range(3), range(4))] * 30,
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("has_parent", [True, False])
def test_a_person_moves_no_table_by_more_than_one_whoever_else_is_there(rows, has_parent):
    for key, norm in norms_of_one(rows, has_parent=has_parent).items():
        assert norm <= has_parent, key
        if has_parent and len(set(rows)) == 1 and (len(rows) > 1 or key[0] not in ("WW", "F")):
            assert norm >= 1.0 - 1e-6, key


def test_that_check_finds_pairs_that_count_twice():
    found = norms_of_one(ROWS["m equal rows"], has_parent=True, kind=_PairsOfRowsTwice)
    assert all(norm > 1.5 for key, norm in found.items() if key[0] == "WW")
