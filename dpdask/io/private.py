"""Hidden folders on a file system: opened by name, checked, and used by descriptor, so that nobody can exchange them in between.

Another user who may write into the parent folder can give a hidden folder's name to another folder at any moment. They can take one of their
own, or another one of this user's; they cannot make one that belongs to this user, and cannot change what is in one. So each use opens the
folder once and checks its owner. As soon as there is a run key, each use also compares the key in the folder with a commitment from memory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from dpdask.errors import DpdaskError, MissingError, OutputError
from dpdask.io.faults import storage_faults
from dpdask.io.storage import Folder, name_when_whole

KEY_NAME = "run.key"
LOCK = "lock"
_KEY_BYTES = 32
_MARKS = {KEY_NAME, LOCK, "release.npz", "series.json"}  # a folder with none of these is none of ours
_PERSON = b"dpdask commit"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = {errno.ENOTDIR, errno.ELOOP, errno.EACCES}
_DESCRIPTORS = "/proc/self/fd"
_BY_DESCRIPTOR = Path(_DESCRIPTORS).is_dir()  # elsewhere the name is used again after the checks
_held: dict[str, int] = {}  # by URL


def commit(secret: bytes) -> str:
    """Return a digest of a run key that names it and tells nothing about it: tasks carry it, from the driver's memory."""
    return blake2b(key=secret, person=_PERSON, digest_size=16).hexdigest()


def check_key(secret: bytes, commitment: str, where: str | None) -> bytes:
    """Return a key that was read, compared with its commitment if there is one.

    Raises
    ------
    OutputError
        If it is another key.
    """
    if commitment and commit(secret) != commitment:
        what = "another key was put in place of the run key: somebody else can write here"
        raise OutputError(what, where, "restore the hidden folder, or `dpdask abort` the run and choose a place that nobody else can write to")
    return secret


@dataclass(frozen=True, slots=True)
class PrivateFolder(Folder):
    """A folder for this user's secrets, or one inside it.

    Attributes
    ----------
    inside
        The part of the URL that lies below the private folder itself.
    commitment
        That of the run key in it, once there is one.
    owner
        The user who made it: workers may run as another one.
    """

    inside: str = ""
    commitment: str = ""
    owner: int = field(default_factory=os.geteuid)

    @property
    def key(self) -> bytes:
        """The run key, compared with its commitment."""
        return check_key(self.read(KEY_NAME), self.commitment, self.url)

    def child(self, name: str) -> PrivateFolder:
        """Return a folder inside this one, under the same checks."""
        return replace(self, url=f"{self.url}/{name}", inside=f"{self.inside}/{name}")

    def exists(self, name: str = "") -> bool:
        """Return whether something has the folder's name, whatever it is; or as for any folder whether a file is in it."""
        return Folder.exists(self, name) if name or self.inside else os.path.lexists(self.local_path)

    def create(self, mode: int | None = 0o700) -> None:
        """Create the folder for this user alone, unless it is there."""
        if self.inside:
            Folder.create(self, mode)
        else:
            os.close(self.open_made())

    def open_made(self) -> int:
        """Create the folder, mode 0700, unless it is there, and return a descriptor of it.

        Raises
        ------
        OutputError
            If the folder cannot be made, or is not this user's.
        """
        for _ in range(2):
            Folder(self.url).create(mode=0o700)
            descriptor = self._open()
            if descriptor is not None:
                os.fchmod(descriptor, 0o700)
                return descriptor
        raise MissingError("this folder was removed while it was made", self.url, "run again")  # by another driver, or whoever can write beside it

    @contextmanager
    def hold(self, descriptor: int) -> Iterator[None]:
        """Let this process use the folder by one descriptor until the block ends, whatever its name leads to."""
        _held[self.url] = descriptor
        try:
            yield
        finally:
            del _held[self.url]

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
            error.where = error.where and error.where.replace(here.removeprefix("file://"), str(self.local_path))
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        """Return a descriptor of the private folder; None if there is none.

        It is the one that this process holds, or one that has the run key, or one that belongs to the owner.
        """
        place = self.url.removesuffix(self.inside)
        held = _held.get(place)
        if held is not None:
            with suppress(OSError):
                descriptor = os.dup(held)
                if _held.get(place) == held:  # still open when it was copied
                    return descriptor
                os.close(descriptor)
        path = Folder(place).local_path
        with storage_faults(str(path)):
            try:
                descriptor = os.open(path, _FOLDER)
            except OSError as error:
                if error.errno in _OTHERS and os.path.lexists(path):
                    raise self._unsafe("is a link or belongs to another user") from None
                if error.errno in (errno.ENOENT, *_OTHERS):
                    return None
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
        with storage_faults(self.url):
            try:
                file = os.open(KEY_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
            except FileNotFoundError:
                return False
            try:
                check_key(os.read(file, _KEY_BYTES), self.commitment, self.url)
            finally:
                os.close(file)
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
        return OutputError(what, self.url.removesuffix(self.inside), "remove it, or choose another place")


def hide(output: Folder, suffix: str) -> Folder:
    """Return the hidden folder beside an output: a private one, if it is on a file system."""
    beside = output.sibling(".", suffix)
    return PrivateFolder(beside.url) if output.is_local else beside
