"""`ledger=` of fits: the dataset is charged once, before any noise, and refused before anything is drawn."""

import warnings
from dataclasses import replace

import cloudpickle
import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from e2e.helpers import categorical, discrete, refusing
from test_releases import COLUMNS, DESIGNS, OF_RECORDS, estimators, rows, schema

import dpdask
from dpdask.engine import fit as engine_fit
from dpdask.engine.account import Account, open_ledger
from dpdask.engine.scan import Chooser
from dpdask.errors import InternalError
from dpdask.privacy.ledger_entries import Charge

CHARGED = [name for name in estimators() if name != "interval"]
OF_BATCHES = ("dip known", "perturbed interval")

pytestmark = pytest.mark.filterwarnings(
    "ignore:the chain republishes", "ignore:A cell holds", "ignore:.*few cells stand out"
)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def place(tmp_path):
    """A dataset with a budget of ε 2."""
    return made(tmp_path, 2.0)


def made(folder, epsilon, *, strict=False):
    place = dpdask.LedgerPlace(url=f"sqlite:///{folder / 'ledger.db'}", dataset="people")
    open_ledger(place.url).init(place.dataset, epsilon, strict=strict)
    return place


def entries(place):
    return [
        entry
        for entry in open_ledger(place.url).show(place.dataset).entries
        if entry.kind not in ("hold-out", "strict")
    ]


def kinds(place):
    return [entry.kind for entry in entries(place)]


def spent(place):
    return open_ledger(place.url).read_balance(place.dataset).epsilon_spent


def draws(monkeypatch, place):
    """What `engine.fit` keeps from now on: name, digest, and the ledger's entries at that moment."""
    seen = []
    keep = engine_fit.keep

    def watched(folder, name, data):
        at_that_time = kinds(place)
        sha256 = keep(folder, name, data)
        seen.append((name, sha256, at_that_time))
        return sha256

    monkeypatch.setattr(engine_fit, "keep", watched)
    return seen


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CHARGED)
@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
def test_a_release_is_charged_once_before_its_noise(name, lazy, place, monkeypatch):
    estimator, table = estimators()[name], rows()
    frame = dd.from_pandas(table, npartitions=2) if lazy else table
    seen = draws(monkeypatch, place)
    release = estimator.fit(frame, ledger=place)
    if name in OF_BATCHES:
        assert kinds(place) == []  # no row is released yet
    else:
        assert seen
        assert all(at_that_time == ["intend"] for *_, at_that_time in seen)
    for _ in range(2):
        _ = release.sample().compute() if name in OF_RECORDS else release.transform(frame)
    assert kinds(place) == ["intend", "draw", "commit"]
    assert len({entry.run_id for entry in entries(place)}) == 1
    assert {entry.release for entry in entries(place)[1:]} == {
        sha256 for kept, sha256, _ in seen if kept == "release.npz"
    }
    assert spent(place) == estimator.mechanism.budget.epsilon
    assert open_ledger(place.url).verify(place.dataset) >= 3
    release.close()
    assert kinds(place) == ["intend", "draw", "commit"]


@pytest.mark.parametrize("name", ["dip known", "copula"])
def test_without_room_nothing_is_drawn(name, tmp_path, monkeypatch):
    place = made(tmp_path, 0.25)
    seen = draws(monkeypatch, place)
    with pytest.raises(dpdask.BudgetError, match=r"asks for ε .* are left of ε 0\.25") as caught:
        estimators()[name].fit(rows(), ledger=place, secrets=str(tmp_path / "work"))
    assert caught.value.exit_code == 77
    assert seen == []
    assert entries(place) == []
    assert not (tmp_path / "work").exists()  # nor is a key


