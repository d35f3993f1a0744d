"""The shuffle of a writing task: whole windows, however the rows are cut into batches."""

import itertools

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dpdask.engine import write as shuffle
from dpdask.engine.write import (
    RowTask,
    estimate_row_bytes,
    lay_out_rows,
    limit_shard_rows,
    shuffle_rows,
)
from dpdask.io.fragment import Fragment
from dpdask.streams import RunKey

KEY = RunKey.insecure(3)
TYPES = pa.schema([("x", pa.int64()), ("text", pa.string())])


def fragments(n):
    common = {"url": "file:///in", "name": "in", "format": "parquet", "n_bytes": 1, "version": "v"}
    return tuple(
        Fragment(id=f"{number:032x}", row_group=number, n_rows=10, number=number, **common)
        for number in range(n)
    )


def task(window, first=0):
    return RowTask(
        fragments=fragments(first + 1)[first:],
        n_released=(1,),
        names=("part-00000.parquet",),
        rows_per_shard=10,
        window=window,
    )


def batches(n_rows, cuts):
    whole = pa.record_batch(
        [pa.array(range(n_rows)), pa.array([f"row {row}" for row in range(n_rows)])], TYPES
    )
    ends = sorted({0, n_rows, *(cut for cut in cuts if cut < n_rows)})
    return [whole.slice(start, end - start) for start, end in itertools.pairwise(ends)]


def order(found):
    rows = pa.Table.from_batches(found, TYPES)
    assert rows["text"].to_pylist() == [f"row {row}" for row in rows["x"].to_pylist()]
    return rows["x"].to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped


@given(st.integers(0, 60), st.lists(st.integers(0, 60)), st.integers(1, 70))
def test_windows_are_shuffled_alike_however_rows_are_cut(n_rows, cuts, window):
    found = order(list(shuffle_rows(batches(n_rows, cuts), task(window), KEY)))
    assert found == order(list(shuffle_rows(batches(n_rows, []), task(window), KEY)))
    for start in range(0, n_rows, window):
        assert sorted(found[start : start + window]) == list(
            range(start, min(start + window, n_rows))
        )


def test_each_task_and_each_window_has_an_order_of_its_own():
    as_they_come = batches(100, [7, 50])
    assert list(shuffle_rows(as_they_come, task(None), KEY)) == as_they_come
    first, second = (
        order(list(shuffle_rows(batches(200, []), task(100, number), KEY))) for number in (0, 1)
    )
    assert first != second
    assert first[:100] != [row - 100 for row in first[100:]]
    assert first != order(list(shuffle_rows(batches(200, []), task(100), RunKey.insecure(4))))


def test_long_texts_end_a_window_early(monkeypatch):
    monkeypatch.setattr(shuffle, "HELD_BYTES", 2000)
    found = order(list(shuffle_rows(batches(1000, list(range(0, 1000, 50))), task(1000), KEY)))
    assert sorted(found) == list(range(1000))
    assert max(abs(place - row) for place, row in enumerate(found)) < 200


def test_shards_numbers_are_a_keyed_permutation_over_the_release():
    sizes = (10, 10, 25, 10, 4, 3, 2, 10, 10, 10)
    tasks = lay_out_rows(fragments(10), sizes, 10, TYPES, "shuffled", KEY)
    kept = lay_out_rows(fragments(10), sizes, 10, TYPES, "keep", KEY)
    assert [one.window for one in kept] == [None] * 8
    names = [name for one in kept for name in one.names]
    assert sorted(name for one in tasks for name in one.names) == names == sorted(names)
    assert [one.names[0] for one in tasks] == sorted(one.names[0] for one in tasks)
    by_place = sorted(tasks, key=lambda one: one.fragments[0].number)
    assert [one.fragments for one in by_place] == [one.fragments for one in kept]
    assert [one.names for one in by_place] != [one.names for one in kept]
    assert tasks == lay_out_rows(fragments(10), sizes, 10, TYPES, "shuffled", KEY)
    assert tasks != lay_out_rows(fragments(10), sizes, 10, TYPES, "shuffled", RunKey.insecure(4))
    assert {one.window for one in tasks} == {shuffle.WINDOW_ROWS // 10 * 10}  # whole shards


def test_wide_rows_make_smaller_shards():
    wide = pa.schema([(f"x{number}", pa.float64()) for number in range(2000)])
    n_rows = limit_shard_rows(wide, 1_000_000, "shuffled")
    assert (
        n_rows * estimate_row_bytes(wide)
        <= shuffle.WINDOW_BYTES
        < (n_rows + 1) * estimate_row_bytes(wide)
    )
    assert limit_shard_rows(wide, 1_000_000, "keep") == 1_000_000
    assert limit_shard_rows(TYPES, 1_000_000, "shuffled") == 1_000_000
    assert limit_shard_rows(
        TYPES, np.iinfo(np.int64).max, "shuffled"
    ) == shuffle.WINDOW_BYTES // estimate_row_bytes(TYPES)
