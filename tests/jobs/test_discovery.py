"""`dpdask discover`: levels that nobody lists are found, charged once, and written into the schema."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import call_cli, charged_kinds, charging_entries, digests, make_ledger, write_job
from mechanisms.contract import KILLS, Killed
from scipy import stats
from strategies import as_array

from dpdask import GaussianCopula
from dpdask.engine.account import open_ledger
from dpdask.errors import DataError, OutputError, SpecError
from dpdask.io.storage import Folder
from dpdask.jobs.discovery import find_written, load_discovery, write_levels
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job, open_table
from dpdask.mechanisms.levels import FoundLevels, plan_selection
from dpdask.privacy import Budget
from dpdask.privacy.noise import bound_tail, find_threshold
from dpdask.schema import Schema

CODE = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "other"}
SCHEMA = {
    "code": CODE,
    "number": {**CODE, "other": -1, "nulls": "level"},
    "day": {**CODE, "other": dt.date(1900, 1, 1)},
    "user": {"role": "drop"},
    "age": {"role": "privatise", "kind": "continuous", "bounds": [0, 100]},
}
PERSONS = {"epsilon": 2.0, "delta": 1e-6, "unit": {"column": "user", "max_rows": 5}}
PRIVACY = {"epsilon": 2.0, "delta": 1e-6, "adjacency": "add-remove", "unit": "row"}


@pytest.fixture
def table(tmp_path):
    """20,000 rows of some 2,000 users, whose codes are as frequent as words."""
    rng = np.random.default_rng(4)
    number = np.minimum(rng.zipf(1.3, 20_000), 4_000)
    rows = {
        "code": [f'c"{each}, é' for each in number],
        "number": pa.array(number, mask=rng.random(20_000) < 0.1),
        "day": pa.array(number.astype(np.int32) + 10_000, pa.date32()),
        "user": rng.integers(0, 2_000, 20_000),
        "age": rng.integers(0, 100, 20_000),
    }
    pq.write_table(pa.table(rows), tmp_path / "in.parquet", row_group_size=1_500)
    return pa.table(rows)


def job_of(tmp_path, **changes):
    usual = {"schema": SCHEMA, "privacy": {**PRIVACY}, "mechanism": {"kind": "copula"}}
    changes = {**usual, **changes}
    return write_job(tmp_path / "job", tmp_path / "in.parquet", tmp_path / "out", **changes)


def ledger(tmp_path):
    return make_ledger(tmp_path, "people", 10.0, 1e-4)


def find(job, epsilon=1.0):
    """Find the levels of a job in this process."""
    search = load_discovery(job, epsilon=epsilon)
    outcome = run_job(search)
    return write_levels(search, job, outcome)


def columns_of(job):
    return Schema.from_yaml(job.parent / "schema.yaml").columns


def test_levels_are_found_and_written_with_their_source(tmp_path, table):
    place = ledger(tmp_path)
    job = job_of(tmp_path, ledger=place)
    ran = call_cli("discover", job, "--epsilon", 1, "--json")
    assert ran.returncode == 0, ran.stderr
    told, columns = json.loads(ran.stdout), columns_of(job)
    least = find_threshold(plan_selection(Budget(epsilon=1, delta=1e-6, adjacency="add-remove"), 3))
    for name in ("code", "number", "day"):
        found = set(columns[name].levels) - {columns[name].other}
        assert told["levels"][name] == {"found": len(found), "written": len(found)}
        counts = Counter(table[name].drop_null().to_pylist())
        sure = {level for level, n in counts.items() if n >= least + 30}
        assert len(sure) > 10
        assert sure <= found <= {level for level, n in counts.items() if n > 1}
        assert columns[name].outside == "other"
    [intend, commit] = charging_entries(place["url"], "people")
    source = columns["code"].found
    assert (source.epsilon, source.delta, source.insecure) == (1.0, 1e-6, False)
    assert (source.release, source.entry) == (intend.run_id, intend.digest)
    assert commit.charge == intend.charge
    assert (commit.charge.epsilon, commit.charge.delta) == (1.0, 1e-6)
    # the job itself does not pay for them again, and the search is done
    assert load_job(job).schema.discovered == ()
    again = call_cli("discover", job, "--epsilon", 1)
    assert again.returncode == 0
    assert "found already" in again.stdout
    assert len(charging_entries(place["url"], "people")) == 2


def test_the_list_is_a_release_with_a_card_and_a_page(tmp_path, table):
    job = job_of(tmp_path)
    assert find(job)["levels"]["code"]["found"] > 10
    folder = tmp_path / "job/schema.levels"
    rows = pq.read_table(folder / "part-00000.parquet").to_pydict()
    card = json.loads((folder / "_dpdask/release.json").read_text())
    codes = [
        (level, units) for name, level, units in zip(*rows.values(), strict=True) if name == "code"
    ]
    assert [level for level, _ in codes] == card["columns"]["code"]["found"]
    assert sorted(codes, key=lambda each: -each[1]) == codes
    assert min(units for _, units in codes) >= card["columns"]["code"]["threshold"]
    assert card["insecure"]
    assert "protects nobody" in card["guarantee"]["text"]
    assert columns_of(job)["code"].found.insecure
    assert card["dropped"] == ["user", "age"]
    page = (folder / "_dpdask/release.html").read_text()
    assert "Levels that were found" in page
    exact = Counter(table["code"].to_pylist())
    assert sum(abs(units - exact[level]) for level, units in codes) < 10 * len(codes)


@pytest.mark.usefixtures("seeded_ledgers")
@pytest.mark.parametrize("kill", list(KILLS))
def test_a_killed_search_is_charged_once_and_finds_the_same(kill, tmp_path, table):
    (tmp_path / "whole").mkdir()
    whole = job_of(tmp_path / "whole", input__path=str(tmp_path / "in.parquet"))
    find(whole)
    place = ledger(tmp_path)
    job = job_of(
        tmp_path, ledger=place, insecure_seed=yaml.safe_load(whole.read_text())["insecure_seed"]
    )
    with KILLS[kill]():
        find(job)
    assert columns_of(job)["code"].discovers
    find(job)
    assert charged_kinds(**place) == [
        "intend",
        "commit",
    ]
    one, other = (columns_of(each)["code"].levels for each in (job, whole))
    assert one == other


def test_a_search_that_is_killed_before_it_writes_the_schema_is_not_drawn_again(
    tmp_path, table, monkeypatch
):
    job = job_of(tmp_path)
    search = load_discovery(job, epsilon=1.0)
    run_job(search)
    before = digests(tmp_path / "job/schema.levels")

    def strike(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", strike)
        with pytest.raises(Killed):
            find(job)
    assert columns_of(job)["code"].discovers
    find(job)
    assert digests(tmp_path / "job/schema.levels") == before
    written = (job.parent / "schema.yaml").read_bytes()
    write_levels(search, job, run_job(search))  # twice changes nothing
    assert (job.parent / "schema.yaml").read_bytes() == written


USER = {"column": "user", "max_rows": 3}


@pytest.mark.parametrize(
    ("cluster", "unit"),
    [
        ({"kind": "threads"}, "row"),
        ({"kind": "threads"}, USER),
        ({"kind": "local", "workers": 2}, USER),
    ],
)
def test_the_list_does_not_depend_on_the_scheduler_or_on_how_files_are_cut(
    cluster, unit, tmp_path, table
):
    found = []
    for number, (where, rows) in enumerate([({"kind": "synchronous"}, 1_500), (cluster, 700)]):
        base = tmp_path / str(number)
        base.mkdir()
        pq.write_table(table, base / "in.parquet", row_group_size=rows)
        job = job_of(base, cluster=where, privacy__unit=unit)
        search = load_discovery(job, epsilon=3.0)
        if where["kind"] == "local":
            ran = call_cli("discover", job, "--epsilon", 3)
            assert ran.returncode == 0, ran.stderr
        else:
            write_levels(search, job, run_job(search))
        found.append(columns_of(job)["code"].levels)
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_a_level_of_one_row_is_listed_as_rarely_as_is_promised(tmp_path):
    """Of 30,000 codes that one row has each; with power: not more rarely than by the exact law either."""
    delta, n = 0.01, 30_000
    codes = [f"single {each}" for each in range(n)] + ["common"] * 500
    pq.write_table(pa.table({"code": codes}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"code": CODE}, privacy={**PRIVACY, "delta": delta})
    find(job)
    n_found = sum(level.startswith("single") for level in columns_of(job)["code"].levels)
    assert stats.binomtest(n_found, n, delta, alternative="greater").pvalue > 1e-6
    selection = plan_selection(Budget(epsilon=1, delta=delta, adjacency="add-remove"), 1)
    exact = bound_tail(selection.noise, find_threshold(selection) - 1)
    assert delta / 3 < exact <= delta
    assert stats.binomtest(n_found, n, exact).pvalue > 1e-6
    assert "common" in columns_of(job)["code"].levels


def test_a_unit_counts_for_few_of_its_keys(tmp_path):
    """A user with 5,000 codes moves three counts at most, and one who repeats a code moves it by one."""
    n = 3_000
    rows = {
        "user": [*(f"u{each}" for each in range(n)), *["hoarder"] * 5_000],
        "code": [*(["common"] * n), *(f"h{each}" for each in range(5_000))],
    }
    rows = {name: values + values[:n] for name, values in rows.items()}  # each user twice
    pq.write_table(pa.table(rows), tmp_path / "in.parquet", row_group_size=500)
    job = job_of(
        tmp_path,
        schema={"code": CODE, "user": {"role": "drop"}},
        privacy__unit={"column": "user", "max_rows": 3},
    )
    find(job)
    [row] = pq.read_table(tmp_path / "job/schema.levels/part-00000.parquet").to_pylist()
    assert row["level"] == "common"
    # a user with one code counts √3 times as much as one with three
    assert abs(row["weight"] - n * 3**0.5) < 60
    card = json.loads((tmp_path / "job/schema.levels/_dpdask/release.json").read_text())
    assert "one with 3 values counts 1 for each" in card["mechanism"]["numbers"]
    assert "up to 1.731 for a single value" in card["mechanism"]["numbers"]
    assert 3 < card["columns"]["code"]["threshold"] < 60
    assert card["accounting"]["noise"]["code"]["margin_95"] < 60


# ---- a job that finds the levels that it counts


def find_inside(tmp_path, **changes):
    """Run a job whose levels are not listed, and return its card and its rows."""
    outcome = run_job(load_job(job_of(tmp_path, **changes)))
    card = json.loads((tmp_path / "out/_dpdask/release.json").read_text())
    parts = [pq.read_table(tmp_path / "out" / each.name) for each in outcome.manifest.shards]
    return card, pa.concat_tables(parts)


LISTED = {
    name: {**column, "levels": [column["other"]]} if "other" in column else column
    for name, column in SCHEMA.items()
}
ONE_TABLE = {"kind": "marginals", "cliques": [["code"]]}
TABLES = {"kind": "marginals", "cliques": [["code"], ["day", "age"], ["number"]]}


@pytest.mark.parametrize("unit", ["row", USER])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_job_finds_the_levels_that_it_counts(adjacency, unit, tmp_path, table):
    privacy = {**PRIVACY, "epsilon": 10.0, "adjacency": adjacency, "unit": unit}
    place = ledger(tmp_path)
    card, _ = find_inside(tmp_path, privacy=privacy, mechanism=TABLES, ledger=place)
    for name in ("code", "number", "day"):
        column = card["columns"][name]
        found = [each for each in column["levels"] if each is not None]
        other = found.pop()
        assert str(other) == str(SCHEMA[name]["other"])
        assert found == sorted(found)
        counts = Counter(map(str, table[name].drop_null().to_pylist()))
        assert len(found) > 5
        assert all(counts[str(each)] > 1 for each in found)
    events = card["accounting"]["events"]["events"]
    assert [each["kind"] for each in events[:3]] == ["key-selection"] * 3
    assert events[0].get("weight") == (None if unit == "row" else 1024)
    moved = (1 if unit == "row" else 3 * 1024**2) * (1 if adjacency == "add-remove" else 2)
    assert events[0]["noise"]["sensitivity"] == pytest.approx(moved**0.5, rel=1e-15)
    assert events[0]["noise"]["sensitivity"] ** 2 >= moved * (1 - 1e-15)
    assert 3 * events[0]["delta"] <= 1e-6 / 4
    assert card["accounting"]["epsilon_exact"] <= 10.0
    [intend, _] = charging_entries(place["url"], "people")
    assert (intend.charge.epsilon, intend.charge.delta) == (10.0, 1e-6)
    page = (tmp_path / "out/_dpdask/release.html").read_text()
    assert "declared cells, other than the levels of code, number, day that ε covers," in page


def test_texts_are_read_as_the_dictionaries_that_the_file_holds(tmp_path, table):
    job = load_job(job_of(tmp_path, mechanism=TABLES))
    opened = open_table(job, Folder(job.output_url))
    part, rows = opened.source.parts[0]
    for work, is_encoded in (
        (opened.work, True),
        (opened.work.with_levels(Schema.from_dict({"columns": LISTED})), False),
    ):
        [batch] = part.read(rows, work, released=False)
        assert pa.types.is_dictionary(batch.column("code").type) == is_encoded
        assert batch.column("code").to_pylist() == table["code"][:1_500].to_pylist()


def test_records_of_found_levels_alone_come_out(tmp_path, table):
    mechanism = {"kind": "copula", "n_rows": 3_000}
    schema = {name: SCHEMA[name] for name in ("code", "age")} | {
        name: {"role": "drop"} for name in ("number", "day", "user")
    }
    card, rows = find_inside(tmp_path, schema=schema, mechanism=mechanism)
    levels, exact = card["columns"]["code"]["levels"], Counter(table["code"].to_pylist())
    assert set(rows["code"].to_pylist()) <= set(levels)
    assert max(exact.values()) < 0.5 * 20_000
    drawn, listed = Counter(rows["code"].to_pylist()), set(levels)
    shares = {name: n / 20_000 for name, n in exact.items() if name in listed}
    shares["other"] = 1 - sum(shares.values())
    assert sum(abs(drawn[name] / 3_000 - share) for name, share in shares.items()) / 2 < 0.15


def test_a_plan_says_what_a_search_inside_a_job_costs(tmp_path, table):
    job = load_job(job_of(tmp_path, mechanism=TABLES))
    plan, noise = plan_job(job), job.mechanism.noise
    assert plan.stages[0].startswith("levels: read all")
    assert sum("is found with probability 0.95" in line for line in plan.expectations) == 1
    sigma = noise.levels["code"].noise.sigma
    assert [each["on"] for each in plan.noise if each["sigma"] == sigma] == ["3 vectors of counts"]


def test_no_more_levels_are_taken_than_tables_can_hold(tmp_path):
    """The commonest, as many as a power of two; else a run would fail after its charge."""
    rows = [f"c{each}" for each in range(3_000) for _ in range(20 + 60 * (each < 1_023))]
    wide = {"role": "privatise", "kind": "categorical", "levels": [*range(2_000)]}
    more = {name: {**CODE, "other": "o"} for name in ("code", "two")}
    table = pa.table({"code": rows, "two": rows, "wide": [0] * len(rows)})
    pq.write_table(table, tmp_path / "in.parquet")
    job = load_job(job_of(tmp_path, schema={**more, "wide": wide}, privacy__epsilon=50.0))
    opened = open_table(job, Folder(job.output_url))
    search = opened.mechanism.search
    most = search.count_most(opened.work.columns)
    assert most == 1_024
    levels = [f"c{each}" for each in range(3_000)]
    found = FoundLevels(
        schema=job.schema,
        events=search.events,
        levels=dict.fromkeys(more, levels),
        units={name: np.arange(3_000)[::-1] for name in more},
    )
    column = search.find(found, opened.work.columns).columns["two"]
    assert set(column.levels) == {*levels[:1_023], "o"}
    assert len(column.levels) == 1_024
    # tables of their own take all of them
    tables = {"kind": "marginals", "cliques": [["code"]]}
    job = load_job(job_of(tmp_path, schema={**more, "wide": wide}, mechanism=tables))
    opened = open_table(job, Folder(job.output_url))
    following = opened.mechanism.with_found(
        opened.mechanism.search.find(found, opened.work.columns)
    )
    assert len(following.schema.columns["code"].levels) == 3_001
    assert following.event == opened.mechanism.event
    listed = Schema.from_dict(following.schema.model_dump(exclude_none=True))
    with pytest.raises(SpecError, match="takes at most 2,048 levels"):
        GaussianCopula(listed, epsilon=1.0, delta=1e-6)


# ---- the text of the schema


def written(tmp_path, text, found, name="schema.yaml"):
    """What a schema becomes."""
    tmp_path.mkdir(exist_ok=True)
    pq.write_table(pa.table({"code": found}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"code": CODE}, privacy={**PRIVACY, "delta": 0.01})
    data = yaml.safe_load(job.read_text()) | {"schema": name}
    job.write_text(yaml.safe_dump(data))
    (tmp_path / "job" / name).write_text(text)
    find(job, epsilon=50.0)
    return (tmp_path / "job" / name).read_text()


BLOCK = """\
# of the shop
columns:
  code:  # what was bought
    role: privatise
    levels: discover  # nobody knows
    kind: categorical
    other: rest
