"""Units of each key against a one-line oracle, and laws of the statistic: how rows are cut and ordered changes nothing."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpdask.codec import codec_for
from dpdask.errors import DataError
from dpdask.schema import Column
from dpdask.stats import keys as keys_module
from dpdask.stats.keys import KeyStatistic, UnitKeys
from dpdask.stats.statistic import as_words
from dpdask.streams import RunKey, Streams

SECRET = (np.uint64(1), np.uint64(2))
TYPES = (pa.string(), pa.int16(), pa.date32(), pa.dictionary(pa.int32(), pa.string()))


def codec_of(type_, nulls="level"):
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    other = {pa.string(): "x", pa.int16(): -1, pa.date32(): dt.date(1900, 1, 1)}[plain]
    column = Column(
        role="privatise", kind="categorical", levels="discover", other=other, nulls=nulls
    )
    return codec_for("key", column, plain)


def array_of(numbers, type_):
    """Numbers as values of a type; 0 is null."""
    if pa.types.is_dictionary(type_):
        return array_of(numbers, pa.string()).dictionary_encode()
    values = [None if n == 0 else f"k{n}" if type_ == pa.string() else n % 100 for n in numbers]
    plain = pa.array(values, pa.string() if type_ == pa.string() else pa.int32())
    return plain.cast(type_)


def count(batches, codec, most=1, unit="unit"):
    counter = KeyStatistic(codecs={"key": codec}, unit=unit, most=most).counter()
    streams = Streams(lambda: RunKey.insecure(3), "part")
    for batch in batches:
        counter.add(batch, None, streams)
    return counter.result()


def told(found, weigh=lambda most: np.ones(most + 1, dtype=np.int64)):
    keys, counts = found.columns["key"].tally(weigh)
    return dict(zip(keys.to_pylist(), counts.tolist(), strict=True))


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), max_size=60)


@settings(max_examples=60)
@given(ROWS, st.sampled_from(TYPES), st.integers(0, 60))
def test_rows_are_counted_by_key(rows, type_, cut):
    keys = array_of([key for _, key in rows], type_)
    batch = pa.RecordBatch.from_arrays([keys], names=["key"])
    parts = [batch.slice(0, cut), batch.slice(cut)]
    whole = count([batch], codec_of(type_), unit=None)
    exact = Counter(each for each in keys.to_pylist() if each is not None)
    assert told(whole) == exact
    assert told(count(parts, codec_of(type_), unit=None)) == exact
    first, second = (count([part], codec_of(type_), unit=None) for part in parts)
    assert told(first.merge(second)) == told(second.merge(first)) == exact


@settings(max_examples=60)
@given(ROWS, st.sampled_from(TYPES), st.integers(1, 4), st.integers(0, 60), st.randoms())
def test_units_are_counted_once_for_each_of_few_keys(rows, type_, most, cut, random):
    def batch_of(rows):
        units = pa.array([f"u{unit}" for unit, _ in rows], pa.string())
        keys = array_of([key for _, key in rows], type_)
        return pa.RecordBatch.from_arrays([units, keys], names=["unit", "key"])

    batch, codec = batch_of(rows), codec_of(type_)
    found = told(count([batch], codec, most))
    owners = defaultdict(set)
    for unit, key in zip(batch["unit"].to_pylist(), batch["key"].to_pylist(), strict=True):
        if key is not None:
            owners[unit].add(key)
    assert sum(found.values()) == sum(min(most, len(keys)) for keys in owners.values())
    exact = Counter(key for keys in owners.values() for key in keys)
    assert all(0 < found[key] <= exact[key] for key in found)
    weighing = told(count([batch], codec, most), lambda most: 100 - np.arange(most + 1))
    sizes = [min(most, len(keys)) for keys in owners.values()]
    assert sum(weighing.values()) == sum(size * (100 - size) for size in sizes)
    if all(len(keys) <= most for keys in owners.values()):
        assert found == exact
        assert all(
            n == sum(100 - len(keys) for keys in owners.values() if key in keys)
            for key, n in weighing.items()
        )
    # in another order, in other parts, merged either way
    shuffled = random.sample(rows, len(rows))
    first, second = (
        count([batch_of(part)], codec, most) for part in (shuffled[:cut], shuffled[cut:])
    )
    assert told(first.merge(second)) == told(second.merge(first)) == found
    # without a unit, none of the others' keys are chosen otherwise
    without = [row for row in rows if row[0] != 1]
    lost = Counter(found)
    lost.subtract(told(count([batch_of(without)], codec, most)))
    assert all(0 <= n <= 1 for n in lost.values())
    assert sum(lost.values()) <= most


@pytest.mark.parametrize("n_bits", [20, 1])
def test_how_parts_are_merged_changes_nothing(n_bits, monkeypatch):
    """With one bit of a hash, nearly all keys of a unit tie, and the lesser ones are counted."""
    monkeypatch.setattr(keys_module, "_HASH_BITS", n_bits)
    rng = np.random.default_rng(3)
    units, numbers = rng.integers(0, 300, 20_000), rng.integers(1, 90, 20_000)
    batches = pa.table({"unit": units, "key": [f"k{each}" for each in numbers]}).to_batches(900)
    codec = codec_of(pa.string())
    found = told(count(batches, codec, 4))
    assert sum(found.values()) == 4 * 300
    first, second, nothing = (count(part, codec, 4) for part in (batches[9:], batches[:9], []))
    assert told(nothing.merge(first, second)) == found
    monkeypatch.setattr(keys_module, "_MERGED", 100)  # a range of few units at a time
    assert told(first.merge(nothing, second)) == found
    assert (len(found) < 60) == (n_bits == 1)


def test_units_whose_hashes_begin_alike_are_several():
    units = np.random.default_rng(4).permutation(np.repeat(np.arange(9, dtype=np.uint64), 50))
    found = UnitKeys.of_rows(1, units, pa.chunked_array([["a"] * len(units)]), SECRET)
    assert found.units.tolist() == list(range(9))
    assert found.sizes.tolist() == [1] * 9


def test_many_rows_are_counted_as_one_would():
    rng = np.random.default_rng(2)
    units, keys = rng.integers(0, 3_000, 50_000), rng.integers(1, 400, 50_000)
    table = pa.table({"unit": units, "key": [f"k{key}" for key in keys]})
    found = told(count(table.to_batches(max_chunksize=777), codec_of(pa.string()), 1_000))
    pairs = {(unit, key) for unit, key in zip(units.tolist(), keys.tolist(), strict=True)}
    assert found == Counter(f"k{key}" for _, key in pairs)


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(["a", None]),
        pa.array(["a", None]).dictionary_encode(),
        # a null may also stand in the dictionary
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["a", None])),
        pa.array([1, 2]),
    ],
)
def test_nulls_and_other_types_are_refused(keys):
    batch = pa.RecordBatch.from_arrays([keys], names=["key"])
    with pytest.raises(DataError):
        count([batch], codec_of(pa.string(), "refuse"), unit=None)
    if pa.types.is_dictionary(keys.type) or pa.types.is_string(keys.type):
        assert told(count([batch], codec_of(pa.string()), unit=None)) == {"a": 1}


def test_who_names_keys_cannot_choose_two_with_one_hash():
    """Words of texts depend on the secret of the run."""
    names = [f"k{number}" for number in range(40)]
    array, units = pa.chunked_array([names]), np.zeros(40, dtype=np.uint64)
    secrets = [(np.uint64(1), np.uint64(each)) for each in (2, 2, 3)]
    words = [as_words(array.combine_chunks(), np.array(each).tobytes()) for each in secrets]
    assert (words[0] == words[1]).all()
    assert (words[0] != words[2]).all()
    assert (words[0] != as_words(array.combine_chunks())).all()
    one, again, other = (UnitKeys.of_rows(20, units, array, each).codes for each in secrets)
    assert set(one) == set(again) != set(other)
    assert len(set(one)) == len(set(other)) == 20


@pytest.mark.parametrize("others", [0, 1])
def test_a_key_that_a_dictionary_holds_twice_is_one_key_of_a_unit(others):
    """It would else have the unit count twice, above the threshold of a key of one unit alone."""
    keys = pa.array(["a", "b", "a", "b"])
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, 2], pa.int32()), keys)
    rows = pa.RecordBatch.from_arrays([array, pa.array([7, 7, 7, 7, 8])], names=["key", "unit"])
    parts = [count([rows], codec_of(pa.string()), most=3) for _ in range(1 + others)]
    assert told(parts[0].merge(*parts[1:]) if others else parts[0]) == {"a": 2, "b": 1}


def test_a_row_without_a_unit_is_refused():
    batch = pa.RecordBatch.from_pydict({"unit": ["u", None], "key": ["a", "b"]})
    with pytest.raises(DataError, match="the unit of every row must be known"):
        count([batch], codec_of(pa.string()))


@pytest.mark.parametrize("type_", [pa.date32(), pa.dictionary(pa.int32(), pa.date32())])
@pytest.mark.parametrize("unit", [None, "unit"])
def test_a_date_of_no_calendar_is_no_key(unit, type_):
    """No schema can hold it, and a list that holds it by chance would end the run after its noise is drawn."""
    days = pa.array([-719_163, -719_162, 2_932_896, 2_932_897, None, 2**31 - 1], pa.int32())
    keys = days.cast(pa.date32())
    if pa.types.is_dictionary(type_):
        keys = keys.dictionary_encode()
    batch = pa.RecordBatch.from_arrays([keys, pa.array(range(6))], names=["key", "unit"])
    found = told(count([batch], codec_of(pa.date32()), unit=unit))
    assert found == {dt.date(1, 1, 1): 1, dt.date(9999, 12, 31): 1}
