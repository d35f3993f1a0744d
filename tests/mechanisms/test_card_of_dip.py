"""The release card: what it promises agrees with what was fitted, and it names who is not protected."""

import json
import math
from fractions import Fraction

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import categorical, discrete, mixed, schema_of

import dpdask
from dpdask.codec import codec_for
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.dip.columns import fit_dip
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn, split_epsilon
from dpdask.privacy.events import DiscreteLaplace, LocalRelease, from_dict, leaves
from dpdask.privacy.events import epsilon as epsilon_of
from dpdask.references import Histogram, Holdout, Known, Public, from_statistic
from dpdask.stats import LevelCounts, RankSummary

SCHEMA = schema_of(
    {
        "id": {"role": "keep"},
        "x": discrete([1, 2, 3], nulls="level"),
        "word": categorical(["b", "a"]),
        "price": mixed(atoms=[0.0], bounds=[0.0, 10.0]),
        "secret": {"role": "drop"},
    }
)
TYPES = {"x": pa.int32(), "word": pa.string(), "price": pa.float64()}
CODECS = {name: codec_for(name, SCHEMA.columns[name], type_) for name, type_ in TYPES.items()}
TABLE = Columns(types=pa.schema({"id": pa.int64(), **TYPES}), codecs=CODECS)
KNOWN = Known.model_validate(
    {
        "kind": "known",
        "columns": {
            "x": {"probabilities": [0.1, 0.2, 0.3, 0.4]},
            "word": {"probabilities": [0.5, 0.5]},
            "price": {"name": "uniform", "scale": 10.0, "probabilities": [0.5]},
        },
    }
)
HOLDOUT = Holdout(fraction=0.25)
HELD_OUT_VALUE = 7.123456789


def card(*given, **named):
    return json.loads(raw(*given, **named))


def raw(reference=HOLDOUT, epsilon=1.0, insecure=False, release=None, unit="row"):
    mechanism = bind(DipSpec(reference=reference), SCHEMA, Budget(epsilon=epsilon, unit=unit))
    if release is None:
        release = fit_dip(
            {name: KNOWN.distribution(codec) for name, codec in CODECS.items()},
            CODECS,
            mechanism.spending.row,
        )
    section = mechanism.description.section(
        release, TABLE, n_rows=None, n_released=None, order="keep"
    )
    return make_card(section, name="test", insecure=insecure).to_bytes()


def test_a_channel_is_row_stochastic_keeps_its_reference_and_its_epsilon():
    found = card()
    for name, probabilities in (("x", [0.1, 0.2, 0.3, 0.4]), ("word", [0.5, 0.5])):
        column = found["columns"][name]
        T = np.array(column["channel"])
        assert T.shape == (len(column["levels"]),) * 2
        np.testing.assert_allclose(T.sum(axis=1), 1, atol=1e-12)
        np.testing.assert_allclose(np.array(probabilities) @ T, probabilities, atol=1e-9)
        exact = np.log(T.max(axis=0) / T.min(axis=0)).max()
        assert exact <= column["epsilon_exact"] * (1 + 1e-12)
        assert math.isclose(exact, column["epsilon_exact"], rel_tol=1e-9)
    assert found["columns"]["x"]["levels"] == [None, 1, 2, 3]
    assert found["columns"]["word"]["levels"] == ["b", "a"]


def test_the_text_names_who_is_not_protected():
    text = card(HOLDOUT)["guarantee"]["text"]
    assert "ε = 1 differentially private" in text
    assert (
        "Protected: the values of the released rows; a person with k released rows is protected by k·ε."
        in text
    )
    assert "Not protected: the held-out rows, 0.25 of the table" in text
    assert (
        "a level column's published channel reveals exactly how many of them have each level"
        in text
    )
    assert "a person with k released rows is protected by k·ε" in text
    found = card(HOLDOUT)["guarantee"]
    assert found["protected"] == {
        "who": "the values of the released rows",
        "fraction": 0.75,
        "of": "rows",
    }
    assert found["unprotected"]["fraction"] == 0.25
    assert found["unprotected"]["who"] in text


@pytest.mark.parametrize(
    ("reference", "who"),
    [(KNOWN, "none"), (Public(path="s3://lake/zebulon"), "the rows of the public reference table")],
    ids=["known", "public"],
)
def test_all_rows_are_protected_by_a_reference_from_elsewhere(reference, who):
    found = card(reference)
    assert found["guarantee"]["protected"] == {
        "who": "the values of all rows",
        "fraction": 1.0,
        "of": "rows",
    }
    assert found["guarantee"]["unprotected"]["fraction"] == 0.0
    assert f"Not protected: {who}" in found["guarantee"]["text"]
    assert "zebulon" not in json.dumps(found)


