"""What every fitted release has in common: it closes, shows nothing private, and refuses what it cannot do."""

import json
from dataclasses import replace
from pathlib import Path

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import continuous, discrete, refusing
from test_frames import CountingScheduler

import dpdask
from dpdask.io.shards import save_release
from dpdask.io.storage import Folder
from dpdask.privacy.events import DiscreteGaussian, to_dict

SECRET = 3.0625  # a value that is in the table, and in no text
COLUMNS = {
    "user": {"role": "drop"},
    "rating": discrete([1.0, 2.0, SECRET]),
    "price": continuous([0.0, 10.0]),
}
ANCHORS = {"name": "uniform", "loc": 0, "scale": 10}
DESIGNS = {
    "rating": {"design": "case1", "anchors": ANCHORS},
    "price": {"design": "case2", "anchors": ANCHORS},
}
PERTURB = {"epsilon": 0.5, "reference": {"kind": "known", "probabilities": [0.25, 0.25, 0.5]}}
PERTURBED = {
    **DESIGNS,
    "rating": {"design": "interval-differential", "perturb": PERTURB, "of": DESIGNS["rating"]},
}
KNOWN = dpdask.Known(
    columns={
        "rating": {"probabilities": [0.25, 0.25, 0.5]},
        "price": {"name": "uniform", "loc": 0, "scale": 10},
    }
)


def schema(columns=COLUMNS):
    return dpdask.Schema.from_dict({"columns": columns})


def rows(n=600, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user": np.arange(n) // 3,
            "rating": rng.choice([1.0, 2.0, SECRET], n),
            "price": rng.uniform(0, 10, n),
        }
    )


def estimators(**more):
    """Every Python class, and `DIP` by each kind of reference."""
    unit = {"unit": dpdask.UnitColumn(column="user", max_rows=2), **more}
    return {
        "dip known": dpdask.DIP(schema(), epsilon=1.0, reference=KNOWN, **more),
        "dip histogram": dpdask.DIP(schema(), epsilon=1.0, reference=dpdask.Histogram(), **more),
        "dip holdout": dpdask.DIP(
            schema(), epsilon=1.0, reference=dpdask.Holdout(fraction=0.25), **more
        ),
        "dip units": dpdask.DIP(schema(), epsilon=1.0, reference=dpdask.Histogram(), **unit),
        "dip chain": dpdask.DIP(
            schema(), epsilon=1.0, reference=dpdask.Chain(fraction=0.25), **more
        ),
        "dip tree": dpdask.DIP(schema(), epsilon=1.0, reference=dpdask.Tree(bins=4), **more),
        "interval": dpdask.IntervalMechanism(schema(refusing(COLUMNS)), columns=DESIGNS, **more),
        "perturbed interval": dpdask.IntervalMechanism(
            schema(refusing(COLUMNS)), columns=PERTURBED, **more
        ),
        "copula": dpdask.GaussianCopula(schema(), epsilon=1.0, bins=4, **more),
        "marginals": dpdask.Marginals(
            schema(), epsilon=1.0, cliques=[["rating"], ["rating", "price"]], bins=4, **more
        ),
        "histogram": dpdask.PerturbedHistogram(schema(), epsilon=1.0, bins=4, **more),
    }


OF_RECORDS = ("copula", "marginals", "histogram")
NAMES = list(estimators())
OF_ROWS = [name for name in NAMES if name not in OF_RECORDS]