def test_a_budget_that_another_release_took_meanwhile(place, tmp_path, monkeypatch):
    """There was room before the rows were read, and none when the noise was to be drawn."""
    estimator = dpdask.GaussianCopula(schema(), epsilon=1.5, bins=4)
    scan, seen = engine_fit.scan, draws(monkeypatch, place)

    def slow(*given, **options):
        found = scan(*given, **options)
        monkeypatch.setattr(engine_fit, "scan", scan)
        dpdask.GaussianCopula(schema(), epsilon=1.5, bins=4).fit(rows(seed=1), ledger=place)
        seen.clear()
        return found

    monkeypatch.setattr(engine_fit, "scan", slow)
    with pytest.raises(dpdask.BudgetError, match="are left of"):
        estimator.fit(rows(), ledger=place, secrets=str(tmp_path / "work"))
    assert seen == []
    assert kinds(place) == ["intend", "draw", "commit"]
    assert spent(place) == 1.5
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", OF_BATCHES)
def test_each_batch_is_charged_once(name, tmp_path):
    estimator = estimators()[name]
    epsilon = estimator.mechanism.budget.epsilon
    place = made(tmp_path, 2 * epsilon)
    first, second, third = (rows(seed=seed) for seed in range(3))
    release = estimator.fit(first, ledger=place)
    for _ in range(2):
        found = release.transform(first)
        release.transform(second, batch="2026-11")
    assert kinds(place) == ["intend", "draw", "commit"] * 2
    runs = list(dict.fromkeys(entry.run_id for entry in entries(place)))
    assert runs[1] == f"{runs[0]} batch 2026-11"
    assert spent(place) == 2 * epsilon
    with pytest.raises(dpdask.BudgetError, match="are left of"):
        release.transform(third, batch="2026-12")
    assert release.card["batches"]["names"] == [None, "2026-11"]  # a refused batch is not taken
    assert spent(place) == 2 * epsilon
    pd.testing.assert_frame_equal(release.transform(first), found)  # what is paid for stays usable
    copied = cloudpickle.loads(cloudpickle.dumps(release))
    with pytest.raises(dpdask.SpecError, match="another copy of this release"):
        copied.transform(third, batch="2026-11")
    with pytest.raises(dpdask.BudgetError, match="are left of"):
        copied.transform(third, batch="2026-13")


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("name", ["dip units", "histogram"])
def test_a_refused_frame_is_recorded_if_rows_were_read(name, strict, tmp_path, monkeypatch):
    place = made(tmp_path, 3.0, strict=strict)
    wrong = rows()
    wrong.loc[7, "rating"] = 9.0
    with pytest.raises(dpdask.DataError):  # by its types: no row is read
        estimators()[name].fit(rows().assign(rating="text"), ledger=place)
    assert kinds(place) == []
    for frame in (wrong, dd.from_pandas(wrong, npartitions=2)):
        with pytest.raises(dpdask.DataError, match="'rating'"):
            estimators()[name].fit(frame, ledger=place, secrets=str(tmp_path / "work"))

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(Chooser, "split", broken)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        estimators()[name].fit(rows(), ledger=place)
    assert kinds(place) == (["intend", "refuse"] * 3 if strict else ["refuse"] * 3)
    assert spent(place) == (3.0 if strict else 0.0)
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []


REFUSING = dpdask.Schema.from_dict({"columns": {"x": categorical(["a", "b"], outside="refuse")}})
TINY = dpdask.DIP(
    REFUSING, epsilon=1e-6, reference=dpdask.Known(columns={"x": {"probabilities": [0.5, 0.5]}})
)


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_a_refused_batch_is_recorded_and_can_be_tried_again(strict, tmp_path):
    place = made(tmp_path, 1.0, strict=strict)
    release = TINY.fit(pd.DataFrame({"x": ["a", "b"]}, dtype=object), ledger=place)
    wrong = pd.DataFrame({"x": ["a", "b", "other"]}, dtype=object)
    for asked in range(1, 3):
        with pytest.raises(dpdask.DataError, match="'x'"):
            release.transform(wrong)
        assert kinds(place) == ["intend", "refuse"] * asked
        assert spent(place) == pytest.approx(0.01 * asked if strict else 0.0)
    lists = pd.DataFrame({"x": pd.Series([["a"], ["b"]], dtype=object)})
    with pytest.raises(dpdask.DataError, match="do not fit the frame's dtypes"):
        release.transform(lists, batch="2026-11")
    lists["x"] = pd.Series(["a", "b"], dtype=object)
    for _ in range(2):
        assert len(release.transform(lists, batch="2026-11")) == 2
    assert kinds(place) == ["intend", "refuse"] * 3 + ["intend", "draw", "commit"]
    assert spent(place) == pytest.approx((0.03 if strict else 0.0) + 1e-6)
    assert len({entry.run_id for entry in entries(place)}) == 4
    assert release.card["batches"]["names"] == [None, "2026-11"]


