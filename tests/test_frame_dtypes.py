"""The dtypes of released frames are those of the frames that were given, also of dates, decimals and whole numbers beside nulls."""

import datetime as dt
from decimal import Decimal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpdask
from dpdask.engine.lazy import read_frame
from dpdask.io.storage import Folder

N = 400
DAYS = np.random.default_rng(0).integers(0, 20_000, N)
DATES = [dt.date(1970, 1, 1) + dt.timedelta(days=int(day)) for day in DAYS]
NULLS = DAYS % 5 == 0
SPAN = [dt.date(1970, 1, 1), dt.date(2030, 12, 31)]
NULLABLE = {"nulls": "level"}

TYPED = {
    "date32": (
        pd.Series(DATES, dtype=pd.ArrowDtype(pa.date32())),
        {"kind": "continuous", "bounds": SPAN},
    ),
    "date levels": (
        pd.Series(DATES, dtype=pd.ArrowDtype(pa.date32())),
        {"kind": "discrete", "levels": sorted(set(DATES))},
    ),
    "date nulls": (
        pd.Series(DATES, dtype=pd.ArrowDtype(pa.date32())).mask(NULLS),
        {"kind": "continuous", "bounds": SPAN, **NULLABLE},
    ),
    "decimal": (
        pd.Series(
            [Decimal(int(day) % 3) / 2 for day in DAYS], dtype=pd.ArrowDtype(pa.decimal128(5, 1))
        ),
        {"kind": "discrete", "levels": [0, 0.5, 1]},
    ),
    "int32": (pd.Series(DAYS % 7, dtype="int32"), {"kind": "continuous", "bounds": [0, 7]}),
    "Int32": (
        pd.Series(pd.array(DAYS % 7, dtype="Int32")).mask(NULLS),
        {"kind": "continuous", "bounds": [0, 7], **NULLABLE},
    ),
    "boolean": (
        pd.Series(pd.array(DAYS % 7 > 2, dtype="boolean")).mask(NULLS),
        {"kind": "categorical", "levels": [True, False], **NULLABLE},
    ),
    "seconds": (
        pd.Series(DAYS * 86_400).astype("datetime64[s]"),
        {"kind": "continuous", "bounds": SPAN},
    ),
    "zoned": (
        pd.Series(pd.to_datetime(DAYS, unit="D", utc=True)).astype("datetime64[us, UTC]"),
        {"kind": "continuous", "bounds": SPAN},
    ),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:A released row keeps", "ignore:A cell holds", "ignore:.*few cells stand out"
)


@pytest.fixture(autouse=True)
def _here():
    with dask.config.set(scheduler="synchronous"):
        yield


def declare(column, **more):
    return dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", **column}, **more}})


def known_as(frame):
    return frame.dtypes.astype(str).to_dict()


@pytest.mark.parametrize("lazy", [False, True], ids=["pandas", "dask"])
@pytest.mark.parametrize("name", TYPED)
def test_transformed_rows_have_the_dtypes_of_the_frame(name, lazy):
    values, column = TYPED[name]
    table = pd.DataFrame({"x": values, "kept": values})
    frame = dd.from_pandas(table, npartitions=2) if lazy else table
    with dpdask.DIP(
        declare(column, kept={"role": "keep"}), epsilon=2.0, reference=dpdask.Histogram()
    ).fit(frame) as release:
        released = release.transform(frame)
        assert known_as(released) == known_as(table)
        assert known_as(dask.compute(released)[0]) == known_as(table)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize(("kind", "lazy"), [("copula", True), ("histogram", False)])
def test_records_have_the_dtypes_of_the_frame(kind, name, lazy):
    values, column = TYPED[name]
    estimator = (dpdask.GaussianCopula if kind == "copula" else dpdask.PerturbedHistogram)(
        declare(column), epsilon=8.0, bins=4
    )
    table = pd.DataFrame({"x": values})
    records = estimator.fit(dd.from_pandas(table, npartitions=2) if lazy else table).sample(
        300, rows_per_partition=120
    )
    assert known_as(records) == known_as(table)
    assert known_as(records.compute()) == known_as(table)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's to_parquet
