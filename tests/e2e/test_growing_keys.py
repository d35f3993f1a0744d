"""Rows that are delivered twice: found by their keys in whatever order, codec and file they come."""

import itertools

import dask
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from e2e.growing import (
    BY_USER,
    N,
    add_day,
    at,
    job,
    kept,
    kinds,
    list_digests,
    manifests,
    released,
    rows_of,
    spent,
)
from e2e.helpers import call_cli, digests, error_line, hidden, load, run_here
from e2e.test_growing_jobs import POINTS, dying
from e2e.test_growing_logs import Delta, Iceberg, output, rows_in, told
from services.stores import in_environment

from dpdask.engine.account import open_ledger
from dpdask.engine.digests import add_key, hash_batch
from dpdask.errors import InputError, SpecError
from dpdask.io.lakes import find_options
from dpdask.io.storage import Folder
from dpdask.jobs import growing, repeats
from dpdask.jobs.plan import plan_job

KEY = ["day", "user"]


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(repeats, "KEYS_PER_FILE", 50)  # several files
    monkeypatch.setattr(growing, "KEYS_PER_FILE", 50)
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.mark.parametrize("parted", [False, True], ids=["in a folder", "in folders by values"])
def test_a_plain_file_with_the_rows_of_a_released_one_is_refused(parted, tmp_path, url):
    """In another order, codec and layout, without a key; one row less makes it another file."""
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, ledger=at(url), input__format="parquet")

    def add(day, name, rows, **options):
        place = source / f"day={day}" if parted else source
        place.mkdir(parents=True, exist_ok=True)
        kept_rows = rows.drop_columns(["day"]) if parted else rows
        pq.write_table(kept_rows, place / f"{name}.parquet", **options)
        return place / f"{name}.parquet"

    if parted:
        declared = yaml.safe_load((tmp_path / "job" / "schema.yaml").read_text())
        declared["columns"]["day"] = {"role": "keep", "type": "int64"}
        (tmp_path / "job" / "schema.yaml").write_text(yaml.safe_dump(declared))
    for day in range(3):
        add(day, f"a{day}", rows_of(day))
        run_here(made)
    other = add(1, "b", again(1), compression="gzip", row_group_size=50)
    before, charged = digests(tmp_path / "job"), kinds(url)
    result = call_cli("run", made)
    assert result.returncode == InputError.exit_code
    assert "rows seen again: this file holds the rows of" in error_line(result)
    assert "a1.parquet" in error_line(result)
    assert digests(tmp_path / "job") == before
    assert (kinds(url)[: len(charged)], spent(url)) == (charged, 1.0)
    assert run_here(made, growing={"charge_repeats": True}).status == "released"
    assert spent(url) == 2.0
    other.unlink()
    add(1, "c", again(1).slice(1))  # what differs by a row is another file
    with pytest.raises(InputError, match="this file was released and is gone"):
        run_here(made)
    add(1, "b", again(1), compression="gzip", row_group_size=50)
    assert run_here(made).status == "released"


def again(day, n_new=0):
    """Return the rows of a day in another order, and some that are new."""
    order = np.random.default_rng(5).permutation(N)
    rows = rows_of(day).take(pa.array(order))
    return pa.concat_tables([rows, rows_of(day + 100, n_new)]) if n_new else rows


@pytest.mark.parametrize("kind", [Delta, Iceberg, "files", "csv"])
@pytest.mark.parametrize("policy", ["refuse", "skip", "charge"])
def test_rows_that_come_again_follow_the_policy(kind, policy, tmp_path, url):
    rules = {"row_key": KEY, "repeated": policy}
    if kind in (Delta, Iceberg):
        lake = kind(tmp_path / "lake")
        made = lake.job(tmp_path / "job", ledger=at(url), growing=rules)
    else:
        made = job(tmp_path / "job", tmp_path / "lake", ledger=at(url), growing=rules)
        (tmp_path / "lake").mkdir()

    def add(name, rows):
        if kind in (Delta, Iceberg):
            lake.add(0, rows, f"{name}.parquet")
        elif kind == "csv":
            pa_csv.write_csv(rows, tmp_path / "lake" / f"{name}.csv")
        else:
            pq.write_table(rows, tmp_path / "lake" / f"{name}.parquet", row_group_size=50)

    for day in range(2):
        add(f"a{day}", rows_of(day))
        run_here(made)
    add("b", again(0, 7))
    if policy == "refuse":
        before = digests(tmp_path / "job")
        result = call_cli("run", made)
        assert result.returncode == InputError.exit_code
        assert "rows seen again: rows have the same" in error_line(result)
        assert digests(tmp_path / "job") == before
        assert kinds(url) == ["intend", "commit"] * 2
        assert not hidden(output(made)).exists()
        return
    run_here(made)
    assert rows_in(made) == [N, N, 7 if policy == "skip" else N + 7]
    assert spent(url) == (1.0 if policy == "skip" else 2.0)
    assert told(made, 2)["again"] == (policy == "charge")
    assert (told(made, 2)["row_key"], told(made, 2)["repeated"]) == (KEY, policy)
    assert ("is left out if one with the same" in told(made, 2)["text"]) == (policy == "skip")
    if policy == "skip":
        table = released(output(made)).to_pandas()
        assert len(table) == 2 * N + 7 == len(table[KEY].drop_duplicates())
    add("c", again(1))
    assert run_here(made).status == ("nothing new" if policy == "skip" else "released")
    assert spent(url) == (1.0 if policy == "skip" else 3.0)
    add("d", rows_of(2))
    run_here(made)
    assert spent(url) == (1.0 if policy == "skip" else 3.0)


