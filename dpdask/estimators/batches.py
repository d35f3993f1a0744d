"""The frame of each batch of a release: noise depends on (release, batch, partition), and each batch is one frame.

Streams and seals are named by the batch and the partition's number, never by a frame's content or by how it was built. If
they were named by content, equal frames would get equal noise, and a release would be a fixed map from values to values; and
the same rows in a frame that was built differently would get fresh noise that nobody paid for. So a batch accepts one frame
only: the Python object that was given first.
"""

from __future__ import annotations

import os
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dpdask.errors import InputError, SpecError
from dpdask.io.private import KEY_NAME
from dpdask.io.storage import Folder

FITTED = "frame"  # the frame that a release was fitted on, or the one without a name
PUBLIC = "public table"
_NAMED = "batch "
_LOG = "batches"
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class _Taken:
    """The frame that was given first, and for Dask its expression and number of partitions, because a Dask frame can be changed in place."""

    frame: weakref.ref[Any]
    expression: str

    @classmethod
    def of(cls, frame: Any) -> _Taken:
        return cls(weakref.ref(frame), "" if isinstance(frame, pd.DataFrame) else f"{frame._name} {frame.npartitions}")


class Batches:
    """The batches of one release, in the order in which they were taken.

    Parameters
    ----------
    folder
        The release's private folder. It records which copy of the release took which batch, so that copies in this process
        and in others agree.
    several
        Whether any frames can be released: one without a name, and further ones as named batches. Otherwise there is one
        batch: the frame that the release is fitted on.

    Privacy
    -------
    A batch is taken by a random token that stays in memory. A copy of the release (unpickled, deep-copied, or in a forked
    process) has another token, so it can take free batches, but not batches that were taken. On an object store, two processes
    that take the same batch at the same moment may both succeed, and seals are not reliable there either: transform in one
    process.
    """

    def __init__(self, folder: Folder, several: bool) -> None:
        self.several = several
        self._folder, self._token = folder, uuid.uuid4().hex
        self._frames: dict[str, _Taken] = {}
        self._owners: dict[str, str] = {}
        self._log: dict[int, str] = {}

    def __reduce__(self) -> tuple[type[Batches], tuple[Folder, bool]]:
        return Batches, (self._folder, self.several)

    def check(self, frame: Any, batch: str | None = None) -> str:
        """Return the name of a frame's streams and seals, if the frame can take the batch.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        batch
            The batch's name; None for the frame without one.

        Raises
        ------
        SpecError
            If the batch is not a valid name, is not possible, or belongs to another frame.
        InputError
            If the release was closed.
        """
        if batch is not None:
            self._check_name(batch)
        if not self._folder.exists(KEY_NAME):
            raise InputError("this release was closed, so its key no longer exists", None, "fit again")
        self._read_log()
        name = FITTED if batch is None else f"{_NAMED}{batch}"
        self._compare(name, self._owners.get(name, self._own_token), self._frames.get(name), frame)
        return name

    def take(self, frame: Any, batch: str | None = None) -> str:
        """Take a batch for a frame, and return the name of its streams and seals; see `check`."""
        name = self.check(frame, batch)
        while name not in self._owners:  # the first entry in the folder's log decides
            number = len(self._log)
            self._note(number, self._folder.claim(f"{_LOG}/{number}", f"{self._own_token}\n{name}".encode()))
        self._compare(name, self._owners[name], None, frame)
        self._compare(name, self._owners[name], self._frames.setdefault(name, _Taken.of(frame)), frame)  # atomic: of two threads, one is first
        return name

    @property
    def names(self) -> list[str | None]:
        """The batches taken by all copies of the release, in order; None is the one without a name."""
        self._read_log()
        return [None if name == FITTED else name.removeprefix(_NAMED) for _, name in sorted(self._log.items())]

    @property
    def _own_token(self) -> str:
        return f"{self._token}-{os.getpid()}"  # a forked process shares the token in memory

    def _check_name(self, batch: str) -> None:
        if not self.several:
            what = "this release covers only the frame it was fitted on, and has no batches"
            raise SpecError(what, f"batch {batch!r}", "leave `batch` out, or fit again")
        if not isinstance(batch, str) or not batch or batch != batch.strip() or not batch.isprintable() or len(batch) > _LONGEST:
            what = f"a batch's name must be a text of 1 to {_LONGEST} printable characters, without spaces around them"
            raise SpecError(what, "batch", "correct it")

    def _compare(self, name: str, owner: str, first: _Taken | None, frame: Any) -> None:
        """Check that a batch is of this copy of the release, and of this frame."""
        batch = None if name == FITTED else name.removeprefix(_NAMED)
        where = "the frame without a name" if batch is None and self.several else "frame" if batch is None else f"batch {batch!r}"
        if owner != self._own_token:
            what = "another copy of this release has taken this batch, and a batch belongs to one copy"
            raise SpecError(what, where, "transform there, or fit again")
        if first is not None and first.frame() is not frame:
            raise self._taken(where)
        if first is not None and first.expression != _Taken.of(frame).expression:
            raise SpecError("this frame was changed in place since its first use", where, "finish it before its first use, or fit again")

    def _taken(self, where: str) -> SpecError:
        if not self.several:
            what = "this release covers only the frame it was fitted on, the same Python object"
            return SpecError(what, where, "persist, filter or sort before `fit` and keep that frame in a variable, or fit again")
        what = "another frame was given before, and a batch is one frame, the same Python object every time"
        return SpecError(what, where, 'give that frame, or name another batch for this one, for instance batch="2026-11"')

    def _read_log(self) -> None:
        number = len(self._log)  # once: other threads make the log longer meanwhile
        while self._folder.exists(f"{_LOG}/{number}"):
            self._note(number, self._folder.read(f"{_LOG}/{number}"))
            number += 1

    def _note(self, number: int, entry: bytes) -> None:
        owner, _, name = entry.decode().partition("\n")
        self._owners.setdefault(name, owner)  # before the log, because another thread continues from the end of the log
        self._log[number] = name
