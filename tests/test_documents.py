import datetime as dt
import math
import pickle
import traceback
from dataclasses import replace
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from dpdask.documents import Document, Text, check_all, parse_value, parse_yaml, validate
from dpdask.errors import SpecError


class Circle(Document):
    kind: Literal["circle"]
    radius: float = Field(gt=0, allow_inf_nan=False)


class Square(Document):
    kind: Literal["square"]
    side_length: int


class Drawing(Document):
    title: str
    shape: Annotated[Circle | Square, Field(discriminator="kind")] | None = None
    layers: dict[str, Circle] = Field(default_factory=dict)
    stack: tuple[Circle, ...] = ()
    size: int | tuple[int, int] | None = None


def refusal(call, *args):
    with pytest.raises(SpecError) as caught:
        call(*args)
    error = caught.value
    assert error.exit_code == 64
    assert (error.where or "").startswith("job.yaml")
    assert error.hint or "should" in error.what or "expected" in error.what
    assert "\n" not in str(error)
    assert (
        "Traceback" not in "".join(traceback.format_exception(error))[10:]
    )  # no library's error behind it
    return error


def parse(text):
    return refusal(parse_yaml, text, "job.yaml")


def check(**data):
    return refusal(validate, Drawing, data, "job.yaml")


# ---- YAML


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            ("1e-5", 1e-5),
            ("1.5e3", 1500.0),
            ("-1E+2", -100.0),
            (".5e1", 5.0),
            ("1.e2", 100.0),
            ("1_000", 1000),
            ("0.5", 0.5),
        ),
        *(
            ("+5", 5),
            ("0.50", 0.5),
            ("-0", 0),
            (".5", 0.5),
            ("5.", 5.0),
            ("-12_345.5", -12345.5),
            ("2.5e+17", 2.5e17),
            ("-.inf", -math.inf),
        ),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    value = parse_yaml(f"a: {text}", "job.yaml")["a"]
    assert value == number
    assert type(value) is type(number)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        *(
            ("0100", "64"),
            ("01", "1"),
            ("-007", "-7"),
            ("00", "0"),
            ("01.5", "1.5"),
            ("!!int '0100'", "64"),
            ("1_0", "10"),
            ("0x1F", "31"),
        ),
        *(
            ("0b11", "3"),
            ("1:30", "90"),
            ("12:30:45", "45045"),
            ("1:30.5", "90.5"),
            ("1e400", ".inf"),
            ("0.12345678901234567890", "0.12345678901234568"),
        ),
        *(
            ("no", "false"),
            ("NO", "false"),
            ("Off", "false"),
            ("on", "true"),
            ("yes", "true"),
            ("!!bool yes", "true"),
        ),
        ("2001-12-14 21:59:43.10 -5", "2001-12-14T21:59:43.100000-05:00"),
        ("2020-01-01 00:00:00.1234567", "2020-01-01T00:00:00.123456"),
    ],
)
def test_a_value_that_is_not_as_it_looks_is_refused(text, read):
    shown = text.split(" ", 1)[1].strip("'") if text.startswith("!!") else text
    for around in (
        "a: 1\nb: {}",
        "a: 1\nb: [x, {}]",
        "a: 1\nb: {{c: {}}}",
        "a: 1\nb:\n - {{c: &x [{}]}}\nd: *x",
    ):
        error = parse(around.format(text))
        assert error.where == f"job.yaml, line {around.split('{}')[0].count(chr(10)) + 1}"
        assert (error.what, error.hint) == (
            f"YAML reads {shown} as {read}",
            f"put it in quotes, or write {read}",
        )
    assert parse_yaml(f"a: '{shown}'", "job.yaml") == {"a": shown}
    parse_yaml(f"a: {read}", "job.yaml")


@pytest.mark.parametrize(
    "values", ["[7, 08]", "[08, 7.5]", "[0, 09]", "[1, 0o17]", "[true, -08]", "[=]", "[<<]"]
)
def test_a_text_among_numbers_that_looks_like_one_is_refused(values):
    mend = (
        ", or write the number without the leading zero" if "8" in values or "9" in values else ""
    )
    assert parse(f"a: {values}").hint == f"put it in quotes{mend}"


