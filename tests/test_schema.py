import datetime as dt
import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import mixed_tables

from dpdask.documents import Text
from dpdask.domains import MAX_LEVELS, MAX_LISTED, list_domains
from dpdask.errors import DataError, SpecError
from dpdask.schema import Schema

DAY = dt.date(2020, 1, 1)


def refusal(kind, call, *args):
    with pytest.raises(kind) as caught:
        call(*args)
    error = caught.value
    assert error.exit_code == {SpecError: 64, DataError: 65}[kind]
    assert error.what
    assert error.where
    assert "\n" not in str(error)
    return error


def declare(**column):
    return Schema.from_dict({"columns": {"x": column}}, "schema.yaml")


def refused(**column):
    error = refusal(SpecError, lambda: declare(**column))
    assert "x" in str(error)
    return str(error)


def privatised(kind, **column):
    return {"role": "privatise", "kind": kind, **column}


RATINGS = Schema.from_dict(
    {
        "columns": {
            "userId": {"role": "keep"},
            "rating": privatised("discrete", levels=[0.5, 1.0, 1.5]),
            "genre": privatised("categorical", levels=["drama", "comedy"], type="string"),
            "timestamp": {"role": "drop"},
        }
    }
)
TABLE = pa.schema(
    [
        pa.field("genre", pa.dictionary(pa.int8(), pa.string()), metadata={"source": "secret"}),
        pa.field("timestamp", pa.int64()),
        pa.field("rating", pa.float32(), nullable=False),
        pa.field("userId", pa.dictionary(pa.int32(), pa.int64())),
    ],
    metadata={"pandas": "secret"},
)


# ---- what a schema may declare


def test_as_many_levels_as_may_be_and_any_sequence_of_them_are_accepted():
    for column in (
        privatised("discrete", levels=list(range(MAX_LEVELS))),
        privatised("categorical", levels=(2, 1)),
        {"role": "drop", "type": "int32"},
    ):
        assert declare(**column).columns["x"].role == column["role"]


LIST, ONE_TYPE, TWO_NUMBERS, MISORDERED = (
    "columns.x.levels: a list of",
    "levels must be of one type",
    "bounds need two finite numbers",
    "must be strictly increasing",
)


def levels(*cases):
    return [(privatised("categorical", levels=each), message) for each, message in cases]


def ordered(*cases):
    return [
        (privatised(kind, **{key: each}), message)
        for each, message in cases
        for kind, key in (("discrete", "levels"), ("mixed", "atoms"))
    ]


