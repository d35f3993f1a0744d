"""Jobs with a ledger: charged before any noise, once whatever happens, and refused before anything is drawn."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
from e2e.helpers import (
    HOLDOUT,
    KNOWN,
    MIXED_SCHEMA,
    RATINGS_SCHEMA,
    charged_kinds,
    charging_entries,
    digests,
    hidden,
    lake,
    load,
    mixed_table,
    refusing,
    run_here,
    write_job,
)
from pyarrow import parquet as pq

from dpdask.engine import fit
from dpdask.engine.account import Account, open_ledger
from dpdask.errors import BudgetError, DataError, InputError, OutputError, TemporaryError
from dpdask.io.shards import list_manifests
from dpdask.io.storage import HOLDOUT_NAME, KEY_NAME, NOISY_NAME, RELEASE_NAME, Folder
from dpdask.jobs import run
from dpdask.jobs.run import abort
from dpdask.mechanisms.dip import columns
from dpdask.mechanisms.dip.columns import ColumnsMechanism
from dpdask.privacy.events import to_dict
from dpdask.references import histogram

HISTOGRAM = {"kind": "histogram"}
LIMIT = 4.0

STEPS = (
    *((ColumnsMechanism, "draw"), (histogram, "perturb"), (fit, "_keep_drawn"), (fit, "keep")),
    *((columns, "fit_dip"), (run, "write_all")),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 900, 40], schema=RATINGS_SCHEMA)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "lake" / "out"


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert open_ledger(made).init("ratings", LIMIT)
    return made


@pytest.fixture
def job(source, tmp_path, out, url):
    """A job of ε 4: all that its dataset has."""
    return written(tmp_path, source, out, url)


pytestmark = pytest.mark.usefixtures("here")


def written(folder, source, out, url, **changed):
    place = {"url": url, "dataset": "ratings"}
    given = {
        "schema": RATINGS_SCHEMA,
        "ledger": place,
        "mechanism__reference": HISTOGRAM,
        **changed,
    }
    return write_job(folder / "job", source, out, **given)


def kinds(url):
    """Return the kinds of a whole chain's entries; all are of one run, unless they are said to be of more."""
    ledger = open_ledger(url)
    entries = ledger.show("ratings").entries
    assert ledger.verify("ratings") == len(entries)
    return charged_kinds(url, "ratings")


def runs(url):
    return {entry.run_id for entry in open_ledger(url).show("ratings").entries}


def balance(url):
    return open_ledger(url).read_balance("ratings")


# ---- before any noise


@pytest.mark.parametrize(
    "reference", [HISTOGRAM, {"kind": "holdout", "fraction": 0.25}], ids=["histogram", "holdout"]
)
def test_it_is_charged_before_anything_is_drawn(reference, tmp_path, source, out, url, monkeypatch):
    seen = []

    def watched(owner, name):
        function = getattr(owner, name)

        def charged(*given, **rest):
            seen.append(name)
            assert kinds(url) == ["intend"], name
            return function(*given, **rest)

        monkeypatch.setattr(owner, name, charged)

    for step in STEPS:
        watched(*step)
    made = written(tmp_path, source, out, url, mechanism__reference=reference)
    run_here(made)
    drawn = ["perturb", "_keep_drawn"] if reference is HISTOGRAM else []
    assert seen == ["draw", *drawn, "fit_dip", "keep", "write_all"]
    assert kinds(url) == ["intend", "commit"]
    [entry, _] = charging_entries(url, "ratings")
    loaded = load(made)
    sample = (
        {
            "fraction": 0.25,
            "fate": "held out",
            "sample": entry.charge.event["uncovered"][0]["sample"],
        }
        if reference is not HISTOGRAM
        else None
    )
    assert entry.charge.event == {
        **to_dict(loaded.mechanism.event),
        "unit": "row",
        "uncovered": [sample] if sample else [],
    }
    assert (entry.charge.epsilon, entry.charge.delta) == (4.0, 0.0)
    assert LIMIT * (1 - 1e-12) <= balance(url).epsilon_spent <= LIMIT


def test_what_does_not_fit_is_refused_before_anything_is_drawn(job, out, url, monkeypatch):
    def drawn(*_, **__):
        raise AssertionError("noise was drawn")

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, drawn)
    with pytest.raises(
        BudgetError, match="the budget of the dataset 'ratings' is too small"
    ) as caught:
        run_here(job, privacy__epsilon=4.0000001)
    assert caught.value.exit_code == 77
    assert kinds(url) == []
    assert not out.exists()
    assert not hidden(out).exists()
    monkeypatch.undo()
    run_here(job)  # the refused one left nothing in the way
    assert kinds(url) == ["intend", "commit"]


