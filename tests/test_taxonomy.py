"""Values that are no levels become the nearest level above them in a public taxonomy: in schemas, codecs, searches, and every mechanism."""

from __future__ import annotations

import datetime as dt
import functools

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import call_cli, categorical, read_card, run_here, write_job
from numpy.random import default_rng
from scipy import stats

import dpdask
from dpdask import Schema
from dpdask.codec import codec_for
from dpdask.errors import SpecError
from dpdask.jobs.spec import load_job

# a1 and a2 are below a, which is below A; b1 is below B
PAIRS = [["a1", "a"], ["a2", "a"], ["a", "A"], ["b1", "B"]]
LEVELS = ["a1", "A", "B", "rest"]
BECOMES = {"a1": "a1", "a2": "A", "a": "A", "A": "A", "b1": "B", "B": "B", "?": "rest"}


def column(**declared):
    usual = {**categorical(LEVELS), "other": "rest", "taxonomy": PAIRS}
    return Schema.from_dict({"columns": {"x": {**usual, **declared}}}).columns["x"]


def write_text(value):
    return None if value is None else value.encode("utf-16")


KINDS = {  # of each, the type, the value that stands for a text, and what a schema says more
    "string": (pa.string(), str, str, {}),
    "large_string": (pa.large_string(), str, str, {}),
    "string_view": (pa.string_view(), str, str, {}),
    "int64": (pa.int64(), ord, ord, {}),
    "uint8": (pa.uint8(), ord, ord, {}),
    "float32": (pa.float32(), lambda text: ord(text) / 2, lambda text: ord(text) / 2, {}),
    "date32": (pa.date32(), *[lambda text: dt.date(2020, 1, 1 + ord(text) % 28)] * 2, {}),
    "binary": (pa.binary(), str, write_text, {"encoding": "utf-16"}),
}
SHORT = {"a1": "p", "a2": "q", "a": "r", "A": "s", "b1": "t", "B": "u", "rest": "v", "?": "w"}


@pytest.mark.parametrize("nulls", ["refuse", "level"])
@pytest.mark.parametrize(
    ("kind", "is_dictionary"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in KINDS if "view" not in kind)],
)
def test_a_value_that_is_no_level_becomes_the_nearest_one_above_it(kind, is_dictionary, nulls):
    type_, level, value, more = KINDS[kind]
    declared = column(
        levels=[level(SHORT[each]) for each in LEVELS],
        other=level(SHORT["rest"]),
        taxonomy=[[level(SHORT[each]) for each in pair] for pair in PAIRS],
        nulls=nulls,
        **more,
    )
    codec = codec_for("x", declared, type_)
    values = [*BECOMES, *([None] if nulls == "level" else [])]
    array = pa.array([each and value(SHORT[each]) for each in values], type_)
    wanted = [each and value(SHORT[BECOMES[each]]) for each in values]
    if is_dictionary:
        array = array.dictionary_encode()
    assert codec.decode(codec.encode(array)).to_pylist() == pa.array(wanted, type_).to_pylist()
    assert codec.n_outside(array) == 1  # "?" alone
    told = dict(codec.told["taxonomy"])
    below = {each: BECOMES[each] for each in ("a2", "a", "b1")}
    assert told == {level(SHORT[one]): level(SHORT[two]) for one, two in below.items()}


@pytest.mark.parametrize(
    ("type_", "other", "pair", "more"),
    [
        (pa.int8(), 1, [5, 1000], {}),
        (pa.int8(), 1, [1000, 5], {}),
        (pa.int64(), 1, [5, 1.5], {}),
        (pa.binary(1), "z", ["c", "long"], {"encoding": "utf-8"}),
    ],
)
def test_a_taxonomy_fits_the_type_before_levels_are_searched_for(type_, other, pair, more):
    usual = {"levels": "discover", "other": other, **more}
    codec_for("x", column(**{**usual, "taxonomy": None}), type_)
    with pytest.raises(dpdask.DataError, match=r"does not have|do not fit"):
        codec_for("x", column(**{**usual, "taxonomy": [pair]}), type_)


