"""Rules between columns: records keep them, their tables come out better, contradictions are named, and other mechanisms refuse them."""

import datetime as dt

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import call_cli, categorical, continuous, read_card, run_here, schema_of, write_job
from numpy.random import default_rng

import dpdask
from dpdask.cells import cells
from dpdask.codec import codec_for
from dpdask.errors import SpecError
from dpdask.rules import CellRules
from dpdask.schema import Rule, Schema
from dpdask.streams import RunKey

AGE = continuous([0, 99], type="int64")
LEVELS = {
    "sex": ["F", "M"],
    "role": ["wife", "husband", "child", "other"],
    "school": [1, 2, 3, 4],
    "degree": ["none", "low", "mid", "high"],
}
COLUMNS = {
    "age": AGE,
    "income": continuous([0, 1e5], nulls="level"),
    **{name: categorical(levels) for name, levels in LEVELS.items()},
}
RULES = [
    {"if": {"age": [0, 14]}, "then": {"income": None, "role": ["child", "other"]}},
    {"forbid": {"sex": "M", "role": "wife"}},
    {"forbid": {"sex": "F", "role": "husband"}},
    {
        "columns": ["school", "degree"],
        "allow": list(map(list, zip(LEVELS["school"], LEVELS["degree"], strict=True))),
    },
    {"forbid": {"age": [0, 14], "sex": "M", "degree": "high"}},
]
BINS = {"age": [0, 15, 30, 45, 60, 75], "income": 20}


def people(n, seed=1):
    """Return people of whom all keep the rules."""
    rng = default_rng(seed)
    age, sex = rng.integers(0, 100, n), rng.choice(["F", "M"], n)
    married = (age > 20) & (rng.random(n) < 0.6)
    role = np.where(
        married, np.where(sex == "F", "wife", "husband"), np.where(age < 25, "child", "other")
    )
    school = np.where(age <= 14, 1, rng.integers(1, 5, n))
    income = np.where(age <= 14, np.nan, rng.gamma(2, 1.5e4, n).clip(0, 1e5))
    return pa.table(
        {
            "age": age,
            "income": pa.array(income, from_pandas=True),
            "sex": sex,
            "role": role,
            "school": school,
            "degree": np.array(LEVELS["degree"])[school - 1],
        }
    )


def list_broken(rows):
    """Return how many rows break each rule."""
    young = rows["age"] <= 14
    return [
        int((young & (rows["income"].notna() | ~rows["role"].isin(["child", "other"]))).sum()),
        int(((rows["sex"] == "M") & (rows["role"] == "wife")).sum()),
        int(((rows["sex"] == "F") & (rows["role"] == "husband")).sum()),
        int((rows["degree"] != np.array(LEVELS["degree"])[rows["school"] - 1]).sum()),
        int((young & (rows["sex"] == "M") & (rows["degree"] == "high")).sum()),
    ]


def fit(rules, **more):
    schema = Schema.from_dict({"columns": COLUMNS, "rules": rules})
    given = {"epsilon": 0.3, "delta": 1e-6, "bins": BINS, "insecure_seed": 1, **more}
    return dpdask.GaussianCopula(schema, **given)


def distance(one, other, pair):
    shares = [frame.groupby(pair).size() / len(frame) for frame in (one, other)]
    return float(shares[0].sub(shares[1], fill_value=0.0).abs().sum()) / 2.0


@pytest.mark.parametrize("records", ["raked", "copula"])
def test_every_record_keeps_the_rules_and_their_tables_are_nearer(records):
    table = people(20_000).to_pandas()
    drawn = {}
    for name, rules in (("without", []), ("with", RULES)):
        with fit(rules, records=records).fit(table) as release:
            drawn[name] = release.sample(60_000, seed=3).compute()
    assert list_broken(table) == [0] * 5
    assert list_broken(drawn["with"]) == [0] * 5
    assert sum(list_broken(drawn["without"])) > 100
    assert len(drawn["with"]) == 60_000
    ruled = [["sex", "role"], ["school", "degree"]]
    near, far = (
        np.mean([distance(table, drawn[name], pair) for pair in ruled])
        for name in ("with", "without")
    )
    assert near < 0.75 * far


