"""The survey's form in headless Chromium: asked, answered, saved, ingested; drawn by the library's own distribution; sealed."""

import json
import time

import numpy as np
import pytest
from scipy import stats

import dpdask
from dpdask.mechanisms.interval.fit import range_randomiser
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.streams import RunKey, stream, words
from dpdask.survey import Survey

selenium = pytest.importorskip("selenium", reason="no selenium: install the extra dpdask[test]")
from selenium.webdriver.common.by import By  # noqa: E402 - after the skip

TINY = 1e-8  # the chance that a right page fails one comparison
# in the browser, not in the page: what the page takes for the system's random bits (mulberry32)
SEEDED = """
let state = 20260101;
Crypto.prototype.getRandomValues = (array) => array.map((_, i) => {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return (array[i] = (t ^ (t >>> 14)) >>> 0);
});"""
REFERENCE = {"name": "lognorm", "s": 0.6, "scale": 40_000}
DESIGN = {
    "design": "progressive",
    "anchors": REFERENCE,
    "tau": {"name": "beta", "a": 2, "b": 30},
    "reference": REFERENCE,
    "rounds": 5,
}
DESIGNS = {
    "whole numbers, a distribution of tau": ("int64", DESIGN),
    "uniform anchors": (
        "float64",
        {**DESIGN, "anchors": {"name": "uniform", "loc": 0, "scale": 150_000}, "tau": 0.05},
    ),
    "a discrete reference": (
        "int64",
        {
            **DESIGN,
            "anchors": {"name": "norm", "loc": 30, "scale": 15},
            "reference": {"name": "poisson", "mu": 30},
        },
    ),
    "the best for the mean": (
        "float64",
        {**DESIGN, "anchors": {"optimal_for": "mean"}, "rounds": 12, "tau": 0.0},
    ),
}
VALUES = stats.lognorm(s=0.6, scale=40_000).rvs(8000, random_state=2)


def survey(type_, design, **more):
    schema = dpdask.Schema.from_dict(
        {"columns": {"income": {"role": "privatise", "kind": "continuous", "type": type_}}}
    )
    return Survey(
        schema,
        columns={"income": design},
        wording={"income": {"of": "your income", "unit": "euro", **more}},
    )


@pytest.fixture
def seeded(browser):
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SEEDED})
    yield browser
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def open_form(browser, folder, made, **options):
    path = folder / "form.html"
    path.write_text(made.form(title="A survey", **options), encoding="utf-8")
    browser.get(path.as_uri())


def by(browser, id_):
    return browser.find_element(By.ID, id_)


def is_shown(browser, id_):
    return bool(by(browser, id_).is_displayed())


def asked(browser):
    text = by(browser, "question").text
    assert text.startswith("Is your income at most ")
    assert text.endswith(" euro?")
    return float(text.split()[5].replace(",", ""))


def _saved(folder):
    return b"".join(path.read_bytes() for path in folder.glob("survey-*.json"))


def save(browser, folder):
    browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
    )
    by(browser, "save").click()
    deadline = time.monotonic() + 60
    # Chromium makes the file before it writes it; a whole one ends its document
    while not (content := _saved(folder)).rstrip().endswith(b"}") and time.monotonic() < deadline:
        time.sleep(0.02)
    return content


