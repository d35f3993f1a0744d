"""Columns that rules compute: they are exact in every type, cost nothing, say nothing of the table's own values, and contradictions are named."""

import datetime as dt
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from e2e.helpers import (
    call_cli,
    categorical,
    continuous,
    discrete,
    read_card,
    run_here,
    schema_of,
    write_job,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

import dpdask
from dpdask.computed import Computed, View
from dpdask.errors import DataError, SpecError
from dpdask.io.shards import PAGE_NAME
from dpdask.jobs.lineage import find_origins
from dpdask.schema import Schema

DAY, END = dt.date(2020, 1, 1), dt.date(2021, 6, 30)
BOUNDS = {
    pa.int8(): [-100, 100],
    pa.int64(): [-(2**52) + 1, 2**51],
    pa.uint16(): [0, 60_000],
    pa.float32(): [-1e6, 1e30],
    pa.float64(): [-1e-3, 1e300],
    pa.decimal128(12, 2): [-999.99, 1e6],
    pa.date32(): [DAY, END],
    pa.date64(): [DAY, END],
    pa.timestamp("s"): [DAY, END],
    pa.timestamp("ms", tz="Europe/Zurich"): [DAY, END],
    pa.timestamp("us"): [dt.datetime(2020, 1, 1, 5), END],  # noqa: DTZ001 - the column has no zone
    pa.timestamp("ns"): [DAY, END],
}


def see(columns, rules, types, **more):
    return View.of(
        Schema.from_dict({"columns": columns, "rules": rules}),
        pa.schema(list(types.items())),
        **more,
    )


def draw(codec, n, rng):
    """Return values of a column, its bounds among them."""
    low, high = codec.bounds
    numbers = rng.uniform(0, 1, n) * (high / 2 - low / 2) * 2 + low
    numbers = np.concatenate([np.clip(numbers, low, high), [low, high, low]])
    is_null = np.zeros(len(numbers), dtype=bool)
    if codec.nulls:
        is_null[rng.random(len(numbers)) < 0.2] = True
    return codec.decode(np.floor(numbers) if codec.lattice else numbers, is_null)


@pytest.mark.parametrize("nulls", ["refuse", "level"])
@pytest.mark.parametrize("type_", BOUNDS, ids=str)
def test_an_order_holds_exactly_in_every_type_and_rows_that_keep_it_come_back(type_, nulls):
    column = continuous(BOUNDS[type_], nulls=nulls)
    names = ["a", "b", "c"]
    view = see(
        dict.fromkeys(names, column), [{"ordered": "a <= b <= c"}], dict.fromkeys(names, type_)
    )
    rng = default_rng(1)
    rows = pa.RecordBatch.from_arrays([draw(view.own[name], 500, rng) for name in names], names)
    seen = view.read(rows)
    assert seen.schema.names == ["a", "b - a", "c - b"]
    for name, codec in view.codecs.items():
        values, is_null = codec.encode(seen.column(name))  # clips the differences below 0
        seen = seen.set_column(seen.schema.names.index(name), name, codec.decode(values, is_null))
    back = view.write(seen)
    assert back.schema.names == names
    assert [field.type for field in back.schema] == [type_] * 3
    for one, other in (("a", "b"), ("b", "c")):
        fallen = pc.greater(back.column(one), back.column(other)).drop_null()
        assert not any(fallen.to_pylist())
    assert back.column("a").equals(rows.column("a"))
    kept = pc.less_equal(rows.column("a"), rows.column("b")).fill_null(True)
    differ = pc.fill_null(pc.not_equal(back.column("b"), rows.column("b")), False)
    if not pa.types.is_floating(type_):  # of these a difference is rounded
        assert not pc.any(pc.and_(kept, differ)).as_py()
        assert pc.any(differ).as_py()


NUMBERS = {
    (pa.int16(), pa.int32()): pa.int64(),
    (pa.int64(), pa.uint8()): pa.int16(),  # parts beyond it, but no sum
    (pa.int32(), pa.float32()): pa.float64(),
    (pa.float32(), pa.int16()): pa.float32(),
    (pa.decimal128(9, 2), pa.decimal128(9, 1)): pa.decimal128(11, 3),
    (pa.int32(), pa.decimal128(9, 1)): pa.decimal128(12, 1),
}


@pytest.mark.parametrize("types", NUMBERS, ids=lambda types: " ".join(map(str, types)))
@given(st.lists(st.tuples(st.integers(-200, 200), st.integers(0, 250)), min_size=1, max_size=20))
@settings(max_examples=20)
def test_a_sum_is_exact_in_every_type(types, rows):
    columns = {"a": continuous([-200, 200]), "b": continuous([0, 250])}
    columns |= dict.fromkeys(("plus", "minus"), continuous([-450, 450]))
    rule = {"derived": {"plus": "a + b", "minus": "a - b"}}
    types_ = dict(zip(columns, (*types, NUMBERS[types], NUMBERS[types]), strict=True))
    view = see(columns, [rule], types_)
    parts = [
        pa.array(map(Decimal, each) if pa.types.is_decimal(type_) else each, type=type_)
        for each, type_ in zip(zip(*rows, strict=True), types, strict=True)
    ]
    back = view.write(pa.RecordBatch.from_arrays(parts, ["a", "b"]))
    assert back.schema.types == list(types_.values())
    assert [float(x) for x in back.column("plus").to_pylist()] == [a + b for a, b in rows]
    assert [float(x) for x in back.column("minus").to_pylist()] == [a - b for a, b in rows]


def test_a_sum_with_a_null_is_null():
    columns = {
        "a": continuous([0, 9], nulls="level"),
        "b": discrete([1, 2]),
        "c": continuous([0, 99], nulls="level"),
    }
    view = see(columns, [{"derived": {"c": "a + b"}}], dict.fromkeys(columns, pa.int64()))
    rows = pa.RecordBatch.from_pydict({"a": pa.array([1, None]), "b": pa.array([2, 1])})
    assert view.write(rows).to_pydict() == {"a": [1, None], "b": [2, 1], "c": [3, None]}


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ((pa.float64(), pa.int32(), pa.float32()), "does not hold all values of 'a'"),
        ((pa.float64(), pa.int32(), pa.int64()), "does not hold all values of 'a'"),
        ((pa.decimal128(9, 2), pa.int32(), pa.decimal128(9, 1)), "does not hold all values of 'a'"),
        ((pa.int32(), pa.int32(), pa.int8()), "its type int8 does not hold the sum, which reaches"),
        ((pa.int32(), pa.int32(), pa.string()), "does not hold all values"),
    ],
)
def test_a_sum_that_its_type_cannot_hold_is_refused(types, says):
    columns = dict.fromkeys(("a", "b"), continuous([0, 100])) | {"c": continuous(None)}
    with pytest.raises(DataError, match=says):
        see(columns, [{"derived": {"c": "a + b"}}], dict(zip("abc", types, strict=True)))


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ((pa.float64(), pa.float32()), "is of the type double, and 'b' of float"),
        ((pa.float64(), pa.int64()), "is of the type double, and 'b' of int64"),
    ],
)
def test_an_order_of_two_types_is_refused(types, says):
    with pytest.raises(DataError, match=says):
        see(
            dict.fromkeys("ab", continuous([0, 9])),
            [{"ordered": "a <= b"}],
            dict(zip("ab", types, strict=True)),
        )


