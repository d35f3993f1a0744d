"""Every row that lies there once is read once, and nothing is passed over without a word: through the command line."""

import contextlib
import gzip
import json
import os
import shutil
import socket
from pathlib import Path

import deltalake
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    MIXED_SCHEMA,
    call_cli,
    discrete,
    error_line,
    hidden,
    lake,
    make_ledger,
    write_job,
)
from lakes.tables import commit, live_files, sql_catalog

from dpdask.engine.account import open_ledger

COLUMN = {"rating": discrete([1, 2, 3, 4, 5], type="int64", nulls="level")}
HISTOGRAM = {"kind": "histogram"}


def job_on(tmp_path, source, schema=None, **changes):
    shown = {} if schema is None else {"schema": schema}
    return write_job(
        tmp_path / "job",
        source,
        tmp_path / "out",
        **{"mechanism__reference": HISTOGRAM, **shown, **changes},
    )


def run(job):
    """Run a job and return what is printed, after checking that `plan` warns of the same files."""
    planned, ended = call_cli("plan", job, "--json"), call_cli("run", job, "--json")
    assert (planned.returncode, ended.returncode) == (0, 0), planned.stderr + ended.stderr
    result, plan = json.loads(ended.stdout), json.loads(planned.stdout)
    assert told(result) == told(plan)
    return dict(result)


def told(result):
    return [warning for warning in result["warnings"] if "not read: " in warning]


def refuse(job, code, *said):
    """Check that `plan` and `run` refuse a job in one line, and that nothing is left of it."""
    for verb in ("plan", "run"):
        ended = call_cli(verb, job)
        assert ended.returncode == code, ended.stderr
        assert all(each in error_line(ended) for each in said), ended.stderr
    assert not (job.parent.parent / "out").exists()
    assert not hidden(job.parent.parent / "out").exists()


def pack(level, *, parts=1):
    def write(first, other):
        lines = first.read_bytes().splitlines(keepends=True)
        step = -(-len(lines) // parts)
        other.write_bytes(
            b"".join(
                gzip.compress(b"".join(lines[at : at + step]), level, mtime=level)
                for at in range(0, len(lines), step)
            )
        )

    return write


def link_folder(first, other):
    (first.parent.parent / "elsewhere").mkdir()
    shutil.copy(first, first.parent.parent / "elsewhere")
    other.symlink_to(first.parent.parent / "elsewhere")


TWICE = {
    "copy": ("a.parquet", "b.parquet", shutil.copy),
    "another suffix": ("a.parquet", "A.PQ", shutil.copy),
    "hard link": ("a.parquet", "b.parquet", lambda first, other: os.link(first, other)),
    "symbolic link": ("a.parquet", "b.parquet", lambda first, other: other.symlink_to(first.name)),
    "inner folder": ("a.parquet", "more/b.parquet", shutil.copy),
    "linked folder": ("a.parquet", "linked", link_folder),
    "csv": ("a.csv", "b.CSV", shutil.copy),
    "compressed, same name": ("a.csv", "a.csv.gz", pack(6)),
    "compressed, other name": ("a.csv", "b.csv.gz", pack(6)),
    "compressed in parts": ("a.csv", "b.csv.gz", pack(1, parts=9)),
    "compressed, wrong name": ("a.csv", "b.csv", pack(9)),
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_file_that_lies_there_twice_is_refused(kind, tmp_path):
    name, other, make = TWICE[kind]
    source = lake(tmp_path / "in", [40, 50], csv=name.endswith(".csv"))
    (source / f"part.1{Path(name).suffix}").rename(source / name)
    (source / other).parent.mkdir(exist_ok=True)
    make(source / name, source / other)
    place = make_ledger(tmp_path, "d", 9.0)
    refuse(
        job_on(tmp_path, source / "**" if kind == "linked folder" else source, ledger=place),
        66,
        "rows seen again",
        "copy of ",
        "remove ",
    )
    assert open_ledger(place["url"]).read_balance("d").epsilon_spent == 0


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("delta", None),
        ("iceberg", {"kind": "marginals", "cliques": [["rating"]]}),
        ("parquet", None),
    ],
)
def test_tables_of_every_kind_refuse_copies(kind, mechanism, tmp_path):
    source = lake(tmp_path / "in", [60])
    table = pq.read_table(source / "part.0.parquet")
    input_ = {"path": str(source), "format": kind}
    if kind == "delta":
        input_["path"] = str(tmp_path / "delta")
        deltalake.write_deltalake(input_["path"], table)
        [(path, added)] = live_files(tmp_path / "delta").items()
        shutil.copy(tmp_path / "delta" / path, tmp_path / "delta" / "copy.parquet")
        commit(tmp_path / "delta", {"add": {**added, "path": "copy.parquet"}})
    elif kind == "iceberg":
        catalog = sql_catalog(tmp_path)
        catalog.create_namespace_if_not_exists("n")
        iceberg = catalog.create_table("n.t", table.schema)
        for _ in range(2):
            iceberg.append(table)
        input_ = {
            "path": "n.t",
            "format": "iceberg",
            "catalog": {"name": catalog.name, **catalog.properties},
        }
    else:
        shutil.copy(source / "part.0.parquet", source / "1")
    changes = {} if mechanism is None else {"mechanism": mechanism}
    schema = {**MIXED_SCHEMA, "userId": {"role": "drop"}}
    refuse(
        job_on(tmp_path, source, schema, input=input_, **changes),
        66,
        "rows seen again: this file is a copy of",
    )


