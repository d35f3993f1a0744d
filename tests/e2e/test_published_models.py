"""The model that a copula's job publishes, and records that are drawn from it: on conditions, by any scheduler, without a job."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from dataclasses import replace
from typing import Any
from unittest import mock

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
from distributed import Client
from e2e.helpers import call_cli, digests, processes, run_here
from shelf import HOMES_PRIVATE, KINDS

import dpdask
from dpdask.cells import cells
from dpdask.codec import codec_for
from dpdask.errors import InputError, OutputError, SpecError, TemporaryError
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.rules import Condition
from dpdask.schema import Schema
from dpdask.streams import RunKey

WHERE = 'town = "C" and price >= 72.5'


@pytest.fixture(scope="module")
def opened(shelf):
    return shelf.opened("homes, model")


@pytest.fixture(scope="module")
def model(shelf):
    data = (shelf.release("homes, model") / "_dpdask" / "model.npz").read_bytes()
    return FittedCopula.from_bytes(data, "model.npz")


def meets(rows):
    return (rows["town"] == "C") & (rows["price"] >= 72.5)


# ---- what a job publishes


def test_card_and_manifest_name_the_model(shelf, model):
    meta = shelf.release("homes, model") / "_dpdask"
    data = (meta / "model.npz").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert shelf.card("homes, model")["sha256"]["model.npz"] == digest
    assert json.loads((meta / "manifest.json").read_text())["model_sha256"] == digest
    assert model.to_bytes() == data
    same = shelf.release("homes, copula") / "_dpdask"
    assert not (same / "model.npz").exists()
    assert "model_sha256" not in json.loads((same / "manifest.json").read_text())


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_a_run_that_crashed_publishes_the_same_model(format_, shelf, tmp_path):
    job = shelf.job("homes, model", tmp_path, output__format=format_)
    crash = mock.patch("dpdask.jobs.run.make_job_card", side_effect=TemporaryError("crash"))
    with crash, pytest.raises(TemporaryError):
        run_here(job)
    run_here(job)
    [found] = (tmp_path / "out" / "_dpdask").glob("model*.npz")
    whole = shelf.release("homes, model") / "_dpdask" / "model.npz"
    assert found.read_bytes() == whole.read_bytes()
    if format_ == "parquet":
        documents = {name for name in digests(tmp_path / "out") if "_dpdask" in name}
        assert "_dpdask/model.npz" in documents


def test_only_a_copula_has_a_model(shelf, tmp_path):
    job = shelf.job("homes, tables", tmp_path, output__model=True)
    found = call_cli("validate", job)
    assert found.returncode == SpecError.exit_code
    assert "output.model: this mechanism fits no model" in found.stderr
    assert "take the mechanism copula" in found.stderr


@pytest.mark.parametrize("name", ["homes, copula", "homes, dip", "homes, tables"])
def test_without_a_model_nothing_is_drawn(name, shelf, tmp_path):
    release = shelf.opened(name)
    for draw in (release.sample, lambda: release.write_sample(str(tmp_path / "s.parquet"))):
        with pytest.raises(SpecError, match=r"no model is published .*model: true"):
            draw()


def test_a_model_that_the_card_does_not_name_is_refused(shelf, tmp_path):
    place = shelf.copy("homes, model", tmp_path / "out")
    file = place / "_dpdask" / "model.npz"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="this model is not the one that the card names"):
        dpdask.open(str(place)).sample(10)


# ---- records


@pytest.mark.parametrize("where", [None, WHERE])
def test_a_seed_decides_the_records(where, opened, shelf, tmp_path):
    one = opened.sample(20_000, where=where, seed=5)
    pd.testing.assert_frame_equal(one, opened.sample(20_000, where=where, seed=5))
    assert not one.equals(opened.sample(20_000, where=where, seed=6))
    files = []
    for number in range(2):
        files.append(tmp_path / f"{number}.parquet")
        given = [] if where is None else ["--where", where]
        words = ["--rows", 20_000, "--seed", 5, *given, "--output", files[-1]]
        found = call_cli("sample", shelf.release("homes, model"), *words)
        assert found.returncode == 0
        share = 100 * one.attrs["acceptance"]
        told = "" if where is None else f"; {share:.3g} % of the model's records meet the condition"
        assert found.stdout == f"{files[-1]}: 20,000 records{told}\n"
    assert files[0].read_bytes() == files[1].read_bytes()
    pd.testing.assert_frame_equal(pq.read_table(files[0]).to_pandas(), one, check_dtype=False)


@pytest.fixture
def scheduler(request):
    """Set the scheduler of Dask, and start one of processes where that is asked for."""
    if request.param != "distributed":
        with dask.config.set(scheduler=request.param):
            yield
    else:
        with processes(1) as cluster, Client(cluster) as client:
            client.wait_for_workers(1)
            yield


@pytest.mark.parametrize("scheduler", ["synchronous", "threads", "distributed"], indirect=True)
@pytest.mark.usefixtures("scheduler")
def test_every_scheduler_and_partition_draws_the_same_records(model, opened):
    wanted = opened.sample(40_000, where=WHERE, seed=5)
    condition = model.condition(WHERE)
    starts = range(0, 40_000, 9_000)

    @dask.delayed
    def draw(at):
        n = min(9_000, 40_000 - at)
        return list(model.batches(at, n, 40_000, RunKey.insecure(5), "", condition))

    parts = [draw(at) for at in starts]
    found = dask.compute(*parts)
    rows = pa.Table.from_batches([each for part in found for each in part])
    pd.testing.assert_frame_equal(rows.to_pandas(), wanted, check_dtype=False)


def test_a_release_of_a_frame_draws_on_conditions_too(homes_release):
    first = homes_release.sample(5_000, where=WHERE, seed=2)
    frames = []
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            frames.append(first.compute())
    pd.testing.assert_frame_equal(*frames)
    other = homes_release.sample(5_000, where=WHERE, seed=2, rows_per_partition=700)
    with dask.config.set(scheduler="synchronous"):
        pd.testing.assert_frame_equal(other.compute(), frames[0])
    assert meets(frames[0]).all()


@pytest.fixture(scope="module")
def homes_release(shelf):
    table = pq.read_table(shelf.lake("homes")).to_pandas()
    schema = Schema.from_dict({"columns": HOMES_PRIVATE})
    given: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-9, "bins": 10, "insecure_seed": 1}
    with dpdask.GaussianCopula(schema, **given).fit(table) as release:
        yield release


def test_tables_are_drawn_without_conditions(shelf):
    table = pq.read_table(shelf.lake("homes"), columns=["town", "price"]).to_pandas()
    columns = {name: HOMES_PRIVATE[name] for name in ("town", "price")}
    estimator = dpdask.PerturbedHistogram(
        Schema.from_dict({"columns": columns}), epsilon=2.0, bins=3
    )
    with estimator.fit(table) as release, pytest.raises(SpecError, match="without conditions"):
        release.sample(10, where='town = "A"')


def compare(one, other):
    """Return the least p-value of chi-square tests that two tables of records have one law."""
    least = 1.0
    ends = np.quantile(other["price"], np.linspace(0, 1, 9)[1:-1])
    for pair in (["rating", "kind"], ["years", "place"]):
        both = [
            rows.assign(place=np.digitize(rows["price"], ends)).groupby(pair).size()
            for rows in (one, other)
        ]
        counts = pd.concat(both, axis=1).fillna(0).to_numpy()
        counts = counts[counts.sum(axis=1) > 20]
        least = min(least, scipy.stats.chi2_contingency(counts.T).pvalue)
    return least


@pytest.mark.parametrize("records", ["raked", "copula"])
def test_conditional_records_have_the_law_of_rejection(records, model):
    """A twentieth of other records would be found."""
    if records == "copula":
        model = replace(model, model=replace(model.model, targets=None))
    every = pa.Table.from_batches(model.batches(0, 2**20, 2**20, RunKey.insecure(1), ""))
    rows = every.to_pandas()
    wanted = rows[meets(rows)]
    n = 32_768
    blocks = list(model.draw_blocks(n, RunKey.insecure(2), model.condition(WHERE)))
    found = pa.Table.from_batches([each for part, _ in blocks for each in part]).to_pandas()
    assert meets(found).all()
    assert compare(found, wanted) > 1e-6
    mixed = pd.concat([found[n // 20 :], rows[: n // 20]])
    assert compare(mixed, wanted) < 1e-9
    share = np.mean([share for _, share in blocks])
    assert share == pytest.approx(len(wanted) / len(rows), rel=0.05)


@pytest.mark.parametrize("records", ["raked", "copula"])
def test_records_like_a_frame_have_the_law_of_rejection(records, model):
    """A twentieth of other records would be found; other rows of the frame change nothing."""
    if records == "copula":
        model = replace(model, model=replace(model.model, targets=None))
    every = pa.Table.from_batches(model.batches(0, 2**20, 2**20, RunKey.insecure(1), ""))
    rows, n = every.to_pandas(), 32_768
    rng = np.random.default_rng(1)
    town = np.where(np.arange(n) % 4 == 0, "C", rng.choice(["A", "B"], n))
    years = np.where(np.arange(n) % 4 == 0, 6, rng.integers(1, 9, n))
    frame = pd.DataFrame({"years": years, "town": town}).sample(frac=1.0, random_state=1)
    blocks = model.draw_blocks(n, RunKey.insecure(2), model.condition(frame))
    found = pa.Table.from_batches([each for part, _ in blocks for each in part]).to_pandas()
    assert (found[["years", "town"]].to_numpy() == frame.to_numpy()).all()
    one, wanted = (each[(each["town"] == "C") & (each["years"] == 6)] for each in (found, rows))
    assert len(one) >= n // 4
    assert compare(one, wanted) > 1e-6
    mixed = pd.concat([one[len(one) // 8 :], rows[: len(one) // 8]])
    assert compare(mixed, wanted) < 1e-9


def test_a_frame_gives_its_values_in_its_order(opened, homes_release):
    rng = np.random.default_rng(1)
    price = np.round(rng.uniform(0, 200, 20_000), 2)
    frame = pd.DataFrame({"price": price, "kind": rng.choice(["x", "y", "z"], 20_000)})
    frame["kind"] = frame["kind"].map(dict(zip("xyz", KINDS, strict=True)))
    frame.index += 7
    found = opened.sample(like=frame, seed=5)
    assert found[frame.columns].to_numpy().tolist() == frame.to_numpy().tolist()
    assert list(found) == list(opened.sample(1))
    assert found.index.equals(pd.RangeIndex(20_000))
    assert 0 < found.attrs["acceptance"] <= 1
    pd.testing.assert_frame_equal(found, opened.sample(like=pa.table(frame), seed=5))
    assert not found.equals(opened.sample(like=frame, seed=6))
    frames = [
        homes_release.sample(like=frame, seed=5, rows_per_partition=n).compute()
        for n in (20_000, 9_000)
    ]
    pd.testing.assert_frame_equal(*frames)


def test_a_frame_that_no_record_is_like_is_refused(opened, homes_release, shelf):
    frame = pd.DataFrame({"town": ["A", "B"], "price": [50.0, 60.0]})
    lazy = dd.from_pandas(frame, npartitions=1)
    for draw in (opened.sample, homes_release.sample):
        for like, says in (
            (frame.rename(columns={"town": "twn"}), "no column 'twn'; did you mean 'town'?"),
            (frame.assign(town=["A", "Z"]), "`like`, column 'town': a value is outside its domain"),
            (frame.assign(price=[50.0, 201.0]), "column 'price': a value is outside its domain"),
            (frame.assign(price=[50.0, np.nan]), "column 'price': a value is outside its domain"),
            (frame.assign(price="much"), "or has another type than double"),
            (frame[:0], "`like`: a frame in memory .* at least one row"),
            (lazy, "compute a lazy frame first"),
            (3, "a frame of pandas, Dask or polars"),
        ):
            with pytest.raises(SpecError, match=says):
                draw(like=like)
        for given in ({"n_rows": 2}, {"where": 'town = "A"'}):
            with pytest.raises(SpecError, match="the frame says how many records, and which"):
                draw(like=frame, **given)
    with pytest.raises(SpecError, match="no model is published"):
        shelf.opened("homes, copula").sample(like=frame)


def test_a_condition_that_almost_no_record_meets_is_refused(model):
    with pytest.raises(SpecError, match="fewer than 1 in 1,000,000"):
        model.draw_met(0, 10, RunKey.insecure(1), model.condition("price = 71.23456789"))


def test_rules_hold_in_conditional_records():
    columns: dict[str, Any] = {
        name: {"role": "privatise", "kind": "categorical", "levels": levels}
        for name, levels in (("sex", ["F", "M"]), ("role", ["wife", "husband", "child"]))
    }
    columns["age"] = {"role": "privatise", "kind": "continuous", "bounds": [0, 99]}
    rules = [
        {"forbid": {"sex": "M", "role": "wife"}},
        {"if": {"age": [0, 14]}, "then": {"role": ["child"]}},
    ]
    schema = Schema.from_dict({"columns": columns, "rules": rules})
    rng = np.random.default_rng(1)
    rows = pd.DataFrame(
        {
            "sex": rng.choice(["F", "M"], 9_000),
            "role": rng.choice(["wife", "husband", "child"], 9_000),
            "age": rng.integers(0, 100, 9_000),
        }
    )
    given: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "insecure_seed": 1}
    bins = {"age": [0, 15, 40, 70]}
    with dpdask.GaussianCopula(schema, bins=bins, **given).fit(rows) as release:
        found = release.sample(4_000, where='sex = "M" and age < 30', seed=1).compute()
        like = pd.DataFrame({"sex": ["M"] * 99 + ["F"], "age": [*range(99), 14]})
        given = release.sample(like=like, seed=1).compute()
        for row, broken in ((1, {"sex": "M", "role": "wife"}), (0, {"age": 3, "role": "husband"})):
            wrong = pd.DataFrame([broken] * 2)
            wrong.loc[1 - row, "role"] = "child"
            with pytest.raises(SpecError, match=rf"can have the values of row {row} \(the first"):
                release.sample(like=wrong)
    assert len(found) == 4_000
    assert ((found["sex"] == "M") & (found["age"] < 30)).all()
    assert not (found["role"] == "wife").any()
    assert (given["role"][given["age"] < 15] == "child").all()
    assert not (given["role"][given["sex"] == "M"] == "wife").any()
    assert (found["role"][found["age"] < 15] == "child").all()


# ---- what a condition says

TYPES = {
    "town": pa.string(),
    "years": pa.int64(),
    "price": pa.float64(),
    "two words": pa.bool_(),
    "day": pa.date32(),
}
DECLARED: dict[str, Any] = {
    "town": {"kind": "categorical", "levels": ["A", "B", 'say "C"'], "nulls": "level"},
    "years": {"kind": "discrete", "levels": [1, 2, 3, 4]},
    "price": {"kind": "mixed", "bounds": [0, 100], "atoms": [0], "nulls": "level"},
    "two words": {"kind": "categorical", "levels": [False, True]},
    "day": {"kind": "continuous", "bounds": ["2026-01-01", "2026-12-31"]},
}


def cut():
    day = {**DECLARED["day"], "bounds": [dt.date(2026, 1, 1), dt.date(2026, 12, 31)]}
    schema = Schema.from_dict(
        {
            "columns": {name: {"role": "privatise", **each} for name, each in DECLARED.items()}
            | {"day": {"role": "privatise", **day}}
        }
    )
    return {
        name: cells(codec_for(name, schema.columns[name], type_), 7)
        for name, type_ in TYPES.items()
    }


CONDITIONS = {
    'town = "A"': lambda t: t["town"] == "A",
    "town in ('A', 'B') and years>=3": lambda t: t["town"].isin(["A", "B"]) & (t["years"] >= 3),
    'town = "say ""C"""': lambda t: t["town"] == 'say "C"',
    "town != 'A'": lambda t: t["town"].notna() & (t["town"] != "A"),
    "town is null or price is null": lambda t: t["town"].isna() | t["price"].isna(),
    "price is not null": lambda t: t["price"].notna(),
    "town not in ('A')": lambda t: t["town"].notna() & (t["town"] != "A"),
    "price < 12.5": lambda t: t["price"] < 12.5,
    "price <= 0": lambda t: t["price"] <= 0,
    "price > 0 and price < 3e1": lambda t: (t["price"] > 0) & (t["price"] < 30),
    "`two words` = true": lambda t: t["two words"],
    "day >= '2026-07-04'": lambda t: t["day"] >= np.datetime64("2026-07-04"),
    'years <> 2 and price > 50 or town == "B"': lambda t: (
        ((t["years"] != 2) & (t["price"] > 50)) | (t["town"] == "B")
    ),
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_means_the_same_of_values_and_of_cells(text):
    columns, rng, n = cut(), np.random.default_rng(1), 4_000
    codes = np.stack([rng.integers(0, column.size, n) for column in columns.values()])
    drawn = {
        name: column.draw(own, rng.integers(0, 2**64, n, dtype=np.uint64))
        for (name, column), own in zip(columns.items(), codes, strict=True)
    }
    batch = pa.RecordBatch.from_pydict(drawn)
    condition = Condition.parse(text, columns)
    frame = batch.to_pandas(date_as_object=False)
    wanted = CONDITIONS[text](frame).to_numpy(dtype=bool)
    assert 0 < wanted.sum() < n
    np.testing.assert_array_equal(condition.meet(batch), wanted)
    may = condition.may_meet(codes)
    assert (may | ~wanted).all()
    if "price <" not in text and "price >" not in text and "day" not in text:
        np.testing.assert_array_equal(may, wanted)
    assert not may.all()


