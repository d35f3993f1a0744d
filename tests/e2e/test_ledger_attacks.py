"""Attacks on the ledger that once worked: copies of a run's folder, crashes in narrow gaps, units of two types, cheap refusals."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import (
    call_cli,
    charged_kinds,
    charging_entries,
    continuous,
    discrete,
    hidden,
    load,
    read_card,
    run_here,
    write_job,
)
from pyarrow import parquet as pq

import dpdask
from dpdask.engine.account import Account, open_ledger
from dpdask.errors import BudgetError, DataError, OutputError
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort
from dpdask.jobs.state import RunState

SCHEMA = {
    "who": {"role": "keep"},
    "user": {"role": "drop"},
    "r": discrete([1, 2, 3, 4, 5]),
}
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
HISTOGRAM = {"kind": "histogram"}
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.2] * 5}}}
N = 1000


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def source(tmp_path):
    return written(tmp_path / "in", pa.int64())


def written(folder, user, last=5):
    folder.mkdir()
    who = np.arange(N)
    r = np.where(who == N - 1, last, who % 5 + 1)
    pq.write_table(
        pa.table({"who": who, "user": pa.array(who // 4).cast(user), "r": r}),
        folder / "a.parquet",
        row_group_size=300,
    )
    return folder


def job(folder, source, url, **changed):
    given = {
        "privacy__epsilon": 1.0,
        "ledger": {"url": url, "dataset": "people"},
        "schema": SCHEMA,
        **changed,
    }
    return write_job(folder, source, folder / "out", **given)


def ledger(url):
    return open_ledger(url)


def kinds(url, dataset="people"):
    return charged_kinds(url, dataset)


def copied_when_opened(made, out, to, monkeypatch, dying_at=None):
    """Run a job whose hidden folder is copied when it was opened; maybe it dies between its publication and the ledger's commit."""
    write = RunState.write

    def copying(self, reached):
        write(self, reached)
        if reached.stage == "opened":
            shutil.copytree(hidden(out), to)

    def dying(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunState, "write", copying)
        if dying_at is not None:
            patched.setattr(Account, dying_at, dying)
            with pytest.raises(KeyboardInterrupt):
                run_here(made)
        else:
            run_here(made)


def test_units_of_another_type_are_other_samples_and_both_count(tmp_path, source, url):
    unit = {"column": "user", "max_rows": 4}
    held = []
    for name, type_ in (("whole", pa.int64()), ("real", pa.float64()), ("text", pa.string())):
        where = written(tmp_path / f"in-{name}", type_)
        run_here(job(tmp_path / name, where, url, mechanism__reference=HOLDOUT, privacy__unit=unit))
        held.append(set(range(N)) - set(pq.read_table(tmp_path / name / "out")["who"].to_pylist()))
    told = ledger(url).read_balance("people").coverage.uncovered
    assert told == 0.75
    assert len(set.union(*held)) / N <= told


@pytest.mark.parametrize("then", ["nothing", "the input grew", "a value is bad"])
def test_a_restored_folder_of_a_published_release_draws_no_second_noise_and_gives_no_charge_back(
    then, tmp_path, source, url, monkeypatch
):
    made, out = job(tmp_path, source, url, mechanism__reference=HISTOGRAM), tmp_path / "out"
    copied_when_opened(made, out, tmp_path / "backup", monkeypatch, dying_at="commit")
    shutil.rmtree(hidden(out))
    out.rename(tmp_path / "first")
    shutil.copytree(tmp_path / "backup", hidden(out))
    assert kinds(url) == ["intend"]
    if then == "the input grew":
        pq.write_table(pq.read_table(source / "a.parquet"), source / "b.parquet")
    elif then == "a value is bad":
        bad = pq.read_table(source / "a.parquet")
        at = (source / "a.parquet").stat()
        pq.write_table(
            bad.set_column(2, "r", pa.array([9] * N)), source / "a.parquet", row_group_size=300
        )
        os.utime(source / "a.parquet", ns=(at.st_atime_ns, at.st_mtime_ns))
    with (
        pytest.raises(OutputError, match="this run has already drawn its noise")
        if then == "nothing"
        else pytest.raises(dpdask.DpdaskError)
    ):
        run_here(made)
    assert not out.exists()
    assert ledger(url).read_balance("people").epsilon_spent == pytest.approx(1.0)


def test_two_copies_of_a_run_release_one_noise(tmp_path, source, url, monkeypatch):
    made, out = job(tmp_path, source, url, mechanism__reference=HISTOGRAM), tmp_path / "out"
    copied_when_opened(made, out, tmp_path / ".out2.dpdask", monkeypatch)
    with pytest.raises(OutputError, match="this run has already drawn its noise"):
        run_here(made, output__path=tmp_path / "out2")
    assert not (tmp_path / "out2").exists()
    assert kinds(url) == ["intend", "commit"]


