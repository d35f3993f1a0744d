"""Frames on the way to the engine: where their secrets may lie, and the columns that they have."""

from __future__ import annotations

import atexit
import datetime as dt
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.codec import Codec, LevelCodec
from dpdask.engine.lazy import check_kept_dtype
from dpdask.engine.source import Frame, check_index, find_meta, find_types
from dpdask.engine.work import TableWork, make_table_work
from dpdask.errors import DataError, DpdaskError, SpecError
from dpdask.io.encrypted import KEY_NAME, PrivateFolder, check_key, commit
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.schema import Schema

_FEW_ROWS = 10  # fewer rows are sorted by chance


def find_order_warning(frame: Frame, work: TableWork) -> str | None:
    """Return a warning if a pandas frame is sorted by a private column, else None; Dask frames are not checked.

    Privacy
    -------
    For the steward only: the warning names columns and says that they are sorted.
    """
    if not isinstance(frame, pd.DataFrame) or len(frame) < _FEW_ROWS:
        return None
    found = [name for name, codec in work.codecs.items() if _in_order(frame[name], codec)]
    if not found:
        return None
    what = "rows keep the order of the frame, which is sorted by"
    return f"{what} {', '.join(map(repr, found))}: a row's position reveals its value; shuffle the rows first, frame.sample(frac=1, ignore_index=True)"


def _in_order(column: pd.Series, codec: Codec) -> bool:
    """Return whether a column is sorted (for levels: whether equal levels are contiguous); False if all its values are equal."""
    if isinstance(codec, LevelCodec):
        codes, levels = pd.factorize(column)
        n_runs = 1 + int(np.count_nonzero(np.diff(codes)))
        return n_runs > 1 and n_runs == len(levels) + bool((codes < 0).any())
    known = column.dropna()
    if isinstance(known.dtype, pd.CategoricalDtype):
        known = known.astype(known.dtype.categories.dtype)
    return known.nunique() > 1 and bool(
        known.is_monotonic_increasing or known.is_monotonic_decreasing
    )


def check_frame(frame: Frame) -> None:
    """Check that something is a Dask or pandas frame, before anything is done with it."""
    find_meta(frame)


def check_secrets(secrets: str | None) -> None:
    """Check that a run key may lie in a folder."""
    if secrets is not None and not Folder(absolute_url(secrets)).is_local:
        what = "an object store may keep what is removed, so the run key may not lie in one"
        raise SpecError(
            what, "`secrets`", "name a folder of a file system that all workers share, or run a job"
        )


def forget_secrets(folder: Folder) -> None:
    """Remove the key, the units' bounds and the seals from a folder, once nothing that follows needs a secret."""
    for name in folder.names():
        folder.child(name).remove()


def make_frame_work(frame: Frame, mechanism: Mechanism, secrets: Folder) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema and the mechanism; nothing is computed."""
    meta = find_meta(frame)
    if mechanism.releases_rows:
        schema = declare_dtypes(meta, mechanism.schema, lazy=not isinstance(frame, pd.DataFrame))
    else:
        schema = declare_counted(meta, mechanism.schema)
    types = find_types(frame, schema)
    check_objects(frame, types, schema)
    return make_table_work(mechanism, types, secrets, schema)


def declare_dtypes(meta: pd.DataFrame, schema: Schema, *, lazy: bool) -> Schema:
    """Return the schema without the frame's index, after checking that exactly the frame's columns are declared.

    Parameters
    ----------
    schema
        The declared columns, including the index if it has a name.
    lazy
        Whether `check_index` checks each partition's index when it is computed. The empty frame of
        a Dask frame may have another kind of index than its partitions.
    """
    index: list[Any] = list(meta.index.names)
    if len(index) > 1 or not (
        lazy and index == [None] and pd.api.types.is_integer_dtype(meta.index.dtype)
    ):
        check_index(meta.index, index)
    named = [] if index[0] is None or index[0] in meta.columns else [index[0]]
    schema.check_names([*named, *meta.columns])
    if index[0] is not None and schema.columns[index[0]].role != "keep":
        raise DataError(
            "the index is published with the rows, and its role is not keep",
            f"index {index[0]!r}",
            "reset_index(drop=True)",
        )
    for name in schema.kept:
        check_kept_dtype(name, (meta.index if name in named else meta[name]).dtype)
    for name in schema.privatised:
        _check_private_dtype(name, meta[name].dtype)
    return (
        Schema(
            columns={name: column for name, column in schema.columns.items() if name not in named}
        )
        if named
        else schema
    )


def _check_private_dtype(name: str, dtype: Any) -> None:
    """Check that a column's noisy values can have its dtype: Arrow takes no rows of its views."""
    if isinstance(dtype, pd.ArrowDtype):
        arrow = dtype.pyarrow_dtype
        values = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
        if pa.types.is_string_view(values):
            mend = f"make plain texts of it before `fit`, by frame[{name!r}] = frame[{name!r}].to_list()"  # astype refuses views too
            raise DataError(
                f"no released rows can be made of the type {arrow}", f"column {name!r}", mend
            )