@pytest.mark.parametrize(
    "values",
    [
        ["01", "08"],
        ["08", "09"],
        ["1:30", "no", "0o17", "~", "=", "<<"],
        [1, 2.5, 1e20, 1e-7, True],
        ["1_000", "0x1F"],
    ],
)
def test_what_yaml_writes_is_read_back(values):
    assert parse_yaml(yaml.safe_dump({"a": values}), "job.yaml") == {"a": values}


def test_dates_and_merge_keys_are_read():
    text = "base: &base {p: 1, q: 1}\nday: 2020-01-31\nmore: {<<: *base, q: 2}\nagain: *base"
    assert parse_yaml(text, "job.yaml") == {
        "base": {"p": 1, "q": 1},
        "day": dt.date(2020, 1, 31),
        "more": {"p": 1, "q": 2},
        "again": {"p": 1, "q": 1},
    }


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 2\na: 3",
        "x:\n  a: 1\n  b: {}\n  'a': 2",
        "x: [{a: 1}, {b: 1,\n\na: 1, a: 2}]",
        "x: &x {b: 1}\ny: &y {\n a: 1, <<: *x, a: 2}",
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(text):
    error = parse(text)
    assert error.what == "the key 'a' is repeated"
    assert error.where in ("job.yaml, line 3", "job.yaml, line 4", "job.yaml, line 2")
    last = max(
        n
        for n, line in enumerate(text.split("\n"), 1)
        if "a" in line.replace("'", "").replace("<<: *", "")
    )
    assert f"line {min(last, 4)}" in str(error)


@pytest.mark.parametrize(
    "key", ["1", "1.5", "no", "yes", "null", "~", "2020-01-01", "? [a]\n", "? {a: 1}\n", "1e5"]
)
def test_a_key_that_yaml_does_not_read_as_text_is_refused(key):
    for text in (f"{key}: 1", f"columns:\n  {key}{'  ' if key.endswith(chr(10)) else ''}: {{}}"):
        error = parse(text)
        assert error.what == "a key is not a text"
        assert "line" in error.where
        assert error.hint == "put it in quotes"


@pytest.mark.parametrize(
    "text",
    [
        "x: [",
        "x: {a: b",
        "a: 1\n b: 2",
        "x: @y",
        "a: *nobody",
        "a: 1\n---\nb: 2",
        "a: \x00",
        "x: !!python/object:os.system {}",
        "x: 'open",
        "<<: 3",
    ],
)
def test_a_text_that_is_not_yaml_is_refused(text):
    assert parse(text).what == "this is not valid YAML"


@pytest.mark.parametrize("value", ["2020-02-30", "2020-13-01", "2020-01-01 25:00:00", "1" * 5000])
def test_a_value_that_cannot_be_read_is_refused(value):
    assert parse(f"a: {value}").what == "a value cannot be read"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: 2020-02-30", "job.yaml, a"),
        ("a: 1\nb: {c: [1, 2020-13-01]}\n", "job.yaml, line 2, b.c.1"),
        ("- 1\n- 2020-02-30\n- 2020-02-31", "job.yaml, line 2, 1"),
        ("2020-02-30", "job.yaml"),
        ("x: &x {y: 2020-02-30}\nz: *x", "job.yaml, line 1, x.y"),
    ],
)
def test_a_value_that_cannot_be_read_is_found(text, where):
    with pytest.raises(SpecError) as caught:
        parse_value(text, "job.yaml")
    assert caught.value.where == where
    assert caught.value.hint == "correct a date that does not exist, or a number that is too long"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "a: " + "[" * 3000 + "]" * 3000,
        "- " * 1000 + "x",
        "{a: " * 101 + "1" + "}" * 101,
    ],
)
def test_a_text_that_is_nested_deeply_is_refused(text):
    assert parse(text).what == "the values are nested too deeply"
    assert parse_value("[" * 100 + "]" * 100, "job.yaml")


@pytest.mark.parametrize(
    "text", ["a: &x [*x]", "&x {a: {b: *x}}", "columns: &x\n  a: {role: TODO}\n  b: *x"]
)
def test_a_value_that_is_in_itself_is_refused(text):
    assert parse(text).what == "a value contains itself"
    assert parse_value("{a: &x [1], b: *x}", "job.yaml") == {"a": [1], "b": [1]}