def bounds(message, *cases):
    return [(privatised("continuous", bounds=each), message) for each in cases]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({}, "the key 'columns.x.role' is missing"),
        ({"role": "private"}, "columns.x.role: 'keep', 'privatise' or 'drop' is expected"),
        ({"role": 1}, "columns.x.role"),
        (
            {"role": "keep", "nulls": "drop"},
            "columns.x.nulls: 'refuse' or 'level' is expected, not 'drop'",
        ),
        (
            privatised("continuous", nulls=True),
            "columns.x.nulls: `level` (null is one more value) or `refuse` (a null stops the job) is expected, not true",
        ),
        ({"role": "privatise"}, "needs a kind"),
        ({"role": "privatise", "kind": "ordinal"}, "columns.x.kind: 'discrete'"),
        *(
            ({"role": "keep", key: value}, f"{key} belongs to a privatised column")
            for key, value in {
                "kind": "discrete",
                "levels": [1],
                "bounds": [0, 1],
                "atoms": [0],
            }.items()
        ),
        (
            {"role": "keep", "type": "timestamp"},
            "'timestamp' is not an Arrow type; use int32, int64, float64, decimal128(10, 2), string, bool, date32, timestamp[us], timestamp[us, tz=UTC], time32[s] or the like",
        ),
        (
            {"role": "keep", "type": "timestamp[day, tz=UTC]"},
            "'timestamp[day, tz=UTC]' is not an Arrow type",
        ),
        ({"role": "keep", "type": 3}, "columns.x.type: a text is expected"),
        *(
            (privatised(kind), f"a {kind} column needs {key}")
            for kind, key in (("discrete", "levels"), ("categorical", "levels"), ("mixed", "atoms"))
        ),
        (privatised("discrete", levels=[1], bounds=[0, 1]), "a discrete column takes no bounds"),
        (privatised("categorical", levels=["a"], atoms=[1]), "a categorical column takes no atoms"),
        (privatised("continuous", levels=[1]), "a continuous column takes no levels"),
        (privatised("mixed", atoms=[1], levels=[1]), "a mixed column takes no levels"),
        *levels(
            ([], "between 1 and 32,768 levels"),
            (list(range(MAX_LISTED + 1)), "between 1 and 32,768 levels"),
            (["a", "b", "a"], "the level 'a' is repeated; give it once"),
            ([1, 2, 1.0], "the level 1.0 is repeated"),
            ([0.0, -0.0], "the level -0.0 is repeated"),
            ([True, False, True], "the level true is repeated"),
            ([DAY, DAY], f"the level {DAY} is repeated"),
            (["a" * 80, "a" * 80], "columns.x: a level is repeated"),
            ([1, "a"], ONE_TYPE),
            ([1, True], ONE_TYPE),
            (["a", DAY], ONE_TYPE),
            ([False, "SE"], ONE_TYPE),  # what YAML makes of [no, SE]
            ([1.0, float("nan")], "levels must be finite"),
            (["a", None], "`nulls: level`"),
            (["a", ["b"]], LIST),
            (["a", b"b"], LIST),
            ("abc", LIST),
            ({"a": 1}, LIST),
            (3, LIST),
            ([dt.datetime(2020, 1, 1)], LIST),  # noqa: DTZ001
        ),
        *ordered(
            ([2, 1], MISORDERED),
            ([1, 1.5, 1.25], MISORDERED),
            ([dt.date(2020, 1, 2), DAY], MISORDERED),
            ([1, 1], "the level 1 is repeated"),
            (["a", "b"], "a column of texts is categorical"),
            ([False, True], "must be numbers or dates"),
            ([float("nan")], "levels must be finite"),
        ),
        *bounds(
            TWO_NUMBERS,
            [1, 1],
            [0, float("inf")],
            [float("nan"), 1],
            [0],
            [0, 1, 2],
            [],
            3,
            "ab",
            {"low": 0},
            [DAY, 1],
            [DAY, DAY],
        ),
        *bounds("the lower bound 5000 is above the upper bound 0; swap them", [5000, 0]),
        *bounds("the lower bound 0.5 is above the upper bound -1e+300; swap them", [0.5, -1e300]),
        *bounds(
            f"the lower bound 2020-01-02 is above the upper bound {DAY}; swap them",
            [dt.date(2020, 1, 2), DAY],
        ),
        *bounds("the bounds are closer than 2.2", [0, 5e-324], [-1e-310, 1e-310]),
        *bounds("columns.x.bounds.", [0, True], [0, None], [0, 10**400]),
        *bounds("columns.x.bounds: bounds are texts", ["0", 1], ["01.01.2000", "31.12.2040"]),
        *(
            (privatised("mixed", atoms=atoms, bounds=[0, 10]), "atoms must lie within the bounds")
            for atoms in ([-1, 0], [0, 11], [10**400])
        ),
    ],
)
def test_a_column_that_does_not_hold_together_is_refused(column, message):
    assert message in refused(**column)


def test_columns_without_the_key_above_them_are_answered_once():
    with pytest.raises(SpecError) as caught:
        Schema.from_text(Text("schema.yaml", "a: {role: keep}\nb: {role: drop}\n"))
    assert (
        str(caught.value)
        == "schema.yaml: the key 'columns' is missing above the columns; begin with the line `columns:`, and indent the rest"
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        *(
            (data, "columns")
            for data in (
                {},
                {"columns": {}},
                {"columns": ["x"]},
                {"columns": None},
                {"columns": {"x": "keep"}},
            )
        ),
        ({"colums": {"x": {"role": "keep"}}}, "unknown key 'colums'; did you mean 'columns'?"),
        (
            {"columns": {"kind": {"role": "privatise", "kind": "continuous", "lower": 0}}},
            "unknown key 'columns.kind.lower'; did you mean 'bounds'?",
        ),
    ],
)
def test_a_schema_of_another_shape_is_refused(data, says):
    assert says in str(refusal(SpecError, Schema.from_dict, data))
    with pytest.raises(SpecError, match=r"columns\.0"):
        Schema.from_dict({"columns": {0: {"role": "kep"}}})


