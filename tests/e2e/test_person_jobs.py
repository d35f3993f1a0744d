"""Jobs of persons with their rows: two tables that join, the same bytes however they are computed, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import dask
import deltalake
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import (
    categorical,
    charging_entries,
    continuous,
    digests,
    discrete,
    hidden,
    load,
    make_ledger,
    read_card,
    run_here,
    write_job,
)
from mechanisms.contract import KILLS, killed_at
from pyiceberg.catalog import load_catalog

import dpdask
from dpdask.engine import fit
from dpdask.engine import scan as scan_module
from dpdask.errors import DataError, InputError, OutputError, SpecError
from dpdask.io.shards import Manifest
from dpdask.io.storage import Folder
from dpdask.io.table_logs import TableLog
from dpdask.jobs.move import move_output
from dpdask.jobs.plan import audit_job, find_epsilon, make_page_of_plan, plan_job
from dpdask.jobs.run import abort, run_job, status
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.copula.people import PersonCellSearch, PersonsMechanism
from dpdask.privacy.noise import margin_95
from dpdask.stats.people import PersonStatistic

MOST = 6
RATINGS = {
    "user": {"role": "drop"},
    "rating": discrete([1, 2, 3, 4, 5]),
    "genre": categorical(["a", "b", "c"], nulls="level"),
    "price": continuous([0.0, 1.0]),
}
USERS = {
    "id": {"role": "drop"},
    "sex": categorical(["f", "m"]),
    "age": discrete([0, 1, 2, 3]),
    "joined": {"role": "drop"},
}
UNIT = {"column": "user", "max_rows": MOST}
PRIVACY = {"epsilon": 8.0, "delta": 1e-9, "adjacency": "add-remove", "unit": UNIT}
COPULA = {"kind": "copula", "persons": True, "bins": 4}

pytestmark = pytest.mark.usefixtures("here")


def make_tables(n_users=400, n_empty=40, seed=3):
    """Users and their ratings: each user has a taste, so its ratings are alike; some have none."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=n_users)
    k = rng.integers(1, 10, n_users)
    k[rng.random(n_users) < 0.2] = 1
    users = np.repeat(np.arange(n_users), k)
    n = len(users)
    ratings = pd.DataFrame(
        {
            "user": [f"u{user}" for user in users],
            "rating": np.clip(np.rint(3 + taste[users] + 0.7 * rng.normal(size=n)), 1, 5),
            "genre": np.array(["a", "b", "c", None], dtype=object)[rng.integers(0, 4, n)],
            "price": rng.random(n),
        }
    ).astype({"rating": "int64"})
    everybody = n_users + n_empty
    people = pd.DataFrame(
        {
            "id": [f"u{user}" for user in range(everybody)],
            "sex": np.array(["f", "m"])[rng.integers(0, 2, everybody)],
            "age": rng.integers(0, 4, everybody),
            "joined": np.arange(everybody),
        }
    )
    return ratings.sample(frac=1.0, random_state=seed).reset_index(drop=True), people


def write_table(folder, frame, n_files=3, row_group=200):
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(frame)), n_files)):
        table = pa.Table.from_pandas(frame.iloc[part], preserve_index=False)
        pq.write_table(table, folder / f"p{number}.parquet", row_group_size=row_group)
    return folder


def write(
    folder,
    tables=None,
    *,
    linked=True,
    layout=(3, 200),
    parents=(),
    schema=(),
    users=USERS,
    user_rules=(),
    **changes,
):
    ratings, people = tables or make_tables()
    declared = {**RATINGS, **dict(schema)}
    write_table(folder / "ratings", ratings, *layout)
    if linked:
        write_table(folder / "users", people, *layout)
        text = yaml.safe_dump({"columns": users, "rules": [*user_rules]}, sort_keys=False)
        (folder / "users.yaml").write_text(text)
        changes["parents"] = {
            "input": {"path": "users"},
            "schema": "users.yaml",
            "key": "id",
            **dict(parents),
        }
    return write_job(
        folder,
        "ratings",
        folder / "out",
        schema=declared,
        **{"privacy": PRIVACY, "mechanism": COPULA, "output__rows_per_shard": 1000, **changes},
    )


