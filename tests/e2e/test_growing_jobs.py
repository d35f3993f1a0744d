"""Growing tables: a series of releases, killed and resumed, repeated, copied and tampered with; what the ledger counts."""

import gzip
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from e2e.growing import (
    BY_USER,
    HISTOGRAM,
    HOLDOUT,
    KNOWN,
    SCHEMA,
    N,
    add_day,
    at,
    grow,
    job,
    kept,
    kinds,
    list_digests,
    manifests,
    read_log,
    released,
    spent,
)
from e2e.helpers import (
    call_cli,
    charging_entries,
    continuous,
    digests,
    discrete,
    error_line,
    hidden,
    load,
    run_here,
    write_job,
)

import dpdask
from dpdask.engine import write
from dpdask.engine.account import Account, open_ledger
from dpdask.errors import BudgetError, DataError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.storage import Folder
from dpdask.jobs import growing
from dpdask.jobs.output import LocalFolder
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import abort, status
from dpdask.jobs.series import KeptFolder
from dpdask.jobs.state import RunState
from dpdask.mechanisms.card import Card
from dpdask.page.render import describe_gain

pytestmark = pytest.mark.usefixtures("here")


CHAIN = {"kind": "chain", "fraction": 0.25, "by": "day"}  # the groups of later days are new to it


@pytest.mark.parametrize(
    "reference", [KNOWN, HISTOGRAM, HOLDOUT, CHAIN], ids=lambda reference: reference["kind"]
)
def test_each_run_releases_the_new_rows_and_leaves_what_was_released(
    reference, tmp_path, source, out
):
    made = job(tmp_path / "job", source, reference)
    before = {}
    for day in range(4):
        add_day(source, day)
        assert run_here(made).status == "released"
        now = digests(out)
        assert {name: now[name] for name in before} == before
        before = {name: digest for name, digest in now.items() if name != "_dpdask/series.json"}
        assert not hidden(out).exists()
        assert status(f"file://{out}").n_releases == day + 1
    held_out = N - manifests(out)[0].n_rows
    assert (held_out > 0) == (reference in (HOLDOUT, CHAIN))
    assert [manifest.n_rows for manifest in manifests(out)] == [N - held_out, N, N, N]
    table = released(out)
    assert table.num_rows == 4 * N - held_out
    assert table.column_names == ["day", "user", "r"]


def test_each_release_has_noise_of_its_own(tmp_path, source, out):
    """The private values of all days are the same, and so is the seed."""
    made = job(tmp_path / "job", source, output__order="keep")
    grow(made, source, range(4))
    values = released(out).column("r").to_numpy().reshape(4, N)
    for first in range(4):
        for second in range(first):
            assert 0.05 < np.mean(values[first] == values[second]) < 0.6


@pytest.mark.few
@pytest.mark.parametrize(("unit", "expected"), [("row", 1.0), (BY_USER, 6.0)])
@pytest.mark.parametrize("reference", [KNOWN, HOLDOUT], ids=lambda reference: reference["kind"])
def test_a_series_spends_once_for_a_row_and_each_time_for_a_person(
    unit, expected, reference, tmp_path, url, source, out
):
    made = job(tmp_path / "job", source, reference, ledger=at(url), privacy__unit=unit)
    grow(made, source, range(6))
    assert spent(url) == expected
    assert kinds(url) == ["intend", "commit"] * 6
    assert open_ledger(url).verify("people")
    summary = json.loads((out / "_dpdask" / "series.json").read_text())["series"]
    assert (summary["releases"], summary["epsilon"]) == (6, expected)
    other = job(
        tmp_path / "other", source, reference, ledger=at(url), privacy__unit=unit, growing=False
    )
    run_here(other)
    assert spent(url) == expected + 1.0


def test_a_reference_that_counts_is_charged_once(tmp_path, url):
    """A person pays for the histogram on the first day, and for the rows alone on the others."""
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, HISTOGRAM, ledger=at(url), privacy__unit=BY_USER)
    grow(made, source, range(1))
    assert spent(url) == 1.0
    [row] = [
        event
        for event in charging_entries(url, "people")[0].charge.event["events"]
        if event["kind"] == "local-release"
    ]
    grow(made, source, range(1, 3))
    assert spent(url) == pytest.approx(1.0 + 2 * row["n"] * row["epsilon"])
    assert spent(url) < 2.9