@pytest.mark.parametrize("policy", ["refuse", "skip", "charge"])
def test_two_new_rows_with_one_key(policy, tmp_path, url):
    """One release holds a row once, or it would cost more than is charged."""
    source = tmp_path / "in"
    made = job(
        tmp_path / "job", source, ledger=at(url), growing={"row_key": KEY, "repeated": policy}
    )
    add_day(source, 0)
    run_here(made)
    pq.write_table(pa.concat_tables([rows_of(1), again(1)]), source / "twice.parquet")
    if policy == "skip":
        run_here(made)
        assert rows_in(made) == [N, N]
        return
    with pytest.raises(InputError, match="two new rows have the same"):
        run_here(made)


def test_changed_rows_keep_their_keys(tmp_path, url):
    lake = Delta(tmp_path / "lake")
    rules = {"row_key": KEY, "changed": "release"}
    made = lake.job(tmp_path / "job", ledger=at(url), growing=rules)
    lake.add(0)
    run_here(made)
    lake.merge(rows_of(0).slice(0, 5))
    run_here(made)
    assert (rows_in(made), spent(url)) == ([N, N], 2.0)


@pytest.mark.parametrize(("unit", "expected"), [("row", 3.0), (BY_USER, 3.0)])
def test_each_release_may_be_charged_in_full(unit, expected, tmp_path, url):
    source = tmp_path / "in"
    made = job(
        tmp_path / "job",
        source,
        ledger=at(url),
        growing={"charge_repeats": True},
        privacy__unit=unit,
    )
    for day in range(3):
        add_day(source, day)
        planned = plan_job(load(made)).series or {}
        run_here(made)
        assert planned["series_epsilon"] == spent(url) == day + 1
    assert told(made, 2)["epsilon"] == expected


@pytest.mark.matrix("driver killed", "growing, row_key")
@pytest.mark.parametrize("day", [0, 1])
@pytest.mark.parametrize("point", ["fitted", "kept", "before-commit", "uncommitted", "removed"])
def test_a_killed_release_keeps_its_keys(day, point, tmp_path, url, seeded_ledgers):
    assert point in POINTS
    source = tmp_path / "in"
    rules = {"growing": {"row_key": KEY, "repeated": "skip"}}
    quiet = job(tmp_path / "quiet", source, **rules)
    made = job(tmp_path / "job", source, ledger=at(url), insecure_seed=7, **rules)
    for before in range(day):
        add_day(source, before)
        run_here(quiet)
        run_here(made)
    source.mkdir(exist_ok=True)
    pq.write_table(
        pa.concat_tables([rows_of(day), *([again(0).slice(0, 30)] if day else [])]),
        source / f"day-{day}.parquet",
    )
    if day:  # a whole file that is left out
        pq.write_table(again(0), source / "again.parquet")
    run_here(quiet)
    with dying(point):
        run_here(made)
    pq.write_table(again(day, 4), source / "late.parquet")
    run_here(quiet)
    run_here(made)
    assert list_digests(manifests(output(made))) == list_digests(manifests(output(quiet)))
    assert rows_in(made) == [*[N] * (day + 1), 4]
    assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * (day + 2))
    names = [
        sorted(path.name[:10] for path in kept(output(each)).iterdir()) for each in (made, quiet)
    ]
    assert names[0] == names[1]


