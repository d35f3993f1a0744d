"""A folder on any file system that fsspec knows, with writes that appear whole or not at all; and one for this user's secrets."""

from __future__ import annotations

import errno
import filecmp
import io
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from dpdask.arrays import freeze_class
from dpdask.errors import DpdaskError, MissingError, OutputError
from dpdask.io.filesystems import (
    KINDS,
    MAX_PUT_BYTES,
    classify,
    delete_versions,
    explain,
    find_first_version,
    keeps_versions,
    list_versions,
    mask,
    open_store,
    protocols,
    report_change,
)

_REMOVALS = 10
_COMPARED_BYTES = 2**26
_BEING_WRITTEN = re.compile(r"\.[0-9a-f]{32}\.tmp$")
# the private files of a run, a series or a fit
KEY_NAME = "run.key"
HOLDOUT_NAME = "holdout.key"
NOISY_NAME = "noisy.npz"
BOUNDS_NAME = "bounds.npz"
RELEASE_NAME = "release.npz"
SERIES_NAME = "series.json"
LOCK = "lock"
_PROBE = "probe"
_KEY_BYTES = 32
# a folder with none of these is none of ours
_MARKS = {KEY_NAME, LOCK, RELEASE_NAME, SERIES_NAME}
_COMMIT_PERSON = b"dpdask commit"
_OTHERS = {errno.ENOTDIR, errno.ELOOP, errno.EACCES}
_DESCRIPTORS = "/proc/self/fd"
_BY_DESCRIPTOR = Path(_DESCRIPTORS).is_dir()  # elsewhere the name is used again after the checks
_held_folders: dict[str, int] = {}  # by URL
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.3
_MEMORY = threading.Lock()
_GAP_BYTES = 2**22  # about what a store sends in the time of a request
_BLOCK_BYTES = 2**23
_LOCAL = LocalFileSystem()  # fsspec's search for one that exists takes longer than a small read

Range = tuple[int, int]
T = TypeVar("T")


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it."""
    if "::" not in url and (url.startswith("file://") or "://" not in url):
        return _LOCAL, str(_LOCAL._strip_protocol(url))
    return open_store(url)


@contextmanager
def storage_faults(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn a file system's exceptions into errors with an exit code; the messages of libraries are not passed on.

    Parameters
    ----------
    writing
        Whether the output is written; then a refusal is an OutputError.
    """
    try:
        yield
    except DpdaskError:
        raise
    except Exception as error:
        fault = classify(error)
        if fault is None:
            raise
        raise explain(fault, error, where, writing=writing) from None


def call_storage(url: str, call: Callable[[Any, str], T], *, writing: bool = False) -> T:
    """Return what a call on a URL's file system returns; try again while the store is busy.

    A store that refuses is asked once more with a new file system, since credentials may have been
    renewed outside.

    Parameters
    ----------
    call
        Called with the file system and the path; may be called again, so it must do no harm the
        second time.
    """
    renewed = False
    attempt = 0
    while True:
        fs, path = open_filesystem(url)
        try:
            return call(fs, path)
        except Exception as error:
            fault = classify(error)
            if fault is None:
                raise
            if fault == "refused" and not renewed and not is_local(fs):
                renewed = True
                if open_filesystem(url)[0] is fs:  # else another thread has done so
                    type(fs).clear_instance_cache()
            elif fault == "busy" and attempt < _TRIES - 1:
                # twice as long each time, and not at the same moment as other processes
                jitter = uuid.uuid4().int % 1000 / 1000
                time.sleep(_FIRST_WAIT_SECONDS * 2**attempt * (0.5 + jitter))
                attempt += 1
            else:
                raise explain(fault, error, path, writing=writing) from None


