"""Pictures of a page: their bars, texts and colours, whatever the labels hold."""

import base64
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from dpdask.page import pictures

SVG = "{http://www.w3.org/2000/svg}"


def read(address, kind="image/svg+xml"):
    head, _, data = address.partition(",")
    assert head == f"data:{kind};base64"
    return base64.b64decode(data)


def texts(drawn):
    return [each.text or "" for each in drawn.iter(f"{SVG}text")]


def test_any_label_can_be_drawn():
    hostile = ['<script>&"', "a\x00b\x0b\ud800", "\u65e5" * 40, "x" * 40, ""]
    drawn = ET.fromstring(
        read(pictures.draw_table(np.eye(5), hostile, across="", down="", most=1.0))
    )
    assert {
        '<script>&"',
        "a\ufffdb\ufffd\ufffd",
        "\u65e5" * 13 + "\u2026",
        "x" * 27 + "\u2026",
    } <= set(texts(drawn))
    assert all(float(each.attrib["x"]) >= 0.0 for each in drawn.iter(f"{SVG}text"))


@pytest.mark.parametrize("n", [2, 8, 50])
def test_a_table_has_its_names_and_few_numbers(n):
    table, names = np.linspace(0.0, 0.3, n * n).reshape(n, n), [f"v{place}" for place in range(n)]
    picture = pictures.draw_table(table, names, across="released", down="original", most=0.3)
    drawn = ET.fromstring(read(picture))
    assert len(list(drawn.iter(f"{SVG}image"))) == 2
    assert ("0.30" in texts(drawn)) == (n <= 7)
    assert {"released", "original", "v0"} <= set(texts(drawn))
