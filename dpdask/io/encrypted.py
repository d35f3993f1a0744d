"""Private files in an object store: encrypted with a key that is never there, so that removing the key removes them.

A store may keep old versions of files, and what was deleted, for years. So the files of a run in a
store are encrypted with a key derived from the run key. The run key stays with the driver
(`jobs.run_keys`), and each process that needs it holds it in memory: one that does not hold it yet
asks for it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpdask.errors import DpdaskError, InputError, MissingError, OutputError, TemporaryError
from dpdask.io.faults import storage_faults
from dpdask.io.storage import Folder, name_when_whole

KEY_NAME = "run.key"
_DIGITS = 20  # the most of a number of rows or bytes
LOCK = "lock"
_KEY_BYTES = 32
_MARKS = {
    KEY_NAME,
    LOCK,
    "release.npz",
    "series.json",
}  # a folder with none of these is none of ours
_COMMIT_PERSON = b"dpdask commit"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = {errno.ENOTDIR, errno.ELOOP, errno.EACCES}
_DESCRIPTORS = "/proc/self/fd"
_BY_DESCRIPTOR = Path(_DESCRIPTORS).is_dir()  # elsewhere the name is used again after the checks
_held_folders: dict[str, int] = {}  # by URL


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


@dataclass(frozen=True, slots=True)
class PrivateFolder(Folder):
    """A folder for this user's secrets, or one inside it."""

    inside: str = ""  # the part of the URL that lies below the private folder itself
    commitment: str = ""  # that of the run key in it, once there is one
    # The user who made it: workers may run as another one.
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
        raise MissingError(
            "this folder was removed while it was made", self.url, "run again"
        )  # by another driver, or whoever can write beside it

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
            descriptor = os.open(path, _FOLDER)
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


BOUNDS_NAME = "bounds.npz"
_PERSON, _NONCE_PERSON = b"dpdask files", b"dpdask nonce"
_NONCE_BYTES = 12
_LENGTH_BYTES, _LEAST_BYTES = 8, 2**12
_held: dict[str, bytes] = {}  # by the names of `list_names`
_read: dict[tuple[str, str], bytes] = {}  # by run and place
Ask = Callable[[str], bytes | None]
Tell = Callable[[str, bytes], None]
_others: list[tuple[Ask, Tell]] = []


def exchange_keys(ask: Ask, tell: Tell) -> None:
    """Let this process ask others for what it does not hold (None: they do not know it), and tell them of a run's bounds."""
    _others.append((ask, tell))


def list_names(run_id: str) -> tuple[str, str]:
    """Return the names under which processes hold a run's key, and the bounds of its units."""
    return run_id, f"{run_id}/{BOUNDS_NAME}"


def hold_key(name: str, secret: bytes) -> None:
    """Hold a run's key (32 bytes), or its bounds, in the memory of this process."""
    _held[name] = secret


def drop_key(run_id: str) -> None:
    """Forget a run's key and bounds, if they are held, and the files that were read with the key."""
    for name in list_names(run_id):
        _held.pop(name, None)
    for kept in [kept for kept in _read if kept[0] == run_id]:
        _read.pop(kept, None)


def count_missing_digits(numbers: Iterable[int]) -> int:
    """Return how many digits numbers lack to the longest one, so that no length tells of them."""
    return sum(_DIGITS - len(str(number)) for number in numbers)


def encrypt(secret: bytes, place: str, data: bytes, n_bytes: int = 0) -> bytes:
    """Return a file's content, padded, encrypted and authenticated by AES-256-GCM; the nonce is a keyed digest of place and content.

    Its length is a power of two, at least 4 KiB, and some bytes for nonce and tag. That is too
    little where the length of the content depends on private counts: whoever knows all rows but one
    knows whether the last one makes it longer than a power of two.

    Parameters
    ----------
    n_bytes
        A public number that is at least its length, wherever this length is not public.
    """
    nonce = blake2b(
        f"{len(place)}:{place}".encode() + data,
        key=secret,
        person=_NONCE_PERSON,
        digest_size=_NONCE_BYTES,
    ).digest()
    length = len(data).to_bytes(_LENGTH_BYTES, "big")
    padded = (length + data).ljust(
        max(_LEAST_BYTES, 1 << (_LENGTH_BYTES + max(n_bytes, len(data)) - 1).bit_length()), b"\0"
    )
    return nonce + _cipher(secret).encrypt(nonce, padded, place.encode())


