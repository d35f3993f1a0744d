import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from strategies import TableCase, mixed_tables

from dpdask.documents import Text
from dpdask.errors import DataError, DpdaskError, SpecError
from dpdask.schema import MAX_LEVELS, Schema, arrow_type

DAY = dt.date(2020, 1, 1)


def refusal(kind: type[DpdaskError], call, *args) -> DpdaskError:
    with pytest.raises(kind) as caught:
        call(*args)
    error = caught.value
    assert error.exit_code == {SpecError: 64, DataError: 65}[kind]
    assert error.what
    assert error.where
    assert "\n" not in str(error)
    return error


def declare(**column: Any) -> Schema:
    return Schema.from_dict({"columns": {"x": column}}, "schema.yaml")


def refused(**column: Any) -> str:
    error = refusal(SpecError, lambda: declare(**column))
    assert "x" in str(error)
    return str(error)


def privatised(kind: str, **column: Any) -> dict[str, Any]:
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


@pytest.mark.parametrize(
    "column",
    [
        {"role": "keep"},
        {"role": "drop", "type": "int32"},
        privatised("discrete", levels=[1, 2.5, 4]),
        privatised("discrete", levels=[DAY, dt.date(2020, 1, 2)]),
        privatised("categorical", levels=["b", "a", ""], nulls="level"),
        privatised("categorical", levels=[True, False]),
        privatised("categorical", levels=(2, 1)),
        privatised("discrete", levels=list(range(MAX_LEVELS))),
        privatised("continuous"),
        privatised("continuous", bounds=[0, 1.5]),
        privatised("mixed", atoms=[0], bounds=[0, 10]),
        privatised("mixed", atoms=[0, 10]),
        privatised("mixed", atoms=[DAY], bounds=[0, 1], type="date32"),
    ],
)
def test_sensible_columns_are_accepted(column):
    assert declare(**column).columns["x"].role == column["role"]


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
        ({"role": "privatise"}, "needs a kind"),
        ({"role": "privatise", "kind": "ordinal"}, "columns.x.kind: 'discrete'"),
        ({"role": "keep", "kind": "discrete"}, "kind belongs to a privatised column"),
        ({"role": "drop", "levels": [1]}, "levels belongs to a privatised column"),
        ({"role": "keep", "bounds": [0, 1]}, "bounds belongs to a privatised column"),
        ({"role": "keep", "atoms": [0]}, "atoms belongs to a privatised column"),
        ({"role": "keep", "type": "int33"}, "'int33' is not an Arrow type"),
        (
            {"role": "keep", "type": "timestamp"},
            "'timestamp' is not an Arrow type; use int32, int64, float64, string, bool, date32, timestamp[us] or the like",
        ),
        ({"role": "keep", "type": 3}, "columns.x.type: a text is expected"),
        (privatised("discrete"), "a discrete column needs levels"),
        (privatised("categorical"), "a categorical column needs levels"),
        (privatised("mixed"), "a mixed column needs atoms"),
        (privatised("discrete", levels=[1], bounds=[0, 1]), "a discrete column takes no bounds"),
        (privatised("categorical", levels=["a"], atoms=[1]), "a categorical column takes no atoms"),
        (privatised("continuous", levels=[1]), "a continuous column takes no levels"),
        (privatised("continuous", atoms=[1]), "a continuous column takes no atoms"),
        (privatised("mixed", atoms=[1], levels=[1]), "a mixed column takes no levels"),
    ],
)
def test_a_column_that_does_not_hold_together_is_refused(column, message):
    assert message in refused(**column)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([], "between 1 and 2,048 levels"),
        (list(range(MAX_LEVELS + 1)), "between 1 and 2,048 levels"),
        (["a", "b", "a"], "the level 'a' is repeated; give it once"),
        ([1, 1, 2], "the level 1 is repeated"),
        ([1, 2, 1.0], "the level 1.0 is repeated"),
        ([0.0, -0.0], "the level -0.0 is repeated"),
        ([True, False, True], "the level true is repeated"),
        ([DAY, DAY], f"the level {DAY} is repeated"),
        (["a" * 80, "a" * 80], "columns.x: a level is repeated"),
        ([1, "a"], "levels must be of one type"),
        ([1, True], "levels must be of one type"),
        ([1, DAY], "levels must be of one type"),
        (["a", DAY], "levels must be of one type"),
        ([False, "SE"], "levels must be of one type"),  # what YAML makes of [no, SE]
        ([1.0, float("nan")], "levels must be finite"),
        ([float("inf")], "levels must be finite"),
        (["a", None], "`nulls: level`"),
        (["a", ["b"]], "columns.x.levels: a list of"),
        (["a", b"b"], "columns.x.levels: a list of"),
        ([dt.datetime(2020, 1, 1)], "columns.x.levels: a list of"),  # noqa: DTZ001
        ("abc", "columns.x.levels: a list of"),
        ({"a": 1}, "columns.x.levels: a list of"),
        (3, "columns.x.levels: a list of"),
    ],
)
def test_levels_that_are_no_domain_are_refused(levels, message):
    assert message in refused(**privatised("categorical", levels=levels))


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([2, 1], "must be strictly increasing"),
        ([1, 1.5, 1.25], "must be strictly increasing"),
        ([dt.date(2020, 1, 2), DAY], "must be strictly increasing"),
        ([1, 1], "the level 1 is repeated"),
        (["a", "b"], "a column of texts is categorical"),
        ([False, True], "must be numbers or dates"),
        ([float("nan")], "levels must be finite"),
        ([], "between 1 and"),
    ],
)
def test_discrete_levels_and_atoms_are_ordered_numbers_or_dates(levels, message):
    assert message in refused(**privatised("discrete", levels=levels))
    assert message in refused(**privatised("mixed", atoms=levels))


