"""Texts in columns of bytes, as old Parquet files have them: read by their encoding by every mechanism, and written as bytes again."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    call_cli,
    categorical,
    continuous,
    error_line,
    read_card,
    run_here,
    write_job,
)

import dpdask
from dpdask.engine.digests import hash_batch
from dpdask.evaluation.samples import code_sides
from dpdask.io.shards import PAGE_NAME

TOWNS, CODES = ["Zürich", "Genève", "Chur"], ["é ", "b\0\0"]
FIXED = pa.binary(3)
SCHEMA = {
    "town": categorical(TOWNS, encoding="latin-1", nulls="level"),
    "code": categorical(CODES, encoding="utf-8"),
    "age": continuous([0, 100]),
    "kept": {"role": "keep"},
}
RELEASES = {
    "dip": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
    "holdout": {
        "kind": "dip",
        "reference": {"kind": "holdout", "fraction": 0.2},
        "channel": "optimal",
    },
    "tree": {"kind": "dip", "reference": {"kind": "tree"}},
    "copula": {"kind": "copula"},
    "marginals": {"kind": "marginals", "cliques": [["town", "code"]]},
    "cells": {"kind": "histogram", "bins": 4},
    "records": {"kind": "histogram", "bins": 4, "output": "rows"},
}
OF_ROWS = ("dip", "holdout", "tree")
SECRET = b"\xffSecret"


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(3)
    towns = rng.choice([*TOWNS, None], 8_000, p=[0.5, 0.25, 0.15, 0.1]).tolist()
    codes = [CODES[town != "Zürich"] for town in towns]
    return pa.table(
        {
            "town": pa.array([town and town.encode("latin-1") for town in towns]),
            "code": pa.array([code.encode() for code in codes], FIXED),
            "age": rng.uniform(0, 100, 8_000),
            "kept": pa.array([b"\xff\0"] * 8_000),  # no text, and copied as it is
        }
    )


def job_of(folder, table, mechanism, schema=SCHEMA, **changes):
    pq.write_table(table, folder / "in.parquet", row_group_size=3_000)
    if mechanism["kind"] != "dip":
        schema = schema | ({"kept": {"role": "drop"}} if "kept" in schema else {})
    private = "age" in schema and mechanism.get("reference", {}).get("kind") in (None, "tree")
    privacy = {"epsilon": 8.0, "delta": 1e-6 if private else 0, "adjacency": "replace-one"}
    given = {"schema": schema, "mechanism": mechanism, "privacy": privacy, **changes}
    return write_job(folder, folder / "in.parquet", folder / "out", **given)


@pytest.mark.parametrize("name", RELEASES)
def test_each_mechanism_releases_bytes_and_answers_with_texts(name, table, tmp_path):
    run_here(job_of(tmp_path, table, RELEASES[name]))
    opened, told = dpdask.open(str(tmp_path / "out")), read_card(tmp_path)["columns"]
    assert (told["town"]["encoding"], told["town"]["levels"]) == ("latin-1", [None, *TOWNS])
    assert (told["code"]["encoding"], told["code"]["levels"]) == ("utf-8", CODES)
    if name != "marginals":  # tables of counts name levels
        types = [opened._types.field(each).type for each in ("town", "code")]
        assert types == [pa.binary(), FIXED]
        released = opened.to_pandas()
        assert set(released["town"].dropna()) == {town.encode("latin-1") for town in TOWNS}
        assert set(released["code"]) == {code.encode() for code in CODES}
        if name in OF_ROWS:
            assert set(released["kept"]) == {b"\xff\0"}
    shares = opened.share("town").estimate
    assert shares[TOWNS].tolist() == pytest.approx([0.5, 0.25, 0.15], abs=0.06)
    counts = opened.crosstab("town", "code").estimate
    share = counts.loc["Zürich", CODES[0]] / counts.to_numpy().sum()  # some rows are held out
    assert share == pytest.approx(0.5, abs=0.06)
    if name not in OF_ROWS:
        subset = opened.where("town = 'Zürich'") if hasattr(opened, "where") else None
        assert subset is None or float(subset.count().estimate) == pytest.approx(4_000, abs=500)
    page = (tmp_path / "out" / PAGE_NAME).read_text()
    assert "Zürich" in page
    assert "b&#39;" not in page
    assert "\\xfc" not in page


def test_a_published_model_is_asked_by_texts_and_gives_bytes(table, tmp_path):
    run_here(job_of(tmp_path, table, RELEASES["copula"], output__model=True))
    opened = dpdask.open(str(tmp_path / "out"))
    for where in ("town = 'Zürich'", "town in ('Zürich', 'Chur') and code = 'é '"):
        found = opened.sample(50, where=where, seed=1)
        assert "Zürich".encode("latin-1") in set(found["town"])
        assert set(found["town"]) <= {town.encode("latin-1") for town in ("Zürich", "Chur")}
    again = opened.sample(like=found[["town", "code"]].head(5), seed=1)
    assert again["town"].tolist() == found["town"].head(5).tolist()
    for wrong in ("town = 'Bern'", "town = '€'", "town = 5"):
        with pytest.raises(dpdask.SpecError, match=r"none of its levels|in quotes is expected"):
            opened.sample(5, where=wrong)


def test_a_report_compares_bytes_as_texts(table, tmp_path):
    job = job_of(tmp_path, table, RELEASES["copula"])
    run_here(job)
    ended = call_cli("report", "--job", job, "--to", tmp_path / "report.html")
    assert ended.returncode == 0, ended.stderr
    towns = [SECRET, None, *(town.encode("latin-1") for town in TOWNS)]
    frame = pd.DataFrame({"town": pd.Series(towns, dtype=object)})
    columns = {"town": read_card(tmp_path)["columns"]["town"]}
    for side in code_sides(frame, frame, columns)[:2]:
        assert side.levels["town"] == (None, *TOWNS, "(outside its domain)")
        assert side.columns["town"].tolist() == [4, 0, 1, 2, 3]


@pytest.mark.parametrize("name", RELEASES)
def test_bytes_outside_the_levels_are_treated_as_declared_and_never_shown(name, table, tmp_path):
    towns = pa.array([SECRET, *table["town"].to_pylist()[1:]])
    table = table.set_column(0, "town", towns)
    job = job_of(tmp_path, table, RELEASES[name])
    ended = call_cli("run", job)
    assert ended.returncode == 65
    assert "column 'town': holds a value outside its levels" in error_line(ended)
    assert "Secret" not in ended.stdout + ended.stderr
    schema = SCHEMA | {"town": SCHEMA["town"] | {"other": "Chur"}}
    run_here(job_of(tmp_path, table, RELEASES[name], schema))
    for path in (tmp_path / "out").rglob("*.*"):
        assert b"Secret" not in path.read_bytes()


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary(), pa.binary_view(), FIXED])
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_bytes_without_an_encoding_are_refused_in_a_line_that_names_the_key(type_, verb, tmp_path):
    table = pa.table({"town": pa.array([b"abc", b"def"], type_), "age": [1.0, 2.0]})
    schema = {"town": categorical(["abc", "def"]), "age": continuous([0, 100])}
    ended = call_cli(verb, job_of(tmp_path, table, RELEASES["copula"], schema))
    assert ended.returncode == 65
    line = error_line(ended)
    assert f"column 'town': its type is {type_}, and the schema does not say which texts" in line
    assert "declare `encoding: utf-8`" in line


def test_a_declared_type_is_looked_at_before_the_table(table, tmp_path):
    schema = SCHEMA | {"town": categorical(TOWNS, type="binary")}
    ended = call_cli("validate", job_of(tmp_path, table, RELEASES["copula"], schema))
    assert ended.returncode == 64
    assert "declare `encoding: utf-8`" in error_line(ended)
    schema = SCHEMA | {"town": categorical(TOWNS, type="binary", encoding="latin-1")}
    assert call_cli("validate", job_of(tmp_path, table, RELEASES["copula"], schema)).returncode == 0


@pytest.mark.filterwarnings("ignore:A released row keeps", "ignore:ε = ", "ignore:.*is large")
def test_frames_of_bytes_come_out_as_bytes(table):
    schema = dpdask.Schema.from_dict({"columns": {"town": SCHEMA["town"]}})
    known = dpdask.Known(columns={"town": {"probabilities": [0.1, 0.5, 0.25, 0.15]}})
    objects = table.select(["town"]).to_pandas()
    arrow = table.select(["town"]).to_pandas(types_mapper=pd.ArrowDtype)
    for frame in (objects, arrow, objects.astype("category")):
        options = {"reference": known, "channel": "optimal", "insecure_seed": 1}
        with dpdask.DIP(schema, epsilon=100.0, **options).fit(frame) as release:
            found = release.transform(frame)["town"]
        assert found.tolist()[0] == objects["town"].tolist()[0]
        assert set(found.dropna()) == {town.encode("latin-1") for town in TOWNS}


def test_rows_have_one_digest_however_their_bytes_are_stored():
    values = [b"\xff\0a", b"abc", None]
    types = pa.binary(), pa.large_binary(), pa.binary_view(), FIXED
    batches = [pa.RecordBatch.from_pydict({"x": pa.array(values, type_)}) for type_ in types]
    assert len({hash_batch(batch, ["x"]).tobytes() for batch in batches}) == 1
