"""Seals: keyed digests of what a fragment holds."""

import pyarrow as pa
import pytest

from dpdask.engine.seal import Seal
from dpdask.errors import InputError
from dpdask.io.storage import Folder

BATCH = pa.RecordBatch.from_pydict({"a": [1.0, 2.0, None], "b": ["x", None, "y"]})


def digest(key: bytes, *batches: pa.RecordBatch) -> bytes:
    seal = Seal(["a", "b"], key)
    for batch in batches or (BATCH,):
        seal.add(batch)
    return seal.digest()


def test_who_does_not_have_the_key_cannot_test_a_guess_of_the_rows():
    assert digest(bytes(32)) == digest(bytes(32))
    assert digest(bytes(32)) != digest(bytes(31) + b"1")


@pytest.mark.parametrize("changed", [{"a": [1.0, 2.5, None], "b": ["x", None, "y"]}, {"a": [1.0, 2.0, None], "b": ["x", "", "y"]}])
def test_another_value_is_another_seal(changed):
    assert digest(bytes(32), pa.RecordBatch.from_pydict(changed)) != digest(bytes(32))


def test_a_fragment_that_changed_is_refused(tmp_path):
    secrets = Folder(str(tmp_path))
    for value, fits in ((1.0, True), (1.0, True), (2.0, False)):
        seal = Seal(["a"], bytes(32))
        seal.add(pa.RecordBatch.from_pydict({"a": [value]}))
        if fits:
            seal.check(secrets, "0" * 32, "file 0")
        else:
            with pytest.raises(InputError, match="changed"):
                seal.check(secrets, "0" * 32, "file 0")
