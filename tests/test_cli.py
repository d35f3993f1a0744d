"""The command line: each verb's words, the shapes of its JSON, its exit codes, and what stands on which stream."""

import contextlib
import datetime as dt
import functools
import json
import re
import shutil
import sqlite3
import unicodedata
from unittest import mock

import click
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from e2e.bad_input import COLUMNS, KNOWN, command, files, job, table
from e2e.helpers import categorical, continuous

import dpdask
from dpdask.cli import cli
from dpdask.engine.account import open_ledger
from dpdask.errors import TemporaryError
from dpdask.mechanisms import mechanism as auditing
from dpdask.mechanisms.dip import columns
from dpdask.privacy.audit import audit_event
from dpdask.streams import RunKey, stream
from dpdask.version import __version__


def progress(ended):
    return [json.loads(line) for line in ended.err.splitlines()]


def words(folder, verb, *more):
    return [*job(folder, verb=verb), *more]


def test_validate_reads_no_data(tmp_path):
    ended = command(*job(tmp_path, {}, verb="validate"))  # there is no table
    assert (ended.code, ended.out, ended.err) == (
        0,
        "bad-input: valid; privatises rating, price\n",
        "",
    )


def test_a_schema_in_place_of_a_job_is_told_the_keys_as_they_are_written(tmp_path):
    job(tmp_path, {})
    ended = command("plan", str(tmp_path / "schema.yaml"))
    assert ended.code == 64
    line = (
        "unknown key 'columns'; the keys here are name, input, output, schema, privacy, mechanism, "
    )
    assert sum(line in each for each in ended.lines) == 1
    assert "schema_path" not in ended.err


def test_plan_as_text_names_the_promise_and_the_parts(tmp_path):
    ended = command(*words(tmp_path, "plan"))
    assert ended.code == 0
    assert not ended.err
    for text in (
        "bad-input\n",
        "400 rows",
        "4 fragments, 2 files of Parquet",
        "  takes     roughly 8 s on ",
        "  stage      about  what is done\n  survey     1 s    ",
        "  rating     0.5",
        "kept      userId; dropped: note",
        "about 300 rows",
        "Not protected: the held-out rows",
    ):
        assert text in ended.out
    assert "INSECURE" not in ended.out
    assert "INSECURE" in command(*words(tmp_path, "plan", "--set", "insecure_seed=1")).out


def test_plan_writes_a_page_to_sign(tmp_path):
    file = tmp_path / "plan.html"
    refused = ["--set", f"output.path={tmp_path}"]  # what holds files
    assert command(*words(tmp_path, "plan", "--page", str(file), *refused)).code == 73
    assert "This run would be refused:" in file.read_text(encoding="utf-8")
    file.unlink()
    assert command(*words(tmp_path, "plan", "--page", str(file))).code == 0
    page = file.read_text(encoding="utf-8")
    for text in (
        "<h1>Bad-input, planned with ε = 1 for 75 % of the rows</h1>",
        "<strong>Nothing was released.</strong>",
        "Do not run",
        "the held-out rows",
        "Ledger: none, so nothing keeps count",
        "no ledger counts them here",
        "so it is for the steward and the signer",
    ):
        assert text in page
    assert "SHA-256" not in page
    again = command(*words(tmp_path, "plan", "--page", str(file)))
    assert (again.code, again.out) == (73, "")
    assert "plan.html" in again.err
    open_ledger(f"sqlite:///{tmp_path}/ledger.db").init("people", 8.0)
    ledger = ["--set", f"ledger={{url: 'sqlite:///{tmp_path}/ledger.db', dataset: people}}"]
    file.unlink()
    assert command(*words(tmp_path, "plan", "--page", str(file), *ledger)).code == 0
    counted = file.read_text(encoding="utf-8")
    assert "of 8.0 spent by 0 runs" in counted
    assert "no ledger counts them" not in counted
    assert "names no ledger" not in counted


