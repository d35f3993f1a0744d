"""Interval jobs with perturbed columns: an ε for those and for no other, charged once, the same bytes everywhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from e2e.helpers import (
    KNOWN,
    MIXED_SCHEMA,
    call_cli,
    charging_entries,
    digests,
    hidden,
    lake,
    load,
    refusing,
    run_here,
    write_job,
)
from faults.drivers import Drivers
from mechanisms.containing import held_by
from scipy import stats

from dpdask.engine import fit
from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError, SpecError
from dpdask.jobs import run
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import run_job
from dpdask.mechanisms.interval.ranges import Ranges
from dpdask.privacy.events import Composed, LocalRelease, to_dict
from dpdask.streams import RunKey

SCHEMA: dict[str, Any] = {
    name: refusing(MIXED_SCHEMA)[name] for name in ("userId", "rating", "price", "age", "timestamp")
}
SIZES = [150, 90, 1700, 40, 300]
LIMIT = 2.0


def known(name: str) -> dict[str, Any]:
    return {"kind": "known", **KNOWN["columns"][name]}


def perturbed(name: str, epsilon: float, of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "design": "interval-differential",
        "perturb": {"epsilon": epsilon, "reference": known(name), **more},
        "of": of,
    }


RATING = perturbed(
    "rating",
    1.25,
    {"design": "case2", "anchors": {"name": "uniform", "loc": 0, "scale": 5.5}},
    channel="laplace-calibrated",
)
PRICE = perturbed(
    "price",
    0.75,
    {"design": "case1", "anchors": {"name": "uniform"}, "reference": {"name": "uniform"}},
)
AGE = {
    "design": "case2",
    "anchors": {"name": "uniform", "loc": 0, "scale": 120},
    "reference": {"name": "randint", "low": 18, "high": 90},
}
MIXED: dict[str, Any] = {"rating": RATING, "price": PRICE, "age": AGE}
WHOLLY: dict[str, Any] = {"rating": RATING, "price": PRICE}
WITHOUT_AGE: dict[str, Any] = {**SCHEMA, "age": {"role": "drop", "type": "int32"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES, schema=SCHEMA)


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    assert open_ledger(made).init("ratings", LIMIT)
    return made


def job(folder: Path, source: Path, designs: dict[str, Any] = MIXED, **changed: Any) -> Path:
    given = {
        "schema": SCHEMA,
        "mechanism": {"kind": "interval", "columns": designs},
        "privacy": {"epsilon": LIMIT},
        "output__rows_per_shard": 150,
        **changed,
    }
    return write_job(folder / "job", source, folder / "out", **given)


def charged(folder: Path, source: Path, url: str, **changed: Any) -> Path:
    return job(folder, source, ledger={"url": url, "dataset": "ratings"}, **changed)


def kinds(url: str) -> list[str]:
    return [entry.kind for entry in charging_entries(url, "ratings")]


def read(folder: Path) -> pa.Table:
    return pads.dataset(folder / "out", exclude_invalid_files=False).to_table()


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
    return found


def contain(released: pa.Table, name: str, values: np.ndarray) -> np.ndarray:
    lower, upper = (released[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
    return held_by(
        Ranges(lower=lower, upper=upper, is_null=np.zeros(len(lower), dtype=bool)),
        values.astype(float),
    )


# ---- what is released, and what is promised of it


def test_only_unperturbed_ranges_are_true(source: Path, tmp_path: Path) -> None:
    run_here(job(tmp_path, source, output__order="keep"))
    released, given = read(tmp_path), pads.dataset(source).to_table()
    assert released["userId"].equals(given["userId"])
    assert contain(released, "age", given["age"].to_numpy()).all()
    for name, by_chance in (("rating", 0.45), ("price", 2 / 3)):
        inside = contain(released, name, given[name].to_numpy()).mean()
        assert by_chance - 0.1 < inside < 0.97, name


def test_perturbed_ranges_keep_a_distribution_that_was_declared(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [20_000], schema={"rating": SCHEMA["rating"]}, row_group=20_000)
    designs = {
        "rating": perturbed(
            "rating",
            1.0,
            {
                "design": "canonical",
                "n_anchors": 1,
                "anchors": {"name": "uniform"},
                "exact_ranges": [1, 2],
            },
        )
    }
    run_here(
        job(
            tmp_path,
            source,
            designs,
            schema={"rating": SCHEMA["rating"]},
            output__rows_per_shard=50_000,
        )
    )
    found, given = (
        read(tmp_path)["rating_lower"].to_numpy(),
        pads.dataset(source).to_table()["rating"].to_numpy(),
    )
    counts = np.unique(found, return_counts=True)[1]
    assert (
        len(counts) == 10
    )  # every range is told exactly here: what comes out is the channel's own
    assert stats.chisquare(counts).pvalue > 1e-6
    assert 0.1 < (found == given).mean() < 0.4


def test_the_card_tells_the_private_columns_from_the_others(source: Path, tmp_path: Path) -> None:
    run_here(job(tmp_path, source))
    found = card(tmp_path)
    guarantee, columns, text = found["guarantee"], found["columns"], found["guarantee"]["text"]
    assert (
        guarantee["epsilon"],
        guarantee["delta"],
        guarantee["adjacency"],
        guarantee["unit"],
    ) == (LIMIT, 0, "replace-one", "row")
    assert (guarantee["epsilon_private"], guarantee["interval_private_only"]) == (
        ["rating", "price"],
        ["age"],
    )
    assert (
        "For rating, price: Each released row's private values are ε = 2 differentially private"
        in text
    )
    assert "Protected: the values of rating, price in all rows" in text
    assert "For age that ε says nothing." in text
    after = text.split("For age that ε says nothing.")[1]
    assert "For each private value (age)" in after
    assert "There is no ε" in after
    assert "ε =" not in after
    assert not any(name in after for name in ("rating", "price"))
    assert "of age: where inside its released range" in guarantee["protected"]["what"]
    assert (
        "of rating, price: the value, by the ε of its perturbation"
        in guarantee["protected"]["what"]
    )
    assert not found["mechanism"]["true_of_every_row"]
    assert columns["rating"]["epsilon"] == 1.25
    assert 1.2 < columns["rating"]["epsilon_exact"] <= 1.25
    assert columns["price"]["ranges_of"] == "perturbed values"
    assert columns["price"]["mean_coverage"] == pytest.approx(2 / 3, abs=1e-3)
    assert "leakage" not in columns["price"]
    assert not {"epsilon", "epsilon_exact", "ranges_of"} & set(columns["age"])
    assert columns["age"]["leakage"] > 0
    accounting = found["accounting"]
    assert accounting["events"] == to_dict(Composed(events=(LocalRelease(epsilon=2.0),)))
    assert columns["rating"]["epsilon_exact"] + columns["price"]["epsilon_exact"] == pytest.approx(
        accounting["epsilon_exact"]
    )
    assert accounting["epsilon_exact"] <= 2.0


def test_a_job_that_perturbs_every_column_speaks_of_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    run_here(job(tmp_path, source, WHOLLY, schema=WITHOUT_AGE, privacy={"epsilon": 2.5}))
    guarantee = card(tmp_path)["guarantee"]
    assert guarantee["interval_private_only"] == []
    assert "There is no ε" not in guarantee["text"]
    assert "ε = 2.5 differentially private" in guarantee["text"]
    assert guarantee["protected"]["what"] == "the value, by the ε of its perturbation"


def test_plan_run_and_audit_tell_the_same_epsilon(source: Path, tmp_path: Path) -> None:
    path = job(tmp_path, source, insecure_seed=None)
    planned = plan_job(load(path))
    assert planned.epsilons == {"rating": 1.25, "price": 0.75}
    assert any("perturb rating, price; draw" in stage for stage in planned.stages)
    audited = audit_job(load(path))
    assert audited["sound"]
    assert audited["measurements"] == []
    assert set(audited["columns"]) == {"rating", "price"}
    for name, claimed in planned.epsilons.items():
        assert audited["columns"][name]["claimed"] == claimed
        assert 0.5 * claimed < audited["columns"][name]["epsilon_exact"] <= claimed
    result = json.loads(call_cli("run", path, "--json").stdout)
    assert (result["epsilon"], result["delta"], result["rows"]) == (LIMIT, 0, sum(SIZES))
    assert not hidden(tmp_path / "out").exists()
    assert "rating, price perturbed first" in call_cli("run", path).stdout


# ---- the ledger


def test_the_local_release_is_charged_once(source: Path, tmp_path: Path, url: str) -> None:
    path = charged(tmp_path, source, url)
    before = plan_job(load(path)).ledger
    assert before is not None
    assert (before["before"], before["after"], before["fits"]) == (0.0, 2.0, True)
    run_here(path)
    assert run_here(path).status == "already released"
    [intended, _] = charging_entries(url, "ratings")
    assert kinds(url) == ["intend", "commit"]
    assert (intended.charge.epsilon, intended.charge.delta) == (2.0, 0.0)
    assert intended.charge.event == to_dict(
        Composed(
            events=(LocalRelease(epsilon=2.0),), unit="row", uncovered=(), without_epsilon=("age",)
        )
    )
    assert open_ledger(url).read_balance("ratings").epsilon_spent == 2.0


STAGES = ["opened", "intended", "fitted", "some-shards", "staged", "uncommitted", "committed"]
FEW = (
    "intended",
    "some-shards",
    "committed",
)  # the contract of mechanisms kills this one at each stage, in its process


@pytest.mark.parametrize(
    "point",
    [point if point in FEW else pytest.param(point, marks=pytest.mark.slow) for point in STAGES],
)
def test_a_killed_run_is_charged_once_and_draws_the_same(
    point: str,
    drivers: Drivers,
    source: Path,
    tmp_path: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = charged(tmp_path, source, url)
    assert drivers.run("run", path, point=point)[0] == -signal.SIGKILL
    assert kinds(url) == {"opened": [], "committed": ["intend", "commit"]}.get(point, ["intend"])
    if point in ("uncommitted", "committed"):  # released, and the key is gone
        before = digests(tmp_path / "out")
        assert run_here(path).status == "already released"
        assert digests(tmp_path / "out") == before
        assert kinds(url) == ["intend", "commit"]
        return
    key = RunKey((hidden(tmp_path / "out") / "run.key").read_bytes())
    run_here(path)
    assert kinds(url) == ["intend", "commit"]
    assert open_ledger(url).read_balance("ratings").n_runs == 1
    monkeypatch.setattr(RunKey, "fresh", lambda: key)
    run_here(job(tmp_path / "quiet", source, insecure_seed=None))
    shards, quiet = (
        {
            name: digest
            for name, digest in digests(place / "out").items()
            if name.endswith(".parquet")
        }
        for place in (tmp_path, tmp_path / "quiet")
    )
    assert shards == quiet != {}
    assert not hidden(tmp_path / "out").exists()


def test_a_budget_too_small_draws_nothing(
    source: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was drawn")

    monkeypatch.setattr(run, "write_all", drawn)
    monkeypatch.setattr(fit, "keep", drawn)
    dearer = {**MIXED, "rating": {**RATING, "perturb": {**RATING["perturb"], "epsilon": 1.5}}}
    with pytest.raises(BudgetError, match="the budget of the dataset 'ratings' is too small"):
        run_here(charged(tmp_path, source, url, designs=dearer, privacy={"epsilon": 2.25}))
    assert kinds(url) == []
    assert not hidden(tmp_path / "out").exists()


# ---- the same bytes


def test_threads_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    covered = {
        "kind": "interval",
        "columns": {**MIXED, "rating": {**RATING, "reference": {"name": "uniform", "scale": 5}}},
        "coverage": True,
    }
    run_here(job(tmp_path / "quiet", source, mechanism=covered))
    with dask.config.set(scheduler="threads", num_workers=3):
        run_job(load(job(tmp_path, source, mechanism=covered)))
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet" / "out")
    assert len(digests(tmp_path / "out")) > 6
    found = read(tmp_path)["price_coverage"].to_numpy()
    assert ((found >= 0) & (found <= 1)).all()
    assert found.mean() == pytest.approx(2 / 3, abs=0.05)


def test_designs_that_were_tampered_with_are_refused(
    drivers: Drivers, source: Path, tmp_path: Path
) -> None:
    path = job(tmp_path, source)
    drivers.run("run", path, point="fitted")
    designs = hidden(tmp_path / "out") / "release.npz"
    designs.write_bytes(
        designs.read_bytes().replace(np.array([0.5, 1.0]).tobytes(), np.array([0.5, 1.1]).tobytes())
    )
    code, line = drivers.run("run", path)
    assert (code, "not the one that was written; abort the run and begin again" in line) == (
        66,
        True,
    ), line


# ---- refusals


def changed(**perturb: Any) -> dict[str, Any]:
    return {
        "mechanism": {
            "kind": "interval",
            "columns": {**MIXED, "price": {**PRICE, "perturb": {**PRICE["perturb"], **perturb}}},
        }
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no privacy": ({"privacy": None}, r"the key 'privacy' is missing; add it"),
    "too small an ε": (
        {"privacy": {"epsilon": 1.9}},
        r"privacy\.epsilon: is 1\.9, and the perturbed columns spend 2 together; set it to at least 2",
    ),
    "δ": ({"privacy": {"epsilon": 2.0, "delta": 1e-6}}, r"privacy\.delta: .* spends no δ"),
    "add-remove": (
        {"privacy": {"epsilon": 2.0, "adjacency": "add-remove"}},
        r"privacy\.adjacency: .*; set it to replace-one",
    ),
    "a unit": (
        {"privacy": {"epsilon": 2.0, "unit": {"column": "userId", "max_rows": 2}}},
        r"privacy\.unit: .*; set it to row",
    ),
    "a hold-out": (
        changed(reference={"kind": "holdout", "fraction": 0.2}),
        r"the perturbation needs a declared distribution",
    ),
    "ε above what ranks resolve": (
        changed(epsilon=17.0),
        r"mechanism\.columns\.price\.perturb\.epsilon: is 17, but a continuous column takes an ε",
    ),
    "unknown key": (
        changed(epsilom=1.0),
        r"unknown key 'mechanism\.columns\.price\.perturb\.epsilom'; did you mean 'epsilon'\?",
    ),
    "perturb of a pure design": (
        {
            "mechanism": {
                "kind": "interval",
                "columns": {**MIXED, "age": {**AGE, "perturb": PRICE["perturb"]}},
            }
        },
        r"unknown key 'mechanism\.columns\.age\.perturb'",
    ),
    "private nulls": (
        {"schema": {**SCHEMA, "price": {**SCHEMA["price"], "nulls": "level"}}},
        r"column 'price': a null has no range",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_is_refused_in_one_line(name: str, source: Path, tmp_path: Path) -> None:
    changes, says = REFUSED[name]
    with pytest.raises(SpecError, match=says) as error:
        load(job(tmp_path, source, **changes))
    assert "\n" not in str(error.value)


def test_a_reference_that_does_not_fit_is_refused_by_the_plan(source: Path, tmp_path: Path) -> None:
    loaded = load(job(tmp_path, source, **changed(reference={"kind": "known", "name": "norm"})))
    for act in (plan_job, run_job):
        with pytest.raises(
            SpecError,
            match=r"reference of column 'price': has probability outside the column's bounds",
        ):
            act(loaded)
    assert not (tmp_path / "out").exists()
    assert not hidden(tmp_path / "out").exists()
