"""`dpdask.IntervalMechanism` on Dask and pandas frames: lazy, repeatable, true."""

from __future__ import annotations

import json
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dpdask
from dpdask.mechanisms.interval import Ranges
from dpdask.mechanisms.interval_design import Case1, IntervalColumns, Law
from dpdask.mechanisms.interval_fit import interval_mechanism, outline
from dpdask.mechanisms.interval_release import IntervalRelease

LEVELS = [1.0, 2.0, 3.0, 4.0, 5.0]
COLUMNS: dict[str, Any] = {
    "user": {"role": "keep"},
    "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
    "price": {"role": "privatise", "kind": "continuous", "nulls": "level"},
    "note": {"role": "drop"},
}
DESIGNS: dict[str, Any] = {
    "rating": {"design": "case2", "anchors": {"name": "uniform", "loc": 0.5, "scale": 5}},
    "price": {"design": "case1", "anchors": {"name": "norm", "loc": 20, "scale": 10}, "nulls": "public", "reference": {"name": "norm", "loc": 20}},
}


def mechanism(columns: dict[str, Any] = COLUMNS, designs: dict[str, Any] = DESIGNS, **options: Any) -> dpdask.IntervalMechanism:
    return dpdask.IntervalMechanism(dpdask.Schema.from_dict({"columns": columns}), columns=designs, **options)


@pytest.fixture
def table() -> pd.DataFrame:
    rng, n = np.random.default_rng(5), 3000
    price = rng.normal(20, 5, n)
    price[::7] = np.nan
    return pd.DataFrame(
        {"user": np.arange(n, dtype=np.int32), "rating": rng.choice(LEVELS, n), "price": price, "note": ["secret"] * n},
        index=pd.Index(np.arange(n) * 2),
    )


def check(released: pd.DataFrame, table: pd.DataFrame) -> None:
    assert list(released.columns) == ["user", "rating_lower", "rating_upper", "price_lower", "price_upper"]
    pd.testing.assert_series_equal(released["user"], table["user"])
    for name in ("rating", "price"):
        lower, upper = (released[f"{name}_{end}"] for end in ("lower", "upper"))
        assert lower.dtype == upper.dtype == np.float64
        is_null = table[name].isna().to_numpy()
        assert (lower.isna() == is_null).all()
        inside = Ranges(lower=lower.to_numpy(), upper=upper.to_numpy(), is_null=is_null).contain(table[name].fillna(0.0).to_numpy())
        assert (inside | is_null).all()


def test_pandas_at_once_and_dask_lazily(table: pd.DataFrame) -> None:
    check(mechanism().privatise(table), table)
    frame = dd.from_pandas(table, npartitions=3)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was computed")

    with dask.config.set(scheduler=refuse):
        lazy = mechanism().privatise(frame)
    assert lazy.divisions == frame.divisions
    with dask.config.set(scheduler="synchronous"):
        check(lazy.compute(), table)


def test_the_same_frame_gives_the_same_ranges_and_another_mechanism_others(table: pd.DataFrame) -> None:
    frame, made = dd.from_pandas(table, npartitions=3), mechanism()
    with dask.config.set(scheduler="synchronous"):
        lazy = made.privatise(frame)
        first = lazy.compute()
        pd.testing.assert_frame_equal(first, lazy.compute())
        pd.testing.assert_frame_equal(first, made.privatise(frame).compute())
        assert not first["rating_lower"].equals(mechanism().privatise(frame).compute()["rating_lower"])
    pd.testing.assert_frame_equal(made.privatise(table), made.privatise(table))
    seeded = [mechanism(insecure_seed=3).privatise(table) for _ in range(2)]
    pd.testing.assert_frame_equal(*seeded)


