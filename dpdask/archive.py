"""The file format of fitted or drawn contents: a header and arrays, with a kind and a format number that are checked at reading."""

from __future__ import annotations

import datetime as dt
import io
import json
import lzma
import math
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.errors import DpdaskError, InputError
from dpdask.version import __version__

T = TypeVar("T")
Json = dict[str, Any]  # what JSON holds: a part of a header or of a card
Named = Mapping[str, Any]  # values by their names: a header, arrays, a part of a card
Contents = tuple[Named, Named]  # a header and arrays, for `Archive.pack`

_HEADER = "header"
_DATE = "date of a level"
_READING = threading.RLock()  # numpy parses headers with `ast.parse`, which two threads may not call at once before Python 3.11.8 (cpython 106905)
# what a file may be unpacked to: noise hardly compresses, and a bomb of zeros does a thousandfold
_MOST_TIMES, _MOST_BYTES = 256, 2**28
_HINT = "read it with the version that wrote it, or begin again (a job: `dpdask abort` it first)"

# raised when the bytes are of another file, or cut
_UNREADABLE = (
    *(
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        OSError,
        EOFError,
        RuntimeError,
    ),
    *(
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        tokenize.TokenError,
        pa.ArrowException,
        DpdaskError,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The format of one kind of content: an npz file without pickles, whose array `header` is JSON."""

    kind: str
    format: int  # the version of the content's layout: raise it whenever the layout changes
    noun: str
    is_compressed: bool = False
    oldest: int | None = None  # the first format that is read; only `format` if None

    def pack(self, header: Named, arrays: Named) -> bytes:
        """Return a header and arrays as bytes; the same content gives the same bytes.

        Parameters
        ----------
        header
            What JSON can hold, and dates; without the keys `kind` and `format`.
        """
        text = json.dumps(
            {"kind": self.kind, "format": self.format, **header}, default=_tag_date
        ).encode()
        buffer = io.BytesIO()
        with zipfile.ZipFile(
            buffer, "w", zipfile.ZIP_DEFLATED if self.is_compressed else zipfile.ZIP_STORED
        ) as members:
            for name, array in {_HEADER: np.frombuffer(text, dtype=np.uint8), **arrays}.items():
                with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(
                        member, np.asarray(array, order="C"), allow_pickle=False
                    )
        return buffer.getvalue()

    def unpack(self, data: bytes, where: str, build: Callable[[Named, Named], T]) -> T:
        """Return the contents of a header and arrays.

        Parameters
        ----------
        build
            Makes the content from the header and the arrays; it may raise any error on wrong ones.
        """
        try:
            with _READING, np.load(io.BytesIO(data), allow_pickle=False) as members:
                _check_sizes(members.zip, max(_MOST_TIMES * len(data), _MOST_BYTES))
                header = json.loads(members[_HEADER].tobytes(), object_hook=_untag_date)
                found, oldest = header["format"], self.oldest or self.format
                is_known = type(found) is int and oldest <= found <= self.format
                if is_known and header["kind"] == self.kind:
                    return build(header, members)
        except MemoryError:
            raise  # Arrow's, too: the file may be right
        except _UNREADABLE:
            pass
        raise InputError(
            f"this is not a {self.noun} of format {self.format}, which dpdask {__version__} reads",
            where,
            _HINT,
        )


def _check_sizes(members: zipfile.ZipFile, most: int) -> None:
    """Check that each array is as large as its member, and that all together are as large as may be, so that no wrong size asks for memory that nobody has."""
    if sum(member.file_size for member in members.infolist()) > most:
        raise ValueError
    for member in members.infolist():
        with members.open(member) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if math.prod(shape) * dtype.itemsize >= member.file_size:
            raise ValueError


def require(fact: object, otherwise: str) -> None:
    """Check a fact about a content; the error is for developers, since a reader is told one line."""
    if not fact:
        raise ValueError(otherwise)


def check_array(
    array: NDArray[Any], dtype: Any, shape: tuple[int, ...], low: float, high: float
) -> None:
    """Check that an array has a type and a shape, and numbers between two ends: none is NaN."""
    require(array.dtype == dtype and array.shape == shape, "an array of another type or shape")
    require(((array >= low) & (array <= high)).all(), "numbers that cannot be")


class Archived:
    """The base of classes that are written as an archive: a class names its `archive` and converts its attributes to contents and back."""

    __slots__ = ()
    archive: ClassVar[Archive]

    def to_bytes(self) -> bytes:
        """Return the object as bytes; the same content gives the same bytes."""
        return self.archive.pack(*self._contents())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Return the object that `to_bytes` wrote."""
        return cls.archive.unpack(data, where, cls._of_contents)

    def _contents(self) -> Contents:
        raise NotImplementedError

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        raise NotImplementedError


def salt(data: bytes, secret: bytes) -> bytes:
    """Return an archive with a secret in it, without which its digest confirms no guess of the content."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as members:
        members.comment = secret
    return buffer.getvalue()


def _tag_date(value: object) -> dict[str, str]:
    """Return a date or a time as a mapping that `_untag_date` reads; JSON has no dates."""
    if not isinstance(value, dt.date):
        raise TypeError(type(value).__name__)
    return {_DATE: value.isoformat()}


def _untag_date(value: Json) -> object:
    if set(value) != {_DATE}:
        return value
    kind = dt.datetime if "T" in value[_DATE] else dt.date
    return kind.fromisoformat(value[_DATE])
