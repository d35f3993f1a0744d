"""Pictures of histograms and tables: SVG images inside the page, with the same bytes each time."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from dpdask.page.histograms import ReleasedHistogram

_WIDTH, _EDGE = 440, 8  # CSS pixels: pictures stay readable on a telephone
_LINE, _LETTER = 18, 7.5  # the height of a bar's line, and the width of most letters
_TICK, _BELOW = 4, 40  # the length of a tick, and the height of the axis with its name
_LONGEST = 28
_MOST_NUMBERS, _MOST_LABELS, _MOST_TICKS = 7, 16, 6
_LEGEND = 64  # the width of the legend of colours
_INK, _BAR, _RULE = "#1b1f24", "#4a7ab5", "#8a3b12"
_BLUES = np.array([[247, 251, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]])

Numbers = NDArray[np.float64]


def draw_histogram(histogram: ReleasedHistogram) -> str:
    """Return the address of an image of a histogram: a bar for each level or cell, with its margin."""
    labels = [shorten(bar.label) for bar in histogram.bars]
    left, top, bottom = _EDGE + _find_width(labels) + 2 * _TICK, _EDGE, _EDGE + _LINE * len(labels)
    ends = [(100 * max(0.0, bar.share - (bar.margin or 0.0)), 100 * (bar.share + (bar.margin or 0.0))) for bar in histogram.bars]
    most = max(high for _, high in ends) or 1.0
    scale = (_WIDTH - left - 2 * _EDGE) / most
    parts = []
    for place, (bar, (low, high)) in enumerate(zip(histogram.bars, ends, strict=True)):
        y = top + _LINE * (place + 0.5)
        parts += [
            f'<rect x="{left:.1f}" y="{y - 0.4 * _LINE:.1f}" width="{100 * bar.share * scale:.1f}" height="{0.8 * _LINE:.1f}" fill="{_BAR}"/>',
            *_write(labels[place], left - 2 * _TICK, y, "end"),
            *_draw_line(left - _TICK, y, left, y),
        ]
        if bar.margin is not None:
            reach = (left + low * scale, left + high * scale)
            parts += [*_draw_line(reach[0], y, reach[1], y, _RULE), *(line for end in reach for line in _draw_line(end, y - 3, end, y + 3, _RULE))]
    for tick in _list_ticks(most):
        x = left + tick * scale
        parts += [*_draw_line(x, bottom, x, bottom + _TICK), *_write(f"{tick:g}", x, bottom + 3 * _TICK, "middle")]
    parts += [*_draw_line(left, top, left, bottom), *_draw_line(left, bottom, _WIDTH - _EDGE, bottom)]
    parts += _write("share in %", (left + _WIDTH - _EDGE) / 2, bottom + _BELOW - 12, "middle")
    return _close(parts, bottom + _BELOW)


def draw_table(table: Numbers, labels: Sequence[str], *, across: str, down: str, most: float) -> str:
    """Return the address of an image of a table of numbers, as colours.

    Parameters
    ----------
    table
        A square table of numbers in [0, `most`].
    labels
        The names of its rows and columns.
    across, down
        What the columns and the rows are.
    most
        The number with the darkest colour.
    """
    shown = range(0, len(labels), -(-len(labels) // _MOST_LABELS))
    texts = {place: shorten(labels[place]) for place in shown}
    margin = _EDGE + _find_width(texts.values()) + 2 * _TICK
    left, top = margin + (_LINE if down else 0), _EDGE
    size = _WIDTH - left - _LEGEND
    cell, right, bottom = size / len(labels), left + size, top + size
    parts = [_paint(table / (most or 1.0), left, top, size, size)]
    if len(labels) <= _MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(table):
            ink = "#ffffff" if value > 0.55 * most else _INK
            parts += _write(f"{value:.2f}", left + cell * (column + 0.5), top + cell * (row + 0.5), "middle", ink)
    for place, text in texts.items():
        at = cell * (place + 0.5)
        parts += [*_draw_line(left - _TICK, top + at, left, top + at), *_write(text, left - 2 * _TICK, top + at, "end")]
        parts += _draw_line(left + at, bottom, left + at, bottom + _TICK)
        parts += _write(text, left + at, bottom + 2 * _TICK, "end", turned=True)
    parts += _write(across, left + size / 2, bottom + margin, "middle") + _write(down, _EDGE + _LINE / 2, top + size / 2, "middle", turned=True)
    legend = right + 2 * _EDGE
    parts.append(_paint(np.linspace(1.0, 0.0, 64)[:, None], legend, top, _EDGE, size))
    for tick in _list_ticks(most):
        y = bottom - size * tick / (most or 1.0)
        parts += [*_draw_line(legend + _EDGE, y, legend + _EDGE + _TICK, y), *_write(f"{tick:g}", legend + _EDGE + 2 * _TICK, y, "start")]
    return _close(parts, bottom + margin + (_LINE if across else 0))


def shorten(text: str) -> str:
    """Return a text that fits beside a picture."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    fits = sum(width <= _LONGEST for width in accumulate(map(_measure, shown)))
    return shown if fits == len(shown) else f"{shown[: fits - 1]}…"


def _measure(letter: str) -> int:
    """Return how many usual letters a letter is as wide as."""
    return 2 if east_asian_width(letter) in "FW" else 1


def _find_width(texts: Iterable[str]) -> float:
    """Return the width of the longest text, more or less: the reader's browser chooses the letters."""
    return _LETTER * max((sum(map(_measure, text)) for text in texts), default=0)


def _list_ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at most `most`."""
    step = 10.0 ** math.floor(math.log10(most)) / 10.0 if most > 0.0 else 1.0
    step = next(step * times for times in (1, 2, 5, 10, 20, 50) if most / (step * times) < _MOST_TICKS)
    return [step * place for place in range(math.floor(most / step * (1.0 + 1e-9)) + 1)]


def _draw_line(x1: float, y1: float, x2: float, y2: float, colour: str = _INK) -> list[str]:
    return [f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>']


def _write(text: str, x: float, y: float, anchor: str, colour: str = _INK, *, turned: bool = False) -> list[str]:
    """Return a text in the middle of a line; a turned one is read from below."""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" dy="0.35em" text-anchor="{anchor}" fill="{colour}"{turn}'
    return [f"<text {place}>{escape(text)}</text>"] if text else []


def _paint(shares: Numbers, x: float, y: float, width: float, height: float) -> str:
    """Return an image with a pixel for each number in [0, 1]."""
    anchors = np.linspace(0.0, 1.0, len(_BLUES))
    pixels = np.stack([np.interp(shares, anchors, channel) for channel in _BLUES.T], axis=-1).round().astype(np.uint8)
    lines = np.insert(pixels.reshape(len(pixels), -1), 0, 0, axis=1)  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", shares.shape[1], shares.shape[0], 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" style="image-rendering: pixelated"'
    return f'<image {place} href="{_address("image/png", png)}"/>'


def _close(parts: Sequence[str], height: float) -> str:
    """Return the address of an image with these parts."""
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    style = 'font-family="sans-serif" font-size="12" fill="none"'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
    return _address("image/svg+xml", "\n".join((drawn + parts[0], *parts[1:], "</svg>\n")).encode())


def _address(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