def test_of_few_records_none_may_keep_the_rules_by_chance():
    """The last block of a release may have a single record, and its run is charged by then."""
    with fit([], records="copula").fit(people(5_000).to_pandas()) as release:
        fitted = release.fitted
    rules = CellRules.of([Rule.model_validate(rule) for rule in RULES], fitted.cells())
    key = RunKey.insecure(1)
    n_kept = 0
    for number in range(30):
        drawn = fitted.model.draw(1, fitted.model.stream(key, f"{number}"), None, rules)
        assert rules.keep(drawn).tolist() == [True]
        n_kept += int(rules.keep(fitted.model.draw(1, fitted.model.stream(key, f"{number}")))[0])
    assert n_kept < 30


def test_records_are_the_same_for_any_partitioning_and_after_reading(tmp_path):
    with fit(RULES).fit(people(5_000).to_pandas()) as release:
        whole = release.sample(9_000, seed=5).compute()
        parts = release.sample(9_000, seed=5, rows_per_partition=1_000).compute()
        release.save(str(tmp_path / "saved"))
        card = release.card
    pd.testing.assert_frame_equal(whole, parts)
    with dpdask.CopulaRelease.load(str(tmp_path / "saved")) as again:
        pd.testing.assert_frame_equal(whole, again.sample(9_000, seed=5).compute())
    shown = card["mechanism"]["rules"]
    assert shown[0] == {
        "if": {"age": [0, 14]},
        "then": {"income": [None], "role": ["child", "other"]},
    }
    assert len(shown) == len(RULES)


def test_a_job_keeps_rules_and_says_so(tmp_path):
    pq.write_table(people(4_000), tmp_path / "in.parquet")
    job = write_job(
        tmp_path,
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=COLUMNS,
        mechanism={"kind": "copula", "bins": BINS},
    )
    (tmp_path / "schema.yaml").write_text(
        yaml.safe_dump({"columns": COLUMNS, "rules": RULES}, sort_keys=False)
    )
    planned = call_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
    assert "every record keeps the 5 rules of the schema" in " ".join(planned.stdout.split())
    run_here(job)
    rows = dpdask.open(str(tmp_path / "out")).to_pandas()
    assert list_broken(rows) == [0] * 5
    card = read_card(tmp_path)
    assert len(card["mechanism"]["rules"]) == 5


# ---- on cells


def compile_rules(*rules):
    schema = Schema.from_dict({"columns": COLUMNS, "rules": list(rules)})
    types = {"age": pa.int64(), "income": pa.float64(), "school": pa.int64()}
    cut = {
        name: cells(codec_for(name, column, types.get(name, pa.string())), BINS.get(name, 1))
        for name, column in schema.columns.items()
    }
    return CellRules.of(schema.rules, cut), list(cut), cut


