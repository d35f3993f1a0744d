"""One bit of a file is changed, and the command line is called: `python -m e2e.changed_bits KIND PART N` does so N times in a process of its own."""

import datetime as dt
import os
import random
import re
import shutil
import sys
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from e2e.helpers import call_cli, continuous, discrete, write_job
from pyiceberg.catalog.sql import SqlCatalog

import dpdask
from dpdask.errors import DpdaskError

N_ROWS = 60
ROWS = range(N_ROWS)
TABLE = pa.table(
    {
        "r": [1 + row % 3 for row in ROWS],
        "amount": [row / 7 for row in ROWS],
        "event.text": [f"text {row % 7}" for row in ROWS],
        "flag": [row % 2 == 0 for row in ROWS],
        "day": [dt.date(2020, 1, 1) + dt.timedelta(days=row) for row in ROWS],
        "at": pa.array(list(ROWS), pa.timestamp("us", "UTC")),
        "money": pa.array([Decimal(row) for row in ROWS], pa.decimal128(12, 2)),
        "kind": pa.array([f"kind {row % 3}" for row in ROWS]),
        "bytes": [bytes([row]) for row in ROWS],
        "list": [[row, row + 1] if row % 4 else None for row in ROWS],
        "event": [{"text": f"x{row}", "n": row} for row in ROWS],
    }
)
NESTED = pa.table(
    {
        **dict(zip(TABLE.column_names, TABLE.columns, strict=True)),
        "kind": TABLE["kind"].combine_chunks().dictionary_encode(),
        "map": pa.array([[("k", row)] for row in ROWS], pa.map_(pa.string(), pa.int64())),
        "u": pa.array(list(ROWS), pa.uint64()),
        "half": pa.array([float(row) for row in ROWS], pa.float16()),
    }
)
PRIVATE = {
    "r": discrete([1, 2, 3]),
    "amount": continuous([0.0, 10.0]),
}
SETTINGS = {
    "plain": {},
    "many pages": {
        "data_page_size": 50,
        "write_page_index": True,
        "use_dictionary": False,
        "data_page_version": "2.0",
        "compression": "zstd",
        "write_page_checksum": True,
    },
    "old times": {
        "use_deprecated_int96_timestamps": True,
        "store_schema": False,
        "write_statistics": False,
    },
}
Job = tuple[Path, list[Path]]


def make_job(folder, source, table=TABLE, **changes):
    schema = {name: PRIVATE.get(name, {"role": "keep"}) for name in table.column_names}
    options = {"mechanism__reference": {"kind": "histogram"}, **changes}
    return write_job(
        folder, Path(source), folder / "out", schema=schema, input={"path": str(source)}, **options
    )


def write_files(folder, settings, table=NESTED, **changes):
    (folder / "in").mkdir()
    path = folder / "in" / "rows.parquet"
    pq.write_table(table, path, row_group_size=20, **settings)
    return make_job(folder, folder / "in", table, **changes), [path]


def write_public(folder):
    (folder / "public").mkdir()
    pq.write_table(TABLE.select(["r", "amount"]).slice(1), folder / "public" / "rows.parquet")
    job, _ = write_files(
        folder, {}, mechanism__reference={"kind": "public", "path": str(folder / "public")}
    )
    return job, [folder / "public" / "rows.parquet"]


def write_delta(folder):
    write_deltalake(folder / "in", TABLE)
    return make_job(folder, folder / "in", input__format="delta"), sorted(
        (folder / "in").rglob("*.json")
    )


def write_iceberg(folder):
    catalog = SqlCatalog(
        "lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/in"
    )
    catalog.create_namespace("n")
    rows = TABLE.drop_columns("event")
    table = catalog.create_table("n.t", schema=rows.schema)
    table.append(rows)
    current = Path(table.metadata_location.removeprefix("file://"))
    return make_job(folder, table.metadata_location, rows, input__format="iceberg"), [
        current,
        *sorted((folder / "in").rglob("*.avro")),
    ]


def write_release(folder):
    job, _ = write_files(folder, {}, TABLE.drop_columns(["list", "event"]))
    assert call_cli("run", job).returncode == 0
    return job, sorted((folder / "out").glob("*.parquet"))


KINDS = {
    **{
        name: lambda folder, settings=settings: write_files(folder, settings)
        for name, settings in SETTINGS.items()
    },
    "public table": write_public,
    "delta": write_delta,
    "iceberg": write_iceberg,
    "release": write_release,
}


def find_part(raw, part):
    """Return the places of a Parquet file's footer, of its pages, or of all of a file."""
    start = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    return {"footer": range(start, len(raw)), "pages": range(4, start), "file": range(len(raw))}[
        part
    ]


def call_all(kind, job, out):
    """Yield each call with its exit code, and what it says."""
    if kind == "release":
        (out.parent / "report.html").unlink(missing_ok=True)
        try:
            dpdask.open(str(out)).to_pandas()
        except DpdaskError as error:
            yield "open", error.exit_code, f"dpdask: {error}"
        calls = [
            ("report", "--job", str(job), "--to", str(out.parent / "report.html"), "--rows", "100")
        ]
    else:
        calls = [("plan", str(job)), ("run", str(job))]
    for words in calls:
        ended = call_cli(*words)
        yield (
            words[0],
            ended.returncode,
            "\n".join(
                line for line in ended.stderr.splitlines() if re.match(r"dpdask: |Traceback", line)
            ),
        )


def main(kind, part, n):
    """Change a bit `n` times, and end with what went wrong."""
    wrong = []
    draw = random.Random(f"{kind} {part}")
    folder = Path(tempfile.mkdtemp())
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    job, files = KINDS[kind](folder)
    out = folder / "out"
    assert all(code == 0 for _, code, _ in call_all(kind, job, out)), list(call_all(kind, job, out))
    for _ in range(n):
        path = draw.choice(files)
        raw = path.read_bytes()
        place, bit = draw.choice(find_part(raw, part)), draw.randrange(8)
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :])
        for left in () if kind == "release" else folder.glob("*out*"):
            shutil.rmtree(left)
        where = f"{path.name}, byte {place} of {len(raw)}, bit {bit}"
        sys.stderr.write(f"{where}\n")  # the last line is where a process was ended
        sys.stderr.flush()
        for verb, code, said in call_all(kind, job, out):
            if code not in (0, 65, 66) or (
                code and (said.count("\n") or not said.startswith("dpdask: "))
            ):
                wrong.append(f"{where}: {verb} ends with {code}: {said}")
        if (out / "_SUCCESS").exists() and kind != "release":
            n_rows = sum(pq.read_metadata(shard).num_rows for shard in out.glob("*.parquet"))
            if n_rows != N_ROWS and part != "file":
                wrong.append(f"{where}: {n_rows} rows were released")
        path.write_bytes(raw)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