def test_three_rounds_are_answered_saved_and_ingested(seeded, tmp_path):
    made, value = survey("int64", {**DESIGN, "tau": 0.0, "rounds": 3}), 40_000
    open_form(seeded, tmp_path, made, respondent="r 1")
    low, high, n_asked = -np.inf, np.inf, 0
    while is_shown(seeded, "ask"):
        anchor = asked(seeded)
        assert low < anchor < high
        assert by(seeded, "at-most").text == f"Yes, at most {anchor:,.0f} euro"
        assert by(seeded, "more").text == f"No, more than {anchor:,.0f} euro"
        by(seeded, "at-most" if value <= anchor else "more").click()
        low, high, n_asked = (
            (low, anchor, n_asked + 1) if value <= anchor else (anchor, high, n_asked + 1)
        )
    assert n_asked == 3
    summary = by(seeded, "summary").text
    assert all(f"{end:,.0f} euro" in summary for end in (low, high) if np.isfinite(end))
    content = save(seeded, tmp_path)
    assert json.loads(content) == json.loads(by(seeded, "file").text)
    assert set(json.loads(content)) == {
        "format",
        "survey",
        "respondent",
        "convention",
        "income_lower",
        "income_upper",
    }
    released = made.ingest(content)
    assert released.to_dict("records") == [
        {"respondent": "r 1", "income_lower": low, "income_upper": high}
    ]


def test_a_respondent_may_take_back_and_stop(seeded, tmp_path):
    made = survey("float64", {**DESIGN, "tau": 0.0, "rounds": 3}, decimals=2)
    open_form(seeded, tmp_path, made)
    assert not is_shown(seeded, "undo")
    first = asked(seeded)
    assert first == round(first, 2)
    by(seeded, "at-most").click()
    second = asked(seeded)
    assert second < first
    assert "at most" in by(seeded, "known").text
    by(seeded, "undo").click()
    assert asked(seeded) == first
    assert "everybody" in by(seeded, "known").text
    by(seeded, "at-most").click()
    assert asked(seeded) == second  # the same answers have the same questions
    by(seeded, "stop").click()
    by(seeded, "back").click()
    by(seeded, "undo").click()
    by(seeded, "more").click()
    by(seeded, "stop").click()
    assert is_shown(seeded, "done")
    content = save(seeded, tmp_path)
    assert str(second) not in content.decode()
    released = made.ingest(content)
    assert released.to_dict("records") == [{"income_lower": first, "income_upper": np.inf}]
    by(seeded, "back").click()
    assert is_shown(seeded, "ask")


def test_respondents_choose_their_own_tau(seeded, tmp_path):
    made = survey("int64", {**DESIGN, "tau": 0.1, "rounds": 8})
    open_form(seeded, tmp_path, made, own_tau=True)
    box = by(seeded, "least")
    for wrong in ("9", "101", ""):
        box.clear()
        box.send_keys(wrong)
        by(seeded, "begin").click()
        assert by(seeded, "least-wrong").text == "Please give a number from 10 to 100."
    box.clear()
    box.send_keys("100")
    by(seeded, "begin").click()
    assert is_shown(seeded, "done")
    assert made.ingest(by(seeded, "file").text.encode())["income_upper"].tolist() == [np.inf]
    assert not is_shown(seeded, "back")


def narrowed(browser, values, source="narrowing.draw(asked)", **more):
    """The ranges of values whose owners answer every question that the page asks; infinite ends do not travel as JSON."""
    script = """
    const [values, shares, changed] = arguments;
    const asked = { ...narrowing.column(JSON.parse(document.getElementById("survey").textContent).columns[0]), ...changed };
    return values.map((value, row) => {
      const own = shares ? shares[row] : SOURCE;
      let state = narrowing.start(narrowing.quantile(own[0], asked.tau), own);
      for (let next = narrowing.propose(asked, state); next; next = narrowing.propose(asked, state)) {
        state = narrowing.answer(state, next, value <= next.anchor);
      }
      return [state.low, state.high].map((end) => (Number.isFinite(end) ? end : String(end)));
    });""".replace("SOURCE", source)
    found = browser.execute_script(
        script, values.tolist(), more.get("shares"), more.get("changed", {})
    )
    return np.array(
        [[float(end) for end in pair] for pair in found]
    )  # "Infinity" is a float to Python too