def test_a_copy_that_draws_at_the_same_time_releases_nothing(tmp_path, source, url, monkeypatch):
    """Both are past their charge; the ledger takes the first draw, and the second one is refused."""
    made, out = job(tmp_path, source, url, mechanism__reference=HISTOGRAM), tmp_path / "out"
    draw, other = Account.record_draw, []

    def overtaken(given, run_id, sha256):
        if not other:
            other.append(sha256)
            ledger(url).draw("people", run_id, "0" * 64)
        draw(given, run_id, sha256)

    monkeypatch.setattr(Account, "record_draw", overtaken)
    with pytest.raises(OutputError, match="this run has already drawn its noise"):
        run_here(made)
    assert not out.exists()


@pytest.mark.parametrize("reference", [HOLDOUT, KNOWN], ids=["held out", "declared"])
def test_a_refusal_of_a_strict_dataset_costs_at_least_a_hundredth_of_it(reference, tmp_path, url):
    steps = ["intend", "refuse"]
    ledger(url).init("strict", 1.0, strict=True)
    bad = written(tmp_path / "bad", pa.int64(), last=9)
    made = job(
        tmp_path,
        bad,
        url,
        privacy__epsilon=1e-6,
        ledger={"url": url, "dataset": "strict"},
        mechanism__reference=reference,
    )
    for asked in range(1, 3):
        with pytest.raises(DataError):
            run_here(made)
        assert [entry.kind for entry in ledger(url).show("strict").entries][-len(steps) :] == steps
        assert ledger(url).read_balance("strict").epsilon_spent == pytest.approx(0.01 * asked)
    assert {
        entry.charge.event["unit"]
        for entry in charging_entries(url, "strict")
        if entry.kind == "refuse"
    } == {"row"}
    ledger(url).intend("strict", "rest", load(made, privacy__epsilon=0.975).account.cost())
    with pytest.raises(BudgetError):  # a refusal could not be paid for
        run_here(made)
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "strict").stdout
    assert (
        "2 runs read rows and refused them; 2 charged; a refusal reveals an exact answer" in shown
    )


def test_columns_without_epsilon_are_named_wherever_an_attacker_is_bounded(tmp_path, source, url):
    anchors = {"name": "uniform", "loc": 0, "scale": 6}
    perturb = {"epsilon": 0.1, "reference": {"kind": "known", "probabilities": [0.2] * 5}}
    designs = {
        "r": {
            "design": "interval-differential",
            "perturb": perturb,
            "of": {"design": "case1", "anchors": anchors},
        }
    }
    designs["who"] = {"design": "case2", "anchors": {"name": "uniform", "loc": 0, "scale": N}}
    schema = {
        **SCHEMA,
        "who": continuous([0, N], outside="refuse"),
    }
    made = job(
        tmp_path,
        source,
        url,
        schema=schema,
        mechanism={"kind": "interval", "columns": designs},
        privacy={"epsilon": 0.1},
    )
    planned = plan_job(load(made)).ledger
    assert planned is not None
    assert "the private columns who were released without ε" in planned["coverage"]
    run_here(made)
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    assert (
        "the private columns who were released without ε in some run; no bound on an attacker holds for rows or columns without ε"
        in shown
    )
    assert (
        "tests what its other columns were, at a false-alarm rate of 5 %, detects it with probability at most 5.6 %"
        in shown
    )
    assert read_card(tmp_path)["dataset"]["columns_without_epsilon"] == ["who"]


def test_times_of_files_tell_nothing_of_the_order_of_writing(tmp_path, source, url):
    run_here(job(tmp_path, source, url, mechanism__reference=KNOWN, output__rows_per_shard=100))
    found = {path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.parquet")}
    assert len(list((tmp_path / "out").glob("*.parquet"))) >= 8
    assert len(found) == 1


def test_a_published_run_is_not_aborted_but_finished(tmp_path, source, url, monkeypatch):
    made, out = job(tmp_path, source, url, mechanism__reference=HISTOGRAM), tmp_path / "out"
    copied_when_opened(made, out, tmp_path / "backup", monkeypatch, dying_at="commit")
    with pytest.raises(OutputError, match="run the job again to finish it"):
        abort(load(made).output_url)
    assert run_here(made).status == "already released"
    assert kinds(url) == ["intend", "commit"]
    assert not hidden(out).exists()


def test_a_crash_after_a_refusal_was_recorded_leaves_nothing_that_is_stuck(
    tmp_path, source, url, monkeypatch
):
    bad = written(tmp_path / "bad", pa.int64(), last=9)
    ledger(url).init("strict", 20.0, strict=True)
    strict = {"url": url, "dataset": "strict"}
    made = job(tmp_path, bad, url, mechanism__reference=KNOWN, ledger=strict)
    refuse = Account.refuse

    def dying(*given, **rest):
        refuse(*given, **rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Account, "refuse", dying)
        with pytest.raises(KeyboardInterrupt):
            run_here(made)
    assert hidden(tmp_path / "out").exists()
    with pytest.raises(DataError):  # a run of its own, with the same answer
        run_here(made)
    found = charged_kinds(url, "strict")
    assert found[-4:] == ["intend", "refuse"] * 2
    assert not hidden(tmp_path / "out").exists()
