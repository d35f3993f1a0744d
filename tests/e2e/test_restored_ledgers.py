"""A ledger that is restored from a backup, and has lost releases: each run is refused until they are imported from their cards."""

import json
import shutil
import signal

import pytest
import sqlalchemy as sa
from e2e.growing import HOLDOUT, add_day, at, grow, job, spent
from e2e.helpers import (
    RATINGS_SCHEMA,
    call_cli,
    digests,
    error_line,
    hidden,
    lake,
    load,
    read_card,
    run_here,
    write_job,
)
from sqlalchemy.engine import make_url

from dpdask.engine.account import Account, open_ledger
from dpdask.errors import BudgetError, InputError, TemporaryError
from dpdask.jobs.claims import find_cards, list_claims
from dpdask.jobs.plan import plan_job

pytest_plugins = ("privacy.ledger_worker",)

BY_USER = {"column": "userId", "max_rows": 2}
COUNTED = {
    name: {**column, "role": "privatise" if name == "rating" else "drop"}
    for name, column in RATINGS_SCHEMA.items()
}
TABLES = {"kind": "marginals", "cliques": [["rating"]]}
LACKS = "this ledger lacks {} that the cards of the output name"


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def url(file):
    made = f"sqlite:///{file}"
    open_ledger(made).init("ratings", 8.0, 1e-5)
    open_ledger(made).init("people", 1.0)
    return made


@pytest.fixture
def backup(file, url):
    """Bring the ledger back to what it was, as often as it is called."""
    content = file.read_bytes()
    return lambda: file.write_bytes(content)


def written(tmp_path, url, name="job", **changed):
    source = tmp_path / "in"
    if not source.exists():
        lake(source, [150, 90], schema=RATINGS_SCHEMA)
    given = {"schema": RATINGS_SCHEMA, "ledger": {"url": url, "dataset": "ratings"}, **changed}
    return write_job(tmp_path / name, source, tmp_path / "lake" / name, **given)


def total(url):
    return open_ledger(url).read_balance("ratings").epsilon_spent


KINDS = {
    "rows": {},
    "people": {"privacy__unit": BY_USER},
    "noise": {"mechanism": TABLES, "schema": COUNTED, "privacy__delta": 1e-6},
    "presence": {
        "mechanism": TABLES,
        "schema": COUNTED,
        "privacy__adjacency": "add-remove",
        "privacy__delta": 1e-6,
    },
}


@pytest.mark.matrix("ledger restored", "{kind}")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_refused_until_its_release_is_imported(kind, tmp_path, url, backup):
    made = written(tmp_path, url, **KINDS[kind])
    run_here(made)
    paid, before = total(url), digests(tmp_path / "lake")
    entries = open_ledger(url).show("ratings").entries
    [charged] = [entry for entry in entries if entry.kind == "intend"]
    coverage = open_ledger(url).read_balance("ratings").coverage
    backup()
    assert total(url) == 0.0
    for _ in range(2):
        with pytest.raises(InputError, match=LACKS.format("1 release")) as refused:
            run_here(made)
    assert refused.value.exit_code == 66
    assert "`dpdask ledger import --job JOB` records them" in str(refused.value)
    assert "lacks 1 release" in str(plan_job(load(made)).refusal)
    assert open_ledger(url).show("ratings").entries == ()
    done = call_cli("ledger", "import", "--job", made)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"recorded {charged.run_id}, ε 4.0" in done.stdout
    assert "1 release recorded, 0 known already" in done.stdout
    assert paid <= total(url) <= paid * (1 + 1e-12)
    # the events, whom they cover and whom not: as they were charged, but for the hold-out's name
    [entry] = open_ledger(url).show("ratings").entries
    assert entry.charge.delta == charged.charge.delta
    assert entry.charge.event["events"] == charged.charge.event["events"]
    assert entry.charge.event["unit"] == charged.charge.event["unit"]
    assert open_ledger(url).read_balance("ratings").coverage == coverage
    again = call_cli("ledger", "import", "--job", made)
    assert "0 releases recorded, 1 known already" in again.stdout
    assert run_here(made).status == "already released"
    assert plan_job(load(made)).is_finished
    assert digests(tmp_path / "lake") == before
    # alone it would fit
    with pytest.raises(BudgetError):
        run_here(written(tmp_path, url, "second", **{**KINDS[kind], "privacy__epsilon": 8.0}))
    assert run_here(written(tmp_path, url, "third", **KINDS[kind])).status == "released"


