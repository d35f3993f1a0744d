"""The release card: what it promises agrees with what was fitted, and it names who is not protected."""

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpdask.codec import codec_for
from dpdask.mechanisms import fit_dip
from dpdask.privacy import Budget, split_epsilon
from dpdask.references import Holdout, Known, Public, Reference, from_statistic
from dpdask.reports import release_card
from dpdask.schema import Schema
from dpdask.stats import LevelCounts, RankSummary

SCHEMA = Schema.from_dict(
    {
        "columns": {
            "id": {"role": "keep"},
            "x": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3], "nulls": "level"},
            "word": {"role": "privatise", "kind": "categorical", "levels": ["b", "a"]},
            "price": {"role": "privatise", "kind": "mixed", "atoms": [0.0], "bounds": [0.0, 10.0]},
            "secret": {"role": "drop"},
        }
    }
)
TYPES = {"x": pa.int32(), "word": pa.string(), "price": pa.float64()}
CODECS = {name: codec_for(name, SCHEMA.columns[name], type_) for name, type_ in TYPES.items()}
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


def card(reference: Reference = HOLDOUT, epsilon: float = 1.0, insecure: bool = False, release: Any = None) -> dict[str, Any]:
    return json.loads(raw(reference, epsilon, insecure, release))


def raw(reference: Reference = HOLDOUT, epsilon: float = 1.0, insecure: bool = False, release: Any = None) -> bytes:
    epsilons = split_epsilon(epsilon, SCHEMA.privatised)
    return release_card(
        name="test",
        budget=Budget(epsilon=epsilon),
        reference=reference,
        channel="laplace",
        schema=SCHEMA,
        codecs=CODECS,
        epsilons=epsilons,
        release=release or fit_dip({name: KNOWN.distribution(codec) for name, codec in CODECS.items()}, CODECS, epsilons),
        insecure=insecure,
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_exact_epsilon_never_passes_the_promised_one(epsilon):
    found = card(epsilon=epsilon)
    parts = [found["columns"][name] for name in SCHEMA.privatised]
    assert found["guarantee"]["epsilon"] == epsilon
    assert all(0 < part["epsilon_exact"] <= part["epsilon"] for part in parts)
    assert math.fsum(part["epsilon"] for part in parts) <= epsilon
    assert max(part["epsilon_exact"] for part in parts) < found["accounting"]["epsilon_exact"] <= epsilon
    assert math.isclose(math.fsum(part["epsilon_exact"] for part in parts), found["accounting"]["epsilon_exact"])


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
    assert "Protected: the values of the released rows." in text
    assert "Not protected: the held-out rows, 0.25 of the table: they are not released" in text
    assert "the published channel reveals their frequencies" in text
    assert "a person with k rows is protected by k·ε" in text
    found = card(HOLDOUT)["guarantee"]
    assert found["protected"] == {"who": "the values of the released rows", "fraction": 0.75}
    assert found["unprotected"]["fraction"] == 0.25
    assert found["unprotected"]["who"] in text


@pytest.mark.parametrize(
    ("reference", "who"), [(KNOWN, "nobody"), (Public(path="s3://lake/zebulon"), "the rows of the public reference table")], ids=["known", "public"]
)
def test_all_rows_are_protected_by_a_reference_from_elsewhere(reference, who):
    found = card(reference)
    assert found["guarantee"]["protected"] == {"who": "the values of all rows", "fraction": 1.0}
    assert found["guarantee"]["unprotected"]["fraction"] == 0.0
    assert f"Not protected: {who}" in found["guarantee"]["text"]
    assert "zebulon" not in json.dumps(found)


def test_a_seeded_release_is_marked_in_its_first_word():
    assert card(insecure=True)["insecure"] is True
    assert card(insecure=True)["guarantee"]["text"].startswith("INSECURE: ")
    assert card()["insecure"] is False
    assert "INSECURE" not in card()["guarantee"]["text"]


def test_no_knot_of_a_hold_out_and_no_dropped_column_is_in_it():
    values = np.array([0.0, HELD_OUT_VALUE, 1.5, 2.5])
    statistics = {
        "x": LevelCounts.of_batch(CODECS["x"], pa.array([1, 2, 3, None], pa.int32())),
        "word": LevelCounts.of_batch(CODECS["word"], pa.array(["a", "b", "a", "b"])),
        "price": RankSummary.of_batch(CODECS["price"], pa.array(values)),
    }
    epsilons = split_epsilon(1.0, SCHEMA.privatised)
    release = fit_dip({name: from_statistic(CODECS[name], statistic) for name, statistic in statistics.items()}, CODECS, epsilons)
    text = raw(release=release).decode()
    assert str(HELD_OUT_VALUE) not in text
    assert "secret" not in text
    assert json.loads(text)["columns"]["price"]["bounds"] == [0.0, 10.0]
    assert json.loads(text)["columns"]["price"]["atoms"] == [0.0]


def test_the_same_release_has_the_same_bytes():
    assert raw() == raw()
    assert card()["format"] == 1
    assert card()["columns"]["id"] == {"role": "kept"}


def test_little_protection_is_called_so():
    assert "no protection worth the name" in card(epsilon=3.0)["guarantee"]["text"]
    assert "no protection worth the name" not in card(epsilon=2.0)["guarantee"]["text"]
    assert "at most 13.6 %" in card()["guarantee"]["text"]
