"""Some rows of a batch, of every type that Arrow selects and of those that it does not; and jobs that keep such columns."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, run_here, write_job

from dpdask.engine.scan import filter_rows, take_values

WORDS = ["a", None, "long enough not to be kept in the view itself", "", "e"]
VIEWS = {
    "text": pa.array(WORDS, pa.string_view()),
    "bytes": pa.array(
        [None if word is None else word.encode() for word in WORDS], pa.binary_view()
    ),
    "list": pa.array([[word] for word in WORDS], pa.list_(pa.string_view())),
    "large list": pa.array([[word, word] for word in WORDS], pa.large_list(pa.string_view())),
    "whole": pa.array(range(5)),
    "gaps": pa.array([None, 1.5, None, 2.5, 3.5]),
    "truth": pa.array([True, False, True, True, False]),
    "short": pa.array([1.5, 0.25, 2.0, 3.0, 4.0], pa.float16()),
    "day": pa.array([5, 4, 3, 2, 1], pa.date32()),
    "time": pa.array([5, 4, 3, 2, 1], pa.timestamp("ns", tz="UTC")),
}


def test_views_are_selected_like_plain_columns():
    batch = pa.record_batch(VIEWS)
    chosen = np.array([True, False, True, False, True])
    for rows in (batch, pa.concat_batches([batch, batch]).slice(5, 5)):
        found = filter_rows(rows, chosen)
        assert found.to_pylist() == [
            row for row, is_chosen in zip(rows.to_pylist(), chosen, strict=True) if is_chosen
        ]
        assert found.schema == rows.schema
        for array in rows.columns:
            taken = take_values(array, np.array([4, 0, 0], dtype=np.uint32))
            assert (taken.to_pylist(), taken.type) == (
                [array.to_pylist()[place] for place in (4, 0, 0)],
                array.type,
            )
    assert filter_rows(batch, np.ones(5, dtype=bool)) is batch


@pytest.mark.parametrize("order", ["shuffled", "keep"])
def test_a_job_releases_kept_and_private_columns_of_views(order, tmp_path):
    n = 900
    names = [f"name {number} that is too long for a view" for number in range(n)]
    table = pa.table(
        {
            "name": pa.array(names, pa.string_view()),
            "kind": pa.array(["a", "b", "c"] * (n // 3), pa.string_view()),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "part.parquet", row_group_size=200)
    schema = {
        "name": {"role": "keep"},
        "kind": categorical(["a", "b", "c"]),
    }
    job = write_job(
        tmp_path / "job", tmp_path / "in", tmp_path / "out", schema=schema, output__order=order
    )
    run_here(job)
    released = pq.read_table(tmp_path / "out")
    assert set(released["name"].to_pylist()) <= set(names)
    assert len(set(released["name"].to_pylist())) == released.num_rows > 500
    assert set(released["kind"].to_pylist()) <= {"a", "b", "c"}
