"""The specification of `interval`: what construction refuses, in a job and in Python alike, and one release of a frame."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mechanisms.containing import held_by

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.engine.fit import Fitted, fit
from dpdask.engine.lazy import transform_frame
from dpdask.engine.source import FrameSource, find_types
from dpdask.engine.work import KEY_NAME, TableWork, load
from dpdask.errors import BudgetError, DataError, SpecError
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import Card, make_card
from dpdask.mechanisms.interval import spec as interval_card
from dpdask.mechanisms.interval.ranges import RangeRandomiser, Ranges, coverage
from dpdask.mechanisms.interval.release import IntervalRelease
from dpdask.mechanisms.interval.spec import IntervalSpec, RandomRangesMechanism
from dpdask.mechanisms.mechanism import Columns, Spending
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.events import Composed, LocalRelease
from dpdask.schema import Schema
from dpdask.stats.statistic import Statistic
from dpdask.streams import RunKey

UNIT: dict[str, Any] = {"name": "uniform", "loc": 0, "scale": 1}
LEVELS = [1.0, 2.0, 3.0, 4.0, 5.0]
PRICE: dict[str, Any] = {
    "role": "privatise",
    "kind": "continuous",
    "bounds": [0.0, 1.0],
    "outside": "refuse",
}
COLUMNS: dict[str, Any] = {
    "user": {"role": "keep"},
    "price": PRICE,
    "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
    "note": {"role": "drop"},
}
CASE1: dict[str, Any] = {"design": "case1", "anchors": UNIT}
RATING: dict[str, Any] = {"design": "case2", "anchors": {"name": "uniform", "loc": 0.5, "scale": 5}}
NO_COLUMNS = Columns(types=pa.schema([]), codecs={})
DESIGNS: dict[str, Any] = {"price": CASE1, "rating": RATING}


def perturbed(
    epsilon: float = 1.0, reference: dict[str, Any] = UNIT, **more: Any
) -> dict[str, Any]:
    return {
        "design": "interval-differential",
        "perturb": {"epsilon": epsilon, "reference": {"kind": "known", **reference}, **more},
        "of": CASE1,
    }


def bound(
    designs: dict[str, Any] = DESIGNS,
    budget: dict[str, Any] | None = None,
    schema: dict[str, Any] = COLUMNS,
    **more: Any,
) -> RandomRangesMechanism:
    spec = validate(IntervalSpec, {"columns": designs, **more}, "interval")
    made = bind(
        spec,
        Schema.from_dict({"columns": schema}),
        None if budget is None else Budget.model_validate(budget),
    )
    assert isinstance(made, RandomRangesMechanism)
    return made


def price(**changed: Any) -> dict[str, Any]:
    return {"schema": {**COLUMNS, "price": {**PRICE, **changed}}}


def design(of_price: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"designs": {**DESIGNS, "price": of_price}, **more}


# ---- what construction refuses

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no columns": ({"designs": {}}, r"^column 'price': has no design; add it to `columns`$"),
    "nothing private": ({"schema": {"user": {"role": "keep"}}}, r"privatises no column"),
    "missing design": (
        {"designs": {"price": CASE1}},
        r"^column 'rating': has no design; add it to `columns`$",
    ),
    "an unknown column": (
        {"designs": {**DESIGNS, "prize": CASE1}},
        r"^`columns\.prize`: is not a privatised column; did you mean 'price'\?",
    ),
    "a kept column": (
        {"designs": {**DESIGNS, "user": CASE1}},
        r"^`columns\.user`: is not a privatised column",
    ),
    "a categorical column": (
        price(kind="categorical", levels=["a", "b"], bounds=None),
        r"^column 'price': a categorical column has no order",
    ),
    "clash": (
        {"schema": {**COLUMNS, "price_upper": {"role": "keep"}}},
        r"^column 'price': its released column would be 'price_upper', but another column has that name; rename the other$",
    ),
    "clash with a coverage": (
        {
            **design(
                {**CASE1, "reference": UNIT},
                coverage=True,
                schema={"price": PRICE, "price_coverage": {"role": "keep"}},
            ),
            "designs": {"price": {**CASE1, "reference": UNIT}},
        },
        r"^column 'price': its released column would be 'price_coverage'",
    ),
    "coverage without a reference": (
        {"coverage": True},
        r"^column 'price': coverage needs a public reference, and its design names none; add `ref",
    ),
    "unknown design": (
        design({"design": "case3", "anchors": UNIT}),
        r"^interval, columns\.price\.design: there is no design 'case3' here",
    ),
    "no design's name": (
        design({"anchors": UNIT}),
        r"the key 'columns\.price\.design' is missing; add it",
    ),
    "unknown key of a design": (
        design({"design": "case1", "anchor": UNIT}),
        r"unknown key 'columns\.price\.anchor'; did you mean 'anchors'\?",
    ),
    "unknown key": ({"coverages": True}, r"unknown key 'coverages'; did you mean 'coverage'\?"),
    "coverage that is no truth value": ({"coverage": "yes"}, r"^interval, coverage: "),
    "tau above 1/m": (
        design({"design": "case2", "at_least": 0.4, "reference": UNIT}),
        r"3 ranges cannot all have a coverage of 0\.4",
    ),
    "unknown distribution": (
        design({"design": "case1", "anchors": {"name": "norml"}}),
        r"^anchors of column 'price': .*'norml'",
    ),
    "a distribution's wrong parameters": (
        design({"design": "case1", "anchors": {"name": "norm", "scale": -1}}),
        r"^anchors of column 'price': ",
    ),
    "a missing reference": (
        design({"design": "case1", "at_least": 0.2}),
        r"^column 'price': this design needs a public reference",
    ),
    "unattainable coverage": (
        design(
            {
                "design": "case1",
                "anchors": {"coverage": 0.3, "family": {"name": "norm"}},
                "reference": UNIT,
            }
        ),
        r"^column 'price': anchors of this design reach coverages between 0\.5 and 1, not 0\.3",
    ),
    "rho that is not ignorable": (
        design(
            {
                "design": "selective",
                "of": {"design": "case2", "anchors": UNIT},
                "tau": 0.5,
                "rho": 0.99,
                "reference": UNIT,
            }
        ),
        r"^column 'price': rho 0\.99 is not ignorable: .*; choose at most 0\.\d+, the probability of a coverage of 0\.5$",
    ),
    "least coverage of whole numbers": (
        design({"design": "case1", "at_least": 0.1, "reference": UNIT}, **price(type="int32")),
        r"^column 'price': whole numbers cannot be cut into ranges of a given least coverage",
    ),
    "nulls of the schema alone": (
        price(nulls="level"),
        r"^column 'price': a null has no range.*; declare `nulls: public` in its design",
    ),
    "nulls of the design alone": (
        design({**CASE1, "nulls": "public"}),
        r"^column 'price': its design has `nulls: public`, and the schema refuses nulls.*; declare `nulls: level` in the schema, or leave",
    ),
    "outside as null": (
        design({**CASE1, "nulls": "public"}, **price(nulls="level", outside="null")),
        r"^column 'price': values outside the domain become null",
    ),
    "a perturbed column without a budget": (
        design(perturbed(0.5)),
        r"^`epsilon`: this mechanism spends a budget, but none is given; give it$",
    ),
    "a budget for nothing": (
        {"budget": {"epsilon": 1.0}},
        r"^`epsilon`: no column is perturbed, so there is no ε to promise; remove it$",
    ),
    "too small a budget": (
        design(perturbed(0.5), budget={"epsilon": 0.4}),
        r"^`epsilon`: is 0\.4, and the perturbed columns spend 0\.5 together; set it to at least 0\.5, or lower `columns\.price\.perturb\.epsilon`$",
    ),
    "delta": (
        design(perturbed(), budget={"epsilon": 1.0, "delta": 1e-6}),
        r"^`delta`: is 1e-06, but .*spends no δ; set it to 0, or remove it$",
    ),
    "add-remove": (
        design(perturbed(), budget={"epsilon": 1.0, "adjacency": "add-remove"}),
        r"^`adjacency`: ranges are .*; set it to replace-one$",
    ),
    "a unit": (
        design(perturbed(), budget={"epsilon": 1.0, "unit": {"column": "user", "max_rows": 2}}),
        r"^`unit`: ranges are released for every row.*; set it to row, or remove it$",
    ),
    "ε above what ranks resolve": (
        design(perturbed(17.0), budget={"epsilon": 17.0}),
        r"^`columns\.price\.perturb\.epsilon`: is 17, but a continuous column takes an ε in \[1e-06, 16\]",
    ),
    "ε below what ranks resolve": (
        design(perturbed(1e-9), budget={"epsilon": 1.0}),
        r"^`columns\.price\.perturb\.epsilon`: is 1e-09, but a continuous column takes an ε in \[1e-06, 16\]",
    ),
    "ε of 0": (
        design(perturbed(0.0), budget={"epsilon": 1.0}),
        r"^interval, columns\.price\.perturb\.epsilon: .*above 0",
    ),
    "an unknown distribution of what is perturbed": (
        design(perturbed(reference={"name": "unifrom"}), budget={"epsilon": 1.0}),
        r"^reference of column 'price': scipy\.stats has no distribution 'unifrom'",
    ),
    "a reference from rows": (
        design(perturbed(reference={"kind": "holdout", "fraction": 0.2}), budget={"epsilon": 1.0}),
        r"the perturbation needs a declared distribution",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_construction_refuses(name: str) -> None:
    given, says = REFUSED[name]
    with pytest.raises(SpecError, match=says) as error:
        bound(**given)
    assert "\n" not in str(error.value)


def test_a_design_that_some_type_can_have_is_refused_only_once_the_type_is_known() -> None:
    made = bound(
        {"price": {"design": "case1", "at_least": 0.1, "reference": UNIT}}, schema={"price": PRICE}
    )
    made.check(columns_of(made, pa.schema([("price", pa.float64())])))
    with pytest.raises(SpecError, match=r"^column 'price': whole numbers"):
        made.check(columns_of(made, pa.schema([("price", pa.int64())])))


def test_what_needs_the_types_is_refused_before_a_row_is_read() -> None:
    far = bound(
        {"price": {"design": "case1", "anchors": {"name": "uniform", "loc": 5, "scale": 1}}},
        schema={"price": PRICE},
    )
    with pytest.raises(
        SpecError, match=r"^column 'price': no anchor falls between its least and greatest value"
    ):
        far.check(columns_of(far, pa.schema([("price", pa.float64())])))
    wide = bound(
        {"price": perturbed(reference={"name": "norm"})}, {"epsilon": 1.0}, {"price": PRICE}
    )
    with pytest.raises(
        SpecError,
        match=r"^reference of column 'price': has probability outside the column's bounds",
    ):
        wide.check(columns_of(wide, pa.schema([("price", pa.float64())])))


def test_more_than_any_budget_is_refused() -> None:
    spec = validate(
        IntervalSpec,
        {
            "columns": {
                "a": perturbed(60.0, channel="optimal"),
                "b": perturbed(60.0, channel="optimal"),
            }
        },
        "interval",
    )
    with pytest.raises(
        SpecError,
        match=r"^`columns`: the perturbed columns spend 120 together, and .*; lower `columns\.a\.perturb\.epsilon`$",
    ):
        _ = spec.least_budget


# ---- what it says


def test_columns_of_one_design_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of many columns asks twice, and a card once more."""
    measured: list[str] = []

    def measure(mechanism: RangeRandomiser, reference: Any) -> float:
        measured.append(mechanism.column)
        return coverage(mechanism, reference)

    monkeypatch.setattr(interval_card, "coverage", measure)
    interval_card._hold.cache_clear()
    own = {
        "design": "case1",
        "anchors": {"name": "norm", "loc": 3.25},
        "reference": {"name": "norm"},
    }
    designs = {
        "a": own,
        "b": own,
        "c": own,
        "d": {**own, "reference": {"name": "norm", "scale": 1.5}},
    }
    made = bound(
        designs, schema={name: {"role": "privatise", "kind": "continuous"} for name in designs}
    )
    columns = columns_of(made, pa.schema([(name, pa.float64()) for name in designs]))
    assert made.cautions(columns, None) == ()
    assert len(made.expectations(columns)) == 4
    section = made.section(
        made.fit(None, columns, RunKey.fresh()), columns, n_rows=None, n_released=None, order="keep"
    )
    assert measured == ["a", "d"]
    assert (
        section.columns["a"]["mean_coverage"]
        == section.columns["c"]["mean_coverage"]
        != section.columns["d"]["mean_coverage"]
    )