def test_a_lost_file_of_keys_ends_the_series(tmp_path):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, growing={"row_key": KEY})
    add_day(source, 0)
    run_here(made)
    next(kept(output(made)).glob("keys-*")).unlink()
    add_day(source, 1)
    with pytest.raises(InputError, match="missing or was changed"):
        run_here(made)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"row_key": ["r"]}, "growing.row_key: 'r' is no column that is kept"),
        ({"row_key": []}, "growing"),
        ({"repeated": "skip"}, "needs a `row_key`"),
    ],
)
def test_a_key_is_of_kept_columns(rules, says, tmp_path):
    result = call_cli("validate", job(tmp_path, tmp_path / "in", growing=rules))
    assert result.returncode == SpecError.exit_code
    assert says in result.stderr


def test_hashes_depend_on_values_alone():
    rows = {"a": [1, None, 1, 2], "b": ["x", "x", "x", None], "c": [b"\xff", b"", b"\xff", None]}
    batch = pa.record_batch(rows)
    hashes = hash_batch(batch, ["a", "b", "c"])
    assert hashes[0] == hashes[2]
    assert len(set(hashes.tolist())) == 3
    encoded = batch.set_column(1, "b", batch.column("b").dictionary_encode())
    assert (hash_batch(encoded, ["a", "b", "c"]) == hashes).all()
    assert not (hash_batch(batch, ["a", "b", "c"], b"other") == hashes).any()
    keyed = add_key(hashes, b"k" * 32)
    assert (keyed == add_key(hashes, b"k" * 32)).all()
    assert not (keyed == add_key(hashes, b"l" * 32)).any()
    split = pa.record_batch({"a": ["1", "11"], "b": ["11", "1"]})
    assert len(set(hash_batch(split, ["a", "b"]).tolist())) == 2
    assert len(hash_batch(batch.slice(0, 0), ["a"])) == 0


