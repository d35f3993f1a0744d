"""Drivers that are killed at each stage, for each mechanism and each output: the same bytes, one charge, nothing half-visible."""

import base64
import hashlib
import json
import signal
from itertools import product
from pathlib import Path

import pytest
from e2e.helpers import (
    MIXED_SCHEMA,
    SEED,
    charged_kinds,
    charging_entries,
    hidden,
    lake,
    run_here,
    write_job,
)
from faults.driver import MECHANISMS as DRAWING
from faults.driver import POINTS
from few import choose_few
from pyiceberg.catalog import load_catalog
from services.stores import everything_ever_written

from dpdask.engine.account import open_ledger
from dpdask.io.shards import Manifest, list_manifests
from dpdask.jobs.run import abort, status
from dpdask.privacy.ledger import KeyTable

RECORDS = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
LEVELS = {
    name: column if name in ("userId", "rating", "genre") else {"role": "drop"}
    for name, column in MIXED_SCHEMA.items()
}
TREE = {
    "mechanism": {"kind": "dip", "reference": {"kind": "tree"}},
    "privacy__epsilon": 30.0,
    "schema": LEVELS,
}
MECHANISMS = {  # those that a ledger's own hold-out does not change, at δ = 0: a driver prices them at once
    "columns": {
        "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "laplace"}
    },
    "tree": TREE,
    "tree of persons": {**TREE, "privacy__unit": {"column": "userId", "max_rows": 5}},
    "copula": {"mechanism": {"kind": "copula", "bins": 5, "n_rows": 1000}, "schema": RECORDS},
    "marginals": {
        "mechanism": {
            "kind": "marginals",
            "cliques": [["rating"], ["genre", "price"], ["amount", "age", "rating"]],
            "bins": 8,
        }
    },
}
MECHANISMS["marginals"]["schema"] = RECORDS
PERSONS = {
    "mechanism": {"kind": "copula", "persons": True, "bins": 3},
    "privacy__unit": {"column": "userId", "max_rows": 3},
    "privacy__delta": 1e-9,
    "schema": {**LEVELS, "userId": {"role": "drop"}},
}
GIVEN = {**MECHANISMS, "persons": PERSONS}
OUTPUTS = ("folder", "delta", "iceberg", "store", "delta in a store")
TABLE = "db.people"

BEFORE_CHARGE = ("opened", "surveying", "counted", "counts-kept")
UNSEEN = ("intended", "drawn", "noise-kept", "surveyed", "release-fitted", "release-written")
STAGED = (
    "fitted",
    "first-shard-begun",
    "shard-half-written",
    "shard-unrecorded",
    "task-staged",
    "some-shards",
    "all-shards",
)
ENDED = ("uncommitted", "committed", "removed")
LOCAL = ("locked", "key-written")
REMOTE = ("acquired", "recorded")
FOLDER = ("card-written", "manifest-staged", "success-staged", "staged", "before-move")
TABLES = ("card-written", "manifest-staged", "staged")
BEFORE = {
    "folder": (*LOCAL, *FOLDER),
    "delta": (*LOCAL, *TABLES, "entry-unwritten"),
    "iceberg": (*LOCAL, *TABLES, "catalog-unasked"),
    "store": (*REMOTE, "card-created"),
    "delta in a store": (*REMOTE, *TABLES, "entry-unwritten"),
}
AFTER = {
    "folder": ("after-move", "key-removed", "half-removed"),
    "delta": ("entry-written", "key-removed"),
    "iceberg": ("catalog-asked", "key-removed"),
    "store": ("manifest-created", "success-staged", "run-cleared"),
    "delta in a store": ("entry-written", "run-cleared"),
}
LATE = ("committed", "removed", "half-removed", "run-cleared")
LAST = {("store", "success-staged")}  # in a store `_SUCCESS` comes after the ledger was told
EARLY = (*LOCAL, *REMOTE, "bounded", *BEFORE_CHARGE)


