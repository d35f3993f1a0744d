"""Daily releases of tables that somebody maintains: each kind of commit alone, and all of them in 30 days with a compaction and a vacuum every night."""

import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.growing import BY_USER, N, at, kinds, list_digests, manifests, released, rows_of, spent
from e2e.helpers import run_here
from e2e.test_growing_logs import Delta, Iceberg, output, rows_in, told

KEY = ["day", "user"]
KILLS = ("later-kept", "task-staged")
UNITS = {"row": "row", "person": BY_USER}


pytestmark = pytest.mark.usefixtures("here")


def correct(lake, day, folder):
    """Write some rows of a day with other values."""
    rows = rows_of(day).slice(20, 5)
    lake.merge(rows.set_column(2, "r", pa.array([1] * 5, pa.int64())))


def deliver_again(lake, day, folder):
    """Add the rows of a day in another order and codec."""
    order = np.random.default_rng(day).permutation(N)
    pq.write_table(rows_of(day).take(pa.array(order)), folder / "again", compression="gzip")
    lake.add(day, pq.read_table(folder / "again"), f"again-{day}.parquet")


EVENTS = {
    "compaction": lambda lake, day, folder: lake.compact(),
    "vacuum": lambda lake, day, folder: lake.vacuum(),
    "delete": lambda lake, day, folder: lake.delete(day),
    "merge": correct,
    "reload": lambda lake, day, folder: lake.reload(day, rows_of(day)),
    "re-delivery": deliver_again,
    "new column": lambda lake, day, folder: lake.add_column(f"note{day}"),
}
MONTH = {"delete": 10, "merge": 15, "reload": 17, "re-delivery": 20, "new column": 25}
CHANGING = {Delta: ("merge", "reload"), Iceberg: ("delete", "merge", "reload")}  # which overwrites


class Pair:
    """The same days in a table that nobody touches, and in one that is maintained, each with its job."""

    def __init__(self, kind, unit, policy, folder, url):
        self.kind, self.policy, self.unit, self.folder, self.url = kind, policy, unit, folder, url
        self.lakes = kind(folder / "quiet-lake"), kind(folder / "lake")
        rules = {"row_key": KEY, "repeated": "skip", "changed": policy}
        given = {"growing": rules, "privacy__unit": UNITS[unit]}
        self.quiet = self.lakes[0].job(folder / "quiet", **given)
        self.made = self.lakes[1].job(folder / "job", ledger=at(url), insecure_seed=7, **given)
        for each in (self.quiet, self.made):
            schema = each.parent / "schema.yaml"
            schema.write_text(f"{schema.read_text()}undeclared: drop\n")
        self.n_days, self.n_again = 0, 0

    def add_day(self):
        for lake in self.lakes:
            lake.add(self.n_days)
        run_here(self.quiet)
        self.n_days += 1

    def strike(self, event, day):
        EVENTS[event](self.lakes[1], day, self.folder)
        self.n_again += event in CHANGING[self.kind]

    def check(self):
        """Check that each row was released once, or as often as is charged, and that the bytes are those of the quiet table."""
        assert run_here(self.made).status == "nothing new"
        n_releases = self.n_days + self.n_again * (self.policy == "release")
        abouts = [told(self.made, number) for number in range(n_releases)]
        again = [number for number, about in enumerate(abouts) if about["again"]]
        assert len(again) == n_releases - self.n_days
        found, known = (
            [each[1:] for each in list_digests(manifests(output(job)))]
            for job in (self.made, self.quiet)
        )  # of the shards: cards name the versions of their tables
        n_alike = again[0] if again else self.n_days  # noise depends on the number of a release
        assert found[:n_alike] == known[:n_alike]
        rows = rows_in(self.made)
        assert [rows[number] for number in range(n_releases) if number not in again] == (
            [N] * self.n_days
        )
        if not again:
            table = released(output(self.made)).to_pandas()
            assert len(table) == N * self.n_days == len(table[KEY].drop_duplicates())
        charged = n_releases if self.unit == "person" else 1 + len(again)
        assert (spent(self.url), abouts[-1]["epsilon"]) == (charged, charged)
        assert kinds(self.url) == ["intend", "commit"] * n_releases
        n_ignored = sum(about.get("ignored_commits", 0) for about in abouts)
        assert n_ignored == self.n_again * (self.policy == "ignore")


@pytest.fixture
def pair(kind, unit, policy, tmp_path, url, seeded_ledgers):
    return Pair(kind, unit, policy, tmp_path, url)


def kill(drivers, job, point):
    assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL


def go_on(drivers, job):
    code, *said = drivers.run("run", job)
    assert code == 0, said


@pytest.mark.matrix("{event}", "{kind}, {unit}, {policy}")
@pytest.mark.few(10)
@pytest.mark.parametrize("kind", [Delta, Iceberg])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("event", "policy"),
    [
        (event, policy)
        for event in EVENTS
        for policy in ("ignore", "release")
        if policy == "ignore" or event in ("merge", "reload")
    ],
)
def test_what_is_done_to_a_table_changes_no_byte_and_no_charge(event, pair, drivers):
    """With new rows and without them, also where a driver is killed after it."""
    pair.add_day()
    go_on(drivers, pair.made)
    pair.lakes[1].compact()
    pair.add_day()
    pair.strike(event, 0)
    kill(drivers, pair.made, "later-kept")
    go_on(drivers, pair.made)
    pair.strike(event, 1)  # and nothing is new
    run_here(pair.made)
    for _ in range(2):
        pair.lakes[1].compact()
        pair.lakes[1].vacuum()
        assert run_here(pair.made).status == "nothing new"
    pair.add_day()
    kill(drivers, pair.made, "task-staged")
    go_on(drivers, pair.made)
    pair.check()


@pytest.mark.timeout(3000)  # a job a day, on machines that are shared
@pytest.mark.matrix("30 days of it all", "{kind}, {unit}, {policy}")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Delta, Iceberg])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("policy", ["ignore", "release"])
def test_a_table_that_is_maintained_for_a_month(pair, drivers):
    kills = {9: "later-kept", 22: "task-staged"}
    for day in range(30):
        pair.add_day()
        if day in (MONTH["delete"], MONTH["new column"], MONTH["re-delivery"]):
            [event] = [event for event, at_day in MONTH.items() if at_day == day]
            pair.strike(event, 2)
        if day:  # the first release is of the files that are there
            pair.lakes[1].compact()  # before the rows of the day are released
        if day in kills:
            kill(drivers, pair.made, kills[day])
        go_on(drivers, pair.made)
        if day in (MONTH["merge"], MONTH["reload"]):
            [event] = [event for event, at_day in MONTH.items() if at_day == day]
            pair.strike(event, 1)
            go_on(drivers, pair.made)
        pair.lakes[1].compact()
        pair.lakes[1].vacuum()
    pair.check()