def test_a_strict_ledger_counts_what_a_refused_copy_tells(tmp_path):
    """That two files hold the same rows is an exact answer, so `plan` does not give it there."""
    source = lake(tmp_path / "in", [60])
    shutil.copy(source / "part.0.parquet", source / "copy.parquet")
    place = make_ledger(tmp_path, "d", 9.0, strict=True)
    job = job_on(tmp_path, source, ledger=place)
    assert call_cli("plan", job).returncode == 0
    ended = call_cli("run", job)
    assert ended.returncode == 66
    assert "is a copy of" in error_line(ended)
    assert open_ledger(place["url"]).read_balance("d").epsilon_spent >= 4.0


@pytest.mark.parametrize("csv", [False, True])
def test_equal_files_in_folders_of_other_values_hold_other_rows(csv, tmp_path):
    suffix = ".csv" if csv else ".parquet"
    for day in (1, 2):
        lake(tmp_path / "in" / f"day={day}", [30], csv=csv, schema={"rating": {}})
    schema = {
        "rating": {**COLUMN["rating"], "levels": [x / 2 for x in range(1, 11)], "type": "float64"},
        "day": {"role": "keep", "type": "int64"},
    }
    job = job_on(tmp_path, tmp_path / "in", schema)
    assert run(job)["rows"] == 60
    shutil.copy(
        tmp_path / "in" / "day=2" / f"part.0{suffix}", tmp_path / "in" / "day=2" / f"again{suffix}"
    )
    assert call_cli("run", job_on(tmp_path / "two", tmp_path / "in", schema)).returncode == 66


@pytest.mark.parametrize("role", ["keep", "drop"])
@pytest.mark.parametrize("how", ["copy", "link", "symlink"])
def test_a_file_in_two_folders_is_a_copy_if_nothing_tells_its_rows_apart(how, role, tmp_path):
    """A dropped folder's value tells no rows apart; and one file under two names is one file whatever the folders are called."""
    lake(tmp_path / "in" / "day=1", [30], schema={"rating": {}})
    (tmp_path / "in" / "day=2").mkdir()
    source, target = (tmp_path / "in" / f"day={day}" / "part.0.parquet" for day in (1, 2))
    {"copy": shutil.copy, "link": os.link, "symlink": os.symlink}[how](source, target)
    schema = {
        "rating": {**COLUMN["rating"], "levels": [x / 2 for x in range(1, 11)], "type": "float64"},
        "day": {"role": role, "type": "int64"},
    }
    ended = call_cli("run", job_on(tmp_path, tmp_path / "in", schema))
    assert ended.returncode == (0 if (how, role) == ("copy", "keep") else 66), ended.stderr