@pytest.mark.parametrize("name", ["date32", "decimal"])
def test_records_are_written_with_the_type_of_the_table(name, tmp_path):
    values, column = TYPED[name]
    release = dpdask.GaussianCopula(declare(column), epsilon=8.0, bins=4).fit(
        pd.DataFrame({"x": values})
    )
    records = release.sample(300, rows_per_partition=120)
    records.to_parquet(tmp_path / "records")
    assert (
        pq.read_schema(tmp_path / "records" / "part.0.parquet").field("x").type
        == release.fitted.types.field("x").type
    )
    assert (
        pq.read_table(tmp_path / "records")["x"].to_pylist()
        == pa.array(records["x"].compute()).to_pylist()
    )


def test_a_published_table_is_read_lazily_with_its_types(tmp_path):
    table = pa.table(
        {
            "day": pa.array(DATES),
            "price": pa.array([Decimal("1.5")] * N),
            "town": ["a"] * N,
            "tags": [["a", "b"]] * N,
        }
    )
    pq.write_table(table, tmp_path / "part.parquet")
    rows = read_frame(Folder(str(tmp_path)), ["part.parquet"])
    assert known_as(rows) == known_as(rows.compute())
    assert [str(rows.dtypes[name]) for name in ("day", "price")] == [
        "date32[day][pyarrow]",
        "decimal128(2, 1)[pyarrow]",
    ]
    assert rows[rows["day"] > DATES[0]]["day"].compute().gt(DATES[0]).all()
    assert list(rows["tags"].compute()[0]) == ["a", "b"]


# ---- columns of Python objects, as pandas makes them of dates


def objects(values):
    return pd.DataFrame(
        {"x": pd.Series(values, dtype=object), "kept": pd.Series(values, dtype=object)}
    )


def dip(column, **given):
    return dpdask.DIP(
        declare(column, kept={"role": "keep"}), epsilon=2.0, reference=dpdask.Histogram(), **given
    )


@pytest.mark.parametrize(
    "values", [DATES, [None, *DATES[1:]], [None] * N], ids=["dates", "a null first", "nulls only"]
)
def test_dates_that_pandas_holds_as_objects_are_dates(values):
    table = objects(values)
    column = {"kind": "continuous", "bounds": SPAN, **NULLABLE}
    with dip(column).fit(table) as release:
        assert release.card["columns"]["x"]["numbers"] == "days since 1970-01-01"
        released = release.transform(table)
    assert known_as(released) == known_as(table)
    known = released["x"].dropna()
    assert {type(value) for value in known} == ({dt.date} if len(known) else set())
    assert len(known) or not any(values)  # of nulls only, noise may leave nothing else
    assert known.between(*SPAN).all()
    assert released["kept"].equals(table["kept"])


def test_truth_values_beside_nulls_are_objects_too():
    table = objects([None, True, False, True] * 100)
    column = {"kind": "categorical", "levels": [False, True], **NULLABLE}
    with dip(column).fit(table) as release:
        released = release.transform(table)
    assert set(released["x"]) <= {None, True, False}
    assert known_as(released) == known_as(table)


TEXTS = r"column 'x': dates are declared, and it holds texts"
CONVERT = r"; convert it before `fit`, by astype\(\{'x': 'date32\[pyarrow\]'\}\)$"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([str(date) for date in DATES], TEXTS + CONVERT),
        (
            [pd.Timestamp(date) for date in DATES],
            "holds Python objects, such as a Timestamp; convert it before `fit`, by pandas.to_datetime",
        ),
        ([None, *range(1, N)], "holds Python objects, such as an int; convert"),
        (
            [Decimal(1)] * N,
            "holds Python objects, such as a Decimal; convert it before `fit`, by astype, such as to 'Int64'",
        ),
        (
            [*DATES[1:], dt.datetime(2000, 1, 1, 12, tzinfo=dt.UTC)],
            "a partition's values do not fit the frame's dtypes",
        ),  # not cut
        (
            [*DATES[1:], 12_345],
            "a partition's values do not fit the frame's dtypes",
        ),  # nor taken for days
        ([*DATES[1:], "planted-secret"], "a partition's values do not fit the frame's dtypes"),
    ],
    ids=[
        "texts",
        "times",
        "whole numbers",
        "decimals",
        "a time among dates",
        "a number among dates",
        "a text among dates",
    ],
)
def test_objects_that_are_no_dates_are_refused(values, message):
    with pytest.raises(dpdask.DataError, match=message) as caught:
        dip({"kind": "continuous", "bounds": SPAN}).fit(objects(values))
    assert "planted-secret" not in str(caught.value)