@contextmanager
def dying(point):
    """Let the driver die once, before or after the n-th call of a function, and expect it to."""
    (owner, name), after, nth = POINTS[point]
    function, calls = getattr(owner, name), [0]

    def struck(*args, **kwargs):
        if (
            name == "put_new"
            and "manifest" not in args[1]
            and not args[0].url.endswith("/_delta_log")
        ):
            return function(*args, **kwargs)
        calls[0] += 1
        if calls[0] == nth and not after:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if calls[0] == nth:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, struck)
        with pytest.raises(KeyboardInterrupt):
            yield


POINTS = {
    "opened": ((RunState, "open"), True, 1),
    "intended": ((Account, "intend"), True, 1),
    "fitted": ((RunState, "write"), True, 2),
    "some-shards": ((write, "write_shards"), True, 1),
    "kept": ((KeptFolder, "write"), True, 1),
    "before-commit": ((LocalFolder, "commit"), False, 1),
    "half-moved": ((Path, "replace"), True, 2),
    "card-written": ((Folder, "put_new"), False, 1),
    "manifest-written": ((Folder, "put_new"), True, 1),
    "uncommitted": ((Account, "commit"), False, 1),
    "committed": ((Account, "commit"), True, 1),
    "removed": ((RunState, "remove"), True, 1),
}


FOLDER_ALONE = ("before-commit", "half-moved")
OF_A_SERIES = ("kept",)  # the first release is otherwise that of any job: faults/test_kills.py


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("day", "output", "point"),
    [
        (day, output, point)
        for day, points in ((1, POINTS), (0, OF_A_SERIES))
        for point in points
        for output in ("parquet", "delta")
        if output == "parquet" or point not in FOLDER_ALONE
    ],
)
def test_a_release_that_was_killed_goes_on_with_the_same_bytes_and_one_charge(
    day, output, point, tmp_path, url, seeded_ledgers
):
    source, out = tmp_path / "in", tmp_path / "struck" / "out"
    quiet = job(tmp_path / "quiet", source, output__rows_per_shard=25, output__format=output)
    made = job(
        tmp_path / "struck",
        source,
        output__rows_per_shard=25,
        output__format=output,
        ledger=at(url),
        insecure_seed=7,
    )
    for before in range(day):
        add_day(source, before)
        run_here(quiet)
        run_here(made)
    add_day(source, day)
    run_here(quiet)
    with dying(point):
        run_here(made)
    published = point in ("manifest-written", "uncommitted", "committed", "removed")
    assert status(f"file://{out}").n_releases == day + published
    assert call_cli("status", out).returncode == 0
    add_day(source, day + 1)  # it came while the release was unfinished
    run_here(quiet)
    run_here(made)
    assert run_here(made).status == "nothing new"
    assert list_digests(manifests(out)) == list_digests(manifests(tmp_path / "quiet" / "out"))
    if output == "parquet":  # the files of a table have the names of their runs
        assert digests(out) == digests(tmp_path / "quiet" / "out") | {
            "_dpdask/series.json": digests(out)["_dpdask/series.json"]
        }
    else:
        assert read_log(out) == [{shard.name for shard in each.shards} for each in manifests(out)]
    assert kinds(url) == ["intend", "commit"] * (day + 2)
    assert spent(url) == 1.0
    assert not hidden(out).exists()
    assert sorted(path.name.partition("-")[0] for path in kept(out).iterdir()) == [
        "release.npz",
        "released",
        "series.json",
    ]


def test_a_release_that_another_driver_made_in_between_is_not_made_again(
    tmp_path, monkeypatch, source, out
):
    made = job(tmp_path / "job", source)
    grow(made, source, range(1))
    add_day(source, 1)
    check_room, ran = Account.check_room, []

    def slow(*args):
        if not ran:
            ran.append(True)
            ran.append(run_here(made))
        return check_room(*args)

    monkeypatch.setattr(Account, "check_room", slow)
    with pytest.raises(TemporaryError):
        run_here(made)
    assert run_here(made).status == "nothing new"
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N]


