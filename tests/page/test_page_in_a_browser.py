"""The page of a release in headless Chromium: nothing runs, nothing is loaded, nothing overflows, and all texts can be read."""

import pytest
from page.pages import parts, release, synthetic

from dpdask.page import make_page

MAKERS = {"rows": release, "records": synthetic}
READ = """
const box = (element) => element.getBoundingClientRect();
const images = [...document.images];
return {
  title: document.title,
  headings: [...document.querySelectorAll("h1, h2, h3")].map((each) => Number(each.tagName[1])),
  alts: images.map((each) => each.alt),
  drawn: images.every((each) => each.complete && each.naturalWidth > 0),
  loaded: performance.getEntriesByType("resource").map((each) => each.name).filter((name) => !name.startsWith("data:")),
  scripts: document.scripts.length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  unnamed: [...document.querySelectorAll("[role=region], nav, pre[tabindex]")].filter((each) => !each.getAttribute("aria-label")).length,
};"""


@pytest.fixture(scope="module", params=MAKERS)
def page(request, tmp_path_factory):
    output = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    data, faults = make_page(*parts(output))
    assert faults == ()
    path = output.parent / "release.html"
    path.write_bytes(data)
    return path


@pytest.mark.few(1)
def test_a_page_can_be_read(browser, page):
    browser.get_log("browser")
    for width in (1280, 390):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        browser.get(page.as_uri())
        found = browser.execute_script(READ)
        assert found["title"] == "test: what was released, and what was promised"
        assert found["headings"][0] == 1
        assert all(
            after <= before + 1
            for before, after in zip(found["headings"], found["headings"][1:], strict=False)
        )
        assert len(found["alts"]) >= 4
        assert all(found["alts"])
        assert found["drawn"]
        assert (found["loaded"], found["scripts"], found["unnamed"]) == ([], 0, 0)
        assert found["overflow"] <= 0
    assert browser.get_log("browser") == []


def test_numbers_are_on_paper(browser, page):
    """What is folded on a screen is printed, and no command or code is cut."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.get(page.as_uri())
    heights = browser.execute_script(
        "return [...document.querySelectorAll('details table')].map((each) => each.getBoundingClientRect().height);"
    )
    cut = browser.execute_script(
        "return [...document.querySelectorAll('pre')].filter((each) => each.scrollWidth > each.clientWidth).length;"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert cut == 0
    assert heights
    assert min(heights) > 0
