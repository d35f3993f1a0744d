"""What a notebook or a prompt shows of objects: short texts and small tables, in which nothing is markup but the table."""

import datetime as dt
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, mixed

import dpdask

ROOT = Path(__file__).parents[1]
NASTY = "<script>alert('x')</script>&"
TAGS = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}

USER_SCRIPT = """
import pandas as pd

import dpdask
from dpdask.inference import ReleasedColumn

schema: dpdask.Schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
table = pd.DataFrame({"x": [0, 1] * 500})


def rows() -> str:
    dip = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.25), unit=dpdask.UnitColumn(column="x", max_rows=2))
    released = dip.fit(table, ledger=dpdask.LedgerPlace(url="sqlite:///ledger.db", dataset="t"))
    private = released.transform(table)
    column = ReleasedColumn.from_card(released.card, "x")
    print(private, column, dip.plan(table).warnings)
    return str(released.card["guarantee"]["text"])


def records() -> int:
    copula = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9, options=dpdask.CopulaOptions(refinements=1)).fit(table)
    tables = dpdask.Marginals(schema, epsilon=1.0, cliques=[["x"]]).fit(table)
    try:
        loaded = dpdask.CopulaRelease.load("folder")
    except dpdask.DpdaskError as error:
        print(error.exit_code, error.hint)
    return int(tables.table(["x"]).sum()) + len(dpdask.open("out").columns) + len(copula.card)
"""


def schema(**columns):
    return dpdask.Schema.from_dict({"columns": columns})


SMALL = schema(
    user={"role": "keep"},
    x=discrete([1, 2, 3]),
    day=continuous([dt.date(2020, 1, 1), dt.date(2024, 12, 31)]),
    cost=mixed(atoms=[0], bounds=[0, 100], nulls="level"),
)


class Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []
        self.texts = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def parse(shown):
    parser = Parser()
    parser.feed(shown._repr_html_())  # type: ignore[attr-defined]
    assert set(parser.tags) <= TAGS
    return parser


def test_a_schema_is_shown_in_a_line_and_as_a_table():
    assert repr(SMALL) == "Schema(user: keep, x: discrete, day: continuous, cost: mixed)"
    texts = parse(SMALL).texts
    assert texts[0] == "Schema of 4 columns"
    for text in (
        "3 levels: (1, 2, 3)",
        "2020-01-01 to 2024-12-31",
        "0.0 to 100.0, atoms (0)",
        "clip",
        "level",
    ):
        assert text in texts


def test_many_levels_are_shortened():
    column = dpdask.Column(role="privatise", kind="discrete", levels=tuple(range(2000)))
    assert (
        repr(column)
        == "Column(role='privatise', kind='discrete', levels=(0, 1, 2, 3, …, 1999), outside='refuse')"
    )
    assert repr(dpdask.Column(role="keep")) == "Column(role='keep')"


def test_names_and_levels_are_escaped():
    made = schema(**{NASTY: categorical([NASTY, "b"])})
    assert NASTY in parse(made).texts
    frame = pd.DataFrame({NASTY: [NASTY, "b"] * 200})
    release = dpdask.Marginals(made, epsilon=1.0, cliques=[[NASTY]]).fit(frame)
    texts = parse(release).texts
    assert texts.count(NASTY) == 2  # in the columns and in the tables
    assert "Released tables" in texts


def test_a_release_is_shown_with_its_promise():
    made = schema(x=discrete([1, 2, 3]))
    release = dpdask.DIP(made, epsilon=1.0, reference=dpdask.Histogram()).fit(
        pd.DataFrame({"x": [1, 2, 3] * 100})
    )
    texts = parse(release).texts
    assert texts[0] == "Release: dip, ε = 1, δ = 0"
    assert release.card["guarantee"]["text"] in texts


def test_the_package_ships_its_types():
    assert (ROOT / "dpdask" / "py.typed").is_file()


@pytest.mark.slow
def test_a_script_of_a_user_passes_a_strict_type_checker(tmp_path):
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "script.py",
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    wrong = USER_SCRIPT.replace("refinements=1", 'refinements="1"').replace(
        "error.hint", "error.hnit"
    )
    (tmp_path / "script.py").write_text(wrong)
    ended = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "hnit" in ended.stdout  # the types are seen