@pytest.mark.parametrize("text", ["", "3", "- 1", "text", "null", "# only a comment"])
def test_a_document_that_is_no_mapping_is_refused(text):
    assert parse(text).what == "a mapping of names to values is expected"


# ---- validation


@pytest.mark.parametrize(
    ("data", "path", "nearest"),
    [
        ({"titel": "t"}, "titel", "title"),
        ({"title": "t", "lyers": {}}, "lyers", "layers"),
        ({"title": "t", "radius": 1}, "radius", None),
        (
            {"title": "t", "layers": {"title": {"kind": "circle", "radius": 1, "raduis": 1}}},
            "layers.title.raduis",
            "radius",
        ),
        (
            {"title": "t", "layers": {"a": {"kind": "circle", "radius": 1, "title": 1}}},
            "layers.a.title",
            None,
        ),
        (
            {
                "title": "t",
                "stack": (
                    {"kind": "circle", "radius": 1},
                    {"kind": "circle", "radius": 1, "knd": 1},
                ),
            },
            "stack.1.knd",
            "kind",
        ),
        *(
            (
                {"title": "t", "layers": {name: {"kind": "circle", "radius": 1, "raduis": 1}}},
                f"layers.{name}.raduis",
                "radius",
            )
            for name in ("kind", "design")  # names of users' own columns
        ),
        (
            {"title": "t", "shape": {"kind": "square", "side_lenght": 1}},
            "shape.side_lenght",
            "side_length",
        ),
        (
            {"title": "t", "shape": {"kind": "square", "radius": 1}},
            "shape.radius",
            None,
        ),  # a circle's key is none of a square's
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one_that_is_known_there(data, path, nearest):
    with pytest.raises(SpecError) as caught:
        validate(Drawing, data, "job.yaml")
    [error] = [
        problem
        for problem in getattr(caught.value, "problems", [caught.value])
        if problem.what.startswith("unknown")
    ]
    assert error.what == f"unknown key {path!r}"
    model = Drawing if "." not in path else Square if path.startswith("shape") else Circle
    assert error.hint == (
        f"did you mean {nearest!r}?"
        if nearest
        else f"the keys here are {', '.join(model.model_fields)}"
    )


def test_an_unknown_key_that_may_hold_a_password_is_not_shown():
    url = "postgresql://user:hunter2@host/db"
    for data in (
        {"title": "x", "layers": {"a": {"kind": "circle", "radius": 1, url: 1}}},
        {"title": "x", url: 1},
    ):
        error = refusal(validate, Drawing, data, "job.yaml")
        assert "hunter2" not in str(error)
        assert "unknown key; the keys here are" in str(error)


def test_a_missing_key_is_named_where_it_is_missing():
    assert str(check()) == "job.yaml: the key 'title' is missing; add it"
    assert (
        str(check(title="t", shape={"kind": "circle"}))
        == "job.yaml: the key 'shape.radius' is missing; add it"
    )
    assert (
        str(check(title="t", shape={"radius": 1.0}))
        == "job.yaml: the key 'shape.kind' is missing; add it"
    )
    assert (
        str(check(title="t", layers={"a": {"kind": "circle"}}))
        == "job.yaml: the key 'layers.a.radius' is missing; add it"
    )


@pytest.mark.parametrize(
    "radius", ["text", "1", True, None, [1], float("nan"), float("inf"), 0, -1]
)
def test_a_wrong_value_is_placed_by_its_keys(radius):
    error = check(title="t", shape={"kind": "circle", "radius": radius})
    assert error.where == "job.yaml, shape.radius"
    assert " is expected" in error.what


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"shape": "circle"},
            "shape: a mapping is expected, not 'circle'; write {kind: circle, …}",
        ),
        (
            {"layers": {"a": "circle"}},
            "layers.a: a mapping is expected, not 'circle'; write {kind: circle, …}",
        ),
        (
            {"layers": {"a:{kind": "circle}"}},
            "layers.a:{kind: a mapping is expected, not 'circle}'; write a blank after the colon",
        ),
        (
            {"shape": {"kind": "circle", "radius": "1e3"}},
            "shape.radius: a number is expected, not '1e3'; write it without quotes",
        ),
        (
            {"shape": {"kind": "circle", "radius": "wide"}},
            "shape.radius: a number is expected, not 'wide'",
        ),
        (
            {"shape": {"kind": "Circle", "radius": 1}},
            "shape.kind: there is no kind 'Circle' here; did you mean 'circle'?",
        ),
        ({"shape": "tcp://host:1"}, "shape: a mapping is expected, not 'tcp://host:1'"),
        ({"shape": "postgresql://me:word@host/db"}, "shape: a mapping is expected"),
        ({"shape": "AccountKey=word"}, "shape: a mapping is expected"),
        (
            {"shape": {"kind": "circle", "radius": "me:word@host"}},
            "shape.radius: a number is expected",
        ),
        (
            {"shape": {"kind": "me:word@host", "radius": 1}},
            "shape.kind: there is no such kind here; take one of circle, square",
        ),
        ({"title": dt.date(2020, 1, 1)}, "title: a text is expected; put it in quotes"),
    ],
)
def test_a_value_of_another_type_is_answered_with_how_it_is_written(given, line):
    assert str(check(**{"title": "t", **given})) == f"job.yaml, {line}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a:\n\tb: 1", "line 2: this is not valid YAML; indent with blanks, not with a tab"),
        (
            "a: {b: 1\nc: 2",
            "lines 1 to 2: this is not valid YAML; close the bracket, or write the missing comma",
        ),
    ],
)
def test_frequent_slips_in_yaml_are_named(text, line):
    assert str(parse(text)) == f"job.yaml, {line}"