def test_plan_as_json(tmp_path):
    found = json.loads(command(*words(tmp_path, "plan", "--json")).out)
    assert {key: type(value) for key, value in found.items()} == {
        "is_linked": bool,
        "name": str,
        "n_fragments": int,
        "n_files": int,
        "input_format": str,
        "input_version": type(None),
        "n_rows": int,
        "n_bytes": int,
        "stages": list,
        "target": dict,
        "seconds": list,
        "n_workers": int,
        "noise": list,
        "epsilons": dict,
        "reference_epsilons": dict,
        "ledger": type(None),
        "outside": dict,
        "refusing": list,
        "date_bounds": dict,
        "kept": list,
        "dropped": list,
        "guarantee": str,
        "released_rows": int,
        "n_shards": int,
        "output": str,
        "output_format": str,
        "output_mode": str,
        "refusal": type(None),
        "is_finished": bool,
        "insecure": bool,
        "warnings": list,
        "expectations": list,
        "expected_errors": dict,
        "series": type(None),
    }
    assert (found["outside"], found["refusing"]) == ({"price": "clip"}, ["rating"])
    assert found["output"] == f"file://{tmp_path}/out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "job.yaml", "schema.yaml"]


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        ("a foreign file", "already exists and was not written by this run"),
        ("a file in its place", "already exists and was not written by this run"),
        ("another job's release", "holds another job's release"),
    ],
)
def test_plan_says_that_the_output_is_occupied(tmp_path, holds, says):
    if holds == "another job's release":
        assert command(*words(tmp_path, "run", "--set", "privacy.epsilon=2")).code == 0
    elif holds == "a foreign file":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
    else:
        (tmp_path / "out").write_text("mine")
    planned, ran = (command(*words(tmp_path, verb)) for verb in ("plan", "run"))
    assert (planned.code, planned.lines) == (ran.code, ran.lines)
    assert planned.out.endswith(f"  REFUSED   this output {says}\n")
    refusal = json.loads(command(*words(tmp_path, "plan", "--json")).out)["refusal"]
    assert refusal == {"exit_code": 73, "why": ran.err.removeprefix("dpdask: ").rstrip()}
    assert "REFUSED" not in command(*words(tmp_path, "plan", "--set", "output.path=elsewhere")).out


def test_plan_names_the_columns_that_refuse_in_one_line(tmp_path):
    ended = command(*words(tmp_path, "plan"))
    assert (
        "  outside   price: clip\n  outside   rating: refuse (one such value stops the run)\n"
        in ended.out
    )
    many = {f"c{number}": categorical(["a"]) for number in range(11)}
    parts = {"a.parquet": pa.table({name: ["a"] for name in many})}
    ended = command(*job(tmp_path / "many", parts, columns=many, verb="plan"))
    assert (
        "  outside   c0, c1, c2, c3, c4, c5, c6, c7 and 3 more: refuse (one such value stops the run)\n"
        in ended.out
    )


@pytest.mark.parametrize(("epsilon", "warned"), [("2.9", False), ("3", True)])
def test_a_plan_warns_of_a_large_epsilon_first(epsilon, warned, tmp_path):
    dip = {"kind": "dip", "reference": {"kind": "histogram"}}
    planned = command(
        *job(tmp_path, verb="plan", mechanism=dip), "--set", f"privacy.epsilon={epsilon}"
    )
    assert planned.code == 0
    assert planned.out.splitlines()[1].startswith(f"  WARNING   ε = {epsilon} is large") == warned


def test_plan_shows_the_bounds_of_dates_as_dates(tmp_path):
    columns = {
        "born": continuous([dt.date(1900, 1, 1), dt.date(2026, 12, 31)]),
        "admitted": continuous([dt.date(2020, 1, 1), dt.date(2026, 12, 31)]),
        "died": continuous([0, 120]),
        "age": continuous([0, 120]),
    }
    days = pa.array([dt.date(2000, 1, 1)] * 100)
    table = pa.table(
        {"born": days, "admitted": days.cast(pa.timestamp("ms")), "died": days, "age": [50.0] * 100}
    )
    words = job(
        tmp_path,
        {"a.parquet": table},
        columns=columns,
        verb="plan",
        mechanism={"kind": "dip", "reference": {"kind": "histogram"}},
    )
    ended = command(*words)
    for line in (
        "outside   born: clip to 1900-01-01..2026-12-31\n",
        "outside   admitted: clip to 2020-01-01..2026-12-31 23:59:59\n",
        "outside   died: clip to 1970-01-01..1970-05-01\n",
        "outside   age: clip\n",
    ):
        assert line in ended.out
    warning = (
        "column 'died': its bounds 0 and 120 count days since 1970-01-01, so they are 1970-01-01 and 1970-05-01; "
        "write dates, such as 2000-01-31, if others are meant"
    )
    assert f"  WARNING   {warning}\n" in ended.out
    found = json.loads(command(*words, "--json").out)
    assert [each for each in found["warnings"] if "its bounds" in each] == [warning]
    assert found["date_bounds"]["born"] == ["1900-01-01", "2026-12-31"]
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    planned = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": columns}), epsilon=1.0, reference=dpdask.Histogram()
    ).plan(frame)
    assert [each for each in planned.warnings if "its bounds" in each] == [warning]


