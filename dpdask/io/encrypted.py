"""Private files in an object store: encrypted with a key that is never there, so that removing the key removes them.

A store may keep old versions of files, and what was deleted, for years. So the files of a run in a
store are encrypted with a key derived from the run key. The run key stays with the driver
(`jobs.run_keys`), and each process that needs it holds it in memory: one that does not hold it yet
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpdask.arrays import freeze_class
from dpdask.errors import InputError, TemporaryError
from dpdask.io.storage import BOUNDS_NAME, Folder, check_key

_DIGITS = 20  # the most of a number of rows or bytes
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


@freeze_class(kw_only=False, repr=False)
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


@freeze_class(kw_only=False)
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

    def open(self, name: str, n_bytes: int | None = None) -> NoReturn:
        """Raise: an encrypted file is read as a whole."""
        raise NotImplementedError(name)

    def _place(self, name: str) -> str:
        return f"{self.url.rpartition('/')[2]}/{name}"