@pytest.mark.more
def test_a_delta_table_and_its_keys_in_a_store(open_store, tmp_path, url, monkeypatch):
    """The log is read there; files of keys are encrypted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with open_store("radosgw") as store, in_environment(store.server.environment()):
        source = store.folder.child("in").url
        made = job(
            tmp_path / "job",
            source,
            ledger=at(url),
            input={"path": source, "format": "delta"},
            output__path=store.folder.child("out").url,
            growing={"row_key": KEY, "repeated": "skip"},
        )

        def lake():
            return DeltaTable(source, storage_options=find_options(source))

        for day in range(3):
            rows = rows_of(0) if not day else pa.concat_tables([rows_of(day), again(day - 1)])
            write_deltalake(source, rows, mode="append", storage_options=find_options(source))
            if day:
                lake().optimize.compact()
            run_here(made)
        out = store.folder.child("out")
        assert [each.n_rows for each in manifests(out)] == [N, N, N]
        assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)
        hidden_ = out.sibling(".", ".dpdask-series")
        names = [name for name in hidden_.names() if name.startswith("keys-")]
        assert len(names) == 7  # 50 keys each, but the first fragment as a whole
        salts = [hidden_.read(name) for name in names]
        assert len({data[:16] for data in salts}) == len(names)
        lake().vacuum(0, dry_run=False, enforce_retention_duration=False)
        write_deltalake(source, rows_of(3), mode="append", storage_options=find_options(source))
        newest = lake().optimize.compact() and lake().version()
        lake().vacuum(0, dry_run=False, enforce_retention_duration=False)
        with pytest.raises(InputError, match="cannot be read any more"):
            run_here(made)
        assert call_cli("rebase", made, "--at", str(newest)).returncode == 0
        assert out.sibling(".", ".dpdask").names() == []
        assert run_here(made).status == "nothing new"


@pytest.mark.parametrize("kind", [Delta, Iceberg])
@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_is_delivered_again_is_found_without_a_key(kind, strict, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 100.0, strict=strict)
    lake = kind(tmp_path / "lake")
    made = lake.job(tmp_path / "job", ledger=at(url))
    for day in range(2):
        lake.add(day)
        run_here(made)
    lake.compact()  # the files lie there until the table is vacuumed
    lake.add(2)
    pq.write_table(again(0), tmp_path / "again.parquet", compression="gzip", row_group_size=33)
    lake.add(0, pq.read_table(tmp_path / "again.parquet"), "again.parquet")
    result = call_cli("run", made)
    assert result.returncode == InputError.exit_code
    assert "this file holds the rows of" in error_line(result)
    assert "charge_repeats" in error_line(result)
    # what a refusal tells is exact, so it is recorded, and a strict ledger charges it
    assert kinds(url)[-1] == "refuse"
    assert rows_in(made) == [N, N]
    assert spent(url) == (pytest.approx(2.0) if strict else 1.0)
    assert not hidden(output(made)).exists()
    if not strict:
        paying = lake.job(tmp_path / "job", ledger=at(url), growing={"charge_repeats": True})
        run_here(paying)
        assert (rows_in(made), spent(url)) == ([N, N, 2 * N], 2.0)


def test_a_file_with_other_rows_is_none_that_was_delivered_again(tmp_path):
    lake = Delta(tmp_path / "lake")
    made = lake.job(tmp_path / "job")
    lake.add(0)
    run_here(made)
    other = rows_of(0)
    values = other.column("r").to_numpy().copy()
    values[7] = values[7] % 5 + 1
    lake.add(1, other.set_column(2, "r", pa.array(values)))
    run_here(made)
    assert rows_in(made) == [N, N]


@pytest.mark.parametrize("changed", [True, {"row_key": ["day"], "repeated": "skip"}])
@pytest.mark.parametrize("point", ["intended", "fitted", "some-shards"])
def test_a_run_that_began_goes_on_by_the_rules_that_it_began_with(point, changed, tmp_path, url):
    """Else rows that it skipped might get the noise of those that it released."""
    source = tmp_path / "lake"
    made = job(
        tmp_path / "job", source, ledger=at(url), growing={"row_key": KEY, "repeated": "skip"}
    )
    add_day(source, 0)
    run_here(made)
    pq.write_table(again(0, 7), source / "b.parquet")
    with dying(point):
        run_here(made)
    text = made.read_text()
    rules = yaml.safe_load(text)
    made.write_text(yaml.safe_dump(rules | {"growing": changed}))
    with pytest.raises(InputError, match="the input changed since the run began"):
        run_here(made)
    made.write_text(text)
    run_here(made)
    assert (rows_in(made), spent(url)) == ([N, 7], 1.0)


def test_the_order_in_which_a_key_names_its_columns_is_nothing(tmp_path, url):
    source = tmp_path / "lake"
    for day, names in enumerate((KEY, KEY[::-1])):
        rules = {"row_key": names, "repeated": "skip"}
        made = job(tmp_path / "job", source, ledger=at(url), growing=rules)
        add_day(source, 0, name=f"{day}.parquet", n_rows=N + 7 * day)
        run_here(made)
    assert (rows_in(made), spent(url)) == ([N, 7], 1.0)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("growing", "format_", "point"),
    [
        ({"row_key": KEY}, "parquet", "manifest-written"),
        ({"row_key": KEY}, "delta", "uncommitted"),
        (False, "parquet", "uncommitted"),
        (False, "delta", "manifest-written"),
    ],
)
@pytest.mark.parametrize("by", ["job", "output"])
def test_the_ledger_is_told_of_a_release_whose_rest_is_removed_by_force(
    by, growing, format_, point, tmp_path, url
):
    """Else the cards of later releases would leave it out of what was spent."""
    source = tmp_path / "lake"
    given = {"ledger": at(url), "growing": growing, "output__format": format_}
    made = job(tmp_path / "job", source, **given)
    add_day(source, 0)
    if growing:
        run_here(made)
        add_day(source, 1)
    with dying(point):
        run_here(made)
    released_ = digests(output(made))
    done = call_cli("abort", *(("--job", made) if by == "job" else (output(made),)), "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the release is published and stays; the rest of its run is removed" in done.stdout
    assert digests(output(made)) == released_
    assert not hidden(output(made)).exists()
    # without its job, no ledger is known; the next run tells it
    assert ("run the job again" in done.stdout) == (kinds(url)[-1] == "intend") == (by == "output")
    assert run_here(made).status == ("nothing new" if growing else "already released")
    assert kinds(url) == ["intend", "commit"] * (2 if growing else 1)
    assert spent(url) == 1.0


def test_how_large_a_file_of_keys_is_tells_nothing_of_rows_that_a_bound_leaves_out(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for module in (growing, repeats):
        monkeypatch.setattr(module, "KEYS_PER_FILE", 600)
    sizes = {"row": set(), "user": set()}
    for (unit, found), n_rows in itertools.product(sizes.items(), (100, 590)):
        place = tmp_path / f"{unit}-{n_rows}"
        place.mkdir()
        add_day(place / "in", 0, n_rows=n_rows)
        made = job(
            place,
            place / "in",
            output__path=f"memory://{place.name}/out",
            privacy__unit="row" if unit == "row" else BY_USER,
            growing={"row_key": KEY},
        )
        run_here(made)
        series = Folder(f"memory://{place.name}/out").sibling(".", ".dpdask-series")
        [name] = [each for each in series.names() if each.startswith("keys-")]
        found.add(len(series.read(name)))
    assert [len(found) for found in sizes.values()] == [2, 1]