def with_ledger(folder, verb="run", epsilon="1", dataset="ratings", **changed):
    url = f"sqlite:///{folder / 'ledger.db'}"
    return [
        *job(folder, verb=verb, ledger={"url": url, "dataset": dataset}, **changed),
        "--set",
        f"privacy.epsilon={epsilon}",
    ]


def ledger(folder, verb, *more, dataset="ratings"):
    return command(
        "ledger", verb, "--url", f"sqlite:///{folder / 'ledger.db'}", "--dataset", dataset, *more
    )


def test_the_budget_of_a_dataset_from_its_first_day_to_its_last(tmp_path):
    made = ledger(tmp_path, "init", "--epsilon", "2", "--delta", "0")
    assert (made.code, made.out, made.err) == (0, "ratings: a budget of ε 2.0, δ 0.0\n", "")
    assert (
        ledger(tmp_path, "init", "--epsilon", "2", "--delta", "0").out
        == "ratings: has this budget already: ε 2.0, δ 0.0\n"
    )
    other = ledger(tmp_path, "init", "--epsilon", "3", "--delta", "0")
    assert (other.code, other.out) == (64, "")
    assert "has a limit already: ε 2.0 and δ 0.0" in other.err
    assert ledger(tmp_path, "verify").out == "ratings: 0 entries, and the chain is intact\n"
    shown = ledger(tmp_path, "show").out
    assert "ε 0.0 of 2.0 spent by 0 runs, 2.0 left" in shown
    assert "attacker" not in shown  # nothing was released that could help one

    plan = with_ledger(tmp_path, "plan", "1.5")
    told = "spent by 0 runs; 1.5 after this run, and then room for no more like it\n"
    assert f"ledger    ε 0.0 of 2.0 {told}" in command(*plan).out
    smaller = command(*with_ledger(tmp_path, "plan", "0.6")).out
    assert "0.6 after this run, and then room for 2 more like it\n" in smaller
    assert command(*with_ledger(tmp_path, "run", "1.5")).code == 0
    again = with_ledger(tmp_path, "plan", "1.5", output={"path": "second"})
    planned = command(*again)
    assert "ledger    ε 1.5 of 2.0 spent by 1 run; 3.0 after this run\n" in planned.out
    assert planned.out.splitlines()[-1].startswith(
        "  REFUSED   the budget of the dataset 'ratings' is too small: the run asks for ε 1.5"
    )
    found = json.loads(command(*again, "--json").out)["ledger"]
    coverage = {
        "uncovered_before": 0.25,
        "uncovered_after": 0.25,
        "coverage": "up to about 25 % of the rows had no ε in some run (hold-outs)",
    }
    assert found == {
        "limit": 2.0,
        "before": 1.5,
        "after": 3.0,
        "runs": 1,
        "fits": False,
        "further": 0,
        **coverage,
    }
    refused = command(*with_ledger(tmp_path, "run", "1.5", output={"path": "second"}))
    assert (refused.code, refused.out, len(refused.lines)) == (77, "", 1)
    assert (planned.code, planned.lines) == (77, refused.lines)
    assert "asks for ε 1.5 and δ 0.0; ε 0.5 and δ 0 are left of ε 2.0 and δ 0.0" in refused.lines[0]
    assert not (tmp_path / "second").exists()
    assert not (tmp_path / ".second.dpdask").exists()

    shown = ledger(tmp_path, "show").out
    assert "ratings: ε 1.5 of 2.0 spent by 1 run, 0.5 left; δ 0.0 of 0.0\n" in shown
    assert "for a row that every run covers" in shown
    assert "detects it with probability at most 22.5 %" in shown  # 0.05 · exp(1.5), rounded up
    assert shown.splitlines()[1] == "  room for no more like the last release"
    head, line = shown.splitlines()[4:]
    assert head.split() == ["date", "job", "mechanism", "ε", "output", "state"]
    assert line.split()[2:] == ["bad-input", "dip", "1.5", str(tmp_path / "out"), "released"]
    assert re.match(r"  \d{4}-\d\d-\d\d \d\d:\d\d  bad-input", line)
    assert not re.search("[0-9a-f]{32}", line)
    chain = ledger(tmp_path, "show", "--entries").out
    assert chain.splitlines()[:4] == shown.splitlines()[:4]
    assert [line.split()[2] for line in chain.splitlines()[4:8]] == [
        "hold-out",
        "intend",
        "draw",
        "commit",
    ]
    summary = json.loads(ledger(tmp_path, "show", "--json").out)
    assert summary["balance"]["epsilon_spent"] == 1.5
    assert (
        json.loads(command(*with_ledger(tmp_path, "run", "1.5"), "--json").out)["balance"]
        == summary["balance"]
    )
    assert [entry["kind"] for entry in summary["entries"]] == [
        "hold-out",
        "intend",
        "draw",
        "commit",
    ]
    assert chain.endswith(f"  head {summary['head']}\n")
    assert ledger(tmp_path, "verify").out == "ratings: 4 entries, and the chain is intact\n"


