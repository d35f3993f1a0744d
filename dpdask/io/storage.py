"""A folder on any file system that fsspec knows, with atomic writes, and storage failures turned into one line."""

from __future__ import annotations

import errno
import io
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import fsspec

from dpdask.errors import DpdaskError, InputError, OutputError, TemporaryError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REMOVALS = 10


@contextmanager
def storage_faults(where: str) -> Iterator[None]:
    """Turn a file system's exceptions into errors with an exit code; the messages of libraries are not passed on.

    Raises
    ------
    InputError
        If a file is missing or may not be read.
    TemporaryError
        If the storage is full, or fails in another way that may pass.
    """
    try:
        yield
    except DpdaskError:
        raise
    except FileNotFoundError:
        raise InputError("this file is missing", where, "restore it and run again") from None
    except PermissionError:
        raise InputError("permission denied", where, "give this user access and run again") from None
    except OSError as error:
        if error.errno in _FULL:
            raise TemporaryError("no space left on the device", where, "free space and run again to resume") from None
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise TemporaryError(f"the storage failed ({name})", where, "run again to resume") from None


def absolute_url(path: str, base: Path | None = None) -> str:
    """Return a path or URL as a URL; a relative local path is relative to `base` (or the working directory).

    Nothing is percent-encoded: fsspec takes `%20` for three characters, and `*` for a glob.

    Parameters
    ----------
    path
        A path, absolute or relative, or a URL.
    base
        The folder of relative paths; the working directory if None.
    """
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    if "://" in path or "::" in path:
        return path.rstrip("/") if not path.endswith("://") else path
    return "file://" + (base or Path.cwd()).joinpath(Path(path).expanduser()).resolve().as_posix()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, named by its URL; it holds nothing else, so tasks can carry it.

    Attributes
    ----------
    url
        An absolute fsspec URL.
    """

    url: str

    def _resolve(self, name: str = "") -> tuple[Any, str]:
        try:
            fs, path = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError):
            raise OutputError(
                "no file system is installed for this URL", self.url.split("://")[0] + "://", "install the fsspec package for it"
            ) from None
        return fs, f"{path.rstrip('/')}/{name}" if name else path

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine's own file system, where renames are atomic."""
        return self.url.startswith("file://")

    @property
    def local_path(self) -> Path:
        """The folder's path on the local file system."""
        return Path(self._resolve()[1])

    def child(self, name: str) -> Folder:
        """Return a folder inside this one."""
        return Folder(f"{self.url}/{name}")

    def sibling(self, prefix: str, suffix: str) -> Folder:
        """Return the folder beside this one whose name is `prefix` + this one's + `suffix`.

        Parameters
        ----------
        prefix
            Put before this folder's name.
        suffix
            Put after this folder's name.
        """
        parent, _, name = self.url.rpartition("/")
        return Folder(f"{parent}/{prefix}{name}{suffix}")

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or a file in it, exists; a store that does not answer raises."""
        fs, path = self._resolve(name)
        with storage_faults(path):
            fs.invalidate_cache()
            if self.is_local:
                return bool(fs.exists(path))
            try:
                fs.info(path)  # the `exists` of many file systems returns False on any failure
            except FileNotFoundError:
                return False
            return True

    def is_file(self) -> bool:
        """Return whether there is a file where the folder should be."""
        fs, path = self._resolve()
        with storage_faults(path):
            fs.invalidate_cache()
            return bool(fs.isfile(path))

    def names(self) -> list[str]:
        """Return the names of the folder's direct contents, sorted; none if the folder does not exist."""
        fs, path = self._resolve()
        with storage_faults(path):
            fs.invalidate_cache()
            if not fs.isdir(path):
                return []
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False))

    def create(self, *, private: bool = False) -> None:
        """Create the folder and its parents; a private one is for this user alone (mode 0700, where there are modes).

        Raises
        ------
        OutputError
            If no folder can be made there.
        """
        fs, path = self._resolve()
        with storage_faults(path):
            try:
                fs.makedirs(path, exist_ok=True)
            except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError):
                raise OutputError("no folder can be made here", path, "check output.path, and that this user may write there") from None
            if private and self.is_local:
                Path(path).chmod(0o700)

    def read(self, name: str) -> bytes:
        """Return a file's bytes.

        Raises
        ------
        InputError
            If it is missing.
        """
        fs, path = self._resolve(name)
        with storage_faults(path):
            return bytes(fs.cat_file(path))

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Write a file atomically; a private one has mode 0600, where there are modes.

        Parameters
        ----------
        name
            The file's name in this folder.
        data
            Its content.
        private
            Whether only the owner may read it.
        """
        with self.open_replacement(name, mode=0o600 if private else 0o666) as file:
            file.write(data)

    def claim(self, name: str, data: bytes) -> bytes:
        """Write a private file unless it exists, and return its content: the first writer decides.

        Parameters
        ----------
        name
            The file's name in this folder.
        data
            Its content, if the file does not exist yet.
        """
        if self.exists(name):
            return self.read(name)
        fs, path = self._resolve(name)
        if not self.is_local:
            self.write(name, data, private=True)
            return data
        with storage_faults(path):
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            temporary = Path(f"{path}.{uuid.uuid4().hex}.tmp")
            try:
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                with suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return self.read(name)

    @contextmanager
    def open_replacement(self, name: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """Open a file to write; it appears under its name when the block succeeds, and not at all otherwise.

        Parameters
        ----------
        name
            The file's name in this folder.
        mode
            Its permissions, where there are modes.
        """
        fs, path = self._resolve(name)
        if not self.is_local:
            # whole, in one call: an fsspec transaction is its file system's, and of two files open in it one would be lost
            remote = io.BytesIO()
            yield remote
            with storage_faults(path):
                fs.pipe_file(path, remote.getvalue())
            return
        temporary = Path(f"{path}.{uuid.uuid4().hex}.tmp")
        with storage_faults(path):
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def open(self, name: str) -> BinaryIO:
        """Open a file to read."""
        fs, path = self._resolve(name)
        with storage_faults(path):
            return fs.open(path, "rb")  # type: ignore[no-any-return]  # fsspec is untyped

    def remove(self, name: str = "") -> None:
        """Remove a file, or the folder with its contents; nothing happens if it does not exist."""
        fs, path = self._resolve(name)
        with storage_faults(path):
            for _ in range(_REMOVALS):
                fs.invalidate_cache()
                if not fs.exists(path):
                    return
                with suppress(FileNotFoundError):  # another driver, or a worker believed lost, uses the same files
                    fs.rm(path, recursive=not name)
                    return

    def level_times(self) -> None:
        """Give all files the same modification time, where it can be set, so that times do not reveal the order of writing."""
        if self.is_local:
            now = time.time()
            for path in self.local_path.rglob("*"):
                os.utime(path, (now, now))

    def move_to(self, target: Folder) -> None:
        """Make this folder's files appear in `target`: at once where renames are atomic, one by one elsewhere.

        Elsewhere (object stores), files whose names begin with `_` come last: readers that wait for `_SUCCESS` never
        see half of a release.
        """
        fs, path = self._resolve()
        _, destination = target._resolve()
        with storage_faults(destination):
            if self.is_local and target.is_local:
                Path(destination).parent.mkdir(parents=True, exist_ok=True)
                try:
                    Path(path).replace(destination)
                except OSError as error:
                    if error.errno in (errno.EBUSY, errno.EXDEV):
                        raise OutputError("the output is a mount point, which no folder can replace", destination, "choose a folder in it") from None
                    raise
                return
            files = sorted(map(str, fs.find(path)), key=lambda file: (Path(file).name == "_SUCCESS", "/_dpdask/" in file, file))
            for file in files:
                fs.mv(file, f"{destination.rstrip('/')}/{file[len(path.rstrip('/')) + 1 :]}")
