"""Pages of releases and of plans in headless Chromium: nothing runs, nothing is loaded, nothing overflows, and all texts can be read, also on paper."""

import base64
import re
from itertools import pairwise

import pytest
from page.pages import SCHEMA, SEVEN, parts, plan_page, release, synthetic

from dpdask.page import make_page

RANGES = {
    "privacy": None,
    "mechanism": {
        "kind": "interval",
        "columns": {
            "income": {
                "design": "case1",
                "anchors": {"name": "uniform", "loc": 0, "scale": 1000},
                "nulls": "public",
            }
        },
    },
    "schema": {
        name: {**column, "outside": "refuse"} if name == "income" else {"role": "drop"}
        for name, column in SCHEMA.items()
    },
}
MAKERS = {
    "rows": release,
    "records": synthetic,
    "ranges": lambda folder: release(folder, **RANGES),
}
READ = """
const box = (element) => element.getBoundingClientRect();
const images = [...document.images, ...document.querySelectorAll("[role=img]")];
return {
  title: document.title,
  headings: [...document.querySelectorAll("h1, h2, h3")].map((each) => Number(each.tagName[1])),
  alts: images.map((each) => each.alt || each.getAttribute("aria-label")),
  drawn: [...document.images].every((each) => each.complete && each.naturalWidth > 0),
  loaded: performance.getEntriesByType("resource").map((each) => each.name).filter((name) => !name.startsWith("data:")),
  scripts: document.scripts.length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  unnamed: [...document.querySelectorAll("[role=region], pre[tabindex]")].filter((each) => !each.getAttribute("aria-label")).length
    + [...document.querySelectorAll("input")].filter((each) => !each.closest("label")).length,
  outside: [...document.querySelectorAll("body *")].filter((each) => !each.closest(".wide, pre, .axis") && box(each).width > 0
    && (box(each).right > innerWidth + 1 || box(each).left < -1)).map((each) => each.outerHTML.slice(0, 80)),
};"""
CONTRASTS = """
const levels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => levels(colour).slice(0, 3).map((each) => each / 255)
  .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
  .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
const behind = (element) => {
  const colour = getComputedStyle(element).backgroundColor, [, , , opacity = 1] = levels(colour);
  return opacity == 1 ? colour : element.parentElement ? behind(element.parentElement) : "rgb(255, 255, 255)";
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
while (texts.nextNode()) if (texts.currentNode.data.trim()) {
  const element = texts.currentNode.parentElement;
  const [dark, bright] = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => a - b);
  found.push([(bright + 0.05) / (dark + 0.05), texts.currentNode.data.trim()]);
}
return found;"""


@pytest.fixture(scope="module", params=[*MAKERS, "plan"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "release.html"
    if request.param == "plan":
        path.write_text(plan_page(folder), encoding="utf-8")
        return path
    data, faults = make_page(*parts(MAKERS[request.param](folder)))
    assert faults == ()
    path.write_bytes(data)
    return path


def show(browser, path, *, width=1280, scheme="light", media=""):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())


@pytest.mark.few(1)
@pytest.mark.parametrize("is_open", [False, True], ids=["folded", "open"])
def test_a_page_can_be_read(browser, page, is_open):
    browser.get_log("browser")
    for width in (1280, 420):
        show(browser, page, width=width)
        if is_open:
            browser.execute_script(
                "document.querySelectorAll('details').forEach((d) => d.open = true)"
            )
        found = browser.execute_script(READ)
        assert found["title"].startswith("test: what w")
        assert found["headings"][0] == 1
        assert all(after <= before + 1 for before, after in pairwise(found["headings"]))
        assert all(found["alts"])
        assert found["drawn"]
        assert (found["loaded"], found["scripts"], found["unnamed"]) == ([], 0, 0)
        assert found["overflow"] <= 0
        assert found["outside"] == []
    assert browser.get_log("browser") == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "shown", [{}, {"scheme": "dark"}, {"media": "print"}], ids=["light", "dark", "print"]
)
def test_all_texts_stand_out(browser, page, shown):
    """Contrast as WCAG 2 defines it, of each text against what is behind it."""
    show(browser, page, **shown)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => d.open = true)")
    found = browser.execute_script(CONTRASTS)
    assert len(found) > 50
    assert [text for contrast, text in found if contrast < 4.5] == []


@pytest.mark.more
@pytest.mark.parametrize("maker", [release, synthetic])
def test_a_page_of_seven_columns_has_four_sheets(browser, maker, tmp_path):
    """The promise, the attacker, the columns and the decision are on paper; numbers and code are not."""
    output = maker(tmp_path, schema=SEVEN | {name: {"role": "drop"} for name in SCHEMA})
    (tmp_path / "page.html").write_bytes(make_page(*parts(output))[0])
    show(browser, tmp_path / "page.html", media="print")
    heights = "return [...document.querySelectorAll(arguments[0])].map((each) => each.getBoundingClientRect().height)"
    assert min(browser.execute_script(heights, ".fold.print table, .fold.print p, .line")) > 0
    assert max(browser.execute_script(heights, "pre, figure details table")) == 0
    show(browser, tmp_path / "page.html")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))) <= 4
