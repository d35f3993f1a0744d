"""What is said of a CSV file that cannot be read: its separator, its encoding, its line, and never a value."""

from pathlib import Path

import pyarrow as pa
import pytest

from dpdask.errors import DataError, InputError
from dpdask.io.fragments import discover, read_batches
from dpdask.schema import Schema

SCHEMA = Schema.from_dict({"columns": {"user": {"role": "keep"}, "score": {"role": "privatise", "kind": "continuous", "type": "int64"}}})
ROWS = "".join(f"u{number},{number}\n" for number in range(50))


def read(path: Path) -> None:
    found = discover(str(path), SCHEMA)
    for fragment in found.fragments:
        pa.Table.from_batches(list(read_batches(fragment, ["user", "score"], found.schema)))


def refuse(path: Path, content: str | bytes) -> str:
    (path / "a.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises((DataError, InputError)) as caught:
        read(path)
    assert "secret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_another_separator_is_named(tmp_path, sign, name):
    said = refuse(tmp_path, f"user,score\n{ROWS}".replace(",", sign))
    assert said == f"a.csv: its columns are separated by {name}, and commas are expected; write it with commas, or convert it to Parquet"


@pytest.mark.parametrize(("encoding", "name"), [("utf-16", "UTF-16"), ("latin-1", "not UTF-8")])
def test_another_encoding_of_the_header_is_named(tmp_path, encoding, name):
    assert f"its encoding is {name}; write it in UTF-8" in refuse(tmp_path, f"user,score,größe\n{ROWS}".encode(encoding))


def test_a_line_of_another_encoding_is_named(tmp_path):
    said = refuse(tmp_path, f"user,score\n{ROWS}".encode() + "secret-ö,3\n".encode("latin-1") + ROWS.encode())
    assert said == "column 'user': a text in line 52 is not in UTF-8; convert the file to UTF-8"


def test_a_line_with_too_many_fields_is_named(tmp_path):
    said = refuse(tmp_path, f"user,score\n{ROWS}secret,1,2\n{ROWS}")
    assert said.startswith("a CSV file: line 52 has 3 fields, separated by commas, and the header has 2; correct the line")


def test_where_a_value_of_another_type_stands_is_not_told(tmp_path):
    assert refuse(tmp_path, f"user,score\n{ROWS}u,secret\n").startswith("column 'score': a value cannot be read as its declared type")