A, WIDE, DATES = continuous([0, 9]), continuous([0, 99]), continuous([DAY, END])
TEXT = categorical(["x", "y"])


@pytest.mark.parametrize(
    ("columns", "rules", "says"),
    [
        (
            {"b": WIDE},
            [{"ordered": "b <= a"}],
            "contradicts the bounds: some values of 'b' are above",
        ),
        (
            {"b": A},
            [{"ordered": "a <= b"}, {"ordered": "b <= a"}],
            "the rules put 'b', 'a' in a circle",
        ),
        (
            {"b": A, "c": A},
            [{"ordered": "a <= c"}, {"ordered": "b <= c"}],
            "'c' is at least 'a', and at least 'b'",
        ),
        ({"b": DATES}, [{"ordered": "a <= b"}], "one of them holds dates and one numbers"),
        (
            {"b": continuous(None)},
            [{"ordered": "a <= b"}],
            "'b' has no bounds, so their difference has none",
        ),
        ({"b": discrete([1, 2])}, [{"ordered": "a <= b"}], "all discrete, or all continuous"),
        ({"b": TEXT, "c": TEXT}, [{"ordered": "b <= c"}], "all discrete, or all continuous"),
        (
            {"b": A, "b - a": A},
            [{"ordered": "a <= b"}],
            "makes a column 'b - a', and the table has one",
        ),
        ({"b": A}, [{"ordered": "a < b"}], "each at most the next one"),
        ({"b": A}, [{"ordered": "a <= a"}], "each at most the next one"),
        (
            {"b": A, "c": A},
            [{"derived": {"c": "a + b"}}],
            "reaches from 0 to 18, beyond the bounds",
        ),
        ({"b": A, "c": TEXT}, [{"derived": {"c": "a + b"}}], "a sum is continuous"),
        ({"b": TEXT, "c": WIDE}, [{"derived": {"c": "a + b"}}], "'b' holds no numbers"),
        ({"b": DATES, "c": WIDE}, [{"derived": {"c": "a + b"}}], "'b' holds no numbers"),
        (
            {"b": continuous([0, 9], nulls="level"), "c": WIDE},
            [{"derived": {"c": "a + b"}}],
            "'b' may be null, and then so is the sum",
        ),
        (
            {"b": A, "c": WIDE, "d": WIDE},
            [{"derived": {"c": "a + b"}}, {"derived": {"d": "a + c"}}],
            "'c' is derived, and is a part of another",
        ),
        ({"b": A, "c": WIDE}, [{"derived": {"c": "a + b"}}] * 2, "two rules say what 'c' follows"),
        (
            {"b": A, "c": WIDE},
            [{"derived": {"c": "a + b"}}, {"forbid": {"c": [0, 9], "a": [0, 4]}}],
            "'c' is computed from other columns, and another rule names it",
        ),
        (
            {"b": A, "c": TEXT},
            [{"ordered": "a <= b"}, {"if": {"b": [0, 4]}, "then": {"c": "x"}}],
            "'b' is computed from other columns, and another rule names it",
        ),
        ({"b": A}, [{"derived": {"b": "a"}, "ordered": "a <= b"}], "a rule has `if` and `then`"),
        ({"b": A}, [{"derived": {"b": "a + b"}}], "the sum of columns that are measured"),
        ({"b": A}, [{"derived": {"b": "a + a"}}], "the sum of columns that are measured"),
        ({"b": A}, [{"derived": {"b": "a + e"}}], "a rule names 'e'"),
        ({"b": A}, [{"derived": {"b": 3}}], "sums and differences of columns are expected"),
        ({"b": A}, [{"derived": {}}], "rules"),
    ],
)
def test_contradictions_are_named_without_a_table(columns, rules, says):
    with pytest.raises(SpecError, match=says):
        copula({"a": A, **columns}, rules)


