"""Keyed secure random streams: (run key, mechanism id, fragment id) -> the words of AES-128 in counter mode.

A draw is a pure function of these three, so a task that runs twice draws the same noise: a retry, a
lost worker or a resumed run is never a second release. The key is 256 bits from the operating
system; each stream's AES key is the keyed BLAKE2b of its identifiers (docs/explanation/design.md,
Streams).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from hashlib import blake2b
from threading import Lock
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.random import PCG64, Generator

from dpdask.arrays import Words

STREAM_FORMAT = 1
_PERSON = b"dpdask stream %d" % STREAM_FORMAT
_BLOCK_BYTES = 16
_TOGETHER = 2**12  # blocks that are encrypted at once: counters and words stay in the cache
_COUNTERS = np.stack([np.arange(_TOGETHER, dtype="<u8"), np.zeros(_TOGETHER, dtype="<u8")], axis=1)
# to add both halves is faster than to skip one
_STEP = np.tile(np.array([_TOGETHER, 0], dtype="<u8"), (_TOGETHER, 1))
_COUNTERS.setflags(write=False)
_STEP.setflags(write=False)


class RunKey:
    """The 256-bit secret of one run; it refuses to be printed, pickled or tokenised.

    Privacy
    -------
    Whoever holds the key can redraw every noise value of the run and so undo it. It is therefore
    never put in a Dask graph: tasks are handed the place of its file and read it there.
    """

    __slots__ = ("__secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise ValueError("a run key has 32 bytes")
        self.__secret = bytes(secret)

    @classmethod
    def fresh(cls) -> RunKey:
        """Return a new key from the operating system's entropy."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def insecure(cls, seed: int, release: int = 0) -> RunKey:
        """Return the key of a seed: reproducible, guessable, and therefore for tests only.

        Parameters
        ----------
        release
            The number of the release in its series: each has another key.
        """
        text = f"{seed} release {release}" if release else str(seed)
        return cls(blake2b(text.encode(), digest_size=32, person=b"dpdask insecure").digest())

    def reveal(self) -> bytes:
        """Return the 32 secret bytes, for the key file alone."""
        return self.__secret

    def __repr__(self) -> str:
        return "RunKey(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a run key is never pickled: hand tasks the place of its file")

    def __getstate__(self) -> NoReturn:
        self.__reduce__()

    def __dask_tokenize__(self) -> NoReturn:
        raise TypeError("a run key is never tokenised: seeds and tokens are apart")


class Stream:
    """The words of one randomised call: AES-128 of the little-endian counters 0, 1, 2 and so on, two words a block.

    Privacy
    -------
    Whoever holds the key can draw the words again. A stream is never pickled or copied: the copy
    would repeat words. Threads that share one get different words.
    """

    __slots__ = ("_cipher", "_lock", "_n_drawn")

    def __init__(self, key: bytes) -> None:
        self._lock = Lock()
        self._cipher = Cipher(AES(key), ECB()).encryptor()  # noqa: S305 - of counters, which never repeat: this is counter mode
        self._n_drawn = 0

    def draw(self, n: int) -> Words:
        """Return the next n words, uint64 of shape (n,), independent and uniform on 0..2**64-1."""
        with self._lock:
            return self._draw(n)

    def _draw(self, n: int) -> Words:
        first, skipped = divmod(self._n_drawn, 2)
        n_blocks = (skipped + n + 1) // 2
        counters = _COUNTERS[: n_blocks or 1].copy()
        # the cipher asks for almost a block more than it writes
        out = np.empty(2 * n_blocks + 2, dtype="<u8")
        given, room = counters.data.cast("B"), out.data.cast("B")
        counters[:, 0] += np.uint64(first)
        for done in range(0, n_blocks, _TOGETHER):
            if done:
                counters += _STEP
            self._cipher.update_into(
                given[: (n_blocks - done) * _BLOCK_BYTES], room[done * _BLOCK_BYTES :]
            )
        self._n_drawn += n
        return out[skipped : skipped + n].astype(np.uint64, copy=False)

    def seed_generator(self) -> Generator:
        """Return one of numpy's generators, seeded with the next words: for draws that protect nobody, such as a sample for a comparison."""
        return Generator(PCG64(self.draw(4)))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream is never pickled or copied: the copy would repeat its words")


Rng = Stream | Generator
"""What words are drawn from: a stream, or one of numpy's generators where no secret is needed."""

Noise = Callable[[str], Rng | None]
"""Returns the random stream of a noisy measurement by its id; None: noise from the operating system's entropy."""


def fresh_seed() -> int:
    """Return a new 64-bit seed, for draws that need no secret: synthetic records are post-processing."""
    return secrets.randbits(64)


def stream(key: RunKey, mechanism_id: str, fragment_id: str) -> Stream:
    """Return the random stream of one mechanism on one fragment, at its start.

    Parameters
    ----------
    mechanism_id
        Names the randomised call, for instance `dip/rating`; two calls never share one.
    fragment_id
        Names the fragment of the table, independent of scheduling and partition numbers.
    """
    parts = [part.encode() for part in (mechanism_id, fragment_id)]
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return Stream(blake2b(message, key=key.reveal(), person=_PERSON, digest_size=16).digest())


def words(rng: Rng, *shape: int) -> Words:
    """Return the next raw 64-bit words, uniform on 0..2**64-1.

    Raw words, not numpy's distributions: numpy may change how those use the words, and a resumed
    run must not notice.
    """
    n = math.prod(shape)
    raw: Words = (
        rng.draw(n) if isinstance(rng, Stream) else np.asarray(rng.bit_generator.random_raw(n))
    )
    return raw.reshape(shape)


class Streams:
    """The random streams of one part of a table; each continues where it stopped.

    Parameters
    ----------
    read_key
        Reads the run's key; called when a stream is first asked for.
    """

    def __init__(self, read_key: Callable[[], RunKey], fragment_id: str) -> None:
        self._read_key, self._fragment_id = read_key, fragment_id
        self._open: dict[str, Stream] = {}

    def of_part(self, mechanism_id: str) -> Stream:
        """Return the part's own stream for a randomised call."""
        if mechanism_id not in self._open:
            self._open[mechanism_id] = stream(self._read_key(), mechanism_id, self._fragment_id)
        return self._open[mechanism_id]

    def of_run(self, mechanism_id: str) -> Stream:
        """Return a stream that all parts share, at its start."""
        return stream(self._read_key(), mechanism_id, "")