def check_objects(frame: Frame, types: pa.Schema, schema: Schema) -> None:
    """Check that no private column of numbers, dates or truth values holds Python objects whose type is not known, or texts made of dates."""
    for name in schema.privatised:
        column, type_ = schema.columns[name], types.field(name).type
        declared = (*(column.levels or ()), *(column.bounds or ()), *(column.atoms or ()))
        if (pa.types.is_string(type_) or pa.types.is_large_string(type_)) and not (
            declared and isinstance(declared[0], str)
        ):
            what, mend = _describe_objects(
                frame, name, dated=any(isinstance(value, dt.date) for value in declared)
            )
            if what:
                raise DataError(what, f"column {name!r}", f"convert it before `fit`, by {mend}")


def _describe_objects(frame: Frame, name: str, *, dated: bool) -> tuple[str, str]:
    """Return what a column that passes for texts holds instead of what is declared, and how to convert it; empty texts if it holds texts."""
    lazy, dates = not isinstance(frame, pd.DataFrame), f"astype({{{name!r}: 'date32[pyarrow]'}})"
    if find_meta(frame)[name].dtype != object:
        also = ", as Dask makes of Python's dates" if lazy else ""
        return (f"dates are declared, and it holds texts{also}", dates) if dated else ("", "")
    if lazy:
        return (
            "it holds Python objects, and Dask does not tell of which type",
            dates if dated else "astype",
        )
    found = [type(value) for value in frame[name].dropna().head(1) if not isinstance(value, str)]
    if not found:
        return ("dates are declared, and it holds texts", dates) if dated else ("", "")
    mend = (
        "pandas.to_datetime"
        if issubclass(found[0], dt.datetime)
        else "astype, such as to 'Int64' or 'decimal128(10, 2)[pyarrow]'"
    )
    name = found[0].__name__
    return (
        f"it holds Python objects, such as {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}",
        mend,
    )


def declare_counted(meta: pd.DataFrame, schema: Schema) -> Schema:
    """Return the schema without the frame's index, which is neither counted nor released, so that any will do if it is declared."""
    index = [name for name in meta.index.names if name is not None and name not in meta.columns]
    schema.check_names([*index, *meta.columns])
    for name in index:
        if name in schema.privatised:
            raise DataError(
                "an index is not counted, and its role is privatise",
                f"index {name!r}",
                "make it a column: reset_index()",
            )
    return (
        Schema(
            columns={name: column for name, column in schema.columns.items() if name not in index}
        )
        if index
        else schema
    )


_NEW = "dpdask-new-"
_PREFIX = f"dpdask-fit-{os.uname().nodename}-"  # another machine, which may share the place, sees no lock of this one
_RELEASE = "release-"
_BUSY = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Home:
    """The temporary folder of a process, in which each release has its own; an open file, which forked children share, holds its lock."""

    path: Path
    descriptor: int
    process: int


_homes: dict[str, _Home] = {}  # by the place of temporary folders
_opened: dict[Folder, int] = {}  # by which process
os.register_at_fork(
    before=_BUSY.acquire, after_in_parent=_BUSY.release, after_in_child=_BUSY.release
)  # no child finds it held


def open_secrets(secrets: str | None, key: bytes | None = None) -> PrivateFolder:
    """Return a new private folder with a run key, if one is given, removed when Python ends normally: inside `secrets`, or temporary."""
    if secrets is None:
        with _BUSY:
            place = tempfile.gettempdir()
            _sweep(place)
            home = _homes.get(place)
            own = home is not None and home.process == os.getpid()
            if home is None or not own or not home.path.is_dir():
                if home is not None and own:  # somebody removed it
                    os.close(_homes.pop(place).descriptor)
                home = _homes[place] = _make_home(place)
            folder = PrivateFolder(absolute_url(tempfile.mkdtemp(prefix=_RELEASE, dir=home.path)))
    else:
        folder = PrivateFolder(f"{absolute_url(secrets)}/{_RELEASE}{uuid.uuid4().hex[:12]}")
        folder.create()
    if not _opened:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    if key is not None:
        check_key(folder.claim(KEY_NAME, key), commit(key), folder.url)
        folder = replace(folder, commitment=commit(key))
    _opened[folder] = os.getpid()
    return folder


def close_secrets(folder: Folder) -> None:
    """Remove a folder that `open_secrets` returned, the key first, and this process's temporary folder with the last one in it."""
    folder.remove()
    _opened.pop(folder, None)
    with _BUSY:
        for place, home in list(_homes.items()):
            with suppress(OSError):  # not empty
                if home.process == os.getpid():
                    home.path.rmdir()
                    os.close(_homes.pop(place).descriptor)


def _close_all() -> None:
    """Remove what this process opened: a forked child leaves the rest to its parent."""
    for folder, process in list(_opened.items()):
        if process == os.getpid():
            with suppress(DpdaskError):  # another user has exchanged it
                close_secrets(folder)


def _make_home(place: str) -> _Home:
    """Make the temporary folder of this process (mode 0700); it has its name once it is locked, so that no sweep comes between."""
    path = Path(tempfile.mkdtemp(prefix=_NEW, dir=place))
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # where folders have no locks, no sweep finds one free
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return _Home(
        path.rename(path.with_name(_PREFIX + path.name.removeprefix(_NEW))), descriptor, os.getpid()
    )


def _sweep(place: str) -> None:
    """Remove this user's temporary folders that no process holds any more."""
    for path in Path(place).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # held by a process, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o777 == 0o700:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    names = os.listdir(descriptor)  # noqa: PTH208 - by descriptor
                    for name in names if all(each.startswith(_RELEASE) for each in names) else ():
                        shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
                    path.rmdir()
            finally:
                os.close(descriptor)