def is_local(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return isinstance(fs, LocalFileSystem)


def create_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file by one request, which fails if the file exists."""
    names = protocols(fs)
    if len(data) > MAX_PUT_BYTES:
        most = MAX_PUT_BYTES // 2**20
        what = f"this file is larger than one request can write ({most} MiB)"
        raise OutputError(what, mask(path), "lower output.rows_per_shard")
    _check_creating(fs, path)
    # s3fs and gcsfs write larger files in parts; S3 gateways check no condition when these are put
    # together
    whole = {"chunksize": 2 * MAX_PUT_BYTES} if names & {"s3", "gs"} else {}
    with _MEMORY if "memory" in names else nullcontext():
        answer = fs.pipe_file(path, data, mode="create", **whole)
    version = answer.get("VersionId") if "s3" in names else None
    if version is not None and find_first_version(fs, path, alone=True) != version:
        raise FileExistsError(path)


def _check_creating(fs: Any, path: str) -> None:
    if protocols(fs).isdisjoint({*KINDS, "memory"}):
        hint = "write to a local folder, or to s3://, az:// or gs://"
        raise OutputError("this file system has no create-if-absent operation", mask(path), hint)


def replace_file(fs: Any, path: str, data: bytes) -> None:
    """Write a remote file, whole, also if it exists."""
    answer = fs.pipe_file(path, data)
    version = answer and answer.get("VersionId") if "s3" in protocols(fs) else None
    if version:
        older = list_versions(fs, path, after=version)[0]
        # who may not remove versions keeps them: the newest is read, and what is private in them is
        # encrypted
        with suppress(OutputError):
            delete_versions(fs, path, [each for each in older if each["VersionId"] != version])


def read_file(fs: Any, path: str, *, replaced: bool = False) -> bytes:
    """Return a file's content; `replaced` says that `replace_file` writes it, not `create_file`."""
    if replaced or not keeps_versions(fs, path):
        return bytes(fs.cat_file(path))
    return bytes(fs.cat_file(path, version_id=find_first_version(fs, path)))


def remove_file(fs: Any, path: str, *, recursive: bool) -> None:
    """Remove a file, or a folder with its contents, with the versions that a bucket keeps.

    Nothing is removed that is written meanwhile.
    """
    if keeps_versions(fs, path):
        found = [
            list_versions(fs, path),
            *([list_versions(fs, f"{path}/", exact=False)] if recursive else []),
        ]
        # who may not remove versions hides them: what is private in them is encrypted
        with suppress(OutputError):
            for versions, markers in found:
                # a version whose marker went first would be there again
                delete_versions(fs, path, [*versions, *markers])
            return
    fs.rm(path, recursive=recursive)
    # s3fs passes over files that it may not remove
    if recursive and not is_local(fs) and fs.find(path):
        raise PermissionError(path)


class RemoteFile(io.RawIOBase):
    """A remote file, as long as it was when it was found.

    Parameters
    ----------
    ranges
        What is read at once: pairs of a start and an end. All else is read when it is asked for.
    """

    def __init__(self, url: str, size: int, ranges: Iterable[Range] = ()) -> None:
        self._url, self._size, self._place = url, size, 0
        # ranges in order, those that lie close together as one
        joined: list[Range] = []
        for start, end in sorted(ranges):
            if joined and start - joined[-1][1] <= _GAP_BYTES:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        self._parts = dict(zip(joined, read_ranges(url, joined, size), strict=True))

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as files do."""
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the file goes, and return how far that was."""
        view = memoryview(buffer).cast("B")
        start, end = self._place, min(self._place + len(view), self._size)
        if end <= start:
            return 0
        view[: end - start] = self._find(start, end)
        self._place = end
        return end - start

    def _find(self, start: int, end: int) -> memoryview:
        for (first, last), part in self._parts.items():
            if first <= start and end <= last:
                return memoryview(part)[start - first : end - first]
        return memoryview(read_ranges(self._url, [(start, end)], self._size)[0])


def open_remote(url: str, size: int | None = None) -> IO[bytes]:
    """Return a file to read from its start to its end, block by block; a local one is opened as it is."""
    fs, path = open_filesystem(url)
    if is_local(fs):
        return fs.open(path, "rb")  # type: ignore[no-any-return]  # fsspec is untyped
    size = size or int(call_storage(url, lambda fs, path: fs.info(path)["size"]))
    return io.BufferedReader(RemoteFile(url, size), _BLOCK_BYTES)


def read_ranges(url: str, ranges: Sequence[Range], size: int) -> list[bytes]:
    """Return the bytes of each range of a file, by one request each."""
    # one byte more than there was: a file that grew is noticed
    asked = [(start, end + (end == size)) for start, end in ranges]

    def read(fs: Any, path: str) -> list[bytes]:
        if is_local(fs):  # Python opens it faster than fsspec does
            with Path(path).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), end - start, start) for start, end in asked]
        if len(asked) == 1:
            return [bytes(fs.cat_file(path, start=asked[0][0], end=asked[0][1]))]
        starts, ends = zip(*asked, strict=True)
        return list(map(bytes, fs.cat_ranges([path] * len(asked), starts, ends, on_error="raise")))

    found = call_storage(url, read) if ranges else []
    if any(len(part) != end - start for part, (start, end) in zip(found, ranges, strict=True)):
        raise report_change(url.rpartition("/")[2])
    return found