KNOWN_DIP = {"kind": "dip", "reference": KNOWN}


@pytest.mark.parametrize(
    ("before", "changed", "code"),
    [
        ("", {}, 0),
        (
            "",
            {
                "privacy__delta": 1e-6,
                "mechanism": {"kind": "marginals", "cliques": [["rating"]]},
                "columns": COLUMNS | {"userId": {"role": "drop"}},
            },
            77,
        ),
        ("", {"output__path": "job.yaml/out"}, 73),
        ("a link", {}, 73),
        ("no rows", {}, 65),
        ("run", {}, 0),
        ("copy", {}, 66),
        ("run", {"output__path": "second"}, 77),
        ("crash", {}, 0),
        ("crash", {"privacy__epsilon": 0.25}, 73),
        ("crash and change", {}, 66),
        ("run", {"growing": True, "mechanism": KNOWN_DIP}, 0),
        ("run", {"growing": True, "mechanism": KNOWN_DIP, "privacy__epsilon": 0.25}, 73),
    ],
)
def test_plan_ends_as_run_would(before, changed, code, tmp_path):
    """The dataset has a budget of ε 1.5; a job of ε 1 has run before, or has begun."""
    ledger(tmp_path, "init", "--epsilon", "1.5", "--delta", "0")
    given = {"ledger": {"url": f"sqlite:///{tmp_path / 'ledger.db'}", "dataset": "ratings"}}
    first = job(
        tmp_path,
        **given,
        **{key: value for key, value in changed.items() if key in ("growing", "mechanism")},
    )
    with (
        mock.patch("dpdask.jobs.run.make_job_card", side_effect=TemporaryError("crash"))
        if "crash" in before
        else contextlib.nullcontext()
    ):
        if before.startswith(("run", "crash")):
            assert command(*first).code == (75 if "crash" in before else 0)
    if before == "a link":
        (tmp_path / ".out.dpdask").symlink_to(tmp_path / "data")
    parts = (
        {"part-0.parquet": table(0), "part-1.parquet": table(0)} if before == "no rows" else None
    )
    words = job(
        tmp_path,
        {"part-0.parquet": table(seed=5)} if "change" in before else parts,
        **given | changed,
    )
    if "copy" in before:
        shutil.copy(tmp_path / "data" / "part-0.parquet", tmp_path / "data" / "part-9.parquet")
    there = files(tmp_path)
    planned, as_json = command("plan", *words[1:]), command("plan", *words[1:], "--json")
    assert files(tmp_path) == there  # it changes nothing
    ran = command(*words)
    assert (planned.code, as_json.code, ran.code) == (code, code, code), planned.err + ran.err
    assert planned.lines == as_json.lines == ran.lines
    if before != "a link" and (
        "growing" not in changed or not code
    ):  # a folder that is not ours, or a series of another job, has no plan
        refusal = (
            {"exit_code": code, "why": ran.err.splitlines()[-1].removeprefix("dpdask: ")}
            if code
            else None
        )
        assert json.loads(as_json.out)["refusal"] == refusal
        assert planned.out.splitlines()[-1].startswith("  REFUSED   ") == bool(code)
    if "privacy__delta" in changed:
        assert planned.lines[-1].endswith("ask for less δ")


