"""A task reads its keys once for each part; what holds them never leaves the task."""

from __future__ import annotations

import pickle
import stat
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pyarrow as pa
import pytest
from dask.base import tokenize

import dpdask
from dpdask.computed import View
from dpdask.engine.scan import Scan, scan_parts
from dpdask.engine.work import TableWork
from dpdask.errors import DpdaskError, InputError, MissingError, OutputError, TemporaryError
from dpdask.io.encrypted import EncryptedFolder, drop_key, hold_key
from dpdask.io.storage import HOLDOUT_NAME, KEY_NAME, Folder, PrivateFolder, commit
from dpdask.references.reference import ColumnStatistic

RUN, HOLDOUT = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def work(tmp_path):
    secrets = Folder(f"file://{tmp_path}")
    secrets.write(KEY_NAME, RUN, private=True)
    secrets.write(HOLDOUT_NAME, HOLDOUT, private=True)
    nothing = dpdask.Schema.from_dict({"columns": {"x": {"role": "drop"}}})
    return make_work(nothing, pa.schema([]), secrets)


def make_work(schema, types, secrets):
    view = View.of(schema, types)
    return TableWork(types=types, released=types, view=view, fraction=0.25, secrets=secrets)


@pytest.mark.parametrize(("kept_holdout", "expected"), [(False, RUN), (True, HOLDOUT)])
def test_held_keys_are_those_of_the_files_and_need_them_no_more(work, *, kept_holdout, expected):
    work = replace(work, kept_holdout=kept_holdout)
    assert (work.key().reveal(), work.holdout_key().reveal()) == (RUN, expected)
    held = work.hold_keys()
    for name in (KEY_NAME, HOLDOUT_NAME):
        work.secrets.remove(name)
    assert (held.key().reveal(), held.holdout_key().reveal()) == (RUN, expected)
    with pytest.raises(InputError):
        work.key()
    assert work.hold_keys() is work  # without a key nothing is held
    assert RUN.hex() not in repr(held)
    assert repr(RUN)[2:-1] not in repr(held)
    pickle.dumps(work)
    with pytest.raises(TypeError, match="a run key is never pickled"):
        pickle.dumps(held)
    with pytest.raises(TypeError, match="a run key is never tokenised"):
        tokenize(held)


@dataclass(frozen=True)
class Rows:
    """A part of a table in memory; when its rows are read, the key is taken away, if it says so."""

    id: str
    secrets: Folder
    takes_key: bool = False
    number: int = 0
    n_rows: int | None = None

    def read(self, rows, work, *, released, seals=None):
        del rows, released, seals
        READ.append((self.id, work.key().reveal()))
        if self.takes_key:
            self.secrets.remove(KEY_NAME)
        yield pa.record_batch({"x": pa.array([0, 1, 1], pa.int64())})


READ = []


def scan_of(secrets):
    schema = dpdask.Schema.from_dict(
        {"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}}
    )
    types = pa.schema([("x", pa.int64())])
    work = make_work(schema, types, secrets)
    return Scan(work=work, statistic=ColumnStatistic(codecs=work.codecs), released=False)


def test_a_task_reads_its_key_once_for_each_part(work, monkeypatch):
    READ.clear()
    opened = []
    read = Folder.read
    monkeypatch.setattr(
        Folder,
        "read",
        lambda self, name, **options: opened.append(name) or read(self, name, **options),
    )
    parts = [Rows(name, work.secrets) for name in "abc"]
    scan_parts(parts, [None] * 3, scan_of(work.secrets))
    assert [(name, RUN) for name in "abc"] == READ
    assert opened == [KEY_NAME] * 3


def test_a_task_whose_key_is_taken_away_stops_at_the_next_part(work):
    READ.clear()
    parts = [
        Rows("a", work.secrets),
        Rows("b", work.secrets, takes_key=True),
        Rows("c", work.secrets),
        Rows("d", work.secrets),
    ]
    with pytest.raises(MissingError):
        scan_parts(parts, [None] * 4, scan_of(work.secrets))
    assert [name for name, _ in READ] == ["a", "b"]


def test_what_a_removed_run_claims_is_not_made_again(work):
    assert work.secrets.claim("chosen/a", b"1") == b"1"
    assert stat.S_IMODE((work.secrets.local_path / "chosen").stat().st_mode) == 0o700
    assert work.secrets.claim("chosen/a", b"2") == b"1"
    work.secrets.remove()
    with pytest.raises(DpdaskError):
        work.secrets.claim("chosen/b", b"1")
    assert not work.secrets.exists()


def test_keys_that_are_in_memory_are_not_held(work):
    """They can be withdrawn there at any time."""
    hold_key("run", RUN)
    try:
        stored = replace(work, secrets=EncryptedFolder("memory://bucket/secrets", "run"))
        assert stored.key().reveal() == RUN
        held = stored.hold_keys()
    finally:
        drop_key("run")
    with pytest.raises(TemporaryError):
        held.key()


def test_another_key_than_that_of_the_commitment_is_refused(work):
    """Wherever it is: in a file, or in memory for a run in a store."""
    hold_key("run", RUN)
    try:
        for secret, refused in ((RUN, False), (HOLDOUT, True)):
            stored = EncryptedFolder("memory://bucket/secrets", "run", commit(secret))
            for secrets in (
                PrivateFolder(work.secrets.url, commitment=commit(secret)),
                stored,
                stored.child("actions"),
            ):
                with (
                    pytest.raises(OutputError, match="another key was put in place")
                    if refused
                    else nullcontext()
                ):
                    assert replace(work, secrets=secrets).key().reveal() == RUN
    finally:
        drop_key("run")