def test_the_card_is_json_without_an_epsilon(table: pd.DataFrame) -> None:
    card = mechanism().card
    json.dumps(card, allow_nan=False)
    assert card["guarantee"]["epsilon"] is None
    assert not card["insecure"]
    assert 0.5 < card["columns"]["price"]["mean_coverage"] < 1.0
    assert "which values are missing" in card["columns"]["price"]["unprotected"]


def test_documents_do_as_designs(table: pd.DataFrame) -> None:
    columns = {"price": {"role": "privatise", "kind": "continuous"}}
    design = Case1(design="case1", anchors=Law(name="uniform", loc=0, scale=40))
    released = mechanism(columns, {"price": design}).privatise(table[["price"]].dropna())
    assert list(released.columns) == ["price_lower", "price_upper"]


def test_what_does_not_fit_is_refused(table: pd.DataFrame) -> None:
    with pytest.raises(dpdask.SpecError, match=r"column 'price': has no design; add it to columns"):
        mechanism(designs={"rating": DESIGNS["rating"]})
    with pytest.raises(dpdask.SpecError, match="did you mean 'anchors'"):
        mechanism(designs={**DESIGNS, "rating": {"design": "case2", "anchor": {}}})
    with pytest.raises(dpdask.SpecError, match="privatises no column"):
        mechanism({"user": {"role": "keep"}}, {})
    with pytest.raises(dpdask.SpecError, match="norml"):
        mechanism(designs={**DESIGNS, "rating": {"design": "case1", "anchors": {"name": "norml"}}}).privatise(table)
    with pytest.raises(dpdask.DataError, match="a value outside its levels"):
        mechanism().privatise(table.assign(rating=9.0))


def test_closed_means_that_nothing_more_is_drawn(table: pd.DataFrame) -> None:
    made = mechanism()
    made.close()
    with pytest.raises(dpdask.DpdaskError):
        made.privatise(table)


PLAIN: dict[str, Any] = {"anchors": {"name": "norm"}}
OUTLINED: list[dict[str, Any]] = [
    {"design": "case1", **PLAIN},
    {"design": "case2", **PLAIN, "nulls": "public"},
    {"design": "ring", **PLAIN},
    {"design": "canonical", **PLAIN, "n_anchors": 3, "exact_ranges": [2]},
    {"design": "canonical", **PLAIN, "n_anchors": 1, "acceptable": [[0, 1]]},
    {"design": "progressive", **PLAIN, "tau": 0.2, "reference": {"name": "norm"}},
    {"design": "progressive", **PLAIN, "tau": 0.2, "reference": {"name": "norm"}, "stop": "own"},
    {"design": "selective", "of": {"design": "case2", **PLAIN}, "tau": 0.3, "reference": {"name": "norm"}},
    {"design": "ensemble", "of": [{"design": "case1", **PLAIN}, {"design": "canonical", **PLAIN, "n_anchors": 2, "exact_ranges": [1]}]},
]


@pytest.mark.parametrize("design", OUTLINED, ids=lambda design: design["design"])
def test_an_outline_says_what_its_mechanism_says(design: dict[str, Any]) -> None:
    document = IntervalColumns.model_validate({"columns": {"y": design}}).columns["y"]
    made, outlined = interval_mechanism("y", document), outline("y", document)
    assert (outlined.protected, outlined.unprotected) == (made.protected, made.unprotected)


@pytest.mark.parametrize("design", OUTLINED, ids=lambda design: design["design"])
def test_a_release_comes_back_from_its_bytes(design: dict[str, Any]) -> None:
    document = IntervalColumns.model_validate({"columns": {"y": design}}).columns["y"]
    release = IntervalRelease(designs={"y": document}, lattice={"y": True})
    again = IntervalRelease.from_bytes(release.to_bytes(), "designs")
    assert again.designs == release.designs
    assert again.to_bytes() == release.to_bytes()
    with pytest.raises(dpdask.InputError, match="another version"):
        IntervalRelease.from_bytes(release.to_bytes().replace(b'"format": 1', b'"format": 2'), "designs")