@pytest.mark.parametrize(
    "bounds",
    [
        [1, 1],
        [0, float("inf")],
        [float("-inf"), 0],
        [float("nan"), 1],
        [0],
        [0, 1, 2],
        [],
        3,
        "ab",
        {"low": 0},
        [DAY, 1],
        [DAY, DAY],
    ],
)
def test_bounds_are_two_finite_numbers_the_lower_one_first(bounds):
    assert "bounds need two finite numbers" in refused(**privatised("continuous", bounds=bounds))


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        ([5000, 0], "5000", "0"),
        ([0.5, -1e300], "0.5", "-1e+300"),
        ([DAY + dt.timedelta(1), DAY], f"{DAY + dt.timedelta(1)}", f"{DAY}"),
    ],
)
def test_bounds_in_the_wrong_order_are_named(bounds, low, high):
    assert refused(**privatised("continuous", bounds=bounds)).endswith(
        f"the lower bound {low} is above the upper bound {high}; swap them"
    )


@pytest.mark.parametrize("bounds", [[0, 5e-324], [0, 1e-320], [-1e-310, 1e-310]])
def test_bounds_closer_than_a_normal_float_are_refused(bounds):
    assert "the bounds are closer than 2.2" in refused(**privatised("continuous", bounds=bounds))


@pytest.mark.parametrize("bounds", [[0, True], [0, None], [0, 10**400]])
def test_bounds_of_another_type_are_refused_by_their_place(bounds):
    assert "columns.x.bounds." in refused(**privatised("continuous", bounds=bounds))


@pytest.mark.parametrize(
    "bounds", [["0", 1], ["2000-01-01", "2040-12-31"], ["01.01.2000", "31.12.2040"]]
)
def test_bounds_in_quotes_are_answered_with_how_they_are_written(bounds):
    assert "columns.x.bounds: bounds are texts" in refused(
        **privatised("continuous", bounds=bounds)
    )


@pytest.mark.parametrize("nulls", [True, False])
def test_nulls_are_a_word(nulls):
    what = "columns.x.nulls: `level` (null is one more value) or `refuse` (a null stops the job) is expected"
    assert f"{what}, not {str(nulls).lower()}" in refused(**privatised("continuous", nulls=nulls))


def test_columns_without_the_key_above_them_are_answered_once():
    with pytest.raises(SpecError) as caught:
        Schema.from_text(Text("schema.yaml", "a: {role: keep}\nb: {role: drop}\n"))
    assert (
        str(caught.value)
        == "schema.yaml: the key 'columns' is missing above the columns; begin with the line `columns:`, and indent the rest"
    )


@pytest.mark.parametrize("atoms", [[-1, 0], [0, 11], [-0.5], [10**400]])
def test_atoms_outside_the_bounds_are_refused(atoms):
    assert "atoms must lie within the bounds" in refused(
        **privatised("mixed", atoms=atoms, bounds=[0, 10])
    )


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"columns": {}},
        {"columns": ["x"]},
        {"columns": None},
        {"columns": {"x": None}},
        {"columns": {"x": "keep"}},
    ],
)
def test_a_schema_of_another_shape_is_refused(data):
    assert "columns" in str(refusal(SpecError, Schema.from_dict, data))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("level", "levels"),
        ("rle", "role"),
        ("Bounds", "bounds"),
        ("knid", "kind"),
        ("columns", None),
    ],
)
def test_an_unknown_key_of_a_column_is_answered_with_the_nearest_one(key, nearest):
    error = refusal(SpecError, lambda: declare(role="keep", **{key: 1}))
    assert error.what == f"unknown key 'columns.x.{key}'"
    assert "did you mean" in error.hint
    assert nearest is None or repr(nearest) in error.hint
    assert "'columns'" not in error.hint


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"role": "kep"}, "columns.0"),
        ({"role": "privatise", "kind": "discrete", "levels": "a"}, "columns.0"),
    ],
)
def test_columns_that_are_named_by_numbers_are_refused(column, says):
    with pytest.raises(SpecError, match=says):
        Schema.from_dict({"columns": {0: column}}, "schema.yaml")