# ---- several problems, and their lines

DOCUMENT = Text(
    "job.yaml",
    "title: 3\nshape:\n  kind: circel\nlayers:\n  first: {kind: circle, radius: -1}\n  second:\n    kind: circle\n    raduis: 2\nstack: 3\n",
)


def test_every_problem_is_told_with_its_line():
    with pytest.raises(SpecError) as caught:
        validate(Drawing, parse_yaml(DOCUMENT.content, "job.yaml"), DOCUMENT)
    assert (
        str(caught.value).split("\n")
        == [
            "job.yaml, line 1, title: a text is expected, not 3; put it in quotes",
            "job.yaml, line 3, shape.kind: there is no kind 'circel' here; did you mean 'circle'?",
            "job.yaml, line 5, layers.first.radius: a number above 0 is expected, not -1",
            "job.yaml, line 8: unknown key 'layers.second.raduis'; did you mean 'radius'?",  # and not that `radius` is missing
            "job.yaml, line 9, stack: a list is expected, not 3",
        ]
    )
    assert caught.value.exit_code == 64
    assert pickle.loads(pickle.dumps(caught.value)).problems[1].hint == "did you mean 'circle'?"
    assert str(caught.value.at("here")).split("\n")[0].startswith("here, job.yaml, line 1")


def test_a_value_that_was_set_from_outside_has_no_line():
    text = replace(DOCUMENT, settings=("title", "layers.first.radius"))
    assert text.locate(["title"]) == "job.yaml, --set, title"
    assert text.locate(["layers", "first", "kind"]) == "job.yaml, line 5, layers.first.kind"
    assert text.locate(["nothing"]) == "job.yaml, nothing"


def test_each_todo_is_named_but_no_text_in_quotes():
    text = Text(
        "s.yaml",
        "# TODO: think\na: TODO\nb:\n  c: [1, TODO]\n  d: 'TODO'\ne: TODO later\nf:\n  g: TODO\n  h: TODO\n",
    )
    assert [(problem.where, problem.what) for problem in text.list_todos()] == [
        ("s.yaml, line 2, a", "this is still TODO"),
        ("s.yaml, line 4, b.c.1", "this is still TODO"),
        ("s.yaml, line 7, f", "g and h are still TODO"),
    ]


def test_the_problems_of_all_checks_are_raised_together():
    def fail(what):
        raise SpecError(what)

    assert check_all(lambda: 1, lambda: 2) == [1, 2]
    with pytest.raises(SpecError, match=r"^a\nb\nc$"):
        check_all(lambda: check_all(lambda: fail("a"), lambda: fail("b")), lambda: fail("c"))