def test_a_tampered_ledger_is_found_and_named(tmp_path):
    ledger(tmp_path, "init", "--epsilon", "2", "--delta", "0")
    assert command(*with_ledger(tmp_path)).code == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute("UPDATE dpdask_entries SET epsilon = 0.5 WHERE sequence = 2")
    for verb in ("verify", "show"):
        ended = ledger(tmp_path, verb)
        assert (ended.code, ended.out, len(ended.lines)) == (65, "", 1)
        assert "the chain is broken: the entry 2 was changed" in ended.err


LEDGER_HERE = "--url sqlite:///{folder}/x.db --dataset a"


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("", 2, "Usage"),
        ("show", 2, "--url"),
        (f"init {LEDGER_HERE}", 2, "--epsilon"),
        (f"init {LEDGER_HERE} --epsilon 1", 2, "--delta"),
        (f"init {LEDGER_HERE} --epsilon 0 --delta 0", 64, "allows no release"),
        (f"init {LEDGER_HERE} --epsilon -1 --delta 0", 64, "out of its range"),
        (f"init {LEDGER_HERE} --epsilon nan --delta 0", 64, "out of its range"),
        (
            "init --url sqlite:///{folder}/no/x.db --dataset a --epsilon 1 --delta 0",
            64,
            "folder of the ledger",
        ),
        (f"show {LEDGER_HERE}", 64, "there is no ledger here"),
        ("verify --url mysql://x/y --dataset a", 64, "an SQLite or a PostgreSQL URL"),
    ],
)
def test_ledger_verbs_that_cannot_be(given, code, says, tmp_path):
    ended = command("ledger", *given.format(folder=tmp_path).split())
    assert ended.code == code
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert list(tmp_path.iterdir()) == []


def test_audit_as_text_and_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(
        auditing,
        "audit_event",
        functools.partial(audit_event, rng=stream(RunKey.insecure(1), "audit", "")),
    )
    given = words(tmp_path, "audit", "--runs", "2000")
    ended = command(*given)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("bad-input: sound\n  rating: ε* = ")
    assert " of 0.5 claimed, for a uniform stand-in\n" in ended.out
    found = json.loads(
        command(*given, "--json", "--set", "mechanism.reference={kind: histogram}").out
    )
    assert set(found) == {"name", "columns", "row", "measurements", "sound"}
    assert found["row"] is None
    assert (found["sound"], set(found["columns"]), len(found["measurements"])) == (
        True,
        {"rating", "price"},
        2,
    )
    assert (
        "histogram noise of scale 40: at least ε = "
        in command(*given, "--set", "mechanism.reference={kind: histogram}").out
    )
    assert not (tmp_path / "out").exists()
    assert command(*words(tmp_path, "audit", "--runs", "10")).code == 2


def test_an_audit_that_finds_too_much_says_so(tmp_path, monkeypatch):
    fit = columns.fit_dip
    monkeypatch.setattr(
        columns,
        "fit_dip",
        lambda r, c, e, *rest: fit(r, c, {name: 3 * part for name, part in e.items()}, *rest),
    )
    assert command(*words(tmp_path, "audit")).out.startswith(
        "bad-input: NOT SOUND: an ε is above its claim\n"
    )


def test_run_as_json_and_again(tmp_path):
    given = words(tmp_path, "run", "--json", "--set", "insecure_seed=5")
    first = command(*given)
    found = json.loads(first.out)
    assert {key: type(value) for key, value in found.items()} == {
        "status": str,
        "output": str,
        "rows": int,
        "shards": int,
        "bytes": int,
        "epsilon": float,
        "delta": int,
        "balance": type(None),
        "protected": str,
        "unprotected": str,
        "insecure": bool,
        "warnings": list,
        "quality": str,
    }
    assert found["delta"] == 0
    assert (found["status"], found["insecure"], found["shards"]) == ("released", True, 1)
    assert found["bytes"] == (tmp_path / "out" / "part-00000.parquet").stat().st_size
    assert first.out.count("\n") == 1
    again = command(*given)
    assert found["quality"].startswith("rating is unchanged in ")
    assert json.loads(again.out) == found | {"status": "already released", "quality": ""}
    assert (again.code, again.err) == (0, "")


