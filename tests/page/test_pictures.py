"""Pictures of a page: their bars, texts and colours, whatever the labels hold."""

from __future__ import annotations

import base64
import struct
import zlib
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from dpdask.page import pictures
from dpdask.page.histograms import Bar, ReleasedHistogram

SVG = "{http://www.w3.org/2000/svg}"


def read(address: str, kind: str = "image/svg+xml") -> bytes:
    head, _, data = address.partition(",")
    assert head == f"data:{kind};base64"
    return base64.b64decode(data)


def histogram(*bars: tuple[str, float, float | None]) -> ReleasedHistogram:
    return ReleasedHistogram(
        column="x",
        bars=tuple(Bar(label=label, share=share, margin=margin) for label, share, margin in bars),
    )


def texts(drawn: ET.Element) -> list[str]:
    return [each.text or "" for each in drawn.iter(f"{SVG}text")]


def pixels(png: bytes) -> np.ndarray:
    """Return the colours of an image, read as its format says, with its sums checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(png):
        (size,), kind = struct.unpack_from(">I", png, place), png[place + 4 : place + 8]
        data = png[place + 8 : place + 8 + size]
        assert struct.unpack_from(">I", png, place + 8 + size) == (zlib.crc32(kind + data),)
        chunks[kind], place = data, place + 12 + size
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_bars_are_as_long_as_shares() -> None:
    drawn = ET.fromstring(
        read(
            pictures.draw_histogram(histogram(("a", 0.5, 0.1), ("b", 0.25, None), ("c", 0.0, 0.05)))
        )
    )
    bars = [
        float(each.attrib["width"])
        for each in drawn.iter(f"{SVG}rect")
        if each.attrib["width"] != "100%"
    ]
    assert bars[1] == pytest.approx(bars[0] / 2, abs=0.1)
    assert bars[2] == 0.0
    assert texts(drawn)[:3] == ["a", "b", "c"]
    assert texts(drawn)[-1] == "share in %"


def test_any_label_can_be_drawn() -> None:
    hostile = ['<script>&"', "a\x00b\x0b\ud800", "\u65e5" * 40, "x" * 40, ""]
    drawn = ET.fromstring(
        read(pictures.draw_histogram(histogram(*((label, 0.2, 0.01) for label in hostile))))
    )
    found = texts(drawn)
    assert found[:4] == [
        '<script>&"',
        "a\ufffdb\ufffd\ufffd",
        "\u65e5" * 13 + "\u2026",
        "x" * 27 + "\u2026",
    ]
    assert all(float(each.attrib["x"]) >= 0.0 for each in drawn.iter(f"{SVG}text"))


@pytest.mark.parametrize("n", [2, 7, 8, 50])
def test_a_table_has_a_pixel_for_each_number(n: int) -> None:
    table = np.linspace(0.0, 0.3, n * n).reshape(n, n)
    drawn = ET.fromstring(
        read(
            pictures.draw_table(
                table,
                [f"v{place}" for place in range(n)],
                across="released",
                down="original",
                most=0.3,
            )
        )
    )
    painted, legend = (
        pixels(read(each.attrib["href"], "image/png")) for each in drawn.iter(f"{SVG}image")
    )
    assert painted.shape == (n, n, 3)
    assert painted[0, 0].tolist() == legend[-1, 0].tolist() == [247, 251, 255]
    assert painted[-1, -1].tolist() == legend[0, 0].tolist() == [8, 48, 107]
    assert (np.diff(painted[..., 0].ravel().astype(int)) <= 0).all()
    assert ("0.30" in texts(drawn)) == (n <= 7)
    assert {"released", "original", "v0"} <= set(texts(drawn))