def test_a_newer_backup_that_knows_the_release_is_no_rollback(tmp_path, url, file):
    first, second = (written(tmp_path, url, name) for name in ("one", "two"))
    run_here(first)
    content = file.read_bytes()
    run_here(second)
    file.write_bytes(content)
    assert run_here(first).status == "already released"
    with pytest.raises(InputError, match=LACKS.format("1 release")):
        run_here(second)


def test_a_release_whose_driver_died_before_it_told_the_ledger(tmp_path, url, backup, monkeypatch):
    made, out = written(tmp_path, url), tmp_path / "lake" / "job"

    def fail(*_):
        raise TemporaryError("the ledger is busy")

    with monkeypatch.context() as patch:
        patch.setattr(Account, "commit", fail)
        with pytest.raises(TemporaryError):
            run_here(made)
    backup()
    assert hidden(out).exists()
    with pytest.raises(InputError, match=LACKS.format("1 release")):
        run_here(made)
    assert call_cli("ledger", "import", "--job", made).returncode == 0
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "ratings").stdout
    line = shown.splitlines()[-1].split()
    assert (line[2:4], line[-1]) == (["test", "dip"], "imported")
    assert run_here(made).status == "already released"
    assert not hidden(out).exists()
    assert [entry.kind for entry in open_ledger(url).show("ratings").entries] == ["import"]


@pytest.mark.matrix("ledger restored", "growing, {format_}")
@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_a_series_goes_on_after_a_restore(format_, tmp_path, url, file):
    """The dataset allows the series and nothing more, so that it cannot go on if a release was counted twice."""
    source = tmp_path / "in"
    made = job(
        tmp_path / "job", source, HOLDOUT, ledger=at(url), output__format=format_, name="grown"
    )
    empty = file.read_bytes()
    grow(made, source, range(2))
    two = file.read_bytes()
    grow(made, source, range(2, 4))
    for lost, recorded in ((two, 2), (empty, 4)):
        file.write_bytes(lost)
        with pytest.raises(InputError, match=LACKS.format(f"{recorded} releases")):
            run_here(made)
        assert "lacks" in str(plan_job(load(made)).refusal)
        done = call_cli("ledger", "import", "--job", made)
        assert f"{recorded} releases recorded, {4 - recorded} known already" in done.stdout
        assert done.stderr == ""
        assert spent(url) == 1.0
        assert run_here(made).status == "nothing new"
    [outcome] = grow(made, source, [4])
    assert outcome.status == "released"
    assert spent(url) == 1.0
    # one that was imported only in part is found
    file.write_bytes(empty)
    newest = max((tmp_path / "job" / "out" / "_dpdask").glob("release*.json"))
    assert call_cli("ledger", "import", "--url", url, newest).returncode == 0
    with pytest.raises(InputError, match="lacks"):
        run_here(made)


@pytest.mark.matrix("import killed", "{point}")
@pytest.mark.parametrize("point", ["importing", "import-unwritten", "imported"])
def test_an_import_that_is_killed_is_repeated(point, drivers, tmp_path, url, file):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, HOLDOUT, ledger=at(url))
    empty = file.read_bytes()
    grow(made, source, range(3))
    file.write_bytes(empty)
    assert drivers.run("ledger", "import", "--job", made, point=point)[0] == -signal.SIGKILL
    n_recorded = 2 if point == "imported" else 1
    entries = open_ledger(url).show("people").entries
    assert [entry.kind for entry in entries] == ["import"] * n_recorded
    assert open_ledger(url).verify("people") == n_recorded
    with pytest.raises(InputError, match="lacks"):
        run_here(made)
    done = call_cli("ledger", "import", "--job", made)
    assert f"recorded, {n_recorded} known already" in done.stdout
    assert (done.returncode, spent(url)) == (0, 1.0)
    assert [entry.kind for entry in open_ledger(url).show("people").entries] == ["import"] * 3
    assert run_here(made).status == "nothing new"