def cases():
    """Return each mechanism, output and stage; by default as few as hold each mechanism at each local output, and each stage."""
    found = []
    for mechanism, output in product(MECHANISMS, OUTPUTS):
        points = (*BEFORE_CHARGE, *UNSEEN, *STAGED, *ENDED, *BEFORE[output], *AFTER[output])
        found += [
            (mechanism, output, point)
            for point in (*points, *(["bounded"] if "persons" in mechanism else []))
        ]
    few = choose_few(
        [{"place": case[1] if "store" in case[1] else case[:2], "point": case[2]} for case in found]
    )
    return [
        pytest.param(*case, id="-".join(case), marks=() if number in few else pytest.mark.slow)
        for number, case in enumerate(found)
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 500, 40, 300])


@pytest.fixture(scope="module")
def quiet(source, tmp_path_factory):
    """The digests of the shards of runs that nobody disturbs."""
    found = {}
    for name, given in GIVEN.items():
        base = tmp_path_factory.mktemp("quiet")
        outcome = run_here(
            write_job(base, source, base / "out", output__rows_per_shard=150, **given)
        )
        found[name] = [shard.sha256 for shard in outcome.manifest.shards]
        assert len(found[name]) >= 4 or name == "persons"
    return found


class Run:
    """A job with a ledger, where its output is, and the drivers that run it."""

    def __init__(self, mechanism, output, store, source, folder, drivers):
        self.output, self.store, self.folder, self._drivers = output, store, store.folder, drivers
        self.ledger = {"url": f"sqlite:///{folder / 'ledger.db'}", "dataset": "people"}
        open_ledger(self.ledger["url"]).init("people", 30.0, 1e-6)
        self.around = {
            "XDG_STATE_HOME": str(folder / "state"),
            **(store.server.environment() if store.server else {}),
        }
        given = {
            "ledger": self.ledger,
            "insecure_seed": SEED,
            "output__path": store.folder.url,
            "output__rows_per_shard": 150,
        }
        self.catalog = {"name": "lake", "type": "sql", "uri": f"sqlite:///{folder / 'catalog.db'}"}
        if "delta" in output:
            given["output__format"] = "delta"
        if output == "iceberg":
            load_catalog(**self.catalog).create_namespace("db")
            given |= {
                "output__format": "iceberg",
                "output__table": TABLE,
                "output__catalog": self.catalog,
            }
        self.job = write_job(folder / "job", source, folder, **given, **GIVEN[mechanism])

    def kill(self, point):
        assert (
            self._drivers.run("run", self.job, point=point, environment=self.around)[0]
            == -signal.SIGKILL
        ), point

    def terminate(self, point, strike):
        code, text = self._drivers.run(
            "run", self.job, point=point, strike=strike, environment=self.around
        )
        assert (code, text) == (143, "dpdask: terminated; run again to resume"), point

    def end(self):
        code, text = self._drivers.run("run", self.job, environment=self.around)
        assert code == 0
        return text

    def abort(self):
        return self._drivers.run("abort", "--job", self.job, environment=self.around)[0]

    def kinds(self):
        return charged_kinds(**self.ledger)

    def check_released(self, quiet):
        """Check that there is one release, of the right bytes, for one charge, and nothing else."""
        manifests = [
            manifest for manifest in (Manifest.read(self.folder),) if manifest
        ] or list_manifests(self.folder)
        [manifest] = manifests
        assert [shard.sha256 for shard in manifest.shards] == quiet
        names = {shard.name for shard in manifest.shards}
        if manifest.tables:
            self.check_tables(manifest)
            return
        last = {"folder": "_SUCCESS", "store": "_SUCCESS", "iceberg": "metadata"}.get(
            self.output, "_delta_log"
        )
        assert set(self.folder.names()) == names | {"_dpdask", last}
        if last == "_delta_log":
            assert len(self.folder.child("_delta_log").names()) == 1
            documents = self.folder.child("_dpdask").names()
            assert len(documents) == 4 + any(name.startswith("measured") for name in documents)
        if last == "metadata":
            table = load_catalog(
                **self.catalog, **{"py-io-impl": "dpdask.io.iceberg_files.StoreFiles"}
            ).load_table(TABLE)
            assert len(table.snapshots()) == 1
            assert {
                task.file.file_path.rpartition("/")[2] for task in table.scan().plan_files()
            } == names
        self.check_charged()

    def check_tables(self, manifest):
        """Check that each of two tables holds its shards, in one version, and nothing else."""
        log = {"delta": "_delta_log", "iceberg": "metadata"}.get(self.output.split()[0])
        folders = {f"table={table}" for table in manifest.tables}
        assert set(self.folder.names()) == folders | {"_dpdask", "_SUCCESS"}
        for table, part in manifest.tables.items():
            names = {shard.name.partition("/")[2] for shard in part.shards}
            inside = self.folder.child(f"table={table}")
            assert set(inside.names()) == names | ({log} - {None})
            if log == "_delta_log":
                assert inside.child(log).names() == [f"{0:020}.json"]
            if log == "metadata":
                found = load_catalog(**self.catalog).load_table(f"{TABLE}_{table}")
                assert len(found.snapshots()) == 1
                files = [task.file.file_path for task in found.scan().plan_files()]
                assert {each.rpartition("/")[2] for each in files} == names
        self.check_charged()

    def check_charged(self):
        """Check that the run has ended, and was charged once."""
        assert not self.folder.sibling(".", ".dpdask").exists()
        assert self.kinds() == ["intend", "commit"]
        assert open_ledger(self.ledger["url"]).verify("people")