@pytest.mark.parametrize(
    ("text", "what"),
    {
        "": "cannot be read at its end",
        "town": "cannot be read at its end",
        "town =": "cannot be read at its end",
        'town = "A" years = 1': "cannot be read near 'years'",
        "town in 'A'": "cannot be read near 'A'",
        "town in ('A'": "cannot be read at its end",
        "town in ('A' = 'B')": "cannot be read after `in`",
        "town is true": "cannot be read after `is`",
        "town not = 'A'": "cannot be read after 'town'",
        "town = 'A": "cannot be read at character 7",
        "years = __import__('os')": "a value of the type int64 is expected",
        "twn = 'A'": "did you mean 'town'?",
        "town = 'Z'": "a value is none of its levels",
        "town = 3": "a text in quotes is expected",
        "years = 'A'": "a value of the type int64 is expected",
        "day > 'yesterday'": r"a value of the type date32\[day\] is expected",
        "price > 100": "no record can meet it",
        "price > 50 and price < 20": "no record can meet it",
    }.items(),
)
def test_a_condition_that_cannot_be_met_or_read_is_refused(text, what):
    with pytest.raises(SpecError, match=what):
        Condition.parse(text, cut())


def test_what_is_wrong_is_told_at_once(opened, tmp_path):
    with pytest.raises(SpecError, match="a text is expected"):
        opened.sample(10, where=3)
    with pytest.raises(SpecError, match="whole number of at least 1"):
        opened.sample(0)
    with pytest.raises(SpecError, match="seed"):
        opened.sample(10, seed=-1)
    file = tmp_path / "there.parquet"
    file.write_bytes(b"mine")
    with pytest.raises(OutputError, match="there already"):
        opened.write_sample(str(file), 10)
    assert file.read_bytes() == b"mine"
    assert len(opened.sample()) == pytest.approx(20_000, abs=1)