def test_rules_are_those_of_plain_python():
    found, names, cut = compile_rules(*RULES)
    rng = default_rng(2)
    codes = np.stack([rng.integers(0, cut[name].size, 20_000) for name in names]).astype(np.uint8)
    kept = found.keep(codes)
    value = dict(zip(names, codes, strict=True))
    young, null = value["age"] == 0, value["income"] == 0
    levels = {name: np.array(LEVELS[name])[value[name]] for name in LEVELS}
    expected = ~(young & ~null) & ~(young & np.isin(levels["role"], ["wife", "husband"]))
    expected &= ~((levels["sex"] == "M") & (levels["role"] == "wife"))
    expected &= ~((levels["sex"] == "F") & (levels["role"] == "husband"))
    expected &= value["school"] == value["degree"]
    expected &= ~(young & (levels["sex"] == "M") & (levels["degree"] == "high"))
    assert kept.tolist() == expected.tolist()
    assert 0 < kept.sum() < len(kept)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"if": {"sex": "M"}}, "a rule has `if` and `then`, or `forbid`, or `columns` and `allow`"),
        ({"forbid": {"sex": "M"}}, "a rule is between columns"),
        ({"if": {"sex": "M"}, "then": {"sex": "F"}}, "a rule is between columns"),
        ({"forbid": {"sex": "M", "town": "A"}}, "a rule names 'town'"),
        ({"forbid": {"sex": "M", "role": []}}, "a level, null, a list of levels"),
        ({"columns": ["sex"], "allow": []}, "columns"),
    ],
)
def test_rules_that_say_nothing_are_refused(rule, says):
    with pytest.raises(SpecError, match=says):
        Schema.from_dict({"columns": COLUMNS, "rules": [rule]})


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([{"forbid": {"sex": "M", "role": "uncle"}}], "a value of the rule is none of its levels"),
        ([{"forbid": {"sex": None, "role": "wife"}}], "null is none of its levels"),
        ([{"columns": ["sex", "role"], "allow": [["X", "wife"]]}], "is none of its levels"),
        (
            [{"forbid": {"sex": sex, "role": "wife"}} for sex in "FM"],
            "the rules let wife of 'role' stand beside no value of 'sex'",
        ),
        (
            [{"columns": ["school", "degree"], "allow": [[1, "none"], [2, "low"], [3, "mid"]]}],
            "the rules let 4 of 'school' stand beside no value of 'degree'",
        ),
    ],
)
def test_contradictions_are_named_without_a_table(rules, says):
    with pytest.raises(SpecError, match=says):
        fit(rules)


@pytest.mark.parametrize(
    ("rule", "bins", "says"),
    [
        ({"forbid": {"age": [0, 17], "sex": "M"}}, BINS, "must be made of whole cells"),
        ({"forbid": {"age": 3, "sex": "M"}}, BINS, "has the lowest and the highest one"),
        ({"forbid": {"age": [0, 14], "sex": "M"}}, "adaptive", "its cells are found"),
        ({"columns": ["age", "sex"], "allow": [[3, "M"]]}, BINS, "`allow` lists pairs of levels"),
        ({"forbid": {"age": [14, 0], "sex": "M"}}, BINS, "no value of the column lies between 14"),
        ({"forbid": {"income": [-5, -1], "sex": "M"}}, BINS, "lies between -5 and -1; write the"),
    ],
)
def test_ranges_of_numbers_are_made_of_whole_cells(rule, bins, says):
    with pytest.raises(SpecError, match=says):
        fit([rule], bins=bins).plan(people(100).to_pandas())


def test_rules_that_the_table_breaks_end_in_one_line():
    rng = default_rng(1)
    table = pd.DataFrame(
        {"a": ["x"] * 5_000, "b": rng.choice(["u", "v"], 5_000, p=[0.9999, 0.0001])}
    )
    column = categorical()
    table["c"] = "w"
    levels = {"a": ["x", "y"], "b": ["u", "v"], "c": ["w", "z"]}
    columns = {name: {**column, "levels": levels[name]} for name in levels}
    never = {"forbid": {"a": "x", "b": "u", "c": "w"}}
    schema = Schema.from_dict({"columns": columns, "rules": [never]})
    copula = dpdask.GaussianCopula(schema, epsilon=50.0, delta=1e-6, insecure_seed=1)
    with pytest.raises(SpecError, match="fewer than 1 in 1,000 of the copula's records keep"):
        copula.fit(table)


@pytest.mark.parametrize(
    "make",
    [
        lambda schema: dpdask.Marginals(schema, cliques=[["sex"]], epsilon=1.0),
        lambda schema: dpdask.PerturbedHistogram(schema, epsilon=1.0),
    ],
)
def test_other_mechanisms_refuse_rules(make):
    columns = {name: COLUMNS[name] for name in ("sex", "role")}
    with pytest.raises(SpecError, match="keeps no rules between columns; use the mechanism"):
        make(Schema.from_dict({"columns": columns, "rules": RULES[1:3]}))


@pytest.mark.parametrize("rule", [RULES[1], {"ordered": "age <= income"}])
def test_rows_keep_no_conditions(rule):
    schema = Schema.from_dict({"columns": COLUMNS, "rules": [rule]})
    with pytest.raises(SpecError, match=r"schema, rule 1: rows keep no such rule.*under `allow`"):
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram())


