"""Unit bounds against sorting in plain Python: at most `max_rows` of a unit, the same ones however the rows are parted."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpdask.stats.records import UnitBounds, UnitRows

TOP = 2**64 - 1
numbers = st.integers(0, 3) | st.sampled_from(
    [TOP, TOP - 1, 2**63]
)  # few, so that units and hashes collide; and the ends of uint64
tables = st.lists(
    st.tuples(numbers, numbers), max_size=30
)  # (unit, hash of the row); its position is its place
max_rows = st.integers(1, 4)


def statistic(rows, places, bound):
    units, hashes = (
        np.array([rows[place][column] for place in places], dtype=np.uint64) for column in (0, 1)
    )
    return UnitRows.of_batch(bound, units, hashes, np.array(places, dtype=np.uint64))


def kept(found):
    return sorted(
        zip(found.units.tolist(), found.hashes.tolist(), found.positions.tolist(), strict=True)
    )


def same(one, other):
    """Return whether two statistics say the same; in which order the units stand says nothing."""
    return one.max_rows == other.max_rows and kept(one) == kept(other)


def released(bounds, rows):
    arrays = [
        np.array(column, dtype=np.uint64)
        for column in ([u for u, _ in rows], [h for _, h in rows], range(len(rows)))
    ]
    return bounds.is_released(*arrays).tolist()


def oracle(rows, bound):
    """Return the first `bound` rows of each unit, in the order (hash, position)."""
    chosen = set()
    for unit in {unit for unit, _ in rows}:
        own = sorted((hash_, place) for place, (owner, hash_) in enumerate(rows) if owner == unit)
        chosen |= {place for _, place in own[:bound]}
    return [place in chosen for place in range(len(rows))]


def parted(draw_owner, n_parts=4):
    return [
        [place for place, owner in enumerate(draw_owner) if owner == part]
        for part in range(n_parts)
    ]


@st.composite
def partitions(draw):
    rows = draw(tables)
    return rows, parted(draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))


@given(partitions(), max_rows)
def test_the_choice_is_the_oracles_for_any_partitioning(case, bound):
    rows, places = case
    first, *others = [statistic(rows, part, bound) for part in places]
    bounds = first.merge(*others).bounds()
    found = released(bounds, rows)
    assert found == oracle(rows, bound)
    assert found == released(statistic(rows, list(range(len(rows))), bound).bounds(), rows)
    for unit in {unit for unit, _ in rows}:
        own = [
            released_ for (owner, _), released_ in zip(rows, found, strict=True) if owner == unit
        ]
        assert sum(own) == min(len(own), bound)
    assert len(bounds.units) == sum(
        sum(owner == unit for owner, _ in rows) > bound for unit in {unit for unit, _ in rows}
    )


@given(partitions(), max_rows)
def test_merging_is_associative_and_commutative_with_an_identity(case, bound):
    rows, places = case
    a, b, c, d = (statistic(rows, part, bound) for part in places)
    whole = a.merge(b, c, d)
    assert same(a.merge(b).merge(c.merge(d)), whole)
    assert all(same(one.merge(*rest), whole) for one, *rest in itertools.permutations([a, b, c, d]))
    assert same(whole.merge(UnitRows.identity(bound)), whole)
    assert same(UnitRows.identity(bound).merge(whole), whole)
    assert same(whole.merge(), whole)


@given(tables, max_rows)
def test_it_keeps_one_row_more_than_is_released_of_each_unit_and_no_more(rows, bound):
    found = statistic(rows, list(range(len(rows))), bound)
    assert kept(found) == sorted(
        (u, h, place)
        for place, ((u, h), first) in enumerate(zip(rows, oracle(rows, bound + 1), strict=True))
        if first
    )
    groups = [
        (unit, list(group))
        for unit, group in itertools.groupby(
            zip(found.units, found.hashes, found.positions, strict=True), lambda row: row[0]
        )
    ]
    assert len({unit for unit, _ in groups}) == len(groups)  # the rows of a unit stand together
    assert all(group[0] == max(group) for _, group in groups if len(group) > bound)


@given(tables, max_rows)
def test_bounds_come_back_from_bytes_and_the_same_bounds_have_the_same_bytes(rows, bound):
    made = statistic(rows, list(range(len(rows))), bound).bounds()
    again = UnitBounds.from_bytes(made.to_bytes(), "bounds.npz")
    assert released(again, rows) == released(made, rows)
    assert (
        made.to_bytes() == statistic(rows, list(range(len(rows)))[::-1], bound).bounds().to_bytes()
    )


@given(tables, st.lists(st.integers(0, 3), min_size=30, max_size=30), max_rows)
def test_rows_are_counted_however_they_are_parted(rows, owners, bound):
    """A unit over the bound is known with all its rows, and each of those that are released stands for its part of them."""
    parts = [UnitRows.identity(bound, counted=True)]
    for places in parted(owners[: len(rows)]):
        units, hashes = (
            np.array([rows[place][column] for place in places], dtype=np.uint64)
            for column in (0, 1)
        )
        ones = np.ones(len(places), dtype=np.uint64)
        parts.append(
            UnitRows.of_batch(bound, units, hashes, np.array(places, dtype=np.uint64), ones)
        )
    bounds = parts[0].merge(*parts[1:]).bounds()
    bounds = UnitBounds.from_bytes(bounds.to_bytes(), "bounds")
    units = np.array([unit for unit, _ in rows], dtype=np.uint64)
    sizes = np.array([sum(unit == other for other, _ in rows) for unit, _ in rows])
    weights = bounds.weigh(units, bound)
    assert weights.tolist() == [max(1.0, size / bound) for size in sizes]