@pytest.mark.parametrize(
    ("key", "nearest"), [("level", "levels"), ("Bounds", "bounds"), ("columns", None)]
)
def test_an_unknown_key_of_a_column_is_answered_with_the_nearest_one(key, nearest):
    error = refusal(SpecError, lambda: declare(role="keep", **{key: 1}))
    assert error.what == f"unknown key 'columns.x.{key}'"
    assert "did you mean" in error.hint
    assert nearest is None or repr(nearest) in error.hint
    assert "'columns'" not in error.hint


# ---- from a file


def test_a_schema_is_read_from_yaml(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(
        "columns:\n  id: {role: keep}\n  x: {role: privatise, kind: continuous, bounds: [-1e3, 1e3]}\n"
        "  day: {role: privatise, kind: discrete, levels: [2020-01-01]}\n"
    )
    schema = Schema.from_yaml(path)
    assert schema == Schema.from_yaml(str(path))
    assert (schema.kept, schema.privatised) == (("id",), ("x", "day"))
    assert schema.columns["x"].bounds == (-1000.0, 1000.0)
    assert schema.columns["day"].levels == (DAY,)


def test_a_column_declared_twice_is_refused_with_its_line(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text("columns:\n  id: {role: keep}\n  id: {role: drop}\n")
    assert (
        str(refusal(SpecError, Schema.from_yaml, path))
        == "schema.yaml, line 3: the key 'id' is repeated; remove one of the two"
    )


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00columns", b"PAR1\x00columns"])
def test_a_schema_file_that_cannot_be_read_is_refused(tmp_path, content):
    path = tmp_path / "schema.yaml"
    if content is not None:
        path.write_bytes(content)
    error = refusal(SpecError, Schema.from_yaml, path)
    assert error.what == "the schema cannot be read" + (
        "" if content is None else ", since it is not a YAML text in UTF-8"
    )
    assert error.hint
    refusal(SpecError, Schema.from_yaml, tmp_path)


def test_a_schema_is_immutable_and_knows_its_roles():
    assert RATINGS.privatised == ("rating", "genre")
    assert RATINGS.kept == ("userId",)
    assert [column.has_levels for column in RATINGS.columns.values()] == [False, True, True, False]
    with pytest.raises(ValueError, match="frozen"):
        RATINGS.columns = {}  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        RATINGS.columns["rating"].nulls = "level"  # type: ignore[misc]


# ---- what of a table is released


def test_what_is_released_has_the_tables_order_and_plain_types_and_no_metadata():
    released = RATINGS.select_released(TABLE)
    assert released.equals(
        pa.schema([("genre", pa.string()), ("rating", pa.float32()), ("userId", pa.int64())]),
        check_metadata=True,
    )
    assert released.metadata is None
    assert all(field.nullable and field.metadata is None for field in released)


UNDECLARED, MEND = (
    "this column is not declared in the schema",
    "declare it: role keep, privatise or drop",
)
RATING = TABLE.get_field_index("rating")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        *(
            (TABLE.remove(place), f"column {name!r}: this declared column is not in the table")
            for place, name in enumerate(TABLE.names)
        ),
        *(
            (
                TABLE.append(pa.field(name, pa.string())),
                f"column {name!r}: this column appears twice in the table",
            )
            for name in ("userId", "timestamp")
        ),
        *(
            (
                TABLE.set(0, pa.field("genre", type_)),
                "column 'genre': declared as string, but its type is ",
            )
            for type_ in (pa.large_string(), pa.int32())
        ),
        (TABLE.append(pa.field("name", pa.string())), f"column 'name': {UNDECLARED}; {MEND}"),
        (
            TABLE.set(RATING, TABLE.field(RATING).with_name("stars")),
            f"column 'stars': {UNDECLARED}, and of those that are declared the table lacks 'rating'; {MEND}",
        ),
        (
            TABLE.set(RATING, TABLE.field(RATING).with_name("ratings")),
            f"column 'ratings': {UNDECLARED}; {MEND}, or correct the name 'rating' there",
        ),
    ],
)
def test_a_table_with_other_columns_stops_the_job(table, message):
    error = refusal(DataError, RATINGS.select_released, table)
    assert str(error).startswith(message)
    assert error.hint