def test_progress_is_json_lines_on_stderr(tmp_path):
    lines = progress(command(*words(tmp_path, "run")))
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    steps, stages = ([line for line in lines if kind in line] for kind in ("step", "stage"))
    assert {"looking at the input", "fitting", "publishing"} <= {line["step"] for line in steps}
    assert all(set(line) == {"time", "step"} for line in steps)
    assert {line["stage"] for line in stages} == {"survey", "write"}
    assert all({"time", "stage", "done", "total", "seconds"} <= set(line) for line in stages)
    for stage in ("survey", "write"):
        found = [(line["done"], line["total"]) for line in stages if line["stage"] == stage]
        assert found[0][0] == 0
        assert found[-1][0] == found[-1][1]


@pytest.mark.parametrize(
    ("mechanism", "passes"),
    [
        (
            {"kind": "copula", "n_rows": 10, "target": "rating", "triples": 1},
            ["search", "tabulate", "choose"],
        ),
        (
            {"kind": "dip", "reference": {"kind": "tree"}, "channel": "optimal"},
            ["search", "survey"],
        ),
    ],
    ids=["copula", "tree"],
)
def test_progress_names_the_passes_as_the_plan_does(tmp_path, mechanism, passes):
    given = {
        "mechanism": mechanism,
        "privacy__delta": 1e-6,
        "columns": COLUMNS | {"userId": {"role": "drop"}, "cost": COLUMNS["price"]},
    }
    parts = {"part-0.parquet": table().append_column("cost", table().column("price"))}
    planned = json.loads(command(*job(tmp_path, parts, "--json", verb="plan", **given)).out)
    found = [
        line["stage"]
        for line in progress(command(*job(tmp_path, parts, **given)))
        if "stage" in line
    ]
    assert list(dict.fromkeys(found)) == [*passes, "write"]
    assert [stage.partition(":")[0] for stage in planned["stages"]] == [
        *passes,
        "fit",
        "write",
        "commit",
    ]


def test_progress_may_be_plain_lines(tmp_path):
    ended = command(*words(tmp_path, "run", "--log-format", "text"))
    plain = [line.partition(" ")[2] for line in ended.err.splitlines()]
    assert plain[0] == "looking at the input"
    written = [line for line in plain if line.startswith("write: ")]
    assert written[0] == "write: 0/1"
    assert re.fullmatch(r"write: 1/1(, [\d,]+ rows/s)?, in 0:00:\d\d", written[-1])


def test_run_as_text_says_what_is_promised(tmp_path):
    ended = command(*words(tmp_path, "run"))
    assert ended.code == 0
    assert "bad-input: released\n" in ended.out
    assert "Not protected: the held-out rows" in ended.out
    assert "INSECURE" not in ended.out
    assert "bad-input: already released\n" in command(*words(tmp_path, "run")).out
    assert (
        "INSECURE: seeded, protects nobody"
        in command(
            *words(tmp_path, "run", "--set", "insecure_seed=1", "--set", "output.path=seeded")
        ).out
    )


@pytest.mark.filterwarnings("ignore:unclosed")
def test_settings_change_what_they_name(tmp_path):
    found = json.loads(
        command(
            *words(
                tmp_path,
                "run",
                "--json",
                "--set",
                "privacy.epsilon=1e-1",
                "--set",
                "output.path=else where/ö",
                "--set",
                "output.rows_per_shard=50",
            )
        ).out
    )
    assert found["epsilon"] == 0.1
    assert found["shards"] > 3
    assert (tmp_path / "else where" / "ö" / "_SUCCESS").exists()