def test_a_plan_tells_how_wide_ranges_will_be() -> None:
    """Of values spread as evenly as the anchors, one anchor leaves 2/3 of the domain on average, two leave 1/2, and so does a ring leave 2/3."""
    ring = {"design": "ring", "anchors": UNIT}
    day = {
        "role": "privatise",
        "kind": "continuous",
        "bounds": [dt.date(2020, 1, 1), dt.date(2030, 1, 1)],
        "outside": "refuse",
    }
    schema = {
        "one": PRICE,
        "two": PRICE,
        "ring": PRICE,
        "kept": {"role": "keep"},
        "known": PRICE,
        "day": day,
    }
    designs = {
        "one": CASE1,
        "two": CASE1 | {"design": "case2"},
        "ring": ring,
        "known": CASE1 | {"reference": UNIT},
    }
    designs["day"] = {
        "design": "case1",
        "anchors": {"name": "uniform", "loc": 18_262 * 86_400_000, "scale": 3_653 * 86_400_000},
    }
    made = bound(designs, schema=schema)
    columns = columns_of(
        made,
        pa.schema(
            [
                *((name, pa.float64()) for name in ("one", "two", "ring", "known")),
                ("day", pa.timestamp("ms")),
            ]
        ),
    )
    said = made.expectations(columns)
    assert [sentence.partition(":")[0] for sentence in said] == [
        "one",
        "two",
        "ring",
        "known",
        "day",
        "one, two, ring, day",
    ]
    assert "0.67 wide on average, 67 % of the domain" in said[0]
    assert "0.50 wide on average, 50 % of the domain" in said[1]
    assert "67 % of the domain" in said[2]
    assert "holds 67 % of the values on average" in said[3]
    assert "2,400 days wide on average" in said[4]
    assert "without a `reference` nothing says" in said[5]
    assert made.cautions(columns, 1_000) == ()
    many = {f"c{place}": PRICE for place in range(9)}
    wide = bound(dict.fromkeys(many, CASE1), schema=many)
    assert (
        wide.expectations(columns_of(wide, pa.schema([(name, pa.float64()) for name in many])))[-1]
        == "4 more columns of ranges"
    )