def read(folder):
    return dpdask.open(str(folder / "out"))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("persons")
    with dask.config.set(scheduler="synchronous"):
        run_here(write(folder))
    return folder


def test_every_key_joins_and_no_person_has_too_many_rows(released):
    opened = read(released)
    persons, rows = opened.persons(), opened.rows()
    assert list(persons.columns) == ["user", "sex", "age"]
    assert list(rows.columns) == ["user", "rating", "genre", "price"]
    assert list(persons["user"]) == list(range(len(persons)))
    assert set(rows["user"]) <= set(persons["user"])
    assert rows["user"].is_monotonic_increasing
    numbers = rows.groupby("user").size()
    assert numbers.max() <= MOST
    assert 0 < len(persons) - len(numbers) < 0.2 * len(persons)
    joined = opened.join()
    assert len(joined) == len(rows)
    assert not joined["sex"].isna().any()
    assert set(joined["genre"].dropna()) == {"a", "b", "c"}
    assert joined["genre"].isna().any()


def test_rows_of_one_person_are_alike(released):
    ratings, _ = make_tables()
    truth = ratings.groupby("user")["rating"].mean().var()
    found = read(released).person_means("rating").var()
    assert 0.5 * truth < found < 1.5 * truth


def test_the_card_tells_of_persons(released):
    card = read_card(released)
    persons = card["mechanism"]["persons"]
    assert persons["max_rows"] == MOST
    assert persons["parents"] == ["sex", "age"]
    assert persons["children"] == ["rating", "genre", "price"]
    assert persons["exact"] is False
    assert "The number of persons is private" in card["guarantee"]["text"]
    assert "n_rows" not in {key for key, value in card.items() if value is not None}
    assert Card.read(card, "card").mechanism.kind == "copula"
    page = (released / "out/_dpdask/release.html").read_text(encoding="utf-8")
    manifest = json.loads((released / "out/_dpdask/manifest.json").read_text())
    opened = read(released)
    n_persons, n_rows = len(opened.persons()), len(opened.rows())
    assert f"{n_persons:,} persons with {n_rows:,} rows" in page
    assert f"From all {n_persons:,} persons and all {n_rows:,} rows." in page
    assert manifest["rows"] == len(opened.rows())
    for lost in persons["lost"]:
        assert lost.split(":")[0].replace("'", "&#39;") in page
    croissant = json.loads((released / "out/_dpdask/croissant.json").read_text())
    assert [each["name"] for each in croissant["recordSet"]] == ["parents", "children"]


def test_wrong_arguments_are_refused_in_one_line(released):
    opened = read(released)
    with pytest.raises(SpecError, match="no column of numbers"):
        opened.person_means("genre")
    with pytest.raises(SpecError, match="no such column"):
        opened.person_means("nothing")
    with pytest.raises(SpecError, match="`rows` and `persons`"):
        opened.to_dask("users")
    assert len(opened.to_dask("persons")) == len(opened.persons())
    assert len(opened.to_dask()) == len(opened.rows())


def test_bytes_do_not_depend_on_the_layout_nor_the_scheduler(released, tmp_path):
    ratings, people = make_tables()
    mixed = (
        ratings.sample(frac=1.0, random_state=9).reset_index(drop=True),
        people.sample(frac=1.0, random_state=8).reset_index(drop=True),
    )
    expected = digests(released / "out")
    for number, (tables, layout, scheduler) in enumerate(
        [(mixed, (1, 10_000), "synchronous"), (mixed, (7, 31), "threads")]
    ):
        job = write(tmp_path / str(number), tables, layout=layout)
        with dask.config.set(scheduler=scheduler):
            run_job(load(job))
        found = digests(tmp_path / str(number) / "out")
        shards = {name: each for name, each in found.items() if name.endswith(".parquet")}
        assert shards == {name: expected[name] for name in shards}
        assert len(shards) == len([name for name in expected if name.endswith(".parquet")])


def test_workers_bring_persons_together(released, tmp_path, two_workers):
    expected = digests(released / "out")
    with two_workers.get_client():
        run_job(load(write(tmp_path)))
    found = digests(tmp_path / "out")
    shards = [name for name in expected if name.endswith(".parquet")]
    assert {name: found[name] for name in shards} == {name: expected[name] for name in shards}


