"""`dpdask init`: a draft from names, types and null flags alone, whatever the format; TODOs that `validate` names."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import write_deltalake
from e2e.helpers import call_cli
from lakes.tables import sql_catalog

from dpdask.documents import parse_yaml
from dpdask.errors import SpecError
from dpdask.io import parquet
from dpdask.io.storage import read_ranges
from dpdask.jobs.draft import draft_schema, read_levels
from dpdask.jobs.spec import Input
from dpdask.schema import Schema

SECRET = "Zebulon"
TABLE = pa.table(
    {
        "userId": pa.array([1, 2], pa.int64()),
        "age": pa.array([31, 47], pa.int32()),
        "price": [2.5, 1e6],
        "vip": [True, False],
        "day": [dt.date(2020, 1, 1), dt.date(2021, 1, 1)],
        "no": [SECRET, "y"],
        "genre": pa.array([SECRET, "y"]).dictionary_encode(),
        "w e: #": ["x", SECRET],
        "fee": [Decimal("1.00"), Decimal("2.00")],
        "tags": [[SECRET], []],
    }
).cast(
    pa.schema(
        [pa.field("userId", pa.int64(), nullable=False)]
        + [
            pa.field(name, type_)
            for name, type_ in [
                ("age", pa.int32()),
                ("price", pa.float64()),
                ("vip", pa.bool_()),
                ("day", pa.date32()),
                ("no", pa.string()),
                ("genre", pa.dictionary(pa.int32(), pa.string())),
                ("w e: #", pa.string()),
                ("fee", pa.decimal128(3, 2)),
                ("tags", pa.list_(pa.string())),
            ]
        ]
    )
)


def draft(path, **more):
    return dict(yaml.safe_load(draft_schema(Input(path=str(path), **more)))["columns"])


@pytest.fixture
def file(tmp_path):
    pq.write_table(TABLE, tmp_path / "part-0.parquet")
    return tmp_path / "part-0.parquet"


def test_what_types_tell_is_filled_in_and_the_rest_is_left(file):
    found = draft(file)
    assert list(found) == TABLE.column_names
    assert found["userId"] == {
        "role": "TODO",
        "kind": "TODO",
        "bounds": "TODO",
    }  # its flag says that it holds no nulls
    assert (
        found["price"]
        == found["day"]
        == {"role": "TODO", "kind": "continuous", "bounds": "TODO", "nulls": "TODO"}
    )
    assert found["vip"] == {
        "role": "TODO",
        "kind": "categorical",
        "levels": [False, True],
        "nulls": "TODO",
    }
    assert (
        found["no"]
        == found["genre"]
        == {"role": "TODO", "kind": "categorical", "levels": "TODO", "nulls": "TODO"}
    )
    assert found["fee"]["kind"] == "continuous"
    assert found["tags"] == {"role": "TODO"}
    text = draft_schema(Input(path=str(file)))
    assert (
        "userId:  # int64; by its name an identifier (drop it, unless it is public, or the unit of the job) or a code (give it levels)"
        in text
    )
    assert '"no":  # string\n' in text


def test_only_the_footer_is_read_and_neither_values_nor_statistics_are_looked_at(file, monkeypatch):
    plain = draft_schema(Input(path=str(file)))
    data = file.read_bytes()
    n_footer = int.from_bytes(data[-8:-4], "little") + 8
    poisoned = (
        data[:4]
        + b"\xff" * (len(data) - n_footer - 4)
        + data[-n_footer:].replace(SECRET.encode(), b"\xfe" * len(SECRET))
    )
    assert poisoned[-n_footer:] != data[-n_footer:]  # the statistics held the value
    file.write_bytes(poisoned)
    asked = []

    def spy(url, ranges, size):
        asked.extend(ranges)
        return read_ranges(url, ranges, size)

    monkeypatch.setattr(parquet, "read_ranges", spy)
    assert draft_schema(Input(path=str(file))) == plain
    assert asked
    assert all(start >= len(data) - n_footer for start, _ in asked)
    assert SECRET not in plain


def test_tables_with_equal_columns_have_equal_drafts(file, tmp_path):
    other = TABLE.slice(0, 0)
    pq.write_table(other, tmp_path / "other.parquet")
    assert draft_schema(Input(path=str(file))) == draft_schema(
        Input(path=str(tmp_path / "other.parquet"))
    )


def test_columns_in_the_names_of_folders_are_drafted_without_their_values(tmp_path):
    folder = tmp_path / "data" / f"town={SECRET}"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), folder / "a.parquet")
    text = draft_schema(Input(path=str(tmp_path / "data")))
    assert SECRET not in text
    assert yaml.safe_load(text)["columns"]["town"] == {
        "role": "TODO",
        "type": "TODO",
        "kind": "TODO",
        "levels": "TODO",
        "nulls": "TODO",
    }


def test_of_a_csv_file_the_header_alone_is_read(tmp_path):
    (tmp_path / "a.csv").write_bytes(f"user,x y\n{SECRET},1\n".encode() + b"\xff\xff,not utf-8\n")
    assert draft(tmp_path / "a.csv") == {
        name: {"role": "TODO", "kind": "TODO", "levels": "TODO", "nulls": "TODO"}
        for name in ("user", "x y")
    }
    assert SECRET not in draft_schema(Input(path=str(tmp_path / "a.csv")))


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"{SECRET},31,x",
            f"{SECRET},,x",
            f"{SECRET},x,x",
            f"{SECRET},2020-01-01T10:00:00Z",
            f"{SECRET},1.5e-3",
            f"{SECRET},1.5E-3",
        ),
        *(
            f"{SECRET};31;x",
            "31/12/2020",
            f"{SECRET},a@b.example,x",
            f"{SECRET},True",
            f"{SECRET},NaN",
        ),
    ],
)
def test_a_csv_file_without_a_header_is_refused(tmp_path, line):
    (tmp_path / "a.csv").write_text(f"{line}\n{line}\n")
    ended = call_cli("init", str(tmp_path / "a.csv"))
    assert ended.returncode == 65
    assert SECRET not in ended.stderr + ended.stdout
    assert "looks like a row" in ended.stderr


@pytest.mark.parametrize(
    ("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")]
)
def test_a_csv_file_with_another_separator_is_refused(tmp_path, sign, name):
    (tmp_path / "a.csv").write_text(sign.join(["user", "town"]) + "\n")
    ended = call_cli("init", str(tmp_path / "a.csv"))
    assert ended.returncode == 65
    assert (
        f"a.csv: its columns are separated by {name}, and commas are expected; write it with commas"
        in ended.stderr
    )


def test_names_may_hold_digits_and_spaces(tmp_path):
    (tmp_path / "a.csv").write_text("2nd visit,q1_2020,Größe in m²,x:1\n")
    assert list(draft(tmp_path / "a.csv")) == ["2nd visit", "q1_2020", "Größe in m²", "x:1"]


def test_delta_and_iceberg_tables_are_drafted(tmp_path):
    rows = pa.table({"id": pa.array([1, 2], pa.int64()), "town": [SECRET, "b"]})
    write_deltalake(str(tmp_path / "delta"), rows, partition_by=["town"])
    expected = {
        "id": {"role": "TODO", "kind": "TODO", "bounds": "TODO", "nulls": "TODO"},
        "town": {"role": "TODO", "kind": "categorical", "levels": "TODO", "nulls": "TODO"},
    }
    assert draft(tmp_path / "delta", format="delta") == expected
    catalog = sql_catalog(tmp_path)
    table = catalog.create_table("db.rows", rows.schema)
    table.append(rows)
    assert draft(table.metadata_location, format="iceberg") == expected


def test_public_levels_are_filled_in_by_type(file, tmp_path):
    (tmp_path / "levels.csv").write_text(
        'column,value\nage,47\nage,9\nday,2021-01-01\nday,2020-01-01\nno,"a, b"\nno,TODO\nfee,2.00\n'
    )
    levels = read_levels(str(tmp_path / "levels.csv"))
    found = Schema.model_construct(
        columns=yaml.safe_load(draft_schema(Input(path=str(file)), levels))["columns"]
    ).columns
    assert found["age"]["levels"] == [9, 47]
    assert found["age"]["kind"] == "discrete"
    assert found["day"]["levels"] == [dt.date(2020, 1, 1), dt.date(2021, 1, 1)]
    assert found["no"]["levels"] == ["a, b", "TODO"]
    assert found["fee"]["levels"] == [2.0]


@pytest.mark.parametrize(
    ("type_", "texts", "declared"),
    [
        (pa.string(), ["01", "08", "no", "1:30", "~"], ["01", "08", "no", "1:30", "~"]),
        (pa.uint64(), ["18446744073709551615", "7"], [7, 2**64 - 1]),
        (pa.float32(), ["0.1", "1e20"], [pytest.approx(0.1), pytest.approx(1e20)]),
        (pa.decimal128(10, 2), ["100", "0.1"], [0.1, 100.0]),
        (
            pa.timestamp("us"),
            ["9999-12-31", "2020-01-01"],
            [dt.date(2020, 1, 1), dt.date(9999, 12, 31)],
        ),
        (pa.bool_(), ["true", "false"], [True, False]),
        (pa.timestamp("us"), ["2020-01-01 12:00:00"], None),
        (pa.float64(), ["nan", "1"], None),
        (pa.decimal128(38, 2), ["12345678901234567890.12"], None),
    ],
    ids=str,
)
def test_levels_are_written_as_they_are_read_back_or_refused(type_, texts, declared, tmp_path):
    pq.write_table(pa.table({"x": pa.nulls(1, type_)}), tmp_path / "a.parquet")
    if declared is None:
        with pytest.raises(
            SpecError, match=r"levels of 'x': as values of the type .* they cannot be declared"
        ):
            draft_schema(Input(path=str(tmp_path / "a.parquet")), {"x": texts})
    else:
        text = draft_schema(Input(path=str(tmp_path / "a.parquet")), {"x": texts})
        assert parse_yaml(text, "schema.yaml")["columns"]["x"]["levels"] == declared


def test_long_lists_of_levels_are_wrapped_and_read_back(file):
    levels = {"no": [f"level number {number}" for number in range(300)]}
    text = draft_schema(Input(path=str(file)), levels)
    assert max(map(len, text.splitlines())) < 150
    assert yaml.safe_load(text)["columns"]["no"]["levels"] == levels["no"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "column,value\nag,1\n",
            "levels of 'ag': the table has no such column; did you mean 'age'?",
        ),
        ("column,value\nage,old\n", "levels of 'age': not all are of the column's type int32"),
        ("column,value\nage,1\nage,1\n", "levels of 'age': a level is repeated"),
        ("column,value\nage\n", "line 2 has 1 fields, not 2"),
        ("age\n", "the wrong header; begin it with the line `column,value`"),
        (None, "the list of levels cannot be read"),
    ],
)
def test_a_wrong_list_of_levels_is_refused(file, tmp_path, content, says):
    if content is not None:
        (tmp_path / "levels.csv").write_text(content)
    ended = call_cli("init", str(file), "--levels-from", str(tmp_path / "levels.csv"))
    assert ended.returncode == 64
    assert says in ended.stderr


def test_a_draft_is_written_once_and_validate_names_what_is_left(file, tmp_path):
    output = tmp_path / "schema.yaml"
    ended = call_cli("init", str(file), "--output", str(output))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{output}: a draft of 10 columns; " in ended.stdout
    again = call_cli("init", str(file), "--output", str(output))
    assert again.returncode == 73
    assert "this file is there already" in again.stderr
    (tmp_path / "job.yaml").write_text(
        f"name: j\ninput: {{path: {file}}}\noutput: {{path: {tmp_path / 'out'}}}\nschema: schema.yaml\n"
        "privacy: {epsilon: 1.0}\nmechanism: {kind: copula, n_rows: input}\n"
    )
    ended = call_cli("validate", str(tmp_path / "job.yaml"))
    assert ended.returncode == 64
    lines = ended.stderr.splitlines()
    assert len(lines) == len(TABLE.column_names)  # one for each column
    first = (
        output.read_text()
        .splitlines()
        .index(
            next(line for line in output.read_text().splitlines() if line.startswith("  userId:"))
        )
        + 1
    )
    what = "role, kind and bounds are still TODO; replace TODO by a value, or remove the keys"
    assert lines[0] == f"dpdask: schema.yaml, line {first}, columns.userId: {what}"
    assert (
        "columns.tags.role: this is still TODO; replace TODO by a value, or remove the key"
        in ended.stderr
    )