def test_a_plan_warns_of_ranges_that_tell_next_to_nothing() -> None:
    far = {"role": "privatise", "kind": "continuous", "bounds": [0.0, 5e7], "outside": "refuse"}
    design = {
        "design": "case2",
        "anchors": {"name": "uniform", "loc": 0, "scale": 5e7},
        "reference": {"name": "lognorm", "s": 1.1, "scale": 2_000},
    }
    near = design | {"anchors": {"name": "lognorm", "s": 1.5, "scale": 2_000}}
    inside = {name: part for name, part in design.items() if name != "reference"}
    hidden = perturbed(reference={"name": "uniform", "loc": 0, "scale": 5e7}) | {
        "of": inside,
        "reference": design["reference"],
    }
    chosen = design | {
        "anchors": {"coverage": 0.999, "family": {"name": "uniform", "loc": 0, "scale": 1}}
    }
    designs = {"far": design, "near": near, "hidden": hidden, "chosen": chosen}
    made = bound(designs, {"epsilon": 1.0}, dict.fromkeys(designs, far))
    columns = columns_of(made, pa.schema([(name, pa.float64()) for name in designs]))
    [warning] = made.cautions(columns, None)
    assert warning.startswith(
        "far, hidden: a range rules out less than 1 % of the values on average"
    )
    assert "holds 99.98" in made.expectations(columns)[0]