LEFT_OUT = {
    "suffixes": (
        ["b.parquet.gzip", "000001_0", "x/part-7", "c.txt"],
        ["not read: 4 files whose name"],
    ),
    "one": (["part-1"], ["not read: 1 file whose name"]),
    "hidden": (
        ["_b.parquet", ".c-part", "_temporary/0/d.parquet", "x/.e/f-part"],
        ["not read: 4 hidden files"],
    ),
    "both": (["b-part", ".c-part"], ["not read: 1 file whose", "not read: 1 hidden file "]),
    "none": (["b.PARQUET", "x/c.parq", "D.pq"], []),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_files_that_are_not_read_are_counted_and_said(kind, tmp_path):
    growing = kind == "both"
    names, said = LEFT_OUT[kind]
    source = lake(tmp_path / "in", [50, *range(60, 60 + len(names))])
    for place, name in enumerate(names, start=1):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / f"part.{place}.parquet").rename(source / name)
    for name in ("_SUCCESS", "_metadata", ".part.0.parquet.crc"):
        (source / name).write_bytes(b"")
    job = job_on(tmp_path, source, growing=growing)
    result = run(job)
    assert len(told(result)) == len(said)
    assert all(each in warning for each, warning in zip(said, told(result), strict=True)), told(
        result
    )
    assert result["rows"] == (50 if said else sum([50, *range(60, 60 + len(names))]))
    published = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.json"))
    assert not any(name.encode() in published for name in names)
    if growing:
        again = json.loads(call_cli("run", job, "--json").stdout)
        assert (again["status"], told(again)) == ("nothing new", told(result))
    if kind in ("suffixes", "one"):
        everything = run(
            job_on(tmp_path / "all", source, input={"path": str(source), "format": "parquet"})
        )
        assert (everything["rows"], told(everything)) == (
            sum([50, *range(60, 60 + len(names))]),
            [],
        )


@pytest.mark.parametrize(
    ("name", "packed"),
    [("000000_0", False), ("data.tsv", True), ("data.csv.gzip", True), ("data", False)],
)
def test_text_of_any_name_is_read_as_csv(name, packed, tmp_path):
    source = lake(tmp_path / "in", [70], csv=True)
    content = (source / "part.0.csv").read_bytes()
    (source / "part.0.csv").unlink()
    (source / name).write_bytes(gzip.compress(content) if packed else content)
    refuse(
        job_on(tmp_path, source),
        66,
        "there is no Parquet or CSV file here",
        "not read: 1 file whose",
        "`format: csv`",
    )
    assert run(job_on(tmp_path, source, input={"path": str(source), "format": "csv"}))["rows"] == 70
    assert "role" in call_cli("init", source, "--format", "csv").stdout


def test_folders_that_are_not_entered_are_said(tmp_path):
    source = lake(tmp_path / "in", [50])
    lake(tmp_path / "elsewhere", [60], seed=2)
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "loop").symlink_to(source)
    assert told(run(job_on(tmp_path, source)))[0].startswith("not read: 2 items ")
    (source / "loop").unlink()
    for name, glob, rows in (
        ("a", "*", 50),
        ("b", "**", 110),
        ("c", "*/*", 60),
        ("d", "**/*.parquet", 110),
    ):
        result = run(job_on(tmp_path / name, source / glob))
        assert (result["rows"], len(told(result))) == (rows, int(name == "a"))
    (source / "gone.parquet").symlink_to("nothing.parquet")
    refuse(job_on(tmp_path / "e", source), 66, "gone.parquet")


