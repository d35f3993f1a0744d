"""The ranges of row groups, as far as footers tell them."""

import datetime as dt
import random
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from dpdask import Schema
from dpdask.io import footer, parquet
from dpdask.io import fragments as ranges
from dpdask.io.fragments import discover, row_group_ranges

ROWS = {
    "whole": pa.array([3, 1, 5, 4, None, None], pa.int32()),
    "text": pa.array(["c", "a", "e", "d", None, None]),
    "day": pa.array(
        [
            dt.date(2026, 1, 3),
            dt.date(2026, 1, 1),
            dt.date(2026, 1, 5),
            dt.date(2026, 1, 4),
            None,
            None,
        ]
    ),
    "money": pa.array(
        [Decimal("-1.50"), Decimal("2.25"), Decimal("3.00"), Decimal("4.00"), None, None],
        pa.decimal128(9, 2),
    ),
    "truth": pa.array([True, False, True, True, None, None]),
    **{
        str(type_): pa.array([b"cc", b"aa", b"ee", b"dd", None, None], type_)
        for type_ in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2))
    },
    "view": pa.array(["c", "a", "e", "d", None, None], pa.string_view()),
    "half": pa.array([1.0, -2.0, 3.0, 4.0, None, None], pa.float16()),
}


def table(folder):
    return discover(
        folder.as_uri(), Schema.from_dict({"columns": {name: {"role": "keep"} for name in ROWS}})
    )


def test_ranges_stand_in_the_order_of_the_table_without_groups_of_nulls(tmp_path):
    for number in (10, 9):
        pq.write_table(pa.table(ROWS), tmp_path / f"part-{number}.parquet", row_group_size=2)
    found = row_group_ranges(table(tmp_path), ROWS)
    assert found["whole"] == [(1, 3), (4, 5)] * 2
    assert found["text"] == found["view"] == [("a", "c"), ("d", "e")] * 2
    for name in (each for each in ROWS if "binary" in each):
        assert found[name] == [(b"aa", b"cc"), (b"dd", b"ee")] * 2
    assert found["day"][:2] == [
        (dt.date(2026, 1, 1), dt.date(2026, 1, 3)),
        (dt.date(2026, 1, 4), dt.date(2026, 1, 5)),
    ]
    assert "half" not in found
    assert found["truth"][:2] == [(False, True), (True, True)]
    assert found["money"][:2] == [
        (Decimal("-1.50"), Decimal("2.25")),
        (Decimal("3.00"), Decimal("4.00")),
    ]


def test_a_column_of_which_one_footer_says_nothing_is_left_out(tmp_path):
    pq.write_table(pa.table(ROWS), tmp_path / "part-1.parquet", row_group_size=2)
    pq.write_table(
        pa.table(ROWS), tmp_path / "part-2.parquet", row_group_size=2, write_statistics=["whole"]
    )
    assert set(row_group_ranges(table(tmp_path), ROWS)) == {"whole"}


def test_csv_has_no_footers(tmp_path):
    for number in (1, 2):
        pa_csv.write_csv(
            pa.table({name: column for name, column in ROWS.items() if name == "whole"}),
            tmp_path / f"part-{number}.csv",
        )
    given = discover(
        tmp_path.as_uri(),
        Schema.from_dict({"columns": {"whole": {"role": "keep", "type": "int32"}}}),
    )
    assert row_group_ranges(given, ["whole"]) == {}


def test_dates_beyond_those_of_python_are_left_out(tmp_path):
    far = pa.array([2**62, 5], pa.int64()).cast(pa.timestamp("us"))
    day = pa.array([10**8, 5], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"far": far, "day": day, "whole": [1, 2]}), tmp_path / "part.parquet")
    given = discover(
        tmp_path.as_uri(),
        Schema.from_dict({"columns": {name: {"role": "keep"} for name in ("far", "day", "whole")}}),
    )
    assert row_group_ranges(given, ["far", "day", "whole"]) == {"whole": [(1, 2)]}


def test_footers_are_read_only_while_a_column_is_needed(tmp_path, monkeypatch):
    for number in range(5):
        pq.write_table(
            pa.table({"whole": [number], "text": ["a"]}), tmp_path / f"part-{number}.parquet"
        )
    given = discover(
        tmp_path.as_uri(),
        Schema.from_dict({"columns": {"whole": {"role": "keep"}, "text": {"role": "keep"}}}),
    )
    monkeypatch.setattr(ranges, "_FIRST_FILES", 1)
    read = []
    footer = parquet.footer
    monkeypatch.setattr(
        parquet, "footer", lambda url, name, size: (read.append(name), footer(url, name, size))[1]
    )
    assert row_group_ranges(given, ["whole", "text"], lambda found: len(found) < 4) == {}
    assert sorted(read) == [f"part-{number}.parquet" for number in range(4)]
    found = row_group_ranges(given, ["whole", "text"], lambda found: found[0] == (0, 0))
    assert found == {"whole": [(number, number) for number in range(5)]}


@pytest.mark.parametrize(
    "settings",
    [{}, {"write_page_index": True, "use_dictionary": False}, {"write_statistics": False}],
)
def test_a_usual_column_chunk_is_found_as_it_is_read_field_by_field(settings, monkeypatch):
    written = pa.BufferOutputStream()
    pq.write_table(pa.table(ROWS), written, row_group_size=2, **settings)
    size, usual, rng = written.tell(), footer._compile_usual(), random.Random(7)
    raw = written.getvalue().to_pybytes()
    raw = raw[-int.from_bytes(raw[-8:-4], "little") - 8 :]
    assert len(usual.findall(raw)) == 3 * len(ROWS)

    def read(data, pattern):
        monkeypatch.setattr(footer, "_compile_usual", lambda: pattern)
        try:
            return footer._read_groups(data, size - len(raw))
        except (
            footer._EncryptedError,
            LookupError,
            TypeError,
            AttributeError,
            ValueError,
        ) as error:
            return isinstance(error, footer._EncryptedError)

    changed = [bytearray(raw) for _ in range(300)]
    for each in changed:
        each[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    for data in (raw, *map(bytes, changed)):
        assert read(data, usual) == read(data, re.compile(b"(?!)"))
