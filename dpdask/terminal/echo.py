"""Printing that neither obeys control characters nor fails; imported with the command line, so nothing slow is here."""

from __future__ import annotations

import codecs
import io
import json
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

# all of Unicode's category Cc but the newline, escaped as in JSON, so that what is JSON stays the same
_ESCAPED = {
    code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != ord("\n")
}


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escape what an encoding does not have as JSON does."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("dpdask", _escape)


class _Lasting(io.RawIOBase):
    """Writes where a text stream does, and never raises: what cannot be written is lost."""

    def __init__(self, stream: TextIO, raw: io.RawIOBase) -> None:
        # the stream closes what is below it when it is collected
        self._stream, self._raw, self._told = (
            stream,
            raw,
            False,
        )

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()

    def write(self, data: Any) -> int:
        try:
            # somebody made it non-blocking, and its reader is slow
            while (written := self._raw.write(data)) is None:
                select.select([], [self._raw], [])
        except (OSError, ValueError) as error:
            if (
                self._stream is sys.__stdout__
                and not self._told
                and not isinstance(error, BrokenPipeError)
            ):
                self._told = True
                echo(
                    f"dpdask: WARNING standard output cannot be written ({getattr(error, 'strerror', 'closed')}), so the result is lost",
                    err=True,
                )
            return len(data)
        return written


def make_lasting(stream: TextIO) -> TextIO:
    """Return a stream that writes where another does and never raises; the same one if it is no file, as in a notebook."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, io.RawIOBase) or isinstance(raw, _Lasting):
        return stream
    with suppress(OSError, ValueError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream, raw)), stream.encoding, "dpdask", line_buffering=True
    )


def keep_streams() -> None:
    """Let nothing that this process prints, by itself or by a library, decide how it ends.

    The numbers of streams that are closed are taken, or a file of the run would get one, and be
    written to by whatever prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # this is the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - it lasts
        setattr(sys, name, make_lasting(stream))


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    r"""Print a text, its control characters but newlines escaped, such as \u001b; nothing if there is nowhere to print."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # as in a program without a console
        stream = make_lasting(stream)
        stream.write(text.translate(_ESCAPED) + "\n" * nl)
        stream.flush()


def echo_json(value: Any, *, err: bool = False) -> None:
    """Print a value as one line of JSON, in UTF-8 or in ASCII, so that each reader of JSON can read it."""
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    echo(json.dumps(value, ensure_ascii=codecs.lookup(encoding).name != "utf-8"), err=err)


def show(as_json: bool, result: dict[str, Any], text: str) -> None:
    """Print a result, as an object or as text."""
    echo_json(result) if as_json else echo(text)


def warn(warning: str) -> None:
    """Print a warning on stderr."""
    echo(f"dpdask: WARNING {warning}", err=True) if sys.stderr.isatty() else echo_json(
        {"warning": warning}, err=True
    )