def test_rows_alone_tell_persons_with_constant_columns(tmp_path):
    ratings, people = make_tables()
    sexes = dict(zip(people["id"], people["sex"], strict=True))
    lifted = ratings.assign(sex=ratings["user"].map(sexes))
    schema = {"sex": categorical(["f", "m"], constant=True)}
    run_here(write(tmp_path, (lifted, people), linked=False, schema=schema))
    opened = read(tmp_path)
    persons, rows = opened.persons(), opened.rows()
    assert list(persons.columns) == ["user", "sex"]
    # each person has a row, since persons are known by their rows
    assert set(rows["user"]) == set(persons["user"])
    assert abs(len(persons) - 400) < 60


def make_skewed():
    """Prices that an even cut of their bounds would put into one cell, and an income of persons like them."""
    ratings, people = make_tables()
    rng = np.random.default_rng(4)
    spent = np.minimum(np.exp(rng.normal(2.0, 1.0, len(ratings))), 9_999.0)
    income = np.minimum(np.exp(rng.normal(3.0, 1.0, len(people))), 9_999.0)
    return ratings.assign(price=spent), people.assign(income=income)


PAIRS = [["f", 0], ["f", 1], ["m", 1], ["m", 2], ["m", 3]]
WIDE = continuous([0.0, 10_000.0])


@pytest.mark.parametrize("killed", [None, PersonCellSearch, PersonsMechanism])
def test_cells_are_found_where_none_are_declared(killed, tmp_path):
    """Also by a run that is killed when the noise of a round is kept."""
    tables = make_skewed()
    given = {
        "schema": {"price": WIDE},
        "users": {**USERS, "income": WIDE},
        "mechanism": {"kind": "copula", "persons": True},
    }
    job = write(tmp_path / "one", tables, **given)
    if killed:
        with killed_at(fit, "_keep_drawn", after=True, when=lambda by, *_: isinstance(by, killed)):
            run_here(job)
    run_here(job)
    mixed = [table.sample(frac=1.0, random_state=2).reset_index(drop=True) for table in tables]
    run_here(write(tmp_path / "other", mixed, layout=(5, 77), **given))
    one, other = (
        {name: each for name, each in digests(tmp_path / name_ / "out").items() if "part-" in name}
        for name_ in ("one", "other")
    )
    assert one == other
    opened, (ratings, people) = read(tmp_path / "one"), tables
    for found, truth in (
        (opened.rows()["price"], ratings["price"]),
        (opened.persons()["income"], people["income"]),
    ):
        for share in (0.25, 0.5, 0.75):
            assert abs(np.mean(found <= truth.quantile(share)) - share) < 0.1
    card = read_card(tmp_path / "one")
    assert len(card["mechanism"]["bins"]["price"]) > 5
    assert "fine_counts" in card["accounting"]["noise"]
    planned = plan_job(load(job))
    assert planned.stages[0].startswith("search: ")
    assert audit_job(load(job), n_runs=200)["sound"]


def test_rows_and_persons_keep_the_rules_of_both_schemas(tmp_path):
    rules = [
        {"forbid": {"genre": "a", "rating": 5}},
        {"if": {"price": [0.0, 0.25]}, "then": {"rating": [1, 2, 3]}},
    ]
    given = {"rules": rules, "user_rules": [{"columns": ["sex", "age"], "allow": PAIRS}]}
    run_here(write(tmp_path, **given))
    opened = read(tmp_path)
    rows, persons = opened.rows(), opened.persons()
    assert len(rows[rows["genre"] == "a"]) > 100
    assert not ((rows["genre"] == "a") & (rows["rating"] == 5)).any()
    assert not ((rows["price"] < 0.25) & (rows["rating"] > 3)).any()
    assert {*zip(persons["sex"], persons["age"], strict=True)} == {*map(tuple, PAIRS)}
    assert len(read_card(tmp_path)["mechanism"]["rules"]) == 3
    assert any("3 rules" in line for line in plan_job(load(tmp_path / "job.yaml")).expectations)


