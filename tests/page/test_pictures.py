"""Pictures of a page: their bars, texts and colours, whatever the labels hold."""

import base64
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from dpdask.page import pictures
from dpdask.page.pictures import Bar, ReleasedHistogram

SVG = "{http://www.w3.org/2000/svg}"


def read(address, kind="image/svg+xml"):
    head, _, data = address.partition(",")
    assert head == f"data:{kind};base64"
    return base64.b64decode(data)


def histogram(*bars):
    return ReleasedHistogram(
        column="x",
        bars=tuple(Bar(label=label, share=share, margin=margin) for label, share, margin in bars),
    )


def texts(drawn):
    return [each.text or "" for each in drawn.iter(f"{SVG}text")]


def test_bars_are_as_long_as_shares():
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


def test_any_label_can_be_drawn():
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


@pytest.mark.parametrize("n", [2, 8, 50])
def test_a_table_has_its_names_and_few_numbers(n):
    table, names = np.linspace(0.0, 0.3, n * n).reshape(n, n), [f"v{place}" for place in range(n)]
    picture = pictures.draw_table(table, names, across="released", down="original", most=0.3)
    drawn = ET.fromstring(read(picture))
    assert len(list(drawn.iter(f"{SVG}image"))) == 2
    assert ("0.30" in texts(drawn)) == (n <= 7)
    assert {"released", "original", "v0"} <= set(texts(drawn))