def test_a_refusal_that_could_not_be_paid_for_reads_no_row(tmp_path):
    place = made(tmp_path, 1.0, strict=True)
    release = TINY.fit(pd.DataFrame({"x": ["a", "b"]}), ledger=place)
    open_ledger(place.url).intend(place.dataset, "rest", Charge(epsilon=0.995))
    with pytest.raises(
        dpdask.BudgetError, match="of 1 unfinished ones would cost more than is left"
    ):
        release.transform(pd.DataFrame({"x": ["a", "b", "other"]}))
    assert kinds(place) == ["intend"]


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_rows_that_are_read_after_the_commit_cost_at_least_a_refusal(strict, tmp_path):
    place = made(tmp_path, 1.0, strict=strict)
    frame = dd.from_pandas(pd.DataFrame({"x": ["a", "b", "other"]}), npartitions=1)
    lazy = TINY.fit(frame, ledger=place).transform(frame)
    assert spent(place) == pytest.approx(0.01 if strict else 1e-6)
    with pytest.raises(dpdask.DataError, match="'x'"):
        lazy.compute()


def test_values_that_a_fit_does_not_read_cost_at_least_a_refusal(tmp_path):
    """A declared reference needs the units alone, so the values are refused after the commit."""
    place = made(tmp_path, 1.0, strict=True)
    columns = {"x": REFUSING.columns["x"].model_dump(exclude_none=True), "user": {"role": "keep"}}
    unit = dpdask.UnitColumn(column="user", max_rows=1)
    table = pd.DataFrame({"x": ["a", "b", "other"], "user": [1, 2, 3]})
    release = dpdask.DIP(schema(columns), epsilon=1e-6, reference=TINY.reference, unit=unit).fit(
        table, ledger=place
    )
    assert spent(place) == pytest.approx(0.01)
    with pytest.raises(dpdask.DataError, match="'x'"):
        release.transform(table)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, dpdask.TemporaryError])
def test_any_failure_leaves_no_key(failure, place, tmp_path, monkeypatch):
    """The noise may have been drawn, so the run stays charged, but where our own error says that none was."""

    def failing(*_, **__):
        raise failure("the entropy is gone")

    monkeypatch.setattr(dpdask.mechanisms.copula.spec.CopulaMechanism, "draw", failing)
    with pytest.raises(failure):
        dpdask.GaussianCopula(schema(), epsilon=1.0, bins=4).fit(
            rows(), ledger=place, secrets=str(tmp_path / "work")
        )
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []
    assert kinds(place) == (["intend", "void"] if failure is dpdask.TemporaryError else ["intend"])