def test_an_unknown_key_of_the_schema_is_answered_with_the_nearest_one():
    error = refusal(SpecError, Schema.from_dict, {"colums": {"x": {"role": "keep"}}}, "schema.yaml")
    assert str(error) == "schema.yaml: unknown key 'colums'; did you mean 'columns'?"


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


def test_a_column_that_is_not_declared_stops_the_job():
    error = refusal(DataError, RATINGS.select_released, TABLE.append(pa.field("name", pa.string())))
    assert (
        str(error)
        == "column 'name': this column is not declared in the schema; declare it: role keep, privatise or drop"
    )


def test_a_renamed_column_is_answered_with_what_the_table_lacks():
    place = TABLE.get_field_index("rating")
    error = refusal(
        DataError, RATINGS.select_released, TABLE.set(place, TABLE.field(place).with_name("stars"))
    )
    what = "this column is not declared in the schema, and of those that are declared the table lacks 'rating'"
    assert str(error) == f"column 'stars': {what}; declare it: role keep, privatise or drop"
    many = Schema.from_dict({"columns": {f"c{number}": {"role": "keep"} for number in range(9)}})
    error = refusal(DataError, many.check_names, ["stars"])
    assert error.what.endswith("the table lacks 'c0', 'c1', 'c2', 'c3', 'c4', 'c5' and 3 more")


def test_a_misspelt_column_is_answered_with_the_declared_one():
    place = TABLE.get_field_index("rating")
    error = refusal(
        DataError,
        RATINGS.select_released,
        TABLE.set(place, TABLE.field(place).with_name("ratings")),
    )
    assert (
        str(error)
        == "column 'ratings': this column is not declared in the schema; declare it: role keep, privatise or drop, or correct the name 'rating' there"
    )


@pytest.mark.parametrize("name", ["userId", "rating", "genre", "timestamp"])
def test_a_declared_column_that_is_missing_stops_the_job(name):
    error = refusal(DataError, RATINGS.select_released, TABLE.remove(TABLE.get_field_index(name)))
    assert error.where == f"column {name!r}"
    assert error.what == "this declared column is not in the table"
    assert error.hint


@pytest.mark.parametrize("name", ["userId", "rating", "timestamp"])
def test_a_column_that_stands_twice_stops_the_job(name):
    error = refusal(DataError, RATINGS.select_released, TABLE.append(pa.field(name, pa.string())))
    assert (error.where, error.what) == (
        f"column {name!r}",
        "this column appears twice in the table",
    )
    assert error.hint


@pytest.mark.parametrize(
    "type_", [pa.large_string(), pa.int32(), pa.dictionary(pa.int8(), pa.int64())], ids=str
)
def test_a_column_of_another_type_than_declared_stops_the_job(type_):
    error = refusal(DataError, RATINGS.select_released, TABLE.set(0, pa.field("genre", type_)))
    assert error.where == "column 'genre'"
    assert error.what.startswith("declared as string, but its type is ")
    assert error.hint


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "uint64",
        "float16",
        "float64",
        "string",
        "large_string",
        "bool",
        "date32",
        "timestamp[us]",
    ],
)
def test_arrow_types_are_known_by_their_names(name):
    assert arrow_type(name) == pa.type_for_alias(name)


@pytest.mark.parametrize("name", ["", "int33", "decimal", "pandas"])
def test_a_name_of_no_arrow_type_is_refused(name):
    with pytest.raises(ValueError, match="is not an Arrow type") as caught:
        arrow_type(name)
    assert caught.value.__suppress_context__


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(mixed_tables())
def test_any_table_that_lacks_a_column_or_has_one_too_many_is_refused(case: TableCase):
    table = case.table.schema
    names = [*case.columns, "kept"]
    assert sorted(case.schema.select_released(table).names) == sorted(names)
    for i in range(len(table)):
        refusal(DataError, case.schema.select_released, table.remove(i))
        refusal(DataError, case.schema.select_released, table.append(table.field(i)))
    refusal(DataError, case.schema.select_released, table.append(pa.field("new", pa.int8())))