def test_of_many_columns_that_are_missing_some_are_named():
    many = Schema.from_dict({"columns": {f"c{number}": {"role": "keep"} for number in range(9)}})
    assert refusal(DataError, many.check_names, ["stars"]).what.endswith(
        "the table lacks 'c0', 'c1', 'c2', 'c3', 'c4', 'c5' and 3 more"
    )


@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(mixed_tables())
def test_any_table_that_lacks_a_column_or_has_one_too_many_is_refused(case):
    table = case.table.schema
    names = [*case.columns, "kept"]
    assert sorted(case.schema.select_released(table).names) == sorted(names)
    for i in range(len(table)):
        refusal(DataError, case.schema.select_released, table.remove(i))
        refusal(DataError, case.schema.select_released, table.append(table.field(i)))
    refusal(DataError, case.schema.select_released, table.append(pa.field("new", pa.int8())))


def made_of(**short):
    return Schema.from_dict({"columns": {"x": {"role": "privatise", **short}}}).columns["x"]


@pytest.mark.parametrize(
    ("short", "plain"),
    [
        ({"kind": "discrete", "levels": "-2..3"}, {"levels": [-2, -1, 0, 1, 2, 3]}),
        ({"kind": "categorical", "levels": "7..7"}, {"levels": [7]}),
        ({"kind": "discrete", "levels": "1..3", "other": 0}, {"levels": [0, 1, 2, 3]}),
        ({"kind": "discrete", "levels": "1..3", "other": 2}, {"levels": [1, 2, 3]}),
        ({"kind": "discrete", "levels": "months"}, {"levels": [*range(1, 13)]}),
        ({"kind": "categorical", "levels": "sexes"}, {"levels": ["female", "male"]}),
        (
            {"kind": "categorical", "levels": "sexes", "other": "other"},
            {"levels": ["female", "male", "other"]},
        ),
        ({"kind": "continuous", "bounds": "latitudes"}, {"bounds": [-90, 90]}),
        (
            {"kind": "mixed", "atoms": "0..1", "bounds": "shares"},
            {"atoms": [0, 1], "bounds": [0, 1]},
        ),
    ],
)
def test_ranges_and_names_stand_for_what_a_list_says(short, plain):
    assert made_of(**short) == made_of(**{**short, **plain})
    assert made_of(**short).model_dump() == made_of(**{**short, **plain}).model_dump()


@pytest.mark.parametrize(
    ("short", "says"),
    [
        ({"levels": "3..1"}, "3 is above 1, not '3..1'; swap them"),
        ({"levels": f"1..{MAX_LISTED + 1}"}, "between 1 and 32,768 levels"),
        ({"levels": "us_state"}, "did you mean 'us_states'?"),
        ({"levels": "latitudes"}, "'latitudes' names public bounds; write `bounds: latitudes`"),
        ({"kind": "continuous", "bounds": "hours"}, "names public levels; write `levels: hours`"),
        ({"kind": "continuous", "bounds": "latitude"}, "did you mean 'latitudes'?"),
    ],
)
def test_wrong_ranges_and_names_are_refused(short, says):
    with pytest.raises(SpecError) as caught:
        made_of(**{"kind": "categorical", **short})
    assert says in str(caught.value)


@pytest.mark.parametrize("name", list_domains())
def test_each_named_domain_is_one_and_the_page_lists_it_with_its_source(name):
    domain = list_domains()[name]
    kind = "continuous" if "bounds" in domain else "categorical"
    made = made_of(kind=kind, **{key: name for key in domain if key != "source"})
    shown = f"{len(made.levels)}: " if isinstance(domain.get("levels"), list) else ""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "schema.md").read_text("utf-8")
    assert re.search(
        rf"^\| `{name}` \| {shown}.* \| {re.escape(domain['source'])} \|$", page, re.MULTILINE
    )
