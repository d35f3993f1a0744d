"""The specification of `interval`: what construction refuses, in a job and in Python alike, and one release of a frame."""

import datetime as dt

import pyarrow as pa
import pytest
from e2e.helpers import continuous, discrete, schema_of

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.errors import SpecError
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget

UNIT = {"name": "uniform", "loc": 0, "scale": 1}
LEVELS = [1.0, 2.0, 3.0, 4.0, 5.0]
PRICE = continuous([0.0, 1.0], outside="refuse")
COLUMNS = {
    "user": {"role": "keep"},
    "price": PRICE,
    "rating": discrete(LEVELS),
    "note": {"role": "drop"},
}
CASE1 = {"design": "case1", "anchors": UNIT}
RATING = {"design": "case2", "anchors": {"name": "uniform", "loc": 0.5, "scale": 5}}
DESIGNS = {"price": CASE1, "rating": RATING}


def perturbed(epsilon=1.0, reference=UNIT, **more):
    return {
        "design": "interval-differential",
        "perturb": {"epsilon": epsilon, "reference": {"kind": "known", **reference}, **more},
        "of": CASE1,
    }


def bound(designs=DESIGNS, budget=None, schema=COLUMNS, **more):
    spec = validate(IntervalSpec, {"columns": designs, **more}, "interval")
    return bind(
        spec,
        schema_of(schema),
        None if budget is None else Budget.model_validate(budget),
    )


def price(**changed):
    return {"schema": {**COLUMNS, "price": {**PRICE, **changed}}}


def design(of_price, **more):
    return {"designs": {**DESIGNS, "price": of_price}, **more}


# ---- what construction refuses

REFUSED = {
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
    "unknown key": ({"coverages": True}, r"unknown key 'coverages'; did you mean 'coverage'\?"),
    "coverage that is no truth value": ({"coverage": "yes"}, r"^interval, coverage: "),
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
}


@pytest.mark.parametrize("name", REFUSED)
def test_construction_refuses(name):
    given, says = REFUSED[name]
    with pytest.raises(SpecError, match=says) as error:
        bound(**given)
    assert "\n" not in str(error.value)


def test_a_design_that_some_type_can_have_is_refused_only_once_the_type_is_known():
    made = bound(
        {"price": {"design": "case1", "at_least": 0.1, "reference": UNIT}}, schema={"price": PRICE}
    )
    made.check(columns_of(made, pa.schema([("price", pa.float64())])))
    with pytest.raises(SpecError, match=r"^column 'price': whole numbers"):
        made.check(columns_of(made, pa.schema([("price", pa.int64())])))


def test_what_needs_the_types_is_refused_before_a_row_is_read():
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


def test_more_than_any_budget_is_refused():
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


def test_a_plan_tells_how_wide_ranges_will_be():
    """Of values spread as evenly as the anchors, one anchor leaves 2/3 of the domain on average, two leave 1/2, and so does a ring leave 2/3."""
    ring = {"design": "ring", "anchors": UNIT}
    day = continuous([dt.date(2020, 1, 1), dt.date(2030, 1, 1)], outside="refuse")
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
    said = made.description.expectations(columns)
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
    assert made.description.cautions(columns, 1_000) == ()
    many = {f"c{place}": PRICE for place in range(9)}
    wide = bound(dict.fromkeys(many, CASE1), schema=many)
    assert (
        wide.description.expectations(
            columns_of(wide, pa.schema([(name, pa.float64()) for name in many]))
        )[-1]
        == "4 more columns of ranges"
    )


def test_a_plan_warns_of_ranges_that_tell_next_to_nothing():
    far = continuous([0.0, 5e7], outside="refuse")
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
    [warning] = made.description.cautions(columns, None)
    assert warning.startswith(
        "far, hidden: a range rules out less than 1 % of the values on average"
    )
    assert "holds 99.98" in made.description.expectations(columns)[0]


def columns_of(made, types):
    codecs = {
        name: codec_for(name, made.schema.columns[name], types.field(name).type)
        for name in made.schema.privatised
    }
    return Columns(types=types, codecs=codecs)
