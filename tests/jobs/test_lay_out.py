"""Which fragments become which shards: every row once, in order, no shard too large, and no more shards than the plan says."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpdask.engine.write import lay_out
from dpdask.io.fragment import Fragment
from dpdask.jobs.plan import most_shards

n_released = st.lists(
    st.integers(0, 40) | st.sampled_from([0, 1, 1000]), min_size=1, max_size=40
).filter(any)
per_shard = st.integers(1, 50) | st.just(10_000)


def fragments(count):
    return tuple(
        Fragment(
            id=f"{i:032}",
            url=f"file:///{i}",
            name=f"{i}",
            format="csv",
            row_group=0,
            n_rows=None,
            n_bytes=1,
            version="v",
        )
        for i in range(count)
    )


def shard_rows(works):
    """Return the rows of each shard as `write_shards` cuts them: full ones, then the rest."""
    sizes = []
    for work in works:
        rows = sum(work.n_released)
        full = [work.rows_per_shard] * (rows // work.rows_per_shard)
        sizes += [
            *full,
            *([rows % work.rows_per_shard] if rows % work.rows_per_shard or not full else []),
        ]
    return sizes


@settings(max_examples=100)
@given(n_released, per_shard)
@example([0, 0, 5], 5)
@example([100, 0, 0, 100], 3)
@example([0], 1)
@example([0, 0, 0], 1)
def test_every_row_has_one_place_in_order(rows, most):
    works = lay_out(fragments(len(rows)), tuple(rows), most)
    placed = [
        (int(fragment.name), n)
        for work in works
        for fragment, n in zip(work.fragments, work.n_released, strict=True)
    ]
    assert [index for index, _ in placed] == sorted({index for index, _ in placed})
    assert all(n == rows[index] for index, n in placed)
    assert sum(n for _, n in placed) == sum(rows)
    names = [name for work in works for name in work.names]
    assert names == [f"part-{number:05d}.parquet" for number in range(len(names))]
    sizes = shard_rows(works)
    assert len(sizes) == len(names)
    assert max(sizes) <= most
    assert min(sizes) > 0 or not any(rows)
    assert all(work.rows_per_shard == most for work in works)


@settings(max_examples=100)
@given(n_released, per_shard)
def test_the_plans_number_of_shards_is_an_upper_bound(rows, most):
    works = lay_out(fragments(len(rows)), tuple(rows), most)
    assert sum(len(work.names) for work in works) <= most_shards(sum(rows), None, len(rows), most)


@settings(max_examples=100)
@given(n_released, per_shard, st.integers(0, 1000))
def test_the_bound_grows_with_the_rows(rows, most, more):
    """So a bound of the rows is a bound of the shards."""
    total, count = sum(rows), len(rows)
    assert most_shards(total, None, count, most) <= most_shards(total + more, None, count, most)


def test_neighbours_share_a_shard_while_they_fit():
    works = lay_out(fragments(4), (3, 3, 3, 3), 6)
    assert [work.n_released for work in works] == [(3, 3), (3, 3)]
    assert [work.n_released for work in lay_out(fragments(3), (5, 14, 2), 6)] == [(5,), (14,), (2,)]
    assert [len(work.names) for work in lay_out(fragments(3), (5, 14, 2), 6)] == [1, 3, 1]
