"""A table that grows by a file a day: days that are killed and resumed, or repeated, end with the bytes and the charges of quiet ones."""

import base64
import signal

import pytest
from e2e.growing import HOLDOUT, N, add_day, at, job, kept, kinds, list_digests, manifests, spent
from e2e.helpers import run_here
from faults.test_runs_in_stores import environment
from services.stores import everything_ever_written

from dpdask.errors import InputError, SpecError, TemporaryError
from dpdask.jobs.run import abort

SUMMARY = "_dpdask/series.json"  # with a ledger too, its cards are the same: no row of the days after the first is held out


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.matrix("second driver", "growing")
def test_drivers_race_for_a_day(drivers, tmp_path, url):
    source, out = tmp_path / "in", tmp_path / "job" / "out"
    made = job(tmp_path / "job", source, ledger=at(url))
    add_day(source, 0)
    run_here(made)
    add_day(source, 1)
    codes = drivers.race(4, "run", made)
    assert set(codes) <= {0, TemporaryError.exit_code}
    assert 0 in codes
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N]
    assert kinds(url) == ["intend", "commit"] * 2
    assert spent(url) == 1.0


@pytest.mark.matrix("driver killed", "growing, {output} in a store")
@pytest.mark.more
@pytest.mark.parametrize("output", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ledger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_days_in_a_store(
    ledger, output, open_store, drivers, tmp_path, url, seeded_ledgers, monkeypatch
):
    """On a versioned bucket; the fitted release of the hold-out and the keys are never in it as they are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    source = tmp_path / "in"
    changed = {"output__rows_per_shard": 25, "output__format": output}
    quiet = job(tmp_path / "quiet", source, HOLDOUT, **changed)
    with open_store("radosgw", versioned=True) as store:
        out, charged = store.folder, {"ledger": at(url), "insecure_seed": 7} if ledger else {}
        struck = job(
            tmp_path / "struck", source, HOLDOUT, output__path=out.url, **changed, **charged
        )
        around = environment(store, tmp_path)
        killed = {1: "task-staged", 2: "later-manifest" if output == "parquet" else "entry-written"}
        n_days = len(killed) + 1
        for day in range(n_days):
            add_day(source, day)
            run_here(quiet)
            if day in killed:
                assert (
                    drivers.run("run", struck, point=killed[day], environment=around)[0]
                    == -signal.SIGKILL
                )
            run_here(struck)
        assert run_here(struck).status == "nothing new"
        found = manifests(out)
        if not ledger:  # which has a hold-out of its own
            assert [digests[1:] for digests in list_digests(found)] == [
                digests[1:] for digests in list_digests(manifests(tmp_path / "quiet" / "out"))
            ]
        beside = {"_dpdask", "_SUCCESS" if output == "parquet" else "_delta_log"}
        assert {shard.name for each in found for shard in each.shards} | beside == set(out.names())
        assert out.sibling(".", ".dpdask").names() == []
        assert len(out.sibling(".", ".dpdask-series").names()) == 3
        written = b"\n".join(data for _, data in everything_ever_written(store))
        assert (kept(tmp_path / "quiet" / "out") / "release.npz").read_bytes()[
            :10
        ] not in written  # what a file of arrays begins with
        for path in (tmp_path / "state" / "dpdask" / "keys").glob("?" * 32):
            secret = path.read_bytes()
            assert not any(
                form in written
                for form in (secret, secret.hex().encode(), base64.b64encode(secret))
            )
        if ledger:
            assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * n_days)
            return
        add_day(source, n_days)
        assert drivers.run("run", struck, point="task-staged", environment=around)[0] == (
            -signal.SIGKILL
        )
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
        before = out.names()
        with pytest.raises(InputError, match="`dpdask abort --force` ends the run without it"):
            run_here(struck)
        with pytest.raises(SpecError, match="`dpdask abort --force` ends the run without it"):
            abort(out.url)
        assert abort(out.url, force=True) == "run"
        assert list_digests(manifests(out)) == list_digests(found)
        assert set(out.names()) < set(before)
        lost = "the key of this series is on another machine.*if that place is lost, start a new output"
        with pytest.raises(InputError, match=lost):
            run_here(struck)
        assert abort(out.url) is None


@pytest.mark.slow
def test_a_day_in_a_store_is_aborted(open_store, drivers, tmp_path, url):
    source = tmp_path / "in"
    with open_store("radosgw") as store:
        out, around = store.folder, environment(store, tmp_path)
        made = job(
            tmp_path / "job",
            source,
            output__path=out.url,
            output__rows_per_shard=25,
            ledger=at(url),
        )
        for day in range(3):
            add_day(source, day)
            if day:
                before = [out.names(), out.child("_dpdask").names()]
                assert (
                    drivers.run(
                        "run",
                        made,
                        point="task-staged" if day == 1 else "later-carded",
                        environment=around,
                    )[0]
                    == -signal.SIGKILL
                )
                with pytest.raises(SpecError, match="in a ledger that is not given here"):
                    abort(out.url)
                assert abort(out.url, url)
                assert [out.names(), out.child("_dpdask").names()] == before
            run_here(made)
        assert spent(url) == 3.0  # the noise of both aborted days may have been seen
        assert [manifest.n_rows for manifest in manifests(out)] == [N, N, N]


@pytest.mark.matrix("stale listing", "growing, {output} in a store")
@pytest.mark.more
@pytest.mark.parametrize("output", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
def test_days_that_a_listing_hides(output, open_store, tmp_path, url):
    source = tmp_path / "in"
    with open_store("radosgw") as store:
        made = job(
            tmp_path / "job",
            source,
            output__path=store.folder.url,
            output__format=output,
            ledger=at(url),
        )
        for day in range(3):
            add_day(source, day)
            if day == 2:
                store.proxy.list_as_before(times=10**6)
            assert run_here(made).status == "released"
        assert run_here(made).status == "nothing new"
        store.proxy.forget()
        assert [manifest.n_rows for manifest in manifests(store.folder)] == [N, N, N]
        assert (spent(url), kinds(url)) == (1.0, ["intend", "commit"] * 3)