def test_dask_is_told_how_to_keep_dates():
    table, made = objects(DATES), dip({"kind": "continuous", "bounds": SPAN})
    with pytest.raises(
        dpdask.DataError, match=f"{TEXTS}, as Dask makes of Python's dates{CONVERT}"
    ):
        made.plan(dd.from_pandas(table, npartitions=2))
    with dask.config.set({"dataframe.convert-string": False}):
        frame = dd.from_pandas(table, npartitions=2)
        with pytest.raises(
            dpdask.DataError,
            match=f"it holds Python objects, and Dask does not tell of which type{CONVERT}",
        ):
            made.fit(frame)
    for frame in (
        dd.from_pandas(table, npartitions=2).astype({"x": "date32[pyarrow]"}),
        dd.from_pandas(table.astype({"x": "date32[pyarrow]"})),
    ):
        with made.fit(frame) as release:
            assert str(release.transform(frame).compute()["x"].dtype) == "date32[day][pyarrow]"


@pytest.mark.parametrize(
    ("column", "types"),
    [
        ({"kind": "discrete", "levels": [0, 1]}, {int, type(None)}),
        ({"kind": "continuous", "bounds": [0, 7]}, {float}),
        ({"kind": "categorical", "levels": ["a", "b"]}, {str, float}),
    ],
    ids=["whole", "bounds", "texts"],
)
def test_a_column_of_nulls_alone_has_the_type_that_is_declared(column, types):
    """pandas knows no type of it; texts were assumed, and the error advised to put the declared numbers in quotes."""
    table = objects([None] * N)
    with dip({**column, **NULLABLE}).fit(table) as release:
        released = release.transform(table)
    assert known_as(released) == known_as(table)
    assert set(map(type, released["x"])) <= types
    assert set(released["x"].dropna()) <= set(column.get("levels", released["x"].dropna()))


def test_a_column_of_nulls_alone_whose_texts_are_bytes_is_released():
    column = {"kind": "categorical", "levels": ["a", "b"], "encoding": "utf-8", **NULLABLE}
    table = objects([None] * N)
    with dip(column).fit(table) as release:
        assert set(release.transform(table)["x"].dropna()) <= {b"a", b"b"}


@pytest.mark.parametrize("type_", [pa.string_view(), pa.binary_view()])
def test_a_private_column_of_views_is_refused_before_it_is_counted(type_):
    """Arrow takes no rows of a view, which came out where the rows were transformed, after ε was spent. Dask holds no views."""
    encoding = {"encoding": "utf-8"} if type_ == pa.binary_view() else {}
    column = {"kind": "categorical", "levels": ["a", "b"], **encoding}
    view = pd.Series(pd.arrays.ArrowExtensionArray(pa.array(["a", "b"] * 200, type_)))
    table, made = pd.DataFrame({"x": view, "kept": 0}), dip(column)
    refused = r"^column 'x': no released rows can be made of the type (string|binary)_view; make plain values .* by frame\['x'\] = frame\['x'\]\.to_list\(\)$"
    for each in (made.fit, made.plan):
        with pytest.raises(dpdask.DataError, match=refused):
            each(table)
    table["x"] = table["x"].to_list()
    with made.fit(table) as release:
        assert known_as(release.transform(table)) == known_as(table)
