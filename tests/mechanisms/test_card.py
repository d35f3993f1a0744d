"""The card's envelope: one format for all mechanisms, the JSON Schema in the package, and one reader."""

import datetime as dt
import json
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, schema_of

import dpdask
from dpdask.errors import InputError
from dpdask.mechanisms.card import (
    Card,
    CoveredRows,
    Section,
    make_card,
    noisy_counts_section,
    plain,
)
from dpdask.privacy import Budget, noisy_counts_text
from dpdask.privacy.budget import say_part
from dpdask.privacy.ledger_entries import Coverage
from dpdask.schema import Schema

SCHEMA = schema_of(
    {
        "x": discrete([0, 1, 2], type="int64"),
        "day": categorical([dt.date(2026, 1, 1), dt.date(2026, 1, 2)], type="date32"),
        "price": continuous([0.0, 1.0], type="float64"),
    }
)
BUDGET = Budget(epsilon=2.0, delta=1e-6)
SEED = 5


def table(n_rows=300):
    rng = np.random.default_rng(1)
    days = [dt.date(2026, 1, 1 + each) for each in rng.integers(0, 2, n_rows)]
    return pd.DataFrame(
        {
            "x": rng.integers(0, 3, n_rows),
            "day": pd.array(days, dtype="date32[pyarrow]"),
            "price": rng.random(n_rows),
        }
    )


def small(**changed):
    rows = CoveredRows(who="every row", fraction=1.0, of="rows")
    parts = {
        "budget": BUDGET,
        "text": "a promise",
        "protected": rows,
        "unprotected": rows,
        "mechanism": {"kind": "test"},
    }
    parts |= {
        "columns": {"x": {"role": "privatised", "levels": (1, 2)}},
        "accounting": {"composition": "one", "epsilon_exact": 2.0},
        "order": "none",
    }
    return make_card(Section(**parts | changed), name="test", insecure=False)


def test_a_release_without_an_epsilon_says_so():
    found = small(budget=None).to_dict()["guarantee"]
    assert [found[key] for key in ("epsilon", "delta", "adjacency", "unit", "cautions")] == [
        None,
        None,
        None,
        "value",
        [],
    ]


def test_plain_values_are_what_json_has():
    value = {
        "a": (1, 2.5, math.inf, -math.inf, math.nan),
        "b": [None, True, "x", dt.date(2026, 1, 2)],
    }
    assert plain(value) == {
        "a": [1, 2.5, "inf", "-inf", "nan"],
        "b": [None, True, "x", "2026-01-02"],
    }


def test_batches_and_the_dataset_are_told():
    card = small()
    assert card.with_dataset(Coverage()) is card
    told = card.with_dataset(Coverage(uncovered=0.25, columns=("x",))).with_batches(
        ["a", None], epsilon=True
    )
    assert (told.dataset.uncovered_fraction, told.dataset.columns_without_epsilon) == (0.25, ["x"])
    assert told.guarantee.text == f"a promise {told.batches.text}"
    assert Card.read(told.to_bytes(), "card") == told
    assert card.with_batches(["a"], epsilon=True).guarantee == card.guarantee
    assert told.guarantee.parts is card.guarantee.parts is None  # as on cards of earlier versions
    parts = small(text=noisy_counts_text(Budget(epsilon=1.0))).with_batches(
        ["a", None], epsilon=True
    )
    told = [say_part((each.part, each.text)) for each in parts.guarantee.parts or ()]
    assert (" ".join(told), len(told)) == (parts.guarantee.text, 6)
    assert "dataset" not in card.to_dict()
    assert "batches" not in card.to_dict()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[]", b'"text"', b"\xff", b"{}", b"[" * 100_000, b'{"form": 2}']
)
def test_what_is_no_card_is_refused(data):
    with pytest.raises(InputError, match=r"^release\.json: this is no"):
        Card.read(data, "release.json")


@pytest.mark.parametrize("format_", [999, 0, 1, "2", 2.0, True, None, [2], 10**50])
def test_another_format_is_refused(format_):
    with pytest.raises(InputError, match="this card has") as refused:
        Card.read(small().to_dict() | {"format": format_}, "release.json")
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("further", 1),
        ("name", None),
        ("guarantee", {}),
        ("columns", {"x": {}}),
        ("columns", {"x": {"role": "dropped"}}),
        ("mechanism", {}),
        ("accounting", {"composition": "one"}),
        ("insecure", "yes"),
        ("n_rows", {"value": math.nan, "exact": True}),
    ],
)
def test_a_card_with_a_wrong_part_is_refused(part, value):
    with pytest.raises(InputError, match=r"^release\.json: this is not a release card") as refused:
        Card.read(small().to_dict() | {part: value}, "release.json")
    assert "\n" not in str(refused.value)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "kind",
    [
        dpdask.GaussianCopula,
        dpdask.PerturbedHistogram,
        partial(dpdask.Marginals, cliques=[["x", "day"]]),
    ],
)
def test_a_saved_release_with_a_card_of_another_format_is_refused(kind, tmp_path):
    schema = Schema(columns={"x": SCHEMA.columns["x"], "day": SCHEMA.columns["day"]})
    release = kind(schema, epsilon=2.0, insecure_seed=SEED).fit(table()[["x", "day"]])
    release.save(str(tmp_path / "saved"))
    assert type(release).load(str(tmp_path / "saved")).card == release.card
    path = tmp_path / "saved" / "card.json"
    assert Card.read(path.read_bytes(), "card.json").sha256 is not None
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"format": 999}), encoding="utf-8"
    )
    with pytest.raises(InputError, match="this card has format 999, not 2"):
        type(release).load(str(tmp_path / "saved"))


def test_cautions_depend_on_public_rows_alone():
    budget = Budget(epsilon=1.0, delta=0.5, adjacency="add-remove")
    parts = {
        "mechanism": {"kind": "test"},
        "schema": SCHEMA,
        "cells": {},
        "accounting": {"composition": "", "epsilon_exact": 1.0},
    }
    private = make_card(
        noisy_counts_section(budget=budget, n_rows=100.0, **parts), name="test", insecure=False
    )
    assert (private.guarantee.cautions, private.n_rows and private.n_rows.exact) == ([], False)
    public = budget.model_copy(update={"adjacency": "replace-one"})
    [caution] = make_card(
        noisy_counts_section(budget=public, n_rows=100.0, **parts), name="test", insecure=False
    ).guarantee.cautions
    assert caution.startswith("δ = 0.5 is not below 1 / the number of rows")