def copula(columns, rules, **more):
    schema = Schema.from_dict({"columns": columns, "rules": rules})
    return dpdask.GaussianCopula(
        schema, **{"epsilon": 1.0, "delta": 1e-6, "insecure_seed": 1, **more}
    )


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([["F", "wife"], ["M", "husband"]], "the rules let child of 'role' stand beside no value"),
        ([["F", "wife"], ["F", "husband"], ["F", "child"]], "the rules let M of 'sex' stand"),
        ([["F", "wife"], ["X", "husband"]], "not all of them are levels of 'sex'"),
        ([["F", "wife"], ["M", "husband"], ["M", "child"], ["M", "child"]], "different pairs"),
    ],
)
def test_pairs_of_rows_that_leave_a_level_out_are_refused(pairs, says):
    with pytest.raises(SpecError, match=says):
        rows_of([{"columns": ["sex", "role"], "allow": pairs}])


LEVELS = {"sex": ["F", "M"], "role": ["wife", "husband", "child"]}
PAIRS = [["F", "wife"], ["M", "husband"], ["F", "child"], ["M", "child"]]
ALLOW = {"columns": ["sex", "role"], "allow": PAIRS}


def rows_of(rules, reference=None, **more):
    columns = {name: categorical(levels) for name, levels in LEVELS.items()}
    columns |= {"age": continuous([0, 99]), "pay": continuous([0, 99]), "sum": continuous([0, 198])}
    schema = Schema.from_dict({"columns": columns, "rules": rules})
    reference = reference or dpdask.Histogram()
    return dpdask.DIP(
        schema, **{"epsilon": 6.0, "reference": reference, "insecure_seed": 1, **more}
    )