def test_a_driver_that_was_charged_meanwhile_is_no_rollback(tmp_path, url, monkeypatch):
    """Its card is in the table, and the ledger was read just before it was charged."""
    options = {"output__format": "delta", "output__mode": "append", "privacy__epsilon": 1.0}
    options |= {"output__path": str(tmp_path / "lake" / "both")}
    one, two = (
        written(tmp_path, url, name, **{**options, "privacy__epsilon": epsilon})
        for name, epsilon in (("one", 1.0), ("two", 2.0))
    )
    before, read = open_ledger(url).show("ratings"), Account.read
    run_here(one)
    stale = [before]
    monkeypatch.setattr(Account, "read", lambda self: stale.pop() if stale else read(self))
    assert run_here(two).status == "released"
    assert not stale


def test_a_table_that_is_appended_to(tmp_path, url, backup):
    options = {"output__format": "delta", "output__mode": "append", "privacy__epsilon": 2.0}
    made = written(tmp_path, url, **options)
    run_here(made)
    extra = lake(tmp_path / "more", [30], schema=RATINGS_SCHEMA)
    shutil.copy(next(extra.glob("*.parquet")), tmp_path / "in" / "more.parquet")
    run_here(made)
    backup()
    options |= {"output__path": str(tmp_path / "lake" / "job"), "privacy__epsilon": 1.0}
    other = written(tmp_path, url, "other", **options)
    for each in (made, other):
        with pytest.raises(InputError, match=LACKS.format("2 releases")):
            run_here(each)
    assert call_cli("ledger", "import", "--job", other).returncode == 0
    assert total(url) == 4.0
    assert run_here(other).status == "released"


def test_releases_whose_cards_are_gone_are_recorded_by_what_another_card_says(
    tmp_path, url, backup
):
    first, second = (
        written(tmp_path, url, name, privacy__epsilon=epsilon)
        for name, epsilon in (("one", 3.0), ("two", 2.0))
    )
    run_here(first)
    run_here(second)
    shutil.rmtree(tmp_path / "lake" / "one")
    backup()
    with pytest.raises(InputError, match=LACKS.format("2 releases")) as refused:
        run_here(second)
    assert "or `--earlier`" in str(refused.value)
    card = tmp_path / "lake" / "two"
    done = call_cli("ledger", "import", "--url", url, card)
    assert json.loads(done.stderr)["warning"].startswith("the cards name 1 earlier release that")
    assert total(url) == 2.0
    with pytest.raises(InputError, match=LACKS.format("1 release")):
        run_here(second)
    done = call_cli("ledger", "import", "--url", url, "--earlier", card)
    assert (done.stderr, total(url)) == ("", 5.0)
    assert run_here(second).status == "already released"


def test_the_cards_of_another_dataset_and_broken_ones_prove_nothing(tmp_path, url, backup):
    made = written(tmp_path, url)
    open_ledger(url).init("elsewhere", 4.0)
    run_here(made, ledger__dataset="elsewhere")
    assert run_here(made).status == "already released"
    backup()
    assert run_here(made).status == "already released"
    card = tmp_path / "lake" / "job" / "_dpdask" / "release.json"
    card.write_text("{")
    assert run_here(made).status == "already released"
    card.unlink()
    assert run_here(made).status == "already released"


def changed_card(tmp_path, url, **changes):
    run_here(written(tmp_path, url))
    path = tmp_path / "lake" / "job" / "_dpdask" / "release.json"
    content = json.loads(path.read_text())
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        inner = content
        for parent in parents:
            inner = inner[parent]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "code", "line"),
    [
        ({"ledger": None}, 64, "no job with a ledger has written this card"),
        ({"release": None}, 64, "no job with a ledger has written this card"),
        ({"ledger__dataset": "unheard"}, 64, "the ledger does not know the dataset 'unheard'"),
        ({"accounting__events": {"format": 9}}, 64, "the event's format is not 1"),
        ({"ledger__series": {"id": "s"}}, 64, "an event's series must have an id"),
        ({"guarantee__epsilon": -1.0}, 64, "a number is out of its range"),
        ({"format": 1}, 66, "this card has format 1, not 2"),
    ],
)
def test_cards_that_say_nothing_are_refused(changes, code, line, tmp_path, url):
    path = changed_card(tmp_path, url, **changes)
    done = call_cli("ledger", "import", "--url", url, path)
    assert done.returncode == code
    assert line in error_line(done)
    assert len(open_ledger(url).show("ratings").entries) == 4


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ([], 2, "either cards and a ledger or a job is needed"),
        (["card.json"], 2, "either cards and a ledger or a job is needed"),
        (["--url", "sqlite:///x.db"], 2, "either cards and a ledger or a job is needed"),
        (["--job", "j.yaml", "card.json"], 2, "either cards and a ledger or a job is needed"),
        (["--url", "sqlite:///x.db", "/nowhere"], 66, "there is no release card here"),
    ],
)
def test_an_import_says_what_it_needs(words, code, line):
    done = call_cli("ledger", "import", *words)
    assert done.returncode == code
    assert line in error_line(done)


