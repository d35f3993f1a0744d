"""The site: its navigation, the links between its pages, and what is computed from the code. `.ci/run` builds it."""

import base64
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import dpdask
from docs.site import pages
from pipelines.gallery import make

ROOT = Path(__file__).parents[1]
NAVIGATION = re.findall(
    r"^ +- (?:.*: )?(\S+\.md)$",
    (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_page_is_in_the_navigation_once():
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("docs", "cluster", "pipelines")
        for path in (ROOT / folder).rglob("*.md")
    ]
    found += ["README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"]
    assert sorted(map(pages.place_in_site, found)) == sorted(NAVIGATION)


@pytest.mark.parametrize("uri", NAVIGATION)
def test_links_lead_to_files_of_the_site(uri):
    path = ROOT / pages.place_in_repository(uri)
    text = re.sub(
        r"^```.*?^```$",
        "",
        pages.with_links(path.read_text(encoding="utf-8"), uri),
        flags=re.DOTALL | re.MULTILINE,
    )
    targets = [
        pages.posixpath.normpath(pages.posixpath.join(pages.posixpath.dirname(uri), target))
        for _, target, _ in pages.LINK.findall(text)
    ]
    shown = ("docs", *pages.FOLDERS, *pages.SHOWN)
    places = [pages.place_in_repository(target) for target in targets]
    assert [
        place for place in places if not (ROOT / place).is_file() or not place.startswith(shown)
    ] == []


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("readme.md", "docs/README.md", "pages.md"),
        ("pages.md", "how-to/audit.md", "how-to/audit.md"),
        ("pages.md", "../README.md", "readme.md"),
        ("index.md", "how-to/audit.md#x", "how-to/audit.md#x"),
        ("how-to/audit.md", "../../cluster/tls/README.md", "../cluster/tls/README.md"),
        ("how-to/audit.md", "../../README.md", "../readme.md"),
        ("cluster/README.md", "../docs/reference/job.md", "../reference/job.md"),
        ("cluster/README.md", "tls/", "tls/README.md"),
        ("pipelines/README.md", "benchmarks/", "#"),
        ("index.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("index.md", "#install", "#install"),
    ],
)
def test_links_are_turned(uri, link, expected):
    assert pages.with_links(f"[a]({link})", uri) == f"[a]({expected})"
    assert pages.with_links(f"```text\n[a]({link})\n```", uri) == f"```text\n[a]({link})\n```"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "job",
            [
                "| `epsilon` | number or object | required | ε, in (0, 100].",
                "### mechanism of the kind dip",
                "### mechanism / reference of the kind holdout",
                "[privacy](#privacy)",
            ],
        ),
        ("schema", ["| `role` | `keep` or `privatise` or `drop` | required |"]),
        ("card", ["### guarantee"]),
        ("command-line", ["### dpdask ledger init", "--scheduler"]),
    ],
)
def test_references_are_computed_from_the_code(name, lines):
    assert f"<!-- generated: {name} -->" in (ROOT / "docs" / "reference" / f"{name}.md").read_text(
        encoding="utf-8"
    )
    text = pages.generate(name)
    assert [line for line in lines if line not in text] == []
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert len(set(headings)) == len(headings)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(map(pages.find_anchor, headings))


def test_a_tutorial_is_a_notebook():
    pytest.importorskip("jupytext")
    picture = ROOT / "docs/tutorials/costs.png"
    assert picture.stat().st_size <= 40_000
    tutorial = "# A\n\n```yaml\n# job.yaml\nname: a\n```\n\n```bash\ndpdask run job.yaml\n```\n\n```text\nout\n```\n\n![a plot](costs.png)\n"
    cells = json.loads(pages.notebook(tutorial, picture.parent))["cells"]
    assert "costs.png" not in json.dumps([cell["source"] for cell in cells])
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert found == ["%%writefile job.yaml\nname: a", "%%bash\ndpdask run job.yaml"]
    printed = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    [nothing, [told, drawn]] = printed
    assert (nothing, "".join(told["text"])) == ([], "out\n")
    assert base64.b64decode(drawn["data"]["image/png"]) == picture.read_bytes()
    assert "".join(drawn["data"]["text/plain"]) == "a plot"


def test_the_gallery_has_a_page_of_each_of_its_jobs(tmp_path):
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert re.findall(r"`(\w+)\.html`", page) == list(make.list_jobs())
    [out] = make.release(tmp_path, ("marginals",)).values()
    assert (out / "_dpdask" / "release.html").is_file()


@pytest.mark.parametrize("name", ["index", "reference/cheat-sheet"])
def test_what_pages_ask_a_release_is_answered(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    [out] = make.release(tmp_path, ("copula",)).values()
    for link in ("data-released", "patients-released"):
        (tmp_path / link).symlink_to(out)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    names = {"dpdask": dpdask}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, name, "exec"), names)
        names["result"] = names["release"].mean("cost")


def test_the_picture_has_six_histograms_with_what_is_told_of_both():
    rows = make.simulate()
    picture = ET.fromstring(make.draw(rows, rows.sample(2_000, random_state=1)))
    texts = ["".join(each.itertext()) for each in picture.iter() if each.tag.endswith("text")]
    assert [text for text in texts if text in make.COLUMNS] == list(make.COLUMNS)
    assert picture.get("aria-label", "").startswith("Six histograms")
    heights = [
        float(each.get("height")) for each in picture.iter() if each.get("fill") == make.AFTER
    ]
    assert max(heights[1:]) == pytest.approx(make.HEIGHT, rel=0.1)
