"""Which frame stands under which batch of a release: noise belongs to (release, batch, partition), and a batch to one frame.

Streams and seals are named by the batch and the partition's number, never by what a frame holds or how it was built. Named
by content, equal rows would get equal noise, and a release would be one fixed map from values to values; and the same
rows built otherwise would get noise anew, unpaid. So a batch takes one frame, the very object that came first.
"""

from __future__ import annotations

import os
import uuid
import weakref
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dpdask.engine.work import KEY_NAME
from dpdask.errors import InputError, SpecError
from dpdask.io.storage import Folder

FITTED = "frame"  # the frame that a release was fitted on, or the one without a name
PUBLIC = "public table"
_NAMED = "batch "
_LOG = "batches"
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class _Taken:
    """The frame that came first, and for Dask what it then computed, in how many partitions: a Dask frame can be changed in place."""

    frame: weakref.ref[Any]
    expression: str


class Batches:
    """The batches of one release, in the order in which they were taken.

    Parameters
    ----------
    folder
        The release's private folder. It keeps which batch is whose, so that copies of the release in this process and in
        others agree.
    several
        Whether any frame may come, one without a name and more as named batches; otherwise there is one batch, and it is
        the frame that the release is fitted on.

    Privacy
    -------
    A batch is taken by a random token that stays in memory. A copy of the release (unpickled, deep-copied, or in a forked
    process) has another token, so it can take free batches, and none that was taken. On an object store two processes that
    take one batch at the same moment may both succeed, and the seals cannot be relied on there either: transform in one process.
    """

    def __init__(self, folder: Folder, several: bool) -> None:
        self.several = several
        self._folder, self._token = folder, uuid.uuid4().hex
        self._frames: dict[str, _Taken] = {}
        self._owners: dict[str, str] = {}
        self._log: dict[int, str] = {}

    def __reduce__(self) -> tuple[type[Batches], tuple[Folder, bool]]:
        return Batches, (self._folder, self.several)

    def take(self, frame: Any, batch: str | None = None) -> str:
        """Return the name of a frame's streams and seals.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        batch
            The batch's name; None for the frame without one.

        Raises
        ------
        SpecError
            If the batch is no name, is not possible, or is another frame's.
        InputError
            If the release was closed.
        """
        if batch is not None:
            self._check(batch)
        where = "the frame without a name" if batch is None and self.several else "frame" if batch is None else f"batch {batch!r}"
        name = FITTED if batch is None else f"{_NAMED}{batch}"
        if self._owner(name) != self._own_token:
            raise SpecError("another copy of this release has taken it, and a batch is one frame of one copy", where, "transform there, or fit anew")
        given = _Taken(weakref.ref(frame), "" if isinstance(frame, pd.DataFrame) else f"{frame._name} {frame.npartitions}")
        first = self._frames.setdefault(name, given)  # one step, so that of two threads one comes first
        if first.frame() is not frame:
            raise self._taken(where)
        if first.expression != given.expression:
            raise SpecError("this frame was changed in place since it was first given", where, "build it before it is first given, or fit anew")
        return name

    @property
    def names(self) -> list[str | None]:
        """The batches that were taken, in order, by whatever copy of the release; None is the one without a name."""
        while self._folder.exists(f"{_LOG}/{len(self._log)}"):
            self._note(len(self._log), self._folder.read(f"{_LOG}/{len(self._log)}"))
        return [None if name == FITTED else name.removeprefix(_NAMED) for _, name in sorted(self._log.items())]

    @property
    def _own_token(self) -> str:
        return f"{self._token}-{os.getpid()}"  # a forked process has the memory of this one

    def _check(self, batch: str) -> None:
        if not self.several:
            what = "this release covers only the frame it was fitted on, and has no batches"
            raise SpecError(what, f"batch {batch!r}", "leave `batch` out, or fit anew")
        if not isinstance(batch, str) or not batch.strip() or not batch.isprintable() or len(batch) > _LONGEST:
            raise SpecError(f"a batch's name is a text of 1 to {_LONGEST} printable characters, not all spaces", "batch", "correct it")

    def _taken(self, where: str) -> SpecError:
        if not self.several:
            what = "this release covers only the frame it was fitted on, that very object"
            return SpecError(what, where, "persist, filter or sort before `fit` and keep that frame in a variable, or fit anew")
        what = "another one was given before, and a batch is one frame, the same object every time"
        return SpecError(what, where, 'give that one, or name another batch for this one, as batch="2026-11"')

    def _owner(self, name: str) -> str:
        """Return the token that took a batch, after trying to take it: the first one in the folder's log decides."""
        if not self._folder.exists(KEY_NAME):
            raise InputError("this release was closed, so its key is missing", None, "fit anew")
        while name not in self._owners:
            number = len(self._log)
            self._note(number, self._folder.claim(f"{_LOG}/{number}", f"{self._own_token}\n{name}".encode()))
        return self._owners[name]

    def _note(self, number: int, entry: bytes) -> None:
        owner, _, name = entry.decode().partition("\n")
        self._owners.setdefault(name, owner)  # before the log: another thread goes on from the log's end
        self._log[number] = name