def people(n=4_000, seed=1):
    rng = default_rng(seed)
    sex = rng.choice(["F", "M"], n, p=[0.7, 0.3])
    role = np.where(rng.random(n) < 0.3, "child", np.where(sex == "F", "wife", "husband"))
    age, pay = rng.integers(0, 100, n), rng.integers(0, 100, n)
    return pd.DataFrame({"sum": age + pay, "sex": sex, "age": age, "role": role, "pay": pay})


@pytest.mark.parametrize(
    "reference",
    [dpdask.Histogram(), dpdask.Holdout(fraction=0.3), dpdask.Chain(fraction=0.3), dpdask.Tree()],
    ids=lambda each: each.kind,
)
@pytest.mark.filterwarnings("ignore:the chain republishes")
def test_rows_keep_pairs_and_sums_and_the_distribution_of_pairs(reference):
    table = people(20_000)
    with rows_of([ALLOW, {"derived": {"sum": "age + pay"}}], reference).fit(table) as release:
        drawn, card = release.transform(table), release.card
    assert list(drawn) == list(table)
    assert drawn.dtypes.astype(str).tolist() == table.dtypes.astype(str).tolist()
    assert (drawn["sum"] == drawn["age"] + drawn["pay"]).all()
    shares = [each.groupby(["sex", "role"]).size() / len(each) for each in (table, drawn)]
    assert set(shares[1].index) <= set(map(tuple, PAIRS))
    assert shares[0].sub(shares[1]).abs().max() < 0.02
    assert card["columns"]["sum"] == {"role": "computed", "kind": "continuous", "from": "age + pay"}
    assert card["columns"]["sex x role"]["computes"] == ["sex", "role"]
    assert [len(rule) for rule in card["mechanism"]["rules"]] == [2, 1]


def test_the_part_of_a_computed_column_goes_to_the_others():
    parts = rows_of([ALLOW, {"derived": {"sum": "age + pay"}}]).mechanism.spending.row
    assert list(parts) == ["sex x role", "age", "pay"]
    assert sum(parts.values()) == pytest.approx(sum(rows_of([]).mechanism.spending.row.values()))
    columns = dict.fromkeys("abcd", A) | {"sum": continuous([0, 36])}
    with_sum, without = (
        copula(columns, rules).mechanism.noise.pairs
        for rules in ([{"derived": {"sum": "a + b + c + d"}}], [])
    )
    assert with_sum.sigma < 0.9 * without.sigma


@pytest.mark.parametrize(
    "make", [rows_of, lambda rules: copula(COLUMNS, rules)], ids=["rows", "records"]
)
def test_a_sum_of_the_table_is_not_looked_at(make):
    """Neighbours of another sum, even one beyond its bounds or null, give the same release."""
    drawn = []
    for change in (lambda each: each, lambda each: each.assign(sum=7e5)):
        table = change(people())
        if make is rows_of:
            table = table.astype({"sum": "int64"})
        with make([{"derived": {"sum": "age + pay"}}]).fit(table) as release:
            rows = (
                release.transform(table)
                if make is rows_of
                else release.sample(500, seed=1).compute()
            )
        drawn.append(rows.astype({"sum": "float64"}))
    pd.testing.assert_frame_equal(*drawn)