def test_a_mechanism_without_perturbation_spends_nothing() -> None:
    made = bound()
    assert not made.spec.spends
    assert made.spec.least_budget is None
    assert made.event == Composed(events=(), without_epsilon=("price", "rating"))
    assert (made.spending, made.reference_rows) == (Spending(), "none")
    assert made.how == "price, rating released as random ranges"
    assert "There is no ε" in made.guarantee("keep")
    assert [stage.split(":")[0] for stage in made.stages(NO_COLUMNS, uncounted=True)] == [
        "survey",
        "fit",
        "write",
    ]
    assert [stage.split(":")[0] for stage in made.stages(NO_COLUMNS, uncounted=False)] == [
        "fit",
        "write",
    ]
    assert made.n_expected(7) == 7


def test_a_perturbed_column_spends_its_part() -> None:
    made = bound({"rating": RATING, "price": perturbed(0.5)}, {"epsilon": 0.75})
    assert made.spec.spends
    assert made.spec.least_budget == Budget(epsilon=0.5)
    assert made.event == Composed(events=(LocalRelease(epsilon=0.5),), without_epsilon=("rating",))
    assert made.spending == Spending(row={"price": 0.5})
    assert list(made.designs) == ["price", "rating"]  # the schema's order
    assert made.how.endswith("; price perturbed first")
    found = made.audit(
        columns_of(made, pa.schema([("price", pa.float64()), ("rating", pa.float64())])), None
    )["price"]
    assert (found["claimed"], found["reference"]) == (0.5, "the declared distribution")
    assert 0.4 < found["epsilon_exact"] <= 0.5


