"""Seals: the same for the same rows however they are cut, and another one for any other rows, columns, types or keys."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.engine import source as engine_seal
from dpdask.engine.source import Seal, find_content

KEY = bytes(range(32))
WORDS = ["a", "", None, "long text of more than twelve letters", "b"]
VALUES = {
    "whole": ([1, None, 3, 4, 5], pa.int16()),
    "number": ([0.5, float("nan"), -0.0, None, 2.0], None),
    "half": ([0.5, 1.5, None, 2.5, 3.5], pa.float16()),
    "truth": ([True, False, None, True, True], None),
    "text": (WORDS, None),
    "view": (WORDS, pa.string_view()),
    "bytes": ([b"a", b"", None, b"c", b"\0"], pa.large_binary()),
    "fixed": ([b"ab", b"cd", None, b"ef", b"gh"], pa.binary(2)),
    "level": (["a", "b", None, "a", "c"], pa.dictionary(pa.int32(), pa.string())),
    "money": (
        [Decimal("1.25"), None, Decimal("2.50"), Decimal("3.00"), Decimal(0)],
        pa.decimal128(9, 2),
    ),
    "day": ([dt.date(2026, 1, day) for day in range(1, 6)], None),
    "time": (
        [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in range(1, 6)],
        pa.timestamp("us", tz="UTC"),
    ),
    "nothing": ([None] * 5, None),
    "list": ([[1, None], [], None, [3, 4, 5], [6]], pa.list_(pa.int16())),
    "large list": ([["a", "b"], ["ab"], None, [], ["c", None]], pa.large_list(pa.string())),
    "fixed list": (
        [[1.0, 2.0], [None, 3.0], None, [4.0, 5.0], [6.0, 7.0]],
        pa.list_(pa.float64(), 2),
    ),
    "struct": (
        [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, None, {"a": 3, "b": None}, {"a": 4, "b": ""}],
        None,
    ),
    "map": (
        [[("a", 1)], [("b", None), ("c", 2)], None, [], [("a", 3)]],
        pa.map_(pa.string(), pa.int64()),
    ),
    "deep": ([{"a": [[1], [2, 3]]}, {"a": [None]}, None, {"a": []}, {"a": [[], [4]]}], None),
    "nulls in lists": ([[None], [], None, [None, None], []], pa.list_(pa.null())),
}
COLUMNS = {name: pa.array(values * 20, type_) for name, (values, type_) in VALUES.items()}
ROWS = pa.record_batch(list(COLUMNS.values()), names=list(COLUMNS))


def seal(rows, ends, columns=None, key=KEY):
    found = Seal(columns or rows.schema.names, key)
    for start, end in zip([0, *ends], [*ends, rows.num_rows], strict=True):
        found.add(rows.slice(start, end - start))
    return found.digest()


@given(st.lists(st.integers(0, 100), max_size=5))
def test_the_digest_does_not_depend_on_batches(ends):
    assert seal(ROWS, sorted(ends)) == seal(ROWS, [])


def test_large_columns_are_taken_in_slices(monkeypatch):
    """OpenSSL takes less than 2 GiB at once."""
    whole, tag = seal(ROWS, []), Seal._tag
    lengths = []

    class Watched:
        def __init__(self, inner):
            self.inner = inner

        def authenticate_additional_data(self, data):
            lengths.append(len(data))
            self.inner.authenticate_additional_data(data)

    monkeypatch.setattr(Seal, "_tag", lambda *given: Watched(tag(*given)))
    monkeypatch.setattr(engine_seal, "_SLICE", 48)
    assert seal(ROWS, []) == whole
    assert max(lengths) == 48


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "nothing"])
def test_any_other_value_order_or_null_has_another_digest(name):
    array = COLUMNS[name].dictionary_decode() if name == "level" else COLUMNS[name]
    values = array.to_pylist()
    others = [
        [values[1], values[0], *values[2:]],
        [values[3], *values[1:]],
        values[:-1],
        [*values, values[0]],
    ]
    contents = {repr(each): each for each in [values, *others]}
    digests = {
        seal(pa.record_batch([pa.array(each, array.type)], names=["x"]), [])
        for each in contents.values()
    }
    assert len(digests) == len(contents) > 3


def test_texts_that_run_together_names_types_and_keys_count():
    rows = pa.record_batch({"x": ["ab", "c"], "y": [1, 2]})
    others = [
        pa.record_batch({"x": ["a", "bc"], "y": [1, 2]}),
        pa.record_batch({"x": ["ab", "c"], "z": [1, 2]}),
        pa.record_batch({"x": ["ab", "c"], "y": pa.array([1, 2], pa.uint64())}),
        rows.slice(0, 0),
    ]
    found = [seal(each, []) for each in (rows, *others)] + [
        seal(rows, [], columns=["x"]),
        seal(rows, [], key=KEY[::-1]),
    ]
    assert len(set(found)) == len(found)
    assert {len(each) for each in found} == {16}


# ---- kept columns of frames


def kept(values):
    content = find_content(values)
    return None if content is None else seal(pa.record_batch([content], names=["x"]), [])


ORDINALS = np.arange(40) * 7 % 30
PERIODS = pd.PeriodIndex.from_ordinals(ORDINALS, freq="D")
INTERVALS = pd.arrays.IntervalArray.from_arrays(ORDINALS, ORDINALS + 1.5)
KEPT = {
    "period": PERIODS,
    "interval": INTERVALS,
    "categorical": pd.Categorical(ORDINALS.astype(str)),
    "categorical periods": pd.Categorical(PERIODS),
    "categorical intervals": pd.Categorical(INTERVALS),
    "mixed categorical": pd.Categorical.from_codes(
        ORDINALS % 3, categories=pd.Index(["a", 1, dt.date(2026, 1, 1)], dtype=object)
    ),
    "complex": ORDINALS * 1j,
    "sparse": pd.arrays.SparseArray(ORDINALS),
    "mixed": pd.Series(
        [number if number % 2 else str(number) for number in ORDINALS], dtype=object
    ),
    "tuples": pd.Series([(int(number), str(number)) for number in ORDINALS], dtype=object),
    "lists": pd.Series([[int(number), 1] for number in ORDINALS], dtype=object),
    "arrays": pd.Series([np.arange(number) for number in ORDINALS], dtype=object),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("index", [False, True], ids=["column", "index"])
def test_another_order_of_kept_values_is_another_seal(name, index):
    column = pd.Series(KEPT[name])
    first, again, other = (
        pd.Index(each) if index else each
        for each in (column, column.copy(), column.iloc[::-1].reset_index(drop=True))
    )
    assert kept(first) == kept(again) != kept(other)


def test_categories_in_another_order_are_the_same_values():
    for name in ("categorical", "categorical periods", "mixed categorical"):
        column = pd.Series(KEPT[name]).mask(ORDINALS == 7)
        assert (
            kept(column)
            == kept(column.cat.reorder_categories(column.cat.categories[::-1]))
            is not None
        )
        assert kept(column) != kept(pd.Series(KEPT[name]))


def test_columns_of_periods_intervals_and_categories_take_no_python_objects(monkeypatch):
    monkeypatch.setattr(pd.util, "hash_array", None)  # which goes value by value
    for name in (
        "period",
        "interval",
        "categorical",
        "categorical periods",
        "categorical intervals",
    ):
        assert kept(pd.Series(KEPT[name])) is not None


class Thing:
    """Its repr is its address."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: frozenset({"a", "b"}),
        lambda: {"a"},
        Thing,
        lambda: [Thing()],
        lambda: (1, frozenset({"a"})),
        lambda: {"a": 1},
    ],
)
def test_what_may_look_changed_in_another_process_is_not_sealed(make):
    assert find_content(pd.Series([make() for _ in range(3)], dtype=object)) is None
    assert find_content(pd.Series([1, "a", make()], dtype=object)) is None