def test_a_job_without_a_release_or_a_ledger_imports_nothing(tmp_path, url):
    made = written(tmp_path, url)
    done = call_cli("ledger", "import", "--job", made)
    assert (done.returncode, "holds no release of the dataset 'ratings'" in done.stderr) == (
        66,
        True,
    )
    made = written(tmp_path, url, ledger=None)
    done = call_cli("ledger", "import", "--job", made)
    assert (done.returncode, "this job has no ledger" in done.stderr) == (64, True)


def test_whoever_plants_a_card_can_only_add(tmp_path, url, backup):
    """A card that understates a release is one more charge, and does not stand for the true one."""
    made = written(tmp_path, url)
    run_here(made)
    path = tmp_path / "lake" / "job" / "_dpdask" / "release.json"
    true = path.read_text()
    content = json.loads(true)
    content["guarantee"]["epsilon"] = 0.5
    content["accounting"]["events"]["events"][0]["epsilon"] = 0.5
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps(content))
    backup()
    assert call_cli("ledger", "import", "--url", url, planted).returncode == 0
    assert total(url) == 0.5
    with pytest.raises(InputError, match="lacks 1 release"):
        run_here(made)
    assert call_cli("ledger", "import", "--job", made).returncode == 0
    assert total(url) == 4.5
    assert run_here(made).status == "already released"


def test_limits_and_copies_by_the_command_line(tmp_path, url):
    run_here(written(tmp_path, url))
    where = ("--url", url, "--dataset", "ratings")
    done = call_cli("ledger", "limit", *where, "--epsilon", "9", "--reason", "agreed")
    assert done.stdout == "ratings: the limit is now ε 9.0, δ 1e-05\n"
    done = call_cli("ledger", "limit", *where, "--epsilon", "9", "--reason", "agreed")
    assert done.stdout == "ratings: this is the limit already: ε 9.0, δ 1e-05\n"
    shown = call_cli("ledger", "show", *where).stdout
    assert shown.endswith("limit ε 9.0, δ 1e-05: agreed\n")
    chain = call_cli("ledger", "show", *where, "--entries").stdout
    assert "limit  ε 9.0 δ 1e-05 limit: agreed" in chain
    copied = f"sqlite:///{tmp_path / 'copy.db'}"
    done = call_cli("ledger", "copy", url, copied)
    assert done.stdout.splitlines()[0] == "people: 0 entries copied, and the chain is intact"
    assert call_cli("ledger", "show", "--url", copied, *where[2:]).stdout == shown
    done = call_cli("ledger", "copy", url, copied)
    assert (done.returncode, "there is a ledger here already" in done.stderr) == (64, True)
    done = call_cli("ledger", "init", *where, "--epsilon", "8", "--delta", "1e-5")
    assert done.stdout == "ratings: has this budget already: ε 9.0, δ 1e-05\n"


def test_a_card_holds_no_digest_of_what_was_fitted(tmp_path, url):
    """The digest of an entry that names the fitted release would be a test of guesses of held-out rows."""
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, HOLDOUT, ledger=at(url))
    grow(made, source, range(2))
    entries = open_ledger(url).show("people").entries
    secret = {entry.digest for entry in entries if entry.kind in ("draw", "commit", "hold-out")}
    secret |= {entry.release for entry in entries if entry.release}
    assert len(secret) == 7
    for path in (tmp_path / "job" / "out").rglob("*.json"):
        text = path.read_text()
        assert not any(each in text for each in secret)
    cards = find_cards(str(tmp_path / "job" / "out"))
    card = min(cards, key=lambda card: list_claims(card).place)
    assert list_claims(card).own.entry == entries[1].digest
    assert set(card.ledger.series) == {"id", "previous", "head"}