# ---- a release of a frame


def columns_of(made: RandomRangesMechanism, types: pa.Schema) -> Columns:
    codecs = {
        name: codec_for(name, made.schema.columns[name], types.field(name).type)
        for name in made.schema.privatised
    }
    return Columns(types=types, codecs=codecs)


def work_of(made: RandomRangesMechanism, types: pa.Schema, folder: Path) -> TableWork:
    folder.mkdir()
    secrets = Folder(folder.as_uri())
    secrets.write(KEY_NAME, RunKey.insecure(3).reveal(), private=True)
    released = made.schema.select_released(types)
    return TableWork(
        types=types,
        released=released,
        codecs=columns_of(made, released).codecs,
        fraction=None,
        secrets=secrets,
    )


def released(
    made: RandomRangesMechanism, frame: Any, folder: Path, charge: Callable[[], None] = lambda: None
) -> tuple[Any, Fitted, TableWork]:
    source, work = FrameSource(frame, "frame"), work_of(made, find_types(frame), folder)
    made.check(work.columns)
    fitted, work = fit(made, source, work, charge, insecure=True)
    release = load(work.secrets, fitted.release_sha256, made.release_type)
    assert isinstance(release, IntervalRelease)
    assert made.find_written(work.released) == release.types(work.released)
    return transform_frame(source, release, fitted.release_sha256, work), fitted, work


@pytest.fixture
def table() -> pd.DataFrame:
    rng, n = np.random.default_rng(5), 900
    rows = {
        "user": np.arange(n),
        "price": rng.random(n),
        "rating": rng.choice(LEVELS, n),
        "note": ["secret"] * n,
    }
    return pd.DataFrame(rows)


def card(made: RandomRangesMechanism, fitted: Fitted, work: TableWork) -> Card:
    release = load(work.secrets, fitted.release_sha256, made.release_type)
    section = made.section(release, work.columns, n_rows=None, n_released=None, order="keep")
    return make_card(section, name="frame", insecure=True)


