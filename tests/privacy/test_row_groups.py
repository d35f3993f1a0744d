"""Row groups tell nothing of private values: where batches, windows and row groups end depends on what is released alone."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, run_here, write_job

from dpdask.engine import write as shuffle
from dpdask.io import csv, parquet, shards

N_ROWS = 2000
SCHEMA = {
    "note": {"role": "keep", "type": "string"},
    "ill": categorical(["no", "yes"], other="no"),
}


def write(folder, format_, private):
    """Write a table whose public texts take about 200 bytes."""
    notes = ["k" * int(size) for size in np.random.default_rng(3).integers(150, 250, N_ROWS)]
    table = pa.table({"note": notes, "ill": private})
    folder.mkdir(parents=True)
    if format_ == "csv":
        pa_csv.write_csv(table, folder / "rows.csv")
    else:
        pq.write_table(table, folder / "rows.parquet")
    return folder


@pytest.mark.parametrize(("order", "format_"), [("keep", "csv"), ("shuffled", "parquet")])
def test_the_length_of_a_private_text_moves_no_row_group(order, format_, tmp_path, monkeypatch):
    for module, name, value in (
        (parquet, "BATCH_BYTES", 2**15),
        (csv, "_BLOCK_BYTES", 2**13),
        (shards, "ROW_GROUP_BYTES", 2**15),
        (shuffle, "HELD_BYTES", 2**17),
    ):
        monkeypatch.setattr(module, name, value)
    found, layouts = [], []
    for name, texts in {
        "short": ["no"] * N_ROWS,
        "long": ["x" * 300] * N_ROWS,
        "one": ["x" * 5000, *["no"] * (N_ROWS - 1)],
    }.items():
        source = write(tmp_path / name / "in", format_, texts)
        mechanism = {"kind": "dip", "reference": {"kind": "histogram"}}
        job = write_job(
            tmp_path / name,
            source,
            tmp_path / name / "out",
            schema=SCHEMA,
            mechanism=mechanism,
            output__order=order,
            output__rows_per_shard=N_ROWS,
        )
        run_here(job)
        layout = []
        for path in sorted((tmp_path / name / "out").glob("*.parquet")):
            groups = pq.read_metadata(path)
            layout.append(
                [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
            )
        layouts.append(layout)
        found.append(pq.read_table(tmp_path / name / "out").column("note").to_pylist())
    assert layouts[0] == layouts[1] == layouts[2]
    assert len(layouts[0][0]) > 2  # there is something to move
    if order == "keep":
        assert found[0] == found[1] == found[2]