def test_persons_may_have_no_column_of_their_own(tmp_path):
    run_here(write(tmp_path, linked=False))
    opened = read(tmp_path)
    assert list(opened.persons().columns) == ["user"]
    assert set(opened.rows()["user"]) == set(opened.persons()["user"])


def test_a_number_of_persons_may_be_asked_for(tmp_path):
    run_here(write(tmp_path, mechanism={**COPULA, "n_rows": 50}))
    assert len(read(tmp_path).persons()) == 50


def test_under_replace_one_the_number_of_persons_is_public(tmp_path):
    run_here(write(tmp_path, privacy={**PRIVACY, "adjacency": "replace-one"}))
    assert len(read(tmp_path).persons()) == 440
    text = read_card(tmp_path)["guarantee"]["text"]
    assert "The number of persons is published as it is, and that of their rows is private" in text


@pytest.mark.parametrize("kill", sorted(KILLS))
def test_a_killed_run_goes_on_to_the_same_bytes_at_one_charge(
    kill, released, tmp_path, monkeypatch
):
    """The ledger refuses seeds, so both runs are of one seed without it; the charge is counted by the state alone."""
    job = write(tmp_path)
    with KILLS[kill]() if kill != "published" else KILLS["shards staged"]():
        run_here(job)
    run_here(job)
    whole, found = digests(released / "out"), digests(tmp_path / "out")
    assert {name: each for name, each in found.items() if name.endswith(".parquet")} == {
        name: each for name, each in whole.items() if name.endswith(".parquet")
    }
    assert not hidden(tmp_path / "out").exists()


def test_the_ledger_is_charged_once_for_all_groups(tmp_path):
    place = make_ledger(tmp_path, "ratings", 20.0, 1e-6)
    job = write(tmp_path / "job", ledger=place)
    run_here(job)
    (charged, _) = charging_entries(**place)
    assert charged.charge.epsilon == 8.0
    assert charged.charge.event["unit"] == "column user"
    assert len(charged.charge.event["events"]) == 6


def test_a_plan_reads_no_rows_and_tells_what_to_expect(tmp_path, monkeypatch):
    job = load(write(tmp_path))
    for module in ("dpdask.io.fragments", "dpdask.engine.source"):
        monkeypatch.setattr(f"{module}.read_batches", lambda *_: pytest.fail("rows were read"))
    planned = plan_job(job)
    assert any("if ε is at least" in line for line in planned.expectations)
    errors = json.loads(json.dumps(planned.to_dict()))["expected_errors"]
    assert [each["group"] for each in errors["tables"]] == ["PP", "CC", "PC", "WW"]
    for each, line in zip(errors["tables"], planned.expectations, strict=False):
        assert f"{each['of']} has noise of σ {each['sigma']:.3g}" in line
        told = float(line.rpartition("about ")[2].split()[0])
        assert told == pytest.approx(each["moved"] / 10_000, rel=0.06)
    assert [each["persons"] for each in errors["needed"]] == [1_000, 10_000, 100_000]
    said = f"at least {errors['needed'][0]['epsilon']:g} for 1,000 persons"
    assert any(said in line for line in planned.expectations)
    assert not any("so few persons" in line for line in planned.warnings)
    public = {**PRIVACY, "adjacency": "replace-one", "epsilon": 0.5}
    warned = plan_job(load(write(tmp_path / "public", privacy=public))).warnings
    assert any("so few persons, 440" in line for line in warned)
    assert any("beyond 6 nothing" in line for line in planned.expectations)
    assert any("in parts of 1/67,108,864" in each["kind"] for each in planned.noise)
    assert all(each["sigma"] < 100 for each in planned.noise)  # of persons
    page = make_page_of_plan(job, planned)
    assert "What to expect" in page
    assert "Number of persons" not in page
    assert audit_job(job, n_runs=500)["sound"]