def test_a_frame_is_released_as_ranges_that_hold_its_values(
    table: pd.DataFrame, tmp_path: Path
) -> None:
    charged: list[str] = []
    made = bound(
        {
            "price": {**CASE1, "reference": UNIT},
            "rating": {**RATING, "reference": {"name": "randint", "low": 1, "high": 6}},
        },
        coverage=True,
    )
    with dask.config.set(scheduler="synchronous"):
        found, fitted, work = released(
            made,
            dd.from_pandas(table, npartitions=3),
            tmp_path / "dask",
            lambda: charged.append("once"),
        )
        again, lazy = found.compute(), found.compute()
    pd.testing.assert_frame_equal(lazy, again)
    assert charged == ["once"]
    assert fitted.n_released == ()
    assert not work.secrets.exists("noisy.npz")
    ends = [
        f"{name}_{end}" for name in ("price", "rating") for end in ("lower", "upper", "coverage")
    ]
    assert list(lazy.columns) == ["user", *ends]
    pd.testing.assert_series_equal(lazy["user"], table["user"])
    for name in ("price", "rating"):
        lower, upper = (lazy[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
        assert held_by(
            Ranges(lower=lower, upper=upper, is_null=np.zeros(len(lower), dtype=bool)),
            table[name].to_numpy(),
        ).all()
    at_once, _, _ = released(made, table, tmp_path / "pandas")
    one, _, _ = released(made, dd.from_pandas(table, npartitions=1), tmp_path / "one")
    with dask.config.set(scheduler="synchronous"):
        pd.testing.assert_frame_equal(at_once, one.compute())


def test_whole_numbers_without_a_declared_type_have_their_own_mean_coverage(tmp_path: Path) -> None:
    anchors = {"name": "uniform", "loc": 0, "scale": 2}
    made = bound(
        {"price": {"design": "case1", "anchors": anchors, "reference": anchors}},
        schema={"price": {**PRICE, "bounds": [0, 10]}},
        coverage=True,
    )
    values = np.random.default_rng(0).choice(
        [0, 1, 2], 20_000, p=[0.25, 0.5, 0.25]
    )  # what the reference rounds to
    for kind, expected in (("int64", 5 / 8), ("float64", 2 / 3)):
        found, fitted, work = released(
            made, pd.DataFrame({"price": values.astype(kind)}), tmp_path / kind
        )
        told = card(made, fitted, work).to_dict()["columns"]["price"]
        assert told["mean_coverage"] == pytest.approx(expected, abs=1e-3)
        assert told["numbers"] == "the column's own"
        if kind == "int64":
            assert found["price_coverage"].mean() == pytest.approx(expected, abs=0.01)


def test_the_card_tells_perturbed_columns_from_the_others(
    table: pd.DataFrame, tmp_path: Path
) -> None:
    made = bound({"price": perturbed(0.5), "rating": RATING}, {"epsilon": 0.5})
    _, fitted, work = released(made, table, tmp_path / "secrets")
    told = card(made, fitted, work).to_dict()
    assert (told["guarantee"]["epsilon"], told["guarantee"]["epsilon_private"]) == (0.5, ["price"])
    assert told["guarantee"]["interval_private_only"] == ["rating"]
    assert told["guarantee"]["text"].startswith(
        "INSECURE: anchors and perturbations are reproducible from a seed"
    )
    assert told["accounting"]["epsilon_exact"] <= 0.5


def test_nothing_is_fitted_before_the_charge(table: pd.DataFrame, tmp_path: Path) -> None:
    def refuse() -> None:
        raise BudgetError("too small", "ledger")

    made = bound({"price": perturbed(0.5), "rating": RATING}, {"epsilon": 0.5})
    with pytest.raises(BudgetError):
        released(made, table, tmp_path / "secrets", refuse)
    assert [path.name for path in (tmp_path / "secrets").iterdir()] == [KEY_NAME]


def test_rows_that_must_be_counted_are_checked() -> None:
    made = bound({"price": CASE1}, schema={"price": {**PRICE, "outside": "refuse"}})
    columns = columns_of(made, pa.schema([("price", pa.float64())]))
    statistic: Statistic[Any] = made.statistic(columns)
    counter = statistic.counter()
    with pytest.raises(DataError, match=r"column 'price': holds a value outside its bounds"):
        counter.add(pa.record_batch({"price": [0.5, 2.0]}), None, None)  # type: ignore[arg-type]  # it draws nothing
