"""Decimals are released by every mechanism: in their own type, with the distribution of the table."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import categorical, continuous, run_here, write_job

import dpdask

CENTS = pa.decimal128(10, 2)
PRICE = continuous([0, 1000], nulls="level")
TOWN = categorical(["A", "B"])
UNIFORM = {"name": "expon", "loc": 0, "scale": 30}
RELEASES = {
    "laplace": {"kind": "dip", "reference": {"kind": "histogram"}},
    "optimal": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
    "holdout": {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.2}},
    "chain": {"kind": "dip", "reference": {"kind": "chain", "fraction": 0.2}},
    "tree": {"kind": "dip", "reference": {"kind": "tree"}},
    "copula": {"kind": "copula"},
    "marginals": {"kind": "marginals", "cliques": [["price", "town"]]},
    "cells": {"kind": "histogram"},
    "records": {"kind": "histogram", "output": "rows"},
    "ranges": {
        "kind": "interval",
        "columns": {"price": {"design": "case2", "anchors": UNIFORM, "nulls": "public"}},
    },
}


@pytest.fixture(scope="module")
def prices():
    """Return cents: log-normal, a fifth of them 9.99, some missing."""
    rng = np.random.default_rng(1)
    found = np.round(np.exp(rng.normal(3, 1, 10_000)) * 100).clip(0, 99_999).astype(int)
    found[:2_000] = 999
    return [
        None if row % 50 == 0 else Decimal(int(cents)).scaleb(-2) for row, cents in enumerate(found)
    ]


@pytest.mark.parametrize("name", RELEASES)
def test_a_column_of_decimals_is_released_by_each_mechanism(name, prices, tmp_path):
    mechanism = RELEASES[name]
    town = np.random.default_rng(2).choice(["A", "B"], len(prices))
    pq.write_table(
        pa.table({"price": pa.array(prices, CENTS), "town": town}), tmp_path / "in.parquet"
    )
    schema = {"price": PRICE, "town": TOWN}
    delta = 1e-6 if name in ("tree", "copula", "marginals") else 0
    privacy = {"epsilon": 4.0, "delta": delta, "adjacency": "replace-one"}
    if name == "ranges":
        schema, privacy = {"price": PRICE | {"outside": "refuse"}, "town": {"role": "keep"}}, None
    run_here(
        write_job(
            tmp_path,
            tmp_path / "in.parquet",
            tmp_path / "out",
            schema=schema,
            mechanism=mechanism,
            privacy=privacy,
        )
    )
    opened = dpdask.open(str(tmp_path / "out"))
    if name in ("cells", "ranges", "marginals"):  # points, ends and tables, which are floats
        assert name == "marginals" or pa.float64() in opened._types.types
    else:
        assert opened._types.field("price").type == CENTS
        least, most = (
            float(end) for end in (opened.to_pandas()["price"].dropna().agg(["min", "max"]))
        )
        assert 0 <= least < most <= 1000
    known = np.array([float(price) for price in prices if price is not None])
    found = opened.quantile("price", 0.5)
    assert float(found.estimate) == pytest.approx(np.median(known), rel=0.1)
    counted = opened.histogram("price", [0, 10, 50, 1000])
    truth = np.histogram(known, [0, 10.005, 50.005, 1001])[0]
    if name == "ranges":  # which hardly tell 9.99 and 10 apart
        low, high = counted.interval(0.999)
        assert ((low <= truth) & (truth <= high)).all()
    else:
        counts = counted.estimate.to_numpy(dtype=float)
        assert counts / counts.sum() == pytest.approx(truth / len(known), abs=0.08)
    assert (tmp_path / "out/_dpdask/release.html").exists()
