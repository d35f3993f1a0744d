"""What is said of a CSV file that cannot be read: its separator, its encoding, its line, and never a value."""

import datetime as dt
import gzip

import pyarrow as pa
import pytest
import yaml

from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.csv import digest
from dpdask.io.fragments import discover, read_batches
from dpdask.jobs.spec import load_job
from dpdask.schema import Schema

SCHEMA = Schema.from_dict(
    {
        "columns": {
            "user": {"role": "keep"},
            "score": {"role": "privatise", "kind": "continuous", "type": "int64"},
        }
    }
)
START = dt.datetime(2001, 1, 1, 3, 4, 5)  # noqa: DTZ001 - of a column without a zone
ROWS = "".join(f"u{number},{number}\n" for number in range(50))


def read(path):
    found = discover(str(path), SCHEMA)
    for fragment in found.fragments:
        pa.Table.from_batches(list(read_batches(fragment, ["user", "score"], found.schema)))


def refuse(path, content):
    (path / "a.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises((DataError, InputError)) as caught:
        read(path)
    assert "secret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")]
)
def test_another_separator_is_named(tmp_path, sign, name):
    said = refuse(tmp_path, f"user,score\n{ROWS}".replace(",", sign))
    assert (
        said
        == f"a.csv: its columns are separated by {name}, and commas are expected; write it with commas, or convert it to Parquet"
    )


@pytest.mark.parametrize(("encoding", "name"), [("utf-16", "UTF-16"), ("latin-1", "not UTF-8")])
def test_another_encoding_of_the_header_is_named(tmp_path, encoding, name):
    assert f"its encoding is {name}; write it in UTF-8" in refuse(
        tmp_path, f"user,score,größe\n{ROWS}".encode(encoding)
    )


def test_a_line_of_another_encoding_is_named(tmp_path):
    said = refuse(
        tmp_path, f"user,score\n{ROWS}".encode() + "secret-ö,3\n".encode("latin-1") + ROWS.encode()
    )
    assert said == "column 'user': a text in line 52 is not in UTF-8; convert the file to UTF-8"


def test_a_line_with_too_many_fields_is_named(tmp_path):
    said = refuse(tmp_path, f"user,score\n{ROWS}secret,1,2\n{ROWS}")
    assert said.startswith(
        "a CSV file: line 52 has 3 fields, separated by commas, and the header has 2; correct the line"
    )


DATED = {"kind": "continuous", "bounds": [dt.date(2000, 1, 1), dt.date(2030, 1, 1)]}


def declare(**columns):
    return Schema.from_dict(
        {"columns": {name: {"role": "privatise", **column} for name, column in columns.items()}}
    )


def test_a_column_between_dates_needs_a_type_before_rows_are_read(tmp_path):
    (tmp_path / "a.csv").write_text(
        "born,admitted,moved\n1999-01-02,2001-01-01 03:04:05,2002-01-01\n"
    )
    mixed = {"kind": "mixed", "atoms": [dt.date(2001, 1, 1)]}
    with pytest.raises(SpecError) as caught:
        discover(str(tmp_path), declare(born=DATED, admitted=DATED, moved=mixed))
    assert [problem.where for problem in caught.value.problems] == [
        "column 'born'",
        "column 'admitted'",
        "column 'moved'",
    ]
    for line, key in zip(
        str(caught.value).splitlines(), ("bounds", "bounds", "atoms"), strict=True
    ):
        assert line.endswith(
            f": its {key} are dates, and a CSV file does not tell whether it holds dates or times; add `type: date32` or `type: timestamp[us]`"
        )
    typed = declare(
        born={**DATED, "type": "date32"},
        admitted={**DATED, "type": "timestamp[us]"},
        moved={**mixed, "type": "date32"},
    )
    found = discover(str(tmp_path), typed)
    assert found.schema.types == [pa.date32(), pa.timestamp("us"), pa.date32()]
    [batch] = read_batches(found.fragments[0], ["born", "admitted"], found.schema)
    assert batch.to_pylist() == [{"born": dt.date(1999, 1, 2), "admitted": START}]


def test_times_as_bounds_are_those_of_times(tmp_path):
    (tmp_path / "a.csv").write_text("admitted\n2001-01-01 03:04:05\n")
    bounds = {"kind": "continuous", "bounds": [dt.date(2000, 1, 1), START]}
    assert discover(str(tmp_path), declare(admitted=bounds)).schema.types == [pa.timestamp("us")]