def decrypt(secret: bytes, place: str, data: bytes) -> bytes:
    """Return what `encrypt` was given."""
    try:
        padded = _cipher(secret).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode())
    except (InvalidTag, ValueError):
        raise InputError(
            "this file of the unfinished run was changed",
            place,
            "`dpdask abort` the run and begin again",
        ) from None
    return padded[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(padded[:_LENGTH_BYTES], "big")]


def _cipher(secret: bytes) -> AESGCM:
    return AESGCM(blake2b(key=secret, person=_PERSON, digest_size=32).digest())


@dataclass(frozen=True, slots=True, repr=False)
class EncryptedFile:
    """A private file of a run that the driver alone reads and writes, on any storage: without the run's key nobody can read it."""

    folder: Folder
    name: str
    secret: bytes

    def read(self) -> bytes | None:
        """Return its content; None if it does not exist, was changed, or is of another run."""
        try:
            return decrypt(self.secret, self.name, self.folder.read(self.name, replaced=True))
        except InputError:
            return None

    def write(self, data: bytes, n_bytes: int) -> None:
        """Replace its content; for the length see `encrypt`."""
        self.folder.write(self.name, encrypt(self.secret, self.name, data, n_bytes), private=True)


@dataclass(frozen=True, slots=True)
class EncryptedFolder(Folder):
    """A folder in a store whose files are encrypted with the key of a run; tasks carry its name, never the key."""

    run_id: str  # the name of the run whose key this process must hold
    commitment: str = ""

    @property
    def key(self) -> bytes:
        """The run's key."""
        return check_key(self._find(self.run_id), self.commitment, self.url)

    def _find(self, name: str) -> bytes:
        for ask, _ in _others:
            if name not in _held and (secret := ask(name)) is not None:
                hold_key(name, secret)
        try:
            return _held[name]
        except KeyError:
            raise TemporaryError(
                "a process cannot get the key of the run", None, "run again to resume"
            ) from None

    def child(self, name: str) -> EncryptedFolder:
        """Return a folder inside this one, with the same key."""
        return replace(self, url=f"{self.url}/{name}")

    def read(self, name: str, *, replaced: bool = False) -> bytes:
        """Return a file's content; see `Folder.read`."""
        if name == BOUNDS_NAME:
            return self._find(list_names(self.run_id)[1])
        return decrypt(self.key, self._place(name), Folder.read(self, name, replaced=replaced))

    def read_once(self, name: str) -> bytes:
        """Return what a run has written by `write`, once and for all; each process reads it once and drops it with the key."""
        place = (self.run_id, self._place(name))
        if place not in _read:
            _read[place] = self.read(name, replaced=True)
        return _read[place]

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Write a file; see `Folder.write`."""
        Folder.write(self, name, encrypt(self.key, self._place(name), data), private=private)

    def claim(self, name: str, data: bytes) -> bytes:
        """Write a file unless it exists, and return its content; see `Folder.claim`."""
        if name == BOUNDS_NAME:  # the size of a file would tell how many units have too many rows
            held = list_names(self.run_id)[1]
            hold_key(held, data)
            for _, tell in _others:
                tell(held, data)
            return data
        there = Folder.claim(self, name, encrypt(self.key, self._place(name), data))
        return decrypt(self.key, self._place(name), there)

    def open(self, name: str) -> NoReturn:
        """Raise: an encrypted file is read as a whole."""
        raise NotImplementedError(name)

    def _place(self, name: str) -> str:
        return f"{self.url.rpartition('/')[2]}/{name}"