@pytest.mark.parametrize("name", list(DESIGNS))
def test_the_page_narrows_as_the_library_to_the_last_bit(browser, tmp_path, name):
    made = survey(*DESIGNS[name])
    open_form(browser, tmp_path, made)
    step = made._drawn.questions[0].step
    values = np.floor(VALUES[:500]) if step.lattice else VALUES[:500]
    values = values % 60 if "poisson" in str(DESIGNS[name]) else values
    drawn = words(stream(RunKey.insecure(5), "t", name), 500, step.words_per_row)
    drawn[:40, 1] >>= np.uint64(20)  # shares of the first and last cells too
    drawn[40:80, 1] |= np.uint64(2**64 - 2**44)
    shares = ((drawn >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    lower, upper = step.ranges(values, drawn)
    np.testing.assert_array_equal(
        narrowed(browser, values, shares=shares.tolist()), np.column_stack([lower, upper])
    )
    assert len(np.unique(lower)) > 10


def differ(found, other):
    """Whether two samples of ranges have different distributions, by the Kolmogorov-Smirnov test of three of their features."""
    distribution = stats.lognorm(s=0.6, scale=40_000)
    ranks = [distribution.cdf(ranges) for ranges in (found, other)]
    features = [(rank[:, 0], rank[:, 1], rank[:, 1] - rank[:, 0]) for rank in ranks]
    return min(stats.ks_2samp(one, two).pvalue for one, two in zip(*features, strict=True)) < TINY


def test_the_page_s_draws_have_the_library_s_distribution(seeded, tmp_path):
    made = survey("int64", DESIGN)
    open_form(seeded, tmp_path, made)
    values = np.floor(VALUES)

    def library(design):
        column = IntervalSpec.model_validate({"columns": {"income": design}}).columns["income"]
        step = range_randomiser("income", column, lattice=True).step
        many = np.tile(values, 4)
        return np.column_stack(
            step.ranges(
                many, words(stream(RunKey.insecure(6), "t", "f"), len(many), step.words_per_row)
            )
        )

    page, right = narrowed(seeded, values), library(DESIGN)
    assert not differ(page, right)
    assert len(np.unique(page, axis=0)) > 1000  # drawn, not repeated
    for wrong in ({"stop": "own"}, {"anchors": {**REFERENCE, "scale": 80_000}}):
        assert differ(page, library({**DESIGN, **wrong})), wrong
    for bent in ("(share) => 0.5 * share", "(share, i, all) => all[0]"):
        assert differ(narrowed(seeded, values, f"narrowing.draw(asked).map({bent})"), right), bent


def test_the_page_s_random_numbers_are_uniform_and_fine(browser, tmp_path):
    open_form(browser, tmp_path, survey("int64", DESIGN))
    shares = np.array(
        browser.execute_script("return Array.from({ length: 20000 }, narrowing.secure)")
    )
    assert stats.kstest(shares, "uniform").pvalue > TINY
    low_bits = (shares * 2.0**53).astype(np.uint64) % np.uint64(1024)
    assert stats.chisquare(np.bincount(low_bits.astype(np.int64) >> 5, minlength=32)).pvalue > TINY


def test_the_page_loads_and_sends_nothing_and_can_be_used_by_all(seeded, tmp_path):
    seeded.get_log("browser")
    seeded.set_window_size(360, 640)
    open_form(seeded, tmp_path, survey("int64", {**DESIGN, "tau": 0.0}))
    assert seeded.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert seeded.get_log("browser") == []
    sent = "fetch('http://localhost:9/').then(() => arguments[0]('sent'), () => arguments[0]('refused'))"
    assert seeded.execute_async_script(sent) == "refused"
    assert any("Content Security Policy" in entry["message"] for entry in seeded.get_log("browser"))
    assert seeded.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert seeded.execute_script("return document.activeElement.id") == "question"
    colours = []
    for scheme in ("light", "dark"):
        seeded.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        colours.append(
            seeded.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
    assert colours[0] != colours[1]
    unnamed = "return [...document.querySelectorAll('button, input')].filter((e) => !(e.innerText || e.textContent || e.labels?.length)).map((e) => e.id)"
    assert seeded.execute_script(unnamed) == []