def test_files_are_checked_against_those_that_were_released(tmp_path, url, source, out):
    made = job(tmp_path / "job", source, ledger=at(url))
    grow(made, source, range(3))
    before, entries = digests(out), len(open_ledger(url).show("people").entries)

    def refuse(match, error=InputError, recorded=""):
        nonlocal entries
        with pytest.raises(error, match=match):
            run_here(made)
        entries += bool(recorded)  # that a file is a copy is an exact answer about rows
        assert not recorded or kinds(url)[-1] == recorded
        with pytest.raises(error, match=match):
            raise plan_job(load(made)).refusal or AssertionError
        assert digests(out) == before
        assert len(open_ledger(url).show("people").entries) == entries
        assert not hidden(out).exists()

    shutil.copy(source / "day-01.parquet", source / "copy.parquet")
    refuse(
        r"copy.parquet: rows seen again: this file is a copy of day-01.parquet",
        recorded="refuse",
    )
    (source / "copy.parquet").rename(tmp_path / "aside")
    shutil.copy(add_day(source, 7), source / "again.parquet")
    refuse(
        r"day-07.parquet: rows seen again: this file is a copy of again.parquet; remove it",
        recorded="refuse",
    )
    (source / "day-07.parquet").unlink()
    (source / "again.parquet").unlink()
    (source / "day-01.parquet").rename(source / "moved.parquet")
    refuse(r"day-01.parquet: this file was released and is gone")
    add_day(source, 1, n_rows=N + 1)
    (source / "moved.parquet").unlink()
    refuse(r"day-01.parquet: rows seen again: this file was released and has been rewritten")
    (tmp_path / "aside").rename(source / "day-01.parquet")
    assert run_here(made).status == "nothing new"
    table = pq.read_table(source / "day-00.parquet")
    pq.write_table(table.append_column("more", table.column("r")), source / "day-03.parquet")
    refuse("write all files with the same columns", DataError)
    pq.write_table(
        pa.concat_tables([pq.read_table(path) for path in sorted(source.glob("day-0[0-2]*"))]),
        source / "compacted.parquet",
    )
    for path in source.glob("day-*"):
        path.unlink()
    refuse(
        "day-00.parquet: this file was released and is gone; if its rows are in another file now"
    )


