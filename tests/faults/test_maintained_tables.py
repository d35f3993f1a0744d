"""Daily releases of a table that is compacted and vacuumed every night, deleted from, merged into, delivered twice and given a column, with two kills."""

from __future__ import annotations

import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.growing import N, at, kinds, list_digests, manifests, released, rows_of, spent
from e2e.helpers import run_here
from e2e.test_growing_logs import Delta, Iceberg, output, rows_in, told

KEY = ["day", "user"]
EVENTS = {"kill": 3, "delete": 4, "merge": 6, "repeat": 8, "kill again": 9, "column": 10}
KILLS = ("later-kept", "task-staged")


pytestmark = pytest.mark.usefixtures("here")


def deliver_again(day):
    """Return the rows of a day in another order."""
    order = np.random.default_rng(day).permutation(N)
    return rows_of(day).take(pa.array(order))


def correct(day):
    """Return some rows of a day with other values."""
    return rows_of(day).slice(20, 5).set_column(2, "r", pa.array([1] * 5, pa.int64()))


@pytest.mark.few
@pytest.mark.parametrize("kind", [Delta, Iceberg])
@pytest.mark.parametrize("policy", ["ignore", "release"])
@pytest.mark.parametrize("n_days", [12, pytest.param(30, marks=pytest.mark.slow)])
def test_a_maintained_table_is_released_as_one_that_nobody_touches(
    kind, policy, n_days, tmp_path, url, seeded_ledgers, drivers
):
    quiet, lake = kind(tmp_path / "quiet-lake"), kind(tmp_path / "lake")
    rules = {"row_key": KEY, "repeated": "skip", "changed": policy}
    still = quiet.job(tmp_path / "quiet", growing=rules)
    made = lake.job(tmp_path / "job", growing=rules, ledger=at(url), insecure_seed=7)
    for each in (still, made):
        schema = (each.parent / "schema.yaml").read_text()
        (each.parent / "schema.yaml").write_text(f"{schema}undeclared: drop\n")
    at_day = {what: n_days * share // 12 for what, share in EVENTS.items()}
    for day in range(n_days):
        for each in (quiet, lake):
            if day == at_day["column"]:
                each.add_column("note")
            each.add(day)
        run_here(still)
        if day == at_day["delete"]:
            lake.delete(1)
        if day == at_day["repeat"]:
            pq.write_table(deliver_again(2), tmp_path / "again.parquet", compression="gzip")
            lake.add(2, pq.read_table(tmp_path / "again.parquet"), "again.parquet")
        if day:  # the first release is of the files that are there
            lake.compact()  # before the rows of the day are released
        killed = [at_day["kill"], at_day["kill again"]]
        if day in killed:
            point = KILLS[killed.index(day)]
            assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
        code, *said = drivers.run("run", made)
        assert code == 0, said
        if day == at_day["merge"]:
            lake.merge(correct(0))
            assert drivers.run("run", made)[0] == 0
        lake.compact()
        lake.vacuum()
    assert run_here(made).status == "nothing new"
    rows, digests = rows_in(made), [each[1:] for each in list_digests(manifests(output(made)))]
    changing = (
        ["merge"] if kind is Delta else ["delete", "merge"]
    )  # Iceberg calls both an overwrite
    if policy == "release":
        again = [number for number in range(len(rows)) if told(made, number)["again"]]
        assert again == [
            at_day[what] + place for place, what in enumerate(changing, 1)
        ]  # each after the rows of its day
        for number in reversed(again):
            del rows[number]
        assert (
            spent(url) == told(made, n_days + len(changing) - 1)["epsilon"] == 1.0 + len(changing)
        )
    else:
        table = released(output(made)).to_pandas()
        assert len(table) == N * n_days == len(table[KEY].drop_duplicates())
        assert digests == [each[1:] for each in list_digests(manifests(output(still)))]
        assert spent(url) == 1.0
        ignored = [told(made, number).get("ignored_commits", 0) for number in range(n_days)]
        assert sum(ignored) == len(changing)
    n_again = len(changing) * (policy == "release")
    assert rows == [N] * n_days
    assert kinds(url) == ["intend", "commit"] * (n_days + n_again)
    deleting = [told(made, number).get("deleting_commits", 0) for number in range(n_days)]
    assert sum(deleting) == (1 if kind is Delta else 0)