def test_what_is_not_in_the_taxonomy_is_outside():
    declared = column(nulls="level", outside="null", other=None)
    codec = codec_for("x", declared, pa.string())
    found = codec.decode(codec.encode(pa.array(["?", "a2", None])))
    assert found.to_pylist() == [None, "A", None]
    strict = codec_for("x", column(other=None), pa.string())
    assert strict.decode(strict.encode(pa.array(["b1"]))).to_pylist() == ["B"]
    with pytest.raises(dpdask.DataError, match="a value outside its levels"):
        strict.encode(pa.array(["?"]))


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"kind": "discrete", "levels": [1, 2], "taxonomy": [[3, 1]]}, "for a categorical column"),
        ({"taxonomy": []}, "empty"),
        ({"taxonomy": [*PAIRS, ["a1", "B"]]}, "'a1' has two parents"),
        ({"taxonomy": [*PAIRS, ["A", "a1"]]}, "in a circle above 'a1'"),
        ({"taxonomy": [["A", "A"]]}, "in a circle above 'A'"),
        ({"taxonomy": [["c", "d"]]}, "no level is the parent"),
        ({"taxonomy": [["c", 1]]}, "one type"),
        ({"taxonomy": [["c"]]}, "taxonomy"),
        ({"taxonomy": "codes.csv"}, "a file of pairs"),
        ({"other": None, "levels": ["a1", "A"]}, "not all topmost values"),
        ({"most": 5}, "`most` belongs to"),
        ({"levels": "discover", "most": 0}, "most"),
        ({"encoding": "ascii", "taxonomy": [["é", "A"]]}, "ascii"),
        ({"levels": "discover", "taxonomy": [[f"{n}", f"r{n}"] for n in range(2_048)]}, "2,048"),
    ],
)
def test_a_taxonomy_that_cannot_be_is_refused(declared, said):
    usual = {**categorical(LEVELS), "other": "rest", "taxonomy": PAIRS}
    given = {key: each for key, each in {**usual, **declared}.items() if each is not None}
    if declared.get("kind") == "discrete":
        del given["other"]
    with pytest.raises(SpecError, match=said):
        Schema.from_dict({"columns": {"x": given}})


def _schema(tmp_path, text, **declared):
    (tmp_path / "codes.csv").write_bytes(text)
    given = {**categorical(LEVELS), "other": "rest", "taxonomy": "codes.csv", **declared}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"columns": {"x": given}}))
    return Schema.from_yaml(tmp_path / "schema.yaml")


def test_a_file_of_pairs_is_what_the_pairs_are(tmp_path):
    text = "﻿code,parent\r\n" + "".join(f'"{one}",{two}\r\n' for one, two in PAIRS)
    schema = _schema(tmp_path, text.encode())
    assert schema.columns["x"] == column()
    assert Schema.from_dict(schema.model_dump()) == schema
    numbers = {"levels": [1, 2, -1], "other": -1}
    found = _schema(tmp_path, b"code,parent\n10,1\n20,2\n", **numbers).columns["x"]
    assert found.taxonomy == ((10, 1), (20, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "no CSV file of two columns") for text in (b"", b"code,parent\na1\n", b"\xff,x")),
        (b"code,parent\na1,A,x\n", "no CSV file of two columns"),
        (b'code,parent\n"a1,A\n', "no CSV file of two columns"),
        (b"a1,A\na2,A\n", "its first line holds values"),
        (b"a1,a\na,A\n", "its first line holds values"),
    ],
)
def test_a_file_that_holds_no_pairs_is_refused(tmp_path, text, said):
    with pytest.raises(SpecError, match=rf"codes\.csv: .*{said}"):
        _schema(tmp_path, text)


def test_a_file_of_other_values_than_the_levels_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"codes\.csv: its values are not of the kind"):
        _schema(tmp_path, b"code,parent\na1,A\n", levels=[1, 2], other=2)


@pytest.mark.parametrize(
    ("levels", "text"),
    [("1..3", b"code,parent\n10,1\n"), ([1, 2.5], b"code,parent\n3.5,1\n")],
    ids=str,
)
def test_a_file_has_the_kind_of_the_levels(tmp_path, levels, text):
    found = _schema(tmp_path, text, levels=levels, other=1).columns["x"]
    assert found.ancestors.find_levels(found.listed) in ({10: 1}, {3.5: 1})


def test_answers_say_that_a_parent_has_only_what_is_left(tmp_path):
    job = job_of(
        tmp_path,
        "taxonomy",
        rows()["x"],
        declare(taxonomy=PAIRS),
        mechanism=MECHANISMS["copula"][0],
        privacy=GAUSSIAN,
    )
    opened = dpdask.open(run_here(job).output)
    said = "only the rows whose own value is no level"
    assert any(said in limit for limit in opened.share("x").limits)
    assert not any(said in limit for limit in opened.share("y").limits)
    page = (tmp_path / "taxonomy" / "out" / "_dpdask" / "release.html").read_text()
    assert "become what is above them in the taxonomy; others: become rest" in page


def test_a_missing_file_is_refused(tmp_path):
    _schema(tmp_path, b"code,parent\na1,A\n")
    (tmp_path / "codes.csv").unlink()
    with pytest.raises(SpecError, match=r"codes\.csv: the taxonomy cannot be read"):
        Schema.from_yaml(tmp_path / "schema.yaml")


# ---- jobs

PURE = {"epsilon": 2.0}
GAUSSIAN = {"epsilon": 2.0, "delta": 1e-6}
MECHANISMS = {
    "dip": ({"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"}, PURE),
    "dip tree": ({"kind": "dip", "reference": {"kind": "tree"}}, GAUSSIAN),
    "copula": ({"kind": "copula"}, GAUSSIAN),
    "marginals": ({"kind": "marginals", "cliques": [["x"], ["x", "y"]]}, GAUSSIAN),
    "histogram": ({"kind": "histogram"}, GAUSSIAN),
}