def test_a_relative_ledger_is_that_of_the_fit(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    here, elsewhere = made(tmp_path, 1.0), made(tmp_path / "elsewhere", 1.0)
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"x": ["a", "b"]})
    release = TINY.fit(
        frame, ledger=dpdask.LedgerPlace(url="sqlite:///ledger.db", dataset="people")
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    release.transform(frame)
    assert kinds(here) == ["intend", "draw", "commit"]
    assert kinds(elsewhere) == []


def test_no_repr_shows_a_password(place):
    for url in (
        "postgresql://me:se/cr?et@host/base",
        "postgresql://host/base?user=me&password=se/cr?et",
        "postgresql://me:se@cr?et@host/b",
    ):
        hidden = dpdask.LedgerPlace(url=url, dataset="people")
        shown = f"{hidden!r} {hidden} {Account(mechanism=TINY.mechanism, place=hidden)!r}"
        assert "people" in shown
        assert "host" in shown
        assert not any(part in shown for part in ("se/cr", "cr?et", "se@", "me:"))
        account = Account(mechanism=TINY.mechanism, place=hidden, job="j", output=f"{url}#1")
        named = account.cost().names
        assert named["output"].startswith("postgresql://")
        assert not any(part in named["output"] for part in ("se/cr", "cr?et", "se@", "me:"))
        assert replace(account, output="file:///a@b/c?d").names["output"] == "/a@b/c?d"
    frame = pd.DataFrame({"x": ["a", "b"]})
    release = TINY.fit(frame, ledger=place)
    assert place.url not in repr(release.rows)


@pytest.mark.parametrize("name", ["dip known", "marginals"])
def test_a_plan_tells_the_balance_and_writes_nothing(name, tmp_path):
    estimator = estimators()[name]
    epsilon = estimator.mechanism.budget.epsilon
    place, table = made(tmp_path, 1.5 * epsilon), rows()
    plan = estimator.plan(table, ledger=place)
    assert entries(place) == []
    assert plan.ledger is not None
    found = {key: plan.ledger[key] for key in ("limit", "before", "after", "runs", "fits")}
    assert found == {
        "limit": 1.5 * epsilon,
        "before": 0.0,
        "after": epsilon,
        "runs": 0,
        "fits": True,
    }
    release = estimator.fit(table, ledger=place)
    if name in OF_BATCHES:
        release.transform(table)
    again = estimator.plan(table, ledger=place).ledger
    assert again is not None
    assert (again["before"], again["runs"], again["fits"]) == (epsilon, 1, False)
    assert again["after"] > again["limit"]


def test_a_hold_out_leaves_rows_without_an_epsilon(place):
    release = estimators()["dip holdout"].fit(rows(), ledger=place)
    assert release.card["dataset"]["uncovered_fraction"] == pytest.approx(0.25)
    copula = dpdask.GaussianCopula(schema(), epsilon=0.5, bins=4)
    assert copula.fit(rows(), ledger=place).card["dataset"]["uncovered_fraction"] == pytest.approx(
        0.25
    )  # by the earlier release
    assert "dataset" not in copula.fit(rows()).card


def test_units_are_held_out_once_for_a_dataset(place):
    """Two releases that hold out units leave the same ones without ε."""
    table, unit = (
        rows().assign(user=lambda frame: frame.index % 100),
        dpdask.UnitColumn(column="user", max_rows=2),
    )
    dip = dpdask.DIP(
        schema({**COLUMNS, "user": {"role": "keep"}}),
        epsilon=0.5,
        reference=dpdask.Holdout(fraction=0.5),
        unit=unit,
    )
    released = [set(dip.fit(table, ledger=place).transform(table)["user"]) for _ in range(2)]
    assert released[0] == released[1]
    assert 20 < len(released[0]) < 80
    apart = [set(dip.fit(table).transform(table)["user"]) for _ in range(2)]
    assert apart[0] != apart[1]


def test_what_cannot_be_charged(place, tmp_path):
    table = rows()
    for verb in ("fit", "plan"):
        with pytest.raises(
            dpdask.SpecError, match="this mechanism has no ε, so there is none to charge"
        ):
            getattr(dpdask.IntervalMechanism(schema(refusing(COLUMNS)), columns=DESIGNS), verb)(
                table, ledger=place
            )
        with pytest.raises(
            dpdask.SpecError, match=r"so a release with a seed cannot be charged to a ledger"
        ):
            getattr(estimators(insecure_seed=1)["dip known"], verb)(table, ledger=place)
        with pytest.raises(dpdask.SpecError, match="nobody"):
            getattr(estimators()["dip known"], verb)(
                table, ledger=dpdask.LedgerPlace(url=place.url, dataset="nobody")
            )
        missing = dpdask.LedgerPlace(url=f"sqlite:///{tmp_path / 'none.db'}", dataset="people")
        with pytest.raises(dpdask.SpecError, match="there is no ledger here"):
            getattr(dpdask.GaussianCopula(schema(), epsilon=1.0), verb)(table, ledger=missing)
    assert entries(place) == []


@pytest.mark.parametrize(
    "given", [{"url": ""}, {"dataset": ""}, {"dataset": None}, {"url": 3}, {"key": "x"}]
)
def test_a_ledger_s_place_is_checked(given):
    with pytest.raises(dpdask.SpecError, match=next(iter(given))):
        dpdask.LedgerPlace(**{"url": "sqlite:///ledger.db", "dataset": "people", **given})


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_only_a_lenient_dataset_is_told_of_a_sorted_column(strict, tmp_path):
    place = made(tmp_path, 2.0, strict=strict)
    schema = dpdask.Schema.from_dict({"columns": {"x": discrete([0, 1])}})
    in_order = pd.DataFrame({"x": [0] * 20 + [1] * 20})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(
            in_order, ledger=place
        ).close()
    assert any("sorted" in str(warning.message) for warning in said) is not strict