def test_a_schema_without_rules_is_written_as_before():
    assert "rules" not in schema_of(COLUMNS).model_dump(mode="json")
    rule = Rule.model_validate({"if": {"day": dt.date(2020, 1, 1)}, "then": {"sex": "M"}})
    assert Rule.model_validate(rule.model_dump()) == rule


def test_a_range_of_numbers_with_a_fraction_ends_before_its_end_unless_that_is_the_bound():
    bins = {**BINS, "income": [0, 5_000, 20_000]}
    table = people(3_000).to_pandas()
    for end, kept in ((5_000, 5_000.0), (1e5, np.inf)):
        rule = {"if": {"sex": "F"}, "then": {"income": [None]}}
        never = {"forbid": {"sex": "M", "role": "husband", "income": [0, end]}}
        with fit([rule, never], bins=bins).fit(table) as release:
            drawn = release.sample(5_000, seed=1).compute()
        assert drawn.loc[drawn["sex"] == "F", "income"].isna().all()
        low = drawn.loc[drawn["role"] == "husband", "income"].dropna()
        assert (low >= kept).all()
    with pytest.raises(SpecError, match="begin cells in `bins` at 0 and 7000"):
        fit([{"forbid": {"sex": "M", "income": [0, 7_000]}}], bins=bins).plan(table)
    with pytest.raises(SpecError, match="begin cells in `bins` at 0 and 51"):
        fit([{"forbid": {"sex": "M", "age": [0, 50]}}]).plan(table)


def test_a_rule_names_an_atom_of_numbers_with_a_fraction():
    rng = default_rng(1)
    pay = rng.choice(["cash", "card"], 4_000)
    tip = np.where((pay == "card") & (rng.random(4_000) < 0.8), rng.gamma(2, 2, 4_000), 0.0)
    columns = {
        "pay": categorical(["cash", "card"]),
        "tip": {"role": "privatise", "kind": "mixed", "atoms": [0], "bounds": [0, 50]},
    }
    rule = {"if": {"pay": "cash"}, "then": {"tip": [0, 0]}}
    schema = Schema.from_dict({"columns": columns, "rules": [rule]})
    copula = dpdask.GaussianCopula(schema, epsilon=0.5, delta=1e-6, bins=9, insecure_seed=1)
    with copula.fit(pd.DataFrame({"pay": pay, "tip": tip})) as release:
        drawn = release.sample(5_000, seed=1).compute()
    assert (drawn["tip"][drawn["pay"] == "cash"] == 0.0).all()
    assert (drawn["tip"] > 0.0).mean() > 0.2


@pytest.mark.parametrize("type_", [pa.binary(), pa.binary(1)], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        {"if": {"town": "a"}, "then": {"code": "x"}},
        {"forbid": {"town": "a", "code": "y"}},
        {"columns": ["town", "code"], "allow": [["a", "x"], ["b", "x"], ["b", "y"]]},
    ],
    ids=lambda rule: next(iter(rule)),
)
def test_rules_name_the_texts_of_bytes(rule, type_, tmp_path):
    town = default_rng(1).choice([b"a", b"b"], 2_000)
    code = np.where(town == b"a", b"x", default_rng(2).choice([b"x", b"y"], 2_000))
    columns = {
        name: pa.array(each.tolist(), type_) for name, each in (("town", town), ("code", code))
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    schema = {
        "town": categorical(["a", "b"], encoding="latin-1"),
        "code": categorical(["x", "y"], encoding="utf-8"),
    }
    given = {"rules": [rule], "mechanism": {"kind": "copula"}}
    privacy = {"epsilon": 1.0, "delta": 1e-6}
    job = write_job(
        tmp_path / "job",
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=schema,
        privacy=privacy,
        **given,
    )
    found = dpdask.open(run_here(job).output).to_pandas()
    pairs = set(zip(found["town"], found["code"], strict=True))
    assert pairs == {(b"a", b"x"), (b"b", b"x"), (b"b", b"y")}