@functools.cache
def rows():
    rng = default_rng(5)
    shares = np.array([30, 8, 1, 12, 20, 10, 2])
    x = rng.choice([*BECOMES], 4_000, p=shares / shares.sum())
    return {"x": x, "y": rng.choice(["k", "l"], 4_000)}


def job_of(tmp_path, name, x, declared, **changes):
    folder = tmp_path / name
    folder.mkdir()
    pq.write_table(pa.table({**rows(), "x": x}), folder / "in.parquet")
    schema = {"x": declared, "y": categorical(["k", "l"])}
    usual = {"schema": schema, "insecure_seed": 3}
    return write_job(folder / "job", folder / "in.parquet", folder / "out", **{**usual, **changes})


def declare(**more):
    return {**categorical(LEVELS), "other": "rest", **more}


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_release_is_that_of_the_table_with_the_levels(name, tmp_path):
    mechanism, privacy = MECHANISMS[name]
    x = [BECOMES[each] for each in rows()["x"]]
    one, two = (
        job_of(tmp_path, folder, *given, mechanism=mechanism, privacy=privacy)
        for folder, *given in (
            ("taxonomy", rows()["x"], declare(taxonomy=PAIRS)),
            ("levels", x, declare()),
        )
    )
    found, wanted = (dpdask.open(run_here(job).output).to_pandas() for job in (one, two))
    if not name.startswith("dip"):  # rows are drawn by their files' contents
        assert found.equals(wanted)
    shown, exact = (
        pd.Series(each).value_counts().reindex(LEVELS, fill_value=0) for each in (found["x"], x)
    )
    if len(found) == len(x):
        assert stats.chi2_contingency([shown, exact]).pvalue > 1e-6
    plain = read_card(tmp_path / "levels")["columns"]["x"]
    told = read_card(tmp_path / "taxonomy")["columns"]["x"]
    assert told.pop("taxonomy") == [["a2", "A"], ["a", "A"], ["b1", "B"]]  # in their order
    assert told.pop("outside") == "the level above it; " + plain.pop("outside")
    if not name.startswith("dip"):
        assert told == plain


def test_most_values_are_found_by_their_parents(tmp_path):
    """Few of many codes are levels, the commonest ones; the others come out as their chapters."""
    rng = default_rng(2)
    codes = [f"c{place:03d}" for place in range(300)]
    chapter = {code: f"chapter {place % 7}" for place, code in enumerate(codes)}
    shares = 1.0 / np.arange(2, 302)
    x = rng.choice(codes, 30_000, p=shares / shares.sum())
    pq.write_table(pa.table({"x": x, "y": rng.choice(["k", "l"], 30_000)}), tmp_path / "in.parquet")
    declared = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "none"}
    schema = {
        "x": {**declared, "taxonomy": [*map(list, chapter.items())], "most": 20},
        "y": categorical(["k", "l"]),
    }
    job = write_job(
        tmp_path / "job",
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=schema,
        insecure_seed=1,
        privacy={"epsilon": 4.0, "delta": 1e-6, "adjacency": "add-remove", "unit": "row"},
        mechanism={"kind": "copula"},
    )
    outcome = run_here(job)
    levels = read_card(tmp_path)["columns"]["x"]["levels"]
    assert len(levels) == 20 + 7 + 1
    heavy = [level for level in levels if level in chapter]
    assert set(heavy[:20]) <= set(codes[:40])
    # each code stands behind its chapter
    order = [chapter.get(level, level) for level in levels[:-1]]
    assert order == sorted(order)
    found = dpdask.open(outcome.output).to_pandas()["x"]
    assert set(found) <= set(levels)
    shown, exact = (
        each.map(lambda code: chapter.get(code, code)).value_counts(normalize=True)
        for each in (found.astype(str), pa.array(x).to_pandas())
    )
    assert abs(shown.reindex(exact.index, fill_value=0) - exact).sum() < 0.02
    # the same, found by a search of its own that writes the schema
    found = call_cli("discover", job, "--epsilon", "1", "--delta", "1e-6", "--json")
    assert found.returncode == 0, found.stderr
    written = load_job(job).schema.columns["x"]
    assert written.n_found == 20 == len({*written.levels} & {*codes})
    assert written.ancestors.roots == tuple(f"chapter {place}" for place in range(7))


def test_so_many_levels_are_taken_as_there_may_be():
    taxonomy = [[f"c{n}", f"r{n % 10}"] for n in range(500)]
    found = [f"c{n}" for n in range(500)]

    def count(most=2_048, **more):
        usual = {"levels": "discover", "taxonomy": taxonomy}
        listed = column(**{**usual, **more}).list_found(found, most)
        assert len(set(listed)) == len(listed)
        return len(listed)

    assert count() == 64 + 10 + 1
    assert count(most=40) == 40
    assert count(most=5) == 11  # the topmost ones are always there
    own = {"levels": "discover", "taxonomy": taxonomy, "most": 200}
    assert len(column(**own).list_found(found)) == 211
    assert len(column(levels="discover", taxonomy=None).list_found(found)) == 501