@pytest.mark.parametrize("how", ["pipe", "socket", "device", "pipe behind a link"])
@pytest.mark.parametrize("role", ["input", "public"])
def test_what_is_no_file_is_never_opened(how, role, tmp_path):
    """A pipe that is opened waits for a writer for ever."""
    source = {
        "input": lake(tmp_path / "in", [50]),
        "public": lake(tmp_path / "public", [50], seed=2),
    }
    odd = source[role] / "b.parquet"
    if how == "device":
        odd.symlink_to(os.devnull)
    elif how == "socket":
        with (
            contextlib.chdir(source[role]),
            socket.socket(socket.AF_UNIX) as listener,
        ):  # paths of sockets are short
            listener.bind(odd.name)
    else:
        place = tmp_path / "pipe" if how.endswith("link") else odd
        os.mkfifo(place)
        if place != odd:
            odd.symlink_to(place)
    public = {"kind": "public", "path": str(source["public"])}
    for at, name in (("a", ""), ("b", "/*.parquet")):
        changes = (
            {"mechanism__reference": {**public, "path": f"{source['public']}{name}"}}
            if role == "public"
            else {}
        )
        [warning] = told(run(job_on(tmp_path / at, Path(f"{source['input']}{name}"), **changes)))
        assert "not read: 1 item other than files" in warning
    assert call_cli("init", source[role]).returncode == 0
    if role == "input":
        refuse(
            job_on(tmp_path / "c", odd),
            66,
            "there is no Parquet or CSV file here",
            "not read: 1 item",
        )
        assert call_cli("init", odd).returncode == 66
    else:
        ended = call_cli(
            "run",
            job_on(
                tmp_path / "c", source["input"], mechanism__reference={**public, "path": str(odd)}
            ),
        )
        assert ended.returncode == 66
        assert "not read: 1 item" in error_line(ended)


def test_a_public_table_says_what_is_not_read_and_refuses_copies(tmp_path):
    source, public = lake(tmp_path / "in", [300]), lake(tmp_path / "public", [300, 200], seed=2)
    (public / "part.1.parquet").rename(public / "part-1")
    reference = {"kind": "public", "path": str(public)}
    [warning] = told(run(job_on(tmp_path, source, mechanism__reference=reference)))
    assert warning.startswith("public table: not read: 1 file ")
    assert not told(
        run(job_on(tmp_path / "a", source, mechanism__reference={**reference, "format": "parquet"}))
    )
    shutil.copy(public / "part.0.parquet", public / "copy.parquet")
    ended = call_cli("run", job_on(tmp_path / "b", source, mechanism__reference=reference))
    assert ended.returncode == 66
    assert "rows seen again" in error_line(ended)


@pytest.mark.parametrize(("end", "packed"), [("\n", True), ("\r\n", False)])
def test_an_empty_line_of_one_column_is_a_row(end, packed, tmp_path):
    (tmp_path / "in").mkdir()
    text = end.join(
        ["rating", "1", "", "2", "", "", "3", "", ""]
    ).encode()  # the last line has an end
    (tmp_path / "in" / "a.csv").write_bytes(gzip.compress(text) if packed else text)
    known = {"kind": "known", "columns": {"rating": {"probabilities": [1 / 6] * 6}}}
    assert run(job_on(tmp_path, tmp_path / "in", COLUMN, mechanism__reference=known))["rows"] == 7
    released = pq.read_table(tmp_path / "out")
    assert released.num_rows == 7
    refusing = {"rating": {**COLUMN["rating"], "nulls": "refuse"}}
    known["columns"] = {"rating": {"probabilities": [1 / 5] * 5}}
    ended = call_cli(
        "run", job_on(tmp_path / "b", tmp_path / "in", refusing, mechanism__reference=known)
    )
    assert ended.returncode == 65
    assert not (tmp_path / "b" / "out").exists()
    for name in ("b.csv", "c.csv"):  # rows without a value are rows
        (tmp_path / "in" / name).write_bytes(f"rating{end}{end}{end}".encode())
    refuse(
        job_on(
            tmp_path / "c",
            tmp_path / "in",
            COLUMN,
            mechanism__reference=known | {"columns": {"rating": {"probabilities": [1 / 6] * 6}}},
        ),
        66,
        "is a copy of b.csv",
    )
