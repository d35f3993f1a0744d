"""`dpdask simulate census`: its words, its line, its exit codes."""

import json

import pyarrow.dataset as ds
import pytest
from e2e.bad_input import command

from dpdask.schema import Schema


def test_a_table_and_its_schema(tmp_path):
    out = str(tmp_path / "people")
    ended = command(
        "simulate",
        "census",
        "--rows",
        "1000",
        "--attributes",
        "5",
        "--levels",
        "40",
        "--rows-per-file",
        "400",
        "--out",
        out,
    )
    assert (ended.code, ended.out) == (
        0,
        f"{out}: 1,000 simulated people, 5 attributes of 40 levels, in 3 files; schema {out}-schema.yaml\n",
    )
    last = json.loads(ended.err.splitlines()[-1])
    assert (last["stage"], last["done"], last["total"]) == ("simulate", 3, 3)
    table = ds.dataset(out).to_table()
    assert len(table) == 1000
    assert table.column_names == list(Schema.from_yaml(f"{out}-schema.yaml").privatised)


def test_binary(tmp_path):
    out = str(tmp_path / "people")
    assert (
        command(
            "simulate",
            "census",
            "--rows",
            "100",
            "--attributes",
            "9",
            "--binary",
            "--seed",
            "3",
            "--out",
            out,
        ).code
        == 0
    )
    assert {
        column.levels for column in Schema.from_yaml(f"{out}-schema.yaml").columns.values()
    } == {(0, 1)}


@pytest.mark.parametrize(
    "given",
    [
        ["--rows", "-1"],
        ["--rows", "many"],
        ["--rows", "9", "--levels", "5"],
        ["--rows", "9", "--binary", "--levels", "54"],
    ],
)
def test_wrong_words_end_with_2(tmp_path, given):
    ended = command("simulate", "census", *given, "--out", str(tmp_path / "people"))
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_place_ends_with_73(tmp_path):
    given = ("simulate", "census", "--rows", "9", "--out", str(tmp_path / "people"))
    assert command(*given).code == 0
    assert command(*given).code == 73