def test_the_ledger_is_no_part_of_the_jobs_digest(job):
    assert (
        load(job).digest
        == load(job, ledger="null").digest
        == load(job, ledger__dataset="other").digest
    )


def test_a_relative_ledger_lies_beside_the_job(tmp_path, source, out):
    made = load(written(tmp_path, source, out, "sqlite:///deep/ledger.db"))
    assert made.ledger is not None
    assert made.ledger.url == f"sqlite:///{(tmp_path / 'job').resolve()}/deep/ledger.db"


# ---- once


# ---- given back, and not given back


PLACES = {
    "draw": (ColumnsMechanism, "draw", ""),
    "keep the noise": (fit, "_keep_drawn", NOISY_NAME),
    "fit": (columns, "fit_dip", ""),
    "keep the release": (fit, "keep", RELEASE_NAME),
    "write": (run, "write_all", ""),
    "make the card": (run, "make_job_card", ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_only_a_run_that_kept_no_noise_gets_its_charge_back(place, job, out, url, monkeypatch):
    owner, name, of = PLACES[place]
    function = getattr(owner, name)

    def wrong(*given, **rest):
        assert kinds(url) == ["intend"]
        if of and of not in given:
            return function(*given, **rest)
        raise DataError("a value is wrong")

    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(DataError):
        run_here(job)
    nothing_kept = place in ("draw", "keep the noise")
    assert kinds(url) == ["intend", "refuse"]
    assert (balance(url).n_runs, balance(url).n_refused) == (not nothing_kept, 1)
    assert not hidden(out).exists()
    assert not out.exists()
    monkeypatch.undo()
    if nothing_kept:
        run_here(job)  # mended: a run of its own, and there is room for it
        assert kinds(url) == ["intend", "refuse", "intend", "commit"]
        assert len(runs(url)) == 2
    else:
        with pytest.raises(BudgetError):
            run_here(job)


def test_an_aborted_run_stays_charged(job, out, url, drivers):
    drivers.run("run", job, point="some-shards")
    assert abort(out.as_uri())
    assert kinds(url) == ["intend"]
    with pytest.raises(BudgetError):
        run_here(job)


def test_an_input_that_changed_keeps_the_charge(job, tmp_path, source, out, url, drivers):
    mine = shutil.copytree(source, tmp_path / "in")
    made = written(tmp_path, mine, out, url)
    drivers.run("run", made, point="some-shards")
    pq.write_table(
        mixed_table(150, np.random.default_rng(9), RATINGS_SCHEMA), mine / "part.0.parquet"
    )
    with pytest.raises(InputError):
        run_here(made)
    assert kinds(url) == ["intend"]


# ---- a ledger that comes, goes or changes between a crash and the resume


def test_a_ledger_that_a_job_gets_later_can_refuse_it(job, out, url, drivers):
    open_ledger(url).init("small", 1.0)
    drivers.run("run", job, "--set", "ledger=null", point="staged")
    assert kinds(url) == []
    with pytest.raises(BudgetError):
        run_here(job, ledger__dataset="small")
    assert not out.exists()
    assert hidden(out).exists()  # nothing is lost: with room in the budget it goes on
    run_here(job)
    assert kinds(url) == ["intend", "commit"]


def test_a_tampered_ledger_releases_nothing(job, out, url, drivers):
    drivers.run("run", job, point="fitted")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE dpdask_entries SET epsilon = 0.5")
    engine.dispose()
    code, line = drivers.run("run", job)
    assert code == 65
    assert "the chain is broken: the entry 1 was changed" in line
    assert not out.exists()


# ---- the ledger is gone when the output is published


@pytest.mark.parametrize(
    ("growing", "reference"),
    [(False, HISTOGRAM), (True, {"kind": "holdout", "fraction": 0.25})],
    ids=["once", "growing"],
)
def test_no_key_waits_beside_a_release_for_the_ledger(
    reference, growing, tmp_path, source, out, url, monkeypatch
):
    job = written(
        tmp_path,
        source,
        out,
        url,
        mechanism__reference=reference,
        **({"growing": True} if growing else {}),
    )

    def fail(*_):
        raise TemporaryError("the ledger is busy")

    with monkeypatch.context() as patch:
        patch.setattr(Account, "commit", fail)
        for _ in range(2):
            with pytest.raises(TemporaryError, match="busy"):
                run_here(job)
            assert list_manifests(Folder(out.as_uri()))
            assert hidden(out).exists()
            assert not (hidden(out) / KEY_NAME).exists()
            assert not (hidden(out) / HOLDOUT_NAME).exists()
    before = digests(out)
    run_here(job)
    assert kinds(url) == ["intend", "commit"]
    assert not hidden(out).exists()
    assert digests(out) == before


def test_a_release_that_the_ledger_does_not_know_is_committed_by_the_next_run(
    tmp_path, url, monkeypatch
):
    """The rows of the next run of a job that appends are others, so it does not find the release as its own."""
    open_ledger(url).init("appended", 100.0)
    source, out = lake(tmp_path / "in", [150], schema=RATINGS_SCHEMA), tmp_path / "lake" / "out"
    options = {
        "output__format": "delta",
        "output__mode": "append",
        "ledger": {"url": url, "dataset": "appended"},
    }
    made, other = (
        written(tmp_path / name, source, out, url, **options, privacy__epsilon=epsilon)
        for name, epsilon in (("one", 4.0), ("two", 2.0))
    )

    def fail(*_):
        raise TemporaryError("the ledger is busy")

    with monkeypatch.context() as patch:
        patch.setattr(Account, "commit", fail)
        with pytest.raises(TemporaryError, match="busy"):
            run_here(made)
    with pytest.raises(
        OutputError, match="a run of another job has published here and is not finished"
    ):
        run_here(other)
    more = lake(tmp_path / "more", [90], schema=RATINGS_SCHEMA)
    shutil.copy(next(more.glob("*.parquet")), source / "more.parquet")
    assert run_here(made).status == "released"
    entries = charging_entries(url, "appended")
    assert [entry.kind for entry in entries] == ["intend", "commit"] * 2
    assert len({entry.run_id for entry in entries}) == 2
    assert run_here(other).status == "released"
    assert open_ledger(url).read_balance("appended").epsilon_spent == 10.0


COLUMNS = {name: refusing(MIXED_SCHEMA)[name] | {"nulls": "refuse"} for name in ("rating", "price")}
DECLARED = {name: KNOWN["columns"][name] for name in ("rating", "price")}
RELEASES = {
    "histogram": {"kind": "dip", "reference": HISTOGRAM, "channel": "optimal"},
    "tree": {"kind": "dip", "reference": {"kind": "tree"}, "channel": "optimal"},
    "holdout": {"kind": "dip", "reference": HOLDOUT, "channel": "laplace"},
    "known": {"kind": "dip", "reference": {**KNOWN, "columns": DECLARED}, "channel": "laplace"},
    "public": {"kind": "dip", "reference": {"kind": "public"}, "channel": "optimal"},
    "chain": {
        "kind": "dip",
        "reference": {"kind": "chain", "fraction": 0.25},
        "channel": "laplace",
    },
    "public chain": {"kind": "dip", "reference": {"kind": "chain"}, "channel": "laplace"},
    "copula": {"kind": "copula"},
    "marginals": {"kind": "marginals", "cliques": [["rating"]]},
    "cells": {"kind": "histogram"},
}


@pytest.mark.parametrize(
    ("column", "value"), [("price", 7.0), ("price", None), ("rating", 9.0), ("rating", None)]
)
@pytest.mark.parametrize("name", RELEASES)
def test_values_that_a_schema_refuses_cost_nothing(name, column, value, tmp_path, out, url):
    rows = mixed_table(400, np.random.default_rng(1), COLUMNS)
    (tmp_path / "in").mkdir()
    (tmp_path / "public").mkdir()
    pq.write_table(rows, tmp_path / "public" / "rows.parquet")
    values = [*rows.column(column).to_pylist()[:-1], value]
    place = rows.schema.get_field_index(column)
    rows = rows.set_column(place, rows.schema.field(column), pa.array(values, rows[column].type))
    pq.write_table(rows, tmp_path / "in" / "rows.parquet")
    release = dict(RELEASES[name])
    if name.startswith("public"):
        path = str(tmp_path / "public")
        release["reference"] = {**release["reference"], "path": path}
    job = written(
        tmp_path,
        tmp_path / "in",
        out,
        url,
        schema=COLUMNS,
        mechanism=release,
    )
    with pytest.raises(DataError, match=column):
        run_here(job)
    assert kinds(url) == ["refuse"]
    assert balance(url).epsilon_spent == 0.0
    assert not out.exists()
