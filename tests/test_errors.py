import pickle

import cloudpickle
import pytest

from dpdask import errors
from dpdask.errors import DataError, DpdaskError, InternalError

TREE = {
    "UsageError": 2,
    "SpecError": 64,
    "DataError": 65,
    "InputError": 66,
    "InternalError": 70,
    "OutputError": 73,
    "TemporaryError": 75,
}


def test_every_error_has_its_own_documented_exit_code():
    found = {
        name: cls.exit_code
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and DpdaskError in cls.__bases__
    }
    # The budget's refusal (77) comes with the ledger; these must stay whatever is added.
    assert TREE.items() <= found.items()
    assert len(set(found.values())) == len(found)
    for name in found:
        assert f"exit code {found[name]}" in (getattr(errors, name).__doc__ or "")


def test_an_unforeseen_error_exits_like_a_defect():
    assert DpdaskError.exit_code == InternalError.exit_code == 70


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("holds a null", "column 'x'", "fill it"), "column 'x': holds a null; fill it"),
        (("holds a null", None, "fill it"), "holds a null; fill it"),
        (("holds a null", "column 'x'"), "column 'x': holds a null"),
        (("holds a null",), "holds a null"),
        (("two\n  lines", "a\tb", "hint\r\nit"), "a b: two lines; hint it"),
    ],
)
def test_a_message_is_one_line_of_where_what_and_mend(parts, line):
    assert str(DataError(*parts)) == line


def test_places_are_added_outermost_first_and_the_kind_of_error_stays():
    error = (
        DataError("holds a null", None, "fill it")
        .at("column 'x'")
        .at("row group 3")
        .at("part-0.parquet")
    )
    assert type(error) is DataError
    assert str(error) == "part-0.parquet, row group 3, column 'x': holds a null; fill it"


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("name", TREE)
def test_errors_cross_process_boundaries_whole(name, pickler):
    error = getattr(errors, name)("what", "where", "hint")
    copy = pickle.loads(pickler.dumps(error))
    assert type(copy) is type(error)
    assert (copy.what, copy.where, copy.hint, str(copy), copy.exit_code) == (
        "what",
        "where",
        "hint",
        str(error),
        TREE[name],
    )