def test_rows_without_a_person_are_refused_or_dropped(tmp_path):
    ratings, people = make_tables()
    few = people.iloc[:300]
    with pytest.raises(DataError, match="table of persons lacks") as refused:
        run_here(write(tmp_path / "refused", (ratings, few)))
    assert "300" not in str(refused.value)
    assert not (tmp_path / "refused/out").exists()
    run_here(write(tmp_path / "dropped", (ratings, few), parents={"orphans": "drop"}))
    assert abs(len(read(tmp_path / "dropped").persons()) - 300) < 60


def test_a_person_stands_once_in_the_table_of_persons(tmp_path):
    ratings, people = make_tables()
    twice = pd.concat([people, people.iloc[:1]])
    with pytest.raises(DataError, match="several rows"):
        run_here(write(tmp_path, (ratings, twice)))


def test_an_input_that_changed_since_the_run_began_is_refused(tmp_path):
    job = write(tmp_path)
    with KILLS["release kept"]():
        run_here(job)
    pq.write_table(
        pa.Table.from_pandas(make_tables(seed=5)[1], preserve_index=False),
        tmp_path / "users" / "p9.parquet",
    )
    with pytest.raises(InputError, match="changed since the run began"):
        run_here(job)


def test_a_copied_file_of_persons_is_refused(tmp_path):
    job = write(tmp_path)
    data = (tmp_path / "users/p0.parquet").read_bytes()
    (tmp_path / "users/p7.parquet").write_bytes(data)
    with pytest.raises(InputError, match="copy"):
        run_here(job)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"output__format": "delta", "output__mode": "append"}, "join with persons of another"),
        ({"output__format": "delta", "output__mode": "overwrite"}, "join with persons of another"),
        ({"growing": True}, "cannot grow"),
        ({"output__model": True}, "no model"),
        ({"mechanism": {"kind": "copula", "bins": 4}}, "constant"),
        ({"mechanism": {"kind": "marginals", "cliques": [["rating"]], "bins": 4}}, "constant"),
        ({"privacy": {**PRIVACY, "unit": "row"}}, "the unit is the row"),
        ({"parents": {"key": "uid"}}, "names the persons"),
        ({"schema": {"sex": categorical(["f", "m"])}}, "in both tables"),
        ({"schema": {"rating": discrete([1, 2], constant=True)}}, "and constant"),
    ],
)
def test_what_cannot_be_is_refused_before_a_row_is_read(changes, what, tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "scan_parts", lambda *_: pytest.fail("rows were read"))
    with pytest.raises(SpecError, match=what):
        run_here(write(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


def test_keys_of_other_types_do_not_join(tmp_path):
    ratings, people = make_tables()
    numbers = people.assign(id=np.arange(len(people)))
    with pytest.raises(DataError, match="names persons as int64"):
        plan_job(load(write(tmp_path, (ratings, numbers))))
    wide = people.assign(id=np.arange(len(people), dtype=np.uint64))
    signed = ratings.assign(user=np.zeros(len(ratings), dtype=np.int64))
    with pytest.raises(DataError, match="names persons as uint64"):
        plan_job(load(write(tmp_path / "wide", (signed, wide))))


def tables_of(kind, folder):
    """Return what a job says of two tables with logs, and what reads one of them as its own library does."""
    if kind == "delta":
        return {"output__format": "delta"}, lambda table: deltalake.DeltaTable(
            folder / "out" / f"table={table}"
        ).to_pyarrow_table()
    place = {"name": "lake", "type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
    folder.mkdir(parents=True, exist_ok=True)
    catalog = load_catalog(**place)
    catalog.create_namespace("db")
    asked = {"format": "iceberg", "table": "db.ratings", "catalog": place}
    return (
        {f"output__{key}": each for key, each in asked.items()},
        lambda table: catalog.load_table(f"db.ratings_{table}").scan().to_arrow(),
    )


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_two_tables_with_logs_hold_what_folders_hold(kind, released, tmp_path):
    asked, read_table = tables_of(kind, tmp_path)
    job = write(tmp_path, **asked)
    planned = str(plan_job(load(job)))
    assert "then both as one release" in planned
    assert "table each for persons and their rows" in planned
    found = run_here(job).manifest
    expected = Manifest.read(Folder((released / "out").as_uri()))
    assert [each.sha256 for each in found.shards] == [each.sha256 for each in expected.shards]
    opened = read(tmp_path)
    for table, rows in (("parents", opened.persons()), ("children", opened.rows())):
        assert len(rows)
        pd.testing.assert_frame_equal(read_table(table).to_pandas(), rows)
    url = (tmp_path / "out").as_uri()
    assert status(url) == ("released", 2, 1, 0, 0)
    assert run_here(job).status == "already released"
    with pytest.raises(OutputError, match="released already"):
        abort(url)
    if kind == "iceberg":
        with pytest.raises(SpecError, match="cannot be moved"):
            move_output(url, f"{url}-moved")
    else:
        assert move_output(url, f"{url}-moved")
        moved = dpdask.open(str(tmp_path / "out-moved"))
        assert len(moved.join()) == found.n_rows
        assert deltalake.DeltaTable(tmp_path / "out-moved/table=parents").version() == 0


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_what_a_table_cannot_hold_or_holds_already_is_refused_before_the_charge(kind, tmp_path):
    asked, _ = tables_of(kind, tmp_path)
    asked["ledger"] = make_ledger(tmp_path, "ratings", 20.0, 1e-6)
    rows = pa.table({"user": [1]})
    if kind == "delta":
        deltalake.write_deltalake(str(tmp_path / "there/out/table=parents"), rows)
    else:
        catalog = load_catalog(**asked["output__catalog"])
        place = (tmp_path / "elsewhere").as_uri()
        catalog.create_table("db.ratings_parents", rows.schema, location=place)
    job = write(tmp_path / "there", **asked)
    with pytest.raises(OutputError, match="already exists"):
        run_here(job)
    assert "already exists" in str(plan_job(load(job)).refusal)
    if kind == "delta":
        ratings, people = make_tables()
        spaced = people.rename(columns={"age": "the age"})
        users = {"the age" if name == "age" else name: each for name, each in USERS.items()}
        job = write(tmp_path / "spaced", (ratings, spaced), users=users, **asked)
        with pytest.raises(SpecError, match="Spark refuses this name"):
            run_here(job)
    assert charging_entries(**asked["ledger"]) == []


def test_a_table_that_another_writer_changed_outlives_an_abort(tmp_path, monkeypatch):
    """The run is killed between its two commits, and then the table of rows gets rows of somebody else."""
    job = write(tmp_path, output__format="delta")
    committed = TableLog.commit

    def commit_one(log, entry):
        committed(log, entry)
        raise KeyboardInterrupt

    monkeypatch.setattr(TableLog, "commit", commit_one)
    with pytest.raises(KeyboardInterrupt):
        run_here(job)
    monkeypatch.undo()
    place = tmp_path / "out" / "table=children"
    there = deltalake.DeltaTable(place).to_pyarrow_table()
    deltalake.write_deltalake(str(place), there.slice(0, 5), mode="append")
    assert abort((tmp_path / "out").as_uri()) == "run"
    assert deltalake.DeltaTable(place).to_pyarrow_table().num_rows == len(there) + 5
    assert not (tmp_path / "out" / "table=parents").exists()
    with pytest.raises(OutputError, match="already exists"):
        run_here(job)


def test_the_examples_of_the_guide_run(tmp_path, monkeypatch):
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "release-persons.md"
    yamls, pythons = (
        re.findall(rf"^```{language}\n(.*?)^```", guide.read_text(encoding="utf-8"), re.S | re.M)
        for language in ("yaml", "python")
    )
    monkeypatch.chdir(tmp_path)
    ratings, users = make_tables(n_users=4_000)
    write_table(tmp_path / "ratings", ratings.rename(columns={"user": "userId"}))
    users.to_parquet("users.parquet", index=False)
    declared = {"userId" if name == "user" else name: each for name, each in RATINGS.items()}
    Path("ratings.yaml").write_text(yaml.safe_dump({"columns": declared}))
    Path("users.yaml").write_text(yaml.safe_dump({"columns": USERS}))
    job, columns, tables = yamls
    Path("job.yaml").write_text(job)
    run_here("job.yaml")
    alone = yaml.safe_load(job) | yaml.safe_load(tables)
    alone["output"] = {"path": "tables"}
    Path("tables.yaml").write_text(yaml.safe_dump(alone))
    assert run_here("tables.yaml").status == "released"
    names = {"__name__": "example"}
    for block in pythons:
        exec(block, names)
    assert dpdask.Schema.from_dict(yaml.safe_load(columns)).columns["sex"].constant


def test_workers_hold_no_more_than_the_codes(tmp_path, monkeypatch):
    """The rows of persons travel as codes: a byte a column, and the hash of the person."""
    seen = []
    counted = PersonStatistic.count

    def count(self, rows, persons, key):
        seen.extend([*rows, *persons])
        return counted(self, rows, persons, key)

    monkeypatch.setattr(PersonStatistic, "count", count)
    run_here(write(tmp_path))
    ratings, people = make_tables()
    n = sum(len(each.units) for each in seen)
    assert n == len(ratings) + len(people)
    held = sum(each.units.nbytes + each.codes.nbytes for each in seen)
    assert held == 8 * n + 3 * len(ratings) + 2 * len(people)


LOUD = {**PRIVACY, "epsilon": 100.0}
TABLES = {
    "kind": "marginals",
    "persons": True,
    "bins": 4,
    "cliques": [["sex", "age"], ["genre"], ["sex", "rating"], ["genre", "rating", "price"]],
}


def write_tables(folder, **changes):
    return write(folder, **{"mechanism": TABLES, **changes})


def count_join(tables, clique):
    """The bounded persons' table of columns of one column of persons and one of rows, in persons, by pandas; for users within the bound."""
    ratings, people = tables
    joined = ratings.merge(people, left_on="user", right_on="id")
    k = joined.groupby("user")["user"].transform("size")
    return joined.assign(weight=1.0 / k).groupby(clique)["weight"].sum()


@pytest.fixture(scope="module")
def tabulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    ratings, people = make_tables()
    ratings = ratings.groupby("user").head(MOST)
    with dask.config.set(scheduler="synchronous"):
        run_here(write_tables(folder, tables=(ratings, people), privacy=LOUD))
    return folder, (ratings, people)


def test_each_person_weighs_1_in_tables_of_the_join(tabulated):
    folder, tables = tabulated
    opened = read(folder)
    ratings, people = tables
    expected = count_join(tables, ["sex", "rating"]).unstack()
    found = opened.crosstab("sex", "rating")
    off = (found.estimate - expected) / found.standard_error
    assert np.abs(off.to_numpy()).max() < 4
    noise = read_card(folder)["accounting"]["noise"]
    assert (
        np.abs((found.estimate - expected).to_numpy()).max()
        < 3 * noise["sex x rating"]["margin_95"]
    )
    # a person without rows is in tables of persons alone
    assert abs(opened.crosstab("sex", "age").estimate.to_numpy().sum() - len(people)) < 10
    assert abs(found.estimate.to_numpy().sum() - ratings["user"].nunique()) < 10
    means = ratings.groupby("user")["rating"].mean()
    assert abs(opened.mean("rating").estimate - means.mean()) < 0.05
    by = means.groupby(people.set_index("id")["sex"].reindex(means.index)).mean()
    assert np.abs(opened.mean("rating", by="sex").estimate - by).max() < 0.05
    assert opened.share("genre").estimate.sum() == pytest.approx(1.0)
    assert any("weighs the same" in limit for limit in opened.share("genre").limits)
    assert not any("weighs the same" in limit for limit in opened.share("sex").limits)
    for question, names in (("quantile", ["price", 0.5]), ("slope", ["rating", "price"])):
        with pytest.raises(SpecError, match="each person weighs 1"):
            getattr(opened, question)(*names)
    with pytest.raises(SpecError, match="no released table"):
        opened.crosstab("age", "genre")


def test_the_card_the_page_and_the_plan_tell_of_persons(tabulated):
    folder, _ = tabulated
    card = read_card(folder)
    assert card["guarantee"]["protected"] == {
        "who": "every person, with all rows",
        "fraction": 1.0,
        "of": "persons",
    }
    assert card["mechanism"]["persons"]["parents"] == ["sex", "age"]
    assert not card["mechanism"]["persons"]["exact"]
    assert abs(card["mechanism"]["persons"]["n_persons"] - 440) < 10
    assert "The number of persons is private" in card["guarantee"]["text"]
    page = (folder / "out" / "_dpdask" / "release.html").read_text()
    assert "At most 6 rows of each were counted" in page
    assert re.search("fewer than about [0-9]+ persons: the noise", page)
    planned = plan_job(load(folder / "job.yaml"))
    assert any("off by at most" in line for line in planned.expectations)
    assert any("each 1/k" in line for line in planned.expectations)
    assert any("fewer persons than the σ" in line for line in planned.expectations)
    sigma = card["accounting"]["noise"]["genre"]["standard_deviation"]
    assert 0.05 < sigma < 5  # in persons
    assert audit_job(load(folder / "job.yaml"), n_runs=200)["sound"]
    events = card["accounting"]["events"]["events"]
    whole = [1, 2**26, 2**26, 2**26]
    assert [event["sensitivity"] for event in events] == whole
    # what a steward asks of the margin of a count is asked in persons
    epsilon = find_epsilon(load(folder / "job.yaml"), {"count_margin": "10"})
    found = make_quieter(load(folder / "job.yaml"), epsilon)
    assert max(margin_95(event) / parts for event, parts in found.counted) <= 10.5
    with pytest.raises(SpecError, match="give count_margin"):
        find_epsilon(load(folder / "job.yaml"), {"mean.rating": "0.1"})


def make_quieter(job, epsilon):
    budget = job.mechanism.budget.model_copy(update={"epsilon": epsilon})
    return replace(job.mechanism, budget=budget)


@pytest.mark.parametrize("kill", ["noise or release kept", "shards staged"])
def test_a_killed_run_of_tables_of_persons_charges_once(kill, tmp_path):
    place = make_ledger(tmp_path, "people", 30.0, 1e-6)
    job = write_tables(tmp_path / "one", ledger=place)
    with KILLS[kill]():
        run_here(job)
    run_here(job)
    (charged, _) = charging_entries(**place)
    assert charged.charge.epsilon == PRIVACY["epsilon"]
    assert read(tmp_path / "one").share("genre").estimate.sum() == pytest.approx(1.0)


def test_tables_of_persons_do_not_depend_on_the_layout(tabulated, tmp_path):
    folder, tables = tabulated
    mixed = tuple(each.sample(frac=1.0, random_state=9).reset_index(drop=True) for each in tables)
    run_here(write_tables(tmp_path, tables=mixed, layout=(5, 31), privacy=LOUD))
    shards = [
        {k: v for k, v in digests(each / "out").items() if "part-" in k}
        for each in (folder, tmp_path)
    ]
    assert shards[0] == shards[1]


def test_rows_alone_have_tables_with_constant_columns(tmp_path):
    ratings, people = make_tables()
    lifted = ratings.assign(sex=ratings["user"].map(people.set_index("id")["sex"]))
    schema = {"sex": categorical(["f", "m"], constant=True)}
    asked = {**TABLES, "cliques": [["sex", "rating"], ["sex"]]}
    privacy = {**PRIVACY, "adjacency": "replace-one"}
    run_here(
        write(
            tmp_path,
            (lifted, people),
            linked=False,
            schema=schema,
            mechanism=asked,
            privacy=privacy,
        )
    )
    told = read_card(tmp_path)["mechanism"]["persons"]
    assert (told["n_persons"], told["exact"], told["empty"]) == (400, True, False)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mechanism": {**TABLES, "bins": "adaptive"}}, "price.*no cells are found"),
        ({"privacy": {**PRIVACY, "delta": 0.0}}, "needs a δ"),
        ({"privacy": {**PRIVACY, "unit": "row"}}, "the unit is the row"),
        ({"mechanism": {**TABLES, "persons": False}}, "table of persons|constant"),
        ({"mechanism": {**TABLES, "cliques": [["user"]]}}, "not a privatised column"),
    ],
)
def test_tables_of_persons_that_cannot_be_counted_are_refused(changes, what, tmp_path):
    with pytest.raises(SpecError, match=what):
        run_here(write_tables(tmp_path, **changes))
