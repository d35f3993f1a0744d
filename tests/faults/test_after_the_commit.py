"""Once a release is published nothing fails: whatever cannot be tidied up is a warning, and the next run does it."""

import json
from contextlib import contextmanager

import pytest
from e2e.growing import KNOWN, add_day
from e2e.growing import job as growing_job
from e2e.helpers import (
    RATINGS_SCHEMA,
    call_cli,
    charging_entries,
    error_line,
    hidden,
    lake,
    run_here,
    write_job,
)
from services.stores import in_environment

from dpdask.connect import private
from dpdask.engine.account import Account, open_ledger
from dpdask.errors import InputError, OutputError, TemporaryError
from dpdask.io import storage
from dpdask.io.storage import KEY_NAME, Folder, open_filesystem
from dpdask.jobs import output
from dpdask.jobs.run import status
from dpdask.privacy.ledger import KeyTable

ERRORS = {
    "refused": lambda: OutputError("nobody may do this"),
    "busy": lambda: TemporaryError("the store is busy"),
    "a library's": lambda: RuntimeError("a value of a row"),
}
OUTPUTS = (output.LocalFolder, output.StoreFolder, output.PublishedTable)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90], schema=RATINGS_SCHEMA)


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(made).init("ratings", 1e4)
    return made


class Faults:
    """Counts what is done with files after the commit, and lets one of these acts fail."""

    def __init__(self, patch, number, error):
        self.committed, self.count, self.number, self.error = False, 0, number, error
        for class_ in OUTPUTS:
            self._watch(patch, class_)
        call, whole = storage.call_storage, storage.Folder.open_replacement

        def calling(url, act, **rest):
            self.act()
            return call(url, act, **rest)

        @contextmanager
        def replacing(folder, name, mode=0o666):
            if folder.is_local:  # else it is a call
                self.act()
            with whole(folder, name, mode) as file:
                yield file

        patch.setattr(storage, "call_storage", calling)
        patch.setattr(storage.Folder, "open_replacement", replacing)

    def _watch(self, patch, class_):
        commit = class_.commit

        def committing(publication, *given):
            commit(publication, *given)
            self.committed = True

        patch.setattr(class_, "commit", committing)

    def act(self):
        if self.committed:
            self.count += 1
            if self.count == self.number:
                raise self.error()


def written(case, tmp_path, source, url):
    given = {"schema": RATINGS_SCHEMA, "ledger": {"url": url, "dataset": "ratings"}}
    if case == "delta":
        return write_job(tmp_path, source, tmp_path / "out", **given, output__format="delta")
    if case == "growing":
        add_day(tmp_path / "in", 0)
        return growing_job(tmp_path, tmp_path / "in", KNOWN, ledger=given["ledger"])
    return write_job(tmp_path, source, tmp_path / "out", **given)


def fail_each(make, case, error, url, monkeypatch):
    """Run a job once for each act after the commit, which fails; return how many acts there are."""
    number, warned = 0, 0
    while True:
        number += 1
        job, out = make(number)
        with monkeypatch.context() as patch:
            faults = Faults(patch, number, ERRORS[error])
            outcome = run_here(job)
        assert outcome.status == "released"
        if faults.count < number:
            assert not any("the release is published" in each for each in outcome.warnings)
            return number - 1, warned
        told = [
            each for each in outcome.warnings if each.startswith("the release is published, but")
        ]
        warned += len(told) > 0
        assert "a value of a row" not in str(outcome.warnings)
        [again] = [run_here(job).status]
        assert again == ("nothing new" if case == "growing" else "already released")
        assert status(out.url)[0] == "released"
        beside = out.sibling(".", ".dpdask")
        assert not beside.names(), (number, told, beside.names())
        assert out.exists("_SUCCESS") == (case != "delta")
        entries = charging_entries(url, "ratings")
        assert [entry.kind for entry in entries] == ["intend", "commit"] * number
        assert not KeyTable(url).read(entries[-1].run_id)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("case", ["plain", "delta", "growing"])