pytestmark = pytest.mark.filterwarnings(
    "ignore:the chain republishes", "ignore:A cell holds", "ignore:.*few cells stand out"
)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="synchronous"):
        yield


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_release_does_what_its_kind_does_until_it_is_closed(name, tmp_path):
    table = rows()
    with estimators()[name].fit(table, secrets=str(tmp_path)) as release:
        assert isinstance(release, dpdask.Release)
        assert files(tmp_path)
        made = release.transform(table) if name in OF_ROWS else release.sample().compute()
        assert len(made)
        if name in OF_ROWS:
            with pytest.raises(
                dpdask.SpecError,
                match=r"^sample: this release randomises rows and has no records to draw; give it a frame: transform",
            ):
                release.sample(10)
            with pytest.raises(
                dpdask.SpecError,
                match=r"^save: this release holds the key of its noise .*; write the transformed rows, or run a job$",
            ):
                release.save(str(tmp_path / "saved"))
            with pytest.raises(
                dpdask.SpecError, match="take CopulaRelease, MarginalsRelease or HistogramRelease"
            ):
                type(release).load(str(tmp_path / "saved"))
        else:
            with pytest.raises(
                dpdask.SpecError,
                match=r"^transform: this release has no rows to transform; draw records from it: sample\(\)$",
            ):
                release.transform(table)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(dpdask.InputError):
        _ = release.transform(table) if name in OF_ROWS else release.sample().compute()
    release.close()  # twice does no harm
    with pytest.raises(ZeroDivisionError), estimators()[name].fit(table, secrets=str(tmp_path)):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