def absolute_url(path: str, base: Path | None = None) -> str:
    """Return a path or URL as a URL; a relative local path is relative to `base` (or the working directory).

    Nothing is percent-encoded: fsspec takes `%20` for three characters, and `*` for a glob.
    """
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    if "://" in path or "::" in path:
        return path.rstrip("/") if not path.endswith("://") else path
    return "file://" + (base or Path.cwd()).joinpath(Path(path).expanduser()).resolve().as_posix()


@freeze_class(kw_only=False)
class Folder:
    """A folder, named by its URL; it holds nothing else, so tasks can carry it."""

    url: str

    def _resolve(self, name: str = "") -> tuple[Any, str]:
        fs, path = open_filesystem(self.url)
        return fs, f"{path.rstrip('/')}/{name}" if name else path

    @contextmanager
    def _at(self) -> Iterator[str]:
        """Yield the URL under which the folder is used."""
        yield self.url

    def _call(self, name: str, call: Callable[[Any, str], T], *, writing: bool = False) -> T:
        with self._at() as url:
            return call_storage(f"{url}/{name}" if name else url, call, writing=writing)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine's own file system, where renames are atomic."""
        return self.url.startswith("file://") or "://" not in self.url

    @property
    def local_path(self) -> Path:
        """The folder's path on the local file system."""
        return Path(self._resolve()[1])

    def child(self, name: str) -> Folder:
        """Return a folder inside this one."""
        return Folder(f"{self.url}/{name}")

    def sibling(self, prefix: str, suffix: str) -> Folder:
        """Return the folder beside this one whose name is `prefix` + this one's + `suffix`."""
        parent, _, name = self.url.rpartition("/")
        return Folder(f"{parent}/{prefix}{name}{suffix}")

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or a file in it, exists; a store that does not answer raises."""

        def look(fs: Any, path: str) -> bool:
            # the `exists` of many remote file systems returns False on any failure
            return bool(fs.exists(path) if self.is_local else _find_info(fs, path))

        return self._call(name, look)

    def is_file(self) -> bool:
        """Return whether there is a file where the folder should be."""
        return self._call("", lambda fs, path: _find_info(fs, path).get("type") == "file")

    def names(self) -> list[str]:
        """Return the names of the folder's direct contents, sorted; none if the folder does not exist."""

        def look(fs: Any, path: str) -> list[str]:
            fs.invalidate_cache()
            try:
                found = fs.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            there = (str(entry).rstrip("/") for entry in found)
            return sorted({each.rpartition("/")[2] for each in there if each != path.rstrip("/")})

        return self._call("", look)

    def create(self, mode: int | None = None) -> None:
        """Create the folder and its parents; a new local folder has a mode, if one is given.

        Object stores have no folders, so nothing is created there, neither a bucket.
        """
        if self.url.partition("://")[0] in KINDS:
            return None
        with self._at() as url:
            fs, path = open_filesystem(url)

            def make() -> None:
                if mode is None:
                    fs.makedirs(path, exist_ok=True)
                else:
                    Path(path).mkdir(mode, parents=True, exist_ok=True)

            with storage_faults(path, writing=True):
                try:
                    # another driver may remove it just now
                    with suppress(FileNotFoundError, FileExistsError):
                        return make()
                    make()
                except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError):
                    raise _no_folder(path) from None

    def check_creatable(self) -> None:
        """Check that `create` and `put_new` would work, as far as that can be seen without writing; see there."""
        if not self.is_local:
            _check_creating(*self._resolve())
        else:
            places = (self.local_path, *self.local_path.parents)
            there = next(filter(os.path.lexists, places))
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise _no_folder(str(self.local_path))

    def check_removable(self) -> None:
        """Check that this user may delete what it writes into a store: a file is written and removed."""
        if self.is_local:
            return

        def remove(fs: Any, path: str) -> None:
            with suppress(FileNotFoundError):  # another driver was faster
                remove_file(fs, path, recursive=False)

        self.write(_PROBE, b"")
        try:
            self._call(_PROBE, remove, writing=True)
        except OutputError:
            what = "this user may write here and not delete: what a run leaves here would stay"
            raise OutputError(what, self.url, "allow deleting below this folder") from None

    def read(self, name: str, *, replaced: bool = False) -> bytes:
        """Return a file's bytes.

        Parameters
        ----------
        replaced
            Whether it is a file that `write` replaces: where a store keeps versions, its newest
            counts. Of a file that is created once (`put_new`, `claim`) the oldest counts.
        """
        return self._call(name, lambda fs, path: read_file(fs, path, replaced=replaced))

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Write a file atomically; a private one has mode 0600, where there are modes."""
        with self.open_replacement(name, mode=0o600 if private else 0o666) as file:
            file.write(data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a file, whole, unless it exists, and return whether it holds these bytes now.

        Of callers with different bytes exactly one sees True, wherever they run: put a token in the
        data to know who wrote it. If the answer of a store is lost, what the file holds decides.
        Local folders use a hard link; object stores one conditional request.
        """
        equal = self._create(name, data, lambda fs, path: _holds(fs, path, data), private=False)
        return equal is None or equal

    def claim(self, name: str, data: bytes) -> bytes:
        """Write a private file unless it exists, and return its content: the first writer decides."""
        found = self._create(name, data, read_file, private=True)
        return data if found is None else found

    def _create(
        self, name: str, data: bytes, look: Callable[[Any, str], T], *, private: bool
    ) -> T | None:
        """Write a file unless it exists; return None if it was written, otherwise what `look` finds in it."""

        def create(fs: Any, path: str) -> T | None:
            try:
                if self.is_local:
                    folder = path.rpartition("/")[0]
                    # not this folder itself: once a run has removed it, no task makes it again
                    if private and "/" in name:
                        Path(folder).mkdir(0o700, exist_ok=True)
                    else:
                        fs.makedirs(folder, exist_ok=True)
                    with _temporary(path, 0o600 if private else 0o666, os.link) as file:
                        file.write(data)
                else:
                    create_file(fs, path, data)
            except Exception as error:
                # the store may have written the file although its answer was lost, also in a
                # library's own second attempt
                there = isinstance(error, FileExistsError)
                if not there and classify(error) not in ("exists", "busy"):
                    raise
                try:
                    if keeps_versions(fs, path):  # what other writers left of it goes
                        find_first_version(fs, path, alone=True)
                    return look(fs, path)
                except FileNotFoundError:
                    raise ConnectionError from error  # to be tried again
            return None

        return self._call(name, create, writing=True)

    @contextmanager
    def open_replacement(self, name: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
        """Open a file to write; it appears under its name when the block succeeds, and not at all otherwise."""
        if not self.is_local:
            # whole, in one call: an fsspec transaction is its file system's, and of two files open
            # in it one would be lost
            remote = io.BytesIO()
            yield remote
            data = remote.getvalue()
            self._call(name, lambda fs, path: replace_file(fs, path, data), writing=True)
            return
        with self._at() as url:
            _, path = Folder(url)._resolve(name)
            with storage_faults(path, writing=True), _temporary(path, mode, os.replace) as file:
                yield file

    @contextmanager
    def open_new(self, name: str, other: DpdaskError | None = None) -> Iterator[IO[bytes]]:
        """Open a file to write; it appears under its name when the block succeeds, unless a file is there.

        Nothing happens if that file holds the same bytes. On object stores the file is kept in
        memory, and written by one request.

        Parameters
        ----------
        other
            Raised if a file with other content is there, which stays as it is; by default an
            `OutputError`.
        """
        _, path = self._resolve(name)
        hint = "choose another output, or `dpdask abort` the run that wrote it"
        other = other or OutputError("a file with other content is there", mask(path), hint)
        if not self.is_local:
            remote = io.BytesIO()
            yield remote
            if not self.put_new(name, remote.getvalue()):
                raise other
            return

        def publish(temporary: Path, target: str) -> None:
            try:
                os.link(temporary, target)
            except FileExistsError:
                if not filecmp.cmp(temporary, target, shallow=False):
                    raise other from None

        with self._at() as url, storage_faults(path, writing=True), ExitStack() as stack:
            target = Folder(url)._resolve(name)[1]
            for parent in [*Path(name).parents][
                -2::-1
            ]:  # never this folder itself, as in `_create`
                (Folder(url).local_path / parent).mkdir(exist_ok=True)
            yield stack.enter_context(_temporary(target, 0o666, publish))

    def open(self, name: str, n_bytes: int | None = None) -> IO[bytes]:
        """Open a file to read, whose size may be known."""
        with self._at() as url, storage_faults(f"{url}/{name}"):
            return open_remote(f"{url}/{name}", n_bytes)

    def remove(self, name: str = "") -> None:
        """Remove a file, or the folder with its contents, which a store lists first; nothing happens if it does not exist."""

        def remove(fs: Any, path: str) -> None:
            for attempt in range(_REMOVALS):
                fs.invalidate_cache()
                if (name or attempt or self.is_local) and not fs.exists(path):
                    return
                # another driver, or a worker believed lost, uses the same files
                with suppress(FileNotFoundError):
                    remove_file(fs, path, recursive=not name)
                    return

        self._call(name, remove, writing=True)

    def level_times(self, ending: str = "") -> None:
        """Give all files with this ending the same time of change; in a store it cannot be set."""
        if self.is_local:
            now = time.time()
            with self._at() as url:
                for path in Folder(url).local_path.rglob(f"*{ending}"):
                    os.utime(path, (now, now))

    def move_to(self, target: Folder, name: str = "") -> None:
        """Make a file appear in another local folder, or all of this one in its place at once."""
        destination = target.local_path / name
        with self._at() as url, storage_faults(str(destination), writing=bool(name)):
            destination.parent.mkdir(parents=True, exist_ok=True)
            try:
                (Folder(url).local_path / name).replace(destination)
            except OSError as error:
                if error.errno in (errno.EBUSY, errno.EXDEV):
                    what = "the output is a mount point, which no folder can replace"
                    raise OutputError(what, str(destination), "choose a folder in it") from None
                raise


def commit(secret: bytes) -> str:
    """Return a digest of a run key that names it and tells nothing about it: tasks carry it, from the driver's memory."""
    return blake2b(key=secret, person=_COMMIT_PERSON, digest_size=16).hexdigest()


def check_key(secret: bytes, commitment: str, where: str | None) -> bytes:
    """Return a key that was read, compared with its commitment if there is one."""
    if commitment and commit(secret) != commitment:
        what = "another key was put in place of the run key: somebody else can write here"
        raise OutputError(
            what,
            where,
            "restore the hidden folder, or `dpdask abort` the run and choose a place that nobody else can write to",
        )
    return secret


@freeze_class(kw_only=False)
class PrivateFolder(Folder):
    """A folder for this user's secrets, or one inside it."""

    inside: str = ""  # the part of the URL that lies below the private folder itself
    commitment: str = ""  # that of the run key in it, once there is one
    # The user who made it: workers may run as another one.
    owner: int = field(default_factory=lambda: os.geteuid())

    @property
    def key(self) -> bytes:
        """The run key, compared with its commitment."""
        return check_key(self.read(KEY_NAME), self.commitment, self.url)

    def child(self, name: str) -> PrivateFolder:
        """Return a folder inside this one, under the same checks."""
        return replace(self, url=f"{self.url}/{name}", inside=f"{self.inside}/{name}")

    def exists(self, name: str = "") -> bool:
        """Return whether something has the folder's name, whatever it is; or as for any folder whether a file is in it."""
        return (
            Folder.exists(self, name) if name or self.inside else os.path.lexists(self.local_path)
        )

    def create(self, mode: int | None = 0o700) -> None:
        """Create the folder for this user alone, unless it is there."""
        if self.inside:
            Folder.create(self, mode)
        else:
            os.close(self.open_made())

    def open_made(self) -> int:
        """Create the folder, mode 0700, unless it is there, and return a descriptor of it."""
        for _ in range(2):
            Folder(self.url).create(mode=0o700)
            descriptor = self._open()
            if descriptor is not None:
                os.fchmod(descriptor, 0o700)
                return descriptor
        # by another driver, or whoever can write beside it
        raise MissingError("this folder was removed while it was made", self.url, "run again")

    @contextmanager
    def hold(self, descriptor: int) -> Iterator[None]:
        """Let this process use the folder by one descriptor until the block ends, whatever its name leads to."""
        _held_folders[self.url] = descriptor
        try:
            yield
        finally:
            del _held_folders[self.url]

    def remove(self, name: str = "") -> None:
        """Remove a file or a folder in it; or all that is in it, the key first and the lock last, and then the folder, if it is one of ours."""
        if name or self.inside:
            Folder.remove(self, name)
            return
        with self._at() as url:
            opened = Folder(url)
            names = sorted(opened.names(), key=lambda each: (each == LOCK, each != KEY_NAME))
            for each in names if _MARKS & set(map(name_when_whole, names)) else ():
                opened.child(each).remove()
        with suppress(OSError):  # another folder has its name, and is not empty
            self.local_path.rmdir()

    @contextmanager
    def _at(self) -> Iterator[str]:
        """Yield a URL of the folder that was opened and checked; of none if there is none."""
        descriptor = self._open()
        number = "none" if descriptor is None else descriptor
        here = f"file://{_DESCRIPTORS}/{number}{self.inside}" if _BY_DESCRIPTOR else self.url
        try:
            yield here
        except DpdaskError as error:
            error.where = error.where and error.where.replace(
                here.removeprefix("file://"), str(self.local_path)
            )
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        """Return a descriptor of the private folder; None if there is none.

        It is the one that this process holds, or one that has the run key, or one that belongs to
        the owner.
        """
        place = self.url.removesuffix(self.inside)
        held = _held_folders.get(place)
        if held is not None:
            with suppress(OSError):
                descriptor = os.dup(held)
                if _held_folders.get(place) == held:  # still open when it was copied
                    return descriptor
                os.close(descriptor)
        path = Folder(place).local_path
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags)
        except OSError as error:
            if error.errno in _OTHERS and os.path.lexists(path):
                raise self._unsafe("is a link or belongs to another user") from None
            if error.errno in (errno.ENOENT, *_OTHERS):
                return None
            with storage_faults(str(path)):
                raise
        try:
            if not self._holds_key(descriptor):
                self._check_owner(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _holds_key(self, descriptor: int) -> bool:
        """Return whether a folder holds the key of the commitment; False if it holds none, or there is no commitment yet."""
        if not self.commitment:
            return False
        try:
            file = os.open(
                *(KEY_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC),
                dir_fd=descriptor,
            )
            try:
                found = os.read(file, _KEY_BYTES)
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError:
            with storage_faults(self.url):
                raise
        check_key(found, self.commitment, self.url)
        return True

    def _check_owner(self, descriptor: int) -> None:
        """Check that a folder is its owner's, and that nobody else could write into it, where there are modes."""
        found = os.fstat(descriptor)
        if found.st_uid != self.owner:
            raise self._unsafe("is a link or belongs to another user")
        if found.st_mode & 0o022 and os.geteuid() == self.owner:
            os.fchmod(descriptor, 0o700)
            has_modes = os.fstat(descriptor).st_mode != found.st_mode
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            if has_modes and os.listdir(descriptor):
                raise self._unsafe("was open to other users")

    def _unsafe(self, why: str) -> OutputError:
        what = f"this private folder {why}, so no key would be safe in it"
        return OutputError(
            what, self.url.removesuffix(self.inside), "remove it, or choose another place"
        )


def hide(output: Folder, suffix: str) -> Folder:
    """Return the hidden folder beside an output: a private one, if it is on a file system."""
    beside = output.sibling(".", suffix)
    return PrivateFolder(beside.url) if output.is_local else beside


def name_when_whole(name: str) -> str:
    """Return the name of a file, or the one under which a file that is being written will appear."""
    return _BEING_WRITTEN.sub("", name)


@contextmanager
def _temporary(path: str, mode: int, publish: Callable[[Path, str], None]) -> Iterator[IO[bytes]]:
    """Open a file beside a local path; it is published once the block succeeds and it is on the disk."""
    temporary = Path(f"{path}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _find_info(fs: Any, path: str) -> dict[str, Any]:
    """Return what a file system tells of a path; nothing if nothing is there."""
    fs.invalidate_cache()
    try:
        return dict(fs.info(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _holds(fs: Any, path: str, data: bytes) -> bool:
    """Return whether a file holds exactly these bytes."""
    if len(data) <= _COMPARED_BYTES:
        return read_file(fs, path) == data
    if fs.info(path)["size"] != len(data):
        return False
    view = memoryview(data)
    for at in range(0, len(data), _COMPARED_BYTES):
        end = min(at + _COMPARED_BYTES, len(data))
        if fs.cat_file(path, start=at, end=end) != view[at:end]:
            return False
    return True


def _no_folder(path: str) -> OutputError:
    hint = "check output.path, and that this user may write there"
    return OutputError("no folder can be made here", path, hint)
