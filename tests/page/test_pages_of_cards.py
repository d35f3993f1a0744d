"""Pages that are made from a card alone: of frames, saved releases and surveys; and what cards say of dates."""

import datetime as dt

import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, refusing
from page.pages import EVIL, SCHEMA, Page, release

import dpdask
from dpdask.io.shards import PAGE_NAME
from dpdask.page import render

DAYS = [dt.date(2020, 1, 1), dt.date(2021, 12, 31)]
DAY = continuous(DAYS, outside="refuse")
RANGES = {"design": "case1", "anchors": {"name": "uniform", "loc": 18262, "scale": 730}}


def schema(**columns):
    return dpdask.Schema.from_dict({"columns": columns})


def read_page(card, folder):
    dpdask.write_page(card, folder / "page.html")
    return Page.read((folder / "page.html").read_bytes())


def test_a_frame_has_a_page(tmp_path):
    frame = pd.DataFrame({"day": pd.date_range(*DAYS), "x": [0, 1] * 365 + [0]})
    columns = schema(day=DAY, x=discrete([0, 1]))
    fitted = dpdask.DIP(columns, epsilon=1.0, reference=dpdask.Histogram()).fit(
        frame.sample(frac=1, ignore_index=True, random_state=1)
    )
    page = read_page({**fitted.card, "name": EVIL, "about": {"issuer": "The clinic"}}, tmp_path)
    for told in (
        fitted.card["guarantee"]["text"],
        "Issued by The clinic",
        "2020-01-01 to 2021-12-31",
        "made from the card alone",
        "x: 2 levels. A level",
    ):
        assert told in page.text
    shown = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<strong>Protected:</strong> the values of all rows" in shown
    assert "<strong>Not protected:</strong> none;" in shown
    earlier = {key: value for key, value in fitted.card["guarantee"].items() if key != "parts"}
    (tmp_path / "earlier").mkdir()
    old = read_page({**fitted.card, "guarantee": earlier}, tmp_path / "earlier")
    assert earlier["text"] in old.text
    assert not page.all("script")
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert not ids & {"analysis", "files"}
    with pytest.raises(dpdask.OutputError, match="there already"):
        read_page(fitted.card, tmp_path)
    with pytest.raises(dpdask.InputError, match="not a release card"):
        dpdask.write_page({}, tmp_path / "other.html")


def test_a_page_that_cannot_be_made_of_a_card_is_told(tmp_path, monkeypatch):
    survey = dpdask.Survey(
        schema(day={**DAY, "type": "date32"}),
        columns={"day": RANGES},
        wording={"day": {"of": "the day of your visit"}},
    )
    monkeypatch.setattr(render, "list_uses", lambda _: 1 / 0)
    with pytest.warns(UserWarning, match="promise alone"):
        page = read_page(survey.card, tmp_path)
    assert survey.card["guarantee"]["text"] in page.text


def test_a_saved_release_has_a_page(tmp_path):
    columns = schema(x=categorical(["a", "b"]))
    tables = dpdask.Marginals(columns, epsilon=1.0, cliques=[["x"]]).fit(
        pd.DataFrame({"x": ["a", "b"] * 50})
    )
    tables.save(str(tmp_path / "saved"))
    assert (
        tables.card["guarantee"]["text"]
        in Page.read((tmp_path / "saved" / "release.html").read_bytes()).text
    )
    assert dpdask.MarginalsRelease.load(str(tmp_path / "saved")).margin("x") == tables.margin("x")


def test_a_survey_has_a_page(tmp_path):
    survey = dpdask.Survey(
        schema(day={**DAY, "type": "date32"}),
        columns={"day": RANGES},
        wording={"day": {"of": "the day of your visit"}},
    )
    page = read_page(survey.card, tmp_path)
    assert survey.card["guarantee"]["text"] in page.text
    assert "Trust: nobody. Each value was randomised where it was asked" in page.text
    assert "2020-01-01 to 2021-12-31" in page.text


def test_a_page_of_ranges_of_dates_shows_dates(tmp_path):
    columns = {
        name: column if name == "day" else {"role": "drop"}
        for name, column in refusing(SCHEMA).items()
    }
    output = release(
        tmp_path,
        schema=columns,
        privacy=None,
        mechanism={"kind": "interval", "columns": {"day": RANGES}},
    )
    assert "2020-01-01 to 2022-01-08" in Page.read((output / PAGE_NAME).read_bytes()).text