FRAME = r"`frame`: a frame of pandas, Dask or polars, or an Arrow table, is expected, not "
NO_FRAMES = [
    ("people", FRAME + r"str; read the table first, as by dask\.dataframe\.read_parquet\(path\)$"),
    (Path("people"), FRAME + "pathlib.*; read the table first"),
    (None, FRAME + "NoneType; give a DataFrame$"),
    (pa.array([1.0]), FRAME + r"pyarrow\.DoubleArray; give a DataFrame$"),
    (rows()["rating"], FRAME + r"pandas\.Series; make one of it: to_frame\(\)$"),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_frame_is_refused_in_one_line(name):
    estimator = estimators()[name]
    for given, message in NO_FRAMES:
        for method in (estimator.fit, estimator.plan, estimator.audit):
            with pytest.raises(dpdask.SpecError, match=message):
                method(given)
    with estimator.fit(rows()) as release:
        for given, message in NO_FRAMES if name in OF_ROWS else ():
            with pytest.raises(dpdask.SpecError, match=message):
                release.transform(given)


def test_a_ledger_is_a_place():
    estimator = estimators()["copula"]
    message = r"`ledger`: a LedgerPlace is expected, not a str; give dpdask\.LedgerPlace\(url=\"sqlite:///ledger.db\", dataset=\"…\"\)$"
    for method in (estimator.fit, estimator.plan):
        with pytest.raises(dpdask.SpecError, match=message):
            method(rows(), ledger="sqlite:///ledger.db")


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_short_and_shows_neither_values_nor_places(name, tmp_path):
    estimator, table = estimators()[name], rows()
    release = estimator.fit(table, secrets=str(tmp_path))
    shown = repr(release)
    assert len(shown) < 120
    assert "\n" not in shown
    assert shown.startswith(
        f"{type(release).__name__}({'rows' if name in OF_ROWS else 'records'}, mechanism="
    )
    for private in (
        str(SECRET),
        str(tmp_path),
        "run.key",
        release.sha256,
        "array",
        str(len(table)),
    ):
        assert private not in shown
    assert str(release) == shown


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_release_of_rows_carries_no_private_value(name):
    table = rows()
    release = estimators()[name].fit(table)
    lazy = (
        release.transform(dd.from_pandas(rows(seed=1), npartitions=1), batch="x")
        if release.rows.batches.several
        else release.transform(table)
    )
    for sent in (release, lazy.__dask_graph__() if isinstance(lazy, dd.DataFrame) else release):
        data = cloudpickle.dumps(sent)
        assert not [value for value in table["price"] if np.float64(value).tobytes() in data]


CARDS = {
    "kind": ({"mechanism": {"kind": "dip"}}, "belongs to another mechanism than the release"),
    "epsilon": ({"guarantee": {"epsilon": 0.01}}, "states less ε than the release's noise costs"),
    "epsilon_exact": (
        {"accounting": {"epsilon_exact": 0.01}},
        "states less ε than the release's noise costs",
    ),
    "no epsilon": ({"guarantee": {"epsilon": None}}, "states no ε"),
    "delta": ({"guarantee": {"delta": 2.0}}, "states no ε"),
    "events": (
        {"accounting": {"events": {"format": 1, "kind": "composed", "events": []}}},
        "states different noise from that of the release",
    ),
    "no events": (
        {"accounting": {"events": None}},
        "states different noise from that of the release",
    ),
}


@pytest.mark.parametrize("name", OF_RECORDS)
def test_a_saved_release_is_loaded_as_it_was_and_nothing_else_is_and_none_is_saved_over_another(
    name, tmp_path
):
    release = estimators()[name].fit(rows())
    with pytest.raises(dpdask.InputError, match=release.file):
        type(release).load(str(tmp_path))
    release.save(str(tmp_path))
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with type(release).load(str(tmp_path), secrets=str(tmp_path / "work")) as loaded:
        pd.testing.assert_frame_equal(
            loaded.sample(seed=1).compute(), release.sample(seed=1).compute()
        )
        assert (loaded.card, repr(loaded)) == (release.card, repr(release))
    assert list((tmp_path / "work").iterdir()) == []
    card, path = json.loads(saved["card.json"]), tmp_path / "card.json"
    for changes, words in CARDS.values():
        path.write_text(
            json.dumps(card | {part: card[part] | values for part, values in changes.items()}),
            encoding="utf-8",
        )
        with pytest.raises(
            dpdask.InputError,
            match=rf"^card\.json: the card {words}; restore both from one release, or save it again$",
        ):
            type(release).load(str(tmp_path))
    path.write_bytes(saved["card.json"])
    estimators()[name].fit(rows()).save(str(tmp_path / "other"))
    flipped = bytearray(saved[release.file])
    flipped[len(flipped) // 2] ^= 1
    broken = [
        (release.file, data)
        for data in (
            b"",
            b"garbage",
            b"PK\x03\x04 garbage",
            bytes(flipped[: len(flipped) // 2]),
            bytes(flipped),
        )
    ]
    for place, data in (
        *broken,
        ("card.json", b"{"),
        ("card.json", (tmp_path / "other" / "card.json").read_bytes()),
    ):
        (tmp_path / place).write_bytes(data)
        with pytest.raises(dpdask.InputError, match=r"\.npz|card\.json") as caught:
            type(release).load(str(tmp_path))
        assert caught.value.exit_code == 66
        (tmp_path / place).write_bytes(saved[place])
    for left in (release.file, "release.html", "card.json"):
        with pytest.raises(
            dpdask.OutputError,
            match=f"a file '{left}' is there already; remove it, or choose another folder",
        ):
            release.save(str(tmp_path))
        (tmp_path / left).unlink()


def test_noise_that_has_no_price_is_refused(tmp_path):
    release = estimators()["marginals"].fit(rows())
    fitted, card = release.fitted, release.card
    event = DiscreteGaussian(sigma=1e200, sensitivity=1.0, adjacency="replace-one")
    noise = replace(fitted.noisy.noise, cliques=dict.fromkeys(fitted.noisy.cliques, event))
    crafted = replace(fitted, noisy=replace(fitted.noisy, noise=noise))
    card["accounting"]["events"], card["guarantee"]["delta"] = to_dict(crafted.event), 1e-9
    save_release(Folder(str(tmp_path)), release.file, crafted.to_bytes(), card, b"")
    with pytest.raises(dpdask.InputError, match="states less ε than the release's noise costs"):
        dpdask.MarginalsRelease.load(str(tmp_path))


@pytest.mark.parametrize("name", ["copula", "histogram"])
def test_more_records_than_a_graph_holds_are_refused(name):
    release = estimators()[name].fit(rows())
    with pytest.raises(
        dpdask.SpecError,
        match=r"^n_rows: .* records would be more than 1,000,000 partitions; ask for fewer",
    ):
        release.sample(10**18)


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_that_fails_leaves_nothing(name, tmp_path):
    with pytest.raises(dpdask.DataError):
        estimators()[name].fit(rows().drop(columns="price"), secrets=str(tmp_path))
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_fit_computes_once_at_most(name):
    counting = CountingScheduler()
    frame = dd.from_pandas(rows(), npartitions=3)
    with dask.config.set(scheduler=counting):
        estimators()[name].fit(frame)
    nothing = name in ("dip known", "interval", "perturbed interval")
    assert counting.computes == (0 if nothing else 2 if name == "dip units" else 1)


# ---- plan and audit


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
def test_a_plan_computes_nothing_and_says_what_the_card_will(name, lazy):
    estimator, table = estimators()[name], rows()
    frame = dd.from_pandas(table, npartitions=2) if lazy else table

    def refuse(*_, **__):
        raise AssertionError("something was computed")

    with dask.config.set(scheduler=refuse):
        plan = estimator.plan(frame)
    assert plan.guarantee.rstrip(".") in estimator.fit(frame).card["guarantee"]["text"]
    assert plan.stages
    assert all(plan.stages)
    assert plan.ledger is None
    budget = estimator.mechanism.budget
    spent = sum(plan.epsilons.values()) + sum(plan.reference_epsilons.values())
    assert spent <= (0 if budget is None else budget.epsilon)
    private = (
        {"rating", "price"}
        if name.startswith("dip")
        else {"rating"}
        if name == "perturbed interval"
        else set()
    )
    assert set(plan.epsilons) == private
    assert (set(plan.reference_epsilons) == {"rating", "price"}) == (
        name in ("dip histogram", "dip units")
    )
    assert estimator.plan(frame) == plan


def test_a_plan_warns_of_what_fit_will_warn():
    table = rows(100)
    for estimator in (
        dpdask.GaussianCopula(schema(), epsilon=1.0, delta=0.01, bins=4),
        dpdask.Marginals(schema(), epsilon=1.0, delta=0.01, cliques=[["rating"]]),
        dpdask.DIP(schema(), epsilon=2.9, delta=0.01, reference=dpdask.Tree(bins=4)),
    ):
        [told] = estimator.plan(table).warnings
        with pytest.warns(UserWarning, match="is not below 1 / the number of rows") as caught:
            estimator.fit(table)
        assert [str(each.message) for each in caught] == [told]
        assert caught[0].filename == __file__
        with pytest.warns(
            UserWarning, match="is not below 1 / the number of rows"
        ):  # known once the rows are counted
            estimator.fit(dd.from_pandas(table, npartitions=2))


def test_a_plan_refuses_what_fit_refuses_before_it_reads_a_row():
    table = rows()
    for name, estimator in estimators().items():
        for frame, words in (
            (table.drop(columns="price"), "'price'"),
            (table.assign(other=1), "'other'"),
            (table.assign(price="x"), "'price'"),
        ):
            refusals = []
            for verb in (estimator.plan, estimator.audit, estimator.fit):
                with pytest.raises(dpdask.DataError, match=words) as caught:
                    verb(frame)
                refusals.append(str(caught.value))
            assert len(set(refusals)) == 1, name


@pytest.mark.parametrize("name", NAMES)
def test_an_audit_is_sound_and_reads_no_row(name):
    estimator = estimators()[name]
    frame = dd.from_pandas(rows(), npartitions=2)

    def refuse(*_, **__):
        raise AssertionError("something was computed")

    with dask.config.set(scheduler=refuse):
        found = estimator.audit(frame, n_runs=1000)
    assert set(found) == {"columns", "row", "measurements", "sound"}
    assert found["sound"] is True
    assert set(found["columns"]) == set(estimator.plan(frame).epsilons)
    for column in found["columns"].values():
        assert 0 < column["epsilon_exact"] <= column["claimed"]
    central = name in (*OF_RECORDS, "dip histogram", "dip units", "dip tree")
    assert bool(found["measurements"]) == central
    assert (found["row"] is not None) == (name == "dip tree")
