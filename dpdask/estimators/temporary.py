"""Private folders for run keys: removed when Python ends. A process that is killed cannot: this user's next fit removes its temporary ones.

The next fit finds them only under the same host name and in the same folder of temporary files.
"""

from __future__ import annotations

import atexit
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

from dpdask.errors import DpdaskError
from dpdask.io.private import KEY_NAME, PrivateFolder, check_key, commit
from dpdask.io.storage import Folder, absolute_url

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
os.register_at_fork(before=_BUSY.acquire, after_in_parent=_BUSY.release, after_in_child=_BUSY.release)  # no child finds it held


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
    return _Home(path.rename(path.with_name(_PREFIX + path.name.removeprefix(_NEW))), descriptor, os.getpid())


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