def test_nothing_fails_after_the_commit(case, error, tmp_path, source, url, monkeypatch):
    def make(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        return written(case, folder, source, url), Folder(f"file://{folder}/out")

    acts, warned = fail_each(make, case, error, url, monkeypatch)
    assert acts >= 3
    assert warned >= 2


@pytest.mark.parametrize("error", ["refused", pytest.param("busy", marks=pytest.mark.slow)])
def test_nothing_fails_after_the_commit_in_a_store(
    error, open_store, tmp_path, source, url, monkeypatch
):
    with open_store("radosgw") as store:

        def make(number):
            out = f"{store.folder.url}-{number}"
            given = {"schema": RATINGS_SCHEMA, "ledger": {"url": url, "dataset": "ratings"}}
            return write_job(tmp_path / str(number), source, out, **given), Folder(out)

        acts, warned = fail_each(make, "plain", error, url, monkeypatch)
    assert acts >= 5
    assert warned >= 2


def test_a_key_that_cannot_be_removed_is_told(tmp_path, source, url, monkeypatch):
    job, folder = written("plain", tmp_path, source, url), hidden(tmp_path / "out")
    remove = storage.Folder.remove

    def removing(place, name=""):
        if name == KEY_NAME or name.endswith(KEY_NAME):
            raise OutputError("nobody may do this")
        remove(place, name)

    with monkeypatch.context() as patch:
        patch.setattr(storage.Folder, "remove", removing)
        outcome = run_here(job)
    [told] = [each for each in outcome.warnings if "run key is still there" in each]
    assert "whoever reads it can undo the noise (nobody may do this); run the job again" in told
    assert (folder / KEY_NAME).exists()
    assert run_here(job).status == "already released"
    assert not folder.exists()


def test_a_ledger_that_was_restored_during_the_run_is_told_at_once(
    tmp_path, source, url, monkeypatch
):
    """The release is out, and the ledger does not know it: further jobs would spend its ε again."""
    job, ledger = written("plain", tmp_path, source, url), tmp_path / "ledger.db"
    before, commit = ledger.read_bytes(), Account.commit

    def restored(*given):
        ledger.write_bytes(before)
        commit(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Account, "commit", restored)
        for _ in range(2):
            with pytest.raises(InputError, match="this ledger lacks 1 release"):
                run_here(job)
    assert call_cli("ledger", "import", "--job", job).returncode == 0
    assert run_here(job).status == "already released"


def test_a_cluster_that_does_not_close_is_a_warning(tmp_path, source, url, monkeypatch):
    options = {"kind": "local", "workers": 1}
    job = write_job(
        tmp_path,
        source,
        tmp_path / "out",
        schema=RATINGS_SCHEMA,
        ledger={"url": url, "dataset": "ratings"},
        cluster=options,
    )
    opened = private.OPENERS["local"]

    @contextmanager
    def failing(cluster):
        with opened(cluster) as name:
            yield name
        raise OSError("a secret")

    monkeypatch.setitem(private.OPENERS, "local", failing)
    done = call_cli("run", job, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "released"
    assert "the run has ended, but its cluster did not close (OSError)" in done.stderr
    assert "a secret" not in done.stderr
    # a run that failed keeps its own code
    job = write_job(
        tmp_path / "second", source, tmp_path / "out", schema=RATINGS_SCHEMA, cluster=options
    )
    assert call_cli("run", job).returncode == OutputError.exit_code


# ---- a store that takes files and deletes none


def allow(bucket, *actions, delete=""):
    """Let another user do this in a bucket, and delete below a prefix, and nothing else."""
    fs, _ = open_filesystem(bucket)
    name = bucket.removeprefix("s3://")
    given = {actions: [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"]}
    if delete:
        # radosgw asks for the bucket's own leave, too, when several files are deleted by one request
        given["DeleteObject",] = [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/{delete}"]
    statements = [
        {
            "Effect": "Allow",
            "Principal": {"AWS": ["arn:aws:iam:::user/stranger"]},
            "Action": [f"s3:{action}" for action in actions],
            "Resource": resources,
        }
        for actions, resources in given.items()
    ]
    policy = {"Version": "2012-10-17", "Statement": statements}
    fs.call_s3("put_bucket_policy", Bucket=name, Policy=json.dumps(policy))


READS = ("GetObject", "ListBucket", "GetBucketVersioning", "ListBucketVersions")


@pytest.mark.matrix("no right to delete", "growing: {growing}")
@pytest.mark.parametrize("growing", [False, True], ids=["once", "growing"])
def test_without_the_right_to_delete_a_run_is_refused_before_the_charge(
    growing, open_store, tmp_path, source, url
):
    with open_store("radosgw") as store:
        assert store.server is not None
        bucket = "/".join(store.folder.url.split("/")[:3])
        given = {"schema": RATINGS_SCHEMA, "ledger": {"url": url, "dataset": "ratings"}}
        job = write_job(tmp_path, source, store.folder.url, growing=growing, **given)
        allow(bucket, *READS, "PutObject")
        with in_environment(store.server.environment(user="stranger")):
            for _ in range(2):
                done = call_cli("run", job)
                assert done.returncode == OutputError.exit_code
                assert "may write here and not delete" in error_line(done)
                assert "allow deleting below this folder" in error_line(done)
        assert charging_entries(url, "ratings") == []
        assert store.folder.names() == []
        assert store.folder.sibling(".", ".dpdask").names() == ["probe"]
        # as docs/how-to/operate.md says it
        allow(bucket, *READS, "PutObject", delete="deep/.out.dpdask*")
        with in_environment(store.server.environment(user="stranger")):
            assert run_here(job).status == "released"
        assert store.folder.sibling(".", ".dpdask").names() == []
