"""The site: its navigation, the links between its pages, and what is computed from the code. `.ci/run` builds it."""

import json
import re
from pathlib import Path

import pytest

from docs.site import pages

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
    found += ["README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"]
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
        ("index.md", "docs/README.md", "pages.md"),
        ("pages.md", "how-to/audit.md", "how-to/audit.md"),
        ("pages.md", "../README.md", "index.md"),
        ("index.md", "docs/how-to/audit.md#x", "how-to/audit.md#x"),
        ("how-to/audit.md", "../../cluster/tls/README.md", "../cluster/tls/README.md"),
        ("how-to/audit.md", "../../README.md", "../index.md"),
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
        ("job", ["| `epsilon` | number or object | required | ε, in (0, 100].", "### DipSpec"]),
        ("schema", ["| `role` | `keep` or `privatise` or `drop` | required |"]),
        ("card", ["### Guarantee"]),
        ("command-line", ["### dpdask ledger init", "--scheduler"]),
    ],
)
def test_references_are_computed_from_the_code(name, lines):
    assert f"<!-- generated: {name} -->" in (ROOT / "docs" / "reference" / f"{name}.md").read_text(
        encoding="utf-8"
    )
    text = pages.generate(name)
    assert [line for line in lines if line not in text] == []
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= {
        heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)
    }


def test_a_tutorial_is_a_notebook():
    pytest.importorskip("jupytext")
    tutorial = "# A\n\n```yaml\n# job.yaml\nname: a\n```\n\n```bash\ndpdask run job.yaml\n```\n\n```text\nout\n```\n"
    cells = json.loads(pages.notebook(tutorial))["cells"]
    found = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert found == ["%%writefile job.yaml\nname: a", "%%bash\ndpdask run job.yaml"]