COLUMNS = {
    **{name: categorical(levels) for name, levels in LEVELS.items()},
    "age": continuous([0, 99]),
    "pay": continuous([0, 99]),
    "sum": continuous([0, 198]),
}


@pytest.mark.parametrize("outside", ["clip", "null", "refuse"])
def test_outside_decides_on_rows_that_break_an_order_and_nobody_is_told(outside, recwarn):
    columns = {"a": continuous([0, 99]), "b": continuous([0, 99], nulls="level", outside=outside)}
    rng = default_rng(1)
    table = pd.DataFrame(
        {"a": rng.integers(50, 100, 2_000), "b": pd.array(rng.integers(0, 99, 2_000), "Int64")}
    )
    asked = copula({**columns, "c": TEXT}, [{"ordered": "a <= b"}], epsilon=50.0)
    table["c"] = "x"
    if outside == "refuse":
        with pytest.raises(DataError, match="column 'b - a': holds a value outside its bounds"):
            asked.fit(table)
        return
    with asked.fit(table) as release:
        drawn = release.sample(20_000, seed=1).compute()
    assert not (drawn["a"] > drawn["b"]).fillna(False).any()
    broken = float((table["a"] > table["b"]).mean())
    clipped = drawn["b"].isna() if outside == "null" else drawn["a"] == drawn["b"]
    assert float(clipped.fillna(False).mean()) == pytest.approx(broken, abs=0.05)
    assert not [str(each.message) for each in recwarn if "outside" in str(each.message)]


TIMES = {
    "start": continuous([DAY, END], type="timestamp[us]"),
    "end": continuous([DAY, END], type="timestamp[us]"),
    "fare": continuous([0, 50.0], type="float64"),
    "tip": continuous([0, 20.0], type="float64"),
    "total": continuous([0, 70.0], type="float64"),
    "grade": discrete([1, 2, 3], type="int64"),
    "top": discrete([1, 2, 3, 4], type="int64"),
}
RULES = [
    {"ordered": "start <= end"},
    {"derived": {"total": "fare + tip"}},
    {"ordered": "grade <= top"},
    {"forbid": {"grade": 3, "top": 4}},
]


def trips(n=6_000, seed=1):
    rng = default_rng(seed)
    start = pd.Timestamp(DAY) + pd.to_timedelta(rng.integers(0, 540 * 86_400, n), unit="s")
    end = start + pd.to_timedelta(rng.gamma(2.0, 400.0, n).round(), unit="s")
    fare, tip = rng.gamma(2, 5, n).clip(0, 50), rng.gamma(1, 2, n).clip(0, 20)
    grade = rng.integers(1, 4, n)
    top = np.minimum(grade + rng.integers(0, 2, n), 3)
    made = {"total": fare + tip, "end": end, "start": start, "fare": fare, "tip": tip}
    table = pd.DataFrame({**made, "grade": grade, "top": top})
    return table.astype({"start": "datetime64[us]", "end": "datetime64[us]"})


def count_broken(rows):
    return [
        int((rows["start"] > rows["end"]).sum()),
        int((rows["total"] != rows["fare"] + rows["tip"]).sum()),
        int((rows["grade"] > rows["top"]).sum()),
        int(((rows["grade"] == 3) & (rows["top"] == 4)).sum()),
    ]