def test_late_files_and_files_of_equal_footers_are_new(tmp_path, source, out):
    made = job(tmp_path / "job", source)
    grow(made, source, range(1, 3))
    add_day(source, 0)  # before the others by its name
    assert run_here(made).manifest.n_rows == N
    for name, each in (("same-a", np.tile([1, 5], N // 2)), ("same-b", np.tile([1, 1, 5], N // 3))):
        table = pa.table({"day": np.full(N, 9), "user": np.full(N, 9), "r": each})
        pq.write_table(table, source / f"{name}.parquet", use_dictionary=False, compression="none")
        assert run_here(made).manifest.n_rows == N
    assert [manifest.n_rows for manifest in manifests(out)] == [2 * N - N, N, N, N, N]


def test_files_without_rows_are_nothing_new(tmp_path):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source)
    grow(made, source, range(1))
    for name in ("a", "b"):
        add_day(source, 5, n_rows=0, name=f"{name}.parquet")
        assert run_here(made).status == "nothing new"
    add_day(source, 5, name="a.parquet")
    assert run_here(made).manifest.n_rows == N


def test_copies_in_the_first_release_are_refused(tmp_path):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source)
    (source / "linked.parquet").symlink_to(add_day(source, 0))
    with pytest.raises(
        InputError,
        match=r"linked.parquet: rows seen again: this file is a copy of day-00.parquet; remove it",
    ):
        run_here(made)
    assert not hidden(tmp_path / "job" / "out").exists()
    (source / "linked.parquet").unlink()
    assert run_here(made).manifest.n_rows == N


def test_files_of_text_grow_too(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    schema = {name: {**column, "type": "int64"} for name, column in SCHEMA.items()}
    made = job(tmp_path / "job", source, schema=schema)
    for day in range(3):
        pa_csv.write_csv(
            pa.table({"day": np.full(N, day), "user": np.arange(N), "r": np.arange(N) % 5 + 1}),
            source / f"{day}.csv",
        )
        assert run_here(made).manifest.n_rows == N
    os.utime(source / "0.csv", (1, 1))  # only touched
    assert run_here(made).status == "nothing new"
    for name in (
        "no-rows",
        "none-either",
    ):  # files of a header alone are alike, and hold no row twice
        (source / f"{name}.csv").write_text('"day","user","r"\n')
    pa_csv.write_csv(
        pa.table({"day": np.full(N, 3), "user": np.arange(N), "r": np.arange(N) % 5 + 1}),
        source / "3.csv",
    )
    assert run_here(made).manifest.n_rows == N
    shutil.copy(source / "0.csv", source / "9.csv")
    with pytest.raises(InputError, match=r"is a copy of 0\.csv"):
        run_here(made)


@pytest.mark.parametrize("name", ["blank.csv", "packed.csv.gz"])
def test_copies_of_text_are_refused_whatever_follows_the_header(tmp_path, name):
    source = tmp_path / "in"
    source.mkdir()
    made = job(
        tmp_path / "job",
        source,
        schema={name: {**column, "type": "int64"} for name, column in SCHEMA.items()},
    )
    data = ("day,user,r\n\n" + "".join(f"0,{user},{user % 5 + 1}\n" for user in range(N))).encode()
    (source / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    shutil.copy(source / name, source / f"again-{name}")
    with pytest.raises(InputError, match="is a copy of"):  # of one day
        run_here(made)
    (source / f"again-{name}").rename(tmp_path / "kept")
    assert run_here(made).manifest.n_rows == N
    (tmp_path / "kept").rename(source / f"again-{name}")
    with pytest.raises(InputError, match=r"is a copy of .*, which was released"):
        run_here(made)


@pytest.mark.parametrize(
    "change",
    [{"privacy__epsilon": 2.0}, {"mechanism__channel": "laplace-calibrated"}, {"growing": False}],
    ids=str,
)
def test_another_job_needs_another_output(change, tmp_path):
    source = tmp_path / "in"
    grow(job(tmp_path / "job", source), source, range(1))
    add_day(source, 1)
    with pytest.raises(OutputError, match="another job's release"):
        run_here(job(tmp_path / "job", source, **change))


def test_a_table_that_is_released_as_a_whole_cannot_grow(tmp_path):
    copula = {"kind": "copula", "n_rows": 20}
    schema = {**SCHEMA, "day": {"role": "drop"}, "user": {"role": "drop"}}
    made = write_job(
        tmp_path, tmp_path / "in", tmp_path / "out", schema=schema, mechanism=copula, growing=True
    )
    result = call_cli("validate", made)
    assert result.returncode == SpecError.exit_code
    assert "growing: this mechanism releases a table as a whole" in error_line(result)


@pytest.mark.parametrize("gone", ["series.json", "release.npz", "released-", ""], ids=repr)
def test_without_what_the_series_keeps_it_cannot_go_on(gone, tmp_path, source, out):
    made = job(tmp_path / "job", source)
    grow(made, source, range(2))
    for path in kept(out).iterdir():
        if path.name.startswith(gone) and gone != "series.json":
            path.unlink()
    add_day(source, 2)
    if gone == "series.json":
        kept(out).joinpath("release.npz").write_bytes(b"another")
    with pytest.raises(InputError, match="missing or was changed"):
        run_here(made)
    assert len(manifests(out)) == 2
    assert [path for path in out.parent.glob(".out.dpdask/*") if path.name != "lock"] == []


def test_what_is_kept_is_for_this_user_alone(tmp_path, source, out):
    grow(job(tmp_path / "job", source, HOLDOUT), source, range(2))
    assert kept(out).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kept(out).iterdir()} == {0o600}
    assert not list(tmp_path.rglob("run.key"))


@pytest.mark.parametrize(
    ("output", "day", "point"),
    [("parquet", 2, "half-moved"), ("delta", 2, "card-written"), ("delta", 0, "some-shards")],
)
def test_an_aborted_release_is_charged_and_what_was_released_stays(
    output, day, point, tmp_path, url, source, out
):
    made = job(
        tmp_path / "job", source, ledger=at(url), output__rows_per_shard=25, output__format=output
    )
    grow(made, source, range(day))
    before = digests(out)
    add_day(source, day)
    with dying(point):
        run_here(made)
    assert digests(out) != before
    assert abort(f"file://{out}")
    assert digests(out) == before
    assert kept(out).exists() == (day > 0)
    assert not abort(f"file://{out}")
    plan = plan_job(load(made))
    assert (plan.ledger or {})[
        "after"
    ] == 2.0  # the noise of the aborted release may have been seen
    if day:
        assert "charged in full" in plan.warnings[0]
    run_here(made)
    assert spent(url) == 2.0
    grow(made, source, range(day + 1, day + 3))
    assert spent(url) == 2.0


def test_a_copy_of_the_series_pays_for_what_it_releases_again(tmp_path, url, source, out):
    """The hidden folder of day 1 is taken to another output, which releases days 2 and 3 once more."""
    made = job(tmp_path / "job", source, ledger=at(url))
    grow(made, source, range(2))
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    copied = job(tmp_path / "copy", source, ledger=at(url))
    grow(made, source, range(2, 3))
    assert spent(url) == 1.0
    run_here(copied)  # day 2 for a second time
    assert spent(url) == 2.0
    grow(made, source, range(3, 4))  # covered by what the copy paid
    assert spent(url) == 2.0
    run_here(copied)
    assert spent(url) == 3.0
    assert len(manifests(out)) == 4


def test_an_old_record_is_not_taken_for_the_newest(tmp_path, source, out):
    """Whoever restores the record of day 1 would release day 2 again."""
    made = job(tmp_path / "job", source)
    grow(made, source, range(2))
    shutil.copytree(kept(out), tmp_path / "old")
    grow(made, source, range(2, 3))
    shutil.rmtree(kept(out))
    shutil.copytree(tmp_path / "old", kept(out))
    with pytest.raises(InputError, match="missing or was changed"):
        run_here(made)


def test_a_strict_ledger_needs_room_for_a_refusal(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 2.5, strict=True)
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, ledger=at(url))
    grow(made, source, range(3))
    assert spent(url) == 1.0
    pq.write_table(pa.table({"day": [3], "user": [1], "r": [9]}), source / "day-03.parquet")
    with pytest.raises(DataError):
        run_here(made)
    assert spent(url) == 2.0
    add_day(source, 3)
    with pytest.raises(BudgetError):
        run_here(made)
    assert spent(url) == 2.0


def test_bad_rows_are_refused_before_anything_is_charged(tmp_path, url, source, out):
    made = job(tmp_path / "job", source, ledger=at(url))
    grow(made, source, range(1))
    pq.write_table(pa.table({"day": [1], "user": [1], "r": [9]}), source / "day-01.parquet")
    with pytest.raises(DataError):
        run_here(made)
    assert kinds(url) == ["intend", "commit", "refuse"]
    add_day(source, 1)
    run_here(made)
    assert (len(manifests(out)), spent(url)) == (2, 1.0)


def test_plan_shows_what_is_new_and_what_it_costs(tmp_path, url):
    source = tmp_path / "in"
    made = job(tmp_path / "job", source, HOLDOUT, ledger=at(url), privacy__unit=BY_USER)
    add_day(source, 0)
    assert (plan_job(load(made)).series or {})["releases"] == 0
    run_here(made)
    for day in (1, 2):
        add_day(source, day)
    planned = plan_job(load(made))
    assert planned.series is not None
    assert {
        name: planned.series[name]
        for name in ("releases", "released_files", "new_files", "new_rows", "series_epsilon")
    } == {
        "releases": 1,
        "released_files": 1,
        "new_files": 2,
        "new_rows": 2 * N,
        "series_epsilon": 2.0,
    }
    assert "1 release with" in str(planned)
    assert "held-out" not in planned.guarantee
    run_here(made)
    assert "nothing new" in call_cli("plan", made).stdout


def test_cards_say_what_the_series_is_and_that_held_out_rows_have_no_epsilon(tmp_path):
    """Every release follows the rows that release 0 held out, and tells more of them."""
    for name, reference in (
        ("holdout", HOLDOUT),
        ("chain", {"kind": "chain", "fraction": 0.25}),
        ("histogram", {"kind": "histogram"}),
    ):
        source, out = tmp_path / name / "in", tmp_path / name / "out"
        made = job(tmp_path / name, source, reference)
        add_day(source, 0)
        first_shown = call_cli("run", made).stdout
        add_day(source, 1)
        shown = call_cli("run", made).stdout
        files = ("release.json", "release-00001.json", "series.json")
        first, card, summary = (
            Card.read((out / "_dpdask" / file).read_bytes(), file) for file in files
        )
        assert [(each.series or {})["release"] for each in (first, card)] == [0, 1]
        assert [(each.series or {})["epsilon"] for each in (first, card)] == [1.0, 1.0]
        assert card.columns["r"] == first.columns["r"]
        assert (summary.series or {})["rows"] == released(out).num_rows
        unprotected, text = card.guarantee.unprotected, (card.series or {})["text"]
        if name == "histogram":
            assert unprotected.who.startswith("none of the rows of this release; ")
            assert "No such bound" not in card.guarantee.text
            assert "cost a row no more than release 0" in text
            continue
        assert (first.guarantee.unprotected.fraction, unprotected.fraction) == (0.25, 0.0)
        assert "Not protected: the held-out rows, 0.25 of the table" in first_shown
        assert "Not protected: the rows that release 0 held out" in shown
        assert "0.25 of the table" not in shown
        assert unprotected.who.startswith(
            "the rows that release 0 held out: no ε covers them, this release follows them too"
        )
        assert card.guarantee.text.endswith(
            "No such bound holds for the rows that are not protected."
        )
        assert "that a protected row has" in describe_gain(
            card.model_copy(update={"insecure": False})
        )
        for each in (text, (summary.series or {})["text"]):
            assert "Each released row is in one release" in each
            assert "No ε covers the rows that release 0 held out: all releases follow them." in each


def test_each_release_can_be_opened_by_its_card(tmp_path, source, out):
    grow(job(tmp_path / "job", source, HOLDOUT), source, range(2))
    with pytest.raises(
        SpecError, match=r"holds 2 releases.*its cards are release-00001.json, release.json"
    ):
        dpdask.open(str(out))
    with pytest.raises(
        InputError, match=r"no release with the card 'release-00007.json' here; its cards are"
    ):
        dpdask.open(str(out), card="release-00007.json")
    first, second = (
        dpdask.open(str(out), card="release.json"),
        dpdask.open(str(out), card="release-00001.json"),
    )
    assert (first.n_rows, second.n_rows) == tuple(manifest.n_rows for manifest in manifests(out))
    shares = second.share("r")
    assert float(shares.estimate.sum()) == pytest.approx(1.0)
    assert (shares.standard_error > 0.0).all()


def test_the_public_table_is_no_new_file(tmp_path, monkeypatch):
    source, public = tmp_path / "in", tmp_path / "public"
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 9.0)
    made = job(tmp_path / "job", source, {"kind": "public", "path": str(public)}, ledger=at(url))
    add_day(public, 9)
    grow(made, source, range(2))
    shutil.copy(public / "day-09.parquet", source / "day-02.parquet")
    assert plan_job(load(made)).refusal is None  # whoever fills the public folder could ask and ask
    with pytest.raises(SpecError, match="public table shares a file"):
        run_here(made)
    assert kinds(url)[-1] == "refuse"
    (source / "day-02.parquet").unlink()
    add_day(source, 2)

    def refused(*_):
        raise InputError("permission denied", "public")

    with monkeypatch.context() as patch:
        patch.setattr(growing, "discover_public", refused)
        with pytest.raises(
            InputError, match="permission denied"
        ):  # it may share a file, for all that is known
            run_here(made)
    shutil.rmtree(public)  # it was read once
    run_here(made)


def test_ranges_grow_too(tmp_path, source, out):
    ranges = {
        "kind": "interval",
        "columns": {"r": {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 6}}},
    }
    schema = SCHEMA | {"r": continuous([0, 6], outside="refuse")}
    grow(
        write_job(
            tmp_path / "job",
            source,
            out,
            schema=schema,
            mechanism=ranges,
            privacy=None,
            growing=True,
        ),
        source,
        range(3),
    )
    assert [manifest.n_rows for manifest in manifests(out)] == [N, N, N]
    summary = Card.read((out / "_dpdask" / "series.json").read_bytes(), "series.json")
    assert (summary.series or {})["epsilon"] is None


def test_a_tree_with_a_delta_grows_at_the_cost_of_its_first_release(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 1.0, 2e-6)
    source = tmp_path / "in"
    schema = SCHEMA | {"user": discrete(list(range(N)))}
    changed = {
        "schema": schema,
        "ledger": at(url),
        "privacy__delta": 1e-6,
        "mechanism__channel": "laplace-calibrated",
    }
    grow(job(tmp_path / "job", source, {"kind": "tree"}, **changed), source, range(3))
    assert spent(url) == 1.0