"""


def test_the_rest_of_the_text_stays(tmp_path):
    text = written(tmp_path, BLOCK, ["b"] * 90 + ["a"] * 80 + ["rest"] * 99 + ["é: #"] * 70)
    lines = text.splitlines()
    assert lines[:4] == BLOCK.splitlines()[:4]
    assert lines[4] == '    levels: ["a", "b", "é: #", "rest"]'
    assert lines[5].startswith('    found: {"epsilon": 50.0, "delta": 0.01')
    assert lines[5].endswith("}  # nobody knows")
    assert lines[6:] == BLOCK.splitlines()[5:]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (json.dumps({"columns": {"code": CODE}}, indent=1), "schema.json"),
        (f"columns:\n  code: {json.dumps(CODE)}\n", "schema.yaml"),
        ("columns: {code: {role: privatise, kind: categorical, other: x, levels: discover}}", "s"),
    ],
)
def test_a_flow_mapping_stays_one(text, name, tmp_path):
    new = written(tmp_path, text, ["b"] * 90 + ["a"] * 80, name)
    if name == "schema.json":
        json.loads(new)
    column = Schema.from_dict(yaml.safe_load(new)).columns["code"]
    assert column.levels[:2] == ("a", "b")
    assert column.found.epsilon == 50.0


def test_of_too_many_levels_the_commonest_are_written(tmp_path):
    rows = [f"c{each}" for each in range(2_500) for _ in range(20 + 10 * (each < 2_047))]
    text = written(tmp_path, BLOCK, rows)
    levels = Schema.from_dict(yaml.safe_load(text)).columns["code"].levels
    assert len(levels) == 2_048
    assert set(levels) == {f"c{each}" for each in range(2_047)} | {"rest"}


HARD = [
    *("\x7f", "a\x80b", "a\x85b", "a\u2028b", "\ufeffa", "a\ufffeb", "a\uffffb", "a\0b", "a\r\nb"),
    *(
        'x", "found": {"epsilon": 9}, "y',
        "TODO",
        "null",
        "yes",
        "",
        " a  b ",
        "\\",
        '"',
        "discover",
    ),
    *("007", "1e3", "2020-01-01", "e\u0301", "é", "a # b", "{x: y}", "\U0001ffff", "x" * 70_000),
]


def test_every_text_is_written_as_a_level_that_is_read_as_it_was(tmp_path):
    text = written(tmp_path, BLOCK, [each for each in HARD for _ in range(90)])
    assert yaml.safe_load(text)["columns"]["code"]["levels"] == [*sorted(HARD), "rest"]


ALIASED = "{role: privatise, kind: categorical, other: o, levels: %s}"


@pytest.mark.parametrize(
    "text",
    [
        f"columns:\n  a: &x {ALIASED % 'discover'}\n  b: *x\n",
        f"columns:\n  a: {ALIASED % '&x discover'}\n  b: {ALIASED % '*x'}\n",
        f"columns:\n  a: &x {ALIASED % 'discover'}\n  b: {{<<: *x}}\n",
        (
            "columns:\n  a:\n    role: privatise\n    kind: categorical\n    other: o\n"
            f"    levels: |-\n      discover\n  b: {ALIASED % 'discover'}\n"
        ),
    ],
)
def test_a_schema_that_cannot_be_edited_is_told_before_the_search_is_paid(text, tmp_path):
    pq.write_table(pa.table({"a": ["x"] * 90, "b": ["y"] * 90}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"a": CODE, "b": CODE}, ledger=ledger(tmp_path))
    (tmp_path / "job/schema.yaml").write_text(text)
    ran = call_cli("discover", job, "--epsilon", 1)
    assert ran.returncode == 64
    assert "write the column out" in ran.stderr
    assert not charging_entries(f"sqlite:///{tmp_path}/ledger.db", "people")


def test_a_column_that_does_not_stand_under_its_name_is_told(tmp_path):
    pq.write_table(pa.table({"code": ["a"] * 99}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"code": CODE})
    search = load_discovery(job, epsilon=5.0)
    outcome = run_job(search)
    (tmp_path / "job/schema.yaml").write_text(
        "columns:\n  x: &x {role: privatise}\n  code: {<<: *x}\n"
    )
    with pytest.raises(SpecError, match="write the column out"):
        write_levels(search, job, outcome)
    (tmp_path / "job/schema.yaml").unlink()
    with pytest.raises(OutputError, match="cannot be read any more"):
        write_levels(search, job, outcome)


# ---- what is refused


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"other": None}, "needs the level that replaces"),
        ({"kind": "discrete"}, "the levels of a discrete column cannot be found"),
        ({"kind": "continuous"}, "takes no levels"),
        ({"levels": "discovered"}, "a list of"),
        ({"levels": []}, "between 1 and 32,768 levels"),
        ({"found": {"epsilon": 1.0, "delta": 0.1}}, "`found` belongs to levels that were found"),
        ({"levels": ["other"], "found": {"epsilon": 0, "delta": 0.1}}, "epsilon"),
        ({"outside": "null", "nulls": "level"}, "`other` belongs to"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(column, said):
    with pytest.raises(SpecError, match=said):
        Schema.from_dict({"columns": {"code": {**CODE, **column}}})


@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        ({"kind": "dip", "reference": {"kind": "histogram"}}, {}),
        ({"kind": "dip", "reference": {"kind": "known", "columns": {}}}, {}),
        ({"kind": "histogram"}, {}),
        ({"kind": "copula", "persons": True}, {"privacy": PERSONS}),
    ],
)
def test_a_release_before_its_levels_are_found_is_refused(mechanism, more, tmp_path):
    job = job_of(tmp_path, schema={"code": CODE}, mechanism=mechanism, **more)
    with pytest.raises(SpecError, match="not found yet; find them with `dpdask discover"):
        load_job(job)


def test_levels_of_rows_with_a_table_of_persons_are_found(tmp_path, table):
    users = {"user": {"role": "drop"}, "sex": {**CODE, "levels": ["f", "m", "other"]}}
    (tmp_path / "users.yaml").write_text(yaml.safe_dump({"columns": users}))
    parents = {"input": {"path": "absent"}, "schema": str(tmp_path / "users.yaml")}
    job = job_of(
        tmp_path,
        mechanism={"kind": "copula", "persons": True},
        privacy=PERSONS,
        parents=parents,
    )
    find(job)
    assert not any(each.discovers for each in columns_of(job).values())
    assert load_job(job).file.parents is not None
    (tmp_path / "users.yaml").write_text(yaml.safe_dump({"columns": users | {"town": CODE}}))
    with pytest.raises(SpecError, match=r"^users\.yaml, line \d+, column 'town': no search finds"):
        load_job(job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy__delta": 0}, "set it above 0"),
        (
            {"rules": [{"forbid": {"code": ["other"], "sex": ["f"]}}]},
            "so no rule can name them; find them first",
        ),
        # else the levels that are found could make a sum that its column cannot hold
        ({"rules": [{"derived": {"total": "code"}}]}, "so no rule can name them; find them first"),
    ],
)
def test_a_search_inside_a_job_that_cannot_be_is_refused(changes, said, tmp_path):
    sex = {"role": "privatise", "kind": "categorical", "levels": ["f", "m"]}
    schema = {"columns": {"code": CODE, "sex": sex}}
    if any("derived" in rule for rule in changes.get("rules", [])):
        total = {"role": "privatise", "kind": "continuous"}
        schema["columns"] |= {"code": {**CODE, "other": 0}, "total": total}
    schema |= {key: value for key, value in changes.items() if key == "rules"}
    given = {key: value for key, value in changes.items() if key != "rules"}
    job = job_of(tmp_path, **given)
    (job.parent / "schema.yaml").write_text(json.dumps(schema))
    with pytest.raises(SpecError, match=said):
        load_job(job)


def test_a_type_whose_levels_cannot_be_found_is_refused_before_the_charge(tmp_path):
    pq.write_table(pa.table({"code": [0.5, 1.5]}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"code": {**CODE, "other": 0.5}}, mechanism=ONE_TABLE)
    with pytest.raises(SpecError, match=r"levels of the type double cannot be found"):
        run_job(load_job(job))


def test_a_search_that_cannot_be_is_refused_before_a_row_is_read(tmp_path, table):
    job = job_of(tmp_path)
    for arguments, said in (
        ([], "the ε of the search is not given"),
        (["--epsilon", 1, "--delta", 0], "set it above 0"),
        (["--epsilon", 1, "--set", "privacy.adjacency=both"], "adjacency"),
    ):
        ran = call_cli("discover", job, *arguments)
        assert ran.returncode == 64
        [line] = ran.stderr.splitlines()
        assert said in line
    nothing = {name: each for name, each in SCHEMA.items() if name in ("user", "age")}
    ran = call_cli("discover", job_of(tmp_path, schema=nothing), "--epsilon", 1)
    assert ran.returncode == 64
    assert "no column of the schema has levels that are yet to be found" in ran.stderr
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["job.yaml", "schema.yaml"]


@pytest.mark.parametrize(
    ("adjacency", "n_rows", "said"),
    [
        ("replace-one", 100, True),
        ("replace-one", 2_000, False),
        ("add-remove", 100, False),  # how many there are is private
    ],
)
def test_a_search_in_few_rows_is_warned_of(adjacency, n_rows, said, tmp_path):
    pq.write_table(pa.table({"code": ["a"] * n_rows}), tmp_path / "in.parquet")
    privacy = {**PRIVACY, "adjacency": adjacency}
    search = load_discovery(job_of(tmp_path, schema={"code": CODE}, privacy=privacy), epsilon=1.0)
    warnings = plan_job(search).warnings
    assert any("hardly more than 3 levels" in each for each in warnings) == said
    assert any("hardly" in each for each in warnings) == said


def test_levels_that_were_found_with_a_seed_are_for_jobs_with_a_seed(tmp_path):
    found = {"epsilon": 1.0, "delta": 1e-6, "insecure": True}
    schema = {"code": {**CODE, "levels": ["a", "other"], "found": found}}
    with pytest.raises(SpecError, match="were found with a seed, so they protect nobody"):
        load_job(job_of(tmp_path, schema=schema, insecure_seed=None))
    with pytest.raises(SpecError, match="were found with a seed, so they protect nobody"):
        GaussianCopula(Schema.from_dict({"columns": schema}), epsilon=1.0, delta=1e-6)
    load_job(job_of(tmp_path, schema=schema, insecure_seed=1))
    schema["code"]["found"]["insecure"] = False
    load_job(job_of(tmp_path, schema=schema, insecure_seed=None))


def test_a_unit_of_lists_is_refused_before_a_row_is_read(tmp_path):
    pq.write_table(pa.table({"code": ["a"], "who": [[1]]}), tmp_path / "in.parquet")
    schema = {"code": CODE, "who": {"role": "drop"}}
    privacy = {**PRIVACY, "unit": {"column": "who", "max_rows": 2}}
    job = job_of(tmp_path, schema=schema, privacy=privacy)
    with pytest.raises(SpecError, match="holds lists or the like"):
        find(job)


def test_a_schema_that_is_named_by_set_is_the_one_that_is_looked_at(tmp_path, table):
    job = job_of(tmp_path, schema={**SCHEMA, "number": {"role": "drop"}, "day": {"role": "drop"}})
    find(job)
    (job.parent / "second.yaml").write_text(yaml.safe_dump({"columns": SCHEMA}))
    assert find_written(job, {}) is not None
    assert find_written(job, {"schema": "second.yaml"}) is None


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (pa.array([1.5, 2.5]), SpecError, "levels of the type double cannot be found"),
        (pa.array(["a", None]), DataError, "holds a null"),
        (pa.array([1, 2]), DataError, "do not fit its type int64"),
        (pa.array(["a", None]).dictionary_encode(), DataError, "holds a null"),
    ],
)
def test_columns_of_other_types_are_refused_and_cost_nothing(values, error, said, tmp_path):
    pq.write_table(pa.table({"code": values}), tmp_path / "in.parquet")
    place = ledger(tmp_path)
    other = 0.5 if pa.types.is_floating(values.type) else "other"
    job = job_of(tmp_path, schema={"code": {**CODE, "other": other}}, ledger=place)
    with pytest.raises(error, match=said):
        find(job)
    assert open_ledger(place["url"]).show("people").balance.epsilon_spent == 0
    assert columns_of(job)["code"].discovers


@pytest.mark.parametrize(
    "type_",
    [
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())),
    ],
)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_an_empty_column_and_every_type_of_text_have_a_list(type_, adjacency, tmp_path):
    values = ["é"] * 200 + [None] * 50
    encoding = {}
    if "binary" in str(type_):  # of a value that is no text, nothing is found
        values = [value and value.encode() for value in values] + [b"\xff"] * 200
        encoding = {"encoding": "utf-8"}
    pq.write_table(pa.table({"code": as_array(values, type_)}), tmp_path / "in.parquet")
    schema = {"code": {**CODE, **encoding, "nulls": "level"}}
    job = job_of(tmp_path, schema=schema, privacy={**PRIVACY, "adjacency": adjacency})
    find(job)
    assert columns_of(job)["code"].levels == ("é", "other")
    run_job(load_job(job))


def test_a_table_without_any_key_has_an_empty_list(tmp_path):
    pq.write_table(pa.table({"code": pa.array([None] * 9, pa.string())}), tmp_path / "in.parquet")
    job = job_of(tmp_path, schema={"code": {**CODE, "nulls": "level"}})
    find(job)
    assert columns_of(job)["code"].levels == ("other",)
