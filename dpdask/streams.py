"""Keyed secure random streams: (run key, mechanism id, fragment id) -> a numpy Generator on AES-128 in counter mode.

A draw is a pure function of these three, so a task that runs twice draws the same noise: a retry, a lost worker or a
resumed run is never a second release. The key is 256 bits from the operating system; each stream's AES key is the keyed
BLAKE2b of its identifiers (docs/explanation/design.md, Streams).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import NoReturn

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from randomgen import AESCounter

STREAM_FORMAT = 1
_PERSON = b"dpdask stream %d" % STREAM_FORMAT


class RunKey:
    """The 256-bit secret of one run; it refuses to be printed, pickled or tokenised.

    Parameters
    ----------
    secret
        32 bytes.

    Privacy
    -------
    Whoever holds the key can redraw every noise value of the run and so undo it. It is therefore never put in a Dask
    graph: tasks are handed the place of its file and read it there.
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
        seed
            The seed.
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


Noise = Callable[[str], Generator | None]
"""Returns the random stream of a noisy measurement by its id; None: noise from the operating system's entropy."""


def fresh_seed() -> int:
    """Return a new 64-bit seed, for draws that need no secret: synthetic records are post-processing."""
    return secrets.randbits(64)


def stream(key: RunKey, mechanism_id: str, fragment_id: str) -> Generator:
    """Return the random stream of one mechanism on one fragment.

    Parameters
    ----------
    key
        The run's key.
    mechanism_id
        Names the randomised call, for instance `dip/rating`; two calls never share one.
    fragment_id
        Names the fragment of the table, independent of scheduling and partition numbers.

    Returns
    -------
    numpy.random.Generator
        On AES-128-CTR, at its start.
    """
    parts = [part.encode() for part in (mechanism_id, fragment_id)]
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    digest = blake2b(message, key=key.reveal(), person=_PERSON, digest_size=16).digest()
    return Generator(AESCounter(key=int.from_bytes(digest, "little")))


def words(rng: Generator, *shape: int) -> NDArray[np.uint64]:
    """Return the stream's next raw 64-bit words, uniform on 0..2**64-1.

    Raw words, not numpy's distributions: numpy may change how those use the stream, and a resumed run must not notice.
    """
    raw: NDArray[np.uint64] = np.asarray(rng.bit_generator.random_raw(int(math.prod(shape))))
    return raw.reshape(shape)


class Streams:
    """The random streams of one part of a table; each continues where it stopped.

    Parameters
    ----------
    read_key
        Reads the run's key; called when a stream is first asked for.
    fragment_id
        Names the part.
    """

    def __init__(self, read_key: Callable[[], RunKey], fragment_id: str) -> None:
        self._read_key, self._fragment_id = read_key, fragment_id
        self._open: dict[str, Generator] = {}

    def of_part(self, mechanism_id: str) -> Generator:
        """Return the part's own stream for a randomised call."""
        if mechanism_id not in self._open:
            self._open[mechanism_id] = stream(self._read_key(), mechanism_id, self._fragment_id)
        return self._open[mechanism_id]

    def of_run(self, mechanism_id: str) -> Generator:
        """Return a stream that all parts share, at its start."""
        return stream(self._read_key(), mechanism_id, "")
