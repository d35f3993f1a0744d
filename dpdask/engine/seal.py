"""Seals: a digest of what a fragment held when it was first seen, so that its noise is never drawn for anything else.

A stream is named by its fragment, not by the fragment's content. If the content changed between two passes, two attempts
or two computations of a lazy frame, the same noise would be added to other values, and the difference of the two outputs would
reveal them, which no ε covers. So the first task that reads a fragment seals it, and every later task compares.

Seals of files go with the results of the pass that counts them, and with the tasks that write; a job without such a pass reads
each fragment once, and what is staged is replaced, or in a store written once. They travel in tasks, so they are keyed with the run
key: who knows all rows but one cannot test guesses of the last. Seals of units' rows and of a frame's partitions are files beside the
run key, since several passes, or whoever computes a frame, read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b, sha256

import pandas as pd
import pyarrow as pa

from dpdask.errors import DataError, InputError
from dpdask.io.storage import Folder

_SEALS = "seals"
_SEAL_BYTES = 16


class Seal:
    """The running digest of one fragment's batches.

    Parameters
    ----------
    columns
        The columns that are sealed: the private ones, and those that name the unit.
    key
        A key of the fragment, derived from the run key: 32 bytes.
    """

    def __init__(self, columns: Iterable[str], key: bytes) -> None:
        self._columns, self._key = list(columns), key
        self._digest = sha256()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next batch."""
        arrays = [batch.column(name) for name in self._columns]
        plain = [array.dictionary_decode() if pa.types.is_dictionary(array.type) else array for array in arrays]
        self._digest.update(pa.RecordBatch.from_arrays(plain, names=self._columns).serialize())

    def digest(self) -> bytes:
        """Return the keyed digest of the batches so far, 16 bytes."""
        return blake2b(self._digest.digest(), key=self._key, digest_size=_SEAL_BYTES).digest()

    def check(self, secrets: Folder, fragment_id: str, where: str) -> None:
        """Seal the fragment, or compare it with its seal.

        Parameters
        ----------
        secrets
            The folder of the run key.
        fragment_id
            The id of the fragment.
        where
            The fragment's place, for the message.

        Raises
        ------
        InputError
            If it held something else before.
        """
        if not _same(secrets, fragment_id, self.digest()):
            raise make_change_error(where)


def make_change_error(where: str) -> InputError:
    """Return the error for a fragment that holds something else than before."""
    return InputError("this file changed since the run began", where, "restore it and run again, or `dpdask abort` the run")


def check_part(part: pd.DataFrame, sealed: Collection[str], secrets: Folder, fragment_id: str) -> None:
    """Seal a frame's partition, or compare it with its seal: the same rows of the same columns, in the same order.

    Parameters
    ----------
    part
        The rows.
    sealed
        The columns that must be compared; of the others, those without a hash are left out.
    secrets
        The folder of the run key.
    fragment_id
        The id of the partition.

    Raises
    ------
    DataError
        If it held something else before, or a column of `sealed` has no hash.
    """
    digest = sha256(str(len(part)).encode())
    for name in part.columns:
        digest.update(f"{name!r} {part[name].dtype} ".encode())  # streams are named by the column
        try:
            digest.update(pd.util.hash_pandas_object(part[name], index=False).to_numpy().tobytes())
        except TypeError:  # a column of lists or the like has no hash; no noise depends on it, unless it is sealed
            if name in sealed:
                what = "its objects have no hash, so a change to them could not be detected"
                raise DataError(what, f"column {name!r}", "make them plain texts or numbers") from None
    if not _same(secrets, fragment_id, digest.digest()):
        raise DataError("a partition's rows changed since they were first read", "frame", "persist the frame before its first use, or fit again")


def _same(secrets: Folder, fragment_id: str, digest: bytes) -> bool:
    return secrets.claim(f"{_SEALS}/{fragment_id}", digest) == digest
