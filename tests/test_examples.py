"""Every block of the README and of the tutorials runs, in order, and prints what the page says, up to numbers."""

from pathlib import Path

import pytest

from docs.site import examples

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


@pytest.mark.filterwarnings(
    "ignore:The inplace keyword:DeprecationWarning"
)  # of dask.dataframe.read_parquet
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    hint = "run: python docs/site/examples.py README.md docs/tutorials/*.md"
    assert examples.run_page(text) == text, hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```yaml\ncolumns: {}\n```\n", "begins with the name of its file"),
        ("```bash\nrm -r out\n```\n", "only commands of dpdask"),
        ("```bash\ndpdask validate gone.yaml\n```\n", "ended with 64"),
        ("```bash\ndpdask validate gone.yaml  # exits with 65\n```\n", "ended with 64"),
    ],
)
def test_a_wrong_block_is_refused(text, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=problem):
        examples.run_page(text)


def test_what_is_printed_replaces_what_the_page_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "```python\nfor line in 'abcd': print(line)\n```\n\n```text\n{}```\n"
    assert examples.run_page(page.format("old\n")) == page.format("a\nb\nc\nd\n")
    assert examples.run_page(page.format("a\n…\nx\ny\n")) == page.format("a\n…\nc\nd\n")
    numbers = "```python\nprint('in', 1.5, 'days by', 'ab12' * 8)\n```\n\n```text\nin 7 days by {}\n```\n".format(
        "0" * 32
    )
    assert examples.run_page(numbers) == numbers


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert len(text.partition("## Where to go")[0].split()) <= 600