def test_status_and_abort(tmp_path):
    given, out = words(tmp_path, "run"), str(tmp_path / "out")

    def state():
        return json.loads(command("status", out, "--json").out)

    assert state() == {
        "stage": "absent",
        "n_shards": 0,
        "n_releases": 0,
        "n_missing": 0,
        "n_hidden": 0,
    }
    assert command("abort", out).out == f"{out}: there is no unfinished run\n"
    for verb in ("status", "abort"):  # not "absent"
        ended = command(verb, str(tmp_path / "job.yaml"))
        assert (ended.code, f"dpdask {verb} --job" in ended.lines[0]) == (2, True)
    with mock.patch(
        "dpdask.jobs.run.make_job_card",
        side_effect=TemporaryError("crash", None, "run again to resume"),
    ):
        ended = command(*given)
    assert (ended.code, ended.lines) == (75, ["dpdask: crash; run again to resume"])
    assert state() == {
        "stage": "fitted",
        "n_shards": 1,
        "n_releases": 0,
        "n_missing": 0,
        "n_hidden": 0,
    }
    assert command("status", out).out == f"{out}: fitted, 1 shard\n"
    assert command("status", "--job", given[1]).out == f"{given[1]}: fitted, 1 shard\n"
    assert command("abort", out).out == f"{out}: the unfinished run is removed\n"
    assert state() == {
        "stage": "absent",
        "n_shards": 0,
        "n_releases": 0,
        "n_missing": 0,
        "n_hidden": 0,
    }
    assert command(*given).code == 0
    assert state() == {
        "stage": "released",
        "n_shards": 1,
        "n_releases": 1,
        "n_missing": 0,
        "n_hidden": 0,
    }
    refused = command("abort", out)
    assert (refused.code, len(refused.lines)) == (73, 1)
    assert "released already" in refused.err


EVIL = "\x1b]0;pwned\x07 \x9b31m\r\x7f"
SHOWN = r"\u001b]0;pwned\u0007 \u009b31m\u000d\u007f"


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    column = f"price{EVIL}"
    parts = {"part-0.parquet": table().rename_columns({"price": column})}
    columns = {(column if name == "price" else name): value for name, value in COLUMNS.items()}
    verbs = {
        verb: job(tmp_path, parts, columns=columns, verb=verb, name=EVIL)
        for verb in ("validate", "plan", "run")
    }
    out = str(tmp_path / "out")
    verbs["plan as JSON"] = [*verbs["plan"], "--json"]
    ended = {name: command(*given) for name, given in verbs.items()}
    ended["status"] = command("status", f"{out}{EVIL}")
    ended["init"] = command("init", str(tmp_path / "data"))
    ended["no job"] = command("plan", str(tmp_path / EVIL))
    for name, each in ended.items():
        assert each.code == (64 if name == "no job" else 0), name
        assert not [
            letter
            for letter in each.out + each.err
            if unicodedata.category(letter) == "Cc" and letter != "\n"
        ], name
    for name in ("validate", "plan", "run", "status"):
        assert SHOWN in ended[name].out, name
    assert json.loads(ended["plan as JSON"].out)["name"] == EVIL
    assert column in yaml.safe_load(ended["init"].out)["columns"]


def test_shards_that_are_missing_are_told(tmp_path):
    given, out = words(tmp_path, "run", "--set", "output.rows_per_shard=50"), str(tmp_path / "out")
    assert command(*given).code == 0
    shards = sorted((tmp_path / "out").glob("part-*.parquet"))
    assert command("status", out).out == f"{out}: released, {len(shards)} shards\n"
    shards[1].unlink()
    assert (
        command("status", out).out
        == f"{out}: released, {len(shards)} shards; missing shards: 1; restore them from a copy\n"
    )
    again = command(*given)
    assert again.code == 0
    assert f"WARNING   missing shards: 1 of {len(shards)}; restore them from a copy" in again.out
    (tmp_path / "out" / "_delta_log").mkdir()  # other programs may rewrite the files of a table
    assert command("status", out).out == f"{out}: released, {len(shards)} shards\n"


def test_status_takes_a_relative_path_and_one_with_a_slash(tmp_path, monkeypatch):
    assert command(*words(tmp_path, "run")).code == 0
    monkeypatch.chdir(tmp_path)
    assert command("status", "out/").out == "out/: released, 1 shard\n"