def test_a_job_says_what_it_computes_keeps_it_and_its_release_is_opened(tmp_path):
    pq.write_table(pa.Table.from_pandas(trips(), preserve_index=False), tmp_path / "in.parquet")
    asked = {"mechanism": {"kind": "copula"}, "privacy__delta": 1e-6, "output__model": True}
    job = write_job(
        tmp_path, tmp_path / "in.parquet", tmp_path / "out", schema=TIMES, rules=RULES, **asked
    )
    planned = call_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
    said = " ".join(planned.stdout.split())
    assert "computed in what is released: total = fare + tip; end = start + (end - start)" in said
    assert "counted in microseconds" in said
    run_here(job)
    release = dpdask.open(str(tmp_path / "out"))
    rows = release.to_pandas()
    assert list(rows) == list(trips(1))
    assert count_broken(rows) == [0] * 4
    assert (rows["end"] - rows["start"]).median() < pd.Timedelta(minutes=30)
    columns = read_card(tmp_path)["columns"]
    assert columns["total"] == {"role": "computed", "kind": "continuous", "from": "fare + tip"}
    assert columns["end - start"]["bounds"] == [0, pd.Timedelta(days=547).value // 1000 - 1]
    assert release.columns.loc["total", ["role", "answers"]].tolist() == ["computed", ""]
    with pytest.raises(SpecError, match=r"'total': is computed \(fare \+ tip\), so no error"):
        release.mean("total")
    median = release.quantile("end - start", 0.5)
    assert 300e6 < float(median.estimate) < 1_500e6
    drawn = release.sample(3_000, where="fare >= 10", seed=1)
    assert count_broken(drawn) == [0] * 4
    assert drawn["fare"].min() >= 10
    with pytest.raises(
        SpecError, match="'total' is computed from other columns, so no condition can name it"
    ):
        release.sample(10, where="total >= 10", seed=1)
    page = (tmp_path / "out" / PAGE_NAME).read_text()
    assert "fare + tip" in page
    assert "quantile(&#34;end - start&#34;" not in page


def test_records_are_the_same_for_any_partitioning_and_after_reading(tmp_path):
    with copula(TIMES, RULES).fit(trips(3_000)) as release:
        whole = release.sample(5_000, seed=5).compute()
        parts = release.sample(5_000, seed=5, rows_per_partition=700).compute()
        release.save(str(tmp_path / "saved"))
    assert count_broken(whole) == [0] * 4
    pd.testing.assert_frame_equal(whole, parts)
    with dpdask.CopulaRelease.load(str(tmp_path / "saved")) as again:
        pd.testing.assert_frame_equal(whole, again.sample(5_000, seed=5).compute())


def test_categories_of_a_frame_become_the_levels():
    table = people().astype(
        {"sex": "category", "role": pd.CategoricalDtype([*LEVELS["role"], "secret"])}
    )
    with rows_of([ALLOW]).fit(table) as release:
        drawn = release.transform(table)
    assert drawn["role"].cat.categories.tolist() == LEVELS["role"]
    assert drawn["sex"].cat.categories.tolist() == LEVELS["sex"]


def test_devices_keep_no_rules():
    line = {"name": "uniform", "loc": 0.0, "scale": 99.0}
    known = {"sex x role": {"probabilities": [0.25] * 4}, "age": line, "pay": line, "sum": line}
    with (
        rows_of([ALLOW], dpdask.Known(columns=known)).fit(people()) as release,
        pytest.raises(SpecError, match="keeps no rules between columns"),
    ):
        dpdask.local.export(release)


def test_lineage_tells_what_a_computed_column_is_made_of():
    schema = Schema.from_dict({"columns": TIMES, "rules": RULES})
    assert find_origins("total", schema) == ["fare", "tip"]
    assert find_origins("end", schema) == ["start", "end"]
    assert find_origins("start", schema) == ["start"]


def test_a_schema_without_such_rules_is_seen_as_it_is():
    schema = schema_of(COLUMNS)
    assert Computed.of(schema, joins=True).model(schema) is schema
    batch = pa.RecordBatch.from_pydict({"age": [1]})
    view = View.of(
        schema,
        pa.schema([(name, pa.string() if name in LEVELS else pa.int64()) for name in COLUMNS]),
    )
    assert view.read(batch) is batch
    assert view.write(batch) is batch


def test_sums_and_orders_read_names_with_blanks_and_signs():
    rule = dpdask.schema.Rule(derived={"all fees": "fare-a + toll - back pay"})
    assert rule.sums == {"all fees": ((1, "fare-a"), (1, "toll"), (-1, "back pay"))}
    assert dpdask.schema.Rule(ordered="first day <= last day").steps == (("first day", "last day"),)
