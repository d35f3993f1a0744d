"""What a ledger promises whatever a caller does: whom no ε covers, one draw for one charge, and refusals that are no free questions."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import (
    call_cli,
    categorical,
    charged_kinds,
    continuous,
    discrete,
    hidden,
    load,
    read_card,
    run_here,
    write_job,
)
from pyarrow import parquet as pq

from dpdask.engine import scan
from dpdask.engine import write as shuffle
from dpdask.engine.account import Account, open_ledger
from dpdask.errors import BudgetError, DataError, OutputError, TemporaryError
from dpdask.io import fragments
from dpdask.jobs import run
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort
from dpdask.jobs.spec import JobTable
from dpdask.jobs.state import RunState
from dpdask.privacy.events import Composed, DiscreteLaplace, to_dict
from dpdask.privacy.ledger import Charge
from dpdask.privacy.ledger_entries import Coverage

SCHEMA = {
    "who": {"role": "keep"},
    "r": discrete([1, 2, 3, 4, 5]),
}
HOLDOUT = {"kind": "holdout", "fraction": 0.25}
CHAIN = {"kind": "chain", "fraction": 0.25}
HISTOGRAM = {"kind": "histogram"}
KNOWN = {"kind": "known", "columns": {"r": {"probabilities": [0.2] * 5}}}
N = 1000


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "in"
    folder.mkdir()
    for part in range(2):
        who = np.arange(part * N // 2, (part + 1) * N // 2)
        pq.write_table(
            pa.table({"who": who, "r": who % 5 + 1, "user": who // 4}), folder / f"{part}.parquet"
        )
    return folder


def job(folder, source, url, **changed):
    given = {
        "privacy__epsilon": 1.0,
        "ledger": {"url": url, "dataset": "people"},
        "schema": {**SCHEMA, "user": {"role": "drop"}},
        **changed,
    }
    return write_job(folder, source, folder / "out", **given)


def ledger(url):
    return open_ledger(url)


def balance(url):
    return ledger(url).read_balance("people")


def kinds(url):
    ledger(url).verify("people")
    return charged_kinds(url, "people")


def held_out(folder):
    return set(range(N)) - set(pq.read_table(folder / "out")["who"].to_pylist())


# ---- whom no ε covers


def test_all_jobs_of_a_dataset_hold_out_the_same_rows(tmp_path, source, url):
    found = []
    for number, reference in enumerate([HOLDOUT, CHAIN, HOLDOUT]):
        run_here(job(tmp_path / str(number), source, url, mechanism__reference=reference))
        found.append(held_out(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]
    assert 150 < len(found[0]) < 350
    assert balance(url).coverage == Coverage(uncovered=0.25, republished=0.25)
    smaller = {"kind": "holdout", "fraction": 0.1}
    run_here(job(tmp_path / "smaller", source, url, mechanism__reference=smaller))
    assert held_out(tmp_path / "smaller") < found[0]
    assert balance(url).coverage.uncovered == 0.25


def test_another_dataset_and_no_dataset_hold_out_other_rows(tmp_path, source, url):
    ledger(url).init("other", 10.0)
    places = [{"url": url, "dataset": "people"}, {"url": url, "dataset": "other"}, None, None]
    found = []
    for number, place in enumerate(places):
        run_here(
            job(
                tmp_path / str(number),
                source,
                url,
                ledger=place,
                insecure_seed=None,
                mechanism__reference=HOLDOUT,
            )
        )
        found.append(frozenset(held_out(tmp_path / str(number))))
    assert len(set(found)) == 4


def test_units_are_held_out_alike_wherever_their_rows_lie(tmp_path, source, url):
    other = tmp_path / "other"
    other.mkdir()
    whole = pq.read_table(source)
    pq.write_table(whole.take(np.random.default_rng(0).permutation(N)), other / "all.parquet")
    unit = {"column": "user", "max_rows": 4}
    for name, where in (("a", source), ("b", other)):
        run_here(job(tmp_path / name, where, url, mechanism__reference=HOLDOUT, privacy__unit=unit))
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b") != set()
    assert balance(url).coverage.uncovered == 0.25


def samples(url):
    return [
        each["sample"]
        for entry in ledger(url).show("people").entries
        if entry.kind == "commit"
        for each in entry.charge.event["uncovered"]
    ]


@pytest.mark.parametrize("state", ["mine", "another machine's", "none"])
def test_the_name_of_a_hold_out_is_no_test_of_guesses(state, tmp_path, source, url, monkeypatch):
    """Who reads the whole database, and knows all rows but one, must not be able to compute the name for each value of the last one."""
    run_here(job(tmp_path / "a", source, url, mechanism__reference=HOLDOUT))
    if state != "mine":
        monkeypatch.setenv(
            "XDG_STATE_HOME", str(tmp_path / "state") if state != "none" else "/proc/none"
        )
    run_here(job(tmp_path / "b", source, url, mechanism__reference=HOLDOUT))
    first, second = samples(url)
    assert (first == second) == (state == "mine")
    assert balance(url).coverage.uncovered == (0.25 if state == "mine" else 0.5)
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b")
    drawn = [entry.release for entry in ledger(url).show("people").entries if entry.kind == "draw"]
    assert len(set(drawn)) == 2  # of the same held-out rows: each has a secret of its run in it


def test_a_name_that_the_ledger_holds_stays(tmp_path, source, url, monkeypatch):
    """Versions before 1.0.0 wrote the digest itself: the same rows are not counted a second time."""
    with monkeypatch.context() as patch:
        patch.setattr(JobTable, "hide_sample", None)
        run_here(job(tmp_path / "a", source, url, mechanism__reference=HOLDOUT))
    run_here(job(tmp_path / "b", source, url, mechanism__reference=CHAIN))
    assert len(set(samples(url))) == 1
    assert balance(url).coverage == Coverage(uncovered=0.25, republished=0.25)


def test_rows_at_other_places_are_another_sample_and_both_count(tmp_path, source, url):
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pq.read_table(source), other / "all.parquet")
    for name, where in (("a", source), ("b", other)):
        run_here(job(tmp_path / name, where, url, mechanism__reference=HOLDOUT))
    assert balance(url).coverage.uncovered == 0.5


def test_the_ledger_the_plan_and_the_card_say_whom_no_epsilon_covers(tmp_path, source, url):
    run_here(job(tmp_path / "first", source, url, mechanism__reference=HISTOGRAM))
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    assert (
        "an attacker who has all these releases and tests what a row was, at a false-alarm rate of 5 %, detects it with probability at most 13.6 %"
        in shown
    )
    assert "dataset" not in read_card(tmp_path / "first")
    chain = job(tmp_path / "chain", source, url, mechanism__reference=CHAIN, privacy__epsilon=0.1)
    planned = plan_job(load(chain)).ledger
    assert planned is not None
    assert (planned["uncovered_before"], planned["uncovered_after"]) == (0.0, 0.25)
    assert (
        "coverage  after this run, up to about 25 % of the rows had no ε in some run"
        in call_cli("plan", chain).stdout
    )
    run_here(chain)
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    assert (
        "about 25 % of the rows had no ε in some run (hold-outs), and the records of up to about 25 % were republished"
        in shown
    )
    assert "tests what a row was" not in shown
    assert (
        "for a row that every run covers, an attacker who has all these releases and tests "
        in shown
    )
    assert read_card(tmp_path / "chain")["dataset"]["uncovered_fraction"] == 0.25
    assert read_card(tmp_path / "chain")["guarantee"]["text"].endswith(
        "No such bound holds for the rows that are not protected."
    )
    later = job(tmp_path / "later", source, url, mechanism__reference=HISTOGRAM)
    run_here(later)
    assert (
        "about 25 % of the rows had no ε in some run"
        in read_card(tmp_path / "later")["dataset"]["text"]
    )


def test_values_under_add_remove_count_twice(url):
    event = to_dict(
        Composed(
            events=(DiscreteLaplace(scale=1.0, sensitivity=1, adjacency="add-remove"),),
            unit="row",
            uncovered=(),
        )
    )
    ledger(url).intend("people", "counts", Charge(epsilon=1.0, event=event))
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    bounds = "at most 37.0 % (values count twice: 2ε), and whether it is there with probability at most 13.6 %"
    assert (
        f"tests what a row was, at a false-alarm rate of 5 %, detects it with probability {bounds}"
        in shown
    )


def test_runs_of_an_earlier_version_are_not_vouched_for(tmp_path, source, url):
    old = {
        "format": 1,
        "kind": "composed",
        "unit": "row",
        "events": [{"format": 1, "kind": "local-release", "epsilon": 1.0, "n": 1, "unit": "row"}],
    }
    ledger(url).intend("people", "old", Charge(epsilon=1.0, event=old))
    shown = call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    assert "1 run does not record which rows it leaves out" in shown
    assert "an attacker" not in shown.replace("no bound on an attacker", "")


def test_a_card_written_again_after_a_crash_is_the_same_whatever_came_between(
    tmp_path, source, url, monkeypatch
):
    first = job(tmp_path / "first", source, url, mechanism__reference=HISTOGRAM)
    cards = []

    def crash(self, target):
        cards.append(
            (
                hidden(tmp_path / "first" / "out")
                / f"publish-{RunState(target).read().run_id}"
                / "_dpdask"
                / "release.json"
            ).read_bytes()
        )  # type: ignore[union-attr]
        raise TemporaryError("crash")

    with monkeypatch.context() as patched:
        patched.setattr(run.Folder, "move_to", crash)
        with pytest.raises(TemporaryError):
            run_here(first)
    run_here(job(tmp_path / "second", source, url, mechanism__reference=HOLDOUT))
    run_here(first)
    assert [(tmp_path / "first" / "out" / "_dpdask" / "release.json").read_bytes()] == cards


# ---- one charge, one draw


def test_a_seed_is_charged_to_no_ledger(tmp_path, source, url):
    made = job(tmp_path, source, url, mechanism__reference=HISTOGRAM, insecure_seed=7)
    ended = call_cli("run", made)
    assert ended.returncode == 64
    assert (
        "noise from a seed protects nobody, so a job with a seed cannot be charged to a ledger"
        in ended.stderr
    )
    assert kinds(url) == []


@pytest.mark.parametrize("stage", ["opened", "fitted"])
def test_a_hidden_folder_that_is_restored_after_the_commit_draws_no_second_noise(
    stage, tmp_path, source, url, monkeypatch
):
    made, out = job(tmp_path, source, url, mechanism__reference=HISTOGRAM), tmp_path / "out"
    place = Account if stage == "opened" else run
    name = "intend" if stage == "opened" else "write_all"
    function = getattr(place, name)

    def copying(*given, **rest):
        shutil.copytree(hidden(out), tmp_path / "backup")
        return function(*given, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, copying)
        run_here(made)
    first = {path.name: path.read_bytes() for path in out.glob("*.parquet")}
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "backup", hidden(out))
    if stage == "opened":
        with pytest.raises(
            OutputError,
            match="this run has already drawn its noise; its hidden folder is an old copy",
        ):
            run_here(made)
        assert not out.exists()
        assert abort(load(made).output_url)
        run_here(made)  # a run of its own, with a charge of its own
        assert kinds(url) == ["intend", "commit", "intend", "commit"]
    else:  # its noise is kept: the same bytes again, for nothing more, but no other release
        kept = (hidden(out) / "run.json").read_text()
        (hidden(out) / "run.json").write_text(
            json.dumps({**json.loads(kept), "release_sha256": "0" * 64})
        )
        with pytest.raises(OutputError, match="old copy"):
            run_here(made)
        (hidden(out) / "run.json").write_text(kept)
        run_here(made)
        assert {path.name: path.read_bytes() for path in out.glob("*.parquet")} == first
        assert kinds(url) == ["intend", "commit"]
        digest = sha256((tmp_path / "backup" / "release.npz").read_bytes()).hexdigest()
        assert [entry.release for entry in ledger(url).show("people").entries] == [
            "",
            digest,
            digest,
        ]


def test_histogram_noise_is_kept_the_moment_it_is_drawn(tmp_path, source, url, monkeypatch):
    made = job(tmp_path, source, url, mechanism__reference=HISTOGRAM)
    drawn = []

    def dying(*_, **__):
        drawn.append((hidden(tmp_path / "out") / "noisy.npz").read_bytes())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dpdask.mechanisms.dip.columns.fit_dip", dying)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run_here(made)
    assert len(set(drawn)) == 1
    run_here(made)
    assert kinds(url) == ["intend", "commit"]


# ---- refusals are no free questions


def bad(folder, source):
    """Copy a source, with one value outside the levels."""
    mine = Path(shutil.copytree(source, folder / "bad"))
    table = pq.read_table(mine / "1.parquet").to_pandas()
    table.loc[3, "r"] = 9
    table.to_parquet(mine / "1.parquet", index=False)
    return mine


def test_a_budget_that_cannot_pay_is_refused_before_a_row_is_read(
    tmp_path, source, url, monkeypatch
):
    ledger(url).intend("people", "spent", Charge(epsilon=100.0))

    def read(*_, **__):
        raise AssertionError("a row was read")

    for owner, name in (
        (fragments.parquet, "read_batches"),
        (scan, "Chooser"),
        (shuffle, "Chooser"),
    ):
        monkeypatch.setattr(owner, name, read)
    with pytest.raises(BudgetError):
        run_here(job(tmp_path, source, url, mechanism__reference=HISTOGRAM))
    assert kinds(url) == ["intend"]


def test_a_refusal_that_read_rows_is_recorded_and_costs_nothing(tmp_path, source, url):
    made = job(tmp_path, bad(tmp_path, source), url, mechanism__reference=HOLDOUT)
    for asked in range(1, 3):
        with pytest.raises(DataError, match="a value outside its levels"):
            run_here(made)
        assert kinds(url) == ["refuse"] * asked
        assert (balance(url).epsilon_spent, balance(url).n_runs, balance(url).n_refused) == (
            0.0,
            0,
            asked,
        )
        assert not hidden(tmp_path / "out").exists()
    assert (
        "2 runs read rows and refused them; 0 charged"
        in call_cli("ledger", "show", "--url", url, "--dataset", "people").stdout
    )
    run_here(job(tmp_path, source, url, mechanism__reference=HOLDOUT))
    assert balance(url).n_runs == 1


_TIMES = pa.array([1, 90_000_000, 2] * 100, pa.int32())
WRONG = {  # values that their types do not have, in files whose footers and pages are right
    "text": (pa.array([b"a", b"\xffb", b"a"] * 100), pa.string(), categorical(["a"], other="a")),
    "time": (_TIMES, pa.time32("ms"), continuous([0, 86_399_999])),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_values_that_a_type_does_not_have_are_refused_as_rows_are(kind, strict, tmp_path, url):
    ledger(url).init("people", 100.0, strict=strict)
    wrong, type_, declared = WRONG[kind]
    rows = pa.table({"x": pa.Array.from_buffers(type_, len(wrong), wrong.buffers())})
    pq.write_table(rows, tmp_path / "in.parquet", row_group_size=100)
    made = job(tmp_path, tmp_path / "in.parquet", url, schema={"x": declared})
    found = call_cli("run", made)
    assert found.returncode == 65
    assert f"column 'x': holds a value that its type {type_} does not have" in found.stderr
    assert "row group" not in found.stderr
    assert kinds(url) == (["strict", "intend", "refuse"] if strict else ["refuse"])
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("reads", ["row key", "partitions"])
def test_lines_that_are_refused_before_a_run_is_opened_are_recorded(reads, strict, tmp_path, url):
    """Lines of CSV are parsed whole, private fields too, even if kept columns alone are read."""
    ledger(url).init("people", 100.0, strict=strict)
    (tmp_path / "in").mkdir()
    lines = ["who,r", *(f"{who},{who % 5 + 1}" for who in range(300))]
    asked = {"output__partition_by": ["who"], "mechanism__reference": HISTOGRAM}
    before = ["strict"] if strict else []
    if reads == "row key":
        asked = {"growing": {"row_key": ["who"]}, "mechanism__reference": KNOWN}
        before = [*before, "intend", "commit"]
        (tmp_path / "in" / "0.csv").write_text("who,r\n1000,1\n")
    schema = {**SCHEMA, "who": {"role": "keep", "type": "int64"}}
    made = job(tmp_path, tmp_path / "in", url, schema=schema, **asked)
    if reads == "row key":
        run_here(made)
    spent = balance(url).epsilon_spent
    for refused in range(1, 3):
        (tmp_path / "in" / "1.csv").write_text("\n".join([*lines, '300,1,"']) + "\n")
        assert call_cli("run", made).returncode == 65
        assert kinds(url) == before + ["refuse"] * refused
        assert (balance(url).epsilon_spent > spent) == strict
    (tmp_path / "in" / "1.csv").unlink()


def test_a_failure_that_may_pass_is_charged_once_by_a_strict_ledger(
    tmp_path, source, url, monkeypatch
):
    ledger(url).init("people", 100.0, strict=True)
    made = job(tmp_path, source, url, mechanism__reference=HOLDOUT)

    def lost(*_, **__):
        raise TemporaryError("the cluster lost its scheduler or its workers")

    with monkeypatch.context() as patched:
        patched.setattr("dpdask.engine.fit.scan", lost)
        for _ in range(2):
            with pytest.raises(TemporaryError):
                run_here(made)
    assert kinds(url) == ["strict", "intend"]
    run_here(made)
    assert kinds(url) == ["strict", "intend", "commit"]


# ---- frames