@pytest.fixture
def start(open_store, source, drivers, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    opened = []

    def begin(mechanism, output):
        opened.append(
            open_store("radosgw", versioned=True) if "store" in output else open_store("local")
        )
        return Run(mechanism, output, opened[0].__enter__(), source, tmp_path, drivers)

    yield begin
    for store in opened:
        store.__exit__(None, None, None)


@pytest.mark.matrix("driver killed", "{mechanism}, {output}")
@pytest.mark.parametrize(("mechanism", "output", "point"), cases())
def test_a_killed_run_goes_on_to_the_same_bytes_at_one_charge(
    mechanism, output, point, start, quiet
):
    assert point in POINTS
    run = start(mechanism, output)
    run.kill(point)
    published = point in (*ENDED, *AFTER[output])
    assert (status(run.folder.url).stage == "released") == published
    is_told = point in LATE or (output, point) in LAST
    assert run.kinds() == (
        [] if point in EARLY else ["intend", "commit"] if is_told else ["intend"]
    )
    if output == "folder" and not published:
        assert not run.folder.exists()
        assert Path(run.folder.sibling(".", ".dpdask").local_path).stat().st_mode & 0o777 == 0o700
    secrets = [
        KeyTable(run.ledger["url"]).read(entry.run_id)
        for entry in charging_entries(**run.ledger)[:1]
    ]
    assert ("already released" in run.end()) == published
    run.check_released(quiet[mechanism])
    if run.store.server is not None:
        written = b"\n".join(data for _, data in everything_ever_written(run.store))
        assert not any(
            form in written
            for key in secrets
            if key
            for form in (key, key.hex().encode(), base64.b64encode(key))
        )


COMMITTING = ("first-unwritten", "first-committed", "second-unwritten", "second-committed")


def cases_of_persons():
    """Return each output and stage of a job of persons; by default those between the commits of two tables, and others at one output each."""
    found = []
    for output in OUTPUTS:
        is_table = output not in ("folder", "store")
        own = COMMITTING if is_table else ()
        before = ("noise-kept", "fitted", "one-table-staged", "all-shards", *own)
        after = ("uncommitted", "committed", *(["manifest-created"] if output != "folder" else []))
        found += [(output, point, point in after) for point in (*before, *after)]
    few = choose_few(
        [{"output": output, "point": point} for output, point, _ in found if "store" not in output]
    )
    return [
        pytest.param(*case, id="-".join(case[:2]), marks=() if number in few else pytest.mark.slow)
        for number, case in enumerate(sorted(found, key=lambda case: "store" in case[0]))
    ]


@pytest.mark.matrix("driver killed", "persons, {output}")
@pytest.mark.parametrize(("output", "point", "published"), cases_of_persons())
def test_a_killed_run_of_persons_is_one_release_of_two_tables(
    output, point, published, start, quiet
):
    run = start("persons", output)
    run.kill(point)
    state = status(run.folder.url)
    assert (state.stage == "released") == published
    assert state.n_missing == 0
    if not published:  # whatever the logs of the tables hold by now
        assert not list_manifests(run.folder)
        assert "_SUCCESS" not in run.folder.names()
    is_told = point == "committed" or (output, point) in LAST
    assert run.kinds() == (["intend", "commit"] if is_told else ["intend"])
    assert ("already released" in run.end()) == published
    run.check_released(quiet["persons"])


@pytest.mark.matrix("aborted", "persons, {output}")
@pytest.mark.parametrize(
    ("output", "point"),
    [
        pytest.param(
            output, point, marks=() if output in few else pytest.mark.slow, id=f"{output}-{point}"
        )
        for point, few in (
            ("first-committed", ("delta", "iceberg")),
            ("second-committed", ()),
            ("one-table-staged", ("delta",)),
        )
        for output in ("delta", "iceberg", "delta in a store")
    ],
)
def test_an_aborted_run_of_persons_leaves_neither_table(output, point, start, quiet):
    run = start("persons", output)
    run.kill(point)
    assert run.abort() == 0
    assert not [name for name in run.folder.names() if name.startswith("table=")]
    assert not run.folder.sibling(".", ".dpdask").exists()
    run.end()
    [first, *_] = run.kinds()
    assert (first, run.kinds().count("commit")) == ("intend", 1)
    [manifest] = list_manifests(run.folder)
    assert [shard.sha256 for shard in manifest.shards] == quiet["persons"]


def terminations():
    """Return each output and stage; by default each stage at one output, and the last ones in a store."""
    found = []
    for output in OUTPUTS:
        points = (*BEFORE_CHARGE, *UNSEEN, *STAGED, *ENDED, *BEFORE[output], *AFTER[output])
        found += [(output, point) for point in points]
    few = choose_few([{"output": output, "point": point} for output, point in found], 12)
    always = {("store", point) for point in ("counts-kept", "some-shards", "card-created")}
    always |= {("folder", "before-move"), ("store", "manifest-created")}
    return [
        pytest.param(
            *case,
            id="-".join(case),
            marks=() if case in always else pytest.mark.more if number in few else pytest.mark.slow,
        )
        for number, case in enumerate(found)
    ]


@pytest.mark.matrix("SIGTERM", "{output}, {strike}")
@pytest.mark.parametrize(
    "strike", ["terminate", pytest.param("terminate again and again", marks=pytest.mark.more)]
)
@pytest.mark.parametrize(("output", "point"), terminations())
def test_a_terminated_run_cleans_up_and_goes_on_to_the_same_bytes_at_one_charge(
    output, point, strike, start, quiet
):
    run = start("columns", output)
    run.terminate(point, strike)
    hidden = run.folder.sibling(".", ".dpdask")
    if run.store.server is not None:  # nobody has the run, so that any machine goes on at once
        assert not [name for name in hidden.names() if name.startswith("beat-")]
        assert _find_owner(hidden) is None
    published = point in (*ENDED, *AFTER[output])
    assert ("already released" in run.end()) == published
    run.check_released(quiet["columns"])


def _find_owner(hidden):
    """Return the driver that the newest record of a run in a store names; None if there is none."""
    records = sorted(name for name in hidden.names() if name.startswith("run-"))
    last = records[-1:] or [name for name in hidden.names() if name == "run.json"]
    return json.loads(hidden.read(last[0]))["owner"] if last else None


@pytest.mark.matrix("driver killed in each stage", "{mechanism}, {output}")
@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_killed_again_and_again(mechanism, output, start, quiet):
    run = start(mechanism, output)
    for point in (*BEFORE_CHARGE, *UNSEEN, *STAGED):
        run.kill(point)
        assert status(run.folder.url).stage != "released", point
    run.end()
    run.check_released(quiet[mechanism])


@pytest.mark.few(2)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_secure_noise_that_was_kept_is_never_drawn_again(
    mechanism, drivers, source, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    job = write_job(
        tmp_path / "job",
        source,
        out,
        insecure_seed=None,
        output__rows_per_shard=150,
        **MECHANISMS[mechanism],
    )
    release, noisy = hidden(out) / "release.npz", hidden(out) / "noisy.npz"
    assert drivers.run("run", job, point="noise-kept")[0] == -signal.SIGKILL
    drawn = noisy.read_bytes()
    assert noisy.stat().st_mode & 0o777 == 0o600
    assert drivers.run("run", job, point="fitted")[0] == -signal.SIGKILL
    fitted = release.read_bytes()
    assert release.stat().st_mode & 0o777 == 0o600
    assert (
        json.loads((hidden(out) / "run.json").read_text())["release_sha256"]
        == hashlib.sha256(fitted).hexdigest()
    )
    for point in ("shard-unrecorded", "staged"):
        assert drivers.run("run", job, point=point)[0] == -signal.SIGKILL
        assert (release.read_bytes(), noisy.read_bytes()) == (fitted, drawn)
    for owner in DRAWING:
        monkeypatch.setattr(owner, "draw", lambda *_, **__: pytest.fail("noise was drawn again"))
    assert run_here(job).status == "released"


@pytest.mark.few(2)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_kept_release_that_was_changed_is_refused(mechanism, drivers, source, tmp_path):
    out = tmp_path / "out"
    job = write_job(tmp_path / "job", source, out, **MECHANISMS[mechanism])
    drivers.run("run", job, point="fitted")
    release = hidden(out) / "release.npz"
    release.write_bytes(release.read_bytes()[:-1] + b"x")
    code, line = drivers.run("run", job)
    assert (code, "not " in line, line.count("\n")) == (66, True, 0), line
    assert "abort the run and begin again" in line
    assert not out.exists()
    assert abort(out.as_uri())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change",
    [
        {"privacy__epsilon": 2.0},
        {"privacy__delta": 1e-9},
        {"schema": {**LEVELS, "genre": {"role": "drop"}}},
    ],
    ids=str,
)
def test_kept_noise_of_another_run_is_refused(change, source, drivers, tmp_path):
    for name, given in (("there", change), ("here", {})):
        job = write_job(tmp_path / name, source, tmp_path / name / "out", **{**TREE, **given})
        assert drivers.run("run", job, point="noise-kept")[0] == -signal.SIGKILL
    (hidden(tmp_path / "here" / "out") / "noisy.npz").write_bytes(
        (hidden(tmp_path / "there" / "out") / "noisy.npz").read_bytes()
    )
    code, line = drivers.run("run", job)
    assert (code, "by another version of dpdask" in line) == (66, True), line
    assert not (tmp_path / "here" / "out").exists()


def test_a_file_that_changed_between_counting_and_writing_is_refused(source, drivers, tmp_path):
    job = write_job(tmp_path, source, tmp_path / "out", **TREE)
    assert drivers.run("run", job, point="fitted")[0] == -signal.SIGKILL
    record = hidden(tmp_path / "out") / "run.json"
    content = json.loads(record.read_text())
    assert len(content["seals"]) >= 6  # every fragment was sealed when it was counted
    record.write_text(json.dumps({**content, "seals": ["00" * 16, *content["seals"][1:]]}))
    code, line = drivers.run("run", job)
    assert (code, "this file changed since the run began" in line) == (66, True), line