def test_a_histogram_covers_all_rows_and_its_epsilon_is_in_the_sum():
    found = card(Histogram(share=0.25), epsilon=2.0)
    assert found["guarantee"]["protected"] == {
        "who": "the values of all rows",
        "fraction": 1.0,
        "of": "rows",
    }
    assert found["guarantee"]["unprotected"]["fraction"] == 0.0
    assert found["mechanism"]["reference"] == {
        "kind": "histogram",
        "share": 0.25,
        "bins": "adaptive",
    }
    accounting = found["accounting"]
    assert sum(map(Fraction, accounting["epsilon_reference"].values())) <= Fraction(0.5)
    assert math.isclose(math.fsum(accounting["epsilon_reference"].values()), 0.5)
    assert accounting["rows_per_unit"] == 1
    assert 0.5 < accounting["epsilon_exact"] <= 2.0
    *histograms, rows = leaves(from_dict(accounting["events"]))
    assert [type(event) for event in (*histograms, rows)] == [DiscreteLaplace] * 3 + [LocalRelease]
    assert accounting["epsilon_exact"] <= epsilon_of([*histograms, rows], 0.0) <= 2.0


def test_the_events_cost_what_is_promised_to_a_unit_of_many_rows():
    found = card(Histogram(), epsilon=2.0, unit=UnitColumn(column="id", max_rows=7))
    assert found["guarantee"]["unit"] == {"column": "id", "max_rows": 7}
    assert found["accounting"]["rows_per_unit"] == 7
    parts = [found["columns"][name]["epsilon"] for name in SCHEMA.privatised]
    assert math.isclose(7 * math.fsum(parts), 1.8)
    exact = sum(map(Fraction, found["accounting"]["epsilon_reference"].values()))
    exact += 7 * sum(
        Fraction(found["columns"][name]["epsilon_exact"]) for name in SCHEMA.privatised
    )
    assert exact <= Fraction(found["accounting"]["epsilon_exact"])
    assert math.isclose(exact, found["accounting"]["epsilon_exact"])
    assert (
        found["accounting"]["epsilon_exact"]
        <= epsilon_of(from_dict(found["accounting"]["events"]), 0.0)
        <= 2.0
    )
    assert "All private values of all released rows that share a id" in found["guarantee"]["text"]
    assert found["guarantee"]["protected"]["of"].startswith("units; ")
    assert "at most 7 are released" in found["guarantee"]["text"]


def test_no_knot_of_a_hold_out_and_no_dropped_column_is_in_it():
    values = np.array([0.0, HELD_OUT_VALUE, 1.5, 2.5])
    statistics = {
        "x": LevelCounts.of_batch(CODECS["x"], pa.array([1, 2, 3, None], pa.int32())),
        "word": LevelCounts.of_batch(CODECS["word"], pa.array(["a", "b", "a", "b"])),
        "price": RankSummary.of_batch(CODECS["price"], pa.array(values)),
    }
    epsilons = split_epsilon(1.0, SCHEMA.privatised)
    release = fit_dip(
        {name: from_statistic(CODECS[name], statistic) for name, statistic in statistics.items()},
        CODECS,
        epsilons,
    )
    text = raw(release=release).decode()
    assert str(HELD_OUT_VALUE) not in text
    assert "secret" not in text
    assert json.loads(text)["columns"]["price"]["bounds"] == [0.0, 10.0]
    assert json.loads(text)["columns"]["price"]["atoms"] == [0.0]


def test_cards_of_frames_say_what_protects_little():
    schema = schema_of({name: discrete([0, 1]) for name in ("x", "y")})
    table = pd.DataFrame({"x": [0, 1] * 10, "y": [1, 0] * 10})
    with pytest.warns(UserWarning, match="publishing one random row verbatim"):
        release = dpdask.Marginals(schema, epsilon=4.0, delta=0.2, cliques=[["x"]]).fit(table)
    large, verbatim = release.card["guarantee"]["cautions"]
    assert large.startswith("ε = 4 is large")
    assert "publishing one random row verbatim" in verbatim
    perturb = {"epsilon": 8.0, "reference": {"kind": "known", "probabilities": [0.5, 0.5]}}
    anchors = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 1}}
    designs = {
        name: {"design": "interval-differential", "perturb": perturb, "of": anchors}
        for name in ("x", "y")
    }
    [large] = (
        dpdask.IntervalMechanism(schema, columns=designs).fit(table).card["guarantee"]["cautions"]
    )
    assert large.startswith("ε = 16 is large")


def test_divisions_name_no_row_that_is_held_out():
    schema = schema_of(
        {
            "who": {"role": "keep"},
            "x": discrete([0, 1]),
        }
    )
    table = pd.DataFrame(
        {"x": [0, 1] * 50}, index=pd.Index([f"p{number:03}" for number in range(100)], name="who")
    )
    frame = dd.from_pandas(table, npartitions=4)
    assert frame.known_divisions
    held = (
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.5))
        .fit(frame)
        .transform(frame)
    )
    assert not held.known_divisions
    whole = (
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(frame).transform(frame)
    )
    assert whole.divisions == frame.divisions
