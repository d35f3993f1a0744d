"""Frames on the way to the engine: where their secrets may lie, and the columns that they have."""

from __future__ import annotations

import atexit
import datetime as dt
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

from dpdask.codec import Codec
from dpdask.engine.lazy import check_kept_dtype
from dpdask.engine.source import Frame, check_index, find_meta, find_types
from dpdask.engine.work import TableWork, make_table_work
from dpdask.errors import DataError, DpdaskError, SpecError
from dpdask.io.storage import KEY_NAME, Folder, PrivateFolder, absolute_url, check_key, commit
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.schema import Schema
from dpdask.startup import import_locks

fcntl = import_locks()
_FEW_ROWS = 10  # fewer rows are sorted by chance
_SOME_ROWS = 2**10


def find_order_warnings(frame: Frame, work: TableWork) -> list[str]:
    """Return a warning if a pandas frame is sorted by a private column; Dask frames are not checked.

    Privacy
    -------
    For the steward only: the warning names columns and says that they are sorted.
    """
    if not isinstance(frame, pd.DataFrame) or len(frame) < _FEW_ROWS:
        return []
    found = [repr(name) for name, codec in work.view.own.items() if _in_order(frame[name], codec)]
    what = f"rows keep the order of the frame, which is sorted by {', '.join(found)}: a row's position reveals its value"
    hint = "shuffle the rows first, frame.sample(frac=1, ignore_index=True)"
    return [f"{what}; {hint}"] if found else []


def _in_order(column: pd.Series, codec: Codec) -> bool:
    """Return whether a column is sorted (for levels: whether equal levels are contiguous); False if all its values are equal."""
    for rows in (column.iloc[:_SOME_ROWS], column):  # the first ones nearly always tell
        if codec.has_levels:
            codes, levels = pd.factorize(rows)
            n_runs = 1 + int(np.count_nonzero(codes[1:] != codes[:-1]))
            differs, is_sorted = n_runs > 1, n_runs == len(levels) + bool((codes < 0).any())
        else:
            known = rows.dropna()
            if isinstance(known.dtype, pd.CategoricalDtype):
                known = known.astype(known.dtype.categories.dtype)
            is_sorted = known.is_monotonic_increasing or known.is_monotonic_decreasing
            differs = is_sorted and len(known) > 0 and known.iloc[0] != known.iloc[-1]
        if not is_sorted:
            return False
    return bool(differs)


def check_secrets(secrets: str | None) -> None:
    """Check that a run key may lie in a folder."""
    if secrets is not None and not Folder(absolute_url(secrets)).is_local:
        what = "an object store may keep what is removed, so the run key may not lie in one"
        hint = "name a folder of a file system that all workers share, or run a job"
        raise SpecError(what, "`secrets`", hint)


def forget_secrets(folder: Folder) -> None:
    """Remove the key, the units' bounds and the seals from a folder, once nothing that follows needs a secret."""
    for name in folder.names():
        folder.child(name).remove()


def make_frame_work(frame: Frame, mechanism: Mechanism, secrets: Folder) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema and the mechanism; nothing is computed."""
    meta, declared = find_meta(frame), mechanism.declared
    if mechanism.releases_rows:
        _check_published_index(meta, declared, is_lazy=not isinstance(frame, pd.DataFrame))
    schema = declare_counted(meta, declared)
    if mechanism.releases_rows:
        _check_released_dtypes(meta, declared)
    types = find_types(frame, schema)
    check_objects(frame, types, schema)
    return make_table_work(mechanism, types, secrets, schema)


def declare_counted(meta: pd.DataFrame, schema: Schema) -> Schema:
    """Return the schema without the frame's index, after checking that exactly the frame's columns are declared."""
    index = [name for name in meta.index.names if name is not None and name not in meta.columns]
    schema.check_names([*index, *meta.columns])
    for name in index:
        if name in schema.privatised:
            what = "an index is not counted, and its role is privatise"
            raise DataError(what, f"index {name!r}", "make it a column: reset_index()")
    columns = {name: column for name, column in schema.columns.items() if name not in index}
    return schema.model_copy(update={"columns": columns}) if index else schema


def _check_published_index(meta: pd.DataFrame, schema: Schema, *, is_lazy: bool) -> None:
    """Check that the index is row numbers, or is declared with the role keep.

    The empty frame of a Dask frame may have another kind of index than its partitions, whose
    indices are checked when they are computed.
    """
    names: list[Any] = list(meta.index.names)
    numbered = names == [None] and pd.api.types.is_integer_dtype(meta.index.dtype)
    if not (is_lazy and numbered):
        check_index(meta.index, names)
    if names[0] in schema.columns and schema.columns[names[0]].role != "keep":
        what = "the index is published with the rows, and its role is not keep"
        raise DataError(what, f"index {names[0]!r}", "reset_index(drop=True)")


def _check_released_dtypes(meta: pd.DataFrame, schema: Schema) -> None:
    """Check that released values can have the dtypes of their columns."""
    for name in schema.kept:
        check_kept_dtype(name, (meta[name] if name in meta.columns else meta.index).dtype)
    for name in schema.privatised:
        dtype = meta[name].dtype
        arrow = dtype.pyarrow_dtype if isinstance(dtype, pd.ArrowDtype) else pa.null()
        plain_type = arrow.value_type if pa.types.is_dictionary(arrow) else arrow
        if pa.types.is_string_view(plain_type) or pa.types.is_binary_view(plain_type):
            what = f"no released rows can be made of the type {arrow}"  # Arrow takes no rows of its views
            plain = f"frame[{name!r}] = frame[{name!r}].to_list()"  # astype refuses views too
            hint = f"make plain values of it before `fit`, by {plain}"
            raise DataError(what, f"column {name!r}", hint)


def check_objects(frame: Frame, types: pa.Schema, schema: Schema) -> None:
    """Check that no private column of numbers, dates or truth values holds Python objects whose type is not known, or texts made of dates."""
    is_lazy = not isinstance(frame, pd.DataFrame)
    for name in schema.privatised:
        column, type_ = schema.columns[name], types.field(name).type
        declared = (*column.listed, *(column.bounds or ()), *(column.atoms or ()))
        is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
        if not is_text or (declared and isinstance(declared[0], str)):
            continue
        what = mend = ""
        if any(isinstance(value, dt.date) for value in declared):
            what, mend = (
                "dates are declared, and it holds texts",
                f"astype({{{name!r}: 'date32[pyarrow]'}})",
            )
        if find_meta(frame)[name].dtype != object:
            what += ", as Dask makes of Python's dates" if what and is_lazy else ""
        elif is_lazy:
            what = "it holds Python objects, and Dask does not tell of which type"
            mend = mend or "astype"
        else:
            for example in frame[name].dropna().head(1):
                if not isinstance(example, str):
                    of = type(example).__name__
                    what = f"it holds Python objects, such as {'an' if of[0] in 'aeiouAEIOU' else 'a'} {of}"
                    mend = "astype, such as to 'Int64' or 'decimal128(10, 2)[pyarrow]'"
                    if isinstance(example, dt.datetime):
                        mend = "pandas.to_datetime"
        if what:
            raise DataError(what, f"column {name!r}", f"convert it before `fit`, by {mend}")


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
# no child finds it held
os.register_at_fork(
    before=_BUSY.acquire, after_in_parent=_BUSY.release, after_in_child=_BUSY.release
)


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
    path = path.rename(path.with_name(_PREFIX + path.name.removeprefix(_NEW)))
    return _Home(path, descriptor, os.getpid())


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