@pytest.mark.matrix("ledger restored", "in a store, growing: {growing}")
@pytest.mark.parametrize("growing", [False, True], ids=["once", "growing"])
def test_releases_in_a_store(growing, open_store, tmp_path, url, backup):
    with open_store("radosgw") as store:
        options = {"output__path": store.folder.url, "growing": growing}
        made = written(tmp_path, url, **options)
        run_here(made)
        if growing:  # the ledger keeps the key of the series, which the backup has, too
            content = (tmp_path / "ledger.db").read_bytes()
            extra = lake(tmp_path / "more", [30], schema=RATINGS_SCHEMA)
            shutil.copy(next(extra.glob("*.parquet")), tmp_path / "in" / "more.parquet")
            run_here(made)
            (tmp_path / "ledger.db").write_bytes(content)
        else:
            backup()
        with pytest.raises(InputError, match=LACKS.format("1 release")):
            run_here(made)
        assert call_cli("ledger", "import", "--job", made).returncode == 0
        assert run_here(made).status == ("nothing new" if growing else "already released")
        assert total(url) == 4.0


def test_a_series_in_a_store_goes_on_with_a_moved_ledger(open_store, tmp_path, url, postgres):
    """To PostgreSQL: the keys of the series and of the names come along, so nothing is released or charged again."""
    moved = make_url(postgres).update_query_dict({"options": "-csearch_path=moved"})
    target = moved.render_as_string(hide_password=False)
    engine = sa.create_engine(moved.set(drivername="postgresql+psycopg"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA moved")
    with open_store("radosgw") as store:
        source = tmp_path / "in"
        grown = {"output__path": f"{store.folder.url}-grown", "ledger": at(url)}
        added = {"output__path": f"{store.folder.url}-added", "output__format": "delta"}
        made = job(tmp_path / "job", source, HOLDOUT, **grown)
        grow(made, source, range(2))
        plain = {"growing": False, "output__mode": "append", "privacy__epsilon": 0.5}
        open_ledger(url).init("other", 1.0)
        other = {"ledger": {"url": url, "dataset": "other"}}
        joined = job(tmp_path / "second", source, **added, **plain, **other)
        assert run_here(joined).status == "released"
        done = call_cli("ledger", "copy", url, target)
        assert (done.returncode, done.stderr) == (0, "")
        (tmp_path / "ledger.db").rename(tmp_path / "old.db")
        add = {"ledger__url": target}
        assert run_here(joined, **add).status == "already released"
        add_day(source, 2)
        assert run_here(made, **add).status == "released"
        assert run_here(made, **add).status == "nothing new"
        assert spent(target) == 1.0
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA moved CASCADE")


def lower(given, factor):
    """Multiply each ε in a mapping."""
    for name, value in given.items():
        if name == "epsilon":
            given[name] = value * factor
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                lower(each, factor)


def test_a_card_whose_events_cost_less_is_charged_what_it_promises(tmp_path, url, backup):
    made = written(tmp_path, url)
    run_here(made)
    backup()
    card = read_card(tmp_path / "lake", "job")
    lower(card["accounting"]["events"], 1e-6)
    (tmp_path / "card.json").write_text(json.dumps(card))
    call_cli("ledger", "import", "--url", url, tmp_path / "card.json")
    assert 4.0 <= total(url) <= 4.0 * (1 + 1e-6)


def test_a_card_that_tells_of_less_than_another_one_is_no_proof(tmp_path, url, backup):
    for name in ("one", "two"):
        run_here(written(tmp_path, url, name, privacy__epsilon=2.0))
    backup()
    [true] = (tmp_path / "lake" / "one" / "_dpdask").glob("release.json")
    card = json.loads(true.read_text())
    lower(card["guarantee"], 1e-6)
    lower(card["accounting"]["events"], 1e-6)
    (tmp_path / "card.json").write_text(json.dumps(card))
    two = tmp_path / "lake" / "two"
    done = call_cli("ledger", "import", "--url", url, tmp_path / "card.json", two)
    warned = json.loads(done.stderr)["warning"]
    assert warned.startswith(
        "the cards name 1 earlier release that the ledger lacks, or holds at a"
    )
    assert total(url) < 3.0
    with pytest.raises(InputError, match=LACKS.format("1 release")):
        run_here(written(tmp_path, url, "one", privacy__epsilon=2.0))
    done = call_cli("ledger", "import", "--url", url, "--earlier", two)
    assert (done.returncode, done.stderr) == (0, "")
    assert 4.0 <= total(url) <= 4.0 + 1e-5