def test_a_job_on_a_csv_file_is_validated_without_the_file(tmp_path):
    columns = {"columns": {name: {"role": "privatise", **DATED} for name in ("born", "admitted")}}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(columns, sort_keys=False))
    job = {
        "name": "n",
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 1.0},
    }
    job["mechanism"] = {"kind": "dip", "reference": {"kind": "histogram"}}
    for path, refused in (
        ("data.csv", True),
        ("data/*.CSV.gz", True),
        ("data.parquet", False),
        ("data", False),
    ):
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "input": {"path": path}}))
        if not refused:
            assert load_job(tmp_path / "job.yaml").schema.privatised == ("born", "admitted")
            continue
        with pytest.raises(SpecError) as caught:
            load_job(tmp_path / "job.yaml")
        lines = str(caught.value).splitlines()
        assert lines[0].startswith(
            "schema.yaml, line 2, column 'born': its bounds are dates, and a CSV file does not tell"
        )
        assert lines[1].startswith(
            "schema.yaml, line 8, column 'admitted': its bounds are dates, and a CSV file does not tell"
        )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", False),
        (b"user,score\n", False),
        (b"user,score\n\n\r\n", False),
        (b"user,score\na,1", True),
        (b"user,score\n\n\na,1\n", True),
        (b"user,score\ra,1\r", True),
        (b"user\n", False),
        (b"user\n\n", True),
        (b"user\n \n", True),
        (b"user\n\x85\n", True),
    ],
)
@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".CSV.GZ"])
def test_a_file_of_a_header_alone_has_no_rows(tmp_path, content, expected, ending):
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content, mtime=0) if ending != ".csv" else content)
    assert (digest(path.as_uri()) is not None) is expected


TEXTS = {
    "not closed": ROWS + '"u,1\n' + ROWS,
    "closed by a later row": ROWS + '"secret,1\n' + ROWS + 'u",2\n' + ROWS,
    "a line break in a field": ROWS + '"secret\nu",1\n',
    "a return in a field": ROWS + '"secret\ru",1\r\n',
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_a_field_that_goes_on_over_its_line_is_refused(name, packed, tmp_path):
    """Otherwise the rows that follow would be lost, and their private values be a part of a kept one."""
    text = "user,score\n" + TEXTS[name]
    turned = "\n".join(
        ",".join(line.split(",")[::-1]) for line in text.splitlines()
    )  # the text in the last column
    for each in (text, turned):
        assert "quote" in refuse(tmp_path, gzip.compress(each.encode()) if packed else each)


@pytest.mark.parametrize(
    ("end", "last", "single", "long"),
    [("\n", True, False, True), ("\r\n", False, True, False), ("\r\n", True, False, False)],
)
def test_every_line_is_a_row(end, last, single, long, tmp_path):
    """Whatever ends the lines, with blank ones among them, and over several blocks; one more quote and it is refused."""
    rows = [
        "u" * (2**20 if long and number % 7 == 0 else 3) + ("" if single else f",{number}")
        for number in range(60)
    ]
    rows[20:20] = ["", ""]
    lines = ["user" if single else "user,score", *rows]
    schema = Schema.from_dict(
        {
            "columns": {"user": {"role": "keep"}}
            | ({} if single else {"score": {"role": "keep", "type": "int64"}})
        }
    )

    def count(lines):
        (tmp_path / "a.csv").write_bytes((end.join(lines) + (end if last else "")).encode())
        found = discover(str(tmp_path), schema)
        return sum(
            batch.num_rows
            for each in found.fragments
            for batch in read_batches(each, found.schema.names, found.schema)
        )

    assert count(lines) == (62 if single else 60)
    lines[30] = '"' + lines[30]
    with pytest.raises(DataError, match="quote"):
        count(lines)


@pytest.mark.parametrize(
    ("type_", "text", "refused"),
    [
        *(("int8", text, True) for text in ("0xFF", "0X80")),
        ("int64", "0xFFFFFFFFFFFFFFFF", True),
        *(("float64", text, True) for text in ("1e400", "-1e400", "9" * 400)),
        ("float32", "1e39", True),
        *(("float64", text, False) for text in ("inf", "-inf", "1e308", "nan")),
        ("string", "0xFF", False),
        ("string", "1e400", False),
    ],
)
def test_texts_that_would_be_read_as_other_numbers_are_refused(type_, text, refused, tmp_path):
    (tmp_path / "a.csv").write_text(f"user,score,more\nu,1,0x1\nv,{text},2\n")
    schema = Schema.from_dict(
        {
            "columns": {
                "user": {"role": "drop"},
                "score": {"role": "keep", "type": type_},
                "more": {"role": "drop"},
            }
        }
    )
    found = discover(str(tmp_path), schema)
    if refused:
        with pytest.raises(
            DataError,
            match=r"^column 'score': a number is in hexadecimal, or too large for \w+; correct it$",
        ):
            list(read_batches(found.fragments[0], ["score"], found.schema))
    else:
        assert (
            sum(
                batch.num_rows
                for batch in read_batches(found.fragments[0], ["score"], found.schema)
            )
            == 2
        )


@pytest.mark.parametrize("type_", ["float16", "string_view", "binary_view"])
def test_a_type_that_is_not_read_from_texts_is_refused_before_any_row(type_, tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(
        SpecError, match=r"column 'x': CSV files cannot be read as \w+; declare another `type`"
    ):
        discover(
            str(tmp_path), Schema.from_dict({"columns": {"x": {"role": "keep", "type": type_}}})
        )


@pytest.mark.parametrize("header", ["user,score", "user,score\n", "user,score\r\n\r\n"])
def test_a_header_without_rows_is_an_empty_file(header, tmp_path):
    (tmp_path / "a.csv").write_text(header)
    found = discover(str(tmp_path), SCHEMA)
    assert (
        sum(batch.num_rows for batch in read_batches(found.fragments[0], ["user"], found.schema))
        == 0
    )
