"""A task reads its keys once; what holds them never leaves the task."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from dask.base import tokenize

from dpdask.engine.work import HOLDOUT_NAME, KEY_NAME, TableWork
from dpdask.errors import InputError
from dpdask.io.storage import Folder

RUN, HOLDOUT = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def work(tmp_path: Path) -> TableWork:
    secrets = Folder(f"file://{tmp_path}")
    secrets.write(KEY_NAME, RUN, private=True)
    secrets.write(HOLDOUT_NAME, HOLDOUT, private=True)
    return TableWork(types=pa.schema([]), released=pa.schema([]), codecs={}, fraction=0.25, secrets=secrets)


@pytest.mark.parametrize(("kept_holdout", "expected"), [(False, RUN), (True, HOLDOUT)])
def test_held_keys_are_those_of_the_files_and_need_them_no_more(work: TableWork, *, kept_holdout: bool, expected: bytes) -> None:
    work = replace(work, kept_holdout=kept_holdout)
    assert (work.key().reveal(), work.holdout_key().reveal()) == (RUN, expected)
    held = work.hold_keys()
    for name in (KEY_NAME, HOLDOUT_NAME):
        work.secrets.remove(name)
    assert (held.key().reveal(), held.holdout_key().reveal()) == (RUN, expected)
    with pytest.raises(InputError):
        work.key()


def test_held_keys_are_not_shown_and_leave_no_process(work: TableWork) -> None:
    held = work.hold_keys()
    assert RUN.hex() not in repr(held)
    assert repr(RUN)[2:-1] not in repr(held)
    pickle.dumps(work)
    with pytest.raises(TypeError, match="a run key is never pickled"):
        pickle.dumps(held)
    with pytest.raises(TypeError, match="a run key is never tokenised"):
        tokenize(held)


def test_without_a_key_nothing_is_held(work: TableWork) -> None:
    work.secrets.remove(KEY_NAME)
    assert work.hold_keys() is work