def test_simulate(tmp_path):
    out = str(tmp_path / "ratings")
    ended = command(
        "simulate",
        "movielens",
        "--rows",
        "1000",
        "--users",
        "20",
        "--rows-per-file",
        "400",
        "--out",
        out,
    )
    assert ended.code == 0
    assert ended.out == f"{out}: 1,000 simulated ratings of 20 users in 3 files\n"
    last = progress(ended)[-1]
    assert (last["stage"], last["done"], last["total"]) == ("simulate", 3, 3)
    assert command("simulate", "movielens", "--rows", "1000", "--out", out).code == 73
    assert command("simulate", "movielens", "--rows", "-1", "--out", str(tmp_path / "b")).code == 2
    assert (
        command("simulate", "movielens", "--rows", "many", "--out", str(tmp_path / "b")).code == 2
    )


# ---- exit codes


def test_an_interruption_ends_with_130_and_a_resume_works(tmp_path):
    given = words(tmp_path, "run")
    with mock.patch("dpdask.jobs.run.make_job_card", side_effect=click.Abort()):
        ended = command(*given)
    assert (ended.code, ended.lines) == (130, ["dpdask: interrupted; run again to resume"])
    assert (tmp_path / ".out.dpdask" / "run.key").exists()
    assert command(*given).code == 0


def test_a_defect_shows_its_type_alone(tmp_path):
    with mock.patch("dpdask.jobs.run.make_job_card", side_effect=RuntimeError("Zebulon-Quux")):
        ended = command(*words(tmp_path, "run"))
    assert ended.code == 70
    [line] = ended.lines
    assert line.startswith("dpdask: RuntimeError; this is a defect of dpdask")
    assert "Zebulon" not in ended.err


def test_debug_shows_where(tmp_path):
    with mock.patch("dpdask.jobs.run.make_job_card", side_effect=TemporaryError("crash")):
        ended = command("--debug", *words(tmp_path, "run"))
    assert (ended.code, ended.lines[0], ended.lines[-1]) == (
        75,
        "Traceback (most recent call last):",
        "dpdask: crash",
    )
    assert any("in _release" in line for line in ended.lines)


def test_no_words_give_the_help_and_2():
    ended = command()
    assert ended.code == 2
    assert "Usage: " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("given", [["--help"], ["-h"], ["run", "--help"], ["simulate", "-h"]])
def test_help_is_the_result(given):
    ended = command(*given)
    assert ended.code == 0
    assert ended.out.startswith("Usage: ")
    assert not ended.err


def test_version():
    ended = command("--version")
    assert (ended.code, ended.err) == (0, "")
    assert __version__ in ended.out


# ---- as a verb of dask


def test_it_is_a_verb_of_dask_by_its_name():
    from importlib.metadata import entry_points

    [entry] = [
        entry for entry in entry_points(group="dask_cli") if entry.value.startswith("dpdask.")
    ]
    assert entry.load() is cli
    assert cli.name == "dpdask"  # dask takes the group's own name


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["run", "nowhere.yaml"], 64),
        (["rnu"], 2),
        (["status", "nosuch://x"], 64),
        (["status", "/tmp"], 0),
    ],
)
def test_dask_dpdask_ends_with_the_same_codes(given, code):
    @click.group()
    def dask_():
        pass

    dask_.add_command(cli)
    ended = CliRunner().invoke(dask_, ["dpdask", *given])
    assert ended.exit_code == code
    assert "Traceback" not in ended.output
    assert (ended.stderr.count("\n") == 1) == bool(code)


def test_a_demo_releases_a_table_and_names_the_page_to_open(tmp_path):
    ended = command("demo", str(tmp_path / "demo"))
    assert ended.code == 0, ended.err
    released = tmp_path / "demo" / "released"
    assert "ratings: released\n" in ended.out
    assert "Protected: the values of all rows" in ended.out
    *_, result, last = ended.out.splitlines()
    assert f"Open {released / '_dpdask' / 'release.html'}: " in last
    assert (released / "_dpdask" / "release.html").is_file()
    found = re.search(r"mean rating (\S+), 95 % interval (\S+) to (\S+),", result)
    assert found is not None
    estimate, low, high = map(float, found.groups())
    true = pd.read_parquet(tmp_path / "demo" / "ratings")["rating"].mean()
    error = (high - low) / 2 / 1.96
    assert low < estimate < high
    assert abs(estimate - true) < 6 * error < 0.05
    again = command("demo", str(tmp_path / "demo"))
    assert "ratings: already released\n" in again.out
    (tmp_path / "file").write_text("")
    assert command("demo", str(tmp_path / "file")).code == 73
